//! The options of verdicts.

use memtools::run::cli::{self, UsageError};

use crate::difference::{DifferenceArgs, FailOn};
use crate::heap::args::TRACING;

/// Options of what finds out whether memory is lost.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Without tracing: is it a leak?")]
pub(crate) struct VerdictArgs {
    /// Show which blocks of the process of -p nothing refers to any more, whenever they were allocated, and what holds
    /// the rest
    #[arg(long, requires = "pid", conflicts_with_all = TRACING, conflicts_with_all = ["heap", "types", "show_allocs"])]
    pub(crate) verdict: bool,

    /// Also show what holds the block at this address (0x...), or the blocks of this type, or of this size
    #[arg(long, value_name = "ADDRESS|TYPE|BYTES", requires = "verdict")]
    pub(crate) why: Vec<String>,
}

impl VerdictArgs {
    /// Whether nothing is to be traced.
    ///
    /// # Errors
    /// If not just one process was named, or an option has no meaning here or elsewhere.
    pub(crate) fn wanted(
        &self,
        pids: &[u32],
        difference: &DifferenceArgs,
    ) -> Result<bool, UsageError> {
        let refuse = |message: &str| Err(UsageError(message.into()));
        if self.verdict && pids.len() != 1 {
            return refuse("--verdict is of one process: name it with -p PID");
        }
        match (difference.fail_on, &difference.diff) {
            (Some(FailOn::Unreachable), _) if !self.verdict => {
                refuse("--fail-on unreachable is of --verdict")
            }
            (Some(FailOn::Growth(_)), None) => {
                refuse("--fail-on 'growth>BYTES' is of --diff OLD.pb.gz")
            }
            _ => Ok(self.verdict),
        }
    }
}

/// What --why asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Question {
    /// The block that an address is in.
    Address(u64),
    /// All blocks of a size.
    Size(u64),
    /// All blocks of a type.
    Type(String),
}

impl Question {
    pub(super) fn parse(text: &str) -> Self {
        if let Some(Ok(address)) = text
            .strip_prefix("0x")
            .map(|hex| u64::from_str_radix(hex, 16))
        {
            return Self::Address(address);
        }
        cli::bytes(text).map_or_else(|_| Self::Type(text.to_owned()), Self::Size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_are_of_addresses_sizes_or_types() {
        let of = Question::parse;
        assert_eq!(of("0x7f001000"), Question::Address(0x7f00_1000));
        assert_eq!(of("4008"), Question::Size(4008));
        assert_eq!(of("4K"), Question::Size(4096));
        assert_eq!(of("app::Session"), Question::Type("app::Session".into()));
        assert_eq!(of("0xyz"), Question::Type("0xyz".into()));
    }
}
