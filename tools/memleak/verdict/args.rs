//! The options of verdicts.

use std::path::PathBuf;
use std::time::Duration;

use crate::args::Args;
use crate::difference::FailOn;
use crate::heap::args::{ALLOCATORS, TRACING};
use memtools::parse::{self, UsageError};

/// Options of what finds out whether memory is lost.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Is it a leak?")]
pub(crate) struct VerdictArgs {
    /// Show which blocks of the process nothing refers to any more, whenever they were allocated, and what holds the
    /// rest; with SECONDS, trace for so long, and show by which stacks they were allocated since; with exit, trace the
    /// command of -c, and judge when it exits
    #[arg(long, value_name = "SECONDS|exit", num_args = 0..=1, require_equals = true, default_missing_value = "now",
          value_parser = moment, conflicts_with_all = TRACING, conflicts_with_all = ["heap", "types", "show_allocs"])]
    pub(crate) verdict: Option<Moment>,

    /// Also show what nobody uses of what is held: watch for so many seconds, the last ones before the verdict, which memory
    /// the process uses; what was not used is told page by page, and is first in the list
    #[arg(long, value_name = "SECONDS", value_parser = parse::seconds, requires = "verdict")]
    pub(crate) idle: Option<Duration>,

    /// Also show what holds the block at this address (0x...), or the blocks of this type, or of this size, or those that
    /// this function has allocated, if that was traced
    #[arg(long, value_name = "ADDRESS|TYPE|BYTES|FUNCTION", requires = "verdict")]
    pub(crate) why: Vec<String>,

    /// Also print the sums of Memcheck: definitely lost, indirectly lost, possibly lost, still reachable, suppressed
    #[arg(long, requires = "verdict")]
    pub(crate) memcheck: bool,

    /// Do not tell what the entries of this file have, which is one of valgrind's, but how much it is; wants stacks
    #[arg(long, value_name = "FILE", requires = "verdict")]
    pub(crate) suppressions: Vec<PathBuf>,
}

/// Time at which the verdict is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// Now, without a trace.
    Now,
    /// After allocations have been traced for this long.
    After(Duration),
    /// At the exit of the command, all of whose allocations are traced.
    Exit,
}

fn moment(text: &str) -> Result<Moment, String> {
    match text {
        "now" => Ok(Moment::Now),
        "exit" => Ok(Moment::Exit),
        _ => parse::seconds(text).map(Moment::After),
    }
}

impl VerdictArgs {
    /// Whether a verdict without a trace is asked for.
    ///
    /// # Errors
    /// If not exactly one process was named, or an option makes no sense with this verdict, or without one.
    pub(crate) fn wanted(&self, args: &Args) -> Result<bool, UsageError> {
        let refuse = |message: &str| Err(UsageError(message.into()));
        let is_one = args.pid.len() + usize::from(args.command.is_some()) == 1;
        match self.verdict {
            Some(Moment::Now) if args.pid.len() != 1 => {
                return refuse("--verdict is of one process: name it with -p PID");
            }
            Some(Moment::Now) if !self.suppressions.is_empty() => {
                return refuse(
                    "--suppressions wants the stacks of --verdict=SECONDS, or of --verdict=exit",
                );
            }
            Some(Moment::Now) if names_allocators(args) => {
                return refuse(&format!(
                    "--verdict without SECONDS traces nothing: leave out {}",
                    ALLOCATORS.map(option).join(", ")
                ));
            }
            Some(Moment::After(time)) if self.idle.is_some_and(|idle| idle > time) => {
                return refuse(
                    "--idle watches for the last part of --verdict=SECONDS, which has to be as long, or longer",
                );
            }
            Some(Moment::Exit) if self.idle.is_some() => {
                return refuse(
                    "--idle is of a process that runs: leave it out with --verdict=exit",
                );
            }
            Some(Moment::Exit) if args.command.is_none() => {
                return refuse(
                    "--verdict=exit is of a command that memleak starts: name it with -c COMMAND",
                );
            }
            Some(_) if !is_one => {
                return refuse("--verdict is of one process: name it with -p PID, or -c COMMAND");
            }
            _ => (),
        }
        match (args.difference.fail_on, &args.difference.diff) {
            (Some(FailOn::Unreachable), _) if self.verdict.is_none() => {
                refuse("--fail-on unreachable is of --verdict")
            }
            (Some(FailOn::Growth(_)), None) => {
                refuse("--fail-on 'growth>BYTES' is of --diff OLD.pb.gz")
            }
            _ => Ok(self.verdict == Some(Moment::Now)),
        }
    }
}

/// Returns the option of a field of [`Args`].
fn option(field: &str) -> String {
    format!("--{}", field.replace('_', "-"))
}

/// Whether options say which allocators to probe.
fn names_allocators(args: &Args) -> bool {
    args.obj.is_some() || !args.symbols_prefix.is_empty() || args.named().next().is_some()
}

/// Blocks that --why asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum WhyQuery {
    /// The block that an address is in.
    Address(u64),
    /// All blocks of a size.
    Size(u64),
    /// All blocks of a type, or those that a function of this name has allocated.
    Name(String),
}

impl WhyQuery {
    pub(super) fn parse(text: &str) -> Self {
        if let Some(Ok(address)) = text
            .strip_prefix("0x")
            .map(|hex| u64::from_str_radix(hex, 16))
        {
            return Self::Address(address);
        }
        parse::bytes(text).map_or_else(|_| Self::Name(text.to_owned()), Self::Size)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn a_verdict_is_of_one_process_and_its_moment() {
        let wanted = |args: &[&str]| {
            let args = Args::try_parse_from([&["memleak"], args].concat()).expect("valid");
            let moment = args.verdict.verdict;
            args.verdict
                .wanted(&args)
                .map(|now| (moment.expect("asked for"), now))
                .map_err(|error| error.0)
        };
        assert_eq!(wanted(&["-p", "1", "--verdict"]), Ok((Moment::Now, true)));
        let minute = Moment::After(Duration::from_secs(60));
        assert_eq!(wanted(&["-p", "1", "--verdict=60"]), Ok((minute, false)));
        let idle = ["-p", "1", "--verdict=60", "--idle", "60"];
        assert_eq!(wanted(&idle), Ok((minute, false)));
        let exit = ["-c", "true", "--verdict=exit", "--suppressions", "file"];
        assert_eq!(wanted(&exit), Ok((Moment::Exit, false)));
        for wrong in [
            &["--verdict=60"][..],
            &["-p", "1,2", "--verdict=60"],
            &["-p", "1", "--verdict=exit"],
            &["-p", "1", "--verdict", "-O", "c"],
            &["-p", "1", "--verdict", "--suppressions", "file"],
            &["-p", "1", "--verdict=60", "--idle", "60.1"],
            &["-c", "true", "--verdict=exit", "--idle", "60"],
        ] {
            assert!(wanted(wrong).is_err(), "{wrong:?}");
        }
        let error = wanted(&["-p", "1", "--verdict", "-S", "my_"]).expect_err("traces nothing");
        let options = "leave out --obj, --symbols-prefix, --alloc, --free";
        assert!(error.ends_with(options), "{error}");
        for wrong in ["--verdict=0", "--verdict=soon", "--verdict=-1"] {
            assert!(
                Args::try_parse_from(["memleak", "-p", "1", wrong]).is_err(),
                "{wrong}"
            );
        }
    }

    #[test]
    fn questions_are_of_addresses_sizes_or_types() {
        let of = WhyQuery::parse;
        assert_eq!(of("0x7f001000"), WhyQuery::Address(0x7f00_1000));
        assert_eq!(of("4008"), WhyQuery::Size(4008));
        assert_eq!(of("4K"), WhyQuery::Size(4096));
        assert_eq!(of("app::Session"), WhyQuery::Name("app::Session".into()));
        assert_eq!(of("0xyz"), WhyQuery::Name("0xyz".into()));
    }
}
