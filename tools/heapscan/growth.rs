//! Growth of a process's heap: whether the heap grows, by which types of blocks, and what kind of growth that is. The
//! answers are found in several images of the process, with nothing traced.
//!
//! A thread takes the images by a schedule and examines them ([`watcher`]). This takes as long as it takes, so another
//! thread keeps the time: when the period is over, or soon after a signal, it prints what is known by then ([`run`]).

mod children;
mod report;
mod schedule;
mod snapshot;
mod watcher;

use std::collections::{HashMap, HashSet};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use memtools::heap::capture::Request;
use memtools::heap::growth::follow::Follower;
use memtools::heap::growth::judge::{self, Point, Trend};
use memtools::heap::runtimes::Runtime;
use memtools::print::output::Output;
use memtools::process::container::ProcessName;
use memtools::run::poll::Poller;
use memtools::run::priority;

use children::Children;
use report::{GrowthRow, TypeRow};
use snapshot::{BlockId, HeapSnapshot};
use watcher::{End, Watcher};

/// Minimum number of points for a slope.
const MIN_POINTS: usize = 3;
/// Part of the period by which its end may be late, if the last image is still examined.
const LATE: f64 = 0.05;
/// Time after a signal, or after the exit of the process, in which the examination may still end.
const GRACE: Duration = Duration::from_millis(600);
/// Longest time until the end of the examination is seen.
const STEP: Duration = Duration::from_millis(20);

/// Watches the process for `period`, and prints how it has grown.
///
/// # Errors
/// If no images of the process can be taken, or too few.
pub(crate) fn run(
    request: Request<'static>,
    container: bool,
    period: Duration,
    top: usize,
    poller: &mut Poller<'static>,
    output: &mut Output,
) -> Result<()> {
    let begin = Instant::now();
    // The period ends by the clock: on a busy machine, an examination that waits for its turn has no result by then.
    priority::raise();
    let process = request.process;
    poller.watch_exit(process);
    let mut children = Children::of(process.pid());
    let (end, ends) = mpsc::channel();
    let (finish, finished) = mpsc::channel();
    let watcher = Watcher::new(request, container, (begin, period), top, ends);
    let shared = watcher.shared();
    // The thread is not waited for: it ends with this process. The kernel then lets the watched process go on.
    thread::spawn(move || finish.send(watcher.watch()));

    let deadline = begin + period.mul_f64(1.0 + LATE);
    let is_finished = await_end(deadline, &mut children, &end, &finished, poller)?;
    let mut study = watcher::lock(&shared);
    let Some(study) = study.as_mut() else {
        bail!(too_few(0, process.exited(), process.pid()));
    };
    study.started = children.started();
    if !is_finished {
        let unknown = match study.found.lost {
            Some(_) => "unreachable blocks were not looked for a second time",
            None => "what references new blocks is unknown",
        };
        memtools::message!("the last snapshot was not examined in time: {unknown}");
    }
    let points = study.points.len();
    if points < MIN_POINTS {
        bail!(too_few(points, process.exited(), process.pid()));
    }
    if points < study.planned {
        let planned = study.planned;
        memtools::message!("the verdict is based on {points} snapshots instead of {planned}");
    }
    let (growth, types) = study.rows(top);
    output.row(&growth)?;
    types.iter().try_for_each(|row| output.row(row))
}

/// Waits until the examination is finished, until the deadline, or until [`GRACE`] is over after a signal or the exit of
/// the process. Meanwhile looks for processes that this process starts. Returns whether the examination is finished.
///
/// # Errors
/// If the examination fails.
fn await_end(
    mut deadline: Instant,
    children: &mut Children,
    end: &Sender<End>,
    finished: &Receiver<Result<()>>,
    poller: &mut Poller,
) -> Result<bool> {
    loop {
        let now = Instant::now();
        let wake = poller.wait(Some(deadline.min(now + STEP)))?;
        children.look_if_due();
        match finished.try_recv() {
            Err(TryRecvError::Empty) => {}
            outcome => return outcome?.map(|()| true),
        }
        if wake.stop || wake.exited {
            // A watcher that has ended needs no order.
            let _ = end.send(if wake.exited {
                End::Exited
            } else {
                End::Stopped
            });
            deadline = deadline.min(now + GRACE);
            break;
        }
        if now >= deadline {
            break;
        }
    }
    let left = deadline.saturating_duration_since(Instant::now());
    match finished.recv_timeout(left) {
        Err(mpsc::RecvTimeoutError::Timeout) => Ok(false),
        outcome => outcome?.map(|()| true),
    }
}

fn too_few(points: usize, has_exited: bool, pid: u32) -> anyhow::Error {
    let why = if has_exited {
        format!("process {pid} has exited")
    } else {
        "it was ended early, or others took too long or were skipped".into()
    };
    let have = match points {
        1 => "1 snapshot is".to_owned(),
        _ => format!("{points} snapshots are"),
    };
    anyhow!("{have} too few, growth requires {MIN_POINTS}: {why}; use more SECONDS")
}

/// What was found until now.
struct Study {
    /// CLOCK_MONOTONIC of the first image.
    begin_ns: u64,
    name: ProcessName,
    /// Name of the allocator, or why there is no heap that can be walked.
    allocator: Result<String, String>,
    /// Runtime with a heap of its own.
    runtime: Option<Runtime>,
    /// Number of images that are to be taken.
    planned: usize,
    pauses_us: Vec<u64>,
    follower: Follower,
    points: Vec<Point>,
    /// Number of images that could not be taken, or whose heap was inconsistent.
    left_out: u64,
    /// Minimum number of processes that were started meanwhile.
    started: u64,
    found: LastReferences,
}

/// References to blocks, as found in the last images.
#[derive(Debug, Default)]
struct LastReferences {
    /// Blocks that nothing refers to: in the last image, and then in that and in one more. None if they are not known.
    lost: Option<HashSet<BlockId>>,
    /// Bytes of new blocks that only cycles of CPython's objects hold.
    cycles: u64,
    /// Holders of the groups that grow, by the groups' numbers.
    holders: HashMap<u32, String>,
}

impl Study {
    fn add(&mut self, look: &HeapSnapshot) {
        let ns = look.image.copied_ns.saturating_sub(self.begin_ns);
        self.points.push(look.point(ns as f64 / 1e9));
        self.pauses_us.push(look.image.paused.as_micros() as u64);
        self.follower.add(&look.heap, &look.names);
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
            .filter(|(_, judged)| judged.trend == Trend::Growing)
            .collect();
        growing.sort_by(|(_, one), (_, other)| other.line.slope.total_cmp(&one.line.slope));
        growing.into_iter().map(|(number, _)| number).collect()
    }

    /// Returns the rows to print, for up to `top` types.
    fn rows(&self, top: usize) -> (GrowthRow, Vec<TypeRow>) {
        report::rows(self, top)
    }
}
