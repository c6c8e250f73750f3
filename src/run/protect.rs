//! Protection of tools that have to work when memory runs out.

use std::fs;

use anyhow::{Context, Result, ensure};
use nix::sys::mman::{MlockAllFlags, mlockall};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use crate::host::capabilities::{self, Capability};

/// Keeps this process working when memory runs out: its memory is locked, later mappings are locked as they are
/// touched, and the OOM killer kills other processes. Call this when everything has been set up. Failures are printed
/// on stderr. Commands that were started before are not protected.
pub fn protect_from_oom() {
    for failure in failures(spare_from_oom_killer(), lock_memory()) {
        crate::message!("{failure}");
    }
}

/// Returns a message for each protection that has failed, with its consequence.
fn failures(spared: Result<()>, locked: Result<()>) -> impl Iterator<Item = String> {
    let outcomes = [(spared, "killed"), (locked, "late")];
    outcomes.into_iter().filter_map(|(outcome, consequence)| {
        let error = outcome.err()?;
        Some(format!(
            "{error:#}; when memory runs out, this may be {consequence}"
        ))
    })
}

/// Makes the OOM killer kill other processes. Fails without CAP_SYS_RESOURCE.
fn spare_from_oom_killer() -> Result<()> {
    fs::write("/proc/self/oom_score_adj", "-1000").with_context(|| {
        let remedy = capabilities::remedy(Capability::CAP_SYS_RESOURCE);
        format!("failed to set oom_score_adj{remedy}")
    })
}

/// Locks the memory that is mapped, and later mappings as they are touched. Fails without CAP_IPC_LOCK.
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

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn each_failure_is_told_with_its_consequence() {
        let told: Vec<String> =
            failures(Err(anyhow!("no score")), Err(anyhow!("no lock"))).collect();
        assert_eq!(
            told,
            [
                "no score; when memory runs out, this may be killed",
                "no lock; when memory runs out, this may be late",
            ]
        );
        assert_eq!(failures(Ok(()), Ok(())).count(), 0);
    }
}
