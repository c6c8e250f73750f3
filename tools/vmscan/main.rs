//! vmscan: time and events of page reclaim.
//!
//! Hooks: tracepoints of vmscan and compaction (`bpf/vmscan.bpf.c`), those that this kernel has ([`mod@attach`]). The
//! BPF programs add up in a map ([`totals`]). Each interval's row is the difference of two reads of it
//! ([`intervals`], [`report`]). Histograms and tables follow at the end ([`tables`]).

mod args;
mod attach;
mod compaction;
mod counts;
mod intervals;
mod kswapd;
mod plan;
mod report;
mod tables;
mod totals;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use libbpf_rs::skel::Skel;
use memtools::bpf::kernel_support;
use memtools::export::metrics::Metrics;
use memtools::print::output::Output;
use memtools::process::filter::{Filter, TaskKind};
use memtools::run::losses::{self, Losses};
use memtools::run::poll::Poller;
use memtools::run::schedule::{Due, Reports};
use memtools::run::target::{self, Target};
use memtools::run::{cli, privileges, protect};

use crate::args::Args;
use crate::attach::{Attached, Counting};
use crate::counts::CountReports;
use crate::intervals::Intervals;
use crate::plan::{Mode, Plan, ReclaimPlan};

memtools::skeleton!(
    "vmscan",
    VmscanSkelBuilder,
    stacks: kernel,
    plain: [total, call, shrinker_total, cgroup_key, cgroup_total, compaction]
);

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    let plan = Plan::of(args)?;
    let verbose = plan.common.verbose;
    kernel_support::preflight()?;
    memtools::bpf::attach::capture_log(verbose);
    let metrics = plan
        .common
        .export
        .metrics(&totals::METRICS, &plan.target.to_string())?;
    let (mut poller, output) = plan.common.start()?;
    let mut target = Target::resolve(&plan.target, TaskKind::All)?;
    target::warn_if_interval_is_pid(plan.interval, &plan.target.filter.pid);
    match &plan.mode {
        Mode::Reclaim(reclaim) => {
            let attached = attach::start(reclaim, target.filter(), verbose)?;
            target.release()?;
            target.watch_exit(&mut poller);
            watch(
                &plan,
                reclaim,
                target.filter(),
                attached,
                poller,
                (output, metrics),
            )?;
        }
        Mode::Compactions(compactions) => {
            let tracing = attach::start_tracing_compaction(compactions, target.filter(), verbose)?;
            target.release()?;
            target.watch_exit(&mut poller);
            compaction::trace(
                compactions,
                &plan.common,
                target.filter(),
                tracing,
                poller,
                output,
            )?;
        }
        Mode::Counts => {
            let counting = attach::start_counting(target.filter(), verbose)?;
            target.release()?;
            target.watch_exit(&mut poller);
            count(&plan, target.filter(), counting, poller, output)?;
        }
    }
    target.finish()
}

/// Prints a row each interval, and the histograms and tables at the end.
fn watch(
    plan: &Plan,
    reclaim: &ReclaimPlan,
    filter: &Filter,
    attached: Attached,
    mut poller: Poller<'_>,
    (mut output, mut metrics): (Output, Metrics),
) -> Result<()> {
    let Attached {
        skel,
        links,
        available,
    } = attached;
    let mut intervals = Intervals::new(reclaim, &skel, available);
    protect::protect_from_oom();
    privileges::keep_reporting(&plan.target)?;
    memtools::message!("tracing page reclaim, Ctrl-C to end");
    output.header(&reclaim.columns.header())?;
    output.flush()?;
    each_interval(plan, &mut poller, Some(Duration::from_secs(1)), || {
        intervals.print_next(&mut output)?;
        intervals.record_metrics(&mut metrics);
        losses::write_metrics(skel.object(), filter, &mut metrics)
    })?;
    memtools::bpf::attach::detach(links);
    intervals.print_last(&mut output)?;
    intervals.record_metrics(&mut metrics);
    tables::print(reclaim.tables, &skel, &mut output)?;
    Losses::report(skel.object(), filter, &mut output)?;
    losses::finish_metrics(skel.object(), filter, metrics)?;
    output.finish()
}

/// Prints the hits of tracepoints at each interval, or once at the end if there is no interval.
fn count(
    plan: &Plan,
    filter: &Filter,
    counting: Counting,
    mut poller: Poller<'_>,
    mut output: Output,
) -> Result<()> {
    let Counting {
        skel,
        links,
        tracepoints,
    } = counting;
    let mut reports = CountReports::new(&skel.maps.counts, &tracepoints, plan.interval.is_some());
    protect::protect_from_oom();
    privileges::keep_reporting(&plan.target)?;
    memtools::message!("tracing {} tracepoints, Ctrl-C to end", tracepoints.len());
    let at_the_end = each_interval(plan, &mut poller, None, || reports.print(&mut output))?;
    if at_the_end {
        reports.print(&mut output)?;
    }
    memtools::bpf::attach::detach(links);
    Losses::report(skel.object(), filter, &mut output)?;
    output.finish()
}

/// Calls `report` at each interval until the run ends. Returns whether it ended between two intervals.
fn each_interval(
    plan: &Plan,
    poller: &mut Poller<'_>,
    default: Option<Duration>,
    mut report: impl FnMut() -> Result<()>,
) -> Result<bool> {
    let interval = plan.interval.or(default);
    let mut reports = Reports::start(poller, interval, plan.count, plan.common.deadline())?;
    loop {
        let (wake, due) = reports.wait(poller)?;
        if wake.tick || wake.report {
            report()?;
        }
        if due == Due::Last {
            return Ok(!wake.tick);
        }
    }
}
