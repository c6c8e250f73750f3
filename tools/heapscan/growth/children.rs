//! Child processes of a process, as far as repeated looks at its list of children see them.

use std::collections::HashSet;
use std::fs;
use std::time::{Duration, Instant};

use memtools::process::proc::Stat;

/// Minimum time between two looks. The time is longer where a look takes long.
const MIN_INTERVAL: Duration = Duration::from_millis(20);
/// Minimum ratio of the time between two looks to the duration of a look.
const MIN_INTERVAL_RATIO: u32 = 50;

/// The children of a process.
#[derive(Debug)]
pub(super) struct Children {
    pid: u32,
    /// All children that were seen, including those that have ended.
    known: HashSet<u32>,
    /// Page faults of the children that have ended and been waited for.
    faults: u64,
    started: u64,
    ended: u64,
    next: Instant,
}

impl Children {
    /// Begins with the children that a process has now.
    pub(super) fn of(pid: u32) -> Self {
        Self {
            pid,
            known: list(pid),
            faults: faults(pid),
            started: 0,
            ended: 0,
            next: Instant::now() + MIN_INTERVAL,
        }
    }

    /// Looks at the children, unless the last look was recent.
    pub(super) fn look_if_due(&mut self) {
        if Instant::now() >= self.next {
            self.look();
        }
    }

    /// Looks for new children, and for children that have ended.
    fn look(&mut self) {
        let begin = Instant::now();
        self.add(list(self.pid));
        let faults = faults(self.pid);
        self.ended += u64::from(faults > self.faults);
        self.faults = faults.max(self.faults);
        self.next = begin + MIN_INTERVAL.max(begin.elapsed() * MIN_INTERVAL_RATIO);
    }

    /// Adds the children that are in the list now.
    fn add(&mut self, now: HashSet<u32>) {
        self.started += now.difference(&self.known).count() as u64;
        self.known.extend(now);
    }

    /// Returns the minimum number of processes that were started meanwhile. A process that has ended between two looks
    /// is seen only if it was waited for.
    pub(super) fn started(&self) -> u64 {
        self.started.max(self.ended)
    }
}

/// Returns the children of all threads. A kernel may be built without this list. Then only children that have ended are
/// seen.
fn list(pid: u32) -> HashSet<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task"));
    let threads = threads.into_iter().flatten().flatten();
    let lists =
        threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    let mut children = HashSet::new();
    for list in lists {
        children.extend(
            list.split_whitespace()
                .filter_map(|child| child.parse::<u32>().ok()),
        );
    }
    children
}

/// Returns the minor page faults of children that have been waited for.
fn faults(pid: u32) -> u64 {
    const CMINFLT: usize = 11;
    let stat = Stat::read(format!("/proc/{pid}/stat")).ok();
    stat.and_then(|stat| stat.field(CMINFLT))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn children_are_counted_once_each() {
        let mut children = Children::of(0);
        for now in [&[7, 8][..], &[7, 8], &[8, 9], &[]] {
            children.add(now.iter().copied().collect());
        }
        assert_eq!(children.started(), 3);
    }

    #[test]
    fn children_are_seen_while_they_run_and_once_they_have_ended() {
        let mut children = Children::of(std::process::id());
        let mut cat = Command::new("cat")
            .stdin(Stdio::piped())
            .spawn()
            .expect("cat");
        children.look();
        assert!(children.known.contains(&cat.id()), "{children:?}");
        let before = children.faults;
        drop(cat.stdin.take());
        cat.wait().expect("it ends");
        children.look();
        assert!(
            children.faults > before && children.ended > 0,
            "{children:?}"
        );
    }
}
