//! The blocks of a heap, as the walk of its allocator's structures has found them.

use std::ops::Range;

use crate::heap::page_index::{PAGE, PageIndex};
use crate::heap::page_runs::{self, PageRuns};

/// Block of memory that the program has allocated and not freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Address that the allocator returned to the program.
    pub address: u64,
    /// Number of usable bytes: as many as the program requested, or some more.
    pub size: u64,
}

impl Block {
    /// Returns the range of addresses of the block.
    pub fn range(&self) -> Range<u64> {
        self.address..self.address.saturating_add(self.size)
    }
}

/// Count and bytes of several chunks or blocks, added up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sum {
    /// Number of chunks or blocks.
    pub count: u64,
    /// Bytes of the blocks; of chunks, with their headers.
    pub bytes: u64,
    /// Bytes whose pages are in memory.
    pub resident: u64,
}

impl Sum {
    pub(super) fn add(&mut self, bytes: u64, resident: u64) {
        self.count += 1;
        self.bytes += bytes;
        self.resident += resident;
    }
}

/// An allocator whose structures have been walked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allocator {
    /// Name of the allocator, with the versions whose structures match: `glibc malloc (2.27 to 2.42)`.
    pub name: String,
    /// Path of the file whose data hold the allocator's state, in the process's own mount namespace. Not escaped.
    pub file: Vec<u8>,
}

/// Whether all blocks of a process have been found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Coverage {
    /// All blocks were found: the walk agrees with the allocators' own sums.
    Complete,
    /// Some blocks may be missing, because the allocator's structures are inconsistent. If each of several images has
    /// an inconsistency, the heap is damaged.
    Incomplete {
        /// Description of the inconsistency.
        why: String,
        /// Address of the inconsistency, if it is in one place, such as an invalid chunk header.
        address: Option<u64>,
    },
    /// The allocator that the process uses cannot be walked.
    Unknown {
        /// Reason: the allocators that were looked for, or the one that the process seems to use.
        why: String,
    },
}

/// Returns the ranges in order. Ranges that touch or overlap are merged into one.
pub(super) fn merged(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut merged = PageRuns::new();
    for range in ranges {
        page_runs::add(&mut merged, range);
    }
    merged
}

/// Subtracts `holes` from `ranges`. Both are in order, and each hole is within one of the ranges.
pub(super) fn without(ranges: &[Range<u64>], holes: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut left = Vec::new();
    let mut holes = holes.iter().peekable();
    for range in ranges {
        let mut start = range.start;
        while let Some(hole) = holes.next_if(|hole| hole.start < range.end) {
            left.push(start..hole.start);
            start = hole.end;
        }
        left.push(start..range.end);
    }
    left.retain(|range| range.start < range.end);
    left
}

/// Heaps of a process: the memory of its allocators, and the blocks in it that the program holds.
///
/// Only words in blocks, and words outside of [`regions`](Heap::regions) and [`structures`](Heap::structures), are
/// the program's own. Headers, free chunks and the allocators' private data refer to blocks, too, but do not keep
/// them reachable.
#[derive(Debug)]
pub struct Heap {
    /// Allocators, the one with most blocks first.
    pub allocators: Vec<Allocator>,
    /// Whether all blocks were found.
    pub coverage: Coverage,
    /// Memory that allocators have obtained from the kernel: arenas, and chunks with mappings of their own. The
    /// ranges are in order and disjoint. Blocks are within them.
    pub regions: Vec<Range<u64>>,
    /// Allocators' own structures outside of the regions, such as lists of free chunks in a library's data. In order.
    pub structures: Vec<Range<u64>>,
    /// Free chunks with their headers, from all free lists. In order.
    pub free: Vec<Range<u64>>,
    /// Blocks that the program may hold or not, because a thread was in the middle of filling or flushing its cache.
    /// These blocks are not in [`blocks`](Heap::blocks), and lie outside of [`regions`](Heap::regions).
    pub in_doubt: Vec<Block>,
    blocks: Vec<Block>,
    index: PageIndex,
    /// Indexes of blocks that have further pages, which are not in `index`. In order.
    large: Vec<u32>,
}

/// Largest number of a block's pages that are in the index. In its further pages, a block is found by a search in
/// `large`.
const INDEXED_PAGES: u64 = 512;

impl Heap {
    /// Makes a heap of these blocks, which must not overlap. They need not be in order.
    pub fn new(mut blocks: Vec<Block>, coverage: Coverage) -> Self {
        blocks.sort_unstable_by_key(|block| block.address);
        let (mut index, mut large) = (PageIndex::default(), Vec::new());
        for (number, block) in (0..).zip(&blocks) {
            let last = block.address.saturating_add(block.size.max(1) - 1);
            let first = block.address & !(PAGE - 1);
            if (last - first) / PAGE >= INDEXED_PAGES {
                large.push(number);
            }
            for page in (first..=last)
                .step_by(PAGE as usize)
                .take(INDEXED_PAGES as usize)
            {
                index.insert(page, number);
            }
        }
        Self {
            allocators: Vec::new(),
            coverage,
            regions: Vec::new(),
            structures: Vec::new(),
            free: Vec::new(),
            in_doubt: Vec::new(),
            blocks,
            index,
            large,
        }
    }

    /// Joins this heap with the heap of another allocator of the process. The result is complete if both heaps are,
    /// and if no blocks overlap.
    pub(super) fn joined(self, other: Self) -> Self {
        let (mut one, mut two) = (self, other);
        if one.blocks.len() < two.blocks.len() {
            std::mem::swap(&mut one, &mut two);
        }
        let sorted = |mut ranges: Vec<Range<u64>>, more: Vec<Range<u64>>| {
            ranges.extend(more);
            ranges.sort_unstable_by_key(|range| range.start);
            ranges
        };
        let mut coverage = match one.coverage {
            Coverage::Complete => two.coverage,
            incomplete => incomplete,
        };
        let mut blocks = one.blocks;
        blocks.extend(two.blocks);
        blocks.sort_unstable_by_key(|block| block.address);
        let all = blocks.len();
        blocks.dedup_by(|next, block| block.range().end > next.address);
        if blocks.len() < all {
            coverage = Coverage::Incomplete {
                why: "blocks of two allocators overlap".into(),
                address: None,
            };
        }
        let mut heap = Self::new(blocks, coverage);
        one.allocators.extend(two.allocators);
        heap.allocators = one.allocators;
        heap.regions = sorted(one.regions, two.regions);
        heap.structures = sorted(one.structures, two.structures);
        heap.free = sorted(one.free, two.free);
        heap.in_doubt = one.in_doubt;
        heap.in_doubt.extend(two.in_doubt);
        heap
    }

    /// Returns the blocks, in order of address.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// Returns the block that contains an address, by its index in [`blocks`](Heap::blocks), and the offset of the
    /// address in the block. A block of size 0 contains its first byte.
    #[inline]
    pub fn block_at(&self, address: u64) -> Option<(usize, u64)> {
        let at = match self.index.get(address) {
            Some(first) => {
                let (low, high) = self.near(first as usize, address);
                let after =
                    self.blocks[low..high].partition_point(|block| block.address <= address);
                (low + after).checked_sub(1)?
            }
            // Most words are not addresses of blocks. For these, only large blocks are searched.
            None => {
                let begins_by = |&large: &u32| self.blocks[large as usize].address <= address;
                let after = self.large.partition_point(begins_by);
                self.large[after.checked_sub(1)?] as usize
            }
        };
        let block = &self.blocks[at];
        let offset = address.checked_sub(block.address)?;
        (offset < block.size.max(1)).then_some((at, offset))
    }

    /// Returns the index of the block that begins at an address, if it has at least this many bytes.
    pub(super) fn starting_at(&self, address: u64, bytes: u64) -> Option<u32> {
        let (number, offset) = self.block_at(address)?;
        let is_large = self.blocks[number].size >= bytes;
        (offset == 0 && is_large).then_some(number as u32)
    }

    /// Returns the bounds of the search for the last block that begins at or below an address. `first` is the first
    /// block of the address's page.
    ///
    /// Most pages have blocks of one size, so the offset in the page predicts the index of the block. A binary search
    /// from the page's start would wait for memory in each step.
    fn near(&self, first: usize, address: u64) -> (usize, usize) {
        let page = address & !(PAGE - 1);
        let next = self
            .index
            .get(page + PAGE)
            .map_or(first, |next| next as usize);
        let blocks = next.saturating_sub(first) as u64;
        let guess = first + ((address - page) * blocks / PAGE) as usize;
        let mut step = 1;
        if self.starts_by(guess, address) {
            let mut low = guess;
            while self.starts_by(low + step, address) {
                low += step;
                step *= 2;
            }
            return (low, (low + step).min(self.blocks.len()));
        }
        let mut high = guess;
        while high > first {
            let low = high.saturating_sub(step).max(first);
            if self.starts_by(low, address) {
                return (low, high);
            }
            high = low;
            step *= 2;
        }
        (first, first)
    }

    fn starts_by(&self, number: usize, address: u64) -> bool {
        self.blocks
            .get(number)
            .is_some_and(|block| block.address <= address)
    }

    /// Returns the usable bytes of all blocks together.
    pub fn block_bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.size).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heap(blocks: &[(u64, u64)]) -> Heap {
        let blocks = blocks
            .iter()
            .map(|&(address, size)| Block { address, size });
        Heap::new(blocks.collect(), Coverage::Complete)
    }

    #[test]
    fn a_block_is_found_by_every_address_in_it() {
        // As many blocks in a page as the smallest size class of jemalloc makes, an empty one, and
        // blocks of many pages.
        let mut blocks: Vec<_> = (0..1024).map(|n| (0x10_0000 + 8 * n, 8)).collect();
        blocks.extend([(0x20_0010, 0), (0x20_0020, 24), (0x20_0ff0, 0x3000)]);
        blocks.extend([
            (0x100_0000, 0x800_0000),
            (0x900_0010, 16),
            (0x7fff_0000_0000, 1 << 40),
        ]);
        blocks.reverse();
        let heap = heap(&blocks);
        blocks.sort();
        for &(address, size) in &blocks {
            let expected = blocks.iter().position(|block| block.0 == address);
            let offsets = [0, 1, 7, size / 2, size.saturating_sub(1)];
            for offset in offsets.into_iter().filter(|&offset| offset < size.max(1)) {
                let found = heap.block_at(address + offset);
                assert_eq!(
                    found,
                    expected.map(|at| (at, offset)),
                    "{address:#x}+{offset}"
                );
            }
        }
        for outside in [
            0,
            0xf_ffff,
            0x10_2000,
            0x20_0011,
            0x20_0038,
            0x20_3ff0,
            0x900_0000,
            u64::MAX,
        ] {
            assert_eq!(heap.block_at(outside), None, "{outside:#x}");
        }
    }

    #[test]
    fn a_block_is_found_where_sizes_are_mixed() {
        // Few blocks and then many in a page, and the other way round: most are not where one would guess.
        let mut blocks = vec![(0x1000, 0x800)];
        blocks.extend((0..128).map(|n| (0x1800 + 16 * n, 16)));
        blocks.extend((0..128).map(|n| (0x2000 + 16 * n, 12)));
        blocks.extend([(0x2900, 0x500), (0x2e08, 0x800), (0x3800, 8)]);
        let heap = heap(&blocks);
        for address in 0xff0..0x4010 {
            let at = blocks
                .iter()
                .position(|&(start, size)| (start..start + size).contains(&address));
            let expected = at.map(|at| (at, address - blocks[at].0));
            assert_eq!(heap.block_at(address), expected, "{address:#x}");
        }
    }

    #[test]
    fn heaps_of_two_allocators_are_joined() {
        let joined = |one: &[(u64, u64)], other: &[(u64, u64)]| heap(one).joined(heap(other));
        let both = joined(&[(0x2000, 16)], &[(0x1000, 16), (0x3000, 8)]);
        let addresses: Vec<_> = both.blocks().iter().map(|block| block.address).collect();
        assert_eq!(addresses, [0x1000, 0x2000, 0x3000]);
        assert_eq!(both.coverage, Coverage::Complete);
        assert_eq!(both.block_at(0x2008), Some((1, 8)));
        let overlapping = joined(&[(0x2000, 16)], &[(0x2008, 16)]);
        assert!(matches!(overlapping.coverage, Coverage::Incomplete { .. }));
        let why = || Coverage::Unknown { why: "x".into() };
        let unknown = heap(&[(0x1000, 8)]).joined(Heap::new(Vec::new(), why()));
        assert_eq!(unknown.coverage, why());
    }

    #[test]
    fn a_heap_without_blocks_has_none_anywhere() {
        let heap = heap(&[]);
        assert_eq!(heap.block_at(0x1000), None);
        assert_eq!((heap.blocks().len(), heap.block_bytes()), (0, 0));
    }
}
