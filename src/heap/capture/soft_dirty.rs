//! Soft-dirty marks of the pages that a process has written (CONFIG_MEM_SOFT_DIRTY).
//!
//! When asked, the kernel clears all of a process's marks and makes its pages read-only. The first write to each page
//! is then a page fault, which sets the mark.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use anyhow::{Context, Result};
use memmap2::MmapMut;

use crate::heap::clear_refs::{self, PageMarks};
use crate::heap::page_index::PAGE;

/// Soft-dirty mark in an entry of /proc/PID/pagemap.
pub(super) const MARK: u64 = 1 << 55;

/// Whether this kernel marks written pages. This is tried once, on a page of ours. It should be tried while we have
/// little memory, because all of our memory has to be marked anew.
///
/// # Errors
/// If the marks cannot be cleared or read.
pub(super) fn is_supported() -> Result<bool> {
    static IS_THERE: OnceLock<bool> = OnceLock::new();
    if let Some(is_there) = IS_THERE.get() {
        return Ok(*is_there);
    }
    let tried = try_own_page()?;
    Ok(*IS_THERE.get_or_init(|| tried))
}

fn try_own_page() -> Result<bool> {
    let mut page = MmapMut::map_anon(PAGE as usize).context("no memory")?;
    page[0] = 1;
    if clear_refs::is_missing() {
        return Ok(false);
    }
    clear_refs::clear(std::process::id(), PageMarks::Written)?;
    let pagemap = File::open("/proc/self/pagemap").context("failed to open our pagemap")?;
    let is_marked = |page: &MmapMut| -> Result<bool> {
        let mut entry = [0; 8];
        let at = page.as_ptr() as u64 / PAGE * 8;
        pagemap
            .read_exact_at(&mut entry, at)
            .context("failed to read our pagemap")?;
        Ok(u64::from_le_bytes(entry) & MARK != 0)
    };
    if is_marked(&page)? {
        return Ok(false);
    }
    page[0] = 2;
    is_marked(&page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_is_found_again() {
        let is_there = is_supported().expect("our own marks can be cleared");
        assert_eq!(try_own_page().expect("our own"), is_there);
    }
}
