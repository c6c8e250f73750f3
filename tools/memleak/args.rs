//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use clap_complete::engine::ArgValueCompleter;
use memtools::export::files::{ExportArgs, Exports};
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
use memtools::stacks::table;
use memtools::stacks::unwind::UnwindArgs;

use crate::difference::DifferenceArgs;
use crate::kernel::args::KernelArgs;
use crate::processes::pool::{AllocSpec, FreeSpec, FunctionSpec};
use crate::sums::View;
use crate::verdict::args::VerdictArgs;

/// Time between reports, unless INTERVAL says otherwise.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(5);

/// Age in milliseconds below which a block is left out, unless --older says otherwise.
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
const WHOSE: &str = "Whose memory";
const RECORD: &str = "What to record";
const REPORT: &str = "What to report";
const PRINT: &str = "How to print it";
const ROOM: &str = "Stacks, and room for them";

/// Show memory that a process or the kernel allocated and has not freed, by call stack.
#[derive(Debug, Parser)]
#[command(
    name = "memleak",
    version,
    max_term_width = 100,
    mut_arg("container", |container| container.conflicts_with("folded")),
    after_help = "\
examples:
  memleak -p 1234              report what process 1234 has not freed, every 5 seconds
  memleak -p 1234 10 3         three reports, 10 seconds apart
  memleak -ap 1234             list every outstanding block too
  memleak -c './prog -x' 1     start a command, and trace it from its first instruction
  memleak -p 1234 -s 20        record about every 20th allocation: less overhead
  memleak -p 1234 --max-overhead 5%
                               record as many as that allows, and estimate the rest
  memleak -p 1234 --alloc 'server:pool_get(size=arg1)' --free server:pool_put
                               blocks of the program's own pool too
  memleak -p 1234 -o 60000     only what is older than a minute
  memleak -p 1234 60 1 --flame leak.svg --pprof leak.pb.gz
                               draw it, and keep it for `go tool pprof`
  memleak -p 1234 --serve 6060
                               show it at http://127.0.0.1:6060/, to `go tool pprof` as well
  memleak -p 1234 --verdict 60 1
                               which blocks nothing refers to after a minute, and their stacks
  memleak -c ./test --verdict --fail-on unreachable
                               status 3 if the command, at its exit, has leaked
  memleak --container --cgroup db
                               with the container or systemd unit of each process
  memleak                      what the kernel itself has not freed, by kernel stack
  memleak --by-cache -kp 1234  objects that it made for process 1234, by slab cache"
)]
pub(crate) struct Args {
    /// Seconds between reports [default: 5]
    #[arg(value_parser = parse::seconds)]
    pub(crate) interval: Option<Duration>,

    /// Reports before it exits [default: until Ctrl-C]
    #[arg(value_parser = parse::count::<u64>)]
    pub(crate) count: Option<u64>,

    /// Trace these processes
    #[arg(help_heading = WHOSE, short, long, value_name = "PID[,PID...]", value_delimiter = ',', value_parser = proc::parse_pid, add = ArgValueCompleter::new(complete::pids))]
    pub(crate) pid: Vec<u32>,

    /// Run this command and trace it; its exit status becomes ours
    #[arg(help_heading = WHOSE, short, long, value_name = "COMMAND", conflicts_with = "pid")]
    pub(crate) command: Option<String>,

    /// Trace the processes whose name (comm) contains this
    #[arg(help_heading = WHOSE, short, long, visible_alias = "comm", value_name = "NAME", add = ArgValueCompleter::new(complete::names))]
    pub(crate) name: Option<String>,

    /// Trace the processes in or below this cgroup (version 2): a path, a systemd unit, or the id of a container or pod
    #[arg(help_heading = WHOSE, long, value_name = "CGROUP", value_parser = cgroup_path, conflicts_with = "command", add = ArgValueCompleter::new(complete::cgroups))]
    pub(crate) cgroup: Option<PathBuf>,

    /// Also trace the processes that those of -p or -c start from now on
    #[arg(help_heading = WHOSE, long)]
    pub(crate) children: bool,

    /// Record only allocations of at least this many bytes
    #[arg(help_heading = RECORD,
        short = 'z',
        long,
        value_name = "BYTES",
        default_value_t = 0,
        hide_default_value = true,
        value_parser = parse::bytes
    )]
    pub(crate) min_size: u64,

    /// Record only allocations of at most this many bytes
    #[arg(help_heading = RECORD, short = 'Z', long, value_name = "BYTES", default_value_t = u64::MAX, hide_default_value = true, value_parser = parse::bytes)]
    pub(crate) max_size: u64,

    /// Record about one of N allocations, chosen at random
    #[arg(help_heading = RECORD, short, long, value_name = "N", default_value_t = 1, value_parser = parse::count::<u32>)]
    pub(crate) sample_rate: u32,

    /// Record a block of S bytes with the probability S/BYTES, and report estimates of all
    #[arg(help_heading = RECORD, long, value_name = "BYTES", value_parser = sampling_distance, conflicts_with_all = ["sample_rate", "combined_only", "mode", "churn", "peak", "trace"])]
    pub(crate) sample_bytes: Option<u32>,

    /// Sample ever more blocks by bytes until recording takes at most this part of the target's CPU time
    #[arg(help_heading = RECORD, long, value_name = "PERCENT", value_parser = percent, conflicts_with_all = ["sample_rate", "combined_only", "mode", "churn", "peak", "trace", "children", "name", "cgroup"])]
    pub(crate) max_overhead: Option<f64>,

    /// Probe only the allocator in this file: a path, or a library's name such as `c` or `jemalloc`
    #[arg(help_heading = RECORD, short = 'O', long, value_name = "OBJECT")]
    pub(crate) obj: Option<PathBuf>,

    /// Prefix of the allocator's function names, such as `je_`
    #[arg(help_heading = RECORD,
        short = 'S',
        long,
        value_name = "PREFIX",
        default_value = "",
        hide_default_value = true
    )]
    pub(crate) symbols_prefix: String,

    /// Also probe this function of a pool of the program's own, as `server:pool_get(size=arg1)`; or
    /// `size=arg3,count=arg2`; `old=arg1` if it resizes; `ret=arg1` if it stores the block there
    #[arg(help_heading = RECORD, long, value_name = "OBJECT:SYMBOL(size=argN,...)")]
    pub(crate) alloc: Vec<AllocSpec>,

    /// Also probe this function that takes a block back, as `server:pool_put(ptr=arg1)`
    #[arg(help_heading = RECORD, long, value_name = "OBJECT:SYMBOL(ptr=argN)")]
    pub(crate) free: Vec<FreeSpec>,

    /// Also probe CPython's allocator of small objects (pymalloc), so that each object is a block
    #[arg(help_heading = RECORD, long)]
    pub(crate) python_objects: bool,

    /// Probe each function at its entry, even where a probe a few instructions on costs less
    #[arg(help_heading = RECORD, long)]
    pub(crate) no_placement: bool,

    /// What to report: `leak` is what is outstanding; `alloc` what was allocated since the last
    /// report, freed or not; `churn` what was freed and had lived for less than an interval; `peak`
    /// what was outstanding when it was most
    #[arg(help_heading = REPORT, long, value_name = "MODE", value_enum, default_value_t = Mode::Leak, hide_possible_values = true, conflicts_with_all = ["combined_only", "show_allocs", "older"])]
    pub(crate) mode: Mode,

    /// The same as --mode churn
    #[arg(help_heading = REPORT, long, conflicts_with_all = ["mode", "peak", "combined_only", "show_allocs", "older"])]
    churn: bool,

    /// The same as --mode peak
    #[arg(help_heading = REPORT, long, conflicts_with_all = ["mode", "combined_only", "show_allocs", "older"])]
    peak: bool,

    /// Leave out blocks younger than this many milliseconds [default: 500; 0 once the process has exited]
    #[arg(help_heading = REPORT, short, long, value_name = "MS", value_parser = parse::number::<u64>, conflicts_with = "combined_only")]
    pub(crate) older: Option<u64>,

    /// Also show how old the blocks of each stack are, how they grow, and who freed unknown ones
    #[arg(help_heading = REPORT, short, long)]
    pub(crate) extended: bool,

    /// Also list the address and size of each outstanding block
    #[arg(help_heading = REPORT, short = 'a', long, conflicts_with = "combined_only")]
    pub(crate) show_allocs: bool,

    /// What to order the stacks by, the largest last
    #[arg(help_heading = REPORT, long, value_name = "KEY", value_enum, default_value_t = SortKey::Size)]
    pub(crate) sort: SortKey,

    /// Show this many stacks
    #[arg(help_heading = REPORT, short = 'T', long, value_name = "N", default_value_t = 10, value_parser = parse::count::<usize>)]
    pub(crate) top: usize,

    /// Keep totals by stack in the kernel and report only these, whatever the blocks' age
    #[arg(help_heading = REPORT, short = 'C', long)]
    pub(crate) combined_only: bool,

    /// Print a line for every allocation and free
    #[arg(help_heading = REPORT, short, long)]
    pub(crate) trace: bool,

    /// Print one line a stack for flame graphs, weighted by bytes, once at the end
    #[arg(help_heading = PRINT, short, long, conflicts_with_all = ["json", "show_allocs", "trace"])]
    pub(crate) folded: bool,

    #[command(flatten, next_help_heading = PRINT)]
    pub(crate) containers: ContainerArgs,

    #[command(flatten, next_help_heading = PRINT)]
    pub(crate) export: ExportArgs,

    /// Also add each report to a timeline of heap profiles in this file, for ui.perfetto.dev
    #[arg(help_heading = PRINT, long, value_name = "FILE.pftrace")]
    pub(crate) perfetto: Option<PathBuf>,

    #[command(flatten, next_help_heading = PRINT)]
    pub(crate) difference: DifferenceArgs,

    #[command(flatten, next_help_heading = PRINT)]
    pub(crate) serve: ServeArgs,

    /// Print one JSON object a line
    #[arg(help_heading = PRINT, short, long)]
    pub(crate) json: bool,

    /// Print into this file rather than on stdout
    #[arg(help_heading = PRINT, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,

    /// Tell on stderr what is probed and how, with libbpf's messages
    #[arg(help_heading = PRINT, short, long)]
    pub(crate) verbose: bool,

    #[command(flatten, next_help_heading = ROOM)]
    pub(crate) unwind: UnwindArgs,

    /// Frames to keep of each stack
    #[arg(help_heading = ROOM, long, value_name = "N", default_value_t = table::MAX_DEPTH, value_parser = cli::stack_depth)]
    pub(crate) perf_max_stack_depth: u32,

    /// Distinct stacks to keep at most, with memory for them set aside [default: as many as a quarter
    /// of --mem-limit allows, with memory as they come]
    #[arg(help_heading = ROOM, long, value_name = "N", value_parser = parse::count::<u32>)]
    pub(crate) stack_storage_size: Option<u32>,

    /// Blocks to follow at once, with memory for them set aside [default: as many as --mem-limit allows]
    #[arg(help_heading = ROOM, long, value_name = "N", value_parser = parse::count::<u32>)]
    pub(crate) max_allocs: Option<u32>,

    /// Memory that following blocks, and their stacks, may take, of the kernel and for reports of ours
    #[arg(help_heading = ROOM, long, value_name = "BYTES", default_value = "768M", value_parser = parse::bytes)]
    pub(crate) mem_limit: u64,

    #[command(flatten)]
    pub(crate) verdict: VerdictArgs,

    #[command(flatten)]
    pub(crate) kernel: KernelArgs,
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

    /// Refuses --max-allocs if so many blocks take more than --mem-limit of the kernel's memory.
    pub(crate) fn expect_room(&self, blocks: u32, bytes: u64) -> Result<(), UsageError> {
        if bytes > self.mem_limit {
            return Err(UsageError(format!(
                "{blocks} blocks take {bytes} bytes of memory: lower --max-allocs, or raise --mem-limit, which is {}",
                self.mem_limit
            )));
        }
        Ok(())
    }

    /// Resolves options that are shorthands of others. Refuses options that make no sense together, where that is more
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
                "--peak (--mode peak) is of all blocks of one process: name it with -p or -c alone"
                    .into(),
            ));
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

    /// Describes the target in words.
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
        let exports = self.export.prepare(self.target())?;
        Ok(match &self.perfetto {
            Some(path) => exports.with(Heaps::create(path, message::tool())?),
            None => exports,
        })
    }

    /// Whether anything is made of reports that always has source lines, such as a profile.
    pub(crate) fn makes_profiles(&self) -> bool {
        self.export.is_enabled() || self.difference.diff.is_some() || self.serve.serve.is_some()
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
    /// Growth in bytes a second since the first report
    Rate,
}

/// Returns how many items of `each` bytes fit into `bytes`, at least one.
pub(crate) fn count_within(bytes: u64, each: u64) -> u32 {
    (bytes / each).max(1).try_into().unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
