//! Numbers of a report as metrics for --serve, and what else process and kernel mode need for it.

use anyhow::Result;
use memtools::export::profile::Profile;
use memtools::run::losses::Losses;
use memtools::run::privileges;
use memtools::serve::address::Listener;
use memtools::serve::openmetrics::{Family, Kind};
use memtools::serve::server::Server;
use memtools::serve::trend::Key;

use crate::plan::MemorySettings;
use crate::sums::{StackKey, Sum, Total, Totals, View};

/// Begins to serve reports, by threads without privileges, and prints the address.
pub(crate) fn start(listener: Listener, memory: &MemorySettings) -> Result<Server> {
    let server = Server::start(listener, memory.served_bytes(), privileges::keep_serving)?;
    eprintln!("memleak: serving {}", server.address());
    Ok(server)
}

/// Returns the key that identifies a stack.
pub(crate) fn key(key: StackKey) -> Key {
    (key.pid, key.stack)
}

/// Returns the bytes of each stack.
pub(crate) fn bytes(totals: &Totals) -> impl Iterator<Item = (Key, u64)> {
    totals
        .iter()
        .map(|(&stack, total)| (key(stack), total.bytes))
}

/// Counts of frees that do not match the records. None where a count is not known.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct UnmatchedFrees {
    pub(crate) unknown: Option<u64>,
    pub(crate) double: Option<u64>,
    pub(crate) unseen: u64,
}

/// Numbers of a report, for metrics.
pub(crate) struct Numbers {
    pub(crate) view: View,
    pub(crate) sum: Sum,
    pub(crate) frees: UnmatchedFrees,
    /// Hits of the probes, if they are counted.
    pub(crate) hits: Option<u64>,
    pub(crate) lost: Losses,
}

impl Numbers {
    /// Returns the metrics of /metrics.
    pub(crate) fn families(&self, profile: &Profile) -> Vec<Family> {
        let mut families = self.of_view();
        families.push(Family::one(
            Kind::Counter,
            "memtools_memleak_unseen_frees",
            "",
            "Missed frees: their addresses were allocated again.",
            self.frees.unseen,
        ));
        let known = [
            (
                self.frees.unknown,
                "memtools_memleak_unknown_frees",
                "Frees of what was not recorded, such as what is older than the trace.",
            ),
            (
                self.frees.double,
                "memtools_memleak_double_frees",
                "Frees of what had been freed, and was not allocated since.",
            ),
            (
                self.hits,
                "memtools_memleak_probe_hits",
                "Entries into probed functions, and returns from them.",
            ),
        ];
        for (number, name, help) in known {
            families
                .extend(number.map(|number| Family::one(Kind::Counter, name, "", help, number)));
        }
        families.push(by_reason(
            "memtools_lost",
            "What a tool could not record, by reason.",
            &self.lost.by_reason(),
        ));
        families.push(by_reason(
            "memtools_incomplete",
            "What a tool has recorded in part, or may not have recorded, as is normal.",
            &self.lost.normal_by_reason(),
        ));
        families.push(info(profile));
        families
    }

    /// Returns the sums of the profile. Sums that can fall are gauges.
    fn of_view(&self) -> Vec<Family> {
        let Total {
            bytes, allocations, ..
        } = self.sum.total;
        let bytes_of = |kind, name, help| Family::one(kind, name, "bytes", help, bytes);
        let count_of = |kind, name, help| Family::one(kind, name, "", help, allocations);
        match self.view {
            View::Outstanding => vec![
                bytes_of(
                    Kind::Gauge,
                    "memtools_memleak_outstanding_bytes",
                    "What was allocated and is not freed.",
                ),
                count_of(
                    Kind::Gauge,
                    "memtools_memleak_outstanding_allocations",
                    "Allocations that are not freed.",
                ),
                Family::one(
                    Kind::Gauge,
                    "memtools_memleak_outstanding_stacks",
                    "",
                    "Call stacks with allocations that are not freed.",
                    self.sum.stacks as u64,
                ),
            ],
            View::Peak => vec![
                bytes_of(
                    Kind::Gauge,
                    "memtools_memleak_peak_bytes",
                    "Outstanding bytes at peak usage.",
                ),
                count_of(
                    Kind::Gauge,
                    "memtools_memleak_peak_allocations",
                    "Outstanding allocations at peak usage.",
                ),
            ],
            View::Allocated => vec![
                bytes_of(
                    Kind::Counter,
                    "memtools_memleak_allocated_bytes",
                    "What was allocated, freed or not.",
                ),
                count_of(
                    Kind::Counter,
                    "memtools_memleak_allocations",
                    "Allocations, freed or not.",
                ),
            ],
            View::Churned => vec![
                bytes_of(
                    Kind::Counter,
                    "memtools_memleak_churned_bytes",
                    "What was freed within an interval of its allocation.",
                ),
                count_of(
                    Kind::Counter,
                    "memtools_memleak_churned_allocations",
                    "Allocations that were freed within an interval.",
                ),
            ],
        }
    }
}

/// Makes the family of what was lost, by reason.
fn by_reason(name: &'static str, help: &'static str, lost: &[(&str, u64)]) -> Family {
    let labels = |what: &str| vec![("what", what.to_owned()), ("tool", "memleak".to_owned())];
    Family {
        name,
        help,
        unit: "",
        kind: Kind::Counter,
        series: lost
            .iter()
            .map(|&(what, lost)| (labels(what), lost))
            .collect(),
    }
}

/// Returns the metric that describes the trace: its target, and the remarks that a reader of the numbers has to know.
fn info(profile: &Profile) -> Family {
    let labels = [
        ("target", profile.target.clone()),
        ("subject", profile.subject.clone()),
        ("remarks", profile.remarks.join("; ")),
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
    ];
    Family {
        name: "memtools_memleak",
        help: "What is traced.",
        unit: "",
        kind: Kind::Info,
        series: vec![(labels.into(), 1)],
    }
}
