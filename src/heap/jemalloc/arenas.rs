//! Arenas of jemalloc, and their counts, which prove that no extent was missed.
//!
//! The bins of an arena, one for each size of slabs, are in a row behind its other fields. A bin is recognised by its
//! reference to the slab that it takes blocks from, with the bin's counts before it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use crate::heap::arch::ADDRESS_BITS;
use crate::heap::image::Image;
use crate::heap::page_index::PAGE;

use super::map::Extent;
use super::{BASE_BLOCK, Fuel, Inconsistency, MAX_SLAB_REGIONS, SMALL, class_size, word};

/// Size of a bin, and the offsets in it of the counts and of the slab in use, in bytes.
const BIN: u64 = 224;
const COUNTS: u64 = 112;
const CURRENT: u64 = COUNTS + 80;
/// Offset of the lock in a bin. The first 32 bits of the lock are not 0 while a thread holds it.
const LOCK: u64 = 64;
/// Largest number of bytes of an arena before its bins.
const LONGEST: u64 = 256 << 10;
/// Largest number of arenas.
const MOST: u64 = 4095;

/// Memory that an arena has in use, according to the page map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sums {
    pages: u64,
    /// Slabs and their blocks in use, by size class.
    bins: [(u64, u64); SMALL],
    /// Number of these slabs that have no block in use, by size class. A bin does not count a slab that a thread is
    /// about to add or to give back.
    empty: [u64; SMALL],
}

impl Sums {
    const NONE: Self = Self {
        pages: 0,
        bins: [(0, 0); SMALL],
        empty: [0; SMALL],
    };

    /// Adds up the extents of each arena.
    fn of(extents: &BTreeMap<u64, Extent>) -> HashMap<u32, Self> {
        let mut all: HashMap<u32, Self> = HashMap::new();
        for extent in extents.values().filter(|extent| extent.is_active()) {
            let sums = all.entry(extent.arena).or_insert(Self::NONE);
            sums.pages += extent.bytes / PAGE;
            if extent.is_slab && extent.class < SMALL {
                let count = (extent.bytes / class_size(extent.class)).min(MAX_SLAB_REGIONS);
                let (slabs, blocks) = &mut sums.bins[extent.class];
                *slabs += 1;
                *blocks += count.saturating_sub(extent.free);
                sums.empty[extent.class] += u64::from(count == extent.free);
            }
        }
        all
    }
}

/// Counts of a bin.
struct Bin {
    slabs: u64,
    blocks: u64,
}

impl Bin {
    /// Reads the bin whose counts begin at an address. Returns None if the counts are inconsistent.
    fn read(image: &Image, at: u64) -> Option<Self> {
        let count = |number: u64| word(image, at.wrapping_add(8 * number));
        let (allocated, freed, blocks) = (count(0), count(1), count(3));
        let (made, slabs, not_full) = (count(6), count(8), count(9));
        let fits = allocated.checked_sub(freed) == Some(blocks) && slabs <= made;
        (fits && not_full <= slabs).then_some(Self { slabs, blocks })
    }

    /// Whether the bin has counted these slabs and blocks. Empty slabs may be counted or not.
    fn agrees(&self, (slabs, blocks): (u64, u64), empty: u64) -> bool {
        self.blocks == blocks && (slabs - empty..=slabs).contains(&self.slabs)
    }
}

/// The arenas of a process, whose counts agree with the page map.
#[derive(Debug)]
pub(super) struct Arenas {
    /// Addresses of the arenas, by number.
    addresses: Vec<u64>,
    /// Bytes of each arena before its bins.
    pub(super) length: u64,
}

impl Arenas {
    /// Finds the arenas by the array of their addresses, which is in these data.
    ///
    /// Returns None if there is nothing like such an array: the heap is not jemalloc's, or of another version.
    ///
    /// # Errors
    /// If no such array has arenas whose counts agree with these extents.
    pub(super) fn find(
        image: &Image,
        data: &Range<u64>,
        extents: &BTreeMap<u64, Extent>,
        fuel: &mut Fuel,
    ) -> Option<Result<Self, Inconsistency>> {
        let sums = Sums::of(extents);
        let own: BTreeSet<u64> = extents
            .keys()
            .map(|edata| edata & !(BASE_BLOCK - 1))
            .collect();
        let mut nearest: Option<(usize, Inconsistency)> = None;
        let mut tried = BTreeSet::new();
        for (at, arena) in image.words(data.clone()) {
            if !arena.is_multiple_of(64) || !own.contains(&(arena & !(BASE_BLOCK - 1))) {
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
        let is_slab = |extent: &Extent| extent.is_active() && extent.is_slab;
        if nearest.is_none() && !extents.values().any(is_slab) {
            return Self::without_slabs(image, data, &own, &sums, fuel).map(Ok);
        }
        nearest.map(|(_, why)| Err(why))
    }

    /// Finds the arenas of a heap without small blocks, which has no slabs by which bins are recognised. The counts of
    /// pages are the proof. The bins are not looked for: `length` ends behind the count.
    fn without_slabs(
        image: &Image,
        data: &Range<u64>,
        own: &BTreeSet<u64>,
        sums: &HashMap<u32, Sums>,
        fuel: &mut Fuel,
    ) -> Option<Self> {
        let mut numbers: Vec<u32> = sums.keys().copied().collect();
        numbers.sort_unstable();
        for (at, arena) in image.words(data.clone()) {
            if arena % 64 != 0 || !own.contains(&(arena & !(BASE_BLOCK - 1))) {
                continue;
            }
            let first = u64::from(*numbers.first()?);
            if !fuel.burn(MOST + LONGEST / 8) {
                return None;
            }
            let Some(array) = at.checked_sub(8 * first) else {
                continue;
            };
            let mut found = Self::read(image, array, LONGEST);
            let is_whole = numbers.iter().all(|&number| {
                let arena = found.address(number);
                arena.is_some_and(|arena| own.contains(&(arena & !(BASE_BLOCK - 1))))
            });
            if is_whole && let Ok(Some(count)) = found.check_pages(image, data, sums) {
                found.length = count + 8;
                return Some(found);
            }
        }
        None
    }

    /// Reads the arenas of an array.
    fn read(image: &Image, array: u64, length: u64) -> Self {
        let addresses = (0..MOST).map(|number| word(image, array.wrapping_add(8 * number)));
        Self {
            addresses: addresses.collect(),
            length,
        }
    }

    /// Compares the arenas' counts with the page map. The error has the number of size classes that agree.
    fn check(
        &self,
        image: &Image,
        data: &Range<u64>,
        sums: &HashMap<u32, Sums>,
    ) -> Result<(), (usize, Inconsistency)> {
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
            let bytes = class_size(class as usize);
            let why =
                format!("arena {number} has other blocks of {bytes} bytes than it has counted");
            return Err((agreeing, (why, Some(at))));
        }
        let pages = self.check_pages(image, data, sums);
        pages.map(drop).map_err(|why| (agreeing, why))
    }

    /// Checks the arenas' counts of pages. The count is the word after a reference to data that all arenas share, at
    /// the same offset in each. Returns this offset; None if there are no pages.
    fn check_pages(
        &self,
        image: &Image,
        data: &Range<u64>,
        sums: &HashMap<u32, Sums>,
    ) -> Result<Option<u64>, Inconsistency> {
        let pages = |number: u32| sums.get(&number).map_or(0, |sums| sums.pages);
        let counts = |arena: u64, offset: u64, pages: u64| {
            word(image, arena + offset) == pages && data.contains(&word(image, arena + offset - 8))
        };
        let Some((number, arena)) = self.each().find(|&(number, _)| pages(number) > 0) else {
            return Ok(None);
        };
        let mut offsets = (8..self.length)
            .step_by(8)
            .filter(|&offset| counts(arena, offset, pages(number)));
        let agree = |offset: u64| {
            self.each()
                .all(|(at, arena)| counts(arena, offset, pages(at)))
        };
        if let Some(offset) = offsets.find(|&offset| agree(offset)) {
            return Ok(Some(offset));
        }
        let why = format!(
            "{} pages of arena {number} were found, and it has counted others",
            pages(number)
        );
        Err((why, Some(arena)))
    }

    /// Iterates over the arenas with their numbers.
    pub(super) fn each(&self) -> impl Iterator<Item = (u32, u64)> {
        let all = (0..).zip(self.addresses.iter().copied());
        all.filter(|(_, arena)| {
            *arena != 0 && arena >> ADDRESS_BITS == 0 && arena.is_multiple_of(8)
        })
    }

    /// Returns the address of an arena's bin for a size class; for the class after the last one, the arena's end.
    fn bin(&self, arena: u64, class: u64) -> u64 {
        arena + self.length + BIN * class
    }

    /// Returns the address of an arena by its number.
    pub(super) fn address(&self, number: u32) -> Option<u64> {
        let address = *self.addresses.get(number as usize)?;
        (address != 0).then_some(address)
    }

    /// Whether a thread holds the lock of a bin, and may be in the middle of changing its counts and its slabs'
    /// bitmaps.
    pub(super) fn is_locked(&self, image: &Image, arena: u32, class: usize) -> bool {
        self.address(arena)
            .is_some_and(|arena| is_locked(image, self.bin(arena, class as u64)))
    }

    /// Iterates over the pieces of jemalloc's own memory that hold the arenas, by their start addresses.
    pub(super) fn windows(&self) -> impl Iterator<Item = u64> {
        self.each().flat_map(|(_, arena)| {
            let end = self.bin(arena, SMALL as u64);
            [arena & !(BASE_BLOCK - 1), (end - 1) & !(BASE_BLOCK - 1)]
        })
    }
}

fn is_locked(image: &Image, bin: u64) -> bool {
    word(image, bin.wrapping_add(LOCK)) & 0xffff_ffff != 0
}

/// Finds possible bins of an arena: its number, and the offset of the bins in it.
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
