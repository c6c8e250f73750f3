//! How much memory the tools need until they trace: what a machine that is short of it can spare.

use std::fs;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use crate::harness::{self, Tool, Workload};

const MOST_KIB: u64 = 10 << 10;

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "memory":
        memleak_needs_no_more,
        tools_need_no_more,
        swapin_needs_no_more [Kprobes],
    }
}

/// Starts a tool until it traces; its peak of resident memory is no more than that.
fn needs_no_more(tool: &str, args: &[&str]) -> Result<()> {
    let mut running = Tool::start(tool, args)?;
    running.wait_for(if tool == "memleak" {
        "probes in"
    } else {
        "Ctrl-C to end"
    })?;
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
    needs_no_more("memleak", &["-p", &workload.pid()])
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
        needs_no_more(tool, &[])?;
    }
    Ok(())
}

fn swapin_needs_no_more() -> Result<()> {
    needs_no_more("swapin", &[])
}
