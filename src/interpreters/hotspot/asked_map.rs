//! The perf map that a virtual machine writes when it is asked for one: what `jcmd PID Compiler.perfmap`
//! does, without a JDK.
//!
//! HotSpot listens on a socket in its `/tmp` for its own user and root, and makes that only when a file of a
//! certain name is there, of one of them, and SIGQUIT comes. Where it does not catch that signal it would be
//! killed, and where it does not want us to attach it would print all of its stacks: so it is found out first,
//! in its memory and from the kernel, what it would do. Files and sockets in that folder can be anybody's:
//! no link is followed, and nothing is said to another process.

use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr, sockopt};
use nix::sys::stat::{Mode, SFlag, fstat};
use nix::unistd::{UnlinkatFlags, getegid, geteuid, unlinkat};

use super::machine::Machine;
use crate::host::capabilities::{self, Capability};
use crate::print::text;
use crate::process::mapped_file;
use crate::process::proc::{self, Process};

/// How long a virtual machine may take to listen, and again to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often it is looked whether it listens.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// Flags of a virtual machine that are looked through: JDK 25 has 1,400.
const MOST_FLAGS: u64 = 16_384;
/// Bytes of a flag's name, and of an answer.
const NAME_BYTES: usize = 64;
const ANSWER_BYTES: u64 = 4096;
/// Characters of an answer that are shown.
const SHOWN: usize = 160;
/// Version of the protocol, command, and its three arguments.
const REQUEST: &[u8] = b"1\0jcmd\0Compiler.perfmap\0\0\0";

/// Has a virtual machine write a perf map.
///
/// # Errors
/// If it cannot be asked without harm, refuses, or does not answer in time.
pub(super) fn ask(process: &Process, machine: &Machine) -> Result<()> {
    ensure!(!process.is_stopped(), "it is stopped");
    ensure!(
        !is_set(machine, "DisableAttachMechanism")?,
        "it was started with -XX:+DisableAttachMechanism"
    );
    expect_accepted(process)?;
    let root = mapped_file::root_of(process.pid())?;
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let asked = Asked {
        process,
        machine,
        folder: openat2(root, "tmp", how).context("no /tmp")?,
        number: process.pid_in_its_namespace(),
    };
    asked.ask()
}

/// HotSpot takes us for its own user, or for root; in another user namespace it knows neither.
fn expect_accepted(process: &Process) -> Result<()> {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/user"));
    ensure!(
        namespace("self")? == namespace(&process.pid().to_string())?,
        "it is in a user namespace of its own"
    );
    let (user, group) = (geteuid(), getegid());
    let is_its_own =
        process.user() == Some(user.as_raw()) && process.group() == Some(group.as_raw());
    ensure!(user.is_root() || is_its_own, "it is of another user");
    Ok(())
}

/// Whether a virtual machine has this flag set, which is a bool.
fn is_set(machine: &Machine, name: &str) -> Result<bool> {
    let (memory, structs) = (&machine.memory, &machine.structs);
    let flags = memory.word(structs.at("JVMFlag", "flags")?)?;
    let count = memory.word(structs.at("JVMFlag", "numFlags")?)?;
    let size = structs.size("JVMFlag")?;
    let (name_at, value_at) = (
        structs.at("JVMFlag", "_name")?,
        structs.at("JVMFlag", "_addr")?,
    );
    for number in 0..count.min(MOST_FLAGS) {
        let flag = flags.wrapping_add(number.wrapping_mul(size));
        let called = memory.word(flag.wrapping_add(name_at))?;
        if called != 0 && memory.c_string(called, NAME_BYTES)? == name {
            let value = memory.word(flag.wrapping_add(value_at))?;
            return Ok(memory.bytes::<1>(value)? != [0]);
        }
    }
    bail!("it does not tell whether {name} is set")
}

/// Whether a process catches SIGQUIT, which would else kill it.
fn catches_quit(pid: u32) -> bool {
    let caught = proc::field(format!("/proc/{pid}/status"), "SigCgt:");
    let caught = caught.and_then(|signals| u64::from_str_radix(&signals, 16).ok());
    caught.is_some_and(|signals| signals & (1 << (libc::SIGQUIT - 1)) != 0)
}

/// A process that is asked.
struct Asked<'a> {
    process: &'a Process,
    machine: &'a Machine,
    /// The folder that it has as /tmp.
    folder: OwnedFd,
    /// What it calls itself.
    number: u32,
}

impl Asked<'_> {
    fn ask(&self) -> Result<()> {
        let socket = match self.connect()? {
            Some(socket) => socket,
            None => self.wait_for_socket()?,
        };
        let mut socket = self.expect_process(socket)?;
        socket.write_all(REQUEST).context("it does not listen")?;
        expect_success(&read_answer(&mut socket)?)
    }

    /// Connects with what the process listens on. None if it does not, or is too busy for the moment.
    fn connect(&self) -> Result<Option<OwnedFd>> {
        let name = format!(".java_pid{}", self.number);
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = match openat(&self.folder, Path::new(&name), flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::ENOENT) => return Ok(None),
            Err(error) => return Err(error).context("failed to open its socket"),
        };
        // A link is not a socket, and what this one leads to is the very file.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        ensure!(
            SFlag::from_bits_truncate(fstat(&file)?.st_mode) & SFlag::S_IFMT == SFlag::S_IFSOCK,
            "/tmp/{name} is no socket"
        );
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket::socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
        match socket::connect(socket.as_raw_fd(), &UnixAddr::new(&*path)?) {
            Ok(()) => Ok(Some(socket)),
            Err(Errno::ECONNREFUSED | Errno::EAGAIN) => Ok(None),
            Err(error) => {
                let remedy = remedy_for(error, Errno::EACCES, Capability::CAP_DAC_OVERRIDE);
                let failed = format!("failed to connect with its socket{remedy}");
                Err(anyhow!(error).context(failed))
            }
        }
    }

    /// Has the process listen.
    fn wait_for_socket(&self) -> Result<OwnedFd> {
        // With that it listens from its start, and the signal is not for it.
        ensure!(
            !is_set(self.machine, "ReduceSignalUsage")?,
            "it was started with -Xrs, and does not listen any more"
        );
        let _trigger = Trigger::make(&self.folder, self.number)?;
        ensure!(
            catches_quit(self.process.pid()),
            "it does not catch SIGQUIT, and would be killed"
        );
        self.quit()?;
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            let mut exits = [PollFd::new(self.process.as_fd(), PollFlags::POLLIN)];
            let wait = PollTimeout::try_from(LOOK_AGAIN)?;
            if poll(&mut exits, wait).is_ok_and(|ready| ready > 0) {
                bail!("it has exited");
            }
            if let Some(socket) = self.connect()? {
                return Ok(socket);
            }
        }
        bail!("it does not listen within {} s", PATIENCE.as_secs())
    }

    fn quit(&self) -> Result<()> {
        let pidfd = self.process.as_fd().as_raw_fd();
        let no_info = std::ptr::null::<libc::siginfo_t>();
        // SAFETY: the descriptor is open, and without information none is read.
        let sent = unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                pidfd,
                libc::SIGQUIT,
                no_info,
                0,
            )
        };
        Errno::result(sent).map(drop).map_err(|error| {
            let remedy = remedy_for(error, Errno::EPERM, Capability::CAP_KILL);
            anyhow!(error).context(format!("failed to signal it{remedy}"))
        })
    }

    /// The stream, if it is the very process that listens.
    fn expect_process(&self, socket: OwnedFd) -> Result<UnixStream> {
        let peer = socket::getsockopt(&socket, sockopt::PeerCredentials)?.pid();
        let is_it = u32::try_from(peer).is_ok_and(|pid| pid == self.process.pid());
        ensure!(is_it, "process {peer} listens in its place");
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    }
}

/// The remedy if an error is that by which the kernel refuses us what it grants who has this capability.
fn remedy_for(error: Errno, refusal: Errno, capability: Capability) -> String {
    match error == refusal {
        true => capabilities::remedy(capability),
        false => String::new(),
    }
}

/// The file that tells HotSpot that it is to listen, while it is there.
struct Trigger<'a> {
    folder: &'a OwnedFd,
    name: String,
}

impl<'a> Trigger<'a> {
    fn make(folder: &'a OwnedFd, number: u32) -> Result<Self> {
        let name = format!(".attach_pid{number}");
        let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        let made = openat(folder, Path::new(&name), flags | OFlag::O_WRONLY, mode);
        drop(made.map_err(|error| {
            let remedy = remedy_for(error, Errno::EACCES, Capability::CAP_DAC_OVERRIDE);
            anyhow!(error).context(format!("failed to make /tmp/{name}{remedy}"))
        })?);
        Ok(Self { folder, name })
    }
}

impl Drop for Trigger<'_> {
    fn drop(&mut self) {
        let name = Path::new(&self.name);
        let _ = unlinkat(self.folder, name, UnlinkatFlags::NoRemoveDir);
    }
}

/// What comes until the other end is closed, bounded in bytes and time.
fn read_answer(socket: &mut UnixStream) -> Result<Vec<u8>> {
    let (begun, mut answer) = (Instant::now(), Vec::new());
    let mut part = [0; 512];
    while (answer.len() as u64) < ANSWER_BYTES {
        let left = PATIENCE.saturating_sub(begun.elapsed());
        ensure!(
            !left.is_zero(),
            "it does not answer within {} s",
            PATIENCE.as_secs()
        );
        socket.set_read_timeout(Some(left))?;
        match socket.read(&mut part) {
            Ok(0) => break,
            Ok(length) => answer.extend_from_slice(&part[..length]),
            Err(error) if is_late(&error) => {}
            Err(error) => return Err(error).context("it does not answer"),
        }
    }
    Ok(answer)
}

fn is_late(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    [Interrupted, TimedOut, WouldBlock].contains(&error.kind())
}

/// An answer begins with a number, which is 0 if all went well.
fn expect_success(answer: &[u8]) -> Result<()> {
    ensure!(!answer.is_empty(), "it does not answer");
    let answer = String::from_utf8_lossy(answer);
    let (status, said) = answer.split_once('\n').unwrap_or((&answer, ""));
    if status == "0" {
        return Ok(());
    }
    let said = said.lines().find(|line| !line.trim().is_empty());
    let said: String = said.unwrap_or(status).chars().take(SHOWN).collect();
    bail!("it answers: {}", text::shown(&said))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_a_number_and_a_reason() {
        assert!(expect_success(b"0\n").is_ok());
        assert!(expect_success(b"0\nwritten\n").is_ok());
        let said = |answer: &[u8]| {
            let refused = expect_success(answer).expect_err("no success");
            refused.to_string()
        };
        assert_eq!(
            said(b"1\n\njava.lang.Error: no\x1b[2J\n"),
            format!("it answers: {}", text::shown("java.lang.Error: no\x1b[2J"))
        );
        assert!(!said(b"1\n\x1b[2J\n").contains('\x1b'));
        assert_eq!(said(b""), "it does not answer");
        assert_eq!(said(b"00"), "it answers: 00");
        assert!(said(&[b'x'; 4000]).len() < 200);
    }

    #[test]
    fn an_answer_that_never_ends_is_cut() {
        let (mut ours, mut theirs) = UnixStream::pair().expect("sockets");
        let talks = std::thread::spawn(move || while theirs.write_all(&[b'0'; 512]).is_ok() {});
        let answer = read_answer(&mut ours).expect("bytes");
        assert!((answer.len() as u64) < ANSWER_BYTES + 512);
        drop(ours);
        talks.join().expect("no panic");
    }

    #[test]
    fn who_does_not_catch_the_signal_is_known() {
        use crate::interpreters::search::tests::Running;
        use std::process::Command;

        assert!(!catches_quit(Running::shell().pid()));
        let catches = "trap : QUIT; echo ready; read _";
        let catching = Running::start(Command::new("sh").args(["-c", catches]));
        assert!(catches_quit(catching.pid()));
    }
}
