//! Blocks followed from image to image and added up by type: the number of blocks at each point, and how many of them
//! stayed.
//!
//! Blocks of the same address and size in two images are treated as the same block. This is wrong if the block was
//! freed and its place given to another of that size: so survival is an upper bound.

use std::collections::HashMap;

use crate::heap::blocks::{Block, Heap};
use crate::heap::names::{Kind, Names, Type};

/// Largest size of unnamed blocks that has a group of its own, in bytes.
const EACH_SIZE: u64 = 1024;
/// Largest number of groups that are distinguished.
const MAX_GROUPS: usize = 1 << 16;

/// Property that the blocks of a group have in common.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Key {
    /// Blocks of a type.
    Type(Type),
    /// Unnamed blocks of a size; above 1024 bytes, of the sizes up to this power of two and above the one before.
    Size(u64),
    /// Blocks that came when there were too many groups.
    Others,
}

impl Key {
    fn of(named: Option<&Type>, size: u64) -> Self {
        match named {
            Some(named) => Self::Type(named.clone()),
            None if size <= EACH_SIZE => Self::Size(size),
            None => Self::Size(size.checked_next_power_of_two().unwrap_or(u64::MAX)),
        }
    }

    /// Describes the blocks in words. The description is not escaped.
    pub fn describe(&self) -> String {
        match self {
            Self::Type(named) => named.name.clone(),
            Self::Size(size) if *size <= EACH_SIZE => format!("blocks of {size} bytes"),
            Self::Size(limit) => format!("blocks of {} to {limit} bytes", limit / 2 + 1),
            Self::Others => "blocks of other types".into(),
        }
    }

    /// Returns the word for how the type is known.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Type(named) => named.kind.name(),
            Self::Size(_) | Self::Others => "unnamed",
        }
    }

    /// Whether the type is one of the program's own.
    pub fn is_own(&self) -> bool {
        matches!(self, Self::Type(named) if named.is_own())
    }

    /// Whether the block's own contents prove the type, so that another type means another block.
    fn is_certain(&self) -> bool {
        matches!(self, Self::Type(named) if matches!(named.kind, Kind::Class | Kind::Python))
    }
}

/// Sums of the blocks of a group at one point.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sample {
    /// Number of blocks.
    pub blocks: u64,
    /// Usable bytes of the blocks.
    pub bytes: u64,
    /// Number of these blocks that existed at the point before.
    pub kept: u64,
    /// Number of these blocks that existed at the first point.
    pub original: u64,
}

/// Blocks of one type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Property that the blocks have in common.
    pub key: Key,
    /// Sums of the blocks at each point.
    pub samples: Vec<Sample>,
}

/// A block that was in the last image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Followed {
    /// The block.
    pub block: Block,
    /// Index of the group in [`Follower::groups`].
    pub group: u32,
    /// Number of the first point at which the block existed.
    pub since: u32,
}

/// Blocks that are followed, with all points until now.
#[derive(Debug, Default)]
pub struct Follower {
    groups: Vec<Group>,
    numbers: HashMap<Key, u32>,
    last: Vec<Followed>,
    points: u32,
}

impl Follower {
    /// Adds a point: the blocks of another image of the same process, with their names.
    ///
    /// A block keeps its first group, unless it is proved to be of another type: for some types, the evidence changes
    /// with what is in the block or points at it.
    pub fn add(&mut self, heap: &Heap, names: &Names) {
        let before = std::mem::take(&mut self.last);
        let mut before = before.into_iter().peekable();
        let mut of_types = vec![None; names.types().len()];
        let point = self.points;
        self.points += 1;
        for group in &mut self.groups {
            group.samples.push(Sample::default());
        }
        for (number, &block) in heap.blocks().iter().enumerate() {
            let group = match names.type_index(number) {
                Some(of) => *of_types[of]
                    .get_or_insert_with(|| self.group_index(Key::Type(names.types()[of].clone()))),
                None => self.group_index(Key::of(None, block.size)),
            };
            while before
                .next_if(|old| old.block.address < block.address)
                .is_some()
            {}
            let old = before.next_if(|old| old.block.address == block.address);
            let old = old.filter(|old| old.block == block && !self.contradicts(old.group, group));
            let followed = match old {
                Some(old) if !self.key(group).is_certain() => old,
                Some(old) => Followed { group, ..old },
                None => Followed {
                    block,
                    group,
                    since: point,
                },
            };
            self.count(followed, old.is_some());
            self.last.push(followed);
        }
    }

    fn count(&mut self, followed: Followed, kept: bool) {
        let samples = &mut self.groups[followed.group as usize].samples;
        if let Some(sample) = samples.last_mut() {
            sample.blocks += 1;
            sample.bytes += followed.block.size;
            sample.kept += u64::from(kept);
            sample.original += u64::from(followed.since == 0);
        }
    }

    fn key(&self, group: u32) -> &Key {
        &self.groups[group as usize].key
    }

    /// Whether a block in the group `now` must be another block than the one in the group `before` at its address.
    fn contradicts(&self, before: u32, now: u32) -> bool {
        before != now && self.key(before).is_certain() && self.key(now).is_certain()
    }

    /// Returns the number of a group. Makes the group if it does not exist.
    fn group_index(&mut self, key: Key) -> u32 {
        if let Some(&number) = self.numbers.get(&key) {
            return number;
        }
        let is_full = self.groups.len() >= MAX_GROUPS;
        if is_full && key != Key::Others {
            return self.group_index(Key::Others);
        }
        let number = self.groups.len() as u32;
        self.groups.push(Group {
            key: key.clone(),
            samples: vec![Sample::default(); self.points as usize],
        });
        self.numbers.insert(key, number);
        number
    }

    /// Returns all groups that have had a block.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// Returns the blocks of the last image, in order of address, as they are in its [`Heap::blocks`].
    pub fn blocks(&self) -> &[Followed] {
        &self.last
    }

    /// Returns the number of points.
    pub fn points(&self) -> usize {
        self.points as usize
    }
}

#[cfg(test)]
mod tests;
