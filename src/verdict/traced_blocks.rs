//! Blocks whose allocation was traced: their stack, time and requested bytes.
//!
//! The blocks themselves are found in the copy of the process alone. Traced allocations are added to them by address.
//! So an allocation that was not traced can only leave a block without its stack. It cannot make a block lost.

use std::collections::BTreeSet;

use crate::heap::blocks::{Block, Heap};

/// Traced allocation that was not freed.
#[derive(Debug, Clone, Copy)]
pub struct TracedAllocation {
    /// Address of the block.
    pub address: u64,
    /// Requested bytes.
    pub size: u64,
    /// Id of the stack that has allocated the block.
    pub stack: u64,
    /// CLOCK_MONOTONIC of the allocation.
    pub time_ns: u64,
}

/// Stack that has allocated blocks, and the times of the allocations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AllocSite {
    /// Id of the stack.
    pub stack: u64,
    /// CLOCK_MONOTONIC of the first allocation.
    pub first_ns: u64,
    /// CLOCK_MONOTONIC of the last allocation.
    pub last_ns: u64,
}

impl AllocSite {
    /// Adds other allocations of the same stack.
    pub(super) fn join(&mut self, other: Self) {
        self.first_ns = self.first_ns.min(other.first_ns);
        self.last_ns = self.last_ns.max(other.last_ns);
    }
}

/// Traced blocks of a heap.
#[derive(Debug, Default)]
pub struct TracedBlocks {
    /// Traced blocks, sorted by number.
    blocks: Vec<TracedBlock>,
}

/// Block whose allocation was traced.
#[derive(Debug, Clone, Copy)]
struct TracedBlock {
    /// Index of the block in the heap's blocks.
    number: usize,
    /// Bytes that were requested.
    bytes: u64,
    stack: u64,
    time_ns: u64,
}

impl TracedBlocks {
    /// Finds the blocks that these allocations made. An allocation after the copy, at `copied_ns` of CLOCK_MONOTONIC,
    /// may have the address of a block that was freed meanwhile, and is omitted. So is an allocation that is larger
    /// than the block at its address: it made another block.
    pub fn of(
        heap: &Heap,
        copied_ns: u64,
        allocations: impl IntoIterator<Item = TracedAllocation>,
    ) -> Self {
        let made = |by: TracedAllocation| {
            let found = heap.block_at(by.address);
            let (number, _) = found.filter(|&(_, offset)| offset == 0)?;
            let is_it = by.time_ns <= copied_ns && by.size <= heap.blocks()[number].size;
            is_it.then_some(TracedBlock {
                number,
                bytes: by.size,
                stack: by.stack,
                time_ns: by.time_ns,
            })
        };
        let mut blocks: Vec<TracedBlock> = allocations.into_iter().filter_map(made).collect();
        blocks.sort_unstable_by_key(|made| made.number);
        blocks.dedup_by_key(|made| made.number);
        Self { blocks }
    }

    /// Returns the number of traced blocks.
    pub fn count(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Returns the bytes of a block: the requested bytes if the block was traced, else those that the program may use.
    pub(super) fn bytes(&self, number: usize, block: &Block) -> u64 {
        self.made(number).map_or(block.size, |made| made.bytes)
    }

    /// Returns the sum of these blocks' bytes.
    pub(super) fn sum(&self, heap: &Heap, blocks: &[usize]) -> u64 {
        let bytes = |&block: &usize| self.bytes(block, &heap.blocks()[block]);
        blocks.iter().map(bytes).sum()
    }

    /// Returns the stack and the time of a block's allocation, if it was traced.
    pub(super) fn born(&self, number: usize) -> Option<AllocSite> {
        let made = self.made(number)?;
        Some(AllocSite {
            stack: made.stack,
            first_ns: made.time_ns,
            last_ns: made.time_ns,
        })
    }

    /// Returns the stacks that have allocated the traced blocks, each once.
    pub(super) fn stacks(&self) -> BTreeSet<u64> {
        self.blocks.iter().map(|made| made.stack).collect()
    }

    fn made(&self, number: usize) -> Option<&TracedBlock> {
        let at = self
            .blocks
            .binary_search_by_key(&number, |made| made.number);
        at.ok().map(|at| &self.blocks[at])
    }
}

#[cfg(test)]
mod tests {
    use crate::heap::blocks::Coverage;

    use super::*;

    #[test]
    fn only_what_made_a_block_of_the_copy_counts() {
        let block = |address, size| Block { address, size };
        let blocks = vec![block(0x1000, 24), block(0x2000, 40), block(0x3000, 24)];
        let heap = Heap::new(blocks, Coverage::Complete);
        let made = |address, size, time_ns| TracedAllocation {
            address,
            size,
            stack: 0x51,
            time_ns,
        };
        let seen = TracedBlocks::of(
            &heap,
            100,
            [
                made(0x1000, 20, 5),
                // Inside of a block, younger than the copy, and larger than the block.
                made(0x1008, 8, 5),
                made(0x2000, 40, 101),
                made(0x3000, 25, 5),
            ],
        );
        assert_eq!(seen.count(), 1);
        assert_eq!(seen.bytes(0, &heap.blocks()[0]), 20);
        assert_eq!(seen.bytes(1, &heap.blocks()[1]), 40);
        assert_eq!(seen.born(0).map(|born| born.stack), Some(0x51));
        assert_eq!(seen.born(2), None);
    }
}
