//! Code mappings as processes make them, from the kernel's own log (PERF_RECORD_MMAP2).
//!
//! /proc/PID/maps is gone when a process has exited, and a process can live for less time than it
//! takes to read it. The kernel's log is complete: it has every mapping of code that any process
//! makes, by exec, by its dynamic linker or by dlopen, from the moment that it is opened; and every
//! fork, which gives the child its parent's.

use std::ffi::OsString;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use perf_event::data::Record;
use perf_event::events::Software;
use perf_event::{Builder, Clock, SampleFlag, Sampler};

use crate::print::clock;
use crate::process::proc::Mapping;

/// Bytes of log per CPU between two readings. A record is about 100 bytes long, and an exec makes
/// ten or so.
const LOG_BYTES: usize = 256 << 10;
/// From this many on a reader is woken.
const WAKE_BYTES: usize = 64 << 10;

/// PERF_RECORD_MISC_COMM_EXEC: the name changed because of an exec.
const MISC_COMM_EXEC: u16 = 1 << 13;

/// A change in what code a process can execute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A process mapped code.
    Mapped(u32, Mapping),
    /// A process called exec: all that it had mapped is gone.
    Exec(u32),
    /// The first made the second, which has the same mapped.
    Forked(u32, u32),
    /// A process has exited.
    Exited(u32),
}

/// The log, of all processes, one buffer per CPU. Its descriptor is readable when it should be
/// drained lest it overflow.
pub struct MappingLog {
    cpus: Vec<Sampler>,
    /// Changes later than the last drain began, each with its time: another CPU's buffer was read
    /// before them, and may hold earlier ones.
    early: Vec<(u64, Change)>,
    filling: Epoll,
    lost: u64,
}

impl MappingLog {
    /// Starts logging.
    pub fn start() -> Result<Self> {
        let cpus = online_cpus()?
            .into_iter()
            .map(|cpu| {
                Builder::new(Software::DUMMY)
                    .any_pid()
                    .one_cpu(cpu)
                    .include_kernel()
                    .mmap(true)
                    .mmap2(true)
                    .comm(true)
                    .comm_exec(true)
                    .task(true)
                    // Each record ends in its time.
                    .sample(SampleFlag::TIME)
                    .sample_id_all(true)
                    .clockid(Clock::MONOTONIC)
                    .wakeup_watermark(WAKE_BYTES)
                    .enabled(true)
                    .build()
                    .and_then(|counter| counter.sampled(LOG_BYTES))
            })
            .collect::<Result<Vec<_>, _>>()
            .context("failed to open the kernel's log of mappings (perf_event_open)")?;
        let filling =
            Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("failed to open epoll")?;
        for cpu in &cpus {
            // SAFETY: the descriptor is the sampler's, which lives as long as `filling`.
            let cpu = unsafe { BorrowedFd::borrow_raw(cpu.as_raw_fd()) };
            filling
                .add(cpu, EpollEvent::new(EpollFlags::EPOLLIN, 0))
                .context("failed to watch the log of mappings")?;
        }
        Ok(Self {
            cpus,
            early: Vec::new(),
            filling,
            lost: 0,
        })
    }

    /// What has happened up to now since the last call, in order.
    pub fn drain(&mut self) -> Vec<Change> {
        let now = clock::monotonic_ns();
        let mut changes = std::mem::take(&mut self.early);
        for cpu in &mut self.cpus {
            while let Some(record) = cpu.next_record() {
                let exec = record.misc() & MISC_COMM_EXEC != 0;
                let time = record
                    .to_contiguous()
                    .last_chunk()
                    .map_or(0, |time| u64::from_ne_bytes(*time));
                let change = match record.parse_record() {
                    Ok(Record::Mmap2(map)) => {
                        // What /proc/PID/maps leaves empty.
                        let name = map.filename.strip_prefix(b"//anon");
                        let path = name.unwrap_or(&map.filename).to_vec();
                        let path = PathBuf::from(OsString::from_vec(path));
                        Some(Change::Mapped(
                            map.pid,
                            Mapping {
                                range: map.addr..map.addr.saturating_add(map.len),
                                executable: true,
                                file_offset: map.pgoff,
                                device: (map.maj().unwrap_or(0), map.min().unwrap_or(0)),
                                inode: map.ino().unwrap_or(0),
                                path,
                            },
                        ))
                    }
                    Ok(Record::Comm(comm)) if exec => Some(Change::Exec(comm.pid)),
                    // Not a thread.
                    Ok(Record::Fork(fork)) if fork.pid != fork.ppid => {
                        Some(Change::Forked(fork.ppid, fork.pid))
                    }
                    Ok(Record::Exit(exit)) if exit.pid == exit.tid => {
                        Some(Change::Exited(exit.pid))
                    }
                    Ok(Record::Lost(lost)) => {
                        self.lost += lost.lost;
                        None
                    }
                    _ => None,
                };
                changes.extend(change.map(|change| (time, change)));
            }
        }
        changes.sort_by_key(|&(time, _)| time);
        self.early = changes.split_off(changes.partition_point(|&(time, _)| time <= now));
        changes.into_iter().map(|(_, change)| change).collect()
    }

    /// Records that did not fit into the log.
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

impl AsFd for MappingLog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.filling.0.as_fd()
    }
}

/// Numbers of the CPUs that are online, from a list such as `0-3,8`.
pub fn online_cpus() -> Result<Vec<usize>> {
    let list = fs::read_to_string("/sys/devices/system/cpu/online")
        .context("failed to list the CPUs; is /sys mounted?")?;
    parse_cpu_list(&list).context("failed to understand /sys/devices/system/cpu/online")
}

fn parse_cpu_list(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists() {
        assert_eq!(parse_cpu_list("0\n"), Some(vec![0]));
        assert_eq!(parse_cpu_list("0-2,5,7-8\n"), Some(vec![0, 1, 2, 5, 7, 8]));
        assert_eq!(parse_cpu_list("x"), None);
    }
}
