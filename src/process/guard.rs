//! A process of our own that outlives us, to undo what must not stay as it is when we are killed.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork, pipe2, read, setsid};

/// The guard process, until it is dropped. Dropping it waits until it has done its work.
#[derive(Debug)]
pub struct Guard {
    pid: Pid,
    /// The only open end of the pipe that the guard waits at.
    until: Option<OwnedFd>,
}

impl Guard {
    /// Starts a process that does `work` when this guard is dropped, or when we have ended in
    /// whatever way, SIGKILL included. It has nothing of ours open but `keep`, so that no pipe of ours
    /// stays open by it, and is in a session of its own, where no signal for a group of processes
    /// reaches it.
    ///
    /// # Errors
    /// If there are no descriptors or no processes left.
    ///
    /// # Safety
    /// `work` runs in a child that has this thread only, where another one can have left a lock taken
    /// for ever: it may make system calls, and must neither allocate nor take a lock.
    pub unsafe fn start(keep: &[BorrowedFd<'_>], work: impl FnOnce()) -> Result<Self> {
        let (wait, until) = pipe2(OFlag::O_CLOEXEC).context("failed to open a pipe")?;
        let mut kept: Vec<RawFd> = keep.iter().map(AsRawFd::as_raw_fd).collect();
        kept.push(wait.as_raw_fd());
        kept.sort_unstable();
        let others = gaps(&kept);
        // SAFETY: up to its end, the child makes system calls only; `work` by our caller's promise.
        match unsafe { fork() }.context("failed to fork")? {
            ForkResult::Parent { child } => Ok(Self {
                pid: child,
                until: Some(until),
            }),
            ForkResult::Child => {
                let _ = setsid();
                for &(first, last) in &others {
                    // SAFETY: closes descriptors of the child that it does not use again.
                    unsafe { libc::close_range(first, last, 0) };
                }
                while read(&wait, &mut [0]) == Err(Errno::EINTR) {}
                work();
                // SAFETY: ends the child at once, without running the parent's exit handlers.
                unsafe { libc::_exit(0) }
            }
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.until = None;
        let _ = waitpid(self.pid, None);
    }
}

/// What is between these descriptors, which are sorted, as first and last of each range.
fn gaps(kept: &[RawFd]) -> Vec<(u32, u32)> {
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
        // The guard does not have it open: this is its end.
        drop(closes);
        assert_eq!(read(&other, &mut [0]), Ok(0));
        assert_eq!(read(&told, &mut [0]), Err(Errno::EAGAIN));
        drop(guard);
        assert_eq!(read(&told, &mut [0]), Ok(1));
    }
}
