//! Blocks of CPython's own allocator (pymalloc), which holds objects of up to 512 bytes.
//!
//! CPython itself maps arenas of 256 KiB (1 MiB since 3.10), and cuts them into pools of one size class: 4 KiB, or 16
//! KiB since 3.10. A pool's header has the class, the number of blocks in use, the first free block, and the offset
//! up to which the pool has been used. The free list proves that a page begins with such a header: it has as many
//! blocks as the number in use leaves.

use std::ops::Range;

use crate::heap::blocks::{Block, Heap};
use crate::heap::image::Image;

/// Size of a pool's header, in bytes.
const HEADER: u64 = 48;
/// Difference between two size classes, in bytes.
const STEP: u64 = 16;
/// Number of size classes: 16 to 512 bytes.
const CLASSES: u32 = 32;
/// Sizes of pools, in bytes: that of 3.10 and later first.
const POOLS: [u64; 2] = [16 << 10, 4 << 10];
/// Smallest number of pools that proves pymalloc: one header can come about by chance.
const MIN_POOLS: usize = 3;

/// Sums over the pools of pymalloc.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pools {
    /// Number of pools whose blocks are known.
    pub pools: u64,
    /// Number of blocks in use in these pools.
    pub blocks: u64,
    /// Bytes of these pools in no block in use, without the pools' headers.
    pub free_bytes: u64,
    /// Number of pools in which the number in use and the free list do not agree, as while one of the two is being
    /// changed. The blocks of these pools are not known.
    pub inconsistent: u64,
}

/// Adds the blocks of pymalloc's pools to a heap. The heap's allocators know nothing of these blocks.
pub fn with_pools(image: &Image, heap: Heap) -> (Heap, Pools) {
    let found = POOLS.map(|size| Found::of(image, &heap, size));
    // The header of a pool of 16 KiB is valid as one of 4 KiB only by chance, and the other way round.
    let best = found.into_iter().max_by_key(|found| found.pools.len());
    let Some(found) = best.filter(|found| found.pools.len() >= MIN_POOLS) else {
        return (heap, Pools::default());
    };
    let bytes = found.pools.len() as u64 * (found.size - HEADER);
    let used: u64 = found.blocks.iter().map(|block| block.size).sum();
    let pools = Pools {
        pools: found.pools.len() as u64,
        blocks: found.blocks.len() as u64,
        free_bytes: bytes - used,
        inconsistent: found.strange,
    };
    (found.added_to(heap), pools)
}

/// Pools of one size.
struct Found {
    size: u64,
    pools: Vec<Range<u64>>,
    blocks: Vec<Block>,
    strange: u64,
}

impl Found {
    fn of(image: &Image, heap: &Heap, size: u64) -> Self {
        let mut found = Self {
            size,
            pools: Vec::new(),
            blocks: Vec::new(),
            strange: 0,
        };
        let areas = image.areas.iter();
        for area in areas.filter(|area| area.is_private_anonymous() && area.writable) {
            let Range { start, end } = area.mapping.range;
            // An arena is aligned to pages; its pools, to their size.
            for pool in (start.next_multiple_of(size)..end).step_by(size as usize) {
                let region = heap.regions.partition_point(|range| range.end <= pool);
                let is_managed = |range: &Range<u64>| range.start < pool + size;
                if !heap.regions.get(region).is_some_and(is_managed) {
                    found.add(image, pool);
                }
            }
        }
        found
    }

    fn add(&mut self, image: &Image, pool: u64) {
        let Some(header) = Header::read(image, pool, self.size) else {
            return;
        };
        match header.blocks(image, pool) {
            Some(blocks) => {
                self.pools.push(pool..pool + self.size);
                self.blocks.extend(blocks);
            }
            None => self.strange += 1,
        }
    }

    fn added_to(mut self, heap: Heap) -> Heap {
        self.blocks.extend_from_slice(heap.blocks());
        let mut with = Heap::new(self.blocks, heap.coverage);
        with.in_doubt = heap.in_doubt;
        self.pools.extend(heap.regions);
        self.pools.sort_unstable_by_key(|range| range.start);
        with.regions = self.pools;
        with.allocators = heap.allocators;
        with.structures = heap.structures;
        with.free = heap.free;
        with
    }
}

/// Valid header of a pool (`struct pool_header`).
struct Header {
    /// Number of blocks in use.
    used: u64,
    /// Size of each block, in bytes.
    block: u64,
    /// Address of the first free block; 0 if there is none.
    free: u64,
    /// Offset of the part that was never used.
    untouched: u64,
}

impl Header {
    fn read(image: &Image, pool: u64, size: u64) -> Option<Self> {
        let word = |at: u64| image.word(pool + at);
        let halves = |at: u64| word(at).map(|word| (word as u32, (word >> 32) as u32));
        let (_, class) = halves(32)?;
        if class >= CLASSES {
            return None;
        }
        let block = (u64::from(class) + 1) * STEP;
        let (untouched, last) = halves(40)?;
        let (used, untouched) = (word(0)? & 0xffff_ffff, u64::from(untouched));
        let is_place = untouched >= HEADER && (untouched - HEADER).is_multiple_of(block);
        let agrees = u64::from(last) == size - block
            && is_place
            && untouched <= size + block
            && used <= (size - HEADER) / block;
        agrees.then_some(Self {
            used,
            block,
            free: word(8)?,
            untouched: untouched.min(size - (size - HEADER) % block),
        })
    }

    /// Returns the blocks in use; None if the free list does not leave as many.
    fn blocks(&self, image: &Image, pool: u64) -> Option<impl Iterator<Item = Block>> {
        let number = |address: u64| {
            let within = address.checked_sub(pool + HEADER)?;
            within
                .is_multiple_of(self.block)
                .then(|| (within / self.block) as usize)
        };
        let touched = ((self.untouched - HEADER) / self.block) as usize;
        let mut is_free = vec![false; touched];
        let (mut free, mut length) = (self.free, 0);
        while free != 0 {
            let known = is_free.get_mut(number(free)?)?;
            if std::mem::replace(known, true) {
                return None;
            }
            length += 1;
            free = image.word(free)?;
        }
        let (first, size) = (pool + HEADER, self.block);
        let places = (first..).step_by(size as usize).zip(is_free);
        (self.used + length == touched as u64).then(|| {
            places
                .filter(|(_, is_free)| !is_free)
                .map(move |(address, _)| Block { address, size })
        })
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;
    use crate::heap::names::memory::sample::{self, FakeProcess};

    const ARENA: u64 = 0x7000_0000;

    /// Writes a pool of blocks of 48 bytes. Of the first `touched` blocks, those in `free` are free, and the others
    /// in use.
    fn pool(sample: &mut FakeProcess, at: u64, size: u64, touched: u64, free: &[u64]) {
        let place = |number: u64| at + HEADER + 48 * number;
        let used = touched - free.len() as u64;
        let first = free.first().map_or(0, |&number| place(number));
        sample.words(at, &[used, first, at, at, 2 << 32]);
        sample.words(at + 40, &[(HEADER + 48 * touched) | ((size - 48) << 32)]);
        for (index, &number) in free.iter().enumerate() {
            let next = free.get(index + 1).map_or(0, |&number| place(number));
            sample.words(place(number), &[next]);
        }
    }

    fn arena(size: u64) -> FakeProcess {
        let mut sample = FakeProcess::default();
        sample.anonymous(ARENA, 0x10000);
        pool(&mut sample, ARENA, size, 5, &[3, 1]);
        pool(&mut sample, ARENA + size, size, (size - HEADER) / 48, &[]);
        pool(&mut sample, ARENA + 2 * size, size, 1, &[0]);
        sample
    }

    fn found(sample: &FakeProcess, managed: &[Range<u64>]) -> (Heap, Pools) {
        let mut heap = sample::heap(&[(0x1000, 24)]);
        heap.regions = managed.to_vec();
        with_pools(&sample.made.image(), heap)
    }

    #[test]
    fn pools_of_both_sizes() {
        for size in POOLS {
            let (heap, pools) = found(&arena(size), &[]);
            let full = (size - HEADER) / 48;
            let expected = Pools {
                pools: 3,
                blocks: 3 + full,
                free_bytes: 3 * (size - HEADER) - 48 * (3 + full),
                inconsistent: 0,
            };
            assert_eq!(pools, expected);
            assert_eq!(heap.blocks().len() as u64, 4 + full);
            let first = [0, 2, 4].map(|number| (ARENA + HEADER + 48 * number, 48));
            let blocks = heap.blocks()[1..4]
                .iter()
                .map(|block| (block.address, block.size));
            assert!(blocks.eq(first), "{:?}", &heap.blocks()[..5]);
            assert_eq!(heap.regions.len(), 3);
        }
    }

    #[test]
    fn what_does_not_agree_is_no_pool() {
        let managed = ARENA..ARENA + 0x10000;
        let (_, none) = found(&arena(POOLS[0]), slice::from_ref(&managed));
        assert_eq!(none, Pools::default());
        let place = |number: u64| ARENA + HEADER + 48 * number;
        // A number too small, a free list with a loop, one that leaves the pool, and one within a block.
        for (address, word) in [
            (ARENA, 2),
            (place(1), place(3)),
            (place(1), u64::MAX),
            (place(1), place(2) + 8),
        ] {
            let mut sample = arena(POOLS[0]);
            pool(&mut sample, ARENA + 3 * POOLS[0], POOLS[0], 7, &[]);
            sample.words(address, &[word]);
            let (_, pools) = found(&sample, &[]);
            assert_eq!(
                (pools.pools, pools.inconsistent),
                (3, 1),
                "{address:x} {word:x}"
            );
        }
    }
}
