//! Table that maps each page of an address space to a number. A lookup takes three loads.
//!
//! An image has a table to find where a page was copied to. A heap has a table to find the block that contains an
//! address. Both tables are asked once for each word that could be a pointer.

use crate::heap::arch::ADDRESS_BITS;

/// Size of a page, in bytes. A huge page counts as many of these.
pub const PAGE: u64 = 4096;
/// Bits of an address within its page.
const PAGE_BITS: u32 = 12;
/// Bits of an address that select a page of a leaf, which covers 2 MiB.
const LEAF_BITS: u32 = 9;
/// Bits of an address that select a leaf of a branch, which covers 8 GiB.
const BRANCH_BITS: u32 = 12;
const ROOT_BITS: u32 = ADDRESS_BITS - PAGE_BITS - LEAF_BITS - BRANCH_BITS;

/// Numbers by page. The table takes 4 bytes for each page in it, and 18 KiB at most for a page far from all others,
/// so that a process that maps one page in each gigabyte cannot exhaust our memory.
#[derive(Debug, Clone, Default)]
pub struct PageIndex {
    /// Branches by root index, each as its index plus one; 0 is none.
    root: Vec<u32>,
    branches: Vec<Vec<u32>>,
    leaves: Vec<[u32; 1 << LEAF_BITS]>,
}

/// Splits an address into the indexes for root, branch and leaf. Returns None beyond what user programs can map.
fn split(address: u64) -> Option<(usize, usize, usize)> {
    if address >> ADDRESS_BITS != 0 {
        return None;
    }
    let part = |shift: u32, bits: u32| (address >> shift) as usize & ((1 << bits) - 1);
    Some((
        part(PAGE_BITS + LEAF_BITS + BRANCH_BITS, ROOT_BITS),
        part(PAGE_BITS + LEAF_BITS, BRANCH_BITS),
        part(PAGE_BITS, LEAF_BITS),
    ))
}

impl PageIndex {
    /// Returns the number of the page that contains this address.
    #[inline]
    pub fn get(&self, address: u64) -> Option<u32> {
        let (root, branch, leaf) = split(address)?;
        let branches = self.root.get(root)?.checked_sub(1)?;
        let leaves = self.branches[branches as usize][branch].checked_sub(1)?;
        self.leaves[leaves as usize][leaf].checked_sub(1)
    }

    /// Gives the page of this address a number, which is below `u32::MAX`, unless the page has one. Ignores pages
    /// that user programs cannot map.
    pub fn insert(&mut self, address: u64, number: u32) {
        let Some((root, branch, leaf)) = split(address) else {
            return;
        };
        if self.root.is_empty() {
            self.root = vec![0; 1 << ROOT_BITS];
        }
        if self.root[root] == 0 {
            self.branches.push(vec![0; 1 << BRANCH_BITS]);
            self.root[root] = self.branches.len() as u32;
        }
        let leaves = &mut self.branches[self.root[root] as usize - 1][branch];
        if *leaves == 0 {
            self.leaves.push([0; 1 << LEAF_BITS]);
            *leaves = self.leaves.len() as u32;
        }
        let slot = &mut self.leaves[*leaves as usize - 1][leaf];
        if *slot == 0 {
            *slot = number.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_have_the_numbers_that_they_were_given_first() {
        let mut table = PageIndex::default();
        assert_eq!(table.get(0), None);
        let highest = (1 << ADDRESS_BITS) - PAGE;
        for (number, address) in [0, 0x7fff_f000, 0x8000_0000, 0x5555_5555_5000, highest]
            .into_iter()
            .enumerate()
        {
            table.insert(address, number as u32);
            table.insert(address + 8, 99);
        }
        assert_eq!(table.get(0xfff), Some(0));
        assert_eq!(table.get(0x1000), None);
        assert_eq!(table.get(0x7fff_ffff), Some(1));
        assert_eq!(table.get(0x8000_0000), Some(2));
        assert_eq!(table.get(0x5555_5555_5fff), Some(3));
        assert_eq!(table.get(highest), Some(4));
        table.insert(1 << ADDRESS_BITS, 7);
        assert_eq!(
            (table.get(1 << ADDRESS_BITS), table.get(u64::MAX)),
            (None, None)
        );
    }
}
