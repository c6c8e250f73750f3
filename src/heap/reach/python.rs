//! Objects of CPython as targets of references.
//!
//! A reference to an object is an address behind the words that CPython keeps before the object: two for the list of
//! its garbage collector, and two for a dictionary and weak references. The list has all objects, and keeps none of
//! them alive. It links the words before the objects, so the addresses of these words are no references.

use crate::heap::names::PythonObject;

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
