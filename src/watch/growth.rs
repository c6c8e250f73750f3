//! Growth of held memory toward a limit: rules that begin a suspicion, and a lower bar that ends it.
//!
//! A garbage collector's sawtooth, a daily wave and a batch job return to heights that they have had before; a leak
//! does not. So growth counts only above the highest value of the last day.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::Duration;

use serde::Serialize;

use crate::watch::day::DayHigh;

/// Time in which fast growth is looked for.
const MINUTE: Duration = Duration::from_secs(60);
/// Minimum time between the oldest and the newest value by which fast growth is judged.
const MIN_SPAN: Duration = Duration::from_secs(10);
/// Minimum number of values by which fast growth is judged: one for each third.
const MIN_VALUES: usize = 3;
/// Multiple of the fluctuation that fast growth has to exceed, if each third has a single value, ...
const FAST_OVER_NOISE: f64 = 5.0;
/// ... and that slow growth has to exceed.
const SLOW_OVER_NOISE: f64 = 5.0;
/// Part of the limit by which fast growth has to exceed the highest value of the day: peaks fall between two looks, and
/// fluctuate.
const NEW_HIGH: u64 = 50;
/// Length of a window whose lowest value is a floor.
const WINDOW: Duration = Duration::from_secs(600);
/// Number of floors by which slow growth is judged.
const FLOORS: usize = 7;
/// Minimum number of steps between these floors that lead upward.
const RISES: usize = 5;
/// Minimum time of observation before slow growth is judged.
const HISTORY: Duration = Duration::from_secs(2 * 3600);
/// Minimum time between two suspicions of slow growth.
const SLOW_AGAIN: Duration = Duration::from_secs(6 * 3600);
/// Time without a reason after which a suspicion ends.
const CALM: Duration = Duration::from_secs(120);
/// Minimum growth of a step, ...
const STEP: u64 = 1 << 20;
/// ... and of floors.
const FLOOR_STEP: u64 = 4 << 20;

/// Thresholds of the rules.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// Share of the limit, from 0 to 1, from which on memory is suspicious however it grows.
    pub mark: f64,
    /// Share of the limit, from 0 to 1, below which a suspicion can end.
    pub leave: f64,
    /// Fast growth counts if the limit is reached within this time.
    pub soon: Duration,
    /// Slow growth counts if the limit is reached within this time.
    pub slow: Duration,
}

/// Rule that holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Slow growth: the lowest values of successive windows rise.
    Floor,
    /// Tasks wait for memory.
    Pressure,
    /// Fast growth: the limit will be reached soon.
    Now,
    /// Most of the limit is held.
    Mark,
}

impl Reason {
    /// All reasons, the least urgent first.
    pub const ALL: [Self; 4] = [Self::Floor, Self::Pressure, Self::Now, Self::Mark];

    /// Name, as in metrics and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::Pressure => "pressure",
            Self::Now => "now",
            Self::Mark => "mark",
        }
    }
}

/// Beginning or end of a suspicion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Memory is suspicious from now on.
    Entered(Reason),
    /// Memory is not suspicious any more.
    Left,
}

/// Observation of a place with a limit: the machine, or a cgroup.
#[derive(Debug, Clone, Copy)]
pub struct Observed {
    /// Time since boot.
    pub at: Duration,
    /// Bytes held.
    pub held: u64,
    /// Limit, in bytes.
    pub limit: u64,
    /// Whether tasks wait for memory.
    pub is_pressed: bool,
}

/// History of a place, and whether the place is suspicious.
#[derive(Debug, Default)]
pub struct Growth {
    /// Values of the last minute, oldest first.
    minute: VecDeque<(Duration, u64)>,
    /// Values that are older than a minute.
    highs: DayHigh,
    /// Current window: its start and its lowest value.
    window: Option<(Duration, u64)>,
    /// Lowest values of the last windows, oldest first.
    floors: VecDeque<u64>,
    /// Floors that are older than these.
    floor_highs: DayHigh,
    first: Option<Duration>,
    last_slow: Option<Duration>,
    suspicion: Option<Reason>,
    /// Time since which no rule holds.
    calm_since: Option<Duration>,
}

impl Growth {
    /// Adds an observation. Returns what it changes.
    pub fn add(&mut self, seen: &Observed, thresholds: &Thresholds) -> Option<Change> {
        self.first.get_or_insert(seen.at);
        self.remember(seen);
        // The history of floors is kept up to date, whichever rule holds.
        let is_slow = self.add_to_window(seen) && self.grows_slowly(seen, thresholds);
        let reason = if seen.held as f64 >= thresholds.mark * seen.limit as f64 {
            Some(Reason::Mark)
        } else if self.grows_fast(seen, thresholds) {
            Some(Reason::Now)
        } else if seen.is_pressed {
            Some(Reason::Pressure)
        } else {
            is_slow.then_some(Reason::Floor)
        };
        if reason == Some(Reason::Floor) {
            self.last_slow = Some(seen.at);
        }
        self.change(reason, seen, thresholds)
    }

    /// Returns the most urgent rule that has held since the present suspicion began. None if there is no suspicion.
    pub fn suspicion(&self) -> Option<Reason> {
        self.suspicion
    }

    /// Returns the time after which the limit is reached at the rate of the last minute. None if nothing grows steadily.
    pub fn time_left(&self, held: u64, limit: u64) -> Option<Duration> {
        let per_second = self.rate(limit)?;
        let left = limit.saturating_sub(held) as f64 / per_second;
        Duration::try_from_secs_f64(left).ok()
    }

    fn change(
        &mut self,
        reason: Option<Reason>,
        seen: &Observed,
        thresholds: &Thresholds,
    ) -> Option<Change> {
        let Some(before) = self.suspicion else {
            self.suspicion = reason;
            self.calm_since = None;
            return reason.map(Change::Entered);
        };
        self.suspicion = reason.max(Some(before));
        if reason.is_some() || seen.held as f64 >= thresholds.leave * seen.limit as f64 {
            self.calm_since = None;
            return None;
        }
        let calm_since = *self.calm_since.get_or_insert(seen.at);
        if seen.at.saturating_sub(calm_since) < CALM {
            return None;
        }
        self.suspicion = None;
        self.calm_since = None;
        Some(Change::Left)
    }

    fn remember(&mut self, seen: &Observed) {
        self.minute.push_back((seen.at, seen.held));
        while let Some(&(at, held)) = self.minute.front()
            && seen.at.saturating_sub(at) > MINUTE
        {
            self.minute.pop_front();
            self.highs.add(at, held);
        }
    }

    /// Adds a value to the current window. Returns whether a window is complete with it, so that there is a new floor.
    fn add_to_window(&mut self, seen: &Observed) -> bool {
        let (start, lowest) = *self.window.get_or_insert((seen.at, seen.held));
        if seen.at.saturating_sub(start) < WINDOW {
            self.window = Some((start, lowest.min(seen.held)));
            return false;
        }
        self.window = Some((seen.at, seen.held));
        self.floors.push_back(lowest);
        if self.floors.len() > FLOORS
            && let Some(old) = self.floors.pop_front()
        {
            self.floor_highs.add(seen.at, old);
        }
        true
    }

    fn grows_fast(&mut self, seen: &Observed, thresholds: &Thresholds) -> bool {
        let high = self.highs.highest(seen.at);
        seen.held > seen.limit / 2
            && seen.held > high + seen.limit / NEW_HIGH
            && self
                .time_left(seen.held, seen.limit)
                .is_some_and(|left| left < thresholds.soon)
    }

    /// Returns the bytes per second by which memory has grown over the last minute. None unless it has grown from the
    /// first third to the second and from there to the last, and by far more than it fluctuates.
    fn rate(&self, limit: u64) -> Option<f64> {
        let (first, last) = (self.minute.front()?, self.minute.back()?);
        let span = last.0.saturating_sub(first.0);
        let count = self.minute.len();
        if span < MIN_SPAN || count < MIN_VALUES {
            return None;
        }
        let third = (count / 3).max(1);
        let mean = |from: usize, to: usize| {
            let values = self.minute.range(from..to);
            values.map(|&(_, held)| held as f64).sum::<f64>() / (to - from) as f64
        };
        let means = [
            mean(0, third),
            mean(third, count - third),
            mean(count - third, count),
        ];
        let step = step(limit) as f64;
        let [low, middle, high] = means;
        let rises = middle - low > step && high - middle > step;
        let per_second = (high - low) / (span.as_secs_f64() * 2.0 / 3.0);
        let values = self.minute.iter().map(|&(_, held)| held);
        let noise = FAST_OVER_NOISE * fluctuation(values) / (third as f64).sqrt();
        (rises && high - low > noise).then_some(per_second)
    }

    fn grows_slowly(&mut self, seen: &Observed, thresholds: &Thresholds) -> bool {
        let age = seen.at.saturating_sub(self.first.unwrap_or(seen.at));
        let is_recent = |&last: &Duration| seen.at.saturating_sub(last) < SLOW_AGAIN;
        if self.floors.len() < FLOORS
            || age < HISTORY
            || self.last_slow.as_ref().is_some_and(is_recent)
        {
            return false;
        }
        let steps = self.floors.iter().zip(self.floors.iter().skip(1));
        let rises = steps.filter(|(before, after)| after > before).count();
        let (first, last) = (self.floors[0], self.floors[FLOORS - 1]);
        let grown = last.saturating_sub(first);
        let noise = SLOW_OVER_NOISE * fluctuation(self.floors.iter().copied());
        if rises < RISES
            || grown < FLOOR_STEP.max(seen.limit / 100)
            || grown as f64 <= noise
            || last <= self.floor_highs.highest(seen.at)
        {
            return false;
        }
        let per_second = grown as f64 / (WINDOW * (FLOORS as u32 - 1)).as_secs_f64();
        let left = seen.limit.saturating_sub(last) as f64 / per_second;
        left < thresholds.slow.as_secs_f64()
    }
}

/// Returns the mean deviation of the steps between successive values from the mean step: 0 for steady growth.
fn fluctuation(values: impl Iterator<Item = u64> + Clone) -> f64 {
    let steps = values.clone().zip(values.skip(1));
    let steps = steps.map(|(before, after)| after as f64 - before as f64);
    let count = steps.clone().count().max(1) as f64;
    let mean = steps.clone().sum::<f64>() / count;
    steps.map(|step| (step - mean).abs()).sum::<f64>() / count
}

/// Returns the minimum growth that counts below this limit.
fn step(limit: u64) -> u64 {
    STEP.max(limit / 200)
}
