//! jemalloc's map from pages to extents: a table of leaves, each with an element for every page of 1 GB.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use crate::heap::image::Image;
use crate::heap::page_table::PAGE;

use super::{Broken, Fuel, SIZES};

/// Bytes of a leaf, and of the part of the table that is for user programs.
pub(super) const LEAF: u64 = 8 << 18;
const TABLE: u64 = 8 << 17;
/// Bits of an address that a leaf covers.
const LEAF_BITS: u32 = 30;
/// Elements of a leaf that are looked at to see whether it is one.
const LOOKED_AT: usize = 16;
/// How far into an extent's description its bitmap is.
pub(super) const BITMAP: u64 = 64;

/// The map, by its place and its leaves.
#[derive(Debug)]
pub(super) struct Map {
    table: u64,
    pub(super) leaves: Vec<u64>,
}

/// Memory that jemalloc has cut out for one use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    /// The address of its description.
    pub(super) edata: u64,
    /// The address that a large block has, which begins at a random cache line of the first page.
    pub(super) first: u64,
    pub(super) bytes: u64,
    pub(super) arena: u32,
    pub(super) class: usize,
    pub(super) is_slab: bool,
    /// Blocks of a slab that are free.
    pub(super) free: u64,
    state: State,
}

/// What an extent's pages are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Active,
    Dirty,
    Muzzy,
    Retained,
    /// A thread is in the middle of changing it.
    Changing,
}

impl State {
    fn of(number: u64) -> Self {
        match number {
            0 => Self::Active,
            1 => Self::Dirty,
            2 => Self::Muzzy,
            3 => Self::Retained,
            _ => Self::Changing,
        }
    }
}

impl Extent {
    /// The extent with this description; None if it makes no sense.
    fn read(image: &Image, edata: u64) -> Option<Self> {
        let bits = image.word(edata)?;
        let (first, size) = (image.word(edata + 8)?, image.word(edata + 16)?);
        let extent = Self {
            edata,
            first,
            bytes: size & !(PAGE - 1),
            arena: (bits & 0xfff) as u32,
            class: (bits >> 20 & 0xff) as usize,
            is_slab: bits >> 12 & 1 != 0,
            free: bits >> 28 & 0x3ff,
            state: State::of(bits >> 17 & 7),
        };
        let ends = first.checked_add(extent.bytes)?;
        (first >= PAGE && extent.bytes > 0 && ends >> 47 == 0).then_some(extent)
    }

    /// Whether the program has it, or some blocks of it, or threads' caches have. What a thread is about to give
    /// back to the kernel has no size class.
    pub(super) fn is_active(&self) -> bool {
        self.state == State::Active && self.class < SIZES
    }

    /// What its pages are; what a thread is about to give back to the kernel is none of the program's.
    pub(super) fn state(&self) -> State {
        if self.state == State::Active && !self.is_active() {
            return State::Changing;
        }
        self.state
    }

    /// The addresses of its pages.
    pub(super) fn range(&self) -> Range<u64> {
        let start = self.first & !(PAGE - 1);
        start..start + self.bytes
    }

    pub(super) fn end(&self) -> u64 {
        self.range().end
    }
}

/// The description that an element of a leaf refers to; 0 is none. Its other bits are the size class
/// above, and below what kind of extent it is.
fn edata_of(element: u64) -> u64 {
    const ADDRESS: u64 = 0x0000_ffff_ffff_ff80;
    element & ADDRESS
}

/// Whether a word can be an element.
fn is_element(word: u64) -> bool {
    const UNUSED: u64 = 0x60;
    word >> 48 <= SIZES as u64 && word & UNUSED == 0 && edata_of(word) >> 47 == 0
}

impl Map {
    /// Finds the map whose table is in these data: where most leaves agree.
    pub(super) fn find(image: &Image, data: &Range<u64>, fuel: &mut Fuel) -> Option<Self> {
        let mut votes: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        let mut looked_at = HashSet::new();
        for (at, leaf) in image.words(data.clone()) {
            if !may_be_leaf(image, leaf) || !looked_at.insert(leaf) {
                continue;
            }
            let Some(gigabyte) = covers(image, leaf, fuel) else {
                continue;
            };
            let table = at.checked_sub(8 * gigabyte);
            if let Some(table) = table.filter(|table| data.contains(table)) {
                votes.entry(table).or_default().push(leaf);
            }
        }
        let (table, _) = votes.into_iter().max_by_key(|(_, leaves)| leaves.len())?;
        let leaves: Vec<_> = image
            .words(table..table + TABLE)
            .map(|(_, leaf)| leaf)
            .filter(|&leaf| may_be_leaf(image, leaf))
            .collect();
        Some(Self { table, leaves })
    }

    /// All extents, by their descriptions.
    pub(super) fn extents(
        &self,
        image: &Image,
        fuel: &mut Fuel,
        broken: &mut Vec<Broken>,
    ) -> BTreeMap<u64, Extent> {
        let mut extents: BTreeMap<u64, Extent> = BTreeMap::new();
        for (at, leaf) in image.words(self.table..self.table + TABLE) {
            if leaf == 0 {
                continue;
            }
            if !may_be_leaf(image, leaf) {
                broken.push(("the page map refers to no leaf".into(), Some(at)));
                continue;
            }
            let begins = ((at - self.table) / 8) << LEAF_BITS;
            for (at, element) in image.words(leaf..leaf + LEAF) {
                if !fuel.burn(1) {
                    return extents;
                }
                let edata = edata_of(element);
                if edata == 0 {
                    continue;
                }
                let page = begins + (at - leaf) / 8 * PAGE;
                let known = extents.get(&edata).copied();
                let extent = known.or_else(|| Extent::read(image, edata));
                match extent.filter(|extent| extent.range().contains(&page)) {
                    Some(extent) => {
                        extents.insert(edata, extent);
                    }
                    None => broken.push(("the page map refers to no extent".into(), Some(at))),
                }
                // One is enough to refuse, and all could be.
                if broken.len() > 16 {
                    return extents;
                }
            }
        }
        let mut ranges: Vec<_> = extents.values().map(Extent::range).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        let overlap = ranges.windows(2).find(|two| two[0].end > two[1].start);
        if let Some(two) = overlap {
            broken.push(("two extents overlap".into(), Some(two[1].start)));
        }
        extents
    }
}

/// Whether there is room for a leaf at an address.
fn may_be_leaf(image: &Image, leaf: u64) -> bool {
    leaf != 0
        && leaf.is_multiple_of(64)
        && leaf >> 47 == 0
        && image.area(leaf).is_some_and(|area| {
            area.writable && area.is_private_memory() && area.mapping.range.end - leaf >= LEAF
        })
}

/// The gigabyte that a leaf covers, if it is one: some of its elements refer to extents that have their pages.
fn covers(image: &Image, leaf: u64, fuel: &mut Fuel) -> Option<u64> {
    let mut looked_at = 0;
    for (at, element) in image.words(leaf..leaf + LEAF) {
        if !fuel.burn(1) || !is_element(element) {
            return None;
        }
        let edata = edata_of(element);
        if edata == 0 {
            continue;
        }
        let extent = Extent::read(image, edata)?;
        let page = (at - leaf) / 8 * PAGE;
        let begins = extent.range().start >> LEAF_BITS;
        if extent.range().contains(&((begins << LEAF_BITS) + page)) {
            return Some(begins);
        }
        looked_at += 1;
        if looked_at == LOOKED_AT {
            break;
        }
    }
    None
}
