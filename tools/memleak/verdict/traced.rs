//! Verdict on a process whose allocations have been traced. Blocks whose allocation was traced are shown by stack.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use memtools::heap::capture::at_exit::AtExit;
use memtools::print::output::Output;
use memtools::process::command::HeldCommand;
use memtools::process::proc::Process;
use memtools::run::poll::Poller;
use memtools::stacks::named::NamedStack;

use super::HeapAnalysis;
use super::args::Moment;
use super::idle::IdleWatch;
use super::report::{Origin, Trace};
use super::stacks::Stacks;
use super::suppressions::Suppressions;
use super::traced_blocks::{AllocSite, TracedBlocks};
use crate::args::Args;
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
    pub(crate) fn read(args: &Args) -> Result<Self> {
        let suppressions = Suppressions::read(&args.verdict.suppressions)?;
        if suppressions.ignored() > 0 {
            eprintln!(
                "memleak: {} entries of --suppressions are left out: they are of other tools, or of no leak",
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
    pub(crate) fn watch(&mut self, args: &Args, command: Option<&HeldCommand>) -> Result<()> {
        let command = command.filter(|_| args.verdict.verdict == Some(Moment::Exit));
        self.at_exit = command.map(|held| AtExit::watch(held.pid())).transpose()?;
        Ok(())
    }
}

/// Follows a trace until the verdict is due or a signal ends the trace, and prints the verdict. On SIGUSR1, prints one
/// more verdict, unless the verdict is due at the command's exit. Returns the number of leaked blocks.
///
/// # Errors
/// If no verdict is possible, or the process has exited before.
pub(crate) fn run<S: Source>(
    source: &mut S,
    process: &Process,
    args: &Args,
    poller: &mut Poller<'_>,
    output: &mut Output,
    wanted: &VerdictInputs,
) -> Result<u64> {
    let leaks = follow(source, process, args, poller, output, wanted);
    // Release the command even if there is no verdict on it.
    if let Some(at_exit) = &wanted.at_exit {
        at_exit.release();
    }
    leaks
}

fn follow<S: Source>(
    source: &mut S,
    process: &Process,
    args: &Args,
    poller: &mut Poller<'_>,
    output: &mut Output,
    wanted: &VerdictInputs,
) -> Result<u64> {
    let begun = Instant::now();
    let mut beside = None;
    if let Some(Moment::After(time)) = args.verdict.verdict {
        beside = IdleWatch::if_wanted(process, args.verdict.idle, time)?;
        if beside.is_none() {
            poller.tick_every(time)?;
        }
    }
    let (mut leaks, mut is_ending) = (None, false);
    loop {
        let watched = beside.as_ref().map(IdleWatch::deadline);
        let wake = poller.wait(source.deadline().into_iter().chain(watched).min())?;
        match source.handle_events(&wake, output)? {
            Flow::Continue => (),
            Flow::End { exited: true } => {
                return leaks.with_context(|| {
                    let pid = process.pid();
                    format!("no verdict: process {pid} ended, or was killed, before one was due")
                });
            }
            // The source says why it ends the run.
            Flow::End { exited: false } => return Ok(0),
        }
        let is_due = wake.tick || beside.as_mut().map_or(Ok(false), IdleWatch::follow)?;
        let Some(at_exit) = &wanted.at_exit else {
            if wake.report || is_due || wake.stop {
                let watch = beside.as_ref().map(IdleWatch::watch);
                let case = HeapAnalysis::take_confirmed(&args.heap.request(process, watch))?;
                // Lost blocks have not been freed since the copy, so none of their allocations are missing here.
                let found = source.snapshot(case.image.copied_ns, true)?;
                let due = (args, wanted, begun.elapsed());
                let leaks = judge(source, case, found, due, output)?;
                if is_due || wake.stop {
                    return Ok(leaks);
                }
                beside.as_mut().map_or(Ok(()), IdleWatch::begin_anew)?;
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
            let due = (args, wanted, begun.elapsed());
            leaks = Some(judge(source, case, found, due, output)?);
            at_exit.release();
        }
        if wake.report {
            eprintln!("memleak: the verdict is given when the command exits");
        }
        if wake.stop && is_ending {
            return Ok(leaks.unwrap_or_default());
        } else if wake.stop {
            is_ending = true;
            at_exit.terminate();
        }
    }
}

fn judge<S: Source>(
    source: &mut S,
    mut case: HeapAnalysis<'_>,
    found: ReportData,
    (args, wanted, traced): (&Args, &VerdictInputs, Duration),
    output: &mut Output,
) -> Result<u64> {
    let copied_ns = case.image.copied_ns;
    case.seen = TracedBlocks::of(&case.heap, case.process.pid(), copied_ns, found.allocations);
    let lost = source.losses()?;
    case.trace = Some(Trace {
        traced_ms: traced.as_millis() as u64,
        at_exit: wanted.at_exit.is_some(),
        traced_blocks: case.seen.count(),
        ignored_suppressions: wanted.suppressions.ignored(),
        lost,
    });
    let mut stacks = TraceStacks { source, copied_ns };
    let leaks = case.print(args, output, &mut stacks, &wanted.suppressions)?;
    output.flush()?;
    if lost.any() {
        eprintln!("memleak: {lost}");
    }
    source.print_remedies(&lost);
    Ok(leaks)
}

/// Source of the stacks of a trace.
struct TraceStacks<'a, S> {
    source: &'a mut S,
    /// CLOCK_MONOTONIC of the copy.
    copied_ns: u64,
}

impl<S: Source> Stacks for TraceStacks<'_, S> {
    fn symbolize(&mut self, key: StackKey) -> Result<Option<NamedStack>> {
        self.source.symbolize(key).map(Some)
    }

    fn origin(&mut self, born: AllocSite) -> Result<Option<Origin>> {
        let age_ms = |time_ns: u64| self.copied_ns.saturating_sub(time_ns) / 1_000_000;
        Ok(Some(Origin {
            oldest_age_ms: age_ms(born.first_ns),
            youngest_age_ms: age_ms(born.last_ns),
            stack_id: born.key.stack,
            stack: self.source.symbolize(born.key)?,
        }))
    }
}
