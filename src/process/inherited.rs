//! What a tool changes of what it inherits from its caller, signals and the limit of open files, and
//! gives back to a command that it starts.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};
use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, pthread_sigmask, signal};

/// What this process has inherited from its caller, and then changed for itself.
#[derive(Debug, Clone, Copy)]
struct Inherited {
    mask: SigSet,
    ignores_children: bool,
    /// Soft and hard limit.
    open_files: Option<(rlim_t, rlim_t)>,
}

static INHERITED: OnceLock<Inherited> = OnceLock::new();

/// Takes note of what the caller has set. From then on the kernel keeps the exit status of children,
/// which it drops for a caller that ignores SIGCHLD, and we may have as many files open as the
/// administrator allows: each library of a traced process and each probe is one. To be called before
/// there is a child or a thread.
pub fn take_over() {
    let inherited = INHERITED.get_or_init(|| Inherited {
        mask: SigSet::thread_get_mask().unwrap_or_else(|_| SigSet::empty()),
        ignores_children: is_ignored(Signal::SIGCHLD),
        open_files: getrlimit(Resource::RLIMIT_NOFILE).ok(),
    });
    // SAFETY: sets the default action, which runs nothing of ours.
    let _ = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) };
    if let Some((_, most)) = inherited.open_files {
        // A limit that is reached all the same is told where a file is opened.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

/// Sets everything as the caller had it, in a child that is about to call exec. Makes system calls
/// only.
pub(crate) fn give_back() -> Result<(), Errno> {
    // SAFETY: sets the default action; Rust's runtime had SIGPIPE ignored, which exec passes on.
    unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) }?;
    let inherited = INHERITED.get();
    if inherited.is_some_and(|inherited| inherited.ignores_children) {
        // SAFETY: has the signal ignored, which runs nothing of ours.
        unsafe { signal(Signal::SIGCHLD, SigHandler::SigIgn) }?;
    }
    if let Some((soft, hard)) = inherited.and_then(|inherited| inherited.open_files) {
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?;
    }
    let mask = inherited.map_or_else(SigSet::empty, |inherited| inherited.mask);
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&mask), None)
}

/// The signals that end a run with its last report. Those of a terminal that goes away and of Ctrl-\
/// only if the caller does not ignore them, as nohup(1) does.
pub fn stopping() -> SigSet {
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
    // SAFETY: with no new action, the call only writes the present one to `action`.
    let asked = unsafe { libc::sigaction(signal as i32, ptr::null(), action.as_mut_ptr()) };
    if asked != 0 {
        let error = io::Error::last_os_error();
        debug_assert!(false, "sigaction: {error}");
        return false;
    }
    // SAFETY: the call has succeeded; zeroes are an action, too.
    unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ignored_does_not_end_a_run() {
        // SIGPIPE is ignored by Rust's runtime, SIGWINCH by nobody.
        assert!(is_ignored(Signal::SIGPIPE) && !is_ignored(Signal::SIGWINCH));
        let stopping = stopping();
        assert!(stopping.contains(Signal::SIGINT) && stopping.contains(Signal::SIGTERM));
        assert!(!stopping.contains(Signal::SIGUSR1));
    }
}
