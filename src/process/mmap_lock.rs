//! Locks of processes' address spaces (`mmap_lock`), and whether each can be taken.
//!
//! The kernel takes these locks for writing, one after the other, when a uprobe is registered or removed. It cannot be
//! interrupted then, and no process of the machine can fork meanwhile. A user can hold the lock of a process for ever,
//! by mapped memory whose file server never answers (FUSE). So before a uprobe is registered, a child process of ours
//! takes each lock as the kernel will. A child that has to wait can be killed.

use std::ffi::{CStr, CString};
use std::fmt;
use std::io::{PipeReader, Read, pipe};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::statfs::{FsType, statfs};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};

use crate::bpf::attach::FatalError;
use crate::bpf::kernel_support;
use crate::process::directory::{self, ShortPath};
use crate::process::proc::{self, Process};

/// Time that a process has to let go of its lock. A process that frees gigabytes holds the lock meanwhile, which took
/// more than 1.5 s on a machine with ten runnable processes for each CPU.
const PATIENCE_MS: u16 = 5000;
/// Time for which an answer counts: so long before a registration the locks were seen to be free, at most.
const FRESH: Duration = Duration::from_millis(20);
/// Time to wait for the end of a killed child, which does not end if the lock's owner exits at this moment.
const END: Duration = Duration::from_millis(200);
/// Pause between two tries to take a lock that was held.
const PAUSE: Duration = Duration::from_secs(5);
/// Address at which no process can have memory.
const NOWHERE: i64 = 0x7fff_ffff_ffff_f000;

/// Answer of the child about a process: the lock was taken.
const TAKEN: u8 = b'y';
/// Answer of the child: the task has no address space. It is a kernel thread, or has exited.
const NO_SPACE: u8 = b'n';

/// Process that did not let go of its lock in time.
#[derive(Debug)]
pub(crate) struct Unanswered {
    pid: u32,
    /// Memory and clear_refs of the process or of its thread.
    memory: CString,
    clear_refs: Option<CString>,
}

impl Unanswered {
    /// Waits, without end, until the lock can be taken or the process has ended. Makes system calls only.
    pub(crate) fn wait(&self) {
        wait_for(|| {
            take(&self.memory, self.clear_refs.as_deref());
        });
    }
}

/// Waits, without end, until the locks of all processes can be taken. Makes system calls only. A process that has just
/// started is not seen.
pub(crate) fn wait_for_all() {
    wait_for(take_all);
}

/// Waits until a child process has taken locks in time. Between its tries it pauses, as a process cannot use much of its
/// memory while a child waits for its lock.
fn wait_for(locks: impl Fn()) {
    // SAFETY: the child makes system calls only.
    while let Ok(forked) = unsafe { fork() } {
        match forked {
            ForkResult::Child => {
                die_with_parent();
                locks();
                // SAFETY: _exit() ends this process, and runs no code of this process.
                unsafe { libc::_exit(0) }
            }
            ForkResult::Parent { child } => {
                if reap(child, Duration::from_millis(PATIENCE_MS.into())) {
                    return;
                }
                let _ = kill(child, Signal::SIGKILL);
                reap(child, END);
            }
        }
        thread::sleep(PAUSE);
    }
}

/// Why locks could not be checked, or must not be waited for.
#[derive(Debug)]
pub(crate) enum CheckError {
    Unanswered(Unanswered),
    Failed(anyhow::Error),
}

impl From<anyhow::Error> for CheckError {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}

impl From<CheckError> for anyhow::Error {
    fn from(error: CheckError) -> Self {
        match error {
            CheckError::Unanswered(process) => FatalError(process.to_string()).into(),
            CheckError::Failed(error) => error,
        }
    }
}

impl fmt::Display for Unanswered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pid = self.pid;
        let (name, user) = Process::open(pid).map_or((String::new(), None), |process| {
            (process.comm(), process.user())
        });
        let user = user.map_or("unknown".to_owned(), |user| user.to_string());
        let seconds = f64::from(PATIENCE_MS) / 1e3;
        write!(
            f,
            "process {pid} ({name}) of user {user} has held the lock of its address space for {seconds} s: probes \
             would wait for this lock, and until then no process of this machine could fork; try again, or end \
             process {pid} first (kill -9)"
        )
    }
}

/// Time of the last successful check.
static CHECKED: Mutex<Option<Instant>> = Mutex::new(None);

/// Whether a read of an address without memory takes the lock for writing, as the kernel would extend the stack: Linux
/// 6.5, 6.1.37 and later. It changes nothing.
static READ_LOCKS: LazyLock<bool> =
    LazyLock::new(|| kernel_support::btf_has_name("expand_stack_locked"));

/// Folder with a subfolder for each FUSE file system of the machine, where its control file system is mounted.
const FUSE_CONNECTIONS: &CStr = c"/sys/fs/fuse/connections";

/// Whether a server of a FUSE file system has a request that it has not answered. Also true if this cannot be seen.
/// Makes system calls only.
fn fuse_waits() -> bool {
    const FUSE_CTL_SUPER_MAGIC: i64 = 0x6573_5543;
    let seen = match statfs(FUSE_CONNECTIONS) {
        // The kernel has no FUSE.
        Err(Errno::ENOENT) => return false,
        Ok(file_system) => file_system.filesystem_type() == FsType(FUSE_CTL_SUPER_MAGIC),
        Err(_) => false,
    };
    if !seen {
        return true;
    }
    let mut waits = false;
    let listed = directory::each_number(FUSE_CONNECTIONS, |connection| {
        let path = ShortPath::of(&[FUSE_CONNECTIONS.to_bytes(), b"/", connection, b"/waiting"]);
        waits |= match directory::first_byte(path.as_c_str()) {
            Ok(first) => first != b'0',
            // The file system may have been unmounted.
            Err(error) => error != Errno::ENOENT,
        };
    });
    waits || listed.is_err()
}

/// Checks that the lock of each process can be taken for writing. The check is omitted if one has just succeeded.
///
/// Each process is checked, whatever it maps: the mappings of one that holds its lock cannot be read.
///
/// Before Linux 6.5 and 6.1.37, a process's peak of resident memory starts again with the check. So a check for writing
/// is omitted there while no FUSE request waits, as then none can keep a lock held.
///
/// Processes in other PID namespaces, and processes that a security module hides, are not seen.
///
/// # Errors
/// With the process that holds its lock; or if /proc cannot be listed, or no child can be forked.
pub(crate) fn check_all() -> Result<(), CheckError> {
    let mut checked = CHECKED.lock().unwrap_or_else(PoisonError::into_inner);
    if checked.is_some_and(|time| time.elapsed() < FRESH) {
        return Ok(());
    }
    let mut pids = proc::all()?;
    pids.retain(|pid| *pid != std::process::id());
    let of_processes: Vec<_> = pids
        .iter()
        .map(|pid| (*pid, format!("/proc/{pid}")))
        .collect();
    let answers = ask(&of_processes)?;
    // The first thread of a process can exit before the others. It has no address space then.
    let mut of_threads = Vec::new();
    for (pid, _) in pids
        .iter()
        .zip(&answers)
        .filter(|(_, answer)| **answer == NO_SPACE)
    {
        let threads = proc::tids(*pid).unwrap_or_default();
        let others = threads.into_iter().filter(|tid| tid != pid);
        of_threads.extend(others.map(|tid| (*pid, format!("/proc/{pid}/task/{tid}"))));
    }
    ask(&of_threads)?;
    *checked = Some(Instant::now());
    Ok(())
}

/// Asks a child to take the locks of these tasks, given as PID and directory in /proc. Returns its answers.
fn ask(tasks: &[(u32, String)]) -> Result<Vec<u8>, CheckError> {
    if tasks.is_empty() {
        return Ok(Vec::new());
    }
    let names = |name: &str| -> Result<Vec<CString>> {
        let paths = tasks
            .iter()
            .map(|(_, folder)| CString::new(format!("{folder}/{name}")));
        Ok(paths.collect::<Result<_, _>>()?)
    };
    let memory = names("mem")?;
    let clear_refs = if *READ_LOCKS || !fuse_waits() {
        Vec::new()
    } else {
        names("clear_refs")?
    };
    let (answers, to) = pipe().context("failed to open a pipe")?;
    // SAFETY: the child has no thread but this one, so another thread can have left a lock taken for ever. The child
    // takes none of them: all it does is system calls.
    match unsafe { fork() }.context("failed to fork a process that tries locks")? {
        ForkResult::Child => {
            answer(&memory, &clear_refs, to.as_raw_fd());
            // SAFETY: _exit() ends this process, and runs no code of this process.
            unsafe { libc::_exit(0) }
        }
        ForkResult::Parent { child } => {
            drop(to);
            let answered = collect(&answers, tasks.len());
            // A child that waits for a lock makes the lock's owner wait, too: end it at once.
            let _ = kill(child, Signal::SIGKILL);
            reap(child, END);
            let answered = answered?;
            let number = answered.len();
            match tasks.iter().zip(memory).nth(number) {
                None => Ok(answered),
                Some((&(pid, _), memory)) => Err(CheckError::Unanswered(Unanswered {
                    pid,
                    memory,
                    clear_refs: clear_refs.into_iter().nth(number),
                })),
            }
        }
    }
}

/// Reads the answers of the child, until one is late.
fn collect(mut from: &PipeReader, wanted: usize) -> Result<Vec<u8>> {
    let mut answers = Vec::with_capacity(wanted);
    let mut some = [0; 4096];
    while answers.len() < wanted {
        let mut source = [PollFd::new(from.as_fd(), PollFlags::POLLIN)];
        match poll(&mut source, PollTimeout::from(PATIENCE_MS)) {
            Err(Errno::EINTR) => continue,
            Ok(0) => break,
            polled => polled.context("failed to wait for a child")?,
        };
        match from.read(&mut some)? {
            0 => bail!("the process that tries locks has ended early"),
            length => answers.extend_from_slice(&some[..length]),
        }
    }
    Ok(answers)
}

/// Waits for the end of a child, but not for ever. Returns whether the child has ended.
fn reap(child: Pid, within: Duration) -> bool {
    let begun = Instant::now();
    while waitpid(child, Some(WaitPidFlag::WNOHANG)) == Ok(WaitStatus::StillAlive) {
        if begun.elapsed() > within {
            return false;
        }
        thread::sleep(Duration::from_micros(50));
    }
    true
}

/// Takes and releases the locks, in the child, and writes an answer on each. Makes system calls only.
fn answer(memory: &[CString], clear_refs: &[CString], to: RawFd) {
    die_with_parent();
    for (number, path) in memory.iter().enumerate() {
        let answer = take(path, clear_refs.get(number).map(|path| &**path));
        // SAFETY: the byte lives until the call returns. If the parent has ended, so does the child.
        unsafe { libc::write(to, (&raw const answer).cast(), 1) };
    }
}

/// Has this child end when its parent does: it must not wait for a lock any longer.
fn die_with_parent() {
    // SAFETY: takes integers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// Takes and releases the locks of all processes, one after the other. Makes system calls only.
fn take_all() {
    let by_write = !*READ_LOCKS && fuse_waits();
    let take_of = |folder: &[&[u8]]| {
        let folder = ShortPath::of(folder);
        let file = |name: &[u8]| ShortPath::of(&[folder.as_c_str().to_bytes(), name]);
        let (memory, clear_refs) = (file(b"/mem"), file(b"/clear_refs"));
        take(memory.as_c_str(), by_write.then(|| clear_refs.as_c_str()))
    };
    let _ = directory::each_number(c"/proc", |pid| {
        if take_of(&[b"/proc/", pid]) != NO_SPACE {
            return;
        }
        // The first thread of a process can exit before the others. It has no address space then.
        let tasks = ShortPath::of(&[b"/proc/", pid, b"/task"]);
        let _ = directory::each_number(tasks.as_c_str(), |tid| {
            if tid != pid {
                take_of(&[b"/proc/", pid, b"/task/", tid]);
            }
        });
    });
}

/// Takes and releases a lock for writing. Returns the answer. Makes system calls only.
fn take(memory: &CStr, clear_refs: Option<&CStr>) -> u8 {
    let answer = read_nowhere(memory);
    if answer == TAKEN {
        clear_refs.into_iter().for_each(reset_peak);
    }
    answer
}

/// Reads memory where there is none, which takes the lock: see [`READ_LOCKS`].
fn read_nowhere(path: &CStr) -> u8 {
    let mut byte = 0u8;
    // SAFETY: the path ends with NUL, and the buffer has one byte.
    unsafe {
        let file = libc::open(path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if file < 0 {
            return if *libc::__errno_location() == libc::EACCES {
                TAKEN
            } else {
                NO_SPACE
            };
        }
        let read = libc::pread(file, (&raw mut byte).cast(), 1, NOWHERE);
        libc::close(file);
        if read == 0 { NO_SPACE } else { TAKEN }
    }
}

/// Has the kernel take a lock for writing, on kernels where [`read_nowhere`] takes it for reading. The process's peak
/// of resident memory (VmHWM) starts again at what is resident now.
fn reset_peak(path: &CStr) {
    // SAFETY: the path ends with NUL, and the buffer has one byte.
    unsafe {
        let file = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if file >= 0 {
            libc::write(file, c"5".as_ptr().cast(), 1);
            libc::close(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Starts a Python program, and waits for its first line. None if no Python is installed.
    fn python(program: &str) -> Option<Child> {
        let mut command = Command::new("python3");
        let command = command.args(["-c", program]).stdin(Stdio::piped());
        let Ok(mut child) = command.stdout(Stdio::piped()).spawn() else {
            eprintln!("not run: python3 is not installed");
            return None;
        };
        let mut line = String::new();
        let stdout = child.stdout.take().expect("piped");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        Some(child)
    }

    fn answers_of(pid: u32, folder: &str) -> Vec<u8> {
        let Ok(answers) = ask(&[(pid, format!("/proc/{pid}{folder}"))]) else {
            panic!("no answer");
        };
        answers
    }

    #[test]
    fn a_process_without_its_first_thread_still_has_a_lock() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let Some(mut child) = python(
            "import ctypes, sys, threading\n\
             def wait():\n\x20   print('ready', flush=True)\n\x20   sys.stdin.read()\n\
             threading.Thread(target=wait).start()\n\
             ctypes.CDLL(None).syscall(60, 0)",
        ) else {
            return;
        };
        let pid = child.id();
        let of_thread = |pid: u32| {
            let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
            let names = threads.flatten().map(|thread| thread.file_name());
            let others = names.filter(|name| name.to_str() != Some(&pid.to_string()));
            others
                .last()
                .expect("a second thread")
                .into_string()
                .expect("a number")
        };
        while answers_of(pid, "") == [TAKEN] {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(answers_of(pid, ""), [NO_SPACE]);
        assert_eq!(
            answers_of(pid, &format!("/task/{}", of_thread(pid))),
            [TAKEN]
        );
        assert!(check_all().is_ok());
        child.kill().expect("our child");
        child.wait().expect("our child");
        assert_eq!(answers_of(pid, ""), [NO_SPACE]);
    }
}
