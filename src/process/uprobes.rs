//! Registration and removal of uprobes without harm to any process.
//!
//! For both the kernel takes the lock of each process that maps the file, while no process of the machine can fork
//! (`mmap_lock`). A removal that is interrupted by SIGKILL leaves breakpoints in the processes ("failed to unregister,
//! leaking uprobe" in the kernel's log), so it is done by guard processes, which are in no process group of this tool. A
//! registration that is interrupted is undone at once, by the same process, so it is done by a child as well
//! (`shielded`).

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::thread;

use anyhow::Result;
use libbpf_rs::Link;
use nix::fcntl::OFlag;
use nix::unistd::{ForkResult, close, fork, pipe2, read, setsid};

use crate::bpf::attach;
use crate::process::guard::Guard;
use crate::process::mmap_lock;
use crate::process::shielded;

/// Maximum number of processes that remove uprobes at the same time. The kernel waits for a grace period for each link.
const REMOVERS: usize = 8;

/// Calls a function that registers uprobes, once each process has shown that its lock can be taken. A child process
/// calls it, which is not killed with this one. All uprobes of all tools are registered through this function.
///
/// # Errors
/// [`FatalError`](attach::FatalError) if a process holds its lock; else the errors of `register`.
pub fn register<T>(register: impl FnOnce() -> Result<T>) -> Result<T> {
    expect_free_locks()?;
    shielded::call(register)
}

/// Fails if a process holds its lock, so that no uprobe can be registered.
///
/// # Errors
/// [`FatalError`](attach::FatalError) with the process's PID, name and user.
pub fn expect_free_locks() -> Result<()> {
    Ok(mmap_lock::check_all()?)
}

/// Removes uprobes, given as their links or events, and waits until they are removed. If a process holds its lock, the
/// removal is left to a process that waits for the lock, and a message says so.
pub fn remove<T: AsFd>(held: Vec<T>) {
    if held.is_empty() {
        return;
    }
    let files: Vec<BorrowedFd<'_>> = held.iter().map(AsFd::as_fd).collect();
    let busy = busy_process();
    let share = files.len().div_ceil(REMOVERS).max(1);
    let guards: Vec<Guard> = files
        .chunks(share)
        // If there is no process left, the drop of `held` removes the uprobes.
        .filter_map(|files| {
            let work = || busy.iter().for_each(mmap_lock::Unanswered::wait);
            // SAFETY: the work makes system calls only.
            unsafe { Guard::start(files, work) }.ok()
        })
        .collect();
    drop(files);
    drop(held);
    if busy.is_some() {
        return guards.into_iter().for_each(Guard::detach);
    }
    thread::scope(|scope| {
        for guard in guards {
            scope.spawn(move || drop(guard));
        }
    });
}

/// Removes perf's uprobes. The kernel removes such events one after the other, 0.1 s each. A child process waits for
/// that, and before each event until the locks of all processes can be taken. It ends with the last event. When this
/// function returns, the events are disabled.
pub fn remove_in_background(links: Vec<Link>) {
    // Says so if a process holds its lock.
    let _ = busy_process();
    let Ok(held) = hold_links() else {
        return attach::detach(links);
    };
    // Dropping the links disables the events, but closes none: the child has them open, too.
    drop(links);
    drop(held);
}

/// Returns a process that holds its lock, and prints that the uprobes stay for the time being.
fn busy_process() -> Option<mmap_lock::Unanswered> {
    let mmap_lock::CheckError::Unanswered(busy) = mmap_lock::check_all().err()? else {
        return None;
    };
    crate::message!(
        "{busy}; a process in the background removes the probes once it has let go or ended"
    );
    Some(busy)
}

/// Files that a link with a perf event consists of, as the symlinks in `/proc/PID/fd` name them.
const HELD: [&str; 2] = ["anon_inode:[perf_event]", "anon_inode:bpf_link"];

/// Forks a process that keeps our perf events and links open, and nothing else, until the returned descriptor is
/// dropped. Then it closes each when no process holds its lock.
fn hold_links() -> Result<OwnedFd> {
    let (until, held) = pipe2(OFlag::O_CLOEXEC)?;
    let (has_closed, closes) = pipe2(OFlag::O_CLOEXEC)?;
    let (mut held_files, mut others) = (Vec::new(), Vec::new());
    for entry in fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        let file: RawFd = entry.file_name().to_string_lossy().parse()?;
        let what = fs::read_link(entry.path())?;
        if HELD.iter().any(|held| what.as_os_str() == *held) {
            held_files.push(file);
        } else if ![until.as_raw_fd(), closes.as_raw_fd()].contains(&file) {
            others.push(file);
        }
    }
    // SAFETY: the child has no thread but this one, so another thread can have left a lock taken for ever. The child
    // takes no lock: all it does is system calls.
    match unsafe { fork() }? {
        ForkResult::Parent { .. } => {
            // The child must not be the last to close any other file, as that can take long: wait until it has closed
            // them.
            drop(closes);
            read(&has_closed, &mut [0])?;
            Ok(held)
        }
        ForkResult::Child => {
            for file in &others {
                let _ = close(*file);
            }
            drop(closes);
            let _ = setsid();
            let _ = read(&until, &mut [0]);
            for file in &held_files {
                mmap_lock::wait_for_all();
                let _ = close(*file);
            }
            // SAFETY: _exit() ends this process, and runs no code of this process.
            unsafe { libc::_exit(0) }
        }
    }
}
