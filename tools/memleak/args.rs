//! The command line.

use std::path::PathBuf;

use clap::{ArgGroup, Parser, ValueEnum};

/// Show memory that a process allocated and has not freed, by the call stack that allocated it.
#[derive(Debug, Parser)]
#[command(
    name = "memleak",
    version,
    max_term_width = 100,
    group = ArgGroup::new("target").required(true).args(["pid", "command"]),
    after_help = "\
examples:
  memleak -p 1234              report what process 1234 has not freed, every 5 seconds
  memleak -p 1234 10 3         three reports, 10 seconds apart
  memleak -ap 1234             list every outstanding block too
  memleak -c './prog -x' 1     start a command, and trace it from its first instruction
  memleak -p 1234 -s 20        record about every 20th allocation: less overhead
  memleak -p 1234 -o 60000     only what is older than a minute
  memleak -fp 1234 60 1 | flamegraph.pl --color=mem --countname=bytes >leak.svg"
)]
pub(crate) struct Args {
    /// Trace this process
    #[arg(short, long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) pid: Option<u32>,

    /// Run this command and trace it; its exit status becomes ours
    #[arg(short, long, value_name = "COMMAND")]
    pub(crate) command: Option<String>,

    /// Print a line for every allocation and free
    #[arg(short, long)]
    pub(crate) trace: bool,

    /// Also list the address and size of each outstanding block
    #[arg(short = 'a', long, conflicts_with = "combined_only")]
    pub(crate) show_allocs: bool,

    /// Leave out blocks younger than this many milliseconds [default: 500; 0 once the process has exited]
    #[arg(short, long, value_name = "MS", conflicts_with = "combined_only")]
    pub(crate) older: Option<u64>,

    /// Keep totals by stack in the kernel and report only these, whatever the blocks' age
    #[arg(short = 'C', long)]
    pub(crate) combined_only: bool,

    /// Record about one of N allocations, chosen at random
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) sample_rate: u32,

    /// Show this many stacks
    #[arg(short = 'T', long, value_name = "N", default_value_t = 10)]
    pub(crate) top: usize,

    /// Record only allocations of at least this many bytes
    #[arg(
        short = 'z',
        long,
        value_name = "BYTES",
        default_value_t = 0,
        hide_default_value = true
    )]
    pub(crate) min_size: u64,

    /// Record only allocations of at most this many bytes
    #[arg(short = 'Z', long, value_name = "BYTES", default_value_t = u64::MAX, hide_default_value = true)]
    pub(crate) max_size: u64,

    /// What to order the stacks by, the largest last
    #[arg(long, value_name = "KEY", value_enum, default_value_t = SortKey::Size)]
    pub(crate) sort: SortKey,

    /// Probe only the allocator in this file: a path, or a library's name such as `c` or `jemalloc`
    #[arg(short = 'O', long, value_name = "OBJECT")]
    pub(crate) obj: Option<PathBuf>,

    /// Prefix of the allocator's function names, such as `je_`
    #[arg(
        short = 'S',
        long,
        value_name = "PREFIX",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) symbols_prefix: String,

    /// Print one line a stack for flame graphs, weighted by bytes, once at the end
    #[arg(short, long, conflicts_with_all = ["json", "show_allocs", "trace"])]
    pub(crate) folded: bool,

    /// Print one JSON object a line
    #[arg(short, long)]
    pub(crate) json: bool,

    /// Tell on stderr what is probed and how, with libbpf's messages
    #[arg(short, long)]
    pub(crate) verbose: bool,

    /// Frames to keep of each stack
    #[arg(long, value_name = "N", default_value_t = memtools::stack::MAX_DEPTH, value_parser = clap::value_parser!(u32).range(1..=i64::from(memtools::stack::MAX_DEPTH)))]
    pub(crate) perf_max_stack_depth: u32,

    /// Distinct stacks to keep
    #[arg(long, value_name = "N", default_value_t = 16384, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) stack_storage_size: u32,

    /// Blocks to follow at once
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_allocs: u32,

    /// Probe each function at its entry, even where a probe a few instructions on costs less
    #[arg(long)]
    pub(crate) no_placement: bool,

    /// Seconds between reports
    #[arg(default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) interval: u64,

    /// Reports before it exits [default: until Ctrl-C]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
}

/// What stacks are ordered by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SortKey {
    /// Outstanding bytes
    Size,
    /// Outstanding allocations
    Count,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn short_flags_cluster_as_in_bcc() {
        let args = Args::try_parse_from(["memleak", "-ap", "12", "10"]).expect("valid");
        assert_eq!(
            (args.pid, args.show_allocs, args.interval, args.count),
            (Some(12), true, 10, None)
        );
    }

    #[test]
    fn wrong_usage_is_refused() {
        for wrong in [
            &["memleak"][..],
            &["memleak", "-p", "1", "-c", "true"],
            &["memleak", "-p", "1", "-s", "0"],
            &["memleak", "-p", "0"],
            &["memleak", "-p", "1", "5", "2", "3"],
            &["memleak", "-p", "1", "0"],
            &["memleak", "-p", "1", "--sort", "age"],
            &["memleak", "-p", "1", "--perf-max-stack-depth", "128"],
            &["memleak", "-p", "1", "-f", "-j"],
        ] {
            let error = Args::try_parse_from(wrong).expect_err(&wrong.join(" "));
            assert_eq!(error.exit_code(), 2);
        }
    }
}
