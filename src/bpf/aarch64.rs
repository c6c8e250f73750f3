//! What BPF programs need of the kernel on arm64.

use anyhow::{Result, ensure};

use super::kernel_support::btf_has_name;

/// A function that came with 5.18, as the compilation of atomic operations for arm64 did (1902472b4fa9).
const OF_5_18: &str = "bpf_copy_from_user_task";

/// Checks that the kernel can compile the programs: they need atomic operations that order others.
///
/// # Errors
/// If the kernel is older than 5.18.
pub(super) fn check_kernel() -> Result<()> {
    ensure!(
        btf_has_name(OF_5_18),
        "this kernel cannot compile atomic operations of BPF programs for arm64: Linux 5.18 or later is needed"
    );
    Ok(())
}
