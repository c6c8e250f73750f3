//! Allocation flags (`gfp_t`) by name.

use std::fmt;

use serde::{Serialize, Serializer};

/// Allocation flags: what an allocation may do and where. The names are those in the kernel's own traces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Gfp(pub u32);

impl Serialize for Gfp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Names of the bits by position. The positions are the same on all kernels from 5.10 to 7.2, and an enum since 6.10.
const BITS: [&str; 25] = [
    "__GFP_DMA",
    "__GFP_HIGHMEM",
    "__GFP_DMA32",
    "__GFP_MOVABLE",
    "__GFP_RECLAIMABLE",
    "__GFP_HIGH",
    "__GFP_IO",
    "__GFP_FS",
    "__GFP_ZERO",
    "__GFP_ATOMIC", // until 6.3, unused after
    "__GFP_DIRECT_RECLAIM",
    "__GFP_KSWAPD_RECLAIM",
    "__GFP_WRITE",
    "__GFP_NOWARN",
    "__GFP_RETRY_MAYFAIL",
    "__GFP_NOFAIL",
    "__GFP_NORETRY",
    "__GFP_MEMALLOC",
    "__GFP_COMP",
    "__GFP_NOMEMALLOC",
    "__GFP_HARDWALL",
    "__GFP_THISNODE",
    "__GFP_ACCOUNT",
    "__GFP_ZEROTAGS",
    "__GFP_NO_OBJ_EXT",
];

const HIGHMEM: u32 = 1 << 1;
const MOVABLE: u32 = 1 << 3;
const HIGH: u32 = 1 << 5;
const IO: u32 = 1 << 6;
const FS: u32 = 1 << 7;
const DIRECT_RECLAIM: u32 = 1 << 10;
const KSWAPD_RECLAIM: u32 = 1 << 11;
const NOWARN: u32 = 1 << 13;
const COMP: u32 = 1 << 18;
const NOMEMALLOC: u32 = 1 << 19;
const HARDWALL: u32 = 1 << 20;
const ACCOUNT: u32 = 1 << 22;
const RECLAIM: u32 = DIRECT_RECLAIM | KSWAPD_RECLAIM;
const USER: u32 = RECLAIM | IO | FS | HARDWALL;
const TRANSHUGE_LIGHT: u32 = (USER | HIGHMEM | MOVABLE | COMP | NOMEMALLOC | NOWARN) & !RECLAIM;

/// Combinations with names of their own, the larger ones first.
const COMBINATIONS: [(u32, &str); 12] = [
    (TRANSHUGE_LIGHT | DIRECT_RECLAIM, "GFP_TRANSHUGE"),
    (TRANSHUGE_LIGHT, "GFP_TRANSHUGE_LIGHT"),
    (USER | HIGHMEM | MOVABLE, "GFP_HIGHUSER_MOVABLE"),
    (USER | HIGHMEM, "GFP_HIGHUSER"),
    (USER, "GFP_USER"),
    (RECLAIM | IO | FS | ACCOUNT, "GFP_KERNEL_ACCOUNT"),
    (RECLAIM | IO | FS, "GFP_KERNEL"),
    (RECLAIM | IO, "GFP_NOFS"),
    (HIGH | KSWAPD_RECLAIM, "GFP_ATOMIC"),
    (RECLAIM, "GFP_NOIO"),
    (1, "GFP_DMA"),
    (1 << 2, "GFP_DMA32"),
];

/// Prints flags such as `GFP_HIGHUSER_MOVABLE|__GFP_ZERO`. Bits without a name are in hexadecimal; no flag is `none`.
impl fmt::Display for Gfp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut left = self.0;
        let mut names = Vec::new();
        let bits = BITS.iter().enumerate();
        let bits = bits.map(|(bit, &name)| (1 << bit, name));
        for (flags, name) in COMBINATIONS.into_iter().chain(bits) {
            if left & flags == flags {
                names.push(name);
                left &= !flags;
            }
        }
        let rest = format!("{left:#x}");
        if left != 0 {
            names.push(&rest);
        }
        if names.is_empty() {
            names.push("none");
        }
        f.pad(&names.join("|"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_the_kernels() {
        let name = |flags| Gfp(flags).to_string();
        // The flags of an anonymous page's fault, as 6.12 traces them.
        assert_eq!(name(0x140dca), "GFP_HIGHUSER_MOVABLE|__GFP_ZERO|__GFP_COMP");
        assert_eq!(name(0xcc0), "GFP_KERNEL");
        assert_eq!(name(0x400cc0), "GFP_KERNEL_ACCOUNT");
        assert_eq!(name(0xc40), "GFP_NOFS");
        assert_eq!(name(0x1c24ca | 1 << 16), "GFP_TRANSHUGE|__GFP_NORETRY");
        assert_eq!(name(0), "none");
        assert_eq!(name(0x8000_0000), "0x80000000");
    }

    #[test]
    fn no_flag_is_named_twice_or_forgotten() {
        for bit in 0..32 {
            let text = Gfp(1 << bit).to_string();
            assert!(!text.contains('|') && text != "none", "{bit}: {text}");
        }
    }
}
