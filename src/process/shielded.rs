//! Calls that the end of this process does not interrupt, not even its end by SIGKILL.
//!
//! While a fatal signal is pending, the kernel leaves the breakpoints in a process that it should remove ("failed to
//! unregister, leaking uprobe" in its log). So the caller of such a call must not be what is killed: a child process
//! does it, which shares our memory and files and is in a session of its own.

use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::ptr;
use std::thread;

use memmap2::MmapMut;
use nix::sys::signal::{SigSet, SigmaskHow, pthread_sigmask};
use nix::unistd::setsid;

/// Bytes of the child's stack. libbpf takes less than 64 KiB.
const STACK: usize = 1 << 20;

/// Function to call, and then its result.
enum Call<F, T> {
    Wanted(F),
    Running,
    Done(thread::Result<T>),
}

/// Calls a function in a child process, and waits until it returns. If this process is killed meanwhile, the child calls
/// the function to its end, and then closes the files of both.
///
/// The function may do what this thread may do, except to end the thread or to ask for its own PID.
///
/// # Panics
/// If the function does.
pub(crate) fn call<F: FnOnce() -> T, T>(function: F) -> T {
    let mut call = Call::Wanted(function);
    let started = start(&mut call);
    match call {
        Call::Done(Ok(result)) => result,
        Call::Done(Err(cause)) => panic::resume_unwind(cause),
        // Without a child, such as for lack of processes or memory, the call is not shielded.
        Call::Wanted(function) => function(),
        Call::Running => unreachable!("the child has ended without a result: {started:?}"),
    }
}

/// Runs the child, which replaces `call` by its result.
fn start<F: FnOnce() -> T, T>(call: &mut Call<F, T>) -> io::Result<()> {
    let mut stack = MmapMut::map_anon(STACK)?;
    // A handler of ours must not run in a process that shares our memory.
    let mut before = SigSet::empty();
    pthread_sigmask(
        SigmaskHow::SIG_SETMASK,
        Some(&SigSet::all()),
        Some(&mut before),
    )?;
    // SAFETY: this thread continues when the child has ended, so the stack and the call outlive the child, and no two
    // tasks use the thread's own data at a time. If this process is killed, its memory lasts as long as the child.
    let pid = unsafe {
        libc::clone(
            run::<F, T>,
            stack.as_mut_ptr().add(STACK).cast(),
            libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_FS | libc::CLONE_FILES,
            ptr::from_mut(call).cast(),
        )
    };
    let error = io::Error::last_os_error();
    let _ = pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&before), None);
    if pid < 0 {
        return Err(error);
    }
    // SAFETY: the kernel writes nothing.
    unsafe { libc::waitpid(pid, ptr::null_mut(), libc::__WALL) };
    Ok(())
}

/// Does a call, in the child.
extern "C" fn run<F: FnOnce() -> T, T>(call: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the parent waits for us, and does not use the call meanwhile.
    let call = unsafe { &mut *call.cast::<Call<F, T>>() };
    // A signal to the parent's process group is not for this process.
    let _ = setsid();
    if let Call::Wanted(function) = std::mem::replace(call, Call::Running) {
        *call = Call::Done(panic::catch_unwind(AssertUnwindSafe(function)));
    }
    0
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Read;
    use std::process;

    use super::*;

    /// A child of another PID does the call. Its result, its files and its panics are ours.
    #[test]
    fn a_call_in_a_child_is_like_one_here() {
        let (stat, zeros) = call(|| {
            (
                fs::read_to_string("/proc/self/stat"),
                File::open("/dev/zero"),
            )
        });
        let stat = stat.expect("readable");
        assert!(!stat.starts_with(&format!("{} ", process::id())), "{stat}");
        let mut byte = [1];
        zeros
            .expect("a file")
            .read_exact(&mut byte)
            .expect("open here, too");
        assert_eq!(byte, [0]);
        let panicked = panic::catch_unwind(|| call(|| panic!("of the child")));
        let cause = panicked.expect_err("the panic is ours");
        assert_eq!(cause.downcast_ref(), Some(&"of the child"));
    }
}
