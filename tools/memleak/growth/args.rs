//! The option of growth.

use std::time::Duration;

use memtools::parse::{self, UsageError};

use crate::heap::args::{ALLOCATORS, TRACING};

/// The option of what watches the heap of a process grow.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Is it a leak?")]
pub(crate) struct GrowthArgs {
    /// Look at the process of -p several times within so many seconds, with nothing traced, and show which types of blocks
    /// become ever more, by how much a second, and whether that is a leak, a cache without a limit, a warm-up, a burst, or
    /// fragmentation
    #[arg(long, value_name = "SECONDS", value_parser = parse::seconds, requires = "pid",
          conflicts_with_all = TRACING, conflicts_with_all = ALLOCATORS,
          conflicts_with_all = ["heap", "types", "verdict", "show_allocs"])]
    pub(crate) growth: Option<Duration>,
}

impl GrowthArgs {
    /// Returns for how long growth is to be watched, or None without --growth.
    ///
    /// # Errors
    /// If not exactly one process was named.
    pub(crate) fn wanted(&self, pids: &[u32]) -> Result<Option<Duration>, UsageError> {
        if self.growth.is_some() && pids.len() != 1 {
            return Err(UsageError(
                "--growth is of one process: name it with -p PID".into(),
            ));
        }
        Ok(self.growth)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::Args;

    #[test]
    fn growth_is_of_one_process_and_of_a_time() {
        let wanted = |args: &[&str]| {
            let args = Args::try_parse_from([&["memleak"], args].concat());
            args.map(|args| args.growth.wanted(&args.pid).map_err(|error| error.0))
        };
        let minute = Duration::from_secs(60);
        assert_eq!(
            wanted(&["-p", "1", "--growth", "60"]).expect("valid"),
            Ok(Some(minute))
        );
        assert_eq!(wanted(&["-p", "1,2"]).expect("valid"), Ok(None));
        assert!(
            wanted(&["-p", "1,2", "--growth", "60"])
                .expect("valid")
                .is_err()
        );
        for wrong in [
            &["--growth", "60"][..],
            &["-p", "1", "--growth", "0"],
            &["-p", "1", "--growth", "60", "--verdict"],
            &["-p", "1", "--growth", "60", "5"],
            &["-p", "1", "--growth", "60", "-O", "c"],
        ] {
            assert!(wanted(wrong).is_err(), "{wrong:?}");
        }
    }
}
