//! Counts of the BPF programs as a report.

use anyhow::{Context, Result};
use jiff::Zoned;
use libbpf_rs::MapMut;
use memtools::bpf::map_counts::Counts;
use memtools::export::metrics::Metrics;
use memtools::print::clock::{self, Clock};
use memtools::print::histogram::{self, Histogram};
use memtools::print::output::Output;
use memtools::print::text;
use memtools::process::container::CgroupResolver;

use crate::args::Args;
use crate::bpf::Loaded;
use crate::bpf::types::{task_key, total};
use crate::row::{self, Columns, Row};

/// Reader of the counts, which prints what has been added since the last report.
pub(crate) struct Report<'a> {
    counts: Counts<'a, MapMut<'static>, task_key, total>,
    cgroup_resolver: Option<CgroupResolver<'a>>,
    skel: &'a Loaded,
    clock: Clock,
    columns: Columns,
    /// Whether the time of each report is omitted.
    notime: bool,
    /// Whether pages that zswap held are counted separately.
    knows_zswap: bool,
    held_up_ns: u64,
}

impl<'a> Report<'a> {
    pub(crate) fn new(args: &Args, skel: &'a Loaded, knows_zswap: bool) -> Self {
        let maps = &skel.maps;
        let with_cgroups = args.containers.wanted(args.common.wants_cgroups());
        Self {
            counts: Counts::new(&maps.totals, &maps.totals_a, &maps.totals_b),
            cgroup_resolver: CgroupResolver::if_wanted(with_cgroups, &maps.cgroup_paths),
            skel,
            clock: Clock::new(),
            columns: Columns {
                container: args.containers.container,
                zswap: args.zswap,
                latency: args.latency,
                out: args.out,
            },
            notime: args.notime,
            knows_zswap,
            held_up_ns: 0,
        }
    }

    pub(crate) fn print(&mut self, output: &mut Output, metrics: &mut Metrics) -> Result<()> {
        let time = self.clock.local(clock::monotonic_ns());
        if !self.notime {
            output.header(&clock::time_of_day(&time))?;
        }
        output.header(&self.columns.header())?;
        for row in self.rows(&time)? {
            self.held_up_ns += row.held_up_ns.unwrap_or(0);
            row.record_metrics(metrics);
            output.row(&row)?;
        }
        if self.columns.latency {
            metrics.set_durations(&row::HELD_UP, &[], self.latencies()?, self.held_up_ns);
        }
        output.header("")?;
        output.flush()
    }

    /// Prints the histogram of the delays of tasks, if it is requested.
    pub(crate) fn print_latencies(&self, output: &mut Output) -> Result<()> {
        if self.columns.latency {
            output.row(&histogram::Named {
                name: "swapin_ns",
                buckets: self.latencies()?,
            })?;
            output.flush()?;
        }
        Ok(())
    }

    /// Returns the histogram of the delays of tasks since the start.
    fn latencies(&self) -> Result<Histogram> {
        let bss = self.skel.maps.bss_data.as_deref();
        let slots = bss.context("the BPF object has no data")?.latency_ns.slots;
        Ok(slots.into())
    }

    /// Returns the counts of one interval; the process that read the most pages comes last.
    fn rows<'t>(&mut self, time: &'t Zoned) -> Result<Vec<Row<'t>>> {
        let (columns, knows_zswap) = (self.columns, self.knows_zswap);
        let counts = self.counts.take()?;
        let row = |(key, total): (task_key, total)| Row {
            time,
            pid: key.pid,
            comm: text::from_c(&key.comm),
            cgroup_info: self
                .cgroup_resolver
                .as_mut()
                .map(|cgroup_resolver| cgroup_resolver.of(key.cgroup)),
            pages_in: total.pages_in,
            pages_zswap: knows_zswap.then_some(total.pages_zswap),
            pages_out: columns.out.then_some(total.pages_out),
            held_up_ns: columns.latency.then_some(total.held_up_ns),
            columns,
        };
        let mut rows: Vec<Row<'_>> = counts.into_iter().map(row).collect();
        rows.sort_by_key(|row| (row.pages_in, row.pages_out, row.pid));
        Ok(rows)
    }
}
