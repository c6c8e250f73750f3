//! Chunks that have mappings of their own, because they are large.

use std::collections::HashMap;
use std::ops::Range;

use crate::heap::image::Image;
use crate::heap::page_index::PAGE;
use crate::heap::page_runs;

use super::segments::IS_MMAPPED;
use super::{Chunk, Library, MMAPPED, State, Walk, word};

/// Largest number of chunks in doubt of which all choices are compared with malloc's counts.
const MAX_IN_DOUBT: usize = 16;

/// Adds all mmapped chunks to the walk. Their headers are at the starts of mappings. If a chunk is aligned to more
/// than 16 bytes (memalign), its header is further on, with the distance to the start before the size.
pub(super) fn find(image: &Image, memory: &[Range<u64>], walk: &mut Walk) {
    let mut segments: Vec<_> = walk
        .arenas
        .iter()
        .flat_map(|arena| arena.segments.iter().cloned())
        .collect();
    segments.sort_unstable_by_key(|range| range.start);
    let finder = Finder {
        image,
        // Since 2.43 the size omits the header.
        outside: if walk.libraries.iter().any(Library::is_2_43) {
            16
        } else {
            0
        },
        inner: inner_headers(image),
    };
    let mut in_doubt = Vec::new();
    for area in memory {
        let mut from = area.start;
        while let Some(page) = present_page(image, from..area.end) {
            let next = segments.partition_point(|segment| segment.end <= page);
            let next = segments.get(next);
            if let Some(segment) = next.filter(|segment| segment.start <= page) {
                from = segment.end.next_multiple_of(PAGE);
                continue;
            }
            let limit = next.map_or(area.end, |segment| segment.start.min(area.end));
            from = match finder.at(page, limit) {
                Some((address, size)) => {
                    let end = address + size + finder.outside;
                    let is_beside = walk.mmapped.last().is_some_and(|last| last.end == page);
                    if is_beside {
                        in_doubt.pop_if(|last| *last == walk.mmapped.len() - 1);
                    } else if page != area.start && end != area.end {
                        in_doubt.push(walk.mmapped.len());
                    }
                    walk.chunks.push(Chunk {
                        address,
                        size,
                        state: State::InUse,
                        arena: MMAPPED,
                    });
                    walk.mmapped.push(page..end);
                    end
                }
                None => page + PAGE,
            };
        }
    }
    leave_out_imitations(walk, &in_doubt);
}

/// Leaves out what only looks like a chunk: other memory can have the words of a header at the start of a page, as the
/// JVM's metaspace has. In doubt are chunks in the middle of a mapping that are not beside another chunk, because the
/// kernel merges mappings. Those are left out without which the rest is what malloc has counted, if there is a single
/// such choice.
fn leave_out_imitations(walk: &mut Walk, in_doubt: &[usize]) {
    let Some(counts) = walk.counts() else {
        return;
    };
    let found = walk.mmapped.len() as u64;
    let surplus = page_runs::bytes(&walk.mmapped).wrapping_sub(counts.mmapped);
    if found <= counts.mmaps || in_doubt.len() > MAX_IN_DOUBT {
        return;
    }
    let chosen = |set: u32| -> Vec<_> {
        let places = (0..in_doubt.len()).filter(|place| set >> place & 1 == 1);
        places
            .map(|place| walk.mmapped[in_doubt[place]].clone())
            .collect()
    };
    let mut choices = (0..1 << in_doubt.len()).filter(|set: &u32| {
        u64::from(set.count_ones()) == found - counts.mmaps
            && page_runs::bytes(&chosen(*set)) == surplus
    });
    let (Some(set), None) = (choices.next(), choices.next()) else {
        return;
    };
    let imitations = chosen(set);
    walk.mmapped.retain(|range| !imitations.contains(range));
    walk.chunks.retain(|chunk| {
        let is_in = |range: &Range<u64>| range.contains(&chunk.address);
        chunk.arena != MMAPPED || !imitations.iter().any(is_in)
    });
}

/// Returns the first page of a range that is present: only such a page can begin a chunk.
fn present_page(image: &Image, range: Range<u64>) -> Option<u64> {
    let runs = image.copied();
    let run = runs.get(runs.partition_point(|run| run.end <= range.start))?;
    Some(run.start.max(range.start)).filter(|page| *page < range.end)
}

/// Finds possible headers just before a page, of chunks aligned to more than a page. Returns the headers by the page
/// with which their mapping would begin. The alignment has determined the distance between the two. mremap(2), by
/// which realloc() moves such a chunk, keeps the distance and not the alignment.
fn inner_headers(image: &Image) -> HashMap<u64, u64> {
    let pages = image
        .copied()
        .iter()
        .flat_map(|run| run.clone().step_by(PAGE as usize));
    let headers = pages.map(|page| page + PAGE - 16);
    let possible = headers.filter_map(|at| {
        let (offset, field) = (word(image, at), word(image, at + 8));
        let fits =
            field & 7 == IS_MMAPPED && offset != 0 && offset.wrapping_add(16).is_multiple_of(PAGE);
        Some((at.checked_sub(offset).filter(|_| fits)?, at))
    });
    possible.collect()
}

struct Finder<'a> {
    image: &'a Image,
    /// Bytes of the mapping that the chunk's size omits, at its end.
    outside: u64,
    /// Headers of chunks that are aligned to more than a page, by the first page of their mappings.
    inner: HashMap<u64, u64>,
}

impl Finder<'_> {
    /// Returns the address and the size of the chunk whose mapping begins with this page.
    fn at(&self, page: u64, limit: u64) -> Option<(u64, u64)> {
        // memalign() leaves the first header behind, and mremap() does not update it: if there is an inner header, it
        // is the chunk's.
        let below_page = (5..12).map(|bits| page + (1_u64 << bits) - 16);
        let candidates = self.inner.get(&page).copied().into_iter().chain(below_page);
        candidates.chain([page]).find_map(|at| {
            let size = self.header(at, at - page, limit)?;
            Some((at, size))
        })
    }

    /// Returns the size in a header at this offset from the start of its mapping; None if the header is not valid.
    fn header(&self, at: u64, offset: u64, limit: u64) -> Option<u64> {
        let field = word(self.image, at + 8);
        let size = field & !7;
        let end = at.checked_add(size)?.checked_add(self.outside)?;
        let fits = field & 7 == IS_MMAPPED
            && self.image.word(at) == Some(offset)
            && size >= 0x20
            && end.is_multiple_of(PAGE)
            && end <= limit;
        fits.then_some(size)
    }
}
