//! Guard process that outlives the tool, to undo temporary changes if the tool is killed.

use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork, pipe2, read, setsid};

/// Handle of the guard process. Dropping the handle starts the guard's work and waits until it is done.
#[derive(Debug)]
pub struct Guard {
    pid: Pid,
    /// The only open write end of the pipe on which the guard waits.
    release: Option<OwnedFd>,
}

impl Guard {
    /// Starts a process that does `work` when this guard is dropped, or when the tool has ended in whatever way,
    /// including SIGKILL. The guard process keeps only `keep` of our descriptors open, so that it does not hold our
    /// pipes open. It has a session of its own, so that it gets no signal that is sent to our process group.
    ///
    /// # Errors
    /// If there are no descriptors or no processes left.
    ///
    /// # Safety
    /// `work` runs in a forked child that has only this thread. Another thread may have held a lock, which then stays
    /// locked for ever. So `work` may make system calls, and must neither allocate nor take a lock.
    pub unsafe fn start(keep: &[BorrowedFd<'_>], work: impl FnOnce()) -> Result<Self> {
        let (wait, until) = pipe2(OFlag::O_CLOEXEC).context("failed to open a pipe")?;
        let mut kept: Vec<RawFd> = keep.iter().map(AsRawFd::as_raw_fd).collect();
        kept.push(wait.as_raw_fd());
        kept.sort_unstable();
        let others = gaps(&kept);
        // SAFETY: until it exits, the child makes system calls only; our caller promises this for `work`.
        match unsafe { fork() }.context("failed to fork")? {
            ForkResult::Parent { child } => Ok(Self {
                pid: child,
                release: Some(until),
            }),
            ForkResult::Child => {
                let _ = setsid();
                close_all(&others);
                while read(&wait, &mut [0]) == Err(Errno::EINTR) {}
                work();
                // SAFETY: ends the child at once, without running the parent's exit handlers.
                unsafe { libc::_exit(0) }
            }
        }
    }
}

impl Guard {
    /// Starts the guard's work, and does not wait for it.
    pub(crate) fn detach(mut self) {
        self.release = None;
        mem::forget(self);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.release = None;
        let _ = waitpid(self.pid, None);
    }
}

/// Closes these ranges of descriptors, in a child that does not use them again.
pub(super) fn close_all(ranges: &[(u32, u32)]) {
    for &(first, last) in ranges {
        // SAFETY: takes integers.
        unsafe { libc::close_range(first, last, 0) };
    }
}

/// Returns the ranges of descriptors between these sorted ones, each with its first and last descriptor.
pub(super) fn gaps(kept: &[RawFd]) -> Vec<(u32, u32)> {
    let kept = kept.iter().map(|fd| fd.cast_unsigned());
    let starts = [0].into_iter().chain(kept.clone().map(|fd| fd + 1));
    let ends = kept.chain([u32::MAX]);
    starts
        .zip(ends)
        .filter(|(start, end)| start < end)
        .map(|(start, end)| (start, if end == u32::MAX { end } else { end - 1 }))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use nix::unistd::write;

    use super::*;

    #[test]
    fn what_is_between_descriptors_is_closed() {
        assert_eq!(gaps(&[0, 1, 7]), [(2, 6), (8, u32::MAX)]);
        assert_eq!(gaps(&[3]), [(0, 2), (4, u32::MAX)]);
    }

    #[test]
    fn the_work_is_done_when_the_guard_is_dropped_and_not_before() {
        let (told, tell) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).expect("a pipe");
        let (other, closes) = pipe2(OFlag::O_CLOEXEC).expect("a pipe");
        let work = || {
            let _ = write(&tell, b"x");
        };
        // SAFETY: the work is a system call.
        let guard = unsafe { Guard::start(&[tell.as_fd()], work) }.expect("a guard");
        // The guard has closed its copy of this write end: this was the last one.
        drop(closes);
        assert_eq!(read(&other, &mut [0]), Ok(0));
        assert_eq!(read(&told, &mut [0]), Err(Errno::EAGAIN));
        drop(guard);
        assert_eq!(read(&told, &mut [0]), Ok(1));
    }
}
