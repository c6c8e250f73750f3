//! What the tools of bpf-memtools share: the nouns of tracing, and no knowledge of any one tool.
//!
//! # The life of an event
//!
//! A hook fires; the handler in `bpf/<tool>.bpf.c` filters, and writes into a ring buffer.
//! [`ring::Events::follow`](bpf::ring::Events::follow) waits in a [`Poller`](run::poll::Poller), turns
//! the bytes into the type that the skeleton generated from the C struct, and gives it to the tool,
//! which makes a [`Row`](print::output::Row) of it. [`Output`](print::output::Output) prints that as
//! text or JSON and flushes once per wake-up. At the end the probes are detached, what is left is
//! drained, and the tool reports its [`Losses`](run::losses::Losses).
//!
//! # The life of a count
//!
//! What happens too often for an event each is counted in the kernel. The handler walks the call
//! stack, finds or makes its id in the [stack table](stacks::table), and adds to the count of
//! process and stack in one of two maps. For a report the tool has the kernel half count in the
//! other map, reads and empties the first one ([`map_counts`](bpf::map_counts)), and names the
//! stacks' frames ([`symbolize`](stacks::symbolize)). What a full map had no room for was counted
//! by reason in the kernel, and is reported beside the counts.
//!
//! # Rooms
//!
//! | room | what it holds |
//! |---|---|
//! | [`mod@print`] | how a value becomes text or JSON |
//! | [`mod@bpf`] | BPF objects, their maps and hooks, and what this kernel allows |
//! | [`code`] | machine code and the ELF files that it comes from |
//! | [`host`] | what the kernel tells about memory and the machine by itself, with nothing traced |
//! | [`mod@process`] | who is traced, and what they have mapped |
//! | [`interpreters`] | what the frames of an interpreter's loop execute, in the words of the interpreted language |
//! | [`stacks`] | call stacks, from the kernel half's walk to names |
//! | [`heap`] | the heap of a live process, found in a copy of its memory |
//! | [`export`] | named stacks, and sums, in the formats that people and other programs read |
//! | [`serve`] | the report of the moment, for browsers and other programs, over HTTP |
//! | [`run`] | what the frontend of a tool does from its arguments to its exit status |
//!
//! How to add a tool is in CONTRIBUTING.md.

pub mod bpf;
pub mod code;
pub mod export;
pub mod heap;
pub mod host;
pub mod interpreters;
pub mod print;
pub mod process;
pub mod run;
pub mod serve;
pub mod stacks;
