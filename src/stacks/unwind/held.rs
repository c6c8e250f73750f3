//! A command that BPF programs (`bpf/include/held.bpf.h`) stop whenever it maps code, until that code has tables. On
//! request, its descendants are stopped, too.
//!
//! No process may stay stopped if this tool is killed meanwhile: however the tool ends, a guard process resumes all of
//! them.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::from_ref;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, libbpf_sys};

use crate::bpf::raw_tracepoint::RawTracepoint;
use crate::process::guard::Guard;
use crate::process::stopped;

/// HELD_PROCESS of `held.bpf.h`: the command's PID; 0 if nothing is held.
const HELD_PROCESS: u32 = 0;
/// HELD_DESCENDANTS: 1 if the command's descendants are held, too.
const HELD_DESCENDANTS: u32 = 1;

/// Time without a new mapping of code after which a command counts as started. The time in which it waits for a CPU
/// does not count.
const STARTED: Duration = Duration::from_millis(250);

/// Maps of a skeleton by which processes are held.
pub(super) struct HeldMaps {
    /// `unwind_held`: the command that is held.
    pub(super) held: MapHandle,
    /// `unwind_stopped`: processes that are stopped.
    pub(super) stopped: MapHandle,
    /// `unwind_looked`: files for which no process is stopped again.
    pub(super) looked: MapHandle,
}

/// Attached BPF programs that stop processes.
pub(super) struct Stops {
    /// Programs at exec.
    pub(super) _exec: Vec<Link>,
    /// Programs at mmap(2). They run at the exit of each system call of every process.
    pub(super) mmap: Vec<RawTracepoint>,
}

/// A command that is held until this is dropped.
pub(super) struct Held {
    pid: u32,
    /// Time at which a process was last resumed, and how long the command had waited for a CPU by then. None before the
    /// command calls exec, and once it has started.
    went_on: Option<(Instant, Duration)>,
    descendants: bool,
    maps: HeldMaps,
    stops: Stops,
    _guard: Guard,
}

impl Held {
    /// Holds a command from now on, and its descendants if `descendants` is set.
    pub(super) fn hold(pid: u32, descendants: bool, maps: HeldMaps, stops: Stops) -> Result<Self> {
        let keep = [maps.held.as_fd(), maps.stopped.as_fd()];
        let [held, stopped] = keep;
        // SAFETY: `release_all` makes system calls only.
        let guard = unsafe { Guard::start(&keep, || release_all(held, stopped)) };
        let guard =
            guard.context("failed to start what lets the command go on if we are killed")?;
        for (key, value) in [
            (HELD_DESCENDANTS, u64::from(descendants)),
            (HELD_PROCESS, pid.into()),
        ] {
            maps.held
                .update(&key.to_ne_bytes(), &value.to_ne_bytes(), MapFlags::ANY)
                .context("failed to stop the command")?;
        }
        Ok(Self {
            pid,
            went_on: None,
            descendants,
            maps,
            stops,
            _guard: guard,
        })
    }

    /// Returns how much longer the command is stopped when it maps code. None if it has not called exec, has started,
    /// or is to be stopped until the end of the trace.
    pub(super) fn left(&self) -> Option<Duration> {
        let (since, had_waited) = self.went_on.filter(|_| !self.descendants)?;
        let waited = time_without_cpu(self.pid).saturating_sub(had_waited);
        Some(STARTED.saturating_sub(since.elapsed().saturating_sub(waited)))
    }

    /// Detaches the programs at mmap(2), because the command has started. When it calls exec, another program starts, which
    /// is stopped again.
    pub(super) fn detach_mmap(&mut self) {
        self.went_on = None;
        self.stops.mmap.iter_mut().for_each(RawTracepoint::detach);
    }

    /// Resumes a process that was stopped for a file, until it maps code again. Where descendants are held, no other
    /// process is stopped for that file.
    ///
    /// # Errors
    /// If the programs that stop the process again cannot be attached. The process is resumed all the same.
    pub(super) fn resume_process(&mut self, pid: u32, file: u64) -> Result<()> {
        let mut stops = self.stops.mmap.iter_mut();
        let stopped_again = stops.try_for_each(RawTracepoint::attach);
        self.went_on = Some((Instant::now(), time_without_cpu(self.pid)));
        if self.descendants {
            // If the map is full, the next process is stopped for this file, too.
            let looked = &self.maps.looked;
            let _ = looked.update(&file.to_ne_bytes(), &[1], MapFlags::ANY);
        }
        let stopped = self.maps.stopped.lookup(&pid.to_ne_bytes(), MapFlags::ANY);
        let now = stopped.ok().flatten();
        // Another thread may have been stopped for another file meanwhile: the answer for that file resumes the
        // process.
        if now.is_none_or(|now| now == file.to_ne_bytes()) {
            // A process that has exited needs neither.
            let _ = self.maps.stopped.delete(&pid.to_ne_bytes());
            stopped::resume(pid);
        }
        stopped_again
    }
}

/// Returns how long the first thread of a process has waited for a CPU although it could run. Zero where the kernel
/// does not count that (CONFIG_SCHED_INFO).
fn time_without_cpu(pid: u32) -> Duration {
    // Nanoseconds on a CPU, nanoseconds of waiting, and how often the thread ran.
    let told = fs::read_to_string(format!("/proc/{pid}/schedstat"));
    let waited = told
        .ok()
        .and_then(|told| told.split(' ').nth(1)?.parse().ok());
    Duration::from_nanos(waited.unwrap_or_default())
}

/// Stops holding the command, and resumes the processes that BPF programs have stopped. Processes that have stopped
/// themselves are left alone. Makes system calls only.
fn release_all(held: BorrowedFd<'_>, stops: BorrowedFd<'_>) {
    // SAFETY: keys and values are of the sizes that the map has, and outlive the call.
    unsafe {
        libbpf_sys::bpf_map_update_elem(
            held.as_raw_fd(),
            from_ref(&HELD_PROCESS).cast(),
            from_ref(&0u64).cast(),
            libbpf_sys::BPF_ANY.into(),
        );
    }
    wait_for_programs();
    stopped::resume_all(stops);
}

/// Waits until every BPF program that runs now has ended. BPF programs run in RCU read-side critical sections, and
/// MEMBARRIER_CMD_GLOBAL waits for a grace period. A kernel with nohz_full CPUs refuses that command.
fn wait_for_programs() {
    const MEMBARRIER_CMD_GLOBAL: i32 = 1;
    const LONGER_THAN_ANY_PROGRAM: libc::timespec = libc::timespec {
        tv_sec: 0,
        tv_nsec: 100_000_000,
    };
    // SAFETY: the call takes integers only.
    let waited = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if waited != 0 {
        // SAFETY: the time outlives the call, which writes nothing back.
        unsafe { libc::nanosleep(&LONGER_THAN_ANY_PROGRAM, std::ptr::null_mut()) };
    }
}
