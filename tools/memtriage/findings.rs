//! The rules: what is judged, by which numbers, and which tool shows more. Each is a pure function of
//! what was read; the thresholds are those of the man page.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use memtools::host::kernel_log::Kill;
use memtools::host::memory_cgroups::MemoryCgroup;
use serde::Serialize;

use crate::accounting::FREE_IN_LISTS;
use crate::look::{self, Look, Surroundings};
use crate::processes::Usage;
use crate::screen::size;
use crate::who::Culprit;

/// How much a finding matters.
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

/// What a rule has found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename = "finding")]
pub(crate) struct Finding {
    pub(crate) level: Level,
    pub(crate) rule: &'static str,
    /// The evidence in numbers.
    pub(crate) evidence: String,
    /// The command to run next. None if all is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) next: Option<String>,
    /// What --who traces. None if all is well, or no stack would tell more.
    #[serde(skip)]
    pub(crate) culprit: Option<Culprit>,
}

/// What the rules judge: two looks, and what is around.
pub(crate) struct Evidence<'a> {
    pub(crate) before: &'a Look,
    pub(crate) now: &'a Look,
    pub(crate) around: &'a Surroundings,
    /// Bytes by which processes have grown between the two looks.
    pub(crate) growth: &'a HashMap<u32, i64>,
}

/// A rule's judgement: how much it matters, the evidence, and the command to run next.
type Judgement = (Level, String, Next);

/// The command to run next, and what --who traces.
struct Next {
    command: String,
    culprit: Option<Culprit>,
}

impl Next {
    /// This finding, with what --who traces.
    fn by(self, culprit: Culprit) -> Self {
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

/// A pure function of what was read.
type Rule = fn(&Evidence<'_>) -> Judgement;

/// Cgroups near their limit that are shown at most.
const MOST_CGROUPS: usize = 3;

/// The rules of the machine, the most important first.
const RULES: [(&str, Rule); 18] = [
    ("oom-kills", oom_kills),
    ("running-out", running_out),
    ("swap-in", swap_in),
    ("refaults", refaults),
    ("available", available),
    ("pressure", pressure),
    ("direct-reclaim", direct_reclaim),
    ("swap-full", swap_full),
    ("unaccounted", unaccounted),
    ("slab", slab),
    ("shmem", shmem),
    ("orphaned-shm", orphaned_shm),
    ("huge-page-pool", huge_page_pool),
    ("huge-page-zeros", huge_page_zeros),
    ("page-tables", page_tables),
    ("vmalloc", vmalloc),
    ("compaction", compaction),
    ("dying-cgroups", dying_cgroups),
];

/// The judgement of each rule: those to act on first, then in the order of the rules.
pub(crate) fn judge(evidence: &Evidence<'_>) -> Vec<Finding> {
    let machine = RULES
        .into_iter()
        .map(|(rule, judge)| (rule, judge(evidence)));
    let groups = cgroup_limits(evidence).into_iter();
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

/// What --who traces, with the rules that it is for: for the worst finding first, and at last the process that
/// grows fastest, if it does by 1 MiB a second.
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

impl Evidence<'_> {
    fn seconds(&self) -> f64 {
        let between = self.now.at.saturating_duration_since(self.before.at);
        between.as_secs_f64().max(f64::EPSILON)
    }

    /// How often a second a counter of /proc/vmstat has been raised between the two looks.
    fn rate(&self, name: &str) -> f64 {
        let (now, before) = (self.now.counters.of(name), self.before.counters.of(name));
        now.saturating_sub(before) as f64 / self.seconds()
    }

    /// Pages a second that came back from swap.
    fn swap_ins(&self) -> f64 {
        look::SWAP_INS.into_iter().map(|name| self.rate(name)).sum()
    }

    /// Pages a second that went to swap.
    fn swap_outs(&self) -> f64 {
        self.rate("pswpout") + self.rate("zswpout")
    }

    /// [`Evidence::rate`] of all counters whose names begin so.
    fn rate_of(&self, prefix: &str) -> f64 {
        let sum = |look: &Look| look.counters.sum_of(prefix);
        sum(self.now).saturating_sub(sum(self.before)) as f64 / self.seconds()
    }

    /// Percent of the machine's memory.
    fn share(&self, bytes: u64) -> f64 {
        bytes as f64 * 100.0 / self.now.accounting.total.max(1) as f64
    }

    /// The process that most memory would come back from.
    fn largest(&self) -> Option<&Usage> {
        let processes = self.now.processes.iter();
        processes.max_by_key(|usage| (usage.own(), Reverse(usage.pid)))
    }

    /// The process that has grown most, if one but ours has, with the bytes.
    fn fastest(&self) -> Option<(&Usage, i64)> {
        let processes = self.now.processes.iter();
        let grown = processes.filter_map(|usage| Some((usage, *self.growth.get(&usage.pid)?)));
        let own = std::process::id();
        grown
            .filter(|(usage, bytes)| *bytes > 0 && usage.pid != own)
            .max_by_key(|(usage, bytes)| (*bytes, Reverse(usage.pid)))
    }

    /// The process but ours of which a number has grown most between the two looks, and by how much a second.
    fn most(&self, number: impl Fn(&Usage) -> u64) -> Option<(&Usage, f64)> {
        let before: HashMap<_, _> = self
            .before
            .processes
            .iter()
            .map(|usage| ((usage.pid, usage.started), number(usage)))
            .collect();
        let processes = self.now.processes.iter();
        let grown = processes.filter_map(|usage| {
            let before = before.get(&(usage.pid, usage.started))?;
            Some((usage, number(usage).saturating_sub(*before)))
        });
        let own = std::process::id();
        grown
            .filter(|(usage, grown)| *grown > 0 && usage.pid != own)
            .max_by_key(|(usage, grown)| (*grown, Reverse(usage.pid)))
            .map(|(usage, grown)| (usage, grown as f64 / self.seconds()))
    }

    /// Who copies the pages that it shares since a fork(2), if anonymous memory has grown by so many bytes, and no
    /// process has: until it writes to such a page, each of those who share it has it among its own.
    fn copier(&self, grown: u64) -> Option<&Usage> {
        let own: i64 = self.growth.values().filter(|bytes| **bytes > 0).sum();
        let (usage, faults) = self.most(|usage| usage.minor_faults)?;
        let page_bytes = 4096.0;
        let copied = faults * self.seconds() * page_bytes;
        (own.unsigned_abs() < grown / 2 && copied >= grown as f64 / 2.0).then_some(usage)
    }

    /// Who has taken most of these bytes between the two looks: a process, or else the part of memory that has
    /// grown most; and the command that shows more.
    fn taker(&self, taken: u64) -> (String, Next) {
        let per_second = |bytes: u64| size((bytes as f64 / self.seconds()) as u64);
        if let Some((usage, bytes)) = self.fastest()
            && bytes.unsigned_abs() >= taken / 2
        {
            let rate = per_second(bytes.unsigned_abs());
            let text = format!("{} (pid {}) grows by {rate}/s", usage.comm, usage.pid);
            return (text, memleak_of(usage));
        }
        let (before, now) = (&self.before.accounting, &self.now.accounting);
        let grown = now.parts.iter().map(|part| {
            let before = before.part(part.name).unwrap_or_default();
            (part.name, part.bytes.saturating_sub(before))
        });
        let unaccounted = now.unaccounted().saturating_sub(before.unaccounted());
        let unaccounted = (
            "unaccounted",
            u64::try_from(unaccounted).unwrap_or_default(),
        );
        let grown = grown.filter(|(name, _)| !name.starts_with("free"));
        let most = grown.chain([unaccounted]).max_by_key(|(_, bytes)| *bytes);
        let (part, bytes) = most.unwrap_or(unaccounted);
        if part == "anonymous"
            && let Some(copier) = self.copier(bytes)
        {
            let pid = copier.pid;
            let text = format!(
                "anonymous grows by {}/s, but no process: {} (pid {pid}) writes to pages that it shares since a fork",
                per_second(bytes),
                copier.comm
            );
            let next = Next::from(format!("faults --bytes -p {pid} -d 10"));
            return (text, next.by(Culprit::Process(pid)));
        }
        let next = match part {
            "anonymous" => Next::from("faults --by-process -d 10").by(Culprit::Processes),
            "slab" => Next::from("memleak -k --by-cache 10").by(Culprit::KernelSlabs),
            _ => Next::from("memleak -k 10").by(Culprit::KernelPages),
        };
        (format!("{part} grows by {}/s", per_second(bytes)), next)
    }

    /// The command for the process that grows, or else is largest.
    fn memleak_of_suspect(&self) -> Next {
        let suspect = self.fastest().map(|(usage, _)| usage).or(self.largest());
        suspect.map_or_else(
            || Next::from("faults -d 10 --by-process").by(Culprit::Processes),
            memleak_of,
        )
    }
}

/// The command for a process that may leak.
fn memleak_of(usage: &Usage) -> Next {
    Next::from(format!("memleak -p {} 10", usage.pid)).by(Culprit::Process(usage.pid))
}

/// `level` of a number that is worth a look from one threshold on, and needs action from another.
fn above(number: f64, look: f64, act: f64) -> Level {
    if number >= act {
        Level::Act
    } else if number >= look {
        Level::Look
    } else {
        Level::Healthy
    }
}

/// Act: a kill in the last hour. Look: kills since the start, and the log does not tell when.
fn oom_kills(evidence: &Evidence<'_>) -> Judgement {
    const RECENT: Duration = Duration::from_secs(3600);
    let count = evidence.now.counters.of("oom_kill");
    let Some(kills) = &evidence.around.kills else {
        let level = above(count as f64, 1.0, f64::INFINITY);
        let text = format!("{count} OOM kills since the start; when, only root may read");
        return (level, text, "oomkill".into());
    };
    let recent: Vec<&Kill> = kills.iter().filter(|kill| kill.age < RECENT).collect();
    let Some(last) = recent.last() else {
        let text = format!("{count} OOM kills since the start, none in the last hour");
        return (Level::Healthy, text, "oomkill".into());
    };
    let whose = if last.by_cgroup {
        "its cgroup's limit"
    } else {
        "the machine's memory"
    };
    let text = format!(
        "{} OOM kills in the last hour; the last, {} ago: {} (pid {}), for {whose}",
        recent.len(),
        age(last.age),
        last.comm,
        last.pid
    );
    (Level::Act, text, "oomkill -e".into())
}

/// Act: at this rate all is used in half a minute. Look: in two minutes. Where nearly all is used, what comes and goes
/// by less than a hundredth of memory is no trend.
fn running_out(evidence: &Evidence<'_>) -> Judgement {
    // The kernel leaves out the pages in lists of CPUs, which are taken first.
    let available = |look: &Look| {
        look.memory.of("MemAvailable") + look.accounting.part(FREE_IN_LISTS).unwrap_or_default()
    };
    let (before, now) = (available(evidence.before), available(evidence.now));
    let lost = before.saturating_sub(now);
    let rate = lost as f64 / evidence.seconds();
    let left = if rate > 0.0 {
        now as f64 / rate
    } else {
        f64::INFINITY
    };
    let level = above(-left, -120.0, -30.0);
    let is_noise = evidence.share(before) < 5.0 && evidence.share(lost) < 1.0;
    if level == Level::Healthy || is_noise {
        let text = format!("available memory shrinks by {}/s", size(rate as u64));
        return (Level::Healthy, text, "".into());
    }
    let (taker, next) = evidence.taker(lost);
    let text = format!(
        "at {}/s all memory is used in {left:.0} s; {taker}",
        size(rate as u64)
    );
    (level, text, next)
}

/// Look: less than a tenth of memory is available. Act: less than a twentieth.
fn available(evidence: &Evidence<'_>) -> Judgement {
    let available = evidence.now.memory.of("MemAvailable");
    let share = evidence.share(available);
    let mut text = format!("{} available, {share:.1} % of memory", size(available));
    if let Some(largest) = evidence.largest() {
        text += &format!(
            "; largest: {} (pid {}), {}",
            largest.comm,
            largest.pid,
            size(largest.own())
        );
    }
    (
        above(-share, -10.0, -5.0),
        text,
        evidence.memleak_of_suspect(),
    )
}

/// Look: in a tenth of the last ten seconds some task waited for memory. Act: in a twentieth all did.
fn pressure(evidence: &Evidence<'_>) -> Judgement {
    let Some(pressure) = evidence.around.pressure else {
        let text = "this kernel tells no memory pressure (CONFIG_PSI, psi=1)".into();
        return (Level::Healthy, text, "".into());
    };
    let level = above(pressure.some.avg10, 10.0, f64::INFINITY).max(above(
        pressure.full.avg10,
        f64::INFINITY,
        5.0,
    ));
    let text = format!(
        "tasks waited for memory {:.1} % of the last 10 s, all at once {:.1} %",
        pressure.some.avg10, pressure.full.avg10
    );
    let next = if evidence.swap_ins() >= 1.0 {
        Next::from("swapin -s -d 10").by(Culprit::Readers)
    } else {
        Next::from("drsnoop --memcg -d 10").by(Culprit::Reclaimers)
    };
    (level, text, next)
}

/// Look: a cgroup uses nine tenths of its limit. Act: it hit the limit ten times a second, or a process
/// of it was killed, between the two looks. Each such cgroup is a finding, the worst first.
fn cgroup_limits(evidence: &Evidence<'_>) -> Vec<Judgement> {
    let limited = &evidence.now.groups.limited;
    let mut judged: Vec<(f64, Judgement)> = limited
        .iter()
        .map(|group| (group.percent(), cgroup_limit(evidence, group)))
        .filter(|(_, (level, ..))| *level > Level::Healthy)
        .collect();
    judged.sort_by(|(percent, (level, ..)), (other_percent, (other, ..))| {
        other.cmp(level).then(other_percent.total_cmp(percent))
    });
    judged.truncate(MOST_CGROUPS);
    if judged.is_empty() {
        let text = format!(
            "{} cgroups have a limit, and none is near it",
            limited.len()
        );
        return vec![(Level::Healthy, text, "".into())];
    }
    judged.into_iter().map(|(_, judgement)| judgement).collect()
}

fn cgroup_limit(evidence: &Evidence<'_>, group: &MemoryCgroup) -> Judgement {
    let mut earlier = evidence.before.groups.limited.iter();
    let earlier = earlier.find(|earlier| earlier.folder == group.folder);
    // One that was not there before is judged by what it holds.
    let earlier = earlier.unwrap_or(group);
    let hits = group.hits.saturating_sub(earlier.hits) as f64 / evidence.seconds();
    let kills = group.oom_kills.saturating_sub(earlier.oom_kills);
    let level = above(group.percent(), 90.0, f64::INFINITY)
        .max(above(hits, f64::INFINITY, 10.0))
        .max(above(kills as f64, f64::INFINITY, 1.0));
    let mut text = format!(
        "{} uses {:.0} % of its {}, and hits that limit {hits:.0} times a second",
        group.path,
        group.percent(),
        size(group.limit)
    );
    if kills > 0 {
        text += &format!("; {kills} of its processes were killed just now");
    }
    let next = if hits >= 10.0 {
        Next::from("drsnoop --memcg -e -d 10").by(Culprit::Reclaimers)
    } else if evidence.now.groups.version_1 {
        // memleak takes cgroups of version 2.
        Next::from("faults --by-process -d 10").by(Culprit::Processes)
    } else {
        let folder = group.folder.to_string_lossy();
        let command = format!("memleak --cgroup {} 10", shell_word(&folder));
        Next::from(command).by(Culprit::Cgroup(group.folder.clone()))
    };
    (level, text, next)
}

/// Look: a task has to reclaim memory itself, once a second. Act: a hundred times.
fn direct_reclaim(evidence: &Evidence<'_>) -> Judgement {
    let rate = evidence.rate_of("allocstall");
    let text = format!("tasks had to reclaim memory themselves {rate:.0} times a second");
    let next = Next::from("drsnoop -d 10").by(Culprit::Reclaimers);
    (above(rate, 1.0, 100.0), text, next)
}

/// Look: a hundred pages a second are read back from swap. Act: a thousand.
fn swap_in(evidence: &Evidence<'_>) -> Judgement {
    let (read, written) = (evidence.swap_ins(), evidence.swap_outs());
    let mut text = format!("{read:.0} pages/s are read back from swap, {written:.0} written");
    if let Some((most, faults)) = evidence.most(|usage| usage.major_faults) {
        text += &format!(
            "; most by {} (pid {}), which waits {faults:.0} times a second",
            most.comm, most.pid
        );
    }
    let next = Next::from("swapin -s -d 10").by(Culprit::Readers);
    (above(read, 100.0, 1000.0), text, next)
}

/// Look: nine tenths of swap are used. Act: all but a fiftieth.
fn swap_full(evidence: &Evidence<'_>) -> Judgement {
    let of = |name| evidence.now.memory.of(name);
    let (total, used) = (
        of("SwapTotal"),
        of("SwapTotal").saturating_sub(of("SwapFree")),
    );
    if total == 0 {
        return (Level::Healthy, "there is no swap".into(), "".into());
    }
    let share = used as f64 * 100.0 / total as f64;
    let mut text = format!("{share:.0} % of {} of swap are used", size(total));
    let most = evidence.now.processes.iter().max_by_key(|usage| usage.swap);
    let most = most.filter(|usage| usage.swap > 0);
    if let Some(most) = most {
        text += &format!(
            "; most by {} (pid {}), {}",
            most.comm,
            most.pid,
            size(most.swap)
        );
    }
    let next = most.map_or_else(|| "swapin -d 10".into(), memleak_of);
    (above(share, 90.0, 98.0), text, next)
}

/// Look: a thousand pages a second are read again that were dropped lately. Act: ten thousand, while less
/// than a quarter of memory is free.
fn refaults(evidence: &Evidence<'_>) -> Judgement {
    const PLENTY: f64 = 25.0;
    /// Pages that are read for one fault on a file, at most, unless an administrator has said otherwise.
    const READ_AHEAD: f64 = 32.0;
    // One number for both kinds until 5.9.
    let rate = evidence.rate("workingset_refault_file") + evidence.rate("workingset_refault");
    let mut text = format!("{rate:.0} file pages/s are read again soon after they were dropped");
    let mut level = above(rate, 1000.0, 10_000.0);
    let free = evidence.now.memory.of("MemFree");
    if level > Level::Healthy && evidence.share(free) >= PLENTY {
        text += &format!(
            ", although {} are free: by a cgroup's limit, or on request",
            size(free)
        );
        level = Level::Look;
    }
    // A fault that waits has a few pages read; what read(2) asks for is no fault.
    let faults = evidence.rate("pgmajfault");
    if faults * READ_AHEAD >= rate {
        return (
            level,
            text,
            Next::from("ffaults --path -d 10").by(Culprit::Readers),
        );
    }
    if let Some((most, bytes)) = evidence.most(|usage| usage.disk_reads.unwrap_or_default()) {
        text += &format!(
            "; most by read(2), of {} (pid {}), {}/s from disk",
            most.comm,
            most.pid,
            size(bytes as u64)
        );
    }
    // What is read and soon dropped again has no stack that a tool of ours shows.
    (level, text, "vmscan -k -d 10".into())
}

/// Look: a twentieth of memory is in no number of the kernel's. Act: three twentieths.
fn unaccounted(evidence: &Evidence<'_>) -> Judgement {
    let bytes = u64::try_from(evidence.now.accounting.unaccounted()).unwrap_or_default();
    let share = evidence.share(bytes);
    let text = format!(
        "{}, {share:.1} % of memory, are in no number of the kernel's: pages of drivers and modules",
        size(bytes)
    );
    let next = Next::from("memleak -k 10").by(Culprit::KernelPages);
    (above(share, 5.0, 15.0), text, next)
}

/// Look: slabs that cannot be reclaimed have 15 % of memory. Act: 30 %.
fn slab(evidence: &Evidence<'_>) -> Judgement {
    let bytes = evidence.now.memory.of("SUnreclaim");
    let mut text = format!(
        "slabs that cannot be reclaimed: {}, {:.1} % of memory",
        size(bytes),
        evidence.share(bytes)
    );
    if let Some((name, usage)) = evidence.now.slabs.largest() {
        text += &format!(
            "; largest cache: {name}, {}",
            size(usage.bytes.cast_unsigned())
        );
    }
    if let Some((name, change)) = evidence.before.slabs.fastest(&evidence.now.slabs) {
        text += &format!("; fastest: {name}, +{}", size(change.bytes.cast_unsigned()));
    }
    let level = above(evidence.share(bytes), 15.0, 30.0);
    let next = Next::from("memleak -k --by-cache 10").by(Culprit::KernelSlabs);
    (level, text, next)
}

/// Look: shared memory and tmpfs have a quarter of memory. Act: half.
fn shmem(evidence: &Evidence<'_>) -> Judgement {
    let bytes = evidence.now.memory.of("Shmem");
    let mut text = format!(
        "shared memory and tmpfs: {}, {:.1} % of memory",
        size(bytes),
        evidence.share(bytes)
    );
    // Who has less than a tenth is not the reason.
    let tmpfs = evidence.around.tmpfs.as_ref();
    if let Some(tmpfs) = tmpfs.filter(|tmpfs| tmpfs.bytes > bytes / 10) {
        text += &format!("; fullest tmpfs: {}, {}", tmpfs.mount, size(tmpfs.bytes));
    }
    let nameless = evidence.around.nameless.as_ref();
    if let Some(nameless) = nameless.filter(|nameless| nameless.bytes > bytes / 10) {
        text += &format!(
            "; largest file without a name: {}, {}, open in pid {}",
            nameless.file,
            size(nameless.bytes),
            nameless.pid
        );
    }
    let processes = evidence.now.processes.iter();
    let most = processes.max_by_key(|usage| usage.shmem);
    if let Some(most) = most.filter(|usage| usage.shmem > bytes / 10) {
        text += &format!(
            "; most in {} (pid {}), {}",
            most.comm,
            most.pid,
            size(most.shmem)
        );
    }
    let level = above(evidence.share(bytes), 25.0, 50.0);
    let next = Next::from("memleak -k --pages 10").by(Culprit::KernelPages);
    (level, text, next)
}

/// Look: a hundredth of memory is in segments that nobody has attached. Act: a tenth.
fn orphaned_shm(evidence: &Evidence<'_>) -> Judgement {
    let orphans = evidence.around.orphans;
    let share = evidence.share(orphans.bytes);
    let text = format!(
        "{} System V segments that nobody has attached hold {}, {share:.1} % of memory{}",
        orphans.segments,
        size(orphans.bytes),
        orphans.largest.map_or_else(String::new, |largest| format!(
            "; largest: id {}, made by pid {}, {}",
            largest.id,
            largest.creator,
            size(largest.bytes)
        ))
    );
    (above(share, 1.0, 10.0), text, "shmsnoop -e -d 60".into())
}

/// Look: a twentieth of memory is in huge pages that nobody has reserved. Act: a fifth.
fn huge_page_pool(evidence: &Evidence<'_>) -> Judgement {
    let of = |name| evidence.now.memory.of(name);
    let idle = of("HugePages_Free").saturating_sub(of("HugePages_Rsvd")) * of("Hugepagesize");
    let share = evidence.share(idle);
    let text = format!(
        "{} of the huge page pool's {} are not used by anybody, {share:.1} % of memory",
        size(idle),
        size(of("Hugetlb"))
    );
    (above(share, 5.0, 20.0), text, "hfaults -e -d 60".into())
}

/// Look: a twentieth of memory is zeros in huge pages of one process. Act: three twentieths.
fn huge_page_zeros(evidence: &Evidence<'_>) -> Judgement {
    let Some(huge) = &evidence.around.huge_pages else {
        let bytes = evidence.now.memory.of("AnonHugePages");
        let text = format!("transparent huge pages: {}", size(bytes));
        return (Level::Healthy, text, "".into());
    };
    let share = evidence.share(huge.zero_bytes);
    let mut processes = evidence.now.processes.iter();
    let process = processes.find(|usage| usage.pid == huge.pid);
    let text = format!(
        "{} (pid {}) has {}: {share:.1} % of memory",
        process.map_or("", |usage| usage.comm.as_str()),
        huge.pid,
        huge.told()
    );
    let next = format!("hfaults --thp -p {} -d 10", huge.pid);
    (above(share, 5.0, 15.0), text, next.into())
}

/// Look: page tables have a twentieth of memory. Act: three twentieths.
fn page_tables(evidence: &Evidence<'_>) -> Judgement {
    let bytes = evidence.now.memory.of("PageTables");
    let share = evidence.share(bytes);
    let text = format!("page tables: {}, {share:.1} % of memory", size(bytes));
    let next = Next::from("faults --by-process -d 10").by(Culprit::KernelPages);
    (above(share, 5.0, 15.0), text, next)
}

/// Look: the kernel's vmalloc area has a tenth of memory. Act: a quarter.
fn vmalloc(evidence: &Evidence<'_>) -> Judgement {
    let bytes = evidence.now.accounting.part("vmalloc").unwrap_or_default();
    let share = evidence.share(bytes);
    let text = format!("vmalloc: {}, {share:.1} % of memory", size(bytes));
    let next = Next::from("memleak -k 10").by(Culprit::KernelPages);
    (above(share, 10.0, 25.0), text, next)
}

/// Look: a task had to move pages for a large one, once a second. Act: a hundred times.
fn compaction(evidence: &Evidence<'_>) -> Judgement {
    let rate = evidence.rate("compact_stall");
    let text = format!("tasks waited for compaction {rate:.0} times a second");
    (
        above(rate, 1.0, 100.0),
        text,
        "vmscan --compaction -d 10".into(),
    )
}

/// Look: a thousand removed cgroups hold memory. Act: ten thousand.
fn dying_cgroups(evidence: &Evidence<'_>) -> Judgement {
    let dying = evidence.now.groups.dying;
    let mut text = format!("{dying} removed cgroups still hold memory");
    let mut next = Next::from("memtriage --by cgroup");
    let most = evidence.now.groups.most_dying.as_ref();
    if let Some(most) = most.filter(|most| most.path != "/") {
        text += &format!("; {} of them were below {}", most.count, most.path);
        let folder = most.folder.to_string_lossy();
        next = Next::from(format!("memtriage --cgroup {}", shell_word(&folder)));
    }
    (above(dying as f64, 1e3, 1e4), text, next)
}

/// A duration with its largest unit.
fn age(age: Duration) -> String {
    match age.as_secs() {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3600),
    }
}

/// A path as one word of a shell's command line.
pub(crate) fn shell_word(path: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-@:".contains(c);
    if path.chars().all(plain) {
        path.to_owned()
    } else {
        shell_words::quote(&memtools::print::text::escape(path)).into_owned()
    }
}

#[cfg(test)]
mod tests;
