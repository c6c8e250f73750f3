//! A command on its way from exec to where it has mapped all its libraries. The kernel half stops it
//! whenever it maps code (`unwind_hold()` of `bpf/include/unwind.bpf.h`), until there are tables for
//! that.
//!
//! A command must not stay stopped when we are killed meanwhile: whatever becomes of us, a guard
//! lets it go on.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::{from_mut, from_ref};

use anyhow::{Context, Result};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, libbpf_sys};
use nix::sys::signal::Signal;

use crate::process::guard::Guard;
use crate::process::proc::Process;

/// HELD_PROCESS of `unwind.bpf.h`: the process that is stopped when it maps code; 0 for none.
const HELD_PROCESS: u32 = 0;
/// HELD_STOPPED: 1 from where it is stopped until it is let go on.
const HELD_STOPPED: u32 = 1;

/// The command, held until this is dropped.
pub(super) struct Held {
    process: Process,
    /// Whether it has called exec.
    began: bool,
    held: MapHandle,
    _links: Vec<Link>,
    _guard: Guard,
}

impl Held {
    /// Holds a process from now on. `held` is the map of that name, `links` the programs
    /// that see exec and mmap(2).
    pub(super) fn hold(pid: u32, held: MapHandle, links: Vec<Link>) -> Result<Self> {
        let process = Process::open(pid)?;
        let keep = [held.as_fd(), process.as_fd()];
        let [map, command] = keep;
        // SAFETY: what is done makes system calls only.
        let guard = unsafe { Guard::start(&keep, || let_go(map, command)) };
        let guard =
            guard.context("failed to start what lets the command go on if we are killed")?;
        let held = Self {
            process,
            began: false,
            held,
            _links: links,
            _guard: guard,
        };
        held.set(HELD_PROCESS, pid)
            .context("failed to hold the command")?;
        Ok(held)
    }

    /// Whether it has called exec.
    pub(super) fn has_begun(&self) -> bool {
        self.began
    }

    /// Whether this is its number, and it is stopped.
    pub(super) fn has_stopped(&self, pid: u32) -> bool {
        let value = || self.held.lookup(&HELD_STOPPED.to_ne_bytes(), MapFlags::ANY);
        self.process.pid() == pid
            && value().is_ok_and(|value| value == Some(1u32.to_ne_bytes().into()))
    }

    /// Lets it go on to where it maps code again.
    pub(super) fn go_on(&mut self) -> Result<()> {
        self.began = true;
        self.set(HELD_STOPPED, 0)
            .context("failed to let the command go on")?;
        resume(self.process.as_fd());
        Ok(())
    }

    fn set(&self, key: u32, value: u32) -> libbpf_rs::Result<()> {
        self.held
            .update(&key.to_ne_bytes(), &value.to_ne_bytes(), MapFlags::ANY)
    }
}

/// Holds the command no longer, and resumes it if it is the kernel half that has stopped it: one that
/// has stopped itself is left alone. Makes system calls only.
fn let_go(held: BorrowedFd<'_>, command: BorrowedFd<'_>) {
    let map = held.as_raw_fd();
    let mut stopped = 0u32;
    // SAFETY: keys and values are of the sizes that the map has, and outlive the calls.
    unsafe {
        libbpf_sys::bpf_map_update_elem(
            map,
            from_ref(&HELD_PROCESS).cast(),
            from_ref(&0u32).cast(),
            libbpf_sys::BPF_ANY.into(),
        );
        wait_for_programs();
        libbpf_sys::bpf_map_lookup_elem(
            map,
            from_ref(&HELD_STOPPED).cast(),
            from_mut(&mut stopped).cast(),
        );
    }
    if stopped == 1 {
        resume(command);
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

/// Sends SIGCONT. One that is gone needs none.
fn resume(process: BorrowedFd<'_>) {
    let (no_info, flags) = (std::ptr::null::<libc::siginfo_t>(), 0);
    let signal = Signal::SIGCONT as i32;
    // SAFETY: takes a descriptor and integers; the null pointer stands for the usual information.
    unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            process.as_raw_fd(),
            signal,
            no_info,
            flags,
        )
    };
}
