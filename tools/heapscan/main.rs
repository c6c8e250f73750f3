//! heapscan: the heap of a running process, examined in copies of its memory, without tracing or earlier recordings.
//!
//! The process is stopped while its memory is copied. The walk of its allocators' structures finds the blocks and the
//! free chunks, whenever they were allocated. The plans are one [`screen`], [`sections`] in full, without or with a verdict, and [`growth`]
//! over several copies.

mod args;
mod block;
mod findings;
mod glibc;
mod growth;
mod idle;
mod jemalloc;
mod layout;
mod screen;
mod sections;
mod types;

use std::process::ExitCode;

use anyhow::Result;
use memtools::process::proc::Process;
use memtools::run::cli;
use memtools::run::privileges;

use crate::args::{Args, Plan};

/// Exit status if there is what --fail-on forbids.
const FORBIDDEN: u8 = 3;

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    // A thread that examines copies is not waited for, so the process is never dropped.
    let process: &Process = Box::leak(Box::new(Process::open(args.pid)?));
    let (mut poller, mut output) = cli::start(args.format(), args.output.as_deref())?;
    privileges::keep_tracing_and(args.copies.capabilities())?;
    let watch = args
        .idle
        .map(|time| idle::watch(process, time, &mut poller));
    let watch = watch.transpose()?;
    let request = args.copies.request(process, watch.as_ref());
    let leaks = match args.plan() {
        Plan::Screen(settings) => screen::print(settings, &request, &mut output)?,
        Plan::Judged(sections, settings) => {
            sections::print_judged(sections, settings, &request, &mut output)?
        }
        Plan::Sections(sections, settings) => {
            sections::print(sections, settings, &request, &mut output)?;
            0
        }
        Plan::Growth {
            period,
            top,
            container,
        } => {
            let request = args.copies.request(process, None);
            growth::run(request, container, period, top, &mut poller, &mut output)?;
            0
        }
    };
    output.finish()?;
    Ok(if leaks > 0 && args.fail_on.is_some() {
        ExitCode::from(FORBIDDEN)
    } else {
        ExitCode::SUCCESS
    })
}
