//! Walk of the heap of glibc's malloc (2.26 to 2.43), by its structures alone.
//!
//! Neither symbols nor a table of versions is needed. `main_arena` is recognised by 127 list heads in a row in a
//! library's data (`locate`). The size of every chunk gives the address of the next one (`segments`). Chunks with
//! mappings of their own begin a page (`mmapped`). The header of the next chunk tells whether a chunk is free, except
//! for chunks in the caches of threads (`cached`). The walk is complete if the segments of each arena add up to the
//! arena's own `system_mem`, mmapped chunks to `n_mmaps` and `mmapped_mem`, and if every thread's tcache has been
//! recognised. Otherwise, either a thread was in the middle of malloc, which another image shows to have passed, or
//! the heap is damaged.
//!
//! The walked memory belongs to another user. Each step is bounded by the image, all steps together are bounded by
//! `Fuel`, and no value in the memory is trusted.

mod cached;
mod locate;
mod mmapped;
mod segments;
pub mod trim;
pub mod usage;

#[cfg(test)]
mod tests;

use std::ops::Range;

pub use locate::broken_ring;

use crate::heap::blocks::{self, Allocator, Block, Coverage, Heap};
use crate::heap::image::Image;
use crate::heap::page_index::{PAGE, PageIndex};
use crate::heap::page_runs;
use crate::heap::untrusted::{Fuel, word};

/// Chunk: a header of 16 bytes, the first 8 of which may hold the last bytes of the block before it, and the memory
/// that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// Address of the header.
    pub address: u64,
    /// Size in bytes, with the header.
    pub size: u64,
    /// Owner of the chunk.
    pub state: State,
    /// Index of the arena in [`Walk::arenas`]; [`MMAPPED`] for a chunk with a mapping of its own.
    pub arena: u32,
}

/// Arena of chunks that belong to no arena.
pub const MMAPPED: u32 = u32::MAX;

/// Owner of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// The program.
    InUse,
    /// The allocator, for a thread's table of free chunks (tcache).
    Internal,
    /// None: the chunk is free, in one of the bins.
    Bin,
    /// None: the chunk is free, in a fastbin, and not merged with its neighbours yet.
    Fastbin,
    /// None: the chunk is free, in the tcache of a thread.
    Tcache,
    /// None: the chunk is the end of the arena, of which new chunks are cut.
    Top,
}

impl Chunk {
    /// Returns the address that the program has been given, or would be given.
    pub fn user(&self) -> u64 {
        self.address.saturating_add(16)
    }

    /// Returns the address after the chunk.
    pub fn end(&self) -> u64 {
        self.address.saturating_add(self.size)
    }
}

/// Arena: a heap that threads share.
#[derive(Debug, Clone, Default)]
pub struct Arena {
    /// Address of the arena's `malloc_state`.
    pub address: u64,
    /// Whether this is the main arena, which grows by brk(2).
    pub main: bool,
    /// Address of the top chunk; the initial value if nothing has been allocated.
    pub top: u64,
    /// Bytes that the arena has taken from the kernel, by its own count.
    pub system: u64,
    /// Ranges of memory that were walked.
    pub segments: Vec<Range<u64>>,
    /// Ranges within the segments that other code has taken by sbrk(2), as tcmalloc does beside malloc.
    pub gaps: Vec<Range<u64>>,
    /// Inconsistency with its address, if there is one.
    pub broken: Option<(String, u64)>,
}

impl Arena {
    /// Returns the bytes of the segments that were walked.
    pub fn walked_bytes(&self) -> u64 {
        let sizes = self.segments.iter().map(|range| range.end - range.start);
        sizes.fold(0, u64::wrapping_add)
    }
}

/// A C library whose malloc has been used.
#[derive(Debug, Clone)]
pub struct Library {
    /// Path of the file that holds the library's data.
    pub file: Vec<u8>,
    /// The address of `main_arena`.
    main: u64,
    /// Offset of the bins in an arena.
    bins: u64,
    /// Counts of `mp_`, if it was found.
    counts: Option<Counts>,
}

/// Counts that `mp_` keeps of mmapped chunks and of tcaches.
#[derive(Debug, Clone, Copy)]
struct Counts {
    mmaps: u64,
    mmapped: u64,
    tcache_count: u64,
}

impl Library {
    /// Whether this is 2.43 or later, which has no fastbins, and mmapped chunks whose size omits their header.
    fn is_2_43(&self) -> bool {
        self.bins == locate::BINS_2_43
    }

    fn top_field(&self, arena: u64) -> u64 {
        arena.saturating_add(self.bins - 16)
    }

    fn next_field(&self, arena: u64) -> u64 {
        arena.saturating_add(self.bins + locate::BINS_BYTES + 16)
    }
}

/// Result of the walk of a process's glibc heap.
#[derive(Debug, Default)]
pub struct Walk {
    /// C libraries. There is more than one if a second was loaded by dlmopen(3), or linked statically.
    pub libraries: Vec<Library>,
    /// Arenas of all libraries. The main arena of each library comes first.
    pub arenas: Vec<Arena>,
    /// Chunks, in order of address.
    pub chunks: Vec<Chunk>,
    /// Whole mappings of mmapped chunks.
    pub mmapped: Vec<Range<u64>>,
    /// Addresses of the tcaches that were recognised.
    tcaches: Vec<u64>,
    /// Number of libraries that have taken memory.
    libraries_in_use: usize,
    /// Inconsistencies outside of arenas that make the walk incomplete, with their addresses.
    broken: Vec<(String, Option<u64>)>,
    /// Index in `chunks` of the first chunk that begins in each page.
    index: PageIndex,
}

/// Reads half a word.
fn half(image: &Image, address: u64) -> u32 {
    (word(image, address & !7) >> (8 * (address & 4))) as u32
}

/// Walks the glibc heap of a process. Returns None if no C library of the process has allocated anything.
pub fn walk(image: &Image) -> Option<Walk> {
    let libraries = locate::libraries(image);
    if libraries.is_empty() {
        return None;
    }
    let mut walk = Walk {
        libraries,
        ..Walk::default()
    };
    let mut fuel = Fuel::of(image);
    let memory = segments::private_memory(image);
    let used = walk.find_arenas(image);
    segments::walk_arenas(image, &memory, &mut walk, &used, &mut fuel);
    mmapped::find(image, &memory, &mut walk);
    walk.chunks.sort_unstable_by_key(|chunk| chunk.address);
    let overlap = walk
        .chunks
        .windows(2)
        .find(|two| two[0].end() > two[1].address);
    if let Some(two) = overlap {
        walk.broken
            .push(("two chunks overlap".into(), Some(two[1].address)));
    }
    walk.chunks
        .dedup_by(|next, chunk| chunk.end() > next.address);
    for (number, chunk) in (0..).zip(&walk.chunks) {
        walk.index.insert(chunk.address, number);
    }
    cached::mark(image, &mut walk, &used);
    if fuel.0 == 0 {
        walk.broken
            .push(("the heap goes round in circles".into(), None));
    }
    walk.check_counts(&used);
    Some(walk)
}

impl Walk {
    /// Finds the arenas of each library. Returns the index of the library for each arena.
    fn find_arenas(&mut self, image: &Image) -> Vec<usize> {
        let mut library_of_arena = Vec::new();
        for (place, library) in self.libraries.iter().enumerate() {
            let mut address = library.main;
            for _ in 0..locate::MAX_ARENAS {
                let next = library.next_field(address);
                self.arenas.push(Arena {
                    address,
                    main: address == library.main,
                    top: word(image, library.top_field(address)),
                    system: word(image, next.saturating_add(24)),
                    ..Arena::default()
                });
                library_of_arena.push(place);
                address = word(image, next);
                if address == library.main || address == 0 {
                    break;
                }
            }
        }
        library_of_arena
    }

    /// Returns the index of the chunk that begins at an address.
    fn chunk_at(&self, address: u64) -> Option<usize> {
        let first = self.index.get(address)? as usize;
        let page = address | (PAGE - 1);
        // A page has at most 128 chunks that are 32 bytes or more.
        let within = self.chunks[first..].iter().take(PAGE as usize / 32 + 1);
        let count = within.take_while(|chunk| chunk.address <= page).count();
        let found =
            self.chunks[first..first + count].binary_search_by_key(&address, |chunk| chunk.address);
        found.ok().map(|at| first + at)
    }

    /// Returns what all libraries have counted; None if that was not found.
    fn counts(&self) -> Option<Counts> {
        let counts = self.libraries.iter().filter_map(|library| library.counts);
        counts.reduce(|sum, counts| Counts {
            mmaps: sum.mmaps + counts.mmaps,
            mmapped: sum.mmapped.saturating_add(counts.mmapped),
            ..sum
        })
    }

    /// Compares what was found with what the libraries have counted.
    fn check_counts(&mut self, used: &[usize]) {
        let in_use = |place: usize| {
            let arenas = self.arenas.iter().zip(used);
            arenas
                .filter(|(_, of)| **of == place)
                .any(|(arena, _)| arena.system > 0)
        };
        let places = 0..self.libraries.len();
        self.libraries_in_use = places.filter(|&place| in_use(place)).count();
        if self.libraries_in_use > 1 {
            return;
        }
        let Some(expected) = self.counts() else {
            let why =
                "malloc's own count of mappings was not found (M_MMAP_MAX may have been changed)";
            self.broken.push((why.into(), None));
            return;
        };
        let found = self.mmapped.len() as u64;
        let bytes = page_runs::bytes(&self.mmapped);
        // 2.43 adds 16 bytes at each mremap, and never takes them off again.
        let surplus = expected.mmapped.wrapping_sub(bytes);
        let drifts = self.libraries.iter().any(Library::is_2_43) && surplus < 1 << 20;
        if expected.mmaps != found || (surplus != 0 && !drifts) {
            let why = format!(
                "{found} mmapped chunks of {bytes} bytes were found, and malloc has counted {} of {}",
                expected.mmaps, expected.mmapped
            );
            self.broken.push((why, None));
        }
    }

    /// Returns the bytes of a chunk that the program may use.
    pub fn usable(&self, chunk: &Chunk) -> u64 {
        // An mmapped chunk has no neighbour whose header it may use.
        let header = if chunk.arena == MMAPPED && !self.libraries.iter().any(Library::is_2_43) {
            16
        } else {
            8
        };
        chunk.size.saturating_sub(header)
    }

    /// Returns whether all chunks were found.
    pub fn coverage(&self) -> Coverage {
        if self.libraries_in_use > 1 {
            let why = "two C libraries have heaps (dlmopen, or one linked statically), and their mappings cannot be distinguished";
            return Coverage::Unknown { why: why.into() };
        }
        for arena in &self.arenas {
            if let Some((why, address)) = &arena.broken {
                return Coverage::Incomplete {
                    why: why.clone(),
                    address: Some(*address),
                };
            }
            // An sbrk() by other code before the first one can leave an odd start: ld.so 2.31 copies GLIBC_TUNABLES
            // there.
            let missing = arena.system.wrapping_sub(arena.walked_bytes());
            if missing >= 16 {
                return Coverage::Incomplete {
                    why: format!(
                        "the arena at {:#x} has {} bytes, and {} were found",
                        arena.address,
                        arena.system,
                        arena.walked_bytes()
                    ),
                    address: None,
                };
            }
        }
        match self.broken.first() {
            Some((why, address)) => Coverage::Incomplete {
                why: why.clone(),
                address: *address,
            },
            None => Coverage::Complete,
        }
    }

    /// Returns the heap in the terms that all allocators have in common.
    pub fn heap(&self) -> Heap {
        let in_use = self
            .chunks
            .iter()
            .filter(|chunk| chunk.state == State::InUse);
        let blocks = in_use.map(|chunk| Block {
            address: chunk.user(),
            size: self.usable(chunk),
        });
        let mut heap = Heap::new(blocks.collect(), self.coverage());
        heap.allocators = self.libraries.iter().map(Library::allocator).collect();
        let segments = self.arenas.iter().flat_map(|arena| &arena.segments);
        heap.regions = segments.chain(&self.mmapped).cloned().collect();
        heap.regions.sort_unstable_by_key(|range| range.start);
        // The memory of gaps belongs to other code, and may hold blocks.
        let gaps = self.arenas.iter().flat_map(|arena| arena.gaps.clone());
        heap.regions = blocks::without(&heap.regions, &gaps.collect::<Vec<_>>());
        heap.structures = self
            .libraries
            .iter()
            .map(|library| library.main..library.next_field(library.main) + 48)
            .collect();
        let free = [State::Bin, State::Fastbin, State::Tcache, State::Top];
        let free = self
            .chunks
            .iter()
            .filter(|chunk| free.contains(&chunk.state));
        heap.free = free.map(|chunk| chunk.address..chunk.end()).collect();
        heap
    }
}

impl Library {
    fn allocator(&self) -> Allocator {
        let versions = match self.bins {
            locate::BINS_2_43 => "2.43 or later",
            locate::BINS_2_26 => "2.26",
            _ => "2.27 to 2.42",
        };
        Allocator {
            name: format!("glibc malloc ({versions})"),
            file: self.file.clone(),
        }
    }
}
