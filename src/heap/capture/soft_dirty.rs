//! Marks of the pages that a process has written (soft-dirty, CONFIG_MEM_SOFT_DIRTY).
//!
//! The kernel clears all of a process's marks when asked, and makes its pages read-only: the first write to each is a
//! page fault, which sets the mark.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail};
use memmap2::MmapMut;

use crate::heap::page_table::PAGE;
use crate::host::capabilities::{self, Capability};

/// The mark in an entry of /proc/PID/pagemap.
pub(super) const MARK: u64 = 1 << 55;

/// Clears the marks of all pages of a process.
///
/// # Errors
/// If it has exited, or if its marks may not be cleared.
pub(super) fn clear(pid: u32) -> Result<()> {
    const SOFT_DIRTY: &str = "4";
    let path = format!("/proc/{pid}/clear_refs");
    match fs::write(&path, SOFT_DIRTY) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ESRCH | libc::ENOENT)) => {
            bail!("process {pid} has exited")
        }
        cleared => cleared.with_context(|| {
            let remedy = capabilities::remedy(Capability::CAP_DAC_OVERRIDE);
            format!("failed to clear the marks of written pages in {path}{remedy}")
        }),
    }
}

/// Whether this kernel marks what is written, as tried once on a page of ours: while we have little memory, all of which
/// is marked anew.
///
/// # Errors
/// If that cannot be tried.
pub(super) fn is_there() -> Result<bool> {
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
    match clear(std::process::id()) {
        Err(_) if is_missing() => return Ok(false),
        cleared => cleared?,
    }
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

/// Whether the kernel has no /proc/PID/clear_refs.
fn is_missing() -> bool {
    fs::metadata("/proc/self/clear_refs").is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_exited_is_told() {
        // Above the greatest that a process can have.
        let error = clear(1 << 23).expect_err("no such process").to_string();
        assert_eq!(error, "process 8388608 has exited");
        is_there().expect("our own marks can be cleared");
    }
}
