//! Thread that makes tables while the tool traces. Files that BPF programs request are read at once. Other files that
//! their processes have mapped are read when there is nothing else to do.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{PipeReader, PipeWriter, pipe};
use std::os::fd::AsFd;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapHandle};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::held::Held;
use super::tables::{Tables, is_code};
use super::{InitialTables, UnwindParts, WhileStopped, join, log_tables_complete};
use crate::bpf::map_create::reopen;
use crate::bpf::ring::Events;
use crate::bpf::types::{unwind_request as Request, unwind_subject as Subject};
use crate::interpreters::finders::Finders;
use crate::print::clock;
use crate::process::mapped_file::MappedFile;
use crate::process::proc::{Mapping, Process};

/// Maximum time before a file that was looked at in vain is requested again, as a power of two in milliseconds.
const MAX_BACKOFF: u32 = 14;
/// Maximum time before an interpreter that was looked for in vain is requested again, as a power of two in
/// milliseconds. A process that has called exec is asked about from its first instructions on, and what it runs before
/// its interpreter is found lacks frames.
const MAX_INTERPRETER_BACKOFF: u32 = 8;
/// Minimum time before a file or an interpreter is requested again, as a power of two in milliseconds: 16 ms, close to
/// UNWIND_RETRY_NS.
const MIN_BACKOFF: u32 = 4;
const MILLISECOND: u64 = 1_000_000;
/// Maximum number of files that are remembered as looked at in vain.
const MAX_FAILURES: usize = 4096;
/// Maximum number of waiting files, each held open.
const MAX_QUEUE: usize = 256;
/// Nice value of the thread: the process whose file is to be opened may end soon.
const NICE: i32 = -10;
/// Time in milliseconds after which a process that has mapped code is looked at again: it may be starting.
const LOOK_AGAIN: u16 = 1;
/// Addend that rounds a duration up before it is truncated to whole milliseconds.
const ROUND_UP: Duration = Duration::from_millis(1);
/// Time in milliseconds after which tables that did not fit may fit.
const RECOVER: u16 = 10_000;

/// A file that is to have a table.
#[derive(Debug)]
pub(super) struct PendingFile {
    pub(super) mapping: Mapping,
    pub(super) file: MappedFile,
}

impl PendingFile {
    /// Opens the file that a process has mapped.
    fn open(pid: u32, mapping: Mapping) -> Result<Self> {
        let file = MappedFile::open(pid, &mapping)?;
        Ok(Self { mapping, file })
    }
}

/// Files that are to have tables, in the order in which they are to be read.
#[derive(Debug, Default)]
pub(super) struct Queue(VecDeque<PendingFile>);

impl Queue {
    /// Adds the files that a process has mapped and that were not examined yet. The files are opened at once: the
    /// process may end sooner than one of them is read. Returns whether files of the process wait, in the queue or for
    /// space in it. Then the process is to be added again later.
    pub(super) fn add(&mut self, tables: &Tables, pid: u32) -> bool {
        self.add_mappings(tables, pid, mappings_of(pid))
    }

    fn add_mappings(&mut self, tables: &Tables, pid: u32, mappings: Vec<Mapping>) -> bool {
        let mut waits = false;
        for mapping in mappings {
            if !is_wanted(tables, &mapping) {
                continue;
            }
            if self.has(&mapping) {
                waits = true;
            } else if self.0.len() >= MAX_QUEUE {
                return true;
            } else if let Ok(waiting) = PendingFile::open(pid, mapping) {
                self.0.push_back(waiting);
                waits = true;
            }
        }
        waits
    }

    fn has(&self, mapping: &Mapping) -> bool {
        let mut waiting = self.0.iter();
        waiting.any(|waiting| waiting.mapping.file_id() == mapping.file_id())
    }

    pub(super) fn pop(&mut self) -> Option<PendingFile> {
        self.0.pop_front()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Returns the mappings of a process. A process that has exited has none.
pub(super) fn mappings_of(pid: u32) -> Vec<Mapping> {
    let mappings = Process::open(pid).and_then(|process| process.mappings());
    mappings.unwrap_or_default()
}

/// Returns whether a mapping is of a file of code that was not examined yet.
fn is_wanted(tables: &Tables, mapping: &Mapping) -> bool {
    is_code(mapping) && mapping.inode != 0 && !tables.has_seen(mapping)
}

/// The thread that makes tables.
pub(super) struct Worker {
    /// Write end of a pipe. When it is dropped, and so closed, the thread stops.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<Tables>>,
}

impl Worker {
    pub(super) fn start(
        begun: InitialTables,
        parts: UnwindParts<'_>,
        held: Option<Held>,
        finders: Option<Finders>,
    ) -> Result<Self> {
        let (requests, asked) = (reopen(parts.requests)?, reopen(parts.asked)?);
        let (stopped, stop) = pipe().context("failed to open a pipe")?;
        let mut answers = RequestHandler {
            tables: begun.tables,
            queue: begun.queue,
            asked,
            failures: HashMap::new(),
            starting: begun.starting,
            held,
            finders,
            while_stopped: parts.while_stopped,
        };
        let thread = thread::Builder::new()
            .name("unwind".into())
            .spawn(move || {
                raise_priority();
                if let Err(error) = answers.run(&stopped, &requests) {
                    crate::note!("unwind tables are no longer kept up to date: {error:#}");
                }
                answers.tables
            })
            .context("failed to start a thread")?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Stops the thread. Returns its tables.
    pub(super) fn stop(mut self) -> Option<Tables> {
        self.stop = None;
        self.thread.take().map(join)
    }
}

impl Drop for Worker {
    /// Waits for the thread, also after an error: the end of this process would interrupt the removal of its uprobes.
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Raises the priority of this thread, if that is allowed.
fn raise_priority() {
    // SAFETY: takes three integers; 0 is the calling thread, as each thread has a priority of its own on Linux.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

/// State of the thread.
struct RequestHandler {
    tables: Tables,
    queue: Queue,
    /// The skeleton's map `unwind_asked`.
    asked: MapHandle,
    /// Number of times that a file was looked at in vain, by the BPF side's hash of the file.
    failures: HashMap<u64, u32>,
    /// Processes that may still be mapping code and are soon to be looked at again, each with the time since which.
    starting: HashMap<u32, Instant>,
    held: Option<Held>,
    /// Finders of the interpreters of processes; None if these are not requested.
    finders: Option<Finders>,
    while_stopped: Option<WhileStopped>,
}

impl RequestHandler {
    /// Answers the requests of BPF programs until `stopped` is closed.
    fn run(&mut self, stopped: &PipeReader, requests: &MapHandle) -> Result<()> {
        let requests: Events<Request> = Events::new(requests)?;
        self.tables.publish_vdso()?;
        loop {
            let mut sources = [
                PollFd::new(stopped.as_fd(), PollFlags::POLLIN),
                PollFd::new(requests.as_fd(), PollFlags::POLLIN),
            ];
            match poll(&mut sources, self.poll_timeout()) {
                Ok(0) => self.idle()?,
                Ok(_) | Err(Errno::EINTR) => {}
                Err(error) => return Err(error).context("failed to wait for requests"),
            }
            if sources[0].any() == Some(true) {
                return Ok(());
            }
            let mut answered = HashSet::new();
            for request in requests.drain()? {
                if request.subject != Subject::UNWIND_SUBJECT_FILE.0 {
                    self.handle_interpreter_request(&request)?;
                } else if request.file == 0 {
                    self.handle_stopped_process(&request)?;
                } else if answered.insert(request.file) {
                    self.handle_file_request(&request)?;
                }
            }
        }
    }

    /// Returns how long to wait for a request.
    fn poll_timeout(&self) -> PollTimeout {
        if !self.queue.is_empty() {
            PollTimeout::ZERO
        } else if !self.starting.is_empty() {
            PollTimeout::from(LOOK_AGAIN)
        } else if let Some(left) = self.held.as_ref().and_then(Held::left) {
            PollTimeout::try_from(left + ROUND_UP).unwrap_or(PollTimeout::NONE)
        } else if self.tables.may_recover() {
            PollTimeout::from(RECOVER)
        } else {
            PollTimeout::NONE
        }
    }

    /// Does background work after no request has come for the time that [`RequestHandler::poll_timeout`] returned.
    fn idle(&mut self) -> Result<()> {
        if let Some(waiting) = self.queue.pop() {
            self.tables.add_mapped_file(waiting, false)?;
        } else if !self.starting.is_empty() {
            for (pid, since) in std::mem::take(&mut self.starting) {
                if self.queue.add(&self.tables, pid) {
                    self.starting.insert(pid, since);
                } else {
                    log_tables_complete(&self.tables, pid, since.elapsed());
                }
            }
        } else if let Some(held) = &mut self.held
            && let Some(left) = held.left()
        {
            if left.is_zero() {
                held.detach_mmap();
            }
        } else {
            self.tables.collect(0)?;
        }
        Ok(())
    }

    /// Looks at a process that is stopped because it has mapped code, and lets it go on.
    fn handle_stopped_process(&mut self, request: &Request) -> Result<()> {
        let pid = request.pid;
        if let Some(work) = &mut self.while_stopped {
            work(pid);
        }
        let begun = Instant::now();
        // A process that is stopped keeps its files, so that none has to wait in the queue, whose capacity is limited.
        for mapping in mappings_of(pid) {
            if is_wanted(&self.tables, &mapping)
                && let Ok(waiting) = PendingFile::open(pid, mapping)
            {
                self.tables.add_mapped_file(waiting, false)?;
            }
        }
        // An interpreter is found before the process's first instruction that allocates.
        if let Some(finders) = &mut self.finders {
            finders.look_at_stopped(pid);
        }
        log_tables_complete(&self.tables, pid, begun.elapsed());
        if let Some(held) = &mut self.held
            && let Err(error) = held.resume_process(pid, request.held_file)
        {
            crate::note!("the command is no longer stopped when it maps code: {error:#}");
        }
        Ok(())
    }

    /// Looks at a file that a BPF program has met.
    fn handle_file_request(&mut self, request: &Request) -> Result<()> {
        let pid = request.pid;
        let mut mappings = mappings_of(pid);
        let is_asked =
            |mapping: &Mapping| is_code(mapping) && mapping.range.contains(&request.start);
        let at = mappings.iter().position(is_asked);
        let asked = at.map(|at| mappings.swap_remove(at));
        let asked = asked.and_then(|mapping| PendingFile::open(pid, mapping).ok());
        let waits = self.queue.add_mappings(&self.tables, pid, mappings);
        let is_known = match asked {
            Some(waiting) => self.tables.add_mapped_file(waiting, true)?,
            None => false,
        };
        if is_known || waits {
            self.starting.entry(pid).or_insert_with(Instant::now);
        }
        if !is_known {
            return self.back_off(request.file, MAX_BACKOFF);
        }
        self.failures.remove(&request.file);
        Ok(())
    }

    /// Looks for the interpreter of a process that executes an interpreter's code.
    fn handle_interpreter_request(&mut self, request: &Request) -> Result<()> {
        let Some(finders) = &mut self.finders else {
            return Ok(());
        };
        let (subject, layout) = (Subject(request.subject), request.file);
        let found = finders.answer(subject, request.pid, layout);
        // The BPF side tells requests for the two interpreters apart in this way.
        let hash = if subject == Subject::UNWIND_SUBJECT_HOTSPOT {
            !layout
        } else {
            layout
        };
        if found {
            self.failures.remove(&hash);
            return Ok(());
        }
        self.back_off(hash, MAX_INTERPRETER_BACKOFF)
    }

    /// Delays the next request for a file, or for the interpreter of a process. The delay doubles with each call, up to
    /// 2 to the power of `most` milliseconds.
    fn back_off(&mut self, file: u64, most: u32) -> Result<()> {
        if self.failures.len() >= MAX_FAILURES {
            self.failures.clear();
        }
        let times = self.failures.entry(file).or_default();
        let patience = MILLISECOND << (MIN_BACKOFF + *times).min(most);
        *times += 1;
        let not_before = clock::monotonic_ns() + patience;
        self.asked
            .update(
                &file.to_ne_bytes(),
                &not_before.to_ne_bytes(),
                MapFlags::ANY,
            )
            .context("failed to put off a request")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stacks::unwind::tables;

    #[test]
    fn a_process_waits_for_room_for_its_files() {
        let Some((tables, _)) = tables::tests::tables() else {
            return;
        };
        let (pid, mut queue) = (std::process::id(), Queue::default());
        assert!(queue.add(&tables, pid), "our files wait");
        let files = queue.0.len();
        let own = queue.pop().expect("our program");
        let fill = (files..=MAX_QUEUE).map(|_| PendingFile {
            mapping: Mapping {
                inode: 0,
                ..own.mapping.clone()
            },
            file: own.file.clone(),
        });
        queue.0.extend(fill);
        assert!(queue.add(&tables, pid), "our program waits");
        assert!(!queue.has(&own.mapping), "no room");
        assert_eq!(queue.0.len(), MAX_QUEUE);
        queue.0.truncate(files);
        assert!(queue.add(&tables, pid));
        assert!(queue.has(&own.mapping), "room again");
    }
}
