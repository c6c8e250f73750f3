//! Walk of the heap of jemalloc (5.3), by its structures alone.
//!
//! A map from pages to extents, which begins in a library's data, leads to all memory (`map`). An extent is one large
//! block, or a slab of blocks of one size, whose bitmap tells which blocks are free. Further free blocks are in the
//! caches of threads (`caches`). The walk is complete if three counts agree: the slabs and blocks of each size and
//! arena are as many as the arena's bin has counted, all extents have as many pages as the arena has counted
//! (`arenas`), and the caches are as many as the threads that arenas have counted. In the heap of a version with
//! another layout, the walk finds nothing.
//!
//! The walked memory belongs to another user: all steps together are bounded, and no value in the memory is trusted.

mod arenas;
mod caches;
mod inside;
mod map;
pub mod usage;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;

use crate::heap::area::Area;
use crate::heap::blocks::{self, Allocator, Block, Coverage, Heap};
use crate::heap::image::Image;
use crate::heap::untrusted::{Fuel, word};

use inside::AllocatorCheck;
use map::{Extent, Map};
use usage::HeapUsage;

/// Number of size classes that have slabs. Larger blocks have extents of their own.
const SMALL: usize = 36;
/// Number of all size classes.
const SIZES: usize = 232;
/// Largest number of blocks of a slab.
const MAX_SLAB_REGIONS: u64 = 512;
/// Size of the pieces in which the allocator takes memory for itself, in bytes.
const BASE_BLOCK: u64 = 2 << 20;

/// Largest number of page maps that are tried. Few processes have more than one jemalloc.
const MAX_TRIES: usize = 64;
/// Largest number of inconsistencies that are kept.
const MAX_BROKEN: usize = 16;

/// Inconsistency, with its address.
type Inconsistency = (String, Option<u64>);

/// Returns the size of the blocks of a size class, in bytes.
fn class_size(class: usize) -> u64 {
    const FIRST: [u64; 5] = [8, 16, 32, 48, 64];
    // There are four classes to each power of two.
    FIRST.get(class).copied().unwrap_or_else(|| {
        let (group, step) = ((class - 5) / 4, (class - 5) % 4 + 1);
        (1 << (6 + group)) + ((step as u64) << (4 + group))
    })
}

/// Block with its owner.
#[derive(Debug, Clone, Copy)]
struct Region {
    block: Block,
    class: usize,
    owner: Owner,
}

/// Owner of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Program,
    /// None: the block is free in its slab.
    Free,
    /// None: the block is free, in the cache of a thread.
    Cached,
    /// The allocator, for the caches of a thread.
    Allocator,
    /// Unknown: a thread was in the middle of filling or flushing a cache.
    InDoubt,
}

/// All blocks of slabs and extents, in order of address.
#[derive(Debug, Default)]
struct Regions(Vec<Region>);

impl Regions {
    /// Returns the index of the block that begins at an address.
    fn starting_at(&self, address: u64) -> Option<usize> {
        let found = self
            .0
            .binary_search_by_key(&address, |region| region.block.address);
        found.ok()
    }

    /// Returns the index of the block that contains an address.
    fn holding(&self, address: u64) -> Option<usize> {
        let after = self
            .0
            .partition_point(|region| region.block.address <= address);
        let at = after.checked_sub(1)?;
        self.0[at].block.range().contains(&address).then_some(at)
    }
}

/// Extents, blocks and arenas of one jemalloc.
#[derive(Debug)]
struct Part {
    /// Extents, by the addresses of their descriptions.
    extents: BTreeMap<u64, Extent>,
    regions: Regions,
    /// Addresses of the arenas, by their numbers.
    arenas: BTreeMap<u32, u64>,
}

/// Result of the walk of the jemalloc heaps of a process, besides their blocks in use.
#[derive(Debug)]
pub struct Walk {
    /// Each jemalloc of the process: a program can be linked with one, and load another one.
    parts: Vec<Part>,
}

impl Walk {
    /// Returns the use of the heaps' memory. `image` is the image that was walked.
    pub fn usage(&self, image: &Image) -> HeapUsage {
        let mut usage = HeapUsage::default();
        for (number, part) in self.parts.iter().enumerate() {
            usage.add(image, number, part);
        }
        usage
    }
}

/// Walks the jemalloc heaps of a process. Returns None if the process has none.
pub fn walk(image: &Image) -> Option<(Heap, Walk)> {
    let (mut searching, mut walking) = (Fuel::of(image), Fuel::of(image));
    let (mut heap, mut parts): (Option<Heap>, Vec<Part>) = (None, Vec::new());
    let mut known = HashSet::new();
    let files = Area::data_of_files(&image.areas, Area::SEARCHED).into_iter();
    let maps = files.flat_map(|(file, data)| {
        let maps = Map::all(image, &data, &mut searching).into_iter();
        maps.map(move |map| (file, data.clone(), map))
    });
    for (file, data, map) in maps.take(MAX_TRIES) {
        // A word outside of the table that refers to a leaf looks like a part of another table.
        let leaves = map.leaves(image);
        if leaves.iter().any(|leaf| known.contains(leaf)) {
            continue;
        }
        let Some((found, part)) = walk_map(image, file, &data, (&map, &leaves), &mut walking)
        else {
            continue;
        };
        known.extend(leaves);
        parts.push(part);
        heap = Some(match heap {
            Some(heap) => heap.joined(found),
            None => found,
        });
    }
    Some((heap?, Walk { parts }))
}

/// Walks the heap with this page map, which the file's data lead to. Returns None if there are no arenas: the heap is
/// not jemalloc's, or of another version.
fn walk_map(
    image: &Image,
    file: &[u8],
    data: &Range<u64>,
    (map, leaves): (&Map, &BTreeSet<u64>),
    fuel: &mut Fuel,
) -> Option<(Heap, Part)> {
    let mut broken: Vec<Inconsistency> = Vec::new();
    let extents = map.extents(image, fuel, &mut broken);
    let (mut regions, mut miscounted) = (Regions::default(), Vec::new());
    let most = image.copied_bytes() / 8 + (1 << 20);
    for extent in extents.values().filter(|extent| extent.is_active()) {
        if regions.0.len() as u64 > most {
            broken.push(("there are more blocks than memory".into(), None));
            break;
        }
        let (blocks, agrees) = blocks_of(image, extent, &mut broken);
        regions.0.extend(blocks);
        if !agrees && miscounted.len() < MAX_BROKEN {
            miscounted.push(extent);
        }
        // One inconsistency is enough to refuse the heap, and every extent could have one.
        broken.truncate(MAX_BROKEN);
    }
    regions
        .0
        .sort_unstable_by_key(|region| region.block.address);
    let arenas = arenas::Arenas::find(image, data, &extents, fuel)?;
    let mut addresses = BTreeMap::new();
    let mut own: BTreeSet<_> = extents
        .keys()
        .map(|edata| edata & !(BASE_BLOCK - 1))
        .collect();
    match arenas {
        Ok(arenas) => {
            let unlocked = miscounted
                .iter()
                .find(|slab| !arenas.is_locked(image, slab.arena, slab.class));
            if let Some(slab) = unlocked {
                let why = "a slab has another number of free blocks than it has counted";
                broken.push((why.into(), Some(slab.edata)));
            }
            own.extend(arenas.windows());
            let locks = own.iter().map(|&window| window..window + BASE_BLOCK);
            let locks = locks.chain([data.clone()]).collect();
            let inside = AllocatorCheck::of(image, file, locks);
            if let Err(why) = caches::mark(image, &arenas, &inside, &mut regions, fuel) {
                broken.push(why);
            }
            addresses = arenas.each().collect();
        }
        Err(why) => broken.push(why),
    }
    if fuel.0 == 0 {
        broken.push(("the heap goes round in circles".into(), None));
    }
    let mut heap = heap(&extents, &regions, broken);
    let own = own.into_iter().map(|window| window..window + BASE_BLOCK);
    let leaves = leaves.iter().map(|&leaf| map.leaf_range(leaf));
    heap.structures = blocks::merged(own.chain(leaves).collect());
    heap.allocators = vec![Allocator {
        name: "jemalloc (5.3)".into(),
        file: file.to_vec(),
    }];
    let part = Part {
        extents,
        regions,
        arenas: addresses,
    };
    Some((heap, part))
}

/// Returns the blocks of an extent, free ones included, and whether as many are free as the extent has counted.
fn blocks_of(
    image: &Image,
    extent: &Extent,
    broken: &mut Vec<Inconsistency>,
) -> (Vec<Region>, bool) {
    let size = class_size(extent.class);
    let region = |address: u64, owner: Owner| Region {
        block: Block { address, size },
        class: extent.class,
        owner,
    };
    if !extent.is_slab {
        let ends = extent.first.checked_add(size);
        if extent.class < SMALL || ends.is_none_or(|end| end > extent.end()) {
            broken.push((
                "an extent is smaller than its block".into(),
                Some(extent.edata),
            ));
            return (Vec::new(), true);
        }
        return (vec![region(extent.first, Owner::Program)], true);
    }
    let count = extent.bytes / size;
    if extent.class >= SMALL || !extent.bytes.is_multiple_of(size) || count > MAX_SLAB_REGIONS {
        broken.push(("a slab is not of whole blocks".into(), Some(extent.edata)));
        return (Vec::new(), true);
    }
    let owner = |number: u64| {
        let bits = word(image, extent.edata + map::BITMAP + number / 64 * 8);
        if bits >> (number % 64) & 1 != 0 {
            Owner::Free
        } else {
            Owner::Program
        }
    };
    let regions: Vec<_> = (0..count)
        .map(|number| region(extent.first + number * size, owner(number)))
        .collect();
    let free = regions.iter().filter(|region| region.owner == Owner::Free);
    let agrees = free.count() as u64 == extent.free;
    (regions, agrees)
}

/// Returns the heap in the terms that all allocators have in common. An inconsistent heap is returned without blocks,
/// as forged blocks can be anywhere, and many.
fn heap(extents: &BTreeMap<u64, Extent>, regions: &Regions, broken: Vec<Inconsistency>) -> Heap {
    let of = |owner: Owner| {
        let regions = regions.0.iter();
        let of = regions.filter(move |region| region.owner == owner);
        of.map(|region| region.block)
    };
    if let Some((why, address)) = broken.into_iter().next() {
        return Heap::new(Vec::new(), Coverage::Incomplete { why, address });
    }
    let mut heap = Heap::new(of(Owner::Program).collect(), Coverage::Complete);
    // Blocks in doubt are not judged, and may contain references to others: they count as memory of the program's own.
    heap.in_doubt = of(Owner::InDoubt).collect();
    let holes: Vec<_> = heap.in_doubt.iter().map(Block::range).collect();
    heap.regions = blocks::without(
        &blocks::merged(extents.values().map(Extent::range).collect()),
        &holes,
    );
    let idle = extents.values().filter(|extent| !extent.is_active());
    let free = of(Owner::Free).chain(of(Owner::Cached));
    let free = free.map(|block| block.range());
    heap.free = free.chain(idle.map(Extent::range)).collect();
    heap.free.sort_unstable_by_key(|range| range.start);
    heap
}
