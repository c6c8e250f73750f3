//! Eviction of cached translations (TLB) from all CPUs.
//!
//! A CPU marks a page as used when it looks the page up in the page tables. While the CPU has the translation cached,
//! it does not look the page up: of pages that were used all the time, up to 154 of 4,220 stayed without a mark. A
//! CPU caches translations by address space, of a few address spaces at a time. So other address spaces are made,
//! more than a CPU caches, and each in turn runs on every CPU.

use std::io;
use std::ptr;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::arch;
use crate::heap::realtime::Realtime;
use crate::host::cpus::Cpus;

/// Number of address spaces that run on every CPU: two more than are needed.
const CHILDREN: usize = arch::KEPT_ADDRESS_SPACES + 2;
/// Time that one address space may take to run on every CPU. Eight took 3.5 to 11.7 ms on two CPUs.
const PATIENCE: Duration = Duration::from_millis(500);
/// Time between two checks of whether a child is done.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Exit status of a child that could not run on this many CPUs, or more.
const MAX_EXIT_STATUS: usize = 255;

/// Makes all online CPUs drop their cached translations. Returns the number of CPUs for which this is not certain:
/// this process may not run there, or did not within half a second.
///
/// # Errors
/// If no process can be started.
pub(super) fn flush() -> Result<usize> {
    let cpus: Vec<usize> = Cpus::now()?.online().collect();
    let sets: Vec<_> = cpus.iter().map(|&cpu| only(cpu)).collect();
    let _first = Realtime::begin();
    (0..CHILDREN).try_fold(0, |most, _| Ok(most.max(visit_by_child(&sets)?)))
}

/// Returns the set of one CPU; None if the CPU's number does not fit into a set.
fn only(cpu: usize) -> Option<libc::cpu_set_t> {
    if cpu >= libc::CPU_SETSIZE as usize {
        return None;
    }
    // SAFETY: a set of zeros is empty, and has a place for this CPU.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        Some(set)
    }
}

/// Runs a child process, with an address space of its own, on every CPU. Returns the number of CPUs on which it did
/// not run.
fn visit_by_child(sets: &[Option<libc::cpu_set_t>]) -> Result<usize> {
    // SAFETY: the child makes system calls alone, which is allowed even if other threads are running.
    let child = unsafe { libc::fork() };
    if child < 0 {
        return Err(io::Error::last_os_error())
            .context("failed to start a process, to have CPUs forget page tables");
    }
    if child == 0 {
        let mut missed = 0;
        for set in sets {
            // SAFETY: the kernel reads the set.
            let is_there = set.as_ref().is_some_and(|set| unsafe {
                libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), set) == 0
            });
            missed += usize::from(!is_there);
        }
        // SAFETY: the child is a copy of this process, and has nothing to clean up.
        unsafe { libc::_exit(missed.min(MAX_EXIT_STATUS) as i32) };
    }
    let deadline = Instant::now() + PATIENCE;
    loop {
        let mut status = 0;
        // SAFETY: the kernel writes one int.
        let waited = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
        if waited == child && libc::WIFEXITED(status) {
            return Ok(libc::WEXITSTATUS(status).cast_unsigned() as usize);
        }
        let is_late = Instant::now() > deadline;
        if is_late && waited == 0 {
            // If no thread can be started, the child stays a zombie until this process ends.
            let _ = end(child);
        }
        if is_late || waited != 0 {
            return Ok(sets.len());
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Kills a child, and starts a thread that waits for its end: the child ends when a CPU runs it, which can take long.
fn end(child: libc::pid_t) -> io::Result<JoinHandle<()>> {
    // SAFETY: a child of ours that was not waited for.
    unsafe { libc::kill(child, libc::SIGKILL) };
    thread::Builder::new().spawn(move || {
        // SAFETY: the kernel writes no status.
        unsafe { libc::waitpid(child, ptr::null_mut(), 0) };
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn every_cpu_is_visited_that_may_be() {
        let online = Cpus::now().expect("a list").online().count();
        let sets: Vec<_> = (0..online).map(only).collect();
        assert_eq!(visit_by_child(&sets).expect("a process"), 0);
        // A CPU that does not exist, and one whose number does not fit into a set.
        let sets = [only(0), only(1023), only(1 << 20)];
        assert_eq!(visit_by_child(&sets).expect("a process"), 2);
    }

    #[test]
    fn a_child_that_is_ended_leaves_no_zombie() {
        let mut child = Command::new("sleep").arg("60").spawn().expect("a process");
        let waiting = end(child.id().cast_signed()).expect("a thread");
        waiting.join().expect("no panic");
        let missing = child.wait().expect_err("waited for already");
        assert_eq!(missing.raw_os_error(), Some(libc::ECHILD));
    }
}
