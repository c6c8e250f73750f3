//! What is outstanding, grouped by stack, and how it is printed.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write};
use std::mem;

use anyhow::Result;
use jiff::Zoned;
use libbpf_rs::MapCore;
use memtools::export::files::Subject;
use memtools::export::profile::{Sample, Value};
use memtools::print::clock;
use memtools::print::output::{Output, Row};
use memtools::run::losses::Losses;
use memtools::stacks::named::NamedStack;
use memtools::stacks::table::Stacks;
use serde::{Serialize, Serializer};

use crate::args::{Args, SortKey};

/// An allocation that was not freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub(crate) pid: u32,
    pub(crate) address: u64,
    /// Bytes asked for.
    pub(crate) size: u64,
    /// Id of the stack that made it.
    pub(crate) stack: u64,
    /// CLOCK_MONOTONIC when it was made.
    pub(crate) time_ns: u64,
    /// How many calls it stands for: 1, or 0 for a further part of a mapping that has a hole.
    pub(crate) calls: u64,
    /// The sampling level at which it was recorded.
    pub(crate) level: u32,
}

/// Who allocates: a call path of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Path {
    pub(crate) pid: u32,
    /// Id of the stack.
    pub(crate) stack: u64,
}

/// What one path has outstanding, or has allocated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Total {
    pub(crate) bytes: u64,
    pub(crate) allocations: u64,
    /// What was asked for of the kernel's memory, where `bytes` is what that takes.
    pub(crate) requested_bytes: u64,
}

impl Total {
    /// The numbers that [`subject`] names, for the files of other formats.
    pub(crate) fn sample(self, stack: NamedStack) -> Sample {
        Sample {
            stack,
            values: vec![self.allocations, self.bytes],
        }
    }
}

/// What the numbers of a view are called in files of other formats: as in Go's heap profiles, as far
/// as those have them.
pub(crate) fn subject(view: View, args: &Args) -> Subject {
    let (name, objects, space) = match view {
        View::Outstanding => ("outstanding allocations", "inuse_objects", "inuse_space"),
        View::Peak => (
            "allocations when most was outstanding",
            "inuse_objects",
            "inuse_space",
        ),
        View::Allocated => ("allocations", "alloc_objects", "alloc_space"),
        View::Churned => (
            "allocations freed within an interval",
            "churn_objects",
            "churn_space",
        ),
    };
    let mut remarks = Vec::new();
    if args.sample_bytes.is_some() || args.max_overhead.is_some() {
        remarks.push("estimated from a sample".to_owned());
    }
    if args.sample_rate > 1 {
        remarks.push(format!(
            "about one of {} allocations was recorded, and stands for itself alone",
            args.sample_rate
        ));
    }
    Subject {
        name: name.to_owned(),
        values: vec![Value::count(objects, "allocations"), Value::bytes(space)],
        main: 1,
        by_thread: false,
        remarks,
    }
}

/// Totals by path.
pub(crate) type Totals = HashMap<Path, Total>;

/// Adds up allocations by path.
pub(crate) fn add_up<'a>(
    totals: &mut Totals,
    allocations: impl IntoIterator<Item = &'a Allocation>,
) {
    for allocation in allocations {
        let &Allocation { pid, stack, .. } = allocation;
        let total = totals.entry(Path { pid, stack }).or_default();
        total.bytes += allocation.size;
        total.allocations += allocation.calls;
    }
}

/// Counts what has a stack that the table had no room for at a renewal as having one lost stack.
pub(crate) fn merge_lost<M: MapCore>(
    stacks: &mut Stacks<'_, M>,
    totals: &mut Totals,
    allocations: &mut [Allocation],
) -> Result<()> {
    if stacks.lost() == 0 {
        return Ok(());
    }
    for allocation in allocations {
        allocation.stack = stacks.found(allocation.stack)?;
    }
    for (path, more) in mem::take(totals) {
        let stack = stacks.found(path.stack)?;
        let total = totals.entry(Path { stack, ..path }).or_default();
        total.bytes += more.bytes;
        total.requested_bytes += more.requested_bytes;
        total.allocations += more.allocations;
    }
    Ok(())
}

/// What came to each path's total since an earlier look; paths to which nothing came are left out.
pub(crate) fn since(earlier: &Totals, now: &Totals) -> Totals {
    let added = now.iter().map(|(&path, total)| {
        let before = earlier.get(&path).copied().unwrap_or_default();
        let added = Total {
            bytes: total.bytes.saturating_sub(before.bytes),
            allocations: total.allocations.saturating_sub(before.allocations),
            requested_bytes: total.requested_bytes.saturating_sub(before.requested_bytes),
        };
        (path, added)
    });
    added.filter(|(_, total)| total.allocations > 0).collect()
}

/// When each path's outstanding blocks were allocated.
#[derive(Debug, Default)]
pub(crate) struct Ages(HashMap<Path, Vec<u64>>);

impl Ages {
    pub(crate) fn of<'a>(allocations: impl IntoIterator<Item = &'a Allocation>) -> Self {
        let mut times: HashMap<Path, Vec<u64>> = HashMap::new();
        for &Allocation {
            pid,
            stack,
            time_ns,
            ..
        } in allocations
        {
            times.entry(Path { pid, stack }).or_default().push(time_ns);
        }
        Self(times)
    }

    /// The oldest and the median age of a path's blocks at a time, in milliseconds.
    pub(crate) fn at(&mut self, now_ns: u64, path: Path) -> Option<Age> {
        let times = self.0.get_mut(&path)?;
        let oldest = *times.iter().min()?;
        let middle = times.len() / 2;
        let median = *times.select_nth_unstable(middle).1;
        let ms = |time_ns: u64| now_ns.saturating_sub(time_ns) / 1_000_000;
        Some(Age {
            oldest_age_ms: ms(oldest),
            median_age_ms: ms(median),
        })
    }
}

/// How old a path's outstanding blocks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Age {
    pub(crate) oldest_age_ms: u64,
    pub(crate) median_age_ms: u64,
}

/// How a path's outstanding bytes have changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Growth {
    /// Since the last report.
    pub(crate) growth_bytes: i64,
    /// Since the first.
    pub(crate) growth_bytes_in_all: i64,
    /// A second, since the first.
    pub(crate) growth_bytes_per_second: i64,
}

/// The reports that growth is measured from.
#[derive(Debug, Default)]
pub(crate) struct History {
    first: Option<(u64, Totals)>,
    last: Totals,
}

impl History {
    /// Takes note of what a report at this time shows.
    pub(crate) fn add(&mut self, time_ns: u64, totals: Totals) {
        self.first.get_or_insert_with(|| (time_ns, totals.clone()));
        self.last = totals;
    }

    /// What was outstanding, or had been allocated, at the last report.
    pub(crate) fn last(&self) -> &Totals {
        &self.last
    }

    /// Growth up to this time; None at the first report.
    pub(crate) fn growth(&self, time_ns: u64, path: Path, bytes: u64) -> Option<Growth> {
        let (first_ns, first) = self.first.as_ref()?;
        let grown = |from: &Totals| {
            let before = from.get(&path).map_or(0, |total| total.bytes);
            bytes.cast_signed().wrapping_sub(before.cast_signed())
        };
        let elapsed_ns = i128::from(time_ns.saturating_sub(*first_ns)).max(1);
        let in_all = grown(first);
        Some(Growth {
            growth_bytes: grown(&self.last),
            growth_bytes_in_all: in_all,
            growth_bytes_per_second: (i128::from(in_all) * 1_000_000_000 / elapsed_ns)
                .try_into()
                .unwrap_or(i64::MAX),
        })
    }
}

/// What one path has outstanding, with what paths are ordered by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) path: Path,
    pub(crate) total: Total,
    /// How far off the bytes may be, if they are an estimate.
    pub(crate) error_bytes: Option<u64>,
    pub(crate) age: Option<Age>,
    pub(crate) growth: Option<Growth>,
}

/// The `top` entries with the most of what the key says, the largest last.
pub(crate) fn largest(mut entries: Vec<Entry>, key: SortKey, top: usize) -> Vec<Entry> {
    entries.retain(|entry| entry.total.allocations > 0);
    entries.sort_by_key(|entry| {
        let Total {
            bytes, allocations, ..
        } = entry.total;
        let growth = |of: fn(Growth) -> i64| entry.growth.map_or(i64::MIN, of);
        let first = match key {
            SortKey::Size => i64::MIN,
            SortKey::Count => allocations.cast_signed(),
            SortKey::Age => entry.age.map_or(0, |age| age.oldest_age_ms.cast_signed()),
            SortKey::Growth => growth(|growth| growth.growth_bytes),
            SortKey::Rate => growth(|growth| growth.growth_bytes_per_second),
        };
        (first, bytes, allocations, entry.path)
    });
    entries.split_off(entries.len().saturating_sub(top))
}

/// The head of a report, and in JSON its sums.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "report")]
pub(crate) struct Head {
    #[serde(serialize_with = "clock::serialize")]
    pub(crate) time: Zoned,
    /// The process, if it is one.
    #[serde(flatten)]
    pub(crate) process: Option<ProcessName>,
    /// When most was outstanding, if the numbers are of then.
    #[serde(
        serialize_with = "rfc3339_if_any",
        skip_serializing_if = "Option::is_none"
    )]
    pub(crate) peak_time: Option<Zoned>,
    /// Groups asked for.
    #[serde(skip)]
    pub(crate) top: usize,
    /// What they are chosen by.
    #[serde(skip)]
    pub(crate) view: View,
    /// Groups with anything outstanding.
    #[serde(flatten)]
    pub(crate) groups: Groups,
    pub(crate) bytes: u64,
    /// Half of the interval in which the truth is in 95 % of all cases, if it is an estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) requested_bytes: Option<u64>,
    pub(crate) allocations: u64,
    /// Frees of what was not recorded, such as what is older than the trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) unknown_frees: Option<u64>,
    /// Frees of what had been freed, and was not allocated since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) double_frees: Option<u64>,
    /// Frees that were not seen: their addresses were allocated again.
    pub(crate) unseen_frees: u64,
    pub(crate) lost: Losses,
}

impl Row for Head {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let time = clock::time_of_day(&self.time);
        let groups = match self.groups {
            Groups::Stacks(_) => "stacks",
            Groups::Caches(_) => "slab caches",
        };
        write!(out, "[{time}] Top {} {groups} {}", self.top, self.view)?;
        if let Some(time) = &self.peak_time {
            write!(out, " ({})", clock::time_of_day(time))?;
        }
        writeln!(out, ":")
    }
}

/// What a report groups by, and how many groups it has.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Groups {
    Stacks(usize),
    Caches(usize),
}

/// What the numbers of a report are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    /// What is live.
    Outstanding,
    /// What was allocated since the last report.
    Allocated,
    /// What was freed since the last report, and lived for less than an interval.
    Churned,
    /// What was live when most was.
    Peak,
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Outstanding => "with outstanding allocations",
            Self::Allocated => "with allocations since the last report",
            Self::Churned => "with allocations freed within an interval",
            Self::Peak => "when most was outstanding",
        })
    }
}

/// A process as rows name it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ProcessName {
    pub(crate) pid: u32,
    pub(crate) comm: String,
}

/// An outstanding block of `--show-allocs`.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "allocation")]
struct Block {
    #[serde(serialize_with = "hex")]
    address: u64,
    size_bytes: u64,
    #[serde(serialize_with = "hex")]
    stack_id: u64,
}

impl Row for Block {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "\taddr = {:x} size = {}",
            self.address, self.size_bytes
        )
    }
}

/// Prints the rows of `--show-allocs`.
pub(crate) fn list(output: &mut Output, allocations: &[Allocation]) -> Result<()> {
    for allocation in allocations {
        output.row(&Block {
            address: allocation.address,
            size_bytes: allocation.size,
            stack_id: allocation.stack,
        })?;
    }
    Ok(())
}

/// A free of what had been freed before.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "double_free")]
pub(crate) struct Freed {
    #[serde(serialize_with = "clock::serialize")]
    pub(crate) time: Zoned,
    #[serde(flatten)]
    pub(crate) process: Option<ProcessName>,
    #[serde(serialize_with = "hex")]
    pub(crate) address: u64,
    #[serde(flatten)]
    pub(crate) stack: NamedStack,
}

/// For stderr: a report on stdout has BCC's lines only.
impl fmt::Display for Freed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "memleak: {:#x} was freed, and not for the first time, from stack",
            self.address
        )?;
        for frame in self.stack.part().into_iter().flat_map(|part| &part.frames) {
            for row in frame.rows() {
                writeln!(f, "\t\t0x{:016x}\t{row}", frame.address)?;
            }
        }
        Ok(())
    }
}

impl Row for Freed {
    fn text(&self, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}

/// A stack that freed what was not recorded.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "unknown_frees")]
pub(crate) struct UnknownFrees {
    /// How often, since the start.
    pub(crate) frees: u64,
    #[serde(flatten)]
    pub(crate) process: Option<ProcessName>,
    #[serde(flatten)]
    pub(crate) stack: NamedStack,
}

impl Row for UnknownFrees {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(out, "\t{} frees of unknown blocks from stack", self.frees)?;
        text_of_process(self.process.as_ref(), out)?;
        writeln!(out)?;
        text_of_stack(&self.stack, true, out)
    }
}

fn text_of_process(process: Option<&ProcessName>, out: &mut dyn Write) -> io::Result<()> {
    let Some(ProcessName { pid, comm }) = process else {
        return Ok(());
    };
    write!(out, " of PID {pid} ({comm})")
}

fn text_of_stack(stack: &NamedStack, addresses: bool, out: &mut dyn Write) -> io::Result<()> {
    let frames = stack.part().map_or(&[][..], |part| &part.frames);
    for frame in frames {
        for row in frame.rows() {
            if addresses {
                writeln!(out, "\t\t0x{:016x}\t{row}", frame.address)?;
            } else {
                writeln!(out, "\t\t{row}")?;
            }
        }
    }
    if frames.is_empty() {
        writeln!(out, "\t\tstack information lost")?;
    } else if let Some(reason) = stack.truncated() {
        writeln!(out, "\t\t[truncated: {reason}]")?;
    }
    Ok(())
}

/// One stack with what it has outstanding.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "stack")]
pub(crate) struct Group {
    pub(crate) bytes: u64,
    /// Half of the interval in which the truth is in 95 % of all cases, if it is an estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) requested_bytes: Option<u64>,
    pub(crate) allocations: u64,
    /// The process, if there are several.
    #[serde(flatten)]
    pub(crate) process: Option<ProcessName>,
    #[serde(flatten)]
    pub(crate) age: Option<Age>,
    #[serde(flatten)]
    pub(crate) growth: Option<Growth>,
    #[serde(serialize_with = "hex")]
    pub(crate) stack_id: u64,
    #[serde(flatten)]
    pub(crate) stack: NamedStack,
    /// Whether addresses are printed, which the BCC tool leaves out with --combined-only.
    #[serde(skip)]
    pub(crate) addresses: bool,
    /// Whether age and growth are printed.
    #[serde(skip)]
    pub(crate) extended: bool,
}

impl Group {
    /// The group of this entry.
    pub(crate) fn new(entry: &Entry, stack: NamedStack, args: &Args) -> Self {
        let Entry { path, total, .. } = *entry;
        Self {
            bytes: total.bytes,
            error_bytes: entry.error_bytes,
            requested_bytes: None,
            allocations: total.allocations,
            process: None,
            age: entry.age,
            growth: entry.growth,
            stack_id: path.stack,
            stack,
            addresses: !args.combined_only,
            extended: args.extended,
        }
    }
}

impl Row for Group {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(
            out,
            "\t{} bytes in {} allocations from stack",
            self.bytes, self.allocations
        )?;
        text_of_process(self.process.as_ref(), out)?;
        if let Some(requested) = self.requested_bytes.filter(|bytes| *bytes != self.bytes) {
            write!(out, " ({requested} requested)")?;
        }
        if let Some(error) = self.error_bytes.filter(|error| *error > 0) {
            write!(out, " (estimated, within {error} bytes)")?;
        }
        writeln!(out)?;
        if self.extended {
            self.text_of_age_and_growth(out)?;
        }
        text_of_stack(&self.stack, self.addresses, out)
    }
}

impl Group {
    fn text_of_age_and_growth(&self, out: &mut dyn Write) -> io::Result<()> {
        let seconds = |ms: u64| format!("{}.{} s", ms / 1000, ms / 100 % 10);
        let mut parts = Vec::new();
        if let Some(age) = self.age {
            parts.push(format!(
                "oldest {}, median {}",
                seconds(age.oldest_age_ms),
                seconds(age.median_age_ms)
            ));
        }
        if let Some(growth) = self.growth {
            parts.push(format!(
                "{:+} bytes since the last report, {:+} since the first, {:+} a second",
                growth.growth_bytes, growth.growth_bytes_in_all, growth.growth_bytes_per_second
            ));
        }
        if parts.is_empty() {
            return Ok(());
        }
        writeln!(out, "\t  {}", parts.join("; "))
    }
}

/// One call of `--trace`.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "call")]
pub(crate) struct Call {
    #[serde(serialize_with = "clock::serialize")]
    pub(crate) time: Zoned,
    pub(crate) pid: u32,
    pub(crate) tid: u32,
    pub(crate) comm: String,
    pub(crate) step: Step,
    pub(crate) size_bytes: u64,
    #[serde(serialize_with = "hex")]
    pub(crate) address: u64,
}

/// Where in a call it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Step {
    AllocEntered,
    AllocExited,
    FreeEntered,
}

impl Row for Call {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let Self {
            comm,
            tid,
            size_bytes: size,
            address,
            ..
        } = self;
        write!(out, "{} {comm}-{tid}: ", self.time.strftime("%H:%M:%S.%6f"))?;
        match self.step {
            Step::AllocEntered => writeln!(out, "alloc entered, size = {size}"),
            Step::AllocExited => writeln!(out, "alloc exited, size = {size}, result = {address:x}"),
            Step::FreeEntered => {
                writeln!(out, "free entered, address = {address:x}, size = {size}")
            }
        }
    }
}

fn rfc3339_if_any<S: Serializer>(time: &Option<Zoned>, serializer: S) -> Result<S::Ok, S::Error> {
    time.as_ref().map(clock::rfc3339).serialize(serializer)
}

fn hex<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{value:#x}"))
}

#[cfg(test)]
mod tests {
    use memtools::stacks::named::{Frame, Part};

    use super::*;

    const PID: u32 = 7;

    fn path(stack: u64) -> Path {
        Path { pid: PID, stack }
    }

    fn allocation(stack: u64, size: u64, time_ns: u64) -> Allocation {
        Allocation {
            pid: PID,
            address: 0,
            size,
            stack,
            time_ns,
            calls: 1,
            level: 0,
        }
    }

    fn totals(allocations: &[Allocation]) -> Totals {
        let mut totals = Totals::new();
        add_up(&mut totals, allocations);
        totals
    }

    /// The stacks of what is left and in its order, of four blocks from three stacks. Growth is
    /// measured against an earlier look at two of them.
    fn order(key: SortKey, top: usize) -> Vec<u64> {
        const SECOND: u64 = 1_000_000_000;
        let blocks = [
            allocation(1, 100, 2 * SECOND),
            allocation(2, 10, SECOND),
            allocation(2, 20, 4 * SECOND),
            allocation(3, 50, 3 * SECOND),
        ];
        let mut ages = Ages::of(&blocks);
        let mut history = History::default();
        history.add(
            3 * SECOND,
            totals(&[allocation(1, 100, 0), allocation(2, 26, 0)]),
        );
        let entries = totals(&blocks).into_iter().map(|(path, total)| Entry {
            path,
            total,
            error_bytes: None,
            age: ages.at(5 * SECOND, path),
            growth: history.growth(5 * SECOND, path, total.bytes),
        });
        largest(entries.collect(), key, top)
            .into_iter()
            .map(|entry| entry.path.stack)
            .collect()
    }

    #[test]
    fn the_largest_come_last_and_the_smallest_are_dropped() {
        assert_eq!(order(SortKey::Size, 10), [2, 3, 1]);
        assert_eq!(order(SortKey::Size, 1), [1]);
        assert_eq!(order(SortKey::Count, 10), [3, 1, 2]);
        assert_eq!(order(SortKey::Age, 10), [3, 1, 2]);
        assert_eq!(order(SortKey::Growth, 10), [1, 2, 3]);
        assert_eq!(order(SortKey::Rate, 10), [1, 2, 3]);
        assert_eq!(order(SortKey::Size, 0), [0; 0]);
    }

    #[test]
    fn ages_are_of_the_oldest_and_of_the_middle() {
        let ms = 1_000_000;
        let blocks = [5, 1, 9, 7, 3].map(|time| allocation(1, 8, time * ms));
        let age = Ages::of(&blocks).at(10 * ms, path(1));
        let expected = Age {
            oldest_age_ms: 9,
            median_age_ms: 5,
        };
        assert_eq!(age, Some(expected));
        assert_eq!(Ages::default().at(0, path(1)), None);
    }

    #[test]
    fn growth_is_from_the_last_and_from_the_first_report() {
        const SECOND: u64 = 1_000_000_000;
        let mut history = History::default();
        assert_eq!(history.growth(0, path(1), 100), None);
        history.add(0, totals(&[allocation(1, 100, 0)]));
        history.add(SECOND, totals(&[allocation(1, 400, 0)]));
        let expected = Growth {
            growth_bytes: -100,
            growth_bytes_in_all: 200,
            growth_bytes_per_second: 50,
        };
        assert_eq!(history.growth(4 * SECOND, path(1), 300), Some(expected));
    }

    #[test]
    fn what_came_since_is_the_difference() {
        let earlier = totals(&[allocation(1, 100, 0), allocation(2, 5, 0)]);
        let now = totals(&[
            allocation(1, 100, 0),
            allocation(1, 30, 0),
            allocation(2, 5, 0),
            allocation(3, 7, 0),
        ]);
        let added = since(&earlier, &now);
        let total = |bytes| Total {
            bytes,
            allocations: 1,
            ..Total::default()
        };
        assert_eq!(
            added,
            HashMap::from([(path(1), total(30)), (path(3), total(7))])
        );
    }

    #[test]
    fn parts_of_one_mapping_count_once() {
        let mut totals = Totals::new();
        let part = |calls| Allocation {
            calls,
            level: 0,
            ..allocation(1, 4096, 0)
        };
        add_up(&mut totals, &[part(1), part(0)]);
        assert_eq!(
            totals[&path(1)],
            Total {
                bytes: 8192,
                allocations: 1,
                ..Total::default()
            }
        );
    }

    #[test]
    fn text_is_bccs() {
        let frame = Frame {
            address: 0x55d0c8a01136,
            symbol: Some(("main".to_owned(), 0x6d)),
            module: Some(("allocs".to_owned(), 0x1136)),
            ..Frame::default()
        };
        let part = Part {
            frames: vec![frame],
            truncated: None,
        };
        let mut group = Group {
            bytes: 80,
            error_bytes: None,
            requested_bytes: None,
            allocations: 5,
            process: None,
            age: None,
            growth: None,
            stack_id: 0x1f,
            stack: NamedStack {
                user: Some(part),
                ..NamedStack::default()
            },
            addresses: true,
            extended: false,
        };
        let mut text = Vec::new();
        group.text(&mut text).expect("memory");
        group.addresses = false;
        group.text(&mut text).expect("memory");
        group.stack.user = Some(Part::default());
        group.text(&mut text).expect("memory");
        assert_eq!(
            String::from_utf8_lossy(&text),
            "\t80 bytes in 5 allocations from stack\n\t\t0x000055d0c8a01136\tmain+0x6d [allocs]\n\
             \t80 bytes in 5 allocations from stack\n\t\tmain+0x6d [allocs]\n\
             \t80 bytes in 5 allocations from stack\n\t\tstack information lost\n"
        );
        let json = serde_json::to_string(&group).expect("JSON");
        assert_eq!(
            json,
            r#"{"type":"stack","bytes":80,"allocations":5,"stack_id":"0x1f","user_frames":[],"truncated":null}"#
        );
    }
}
