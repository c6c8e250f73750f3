//! Sizes of the maps for live blocks.

use super::bpf::types::{block_bucket, live_layout};
use crate::args::count_within;
use crate::plan::MemorySettings;
use memtools::parse::UsageError;

/// Default number of blocks that the table is made for. Further blocks go to the map `overflow` and its successors.
const DEFAULT_BLOCKS: u32 = 1 << 17;
const BUCKET_BLOCKS: u32 = live_layout::BUCKET_BLOCKS.0;
/// Bytes of kernel memory that a block takes in an overflow map: key, value, and the kernel's own.
const OVERFLOW_BLOCK_BYTES: u64 = 112;
/// Limits of the capacities of the first and the second overflow map: a number of blocks, and the divisor of all blocks
/// in overflow maps. The third map has the rest. The second and the third are made when they are needed.
const OVERFLOW_STEPS: [(u32, u32); 2] = [(1 << 17, 32), (1 << 20, 4)];

/// Sizes of the maps for live blocks.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BlockMapSizes {
    /// Buckets of the table.
    pub(super) buckets: u32,
    /// Capacities of the overflow maps, in blocks. These maps take the blocks for which the table has no space.
    pub(super) overflow: Vec<u32>,
}

impl BlockMapSizes {
    pub(super) fn with_table(memory: &MemorySettings) -> Result<Self, UsageError> {
        let Some(blocks) = memory.blocks else {
            let bytes = memory.bytes_for_blocks();
            let reported = memory.reported_block_bytes();
            let bucket_bytes = table_bytes(1) + u64::from(BUCKET_BLOCKS) * reported;
            let buckets = buckets_for(DEFAULT_BLOCKS).min(count_within(bytes / 2, bucket_bytes));
            let rest = bytes.saturating_sub(u64::from(buckets) * bucket_bytes);
            return Ok(Self {
                buckets,
                overflow: steps(count_within(rest, OVERFLOW_BLOCK_BYTES + reported)),
            });
        };
        let buckets = buckets_for(blocks);
        memory.expect_room(blocks, table_bytes(buckets))?;
        Ok(Self {
            buckets,
            overflow: vec![(blocks / 16).max(1)],
        })
    }

    pub(super) fn without_table(memory: &MemorySettings) -> Result<Self, UsageError> {
        let overflow = if let Some(blocks) = memory.blocks {
            memory.expect_room(blocks, u64::from(blocks) * OVERFLOW_BLOCK_BYTES)?;
            vec![blocks]
        } else {
            let block_bytes = OVERFLOW_BLOCK_BYTES + memory.reported_block_bytes();
            steps(count_within(memory.bytes_for_blocks(), block_bytes))
        };
        Ok(Self {
            buckets: 1,
            overflow,
        })
    }
}

/// Returns the capacities of the overflow maps for `blocks` blocks, in the order in which they are made.
fn steps(blocks: u32) -> Vec<u32> {
    let steps = OVERFLOW_STEPS.map(|(most, part)| most.min(blocks / part));
    let rest = blocks - steps.iter().sum::<u32>();
    let steps = steps.into_iter().chain([rest]);
    steps.filter(|blocks| *blocks > 0).collect()
}

/// Returns the number of buckets for `blocks` blocks. Two thirds of the slots are for blocks: with more, too many
/// blocks find both their buckets full.
fn buckets_for(blocks: u32) -> u32 {
    let slots = u64::from(blocks) * 3 / 2;
    let buckets = slots.div_ceil(u64::from(BUCKET_BLOCKS)).max(1);
    buckets.try_into().unwrap_or(u32::MAX)
}

fn table_bytes(buckets: u32) -> u64 {
    u64::from(buckets) * size_of::<block_bucket>() as u64
}

#[cfg(test)]
mod tests {
    use anyhow::Result;
    use memtools::stacks::table;

    use super::*;
    use crate::plan;

    const MORE_OVERFLOW: usize = live_layout::MORE_OVERFLOW.0 as usize;

    fn memory(options: &[&str]) -> Result<MemorySettings> {
        plan::tests::memory(&[&["memleak", "-p", "1"], options].concat().join(" "))
    }

    fn room(args: &[&str]) -> Result<BlockMapSizes> {
        Ok(BlockMapSizes::with_table(&memory(args)?)?)
    }

    fn overflow_bytes(room: &BlockMapSizes) -> u64 {
        let blocks: u64 = room.overflow.iter().copied().map(u64::from).sum();
        blocks * OVERFLOW_BLOCK_BYTES
    }

    #[test]
    fn a_block_takes_less_than_64_bytes() {
        let blocks: u64 = 10_000_007;
        let room = room(&["--max-allocs", "10000007"]).expect("within the limit");
        let table = table_bytes(room.buckets);
        let overflow = overflow_bytes(&room);
        assert!(table + overflow <= blocks * 64, "{table} + {overflow}");
        assert!(u64::from(room.buckets * BUCKET_BLOCKS) > blocks);
    }

    #[test]
    fn memory_is_limited() {
        let all = 767 << 20..=768 << 20;
        for options in [&[][..], &["--combined-only"]] {
            let default = room(options).expect("within the limit");
            let table = table_bytes(default.buckets);
            let overflow = overflow_bytes(&default);
            let memory = memory(options).expect("valid");
            let blocks = u64::from(default.buckets * BUCKET_BLOCKS)
                + default.overflow.iter().copied().map(u64::from).sum::<u64>();
            let reported = blocks * memory.reported_block_bytes();
            let stacks = u64::from(memory.max_stacks()) * (table::ENTRY_BYTES + 640);
            let sum = table + overflow + reported + stacks;
            assert!(
                all.contains(&sum),
                "{table} + {overflow} + {reported} + {stacks}"
            );
            assert_eq!(default.overflow.len(), 1 + MORE_OVERFLOW);
        }
        let smallest = BlockMapSizes {
            buckets: 1,
            overflow: vec![1],
        };
        assert_eq!(room(&["--mem-limit", "1"]).expect("rounded up"), smallest);
        let error = room(&["--max-allocs", "1000000", "--mem-limit", "1M"]).unwrap_err();
        assert!(error.to_string().contains("raise --mem-limit"), "{error}");
    }

    #[test]
    fn memory_is_limited_without_the_table_too() {
        let overflow = |options: &[&str]| {
            let room = BlockMapSizes::without_table(&memory(options).expect("valid"));
            room.map(|room| room.overflow)
        };
        let of = |blocks| overflow(&["--mem-limit", "1M", "--max-allocs", blocks]);
        assert_eq!((1 << 20) / OVERFLOW_BLOCK_BYTES, 9362);
        assert_eq!(of("9362").expect("within the limit"), [9362]);
        let error = of("9363").unwrap_err();
        assert!(error.0.contains("raise --mem-limit"), "{error}");
        let default = overflow(&[]).expect("within the limit");
        assert_eq!(default.len(), 1 + MORE_OVERFLOW);
    }
}
