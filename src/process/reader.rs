//! Reader of those files of `/proc/PID` that show a process's memory, or wait for the lock of its address space.
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
/// Length of a request: path, offset, and number of bytes.
const REQUEST: usize = PATH + 16;
/// Offset by which a file is read from its beginning to its end.
const WHOLE: u64 = u64::MAX;

/// Reads a file of `/proc/PID`, such as `maps`, but at most `most` bytes.
///
/// # Errors
/// The errors of open(2) and read(2), and `TimedOut` if the process does not answer.
pub(crate) fn read_file(pid: u32, name: &str, most: usize) -> io::Result<Vec<u8>> {
    read(pid, name, WHOLE, most)
}

/// Reads memory of a process. Returns fewer bytes if the end of the range is not mapped.
///
/// # Errors
/// The errors of open(2) and read(2), and `TimedOut` if the process does not answer.
pub(crate) fn read_memory(pid: u32, address: u64, length: usize) -> io::Result<Vec<u8>> {
    read(pid, "mem", address, length)
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
struct State {
    reader: Option<Reader>,
    lost: Vec<Pid>,
    /// Times at which processes did not answer.
    silent: HashMap<u32, Instant>,
}

struct Reader {
    child: Pid,
    stream: UnixStream,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

fn read(pid: u32, name: &str, offset: u64, length: usize) -> io::Result<Vec<u8>> {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    let state = state.get_or_insert_with(|| State {
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
    let path = proc::file(pid, name);
    match reader.ask(path.as_os_str().as_bytes(), offset, length) {
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
                "process {pid} ({comm}) did not answer: its memory, or the lock of its address space, cannot be had \
                 within {} s; it is left out for {} s",
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
                // SAFETY: _exit() ends this process, and runs nothing of ours.
                unsafe { libc::_exit(0) }
            }
        }
    }

    /// Sends a request, and returns the answer, or the error of open(2) or read(2).
    ///
    /// # Errors
    /// `WouldBlock` if the answer does not come in time; else if the child has ended.
    fn ask(&mut self, path: &[u8], offset: u64, length: usize) -> io::Result<io::Result<Vec<u8>>> {
        let mut request = [0; REQUEST];
        request[..path.len()].copy_from_slice(path);
        request[PATH..][..8].copy_from_slice(&offset.to_ne_bytes());
        request[PATH + 8..].copy_from_slice(&(length as u64).to_ne_bytes());
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
            request[PATH - 1] = 0;
            let number = |at: usize| {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&request[at..at + 8]);
                u64::from_ne_bytes(bytes)
            };
            let (mut offset, mut left) = (number(PATH), number(PATH + 8));
            let file = libc::open(request.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC);
            let mut count = if file < 0 { -1 } else { 1 };
            while count > 0 {
                let wanted = left.min(PIECE as u64) as usize;
                let to = piece.as_mut_ptr().cast();
                count = match offset {
                    WHOLE => libc::read(file, to, wanted),
                    at => libc::pread(file, to, wanted, at.cast_signed()),
                };
                if count > 0 {
                    left -= count as u64;
                    offset = if offset == WHOLE {
                        WHOLE
                    } else {
                        offset.wrapping_add(count as u64)
                    };
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

/// Sends all bytes, or ends the child.
fn send(stream: RawFd, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // SAFETY: the bytes live until the call returns, and _exit() runs nothing of ours.
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
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        let line = std::fs::read("/proc/self/cmdline").expect("our command line");
        assert_eq!(read_file(pid, "cmdline", 1 << 20).expect("it"), line);
        assert_eq!(read_file(pid, "cmdline", 3).expect("it"), line[..3]);
        let error = read_file(pid, "nothing", 1).expect_err("no file");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
