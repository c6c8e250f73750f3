//! Code mappings as processes make them, from the kernel's own log (PERF_RECORD_MMAP2).
//!
//! /proc/PID/maps disappears when a process exits, and a process can live for less time than it takes to read this
//! file. The kernel's log is complete. From the moment when it is opened, it has every code mapping that any process
//! makes, by exec, by its dynamic linker or by dlopen. It also has every fork, by which the child gets its parent's
//! mappings.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use perf_event::data::{Mmap2, Record};
use perf_event::events::Software;
use perf_event::{Builder, Clock, SampleFlag, Sampler};

use crate::bpf::attach;
use crate::host::capabilities::{self, Capability};
use crate::host::cpus::Cpus;
use crate::print::clock;
use crate::process::proc::{self, Mapping};

/// Maximum size of the log of one CPU, in bytes; it has to last from one drain to the next. A record has about 100
/// bytes, and an exec makes ten or so.
const LOG_BYTES: usize = 256 << 10;
/// Maximum size of the logs of all CPUs together, in bytes. It is reached with 32 CPUs; more CPUs share it.
const ALL_LOGS_BYTES: usize = 8 << 20;
/// Page of each log, beside its records.
const HEAD_BYTES: usize = 4 << 10;
/// Size of the log of one of very many CPUs, in bytes.
const LEAST_BYTES: usize = 8 << 10;
/// Minimum size of the log of one CPU, in bytes, for users that may lock no more memory. Without CAP_IPC_LOCK the
/// limit is 516 KiB per CPU for all tools of a user (kernel.perf_event_mlock_kb), including tools that have just
/// ended.
const MIN_LOG_BYTES: usize = 16 << 10;
/// Divisor of the log's size: a reader is woken when one such part of the log is filled.
const WAKE_PART: usize = 4;

/// PERF_RECORD_MISC_COMM_EXEC: the name changed because of an exec.
const MISC_COMM_EXEC: u16 = 1 << 13;

/// Change of the code mappings of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A process mapped code.
    Mapped(u32, Mapping),
    /// A process called exec: all its mappings are removed.
    Exec(u32),
    /// The first process forked the second one, which has the same mappings.
    Forked(u32, u32),
    /// The last thread of a process has exited.
    Exited(u32),
    /// A thread of a process has got this name, other than by exec.
    Renamed(u32, Vec<u8>),
}

/// Log of all processes, with one buffer per CPU, also for CPUs that come online later. Its descriptor is readable
/// when the log should be drained before it overflows, or when a CPU has come online.
pub struct MappingLog {
    cpus: Cpus,
    /// Buffers by CPU number.
    buffers: BTreeMap<usize, Sampler>,
    /// Changes later than the beginning of the last drain, each with its time. The buffers of other CPUs were read
    /// before, and may hold earlier changes.
    early: Vec<(u64, Change)>,
    /// The epoll set of all buffers and of the events of CPUs.
    filling: Epoll,
    /// Processes whose main thread has exited while other threads run.
    without_main: HashSet<u32>,
    lost: u64,
}

impl MappingLog {
    /// Starts logging.
    ///
    /// # Errors
    /// If a perf event cannot be opened on each CPU, mostly for lack of privilege: the message names the remedy.
    pub fn start() -> Result<Self> {
        let cpus = Cpus::now()?;
        let filling =
            Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("failed to open epoll")?;
        match cpus.events() {
            Ok(events) => filling
                .add(events, EpollEvent::new(EpollFlags::EPOLLIN, 0))
                .context("failed to monitor for CPUs")?,
            Err(error) => crate::note!(
                "mappings on CPUs that come online later are not recorded: no device events: {error}"
            ),
        }
        let mut log = Self {
            cpus,
            buffers: BTreeMap::new(),
            early: Vec::new(),
            filling,
            without_main: HashSet::new(),
            lost: 0,
        };
        let online: Vec<usize> = log.cpus.online().collect();
        for cpu in online {
            log.open(cpu).with_context(|| {
                let mut remedy = capabilities::remedy_for_perf_events();
                if remedy.is_empty() {
                    remedy = capabilities::remedy(Capability::CAP_IPC_LOCK);
                }
                format!("failed to open the kernel's log of mappings (perf_event_open){remedy}")
            })?;
        }
        Ok(log)
    }

    /// Starts logging on a CPU, and replaces the buffer from before the CPU went offline.
    fn open(&mut self, cpu: usize) -> Result<()> {
        let mut bytes = log_bytes(self.cpus.online().count());
        let mut buffer = Self::buffer(cpu, bytes);
        while bytes > MIN_LOG_BYTES
            && (buffer.as_ref()).is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
        {
            bytes /= 2;
            buffer = Self::buffer(cpu, bytes);
        }
        let buffer = buffer?;
        // SAFETY: the descriptor belongs to the sampler, which lives as long as `filling`; closing it removes it from
        // `filling`.
        let fd = unsafe { BorrowedFd::borrow_raw(buffer.as_raw_fd()) };
        self.filling
            .add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 0))
            .context("failed to monitor it")?;
        self.buffers.insert(cpu, buffer);
        Ok(())
    }

    fn buffer(cpu: usize, bytes: usize) -> io::Result<Sampler> {
        Builder::new(Software::DUMMY)
            .any_pid()
            .one_cpu(cpu)
            .include_kernel()
            .mmap(true)
            .mmap2(true)
            .comm(true)
            .comm_exec(true)
            .task(true)
            // Each record ends with its time.
            .sample(SampleFlag::TIME)
            .sample_id_all(true)
            .clockid(Clock::MONOTONIC)
            .wakeup_watermark(bytes / WAKE_PART)
            .enabled(true)
            .build()?
            .sampled(bytes)
    }

    /// Returns all changes since the last call, in order of time.
    pub fn drain(&mut self) -> Vec<Change> {
        let now = clock::monotonic_ns();
        let mut changes = std::mem::take(&mut self.early);
        for buffer in self.buffers.values_mut() {
            while let Some(record) = buffer.next_record() {
                let exec = record.misc() & MISC_COMM_EXEC != 0;
                let time = record
                    .to_contiguous()
                    .last_chunk()
                    .map_or(0, |time| u64::from_ne_bytes(*time));
                let change = match record.parse_record() {
                    Ok(Record::Lost(lost)) => {
                        self.lost += lost.lost;
                        None
                    }
                    Ok(record) => change(record, exec, &mut self.without_main),
                    Err(_) => None,
                };
                changes.extend(change.map(|change| (time, change)));
            }
        }
        for cpu in self.cpus.newly_online() {
            match self.open(cpu) {
                Ok(()) => attach::log_verbose(format_args!("mappings on CPU {cpu} are logged")),
                Err(error) => {
                    crate::note!("mappings on CPU {cpu} are not recorded: {error:#}");
                }
            }
        }
        changes.sort_by_key(|&(time, _)| time);
        self.early = changes.split_off(changes.partition_point(|&(time, _)| time <= now));
        changes.into_iter().map(|(_, change)| change).collect()
    }

    /// Returns the number of records that were lost because the log was full.
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

/// Returns the size of the log of one CPU of this many, in bytes: a power of two.
fn log_bytes(cpus: usize) -> usize {
    let share = (ALL_LOGS_BYTES / cpus.max(1)).saturating_sub(HEAD_BYTES);
    let whole = (share + 1).next_power_of_two() / 2;
    whole.clamp(LEAST_BYTES, LOG_BYTES)
}

/// Returns the change that a record stands for. `exec` is whether a record of a name is of an exec.
fn change(record: Record, exec: bool, without_main: &mut HashSet<u32>) -> Option<Change> {
    match record {
        Record::Mmap2(map) => Some(Change::Mapped(map.pid, mapping(&map))),
        Record::Comm(comm) if exec => Some(Change::Exec(comm.pid)),
        Record::Comm(comm) => Some(Change::Renamed(comm.pid, comm.comm.into_owned())),
        // With the same PID the fork has created a thread.
        Record::Fork(fork) if fork.pid != fork.ppid => Some(Change::Forked(fork.ppid, fork.pid)),
        Record::Exit(exit) => exited(without_main, exit.pid, exit.tid),
        _ => None,
    }
}

fn mapping(map: &Mmap2) -> Mapping {
    // For these mappings /proc/PID/maps has an empty path.
    let path = map.filename.strip_prefix(b"//anon");
    let path = path.unwrap_or(&map.filename).to_vec();
    Mapping {
        range: map.addr..map.addr.saturating_add(map.len),
        executable: true,
        file_offset: map.pgoff,
        device: (map.maj().unwrap_or(0), map.min().unwrap_or(0)),
        inode: map.ino().unwrap_or(0),
        path: PathBuf::from(OsString::from_vec(path)),
    }
}

/// Returns the change by the exit of a thread, if it was the last of its process. `without_main` has the processes whose
/// main thread has exited before other threads.
fn exited(without_main: &mut HashSet<u32>, pid: u32, tid: u32) -> Option<Change> {
    if pid != tid && !without_main.contains(&pid) {
        return None;
    }
    if proc::has_living_thread(pid) {
        without_main.insert(pid);
        return None;
    }
    without_main.remove(&pid);
    Some(Change::Exited(pid))
}

impl AsFd for MappingLog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.filling.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logs_of_all_cpus_together_stay_small() {
        assert_eq!([1, 2, 16, 31].map(log_bytes), [LOG_BYTES; 4]);
        assert_eq!([64, 255, 512].map(log_bytes), [64 << 10, 16 << 10, 8 << 10]);
        for cpus in 32..=512 {
            let all = cpus * (log_bytes(cpus) + HEAD_BYTES);
            assert!(all <= ALL_LOGS_BYTES, "{cpus} CPUs: {all}");
            // Not less than half of what is allowed, with the pages that each log has.
            assert!(all > ALL_LOGS_BYTES / 3, "{cpus} CPUs: {all}");
        }
        assert_eq!(log_bytes(8192), LEAST_BYTES);
    }
}
