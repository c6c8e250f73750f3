//! The options of ffaults.

use std::time::Duration;

use clap::{Parser, ValueEnum};
use memtools::export::format::{self, FileFormat};
use memtools::export::metrics::Family;
use memtools::parse;
use memtools::process::container::ContainerArgs;
use memtools::run::cli::CommonArgs;
use memtools::run::target::TargetArgs;

use crate::report::{FAULTS, MAJOR};

/// Count page faults by file.
#[derive(Debug, Parser)]
#[command(
    name = "ffaults",
    version,
    mut_arg("container", |container| container.requires("by_process")),
    mut_arg("export", |export| format::limited_to(export, &FileFormat::OF_SUMS)),
    after_help = "\
examples:
  ffaults
                               count all page faults until Ctrl-C, and print
                               them by file
  ffaults 1                    a summary every second
  ffaults --path -p 1234       process 1234, with the path of each file
  ffaults --by-process -n java page faults by process and file
  ffaults --by-process --container
                               with the container or systemd unit of each
                               process
  ffaults --type -d 10         minor, major, write and execute faults separately
  ffaults -c './prog -x'       from the start of the program"
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) target: TargetArgs,

    /// Show the full path of each file
    ///
    /// The path is that of the process that faulted first.
    #[arg(long)]
    pub(crate) path: bool,

    /// Count by process and file
    #[arg(long)]
    pub(crate) by_process: bool,

    /// Add the numbers of minor, major, write and execute faults
    #[arg(long)]
    pub(crate) r#type: bool,

    /// Use only this hook, not the first that works
    #[arg(hide_short_help = true, long, value_name = "HOOK", value_enum)]
    pub(crate) hook: Option<Hook>,

    /// Show only the N files with the most faults
    #[arg(long, value_name = "N", value_parser = parse::count::<usize>)]
    pub(crate) top: Option<usize>,

    /// Print the time before each summary
    #[arg(short = 'T', long)]
    pub(crate) timestamp: bool,

    #[command(flatten)]
    pub(crate) containers: ContainerArgs,

    #[command(flatten)]
    pub(crate) common: CommonArgs,

    /// Seconds between summaries [default: one at the end]
    #[arg(value_parser = parse::seconds)]
    pub(crate) interval: Option<Duration>,

    /// Number of summaries [default: until Ctrl-C]
    #[arg(value_parser = parse::count::<u64>)]
    pub(crate) count: Option<u64>,
}

/// Where faults are seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Hook {
    // No help texts of their own here: they would make clap's help twice as long.
    Fexit,
    Kprobe,
    Event,
}

impl Args {
    /// Whether the cgroups of processes are recorded: without --by-process a row is for all processes.
    pub(crate) fn wants_cgroups(&self) -> bool {
        self.by_process && self.containers.wanted(self.common.wants_cgroups())
    }

    /// Returns the metric families that --export writes. Only the event without --type never knows major faults.
    pub(crate) fn families(&self) -> Vec<&'static Family> {
        if self.hook == Some(Hook::Event) && !self.r#type {
            vec![&FAULTS]
        } else {
            vec![&FAULTS, &MAJOR]
        }
    }
}

#[cfg(test)]
mod tests {
    use memtools::run::cli;

    use super::*;

    #[test]
    fn wrong_usage_is_refused() {
        cli::assert_refuses::<Args>(&["0", "1 0", "-p 0"]);
    }

    #[test]
    fn major_faults_are_a_family_if_a_hook_may_know_them() {
        for (line, families) in [
            ("ffaults", 2),
            ("ffaults --hook kprobe", 2),
            ("ffaults --hook event --type", 2),
            ("ffaults --hook event", 1),
        ] {
            let args = Args::try_parse_from(line.split(' ')).expect("valid");
            assert_eq!(args.families().len(), families, "{line}");
        }
    }
}
