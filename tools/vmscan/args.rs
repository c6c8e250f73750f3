//! Command line of vmscan.

use std::time::Duration;

use clap::{ArgGroup, Parser};
use memtools::export::format::{self, FileFormat};
use memtools::parse::{self, UsageError};
use memtools::process::container::ContainerArgs;
use memtools::run::cli::CommonArgs;
use memtools::run::target::TargetArgs;

/// Rows between headers on a terminal, from which the first header scrolls away.
const TERMINAL_HEADER_EVERY: u64 = 20;

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

impl Args {
    /// Refuses metrics in modes that have no rows to sum up.
    pub(crate) fn check(&self) -> Result<(), UsageError> {
        let modes = [
            ("with --counts", self.counts),
            ("with --trace-compaction", self.trace_compaction),
        ];
        match modes.iter().find(|(_, chosen)| *chosen) {
            Some((mode, _)) => self.common.export.expect(mode, &[FileFormat::Perfetto]),
            None => Ok(()),
        }
    }

    /// Returns the number of rows between headers; None for only one header.
    pub(crate) fn rows_per_header(&self, terminal: bool) -> Option<u64> {
        let default = if terminal { TERMINAL_HEADER_EVERY } else { 0 };
        Some(self.header_every.unwrap_or(default)).filter(|&rows| rows > 0)
    }

    /// Whether rows show the state of the zone.
    pub(crate) fn wants_zone_state(&self) -> bool {
        self.extended || self.common.json
    }
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
    fn the_header_comes_again_on_a_terminal_or_when_asked_for() {
        let rows = |line, terminal| parse(line).expect("valid").rows_per_header(terminal);
        assert_eq!(rows("vmscan", true), Some(20));
        assert_eq!(rows("vmscan", false), None);
        assert_eq!(rows("vmscan --header-every 7", false), Some(7));
        assert_eq!(rows("vmscan --header-every 0", true), None);
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
        for (line, accepted) in [
            ("vmscan --export f.prom --export f.pftrace", true),
            ("vmscan --counts --export f.pftrace", true),
            ("vmscan --counts --export f.prom", false),
            ("vmscan --trace-compaction --export f.prom", false),
        ] {
            assert_eq!(parse(line).expect(line).check().is_ok(), accepted, "{line}");
        }
    }
}
