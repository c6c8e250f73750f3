//! The command line. [`plan`](crate::plan) resolves it.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use clap_complete::engine::ArgValueCompleter;
use memtools::export::files::ExportArgs;
use memtools::export::format::{self, FileFormat};
use memtools::parse;
use memtools::print::output::Format;
use memtools::process::complete;
use memtools::process::container::ContainerArgs;
use memtools::process::filter::cgroup_path;
use memtools::process::proc;
use memtools::run::cli;
use memtools::serve::address::ServeArgs;
use memtools::stacks::symbolize::SourceArgs;
use memtools::stacks::table;
use memtools::stacks::unwind::UnwindArgs;

use crate::difference::DifferenceArgs;
use crate::kernel::args::KernelArgs;
use crate::plan::known::GivenOptions;
use crate::processes::pool::{AllocSpec, FreeSpec};
use crate::verdict::args::VerdictArgs;

/// Headings of --help.
const TARGET: &str = "Target (default: the kernel)";
const EVENTS: &str = "Events";
const REPORT: &str = "Report";
const OUTPUT: &str = "Output";
const STACKS: &str = "Stacks";
const GENERAL: &str = "General";

/// Show memory that was allocated and not freed, by call stack.
#[derive(Debug, Parser)]
#[command(
    name = "memleak",
    version,
    mut_arg("container", |container| container.conflicts_with("folded")),
    mut_arg("export", |export| format::limited_to(export, &FileFormat::ALL)),
    after_help = "\
examples:
  memleak -p 1234              what process 1234 has not freed, every 5 seconds
  memleak -p 1234 10 3         three reports, 10 seconds apart
  memleak -ap 1234             with each outstanding block
  memleak -c './prog -x' 1
                               start a command, and trace it from its first
                               instruction
  memleak -p 1234 -s 20        record about every 20th allocation: less overhead
  memleak -p 1234 --max-overhead 5%
                               limited overhead, with estimates
  memleak -p 1234 --alloc 'server:pool_get(size=arg1)' --free server:pool_put
                               include a custom allocator
  memleak -p 1234 -o 60000     only blocks older than a minute
  memleak -p 1234 60 1 --export leak.svg --export leak.pb.gz
                               a flame graph and a pprof profile
  memleak -p 1234 --serve 6060
                               show it at http://127.0.0.1:6060/
  memleak -p 1234 --verdict 60 1
                               which blocks are unreachable, with stacks
  memleak -c ./test --verdict --fail-on unreachable
                               status 3 if the command, at its exit, has leaked
  memleak --container --cgroup db
                               with the container or unit of each process
  memleak
                               what the kernel itself has not freed, by kernel
                               stack
  memleak --by-cache -kp 1234  objects made for process 1234, by cache"
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) given: GivenOptions,

    /// Seconds between reports [default: 5]
    #[arg(value_parser = parse::seconds)]
    pub(crate) interval: Option<Duration>,

    /// Number of reports [default: until Ctrl-C]
    #[arg(value_parser = parse::count::<u64>)]
    pub(crate) count: Option<u64>,

    /// Trace these processes
    #[arg(help_heading = TARGET, short, long, value_name = "PID[,PID...]", value_delimiter = ',', value_parser = proc::parse_pid, add = ArgValueCompleter::new(complete::pids))]
    pub(crate) pid: Vec<u32>,

    /// Run COMMAND and trace it
    ///
    /// The exit status of memleak is that of COMMAND.
    #[arg(help_heading = TARGET, short, long, value_name = "COMMAND", conflicts_with = "pid")]
    pub(crate) command: Option<String>,

    /// Trace the processes whose name contains NAME
    #[arg(help_heading = TARGET, short, long, alias = "comm", value_name = "NAME", add = ArgValueCompleter::new(complete::names))]
    pub(crate) name: Option<String>,

    /// Trace this cgroup, systemd unit or container
    ///
    /// CGROUP is the path of a cgroup (version 2), the name of a systemd unit, or the ID of a container or pod. Cgroups
    /// below it are included.
    #[arg(help_heading = TARGET, long, value_name = "CGROUP", value_parser = cgroup_path, conflicts_with = "command", add = ArgValueCompleter::new(complete::cgroups))]
    pub(crate) cgroup: Option<PathBuf>,

    /// Also trace child processes
    #[arg(help_heading = TARGET, long)]
    pub(crate) children: bool,

    /// Ignore allocations smaller than BYTES
    #[arg(help_heading = EVENTS,
        short = 'z',
        long,
        value_name = "BYTES",
        default_value_t = 0,
        hide_default_value = true,
        value_parser = parse::bytes
    )]
    pub(crate) min_size: u64,

    /// Ignore allocations larger than BYTES
    #[arg(hide_short_help = true, help_heading = EVENTS, short = 'Z', long, value_name = "BYTES", default_value_t = u64::MAX, hide_default_value = true, value_parser = parse::bytes)]
    pub(crate) max_size: u64,

    /// Record one in N allocations [default: 1]
    #[arg(hide_default_value = true, help_heading = EVENTS, short, long, value_name = "N", default_value_t = 1, value_parser = parse::count::<u32>)]
    pub(crate) sample_rate: u32,

    /// Sample by size, and report estimates
    ///
    /// A block of S bytes is recorded with the probability S/BYTES.
    #[arg(hide_short_help = true, help_heading = EVENTS, long, value_name = "BYTES", value_parser = sampling_distance, conflicts_with_all = ["sample_rate", "combined_only", "mode", "trace"])]
    pub(crate) sample_bytes: Option<u32>,

    /// Limit the CPU time of tracing by sampling
    ///
    /// Blocks are sampled by size as needed, so that the BPF programs use at most PERCENT of the target's CPU time.
    #[arg(help_heading = EVENTS, long, value_name = "PERCENT", value_parser = percent, conflicts_with_all = ["sample_rate", "combined_only", "mode", "trace", "children", "name", "cgroup"])]
    pub(crate) max_overhead: Option<f64>,

    /// Trace only the allocator in this file
    ///
    /// OBJECT is a path, or the name of a library, such as `c` or `jemalloc`.
    #[arg(hide_short_help = true, help_heading = EVENTS, short = 'O', long, value_name = "OBJECT")]
    pub(crate) obj: Option<PathBuf>,

    /// Prefix of the allocator's functions, such as je_
    #[arg(hide_short_help = true, help_heading = EVENTS,
        short = 'S',
        long,
        value_name = "PREFIX",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) symbols_prefix: String,

    /// Also trace an allocation function of a custom allocator
    ///
    /// Examples are `server:pool_get(size=arg1)`, and for the arguments `size=arg3,count=arg2`; `old=arg1` if the
    /// function resizes; `ret=arg1` if it stores the block there.
    #[arg(hide_short_help = true, help_heading = EVENTS, long, value_name = "OBJECT:SYMBOL(size=argN,...)")]
    pub(crate) alloc: Vec<AllocSpec>,

    /// Also trace a deallocation function of a custom allocator
    ///
    /// An example is `server:pool_put(ptr=arg1)`.
    #[arg(hide_short_help = true, help_heading = EVENTS, long, value_name = "OBJECT:SYMBOL(ptr=argN)")]
    pub(crate) free: Vec<FreeSpec>,

    /// Also trace each small object of CPython (pymalloc)
    #[arg(hide_short_help = true, help_heading = EVENTS, long)]
    pub(crate) python_objects: bool,

    /// Probe each function at its entry
    ///
    /// By default, a probe is a few instructions further on if that costs less.
    #[arg(hide = true, help_heading = EVENTS, long)]
    pub(crate) no_placement: bool,

    /// Quantity: leak, alloc, churn or peak [default: leak]
    ///
    /// `leak`: outstanding blocks; `alloc`: all allocations since the last report, freed or not; `churn`: blocks that
    /// lived shorter than one interval; `peak`: blocks outstanding at peak usage.
    #[arg(hide_default_value = true, help_heading = REPORT, long, value_name = "MODE", value_enum, default_value_t = Mode::Leak, hide_possible_values = true, conflicts_with_all = ["combined_only", "show_allocs", "older"])]
    pub(crate) mode: Mode,

    /// Ignore blocks younger than MS milliseconds [default: 500]
    ///
    /// The default is 0 once the process has exited.
    #[arg(help_heading = REPORT, short, long, value_name = "MS", value_parser = parse::number::<u64>, conflicts_with = "combined_only")]
    pub(crate) older: Option<u64>,

    /// Add ages and growth of each stack
    ///
    /// Also show the stacks that freed unknown blocks.
    #[arg(help_heading = REPORT, short, long)]
    pub(crate) extended: bool,

    /// Also list each outstanding block
    #[arg(help_heading = REPORT, short = 'a', long, conflicts_with = "combined_only")]
    pub(crate) show_allocs: bool,

    /// Sort stacks by size, count, age, growth or rate
    ///
    /// The largest is last.
    #[arg(hide_short_help = true, hide_possible_values = true, help_heading = REPORT, long, value_name = "KEY", value_enum, default_value_t = SortKey::Size)]
    pub(crate) sort: SortKey,

    /// Number of stacks to show
    #[arg(help_heading = REPORT, short = 'T', long, value_name = "N", default_value_t = 10, value_parser = parse::count::<usize>)]
    pub(crate) top: usize,

    /// Keep only totals of each stack, in the kernel
    ///
    /// The ages of blocks are then unknown.
    #[arg(hide_short_help = true, help_heading = REPORT, short = 'C', long)]
    pub(crate) combined_only: bool,

    /// Also print each allocation and free
    #[arg(hide_short_help = true, help_heading = REPORT, short, long)]
    pub(crate) trace: bool,

    #[command(flatten)]
    pub(crate) verdict: VerdictArgs,

    #[command(flatten)]
    pub(crate) kernel: KernelArgs,

    /// Print folded stacks at the end, for flame graphs
    #[arg(help_heading = OUTPUT, short, long, conflicts_with_all = ["json", "show_allocs", "trace"])]
    pub(crate) folded: bool,

    #[command(flatten)]
    pub(crate) containers: ContainerArgs,

    #[command(flatten)]
    pub(crate) export: ExportArgs,

    #[command(flatten)]
    pub(crate) source: SourceArgs,

    #[command(flatten, next_help_heading = OUTPUT)]
    pub(crate) difference: DifferenceArgs,

    #[command(flatten, next_help_heading = OUTPUT)]
    pub(crate) serve: ServeArgs,

    /// Print one JSON object per line
    #[arg(help_heading = OUTPUT, short, long)]
    pub(crate) json: bool,

    /// Write to FILE instead of standard output
    #[arg(help_heading = OUTPUT, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) unwind: UnwindArgs,

    /// Maximum number of frames of a stack
    #[arg(hide = true, help_heading = STACKS, long, value_name = "N", default_value_t = table::MAX_DEPTH, value_parser = cli::stack_depth)]
    pub(crate) perf_max_stack_depth: u32,

    /// Maximum number of distinct stacks
    ///
    /// Memory for them is allocated at the start. [default: as many as a quarter of
    /// --mem-limit allows, on demand]
    #[arg(hide = true, help_heading = STACKS, long, value_name = "N", value_parser = parse::count::<u32>)]
    pub(crate) stack_storage_size: Option<u32>,

    /// Maximum number of blocks
    ///
    /// Memory for them is allocated at the start. [default: as many as --mem-limit allows]
    #[arg(hide = true, help_heading = STACKS, long, value_name = "N", value_parser = parse::count::<u32>)]
    pub(crate) max_allocs: Option<u32>,

    /// Maximum memory for blocks, stacks and reports
    #[arg(hide_short_help = true, help_heading = STACKS, long, value_name = "BYTES", default_value = "768M", value_parser = parse::bytes)]
    pub(crate) mem_limit: u64,

    /// Print on stderr how events are traced, and messages of libbpf
    #[arg(hide_short_help = true, help_heading = GENERAL, short, long)]
    pub(crate) verbose: bool,
}

impl Args {
    /// Returns the format in which rows are printed.
    pub(crate) fn format(&self) -> Format {
        match (self.json, self.folded) {
            (true, _) => Format::Json,
            (_, true) => Format::Folded,
            _ => Format::Text,
        }
    }
}

/// Parses a number of bytes from 1 to 4G - 1.
fn sampling_distance(text: &str) -> Result<u32, String> {
    match u32::try_from(parse::bytes(text)?) {
        Ok(bytes @ 1..) => Ok(bytes),
        _ => Err("must be from 1 byte to less than 4G".into()),
    }
}

/// Parses a percentage such as `5%` or `0.5`.
fn percent(text: &str) -> Result<f64, String> {
    match text.strip_suffix('%').unwrap_or(text).trim_end().parse() {
        Ok(percent) if percent > 0.0 && percent <= 100.0 => Ok(percent),
        _ => Err("must be above 0 % and at most 100 %, such as 5%".into()),
    }
}

/// What is added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// What is live
    Leak,
    /// What is allocated
    Alloc,
    /// What is freed soon
    Churn,
    /// What was live when most was
    Peak,
}

/// What stacks are ordered by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SortKey {
    /// Outstanding bytes
    Size,
    /// Outstanding allocations
    Count,
    /// Age of the oldest block
    Age,
    /// Growth in bytes since the last report
    Growth,
    /// Growth in bytes per second since the first report
    Rate,
}

/// Returns how many items of `each` bytes fit into `bytes`, at least one.
pub(crate) fn count_within(bytes: u64, each: u64) -> u32 {
    (bytes / each).max(1).try_into().unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
