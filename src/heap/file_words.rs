//! Words of mapped files, shared memory included, in pages that the process's own page table lacks.
//!
//! A page can be absent there although the program can read it: after fork(2), MADV_DONTNEED or MADV_PAGEOUT, or if
//! another process has written it. Such a page is read through the file (/proc/PID/map_files), so that nothing is
//! mapped into the process, and only as far as the page cache has it. Everything else is counted as not examined: it
//! may hold the only reference to a block.
//!
//! Only files that are open for writing count. A program's code and constants cannot have been given addresses of
//! blocks. Few words look like an address, so only these are kept.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use memmap2::MmapOptions;

use crate::heap::arch::ADDRESS_BITS;
use crate::heap::area::Area;
use crate::heap::blocks;
use crate::heap::image::Image;
use crate::heap::page_index::PAGE;
use crate::heap::page_runs::{self, PageRuns};
use crate::process::mapped_file;

/// Bits of an address. Further bits may be a tag.
pub(super) const ADDRESS: u64 = (1 << ADDRESS_BITS) - 1;
/// Bytes of page cache that are read for an image. Anything beyond is not examined.
const MAX_BYTES: u64 = 16 << 30;
/// Largest number of words that are kept.
const MAX_WORDS: usize = 1 << 24;
/// Bytes that are read at once.
const PIECE: u64 = 1 << 20;
/// Bytes of a file that are mapped at once, to see which of its pages are in the page cache.
const WINDOW: u64 = 1 << 30;
/// File systems whose files are read from the page cache, without a server or a device that may not answer.
const FILE_SYSTEMS: [&str; 11] = [
    "tmpfs",
    // The root of an initial RAM file system, a tmpfs or a ramfs.
    "rootfs",
    "devtmpfs",
    "ramfs",
    "hugetlbfs",
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "f2fs",
];
/// Beginnings of the names of files that the kernel keeps on mounts of its own.
const OF_THE_KERNEL: [&[u8]; 4] = [b"/dev/zero", b"/SYSV", b"/memfd:", b"/anon_hugepage"];
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Words of mapped files that the page table of the process lacks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FileWords {
    /// Words that look like an address in the process's private memory, each after its own address. Addresses are
    /// in order, and may not be multiples of 8.
    pub words: Vec<(u64, u64)>,
    /// Bytes that could not be examined.
    pub unexamined: u64,
}

/// Reads the words of mapped files that an image of a live process lacks.
pub fn read(image: &Image) -> FileWords {
    let mut found = FileWords::default();
    let mut budget = MAX_BYTES;
    let targets = Targets::of(image);
    let mut devices = None;
    for area in image.areas.iter().filter(|area| may_hold_words(area)) {
        let range = &area.mapping.range;
        let path = format!(
            "/proc/{}/map_files/{:x}-{:x}",
            image.pid, range.start, range.end
        );
        match fs::symlink_metadata(&path) {
            // The link has the permissions with which the file is open.
            Ok(link) if link.mode() & 0o200 == 0 => continue,
            Err(_) if !(area.shared && area.writable) => continue,
            _ => {}
        }
        let absent = page_runs::difference(
            std::slice::from_ref(range),
            page_runs::within(image.copied(), range),
        );
        let devices = devices.get_or_insert_with(|| devices_in_memory(image.pid));
        let is_known = area.is_of_the_kernel() || devices.contains(&area.mapping.device);
        let file = is_known.then(|| mapped_file::open_regular(Path::new(&path)));
        match file {
            Some(Ok(file)) => {
                let mut file = Absent {
                    area,
                    file,
                    targets: &targets,
                    found: &mut found,
                };
                file.examine(&absent, &mut budget);
            }
            // A file without a content of its own, such as that of a device.
            Some(Err(error)) if error.kind() == io::ErrorKind::InvalidInput => {}
            _ => found.unexamined += page_runs::bytes(&absent),
        }
    }
    found
}

/// Whether a mapping has a file whose pages can hold what the program has written.
fn may_hold_words(area: &Area) -> bool {
    area.has_file() && !area.is_of_device() && !area.mapping.executable
}

/// Returns the devices, as mappings show them, of the mounts whose files are read from the page cache.
fn devices_in_memory(pid: u32) -> Vec<(u32, u32)> {
    let mounts = [
        "/proc/self/mountinfo".to_owned(),
        format!("/proc/{pid}/mountinfo"),
    ];
    let texts = mounts
        .iter()
        .filter_map(|path| fs::read_to_string(path).ok());
    texts.flat_map(|text| devices(&text)).collect()
}

/// Parses lines such as `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`.
fn devices(mountinfo: &str) -> Vec<(u32, u32)> {
    let device = |line: &str| {
        let (mount, rest) = line.split_once(" - ")?;
        let is_known = FILE_SYSTEMS.contains(&rest.split(' ').next()?);
        let (major, minor) = mount.split(' ').nth(2)?.split_once(':')?;
        let device = (major.parse().ok()?, minor.parse().ok()?);
        is_known.then_some(device)
    };
    mountinfo.lines().filter_map(device).collect()
}

impl Area {
    /// Whether the area maps a file without a path, which the kernel keeps in memory: shared memory without a name,
    /// that of shmget(2), of memfd_create(2), and huge pages.
    fn is_of_the_kernel(&self) -> bool {
        OF_THE_KERNEL
            .iter()
            .any(|prefix| self.name().starts_with(prefix))
    }
}

/// The process's private memory, in which blocks are.
struct Targets {
    ranges: Vec<Range<u64>>,
    /// Whether a range has an address in each GiB of the address space. Text looks like addresses very often: this
    /// table, which stays in the caches, rejects nearly all of it.
    gigabytes: Vec<bool>,
}

impl Targets {
    fn of(image: &Image) -> Self {
        let private = image
            .areas
            .iter()
            .filter(|area| area.writable && !area.shared);
        Self::new(private.map(|area| area.mapping.range.clone()).collect())
    }

    fn new(ranges: Vec<Range<u64>>) -> Self {
        let ranges = blocks::merged(ranges);
        let mut gigabytes = vec![false; ((ADDRESS >> 30) + 1) as usize];
        for range in &ranges {
            for gigabyte in range.start >> 30..=(range.end - 1).min(ADDRESS) >> 30 {
                gigabytes[gigabyte as usize] = true;
            }
        }
        Self { ranges, gigabytes }
    }

    fn contain(&self, address: u64) -> bool {
        address <= ADDRESS && self.gigabytes[(address >> 30) as usize] && {
            let after = self.ranges.partition_point(|range| range.end <= address);
            self.ranges
                .get(after)
                .is_some_and(|range| range.start <= address)
        }
    }

    /// Returns the words in `bytes` that look like an address, each after its offset. At offsets that are no
    /// multiple of 8, as in packed structures, words have no tag.
    fn words<'a>(&'a self, bytes: &'a [u8]) -> impl Iterator<Item = (u64, u64)> + 'a {
        let words = bytes.windows(8).filter_map(|word| word.first_chunk());
        let words = (0u64..).zip(words.map(|word| u64::from_le_bytes(*word)));
        words.filter(|&(at, word)| {
            let address = if at.is_multiple_of(8) {
                word & ADDRESS
            } else {
                word
            };
            self.contain(address)
        })
    }
}

/// File whose pages are looked at where a mapping's page table entries are absent.
struct Absent<'a> {
    area: &'a Area,
    file: File,
    targets: &'a Targets,
    found: &'a mut FileWords,
}

impl Absent<'_> {
    /// Examines ranges of addresses. `budget` is the number of bytes that may still be read.
    fn examine(&mut self, absent: &[Range<u64>], budget: &mut u64) {
        let is_huge = nix::sys::statfs::fstatfs(&self.file)
            .is_ok_and(|system| system.filesystem_type().0 as u64 == HUGETLBFS_MAGIC);
        let size = self.file.metadata().map_or(0, |metadata| metadata.len());
        let first = self.area.mapping.file_offset;
        let start = self.area.mapping.range.start;
        for range in absent {
            let range = range.start - start + first..(range.end - start + first).min(size);
            for data in data(&self.file, range) {
                let cached = if is_huge {
                    Ok(vec![data.clone()])
                } else {
                    cached(&self.file, &data)
                };
                let cached = cached.unwrap_or_default();
                let mut missing = data.end - data.start;
                for run in cached {
                    let bytes = (run.end - run.start).min(*budget);
                    *budget -= bytes;
                    missing -= self.read(run.start..run.start + bytes);
                }
                self.found.unexamined += missing;
            }
        }
    }

    /// Keeps the words of a range of the file. Returns how many bytes were read.
    fn read(&mut self, range: Range<u64>) -> u64 {
        let to_address = self
            .area
            .mapping
            .range
            .start
            .wrapping_sub(self.area.mapping.file_offset);
        let mut buffer = vec![0; PIECE as usize];
        let mut at = range.start;
        while at < range.end && self.found.words.len() < MAX_WORDS {
            let wanted = (range.end - at).min(PIECE) as usize;
            // The size of a file can end within a page. The rest of that page is zeros.
            let Ok(read @ 1..) = self.file.read_at(&mut buffer[..wanted], at) else {
                break;
            };
            let words = self.targets.words(&buffer[..read]);
            let address = at.wrapping_add(to_address);
            self.found
                .words
                .extend(words.map(|(offset, word)| (address + offset, word)));
            at += read as u64;
        }
        at - range.start
    }
}

/// Returns the parts of a range of a file that have data: all but its holes, which are zeros. What is in swap is
/// data.
fn data(file: &File, range: Range<u64>) -> PageRuns {
    let seek = |at: u64, whence| {
        // SAFETY: takes no pointer.
        let found = unsafe { libc::lseek(file.as_raw_fd(), at.cast_signed(), whence) };
        u64::try_from(found).ok()
    };
    let mut runs = PageRuns::new();
    let mut at = range.start;
    while at < range.end {
        // No data behind `at` is the error ENXIO.
        let Some(start) = seek(at, libc::SEEK_DATA).filter(|&start| start < range.end) else {
            break;
        };
        let end = seek(start, libc::SEEK_HOLE)
            .unwrap_or(range.end)
            .clamp(start + 1, range.end);
        runs.push(start..end);
        at = end;
    }
    runs
}

/// Returns the parts of a range of a file that are in the page cache.
fn cached(file: &File, data: &Range<u64>) -> io::Result<PageRuns> {
    let mut runs = PageRuns::new();
    let mut at = data.start;
    while at < data.end {
        let start = at & !(PAGE - 1);
        let end = data.end.min(start + WINDOW);
        // SAFETY: the memory is never read, so that a file that becomes smaller does no harm.
        let mapped = unsafe {
            MmapOptions::new()
                .offset(start)
                .len((end - start) as usize)
                .map(file)?
        };
        let mut present = vec![0u8; (end - start).div_ceil(PAGE) as usize];
        // SAFETY: the kernel writes one byte for each page of the mapping, which is as many as `present` has.
        let result = unsafe {
            libc::mincore(
                mapped.as_ptr().cast_mut().cast(),
                mapped.len(),
                present.as_mut_ptr(),
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        for (page, _) in (start..)
            .step_by(PAGE as usize)
            .zip(&present)
            .filter(|(_, is)| **is & 1 != 0)
        {
            page_runs::add(&mut runs, page.max(at)..(page + PAGE).min(end));
        }
        at = end;
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::image::made::ImageBuilder;

    const HEAP: Range<u64> = 0x5555_0000_0000..0x5555_0010_0000;

    #[test]
    fn words_that_look_like_addresses_are_kept() {
        let targets = Targets::new(vec![HEAP, 0x7f00_0000_0000..0x7f00_0000_1000]);
        let mut bytes = b"UUUUUUUUUUUUUUUU".to_vec();
        bytes.extend(0x5555_0000_0010_u64.to_le_bytes());
        bytes.extend((0x7f00_0000_0ff8_u64 | 0xfffb << 48).to_le_bytes());
        bytes.extend(0x7f00_0000_1000_u64.to_le_bytes());
        bytes.push(0);
        bytes.extend(0x5555_0000_0020_u64.to_le_bytes());
        bytes.extend([0; 7]);
        let words: Vec<_> = targets.words(&bytes).collect();
        assert_eq!(
            words,
            [
                (16, 0x5555_0000_0010),
                (24, 0xfffb_7f00_0000_0ff8),
                (41, 0x5555_0000_0020)
            ]
        );
    }

    #[test]
    fn files_without_a_server_are_known_by_their_mounts() {
        let mountinfo = "22 28 0:21 / /dev/shm rw shared:4 - tmpfs tmpfs rw\n\
                         36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext4 /dev/root rw\n\
                         40 28 0:44 / /srv rw - fuse.sshfs host:/ rw\n\
                         41 28 0:45 / /sys rw - sysfs sysfs rw\nnonsense\n";
        assert_eq!(devices(mountinfo), [(0, 21), (98, 0)]);
        let of_the_kernel = |name: &str| {
            let line = format!("1000-2000 rw-s 00000000 00:01 9 {name}");
            Area::parse_list(line.as_bytes())[0].is_of_the_kernel()
        };
        assert!(of_the_kernel("/dev/zero (deleted)") && of_the_kernel("/memfd:x (deleted)"));
        assert!(!of_the_kernel("/srv/memfd:x"));
    }

    /// A file in memory, mapped twice: our own process has no page of the second mapping.
    #[test]
    fn pages_that_are_not_in_the_page_table_are_read_from_the_file() {
        let mut targets = MmapOptions::new().len(4096).map_anon().expect("memory");
        targets[0] = 1;
        let target = targets.as_ptr() as u64 + 24;
        let file = nix::sys::memfd::memfd_create(c"file_words", nix::sys::memfd::MFdFlags::empty());
        let file = File::from(file.expect("memory"));
        // Pages 0, 2 and 9 have data, and the last is half a page.
        file.write_all_at(&target.to_le_bytes(), 8).expect("memory");
        file.write_all_at(&target.to_le_bytes(), 2 * PAGE + 1)
            .expect("memory");
        file.write_all_at(&[0; 2048], 9 * PAGE).expect("memory");
        assert_eq!(
            data(&file, 0..10 * PAGE),
            [0..PAGE, 2 * PAGE..3 * PAGE, 9 * PAGE..9 * PAGE + 2048]
        );
        // SAFETY: no other code has the file.
        let mapped = unsafe { MmapOptions::new().len(10 * PAGE as usize).map_mut(&file) };
        let mapped = mapped.expect("address space");
        let mut image = ImageBuilder::default().image();
        image.pid = std::process::id();
        image.areas = Area::parse_list(&fs::read("/proc/self/maps").expect("our own"));
        let start = mapped.as_ptr() as u64;
        let read = |image: &Image| {
            let mut found = read(image);
            let range = start..start + 10 * PAGE;
            found.words.retain(|(address, _)| range.contains(address));
            found.words
        };
        let words = [(start + 8, target), (start + 2 * PAGE + 1, target)];
        assert_eq!(read(&image), words);
        // Pages that were copied are not read again.
        let mut copied = ImageBuilder::default();
        copied.put(start, 0);
        let mut copied = copied.image();
        (copied.pid, copied.areas) = (image.pid, image.areas.clone());
        assert_eq!(read(&copied), words[1..]);
    }
}
