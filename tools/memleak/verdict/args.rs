//! Options of verdicts.

use std::path::PathBuf;
use std::time::Duration;

use memtools::parse::{self, UsageError};
use memtools::verdict::CopyArgs;

use crate::args::Args;
use crate::difference::FailOn;

/// Options that a verdict conflicts with: it is on one process, all of whose allocations are traced.
const CONFLICTS: [&str; 24] = [
    "children",
    "name",
    "cgroup",
    "min_size",
    "max_size",
    "sample_rate",
    "sample_bytes",
    "max_overhead",
    "mode",
    "churn",
    "peak",
    "older",
    "extended",
    "combined_only",
    "trace",
    "folded",
    "kernel",
    "slab",
    "pages",
    "percpu",
    "by_cache",
    "cache",
    "export",
    "serve",
];

/// Options of verdicts on traced processes.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Leak check")]
pub(crate) struct VerdictArgs {
    /// Show which traced blocks are unreachable, by stack
    ///
    /// The process of -p is checked at each INTERVAL, the command of -c at its exit. It also shows what references the
    /// other blocks.
    #[arg(long, conflicts_with_all = CONFLICTS, conflicts_with_all = ["diff", "show_allocs", "python_objects"])]
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

    /// Time of the verdict, which [`check`](Self::check) finds out. None without a verdict.
    #[arg(skip)]
    pub(crate) moment: Option<Moment>,
}

/// Time at which a verdict is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// At each interval, `count` times, or until the end of the trace.
    Every {
        interval: Duration,
        count: Option<u64>,
    },
    /// At the exit of the command.
    Exit,
}

impl VerdictArgs {
    /// Returns the time of the verdict. Returns None if no verdict is wanted.
    ///
    /// # Errors
    /// If not exactly one process was named, or an option has no effect with this verdict, or without one.
    pub(crate) fn check(&self, args: &Args) -> Result<Option<Moment>, UsageError> {
        let refuse = |message: String| Err(UsageError(message));
        match (args.difference.fail_on, &args.difference.diff) {
            (Some(FailOn::Unreachable), _) if !self.verdict => {
                return refuse("--fail-on unreachable requires --verdict".into());
            }
            (Some(FailOn::Growth(_)), None) => {
                return refuse("--fail-on 'growth>BYTES' requires --diff OLD.pb.gz".into());
            }
            _ => (),
        }
        if !self.verdict {
            // These options stand alone in heapscan, so that their definition requires nothing.
            let given = [
                ("--max-pause", self.copies.max_pause.is_some()),
                ("--pre-copy", self.copies.pre_copy),
            ];
            return match given.iter().find(|(_, given)| *given) {
                Some((option, _)) => refuse(format!("{option} requires --verdict")),
                None => Ok(None),
            };
        }
        match (&args.pid[..], &args.command, args.interval) {
            ([pid], None, None) => refuse(format!(
                "--verdict requires INTERVAL: memleak -p {pid} --verdict 60 1; without a trace: heapscan -p {pid}"
            )),
            ([_], None, Some(interval)) | ([], Some(_), Some(interval)) => {
                if self.idle.is_some_and(|idle| idle > interval) {
                    return refuse(
                        "--idle monitors the last part of INTERVAL: INTERVAL has to be as long, or longer".into(),
                    );
                }
                let count = args.count;
                Ok(Some(Moment::Every { interval, count }))
            }
            ([], Some(_), None) if self.idle.is_some() => {
                refuse("--idle requires INTERVAL: nothing runs at the exit of a command".into())
            }
            ([], Some(_), None) => Ok(Some(Moment::Exit)),
            _ => refuse("--verdict requires one process: use -p PID, or -c COMMAND".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn a_verdict_is_of_one_process_and_its_moment() {
        let moment = |args: &[&str]| {
            let args = Args::try_parse_from([&["memleak"], args].concat()).expect("valid");
            args.verdict.check(&args).map_err(|error| error.0)
        };
        let every = |count| {
            let interval = Duration::from_secs(60);
            Ok(Some(Moment::Every { interval, count }))
        };
        assert_eq!(moment(&["-p", "1"]), Ok(None));
        assert_eq!(moment(&["-p", "1", "--verdict", "60"]), every(None));
        assert_eq!(moment(&["-p", "1", "--verdict", "60", "1"]), every(Some(1)));
        assert_eq!(
            moment(&["-c", "true", "--verdict", "60", "1"]),
            every(Some(1))
        );
        let idle = ["-p", "1", "--verdict", "60", "1", "--idle", "60"];
        assert_eq!(moment(&idle), every(Some(1)));
        let exit = ["-c", "true", "--verdict", "--suppressions", "file"];
        assert_eq!(moment(&exit), Ok(Some(Moment::Exit)));
        for wrong in [
            &["--verdict", "60"][..],
            &["-p", "1,2", "--verdict", "60"],
            &["-p", "1", "--verdict", "60", "--idle", "60.1"],
            &["-c", "true", "--verdict", "--idle", "60"],
            &["-p", "1", "--max-pause", "20"],
            &["-k", "--max-pause", "20"],
            &["-k", "--pre-copy"],
            &["-p", "1", "--fail-on", "unreachable"],
            &["-p", "1", "--fail-on", "growth>1M"],
        ] {
            assert!(moment(wrong).is_err(), "{wrong:?}");
        }
        let untraced = moment(&["-p", "7", "--verdict"]).expect_err("nothing is traced");
        assert!(untraced.ends_with("heapscan -p 7"), "{untraced}");
    }

    #[test]
    fn a_verdict_is_of_all_blocks() {
        for wrong in [
            &["-p", "1", "--why", "24"][..],
            &["-p", "1", "--verdict", "60", "--idle", "60", "--pre-copy"],
            &["-p", "1", "--verdict", "60", "--mode", "alloc"],
            &["-p", "1", "--verdict=60"],
        ] {
            let wrong = [&["memleak"], wrong].concat();
            assert!(Args::try_parse_from(&wrong).is_err(), "{wrong:?}");
        }
    }
}
