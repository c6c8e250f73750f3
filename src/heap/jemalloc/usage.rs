//! Use of the memory of jemalloc heaps: in use, in threads' caches, free in slabs, or kept for later.

use std::collections::BTreeMap;

use crate::heap::blocks::Sum;
use crate::heap::image::Image;

use super::map::State;
use super::{Owner, Part};

/// Use of the memory of an arena, or of all arenas.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// Address of the arena; 0 for all arenas.
    pub address: u64,
    /// Blocks in use by the program.
    pub in_use: Sum,
    /// Free blocks in the caches of threads.
    pub cached: Sum,
    /// Blocks in use or in caches, of threads in the middle of filling or flushing their caches.
    pub in_doubt: Sum,
    /// Blocks of the allocator's own, which hold the lists of the caches.
    pub own: Sum,
    /// Free blocks of slabs.
    pub slabs: Sum,
    /// Pages of slabs and large blocks: `stats.active`.
    pub active: Sum,
    /// Free pages that are as they were (`dirty`), that the kernel may take back (`muzzy`), or of which only the
    /// addresses are kept (`retained`).
    pub dirty: Sum,
    /// See [`dirty`](Self::dirty).
    pub muzzy: Sum,
    /// See [`dirty`](Self::dirty).
    pub retained: Sum,
}

impl Usage {
    /// Returns the allocated bytes by jemalloc's own count, which includes blocks in caches (`stats.allocated`).
    pub fn allocated(&self) -> u64 {
        self.in_use.bytes + self.cached.bytes + self.in_doubt.bytes + self.own.bytes
    }

    /// Returns the bytes that are free and resident.
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
    /// Blocks in use by the program.
    pub in_use: Sum,
    /// Free blocks, in slabs and caches.
    pub free: Sum,
}

/// Use of the memory of all jemalloc heaps of a process.
#[derive(Debug, Default)]
pub struct HeapUsage {
    /// All arenas together.
    pub all: Usage,
    /// Each arena that has extents, by the index of its heap and its number there.
    pub arenas: BTreeMap<(usize, u32), Usage>,
    /// Size classes, by the size of their blocks.
    pub classes: BTreeMap<u64, Class>,
}

impl HeapUsage {
    /// Adds the extents of the heap with this index, and the blocks in them.
    pub(super) fn add(&mut self, image: &Image, heap: usize, part: &Part) {
        let mut in_order: Vec<_> = part.extents.values().collect();
        in_order.sort_unstable_by_key(|extent| extent.first);
        let mut regions = part.regions.0.iter().peekable();
        for extent in in_order {
            let range = extent.range();
            let bytes = range.end - range.start;
            let resident = image.resident_bytes(range.clone());
            let arena = self.arenas.entry((heap, extent.arena));
            let arena = arena.or_insert_with(|| Usage {
                address: part.arenas.get(&extent.arena).copied().unwrap_or(0),
                ..Usage::default()
            });
            for all in [&mut *arena, &mut self.all] {
                if let Some(sum) = all.of_state(extent.state()) {
                    sum.add(bytes, resident);
                }
            }
            while let Some(region) = regions.next_if(|region| region.block.address < range.end) {
                let block = region.block;
                let resident = image.resident_bytes(block.range());
                for all in [&mut *arena, &mut self.all] {
                    all.of_owner(region.owner).add(block.size, resident);
                }
                let class = self.classes.entry(block.size).or_default();
                match region.owner {
                    Owner::Program => class.in_use.add(block.size, resident),
                    Owner::Cached | Owner::Free => class.free.add(block.size, resident),
                    Owner::Allocator | Owner::InDoubt => {}
                }
            }
        }
    }
}
