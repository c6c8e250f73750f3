//! Summary at the end of a run: how many of the stacks were complete, and why others were not.

use std::fmt;
use std::io::{self, Write};

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags};
use serde::Serialize;

use super::Mode;
use super::tables::Tables;
use crate::bpf::types::{self, stack_end as End};
use crate::print::output::{Output, Row};
use crate::print::text;

/// Maximum number of files that are named.
const NAMED: usize = 3;

/// Counts of user stacks, each stack as often as it was met.
#[derive(Debug, Default, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// All user stacks.
    pub stacks: u64,
    /// Stacks that go to the outermost function.
    pub complete: u64,
    /// Steps by frame pointers, from code without unwind information, of stacks that were walked
    /// by tables.
    pub frame_pointer_steps: u64,
    /// Stacks walked by frame pointers alone, which may lack frames.
    pub by_frame_pointers_alone: u64,
    /// Stacks that are cut, by reason.
    #[serde(rename = "truncated_by_reason")]
    pub truncated: Truncated,
    /// Kernel memory of the tables, in bytes.
    pub table_bytes: usize,
    /// Files with tables.
    pub table_files: usize,
    /// Files whose tables did not fit.
    pub no_room: u64,
    /// The names of these files, sorted.
    #[serde(skip)]
    no_room_names: Vec<String>,
    #[serde(skip)]
    mode: Mode,
    /// Files without unwind information, each with the number of stacks that ended in it; the largest number first.
    #[serde(skip)]
    missing: Vec<(String, u64)>,
}

/// Counts of stacks that end before the outermost function.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Truncated {
    /// Walks that ended at the depth limit.
    pub depth: u64,
    /// Walks that ended in code without unwind information.
    pub no_unwind_info: u64,
    /// Walks that ended where the caller was in no code that the process is known to have mapped.
    pub no_code: u64,
    /// Walks that ended where the stack could not be read, or made no sense.
    pub stack: u64,
    /// Walks that ended where further frames of a virtual thread were in Java's heap.
    pub in_java_heap: u64,
}

impl Summary {
    pub(super) fn read(
        mode: Mode,
        slots: &impl MapCore,
        missing: &impl MapCore,
        tables: Option<&Tables>,
    ) -> Result<Self> {
        let mut summary = Self {
            mode,
            ..Self::default()
        };
        for index in 0..slots.max_entries() {
            let bytes = slots
                .lookup(&index.to_ne_bytes(), MapFlags::ANY)
                .context("failed to read how stacks have ended")?
                .unwrap_or_default();
            summary.add(types::view(&bytes)?);
        }
        if let Some(tables) = tables {
            summary.table_bytes = tables.bytes();
            summary.table_files = tables.files();
            summary.no_room_names = tables.no_room();
            summary.no_room = summary.no_room_names.len() as u64;
            for key in missing.keys() {
                let count = missing.lookup(&key, MapFlags::ANY)?.unwrap_or_default();
                if let (Ok(key), Ok(count)) = (key.try_into(), count.try_into()) {
                    let name = tables.name(u32::from_ne_bytes(key)).to_owned();
                    summary.missing.push((name, u64::from_ne_bytes(count)));
                }
            }
            summary
                .missing
                .sort_by(|a, b| (b.1, &a.0).cmp(&(a.1, &b.0)));
        }
        Ok(summary)
    }

    fn add(&mut self, slot: &types::stack_slot) {
        let of = |end: End| slot.ends[end.0 as usize];
        self.stacks += slot.ends.iter().sum::<u64>();
        self.complete += of(End::STACK_END_ROOT);
        self.frame_pointer_steps += slot.frame_pointer_steps;
        self.by_frame_pointers_alone +=
            of(End::STACK_END_FRAME_POINTER) + of(End::STACK_END_NO_TABLES);
        self.truncated.depth += of(End::STACK_END_DEPTH);
        self.truncated.no_unwind_info += of(End::STACK_END_NO_RULE);
        self.truncated.no_code += of(End::STACK_END_NO_CODE);
        self.truncated.stack += of(End::STACK_END_UNREADABLE) + of(End::STACK_END_BACKWARDS);
        self.truncated.in_java_heap += of(End::STACK_END_IN_JAVA_HEAP);
    }

    /// Reports the summary on stderr, and as an object in JSON.
    pub(super) fn tell(&self, output: &mut Output) -> Result<()> {
        if self.stacks > 0 {
            output.row(&LastRow { unwinding: self })?;
            output.flush()?;
            crate::message!("{self}");
        }
        Ok(())
    }
}

/// The summary in JSON: `{"type":"unwinding","stacks":7,...}`. Text output has it on stderr.
#[derive(Serialize)]
#[serde(tag = "type", rename = "unwinding")]
struct LastRow<'a> {
    #[serde(flatten)]
    unwinding: &'a Summary,
}

impl Row for LastRow<'_> {
    fn text(&self, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}

/// Formats the summary as a sentence for stderr.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.mode == Mode::Fp {
            return write!(
                f,
                "{} user stacks by frame pointers, which may lack frames (--unwind fp)",
                self.stacks
            );
        }
        write!(
            f,
            "{} user stacks, {} complete",
            self.stacks,
            share(self.complete, self.stacks)
        )?;
        if self.frame_pointer_steps > 0 {
            write!(f, ", {} steps by frame pointers", self.frame_pointer_steps)?;
        }
        let Truncated {
            depth,
            no_unwind_info,
            no_code,
            stack,
            in_java_heap,
        } = self.truncated;
        let without_tables = match self.mode {
            Mode::Dwarf => "not walked, without tables",
            _ => "by frame pointers alone, without tables",
        };
        let missing = names_of(self.missing.iter().map(|(name, _)| name));
        let missing = format!("with no unwind info{missing}");
        let reasons = [
            (self.by_frame_pointers_alone, without_tables),
            (depth, "deeper than the frame limit"),
            (no_unwind_info, &missing),
            (no_code, "called from no known code"),
            (stack, "where the stack is not readable"),
            (
                in_java_heap,
                "of virtual threads whose callers are in Java's heap",
            ),
        ];
        let mut separator = "; incomplete: ";
        for (count, reason) in reasons.into_iter().filter(|(count, _)| *count > 0) {
            write!(f, "{separator}{count} {reason}")?;
            separator = ", ";
        }
        if self.no_room > 0 {
            write!(
                f,
                "; the tables of {}{} did not fit (raise --unwind-memory)",
                text::count_with_noun(self.no_room, "file"),
                names_of(self.no_room_names.iter())
            )?;
        }
        Ok(())
    }
}

/// Formats the first names of files: ` (libfoo.so, libbar.so)`.
fn names_of<'a>(files: impl ExactSizeIterator<Item = &'a String>) -> String {
    let more = files.len() > NAMED;
    let mut names: Vec<&str> = files.take(NAMED).map(String::as_str).collect();
    if more {
        names.push("...");
    }
    if names.is_empty() {
        String::new()
    } else {
        format!(" ({})", names.join(", "))
    }
}

/// Formats a part as a percentage, or as `all` only if it is all.
fn share(part: u64, all: u64) -> String {
    let tenths = part * 1000 / all.max(1);
    if part == all {
        return "all".into();
    }
    format!("{}.{} %", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_all_only_if_it_is() {
        assert_eq!([share(3, 3), share(999_999, 1_000_000)], ["all", "99.9 %"]);
        assert_eq!(share(0, 7), "0.0 %");
    }

    #[test]
    fn each_reason_is_named_once() {
        let mut summary = Summary {
            stacks: 1000,
            complete: 990,
            truncated: Truncated {
                no_unwind_info: 10,
                ..Truncated::default()
            },
            missing: vec![("libfoo.so".into(), 9), ("libbar.so".into(), 1)],
            ..Summary::default()
        };
        assert_eq!(
            summary.to_string(),
            "1000 user stacks, 99.0 % complete; incomplete: 10 with no unwind info (libfoo.so, libbar.so)"
        );
        summary.no_room_names = vec!["cc1".into(), "ld".into()];
        summary.no_room = 2;
        let end = "; the tables of 2 files (cc1, ld) did not fit (raise --unwind-memory)";
        assert!(summary.to_string().ends_with(end), "{summary}");
        summary.mode = Mode::Fp;
        assert!(summary.to_string().contains("(--unwind fp)"), "{summary}");
    }

    #[test]
    fn json_has_the_counts() {
        let summary = Summary {
            stacks: 3,
            complete: 2,
            ..Summary::default()
        };
        let json = serde_json::to_value(LastRow {
            unwinding: &summary,
        })
        .expect("JSON");
        assert_eq!(
            (&json["type"], &json["complete"]),
            (&"unwinding".into(), &2.into())
        );
        assert_eq!(json["truncated_by_reason"]["depth"], 0);
    }
}
