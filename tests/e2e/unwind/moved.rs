//! Stacks in memory of which the kernel is making a huge page: until then, they can be read only by waiting.

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use super::Report;
use crate::harness::{self, Tool, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "unwind":
        what_cannot_be_read_is_said_and_nothing_is_invented [Collapse],
    }
}

const BLOCKS: u64 = 20_011;
const BYTES: &str = "1009";
/// Number of nested calls between the thread's first function and the function that allocates.
const DEPTH: usize = 41;

/// Every block is reported. Each stack is the thread's, or the inner part of it, and says so.
fn what_cannot_be_read_is_said_and_nothing_is_invented() -> Result<()> {
    let mut program = Workload::start("collapse", &[&BLOCKS.to_string()])?;
    let each_block = ["-j", "-o", "0", "-T", "1000", "-z", BYTES, "-Z", BYTES];
    let mut tool = Tool::start(
        "memleak",
        &[&each_block[..], &["-p", &program.pid(), "3600"]].concat(),
    )?;
    tool.wait_for_stderr("allocator: ")?;
    let facts = program.work()?;
    let report = Report::read(&tool.interrupt()?)?;
    let mut own = vec!["leaf"];
    own.extend(["descend"; DEPTH]);
    own.push("allocate");
    let (mut whole, mut cut) = (0, 0);
    for entry in &report.stacks {
        let found = entry.symbols.iter().map(String::as_str);
        let same = own.iter().zip(found).filter(|(own, found)| *own == found);
        let same = same.count();
        if entry.truncated {
            let is_inner = same == entry.symbols.len().min(own.len());
            ensure!(
                is_inner && entry.truncated_because == "stack not readable",
                "{entry:?}"
            );
            cut += entry.count;
        } else {
            ensure!(same == own.len(), "{entry:?}");
            whole += entry.count;
        }
    }
    let unwinding = &report.unwinding;
    let collapses = facts.get("collapses").context("no collapses")?;
    ensure!(
        whole + cut == BLOCKS && unwinding["complete"] == whole && whole > cut,
        "{whole} whole, {cut} cut, {unwinding}"
    );
    ensure!(
        unwinding["truncated_by_reason"]["stack"] == cut,
        "{unwinding}"
    );
    ensure!(cut > 0, "none cut by {collapses} collapses");
    Ok(())
}
