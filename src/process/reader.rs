//! Reader of a process's memory, and of those files of `/proc/PID` that wait for the lock of its address space.
//!
//! Memory is read by process_vm_readv(2), which releases the lock while it waits for a page. Reads of `mem`, `cmdline` and
//! `environ` in `/proc/PID` keep the lock meanwhile, which can freeze the machine (`mmap_lock`).
//!
//! A process can have such a read wait for ever: its memory can be a file whose server never answers (FUSE). So a child
//! process of ours reads. If the child does not answer in time, it is killed and not waited for, as it may not end
//! before the server does. The process is not read again for some time, and a message names it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::{ForkResult, Pid, fork};

use crate::process::guard;
use crate::process::proc::{self, Process, Stat};

/// Time that a read may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// Time for which a process that did not answer is not read.
const REST: Duration = Duration::from_secs(30);
/// Bytes of memory that are read at once.
const PAGE: u64 = 4096;
/// Maximum number of pages that are kept.
const PAGES: usize = 64;
/// Time for which a page is kept.
const KEEP: Duration = Duration::from_millis(5);
/// Maximum number of readers that do not answer. If there are more, nothing is read.
const MAX_LOST: usize = 16;
/// Maximum number of bytes that are sent at once.
const PIECE: usize = 1 << 16;
/// Maximum length of a path, with its NUL.
const PATH: usize = 64;
/// Length of the numbers that a request begins with: TID, or 0 if a file is read; address; number of bytes.
const NUMBERS: usize = 24;
/// Length of a request: the numbers, and the path of the file.
const REQUEST: usize = NUMBERS + PATH;
/// Maximum number of bytes of arguments and of environment that are read.
const MAX_STRINGS: u64 = 4 << 20;

/// Reads a file of `/proc/PID` that shows no memory, such as `maps`, but at most `most` bytes.
///
/// # Errors
/// The errors of open(2) and read(2), and `TimedOut` if the process does not answer.
pub(crate) fn read_file(pid: u32, name: &str, most: usize) -> io::Result<Vec<u8>> {
    let path = proc::file(pid, name);
    read(pid, Source::File(path.as_os_str().as_bytes()), most)
}

/// Reads memory of a process. Returns fewer bytes if the end of the range cannot be read.
///
/// # Errors
/// The errors of process_vm_readv(2), and `TimedOut` if the process does not answer.
pub(crate) fn read_memory(pid: u32, address: u64, length: usize) -> io::Result<Vec<u8>> {
    let tid = proc::living_thread(pid);
    read(pid, Source::Memory { tid, address }, length)
}

/// Returns the arguments of a process as they are in its memory, each with a NUL behind it: at most 4 MiB.
///
/// # Errors
/// The errors of [`read_memory`], and `PermissionDenied` if the process may not be traced.
pub(crate) fn arguments(pid: u32) -> io::Result<Vec<u8>> {
    const ARG_START: usize = 48;
    strings(pid, ARG_START)
}

/// Returns the environment that a process was started with, like [`arguments`].
///
/// # Errors
/// The errors of [`arguments`].
pub(crate) fn environment(pid: u32) -> io::Result<Vec<u8>> {
    const ENV_START: usize = 50;
    strings(pid, ENV_START)
}

/// Reads the memory between the addresses in two successive fields of proc_pid_stat(5).
fn strings(pid: u32, start: usize) -> io::Result<Vec<u8>> {
    let stat = Stat::read(proc::file(pid, "stat"))?;
    match (stat.field::<u64>(start), stat.field::<u64>(start + 1)) {
        (Some(start @ 1..), Some(end)) => {
            let length = end.saturating_sub(start).min(MAX_STRINGS);
            read_memory(pid, start, length as usize)
        }
        _ => Err(io::ErrorKind::PermissionDenied.into()),
    }
}

/// Memory of a running process. Nothing can be read once the process has exited or runs another program.
///
/// Pages are kept for a moment, as many words are read from few pages.
#[derive(Debug)]
pub(crate) struct RemoteMemory {
    pid: u32,
    layout: u64,
    cache: Mutex<Cache>,
}

/// Pages by their addresses, and the time when the first one was read.
#[derive(Debug, Default)]
struct Cache {
    since: Option<Instant>,
    pages: HashMap<u64, Vec<u8>>,
}

impl RemoteMemory {
    /// Opens the memory of a process.
    ///
    /// # Errors
    /// If the process has exited, or may not be read.
    pub(crate) fn open(pid: u32) -> Result<Self> {
        Ok(Self {
            pid,
            layout: layout(pid)?,
            cache: Mutex::default(),
        })
    }

    /// Reads memory. Returns fewer bytes if the end of the range cannot be read.
    ///
    /// # Errors
    /// If no byte can be read; `TimedOut` if the process does not answer.
    pub(crate) fn read(&self, address: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let is_fresh = cache.since.is_some_and(|since| since.elapsed() < KEEP);
        if !is_fresh || cache.pages.len() >= PAGES {
            *cache = Cache {
                since: Some(Instant::now()),
                pages: HashMap::new(),
            };
        }
        let mut bytes = Vec::with_capacity(length.min(PIECE));
        while bytes.len() < length {
            let Some(at) = address.checked_add(bytes.len() as u64) else {
                break;
            };
            let page = at & !(PAGE - 1);
            if let Entry::Vacant(place) = cache.pages.entry(page) {
                match self.read_page(page) {
                    Ok(read) => place.insert(read),
                    Err(error) if bytes.is_empty() => return Err(error),
                    Err(_) => break,
                };
            }
            let page = cache.pages.get(&page).map_or(&[][..], Vec::as_slice);
            let rest = page.get((at % PAGE) as usize..).unwrap_or_default();
            if rest.is_empty() {
                break;
            }
            bytes.extend_from_slice(&rest[..rest.len().min(length - bytes.len())]);
        }
        Ok(bytes)
    }

    fn read_page(&self, page: u64) -> io::Result<Vec<u8>> {
        let read = read_memory(self.pid, page, PAGE as usize)?;
        // The process may have called exec, or have exited, and its PID may mean another one.
        match layout(self.pid) {
            Ok(layout) if layout == self.layout => Ok(read),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

/// The child that reads, and processes that did not answer.
struct Reading {
    reader: Option<Reader>,
    lost: Vec<Pid>,
    /// Times at which processes did not answer.
    silent: HashMap<u32, Instant>,
}

struct Reader {
    child: Pid,
    stream: UnixStream,
}

static STATE: Mutex<Option<Reading>> = Mutex::new(None);

/// What a child reads.
#[derive(Debug, Clone, Copy)]
enum Source<'a> {
    /// The file at this path, from its beginning.
    File(&'a [u8]),
    /// Memory of the process that has this thread.
    Memory { tid: u32, address: u64 },
}

fn read(pid: u32, source: Source<'_>, length: usize) -> io::Result<Vec<u8>> {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let state = state.get_or_insert_with(|| Reading {
        reader: None,
        lost: Vec::new(),
        silent: HashMap::new(),
    });
    state.silent.retain(|_, since| since.elapsed() < REST);
    state
        .lost
        .retain(|child| matches!(waitpid(*child, Some(WaitPidFlag::WNOHANG)), Ok(status) if status.pid().is_none()));
    if state.silent.contains_key(&pid) || state.lost.len() >= MAX_LOST {
        return Err(io::ErrorKind::TimedOut.into());
    }
    if state.reader.is_none() {
        state.reader = Some(Reader::start()?);
    }
    let Some(reader) = &mut state.reader else {
        return Err(io::ErrorKind::NotConnected.into());
    };
    match reader.ask(source, length) {
        Ok(answer) => answer,
        Err(error) => {
            // This reader must not be used again: its answer may come yet.
            let _ = kill(reader.child, Signal::SIGKILL);
            state.lost.push(reader.child);
            state.reader = None;
            if error.kind() != io::ErrorKind::WouldBlock {
                return Err(error);
            }
            state.silent.insert(pid, Instant::now());
            let comm = Process::open(pid).map_or(String::new(), |process| process.comm());
            crate::message!(
                "process {pid} ({comm}) did not answer: its memory, or the lock of its address space, are not available within {} s; it is skipped for {} \
                 s",
                PATIENCE.as_secs_f64(),
                REST.as_secs()
            );
            Err(io::ErrorKind::TimedOut.into())
        }
    }
}

impl Reader {
    fn start() -> io::Result<Self> {
        let (stream, other) = UnixStream::pair()?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let others = guard::gaps(&[other.as_raw_fd()]);
        // SAFETY: the child has no thread but this one, so another thread can have left a lock taken for ever. The
        // child takes none of them: all it does is system calls.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => Ok(Self { child, stream }),
            ForkResult::Child => {
                guard::close_all(&others);
                serve(other.as_raw_fd());
                // SAFETY: _exit() ends this process, and runs no code of this process.
                unsafe { libc::_exit(0) }
            }
        }
    }

    /// Sends a request, and returns the answer, or the error of the system call.
    ///
    /// # Errors
    /// `WouldBlock` if the answer does not come in time; else if the child has ended.
    fn ask(&mut self, source: Source<'_>, length: usize) -> io::Result<io::Result<Vec<u8>>> {
        let mut request = [0; REQUEST];
        let (tid, address) = match source {
            Source::File(path) => {
                request[NUMBERS..][..path.len()].copy_from_slice(path);
                (0, 0)
            }
            Source::Memory { tid, address } => (u64::from(tid), address),
        };
        for (place, number) in request.chunks_mut(8).zip([tid, address, length as u64]) {
            place.copy_from_slice(&number.to_ne_bytes());
        }
        self.stream.write_all(&request)?;
        let mut answer = Vec::new();
        loop {
            let mut count = [0; 4];
            self.stream.read_exact(&mut count)?;
            let count = i32::from_ne_bytes(count);
            match usize::try_from(count) {
                Ok(0) => return Ok(Ok(answer)),
                Ok(count) => {
                    let begin = answer.len();
                    answer.resize(begin + count, 0);
                    self.stream.read_exact(&mut answer[begin..])?;
                }
                Err(_) if answer.is_empty() => {
                    return Ok(Err(io::Error::from_raw_os_error(-count)));
                }
                Err(_) => return Ok(Ok(answer)),
            }
        }
    }
}

/// Answers requests, in the child, until the parent has ended. Makes system calls only, and allocates nothing.
///
/// An answer consists of pieces, each behind its length. The last length is 0, or a negative error number.
fn serve(stream: RawFd) {
    let mut request = [0u8; REQUEST];
    let mut piece = [0u8; PIECE];
    // SAFETY: buffers have the lengths that are given, and the path ends with NUL.
    unsafe {
        while libc::recv(
            stream,
            request.as_mut_ptr().cast(),
            REQUEST,
            libc::MSG_WAITALL,
        ) == REQUEST as isize
        {
            request[REQUEST - 1] = 0;
            let number = |at: usize| {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&request[at..at + 8]);
                u64::from_ne_bytes(bytes)
            };
            let (tid, mut address, mut left) = (number(0), number(8), number(16));
            let file = match tid {
                0 => libc::open(
                    request[NUMBERS..].as_ptr().cast(),
                    libc::O_RDONLY | libc::O_CLOEXEC,
                ),
                _ => -1,
            };
            let mut count = if tid == 0 && file < 0 { -1 } else { 1 };
            while count > 0 {
                let wanted = left.min(PIECE as u64) as usize;
                count = match tid {
                    0 => libc::read(file, piece.as_mut_ptr().cast(), wanted),
                    tid => copy(tid as i32, address, &mut piece[..wanted]),
                };
                if count > 0 {
                    left -= count as u64;
                    address = address.wrapping_add(count as u64);
                    send(stream, &(count as i32).to_ne_bytes());
                    send(stream, &piece[..count as usize]);
                }
            }
            let error = if count < 0 {
                -*libc::__errno_location()
            } else {
                0
            };
            if file >= 0 {
                libc::close(file);
            }
            send(stream, &error.to_ne_bytes());
        }
    }
}

/// Copies memory of another process. Returns the number of bytes, or -1 and sets errno.
fn copy(tid: i32, address: u64, to: &mut [u8]) -> isize {
    let near = libc::iovec {
        iov_base: to.as_mut_ptr().cast(),
        iov_len: to.len(),
    };
    let far = libc::iovec {
        iov_base: ptr::without_provenance_mut(address as usize),
        iov_len: to.len(),
    };
    // SAFETY: the kernel writes into the slice only, at most as many bytes as it has.
    unsafe { libc::process_vm_readv(tid, &raw const near, 1, &raw const far, 1, 0) }
}

/// Sends all bytes, or ends the child.
fn send(stream: RawFd, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // SAFETY: the bytes live until the call returns, and _exit() runs no code of this process.
        let sent = unsafe {
            libc::send(
                stream,
                bytes.as_ptr().cast(),
                bytes.len(),
                libc::MSG_NOSIGNAL,
            )
        };
        match usize::try_from(sent) {
            Ok(sent) => bytes = &bytes[sent..],
            // SAFETY: as above.
            Err(_) => unsafe { libc::_exit(0) },
        }
    }
}

/// Returns a number that identifies where exec has placed the program of a process: the `layout` of `unwind_space()`
/// on the BPF side.
///
/// # Errors
/// If the process has exited, or may not be read.
pub(crate) fn layout(pid: u32) -> Result<u64> {
    // Numbers of fields in proc_pid_stat(5).
    const END_CODE: usize = 27;
    const START_STACK: usize = 28;
    const START_DATA: usize = 45;
    let stat = Stat::read(proc::file(pid, "stat"))?;
    let field = |number| stat.field::<u64>(number).context("too few fields");
    let (code, stack, data) = (field(END_CODE)?, field(START_STACK)?, field(START_DATA)?);
    if stack <= 1 {
        bail!("not allowed to read where process {pid} has its program");
    }
    Ok((stack ^ code).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_reads_what_we_would_read() {
        let pid = std::process::id();
        let text: Vec<u8> = (0..3 * PIECE).map(|number| number as u8).collect();
        let address = text.as_ptr() as u64;
        let read = read_memory(pid, address, text.len()).expect("our memory");
        assert_eq!(read, text);
        let error = read_memory(pid, 16, 8).expect_err("no memory");
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        let of_file = |name: &str| std::fs::read(format!("/proc/self/{name}")).expect("ours");
        assert_eq!(arguments(pid).expect("ours"), of_file("cmdline"));
        assert_eq!(environment(pid).expect("ours"), of_file("environ"));
        let limits = of_file("limits");
        assert_eq!(read_file(pid, "limits", 1 << 20).expect("it"), limits);
        assert_eq!(read_file(pid, "limits", 3).expect("it"), limits[..3]);
        let error = read_file(pid, "nothing", 1).expect_err("no file");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
