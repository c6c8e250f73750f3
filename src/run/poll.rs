//! One wait for everything that a tool reacts to: events, ticks, signals, the target's exit, and a reader that closes
//! our output.

use std::fs::File;
use std::io::{self, Stdout};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use crate::process::inherited;

/// Pause after each read of the ring buffer. The kernel wakes the reader only for an event that finds the buffer
/// empty, so a burst costs one wake-up per pause. The first event after a pause is seen at once.
const PAUSE_BETWEEN_LOOKS: Duration = Duration::from_millis(10);

const SIGUSR1: u32 = Signal::SIGUSR1 as u32;
const SIGHUP: u32 = Signal::SIGHUP as u32;

/// Reasons why a wait ended. Several can be true at once.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Wake {
    /// The ring buffer has events.
    pub events: bool,
    /// The log of mappings is filling up.
    pub mappings: bool,
    /// The interval has passed.
    pub tick: bool,
    /// A signal that ends the run arrived, such as SIGINT, or the reader of stdout closed it.
    pub stop: bool,
    /// SIGUSR1 arrived: a report is wanted now.
    pub report: bool,
    /// The last of the watched processes has exited.
    pub exited: bool,
    /// The deadline of [`Poller::wait`] has passed.
    pub deadline: bool,
    /// Descriptors of [`Poller::watch`] that are ready.
    pub(super) ready: Vec<RawFd>,
}

impl Wake {
    /// Whether this source, which was passed to [`Poller::watch`], is ready. It wakes again until its owner has read
    /// it.
    pub fn is_ready(&self, source: &impl AsFd) -> bool {
        self.ready.contains(&source.as_fd().as_raw_fd())
    }
}

/// Waits for everything that a tool reacts to, as [`Wake`] lists it.
pub struct Poller<'a> {
    ring: Option<BorrowedFd<'a>>,
    mappings: Option<BorrowedFd<'a>>,
    others: Vec<(BorrowedFd<'a>, PollFlags)>,
    processes: Vec<BorrowedFd<'a>>,
    signals: SignalFd,
    stopped: Arc<AtomicBool>,
    /// Flag that SIGHUP sets instead of ending the run.
    rotation: Option<Arc<AtomicBool>>,
    /// Whether the tool was started from a terminal.
    had_terminal: bool,
    ticks: Option<TimerFd>,
    stdout: Option<Stdout>,
    look_again: Instant,
}

impl<'a> Poller<'a> {
    /// Blocks SIGUSR1 and the signals that end a run. From now on only [`Poller::wait`] receives them.
    ///
    /// Call this before any thread is started, so that no other thread gets the signals.
    ///
    /// # Errors
    /// If the signals cannot be blocked.
    pub fn new() -> Result<Self> {
        let mut taken = inherited::stop_signals();
        taken.add(Signal::SIGUSR1);
        taken.thread_block().context("failed to block signals")?;
        let signals = SignalFd::with_flags(&taken, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
            .context("failed to open a signalfd")?;
        Ok(Self {
            ring: None,
            mappings: None,
            others: Vec::new(),
            processes: Vec::new(),
            signals,
            stopped: Arc::default(),
            rotation: None,
            had_terminal: has_terminal(),
            ticks: None,
            stdout: None,
            look_again: Instant::now(),
        })
    }

    /// Returns a flag that is set, and stays set, when a signal that ends the run arrives.
    pub fn stopped(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stopped)
    }

    /// Has SIGHUP set this flag instead of ending the run, unless the tool's terminal has been closed.
    pub fn rotate_at_hangup(&mut self, is_rotated: Arc<AtomicBool>) {
        self.rotation = Some(is_rotated);
    }

    /// Wakes with [`Wake::stop`] when the reader of stdout closes it.
    pub(crate) fn watch_stdout(&mut self) {
        self.stdout = Some(io::stdout());
    }

    /// Wakes for events in this ring buffer.
    pub fn watch_events(&mut self, ring: &'a impl AsFd) {
        self.ring = Some(ring.as_fd());
    }

    /// Wakes when the log of mappings, a symbolizer's descriptor, should be read.
    pub fn watch_mappings(&mut self, log: &'a impl AsFd) {
        self.mappings = Some(log.as_fd());
    }

    /// Wakes when this source can be read, which [`Wake::is_ready`] then says.
    pub fn watch(&mut self, source: &'a impl AsFd) {
        self.others.push((source.as_fd(), PollFlags::POLLIN));
    }

    /// Wakes when this source has an exceptional condition (POLLPRI), such as a
    /// [`Trigger`](crate::host::pressure::Trigger) of memory pressure.
    pub fn watch_exception(&mut self, source: &'a impl AsFd) {
        self.others.push((source.as_fd(), PollFlags::POLLPRI));
    }

    /// Wakes when this process, and all others that this was called with, have exited.
    pub fn watch_exit(&mut self, process: &'a impl AsFd) {
        self.processes.push(process.as_fd());
    }

    /// Wakes every `interval` from now on. A tick that was not waited for in time is not repeated.
    ///
    /// # Errors
    /// If there are no timers or descriptors left.
    pub fn tick_every(&mut self, interval: Duration) -> Result<()> {
        let timer = TimerFd::new(
            ClockId::CLOCK_MONOTONIC,
            TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK,
        )
        .context("failed to open a timerfd")?;
        timer
            .set(
                Expiration::Interval(TimeSpec::from_duration(interval)),
                TimerSetTimeFlags::empty(),
            )
            .context("failed to set the timer")?;
        self.ticks = Some(timer);
        Ok(())
    }

    /// Waits until something is to be done, or until `deadline`.
    ///
    /// # Errors
    /// If the kernel does not let us wait.
    pub fn wait(&mut self, deadline: Option<Instant>) -> Result<Wake> {
        loop {
            let wake = self.wait_once(deadline, true)?;
            if wake != Wake::default() {
                return Ok(wake);
            }
        }
    }

    /// Returns what is to be done now, and whether the deadline has passed: [`Poller::wait`] without waiting.
    ///
    /// # Errors
    /// If the kernel does not let us look.
    pub fn poll_now(&mut self, deadline: Option<Instant>) -> Result<Wake> {
        self.wait_once(deadline, false)
    }

    fn wait_once(&mut self, deadline: Option<Instant>, waits: bool) -> Result<Wake> {
        let now = Instant::now();
        let resting = self.ring.is_some() && now < self.look_again;
        let until = match deadline {
            Some(deadline) if !resting => Some(deadline),
            Some(deadline) => Some(deadline.min(self.look_again)),
            None => resting.then_some(self.look_again),
        };
        let timeout = if waits {
            timeout(until, now)
        } else {
            PollTimeout::ZERO
        };
        let ready = self.ready(resting, timeout)?;

        let mut wake = Wake {
            deadline: deadline.is_some_and(|deadline| deadline <= Instant::now()),
            ..Wake::default()
        };
        let mut exited = Vec::new();
        for source in ready {
            if let Source::Process(at) = source {
                exited.push(at);
            } else {
                self.note(source, &mut wake);
            }
        }
        for at in exited.into_iter().rev() {
            self.processes.remove(at);
            wake.exited = self.processes.is_empty();
        }
        Ok(wake)
    }

    /// Waits for the sources, and returns those that are ready. While the poller is `resting`, the ring buffer is not
    /// one of the sources.
    fn ready(&self, resting: bool, timeout: PollTimeout) -> Result<Vec<Source>> {
        let mut sources = vec![(Source::Signals, self.signals.as_fd(), PollFlags::POLLIN)];
        if let Some(stdout) = &self.stdout {
            // Only an error of stdout is waited for: a pipe without a reader has one.
            sources.push((Source::Stdout, stdout.as_fd(), PollFlags::empty()));
        }
        let optional = [
            (Source::Ring, self.ring.filter(|_| !resting)),
            (Source::Mappings, self.mappings),
            (Source::Ticks, self.ticks.as_ref().map(AsFd::as_fd)),
        ];
        for (source, fd) in optional {
            sources.extend(fd.map(|fd| (source, fd, PollFlags::POLLIN)));
        }
        let others = self.others.iter();
        sources.extend(others.map(|&(fd, flags)| (Source::Other(fd.as_raw_fd()), fd, flags)));
        let processes = self.processes.iter().enumerate();
        sources.extend(processes.map(|(at, &fd)| (Source::Process(at), fd, PollFlags::POLLIN)));
        let mut fds: Vec<PollFd> = sources
            .iter()
            .map(|&(_, fd, flags)| PollFd::new(fd, flags))
            .collect();
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error).context("failed to wait"),
        }
        let ready = fds.iter().zip(&sources);
        let ready = ready.filter(|(fd, _)| fd.any().unwrap_or(false));
        Ok(ready.map(|(_, &(source, ..))| source).collect())
    }

    /// Records in `wake` that a source other than a process is ready.
    fn note(&mut self, source: Source, wake: &mut Wake) {
        match source {
            Source::Signals => match self.signals.read_signal() {
                Ok(Some(signal)) if signal.ssi_signo == SIGUSR1 => wake.report = true,
                Ok(Some(signal)) => {
                    if let Some(is_rotated) = &self.rotation
                        && is_request(&signal, self.had_terminal)
                    {
                        is_rotated.store(true, Ordering::Relaxed);
                        return;
                    }
                    wake.stop = true;
                    self.stopped.store(true, Ordering::Relaxed);
                }
                _ => {}
            },
            Source::Stdout => wake.stop = true,
            Source::Mappings => wake.mappings = true,
            Source::Other(fd) => wake.ready.push(fd),
            Source::Ring => {
                wake.events = true;
                self.look_again = Instant::now() + PAUSE_BETWEEN_LOOKS;
            }
            Source::Ticks => {
                wake.tick = self
                    .ticks
                    .as_ref()
                    .is_some_and(|ticks| ticks.wait().is_ok());
            }
            Source::Process(_) => {}
        }
    }
}

/// Whether a signal is a SIGHUP that a program sent to have a file opened again. The kernel sends SIGHUP when a
/// terminal is closed, and shells then pass it on.
fn is_request(signal: &libc::signalfd_siginfo, had_terminal: bool) -> bool {
    signal.ssi_signo == SIGHUP
        && signal.ssi_code != libc::SI_KERNEL
        && (!had_terminal || has_terminal())
}

/// Whether this process has a controlling terminal.
fn has_terminal() -> bool {
    File::open("/dev/tty").is_ok()
}

/// Returns the time until `until`, rounded up to milliseconds: otherwise the last millisecond is spent in a busy
/// loop.
fn timeout(until: Option<Instant>, now: Instant) -> PollTimeout {
    let Some(until) = until else {
        return PollTimeout::NONE;
    };
    let left = until.saturating_duration_since(now) + Duration::from_micros(999);
    PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
}

/// Kind of a descriptor that is waited for.
#[derive(Clone, Copy)]
enum Source {
    Signals,
    Stdout,
    Ring,
    Mappings,
    Other(RawFd),
    Process(usize),
    Ticks,
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn a_hangup_ends_a_run_unless_it_is_a_request_to_rotate() {
        let mut poller = Poller::new().expect("a poller");
        poller.had_terminal = false;
        // To this thread only: the others do not block the signal.
        let hang_up = |poller: &mut Poller| {
            nix::sys::signal::raise(Signal::SIGHUP).expect("a signal");
            poller.poll_now(None).expect("a look").stop
        };
        assert!(hang_up(&mut poller), "the output is no file");
        let is_rotated = Arc::<AtomicBool>::default();
        poller.rotate_at_hangup(Arc::clone(&is_rotated));
        assert!(!hang_up(&mut poller) && is_rotated.load(Ordering::Relaxed));
        // A process whose terminal was closed has none.
        poller.had_terminal = true;
        assert_eq!(hang_up(&mut poller), !has_terminal());
    }

    #[test]
    fn ticks_deadlines_and_exits_are_told_apart() {
        // cat ends once its input does.
        let mut child = std::process::Command::new("cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .expect("cat");
        let process = crate::process::proc::Process::open(child.id()).expect("it runs");
        let mut poller = Poller::new().expect("a poller");
        poller.watch_exit(&process);

        let passed = Some(Instant::now());
        let wake = poller.wait(passed).expect("a wake");
        assert_eq!(
            wake,
            Wake {
                deadline: true,
                ..Wake::default()
            }
        );
        poller
            .tick_every(Duration::from_millis(50))
            .expect("a timer");
        let wake = poller.wait(None).expect("a wake");
        assert_eq!(
            wake,
            Wake {
                tick: true,
                ..Wake::default()
            }
        );
        drop(child.stdin.take());
        let start = Instant::now();
        while !poller.wait(None).expect("a wake").exited {
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "its exit is not seen"
            );
        }
        child.wait().expect("it has exited");
    }

    #[test]
    fn a_watched_source_is_ready_until_it_is_read() {
        let (mut quiet, mut other) = io::pipe().expect("a pipe");
        let (mut reader, mut writer) = io::pipe().expect("a pipe");
        let mut poller = Poller::new().expect("a poller");
        // The poller borrows them for as long as it exists, so copies are read and written.
        let (watched, unread) = (
            reader.try_clone().expect("a copy"),
            quiet.try_clone().expect("a copy"),
        );
        poller.watch(&unread);
        poller.watch(&watched);
        writer.write_all(b"x").expect("a byte");
        for _ in 0..2 {
            let wake = poller.wait(None).expect("a wake");
            assert!(wake.is_ready(&watched) && !wake.is_ready(&unread));
        }
        reader.read_exact(&mut [0]).expect("a byte");
        other.write_all(b"x").expect("a byte");
        let wake = poller.wait(None).expect("a wake");
        assert!(wake.is_ready(&unread) && !wake.is_ready(&watched));
        quiet.read_exact(&mut [0]).expect("a byte");
    }
}
