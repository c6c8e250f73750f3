//! Rules about scarce memory: kills, pressure, reclaim, swap and refaults.

use std::time::Duration;

use memtools::host::kernel_log::{OomKill, OomScope};

use super::{Evidence, Judgement, Level, Next, age, level_from_thresholds, memleak_of};
use crate::accounting::FREE_IN_LISTS;
use crate::screen::size;
use crate::snapshot::Snapshot;
use crate::who::Culprit;

/// Judges OOM kills. Act: a kill in the last hour. Look: kills since the start, if the log with their times cannot be
/// read.
pub(super) fn oom_kills(evidence: &Evidence<'_>) -> Judgement {
    const RECENT: Duration = Duration::from_secs(3600);
    let count = evidence.now.counters.get_or_zero("oom_kill");
    let Some(kills) = &evidence.one_shot.kills else {
        let level = level_from_thresholds(count as f64, 1.0, f64::INFINITY);
        let text = format!("{count} OOM kills since the start; when, only root may read");
        return (level, text, "sudo memtriage".into());
    };
    let recent: Vec<&OomKill> = kills.iter().filter(|kill| kill.age < RECENT).collect();
    let Some(last) = recent.last() else {
        let text = format!("{count} OOM kills since the start, none in the last hour");
        return (Level::Healthy, text, "oomkill".into());
    };
    let counted = match recent.len() {
        1 => "1 OOM kill in the last hour,".to_owned(),
        count => format!("{count} OOM kills in the last hour; the last,"),
    };
    let victim = match last.anon {
        Some(bytes) => format!("{} (pid {}), {}", last.comm, last.pid, size(bytes)),
        None => format!("{} (pid {})", last.comm, last.pid),
    };
    let short = match &last.scope {
        OomScope::Machine => "the machine was out of memory".to_owned(),
        OomScope::Cgroup(None) => "its cgroup was at its limit".to_owned(),
        OomScope::Cgroup(Some(path)) => format!("{path} was at its limit"),
    };
    let text = format!("{counted} {} ago: {victim}; {short}", age(last.age));
    (Level::Act, text, evidence.after_kill(&last.scope))
}

/// Judges the rate at which available memory shrinks. Act: all is used in half a minute. Look: in two minutes. If
/// nearly all is used already, changes of less than a hundredth of memory are noise.
pub(super) fn running_out(evidence: &Evidence<'_>) -> Judgement {
    // MemAvailable omits the pages in lists of CPUs, which are taken first.
    let available = |look: &Snapshot| {
        look.memory.get_or_zero("MemAvailable")
            + look.accounting.part(FREE_IN_LISTS).unwrap_or_default()
    };
    let (before, now) = (available(evidence.before), available(evidence.now));
    let lost = before.saturating_sub(now);
    let rate = lost as f64 / evidence.seconds();
    let left = if rate > 0.0 {
        now as f64 / rate
    } else {
        f64::INFINITY
    };
    let level = level_from_thresholds(-left, -120.0, -30.0);
    let is_noise = evidence.share(before) < 5.0 && evidence.share(lost) < 1.0;
    if level == Level::Healthy || is_noise {
        let text = format!("available memory shrinks by {}/s", size(rate as u64));
        return (Level::Healthy, text, "".into());
    }
    let (taker, next) = evidence.main_consumer(lost);
    let text = format!(
        "at {}/s all memory is used in {left:.0} s; {taker}",
        size(rate as u64)
    );
    (level, text, next)
}

/// Judges available memory. Look: less than a tenth of memory is available. Act: less than a twentieth.
pub(super) fn available(evidence: &Evidence<'_>) -> Judgement {
    let available = evidence.now.memory.get_or_zero("MemAvailable");
    let share = evidence.share(available);
    let mut text = format!("{} available, {share:.1} % of memory", size(available));
    if let Some(largest) = evidence.largest() {
        text += &format!(
            "; largest: {} (pid {}), {}",
            largest.comm,
            largest.pid,
            size(largest.anon_and_swap())
        );
    }
    (
        level_from_thresholds(-share, -10.0, -5.0),
        text,
        evidence.memleak_of_suspect(),
    )
}

/// Judges memory pressure. Look: some task waited for memory in a tenth of the last ten seconds. Act: all tasks did
/// in a twentieth.
pub(super) fn pressure(evidence: &Evidence<'_>) -> Judgement {
    let Some(pressure) = evidence.one_shot.pressure else {
        let text = "this kernel does not provide memory pressure (CONFIG_PSI, psi=1)".into();
        return (Level::Healthy, text, "".into());
    };
    let level = level_from_thresholds(pressure.some.avg10, 10.0, f64::INFINITY).max(
        level_from_thresholds(pressure.full.avg10, f64::INFINITY, 5.0),
    );
    let text = format!(
        "tasks waited for memory {:.1} % of the last 10 s, all at once {:.1} %",
        pressure.some.avg10, pressure.full.avg10
    );
    let next = if evidence.swap_ins() >= 1.0 {
        Next::from("swapin -s -d 10").with_culprit(Culprit::Readers)
    } else {
        Next::from("drsnoop --memcg --summary -d 10").with_culprit(Culprit::Reclaimers)
    };
    (level, text, next)
}

/// Judges direct reclaim. Look: a task has to reclaim memory itself once per second. Act: a hundred times.
pub(super) fn direct_reclaim(evidence: &Evidence<'_>) -> Judgement {
    let rate = evidence.rate_of_prefix("allocstall");
    let text = format!("{rate:.0} direct reclaims per second");
    let next = Next::from("drsnoop --summary -d 10").with_culprit(Culprit::Reclaimers);
    (level_from_thresholds(rate, 1.0, 100.0), text, next)
}

/// Judges reads from swap. Look: a hundred pages per second are read back from swap. Act: a thousand.
pub(super) fn swap_in(evidence: &Evidence<'_>) -> Judgement {
    let (read, written) = (evidence.swap_ins(), evidence.swap_outs());
    let mut text = format!("{read:.0} pages/s are swapped in, {written:.0} out");
    let mut next = "swapin -s -d 10".to_owned();
    if let Some((most, faults)) = evidence.fastest_by(|usage| usage.major_faults) {
        next = format!("swapin -s -p {} -d 10", most.pid);
        text += &format!(
            "; most by {} (pid {}), which waits {faults:.0} times per second",
            most.comm, most.pid
        );
    }
    let next = Next::from(next).with_culprit(Culprit::Readers);
    (level_from_thresholds(read, 100.0, 1000.0), text, next)
}

/// Judges the used swap. Look: nine tenths of swap are used. Act: all but a fiftieth.
pub(super) fn swap_full(evidence: &Evidence<'_>) -> Judgement {
    let of = |name| evidence.now.memory.get_or_zero(name);
    let (total, used) = (
        of("SwapTotal"),
        of("SwapTotal").saturating_sub(of("SwapFree")),
    );
    if total == 0 {
        return (Level::Healthy, "there is no swap".into(), "".into());
    }
    let share = used as f64 * 100.0 / total as f64;
    let mut text = format!("{share:.0} % of {} of swap are used", size(total));
    let most = evidence.largest_by(|usage| usage.swap);
    if let Some(most) = most {
        text += &format!(
            "; most by {} (pid {}), {}",
            most.comm,
            most.pid,
            size(most.swap)
        );
    }
    let next = most.map_or_else(|| "swapin -d 10".into(), memleak_of);
    (level_from_thresholds(share, 90.0, 98.0), text, next)
}

/// Judges refaults. Look: a thousand pages per second are read again that were dropped lately. Act: ten thousand, while
/// less than a quarter of memory is free.
pub(super) fn refaults(evidence: &Evidence<'_>) -> Judgement {
    const PLENTY: f64 = 25.0;
    /// Maximum number of pages that are read for one fault on a file, with the default read-ahead.
    const READ_AHEAD: f64 = 32.0;
    // Kernels before 5.9 have one number for both kinds.
    let rate = evidence.rate("workingset_refault_file") + evidence.rate("workingset_refault");
    let mut text = format!("{rate:.0} file pages/s are read again soon after they were dropped");
    let mut level = level_from_thresholds(rate, 1000.0, 10_000.0);
    let free = evidence.now.memory.get_or_zero("MemFree");
    if level > Level::Healthy && evidence.share(free) >= PLENTY {
        text += &format!(
            ", although {} are free: by a cgroup's limit, or on request",
            size(free)
        );
        level = Level::Look;
    }
    // A major fault reads a few pages. Pages that read(2) asks for cause no faults.
    let faults = evidence.rate("pgmajfault");
    if faults * READ_AHEAD >= rate {
        return (
            level,
            text,
            Next::from("ffaults --path -d 10").with_culprit(Culprit::Readers),
        );
    }
    if let Some((most, bytes)) = evidence.fastest_by(|usage| usage.disk_reads.unwrap_or_default()) {
        text += &format!(
            "; most by read(2), of {} (pid {}), {}/s from disk",
            most.comm,
            most.pid,
            size(bytes as u64)
        );
    }
    // None of the tools shows the stacks that read pages which are soon dropped again.
    (level, text, "vmscan --by-cgroup -d 10".into())
}

/// Judges compaction. Look: a task had to compact memory for a large page once per second. Act: a hundred times.
pub(super) fn compaction(evidence: &Evidence<'_>) -> Judgement {
    let rate = evidence.rate("compact_stall");
    let text = format!("tasks waited for compaction {rate:.0} times per second");
    (
        level_from_thresholds(rate, 1.0, 100.0),
        text,
        "vmscan --compaction -d 10".into(),
    )
}
