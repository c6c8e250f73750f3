//! What reports are of: the memory of processes ([`processes`](crate::processes)), or the kernel's own
//! ([`kernel`](crate::kernel)). How they are made is the same for both ([`reporter`](crate::reporter)).

use std::collections::HashMap;
use std::rc::Rc;
use std::time::Instant;

use anyhow::Result;
use memtools::print::output::Output;
use memtools::run::losses::Losses;
use memtools::run::poll::Wake;
use memtools::stacks::named::NamedStack;
use memtools::stacks::table::Stack;

use crate::rows::{Groups, ProcessName};
use crate::sampling;
use crate::serve::Frees;
use crate::sums::{Allocation, Entry, Path, Totals};

/// Memory that was allocated, as it is traced.
pub(crate) trait Source {
    /// Takes what came since the last call, for which the wait has ended.
    fn follow(&mut self, wake: &Wake, output: &mut Output) -> Result<Next>;

    /// When [`Source::follow`] is to be called at the latest.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    /// All that there is at this time of CLOCK_MONOTONIC, from which a report chooses. Once the target
    /// has exited the age of a block no longer matters: nothing of it will be freed.
    fn find(&mut self, now_ns: u64, exited: bool) -> Result<Found>;

    /// A path's stack with its names.
    fn named(&mut self, path: Path) -> Result<NamedStack>;

    /// A path's stack as the kernel recorded it; None if it was lost.
    fn stack(&mut self, path: Path) -> Result<Option<Rc<Stack>>>;

    /// What reports group by, and how many of these there are.
    fn groups(&self, count: usize) -> Groups {
        Groups::Stacks(count)
    }

    /// Whether rows have to say which process they are of.
    fn is_several(&self) -> bool {
        false
    }

    /// What the head of a report says beside its sums.
    fn heading(&mut self) -> Heading;

    /// Resident bytes now, if the target is one process of which all that is outstanding is shown.
    fn resident_bytes(&self) -> Option<u64> {
        None
    }

    /// Prints the groups of a report, in this order.
    fn print_groups(&mut self, groups: Vec<Entry>, output: &mut Output) -> Result<()>;

    /// Prints what a report has after its groups.
    fn print_more(&mut self, _output: &mut Output) -> Result<()> {
        Ok(())
    }

    /// What could not be recorded, or kept.
    fn losses(&self) -> Result<Losses>;

    /// Says on stderr what helps against these losses, and what else a report lacks.
    fn tell_remedies(&self, losses: &Losses);

    /// Runs of the probes, if they are counted.
    fn hits(&self) -> Option<u64> {
        None
    }
}

/// What a report is made of.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) totals: Totals,
    /// What is outstanding, if it is known block by block.
    pub(crate) allocations: Vec<Allocation>,
    /// How many of these are mappings, and no blocks of an allocator's.
    pub(crate) mappings: usize,
    /// How far off the totals may be, if they are estimates.
    pub(crate) errors: Option<HashMap<Path, sampling::Error>>,
}

/// What the head of a report says beside its sums.
#[derive(Default)]
pub(crate) struct Heading {
    /// The process, if it is one.
    pub(crate) process: Option<ProcessName>,
    /// CLOCK_MONOTONIC when most was outstanding, if the numbers are of then.
    pub(crate) peak_ns: Option<u64>,
    /// Whether bytes are what blocks take, and those asked for are known beside.
    pub(crate) tells_requested: bool,
    pub(crate) frees: Frees,
}

/// What follows what [`Source::follow`] took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    GoOn,
    /// The trace ends with a last report.
    End {
        /// Whether all processes have exited that were named.
        exited: bool,
    },
}
