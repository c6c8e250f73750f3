//! Sampling by size (`--sample-bytes`, `--max-overhead`): each block is recorded with a probability in proportion to
//! its size, and the totals of all blocks are estimated from the recorded ones.
//!
//! This is Poisson sampling: each block is recorded or not independently of all others. A block of S bytes, with a mean
//! distance of M bytes between records, is recorded with the probability P = min(1, S/M), and then counts 1/P times
//! (Horvitz and Thompson's estimator). The sum of the weighted sizes has no bias, and an unbiased estimate of its
//! variance is the sum of S² (1 - P) / P². Large blocks are exact, and small ones count as M bytes each.
//!
//! With `--max-overhead` M can grow, by levels. A record carries the level at which the BPF program decided to record
//! it, so P of each record stays known. The choice of a level depends on earlier measurements, never on the block, so
//! the sum still has no bias.

use std::collections::HashMap;

use crate::sums::{Allocation, StackKey, Total, Totals};

/// Standard deviations on each side of an estimate that make a 95 % confidence interval.
const DEVIATIONS: f64 = 1.96;

/// Distance in bytes that levels begin from, unless `--sample-bytes` gives one. Most blocks are larger.
const LEVEL_BYTES: u32 = 16;
/// Largest distance of a level, in bytes. Beyond it, almost nothing is recorded.
const FARTHEST: u64 = 512 << 10;

/// The mean distance in bytes between records, by level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sampling {
    /// Distance at level 0, in bytes. 0 records all blocks.
    pub(crate) sample_bytes: u32,
    /// Distance that each level doubles, in bytes. 0 if there are no levels.
    pub(crate) level_bytes: u32,
}

impl Sampling {
    /// Returns the sampling with this distance at level 0, or with levels, if either is wanted.
    pub(crate) fn new(sample_bytes: Option<u32>, has_levels: bool) -> Option<Self> {
        let first = sample_bytes.unwrap_or(LEVEL_BYTES);
        let sampling = Self {
            sample_bytes: sample_bytes.unwrap_or(0),
            level_bytes: if has_levels { first } else { 0 },
        };
        (sample_bytes.is_some() || has_levels).then_some(sampling)
    }

    /// Returns the mean distance at a level, as the BPF program computes it.
    pub(crate) fn distance(self, level: u32) -> u64 {
        match level {
            0 => self.sample_bytes.into(),
            _ => u64::from(self.level_bytes) << level,
        }
    }

    /// Returns the highest level.
    pub(crate) fn highest_level(self) -> u32 {
        let doublings = FARTHEST.checked_div(self.level_bytes.into());
        doublings.and_then(u64::checked_ilog2).unwrap_or(0)
    }

    /// Returns the probability that a block of this size is recorded, exactly as the BPF program computes it: in units
    /// of 2^-32.
    fn probability(self, size: u64, level: u32) -> f64 {
        const ONE: u64 = 1 << 32;
        let distance = self.distance(level);
        let threshold = if size >= distance {
            ONE
        } else {
            size * ONE / distance
        };
        threshold as f64 / ONE as f64
    }

    /// Estimates the totals of all allocations from the recorded ones, with the error of each total.
    pub(crate) fn estimate(self, recorded: &[Allocation]) -> (Totals, HashMap<StackKey, Error>) {
        let mut sums: HashMap<StackKey, Sum> = HashMap::new();
        for allocation in recorded {
            let &Allocation {
                pid,
                stack,
                size,
                calls,
                level,
                ..
            } = allocation;
            let probability = self.probability(size, level);
            // A size with probability 0 is of a record that was cut down after it was made.
            if probability > 0.0 {
                let sum = sums.entry(StackKey { pid, stack }).or_default();
                sum.bytes += size as f64 / probability;
                sum.allocations += calls as f64 / probability;
                sum.variance += (size as f64 / probability).powi(2) * (1.0 - probability);
            }
        }
        let total = |sum: &Sum| Total {
            bytes: sum.bytes.round() as u64,
            allocations: sum.allocations.round() as u64,
            ..Total::default()
        };
        let totals = sums.iter().map(|(&key, sum)| (key, total(sum)));
        let errors = sums.iter().map(|(&key, sum)| (key, Error::of(sum)));
        (totals.collect(), errors.collect())
    }
}

#[derive(Debug, Default)]
struct Sum {
    bytes: f64,
    allocations: f64,
    variance: f64,
}

/// Error of an estimated number of bytes: half of its 95 % confidence interval.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Error {
    variance: f64,
}

impl Error {
    fn of(sum: &Sum) -> Self {
        Self {
            variance: sum.variance,
        }
    }

    pub(crate) fn bytes(self) -> u64 {
        (self.variance.sqrt() * DEVIATIONS).ceil() as u64
    }

    /// Adds the error of another estimate.
    pub(crate) fn add(&mut self, other: Self) {
        self.variance += other.variance;
    }

    /// Returns the error of the sum of several estimates.
    pub(crate) fn sum<'a>(errors: impl Iterator<Item = &'a Self>) -> Self {
        Self {
            variance: errors.map(|error| error.variance).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATH: StackKey = StackKey { pid: 1, stack: 2 };

    fn by(sample_bytes: u32) -> Sampling {
        Sampling {
            sample_bytes,
            level_bytes: 0,
        }
    }

    fn allocation(size: u64) -> Allocation {
        recorded_at(0, size)
    }

    fn recorded_at(level: u32, size: u64) -> Allocation {
        Allocation {
            pid: PATH.pid,
            address: 0,
            size,
            stack: PATH.stack,
            time_ns: 0,
            calls: 1,
            level,
        }
    }

    /// A sequence of numbers below 2^32 that is the same in every run (splitmix64).
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            (mixed ^ mixed >> 31) >> 32
        }
    }

    #[test]
    fn a_large_block_is_exact_and_a_small_one_stands_for_the_mean() {
        let (totals, errors) = by(4096).estimate(&[allocation(5000)]);
        assert_eq!((totals[&PATH].bytes, totals[&PATH].allocations), (5000, 1));
        assert_eq!(errors[&PATH].bytes(), 0);
        let (totals, errors) = by(4096).estimate(&[allocation(64)]);
        assert_eq!((totals[&PATH].bytes, totals[&PATH].allocations), (4096, 64));
        assert!(errors[&PATH].bytes() > 4096);
    }

    /// Samples these blocks, of a size and at a level each, in a thousand runs. Expects the truth to be in the interval
    /// as often as the interval claims, and the mean of all estimates to be the truth.
    fn expect_the_truth(sampling: Sampling, random: &mut Random, blocks: &[(u64, u32)]) {
        let truth: u64 = blocks.iter().map(|(size, _)| size).sum();
        let (mut held, mut sum) = (0, 0.0);
        for _ in 0..1000 {
            let recorded: Vec<Allocation> = blocks
                .iter()
                .filter(|&&(size, level)| {
                    let threshold = sampling.probability(size, level) * (1_u64 << 32) as f64;
                    (random.next() as f64) < threshold
                })
                .map(|&(size, level)| recorded_at(level, size))
                .collect();
            let (totals, errors) = sampling.estimate(&recorded);
            let bytes = totals[&PATH].bytes;
            held += u32::from(bytes.abs_diff(truth) <= errors[&PATH].bytes());
            sum += bytes as f64;
        }
        assert!((930..=970).contains(&held), "{held} of 1000");
        let bias = sum / 1000.0 / truth as f64 - 1.0;
        assert!(bias.abs() < 0.002, "{bias}");
    }

    /// 2003 blocks of all sizes.
    #[test]
    fn estimates_have_no_bias_and_their_intervals_hold_the_truth() {
        let sampling = by(10_007);
        let mut random = Random(1);
        let sizes: Vec<u64> = (0..2003).map(|_| 1 + random.next() % 20_011).collect();
        let blocks: Vec<_> = sizes.into_iter().map(|size| (size, 0)).collect();
        expect_the_truth(sampling, &mut random, &blocks);
    }

    /// Every third block is of a time when all blocks were recorded. The other blocks are sampled at ever higher
    /// levels.
    #[test]
    fn levels_can_change_in_between() {
        let sampling = Sampling {
            sample_bytes: 0,
            level_bytes: 16,
        };
        let mut random = Random(2);
        let sizes: Vec<u64> = (0..2003).map(|_| random.next() % 1009).collect();
        let levels = (0..).map(|block| match block % 3 {
            0 => 0,
            _ => block * 10 / 2003,
        });
        let blocks: Vec<_> = sizes.into_iter().zip(levels).collect();
        expect_the_truth(sampling, &mut random, &blocks);
    }

    #[test]
    fn levels_end_where_nothing_is_left_to_save() {
        let levels = |level_bytes| Sampling {
            sample_bytes: 0,
            level_bytes,
        };
        let sampling = levels(LEVEL_BYTES);
        assert_eq!(sampling.distance(0), 0);
        assert_eq!(sampling.distance(1), 32);
        assert_eq!(sampling.distance(sampling.highest_level()), FARTHEST);
        assert_eq!(levels(0).highest_level(), 0);
        assert_eq!(levels(u32::MAX).highest_level(), 0);
        assert_eq!(levels(300 << 10).highest_level(), 0);
        assert_eq!(levels(200 << 10).highest_level(), 1);
    }
}
