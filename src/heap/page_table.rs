//! A number for each page of an address space, found with three loads.
//!
//! An image has one to find where a page was copied to, and the blocks of a heap one to find the
//! block that an address is in; both are asked once for each word that could be a pointer.

/// Bytes of a page; those of huge pages are many of these.
pub const PAGE: u64 = 4096;
/// Bits of an address within its page.
const PAGE_BITS: u32 = 12;
/// Bits of an address below the half that user programs have.
const USER_BITS: u32 = 47;
/// Pages of a leaf, which covers 2 MiB.
const LEAF_BITS: u32 = 9;
/// Leaves of a branch, which covers 8 GiB.
const BRANCH_BITS: u32 = 12;
const ROOT_BITS: u32 = USER_BITS - PAGE_BITS - LEAF_BITS - BRANCH_BITS;

/// Numbers by page. What it takes follows what is in it: 4 bytes a page, and for each lonely page
/// 18 KiB at most, so that a process which maps one page in each gigabyte cannot exhaust us.
#[derive(Debug, Clone, Default)]
pub struct PageTable {
    /// Branches by root index, each plus one; 0 is none.
    root: Vec<u32>,
    branches: Vec<Vec<u32>>,
    leaves: Vec<[u32; 1 << LEAF_BITS]>,
}

/// Root, branch and leaf index; None beyond what user programs can map.
fn split(address: u64) -> Option<(usize, usize, usize)> {
    if address >> USER_BITS != 0 {
        return None;
    }
    let part = |shift: u32, bits: u32| (address >> shift) as usize & ((1 << bits) - 1);
    Some((
        part(PAGE_BITS + LEAF_BITS + BRANCH_BITS, ROOT_BITS),
        part(PAGE_BITS + LEAF_BITS, BRANCH_BITS),
        part(PAGE_BITS, LEAF_BITS),
    ))
}

impl PageTable {
    /// The number of the page that this address is in.
    #[inline]
    pub fn get(&self, address: u64) -> Option<u32> {
        let (root, branch, leaf) = split(address)?;
        let branches = self.root.get(root)?.checked_sub(1)?;
        let leaves = self.branches[branches as usize][branch].checked_sub(1)?;
        self.leaves[leaves as usize][leaf].checked_sub(1)
    }

    /// Gives the page of this address a number, which is below `u32::MAX`, unless it has one. Pages
    /// that user programs cannot map are left out.
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
        let mut table = PageTable::default();
        assert_eq!(table.get(0), None);
        let highest = (1 << USER_BITS) - PAGE;
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
        table.insert(1 << USER_BITS, 7);
        assert_eq!(
            (table.get(1 << USER_BITS), table.get(u64::MAX)),
            (None, None)
        );
    }
}
