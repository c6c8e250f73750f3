//! memleak: memory that a process or the kernel allocated and has not freed, by call stack.
//!
//! Five kinds of runs: [`processes`] traces allocations by uprobes on the allocators' functions
//! (`bpf/memleak.bpf.c`), [`kernel`] those of the kernel by tracepoints, and
//! [`heap`], [`growth`] and [`verdict`] look at a live heap without probes. A trace is a [`source`] of what is
//! outstanding; [`reporter`] makes reports of either, by stack ([`sums`], [`rows`]).

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
