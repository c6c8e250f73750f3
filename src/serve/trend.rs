//! Growth of stacks: samples of the largest stacks over the last minutes.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

/// Maximum number of looks that are kept.
const MAX_SNAPSHOTS: usize = 60;
/// Maximum number of stacks that are kept of each look: those with the largest numbers.
const MAX_STACKS: usize = 1000;
/// Minimum time between two looks.
const PAUSE: Duration = Duration::from_secs(1);

/// A process, and the id of one of its stacks.
pub type Key = (u32, u64);

/// Numbers of the stacks at the last looks.
#[derive(Debug, Default)]
pub struct Trends(VecDeque<Look>);

#[derive(Debug)]
struct Look {
    time: Instant,
    numbers: HashMap<Key, u64>,
    /// Whether there were more stacks than [`MAX_STACKS`].
    is_cut: bool,
}

/// Numbers of one stack over time, each with the seconds since the first look that is kept.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Trend(pub Vec<(f64, u64)>);

impl Look {
    /// Returns the number of a stack. A stack that is not in the look has 0, or None if the look is cut.
    fn of(&self, key: Key) -> Option<u64> {
        let absent = (!self.is_cut).then_some(0);
        self.numbers.get(&key).copied().or(absent)
    }
}

impl Trends {
    /// Takes a look, unless the last one was less than a second ago.
    pub fn look(&mut self, time: Instant, numbers: impl IntoIterator<Item = (Key, u64)>) {
        let last = self.0.back();
        if last.is_some_and(|last| time.saturating_duration_since(last.time) < PAUSE) {
            return;
        }
        let mut numbers: Vec<(Key, u64)> = numbers.into_iter().collect();
        let is_cut = numbers.len() > MAX_STACKS;
        if is_cut {
            numbers.select_nth_unstable_by_key(MAX_STACKS, |&(_, number)| u64::MAX - number);
            numbers.truncate(MAX_STACKS);
        }
        if self.0.len() == MAX_SNAPSHOTS {
            self.0.pop_front();
        }
        self.0.push_back(Look {
            time,
            numbers: numbers.into_iter().collect(),
            is_cut,
        });
    }

    /// Returns the numbers of a stack at each look, and now. Looks that did not keep the stack are omitted.
    pub fn of(&self, key: Key, now: Instant, number: u64) -> Trend {
        let first = self.0.front().map_or(now, |first| first.time);
        let seconds = |time: Instant| time.saturating_duration_since(first).as_secs_f64();
        let point = |look: &Look| Some((seconds(look.time), look.of(key)?));
        let mut points: Vec<(f64, u64)> = self.0.iter().filter_map(point).collect();
        points.push((seconds(now), number));
        Trend(points)
    }

    /// Returns the growth per second of a stack that now has `number`, if an earlier number is known.
    pub fn per_second(&self, key: Key, now: Instant, number: u64) -> Option<f64> {
        let known = |look: &Look| Some((look.time, look.of(key)?));
        let (time, before) = self.0.iter().find_map(known)?;
        let seconds = now.saturating_duration_since(time).as_secs_f64();
        (seconds > 0.0).then(|| (number as f64 - before as f64) / seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trend_is_from_the_first_look_kept_to_now() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut trends = Trends::default();
        assert_eq!(trends.per_second((1, 1), start, 5), None);
        trends.look(start, [((1, 1), 100)]);
        trends.look(start + PAUSE / 2, [((1, 1), 7)]);
        trends.look(at(2), [((1, 1), 300), ((1, 2), 50)]);
        let trend = trends.of((1, 1), at(4), 500);
        assert_eq!(trend.0, [(0.0, 100), (2.0, 300), (4.0, 500)]);
        assert_eq!(trends.per_second((1, 1), at(4), 500), Some(100.0));
        assert_eq!(trends.per_second((1, 1), at(4), 60), Some(-10.0));
        let new = trends.of((1, 2), at(4), 0);
        assert_eq!(new.0, [(0.0, 0), (2.0, 50), (4.0, 0)]);
        assert_eq!(trends.per_second((9, 9), at(4), 8), Some(2.0));
    }

    #[test]
    fn looks_and_stacks_are_bounded() {
        let start = Instant::now();
        let mut trends = Trends::default();
        let stacks = MAX_STACKS as u64 + 7;
        for second in 0..MAX_SNAPSHOTS as u64 + 11 {
            let numbers = (1..=stacks).map(|stack| ((1, stack), stack));
            trends.look(start + Duration::from_secs(second), numbers);
        }
        assert_eq!(trends.0.len(), MAX_SNAPSHOTS);
        assert!(trends.0.iter().all(|look| look.numbers.len() == MAX_STACKS));
        let now = start + Duration::from_secs(71);
        assert_eq!(trends.of((1, stacks), now, 1).0.len(), MAX_SNAPSHOTS + 1);
        // The smallest stacks were not kept, so their earlier numbers are not known.
        assert_eq!(trends.of((1, 7), now, 1).0, [(60.0, 1)]);
        assert_eq!(trends.of((1, 8), now, 1).0.len(), MAX_SNAPSHOTS + 1);
    }
}
