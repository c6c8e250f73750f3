//! Sources of reports: the memory of processes ([`processes`](crate::processes)), or the kernel's own
//! ([`kernel`](crate::kernel)). Reports are made in the same way for both ([`reporter`](crate::reporter)).

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Result;
use memtools::print::output::Output;
use memtools::process::container::ProcessName;
use memtools::run::losses::Losses;
use memtools::run::poll::Wake;
use memtools::stacks::named::NamedStack;
use memtools::stacks::table::Stack;

use crate::rows::Groups;
use crate::sampling;
use crate::serve::UnmatchedFrees;
use crate::sums::{Allocation, Entry, StackKey, Totals};

/// Trace of allocated memory, of which reports are made.
pub(crate) trait Source {
    /// Handles the events since the last call. `wake` says why the wait has ended.
    fn handle_events(&mut self, wake: &Wake, output: &mut Output) -> Result<Flow>;

    /// Returns the latest time at which [`Source::handle_events`] is to be called.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// Returns all allocations at `now_ns` of CLOCK_MONOTONIC, from which a report chooses. Once the target has exited,
    /// the age of a block no longer matters: none will be freed any more.
    fn snapshot(&mut self, now_ns: u64, exited: bool) -> Result<ReportData>;

    /// Returns the symbolized stack of a key.
    fn symbolize(&mut self, key: StackKey) -> Result<NamedStack>;

    /// Returns the stack of a key as the kernel recorded it. Returns None if the stack was lost.
    fn stack(&mut self, key: StackKey) -> Result<Option<Arc<Stack>>>;

    /// Returns what reports group by, with the number of groups.
    fn groups(&self, count: usize) -> Groups {
        Groups::Stacks(count)
    }

    /// Returns the name and the cgroup of a process for metrics. Returns None for the kernel.
    fn process_name(&mut self, _pid: u32) -> Option<ProcessName> {
        None
    }

    /// Whether rows have to name their process.
    fn is_several(&self) -> bool {
        false
    }

    /// Returns the parts of a report's head besides its sums.
    fn heading(&mut self) -> HeadContext;

    /// Returns the target's resident bytes now, if it is a single process and reports show all that is outstanding.
    fn resident_bytes(&self) -> Option<u64> {
        None
    }

    /// Prints the groups of a report, in this order.
    fn print_groups(&mut self, groups: Vec<Entry>, output: &mut Output) -> Result<()>;

    /// Prints what processes that have exited since the last report have left. No later report has that again.
    fn print_exited(&mut self, _output: &mut Output) -> Result<()> {
        Ok(())
    }

    /// Prints what a report has after its groups.
    fn print_more(&mut self, _output: &mut Output) -> Result<()> {
        Ok(())
    }

    /// Returns the counts of what could not be recorded, or kept.
    fn losses(&self) -> Result<Losses>;

    /// Prints remedies for these losses on stderr, and what else a report lacks.
    fn print_remedies(&self, losses: &Losses);

    /// Returns the number of runs of the probes, if they are counted.
    fn hits(&self) -> Option<u64> {
        None
    }
}

/// Data that a report is made of.
#[derive(Default)]
pub(crate) struct ReportData {
    pub(crate) totals: Totals,
    /// Outstanding allocations, if they are known one by one.
    pub(crate) allocations: Vec<Allocation>,
    /// Number of `allocations` that are mappings, not blocks of an allocator.
    pub(crate) mappings: usize,
    /// Errors of the totals, if the totals are estimates.
    pub(crate) errors: Option<HashMap<StackKey, sampling::Error>>,
}

/// Parts of a report's head besides its sums.
#[derive(Default)]
pub(crate) struct HeadContext {
    /// Target, if it is a single process.
    pub(crate) process: Option<ProcessName>,
    /// CLOCK_MONOTONIC of the peak, if the numbers are of the peak.
    pub(crate) peak_ns: Option<u64>,
    /// Whether bytes are those that blocks take, and the requested bytes are known, too.
    pub(crate) tells_requested: bool,
    pub(crate) frees: UnmatchedFrees,
}

/// Next step of a run, after a call of [`Source::handle_events`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flow {
    Continue,
    /// The trace ends with a last report.
    End {
        /// Whether all processes that were named have exited.
        exited: bool,
    },
}
