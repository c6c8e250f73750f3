//! Pages of memleak's own. They prove that page tables are read as they are, and measure how many marks of use are
//! lost: reclaim, DAMON and others clear marks, too.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::slice;

use anyhow::{Context, Result};
use memmap2::{Advice, MmapMut};

use super::walk::ENTRIES;
use crate::heap::page_index::PAGE;
use crate::heap::page_runs::{self, PageRuns};

/// Number of pages of 4 KiB. Some of them are used once.
const PAGES: u64 = 4096;
/// Number of pages in each group. Two pages of a group are used.
const STEP: u64 = 7;
const HUGE_PAGE: u64 = 2 << 20;
/// Number of huge pages. All of them are used once.
const HUGE_PAGES: u64 = 16;

/// Pages that have all been written to, and of which some are used once more.
#[derive(Debug)]
pub(super) struct OwnPages {
    pagemap: File,
    memory: MmapMut,
    range: Range<u64>,
    /// Content of the first page.
    content: Box<[u64; ENTRIES]>,
    huge_memory: MmapMut,
    huge_range: Range<u64>,
}

impl OwnPages {
    /// Makes the pages, and writes to all of them.
    ///
    /// # Errors
    /// If there is no memory, or the kernel has no random numbers.
    pub(super) fn new() -> Result<Self> {
        let mut memory = MmapMut::map_anon((PAGES * PAGE) as usize).context("no memory")?;
        // A kernel without huge pages refuses this advice.
        let _ = memory.advise(Advice::NoHugePage);
        memory.fill(1);
        let first = &mut memory[..PAGE as usize];
        let random = File::open("/dev/urandom").and_then(|mut file| file.read_exact(first));
        random.context("failed to read random numbers")?;
        let mut content = Box::new([0; ENTRIES]);
        let (words, _) = memory.as_chunks::<8>();
        for (to, word) in content.iter_mut().zip(words) {
            *to = u64::from_ne_bytes(*word);
        }
        let start = memory.as_ptr() as u64;
        let huge_bytes = (HUGE_PAGES + 1) * HUGE_PAGE;
        let mut huge_memory = MmapMut::map_anon(huge_bytes as usize).context("no memory")?;
        let _ = huge_memory.advise(Advice::HugePage);
        let huge_start = (huge_memory.as_ptr() as u64).next_multiple_of(HUGE_PAGE);
        let before = huge_start - huge_memory.as_ptr() as u64;
        huge_memory[before as usize..(before + HUGE_PAGES * HUGE_PAGE) as usize].fill(1);
        Ok(Self {
            pagemap: File::open("/proc/self/pagemap").context("failed to open our own pagemap")?,
            memory,
            range: start..start + PAGES * PAGE,
            content,
            huge_memory,
            huge_range: huge_start..huge_start + HUGE_PAGES * HUGE_PAGE,
        })
    }

    pub(super) fn pagemap(&self) -> &File {
        &self.pagemap
    }

    /// Returns the first page's address, and its content.
    pub(super) fn known(&self) -> (u64, &[u64; ENTRIES]) {
        (self.range.start, &self.content)
    }

    /// Returns all pages of 4 KiB.
    pub(super) fn small(&self) -> &[Range<u64>] {
        slice::from_ref(&self.range)
    }

    /// Returns all pages that are huge if the kernel had huge pages left.
    pub(super) fn huge(&self) -> &[Range<u64>] {
        slice::from_ref(&self.huge_range)
    }

    /// Uses some of the pages.
    pub(super) fn touch(&mut self) {
        let touch = |byte: *mut u8| {
            // SAFETY: the byte is inside of our memory. The write is volatile, as only the use of the page matters.
            unsafe { byte.write_volatile(2) };
        };
        for page in Self::touched_indexes() {
            touch(&raw mut self.memory[(page * PAGE) as usize + 1]);
        }
        let first = self.huge_range.start - self.huge_memory.as_ptr() as u64;
        for page in 0..HUGE_PAGES {
            touch(&raw mut self.huge_memory[(first + page * HUGE_PAGE) as usize]);
        }
    }

    /// Returns the pages of 4 KiB that were used.
    pub(super) fn touched(&self) -> PageRuns {
        let mut touched = PageRuns::new();
        for page in Self::touched_indexes() {
            let start = self.range.start + page * PAGE;
            page_runs::add(&mut touched, start..start + PAGE);
        }
        touched
    }

    fn touched_indexes() -> impl Iterator<Item = u64> {
        (1..PAGES).filter(|page| page % STEP < 2)
    }
}

/// Returns the number of pages of 4 KiB in the ranges.
pub(super) fn count(runs: &[Range<u64>]) -> u64 {
    page_runs::bytes(runs) / PAGE
}
