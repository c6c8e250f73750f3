//! Threads of a process that are all stopped for a moment.
//!
//! Threads are stopped by PTRACE_SEIZE and PTRACE_INTERRUPT, which leave nothing behind: no signal is sent, and the
//! kernel releases the threads by itself if we are killed in between.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::mem;
use std::ptr;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::heap::image::{GENERAL_REGISTERS, Thread};
use crate::host::capabilities::{self, Capability};
use crate::print::text;
use crate::process::proc::{self, Stat};

/// Time that a thread may take to stop, while other threads stand still already. A thread that sleeps in the kernel
/// where no signal reaches it (state D: a disk, NFS, a vfork) can take for ever.
pub(super) const PATIENCE: Duration = Duration::from_millis(100);

/// Time between two checks of whether a thread has stopped.
const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Size of the buffer for the vector state, in bytes. AMX has 11 KiB.
const VECTOR_BYTES: usize = 16 << 10;

/// The threads of a process, which stand still until the value is dropped.
#[derive(Debug)]
pub(super) struct Stopped {
    pid: u32,
    threads: BTreeMap<u32, State>,
}

/// State of a thread that is being stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Seized, and asked to stop.
    Asked,
    /// Stopped. The signal was about to be delivered, and is delivered when the thread goes on. 0 means none.
    Stopped(i32),
    /// Ended, or about to end.
    Ended,
}

/// A thread that did not stop in time.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnstoppedThread {
    pub(super) pid: u32,
    pub(super) tid: u32,
    /// Whether the thread slept in the kernel where nothing interrupts it (state D).
    pub(super) sleeps: bool,
}

impl UnstoppedThread {
    fn of(pid: u32, tid: u32) -> Self {
        Self {
            pid,
            tid,
            sleeps: state(pid, tid) == Some('D'),
        }
    }

    /// Whether the thread slept where nothing interrupts it (state D) when it was late, and does so now.
    pub(super) fn sleeps_still(&self) -> bool {
        self.sleeps && state(self.pid, self.tid) == Some('D')
    }

    /// Returns the message about the thread after `tries` tries in `time`.
    pub(super) fn message(&self, tries: usize, time: Duration) -> String {
        let Self { pid, tid, sleeps } = self;
        let why = if *sleeps {
            "it sleeps in the kernel where nothing interrupts it (state D: a disk, NFS, or a vfork \
             whose child still runs)"
        } else {
            "it may lack CPU time"
        };
        format!(
            "thread {tid} of process {pid} did not stop within {} ms in {tries} tries over {:.1} s: {why}; all \
             threads go on, try again",
            PATIENCE.as_millis(),
            time.as_secs_f64()
        )
    }
}

impl Stopped {
    /// Stops all threads, including those that other threads start in the meantime; or returns a thread that did not
    /// stop in time.
    ///
    /// A late thread is released only when the thread that called this function ends: no ptrace(2) request reaches it
    /// until it stops.
    ///
    /// # Errors
    /// If a thread is traced already or may not be traced, or if the process has exited. All threads go on then.
    pub(super) fn stop(pid: u32) -> Result<Result<Self, UnstoppedThread>> {
        let mut all = Self {
            pid,
            threads: BTreeMap::new(),
        };
        let deadline = Instant::now() + PATIENCE;
        // A thread that is not stopped yet can start another one.
        loop {
            match all.seize_new()? {
                Err(late) => return Ok(Err(late)),
                Ok(false) => break,
                Ok(true) => {}
            }
            if let Some(tid) = all.wait(deadline) {
                return Ok(Err(UnstoppedThread::of(pid, tid)));
            }
        }
        if !all
            .threads
            .values()
            .any(|state| matches!(state, State::Stopped(_)))
        {
            bail!("process {pid} has exited");
        }
        Ok(Ok(all))
    }

    /// Wraps threads that this thread traces and that the kernel holds.
    pub(super) fn of(pid: u32, held: impl IntoIterator<Item = u32>) -> Self {
        let threads = held.into_iter().map(|tid| (tid, State::Stopped(0)));
        Self {
            pid,
            threads: threads.collect(),
        }
    }

    /// Seizes the threads that have not been seized. Returns whether there were any, or a thread that an earlier try
    /// of ours has not released yet.
    fn seize_new(&mut self) -> Result<Result<bool, UnstoppedThread>> {
        let mut any = false;
        for tid in tids(self.pid)? {
            if self.threads.contains_key(&tid) {
                continue;
            }
            let seized = request(libc::PTRACE_SEIZE, tid, 0)
                .and_then(|()| request(libc::PTRACE_INTERRUPT, tid, 0));
            let state = match seized {
                Ok(()) => State::Asked,
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => State::Ended,
                // A leader that has called pthread_exit() stays as a zombie.
                Err(_) if has_ended(self.pid, tid) => State::Ended,
                Err(_) if tracer(self.pid, tid) == Some(std::process::id()) => {
                    return Ok(Err(UnstoppedThread::of(self.pid, tid)));
                }
                Err(error) => bail!(why_not_seized(self.pid, tid, &error)),
            };
            any |= state == State::Asked;
            self.threads.insert(tid, state);
        }
        Ok(Ok(any))
    }

    /// Waits until all threads that were asked to stop have stopped. Returns a thread that has not.
    fn wait(&mut self, deadline: Instant) -> Option<u32> {
        for (&tid, state) in &mut self.threads {
            while *state == State::Asked {
                *state = poll_state(tid);
                if *state == State::Asked {
                    if Instant::now() > deadline {
                        return Some(tid);
                    }
                    std::thread::sleep(POLL_INTERVAL);
                }
            }
        }
        None
    }

    /// Returns the registers of all stopped threads.
    pub(super) fn registers(&self) -> Vec<Thread> {
        let stopped = self.threads.iter();
        let stopped = stopped.filter(|(_, state)| matches!(state, State::Stopped(_)));
        let threads = stopped.filter_map(|(&tid, _)| {
            let general = register_set(tid, libc::NT_PRSTATUS, 8 * GENERAL_REGISTERS.len())?;
            let vector = register_set(tid, NT_X86_XSTATE, VECTOR_BYTES).unwrap_or_default();
            Some(Thread::new(tid, Vec::new(), general, vector))
        });
        threads.collect()
    }

    /// Returns the number of stopped threads.
    pub(super) fn count(&self) -> usize {
        let states = self.threads.values();
        states
            .filter(|state| matches!(state, State::Stopped(_)))
            .count()
    }
}

impl Drop for Stopped {
    /// Lets all threads go on as they would have without us.
    fn drop(&mut self) {
        for (&tid, state) in &mut self.threads {
            // PTRACE_DETACH works only on a stopped thread. A thread that was asked to stop and has not is given some
            // more time. After that, the kernel releases it when this thread ends.
            let until = Instant::now() + POLL_INTERVAL * 10;
            while *state == State::Asked && Instant::now() < until {
                *state = poll_state(tid);
            }
            if let State::Stopped(signal) = *state {
                // The kernel refuses if the thread has ended.
                let _ = request(libc::PTRACE_DETACH, tid, signal as usize);
            }
        }
    }
}

/// Returns the state of a thread that was asked to stop.
fn poll_state(tid: u32) -> State {
    let mut status = 0;
    // SAFETY: the kernel writes one int.
    let found = unsafe { libc::waitpid(tid as i32, &raw mut status, libc::__WALL | libc::WNOHANG) };
    match found {
        0 => State::Asked,
        _ if found < 0 || !libc::WIFSTOPPED(status) => State::Ended,
        // PTRACE_EVENT_STOP is our interrupt, or a stop by SIGSTOP, which lasts after we have detached.
        _ if status >> 16 != 0 => State::Stopped(0),
        // Any other stop is a signal in delivery, which the thread must get.
        _ => State::Stopped(libc::WSTOPSIG(status)),
    }
}

/// Register set of everything that `user_regs_struct` lacks: x87, SSE, AVX and so on.
const NT_X86_XSTATE: i32 = 0x202;

/// Reads the words of a register set of a thread. Returns None if the kernel has no such set.
pub(super) fn register_set(tid: u32, set: i32, bytes: usize) -> Option<Vec<u64>> {
    let mut words = vec![0_u64; bytes / 8];
    let mut place = libc::iovec {
        iov_base: words.as_mut_ptr().cast(),
        iov_len: bytes,
    };
    // SAFETY: the kernel writes at most `iov_len` bytes to `iov_base`, and the number of bytes to `iov_len`.
    let done = unsafe {
        libc::ptrace(
            libc::PTRACE_GETREGSET,
            tid as libc::pid_t,
            set as usize,
            &raw mut place,
        )
    };
    if done != 0 {
        return None;
    }
    words.truncate(place.iov_len / 8);
    Some(words)
}

/// Makes a ptrace(2) request that takes no pointer.
pub(super) fn request(request: libc::c_uint, tid: u32, data: usize) -> io::Result<()> {
    let nothing: *mut libc::c_void = ptr::null_mut();
    // SAFETY: SEIZE, INTERRUPT, DETACH, CONT and LISTEN take numbers, and touch no memory of ours.
    let done = unsafe { libc::ptrace(request, tid as libc::pid_t, nothing, data) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns the IDs of a process's threads.
pub(super) fn tids(pid: u32) -> Result<Vec<u32>> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/task")) else {
        bail!("process {pid} has exited");
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    Ok(names
        .filter_map(|name| name.to_str()?.parse().ok())
        .collect())
}

/// Returns the letter that the kernel prints for a thread's state.
fn state(pid: u32, tid: u32) -> Option<char> {
    let stat = Stat::read(format!("/proc/{pid}/task/{tid}/stat")).ok()?;
    stat.field(Stat::STATE)
}

pub(super) fn has_ended(pid: u32, tid: u32) -> bool {
    matches!(state(pid, tid), None | Some('Z' | 'X'))
}

/// Returns the PID of the process that traces a thread.
pub(super) fn tracer(pid: u32, tid: u32) -> Option<u32> {
    let number =
        |path: String, name: &str| -> Option<u32> { proc::field(path, name)?.parse().ok() };
    let thread = number(format!("/proc/{pid}/task/{tid}/status"), "TracerPid:");
    let thread = thread.filter(|&tracer| tracer != 0)?;
    // TracerPid is the ID of the tracing thread, which in memleak is not the main thread.
    Some(number(format!("/proc/{thread}/status"), "Tgid:").unwrap_or(thread))
}

/// Returns the message that a process is traced already, and by which process.
pub(super) fn traced_by(pid: u32, tracer: u32) -> String {
    let name = fs::read(format!("/proc/{tracer}/comm")).unwrap_or_default();
    let name = text::escape_bytes(name.trim_ascii_end());
    format!(
        "process {pid} is traced already, by {name} (pid {tracer}), and a process has one tracer at a \
         time: end or detach that one first"
    )
}

pub(super) fn why_not_seized(pid: u32, tid: u32, error: &io::Error) -> String {
    if let Some(tracer) = tracer(pid, tid) {
        return traced_by(pid, tracer);
    }
    let remedy = capabilities::remedy(Capability::CAP_SYS_PTRACE);
    format!("failed to stop thread {tid} of process {pid} (PTRACE_SEIZE): {error}{remedy}")
}

// Each register is one word, and has a name in `GENERAL_REGISTERS`.
const _: () = assert!(mem::size_of::<libc::user_regs_struct>() == 8 * GENERAL_REGISTERS.len());
