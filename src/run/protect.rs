//! Tools that are to work when memory has run out.

use std::fs;

use anyhow::{Context, Result, ensure};
use nix::sys::mman::{MlockAllFlags, mlockall};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use crate::host::capabilities::{self, Capability};

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
    let spared = fs::write("/proc/self/oom_score_adj", "-1000");
    lock_memory()?;
    let failed = || {
        let remedy = capabilities::remedy(Capability::CAP_SYS_RESOURCE);
        format!("failed to set oom_score_adj{remedy}")
    };
    spared.with_context(failed)
}

/// Keeps in memory what is mapped, and what will be.
///
/// With a limit (RLIMIT_MEMLOCK) nothing is locked: once all that is mapped later is to be, no thread could be
/// started beyond it, as its stack counts whole.
fn lock_memory() -> Result<()> {
    let (limit, _) = getrlimit(Resource::RLIMIT_MEMLOCK)?;
    let failed = || {
        let remedy = capabilities::remedy(Capability::CAP_IPC_LOCK);
        format!("failed to lock memory{remedy}")
    };
    ensure!(
        capabilities::has(Capability::CAP_IPC_LOCK) || limit == RLIM_INFINITY,
        failed()
    );
    // Of what is mapped later only what is touched: stacks of threads would be brought in whole.
    let on_fault = MlockAllFlags::from_bits_retain(libc::MCL_ONFAULT);
    mlockall(MlockAllFlags::MCL_CURRENT)
        .and_then(|()| mlockall(MlockAllFlags::MCL_FUTURE | on_fault))
        .with_context(failed)
}
