//! The size of a page.

use anyhow::{Context, Result};
use nix::unistd::{SysconfVar, sysconf};

/// Bytes of a page.
///
/// # Errors
/// If the C library does not know it.
pub fn page_bytes() -> Result<u64> {
    let page = sysconf(SysconfVar::PAGE_SIZE)
        .ok()
        .flatten()
        .context("no page size")?;
    Ok(page.cast_unsigned())
}

/// Binary logarithm of the bytes of a page.
///
/// # Errors
/// If the C library does not know a page's size.
pub fn page_shift() -> Result<u32> {
    Ok(page_bytes()?.trailing_zeros())
}
