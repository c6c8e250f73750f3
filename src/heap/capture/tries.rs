//! Trying again, where a thread did not stop in time: on a busy machine it may lack CPU time, and in a vfork it stops
//! only once the child runs a program of its own.
//!
//! Between two tries all threads run. How long others stand in each of them is the same, however many there are.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::stop::Late;

/// How long all run before the next try: 3.1 seconds together.
const GAPS: [Duration; 5] = [
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(400),
    Duration::from_millis(800),
    Duration::from_millis(1600),
];

/// The tries at stopping a process that have failed, and why the last one did.
#[derive(Debug)]
pub(super) struct Tries {
    begin: Instant,
    failed: usize,
    last: Option<Late>,
}

impl Tries {
    pub(super) fn begin() -> Self {
        Self {
            begin: Instant::now(),
            failed: 0,
            last: None,
        }
    }

    /// Has all threads run for a while, as this one was late. While it sleeps where nothing interrupts it, a try would
    /// fail as well, and no other thread is stopped for that.
    ///
    /// # Errors
    /// If there is no other try.
    pub(super) fn wait(&mut self, late: Late) -> Result<()> {
        self.last = Some(late);
        loop {
            let gap = GAPS.get(self.failed);
            self.failed += 1;
            let Some(gap) = gap else {
                bail!(late.told(self.failed, self.begin.elapsed()));
            };
            thread::sleep(*gap);
            if !late.sleeps_still() {
                return Ok(());
            }
        }
    }

    /// What is to be said if it took more than one try: the other threads stood still in each.
    pub(super) fn told(&self) -> Option<String> {
        let last = self.last?;
        Some(format!(
            "it took {} tries to stop all threads of process {}: thread {} did not stop within {} ms",
            self.failed + 1,
            last.pid,
            last.tid,
            super::stop::PATIENCE.as_millis()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_try_tells_how_many_there_were() {
        let mut tries = Tries::begin();
        assert_eq!(tries.told(), None);
        let late = Late {
            pid: 4242,
            tid: 4243,
            sleeps: true,
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
