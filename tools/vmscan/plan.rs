//! Plans: what vmscan is to do. [`Plan::of`] resolves the options once; other modules take the settings that they need.

use std::time::Duration;

use memtools::export::format::FileFormat;
use memtools::parse::UsageError;
use memtools::run::cli::CommonArgs;
use memtools::run::target::TargetArgs;

use crate::args::Args;
use crate::report::Columns;

/// Rows between headers on a terminal, from which the first header scrolls away.
const TERMINAL_HEADER_EVERY: u64 = 20;

/// What vmscan is to do, with the options that all modes have.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) target: TargetArgs,
    pub(crate) common: CommonArgs,
    /// Time between reports. None: the mode's default.
    pub(crate) interval: Option<Duration>,
    /// Number of reports. None: no limit.
    pub(crate) count: Option<u64>,
    pub(crate) mode: Mode,
}

/// What is traced, and how it is printed.
#[derive(Debug)]
pub(crate) enum Mode {
    /// Print the time of reclaim at each interval, and histograms and tables at the end.
    Reclaim(ReclaimPlan),
    /// Print each compaction of a zone.
    Compactions(CompactionPlan),
    /// Print the hits of each tracepoint.
    Counts,
}

/// Rows of reclaim.
#[derive(Debug)]
pub(crate) struct ReclaimPlan {
    pub(crate) columns: Columns,
    /// Rows after which the header is printed again. None: never.
    pub(crate) rows_per_header: Option<u64>,
    pub(crate) tables: Tables,
}

/// Tables at the end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tables {
    pub(crate) by_shrinker: bool,
    pub(crate) by_cgroup: bool,
    /// Whether the table of cgroups has the column CONTAINER.
    pub(crate) container: bool,
    /// Whether an empty line is between the last row and the histograms.
    pub(crate) spaced: bool,
}

/// Rows of compactions.
#[derive(Debug)]
pub(crate) struct CompactionPlan {
    pub(crate) kernel_stacks: bool,
    /// Whether the BPF side has to report the state of the zone.
    pub(crate) with_zone_state: bool,
    /// Whether text shows the state of the zone.
    pub(crate) extended: bool,
    /// Whether the BPF side has to report cgroups.
    pub(crate) with_cgroups: bool,
    /// Whether text has the column CONTAINER.
    pub(crate) container: bool,
}

impl Plan {
    /// Resolves the options of a command line.
    ///
    /// # Errors
    /// If --export has metrics in a mode without sums.
    pub(crate) fn of(args: Args) -> Result<Self, UsageError> {
        let json = args.common.json;
        let container = args.containers.container;
        let mode = if args.trace_compaction {
            args.common
                .export
                .expect("with --trace-compaction", &[FileFormat::Perfetto])?;
            Mode::Compactions(CompactionPlan {
                kernel_stacks: args.kernel_stacks,
                with_zone_state: args.extended || json,
                extended: args.extended,
                with_cgroups: args.containers.wanted(json),
                container,
            })
        } else if args.counts {
            args.common
                .export
                .expect("with --counts", &[FileFormat::Perfetto])?;
            Mode::Counts
        } else {
            Mode::Reclaim(ReclaimPlan {
                columns: Columns {
                    kswapd: args.kswapd,
                    compaction: args.compaction,
                },
                rows_per_header: rows_per_header(args.header_every, args.common.is_terminal()),
                tables: Tables {
                    by_shrinker: args.by_shrinker,
                    by_cgroup: args.by_cgroup,
                    container,
                    spaced: !json,
                },
            })
        };
        Ok(Self {
            interval: args.interval,
            count: args.count,
            target: args.target,
            common: args.common,
            mode,
        })
    }
}

/// Returns the number of rows between headers, from the value of --header-every. None: the header is printed once.
fn rows_per_header(value: Option<u64>, is_terminal: bool) -> Option<u64> {
    let default = if is_terminal {
        TERMINAL_HEADER_EVERY
    } else {
        0
    };
    Some(value.unwrap_or(default)).filter(|&rows| rows > 0)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn plan(line: &str) -> Result<Plan, UsageError> {
        Plan::of(Args::try_parse_from(line.split_whitespace()).expect(line))
    }

    #[test]
    fn the_header_is_repeated_on_a_terminal_or_by_option() {
        assert_eq!(rows_per_header(None, true), Some(20));
        assert_eq!(rows_per_header(None, false), None);
        assert_eq!(rows_per_header(Some(7), false), Some(7));
        assert_eq!(rows_per_header(Some(0), true), None);
    }

    #[test]
    fn metrics_need_sums() {
        for (line, accepted) in [
            ("vmscan --export f.prom --export f.pftrace", true),
            ("vmscan --counts --export f.pftrace", true),
            ("vmscan --counts --export f.prom", false),
            ("vmscan --trace-compaction --export f.prom", false),
        ] {
            assert_eq!(plan(line).is_ok(), accepted, "{line}");
        }
    }

    #[test]
    fn json_has_the_zone_and_the_cgroup_of_each_compaction() {
        for (line, whole) in [
            ("vmscan --trace-compaction", false),
            ("vmscan --trace-compaction --json", true),
            ("vmscan --trace-compaction -e --container", true),
        ] {
            let Mode::Compactions(plan) = plan(line).expect(line).mode else {
                panic!("{line}");
            };
            assert_eq!((plan.with_zone_state, plan.with_cgroups), (whole, whole));
        }
    }
}
