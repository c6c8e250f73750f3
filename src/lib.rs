//! What the tools of bpf-memtools share: the nouns of tracing, and no knowledge of any one tool.
//!
//! # An event's life
//!
//! A hook fires; the handler in `bpf/<tool>.bpf.c` filters, and writes into a ring buffer or a map.
//! The tool's loop waits in [`poll::Poller`]; [`events::Events`] turns the bytes into the type that
//! the skeleton generated from the C struct; the tool makes a [`output::Row`] of it, and
//! [`output::Output`] prints that as text or JSON and flushes once per wake-up. At the end the
//! tool detaches, drains once more, prints its summary and reports its [`losses::Losses`].
//!
//! # Modules
//!
//! | module | what it is for |
//! |---|---|
//! | [`cli`] | running a tool: arguments, exit status, errors |
//! | [`kernel`] | what this kernel and this user allow, with the remedy where they do not |
//! | [`filter`] | which tasks are traced: processes, names, a cgroup |
//! | [`attach`] | a ladder of variants of the same hook, tried from the best down |
//! | [`process`] | a process to be traced: is it there, what is it, what has it mapped |
//! | [`command`] | a command to be traced, held before exec until the probes are live |
//! | [`target`] | what is traced: what the filter lets through, or a command |
//! | [`elf`] | functions of an ELF file by name |
//! | [`placement`] | where in a function a uprobe costs least |
//! | [`mappings`] | code mappings as processes make them, from the kernel's own log |
//! | [`address_space`] | what code processes have mapped, now and before |
//! | [`poll`] | one wait for events, ticks, signals and the target's end |
//! | [`events`] | typed events from the ring buffer |
//! | [`stack`] | the table of distinct call stacks |
//! | [`symbolize`] | names for a stack's frames, also of a process that has exited |
//! | [`kallsyms`] | the kernel's own names |
//! | [`perf_map`] | names that JIT compilers write down |
//! | [`stack_count`] | counts by process and stack, kept in the kernel |
//! | [`counts`] | counts by key, as what has come since the last look
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
//! | [`shared`] | structs generated from the BPF headers |
//!
//! How to add a tool is in CONTRIBUTING.md.

pub mod address_space;
pub mod attach;
pub mod cgroup;
pub mod cli;
pub mod clock;
pub mod command;
pub mod counts;
pub mod elf;
pub mod errno;
pub mod events;
pub mod file;
pub mod filter;
pub mod flags;
pub mod folded;
pub mod gfp;
pub mod histogram;
pub mod kallsyms;
pub mod kernel;
pub mod losses;
pub mod mappings;
pub mod output;
pub mod perf_map;
pub mod placement;
pub mod poll;
pub mod process;
pub mod shared;
pub mod stack;
pub mod stack_count;
pub mod symbolize;
pub mod target;
pub mod text;
