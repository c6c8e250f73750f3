//! The rows of reports and traces, in text and JSON.

use std::fmt;
use std::io::{self, Write};

use anyhow::Result;
use jiff::Zoned;
use memtools::print::clock;
use memtools::print::output::{Output, Row};
use memtools::print::text;
use memtools::process::container::ProcessName;
use memtools::run::losses::Losses;
use memtools::stacks::named::{NamedStack, StackText};
use serde::{Serialize, Serializer};

use crate::plan::ReportSettings;
use crate::sums::{Age, Allocation, Entry, Growth, View};

/// Amount of memory in a report, or in one of its groups.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Amount {
    pub(crate) bytes: u64,
    /// Half of the 95 % confidence interval of the bytes, if they are an estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) error_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) requested_bytes: Option<u64>,
    pub(crate) allocations: u64,
}

impl Amount {
    /// Returns half of the confidence interval of the bytes, unless they are exact.
    pub(crate) fn error(&self) -> Option<u64> {
        self.error_bytes.filter(|error| *error > 0)
    }
}

/// The head of a report, and in JSON its sums.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "report")]
pub(crate) struct Head {
    #[serde(serialize_with = "clock::serialize")]
    pub(crate) time: Zoned,
    /// Target, if it is a single process.
    #[serde(flatten)]
    pub(crate) process: Option<ProcessName>,
    /// Time of the peak, if the numbers are of the peak.
    #[serde(
        serialize_with = "rfc3339_if_any",
        skip_serializing_if = "Option::is_none"
    )]
    pub(crate) peak_time: Option<Zoned>,
    /// Number of groups that the options ask for.
    #[serde(skip)]
    pub(crate) top: usize,
    /// Kind of allocations that groups are of.
    #[serde(skip)]
    pub(crate) view: View,
    /// Kind and number of the groups with allocations.
    #[serde(flatten)]
    pub(crate) groups: Groups,
    #[serde(flatten)]
    pub(crate) amount: Amount,
    /// Frees of blocks that were not recorded, such as blocks older than the trace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) unknown_frees: Option<u64>,
    /// Frees of blocks that had been freed already, and not allocated since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) double_frees: Option<u64>,
    /// Missed frees: their addresses were allocated again.
    pub(crate) unseen_frees: u64,
    /// Runs of the probes since the start, if they are counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hits: Option<u64>,
    pub(crate) lost: Losses,
}

impl Row for Head {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let time = clock::time_of_day(&self.time);
        let group = self.groups.name();
        write!(out, "[{time}] Top {} {group}s {}", self.top, self.view)?;
        if let Some(time) = &self.peak_time {
            write!(out, " ({})", clock::time_of_day(time))?;
        }
        if let Some(process) = &self.process {
            write!(out, "{}", process.inside())?;
        }
        writeln!(out, ":")
    }
}

/// Kind of groups that a report has, and their number.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Groups {
    Stacks(usize),
    Caches(usize),
}

impl Groups {
    /// Returns the name of one group.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stacks(_) => "stack",
            Self::Caches(_) => "slab cache",
        }
    }
}

/// An outstanding block of `--show-allocs`.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "allocation")]
struct Block {
    #[serde(serialize_with = "text::serialize_address")]
    address: u64,
    size_bytes: u64,
    /// The process, if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    #[serde(serialize_with = "text::serialize_address")]
    stack_id: u64,
}

impl Row for Block {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let (address, size) = (self.address, self.size_bytes);
        write!(out, "\taddr = {address:x} size = {size}")?;
        if let Some(pid) = self.pid {
            write!(out, " of PID {pid}")?;
        }
        writeln!(out)
    }
}

/// Prints the rows of `--show-allocs`, with the process of each if there are several.
pub(crate) fn list(
    output: &mut Output,
    allocations: &[Allocation],
    is_several: bool,
) -> Result<()> {
    for allocation in allocations {
        output.row(&Block {
            address: allocation.address,
            size_bytes: allocation.size,
            pid: is_several.then_some(allocation.pid),
            stack_id: allocation.stack,
        })?;
    }
    Ok(())
}

/// Free of a block that had been freed before.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "double_free")]
pub(crate) struct DoubleFree {
    #[serde(serialize_with = "clock::serialize")]
    pub(crate) time: Zoned,
    #[serde(flatten)]
    pub(crate) process: Option<ProcessName>,
    #[serde(serialize_with = "text::serialize_address")]
    pub(crate) address: u64,
    #[serde(flatten)]
    pub(crate) stack: NamedStack,
}

/// Message on stderr: a report on stdout has BCC's lines only.
impl fmt::Display for DoubleFree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inside = self.process.as_ref().map(ProcessName::inside);
        writeln!(
            f,
            "{:#x} was freed, and not for the first time,{} from stack",
            self.address,
            inside.unwrap_or_default()
        )?;
        StackText::with_addresses(&self.stack).fmt(f)
    }
}

impl Row for DoubleFree {
    fn text(&self, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}

/// Stack that freed blocks that were not recorded.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "unknown_frees")]
pub(crate) struct UnknownFrees {
    /// Number of frees since the start.
    pub(crate) frees: u64,
    #[serde(flatten)]
    pub(crate) process: Option<ProcessName>,
    #[serde(flatten)]
    pub(crate) stack: NamedStack,
}

impl Row for UnknownFrees {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(out, "\t{} frees of unknown blocks from stack", self.frees)?;
        text_of_process(self.process.as_ref(), out)?;
        writeln!(out)?;
        write!(out, "{}", StackText::with_addresses(&self.stack))
    }
}

fn text_of_process(process: Option<&ProcessName>, out: &mut dyn Write) -> io::Result<()> {
    let Some(process) = process else {
        return Ok(());
    };
    let (pid, comm, inside) = (process.pid, &process.comm, process.inside());
    write!(out, " of PID {pid} ({comm}){inside}")
}

/// Stack with its allocations. Rows of the type `exited` follow those of the live ones, and are not in the report's sums.
#[derive(Debug, Serialize)]
pub(crate) struct Group {
    /// Type in JSON: `stack`, or `exited` for what an exited process has left.
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    #[serde(flatten)]
    pub(crate) amount: Amount,
    /// The process, if there are several.
    #[serde(flatten)]
    pub(crate) process: Option<ProcessName>,
    #[serde(flatten)]
    pub(crate) age: Option<Age>,
    #[serde(flatten)]
    pub(crate) growth: Option<Growth>,
    #[serde(serialize_with = "text::serialize_address")]
    pub(crate) stack_id: u64,
    #[serde(flatten)]
    pub(crate) stack: NamedStack,
    /// Whether addresses are printed, which the BCC tool omits with --combined-only.
    #[serde(skip)]
    pub(crate) addresses: bool,
    /// Whether age and growth are printed.
    #[serde(skip)]
    pub(crate) extended: bool,
}

impl Group {
    /// Makes the row of an entry.
    pub(crate) fn new(entry: &Entry, stack: NamedStack, report: &ReportSettings) -> Self {
        let Entry { key, total, .. } = *entry;
        Self {
            kind: "stack",
            amount: Amount {
                bytes: total.bytes,
                error_bytes: entry.error_bytes,
                requested_bytes: None,
                allocations: total.allocations,
            },
            process: None,
            age: entry.age,
            growth: entry.growth,
            stack_id: key.stack,
            stack,
            addresses: report.addresses,
            extended: report.extended,
        }
    }
}

impl Row for Group {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let amount = &self.amount;
        write!(
            out,
            "\t{} bytes in {} allocations from stack",
            amount.bytes, amount.allocations
        )?;
        text_of_process(self.process.as_ref(), out)?;
        let requested = amount.requested_bytes;
        if let Some(requested) = requested.filter(|bytes| *bytes != amount.bytes) {
            write!(out, " ({requested} requested)")?;
        }
        if let Some(error) = amount.error() {
            write!(out, " (estimated, within {error} bytes)")?;
        }
        writeln!(out)?;
        if self.extended {
            self.text_of_age_and_growth(out)?;
        }
        let (stack, addresses) = (&self.stack, self.addresses);
        write!(out, "{}", StackText { stack, addresses })
    }
}

impl Group {
    fn text_of_age_and_growth(&self, out: &mut dyn Write) -> io::Result<()> {
        let seconds = |ms: u64| format!("{}.{} s", ms / 1000, ms / 100 % 10);
        let mut parts = Vec::new();
        if let Some(age) = self.age {
            parts.push(format!(
                "oldest {}, median {}",
                seconds(age.oldest_age_ms),
                seconds(age.median_age_ms)
            ));
        }
        if let Some(growth) = self.growth {
            parts.push(format!(
                "{:+} bytes since the last report, {:+} since the first, {:+} a second",
                growth.growth_bytes, growth.growth_bytes_in_all, growth.growth_bytes_per_second
            ));
        }
        if parts.is_empty() {
            return Ok(());
        }
        writeln!(out, "\t  {}", parts.join("; "))
    }
}

/// One call of `--trace`.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "call")]
pub(crate) struct Call {
    #[serde(serialize_with = "clock::serialize")]
    pub(crate) time: Zoned,
    #[serde(flatten)]
    pub(crate) process: ProcessName,
    pub(crate) tid: u32,
    pub(crate) step: Step,
    pub(crate) size_bytes: u64,
    #[serde(serialize_with = "text::serialize_address")]
    pub(crate) address: u64,
}

/// Point of a call that a row is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Step {
    AllocEntered,
    AllocExited,
    FreeEntered,
}

impl Row for Call {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let Self {
            process,
            tid,
            size_bytes: size,
            address,
            ..
        } = self;
        let time = self.time.strftime("%H:%M:%S.%6f");
        write!(out, "{time} {}-{tid}{}: ", process.comm, process.inside())?;
        match self.step {
            Step::AllocEntered => writeln!(out, "alloc entered, size = {size}"),
            Step::AllocExited => writeln!(out, "alloc exited, size = {size}, result = {address:x}"),
            Step::FreeEntered => {
                writeln!(out, "free entered, address = {address:x}, size = {size}")
            }
        }
    }
}

fn rfc3339_if_any<S: Serializer>(time: &Option<Zoned>, serializer: S) -> Result<S::Ok, S::Error> {
    time.as_ref().map(clock::rfc3339).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use memtools::stacks::named::{Frame, Part};

    use super::*;

    #[test]
    fn a_double_free_says_if_its_stack_is_lost() {
        let freed = DoubleFree {
            time: clock::now(),
            process: None,
            address: 0x7f00,
            stack: NamedStack::default(),
        };
        assert_eq!(
            freed.to_string(),
            "0x7f00 was freed, and not for the first time, from stack\n\t\tstack information lost\n"
        );
    }

    #[test]
    fn text_is_bccs() {
        let frame = Frame {
            address: 0x55d0c8a01136,
            symbol: Some(("main".into(), 0x6d)),
            module: Some(("allocs".into(), 0x1136)),
            ..Frame::default()
        };
        let part = Part {
            frames: vec![frame],
            truncated: None,
        };
        let mut group = Group {
            kind: "stack",
            amount: Amount {
                bytes: 80,
                allocations: 5,
                ..Amount::default()
            },
            process: None,
            age: None,
            growth: None,
            stack_id: 0x1f,
            stack: NamedStack {
                user: Some(part),
                ..NamedStack::default()
            },
            addresses: true,
            extended: false,
        };
        let mut text = Vec::new();
        group.text(&mut text).expect("memory");
        group.addresses = false;
        group.text(&mut text).expect("memory");
        group.stack.user = Some(Part::default());
        group.text(&mut text).expect("memory");
        assert_eq!(
            String::from_utf8_lossy(&text),
            "\t80 bytes in 5 allocations from stack\n\t\t0x000055d0c8a01136\tmain+0x6d [allocs]\n\
             \t80 bytes in 5 allocations from stack\n\t\tmain+0x6d [allocs]\n\
             \t80 bytes in 5 allocations from stack\n\t\tstack information lost\n"
        );
        let json = serde_json::to_string(&group).expect("JSON");
        assert_eq!(
            json,
            r#"{"type":"stack","bytes":80,"allocations":5,"stack_id":"0x1f","user_frames":[],"truncated":null}"#
        );
    }
}
