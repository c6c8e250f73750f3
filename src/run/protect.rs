//! Protection of tools that have to work when memory runs out.

use std::fs;

use anyhow::{Context, Result, ensure};
use nix::sys::mman::{MlockAllFlags, mlockall};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use crate::host::capabilities::{self, Capability};

/// Keeps this process working when memory runs out: its memory is locked, later mappings are locked as they are
/// touched, and the OOM killer kills other processes. Call this when everything has been set up. Failures are printed
/// on stderr in the name of `tool`. Commands that were started before are not protected.
pub fn from_lack_of_memory(tool: &str) {
    if let Err(error) = protect() {
        eprintln!("{tool}: {error:#}; when memory runs out, this may be killed, or be late");
    }
}

/// Spares this process from the OOM killer and locks its memory, as far as permitted. Fails without CAP_IPC_LOCK or
/// CAP_SYS_RESOURCE.
fn protect() -> Result<()> {
    let spared = fs::write("/proc/self/oom_score_adj", "-1000");
    lock_memory()?;
    let failed = || {
        let remedy = capabilities::remedy(Capability::CAP_SYS_RESOURCE);
        format!("failed to set oom_score_adj{remedy}")
    };
    spared.with_context(failed)
}

/// Locks the memory that is mapped, and later mappings as they are touched.
///
/// With a limit (RLIMIT_MEMLOCK) nothing is locked: a thread's stack would count whole against the limit, so that no
/// thread could be started beyond it.
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
    // Only touched pages of later mappings: otherwise the stacks of threads would be populated whole.
    let on_fault = MlockAllFlags::from_bits_retain(libc::MCL_ONFAULT);
    mlockall(MlockAllFlags::MCL_CURRENT)
        .and_then(|()| mlockall(MlockAllFlags::MCL_FUTURE | on_fault))
        .with_context(failed)
}
