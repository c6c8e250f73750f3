//! System calls that arm64 has beside those that all architectures have, and the check of the machine.

use anyhow::{Result, bail};
use nix::unistd::{SysconfVar, sysconf};

/// System calls that open files: no further ones.
pub(super) const OPENING_CALLS: &[i64] = &[];

/// Size of the pages that the tools know, in bytes.
const KNOWN_PAGE: i64 = 4096;

/// Checks that the tools know this kind of machine.
///
/// # Errors
/// If the kernel's pages have 16 or 64 KiB.
pub(super) fn check_machine() -> Result<()> {
    match sysconf(SysconfVar::PAGE_SIZE) {
        Ok(Some(bytes)) if bytes != KNOWN_PAGE => bail!(
            "this kernel has pages of {} KiB, and only pages of 4 KiB are supported on arm64: boot a \
             kernel built with CONFIG_ARM64_4K_PAGES=y",
            bytes / 1024
        ),
        _ => Ok(()),
    }
}
