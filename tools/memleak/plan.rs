//! Plans: what memleak is to do. [`Plan::of`] resolves the options once; other modules take the settings that they need.

pub(crate) mod known;
mod resolve;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use memtools::export::files::{ExportArgs, Exports, ProfileInfo};
use memtools::export::format::FileFormat;
use memtools::export::metrics::Metrics;
use memtools::export::perfetto::Heaps;
use memtools::parse::UsageError;
use memtools::print::message;
use memtools::print::output::{Format, Output};
use memtools::process::container::ContainerArgs;
use memtools::process::filter::FilterArgs;
use memtools::run::cli;
use memtools::run::poll::Poller;
use memtools::run::skeleton::StackCapacity;
use memtools::run::target::TargetArgs;
use memtools::serve::address::ServeArgs;
use memtools::stacks::symbolize::SourceArgs;
use memtools::stacks::table;
use memtools::stacks::unwind::UnwindArgs;
use memtools::verdict::CopyArgs;

use crate::args::{Mode, SortKey};
use crate::difference::Difference;
use crate::kernel::args::Kinds;
use crate::metrics;
use crate::processes::pool::FunctionSpec;
use crate::sampling::Sampling;
use crate::sums::{self, View};

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

/// What memleak is to do.
#[derive(Debug)]
pub(crate) enum Plan {
    /// Trace the allocations of processes, and report them.
    Processes(Box<ProcessPlan>),
    /// Trace the allocations of one process, and give verdicts on its blocks.
    Judged(Box<ProcessPlan>, VerdictSettings),
    /// Trace the allocations of the kernel, and report them.
    Kernel(Box<KernelPlan>),
}

/// Trace of processes.
#[derive(Debug)]
pub(crate) struct ProcessPlan {
    pub(crate) target: TargetArgs,
    pub(crate) functions: FunctionSettings,
    pub(crate) recording: Recording,
    pub(crate) memory: MemorySettings,
    pub(crate) report: ReportSettings,
    pub(crate) outputs: OutputSettings,
    pub(crate) unwind: UnwindArgs,
    pub(crate) source: SourceArgs,
    pub(crate) containers: ContainerArgs,
    /// Whether stderr shows how events are traced.
    pub(crate) verbose: bool,
}

/// Trace of the kernel.
#[derive(Debug)]
pub(crate) struct KernelPlan {
    /// Processes on whose behalf the kernel allocates.
    pub(crate) filter: FilterArgs,
    pub(crate) kinds: Kinds,
    /// Name of the only slab cache to trace, of 1 to 31 bytes.
    pub(crate) cache: Option<String>,
    /// Whether reports are by slab cache instead of by stack.
    pub(crate) by_cache: bool,
    pub(crate) recording: Recording,
    pub(crate) memory: MemorySettings,
    pub(crate) report: ReportSettings,
    pub(crate) outputs: OutputSettings,
    /// Whether stderr shows how events are traced.
    pub(crate) verbose: bool,
}

impl KernelPlan {
    /// Whether the cache of each object has to be known.
    pub(crate) fn with_caches(&self) -> bool {
        self.by_cache || self.cache.is_some()
    }
}

/// Functions to probe in processes.
#[derive(Debug)]
pub(crate) struct FunctionSettings {
    /// The only file whose allocator is probed: a path, or the name of a library.
    pub(crate) object: Option<PathBuf>,
    /// Prefix of the allocator's functions. Empty if there is none.
    pub(crate) prefix: String,
    /// Functions of custom allocators.
    pub(crate) named: Vec<FunctionSpec>,
    /// Whether each small object of CPython is a block.
    pub(crate) python_objects: bool,
    /// Whether probes have to be at the functions' entries.
    pub(crate) at_entries: bool,
    /// Whether functions that only free are not probed.
    pub(crate) only_allocations: bool,
    /// Whether stderr shows where functions are probed.
    pub(crate) verbose: bool,
}

/// Which events are recorded, and as what.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recording {
    pub(crate) mode: Mode,
    /// Minimum and maximum size of recorded allocations, in bytes.
    pub(crate) min_size: u64,
    pub(crate) max_size: u64,
    /// One in this number of allocations is recorded, at random.
    pub(crate) sample_rate: u32,
    /// Sampling by size, if any.
    pub(crate) sampling: Option<Sampling>,
    /// Maximum part of the target's CPU time for the BPF programs, in percent.
    pub(crate) max_overhead: Option<f64>,
    /// Whether only totals are kept, in the kernel.
    pub(crate) only_totals: bool,
    /// Whether each allocation and free is printed.
    pub(crate) trace: bool,
}

impl Recording {
    /// Whether every block is recorded.
    pub(crate) fn is_complete(&self) -> bool {
        self.mode != Mode::Alloc
            && self.sample_rate == 1
            && self.sampling.is_none()
            && (self.min_size, self.max_size) == (0, u64::MAX)
    }
}

/// Limits of what is kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemorySettings {
    /// Maximum memory for blocks, stacks and reports, in bytes.
    pub(crate) limit: u64,
    /// Number of blocks to allocate memory for at the start, if that is not left to the limit.
    pub(crate) blocks: Option<u32>,
    /// Number of stacks to allocate memory for at the start, if that is not left to the limit.
    pub(crate) stacks: Option<u32>,
    /// Maximum number of frames of a stack.
    pub(crate) stack_depth: u32,
    /// Whether reports are served to clients.
    pub(crate) is_served: bool,
    /// Whether reports list blocks, which takes memory of memleak itself.
    pub(crate) reports_blocks: bool,
}

impl MemorySettings {
    /// Returns the maximum number of distinct stacks that are kept.
    pub(crate) fn max_stacks(&self) -> u32 {
        let bytes = table::ENTRY_BYTES + REPORTED_STACK_BYTES;
        let within_limit = (self.limit / STACKS_PART / bytes).max(1);
        self.stacks
            .unwrap_or_else(|| within_limit.try_into().unwrap_or(u32::MAX))
    }

    /// Returns the initial capacity of the stack table.
    pub(crate) fn stack_capacity(&self) -> StackCapacity {
        let first = || self.max_stacks().min(table::first_entries());
        StackCapacity {
            first_entries: Some(self.stacks.unwrap_or_else(first)),
            depth: self.stack_depth,
        }
    }

    /// Returns the bytes of memleak's own memory that a block takes.
    pub(crate) fn reported_block_bytes(&self) -> u64 {
        if self.reports_blocks {
            REPORTED_BLOCK_BYTES
        } else {
            0
        }
    }

    /// Returns the bytes that --serve may send to all clients at once.
    pub(crate) fn served_bytes(&self) -> usize {
        let bytes = if self.is_served {
            self.limit / SERVED_PART
        } else {
            0
        };
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }

    /// Returns the bytes that following blocks may take, if --max-allocs does not limit the blocks.
    pub(crate) fn bytes_for_blocks(&self) -> u64 {
        self.limit - self.limit / STACKS_PART - self.served_bytes() as u64
    }

    /// Refuses --max-allocs if these blocks take more than --mem-limit of the kernel's memory.
    pub(crate) fn expect_room(&self, blocks: u32, bytes: u64) -> Result<(), UsageError> {
        if bytes > self.limit {
            return Err(UsageError(format!(
                "{blocks} blocks take {bytes} bytes of memory: lower --max-allocs, or raise --mem-limit, which is {}",
                self.limit
            )));
        }
        Ok(())
    }
}

/// Contents of reports, and when they are made.
#[derive(Debug)]
pub(crate) struct ReportSettings {
    /// Time between reports.
    pub(crate) interval: Duration,
    /// Time between reports as the command line has it, if it does.
    pub(crate) given_interval: Option<Duration>,
    /// Number of reports. None if there is no limit.
    pub(crate) count: Option<u64>,
    pub(crate) format: Format,
    pub(crate) view: View,
    /// Number of stacks to show.
    pub(crate) top: usize,
    pub(crate) sort: SortKey,
    /// Minimum age of a block, in milliseconds.
    pub(crate) older_ms: Option<u64>,
    /// Whether ages and growth of stacks are shown, and the stacks that freed unknown blocks.
    pub(crate) extended: bool,
    /// Whether each outstanding block is listed.
    pub(crate) show_allocs: bool,
    /// Whether stacks have addresses, which BCC's memleak omits with --combined-only.
    pub(crate) addresses: bool,
    /// Whether growth of stacks over time is kept, for clients of --serve.
    pub(crate) keeps_trends: bool,
    /// Numbers of the report in other formats.
    pub(crate) subject: ProfileInfo,
}

impl ProcessPlan {
    /// Whether the cgroups of processes are needed: for the column, for JSON, or for labels of metrics.
    pub(crate) fn wants_cgroups(&self) -> bool {
        let always = self.report.is_json() || self.outputs.has_metrics();
        self.containers.wanted(always)
    }
}

impl ReportSettings {
    /// Whether rows are printed as JSON.
    pub(crate) fn is_json(&self) -> bool {
        self.format == Format::Json
    }

    /// Whether folded stacks are printed, once.
    pub(crate) fn is_folded(&self) -> bool {
        self.format == Format::Folded
    }

    /// Returns the CLOCK_MONOTONIC time after which a block is too young for a report at `now_ns`. If `all` blocks are
    /// wanted, only --older leaves any out.
    pub(crate) fn born_before(&self, now_ns: u64, all: bool) -> u64 {
        let default = if all { 0 } else { DEFAULT_OLDER_MS };
        let older_ms = self.older_ms.unwrap_or(default);
        now_ns.saturating_sub(older_ms.saturating_mul(1_000_000))
    }

    /// Returns the minimum age of a block at its process's end, in nanoseconds. Blocks of an ended process will not be
    /// freed any more, however young they are, so only --older leaves any out.
    pub(crate) fn older_at_end_ns(&self) -> u64 {
        self.older_ms.unwrap_or(0).saturating_mul(1_000_000)
    }

    /// Whether reports need the ages of blocks.
    pub(crate) fn wants_ages(&self) -> bool {
        self.extended || self.is_json() || self.sort == SortKey::Age
    }
}

/// Files of a run besides its output.
pub(crate) struct Files {
    pub(crate) exports: Exports,
    pub(crate) metrics: Metrics,
    /// Comparison with an earlier profile.
    pub(crate) difference: Option<Difference>,
}

/// Files and addresses that reports go to.
#[derive(Debug)]
pub(crate) struct OutputSettings {
    /// File to write to instead of stdout.
    pub(crate) file: Option<PathBuf>,
    pub(crate) export: ExportArgs,
    /// Profile of an earlier run to compare with.
    pub(crate) earlier: Option<PathBuf>,
    /// Growth in bytes since the earlier profile that --fail-on permits. None if any growth is permitted.
    pub(crate) permitted_growth: Option<u64>,
    pub(crate) serve: ServeArgs,
    /// Description of the target.
    pub(crate) target: String,
}

impl OutputSettings {
    /// Starts the tool: see [`cli::start`].
    pub(crate) fn start<'a>(&self, report: &ReportSettings) -> Result<(Poller<'a>, Output)> {
        cli::start(report.format, self.file.as_deref())
    }

    /// Prepares the files that reports are written into, and reads the earlier profile, which has to have the values
    /// of these reports.
    ///
    /// # Errors
    /// If a file cannot be written to, or if the earlier profile cannot be read, or has other values.
    pub(crate) fn files(&self, report: &ReportSettings) -> Result<Files> {
        let earlier = self.earlier.as_deref();
        let exports = self.export.prepare(earlier, self.target.clone())?;
        let exports = match self.export.sole(FileFormat::Perfetto)? {
            Some(path) => exports.with(Heaps::create(path, message::tool())?),
            None => exports,
        };
        let families = metrics::families(report.view);
        let values = &report.subject.values;
        let difference = earlier.map(|path| Difference::read(path, values, self.permitted_growth));
        Ok(Files {
            exports,
            metrics: self
                .export
                .metrics(&families, &self.target)?
                .served(self.serve.serve.is_some()),
            difference: difference.transpose()?,
        })
    }

    /// Whether sums are kept for a file of metrics, or served.
    fn has_metrics(&self) -> bool {
        self.export.has_metrics() || self.serve.serve.is_some()
    }

    /// Whether anything is made of reports that always has source lines, such as a profile.
    pub(crate) fn makes_profiles(&self) -> bool {
        self.export.has_profiles() || self.earlier.is_some() || self.serve.serve.is_some()
    }
}

/// Verdicts on a traced process.
#[derive(Debug)]
pub(crate) struct VerdictSettings {
    pub(crate) moment: Moment,
    /// Questions of --why: addresses, types, sizes or functions.
    pub(crate) why: Vec<String>,
    /// Valgrind suppression files.
    pub(crate) suppressions: Vec<PathBuf>,
    pub(crate) copies: CopyArgs,
    /// Maximum number of groups of unreachable blocks, and of groups of reachable blocks.
    pub(crate) top: usize,
    /// Whether text output names the container of the process.
    pub(crate) container: bool,
    /// Whether leaks of the last verdict are a failure.
    pub(crate) fails_on_leaks: bool,
}

/// Time at which a verdict is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    /// At each interval, `count` times, or until the end of the trace. Accesses are monitored in the part `idle` of
    /// each interval, its last one.
    Every {
        interval: Duration,
        count: Option<u64>,
        idle: Option<Duration>,
    },
    /// At the exit of the command.
    Exit,
}

/// Whether processes can join a target later.
pub(crate) fn can_be_joined(target: &TargetArgs) -> bool {
    target.children || target.filter.name.is_some() || target.filter.cgroup.is_some()
}

/// Returns the numbers of a view in other formats, with remarks on how they were recorded.
fn subject(view: View, recording: &Recording) -> ProfileInfo {
    let mut remarks = Vec::new();
    if recording.sampling.is_some() {
        remarks.push("estimated from a sample".to_owned());
    }
    if recording.sample_rate > 1 {
        remarks.push(format!(
            "about one of {} allocations was recorded, and stands for itself alone",
            recording.sample_rate
        ));
    }
    sums::subject(view, remarks)
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::Args;

    /// Returns the plan of a line whose words are separated by spaces.
    pub(crate) fn plan(line: &str) -> Result<Plan> {
        let words = line.split_whitespace();
        Ok(Plan::of(Args::try_parse_from(words)?)?)
    }

    /// Returns the limits of a plan without a verdict.
    pub(crate) fn memory(line: &str) -> Result<MemorySettings> {
        match plan(line)? {
            Plan::Processes(plan) | Plan::Judged(plan, _) => Ok(plan.memory),
            Plan::Kernel(plan) => Ok(plan.memory),
        }
    }
}
