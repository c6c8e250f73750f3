//! Capture of the image of a live process.
//!
//! [`Request::take`] checks first what can go wrong. Then it allocates the buffers for the copy (`buffers`), and stops
//! the threads (`stop`). While they are stopped, it copies their registers, and has others (`crew`) list the mappings
//! and the pages that are present (`pages`) and copy these (`copy`). The clock is watched all the time (`bound`): if
//! the pause reaches its bound, or if a read does not return, the threads run on at once, and the copy is tried
//! again. Nothing is evaluated until the threads run again. Most pages can be copied before the stop, where the kernel
//! marks pages that are written later (`soft_dirty`). A command can instead be held at its exit, and be copied there
//! ([`at_exit`]).

#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
mod arch;
pub mod at_exit;
mod bound;
mod buffers;
mod copy;
mod crew;
mod pages;
mod soft_dirty;
mod stop;
mod tries;

use std::convert::Infallible;
use std::fs;
use std::io::ErrorKind;
use std::panic;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use memmap2::MmapMut;

use crate::heap::area::Area;
use crate::heap::clear_refs;
use crate::heap::idle::{IdlePages, Watch};
use crate::heap::image::{Image, Thread};
use crate::heap::page_runs::{self, PageRuns};
use crate::heap::realtime::Realtime;
use crate::host::values::Values;
use crate::print::{clock, text};
use crate::process::proc;
use crate::process::proc::Process;
use crate::process::reader;
use crate::process::translator;

use bound::{Overrun, Overruns, Pause, Step};
use buffers::CopyBuffers;
use crew::Late;
pub(super) use crew::{Crew, Until, WriteText};
use pages::Pages;
use stop::{Stopped, Unstopped, UnstoppedThread};
use tries::Tries;

/// Number of times that a process may outgrow the buffers for its copy.
const GROWN: usize = 3;
/// Bytes by which a process may grow between the look at its size and its stop.
const SLACK: u64 = 16 << 20;
/// Maximum number of bytes of /proc/PID/maps.
const MAPS: usize = 1 << 30;

/// Bytes of memory that it takes to judge a block, with the references in it. 77 bytes were measured, of ten million
/// blocks.
const JUDGED_BYTES: u64 = 80;

/// Outcome of one try at an image.
enum Taken {
    Copied(Box<Copied>),
    /// A thread did not stop in time.
    Late(UnstoppedThread),
    /// The process has outgrown the buffers for its copy.
    Outgrown,
    /// The pause has reached its bound.
    Over(Overrun),
}

/// What was copied of a process, besides the content of its pages.
struct Copied {
    threads: Vec<Thread>,
    areas: Vec<Area>,
    wanted: PageRuns,
    /// Pages that were copied during the stop.
    due: PageRuns,
    unread: u64,
    idle: Option<IdlePages>,
    paused: Duration,
    copied_ns: u64,
}

/// Parameters of the capture of a process.
#[derive(Debug)]
pub struct Request<'a> {
    /// Target process, which must be a 64-bit program.
    pub process: &'a Process,
    /// Bound on the time for which the process's threads are stopped at once.
    pub max_pause: Duration,
    /// Whether most of the process's memory is copied before the process is stopped, and during the stop only what
    /// has been written since then. This takes CAP_SYS_ADMIN.
    pub pre_copy: bool,
    /// Watch of the process by which the image tells which pages are idle, if that is wanted.
    pub idle: Option<&'a Watch>,
}

impl Request<'_> {
    /// Takes an image. Shortcomings are reported on stderr. If a thread does not stop in time, or if the pause reaches
    /// its bound, all threads go on, and further tries follow, over about 3 seconds.
    ///
    /// # Errors
    /// If the process is traced already, has memory in swap, is not copied within the bound in any try, does not
    /// answer, is run by a binary translator, has a thread that never stops in time, or has exited. Also if there is no
    /// memory for a copy, or, for a copy before the stop, if the kernel does not mark the pages that are written
    /// after that, or if the process itself uses these marks. In each case the process runs on.
    pub fn take(&self) -> Result<Image> {
        let pid = self.process.pid();
        check(self.process)?;
        self.expect_marks()?;
        let mut pages = Pages::open(pid)?;
        let (mut tries, mut overruns) = (Tries::begin(), Overruns::of(self.max_pause));
        let (mut grown, mut kept) = (0, None);
        while grown < GROWN {
            let mut buffers = self.prepare(&mut pages, kept.take())?;
            match self.try_once(&mut pages, &mut buffers, overruns.release())? {
                Taken::Copied(copied) => {
                    if let Some(message) = tries.message() {
                        crate::message!("{message}");
                    }
                    return self.image(*copied, buffers);
                }
                Taken::Late(late) => tries.wait(late)?,
                Taken::Outgrown => {
                    grown += 1;
                    continue;
                }
                Taken::Over(overrun) => match overruns.add(overrun) {
                    Some(gap) => thread::sleep(gap),
                    None => bail!(overruns.refusal(pid, self.other_remedy())),
                },
            }
            kept = Some(buffers);
        }
        bail!(
            "process {pid} grew faster than memory for its copy was allocated, {GROWN} times; try again"
        )
    }

    /// Fails if the copy has to be made before the stop, and cannot be.
    fn expect_marks(&self) -> Result<()> {
        let pid = self.process.pid();
        if self.pre_copy
            && let Some(number) = clear_refs::open_in(pid)
        {
            bail!(
                "process {pid} has its own clear_refs open (file descriptor {number}): it follows what it writes by the \
                 marks that --pre-copy clears, and would miss some: omit --pre-copy"
            );
        }
        if self.pre_copy && !soft_dirty::is_supported()? {
            bail!(
                "this kernel does not mark the pages that a process writes (CONFIG_MEM_SOFT_DIRTY), so that nothing can be \
                 copied before process {pid} is stopped: omit --pre-copy"
            );
        }
        Ok(())
    }

    /// Allocates the buffers for the copy, unless a try before has, and copies what can be copied before the stop.
    fn prepare(&self, pages: &mut Pages, kept: Option<CopyBuffers>) -> Result<CopyBuffers> {
        let pid = self.process.pid();
        if let Some(kept) = kept.filter(|_| !self.pre_copy) {
            return Ok(kept);
        }
        let mut crew = Crew::start()?;
        let (_, found) = answered(pid, pages.list(&mut crew, false, Until::PROGRESS)?)?;
        let bytes = page_runs::bytes(&found.wanted);
        if !self.pre_copy {
            self.expect_possible(bytes)?;
        }
        let capacity = bytes + bytes / 16 + SLACK;
        expect_memory_to_copy(pid, capacity)?;
        let mut buffers = CopyBuffers::empty(capacity)?;
        if self.pre_copy {
            answered(pid, buffers.pre_copy(&mut crew, pages, found.wanted)?)?;
            let (_, found) = answered(pid, pages.list(&mut crew, true, Until::PROGRESS)?)?;
            let due = buffers.pending(&mut crew, pages, &found, Until::PROGRESS)?;
            let due = page_runs::bytes(&answered(pid, due)?);
            self.expect_possible(due)?;
            let late = due + due / 4 + SLACK;
            let what = format!("a copy of what process {pid} writes during the copy takes");
            expect_memory(&what, late, available())?;
            buffers.allocate_stop_buffer(late)?;
        }
        Ok(buffers)
    }

    /// Fails if no machine could copy the process within the bound. `due` are the bytes that are to be copied.
    fn expect_possible(&self, due: u64) -> Result<()> {
        let pid = self.process.pid();
        let threads = fs::read_dir(format!("/proc/{pid}/task")).map_or(1, Iterator::count);
        match bound::hopeless(pid, self.max_pause, due, threads, copy::workers()) {
            Some(message) => bail!("{message}{}", self.other_remedy()),
            None => Ok(()),
        }
    }

    /// Stops the process once and tries to copy it.
    fn try_once(
        &self,
        pages: &mut Pages,
        buffers: &mut CopyBuffers,
        release: Duration,
    ) -> Result<Taken> {
        let realtime = Realtime::begin();
        let mut crew = Crew::start()?;
        // When a try's thread ends, the kernel releases a target thread that the try has asked to stop and that was
        // late.
        let taken = thread::scope(|scope| {
            let taker = scope.spawn(|| self.stop_and_copy(&mut crew, pages, buffers, release));
            let taken = taker.join();
            taken.unwrap_or_else(|panicked| panic::resume_unwind(panicked))
        });
        if let (Ok(Taken::Copied(_)), Some(error)) = (&taken, realtime.refused()) {
            crate::message!(
                "without real-time priority (SCHED_FIFO: {error}), the pause is longer on a busy machine"
            );
        }
        drop(realtime);
        let has_ended = crew.end();
        match taken {
            Ok(Taken::Over(overrun)) if !has_ended || overrun.late.is_stalled => {
                Err(no_answer(self.process.pid()))
            }
            Ok(Taken::Over(overrun)) => {
                buffers.recover()?;
                Ok(Taken::Over(overrun))
            }
            taken => taken,
        }
    }

    fn stop_and_copy(
        &self,
        crew: &mut Crew,
        pages: &mut Pages,
        buffers: &mut CopyBuffers,
        release: Duration,
    ) -> Result<Taken> {
        // This thread watches the clock, while the crew takes all CPUs.
        Realtime::raise_above_others();
        let stopped = match Stopped::stop(self.process.pid(), self.max_pause, release)? {
            Ok(stopped) => stopped,
            Err(Unstopped::Thread(late)) => return Ok(Taken::Late(late)),
            Err(Unstopped::Over(overrun)) => return Ok(Taken::Over(overrun)),
        };
        let copied_ns = clock::monotonic_ns();
        let (pause, since) = (stopped.pause, Instant::now());
        let threads = match stopped.registers() {
            Ok(threads) => threads,
            Err(late) => {
                let release = stopped.release();
                let overrun = pause.overrun(Step::Registers, since, late);
                return Ok(Taken::Over(Overrun { release, ..overrun }));
            }
        };
        // Another thread works, so that this one can watch the clock.
        thread::scope(|scope| {
            let (finished, end) = mpsc::channel::<Infallible>();
            let copier = scope.spawn(move || {
                let taken = self.copy_stopped(pause, crew, pages, buffers);
                drop(finished);
                taken
            });
            let in_time = end.recv_timeout(pause.left()) == Err(RecvTimeoutError::Disconnected);
            let release = stopped.release();
            let paused = pause.begin.elapsed();
            let taken = copier.join();
            Ok(
                match taken.unwrap_or_else(|panicked| panic::resume_unwind(panicked))? {
                    Taken::Copied(copied) if in_time => Taken::Copied(Box::new(Copied {
                        threads,
                        paused,
                        copied_ns,
                        ..*copied
                    })),
                    // The copy was finished when the process ran again.
                    Taken::Copied(_) => {
                        let overrun = pause.overrun(Step::Copy, since, Late::NOTHING);
                        Taken::Over(Overrun { release, ..overrun })
                    }
                    Taken::Over(overrun) => Taken::Over(Overrun { release, ..overrun }),
                    other => other,
                },
            )
        })
    }

    /// Copies a stopped process, unless the pause reaches its bound.
    fn copy_stopped(
        &self,
        pause: Pause,
        crew: &mut Crew,
        pages: &mut Pages,
        buffers: &mut CopyBuffers,
    ) -> Result<Taken> {
        let until = Until {
            at: pause.end,
            ..Until::PROGRESS
        };
        let over = |step, since, late| Ok(Taken::Over(pause.overrun(step, since, late)));
        let since = Instant::now();
        let (areas, found) = match pages.list(crew, self.pre_copy, until)? {
            Ok(listed) => listed,
            Err(late) => return over(Step::List, since, late),
        };
        let due = match buffers.pending(crew, pages, &found, until)? {
            Ok(due) => due,
            Err(late) => return over(Step::List, since, late),
        };
        let wanted = found.wanted;
        if !buffers.has_capacity_for(&wanted, &due) {
            return Ok(Taken::Outgrown);
        }
        let since = Instant::now();
        let sample = |watch: &Watch| watch.sample(pages.pagemap(), &wanted, until.at);
        let idle = match self.idle.map(sample).transpose()? {
            Some(None) => return over(Step::Idle, since, Late::NOTHING),
            sampled => sampled.flatten(),
        };
        let since = Instant::now();
        let unread = match buffers.copy(crew, self.process.pid(), &due, until)? {
            Ok(unread) => unread,
            Err(late) => return over(Step::Copy, since, late),
        };
        Ok(Taken::Copied(Box::new(Copied {
            threads: Vec::new(),
            areas,
            unread: page_runs::bytes(&unread),
            wanted,
            due,
            idle,
            paused: Duration::ZERO,
            copied_ns: 0,
        })))
    }

    /// Makes the image of what was copied, after the process has been released.
    fn image(&self, mut copied: Copied, buffers: CopyBuffers) -> Result<Image> {
        let pid = self.process.pid();
        self.process.expect_running()?;
        // The memory of a process that is killed is gone before the process has exited.
        if copied.unread > 0 {
            areas(pid)?;
        }
        if let (Some(watch), Some(pages)) = (self.idle, &mut copied.idle) {
            pages.reclaim_scanned = watch.reclaim_scanned();
        }
        if self.pre_copy {
            crate::message!(
                "of {} of process {pid}, {} were copied while it was stopped",
                text::bytes(page_runs::bytes(&copied.wanted)),
                text::bytes(page_runs::bytes(&copied.due))
            );
        }
        let copy = buffers.finish(&copied.wanted, &copied.due)?;
        copied.image(pid, copy)
    }

    /// Returns a remedy besides a higher bound, for messages. The process must run, as this function may try whether the
    /// kernel has soft-dirty marks.
    fn other_remedy(&self) -> &'static str {
        if !self.pre_copy && soft_dirty::is_supported().unwrap_or(false) {
            ", or have most of it copied before: --pre-copy"
        } else {
            ""
        }
    }
}

impl Copied {
    fn image(self, pid: u32, copy: MmapMut) -> Result<Image> {
        let mut threads = self.threads;
        for thread in &mut threads {
            thread.comm = comm(&format!("/proc/{pid}/task/{}/comm", thread.tid));
        }
        let mut image = Image {
            pid,
            comm: comm(&format!("/proc/{pid}/comm")),
            threads,
            areas: self.areas,
            paused: self.paused,
            copied_ns: self.copied_ns,
            unread: self.unread,
            idle: self.idle,
            ..Image::default()
        };
        image.set_memory(self.wanted, copy)?;
        Ok(image)
    }
}

/// Returns the result of reading a process that runs, or the error that the process did not answer.
fn answered<T>(pid: u32, read: Result<T, Late>) -> Result<T> {
    read.map_err(|_| no_answer(pid))
}

/// Returns the error that a process does not answer.
pub(super) fn no_answer(pid: u32) -> anyhow::Error {
    anyhow!(
        "process {pid} did not answer, and runs on: a page of its memory cannot be read (a file whose server does not \
         answer, such as FUSE or NFS, or userfaultfd), or others hold the lock of its address space"
    )
}

/// Takes an image of a process whose threads the kernel holds already, with no limit on the time as long as the process
/// answers.
fn take_stopped(process: &Process, stopped: &Stopped) -> Result<Image> {
    let pid = process.pid();
    let (copied_ns, start) = (clock::monotonic_ns(), Instant::now());
    expect_known(process)?;
    let Ok(threads) = stopped.registers() else {
        bail!("no time to read registers");
    };
    let mut crew = Crew::start()?;
    let mut pages = Pages::open(pid)?;
    let (areas, found) = answered(pid, pages.list(&mut crew, false, Until::PROGRESS)?)?;
    let wanted = found.wanted;
    let bytes = page_runs::bytes(&wanted);
    expect_memory_to_copy(pid, bytes)?;
    let mut buffers = CopyBuffers::empty(bytes)?;
    let unread = buffers.copy(&mut crew, pid, &wanted, Until::PROGRESS)?;
    let unread = page_runs::bytes(&answered(pid, unread)?);
    process.expect_running()?;
    let copied = Copied {
        threads,
        areas,
        due: wanted.clone(),
        wanted,
        unread,
        idle: None,
        paused: start.elapsed(),
        copied_ns,
    };
    let copy = buffers.finish(&copied.wanted, &copied.due)?;
    copied.image(pid, copy)
}

/// Fails if no image of the process can be taken, or only an image that lacks a part.
fn check(process: &Process) -> Result<()> {
    let pid = process.pid();
    if let Some(tracer) = stop::tracer(pid, pid) {
        bail!(stop::traced_by(pid, tracer));
    }
    expect_known(process)
}

/// Fails if an image of the process would lack a part, or would not show the program's own memory.
fn expect_known(process: &Process) -> Result<()> {
    let pid = process.pid();
    process.expect_native_program()?;
    let areas = areas(pid)?;
    let code = areas.iter().filter(|area| area.mapping.executable);
    if let Some(name) = translator::find_in(code.map(|area| area.mapping.path.as_path())) {
        bail!(
            "process {pid} is run by {name}, whose own memory is what there is to see: run the \
             program without it"
        );
    }
    let status = Values::read(proc::file(pid, "status")).unwrap_or_default();
    let swapped = status.get_or_zero("VmSwap");
    if swapped > 0 {
        bail!(
            "process {pid} has {} kB in swap, which would be swapped in while it is stopped; if there is enough memory \
             for it: swapoff -a && swapon -a",
            swapped / 1024
        );
    }
    Ok(())
}

/// Fails if the machine has less memory available than it takes to hold the copy and to judge it.
fn expect_memory_to_copy(pid: u32, bytes: u64) -> Result<()> {
    // Blocks and the references between them take 0.7 times as much as the memory that they are in. Small blocks take
    // more: these are checked for after the walk, which counts blocks.
    let needed = bytes + bytes / 10 * 7;
    let what = format!("a copy of process {pid}, and what is made of it, takes");
    expect_memory(&what, needed, available())
}

/// Fails if the machine has less memory available than it takes to judge the blocks of a process whose image was
/// walked.
///
/// # Errors
/// If memory is short: small blocks take more than [`Request::take`] has predicted.
pub fn expect_memory_to_judge(pid: u32, blocks: usize) -> Result<()> {
    let needed = blocks as u64 * JUDGED_BYTES;
    let what = format!("to classify the {blocks} blocks of process {pid} takes");
    expect_memory(&what, needed, available())
}

/// Fails if more memory is needed than is free, both in bytes.
fn expect_memory(what: &str, needed: u64, free: u64) -> Result<()> {
    if needed > free {
        bail!(
            "{what} about {} MB, and the machine has {} MB available",
            needed >> 20,
            free >> 20
        );
    }
    Ok(())
}

/// Returns the bytes of memory that programs can allocate without swapping.
fn available() -> u64 {
    let memory = Values::read("/proc/meminfo").unwrap_or_default();
    memory.get("MemAvailable").unwrap_or(u64::MAX)
}

/// Returns the mappings of a process.
///
/// # Errors
/// If the process has exited or does not answer, or if its mappings may not be read.
pub fn areas(pid: u32) -> Result<Vec<Area>> {
    let maps = match reader::read_file(proc::living_thread(pid), "maps", MAPS) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(pages::without_memory(pid));
        }
        maps => maps.with_context(|| format!("failed to read the mappings of process {pid}"))?,
    };
    let areas = Area::parse_list(&maps);
    if areas.is_empty() {
        return Err(pages::without_memory(pid));
    }
    Ok(areas)
}

fn comm(path: &str) -> Vec<u8> {
    let comm = fs::read(path).unwrap_or_default();
    comm.strip_suffix(b"\n").unwrap_or(&comm).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_there_is_no_room_for_is_refused_with_the_sizes() {
        assert!(expect_memory("it takes", 5 << 20, 5 << 20).is_ok());
        let refused = expect_memory("it takes", (5 << 20) + 1, 5 << 20);
        assert_eq!(
            refused.expect_err("too much").to_string(),
            "it takes about 5 MB, and the machine has 5 MB available"
        );
        assert!(expect_memory_to_judge(7, 1).is_ok());
        let refused = expect_memory_to_judge(7, usize::MAX / 128).expect_err("too much");
        assert!(refused.to_string().contains("blocks of process 7"));
    }

    #[test]
    fn this_machine_has_memory() {
        assert!((1 << 20..1 << 50).contains(&available()));
    }
}
