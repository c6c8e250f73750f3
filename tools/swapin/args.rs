//! The options of swapin.

use std::time::Duration;

use clap::Parser;
use memtools::export::format::{self, FileFormat};
use memtools::export::metrics::Family;
use memtools::parse;
use memtools::process::container::ContainerArgs;
use memtools::run::cli::CommonArgs;
use memtools::run::target::TargetArgs;

use crate::row::{HELD_UP, PAGES_IN, PAGES_OUT, PAGES_ZSWAP};

/// Count swap-ins by process.
#[derive(Debug, Parser)]
#[command(
    name = "swapin",
    version,
    mut_arg("export", |export| format::limited_to(export, &FileFormat::OF_SUMS)),
    after_help = "\
examples:
  swapin                       every second, swap-ins by process
  swapin 10 6                  for a minute, every ten seconds
  swapin -s                    with the delay of each process
  swapin --container
                               with the container or systemd unit of each
                               process
  swapin --zswap
                               also the number of compressed pages from
                               memory
  swapin -c 'make -j8'         a command and its child processes
  swapin --out                 also count pages that are written to swap"
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) target: TargetArgs,

    /// Omit the time of day
    #[arg(short = 'T', long)]
    pub(crate) notime: bool,

    /// Add the delay of each process, and a histogram at the end
    #[arg(short = 's', long)]
    pub(crate) latency: bool,

    /// Add the number of pages that came from zswap
    ///
    /// zswap keeps compressed pages in memory: no device was read.
    #[arg(long)]
    pub(crate) zswap: bool,

    /// Add pages that were written to swap
    ///
    /// Most are written by kswapd, for any process.
    #[arg(long)]
    pub(crate) out: bool,

    #[command(flatten)]
    pub(crate) containers: ContainerArgs,

    #[command(flatten)]
    pub(crate) common: CommonArgs,

    /// Seconds between reports
    #[arg(default_value = "1", value_parser = parse::seconds)]
    pub(crate) interval: Duration,

    /// Number of reports [default: until Ctrl-C]
    #[arg(value_parser = parse::count::<u64>)]
    pub(crate) count: Option<u64>,
}

impl Args {
    /// Returns the metric families that --export writes.
    pub(crate) fn families(&self) -> Vec<&'static Family> {
        let asked_for = [
            (true, &PAGES_IN),
            (self.zswap, &PAGES_ZSWAP),
            (self.out, &PAGES_OUT),
            (self.latency, &HELD_UP),
        ];
        let asked_for = asked_for.into_iter().filter(|(asked_for, _)| *asked_for);
        asked_for.map(|(_, family)| family).collect()
    }
}

#[cfg(test)]
mod tests {
    use memtools::run::cli;

    use super::*;

    #[test]
    fn wrong_usage_is_refused() {
        cli::assert_refuses::<Args>(&["0", "1 0", "-p 0"]);
    }

    #[test]
    fn the_interval_and_the_count_are_positional() {
        let args = Args::try_parse_from(["swapin"]).expect("valid");
        assert_eq!((args.interval, args.count), (Duration::from_secs(1), None));
        let args = Args::try_parse_from(["swapin", "-T", "0.5", "3"]).expect("valid");
        assert_eq!(
            (args.interval, args.count),
            (Duration::from_millis(500), Some(3))
        );
    }
}
