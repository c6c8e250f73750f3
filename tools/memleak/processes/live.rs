//! Live blocks, read from the BPF maps (`bpf/memleak/live.bpf.h`).

use std::collections::HashMap;
use std::mem::{self, offset_of};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{Ordering, fence};

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapHandle, MapMut, MapType};
use memtools::bpf::map_batch;
use memtools::bpf::map_create;
use memtools::bpf::map_mmap::MappedArray;
use memtools::bpf::types;

use super::bpf::types::{block, block_bucket, live_block, live_key, live_layout};
use super::ended::{AddressSpaceEnds, Fate};
use super::probes::Attached;
use crate::sums::Allocation;

const PID_BITS: u32 = live_layout::BLOCK_PID_BITS.0;
const TIME_BITS: u32 = live_layout::BORN_TIME_BITS.0;
const BUCKET_BLOCKS: usize = live_layout::BUCKET_BLOCKS.0 as usize;
/// Lowest address that marks a slot without a live block: SLOT_FREED, the lower of the marks.
const MARKS: u64 = 1 << 62;

/// Maps of live blocks: the table, and the overflow maps for blocks that do not fit into it.
pub(crate) struct LiveBlocks<'a> {
    table: &'a MapMut<'static>,
    first: &'a MapMut<'static>,
    /// The map `more_overflow`.
    more: &'a MapMut<'static>,
    /// Maps that were added to `more`.
    added: Vec<MapHandle>,
    /// Capacity of each overflow map in blocks, first `first`, then those in `more`, whether they exist yet or not.
    capacities: Vec<u32>,
    /// Number of blocks that were removed from the overflow maps here, which the BPF programs do not count.
    removed: u64,
}

impl<'a> LiveBlocks<'a> {
    pub(crate) fn new(attached: &'a Attached) -> Self {
        let maps = &attached.skel.maps;
        Self {
            table: &maps.table,
            first: &maps.overflow,
            more: &maps.more_overflow,
            added: Vec::new(),
            capacities: attached.overflow.clone(),
            removed: 0,
        }
    }

    /// Adds the next overflow map if those that exist are half full. `blocks` is the number of blocks in them, as the
    /// BPF programs count. Returns the capacity of the added map.
    pub(crate) fn grow(&mut self, blocks: u64) -> Result<Option<u32>> {
        let made = 1 + self.added.len();
        let existing = self.capacities.iter().take(made).copied();
        let capacity: u64 = existing.map(u64::from).sum();
        let Some(&next) = self.capacities.get(made) else {
            return Ok(None);
        };
        if blocks.saturating_sub(self.removed) < capacity / 2 {
            return Ok(None);
        }
        let sizes = (size_of::<live_key>(), size_of::<live_block>());
        let map = map_create::create(
            MapType::Hash,
            "overflow",
            sizes,
            next,
            map_create::no_prealloc_flag(),
        )
        .context("not enough memory for more blocks; lower --mem-limit")?;
        let number = self.added.len() as u32;
        let fd = map.as_fd().as_raw_fd();
        self.more
            .update(&number.to_ne_bytes(), &fd.to_ne_bytes(), MapFlags::ANY)
            .context("failed to add a map for more blocks")?;
        self.added.push(map);
        Ok(Some(next))
    }

    /// Returns the live blocks, and the blocks that exited processes left. What is allocated or freed meanwhile may be
    /// missing or not.
    ///
    /// Blocks of ended address spaces are removed from the BPF maps, so they are not returned again. Blocks that exited
    /// processes left are returned only if they were at least `older_ns` old at the exit.
    pub(crate) fn read(
        &mut self,
        ends: &HashMap<u32, AddressSpaceEnds>,
        older_ns: u64,
    ) -> Result<(Vec<Allocation>, Vec<Allocation>)> {
        let mut sorted = Sorted {
            ends,
            older_ns,
            live: Vec::new(),
            left: Vec::new(),
        };
        self.read_table(&mut sorted)?;
        self.read_overflow(&mut sorted)?;
        Ok((sorted.live, sorted.left))
    }

    fn read_table(&self, sorted: &mut Sorted<'_>) -> Result<()> {
        // The table is mapped only while it is read, or it would count as memory of this process.
        let table = MappedArray::new(self.table)?;
        for bucket in 0..table.len() {
            for slot in 0..BUCKET_BLOCKS {
                let Some(block) = read_block(&table, bucket, slot)? else {
                    continue;
                };
                let allocation = Allocation {
                    pid: pid_of(&block),
                    address: block.address,
                    size: block.owner >> PID_BITS,
                    stack: block.stack,
                    time_ns: time_of(block.born),
                    calls: 1,
                    level: level_of(block.born),
                };
                match sorted.fate(&allocation) {
                    Fate::Live => sorted.live.push(allocation),
                    fate => {
                        table.compare_exchange(bucket, address_offset(slot), block.address, 0)?;
                        sorted.leave(allocation, fate);
                    }
                }
            }
        }
        Ok(())
    }

    /// Reads the overflow maps.
    fn read_overflow(&mut self, sorted: &mut Sorted<'_>) -> Result<()> {
        let first: &dyn MapCore = self.first;
        let added = self.added.iter().map(|map| map as &dyn MapCore);
        for map in [first].into_iter().chain(added) {
            let mut read = map_batch::collect(map, |key, value| {
                let (key, value): (&live_key, &live_block) =
                    (types::view(key)?, types::view(value)?);
                Ok(Allocation {
                    pid: key.pid as u32,
                    address: key.address,
                    size: value.size,
                    stack: value.stack,
                    time_ns: time_of(value.born),
                    calls: 1,
                    level: level_of(value.born),
                })
            })?;
            let is_over = |block: &mut Allocation| sorted.fate(block) != Fate::Live;
            let over: Vec<Allocation> = read.extract_if(.., is_over).collect();
            for block in over {
                let key = live_key {
                    address: block.address,
                    pid: block.pid.into(),
                };
                // The BPF programs do not remove blocks of ended address spaces.
                map.delete(types::bytes_of(&key))
                    .context("failed to drop the blocks of an exited process")?;
                self.removed += 1;
                sorted.leave(block, sorted.fate(&block));
            }
            sorted.live = map_batch::join(mem::take(&mut sorted.live), read);
        }
        Ok(())
    }
}

/// Blocks by the fate of their processes' memory.
struct Sorted<'a> {
    ends: &'a HashMap<u32, AddressSpaceEnds>,
    /// Minimum age of a block at its process's exit, in nanoseconds, to count as left.
    older_ns: u64,
    live: Vec<Allocation>,
    left: Vec<Allocation>,
}

impl Sorted<'_> {
    fn fate(&self, block: &Allocation) -> Fate {
        let ends = self.ends.get(&block.pid);
        ends.map_or(Fate::Live, |ends| ends.fate(block.time_ns))
    }

    /// Adds a block of an ended address space to `left`, if its process has exited and it was old enough.
    fn leave(&mut self, block: Allocation, fate: Fate) {
        if let Fate::Left(time_ns) = fate
            && block.time_ns.saturating_add(self.older_ns) <= time_ns
        {
            self.left.push(block);
        }
    }
}

/// Reads a slot. Returns None if it has no live block, or if it changes meanwhile.
///
/// The BPF side stores the address last and removes it first (`bucket_put()` in `bpf/memleak/live.bpf.h`). If it is the
/// same before and after the other words are read, they belong to it. The first load is an acquire, which no later load
/// comes before; the fence keeps the last load behind the reading of the words. Where the CPU reorders no loads, both only bind the compiler.
fn read_block(table: &MappedArray, bucket: usize, slot: usize) -> Result<Option<block>> {
    let word = table.word(bucket, address_offset(slot))?;
    let address = word.load(Ordering::Acquire);
    if address == 0 || address >= MARKS {
        return Ok(None);
    }
    let mut block: block = table.get_at(bucket, block_offset(slot))?;
    fence(Ordering::Acquire);
    let is_same = word.load(Ordering::Relaxed) == address;
    block.address = address;
    Ok(is_same.then_some(block))
}

fn pid_of(block: &block) -> u32 {
    (block.owner & ((1 << PID_BITS) - 1)) as u32
}

fn time_of(born: u64) -> u64 {
    born & ((1 << TIME_BITS) - 1)
}

fn level_of(born: u64) -> u32 {
    (born >> TIME_BITS) as u32
}

/// Returns the offset of a slot in its bucket.
fn block_offset(slot: usize) -> usize {
    offset_of!(block_bucket, blocks) + slot * size_of::<block>()
}

/// Returns the offset of a slot's address in its bucket.
fn address_offset(slot: usize) -> usize {
    block_offset(slot) + offset_of!(block, address)
}
