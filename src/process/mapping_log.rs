//! Code mappings as processes make them, from the kernel's own log (PERF_RECORD_MMAP2).
//!
//! /proc/PID/maps is gone when a process has exited, and a process can live for less time than it
//! takes to read it. The kernel's log is complete: it has every mapping of code that any process
//! makes, by exec, by its dynamic linker or by dlopen, from the moment that it is opened; and every
//! fork, which gives the child its parent's.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use perf_event::data::Record;
use perf_event::events::Software;
use perf_event::{Builder, Clock, SampleFlag, Sampler};

use crate::bpf::attach;
use crate::host::capabilities::{self, Capability};
use crate::host::cpus::Cpus;
use crate::print::clock;
use crate::process::proc::Mapping;

/// Bytes of log per CPU between two readings. A record is about 100 bytes long, and an exec makes
/// ten or so.
const LOG_BYTES: usize = 256 << 10;
/// The fewest, where the user may lock no more memory: without CAP_IPC_LOCK it is 516 KiB per CPU for all
/// tools of a user (kernel.perf_event_mlock_kb), those included that have ended just now.
const LEAST_LOG_BYTES: usize = 16 << 10;
/// The part of it from which on a reader is woken.
const WAKE_PART: usize = 4;

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

/// The log, of all processes, one buffer per CPU, also of those that come online later. Its descriptor
/// is readable when it should be drained lest it overflow, or a CPU has come.
pub struct MappingLog {
    cpus: Cpus,
    /// By the CPU's number.
    buffers: BTreeMap<usize, Sampler>,
    /// Changes later than the last drain began, each with its time: another CPU's buffer was read
    /// before them, and may hold earlier ones.
    early: Vec<(u64, Change)>,
    filling: Epoll,
    lost: u64,
}

impl MappingLog {
    /// Starts logging.
    ///
    /// # Errors
    /// If a perf event cannot be opened on each CPU, mostly for want of privilege: the message
    /// names the remedy.
    pub fn start() -> Result<Self> {
        let cpus = Cpus::now()?;
        let filling =
            Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).context("failed to open epoll")?;
        if let Some(events) = cpus.events() {
            filling
                .add(events, EpollEvent::new(EpollFlags::EPOLLIN, 0))
                .context("failed to watch for CPUs")?;
        }
        let mut log = Self {
            cpus,
            buffers: BTreeMap::new(),
            early: Vec::new(),
            filling,
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

    /// Starts logging on a CPU, in the place of what it logged before it went offline.
    fn open(&mut self, cpu: usize) -> Result<()> {
        let mut bytes = LOG_BYTES;
        let mut buffer = Self::buffer(cpu, bytes);
        while bytes > LEAST_LOG_BYTES
            && (buffer.as_ref()).is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
        {
            bytes /= 2;
            buffer = Self::buffer(cpu, bytes);
        }
        let buffer = buffer?;
        // SAFETY: the descriptor is the sampler's, which lives as long as `filling`, or leaves it when it
        // is closed.
        let fd = unsafe { BorrowedFd::borrow_raw(buffer.as_raw_fd()) };
        self.filling
            .add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 0))
            .context("failed to watch it")?;
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
            // Each record ends in its time.
            .sample(SampleFlag::TIME)
            .sample_id_all(true)
            .clockid(Clock::MONOTONIC)
            .wakeup_watermark(bytes / WAKE_PART)
            .enabled(true)
            .build()?
            .sampled(bytes)
    }

    /// What has happened up to now since the last call, in order.
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
        for cpu in self.cpus.came() {
            match self.open(cpu) {
                Ok(()) => attach::verbose(format_args!("mappings on CPU {cpu} are logged")),
                Err(error) => {
                    eprintln!("mappings that are made on CPU {cpu} are not seen: {error:#}");
                }
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
