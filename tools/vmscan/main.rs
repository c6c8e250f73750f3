//! vmscan: time and events of page reclaim.
//!
//! Hooks: tracepoints of vmscan and compaction (`bpf/vmscan.bpf.c`), whichever this kernel has
//! ([`attach`]). They add up in a BPF map; each interval's row is the difference ([`report`]).
//! Histograms and tables follow at the end.

mod args;
mod attach;
mod compaction;
mod kswapd;
mod report;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use jiff::Zoned;
use libbpf_rs::skel::Skel;
use libbpf_rs::{MapCore, MapFlags, MapMut};
use memtools::bpf::kernel_support;
use memtools::bpf::map_batch;
use memtools::bpf::types;
use memtools::export::metrics::{Family, Kind, Metrics};
use memtools::print::clock::{self, Clock};
use memtools::print::histogram::{self, Histogram};
use memtools::print::output::Output;
use memtools::process::cgroup::Cgroups;
use memtools::process::filter::{Filter, Tasks};
use memtools::run::cli;
use memtools::run::losses::{self, Losses};
use memtools::run::poll::Poller;
use memtools::run::protect;
use memtools::run::schedule::{Due, Reports};
use memtools::run::target::{self, Target};
use memtools::stacks::kallsyms::Kallsyms;

use crate::args::Args;
use crate::attach::{Attached, Counting, Has};
use crate::bpf::types::{cgroup_key, cgroup_total, operation as Operation, shrinker_total, total};
use crate::kswapd::Booked;
use crate::report::{Cgroup, Columns, Counts, Interval, Shrinker, Timed};

memtools::skeleton!(
    "vmscan",
    VmscanSkelBuilder,
    stacks: kernel,
    plain: [total, call, shrinker_total, cgroup_key, cgroup_total, compaction]
);

static OPERATIONS: Family = Family {
    name: "memtools_reclaim_operation_duration_seconds",
    help: "How long operations of page reclaim took, by kind, on all CPUs.",
    labels: &["operation"],
    kind: Kind::Durations,
};
static WAKEUPS: Family = Family {
    name: "memtools_kswapd_wakeups_total",
    help: "Times that kswapd was asked to wake up.",
    labels: &[],
    kind: Kind::Count,
};
static WRITTEN: Family = Family {
    name: "memtools_reclaim_written_pages_total",
    help: "Pages (folios) that reclaim began to write out.",
    labels: &[],
    kind: Kind::Count,
};

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    kernel_support::preflight()?;
    memtools::bpf::attach::capture_log(args.common.verbose);
    let metrics = args
        .metrics
        .open("vmscan", &[&OPERATIONS, &WAKEUPS, &WRITTEN])?;
    let (mut poller, output) = args.common.start("vmscan")?;
    let mut target = Target::choose(&args.target, Tasks::All)?;
    target::doubt_interval("vmscan", args.interval, &args.target.filter.pid);
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

/// Prints a row each interval, and the rest at the end.
fn watch(
    args: &Args,
    filter: &Filter,
    columns: Columns,
    attached: Attached,
    mut poller: Poller<'_>,
    (mut output, mut metrics): (Output, Metrics),
) -> Result<()> {
    let Attached { skel, links, has } = attached;
    let clock = Clock::new();
    let rows_per_header = args.rows_per_header(args.common.is_terminal());
    let mut rows = 0;
    let (mut before, mut booked) = (Totals::default(), Booked::default());
    let mut row = |output: &mut Output, partial: bool| -> Result<()> {
        let (now, kswapd_ns, time_ns) = if has.kswapd {
            kswapd::totals_and_time(&skel.maps.totals, &skel.maps.calls)?
        } else {
            (Totals::read(&skel.maps.totals)?, 0, clock::monotonic_ns())
        };
        let mut interval = now.since(&before, has, columns, clock.local(time_ns));
        if let Some(kswapd) = &mut interval.kswapd {
            kswapd.time_ns = booked.book(kswapd_ns);
        }
        now.measure(has, &mut metrics);
        losses::write_metrics(skel.object(), filter, &mut metrics)?;
        before = now;
        if partial && !interval.any() {
            return Ok(());
        }
        if rows_per_header.is_some_and(|every| rows > 0 && rows % every == 0) {
            output.header(&columns.header())?;
        }
        rows += 1;
        output.row(&interval)?;
        output.flush()
    };

    protect::from_lack_of_memory("vmscan");
    eprintln!("vmscan: tracing page reclaim, Ctrl-C to end");
    output.header(&columns.header())?;
    output.flush()?;
    each_interval(args, &mut poller, Some(Duration::from_secs(1)), || {
        row(&mut output, false)
    })?;
    memtools::bpf::attach::detach(links);
    // What came after the last full interval, so that nothing is missing from the rows.
    row(&mut output, true)?;

    if !args.common.json {
        output.raw(|out| writeln!(out))?;
    }
    let totals = Totals::read(&skel.maps.totals)?;
    for (name, operation) in TIMED {
        let buckets = totals.latencies(operation);
        if buckets.count() > 0 {
            output.row(&histogram::Named { name, buckets })?;
        }
    }
    if args.by_shrinker {
        output.header(&Shrinker::header())?;
        for shrinker in read_shrinkers(&skel.maps.shrinkers)? {
            output.row(&shrinker)?;
        }
    }
    if args.by_cgroup {
        if args.by_shrinker {
            output.header("")?;
        }
        output.header(&Cgroup::header())?;
        for cgroup in read_cgroups(&skel.maps.cgroups)? {
            output.row(&cgroup)?;
        }
    }
    output.flush()?;
    Losses::tell("vmscan", skel.object(), filter, &mut output)?;
    losses::finish_metrics(skel.object(), filter, metrics)?;
    output.finish()
}

/// Counts tracepoints; once at the end if there is no interval.
fn count(
    args: &Args,
    filter: &Filter,
    counting: Counting,
    mut poller: Poller<'_>,
    mut output: Output,
) -> Result<()> {
    let clock = Clock::new();
    let Counting {
        skel,
        links,
        tracepoints,
    } = counting;
    let mut before = vec![0; tracepoints.len()];
    let mut report = |output: &mut Output| -> Result<()> {
        let mut counts = Vec::with_capacity(tracepoints.len());
        for ((number, name), before) in tracepoints.iter().zip(&mut before) {
            let key = (*number as u32).to_ne_bytes();
            let value = skel.maps.counts.lookup(&key, MapFlags::ANY);
            let value = value
                .context("failed to read the counts")?
                .unwrap_or_default();
            let now = *types::view::<u64>(&value)?;
            counts.push((name.clone(), now - *before));
            *before = now;
        }
        output.row(&Counts {
            time: clock.local(clock::monotonic_ns()),
            tracepoints: counts,
            timed: args.interval.is_some(),
        })?;
        output.flush()
    };

    protect::from_lack_of_memory("vmscan");
    eprintln!(
        "vmscan: tracing {} tracepoints, Ctrl-C to end",
        tracepoints.len()
    );
    let at_the_end = each_interval(args, &mut poller, None, || report(&mut output))?;
    if at_the_end {
        report(&mut output)?;
    }
    memtools::bpf::attach::detach(links);
    Losses::tell("vmscan", skel.object(), filter, &mut output)?;
    output.finish()
}

/// Calls `report` at each interval until it is time to end. Returns whether that came between two.
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

/// Operations that take time, with their histograms' names.
const TIMED: [(&str, Operation); 5] = [
    ("compaction_ns", Operation::OPERATION_COMPACTION),
    ("direct_reclaim_ns", Operation::OPERATION_DIRECT_RECLAIM),
    ("kswapd_ns", Operation::OPERATION_KSWAPD),
    ("memcg_reclaim_ns", Operation::OPERATION_MEMCG_RECLAIM),
    ("shrink_slab_ns", Operation::OPERATION_SHRINK_SLAB),
];

/// The map `totals` at some moment.
#[derive(Default)]
pub(crate) struct Totals(Vec<total>);

impl Totals {
    pub(crate) fn read(map: &MapMut<'_>) -> Result<Self> {
        let operations = 0..Operation::OPERATIONS.0;
        let totals = operations.map(|operation| {
            let value = map
                .lookup(&operation.to_ne_bytes(), MapFlags::ANY)
                .context("failed to read the totals")?
                .unwrap_or_default();
            Ok(*types::view::<total>(&value)?)
        });
        totals.collect::<Result<_>>().map(Self)
    }

    pub(crate) fn of(&self, operation: Operation) -> Timed {
        let total = self.0.get(operation.0 as usize);
        total.map_or_else(Timed::default, |total| Timed {
            count: total.count,
            time_ns: total.time_ns,
        })
    }

    fn latencies(&self, operation: Operation) -> Histogram {
        let total = self.0.get(operation.0 as usize);
        total.map_or_else(Histogram::new, |total| total.latency_ns.slots.into())
    }

    /// Sets the sums for Prometheus, of what this kernel tells.
    fn measure(&self, has: Has, metrics: &mut Metrics) {
        for (name, operation) in TIMED {
            let told = match operation {
                Operation::OPERATION_COMPACTION => has.compaction,
                Operation::OPERATION_DIRECT_RECLAIM => has.direct_reclaim,
                Operation::OPERATION_KSWAPD => has.kswapd,
                Operation::OPERATION_MEMCG_RECLAIM => has.memcg_reclaim,
                _ => has.shrink_slab,
            };
            if told {
                let label = name.trim_end_matches("_ns");
                let time_ns = self.of(operation).time_ns;
                metrics.set_durations(&OPERATIONS, &[label], self.latencies(operation), time_ns);
            }
        }
        for (family, operation, told) in [
            (
                &WAKEUPS,
                Operation::OPERATION_KSWAPD_WAKEUP,
                has.kswapd_wakeups,
            ),
            (&WRITTEN, Operation::OPERATION_WRITE_PAGE, has.pages_written),
        ] {
            if told {
                metrics.set(family, &[], self.of(operation).count);
            }
        }
    }

    /// What has ended since.
    fn since(&self, before: &Self, has: Has, columns: Columns, time: Zoned) -> Interval {
        let timed = |operation| {
            let (now, before) = (self.of(operation), before.of(operation));
            Timed {
                count: now.count - before.count,
                time_ns: now.time_ns - before.time_ns,
            }
        };
        let count = |operation| timed(operation).count;
        Interval {
            time,
            shrink_slab: has
                .shrink_slab
                .then(|| timed(Operation::OPERATION_SHRINK_SLAB)),
            direct_reclaim: has
                .direct_reclaim
                .then(|| timed(Operation::OPERATION_DIRECT_RECLAIM)),
            memcg_reclaim: has
                .memcg_reclaim
                .then(|| timed(Operation::OPERATION_MEMCG_RECLAIM)),
            kswapd_wakeups: has
                .kswapd_wakeups
                .then(|| count(Operation::OPERATION_KSWAPD_WAKEUP)),
            pages_written: has
                .pages_written
                .then(|| count(Operation::OPERATION_WRITE_PAGE)),
            kswapd: has.kswapd.then(|| timed(Operation::OPERATION_KSWAPD)),
            compaction: has
                .compaction
                .then(|| timed(Operation::OPERATION_COMPACTION)),
            columns,
        }
    }
}

/// Shrinkers, the one that took longest last.
fn read_shrinkers(map: &MapMut<'_>) -> Result<Vec<Shrinker>> {
    let symbols = Kallsyms::read().context("failed to read /proc/kallsyms")?;
    let mut shrinkers = Vec::new();
    map_batch::read(map, |key, value| {
        let address = *types::view::<u64>(key)?;
        let total: &shrinker_total = types::view(value)?;
        shrinkers.push(Shrinker {
            function: function_name(&symbols, address),
            count: total.count,
            time_ns: total.time_ns,
            objects_freed: total.freed,
        });
        Ok(())
    })?;
    shrinkers.sort_by(|a, b| (a.time_ns, &a.function).cmp(&(b.time_ns, &b.function)));
    Ok(shrinkers)
}

/// `super_cache_scan`, or with its module where that is not the kernel itself.
fn function_name(symbols: &Kallsyms, address: u64) -> String {
    match symbols.find(address) {
        Some((name, 0, "kernel")) => name.to_owned(),
        Some((name, 0, module)) => format!("{name} [{module}]"),
        _ => format!("{address:#x}"),
    }
}

/// Cgroups, the one that reclaimed longest last.
fn read_cgroups(map: &MapMut<'_>) -> Result<Vec<Cgroup>> {
    let (mut paths, mut limits) = (Cgroups::new(), Cgroups::of_memory());
    let mut cgroups: Vec<Cgroup> = Vec::new();
    map_batch::read(map, |key, value| {
        let key: &cgroup_key = types::view(key)?;
        let total: &cgroup_total = types::view(value)?;
        let timed = Timed {
            count: total.count,
            time_ns: total.time_ns,
        };
        let limited_id = Some(key.limited).filter(|&id| id != 0);
        let index = cgroups
            .iter()
            .position(|cgroup| (cgroup.id, cgroup.limited_id) == (key.cgroup, limited_id))
            .unwrap_or_else(|| {
                cgroups.push(Cgroup {
                    id: key.cgroup,
                    path: paths.path(key.cgroup).map(str::to_owned),
                    limited: limited_id.and_then(|id| limits.path(id).map(str::to_owned)),
                    limited_id,
                    ..Cgroup::default()
                });
                cgroups.len() - 1
            });
        match Operation(key.operation) {
            Operation::OPERATION_SHRINK_SLAB => cgroups[index].shrink_slab = timed,
            Operation::OPERATION_DIRECT_RECLAIM => cgroups[index].direct_reclaim = timed,
            Operation::OPERATION_MEMCG_RECLAIM => cgroups[index].memcg_reclaim = timed,
            _ => {}
        }
        Ok(())
    })?;
    cgroups.sort_by_key(|cgroup| (cgroup.reclaim_ns(), cgroup.id, cgroup.limited_id));
    Ok(cgroups)
}
