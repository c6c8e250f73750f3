//! The options of brkstack.

use clap::Parser;
use memtools::export::format::{self, FileFormat};
use memtools::parse::UsageError;
use memtools::print::output::Format;
use memtools::process::container::ContainerArgs;
use memtools::run::cli::CommonArgs;
use memtools::run::count_stacks::StackCountArgs;
use memtools::run::target::TargetArgs;

use crate::calls::StackParts;

/// Count brk(2) calls, which grow the heap, by user stack and process.
#[derive(Debug, Parser)]
#[command(
    name = "brkstack",
    version,
    mut_arg("container", |container| container.requires("events")),
    mut_arg("export", |export| format::limited_to(export, &FileFormat::ALL)),
    after_help = "\
examples:
  brkstack
                               count calls until Ctrl-C, and print their
                               stacks
  brkstack -d 10 --export brk.svg
                               write them as a flame graph
  brkstack --bytes -p 1234     heap growth of process 1234, in bytes
  brkstack 1                   a summary every second
  brkstack --events -n python  one line per call of tasks named python
  brkstack --events -U -p 1234 with its user stack below each line
  brkstack --events --container
                               with the container or systemd unit of each task
  brkstack --growth -c './prog -x'
                               only calls that grow the heap, from the start of the
                               program"
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) target: TargetArgs,

    /// Count only calls that grow the heap
    #[arg(long)]
    growth: bool,

    /// Count bytes of heap growth instead of calls
    #[arg(long)]
    pub(crate) bytes: bool,

    /// Print a line for each call instead of counts
    #[arg(long, conflicts_with_all = ["bytes", "folded", "text", "perpid", "annotations", "top", "interval", "interval_option", "offsets", "addresses"])]
    pub(crate) events: bool,

    /// Show user stacks: the default without -K or --events
    #[arg(short = 'U', long)]
    user_stacks: bool,

    /// Show kernel stacks
    #[arg(short = 'K', long)]
    pub(crate) kernel_stacks: bool,

    #[command(flatten)]
    pub(crate) containers: ContainerArgs,

    #[command(flatten)]
    pub(crate) stacks: StackCountArgs,

    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

impl Args {
    /// Refuses files that --events does not write: it counts nothing.
    pub(crate) fn check(&self) -> Result<(), UsageError> {
        if self.events {
            let export = &self.common.export;
            export.expect("with --events", &FileFormat::OF_SUMS)?;
        }
        Ok(())
    }

    /// Returns the output format.
    pub(crate) fn format(&self) -> Format {
        if self.events {
            self.common.format()
        } else {
            self.stacks
                .format(self.common.json, self.common.is_terminal())
        }
    }

    /// Whether user stacks are recorded.
    pub(crate) fn user_stacks(&self) -> bool {
        self.user_stacks || !self.kernel_stacks && !self.events
    }

    /// Returns the parts of the stack that are printed below each row of --events.
    pub(crate) fn event_stacks(&self) -> StackParts {
        StackParts {
            user: self.user_stacks,
            kernel: self.kernel_stacks,
        }
    }

    /// Whether only calls that grow the heap are counted, each with its bytes.
    pub(crate) fn growth_only(&self) -> bool {
        self.growth || self.bytes
    }

    /// Whether the result of a call is needed.
    pub(crate) fn with_result(&self) -> bool {
        self.growth_only() || self.events
    }

    /// Returns the programs on tracepoints in the order to attach them: a call whose entry was seen must be seen to
    /// exit. If those of one system call lack kernel stacks, programs on all system calls provide them.
    pub(crate) fn programs(&self, lack_kernel_stacks: bool) -> &'static [&'static str] {
        match (self.kernel_stacks && lack_kernel_stacks, self.with_result()) {
            (false, false) => &["brk_enter"],
            (false, true) => &["brk_exit", "brk_enter"],
            (true, false) => &["any_enter"],
            (true, true) => &["any_exit", "any_enter"],
        }
    }

    /// Returns the programs on the exit of threads: one, if calls are remembered until they return.
    pub(crate) fn programs_on_threads(&self) -> &'static [&'static str] {
        if self.with_result() {
            &["thread_exit"]
        } else {
            &[]
        }
    }

    /// Returns the programs to load where they are attached to the system call's function.
    pub(crate) fn programs_on_functions(&self) -> &'static [&'static str] {
        if self.with_result() {
            &["brk_exit_function", "brk_enter_function"]
        } else {
            &["brk_enter_function"]
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use memtools::run::cli;

    use super::*;
    use crate::bpf;

    #[test]
    fn wrong_usage_is_refused() {
        cli::assert_refuses::<Args>(&[
            "--events --bytes",
            "--events 1",
            "--events -i 1",
            "-i 1 2",
            "-s -f",
            "-p 1 -c true",
            "-f -j",
            "-f -T",
            "--container",
            "0",
        ]);
        for (file, accepted) in [("a.pftrace", true), ("a.prom", true), ("a.svg", false)] {
            let args = ["brkstack", "--events", "--export", file];
            let args = Args::try_parse_from(args).expect(file);
            assert_eq!(args.check().is_ok(), accepted, "{file}");
        }
        let args = Args::try_parse_from(["brkstack", "-UKaPp", "1,2", "0.5"]).expect("valid");
        assert!(args.kernel_stacks && args.target.filter.pid == [1, 2]);
        let args = Args::try_parse_from(["brkstack", "-UsPTi", "5", "-D", "10"]).expect("valid");
        assert_eq!(
            (args.stacks.interval(), args.common.duration),
            (Some(Duration::from_secs(5)), Some(Duration::from_secs(10)))
        );
        for (line, user, kernel) in [("", false, false), ("-U", true, false), ("-K", false, true)] {
            let args = ["brkstack", "--events", line];
            let args = args.iter().filter(|word| !word.is_empty());
            let args = Args::try_parse_from(args).expect("valid");
            assert_eq!((args.user_stacks(), args.kernel_stacks), (user, kernel));
        }
    }

    #[test]
    fn all_system_calls_are_traced_only_for_kernel_stacks_that_are_lacking() {
        for (line, lack, expected) in [
            ("-U", true, &["brk_enter"][..]),
            ("-K", false, &["brk_enter"]),
            ("-K", true, &["any_enter"]),
            ("-K --events", false, &["brk_exit", "brk_enter"]),
            ("-K --growth", true, &["any_exit", "any_enter"]),
        ] {
            let args = Args::try_parse_from(["brkstack"].into_iter().chain(line.split(' ')));
            assert_eq!(args.expect("valid").programs(lack), expected, "{line}");
        }
    }

    #[test]
    fn each_program_has_a_name_that_is_asked_for() {
        let mut asked_for = BTreeSet::new();
        for line in ["-U", "-K", "--growth", "-K --growth"] {
            let args = Args::try_parse_from(["brkstack"].into_iter().chain(line.split(' ')));
            let args = args.expect("valid");
            asked_for.extend([args.programs(true), args.programs_on_functions()].concat());
            asked_for.extend(args.programs_on_threads());
        }
        let asked_for: BTreeSet<String> = asked_for.into_iter().map(str::to_owned).collect();
        assert_eq!(asked_for, bpf::program_names());
    }
}
