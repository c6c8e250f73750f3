//! Inherited settings that a tool changes for itself: signals, and the limit of open files. Commands that the tool
//! starts get the original settings.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};
use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, pthread_sigmask, signal};

/// Settings as this process has inherited them from its caller.
#[derive(Debug, Clone, Copy)]
struct Inherited {
    mask: SigSet,
    ignores_children: bool,
    /// Soft and hard limit of open files.
    open_files: Option<(rlim_t, rlim_t)>,
}

static INHERITED: OnceLock<Inherited> = OnceLock::new();

/// Saves the inherited settings and then changes them. From then on the kernel keeps the exit status of children,
/// which it discards if SIGCHLD is ignored. This process may then open as many files as the hard limit allows: each
/// library of a traced process and each probe needs one. To be called before there is a child or a thread.
pub(crate) fn save_and_override() {
    let inherited = INHERITED.get_or_init(|| Inherited {
        mask: SigSet::thread_get_mask().unwrap_or_else(|_| SigSet::empty()),
        ignores_children: is_ignored(Signal::SIGCHLD),
        open_files: getrlimit(Resource::RLIMIT_NOFILE).ok(),
    });
    // SAFETY: sets the default action, which runs no code of ours.
    let _ = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) };
    if let Some((_, most)) = inherited.open_files {
        // If setting the limit fails and it is reached, opening a file reports the error.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

/// Restores the settings of the caller, in a child that is about to call exec. Makes system calls only.
pub(crate) fn restore() -> Result<(), Errno> {
    // SAFETY: sets the default action. Rust's runtime has set SIGPIPE to be ignored, which exec would pass on.
    unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) }?;
    let inherited = INHERITED.get();
    if inherited.is_some_and(|inherited| inherited.ignores_children) {
        // SAFETY: ignores the signal, which runs no code of ours.
        unsafe { signal(Signal::SIGCHLD, SigHandler::SigIgn) }?;
    }
    if let Some((soft, hard)) = inherited.and_then(|inherited| inherited.open_files) {
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?;
    }
    let mask = inherited.map_or_else(SigSet::empty, |inherited| inherited.mask);
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&mask), None)
}

/// Returns the signals that end a run after a last report. SIGHUP and SIGQUIT (Ctrl-\) are included only if the
/// caller does not ignore them, as nohup(1) does.
pub(crate) fn stop_signals() -> SigSet {
    let mut stopping = SigSet::empty();
    stopping.add(Signal::SIGINT);
    stopping.add(Signal::SIGTERM);
    for signal in [Signal::SIGHUP, Signal::SIGQUIT] {
        if !is_ignored(signal) {
            stopping.add(signal);
        }
    }
    stopping
}

fn is_ignored(signal: Signal) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: without a new action, the call only writes the present action to `action`.
    let asked = unsafe { libc::sigaction(signal as i32, ptr::null(), action.as_mut_ptr()) };
    if asked != 0 {
        let error = io::Error::last_os_error();
        debug_assert!(false, "sigaction: {error}");
        return false;
    }
    // SAFETY: the call has succeeded; zeroed memory is a valid action, too.
    unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ignored_does_not_end_a_run() {
        // Rust's runtime ignores SIGPIPE; nothing ignores SIGWINCH.
        assert!(is_ignored(Signal::SIGPIPE) && !is_ignored(Signal::SIGWINCH));
        let stopping = stop_signals();
        assert!(stopping.contains(Signal::SIGINT) && stopping.contains(Signal::SIGTERM));
        assert!(!stopping.contains(Signal::SIGUSR1));
    }
}
