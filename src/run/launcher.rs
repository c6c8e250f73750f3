//! Process that starts tools for an agent which has given up its privileges.
//!
//! The launcher is forked before the agent drops its privileges, keeps what tracing takes, and accepts requests over a socket.
//! A request has eight bytes: what to start, in which slot, for which process. It has no program, no argument and no path:
//! the launcher makes the command itself. So an agent that was taken over can have a fixed tool look at a process, as many
//! at a time as there are slots, and nothing else. The launcher reads no other data than these bytes.
//!
//! Each slot has a pipe, which is the standard output of its child, and which the agent reads.

use std::fs;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{self, Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, setpgid};

use crate::host::capabilities::Capability;
use crate::run::privileges;

/// Time between two looks at the children.
const LOOK: u16 = 100;
/// Time that a child has to end after SIGINT.
const TIME_TO_END: Duration = Duration::from_secs(10);
/// Maximum length of a line of a child's output; the rest is dropped.
const MAX_LINE: usize = 1 << 20;
/// By how much a child is rather killed than the agent when memory runs out.
const MORE_OOM_SCORE: i32 = 100;
/// Length of a message.
const MESSAGE: usize = 8;
/// Request to end the child of a slot. All larger numbers start one.
const STOP: u8 = 0;
/// Answers.
const STARTED: u8 = 0;
const ENDED: u8 = 1;
/// Exit status of a child that could not be started.
const NOT_STARTED: u32 = 127;

/// Request to start a child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Number of the slot, from 0.
    pub slot: u8,
    /// What to start, in numbers that the caller has chosen, below 255.
    pub what: u8,
    /// Process that the child is to look at.
    pub pid: u32,
}

/// Change of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A child runs.
    Started {
        /// Number of the slot.
        slot: u8,
        /// PID of the child.
        child: u32,
    },
    /// The child has ended, or was not started. All that it has printed can be read.
    Ended {
        /// Number of the slot.
        slot: u8,
        /// Whether the child ended with status 0.
        success: bool,
    },
}

/// Connection to the launcher. The launcher ends, and its children with it, when the value is dropped.
#[derive(Debug)]
pub struct Launcher {
    stream: UnixStream,
    pid: Pid,
    outputs: Vec<Output>,
    has_ended: bool,
}

/// Output of a slot.
#[derive(Debug)]
struct Output {
    pipe: PipeReader,
    /// Begin of a line whose end was not read yet.
    begun: Vec<u8>,
}

impl Launcher {
    /// Forks the launcher, with this number of slots. `command` makes the command of a request; None refuses it. Call this
    /// before any thread is started, and before files are opened.
    ///
    /// # Errors
    /// If there are too many processes or files.
    pub fn start(slots: u8, command: impl Fn(Request) -> Option<Command>) -> Result<Self> {
        const FAILED: &str = "failed to start the process that starts tools";
        let (stream, theirs) = UnixStream::pair().context(FAILED)?;
        let pipes: Vec<_> = (0..slots)
            .map(|_| io::pipe())
            .collect::<io::Result<_>>()
            .context(FAILED)?;
        let (readers, writers): (Vec<PipeReader>, Vec<PipeWriter>) = pipes.into_iter().unzip();
        // SAFETY: this process has one thread, so that the child may do everything.
        let pid = match unsafe { fork() }.context(FAILED)? {
            ForkResult::Child => {
                drop((stream, readers));
                let served = begin().and_then(|()| serve(theirs, &writers, command));
                if let Err(error) = &served {
                    crate::message!("{error:#}");
                }
                process::exit(i32::from(served.is_err()));
            }
            ForkResult::Parent { child } => child,
        };
        Self::new(stream, pid, readers)
    }

    fn new(stream: UnixStream, pid: Pid, readers: Vec<PipeReader>) -> Result<Self> {
        stream.set_nonblocking(true)?;
        let outputs = readers.into_iter().map(|pipe| {
            let flags = OFlag::from_bits_retain(fcntl(&pipe, FcntlArg::F_GETFL)?);
            fcntl(&pipe, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
            Ok(Output {
                pipe,
                begun: Vec::new(),
            })
        });
        Ok(Self {
            stream,
            pid,
            outputs: outputs.collect::<nix::Result<_>>()?,
            has_ended: false,
        })
    }

    /// Returns the PID of the launcher.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw().unsigned_abs()
    }

    /// Whether the launcher has ended, so that no child runs, and none can be started any more.
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Has a child started. The slot must be free.
    pub fn request(&mut self, request: Request) {
        self.send(request.what.saturating_add(1), request.slot, request.pid);
    }

    /// Has the child of a slot ended, by SIGINT, and by SIGKILL if it does not end within ten seconds.
    pub fn stop(&mut self, slot: u8) {
        self.send(STOP, slot, 0);
    }

    fn send(&mut self, what: u8, slot: u8, pid: u32) {
        // A launcher that does not read eight bytes has ended, or is stuck.
        if self.stream.write_all(&message(what, slot, pid)).is_err() {
            self.has_ended = true;
        }
    }

    /// Returns what has happened since the last call. Does not wait.
    pub fn events(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        let mut answer = [0; MESSAGE];
        // Answers are written whole.
        while !self.has_ended {
            match self.stream.read(&mut answer) {
                Ok(MESSAGE) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Ok(_) | Err(_) => {
                    self.has_ended = true;
                    break;
                }
            }
            let (what, slot, value) = parts(answer);
            events.push(match what {
                STARTED => Event::Started { slot, child: value },
                _ => Event::Ended {
                    slot,
                    success: value == 0,
                },
            });
        }
        events
    }

    /// Returns the lines that the child of a slot has printed since the last call. Does not wait.
    pub fn lines(&mut self, slot: u8) -> Vec<Vec<u8>> {
        let Some(output) = self.outputs.get_mut(usize::from(slot)) else {
            return Vec::new();
        };
        output.lines()
    }
}

impl Output {
    fn lines(&mut self) -> Vec<Vec<u8>> {
        let mut lines = Vec::new();
        let mut buffer = [0; 1 << 16];
        // At most as much as a pipe holds, since a child may print on.
        for _ in 0..16 {
            let Ok(length @ 1..) = self.pipe.read(&mut buffer) else {
                break;
            };
            for part in buffer[..length].split_inclusive(|&byte| byte == b'\n') {
                let room = MAX_LINE.saturating_sub(self.begun.len());
                self.begun.extend_from_slice(&part[..part.len().min(room)]);
                if part.ends_with(b"\n") {
                    lines.push(std::mem::take(&mut self.begun));
                }
            }
        }
        lines
    }
}

/// Waits for the launcher's end, but not for ever.
impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        let begun = Instant::now();
        let most = TIME_TO_END + Duration::from_secs(2);
        while waitpid(self.pid, Some(WaitPidFlag::WNOHANG)) == Ok(WaitStatus::StillAlive)
            && begun.elapsed() < most
        {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

fn message(what: u8, slot: u8, value: u32) -> [u8; MESSAGE] {
    let [a, b, c, d] = value.to_ne_bytes();
    [what, slot, 0, 0, a, b, c, d]
}

fn parts([what, slot, _, _, a, b, c, d]: [u8; MESSAGE]) -> (u8, u8, u32) {
    (what, slot, u32::from_ne_bytes([a, b, c, d]))
}

/// Prepares this process, which was just forked.
fn begin() -> Result<()> {
    // Ctrl-C of the terminal reaches the agent alone, which then has the children ended.
    let own = Pid::from_raw(0);
    setpgid(own, own).context("failed to leave the process group")?;
    prefer_for_kills();
    // As memleak, which may need it for uprobes.
    privileges::keep_tracing_and(&[Capability::CAP_SYS_ADMIN])
}

/// Has the OOM killer choose the children rather than the agent. A score that cannot be raised stays as it is.
fn prefer_for_kills() {
    let file = "/proc/self/oom_score_adj";
    let score = fs::read_to_string(file).ok();
    let score: Option<i32> = score.and_then(|score| score.trim().parse().ok());
    if let Some(score) = score {
        let _ = fs::write(file, (score + MORE_OOM_SCORE).min(1000).to_string());
    }
}

/// Child of a slot.
struct Running {
    child: Child,
    /// Time at which SIGKILL follows, once the child was told to end.
    killed_at: Option<Instant>,
}

/// Takes requests until the other end of the socket is closed.
fn serve(
    mut stream: UnixStream,
    outputs: &[PipeWriter],
    command: impl Fn(Request) -> Option<Command>,
) -> Result<()> {
    let mut slots: Vec<Option<Running>> = outputs.iter().map(|_| None).collect();
    while wait(&stream, slots.iter().any(Option::is_some)).is_ok() {
        if is_readable(&stream) {
            let mut request = [0; MESSAGE];
            // The agent has ended.
            if stream.read_exact(&mut request).is_err() {
                break;
            }
            let (what, slot, pid) = parts(request);
            let place = slots.get_mut(usize::from(slot));
            let answer = match (what.checked_sub(1), place) {
                (None, Some(Some(running))) => {
                    running.end();
                    None
                }
                (Some(what), Some(place @ None)) => {
                    let request = Request { slot, what, pid };
                    let output = &outputs[usize::from(slot)];
                    let child = command(request).and_then(|command| start(command, output));
                    let answer = child.as_ref().map(|child| (STARTED, child.id()));
                    *place = child.map(|child| Running {
                        child,
                        killed_at: None,
                    });
                    answer.or(Some((ENDED, NOT_STARTED)))
                }
                // An agent that works does not ask for this.
                _ => None,
            };
            if let Some((what, value)) = answer {
                stream.write_all(&message(what, slot, value))?;
            }
        }
        for (slot, place) in slots.iter_mut().enumerate() {
            if let Some(success) = place.as_mut().and_then(Running::look) {
                *place = None;
                let slot = u8::try_from(slot).unwrap_or_default();
                let status = u32::from(!success);
                stream.write_all(&message(ENDED, slot, status))?;
            }
        }
    }
    end_all(&mut slots);
    Ok(())
}

/// Waits for a request, and while children run, not for long.
fn wait(stream: &UnixStream, has_children: bool) -> nix::Result<()> {
    let timeout = if has_children {
        PollTimeout::from(LOOK)
    } else {
        PollTimeout::NONE
    };
    match poll(
        &mut [PollFd::new(stream.as_fd(), PollFlags::POLLIN)],
        timeout,
    ) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => Err(error),
    }
}

fn is_readable(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::new(stream.as_fd(), PollFlags::POLLIN)];
    poll(&mut polled, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

/// Starts a child. A failure is reported, and is no error of the launcher.
fn start(mut command: Command, output: &PipeWriter) -> Option<Child> {
    let output = match output.try_clone() {
        Ok(output) => output,
        Err(error) => {
            crate::message!("failed to start a tool: {error}");
            return None;
        }
    };
    command.stdin(Stdio::null()).stdout(output);
    // SAFETY: one system call between fork and exec. If the launcher is killed, its children end as by Ctrl-C.
    unsafe { command.pre_exec(|| Ok(set_pdeathsig(Signal::SIGINT)?)) };
    let child = command.spawn();
    if let Err(error) = &child {
        let program = crate::print::text::escape_bytes(command.get_program().as_encoded_bytes());
        crate::message!("failed to run {program}: {error}");
    }
    child.ok()
}

impl Running {
    fn end(&mut self) {
        if self.killed_at.is_none() {
            self.signal(Signal::SIGINT);
            self.killed_at = Some(Instant::now() + TIME_TO_END);
        }
    }

    /// Sends a signal. The child was not reaped yet, so that its PID is not another process's.
    fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(self.child.id().cast_signed()), signal);
    }

    /// Returns whether the child has succeeded, once it has ended.
    fn look(&mut self) -> Option<bool> {
        if self.killed_at.is_some_and(|at| at <= Instant::now()) {
            self.signal(Signal::SIGKILL);
        }
        match self.child.try_wait() {
            Ok(None) => None,
            Ok(Some(status)) => Some(status.success()),
            Err(_) => Some(false),
        }
    }
}

fn end_all(slots: &mut [Option<Running>]) {
    slots.iter_mut().flatten().for_each(Running::end);
    while slots.iter().any(Option::is_some) {
        for slot in slots.iter_mut() {
            if slot.as_mut().and_then(Running::look).is_some() {
                *slot = None;
            }
        }
        thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::thread::JoinHandle;

    use super::*;

    /// Serves requests in a thread, by commands of a shell.
    fn launcher(slots: u8, script: &'static str) -> (Launcher, JoinHandle<Result<()>>) {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let pipes = (0..slots).map(|_| io::pipe().expect("a pipe"));
        let (readers, writers): (Vec<_>, Vec<_>) = pipes.unzip();
        let command = move |request: Request| {
            let mut command = Command::new("sh");
            command.args(["-c", script, &request.what.to_string()]);
            command.arg(request.pid.to_string());
            (request.pid != 0).then_some(command)
        };
        let served = thread::spawn(move || serve(theirs, &writers, command));
        // No child of this process has this PID.
        let launcher = Launcher::new(ours, Pid::from_raw(i32::MAX), readers);
        (launcher.expect("a launcher"), served)
    }

    /// Waits for the next event. Those that come with it are in `heard` then.
    fn next(launcher: &mut Launcher, heard: &mut VecDeque<Event>) -> Event {
        loop {
            heard.extend(launcher.events());
            if let Some(event) = heard.pop_front() {
                return event;
            }
            assert!(!launcher.has_ended());
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_child_is_started_for_a_process_and_heard() {
        let mut heard = VecDeque::new();
        let (mut launcher, served) = launcher(2, "echo what $0 pid $1; printf rest; exit $0");
        for (slot, what, success) in [(1, 0, true), (0, 3, false)] {
            let request = Request {
                slot,
                what,
                pid: 37,
            };
            launcher.request(request);
            let started = next(&mut launcher, &mut heard);
            assert!(matches!(started, Event::Started { slot: at, .. } if at == slot));
            assert_eq!(
                next(&mut launcher, &mut heard),
                Event::Ended { slot, success }
            );
            let expected = format!("what {what} pid 37\n").into_bytes();
            assert_eq!(launcher.lines(slot), [expected]);
            assert!(launcher.lines(1 - slot).is_empty() && launcher.lines(7).is_empty());
        }
        drop(launcher);
        served.join().expect("no panic").expect("it ends");
    }

    #[test]
    fn a_slot_has_one_child_and_what_is_refused_has_ended() {
        let mut heard = VecDeque::new();
        let (mut launcher, served) = launcher(1, "exec sleep 1000");
        let request = |slot, pid| Request { slot, what: 1, pid };
        launcher.request(request(0, 0));
        let refused = Event::Ended {
            slot: 0,
            success: false,
        };
        assert_eq!(next(&mut launcher, &mut heard), refused);
        launcher.request(request(0, 1));
        let Event::Started { child, .. } = next(&mut launcher, &mut heard) else {
            panic!("not started");
        };
        // Neither a second child nor another slot is there.
        launcher.request(request(0, 2));
        launcher.request(request(9, 2));
        launcher.stop(9);
        launcher.stop(0);
        assert_eq!(next(&mut launcher, &mut heard), refused);
        assert!(kill(Pid::from_raw(child.cast_signed()), None).is_err());
        launcher.request(request(0, 3));
        let Event::Started { child, .. } = next(&mut launcher, &mut heard) else {
            panic!("the slot is not free");
        };
        drop(launcher);
        served.join().expect("no panic").expect("it ends");
        assert!(kill(Pid::from_raw(child.cast_signed()), None).is_err());
    }

    #[test]
    fn lines_are_bounded() {
        let (reader, mut writer) = io::pipe().expect("a pipe");
        let mut output = Output {
            pipe: reader,
            begun: vec![b'x'; MAX_LINE - 2],
        };
        writer.write_all(b"yyyy\nnext\n").expect("it holds them");
        drop(writer);
        let lines = output.lines();
        let lengths: Vec<usize> = lines.iter().map(Vec::len).collect();
        assert_eq!(lengths, [MAX_LINE, 5]);
    }
}
