//! What one report is about, for the formats that are files of their own.

use jiff::Zoned;

use crate::stacks::named::{NamedStack, Part};

/// What is counted by stack, and in which unit: the names that pprof's format gives to both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Value {
    /// The name that the format has for the value, such as `inuse_space`.
    pub kind: &'static str,
    /// The unit, such as `bytes` or `count`.
    pub unit: &'static str,
    /// What one is called in a flame graph, such as `bytes` or `faults`.
    pub counted: &'static str,
}

impl Value {
    /// A number of something, which has this name.
    pub const fn count(kind: &'static str, counted: &'static str) -> Self {
        Self {
            kind,
            unit: "count",
            counted,
        }
    }

    /// A number of bytes.
    pub const fn bytes(kind: &'static str) -> Self {
        Self {
            kind,
            unit: "bytes",
            counted: "bytes",
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
    /// What was traced, such as `pid 1234 (demo)`; escaped.
    pub target: String,
    /// What the numbers are of, such as `outstanding allocations`.
    pub subject: String,
    /// When what the numbers are of began.
    pub since: Zoned,
    /// When it ended.
    pub until: Zoned,
    /// What there is a number of for each stack.
    pub values: Vec<Value>,
    /// The value that is shown unless another one is asked for.
    pub main: usize,
    /// Whether a stack's name is that of a thread, not of its process.
    pub by_thread: bool,
    /// The stacks.
    pub samples: Vec<Sample>,
    /// What a reader of the numbers has to know, such as that they are estimates.
    pub remarks: Vec<String>,
}

impl Profile {
    /// The sum of one value over all stacks.
    pub fn total(&self, value: usize) -> u64 {
        let values = self
            .samples
            .iter()
            .filter_map(|sample| sample.values.get(value));
        values.sum()
    }
}

impl Part {
    /// What stands for frames that are not there: that the whole part was lost, or why it was cut.
    pub fn missing(&self) -> Option<String> {
        if self.frames.is_empty() {
            return Some("[lost]".to_owned());
        }
        let reason = self.truncated.as_ref()?;
        Some(format!("[truncated: {reason}]"))
    }
}
