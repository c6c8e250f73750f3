//! Schedule of images: often enough to tell growth from blocks that come and go, and seldom enough to do no harm.

use std::time::Duration;

use memtools::verdict;

/// Maximum and minimum number of images.
const MAX_IMAGES: u32 = 12;
const LEAST: u32 = 4;
/// Maximum part of the period for which the process may be stopped.
const MAX_PAUSED_SHARE: f64 = 0.01;
/// Maximum part of the period that it may take to examine images.
const WORKING: f64 = 0.5;
/// Width of the range in which an image comes early or late, as a part of the distance between images. So images do not
/// keep step with what the process does.
const JITTER: f64 = 0.4;
/// Fractional part of the golden ratio. The fractional parts of its multiples are spread evenly.
const GOLDEN: f64 = 0.618_034;
/// Duration of the work on the last image, in looks: what refers to its blocks is found, and both are done again. Half of
/// it is a reserve, because others want the CPUs more at some times than at others.
const LAST: u32 = 6;
/// Maximum part of the time that is kept for that.
const MAX_LAST: f64 = 0.4;

/// Times of all images.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Schedule {
    wanted: Duration,
    images: u32,
    /// Time of the last image, as it was planned.
    period: Duration,
    /// Time of the last image.
    last: Duration,
}

impl Schedule {
    /// Makes the schedule for a process that was stopped for `paused` for its first image, which was examined in
    /// `took`. All has to be done in the time that is `wanted`.
    pub(super) fn new(wanted: Duration, paused: Duration, took: Duration) -> Self {
        let within = |part: f64, each: Duration| {
            wanted.as_secs_f64() * part / each.as_secs_f64().max(f64::MIN_POSITIVE)
        };
        let images = within(MAX_PAUSED_SHARE, paused).min(within(WORKING, took));
        let last = last(wanted, took);
        Self {
            wanted,
            images: images.clamp(f64::from(LEAST), f64::from(MAX_IMAGES)) as u32,
            period: last,
            last,
        }
    }

    /// Takes into account how long it took to examine the latest image. The process grows, and the machine may have
    /// become busy.
    pub(super) fn add(&mut self, took: Duration) {
        self.last = last(self.wanted, took);
    }

    /// Returns the number of images to take.
    pub(super) fn images(self) -> u32 {
        self.images
    }

    /// Returns when the next image is due, and whether it is the last. Times count from the beginning. Images whose
    /// time has passed are omitted.
    pub(super) fn next(self, after: Duration) -> (Duration, bool) {
        let due = (1..self.images - 1).map(|number| self.at(number));
        let due = due.into_iter().find(|&due| due > after);
        match due.filter(|&due| due < self.last) {
            Some(due) => (due, false),
            None => (self.last, true),
        }
    }

    fn at(self, number: u32) -> Duration {
        let last = f64::from(self.images - 1);
        let number = f64::from(number);
        let jitter = JITTER * ((number * GOLDEN).fract() - 0.5);
        self.period.mul_f64((number + jitter) / last)
    }
}

/// Returns when the last image is due, if it takes so long to examine an image.
fn last(wanted: Duration, took: Duration) -> Duration {
    let last = took * LAST + verdict::BETWEEN;
    wanted - last.min(wanted.mul_f64(MAX_LAST))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn milliseconds(number: u64) -> Duration {
        Duration::from_millis(number)
    }

    /// Returns the times of all images.
    fn moments(schedule: Schedule) -> Vec<f64> {
        let mut moments = vec![0.0];
        loop {
            let (due, is_last) = schedule.next(Duration::from_secs_f64(moments[moments.len() - 1]));
            moments.push(due.as_secs_f64());
            if is_last {
                return moments;
            }
        }
    }

    #[test]
    fn images_are_as_many_as_do_no_harm() {
        let images = |paused, took| {
            let schedule = Schedule::new(MINUTE, milliseconds(paused), milliseconds(took));
            assert_eq!(moments(schedule).len(), schedule.images() as usize);
            (schedule.images(), schedule.last)
        };
        assert_eq!(images(2, 50), (12, milliseconds(59_600)));
        // 1 % of a minute is enough for six pauses of 90 ms.
        assert_eq!(images(90, 500), (6, milliseconds(56_900)));
        // Half a minute is enough for five looks of 6 s.
        assert_eq!(images(2, 6000), (5, milliseconds(36_000)));
        // A pause may always be as long as --max-pause allows.
        assert_eq!(images(2000, 500), (4, milliseconds(56_900)));
        assert_eq!(images(2, 30_000), (4, milliseconds(36_000)));
    }

    #[test]
    fn images_are_apart_and_not_in_step() {
        let moments = moments(Schedule::new(MINUTE, milliseconds(1), milliseconds(10)));
        let distances: Vec<_> = moments.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let even = 59.84 / 11.0;
        assert!(
            distances
                .iter()
                .all(|distance| (0.5 * even..1.5 * even).contains(distance)),
            "{distances:?}"
        );
        let uneven = distances
            .iter()
            .filter(|&distance| (distance - even).abs() > 0.05 * even);
        assert!(uneven.count() > 5, "{distances:?}");
    }

    #[test]
    fn what_was_missed_is_left_out() {
        let schedule = Schedule::new(MINUTE, milliseconds(1), milliseconds(10));
        assert!(!schedule.next(milliseconds(40_000)).1);
        for after in [58_000, 61_000] {
            let last = schedule.next(milliseconds(after));
            assert_eq!(last, (milliseconds(59_840), true));
        }
    }

    #[test]
    fn the_last_image_is_early_if_the_latest_took_long() {
        let mut schedule = Schedule::new(MINUTE, milliseconds(1), milliseconds(10));
        for (took, last) in [(1000, 53_900), (10, 59_840), (9000, 36_000)] {
            schedule.add(milliseconds(took));
            let after = milliseconds(57_000);
            assert_eq!(schedule.next(after), (milliseconds(last), true));
        }
    }
}
