//! The options of verdicts.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use crate::args::Args;
use crate::difference::FailOn;
use crate::heap::args::{ALLOCATORS, TRACING};
use memtools::parse::{self, UsageError};
use memtools::print::text;

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
    /// All blocks of these sizes, or only the unnamed ones.
    Sizes {
        sizes: RangeInclusive<u64>,
        unnamed: bool,
    },
    /// All blocks of a type, or those that a function of this name has allocated.
    Name(String),
}

impl WhyQuery {
    /// Parses a question: an address, a size or a name, as memleak prints them or as people write them.
    pub(super) fn parse(text: &str) -> Self {
        if let Some(Ok(address)) = text
            .strip_prefix("0x")
            .map(|hex| u64::from_str_radix(hex, 16))
        {
            return Self::Address(address);
        }
        if let Some(sizes) = printed_sizes(text) {
            return Self::Sizes {
                sizes,
                unnamed: true,
            };
        }
        parse::bytes(text).map_or_else(
            |_| Self::Name(text.to_owned()),
            |bytes| Self::Sizes {
                sizes: bytes..=bytes,
                unnamed: false,
            },
        )
    }
}

/// Parses the descriptions of unnamed blocks in all reports: `unnamed, 216 bytes each`, `[216]`, `blocks of 216 bytes`,
/// `blocks of 1025 to 2048 bytes`, `blocks of up to 32 bytes`, and `up to 2048`.
fn printed_sizes(text: &str) -> Option<RangeInclusive<u64>> {
    let number = |text: &str| text.replace(',', "").parse::<u64>().ok();
    let exactly = |text| number(text).map(|bytes| bytes..=bytes);
    let inside = |before: &str, behind: &str| text.strip_prefix(before)?.strip_suffix(behind);
    if let Some(size) = inside("unnamed, ", " bytes each").or_else(|| inside("[", "]")) {
        return exactly(size);
    }
    if let Some(limit) = text.strip_prefix("up to ") {
        let limit = number(limit)?;
        return Some(limit / 2 + 1..=limit);
    }
    let sizes = inside("blocks of ", " bytes")?;
    if let Some(limit) = sizes.strip_prefix("up to ") {
        return Some(0..=number(limit)?);
    }
    match sizes.split_once(" to ") {
        Some((first, last)) => Some(number(first)?..=number(last)?),
        None => exactly(sizes),
    }
}

/// Whether a question is about the type `name`, of which a block has `bytes` bytes: the name itself, as it is printed,
/// or with a size, as `Session [48]`.
pub(super) fn is_named(question: &str, name: &str, bytes: u64) -> bool {
    let is = |question: &str| {
        question == name || question == text::escape(name) || question == text::display_name(name)
    };
    let sized = question.strip_suffix(&format!(" [{bytes}]"));
    is(question) || sized.is_some_and(is)
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
        let sizes = |sizes, unnamed| WhyQuery::Sizes { sizes, unnamed };
        assert_eq!(of("4008"), sizes(4008..=4008, false));
        assert_eq!(of("4K"), sizes(4096..=4096, false));
        for (printed, expected) in [
            ("unnamed, 216 bytes each", 216..=216),
            ("[216]", 216..=216),
            ("blocks of 216 bytes", 216..=216),
            ("blocks of 1025 to 2048 bytes", 1025..=2048),
            ("blocks of up to 32 bytes", 0..=32),
            ("up to 2048", 1025..=2048),
        ] {
            assert_eq!(of(printed), sizes(expected, true), "{printed}");
        }
        assert_eq!(of("app::Session"), WhyQuery::Name("app::Session".into()));
        assert_eq!(of("0xyz"), WhyQuery::Name("0xyz".into()));
    }
    #[test]
    fn types_are_found_as_they_are_printed() {
        let name = format!("std::map<a\u{202e}, {}>", "x".repeat(10_000));
        for printed in [
            name.clone(),
            text::escape(&name).into_owned(),
            text::display_name(&name),
        ] {
            assert!(is_named(&printed, &name, 48), "{printed}");
            assert!(is_named(&format!("{printed} [48]"), &name, 48));
            assert!(!is_named(&format!("{printed} [48]"), &name, 64));
        }
    }
}
