//! Number of kills of each cgroup, which outlives the cgroup.

use std::collections::BTreeMap;
use std::time::Duration;

use memtools::process::labels::Workload;
use memtools::watch::cgroups::NewKills;

/// Maximum number of cgroups whose kills are counted one by one.
const MAX_COUNTED: usize = 300;
/// Path that stands for all others.
const OTHER: &str = "other";
/// Time for which a count is kept after its last kill.
const KEPT: Duration = Duration::from_secs(24 * 3600);

/// Kills of one cgroup.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct KillCount {
    pub(crate) workload: Workload,
    pub(crate) count: u64,
    last: Duration,
}

/// Kills by the path of their cgroup.
#[derive(Debug, Default)]
pub(crate) struct KillCounts(BTreeMap<String, KillCount>);

impl KillCounts {
    /// Adds kills. `at` is the time since boot.
    pub(crate) fn add(&mut self, killed: &NewKills, at: Duration) {
        let is_counted = self.0.contains_key(&killed.path) || self.0.len() < MAX_COUNTED;
        let (path, workload) = if is_counted {
            (killed.path.clone(), killed.workload.clone())
        } else {
            (OTHER.to_owned(), Workload::default())
        };
        let count = self.0.entry(path).or_default();
        count.workload = workload;
        count.count += killed.count;
        count.last = at;
    }

    /// Forgets the counts whose last kill was a day ago.
    pub(crate) fn forget_old(&mut self, at: Duration) {
        self.0
            .retain(|_, count| at.saturating_sub(count.last) < KEPT);
    }

    /// Iterates over the paths and their counts.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &KillCount)> {
        self.0.iter().map(|(path, count)| (&**path, count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn killed(path: &str, count: u64) -> NewKills {
        NewKills {
            path: path.into(),
            workload: Workload::at(path),
            count,
        }
    }

    #[test]
    fn counts_are_bounded_and_kept_for_a_day() {
        let hour = |hours: u64| Duration::from_secs(3600 * hours);
        let mut kills = KillCounts::default();
        for at in 0..MAX_COUNTED {
            kills.add(&killed(&format!("/{at}.service"), 1), hour(0));
        }
        kills.add(&killed("/new.service", 2), hour(1));
        kills.add(&killed("/newer.service", 3), hour(2));
        kills.add(&killed("/0.service", 5), hour(3));
        let of = |kills: &KillCounts, wanted: &str| {
            kills
                .iter()
                .find(|(path, _)| *path == wanted)
                .map(|(_, count)| count.count)
        };
        assert_eq!(kills.iter().count(), MAX_COUNTED + 1);
        assert_eq!(
            (of(&kills, OTHER), of(&kills, "/0.service")),
            (Some(5), Some(6))
        );
        kills.forget_old(hour(24));
        assert_eq!(kills.iter().count(), 2);
        kills.forget_old(hour(27));
        assert_eq!(kills.iter().count(), 0);
    }
}
