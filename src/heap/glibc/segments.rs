//! Walk of the chunks of arenas. Each chunk's size gives the address of the next one.

use std::collections::HashSet;
use std::ops::Range;

use crate::heap::image::Image;
use crate::heap::page_index::PAGE;
use crate::heap::page_runs;

use super::{Arena, Chunk, Fuel, Library, State, Walk, word};

/// Flags in a size field: the chunk before is in use, the chunk is mmapped, the chunk is not of the main arena. Mmapped
/// chunks have no other flag.
const PREVIOUS_IN_USE: u64 = 1;
pub(super) const IS_MMAPPED: u64 = 2;
const FLAGS: u64 = 7;

/// Alignment of the heaps of thread arenas. With huge pages, before 2.42, they are aligned to less.
const HEAP_ALIGNMENT: u64 = 64 << 20;
/// Size of the smallest chunk, in bytes.
const SMALLEST: u64 = 0x20;
/// Largest number of heaps of one arena.
const MAX_HEAPS: usize = 100_000;
/// Largest number of gaps that other code has made in the main arena by brk(2).
const MAX_GAPS: usize = 1000;

/// Message about a chunk with an invalid header.
const NO_HEADER: &str = "a chunk's header is inconsistent";

/// End of the walk of a row of adjacent chunks.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The walk has reached the top chunk.
    Top,
    /// The walk has reached the fencepost that malloc leaves before memory that is not its own. Holds the address
    /// after the fencepost.
    Fencepost(u64),
    /// The walk has reached an invalid header, at this address.
    Broken(u64),
}

/// Returns the private memory without a file. Adjacent areas are joined, because madvise(2) and mprotect(2) split
/// mappings.
pub(super) fn private_memory(image: &Image) -> Vec<Range<u64>> {
    let mut joined: Vec<Range<u64>> = Vec::new();
    let areas = image.areas.iter();
    for area in areas.filter(|area| area.readable && area.writable && area.is_private_anonymous()) {
        page_runs::add(&mut joined, area.mapping.range.clone());
    }
    joined
}

/// Returns the range that contains an address.
fn within(ranges: &[Range<u64>], address: u64) -> Option<&Range<u64>> {
    let at = ranges.partition_point(|range| range.end <= address);
    ranges.get(at).filter(|range| range.start <= address)
}

/// Walks all arenas. Notes an inconsistency in the arena that has it.
pub(super) fn walk_arenas(
    image: &Image,
    memory: &[Range<u64>],
    walk: &mut Walk,
    used: &[usize],
    fuel: &mut Fuel,
) {
    let mut arenas = std::mem::take(&mut walk.arenas);
    let most = image.copied_bytes() / SMALLEST;
    for (number, arena) in arenas.iter_mut().enumerate() {
        let library = &walk.libraries[used[number]];
        // The initial top is in the arena itself: nothing has been allocated.
        if arena.top == library.top_field(arena.address) {
            continue;
        }
        let mut walker = Walker {
            image,
            fuel,
            number: number as u32,
            main: arena.main,
            top: arena.top,
            room: most.saturating_sub(walk.chunks.len() as u64),
        };
        let chunks = if arena.main {
            walker.main_arena(arena, memory)
        } else {
            walker.thread_arena(arena, library)
        };
        walk.chunks.extend(chunks);
    }
    walk.arenas = arenas;
}

/// Walker of the chunks of one arena.
struct Walker<'a> {
    image: &'a Image,
    fuel: &'a mut Fuel,
    number: u32,
    main: bool,
    top: u64,
    /// Largest number of chunks that may still be found. The heaps of a damaged arena can overlap.
    room: u64,
}

impl Walker<'_> {
    fn size_field(&self, chunk: u64) -> u64 {
        word(self.image, chunk.wrapping_add(8))
    }

    /// Adds the chunks from an address on, up to `limit`.
    fn row(&mut self, mut at: u64, limit: u64, chunks: &mut Vec<Chunk>) -> End {
        loop {
            let ends = at.checked_add(16).is_none_or(|header| header > limit);
            if ends || !self.fuel.burn(1) || chunks.len() as u64 > self.room {
                return End::Broken(at);
            }
            let field = self.size_field(at);
            let size = field & !FLAGS;
            if at == self.top {
                self.add(chunks, at, size, State::Top);
                return End::Top;
            }
            if field & IS_MMAPPED != 0 {
                return End::Broken(at);
            }
            if let Some(end) = self.fencepost(at, size) {
                return end;
            }
            let fits = size >= SMALLEST && size.is_multiple_of(16) && size <= limit - at - 16;
            if !fits {
                return End::Broken(at);
            }
            let next = self.size_field(at + size);
            // A heap whose top has moved to the next heap ends with a fence of 32 bytes, or of 48 bytes as one chunk.
            if !self.main && size == 0x20 && next & !FLAGS == 0 && at + size + 16 == limit {
                return End::Fencepost(limit);
            }
            let state = if next & PREVIOUS_IN_USE != 0 {
                State::InUse
            } else {
                State::Bin
            };
            self.add(chunks, at, size, state);
            at += size;
        }
    }

    fn add(&self, chunks: &mut Vec<Chunk>, address: u64, size: u64, state: State) {
        chunks.push(Chunk {
            address,
            size,
            state,
            arena: self.number,
        });
    }

    /// Returns the end that a size of 0 or 16 marks; None for other sizes.
    fn fencepost(&self, at: u64, size: u64) -> Option<End> {
        let next = self.size_field(at + 16) & !FLAGS;
        match (size, self.main) {
            (0, false) => Some(End::Fencepost(at + 16)),
            (0x10, true) if next == 0x10 => Some(End::Fencepost(at + 32)),
            (0x10, false) if next == 0 => Some(End::Fencepost(at + 32)),
            (0 | 0x10, _) => Some(End::Broken(at)),
            _ => None,
        }
    }

    /// Walks a thread's arena: its heaps, from the one that holds the top chunk back to the first.
    fn thread_arena(&mut self, arena: &mut Arena, library: &Library) -> Vec<Chunk> {
        let header = arena.address & 0xfff;
        let first = arena.address - header;
        let mut alignment = HEAP_ALIGNMENT;
        let fits = |alignment: u64| {
            word(self.image, arena.top & !(alignment - 1)) == arena.address
                && first.is_multiple_of(alignment)
        };
        while alignment > 1 << 20 && !fits(alignment) {
            alignment /= 2;
        }
        let mut heap = arena.top & !(alignment - 1);
        let (mut chunks, mut seen) = (Vec::new(), HashSet::new());
        loop {
            let is_heap = word(self.image, heap) == arena.address;
            if !is_heap || seen.len() >= MAX_HEAPS || !seen.insert(heap) {
                arena.broken = Some(("a heap's header is not that of its arena".into(), heap));
                break;
            }
            let (previous, size) = (
                word(self.image, heap + 8),
                word(self.image, heap + 16).min(alignment),
            );
            let start = if heap == first {
                // The chunks of the first heap begin after its arena.
                (library.next_field(arena.address) + 40).next_multiple_of(16)
            } else {
                heap + header
            };
            if let End::Broken(at) = self.row(start, heap + size, &mut chunks) {
                arena.broken = Some((NO_HEADER.into(), at));
                break;
            }
            arena.segments.push(heap..heap + size);
            if heap == first {
                break;
            }
            heap = previous;
        }
        chunks
    }

    /// Walks the main arena: one row of chunks up to the top, and other rows where brk(2) failed.
    fn main_arena(&mut self, arena: &mut Arena, memory: &[Range<u64>]) -> Vec<Chunk> {
        let end = arena
            .top
            .saturating_add(self.size_field(arena.top) & !FLAGS);
        let area = within(memory, arena.top);
        let Some(area) = area.filter(|area| arena.top < end && end <= area.end) else {
            arena.broken = Some((
                "the top chunk is in no memory of the heap".into(),
                arena.top,
            ));
            return Vec::new();
        };
        let contiguous = end
            .checked_sub(arena.system)
            .filter(|&base| base >= area.start);
        let contiguous = contiguous.map(|base| base.next_multiple_of(16));
        // After an sbrk() by other code, the heap does not start where its mapping starts.
        let near = (area.start..arena.top.min(area.start + (1 << 20))).step_by(16);
        let far = (area.start + (1 << 20)..arena.top).step_by(PAGE as usize);
        let mut broken_at = None;
        for base in contiguous
            .into_iter()
            .chain(near)
            .chain(far)
            .chain([arena.top])
        {
            if base != arena.top && self.size_field(base) & FLAGS != PREVIOUS_IN_USE {
                continue;
            }
            let (mut chunks, mut gaps) = (Vec::new(), Vec::new());
            match self.row_with_gaps(base, end, &mut chunks, &mut gaps) {
                None => {
                    arena.segments.push(base..end);
                    arena.gaps = gaps;
                    self.find_mmapped_segments(arena, memory, &mut chunks);
                    // The row that was found is only a part of the heap, behind the damage.
                    if let Some(at) =
                        broken_at.filter(|_| arena.walked_bytes().saturating_add(15) < arena.system)
                    {
                        arena.broken = Some((NO_HEADER.into(), at));
                    }
                    return chunks;
                }
                Some(at) if Some(base) == contiguous && base != at => {
                    broken_at = Some(at);
                    // A row that ends after many chunks is the heap, damaged. Rows from other starts would be chance
                    // matches.
                    if chunks.len() > 64 {
                        break;
                    }
                }
                Some(_) => {}
            }
            if self.fuel.0 == 0 {
                break;
            }
        }
        arena.broken = Some((NO_HEADER.into(), broken_at.unwrap_or(arena.top)));
        Vec::new()
    }

    /// Walks to the top chunk across gaps that other code took by sbrk(2). Returns the address at which the walk
    /// fails, if it does.
    fn row_with_gaps(
        &mut self,
        base: u64,
        end: u64,
        chunks: &mut Vec<Chunk>,
        gaps: &mut Vec<Range<u64>>,
    ) -> Option<u64> {
        let mut at = base;
        for _ in 0..MAX_GAPS {
            match self.row(at, end, chunks) {
                End::Top => return None,
                End::Broken(at) => return Some(at),
                End::Fencepost(after) => {
                    at = self.after_gap(after, end);
                    gaps.push(after..at);
                }
            }
        }
        Some(at)
    }

    /// Returns where chunks go on after a gap: the first address from which a row of chunks leads on.
    fn after_gap(&mut self, from: u64, end: u64) -> u64 {
        for at in (from..self.top).step_by(16) {
            let field = self.size_field(at);
            let size = field & !FLAGS;
            if field & FLAGS != PREVIOUS_IN_USE || size < 0x20 || size > end - at {
                continue;
            }
            let mut row = Vec::new();
            match self.row(at, end, &mut row) {
                End::Top => return at,
                End::Fencepost(_) if row.len() > 4 => return at,
                _ if self.fuel.0 == 0 => break,
                _ => {}
            }
        }
        self.top
    }

    /// Finds the memory that malloc mapped when brk(2) had failed: rows of chunks that begin a page and end with a
    /// fence at the end of a page. Stops when the arena's sum is reached.
    fn find_mmapped_segments(
        &mut self,
        arena: &mut Arena,
        memory: &[Range<u64>],
        chunks: &mut Vec<Chunk>,
    ) {
        let mut missing = arena.system.saturating_sub(arena.walked_bytes());
        for area in memory {
            let mut page = area.start;
            while missing >= 16 && page + PAGE <= area.end && self.fuel.0 > 0 {
                if let Some(segment) = arena.segments.iter().find(|range| range.contains(&page)) {
                    page = segment.end.next_multiple_of(PAGE);
                    continue;
                }
                let field = self.size_field(page);
                let starts = self.image.word(page) == Some(0)
                    && field & FLAGS == PREVIOUS_IN_USE
                    && field & !FLAGS >= 0x20;
                let mut row = Vec::new();
                if starts
                    && let End::Fencepost(after) = self.row(page, area.end, &mut row)
                    && after.is_multiple_of(PAGE)
                    && !row.is_empty()
                {
                    chunks.append(&mut row);
                    arena.segments.push(page..after);
                    missing = missing.saturating_sub(after - page);
                    page = after;
                } else {
                    page += PAGE;
                }
            }
        }
    }
}
