//! What the tools of bpf-memtools share: the nouns of tracing, and no knowledge of any one tool.
//!
//! # An event's life
//!
//! A hook fires; the handler in `bpf/<tool>.bpf.c` filters, and writes into a ring buffer or a map.
//! [`events::Events::follow`] waits in a [`poll::Poller`], turns the bytes into the type that the
//! skeleton generated from the C struct, and gives it to the tool, which makes a [`output::Row`] of
//! it. [`output::Output`] prints that as text or JSON and flushes once per wake-up. At the end the
//! probes are detached, what is left is drained, and the tool reports its [`losses::Losses`].
//!
//! # Modules
//!
//! | module | what it is for |
//! |---|---|
//! | [`cli`] | running a tool: arguments, exit status, errors |
//! | [`kernel`] | what this kernel and this user allow, with the remedy where they do not |
//! | [`filter`] | which tasks are traced: processes, names, a cgroup |
//! | [`follow`] | the processes that a traced command starts |
//! | [`attach`] | a ladder of variants of the same hook, tried from the best down |
//! | [`kernel_types`] | the kernel's types that a BPF object is fitted to |
//! | [`process`] | a process to be traced: is it there, what is it, what has it mapped |
//! | [`command`] | a command to be traced, held before exec until the probes are live |
//! | [`target`] | what is traced: what the filter lets through, or a command |
//! | [`elf`] | functions of an ELF file by name |
//! | [`placement`] | where in a function a uprobe costs least |
//! | [`wrappers`] | functions that only pass a call on to another one |
//! | [`mappings`] | code mappings as processes make them, from the kernel's own log |
//! | [`address_space`] | what code processes have mapped, now and before |
//! | [`poll`] | one wait for events, ticks, signals and the target's end |
//! | [`events`] | typed events from the ring buffer |
//! | [`stack`] | the table of distinct call stacks |
//! | [`unwind`] | tables by which user stacks are walked without frame pointers |
//! | [`symbolize`] | names for a stack's frames, also of a process that has exited |
//! | [`kallsyms`] | the kernel's own names |
//! | [`perf_map`] | names that JIT compilers write down |
//! | [`stack_count`] | counts by process and stack, kept in the kernel |
//! | [`maps`] | maps that are made while a tool runs |
//! | [`mapped_array`] | arrays that are read without system calls |
//! | [`entries`] | all entries of a map |
//! | [`counts`] | counts by key, as what has come since the last look |
//! | [`recorded`] | what the kernel half writes once and refers to: stacks, names |
//! | [`reports`] | when a tool that counts reports |
//! | [`folded`] | stacks as flame graph tools read them |
//! | [`cgroup`] | cgroups by their ids |
//! | [`gfp`] | allocation flags by name |
//! | [`histogram`] | distributions by powers of two |
//! | [`output`] | rows as text or JSON |
//! | [`text`] | strings from elsewhere, made safe for a terminal |
//! | [`mod@file`] | names and paths of files, as the kernel half writes them |
//! | [`flags`] | flag words by name |
//! | [`errno`] | results of system calls, and errors by name |
//! | [`clock`] | kernel time stamps as wall time |
//! | [`losses`] | what could not be recorded |
//! | [`run_time`] | how often BPF programs ran, and how long |
//! | [`shared`] | structs generated from the BPF headers |
//!
//! How to add a tool is in CONTRIBUTING.md.

pub mod address_space;
pub mod attach;
pub(crate) mod btf;
pub mod cgroup;
pub mod cli;
pub mod clock;
pub mod command;
pub mod counts;
pub mod elf;
pub mod entries;
pub mod errno;
pub mod events;
mod fentry;
pub mod file;
pub mod filter;
pub mod flags;
pub mod folded;
pub mod follow;
pub mod gfp;
pub mod histogram;
pub mod kallsyms;
pub mod kernel;
pub mod kernel_types;
pub mod losses;
pub mod mapped_array;
pub mod mappings;
pub mod maps;
pub mod output;
pub mod perf_map;
pub mod placement;
pub mod poll;
pub mod process;
pub mod recorded;
pub mod reports;
pub mod run_time;
pub mod shared;
pub mod stack;
pub mod stack_count;
pub mod symbolize;
pub mod target;
pub mod text;
pub mod unwind;
pub mod wrappers;
