//! Real-time priority of this thread for as long as other processes are paused.

use std::io;

/// Guard that gives this thread real-time priority (SCHED_FIFO) while it lives, unless the thread has one already. The
/// threads that this thread starts have the priority, too. All of them run before every thread without a real-time
/// priority. Beside ten busy threads on two CPUs, a process was stopped for 441 to 991 ms for 1 GB without the guard,
/// and for 129 to 149 ms with it.
#[derive(Debug)]
pub(super) struct Realtime {
    /// Schedule to return to, if it was changed, or the error by which the kernel has refused the priority.
    before: io::Result<Option<Schedule>>,
}

impl Realtime {
    pub(super) fn begin() -> Self {
        Self {
            before: Schedule::own().and_then(Schedule::raise),
        }
    }

    /// Raises this thread above the threads and processes that it shares a real-time priority with: those would keep it
    /// waiting, as the scheduler does not preempt one for another of the same priority.
    pub(super) fn raise_above_others() {
        if let Ok(own) = Schedule::own()
            && own.priority > 0
        {
            let above = Schedule {
                priority: own.priority + 1,
                ..own
            };
            // The kernel refuses a priority above the highest one.
            let _ = above.set();
        }
    }

    /// Returns the reason why this thread has no real-time priority: CAP_SYS_NICE is missing, or the cgroup has no
    /// time for real-time threads.
    pub(super) fn refused(&self) -> Option<&io::Error> {
        self.before.as_ref().err()
    }
}

impl Drop for Realtime {
    fn drop(&mut self) {
        if let Ok(Some(before)) = &self.before {
            // To give up priority needs no privilege.
            let _ = before.set();
        }
    }
}

/// Policy of the scheduler for a thread, with its priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Schedule {
    policy: i32,
    /// Real-time priority; 0 of a policy without one.
    priority: i32,
}

impl Schedule {
    /// Lowest real-time priority.
    // SCHED_RESET_ON_FORK is not set: the threads that copy need the priority, too.
    const REALTIME: Self = Self {
        policy: libc::SCHED_FIFO,
        priority: 1,
    };

    /// Returns the schedule of this thread.
    fn own() -> io::Result<Self> {
        let mut parameters = libc::sched_param { sched_priority: 0 };
        // SAFETY: the kernel writes the parameters.
        let policy = unsafe {
            match libc::sched_getparam(0, &raw mut parameters) {
                0 => libc::sched_getscheduler(0),
                _ => -1,
            }
        };
        if policy < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            policy,
            priority: parameters.sched_priority,
        })
    }

    /// Gives this thread, whose schedule this is, real-time priority. Returns this schedule if that changed it.
    fn raise(self) -> io::Result<Option<Self>> {
        let policy = self.policy & !libc::SCHED_RESET_ON_FORK;
        if [libc::SCHED_FIFO, libc::SCHED_RR, libc::SCHED_DEADLINE].contains(&policy) {
            return Ok(None);
        }
        Self::REALTIME.set()?;
        Ok(Some(self))
    }

    /// Gives this thread the schedule.
    fn set(self) -> io::Result<()> {
        let parameters = libc::sched_param {
            sched_priority: self.priority,
        };
        // SAFETY: the kernel reads the parameters.
        match unsafe { libc::sched_setscheduler(0, self.policy, &raw const parameters) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// Returns whether real-time priority is refused to a thread with this schedule, and the thread's schedules with
    /// the guard and after it.
    fn guarded(schedule: Schedule) -> io::Result<(bool, Schedule, Schedule)> {
        let guard = move || {
            schedule.set()?;
            let realtime = Realtime::begin();
            let (refused, with) = (realtime.refused().is_some(), Schedule::own()?);
            drop(realtime);
            Ok((refused, with, Schedule::own()?))
        };
        thread::spawn(guard).join().expect("no panic")
    }

    #[test]
    fn a_thread_has_its_own_schedule_afterwards() {
        for policy in [libc::SCHED_OTHER, libc::SCHED_BATCH] {
            let own = Schedule {
                policy,
                priority: 0,
            };
            let (refused, with, after) = guarded(own).expect("needs no privilege");
            let expected = if refused { own } else { Schedule::REALTIME };
            assert_eq!((with, after), (expected, own));
        }
    }

    #[test]
    fn a_thread_is_raised_above_its_own_priority_if_that_is_real_time() {
        let raised = || {
            Realtime::raise_above_others();
            Schedule::own()
        };
        let own = Schedule::own().expect("readable");
        let found = thread::spawn(raised).join().expect("no panic");
        assert_eq!(found.expect("readable"), own);
        if Schedule::REALTIME.set().is_ok() {
            let found = thread::spawn(raised).join().expect("no panic");
            assert_eq!(found.expect("readable").priority, 2);
            own.set().expect("needs no privilege");
        }
    }

    #[test]
    fn a_thread_with_real_time_priority_keeps_it() {
        let own = Schedule {
            policy: libc::SCHED_RR,
            priority: 7,
        };
        // Without CAP_SYS_NICE, a thread gets no such priority.
        if let Ok(found) = guarded(own) {
            assert_eq!(found, (false, own, own));
        }
    }
}
