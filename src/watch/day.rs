//! Highest value of the last day, in 25 numbers.

use std::collections::VecDeque;
use std::time::Duration;

/// Seconds of a slot.
const SLOT: u64 = 3600;
/// Number of full slots that are remembered.
const SLOTS: u64 = 24;

/// Highest of the values of the last 24 to 25 hours.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DayHigh {
    /// Hours since boot, each with its highest value, oldest first.
    hours: VecDeque<(u64, u64)>,
}

impl DayHigh {
    /// Adds a value. `at` is the time since boot, which never goes back.
    pub fn add(&mut self, at: Duration, value: u64) {
        let hour = at.as_secs() / SLOT;
        match self.hours.back_mut() {
            Some((last, high)) if *last == hour => *high = value.max(*high),
            _ => self.hours.push_back((hour, value)),
        }
        self.forget(hour);
    }

    /// Returns the highest value; 0 if there is none.
    pub fn highest(&mut self, now: Duration) -> u64 {
        self.forget(now.as_secs() / SLOT);
        self.hours.iter().map(|&(_, high)| high).max().unwrap_or(0)
    }

    fn forget(&mut self, hour: u64) {
        while self
            .hours
            .front()
            .is_some_and(|&(old, _)| old + SLOTS < hour)
        {
            self.hours.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_high_is_forgotten_after_a_day() {
        let hour = |hours: u64| Duration::from_secs(hours * SLOT + 7);
        let mut day = DayHigh::default();
        assert_eq!(day.highest(hour(0)), 0);
        day.add(hour(0), 37);
        day.add(hour(0), 11);
        for hours in 1..=24 {
            day.add(hour(hours), hours);
            assert_eq!(day.highest(hour(hours)), 37, "{hours}");
        }
        assert_eq!(day.highest(hour(25)), 24);
        assert_eq!(day.hours.len(), 24);
        assert_eq!(day.highest(hour(100)), 0);
    }
}
