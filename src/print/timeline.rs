//! What rows are on a timeline, besides text and JSON: something that a thread did, or counts.

use std::borrow::Cow;

use anyhow::Result;
use jiff::Zoned;
use serde_json::Value;

/// What a row is on a timeline.
#[derive(Debug, Default)]
pub enum Moment<'a> {
    /// Nothing: what is printed at the end, of all that was before.
    #[default]
    None,
    /// Something on the track of a thread.
    Event(Event<'a>),
    /// Counts, each on a track of its own.
    Counts(Vec<Count<'a>>),
    /// Something about the trace itself, such as losses, with its name.
    Remark(&'static str),
}

/// Something that a thread did. The fields of its row go with it.
#[derive(Debug)]
pub struct Event<'a> {
    /// What it did, such as `mmap`.
    pub name: Cow<'a, str>,
    /// The thread's process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// The thread's name, escaped.
    pub comm: &'a str,
    /// When it was done, by [`Clock`](crate::print::clock::Clock).
    pub end: &'a Zoned,
    /// How long it took, in nanoseconds, if that is known.
    pub took_ns: Option<u64>,
}

/// How much more there is of something than at its last count.
#[derive(Debug)]
pub struct Count<'a> {
    /// What is counted, such as `page faults`.
    pub name: Cow<'a, str>,
    /// What the number is.
    pub unit: Unit,
    /// The process that it is of, and its name, escaped; None for the machine.
    pub process: Option<(u32, &'a str)>,
    /// Until when it was counted, by [`Clock`](crate::print::clock::Clock).
    pub time: &'a Zoned,
    /// How much came since the last count.
    pub more: u64,
}

/// What a count is a number of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Things.
    Count,
    /// Bytes.
    Bytes,
    /// Nanoseconds.
    Nanoseconds,
}

/// What keeps the moments of rows, in a file of its own format. Where that fails the trace goes on, and
/// the reason is told then and at the end.
pub trait Timeline {
    /// Keeps what a thread did. `row` is the JSON of its row.
    fn event(&mut self, event: &Event<'_>, row: &Value);

    /// Adds to a count.
    fn count(&mut self, count: &Count<'_>);

    /// Keeps something about the trace itself.
    fn remark(&mut self, name: &str, row: &Value);

    /// Writes what was kept since the last time.
    fn flush(&mut self);

    /// Writes the rest.
    ///
    /// # Errors
    /// If not all could be written, now or before.
    fn finish(&mut self) -> Result<()>;
}
