//! Accounting of memory: parts that add up to a whole, and the unaccounted rest. Accounting of the machine is here,
//! that of a process or a cgroup in [`crate::subject`].
//!
//! Numbers of /proc/meminfo overlap in some places and omit others. The known overlaps, each with its source in
//! the kernel:
//!
//! | number | overlaps with | source |
//! |---|---|---|
//! | `Cached` | contains `Shmem` | fs/proc/meminfo.c: NR_FILE_PAGES without swap cache and buffers |
//! | `SwapCached` | `AnonPages`, if the page is mapped | mm/swap_state.c: swap cache is counted as a file's pages |
//! | `VmallocUsed` (pages since 5.3) | contains `KernelStack`, as stacks are mapped by vmalloc | kernel/fork.c, CONFIG_VMAP_STACK |
//! | `Zswap` | contained in `nr_zspages`, where zsmalloc holds it | mm/zsmalloc.c; zram is in `nr_zspages` alone |
//! | `KReclaimable` (4.20) | contains `SReclaimable` | fs/proc/meminfo.c |
//! | `mem` of /proc/net/sockstat | partly in slab: headers of packets, and small packets | net/core/sock.c: `sk_memory_allocated` |
//! | `MemFree` | omits pages in lists of CPUs | mm/page_alloc.c; /proc/zoneinfo has them |

use memtools::host::values::{self, Values};
use serde::Serialize;

/// Name of the part that the kernel's MemFree and MemAvailable omit.
pub(crate) const FREE_IN_LISTS: &str = "free, in lists of CPUs";

/// One part of the memory of the machine, a process or a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct MemoryPart {
    pub(crate) name: &'static str,
    pub(crate) bytes: u64,
}

/// Parts of a whole, and the size of the whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Accounting {
    /// Name of the number that the parts add up to.
    pub(crate) whole: &'static str,
    /// Size of the whole, in bytes.
    pub(crate) total: u64,
    pub(crate) parts: Vec<MemoryPart>,
}

impl Accounting {
    /// Makes the accounting of a whole of `total` bytes from the parts and their names.
    pub(crate) fn new(
        whole: &'static str,
        total: u64,
        parts: impl IntoIterator<Item = (&'static str, u64)>,
    ) -> Self {
        let part = |(name, bytes)| MemoryPart { name, bytes };
        Self {
            whole,
            total,
            parts: parts.into_iter().map(part).collect(),
        }
    }

    /// Accounts for the machine's memory by the kernel's numbers of one moment.
    pub(crate) fn of(memory: &Values, counters: &Values, zoneinfo: &str, page_bytes: u64) -> Self {
        let of = |name| memory.get_or_zero(name);
        let file = of("Cached") + of("Buffers");
        let lists = [
            "Active(anon)",
            "Inactive(anon)",
            "Active(file)",
            "Inactive(file)",
            "Unevictable",
        ];
        let on_lists: u64 = lists.into_iter().map(of).sum();
        // Pages of the swap cache that no process has mapped are on the lists, but not in any other number.
        let unmapped = on_lists.saturating_sub(of("AnonPages") + file);
        let compressed = counters.get_or_zero("nr_zspages") * page_bytes;
        let parts = [
            ("free", of("MemFree")),
            (
                FREE_IN_LISTS,
                values::pages_in_cpu_lists(zoneinfo) * page_bytes,
            ),
            ("anonymous", of("AnonPages")),
            ("swap cache", unmapped.min(of("SwapCached"))),
            ("file cache", file.saturating_sub(of("Shmem"))),
            ("shmem and tmpfs", of("Shmem")),
            ("slab, reclaimable", of("SReclaimable")),
            ("slab", of("SUnreclaim")),
            (
                "kernel, reclaimable",
                of("KReclaimable").saturating_sub(of("SReclaimable")),
            ),
            ("page tables", of("PageTables") + of("SecPageTables")),
            ("kernel stacks", of("KernelStack")),
            (
                "vmalloc",
                of("VmallocUsed").saturating_sub(of("KernelStack")),
            ),
            ("per-CPU data", of("Percpu")),
            ("huge page pool", of("Hugetlb")),
            ("zswap and zram", compressed.max(of("Zswap"))),
            ("bounce and FUSE", of("Bounce") + of("WritebackTmp")),
            ("graphics", of("GPUActive") + of("GPUReclaim")),
        ];
        Self::new("MemTotal", of("MemTotal"), parts)
    }

    /// Adds a part of which an unknown amount is in other parts, too. It gets at most what is in no other part.
    pub(crate) fn with_overlapping(mut self, name: &'static str, bytes: u64) -> Self {
        let rest = u64::try_from(self.unaccounted()).unwrap_or_default();
        let bytes = bytes.min(rest);
        self.parts.push(MemoryPart { name, bytes });
        self
    }

    /// Returns the bytes that are in no part; below 0 where parts overlap in an unknown way.
    pub(crate) fn unaccounted(&self) -> i64 {
        let sum: u64 = self.parts.iter().map(|part| part.bytes).sum();
        self.total.cast_signed().saturating_sub_unsigned(sum)
    }

    /// Returns the bytes of the part with this name.
    pub(crate) fn part(&self, name: &str) -> Option<u64> {
        let part = self.parts.iter().find(|part| part.name == name);
        part.map(|part| part.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "\
MemTotal: 1000 kB\nMemFree: 300 kB\nBuffers: 10 kB\nCached: 150 kB\nSwapCached: 40 kB\n\
Active(anon): 120 kB\nInactive(anon): 90 kB\nActive(file): 60 kB\nInactive(file): 60 kB\nUnevictable: 0 kB\n\
AnonPages: 160 kB\nShmem: 40 kB\nKReclaimable: 52 kB\nSReclaimable: 50 kB\nSUnreclaim: 60 kB\n\
KernelStack: 8 kB\nPageTables: 12 kB\nVmallocUsed: 20 kB\nPercpu: 4 kB\nHugetlb: 100 kB\nZswap: 12 kB\n";
    const ZONEINFO: &str = "    cpu: 0\n      count: 2\n";

    fn example() -> Accounting {
        let counters = Values::parse("nr_zspages 5\n");
        Accounting::of(&Values::parse(MEMINFO), &counters, ZONEINFO, 4096)
    }

    #[test]
    fn overlaps_are_taken_out_once() {
        let accounting = example();
        let kib = |name| accounting.part(name).map(|bytes| bytes / 1024);
        assert_eq!(kib("file cache"), Some(120));
        assert_eq!(kib("shmem and tmpfs"), Some(40));
        // 330 kB are on the lists, of which 160 are anonymous and 160 are files'.
        assert_eq!(kib("swap cache"), Some(10));
        assert_eq!(kib("kernel, reclaimable"), Some(2));
        assert_eq!(kib("vmalloc"), Some(12));
        assert_eq!(kib("zswap and zram"), Some(20));
        assert_eq!(kib("free, in lists of CPUs"), Some(8));
    }

    #[test]
    fn parts_and_the_rest_are_all_of_it() {
        let accounting = example();
        let sum: u64 = accounting.parts.iter().map(|part| part.bytes).sum();
        assert_eq!(
            sum.cast_signed() + accounting.unaccounted(),
            accounting.total.cast_signed()
        );
        assert_eq!(accounting.unaccounted() / 1024, 1000 - 906);
    }

    #[test]
    fn a_part_that_overlaps_others_is_no_more_than_the_rest() {
        let accounting = || example();
        let of = |bytes| accounting().with_overlapping("sockets", bytes);
        let rest = accounting().unaccounted();
        assert_eq!(of(4096).unaccounted(), rest - 4096);
        assert_eq!(of(1 << 30).unaccounted(), 0);
        assert_eq!(of(1 << 30).part("sockets"), Some(rest.unsigned_abs()));
    }

    #[test]
    fn numbers_that_a_kernel_does_not_have_are_none() {
        let accounting = Accounting::of(
            &Values::parse("MemTotal: 8 kB\nMemFree: 12 kB\n"),
            &Values::default(),
            "",
            4096,
        );
        assert_eq!(accounting.unaccounted(), -4096);
    }
}
