//! Idle memory (`--idle`): blocks that are held, on pages that stayed untouched for a while.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use memtools::heap::idle::{IdlePages, Watch};
use memtools::print::output::Row;
use memtools::print::text;
use memtools::process::proc::Process;
use memtools::run::poll::Poller;
use serde::Serialize;

use super::judge::Sum;

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
    eprintln!("memleak: which memory process {pid} uses is watched for {seconds:.1} s");
    let deadline = Instant::now() + time;
    loop {
        let wake = poller.wait(Some(deadline))?;
        if wake.exited {
            bail!("no verdict: process {pid} ended, or was killed, before one was due");
        }
        if wake.deadline || wake.stop || wake.report {
            return Ok(watch);
        }
    }
}

/// Watch of the memory that the process uses while its allocations are traced, with its schedule.
pub(super) struct IdleWatch<'a> {
    process: &'a Process,
    watch: Watch,
    /// Length of the last part of the trace, which the watch is of.
    last: Duration,
    next: WatchStep,
}

/// Next step of the watch, and when it is due.
enum WatchStep {
    BeginAnew(Instant),
    Judge(Instant),
}

impl<'a> IdleWatch<'a> {
    /// Begins a watch of the last part of the trace, if its length is given as `time`. The trace takes `traced` from
    /// now on. The watch begins at once, and anew when the last part begins. So an error shows at once, and a trace
    /// that is ended early has a result.
    ///
    /// # Errors
    /// If memory use cannot be watched on this machine.
    pub(super) fn if_wanted(
        process: &'a Process,
        time: Option<Duration>,
        traced: Duration,
    ) -> Result<Option<Self>> {
        let Some(time) = time else {
            return Ok(None);
        };
        let watch = Watch::begin(process)?;
        let (pid, seconds) = (process.pid(), time.as_secs_f64());
        eprintln!(
            "memleak: which memory process {pid} uses is watched for the last {seconds:.1} s of the trace"
        );
        let next = if time < traced {
            WatchStep::BeginAnew(Instant::now() + (traced - time))
        } else {
            WatchStep::Judge(Instant::now() + traced)
        };
        Ok(Some(Self {
            process,
            watch,
            last: time,
            next,
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
                self.begin_anew()?;
                self.next = WatchStep::Judge(Instant::now() + self.last);
                Ok(false)
            }
            WatchStep::BeginAnew(_) => Ok(false),
            WatchStep::Judge(at) => Ok(at <= Instant::now()),
        }
    }

    /// Begins the watch anew, such as after an image: the copy has marked huge pages as used.
    ///
    /// # Errors
    /// If the Accessed bits cannot be relied on any more.
    pub(super) fn begin_anew(&mut self) -> Result<()> {
        self.watch = Watch::begin(self.process)?;
        Ok(())
    }

    pub(super) fn watch(&self) -> &Watch {
        &self.watch
    }
}

/// Idle part of the memory that is held, and figures on its uncertainty.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "idle")]
pub(super) struct Idle {
    watched_ms: u64,
    #[serde(flatten)]
    sum: Sum,
    reclaim_scanned: u64,
    own_pages: u64,
    own_pages_lost: u64,
    huge_pages_judged: bool,
    cpus_not_reached: usize,
}

impl Idle {
    pub(super) fn of(pages: &IdlePages, sum: Sum) -> Self {
        Self {
            watched_ms: pages.watched.as_millis() as u64,
            sum,
            reclaim_scanned: pages.reclaim_scanned,
            own_pages: pages.own.pages,
            own_pages_lost: pages.own.lost,
            huge_pages_judged: pages.huge_judged,
            cpus_not_reached: pages.cpus_not_reached,
        }
    }
}

impl Row for Idle {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "{:>26} {:>18} {:>12}  of what is reachable: not used for {:.1} s, page by page",
            "idle",
            text::count_with_noun(self.sum.blocks, "block"),
            text::bytes(self.sum.bytes),
            self.watched_ms as f64 / 1000.0
        )?;
        if self.reclaim_scanned > 0 {
            writeln!(
                out,
                "[uncertain] reclaim looked at {} meanwhile, of all processes, and cleared the marks of use: as many \
                 at most may be called idle, and are not",
                text::count_with_noun(self.reclaim_scanned, "page")
            )?;
        }
        if self.own_pages_lost > 0 {
            writeln!(
                out,
                "[uncertain] {} of {} that memleak used itself have lost the mark of that (to reclaim, DAMON or others): \
                 about so large a part of what was used may be called idle; with more than a tenth, nothing is",
                text::grouped(self.own_pages_lost),
                text::count_with_noun(self.own_pages, "page")
            )?;
        }
        if !self.huge_pages_judged {
            writeln!(
                out,
                "[uncertain] huge pages count as used: huge pages that memleak used itself have lost the mark of that"
            )?;
        }
        if self.cpus_not_reached > 0 {
            writeln!(
                out,
                "[uncertain] {} could not be made to forget page tables: what was used only there may be called idle",
                text::count_with_noun(self.cpus_not_reached as u64, "CPU")
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_uncertain_is_told_beside_what_is_idle() {
        let idle = |reclaim_scanned, cpus_not_reached, own_pages_lost| Idle {
            watched_ms: 60_040,
            sum: Sum {
                blocks: 1009,
                bytes: 4_132_864,
            },
            reclaim_scanned,
            own_pages: 1170,
            own_pages_lost,
            huge_pages_judged: own_pages_lost == 0,
            cpus_not_reached,
        };
        let text = |idle: Idle| {
            let mut text = Vec::new();
            idle.text(&mut text).expect("memory");
            String::from_utf8(text).expect("UTF-8")
        };
        let sure = text(idle(0, 0, 0));
        assert!(
            sure.contains(" 1,009 blocks ") && sure.contains(" 60.0 s"),
            "{sure}"
        );
        assert!(!sure.contains("uncertain"), "{sure}");
        let unsure = text(idle(4211, 1, 3));
        assert_eq!(unsure.matches("\n[uncertain] ").count(), 4, "{unsure}");
        assert!(unsure.contains("] 3 of 1,170 pages "), "{unsure}");
        assert!(
            unsure.contains(" 4,211 pages ") && unsure.contains(" 1 CPU "),
            "{unsure}"
        );
    }
}
