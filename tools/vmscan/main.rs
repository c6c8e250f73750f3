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
use crate::report::Columns;

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
    args.check()?;
    kernel_support::preflight()?;
    memtools::bpf::attach::capture_log(args.common.verbose);
    let metrics = args
        .common
        .export
        .metrics(&totals::METRICS, &args.target.to_string())?;
    let (mut poller, output) = args.common.start()?;
    let mut target = Target::resolve(&args.target, TaskKind::All)?;
    target::warn_if_interval_is_pid(args.interval, &args.target.filter.pid);
    if args.trace_compaction {
        let tracing = attach::start_tracing_compaction(&args, target.filter())?;
        target.release()?;
        target.watch_exit(&mut poller);
        compaction::trace(&args, target.filter(), tracing, poller, output)?;
    } else if args.counts {
        let counting = attach::start_counting(&args, target.filter())?;
        target.release()?;
        target.watch_exit(&mut poller);
        count(&args, target.filter(), counting, poller, output)?;
    } else {
        let columns = Columns {
            kswapd: args.kswapd,
            compaction: args.compaction,
        };
        let attached = attach::start(&args, target.filter(), columns)?;
        target.release()?;
        target.watch_exit(&mut poller);
        let out = (output, metrics);
        watch(&args, target.filter(), columns, attached, poller, out)?;
    }
    target.finish()
}

/// Prints a row each interval, and the histograms and tables at the end.
fn watch(
    args: &Args,
    filter: &Filter,
    columns: Columns,
    attached: Attached,
    mut poller: Poller<'_>,
    (mut output, mut metrics): (Output, Metrics),
) -> Result<()> {
    let Attached {
        skel,
        links,
        available,
    } = attached;
    let mut intervals = Intervals::new(args, &skel, available, columns);
    protect::protect_from_oom();
    privileges::keep_reporting(&args.target)?;
    eprintln!("vmscan: tracing page reclaim, Ctrl-C to end");
    output.header(&columns.header())?;
    output.flush()?;
    each_interval(args, &mut poller, Some(Duration::from_secs(1)), || {
        intervals.print_next(&mut output)?;
        intervals.record_metrics(&mut metrics);
        losses::write_metrics(skel.object(), filter, &mut metrics)
    })?;
    memtools::bpf::attach::detach(links);
    intervals.print_last(&mut output)?;
    intervals.record_metrics(&mut metrics);
    tables::print(args, &skel, &mut output)?;
    Losses::report(skel.object(), filter, &mut output)?;
    losses::finish_metrics(skel.object(), filter, metrics)?;
    output.finish()
}

/// Prints the hits of tracepoints at each interval, or once at the end if there is no interval.
fn count(
    args: &Args,
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
    let mut reports = CountReports::new(&skel.maps.counts, &tracepoints, args.interval.is_some());
    protect::protect_from_oom();
    privileges::keep_reporting(&args.target)?;
    eprintln!(
        "vmscan: tracing {} tracepoints, Ctrl-C to end",
        tracepoints.len()
    );
    let at_the_end = each_interval(args, &mut poller, None, || reports.print(&mut output))?;
    if at_the_end {
        reports.print(&mut output)?;
    }
    memtools::bpf::attach::detach(links);
    Losses::report(skel.object(), filter, &mut output)?;
    output.finish()
}

/// Calls `report` at each interval until the run ends. Returns whether it ended between two intervals.
fn each_interval(
    args: &Args,
    poller: &mut Poller<'_>,
    default: Option<Duration>,
    mut report: impl FnMut() -> Result<()>,
) -> Result<bool> {
    let interval = args.interval.or(default);
    let mut reports = Reports::start(poller, interval, args.count, args.common.deadline())?;
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
