//! Rows on a timeline, besides text and JSON: as something that a thread did, or as counts.

use std::borrow::Cow;

use anyhow::Result;
use jiff::Zoned;
use serde_json::Value;

/// Role of a row on a timeline.
#[derive(Debug, Default)]
pub enum TimelineEntry<'a> {
    /// No role: such as a summary that is printed at the end.
    #[default]
    None,
    /// An event on the track of a thread.
    Event(Event<'a>),
    /// Counts, each on a track of its own.
    Counts(Vec<Count<'a>>),
    /// A remark about the trace itself, such as losses, with its name.
    Remark(&'static str),
}

/// Something that a thread did. The fields of the event's row go with it.
#[derive(Debug)]
pub struct Event<'a> {
    /// Name of the event, such as `mmap`.
    pub name: Cow<'a, str>,
    /// The thread's process.
    pub pid: u32,
    /// The thread.
    pub tid: u32,
    /// The thread's name, escaped.
    pub comm: &'a str,
    /// Time of the event's end, by [`Clock`](crate::print::clock::Clock).
    pub end: &'a Zoned,
    /// Duration of the event in nanoseconds, if it is known.
    pub took_ns: Option<u64>,
}

/// Increase of a count since it was last reported.
#[derive(Debug)]
pub struct Count<'a> {
    /// Name of what is counted, such as `page faults`.
    pub name: Cow<'a, str>,
    /// Unit of the number.
    pub unit: Unit,
    /// Process that the count is of, with its escaped name; None for the machine.
    pub process: Option<(u32, &'a str)>,
    /// End of the time that was counted, by [`Clock`](crate::print::clock::Clock).
    pub time: &'a Zoned,
    /// Increase since the last count.
    pub increase: u64,
}

/// Unit of a count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// A number of things.
    Count,
    /// Bytes.
    Bytes,
    /// Nanoseconds.
    Nanoseconds,
}

/// Recorder of rows on a timeline, in a file of its own format. If recording fails, the trace goes on, and the reason
/// is reported then and at the end.
pub trait Timeline {
    /// Records what a thread did. `row` is the JSON of the event's row.
    fn event(&mut self, event: &Event<'_>, row: &Value);

    /// Adds to a count.
    fn count(&mut self, count: &Count<'_>);

    /// Records a remark about the trace itself.
    fn remark(&mut self, name: &str, row: &Value);

    /// Writes what was recorded since the last time.
    fn flush(&mut self);

    /// Writes the rest of the timeline.
    ///
    /// # Errors
    /// If not all of the timeline could be written, now or before.
    fn finish(&mut self) -> Result<()>;
}
