//! BPF objects, their maps and hooks, and what this kernel allows.
//!
//! | module | what it is for |
//! |---|---|
//! | `arch` | what BPF programs need of the kernel on one architecture |
//! | [`kernel_support`] | what this kernel supports and this user may do, with the remedy for what is missing |
//! | [`kernel_differences`] | names of hooks and structs by kernel version: documentation only |
//! | [`attach`] | a ladder of variants of the same hook, tried from the best down |
//! | [`software_event`] | programs on software perf events, on all CPUs |
//! | `raw_tracepoint` | programs on tracepoints that are attached and detached while a tool runs |
//! | `kretprobe` | programs on the return of kernel functions that many threads are in at once |
//! | `btf` | parser and encoder for BTF |
//! | [`btf_subset`] | the part of the kernel's BTF that a BPF object needs |
//! | `fentry_id` | loading of fentry and fexit programs without a copy of the kernel's BTF |
//! | `generated` | the module that includes libbpf-cargo's code for an object |
//! | [`types`] | structs generated from the BPF headers |
//! | [`ring`] | typed events from the ring buffer |
//! | [`map_create`] | maps that user space creates, sizes, replaces or opens again |
//! | [`map_batch`] | reading of all entries of a map, in batches |
//! | [`map_counts`] | counts by key since the last read |
//! | [`map_cache`] | cache of map entries that BPF programs write once and refer to by key, such as names |
//! | [`fill_level`] | fill levels of the tables that BPF programs add to, and when these tables grow |
//! | [`map_mmap`] | array maps that are mapped into user space and read without system calls |
//! | `test_run` | BPF programs that user space runs itself |
//! | [`program_stats`] | how often the kernel has skipped BPF programs |

#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
mod arch;
pub mod attach;
pub(crate) mod btf;
pub mod btf_subset;
mod fentry_id;
pub mod fill_level;
mod generated;
pub mod kernel_differences;
pub mod kernel_support;
pub(crate) mod kretprobe;
pub mod map_batch;
pub mod map_cache;
pub mod map_counts;
pub mod map_create;
pub mod map_mmap;
pub mod program_stats;
pub(crate) mod raw_tracepoint;
pub mod ring;
pub mod software_event;
pub(crate) mod test_run;
pub mod types;
