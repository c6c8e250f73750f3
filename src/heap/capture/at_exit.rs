//! The image of a command at its exit, when all of its memory is there still.
//!
//! A thread of ours traces the command by ptrace(2), from before its first instruction on: it passes on
//! every signal, stop and new thread at once, and has the kernel hold each thread at its end
//! (PTRACE_EVENT_EXIT), with its registers, before anything of the process is given back. When all are
//! held, the image is taken. What the command starts is not traced. If we are killed, the kernel lets all
//! threads go on.

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
use crate::heap::image::{GENERAL_REGISTERS, Image};
use crate::process::proc::Process;

/// The pause between two looks at whether the other threads are held, too.
const LOOK: Duration = Duration::from_millis(1);

/// Which events the kernel stops a thread for: its end, and the start of another one.
const OPTIONS: libc::c_int = libc::PTRACE_O_TRACEEXIT | libc::PTRACE_O_TRACECLONE;

/// A command that is held at its exit until it is [released](AtExit::release), or this is dropped.
#[derive(Debug)]
pub struct AtExit {
    pid: u32,
    images: Receiver<Result<Image>>,
    /// Readable when there is an image, or why there is none.
    told: UnixStream,
    /// The other end, lest its end is taken for a word.
    _other: UnixStream,
    /// What the thread waits for while the command is held.
    release: Sender<()>,
}

impl AtExit {
    /// Traces a process that is about to become the command.
    ///
    /// # Errors
    /// If the kernel does not let us.
    pub fn watch(pid: u32) -> Result<Self> {
        let (told, tells) = UnixStream::pair().context("failed to open a pair of sockets")?;
        let other = tells.try_clone()?;
        let (image, images) = channel();
        let (release, released) = channel();
        let (traced, is_traced) = channel();
        // Only the thread that traces may ask anything of ptrace(2).
        thread::Builder::new()
            .name("at-exit".into())
            .spawn(move || {
                let seized = stop::request(libc::PTRACE_SEIZE, pid, OPTIONS as usize);
                let is_ok = seized.is_ok();
                let watch = Watch {
                    pid,
                    held: BTreeSet::new(),
                };
                if traced.send(seized).is_ok() && is_ok {
                    watch.follow(|of| {
                        if image.send(of).is_ok() && (&tells).write_all(&[0]).is_ok() {
                            // An error is the word to go on, too: the sender has been dropped.
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
                told,
                _other: other,
                release,
            }),
            Ok(Err(error)) => bail!(stop::why_not_seized(pid, pid, &error)),
            Err(_) => bail!("the thread that traces the command has ended"),
        }
    }

    /// The image, once there is one, as the descriptor tells: the command stands still from then on. None before.
    ///
    /// # Errors
    /// If no image can be taken.
    pub fn image(&self) -> Result<Option<Image>> {
        self.images.try_recv().map_or(Ok(None), |image| {
            let _ = (&self.told).read(&mut [0]);
            image.map(Some)
        })
    }

    /// Has the command go on, and exit.
    pub fn release(&self) {
        let _ = self.release.send(());
    }

    /// Asks the command to end, by SIGTERM.
    pub fn terminate(&self) {
        // It is a child of ours that nobody has waited for.
        let _ = kill(Pid::from_raw(self.pid.cast_signed()), Signal::SIGTERM);
    }
}

impl AsFd for AtExit {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.told.as_fd()
    }
}

/// The thread's view of the process.
struct Watch {
    pid: u32,
    /// Threads that the kernel holds at their end.
    held: BTreeSet<u32>,
}

/// What is known of a thread at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The thread calls exit(2), for itself alone.
    Own,
    /// The process ends by SIGKILL, or its other threads do, in exec(2).
    Killed,
    /// The process ends, or its other threads do, in exec(2).
    Of,
}

impl Watch {
    /// Passes on what comes, until all threads are held, and then gives the image to `take`. They go on when
    /// that returns; so they do, without an image, when the process is killed.
    fn follow(mut self, take: impl FnOnce(Result<Image>)) {
        loop {
            let flags = if self.held.is_empty() {
                0
            } else {
                libc::WNOHANG
            };
            match next(flags) {
                // It has been killed, and is for its parent to wait for; or nobody is left.
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
                Ok(Next::Nothing) => thread::sleep(LOOK),
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

    /// Has a thread that has stopped go on as it would without us, or holds it at its end.
    fn pass_on(&mut self, tid: u32, status: i32) {
        let signal = libc::WSTOPSIG(status);
        let go_on = |with: i32| {
            // It has been killed if the kernel refuses.
            let _ = stop::request(libc::PTRACE_CONT, tid, with as usize);
        };
        match status >> 16 {
            libc::PTRACE_EVENT_EXIT => match end(self.pid, tid) {
                End::Of => {
                    self.held.insert(tid);
                }
                End::Own if self.is_last(tid) => {
                    self.held.insert(tid);
                }
                End::Own | End::Killed => go_on(0),
            },
            // A child with memory of ours that is no thread: clone(2) tells of both.
            libc::PTRACE_EVENT_STOP if !is_thread(self.pid, tid) => {
                let _ = stop::request(libc::PTRACE_DETACH, tid, 0);
            }
            // It stays stopped, and hears of SIGCONT.
            libc::PTRACE_EVENT_STOP if signal != libc::SIGTRAP => {
                let _ = stop::request(libc::PTRACE_LISTEN, tid, 0);
            }
            0 => go_on(signal),
            _ => go_on(0),
        }
    }

    /// Whether all threads are held that have not ended.
    fn is_all(&self) -> bool {
        let others = || stop::tids(self.pid).unwrap_or_default().into_iter();
        !self.held.is_empty()
            && others().all(|tid| self.held.contains(&tid) || stop::has_ended(self.pid, tid))
    }

    /// Whether a thread has no other beside it but those that have ended.
    fn is_last(&self, tid: u32) -> bool {
        let others = stop::tids(self.pid).unwrap_or_default();
        let mut others = others.into_iter().filter(|&other| other != tid);
        others.all(|other| stop::has_ended(self.pid, other))
    }

    /// Whether threads end because another one calls exec(2), which waits for that.
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

/// Why a thread is at its end.
fn end(pid: u32, tid: u32) -> End {
    let code = event_message(tid).unwrap_or_default();
    if code & 0x7f == libc::SIGKILL as u64 {
        return End::Killed;
    }
    let general = stop::register_set(tid, libc::NT_PRSTATUS, 8 * GENERAL_REGISTERS.len());
    let at = GENERAL_REGISTERS
        .iter()
        .position(|&name| name == "orig_rax");
    let call = general
        .zip(at)
        .and_then(|(words, at)| words.get(at).copied());
    if call == Some(libc::SYS_exit as u64) && is_thread(pid, tid) {
        End::Own
    } else {
        End::Of
    }
}

fn is_thread(pid: u32, tid: u32) -> bool {
    fs::exists(format!("/proc/{pid}/task/{tid}")).unwrap_or(false)
}

/// What a wait has found.
enum Next {
    Stopped(u32),
    Ended(u32),
    Nothing,
}

/// Waits for what this thread traces, and leaves it to be waited for.
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
    // SAFETY: zeros, or what the kernel has written, and of a wait it has these fields.
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

/// Takes the status of a thread that there is one of.
fn status_of(tid: u32) -> Option<i32> {
    let mut status = 0;
    let what = libc::__WALL | libc::__WNOTHREAD | libc::WNOHANG;
    // SAFETY: the kernel writes one int.
    let found = unsafe { libc::waitpid(tid.cast_signed(), &raw mut status, what) };
    (found > 0 && libc::WIFSTOPPED(status)).then_some(status)
}

/// What the kernel tells about the event that a thread has stopped for.
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
