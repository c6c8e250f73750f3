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

use anyhow::Result;
use clap::Parser;

/// Parse the arguments, run the tool, and turn its outcome into an exit status.
pub fn main<A: Parser>(run: impl FnOnce(A) -> Result<ExitCode>) -> ExitCode {
    let args = A::parse();
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
