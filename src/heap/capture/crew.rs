//! Processes of ours that read a target's memory, and without which we can go on.
//!
//! A read can wait in the kernel for ever, and no signal ends the wait: the target's memory may be a file whose server
//! never answers (FUSE, NFS), and others may hold the lock of its address space. A thread of ours that waits there
//! could neither let the target go on nor end. So processes read that share our memory and our files (CLONE_VM,
//! CLONE_FILES), but are no threads of ours. A process that is late is killed, and is left behind if it does not end.
//! Then the memory that the kernel may still write to for that process is never freed.

use std::cell::UnsafeCell;
use std::io;
use std::mem;
use std::ptr;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use memmap2::{Advice, MmapMut, MmapOptions};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::arch;
use super::copy;
use crate::process::shielded;

/// Time without progress after which a target does not answer.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// Time that killed workers have to end. One that takes longer waits in the kernel.
const ENDING: Duration = Duration::from_millis(300);
/// Bytes of a worker's stack.
const STACK: usize = 64 << 10;
/// Bytes of a worker's buffer that stays in the caches.
pub(super) const NEAR: usize = 2 << 20;
/// Maximum bytes of address space of a worker's buffer for results, of which only what is used takes memory.
const FAR: usize = 1 << 30;
/// Share of a limited address space that a worker's buffer for results takes. There are at most 8 workers.
const FAR_SHARE: u64 = 16;
/// Bytes of the buffer for results that are put in place before they are used.
const FAR_READY: usize = 4 << 20;

/// Work that all workers of a crew share.
///
/// # Safety
/// The work is done by processes that have our memory but no thread-local storage of their own. So `work` must make
/// system calls by [`arch::system_call`] alone, and must neither allocate, nor lock, nor panic.
pub(in crate::heap) unsafe trait Job: Send + Sync {
    /// Does a share of the work. Returns soon after the [board](Board::is_over) says so.
    fn work(&self, own: &mut Own, board: &Board);

    /// Returns the amount of work, in the unit of the [progress](Board::advance).
    fn total(&self) -> u64;
}

/// Memory of one worker.
#[derive(Debug)]
pub(in crate::heap) struct Own {
    /// Number of the worker, from 0 on.
    pub(super) number: usize,
    /// Buffer of [`NEAR`] bytes.
    pub(super) near: MmapMut,
    far: MmapMut,
    /// Bytes of results.
    filled: usize,
}

impl Own {
    fn new(number: usize) -> Result<Self> {
        let (limit, _) = getrlimit(Resource::RLIMIT_AS)?;
        let length = (limit / FAR_SHARE).clamp(FAR_READY as u64, FAR as u64) as usize;
        let mut far = MmapOptions::new();
        let far = far.len(length).no_reserve_swap().map_anon()?;
        // Kernels before 5.14 have no such advice.
        let _ = far.advise_range(Advice::PopulateWrite, 0, FAR_READY);
        Ok(Self {
            number,
            near: copy::buffer(NEAR)?,
            far,
            filled: 0,
        })
    }

    /// Returns the results.
    pub(super) fn results(&self) -> &[u8] {
        &self.far[..self.filled.min(self.far.len())]
    }

    /// Returns the results as values.
    ///
    /// # Safety
    /// All bit patterns must be values of `T`.
    pub(super) unsafe fn results_as<T>(&self) -> &[T] {
        let count = self.results().len() / size_of::<T>();
        // SAFETY: the buffer is aligned to a page, and has this many values.
        unsafe { slice::from_raw_parts(self.far.as_ptr().cast(), count) }
    }

    /// Returns the address and the length of what is left of the buffer for results.
    pub(super) fn space(&mut self) -> (usize, usize) {
        let filled = self.filled.min(self.far.len());
        let space = self.far.len() - filled;
        (self.far.as_mut_ptr() as usize + filled, space)
    }

    /// Makes the next bytes of the buffer results.
    pub(super) fn add(&mut self, bytes: usize) {
        self.filled += bytes;
    }
}

/// What workers and their owner share.
#[derive(Debug, Default)]
pub(in crate::heap) struct Board {
    /// Number of the current job, from 1 on.
    turn: AtomicU32,
    /// Number of workers that have not finished the current job.
    working: AtomicU32,
    is_over: AtomicBool,
    progress: AtomicU64,
    job: UnsafeCell<Option<JobPointer>>,
}

#[derive(Debug, Clone, Copy)]
struct JobPointer(*const dyn Job);

// SAFETY: the owner writes `job` only while no worker works, and a job is Sync.
unsafe impl Sync for Board {}
// SAFETY: as above.
unsafe impl Send for Board {}

impl Board {
    /// Whether the time for the job is over.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Counts work that is done.
    pub(super) fn advance(&self, by: u64) {
        self.progress.fetch_add(by, Ordering::Relaxed);
    }
}

/// Limit on the time that a job takes.
#[derive(Debug, Clone, Copy)]
pub(in crate::heap) struct Until {
    /// Time at which the job is over.
    pub(in crate::heap) at: Option<Instant>,
    /// Time without progress after which the job is over.
    pub(in crate::heap) patience: Duration,
}

impl Until {
    /// No limit, as long as there is progress.
    pub(in crate::heap) const PROGRESS: Self = Self {
        at: None,
        patience: PATIENCE,
    };
}

/// Part of a job that was done when its time was over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::heap) struct Late {
    pub(super) done: u64,
    pub(super) total: u64,
    /// Whether there was no progress for the [patience](Until::patience).
    pub(super) is_stalled: bool,
}

impl Late {
    /// Nothing is known to be done.
    pub(super) const NOTHING: Self = Self::at(0, 0);

    /// So much is done, and there is progress.
    pub(super) const fn at(done: u64, total: u64) -> Self {
        Self {
            done,
            total,
            is_stalled: false,
        }
    }
}

/// What a worker is given.
struct Seat {
    board: Arc<Board>,
    parent: isize,
    own: UnsafeCell<Own>,
}

struct Worker {
    pid: Pid,
    seat: Box<Seat>,
    stack: MmapMut,
}

/// Workers, which are killed when the value is dropped.
pub(in crate::heap) struct Crew {
    board: Arc<Board>,
    workers: Vec<Worker>,
    /// Job that was not finished in time.
    unfinished: Option<Arc<dyn Job>>,
}

impl Crew {
    /// Starts as many workers as there are CPUs, and at most 8. Workers have the scheduling priority of this thread,
    /// and end with this thread.
    ///
    /// # Errors
    /// If there are too many processes, or if there is no memory.
    pub(in crate::heap) fn start() -> Result<Self> {
        let mut crew = Self {
            board: Arc::default(),
            workers: Vec::new(),
            unfinished: None,
        };
        for number in 0..copy::workers() {
            let board = crew.board.clone();
            crew.workers.push(Worker::start(number, board)?);
        }
        Ok(crew)
    }

    /// Has a job done.
    ///
    /// # Errors
    /// If the time is over, or if there is no progress for a while. After that, nothing but the
    /// [end](Self::end) can be done with the crew, and the job's memory may still change until then.
    pub(in crate::heap) fn run(&mut self, job: Arc<dyn Job>, until: Until) -> Result<(), Late> {
        let board = &*self.board;
        for worker in &self.workers {
            // SAFETY: no worker works.
            unsafe { (*worker.seat.own.get()).filled = 0 };
        }
        // SAFETY: as above.
        unsafe { *board.job.get() = Some(JobPointer(Arc::as_ptr(&job))) };
        board.progress.store(0, Ordering::Relaxed);
        let count = self.workers.len() as u32;
        board.working.store(count, Ordering::Relaxed);
        board.turn.fetch_add(1, Ordering::Release);
        futex(&board.turn, libc::FUTEX_WAKE, i32::MAX as usize, None);
        let (mut progress, mut since) = (0, Instant::now());
        loop {
            let working = board.working.load(Ordering::Acquire);
            if working == 0 {
                return Ok(());
            }
            let done = board.progress.load(Ordering::Relaxed);
            if done != progress {
                (progress, since) = (done, Instant::now());
            }
            let end = since + until.patience;
            let end = until.at.map_or(end, |at| at.min(end));
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                board.is_over.store(true, Ordering::Relaxed);
                let late = Late {
                    is_stalled: since.elapsed() >= until.patience,
                    ..Late::at(done, job.total())
                };
                self.unfinished = Some(job);
                return Err(late);
            }
            futex(
                &board.working,
                libc::FUTEX_WAIT,
                working as usize,
                Some(left),
            );
        }
    }

    /// Returns the memory of the workers, with the results of the last job. The job must have been finished.
    pub(super) fn results(&self) -> impl Iterator<Item = &Own> {
        // SAFETY: workers write to it only while they have a job.
        self.workers
            .iter()
            .map(|worker| unsafe { &*worker.seat.own.get() })
    }

    /// Ends all workers. Returns whether they have ended: a worker that has not waits in the kernel.
    pub(super) fn end(mut self) -> bool {
        self.finish()
    }

    fn finish(&mut self) -> bool {
        for worker in &self.workers {
            // The PID is still that of the child, which has not been waited for.
            let _ = kill(worker.pid, Signal::SIGKILL);
        }
        let deadline = Instant::now() + ENDING;
        let mut left = mem::take(&mut self.workers);
        loop {
            left.retain(|worker| !worker.has_ended());
            if left.is_empty() || Instant::now() > deadline {
                break;
            }
            thread::sleep(Duration::from_micros(100));
        }
        let all = left.is_empty();
        if !all {
            mem::forget((left, self.unfinished.take()));
        }
        all
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Worker {
    fn start(number: usize, board: Arc<Board>) -> Result<Self> {
        let mut stack = MmapMut::map_anon(STACK).context("no memory")?;
        let mut seat = Box::new(Seat {
            board,
            parent: std::process::id() as isize,
            own: UnsafeCell::new(Own::new(number).context("no memory")?),
        });
        let own = (&raw mut *seat).cast();
        // SAFETY: the stack and the seat live until the process has ended: see finish(). The process does what a job may
        // do.
        let pid = unsafe { shielded::start_sharing(&mut stack, 0, serve, own) }
            .context("failed to start a process that copies")?;
        Ok(Self { pid, seat, stack })
    }

    /// Whether the process has ended, which is waited for.
    fn has_ended(&self) -> bool {
        debug_assert_eq!(self.stack.len(), STACK);
        // SAFETY: the kernel writes nothing.
        let found = unsafe {
            libc::waitpid(
                self.pid.as_raw(),
                ptr::null_mut(),
                libc::__WALL | libc::WNOHANG,
            )
        };
        found != 0
    }
}

/// Does one job after the other, in a worker.
extern "C" fn serve(seat: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the owner keeps the seat until this process has ended.
    let seat = unsafe { &*seat.cast::<Seat>() };
    let board = &*seat.board;
    // SAFETY: takes numbers.
    let parent = unsafe {
        let signal = libc::SIGKILL as usize;
        let option = libc::PR_SET_PDEATHSIG as usize;
        arch::system_call(libc::SYS_prctl, [option, signal, 0, 0, 0, 0]);
        arch::system_call(libc::SYS_getppid, [0; 6])
    };
    if parent != seat.parent {
        return 0;
    }
    let mut seen = 0;
    loop {
        let turn = board.turn.load(Ordering::Acquire);
        if turn == seen {
            futex(&board.turn, libc::FUTEX_WAIT, seen as usize, None);
            continue;
        }
        seen = turn;
        // SAFETY: the job lives until all workers have finished it or have ended. The memory is this worker's.
        if let (Some(job), own) = unsafe { (*board.job.get(), &mut *seat.own.get()) } {
            // SAFETY: as above.
            unsafe { (*job.0).work(own, board) };
        }
        if board.working.fetch_sub(1, Ordering::AcqRel) == 1 {
            futex(&board.working, libc::FUTEX_WAKE, 1, None);
        }
    }
}

/// Waits for a change of a word, or wakes those that wait. Errors do no harm: the callers look at the word again.
///
/// The futex must not be private (FUTEX_PRIVATE_FLAG): that is for threads of one process. When a process starts its
/// first thread, Linux from 6.16 on gives it a table of its own private futexes. Up to 7.0, processes that share the
/// memory and wait already are not in this table, and would never be woken.
fn futex(word: &AtomicU32, operation: i32, value: usize, timeout: Option<Duration>) {
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().cast_signed(),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let timeout = timeout
        .as_ref()
        .map_or(0, |timeout| ptr::from_ref(timeout) as usize);
    let operation = operation as usize;
    let word = ptr::from_ref(word) as usize;
    // SAFETY: the kernel reads the word and the time, which outlive the call.
    unsafe { arch::system_call(libc::SYS_futex, [word, operation, value, timeout, 0, 0]) };
}

/// Reads files of `/proc/PID` into the buffer for results of the first worker, one span behind the other.
#[derive(Debug)]
pub(super) struct ReadSpans {
    pub(super) file: libc::c_int,
    /// Offset and length of each span.
    pub(super) spans: Vec<(u64, usize)>,
    /// Error number, or 0. A span that ends early is ESRCH, unless it is [`REST`](Self::REST).
    pub(super) error: AtomicU32,
}

impl ReadSpans {
    /// Length of a span that ends with the file.
    pub(super) const REST: usize = usize::MAX;

    pub(super) fn new(file: libc::c_int, spans: Vec<(u64, usize)>) -> Self {
        Self {
            file,
            spans,
            error: AtomicU32::new(0),
        }
    }

    fn fail(&self, error: i32) {
        self.error.store(error.unsigned_abs(), Ordering::Relaxed);
    }

    /// Returns the error of the job.
    pub(super) fn result(&self) -> io::Result<()> {
        result(&self.error)
    }
}

// SAFETY: makes system calls only.
unsafe impl Job for ReadSpans {
    fn work(&self, own: &mut Own, board: &Board) {
        if own.number != 0 {
            return;
        }
        for &(offset, length) in &self.spans {
            let mut done = 0;
            while done < length {
                let (address, space) = own.space();
                if board.is_over() {
                    return;
                }
                if space == 0 {
                    return self.fail(libc::ENOBUFS);
                }
                let at = offset as usize + done;
                let wanted = (length - done).min(space);
                let arguments = [self.file as usize, address, wanted, at, 0, 0];
                // SAFETY: the kernel writes to what is left of the buffer.
                let read = unsafe { arch::system_call(libc::SYS_pread64, arguments) };
                match usize::try_from(read) {
                    Ok(0) if length == Self::REST => break,
                    Ok(0) => return self.fail(libc::ESRCH),
                    Ok(read) => {
                        own.add(read);
                        done += read;
                        board.advance(read as u64);
                    }
                    Err(_) => return self.fail(read as i32),
                }
            }
        }
    }

    fn total(&self) -> u64 {
        let lengths = self.spans.iter().map(|&(_, length)| length);
        lengths
            .filter(|&length| length != Self::REST)
            .sum::<usize>() as u64
    }
}

/// Writes a text to a file, at once, in the first worker.
#[derive(Debug)]
pub(in crate::heap) struct WriteText {
    file: libc::c_int,
    text: &'static str,
    /// Error number, or 0.
    error: AtomicU32,
}

impl WriteText {
    pub(in crate::heap) fn new(file: libc::c_int, text: &'static str) -> Self {
        Self {
            file,
            text,
            error: AtomicU32::new(0),
        }
    }

    /// Returns the error of the job.
    pub(in crate::heap) fn result(&self) -> io::Result<()> {
        result(&self.error)
    }
}

// SAFETY: makes one system call.
unsafe impl Job for WriteText {
    fn work(&self, own: &mut Own, board: &Board) {
        if own.number != 0 {
            return;
        }
        let (text, length) = (self.text.as_ptr() as usize, self.text.len());
        let arguments = [self.file as usize, text, length, 0, 0, 0];
        // SAFETY: the kernel reads the text.
        let written = unsafe { arch::system_call(libc::SYS_write, arguments) };
        if written < 0 {
            let error = (written as i32).unsigned_abs();
            self.error.store(error, Ordering::Relaxed);
        }
        board.advance(1);
    }

    fn total(&self) -> u64 {
        1
    }
}

/// Returns the error with this number, unless that is 0.
fn result(error: &AtomicU32) -> io::Result<()> {
    match error.load(Ordering::Relaxed) {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error.cast_signed())),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use nix::sys::wait::{WaitStatus, waitpid};
    use nix::unistd::pipe;

    use super::*;

    #[test]
    fn workers_read_what_we_would_read() {
        let mut crew = Crew::start().expect("processes");
        for _ in 0..100 {
            let file = File::open("/proc/self/cmdline").expect("it");
            let job = ReadSpans::new(file.as_raw_fd(), vec![(0, ReadSpans::REST), (1, 2)]);
            let job = Arc::new(job);
            crew.run(job.clone(), Until::PROGRESS).expect("in time");
            job.result().expect("readable");
            let line = fs::read("/proc/self/cmdline").expect("it");
            let first = crew.results().next().expect("a worker");
            assert_eq!(first.results(), [&line[..], &line[1..3]].concat());
        }
        assert!(crew.end());
    }

    /// Waits in a read of a pipe, as a read of memory may wait.
    struct Waits(libc::c_int);

    // SAFETY: makes one system call.
    unsafe impl Job for Waits {
        fn work(&self, own: &mut Own, _: &Board) {
            let (address, _) = own.space();
            // SAFETY: the kernel writes one byte to the worker's memory.
            unsafe { arch::system_call(libc::SYS_read, [self.0 as usize, address, 1, 0, 0, 0]) };
        }

        fn total(&self) -> u64 {
            7
        }
    }

    #[test]
    fn one_process_wakes_another() {
        const TIMEOUT: Duration = Duration::from_secs(10);
        let file = tempfile::tempfile().expect("a file");
        file.set_len(4096).expect("space");
        // SAFETY: nothing else has the file.
        let mut memory = unsafe { MmapMut::map_mut(&file) }.expect("memory");
        // SAFETY: the word is aligned, and is accessed here only.
        let word = unsafe { AtomicU32::from_ptr(memory.as_mut_ptr().cast()) };
        // SAFETY: the child makes system calls only.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let begun = Instant::now();
            futex(word, libc::FUTEX_WAIT, 0, Some(TIMEOUT));
            // SAFETY: takes a number.
            unsafe { libc::_exit((begun.elapsed() >= TIMEOUT).into()) };
        }
        let stat = format!("/proc/{child}/stat");
        while !fs::read_to_string(&stat).expect("a child").contains(") S ") {
            thread::yield_now();
        }
        futex(word, libc::FUTEX_WAKE, 1, None);
        let ended = waitpid(Pid::from_raw(child), None).expect("a child");
        assert_eq!(ended, WaitStatus::Exited(Pid::from_raw(child), 0));
    }

    #[test]
    fn a_read_that_never_returns_is_left_when_its_time_is_over() {
        let (read, write) = pipe().expect("a pipe");
        let mut crew = Crew::start().expect("processes");
        let begun = Instant::now();
        let until = Until {
            at: Some(begun + Duration::from_millis(20)),
            ..Until::PROGRESS
        };
        let job = Arc::new(Waits(read.as_raw_fd()));
        let late = crew.run(job.clone(), until);
        assert_eq!(late, Err(Late::at(0, 7)));
        assert!(begun.elapsed() >= Duration::from_millis(20));
        // A signal ends this wait, so the job's memory is ours again.
        assert!(crew.end());
        assert_eq!(Arc::strong_count(&job), 1);
        File::from(write).write_all(b"x").expect("we read it, too");
    }
}
