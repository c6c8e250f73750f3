//! Whether the heap of a process grows, by which types of blocks, and what kind of growth that is: found in several
//! images of it, with nothing traced.
//!
//! Images are taken as the [`schedule`] says; what is kept of each is a point, and its blocks by type. The last one
//! also tells which of the blocks that are new something refers to; what nothing does is looked for again a moment
//! later, as what is on its way from one place to another looks the same in one image.

pub(crate) mod args;
mod children;
mod look;
mod report;
mod schedule;

use std::collections::{HashMap, HashSet};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use memtools::heap::capture::Request;
use memtools::heap::growth::follow::Follower;
use memtools::heap::growth::judge::{self, Judgement, Point};
use memtools::process::container::Home;
use memtools::process::proc::Process;
use memtools::run::poll::Poller;
use memtools::run::privileges;

use crate::args::Args;
use crate::rows::ProcessName;
use children::Children;
use look::{BlockPlace, Look};
use report::{GrowthRow, TypeRow};
use schedule::Schedule;

/// Points without which there is no slope.
const LEAST_POINTS: usize = 3;
/// Time between the last image and the one in which what was lost is looked for again.
const BETWEEN: Duration = Duration::from_millis(100);

/// Watches the process for so long, and shows how it has grown.
///
/// # Errors
/// If no images of the process can be taken, or too few.
pub(crate) fn run(args: &Args, period: Duration) -> Result<ExitCode> {
    let process = Process::open(args.pid[0])?;
    let (mut poller, mut output) = args.start()?;
    privileges::keep_what_tracing_takes(args.heap.capabilities())?;
    poller.watch_exit(&process);
    let request = args.heap.request(&process, None);
    let mut study = Study::begin(&request, args)?;
    study.conduct(period, args.top, &mut poller)?;
    let (growth, types) = study.rows(args.top)?;
    output.row(&growth)?;
    types.iter().try_for_each(|row| output.row(row))?;
    output.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// Why a wait has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waited {
    /// The time has come.
    Due,
    /// A signal asks for the end.
    Stopped,
    /// The process has exited.
    Exited,
}

/// A process that is watched.
struct Study<'a> {
    request: &'a Request<'a>,
    begin: Instant,
    /// CLOCK_MONOTONIC of the first image.
    begin_ns: u64,
    /// What tells the program that it runs from one after an exec.
    program: Vec<u8>,
    name: ProcessName,
    allocator: String,
    /// What it takes to look at an image, and for how long the process stood still.
    took: (Duration, Duration),
    pauses_us: Vec<u64>,
    follower: Follower,
    points: Vec<Point>,
    /// Images that could not be taken, or whose heap made no sense.
    left_out: u64,
    children: Children,
    found: Found,
}

/// What the last images say about who refers to blocks.
#[derive(Debug, Default)]
struct Found {
    /// Blocks that nothing refers to; None if that is not known.
    lost: Option<HashSet<BlockPlace>>,
    /// What holds groups of blocks that grow, by their numbers.
    holders: HashMap<u32, String>,
}

impl<'a> Study<'a> {
    /// Takes the first image.
    fn begin(request: &'a Request<'a>, args: &Args) -> Result<Self> {
        let process = request.process;
        let home = Home::of_process(process.pid());
        let (begin, program) = (Instant::now(), program(process));
        let Some(look) = Look::take(request)? else {
            bail!(
                "the heap of process {} makes no sense in any of 3 images; --heap tells where",
                process.pid()
            );
        };
        let allocator = look.heap.allocators.first();
        let mut study = Self {
            request,
            begin,
            begin_ns: look.image.copied_ns,
            program,
            name: ProcessName::of_image(&look.image, home, args),
            allocator: allocator.map_or(String::new(), |allocator| allocator.name.clone()),
            took: (Duration::ZERO, look.image.paused),
            pauses_us: Vec::new(),
            follower: Follower::default(),
            points: Vec::new(),
            left_out: 0,
            children: Children::of(process.pid()),
            found: Found::default(),
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
        eprint!("memleak: process {pid} is watched for {period:.1} s, by {images} images");
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
            // What has exited in the middle of an image is judged by those before.
            match outcome {
                Err(_) if self.request.process.exited() => return Ok(()),
                Ok(()) if !is_last => {}
                outcome => return outcome,
            }
        }
    }

    /// Waits, and looks meanwhile for processes that this one starts.
    fn wait(&mut self, until: Instant, poller: &mut Poller) -> Result<Waited> {
        loop {
            let wake = poller.wait(Some(until.min(self.children.next())))?;
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

    /// Takes an image, and adds its point; None if it is left out.
    fn look(&mut self) -> Result<Option<Look>> {
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

    /// Takes an image. If that fails it is told, as those before tell something, too; unless the process has exited.
    fn take_or_tell(&self) -> Result<Option<Look>> {
        match Look::take(self.request) {
            Err(error) if !self.request.process.exited() => {
                eprintln!("memleak: an image is left out: {error:#}");
                Ok(None)
            }
            taken => taken,
        }
    }

    fn add(&mut self, look: &Look) {
        let ns = look.image.copied_ns.saturating_sub(self.begin_ns);
        self.points.push(look.point(ns as f64 / 1e9));
        self.pauses_us.push(look.image.paused.as_micros() as u64);
        self.follower.add(&look.heap, &look.names);
    }

    /// Takes the last image, and finds what refers to the blocks in it; what is lost has to be so in another one.
    fn look_at_last(&mut self, top: usize) -> Result<()> {
        let Some(look) = self.look()? else {
            return Ok(());
        };
        let reach = look.reach();
        let groups: HashSet<u32> = self.growing().into_iter().take(top).collect();
        self.found.holders = look.holders(&reach, self.follower.blocks(), &groups);
        let lost = look::lost(&look, &reach)?;
        // The first copy is given back before there is another one.
        drop((look, reach));
        let Some(mut lost) = lost.filter(|lost| !lost.is_empty()) else {
            self.found.lost = Some(HashSet::new());
            return Ok(());
        };
        thread::sleep(BETWEEN);
        if let Some(again) = self.take_or_tell()? {
            self.pauses_us.push(again.image.paused.as_micros() as u64);
            let still = look::lost(&again, &again.reach())?.unwrap_or_default();
            lost.retain(|place| still.contains(place));
            self.found.lost = Some(lost);
        }
        Ok(())
    }

    fn seconds(&self) -> Vec<f64> {
        self.points.iter().map(|point| point.seconds).collect()
    }

    /// The groups that grow, by their numbers, those that grow fastest first.
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

    /// What there is to print, of as many types.
    fn rows(&self, top: usize) -> Result<(GrowthRow, Vec<TypeRow>)> {
        let pid = self.request.process.pid();
        let points = self.points.len();
        if points < LEAST_POINTS {
            let why = if self.request.process.exited() {
                format!("process {pid} has exited")
            } else {
                "it was ended early, or others were left out".into()
            };
            bail!(
                "{points} images tell no growth, which takes {LEAST_POINTS}: {why}; watch for longer"
            );
        }
        Ok(report::rows(self, top))
    }
}

/// What is new with each program that a process executes: its auxiliary vector, which has random addresses.
fn program(process: &Process) -> Vec<u8> {
    std::fs::read(format!("/proc/{}/auxv", process.pid())).unwrap_or_default()
}
