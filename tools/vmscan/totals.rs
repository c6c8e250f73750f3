//! Counts of the BPF programs, as sums since the start and as the differences of intervals.

use anyhow::{Context, Result};
use jiff::Zoned;
use libbpf_rs::{MapCore, MapFlags, MapMut};
use memtools::bpf::types;
use memtools::export::exposition::MetricKind;
use memtools::export::metrics::{Family, Metrics};
use memtools::print::histogram::Histogram;

use crate::attach::Available;
use crate::bpf::types::{operation as Operation, total};
use crate::report::{Columns, Interval, Timed};

/// Families that --export writes.
pub(crate) static METRICS: [&Family; 3] = [&OPERATIONS, &WAKEUPS, &WRITTEN];

static OPERATIONS: Family = Family {
    name: "memtools_reclaim_operation_duration_seconds",
    help: "How long operations of page reclaim took, by kind, on all CPUs.",
    labels: &["operation"],
    kind: MetricKind::Durations,
};

static WAKEUPS: Family = Family {
    name: "memtools_kswapd_wakeups_total",
    help: "Times that kswapd was asked to wake up.",
    labels: &[],
    kind: MetricKind::Counter,
};

static WRITTEN: Family = Family {
    name: "memtools_reclaim_written_pages_total",
    help: "Pages (folios) that reclaim began to write out.",
    labels: &[],
    kind: MetricKind::Counter,
};

/// Operations that take time, with their histograms' names.
pub(crate) const TIMED: [(&str, Operation); 5] = [
    ("compaction_ns", Operation::OPERATION_COMPACTION),
    ("direct_reclaim_ns", Operation::OPERATION_DIRECT_RECLAIM),
    ("kswapd_ns", Operation::OPERATION_KSWAPD),
    ("memcg_reclaim_ns", Operation::OPERATION_MEMCG_RECLAIM),
    ("shrink_slab_ns", Operation::OPERATION_SHRINK_SLAB),
];

/// Content of the map `totals` at one moment.
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

    pub(crate) fn latencies(&self, operation: Operation) -> Histogram {
        let total = self.0.get(operation.0 as usize);
        total.map_or_else(Histogram::new, |total| total.latency_ns.slots.into())
    }

    /// Sets the sums for Prometheus of the operations that this kernel has tracepoints for.
    pub(crate) fn record_metrics(&self, has: Available, metrics: &mut Metrics) {
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

    /// Subtracts earlier totals. Returns the interval in between, which ended at `time`.
    pub(crate) fn since(
        &self,
        before: &Self,
        has: Available,
        columns: Columns,
        time: Zoned,
    ) -> Interval {
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
