//! Judgement of a heap: groups of blocks, with the blocks that were lost via them, or with what holds them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use memtools::heap::blocks::{Block, Heap};
use memtools::heap::idle::IdlePages;
use memtools::heap::image::Image;
use memtools::heap::reach::{Class, Reach};
use memtools::process::smaps::MappedMemory;
use serde::Serialize;

use super::stacks::SymbolizedStacks;
use super::suppressions::LeakKind;
use super::traced_blocks::{AllocSite, TracedBlocks};
use crate::sums::StackKey;

/// Maximum number of blocks that a tree is made of.
pub(super) const MAX_TREE_BLOCKS: usize = 1000;
/// Maximum number of blocks of a chain that are followed. The chain through a list can have millions.
const MAX_CHAIN_BLOCKS: usize = 1000;

/// Number of blocks and their bytes: the requested ones where the allocation was traced, else those that the program
/// may use.
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

    /// Returns the sum of both.
    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            blocks: self.blocks + other.blocks,
            bytes: self.bytes + other.bytes,
        }
    }
}

/// Sums of all blocks by class.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Sums {
    /// Blocks that nothing refers to, neither in the last image nor in the one before: leaks.
    pub(super) unreachable: Sum,
    /// Blocks that only unreachable blocks refer to.
    pub(super) unreachable_via: Sum,
    /// Blocks that are unreachable, or unreachable via others, in the last image, but were not in the one before.
    pub(super) undecided: Sum,
    /// Objects of CPython in cycles that its garbage collector will free, and blocks that only these objects hold.
    pub(super) python_cycles: Sum,
    /// Blocks with a chain of references from a root, all of which are to starts of blocks.
    pub(super) reachable: Sum,
    /// Blocks whose chain has a reference to the middle of a block, or one that is not a plain word.
    pub(super) interior_only: Sum,
    /// Blocks that an entry of --suppressions suppresses: unreachable ones, those via them, reachable and interior-only
    /// ones. They count in no other class.
    pub(super) suppressed: Sum,
    /// Blocks of which it is not known whether they are in use or in a thread's cache. They count in no other class.
    pub(super) in_doubt: Sum,
}

/// Kind of a block: its type's name, or its size if the type is not known.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Kind {
    Type(String),
    Size(u64),
}

/// Key by which blocks are grouped into a row.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Key {
    /// Stack that has allocated the blocks, if they were traced.
    Stack(StackKey),
    /// Kind of the blocks, if they were not traced.
    Kind(Kind),
}

/// Blocks of one stack, or of one kind, that are all lost, or all held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    /// Kind of all blocks. None if a stack has allocated several kinds.
    pub(super) kind: Option<Kind>,
    /// Stack and times of the blocks' allocation, if they were traced.
    pub(super) born: Option<AllocSite>,
    pub(super) sum: Sum,
    /// Sum of the blocks that were lost via these.
    pub(super) via: Sum,
    /// Sum of the blocks that are idle, if memory use was watched.
    pub(super) idle: Sum,
    /// Index of one of the blocks.
    pub(super) example: usize,
}

impl Group {
    fn new(example: usize, kind: Kind, born: Option<AllocSite>) -> Self {
        Self {
            kind: Some(kind),
            born,
            sum: Sum::default(),
            via: Sum::default(),
            idle: Sum::default(),
            example,
        }
    }

    /// Adds a block that was not lost via another one.
    fn add(&mut self, bytes: u64, kind: &Kind, born: Option<AllocSite>) {
        self.sum.add(bytes);
        self.kind = self.kind.take().filter(|all| all == kind);
        if let (Some(all), Some(born)) = (&mut self.born, born) {
            all.join(born);
        }
    }
}

/// Result of judging a heap.
#[derive(Debug)]
pub(super) struct Judgement {
    pub(super) sums: Sums,
    pub(super) lost: Vec<Group>,
    pub(super) held: Vec<Group>,
    /// Sums of the suppressed blocks, by entry of --suppressions.
    pub(super) suppressed: BTreeMap<usize, Sum>,
}

/// Returns address and size of the lost blocks, to look for them in a later image.
pub(crate) fn lost_blocks(heap: &Heap, reach: &Reach) -> HashSet<(u64, u64)> {
    let blocks = heap.blocks().iter().enumerate();
    let lost = blocks.filter(|(number, _)| reach.class(*number) < Class::Cycle);
    lost.map(|(_, block)| (block.address, block.size)).collect()
}

/// Returns the bytes of private memory in anonymous pages that the process itself may not read. Their words are not in
/// the image.
pub(super) fn protected_bytes(image: &Image, mappings: &[MappedMemory]) -> u64 {
    let is_protected = |memory: &&MappedMemory| {
        let area = image.area(memory.mapping.range.start);
        area.is_some_and(|area| !area.readable && area.is_private_anonymous())
    };
    let protected = mappings.iter().filter(is_protected);
    protected.map(|memory| memory.anonymous).sum()
}

/// Judges a heap. `before` are the blocks that were lost in an earlier image. `seen` are the traced blocks, and `known`
/// is what was looked up in the names of their stacks. `idle` are the pages that nobody has used for a while.
pub(super) fn judge(
    heap: &Heap,
    reach: &Reach,
    before: &HashSet<(u64, u64)>,
    (seen, known): (&TracedBlocks, &SymbolizedStacks),
    idle: Option<&IdlePages>,
    kind: impl Fn(usize) -> Kind,
) -> Judgement {
    let mut sums = Sums::default();
    (heap.in_doubt.iter()).for_each(|block| sums.in_doubt.add(block.size));
    let (mut lost, mut held, mut suppressed) = (HashMap::new(), HashMap::new(), BTreeMap::new());
    let leaders = reach.leaders();
    let entry = |number: usize, kind: LeakKind| known.suppressed(seen.born(number)?.key, kind);
    for (number, block) in heap.blocks().iter().enumerate() {
        let class = reach.class(number);
        let bytes = seen.bytes(number, block);
        // A block that was lost with another block is counted in the group of that block.
        let of = leaders[number].map_or(number, |leader| leader as usize);
        let leader = &heap.blocks()[of];
        let is_leak = before.contains(&(leader.address, leader.size));
        let (sum, leak, groups): (_, _, &mut HashMap<Key, Group>) = match class {
            Class::Cycle => {
                sums.python_cycles.add(bytes);
                continue;
            }
            Class::Unreachable | Class::UnreachableVia if !is_leak => {
                sums.undecided.add(bytes);
                continue;
            }
            Class::Unreachable => (&mut sums.unreachable, LeakKind::Definite, &mut lost),
            Class::UnreachableVia => (&mut sums.unreachable_via, LeakKind::Indirect, &mut lost),
            Class::Interior => (&mut sums.interior_only, LeakKind::Possible, &mut held),
            Class::Reachable => (&mut sums.reachable, LeakKind::Reachable, &mut held),
        };
        if let Some(entry) = entry(number, leak) {
            sums.suppressed.add(bytes);
            suppressed
                .entry(entry)
                .or_insert_with(Sum::default)
                .add(bytes);
            continue;
        }
        sum.add(bytes);
        if class == Class::UnreachableVia && entry(of, LeakKind::Definite).is_some() {
            continue;
        }
        let (kind, born) = (kind(of), seen.born(of));
        let key = born.map_or_else(|| Key::Kind(kind.clone()), |born| Key::Stack(born.key));
        let group = groups
            .entry(key)
            .or_insert_with(|| Group::new(of, kind.clone(), born));
        if class == Class::UnreachableVia {
            group.via.add(bytes);
        } else {
            group.add(bytes, &kind, born);
            let is_held = class > Class::Cycle;
            if is_held && idle.is_some_and(|pages| pages.contain(&block.range())) {
                group.idle.add(bytes);
            }
        }
    }
    Judgement {
        sums,
        lost: largest_first(lost),
        held: largest_first(held),
        suppressed,
    }
}

/// Sorts groups by idle bytes, then by size, the largest first.
fn largest_first(groups: HashMap<Key, Group>) -> Vec<Group> {
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by(|(key, one), (other_key, other)| {
        let bytes = |group: &Group| (group.idle.bytes, group.sum.bytes + group.via.bytes);
        let order = bytes(other).cmp(&bytes(one));
        order.then_with(|| key.cmp(other_key))
    });
    groups.into_iter().map(|(_, group)| group).collect()
}

/// Tree of the holders of blocks: roots at the top, and below each holder what it refers to.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Tree {
    pub(super) sum: Sum,
    pub(super) below: BTreeMap<String, Tree>,
}

impl Tree {
    /// Adds a block by the labels of its chain, the root's first. A label that repeats, as along a list, is added once.
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

/// Returns the tree of what holds these blocks, of the first [`MAX_TREE_BLOCKS`]. `root` names the root at which a
/// block's chain begins.
pub(super) fn tree(
    heap: &Heap,
    reach: &Reach,
    seen: &TracedBlocks,
    blocks: &[usize],
    root: impl Fn(usize) -> String,
    label: impl Fn(usize) -> String,
) -> Tree {
    let mut tree = Tree::default();
    for &block in blocks.iter().take(MAX_TREE_BLOCKS) {
        let chain = reach.nearest(block, MAX_CHAIN_BLOCKS);
        let mut labels = vec![root(block)];
        labels.extend(chain.iter().rev().map(|&by| label(by)));
        labels.push(label(block));
        tree.add(&labels, seen.bytes(block, &heap.blocks()[block]));
    }
    tree
}

/// Returns the offsets in modules' data whose variables are to be named, by path.
pub(super) fn wanted_names<'a>(
    places: impl Iterator<Item = (&'a [u8], u64)>,
) -> HashMap<Vec<u8>, BTreeSet<u64>> {
    let mut wanted: HashMap<Vec<u8>, BTreeSet<u64>> = HashMap::new();
    for (path, offset) in places {
        wanted.entry(path.to_vec()).or_default().insert(offset);
    }
    wanted
}

/// Describes a block for people.
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
