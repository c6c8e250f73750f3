//! Where glibc keeps `main_arena` and `mp_`, in a library's or a static program's data.

use std::collections::HashSet;
use std::ops::Range;

use crate::heap::area::Area;
use crate::heap::image::Image;

use super::{Counts, Fuel, Library, half, word};

/// Lists of free chunks of an arena.
const BINS: u64 = 127;
/// Bytes of their heads.
pub(super) const BINS_BYTES: u64 = 16 * BINS;
/// Heads that may be caught while a thread changes their list.
const TORN: usize = 2;

/// How far into an arena the bins are.
pub(super) const BINS_2_43: u64 = 0x18;
pub(super) const BINS_2_26: u64 = 0x68;
const BINS_2_27: u64 = 0x70;

/// How far into the first heap of an arena the arena is: `heap_info` before 2.35, and since.
pub(super) const HEAP_HEADERS: [u64; 2] = [0x20, 0x30];

/// Arenas of a process at most.
const MOST_ARENAS: usize = 1 << 16;
/// Libraries at most: two in use are refused.
const MOST_LIBRARIES: usize = 16;

/// The libraries that have a heap.
pub(super) fn libraries(image: &Image) -> Vec<Library> {
    // Each 16 bytes can be a list's head, and begin a row of them.
    let mut fuel = Fuel(image.copied_bytes().saturating_mul(10) + 50_000_000);
    let mut found = Vec::new();
    for (file, data) in Area::data_of_files(&image.areas) {
        let mut from = data.start;
        while let Some(library) = in_data(image, file, &data, from, &mut fuel) {
            from = library.main + BINS_BYTES;
            found.push(library);
            if found.len() == MOST_LIBRARIES {
                return found;
            }
        }
    }
    found
}

/// The first library from an address on.
fn in_data(
    image: &Image,
    file: &[u8],
    data: &Range<u64>,
    from: u64,
    fuel: &mut Fuel,
) -> Option<Library> {
    first_row(image, data, from, fuel, |bins_at, fuel| {
        let (main, bins) =
            places(bins_at).find(|&(main, bins)| follow(image, main, bins, fuel).is_ok())?;
        Some(Library {
            file: file.to_vec(),
            main,
            bins,
            counts: counts(image, data),
        })
    })
}

/// Where an arena's place in the ring of arenas says what cannot be, in a process that has no heap of glibc's malloc which
/// is whole: the arenas do not lead back to the main one.
pub fn broken_ring(image: &Image) -> Option<u64> {
    let mut fuel = Fuel::of(image);
    let mut furthest = None;
    for (_, data) in Area::data_of_files(&image.areas) {
        first_row(image, &data, data.start, &mut fuel, |bins_at, fuel| {
            // Rows that begin a head or two beside the bins are torn at their ends.
            let whole = (0..BINS).all(|number| is_head(image, bins_at + 16 * number));
            for (main, bins) in places(bins_at) {
                if let Err((arenas, place)) = follow(image, main, bins, fuel) {
                    // That of the version that it is leads furthest.
                    furthest = furthest.max(Some((arenas, whole, place)));
                }
            }
            None::<()>
        });
    }
    furthest.map(|(_, _, place)| place)
}

/// What is made of the first row of lists of free chunks, by its address, of which anything is.
fn first_row<T>(
    image: &Image,
    data: &Range<u64>,
    from: u64,
    fuel: &mut Fuel,
    mut made: impl FnMut(u64, &mut Fuel) -> Option<T>,
) -> Option<T> {
    // The address of the last head comes first: most words are not even one.
    let last = 16 * (BINS - 1);
    let words = image.words(from.max(data.start + BINS_2_26).saturating_add(last)..data.end);
    let mut heads = words.filter(|&(address, _)| is_head(image, address));
    heads.find_map(|(address, _)| {
        let row = (0..BINS).map(|number| address - 16 * number);
        let torn = row.take_while(|_| fuel.burn(1));
        let is_torn = torn
            .filter(|&head| !is_head(image, head))
            .nth(TORN)
            .is_some();
        if is_torn || fuel.0 == 0 {
            return None;
        }
        made(address - last, fuel)
    })
}

/// Where the main arena can be, of which the bins are here, and how far into it these are.
fn places(bins_at: u64) -> impl Iterator<Item = (u64, u64)> {
    let bins = [BINS_2_27, BINS_2_43, BINS_2_26].into_iter();
    bins.filter_map(move |bins| Some((bins_at.checked_sub(bins)?, bins)))
}

/// Whether a list's head is here: it points to itself, or to chunks that point back.
fn is_head(image: &Image, at: u64) -> bool {
    let head = at.wrapping_sub(16);
    let (first, last) = (word(image, at), word(image, at.wrapping_add(8)));
    if first == head && last == head {
        return true;
    }
    let is_chunk = |chunk: u64| chunk != 0 && chunk != head && chunk.is_multiple_of(16);
    is_chunk(first)
        && is_chunk(last)
        && word(image, first.wrapping_add(24)) == head
        && word(image, last.wrapping_add(16)) == head
}

/// Follows the ring of arenas back to the main one. If it leads elsewhere: after how many arenas, and the place of the
/// word that does.
fn follow(image: &Image, main: u64, bins: u64, fuel: &mut Fuel) -> Result<(), (usize, u64)> {
    let mut seen = HashSet::new();
    let next = |arena: u64| arena.wrapping_add(bins + BINS_BYTES + 16);
    let mut place = next(main);
    loop {
        let arena = word(image, place);
        if arena == main {
            return Ok(());
        }
        let header = arena & 0xfff;
        let is_arena = HEAP_HEADERS.contains(&header) && image.word(arena - header) == Some(arena);
        if !is_arena || !seen.insert(arena) || seen.len() == MOST_ARENAS || !fuel.burn(1) {
            return Err((seen.len(), place));
        }
        place = next(arena);
    }
}

/// What `mp_` counts. The place is known by what stands together: `mmapped_mem`, its maximum, the
/// start of the heap, and the limits of tcaches, after a limit of 65536 mappings.
fn counts(image: &Image, data: &Range<u64>) -> Option<Counts> {
    const MOST_MMAPS: u32 = 65_536;
    image.words(data.clone()).find_map(|(at, sbrk_base)| {
        let field = |offset: u64| word(image, at.wrapping_add(offset));
        let before = |offset: u64| word(image, at.wrapping_sub(offset));
        let (bins, max_bytes, tcache_count) = (field(8), field(16), field(24));
        let (mmapped, most) = (before(16), before(8));
        let is_tcache = (1..=76).contains(&bins) && (8..=8 << 20).contains(&max_bytes);
        let is_heap = sbrk_base == 0 || (65_536..1 << 47).contains(&sbrk_base);
        let is_sum = mmapped <= most && mmapped.is_multiple_of(16) && most.is_multiple_of(16);
        if !is_tcache || tcache_count > 0xffff || !is_heap || !is_sum {
            return None;
        }
        let half = |offset: u64| half(image, at.wrapping_sub(offset));
        // `hp_flags` is before them since 2.35, which moves them by 4 bytes.
        let (mmaps, max_mmaps) = match (half(32), half(28)) {
            (MOST_MMAPS, max_mmaps) => (half(36), max_mmaps),
            (mmaps, MOST_MMAPS) => (mmaps, half(24)),
            _ => return None,
        };
        (mmaps <= max_mmaps).then_some(Counts {
            mmaps: mmaps.into(),
            mmapped,
            tcache_count,
        })
    })
}
