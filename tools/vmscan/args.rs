//! Command line of vmscan.

use std::time::Duration;

use clap::{ArgGroup, Parser};
use memtools::export::format::{self, FileFormat};
use memtools::parse;
use memtools::process::container::ContainerArgs;
use memtools::run::cli::CommonArgs;
use memtools::run::target::TargetArgs;

/// Show time and events of page reclaim per second, with histograms.
#[derive(Debug, Parser)]
#[command(
    name = "vmscan",
    version,
    mut_arg("container", |container| container.requires("of_tasks")),
    group(ArgGroup::new("of_tasks").args(["trace_compaction", "by_cgroup"])),
    mut_arg("export", |export| format::limited_to(export, &FileFormat::OF_SUMS)),
    after_help = "\
examples:
  vmscan                       one row per second until Ctrl-C, then the histograms
  vmscan -d 600                for ten minutes
  vmscan 10 6                  six rows, 10 seconds apart
  vmscan --by-shrinker         also list the caches that were shrunk, at the end
  vmscan --cgroup /sys/fs/cgroup/db.service
  vmscan --compaction -c 'make -j8'
                               reclaim and compaction of a command and its child
                               processes
  vmscan --trace-compaction
                               one line per compaction: task, duration and
                               result
  vmscan --trace-compaction -eK    with the state of the zone, and stacks
  vmscan --trace-compaction --container
                               with the container or systemd unit of each
  vmscan --counts -d 10
                               count all tracepoints of vmscan, compaction and
                               migrate"
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) target: TargetArgs,

    /// Add KSWAPDms, the time of kswapd
    #[arg(short, long, conflicts_with = "counts")]
    pub(crate) kswapd: bool,

    /// Add COMPACTms, the time of memory compaction
    ///
    /// A histogram is printed at the end.
    #[arg(long, conflicts_with = "counts")]
    pub(crate) compaction: bool,

    /// Print one line per compaction of a zone instead
    #[arg(long, conflicts_with_all = ["kswapd", "compaction", "by_shrinker", "by_cgroup", "counts", "header_every", "interval"])]
    pub(crate) trace_compaction: bool,

    /// With --trace-compaction: add the kernel stack
    #[arg(short = 'K', long, requires = "trace_compaction")]
    pub(crate) kernel_stacks: bool,

    /// With --trace-compaction: add the state of the zone
    ///
    /// The columns are fragmentation, watermarks and free pages before the compaction.
    #[arg(short, long, requires = "trace_compaction")]
    pub(crate) extended: bool,

    /// List shrinkers at the end
    ///
    /// Time, and freed objects, of each shrinker.
    #[arg(long, conflicts_with = "counts")]
    pub(crate) by_shrinker: bool,

    /// List cgroups that reclaimed at the end
    ///
    /// The cgroups (version 2) of the tasks, and the cgroups whose limit was reached.
    #[arg(long, conflicts_with = "counts")]
    pub(crate) by_cgroup: bool,

    /// Count tracepoints instead of rows
    ///
    /// All tracepoints of vmscan, compaction and migrate are counted, to the end or for each interval.
    #[arg(long)]
    pub(crate) counts: bool,

    /// Repeat the header after ROWS rows [default: 20 on a terminal]
    #[arg(hide_short_help = true, long, value_name = "ROWS", value_parser = parse::number::<u64>, conflicts_with_all = ["counts", "json"])]
    pub(crate) header_every: Option<u64>,

    #[command(flatten)]
    pub(crate) containers: ContainerArgs,

    #[command(flatten)]
    pub(crate) common: CommonArgs,

    /// Seconds between rows [default: 1]
    #[arg(value_parser = parse::seconds)]
    pub(crate) interval: Option<Duration>,

    /// Number of rows [default: until Ctrl-C]
    #[arg(value_parser = parse::count::<u64>)]
    pub(crate) count: Option<u64>,
}

#[cfg(test)]
mod tests {
    use memtools::run::cli;

    use super::*;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        Args::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn interval_and_count_are_positional() {
        let args = parse("vmscan -k 10 6").expect("valid");
        assert_eq!(
            (args.interval, args.count),
            (Some(Duration::from_secs(10)), Some(6))
        );
    }

    #[test]
    fn wrong_usage_is_refused() {
        cli::assert_refuses::<Args>(&[
            "0",
            "1 0",
            "1 2 3",
            "-d 0",
            "-p 0",
            "-p 1 -c true",
            "--counts --compaction",
            "--counts --by-shrinker",
            "--trace-compaction 1",
            "--trace-compaction --compaction",
            "-K",
            "-e",
            "--container",
            "--json --header-every 3",
            "--export f.svg",
        ]);
    }
}
