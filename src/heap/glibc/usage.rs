//! Use of the memory of a glibc heap: in use, free in one way or another, or the allocator's own.

use std::collections::{BTreeMap, HashMap};

use crate::heap::blocks::Sum;
use crate::heap::image::Image;

use super::{MMAPPED, State, Walk};

/// Chunks of an arena, or of all arenas, by their owner.
#[derive(Debug, Clone, Default)]
pub struct Usage {
    /// Bytes taken from the kernel, as far as they were walked, and how many of them are resident.
    pub total: Sum,
    /// Chunks by state. Mmapped chunks are among those in use.
    pub by_state: HashMap<State, Sum>,
}

impl Usage {
    /// Returns the sum of the chunks in a state.
    pub fn of(&self, state: State) -> Sum {
        self.by_state.get(&state).copied().unwrap_or_default()
    }

    /// Returns the sum of all free chunks.
    pub fn free(&self) -> Sum {
        let states = [State::Bin, State::Fastbin, State::Tcache, State::Top];
        states.iter().fold(Sum::default(), |sum, &state| {
            let one = self.of(state);
            Sum {
                count: sum.count + one.count,
                bytes: sum.bytes + one.bytes,
                resident: sum.resident + one.resident,
            }
        })
    }

    fn take(&mut self, state: State, bytes: u64, resident: u64) {
        self.by_state.entry(state).or_default().add(bytes, resident);
    }
}

/// Chunks of one size, or of sizes up to a power of two.
#[derive(Debug, Clone, Copy, Default)]
pub struct SizeClass {
    /// Chunks in use by the program.
    pub in_use: Sum,
    /// Free chunks, without tops.
    pub free: Sum,
}

/// Largest chunk size that has a class of its own.
const EACH_SIZE: u64 = 1024;

/// Use of a heap's memory.
#[derive(Debug, Default)]
pub struct HeapUsage {
    /// All arenas and mmapped chunks.
    pub all: Usage,
    /// Mmapped chunks, which are also in `all`.
    pub mmapped: Usage,
    /// Each arena, in the order of [`Walk::arenas`].
    pub arenas: Vec<Usage>,
    /// Size classes: each size up to 1024 bytes; beyond, the next power of two.
    pub sizes: BTreeMap<u64, SizeClass>,
}

impl HeapUsage {
    /// Adds up the chunks of a walk.
    pub fn of(image: &Image, walk: &Walk) -> Self {
        let mut usage = Self {
            arenas: vec![Usage::default(); walk.arenas.len()],
            ..Self::default()
        };
        for chunk in &walk.chunks {
            let resident = image.resident_bytes(chunk.address..chunk.end());
            usage.all.take(chunk.state, chunk.size, resident);
            let part = match usage.arenas.get_mut(chunk.arena as usize) {
                Some(arena) if chunk.arena != MMAPPED => arena,
                _ => &mut usage.mmapped,
            };
            part.take(chunk.state, chunk.size, resident);
            let class = if chunk.size > EACH_SIZE {
                chunk.size.checked_next_power_of_two().unwrap_or(u64::MAX)
            } else {
                chunk.size
            };
            let class = usage.sizes.entry(class).or_default();
            match chunk.state {
                State::InUse => class.in_use.add(chunk.size, resident),
                State::Bin | State::Fastbin | State::Tcache => class.free.add(chunk.size, resident),
                State::Internal | State::Top => {}
            }
        }
        for (arena, walked) in usage.arenas.iter_mut().zip(&walk.arenas) {
            for segment in &walked.segments {
                let (bytes, resident) = (
                    segment.end - segment.start,
                    image.resident_bytes(segment.clone()),
                );
                arena.total.add(bytes, resident);
                usage.all.total.add(bytes, resident);
            }
        }
        for range in &walk.mmapped {
            let (bytes, resident) = (range.end - range.start, image.resident_bytes(range.clone()));
            usage.mmapped.total.add(bytes, resident);
            usage.all.total.add(bytes, resident);
        }
        usage
    }

    /// Returns the bytes that the allocator itself takes: headers, the arenas' own structures, tcaches, and fences.
    pub fn overhead(&self, block_bytes: u64) -> u64 {
        let free = self.all.free().bytes;
        self.all.total.bytes.saturating_sub(free + block_bytes)
    }
}
