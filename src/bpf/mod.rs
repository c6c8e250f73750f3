//! Room `bpf`: BPF objects, their maps and hooks, and what this kernel allows.
//!
//! | module | what it is for |
//! |---|---|
//! | [`kernel_support`] | what this kernel and this user allow, with the remedy where they do not |
//! | [`kernel_differences`] | what hooks and structs are called, kernel by kernel: documentation only |
//! | [`attach`] | a ladder of variants of the same hook, tried from the best down |
//! | [`software_event`] | programs on events that the kernel counts itself, on all CPUs |
//! | `raw_tracepoint` | programs on tracepoints that are attached and detached while a tool runs |
//! | `kretprobe` | programs on the return of kernel functions, for many threads at once |
//! | [`btf_subset`] | the kernel's types that a BPF object is fitted to |
//! | `generated` | what libbpf-cargo makes of an object |
//! | [`types`] | structs generated from the BPF headers |
//! | [`ring`] | typed events from the ring buffer |
//! | [`map_create`] | maps that are made while a tool runs |
//! | [`map_batch`] | all entries of a map |
//! | [`map_counts`] | counts by key, as what has come since the last look |
//! | [`map_cache`] | what the kernel half writes once and refers to: names |
//! | [`room`] | how full the tables are that programs add to, and when they are to grow |
//! | [`map_mmap`] | arrays that are read without system calls |
//! | `test_run` | programs that we run ourselves |
//! | [`program_stats`] | how often the kernel has skipped BPF programs |

pub mod attach;
pub(crate) mod btf;
pub mod btf_subset;
mod fentry_id;
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
pub mod room;
pub mod software_event;
pub(crate) mod test_run;
pub mod types;
