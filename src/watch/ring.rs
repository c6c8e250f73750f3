//! Samples of the last minutes.

use std::collections::VecDeque;
use std::time::Duration;

/// Time for which samples are kept.
const SPAN: Duration = Duration::from_secs(600);
/// Maximum number of samples: one a second, and further ones when tasks wait for memory.
const MOST: usize = 660;

/// Memory at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// Time since boot.
    pub at: Duration,
    /// Bytes held.
    pub held: u64,
    /// Bytes in use, including page cache.
    pub current: u64,
}

/// Samples of the last ten minutes.
#[derive(Debug, Clone, Default)]
pub struct Ring(VecDeque<Sample>);

impl Ring {
    /// Adds a sample, and forgets those that are too old.
    pub fn add(&mut self, sample: Sample) {
        self.0.push_back(sample);
        let is_old = |first: &Sample| sample.at.saturating_sub(first.at) > SPAN;
        while self.0.len() > MOST || self.0.front().is_some_and(is_old) {
            self.0.pop_front();
        }
    }

    /// Returns the samples, oldest first.
    pub fn samples(&self) -> Vec<Sample> {
        self.0.iter().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_minutes_are_kept_and_not_too_many_samples() {
        let sample = |millis| Sample {
            at: Duration::from_millis(millis),
            held: millis,
            current: 2 * millis,
        };
        let mut ring = Ring::default();
        for second in 0..=700 {
            ring.add(sample(second * 1000));
        }
        let samples = ring.samples();
        assert_eq!((samples[0], samples.len()), (sample(100_000), 601));
        for millis in 700_001..705_000 {
            ring.add(sample(millis));
        }
        assert_eq!(ring.samples().len(), MOST);
    }
}
