//! Time that traces may take in an hour, and what a trace may cost the traced process.

use std::collections::VecDeque;
use std::time::Duration;

/// Time over which traces are counted.
const WINDOW: Duration = Duration::from_secs(3600);
/// Time that a trace counts at least, so that traces which fail are few.
const LEAST: Duration = Duration::from_secs(10);
/// Time that a hit of a probe takes the traced process, in nanoseconds, with the kernel's own handling of the breakpoint:
/// half of what a malloc(3) and a free(3) were measured to take longer together.
const HIT_NS: u64 = 1350;
/// Time over which the cost of a trace is judged.
const JUDGED: Duration = Duration::from_secs(5);
/// CPU time that the kernel may have counted too late for a process, in nanoseconds: two ticks.
const SLACK_NS: u64 = 20_000_000;

/// Traces of the last hour. Times are since boot.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    ended: VecDeque<(Duration, Duration)>,
}

impl Budget {
    /// Adds a trace that has ended.
    pub(crate) fn add(&mut self, from: Duration, until: Duration) {
        self.ended.push_back((from, until.max(from + LEAST)));
    }

    /// Returns the time of the last hour that traces have taken: those that have ended, and those that run since these
    /// times.
    pub(crate) fn used(
        &mut self,
        at: Duration,
        running: impl Iterator<Item = Duration>,
    ) -> Duration {
        let begin = at.saturating_sub(WINDOW);
        self.ended.retain(|&(_, until)| until > begin);
        let ended = self.ended.iter().copied();
        let running = running.map(|from| (from, at));
        ended
            .chain(running)
            .map(|(from, until)| until.saturating_sub(from.max(begin)))
            .sum()
    }
}

/// Cost of a trace for the traced process, judged over the last seconds.
#[derive(Debug, Default)]
pub(crate) struct Cost {
    /// Time since boot, hits and CPU time at the beginning of the present judgement.
    since: Option<(Duration, u64, u64)>,
}

impl Cost {
    /// Takes the number of hits since the trace began, and the CPU time of the process in nanoseconds. Returns the share of
    /// the CPU time that the hits took, in percent, each time that some seconds have passed.
    pub(crate) fn add(&mut self, at: Duration, hits: u64, cpu_ns: u64) -> Option<f64> {
        let (then, hits_then, cpu_then) = *self.since.get_or_insert((at, hits, cpu_ns));
        if at.saturating_sub(then) < JUDGED {
            return None;
        }
        self.since = Some((at, hits, cpu_ns));
        let spent = (hits - hits_then.min(hits)) * HIT_NS;
        let used = cpu_ns.saturating_sub(cpu_then) + SLACK_NS;
        Some(spent as f64 * 100.0 / used as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn second(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn traces_count_for_an_hour() {
        let mut budget = Budget::default();
        let used = |budget: &mut Budget, at, running: &[u64]| {
            let running = running.iter().map(|&from| second(from));
            budget.used(second(at), running).as_secs()
        };
        assert_eq!(used(&mut budget, 100, &[]), 0);
        budget.add(second(100), second(220));
        // One that has failed at once.
        budget.add(second(220), second(220));
        assert_eq!(used(&mut budget, 300, &[290, 260]), 120 + 10 + 10 + 40);
        // A part of the first one is older than an hour.
        assert_eq!(used(&mut budget, 3710, &[]), 110 + 10);
        assert_eq!(used(&mut budget, 3820, &[]), 10);
        assert_eq!(used(&mut budget, 9000, &[1]), 3600);
        assert!(budget.ended.is_empty());
    }

    #[test]
    fn the_cost_is_that_of_the_last_seconds() {
        let mut cost = Cost::default();
        // 980 ms and two ticks, and 37,037 hits of 1.35 us: 5 %.
        assert_eq!(cost.add(second(10), 1000, 7_000_000_000), None);
        assert_eq!(cost.add(second(14), 2000, 7_500_000_000), None);
        let share = cost.add(second(15), 38_037, 7_980_000_000);
        assert!(
            share.is_some_and(|share| (share - 5.0).abs() < 0.001),
            "{share:?}"
        );
        let share = cost.add(second(20), 38_037, 7_980_000_000);
        assert_eq!(share, Some(0.0));
        // A process that does nothing but allocate.
        let share = cost.add(second(25), 38_037 + 1_000_000, 8_980_000_000);
        assert!(share > Some(100.0), "{share:?}");
    }
}
