//! What a tool traces that can trace the whole system: what its filter lets through, or a command
//! that it starts.

use std::process::ExitCode;

use anyhow::Result;

use crate::command::{CommandLine, HeldCommand};
use crate::filter::{Filter, FilterArgs};
use crate::poll::Poller;
use crate::process::Process;
use crate::symbolize::Symbolizer;
use crate::unwind::{Parts, UnwindArgs, Unwinder, Whose};

/// Options that choose it.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct TargetArgs {
    /// Run this command and trace it and what it starts; its exit status becomes ours
    #[arg(short, long, value_name = "COMMAND", conflicts_with = "pid")]
    pub command: Option<String>,

    /// What is traced of the system, if there is no command.
    #[command(flatten)]
    pub filter: FilterArgs,
}

/// It, before it is traced.
pub struct Target {
    filter: Filter,
    /// The processes that were named.
    processes: Vec<Process>,
    /// With its line.
    command: Option<(String, HeldCommand)>,
}

impl Target {
    /// Checks that what the options name is there, or starts the command, held until
    /// [`Target::release`].
    pub fn choose(args: &TargetArgs) -> Result<Self> {
        let mut filter_args = args.filter.clone();
        let command = args.command.as_deref();
        let command = command
            .map(|line| -> Result<_> { Ok((line.to_owned(), CommandLine::parse(line)?.start()?)) })
            .transpose()?;
        if let Some((_, command)) = &command {
            filter_args.pid = vec![command.pid()];
        }
        let processes = filter_args.pid.iter().map(|&pid| Process::open(pid));
        let mut filter = filter_args.resolve(None)?;
        if command.is_some() {
            filter.follow()?;
        }
        Ok(Self {
            filter,
            processes: processes.collect::<Result<_>>()?,
            command,
        })
    }

    /// What the kernel half tests.
    pub fn filter(&self) -> &Filter {
        &self.filter
    }

    /// A symbolizer that knows what is traced. Make it before the probes are live.
    pub fn symbolizer(&self) -> Result<Symbolizer> {
        if self.processes.is_empty() {
            return Symbolizer::of_all_processes();
        }
        let mut symbolizer = if self.command.is_some() {
            Symbolizer::of_descendants()?
        } else {
            Symbolizer::new()?
        };
        for process in &self.processes {
            // Also a held command, which is still a copy of us.
            symbolizer.follow(process)?;
        }
        Ok(symbolizer)
    }

    /// What unwinds the stacks of what is traced. Make it before the probes are live.
    pub fn unwinder(&self, args: UnwindArgs, parts: Parts<'_>) -> Result<Unwinder> {
        let whose = match &self.command {
            Some((line, command)) => Whose::Command {
                pid: command.pid(),
                line: line.clone(),
            },
            None => Whose::Processes(self.processes.iter().map(Process::pid).collect()),
        };
        Unwinder::start(args, parts, whose)
    }

    /// Wakes the poller at the end of the process that is the only one named: that is the end of the
    /// trace.
    pub fn watch_exit<'a>(&'a self, poller: &mut Poller<'a>) {
        if let [process] = self.processes.as_slice() {
            poller.watch_exit(process);
        }
    }

    /// Lets the command begin.
    pub fn release(&mut self) -> Result<()> {
        let command = self.command.as_mut();
        command.map_or(Ok(()), |(_, command)| command.release())
    }

    /// Ends the command if it still runs. Returns its exit status, or success.
    pub fn finish(&mut self) -> Result<ExitCode> {
        let command = self.command.as_mut();
        let status = command.map(|(_, command)| command.finish()).transpose()?;
        Ok(status.flatten().map_or(ExitCode::SUCCESS, ExitCode::from))
    }
}
