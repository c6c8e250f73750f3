//! memleak against programs whose leaks are known.

mod counts;
mod harm;
mod names;
mod output;
mod room;
mod targets;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;
use memtools::bpf::kernel_support;

use crate::harness::{Tool, ToolOutput, Workload};

/// Returns all end-to-end tests of memleak.
pub(crate) fn tests() -> Vec<Trial> {
    [
        counts::tests(),
        harm::tests(),
        names::tests(),
        output::tests(),
        room::tests(),
        targets::tests(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

pub(crate) const READY: &str = "probes in";
const SIZE: u64 = 4093;

/// Stack of a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) bytes: u64,
    pub(crate) allocations: u64,
    /// Frames, innermost first: `name+0xoffset [module]`.
    pub(crate) frames: Vec<String>,
    /// Process of the stack, if the report has several.
    pub(crate) pid: Option<String>,
    /// Line that --extended adds.
    pub(crate) extended: String,
}

impl Group {
    pub(crate) fn passes(&self, function: &str) -> bool {
        self.frames.iter().any(|frame| name(frame) == function)
    }
}

/// Whether memleak keeps blocks in a table, where it notices double frees. It does from 5.15 on, like BPF cookies.
pub(crate) fn has_table() -> bool {
    kernel_support::btf_has_name("bpf_perf_link")
}

fn name(frame: &str) -> &str {
    frame.split('+').next().unwrap_or(frame)
}

/// Parses the groups of the last report in a text output.
pub(crate) fn last_report(stdout: &str) -> Result<Vec<Group>> {
    let start = stdout
        .rfind("stacks with outstanding allocations:\n")
        .context("no report")?;
    let mut groups: Vec<Group> = Vec::new();
    for line in stdout[start..].lines().skip(1) {
        if let Some(frame) = line.strip_prefix("\t\t") {
            let frame = frame.split_once('\t').map_or(frame, |(_, frame)| frame);
            groups
                .last_mut()
                .context("a frame before any group")?
                .frames
                .push(frame.to_owned());
        } else if ["\ttotal ", "\tof these ", "\texited "]
            .iter()
            .any(|whole| line.starts_with(whole))
        {
            // The line is about all groups together.
        } else if line.contains(" bytes in ") {
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |at: usize| words.get(at).and_then(|word| word.parse().ok());
            groups.push(Group {
                bytes: number(0).with_context(|| line.to_owned())?,
                allocations: number(3).with_context(|| line.to_owned())?,
                frames: Vec::new(),
                pid: words
                    .iter()
                    .position(|word| *word == "PID")
                    .and_then(|at| words.get(at + 1))
                    .map(|pid| (*pid).to_owned()),
                extended: String::new(),
            });
        } else if let Some(age) = line.strip_prefix("\t  ") {
            groups
                .last_mut()
                .context("an age before any group")?
                .extended = age.to_owned();
        } else if !line.trim_start().starts_with("addr =") {
            bail!("a line that does not belong to a report: {line:?}");
        }
    }
    Ok(groups)
}

/// Returns what a function and its callees have outstanding: bytes and allocations.
pub(crate) fn outstanding(groups: &[Group], function: &str) -> (u64, u64) {
    let through: Vec<&Group> = groups
        .iter()
        .filter(|group| group.passes(function))
        .collect();
    (
        through.iter().map(|group| group.bytes).sum(),
        through.iter().map(|group| group.allocations).sum(),
    )
}

/// Starts memleak on a workload that is ready, and waits until its probes are live.
pub(crate) fn attach(workload: &Workload, args: &[&str]) -> Result<Tool> {
    let pid = workload.pid();
    let args = [&["-p", &pid], args].concat();
    let mut tool = Tool::start("memleak", &args)?;
    tool.wait_for_stderr(READY)?;
    Ok(tool)
}

/// Traces all of a workload's work, and interrupts memleak while the workload is still held.
pub(crate) fn trace(program: &str, program_args: &[&str], args: &[&str]) -> Result<ToolOutput> {
    let mut workload = Workload::start(program, program_args)?;
    let tool = attach(&workload, args)?;
    workload.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    workload.finish()?;
    Ok(ended)
}

/// Returns the groups of the last report of [`trace`], with all stacks and all ages.
pub(crate) fn trace_all(program: &str, program_args: &[&str]) -> Result<Vec<Group>> {
    last_report(&trace(program, program_args, &["-o", "0", "-T", "1000", "60"])?.stdout)
}
