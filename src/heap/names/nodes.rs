//! Nodes of libstdc++'s lists, maps and sets, recognised by their links back and by the container's count.
//!
//! The container's object has a node without an element, and after it the number of nodes with one. This tells a
//! container's nodes from rings and trees of the program's own making: each node is linked back to, and the count is
//! right.

use crate::heap::blocks::Heap;
use crate::heap::names::Shape;
use crate::heap::names::memory::Memory;

/// Color of red nodes, and of a tree's header.
const RED: u32 = 0;
/// Color of black nodes.
const BLACK: u32 = 1;

/// Calls `found` with the number of each block that is a node, its shape, and the address of the container's own
/// node.
pub(super) fn find(memory: Memory<'_>, heap: &Heap, mut found: impl FnMut(u32, Shape, u64)) {
    let nodes = Nodes { memory, heap };
    let mut in_ring = vec![false; heap.blocks().len()];
    for (number, block) in heap.blocks().iter().enumerate() {
        if block.size >= 24
            && !in_ring[number]
            && let Some(ring) = nodes.ring(block.address, &mut in_ring)
        {
            let elements = ring.nodes.into_iter();
            elements.for_each(|node| found(node, Shape::ListNode, ring.container));
        }
        if block.size >= 40
            && let Some(tree) = nodes.tree(block.address)
        {
            let elements = tree.nodes.into_iter();
            elements.for_each(|node| found(node, Shape::TreeNode, tree.container));
        }
    }
}

struct Nodes<'a> {
    memory: Memory<'a>,
    heap: &'a Heap,
}

/// Nodes of one container, by the numbers of their blocks.
struct Elements {
    nodes: Vec<u32>,
    /// Address of the container's own node.
    container: u64,
}

impl Nodes<'_> {
    /// Returns the list of nodes `{ next, previous, element }` that contains a block. Its container has
    /// `{ next, previous, count }`. Blocks on the way are marked in `in_ring`, so that each is passed once.
    fn ring(&self, start: u64, in_ring: &mut [bool]) -> Option<Elements> {
        let (mut blocks, mut others) = (Vec::new(), Vec::new());
        let mut at = start;
        loop {
            match self.heap.starting_at(at, 24) {
                Some(number) if in_ring[number as usize] => return None,
                Some(number) => {
                    in_ring[number as usize] = true;
                    blocks.push((number, at));
                }
                None if others.is_empty() => others.push(at),
                None => return None,
            }
            let next = self.memory.word(at)?;
            if next == at || self.memory.word(next.checked_add(8)?) != Some(at) {
                return None;
            }
            at = next;
            if at == start {
                break;
            }
        }
        let counts = |node: u64, others: usize| self.memory.word(node + 16) == Some(others as u64);
        let container = match others[..] {
            [container] => counts(container, blocks.len()).then_some(container)?,
            _ => {
                let rest = blocks.len() - 1;
                let mut containers = blocks.iter().filter(|(_, node)| counts(*node, rest));
                let (container, node) = *containers.next()?;
                if containers.next().is_some() {
                    return None;
                }
                blocks.retain(|(number, _)| *number != container);
                node
            }
        };
        let nodes = blocks.into_iter().map(|(number, _)| number).collect();
        Some(Elements { nodes, container })
    }

    /// Returns the tree of nodes `{ color, parent, left, right, element }` with this root. Its container has
    /// `{ red, root, leftmost, rightmost, count }`.
    fn tree(&self, root: u64) -> Option<Elements> {
        let container = self.memory.word(root + 8)?;
        if self.memory.word(container.checked_add(8)?) != Some(root) || self.color(root)? != BLACK {
            return None;
        }
        let [leftmost, rightmost, count] = self.memory.words(container + 16)?;
        if self.color(container)? != RED || count > self.heap.blocks().len() as u64 {
            return None;
        }
        let (mut nodes, mut rest) = (Vec::new(), vec![root]);
        while let Some(node) = rest.pop() {
            nodes.push(self.heap.starting_at(node, 40)?);
            if nodes.len() as u64 > count || self.color(node)? > BLACK {
                return None;
            }
            let children: [u64; 2] = self.memory.words(node + 16)?;
            for child in children.into_iter().filter(|&child| child != 0) {
                if self.memory.word(child.checked_add(8)?) != Some(node) {
                    return None;
                }
                rest.push(child);
            }
        }
        let agrees = nodes.len() as u64 == count
            && self.last(root, 16) == Some(leftmost)
            && self.last(root, 24) == Some(rightmost);
        agrees.then_some(Elements { nodes, container })
    }

    /// Returns the last node on the way from the root of a tree to one side. `link` is the offset of that side's link
    /// in a node.
    fn last(&self, root: u64, link: u64) -> Option<u64> {
        let mut node = root;
        loop {
            match self.memory.word(node + link)? {
                0 => return Some(node),
                next => node = next,
            }
        }
    }

    fn color(&self, node: u64) -> Option<u32> {
        self.memory.word(node).map(|word| word as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::names::memory::sample::{self, FakeProcess};

    const STACK: u64 = 0x7000_0000;

    fn at(number: u64) -> u64 {
        0x10_0000 + number * 0x40
    }

    fn memory() -> FakeProcess {
        let mut sample = FakeProcess::default();
        sample.anonymous(at(0), 0x1000);
        sample.anonymous(STACK, 0x1000);
        sample
    }

    /// Returns the nodes that are found among this many blocks.
    fn nodes(sample: &FakeProcess, blocks: u64) -> Vec<(u32, Shape, u64)> {
        let blocks: Vec<_> = (0..blocks).map(|number| (at(number), 0x38)).collect();
        let (heap, mut nodes) = (sample::heap(&blocks), Vec::new());
        sample.with(|memory| {
            find(memory, &heap, |node, shape, at| {
                nodes.push((node, shape, at))
            })
        });
        nodes.sort_unstable_by_key(|node| node.0);
        nodes
    }

    /// Links these addresses in a ring.
    fn link(sample: &mut FakeProcess, ring: &[u64]) {
        for (number, &node) in ring.iter().enumerate() {
            let (last, next) = (
                (number + ring.len() - 1) % ring.len(),
                (number + 1) % ring.len(),
            );
            sample.words(node, &[ring[next], ring[last]]);
        }
    }

    #[test]
    fn a_list_has_a_count() {
        let mut sample = memory();
        link(&mut sample, &[STACK, at(0), at(2), at(1)]);
        assert_eq!(nodes(&sample, 3), []);
        sample.words(STACK + 16, &[3]);
        let expected = [0, 1, 2].map(|node| (node, Shape::ListNode, STACK));
        assert_eq!(nodes(&sample, 3), expected);
        // A node that is not linked back to.
        sample.words(at(2) + 8, &[at(1)]);
        assert_eq!(nodes(&sample, 3), []);
    }

    #[test]
    fn a_list_that_is_a_block_itself_is_the_one_that_counts() {
        let mut sample = memory();
        link(&mut sample, &[at(0), at(1), at(2)]);
        sample.words(at(1) + 16, &[2]);
        let expected = [0, 2].map(|node| (node, Shape::ListNode, at(1)));
        assert_eq!(nodes(&sample, 3), expected);
        // An element whose value is the count by chance.
        sample.words(at(2) + 16, &[2]);
        assert_eq!(nodes(&sample, 3), []);
    }

    #[test]
    fn rings_that_are_none_end() {
        let mut sample = memory();
        // 0 leads into a ring of 1 and 2 that does not lead back; 3 to itself; 4 into nothing.
        sample.words(at(0), &[at(1), 0]);
        sample.words(at(1), &[at(2), at(0)]);
        sample.words(at(2), &[at(1), at(1)]);
        sample.words(at(3), &[at(3), at(3)]);
        sample.words(at(4), &[u64::MAX, u64::MAX]);
        assert_eq!(nodes(&sample, 5), []);
    }

    /// A tree with a root and two children, held by a container on the stack.
    fn tree() -> FakeProcess {
        let mut sample = memory();
        sample.words(STACK, &[RED.into(), at(0), at(1), at(2), 3]);
        sample.words(at(0), &[BLACK.into(), STACK, at(1), at(2)]);
        sample.words(at(1), &[RED.into(), at(0), 0, 0]);
        sample.words(at(2), &[0x7f00_0000_0000, at(0), 0, 0]);
        sample
    }

    #[test]
    fn a_tree_has_a_count_too() {
        let expected = [0, 1, 2].map(|node| (node, Shape::TreeNode, STACK));
        assert_eq!(nodes(&tree(), 3), expected);
        for (place, word) in [
            (STACK + 32, 4),
            (STACK + 32, 2),
            (STACK + 16, at(2)),
            (at(1) + 8, at(2)),
            (at(1) + 16, at(0)),
            (at(2), 2),
            (at(2) + 24, u64::MAX),
        ] {
            let mut wrong = tree();
            wrong.words(place, &[word]);
            assert_eq!(nodes(&wrong, 3), [], "{place:x} {word:x}");
        }
    }
}
