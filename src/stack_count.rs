//! Counts by process and stack, which `bpf/include/stack_count.bpf.h` keeps in the kernel, and the
//! reports that are made of them: as text, folded, or as JSON.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use anyhow::Result;
use jiff::Zoned;
use libbpf_rs::{Link, MapCore, Object};
use serde::Serialize;

use crate::attach;
use crate::cli::{self, CommonArgs};
use crate::clock;
use crate::counts::Counts;
use crate::filter::Filter;
use crate::folded::{Line, Part};
use crate::losses::Losses;
use crate::output::{Output, Row};
use crate::poll::Poller;
use crate::reports::{Due, Reports};
use crate::shared;
use crate::stack::{MAX_DEPTH, Stacks};
use crate::symbolize::{Frame, Symbolizer};
use crate::text;
use crate::unwind::{UnwindArgs, Unwinder};

/// Options of the tools that count by stack.
#[derive(Debug, Clone, clap::Args)]
pub struct StackCountArgs {
    /// Print one line a stack for flame graphs; the default if stdout is not a terminal
    #[arg(short, long, conflicts_with = "json")]
    pub folded: bool,

    /// Print stacks as text even if stdout is not a terminal
    #[arg(long, conflicts_with_all = ["json", "folded"])]
    pub text: bool,

    /// Keep processes of the same name apart
    #[arg(short = 'P', long)]
    pub perpid: bool,

    /// Mark the frames of the kernel, for flame graphs to colour them
    #[arg(short, long)]
    pub annotations: bool,

    /// Show only the N largest
    #[arg(long, value_name = "N")]
    pub top: Option<usize>,

    /// Print the time before each summary
    #[arg(short = 'T', long, conflicts_with = "folded")]
    pub timestamp: bool,

    /// Frames to keep of each stack
    #[arg(long, value_name = "N", default_value_t = MAX_DEPTH, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DEPTH)))]
    pub perf_max_stack_depth: u32,

    /// Distinct stacks to keep
    #[arg(long, value_name = "N", default_value_t = 16384, value_parser = clap::value_parser!(u32).range(1..))]
    pub stack_storage_size: u32,

    /// How stacks are walked.
    #[command(flatten)]
    pub unwind: UnwindArgs,

    /// Print a summary every so many seconds, of what was counted in them [default: one at the end]
    #[arg(value_parser = cli::seconds)]
    pub interval: Option<Duration>,

    /// Summaries before it exits [default: until Ctrl-C]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
}

impl StackCountArgs {
    /// What reports look like, with the tool's `--json`.
    pub fn layout(&self, json: bool) -> Layout {
        if json {
            Layout::Json
        } else if self.folded || !(self.text || self.timestamp || io::stdout().is_terminal()) {
            Layout::Folded
        } else {
            Layout::Text
        }
    }
}

/// What a report looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// As stackcount of BCC prints stacks.
    Text,
    /// For flame graphs.
    Folded,
    /// One object a stack and process.
    Json,
}

/// What the sums are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// How often it happened.
    Events,
    /// The bytes that were given with each.
    Bytes,
}

impl Weight {
    fn bytes(self, bytes: u64) -> Option<u64> {
        (self == Weight::Bytes).then_some(bytes)
    }
}

/// What is to be reported, and how.
#[derive(Debug, Clone, Copy)]
pub struct Report<'a> {
    /// What it looks like.
    pub layout: Layout,
    /// What its sums are of.
    pub weight: Weight,
    /// The rest of the options.
    pub args: &'a StackCountArgs,
}

/// What is counted apart.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Key {
    /// Ids of stacks.
    user: u64,
    kernel: u64,
    pid: u32,
    comm: String,
}

/// How much of it there was.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Count {
    events: u64,
    bytes: u64,
}

/// Reads the counts, and prints what has come since the last time.
pub struct StackCounts<'map, M> {
    counts: Counts<'map, M, shared::stack_count_key, shared::stack_count>,
    object: &'map Object,
    filter: &'map Filter,
    stacks: Stacks<'map, M>,
    symbolizer: Symbolizer,
    /// If there are user stacks.
    unwinder: Option<Unwinder>,
}

/// The skeleton's maps that they are made of.
#[derive(Debug)]
pub struct StackCountMaps<'map, M> {
    /// `counts`, `counts_a` and `counts_b`.
    pub counts: [&'map M; 3],
    /// `stacks`.
    pub stacks: &'map M,
    /// All of them.
    pub object: &'map Object,
}

impl<'map, M: MapCore> StackCounts<'map, M> {
    /// Nothing has been counted yet.
    pub fn new(
        maps: &StackCountMaps<'map, M>,
        filter: &'map Filter,
        symbolizer: Symbolizer,
        unwinder: Option<Unwinder>,
    ) -> Self {
        let [counts, a, b] = maps.counts;
        Self {
            counts: Counts::new(counts, a, b),
            object: maps.object,
            filter,
            stacks: Stacks::new(maps.stacks),
            symbolizer,
            unwinder,
        }
    }

    /// Reports at each interval, and when the probes have been detached at the end; and then tells
    /// what could not be counted or named.
    pub fn run(
        mut self,
        tool: &str,
        poller: Poller<'_>,
        common: &CommonArgs,
        args: &StackCountArgs,
        links: Vec<Link>,
        mut print: impl FnMut(&mut Self, &mut Output) -> Result<()>,
    ) -> Result<()> {
        let mut output = Output::new(common.format());
        let mappings = self.symbolizer.descriptor()?;
        let mut poller = poller;
        poller.watch_mappings(&mappings);
        self.symbolizer.look_around();
        let deadline = common.deadline();
        let mut reports = Reports::start(&mut poller, args.interval, args.count, deadline)?;
        loop {
            let (wake, due) = reports.wait(&mut poller)?;
            if wake.mappings {
                self.symbolizer.refresh();
            }
            match due {
                Due::Nothing => {}
                Due::Report => {
                    print(&mut self, &mut output)?;
                    self.stacks.forget_unused()?;
                    self.symbolizer.forget_exited();
                }
                Due::Last => break,
            }
        }
        attach::detach(links);
        print(&mut self, &mut output)?;
        self.tell_losses(tool, &mut output)?;
        match self.unwinder {
            Some(unwinder) => unwinder.tell(tool, &mut output),
            None => Ok(()),
        }
    }

    /// Prints what was counted since the last report.
    pub fn report(&mut self, output: &mut Output, report: &Report<'_>) -> Result<()> {
        let &Report {
            layout,
            weight,
            args,
        } = report;
        let time = Zoned::now();
        self.symbolizer.refresh();
        let counts = self.take()?;
        if layout == Layout::Json {
            return self.report_json(output, report, counts, time);
        }
        if layout == Layout::Text && args.timestamp {
            output.raw(|out| writeln!(out, "{:<8}", clock::time_of_day(&time)))?;
        }
        // Processes of one name are one, and have the same code at different addresses.
        let mut sums: HashMap<String, u64> = HashMap::new();
        for (key, count) in counts {
            let line = Line {
                comm: &key.comm,
                pid: args.perpid.then_some(key.pid),
                user: self.part(key.pid, key.user)?,
                kernel: self.part(key.pid, key.kernel)?,
                annotate: args.annotations,
                weight: 0,
            };
            let stack = match layout {
                Layout::Folded => line.to_string(),
                _ => block(&line),
            };
            *sums.entry(stack).or_default() += count.weight(weight);
        }
        for (stack, sum) in largest(sums, args.top) {
            output.raw(|out| match layout {
                Layout::Folded => writeln!(out, "{stack} {sum}"),
                _ => writeln!(out, "{stack}    {sum}\n"),
            })?;
        }
        output.flush()
    }

    fn report_json(
        &mut self,
        output: &mut Output,
        report: &Report<'_>,
        counts: HashMap<Key, Count>,
        time: Zoned,
    ) -> Result<()> {
        let weight = report.weight;
        output.row(&Head {
            time,
            stacks: counts.len(),
            count: counts.values().map(|count| count.events).sum(),
            bytes: weight.bytes(counts.values().map(|count| count.bytes).sum()),
            lost: Losses::of(self.object, self.filter)?,
        })?;
        let weights: HashMap<Key, u64> = counts
            .iter()
            .map(|(key, count)| (key.clone(), count.weight(weight)))
            .collect();
        for (key, _) in largest(weights, report.args.top) {
            let (user, kernel) = (
                self.part(key.pid, key.user)?,
                self.part(key.pid, key.kernel)?,
            );
            let count = counts.get(&key).copied().unwrap_or_default();
            let parts = [&user, &kernel];
            let reason = |part: &Option<Part>| part.as_ref()?.truncated.clone();
            let truncated_because = parts.into_iter().find_map(reason);
            output.row(&Entry {
                pid: key.pid,
                comm: &key.comm,
                count: count.events,
                bytes: weight.bytes(count.bytes),
                truncated: truncated_because.is_some(),
                truncated_because,
                user_frames: user.map(|part| part.frames),
                kernel_frames: kernel.map(|part| part.frames),
            })?;
        }
        output.flush()
    }

    /// What was counted since the last report, by process, whatever the stack; the largest last.
    pub fn processes(&mut self, report: &Report<'_>) -> Result<Vec<(u32, String, u64)>> {
        let mut sums: HashMap<(u32, String), u64> = HashMap::new();
        for (key, count) in self.take()? {
            *sums.entry((key.pid, key.comm)).or_default() += count.weight(report.weight);
        }
        let largest = largest(sums, report.args.top).into_iter();
        Ok(largest.map(|((pid, comm), sum)| (pid, comm, sum)).collect())
    }

    /// The stack with its names; None if there is none.
    fn part(&mut self, pid: u32, id: u64) -> Result<Option<Part>> {
        let Some(stack) = self.stacks.get(id)? else {
            return Ok(Some(Part::default()));
        };
        Ok((!stack.places.is_empty()).then(|| self.symbolizer.part(pid, &stack)))
    }

    /// What has come since the last call.
    fn take(&mut self) -> Result<HashMap<Key, Count>> {
        let mut counts: HashMap<Key, Count> = HashMap::new();
        for (key, value) in self.counts.take()? {
            // Also those that will not be printed must not be forgotten.
            self.stacks.get(key.user)?;
            self.stacks.get(key.kernel)?;
            let key = Key {
                user: key.user,
                kernel: key.kernel,
                pid: key.pid,
                comm: text::from_c(&key.comm),
            };
            // Names that differ in what is escaped become one.
            let count = counts.entry(key).or_default();
            count.events += value.events;
            count.bytes += value.bytes;
        }
        Ok(counts)
    }

    /// Says what could not be counted or named, at the end.
    fn tell_losses(&self, tool: &str, output: &mut Output) -> Result<()> {
        Losses::tell(tool, self.object, self.filter, output)?;
        if let Some(lost) = self.symbolizer.losses() {
            eprintln!("{tool}: {lost}");
        }
        Ok(())
    }
}

/// The head of a report in JSON.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "report")]
struct Head {
    #[serde(serialize_with = "clock::serialize")]
    time: Zoned,
    /// Stacks and processes that something was counted for.
    stacks: usize,
    count: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    /// Since the start.
    lost: Losses,
}

/// What was counted for one stack of one process.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "stack")]
struct Entry<'a> {
    pid: u32,
    comm: &'a str,
    count: u64,
    /// If these are what is asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    /// Innermost first; empty if the stack was lost, null if there is none.
    user_frames: Option<Vec<Frame>>,
    kernel_frames: Option<Vec<Frame>>,
    truncated: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    truncated_because: Option<String>,
}

/// JSON only: text is not a row for each.
impl Row for Head {
    fn text(&self, _out: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}

impl Row for Entry<'_> {
    fn text(&self, _out: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}

impl Count {
    fn weight(self, weight: Weight) -> u64 {
        match weight {
            Weight::Events => self.events,
            Weight::Bytes => self.bytes,
        }
    }
}

/// The largest `top`, or all, the largest last; what is equal by name.
fn largest<K: Clone + Ord>(sums: HashMap<K, u64>, top: Option<usize>) -> Vec<(K, u64)> {
    let mut sums: Vec<(K, u64)> = sums.into_iter().filter(|(_, sum)| *sum > 0).collect();
    sums.sort_by_cached_key(|(key, sum)| (*sum, Reverse(key.clone())));
    let skip = top.map_or(0, |top| sums.len().saturating_sub(top));
    sums.split_off(skip)
}

/// A stack as stackcount of BCC prints it, up to the count: the kernel's frames, `--`, the user's,
/// innermost first, and the process.
fn block(line: &Line<'_>) -> String {
    let mut block = String::new();
    for part in [&line.kernel, &line.user].into_iter().flatten() {
        if !block.is_empty() {
            block.push_str("    --\n");
        }
        for frame in &part.frames {
            let suffix = if frame.kernel && line.annotate {
                "_[k]"
            } else {
                ""
            };
            // Writing to a String does not fail.
            let _ = writeln!(block, "  {}{suffix}", name(frame));
        }
        if part.frames.is_empty() {
            block.push_str("  [lost]\n");
        }
        if let Some(reason) = &part.truncated {
            let _ = writeln!(block, "  [truncated: {reason}]");
        }
    }
    let _ = match line.pid {
        Some(pid) => writeln!(block, "    {} [{pid}]", line.comm),
        None => writeln!(block, "    {}", line.comm),
    };
    block
}

/// The function's name alone: the place in it would tell apart what belongs together.
fn name(frame: &Frame) -> String {
    match (&frame.symbol, &frame.module) {
        (Some((name, _)), _) => name.clone(),
        (None, Some((module, offset))) => format!("{module}+{offset:#x}"),
        (None, None) => "[unknown]".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_come_last_and_what_is_nothing_not_at_all() {
        let sums = || HashMap::from([("b", 2), ("a", 2), ("c", 9), ("none", 0)]);
        assert_eq!(largest(sums(), None), [("b", 2), ("a", 2), ("c", 9)]);
        assert_eq!(largest(sums(), Some(1)), [("c", 9)]);
    }

    #[test]
    fn text_is_stackcounts() {
        let frame = |symbol: Option<&str>, module: &str| Frame {
            address: 0x1234,
            symbol: symbol.map(|name| (name.to_owned(), 4)),
            module: Some((module.to_owned(), 0x34)),
            kernel: module == "kernel",
        };
        let mut line = Line {
            comm: "cat",
            pid: Some(12),
            user: Some(Part {
                frames: vec![frame(Some("__brk"), "libc.so.6"), frame(None, "cat")],
                truncated: Some("stack not readable".into()),
            }),
            ..Line::default()
        };
        assert_eq!(
            block(&line),
            "  __brk\n  cat+0x34\n  [truncated: stack not readable]\n    cat [12]\n"
        );
        line.pid = None;
        line.annotate = true;
        line.user = Some(Part::default());
        line.kernel = Some(Part {
            frames: vec![frame(Some("do_syscall_64"), "kernel")],
            truncated: None,
        });
        assert_eq!(
            block(&line),
            "  do_syscall_64_[k]\n    --\n  [lost]\n    cat\n"
        );
        line.user = None;
        line.kernel = None;
        assert_eq!(block(&line), "    cat\n");
    }
}
