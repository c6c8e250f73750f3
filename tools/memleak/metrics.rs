//! Sums of each process for `--export FILE.prom` and for `--serve`.

use std::collections::HashMap;

use memtools::export::exposition::MetricKind;
use memtools::export::metrics::Family;

use crate::sums::{Total, View};

const LABELS: &[&str] = &["comm", "unit", "container"];

static OUTSTANDING: [Family; 2] = [
    Family {
        name: "memtools_memleak_outstanding_bytes",
        help: "What was allocated and is not freed, by process.",
        labels: LABELS,
        kind: MetricKind::Gauge,
    },
    Family {
        name: "memtools_memleak_outstanding_allocations",
        help: "Allocations that are not freed, by process.",
        labels: LABELS,
        kind: MetricKind::Gauge,
    },
];
static PEAK: [Family; 2] = [
    Family {
        name: "memtools_memleak_peak_bytes",
        help: "Outstanding bytes at peak usage.",
        labels: LABELS,
        kind: MetricKind::Gauge,
    },
    Family {
        name: "memtools_memleak_peak_allocations",
        help: "Outstanding allocations at peak usage.",
        labels: LABELS,
        kind: MetricKind::Gauge,
    },
];
static ALLOCATED: [Family; 2] = [
    Family {
        name: "memtools_memleak_allocated_bytes_total",
        help: "What was allocated, freed or not, by process.",
        labels: LABELS,
        kind: MetricKind::Counter,
    },
    Family {
        name: "memtools_memleak_allocations_total",
        help: "Allocations, freed or not, by process.",
        labels: LABELS,
        kind: MetricKind::Counter,
    },
];
static CHURNED: [Family; 2] = [
    Family {
        name: "memtools_memleak_churned_bytes_total",
        help: "What was freed within an interval of its allocation, by process.",
        labels: LABELS,
        kind: MetricKind::Counter,
    },
    Family {
        name: "memtools_memleak_churned_allocations_total",
        help: "Allocations that were freed within an interval, by process.",
        labels: LABELS,
        kind: MetricKind::Counter,
    },
];

/// Returns the families of a view's bytes and allocations.
pub(crate) fn families(view: View) -> [&'static Family; 2] {
    let families = match view {
        View::Outstanding => &OUTSTANDING,
        View::Peak => &PEAK,
        View::Allocated => &ALLOCATED,
        View::Churned => &CHURNED,
    };
    families.each_ref()
}

/// Sums of each process at the last report, from which counters go on. A process that takes another name, or a PID that
/// is used again, moves nothing from one series to another: no counter falls.
#[derive(Debug, Default)]
pub(crate) struct CountedSums(HashMap<u32, Total>);

impl CountedSums {
    /// Returns what each process has allocated since the last report, by the sums since the start.
    pub(crate) fn added(&mut self, sums: HashMap<u32, Total>) -> HashMap<u32, Total> {
        let added = sums.iter().map(|(&pid, now)| {
            let before = self.0.get(&pid).copied().unwrap_or_default();
            let added = Total {
                bytes: now.bytes.saturating_sub(before.bytes),
                allocations: now.allocations.saturating_sub(before.allocations),
                ..Total::default()
            };
            (pid, added)
        });
        let added = added.collect();
        self.0 = sums;
        added
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_keeps_what_an_earlier_name_had() {
        let sums = |bytes, allocations| {
            let total = Total {
                bytes,
                allocations,
                ..Total::default()
            };
            HashMap::from([(7, total)])
        };
        let mut counted = CountedSums::default();
        assert_eq!(counted.added(sums(31 * 4093, 31)), sums(31 * 4093, 31));
        assert_eq!(counted.added(sums(31 * 4093 + 89, 32)), sums(89, 1));
        assert_eq!(counted.added(sums(31 * 4093 + 89, 32)), sums(0, 0));
    }
}
