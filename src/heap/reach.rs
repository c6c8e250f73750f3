//! Which blocks a program can still reach, and through what: Memcheck's question, about an image.
//!
//! Every word in a block that is an address in another block is a reference, of 4 bytes here. From the
//! [roots] a first flood follows references to the start of blocks, a second one those into
//! their middle as well; what neither reaches, nor a reference in another form (`disguised`), is lost.
//! Floods go in breadth, so that the chain which a block was reached by is a shortest one.

mod disguised;
mod lost;
mod python;

use crate::heap::blocks::Heap;
use crate::heap::image::Image;
use crate::heap::names::PythonObject;
use crate::heap::roots::{self, Root, RootPlace};

use python::Objects;

/// Set in a reference into the middle of a block; the rest is the block's number.
const MIDDLE: u32 = 1 << 31;
/// Set in what a block was reached from, if that is a root's number.
const IS_ROOT: u32 = 1 << 31;
/// What was reached from nothing.
const NOTHING: u32 = u32::MAX;
/// Bytes by which an allocator's size may be above what was asked for: headers of 16 bytes share 8 with the
/// next chunk, and the smallest has 24.
const SLACK: u64 = 24;

/// Whether a program can reach a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// No word anywhere refers to it, but for those of lost blocks of which it is the first.
    Unreachable,
    /// Only a lost block refers to it.
    Via,
    /// Only objects of CPython refer to it that its garbage collector will free, being cycles that nothing else
    /// refers to, or that CPython never frees; or it is one of these.
    Cycle,
    /// There is a chain, but somewhere a word refers to the middle of a block, as those of some programs do, or
    /// one is not a plain word.
    Interior,
    /// There is a chain of references to the start of blocks.
    Reachable,
}

/// The classes of all blocks, and what reaches them. Blocks are by their place in [`Heap::blocks`].
#[derive(Debug)]
pub struct Reach {
    classes: Vec<Class>,
    /// What each was reached from: a block, or a root.
    from: Vec<u32>,
    roots: Vec<Root>,
    references: References,
    objects: Objects,
    /// Blocks that were lost first, and others with them.
    leads: Vec<bool>,
}

/// Where the chains of all blocks begin ([`Reach::starts`]): the root's number, with `IS_ROOT`, or `NOTHING`.
#[derive(Debug)]
pub struct Starts(Vec<u32>);

/// References by the block that they are in.
#[derive(Debug, Default)]
struct References {
    /// Where those of each block begin, and the end.
    begin: Vec<u64>,
    to: Vec<u32>,
}

impl References {
    fn of(&self, block: u32) -> &[u32] {
        let at = block as usize;
        &self.to[self.begin[at] as usize..self.begin[at + 1] as usize]
    }

    /// The block that one of a block's references is to, by the number of the reference.
    fn block(&self, block: u32, number: usize) -> u32 {
        self.to[self.begin[block as usize] as usize + number] & !MIDDLE
    }
}

impl Reach {
    /// Finds out what is reached. It takes 4 bytes a reference and 23 a block. `python` are objects of CPython
    /// ([`Names::python`](crate::heap::names::Names::python)), if there are any.
    ///
    /// Blocks beyond the first 2^31 - 1 are left out, which is 64 GB of the smallest.
    pub fn new(image: &Image, heap: &Heap, python: &[PythonObject]) -> Self {
        let count = heap.blocks().len().min((MIDDLE - 1) as usize);
        let objects = Objects::new(count, python);
        let words = Words {
            image,
            heap,
            count,
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
        found.sort_by_cached_key(|&(root, _)| roots::place(image, root).rank());
        reach.roots = found.iter().map(|&(root, _)| root).collect();
        reach.flood(&found, Class::Reachable);
        reach.flood(&found, Class::Interior);
        reach.flood_disguised(image, heap);
        reach.gather_lost(image, heap, python);
        reach
    }

    /// Whether a block can be reached.
    pub fn class(&self, block: usize) -> Class {
        self.classes[block]
    }

    /// References from one block to another, those of a block to itself left out.
    pub fn references(&self) -> usize {
        self.references.to.len()
    }

    /// The blocks by which a block is reached, the nearest first, and the root where the chain begins; no root if
    /// it is lost, and then the last block is the one that was lost first.
    pub fn chain(&self, block: usize) -> (Vec<usize>, Option<Root>) {
        let chain = self.nearest(block, self.from.len() + 1);
        let root = self.root(self.from[*chain.last().unwrap_or(&block)]);
        (chain, root)
    }

    /// The root that a chain begins at, by its number, with `IS_ROOT`; None of `NOTHING`.
    fn root(&self, start: u32) -> Option<Root> {
        (start != NOTHING).then(|| self.roots[(start & !IS_ROOT) as usize])
    }

    /// The blocks by which a block is reached, the nearest first, so many at most: of a list there can be millions.
    pub fn nearest(&self, block: usize, most: usize) -> Vec<usize> {
        let after = |&at: &u32| Some(self.from[at as usize]).filter(|at| at & IS_ROOT == 0);
        let first = Some(self.from[block]).filter(|at| at & IS_ROOT == 0);
        let chain = std::iter::successors(first, after).take(most);
        chain.map(|at| at as usize).collect()
    }

    /// Where the chains of all blocks begin, found at once: many chains have most of a long list in common.
    pub fn starts(&self) -> Starts {
        let mut starts = vec![0; self.from.len()];
        let mut path = Vec::new();
        for block in 0..self.from.len() {
            let mut at = block;
            while starts[at] == 0 {
                starts[at] = self.from[at] | IS_ROOT;
                path.push(at);
                if self.from[at] & IS_ROOT != 0 {
                    break;
                }
                at = self.from[at] as usize;
            }
            let start = starts[at];
            path.drain(..).for_each(|on_way| starts[on_way] = start);
        }
        Starts(starts)
    }

    /// Where the chain of a block begins; None if it is lost.
    pub fn start(&self, starts: &Starts, block: usize) -> Option<Root> {
        self.root(starts.0[block])
    }

    /// For each block the one that it was lost with, itself included; None for what is reached.
    pub fn leaders(&self) -> Vec<Option<u32>> {
        let mut leaders: Vec<Option<u32>> = (0..)
            .zip(&self.classes)
            .map(|(number, &class)| (class == Class::Unreachable).then_some(number))
            .collect();
        let mut path = Vec::new();
        for block in 0..self.classes.len() {
            let mut at = block;
            while self.classes[at] == Class::Via && leaders[at].is_none() {
                path.push(at);
                at = self.from[at] as usize;
            }
            let leader = leaders[at];
            path.drain(..).for_each(|on_way| leaders[on_way] = leader);
        }
        leaders
    }

    /// The blocks that refer to this one, in order of address.
    pub fn holders(&self, block: usize) -> Vec<usize> {
        let refers = |&from: &usize| {
            let to = self.references.of(from as u32);
            to.iter().any(|&to| (to & !MIDDLE) as usize == block)
        };
        (0..self.classes.len()).filter(refers).collect()
    }

    /// Reaches what is not, or not so well: for [`Class::Reachable`] by references to starts only.
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

/// What words are looked for, and what they mean.
struct Words<'a> {
    image: &'a Image,
    heap: &'a Heap,
    /// Blocks that are looked at.
    count: usize,
    objects: &'a Objects,
}

impl Words<'_> {
    /// A reference to the block that a word is an address in.
    #[inline]
    fn reference(&self, word: u64) -> Option<u32> {
        let (block, offset) = self.heap.block_at(word)?;
        if block >= self.count || self.objects.is_link(block, offset) {
            return None;
        }
        let is_start = offset == 0
            || self.objects.begins(block, offset)
            || means_start(self.image, self.heap, block, offset);
        Some(block as u32 | if is_start { 0 } else { MIDDLE })
    }

    /// The references of all blocks. Blocks are in order, and so are these, without sorting.
    fn references(&self) -> References {
        let mut references = References::default();
        references.begin.reserve_exact(self.count + 1);
        references.begin.push(0);
        for (number, block) in (0..self.count as u32).zip(self.heap.blocks()) {
            let begin = references.to.len();
            for (_, word) in self.image.words(block.range()) {
                let Some(to) = self.reference(word) else {
                    continue;
                };
                // Neighbours often refer to the same block: rows of a table, members of an object.
                let is_known = references.to[begin..].last() == Some(&to);
                if to & !MIDDLE != number && !is_known {
                    references.to.push(to);
                }
            }
            references.begin.push(references.to.len() as u64);
        }
        references
    }

    /// The first root of each block that refers to its start, and the first into its middle, in order of address, and
    /// the registers.
    fn roots(&self) -> Vec<(Root, u32)> {
        let image = self.image;
        let mut found = Vec::new();
        let mut known = vec![[false; 2]; self.count];
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
        for range in roots::ranges(&roots::not_roots(image, self.heap)) {
            for (address, word) in image.words(range) {
                look(Root::Memory(address), word);
            }
        }
        for (number, kept) in (0..).zip(&image.kept) {
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

/// Whether an address in the middle of a block is where the program has its start, as Memcheck finds out: behind
/// the length that a library keeps before its blocks (length64), or the number of an array's objects
/// (newarray); in a string with its length before (stdstring); at a further base of an object, where it
/// has another vtable (multipleinheritance).
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

/// A place where a chain begins, and how many blocks are between, for a block that is reached.
pub fn origin(image: &Image, reach: &Reach, block: usize) -> Option<(RootPlace, Vec<usize>)> {
    let (chain, root) = reach.chain(block);
    Some((roots::place(image, root?), chain))
}

#[cfg(test)]
mod tests;
