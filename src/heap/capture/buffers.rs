//! Buffers for the copy of a process, into which most of it may be copied before the process is paused.
//!
//! A page that is copied while the process runs is copied again during the stop if it has been written since
//! (`soft_dirty`), or if another page is at its address by then. mremap(2) moves all pages of a page table by moving
//! the table, and does not mark them: so the frame of one page of each table is compared.
//!
//! The copy of an image has its pages in order and without gaps. If pages have appeared or disappeared in between,
//! other pages are moved within the copy, after the process runs again.

use std::mem;
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use memmap2::MmapMut;

use super::copy::{self, CopyPages};
use super::crew::{Crew, Late, Until};
use super::pages::{Found, Pages};
use crate::heap::clear_refs::{self, PageMarks};
use crate::heap::page_index::PAGE;
use crate::heap::page_runs::{self, PageRuns};
use crate::host::capabilities::{self, Capability};

/// Bytes of address space that one page table covers.
const TABLE: u64 = 512 * PAGE;

/// Buffers for a copy, with the pages that they hold already.
#[derive(Debug)]
pub(super) struct CopyBuffers {
    /// Pages that were copied while the process ran. They are one after the other at the beginning of `copy`.
    early: PageRuns,
    /// Early pages that could not be read then.
    unread: PageRuns,
    /// Frame of memory that each early page was in.
    frames: Vec<u64>,
    copy: MmapMut,
    /// Buffer for the pages that are copied during the stop, if other pages were copied before.
    stop_buffer: Option<MmapMut>,
    /// Copy that was not finished in time, and has one of the buffers.
    unfinished: Option<Arc<CopyPages>>,
}

impl CopyBuffers {
    /// Allocates a buffer of this many bytes, and copies nothing yet.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub(super) fn empty(bytes: u64) -> Result<Self> {
        Ok(Self {
            early: PageRuns::new(),
            unread: PageRuns::new(),
            frames: Vec::new(),
            copy: copy::buffer(usize::try_from(bytes)?)?,
            stop_buffer: None,
            unfinished: None,
        })
    }

    /// Clears a process's marks of written pages, and then copies these of its pages while it runs.
    ///
    /// # Errors
    /// If the marks cannot be cleared, if the frames of the pages are not visible, or if the buffer is too small.
    pub(super) fn pre_copy(
        &mut self,
        crew: &mut Crew,
        pages: &Pages,
        wanted: PageRuns,
    ) -> Result<Result<(), Late>> {
        let pid = pages.pid();
        clear_refs::clear(pid, PageMarks::Written)?;
        match pages.pfns(crew, wanted.iter().cloned(), Until::PROGRESS)? {
            Ok(frames) => self.frames = frames,
            Err(late) => return Ok(Err(late)),
        }
        ensure!(
            self.frames.is_empty() || self.frames.iter().any(|&frame| frame != 0),
            "the kernel does not expose the pages of process {pid}{}",
            capabilities::remedy(Capability::CAP_SYS_ADMIN)
        );
        self.stop_buffer = None;
        match self.copy(crew, pid, &wanted, Until::PROGRESS)? {
            Ok(unread) => self.unread = unread,
            Err(late) => return Ok(Err(late)),
        }
        self.early = wanted;
        Ok(Ok(()))
    }

    /// Allocates the buffer for this many bytes that will be copied during the stop.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub(super) fn allocate_stop_buffer(&mut self, bytes: u64) -> Result<()> {
        self.stop_buffer = Some(copy::buffer(usize::try_from(bytes)?)?);
        Ok(())
    }

    /// Returns the pages that are still to be copied, of those that the process has now: all but the ones whose
    /// present content was copied before.
    ///
    /// # Errors
    /// If the process has exited.
    pub(super) fn pending(
        &self,
        crew: &mut Crew,
        pages: &Pages,
        found: &Found,
        until: Until,
    ) -> Result<Result<PageRuns, Late>> {
        if self.early.is_empty() {
            return Ok(Ok(found.wanted.clone()));
        }
        let early = page_runs::difference(&self.early, &self.unread);
        let known = page_runs::difference(&early, &found.written);
        let known = page_runs::intersection(&found.wanted, &known);
        let probes = probes(&known);
        let probed = probes.iter().map(|&page| page..page + PAGE);
        let frames = pages.pfns(crew, probed, until)?;
        Ok(frames.map(|frames| {
            let moved = self.moved(&probes, &frames);
            let known = page_runs::difference(&known, &moved);
            page_runs::difference(&found.wanted, &known)
        }))
    }

    /// Returns the address ranges whose page tables have been replaced since the early copy, by the frames that the
    /// [probes] are in now.
    fn moved(&self, probes: &[u64], frames: &[u64]) -> PageRuns {
        let places = Places::of(&self.early);
        let mut moved = PageRuns::new();
        for (&page, &frame) in probes.iter().zip(frames) {
            let place = places.of_run(&(page..page + PAGE)).start / PAGE as usize;
            if self.frames.get(place) != Some(&frame) {
                let table = page - page % TABLE;
                page_runs::add(&mut moved, table..table + TABLE);
            }
        }
        moved
    }

    /// Whether the buffers are large enough for all wanted pages, of which `due` are still to be copied.
    pub(super) fn has_capacity_for(&self, wanted: &[Range<u64>], due: &[Range<u64>]) -> bool {
        let late = self
            .stop_buffer
            .as_ref()
            .map_or(self.copy.len(), |late| late.len());
        page_runs::bytes(wanted) <= self.copy.len() as u64 && page_runs::bytes(due) <= late as u64
    }

    /// Copies pages of a process. Returns those that could not be read, which are zeros.
    ///
    /// # Errors
    /// If the buffer is too small.
    pub(super) fn copy(
        &mut self,
        crew: &mut Crew,
        pid: u32,
        due: &[Range<u64>],
        until: Until,
    ) -> Result<Result<PageRuns, Late>> {
        let into = self.stop_buffer.as_mut().unwrap_or(&mut self.copy);
        let nothing = MmapMut::map_anon(1).context("no memory")?;
        let job = CopyPages::new(pid, due, mem::replace(into, nothing))?;
        self.unfinished = Some(Arc::new(job));
        let job = self.unfinished.clone().context("no copy")?;
        Ok(match crew.run(job, until) {
            Ok(()) => Ok(self.recover()?),
            Err(late) => Err(late),
        })
    }

    /// Takes the buffer back from a copy. The crew must have finished the copy or ended. Returns the pages that could
    /// not be read.
    ///
    /// # Errors
    /// If a worker may still write to the buffer.
    pub(super) fn recover(&mut self) -> Result<PageRuns> {
        let Some(job) = self.unfinished.take() else {
            return Ok(PageRuns::new());
        };
        let job = Arc::into_inner(job).context("a copy has not ended")?;
        let (buffer, unread) = job.finish();
        *self.stop_buffer.as_mut().unwrap_or(&mut self.copy) = buffer;
        Ok(unread)
    }

    /// Returns the copy of all wanted pages, in order, of which `due` were copied during the stop.
    ///
    /// # Errors
    /// If the buffers are too small, or if a page was neither due nor copied before.
    pub(super) fn finish(mut self, wanted: &[Range<u64>], due: &[Range<u64>]) -> Result<MmapMut> {
        if let Some(late) = self.stop_buffer {
            merge(&mut self.copy, &self.early, wanted, due, &late)?;
        }
        Ok(self.copy)
    }
}

/// Returns the first of the pages `known` in each page table.
fn probes(known: &[Range<u64>]) -> Vec<u64> {
    let (mut probes, mut next) = (Vec::new(), 0);
    for run in known {
        while next < run.end {
            let page = run.start.max(next);
            probes.push(page);
            next = page - page % TABLE + TABLE;
        }
    }
    probes
}

/// Turns a copy of the pages `early` into a copy of the pages `wanted`. Pages that are `due` are taken from `late`.
fn merge(
    copy: &mut [u8],
    early: &[Range<u64>],
    wanted: &[Range<u64>],
    due: &[Range<u64>],
    late: &[u8],
) -> Result<()> {
    let stay = page_runs::intersection(early, wanted);
    let missing = page_runs::difference(&page_runs::difference(wanted, &stay), due);
    ensure!(
        missing.is_empty()
            && page_runs::difference(due, wanted).is_empty()
            && page_runs::bytes(wanted) <= copy.len() as u64
            && page_runs::bytes(due) <= late.len() as u64,
        "pages are missing in the copy of a process"
    );
    // Pages that stay are first moved together, the first one first, and then apart, the last one first: none is
    // overwritten.
    let (from, between, to) = (Places::of(early), Places::of(&stay), Places::of(wanted));
    for run in &stay {
        move_within(copy, run, &from, &between);
    }
    for run in stay.iter().rev() {
        move_within(copy, run, &between, &to);
    }
    let mut rest = late;
    for run in due {
        let (bytes, after) = rest.split_at((run.end - run.start) as usize);
        copy[to.of_run(run)].copy_from_slice(bytes);
        rest = after;
    }
    Ok(())
}

fn move_within(copy: &mut [u8], run: &Range<u64>, from: &Places, to: &Places) {
    let (from, to) = (from.of_run(run), to.of_run(run));
    if from != to {
        copy.copy_within(from, to.start);
    }
}

/// Offsets of pages that are stored one after the other.
struct Places<'a> {
    runs: &'a [Range<u64>],
    /// Bytes before each run.
    before: Vec<u64>,
}

impl<'a> Places<'a> {
    fn of(runs: &'a [Range<u64>]) -> Self {
        let before = runs.iter().scan(0, |sum, run| {
            let before = *sum;
            *sum += run.end - run.start;
            Some(before)
        });
        Self {
            runs,
            before: before.collect(),
        }
    }

    /// Returns the byte range of pages that are all in one of the runs.
    fn of_run(&self, pages: &Range<u64>) -> Range<usize> {
        let at = self.runs.partition_point(|run| run.end <= pages.start);
        let start = self.before[at] + (pages.start - self.runs[at].start);
        start as usize..(start + pages.end - pages.start) as usize
    }
}

#[cfg(test)]
#[expect(
    clippy::single_range_in_vec_init,
    reason = "a run of pages may be the only one"
)]
mod tests {
    use super::*;
    use crate::heap::page_index::PAGE;

    /// Returns runs of pages, which are given by their numbers.
    fn runs(pages: &[Range<u64>]) -> PageRuns {
        let runs = pages.iter();
        runs.map(|run| run.start * PAGE..run.end * PAGE).collect()
    }

    /// Returns the content of the pages of these runs. Each page holds its number and a version.
    fn content(runs: &[Range<u64>], version: u8) -> Vec<u8> {
        let addresses = runs
            .iter()
            .cloned()
            .flat_map(|run| run.step_by(PAGE as usize));
        let pages = addresses.flat_map(|address| {
            let mut page = vec![version; PAGE as usize];
            page[0] = (address / PAGE) as u8;
            page
        });
        pages.collect()
    }

    /// Merges early pages of version 1 and due pages of version 2. Returns the number and version of each page.
    fn merged(early: &[Range<u64>], wanted: &[Range<u64>], due: &[Range<u64>]) -> Vec<(u8, u8)> {
        let (early, wanted, due) = (runs(early), runs(wanted), runs(due));
        let mut copy = content(&early, 1);
        copy.resize(64 * PAGE as usize, 0);
        merge(&mut copy, &early, &wanted, &due, &content(&due, 2)).expect("all is there");
        let pages = copy.chunks(PAGE as usize);
        let pages = pages.map(|page| (page[0], page[1]));
        pages
            .take((page_runs::bytes(&wanted) / PAGE) as usize)
            .collect()
    }

    #[test]
    fn a_copy_holds_what_stayed_came_and_was_written() {
        assert_eq!(
            merged(&[1..4, 8..10], &[1..4, 8..10], &[]),
            [(1, 1), (2, 1), (3, 1), (8, 1), (9, 1)]
        );
        // 2 and 9 were written, 3 and 8 have gone, 0, 5 and 10 are new.
        assert_eq!(
            merged(
                &[1..4, 8..10],
                &[0..3, 5..6, 9..11],
                &[0..1, 2..3, 5..6, 9..11]
            ),
            [(0, 2), (1, 1), (2, 2), (5, 2), (9, 2), (10, 2)]
        );
        // Many new ones before, and many gone behind: what stays moves far, and by more than its length.
        assert_eq!(
            merged(&[20..22, 30..39], &[0..15, 20..22, 38..39], &[0..15]),
            (0..15)
                .map(|page| (page, 2))
                .chain([(20, 1), (21, 1), (38, 1)])
                .collect::<Vec<_>>()
        );
        assert_eq!(merged(&[5..9], &[40..42], &[40..42]), [(40, 2), (41, 2)]);
    }

    #[test]
    fn a_page_that_is_nowhere_is_an_error() {
        let mut copy = vec![0; 4 * PAGE as usize];
        let (early, wanted) = (runs(&[1..2]), runs(&[1..3]));
        assert!(merge(&mut copy, &early, &wanted, &[], &[]).is_err());
        let due = runs(&[2..3]);
        assert!(merge(&mut copy, &early, &wanted, &due, &[]).is_err());
        assert!(merge(&mut copy, &early, &wanted, &due, &content(&due, 2)).is_ok());
    }

    #[test]
    fn what_was_written_or_not_read_or_is_new_is_due() {
        let buffers = CopyBuffers {
            early: runs(&[1..10]),
            unread: runs(&[7..8]),
            frames: vec![77; 9],
            copy: MmapMut::map_anon(12 * PAGE as usize).expect("memory"),
            stop_buffer: Some(MmapMut::map_anon(5 * PAGE as usize).expect("memory")),
            unfinished: None,
        };
        let found = Found {
            wanted: runs(&[2..8, 9..12]),
            written: runs(&[3..4, 11..12]),
        };
        let ours = Pages::open(std::process::id()).expect("our own");
        let mut crew = Crew::start().expect("processes");
        // We have no pages at these addresses, so no frame is that of the copy.
        let pending = buffers.pending(&mut crew, &ours, &found, Until::PROGRESS);
        assert_eq!(pending.expect("readable"), Ok(found.wanted.clone()));
        let due = runs(&[3..4, 7..8, 10..12]);
        assert!(buffers.has_capacity_for(&found.wanted, &due));
        assert!(!buffers.has_capacity_for(&found.wanted, &found.wanted));
        assert!(!buffers.has_capacity_for(&runs(&[0..13]), &due));
    }

    #[test]
    fn a_page_table_that_was_moved_is_told_by_one_page() {
        let early = runs(&[500..600, 1024..1026, 1600..1601]);
        let buffers = CopyBuffers {
            unread: PageRuns::new(),
            frames: (0..page_runs::bytes(&early) / PAGE).collect(),
            early,
            copy: MmapMut::map_anon(1).expect("memory"),
            stop_buffer: None,
            unfinished: None,
        };
        let known = runs(&[505..520, 590..595, 1025..1026, 1600..1601]);
        let probes = probes(&known);
        assert_eq!(probes, [505, 512, 1025, 1600].map(|page| page * PAGE));
        let moved = |moved: &[usize]| {
            let mut frames = [5, 12, 101, 102];
            for &at in moved {
                frames[at] += 1000;
            }
            buffers.moved(&probes, &frames)
        };
        assert_eq!(moved(&[]), []);
        assert_eq!(moved(&[1]), runs(&[512..1024]));
        assert_eq!(moved(&[0, 2, 3]), runs(&[0..512, 1024..2048]));
    }
}
