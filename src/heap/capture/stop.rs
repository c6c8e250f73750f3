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

use super::bound::{Overrun, Pause, Step};
use super::crew::Late;
use crate::heap::arch::{self, STRUCT_WORDS, VECTOR_SET};
use crate::heap::image::Thread;
use crate::host::capabilities::{self, Capability};
use crate::print::text;
use crate::process::proc::{self, Stat};

/// Time in which some thread has to stop, while other threads are stopped already. A thread that sleeps in the kernel
/// where no signal reaches it (state D: a disk, NFS, a vfork) can take for ever.
const PATIENCE: Duration = Duration::from_millis(100);

/// Time between two checks of whether a thread has stopped.
const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Time for which the release of the threads waits for threads that have not stopped.
const LAST_WAIT: Duration = Duration::from_micros(200);

/// Time between two looks at all threads, and not at the first only that has not stopped.
const LOOK_AT_ALL: Duration = Duration::from_millis(5);

/// Size of the buffer for a register set, in bytes. AMX has 11 KiB.
const SET_BYTES: usize = 16 << 10;

/// Number of threads after which the clock is looked at.
const AT_ONCE: usize = 64;

/// The threads of a process, which are paused until the value is dropped.
#[derive(Debug)]
pub(super) struct Stopped {
    pid: u32,
    threads: BTreeMap<u32, State>,
    /// Clock of the pause.
    pub(super) pause: Pause,
}

/// Outcome of a stop that has not stopped all threads.
#[derive(Debug)]
pub(super) enum Unstopped {
    /// A thread did not stop, for a time in which no other did.
    Thread(UnstoppedThread),
    /// The pause has reached its bound.
    Over(Overrun),
}

/// State of a thread that is being stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Seized, and not stopped but by a signal that is delivered.
    Seized,
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
    /// Time that it had.
    pub(super) within: Duration,
}

impl UnstoppedThread {
    fn of(pid: u32, tid: u32, within: Duration) -> Self {
        Self {
            pid,
            tid,
            sleeps: state(pid, tid) == Some('D'),
            within,
        }
    }

    /// Whether the thread slept where nothing interrupts it (state D) when it was late, and does so now.
    pub(super) fn sleeps_still(&self) -> bool {
        self.sleeps && state(self.pid, self.tid) == Some('D')
    }

    /// Returns the message about the thread after `tries` tries in `time`.
    pub(super) fn message(&self, tries: usize, time: Duration) -> String {
        let Self {
            pid,
            tid,
            sleeps,
            within,
        } = self;
        let why = if *sleeps {
            "it sleeps in the kernel where nothing interrupts it (state D: a disk, NFS, or a vfork \
             whose child still runs)"
        } else {
            "it may lack CPU time"
        };
        format!(
            "thread {tid} of process {pid} did not stop within {} ms in {tries} tries over {:.1} s: {why}; all \
             threads go on, try again",
            super::bound::milliseconds(*within),
            time.as_secs_f64()
        )
    }
}

impl Stopped {
    /// Stops all threads, including those that other threads start in the meantime, unless the pause reaches its bound.
    /// `release` is the time that the release is known to take.
    ///
    /// All threads are seized before the first one is asked to stop: a process that calls exec(2) can have the seizure
    /// wait. Which threads there are is read before, and when all have stopped, their number is compared; to read
    /// the list takes longer than to stop the threads in it.
    ///
    /// A thread that has not stopped is released only when the thread that called this function ends: no ptrace(2)
    /// request reaches it until it stops.
    ///
    /// # Errors
    /// If a thread is traced already or may not be traced, or if the process has exited. All threads go on then.
    pub(super) fn stop(
        pid: u32,
        bound: Duration,
        release: Duration,
    ) -> Result<Result<Self, Unstopped>> {
        let mut listed = tids(pid)?;
        let patience = PATIENCE.min(bound - bound / 4);
        let mut all = Self {
            pid,
            threads: BTreeMap::new(),
            pause: Pause::begin(bound, release),
        };
        loop {
            match all.seize_new(&listed)? {
                Err(late) => return Ok(Err(Unstopped::Thread(late))),
                Ok(false) => break,
                Ok(true) => all.interrupt(),
            }
            // To release a thread takes about as long as to seize it and to ask it to stop.
            let asked = all.pause.begin.elapsed();
            all.pause.reserve(asked.saturating_sub(release));
            match all.wait(patience, listed.len()) {
                None => {}
                Some(Unstopped::Over(overrun)) => {
                    let release = all.release();
                    return Ok(Err(Unstopped::Over(Overrun { release, ..overrun })));
                }
                Some(unstopped) => return Ok(Err(unstopped)),
            }
            // A thread that is not stopped yet can start another one.
            if all.is_complete() {
                break;
            }
            listed = tids(pid)?;
        }
        if all.count() == 0 {
            bail!("process {pid} has exited");
        }
        Ok(Ok(all))
    }

    /// Wraps threads that this thread traces and that the kernel holds, with no bound.
    pub(super) fn of(pid: u32, held: impl IntoIterator<Item = u32>) -> Self {
        let threads = held.into_iter().map(|tid| (tid, State::Stopped(0)));
        Self {
            pid,
            threads: threads.collect(),
            pause: Pause {
                begin: Instant::now(),
                end: None,
            },
        }
    }

    /// Seizes the threads that have not been seized, unless the pause reaches its bound. Returns whether there were any,
    /// or a thread that an earlier try of ours has not released yet.
    fn seize_new(&mut self, listed: &[u32]) -> Result<Result<bool, UnstoppedThread>> {
        let mut any = false;
        for (number, &tid) in listed.iter().enumerate() {
            if self.threads.contains_key(&tid) {
                continue;
            }
            if number % AT_ONCE == 0 && self.pause.is_over() {
                // The wait that follows ends at once.
                return Ok(Ok(true));
            }
            let state = match request(libc::PTRACE_SEIZE, tid, 0) {
                Ok(()) => State::Seized,
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => State::Ended,
                // A leader that has called pthread_exit() stays as a zombie.
                Err(_) if has_ended(self.pid, tid) => State::Ended,
                Err(_) if tracer(self.pid, tid) == Some(std::process::id()) => {
                    return Ok(Err(UnstoppedThread::of(self.pid, tid, PATIENCE)));
                }
                Err(error) => bail!(why_not_seized(self.pid, tid, &error)),
            };
            any |= state == State::Seized;
            self.threads.insert(tid, state);
        }
        Ok(Ok(any))
    }

    /// Asks all seized threads to stop, unless the pause reaches its bound.
    fn interrupt(&mut self) {
        let seized = self.threads.iter_mut();
        let seized = seized.filter(|(_, state)| **state == State::Seized);
        for (number, (&tid, state)) in seized.enumerate() {
            if number % AT_ONCE == 0 && self.pause.is_over() {
                break;
            }
            *state = match request(libc::PTRACE_INTERRUPT, tid, 0) {
                Ok(()) => State::Asked,
                Err(_) => State::Ended,
            };
        }
    }

    /// Waits until all threads that were asked to stop have stopped. `total` is the number of threads, for messages.
    fn wait(&mut self, patience: Duration, total: usize) -> Option<Unstopped> {
        let (mut since, mut looked) = (Instant::now(), Instant::now());
        let (mut from, mut all) = (0, false);
        loop {
            let (stopped, first) = self.poll(from, all);
            let now = Instant::now();
            if stopped > 0 {
                since = now;
            }
            if self.pause.is_over() {
                let (step, done) = match self.count() {
                    0 => (Step::Seize, self.threads.len()),
                    stopped => (Step::Stop, stopped),
                };
                let late = Late::at(done as u64, total as u64);
                let begin = self.pause.begin;
                return Some(Unstopped::Over(self.pause.overrun(step, begin, late)));
            }
            from = first?;
            if now - since > patience {
                let late = UnstoppedThread::of(self.pid, from, patience);
                return Some(Unstopped::Thread(late));
            }
            all = now - looked > LOOK_AT_ALL;
            if all {
                looked = now;
            }
            if stopped == 0 {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
    }

    /// Updates the states of the threads that were asked to stop, from this TID on: of all of them, or up to the first
    /// that has not stopped. Returns how many have stopped or ended, and the first that has not.
    fn poll(&mut self, from: u32, all: bool) -> (usize, Option<u32>) {
        let (mut stopped, mut first) = (0, None);
        let threads = self.threads.range_mut(from..);
        for (&tid, state) in threads.filter(|(_, state)| **state == State::Asked) {
            *state = poll_state(tid);
            if *state != State::Asked {
                stopped += 1;
                continue;
            }
            first = first.or(Some(tid));
            if !all {
                break;
            }
        }
        (stopped, first)
    }

    /// Whether the process has no other threads than the stopped ones, by the number of its threads. Threads that have
    /// ended may still be counted.
    fn is_complete(&self) -> bool {
        let count = proc::field(format!("/proc/{}/status", self.pid), "Threads:");
        count.and_then(|count| count.parse().ok()) == Some(self.count())
    }

    /// Returns the registers of all stopped threads.
    ///
    /// # Errors
    /// If the pause reaches its bound.
    pub(super) fn registers(&self) -> Result<Vec<Thread>, Late> {
        let stopped = self.threads.iter();
        let stopped = stopped.filter(|(_, state)| matches!(state, State::Stopped(_)));
        let mut threads = Vec::with_capacity(self.threads.len());
        for (number, (&tid, _)) in stopped.enumerate() {
            if number % AT_ONCE == 0 && self.pause.is_over() {
                return Err(Late::at(number as u64, self.count() as u64));
            }
            let Some(general) = general_registers(tid) else {
                continue;
            };
            let vector = register_set(tid, VECTOR_SET).unwrap_or_default();
            threads.push(Thread::new(tid, Vec::new(), general, vector));
        }
        Ok(threads)
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
        self.let_go();
    }
}

impl Stopped {
    /// Lets all threads go on as they would have without us. Returns how long that took.
    pub(super) fn release(mut self) -> Duration {
        let begin = Instant::now();
        self.let_go();
        begin.elapsed()
    }

    fn let_go(&mut self) {
        // PTRACE_DETACH works only on a stopped thread. Threads that were asked to stop and have not are given some
        // more time, once all others go on. After that, the kernel releases them when this thread ends.
        let until = Instant::now() + LAST_WAIT;
        loop {
            for (&tid, state) in &mut self.threads {
                if let State::Stopped(signal) = *state {
                    // The kernel refuses if the thread has ended.
                    let _ = request(libc::PTRACE_DETACH, tid, signal as usize);
                    *state = State::Ended;
                }
            }
            let (stopped, first) = self.poll(0, true);
            if stopped == 0 && (first.is_none() || Instant::now() > until) {
                return;
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

/// Reads the general registers of a stopped thread, in the order of
/// [`GENERAL_REGISTERS`](crate::heap::image::GENERAL_REGISTERS).
pub(super) fn general_registers(tid: u32) -> Option<Vec<u64>> {
    arch::general_registers(|set| register_set(tid, set))
}

/// Reads the words of a register set of a thread, the last of which may lack bytes. Returns None if the kernel has no
/// such set.
fn register_set(tid: u32, set: i32) -> Option<Vec<u64>> {
    let mut words = [0_u64; SET_BYTES / 8];
    let mut place = libc::iovec {
        iov_base: words.as_mut_ptr().cast(),
        iov_len: SET_BYTES,
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
    (done == 0).then(|| words[..place.iov_len.div_ceil(8)].to_vec())
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
const _: () = assert!(mem::size_of::<libc::user_regs_struct>() == 8 * STRUCT_WORDS);
