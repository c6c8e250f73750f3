//! memleak: memory that a process or the kernel allocated and has not freed, by call stack.
//!
//! The options are resolved into a [`plan`]. [`processes`] traces the allocations of processes, by uprobes on the allocators'
//! functions (`bpf/memleak.bpf.c`). [`kernel`] traces the allocations of the kernel, by tracepoints. Both traces are a
//! [`source`] of outstanding allocations, and [`reporter`] makes reports of either, by stack ([`sums`], [`rows`]).
//! [`verdict`] finds out which blocks of a traced process nothing refers to.

mod args;
mod difference;
mod kernel;
mod metrics;
mod plan;
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
use memtools::run::cli::{self, Moved};

use crate::args::Args;
use crate::plan::Plan;

/// Options that other commands have replaced.
const MOVED: [Moved; 9] = [
    ("--heap", "heapscan -p PID --layout"),
    ("--types", "heapscan -p PID --types"),
    ("--growth", "heapscan -p PID --growth 60"),
    ("--churn", "--mode churn"),
    ("--peak", "--mode peak"),
    ("--slab", "--kernel=slab (-k=slab)"),
    ("--pages", "--kernel=pages (-k=pages)"),
    (
        "--memcheck",
        "the rows of --verdict, and the object memcheck of --json",
    ),
    (
        "--verdict",
        "memleak -p PID --verdict VALUE 1, or at the exit of a command: memleak -c COMMAND --verdict",
    ),
];

fn main() -> ExitCode {
    cli::main_with(&MOVED, run)
}

fn run(args: Args) -> Result<ExitCode> {
    match Plan::of(args)? {
        Plan::Processes(plan) => processes::run(&plan, None),
        Plan::Judged(plan, verdict) => processes::run(&plan, Some(&verdict)),
        Plan::Kernel(plan) => kernel::run(&plan),
    }
}
