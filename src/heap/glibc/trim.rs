//! Prediction of what malloc_trim(0) would give back to the kernel.
//!
//! The call merges fastbins into their neighbours. In every arena, it gives back the whole pages inside each free
//! chunk of at least a page. Then it gives back the end of the main arena's top. It does not touch the tops of other
//! arenas, nor the chunks in tcaches.

use crate::heap::image::Image;
use crate::heap::page_index::PAGE;

use super::{Chunk, State, Walk};

/// Bytes at the start of a free chunk that stay: its header and its list pointers.
const LINKS: u64 = 48;
/// Bytes at the start of the top chunk that stay: the smallest chunk, and one byte.
const MIN_TOP: u64 = 33;

/// Returns the bytes of memory, in whole pages, that are resident now and would not be after the call.
pub fn returned(image: &Image, walk: &Walk) -> u64 {
    let mut bytes = 0;
    let mut chunks = walk.chunks.iter().peekable();
    while let Some(chunk) = chunks.next() {
        if chunk.state == State::Top {
            bytes += of_top(image, walk, chunk.address, chunk);
            continue;
        }
        if !merges(chunk) {
            continue;
        }
        let mut end = chunk.end();
        while let Some(next) = chunks.next_if(|next| next.address == end && merges(next)) {
            end = next.end();
        }
        let top = chunks.next_if(|next| next.address == end && next.state == State::Top);
        bytes += match top {
            Some(top) => of_top(image, walk, chunk.address, top),
            None if end - chunk.address >= PAGE => {
                image.resident_page_bytes(chunk.address + LINKS..end)
            }
            None => 0,
        };
    }
    bytes
}

/// Whether a chunk will be merged with its free neighbours.
fn merges(chunk: &Chunk) -> bool {
    [State::Bin, State::Fastbin].contains(&chunk.state)
}

/// Returns the bytes that are given back of a top chunk. `start` is its address after its free neighbours are merged
/// with it.
fn of_top(image: &Image, walk: &Walk, start: u64, top: &Chunk) -> u64 {
    let main = walk
        .arenas
        .get(top.arena as usize)
        .is_some_and(|arena| arena.main);
    // The memory is given back by brk(2), which works only if the top is at the end of the heap's mapping.
    let by_brk = image
        .area(top.address)
        .is_some_and(|area| area.name() == b"[heap]" && area.mapping.range.end == top.end());
    if main && by_brk {
        image.resident_page_bytes(start + MIN_TOP..top.end())
    } else {
        0
    }
}
