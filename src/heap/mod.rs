//! The heap of a live process, found in a copy of its memory, with nothing traced.
//!
//! The process is paused while its memory is copied. Everything else is computed afterwards from that
//! [`Image`](image::Image), by pure functions. Allocated blocks and free chunks are found by the allocator's
//! structures alone, with neither symbols nor a table of versions. The allocator's own counts prove that none was
//! missed.
//!
//! | module | what it is for |
//! |---|---|
//! | `arch` | registers of a stopped thread and the layout of memory, for one architecture |
//! | [`image`] | the image of a process at one moment |
//! | [`capture`] | taking the image of a live process |
//! | [`area`] | a mapping, with its permissions |
//! | [`blocks`] | the blocks of a heap, and the lookup of a block by an address in it |
//! | [`walk`] | the heaps of a process, walked in further images until one is complete |
//! | [`file_words`] | words of mapped files in pages that the process's page table lacks |
//! | [`glibc`] | the heap of glibc's malloc |
//! | [`jemalloc`] | the heap of jemalloc |
//! | [`names`] | the types of blocks: C++ classes, Python objects, strings, containers |
//! | [`mallocng`] | the heap of musl's malloc |
//! | [`idle`] | pages that were not used for a while |
//! | [`page_index`] | a number for each page of an address space |
//! | `clear_refs` | clearing the kernel's marks of used and of written pages |
//! | `page_runs` | ranges of whole pages |
//! | `realtime` | real-time priority while a process is paused |
//! | `untrusted` | what the walks share: bounds, and reads of memory that may hold anything |
//! | [`kernel`] | words that the kernel keeps for a process |
//! | [`roots`] | the places where references begin |
//! | [`reach`] | the blocks that are reachable, and by which chain |
//! | [`runtimes`] | runtimes with heaps of their own: V8, the JVM, Go
//! | [`growth`] | the blocks that grow in number over several images |

#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
mod arch;
pub mod area;
pub mod blocks;
pub mod capture;
mod clear_refs;
pub mod file_words;
pub mod glibc;
pub mod growth;
pub mod idle;
pub mod image;
pub mod jemalloc;
pub mod kernel;
pub mod mallocng;
pub mod names;
pub mod page_index;
mod page_runs;
pub mod reach;
mod realtime;
pub mod roots;
pub mod runtimes;
mod untrusted;
pub mod walk;
