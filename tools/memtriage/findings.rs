//! Rules of memtriage: what each judges, by which numbers, and which tool shows more. Each rule is a pure function of
//! the data of the looks. The thresholds are those of the man page.

mod cgroup_limits;
mod evidence;
mod holders;
mod scarcity;

use std::cmp::Reverse;
use std::fmt;

use serde::Serialize;

use crate::Duration;
use crate::processes::ProcessUsage;
use crate::who::Culprit;

pub(crate) use evidence::Evidence;

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Level {
    Healthy,
    Look,
    Act,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Healthy => "ok",
            Self::Look => "look",
            Self::Act => "act",
        })
    }
}

/// Result of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename = "finding")]
pub(crate) struct Finding {
    pub(crate) level: Level,
    pub(crate) rule: &'static str,
    /// Evidence in numbers.
    pub(crate) evidence: String,
    /// Command to run next. None if all is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) next: Option<String>,
    /// Target that --who traces. None if all is well, or if stacks would not explain the finding.
    #[serde(skip)]
    pub(crate) culprit: Option<Culprit>,
}

/// Judgement of a rule: the level, the evidence, and the command to run next.
type Judgement = (Level, String, Next);

/// Command to run next, and the target that --who traces.
struct Next {
    command: String,
    culprit: Option<Culprit>,
}

impl Next {
    /// Sets the target that --who traces.
    fn with_culprit(self, culprit: Culprit) -> Self {
        Self {
            culprit: Some(culprit),
            ..self
        }
    }
}

impl<T: Into<String>> From<T> for Next {
    fn from(command: T) -> Self {
        Self {
            command: command.into(),
            culprit: None,
        }
    }
}

/// Rule, a pure function of the evidence.
type Rule = fn(&Evidence<'_>) -> Judgement;

/// Rules about the machine, the most important first.
const RULES: [(&str, Rule); 19] = [
    ("oom-kills", scarcity::oom_kills),
    ("running-out", scarcity::running_out),
    ("swap-in", scarcity::swap_in),
    ("refaults", scarcity::refaults),
    ("available", scarcity::available),
    ("pressure", scarcity::pressure),
    ("direct-reclaim", scarcity::direct_reclaim),
    ("swap-full", scarcity::swap_full),
    ("unaccounted", holders::unaccounted),
    ("sockets", holders::sockets),
    ("slab", holders::slab),
    ("shmem", holders::shmem),
    ("orphaned-shm", holders::orphaned_shm),
    ("huge-page-pool", holders::huge_page_pool),
    ("huge-page-zeros", holders::huge_page_zeros),
    ("page-tables", holders::page_tables),
    ("vmalloc", holders::vmalloc),
    ("compaction", scarcity::compaction),
    ("dying-cgroups", holders::dying_cgroups),
];

/// Returns the finding of each rule: those to act on first, then in the order of the rules.
pub(crate) fn judge(evidence: &Evidence<'_>) -> Vec<Finding> {
    let machine = RULES
        .into_iter()
        .map(|(rule, judge)| (rule, judge(evidence)));
    let groups = cgroup_limits::judge(evidence).into_iter();
    let groups = groups.map(|judgement| ("cgroup-limit", judgement));
    let mut findings: Vec<Finding> = machine
        .chain(groups)
        .map(|(rule, (level, evidence, next))| {
            let next = (level > Level::Healthy).then_some(next);
            let (command, culprit) = next.map(|next| (next.command, next.culprit)).unzip();
            Finding {
                level,
                rule,
                evidence,
                next: command,
                culprit: culprit.flatten(),
            }
        })
        .collect();
    findings.sort_by_key(|finding| Reverse(finding.level));
    findings
}

/// Returns the targets of --who, each with its rule: for the worst finding first, and last the process that grows
/// fastest, if it grows by at least 1 MiB per second.
pub(crate) fn culprits(
    findings: Vec<Finding>,
    evidence: &Evidence<'_>,
) -> Vec<(&'static str, Culprit)> {
    const FAST: f64 = (1 << 20) as f64;
    let found = findings
        .into_iter()
        .filter_map(|finding| Some((finding.rule, finding.culprit?)));
    let fastest = evidence
        .fastest()
        .filter(|(_, bytes)| *bytes as f64 >= FAST * evidence.seconds());
    let growing = fastest.map(|(usage, _)| ("growing", Culprit::Process(usage.pid)));
    found.chain(growing).collect()
}

/// Returns the command for a process that may leak.
fn memleak_of(usage: &ProcessUsage) -> Next {
    Next::from(format!("memleak -p {} 10", usage.pid)).with_culprit(Culprit::Process(usage.pid))
}

/// Returns the level of a number that is worth a look from the threshold `look` on, and needs action from `act` on.
fn level_from_thresholds(number: f64, look: f64, act: f64) -> Level {
    if number >= act {
        Level::Act
    } else if number >= look {
        Level::Look
    } else {
        Level::Healthy
    }
}

/// Formats a duration in its largest unit.
pub(crate) fn age(age: Duration) -> String {
    match age.as_secs() {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}

/// Formats a path or an option as one word of a shell's command line.
pub(crate) fn shell_word(path: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-@:=".contains(c);
    // zsh replaces a word that begins with an equals sign.
    if path.chars().all(plain) && !path.starts_with('=') {
        path.to_owned()
    } else {
        shell_words::quote(&memtools::print::text::escape(path)).into_owned()
    }
}

#[cfg(test)]
mod tests;
