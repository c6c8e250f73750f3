//! Walk through page tables that finds the pages that were used, as a function of the tables.

use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::time::Instant;

use anyhow::Result;

use super::arch;
use crate::heap::page_index::PAGE;
use crate::heap::page_runs::{self, PageRuns};

/// Number of entries of a table, and number of address bits that select one.
pub(super) const ENTRIES: usize = 512;
const ENTRY_BITS: u32 = 9;
/// Largest number of tables that are read at once.
pub(super) const AT_ONCE: usize = 64;

/// Page table, as it was read.
pub(super) type Table = Box<[u64; ENTRIES]>;

/// Content of an entry of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    /// A page, and whether it has been used since its mark was cleared.
    Page { is_used: bool },
    /// The physical address of a table of the next lower level.
    Table(u64),
    /// No page, or a page that is being moved or swapped.
    Unknown,
}

/// Source from which tables can be read.
pub(super) trait Tables {
    /// Reads up to [`AT_ONCE`] tables by their physical addresses. A table that cannot be read is None.
    fn read(&self, addresses: &[u64]) -> Result<Vec<Option<Table>>>;
}

/// Treatment of pages that are larger than 4 KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HugePagePolicy {
    /// Larger pages are used if they are marked, as small pages are.
    Judged,
    /// Larger pages count as used.
    Used,
    /// Larger pages count as not used.
    CountAsIdle,
}

/// Walk through the page tables of a process.
pub(super) struct Walk<'a, T> {
    tables: &'a T,
    /// Pages whose use is requested.
    wanted: &'a [Range<u64>],
    huge: HugePagePolicy,
    /// Time at which the walk is given up.
    until: Option<Instant>,
    used: PageRuns,
}

/// The time for a walk is over.
#[derive(Debug)]
pub(super) struct OutOfTime;

impl fmt::Display for OutOfTime {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("the time for reading page tables is over")
    }
}

impl Error for OutOfTime {}

impl<'a, T: Tables> Walk<'a, T> {
    pub(super) fn new(
        tables: &'a T,
        wanted: &'a [Range<u64>],
        huge: HugePagePolicy,
        until: Option<Instant>,
    ) -> Self {
        Self {
            tables,
            wanted,
            huge,
            until,
            used: PageRuns::new(),
        }
    }

    /// Returns the wanted pages that have been used, according to the tables below this root, which have this many
    /// levels. Pages that the tables say nothing about count as used.
    ///
    /// # Errors
    /// If tables cannot be read at all; [`OutOfTime`].
    pub(super) fn used(mut self, root: u64, levels: u32) -> Result<PageRuns> {
        let end = 1 << (PAGE.trailing_zeros() + ENTRY_BITS * levels);
        let whole = 0..end;
        match self.tables.read(&[root])?.pop().flatten() {
            Some(table) => self.visit(root, &table, levels - 1, 0)?,
            None => self.add(&whole),
        }
        Ok(self.used)
    }

    /// Walks through a table and the tables below it. `start` is the address that its first entry translates.
    fn visit(&mut self, address: u64, table: &Table, level: u32, start: u64) -> Result<()> {
        let bytes = PAGE << (ENTRY_BITS * level);
        let covered = start..start + bytes * ENTRIES as u64;
        let mut indexes: Vec<usize> = Vec::new();
        for run in page_runs::within(self.wanted, &covered) {
            let first = (run.start.max(covered.start) - start) / bytes;
            let last = (run.end.min(covered.end) - 1 - start) / bytes;
            let next = indexes.last().map_or(0, |&index| index + 1);
            indexes.extend((first as usize).max(next)..=last as usize);
        }
        let range = |index: usize| {
            let start = start + bytes * index as u64;
            start..start + bytes
        };
        for indexes in indexes.chunks(AT_ONCE) {
            if self.until.is_some_and(|until| Instant::now() >= until) {
                return Err(OutOfTime.into());
            }
            let entry = |&index: &usize| (index, arch::entry(table[index], level));
            let entries: Vec<(usize, Entry)> = indexes.iter().map(entry).collect();
            let below = self.below(address, level, &entries)?;
            for ((index, entry), below) in entries.into_iter().zip(below) {
                match (entry, below) {
                    (Entry::Page { .. }, _)
                        if level > 0 && self.huge == HugePagePolicy::CountAsIdle => {}
                    (Entry::Page { .. }, _) if level > 0 && self.huge == HugePagePolicy::Used => {
                        self.add(&range(index));
                    }
                    (Entry::Page { is_used: false }, _) => {}
                    (Entry::Table(address), Some(table)) => {
                        self.visit(address, &table, level - 1, range(index).start)?;
                    }
                    _ => self.add(&range(index)),
                }
            }
        }
        Ok(())
    }

    /// Reads the tables that entries of a table refer to. Each entry comes with its index in the table at `address`.
    /// Returns None for other entries, and where the entry has changed meanwhile: its table may have become something
    /// else.
    fn below(
        &self,
        address: u64,
        level: u32,
        entries: &[(usize, Entry)],
    ) -> Result<Vec<Option<Table>>> {
        let named = entries.iter().filter_map(|(_, entry)| match entry {
            Entry::Table(address) => Some(*address),
            _ => None,
        });
        let named: Vec<u64> = named.collect();
        if named.is_empty() {
            return Ok(vec![None; entries.len()]);
        }
        let mut tables = self.tables.read(&named)?.into_iter();
        let again = self.tables.read(&[address])?.pop().flatten();
        let below = entries.iter().map(|&(index, entry)| {
            let table = match entry {
                Entry::Table(_) => tables.next().flatten(),
                _ => None,
            };
            let now = again.as_ref().map(|again| arch::entry(again[index], level));
            table.filter(|_| now == Some(entry))
        });
        Ok(below.collect())
    }

    /// Adds the wanted pages of a range to the used pages.
    fn add(&mut self, range: &Range<u64>) {
        for run in page_runs::within(self.wanted, range) {
            let part = run.start.max(range.start)..run.end.min(range.end);
            page_runs::add(&mut self.used, part);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::HashMap;
    use std::slice;

    use super::*;

    const PRESENT: u64 = 0x67 & !ACCESSED;
    const ACCESSED: u64 = 1 << 5;
    const HUGE: u64 = 1 << 7;

    /// Page tables by address.
    #[derive(Default)]
    struct Made {
        tables: RefCell<HashMap<u64, Table>>,
        /// Entry that is cleared as soon as this table has been read.
        vanishes: Option<(u64, (u64, usize))>,
    }

    impl Tables for Made {
        fn read(&self, addresses: &[u64]) -> Result<Vec<Option<Table>>> {
            assert!(addresses.len() <= AT_ONCE);
            let read = |address| self.tables.borrow().get(address).cloned();
            let read = addresses.iter().map(read).collect();
            if let Some((trigger, (table, index))) = self.vanishes
                && addresses.contains(&trigger)
            {
                let mut tables = self.tables.borrow_mut();
                tables.get_mut(&table).expect("a table")[index] = 0;
            }
            Ok(read)
        }
    }

    impl Made {
        fn put(&self, table: u64, index: usize, word: u64) {
            let mut tables = self.tables.borrow_mut();
            tables
                .entry(table)
                .or_insert_with(|| Box::new([0; ENTRIES]))[index] = word;
        }

        /// Maps a page of 4 KiB by tables of four levels. The address of each table is made of its level and the
        /// page's address.
        fn map(&self, page: u64, flags: u64) {
            let mut table = ROOT;
            for level in [3, 2, 1] {
                let shift = 12 + 9 * level;
                let below = (level << 44) | (page >> shift << 12);
                self.put(table, (page >> shift) as usize % ENTRIES, below | PRESENT);
                table = below;
            }
            self.put(table, (page >> 12) as usize % ENTRIES, 0x5000 | flags);
        }

        fn used(&self, wanted: &[Range<u64>], huge: HugePagePolicy) -> PageRuns {
            let walk = Walk::new(self, wanted, huge, None);
            walk.used(ROOT, 4).expect("tables")
        }
    }

    const ROOT: u64 = 7 << 44;
    const GIB: u64 = 1 << 30;

    #[test]
    fn pages_that_were_used_are_found_among_those_wanted() {
        let made = Made::default();
        // One in seven pages was used, in 200 tables of pages, across the ends of the tables above.
        let start = GIB - 100 * (2 << 20);
        let end = GIB + 100 * (2 << 20);
        for page in (start..end).step_by(4096) {
            let flags = PRESENT | if page / 4096 % 7 == 3 { ACCESSED } else { 0 };
            made.map(page, flags);
        }
        let expected = |wanted: Range<u64>| -> PageRuns {
            let pages = wanted.step_by(4096).filter(|page| page / 4096 % 7 == 3);
            pages.map(|page| page..page + 4096).collect()
        };
        let whole = start..end;
        let all = slice::from_ref(&whole);
        assert_eq!(made.used(all, HugePagePolicy::Judged), expected(start..end));
        assert_eq!(
            made.used(all, HugePagePolicy::CountAsIdle),
            expected(start..end)
        );
        let wanted = [
            start + 0x5000..start + 0x100_0000,
            GIB - 0x9000..GIB + 0x9000,
        ];
        let both = [expected(wanted[0].clone()), expected(wanted[1].clone())].concat();
        assert_eq!(made.used(&wanted, HugePagePolicy::Judged), both);
    }

    #[test]
    fn large_pages_are_used_as_a_whole_or_left_out() {
        let made = Made::default();
        made.map(GIB, PRESENT);
        let middle = (1 << 44) | (GIB >> 21 << 12);
        let (third, directory) = (GIB + (4 << 20), (2 << 44) | (GIB >> 30 << 12));
        assert_ne!(middle, directory);
        made.put(directory, 2, 0x4000_0000 | HUGE | PRESENT | ACCESSED);
        made.put(directory, 3, 0x4000_0000 | HUGE | PRESENT);
        let wanted = [GIB..GIB + 0x1000, third + 0x3000..third + (4 << 20)];
        let large = third + 0x3000..third + (2 << 20);
        assert_eq!(made.used(&wanted, HugePagePolicy::Judged), [large]);
        assert!(made.used(&wanted, HugePagePolicy::CountAsIdle).is_empty());
        assert_eq!(made.used(&wanted, HugePagePolicy::Used), wanted[1..]);
    }

    #[test]
    fn what_is_not_told_counts_as_used() {
        let made = Made::default();
        made.map(GIB, PRESENT);
        made.map(GIB + 0x2000, PRESENT);
        // The tables have nothing between the two pages, and no table for the range far away.
        let far = 5 * GIB..5 * GIB + 0x3000;
        let wanted = [GIB..GIB + 0x3000, far.clone()];
        let between = GIB + 0x1000..GIB + 0x2000;
        assert_eq!(made.used(&wanted, HugePagePolicy::Judged), [between, far]);
        let none = Made::default();
        assert_eq!(none.used(&wanted, HugePagePolicy::Judged), wanted);
    }

    #[test]
    fn a_walk_is_given_up_when_its_time_is_over() {
        let made = Made::default();
        made.map(GIB, PRESENT);
        let wanted = GIB..GIB + 0x1000;
        let walk = |until| {
            let wanted = slice::from_ref(&wanted);
            Walk::new(&made, wanted, HugePagePolicy::Judged, Some(until)).used(ROOT, 4)
        };
        let error = walk(Instant::now()).expect_err("no time");
        assert!(error.is::<OutOfTime>());
        let later = Instant::now() + std::time::Duration::from_secs(60);
        assert!(walk(later).expect("tables").is_empty());
    }

    #[test]
    fn a_table_that_is_given_back_meanwhile_is_not_believed() {
        let mut made = Made::default();
        let page = GIB..GIB + 0x1000;
        let wanted = slice::from_ref(&page);
        made.map(GIB, PRESENT);
        assert!(made.used(wanted, HugePagePolicy::Judged).is_empty());
        let (pages, directory) = ((1 << 44) | (GIB >> 21 << 12), (2 << 44) | (GIB >> 30 << 12));
        made.vanishes = Some((pages, (directory, 0)));
        assert_eq!(made.used(wanted, HugePagePolicy::Judged), wanted);
    }
}
