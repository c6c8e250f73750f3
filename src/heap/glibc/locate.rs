//! Search for glibc's `main_arena` and `mp_` in the data of a library or of a static program.

use std::collections::HashSet;
use std::ops::Range;

use crate::heap::arch::ADDRESS_BITS;
use crate::heap::area::Area;
use crate::heap::image::Image;

use super::{Counts, Fuel, Library, half, word};

/// Number of lists of free chunks (bins) of an arena.
const BINS: u64 = 127;
/// Size of the heads of all bins, in bytes.
pub(super) const BINS_BYTES: u64 = 16 * BINS;
/// Number of heads that may be inconsistent because threads are changing their lists.
const TORN: usize = 2;

/// Offsets of the bins in an arena, by the version of glibc.
pub(super) const BINS_2_43: u64 = 0x18;
pub(super) const BINS_2_26: u64 = 0x68;
const BINS_2_27: u64 = 0x70;

/// Offsets of an arena in its first heap, behind `heap_info`: before 2.35, and since.
pub(super) const HEAP_HEADERS: [u64; 2] = [0x20, 0x30];

/// Largest number of arenas of a process.
pub(super) const MAX_ARENAS: usize = 1 << 16;
/// Largest number of libraries. Two that are in use are refused.
const MAX_LIBRARIES: usize = 16;

/// Returns the libraries that have a heap.
pub(super) fn libraries(image: &Image) -> Vec<Library> {
    // Each 16 bytes can be a list's head, and begin a row of heads.
    let mut fuel = Fuel(image.copied_bytes().saturating_mul(10) + 50_000_000);
    let mut found = Vec::new();
    for (file, data) in Area::data_of_files(&image.areas, Area::SEARCHED) {
        let mut from = data.start;
        while let Some(library) = in_data(image, file, &data, from, &mut fuel) {
            from = library.main + BINS_BYTES;
            found.push(library);
            if found.len() == MAX_LIBRARIES {
                return found;
            }
        }
    }
    found
}

/// Returns the first library from an address on.
fn in_data(
    image: &Image,
    file: &[u8],
    data: &Range<u64>,
    from: u64,
    fuel: &mut Fuel,
) -> Option<Library> {
    first_row(image, data, from, fuel, |bins_at, fuel| {
        let (main, bins) = places(bins_at)
            .find(|&(main, bins)| check_arena_ring(image, main, bins, fuel).is_ok())?;
        Some(Library {
            file: file.to_vec(),
            main,
            bins,
            counts: counts(image, data),
        })
    })
}

/// Finds the word that breaks the ring of arenas, in a process without an intact heap of glibc's malloc. From this
/// word on, the arenas do not lead back to the main one.
pub fn broken_ring(image: &Image) -> Option<u64> {
    let mut fuel = Fuel::of(image);
    let mut furthest = None;
    for (_, data) in Area::data_of_files(&image.areas, Area::SEARCHED) {
        first_row(image, &data, data.start, &mut fuel, |bins_at, fuel| {
            // Rows that begin a head or two beside the bins have invalid heads at an end.
            let whole = (0..BINS).all(|number| is_head(image, bins_at + 16 * number));
            for (main, bins) in places(bins_at) {
                if let Err((arenas, place)) = check_arena_ring(image, main, bins, fuel) {
                    // The ring is followed furthest with the offset of the right version.
                    furthest = furthest.max(Some((arenas, whole, place)));
                }
            }
            None::<()>
        });
    }
    furthest.map(|(_, _, place)| place)
}

/// Returns what `made` makes of the first row of list heads for which it returns anything. `made` gets the row's
/// address.
fn first_row<T>(
    image: &Image,
    data: &Range<u64>,
    from: u64,
    fuel: &mut Fuel,
    mut made: impl FnMut(u64, &mut Fuel) -> Option<T>,
) -> Option<T> {
    // The last head of a row is looked for first: most words are no head at all.
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

/// Returns the possible addresses of the main arena whose bins are at `bins_at`, each with the offset of the bins in
/// it.
fn places(bins_at: u64) -> impl Iterator<Item = (u64, u64)> {
    let bins = [BINS_2_27, BINS_2_43, BINS_2_26].into_iter();
    bins.filter_map(move |bins| Some((bins_at.checked_sub(bins)?, bins)))
}

/// Whether a list's head is at this address: the head points to itself, or to chunks that point back.
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

/// Follows the ring of arenas back to the main one. If the ring leads elsewhere, returns the number of arenas before
/// that, and the address of the word that leads elsewhere.
fn check_arena_ring(
    image: &Image,
    main: u64,
    bins: u64,
    fuel: &mut Fuel,
) -> Result<(), (usize, u64)> {
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
        if !is_arena || !seen.insert(arena) || seen.len() == MAX_ARENAS || !fuel.burn(1) {
            return Err((seen.len(), place));
        }
        place = next(arena);
    }
}

/// Finds the counts of `mp_`. Their place is recognised by fields that stand together: `mmapped_mem`, its maximum,
/// the start of the heap, and the limits of tcaches, after a limit of 65536 mappings.
fn counts(image: &Image, data: &Range<u64>) -> Option<Counts> {
    const MAX_MMAPS: u32 = 65_536;
    image.words(data.clone()).find_map(|(at, sbrk_base)| {
        let field = |offset: u64| word(image, at.wrapping_add(offset));
        let before = |offset: u64| word(image, at.wrapping_sub(offset));
        let (bins, max_bytes, tcache_count) = (field(8), field(16), field(24));
        let (mmapped, most) = (before(16), before(8));
        let is_tcache = (1..=76).contains(&bins) && (8..=8 << 20).contains(&max_bytes);
        let is_heap = sbrk_base == 0 || (65_536..1 << ADDRESS_BITS).contains(&sbrk_base);
        let is_sum = mmapped <= most && mmapped.is_multiple_of(16) && most.is_multiple_of(16);
        if !is_tcache || tcache_count > 0xffff || !is_heap || !is_sum {
            return None;
        }
        let half = |offset: u64| half(image, at.wrapping_sub(offset));
        // Since 2.35, `hp_flags` is before these fields, which moves them by 4 bytes.
        let (mmaps, max_mmaps) = match (half(32), half(28)) {
            (MAX_MMAPS, max_mmaps) => (half(36), max_mmaps),
            (mmaps, MAX_MMAPS) => (mmaps, half(24)),
            _ => return None,
        };
        (mmaps <= max_mmaps).then_some(Counts {
            mmaps: mmaps.into(),
            mmapped,
            tcache_count,
        })
    })
}
