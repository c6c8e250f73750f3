//! Hits of each tracepoint, for --counts.

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapMut};
use memtools::bpf::types;
use memtools::print::clock::{self, Clock};
use memtools::print::output::Output;

use crate::report::Counts;

/// Reader of the hits of tracepoints, which prints what has been added since the last report.
pub(crate) struct CountReports<'a> {
    map: &'a MapMut<'static>,
    /// Index in the map and name of each tracepoint.
    tracepoints: &'a [(usize, String)],
    /// Whether there is more than one report.
    timed: bool,
    clock: Clock,
    before: Vec<u64>,
}

impl<'a> CountReports<'a> {
    pub(crate) fn new(
        map: &'a MapMut<'static>,
        tracepoints: &'a [(usize, String)],
        timed: bool,
    ) -> Self {
        Self {
            map,
            tracepoints,
            timed,
            clock: Clock::new(),
            before: vec![0; tracepoints.len()],
        }
    }

    pub(crate) fn print(&mut self, output: &mut Output) -> Result<()> {
        let mut counts = Vec::with_capacity(self.tracepoints.len());
        for ((number, name), before) in self.tracepoints.iter().zip(&mut self.before) {
            let key = (*number as u32).to_ne_bytes();
            let value = self.map.lookup(&key, MapFlags::ANY);
            let value = value
                .context("failed to read the counts")?
                .unwrap_or_default();
            let now = *types::view::<u64>(&value)?;
            counts.push((name.clone(), now - *before));
            *before = now;
        }
        output.row(&Counts {
            time: self.clock.local(clock::monotonic_ns()),
            tracepoints: counts,
            timed: self.timed,
        })?;
        output.flush()
    }
}
