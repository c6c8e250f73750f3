//! Sums of each process for `--export FILE.prom`. They have the names of the metrics of `--serve`.

use memtools::export::metrics::{Family, Kind};

use crate::sums::View;

const LABELS: &[&str] = &["comm", "unit", "container"];

static OUTSTANDING: [Family; 2] = [
    Family {
        name: "memtools_memleak_outstanding_bytes",
        help: "What was allocated and is not freed, by process.",
        labels: LABELS,
        kind: Kind::Gauge,
    },
    Family {
        name: "memtools_memleak_outstanding_allocations",
        help: "Allocations that are not freed, by process.",
        labels: LABELS,
        kind: Kind::Gauge,
    },
];
static PEAK: [Family; 2] = [
    Family {
        name: "memtools_memleak_peak_bytes",
        help: "Outstanding bytes at peak usage.",
        labels: LABELS,
        kind: Kind::Gauge,
    },
    Family {
        name: "memtools_memleak_peak_allocations",
        help: "Outstanding allocations at peak usage.",
        labels: LABELS,
        kind: Kind::Gauge,
    },
];
static ALLOCATED: [Family; 2] = [
    Family {
        name: "memtools_memleak_allocated_bytes_total",
        help: "What was allocated, freed or not, by process.",
        labels: LABELS,
        kind: Kind::Count,
    },
    Family {
        name: "memtools_memleak_allocations_total",
        help: "Allocations, freed or not, by process.",
        labels: LABELS,
        kind: Kind::Count,
    },
];
static CHURNED: [Family; 2] = [
    Family {
        name: "memtools_memleak_churned_bytes_total",
        help: "What was freed within an interval of its allocation, by process.",
        labels: LABELS,
        kind: Kind::Count,
    },
    Family {
        name: "memtools_memleak_churned_allocations_total",
        help: "Allocations that were freed within an interval, by process.",
        labels: LABELS,
        kind: Kind::Count,
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
