//! Calls that the end of this process does not interrupt, not even its end by SIGKILL.
//!
//! While a fatal signal is pending, the kernel leaves the breakpoints in a process that it should remove ("failed to
//! unregister, leaking uprobe" in its log). So the caller of such a call must not be what is killed: a child process
//! does it, which shares our memory and files and is in a session of its own.

use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::ptr;
use std::thread;

use anyhow::{Result, bail};
use memmap2::MmapMut;
use nix::sys::signal::{SigSet, SigmaskHow, pthread_sigmask};
use nix::unistd::{Pid, setsid};

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
/// # Errors
/// If the function fails, or the child is killed.
///
/// # Panics
/// If the function does.
pub(crate) fn call<T>(function: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut call = Call::Wanted(function);
    // Without a child, such as for lack of processes or memory, the call is not shielded.
    let _ = start(&mut call);
    match call {
        Call::Done(Ok(result)) => result,
        Call::Done(Err(cause)) => panic::resume_unwind(cause),
        Call::Wanted(function) => function(),
        Call::Running => bail!("a child process of this tool was killed"),
    }
}

/// Runs the child, which replaces `call` by its result.
fn start<F: FnOnce() -> T, T>(call: &mut Call<F, T>) -> io::Result<()> {
    let mut stack = MmapMut::map_anon(STACK)?;
    let call = ptr::from_mut(call).cast();
    // SAFETY: this thread continues when the child has ended, so the stack and the call outlive the child, and no two
    // tasks use the thread's own data at a time. If this process is killed, its memory lasts as long as the child.
    let pid = unsafe { start_sharing(&mut stack, libc::CLONE_VFORK, run::<F, T>, call) }?;
    // SAFETY: the kernel writes nothing.
    unsafe { libc::waitpid(pid.as_raw(), ptr::null_mut(), libc::__WALL) };
    Ok(())
}

/// Starts a process that shares our memory, files and working directory, and runs `function` on this stack. All signals
/// are blocked in it, and its end sends none. `flags` are more flags of clone(2).
///
/// # Errors
/// If the kernel has no process left.
///
/// # Safety
/// The stack and the argument must live until the process has ended. Unless this thread waits for it (CLONE_VFORK), the
/// function must not use the data of the thread, such as errno.
pub(crate) unsafe fn start_sharing(
    stack: &mut MmapMut,
    flags: libc::c_int,
    function: extern "C" fn(*mut libc::c_void) -> libc::c_int,
    argument: *mut libc::c_void,
) -> io::Result<Pid> {
    // A handler of ours must not run in a process that shares our memory.
    let mut before = SigSet::empty();
    pthread_sigmask(
        SigmaskHow::SIG_SETMASK,
        Some(&SigSet::all()),
        Some(&mut before),
    )?;
    let flags = flags | libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES;
    // SAFETY: the end of the stack is where the stack begins; the caller promises the rest.
    let pid = unsafe {
        let end = stack.as_mut_ptr().add(stack.len());
        libc::clone(function, end.cast(), flags, argument)
    };
    let error = io::Error::last_os_error();
    let _ = pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&before), None);
    if pid < 0 {
        return Err(error);
    }
    Ok(Pid::from_raw(pid))
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
        let open = || {
            let stat = fs::read_to_string("/proc/self/stat")?;
            Ok((stat, File::open("/dev/zero")?))
        };
        let (stat, mut zeros) = call(open).expect("readable");
        assert!(!stat.starts_with(&format!("{} ", process::id())), "{stat}");
        let mut byte = [1];
        zeros.read_exact(&mut byte).expect("open here, too");
        assert_eq!(byte, [0]);
        let panicked = panic::catch_unwind(|| call::<()>(|| panic!("of the child")));
        let cause = panicked.expect_err("the panic is ours");
        assert_eq!(cause.downcast_ref(), Some(&"of the child"));
    }
}
