//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use clap_complete::engine::ArgValueCompleter;
use memtools::export::files::{ExportArgs, Exports};
use memtools::export::format::{self, FileFormat};
use memtools::export::perfetto::Heaps;
use memtools::parse::{self, UsageError};
use memtools::print::message;
use memtools::print::output::{Format, Output};
use memtools::process::complete;
use memtools::process::container::ContainerArgs;
use memtools::process::filter::{FilterArgs, cgroup_path};
use memtools::process::proc;
use memtools::run::cli;
use memtools::run::poll::Poller;
use memtools::run::skeleton::StackCapacity;
use memtools::run::target::TargetArgs;
use memtools::serve::address::ServeArgs;
use memtools::stacks::symbolize::SourceArgs;
use memtools::stacks::table;
use memtools::stacks::unwind::UnwindArgs;

use crate::difference::DifferenceArgs;
use crate::kernel::args::KernelArgs;
use crate::processes::pool::{AllocSpec, FreeSpec, FunctionSpec};
use crate::sums::View;
use crate::verdict::args::VerdictArgs;

/// Time between reports, unless INTERVAL says otherwise.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(5);

/// Age in milliseconds below which a block is omitted, unless --older says otherwise.
const DEFAULT_OLDER_MS: u64 = 500;

/// The part of --mem-limit that stacks may take: a quarter.
const STACKS_PART: u64 = 4;
/// Part of `--mem-limit` that is for clients of `--serve`.
const SERVED_PART: u64 = 8;

/// Bytes of memleak's own memory that a block takes while a report is made, as measured with four million blocks.
const REPORTED_BLOCK_BYTES: u64 = 72;
/// Bytes of memleak's own memory that a stack takes while a report is made: its sums, growth and ages, as measured with
/// 131,000 stacks.
const REPORTED_STACK_BYTES: u64 = 640;

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
    mut_arg("export", |export| format::limited_to(export, &FileFormat::OF_STACKS)),
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
    #[arg(hide_short_help = true, help_heading = EVENTS, long, value_name = "BYTES", value_parser = sampling_distance, conflicts_with_all = ["sample_rate", "combined_only", "mode", "churn", "peak", "trace"])]
    pub(crate) sample_bytes: Option<u32>,

    /// Limit the CPU time of tracing by sampling
    ///
    /// Blocks are sampled by size as needed, so that the BPF programs use at most PERCENT of the target's CPU time.
    #[arg(help_heading = EVENTS, long, value_name = "PERCENT", value_parser = percent, conflicts_with_all = ["sample_rate", "combined_only", "mode", "churn", "peak", "trace", "children", "name", "cgroup"])]
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

    /// The same as --mode churn
    #[arg(hide_short_help = true, help_heading = REPORT, long, conflicts_with_all = ["mode", "peak", "combined_only", "show_allocs", "older"])]
    churn: bool,

    /// The same as --mode peak
    #[arg(hide_short_help = true, help_heading = REPORT, long, conflicts_with_all = ["mode", "combined_only", "show_allocs", "older"])]
    peak: bool,

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
    /// Returns the maximum number of distinct stacks that are kept.
    pub(crate) fn max_stacks(&self) -> u32 {
        let bytes = table::ENTRY_BYTES + REPORTED_STACK_BYTES;
        let within_limit = (self.mem_limit / STACKS_PART / bytes).max(1);
        self.stack_storage_size
            .unwrap_or_else(|| within_limit.try_into().unwrap_or(u32::MAX))
    }

    /// Returns the initial capacity of the stack table.
    pub(crate) fn stack_capacity(&self) -> StackCapacity {
        let first = || self.max_stacks().min(table::first_entries());
        StackCapacity {
            first_entries: Some(self.stack_storage_size.unwrap_or_else(first)),
            depth: self.perf_max_stack_depth,
        }
    }

    /// Returns the bytes of memleak's own memory that a block takes: none if only totals are kept, in the kernel.
    pub(crate) fn reported_block_bytes(&self) -> u64 {
        if self.combined_only {
            0
        } else {
            REPORTED_BLOCK_BYTES
        }
    }

    /// Returns the bytes that --serve may send to all clients at once.
    pub(crate) fn served_bytes(&self) -> usize {
        let part = self.mem_limit / SERVED_PART;
        let bytes = self.serve.serve.as_ref().map_or(0, |_| part);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// Returns the bytes that following blocks may take, if --max-allocs does not limit the blocks.
    pub(crate) fn bytes_for_blocks(&self) -> u64 {
        self.mem_limit - self.mem_limit / STACKS_PART - self.served_bytes() as u64
    }

    /// Refuses --max-allocs if these blocks take more than --mem-limit of the kernel's memory.
    pub(crate) fn expect_room(&self, blocks: u32, bytes: u64) -> Result<(), UsageError> {
        if bytes > self.mem_limit {
            return Err(UsageError(format!(
                "{blocks} blocks take {bytes} bytes of memory: lower --max-allocs, or raise --mem-limit, which is {}",
                self.mem_limit
            )));
        }
        Ok(())
    }

    /// Resolves options that are shorthands of others. Refuses options that conflict, where that is more
    /// than a conflict of two.
    pub(crate) fn check(mut self) -> Result<Self, UsageError> {
        if self.churn {
            self.mode = Mode::Churn;
        } else if self.peak {
            self.mode = Mode::Peak;
        }
        if self.min_size > self.max_size {
            return Err(UsageError(format!(
                "--min-size (-z) {} is larger than --max-size (-Z) {}",
                self.min_size, self.max_size
            )));
        }
        let one_process = self.pid.len() <= 1 && !self.any_process();
        if self.mode == Mode::Peak && !(one_process && self.records_all()) {
            return Err(UsageError(
                "--peak (--mode peak) requires one process, with all blocks: use -p or -c alone"
                    .into(),
            ));
        }
        if self.kernel.by_cache {
            self.export
                .expect("with --by-cache", &[FileFormat::Perfetto])?;
        }
        self.verdict.moment = self.verdict.check(&self)?;
        Ok(self)
    }

    /// Returns the time between reports.
    pub(crate) fn interval(&self) -> Duration {
        self.interval.unwrap_or(DEFAULT_INTERVAL)
    }

    /// Returns the format in which rows are printed.
    pub(crate) fn format(&self) -> Format {
        match (self.json, self.folded) {
            (true, _) => Format::Json,
            (_, true) => Format::Folded,
            _ => Format::Text,
        }
    }

    /// Returns the kind of allocations that reports on processes are of.
    pub(crate) fn view(&self) -> View {
        match self.mode {
            Mode::Leak => View::Outstanding,
            Mode::Alloc => View::Allocated,
            Mode::Churn => View::Churned,
            Mode::Peak => View::Peak,
        }
    }

    /// Describes the target for messages.
    pub(crate) fn target(&self) -> String {
        let target = TargetArgs {
            command: self.command.clone(),
            children: self.children,
            filter: FilterArgs {
                pid: self.pid.clone(),
                name: self.name.clone(),
                cgroup: self.cgroup.clone(),
            },
        };
        target.to_string()
    }

    /// Prepares the files that reports are written into.
    ///
    /// # Errors
    /// If a file cannot be written to.
    pub(crate) fn exports(&self) -> Result<Exports> {
        let earlier = self.difference.diff.as_deref();
        let exports = self.export.prepare(earlier, self.target())?;
        Ok(match self.export.sole(FileFormat::Perfetto)? {
            Some(path) => exports.with(Heaps::create(path, message::tool())?),
            None => exports,
        })
    }

    /// Whether anything is made of reports that always has source lines, such as a profile.
    pub(crate) fn makes_profiles(&self) -> bool {
        self.export.has_profiles() || self.difference.diff.is_some() || self.serve.serve.is_some()
    }

    /// Starts the tool: see [`cli::start`].
    pub(crate) fn start<'a>(&self) -> Result<(Poller<'a>, Output)> {
        cli::start(self.format(), self.output.as_deref())
    }

    /// Whether processes are to be traced, rather than the kernel.
    pub(crate) fn chooses_processes(&self) -> bool {
        !self.pid.is_empty()
            || self.command.is_some()
            || self.name.is_some()
            || self.cgroup.is_some()
            || self.children
    }

    /// Whether every block is recorded.
    pub(crate) fn records_all(&self) -> bool {
        self.mode != Mode::Alloc
            && self.sample_rate == 1
            && self.sample_bytes.is_none()
            && self.max_overhead.is_none()
            && (self.min_size, self.max_size) == (0, u64::MAX)
    }

    /// Whether the traced processes are not known beforehand.
    pub(crate) fn any_process(&self) -> bool {
        self.children || self.name.is_some() || self.cgroup.is_some()
    }

    /// Returns the functions that --alloc and --free name.
    pub(crate) fn named(&self) -> impl Iterator<Item = &FunctionSpec> {
        let allocate = self.alloc.iter().map(|AllocSpec(named)| named);
        allocate.chain(self.free.iter().map(|FreeSpec(named)| named))
    }

    /// Returns the CLOCK_MONOTONIC time after which a block is too young for a report at `now_ns`. If `all` blocks are
    /// wanted, only --older leaves any out.
    pub(crate) fn born_before(&self, now_ns: u64, all: bool) -> u64 {
        let default = if all { 0 } else { DEFAULT_OLDER_MS };
        let older_ms = self.older.unwrap_or(default);
        now_ns.saturating_sub(older_ms.saturating_mul(1_000_000))
    }

    /// Whether reports need the ages of blocks.
    pub(crate) fn wants_ages(&self) -> bool {
        self.extended || self.json || self.sort == SortKey::Age
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
