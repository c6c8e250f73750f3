//! Growth of a process's heap: whether the heap grows, by which types of blocks, and what kind of growth that is. The
//! answers are found in several images of the process, with nothing traced.
//!
//! Images are taken by the [`schedule`]. A point and the blocks by type are kept of each image. The last image also
//! shows which new blocks nothing refers to. These are looked for again a moment later, in one more image: a reference
//! that is in transit from one place to another is missing in a single image, too.

mod children;
mod report;
mod schedule;
mod snapshot;

use std::collections::{HashMap, HashSet};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use memtools::heap::capture::Request;
use memtools::heap::growth::follow::Follower;
use memtools::heap::growth::judge::{self, Judgement, Point};
use memtools::heap::runtimes::Runtime;
use memtools::print::output::Output;
use memtools::process::container::{CgroupInfo, ProcessName};
use memtools::process::proc::{self, Process};
use memtools::run::poll::Poller;
use memtools::verdict;

use children::Children;
use report::{GrowthRow, TypeRow};
use schedule::Schedule;
use snapshot::{BlockId, HeapSnapshot};

/// Minimum number of points for a slope.
const MIN_POINTS: usize = 3;

/// Watches the process for `period`, and prints how it has grown.
///
/// # Errors
/// If no images of the process can be taken, or too few.
pub(crate) fn run<'a>(
    request: &Request<'a>,
    container: bool,
    period: Duration,
    top: usize,
    poller: &mut Poller<'a>,
    output: &mut Output,
) -> Result<()> {
    poller.watch_exit(request.process);
    let mut study = Study::begin(request, container)?;
    study.conduct(period, top, poller)?;
    let (growth, types) = study.rows(top)?;
    output.row(&growth)?;
    types.iter().try_for_each(|row| output.row(row))
}

/// Reason why a wait has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waited {
    /// The time is over.
    Due,
    /// A signal asks for the end.
    Stopped,
    /// The process has exited.
    Exited,
}

/// Process that is watched, with what was found until now.
struct Study<'a> {
    request: &'a Request<'a>,
    begin: Instant,
    /// CLOCK_MONOTONIC of the first image.
    begin_ns: u64,
    /// Identity of the executed program, which is new after an exec: see [`program`].
    program: Vec<u8>,
    name: ProcessName,
    allocator: String,
    /// Duration of the first look, and the time that the process stood still for its image.
    took: (Duration, Duration),
    pauses_us: Vec<u64>,
    follower: Follower,
    points: Vec<Point>,
    /// Number of images that could not be taken, or whose heap made no sense.
    left_out: u64,
    children: Children,
    found: LastReferences,
    /// Runtime with a heap of its own.
    runtime: Option<Runtime>,
}

/// References to blocks, as found in the last images.
#[derive(Debug, Default)]
struct LastReferences {
    /// Blocks that nothing refers to. None if they are not known.
    lost: Option<HashSet<BlockId>>,
    /// Bytes of new blocks that only cycles of CPython's objects hold.
    cycles: u64,
    /// Holders of the groups that grow, by the groups' numbers.
    holders: HashMap<u32, String>,
}

impl<'a> Study<'a> {
    /// Takes the first image.
    fn begin(request: &'a Request<'a>, container: bool) -> Result<Self> {
        let process = request.process;
        let cgroup_info = CgroupInfo::of_process(process.pid());
        let (begin, program) = (Instant::now(), program(process));
        let Some(look) = HeapSnapshot::take(request)? else {
            bail!(
                "the heap of process {} makes no sense in any of 3 images; --layout shows where",
                process.pid()
            );
        };
        let allocator = look.heap.allocators.first();
        let mut study = Self {
            request,
            begin,
            begin_ns: look.image.copied_ns,
            program,
            name: verdict::process_name(&look.image, cgroup_info, container),
            allocator: allocator.map_or(String::new(), |allocator| allocator.name.clone()),
            took: (Duration::ZERO, look.image.paused),
            pauses_us: Vec::new(),
            follower: Follower::default(),
            points: Vec::new(),
            left_out: 0,
            children: Children::of(process.pid()),
            found: LastReferences::default(),
            runtime: Runtime::find(&look.image.areas),
        };
        study.add(&look);
        study.took.0 = study.begin.elapsed();
        Ok(study)
    }

    /// Takes the other images, until the time is over, a signal comes, or the process exits.
    fn conduct(&mut self, wanted: Duration, top: usize, poller: &mut Poller) -> Result<()> {
        let schedule = Schedule::new(wanted, self.took.1, self.took.0);
        let (pid, period) = (self.request.process.pid(), schedule.period().as_secs_f64());
        let images = schedule.images();
        eprint!("heapscan: process {pid} is watched for {period:.1} s, by {images} images");
        if schedule.period() > wanted {
            eprint!(
                "; each takes {:.1} s to look through",
                self.took.0.as_secs_f64()
            );
        }
        eprintln!();
        loop {
            let (due, is_last) = schedule.next(self.begin.elapsed());
            let waited = self.wait(self.begin + due, poller)?;
            if waited == Waited::Exited {
                return Ok(());
            }
            let is_last = is_last || waited == Waited::Stopped;
            let outcome = if is_last {
                self.look_at_last(top)
            } else {
                self.look().map(drop)
            };
            // A process that has exited during an image is judged by the images before.
            match outcome {
                Err(_) if self.request.process.exited() => return Ok(()),
                Ok(()) if !is_last => {}
                outcome => return outcome,
            }
        }
    }

    /// Waits until `until`, and meanwhile looks for processes that this process starts.
    fn wait(&mut self, until: Instant, poller: &mut Poller) -> Result<Waited> {
        loop {
            let wake = poller.wait(Some(until.min(self.children.next_poll())))?;
            if wake.exited {
                return Ok(Waited::Exited);
            }
            self.children.look();
            if wake.stop {
                return Ok(Waited::Stopped);
            }
            if Instant::now() >= until {
                return Ok(Waited::Due);
            }
        }
    }

    /// Takes an image, and adds its point. Returns None if the image is left out.
    fn look(&mut self) -> Result<Option<HeapSnapshot>> {
        let look = self.take_or_tell()?;
        let pid = self.request.process.pid();
        if program(self.request.process) != self.program {
            self.request.process.expect_running()?;
            bail!("process {pid} has become another program meanwhile (exec): start again");
        }
        match &look {
            Some(look) => self.add(look),
            None => self.left_out += 1,
        }
        Ok(look)
    }

    /// Takes an image. A failure is only printed, since the images before are of use, too. It is an error if the
    /// process has exited.
    fn take_or_tell(&self) -> Result<Option<HeapSnapshot>> {
        match HeapSnapshot::take(self.request) {
            Err(error) if !self.request.process.exited() => {
                eprintln!("heapscan: an image is left out: {error:#}");
                Ok(None)
            }
            taken => taken,
        }
    }

    fn add(&mut self, look: &HeapSnapshot) {
        let ns = look.image.copied_ns.saturating_sub(self.begin_ns);
        self.points.push(look.point(ns as f64 / 1e9));
        self.pauses_us.push(look.image.paused.as_micros() as u64);
        self.follower.add(&look.heap, &look.names);
    }

    /// Takes the last image, and finds what refers to the blocks in it. Blocks count as lost only if they are lost in
    /// one more image, too.
    fn look_at_last(&mut self, top: usize) -> Result<()> {
        let Some(mut look) = self.look()? else {
            return Ok(());
        };
        let reach = look.reach()?;
        let groups: HashSet<u32> = self.growing().into_iter().take(top).collect();
        self.found.holders = look.holders(&reach, self.follower.blocks(), &groups);
        self.found.cycles = look.new_in_cycles(&reach, self.follower.blocks());
        let lost = snapshot::lost(&look, &reach);
        // The first copy is freed before the second one is taken.
        drop((look, reach));
        self.found.lost = match lost {
            Some(lost) if !lost.is_empty() => self.still_lost(&lost)?,
            none_or_unknown => none_or_unknown,
        };
        Ok(())
    }

    /// Returns those of the blocks that are lost in one more image, too. Returns None if that is not known.
    fn still_lost(&mut self, lost: &HashSet<BlockId>) -> Result<Option<HashSet<BlockId>>> {
        thread::sleep(verdict::BETWEEN);
        let Some(mut again) = self.take_or_tell()? else {
            return Ok(None);
        };
        self.pauses_us.push(again.image.paused.as_micros() as u64);
        let reach = again.reach()?;
        let still = snapshot::lost(&again, &reach);
        Ok(still.map(|still| lost & &still))
    }

    fn seconds(&self) -> Vec<f64> {
        self.points.iter().map(|point| point.seconds).collect()
    }

    /// Returns the numbers of the groups that grow, those that grow fastest first.
    fn growing(&self) -> Vec<u32> {
        let seconds = self.seconds();
        let groups = (0..).zip(self.follower.groups());
        let mut growing: Vec<_> = groups
            .filter_map(|(number, group)| Some((number, judge::judge_type(&seconds, group)?)))
            .filter(|(_, judged)| judged.judgement == Judgement::Growing)
            .collect();
        growing.sort_by(|(_, one), (_, other)| other.line.slope.total_cmp(&one.line.slope));
        growing.into_iter().map(|(number, _)| number).collect()
    }

    /// Returns the rows to print, for up to `top` types.
    fn rows(&self, top: usize) -> Result<(GrowthRow, Vec<TypeRow>)> {
        let pid = self.request.process.pid();
        let points = self.points.len();
        if points < MIN_POINTS {
            let why = if self.request.process.exited() {
                format!("process {pid} has exited")
            } else {
                "it was ended early, or others were left out".into()
            };
            bail!(
                "{points} images tell no growth, which takes {MIN_POINTS}: {why}; watch for longer"
            );
        }
        Ok(report::rows(self, top))
    }
}

/// Returns the process's auxiliary vector, which has random addresses and so is new with each program that the process
/// executes.
fn program(process: &Process) -> Vec<u8> {
    std::fs::read(proc::file(process.pid(), "auxv")).unwrap_or_default()
}
