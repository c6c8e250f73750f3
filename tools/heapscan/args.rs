//! Options of modes that examine a copy of a process, with nothing traced.

use std::time::Duration;

use clap::ArgGroup;
use memtools::heap::capture::Request;
use memtools::heap::idle::Watch;
use memtools::host::capabilities::Capability;
use memtools::parse::{self, UsageError};
use memtools::process::proc::Process;

/// Options that trace nothing.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Without tracing: the heap of a process as it is")]
#[command(group = ArgGroup::new("copies").args(["heap", "types", "verdict", "growth"]).multiple(true))]
pub(crate) struct HeapArgs {
    /// Show where the memory of the process of -p is: blocks in use, free in arenas, and the rest; -a lists blocks
    #[arg(long, requires = "pid", conflicts_with_all = TRACING, conflicts_with_all = ALLOCATORS)]
    pub(crate) heap: bool,

    /// Show which types of objects the blocks of the process of -p are, those with most bytes first: C++ classes, Python
    /// objects, strings, containers; -T shows more
    #[arg(long, requires = "pid", conflicts_with_all = TRACING, conflicts_with_all = ALLOCATORS)]
    pub(crate) types: bool,

    /// Milliseconds for which the process may be stopped while its memory is copied; a copy that takes longer is given up
    #[arg(long, value_name = "MS", default_value = "250", value_parser = milliseconds)]
    pub(crate) max_pause: Duration,

    /// Copy most of the process's memory while it runs, and only what it has written since then while it stands still; the
    /// first write to each page takes a page fault for that
    #[arg(long, conflicts_with = "idle", requires = "copies")]
    pub(crate) pre_copy: bool,
}

/// Options that name what is to be probed.
pub(crate) const ALLOCATORS: [&str; 4] = ["obj", "symbols_prefix", "alloc", "free"];

/// Options of tracing, which are refused beside these modes.
pub(crate) const TRACING: [&str; 30] = [
    "interval",
    "count",
    "children",
    "name",
    "cgroup",
    "min_size",
    "max_size",
    "sample_rate",
    "sample_bytes",
    "max_overhead",
    "python_objects",
    "mode",
    "churn",
    "peak",
    "older",
    "extended",
    "combined_only",
    "trace",
    "folded",
    "perfetto",
    "kernel",
    "slab",
    "pages",
    "percpu",
    "by_cache",
    "cache",
    "flame",
    "pprof",
    "diff",
    "serve",
];

fn milliseconds(text: &str) -> Result<Duration, String> {
    let number = parse::count::<u64>(text)?;
    Ok(Duration::from_millis(number))
}

impl HeapArgs {
    /// Makes the request for images of a process.
    pub(crate) fn request<'a>(&self, process: &'a Process, idle: Option<&'a Watch>) -> Request<'a> {
        Request {
            process,
            max_pause: self.max_pause,
            pre_copy: self.pre_copy,
            idle,
        }
    }

    /// Returns the capabilities that these options take besides those of tracing.
    pub(crate) fn capabilities(&self) -> &'static [Capability] {
        // Without this capability, the kernel does not show where pages are in memory.
        const PRE_COPY: [Capability; 1] = [Capability::CAP_SYS_ADMIN];
        if self.pre_copy { &PRE_COPY } else { &[] }
    }

    /// Whether --heap or --types is given.
    ///
    /// # Errors
    /// If one of these options is given, and not exactly one process was named.
    pub(crate) fn wanted(&self, pids: &[u32]) -> Result<bool, UsageError> {
        let wanted = self.heap || self.types;
        if wanted && pids.len() != 1 {
            let option = if self.heap { "--heap" } else { "--types" };
            return Err(UsageError(format!(
                "{option} is of one process: name it with -p PID"
            )));
        }
        Ok(wanted)
    }
}
