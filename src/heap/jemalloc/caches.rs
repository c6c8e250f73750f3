//! What threads have set aside: jemalloc's caches of threads, of which each arena has a ring.

use std::collections::BTreeMap;

use crate::heap::image::Image;

use super::arenas::Arenas;
use super::{Broken, Fuel, Owner, Regions, SMALL, word};

/// Bytes of a thread's cache of one size: where its blocks are, from the next one on, a count, and the
/// low bits of where the blocks begin and end.
const CACHE: u64 = 24;
/// Sizes that a cache has at most.
const MOST_SIZES: u64 = 76;

/// What a thread's caches hold.
#[derive(Debug, Default)]
struct Held {
    /// Blocks, by their place.
    blocks: Vec<usize>,
    /// A block of the allocator's own, in which their addresses are.
    list: Option<usize>,
}

/// Marks blocks in caches as nobody's, and those that caches themselves are in as the allocator's.
///
/// # Errors
/// If not each thread that an arena has counted has caches there that make sense.
pub(super) fn mark(
    image: &Image,
    arenas: &Arenas,
    regions: &mut Regions,
    fuel: &mut Fuel,
) -> Result<(), Broken> {
    let threads = |arena: u64| word(image, arena) & 0xffff_ffff;
    if arenas.each().all(|(_, arena)| threads(arena) == 0) {
        return Ok(());
    }
    let Some(place) = place_of_rings(image, arenas, regions, fuel) else {
        let why = "no cache of a thread was found (MALLOC_CONF=tcache:false?)";
        return Err((why.into(), None));
    };
    for (number, arena) in arenas.each() {
        let first = word(image, arena + place);
        let most = threads(arena);
        let members = ring(image, first, most).ok_or_else(|| {
            let why = format!("arena {number} has other caches than its {most} threads");
            (why, Some(arena + place))
        })?;
        for member in members {
            let held = held_by(image, member, regions, fuel).ok_or_else(|| {
                let why = "the cache of a thread makes no sense";
                (why.to_owned(), Some(member))
            })?;
            let blocks = held.blocks.iter().map(|&at| (at, Owner::Nobody));
            let list = held.list.map(|at| (at, Owner::Allocator));
            for (at, owner) in blocks.chain(list) {
                let region = &mut regions.0[at];
                if region.owner != Owner::Program {
                    let why = "a block is in two caches of threads";
                    return Err((why.into(), Some(region.block.address)));
                }
                region.owner = owner;
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
            if next(image, first).is_some() && held_by(image, first, regions, fuel).is_some() {
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

/// What the caches hold of which a member of a ring tells; None if these make no sense.
fn held_by(image: &Image, member: u64, regions: &Regions, fuel: &mut Fuel) -> Option<Held> {
    let caches = image.word(member.checked_add(16)?)?;
    let mut held = Held::default();
    let mut sizes = 0;
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
        if !fuel.burn(u64::from(filled / 8) + 1) {
            return None;
        }
        for entry in (0..u64::from(filled)).step_by(8) {
            let at = regions.starting_at(image.word(from.checked_add(entry)?)?)?;
            let region = regions.0[at];
            if region.class as u64 != class || region.owner != Owner::Program {
                return None;
            }
            held.blocks.push(at);
        }
        let begins = from.checked_sub(u64::from(room - filled))?;
        held.list = held.list.or_else(|| regions.holding(begins));
        sizes += 1;
    }
    (sizes >= SMALL && held.list.is_some()).then_some(held)
}
