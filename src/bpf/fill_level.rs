//! Fill levels of the tables that BPF programs add to, and when the programs ask for a larger table
//! (`bpf/include/fill_level.bpf.h`).

use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use libbpf_rs::MapCore;

use crate::bpf::map_mmap::MappedArray;
use crate::bpf::types::{fill_level, table_id};

/// A table that filled within this time is replaced by a larger one.
const FAST: Duration = Duration::from_millis(500);

/// A table that BPF programs add entries to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// The table of distinct stacks.
    Stacks,
    /// The maps of counts by process and stack.
    Counts,
}

/// Fill level of one table, shared by BPF programs and user space.
#[derive(Debug)]
pub struct FillLevel {
    fill_levels: MappedArray,
    index: usize,
}

impl FillLevel {
    /// Opens the fill level of a table; `fill_levels` is the skeleton's map.
    ///
    /// # Errors
    /// If the map cannot be mapped, or has no entry for this table.
    pub fn new(fill_levels: &impl MapCore, table: Table) -> Result<Self> {
        let index = match table {
            Table::Stacks => table_id::TABLE_STACKS,
            Table::Counts => table_id::TABLE_COUNTS,
        };
        let level = Self {
            fill_levels: MappedArray::new(fill_levels)
                .context("failed to see how full the tables are")?,
            index: index.0 as usize,
        };
        // The last word of the entry: if it exists, the other two do.
        level.word(offset_of!(fill_level, is_requested))?;
        Ok(level)
    }

    /// Returns the number of entries in the table: those that `FillLevel::reset` was given, and those that programs
    /// have added since.
    ///
    /// # Errors
    /// If the map has no entry for this table.
    pub fn used(&self) -> Result<u64> {
        Ok(self
            .word(offset_of!(fill_level, used))?
            .load(Ordering::Relaxed))
    }

    /// Whether the table has enough entries to be replaced.
    ///
    /// # Errors
    /// If the map has no entry for this table.
    pub fn needs_growth(&self) -> Result<bool> {
        let threshold = self
            .word(offset_of!(fill_level, threshold))?
            .load(Ordering::Relaxed);
        Ok(threshold > 0 && self.used()? >= threshold)
    }

    /// Starts the count of a table that has `used` entries already. Programs ask for a larger table when it has
    /// `threshold` entries. Call this before the table is replaced. Entries that are added to the old table in between
    /// are counted too, so that the new table never has more entries than counted.
    ///
    /// # Errors
    /// If the map has no entry for this table.
    pub(crate) fn reset(&self, used: u64, threshold: u64) -> Result<()> {
        let set = |offset, value| -> Result<()> {
            self.word(offset)?.store(value, Ordering::Release);
            Ok(())
        };
        set(offset_of!(fill_level, threshold), threshold)?;
        set(offset_of!(fill_level, used), used)?;
        set(offset_of!(fill_level, is_requested), 0)
    }

    fn word(&self, offset: usize) -> Result<&AtomicU64> {
        self.fill_levels.word(self.index, offset)
    }
}

/// Returns the number of entries at which programs ask for a larger table: when a quarter of the free entries is
/// used. The rest has to last until user space reacts, and for a grace period of the kernel, 10 to 30 ms.
pub(crate) fn growth_threshold(used: u64, entries: u32) -> u64 {
    used + (u64::from(entries).saturating_sub(used) / 4).max(1)
}

/// Fill level and age of a table that is replaced.
#[derive(Debug, Clone, Copy)]
pub struct TableUsage {
    /// Capacity of the table, in entries.
    pub entries: u32,
    /// Entries in the table.
    pub used: u64,
    /// Entries that the table took over from the table before it.
    pub kept: u64,
    /// Time for which the table was in use.
    pub age: Duration,
}

impl TableUsage {
    /// Returns the capacity of the next table, in entries; `most` is the maximum.
    pub(crate) fn next_capacity(self, most: u32) -> u32 {
        let entries = u64::from(self.entries);
        let fast = self.age < FAST;
        let wanted = if fast { 4 * entries } else { entries };
        // A table that has filled beyond its threshold before user space reacts is filling fast, whatever its age.
        let wanted = wanted.max(4 * self.used).max(4 * self.kept);
        u32::try_from(wanted).unwrap_or(u32::MAX).min(most).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_grows_by_what_is_kept_of_it_and_by_how_fast_it_fills() {
        let filled = TableUsage {
            entries: 4096,
            used: 1024,
            kept: 0,
            age: Duration::from_secs(1),
        };
        let next = |filled: TableUsage| filled.next_capacity(100_000);
        assert_eq!(next(filled), 4096);
        let in_time = |ms| TableUsage {
            age: Duration::from_millis(ms),
            ..filled
        };
        assert_eq!([in_time(100), in_time(1000)].map(next), [16384, 4096]);
        let used = 4096;
        assert_eq!(next(TableUsage { used, ..filled }), 16384);
        let kept = |kept| TableUsage { kept, ..filled };
        assert_eq!([kept(3000), kept(99_000)].map(next), [12_000, 100_000]);
        assert_eq!(
            (growth_threshold(0, 4096), growth_threshold(3096, 4096)),
            (1024, 3346)
        );
        assert_eq!((growth_threshold(0, 1), growth_threshold(7, 7)), (1, 8));
    }
}
