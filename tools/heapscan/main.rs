//! Use of a process's memory, found in a copy of it: nothing is traced, and nothing was recorded before.
//!
//! The process stands still while it is copied. The walk of its allocator's structures finds the blocks and the free
//! chunks, whenever they were allocated.

pub(crate) mod args;
mod block;
mod glibc;
mod jemalloc;
mod report;
mod types;

use std::process::ExitCode;

use anyhow::{Result, bail};
use memtools::heap::walk::Walked;
use memtools::process::container::CgroupInfo;
use memtools::process::proc::Process;
use memtools::process::smaps;
use memtools::run::privileges;

use crate::args::Args;
use crate::rows::ProcessName;
use block::BlockRow;
use report::HeapRow;

/// Prints where the memory of the process is.
///
/// # Errors
/// If no image of the process can be taken, or its heap cannot be walked.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let process = Process::open(args.pid[0])?;
    let (_poller, mut output) = args.start()?;
    privileges::keep_tracing_and(args.heap.capabilities())?;
    let request = args.heap.request(&process, None);
    let cgroup_info = CgroupInfo::of_process(process.pid());
    let walked = Walked::take(&request)?;
    let named = ProcessName::of_image(&walked.image, cgroup_info, args);
    if let Some(nonsense) = walked.inconsistency() {
        bail!("{nonsense}");
    }
    if args.heap.heap {
        let mappings = smaps::read(process.pid())?;
        output.row(&HeapRow::of(&walked, &mappings, named.clone(), args.top))?;
        if args.show_allocs {
            for block in walked.heap.blocks() {
                output.row(&BlockRow::of(block))?;
            }
        }
    }
    if args.heap.types {
        types::print(walked, named, args.top, &mut output)?;
    }
    output.finish()?;
    Ok(ExitCode::SUCCESS)
}
