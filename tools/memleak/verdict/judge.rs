//! The judgement: blocks by kind, with what they are lost with, or held by.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use memtools::heap::blocks::{Block, Heap};
use memtools::heap::image::Image;
use memtools::heap::reach::{Class, Reach};
use memtools::process::smaps::MappedMemory;
use serde::Serialize;

/// Blocks that a tree is made of at most.
const MOST_IN_TREE: usize = 1000;
/// Blocks of a chain that are told; of a list there can be millions.
const MOST_OF_CHAIN: usize = 1000;

/// A number of blocks, and their bytes as the allocator counts them.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Sum {
    pub(super) blocks: u64,
    pub(super) bytes: u64,
}

impl Sum {
    fn add(&mut self, bytes: u64) {
        self.blocks += 1;
        self.bytes += bytes;
    }
}

/// All blocks by class.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Sums {
    /// Nothing refers to them, and nothing did in the image before: leaks.
    pub(super) unreachable: Sum,
    /// Only those refer to them.
    pub(super) unreachable_via: Sum,
    /// Nothing refers to them, or only what nothing refers to, in the last image; in the one before it was otherwise.
    pub(super) undecided: Sum,
    /// Objects of CPython in cycles that its collector will free, and what these alone hold.
    pub(super) python_cycles: Sum,
    /// There is a chain of references to starts.
    pub(super) reachable: Sum,
    /// There is a chain, through the middle of a block.
    pub(super) interior_only: Sum,
}

/// What blocks are alike by: their type's name, or else their size.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Kind {
    Type(String),
    Size(u64),
}

/// Blocks of one kind that are all lost, or all held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) kind: Kind,
    pub(super) sum: Sum,
    /// What was lost with them.
    pub(super) via: Sum,
    /// One of them.
    pub(super) example: usize,
}

/// The heap, judged.
#[derive(Debug)]
pub(super) struct Judgement {
    pub(super) sums: Sums,
    pub(super) lost: Vec<Group>,
    pub(super) held: Vec<Group>,
}

/// Blocks that nothing refers to, to be found again in a later image.
pub(super) fn lost_blocks(heap: &Heap, reach: &Reach) -> HashSet<(u64, u64)> {
    let blocks = heap.blocks().iter().enumerate();
    let lost = blocks.filter(|(number, _)| reach.class(*number) < Class::Cycle);
    lost.map(|(_, block)| (block.address, block.size)).collect()
}

/// Bytes of private memory in pages of their own that the process may not read itself, and whose words therefore are not
/// in the image.
pub(super) fn protected_bytes(image: &Image, mappings: &[MappedMemory]) -> u64 {
    let is_protected = |memory: &&MappedMemory| {
        let area = image.area(memory.mapping.range.start);
        area.is_some_and(|area| !area.readable && area.is_private_memory())
    };
    let protected = mappings.iter().filter(is_protected);
    protected.map(|memory| memory.anonymous).sum()
}

/// Judges a heap. `before` are the blocks that were lost in an earlier image.
pub(super) fn judge(
    heap: &Heap,
    reach: &Reach,
    before: &HashSet<(u64, u64)>,
    kind: impl Fn(usize) -> Kind,
) -> Judgement {
    let mut sums = Sums::default();
    let (mut lost, mut held) = (HashMap::new(), HashMap::new());
    let leaders = reach.leaders();
    for (number, block) in heap.blocks().iter().enumerate() {
        let class = reach.class(number);
        // What is lost with another block counts below that.
        let of = leaders[number].map_or(number, |leader| leader as usize);
        let leader = &heap.blocks()[of];
        let groups = match class {
            Class::Cycle => {
                sums.python_cycles.add(block.size);
                continue;
            }
            Class::Interior | Class::Reachable => &mut held,
            _ if before.contains(&(leader.address, leader.size)) => &mut lost,
            _ => {
                sums.undecided.add(block.size);
                continue;
            }
        };
        match class {
            Class::Unreachable => sums.unreachable.add(block.size),
            Class::Via => sums.unreachable_via.add(block.size),
            Class::Interior => sums.interior_only.add(block.size),
            Class::Reachable => sums.reachable.add(block.size),
            Class::Cycle => (),
        }
        let kind = kind(of);
        let group: &mut Group = groups.entry(kind.clone()).or_insert_with(|| Group {
            kind,
            sum: Sum::default(),
            via: Sum::default(),
            example: of,
        });
        if class == Class::Via {
            group.via.add(block.size);
        } else {
            group.sum.add(block.size);
        }
    }
    Judgement {
        sums,
        lost: largest_first(lost),
        held: largest_first(held),
    }
}

fn largest_first(groups: HashMap<Kind, Group>) -> Vec<Group> {
    let mut groups: Vec<_> = groups.into_values().collect();
    groups.sort_by(|one, other| {
        let bytes = |group: &Group| group.sum.bytes + group.via.bytes;
        let order = bytes(other).cmp(&bytes(one));
        order.then_with(|| one.kind.cmp(&other.kind))
    });
    groups
}

/// Who holds blocks, the last holder first: roots, and below each what it refers to.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Tree {
    pub(super) sum: Sum,
    pub(super) below: BTreeMap<String, Tree>,
}

impl Tree {
    /// Adds a block by its chain's labels, the root's first. A label again and again, as of a list, is told once.
    fn add(&mut self, labels: &[String], bytes: u64) {
        self.sum.add(bytes);
        let mut tree = self;
        for (at, label) in labels.iter().enumerate() {
            if at > 0 && labels[at - 1] == *label {
                continue;
            }
            tree = tree.below.entry(label.clone()).or_default();
            tree.sum.add(bytes);
        }
    }
}

/// The tree of what holds these blocks, of the first thousand. `root` names where a chain begins.
pub(super) fn tree(
    heap: &Heap,
    reach: &Reach,
    blocks: &[usize],
    root: impl Fn(usize) -> String,
    label: impl Fn(usize) -> String,
) -> Tree {
    let mut tree = Tree::default();
    for &block in blocks.iter().take(MOST_IN_TREE) {
        let (chain, _) = reach.chain(block);
        let mut labels = vec![root(block)];
        labels.extend(chain.iter().take(MOST_OF_CHAIN).rev().map(|&by| label(by)));
        labels.push(label(block));
        tree.add(&labels, heap.blocks()[block].size);
    }
    tree
}

/// The roots' places in modules' data that are to be named, by path.
pub(super) fn wanted_names<'a>(
    places: impl Iterator<Item = (&'a [u8], u64)>,
) -> HashMap<Vec<u8>, BTreeSet<u64>> {
    let mut wanted: HashMap<Vec<u8>, BTreeSet<u64>> = HashMap::new();
    for (path, offset) in places {
        wanted.entry(path.to_vec()).or_default().insert(offset);
    }
    wanted
}

/// The block as people are told of it.
pub(super) fn describe(kind: &Kind, block: &Block) -> String {
    match kind {
        Kind::Type(name) => format!("{name} [{}]", block.size),
        Kind::Size(bytes) => format!("[{bytes}]"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_tells_a_list_once() {
        let labels = |list: &[&str]| {
            list.iter()
                .map(|label| (*label).to_owned())
                .collect::<Vec<_>>()
        };
        let mut tree = Tree::default();
        tree.add(&labels(&["app`g_list", "Node", "Node", "Node"]), 24);
        tree.add(&labels(&["app`g_list", "Node"]), 24);
        tree.add(&labels(&["app`g_list", "Node", "Text"]), 100);
        assert_eq!(
            tree.sum,
            Sum {
                blocks: 3,
                bytes: 148
            }
        );
        let list = &tree.below["app`g_list"];
        assert_eq!(list.sum.blocks, 3);
        let node = &list.below["Node"];
        assert_eq!((node.sum.blocks, node.below.len()), (3, 1));
        assert_eq!(
            node.below["Text"].sum,
            Sum {
                blocks: 1,
                bytes: 100
            }
        );
    }
}
