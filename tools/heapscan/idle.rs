//! Watch of memory use (`--idle`) before the copies.

use std::time::{Duration, Instant};

use anyhow::Result;
use memtools::heap::idle::Watch;
use memtools::process::proc::Process;
use memtools::run::poll::Poller;
use memtools::verdict;

/// Watches which memory the process uses, for `time`, or until a signal asks for a report or for the end.
///
/// # Errors
/// If memory use cannot be watched on this machine, or the process exits.
pub(super) fn watch<'a>(
    process: &'a Process,
    time: Duration,
    poller: &mut Poller<'a>,
) -> Result<Watch> {
    poller.watch_exit(process);
    let watch = Watch::begin(process)?;
    let (pid, seconds) = (process.pid(), time.as_secs_f64());
    memtools::message!("monitoring accesses of process {pid} for {seconds:.1} s");
    let deadline = Instant::now() + time;
    loop {
        let wake = poller.wait(Some(deadline))?;
        if wake.exited {
            return Err(verdict::exited_before(pid));
        }
        if wake.deadline || wake.stop || wake.report {
            return Ok(watch);
        }
    }
}
