//! Library of the bpf-memtools tools: building blocks for tracing, without knowledge of any one tool.
//!
//! # The life of an event
//!
//! A hook fires. Its handler in `bpf/<tool>.bpf.c` filters, and writes an event into a ring buffer.
//! [`ring::Events::follow`](bpf::ring::Events::follow) waits in a [`Poller`](run::poll::Poller), turns the bytes into
//! the type that the skeleton generated from the C struct, and passes the event to the tool, which makes a
//! [`Row`](print::output::Row) of it. [`Output`](print::output::Output) prints the row as text or JSON, and flushes
//! once per wake-up. At the end the probes are detached, the rest of the ring buffer is drained, and the tool reports
//! its [`Losses`](run::losses::Losses).
//!
//! # The life of a count
//!
//! Events that happen too often to be sent one by one are counted in the kernel. The handler unwinds the call stack,
//! finds or makes the stack's id in the [stack table](stacks::table), and adds to the count of process and stack in
//! one of two maps. When the map fills, and for a report, a thread switches the BPF program to the other map, and reads
//! and empties the first one ([`map_counts`](bpf::map_counts)). The main thread symbolizes the stacks' frames
//! ([`symbolize`](stacks::symbolize)) and prints: the other thread never waits for a reader of the output. Events and
//! stacks that a full map could not take are counted by reason in the kernel, and are reported beside the counts.
//!
//! # Rooms
//!
//! Each row is a floor: a module imports only from the rows above its own. `tests/suite.rs` reads the order here.
//!
//! | module | content |
//! |---|---|
//! | [`parse`] | values of options, and the error of wrong usage |
//! | [`mod@print`] | how a value becomes text or JSON |
//! | [`host`] | what the kernel itself tells about memory and the machine, without tracing |
//! | [`mod@bpf`] | BPF objects, their maps and hooks, and what this kernel allows |
//! | [`code`] | machine code and the ELF files that it comes from |
//! | [`mod@process`] | the traced processes, and what they have mapped |
//! | [`watch`] | memory of the machine, cgroups and processes, watched for weeks, and rules that see growth |
//! | [`interpreters`] | Python and Java frames: which function an interpreter executes in a native frame |
//! | [`stacks`] | call stacks, from the unwinding in BPF programs to the symbols |
//! | [`heap`] | the heap of a live process, found in a copy of its memory |
//! | [`export`] | symbolized stacks, and sums, in the formats that people and other programs read |
//! | [`serve`] | the current report, for browsers and other programs, over HTTP |
//! | [`run`] | the user-space side of a tool, from its arguments to its exit status |
//! | [`push`] | profiles sent to a profile store |
//! | [`verdict`] | which blocks of a heap are lost and what references the rest, as heapscan and memleak print it |
//!
//! How to add a tool is in CONTRIBUTING.md.

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!(
    "this architecture is not supported: CONTRIBUTING.md, \"Add an architecture\", lists the files that it lacks"
);

pub mod bpf;
pub mod code;
pub mod export;
pub mod heap;
pub mod host;
pub mod interpreters;
pub mod parse;
pub mod print;
pub mod process;
pub mod push;
pub mod run;
pub mod serve;
pub mod stacks;
pub mod verdict;
pub mod watch;
