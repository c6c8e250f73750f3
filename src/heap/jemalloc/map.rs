//! jemalloc's map from pages to extents: a table of leaves, each with an element for every page of 1 GB.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use crate::heap::image::Image;
use crate::heap::page_index::PAGE;

use super::{Fuel, Inconsistency, MAX_BROKEN, MAX_TRIES, SIZES};

/// Size of a leaf, and of the part of the table that is for user programs, in bytes.
pub(super) const LEAF: u64 = 8 << 18;
const TABLE: u64 = 8 << 17;
/// Number of address bits that a leaf covers.
const LEAF_BITS: u32 = 30;
/// Largest number of elements that are looked at to recognise a leaf.
const LOOKED_AT: usize = 16;
/// Offset of the bitmap in an extent's description.
pub(super) const BITMAP: u64 = 64;

/// Page map: the address of its table, and its leaves.
#[derive(Debug)]
pub(super) struct Map {
    table: u64,
    pub(super) leaves: Vec<u64>,
}

/// Extent: memory that jemalloc has set apart for one use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    /// Address of the extent's description.
    pub(super) edata: u64,
    /// Address of a large block, which begins at a random cache line of the first page.
    pub(super) first: u64,
    pub(super) bytes: u64,
    pub(super) arena: u32,
    pub(super) class: usize,
    pub(super) is_slab: bool,
    /// Number of free blocks of a slab.
    pub(super) free: u64,
    state: State,
}

/// State of an extent's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Active,
    Dirty,
    Muzzy,
    Retained,
    /// A thread is in the middle of changing the extent.
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
    /// Reads the extent with this description. Returns None if the description is invalid.
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

    /// Whether the extent is in use, in whole or in part, by the program or by threads' caches. An extent that a
    /// thread is about to give back to the kernel has no size class.
    pub(super) fn is_active(&self) -> bool {
        self.state == State::Active && self.class < SIZES
    }

    /// Returns the state of the extent's pages. An extent that a thread is about to give back to the kernel is none
    /// of the program's.
    pub(super) fn state(&self) -> State {
        if self.state == State::Active && !self.is_active() {
            return State::Changing;
        }
        self.state
    }

    /// Returns the addresses of the extent's pages.
    pub(super) fn range(&self) -> Range<u64> {
        let start = self.first & !(PAGE - 1);
        start..start + self.bytes
    }

    pub(super) fn end(&self) -> u64 {
        self.range().end
    }
}

/// Returns the address of the description that an element of a leaf refers to; 0 if there is none. The element's bits
/// above the address are the size class. The bits below tell the kind of extent.
fn edata_of(element: u64) -> u64 {
    const ADDRESS: u64 = 0x0000_ffff_ffff_ff80;
    element & ADDRESS
}

/// Whether a word can be an element of a leaf.
fn is_element(word: u64) -> bool {
    const UNUSED: u64 = 0x60;
    word >> 48 <= SIZES as u64 && word & UNUSED == 0 && edata_of(word) >> 47 == 0
}

impl Map {
    /// Finds the maps whose tables may be in these data. The one on whose table's address most leaves agree is first.
    pub(super) fn all(image: &Image, data: &Range<u64>, fuel: &mut Fuel) -> Vec<Self> {
        let mut votes: BTreeMap<u64, usize> = BTreeMap::new();
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
                *votes.entry(table).or_default() += 1;
            }
        }
        let mut tables: Vec<_> = votes.into_iter().collect();
        tables.sort_by_key(|&(table, leaves)| Reverse((leaves, table)));
        let tables = tables.into_iter().take(MAX_TRIES);
        tables.map(|(table, _)| Self::at(image, table)).collect()
    }

    /// Makes the map with this table.
    fn at(image: &Image, table: u64) -> Self {
        let leaves = image
            .words(table..table + TABLE)
            .map(|(_, leaf)| leaf)
            .filter(|&leaf| may_be_leaf(image, leaf))
            .collect();
        Self { table, leaves }
    }

    /// Returns all extents, by the addresses of their descriptions.
    pub(super) fn extents(
        &self,
        image: &Image,
        fuel: &mut Fuel,
        broken: &mut Vec<Inconsistency>,
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
                // One inconsistency is enough to refuse the heap, and every element could have one.
                if broken.len() > MAX_BROKEN {
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

/// Whether a leaf may be at an address: enough private memory follows.
fn may_be_leaf(image: &Image, leaf: u64) -> bool {
    leaf != 0
        && leaf.is_multiple_of(64)
        && leaf >> 47 == 0
        && image.area(leaf).is_some_and(|area| {
            area.writable && area.is_private_anonymous() && area.mapping.range.end - leaf >= LEAF
        })
}

/// Returns the number of the gigabyte that a leaf covers; None if there is no leaf at the address. A leaf is
/// recognised by an element that refers to an extent with the element's page.
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
