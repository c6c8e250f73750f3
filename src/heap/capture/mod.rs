//! Capture of the image of a live process.
//!
//! [`Request::take`] checks first what can go wrong. It refuses, with the reason, rather than hold a process for
//! longer than allowed. Then it allocates the buffers for the copy (`buffers`) and stops the threads (`stop`). While
//! they stand still, it copies (`copy`) their registers, the mappings, and the pages that are present (`pages`).
//! Nothing is judged until the threads run again. Most pages can be copied before the stop, where the kernel marks
//! pages that are written later (`soft_dirty`). A command can instead be held at its exit, and be copied there
//! ([`at_exit`]).

#[cfg(target_arch = "x86_64")]
#[path = "x86_64.rs"]
mod arch;
pub mod at_exit;
mod buffers;
mod copy;
mod pages;
mod soft_dirty;
mod stop;
mod tries;

use std::fs;
use std::io;
use std::panic;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

use crate::heap::area::Area;
use crate::heap::clear_refs;
use crate::heap::idle::Watch;
use crate::heap::image::{Image, Thread};
use crate::heap::page_runs::{self, PageRuns};
use crate::heap::realtime::Realtime;
use crate::host::values::Values;
use crate::print::{clock, text};
use crate::process::proc;
use crate::process::proc::Process;
use crate::process::translator;

use buffers::CopyBuffers;
use pages::{Found, Pages};
use stop::{Stopped, UnstoppedThread};
use tries::Tries;

/// Number of times that a process may outgrow the buffers for its copy.
const GROWN: usize = 3;
/// Bytes by which a process may grow between the look at its size and its stop.
const SLACK: u64 = 16 << 20;
/// Predicted time to stop a thread and to read its registers. 751 threads took 21 to 23 ms.
const THREAD: Duration = Duration::from_micros(30);
/// Ratio of the time of a copy from another process to that of a copy of as much within a process. 1 GB took 69 to 72
/// ms instead of 36 to 39 ms on two idle CPUs, as each page has to be found and held.
const COPY: f64 = 2.0;
/// Predicted time to find the pages of a gigabyte.
const FIND: Duration = Duration::from_millis(5);

/// Bytes of memory that it takes to judge a block, with the references in it. 77 bytes were measured, of ten million
/// blocks.
const JUDGED_BYTES: u64 = 80;

/// Outcome of one try at an image.
enum Taken {
    Image(Box<Image>),
    /// A thread did not stop in time.
    Late(UnstoppedThread),
    /// The process has outgrown the buffers for its copy.
    Outgrown,
}

/// Parameters of the capture of a process.
#[derive(Debug)]
pub struct Request<'a> {
    /// Target process, which must be a 64-bit program.
    pub process: &'a Process,
    /// Limit on the predicted time for which the process's threads stand still.
    pub max_pause: Duration,
    /// Whether most of the process's memory is copied before the process stands still, and during the stop only what
    /// has been written since then. This takes CAP_SYS_ADMIN.
    pub pre_copy: bool,
    /// Watch of the process by which the image tells which pages are idle, if that is wanted.
    pub idle: Option<&'a Watch>,
}

impl Request<'_> {
    /// Takes an image. Shortcomings are reported on stderr. If a thread does not stop in time,
    /// all threads go on, and further tries follow, over about 3 seconds.
    ///
    /// # Errors
    /// If the process is traced already, has memory in swap, would stand still for longer than allowed, is run by a
    /// binary translator, has a thread that never stops in time, or has exited. Also if there is no memory for a
    /// copy, or, for a copy before the stop, if the kernel does not tell which pages are written after that, or if the
    /// process itself uses what tells it. In each case the process runs on.
    pub fn take(&self) -> Result<Image> {
        let process = self.process;
        let pid = process.pid();
        check(process)?;
        if self.pre_copy
            && let Some(number) = clear_refs::open_in(pid)
        {
            bail!(
                "process {pid} has its own clear_refs open (file descriptor {number}): it follows what it writes by the \
                 marks that --pre-copy clears, and would miss some: leave out --pre-copy"
            );
        }
        if self.pre_copy && !soft_dirty::is_supported()? {
            bail!(
                "this kernel does not mark the pages that a process writes (CONFIG_MEM_SOFT_DIRTY), so that nothing can be \
                 copied before process {pid} stands still: leave out --pre-copy"
            );
        }
        let rate = copy::rate()?;
        let mut pages = Pages::open(pid)?;
        let (mut tries, mut grown) = (Tries::begin(), 0);
        while grown < GROWN {
            let buffers = self.allocate_buffers(&mut pages, rate)?;
            // When a try's thread ends, the kernel releases a target thread that the try has asked to stop and that
            // was late.
            let taken = thread::scope(|scope| {
                let taker = scope.spawn(|| self.stop_and_copy(&mut pages, buffers, rate));
                taker
                    .join()
                    .unwrap_or_else(|panicked| panic::resume_unwind(panicked))
            });
            match taken? {
                Taken::Image(image) => {
                    if let Some(message) = tries.message() {
                        crate::message!("{message}");
                    }
                    return Ok(*image);
                }
                Taken::Late(late) => tries.wait(late)?,
                Taken::Outgrown => grown += 1,
            }
        }
        bail!("process {pid} grew faster than room for its copy was made, {GROWN} times; try again")
    }

    /// Allocates the buffers for the copy, and copies what can be copied before the stop.
    fn allocate_buffers(&self, pages: &mut Pages, rate: f64) -> Result<CopyBuffers> {
        let pid = self.process.pid();
        let (_, found) = list_pages(pid, pages, false)?;
        let bytes = page_runs::bytes(&found.wanted);
        let mut work = Work {
            all: bytes,
            due: bytes,
            threads: fs::read_dir(format!("/proc/{pid}/task")).map_or(1, Iterator::count),
        };
        if !self.pre_copy {
            self.expect_allowed_pause(&work, rate)?;
        }
        let capacity = bytes + bytes / 16 + SLACK;
        expect_memory_to_copy(pid, capacity)?;
        let mut buffers = CopyBuffers::empty(capacity)?;
        if self.pre_copy {
            buffers.pre_copy(pid, pages, found.wanted)?;
            let (_, found) = list_pages(pid, pages, true)?;
            work.all = page_runs::bytes(&found.wanted);
            work.due = page_runs::bytes(&pending_pages(pid, pages, &buffers, &found)?);
            self.expect_allowed_pause(&work, rate)?;
            let late = work.due + work.due / 4 + SLACK;
            let what = format!("a copy of what process {pid} writes meanwhile takes");
            expect_memory(&what, late, available())?;
            buffers.allocate_stop_buffer(late)?;
        }
        Ok(buffers)
    }

    fn stop_and_copy(
        &self,
        pages: &mut Pages,
        mut buffers: CopyBuffers,
        rate: f64,
    ) -> Result<Taken> {
        let pid = self.process.pid();
        let realtime = Realtime::begin();
        let start = Instant::now();
        let stopped = match Stopped::stop(pid)? {
            Ok(stopped) => stopped,
            Err(late) => return Ok(Taken::Late(late)),
        };
        let copied_ns = clock::monotonic_ns();
        let threads = stopped.registers();
        let (areas, found) = list_pages(pid, pages, self.pre_copy)?;
        let due = pending_pages(pid, pages, &buffers, &found)?;
        let wanted = found.wanted;
        if !buffers.has_capacity_for(&wanted, &due) {
            return Ok(Taken::Outgrown);
        }
        let work = Work {
            all: page_runs::bytes(&wanted),
            due: page_runs::bytes(&due),
            threads: stopped.count(),
        };
        let foretold = work.predict_pause(rate);
        if foretold > self.max_pause {
            drop(stopped);
            return Err(self.refusal(&work, foretold));
        }
        let idle = self
            .idle
            .map(|watch| watch.sample(pages.pagemap(), &wanted));
        let mut idle = idle.transpose()?;
        let unread = buffers.copy(pid, &due)?;
        drop(stopped);
        let paused = start.elapsed();
        if let (Some(watch), Some(pages)) = (self.idle, &mut idle) {
            pages.reclaim_scanned = watch.reclaim_scanned();
        }
        if let Some(error) = realtime.refused() {
            crate::message!(
                "without real-time priority (SCHED_FIFO: {error}), the pause is longer on a busy machine"
            );
        }
        drop(realtime);
        self.process.expect_running()?;
        if self.pre_copy {
            crate::message!(
                "of {} of process {pid}, {} were copied while it stood still",
                text::bytes(work.all),
                text::bytes(work.due)
            );
        }
        let mut image = Image {
            areas,
            paused,
            copied_ns,
            unread: page_runs::bytes(&unread),
            idle,
            ..image_without_memory(pid, threads)
        };
        let copy = buffers.finish(&wanted, &due)?;
        image.set_memory(wanted, copy)?;
        Ok(Taken::Image(Box::new(image)))
    }

    /// Fails if the predicted pause is longer than allowed.
    fn expect_allowed_pause(&self, work: &Work, rate: f64) -> Result<()> {
        let foretold = work.predict_pause(rate);
        if foretold > self.max_pause {
            return Err(self.refusal(work, foretold));
        }
        Ok(())
    }

    /// Returns the error about a pause that would be too long. The process must run by then, as this function may try
    /// whether the kernel has soft-dirty marks.
    fn refusal(&self, work: &Work, foretold: Duration) -> anyhow::Error {
        let or = if !self.pre_copy && soft_dirty::is_supported().unwrap_or(false) {
            ", or have most of it copied before: --pre-copy"
        } else {
            ""
        };
        anyhow!(
            "process {} would stand still for about {} ms ({} MB of memory, {} threads), \
             more than --max-pause {} allows; if that does no harm: --max-pause {}{or}",
            self.process.pid(),
            foretold.as_millis(),
            work.due / 1_000_000,
            work.threads,
            self.max_pause.as_millis(),
            (foretold.as_millis() * 3 / 2).next_multiple_of(10)
        )
    }
}

/// Amount of work that is done while a process stands still.
struct Work {
    /// Bytes of the process's memory.
    all: u64,
    /// Bytes that are copied during the stop.
    due: u64,
    threads: usize,
}

impl Work {
    /// Predicts how long the work takes. `rate` is the speed of a copy within a process, in bytes per second.
    fn predict_pause(&self, rate: f64) -> Duration {
        let threads = THREAD * u32::try_from(self.threads).unwrap_or(u32::MAX);
        let copy = Duration::from_secs_f64(self.due as f64 / rate * COPY);
        threads + FIND.mul_f64(self.all as f64 / 1e9) + copy
    }
}

/// Takes an image of a process whose threads all stand still already, with no limit on the time.
fn take_stopped(process: &Process, stopped: &Stopped) -> Result<Image> {
    let pid = process.pid();
    let (copied_ns, start) = (clock::monotonic_ns(), Instant::now());
    expect_known(process)?;
    let threads = stopped.registers();
    let (areas, found) = list_pages(pid, &mut Pages::open(pid)?, false)?;
    let wanted = found.wanted;
    let bytes = page_runs::bytes(&wanted);
    expect_memory_to_copy(pid, bytes)?;
    let mut buffer = copy::buffer(usize::try_from(bytes)?)?;
    let unread = copy::copy(pid, &wanted, &mut buffer, &mut copy::staging_buffers()?)?;
    process.expect_running()?;
    let mut image = Image {
        areas,
        paused: start.elapsed(),
        copied_ns,
        unread: page_runs::bytes(&unread),
        ..image_without_memory(pid, threads)
    };
    image.set_memory(wanted, buffer)?;
    Ok(image)
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
            "process {pid} has {} kB in swap, which would be read back while it stands still; \
             once there is room for it: swapoff -a && swapon -a",
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
    let what = format!("to judge the {blocks} blocks of process {pid} takes");
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

/// Returns the mappings of the process, and its pages that are to be copied. With `marks`, also finds the pages that
/// may have been written.
fn list_pages(pid: u32, pages: &mut Pages, marks: bool) -> Result<(Vec<Area>, Found)> {
    let areas = areas(pid)?;
    let found = listed(pid, pages.find(&areas, marks))?;
    Ok((areas, found))
}

/// Returns the pages that are still to be copied, of those that were found.
fn pending_pages(
    pid: u32,
    pages: &Pages,
    buffers: &CopyBuffers,
    found: &Found,
) -> Result<PageRuns> {
    listed(pid, buffers.pending(pages, found))
}

/// Explains an error of reading a process's page table. Of an address space that is gone, PAGEMAP_SCAN fails, and
/// pagemap has nothing to read.
fn listed<T>(pid: u32, read: io::Result<T>) -> Result<T> {
    let is_gone = |error: &io::Error| {
        error.raw_os_error() == Some(libc::ESRCH) || error.kind() == io::ErrorKind::UnexpectedEof
    };
    match read {
        Err(error) if is_gone(&error) => Err(without_memory(pid)),
        read => read.with_context(|| format!("failed to list the pages of process {pid}")),
    }
}

fn areas(pid: u32) -> Result<Vec<Area>> {
    let maps = fs::read(proc::file(pid, "maps"))
        .with_context(|| format!("failed to read the mappings of process {pid}"))?;
    let areas = Area::parse_list(&maps);
    if areas.is_empty() {
        return Err(without_memory(pid));
    }
    Ok(areas)
}

/// Returns the error about a process whose memory is gone. A process that exits and one in the middle of an exec look
/// the same.
fn without_memory(pid: u32) -> anyhow::Error {
    anyhow!(
        "process {pid} has exited or executed another program while it was looked at; if it still runs, try again"
    )
}

/// Makes an image without memory: the process and its threads, with their names.
fn image_without_memory(pid: u32, mut threads: Vec<Thread>) -> Image {
    for thread in &mut threads {
        thread.comm = comm(&format!("/proc/{pid}/task/{}/comm", thread.tid));
    }
    Image {
        pid,
        comm: comm(&format!("/proc/{pid}/comm")),
        threads,
        ..Image::default()
    }
}

fn comm(path: &str) -> Vec<u8> {
    let comm = fs::read(path).unwrap_or_default();
    comm.strip_suffix(b"\n").unwrap_or(&comm).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_is_foretold_by_bytes_and_threads() {
        let foretell =
            |all, due, threads| Work { all, due, threads }.predict_pause(10e9).as_millis();
        assert_eq!(foretell(1_000_000_000, 1_000_000_000, 1), 205);
        assert_eq!(foretell(1_000_000_000, 0, 1000), 35);
    }

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
    fn a_page_table_that_is_gone_is_explained() {
        let gone = [
            io::Error::from_raw_os_error(libc::ESRCH),
            io::ErrorKind::UnexpectedEof.into(),
        ];
        for error in gone {
            let explained = listed::<()>(7, Err(error)).expect_err("an error");
            assert!(explained.to_string().contains("has exited or executed"));
        }
        let other = listed::<()>(7, Err(io::Error::from_raw_os_error(libc::EIO)));
        let other = other.expect_err("an error").to_string();
        assert_eq!(other, "failed to list the pages of process 7");
    }

    #[test]
    fn this_machine_has_memory() {
        assert!((1 << 20..1 << 50).contains(&available()));
    }
}
