//! memleak: memory that a process or the kernel allocated and has not freed, by call stack.
//!
//! Four kinds of runs: [`processes`] traces allocations by uprobes on the allocators' functions
//! ([`objects`], [`probes`], `bpf/memleak.bpf.c`), [`kernel`] those of the kernel by tracepoints, and
//! [`heap`] and [`verdict`] look at a live heap without probes. A trace is a [`source`] of what is
//! outstanding; [`reporter`] makes reports of either, by stack ([`sums`], [`rows`]).

mod allocators;
mod args;
mod cost;
mod difference;
mod ended;
mod heap;
mod kernel;
mod live;
mod loaded;
mod objects;
mod overhead;
mod pool;
mod probes;
mod processes;
mod regions;
mod reporter;
mod rows;
mod sampling;
mod serve;
mod signature;
mod source;
mod stopped;
mod sums;
mod target;
mod verdict;
mod whole;

use std::process::ExitCode;

use anyhow::Result;
use memtools::run::cli;

use crate::args::Args;

memtools::skeleton!("memleak", MemleakSkelBuilder, stacks: unwound, plain: [block_bucket, event, live_block, live_key, thread, total, total_key]);

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    let args = args.check()?;
    if args.verdict.wanted(&args.pid, &args.difference)? {
        verdict::run(&args)
    } else if args.heap.wanted(&args.pid)? {
        heap::run(&args)
    } else if kernel::args::wanted(&args)? {
        kernel::run(&args)
    } else {
        processes::run(&args)
    }
}
