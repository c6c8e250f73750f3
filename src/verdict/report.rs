//! Rows of a verdict.

use std::io::{self, Write};

use crate::print::output::Row;
use crate::print::text;
use crate::process::container::ProcessName;
use crate::run::losses::Losses;
use crate::stacks::named::{NamedStack, StackText};
use serde::Serialize;

use super::judge::{Group, Sum, Sums, TypeOrSize};

/// The verdict on a process: its blocks by class.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "verdict")]
pub struct Verdict {
    #[serde(flatten)]
    /// Process that was copied.
    pub process: ProcessName,
    /// Pauses of the process by image, in microseconds.
    pub pauses_us: Vec<u64>,
    /// Bytes of the last copy.
    pub copied_bytes: u64,
    /// Name of the first allocator with its version. Empty without a heap.
    pub allocator: String,
    /// Part of the heap that was walked, always `complete`.
    pub coverage: &'static str,
    /// Number of references between blocks.
    pub references: usize,
    /// Trace of the allocations, if they were traced.
    #[serde(flatten)]
    pub trace: Option<Trace>,
    #[serde(flatten)]
    /// Sums of the blocks by class.
    pub sums: Sums,
}

/// The trace before a verdict.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Trace {
    /// Duration of the trace in milliseconds.
    pub traced_ms: u64,
    /// Whether the process was copied at its exit.
    pub at_exit: bool,
    /// Number of blocks of the heap whose allocation was traced.
    pub traced_blocks: u64,
    /// Number of entries of --suppressions that were omitted.
    pub ignored_suppressions: u64,
    /// What the trace has lost.
    pub lost: Losses,
}

impl Row for Verdict {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let pauses = self.pauses_us.iter();
        let pauses: Vec<_> = pauses
            .map(|&us| format!("{:.1} ms", us as f64 / 1000.0))
            .collect();
        let when = match &self.trace {
            Some(Trace { at_exit: true, .. }) => " at its exit".to_owned(),
            _ => format!(", paused for {}", pauses.join(" and ")),
        };
        writeln!(
            out,
            "verdict on {} (pid {}){}{when}; {} copied",
            self.process.comm,
            self.process.pid,
            self.process.inside(),
            text::bytes(self.copied_bytes)
        )?;
        let sums = &self.sums;
        let all = [
            ("unreachable", sums.unreachable, "a leak: definitely lost"),
            ("lost via these", sums.unreachable_via, "indirectly lost"),
            (
                "undecided",
                sums.undecided,
                "possibly lost: unreachable in one snapshot only",
            ),
            (
                "in Python's cycles",
                sums.python_cycles,
                "still reachable: its garbage collector frees them",
            ),
            ("reachable", sums.reachable, "still reachable"),
            (
                "reachable, interior only",
                sums.interior_only,
                "possibly lost: interior or encoded pointers only",
            ),
            ("suppressed", sums.suppressed, "of any class above"),
        ];
        let in_doubt = (
            "in doubt",
            sums.in_doubt,
            "in use or in a thread's cache: in addition, and not classified",
        );
        let blocks = all.iter().map(|(_, sum, _)| sum.blocks).sum();
        let allocator = match self.allocator.as_str() {
            "" => "no heap",
            allocator => allocator,
        };
        writeln!(
            out,
            "{allocator}; coverage: {}: {}",
            self.coverage,
            text::count_with_noun(blocks, "block")
        )?;
        if let Some(trace) = &self.trace {
            writeln!(
                out,
                "allocations traced for {:.1} s: of {} of these blocks",
                trace.traced_ms as f64 / 1000.0,
                text::grouped(trace.traced_blocks)
            )?;
        }
        text_of_classes(&all, out)?;
        text_of_classes(&[in_doubt], out)
    }
}

/// Writes the sums of the classes that have blocks. The class of unreachable blocks is always written.
fn text_of_classes(classes: &[(&str, Sum, &str)], out: &mut dyn Write) -> io::Result<()> {
    for &(name, sum, remark) in classes {
        if sum.blocks == 0 && name != "unreachable" {
            continue;
        }
        let (blocks, bytes) = (
            text::count_with_noun(sum.blocks, "block"),
            text::bytes(sum.bytes),
        );
        let remark = if sum.blocks > 0 { remark } else { "" };
        let line = format!("{name:>26} {blocks:>18} {bytes:>12}  {remark}");
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

/// Sums by the names of Memcheck's categories, for JSON.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "memcheck")]
pub struct Memcheck {
    definitely_lost: Sum,
    indirectly_lost: Sum,
    possibly_lost: Sum,
    still_reachable: Sum,
    suppressed: Sum,
}

impl From<&Sums> for Memcheck {
    fn from(sums: &Sums) -> Self {
        Self {
            definitely_lost: sums.unreachable,
            indirectly_lost: sums.unreachable_via,
            possibly_lost: sums.interior_only.plus(sums.undecided),
            still_reachable: sums.reachable.plus(sums.python_cycles),
            suppressed: sums.suppressed,
        }
    }
}

impl Row for Memcheck {
    /// The categories are in the text of [`Verdict`].
    fn text(&self, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}

/// Blocks that an entry of --suppressions suppresses.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "suppressed")]
pub struct Suppressed {
    /// Name of the entry.
    pub(super) name: String,
    #[serde(flatten)]
    pub(super) sum: Sum,
}

impl Row for Suppressed {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let (blocks, bytes) = (
            text::count_with_noun(self.sum.blocks, "block"),
            text::grouped(self.sum.bytes),
        );
        writeln!(out, "\t{bytes} bytes in {blocks} suppressed: {}", self.name)
    }
}

/// Blocks of one group that nothing refers to, with the blocks that were lost via these.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "leak")]
pub struct Lost {
    #[serde(flatten)]
    /// Kind of the blocks.
    pub what: What,
    /// Number of blocks that nothing refers to.
    pub blocks: u64,
    /// Bytes of these blocks.
    pub bytes: u64,
    /// Number of blocks that only these blocks refer to.
    pub via_blocks: u64,
    /// Bytes of the blocks that only these blocks refer to.
    pub via_bytes: u64,
    /// Address of one of the blocks.
    pub address: String,
    #[serde(flatten)]
    pub(super) origin: Option<Origin>,
    /// Whether allocations were traced.
    #[serde(skip)]
    pub(super) is_traced: bool,
}

/// Stack that blocks were allocated by, and the ages of the blocks.
#[derive(Debug, Serialize)]
pub struct Origin {
    /// Age of the oldest block in milliseconds, when the process was copied.
    pub oldest_age_ms: u64,
    /// Age of the youngest block in milliseconds.
    pub youngest_age_ms: u64,
    #[serde(serialize_with = "text::serialize_address")]
    /// Id of the stack.
    pub stack_id: u64,
    #[serde(flatten)]
    /// Symbolized stack.
    pub stack: NamedStack,
}

/// Ends a row with the stack that its blocks were allocated by. If nothing was traced, only ends the line.
fn text_of_origin(origin: Option<&Origin>, is_traced: bool, out: &mut dyn Write) -> io::Result<()> {
    let Some(origin) = origin else {
        let remark = if is_traced {
            "; allocated before the trace"
        } else {
            ""
        };
        return writeln!(out, "{remark}");
    };
    let seconds = |ms: u64| format!("{}.{}", ms / 1000, ms / 100 % 10);
    let (first, last) = (
        seconds(origin.oldest_age_ms),
        seconds(origin.youngest_age_ms),
    );
    let ages = if first == last {
        first
    } else {
        format!("{first} to {last}")
    };
    writeln!(out, "; allocated {ages} s ago from stack")?;
    write!(out, "{}", StackText::with_addresses(&origin.stack))
}

/// Kind of the blocks of a row.
#[derive(Debug, Serialize)]
pub struct What {
    pub(super) name: Option<String>,
    pub(super) size_bytes: Option<u64>,
}

impl What {
    /// Returns the kind that all blocks of a row have. None means several kinds.
    pub(super) fn of(kind: Option<&TypeOrSize>) -> Self {
        let (name, size_bytes) = match kind {
            Some(TypeOrSize::Type(name)) => (Some(text::escape(name).into_owned()), None),
            Some(TypeOrSize::Size(bytes)) => (None, Some(*bytes)),
            None => (None, None),
        };
        Self { name, size_bytes }
    }

    /// Describes the kind for people.
    pub fn text(&self) -> String {
        match (&self.name, self.size_bytes) {
            (Some(name), _) => name.clone(),
            (None, Some(size)) => format!("unnamed, {size} bytes each"),
            (None, None) => "of several kinds".to_owned(),
        }
    }
}

impl Lost {
    pub(super) fn of(group: &Group, address: u64, origin: Option<Origin>, is_traced: bool) -> Self {
        Self {
            what: What::of(group.kind.as_ref()),
            blocks: group.sum.blocks,
            bytes: group.sum.bytes,
            via_blocks: group.via.blocks,
            via_bytes: group.via.bytes,
            address: format!("{address:#x}"),
            origin,
            is_traced,
        }
    }
}

impl Row for Lost {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(
            out,
            "\t{} bytes in {} unreachable",
            text::grouped(self.bytes),
            text::count_with_noun(self.blocks, "block"),
        )?;
        if self.via_blocks > 0 {
            write!(
                out,
                " (+ {} bytes in {} via)",
                text::grouped(self.via_bytes),
                text::count_with_noun(self.via_blocks, "block")
            )?;
        }
        let Self { what, address, .. } = self;
        write!(out, ": {}, such as {address}", what.text())?;
        text_of_origin(self.origin.as_ref(), self.is_traced, out)
    }
}

/// Reference path to one block, and to others of its group.
#[derive(Debug, Serialize)]
pub struct Chain {
    /// Share of the bytes of the group that have this path.
    pub path_percent: f64,
    /// Address of the example.
    pub(super) address: String,
    /// Holders of the example, the nearest first. Not all are shown.
    pub chain: Vec<String>,
    pub(super) chain_blocks: usize,
    /// Name of the root at which the chain begins.
    pub root: String,
    /// Index in the whole chain of each holder in `chain`.
    #[serde(skip)]
    pub(super) indexes: Vec<usize>,
}

impl Chain {
    /// Describes the holders from the nearest to the root, as `Node <- Cache <- global app`cache`.
    pub fn text(&self) -> String {
        let (mut text, mut next) = (String::new(), 0);
        let mut left_out = |text: &mut String, until: usize| {
            if until > next {
                *text += &format!(
                    "... {} <- ",
                    text::count_with_noun((until - next) as u64, "block")
                );
            }
            next = until + 1;
        };
        for (&at, holder) in self.indexes.iter().zip(&self.chain) {
            left_out(&mut text, at);
            text += &format!("{holder} <- ");
        }
        left_out(&mut text, self.chain_blocks);
        text + &self.root
    }
}

/// Command that answers the next question.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "next")]
pub struct Next {
    pub(super) command: String,
    #[serde(skip)]
    pub(super) to: &'static str,
}

impl Row for Next {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "next, {}: {}", self.to, self.command)
    }
}

/// Reachable blocks of one group, and their reference paths.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "reachable")]
pub struct Reachable {
    #[serde(flatten)]
    /// Kind of the blocks.
    pub what: What,
    /// Number of blocks.
    pub blocks: u64,
    /// Bytes of the blocks.
    pub bytes: u64,
    /// Sum of the idle blocks, if memory use was watched.
    #[serde(flatten)]
    pub(super) idle: Option<IdleSum>,
    #[serde(flatten)]
    /// Path to most of the bytes.
    pub holder: Chain,
    /// Other paths, to a tenth or more of the bytes each.
    pub(super) other_paths: Vec<Chain>,
    #[serde(flatten)]
    pub(super) origin: Option<Origin>,
    /// Whether allocations were traced.
    #[serde(skip)]
    pub(super) is_traced: bool,
}

/// Sum of the idle blocks of a row.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct IdleSum {
    idle_blocks: u64,
    idle_bytes: u64,
}

impl From<Sum> for IdleSum {
    fn from(sum: Sum) -> Self {
        Self {
            idle_blocks: sum.blocks,
            idle_bytes: sum.bytes,
        }
    }
}

impl IdleSum {
    fn text(&self) -> String {
        if self.idle_blocks == 0 {
            return String::new();
        }
        format!(
            ", {} bytes in {} idle",
            text::grouped(self.idle_bytes),
            text::count_with_noun(self.idle_blocks, "block")
        )
    }
}

impl Reachable {
    /// Whether some of the blocks are idle.
    pub fn is_idle(&self) -> bool {
        self.idle.is_some_and(|idle| idle.idle_blocks > 0)
    }
}

impl Row for Reachable {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let percent = self.holder.path_percent;
        let share = if percent < 99.5 {
            format!("{percent:.0} % ")
        } else {
            String::new()
        };
        write!(
            out,
            "\t{} bytes in {} reachable{}: {} <- {share}{}",
            text::grouped(self.bytes),
            text::count_with_noun(self.blocks, "block"),
            self.idle.as_ref().map_or(String::new(), IdleSum::text),
            self.what.text(),
            self.holder.text()
        )?;
        for other in &self.other_paths {
            write!(out, "\n\t\t<- {:.0} % {}", other.path_percent, other.text())?;
        }
        text_of_origin(self.origin.as_ref(), self.is_traced, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_doubt_is_told_beside_the_number_of_blocks() {
        let text = |in_doubt: u64| {
            let sum = |blocks| Sum {
                blocks,
                bytes: 64 * blocks,
            };
            let verdict = Verdict {
                process: ProcessName::default(),
                pauses_us: vec![1000],
                copied_bytes: 0,
                allocator: "jemalloc (5.3)".into(),
                coverage: "complete",
                references: 0,
                trace: None,
                sums: Sums {
                    reachable: sum(2003),
                    in_doubt: sum(in_doubt),
                    ..Sums::default()
                },
            };
            let mut text = Vec::new();
            verdict.text(&mut text).expect("memory");
            String::from_utf8(text).expect("UTF-8")
        };
        let (some, none) = (text(7), text(0));
        assert!(
            some.contains("coverage: complete: 2,003 blocks\n"),
            "{some}"
        );
        let last = some.lines().last().unwrap_or_default();
        let words = "in doubt           7 blocks    448 bytes  in use or in a thread's cache: ";
        assert!(last.trim_start().starts_with(words), "{last}");
        assert!(!none.contains("in doubt"), "{none}");
    }
}
