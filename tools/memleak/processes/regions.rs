//! Live mappings of processes. A mapping can be unmapped in part, and one unmap can end several mappings.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;

use crate::sums::Allocation;

/// Part of an mmap(2) that is still mapped: all of it, or one of the parts that a hole leaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Region {
    /// Addresses of the region. The end is that of the requested bytes, not of the page.
    pub(crate) range: Range<u64>,
    /// Number of the call that made the mapping. The parts that a hole leaves share this number.
    pub(crate) call: u64,
    /// CLOCK_MONOTONIC at the call.
    pub(crate) time_ns: u64,
    /// Id of the stack that made the call.
    pub(crate) stack: u64,
    /// Sampling level at which the call was recorded.
    pub(crate) level: u32,
}

/// Mappings of a process that were made while it was traced.
#[derive(Debug)]
pub(crate) struct Regions {
    page_bytes: u64,
    calls: u64,
    by_start: BTreeMap<u64, Region>,
    /// By thread, the regions that its last unmap was about to end, as they were before.
    unmapping: HashMap<u32, Vec<Region>>,
}

impl Regions {
    pub(crate) fn new(page_bytes: u64) -> Self {
        Self {
            page_bytes,
            calls: 0,
            by_start: BTreeMap::new(),
            unmapping: HashMap::new(),
        }
    }

    /// Adds a mapping of `size` bytes, in place of whatever was mapped there.
    pub(crate) fn map(&mut self, start: u64, size: u64, time_ns: u64, stack: u64, level: u32) {
        self.cut(start, size);
        self.calls += 1;
        let range = start..start.saturating_add(size);
        self.by_start.insert(
            start,
            Region {
                range,
                call: self.calls,
                time_ns,
                stack,
                level,
            },
        );
    }

    /// Removes what was mapped there, as a mapping that is not to be recorded has taken its place.
    pub(crate) fn map_ignored(&mut self, start: u64, size: u64) {
        self.cut(start, size);
    }

    /// Removes a range that a thread is about to unmap. Returns whether anything recorded was in the range.
    pub(crate) fn unmap(&mut self, thread: u32, start: u64, size: u64) -> bool {
        let taken = self.cut(start, size);
        let any = !taken.is_empty();
        if any {
            self.unmapping.insert(thread, taken);
        } else {
            self.unmapping.remove(&thread);
        }
        any
    }

    /// Restores what the thread's last unmap was to end, as it has failed.
    pub(crate) fn unmap_failed(&mut self, thread: u32) {
        for region in self.unmapping.remove(&thread).unwrap_or_default() {
            self.by_start.retain(|_, part| {
                part.call != region.call || !overlaps(&part.range, &region.range)
            });
            self.by_start.insert(region.range.start, region);
        }
    }

    /// Returns the regions that are mapped now, in the order of addresses.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Region> {
        self.by_start.values()
    }

    /// Removes whole pages. Returns the regions concerned as they were.
    fn cut(&mut self, start: u64, size: u64) -> Vec<Region> {
        // The size can be any number: that of an unmap is what the process has passed, right or wrong.
        let end = start.saturating_add(size);
        let end = end.checked_next_multiple_of(self.page_bytes);
        let end = end.unwrap_or(u64::MAX);
        let first = self
            .by_start
            .range(..start)
            .next_back()
            .filter(|(_, region)| region.range.end > start)
            .map_or(start, |(&first, _)| first);
        let concerned: Vec<u64> = self
            .by_start
            .range(first..end)
            .map(|(&start, _)| start)
            .collect();
        let mut were = Vec::with_capacity(concerned.len());
        for key in concerned {
            let Some(region) = self.by_start.remove(&key) else {
                continue;
            };
            for part in [region.range.start..start, end..region.range.end] {
                if !part.is_empty() {
                    self.by_start.insert(
                        part.start,
                        Region {
                            range: part,
                            ..region.clone()
                        },
                    );
                }
            }
            were.push(region);
        }
        were
    }
}

fn overlaps(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

/// Counter of calls that counts each call once, however many parts of its mapping are left.
#[derive(Debug, Default)]
pub(crate) struct CallCounter(HashSet<u64>);

impl CallCounter {
    /// Returns 1 if no other part of the region's call was counted before, else 0.
    pub(crate) fn count(&mut self, region: &Region) -> u64 {
        u64::from(self.0.insert(region.call))
    }
}

/// Returns a process's mappings as allocations.
pub(crate) fn allocations_of(pid: u32, regions: &Regions) -> Vec<Allocation> {
    let mut counter = CallCounter::default();
    let allocations = regions.iter().map(|region| Allocation {
        pid,
        address: region.range.start,
        size: region.range.end - region.range.start,
        stack: region.stack,
        time_ns: region.time_ns,
        calls: counter.count(region),
        level: region.level,
    });
    allocations.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn regions(of: &[(u64, u64)]) -> Regions {
        let mut regions = Regions::new(PAGE);
        for &(start, size) in of {
            regions.map(start, size, 0, start, 0);
        }
        regions
    }

    fn ranges(regions: &Regions) -> Vec<(u64, u64)> {
        regions
            .iter()
            .map(|region| (region.range.start, region.range.end))
            .collect()
    }

    #[test]
    fn bytes_asked_for_are_kept_and_pages_unmapped() {
        let mut regions = regions(&[(0x10000, 4093)]);
        assert_eq!(ranges(&regions), [(0x10000, 0x10000 + 4093)]);
        regions.unmap(1, 0x10000, 1);
        assert_eq!(ranges(&regions), []);
    }

    #[test]
    fn a_hole_leaves_two_parts_of_one_call() {
        let mut regions = regions(&[(0x10000, 7 * PAGE)]);
        regions.unmap(1, 0x10000 + 2 * PAGE, PAGE);
        assert_eq!(ranges(&regions), [(0x10000, 0x12000), (0x13000, 0x17000)]);
        let mut counter = CallCounter::default();
        assert_eq!(
            regions
                .iter()
                .map(|region| counter.count(region))
                .sum::<u64>(),
            1
        );
    }

    #[test]
    fn head_and_tail_can_go() {
        let mut regions = regions(&[(0x10000, 5 * PAGE)]);
        regions.unmap(1, 0x10000, PAGE);
        regions.unmap(1, 0x14000, PAGE);
        assert_eq!(ranges(&regions), [(0x11000, 0x14000)]);
    }

    #[test]
    fn one_unmap_can_end_several_and_cut_their_neighbours() {
        let mut regions = regions(&[(0x10000, 2 * PAGE), (0x12000, PAGE), (0x20000, 2 * PAGE)]);
        regions.unmap(1, 0x11000, 0x10000);
        assert_eq!(ranges(&regions), [(0x10000, 0x11000), (0x21000, 0x22000)]);
    }

    #[test]
    fn an_unmap_of_nothing_changes_nothing() {
        let mut regions = regions(&[(0x10000, PAGE)]);
        regions.unmap(1, 0x20000, PAGE);
        regions.unmap(1, 0xf000, PAGE);
        assert_eq!(ranges(&regions), [(0x10000, 0x11000)]);
    }

    #[test]
    fn a_failed_unmap_took_nothing() {
        let before = [(0x10000, 0x13000), (0x20000, 0x21000)];
        let mut regions = regions(&[(0x10000, 3 * PAGE), (0x20000, PAGE)]);
        regions.unmap(1, 0x11000, 0x20000);
        assert_eq!(ranges(&regions), [(0x10000, 0x11000)]);
        regions.unmap_failed(2);
        assert_eq!(ranges(&regions), [(0x10000, 0x11000)]);
        regions.unmap_failed(1);
        assert_eq!(ranges(&regions), before);
        regions.unmap_failed(1);
        assert_eq!(ranges(&regions), before);
    }

    #[test]
    fn sizes_of_unmaps_can_be_wrong() {
        for size in [0, PAGE.wrapping_neg(), 0xfff_u64.wrapping_neg(), u64::MAX] {
            let before = [(0x10000, 0x13000), (0x20000, 0x21000)];
            let mut regions = regions(&[(0x10000, 3 * PAGE), (0x20000, PAGE)]);
            for start in [0x11000, u64::MAX] {
                regions.unmap(1, start, size);
                regions.unmap_failed(1);
                assert_eq!(ranges(&regions), before, "{size:#x}");
            }
        }
    }

    #[test]
    fn a_fixed_mapping_replaces_what_was_there() {
        let mut regions = regions(&[(0x10000, 4 * PAGE)]);
        regions.map(0x11000, PAGE, 0, 2, 0);
        assert_eq!(
            ranges(&regions),
            [(0x10000, 0x11000), (0x11000, 0x12000), (0x12000, 0x14000)]
        );
        regions.map_ignored(0x12000, PAGE);
        assert_eq!(
            ranges(&regions),
            [(0x10000, 0x11000), (0x11000, 0x12000), (0x13000, 0x14000)]
        );
    }
}
