//! jemalloc's map from pages to extents: a table of leaves, each with an element for every page of 1 GB, or, if
//! jemalloc was built on a CPU with five levels of page tables, a table of tables of smaller leaves.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;

use crate::heap::arch::ADDRESS_BITS;
use crate::heap::image::Image;
use crate::heap::page_index::PAGE;

use super::{Fuel, Inconsistency, MAX_BROKEN, MAX_TRIES, SIZES};

/// Largest number of elements that are looked at to recognise a leaf.
const LOOKED_AT: usize = 16;
/// Offset of the bitmap in an extent's description.
pub(super) const BITMAP: u64 = 64;

/// Layout of a map. jemalloc's build determines it by the number of address bits of the CPU.
#[derive(Debug, Clone, Copy)]
struct Layout {
    /// Number of address bits that a leaf covers.
    leaf_bits: u32,
    /// Size of an element of a leaf, in bytes.
    element: u64,
    /// Number of address bits that a table of leaves covers, if the first table is one of such tables.
    inner_bits: Option<u32>,
}

/// The layouts for 48 bits, and for 57, as in Debian 13's package. There, the size class does not fit into an element's
/// first word, and has a second one.
const LAYOUTS: [Layout; 2] = [
    Layout {
        leaf_bits: 30,
        element: 8,
        inner_bits: None,
    },
    Layout {
        leaf_bits: 27,
        element: 16,
        inner_bits: Some(42),
    },
];

impl Layout {
    fn leaf_bytes(self) -> u64 {
        self.element << (self.leaf_bits - PAGE.trailing_zeros())
    }

    /// Returns the size of the part of the first table that is for user programs, in bytes.
    fn table_bytes(self) -> u64 {
        8 << (ADDRESS_BITS - self.entry_bits())
    }

    /// Returns the size of what an entry of the first table refers to.
    fn entry_bytes(self) -> u64 {
        match self.inner_bits {
            Some(bits) => 8 << (bits - self.leaf_bits),
            None => self.leaf_bytes(),
        }
    }

    /// Returns the number of address bits that an entry of the first table covers.
    fn entry_bits(self) -> u32 {
        self.inner_bits.unwrap_or(self.leaf_bits)
    }

    /// Returns the elements of a leaf: the address of the element, the number of its page within the leaf, and its first
    /// word.
    fn elements(self, image: &Image, leaf: u64) -> impl Iterator<Item = (u64, u64, u64)> {
        let words = image.words(leaf..leaf + self.leaf_bytes());
        let first = words.filter(move |(at, _)| (at - leaf).is_multiple_of(self.element));
        first.map(move |(at, word)| (at, (at - leaf) / self.element, word))
    }

    /// Returns the first leaf below an entry of the first table. Most words of a program's data lead to other memory than
    /// tables: reading one entry distinguishes them from tables.
    fn first_leaf(self, image: &Image, entry: u64, fuel: &mut Fuel) -> Option<u64> {
        if self.inner_bits.is_none() {
            return Some(entry);
        }
        let mut words = image.words(entry..entry + self.entry_bytes());
        let (at, leaf) = words.find(|(_, leaf)| *leaf != 0)?;
        fuel.burn(1 + (at - entry) / PAGE).then_some(leaf)
    }
}

/// Entry of a table.
#[derive(Debug, Clone, Copy)]
struct Entry {
    at: u64,
    /// First address that the entry covers.
    begins: u64,
    /// Address of what the entry refers to, which may be invalid.
    to: u64,
}

/// Returns the entries of a table other than 0. The table covers addresses from `begins` on, and each entry covers this
/// number of address bits.
fn entries_of(
    image: &Image,
    table: Range<u64>,
    begins: u64,
    bits: u32,
) -> impl Iterator<Item = Entry> {
    let start = table.start;
    let entries = image.words(table).filter(|(_, to)| *to != 0);
    entries.map(move |(at, to)| Entry {
        at,
        begins: begins + (((at - start) / 8) << bits),
        to,
    })
}

/// Page map.
#[derive(Debug)]
pub(super) struct Map {
    layout: Layout,
    table: u64,
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
        (first >= PAGE && extent.bytes > 0 && ends >> ADDRESS_BITS == 0).then_some(extent)
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
    word >> 48 <= SIZES as u64 && word & UNUSED == 0 && edata_of(word) >> ADDRESS_BITS == 0
}

impl Map {
    /// Finds the maps whose tables may be in these data. The one on whose table's address most leaves agree is first.
    pub(super) fn all(image: &Image, data: &Range<u64>, fuel: &mut Fuel) -> Vec<Self> {
        let of_layouts = LAYOUTS.into_iter();
        of_layouts
            .flat_map(|layout| Self::of_layout(image, data, layout, fuel))
            .collect()
    }

    fn of_layout(image: &Image, data: &Range<u64>, layout: Layout, fuel: &mut Fuel) -> Vec<Self> {
        let mut votes: BTreeMap<u64, usize> = BTreeMap::new();
        let mut looked_at = HashSet::new();
        for (at, entry) in image.words(data.clone()) {
            let leads = may_be_structure(image, entry, layout.entry_bytes());
            if !leads || !looked_at.insert(entry) {
                continue;
            }
            let covered = layout
                .first_leaf(image, entry, fuel)
                .and_then(|leaf| covers(image, leaf, layout, fuel));
            let number = covered.map(|address| address >> layout.entry_bits());
            let table = number.and_then(|number| at.checked_sub(8 * number));
            if let Some(table) = table.filter(|table| data.contains(table)) {
                *votes.entry(table).or_default() += 1;
            }
        }
        let mut tables: Vec<_> = votes.into_iter().collect();
        tables.sort_by_key(|&(table, leaves)| Reverse((leaves, table)));
        let tables = tables.into_iter().take(MAX_TRIES);
        tables.map(|(table, _)| Self { layout, table }).collect()
    }

    /// Returns the entries that refer to leaves. An entry of the first table that should refer to another table, and
    /// does not, is returned as one that refers to no leaf.
    fn entries(&self, image: &Image) -> impl Iterator<Item = Entry> {
        let layout = self.layout;
        let first = self.table..self.table + layout.table_bytes();
        let first = entries_of(image, first, 0, layout.entry_bits());
        first.flat_map(move |entry| {
            let bytes = layout.entry_bytes();
            let is_table = layout.inner_bits.is_some() && may_be_structure(image, entry.to, bytes);
            let table = if is_table {
                entry.to..entry.to + bytes
            } else {
                0..0
            };
            let inner = entries_of(image, table, entry.begins, layout.leaf_bits);
            (!is_table).then_some(entry).into_iter().chain(inner)
        })
    }

    /// Returns the addresses of the leaves.
    pub(super) fn leaves(&self, image: &Image) -> BTreeSet<u64> {
        let bytes = self.layout.leaf_bytes();
        let leaves = self.entries(image).map(|entry| entry.to);
        leaves
            .filter(|&leaf| may_be_structure(image, leaf, bytes))
            .collect()
    }

    /// Returns the memory of a leaf.
    pub(super) fn leaf_range(&self, leaf: u64) -> Range<u64> {
        leaf..leaf + self.layout.leaf_bytes()
    }

    /// Returns all extents, by the addresses of their descriptions.
    pub(super) fn extents(
        &self,
        image: &Image,
        fuel: &mut Fuel,
        broken: &mut Vec<Inconsistency>,
    ) -> BTreeMap<u64, Extent> {
        let mut extents: BTreeMap<u64, Extent> = BTreeMap::new();
        for entry in self.entries(image) {
            // One inconsistency is enough to refuse the heap, and every entry and element could have one.
            if broken.len() > MAX_BROKEN {
                return extents;
            }
            if !may_be_structure(image, entry.to, self.layout.leaf_bytes()) {
                broken.push(("the page map refers to no leaf".into(), Some(entry.at)));
                continue;
            }
            for (at, number, element) in self.layout.elements(image, entry.to) {
                if !fuel.burn(1) {
                    return extents;
                }
                let edata = edata_of(element);
                if edata == 0 {
                    continue;
                }
                let page = entry.begins + number * PAGE;
                let known = extents.get(&edata).copied();
                let extent = known.or_else(|| Extent::read(image, edata));
                match extent.filter(|extent| extent.range().contains(&page)) {
                    Some(extent) => {
                        extents.insert(edata, extent);
                    }
                    None => broken.push(("the page map refers to no extent".into(), Some(at))),
                }
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

/// Whether a table or a leaf of this size may be at an address: enough private memory follows.
fn may_be_structure(image: &Image, address: u64, bytes: u64) -> bool {
    address != 0
        && address.is_multiple_of(64)
        && address >> ADDRESS_BITS == 0
        && image.area(address).is_some_and(|area| {
            let left = area.mapping.range.end - address;
            area.writable && area.is_private_anonymous() && left >= bytes
        })
}

/// Returns the address that a leaf begins to cover; None if there is no leaf at the address. A leaf is recognised by an
/// element that refers to an extent with the element's page.
fn covers(image: &Image, leaf: u64, layout: Layout, fuel: &mut Fuel) -> Option<u64> {
    if !may_be_structure(image, leaf, layout.leaf_bytes()) {
        return None;
    }
    let mut looked_at = 0;
    for (_, number, element) in layout.elements(image, leaf) {
        if !fuel.burn(1) || !is_element(element) {
            return None;
        }
        let edata = edata_of(element);
        if edata == 0 {
            continue;
        }
        let extent = Extent::read(image, edata)?;
        let begins = extent.range().start >> layout.leaf_bits << layout.leaf_bits;
        if extent.range().contains(&(begins + number * PAGE)) {
            return Some(begins);
        }
        looked_at += 1;
        if looked_at == LOOKED_AT {
            break;
        }
    }
    None
}
