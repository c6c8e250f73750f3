//! jemalloc's arenas, and what each has counted: the proof that no extent was missed.
//!
//! An arena's bins, one for each size of slabs, stand in a row after what else it has. A bin shows itself by the slab
//! that it takes blocks from, with the bin's counts before.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use crate::heap::image::Image;
use crate::heap::page_table::PAGE;

use super::map::Extent;
use super::{Broken, Fuel, MOST_OF_SLAB, OWN, SMALL, size_of, word};

/// Bytes of a bin, how far in its counts are, and the slab in use.
const BIN: u64 = 224;
const COUNTS: u64 = 112;
const CURRENT: u64 = COUNTS + 80;
/// How far into a bin its lock is; its first 32 bits are not 0 while a thread has it.
const LOCK: u64 = 64;
/// Bytes of an arena before its bins, at most.
const LONGEST: u64 = 256 << 10;
/// Arenas at most.
const MOST: u64 = 4095;

/// What an arena has in use, as the page map has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sums {
    pages: u64,
    /// Slabs and their blocks in use, by size.
    bins: [(u64, u64); SMALL],
    /// Slabs among these of which no block is in use: a bin does not count one that a thread is about to
    /// bring or to give back.
    empty: [u64; SMALL],
}

impl Sums {
    const NONE: Self = Self {
        pages: 0,
        bins: [(0, 0); SMALL],
        empty: [0; SMALL],
    };

    /// By arena.
    fn of(extents: &BTreeMap<u64, Extent>) -> HashMap<u32, Self> {
        let mut all: HashMap<u32, Self> = HashMap::new();
        for extent in extents.values().filter(|extent| extent.is_active()) {
            let sums = all.entry(extent.arena).or_insert(Self::NONE);
            sums.pages += extent.bytes / PAGE;
            if extent.is_slab && extent.class < SMALL {
                let count = (extent.bytes / size_of(extent.class)).min(MOST_OF_SLAB);
                let (slabs, blocks) = &mut sums.bins[extent.class];
                *slabs += 1;
                *blocks += count.saturating_sub(extent.free);
                sums.empty[extent.class] += u64::from(count == extent.free);
            }
        }
        all
    }
}

/// The counts of a bin.
struct Bin {
    slabs: u64,
    blocks: u64,
}

impl Bin {
    /// The bin whose counts begin at an address; None if they make no sense.
    fn read(image: &Image, at: u64) -> Option<Self> {
        let count = |number: u64| word(image, at.wrapping_add(8 * number));
        let (allocated, freed, blocks) = (count(0), count(1), count(3));
        let (made, slabs, not_full) = (count(6), count(8), count(9));
        let fits = allocated.checked_sub(freed) == Some(blocks) && slabs <= made;
        (fits && not_full <= slabs).then_some(Self { slabs, blocks })
    }

    /// Whether it has counted these slabs and blocks; slabs that are empty, or not.
    fn agrees(&self, (slabs, blocks): (u64, u64), empty: u64) -> bool {
        self.blocks == blocks && (slabs - empty..=slabs).contains(&self.slabs)
    }
}

/// The arenas of a process, whose counts agree with the page map.
#[derive(Debug)]
pub(super) struct Arenas {
    /// By number: their addresses.
    addresses: Vec<u64>,
    /// Bytes of each before its bins.
    pub(super) length: u64,
}

impl Arenas {
    /// Finds the arenas, by the array of them that is in these data.
    ///
    /// None if there is nothing like it: then this is not jemalloc, or of another version.
    ///
    /// # Errors
    /// If there is none whose counts agree with these extents.
    pub(super) fn find(
        image: &Image,
        data: &Range<u64>,
        extents: &BTreeMap<u64, Extent>,
        fuel: &mut Fuel,
    ) -> Option<Result<Self, Broken>> {
        let sums = Sums::of(extents);
        let own: BTreeSet<u64> = extents.keys().map(|edata| edata & !(OWN - 1)).collect();
        let mut nearest: Option<(usize, Broken)> = None;
        let mut tried = BTreeSet::new();
        for (at, arena) in image.words(data.clone()) {
            if !arena.is_multiple_of(64) || !own.contains(&(arena & !(OWN - 1))) {
                continue;
            }
            for (number, length) in bins_after(image, arena, extents, fuel) {
                let Some(array) = at.checked_sub(8 * u64::from(number)) else {
                    continue;
                };
                let costs = MOST + SMALL as u64;
                if !tried.insert((array, length)) || !fuel.burn(costs) {
                    continue;
                }
                let found = Self::read(image, array, length);
                match found.check(image, data, &sums) {
                    Ok(()) => return Some(Ok(found)),
                    Err((agreeing, why)) => {
                        if nearest.as_ref().is_none_or(|(most, _)| agreeing > *most) {
                            nearest = Some((agreeing, why));
                        }
                    }
                }
            }
            if fuel.0 == 0 {
                break;
            }
        }
        nearest.map(|(_, why)| Err(why))
    }

    /// The arenas of an array.
    fn read(image: &Image, array: u64, length: u64) -> Self {
        let addresses = (0..MOST).map(|number| word(image, array.wrapping_add(8 * number)));
        Self {
            addresses: addresses.collect(),
            length,
        }
    }

    /// Holds what the arenas have counted against what the page map has. If they differ, with how many sizes agree.
    fn check(
        &self,
        image: &Image,
        data: &Range<u64>,
        sums: &HashMap<u32, Sums>,
    ) -> Result<(), (usize, Broken)> {
        let mut agreeing = 0;
        let mut differs = None;
        for (number, arena) in self.each() {
            let sums = sums.get(&number).unwrap_or(&Sums::NONE);
            for (class, (&counted, &empty)) in (0..).zip(sums.bins.iter().zip(&sums.empty)) {
                let bin = self.bin(arena, class);
                if Bin::read(image, bin + COUNTS).is_some_and(|bin| bin.agrees(counted, empty)) {
                    agreeing += 1;
                } else if !is_locked(image, bin) {
                    differs = differs.or(Some((number, class, bin + COUNTS)));
                }
            }
        }
        if let Some(number) = sums.keys().find(|&&number| self.address(number).is_none()) {
            let why = format!("there are extents of arena {number}, and no such arena");
            return Err((0, (why, None)));
        }
        if let Some((number, class, at)) = differs {
            let bytes = size_of(class as usize);
            let why =
                format!("arena {number} has other blocks of {bytes} bytes than it has counted");
            return Err((agreeing, (why, Some(at))));
        }
        self.check_pages(image, data, sums)
            .map_err(|why| (agreeing, why))
    }

    /// The count of pages is the word after a reference to what all arenas share, at the same place in each.
    fn check_pages(
        &self,
        image: &Image,
        data: &Range<u64>,
        sums: &HashMap<u32, Sums>,
    ) -> Result<(), Broken> {
        let pages = |number: u32| sums.get(&number).map_or(0, |sums| sums.pages);
        let counts = |arena: u64, offset: u64, pages: u64| {
            word(image, arena + offset) == pages && data.contains(&word(image, arena + offset - 8))
        };
        let Some((number, arena)) = self.each().find(|&(number, _)| pages(number) > 0) else {
            return Ok(());
        };
        let mut offsets = (8..self.length)
            .step_by(8)
            .filter(|&offset| counts(arena, offset, pages(number)));
        let agree = |offset: u64| {
            self.each()
                .all(|(at, arena)| counts(arena, offset, pages(at)))
        };
        if offsets.any(agree) {
            return Ok(());
        }
        let why = format!(
            "{} pages of arena {number} were found, and it has counted others",
            pages(number)
        );
        Err((why, Some(arena)))
    }

    /// The arenas with their numbers.
    pub(super) fn each(&self) -> impl Iterator<Item = (u32, u64)> {
        let all = (0..).zip(self.addresses.iter().copied());
        all.filter(|(_, arena)| *arena != 0 && arena >> 47 == 0 && arena.is_multiple_of(8))
    }

    /// Where the bin of a size of an arena is; behind the last one, where the arena ends.
    fn bin(&self, arena: u64, class: u64) -> u64 {
        arena + self.length + BIN * class
    }

    /// The address of an arena, by its number.
    pub(super) fn address(&self, number: u32) -> Option<u64> {
        let address = *self.addresses.get(number as usize)?;
        (address != 0).then_some(address)
    }

    /// Whether a thread has the lock of a bin, and may be in the middle of changing its counts and its slabs' bitmaps.
    pub(super) fn is_locked(&self, image: &Image, arena: u32, class: usize) -> bool {
        self.address(arena)
            .is_some_and(|arena| is_locked(image, self.bin(arena, class as u64)))
    }

    /// The memory that arenas are in, by what jemalloc takes for itself.
    pub(super) fn windows(&self) -> impl Iterator<Item = u64> {
        self.each().flat_map(|(_, arena)| {
            let end = self.bin(arena, SMALL as u64);
            [arena & !(OWN - 1), (end - 1) & !(OWN - 1)]
        })
    }
}

fn is_locked(image: &Image, bin: u64) -> bool {
    word(image, bin.wrapping_add(LOCK)) & 0xffff_ffff != 0
}

/// What may be the bins of an arena: its number, and how far from it they begin.
fn bins_after(
    image: &Image,
    arena: u64,
    extents: &BTreeMap<u64, Extent>,
    fuel: &mut Fuel,
) -> BTreeSet<(u32, u64)> {
    let mut found = BTreeSet::new();
    for (at, current) in image.words(arena..arena + LONGEST) {
        if !fuel.burn(1) {
            break;
        }
        if current == 0 || !current.is_multiple_of(128) {
            continue;
        }
        let extent = extents.get(&current).filter(|extent| extent.is_slab);
        let Some(extent) = extent.filter(|extent| extent.is_active() && extent.class < SMALL)
        else {
            continue;
        };
        let is_bin = Bin::read(image, at - (CURRENT - COUNTS)).is_some_and(|bin| bin.slabs > 0);
        let length = at
            .checked_sub(arena + CURRENT + BIN * extent.class as u64)
            .filter(|_| is_bin);
        if let Some(length) = length.filter(|&length| length > 0) {
            found.insert((extent.arena, length));
        }
    }
    found
}
