//! Watch of memory use (`--idle`) beside a trace.

use std::time::{Duration, Instant};

use anyhow::Result;
use memtools::heap::idle::Watch;
use memtools::process::proc::Process;

/// Watch of the memory that the process uses while its allocations are traced, with its schedule.
pub(super) struct IdleWatch<'a> {
    process: &'a Process,
    watch: Watch,
    /// Length of the last part of each interval, which the watch is of.
    last: Duration,
    /// Time from one verdict to the next.
    interval: Duration,
    next: WatchStep,
}

/// Next step of the watch, and when it is due.
enum WatchStep {
    BeginAnew(Instant),
    Judge(Instant),
}

impl WatchStep {
    /// Returns the first step of an interval that begins now, whose last part is watched.
    fn first(last: Duration, interval: Duration) -> Self {
        if last < interval {
            Self::BeginAnew(Instant::now() + (interval - last))
        } else {
            Self::Judge(Instant::now() + interval)
        }
    }
}

impl<'a> IdleWatch<'a> {
    /// Begins a watch of the last part of each `interval`, if its length is given as `time`. The first interval begins
    /// now. The watch begins at once, and anew when the last part begins. So an error shows at once, and a trace
    /// that is ended early has a result.
    ///
    /// # Errors
    /// If memory use cannot be watched on this machine.
    pub(super) fn if_wanted(
        process: &'a Process,
        time: Option<Duration>,
        interval: Duration,
    ) -> Result<Option<Self>> {
        let Some(time) = time else {
            return Ok(None);
        };
        let watch = Watch::begin(process)?;
        let (pid, seconds) = (process.pid(), time.as_secs_f64());
        memtools::message!(
            "monitoring accesses of process {pid} for the last {seconds:.1} s before a verdict"
        );
        Ok(Some(Self {
            process,
            watch,
            last: time,
            interval,
            next: WatchStep::first(time, interval),
        }))
    }

    /// Returns the latest time at which [`follow`](Self::follow) is to be called.
    pub(super) fn deadline(&self) -> Instant {
        match self.next {
            WatchStep::BeginAnew(at) | WatchStep::Judge(at) => at,
        }
    }

    /// Begins the watch anew when the last part of the trace begins. Returns whether the verdict is due. The verdict is
    /// not due before the last part was watched to its end, however late its watch began on a busy machine.
    ///
    /// # Errors
    /// If the Accessed bits cannot be relied on any more.
    pub(super) fn follow(&mut self) -> Result<bool> {
        match self.next {
            WatchStep::BeginAnew(at) if at <= Instant::now() => {
                self.begin_anew(false)?;
                self.next = WatchStep::Judge(Instant::now() + self.last);
                Ok(false)
            }
            WatchStep::BeginAnew(_) => Ok(false),
            WatchStep::Judge(at) => Ok(at <= Instant::now()),
        }
    }

    /// Begins the watch anew, such as after an image: the copy has marked huge pages as used. Begins an interval if the
    /// image was the one that was due.
    ///
    /// # Errors
    /// If the Accessed bits cannot be relied on any more.
    pub(super) fn begin_anew(&mut self, was_due: bool) -> Result<()> {
        self.watch = Watch::begin(self.process)?;
        if was_due {
            self.next = WatchStep::first(self.last, self.interval);
        }
        Ok(())
    }

    pub(super) fn watch(&self) -> &Watch {
        &self.watch
    }
}
