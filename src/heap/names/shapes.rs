//! Buffers of libstdc++'s strings, vectors, deques and hash tables, by the object that holds them.
//!
//! A buffer does not describe itself. The words around the pointer to the buffer do: an object of the library has its
//! fields in a fixed order, and they must agree with each other, with the size of the block and with the content of
//! the block.

use std::cell::Cell;

use crate::heap::blocks::{Block, Heap};
use crate::heap::names::Shape;
use crate::heap::names::memory::Memory;
use crate::heap::names::rtti::Classes;

/// Largest number of bytes of a string's text that are looked at.
const MAX_TEXT: u64 = 64;
/// Number of characters that a string holds without a block.
const SHORT_STRING: u64 = 15;
/// Limit on the buckets and nodes that are followed, for each block of the heap. Hash tables that claim the nodes of
/// others cost no more than that.
const STEPS_PER_BLOCK: usize = 16;

/// Search for the shapes of blocks, by the objects that hold them.
pub(super) struct Shapes<'a> {
    memory: Memory<'a>,
    heap: &'a Heap,
    classes: &'a Classes<'a>,
    /// Steps that may still be taken along the nodes of hash tables.
    steps: Cell<usize>,
}

impl<'a> Shapes<'a> {
    pub(super) fn new(memory: Memory<'a>, heap: &'a Heap, classes: &'a Classes<'a>) -> Self {
        Self {
            memory,
            heap,
            classes,
            steps: Cell::new(heap.blocks().len().saturating_mul(STEPS_PER_BLOCK)),
        }
    }

    /// Looks at the object around the word at `place`, which points at the start of the block `target`. Calls `found`
    /// with each block whose shape this object proves, by number.
    pub(super) fn at(&self, place: u64, target: u32, mut found: impl FnMut(u32, Shape)) {
        let block = self.heap.blocks()[target as usize];
        if self.is_string(place, block) {
            found(target, Shape::String);
        } else if self.is_vector(place, block) {
            found(target, Shape::Vector);
        } else if let Some(nodes) = self.deque(place, block) {
            found(target, Shape::DequeMap);
            nodes
                .into_iter()
                .for_each(|node| found(node, Shape::DequeNode));
        } else if let Some(nodes) = self.hash_table(place, block) {
            found(target, Shape::HashBuckets);
            nodes
                .into_iter()
                .for_each(|node| found(node, Shape::HashNode));
        }
    }

    /// Whether `place` has `{ pointer, length, capacity }` of a string, with a NUL at the length, and a block of that
    /// capacity.
    fn is_string(&self, place: u64, block: Block) -> bool {
        let Some([length, capacity]) = self.memory.words(place + 8) else {
            return false;
        };
        if capacity <= SHORT_STRING || length > capacity || !fits(block, capacity.saturating_add(1))
        {
            return false;
        }
        let mut text = [0; MAX_TEXT as usize];
        let text = &mut text[..length.min(MAX_TEXT) as usize];
        let mut end = [1];
        self.memory.read(block.address + length, &mut end)
            && end == [0]
            && self.memory.read(block.address, text)
            && text.iter().all(|&byte| byte >= b'\t')
    }

    /// Whether `place` has `{ begin, end, end of capacity }` of a vector, and a block of that capacity. A deque's
    /// iterator and the buffer of a stream have three such words, too.
    fn is_vector(&self, place: u64, block: Block) -> bool {
        let Some([end, limit]) = self.memory.words(place + 8) else {
            return false;
        };
        let capacity = limit.wrapping_sub(block.address);
        let is_within = block.address <= end && end <= limit && capacity > 0;
        if !is_within || !fits(block, capacity) {
            return false;
        }
        // In a deque's iterator, the fourth word points at a word with the address of the node.
        let node = self.memory.word(place + 24).unwrap_or(0);
        let is_iterator = self.memory.word(node) == Some(block.address);
        let begins = |distance: u64| {
            let before = place.checked_sub(distance);
            let word = before.and_then(|before| self.memory.word(before));
            word.is_some_and(|word| self.classes.is_stream_buffer(word))
        };
        !is_iterator && !begins(8) && !begins(32) && !self.is_in_stdio_file(place)
    }

    /// Whether a place is among the pointers of a stdio stream (`FILE`) of glibc, which follow a word with a magic
    /// number in its upper half.
    fn is_in_stdio_file(&self, place: u64) -> bool {
        const MAGIC: u64 = 0xfbad;
        const POINTERS: u64 = 11;
        (1..=POINTERS).any(|before| {
            let flags = place.checked_sub(8 * before);
            let flags = flags.and_then(|flags| self.memory.word(flags));
            flags.is_some_and(|flags| flags >> 16 & 0xffff == MAGIC)
        })
    }

    /// Returns the numbers of the nodes of a deque at `place`: `{ map, its size, begin, end }`, where begin and end
    /// are `{ current, first, last, node }`.
    fn deque(&self, place: u64, map: Block) -> Option<Vec<u32>> {
        let [size, begin, first, last, node] = self.memory.words(place + 8)?;
        let [end, end_first, end_last, end_node] = self.memory.words(place + 48)?;
        let map_bytes = size
            .checked_mul(8)
            .filter(|&bytes| bytes > 0 && fits(map, bytes))?;
        let map_end = map.address + map_bytes;
        let is_map = map.address <= node && node <= end_node && end_node < map_end;
        let is_place = node.is_multiple_of(8) && end_node.is_multiple_of(8);
        let node_bytes = last.checked_sub(first).filter(|&bytes| bytes > 0)?;
        let agrees = end_last.checked_sub(end_first) == Some(node_bytes)
            && (first..last).contains(&begin)
            && (end_first..end_last).contains(&end)
            && (begin <= end || node < end_node)
            && self.memory.word(node) == Some(first)
            && self.memory.word(end_node) == Some(end_first);
        if !(is_map && is_place && agrees) {
            return None;
        }
        let places = (node..=end_node).step_by(8);
        places
            .map(|place| self.heap.starting_at(self.memory.word(place)?, node_bytes))
            .collect()
    }

    /// Returns the numbers of the nodes of a hash table at `place`:
    /// `{ buckets, their number, first node, nodes, maximal load factor }`. As many nodes must follow from the first
    /// one on, and each bucket that is not empty must point at one of them, or at the place of the first.
    fn hash_table(&self, place: u64, buckets: Block) -> Option<Vec<u32>> {
        let [count, first, nodes, load_factor] = self.memory.words(place + 8)?;
        let load_factor = f32::from_bits(load_factor as u32);
        let is_table =
            fits(buckets, count.checked_mul(8)?) && nodes <= self.heap.blocks().len() as u64;
        if !is_table || !(0.01..=100.0).contains(&load_factor) {
            return None;
        }
        self.step(nodes as usize + count as usize)?;
        let (mut node, mut numbers) = (first, Vec::new());
        while node != 0 && numbers.len() < nodes as usize {
            numbers.push(self.heap.starting_at(node, 16)?);
            node = self.memory.word(node)?;
        }
        if node != 0 || numbers.len() as u64 != nodes {
            return None;
        }
        let mut known = numbers.clone();
        known.sort_unstable();
        let mut used = 0;
        for bucket in 0..count {
            let word = self.memory.word(buckets.address + 8 * bucket)?;
            used += u64::from(word != 0);
            let is_known = || {
                let node = self.heap.starting_at(word, 16);
                word == place + 16 || node.is_some_and(|node| known.binary_search(&node).is_ok())
            };
            if word != 0 && !is_known() {
                return None;
            }
        }
        (used <= nodes && (used > 0) == (nodes > 0)).then_some(numbers)
    }

    /// Takes this many steps. Returns None if fewer are left.
    fn step(&self, steps: usize) -> Option<()> {
        self.steps.set(self.steps.get().checked_sub(steps)?);
        Some(())
    }
}

/// Whether a block may be of a request of this many bytes. Allocators round a request up to the next size class:
/// glibc by less than 16 bytes, a header, and a remainder too small to split; jemalloc by a quarter.
pub(super) fn fits(block: Block, bytes: u64) -> bool {
    let rounded = 39.max(bytes / 4);
    bytes <= block.size && block.size - bytes <= rounded
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::names::memory::sample::{self, FakeProcess};

    const HEAP: u64 = 0x10_0000;
    const STACK: u64 = 0x7000_0000;

    /// Makes memory for blocks, and a stack.
    fn memory() -> FakeProcess {
        let mut sample = FakeProcess::default();
        sample.anonymous(HEAP, 0x10000);
        sample.anonymous(STACK, 0x1000);
        sample
    }

    fn at(number: u64) -> u64 {
        HEAP + number * 0x1000
    }

    /// Returns the shapes of blocks of these sizes. Words on the stack, the first of which points at block 0, prove
    /// the shapes.
    fn told(sample: &FakeProcess, sizes: &[u64]) -> Vec<(u32, Shape)> {
        let blocks: Vec<_> = (0..).map(at).zip(sizes.iter().copied()).collect();
        let (heap, mut told) = (sample::heap(&blocks), Vec::new());
        sample.with(|memory| {
            let classes = Classes::new(memory);
            let shapes = Shapes::new(memory, &heap, &classes);
            shapes.at(STACK + 0x40, 0, |block, shape| told.push((block, shape)));
        });
        told
    }

    #[test]
    fn a_string_agrees_with_its_block_and_its_text() {
        let mut sample = memory();
        sample.string(at(0), b"a text of some twenty");
        let words = |length, capacity| [at(0), length, capacity];
        sample.words(STACK + 0x40, &words(21, 30));
        assert_eq!(told(&sample, &[40]), [(0, Shape::String)]);
        assert_eq!(told(&sample, &[24]), []);
        assert_eq!(told(&sample, &[80]), []);
        for wrong in [
            words(20, 30),
            words(31, 30),
            words(21, 15),
            words(21, u64::MAX),
        ] {
            sample.words(STACK + 0x40, &wrong);
            assert_eq!(told(&sample, &[40]), [], "{wrong:x?}");
        }
        sample.words(STACK + 0x40, &words(21, 30));
        sample.bytes(at(0) + 3, &[1]);
        assert_eq!(told(&sample, &[40]), []);
    }

    #[test]
    fn a_vector_is_neither_a_stream_nor_an_iterator() {
        let mut sample = memory();
        let words = |length, capacity| [at(0), at(0) + length, at(0) + capacity];
        sample.words(STACK + 0x40, &words(24, 96));
        assert_eq!(told(&sample, &[104]), [(0, Shape::Vector)]);
        assert_eq!(told(&sample, &[200]), []);
        for wrong in [words(100, 96), words(24, 0), words(24, 112)] {
            sample.words(STACK + 0x40, &wrong);
            assert_eq!(told(&sample, &[104]), [], "{wrong:x?}");
        }
        // A deque's iterator: the first element, the node's start and end, and the place of the node's address in the
        // map.
        sample.words(STACK + 0x40, &[at(0), at(0), at(0) + 512, at(1) + 24]);
        assert_eq!(told(&sample, &[520]), [(0, Shape::Vector)]);
        sample.words(at(1) + 24, &[at(0)]);
        assert_eq!(told(&sample, &[520]), []);
        // The buffer of a stream of stdio: the base, the place and the end for writing.
        sample.words(at(1) + 24, &[0]);
        sample.words(STACK + 0x40, &words(24, 1024));
        assert_eq!(told(&sample, &[1032]), [(0, Shape::Vector)]);
        sample.words(STACK + 0x20, &[0xfbad_2a84]);
        assert_eq!(told(&sample, &[1032]), []);
    }

    #[test]
    fn a_deque_knows_its_nodes() {
        let mut sample = memory();
        sample.words(at(0) + 24, &[at(1), at(2)]);
        let begin = [at(1) + 8, at(1), at(1) + 512, at(0) + 24];
        let end = [at(2) + 8, at(2), at(2) + 512, at(0) + 32];
        sample.words(STACK + 0x40, &[&[at(0), 8][..], &begin, &end].concat());
        let expected = [
            (0, Shape::DequeMap),
            (1, Shape::DequeNode),
            (2, Shape::DequeNode),
        ];
        assert_eq!(told(&sample, &[72, 520, 520]), expected);
        assert_eq!(told(&sample, &[72, 520, 24]), []);
        sample.words(at(0) + 32, &[at(1)]);
        assert_eq!(told(&sample, &[72, 520, 520]), []);
    }

    #[test]
    fn a_hash_table_knows_all_of_its_nodes() {
        let mut sample = memory();
        let load_factor = u64::from(1.0_f32.to_bits());
        sample.words(STACK + 0x40, &[at(0), 3, at(1), 2, load_factor]);
        sample.words(at(0), &[at(1), STACK + 0x50]);
        sample.words(at(1), &[at(2)]);
        let expected = [
            (0, Shape::HashBuckets),
            (1, Shape::HashNode),
            (2, Shape::HashNode),
        ];
        assert_eq!(told(&sample, &[24, 24, 24]), expected);
        // A node too many, one too few, a bucket of another container, and a ring.
        for (place, word) in [
            (at(1), 0),
            (at(2), at(3)),
            (at(0) + 16, at(3)),
            (at(2), at(1)),
        ] {
            let mut wrong = FakeProcess::default();
            wrong.made = sample.made.clone();
            wrong.words(place, &[word]);
            assert_eq!(told(&wrong, &[24, 24, 24, 24]), [], "{place:x} {word:x}");
        }
        sample.words(STACK + 0x40, &[at(0), 3, at(1), 1 << 60, load_factor]);
        assert_eq!(told(&sample, &[24, 24, 24]), []);
    }
}
