//! Protections and flags of mmap(2) that arm64 alone has.

pub(super) const PROT: [(u64, &str); 2] = [(0x10, "BTI"), (0x20, "MTE")];
pub(super) const MAP: [(u64, &str); 0] = [];
