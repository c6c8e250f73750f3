//! oomkill: processes that the kernel kills because memory has run out.
//!
//! Hooks: `oom_kill_process()` by fentry or by a kprobe, else the tracepoint `mark_victim` alone, with the victim's
//! task or with its pid (`bpf/oomkill.bpf.c`, [`mod@attach`]). An event of a victim that the options ask for
//! ([`victim_filter`]) becomes a row ([`row`], [`printer`]). With --extended the row includes what /proc shows at that
//! moment ([`candidates`]).

mod args;
mod attach;
mod candidates;
mod printer;
mod row;
mod victim_filter;

use std::process::ExitCode;

use anyhow::Result;
use libbpf_rs::skel::Skel;
use memtools::bpf::attach::capture_log;
use memtools::bpf::kernel_support;
use memtools::bpf::ring::Events;
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
use crate::victim_filter::VictimFilter;

memtools::skeleton!("oomkill", OomkillSkelBuilder, stacks: unwound, plain: [event]);

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    kernel_support::preflight()?;
    capture_log(args.common.verbose);
    let exports = args
        .profile
        .prepare(&args.common.export, args.target.to_string())?;
    let metrics = args
        .common
        .export
        .metrics(&[&printer::KILLS], &args.target.to_string())?;
    let (mut poller, output) = args.common.start()?;
    let mut target = Target::resolve(&args.target, TaskKind::All)?;
    let mut symbolizer = args
        .wants_stacks()
        .then(|| {
            let symbolizer = Symbolizer::new(TracedCode::of_all_processes()?);
            args.profile.with_source(symbolizer, &args.common.export)
        })
        .transpose()?;
    let (how, (skel, links)) = attach::start(&args, target.filter())?;
    let unwinder = args
        .wants_stacks()
        .then(|| {
            // The victim is often the task that needed the memory, and its kill the first event of it. So the unwind
            // tables of the processes that are most likely to be killed are built before.
            let likely = candidates::highest_ranked(None, 0).into_iter();
            let likely: Vec<u32> = likely.map(|candidate| candidate.pid).collect();
            target.unwinder_and(args.unwind, memtools::unwind_parts!(skel), &likely)
        })
        .transpose()?;
    let events: Events<event> = Events::new(&skel.maps.events)?;

    if let Some(symbolizer) = &mut symbolizer {
        // Later there may be no memory for the kernel's symbols.
        symbolizer.read_kernel_names();
    }
    // Mappings of processes are recorded, as the process whose stack is symbolized is often the victim.
    let names = unwinder.as_ref().and_then(Unwinder::names);
    let mut stacks = EventStacks::new(memtools::stack_maps!(skel), symbolizer)?;
    let mappings = stacks.begin(names)?;
    if let Some(mappings) = &mappings {
        poller.watch_mappings(mappings);
    }
    let choice = VictimFilter::of(&args.target, &target);
    let alone = attach::is_mark_victim_alone(how);
    let mut printer = Printer::new(
        &args, &skel, alone, choice, stacks, output, exports, metrics,
    )?;
    printer.exports.begin();
    protect::protect_from_oom();
    if !args.wants_stacks() {
        privileges::keep_reporting(&args.target)?;
    }
    memtools::message!("tracing OOM kills ({how}), Ctrl-C to end");
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
    printer.stacks.report_losses();
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
