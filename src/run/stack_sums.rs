//! Sums of the counts by process and stack since the last report, one for all that the report does not tell apart.
//!
//! Counts are taken out of the kernel whenever its maps fill, so a thousand runs of a compiler, whose addresses all
//! differ, pass through small maps. Here stacks with the same names are merged.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};
use std::mem;
use std::ops::AddAssign;
use std::rc::Rc;

use crate::run::count_stacks::Weight;
use crate::stacks::named::StackIds;
use crate::stacks::table::{LOST, NO_STACK};

/// Gap of a line whose stack is lost.
pub(crate) const LOST_STACK: &str = "[lost]";

/// Maximum number of places whose lines are remembered: 50 MB.
const MAX_PLACES: usize = 1 << 20;

/// Key of a count in the kernel: a process with its stacks.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    /// The ids of the two stacks.
    pub(crate) user: u64,
    pub(crate) kernel: u64,
    pub(crate) pid: u32,
    pub(crate) comm: String,
}

impl Key {
    /// The ids that the stacks are read by.
    pub(crate) fn ids(&self) -> StackIds<'_> {
        StackIds {
            pid: self.pid,
            comm: &self.comm,
            user: Some(self.user),
            kernel: Some(self.kernel),
        }
    }

    /// Whether the key has a stack, which can be omitted for lack of space.
    pub(crate) fn has_stacks(&self) -> bool {
        [self.user, self.kernel]
            .iter()
            .any(|&id| ![NO_STACK, LOST].contains(&id))
    }

    /// Returns the key of this process with its stacks lost.
    pub(crate) fn without_stacks(self) -> Self {
        let lose = |id| if id == NO_STACK { NO_STACK } else { LOST };
        Self {
            user: lose(self.user),
            kernel: lose(self.kernel),
            ..self
        }
    }
}

/// How many events were counted, and of how many bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) events: u64,
    pub(crate) bytes: u64,
    /// The id of the cgroup that the process was in last; 0 if cgroups are not requested.
    pub(crate) cgroup: u64,
}

impl AddAssign for Count {
    fn add_assign(&mut self, later: Self) {
        self.events += later.events;
        self.bytes += later.bytes;
        self.cgroup = later.cgroup;
    }
}

impl Count {
    pub(crate) fn weight(self, weight: Weight) -> u64 {
        match weight {
            Weight::Events => self.events,
            Weight::Bytes => self.bytes,
        }
    }
}

/// Adds to the key's count. If there are `most` keys already, a new key's stacks are omitted. Returns whether the key
/// has kept its stacks. Keys without stacks are always added.
pub(crate) fn add(counts: &mut HashMap<Key, Count>, key: Key, count: Count, most: u32) -> bool {
    let is_whole = counts.len() < most as usize || !key.has_stacks() || counts.contains_key(&key);
    let key = if is_whole { key } else { key.without_stacks() };
    *counts.entry(key).or_default() += count;
    is_whole
}

/// Makes hashes of 128 bits. Two things with equal hashes are taken for the same thing.
#[derive(Debug, Default)]
pub(crate) struct Hash128Builder([RandomState; 2]);

impl Hash128Builder {
    pub(crate) fn begin(&self) -> WideHasher {
        WideHasher(self.0.each_ref().map(RandomState::build_hasher))
    }
}

/// A hash of 128 bits that is being computed.
pub(crate) struct WideHasher([DefaultHasher; 2]);

impl WideHasher {
    pub(crate) fn finish_wide(&self) -> u128 {
        let [high, low] = self.0.each_ref().map(Hasher::finish);
        u128::from(high) << 64 | u128::from(low)
    }
}

impl Hasher for WideHasher {
    fn write(&mut self, bytes: &[u8]) {
        for half in &mut self.0 {
            half.write(bytes);
        }
    }

    fn finish(&self) -> u64 {
        self.0[0].finish()
    }
}

/// Texts of frames, each of which is kept once for all lines that contain it: the lines of a compiler's stacks have
/// 3 KB each.
#[derive(Debug, Default)]
struct FrameTexts {
    numbers: HashMap<Rc<str>, u32>,
    texts: Vec<Rc<str>>,
}

impl FrameTexts {
    /// Returns the numbers of a line's parts. Equal lines have equal numbers. None if a part is new: then there is no
    /// such line yet.
    fn find(&self, line: &str) -> Option<Vec<u32>> {
        let parts = Self::split(line);
        parts.map(|part| self.numbers.get(part).copied()).collect()
    }

    /// Returns the numbers of a line's parts, and adds those that are new.
    fn add(&mut self, line: &str) -> Rc<[u32]> {
        let mut number = |part: &str| {
            if let Some(&number) = self.numbers.get(part) {
                return number;
            }
            let (number, text) = (self.texts.len() as u32, Rc::from(part));
            self.texts.push(Rc::clone(&text));
            self.numbers.insert(text, number);
            number
        };
        Self::split(line).map(&mut number).collect()
    }

    /// Splits a line behind each separator of frames.
    fn split(line: &str) -> impl Iterator<Item = &str> {
        line.split_inclusive([';', '\n'])
    }

    fn parts<'a>(&'a self, numbers: &'a [u32]) -> impl Iterator<Item = &'a str> {
        numbers.iter().map(|&number| &*self.texts[number as usize])
    }
}

/// A line of a report: a folded stack, or a stack in text.
#[derive(Debug)]
struct Line {
    /// Numbers of the texts that the line consists of.
    frames: Rc<[u32]>,
    sum: u64,
    /// Why the stack is incomplete, `[lost]` or `[truncated: ...]`; None if it is complete.
    gap: Option<String>,
}

/// The sums of one report.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    lines: Vec<Line>,
    texts: FrameTexts,
    /// The number of lines that have stacks.
    stacks: u32,
    /// Indexes of lines by their frames.
    by_frames: HashMap<Rc<[u32]>, usize>,
    /// Indexes of lines by the places of their frames' code, so that a stack is symbolized only once.
    by_hash: HashMap<u128, usize>,
    /// Counts by process and stack, for output that keeps these apart, such as JSON.
    pub(crate) counts: HashMap<Key, Count>,
}

impl Sums {
    /// Adds to the line of the stacks at this place. Returns false if no line is known for the place yet.
    pub(crate) fn add_at(&mut self, place: u128, weight: u64) -> bool {
        let Some(&number) = self.by_hash.get(&place) else {
            return false;
        };
        self.lines[number].sum += weight;
        true
    }

    /// Adds to the line with this text; `place` is the place of its stack, if known. Returns false if the line would
    /// be new, and there are `most` lines of stacks already. Without `most`, for a line that has no stack to omit,
    /// the function returns true.
    pub(crate) fn add_line(
        &mut self,
        (text, gap): (String, Option<String>),
        place: Option<u128>,
        weight: u64,
        most: Option<u32>,
    ) -> bool {
        let known = self.texts.find(&text);
        let known = known.and_then(|frames| self.by_frames.get(&*frames).copied());
        let number = match known {
            Some(number) => number,
            None => {
                let limit = most.filter(|_| gap.as_deref() != Some(LOST_STACK));
                if limit.is_some_and(|most| self.stacks >= most) {
                    return false;
                }
                self.stacks += u32::from(limit.is_some());
                let (number, frames) = (self.lines.len(), self.texts.add(&text));
                self.by_frames.insert(Rc::clone(&frames), number);
                self.lines.push(Line {
                    frames,
                    sum: 0,
                    gap,
                });
                number
            }
        };
        self.lines[number].sum += weight;
        if let Some(place) = place {
            if self.by_hash.len() == MAX_PLACES {
                self.by_hash.clear();
            }
            self.by_hash.insert(place, number);
        }
        true
    }

    /// Returns the sums, and begins anew with empty ones.
    pub(crate) fn take(&mut self) -> Self {
        mem::take(self)
    }

    /// Returns the numbers of the lines whose sums are above 0, with their sums; the largest last. Lines with equal
    /// sums are in descending order of their texts.
    pub(crate) fn largest_lines(&self) -> Vec<(usize, u64)> {
        let lines = self.lines.iter().enumerate();
        let sums = lines.map(|(number, line)| (number, line.sum));
        let mut sums: Vec<_> = sums.filter(|&(_, sum)| sum > 0).collect();
        sums.sort_by(|&(a, sum), &(b, other)| {
            // Texts compare as their parts do: no part begins with another one, but for the last.
            sum.cmp(&other)
                .then_with(|| self.parts(b).cmp(self.parts(a)))
        });
        sums
    }

    /// Returns the text of the line with this number.
    pub(crate) fn text(&self, line: usize) -> String {
        self.parts(line).collect()
    }

    fn parts(&self, line: usize) -> impl Iterator<Item = &str> {
        self.texts.parts(&self.lines[line].frames)
    }

    /// Returns the sums of incomplete stacks, by the reasons why they are incomplete; the largest last.
    pub(crate) fn gaps(&self) -> Vec<(String, u64)> {
        let mut gaps: HashMap<String, u64> = HashMap::new();
        for line in &self.lines {
            if let Some(gap) = &line.gap {
                *gaps.entry(gap.clone()).or_default() += line.sum;
            }
        }
        largest(gaps, None)
    }
}

/// Returns the `top` largest sums above 0, or all, the largest last. Equal sums are in descending order of their
/// keys.
pub(crate) fn largest<K: Clone + Ord>(
    sums: impl IntoIterator<Item = (K, u64)>,
    top: Option<usize>,
) -> Vec<(K, u64)> {
    let mut sums: Vec<(K, u64)> = sums.into_iter().filter(|(_, sum)| *sum > 0).collect();
    sums.sort_by_cached_key(|(key, sum)| (*sum, Reverse(key.clone())));
    let skip = top.map_or(0, |top| sums.len().saturating_sub(top));
    sums.split_off(skip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_come_last_and_what_is_nothing_not_at_all() {
        let sums = || HashMap::from([("b", 2), ("a", 2), ("c", 9), ("none", 0)]);
        assert_eq!(largest(sums(), None), [("b", 2), ("a", 2), ("c", 9)]);
        assert_eq!(largest(sums(), Some(1)), [("c", 9)]);
    }

    #[test]
    fn what_has_no_room_loses_its_stack_and_not_its_count() {
        let mut counts = HashMap::new();
        let key = |user| Key {
            user,
            kernel: NO_STACK,
            pid: 7,
            comm: "cc1".into(),
        };
        let count = Count {
            events: 3,
            bytes: 5,
            cgroup: 9,
        };
        assert!(add(&mut counts, key(100), count, 1) && add(&mut counts, key(100), count, 1));
        assert!(!add(&mut counts, key(101), count, 1) && !add(&mut counts, key(102), count, 1));
        assert_eq!(key(101).without_stacks(), key(LOST));
        assert_eq!(counts[&key(LOST)], counts[&key(100)]);
        assert_eq!(counts[&key(LOST)].events, 6);
        assert_eq!(counts.len(), 2);
    }

    #[test]
    fn what_has_no_stacks_always_finds_room() {
        let mut sums = Sums::default();
        let key = |user, pid| Key {
            user,
            kernel: NO_STACK,
            pid,
            comm: "kswapd0".into(),
        };
        let mut add = |key| super::add(&mut sums.counts, key, Count::default(), 1);
        assert!(!key(NO_STACK, 8).has_stacks() && key(100, 8).has_stacks());
        assert!(add(key(100, 7)) && add(key(NO_STACK, 8)) && !add(key(100, 8)));

        let line = |text: &str| (text.to_owned(), None);
        assert!(sums.add_line(line("p;main"), None, 7, Some(1)));
        assert!(!sums.add_line(line("kswapd0"), None, 5, Some(1)));
        assert!(sums.add_line(line("kswapd0"), None, 5, None));
        let lines = sums.largest_lines().into_iter();
        assert_eq!(lines.map(|(_, sum)| sum).sum::<u64>(), 12);
    }

    #[test]
    fn gaps_are_told_by_weight() {
        let mut sums = Sums::default();
        let line = |text: &str, gap: Option<&str>| (text.to_owned(), gap.map(str::to_owned));
        let by_fp = Some("[truncated: by frame pointers alone]");
        assert!(sums.add_line(line("p;[lost]", Some(LOST_STACK)), None, 3, Some(2)));
        assert!(sums.add_line(line("p;main", None), Some(1), 7, Some(2)));
        assert!(sums.add_line(line("p;f", by_fp), Some(2), 2, Some(2)));
        assert!(!sums.add_line(line("p;g", None), Some(3), 2, Some(2)));
        // A line that is omitted leaves nothing behind.
        assert!(sums.texts.find("g").is_none() && sums.texts.find("f").is_some());
        assert!(sums.add_line(line("p;f", by_fp), Some(4), 2, Some(2)));
        assert!(sums.add_at(4, 1) && sums.add_at(1, 1) && !sums.add_at(3, 1));
        let gaps = sums.gaps();
        let gaps: Vec<_> = gaps.iter().map(|(gap, sum)| (gap.as_str(), *sum)).collect();
        assert_eq!(
            gaps,
            [("[lost]", 3), ("[truncated: by frame pointers alone]", 5)]
        );
        let lines = sums.largest_lines().into_iter();
        let lines: Vec<_> = lines.map(|(line, sum)| (sums.text(line), sum)).collect();
        let expected = [("p;[lost]", 3), ("p;f", 5), ("p;main", 8)];
        assert_eq!(lines, expected.map(|(text, sum)| (text.to_owned(), sum)));
        assert!(Sums::default().gaps().is_empty());
    }

    #[test]
    fn lines_with_equal_sums_are_in_descending_order_of_their_texts() {
        let texts = ["p;ab", "p;a;b", "p;a", "p;a;b;c", "q\n  p\n", "p;a-b"];
        let mut sums = Sums::default();
        for text in texts {
            assert!(sums.add_line((text.to_owned(), None), None, 7, Some(9)));
        }
        let lines = sums.largest_lines().into_iter();
        let lines: Vec<_> = lines.map(|(line, _)| sums.text(line)).collect();
        let mut expected = texts;
        expected.sort_by(|a, b| b.cmp(a));
        assert_eq!(lines, expected);
        // `p;` and `a;` are each kept once.
        assert_eq!(sums.texts.texts.len(), 10);
    }
}
