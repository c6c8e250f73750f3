//! hfaults: faults on huge pages, by process.
//!
//! Hooks (`bpf/hfaults.bpf.c`): the kernel's functions that handle such faults, by fentry or kprobe. Where neither
//! works, the page-fault event, with a lookup of the mapping.

mod args;
mod attach;
mod row;

use std::process::ExitCode;

use anyhow::Result;
use libbpf_rs::MapCore;
use libbpf_rs::skel::Skel;
use memtools::bpf::attach::{capture_log, detach};
use memtools::bpf::kernel_support;
use memtools::bpf::map_counts::Counts;
use memtools::export::metrics::Metrics;
use memtools::print::clock::{self, Clock};
use memtools::print::output::Output;
use memtools::process::container::CgroupResolver;
use memtools::process::filter::TaskKind;
use memtools::run::cli;
use memtools::run::losses::{self, Losses};
use memtools::run::schedule::Reports;
use memtools::run::target::{self, Target};

use crate::args::Args;
use crate::attach::Attached;
use crate::bpf::types::fault_key;
use crate::row::{FAULTS, MADVISE, Row};

memtools::skeleton!("hfaults", HfaultsSkelBuilder, stacks: none, plain: [fault_key]);

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    kernel_support::preflight()?;
    capture_log(args.common.verbose);
    let family = if args.madvise { &MADVISE } else { &FAULTS };
    let mut metrics = args
        .common
        .export
        .metrics(&[family], &args.target.to_string())?;
    let (mut poller, mut output) = args.common.start()?;
    let mut target = Target::resolve(&args.target, TaskKind::Programs)?;
    target::warn_if_interval_is_pid(args.interval, &args.target.filter.pid);
    let (how, Attached { skel, links }) = attach::start(&args, target.filter())?;
    let maps = &skel.maps;
    let mut counts = Counts::new(&maps.counts, &maps.counts_a, &maps.counts_b);
    let with_cgroups = args.containers.wanted(args.common.wants_cgroups());
    let mut cgroup_resolver = CgroupResolver::if_wanted(with_cgroups, &maps.cgroup_paths);
    let clock = Clock::new();
    let mut print = |output: &mut Output, metrics: &mut Metrics| {
        print(
            &mut counts,
            &mut cgroup_resolver,
            &args,
            &clock,
            output,
            metrics,
        )
    };
    memtools::message!("tracing {} ({how})... Ctrl-C to end", args.traced_events());
    target.release()?;

    target.watch_exit(&mut poller);
    let deadline = args.common.deadline();
    let reports = Reports::start(&mut poller, args.interval, args.count, deadline)?;
    reports.each(&mut poller, || {
        print(&mut output, &mut metrics)?;
        losses::write_metrics(skel.object(), target.filter(), &mut metrics)
    })?;
    detach(links);
    print(&mut output, &mut metrics)?;
    Losses::report(skel.object(), target.filter(), &mut output)?;
    losses::finish_metrics(skel.object(), target.filter(), metrics)?;
    output.finish()?;
    target.finish()
}

/// Prints the counts that were added since the last report.
fn print<M: MapCore>(
    counts: &mut Counts<'_, M, fault_key, u64>,
    cgroup_resolver: &mut Option<CgroupResolver<'_>>,
    args: &Args,
    clock: &Clock,
    output: &mut Output,
    metrics: &mut Metrics,
) -> Result<()> {
    let time = clock.local(clock::monotonic_ns());
    if args.timestamp {
        output.header(&clock::time_of_day(&time))?;
    }
    let mut counts = counts.take()?;
    counts.sort_by_key(|(_, count)| *count);
    for (key, count) in counts {
        let cgroup_info = cgroup_resolver
            .as_mut()
            .map(|cgroup_resolver| cgroup_resolver.of(key.cgroup));
        let row = Row::new(&key, cgroup_info, count, &time, args);
        row.record_metrics(args.madvise, metrics);
        output.row(&row)?;
    }
    output.header("")?;
    output.flush()
}
