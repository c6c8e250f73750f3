//! Allocations that processes had outstanding when they exited.
//!
//! This memory is free again. A trace of running processes reports it once, apart from their memory: a service that is
//! restarted would else look like a leak. The trace of a command counts it as outstanding, as a leak checker would at
//! the end of the command.

use std::collections::HashMap;

use crate::sampling::{Error, Sampling};
use crate::sums::{self, Allocation, StackKey, Total, Totals};

/// Maximum number of stacks that are kept apart. Of more, those with the least bytes are counted together.
const MAX_PATHS: usize = 1 << 16;

/// Ends of a process's address spaces, by exec or exit, in their order.
#[derive(Debug, Default)]
pub(crate) struct AddressSpaceEnds(Vec<(u64, End)>);

/// Way in which a process's address space has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The process became another program, which has none of the old memory.
    Exec,
    Exit,
}

/// State of a block that was not freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// The block is still in its process's address space.
    Live,
    /// The block was outstanding when its process exited, at this time.
    Left(u64),
    /// The block's process has become another program.
    Gone,
}

impl AddressSpaceEnds {
    pub(crate) fn add(&mut self, time_ns: u64, end: End) {
        self.0.push((time_ns, end));
    }

    /// Whether the last address space ended with an exit.
    pub(crate) fn has_exited(&self) -> bool {
        self.0.last().is_some_and(|(_, end)| *end == End::Exit)
    }

    /// Returns the fate of a block that was allocated at `born_ns`. Several processes can have the same pid, one after
    /// the other.
    pub(crate) fn fate(&self, born_ns: u64) -> Fate {
        let end = self.0.iter().find(|(time_ns, _)| born_ns < *time_ns);
        match end {
            None => Fate::Live,
            Some((time_ns, End::Exit)) => Fate::Left(*time_ns),
            Some((_, End::Exec)) => Fate::Gone,
        }
    }
}

/// Allocations that exited processes have left, by stack: since the last report, or all.
#[derive(Debug, Default)]
pub(crate) struct ExitedTotals {
    totals: Totals,
    errors: HashMap<StackKey, Error>,
    /// Sum of the stacks that are not kept apart any more.
    rest: Total,
}

impl ExitedTotals {
    /// Adds blocks of exited processes.
    pub(crate) fn add(&mut self, left: &[Allocation], sampling: Option<Sampling>) {
        match sampling {
            None => sums::add_up(&mut self.totals, left),
            Some(sampling) => {
                let (totals, errors) = sampling.estimate(left);
                self.add_to_own(&totals);
                for (key, error) in errors {
                    self.errors.entry(key).or_default().add(error);
                }
            }
        }
        if self.totals.len() > MAX_PATHS {
            self.merge_the_least();
        }
    }

    /// Adds the totals of exited processes, as the BPF programs have added them up.
    pub(crate) fn add_totals(&mut self, totals: &Totals) {
        self.add_to_own(totals);
        if self.totals.len() > MAX_PATHS {
            self.merge_the_least();
        }
    }

    /// Adds what exited processes have left to the totals of live memory.
    pub(crate) fn add_to(
        &self,
        totals: &mut Totals,
        errors: Option<&mut HashMap<StackKey, Error>>,
    ) {
        add_all(totals, &self.totals);
        if let Some(errors) = errors {
            for (key, error) in &self.errors {
                errors.entry(*key).or_default().add(*error);
            }
        }
    }

    /// Returns the totals of the stacks that are kept apart.
    pub(crate) fn totals(&self) -> &Totals {
        &self.totals
    }

    /// Returns the error of a stack's total, in bytes, if the totals are estimates.
    pub(crate) fn error_bytes(&self, key: StackKey) -> Option<u64> {
        self.errors.get(&key).map(|error| error.bytes())
    }

    /// Returns the ids of all stacks that are kept apart.
    pub(crate) fn stacks(&self) -> impl Iterator<Item = u64> {
        self.totals.keys().map(|key| key.stack)
    }

    /// Returns the sum of the stacks that are not kept apart, if there are any.
    pub(crate) fn rest(&self) -> Option<Total> {
        (self.rest.allocations > 0).then_some(self.rest)
    }

    fn add_to_own(&mut self, totals: &Totals) {
        add_all(&mut self.totals, totals);
    }

    fn merge_the_least(&mut self) {
        let mut sizes: Vec<u64> = self.totals.values().map(|total| total.bytes).collect();
        let middle = sizes.len() / 2;
        let median = *sizes.select_nth_unstable(middle).1;
        let (rest, errors) = (&mut self.rest, &mut self.errors);
        self.totals.retain(|key, total| {
            let keep = total.bytes > median;
            if !keep {
                rest.bytes += total.bytes;
                rest.allocations += total.allocations;
                errors.remove(key);
            }
            keep
        });
    }
}

fn add_all(totals: &mut Totals, more: &Totals) {
    for (key, more) in more {
        let total = totals.entry(*key).or_default();
        total.bytes += more.bytes;
        total.allocations += more.allocations;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_goes_with_the_first_end_after_it() {
        let mut ends = AddressSpaceEnds::default();
        assert_eq!(ends.fate(0), Fate::Live);
        // One process exits; another one gets its number, calls exec, and exits.
        for (time_ns, end) in [(10, End::Exit), (20, End::Exec), (30, End::Exit)] {
            ends.add(time_ns, end);
        }
        assert_eq!(ends.fate(9), Fate::Left(10));
        assert_eq!(ends.fate(10), Fate::Gone);
        assert_eq!(ends.fate(25), Fate::Left(30));
        assert_eq!(ends.fate(30), Fate::Live);
    }

    fn block(pid: u32, size: u64) -> Allocation {
        Allocation {
            pid,
            address: 0,
            size,
            stack: 1,
            time_ns: 0,
            calls: 1,
            level: 0,
        }
    }

    #[test]
    fn what_many_have_left_is_all_counted() {
        const PROCESSES: u32 = 100_003;
        let mut ended = ExitedTotals::default();
        let mut bytes = 0;
        for pid in 1..=PROCESSES {
            ended.add(&[block(pid, pid.into())], None);
            bytes += u64::from(pid);
        }
        let totals = ended.totals();
        assert!(totals.len() <= MAX_PATHS);
        let largest = StackKey {
            pid: PROCESSES,
            stack: 1,
        };
        assert_eq!(totals[&largest].bytes, u64::from(PROCESSES));
        let rest = ended.rest().expect("more than can be kept apart");
        let apart: u64 = totals.values().map(|total| total.bytes).sum();
        assert_eq!(apart + rest.bytes, bytes);
        assert_eq!(totals.len() as u64 + rest.allocations, u64::from(PROCESSES));
    }
}
