//! Objects of CPython as targets of references.
//!
//! A reference to an object is an address behind the words that CPython keeps before the object: two for the list of
//! its garbage collector, and two for a dictionary and weak references. The list has all objects, and keeps none of
//! them alive. It links the words before the objects, so the addresses of these words are no references.

use crate::heap::names::PythonObject;
use crate::heap::roots::{Root, RootPlace};

use super::{MIDDLE, References};

/// Objects by block.
#[derive(Debug, Default)]
pub(super) struct Objects {
    /// Bytes before the object of each block, a multiple of 16, with flags. Empty if there are no objects.
    heads: Vec<u8>,
}

const IS_OBJECT: u8 = 1;
/// Flag of an object that the collector tracks: the last two words before the object are links of the collector's
/// list.
const HAS_LINKS: u8 = 2;
/// Size of the links, in bytes.
const LINKS: u64 = 16;
/// Mask of the flags that the collector has in the lower bits of a link.
const FLAGS: u64 = 3;

impl Objects {
    pub(super) fn new(blocks: usize, python: &[PythonObject]) -> Self {
        if python.is_empty() {
            return Self::default();
        }
        let mut heads = vec![0; blocks];
        for object in python {
            if let Some(head) = heads.get_mut(object.block) {
                let links = if object.collected && object.head >= LINKS {
                    HAS_LINKS
                } else {
                    0
                };
                *head = object.head as u8 & !15 | IS_OBJECT | links;
            }
        }
        Self { heads }
    }

    fn head(&self, block: usize) -> u8 {
        self.heads.get(block).copied().unwrap_or_default()
    }

    /// Whether the object of a block begins at this offset.
    #[inline]
    pub(super) fn begins(&self, block: usize, offset: u64) -> bool {
        let head = self.head(block);
        head & IS_OBJECT != 0 && offset == u64::from(head & !15)
    }

    /// Whether an address at this offset in a block is that of the links before the block's object.
    #[inline]
    pub(super) fn is_link(&self, block: usize, offset: u64) -> bool {
        let head = self.head(block);
        head & HAS_LINKS != 0 && (offset & !FLAGS) + LINKS == u64::from(head & !15)
    }
}

/// Moves the roots that say little about who holds an object of CPython behind all others, and returns the number of
/// these others: words on stacks, as of CPython's frames, and in registers, and words that refer to an object whose
/// reference count is that of the references in blocks. The latter are in CPython's caches and lists of free objects,
/// also in old entries of these.
pub(super) fn sort_counted_first(
    found: &mut [(Root, u32)],
    rank: impl Fn(Root) -> u8,
    references: &References,
    blocks: usize,
    python: &[PythonObject],
) -> usize {
    if python.is_empty() {
        return found.len();
    }
    let mut rest = vec![u32::MAX; blocks];
    for object in python {
        if let Some(rest) = rest.get_mut(object.block) {
            *rest = object.references;
        }
    }
    for &to in references.to.iter().filter(|&to| to & MIDDLE == 0) {
        let rest = &mut rest[to as usize];
        *rest = rest.saturating_sub(1);
    }
    let is_uncounted = |&(root, to): &(Root, u32)| {
        rank(root) >= RootPlace::RANK_OF_OTHERS || to & MIDDLE == 0 && rest[to as usize] == 0
    };
    found.sort_by_cached_key(is_uncounted);
    found.partition_point(|root| !is_uncounted(root))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{GLOBALS, block, heap, process};
    use super::super::{Class, Reach};
    use super::*;

    /// Makes an object of CPython in each block, with this count of references.
    fn objects(references: &[u32]) -> Vec<PythonObject> {
        let objects = references.iter().enumerate();
        objects
            .map(|(block, &references)| PythonObject {
                block,
                head: 16,
                references,
                collected: true,
            })
            .collect()
    }

    #[test]
    fn a_root_that_no_count_has_is_taken_last() {
        let mut made = process();
        let object = |number: u64| block(number) + 16;
        // 0 refers to 1. An old entry of a list of free objects refers to 1, too.
        made.put(GLOBALS, object(1));
        made.put(GLOBALS + 8, object(0));
        made.put(object(0) + 16, object(1));
        // Only a cache refers to 2, whose count is wrong.
        made.put(GLOBALS + 16, object(2));
        let (image, heap) = (made.image(), heap(3));
        let holders = |count| {
            let reach = Reach::new(&image, &heap, &objects(&[1, count, 0])).expect("few blocks");
            assert_eq!(
                [0, 1, 2].map(|block| reach.class(block)),
                [Class::Reachable; 3]
            );
            reach.chain(1)
        };
        assert_eq!(holders(1), (vec![0], Some(Root::Memory(GLOBALS + 8))));
        assert_eq!(holders(2), (vec![], Some(Root::Memory(GLOBALS))));
    }

    #[test]
    fn the_collectors_list_holds_nothing_and_cycles_are_no_loss() {
        use Class::{Cycle, Reachable, Unreachable, UnreachableVia};
        let mut made = process();
        // The list links all objects, from a global on, and back, with flags in the links.
        made.put(GLOBALS, block(0));
        for number in 0..7 {
            made.put(block(number), block(number + 1));
            made.put(block(number + 1) + 8, block(number) | 3);
        }
        let object = |number: u64| block(number) + 16;
        // A global refers to 0. 1 and 2 are a cycle that refers to 3. 4 was lost with 5. 6 is a cycle that 4 refers
        // to.
        made.put(GLOBALS + 8, object(0));
        for (from, to) in [(1, 2), (2, 1), (2, 3), (4, 5), (4, 6)] {
            made.put(object(from) + 16 + 8 * (to % 3), object(to));
        }
        made.put(object(6) + 16, object(6));
        let (image, heap) = (made.image(), heap(7));
        let python = objects(&[1, 1, 1, 1, 1, 1, 2]);
        let reach = Reach::new(&image, &heap, &python).expect("few blocks");
        let classes: Vec<_> = (0..7).map(|block| reach.class(block)).collect();
        let expected = [
            Reachable,
            Cycle,
            Cycle,
            Cycle,
            Unreachable,
            UnreachableVia,
            UnreachableVia,
        ];
        assert_eq!(classes, expected);
        assert_eq!(reach.leaders()[4..], [Some(4); 3]);
        assert_eq!(reach.leaders()[..4], [None; 4]);
        // A count above the number of references: one was never given up.
        let python = objects(&[1, 1, 2, 1, 1, 1, 2]);
        let reach = Reach::new(&image, &heap, &python).expect("few blocks");
        assert_eq!(
            [1, 2, 3].map(|block| reach.class(block)),
            [UnreachableVia, Unreachable, UnreachableVia]
        );
    }
}
