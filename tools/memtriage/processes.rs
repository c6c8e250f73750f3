//! Processes: what each has of which kind of memory, and who grows.

use std::collections::HashMap;
use std::fs;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use memtools::host::values::Values;
use memtools::print::text;
use memtools::process::proc;

/// Candidates of which the proportional share is asked for: that walks all page tables of a process
/// and holds its mmap_lock.
const PSS_CANDIDATES: usize = 20;
/// How long all of that may take. Who has not answered by then is shown without.
const PSS_TIME: Duration = Duration::from_millis(250);

/// A process and its memory, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) pid: u32,
    pub(crate) comm: String,
    /// Clock ticks from the machine's start to the process's: with `pid` it names one process.
    pub(crate) started: u64,
    pub(crate) anon: u64,
    pub(crate) file: u64,
    pub(crate) shmem: u64,
    pub(crate) swap: u64,
    /// The proportional share: shared pages divided by those who share them.
    pub(crate) pss: Option<u64>,
}

impl Usage {
    pub(crate) fn rss(&self) -> u64 {
        self.anon + self.file + self.shmem
    }

    /// Memory that only the process itself can give back: what grows in a leak, swapped out or not.
    pub(crate) fn own(&self) -> u64 {
        self.anon + self.swap
    }
}

/// All processes that run now. One that exits meanwhile is left out; kernel threads have no memory.
pub(crate) fn all() -> Vec<Usage> {
    let pids = proc::all().unwrap_or_default();
    pids.into_iter().filter_map(look_at).collect()
}

fn look_at(pid: u32) -> Option<Usage> {
    let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).ok();
    let status = Values::parse(&String::from_utf8_lossy(&read("status")?));
    let stat = read("stat")?;
    let stat = String::from_utf8_lossy(&stat);
    let (_, fields) = stat.rsplit_once(')')?;
    let comm = read("comm")?;
    status.get("VmRSS")?;
    Some(Usage {
        pid,
        comm: text::escape_bytes(comm.strip_suffix(b"\n").unwrap_or(&comm)),
        started: fields.split_ascii_whitespace().nth(19)?.parse().ok()?,
        anon: status.of("RssAnon"),
        file: status.of("RssFile"),
        shmem: status.of("RssShmem"),
        swap: status.of("VmSwap"),
        pss: None,
    })
}

/// Bytes of [`Usage::own`] by which each process has grown or shrunk, by its number.
pub(crate) fn growth(before: &[Usage], now: &[Usage]) -> HashMap<u32, i64> {
    let before: HashMap<_, _> = before
        .iter()
        .map(|usage| ((usage.pid, usage.started), usage.own()))
        .collect();
    let grown = |usage: &Usage| {
        let before = before.get(&(usage.pid, usage.started));
        let before = before.copied().unwrap_or_default();
        usage.own().cast_signed() - before.cast_signed()
    };
    now.iter().map(|usage| (usage.pid, grown(usage))).collect()
}

/// The largest by resident and swapped memory, largest first, with their proportional share as far as
/// the kernel tells it in time.
pub(crate) fn largest(mut processes: Vec<Usage>, top: usize) -> Vec<Usage> {
    processes.sort_by_key(|usage| (u64::MAX - usage.rss() - usage.swap, usage.pid));
    processes.truncate(PSS_CANDIDATES.max(top));
    add_pss(&mut processes);
    // Who did not answer is ranked by what is known.
    let weight = |usage: &Usage| usage.pss.unwrap_or(usage.rss()) + usage.swap;
    processes.sort_by_key(|usage| (u64::MAX - weight(usage), usage.pid));
    processes.truncate(top);
    processes
}

/// A thread asks, as a process with many mappings can keep it for seconds; it ends with us.
fn add_pss(processes: &mut [Usage]) {
    let pids: Vec<u32> = processes.iter().map(|usage| usage.pid).collect();
    let (sender, answers) = channel();
    thread::spawn(move || {
        for pid in pids {
            let rollup = Values::read(format!("/proc/{pid}/smaps_rollup")).ok();
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

    fn usage(pid: u32, started: u64, anon: u64) -> Usage {
        Usage {
            pid,
            started,
            anon,
            ..Usage::default()
        }
    }

    #[test]
    fn growth_is_of_the_same_process() {
        let before = [usage(1, 10, 100), usage(2, 20, 100), usage(3, 30, 7)];
        let now = [usage(1, 10, 150), usage(2, 21, 30)];
        let growth = growth(&before, &now);
        // Another process has got number 2.
        assert_eq!((growth[&1], growth[&2]), (50, 30));
        assert_eq!(growth.get(&3), None);
    }

    #[test]
    fn this_process_has_memory() {
        let own = look_at(std::process::id()).expect("it runs");
        assert!(own.anon > 0 && own.started > 0, "{own:?}");
        assert!(!own.comm.is_empty());
        let top = largest(vec![usage(1, 0, 1), own.clone()], 1);
        assert_eq!(top[0].pid, own.pid);
        assert!(
            top[0]
                .pss
                .is_some_and(|pss| pss > 0 && pss <= own.rss() * 2)
        );
    }
}
