//! Selection of the pages of a process to copy: those that hold what the process has written.
//!
//! Only pages in the process's own page table are copied. Reading other pages would bring them in, from a file or
//! from the buffers that a database shares, and charge them to the process.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail};

use crate::heap::area::Area;
use crate::heap::page_index::PAGE;
use crate::heap::page_runs::{self, PageRuns};
use crate::host::capabilities::{self, Capability};
use crate::process::proc;

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
    /// Wanted pages that may have been written since the marks of written pages were cleared, if this was asked for.
    pub(super) written: PageRuns,
}

/// Reader of the page table of a process.
#[derive(Debug)]
pub(super) struct Pages {
    pagemap: File,
    /// Whether to use PAGEMAP_SCAN, which the kernel has from 6.7 on.
    scans: bool,
}

impl Pages {
    pub(super) fn open(pid: u32) -> Result<Self> {
        let path = proc::file(pid, "pagemap");
        let opened = File::open(&path);
        if let Err(error) = &opened
            && error.kind() == io::ErrorKind::NotFound
        {
            bail!("process {pid} has exited");
        }
        let pagemap = opened.with_context(|| {
            let remedy = capabilities::remedy(Capability::CAP_SYS_PTRACE);
            format!("failed to open {}{remedy}", path.display())
        })?;
        Ok(Self {
            pagemap,
            scans: true,
        })
    }

    /// Returns the open file of /proc/PID/pagemap.
    pub(super) fn pagemap(&self) -> &File {
        &self.pagemap
    }

    /// Finds the pages of these areas that are to be copied. With `marks`, also finds which of these may have been
    /// written since the soft-dirty marks were cleared (`soft_dirty`).
    ///
    /// # Errors
    /// If the process has exited or executed another program.
    pub(super) fn find(&mut self, areas: &[Area], marks: bool) -> io::Result<Found> {
        let mut found = Found::default();
        for area in areas {
            let wanted = wanted(area);
            if wanted == Wanted::Nothing {
                continue;
            }
            // Writes by other processes are marked in their own page tables.
            let believe = marks && is_own_memory(area);
            let range = area.mapping.range.clone();
            let mut add = |pages: Range<u64>, is_marked: bool| {
                if marks && (is_marked || !believe) {
                    page_runs::add(&mut found.written, pages.clone());
                }
                page_runs::add(&mut found.wanted, pages);
            };
            if self.scans {
                match scan(&self.pagemap, range.clone(), wanted, believe, &mut add) {
                    Ok(()) => continue,
                    // Linux 6.7 has no category for soft-dirty pages.
                    Err(error)
                        if matches!(error.raw_os_error(), Some(libc::ENOTTY | libc::EINVAL)) =>
                    {
                        self.scans = false;
                    }
                    Err(error) => return Err(error),
                }
            }
            self.read(range, wanted, &mut add)?;
        }
        Ok(found)
    }

    /// Returns the frame of memory that each of these pages is in. The frame is 0 if the page is not present, or if
    /// the kernel hides frames from us.
    ///
    /// # Errors
    /// If the process has exited.
    pub(super) fn pfns(&self, runs: &[Range<u64>]) -> io::Result<Vec<u64>> {
        let mut frames = Vec::new();
        for run in runs {
            let mut entries = vec![0; ((run.end - run.start) / PAGE * 8) as usize];
            self.pagemap
                .read_exact_at(&mut entries, run.start / PAGE * 8)?;
            let (entries, _) = entries.as_chunks::<8>();
            frames.extend(
                entries
                    .iter()
                    .map(|entry| frame(u64::from_le_bytes(*entry))),
            );
        }
        Ok(frames)
    }

    /// Returns the frame of memory that a page is in.
    ///
    /// # Errors
    /// If the process has exited.
    pub(super) fn pfn(&self, page: u64) -> io::Result<u64> {
        let mut entry = [0; 8];
        self.pagemap.read_exact_at(&mut entry, page / PAGE * 8)?;
        Ok(frame(u64::from_le_bytes(entry)))
    }

    /// Passes the wanted pages of a range to `add`, each with whether it may have been written. Reads the 64 bits
    /// that /proc/PID/pagemap has of each page.
    fn read(
        &self,
        range: Range<u64>,
        wanted: Wanted,
        mut add: impl FnMut(Range<u64>, bool),
    ) -> io::Result<()> {
        const PAGES_AT_ONCE: u64 = 1 << 16;
        let (mut page, end) = (range.start / PAGE, range.end / PAGE);
        let mut entries = vec![0; 8 * PAGES_AT_ONCE.min(end - page) as usize];
        while page < end {
            let want = (8 * (end - page)).min(entries.len() as u64) as usize;
            let read = self.pagemap.read_at(&mut entries[..want], 8 * page)?;
            let (entries, _) = entries[..read].as_chunks::<8>();
            if entries.is_empty() {
                // The address space is gone, which PAGEMAP_SCAN reports by ESRCH.
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            for entry in entries {
                let entry = u64::from_le_bytes(*entry);
                if is_wanted(entry, wanted) {
                    add(page * PAGE..(page + 1) * PAGE, is_written(entry));
                }
                page += 1;
            }
        }
        Ok(())
    }
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
/// and that nobody shares. Writes to pages of hugetlbfs, which have a file, are not marked there.
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

/// Passes the runs of wanted pages that PAGEMAP_SCAN finds to `add`. A scan takes 4 ms/GB, and reading the entries
/// takes 16 ms/GB. With `marks`, each run comes with whether it may have been written.
fn scan(
    pagemap: &File,
    range: Range<u64>,
    wanted: Wanted,
    marks: bool,
    mut add: impl FnMut(Range<u64>, bool),
) -> io::Result<()> {
    let written = if marks { IS_MARKED | IS_FILE } else { 0 };
    let mut regions = [Region::default(); 512];
    let without = match wanted {
        Wanted::Changed => IS_ZERO | IS_FILE,
        _ => IS_ZERO,
    };
    let mut start = range.start;
    while start < range.end {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            start,
            end: range.end,
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            category_inverted: without,
            category_mask: IS_PRESENT | without,
            return_mask: IS_PRESENT | written,
            ..ScanArgument::default()
        };
        // SAFETY: the kernel reads and writes the argument, whose size it checks, and writes at most
        // `vec_len` regions to `vec`; both outlive the call.
        let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
        if found < 0 {
            return Err(io::Error::last_os_error());
        }
        for region in &regions[..found as usize] {
            add(region.start..region.end, region.categories & written != 0);
        }
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
        let mut memory = MmapMut::map_anon(64 * PAGE as usize).expect("memory");
        let start = memory.as_ptr() as u64;
        let _ = memory.advise(memmap2::Advice::NoHugePage);
        for page in [0, 1, 2, 7, 63] {
            memory[page * PAGE as usize] = 1;
        }
        let expected: Vec<_> = [(0, 3), (7, 8), (63, 64)]
            .map(|(first, last)| start + first * PAGE..start + last * PAGE)
            .into();
        let range = start..start + 64 * PAGE;
        let pages = Pages::open(std::process::id()).expect("our own");
        let mut read = PageRuns::new();
        let add = |pages, _| page_runs::add(&mut read, pages);
        pages
            .read(range.clone(), Wanted::Present, add)
            .expect("readable");
        assert_eq!(read, expected);
        let mut scanned = PageRuns::new();
        let add = |pages, _| page_runs::add(&mut scanned, pages);
        match scan(&pages.pagemap, range, Wanted::Present, false, add) {
            Ok(()) => assert_eq!(scanned, expected),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOTTY)),
        }
    }

    #[test]
    fn an_address_space_that_is_gone_has_no_pages() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("a process");
        let opened = Pages::open(child.id());
        child.kill().expect("our child");
        child.wait().expect("our child");
        let areas = Area::parse_list(b"1000-3000 rw-p 00000000 00:00 0 ");
        let mut pages = opened.expect("readable");
        for scans in [true, false] {
            pages.scans = scans;
            assert!(pages.find(&areas, false).is_err(), "{scans}");
        }
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
