//! What a tool could not record, by reason. `bpf/include/memtools.bpf.h` counts it.

use std::fmt;
use std::io::{self, Write};
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, Object, Program};
use serde::Serialize;

use crate::filter::Filter;
use crate::output::{Output, Row};
use crate::{run_time, shared};

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
    /// What its programs have counted themselves, in the map `losses`, and what the kernel has counted
    /// of them, and of those that follow processes for the filter. Not of those that keep unwind tables
    /// up to date: a stack itself says what it lacks.
    pub fn of(object: &Object, filter: &Filter) -> Result<Self> {
        let records = |program: &Program<'_>| {
            program.autoload() && !program.name().as_encoded_bytes().starts_with(b"unwind_")
        };
        let lost = Self::counted(object)?.and_runs(object.progs().filter(records));
        let runs = lost.runs + filter.skipped_runs();
        Ok(Self { runs, ..lost })
    }

    /// Reads the map `losses`.
    pub fn counted(object: &Object) -> Result<Self> {
        let map = object.maps().find(|map| map.name() == "losses");
        let bytes = map
            .context("the BPF object has no map of losses")?
            .lookup(&0u32.to_ne_bytes(), MapFlags::ANY)
            .context("failed to read the counters of losses")?
            .unwrap_or_default();
        let shared::losses {
            events,
            entries,
            calls,
            stacks,
            deep_stacks,
            lookups,
            processes,
        } = *shared::view(&bytes)?;
        Ok(Self {
            events,
            entries,
            calls,
            stacks,
            deep_stacks,
            lookups,
            processes,
            runs: 0,
        })
    }

    /// The same, with the runs that the kernel skipped of these programs.
    pub fn and_runs<P: AsFd>(self, programs: impl IntoIterator<Item = P>) -> Self {
        Self {
            runs: run_time::skipped(programs),
            ..self
        }
    }

    /// Says at the end what was lost, if anything: on stderr, and as a last object in JSON.
    pub fn tell(tool: &str, object: &Object, filter: &Filter, output: &mut Output) -> Result<()> {
        let lost = Self::of(object, filter)?;
        if lost.any() {
            output.row(&LastRow { lost })?;
            output.flush()?;
            eprintln!("{tool}: {lost}");
        }
        Ok(())
    }

    /// Whether anything was lost.
    pub fn any(&self) -> bool {
        *self != Self::default()
    }
}

/// `{"lost":{...}}`; text has it on stderr.
#[derive(Serialize)]
struct LastRow {
    lost: Losses,
}

impl Row for LastRow {
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
            (
                self.stacks,
                "stacks (table full; raise --stack-storage-size)",
            ),
            (
                self.deep_stacks,
                "stack tails (deeper than --perf-max-stack-depth)",
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
        let json = serde_json::to_value(LastRow { lost }).expect("JSON");
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
