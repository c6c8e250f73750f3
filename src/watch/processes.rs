//! Processes and their anonymous memory, from `/proc/PID/statm`.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs;
use std::time::Duration;

use anyhow::Result;

use crate::host::page_size;
use crate::print::text;
use crate::process::container::CgroupInfo;
use crate::process::proc;
use crate::watch::reread::{FileBudget, Reread};

/// Time after which growth is counted anew.
const HOUR: Duration = Duration::from_secs(3600);

/// Process that is watched.
#[derive(Debug)]
pub struct WatchedProcess {
    /// Number of the process.
    pub pid: u32,
    /// Name of the process (comm) when it was first seen, escaped.
    pub comm: String,
    /// Cgroup of the process when it was first seen.
    pub cgroup: CgroupInfo,
    /// Resident memory that is neither of files nor shared, in bytes.
    pub anon: u64,
    /// Bytes by which `anon` has changed since the look before; None at the first look.
    pub grown: Option<i64>,
    /// `anon` at the beginning of this hour, ...
    hour: (Duration, u64),
    /// ... and of the hour before, or when the process was first seen.
    hour_before: u64,
    statm: Reread,
}

/// All processes, as of the last look.
#[derive(Debug)]
pub struct Processes {
    known: HashMap<u32, WatchedProcess>,
    budget: FileBudget,
    page: u64,
    /// Time since boot of the last look.
    looked: Duration,
}

impl Processes {
    /// Creates a table without processes, which keeps as many files open as the budget allows.
    ///
    /// # Errors
    /// If the C library does not know a page's size.
    pub fn new(budget: FileBudget) -> Result<Self> {
        Ok(Self {
            known: HashMap::new(),
            budget,
            page: page_size::page_bytes()?,
            looked: Duration::ZERO,
        })
    }

    /// Reads all processes. Those that have exited since are forgotten, and so is each whose pid belongs to another
    /// process now.
    ///
    /// # Errors
    /// If /proc cannot be listed.
    pub fn look(&mut self, at: Duration, buffer: &mut Vec<u8>) -> Result<()> {
        let page = self.page;
        self.known
            .retain(|_, process| process.look(page, at, buffer));
        for pid in proc::all()? {
            if !self.known.contains_key(&pid)
                && let Some(process) = WatchedProcess::open(pid, &self.budget, page, at, buffer)
            {
                self.known.insert(pid, process);
            }
        }
        self.looked = at;
        Ok(())
    }

    /// Returns the time since boot of the last look.
    pub fn looked(&self) -> Duration {
        self.looked
    }

    /// Returns the number of processes, including kernel threads.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// Whether there are no processes.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }

    /// Returns a process, if it was there at the last look.
    pub fn get(&self, pid: u32) -> Option<&WatchedProcess> {
        self.known.get(&pid)
    }

    /// Iterates over all processes.
    pub fn iter(&self) -> impl Iterator<Item = &WatchedProcess> {
        self.known.values()
    }

    /// Returns the processes with the most anonymous memory, at most `count`, the largest first.
    pub fn largest(&self, count: usize) -> Vec<&WatchedProcess> {
        let with_memory = self.known.values().filter(|process| process.anon > 0);
        top(with_memory, count, |process| {
            (Reverse(process.anon), process.pid)
        })
    }

    /// Returns the processes that have grown by at least `least` bytes since the look before, at most `count`, the
    /// fastest first. A process that is new has not grown.
    pub fn growing(&self, least: i64, count: usize) -> Vec<&WatchedProcess> {
        let grown = |process: &WatchedProcess| process.grown.unwrap_or_default();
        let growing = self
            .known
            .values()
            .filter(|process| grown(process) >= least);
        top(growing, count, |process| {
            (Reverse(grown(process)), process.pid)
        })
    }
}

/// Returns the first `count` processes by a key.
fn top<'a, K: Ord>(
    processes: impl Iterator<Item = &'a WatchedProcess>,
    count: usize,
    key: impl Fn(&WatchedProcess) -> K,
) -> Vec<&'a WatchedProcess> {
    let mut all: Vec<_> = processes.collect();
    all.sort_by_key(|process| key(process));
    all.truncate(count);
    all
}

impl WatchedProcess {
    /// Opens a process. None if it has exited.
    fn open(
        pid: u32,
        budget: &FileBudget,
        page: u64,
        at: Duration,
        buffer: &mut Vec<u8>,
    ) -> Option<Self> {
        let open = |path| Reread::open(path, budget).ok();
        let mut statm = open(format!("/proc/{pid}/statm").into())?;
        let mut anon = anon(statm.read(buffer).ok()?, page)?;
        // A kernel thread has no memory, and neither has a main thread that has ended before the others.
        let living = (anon == 0).then(|| proc::living_thread(pid));
        if let Some(thread) = living.filter(|&thread| thread != pid) {
            statm = open(format!("/proc/{thread}/statm").into())?;
            anon = self::anon(statm.read(buffer).ok()?, page)?;
        }
        let comm = fs::read(format!("/proc/{pid}/comm")).ok()?;
        Some(Self {
            pid,
            comm: text::escape_bytes(comm.strip_suffix(b"\n").unwrap_or(&comm)),
            cgroup: CgroupInfo::of_process(pid),
            anon,
            grown: None,
            hour: (at, anon),
            hour_before: anon,
            statm,
        })
    }

    /// Reads a process again. Returns whether it still exists. A process whose main thread has ended is forgotten, too,
    /// so that it is opened anew by a thread that lives.
    fn look(&mut self, page: u64, at: Duration, buffer: &mut Vec<u8>) -> bool {
        let Some(anon) = self
            .statm
            .read(buffer)
            .ok()
            .and_then(|statm| anon(statm, page))
        else {
            return false;
        };
        let has_lost_memory = anon == 0 && self.anon > 0;
        self.grown = Some(anon.cast_signed() - self.anon.cast_signed());
        self.anon = anon;
        self.begin_hour(at);
        !has_lost_memory
    }

    fn begin_hour(&mut self, at: Duration) {
        let (since, then) = self.hour;
        if at.saturating_sub(since) >= HOUR {
            self.hour_before = then;
            self.hour = (at, self.anon);
        }
    }

    /// Returns the bytes by which `anon` has changed in the last one to two hours, or since the process was first seen.
    pub fn grown_slowly(&self) -> i64 {
        self.anon.cast_signed() - self.hour_before.cast_signed()
    }
}

/// Parses `size resident shared …`, in pages, and returns the bytes that are resident and not shared.
fn anon(statm: &[u8], page: u64) -> Option<u64> {
    let mut fields = statm.split(|&byte| byte == b' ').skip(1);
    let mut field = || str::from_utf8(fields.next()?).ok()?.parse::<u64>().ok();
    let (resident, shared) = (field()?, field()?);
    Some(resident.saturating_sub(shared) * page)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn what_is_resident_and_not_shared_is_anonymous() {
        assert_eq!(anon(b"100 37 30 1 0 20 0\n", 4096), Some(7 * 4096));
        assert_eq!(anon(b"0 0 0 0 0 0 0\n", 4096), Some(0));
        assert_eq!(anon(b"", 4096), None);
        assert_eq!(anon(b"1 2\n", 4096), None);
    }

    #[test]
    fn processes_come_grow_and_go() {
        let mut processes = Processes::new(FileBudget::new(5)).expect("a page size");
        let mut buffer = Vec::new();
        let mut child = Command::new("sleep").arg("1000").spawn().expect("sleep(1)");
        let mut look = |processes: &mut Processes| {
            processes
                .look(Duration::from_secs(1), &mut buffer)
                .expect("/proc");
        };
        look(&mut processes);
        let own = std::process::id();
        let seen = processes.get(own).expect("it runs");
        assert!(seen.anon > 0 && seen.grown.is_none(), "{seen:?}");
        assert!(processes.get(child.id()).is_some());
        let memory = vec![1_u8; 64 << 20];
        look(&mut processes);
        assert!(processes.get(own).and_then(|own| own.grown) > Some(32 << 20));
        let growing = processes.growing(32 << 20, 1000);
        assert!(growing.iter().any(|process| process.pid == own));
        drop(std::hint::black_box(memory));
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        look(&mut processes);
        assert!(processes.get(child.id()).is_none());
        assert!(processes.len() >= processes.largest(2).len());
        let [first, second] = processes.largest(2)[..] else {
            return;
        };
        assert!(first.anon >= second.anon);
    }
}
