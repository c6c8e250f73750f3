//! Findings about a process, each with the command to run next.

use std::io::{self, Write};

use memtools::print::output::Row;
use memtools::print::text;
use memtools::verdict::{Reachable, Report, Sum};
use serde::Serialize;

use crate::layout::{HeapRow, Resident};
use crate::screen::WIDTH;

/// Width of the levels.
const INDENT: usize = 6;

/// Bytes of unreachable blocks, and share of all bytes, at which a leak is to be acted on.
const LEAK_BYTES: u64 = 1 << 20;
const LEAK_SHARE: f64 = 0.05;
/// Bytes of free memory in a heap that is at least half free, from which the heap counts as fragmented, and from which
/// the user has to act.
const FREE_BYTES: u64 = 4 << 20;
const MUCH_FREE_BYTES: u64 = 16 << 20;
/// Number of blocks of one type below one root, and bytes of the share of all bytes, at which growth is suspected.
const MANY_BLOCKS: f64 = 10_000.0;
const LARGE_SHARE: f64 = 0.25;
const LARGE_BYTES: u64 = 1 << 20;
/// Private memory below which it does not matter how much of it was examined.
const OUTSIDE_BYTES: u64 = 16 << 20;

/// How urgent a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    Act,
    Look,
    Ok,
}

/// What was found about one question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename = "finding")]
pub(crate) struct Finding {
    pub(crate) level: Level,
    what: &'static str,
    text: String,
    /// Command that answers the next question.
    next: Option<String>,
}

impl Row for Finding {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut lead = match self.level {
            Level::Act => "act   ",
            Level::Look => "look  ",
            Level::Ok => "ok    ",
        };
        let sentence = format!("{}: {}", self.what, self.text);
        for line in text::wrapped(&sentence, WIDTH - INDENT) {
            writeln!(out, "{lead}{line}")?;
            lead = "      ";
        }
        match &self.next {
            Some(next) => writeln!(out, "{lead}next: {next}"),
            None => Ok(()),
        }
    }
}

/// Returns the findings, those to act on first. `judged` is the verdict, or why there is none.
pub(crate) fn find(layout: &HeapRow, judged: Result<&Report, &str>) -> Vec<Finding> {
    let resident = layout.resident();
    let pid = layout.process().pid;
    let mut findings = match judged {
        Ok(report) => {
            let mut all = vec![leak(pid, report)];
            all.extend(growth(pid, report));
            all.extend(outside(layout, &resident, report));
            all
        }
        Err(why) => vec![Finding {
            level: Level::Look,
            what: "leak",
            text: format!("not known: {why}"),
            // Why a process could not be copied comes with its own remedy.
            next: layout.is_copied().then(|| format!("memleak -p {pid} 10")),
        }],
    };
    findings.extend(fragmentation(pid, &resident, layout.trim_bytes()));
    findings.sort_by_key(|finding| finding.level);
    findings
}

/// Returns the sum of all judged blocks.
pub(crate) fn all(report: &Report) -> Sum {
    let sums = &report.verdict.sums;
    [
        sums.unreachable_via,
        sums.undecided,
        sums.python_cycles,
        sums.reachable,
        sums.interior_only,
        sums.suppressed,
    ]
    .into_iter()
    .fold(sums.unreachable, Sum::plus)
}

fn share(part: u64, all: u64) -> f64 {
    part as f64 / all.max(1) as f64
}

fn leak(pid: u32, report: &Report) -> Finding {
    let sums = &report.verdict.sums;
    let lost = sums.unreachable.plus(sums.unreachable_via);
    let (level, text, next) = if sums.unreachable.blocks > 0 {
        let share = share(lost.bytes, all(report).bytes);
        let is_large = lost.bytes >= LEAK_BYTES || share >= LEAK_SHARE;
        let text = format!(
            "{} in {} are unreachable ({:.0} % of all bytes)",
            text::bytes(lost.bytes),
            text::count_with_noun(lost.blocks, "block"),
            share * 100.0
        );
        let next = if is_large {
            (Level::Act, format!("memleak -p {pid} --verdict 60 1"))
        } else {
            (Level::Look, format!("heapscan -p {pid} --leaks"))
        };
        (next.0, text, Some(next.1))
    } else if sums.undecided.blocks > 0 {
        let text = format!(
            "no block is unreachable in both copies; {} ({}) only in the last one",
            text::count_with_noun(sums.undecided.blocks, "block"),
            text::bytes(sums.undecided.bytes)
        );
        (Level::Ok, text, None)
    } else if sums.python_cycles.blocks > 0 {
        let text = format!(
            "all blocks are reachable, or in Python reference cycles ({}), which the garbage collector frees",
            text::bytes(sums.python_cycles.bytes)
        );
        (Level::Ok, text, None)
    } else {
        (Level::Ok, "all blocks are reachable".to_owned(), None)
    };
    Finding {
        level,
        what: "leak",
        text,
        next,
    }
}

/// Suspects growth where one root or container holds many blocks of one type.
fn growth(pid: u32, report: &Report) -> Option<Finding> {
    let all = all(report).bytes;
    let part = |group: &Reachable| group.holder.path_percent / 100.0;
    let is_large = |group: &&Reachable| {
        let bytes = group.bytes as f64 * part(group);
        group.blocks as f64 * part(group) >= MANY_BLOCKS
            || (bytes >= LARGE_BYTES as f64 && bytes >= all as f64 * LARGE_SHARE)
    };
    let group = report.reachable.iter().find(is_large)?;
    let blocks = (group.blocks as f64 * part(group)).round() as u64;
    Some(Finding {
        level: Level::Look,
        what: "growth?",
        text: format!(
            "{} references {} ({}); one scan cannot show a trend",
            group.holder.root,
            text::count_with_noun(blocks, "block"),
            text::display_name(&group.what.text())
        ),
        next: Some(format!("heapscan -p {pid} --growth 60")),
    })
}

/// Tells that most private memory is in no heap that was examined.
fn outside(layout: &HeapRow, resident: &Resident, report: &Report) -> Option<Finding> {
    // CPython's own pools are outside of malloc's heap.
    let in_pools = all(report).bytes.saturating_sub(layout.block_bytes());
    let examined = resident.heap + in_pools;
    let private = resident.heap + resident.runtime + resident.other_private + resident.shared;
    if private < OUTSIDE_BYTES || examined >= private / 4 {
        return None;
    }
    let pid = layout.process().pid;
    let (what, next) = match layout.runtime() {
        Some(runtime) => (runtime.heap(), runtime.tool(pid)),
        None => ("other memory", format!("memtriage -p {pid}")),
    };
    Some(Finding {
        level: Level::Look,
        what: "outside",
        text: format!(
            "{} of {} are in heaps that were examined; most is {what}",
            text::bytes(examined.min(private)),
            text::bytes(private)
        ),
        next: Some(next),
    })
}

fn fragmentation(pid: u32, resident: &Resident, trim: Option<u64>) -> Option<Finding> {
    if resident.heap == 0 {
        return None;
    }
    let free = resident.heap_free;
    let is_half = free * 2 >= resident.heap;
    let level = match free {
        MUCH_FREE_BYTES.. if is_half => Level::Act,
        FREE_BYTES.. if is_half => Level::Look,
        _ => Level::Ok,
    };
    let mut text = format!(
        "{} of the {} heap are free ({:.0} %)",
        text::bytes(free),
        text::bytes(resident.heap),
        share(free, resident.heap) * 100.0
    );
    if let Some(trim) = trim.filter(|_| level != Level::Ok) {
        text += &format!("; malloc_trim(0) would return {}", text::bytes(trim));
    }
    Some(Finding {
        level,
        what: "fragmentation",
        text,
        next: (level != Level::Ok).then(|| format!("heapscan -p {pid} --growth 60")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heap_is_fragmented_that_is_half_free() {
        let level = |heap_free, heap| {
            let resident = Resident {
                heap,
                heap_free,
                ..Resident::default()
            };
            fragmentation(7, &resident, Some(9)).map(|finding| finding.level)
        };
        const MB: u64 = 1 << 20;
        assert_eq!(level(0, 0), None);
        assert_eq!(level(16 * MB, 32 * MB), Some(Level::Act));
        assert_eq!(level(16 * MB, 33 * MB), Some(Level::Ok));
        assert_eq!(level(15 * MB, 30 * MB), Some(Level::Look));
        assert_eq!(level(3 * MB, 4 * MB), Some(Level::Ok));
    }

    #[test]
    fn a_finding_is_wrapped_and_ends_with_its_command() {
        let finding = Finding {
            level: Level::Act,
            what: "fragmentation",
            text: "189.0 MB of the 201.6 MB heap are free (94 %); malloc_trim(0) would return 137.6 MB".into(),
            next: Some("heapscan -p 7 --growth 60".into()),
        };
        let mut lines = Vec::new();
        finding.text(&mut lines).expect("memory");
        assert_eq!(
            String::from_utf8_lossy(&lines),
            "act   fragmentation: 189.0 MB of the 201.6 MB heap are free (94 %);\n      malloc_trim(0) would return 137.6 MB\n      next: heapscan -p 7 --growth 60\n"
        );
    }
}
