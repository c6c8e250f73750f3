//! Options of verdicts.

use std::path::PathBuf;
use std::time::Duration;

use memtools::parse;
use memtools::verdict::CopyArgs;

/// Options of verdicts on traced processes.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Leak check")]
pub(crate) struct VerdictArgs {
    /// Show which traced blocks are unreachable, by stack
    ///
    /// The process of -p is checked at each INTERVAL, the command of -c at its exit. It also shows what references the
    /// other blocks.
    #[arg(long)]
    pub(crate) verdict: bool,

    /// Also show reachable blocks that are not accessed
    ///
    /// Accesses are monitored for SECONDS before each verdict. Pages that were not accessed are first in the list.
    #[arg(hide_short_help = true, long, value_name = "SECONDS", value_parser = parse::seconds, requires = "verdict")]
    pub(crate) idle: Option<Duration>,

    /// Also show what references a block
    ///
    /// Blocks are selected by address (0x...), type, size, or the function that allocated them.
    #[arg(
        hide_short_help = true,
        long,
        value_name = "ADDRESS|TYPE|BYTES|FUNCTION",
        requires = "verdict"
    )]
    pub(crate) why: Vec<String>,

    /// Ignore leaks that match this Valgrind suppression file
    ///
    /// Only the sum of these leaks is printed.
    #[arg(
        hide_short_help = true,
        long,
        value_name = "FILE",
        requires = "verdict"
    )]
    pub(crate) suppressions: Vec<PathBuf>,

    #[command(flatten)]
    pub(crate) copies: CopyArgs,
}
