//! Words that point at the start of a block: one pass over all copied memory.

use std::ops::Range;

use crate::heap::blocks::Heap;
use crate::heap::image::{Image, Thread};

/// Source of the words that point at a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Holder {
    /// No word in memory points at the block.
    #[default]
    Nobody,
    /// Words in this block point at the block, and no other words.
    Block(u32),
    /// Words in several places, or outside of blocks, point at the block.
    Several,
}

impl Holder {
    fn and(self, source: Option<u32>) -> Self {
        match (self, source) {
            (Self::Nobody, Some(block)) => Self::Block(block),
            (Self::Block(known), Some(block)) if known == block => self,
            _ => Self::Several,
        }
    }
}

/// Calls `found` with the place of each word that points at the start of a block, with that block, and with the block
/// that contains the place. Returns the holder of each block.
///
/// Words in allocators' own structures and in free chunks are omitted, and so are words of a block that point at the
/// same block.
pub(super) fn scan(
    image: &Image,
    heap: &Heap,
    mut found: impl FnMut(u64, u32, Option<u32>),
) -> Vec<Holder> {
    let mut holders = vec![Holder::default(); heap.blocks().len()];
    let mut look = |part: Range<u64>, source: Option<u32>| {
        for (place, word) in image.words(part) {
            let Some((target, 0)) = heap.block_at(word) else {
                continue;
            };
            if source != Some(target as u32) {
                holders[target] = holders[target].and(source);
                found(place, target as u32, source);
            }
        }
    };
    for (block, index) in heap.blocks().iter().zip(0..) {
        look(block.range(), Some(index));
    }
    let mut known: Vec<&Range<u64>> = heap.regions.iter().chain(&heap.structures).collect();
    known.sort_unstable_by_key(|range| range.start);
    let mut from = 0;
    for range in known {
        look(from..range.start.max(from), None);
        from = from.max(range.end);
    }
    look(from..u64::MAX, None);
    for (_, word) in image.threads.iter().flat_map(Thread::words) {
        if let Some((target, 0)) = heap.block_at(word) {
            holders[target] = Holder::Several;
        }
    }
    holders
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::names::memory::sample::{self, FakeProcess};

    #[test]
    fn who_points_at_a_block() {
        let mut sample = FakeProcess::default();
        let at = |number: u64| 0x10_0000 + number * 0x40;
        sample.anonymous(at(0), 0x1000);
        sample.anonymous(0x7000_0000, 0x1000);
        // 0 points at 1, twice, and at 2; 3 as well at 2; 4 at itself; a free chunk at 4; a stack at 5;
        // 1 into 3; a register at 6.
        sample.words(at(0), &[at(1), at(2), at(1)]);
        sample.words(at(1), &[at(3) + 8]);
        sample.words(at(3), &[7, at(2)]);
        sample.words(at(4), &[at(4)]);
        sample.words(at(0) + 0x30, &[at(4)]);
        sample.words(0x7000_0010, &[at(5)]);
        sample.made.threads = vec![Thread::new(1, Vec::new(), vec![at(6)], Vec::new())];

        let blocks: Vec<_> = (0..7).map(|number| (at(number), 0x30)).collect();
        let mut heap = sample::heap(&blocks);
        heap.regions.push(at(0)..at(0) + 0x1000);
        let mut found = Vec::new();
        let holders = scan(&sample.made.image(), &heap, |place, target, source| {
            found.push((place, target, source));
        });
        assert_eq!(
            holders,
            [
                Holder::Nobody,
                Holder::Block(0),
                Holder::Several,
                Holder::Nobody,
                Holder::Nobody,
                Holder::Several,
                Holder::Several
            ]
        );
        assert_eq!(
            found,
            [
                (at(0), 1, Some(0)),
                (at(0) + 8, 2, Some(0)),
                (at(0) + 16, 1, Some(0)),
                (at(3) + 8, 2, Some(3)),
                (0x7000_0010, 5, None)
            ]
        );
    }
}
