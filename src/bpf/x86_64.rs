//! What BPF programs need of the kernel on x86-64.

use anyhow::Result;

/// Checks that the kernel can compile the programs: all with BTF can.
///
/// # Errors
/// None.
pub(super) fn check_kernel() -> Result<()> {
    Ok(())
}
