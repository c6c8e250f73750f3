//! Renewals of the stack table, which drop the stacks of freed blocks to make space for new ones.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use anyhow::Result;
use libbpf_rs::skel::Skel;
use memtools::bpf::map_batch;
use memtools::bpf::types;
use memtools::print::output::Output;
use memtools::run::losses::Losses;

use super::Processes;
use super::bpf::types::{thread, total_key};
use super::regions::Regions;

/// Minimum ratio of the time between two renewals to the duration of a renewal, unless the table grows.
const RENEWAL_PART: u32 = 10;
/// Renewals that take less time may follow each other at once as long as the table can grow. There are only a few of
/// them: a table that fills within half a second, [`RENEWAL_PART`] times this, is replaced by a larger one.
const SHORT: Duration = Duration::from_millis(50);
/// Minimum time between two renewals of a table that is full.
const FULL_PAUSE: Duration = Duration::from_secs(1);

/// Last renewal of the stack table.
#[derive(Debug, Default)]
pub(super) struct Renewal {
    /// End and duration of the renewal.
    last: Option<(Instant, Duration)>,
    /// Number of stacks that were lost until then.
    lost_stacks: u64,
}

impl Processes<'_> {
    /// Whether the stack table is to be renewed: it is filling up, or it is full and may have stacks of freed blocks.
    pub(super) fn wants_stacks_renewed(&self) -> Result<bool> {
        let can_grow = !self.stacks.is_largest();
        let is_due = |least: Duration| {
            let due = |(time, took): (Instant, Duration)| {
                let grows = can_grow && took < SHORT;
                let part = if grows { 1 } else { RENEWAL_PART };
                time.elapsed() >= least.max(took * part)
            };
            self.renewal.last.is_none_or(due)
        };
        if self.stacks.needs_growth()? {
            return Ok(is_due(Duration::ZERO));
        }
        Ok(is_due(FULL_PAUSE)
            && Losses::counted(self.attached.skel.object())?.stacks > self.renewal.lost_stacks)
    }

    /// Renews the stack table, so that it keeps only the stacks that something live refers to.
    pub(super) fn renew_stacks(&mut self, output: &mut Output) -> Result<()> {
        self.stacks.renew()?;
        // The renewal until here was mostly waiting.
        let begun = Instant::now();
        // Events so far can refer to the old table, and later ones only to the new table.
        self.take(self.rings.events.drain()?, output)?;
        let referred_to = self.stacks_referred_to()?;
        let count = referred_to.len();
        self.stacks.keep(referred_to)?;
        self.stacks.forget_read();
        self.renewal.lost_stacks = Losses::counted(self.attached.skel.object())?.stacks;
        self.renewal.last = Some((Instant::now(), begun.elapsed()));
        if self.plan.verbose {
            let took = begun.elapsed();
            memtools::message!(
                "kept {count} stacks, in {took:.1?}, in a table of {}",
                self.stacks.entries()
            );
        }
        Ok(())
    }

    /// Returns the stacks of all that a report can show. Blocks are read before the calls in flight: these hold the
    /// blocks that realloc may put back.
    fn stacks_referred_to(&mut self) -> Result<HashSet<u64>> {
        let maps = &self.attached.skel.maps;
        let mut stacks = HashSet::new();
        let mut of_key = |key: &[u8], _: &[u8]| {
            stacks.insert(types::view::<total_key>(key)?.stack);
            Ok(())
        };
        map_batch::for_each(&maps.totals, &mut of_key)?;
        map_batch::for_each(&maps.unknown_frees, &mut of_key)?;
        let blocks = self.read_blocks()?;
        stacks.extend(blocks.iter().map(|block| block.stack));
        stacks.extend(self.exited_totals.stacks());
        map_batch::for_each(&maps.threads, |_, thread| {
            stacks.insert(types::view::<thread>(thread)?.held.stack);
            Ok(())
        })?;
        let regions = self.regions.values().flat_map(Regions::iter);
        stacks.extend(regions.map(|region| region.stack));
        stacks.extend(self.mapped.keys().map(|key| key.stack));
        Ok(stacks)
    }
}
