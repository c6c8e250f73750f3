//! What threads have set aside: jemalloc's caches of threads, of which each arena has a ring.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::heap::image::Image;

use super::arenas::Arenas;
use super::inside::Inside;
use super::{Broken, Fuel, Owner, Regions, SMALL, word};

/// Bytes of a thread's cache of one size: where its blocks are, from the next one on, a count, and the
/// low bits of where the blocks begin and end.
const CACHE: u64 = 24;
/// Sizes that a cache has at most.
const MOST_SIZES: u64 = 76;

/// A thread's cache of one size.
struct Cache {
    class: u64,
    /// Where the list of its blocks begins, from where on it is filled, and where it ends.
    begins: u64,
    from: u64,
    end: u64,
}

impl Cache {
    /// The words of its list that are in use; or all, of a list that is being filled.
    fn list(&self, all: bool) -> impl Iterator<Item = u64> + use<> {
        let from = if all { self.begins } else { self.from };
        (from..self.end).step_by(8)
    }
}

/// Marks blocks in caches as nobody's, and those that caches themselves are in as the allocator's. What is in the
/// caches of a thread that may be in the middle of changing them is left in doubt.
///
/// # Errors
/// If not each thread that an arena has counted has caches there that make sense.
pub(super) fn mark(
    image: &Image,
    arenas: &Arenas,
    inside: &Inside,
    regions: &mut Regions,
    fuel: &mut Fuel,
) -> Result<(), Broken> {
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
            let caches = caches_of(image, member, regions, fuel).ok_or_else(|| {
                let why = "the cache of a thread makes no sense";
                (why.to_owned(), Some(member))
            })?;
            // All caches have their lists in one block.
            if let Some(list) = caches.first().and_then(|one| regions.holding(one.begins)) {
                set(regions, list, Owner::Allocator)?;
            }
            let thread = inside.thread_of(member);
            if thread.is_some_and(|thread| inside.is_inside(thread)) {
                in_doubt.extend(caches);
                continue;
            }
            for block in blocks_of(image, &caches, regions, fuel).ok_or_else(|| {
                let why = "the cache of a thread makes no sense";
                (why.to_owned(), Some(member))
            })? {
                set(regions, block, Owner::Cached)?;
            }
        }
    }
    doubt(image, &in_doubt, regions, fuel);
    Ok(())
}

fn set(regions: &mut Regions, at: usize, owner: Owner) -> Result<(), Broken> {
    let region = &mut regions.0[at];
    if region.owner != Owner::Program {
        let why = "a block in the cache of a thread is free, or in another one's";
        return Err((why.into(), Some(region.block.address)));
    }
    region.owner = owner;
    Ok(())
}

/// Leaves in doubt what is in these caches, and in the lists of those that are empty, which may be being filled.
fn doubt(image: &Image, caches: &[Cache], regions: &mut Regions, fuel: &mut Fuel) {
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

/// No cache is where threads have what is theirs alone, as with MALLOC_CONF=tcache:false.
///
/// # Errors
/// If one is.
fn expect_no_caches(
    image: &Image,
    inside: &Inside,
    regions: &Regions,
    fuel: &mut Fuel,
) -> Result<(), Broken> {
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

/// How far into an arena its ring of caches is, which is the same in each.
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

/// The next member of a ring, in which each refers to the next and to the one before; None if this is no member.
fn next(image: &Image, member: u64) -> Option<u64> {
    let neighbours = |member: u64| Some((image.word(member)?, image.word(member.checked_add(8)?)?));
    let (next, before) = neighbours(member)?;
    let agrees = neighbours(next)?.1 == member && neighbours(before)?.0 == member;
    agrees.then_some(next)
}

/// The members of a ring; None if it has not as many. None of it can come twice before the first does, as each
/// knows the one before.
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

/// The caches of which a member of a ring tells; None if these make no sense.
fn caches_of(image: &Image, member: u64, regions: &Regions, fuel: &mut Fuel) -> Option<Vec<Cache>> {
    let caches = image.word(member.checked_add(16)?)?;
    caches_at(image, caches, regions, fuel)
}

/// The caches at an address, each with its list in a block; None if there are none for all small sizes.
fn caches_at(image: &Image, caches: u64, regions: &Regions, fuel: &mut Fuel) -> Option<Vec<Cache>> {
    let mut found = Vec::new();
    let mut block: Option<Range<u64>> = None;
    for class in 0..MOST_SIZES {
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

/// The blocks in these caches, by their places; None if one is no block of its cache's size.
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
