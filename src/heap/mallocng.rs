//! Walk of the heap of musl's malloc (mallocng, 1.2.1 and later), by its structures alone.
//!
//! Memory is in groups of slots of one size. The metadata of a group is apart from the group, in an area. Each area
//! begins with a secret, with which the context in the library's data begins, too. There are no thread caches. The
//! walk is complete if the list of areas ends where the context says, if every group refers back to its metadata, and
//! if the slots of each size class add up to the context's own count.

use std::collections::HashSet;

use crate::heap::area::Area;
use crate::heap::blocks::{Allocator, Block, Coverage, Heap};
use crate::heap::image::Image;
use crate::heap::untrusted::word;

/// Size of the slots of each size class, in units of 16 bytes.
const CLASSES: [u64; 48] = [
    1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 18, 20, 25, 31, 36, 42, 50, 63, 72, 84, 102, 127, 146,
    170, 204, 255, 292, 340, 409, 511, 584, 682, 818, 1023, 1169, 1364, 1637, 2047, 2340, 2730,
    3276, 4095, 4680, 5460, 6552, 8191,
];
const UNIT: u64 = 16;
/// Size of a group's metadata, and offset of the first one in its area, in bytes.
const META: u64 = 40;
const FIRST_META: u64 = 24;
/// Largest number of groups of an area, which is a page.
const MAX_METAS: u64 = (4096 - FIRST_META) / META;
/// Offsets in the context: of the shift by which areas grow (`meta_alloc_shift`), and of the address of the first
/// area.
const SHIFT: u64 = 48;
const AREAS: u64 = 56;
/// Value of the context's second word once the context is in use (`init_done`).
const IN_USE: u32 = 1;
/// Largest number of areas that are walked.
const MAX_AREAS: usize = 1 << 20;
/// Bytes between two slots that belong to the allocator.
const BETWEEN: u64 = 4;

/// The allocator's context, in the data of the library or of a static program.
struct Context {
    file: Vec<u8>,
    secret: u64,
    /// Address of the word that refers to the first area. The word that refers to the last area is next, and the
    /// counts follow.
    areas: u64,
}

/// Walks the mallocng heap of a process. Returns None if the process has none.
pub fn walk(image: &Image) -> Option<Heap> {
    let context = context(image)?;
    let mut broken = None;
    let areas = areas(image, &context, &mut broken);
    let (mut groups, mut counted) = (Vec::new(), [0; 48]);
    let (mut slots, most) = (0, image.copied_bytes() / UNIT + (1 << 20));
    for area in &areas {
        let metas = (word(image, area + 16) & 0xffff_ffff).min(MAX_METAS);
        for meta in (0..metas).map(|number| area + FIRST_META + number * META) {
            let memory = word(image, meta + 16);
            if memory == 0 {
                continue;
            }
            match Group::of(image, meta, memory) {
                Some(_) if slots > most => {
                    broken = broken.or(Some(("there are more blocks than memory", memory)));
                }
                Some(group) => {
                    slots += group.slots;
                    if group.freeable
                        && let Some(count) = counted.get_mut(group.class)
                    {
                        *count += group.slots;
                    }
                    groups.push(group);
                }
                None => broken = broken.or(Some(("a group does not refer back", memory))),
            }
        }
    }
    for (class, counted) in (0..).zip(counted) {
        let at = context.areas + 24 + 8 * (48 + class);
        if word(image, at) != counted {
            broken = broken.or(Some(("a size class has other slots than were counted", at)));
        }
    }
    let coverage = broken.map_or(Coverage::Complete, |(why, address)| Coverage::Incomplete {
        why: why.into(),
        address: Some(address),
    });
    if coverage != Coverage::Complete {
        return Some(Heap::new(Vec::new(), coverage));
    }
    Some(heap(image, &context, &groups, coverage))
}

/// Finds the context by its content: a 64-bit secret, the sign that the context is in use, the shift by which areas
/// grow, and the address of a page that begins with the same secret.
fn context(image: &Image) -> Option<Context> {
    // Pages that the program has not written are not in the image, so that large data are searched quickly, too.
    let data = Area::data_of_files(&image.areas, u64::MAX);
    data.into_iter().find_map(|(file, data)| {
        image.words(data).find_map(|(at, secret)| {
            let areas = at + AREAS;
            let first = word(image, areas);
            let is_context = secret > u64::from(u32::MAX)
                && word(image, at + 8) as u32 == IN_USE
                && word(image, at + SHIFT) < 64
                && first != 0
                && first.is_multiple_of(4096)
                && image.word(first) == Some(secret);
            is_context.then(|| Context {
                file: file.to_vec(),
                secret,
                areas,
            })
        })
    })
}

/// Returns the areas, from the first to the last.
fn areas(image: &Image, context: &Context, broken: &mut Option<(&'static str, u64)>) -> Vec<u64> {
    let last = word(image, context.areas + 8);
    let (mut area, mut seen, mut found) = (word(image, context.areas), HashSet::new(), Vec::new());
    while area != 0 && found.len() < MAX_AREAS && seen.insert(area) {
        if !area.is_multiple_of(4096) || image.word(area) != Some(context.secret) {
            break;
        }
        found.push(area);
        area = word(image, area + 8);
    }
    if found.last() != Some(&last) {
        *broken = Some(("the list of areas does not lead to its end", area));
    }
    found
}

/// Group of slots of one size.
struct Group {
    memory: u64,
    slots: u64,
    stride: u64,
    class: usize,
    /// Free slots, as a bit mask.
    free: u32,
    /// Whether the allocator made the group itself. Other groups are leftover memory that the loader has donated.
    freeable: bool,
}

impl Group {
    fn of(image: &Image, meta: u64, memory: u64) -> Option<Self> {
        if !memory.is_multiple_of(UNIT) || image.word(memory) != Some(meta) {
            return None;
        }
        let (masks, bits) = (word(image, meta + 24), word(image, meta + 32));
        let (last, class, pages) = (bits & 31, (bits >> 6 & 63) as usize, bits >> 12);
        let stride = if last == 0 && pages > 0 {
            pages.checked_mul(4096)?.checked_sub(UNIT)?
        } else {
            CLASSES.get(class)? * UNIT
        };
        let slots = last + 1;
        memory.checked_add(UNIT + stride.checked_mul(slots)?)?;
        Some(Self {
            memory,
            slots,
            stride,
            class,
            free: masks as u32 | (masks >> 32) as u32,
            freeable: bits & 32 != 0,
        })
    }

    fn slot(&self, number: u64) -> u64 {
        self.memory + UNIT + number * self.stride
    }

    fn end(&self) -> u64 {
        self.slot(self.slots)
    }
}

fn byte(image: &Image, address: u64) -> u64 {
    word(image, address & !7) >> (8 * (address & 7)) & 0xff
}

/// Returns the block in a slot. The block may begin behind the slot's start, and ends where the size that the program
/// requested ends.
fn block(image: &Image, slot: u64, stride: u64) -> Block {
    let end = slot + stride - BETWEEN;
    let moved = byte(image, slot - 3) == 0xe0;
    let offset = byte(image, slot - 2) | byte(image, slot - 1) << 8;
    let address = if moved {
        (slot + UNIT * offset).min(end)
    } else {
        slot
    };
    let spare = match byte(image, address - 3) >> 5 {
        spare @ 0..5 => spare,
        _ => (0..4).fold(0, |spare, at| spare | byte(image, end - 4 + at) << (8 * at)),
    };
    Block {
        address,
        size: (end - address).saturating_sub(spare),
    }
}

fn heap(image: &Image, context: &Context, groups: &[Group], coverage: Coverage) -> Heap {
    let memory: HashSet<u64> = groups.iter().map(|group| group.memory).collect();
    let (mut blocks, mut free) = (Vec::new(), Vec::new());
    for group in groups {
        for number in 0..group.slots {
            let slot = group.slot(number);
            if group.free >> number & 1 != 0 {
                free.push(slot..slot + group.stride);
            } else {
                let block = block(image, slot, group.stride);
                // A group of small slots may be in a slot of a group of larger ones. Such a slot is no block.
                if !memory.contains(&block.address) {
                    blocks.push(block);
                }
            }
        }
    }
    let mut heap = Heap::new(blocks, coverage);
    heap.allocators = vec![Allocator {
        name: "musl mallocng".into(),
        file: context.file.clone(),
    }];
    let mut regions: Vec<_> = groups
        .iter()
        .map(|group| group.memory..group.end())
        .collect();
    regions.sort_unstable_by_key(|range| (range.start, std::cmp::Reverse(range.end)));
    // The range of a group in another group's slot is part of the other group's range.
    regions.dedup_by(|next, range| next.end <= range.end);
    heap.regions = regions;
    free.sort_unstable_by_key(|range| range.start);
    heap.free = free;
    heap
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::image::made::ImageBuilder;

    #[test]
    fn a_context_in_the_zeros_behind_a_files_data_is_that_of_the_file() {
        const SECRET: u64 = 0x1234_5678_9abc_def0;
        const FIRST: u64 = 0x5000;
        for context in [0x1100, 0x2100] {
            let mut made = ImageBuilder::default();
            made.map(0x1000..0x2000, "rw-p 00001000 fe:00 7 /bin/app");
            made.map(0x2000..0x3000, "rw-p 00000000 00:00 0 ");
            made.map(FIRST..FIRST + 0x1000, "rw-p 00000000 00:00 0 ");
            made.put(context, SECRET);
            made.put(context + 8, IN_USE.into());
            made.put(context + AREAS, FIRST);
            made.put(context + AREAS + 8, FIRST);
            made.put(FIRST, SECRET);
            let heap = walk(&made.image()).expect("a heap");
            assert_eq!(heap.coverage, Coverage::Complete, "{context:#x}");
            assert_eq!(heap.allocators[0].file, b"/bin/app", "{context:#x}");
        }
    }
}
