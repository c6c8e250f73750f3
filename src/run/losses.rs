//! Counts of what a tool could not record, by reason. `bpf/include/memtools.bpf.h` counts most of it.

use std::fmt;
use std::io::{self, Write};
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, Object, Program};
use serde::Serialize;

use crate::bpf::{attach, program_stats, types};
use crate::export::metrics::Metrics;
use crate::print::output::{Output, Row};
use crate::print::timeline::TimelineEntry;
use crate::process::filter::Filter;
use crate::stacks::unwind::Unwinder;

/// Counts since the start; all zero if the report is complete.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Losses {
    /// Events dropped because the ring buffer was full.
    pub events: u64,
    /// Objects not recorded because their map was full.
    pub entries: u64,
    /// Calls not followed from entry to return because too many threads were in one.
    pub calls: u64,
    /// Times that a stack could not be stored because the table of stacks was full.
    pub stacks: u64,
    /// Times that a stack could not be taken because too many others were being taken at the same time.
    pub busy_stacks: u64,
    /// Times that a stack was cut at the depth limit.
    pub deep_stacks: u64,
    /// Mappings, of page faults or segments, that could not be looked up, as the process was
    /// changing its mappings.
    pub lookups: u64,
    /// Processes of a command that were not followed because there were too many at once.
    pub processes: u64,
    /// Times at most that the kernel skipped a program, as it was already running on that CPU: for a
    /// task that was interrupted or, from about 7.0 on, preempted.
    pub runs: u64,
}

impl Losses {
    /// Reads the losses of an object and its filter: what the object's programs have counted in the map `losses`, and
    /// how often the kernel has skipped these programs, or the programs that follow processes for the filter.
    /// Programs that keep unwind tables up to date do not count: a stack itself tells what it lacks.
    ///
    /// # Errors
    /// If the map `losses` or the kernel's counters of the programs cannot be read.
    pub fn of(object: &Object, filter: &Filter) -> Result<Self> {
        let records =
            |program: &Program<'_>| program.autoload() && !attach::unwinds(program.name());
        let lost = Self::counted(object)?.with_skipped_runs(object.progs().filter(records))?;
        Ok(lost.add_skipped_runs(filter.skipped_runs()?))
    }

    /// Reads the map `losses`.
    ///
    /// # Errors
    /// If the map `losses` cannot be read.
    pub fn counted(object: &Object) -> Result<Self> {
        let types::losses {
            events,
            entries,
            calls,
            stacks,
            busy_stacks,
            deep_stacks,
            lookups,
            processes,
            own_events: _,
        } = counters(object)?;
        Ok(Self {
            events,
            entries,
            calls,
            stacks,
            busy_stacks,
            deep_stacks,
            lookups,
            processes,
            runs: 0,
        })
    }

    /// Returns these losses, with the runs of `programs` that the kernel skipped.
    ///
    /// # Errors
    /// If the kernel's counters of the programs cannot be read.
    pub fn with_skipped_runs<P: AsFd>(self, programs: impl IntoIterator<Item = P>) -> Result<Self> {
        Ok(self.add_skipped_runs(program_stats::skipped(programs)?))
    }

    /// Returns these losses, with `runs` more skipped runs.
    pub fn add_skipped_runs(self, runs: u64) -> Self {
        Self {
            runs: self.runs + runs,
            ..self
        }
    }

    /// Returns these losses, with `stacks` more lost stacks, which user space could not keep.
    pub fn add_lost_stacks(self, stacks: u64) -> Self {
        Self {
            stacks: self.stacks + stacks,
            ..self
        }
    }

    /// Reports at the end what was lost, and how many events of the tool itself were omitted, if any: on stderr, and
    /// as last objects in JSON.
    ///
    /// # Errors
    /// If the losses cannot be read (see [`Losses::of`]), or the output cannot be written to.
    pub fn report(object: &Object, filter: &Filter, output: &mut Output) -> Result<()> {
        Self::of(object, filter)?.report_self(object, output)
    }

    /// [`Losses::report`] for a tool whose events may have stacks, followed by the report of the unwinder.
    ///
    /// # Errors
    /// If the losses cannot be read (see [`Losses::of`]), or the output cannot be written to.
    pub fn report_with_unwinder(
        object: &Object,
        filter: &Filter,
        unwinder: Option<Unwinder>,
        output: &mut Output,
    ) -> Result<()> {
        Self::report(object, filter, output)?;
        unwinder.map_or(Ok(()), |unwinder| unwinder.report(output))
    }

    /// Reports these losses, and how many events of the tool itself `object` omitted, if any: on stderr, and as last
    /// objects in JSON.
    ///
    /// # Errors
    /// If the map `losses` cannot be read, or the output cannot be written to.
    pub(crate) fn report_self(self, object: &Object, output: &mut Output) -> Result<()> {
        report_own_events(object, output)?;
        if self.any() {
            output.row(&LostRow { lost: self })?;
            output.flush()?;
            crate::message!("{self}");
        }
        Ok(())
    }

    /// Returns the number of losses for each reason, with the reason's name. [`Losses::normal_by_reason`] has the other
    /// reasons.
    pub fn by_reason(self) -> [(&'static str, u64); 7] {
        [
            ("events", self.events),
            ("entries", self.entries),
            ("calls", self.calls),
            ("stacks", self.stacks),
            ("busy_stacks", self.busy_stacks),
            ("lookups", self.lookups),
            ("processes", self.processes),
        ]
    }

    /// Returns the same of what happens without need for action: stacks that are cut, whose events count, and skipped
    /// runs, whose number is an upper bound.
    pub fn normal_by_reason(self) -> [(&'static str, u64); 2] {
        [("deep_stacks", self.deep_stacks), ("runs", self.runs)]
    }

    /// Sets the counters of losses in the metrics.
    pub fn measure(self, metrics: &mut Metrics) {
        for (what, count) in self.by_reason() {
            metrics.set_lost(what, count);
        }
        for (what, count) in self.normal_by_reason() {
            metrics.set_incomplete(what, count);
        }
    }

    /// Whether anything was lost.
    pub fn any(&self) -> bool {
        *self != Self::default()
    }
}

/// Writes the file of metrics, if there is one, with the losses up to now. The file is not written if it was written
/// just before.
///
/// # Errors
/// If the losses cannot be read (see [`Losses::of`]).
pub fn write_metrics(object: &Object, filter: &Filter, metrics: &mut Metrics) -> Result<()> {
    if metrics.is_enabled() {
        Losses::of(object, filter)?.measure(metrics);
        metrics.write_if_due();
    }
    Ok(())
}

/// Writes the file of metrics for the last time.
///
/// # Errors
/// If the losses cannot be read (see [`Losses::of`]), or the file could not be written.
pub fn finish_metrics(object: &Object, filter: &Filter, mut metrics: Metrics) -> Result<()> {
    if metrics.is_enabled() {
        Losses::of(object, filter)?.measure(&mut metrics);
    }
    metrics.finish()
}

/// Reports how many events of the tool itself were omitted although the options ask for them, if any: on stderr, and
/// as an object in JSON.
///
/// # Errors
/// If the map `losses` cannot be read, or the output cannot be written to.
pub fn report_own_events(object: &Object, output: &mut Output) -> Result<()> {
    let own_events = counters(object)?.own_events;
    if own_events > 0 {
        output.row(&OwnRow { own_events })?;
        output.flush()?;
        crate::message!("ignored {own_events} events of its own");
    }
    Ok(())
}

/// The counters of the object's map `losses`.
fn counters(object: &Object) -> Result<types::losses> {
    let map = object.maps().find(|map| map.name() == "losses");
    let bytes = map
        .context("the BPF object has no map of losses")?
        .lookup(&0u32.to_ne_bytes(), MapFlags::ANY)
        .context("failed to read the counters of losses")?
        .unwrap_or_default();
    Ok(*types::view(&bytes)?)
}

/// JSON object `{"type":"lost","lost":{...}}`; in text the losses are on stderr.
#[derive(Serialize)]
#[serde(tag = "type", rename = "lost")]
struct LostRow {
    lost: Losses,
}

impl Row for LostRow {
    fn text(&self, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }

    fn moment(&self) -> TimelineEntry<'_> {
        TimelineEntry::Remark("lost")
    }
}

/// JSON object `{"type":"own_events","own_events":N}`; in text the number is on stderr.
#[derive(Serialize)]
#[serde(tag = "type", rename = "own_events")]
struct OwnRow {
    own_events: u64,
}

impl Row for OwnRow {
    fn text(&self, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}

/// A sentence for stderr, with the remedy for each reason.
impl fmt::Display for Losses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reasons = [
            (
                self.events,
                "events (ring buffer full; narrow what is traced, or run this under nice -n -20)",
            ),
            (
                self.entries,
                "entries (map full; narrow what is traced, or sample)",
            ),
            (
                self.calls,
                "calls (too many threads in one at once, or an end that did not reach us)",
            ),
            (self.stacks, "stacks (table full)"),
            (
                self.busy_stacks,
                "stacks (too many were being taken at once; trace fewer threads)",
            ),
            (
                self.deep_stacks,
                "stack tails (deeper than the frame limit)",
            ),
            (
                self.lookups,
                "lookups of a mapping (the process was changing its mappings)",
            ),
            (
                self.processes,
                "processes of the command, and what these started (too many at once)",
            ),
            (
                self.runs,
                "program runs, at most (the program was already running on that CPU)",
            ),
        ];
        f.write_str("lost")?;
        let mut separator = " ";
        for (count, reason) in reasons.into_iter().filter(|(count, _)| *count > 0) {
            write!(f, "{separator}{count} {reason}")?;
            separator = ", ";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_them_last() {
        let lost = Losses {
            events: 7,
            ..Losses::default()
        };
        let json = serde_json::to_value(LostRow { lost }).expect("JSON");
        assert_eq!(json["lost"]["events"], 7);
        assert_eq!(json["lost"]["calls"], 0);
    }

    #[test]
    fn each_reason_is_named_once() {
        let losses = Losses {
            events: 2,
            stacks: 3,
            ..Losses::default()
        };
        let text = losses.to_string();
        assert!(
            text.starts_with("lost 2 events (ring buffer full"),
            "{text}"
        );
        assert!(text.contains(", 3 stacks (table full"), "{text}");
        assert!(!text.contains("calls"), "{text}");
        assert!(losses.any() && !Losses::default().any());
    }
}
