//! Running a tool: arguments in, exit status out.
//!
//! | status | meaning |
//! |---|---|
//! | 0 | stopped by Ctrl-C, by its duration or count, or because the reader of its output left |
//! | 1 | it could not run; stderr has the reason and the remedy |
//! | 2 | wrong usage |
//! | any | with `-c COMMAND`, the command's own status |

use std::error::Error;
use std::fmt;
use std::io;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Parser;

use crate::output::Format;

/// Parse the arguments, run the tool, and turn its outcome into an exit status.
pub fn main<A: Parser>(run: impl FnOnce(A) -> Result<ExitCode>) -> ExitCode {
    let args = A::parse();
    give_memory_back();
    match run(args) {
        Ok(status) => status,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error:#}", A::command().get_name());
            if error.is::<UsageError>() {
                ExitCode::from(2)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

/// Has what is large go back to the kernel as soon as it is freed. glibc otherwise keeps up to twice
/// the largest that there was, which is the kernel's BTF or a compiler's unwind rules.
fn give_memory_back() {
    const LARGE: i32 = 128 << 10;
    // SAFETY: there is no other thread yet. If it is refused, more memory is kept.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE) };
}

/// Options of every tool.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct CommonArgs {
    /// Stop after this many seconds, which may have a fraction [default: at Ctrl-C]
    #[arg(short, long, value_name = "SECONDS", value_parser = seconds)]
    pub duration: Option<Duration>,

    /// Print one JSON object a line
    #[arg(short, long)]
    pub json: bool,

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
}

/// A number of seconds that is not 0, such as `10` or `0.5`.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().map_err(|_| "not a number of seconds")?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err("must be more than 0".into()),
    }
}

/// A number of bytes, such as `4096`, `512K` or `1G`, in powers of 1024.
pub fn bytes(text: &str) -> Result<u64, String> {
    let sizes = parse_size::Config::new().with_binary();
    sizes
        .parse_size(text)
        .map_err(|error| format!("not a number of bytes: {error}"))
}

/// Arguments that are wrong together; exit status 2.
#[derive(Debug)]
pub struct UsageError(pub String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for UsageError {}

/// Whether the reader of our output has gone, as `head` does when it has enough.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn seconds_may_have_a_fraction_but_not_be_none() {
        assert_eq!(seconds("10"), Ok(Duration::from_secs(10)));
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "NaN", "inf", "5s", "", "1e30"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn bytes_are_in_powers_of_1024() {
        assert_eq!(bytes("4093"), Ok(4093));
        assert_eq!((bytes("512K"), bytes("1G")), (Ok(512 << 10), Ok(1 << 30)));
        for wrong in ["", "-1", "K", "1X"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_broken_pipe_is_found_below_its_context() {
        let broken = Err::<(), _>(io::Error::from(io::ErrorKind::BrokenPipe));
        assert!(is_broken_pipe(
            &broken.context("failed to print").unwrap_err()
        ));
        let other = Err::<(), _>(io::Error::from(io::ErrorKind::NotFound));
        assert!(!is_broken_pipe(
            &other.context("failed to print").unwrap_err()
        ));
    }
}
