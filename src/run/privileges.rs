//! The tool's own privileges.

use std::env;
use std::path::Path;

use anyhow::{Context, Result};
use caps::{CapSet, CapsHashSet};
use nix::sys::prctl::set_no_new_privs;
use nix::unistd::geteuid;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use crate::host::capabilities::{self, Capability};
use crate::host::mounts::Mounts;
use crate::print::file_name;
use crate::run::arch::OPENING_CALLS;
use crate::run::target::TargetArgs;

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
    // To read tracefs, and to replace the files that options name, whoever owns their directories.
    Capability::CAP_DAC_READ_SEARCH,
    Capability::CAP_DAC_OVERRIDE,
    Capability::CAP_FOWNER,
];

/// Capabilities that an attached tool without stacks needs until its last report: to read maps, to keep its memory
/// locked, and to name kernel functions.
const REPORTING: [Capability; 5] = [
    Capability::CAP_BPF,
    Capability::CAP_PERFMON,
    Capability::CAP_SYSLOG,
    Capability::CAP_IPC_LOCK,
    Capability::CAP_SYS_RESOURCE,
];

/// Capabilities that watching takes, without tracing: to read the kernel's log and files that not everyone may read, and
/// to be notified of memory pressure.
const WATCHING: [Capability; 3] = [
    Capability::CAP_SYSLOG,
    Capability::CAP_DAC_READ_SEARCH,
    Capability::CAP_SYS_RESOURCE,
];

/// System calls that no attached tool without stacks needs.
const NOT_FOR_REPORTS: [i64; 18] = [
    // Other programs, processes and machines.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    libc::SYS_socket,
    // Another kernel, or another view of the file systems.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_kexec_load,
    libc::SYS_open_by_handle_at,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_setns,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
];

/// System calls that a thread which serves clients does not need, beside [`NOT_FOR_REPORTS`] and [`OPENING_CALLS`].
const NOT_FOR_CLIENTS: &[i64] = &[
    // Programs in the kernel.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_io_uring_setup,
    // Files and other processes.
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_unlinkat,
    libc::SYS_renameat2,
    libc::SYS_kill,
    libc::SYS_pidfd_open,
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
    set_no_new_privs().context("failed to disable new privileges (PR_SET_NO_NEW_PRIVS)")?;
    let mut kept = CapsHashSet::from(KEPT);
    kept.extend(also);
    kept.extend(file_name::needed_capabilities());
    if capabilities::perf_events_want_sys_admin() {
        kept.insert(Capability::CAP_SYS_ADMIN);
    }
    keep(&kept)
}

/// Drops the privileges that reports without stacks do not need, in a tool that is attached and runs unattended for
/// weeks. Unless the tool traces a command, it can no longer execute programs, trace processes or open sockets. Call
/// this at the end of the set-up, while the tool has one thread.
///
/// # Errors
/// If the kernel refuses to drop capabilities or to install the filter.
pub fn keep_reporting(target: &TargetArgs) -> Result<()> {
    let mut kept = CapsHashSet::from(REPORTING);
    kept.extend(file_name::needed_capabilities());
    if target.command.is_some() {
        // The command can be another user's.
        kept.insert(Capability::CAP_KILL);
    }
    if hides_processes() {
        kept.insert(Capability::CAP_SYS_PTRACE);
    }
    if !geteuid().is_root() {
        // To remove probes from tracefs, which is root's.
        kept.extend([
            Capability::CAP_DAC_OVERRIDE,
            Capability::CAP_DAC_READ_SEARCH,
        ]);
    }
    keep(&kept)?;
    match target.command {
        // The command is released and ended by calls that would be refused.
        Some(_) => Ok(()),
        None => forbid_calls(&NOT_FOR_REPORTS),
    }
}

/// Drops the privileges that watching the machine without tracing does not need, in a tool that runs for weeks. It can
/// no longer execute programs, trace processes or load BPF programs. Call this when files have been opened and addresses
/// bound, and before any thread is started.
///
/// # Errors
/// If the kernel refuses to drop capabilities or to install the filter.
pub fn keep_watching() -> Result<()> {
    // Without this, an unprivileged process may install no filter.
    set_no_new_privs().context("failed to disable new privileges (PR_SET_NO_NEW_PRIVS)")?;
    let mut kept = CapsHashSet::from(WATCHING);
    if hides_processes() {
        kept.insert(Capability::CAP_SYS_PTRACE);
    }
    keep(&kept)?;
    // Each notification of systemd takes a socket.
    let reports = NOT_FOR_REPORTS.into_iter();
    let mut forbidden: Vec<i64> = reports.filter(|&call| call != libc::SYS_socket).collect();
    forbidden.extend([libc::SYS_bpf, libc::SYS_perf_event_open, libc::SYS_kill]);
    forbid_calls(&forbidden)
}

/// Drops all privileges of the calling thread, and of the threads that it starts later: it reads what clients send.
/// They have no capability any more, and can open no file or socket, execute no program and use no bpf(2). Other threads
/// of the tool are not affected.
///
/// # Errors
/// If the kernel refuses to drop capabilities or to install the filter.
pub fn keep_serving() -> Result<()> {
    // Without this, an unprivileged thread may install no filter.
    set_no_new_privs().context("failed to disable new privileges (PR_SET_NO_NEW_PRIVS)")?;
    keep(&CapsHashSet::new())?;
    forbid_calls(&[&NOT_FOR_REPORTS[..], NOT_FOR_CLIENTS, OPENING_CALLS].concat())
}

/// Drops all capabilities of the calling thread, which sends to other machines what other threads have prepared. The
/// thread can still open sockets, and the files of its own user. System calls that [`keep_watching`] has forbidden before
/// stay forbidden.
///
/// # Errors
/// If the kernel refuses to drop capabilities.
pub fn keep_pushing() -> Result<()> {
    keep(&CapsHashSet::new())
}

/// Gives up all capabilities but these.
fn keep(kept: &CapsHashSet) -> Result<()> {
    for set in [CapSet::Effective, CapSet::Permitted] {
        let held = caps::read(None, set).context("failed to read the capabilities")?;
        let kept = held.intersection(kept).copied().collect();
        caps::set(None, set, &kept).context("failed to drop capabilities")?;
    }
    Ok(())
}

/// Whether /proc shows only some processes (hidepid) to a process without CAP_SYS_PTRACE.
fn hides_processes() -> bool {
    let mounts = Mounts::now();
    let mut of_proc = mounts
        .iter()
        .filter(|mount| mount.folder == Path::new("/proc"));
    of_proc.any(|mount| mount.options().any(|option| option.starts_with("hidepid=")))
}

/// Makes these system calls of the calling thread fail with EPERM. All others stay permitted, because a list of permitted ones
/// would differ by kernel, architecture and C library.
fn forbid_calls(calls: &[i64]) -> Result<()> {
    const FAILED: &str = "failed to forbid system calls (seccomp)";
    let rules = calls.iter().map(|&call| (call, Vec::new())).collect();
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let architecture = env::consts::ARCH.try_into().context(FAILED)?;
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, architecture);
    let filter: BpfProgram = filter.and_then(TryInto::try_into).context(FAILED)?;
    match seccompiler::apply_filter(&filter) {
        // A kernel without seccomp.
        Err(seccompiler::Error::Prctl(error)) if error.raw_os_error() == Some(libc::EINVAL) => {
            Ok(())
        }
        applied => applied.context(FAILED),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, thread};

    use super::*;

    #[test]
    fn what_reports_do_not_take_is_given_up() {
        // In a thread of its own, as below.
        let limited = thread::spawn(|| {
            keep_reporting(&TargetArgs::default()).expect("nothing refuses it");
            let held = caps::read(None, CapSet::Effective).expect("readable");
            let child = std::process::Command::new("true").status();
            let socket = std::os::unix::net::UnixDatagram::unbound();
            let file = fs::read("/proc/self/status");
            (held, child, socket, file)
        });
        let (held, child, socket, file) = limited.join().expect("no panic");
        for capability in [Capability::CAP_KILL, Capability::CAP_FOWNER] {
            assert!(
                !held.contains(&capability) || !geteuid().is_root(),
                "{held:?}"
            );
        }
        let refused = |error: std::io::Error| error.kind() == std::io::ErrorKind::PermissionDenied;
        assert!(child.is_err_and(refused), "another program was executed");
        assert!(socket.is_err_and(refused), "a socket was opened");
        assert!(file.is_ok(), "files can be read");
    }

    #[test]
    fn what_watching_does_not_take_is_given_up() {
        let limited = thread::spawn(|| {
            keep_watching().expect("nothing refuses it");
            let held = caps::read(None, CapSet::Permitted).expect("readable");
            let child = std::process::Command::new("true").status();
            let socket = std::os::unix::net::UnixDatagram::unbound();
            (held, child, socket)
        });
        let (held, child, socket) = limited.join().expect("no panic");
        for capability in [
            Capability::CAP_BPF,
            Capability::CAP_KILL,
            Capability::CAP_DAC_OVERRIDE,
        ] {
            assert!(!held.contains(&capability), "{held:?}");
        }
        let refused = |error: std::io::Error| error.kind() == std::io::ErrorKind::PermissionDenied;
        assert!(child.is_err_and(refused), "another program was executed");
        assert!(socket.is_ok(), "systemd is notified by a socket");
    }

    #[test]
    fn threads_that_serve_have_no_privileges() {
        let limited = thread::spawn(|| {
            keep_serving().expect("nothing refuses it");
            let inherits = thread::spawn(|| fs::read("/proc/self/status"));
            let held = caps::read(None, CapSet::Permitted).expect("readable");
            (held, inherits.join().expect("no panic"))
        });
        let (held, file) = limited.join().expect("no panic");
        assert!(held.is_empty(), "{held:?}");
        let refused = |error: std::io::Error| error.kind() == std::io::ErrorKind::PermissionDenied;
        assert!(file.is_err_and(refused), "a file was opened");
        assert!(fs::read("/proc/self/status").is_ok(), "other threads can");
    }

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
