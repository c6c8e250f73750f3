//! System calls that x86-64 has beside those that all architectures have.

/// System calls that open files.
pub(super) const OPENING_CALLS: &[i64] = &[libc::SYS_open, libc::SYS_creat];
