//! What process and kernel mode need for --serve, beside the sums of each process.

use anyhow::Result;
use memtools::export::exposition::{Exposed, MetricKind};
use memtools::export::profile::Profile;
use memtools::run::privileges;
use memtools::serve::address::Listener;
use memtools::serve::server::Server;
use memtools::serve::trend::Key;

use crate::plan::MemorySettings;
use crate::sums::{StackKey, Totals};

/// Begins to serve reports, by threads without privileges, and prints the address.
pub(crate) fn start(listener: Listener, memory: &MemorySettings) -> Result<Server> {
    let server = Server::start(listener, memory.served_bytes(), privileges::keep_serving)?;
    memtools::message!("serving {}", server.address());
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

/// Numbers of a report that only its clients get, as metrics.
pub(crate) struct Numbers {
    /// Stacks with outstanding allocations, if the report is about them.
    pub(crate) outstanding_stacks: Option<usize>,
    pub(crate) frees: UnmatchedFrees,
    /// Hits of the probes, if they are counted.
    pub(crate) hits: Option<u64>,
}

impl Numbers {
    /// Returns the metrics, and what describes the trace.
    pub(crate) fn families(&self, profile: &Profile) -> Vec<Exposed> {
        let known = [
            (
                MetricKind::Gauge,
                "memtools_memleak_outstanding_stacks",
                "Call stacks with allocations that are not freed.",
                self.outstanding_stacks.map(|stacks| stacks as u64),
            ),
            (
                MetricKind::Counter,
                "memtools_memleak_unseen_frees",
                "Missed frees: their addresses were allocated again.",
                Some(self.frees.unseen),
            ),
            (
                MetricKind::Counter,
                "memtools_memleak_unknown_frees",
                "Frees of what was not recorded, such as what is older than the trace.",
                self.frees.unknown,
            ),
            (
                MetricKind::Counter,
                "memtools_memleak_double_frees",
                "Frees of what had been freed, and was not allocated since.",
                self.frees.double,
            ),
            (
                MetricKind::Counter,
                "memtools_memleak_probe_hits",
                "Entries into probed functions, and returns from them.",
                self.hits,
            ),
        ];
        let known = known
            .into_iter()
            .filter_map(|(kind, name, help, number)| Some(Exposed::one(kind, name, help, number?)));
        known.chain([info(profile)]).collect()
    }
}

/// Returns the metric that describes the trace: its target, and the remarks that a reader of the numbers has to know.
fn info(profile: &Profile) -> Exposed {
    let labels = vec![
        ("target", profile.target.clone()),
        ("subject", profile.subject.clone()),
        ("remarks", profile.remarks.join("; ")),
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
    ];
    Exposed {
        name: "memtools_memleak",
        help: "What is traced.",
        kind: MetricKind::Info,
        series: vec![(labels, 1.into())],
    }
}
