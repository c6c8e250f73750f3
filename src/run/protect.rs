//! Tools that are to work when memory has run out.

use std::fs;

use anyhow::{Context, Result};
use nix::sys::mman::{MlockAllFlags, mlockall};

/// Has this process work on when memory has run out: what it has stays in memory, what it is yet to
/// touch once it has, and the kernel kills others. To be called when all has been set up; what cannot
/// be done is said on stderr as the tool of this name. Commands that were started before are not
/// spared.
pub fn from_lack_of_memory(tool: &str) {
    if let Err(error) = protect() {
        eprintln!("{tool}: {error:#}; when memory runs out, this may be killed, or be late");
    }
}

/// Does as much as it may. Fails without CAP_IPC_LOCK or CAP_SYS_RESOURCE.
fn protect() -> Result<()> {
    // Of what is mapped later only what is touched: stacks of threads would be brought in whole.
    let on_fault = MlockAllFlags::from_bits_retain(libc::MCL_ONFAULT);
    let locked = mlockall(MlockAllFlags::MCL_CURRENT)
        .and_then(|()| mlockall(MlockAllFlags::MCL_FUTURE | on_fault));
    fs::write("/proc/self/oom_score_adj", "-1000")
        .context("failed to set oom_score_adj; it wants CAP_SYS_RESOURCE")?;
    locked.context("failed to lock memory; it wants CAP_IPC_LOCK")
}
