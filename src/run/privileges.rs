//! The tool's own privileges.

use anyhow::{Context, Result};
use caps::{CapSet, CapsHashSet};
use nix::sys::prctl::set_no_new_privs;

use crate::host::capabilities::{self, Capability};
use crate::print::file_name;

/// Capabilities that tracing takes, from loading the programs to the last report.
const KEPT: [Capability; 12] = [
    // To load and attach programs, also to processes and CPUs that come later.
    Capability::CAP_BPF,
    Capability::CAP_PERFMON,
    Capability::CAP_SYSLOG,
    Capability::CAP_IPC_LOCK,
    Capability::CAP_SYS_RESOURCE,
    Capability::CAP_SYS_NICE,
    // To look into processes and their files, and to let stopped processes continue.
    Capability::CAP_SYS_PTRACE,
    Capability::CAP_CHECKPOINT_RESTORE,
    Capability::CAP_KILL,
    // To read tracefs, and to replace the files that options name, whoever owns their folders.
    Capability::CAP_DAC_READ_SEARCH,
    Capability::CAP_DAC_OVERRIDE,
    Capability::CAP_FOWNER,
];

/// Gives up for ever what this process may do beyond tracing: to mount, load modules, configure networks, become
/// another user and so on. Call this before any thread is started, and after the command of `-c`, which keeps the
/// privileges of its caller. No program that this process executes later has more privileges.
///
/// The capabilities in `also` are kept, too.
///
/// # Errors
/// If the kernel refuses, which it has no reason to.
pub fn keep_tracing_and(also: &[Capability]) -> Result<()> {
    set_no_new_privs().context("failed to give up new privileges (PR_SET_NO_NEW_PRIVS)")?;
    let mut kept = CapsHashSet::from(KEPT);
    kept.extend(also);
    kept.extend(file_name::needed_capabilities());
    if capabilities::perf_events_want_sys_admin() {
        kept.insert(Capability::CAP_SYS_ADMIN);
    }
    for set in [CapSet::Effective, CapSet::Permitted] {
        let held = caps::read(None, set).context("failed to read the capabilities")?;
        let kept = held.intersection(&kept).copied().collect();
        caps::set(None, set, &kept).context("failed to give up capabilities")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn what_is_beyond_tracing_is_given_up() {
        // In a thread of its own, so that other tests keep their capabilities.
        let given_up = thread::spawn(|| {
            let before = caps::read(None, CapSet::Permitted).expect("readable");
            keep_tracing_and(&[]).expect("nobody minds");
            let after = caps::read(None, CapSet::Permitted).expect("readable");
            assert_eq!(
                caps::read(None, CapSet::Effective).expect("readable"),
                after
            );
            let given_up: CapsHashSet = before.difference(&after).copied().collect();
            assert!(after.is_subset(&before) && given_up.is_disjoint(&CapsHashSet::from(KEPT)));
            given_up
        });
        let given_up = given_up.join().expect("it was given up");
        let held = caps::read(None, CapSet::Permitted).expect("readable");
        for capability in [Capability::CAP_SYS_MODULE, Capability::CAP_SETUID] {
            assert_eq!(given_up.contains(&capability), held.contains(&capability));
        }
    }
}
