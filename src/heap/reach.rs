//! Search for the blocks that a program can still reach, and for the chains that lead to them: Memcheck's leak check,
//! on an image.
//!
//! Every word in a block that is an address in another block is a reference. A reference takes 4 bytes here. From the
//! [roots] a first flood follows references to the start of blocks. A second flood also follows references into the
//! middle of blocks. A block that neither flood reaches, nor a reference in another form (`disguised`), is lost.
//! Floods go breadth-first, so that the chain by which a block was reached is a shortest one.

mod disguised;
mod lost;
mod python;

use anyhow::{Result, ensure};

use crate::heap::blocks::Heap;
use crate::heap::image::Image;
use crate::heap::names::PythonObject;
use crate::heap::roots::{self, Root, RootPlace};

use python::Objects;

/// Bit that marks a reference into the middle of a block. The other bits are the block's number.
const MIDDLE: u32 = 1 << 31;
/// Bit that marks a root in `Reach::from`. The other bits are the root's number.
const IS_ROOT: u32 = 1 << 31;
/// Largest number of blocks. A block's number has a flag beside it in 32 bits, and is never that of `NOTHING`.
const MAX_BLOCKS: usize = (MIDDLE - 1) as usize;
/// Value in `Reach::from` of a block that was reached from nothing.
const NOTHING: u32 = u32::MAX;
/// Largest difference between an allocator's size of a block and the size that was requested, in bytes. Headers of 16
/// bytes share 8 with the next chunk, and the smallest has 24.
const SLACK: u64 = 24;

/// Whether a program can reach a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// No word refers to the block, except in lost blocks that this block leads.
    Unreachable,
    /// Only a lost block refers to the block.
    UnreachableVia,
    /// Only objects of CPython refer to the block, or it is one of them. CPython's garbage collector will free these
    /// objects, as they are in cycles that nothing else refers to, or CPython never frees them.
    Cycle,
    /// A chain leads to the block, but one of its words refers to the middle of a block, as words of some programs
    /// do, or is not a plain word.
    Interior,
    /// A chain of references to the start of blocks leads to the block.
    Reachable,
}

/// Classes of all blocks, and the chains that reach them. A block is given by its index in [`Heap::blocks`].
#[derive(Debug)]
pub struct Reach {
    classes: Vec<Class>,
    /// Block or root from which each block was reached.
    from: Vec<u32>,
    roots: Vec<Root>,
    references: References,
    objects: Objects,
    /// Whether each block leads a group of lost blocks, as the one that was lost first.
    leads: Vec<bool>,
}

/// Starts of the chains of all blocks ([`Reach::starts`]): the root's number with `IS_ROOT`, or `NOTHING`.
#[derive(Debug)]
pub struct Starts(Vec<u32>);

/// References by the block that contains them.
#[derive(Debug, Default)]
struct References {
    /// Index in `to` at which the references of each block begin, and the end.
    begin: Vec<u64>,
    to: Vec<u32>,
}

impl References {
    fn of(&self, block: u32) -> &[u32] {
        let at = block as usize;
        &self.to[self.begin[at] as usize..self.begin[at + 1] as usize]
    }

    /// Returns the block that a block's reference with this number refers to.
    fn block(&self, block: u32, number: usize) -> u32 {
        self.to[self.begin[block as usize] as usize + number] & !MIDDLE
    }
}

impl Reach {
    /// Finds the class of each block. This takes 4 bytes for each reference and 23 for each block. `python` are the
    /// objects of CPython ([`Names::python`](crate::heap::names::Names::python)), if there are any.
    ///
    /// # Errors
    /// If there are more than 2^31 - 1 blocks, which is 64 GB of the smallest ones. Without all blocks, those that
    /// only the others refer to would be called lost.
    pub fn new(image: &Image, heap: &Heap, python: &[PythonObject]) -> Result<Self> {
        let count = heap.blocks().len();
        expect_numbers(count)?;
        let objects = Objects::new(count, python);
        let words = Words {
            image,
            heap,
            objects: &objects,
        };
        let mut found = words.roots();
        let mut reach = Self {
            classes: vec![Class::Unreachable; count],
            from: vec![NOTHING; count],
            roots: Vec::new(),
            references: words.references(),
            leads: vec![false; count],
            objects,
        };
        let rank = |root: Root| roots::place(image, root).rank();
        found.sort_by_cached_key(|&(root, _)| rank(root));
        // What counts as a reference comes first, as only that says who holds an object of CPython.
        let counted =
            python::sort_counted_first(&mut found, rank, &reach.references, count, python);
        reach.roots = found.iter().map(|&(root, _)| root).collect();
        reach.flood(&found[..counted], Class::Reachable);
        reach.flood(&found, Class::Reachable);
        reach.flood(&found, Class::Interior);
        reach.flood_disguised(image, heap);
        reach.gather_lost(image, heap, python);
        Ok(reach)
    }

    /// Returns the class of a block: whether it can be reached.
    pub fn class(&self, block: usize) -> Class {
        self.classes[block]
    }

    /// Returns the number of references from one block to another, without those of a block to itself.
    pub fn references(&self) -> usize {
        self.references.to.len()
    }

    /// Returns the blocks by which a block is reached, the nearest first, and the root where the chain begins. The
    /// chain of a lost block has no root, and its last block is the one that was lost first.
    pub fn chain(&self, block: usize) -> (Vec<usize>, Option<Root>) {
        let chain = self.nearest(block, self.from.len() + 1);
        let root = self.root(self.from[*chain.last().unwrap_or(&block)]);
        (chain, root)
    }

    /// Returns the root at which a chain begins, by the root's number with `IS_ROOT`; None for `NOTHING`.
    fn root(&self, start: u32) -> Option<Root> {
        (start != NOTHING).then(|| self.roots[(start & !IS_ROOT) as usize])
    }

    /// Returns the blocks by which a block is reached, the nearest first, `most` at most. The chain through a long
    /// list can have millions.
    pub fn nearest(&self, block: usize, most: usize) -> Vec<usize> {
        let after = |&at: &u32| Some(self.from[at as usize]).filter(|at| at & IS_ROOT == 0);
        let first = Some(self.from[block]).filter(|at| at & IS_ROOT == 0);
        let chain = std::iter::successors(first, after).take(most);
        chain.map(|at| at as usize).collect()
    }

    /// Finds where the chains of all blocks begin, all at once: many chains have most of a long list in common. This
    /// takes 4 bytes for each block.
    pub fn starts(&self) -> Starts {
        let mut starts = vec![0; self.from.len()];
        for block in 0..self.from.len() {
            let mut at = block;
            while starts[at] == 0 && self.from[at] & IS_ROOT == 0 {
                at = self.from[at] as usize;
            }
            let start = match starts[at] {
                0 => self.from[at],
                known => known,
            };
            let mut at = block;
            while starts[at] == 0 {
                starts[at] = start;
                if self.from[at] & IS_ROOT == 0 {
                    at = self.from[at] as usize;
                }
            }
        }
        Starts(starts)
    }

    /// Returns the root where the chain of a block begins; None if the block is lost.
    pub fn start(&self, starts: &Starts, block: usize) -> Option<Root> {
        self.root(starts.0[block])
    }

    /// Returns for each lost block its leader: the block that it was lost with, or itself. All other blocks have
    /// None.
    pub fn leaders(&self) -> Vec<Option<u32>> {
        let mut leaders: Vec<Option<u32>> = (0..)
            .zip(&self.classes)
            .map(|(number, &class)| (class == Class::Unreachable).then_some(number))
            .collect();
        let mut path = Vec::new();
        for block in 0..self.classes.len() {
            let mut at = block;
            while self.classes[at] == Class::UnreachableVia && leaders[at].is_none() {
                path.push(at);
                at = self.from[at] as usize;
            }
            let leader = leaders[at];
            path.drain(..).for_each(|on_way| leaders[on_way] = leader);
        }
        leaders
    }

    /// Returns the blocks that refer to this one, in order of address.
    pub fn holders(&self, block: usize) -> Vec<usize> {
        let refers = |&from: &usize| {
            let to = self.references.of(from as u32);
            to.iter().any(|&to| (to & !MIDDLE) as usize == block)
        };
        (0..self.classes.len()).filter(refers).collect()
    }

    /// Raises blocks of a lower class to `class`, from the roots on. For [`Class::Reachable`], only references to
    /// starts are followed.
    fn flood(&mut self, found: &[(Root, u32)], class: Class) {
        let follows = |to: u32| class == Class::Interior || to & MIDDLE == 0;
        let mut queue: Vec<u32> = Vec::new();
        if class == Class::Interior {
            let reached = (0..).zip(&self.classes);
            queue.extend(
                reached
                    .filter(|(_, class)| **class == Class::Reachable)
                    .map(|(block, _)| block),
            );
        }
        for (number, &(_, to)) in (0..IS_ROOT - 1).zip(found) {
            if follows(to) {
                self.reach(&mut queue, to & !MIDDLE, class, number | IS_ROOT);
            }
        }
        let mut at = 0;
        while let Some(&block) = queue.get(at) {
            let range =
                self.references.begin[block as usize]..self.references.begin[block as usize + 1];
            for edge in range {
                let to = self.references.to[edge as usize];
                if follows(to) {
                    self.reach(&mut queue, to & !MIDDLE, class, block);
                }
            }
            at += 1;
        }
    }

    fn reach(&mut self, queue: &mut Vec<u32>, block: u32, class: Class, from: u32) {
        let at = block as usize;
        if self.classes[at] < class {
            self.classes[at] = class;
            self.from[at] = from;
            queue.push(block);
        }
    }
}

/// Fails if there are more blocks than numbers for them.
fn expect_numbers(blocks: usize) -> Result<()> {
    ensure!(
        blocks <= MAX_BLOCKS,
        "the process has {blocks} blocks, and at most {MAX_BLOCKS} can be classified; heapscan --layout and --types classify none"
    );
    Ok(())
}

/// Interpreter of the words of an image as references.
struct Words<'a> {
    image: &'a Image,
    heap: &'a Heap,
    objects: &'a Objects,
}

impl Words<'_> {
    /// Returns a reference to the block that contains the address `word`; None if no block does.
    #[inline]
    fn reference(&self, word: u64) -> Option<u32> {
        let (block, offset) = self.heap.block_at(word)?;
        if self.objects.is_link(block, offset) {
            return None;
        }
        let is_start = offset == 0
            || self.objects.begins(block, offset)
            || means_start(self.image, self.heap, block, offset);
        Some(block as u32 | if is_start { 0 } else { MIDDLE })
    }

    /// Returns the references of all blocks. Blocks are in order, and so are their references, without sorting.
    fn references(&self) -> References {
        let mut references = References::default();
        references.begin.reserve_exact(self.heap.blocks().len() + 1);
        references.begin.push(0);
        for (number, block) in (0..).zip(self.heap.blocks()) {
            let begin = references.to.len();
            for (_, word) in self.image.words(block.range()) {
                let Some(to) = self.reference(word) else {
                    continue;
                };
                // Neighbouring words often refer to the same block: rows of a table, members of an object.
                let is_known = references.to[begin..].last() == Some(&to);
                if to & !MIDDLE != number && !is_known {
                    references.to.push(to);
                }
            }
            references.begin.push(references.to.len() as u64);
        }
        references
    }

    /// Returns for each block the first root that refers to its start, and the first that refers into its middle.
    /// Memory is searched first, in order of address, then mapped files, then the words in the kernel, then the registers.
    fn roots(&self) -> Vec<(Root, u32)> {
        let image = self.image;
        let mut found = Vec::new();
        let mut known = vec![[false; 2]; self.heap.blocks().len()];
        let mut look = |root: Root, word: u64| {
            let Some(to) = self.reference(word) else {
                return;
            };
            let known = &mut known[(to & !MIDDLE) as usize][usize::from(to & MIDDLE != 0)];
            if !*known {
                *known = true;
                found.push((root, to));
            }
        };
        for range in roots::root_ranges(&roots::excluded_ranges(image, self.heap)) {
            for (address, word) in image.words(range) {
                look(Root::Memory(address), word);
            }
        }
        let words = image.file_words.words.iter();
        for &(address, word) in words.filter(|(address, _)| address.is_multiple_of(8)) {
            look(Root::Memory(address), word);
        }
        for (number, kept) in (0..).zip(&image.kernel_words) {
            look(Root::Kernel(number), kept.word);
        }
        for (number, thread) in (0..).zip(&image.threads) {
            for (name, word) in thread.words() {
                look(Root::Register(number, name), word);
            }
        }
        found
    }
}

/// Whether an address in the middle of a block counts as its start, by Memcheck's heuristics: behind the length that
/// a library keeps before its blocks (length64), or behind the number of an array's objects (newarray); in a string
/// with its length before (stdstring); at a further base of an object, which has another vtable
/// (multipleinheritance).
fn means_start(image: &Image, heap: &Heap, block: usize, offset: u64) -> bool {
    let block = heap.blocks()[block];
    let word = |offset: u64| image.word(block.address + offset).unwrap_or_default();
    let aligned = block.address.is_multiple_of(8) && offset.is_multiple_of(8);
    if !aligned || offset.saturating_add(8) > block.size {
        return false;
    }
    let first = word(0);
    let rest = block.size - 8;
    if offset == 8 && (1..=rest).contains(&first) {
        let length64 = rest - first <= SLACK;
        let mut sizes = rest.saturating_sub(SLACK).max(first)..=rest;
        return length64 || sizes.any(|size| size % first == 0);
    }
    if offset == 24 {
        let capacity = word(8);
        return first <= capacity && capacity.saturating_add(offset + 1) <= block.size;
    }
    let is_vtable = |word: u64| {
        word != 0
            && image
                .area(word)
                .is_some_and(|area| area.has_file() && !area.writable)
    };
    is_vtable(first) && is_vtable(word(offset))
}

/// Returns the place where the chain of a block begins, and the blocks between, if the block is reached.
pub fn origin(image: &Image, reach: &Reach, block: usize) -> Option<(RootPlace, Vec<usize>)> {
    let (chain, root) = reach.chain(block);
    Some((roots::place(image, root?), chain))
}

#[cfg(test)]
mod tests;
