//! Processes: how much of each kind of memory each has, and how much each grows.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use memtools::host::values::Values;
use memtools::print::text;
use memtools::process::container::CgroupInfo;
use memtools::process::proc::{self, Stat};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{SysconfVar, sysconf};

use crate::rankings::RankBy;

/// Number of processes whose proportional share is read: the kernel walks all page tables of a process for it, and
/// holds its mmap_lock.
const PSS_CANDIDATES: usize = 20;
/// Time limit for reading all proportional shares. A process whose share has not been read by then is shown without
/// it.
const PSS_TIME: Duration = Duration::from_millis(250);

/// Process and its memory, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ProcessUsage {
    pub(crate) pid: u32,
    pub(crate) comm: String,
    /// Clock ticks from the boot of the machine to the start of the process: with `pid`, this identifies the process.
    pub(crate) started: u64,
    pub(crate) anon: u64,
    pub(crate) file: u64,
    pub(crate) shmem: u64,
    pub(crate) swap: u64,
    /// Minor page faults since the start of the process; `major_faults` waited for a disk or for swap.
    pub(crate) minor_faults: u64,
    pub(crate) major_faults: u64,
    /// Bytes that were read from disk for the process since its start. None if this user may not read the number, or
    /// the kernel does not count it.
    pub(crate) disk_reads: Option<u64>,
    /// Proportional share (PSS): shared pages are divided by the number of processes that share them.
    pub(crate) pss: Option<u64>,
    /// Cgroup of the process. None until [`find_cgroups`] is called.
    pub(crate) cgroup_info: Option<CgroupInfo>,
}

impl ProcessUsage {
    /// Returns the time since the start of the process. None if the kernel's clocks cannot be read.
    pub(crate) fn age(&self) -> Option<Duration> {
        let ticks = sysconf(SysconfVar::CLK_TCK).ok().flatten()?;
        let started = Duration::from_secs_f64(self.started as f64 / ticks as f64);
        let now: Duration = clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?.into();
        Some(now.saturating_sub(started))
    }

    pub(crate) fn rss(&self) -> u64 {
        self.anon + self.file + self.shmem
    }

    /// Returns the memory that only the process itself can give back: its anonymous memory, swapped out or not, which
    /// grows in a leak.
    pub(crate) fn anon_and_swap(&self) -> u64 {
        self.anon + self.swap
    }
}

/// Reads all processes. A process that exits meanwhile is omitted, and so are kernel threads, which have no memory.
pub(crate) fn all() -> Vec<ProcessUsage> {
    let pids = proc::all().unwrap_or_default();
    pids.into_iter().filter_map(look_at).collect()
}

/// Reads these processes. A process that has exited is omitted.
pub(crate) fn of(pids: Vec<u32>) -> Vec<ProcessUsage> {
    pids.into_iter().filter_map(look_at).collect()
}

/// Reads one process, with its proportional share if the kernel returns it in time.
pub(crate) fn one(pid: u32) -> Option<ProcessUsage> {
    let mut process = [look_at(pid)?];
    add_pss(&mut process);
    find_cgroups(&mut process);
    let [usage] = process;
    Some(usage)
}

fn look_at(pid: u32) -> Option<ProcessUsage> {
    // Numbers of fields in /proc/PID/stat (proc_pid_stat(5)).
    const MINFLT: usize = 10;
    const MAJFLT: usize = 12;
    const STARTTIME: usize = 22;
    let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).ok();
    // The main thread has the start and the name of the process, even when the thread has ended.
    let stat = Stat::read(format!("/proc/{pid}/stat")).ok()?;
    let status = Values::read(proc::file(pid, "status")).ok()?;
    let comm = read("comm")?;
    status.get("VmRSS")?;
    let io = read("io").unwrap_or_default();
    Some(ProcessUsage {
        pid,
        comm: text::escape_bytes(comm.strip_suffix(b"\n").unwrap_or(&comm)),
        started: stat.field(STARTTIME)?,
        minor_faults: stat.field(MINFLT)?,
        major_faults: stat.field(MAJFLT)?,
        disk_reads: Values::parse(&String::from_utf8_lossy(&io)).get("read_bytes"),
        anon: status.get_or_zero("RssAnon"),
        file: status.get_or_zero("RssFile"),
        shmem: status.get_or_zero("RssShmem"),
        swap: status.get_or_zero("VmSwap"),
        pss: None,
        cgroup_info: None,
    })
}

/// Returns the bytes of [`ProcessUsage::anon_and_swap`] by which each process has grown or shrunk, by its pid.
pub(crate) fn growth(before: &[ProcessUsage], now: &[ProcessUsage]) -> HashMap<u32, i64> {
    let before: HashMap<_, _> = before
        .iter()
        .map(|usage| ((usage.pid, usage.started), usage.anon_and_swap()))
        .collect();
    let grown = |usage: &ProcessUsage| {
        let before = before.get(&(usage.pid, usage.started));
        let before = before.copied().unwrap_or_default();
        usage.anon_and_swap().cast_signed() - before.cast_signed()
    };
    now.iter().map(|usage| (usage.pid, grown(usage))).collect()
}

/// Returns the largest processes by this measure, the largest first, with their proportional shares if the kernel
/// returns them in time.
pub(crate) fn largest(
    mut processes: Vec<ProcessUsage>,
    growth: &HashMap<u32, i64>,
    by: RankBy,
    top: usize,
) -> Vec<ProcessUsage> {
    let weight = |usage: &ProcessUsage| match by {
        RankBy::Swap => usage.swap.cast_signed(),
        RankBy::Growth => growth.get(&usage.pid).copied().unwrap_or_default(),
        // A process without a known proportional share is ranked by its resident memory.
        _ => (usage.pss.unwrap_or(usage.rss()) + usage.swap).cast_signed(),
    };
    let sort = |processes: &mut Vec<ProcessUsage>| {
        processes.sort_by_key(|usage| (Reverse(weight(usage)), usage.pid));
    };
    sort(&mut processes);
    processes.truncate(PSS_CANDIDATES.max(top));
    add_pss(&mut processes);
    sort(&mut processes);
    processes.truncate(top);
    find_cgroups(&mut processes);
    processes
}

/// Finds the cgroup of each process. The kernel takes a lock of all cgroups for each lookup, so only processes that
/// are shown are looked up.
pub(crate) fn find_cgroups(processes: &mut [ProcessUsage]) {
    for usage in processes {
        usage.cgroup_info = Some(CgroupInfo::of_process(usage.pid));
    }
}

/// Reads proportional shares in a thread, as a process with many mappings can keep it for seconds. The thread ends
/// once it has read all shares, or the first one after [`PSS_TIME`].
fn add_pss(processes: &mut [ProcessUsage]) {
    let pids: Vec<u32> = processes.iter().map(|usage| usage.pid).collect();
    let (sender, answers) = channel();
    thread::spawn(move || {
        for pid in pids {
            let rollup = Values::read(proc::file(pid, "smaps_rollup")).ok();
            let pss = rollup.and_then(|rollup| rollup.get("Pss"));
            if sender.send((pid, pss)).is_err() {
                break;
            }
        }
    });
    let deadline = Instant::now() + PSS_TIME;
    let left = || deadline.saturating_duration_since(Instant::now());
    while let Ok((pid, pss)) = answers.recv_timeout(left()) {
        if let Some(usage) = processes.iter_mut().find(|usage| usage.pid == pid) {
            usage.pss = pss;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(pid: u32, started: u64, anon: u64) -> ProcessUsage {
        ProcessUsage {
            pid,
            started,
            anon,
            ..ProcessUsage::default()
        }
    }

    #[test]
    fn growth_is_of_the_same_process() {
        let before = [usage(1, 10, 100), usage(2, 20, 100), usage(3, 30, 7)];
        let now = [usage(1, 10, 150), usage(2, 21, 30)];
        let growth = growth(&before, &now);
        // Pid 2 is another process now.
        assert_eq!((growth[&1], growth[&2]), (50, 30));
        assert_eq!(growth.get(&3), None);
    }

    #[test]
    fn this_process_has_memory() {
        let own = look_at(std::process::id()).expect("it runs");
        assert!(own.anon > 0 && own.started > 0, "{own:?}");
        assert!(!own.comm.is_empty());
        let both = || vec![usage(1, 0, 1), own.clone()];
        let grown = HashMap::from([(1, 7), (own.pid, -7)]);
        let top = largest(both(), &grown, RankBy::Process, 1);
        assert_eq!(top[0].pid, own.pid);
        assert_eq!(largest(both(), &grown, RankBy::Growth, 1)[0].pid, 1);
        assert!(
            top[0]
                .pss
                .is_some_and(|pss| pss > 0 && pss <= own.rss() * 2)
        );
    }
}
