//! Chunks that have mappings of their own, because they are large.

use std::collections::HashMap;
use std::ops::Range;

use crate::heap::image::Image;
use crate::heap::page_index::PAGE;

use super::segments::IS_MMAPPED;
use super::{Chunk, Library, MMAPPED, State, Walk, word};

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
