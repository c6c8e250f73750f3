//! Judgement of a heap: groups of blocks, with the blocks that were lost via them, or with what holds them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::heap::blocks::{Block, Heap};
use crate::heap::idle::IdlePages;
use crate::heap::image::Image;
use crate::heap::reach::{Class, Reach};
use crate::print::text;
use crate::process::smaps::MappedMemory;
use serde::Serialize;

use super::stacks::SymbolizedStacks;
use super::suppressions::LeakKind;
use super::traced_blocks::{AllocSite, TracedBlocks};

/// Maximum number of blocks that a tree is made of.
pub(super) const MAX_TREE_BLOCKS: usize = 1000;
/// Maximum number of blocks of a chain that are followed. The chain through a list can have millions.
pub(super) const MAX_CHAIN_BLOCKS: usize = 1000;
/// Largest number of blocks from which the holders of a group are found. The estimate of a share is then wrong by 6 %
/// of all in one of twenty cases.
const MAX_SAMPLE: usize = 256;
/// Number of objects of the program's own types that are shown of the rest of a chain.
const OWN_SHOWN: usize = 2;
/// Number of nearest holders by whose kinds groups of blocks are distinguished.
const NEAREST: usize = 8;

/// Number of blocks and their bytes: the requested ones where the allocation was traced, else those that the program
/// may use.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Sum {
    /// Number of blocks.
    pub blocks: u64,
    /// Sum of the blocks' bytes.
    pub bytes: u64,
}

impl Sum {
    fn add(&mut self, bytes: u64) {
        self.blocks += 1;
        self.bytes += bytes;
    }

    /// Returns the sum of both.
    pub fn plus(self, other: Self) -> Self {
        Self {
            blocks: self.blocks + other.blocks,
            bytes: self.bytes + other.bytes,
        }
    }
}

/// Sums of all blocks by class.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Sums {
    /// Blocks that nothing refers to, neither in the last image nor in the one before: leaks.
    pub unreachable: Sum,
    /// Blocks that only unreachable blocks refer to.
    pub unreachable_via: Sum,
    /// Blocks that are unreachable, or unreachable via others, in the last image, but were not in the one before.
    pub undecided: Sum,
    /// Objects of CPython in cycles that its garbage collector will free, and blocks that only these objects reference.
    pub python_cycles: Sum,
    /// Blocks with a chain of references from a root, all of which are to starts of blocks.
    pub reachable: Sum,
    /// Blocks whose chain has a reference to the middle of a block, or one that is not a plain word.
    pub interior_only: Sum,
    /// Blocks that an entry of --suppressions suppresses: unreachable ones, those via them, reachable and interior-only
    /// ones. They count in no other class.
    pub suppressed: Sum,
    /// Blocks of which it is not known whether they are in use or in a thread's cache. They count in no other class.
    pub in_doubt: Sum,
}

/// Kind of a block: its type's name, or its size if the type is not known.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum TypeOrSize {
    Type(String),
    Size(u64),
}

/// Key by which blocks are grouped into a row.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Key {
    /// Stack that has allocated the blocks, if they were traced.
    Stack(u64),
    /// Kind of the blocks, if they were not traced.
    Kind(TypeOrSize),
}

/// Blocks of one stack, or of one kind, that are all lost, or all reachable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    /// Kind of all blocks. None if a stack has allocated several kinds.
    pub(super) kind: Option<TypeOrSize>,
    /// Stack and times of the blocks' allocation, if they were traced.
    pub(super) born: Option<AllocSite>,
    pub(super) sum: Sum,
    /// Sum of the blocks that were lost via these.
    pub(super) via: Sum,
    /// Sum of the blocks that are idle, if memory use was watched.
    pub(super) idle: Sum,
    /// Index of one of the blocks.
    pub(super) example: usize,
    sample: Sample,
    idle_sample: Sample,
}

/// Some of the blocks of a group, evenly spread over all of them: each one, if there are few.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Sample {
    /// Number of blocks until now.
    seen: u64,
    /// Logarithm of the distance between two blocks of the sample.
    spacing: u32,
    blocks: Vec<u32>,
}

impl Sample {
    fn add(&mut self, block: usize) {
        if self.seen.trailing_zeros() >= self.spacing {
            if self.blocks.len() == MAX_SAMPLE {
                let mut is_kept = false;
                self.blocks.retain(|_| {
                    is_kept = !is_kept;
                    is_kept
                });
                self.spacing += 1;
            }
            if self.seen.trailing_zeros() >= self.spacing {
                self.blocks.push(block as u32);
            }
        }
        self.seen += 1;
    }
}

/// Blocks of a group with the same reference path: from the same variable, through blocks of the same kinds.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Holder {
    /// Index of one of these blocks.
    pub(super) example: usize,
    /// Share of the group's bytes with this path; of its idle bytes, if it has some. An estimate from a sample, if the group has more than 256 blocks.
    pub(super) share: f64,
}

impl Group {
    /// Returns the blocks from which [`holders`](Self::holders) are found: idle ones, if there are some.
    pub(super) fn sample(&self) -> impl Iterator<Item = usize> {
        let sample = if self.idle_sample.blocks.is_empty() {
            &self.sample
        } else {
            &self.idle_sample
        };
        sample.blocks.iter().map(|&block| block as usize)
    }

    /// Returns the reference paths of the blocks, that of most bytes first. `labels` describes the path of a block.
    pub(super) fn holders(
        &self,
        bytes: impl Fn(usize) -> u64,
        labels: impl Fn(usize) -> Vec<String>,
    ) -> Vec<Holder> {
        let mut paths: BTreeMap<Vec<String>, (u64, usize)> = BTreeMap::new();
        for block in self.sample() {
            let (sum, _) = paths.entry(labels(block)).or_insert((0, block));
            *sum += bytes(block).max(1);
        }
        let all = paths.values().map(|(bytes, _)| bytes).sum::<u64>().max(1) as f64;
        let mut paths: Vec<_> = paths.into_values().collect();
        paths.sort_by_key(|&(bytes, block)| (std::cmp::Reverse(bytes), block));
        let holder = |(bytes, example): (u64, usize)| Holder {
            example,
            share: bytes as f64 / all,
        };
        paths.into_iter().map(holder).collect()
    }

    fn new(example: usize, kind: TypeOrSize, born: Option<AllocSite>) -> Self {
        Self {
            sample: Sample::default(),
            idle_sample: Sample::default(),
            kind: Some(kind),
            born,
            sum: Sum::default(),
            via: Sum::default(),
            idle: Sum::default(),
            example,
        }
    }

    /// Adds a block that was not lost via another one.
    fn add(&mut self, bytes: u64, kind: &TypeOrSize, born: Option<AllocSite>) {
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
    pub(super) reachable: Vec<Group>,
    /// Sums of the suppressed blocks, by entry of --suppressions.
    pub(super) suppressed: BTreeMap<usize, Sum>,
}

/// Returns address and size of the lost blocks, to look for them in a later image.
pub fn lost_blocks(heap: &Heap, reach: &Reach) -> HashSet<(u64, u64)> {
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
/// is what was looked up in the names of their stacks. `idle` are the pages that were not used for a while.
pub(super) fn judge(
    heap: &Heap,
    reach: &Reach,
    before: &HashSet<(u64, u64)>,
    (seen, known): (&TracedBlocks, &SymbolizedStacks),
    idle: Option<&IdlePages>,
    kind: impl Fn(usize) -> TypeOrSize,
) -> Judgement {
    let mut sums = Sums::default();
    (heap.in_doubt.iter()).for_each(|block| sums.in_doubt.add(block.size));
    let (mut lost, mut reachable, mut suppressed) =
        (HashMap::new(), HashMap::new(), BTreeMap::new());
    let leaders = reach.leaders();
    let entry = |number: usize, kind: LeakKind| known.suppressed(seen.born(number)?.stack, kind);
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
            Class::Interior => (&mut sums.interior_only, LeakKind::Possible, &mut reachable),
            Class::Reachable => (&mut sums.reachable, LeakKind::Reachable, &mut reachable),
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
        let key = born.map_or_else(|| Key::Kind(kind.clone()), |born| Key::Stack(born.stack));
        let group = groups
            .entry(key)
            .or_insert_with(|| Group::new(of, kind.clone(), born));
        if class == Class::UnreachableVia {
            group.via.add(bytes);
        } else {
            group.add(bytes, &kind, born);
            let is_held = class > Class::Cycle;
            if is_held {
                group.sample.add(number);
            }
            if is_held && idle.is_some_and(|pages| pages.contain(&block.range())) {
                group.idle.add(bytes);
                group.idle_sample.add(number);
            }
        }
    }
    Judgement {
        sums,
        lost: largest_first(lost),
        reachable: largest_first(reachable),
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

/// Reference path to a block.
#[derive(Debug)]
pub(super) struct Path {
    /// Name of the variable, or of another root, at which the path begins.
    pub(super) root: String,
    /// Blocks of the path, the nearest first; of a long path, those that are nearest.
    pub(super) chain: Vec<usize>,
}

/// Returns the labels by which ways of holding a block are distinguished: the root's variable, and the kinds of the
/// nearest holders. Repeated labels, as along a list, count once, and so do further blocks of the block's own kind.
pub(super) fn way(block: usize, path: Path, kind: impl Fn(usize) -> TypeOrSize) -> Vec<String> {
    let name = |of: &TypeOrSize| match of {
        TypeOrSize::Type(name) => name.clone(),
        TypeOrSize::Size(_) => String::new(),
    };
    let mut labels = vec![name(&kind(block))];
    let nearest = path.chain.into_iter().take(NEAREST);
    labels.extend(nearest.map(|by| name(&kind(by))));
    labels.dedup();
    labels[0] = path.root;
    labels
}

/// Returns which holders of a chain to show, by their indexes in the chain: the nearest ones, and objects of the
/// program's own types further on, which tell more than the containers between. `is_own` says which are.
pub(super) fn shown(chain: usize, most: usize, is_own: impl Fn(usize) -> bool) -> Vec<usize> {
    if chain <= most {
        return (0..chain).collect();
    }
    let own: Vec<_> = (most..chain.min(MAX_CHAIN_BLOCKS))
        .filter(|&at| is_own(at))
        .take(OWN_SHOWN)
        .collect();
    (0..most).chain(own).collect()
}

/// Returns the tree of what holds these blocks, of the first [`MAX_TREE_BLOCKS`].
pub(super) fn tree(
    heap: &Heap,
    seen: &TracedBlocks,
    blocks: &[usize],
    path: impl Fn(usize) -> Path,
    label: impl Fn(usize) -> String,
) -> Tree {
    let mut tree = Tree::default();
    for &block in blocks.iter().take(MAX_TREE_BLOCKS) {
        let Path { root, chain } = path(block);
        let mut labels = vec![root];
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

/// Returns the question of --why about all blocks of a kind.
pub(super) fn question(kind: &TypeOrSize) -> String {
    match kind {
        TypeOrSize::Type(name) => text::display_name(name),
        TypeOrSize::Size(bytes) => bytes.to_string(),
    }
}

/// Describes a block for people.
pub(super) fn describe(kind: &TypeOrSize, block: &Block) -> String {
    match kind {
        TypeOrSize::Type(name) => format!("{name} [{}]", block.size),
        TypeOrSize::Size(bytes) => format!("[{bytes}]"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_holds_most_bytes() {
        let mut group = Group::new(0, TypeOrSize::Size(100), None);
        // 9 blocks in 10 are referenced by the cache, and the first one is not.
        (0..100_000).for_each(|block| group.sample.add(block));
        assert!((MAX_SAMPLE / 2..=MAX_SAMPLE).contains(&group.sample().count()));
        let labels = |block: usize| match block {
            0 | 90_000.. => vec!["odd".to_owned()],
            _ => vec!["cache".to_owned()],
        };
        let holders = group.holders(|_| 100, labels);
        assert_eq!(holders.len(), 2);
        assert!(
            holders[0].example > 0 && (holders[0].share - 0.9).abs() < 0.02,
            "{holders:?}"
        );
        // With idle blocks, theirs are shown.
        group.idle_sample.add(0);
        assert_eq!(
            group.holders(|_| 100, labels),
            [Holder {
                example: 0,
                share: 1.0
            }]
        );
    }

    #[test]
    fn objects_of_the_program_are_not_left_out_of_a_chain() {
        assert_eq!(shown(4, 6, |_| false), [0, 1, 2, 3]);
        assert_eq!(
            shown(100, 6, |at| at == 3 || at >= 50),
            [0, 1, 2, 3, 4, 5, 50, 51]
        );
        assert_eq!(shown(100, 6, |_| false), [0, 1, 2, 3, 4, 5]);
    }

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
