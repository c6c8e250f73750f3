//! Blocks whose allocation was traced: their stack, time and requested bytes.
//!
//! The blocks themselves are found in the copy of the process alone. Traced allocations are added to them by address.
//! So an allocation that was not traced can only leave a block without its stack. It cannot make a block lost.

use std::collections::BTreeSet;

use memtools::heap::blocks::{Block, Heap};

use crate::sums::{Allocation, StackKey};

/// Stack that has allocated blocks, and the times of the allocations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AllocSite {
    pub(super) key: StackKey,
    /// CLOCK_MONOTONIC of the first and of the last allocation.
    pub(super) first_ns: u64,
    pub(super) last_ns: u64,
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
pub(super) struct TracedBlocks {
    pid: u32,
    /// Traced blocks, sorted by number.
    blocks: Vec<TracedBlock>,
}

/// Block whose allocation was traced.
#[derive(Debug, Clone, Copy)]
struct TracedBlock {
    /// Index of the block in the heap's blocks.
    number: usize,
    /// Bytes that were asked for.
    bytes: u64,
    stack: u64,
    time_ns: u64,
}

impl TracedBlocks {
    /// Finds the blocks that these allocations made. An allocation after the copy, at `copied_ns` of CLOCK_MONOTONIC,
    /// may have the address of a block that was freed meanwhile, and is left out. So is an allocation that is larger
    /// than the block at its address: it made another block.
    pub(super) fn of(
        heap: &Heap,
        pid: u32,
        copied_ns: u64,
        allocations: impl IntoIterator<Item = Allocation>,
    ) -> Self {
        let made = |by: Allocation| {
            let found = heap.block_at(by.address);
            let (number, _) = found.filter(|&(_, offset)| offset == 0 && by.pid == pid)?;
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
        Self { pid, blocks }
    }

    /// Returns the number of traced blocks.
    pub(super) fn count(&self) -> u64 {
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
            key: StackKey {
                pid: self.pid,
                stack: made.stack,
            },
            first_ns: made.time_ns,
            last_ns: made.time_ns,
        })
    }

    /// Returns the stacks that have allocated the traced blocks, each once.
    pub(super) fn keys(&self) -> BTreeSet<StackKey> {
        let pid = self.pid;
        let stacks = self.blocks.iter().map(|made| made.stack);
        stacks.map(|stack| StackKey { pid, stack }).collect()
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
    use memtools::heap::blocks::Coverage;

    use super::*;

    #[test]
    fn only_what_made_a_block_of_the_copy_counts() {
        let block = |address, size| Block { address, size };
        let blocks = vec![block(0x1000, 24), block(0x2000, 40), block(0x3000, 24)];
        let heap = Heap::new(blocks, Coverage::Complete);
        let made = |address, size, time_ns| Allocation {
            pid: 7,
            address,
            size,
            stack: 0x51,
            time_ns,
            calls: 1,
            level: 0,
        };
        let other = Allocation {
            pid: 8,
            ..made(0x3000, 20, 5)
        };
        let seen = TracedBlocks::of(
            &heap,
            7,
            100,
            [
                made(0x1000, 20, 5),
                // Inside of a block, younger than the copy, and larger than the block.
                made(0x1008, 8, 5),
                made(0x2000, 40, 101),
                made(0x3000, 25, 5),
                other,
            ],
        );
        assert_eq!(seen.count(), 1);
        assert_eq!(seen.bytes(0, &heap.blocks()[0]), 20);
        assert_eq!(seen.bytes(1, &heap.blocks()[1]), 40);
        assert_eq!(seen.born(0).map(|born| born.key.stack), Some(0x51));
        assert_eq!(seen.born(2), None);
    }
}
