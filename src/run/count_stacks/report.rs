//! Reports of counts by process and stack: as text, folded, as JSON, and as files of their own.

use std::collections::HashMap;
use std::io::{self, Write};
use std::{iter, mem};

use anyhow::Result;
use jiff::Zoned;
use libbpf_rs::MapCore;
use serde::Serialize;

use super::{StackCounts, StackReport, Weight};
use crate::export::files::ProfileInfo;
use crate::export::profile::Sample;
use crate::print::clock;
use crate::print::output::{Format, Output, Row};
use crate::print::progress::Progress;
use crate::print::text;
use crate::process::container::CgroupInfo;
use crate::run::losses::Losses;
use crate::run::stack_sums::{Count, Key, largest};
use crate::stacks::named::NamedStack;

impl<M: MapCore> StackCounts<'_, M> {
    /// Prints what was counted since the last report.
    ///
    /// # Errors
    /// If a map cannot be read, or the output cannot be written to.
    pub fn report(&mut self, output: &mut Output, report: &StackReport<'_>) -> Result<()> {
        let &StackReport {
            format,
            weight,
            args,
            ..
        } = report;
        let time = clock::now();
        self.add_lines(report)?;
        let sums = self.sums.take();
        self.export(report, &sums.counts)?;
        if format == Format::Json {
            return self.report_json(output, report, sums.counts, time);
        }
        let gaps = sums.gaps();
        let mut lines = sums.largest_lines();
        let whole = Whole {
            sum: lines.iter().map(|(_, sum)| sum).sum(),
            stacks: lines.len(),
        };
        let shown = lines.split_off(args.hidden(format, lines.len()));
        let uncounted = self.uncounted()?;
        let has_time = format == Format::Text && args.timestamp;
        let says_something = has_time || !shown.is_empty() || uncounted > 0;
        if says_something && mem::replace(&mut self.has_reported, true) {
            // An empty line separates reports, like paragraphs.
            output.raw(|out| writeln!(out))?;
        }
        if has_time {
            output.raw(|out| writeln!(out, "{:<8}", clock::time_of_day(&time)))?;
        }
        for (line, sum) in &shown {
            let stack = sums.text(*line);
            output.raw(|out| match format {
                Format::Folded => writeln!(out, "{stack} {sum}"),
                _ => writeln!(out, "{stack}    {sum}\n"),
            })?;
        }
        if format == Format::Folded {
            // The bytes of events that were not counted are not known.
            if uncounted > 0 && weight == Weight::Events {
                output.raw(|out| writeln!(out, "[lost] {uncounted}"))?;
            }
            return output.flush();
        }
        output.raw(|out| whole.write(report, shown.len(), out))?;
        for (gap, sum) in gaps {
            output.raw(|out| writeln!(out, "{gap}    {sum}"))?;
        }
        if uncounted > 0 {
            output.raw(|out| writeln!(out, "[not counted]    {uncounted}"))?;
        }
        output.flush()
    }

    /// Writes all stacks into the files that are requested.
    fn export(&mut self, report: &StackReport<'_>, counts: &HashMap<Key, Count>) -> Result<()> {
        if !self.exports.is_enabled() {
            return Ok(());
        }
        let (events, bytes) = report.values;
        let mut samples = Vec::new();
        let mut progress = Progress::new("naming stacks", counts.len());
        for (key, count) in counts {
            progress.step();
            let mut values = vec![count.events];
            values.extend(bytes.map(|_| count.bytes));
            let stack = self.named(key)?;
            samples.push(Sample { stack, values });
        }
        let subject = ProfileInfo {
            name: report.subject.to_owned(),
            values: iter::once(events).chain(bytes).collect(),
            main_value: match report.weight {
                Weight::Events => 0,
                Weight::Bytes => 1,
            },
            by_thread: true,
            remarks: Vec::new(),
        };
        self.exports.write(subject, samples);
        self.exports.begin();
        Ok(())
    }

    /// Returns the events since the last report that were not counted, as a map was full.
    fn uncounted(&mut self) -> Result<u64> {
        let lost = Losses::counted(self.maps.object)?.entries;
        let told = mem::replace(&mut self.reported_lost, lost);
        Ok(lost - told)
    }

    fn report_json(
        &mut self,
        output: &mut Output,
        report: &StackReport<'_>,
        counts: HashMap<Key, Count>,
        time: Zoned,
    ) -> Result<()> {
        let weight = report.weight;
        output.row(&Head {
            time,
            stacks: counts.len(),
            count: counts.values().map(|count| count.events).sum(),
            bytes: weight.bytes(counts.values().map(|count| count.bytes).sum()),
            lost: self.losses()?,
        })?;
        let weights = counts
            .iter()
            .map(|(key, count)| (key.clone(), count.weight(weight)));
        for (key, _) in largest(weights, report.args.top) {
            let stack = self.named(&key)?;
            let count = counts.get(&key).copied().unwrap_or_default();
            output.row(&Entry {
                pid: key.pid,
                comm: &key.comm,
                cgroup_info: self.cgroup_resolver.of(count.cgroup),
                count: count.events,
                bytes: weight.bytes(count.bytes),
                stack,
            })?;
        }
        output.flush()
    }
}

/// Totals of all stacks, of which a report in text shows a part.
struct Whole {
    sum: u64,
    stacks: usize,
}

impl Whole {
    /// Writes a line with the totals, unless there are no stacks.
    fn write(&self, report: &StackReport<'_>, shown: usize, out: &mut dyn Write) -> io::Result<()> {
        if self.stacks == 0 {
            return Ok(());
        }
        let sum = match report.weight {
            Weight::Events => format!("{} {}", text::grouped(self.sum), report.values.0.count_name),
            Weight::Bytes => text::bytes(self.sum),
        };
        let stacks = text::count_with_noun(self.stacks as u64, "stack");
        writeln!(out, "total {sum} in {stacks}, shown {shown}")
    }
}

/// The head of a report in JSON.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "report")]
struct Head {
    #[serde(serialize_with = "clock::serialize")]
    time: Zoned,
    /// The number of pairs of process and stack that something was counted for.
    stacks: usize,
    count: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    /// The losses since the start.
    lost: Losses,
}

/// Counts of one stack of one process.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "stack")]
struct Entry<'a> {
    pid: u32,
    comm: &'a str,
    #[serde(flatten)]
    cgroup_info: CgroupInfo,
    count: u64,
    /// The bytes, if these are what the report sums up.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    #[serde(flatten)]
    stack: NamedStack,
}

/// JSON only: a report in text has no rows.
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
