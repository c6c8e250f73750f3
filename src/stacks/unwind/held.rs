//! A command that is stopped by the kernel half (`bpf/include/held.bpf.h`) whenever it maps code, until
//! there are tables for that; on request also what it starts.
//!
//! No process must stay stopped when we are killed meanwhile: whatever becomes of us, a guard lets all
//! go on.

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::{from_mut, from_ref, null};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, libbpf_sys};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::bpf::raw_tracepoint::RawTracepoint;
use crate::process::guard::Guard;

/// HELD_PROCESS of `held.bpf.h`: the command's number; 0 where nothing is held.
const HELD_PROCESS: u32 = 0;
/// HELD_DESCENDANTS: 1 if what the command starts is held, too.
const HELD_DESCENDANTS: u32 = 1;
/// HELD_AT_A_TIME: processes that are stopped at a time.
const HELD_AT_A_TIME: u32 = 256;

/// A command that has mapped no code for so long has started. The time in which it waits for a CPU does not count.
const STARTED: Duration = Duration::from_millis(250);

/// Maps of a skeleton, of these names.
pub(super) struct HeldMaps {
    /// `unwind_held`: what is held.
    pub(super) held: MapHandle,
    /// `unwind_stopped`: processes that are stopped.
    pub(super) stopped: MapHandle,
    /// `unwind_looked`: files for which no process is stopped again.
    pub(super) looked: MapHandle,
}

/// What stops processes.
pub(super) struct Stops {
    /// At exec.
    pub(super) _exec: Vec<Link>,
    /// At mmap(2). Each system call of every process comes through these.
    pub(super) mmap: Vec<RawTracepoint>,
}

/// The command, held until this is dropped.
pub(super) struct Held {
    pid: u32,
    /// When a process was last let go on, and how long the command had waited for a CPU by then; None before it calls exec,
    /// and once it has started.
    went_on: Option<(Instant, Duration)>,
    descendants: bool,
    maps: HeldMaps,
    stops: Stops,
    _guard: Guard,
}

impl Held {
    /// Holds a command from now on, and what it starts if `descendants` says so.
    pub(super) fn hold(pid: u32, descendants: bool, maps: HeldMaps, stops: Stops) -> Result<Self> {
        let keep = [maps.held.as_fd(), maps.stopped.as_fd()];
        let [held, stopped] = keep;
        // SAFETY: what is done makes system calls only.
        let guard = unsafe { Guard::start(&keep, || let_go(held, stopped)) };
        let guard =
            guard.context("failed to start what lets the command go on if we are killed")?;
        for (key, value) in [
            (HELD_DESCENDANTS, u64::from(descendants)),
            (HELD_PROCESS, pid.into()),
        ] {
            maps.held
                .update(&key.to_ne_bytes(), &value.to_ne_bytes(), MapFlags::ANY)
                .context("failed to hold the command")?;
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

    /// How long the command is stopped yet when it maps code. None if it has not begun, has started, or is stopped for good.
    pub(super) fn left(&self) -> Option<Duration> {
        let (since, had_waited) = self.went_on.filter(|_| !self.descendants)?;
        let waited = time_without_cpu(self.pid).saturating_sub(had_waited);
        Some(STARTED.saturating_sub(since.elapsed().saturating_sub(waited)))
    }

    /// Stops the command no more when it maps code, as it has started. When it calls exec, another program starts, which
    /// is stopped again.
    pub(super) fn has_started(&mut self) {
        self.went_on = None;
        self.stops.mmap.iter_mut().for_each(RawTracepoint::detach);
    }

    /// Lets a process go on that was stopped for a file, to where it maps code again. No other one is
    /// stopped for that file where descendants are held.
    ///
    /// # Errors
    /// If the kernel refuses to stop it there, though it goes on.
    pub(super) fn go_on(&mut self, pid: u32, file: u64) -> Result<()> {
        let mut stops = self.stops.mmap.iter_mut();
        let stopped_again = stops.try_for_each(RawTracepoint::attach);
        self.went_on = Some((Instant::now(), time_without_cpu(self.pid)));
        if self.descendants {
            // Without room for it, the next process is stopped for it, too.
            let looked = &self.maps.looked;
            let _ = looked.update(&file.to_ne_bytes(), &[1], MapFlags::ANY);
        }
        let stopped = self.maps.stopped.lookup(&pid.to_ne_bytes(), MapFlags::ANY);
        let now = stopped.ok().flatten();
        // Another of its threads may have been stopped for another file meanwhile: that lets it go on.
        if now.is_none_or(|now| now == file.to_ne_bytes()) {
            // One that is gone needs neither.
            let _ = self.maps.stopped.delete(&pid.to_ne_bytes());
            resume(pid);
        }
        stopped_again
    }
}

/// How long the first thread of a process has waited for a CPU although it could run. Zero where the kernel does not tell
/// (CONFIG_SCHED_INFO).
fn time_without_cpu(pid: u32) -> Duration {
    // Nanoseconds on a CPU, those of waiting, and how often it ran.
    let told = fs::read_to_string(format!("/proc/{pid}/schedstat"));
    let waited = told
        .ok()
        .and_then(|told| told.split(' ').nth(1)?.parse().ok());
    Duration::from_nanos(waited.unwrap_or_default())
}

/// Holds nothing any longer, and resumes what the kernel half has stopped: what has stopped itself is left
/// alone. Makes system calls only.
fn let_go(held: BorrowedFd<'_>, stopped: BorrowedFd<'_>) {
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
    let mut last = None;
    for _ in 0..HELD_AT_A_TIME {
        let (mut pid, mut file) = (0u32, 0u64);
        let from = last.as_ref().map_or(null(), from_ref::<u32>);
        let map = stopped.as_raw_fd();
        // SAFETY: as above; a null pointer stands for the beginning.
        let none = unsafe {
            libbpf_sys::bpf_map_get_next_key(map, from.cast(), from_mut(&mut pid).cast()) != 0
                || libbpf_sys::bpf_map_lookup_elem(
                    map,
                    from_ref(&pid).cast(),
                    from_mut(&mut file).cast(),
                ) != 0
        };
        if none {
            break;
        }
        if file != 0 {
            resume(pid);
        }
        last = Some(pid);
    }
}

/// Waits until every BPF program has ended that runs now. They run between two RCU grace periods, and
/// MEMBARRIER_CMD_GLOBAL waits for one; it is refused on a kernel with nohz_full CPUs.
fn wait_for_programs() {
    const MEMBARRIER_CMD_GLOBAL: i32 = 1;
    const LONGER_THAN_ANY_PROGRAM: libc::timespec = libc::timespec {
        tv_sec: 0,
        tv_nsec: 100_000_000,
    };
    // SAFETY: takes integers only.
    let waited = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if waited != 0 {
        // SAFETY: the time outlives the call, which writes nothing back.
        unsafe { libc::nanosleep(&LONGER_THAN_ANY_PROGRAM, std::ptr::null_mut()) };
    }
}

/// Lets a process go on. It is a system call.
fn resume(pid: u32) {
    // One that is gone needs none.
    let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGCONT);
}
