//! Room `heap`: a live process's heap, found in a copy of its memory, with nothing traced.
//!
//! A process stands still for as long as its memory takes to be copied. Everything else is found
//! out from that [`Image`](image::Image) afterwards, by pure functions: the blocks that the program
//! has and the chunks that are free, by the structures of its allocator alone, with neither symbols
//! nor a table of versions, and with a proof that none was missed.
//!
//! | module | what it is for |
//! |---|---|
//! | [`image`] | what a process was at one moment |
//! | [`capture`] | taking the image of a live process |
//! | [`area`] | a mapping, with what may be done with its memory |
//! | [`blocks`] | the blocks of a heap, and the block that an address is in |
//! | [`walk`] | the heaps of a process, in as many images as it takes |
//! | [`glibc`] | the heap of glibc's malloc |
//! | [`jemalloc`] | the heap of jemalloc |
//! | [`names`] | the types of blocks: C++ classes, Python objects, strings, containers |
//! | [`mallocng`] | the heap of musl's malloc |
//! | [`idle`] | which pages nobody has used for a while |
//! | [`page_table`] | a number for each page of an address space |
//! | `clear_refs` | having the kernel clear the marks of used and of written pages |
//! | `page_runs` | ranges of whole pages |
//! | `realtime` | running before everything else |
//! | `untrusted` | what the walks share: bounds, and words that may not be there |
//! | [`kernel`] | words that the kernel keeps for a process |
//! | [`roots`] | where references begin, and what those places are |
//! | [`reach`] | which blocks can be reached, and by which chain |
//! | [`growth`] | which blocks become ever more, in several images |

pub mod area;
pub mod blocks;
pub mod capture;
mod clear_refs;
pub mod glibc;
pub mod growth;
pub mod idle;
pub mod image;
pub mod jemalloc;
pub mod kernel;
pub mod mallocng;
pub mod names;
mod page_runs;
pub mod page_table;
pub mod reach;
mod realtime;
pub mod roots;
mod untrusted;
pub mod walk;
