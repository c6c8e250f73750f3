//! Image of a command at its exit, when all of its memory is still mapped.
//!
//! A thread of ours traces the command by ptrace(2), from before its first instruction on. This thread passes on
//! every signal, stop and new thread at once. It has the kernel hold each thread of the command at its end
//! (PTRACE_EVENT_EXIT), with its registers, before any memory of the process is freed. When all threads are held, the
//! image is taken. Processes that the command starts are not traced. If we are killed, the kernel lets all threads go
//! on.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::stop::{self, Stopped};
use crate::heap::arch::SYSTEM_CALL;
use crate::heap::image::Image;
use crate::process::proc::Process;

/// Time between two checks of whether the other threads are held, too.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Events for which the kernel stops a thread: its end, and the start of another thread.
const OPTIONS: libc::c_int = libc::PTRACE_O_TRACEEXIT | libc::PTRACE_O_TRACECLONE;

/// Command that is held at its exit until it is [released](AtExit::release), or until the value is dropped.
#[derive(Debug)]
pub struct AtExit {
    pid: u32,
    images: Receiver<Result<Image>>,
    /// Socket that becomes readable when there is an image, or an error instead.
    ready: UnixStream,
    /// Copy of the other end of `ready`. While it is open, the end of the thread does not make `ready` readable.
    _other: UnixStream,
    /// Channel on which the thread waits while the command is held.
    release: Sender<()>,
}

impl AtExit {
    /// Traces a process that is about to become the command.
    ///
    /// # Errors
    /// If the kernel does not let us trace the process.
    pub fn watch(pid: u32) -> Result<Self> {
        let (ready, tells) = UnixStream::pair().context("failed to open a pair of sockets")?;
        let other = tells.try_clone()?;
        let (image, images) = channel();
        let (release, released) = channel();
        let (traced, is_traced) = channel();
        // Only the thread that traces may make requests of ptrace(2).
        thread::Builder::new()
            .name("at-exit".into())
            .spawn(move || {
                let seized = stop::request(libc::PTRACE_SEIZE, pid, OPTIONS as usize);
                let is_ok = seized.is_ok();
                let watch = ExitTracer {
                    pid,
                    held: BTreeSet::new(),
                };
                if traced.send(seized).is_ok() && is_ok {
                    watch.follow(|of| {
                        if image.send(of).is_ok() && (&tells).write_all(&[0]).is_ok() {
                            // An error means to go on, too: the sender has been dropped.
                            let _ = released.recv();
                        }
                    });
                }
            })
            .context("failed to start a thread")?;
        match is_traced.recv() {
            Ok(Ok(())) => Ok(Self {
                pid,
                images,
                ready,
                _other: other,
                release,
            }),
            Ok(Err(error)) => bail!(stop::why_not_seized(pid, pid, &error)),
            Err(_) => bail!("the thread that traces the command has ended"),
        }
    }

    /// Returns the image once there is one, and None before. The descriptor becomes readable then. The command is
    /// stopped from then on.
    ///
    /// # Errors
    /// If no image can be taken.
    pub fn image(&self) -> Result<Option<Image>> {
        self.images.try_recv().map_or(Ok(None), |image| {
            let _ = (&self.ready).read(&mut [0]);
            image.map(Some)
        })
    }

    /// Lets the command go on, and exit.
    pub fn release(&self) {
        let _ = self.release.send(());
    }

    /// Asks the command to end, by SIGTERM.
    pub fn terminate(&self) {
        // The PID cannot be another process's: the command is a child of ours that was not waited for.
        let _ = kill(Pid::from_raw(self.pid.cast_signed()), Signal::SIGTERM);
    }
}

impl AsFd for AtExit {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}

/// State of the thread that traces the process.
struct ExitTracer {
    pid: u32,
    /// Threads that the kernel holds at their end.
    held: BTreeSet<u32>,
}

/// Reason why a thread is at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ExitReason {
    /// The thread calls exit(2), for itself alone.
    ThreadExit,
    /// The process ends by SIGKILL, or another thread's exec(2) ends this one.
    Killed,
    /// The process ends, or another thread's exec(2) ends this one.
    ProcessExit,
}

impl ExitTracer {
    /// Passes on events until all threads are held, and then gives the image to `take`. The threads go on when `take`
    /// returns. If the process is killed, its threads go on without an image.
    fn follow(mut self, take: impl FnOnce(Result<Image>)) {
        loop {
            let flags = if self.held.is_empty() {
                0
            } else {
                libc::WNOHANG
            };
            match next(flags) {
                // The process was killed, and its parent has to wait for it; or no thread is left.
                Ok(Next::Ended(tid)) if tid == self.pid => return,
                Err(_) => return,
                Ok(Next::Ended(tid)) => {
                    let _ = status_of(tid);
                }
                Ok(Next::Stopped(tid)) => {
                    if let Some(status) = status_of(tid) {
                        self.pass_on(tid, status);
                    }
                }
                Ok(Next::Nothing) => thread::sleep(POLL_INTERVAL),
            }
            if self.is_exec() {
                self.let_go();
            } else if self.is_all() {
                let stopped = Stopped::of(self.pid, self.held);
                let image = Process::open(self.pid)
                    .and_then(|process| super::take_stopped(&process, &stopped));
                take(image);
                return;
            }
        }
    }

    /// Lets a stopped thread go on as it would without us, or holds it at its end.
    fn pass_on(&mut self, tid: u32, status: i32) {
        let signal = libc::WSTOPSIG(status);
        let go_on = |with: i32| {
            // The kernel refuses if the thread has been killed.
            let _ = stop::request(libc::PTRACE_CONT, tid, with as usize);
        };
        match status >> 16 {
            libc::PTRACE_EVENT_EXIT => match exit_reason(self.pid, tid) {
                ExitReason::ProcessExit => {
                    self.held.insert(tid);
                }
                ExitReason::ThreadExit if self.is_last(tid) => {
                    self.held.insert(tid);
                }
                ExitReason::ThreadExit | ExitReason::Killed => go_on(0),
            },
            // A child process that shares its parent's memory, not a thread: PTRACE_O_TRACECLONE reports both.
            libc::PTRACE_EVENT_STOP if !is_thread(self.pid, tid) => {
                let _ = stop::request(libc::PTRACE_DETACH, tid, 0);
            }
            // The thread stays stopped, and reacts to SIGCONT.
            libc::PTRACE_EVENT_STOP if signal != libc::SIGTRAP => {
                let _ = stop::request(libc::PTRACE_LISTEN, tid, 0);
            }
            0 => go_on(signal),
            _ => go_on(0),
        }
    }

    /// Whether all threads are held that have not ended, and at least one is.
    fn is_all(&self) -> bool {
        let others = || stop::tids(self.pid).unwrap_or_default().into_iter();
        !self.held.is_empty()
            && others().all(|tid| self.held.contains(&tid) || stop::has_ended(self.pid, tid))
    }

    /// Whether all other threads of the process have ended.
    fn is_last(&self, tid: u32) -> bool {
        let others = stop::tids(self.pid).unwrap_or_default();
        let mut others = others.into_iter().filter(|&other| other != tid);
        others.all(|other| stop::has_ended(self.pid, other))
    }

    /// Whether threads are at their end because another thread calls exec(2), which waits for them.
    fn is_exec(&self) -> bool {
        let calls_exec = |tid: u32| {
            let call = fs::read_to_string(format!("/proc/{}/task/{tid}/syscall", self.pid));
            let call = call.unwrap_or_default();
            let number = call
                .split(' ')
                .next()
                .and_then(|number| number.parse().ok());
            [libc::SYS_execve, libc::SYS_execveat]
                .map(Some)
                .contains(&number)
        };
        let others = || stop::tids(self.pid).unwrap_or_default().into_iter();
        !self.held.is_empty() && others().any(|tid| !self.held.contains(&tid) && calls_exec(tid))
    }

    fn let_go(&mut self) {
        for tid in std::mem::take(&mut self.held) {
            let _ = stop::request(libc::PTRACE_CONT, tid, 0);
        }
    }
}

/// Returns the reason why a thread is at its end.
fn exit_reason(pid: u32, tid: u32) -> ExitReason {
    let code = event_message(tid).unwrap_or_default();
    if code & 0x7f == libc::SIGKILL as u64 {
        return ExitReason::Killed;
    }
    let general = stop::general_registers(tid);
    let call = general.and_then(|words| words.get(SYSTEM_CALL).copied());
    if call == Some(libc::SYS_exit as u64) && is_thread(pid, tid) {
        ExitReason::ThreadExit
    } else {
        ExitReason::ProcessExit
    }
}

fn is_thread(pid: u32, tid: u32) -> bool {
    fs::exists(format!("/proc/{pid}/task/{tid}")).unwrap_or(false)
}

/// Event that a wait has found.
enum Next {
    Stopped(u32),
    Ended(u32),
    Nothing,
}

/// Waits for an event of the threads that this thread traces, and leaves the event to be waited for again.
fn next(flags: i32) -> io::Result<Next> {
    let mut info = MaybeUninit::<libc::siginfo_t>::zeroed();
    let what = libc::WEXITED | libc::WSTOPPED | libc::WNOWAIT | libc::__WALL | libc::__WNOTHREAD;
    loop {
        // SAFETY: the kernel writes one siginfo_t.
        let done = unsafe { libc::waitid(libc::P_ALL, 0, info.as_mut_ptr(), what | flags) };
        let error = io::Error::last_os_error();
        if done == 0 {
            break;
        }
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // SAFETY: info holds zeros, or what the kernel has written. After a wait it has these fields.
    let (pid, code) = unsafe {
        let info = info.assume_init_ref();
        (info.si_pid().cast_unsigned(), info.si_code)
    };
    Ok(match code {
        _ if pid == 0 => Next::Nothing,
        libc::CLD_TRAPPED | libc::CLD_STOPPED => Next::Stopped(pid),
        _ => Next::Ended(pid),
    })
}

/// Consumes the status of a thread that a wait has found. Returns None if the thread is not stopped.
fn status_of(tid: u32) -> Option<i32> {
    let mut status = 0;
    let what = libc::__WALL | libc::__WNOTHREAD | libc::WNOHANG;
    // SAFETY: the kernel writes one int.
    let found = unsafe { libc::waitpid(tid.cast_signed(), &raw mut status, what) };
    (found > 0 && libc::WIFSTOPPED(status)).then_some(status)
}

/// Returns the kernel's message about the event that a thread has stopped for.
fn event_message(tid: u32) -> Option<u64> {
    let mut message: libc::c_ulong = 0;
    let nothing: *mut libc::c_void = std::ptr::null_mut();
    // SAFETY: the kernel writes one word.
    let done = unsafe {
        libc::ptrace(
            libc::PTRACE_GETEVENTMSG,
            tid.cast_signed(),
            nothing,
            &raw mut message,
        )
    };
    (done == 0).then_some(message)
}
