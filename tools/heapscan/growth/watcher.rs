//! Thread that takes the images of a process, and examines them.
//!
//! A point and the blocks by type are kept of each image. The last image also shows which new blocks nothing refers to.
//! These are looked for again a moment later, in one more image: a reference that is in transit from one place to
//! another is missing in a single image, too.

use std::collections::HashSet;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use memtools::heap::capture::Request;
use memtools::heap::growth::follow::Follower;
use memtools::heap::runtimes::Runtime;
use memtools::process::container::CgroupInfo;
use memtools::process::proc::{self, Process};
use memtools::verdict;

use super::schedule::Schedule;
use super::snapshot::{self, BlockId, HeapSnapshot};
use super::{LastReferences, Study};

/// What was found until now. None before the first image is examined. The lock is never held for long.
pub(super) type Shared = Arc<Mutex<Option<Study>>>;

/// Reason why no further images are to be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// A signal has come: one last image is.
    Stopped,
    /// The process has exited.
    Exited,
}

/// Process that is watched.
pub(super) struct Watcher {
    request: Request<'static>,
    container: bool,
    begin: Instant,
    wanted: Duration,
    /// Maximum number of types to find holders of.
    top: usize,
    ends: Receiver<End>,
    /// Identity of the executed program, which is new after an exec: see [`program`].
    program: Vec<u8>,
    shared: Shared,
}

/// Locks what was found.
pub(super) fn lock(shared: &Shared) -> MutexGuard<'_, Option<Study>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watcher {
    /// Prepares to watch a process from a time on, and for a time.
    pub(super) fn new(
        request: Request<'static>,
        container: bool,
        (begin, wanted): (Instant, Duration),
        top: usize,
        ends: Receiver<End>,
    ) -> Self {
        Self {
            program: program(request.process),
            request,
            container,
            begin,
            wanted,
            top,
            ends,
            shared: Shared::default(),
        }
    }

    pub(super) fn shared(&self) -> Shared {
        self.shared.clone()
    }

    /// Takes the images, until the time is over, or an end is sent.
    ///
    /// # Errors
    /// If the first image cannot be taken, or if the process becomes another program.
    pub(super) fn watch(&self) -> Result<()> {
        let mut schedule = self.begin()?;
        loop {
            let (due, is_last) = schedule.next(self.begin.elapsed());
            let due = (self.begin + due).saturating_duration_since(Instant::now());
            let is_last = match self.ends.recv_timeout(due) {
                Err(RecvTimeoutError::Timeout) => is_last,
                Ok(End::Stopped) => true,
                Ok(End::Exited) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
            };
            let begin = Instant::now();
            let outcome = if is_last {
                self.look_at_last()
            } else {
                self.look().map(drop)
            };
            schedule.add(begin.elapsed());
            // A process that has exited during an image is judged by the images before.
            match outcome {
                Err(_) if self.request.process.exited() => return Ok(()),
                Ok(()) if !is_last => {}
                outcome => return outcome,
            }
        }
    }

    /// Takes the first image. Returns the times of the others.
    fn begin(&self) -> Result<Schedule> {
        let process = self.request.process;
        let pid = process.pid();
        let cgroup_info = CgroupInfo::of_process(pid);
        let Some(look) = HeapSnapshot::take(&self.request)? else {
            bail!(
                "the heap of process {pid} is inconsistent in each of 3 snapshots; --layout shows where"
            );
        };
        let allocator = match &look.without_heap {
            Some(why) => Err(why.clone()),
            None => Ok(look
                .heap
                .allocators
                .first()
                .map_or(String::new(), |one| one.name.clone())),
        };
        let mut study = Study {
            begin_ns: look.image.copied_ns,
            name: verdict::process_name(&look.image, cgroup_info, self.container),
            allocator,
            runtime: Runtime::find(&look.image.areas),
            planned: 0,
            pauses_us: Vec::new(),
            follower: Follower::default(),
            points: Vec::new(),
            left_out: 0,
            started: 0,
            found: LastReferences::default(),
        };
        study.add(&look);
        let schedule = Schedule::new(self.wanted, look.image.paused, self.begin.elapsed());
        study.planned = schedule.images() as usize;
        memtools::message!(
            "process {pid} is monitored for {:.1} s, in {} snapshots",
            self.wanted.as_secs_f64(),
            study.planned
        );
        *lock(&self.shared) = Some(study);
        Ok(schedule)
    }

    /// Changes what was found.
    fn update<T>(&self, change: impl FnOnce(&mut Study) -> T) -> Result<T> {
        let mut study = lock(&self.shared);
        Ok(change(
            study.as_mut().context("there is no first snapshot")?,
        ))
    }

    /// Takes an image, and adds its point. Returns None if the image is omitted.
    fn look(&self) -> Result<Option<HeapSnapshot>> {
        let look = self.take_or_tell()?;
        let pid = self.request.process.pid();
        if program(self.request.process) != self.program {
            self.request.process.expect_running()?;
            bail!("process {pid} has executed another program (exec): start again");
        }
        self.update(|study| match &look {
            Some(look) => study.add(look),
            None => study.left_out += 1,
        })?;
        Ok(look)
    }

    /// Takes an image. A failure is only printed, since the images before are of use, too. It is an error if the
    /// process has exited.
    fn take_or_tell(&self) -> Result<Option<HeapSnapshot>> {
        match HeapSnapshot::take(&self.request) {
            Err(error) if !self.request.process.exited() => {
                memtools::message!("snapshot skipped: {error:#}");
                Ok(None)
            }
            taken => taken,
        }
    }

    /// Takes the last image, and finds what refers to the blocks in it. Blocks count as lost only if they are lost in
    /// one more image, too, unless the time is over before. Without a heap, there are no blocks.
    fn look_at_last(&self) -> Result<()> {
        let look = self.look()?;
        let Some(mut look) = look.filter(|look| look.without_heap.is_none()) else {
            return Ok(());
        };
        let reach = look.reach()?;
        let newest = self.update(|study| {
            let groups: HashSet<u32> = study.growing().into_iter().take(self.top).collect();
            let blocks = study.follower.blocks();
            study.found.cycles = snapshot::new_in_cycles(&reach, blocks);
            snapshot::newest(&reach, blocks, &groups)
        })?;
        let holders = look.holders(&reach, newest);
        self.update(|study| study.found.holders = holders)?;
        let lost = snapshot::lost(&look, &reach);
        // The first copy is freed before the second one is taken.
        drop((look, reach));
        self.update(|study| study.found.lost.clone_from(&lost))?;
        let lost = match lost {
            Some(lost) if !lost.is_empty() => self.still_lost(&lost)?,
            none_or_unknown => none_or_unknown,
        };
        self.update(|study| study.found.lost = lost)
    }

    /// Returns those of the blocks that are lost in one more image, too. Returns None if that is not known.
    fn still_lost(&self, lost: &HashSet<BlockId>) -> Result<Option<HashSet<BlockId>>> {
        thread::sleep(verdict::BETWEEN);
        let Some(mut again) = self.take_or_tell()? else {
            return Ok(None);
        };
        let paused = again.image.paused.as_micros() as u64;
        self.update(|study| study.pauses_us.push(paused))?;
        let reach = again.reach()?;
        let still = snapshot::lost(&again, &reach);
        Ok(still.map(|still| lost & &still))
    }
}

/// Returns the process's auxiliary vector, which has random addresses and so is new with each program that the process
/// executes.
fn program(process: &Process) -> Vec<u8> {
    std::fs::read(proc::file(process.pid(), "auxv")).unwrap_or_default()
}
