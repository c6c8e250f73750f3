//! Protections and flags of mmap(2) and mremap(2).

#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
mod arch;

use std::fmt;

use memtools::print::flags;
use serde::{Serialize, Serializer};

const PROT: [(u64, &str); 6] = [
    (0x1, "READ"),
    (0x2, "WRITE"),
    (0x4, "EXEC"),
    (0x8, "SEM"),
    (0x0100_0000, "GROWSDOWN"),
    (0x0200_0000, "GROWSUP"),
];

/// Mask of the flags for the kind of mapping, which is a number.
const MAP_TYPE: u64 = 0xf;
const SHARED: u64 = 0x1;
const PRIVATE: u64 = 0x2;
const SHARED_VALIDATE: u64 = 0x3;
const DROPPABLE: u64 = 0x8;

const FIXED: u64 = 0x10;
const ANONYMOUS: u64 = 0x20;
const HUGETLB: u64 = 0x4_0000;

const MAP: [(u64, &str); 12] = [
    (FIXED, "FIXED"),
    (ANONYMOUS, "ANONYMOUS"),
    (0x100, "GROWSDOWN"),
    (0x800, "DENYWRITE"),
    (0x1000, "EXECUTABLE"),
    (0x2000, "LOCKED"),
    (0x4000, "NORESERVE"),
    (0x8000, "POPULATE"),
    (0x1_0000, "NONBLOCK"),
    (0x2_0000, "STACK"),
    (0x8_0000, "SYNC"),
    (0x10_0000, "FIXED_NOREPLACE"),
];

const MREMAP: [(u64, &str); 3] = [(1, "MAYMOVE"), (2, "FIXED"), (4, "DONTUNMAP")];

/// Argument of flags, which is printed and serialized as the names of all its flags.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Bits {
    /// PROT_* of mmap
    Prot(u64),
    /// MAP_*
    Map(u64),
    /// MREMAP_*
    Mremap(u64),
}

impl Bits {
    /// Returns the letters of the column PROT, such as `R-E`, or MAP, such as `-PFA`. Flags of mremap have no column.
    pub(crate) fn letters(self) -> String {
        match self {
            Self::Prot(prot) => letters(prot, &[(0x1, 'R'), (0x2, 'W'), (0x4, 'E')]),
            Self::Map(flags) => {
                // MAP_SHARED_VALIDATE has the bits of both, and is shared.
                let kind = match flags & MAP_TYPE {
                    SHARED | SHARED_VALIDATE => "S-",
                    PRIVATE | DROPPABLE => "-P",
                    _ => "--",
                };
                kind.to_owned() + &letters(flags, &[(FIXED, 'F'), (ANONYMOUS, 'A')])
            }
            Self::Mremap(_) => "-".into(),
        }
    }

    /// Returns the names of all flags. Bits without a name are returned as a number.
    fn names(self) -> Vec<String> {
        match self {
            Self::Prot(prot) => {
                let table: Vec<(u64, &str)> = PROT.into_iter().chain(arch::PROT).collect();
                by_name(prot, &table)
            }
            Self::Map(flags) => map_names(flags),
            Self::Mremap(flags) => by_name(flags, &MREMAP),
        }
    }
}

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.names();
        f.pad(&if names.is_empty() {
            "0".into()
        } else {
            names.join("|")
        })
    }
}

impl Serialize for Bits {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.names())
    }
}

fn letters(bits: u64, table: &[(u64, char)]) -> String {
    table
        .iter()
        .map(|&(bit, letter)| if bits & bit != 0 { letter } else { '-' })
        .collect()
}

fn map_names(flags: u64) -> Vec<String> {
    let kind = match flags & MAP_TYPE {
        SHARED => Some("SHARED"),
        PRIVATE => Some("PRIVATE"),
        SHARED_VALIDATE => Some("SHARED_VALIDATE"),
        DROPPABLE => Some("DROPPABLE"),
        _ => None,
    };
    let mut rest = if kind.is_some() {
        flags & !MAP_TYPE
    } else {
        flags
    };
    let mut huge = None;
    if flags & HUGETLB != 0 {
        rest &= !(HUGETLB | flags::HUGE_MASK);
        huge = Some(match flags::huge_page_size(flags) {
            Some(size) => format!("HUGETLB:{size}"),
            None => "HUGETLB".into(),
        });
    }
    let table: Vec<(u64, &str)> = MAP.into_iter().chain(arch::MAP).collect();
    let kind = kind.map(str::to_owned).into_iter();
    kind.chain(huge).chain(by_name(rest, &table)).collect()
}

fn by_name(bits: u64, table: &[(u64, &'static str)]) -> Vec<String> {
    let (names, rest) = flags::names(bits, table);
    let rest = (rest != 0).then(|| format!("{rest:#x}"));
    names.into_iter().map(str::to_owned).chain(rest).collect()
}

/// Whether a mapping has no file.
pub(crate) fn is_anonymous(flags: u64) -> bool {
    flags & ANONYMOUS != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_have_a_place_for_each_letter() {
        assert_eq!(Bits::Prot(0x5).letters(), "R-E");
        assert_eq!(Bits::Prot(0x2).letters(), "-W-");
        assert_eq!(Bits::Prot(0).letters(), "---");
        assert_eq!(Bits::Map(0x02).letters(), "-P--");
        assert_eq!(Bits::Map(0x32).letters(), "-PFA");
        assert_eq!(Bits::Map(0x21).letters(), "S--A");
        assert_eq!(Bits::Mremap(1).letters(), "-");
    }

    #[test]
    fn a_mapping_is_shared_or_private() {
        assert_eq!(Bits::Map(0x03).letters(), "S---");
        assert_eq!(Bits::Map(0x8_0003).to_string(), "SHARED_VALIDATE|SYNC");
        assert_eq!(Bits::Map(0x28).letters(), "-P-A");
        assert_eq!(Bits::Map(0x28).to_string(), "DROPPABLE|ANONYMOUS");
    }

    #[test]
    fn all_flags_have_names() {
        assert_eq!(
            Bits::Map(0x12_4122).to_string(),
            "PRIVATE|ANONYMOUS|GROWSDOWN|NORESERVE|STACK|FIXED_NOREPLACE"
        );
        assert_eq!(Bits::Map(0x4_0022).to_string(), "PRIVATE|HUGETLB|ANONYMOUS");
        assert_eq!(
            Bits::Map(0x4_0022 | 21 << 26).to_string(),
            "PRIVATE|HUGETLB:2MB|ANONYMOUS"
        );
        // Without MAP_HUGETLB these bits are not a size.
        assert_eq!(
            Bits::Map(0x22 | 21 << 26).to_string(),
            "PRIVATE|ANONYMOUS|0x54000000"
        );
        assert_eq!(Bits::Map(0).to_string(), "0");
        assert_eq!(Bits::Prot(0x0100_0003).to_string(), "READ|WRITE|GROWSDOWN");
        assert_eq!(Bits::Mremap(0x5).to_string(), "MAYMOVE|DONTUNMAP");
    }
}
