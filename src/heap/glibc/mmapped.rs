//! Chunks that have mappings of their own, because they are large.

use std::ops::Range;

use crate::heap::image::Image;
use crate::heap::page_table::PAGE;

use super::{Chunk, Library, MMAPPED, State, Walk, word};

/// The one flag of their size fields.
const IS_MMAPPED: u64 = 2;
/// The largest alignment that is looked for.
const MOST_ALIGNED: u64 = 64 << 20;

/// Adds all such chunks: at the starts of pages, or, if they are aligned to more than 16 bytes
/// (memalign), further on, with the distance to the page before their size.
pub(super) fn find(image: &Image, memory: &[Range<u64>], walk: &mut Walk) {
    let mut segments: Vec<_> = walk
        .arenas
        .iter()
        .flat_map(|arena| arena.segments.iter().cloned())
        .collect();
    segments.sort_unstable_by_key(|range| range.start);
    let finder = Finder {
        image,
        // Since 2.43 the size leaves out the header.
        outside: if walk.libraries.iter().any(Library::is_2_43) {
            16
        } else {
            0
        },
    };
    for area in memory {
        // Only pages that are there can begin one.
        let runs = image.copied();
        let first = runs.partition_point(|run| run.end <= area.start);
        let mut after = area.start;
        for run in runs[first..].iter().take_while(|run| run.start < area.end) {
            let mut page = run.start.max(after).max(area.start);
            while page < run.end.min(area.end) {
                let segment = segments.partition_point(|range| range.end <= page);
                let next = segments.get(segment);
                if let Some(range) = next.filter(|range| range.start <= page) {
                    page = range.end.next_multiple_of(PAGE);
                    after = page;
                    continue;
                }
                let limit = next.map_or(area.end, |range| range.start.min(area.end));
                match finder.at(page, limit) {
                    Some((address, size)) => {
                        let end = address + size + finder.outside;
                        walk.chunks.push(Chunk {
                            address,
                            size,
                            state: State::InUse,
                            arena: MMAPPED,
                        });
                        walk.mmapped.push(page..end);
                        page = end;
                    }
                    None => page += PAGE,
                }
                after = page;
            }
        }
    }
}

struct Finder<'a> {
    image: &'a Image,
    /// Bytes of the mapping after the chunk.
    outside: u64,
}

impl Finder<'_> {
    /// The chunk whose mapping begins with this page: its address and size.
    fn at(&self, page: u64, limit: u64) -> Option<(u64, u64)> {
        let outer = self.header(page, 0, limit);
        // memalign() leaves the first header behind: the inner one is the chunk's, and ends where that ended.
        let below_page = (5..=12).map(|bits| (1_u64 << bits) - 16);
        let aligned = std::iter::successors(Some(2 * PAGE), |alignment| Some(alignment * 2))
            .take_while(|&alignment| alignment <= MOST_ALIGNED && alignment < limit - page)
            .map(|alignment| (page + 16).next_multiple_of(alignment) - 16 - page)
            .filter(|&offset| offset > 16);
        let inner = below_page.chain(aligned).find_map(|offset| {
            let size = self.header(page + offset, offset, limit)?;
            let agrees = outer.is_none_or(|outer| size + offset == outer);
            agrees.then_some((page + offset, size))
        });
        inner.or(outer.map(|size| (page, size)))
    }

    /// The size in a header that is so far from the start of its mapping.
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
