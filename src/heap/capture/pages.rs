//! Selection of the pages of a process to copy: those that hold what the process has written.
//!
//! Only pages in the process's own page table are copied. Reading other pages would bring them in, from a file or
//! from the buffers that a database shares, and charge them to the process.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use anyhow::{Context, Result, anyhow, bail};

use crate::heap::area::Area;
use crate::heap::page_index::PAGE;
use crate::heap::page_runs::{self, PageRuns};
use crate::host::capabilities::{self, Capability};
use crate::process::proc;

use super::arch;
use super::crew::{Board, Crew, Job, Late, NEAR, Own, ReadSpans, Until};
use super::soft_dirty;

/// Selection of the pages of an area to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// Every page that is present.
    Present,
    /// Pages that are no longer those of the file: relocated constants, such as tables of virtual
    /// functions, which are read-only when the program starts.
    Changed,
    Nothing,
}

/// Pages of a process that were found.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Pages that are to be copied.
    pub(super) wanted: PageRuns,
    /// Wanted pages that may have been written since the marks of written pages were cleared, if this was requested.
    pub(super) written: PageRuns,
}

/// Bytes of address space whose pages are listed at once. The kernel holds the lock of the address space meanwhile,
/// for about a millisecond, in which the process cannot map memory.
const AT_ONCE: u64 = 256 << 20;
/// Bytes of an entry of /proc/PID/pagemap.
const ENTRY: usize = 8;
const _: () = assert!(AT_ONCE as usize / PAGE as usize * ENTRY <= NEAR);

/// Reader of the mappings and of the page table of a process.
#[derive(Debug)]
pub(super) struct Pages {
    pid: u32,
    maps: File,
    pagemap: File,
    /// Whether to use PAGEMAP_SCAN, which the kernel has from 6.7 on.
    scans: bool,
}

impl Pages {
    pub(super) fn open(pid: u32) -> Result<Self> {
        let open = |name| {
            let path = proc::file(pid, name);
            let opened = File::open(&path);
            if let Err(error) = &opened
                && error.kind() == io::ErrorKind::NotFound
            {
                bail!("process {pid} has exited");
            }
            opened.with_context(|| {
                let remedy = capabilities::remedy(Capability::CAP_SYS_PTRACE);
                format!("failed to open {}{remedy}", path.display())
            })
        };
        Ok(Self {
            pid,
            maps: open("maps")?,
            pagemap: open("pagemap")?,
            scans: true,
        })
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns the open file of /proc/PID/pagemap.
    pub(super) fn pagemap(&self) -> &File {
        &self.pagemap
    }

    /// Returns the mappings of the process, and its pages that are to be copied. With `marks`, also finds which of these
    /// may have been written since the soft-dirty marks were cleared (`soft_dirty`).
    ///
    /// # Errors
    /// If the process has exited or executed another program.
    pub(super) fn list(
        &mut self,
        crew: &mut Crew,
        marks: bool,
        until: Until,
    ) -> Result<Result<(Vec<Area>, Found), Late>> {
        let maps = vec![(0, ReadSpans::REST)];
        let areas = match read_spans(crew, &self.maps, maps, until) {
            Ok(Ok(())) => Area::parse_list(first_results(crew).results()),
            Ok(Err(late)) => return Ok(Err(late)),
            Err(error) => {
                return Err(error).with_context(|| {
                    format!("failed to read the mappings of process {}", self.pid)
                });
            }
        };
        if areas.is_empty() {
            return Err(without_memory(self.pid));
        }
        let found = self.find(crew, &areas, marks, until);
        Ok(explained(self.pid, found)?.map(|found| (areas, found)))
    }

    fn find(
        &mut self,
        crew: &mut Crew,
        areas: &[Area],
        marks: bool,
        until: Until,
    ) -> io::Result<Result<Found, Late>> {
        let tasks: Vec<Task> = areas.iter().flat_map(|area| tasks(area, marks)).collect();
        loop {
            let job = Arc::new(ListPages {
                pagemap: self.pagemap.as_raw_fd(),
                scans: self.scans,
                tasks: tasks.clone(),
                next: AtomicUsize::new(0),
                error: AtomicI32::new(0),
            });
            if let Err(late) = crew.run(job.clone(), until) {
                return Ok(Err(late));
            }
            match job.error.load(Ordering::Relaxed) {
                0 => return Ok(Ok(found(crew, &tasks, marks))),
                // Linux 6.7 has no category for soft-dirty pages.
                libc::ENOTTY | libc::EINVAL if self.scans => self.scans = false,
                error => return Err(io::Error::from_raw_os_error(error)),
            }
        }
    }

    /// Returns the frame of memory that each of these pages is in. The frame is 0 if the page is not present, or if
    /// the kernel hides frames from us.
    ///
    /// # Errors
    /// If the process has exited.
    pub(super) fn pfns(
        &self,
        crew: &mut Crew,
        runs: impl Iterator<Item = Range<u64>>,
        until: Until,
    ) -> Result<Result<Vec<u64>, Late>> {
        let spans = runs.map(|run| {
            let entry = |page: u64| page / PAGE * ENTRY as u64;
            (entry(run.start), entry(run.end - run.start) as usize)
        });
        let read = read_spans(crew, &self.pagemap, spans.collect(), until);
        Ok(explained(self.pid, read)?.map(|()| {
            let (entries, _) = first_results(crew).results().as_chunks::<ENTRY>();
            let entries = entries.iter();
            entries
                .map(|entry| frame(u64::from_le_bytes(*entry)))
                .collect()
        }))
    }
}

/// Has spans of a file read into the buffer for results of the first worker.
fn read_spans(
    crew: &mut Crew,
    file: &File,
    spans: Vec<(u64, usize)>,
    until: Until,
) -> io::Result<Result<(), Late>> {
    let job = Arc::new(ReadSpans::new(file.as_raw_fd(), spans));
    match crew.run(job.clone(), until) {
        Ok(()) => job.result().map(Ok),
        Err(late) => Ok(Err(late)),
    }
}

fn first_results(crew: &Crew) -> &Own {
    crew.results().next().expect("a crew has workers")
}

/// Explains an error of reading a process's page table. Of an address space that is gone, PAGEMAP_SCAN fails, and
/// pagemap has nothing to read.
fn explained<T>(pid: u32, read: io::Result<T>) -> Result<T> {
    match read {
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Err(without_memory(pid)),
        read => read.with_context(|| format!("failed to list the pages of process {pid}")),
    }
}

/// Returns the error about a process whose memory is gone. A process that exits and one in the middle of an exec look
/// the same.
pub(super) fn without_memory(pid: u32) -> anyhow::Error {
    anyhow!(
        "process {pid} has exited or executed another program while it was examined; if it still runs, try again"
    )
}

/// Range whose pages are listed at once.
#[derive(Debug, Clone)]
struct Task {
    range: Range<u64>,
    wanted: Wanted,
    /// Whether writes to the range are marked.
    believe: bool,
}

/// Returns the tasks to list the pages of an area.
fn tasks(area: &Area, marks: bool) -> impl Iterator<Item = Task> {
    let wanted = wanted(area);
    let range = match wanted {
        Wanted::Nothing => 0..0,
        _ => area.mapping.range.clone(),
    };
    // Writes by other processes are marked in their own page tables.
    let believe = marks && is_own_memory(area);
    range
        .clone()
        .step_by(AT_ONCE as usize)
        .map(move |start| Task {
            range: start..(start + AT_ONCE).min(range.end),
            wanted,
            believe,
        })
}

/// Listing of pages by a crew. The results of each worker are regions.
struct ListPages {
    pagemap: RawFd,
    scans: bool,
    tasks: Vec<Task>,
    next: AtomicUsize,
    /// Error number, or 0. A page table that is gone is ESRCH.
    error: AtomicI32,
}

// SAFETY: makes system calls, and writes to the worker's own buffers.
unsafe impl Job for ListPages {
    fn work(&self, own: &mut Own, board: &Board) {
        while !board.is_over() && self.error.load(Ordering::Relaxed) == 0 {
            let at = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(task) = self.tasks.get(at) else {
                return;
            };
            let done = if self.scans {
                scan(self.pagemap, task, own)
            } else {
                read(self.pagemap, task, own)
            };
            if let Err(error) = done {
                return self.error.store(error, Ordering::Relaxed);
            }
            board.advance(task.range.end - task.range.start);
        }
    }

    fn total(&self) -> u64 {
        let ranges = self.tasks.iter().map(|task| &task.range);
        ranges.map(|range| range.end - range.start).sum()
    }
}

/// Returns the pages that a crew has listed.
fn found(crew: &Crew, tasks: &[Task], marks: bool) -> Found {
    // SAFETY: regions are numbers.
    let regions = crew
        .results()
        .flat_map(|own| unsafe { own.results_as::<Region>() });
    let mut regions: Vec<Region> = regions.copied().collect();
    regions.sort_unstable_by_key(|region| region.start);
    let (mut found, mut tasks) = (Found::default(), tasks.iter().peekable());
    for region in regions {
        while tasks
            .next_if(|task| task.range.end <= region.start)
            .is_some()
        {}
        let believe = tasks.peek().is_some_and(|task| task.believe);
        let pages = region.start..region.end;
        if marks && (region.categories & (IS_MARKED | IS_FILE) != 0 || !believe) {
            page_runs::add(&mut found.written, pages.clone());
        }
        page_runs::add(&mut found.wanted, pages);
    }
    found
}

/// Adds a region to the results of a worker.
fn add(own: &mut Own, region: Region) -> Result<(), i32> {
    let (address, space) = own.space();
    if space < size_of::<Region>() {
        return Err(libc::ENOBUFS);
    }
    // SAFETY: the buffer has the space, and holds nothing but regions, so that they are aligned.
    unsafe { ptr::with_exposed_provenance_mut::<Region>(address).write(region) };
    own.add(size_of::<Region>());
    Ok(())
}

/// Adds the wanted pages of a range. Reads the 64 bits that /proc/PID/pagemap has of each page.
fn read(pagemap: RawFd, task: &Task, own: &mut Own) -> Result<(), i32> {
    let mut region = Region::default();
    let mut page = task.range.start;
    while page < task.range.end {
        let near = own.near.as_mut_ptr() as usize;
        let wanted = ((task.range.end - page) / PAGE) as usize * ENTRY;
        let offset = (page / PAGE) as usize * ENTRY;
        let arguments = [pagemap as usize, near, wanted.min(NEAR), offset, 0, 0];
        // SAFETY: the kernel writes to the buffer, which has this many bytes.
        let done = unsafe { arch::system_call(libc::SYS_pread64, arguments) };
        let count = usize::try_from(done).map_err(|_| -done as i32)? / ENTRY;
        if count == 0 {
            // The address space is gone, which PAGEMAP_SCAN reports by ESRCH.
            return Err(libc::ESRCH);
        }
        for at in 0..count {
            let entry = own
                .near
                .get(at * ENTRY..)
                .and_then(|rest| rest.first_chunk());
            let entry = u64::from_le_bytes(*entry.unwrap_or(&[0; ENTRY]));
            let categories = if is_written(entry) { IS_MARKED } else { 0 };
            if is_wanted(entry, task.wanted) {
                if region.end == page && region.categories == categories {
                    region.end = page + PAGE;
                } else {
                    if region.end > 0 {
                        add(own, region)?;
                    }
                    region = Region {
                        start: page,
                        end: page + PAGE,
                        categories,
                    };
                }
            }
            page += PAGE;
        }
    }
    if region.end > 0 {
        add(own, region)?;
    }
    Ok(())
}

const PRESENT: u64 = 1 << 63;
const OF_A_FILE: u64 = 1 << 61;

/// Whether a page is wanted, by its entry in pagemap.
fn is_wanted(entry: u64, wanted: Wanted) -> bool {
    entry & PRESENT != 0 && (wanted == Wanted::Present || entry & OF_A_FILE == 0)
}

/// Returns the frame in an entry of pagemap; 0 if the page is not present.
fn frame(entry: u64) -> u64 {
    const FRAME: u64 = (1 << 55) - 1;
    if entry & PRESENT == 0 {
        0
    } else {
        entry & FRAME
    }
}

/// Whether a page may have been written since the marks were cleared, by its entry in pagemap. A page that is mapped
/// more than once counts as written: the zero page may have taken the place of another page.
fn is_written(entry: u64) -> bool {
    const ITS_ALONE: u64 = 1 << 56;
    entry & soft_dirty::MARK != 0 || entry & OF_A_FILE != 0 || entry & ITS_ALONE == 0
}

/// Whether all writes to an area are marked in the process's own page table. This is so for memory that has no file
/// and is not shared. Writes to pages of hugetlbfs, which have a file, are not marked there.
fn is_own_memory(area: &Area) -> bool {
    let name = area.name();
    !area.shared && (name.is_empty() || name.starts_with(b"["))
}

/// Returns the selection of pages to copy from an area.
fn wanted(area: &Area) -> Wanted {
    if area.is_of_device() || !area.readable {
        Wanted::Nothing
    } else if area.writable {
        Wanted::Present
    } else if area.shared {
        Wanted::Nothing
    } else {
        Wanted::Changed
    }
}

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::Ioctl = 0xc060_6610;
const _: () = assert!(size_of::<ScanArgument>() == 0x60);

/// Categories of pages, of PAGEMAP_SCAN.
const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_MARKED: u64 = 1 << 7;
/// Category of the zero page, which is mapped for all pages that were read and never written.
const IS_ZERO: u64 = 1 << 5;

/// Adds the wanted pages of a range that PAGEMAP_SCAN finds. A scan takes 4 ms/GB, and reading the entries takes 16
/// ms/GB. Where writes are marked, each region has the categories by which it may have been written.
fn scan(pagemap: RawFd, task: &Task, own: &mut Own) -> Result<(), i32> {
    let written = if task.believe { IS_MARKED | IS_FILE } else { 0 };
    let without = match task.wanted {
        Wanted::Changed => IS_ZERO | IS_FILE,
        _ => IS_ZERO,
    };
    let mut start = task.range.start;
    while start < task.range.end {
        let (address, space) = own.space();
        let capacity = space / size_of::<Region>();
        if capacity == 0 {
            return Err(libc::ENOBUFS);
        }
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            start,
            end: task.range.end,
            vec: address as u64,
            vec_len: capacity as u64,
            category_inverted: without,
            category_mask: IS_PRESENT | without,
            return_mask: IS_PRESENT | written,
            ..ScanArgument::default()
        };
        let arguments = [
            pagemap as usize,
            PAGEMAP_SCAN as usize,
            &raw mut argument as usize,
            0,
            0,
            0,
        ];
        // SAFETY: the kernel reads and writes the argument, whose size it checks, and writes at most
        // `vec_len` regions to `vec`; both outlive the call.
        let found = unsafe { arch::system_call(libc::SYS_ioctl, arguments) };
        let found = usize::try_from(found).map_err(|_| -found as i32)?;
        own.add(found * size_of::<Region>());
        if argument.walk_end <= start {
            break;
        }
        start = argument.walk_end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use memmap2::MmapMut;

    use super::*;

    #[test]
    fn both_ways_find_the_pages_that_were_written() {
        // More than is listed at once.
        let length = AT_ONCE + 64 * PAGE;
        let mut memory = MmapMut::map_anon(length as usize).expect("memory");
        let start = memory.as_ptr() as u64;
        let _ = memory.advise(memmap2::Advice::NoHugePage);
        let last = length / PAGE - 1;
        let middle = AT_ONCE / PAGE;
        for page in [0, 1, 2, 7, 63, middle - 1, middle, last] {
            memory[(page * PAGE) as usize] = 1;
        }
        let expected: Vec<_> = [
            (0, 3),
            (7, 8),
            (63, 64),
            (middle - 1, middle + 1),
            (last, last + 1),
        ]
        .map(|(first, last)| start + first * PAGE..start + last * PAGE)
        .into();
        let line = format!("{start:x}-{:x} rw-p 00000000 00:00 0", start + length);
        let areas = Area::parse_list(line.as_bytes());
        let mut crew = Crew::start().expect("processes");
        let mut pages = Pages::open(std::process::id()).expect("our own");
        for scans in [true, false] {
            pages.scans = scans;
            let found = pages.find(&mut crew, &areas, false, Until::PROGRESS);
            let found = found.expect("readable").expect("in time");
            assert_eq!(found.wanted, expected, "{scans}");
            assert_eq!(found.written, []);
        }
        let frames = pages.pfns(&mut crew, expected.into_iter(), Until::PROGRESS);
        assert_eq!(frames.expect("readable").expect("in time").len(), 8);
    }

    #[test]
    fn an_address_space_that_is_gone_has_no_pages() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("a process");
        let opened = Pages::open(child.id());
        child.kill().expect("our child");
        child.wait().expect("our child");
        let areas = Area::parse_list(b"1000-3000 rw-p 00000000 00:00 0 ");
        let mut pages = opened.expect("readable");
        let mut crew = Crew::start().expect("processes");
        for scans in [true, false] {
            pages.scans = scans;
            let found = pages.find(&mut crew, &areas, false, Until::PROGRESS);
            let explained = explained(7, found).expect_err("an error");
            assert!(explained.to_string().contains("has exited or executed"));
        }
        assert!(pages.list(&mut crew, false, Until::PROGRESS).is_err());
        let other = explained::<()>(7, Err(io::Error::from_raw_os_error(libc::EIO)));
        let other = other.expect_err("an error").to_string();
        assert_eq!(other, "failed to list the pages of process 7");
    }

    #[test]
    fn marks_are_believed_of_own_memory_alone() {
        for (line, expected) in [
            ("rw-p 00000000 00:00 0 [heap]", true),
            ("rw-p 00000000 00:00 0", true),
            ("rw-p 00000000 00:00 0 [anon:arena]", true),
            ("rw-s 00000000 00:01 9 /dev/shm/buffers", false),
            ("rw-s 00000000 00:01 9", false),
            ("rw-p 00000000 00:0f 9 /anon_hugepage (deleted)", false),
            ("rw-p 00003000 fe:00 9 /lib/libc.so.6", false),
        ] {
            let areas = Area::parse_list(format!("1000-2000 {line}").as_bytes());
            assert_eq!(is_own_memory(&areas[0]), expected, "{line}");
        }
        const OWN: u64 = PRESENT | 1 << 56;
        assert!(!is_written(OWN) && is_written(OWN | soft_dirty::MARK));
        // The zero page, and a page of a file.
        assert!(is_written(PRESENT) && is_written(OWN | OF_A_FILE));
    }

    #[test]
    fn devices_and_memory_that_is_only_read_are_left_alone() {
        let lines: [(&str, Wanted); 10] = [
            ("rw-p 00000000 00:00 0 [heap]", Wanted::Present),
            ("rw-s 00000000 00:01 9 /dev/shm/buffers", Wanted::Present),
            ("rw-s 00000000 00:01 9 /dev/zero (deleted)", Wanted::Present),
            ("rw-s 00000000 00:05 9 /dev/dri/card0", Wanted::Nothing),
            (
                "rw-s 00000000 00:0f 9 anon_inode:[io_uring]",
                Wanted::Nothing,
            ),
            ("r--p 00000000 00:00 0 [vvar]", Wanted::Nothing),
            ("---p 00000000 00:00 0", Wanted::Nothing),
            ("-w-p 00000000 00:00 0", Wanted::Nothing),
            ("r--s 00000000 fe:00 9 /usr/share/x", Wanted::Nothing),
            ("r--p 00000000 fe:00 9 /lib/libc.so.6", Wanted::Changed),
        ];
        for (line, expected) in lines {
            let areas = Area::parse_list(format!("1000-2000 {line}").as_bytes());
            assert_eq!(wanted(&areas[0]), expected, "{line}");
        }
        assert!(is_wanted(1 << 63, Wanted::Changed) && is_wanted(5 << 61, Wanted::Present));
        assert!(!is_wanted(5 << 61, Wanted::Changed) && !is_wanted(1 << 62, Wanted::Present));
    }
}
