//! drsnoop: tasks that had to reclaim memory themselves before they got any (direct reclaim).
//!
//! Hooks: the tracepoints of direct reclaim and, with --memcg, of reclaim at a cgroup's limit (`bpf/drsnoop.bpf.c`,
//! [`mod@attach`]). An event is sent at the end of a reclaim, and becomes one row ([`row`], [`printer`]).

mod args;
mod attach;
mod printer;
mod row;
mod summary;

use std::process::ExitCode;

use anyhow::Result;
use libbpf_rs::skel::Skel;
use memtools::bpf::attach::capture_log;
use memtools::bpf::kernel_support;
use memtools::bpf::ring::Events;
use memtools::export::format::FileFormat;
use memtools::export::metrics;
use memtools::process::filter::TaskKind;
use memtools::process::traced_code::TracedCode;
use memtools::run::losses::{self, Losses};
use memtools::run::target::Target;
use memtools::run::{cli, privileges, protect};
use memtools::stacks::events::EventStacks;
use memtools::stacks::symbolize::Symbolizer;
use memtools::stacks::unwind::Unwinder;

use crate::args::Args;
use crate::bpf::types::event;
use crate::printer::Printer;

memtools::skeleton!("drsnoop", DrsnoopSkelBuilder, stacks: unwound, plain: [event]);

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    kernel_support::preflight()?;
    capture_log(false);
    if args.summary {
        // A timeline has the reclaims themselves.
        let formats = [&FileFormat::OF_PROFILES[..], &[FileFormat::Prometheus]].concat();
        args.common.export.expect("with --summary", &formats)?;
    }
    let exports = args
        .profile
        .prepare(&args.common.export, args.target_description())?;
    let metrics = args
        .common
        .export
        .metrics(&printer::METRICS, &args.target_description())?;
    let (mut poller, output) = args.common.start()?;
    let mut target = Target::choose_thread(&args.target, args.tid, TaskKind::All)?;
    let symbolizer = args
        .wants_stacks()
        .then(|| {
            let symbolizer = Symbolizer::new(TracedCode::of_all_processes()?);
            args.profile.with_source(symbolizer, &args.common.export)
        })
        .transpose()?;
    let (how, (skel, links)) = attach::start(&args, target.filter())?;
    let unwinder = args
        .wants_stacks()
        .then(|| target.unwinder(args.unwind, memtools::unwind_parts!(skel)))
        .transpose()?;
    if args.wants_limited() {
        kernel_support::warn_if_no_reclaim_target();
    }
    let events: Events<event> = Events::new(&skel.maps.events)?;

    let names = unwinder.as_ref().and_then(Unwinder::names);
    let mut stacks = EventStacks::new(memtools::stack_maps!(skel), symbolizer)?;
    let mappings = stacks.begin(names)?;
    if let Some(mappings) = &mappings {
        poller.watch_mappings(mappings);
    }
    let mut printer = Printer::new(&args, &skel, stacks, output, exports, metrics)?;
    printer.exports.begin();
    protect::protect_from_oom();
    if !args.wants_stacks() {
        privileges::keep_reporting(&args.target)?;
    }
    memtools::message!("tracing direct reclaim ({how}), Ctrl-C to end");
    printer.begin()?;
    target.release()?;
    target.watch_exit(&mut poller);
    if printer.metrics.is_enabled() {
        poller.tick_every(metrics::CHECK_INTERVAL)?;
    }
    let deadline = args.common.deadline();
    events.follow(poller, deadline, links, |events| {
        printer.print(events)?;
        losses::write_metrics(skel.object(), target.filter(), &mut printer.metrics)
    })?;
    printer.print_end()?;
    Losses::report_with_unwinder(
        skel.object(),
        target.filter(),
        unwinder,
        &mut printer.output,
    )?;
    printer.export();
    losses::finish_metrics(skel.object(), target.filter(), printer.metrics)?;
    printer.exports.finish()?;
    printer.output.finish()?;
    target.finish()
}
