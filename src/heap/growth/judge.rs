//! Judgement of each type of blocks, and of the process.

use crate::heap::growth::follow::{Group, Sample};
use crate::heap::growth::trend::{self, Course, Line, Thresholds};

/// Limits for the memory of a process: 64 KiB or a thousandth for growth that goes on, and 256 KiB or a tenth for any
/// other change.
const OF_PROCESS: Thresholds = Thresholds {
    growth: (65_536.0, 0.001),
    change: (262_144.0, 0.1),
};
/// Limits for a type: 1 KiB or a fiftieth for growth that goes on, and 16 KiB or a fifth for any other change.
const OF_TYPE: Thresholds = Thresholds {
    growth: (1_024.0, 0.02),
    change: (16_384.0, 0.2),
};
/// Part of the first point's blocks. If fewer of them exist at the last point, blocks are being replaced.
const REPLACED: f64 = 0.5;
/// Part of growth that has to be lost to make it a leak.
const LEAK: f64 = 0.1;
/// Ratio of a heap's growth to the growth of its blocks in use. Above this ratio, it is the free memory between the
/// blocks that grows.
const FRAGMENTED: f64 = 2.0;
/// Smallest number of processes started meanwhile that makes a process a fork server.
const FORKS: u64 = 2;

/// Judgement of the blocks of a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Judgement {
    /// Ever more blocks.
    Growing,
    /// More blocks once, or some that came and went.
    OneOff,
    /// Ever fewer blocks.
    Shrinking,
    /// About as many blocks as before, but not the same.
    Churn,
    /// About as many blocks as before, most of them the same.
    Steady,
}

impl Judgement {
    /// Returns the word for the judgement.
    pub fn name(self) -> &'static str {
        match self {
            Self::Growing => "growing",
            Self::OneOff => "one_off",
            Self::Shrinking => "shrinking",
            Self::Churn => "churn",
            Self::Steady => "steady",
        }
    }
}

/// Type of blocks with its judgement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Judged {
    /// Judgement of the blocks.
    pub judgement: Judgement,
    /// Growth of the blocks' bytes.
    pub line: Line,
    /// Part of the blocks that exist at the next point, too; None if there never were any.
    pub survival: Option<f64>,
}

/// Judges a type by its bytes at the points. `seconds` are the times of the points.
pub fn judge_type(seconds: &[f64], group: &Group) -> Option<Judged> {
    let samples = &group.samples;
    let bytes = samples.iter().map(|sample| sample.bytes as f64);
    let points: Vec<_> = seconds.iter().copied().zip(bytes).collect();
    let line = Line::through(&points)?;
    let judgement = match trend::course(&points, OF_TYPE) {
        Course::Growing => Judgement::Growing,
        Course::Stopped | Course::Late | Course::Burst => Judgement::OneOff,
        Course::Falling => Judgement::Shrinking,
        Course::Level if stays(samples) => Judgement::Steady,
        Course::Level => Judgement::Churn,
    };
    Some(Judged {
        judgement,
        line,
        survival: survival(samples),
    })
}

/// Whether most of the blocks of the first point exist at the last; if there were none, whether most of each point
/// exist at the next.
fn stays(samples: &[Sample]) -> bool {
    match (samples.first(), samples.last()) {
        (Some(first), Some(last)) if first.blocks > 0 => {
            last.original as f64 >= REPLACED * first.blocks as f64
        }
        _ => survival(samples).is_some_and(|survival| survival >= REPLACED),
    }
}

/// Returns the part of the blocks of each point that exist at the next, for all points together.
pub fn survival(samples: &[Sample]) -> Option<f64> {
    let all: u64 = samples
        .iter()
        .rev()
        .skip(1)
        .map(|sample| sample.blocks)
        .sum();
    let kept: u64 = samples.iter().skip(1).map(|sample| sample.kept).sum();
    (all > 0).then(|| (kept as f64 / all as f64).min(1.0))
}

/// Memory of a process at one point.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Point {
    /// Seconds since the first point.
    pub seconds: f64,
    /// Number of blocks in use.
    pub blocks: u64,
    /// Usable bytes of the blocks in use.
    pub live: u64,
    /// Bytes of the heap that are resident.
    pub heap_resident: u64,
    /// Resident bytes of the heap in no block in use: free, or the allocator's own.
    pub free_resident: u64,
    /// Bytes of the process that are resident.
    pub resident: u64,
}

/// Evidence by which a process is judged.
#[derive(Debug, Clone, Copy)]
pub struct Evidence<'a> {
    /// Points in order of time.
    pub points: &'a [Point],
    /// Bytes of the blocks allocated since the first point that nothing refers to at the end; None if that is not
    /// known.
    pub lost: Option<u64>,
    /// Number of processes that the process was seen to start meanwhile.
    pub forks: u64,
}

/// Verdict on the memory of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Ever more blocks, and nothing refers to a good part of the new ones.
    Leak,
    /// Ever more blocks, which something refers to.
    Unbounded,
    /// Ever more blocks, and it is not known what refers to them.
    Growing,
    /// Growth that has ended.
    WarmUp,
    /// More blocks for a while.
    Burst,
    /// A heap that grows, while the blocks in it do not.
    Fragmentation,
    /// Growth elsewhere than in the heap, or of blocks that are written to for the first time.
    Elsewhere,
    /// As much memory as before, in a process that starts others, which have their own.
    ForkServer,
    /// As much memory as before, or less.
    Steady,
    /// Growth at the end only.
    Undecided,
}

impl Verdict {
    /// Returns the word for the verdict in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Leak => "leak",
            Self::Unbounded => "unbounded",
            Self::Growing => "growing",
            Self::WarmUp => "warm_up",
            Self::Burst => "burst",
            Self::Fragmentation => "fragmentation",
            Self::Elsewhere => "elsewhere",
            Self::ForkServer => "fork_server",
            Self::Steady => "steady",
            Self::Undecided => "undecided",
        }
    }
}

/// Judges a process.
pub fn judge(evidence: Evidence<'_>) -> Verdict {
    let points = evidence.points;
    let course = |of: fn(&Point) -> u64| trend::course(&series(points, of), OF_PROCESS);
    let grown = |of: fn(&Point) -> u64| grown(points, of);
    let live = course(|point| point.live);
    let is_free = course(|point| point.free_resident) == Course::Growing;
    let growth = grown(|point| point.live).max(0.0);
    if is_free && grown(|point| point.heap_resident) > FRAGMENTED * growth {
        return Verdict::Fragmentation;
    }
    match live {
        Course::Growing => match evidence.lost {
            Some(lost) if lost as f64 >= LEAK * growth => Verdict::Leak,
            Some(_) => Verdict::Unbounded,
            None => Verdict::Growing,
        },
        Course::Stopped => Verdict::WarmUp,
        Course::Late => Verdict::Undecided,
        Course::Burst => Verdict::Burst,
        Course::Falling | Course::Level => {
            if course(|point| point.resident) == Course::Growing {
                Verdict::Elsewhere
            } else if evidence.forks >= FORKS {
                Verdict::ForkServer
            } else {
                Verdict::Steady
            }
        }
    }
}

/// Returns a number of each point, with the point's seconds.
pub fn series(points: &[Point], of: fn(&Point) -> u64) -> Vec<(f64, f64)> {
    let value = |point: &Point| (point.seconds, of(point) as f64);
    points.iter().map(value).collect()
}

/// Returns by how much a number has grown from the first point to the last.
fn grown(points: &[Point], of: fn(&Point) -> u64) -> f64 {
    match (points.first(), points.last()) {
        (Some(first), Some(last)) => of(last) as f64 - of(first) as f64,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests;
