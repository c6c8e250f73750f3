//! References that are not plain words at multiples of 8.
//!
//! Only blocks that plain words do not reach are looked for in these forms, before they are called lost. All of these
//! forms are rare, and a number in such a form looks like an address by chance more often:
//!
//! - at addresses that are no multiple of 8: in packed structures, such as arrays of `struct epoll_event` (12 bytes
//!   each);
//! - with other data in the bits that are above an address: tagged pointers, values in NaNs;
//! - 8 or 4 bytes before a block, as pointers to arrays that are counted from 1, or one byte behind it, as the end of a
//!   range that begins elsewhere;
//! - as an integer of CPython, in digits of 30 bits, as ctypes and cffi give an address to a Python program.

use std::ops::Range;

use super::{Class, IS_ROOT, Reach};
use crate::heap::blocks::{Allocator, Heap};
use crate::heap::file_words::ADDRESS;
use crate::heap::image::Image;
use crate::heap::roots::{self, Root};

/// Largest distance of an address before a block that refers to the block, in bytes.
const BEFORE: u64 = 8;

impl Reach {
    /// Reaches lost blocks by references in other forms, and then the blocks that these refer to.
    pub(super) fn flood_disguised(&mut self, image: &Image, heap: &Heap) {
        let Some(lost) = self.lost_addresses(heap) else {
            return;
        };
        let mut queue = Vec::new();
        let ranges = roots::excluded_ranges(image, heap);
        let in_memory =
            roots::root_ranges(&ranges).flat_map(|range| disguised(image, range, &lost));
        let in_files = image.file_words.words.iter().map(|&(at, word)| {
            if at.is_multiple_of(8) {
                Disguised {
                    at,
                    address: word & ADDRESS,
                    is_plain: word <= ADDRESS,
                }
            } else {
                Disguised {
                    at,
                    address: word,
                    is_plain: false,
                }
            }
        });
        for found in in_memory.chain(in_files) {
            for block in self.lost_blocks(heap, found).into_iter().flatten() {
                let root = self.roots.len() as u32 | IS_ROOT;
                self.roots.push(Root::Memory(found.at));
                self.reach(&mut queue, block, Class::Interior, root);
            }
        }
        let reached = (0..).zip(&self.classes);
        let reached = reached.filter(|(_, class)| **class >= Class::Interior);
        queue = reached.map(|(block, _)| block).collect();
        let mut at = 0;
        while let Some(&block) = queue.get(at) {
            for edge in 0..self.references.of(block).len() {
                let to = self.references.block(block, edge);
                self.reach(&mut queue, to, Class::Interior, block);
            }
            for found in disguised(image, heap.blocks()[block as usize].range(), &lost) {
                for to in self.lost_blocks(heap, found).into_iter().flatten() {
                    self.reach(&mut queue, to, Class::Interior, block);
                }
            }
            at += 1;
        }
    }

    /// Returns the range from the first to the last address of lost blocks, and near these; None if no block is lost.
    fn lost_addresses(&self, heap: &Heap) -> Option<Range<u64>> {
        let is_lost = |block: &usize| self.classes[*block] < Class::Interior;
        let first = (0..self.classes.len()).find(is_lost)?;
        let last = (0..self.classes.len()).rfind(is_lost)?;
        let start = heap.blocks()[first].address.saturating_sub(BEFORE);
        Some(start..heap.blocks()[last].range().end.saturating_add(1))
    }

    /// Returns the lost blocks that an address refers to: the one that contains it, the one that begins behind it, and
    /// the one that ends before it.
    fn lost_blocks(&self, heap: &Heap, found: Disguised) -> [Option<u32>; 3] {
        let address = found.address;
        let inside = self.lost_block(heap, address);
        // jemalloc's blocks have no headers: the end of one is the start, maybe a stale one, of the next.
        let touches = |one: &Allocator| one.name.starts_with("jemalloc");
        if !found.is_plain
            || heap.block_at(address).is_some()
            || heap.allocators.iter().any(touches)
        {
            return [inside, None, None];
        }
        let before = address + if address % BEFORE == 4 { 4 } else { BEFORE };
        let behind = |at: u64, is_near: fn(u64, u64) -> bool| {
            let (block, offset) = heap.block_at(at)?;
            let is_near = is_near(offset, heap.blocks()[block].size);
            is_near.then(|| self.lost_block(heap, at)).flatten()
        };
        [
            inside,
            behind(before, |offset, _| offset == 0),
            behind(address.wrapping_sub(1), |offset, size| offset + 1 == size),
        ]
    }

    fn lost_block(&self, heap: &Heap, word: u64) -> Option<u32> {
        let (block, offset) = heap.block_at(word)?;
        let class = self.classes.get(block)?;
        let is_reference = *class < Class::Interior && !self.objects.is_link(block, offset);
        is_reference.then_some(block as u32)
    }
}

/// Address that was found in some form.
#[derive(Debug, Clone, Copy)]
struct Disguised {
    /// Address at which the word is.
    at: u64,
    address: u64,
    /// Whether the word is the address and nothing else, at a multiple of 8.
    is_plain: bool,
}

/// Iterates over the addresses within `wanted` that are disguised in a range.
fn disguised(
    image: &Image,
    range: Range<u64>,
    wanted: &Range<u64>,
) -> impl Iterator<Item = Disguised> {
    let runs = image.copied();
    let first = runs.partition_point(|run| run.end <= range.start);
    let runs = runs[first..]
        .iter()
        .take_while(move |run| run.start < range.end);
    let words = runs.flat_map(move |run| {
        let start = run.start.max(range.start);
        let bytes = image.bytes(start..run.end.min(range.end));
        let words = bytes.unwrap_or_default().windows(8);
        let words = words.filter_map(|word| word.first_chunk());
        (start..).zip(words.map(|word| u64::from_le_bytes(*word)))
    });
    let meanings = words.flat_map(|(at, word)| {
        let is_word = at.is_multiple_of(8);
        let meanings = if is_word {
            [word & ADDRESS, digits(word)]
        } else {
            [word, 0]
        };
        meanings.map(|address| Disguised {
            at,
            address,
            is_plain: is_word && address == word,
        })
    });
    meanings.filter(|found| wanted.contains(&found.address))
}

/// Returns the number that two digits of a Python integer make; 0 if the word does not hold two digits.
fn digits(word: u64) -> u64 {
    const DIGIT: u64 = 1 << 30;
    let (low, high) = (word & 0xffff_ffff, word >> 32);
    if low < DIGIT && high < DIGIT {
        high << 30 | low
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{GLOBALS, block, heap, process};
    use super::*;
    use crate::heap::blocks::{Block, Coverage};

    #[test]
    fn packed_structures_hold_what_nothing_else_does() {
        use Class::{Interior, Reachable, Unreachable};
        let mut made = process();
        // A packed global structure refers to block 0, and block 0 to block 1, which refers to 2 in a packed
        // structure.
        made.put(GLOBALS + 0x21, block(0));
        made.put(block(0) + 16, block(1));
        made.put(block(1) + 20, block(2) + 8);
        // The structure that refers to 3 is in a lost block, and that for 4 in a free chunk.
        made.put(block(5) + 4, block(3));
        made.put(block(0) + 131, block(4));
        made.put(GLOBALS + 0x40, block(6));
        let (image, heap) = (made.image(), heap(7));
        let reach = Reach::new(&image, &heap, &[]).expect("few blocks");
        let classes: Vec<_> = (0..7).map(|block| reach.class(block)).collect();
        assert_eq!(classes[..3], [Interior; 3]);
        assert_eq!(classes[3..6], [Unreachable; 3]);
        assert_eq!(classes[6], Reachable);
        assert_eq!(
            (reach.chain(2), reach.chain(3)),
            (
                (vec![1, 0], Some(Root::Memory(GLOBALS + 0x21))),
                (vec![], None)
            )
        );
    }

    #[test]
    fn addresses_close_to_a_block_hold_it() {
        for (word, expected) in [
            (block(0) - 8, Class::Interior),
            (block(0) - 4, Class::Interior),
            (block(0) + 64, Class::Interior),
            (block(0) - 16, Class::Unreachable),
            (block(0) - 1, Class::Unreachable),
            (block(0) + 65, Class::Unreachable),
            (block(0) + 72, Class::Unreachable),
        ] {
            let mut made = process();
            made.put(GLOBALS, word);
            let image = made.image();
            let reach = Reach::new(&image, &heap(1), &[]).expect("few blocks");
            assert_eq!(reach.class(0), expected, "{word:#x}");
            let mut in_a_file = process().image();
            in_a_file.file_words.words = vec![(0x70_0000, word)];
            let reach = Reach::new(&in_a_file, &heap(1), &[]).expect("few blocks");
            assert_eq!(reach.class(0), expected, "{word:#x}");
        }
        let mut in_a_file = process().image();
        in_a_file.file_words.words = vec![(0x70_0000, block(0)), (0x70_0009, block(1))];
        let reach = Reach::new(&in_a_file, &heap(3), &[]).expect("few blocks");
        let classes = [0, 1, 2].map(|block| reach.class(block));
        assert_eq!(
            classes,
            [Class::Reachable, Class::Interior, Class::Unreachable]
        );
        assert_eq!(reach.chain(0).1, Some(Root::Memory(0x70_0000)));
    }

    #[test]
    fn integers_of_python_hold_blocks() {
        const BLOCK: Block = Block {
            address: 0x7f12_3456_7890,
            size: 64,
        };
        assert_eq!(digits(0x7f12_7456_7890), 0);
        let heap = Heap::new(vec![BLOCK], Coverage::Complete);
        let number = |address: u64| address & 0x3fff_ffff | (address >> 30) << 32;
        for (address, expected) in [
            (BLOCK.address, Class::Interior),
            (BLOCK.address + 63, Class::Interior),
            (BLOCK.address + 64, Class::Unreachable),
        ] {
            let mut made = process();
            made.put(GLOBALS, number(address));
            let reach = Reach::new(&made.image(), &heap, &[]).expect("few blocks");
            assert_eq!(reach.class(0), expected, "{address:#x}");
        }
    }

    #[test]
    fn addresses_with_tags_hold_blocks() {
        let mut made = process();
        made.put(GLOBALS, block(0) | 0xfffb << 48);
        made.put(GLOBALS + 16, block(2) << 1);
        let (image, heap) = (made.image(), heap(3));
        let reach = Reach::new(&image, &heap, &[]).expect("few blocks");
        assert_eq!(reach.class(0), Class::Interior);
        assert_eq!(reach.class(2), Class::Unreachable);
    }
}
