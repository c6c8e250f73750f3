//! The options of a tool that counts by stack.

use std::time::Duration;

use crate::export::files::ProfileArgs;
use crate::parse;
use crate::print::output::Format;
use crate::run::cli;
use crate::run::skeleton::StackCapacity;
use crate::stacks::table::{self, MAX_DEPTH};
use crate::stacks::unwind::UnwindArgs;

/// Distinct stacks that are kept at most, unless --stack-storage-size says otherwise.
pub(crate) const MAX_STACKS: u32 = 1 << 18;

/// Entries that a map in the kernel may grow to: 40 MB of stacks. More are not needed, as user space empties the map
/// again and again.
pub(crate) const MAX_IN_KERNEL: u32 = 1 << 16;

/// Stacks that a report in text shows, unless --top says otherwise.
pub(crate) const TOP_AS_TEXT: usize = 50;

/// Options of the tools that count by stack.
#[derive(Debug, Clone, clap::Args)]
pub struct StackCountArgs {
    /// Print folded stacks, one per line, for flame graphs
    ///
    /// This is the default if standard output is not a terminal.
    #[arg(short, long, conflicts_with = "json")]
    pub folded: bool,

    /// Print stacks as text even if stdout is not a terminal
    #[arg(hide_short_help = true, long, conflicts_with_all = ["json", "folded"])]
    pub text: bool,

    /// Do not merge processes with the same name
    #[arg(short = 'P', long)]
    pub perpid: bool,

    /// Mark kernel frames, which flame graphs color
    #[arg(hide_short_help = true, short, long)]
    pub annotations: bool,

    /// Print stacks as text, with the offset in each function
    #[arg(hide_short_help = true, short = 's', long, conflicts_with_all = ["json", "folded"])]
    pub offsets: bool,

    /// Print stacks as text, with the address of each frame
    #[arg(hide_short_help = true, long, conflicts_with_all = ["json", "folded"])]
    pub addresses: bool,

    /// Show only the N largest
    ///
    /// The default is 50 as text, and all in other formats.
    #[arg(long, value_name = "N", value_parser = parse::count::<usize>)]
    pub top: Option<usize>,

    /// Print the time before each summary
    #[arg(short = 'T', long, conflicts_with = "folded")]
    pub timestamp: bool,

    /// What the profiles of reports contain.
    #[command(flatten)]
    pub profile: ProfileArgs,

    /// Maximum number of frames of a stack
    #[arg(hide = true, help_heading = "Stacks", long, value_name = "N", default_value_t = MAX_DEPTH, value_parser = cli::stack_depth)]
    pub perf_max_stack_depth: u32,

    /// Maximum number of distinct stacks
    ///
    /// Memory for them is allocated at the start. [default: 262144, on demand]
    #[arg(hide = true, help_heading = "Stacks", long, value_name = "N", value_parser = parse::count::<u32>)]
    pub stack_storage_size: Option<u32>,

    /// How stacks are walked.
    #[command(flatten)]
    pub unwind: UnwindArgs,

    /// Print a summary every SECONDS, as INTERVAL does
    #[arg(hide_short_help = true, short = 'i', long = "interval", value_name = "SECONDS", value_parser = parse::seconds, conflicts_with = "interval")]
    pub interval_option: Option<Duration>,

    /// Seconds between summaries [default: one at the end]
    #[arg(value_parser = parse::seconds)]
    interval: Option<Duration>,

    /// Number of summaries [default: until Ctrl-C]
    #[arg(value_parser = parse::count::<u64>)]
    pub count: Option<u64>,
}

impl StackCountArgs {
    /// Returns the interval between summaries; None for one summary at the end.
    pub fn interval(&self) -> Option<Duration> {
        self.interval.or(self.interval_option)
    }

    /// Returns the initial capacity of the table of stacks.
    pub fn stack_capacity(&self) -> StackCapacity {
        let first_entries = self
            .stack_storage_size
            .map_or_else(table::first_entries, |stacks| stacks.min(MAX_IN_KERNEL));
        StackCapacity {
            first_entries: Some(first_entries),
            depth: self.perf_max_stack_depth,
        }
    }

    /// Returns how many of `stacks` stacks are not shown.
    pub(crate) fn hidden(&self, format: Format, stacks: usize) -> usize {
        let as_text = (format == Format::Text).then_some(TOP_AS_TEXT);
        let shown = self.top.or(as_text);
        shown.map_or(0, |shown| stacks.saturating_sub(shown))
    }

    /// Whether an option is for text alone.
    fn wants_text(&self) -> bool {
        self.text || self.timestamp || self.offsets || self.addresses
    }

    /// Returns the format of reports. `json` is the tool's `--json`; `terminal` tells whether the output is a
    /// terminal.
    pub fn format(&self, json: bool, terminal: bool) -> Format {
        if json {
            Format::Json
        } else if self.folded || !(self.wants_text() || terminal) {
            Format::Folded
        } else {
            Format::Text
        }
    }
}

/// Quantity that the sums add up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// The number of events.
    Events,
    /// The bytes that came with the events.
    Bytes,
}

impl Weight {
    pub(crate) fn bytes(self, bytes: u64) -> Option<u64> {
        (self == Weight::Bytes).then_some(bytes)
    }
}
