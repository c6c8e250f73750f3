//! The command line, and the plan that it stands for.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use clap_complete::engine::ArgValueCompleter;
use memtools::parse;
use memtools::print::output::Format;
use memtools::process::complete;
use memtools::process::container::ContainerArgs;
use memtools::process::proc;
use memtools::verdict::{self, CopyArgs, Settings};

/// Number of rows of each table, by default.
const ON_SCREEN: usize = 6;
const IN_SECTION: usize = 20;

/// Headings of --help.
const TARGET: &str = "Target";
const REPORT: &str = "Report (default: one screen)";
const QUESTIONS: &str = "Questions";
const CHECK: &str = "Leak check";
const OUTPUT: &str = "Output";

/// Examine the heap of a running process, without tracing it.
#[derive(Debug, Parser)]
#[command(
    name = "heapscan",
    version,
    after_help = "\
examples:
  heapscan -p 1234                    one screen
  heapscan -p 1234 --growth 60        leak, unbounded cache or warm-up?
  heapscan -p 1234 --why Session      what references Session objects?
  heapscan -p 1234 --leaks --roots    both sections, from one pair of copies
  heapscan -p 1234 --layout --blocks  arenas, and each block
  heapscan -p 1234 --idle 60          reachable memory that is not accessed
  heapscan -p 1234 --fail-on unreachable
                                      in a test, before the server is stopped
  memleak -p 1234 --verdict 60 1      next step: the stacks that leak"
)]
pub(crate) struct Args {
    /// Process to examine
    #[arg(help_heading = TARGET, short, long, value_name = "PID", value_parser = proc::parse_pid, add = ArgValueCompleter::new(complete::pids))]
    pub(crate) pid: u32,

    /// Show where the memory is: arenas, size classes, free memory, other mappings
    #[arg(help_heading = REPORT, long)]
    layout: bool,

    /// Show unreachable blocks by type
    #[arg(help_heading = REPORT, long)]
    leaks: bool,

    /// Show reachable blocks by type, with the reference path from a root
    #[arg(help_heading = REPORT, long)]
    roots: bool,

    /// Show blocks by type: C++ classes, Python objects, strings, containers
    #[arg(help_heading = REPORT, long)]
    types: bool,

    /// List each block: address and size
    #[arg(help_heading = REPORT, long)]
    blocks: bool,

    /// Number of rows of each table [default: 6 on the screen, 20 in a section]
    #[arg(help_heading = REPORT, short = 'T', long, value_name = "N", value_parser = parse::count::<usize>)]
    top: Option<usize>,

    /// Show the reference paths to a block, by its address (0x...), or to blocks of a type or size
    #[arg(help_heading = QUESTIONS, long, value_name = "ADDRESS|TYPE|BYTES")]
    pub(crate) why: Vec<String>,

    /// Compare several copies within SECONDS: show which types of blocks grow, and how fast
    #[arg(help_heading = QUESTIONS, long, value_name = "SECONDS", value_parser = parse::seconds, conflicts_with_all = ["layout", "leaks", "roots", "types", "blocks", "why", "idle", "fail_on"])]
    growth: Option<Duration>,

    /// Show which reachable blocks are not accessed within SECONDS
    #[arg(help_heading = QUESTIONS, long, value_name = "SECONDS", value_parser = parse::seconds)]
    pub(crate) idle: Option<Duration>,

    /// Exit with status 3 if blocks are unreachable
    #[arg(help_heading = CHECK, long, value_name = "CONDITION", value_enum)]
    pub(crate) fail_on: Option<FailOn>,

    #[command(flatten, next_help_heading = CHECK)]
    pub(crate) copies: CopyArgs,

    #[command(flatten, next_help_heading = OUTPUT)]
    pub(crate) containers: ContainerArgs,

    /// Print one JSON object per line
    #[arg(help_heading = OUTPUT, short, long)]
    pub(crate) json: bool,

    /// Write to FILE instead of standard output
    #[arg(help_heading = OUTPUT, short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

/// Condition on which a test in CI fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FailOn {
    /// A block that nothing refers to
    Unreachable,
}

/// What is to be done.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Plan<'a> {
    /// One screen, from one pair of copies.
    Screen(ScreenSettings<'a>),
    /// Sections in full, from one copy.
    Sections(Sections, Settings<'a>),
    /// Sections in full with a verdict, from one pair of copies.
    Judged(Sections, Settings<'a>),
    /// Several copies within a period.
    Growth {
        period: Duration,
        top: usize,
        container: bool,
    },
}

/// Settings of the screen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScreenSettings<'a> {
    pub(crate) report: Settings<'a>,
    pub(crate) is_json: bool,
    /// Whether a heap on which no verdict is possible is an error.
    pub(crate) needs_verdict: bool,
}

/// Sections to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sections {
    pub(crate) layout: bool,
    pub(crate) blocks: bool,
    pub(crate) types: bool,
    pub(crate) verdict: verdict::Sections,
}

impl Args {
    /// Resolves the options.
    pub(crate) fn plan(&self) -> Plan<'_> {
        if let Some(period) = self.growth {
            return Plan::Growth {
                period,
                top: self.top.unwrap_or(IN_SECTION),
                container: self.containers.container,
            };
        }
        let asks = !self.why.is_empty() || self.fail_on.is_some() || self.idle.is_some();
        let is_section = [self.layout, self.leaks, self.roots, self.types, self.blocks];
        if !is_section.contains(&true) {
            return Plan::Screen(ScreenSettings {
                report: self.settings(ON_SCREEN),
                is_json: self.json,
                needs_verdict: asks,
            });
        }
        let sections = Sections {
            layout: self.layout,
            blocks: self.blocks,
            types: self.types,
            verdict: verdict::Sections {
                leaks: self.leaks,
                roots: self.roots || self.idle.is_some(),
            },
        };
        let settings = self.settings(IN_SECTION);
        if self.leaks || self.roots || asks {
            Plan::Judged(sections, settings)
        } else {
            Plan::Sections(sections, settings)
        }
    }

    /// Returns the settings of a report whose tables have `top` rows by default.
    fn settings(&self, top: usize) -> Settings<'_> {
        Settings {
            top: self.top.unwrap_or(top),
            why: &self.why,
            container: self.containers.container,
        }
    }

    /// Returns the format in which rows are printed.
    pub(crate) fn format(&self) -> Format {
        if self.json {
            Format::Json
        } else {
            Format::Text
        }
    }
}

#[cfg(test)]
mod tests {
    use memtools::run::cli;

    use super::*;

    fn parse(line: &str) -> Args {
        let words = ["heapscan", "-p", "1"].into_iter();
        Args::try_parse_from(words.chain(line.split_whitespace())).expect("valid")
    }

    #[test]
    fn options_are_a_plan() {
        let screen = |line| match parse(line).plan() {
            Plan::Screen(screen) => (screen.report.top, screen.needs_verdict),
            other => panic!("{line}: {other:?}"),
        };
        assert_eq!(screen(""), (6, false));
        assert_eq!(screen("--why 24 -T 9"), (9, true));
        match parse("--growth 60").plan() {
            Plan::Growth { period, top, .. } => assert_eq!((period.as_secs(), top), (60, 20)),
            other => panic!("{other:?}"),
        }
        let judged = |line| match parse(line).plan() {
            Plan::Sections(sections, _) => (false, sections.verdict.roots),
            Plan::Judged(sections, _) => (true, sections.verdict.roots),
            other => panic!("{line}: {other:?}"),
        };
        assert_eq!(judged("--layout --types --blocks"), (false, false));
        assert_eq!(judged("--leaks"), (true, false));
        assert_eq!(judged("--layout --idle 9"), (true, true));
        assert_eq!(judged("--types --why 24"), (true, false));
        assert_eq!(judged("--types --fail-on unreachable"), (true, false));
    }

    #[test]
    fn wrong_usage_is_refused() {
        cli::assert_refuses::<Args>(&[
            "",
            "-p 0",
            "-p 1,2",
            "-p 1 5",
            "-p 1 --growth 0",
            "-p 1 --growth 60 --leaks",
            "-p 1 --growth 60 --why 24",
            "-p 1 --idle 60 --pre-copy",
            "-p 1 --max-pause 0",
            "-p 1 --fail-on growth>1M",
            "-p 1 -k",
        ]);
    }
}
