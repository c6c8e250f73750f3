//! Processes that could have been killed instead: those that the kernel ranks highest now.

use std::fs;

use memtools::print::text;
use memtools::process::cgroup;
use memtools::process::proc;
use serde::Serialize;

/// Number of candidates that are shown.
const TOP: usize = 5;

/// Process with the kernel's OOM score of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Candidate {
    pub(crate) pid: u32,
    pub(crate) comm: String,
    /// Score in `/proc/PID/oom_score`: the process with the highest is killed first.
    pub(crate) oom_score: i64,
    pub(crate) oom_score_adj: i64,
    pub(crate) rss_kb: u64,
}

/// Returns the processes that the kernel ranks highest, of all or of those in or below a cgroup. The victim is
/// omitted, as it may not have exited yet.
pub(crate) fn highest_ranked(cgroup: Option<&str>, victim: u32) -> Vec<Candidate> {
    let mut candidates: Vec<Candidate> = proc::all()
        .unwrap_or_default()
        .into_iter()
        .filter(|&pid: &u32| pid != victim)
        .filter(|&pid| cgroup.is_none_or(|cgroup| runs_in(pid, cgroup)))
        .filter_map(look_at)
        .collect();
    candidates.sort_by_key(|candidate| (-candidate.oom_score, candidate.pid));
    candidates.truncate(TOP);
    candidates
}

fn look_at(pid: u32) -> Option<Candidate> {
    let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).ok();
    let oom_score_adj = read("oom_score_adj")?.trim().parse().ok()?;
    // The kernel never kills processes with this value.
    if oom_score_adj == -1000 {
        return None;
    }
    let status = fs::read_to_string(proc::file(pid, "status")).ok()?;
    Some(Candidate {
        pid,
        comm: text::escape(read("comm")?.trim_end_matches('\n')).into_owned(),
        oom_score: read("oom_score")?.trim().parse().ok()?,
        oom_score_adj,
        // Kernel threads have no VmRSS, as they have no memory of their own.
        rss_kb: rss_kb(&status)?,
    })
}

fn rss_kb(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn runs_in(pid: u32, cgroup: &str) -> bool {
    cgroup::of_process(pid).is_some_and(|own| cgroup::is_in(&own, cgroup))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_runs_in_its_cgroup_and_those_above() {
        let own = std::process::id();
        let cgroup = cgroup::of_process(own).expect("a cgroup");
        assert!(runs_in(own, &cgroup) && runs_in(own, "/"));
        assert!(!runs_in(own, "/no such cgroup"));
        assert!(!runs_in(u32::MAX, "/"));
    }

    #[test]
    fn resident_memory_is_in_status() {
        assert_eq!(rss_kb("VmPeak:\t  9 kB\nVmRSS:\t    1234 kB\n"), Some(1234));
        assert_eq!(rss_kb("Name:\tkthreadd\n"), None);
    }

    #[test]
    fn this_process_is_a_candidate_unless_it_was_the_victim() {
        let own = std::process::id();
        let seen = look_at(own).expect("it runs");
        assert!(seen.pid == own && seen.rss_kb > 0, "{seen:?}");
        assert!(
            highest_ranked(None, own)
                .iter()
                .all(|candidate| candidate.pid != own)
        );
        assert!(highest_ranked(None, 0).len() <= TOP);
    }
}
