//! Having all CPUs forget what they know of page tables.
//!
//! A CPU marks a page as used when it looks the page up in the tables. While it remembers where the page is, it does not look:
//! of pages that were used all the time, up to 154 of 4,220 stayed without a mark. What a CPU remembers is by address
//! space, of a few at a time, so as many others are made, one after the other, and each runs on every CPU.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::arch;
use crate::heap::realtime::Realtime;
use crate::host::cpus::Cpus;

/// Address spaces that run on every CPU: two more than are needed.
const CHILDREN: usize = arch::KEPT_ADDRESS_SPACES + 2;
/// How long one may take to run on every CPU; eight took 3.5 to 11.7 ms on two CPUs.
const PATIENCE: Duration = Duration::from_millis(500);
/// The pause between two looks at whether one is done.
const LOOK: Duration = Duration::from_micros(50);
/// What a child returns if there are as many CPUs, or more, that it could not run on.
const MOST_TOLD: usize = 255;

/// Has all CPUs that are online forget translations, and returns of how many that is not certain: this process may not
/// run there, or did not within half a second.
///
/// # Errors
/// If no process can be started.
pub(super) fn forget() -> Result<usize> {
    let cpus: Vec<usize> = Cpus::now()?.online().collect();
    let sets: Vec<_> = cpus.iter().map(|&cpu| only(cpu)).collect();
    let _first = Realtime::begin();
    (0..CHILDREN).try_fold(0, |most, _| Ok(most.max(visit_by_child(&sets)?)))
}

/// The set of one CPU; None if it has no place in a set.
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

/// Has a process of its own address space run on every CPU, and returns how many it did not.
fn visit_by_child(sets: &[Option<libc::cpu_set_t>]) -> Result<usize> {
    // SAFETY: the child makes system calls alone, which is what it may do though other threads were running.
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
        // SAFETY: nothing of this process is to be ended in order: it is a copy.
        unsafe { libc::_exit(missed.min(MOST_TOLD) as i32) };
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
            // SAFETY: a child of ours that nobody has waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        if is_late || waited != 0 {
            return Ok(sets.len());
        }
        thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cpu_is_visited_that_may_be() {
        let online = Cpus::now().expect("a list").online().count();
        let sets: Vec<_> = (0..online).map(only).collect();
        assert_eq!(visit_by_child(&sets).expect("a process"), 0);
        // One that there is not, and one that has no place in a set.
        let sets = [only(0), only(1023), only(1 << 20)];
        assert_eq!(visit_by_child(&sets).expect("a process"), 2);
    }
}
