//! Stacks are complete from each kind of hook.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use super::{COUNT, Entry, Report, complete, live, own_stack, trace, trace_malloc};
use crate::harness::{self, Tool, Workload, workload};
use crate::pressure::{Group, folder_on_disk};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "unwind":
        the_return_of_a_function,
        a_system_call,
        a_page_fault,
        a_mapping,
        a_stall_in_reclaim,
        a_kill,
        a_kill_by_kprobe_and_fentry [Kprobes],
        pending_return_probes,
    }
}

fn the_return_of_a_function() -> Result<()> {
    let (report, own) = trace_malloc("malloc")?;
    report.only(COUNT)?.expect("leaf_malloc", &own)?;
    complete(&report, COUNT)
}

fn a_system_call() -> Result<()> {
    let (report, own) = trace("brkstack", &[], "brk")?;
    report.only(COUNT)?.expect("leaf_brk", &own)?;
    complete(&report, COUNT)
}

fn a_page_fault() -> Result<()> {
    let (report, own) = trace("faults", &[], "fault")?;
    let through_leaf = |entry: &&Entry| entry.symbols[0] == "leaf_fault";
    let entry = report
        .stacks
        .iter()
        .find(through_leaf)
        .context("no fault")?;
    ensure!(entry.count == COUNT, "{entry:?}");
    entry.expect("leaf_fault", &own)?;
    // Another fault of the program can be in the dynamic linker, where it saves registers to resolve a symbol.
    let (resolving, others): (Vec<_>, Vec<_>) =
        report.stacks.iter().partition(|entry| entry.truncated);
    let loader = harness::arch::LOADER.rsplit('/').next().unwrap_or_default();
    let because = format!("no unwind info: {loader}");
    let declared = resolving
        .iter()
        .all(|entry| entry.truncated_because == because);
    ensure!(declared, "{resolving:?}");
    let all: u64 = report.stacks.iter().map(|entry| entry.count).sum();
    let unwinding = &report.unwinding;
    let complete: u64 = others.iter().map(|entry| entry.count).sum();
    ensure!(
        unwinding["stacks"] == all && unwinding["complete"] == complete,
        "{unwinding}"
    );
    Ok(())
}

/// mmapsnoop prints no addresses, so the program's functions are compared by name.
fn a_mapping() -> Result<()> {
    let mut program = Workload::start("unwind", &["mmap", &COUNT.to_string()])?;
    let mut tool = Tool::start("mmapsnoop", &["-j", "--stack", "-p", &program.pid()])?;
    tool.wait_for_stderr("tracing")?;
    program.work()?;
    let ended = tool.interrupt()?;
    let expected = "leaf_mmap compare through_qsort with_alloca with_large_frame with_aligned_frame \
                    with_busy_registers chain main _start";
    let mut calls = 0;
    for row in ended.objects()? {
        let Some(frames) = row["user_frames"].as_array() else {
            continue;
        };
        // Examples of symbols: `chain`, `with_busy_registers.constprop.0`.
        let names = frames
            .iter()
            .filter_map(|frame| frame["symbol"].as_str()?.split('.').next());
        let chain: Vec<&str> = names
            .filter(|name| expected.split(' ').any(|other| other == *name))
            .collect();
        ensure!(
            chain.join(" ") == expected && row["truncated"].is_null(),
            "{row}"
        );
        calls += 1;
    }
    ensure!(calls == COUNT, "{calls} calls: {ended:?}");
    Ok(())
}

fn a_stall_in_reclaim() -> Result<()> {
    let group = Group::new("memtools-unwind", 32 << 20)?;
    let folder = folder_on_disk()?;
    // Each megabyte is on the disk before the next is written, so that there are clean pages.
    let file = fs::File::options()
        .create_new(true)
        .write(true)
        .custom_flags(libc::O_DSYNC)
        .open(folder.path().join("written"))?;
    let mut command = group.command(&workload("unwind"), &["write", "97"]);
    let mut program = Workload::spawn(command.stderr(file))?;
    let args = ["--memcg", "-j", "--stack", "-p", &program.pid()];
    let mut tool = Tool::start("drsnoop", &args)?;
    tool.wait_for_stderr(live("drsnoop"))?;
    let own = own_stack(&program.work()?)?;
    let report = Report::read(&tool.interrupt()?)?;
    ensure!(report.stacks.len() >= 50, "{}", report.stacks.len());
    for entry in &report.stacks {
        entry.expect("leaf_write", &own)?;
    }
    complete(&report, report.stacks.len() as u64)
}

/// The kill happens in a page fault, and BPF programs of several kinds see it.
fn a_kill() -> Result<()> {
    killed(None)?;
    killed(Some("mark_victim alone"))?;
    killed(Some("mark_victim's pid alone"))
}

fn a_kill_by_kprobe_and_fentry() -> Result<()> {
    killed(Some("kprobe"))?;
    killed(Some("fentry"))
}

/// Checks the stack of a victim that is killed for its own allocation.
fn killed(way: Option<&str>) -> Result<()> {
    let name = way.unwrap_or("the best way").replace(' ', "-");
    let group = Group::new(&format!("memtools-unwind-{name}"), 8 << 20)?;
    group.forbid_swap()?;
    let mut program = Workload::spawn(&mut group.command(&workload("unwind"), &["grow", "16411"]))?;
    let args = ["-j", "-p", &program.pid()];
    let mut tool = match way {
        Some(way) => Tool::start_by(way, "oomkill", &args)?,
        None => Tool::start("oomkill", &args)?,
    };
    tool.wait_for_stderr(live("oomkill"))?;
    let own = own_stack(&program.work()?)?;
    program.go()?;
    ensure!(program.wait()?.signal() == Some(9), "it was not killed");
    let report = Report::read(&tool.interrupt()?)?;
    report.only(1)?.expect("leaf_grow", &own)?;
    complete(&report, 1)
}

/// memleak has its return probes on malloc while malloc calls brk(2).
fn pending_return_probes() -> Result<()> {
    let mut program = Workload::start("unwind", &["nested", &COUNT.to_string()])?;
    let pid = program.pid();
    let mut memleak = Tool::start("memleak", &["-p", &pid, "60"])?;
    memleak.wait_for_stderr(live("memleak"))?;
    let mut brkstack = Tool::start("brkstack", &["-j", "-p", &pid])?;
    brkstack.wait_for_stderr(live("brkstack"))?;
    let facts = program.work()?;
    let report = Report::read(&brkstack.interrupt()?)?;
    memleak.interrupt()?;
    let own = own_stack(&facts)?;
    let entry = report
        .stacks
        .iter()
        .max_by_key(|entry| entry.count)
        .context("no stacks")?;
    ensure!(entry.count >= COUNT - 1, "{:?}", report.stacks);
    entry.expect("leaf_nested", &own)?;
    let calls: u64 = report.stacks.iter().map(|entry| entry.count).sum();
    complete(&report, calls)
}
