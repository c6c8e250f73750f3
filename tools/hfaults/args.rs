//! The options of hfaults.

use std::time::Duration;

use clap::Parser;
use memtools::export::format::{self, FileFormat};
use memtools::parse;
use memtools::process::container::ContainerArgs;
use memtools::run::cli::CommonArgs;
use memtools::run::target::TargetArgs;

/// Count faults on huge pages, by process.
#[derive(Debug, Parser)]
#[command(
    name = "hfaults",
    version,
    mut_arg("export", |export| format::limited_to(export, &FileFormat::OF_SUMS)),
    after_help = "\
examples:
  hfaults
                               faults on reserved huge pages (hugetlbfs), until
                               Ctrl-C
  hfaults 1 10                 every second, ten times
  hfaults -e                   by page size and reason
  hfaults --thp -d 10          transparent huge pages: allocated, or not
  hfaults --container
                               with the container or systemd unit of each
                               process
  hfaults --madvise            who requests transparent huge pages by madvise(2)"
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) target: TargetArgs,

    /// Also group by page size and reason
    #[arg(short, long)]
    pub(crate) extended: bool,

    /// Count faults eligible for a transparent huge page
    #[arg(long, conflicts_with_all = ["extended", "madvise"])]
    pub(crate) thp: bool,

    /// Count calls of madvise(2) with MADV_HUGEPAGE
    #[arg(long, conflicts_with = "extended")]
    pub(crate) madvise: bool,

    /// Print the time before each report
    #[arg(short = 'T', long)]
    pub(crate) timestamp: bool,

    #[command(flatten)]
    pub(crate) containers: ContainerArgs,

    #[command(flatten)]
    pub(crate) common: CommonArgs,

    /// Seconds between reports [default: one at the end]
    #[arg(value_parser = parse::seconds)]
    pub(crate) interval: Option<Duration>,

    /// Number of reports [default: until Ctrl-C]
    #[arg(value_parser = parse::count::<u64>)]
    pub(crate) count: Option<u64>,
}

impl Args {
    /// Returns the name of the counts on a timeline.
    pub(crate) fn subject(&self) -> &'static str {
        match (self.thp, self.madvise) {
            (true, _) => "transparent huge pages",
            (_, true) => "madvise(2) for huge pages",
            _ => "huge page faults",
        }
    }

    pub(crate) fn traced_events(&self) -> &'static str {
        match (self.thp, self.madvise) {
            (true, _) => "transparent huge page faults",
            (_, true) => "madvise(MADV_HUGEPAGE)",
            _ => "huge page faults",
        }
    }
}

#[cfg(test)]
mod tests {
    use memtools::run::cli;

    use super::*;

    #[test]
    fn wrong_usage_is_refused() {
        cli::assert_refuses::<Args>(&["0", "1 0", "--thp --madvise", "--thp -e"]);
    }
}
