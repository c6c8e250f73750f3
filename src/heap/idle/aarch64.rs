//! Page tables of arm64 with pages of 4 KiB, and the caching of translations by its CPUs.

use super::walk::{ENTRIES, Entry};

/// Number of address spaces whose translations a CPU caches at a time: as many as there are numbers for them
/// (ASIDs), of 8 or 16 bits.
pub(super) const KEPT_ADDRESS_SPACES: usize = 256;
/// Lowest address at which the kernel maps all memory, with addresses of 48 bits.
pub(super) const LOWEST_DIRECT_MAP: u64 = 0xffff_0000_0000_0000;
/// Distance between two addresses at which the kernel's mapping of all memory may begin.
pub(super) const DIRECT_MAP_STEP: u64 = 1 << 30;

/// Bits of an entry, as in the kernel's pgtable-hwdef.h.
const VALID: u64 = 1;
/// Bit of a table, and of a page of 4 KiB; a huge page lacks it.
const TABLE: u64 = 1 << 1;
const ACCESSED: u64 = 1 << 10;
const ADDRESS: u64 = 0x0000_ffff_ffff_f000;

/// Returns the number of levels of the page tables.
pub(super) fn levels() -> u32 {
    4
}

/// Returns the reason why the CPUs cannot be made to drop translations: they keep them by address space over any
/// number of switches, and set no mark again for a page whose translation they have.
pub(super) fn keeps_translations() -> Option<&'static str> {
    Some("arm64 CPUs keep what they know of a process while others run")
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
    if word & VALID == 0 {
        Entry::Unknown
    } else if level > 0 && word & TABLE != 0 {
        Entry::Table(address(word))
    } else {
        Entry::Page {
            is_used: word & ACCESSED != 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_of_pages_and_of_tables() {
        let page = |is_used| Entry::Page { is_used };
        assert_eq!(entry(0x00e8_0001_2345_6fd3, 0), page(true));
        assert_eq!(entry(0x00e8_0001_2345_6bd3, 0), page(false));
        assert_eq!(entry(0x00e8_0001_2340_0fd1, 1), page(true));
        assert_eq!(entry(0x1_2345_6003, 1), Entry::Table(0x1_2345_6000));
        assert_eq!([entry(0, 0), entry(0, 2)], [Entry::Unknown; 2]);
    }
}
