//! Thread caches of jemalloc (tcaches), which hold free blocks. Each arena has a ring of the caches of its threads.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::heap::image::Image;

use super::arenas::Arenas;
use super::inside::AllocatorCheck;
use super::{Fuel, Inconsistency, Owner, Regions, SMALL, word};

/// Size of a thread's cache of one size class, in bytes. The cache has the address of the next block's entry in the
/// list, a count, and the low bits of the addresses at which the list begins and ends.
const CACHE: u64 = 24;
/// Largest number of size classes of a cache.
const MAX_SIZES: u64 = 76;

/// Cache of a thread for one size class.
struct Cache {
    class: u64,
    /// Address at which the list of blocks begins, address from which on it is filled, and address at which it ends.
    begins: u64,
    from: u64,
    end: u64,
}

impl Cache {
    /// Returns the addresses of the list's words that are in use, or of all words of a list that is being filled.
    fn list(&self, all: bool) -> impl Iterator<Item = u64> + use<> {
        let from = if all { self.begins } else { self.from };
        (from..self.end).step_by(8)
    }
}

/// Marks the blocks in caches as free, and the blocks that hold the lists of caches as the allocator's. The blocks in
/// the caches of a thread that may be in the middle of changing them are left in doubt.
///
/// # Errors
/// If an arena does not have valid caches for each thread that it has counted.
pub(super) fn mark(
    image: &Image,
    arenas: &Arenas,
    inside: &AllocatorCheck,
    regions: &mut Regions,
    fuel: &mut Fuel,
) -> Result<(), Inconsistency> {
    let threads = |arena: u64| word(image, arena) & 0xffff_ffff;
    if arenas.each().all(|(_, arena)| threads(arena) == 0) {
        return Ok(());
    }
    let Some(place) = place_of_rings(image, arenas, regions, fuel) else {
        return expect_no_caches(image, inside, regions, fuel);
    };
    let mut in_doubt = Vec::new();
    for (number, arena) in arenas.each() {
        let first = word(image, arena + place);
        let most = threads(arena);
        let members = ring(image, first, most).ok_or_else(|| {
            let why = format!("arena {number} has other caches than its {most} threads");
            (why, Some(arena + place))
        })?;
        for member in members {
            let invalid = || {
                let why = "the cache of a thread is inconsistent";
                (why.to_owned(), Some(member))
            };
            let caches = caches_of(image, member, regions, fuel).ok_or_else(invalid)?;
            // The lists of all caches of a thread are in one block.
            if let Some(list) = caches.first().and_then(|one| regions.holding(one.begins)) {
                set(regions, list, Owner::Allocator)?;
            }
            let thread = inside.thread_of(member);
            if thread.is_some_and(|thread| inside.is_inside(thread)) {
                in_doubt.extend(caches);
                continue;
            }
            let blocks = blocks_of(image, &caches, regions, fuel).ok_or_else(invalid)?;
            for block in blocks {
                set(regions, block, Owner::Cached)?;
            }
        }
    }
    mark_in_doubt(image, &in_doubt, regions, fuel);
    Ok(())
}

fn set(regions: &mut Regions, at: usize, owner: Owner) -> Result<(), Inconsistency> {
    let region = &mut regions.0[at];
    if region.owner != Owner::Program {
        let why = "a block in the cache of a thread is free, or in another one's";
        return Err((why.into(), Some(region.block.address)));
    }
    region.owner = owner;
    Ok(())
}

/// Marks the blocks in these caches as in doubt. If a cache is empty, it may be being filled: all words of its list
/// are looked at.
fn mark_in_doubt(image: &Image, caches: &[Cache], regions: &mut Regions, fuel: &mut Fuel) {
    for cache in caches {
        for at in cache.list(cache.from == cache.end) {
            if !fuel.burn(1) {
                return;
            }
            let Some(at) = regions.starting_at(word(image, at)) else {
                continue;
            };
            let region = &mut regions.0[at];
            if region.owner == Owner::Program && region.class as u64 == cache.class {
                region.owner = Owner::InDoubt;
            }
        }
    }
}

/// Checks that no thread has a cache in its thread-local memory, as with MALLOC_CONF=tcache:false.
///
/// # Errors
/// If a thread has one.
fn expect_no_caches(
    image: &Image,
    inside: &AllocatorCheck,
    regions: &Regions,
    fuel: &mut Fuel,
) -> Result<(), Inconsistency> {
    for memory in inside.own_memory() {
        for (at, _) in image.words(memory) {
            if caches_at(image, at, regions, fuel).is_some() {
                let why = "a thread has a cache that no arena knows of";
                return Err((why.into(), Some(at)));
            }
        }
    }
    Ok(())
}

/// Returns the offset of the ring of caches in an arena, which is the same in each.
fn place_of_rings(
    image: &Image,
    arenas: &Arenas,
    regions: &Regions,
    fuel: &mut Fuel,
) -> Option<u64> {
    let mut votes: BTreeMap<u64, usize> = BTreeMap::new();
    for (_, arena) in arenas.each() {
        for (at, first) in image.words(arena..arena + arenas.length) {
            if next(image, first).is_some() && caches_of(image, first, regions, fuel).is_some() {
                *votes.entry(at - arena).or_default() += 1;
            }
        }
    }
    votes
        .into_iter()
        .max_by_key(|vote| vote.1)
        .map(|vote| vote.0)
}

/// Returns the next member of a ring, in which each member refers to the next one and to the one before. Returns None
/// if `member` is not part of a ring.
fn next(image: &Image, member: u64) -> Option<u64> {
    let neighbours = |member: u64| Some((image.word(member)?, image.word(member.checked_add(8)?)?));
    let (next, before) = neighbours(member)?;
    let agrees = neighbours(next)?.1 == member && neighbours(before)?.0 == member;
    agrees.then_some(next)
}

/// Returns the members of a ring; None if the ring has another number of members. No member can come twice before the
/// first one does, as each refers to the one before.
fn ring(image: &Image, first: u64, count: u64) -> Option<Vec<u64>> {
    let mut members = Vec::new();
    let mut at = first;
    while members.len() as u64 <= count && at != 0 {
        members.push(at);
        at = next(image, at)?;
        if at == first {
            break;
        }
    }
    (members.len() as u64 == count).then_some(members)
}

/// Returns the caches that a member of a ring refers to; None if the caches are not valid.
fn caches_of(image: &Image, member: u64, regions: &Regions, fuel: &mut Fuel) -> Option<Vec<Cache>> {
    let caches = image.word(member.checked_add(16)?)?;
    caches_at(image, caches, regions, fuel)
}

/// Returns the caches at an address, the first of which must have its list in a block. Returns None unless there are
/// valid caches for all small sizes.
fn caches_at(image: &Image, caches: u64, regions: &Regions, fuel: &mut Fuel) -> Option<Vec<Cache>> {
    let mut found = Vec::new();
    let mut block: Option<Range<u64>> = None;
    for class in 0..MAX_SIZES {
        let at = caches.checked_add(CACHE * class)?;
        let filled_from = image.word(at).filter(|&from| from.is_multiple_of(8));
        let Some(from) = filled_from.filter(|&from| from != 0) else {
            break;
        };
        let bits = image.word(at.checked_add(16)?)?;
        let (begin, end) = ((bits >> 16) as u16, (bits >> 32) as u16);
        let (room, filled) = (end.wrapping_sub(begin), end.wrapping_sub(from as u16));
        if room == 0 || !room.is_multiple_of(8) || !filled.is_multiple_of(8) || filled > room {
            break;
        }
        if !fuel.burn(1) {
            return None;
        }
        let begins = from.checked_sub(u64::from(room - filled))?;
        if block.is_none() {
            let list = regions.holding(begins)?;
            block = Some(regions.0[list].block.range());
        }
        found.push(Cache {
            class,
            begins,
            from,
            end: from.checked_add(u64::from(filled))?,
        });
    }
    (found.len() >= SMALL).then_some(found)
}

/// Returns the indexes of the blocks in these caches; None if an entry is no block of its cache's size.
fn blocks_of(
    image: &Image,
    caches: &[Cache],
    regions: &Regions,
    fuel: &mut Fuel,
) -> Option<Vec<usize>> {
    let mut blocks = Vec::new();
    for cache in caches {
        for entry in cache.list(false) {
            if !fuel.burn(1) {
                return None;
            }
            let at = regions.starting_at(image.word(entry)?)?;
            if regions.0[at].class as u64 != cache.class {
                return None;
            }
            blocks.push(at);
        }
    }
    Some(blocks)
}
