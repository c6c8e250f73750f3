//! How full the tables are that programs add to, and when they ask for more room
//! (`bpf/include/room.bpf.h`).

use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use libbpf_rs::MapCore;

use crate::bpf::map_mmap::MappedArray;
use crate::bpf::types::{room, room_of};

/// A table that was full again within this time is made larger.
const FAST: Duration = Duration::from_millis(500);

/// Which table it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// The table of distinct stacks.
    Stacks,
    /// The maps of counts by process and stack.
    Counts,
}

/// The room in one table, as programs and we know it.
#[derive(Debug)]
pub struct Room {
    rooms: MappedArray,
    index: usize,
}

impl Room {
    /// The room in this table; `rooms` is the skeleton's map.
    ///
    /// # Errors
    /// If the map cannot be mapped, or has no entry for this table.
    pub fn new(rooms: &impl MapCore, table: Table) -> Result<Self> {
        let index = match table {
            Table::Stacks => room_of::ROOM_STACKS,
            Table::Counts => room_of::ROOM_COUNTS,
        };
        let room = Self {
            rooms: MappedArray::new(rooms).context("failed to see how full the tables are")?,
            index: index.0 as usize,
        };
        // All three are there, or it fails here.
        room.word(offset_of!(room, asked))?;
        Ok(room)
    }

    /// How many entries programs have added since [`Room::begin`].
    ///
    /// # Errors
    /// If the map has no entry for this table.
    pub fn taken(&self) -> Result<u64> {
        Ok(self.word(offset_of!(room, taken))?.load(Ordering::Relaxed))
    }

    /// Whether that is enough to make more room.
    ///
    /// # Errors
    /// If the map has no entry for this table.
    pub fn is_crowded(&self) -> Result<bool> {
        let enough = self.word(offset_of!(room, enough))?.load(Ordering::Relaxed);
        Ok(enough > 0 && self.taken()? >= enough)
    }

    /// Counts from here on, in a table that has so many entries already. Programs ask for more room
    /// when it has `enough`. To be called before the table is replaced: what is then added to the
    /// old one counts, but the new one never has more than is known.
    ///
    /// # Errors
    /// If the map has no entry for this table.
    pub fn begin(&self, taken: u64, enough: u64) -> Result<()> {
        let set = |offset, value| -> Result<()> {
            self.word(offset)?.store(value, Ordering::Release);
            Ok(())
        };
        set(offset_of!(room, enough), enough)?;
        set(offset_of!(room, taken), taken)?;
        set(offset_of!(room, asked), 0)
    }

    fn word(&self, offset: usize) -> Result<&AtomicU64> {
        self.rooms.word(self.index, offset)
    }
}

/// At how many entries programs ask for more room: when a quarter of what was free is taken, since
/// the rest has to last until we come, and for a grace period of the kernel, 10 to 30 ms.
pub fn enough(taken: u64, entries: u32) -> u64 {
    taken + (u64::from(entries).saturating_sub(taken) / 4).max(1)
}

/// What a table was like that is replaced.
#[derive(Debug, Clone, Copy)]
pub struct Filled {
    /// How many entries it had room for.
    pub entries: u32,
    /// How many there were in it.
    pub taken: u64,
    /// How many of these it had from the table before it.
    pub kept: u64,
    /// For how long it was in use.
    pub for_time: Duration,
}

impl Filled {
    /// How many entries the next one is to have, if it may have `most`.
    pub fn next(self, most: u32) -> u32 {
        let entries = u64::from(self.entries);
        let fast = self.for_time < FAST;
        let wanted = if fast { 4 * entries } else { entries };
        let wanted = wanted.max(2 * self.taken).max(4 * self.kept);
        u32::try_from(wanted).unwrap_or(u32::MAX).min(most).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_grows_by_what_is_kept_of_it_and_by_how_fast_it_fills() {
        let filled = Filled {
            entries: 4096,
            taken: 1024,
            kept: 0,
            for_time: Duration::from_secs(1),
        };
        let next = |filled: Filled| filled.next(100_000);
        assert_eq!(next(filled), 4096);
        let in_time = |ms| Filled {
            for_time: Duration::from_millis(ms),
            ..filled
        };
        assert_eq!([in_time(100), in_time(1000)].map(next), [16384, 4096]);
        let taken = 4096;
        assert_eq!(next(Filled { taken, ..filled }), 8192);
        let kept = |kept| Filled { kept, ..filled };
        assert_eq!([kept(3000), kept(99_000)].map(next), [12_000, 100_000]);
        assert_eq!((enough(0, 4096), enough(3096, 4096)), (1024, 3346));
        assert_eq!((enough(0, 1), enough(7, 7)), (1, 8));
    }
}
