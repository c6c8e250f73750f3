//! Stacks, numbers and subject of one report, which each file format is written from.

use jiff::Zoned;

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
