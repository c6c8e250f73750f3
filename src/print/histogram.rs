//! Histograms by powers of two, which `bpf/include/histogram.bpf.h` fills, printed as bpftrace's
//! `hist()` prints them.

use std::fmt;
use std::io::{self, Write};

use serde::{Serialize, Serializer};

use crate::print::output::Row;

/// Slots of a histogram: one for zeros and one for each length in bits.
const SLOTS: usize = 65;

/// Columns of the longest bar.
const BAR_COLUMNS: f32 = 52.0;

/// Counts of values by their length in bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram {
    /// Slot 0 counts zeros, slot n the values in [2^(n-1), 2^n).
    slots: [u64; SLOTS],
}

/// A histogram as a row of its own: `{"type":"histogram","name":"swapin_ns","buckets":[...]}`.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "histogram")]
pub struct Named {
    /// Name of the measured quantity, with its unit at the end.
    pub name: &'static str,
    /// The counts of its values.
    pub buckets: Histogram,
}

impl Row for Named {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        self.buckets.text(self.name, out)
    }
}

/// A slot with its bounds, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Bucket {
    /// Smallest value of the bucket.
    pub min: u64,
    /// Largest value of the bucket.
    pub max: u64,
    /// Number of values seen.
    pub count: u64,
}

impl Histogram {
    /// Creates an empty histogram.
    pub fn new() -> Self {
        Self { slots: [0; SLOTS] }
    }

    /// Counts one value.
    pub fn add(&mut self, value: u64) {
        let slot = u64::BITS - value.leading_zeros();
        self.slots[slot as usize] += 1;
    }

    /// Returns the number of values seen.
    pub fn count(&self) -> u64 {
        self.slots.iter().sum()
    }

    /// Returns the number of values seen that are below 2 to the power of `bits`.
    pub(crate) fn count_below(&self, bits: usize) -> u64 {
        self.slots[..=bits].iter().sum()
    }

    /// Adds the counts of another histogram.
    pub fn add_all(&mut self, more: &Self) {
        for (slot, more) in self.slots.iter_mut().zip(more.slots) {
            *slot += more;
        }
    }

    /// Returns the buckets from the lowest to the highest that is not empty, with the empty ones between.
    pub fn buckets(&self) -> impl Iterator<Item = Bucket> + '_ {
        let first = self.slots.iter().position(|&count| count > 0);
        let end = self.slots.iter().rposition(|&count| count > 0);
        let range = first.zip(end).map_or(0..0, |(first, last)| first..last + 1);
        range.map(|slot| Bucket {
            min: lower_bound(slot),
            max: match slot {
                64 => u64::MAX,
                _ => lower_bound(slot + 1) - 1,
            },
            count: self.slots[slot],
        })
    }

    /// Writes `@name:`, a line for each bucket, and an empty line; nothing if there is no value.
    ///
    /// # Errors
    /// If `out` cannot be written to.
    pub fn text(&self, name: &str, out: &mut dyn Write) -> io::Result<()> {
        let most = self.slots.iter().max().copied().unwrap_or(0);
        if most == 0 {
            return Ok(());
        }
        writeln!(out, "@{name}:")?;
        for bucket in self.buckets() {
            writeln!(
                out,
                "{:<16}{:>8} |{:<52}|",
                Label(bucket).to_string(),
                bucket.count,
                bar(bucket.count, most)
            )?;
        }
        writeln!(out)
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

/// Converts the slots of a BPF program's histogram, whatever skeleton its type is from.
impl From<[u64; SLOTS]> for Histogram {
    fn from(slots: [u64; SLOTS]) -> Self {
        Self { slots }
    }
}

/// Serializes to an array of the buckets.
impl Serialize for Histogram {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.buckets())
    }
}

fn lower_bound(slot: usize) -> u64 {
    match slot {
        0 => 0,
        _ => 1 << (slot - 1),
    }
}

/// Name of a bucket's interval: `[0]`, `[1]`, `[2, 4)`, `[512, 1K)`.
struct Label(Bucket);

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Bucket { min, max, .. } = self.0;
        match min {
            0 | 1 => write!(f, "[{min}]"),
            _ => write!(
                f,
                "[{}, {})",
                Power(min.trailing_zeros()),
                Power(u64::BITS - max.leading_zeros())
            ),
        }
    }
}

/// 2 to the given power, with a suffix for every factor of 1024.
struct Power(u32);

impl fmt::Display for Power {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = ["", "K", "M", "G", "T", "P", "E"][self.0 as usize / 10];
        write!(f, "{}{suffix}", 1 << (self.0 % 10))
    }
}

/// Draws the bar of a bucket, where the largest bucket has `most` values. bpftrace computes a bar's length in single
/// precision. This function does, too, or a bar would now and then differ by one.
fn bar(count: u64, most: u64) -> String {
    "@".repeat((count as f32 / most as f32 * BAR_COLUMNS) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram(values: &[(u64, u64)]) -> Histogram {
        let mut histogram = Histogram::new();
        for &(value, count) in values {
            for _ in 0..count {
                histogram.add(value);
            }
        }
        histogram
    }

    fn text(histogram: &Histogram) -> String {
        let mut text = Vec::new();
        histogram.text("usecs", &mut text).expect("memory");
        String::from_utf8(text).expect("UTF-8")
    }

    #[test]
    fn text_is_bpftraces() {
        let histogram = histogram(&[
            (0, 3),
            (1, 2),
            (3, 12),
            (4, 1),
            (511, 7),
            (512, 2),
            (1024, 13),
        ]);
        assert_eq!(
            text(&histogram),
            "\
@usecs:
[0]                    3 |@@@@@@@@@@@@                                        |
[1]                    2 |@@@@@@@@                                            |
[2, 4)                12 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@    |
[4, 8)                 1 |@@@@                                                |
[8, 16)                0 |                                                    |
[16, 32)               0 |                                                    |
[32, 64)               0 |                                                    |
[64, 128)              0 |                                                    |
[128, 256)             0 |                                                    |
[256, 512)             7 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@                        |
[512, 1K)              2 |@@@@@@@@                                            |
[1K, 2K)              13 |@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@|

"
        );
    }

    #[test]
    fn bounds_have_suffixes() {
        let labels = |values: &[(u64, u64)]| -> Vec<String> {
            histogram(values)
                .buckets()
                .map(|bucket| Label(bucket).to_string())
                .collect()
        };
        assert_eq!(labels(&[(1 << 19, 1)]), ["[512K, 1M)"]);
        assert_eq!(labels(&[(1 << 20, 1)]), ["[1M, 2M)"]);
        assert_eq!(labels(&[(1 << 39, 1)]), ["[512G, 1T)"]);
        assert_eq!(labels(&[(1 << 49, 1)]), ["[512T, 1P)"]);
        assert_eq!(labels(&[(1 << 59, 1)]), ["[512P, 1E)"]);
        assert_eq!(labels(&[(u64::MAX, 1)]), ["[8E, 16E)"]);
    }

    #[test]
    fn nothing_seen_is_nothing_printed() {
        assert_eq!(text(&Histogram::new()), "");
        assert_eq!(Histogram::new().buckets().count(), 0);
    }

    #[test]
    fn buckets_are_contiguous_and_lose_nothing() {
        let mut histogram = Histogram::new();
        for bits in 0..64 {
            histogram.add((1 << bits) - 1);
            histogram.add(1 << bits);
        }
        histogram.add(u64::MAX);
        let buckets: Vec<Bucket> = histogram.buckets().collect();
        assert_eq!(buckets.len(), SLOTS);
        assert_eq!(buckets[0].min, 0);
        assert_eq!(buckets[SLOTS - 1].max, u64::MAX);
        for pair in buckets.windows(2) {
            assert_eq!(pair[0].max + 1, pair[1].min);
        }
        assert_eq!(histogram.count(), 129);
    }

    #[test]
    fn json_has_inclusive_bounds() {
        let json = serde_json::to_string(&histogram(&[(2, 1), (8, 2)])).expect("JSON");
        assert_eq!(
            json,
            r#"[{"min":2,"max":3,"count":1},{"min":4,"max":7,"count":0},{"min":8,"max":15,"count":2}]"#
        );
    }
}
