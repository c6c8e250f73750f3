//! Running a tool: arguments in, exit status out.
//!
//! | status | meaning |
//! |---|---|
//! | 0 | stopped by Ctrl-C or another signal, by its duration or count, or because the reader of its output left |
//! | 1 | it could not run; stderr has the reason and the remedy |
//! | 2 | wrong usage |
//! | 3 | memleak and heapscan with `--fail-on`: there is what that forbids |
//! | any | with `-c COMMAND`, the command's own status |

use std::env;
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::iter;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::builder::Resettable;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Id, Parser};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::bpf::kretprobe;
use crate::export::files::ExportArgs;
use crate::export::format::FileFormat;
use crate::export::perfetto::Tracks;
use crate::parse::{self, UsageError};
use crate::print::message;
use crate::print::output::{Format, Output, ReaderStalled, StopSignals};
use crate::process::inherited;
use crate::run::poll::Poller;
use crate::run::{arch, complete, help};
use crate::stacks::source_lines;
use crate::stacks::table::MAX_DEPTH;

/// Option that another command has replaced, and the command, in which PID and VALUE are the words of the user.
pub type Moved = (&'static str, &'static str);

/// Options that --export has replaced.
const MOVED_TO_EXPORT: [Moved; 5] = [
    ("--flame", "--export FILE.svg"),
    ("--flame-base", "--diff OLD.pb.gz"),
    ("--pprof", "--export FILE.pb.gz"),
    ("--perfetto", "--export FILE.pftrace"),
    ("--metrics", "--export FILE.prom"),
];

/// Options that --interpreters has replaced.
const MOVED_TO_INTERPRETERS: [Moved; 2] = [
    ("--native-frames", "--interpreters all"),
    ("--python-lines", "--interpreters merged"),
];

/// Parses the arguments, runs the tool, and turns its outcome into an exit status.
pub fn main<A: Parser>(run: impl FnOnce(A) -> Result<ExitCode>) -> ExitCode {
    main_with(&[], run)
}

/// [`main`], of a tool some of whose options have moved.
pub fn main_with<A: Parser>(moved: &[Moved], run: impl FnOnce(A) -> Result<ExitCode>) -> ExitCode {
    complete::handle_request::<A>();
    if let Some(status) = source_lines::run_reader() {
        return status;
    }
    let line: Vec<_> = env::args_os().collect();
    let args = match parse_line(&line) {
        Ok(args) => args,
        Err(error) => {
            let mut moved = moved.to_vec();
            for option in A::command().get_arguments() {
                match option.get_id().as_str() {
                    "export" => moved.extend(MOVED_TO_EXPORT),
                    "interpreters" => moved.extend(MOVED_TO_INTERPRETERS),
                    _ => (),
                }
            }
            return usage(&error, &moved, &line);
        }
    };
    inherited::save_and_override();
    set_mmap_threshold();
    let outcome = arch::check_machine().and_then(|()| run(args));
    // A tool that could not be started has left its kretprobes.
    kretprobe::remove();
    match outcome {
        Ok(status) => status,
        Err(error) if is_reader_gone(&error) => ExitCode::SUCCESS,
        Err(error) => {
            if !is_unread(&error) || can_be_printed(io::stderr().as_fd()) {
                let message = in_plain_words(&format!("{error:#}"));
                crate::message!("{message}");
            }
            if error.is::<UsageError>() {
                ExitCode::from(2)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

/// Parses a command line, the program's name included, and names the tool in messages.
///
/// clap does not enforce that an option requires another one where the required option conflicts with a third that is
/// present. The second parse therefore ignores conflicts, all of which the first one reports.
fn parse_line<A: Parser>(line: &[OsString]) -> Result<A, clap::Error> {
    let mut command = help::command::<A>();
    message::set_tool(command.get_name());
    let mut matches = command.try_get_matches_from_mut(line)?;
    without_conflicts(A::command()).try_get_matches_from(line)?;
    A::from_arg_matches_mut(&mut matches).map_err(|error| error.format(&mut command))
}

/// Returns the command with no option in conflict with another one.
fn without_conflicts(command: clap::Command) -> clap::Command {
    let groups: Vec<Id> = command
        .get_groups()
        .map(|group| group.get_id().clone())
        .collect();
    let command =
        command.mut_args(|option| option.conflicts_with(Resettable::Reset).exclusive(false));
    groups.into_iter().fold(command, |command, group| {
        command.mut_group(group, |group| {
            group.conflicts_with(Resettable::Reset).multiple(true)
        })
    })
}

/// Strips the suffix "(os error N)" of Rust from a message.
pub fn in_plain_words(message: &str) -> String {
    let message = message.replace("failed to fill whole buffer", "it ends too early");
    let mut parts = message.split(" (os error ");
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        plain.push_str(
            part.trim_start_matches(|c: char| c.is_ascii_digit())
                .trim_start_matches(')'),
        );
    }
    plain
}

/// Prints the help or the usage error that clap returned.
fn usage(said: &clap::Error, moved: &[Moved], line: &[OsString]) -> ExitCode {
    if !said.use_stderr() {
        // Without a reader, the output is not needed.
        let _ = said.print();
        return ExitCode::SUCCESS;
    }
    if let Some(message) = new_command(moved, said, line) {
        crate::message!("{message}");
        return ExitCode::from(2);
    }
    let message = said.render().to_string();
    let message = message.strip_prefix("error: ").unwrap_or(&message);
    crate::message!("{}", message.trim_end());
    ExitCode::from(2)
}

/// Returns the message about an option that another command has replaced, if that is what is wrong with the line.
fn new_command(moved: &[Moved], error: &clap::Error, line: &[OsString]) -> Option<String> {
    let said = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    if !matches!(
        error.kind(),
        ErrorKind::UnknownArgument | ErrorKind::TooManyValues
    ) {
        return None;
    }
    // Such as "--verdict" or "--growth <SECONDS>".
    let option = said(ContextKind::InvalidArg)?.split([' ', '=']).next()?;
    let (_, command) = moved.iter().find(|(moved, _)| *moved == option)?;
    let is_number =
        |word: &&str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    let mut pids = line.windows(2).filter_map(|words| {
        let (option, value) = (words[0].to_str()?, words[1].to_str()?);
        let is_pid = option == "--pid" || option.starts_with('-') && option.ends_with('p');
        is_pid.then_some(value)
    });
    let pid = pids.find(is_number).unwrap_or("PID");
    let value = said(ContextKind::InvalidValue).filter(is_number);
    let command = command.replace("PID", pid);
    let command = command.replace("VALUE", value.unwrap_or("60"));
    Some(format!("{option} is now: {command}"))
}

/// Makes glibc return large blocks to the kernel as soon as they are freed. Otherwise glibc keeps up to twice the
/// largest block that there was, which is the kernel's BTF or a compiler's unwind rules.
fn set_mmap_threshold() {
    const LARGE: i32 = 128 << 10;
    // SAFETY: there is no other thread yet. If the call is refused, more memory is kept.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE) };
}

/// Options of every tool.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct CommonArgs {
    /// Stop after SECONDS [default: at Ctrl-C]
    ///
    /// SECONDS may have a fraction.
    #[arg(help_heading = "Report", short, short_alias = 'D', long, value_name = "SECONDS", value_parser = parse::seconds)]
    pub duration: Option<Duration>,

    /// Print one JSON object per line
    #[arg(help_heading = "Output", short, long)]
    pub json: bool,

    /// Write to FILE instead of standard output
    #[arg(help_heading = "Output", short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// The files of --export.
    #[command(flatten)]
    pub export: ExportArgs,

    /// Print on stderr how events are traced, and messages of libbpf
    #[arg(help_heading = "General", hide_short_help = true, short, long)]
    pub verbose: bool,
}

impl CommonArgs {
    /// When to stop, if the duration starts now.
    pub fn deadline(&self) -> Option<Instant> {
        Instant::now().checked_add(self.duration?)
    }

    /// How rows are printed.
    pub fn format(&self) -> Format {
        if self.json {
            Format::Json
        } else {
            Format::Text
        }
    }

    /// Whether the cgroups of tasks are needed, as in JSON and in labels of metrics.
    pub fn wants_cgroups(&self) -> bool {
        self.json || self.export.has_metrics()
    }

    /// Whether the output goes to a terminal.
    pub fn is_terminal(&self) -> bool {
        self.output.is_none() && io::stdout().is_terminal()
    }

    /// Opens the output, as [`start`] does, and creates the timeline file if requested.
    ///
    /// # Errors
    /// If a file cannot be written to.
    pub fn start<'a>(&self) -> Result<(Poller<'a>, Output)> {
        self.start_as(self.format())
    }

    /// [`CommonArgs::start`] with another format.
    ///
    /// # Errors
    /// If a file cannot be written to.
    pub fn start_as<'a>(&self, format: Format) -> Result<(Poller<'a>, Output)> {
        let (poller, output) = start(format, self.output.as_deref())?;
        let output = match self.export.sole(FileFormat::Perfetto)? {
            Some(path) => output.with_timeline(Tracks::create(path, message::tool())?),
            None => output,
        };
        Ok((poller, output))
    }
}

/// Takes over the signals that end a run, and opens the output, before anything is traced.
///
/// # Errors
/// If the file cannot be written to.
pub fn start<'a>(format: Format, file: Option<&Path>) -> Result<(Poller<'a>, Output)> {
    let mut poller = Poller::new()?;
    let arrived = SignalFd::with_flags(&inherited::stop_signals(), SfdFlags::SFD_CLOEXEC);
    let stop = StopSignals {
        arrived: arrived.context("failed to open a signalfd")?,
        taken: poller.stopped(),
    };
    let output = match file {
        Some(path) => Output::file(format, path, stop)?,
        None => Output::stdout(format, stop)?,
    };
    if output.is_stdout() {
        poller.watch_stdout();
    }
    if let Some(is_rotated) = output.rotation() {
        poller.rotate_at_hangup(is_rotated);
    }
    Ok((poller, output))
}

/// Parses the maximum number of frames of a stack.
///
/// # Errors
/// If the text is no such number, or out of bounds. The error is the text for the user.
pub fn stack_depth(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(depth @ 1..=MAX_DEPTH) => Ok(depth),
        _ => Err(format!("must be from 1 to {MAX_DEPTH}")),
    }
}

/// Whether the reader of our output is gone: `head` closes its input when it has enough. [`Output`] reports a closed
/// terminal as a broken pipe, too.
fn is_reader_gone(error: &anyhow::Error) -> bool {
    let mut causes = error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// Whether a reader that does not read has kept this process from ending.
fn is_unread(error: &anyhow::Error) -> bool {
    let mut causes = error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>()?.get_ref());
    causes.any(|cause| cause.is::<ReaderStalled>())
}

/// Whether a line can be printed here without waiting for a reader.
fn can_be_printed(file: BorrowedFd<'_>) -> bool {
    let mut room = [PollFd::new(file, PollFlags::POLLOUT)];
    matches!(poll(&mut room, PollTimeout::ZERO), Ok(1..))
}

/// Checks the command line of a tool, in its unit tests: it is well defined, has a help that fits on a screen, enforces
/// what options require, and refuses these lines as wrong usage, with exit status 2. Words in a line are separated by
/// spaces; the tool's name is omitted.
///
/// # Panics
/// If the definition contradicts itself, or a line is accepted.
pub fn assert_refuses<A: Parser>(lines: &[&str]) {
    A::command().debug_assert();
    help::assert_fits::<A>();
    for line in lines {
        match parse_words::<A>(&line.split_whitespace().collect::<Vec<_>>()) {
            Ok(_) => panic!("accepted: {line}"),
            Err(error) => assert_eq!(error.exit_code(), 2, "{line}: {error}"),
        }
    }
    assert_requirements::<A>();
}

fn parse_words<A: Parser>(words: &[&str]) -> Result<A, clap::Error> {
    let words = words.iter().map(OsString::from);
    parse_line(&iter::once("tool".into()).chain(words).collect::<Vec<_>>())
}

/// Checks that whatever one or two options are added to an option that requires others, the line is refused unless all
/// of these are in it.
fn assert_requirements<A: Parser>() {
    let command = A::command();
    let options: Vec<String> = command.get_arguments().filter_map(sample::<A>).collect();
    for option in &options {
        let Err(error) = parse_words::<A>(&[option]) else {
            continue;
        };
        let ErrorKind::MissingRequiredArgument = error.kind() else {
            continue;
        };
        let Some(ContextValue::Strings(required)) = error.get(ContextKind::InvalidArg) else {
            panic!("{option}: {error}");
        };
        let others: Vec<_> = options.iter().filter(|other| *other != option).collect();
        let pairs = others.iter().map(|other| vec![option.as_str(), other]);
        let triples = others.iter().enumerate().flat_map(|(i, second)| {
            let thirds = others[i + 1..].iter();
            thirds.map(|third| vec![option.as_str(), second, third])
        });
        for line in pairs.chain(triples) {
            let is_complete = required.iter().all(|entry| has_required(&line, entry));
            let is_accepted = parse_words::<A>(&line).is_ok();
            assert!(is_complete || !is_accepted, "{line:?} lacks {required:?}");
        }
    }
}

/// Whether a line has an option that is required: the one of this entry of clap's error, or one of several, such as
/// `<--a|--b <B>>`.
fn has_required(line: &[&str], entry: &str) -> bool {
    let given = line.iter().filter_map(|word| word.split('=').next());
    let mut names = entry.split(['|', '<', '>', ' ', '=', '[']);
    names.any(|name| name.starts_with("--") && given.clone().any(|word| word == name))
}

/// Returns an option as it can be in a command line, with a value that its parser accepts.
fn sample<A: Parser>(option: &clap::Arg) -> Option<String> {
    let long = format!("--{}", option.get_long()?);
    if !option.get_action().takes_values() {
        return Some(long);
    }
    let possible = option.get_possible_values();
    let possible = possible.iter().map(|value| value.get_name());
    let line = |value| format!("{long}={value}");
    let mut lines = possible.chain(["1", "85%", "root", "x"]).map(line);
    lines.find(|line| {
        let parsed = parse_words::<A>(&[line]);
        !parsed.is_err_and(|error| {
            matches!(
                error.kind(),
                ErrorKind::ValueValidation | ErrorKind::InvalidValue
            )
        })
    })
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn an_option_that_has_moved_is_named_with_its_command() {
        #[derive(Debug, Parser)]
        #[command(name = "memleak")]
        struct Args {
            #[arg(short, long)]
            pid: Option<u32>,
            #[arg(short, long)]
            json: bool,
            #[arg(long)]
            verdict: bool,
        }
        const MOVED: [Moved; 3] = [
            ("--heap", "heapscan -p PID --layout"),
            ("--growth", "heapscan -p PID --growth 60"),
            (
                "--verdict",
                "memleak -p PID --verdict VALUE 1, or at the exit of a command: memleak -c COMMAND --verdict",
            ),
        ];
        let message = |line: &str| {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let error = Args::try_parse_from(&words).expect_err("it has moved");
            new_command(&MOVED, &error, &words)
        };
        for (line, expected) in [
            (
                "memleak -jp 12 --heap",
                "--heap is now: heapscan -p 12 --layout",
            ),
            (
                "memleak --growth 60",
                "--growth is now: heapscan -p PID --growth 60",
            ),
            (
                "memleak --pid 7 --verdict=30",
                "--verdict is now: memleak -p 7 --verdict 30 1, or at the exit of a command: memleak -c COMMAND --verdict",
            ),
        ] {
            assert_eq!(message(line).as_deref(), Some(expected), "{line}");
        }
        assert_eq!(message("memleak --unknown"), None);
    }

    #[test]
    fn messages_are_the_system_s() {
        let error = anyhow::Error::from(io::Error::from_raw_os_error(libc::ENOENT));
        let error = error.context("failed to open x");
        assert_eq!(
            in_plain_words(&format!("{error:#}; see: y")),
            "failed to open x: No such file or directory; see: y"
        );
    }

    #[test]
    fn a_broken_pipe_is_found_below_its_context() {
        let is_gone = |error: io::Error| {
            let printed = Err::<(), _>(error).context("failed to print");
            is_reader_gone(&printed.unwrap_err())
        };
        assert!(is_gone(io::ErrorKind::BrokenPipe.into()));
        assert!(!is_gone(io::ErrorKind::NotFound.into()));
        let of_a_disk = io::Error::from_raw_os_error(libc::EIO);
        assert!(!is_gone(of_a_disk));
    }
}
