//! Verdict on a process whose allocations are traced: which blocks nothing refers to, and what holds the others, found
//! in copies of the process. Blocks whose allocation was traced are shown by stack.

pub(crate) mod args;
mod idle;

use std::time::{Duration, Instant};

use anyhow::Result;
use memtools::heap::capture::at_exit::AtExit;
use memtools::heap::idle::Watch;
use memtools::print::output::Output;
use memtools::process::command::HeldCommand;
use memtools::process::proc::Process;
use memtools::run::poll::Poller;
use memtools::stacks::named::NamedStack;
use memtools::verdict::{
    self, AllocSite, HeapAnalysis, Origin, Sections, Settings, Stacks, Suppressions, Trace,
    TracedAllocation, TracedBlocks,
};

use self::idle::IdleWatch;
use crate::plan::{Moment, VerdictSettings};
use crate::source::{Flow, ReportData, Source};
use crate::sums::StackKey;

/// Input of a verdict besides the trace.
#[derive(Default)]
pub(crate) struct VerdictInputs {
    suppressions: Suppressions,
    /// Command, if the verdict is due at its exit.
    pub(crate) at_exit: Option<AtExit>,
}

impl VerdictInputs {
    /// Reads the files that --suppressions names.
    ///
    /// # Errors
    /// If a file cannot be read or parsed.
    pub(crate) fn read(settings: &VerdictSettings) -> Result<Self> {
        let suppressions = Suppressions::read(&settings.suppressions)?;
        if suppressions.ignored() > 0 {
            memtools::message!(
                "ignored {} suppressions that are not Memcheck:Leak entries",
                suppressions.ignored()
            );
        }
        Ok(Self {
            suppressions,
            at_exit: None,
        })
    }

    /// Whether stacks need source lines.
    pub(crate) fn source_lines(&self) -> bool {
        self.suppressions.want_source()
    }

    /// Begins to watch for the command's exit, if the verdict is due then.
    ///
    /// # Errors
    /// If the kernel refuses to trace the command.
    pub(crate) fn watch(
        &mut self,
        settings: &VerdictSettings,
        command: Option<&HeldCommand>,
    ) -> Result<()> {
        let command = command.filter(|_| settings.moment == Moment::Exit);
        self.at_exit = command.map(|held| AtExit::watch(held.pid())).transpose()?;
        Ok(())
    }
}

/// Follows a trace until the last verdict is due or a signal ends the trace, and prints the verdicts. On SIGUSR1, prints
/// one more verdict, unless the verdict is due at the command's exit. Returns the number of leaked blocks of the last
/// verdict.
///
/// # Errors
/// If no verdict is possible, or the process has exited before.
pub(crate) fn run<S: Source>(
    source: &mut S,
    process: &Process,
    settings: &VerdictSettings,
    poller: &mut Poller<'_>,
    output: &mut Output,
    wanted: &VerdictInputs,
) -> Result<u64> {
    let leaks = follow(source, process, settings, poller, output, wanted);
    // Release the command even if there is no verdict on it.
    if let Some(at_exit) = &wanted.at_exit {
        at_exit.release();
    }
    leaks
}

fn follow<S: Source>(
    source: &mut S,
    process: &Process,
    settings: &VerdictSettings,
    poller: &mut Poller<'_>,
    output: &mut Output,
    wanted: &VerdictInputs,
) -> Result<u64> {
    let begun = Instant::now();
    let (mut beside, mut left) = (None, None);
    if let Moment::Every {
        interval,
        count,
        idle,
    } = settings.moment
    {
        left = count;
        beside = IdleWatch::if_wanted(process, idle, interval)?;
        if beside.is_none() {
            poller.tick_every(interval)?;
        }
    }
    let (mut leaks, mut is_ending) = (None, false);
    loop {
        let watched = beside.as_ref().map(IdleWatch::deadline);
        let wake = poller.wait(source.deadline().into_iter().chain(watched).min())?;
        match source.handle_events(&wake, output)? {
            Flow::Continue => (),
            Flow::End { exited: true } => {
                return leaks.ok_or_else(|| verdict::exited_before(process.pid()));
            }
            // The source says why it ends the run.
            Flow::End { exited: false } => return Ok(0),
        }
        let is_due = wake.tick || beside.as_mut().map_or(Ok(false), IdleWatch::follow)?;
        let Some(at_exit) = &wanted.at_exit else {
            if wake.report || is_due || wake.stop {
                let watch = beside.as_ref().map(IdleWatch::watch);
                let due = (settings, wanted, begun.elapsed());
                let last = judge_now(source, process, watch, due, output)?;
                if is_due {
                    left = left.map(|left| left - 1);
                }
                if left == Some(0) || wake.stop {
                    return Ok(last);
                }
                leaks = Some(last);
                match (&mut beside, settings.moment) {
                    (Some(watch), _) => watch.begin_anew(is_due)?,
                    // Verdicts are a whole interval apart, however long one takes.
                    (None, Moment::Every { interval, .. }) if is_due => {
                        poller.tick_every(interval)?;
                    }
                    _ => (),
                }
            }
            continue;
        };
        if wake.is_ready(at_exit)
            && let Some(image) = at_exit.image()?
        {
            let found = source.snapshot(image.copied_ns, true)?;
            // If all allocations were traced, and all were freed, the process need not even have a heap.
            let is_empty = found.allocations.len() == found.mappings && !source.losses()?.any();
            let case = HeapAnalysis::look_at_exit(process, image, is_empty)?;
            let due = (settings, wanted, begun.elapsed());
            leaks = Some(judge(source, case, found, due, output)?);
            at_exit.release();
        }
        if wake.report {
            memtools::message!("the verdict is given when the command exits");
        }
        if wake.stop && is_ending {
            return Ok(leaks.unwrap_or_default());
        } else if wake.stop {
            is_ending = true;
            at_exit.terminate();
        }
    }
}

/// Gives a verdict on the process as it is now. Returns the number of leaked blocks.
fn judge_now<S: Source>(
    source: &mut S,
    process: &Process,
    watch: Option<&Watch>,
    due: (&VerdictSettings, &VerdictInputs, Duration),
    output: &mut Output,
) -> Result<u64> {
    let request = due.0.copies.request(process, watch);
    let case = HeapAnalysis::take_confirmed(&request, &mut |_| Ok(()))?;
    // Lost blocks have not been freed since the copy, so none of their allocations are missing here.
    let found = source.snapshot(case.image().copied_ns, true)?;
    judge(source, case, found, due, output)
}

fn judge<S: Source>(
    source: &mut S,
    mut case: HeapAnalysis<'_>,
    found: ReportData,
    (settings, wanted, traced): (&VerdictSettings, &VerdictInputs, Duration),
    output: &mut Output,
) -> Result<u64> {
    let copied_ns = case.image().copied_ns;
    let pid = case.image().pid;
    let of_it = found.allocations.into_iter().filter(|by| by.pid == pid);
    let allocations = of_it.map(|by| TracedAllocation {
        address: by.address,
        size: by.size,
        stack: by.stack,
        time_ns: by.time_ns,
    });
    let seen = TracedBlocks::of(case.heap(), copied_ns, allocations);
    let lost = source.losses()?;
    let trace = Trace {
        traced_ms: traced.as_millis() as u64,
        at_exit: wanted.at_exit.is_some(),
        traced_blocks: seen.count(),
        ignored_suppressions: wanted.suppressions.ignored(),
        lost,
    };
    case.add_trace(seen, trace);
    let mut stacks = TraceStacks {
        source,
        pid,
        copied_ns,
    };
    let shown = Settings {
        top: settings.top,
        why: &settings.why,
        container: settings.container,
    };
    let report = case.report(&shown, &mut stacks, &wanted.suppressions)?;
    let leaks = report.leaks();
    report.print(Sections::ALL, output)?;
    output.flush()?;
    if lost.any() {
        memtools::message!("{lost}");
    }
    source.print_remedies(&lost);
    Ok(leaks)
}

/// Source of the stacks of a trace.
struct TraceStacks<'a, S> {
    source: &'a mut S,
    pid: u32,
    /// CLOCK_MONOTONIC of the copy.
    copied_ns: u64,
}

impl<S: Source> TraceStacks<'_, S> {
    fn named(&mut self, stack: u64) -> Result<NamedStack> {
        let pid = self.pid;
        self.source.symbolize(StackKey { pid, stack })
    }
}

impl<S: Source> Stacks for TraceStacks<'_, S> {
    fn symbolize(&mut self, stack: u64) -> Result<Option<NamedStack>> {
        self.named(stack).map(Some)
    }

    fn origin(&mut self, born: AllocSite) -> Result<Option<Origin>> {
        let age_ms = |time_ns: u64| self.copied_ns.saturating_sub(time_ns) / 1_000_000;
        Ok(Some(Origin {
            oldest_age_ms: age_ms(born.first_ns),
            youngest_age_ms: age_ms(born.last_ns),
            stack_id: born.stack,
            stack: self.named(born.stack)?,
        }))
    }
}
