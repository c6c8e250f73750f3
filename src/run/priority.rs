//! The tool's own priority.

/// Nice value of a reader of events, low enough to run before the traced processes. The lowest value, -20, is for
/// what the machine cannot do without.
const NICE: i32 = -10;

/// Raises the priority of this thread, and of threads that it starts from now on, above that of the traced processes.
/// On a machine with more to run than CPUs, a reader that waits for its turn loses events. Call this after the
/// command of `-c` has been started, so that the command keeps its own priority.
///
/// Without CAP_SYS_NICE the priority stays as it is. More events may be lost then, which are counted.
pub fn raise() {
    // SAFETY: a system call that takes numbers.
    unsafe {
        let now = libc::getpriority(libc::PRIO_PROCESS, 0);
        if now > NICE {
            libc::setpriority(libc::PRIO_PROCESS, 0, NICE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_and_its_own_are_raised_where_that_is_allowed() {
        let nice_of_a_thread = || {
            // SAFETY: a system call that takes numbers.
            let nice = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
            std::thread::spawn(move || {
                let before = nice();
                raise();
                (before, std::thread::spawn(nice).join().expect("a number"))
            })
        };
        let (before, after) = nice_of_a_thread().join().expect("two numbers");
        if nix::unistd::geteuid().is_root() {
            assert_eq!(after, before.min(NICE));
        } else {
            assert!([before, NICE].contains(&after), "{after}");
        }
    }
}
