//! System calls that x86-64 has beside those that all architectures have, and the check of the machine.

use anyhow::Result;

/// System calls that open files.
pub(super) const OPENING_CALLS: &[i64] = &[libc::SYS_open, libc::SYS_creat];

/// Checks that the tools know this kind of machine: all of x86-64 are known.
///
/// # Errors
/// None.
pub(super) fn check_machine() -> Result<()> {
    Ok(())
}
