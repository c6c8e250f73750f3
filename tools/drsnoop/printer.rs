//! Events as rows, in metrics and in files of other formats.

use std::collections::HashMap;
use std::rc::Rc;

use anyhow::Result;
use libbpf_rs::MapMut;
use memtools::bpf::types::known;
use memtools::export::exposition::MetricKind;
use memtools::export::files::{Exports, ProfileInfo};
use memtools::export::metrics::{Family, Metrics};
use memtools::export::profile::{Sample, ValueType};
use memtools::host::page_size;
use memtools::host::values::Values;
use memtools::print::clock::Clock;
use memtools::print::gfp::Gfp;
use memtools::print::histogram::{self, Histogram};
use memtools::print::output::Output;
use memtools::print::text;
use memtools::process::cgroup::Cgroups;
use memtools::process::container::{self, CgroupResolver};
use memtools::process::origin::Origin;
use memtools::stacks::events::EventStacks;
use memtools::stacks::named::{NamedStack, StackIds};

use crate::args::Args;
use crate::bpf::Loaded;
use crate::bpf::types::{event, reclaim_kind};
use crate::row::{Columns, ReclaimReason, Row};
use crate::summary::Summary;

/// Families that --export writes.
pub(crate) static METRICS: [&Family; 3] = [&STALLS, &STALLED, &RECLAIMED];

static STALLS: Family = Family {
    name: "memtools_reclaim_stall_duration_seconds",
    help: "Duration of direct reclaim, by reason.",
    labels: &["kind"],
    kind: MetricKind::Durations,
};
static STALLED: Family = Family {
    name: "memtools_reclaim_stalled_seconds_total",
    help: "Time that tasks spent in direct reclaim.",
    labels: &["comm", "unit", "container", "kind"],
    kind: MetricKind::Seconds,
};
static RECLAIMED: Family = Family {
    name: "memtools_reclaim_stalled_pages_total",
    help: "Pages that tasks reclaimed before they got any.",
    labels: &["comm", "unit", "container", "kind"],
    kind: MetricKind::Counter,
};

/// Printer that turns events into rows.
pub(crate) struct Printer<'a> {
    pub(crate) output: Output,
    clock: Clock,
    cgroup_resolver: Option<CgroupResolver<'a>>,
    /// Cgroups of the hierarchy that limits memory. None if their names are not requested.
    limited: Option<Cgroups>,
    /// End of the first reclaim.
    first_ns: Option<u64>,
    latencies: Option<Histogram>,
    /// Sums that are printed in place of the rows, if they are requested.
    summary: Option<Summary>,
    stacks: EventStacks<'a, MapMut<'static>>,
    print_stacks: bool,
    /// Samples for the files, by process, its name and the ids of its stacks.
    stalls: HashMap<(u32, String, u64, u64), Sample>,
    pub(crate) exports: Exports,
    pub(crate) metrics: Metrics,
    page_kb: u64,
    shows_free: bool,
    told_of_free: bool,
    columns: Columns,
}

impl<'a> Printer<'a> {
    pub(crate) fn new(
        args: &Args,
        skel: &'a Loaded,
        stacks: EventStacks<'a, MapMut<'static>>,
        output: Output,
        exports: Exports,
        metrics: Metrics,
    ) -> Result<Self> {
        Ok(Self {
            output,
            clock: Clock::new(),
            cgroup_resolver: CgroupResolver::if_wanted(
                args.wants_cgroups(),
                &skel.maps.cgroup_paths,
            ),
            limited: args.wants_limited().then(Cgroups::of_memory),
            first_ns: None,
            latencies: args.hist.then(Histogram::new),
            summary: args.summary.then(|| Summary::new(args.memcg)),
            stacks,
            print_stacks: args.stack,
            stalls: HashMap::new(),
            exports,
            metrics,
            page_kb: page_size::page_bytes()? / 1024,
            shows_free: args.shows_free(),
            told_of_free: false,
            columns: args.columns(),
        })
    }

    /// Prints the header of the rows.
    pub(crate) fn begin(&mut self) -> Result<()> {
        if self.summary.is_none() {
            self.output.header(&self.columns.header())?;
        }
        self.output.flush()
    }

    pub(crate) fn print(&mut self, events: impl Iterator<Item = event>) -> Result<()> {
        self.stacks.refresh();
        for event in events {
            if let Some(latencies) = &mut self.latencies {
                latencies.add(event.latency_ns);
            }
            let first = *self.first_ns.get_or_insert(event.time_ns);
            let cgroup_info = self
                .cgroup_resolver
                .as_mut()
                .map(|cgroup_resolver| cgroup_resolver.of(event.cgroup));
            let limited = path_in(&mut self.limited, event.limited);
            let stack = self.named(&event)?;
            if self.exports.is_enabled()
                && let Some(stack) = &stack
            {
                self.add(&event, stack);
            }
            let row = Row {
                origin: Origin::new(
                    self.clock.local(event.time_ns),
                    (event.pid, event.tid),
                    &event.comm,
                    cgroup_info,
                ),
                uid: event.uid,
                kind: match event.kind {
                    reclaim_kind::RECLAIM_MEMCG => ReclaimReason::Memcg,
                    _ => ReclaimReason::Direct,
                },
                latency_ns: event.latency_ns,
                reclaimed_pages: event.reclaimed_pages,
                free_kb: self
                    .shows_free
                    .then(|| self.free_kb(event.free_pages))
                    .flatten(),
                order: event.order,
                gfp_flags: Gfp(event.gfp_flags),
                limited,
                limited_id: Some(event.limited).filter(|&id| id != 0),
                stack: stack.filter(|_| self.print_stacks),
                microseconds: event.time_ns.saturating_sub(first) / 1000,
                columns: self.columns,
            };
            row.record_metrics(&mut self.metrics);
            match &mut self.summary {
                Some(summary) => summary.add(row),
                None => self.output.row(&row)?,
            }
        }
        self.stacks.renew()?;
        self.output.flush()
    }

    fn free_kb(&mut self, pages: u64) -> Option<u64> {
        if let Some(pages) = known(pages) {
            return Some(pages * self.page_kb);
        }
        if !self.told_of_free {
            self.told_of_free = true;
            memtools::message!(
                "free memory cannot be had from inside the kernel here: FREE(KB) is the value when the line is \
                 printed"
            );
        }
        let vmstat = Values::read("/proc/vmstat").ok()?;
        Some(vmstat.get("nr_free_pages")? * self.page_kb)
    }

    fn add(&mut self, event: &event, stack: &NamedStack) {
        let key = (
            event.pid,
            stack.comm.clone(),
            event.user_stack,
            event.kernel_stack,
        );
        let sample = self.stalls.entry(key).or_insert_with(|| Sample {
            stack: stack.clone(),
            values: vec![0, 0],
        });
        for (sum, more) in sample.values.iter_mut().zip([1, event.latency_ns]) {
            *sum += more;
        }
    }

    /// Prints the sums and the histogram, if they are requested, and reports lost names.
    pub(crate) fn print_end(&mut self) -> Result<()> {
        if let Some(summary) = self.summary.take() {
            let (header, rows) = summary.end();
            self.output.header(&header)?;
            rows.iter().try_for_each(|row| self.output.row(row))?;
            self.output.flush()?;
        }
        if let Some(buckets) = self.latencies.take() {
            let name = "latency_ns";
            self.output.header("")?;
            self.output.row(&histogram::Named { name, buckets })?;
            self.output.flush()?;
        }
        self.stacks.report_losses();
        Ok(())
    }

    /// Writes all stacks into the files that are requested.
    pub(crate) fn export(&mut self) {
        if self.exports.is_enabled() {
            let delay = ValueType {
                kind: "delay",
                unit: "nanoseconds",
                count_name: "ns",
            };
            let subject = ProfileInfo {
                name: "time in direct reclaim".to_owned(),
                values: vec![ValueType::count("reclaim_stalls", "stalls"), delay],
                main_value: 1,
                by_thread: true,
                remarks: Vec::new(),
            };
            let samples = self.stalls.drain().map(|(_, sample)| sample).collect();
            self.exports.write(subject, samples);
        }
    }

    /// Symbolizes the kernel and user stacks. None if stacks are not requested.
    fn named(&mut self, event: &event) -> Result<Option<Rc<NamedStack>>> {
        let ids = StackIds {
            pid: event.pid,
            comm: &text::from_c(&event.comm),
            user: Some(event.user_stack),
            kernel: Some(event.kernel_stack),
        };
        self.stacks.named(&ids)
    }
}

impl Row {
    fn record_metrics(&self, metrics: &mut Metrics) {
        let kind = self.kind.name();
        metrics.observe(&STALLS, &[kind], self.latency_ns);
        let [unit, container] = container::labels(self.origin.cgroup_info.as_ref());
        let labels = [&self.origin.comm, unit, container, kind];
        metrics.add(&STALLED, &labels, self.latency_ns);
        metrics.add(&RECLAIMED, &labels, self.reclaimed_pages);
    }
}

/// Returns the path of a cgroup, if paths are requested and the cgroup still exists.
fn path_in(cgroups: &mut Option<Cgroups>, id: u64) -> Option<String> {
    let cgroups = cgroups.as_mut().filter(|_| id != 0)?;
    cgroups.path(id).map(str::to_owned)
}
