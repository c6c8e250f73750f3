//! Sums of outstanding allocations by stack: totals, ages, growth, and the stacks that have most.

use std::collections::HashMap;
use std::fmt;
use std::mem;

use anyhow::Result;
use libbpf_rs::MapCore;
use memtools::export::files::ProfileInfo;
use memtools::export::profile::{Sample, ValueType};
use memtools::stacks::named::NamedStack;
use memtools::stacks::table::Stacks;
use serde::Serialize;

use crate::args::SortKey;

/// An allocation that was not freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub(crate) pid: u32,
    pub(crate) address: u64,
    /// Bytes requested.
    pub(crate) size: u64,
    /// Id of the stack that made the allocation.
    pub(crate) stack: u64,
    /// CLOCK_MONOTONIC when the allocation was made.
    pub(crate) time_ns: u64,
    /// Number of calls that this entry counts as: 1, or 0 for a further part of a mapping that has a hole.
    pub(crate) calls: u64,
    /// Sampling level at which the allocation was recorded.
    pub(crate) level: u32,
}

/// Call stack of a process, by which allocations are added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct StackKey {
    pub(crate) pid: u32,
    /// Id of the stack.
    pub(crate) stack: u64,
}

/// Allocations of one stack, outstanding or made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Total {
    pub(crate) bytes: u64,
    pub(crate) allocations: u64,
    /// Requested bytes of kernel memory, where `bytes` is what the allocations take.
    pub(crate) requested_bytes: u64,
}

impl Total {
    /// Returns the numbers that [`subject`] names, as a sample for other formats.
    pub(crate) fn sample(self, stack: NamedStack) -> Sample {
        Sample {
            stack,
            values: vec![self.allocations, self.bytes],
        }
    }
}

/// Returns the names of a view's numbers in other formats. They are the names of Go's heap profiles, where Go has any.
pub(crate) fn subject(view: View, remarks: Vec<String>) -> ProfileInfo {
    let (name, objects, space) = match view {
        View::Outstanding => ("outstanding allocations", "inuse_objects", "inuse_space"),
        View::Peak => ("allocations at peak usage", "inuse_objects", "inuse_space"),
        View::Allocated => ("allocations", "alloc_objects", "alloc_space"),
        View::Churned => (
            "allocations freed within an interval",
            "churn_objects",
            "churn_space",
        ),
    };
    ProfileInfo {
        name: name.to_owned(),
        values: vec![
            ValueType::count(objects, "allocations"),
            ValueType::bytes(space),
        ],
        main_value: 1,
        by_thread: false,
        remarks,
    }
}

/// Totals by stack.
pub(crate) type Totals = HashMap<StackKey, Total>;

/// Sum over all stacks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sum {
    /// Number of stacks with allocations.
    pub(crate) stacks: usize,
    pub(crate) total: Total,
}

impl Sum {
    pub(crate) fn of(totals: &Totals) -> Self {
        let mut sum = Self::default();
        for total in totals.values() {
            sum.stacks += usize::from(total.allocations > 0);
            sum.total.bytes += total.bytes;
            sum.total.allocations += total.allocations;
            sum.total.requested_bytes += total.requested_bytes;
        }
        sum
    }
}

/// Adds up the totals of each process.
pub(crate) fn by_process(totals: &Totals) -> HashMap<u32, Total> {
    let mut sums: HashMap<u32, Total> = HashMap::new();
    for (key, total) in totals {
        let sum = sums.entry(key.pid).or_default();
        sum.bytes += total.bytes;
        sum.allocations += total.allocations;
    }
    sums
}

/// Adds up allocations by stack.
pub(crate) fn add_up<'a>(
    totals: &mut Totals,
    allocations: impl IntoIterator<Item = &'a Allocation>,
) {
    for allocation in allocations {
        let &Allocation { pid, stack, .. } = allocation;
        let total = totals.entry(StackKey { pid, stack }).or_default();
        total.bytes += allocation.size;
        total.allocations += allocation.calls;
    }
}

/// Replaces the id of each stack that the table lost at a renewal by the one id of lost stacks, and merges their
/// totals.
pub(crate) fn merge_lost<M: MapCore>(
    stacks: &mut Stacks<'_, M>,
    totals: &mut Totals,
    allocations: &mut [Allocation],
) -> Result<()> {
    if stacks.lost() == 0 {
        return Ok(());
    }
    for allocation in allocations {
        allocation.stack = stacks.id_or_lost(allocation.stack)?;
    }
    for (key, more) in mem::take(totals) {
        let stack = stacks.id_or_lost(key.stack)?;
        let total = totals.entry(StackKey { stack, ..key }).or_default();
        total.bytes += more.bytes;
        total.requested_bytes += more.requested_bytes;
        total.allocations += more.allocations;
    }
    Ok(())
}

/// Returns what was added to each stack's total since an earlier look. Stacks without new allocations are omitted.
pub(crate) fn since(earlier: &Totals, now: &Totals) -> Totals {
    let added = now.iter().map(|(&key, total)| {
        let before = earlier.get(&key).copied().unwrap_or_default();
        let added = Total {
            bytes: total.bytes.saturating_sub(before.bytes),
            allocations: total.allocations.saturating_sub(before.allocations),
            requested_bytes: total.requested_bytes.saturating_sub(before.requested_bytes),
        };
        (key, added)
    });
    added.filter(|(_, total)| total.allocations > 0).collect()
}

/// Times at which each stack's outstanding blocks were allocated.
#[derive(Debug, Default)]
pub(crate) struct Ages(HashMap<StackKey, Vec<u64>>);

impl Ages {
    pub(crate) fn of<'a>(allocations: impl IntoIterator<Item = &'a Allocation>) -> Self {
        let mut times: HashMap<StackKey, Vec<u64>> = HashMap::new();
        for &Allocation {
            pid,
            stack,
            time_ns,
            ..
        } in allocations
        {
            times
                .entry(StackKey { pid, stack })
                .or_default()
                .push(time_ns);
        }
        Self(times)
    }

    /// Returns the oldest and the median age of a stack's blocks at `now_ns`, in milliseconds.
    pub(crate) fn at(&mut self, now_ns: u64, key: StackKey) -> Option<Age> {
        let times = self.0.get_mut(&key)?;
        let oldest = *times.iter().min()?;
        let middle = times.len() / 2;
        let median = *times.select_nth_unstable(middle).1;
        let ms = |time_ns: u64| now_ns.saturating_sub(time_ns) / 1_000_000;
        Some(Age {
            oldest_age_ms: ms(oldest),
            median_age_ms: ms(median),
        })
    }
}

/// Ages of a stack's outstanding blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Age {
    pub(crate) oldest_age_ms: u64,
    pub(crate) median_age_ms: u64,
}

/// Change of a stack's outstanding bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Growth {
    /// Change since the last report.
    pub(crate) growth_bytes: i64,
    /// Change since the first report.
    pub(crate) growth_bytes_in_all: i64,
    /// Change per second, since the first report.
    pub(crate) growth_bytes_per_second: i64,
}

/// Totals of the first and the last report, from which growth is measured.
#[derive(Debug, Default)]
pub(crate) struct History {
    first: Option<(u64, Totals)>,
    last: Totals,
}

impl History {
    /// Records the totals of a report at `time_ns`.
    pub(crate) fn add(&mut self, time_ns: u64, totals: Totals) {
        self.first.get_or_insert_with(|| (time_ns, totals.clone()));
        self.last = totals;
    }

    /// Returns what was outstanding, or had been allocated, at the last report.
    pub(crate) fn last(&self) -> &Totals {
        &self.last
    }

    /// Returns the growth of a stack up to `time_ns`. Returns None at the first report.
    pub(crate) fn growth(&self, time_ns: u64, key: StackKey, bytes: u64) -> Option<Growth> {
        let (first_ns, first) = self.first.as_ref()?;
        let grown = |from: &Totals| {
            let before = from.get(&key).map_or(0, |total| total.bytes);
            bytes.cast_signed().wrapping_sub(before.cast_signed())
        };
        let elapsed_ns = i128::from(time_ns.saturating_sub(*first_ns)).max(1);
        let in_all = grown(first);
        Some(Growth {
            growth_bytes: grown(&self.last),
            growth_bytes_in_all: in_all,
            growth_bytes_per_second: (i128::from(in_all) * 1_000_000_000 / elapsed_ns)
                .try_into()
                .unwrap_or(i64::MAX),
        })
    }
}

/// Allocations of one stack, with the values that stacks are sorted by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) key: StackKey,
    pub(crate) total: Total,
    /// Error of the bytes, if they are an estimate.
    pub(crate) error_bytes: Option<u64>,
    pub(crate) age: Option<Age>,
    pub(crate) growth: Option<Growth>,
}

/// Returns the `top` entries that are largest by the sort key, the largest last.
pub(crate) fn largest(mut entries: Vec<Entry>, key: SortKey, top: usize) -> Vec<Entry> {
    entries.retain(|entry| entry.total.allocations > 0);
    entries.sort_by_key(|entry| {
        let Total {
            bytes, allocations, ..
        } = entry.total;
        let growth = |of: fn(Growth) -> i64| entry.growth.map_or(i64::MIN, of);
        let first = match key {
            SortKey::Size => i64::MIN,
            SortKey::Count => allocations.cast_signed(),
            SortKey::Age => entry.age.map_or(0, |age| age.oldest_age_ms.cast_signed()),
            SortKey::Growth => growth(|growth| growth.growth_bytes),
            SortKey::Rate => growth(|growth| growth.growth_bytes_per_second),
        };
        (first, bytes, allocations, entry.key)
    });
    entries.split_off(entries.len().saturating_sub(top))
}

/// Kind of allocations that the numbers of a report are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    /// Allocations that are live.
    Outstanding,
    /// Allocations made since the last report.
    Allocated,
    /// Allocations that were freed since the last report, and had lived for less than an interval.
    Churned,
    /// Allocations that were live at the peak.
    Peak,
}

impl fmt::Display for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Outstanding => "with outstanding allocations",
            Self::Allocated => "with allocations since the last report",
            Self::Churned => "with allocations freed within an interval",
            Self::Peak => "at peak usage",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PID: u32 = 7;

    fn key(stack: u64) -> StackKey {
        StackKey { pid: PID, stack }
    }

    fn allocation(stack: u64, size: u64, time_ns: u64) -> Allocation {
        Allocation {
            pid: PID,
            address: 0,
            size,
            stack,
            time_ns,
            calls: 1,
            level: 0,
        }
    }

    fn totals(allocations: &[Allocation]) -> Totals {
        let mut totals = Totals::new();
        add_up(&mut totals, allocations);
        totals
    }

    /// Returns the stacks that [`largest`] keeps, in its order, of four blocks from three stacks. Growth is measured
    /// against an earlier look at two of these stacks.
    fn order(key: SortKey, top: usize) -> Vec<u64> {
        const SECOND: u64 = 1_000_000_000;
        let blocks = [
            allocation(1, 100, 2 * SECOND),
            allocation(2, 10, SECOND),
            allocation(2, 20, 4 * SECOND),
            allocation(3, 50, 3 * SECOND),
        ];
        let mut ages = Ages::of(&blocks);
        let mut history = History::default();
        history.add(
            3 * SECOND,
            totals(&[allocation(1, 100, 0), allocation(2, 26, 0)]),
        );
        let entries = totals(&blocks).into_iter().map(|(key, total)| Entry {
            key,
            total,
            error_bytes: None,
            age: ages.at(5 * SECOND, key),
            growth: history.growth(5 * SECOND, key, total.bytes),
        });
        largest(entries.collect(), key, top)
            .into_iter()
            .map(|entry| entry.key.stack)
            .collect()
    }

    #[test]
    fn the_largest_come_last_and_the_smallest_are_dropped() {
        assert_eq!(order(SortKey::Size, 10), [2, 3, 1]);
        assert_eq!(order(SortKey::Size, 1), [1]);
        assert_eq!(order(SortKey::Count, 10), [3, 1, 2]);
        assert_eq!(order(SortKey::Age, 10), [3, 1, 2]);
        assert_eq!(order(SortKey::Growth, 10), [1, 2, 3]);
        assert_eq!(order(SortKey::Rate, 10), [1, 2, 3]);
        assert_eq!(order(SortKey::Size, 0), [0; 0]);
    }

    #[test]
    fn ages_are_of_the_oldest_and_of_the_middle() {
        let ms = 1_000_000;
        let blocks = [5, 1, 9, 7, 3].map(|time| allocation(1, 8, time * ms));
        let age = Ages::of(&blocks).at(10 * ms, key(1));
        let expected = Age {
            oldest_age_ms: 9,
            median_age_ms: 5,
        };
        assert_eq!(age, Some(expected));
        assert_eq!(Ages::default().at(0, key(1)), None);
    }

    #[test]
    fn growth_is_from_the_last_and_from_the_first_report() {
        const SECOND: u64 = 1_000_000_000;
        let mut history = History::default();
        assert_eq!(history.growth(0, key(1), 100), None);
        history.add(0, totals(&[allocation(1, 100, 0)]));
        history.add(SECOND, totals(&[allocation(1, 400, 0)]));
        let expected = Growth {
            growth_bytes: -100,
            growth_bytes_in_all: 200,
            growth_bytes_per_second: 50,
        };
        assert_eq!(history.growth(4 * SECOND, key(1), 300), Some(expected));
    }

    #[test]
    fn what_came_since_is_the_difference() {
        let earlier = totals(&[allocation(1, 100, 0), allocation(2, 5, 0)]);
        let now = totals(&[
            allocation(1, 100, 0),
            allocation(1, 30, 0),
            allocation(2, 5, 0),
            allocation(3, 7, 0),
        ]);
        let added = since(&earlier, &now);
        let total = |bytes| Total {
            bytes,
            allocations: 1,
            ..Total::default()
        };
        assert_eq!(
            added,
            HashMap::from([(key(1), total(30)), (key(3), total(7))])
        );
    }

    #[test]
    fn parts_of_one_mapping_count_once() {
        let mut totals = Totals::new();
        let part = |calls| Allocation {
            calls,
            level: 0,
            ..allocation(1, 4096, 0)
        };
        add_up(&mut totals, &[part(1), part(0)]);
        assert_eq!(
            totals[&key(1)],
            Total {
                bytes: 8192,
                allocations: 1,
                ..Total::default()
            }
        );
    }
}
