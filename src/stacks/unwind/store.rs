//! Memory that BPF programs read by the number of a word of eight bytes: `unwind_shards` in `bpf/include/unwind.bpf.h`.
//!
//! The memory grows by shards of 2 MiB. Words that a program may still be reading are never written to: giving memory
//! back takes a [`Store::synchronize`] first.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};
use libbpf_rs::libbpf_sys::BPF_F_MMAPABLE;
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapType, OpenMapMut};
use memmap2::MmapOptions;

use crate::bpf::map_create;
use crate::bpf::types;

/// Words of a shard: `UNWIND_SHARD_WORDS`.
const SHARD_WORDS: usize = types::unwind_layout::UNWIND_SHARD_WORDS.0 as usize;
const WORD: usize = size_of::<u64>();
/// Number of words that are written at a time; the size of a shard is a multiple of it.
const PIECE_WORDS: usize = 1 << 13;

/// Memory for unwind tables, in shards.
pub(super) struct Store {
    /// Map of maps with the shards.
    map: MapHandle,
    shards: Vec<MapHandle>,
    /// Threads that put new shards into the map of maps.
    adding: Vec<JoinHandle<Result<()>>>,
    max_shards: usize,
    free: FreeList,
}

impl Store {
    /// Creates a store in the skeleton's map `unwind_shards`, of which at most `max_bytes` bytes are used.
    pub(super) fn new(map: MapHandle, max_bytes: usize) -> Self {
        let max_shards = (max_bytes / (SHARD_WORDS * WORD)).clamp(1, map.max_entries() as usize);
        Self {
            map,
            shards: Vec::new(),
            adding: Vec::new(),
            max_shards,
            free: FreeList::default(),
        }
    }

    /// Creates a store before load, in a map that replaces the skeleton's. The first shard is added in the background.
    pub(super) fn before_load(map: &mut OpenMapMut<'_>, max_bytes: usize) -> Result<Self> {
        let (name, first) = (map.name().to_string_lossy(), shard()?);
        let own = map_create::create_array_of(&first, &name, map.max_entries())?;
        map_create::reuse(map, &own)?;
        let mut store = Self::new(own, max_bytes);
        store.add(first)?;
        Ok(store)
    }

    /// Returns the kernel memory in use, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.shards.len() * SHARD_WORDS * WORD
    }

    /// Takes a range of free words. Returns the number of the first word, which is never 0, or None if the range does
    /// not fit. Before a BPF program learns of the words, call [`Store::wait_for_shards`].
    pub(super) fn allocate(&mut self, words: usize) -> Result<Option<u32>> {
        let mut found = self.free.take(words);
        if found.is_none() {
            self.grow(words)?;
            found = self.free.take(words);
        }
        Ok(found.and_then(|first| u32::try_from(first).ok()))
    }

    /// Writes to words that were taken and that no program knows of yet. The memory is mapped only for the write, a
    /// piece at a time: otherwise all tables would count as memory of this process.
    pub(super) fn write(
        &mut self,
        first: u32,
        words: impl ExactSizeIterator<Item = u64>,
    ) -> Result<()> {
        let (mut at, mut words) = (first as usize, words);
        while words.len() > 0 {
            let (shard, word) = (at / SHARD_WORDS, at % SHARD_WORDS);
            let here = words.len().min(PIECE_WORDS - word % PIECE_WORDS);
            let place = MmapOptions::new()
                .offset((word * WORD) as u64)
                .len(here * WORD)
                .to_owned();
            // SAFETY: the memory is the map's, whose size never changes; others only read it.
            let memory = unsafe { place.map_mut(self.shards[shard].as_fd().as_raw_fd()) };
            let mut memory = memory.context("failed to map memory for unwind tables")?;
            for (bytes, word) in memory.chunks_exact_mut(WORD).zip(words.by_ref()) {
                bytes.copy_from_slice(&word.to_ne_bytes());
            }
            at += here;
        }
        Ok(())
    }

    /// Frees words that no program can be reading.
    pub(super) fn free(&mut self, words: Range<u32>) {
        self.free.give(words.start as usize..words.end as usize);
    }

    /// Waits until programs see all words that were taken.
    pub(super) fn wait_for_shards(&mut self) -> Result<()> {
        self.adding.drain(..).try_for_each(super::join)
    }

    /// Waits until all BPF programs that run now have ended. The kernel waits so whenever a map of maps is changed.
    pub(super) fn synchronize(&mut self) -> Result<()> {
        self.wait_for_shards()?;
        match self.shards.first() {
            Some(shard) => set(&self.map, 0, shard),
            None => Ok(()),
        }
    }

    /// Adds shards until `words` words in a row are free. Adds none if the maximum number of shards would be exceeded.
    fn grow(&mut self, words: usize) -> Result<()> {
        let first = self.shards.len();
        let wanted = words + usize::from(first == 0) - self.free.at_end(first * SHARD_WORDS);
        let more = wanted.div_ceil(SHARD_WORDS);
        if first + more > self.max_shards {
            return Ok(());
        }
        for _ in 0..more {
            self.add(shard()?)?;
        }
        Ok(())
    }

    fn add(&mut self, shard: MapHandle) -> Result<()> {
        let number = self.shards.len();
        // The shard can be written to at once. Putting it into the map of maps takes a grace period, as long as making
        // a table does.
        let handles = (map_create::reopen(&self.map)?, map_create::reopen(&shard)?);
        let set = move || set(&handles.0, number, &handles.1);
        self.adding.push(thread::spawn(set));
        self.shards.push(shard);
        // Word 0 is never used.
        let start = (number * SHARD_WORDS).max(1);
        self.free.give(start..(number + 1) * SHARD_WORDS);
        Ok(())
    }
}

fn set(map: &MapHandle, number: usize, shard: &MapHandle) -> Result<()> {
    let key = (number as u32).to_ne_bytes();
    let fd = shard.as_fd().as_raw_fd().to_ne_bytes();
    let set = map.update(&key, &fd, MapFlags::ANY);
    set.context("failed to add memory for unwind tables")
}

fn shard() -> Result<MapHandle> {
    let sizes = (size_of::<u32>(), WORD);
    let entries = SHARD_WORDS as u32;
    map_create::create(
        MapType::Array,
        "unwind_shard",
        sizes,
        entries,
        BPF_F_MMAPABLE,
    )
}

/// Free ranges, as the end of each by its start. No two of them touch.
#[derive(Debug, Default)]
struct FreeList(BTreeMap<usize, usize>);

impl FreeList {
    /// Takes `words` words from the first range that is long enough.
    fn take(&mut self, words: usize) -> Option<usize> {
        let (&start, &end) = self.0.iter().find(|(start, end)| *end - *start >= words)?;
        self.0.remove(&start);
        if start + words < end {
            self.0.insert(start + words, end);
        }
        Some(start)
    }

    fn give(&mut self, mut range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        if let Some(end) = self.0.remove(&range.end) {
            range.end = end;
        }
        if let Some((&start, &end)) = self.0.range(..range.start).next_back()
            && end == range.start
        {
            range.start = start;
        }
        self.0.insert(range.start, range.end);
    }

    /// Returns how many words before `end` are free without a gap.
    fn at_end(&self, end: usize) -> usize {
        match self.0.last_key_value() {
            Some((&start, &last)) if last == end => end - start,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_is_given_again() {
        let mut free = FreeList::default();
        free.give(1..100);
        assert_eq!(
            [free.take(10), free.take(20), free.take(69)],
            [1, 11, 31].map(Some)
        );
        assert_eq!(free.take(1), None);
        free.give(1..11);
        free.give(31..100);
        assert_eq!((free.at_end(100), free.at_end(101)), (69, 0));
        assert_eq!(free.take(70), None);
        free.give(11..31);
        assert_eq!(free.0, BTreeMap::from([(1, 100)]));
        assert_eq!(free.take(99), Some(1));
    }
}
