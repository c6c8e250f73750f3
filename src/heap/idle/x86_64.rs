//! Page tables of x86-64, and the caching of translations by its CPUs.

use std::fs;

use super::walk::{ENTRIES, Entry};

/// Number of address spaces whose translations a CPU caches at a time: TLB_NR_DYN_ASIDS in the kernel's
/// arch/x86/mm/tlb.c.
pub(super) const KEPT_ADDRESS_SPACES: usize = 6;
/// Lowest address at which the kernel maps all memory. The actual address is random, in steps of a GiB.
pub(super) const LOWEST_DIRECT_MAP: u64 = 0xff11_0000_0000_0000;
/// Distance between two addresses at which the kernel's mapping of all memory may begin.
pub(super) const DIRECT_MAP_STEP: u64 = 1 << 30;

/// Bits of an entry, as in the kernel's pgtable_types.h.
const PRESENT: u64 = 1;
const ACCESSED: u64 = 1 << 5;
const HUGE: u64 = 1 << 7;
/// Bit of a present page for which the kernel wants a page fault on its next use (PROT_NONE, NUMA balancing).
const PROTECTED: u64 = 1 << 8;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Returns the number of levels of the page tables.
pub(super) fn levels() -> u32 {
    if has_flag("la57") { 5 } else { 4 }
}

/// Returns the reason why the CPUs cannot be made to drop translations, if there is one. With INVLPGB they keep some
/// translations, from 6.15 on, for as long as the kernel does not say otherwise.
pub(super) fn keeps_translations() -> Option<&'static str> {
    has_flag("invlpgb").then_some("the CPUs have INVLPGB, and may keep what they know of a process")
}

fn has_flag(flag: &str) -> bool {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = cpuinfo.lines().find_map(|line| line.strip_prefix("flags"));
    flags.is_some_and(|flags| flags.split_whitespace().any(|one| one == flag))
}

/// Returns the index of the entry that translates an address, in a table of this level.
pub(super) fn index(address: u64, level: u32) -> usize {
    (address >> (12 + 9 * level)) as usize % ENTRIES
}

/// Returns the physical address in an entry.
pub(super) fn address(word: u64) -> u64 {
    word & ADDRESS
}

/// Decodes an entry of a table. Tables of level 0 have pages of 4 KiB alone.
pub(super) fn entry(word: u64, level: u32) -> Entry {
    let is_page = level == 0 || word & HUGE != 0;
    let is_there = word & (PRESENT | PROTECTED) != 0;
    // The entry of a page that is being split is huge, and not present.
    if is_page && (is_there || level > 0) {
        Entry::Page {
            is_used: word & ACCESSED != 0,
        }
    } else if word & PRESENT != 0 {
        Entry::Table(address(word))
    } else {
        Entry::Unknown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_of_pages_and_of_tables() {
        let page = |is_used| Entry::Page { is_used };
        // Present, writable, user, accessed, dirty; not to be executed.
        assert_eq!(entry(0x8000_0001_2345_6067, 0), page(true));
        assert_eq!(entry(0x8000_0001_2345_6047, 0), page(false));
        // Protected, and not present.
        assert_eq!(entry(0x8000_0001_2345_6120, 0), page(true));
        assert_eq!(entry(0x8000_0001_2345_6100, 0), page(false));
        // Bit 7 of a page of 4 KiB is about caching.
        assert_eq!(entry(0x1_2345_60c7, 0), page(false));
        assert_eq!(entry(0x8000_0001_2340_00e7, 1), page(true));
        assert_eq!(entry(0x8000_0001_2340_0080, 1), page(false));
        assert_eq!(entry(0x8000_0001_2345_6067, 1), Entry::Table(0x1_2345_6000));
        assert_eq!(entry(0x1_2345_6067, 3), Entry::Table(0x1_2345_6000));
        // An empty entry, and a page in swap.
        assert_eq!([entry(0, 0), entry(0, 2)], [Entry::Unknown; 2]);
        assert_eq!(entry(0x07ff_ffff_fdf5_3c00, 0), Entry::Unknown);
    }
}
