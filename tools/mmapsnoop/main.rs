//! mmapsnoop: every mmap(2), with its file and its result.
//!
//! Hooks: the tracepoints at the exits of the system calls, or the calls' functions (`bpf/mmapsnoop.bpf.c`). An event
//! is sent at a call's exit, and becomes one row ([`row`]).

mod args;
mod attach;
mod bits;
mod row;
mod tracer;

use std::process::ExitCode;

use anyhow::Result;
use libbpf_rs::skel::Skel;
use memtools::bpf::attach::capture_log;
use memtools::bpf::kernel_support;
use memtools::bpf::ring::Events;
use memtools::export::metrics;
use memtools::process::filter::TaskKind;
use memtools::run::cli;
use memtools::run::losses::{self, Losses};
use memtools::run::target::Target;
use memtools::stacks::events::EventStacks;
use memtools::stacks::unwind::Unwinder;

use crate::args::Args;
use crate::row::{CALLS, MAPPED, Record};
use crate::tracer::Printer;

memtools::skeleton!("mmapsnoop", MmapsnoopSkelBuilder, stacks: unwound, plain: [event]);

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    args.check()?;
    kernel_support::preflight()?;
    kernel_support::preflight_tracepoints()?;
    capture_log(args.common.verbose);
    let exports = args
        .profile
        .prepare(&args.common.export, args.target.to_string())?;
    let target_name = args.target.to_string();
    let metrics = args
        .common
        .export
        .metrics(&[&CALLS, &MAPPED], &target_name)?;
    let (mut poller, output) = args.common.start_as(args.format())?;
    let mut target = Target::resolve(&args.target, TaskKind::Programs)?;
    let mut skel = attach::load(&args, target.filter())?;
    let symbolizer = args
        .with_stacks()
        .then(|| target.symbolizer(&args.profile, &args.common.export))
        .transpose()?;
    let unwinder = args
        .with_stacks()
        .then(|| target.unwinder(args.unwind, memtools::unwind_parts!(skel)))
        .transpose()?;
    let links = attach::start(&mut skel, &args)?;
    let events = Events::decoding(&skel.maps.events, Record::decode)?;

    let names = unwinder.as_ref().and_then(Unwinder::names);
    let mut stacks = EventStacks::new(memtools::stack_maps!(skel), symbolizer)?;
    let mappings = stacks.begin(names)?;
    let mut tracer = Printer::new(&args, &skel, stacks, output, (exports, metrics));
    tracer.exports.begin();
    memtools::message!("tracing mmap(2)... Ctrl-C to end");
    tracer.output.header(&tracer.columns.header())?;
    tracer.output.flush()?;
    target.release()?;
    target.watch_exit(&mut poller);

    if let Some(mappings) = &mappings {
        poller.watch_mappings(mappings);
    }
    if tracer.metrics.is_enabled() {
        poller.tick_every(metrics::CHECK_INTERVAL)?;
    }
    let deadline = args.common.deadline();
    events.follow(poller, deadline, links, |records| {
        tracer.take(records)?;
        losses::write_metrics(skel.object(), target.filter(), &mut tracer.metrics)
    })?;
    tracer.fold()?;
    tracer.stacks.report_losses();
    Losses::report_with_unwinder(skel.object(), target.filter(), unwinder, &mut tracer.output)?;
    losses::finish_metrics(skel.object(), target.filter(), tracer.metrics)?;
    tracer.exports.finish()?;
    tracer.output.finish()?;
    target.finish()
}
