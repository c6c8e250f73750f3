//! Number of kills of each cgroup, which outlives the cgroup.
//!
//! The kernel reports a kill twice: in its log, which has the limit and the victim, and in the events of the victim's
//! cgroup, which are complete, but are gone with the cgroup. Each kill is counted once, whichever report comes first.

use std::collections::BTreeMap;
use std::time::Duration;

use memtools::process::labels::Workload;
use serde::Serialize;

/// Maximum number of cgroups whose kills are counted one by one.
const MAX_COUNTED: usize = 300;
/// Path that stands for all others.
const OTHER: &str = "other";
/// Time for which a count is kept after its last kill.
const KEPT: Duration = Duration::from_secs(24 * 3600);
/// Time for which the report of the log is waited for when the events have a kill.
const LOG_DELAY: Duration = Duration::from_secs(2);
/// Time after which the events are not expected any more when the log has a kill.
const EVENT_DELAY: Duration = Duration::from_secs(60);

/// Limit that was hit before a kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Limit {
    Cgroup,
    Machine,
    Unknown,
}

impl Limit {
    /// Name, as in metrics; incidents have the same.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cgroup => "cgroup",
            Self::Machine => "machine",
            Self::Unknown => "unknown",
        }
    }
}

/// Kills of one cgroup, for one kind of limit.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct KillCount {
    pub(crate) workload: Workload,
    pub(crate) count: u64,
    last: Duration,
}

/// Kills that only one of the two has reported so far.
#[derive(Debug, Default)]
struct Unmatched {
    count: u64,
    since: Duration,
}

/// Kills by the path of their cgroup and the limit.
#[derive(Debug, Default)]
pub(crate) struct KillCounts {
    counts: BTreeMap<(String, Limit), KillCount>,
    /// Kills by path that the log has reported, but not yet the events.
    logged: BTreeMap<String, Unmatched>,
    /// Kills by path that the events have reported, but not yet the log.
    events: BTreeMap<String, Unmatched>,
}

impl KillCounts {
    /// Counts a kill that the log has reported. Times are since boot.
    pub(crate) fn add_logged(
        &mut self,
        path: &str,
        limit: Limit,
        workload: &Workload,
        at: Duration,
    ) {
        let events = self.events.get_mut(path).filter(|events| events.count > 0);
        match events {
            Some(events) => events.count -= 1,
            None => add(&mut self.logged, path, 1, at),
        }
        self.count(path, limit, workload, 1, at);
    }

    /// Takes the number of kills that the events of a cgroup have reported.
    pub(crate) fn add_events(&mut self, path: &str, count: u64, at: Duration) {
        let mut left = count;
        if let Some(logged) = self.logged.get_mut(path) {
            let matched = left.min(logged.count);
            logged.count -= matched;
            left -= matched;
        }
        if left > 0 {
            add(&mut self.events, path, left, at);
        }
    }

    /// Counts the kills that the log has not reported in time. Returns them with the paths of their cgroups.
    pub(crate) fn settle(
        &mut self,
        at: Duration,
        name: impl Fn(&str) -> Workload,
    ) -> Vec<(String, u64)> {
        let age = |unmatched: &Unmatched| at.saturating_sub(unmatched.since);
        self.logged
            .retain(|_, logged| logged.count > 0 && age(logged) < EVENT_DELAY);
        self.events.retain(|_, events| events.count > 0);
        let is_late = |(_, events): &(&String, &Unmatched)| age(events) >= LOG_DELAY;
        let late = self.events.iter().filter(is_late);
        let late: Vec<_> = late
            .map(|(path, events)| (path.clone(), events.count))
            .collect();
        self.events.retain(|_, events| age(events) < LOG_DELAY);
        for (path, count) in &late {
            self.count(path, Limit::Unknown, &name(path), *count, at);
        }
        late
    }

    fn count(&mut self, path: &str, limit: Limit, workload: &Workload, more: u64, at: Duration) {
        let key = (path.to_owned(), limit);
        let is_counted = self.counts.contains_key(&key) || self.counts.len() < MAX_COUNTED;
        let count = if is_counted {
            let count = self.counts.entry(key).or_default();
            count.workload = workload.clone();
            count
        } else {
            self.counts.entry((OTHER.to_owned(), limit)).or_default()
        };
        count.count += more;
        count.last = at;
    }

    /// Forgets the counts whose last kill was a day ago.
    pub(crate) fn forget_old(&mut self, at: Duration) {
        self.counts
            .retain(|_, count| at.saturating_sub(count.last) < KEPT);
    }

    /// Iterates over the paths, the limits and their counts.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, Limit, &KillCount)> {
        self.counts
            .iter()
            .map(|((path, limit), count)| (&**path, *limit, count))
    }
}

fn add(unmatched: &mut BTreeMap<String, Unmatched>, path: &str, count: u64, at: Duration) {
    let there = unmatched.entry(path.to_owned()).or_default();
    there.count += count;
    there.since = at;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn second(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Returns the counts as text.
    fn counted(kills: &KillCounts) -> String {
        let counts = kills
            .iter()
            .map(|(path, limit, count)| format!("{path} {} {}", limit.name(), count.count));
        counts.collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn each_kill_is_counted_once_whichever_report_comes_first() {
        let mut kills = KillCounts::default();
        let workload = Workload::default();
        let name = |_: &str| Workload::default();
        kills.add_logged("/a", Limit::Cgroup, &workload, second(1));
        kills.add_events("/a", 1, second(1));
        kills.add_events("/b", 2, second(1));
        assert_eq!(kills.settle(second(2), name), []);
        kills.add_logged("/b", Limit::Machine, &workload, second(2));
        assert_eq!(counted(&kills), "/a cgroup 1, /b machine 1");
        // The log has lost the other one.
        assert_eq!(kills.settle(second(3), name), [("/b".to_owned(), 1)]);
        assert_eq!(kills.settle(second(4), name), []);
        assert_eq!(counted(&kills), "/a cgroup 1, /b machine 1, /b unknown 1");
        // A cgroup that was removed with its events.
        kills.add_logged("/c", Limit::Cgroup, &workload, second(5));
        kills.settle(second(66), name);
        // Another cgroup of this name.
        kills.add_events("/c", 1, second(67));
        assert_eq!(kills.settle(second(69), name), [("/c".to_owned(), 1)]);
        assert!(kills.logged.is_empty() && kills.events.is_empty());
    }

    #[test]
    fn counts_are_bounded_and_kept_for_a_day() {
        let hour = |hours: u64| Duration::from_secs(3600 * hours);
        let mut kills = KillCounts::default();
        let mut add =
            |path: &str, at| kills.add_logged(path, Limit::Cgroup, &Workload::at(path), at);
        for at in 0..MAX_COUNTED {
            add(&format!("/{at}.service"), hour(0));
        }
        add("/new.service", hour(1));
        add("/newer.service", hour(2));
        add("/0.service", hour(3));
        assert_eq!(kills.iter().count(), MAX_COUNTED + 1);
        kills.forget_old(hour(24));
        assert_eq!(counted(&kills), "/0.service cgroup 2, other cgroup 2");
        assert_eq!(
            kills.iter().next().map(|(.., count)| &*count.workload.unit),
            Some("0.service")
        );
        kills.forget_old(hour(27));
        assert_eq!(counted(&kills), "");
    }
}
