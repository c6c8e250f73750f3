//! Where the memory of a glibc heap is: in use, free in one way or another, or the allocator's own.

use std::collections::{BTreeMap, HashMap};

use crate::heap::blocks::Sum;
use crate::heap::image::Image;

use super::{MMAPPED, State, Walk};

/// The chunks of an arena, or of all, by who has them.
#[derive(Debug, Clone, Default)]
pub struct Usage {
    /// Bytes taken from the kernel, by what was walked, and how much of it is in memory.
    pub total: Sum,
    /// Chunks by state; those that are mmapped among those in use.
    pub by_state: HashMap<State, Sum>,
}

impl Usage {
    /// The chunks in a state.
    pub fn of(&self, state: State) -> Sum {
        self.by_state.get(&state).copied().unwrap_or_default()
    }

    /// All chunks that nobody has.
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
    /// Chunks that the program has.
    pub in_use: Sum,
    /// Chunks that nobody has; tops apart.
    pub free: Sum,
}

/// The largest chunk size that is told from others.
const EACH_SIZE: u64 = 1024;

/// What a heap's memory is used for.
#[derive(Debug, Default)]
pub struct HeapUsage {
    /// All arenas and mmapped chunks.
    pub all: Usage,
    /// Mmapped chunks, which are also in `all`.
    pub mmapped: Usage,
    /// Each arena, in the order of [`Walk::arenas`].
    pub arenas: Vec<Usage>,
    /// By size, up to 1024 bytes; beyond, by the next power of two.
    pub sizes: BTreeMap<u64, SizeClass>,
}

impl HeapUsage {
    /// Adds up a walk.
    pub fn of(image: &Image, walk: &Walk) -> Self {
        let mut usage = Self {
            arenas: vec![Usage::default(); walk.arenas.len()],
            ..Self::default()
        };
        for chunk in &walk.chunks {
            let resident = image.present(chunk.address..chunk.end());
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
                let (bytes, resident) =
                    (segment.end - segment.start, image.present(segment.clone()));
                arena.total.add(bytes, resident);
                usage.all.total.add(bytes, resident);
            }
        }
        for range in &walk.mmapped {
            let (bytes, resident) = (range.end - range.start, image.present(range.clone()));
            usage.mmapped.total.add(bytes, resident);
            usage.all.total.add(bytes, resident);
        }
        usage
    }

    /// What the allocator itself takes: headers, the arenas' own structures, lists of threads, and fences.
    pub fn overhead(&self, block_bytes: u64) -> u64 {
        let free = self.all.free().bytes;
        self.all.total.bytes.saturating_sub(free + block_bytes)
    }
}
