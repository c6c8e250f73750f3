//! Times at which a counting tool reports: at each interval, whenever SIGUSR1 asks for it, and for a last time at the
//! end of the run.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::run::poll::{Poller, Wake};

/// Report that is due after a wake-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// No report.
    Nothing,
    /// A report, after which the run goes on.
    Report,
    /// The last report.
    Last,
}

/// The reports of one run.
#[derive(Debug)]
pub struct Reports {
    left: Option<u64>,
    deadline: Option<Instant>,
}

impl Reports {
    /// Schedules a report each `interval`, if there is one, from now on. After `count` of them the run ends.
    ///
    /// # Errors
    /// If there are no timers or descriptors left.
    pub fn start(
        poller: &mut Poller<'_>,
        interval: Option<Duration>,
        count: Option<u64>,
        deadline: Option<Instant>,
    ) -> Result<Self> {
        if let Some(interval) = interval {
            poller.tick_every(interval)?;
        }
        Ok(Self {
            left: count,
            deadline,
        })
    }

    /// Calls `report` for each report but the last, which is due when this returns.
    ///
    /// # Errors
    /// If the kernel does not let us wait, or `report` fails.
    pub fn each(
        mut self,
        poller: &mut Poller<'_>,
        mut report: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        loop {
            match self.wait(poller)?.1 {
                Due::Nothing => {}
                Due::Report => report()?,
                Due::Last => return Ok(()),
            }
        }
    }

    /// Waits until something is to be done.
    ///
    /// # Errors
    /// If the kernel does not let us wait.
    pub fn wait(&mut self, poller: &mut Poller<'_>) -> Result<(Wake, Due)> {
        let wake = poller.wait(self.deadline)?;
        let due = self.due(&wake);
        Ok((wake, due))
    }

    fn due(&mut self, wake: &Wake) -> Due {
        if wake.tick {
            self.left = self.left.map(|left| left.saturating_sub(1));
        }
        if wake.stop || wake.deadline || wake.exited || self.left == Some(0) {
            Due::Last
        } else if wake.tick || wake.report {
            Due::Report
        } else {
            Due::Nothing
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_a_count_is_the_last() {
        let tick = Wake {
            tick: true,
            ..Wake::default()
        };
        let mappings = Wake {
            mappings: true,
            ..Wake::default()
        };
        let mut reports = Reports {
            left: Some(2),
            deadline: None,
        };
        assert_eq!(reports.due(&mappings), Due::Nothing);
        assert_eq!(reports.due(&tick), Due::Report);
        assert_eq!(reports.due(&tick), Due::Last);

        let mut reports = Reports {
            left: None,
            deadline: None,
        };
        for _ in 0..3 {
            assert_eq!(reports.due(&tick), Due::Report);
        }
        let asked = Wake {
            report: true,
            ..Wake::default()
        };
        reports.left = Some(1);
        assert_eq!(reports.due(&asked), Due::Report, "no count includes it");
        reports.left = None;
        for end in [
            Wake { stop: true, ..tick },
            Wake {
                exited: true,
                ..Wake::default()
            },
            Wake {
                deadline: true,
                ..Wake::default()
            },
        ] {
            assert_eq!(reports.due(&end), Due::Last);
        }
    }
}
