//! Protections and flags of mmap(2) that x86-64 alone has.

pub(super) const PROT: [(u64, &str); 0] = [];
pub(super) const MAP: [(u64, &str); 2] = [(0x40, "32BIT"), (0x80, "ABOVE4G")];
