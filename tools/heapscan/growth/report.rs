//! Rows that `--growth` prints.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{self, Write};

use memtools::heap::growth::follow::{Key, Sample};
use memtools::heap::growth::judge::{self, Evidence, Judged, Part, Point, Trend, Verdict};
use memtools::heap::growth::trend::Line;
use memtools::heap::runtimes::Runtime;
use memtools::print::output::Row;
use memtools::print::text;
use memtools::process::container::ProcessName;
use serde::Serialize;

use super::Study;

/// Ratio of the fastest growth to the least growth of a type of the program's own that the next command is about.
const OWN_SHARE: f64 = 100.0;

/// Process, with the growth of its heap.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "growth")]
pub(super) struct GrowthRow {
    #[serde(flatten)]
    process: ProcessName,
    /// Pauses of the process by image, in microseconds. The image in which lost blocks are looked for again is
    /// included.
    pauses_us: Vec<u64>,
    snapshots_skipped: u64,
    allocator: Option<String>,
    coverage: &'static str,
    coverage_note: Option<String>,
    seconds: f64,
    verdict: &'static str,
    cause: Option<&'static str>,
    growth_bytes: i64,
    new_blocks: u64,
    new_bytes: u64,
    lost_new_bytes: Option<u64>,
    cycles_new_bytes: u64,
    replaced_percent: Option<f64>,
    started_processes: u64,
    block_bytes: Slope,
    heap_resident_bytes: Slope,
    free_resident_bytes: Slope,
    resident_bytes: Slope,
    parts: Vec<PartRow>,
    points: Vec<PointRow>,
    types: usize,
    types_shown: usize,
    next: String,
    #[serde(skip)]
    judged: Verdict,
    #[serde(skip)]
    largest: Option<Part>,
    #[serde(skip)]
    runtime: Option<Runtime>,
}

/// Part of the resident memory. All parts add up to the resident memory, at each point.
#[derive(Debug, Serialize)]
struct PartRow {
    part: &'static str,
    #[serde(flatten)]
    bytes: Slope,
    #[serde(skip)]
    of: Part,
}

/// Sums of one image.
#[derive(Debug, Serialize)]
struct PointRow {
    seconds: f64,
    blocks: u64,
    block_bytes: u64,
    heap_resident_bytes: u64,
    free_resident_bytes: u64,
    resident_bytes: u64,
}

/// First and last number of bytes, and the slope of the line through all points.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Slope {
    first: u64,
    last: u64,
    bytes_per_second: f64,
    low: f64,
    high: f64,
}

/// Blocks of a type, with their growth.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename = "type_growth")]
pub(super) struct TypeRow {
    kind: &'static str,
    name: String,
    trend: &'static str,
    first_blocks: u64,
    blocks: u64,
    #[serde(flatten)]
    bytes: Slope,
    survival_percent: Option<f64>,
    lost_blocks: Option<u64>,
    lost_bytes: Option<u64>,
    referenced_by: Option<String>,
    #[serde(skip)]
    judged: Trend,
    #[serde(skip)]
    is_first: bool,
    /// Whether the name is a question that --why answers.
    #[serde(skip)]
    is_askable: bool,
    /// Whether the type is one of the program's own.
    #[serde(skip)]
    is_own: bool,
}

/// Makes the row of a process, and the rows of up to `top` types.
pub(super) fn rows(study: &Study, top: usize) -> (GrowthRow, Vec<TypeRow>) {
    let mut types = types(study);
    let mut growth = growth(study, types.len(), top);
    growth.next = growth.next(&types);
    types.truncate(top);
    types.iter_mut().take(1).for_each(|row| row.is_first = true);
    (growth, types)
}

fn growth(study: &Study, types: usize, top: usize) -> GrowthRow {
    let points = &study.points;
    let new = || study.follower.blocks().iter().filter(|one| one.since > 0);
    let lost = study.found.lost.as_ref().map(|lost| {
        let lost = new().filter(|one| lost.contains(&(one.block.address, one.block.size)));
        lost.map(|one| one.block.size).sum()
    });
    let verdict = judge::judge(Evidence {
        points,
        lost,
        cycles: study.found.cycles,
        forks: study.started,
    });
    let largest = judge::cause(points);
    let slope = |of: fn(&Point) -> u64| Slope::of(points, of);
    let block_bytes = slope(|point| point.live);
    let original = study.follower.groups().iter().map(|group| {
        let sample = |sample: Option<&Sample>| sample.copied().unwrap_or_default();
        (
            sample(group.samples.first()).blocks,
            sample(group.samples.last()).original,
        )
    });
    let (first, stayed) = original.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    GrowthRow {
        process: study.name.clone(),
        pauses_us: study.pauses_us.clone(),
        snapshots_skipped: study.left_out,
        allocator: study.allocator.clone().ok(),
        coverage: match study.allocator {
            Ok(_) => "complete",
            Err(_) => "unknown",
        },
        coverage_note: study.allocator.clone().err(),
        seconds: rounded(points.last().map_or(0.0, |point| point.seconds)),
        verdict: verdict.name(),
        cause: largest.map(Part::name),
        growth_bytes: block_bytes.last.cast_signed() - block_bytes.first.cast_signed(),
        new_blocks: new().count() as u64,
        new_bytes: new().map(|one| one.block.size).sum(),
        lost_new_bytes: lost,
        cycles_new_bytes: study.found.cycles,
        replaced_percent: percent(first.saturating_sub(stayed), first),
        started_processes: study.started,
        block_bytes,
        heap_resident_bytes: slope(|point| point.heap_resident),
        free_resident_bytes: slope(|point| point.free_resident),
        resident_bytes: slope(|point| point.resident),
        parts: Part::ALL
            .into_iter()
            .map(|part| PartRow::of(points, part))
            .collect(),
        points: points.iter().map(PointRow::of).collect(),
        types,
        types_shown: types.min(top),
        next: String::new(),
        judged: verdict,
        largest,
        runtime: study.runtime,
    }
}

/// Returns the rows of all types by trend: those that grow first, the fastest of them first. Within the other
/// judgements, types with most bytes come first.
fn types(study: &Study) -> Vec<TypeRow> {
    let seconds = study.seconds();
    let mut lost: HashMap<u32, (u64, u64)> = HashMap::new();
    for one in study.follower.blocks() {
        let place = (one.block.address, one.block.size);
        if study
            .found
            .lost
            .as_ref()
            .is_some_and(|lost| lost.contains(&place))
        {
            let (blocks, bytes) = lost.entry(one.group).or_default();
            *blocks += 1;
            *bytes += one.block.size;
        }
    }
    let is_known = study.found.lost.is_some();
    let groups = (0..).zip(study.follower.groups());
    let mut rows: Vec<_> = groups
        .filter_map(|(number, group)| {
            let judged = judge::judge_type(&seconds, group)?;
            let (first, last) = (group.samples.first()?, group.samples.last()?);
            let (blocks, bytes) = lost.get(&number).copied().unwrap_or_default();
            Some(TypeRow {
                kind: group.key.kind(),
                name: text::display_name(&group.key.describe()),
                trend: judged.trend.name(),
                first_blocks: first.blocks,
                blocks: last.blocks,
                bytes: Slope::new(first.bytes, last.bytes, Some(judged.line)),
                survival_percent: survival_percent(judged),
                lost_blocks: is_known.then_some(blocks),
                lost_bytes: is_known.then_some(bytes),
                referenced_by: study.found.holders.get(&number).cloned(),
                judged: judged.trend,
                is_first: false,
                is_askable: group.key != Key::Others,
                is_own: group.key.is_own(),
            })
        })
        .collect();
    rows.sort_by(|one, other| {
        let of = |row: &TypeRow| {
            let speed = match row.judged {
                Trend::Growing => row.bytes.bytes_per_second as i64,
                _ => 0,
            };
            let most = row.bytes.first.max(row.bytes.last);
            (row.judged, Reverse(speed), Reverse(most))
        };
        of(one)
            .cmp(&of(other))
            .then_with(|| one.name.cmp(&other.name))
    });
    rows
}

fn survival_percent(judged: Judged) -> Option<f64> {
    judged.survival.map(|part| rounded(part * 100.0))
}

impl Slope {
    fn of(points: &[Point], of: fn(&Point) -> u64) -> Self {
        let at = |point: Option<&Point>| point.map_or(0, of);
        let line = Line::through(&judge::series(points, of));
        Self::new(at(points.first()), at(points.last()), line)
    }

    fn new(first: u64, last: u64, line: Option<Line>) -> Self {
        let number = |of: fn(Line) -> f64| rounded(line.map_or(0.0, of));
        Self {
            first,
            last,
            bytes_per_second: number(|line| line.slope),
            low: number(|line| line.low),
            high: number(|line| line.high),
        }
    }

    /// Writes the slope as a line of the table.
    fn line(&self, what: &str, out: &mut dyn Write) -> io::Result<()> {
        let (speed, half) = self.text();
        let (first, last) = (text::bytes(self.first), text::bytes(self.last));
        writeln!(out, "{first:>12} {last:>12} {speed:>12} {half:>12}  {what}")
    }

    /// Formats the slope, and half of its confidence interval, for people.
    fn text(&self) -> (String, String) {
        let half = (self.high - self.low) / 2.0;
        (
            signed(self.bytes_per_second),
            format!("±{}", text::bytes(half.round() as u64)),
        )
    }
}

impl PartRow {
    fn of(points: &[Point], part: Part) -> Self {
        let at = |point: Option<&Point>| point.map_or(0, |point| point.of(part));
        let series = points
            .iter()
            .map(|point| (point.seconds, point.of(part) as f64));
        let line = Line::through(&series.collect::<Vec<_>>());
        Self {
            part: part.name(),
            bytes: Slope::new(at(points.first()), at(points.last()), line),
            of: part,
        }
    }
}

impl PointRow {
    fn of(point: &Point) -> Self {
        Self {
            seconds: rounded(point.seconds),
            blocks: point.blocks,
            block_bytes: point.live,
            heap_resident_bytes: point.heap_resident,
            free_resident_bytes: point.free_resident,
            resident_bytes: point.resident,
        }
    }
}

fn percent(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| rounded(part as f64 / all as f64 * 100.0))
}

/// Rounds a number to three decimal places.
fn rounded(number: f64) -> f64 {
    (number * 1000.0).round() / 1000.0
}

/// Formats bytes with a sign.
fn signed(bytes: f64) -> String {
    let sign = match bytes {
        0.5.. => "+",
        ..=-0.5 => "-",
        _ => "",
    };
    format!("{sign}{}", text::bytes(bytes.abs().round() as u64))
}

impl Row for GrowthRow {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let pauses = || self.pauses_us.iter().map(|&us| us as f64 / 1000.0);
        let (least, most) = pauses().fold((f64::INFINITY, 0.0), |(least, most), one| {
            (f64::min(least, one), f64::max(most, one))
        });
        writeln!(
            out,
            "growth of {} (pid {}){} in {:.1} s; paused {} times, {least:.1} to {most:.1} ms each, {:.1} ms in all",
            self.process.comm,
            self.process.pid,
            self.process.inside(),
            self.seconds,
            self.pauses_us.len(),
            pauses().sum::<f64>()
        )?;
        match (&self.allocator, &self.coverage_note) {
            (Some(allocator), _) => {
                let blocks = self.points.last().map_or(0, |point| point.blocks);
                let blocks = text::count_with_noun(blocks, "block");
                write!(out, "{allocator}; coverage: {}: {blocks}", self.coverage)?;
            }
            (None, why) => write!(out, "{}", why.as_deref().unwrap_or_default())?,
        }
        match self.snapshots_skipped {
            0 => writeln!(out)?,
            images => writeln!(
                out,
                "; skipped {}",
                text::count_with_noun(images, "snapshot")
            )?,
        }
        writeln!(
            out,
            "\n{:>12} {:>12} {:>12} {:>12}  WHAT",
            "FIRST", "LAST", "PER SECOND", "95 %"
        )?;
        for (what, slope) in [
            ("blocks in use", &self.block_bytes),
            ("heap in memory", &self.heap_resident_bytes),
            ("  free and overhead", &self.free_resident_bytes),
        ] {
            slope.line(what, out)?;
        }
        for row in &self.parts {
            let is_any = row.bytes.first.max(row.bytes.last) > 0;
            if is_any && !matches!(row.of, Part::InUse | Part::Free) {
                row.bytes.line(self.describe(row.of), out)?;
            }
        }
        self.resident_bytes.line("total resident (RSS)", out)?;
        writeln!(out, "\n{}: {}", self.conclusion(), self.next)?;
        let lost = self.lost_new_bytes.unwrap_or(0);
        if lost >= judge::LEAK_BYTES && self.judged != Verdict::Leak {
            writeln!(
                out,
                "in addition, a leak: {} of the new blocks are unreachable; by which stacks: {}",
                text::bytes(lost),
                self.trace()
            )?;
        }
        Ok(())
    }
}

impl GrowthRow {
    /// Returns the words for a part of the memory.
    fn describe(&self, part: Part) -> &'static str {
        match part {
            Part::InUse => "blocks in use",
            Part::Free => "free heap memory",
            Part::Arenas => "    in arenas of other threads",
            Part::Stacks => "stacks",
            Part::Runtime => self.runtime.map_or("a runtime's heap", Runtime::heap),
            Part::Shared => "shared memory",
            Part::Files => "files, and modified copies of them",
            Part::Mapped => "other private memory (mmap)",
        }
    }

    /// Whether the memory that grows can be that of an allocator whose heap is not walked.
    fn may_be_heap(&self) -> bool {
        self.allocator.is_none() && self.largest == Some(Part::Mapped)
    }

    fn command(&self, options: &str) -> String {
        format!("heapscan -p {} {options}", self.process.pid)
    }

    /// Returns the command that shows by which stacks a leak is allocated.
    fn trace(&self) -> String {
        format!("memleak -p {} --verdict 60 1", self.process.pid)
    }

    /// Returns the command that answers the next question.
    fn next(&self, types: &[TypeRow]) -> String {
        let growing = || {
            let rows = types.iter();
            rows.filter(|row| row.judged == Trend::Growing && row.is_askable)
        };
        // An object of the program's own says more than the parts of it, which are larger.
        let least = growing()
            .next()
            .map_or(0.0, |row| row.bytes.bytes_per_second)
            / OWN_SHARE;
        let own = growing().find(|row| row.is_own && row.bytes.bytes_per_second >= least);
        let fastest = own.or_else(|| growing().next());
        let pid = self.process.pid;
        match (self.judged, fastest) {
            (Verdict::Leak, _) => self.trace(),
            (Verdict::Unbounded | Verdict::Cycles | Verdict::Growing, Some(of)) => {
                self.command(&format!("--why {}", shell_words::quote(&of.name)))
            }
            (Verdict::Unbounded | Verdict::Cycles | Verdict::Growing, None) => {
                self.command("--roots")
            }
            (Verdict::Fragmentation, _) => self.command("--layout"),
            // The memory can be the heap of an allocator without a walk.
            (Verdict::Elsewhere, _) if self.may_be_heap() => format!("memleak -p {pid}"),
            (Verdict::Elsewhere, _) => format!("faults -p {pid}"),
            (Verdict::ForkServer, _) => format!("memleak -p {pid} --children"),
            (Verdict::WarmUp | Verdict::Burst | Verdict::Steady | Verdict::Undecided, _) => {
                self.command(&format!("--growth {:.0}", (self.seconds * 2.0).max(60.0)))
            }
        }
    }

    /// Returns the verdict as a sentence, which ends with what the next command tells.
    fn conclusion(&self) -> String {
        let more = signed(self.growth_bytes as f64);
        let most = self.points.iter().map(|point| point.block_bytes).max();
        let (most, last) = (
            text::bytes(most.unwrap_or(0)),
            text::bytes(self.block_bytes.last),
        );
        let new = text::bytes(self.new_bytes);
        match self.judged {
            Verdict::Leak => format!(
                "a leak: {more} in use, and {} of the new blocks are unreachable; by which stacks",
                text::bytes(self.lost_new_bytes.unwrap_or(0))
            ),
            Verdict::Unbounded => format!(
                "unbounded growth: {more} in use, still referenced: a cache without a limit, or objects that are never removed; what references \
                 it"
            ),
            Verdict::Cycles => format!(
                "cycles of Python's objects: {more} in use, and only cycles reference {} of the new blocks, which the garbage \
                 collector has not freed: gc is disabled, or its thresholds are high; what is in them",
                text::bytes(self.cycles_new_bytes)
            ),
            Verdict::Growing => format!(
                "growth: {more} in use; what references it is unknown, as the process has exited, has memory that \
                 could not be examined, or had no last snapshot; what references it"
            ),
            Verdict::WarmUp => format!("a warm-up: {more} in use, and no more lately; if in doubt"),
            Verdict::Burst => format!("a burst: up to {most} in use, and {last} now; if in doubt"),
            Verdict::Fragmentation => self.fragmentation(&more),
            Verdict::Elsewhere => self.elsewhere(),
            Verdict::ForkServer => format!(
                "steady, and starts processes ({} seen), which have their own",
                text::grouped(self.started_processes)
            ),
            Verdict::Steady if self.allocator.is_none() => {
                let resident = &self.resident_bytes;
                let more = signed(resident.last as f64 - resident.first as f64);
                format!("steady: {more} resident; if in doubt")
            }
            Verdict::Steady => match self.replaced_percent {
                Some(replaced) => format!(
                    "steady: {more} in use; {replaced:.0} % of the blocks at first are others now ({new} are new); if in \
                     doubt"
                ),
                None => format!("steady: {more} in use; if in doubt"),
            },
            Verdict::Undecided => {
                format!("undecided: {more} in use at the end only; watch for longer")
            }
        }
    }

    fn fragmentation(&self, more: &str) -> String {
        let grown = |slope: &Slope| signed(slope.last as f64 - slope.first as f64);
        let whose = match self.largest {
            Some(Part::Arenas) => {
                ", most in arenas of other threads, of which glibc makes up to 8 for each CPU (MALLOC_ARENA_MAX)"
            }
            _ => "",
        };
        format!(
            "fragmentation, not a leak: {} of the heap are free or overhead{whose}, {more} in use; where",
            grown(&self.free_resident_bytes)
        )
    }

    fn elsewhere(&self) -> String {
        let part = self.parts.iter().find(|row| Some(row.of) == self.largest);
        let grown = part.map_or(String::new(), |row| {
            signed(row.bytes.last as f64 - row.bytes.first as f64)
        });
        let what = match (self.largest, self.runtime) {
            (None, _) => "not of blocks, but of other memory".to_owned(),
            (Some(Part::InUse), _) => format!("{grown} of blocks that are used for the first time"),
            (Some(Part::Stacks), _) => format!("{grown} of stacks: more threads, or deeper calls"),
            (Some(Part::Runtime), Some(runtime)) => {
                let tool = runtime.tool(self.process.pid);
                format!(
                    "{grown} of {}, whose objects another tool shows: {tool}",
                    runtime.heap()
                )
            }
            (Some(Part::Mapped), _) if self.may_be_heap() => {
                format!("{grown} of private memory, in which the allocator has its blocks")
            }
            (Some(part), _) => format!("{grown} of {}", self.describe(part)),
        };
        format!("growth elsewhere: {what}; by which stacks")
    }
}

impl Row for TypeRow {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        if self.is_first {
            writeln!(
                out,
                "\n{:<9} {:>12} {:>12} {:>12} {:>10} {:>8} {:>12}  TYPE",
                "TREND", "PER SECOND", "95 %", "BYTES", "BLOCKS", "STAY", "LOST"
            )?;
        }
        let (speed, half) = self.bytes.text();
        let stay = self.survival_percent;
        let stay = stay.map_or("-".to_owned(), |percent| format!("{percent:.0} %"));
        let lost = self.lost_bytes.map_or("?".to_owned(), text::bytes);
        write!(
            out,
            "{:<9} {speed:>12} {half:>12} {:>12} {:>10} {stay:>8} {lost:>12}  {}",
            self.trend.replace('_', "-"),
            text::bytes(self.bytes.last),
            text::grouped(self.blocks),
            self.name
        )?;
        match &self.referenced_by {
            Some(holder) => writeln!(out, " <- {holder}"),
            None => writeln!(out),
        }
    }
}
