//! How much memory the tools need until they trace: what a machine that is short of it can spare.

use std::fs;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use crate::harness::{self, Tool, Workload};
use crate::memleak;

const MOST_KIB: u64 = 10 << 10;

/// What all tools but memleak say when they trace.
const READY: &str = "Ctrl-C to end";

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "memory":
        memleak_needs_no_more,
        tools_need_no_more,
        swapin_needs_no_more [Kprobes],
    }
}

/// Starts a tool until it says that it traces; its peak of resident memory is no more than that.
fn needs_no_more(tool: &str, args: &[&str], ready: &str) -> Result<()> {
    let mut running = Tool::start(tool, args)?;
    running.wait_for(ready)?;
    let status = fs::read_to_string(format!("/proc/{}/status", running.pid()))?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let peak = peak.and_then(|peak| peak.trim().strip_suffix("kB"));
    let peak: u64 = peak.context("no peak")?.trim().parse()?;
    println!("{tool}: {peak} KiB");
    ensure!(peak <= MOST_KIB, "{tool} needs {peak} KiB");
    let ended = running.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(())
}

fn memleak_needs_no_more() -> Result<()> {
    let workload = Workload::start("alloc", &["hold"])?;
    needs_no_more("memleak", &["-p", &workload.pid()], memleak::READY)
}

fn tools_need_no_more() -> Result<()> {
    for tool in [
        "mmapsnoop",
        "brkstack",
        "shmsnoop",
        "faults",
        "ffaults",
        "vmscan",
        "drsnoop",
        "hfaults",
        "oomkill",
    ] {
        needs_no_more(tool, &[], READY)?;
    }
    Ok(())
}

fn swapin_needs_no_more() -> Result<()> {
    needs_no_more("swapin", &[], READY)
}
