//! Which pages of a process are to be copied: those that hold what it has written.
//!
//! Only pages that are in the process's own page table are: to read others would bring them in,
//! from a file or the buffers that a database shares, and charge them to the process.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail};

use crate::heap::area::Area;
use crate::heap::page_runs::{self, PageRuns};
use crate::heap::page_table::PAGE;
use crate::host::capabilities::{self, Capability};

/// What of an area is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    /// Every page that is there.
    Present,
    /// Pages that are no longer those of the file: relocated constants, such as tables of virtual
    /// functions, which are read-only when the program starts.
    Changed,
    Nothing,
}

/// The page table of a process.
#[derive(Debug)]
pub(super) struct Pages {
    pagemap: File,
    /// Whether the kernel has PAGEMAP_SCAN (6.7).
    scans: bool,
}

impl Pages {
    pub(super) fn open(pid: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/pagemap");
        let opened = File::open(&path);
        if let Err(error) = &opened
            && error.kind() == io::ErrorKind::NotFound
        {
            bail!("process {pid} has exited");
        }
        let pagemap = opened.with_context(|| {
            let remedy = capabilities::remedy(Capability::CAP_SYS_PTRACE);
            format!("failed to open {path}{remedy}")
        })?;
        Ok(Self {
            pagemap,
            scans: true,
        })
    }

    /// The open file of /proc/PID/pagemap.
    pub(super) fn pagemap(&self) -> &File {
        &self.pagemap
    }

    /// The pages of these areas that are to be copied.
    ///
    /// # Errors
    /// If the process has gone.
    pub(super) fn wanted(&mut self, areas: &[Area]) -> io::Result<PageRuns> {
        let mut runs = PageRuns::new();
        for area in areas {
            let wanted = wanted(area);
            if wanted == Wanted::Nothing {
                continue;
            }
            let range = area.mapping.range.clone();
            if self.scans {
                match scan(&self.pagemap, range.clone(), wanted, &mut runs) {
                    Ok(()) => continue,
                    Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => self.scans = false,
                    Err(error) => return Err(error),
                }
            }
            self.read(range, wanted, &mut runs)?;
        }
        Ok(runs)
    }

    /// Adds the wanted pages of a range, by the 64 bits that /proc/PID/pagemap has of each page.
    fn read(&self, range: Range<u64>, wanted: Wanted, runs: &mut PageRuns) -> io::Result<()> {
        const PAGES_AT_ONCE: u64 = 1 << 16;
        let (mut page, end) = (range.start / PAGE, range.end / PAGE);
        let mut entries = vec![0; 8 * PAGES_AT_ONCE.min(end - page) as usize];
        while page < end {
            let want = (8 * (end - page)).min(entries.len() as u64) as usize;
            let read = self.pagemap.read_at(&mut entries[..want], 8 * page)?;
            let (entries, _) = entries[..read].as_chunks::<8>();
            if entries.is_empty() {
                break;
            }
            for entry in entries {
                if is_wanted(u64::from_le_bytes(*entry), wanted) {
                    page_runs::add(runs, page * PAGE..(page + 1) * PAGE);
                }
                page += 1;
            }
        }
        Ok(())
    }
}

/// Whether a page is wanted, by its entry in pagemap.
fn is_wanted(entry: u64, wanted: Wanted) -> bool {
    const PRESENT: u64 = 1 << 63;
    const OF_A_FILE: u64 = 1 << 61;
    entry & PRESENT != 0 && (wanted == Wanted::Present || entry & OF_A_FILE == 0)
}

/// What of an area is copied, by what it is.
fn wanted(area: &Area) -> Wanted {
    let name = area.name();
    let starts = |prefix: &[u8]| name.starts_with(prefix);
    // The registers of a device can change by being read. The kernel refuses most (VM_IO, VM_PFNMAP).
    let device = starts(b"/dev/") && !starts(b"/dev/shm/") && !starts(b"/dev/zero")
        || starts(b"anon_inode:")
        || starts(b"[vvar")
        || starts(b"[vsyscall");
    if device || !area.readable {
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

/// Categories of pages.
const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
/// The one page of zeros that stands for all that were read and never written.
const IS_ZERO: u64 = 1 << 5;

/// Asks the kernel for runs of wanted pages, which takes 4 ms/GB, where reading their entries takes 16.
fn scan(pagemap: &File, range: Range<u64>, wanted: Wanted, runs: &mut PageRuns) -> io::Result<()> {
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
            return_mask: IS_PRESENT,
            ..ScanArgument::default()
        };
        // SAFETY: the kernel reads and writes the argument, whose size it checks, and writes at most
        // `vec_len` regions to `vec`; both outlive the call.
        let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut argument) };
        if found < 0 {
            return Err(io::Error::last_os_error());
        }
        for region in &regions[..found as usize] {
            page_runs::add(runs, region.start..region.end);
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
        pages
            .read(range.clone(), Wanted::Present, &mut read)
            .expect("readable");
        assert_eq!(read, expected);
        let mut scanned = PageRuns::new();
        match scan(&pages.pagemap, range, Wanted::Present, &mut scanned) {
            Ok(()) => assert_eq!(scanned, expected),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOTTY)),
        }
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
