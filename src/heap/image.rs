//! Image of a process at one moment: its memory, its mappings and its threads' registers.
//!
//! An image is pure data. Everything that is found out about a process is a function of its image. Such a function
//! can be tested without a kernel, and be computed while the process runs on.

use std::ops::Range;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use memmap2::MmapMut;

use crate::heap::arch;
pub use crate::heap::arch::GENERAL_REGISTERS;
use crate::heap::area::Area;
use crate::heap::file_words::FileWords;
use crate::heap::idle::IdlePages;
use crate::heap::kernel::KernelWord;
use crate::heap::page_index::{PAGE, PageIndex};
use crate::heap::page_runs;

/// Image of a process, taken while its threads were stopped.
#[derive(Debug, Default)]
pub struct Image {
    /// PID of the process in our PID namespace.
    pub pid: u32,
    /// Name of the process (comm). Not escaped.
    pub comm: Vec<u8>,
    /// Mappings of the process, in order of address.
    pub areas: Vec<Area>,
    /// All threads of the process, in order of their IDs.
    pub threads: Vec<Thread>,
    /// How long the threads were paused.
    pub paused: Duration,
    /// Time at which the threads were paused, by CLOCK_MONOTONIC, in nanoseconds.
    pub copied_ns: u64,
    /// Bytes of the copy that the kernel refused to read. They are zeros.
    pub unread: u64,
    /// Words that the kernel keeps for the process, if they were requested.
    pub kernel_words: Vec<KernelWord>,
    /// Words of mapped files in pages that are not in the memory, if they were wanted.
    pub file_words: FileWords,
    /// Pages that were not used for a while, if the process was watched for them.
    pub idle: Option<IdlePages>,
    pub(super) memory: Memory,
}

/// Thread of a process, as it was paused.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Thread {
    /// ID of the thread in our PID namespace.
    pub tid: u32,
    /// Name of the thread (comm). Not escaped.
    pub comm: Vec<u8>,
    /// Address of the next instruction.
    pub instruction: u64,
    /// The stack pointer.
    pub stack_pointer: u64,
    /// The thread pointer, which leads to the thread's control block.
    pub thread_pointer: u64,
    /// The general registers, in the order of [`GENERAL_REGISTERS`].
    pub general: Vec<u64>,
    /// Words of the vector state, in the layout of the kernel's register set; empty if the kernel has none.
    pub vector: Vec<u64>,
}

/// Copied pages, one after the other.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// Addresses of the pages, in the order of the copy.
    runs: Vec<Range<u64>>,
    /// Buffer with the copied pages, which may be larger than the pages are.
    copy: Option<MmapMut>,
    /// Number of each page: how many pages are before it in the copy.
    pages: PageIndex,
}

impl Image {
    /// Whether the main thread is there. It can end before the others.
    pub(super) fn has_main_thread(&self) -> bool {
        self.threads.iter().any(|thread| thread.tid == self.pid)
    }

    /// Sets the memory of an image that has none yet. `copy` begins with the pages of the ranges `runs`, one after
    /// the other.
    ///
    /// # Errors
    /// If ranges are not of whole pages, in order and apart, or the copy is too small for them.
    pub fn set_memory(&mut self, runs: Vec<Range<u64>>, copy: MmapMut) -> Result<()> {
        let (mut pages, mut number, mut end) = (PageIndex::default(), 0, 0);
        for run in &runs {
            let whole = run.start.is_multiple_of(PAGE) && run.end.is_multiple_of(PAGE);
            ensure!(
                whole && run.start >= end && run.start < run.end,
                "pages {:#x} to {:#x} are out of order",
                run.start,
                run.end
            );
            for page in run.clone().step_by(PAGE as usize) {
                pages.insert(page, number);
                number = number.checked_add(1).context("too many pages")?;
            }
            end = run.end;
        }
        ensure!(
            copy.len() as u64 >= u64::from(number) * PAGE,
            "the copy has {} bytes, its {number} pages are more",
            copy.len()
        );
        self.memory = Memory {
            runs,
            copy: Some(copy),
            pages,
        };
        Ok(())
    }

    /// Returns the ranges of addresses whose bytes were copied, in order.
    pub fn copied(&self) -> &[Range<u64>] {
        &self.memory.runs
    }

    /// Returns the number of bytes that were copied.
    pub fn copied_bytes(&self) -> u64 {
        page_runs::bytes(&self.memory.runs)
    }

    /// Returns how many bytes of a range were copied. Only pages that are wholly within the range count.
    pub fn resident_page_bytes(&self, range: Range<u64>) -> u64 {
        let start = range.start.next_multiple_of(PAGE);
        let within = page_runs::within(&self.memory.runs, &(start..range.end)).iter();
        let bytes = within.map(|run| {
            let end = run.end.min(range.end & !(PAGE - 1));
            end.saturating_sub(run.start.max(start))
        });
        bytes.sum()
    }

    /// Returns how many bytes of a range were copied, parts of pages included.
    pub fn resident_bytes(&self, range: Range<u64>) -> u64 {
        let within = page_runs::within(&self.memory.runs, &range).iter();
        within
            .map(|run| run.end.min(range.end) - run.start.max(range.start))
            .sum()
    }

    /// Returns the word at an address. Returns None if the address is not a multiple of 8, or if its page was not
    /// copied.
    ///
    /// A page of private memory that the process has never written to is not present, and so not copied. Such a page
    /// reads as zeros, which refer to nothing: `unwrap_or(0)` is what the process would have read.
    #[inline]
    pub fn word(&self, address: u64) -> Option<u64> {
        if !address.is_multiple_of(8) {
            return None;
        }
        let bytes = self.page(address)?;
        let at = (address % PAGE) as usize;
        let word = bytes.get(at..at + 8)?;
        Some(u64::from_le_bytes(word.try_into().ok()?))
    }

    /// Returns the page that contains an address; None if it was not copied.
    #[inline]
    pub fn page(&self, address: u64) -> Option<&[u8]> {
        let number = self.memory.pages.get(address)? as usize;
        let copy = self.memory.copy.as_ref()?;
        copy.get(number * PAGE as usize..(number + 1) * PAGE as usize)
    }

    /// Returns the bytes of a range; None if the range is empty, or if not all of it was copied.
    pub fn bytes(&self, range: Range<u64>) -> Option<&[u8]> {
        let runs = &self.memory.runs;
        if range.is_empty() {
            return None;
        }
        // Runs that touch each other are one after the other in the copy, too.
        let mut end = range.start;
        let mut run = runs.partition_point(|run| run.end <= range.start);
        while end < range.end {
            let next = runs.get(run).filter(|run| run.start <= end)?;
            end = next.end;
            run += 1;
        }
        let page = self.memory.pages.get(range.start)? as usize;
        let at = page * PAGE as usize + (range.start % PAGE) as usize;
        let length = usize::try_from(range.end - range.start).ok()?;
        self.memory.copy.as_ref()?.get(at..at + length)
    }

    /// Returns the mapping that contains an address.
    pub fn area(&self, address: u64) -> Option<&Area> {
        let areas = &self.areas;
        let at = areas.partition_point(|area| area.mapping.range.end <= address);
        let area = areas.get(at)?;
        area.mapping.range.contains(&address).then_some(area)
    }

    /// Iterates over the copied words of a range, in order, each with its address. Leaves out words that cross an end
    /// of the range. Pages that were not copied are skipped quickly.
    pub fn words(&self, range: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
        let runs = page_runs::within(&self.memory.runs, &range).iter();
        runs.flat_map(move |run| {
            let start = run.start.max(range.start).next_multiple_of(8);
            let end = run.end.min(range.end) & !7;
            let bytes = self.bytes(start..end).unwrap_or_default();
            let (words, _) = bytes.as_chunks::<8>();
            let addresses = (start..).step_by(8);
            addresses.zip(words.iter().map(|word| u64::from_le_bytes(*word)))
        })
    }
}

impl Thread {
    /// Makes a thread of its registers.
    pub fn new(tid: u32, comm: Vec<u8>, general: Vec<u64>, vector: Vec<u64>) -> Self {
        let register = |at: usize| general.get(at).copied().unwrap_or_default();
        Self {
            tid,
            comm,
            instruction: register(arch::INSTRUCTION),
            stack_pointer: register(arch::STACK_POINTER),
            thread_pointer: register(arch::THREAD_POINTER),
            general,
            vector,
        }
    }

    /// Iterates over all words that could be pointers, each with its register's name, or `vector` for words of the
    /// vector state.
    pub fn words(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let general = GENERAL_REGISTERS
            .into_iter()
            .zip(self.general.iter().copied());
        general.chain(self.vector.iter().map(|&word| ("vector", word)))
    }
}

/// Images that tests write by hand.
#[cfg(test)]
pub(crate) mod made {
    use std::collections::BTreeMap;

    use super::*;

    /// Memory by page, mappings and threads, of which an image is made.
    #[derive(Debug, Default, Clone)]
    pub(crate) struct ImageBuilder {
        pub(crate) pages: BTreeMap<u64, Vec<u8>>,
        pub(crate) maps: String,
        pub(crate) threads: Vec<Thread>,
    }

    impl ImageBuilder {
        /// Adds a mapping. `rest` is a line of /proc/PID/maps without its addresses: `rw-p 00000000 00:00 0 [heap]`.
        pub(crate) fn map(&mut self, range: Range<u64>, rest: &str) {
            self.maps += &format!("{:x}-{:x} {rest}\n", range.start, range.end);
        }

        /// Writes a word, and so makes its page a copied one.
        pub(crate) fn put(&mut self, address: u64, word: u64) {
            self.put_bytes(address, &word.to_le_bytes());
        }

        /// Writes bytes, and so makes their pages copied ones.
        pub(crate) fn put_bytes(&mut self, address: u64, bytes: &[u8]) {
            for (address, byte) in (address..).zip(bytes) {
                let page = self.pages.entry(address & !(PAGE - 1));
                page.or_insert_with(|| vec![0; PAGE as usize])[(address % PAGE) as usize] = *byte;
            }
        }

        pub(crate) fn image(&self) -> Image {
            let mut copy = MmapMut::map_anon((self.pages.len() + 1) * PAGE as usize).expect("room");
            let mut runs: Vec<Range<u64>> = Vec::new();
            for (number, (&page, bytes)) in self.pages.iter().enumerate() {
                copy[number * PAGE as usize..][..PAGE as usize].copy_from_slice(bytes);
                match runs.last_mut().filter(|run| run.end == page) {
                    Some(run) => run.end += PAGE,
                    None => runs.push(page..page + PAGE),
                }
            }
            let mut image = Image {
                pid: 1,
                comm: b"made".to_vec(),
                areas: Area::parse_list(self.maps.as_bytes()),
                threads: self.threads.clone(),
                ..Image::default()
            };
            image.set_memory(runs, copy).expect("in order");
            image
        }
    }
}

#[cfg(test)]
mod tests {
    use super::made::ImageBuilder;
    use super::*;

    #[test]
    fn memory_is_found_by_its_address() {
        let mut made = ImageBuilder::default();
        made.map(0x1000..0x5000, "rw-p 00000000 00:00 0 ");
        made.put(0x1ff8, 0x1122_3344_5566_7788);
        made.put(0x2000, 7);
        made.put(0x4008, 9);
        let image = made.image();
        assert_eq!(image.copied(), [0x1000..0x3000, 0x4000..0x5000]);
        assert_eq!(
            (image.word(0x1ff8), image.word(0x2000)),
            (Some(0x1122_3344_5566_7788), Some(7))
        );
        assert_eq!(
            [0, 0x1ff9, 0x3000, 0x5000, u64::MAX - 7].map(|address| image.word(address)),
            [None; 5]
        );
        assert_eq!(image.bytes(0x1fff..0x2002), Some(&[0x11, 7, 0][..]));
        assert_eq!(image.bytes(0x2ff0..0x3000).map(<[u8]>::len), Some(16));
        for beyond in [
            0x2fff..0x3001,
            0x2fff..0x4001,
            0x3fff..0x4001,
            0x4fff..0x5001,
        ] {
            assert_eq!(image.bytes(beyond), None);
        }
        assert_eq!(image.resident_page_bytes(0x1001..0x4fff), 0x1000);
        assert_eq!(image.resident_page_bytes(0..u64::MAX), image.copied_bytes());
        assert_eq!(image.resident_bytes(0x1001..0x4fff), 0x1fff + 0xfff);
        let words: Vec<_> = image
            .words(0x1ff1..0x4010)
            .filter(|word| word.1 != 0)
            .collect();
        assert_eq!(
            words,
            [(0x1ff8, 0x1122_3344_5566_7788), (0x2000, 7), (0x4008, 9)]
        );
        assert!(image.area(0x4fff).is_some() && image.area(0x5000).is_none());
    }

    #[test]
    fn runs_out_of_order_and_copies_too_small_are_refused() {
        let set = |runs: &[(u64, u64)], pages: usize| {
            let copy = MmapMut::map_anon(pages * PAGE as usize).expect("room");
            let runs = runs.iter().map(|&(start, end)| start..end).collect();
            Image::default().set_memory(runs, copy).is_ok()
        };
        assert!(set(&[(0x1000, 0x2000), (0x2000, 0x3000)], 2));
        assert!(!set(&[(0x1000, 0x3000)], 1));
        assert!(!set(&[(0x2000, 0x3000), (0x1000, 0x2000)], 2));
        assert!(!set(&[(0x1000, 0x1800)], 2));
        assert!(!set(&[(0x3000, 0x1000)], 2));
    }
}
