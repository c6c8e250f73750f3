//! The perf map that a virtual machine writes on request, as for `jcmd PID Compiler.perfmap`, but without a JDK.
//!
//! HotSpot listens on a socket in its `/tmp` for its own user and root. It creates the socket only when SIGQUIT
//! arrives while a file of a certain name exists that belongs to one of these users. A process that does not catch
//! SIGQUIT would be killed. A HotSpot that does not accept requests would print all of its stacks. So its memory and
//! the kernel are asked first what HotSpot would do. Files and sockets in `/tmp` can belong to anybody: no link is
//! followed, and nothing is sent to another process.

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

/// Maximum time until a virtual machine listens, and again until it answers.
const PATIENCE: Duration = Duration::from_secs(5);
/// Interval between two attempts to connect.
const LOOK_AGAIN: Duration = Duration::from_millis(10);
/// Maximum number of a virtual machine's flags that are searched: JDK 25 has 1,400.
const MAX_FLAGS: u64 = 16_384;
/// Maximum length of a flag's name that is read, in bytes.
const NAME_BYTES: usize = 64;
/// Maximum length of an answer that is read, in bytes.
const ANSWER_BYTES: u64 = 4096;
/// Maximum number of characters of an answer that are shown.
const SHOWN: usize = 160;
/// Request: the version of the protocol, the command, and its three arguments.
const REQUEST: &[u8] = b"1\0jcmd\0Compiler.perfmap\0\0\0";

/// Requests a perf map from a virtual machine.
///
/// # Errors
/// If the request would do harm, or the virtual machine refuses it or does not answer in time.
pub(super) fn request(process: &Process, machine: &Machine) -> Result<()> {
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
    let asked = AttachRequest {
        process,
        machine,
        folder: openat2(root, "tmp", how).context("no /tmp")?,
        number: process.pid_in_its_namespace(),
    };
    asked.ask()
}

/// Checks that HotSpot will accept the request: this process has to have HotSpot's user and group, or be root. In
/// another user namespace HotSpot recognizes neither.
fn expect_accepted(process: &Process) -> Result<()> {
    let namespace = |pid: u32| fs::read_link(proc::file(pid, "ns/user"));
    ensure!(
        namespace(std::process::id())? == namespace(process.pid())?,
        "it is in a user namespace of its own"
    );
    let (user, group) = (geteuid(), getegid());
    let is_its_own =
        process.user() == Some(user.as_raw()) && process.group() == Some(group.as_raw());
    ensure!(user.is_root() || is_its_own, "it is of another user");
    Ok(())
}

/// Reads a flag of a virtual machine, which is a bool.
fn is_set(machine: &Machine, name: &str) -> Result<bool> {
    let (memory, structs) = (&machine.memory, &machine.structs);
    let flags = memory.word(structs.at("JVMFlag", "flags")?)?;
    let count = memory.word(structs.at("JVMFlag", "numFlags")?)?;
    let size = structs.size("JVMFlag")?;
    let (name_at, value_at) = (
        structs.at("JVMFlag", "_name")?,
        structs.at("JVMFlag", "_addr")?,
    );
    for number in 0..count.min(MAX_FLAGS) {
        let flag = flags.wrapping_add(number.wrapping_mul(size));
        let called = memory.word(flag.wrapping_add(name_at))?;
        if called != 0 && memory.c_string(called, NAME_BYTES)? == name {
            let value = memory.word(flag.wrapping_add(value_at))?;
            return Ok(memory.bytes::<1>(value)? != [0]);
        }
    }
    bail!("it does not say whether {name} is set")
}

/// Returns whether a process catches SIGQUIT, which kills it otherwise.
fn catches_quit(pid: u32) -> bool {
    let caught = proc::field(proc::file(pid, "status"), "SigCgt:");
    let caught = caught.and_then(|signals| u64::from_str_radix(&signals, 16).ok());
    caught.is_some_and(|signals| signals & (1 << (libc::SIGQUIT - 1)) != 0)
}

/// Process that gets a request.
struct AttachRequest<'a> {
    process: &'a Process,
    machine: &'a Machine,
    /// The process's /tmp.
    folder: OwnedFd,
    /// The PID in the process's own PID namespace.
    number: u32,
}

impl AttachRequest<'_> {
    fn ask(&self) -> Result<()> {
        let socket = match self.connect()? {
            Some(socket) => socket,
            None => self.wait_for_socket()?,
        };
        let mut socket = self.check_peer(socket)?;
        socket.write_all(REQUEST).context("it does not listen")?;
        expect_success(&read_answer(&mut socket)?)
    }

    /// Connects to the socket of the process. None if the process does not listen, or is too busy for the moment.
    fn connect(&self) -> Result<Option<OwnedFd>> {
        let name = format!(".java_pid{}", self.number);
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = match openat(&self.folder, Path::new(&name), flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::ENOENT) => return Ok(None),
            Err(error) => return Err(error).context("failed to open its socket"),
        };
        // A symbolic link is no socket. The path in /proc leads to the opened file itself.
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

    /// Makes the process create its socket, and connects to it.
    fn wait_for_socket(&self) -> Result<OwnedFd> {
        // With -Xrs the process listens from its start, and does not handle the signal.
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
        // SAFETY: the descriptor is open, and the kernel reads no siginfo from a null pointer.
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

    /// Returns the stream if the peer is the process itself.
    fn check_peer(&self, socket: OwnedFd) -> Result<UnixStream> {
        let peer = socket::getsockopt(&socket, sockopt::PeerCredentials)?.pid();
        let is_it = u32::try_from(peer).is_ok_and(|pid| pid == self.process.pid());
        ensure!(is_it, "process {peer} listens in its place");
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    }
}

/// Returns the remedy if an error is the refusal that this capability would prevent. Otherwise returns an empty text.
fn remedy_for(error: Errno, refusal: Errno, capability: Capability) -> String {
    match error == refusal {
        true => capabilities::remedy(capability),
        false => String::new(),
    }
}

/// File that asks HotSpot to listen. The file is removed when the value is dropped.
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

/// Reads an answer until the peer closes the connection. The number of bytes and the time are bounded.
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

/// Checks that an answer reports success: it begins with a number, which is 0 then.
fn expect_success(answer: &[u8]) -> Result<()> {
    ensure!(!answer.is_empty(), "it does not answer");
    let answer = String::from_utf8_lossy(answer);
    let (status, said) = answer.split_once('\n').unwrap_or((&answer, ""));
    if status == "0" {
        return Ok(());
    }
    let said = said.lines().find(|line| !line.trim().is_empty());
    let said: String = said.unwrap_or(status).chars().take(SHOWN).collect();
    bail!("it answers: {}", text::display_name(&said))
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
            format!(
                "it answers: {}",
                text::display_name("java.lang.Error: no\x1b[2J")
            )
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
        // A shell cannot catch a signal that was ignored when it was started, as in a background job.
        let catches = [
            "--default-signal=QUIT",
            "sh",
            "-c",
            "trap : QUIT; echo ready; read _",
        ];
        let catching = Running::start(Command::new("env").args(catches));
        assert!(catches_quit(catching.pid()));
    }
}
