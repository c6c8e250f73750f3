//! Target of a tool that can trace the whole system: the processes that pass its filter, or a command that it starts.

use std::fmt;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;

use crate::bpf::kernel_support;
use crate::export::files::{ExportArgs, ProfileArgs};
use crate::parse::UsageError;
use crate::print::text;
use crate::process::command::{CommandLine, HeldCommand};
use crate::process::filter::{Filter, FilterArgs, TaskKind};
use crate::process::proc::Process;
use crate::process::traced_code::TracedCode;
use crate::run::poll::Poller;
use crate::run::privileges;
use crate::stacks::symbolize::Symbolizer;
use crate::stacks::unwind::{UnwindArgs, UnwindParts, UnwindTarget, Unwinder};

/// Options that choose it.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct TargetArgs {
    /// What is traced of the system, if there is no command.
    #[command(flatten)]
    pub filter: FilterArgs,

    /// Run COMMAND, and trace it and its descendants
    ///
    /// The exit status of the tool is that of COMMAND.
    #[arg(
        help_heading = "Target",
        short,
        long,
        value_name = "COMMAND",
        conflicts_with = "pid"
    )]
    pub command: Option<String>,

    /// With -p: also trace child processes
    ///
    /// The child processes of a command of -c are always traced.
    #[arg(help_heading = "Target", long)]
    pub children: bool,
}

/// Formats the target for messages, escaped.
impl fmt::Display for TargetArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.command {
            Some(command) => write!(f, "command {}", text::escape(command)),
            None => self.filter.fmt(f),
        }
    }
}

impl TargetArgs {
    /// Whether the options leave anything out.
    pub fn is_some(&self) -> bool {
        let FilterArgs { pid, name, cgroup } = &self.filter;
        self.command.is_some() || !pid.is_empty() || name.is_some() || cgroup.is_some()
    }
}

/// Target that the options choose, checked and held, before it is traced.
pub struct Target {
    filter: Filter,
    /// The processes that the options name.
    processes: Vec<Process>,
    /// Whether the processes that these start are traced, too.
    follows: bool,
    /// The command line and the held command, if one is traced.
    command: Option<(String, HeldCommand)>,
}

impl Target {
    /// Checks that the processes of the options exist, or starts the command, which is held until
    /// [`Target::release`]. From then on this process may do no more than tracing takes.
    ///
    /// # Errors
    /// If the options contradict each other (then the error is a [`UsageError`]), a process has exited or may not be
    /// traced, or the command cannot be started.
    pub fn resolve(args: &TargetArgs, tasks: TaskKind) -> Result<Self> {
        Self::choose_thread(args, None, tasks)
    }

    /// [`Target::resolve`] with a tool's `-t`, which wins over `-p`.
    ///
    /// # Errors
    /// If the options contradict each other (then the error is a [`UsageError`]), a process has exited or may not be
    /// traced, or the command cannot be started.
    pub fn choose_thread(args: &TargetArgs, tid: Option<u32>, tasks: TaskKind) -> Result<Self> {
        let mut filter_args = args.filter.clone();
        let line = args.command.as_deref();
        if args.children && line.is_none() && filter_args.pid.is_empty() {
            let message = "--children requires -p or -c";
            return Err(UsageError(message.into()).into());
        }
        if line.is_some() && tid.is_some() {
            let message = "--tid (-t) is of a thread that runs; what -c starts has none yet";
            return Err(UsageError(message.into()).into());
        }
        let command = line
            .map(|line| -> Result<_> { Ok((line.to_owned(), CommandLine::parse(line)?.start()?)) })
            .transpose()?;
        // Mounting tracefs takes a privilege that is dropped next. A tool that needs tracefs checks once more, and
        // reports what is missing.
        let _ = kernel_support::preflight_tracepoints();
        privileges::keep_tracing_and(&[])?;
        if let Some((_, command)) = &command {
            filter_args.pid = vec![command.pid()];
        }
        let mut filter = filter_args.resolve(tid, tasks)?;
        let processes = match tid {
            Some(tid) => vec![Process::of_thread(tid)?],
            None => {
                let named = filter_args.pid.iter().map(|&pid| Process::open(pid));
                named.collect::<Result<_>>()?
            }
        };
        let follows = command.is_some() || args.children;
        if follows {
            filter.follow()?;
        }
        Ok(Self {
            filter,
            processes,
            follows,
            command,
        })
    }

    /// Returns the filter that the BPF programs test.
    pub fn filter(&self) -> &Filter {
        &self.filter
    }

    /// Creates a symbolizer for what is traced, with the source lines that `profile` and the files of `export` need. Call
    /// this before the probes are live.
    ///
    /// # Errors
    /// If the kernel's log of mappings cannot be opened, a process has exited, or servers that are to be requested
    /// debug information cannot be asked.
    pub fn symbolizer(&self, profile: &ProfileArgs, export: &ExportArgs) -> Result<Symbolizer> {
        profile.with_source(Symbolizer::new(self.code()?), export)
    }

    fn code(&self) -> Result<TracedCode> {
        if self.processes.is_empty() {
            return TracedCode::of_all_processes();
        }
        let mut code = if self.follows {
            TracedCode::of_descendants()?
        } else {
            TracedCode::of_chosen()?
        };
        for process in &self.processes {
            // A held command is followed, too: it is still a copy of this process.
            code.follow(process)?;
        }
        Ok(code)
    }

    /// Returns the ids of the processes that the options name; of a command, the id of its process.
    pub fn pids(&self) -> Vec<u32> {
        self.processes.iter().map(Process::pid).collect()
    }

    /// Starts the unwinder for the stacks of what is traced. Call this before the probes are live.
    ///
    /// # Errors
    /// As [`Unwinder::start`].
    pub fn unwinder(&self, args: UnwindArgs, parts: UnwindParts<'_>) -> Result<Unwinder> {
        self.unwinder_and(args, parts, &[])
    }

    /// Starts the unwinder for the stacks of what is traced. It has tables from the start for `likely`, too, unless a
    /// command is traced.
    ///
    /// # Errors
    /// As [`Unwinder::start`].
    pub fn unwinder_and(
        &self,
        args: UnwindArgs,
        parts: UnwindParts<'_>,
        likely: &[u32],
    ) -> Result<Unwinder> {
        let whose = match &self.command {
            Some((line, command)) => UnwindTarget::Command {
                pid: command.pid(),
                line: line.clone(),
                descendants: false,
            },
            None => UnwindTarget::Processes([&self.pids(), likely].concat()),
        };
        Unwinder::start(args, parts, whose)
    }

    /// Wakes the poller when the last of the processes that the options name has exited, which ends the trace.
    pub fn watch_exit<'a>(&'a self, poller: &mut Poller<'a>) {
        for process in &self.processes {
            poller.watch_exit(process);
        }
    }

    /// Lets the command begin.
    ///
    /// # Errors
    /// If the command cannot be executed.
    pub fn release(&mut self) -> Result<()> {
        let command = self.command.as_mut();
        command.map_or(Ok(()), |(_, command)| command.release())
    }

    /// Ends the command if it still runs. Returns its exit status, or success.
    ///
    /// # Errors
    /// If the kernel does not let us wait for the command.
    pub fn finish(&mut self) -> Result<ExitCode> {
        let command = self.command.as_mut();
        let status = command.map(|(_, command)| command.finish()).transpose()?;
        Ok(status.flatten().map_or(ExitCode::SUCCESS, ExitCode::from))
    }
}

/// Prints a hint on stderr if an interval is also the id of a process, which was probably meant. `named` has the
/// processes that -p names.
pub fn warn_if_interval_is_pid(interval: Option<Duration>, named: &[u32]) {
    if let Some(pid) = interval.and_then(|interval| meant_pid(interval, named)) {
        let pids: Vec<String> = named.iter().chain([&pid]).map(u32::to_string).collect();
        crate::message!(
            "{pid} is used as the seconds between reports; to trace process {pid}: -p {}",
            pids.join(",")
        );
    }
}

/// Returns the process whose id is the number of seconds of an interval, if that process runs a program and is not
/// init. An interval of minutes is as likely as a process, unless -p names others.
fn meant_pid(interval: Duration, named: &[u32]) -> Option<u32> {
    const UNLIKELY: Duration = Duration::from_secs(300);
    let pid = u32::try_from(interval.as_secs()).ok()?;
    let is_whole = interval.subsec_nanos() == 0;
    let is_unlikely = !named.is_empty() || interval > UNLIKELY;
    let is_program = || Process::open(pid).and_then(|process| process.check_user_process());
    (is_unlikely && is_whole && pid > 1 && is_program().is_ok()).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_that_is_a_program_s_number_is_doubted() {
        let own = std::process::id();
        let seconds = |seconds| Duration::from_secs(seconds);
        assert_eq!(meant_pid(seconds(own.into()), &[1]), Some(own));
        assert_eq!(
            meant_pid(seconds(own.into()), &[]),
            Some(own).filter(|own| *own > 300)
        );
        assert_eq!(meant_pid(seconds(1), &[1]), None);
        let fraction = Duration::from_millis(1);
        assert_eq!(meant_pid(seconds(own.into()) + fraction, &[1]), None);
        assert_eq!(meant_pid(seconds(i32::MAX as u64), &[1]), None);
    }
}
