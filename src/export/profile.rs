//! Stacks, numbers and subject of one report, which each file format is written from.

use jiff::Zoned;

use crate::print::text;
use crate::stacks::named::{NamedStack, Part};

/// Kind and unit of the numbers of stacks, by the names that pprof's format gives to both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ValueType {
    /// The name that the format has for the value, such as `inuse_space`.
    pub kind: &'static str,
    /// The unit, such as `bytes` or `count`.
    pub unit: &'static str,
    /// Name of one unit in a flame graph, such as `bytes` or `faults`.
    pub count_name: &'static str,
}

impl ValueType {
    /// Makes a value of unit `count`. `kind` is its name in pprof's format, `count_name` its name in a flame graph.
    pub const fn count(kind: &'static str, count_name: &'static str) -> Self {
        Self {
            kind,
            unit: "count",
            count_name,
        }
    }

    /// Makes a value of unit `bytes`. `kind` is its name in pprof's format.
    pub const fn bytes(kind: &'static str) -> Self {
        Self {
            kind,
            unit: "bytes",
            count_name: "bytes",
        }
    }
}

/// A stack with its numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// The stack.
    pub stack: NamedStack,
    /// One number for each of the profile's values.
    pub values: Vec<u64>,
}

/// All stacks of a report, not only those that are printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// The tool's name.
    pub tool: &'static str,
    /// Description of the target, such as `pid 1234 (demo)`; escaped.
    pub target: String,
    /// Description of the numbers, such as `outstanding allocations`.
    pub subject: String,
    /// Start of the period that the numbers cover.
    pub since: Zoned,
    /// End of the period that the numbers cover.
    pub until: Zoned,
    /// Kinds of the numbers that each stack has.
    pub values: Vec<ValueType>,
    /// Index of the value that is shown unless another one is requested.
    pub main_value: usize,
    /// Whether a stack's name is that of a thread, not of its process.
    pub by_thread: bool,
    /// The stacks.
    pub samples: Vec<Sample>,
    /// Remarks for the reader of the numbers, such as that they are estimates.
    pub remarks: Vec<String>,
}

impl Profile {
    /// Returns the title, such as `memleak: outstanding allocations of pid 1234 (demo)`.
    pub fn title(&self) -> String {
        format!("{}: {}", self.tool, self.contents())
    }

    /// Describes the numbers and the target, such as `outstanding allocations of pid 1234 (demo)`.
    pub(crate) fn contents(&self) -> String {
        format!("{} of {}", self.subject, self.target)
    }

    /// Returns how many stacks lack frames, and the share of these stacks in the main value. Returns None if all are
    /// complete.
    pub(crate) fn incomplete(&self) -> Option<String> {
        let main = |sample: &Sample| sample.values.get(self.main_value).copied().unwrap_or(0);
        let lacks = |sample: &&Sample| {
            let parts = [&sample.stack.user, &sample.stack.kernel];
            main(sample) > 0
                && parts
                    .into_iter()
                    .flatten()
                    .any(|part| part.missing().is_some())
        };
        let of_weight = self
            .samples
            .iter()
            .filter(|sample| main(sample) > 0)
            .count();
        let (mut stacks, mut weight) = (0, 0);
        for sample in self.samples.iter().filter(lacks) {
            stacks += 1;
            weight += main(sample);
        }
        let percent = weight as f64 / self.total(self.main_value).max(1) as f64 * 100.0;
        let [stacks_text, all] = [stacks, of_weight as u64].map(text::grouped);
        (stacks > 0).then(|| format!("{stacks_text} of {all} stacks incomplete ({percent:.1} %)"))
    }

    /// Returns the sum of one value over all stacks.
    pub fn total(&self, value: usize) -> u64 {
        let values = self
            .samples
            .iter()
            .filter_map(|sample| sample.values.get(value));
        values.sum()
    }
}

impl Part {
    /// Returns the placeholder for missing frames: `[lost]` if the part has no frames, `[truncated: REASON]` if the
    /// stack was cut. None if the part is complete.
    pub fn missing(&self) -> Option<String> {
        if self.frames.is_empty() {
            return Some("[lost]".to_owned());
        }
        let reason = self.truncated.as_ref()?;
        Some(format!("[truncated: {reason}]"))
    }
}
