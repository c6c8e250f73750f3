//! Repeated tries at stopping a process, after a thread did not stop in time. On a busy machine, the thread may lack
//! CPU time. In a vfork, the thread stops only once the child runs a program of its own.
//!
//! All threads run between two tries. The time for which the other threads are paused in one try does not depend on
//! the number of tries.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::stop::UnstoppedThread;

/// Pauses between tries, in which all threads run: 3.1 seconds together.
const GAPS: [Duration; 5] = [
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(400),
    Duration::from_millis(800),
    Duration::from_millis(1600),
];

/// Failed tries at stopping a process, with the thread that was late in the last one.
#[derive(Debug)]
pub(super) struct Tries {
    begin: Instant,
    failed: usize,
    last: Option<UnstoppedThread>,
}

impl Tries {
    pub(super) fn begin() -> Self {
        Self {
            begin: Instant::now(),
            failed: 0,
            last: None,
        }
    }

    /// Lets all threads run until the next try, after this thread was late. As long as the thread sleeps where
    /// nothing interrupts it, the next try would fail as well. So the pause goes on and counts as a failed try, and
    /// no other thread is stopped.
    ///
    /// # Errors
    /// If no try is left.
    pub(super) fn wait(&mut self, late: UnstoppedThread) -> Result<()> {
        self.last = Some(late);
        loop {
            let gap = GAPS.get(self.failed);
            self.failed += 1;
            let Some(gap) = gap else {
                bail!(late.message(self.failed, self.begin.elapsed()));
            };
            thread::sleep(*gap);
            if !late.sleeps_still() {
                return Ok(());
            }
        }
    }

    /// Returns a message if the stop took more than one try, because the other threads were stopped in each try.
    pub(super) fn message(&self) -> Option<String> {
        let last = self.last?;
        Some(format!(
            "it took {} tries to stop all threads of process {}: thread {} did not stop within {} ms",
            self.failed + 1,
            last.pid,
            last.tid,
            super::bound::milliseconds(last.within)
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_try_tells_how_many_there_were() {
        let mut tries = Tries::begin();
        assert_eq!(tries.message(), None);
        let late = UnstoppedThread {
            pid: 4242,
            tid: 4243,
            sleeps: true,
            within: Duration::from_millis(100),
        };
        tries.failed = GAPS.len();
        let told = tries.wait(late).expect_err("no more tries").to_string();
        assert!(
            told.contains(
                "thread 4243 of process 4242 did not stop within 100 ms in 6 tries over 0."
            ),
            "{told}"
        );
        assert!(told.contains("state D"), "{told}");
    }
}
