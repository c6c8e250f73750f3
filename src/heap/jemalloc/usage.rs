//! Where the memory of a jemalloc heap is: in use, in threads' caches, free in slabs, or kept for later.

use std::collections::BTreeMap;

use crate::heap::blocks::Sum;
use crate::heap::image::Image;

use super::map::{Extent, State};
use super::{Owner, Region};

/// What an arena, or all of them, has its memory for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// The address of the arena; 0 for all of them.
    pub address: u64,
    /// Blocks that the program has.
    pub in_use: Sum,
    /// Blocks that threads have set aside.
    pub cached: Sum,
    /// Blocks that are one of these two, of threads in the middle of filling or flushing their caches.
    pub in_doubt: Sum,
    /// Blocks of the allocator's own, in which the caches have their lists.
    pub own: Sum,
    /// Blocks of slabs that nobody has.
    pub slabs: Sum,
    /// Pages of slabs and large blocks: `stats.active`.
    pub active: Sum,
    /// Pages that nobody has, as they were (`dirty`), given back if the kernel wants them (`muzzy`), or of which only the
    /// addresses are kept (`retained`).
    pub dirty: Sum,
    /// See [`dirty`](Self::dirty).
    pub muzzy: Sum,
    /// See [`dirty`](Self::dirty).
    pub retained: Sum,
}

impl Usage {
    /// What is allocated by jemalloc's own account: what is in caches is, too (`stats.allocated`).
    pub fn allocated(&self) -> u64 {
        self.in_use.bytes + self.cached.bytes + self.in_doubt.bytes + self.own.bytes
    }

    /// All that is free and in memory.
    pub fn free_resident(&self) -> u64 {
        let free = [
            self.cached,
            self.slabs,
            self.dirty,
            self.muzzy,
            self.retained,
        ];
        free.iter().map(|sum| sum.resident).sum()
    }

    fn of_owner(&mut self, owner: Owner) -> &mut Sum {
        match owner {
            Owner::Program => &mut self.in_use,
            Owner::Cached => &mut self.cached,
            Owner::InDoubt => &mut self.in_doubt,
            Owner::Allocator => &mut self.own,
            Owner::Free => &mut self.slabs,
        }
    }

    fn of_state(&mut self, state: State) -> Option<&mut Sum> {
        match state {
            State::Active => Some(&mut self.active),
            State::Dirty => Some(&mut self.dirty),
            State::Muzzy => Some(&mut self.muzzy),
            State::Retained => Some(&mut self.retained),
            State::Changing => None,
        }
    }
}

/// Blocks of one size.
#[derive(Debug, Clone, Copy, Default)]
pub struct Class {
    /// Blocks that the program has.
    pub in_use: Sum,
    /// Blocks that nobody has, in slabs and caches.
    pub free: Sum,
}

/// What a heap's memory is used for.
#[derive(Debug, Default)]
pub struct HeapUsage {
    /// All arenas together.
    pub all: Usage,
    /// Each arena that has anything, by its number.
    pub arenas: BTreeMap<u32, Usage>,
    /// By the size of blocks.
    pub classes: BTreeMap<u64, Class>,
}

impl HeapUsage {
    /// Adds up extents and the blocks in them, both in order of address; arenas' addresses are by their numbers.
    pub(super) fn of(
        image: &Image,
        extents: &[&Extent],
        regions: &[Region],
        addresses: &BTreeMap<u32, u64>,
    ) -> Self {
        let mut usage = Self::default();
        let mut regions = regions.iter().peekable();
        for extent in extents {
            let range = extent.range();
            let bytes = range.end - range.start;
            let resident = image.present(range.clone());
            let arena = usage.arenas.entry(extent.arena).or_insert_with(|| Usage {
                address: addresses.get(&extent.arena).copied().unwrap_or(0),
                ..Usage::default()
            });
            for all in [&mut *arena, &mut usage.all] {
                if let Some(sum) = all.of_state(extent.state()) {
                    sum.add(bytes, resident);
                }
            }
            while let Some(region) = regions.next_if(|region| region.block.address < range.end) {
                let block = region.block;
                let resident = image.present(block.range());
                for all in [&mut *arena, &mut usage.all] {
                    all.of_owner(region.owner).add(block.size, resident);
                }
                let class = usage.classes.entry(block.size).or_default();
                match region.owner {
                    Owner::Program => class.in_use.add(block.size, resident),
                    Owner::Cached | Owner::Free => class.free.add(block.size, resident),
                    Owner::Allocator | Owner::InDoubt => {}
                }
            }
        }
        usage
    }
}
