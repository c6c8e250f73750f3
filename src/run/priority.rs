//! The tool's own priority.

/// The nice value, as low as a reader of events needs to be before what it traces. The lowest, -20, is
/// for what the machine cannot do without.
const NICE: i32 = -10;

/// Has this thread, and those that it starts from now on, run before what is traced where there is
/// more to run than CPUs: a reader that waits for its turn loses events. Call it after the command
/// of `-c` has been started, which is to run as it would without us.
///
/// Without CAP_SYS_NICE all stays as it is: more may be lost then, and that is counted.
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
