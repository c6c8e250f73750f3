//! What a tool traces that can trace the whole system: what its filter lets through, or a command
//! that it starts.

use std::process::ExitCode;

use anyhow::Result;

use crate::command::{CommandLine, HeldCommand};
use crate::filter::{Filter, FilterArgs};
use crate::process::Process;
use crate::symbolize::Symbolizer;

/// It, before it is traced.
pub struct Target {
    filter: Filter,
    /// The processes that were named.
    processes: Vec<Process>,
    command: Option<HeldCommand>,
}

impl Target {
    /// Checks that what the options name is there, or starts the command, held until
    /// [`Target::release`]. Only the command's own process is traced then.
    pub fn choose(args: &FilterArgs, command: Option<&str>) -> Result<Self> {
        let mut args = args.clone();
        let command = command
            .map(|line| CommandLine::parse(line)?.start())
            .transpose()?;
        if let Some(command) = &command {
            args.pid = vec![command.pid()];
        }
        let processes = args.pid.iter().map(|&pid| Process::open(pid));
        Ok(Self {
            filter: args.resolve(None)?,
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
        let mut symbolizer = Symbolizer::new()?;
        for process in &self.processes {
            // Also a held command, which is still a copy of us.
            symbolizer.follow(process)?;
        }
        Ok(symbolizer)
    }

    /// The process whose end is the end of the trace: the only one that is traced.
    pub fn process(&self) -> Option<&Process> {
        match self.processes.as_slice() {
            [process] => Some(process),
            _ => None,
        }
    }

    /// Lets the command begin.
    pub fn release(&mut self) -> Result<()> {
        self.command.as_mut().map_or(Ok(()), HeldCommand::release)
    }

    /// Ends the command if it still runs. Returns its exit status, or success.
    pub fn finish(&mut self) -> Result<ExitCode> {
        let status = self.command.as_mut().map(HeldCommand::finish).transpose()?;
        Ok(status.flatten().map_or(ExitCode::SUCCESS, ExitCode::from))
    }
}
