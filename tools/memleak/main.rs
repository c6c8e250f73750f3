//! memleak: memory that a process or the kernel allocated and has not freed, by call stack.
//!
//! There are five kinds of runs. [`processes`] traces the allocations of processes, by uprobes on the allocators'
//! functions (`bpf/memleak.bpf.c`). [`kernel`] traces those of the kernel, by tracepoints. [`heap`], [`growth`] and
//! [`verdict`] examine the heap of a live process without probes. Both traces are a [`source`] of outstanding
//! allocations, and [`reporter`] makes reports of either, by stack ([`sums`], [`rows`]).

mod args;
mod difference;
mod growth;
mod heap;
mod kernel;
mod processes;
mod reporter;
mod rows;
mod sampling;
mod serve;
mod source;
mod sums;
mod verdict;
mod whole;

use std::process::ExitCode;

use anyhow::Result;
use memtools::run::cli;

use crate::args::Args;

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    let args = args.check()?;
    if args.verdict.wanted(&args)? {
        verdict::run(&args)
    } else if let Some(period) = args.growth.wanted(&args.pid)? {
        growth::run(&args, period)
    } else if args.heap.wanted(&args.pid)? {
        heap::run(&args)
    } else if kernel::args::wanted(&args)? {
        kernel::run(&args)
    } else {
        processes::run(&args)
    }
}
