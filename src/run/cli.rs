//! Running a tool: arguments in, exit status out.
//!
//! | status | meaning |
//! |---|---|
//! | 0 | stopped by Ctrl-C or another signal, by its duration or count, or because the reader of its output left |
//! | 1 | it could not run; stderr has the reason and the remedy |
//! | 2 | wrong usage |
//! | 3 | memleak with `--fail-on`: more growth than that permits |
//! | any | with `-c COMMAND`, the command's own status |

use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::bpf::kretprobe;
use crate::export::perfetto::Tracks;
use crate::parse::{self, UsageError};
use crate::print::output::{Format, Output, ReaderStalled, StopSignals};
use crate::process::inherited;
use crate::run::complete;
use crate::run::poll::Poller;
use crate::stacks::source_lines;
use crate::stacks::table::MAX_DEPTH;

/// Parses the arguments, runs the tool, and turns its outcome into an exit status.
pub fn main<A: Parser>(run: impl FnOnce(A) -> Result<ExitCode>) -> ExitCode {
    complete::handle_request::<A>();
    if let Some(status) = source_lines::run_reader() {
        return status;
    }
    let args = match A::try_parse() {
        Ok(args) => args,
        Err(error) => return usage::<A>(&error),
    };
    inherited::save_and_override();
    set_mmap_threshold();
    let outcome = run(args);
    // A tool that could not be started has left its kretprobes.
    kretprobe::remove();
    match outcome {
        Ok(status) => status,
        Err(error) if is_reader_gone(&error) => ExitCode::SUCCESS,
        Err(error) => {
            if !is_unread(&error) || can_be_printed(io::stderr().as_fd()) {
                let message = in_plain_words(&format!("{error:#}"));
                eprintln!("{}: {message}", A::command().get_name());
            }
            if error.is::<UsageError>() {
                ExitCode::from(2)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

/// Removes from a message what Rust adds to the system's words.
fn in_plain_words(message: &str) -> String {
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

/// Prints what clap has to say: the help that was asked for, or what is wrong with the arguments.
fn usage<A: Parser>(said: &clap::Error) -> ExitCode {
    if !said.use_stderr() {
        // Without a reader, nobody misses it.
        let _ = said.print();
        return ExitCode::SUCCESS;
    }
    let message = said.render().to_string();
    let message = message.strip_prefix("error: ").unwrap_or(&message);
    eprint!("{}: {message}", A::command().get_name());
    ExitCode::from(2)
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
    /// Stop after this many seconds, which may have a fraction [default: at Ctrl-C]
    #[arg(short, short_alias = 'D', long, value_name = "SECONDS", value_parser = parse::seconds)]
    pub duration: Option<Duration>,

    /// Print one JSON object a line
    #[arg(short, long)]
    pub json: bool,

    /// Print into this file rather than on stdout
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Also write a timeline into this file, for ui.perfetto.dev
    #[arg(long, value_name = "FILE.pftrace")]
    pub perfetto: Option<PathBuf>,

    /// Tell on stderr how events are got at, with libbpf's messages
    #[arg(short, long)]
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

    /// Whether the output goes to a terminal.
    pub fn is_terminal(&self) -> bool {
        self.output.is_none() && io::stdout().is_terminal()
    }

    /// Begins a tool: calls [`start`], and creates the timeline, if one is asked for.
    ///
    /// # Errors
    /// If a file cannot be written to.
    pub fn start<'a>(&self, tool: &'static str) -> Result<(Poller<'a>, Output)> {
        self.start_as(tool, self.format())
    }

    /// [`CommonArgs::start`] with another format.
    ///
    /// # Errors
    /// If a file cannot be written to.
    pub fn start_as<'a>(&self, tool: &'static str, format: Format) -> Result<(Poller<'a>, Output)> {
        let (poller, output) = start(tool, format, self.output.as_deref())?;
        let output = match &self.perfetto {
            Some(path) => output.with_timeline(Tracks::create(path, tool)?),
            None => output,
        };
        Ok((poller, output))
    }
}

/// Takes over the signals that end a run, and opens the output, before anything is traced.
///
/// # Errors
/// If the file cannot be written to.
pub fn start<'a>(
    tool: &'static str,
    format: Format,
    file: Option<&Path>,
) -> Result<(Poller<'a>, Output)> {
    let mut poller = Poller::new()?;
    let arrived = SignalFd::with_flags(&inherited::stop_signals(), SfdFlags::SFD_CLOEXEC);
    let stop = StopSignals {
        arrived: arrived.context("failed to open a signalfd")?,
        taken: poller.stopped(),
    };
    let output = match file {
        Some(path) => Output::file(tool, format, path, stop)?,
        None => Output::stdout(tool, format, stop)?,
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

/// Checks the command line of a tool, in its unit tests: it is well defined, and refuses these lines as wrong usage,
/// with exit status 2. Words in a line are separated by spaces; the tool's name is left out.
///
/// # Panics
/// If the definition contradicts itself, or a line is accepted.
pub fn assert_refuses<A: Parser>(lines: &[&str]) {
    A::command().debug_assert();
    for line in lines {
        match A::try_parse_from(["tool"].into_iter().chain(line.split_whitespace())) {
            Ok(_) => panic!("accepted: {line}"),
            Err(error) => assert_eq!(error.exit_code(), 2, "{line}: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

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
