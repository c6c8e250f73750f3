//! Trend of each type of blocks, and verdict on the process.

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
/// Bytes from which on a leak is worth a mention beside a larger growth of another kind.
pub const LEAK_BYTES: u64 = 64 << 10;
/// Part of growth that has to be in cycles of CPython's objects to make these the cause.
const CYCLES: f64 = 0.5;
/// Smallest number of processes started meanwhile that makes a process a fork server.
const FORKS: u64 = 2;

/// Trend of the number of blocks of a type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trend {
    /// The number grows.
    Growing,
    /// The number has grown once, or has grown and fallen again.
    OneOff,
    /// The number falls.
    Shrinking,
    /// The number stays about the same, and the blocks are replaced.
    Churn,
    /// The number stays about the same, and so do most blocks.
    Steady,
}

impl Trend {
    /// Returns the word for the trend.
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

/// Type of blocks, judged.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Judged {
    /// Trend of the blocks.
    pub trend: Trend,
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
    let trend = match trend::course(&points, OF_TYPE) {
        Course::Growing => Trend::Growing,
        Course::Stopped | Course::Late | Course::Burst => Trend::OneOff,
        Course::Falling => Trend::Shrinking,
        Course::Level if stays(samples) => Trend::Steady,
        Course::Level => Trend::Churn,
    };
    Some(Judged {
        trend,
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

/// Part of a process's resident memory. The parts of a point add up to its resident bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Blocks in use.
    InUse,
    /// Memory of the heap in no block, without that of [`Arenas`](Self::Arenas): free, or the allocator's own.
    Free,
    /// Memory of glibc's arenas but the main one, in no block.
    Arenas,
    /// Stacks of threads.
    Stacks,
    /// Heap of a runtime: V8, the JVM or Go.
    Runtime,
    /// Shared memory, shared mappings of files included.
    Shared,
    /// Files that are mapped for the process alone, with their data that the process has changed.
    Files,
    /// Other private memory, which the program has mapped itself.
    Mapped,
}

impl Part {
    /// All parts.
    pub const ALL: [Self; 8] = [
        Self::InUse,
        Self::Free,
        Self::Arenas,
        Self::Stacks,
        Self::Runtime,
        Self::Shared,
        Self::Files,
        Self::Mapped,
    ];

    /// Returns the word for the part in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::InUse => "in_use",
            Self::Free => "free",
            Self::Arenas => "free_in_arenas",
            Self::Stacks => "stacks",
            Self::Runtime => "runtime",
            Self::Shared => "shared",
            Self::Files => "files",
            Self::Mapped => "mapped",
        }
    }
}

/// Resident bytes of those parts of a process that are no main part of its heap.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OtherParts {
    /// Bytes of [`Part::Arenas`].
    pub arenas: u64,
    /// Bytes of [`Part::Stacks`].
    pub stacks: u64,
    /// Bytes of [`Part::Runtime`].
    pub runtime: u64,
    /// Bytes of [`Part::Shared`].
    pub shared: u64,
    /// Bytes of [`Part::Files`].
    pub files: u64,
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
    /// Resident bytes by further uses.
    pub others: OtherParts,
}

impl Point {
    /// Returns the resident bytes of a part.
    pub fn of(&self, part: Part) -> u64 {
        let OtherParts {
            arenas,
            stacks,
            runtime,
            shared,
            files,
        } = self.others;
        match part {
            Part::InUse => self.heap_resident.saturating_sub(self.free_resident),
            Part::Free => self.free_resident.saturating_sub(arenas),
            Part::Arenas => arenas,
            Part::Stacks => stacks,
            Part::Runtime => runtime,
            Part::Shared => shared,
            Part::Files => files,
            Part::Mapped => {
                let known = self.heap_resident + stacks + runtime + shared + files;
                self.resident.saturating_sub(known)
            }
        }
    }
}

/// Evidence by which a process is judged.
#[derive(Debug, Clone, Copy)]
pub struct Evidence<'a> {
    /// Points in order of time.
    pub points: &'a [Point],
    /// Bytes of the blocks allocated since the first point that nothing refers to at the end; None if that is not
    /// known.
    pub lost: Option<u64>,
    /// Bytes of the blocks allocated since the first point that only cycles of CPython's objects hold at the end,
    /// which its garbage collector would free.
    pub cycles: u64,
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
    /// Ever more blocks, at least half of which only cycles of CPython's objects hold: its garbage collector does not
    /// run, or seldom.
    Cycles,
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
            Self::Cycles => "cycles",
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

/// Returns the part of the resident memory that has grown most, if its growth goes on, or that of the whole process.
pub fn cause(points: &[Point]) -> Option<Part> {
    let growth = |part: Part| match (points.first(), points.last()) {
        (Some(first), Some(last)) => last.of(part).saturating_sub(first.of(part)),
        _ => 0,
    };
    let part = Part::ALL
        .into_iter()
        .rev()
        .max_by_key(|&part| growth(part))?;
    let series = |of: &dyn Fn(&Point) -> u64| -> Vec<_> {
        let points = points.iter();
        points
            .map(|point| (point.seconds, of(point) as f64))
            .collect()
    };
    let grows =
        |of: &dyn Fn(&Point) -> u64| trend::course(&series(of), OF_PROCESS) == Course::Growing;
    let goes_on = grows(&|point| point.of(part)) || grows(&|point| point.resident);
    (growth(part) > 0 && goes_on).then_some(part)
}

/// Judges a process, first by the part of its memory that has grown most.
pub fn judge(evidence: Evidence<'_>) -> Verdict {
    let points = evidence.points;
    let course = |of: fn(&Point) -> u64| trend::course(&series(points, of), OF_PROCESS);
    let live = course(|point| point.live);
    let is_level = matches!(live, Course::Falling | Course::Level);
    let is_growing = course(|point| point.resident) == Course::Growing;
    // Blocks that are all there already are written to for the first time.
    let is_filled =
        live != Course::Growing && course(|point| point.of(Part::InUse)) == Course::Growing;
    match cause(points) {
        Some(Part::Free | Part::Arenas) => return Verdict::Fragmentation,
        Some(part) if is_growing && (is_level || is_filled || part != Part::InUse) => {
            return Verdict::Elsewhere;
        }
        _ => {}
    }
    match live {
        Course::Growing => growth_of_blocks(evidence),
        Course::Stopped => Verdict::WarmUp,
        Course::Late => Verdict::Undecided,
        Course::Burst => Verdict::Burst,
        Course::Falling | Course::Level if is_growing => Verdict::Elsewhere,
        Course::Falling | Course::Level if evidence.forks >= FORKS => Verdict::ForkServer,
        Course::Falling | Course::Level => Verdict::Steady,
    }
}

/// Judges growth of the blocks in use, by what refers to the new ones.
fn growth_of_blocks(evidence: Evidence<'_>) -> Verdict {
    let growth = grown(evidence.points, |point| point.live).max(0.0);
    match evidence.lost {
        Some(lost) if lost as f64 >= LEAK * growth => Verdict::Leak,
        _ if evidence.cycles as f64 >= CYCLES * growth => Verdict::Cycles,
        Some(_) => Verdict::Unbounded,
        None => Verdict::Growing,
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
