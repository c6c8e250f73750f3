//! Processes that map a file whose server, which is theirs, never answers.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use libtest_mimic::Trial;
use memtools::process::proc::{self, Process};
use tempfile::TempDir;

use super::{NOBODY, text};
use crate::harness::{self, Tool, Workload};
use crate::{brkstack, heap_pause, memleak};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "hostile":
        a_lock_that_is_held_refuses_probes [Fuse],
        probes_outlast_a_lock_that_is_held [Fuse],
        memory_that_never_answers_keeps_no_tool_waiting [Fuse],
        what_never_answers_is_not_copied [Fuse],
    }
}

/// Time within which a process is forked on a machine that is not frozen, also if the machine is emulated.
const FORK: Duration = Duration::from_secs(5);

/// Time within which probes are removed once the lock is free: two tries, and the removal on an emulated machine.
const REMOVAL: Duration = Duration::from_secs(40);

/// Time within which a tool gives up a process that does not answer, also on an emulated machine.
const ANSWER: Duration = Duration::from_secs(20);

/// Starts the hostile program, and returns the directory on which it has mounted its file system.
fn start(what: &str) -> Result<(TempDir, Workload)> {
    fs::set_permissions("/dev/fuse", fs::Permissions::from_mode(0o666))?;
    let folder = harness::scratch()?;
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777))?;
    let hostile = Workload::start("hostile-fuse", &[what, text(folder.path())])?;
    Ok((folder, hostile))
}

/// Fails if processes are not forked in time.
fn expect_forks() -> Result<()> {
    let begun = Instant::now();
    ensure!(Command::new("true").status()?.success());
    ensure!(begun.elapsed() < FORK, "{:?}", begun.elapsed());
    Ok(())
}

fn a_lock_that_is_held_refuses_probes() -> Result<()> {
    let target = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let (_folder, hostile) = start("lock")?;
    let ended = Tool::start("memleak", &["-p", &target.pid(), "1", "1"])?.wait()?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    let who = format!(
        "process {} (hostile-fuse) of user {NOBODY} has held",
        hostile.pid()
    );
    ensure!(ended.stderr.contains(&who), "{ended:?}");
    expect_forks()?;

    drop(hostile);
    let ended = Tool::start("memleak", &["-p", &target.pid(), "1", "1"])?.wait()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(())
}

fn probes_outlast_a_lock_that_is_held() -> Result<()> {
    let target = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let mut tool = Tool::start("memleak", &["-p", &target.pid(), "60"])?;
    tool.wait_for_stderr(memleak::READY)?;
    let (_folder, hostile) = start("lock")?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(ended.stderr.contains("in the background"), "{ended:?}");
    expect_forks()?;
    drop(hostile);
    let is_running = || {
        let mut pids = proc::all().unwrap_or_default().into_iter();
        pids.any(|pid| Process::open(pid).is_ok_and(|process| process.comm() == "memleak"))
    };
    let begun = Instant::now();
    while is_running() {
        ensure!(begun.elapsed() < REMOVAL, "probes are not removed");
        thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn memory_that_never_answers_keeps_no_tool_waiting() -> Result<()> {
    const GROWN: u64 = 31;
    let mut good = Workload::start("brk", &[&GROWN.to_string(), "0", "0"])?;
    let (_folder, hostile) = start("java")?;
    let pids = [hostile.pid(), good.pid()].join(",");
    let mut tool = Tool::start("brkstack", &["-p", &pids])?;
    tool.wait_for_stderr(brkstack::READY)?;
    good.work()?;
    tool.wait_for_stderr(&format!(
        "process {} (hostile-fuse) did not answer",
        hostile.pid()
    ))?;

    // The process that reads still waits, and must not hold the lock of the address space.
    let ended = Tool::start("memleak", &["-p", &good.pid(), "1", "1"])?.wait()?;
    ensure!(ended.status.success(), "{ended:?}");
    expect_forks()?;

    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    let whole = format!("main;grow_heap {GROWN}\n");
    ensure!(ended.stdout.contains(&whole), "{ended:?}");
    Ok(())
}

/// The pages of the process are listed under the lock of its address space, for which the process waits, too. So all
/// that come later wait for ever.
fn what_never_answers_is_not_copied() -> Result<()> {
    let (_folder, mut hostile) = start("queue")?;
    let pid = hostile.pid();
    hostile.go()?;
    harness::eventually("the process waits", || {
        Ok(heap_pause::tracer_and_state(&pid)?.1.starts_with('D'))
    })?;
    for options in [
        &["--layout"][..],
        &["--pre-copy", "--leaks"],
        &["--growth", "60"],
        &[],
    ] {
        let begun = Instant::now();
        let ended = Tool::start("heapscan", &[&["-p", &pid], options].concat())?.wait()?;
        ensure!(ended.status.code() == Some(1), "{ended:?}");
        // Linux 5.10 can prefer a reader to a writer that waits for the lock. Then the process does not stop.
        let reasons = ["did not answer", "did not stop within"];
        ensure!(
            reasons.iter().any(|why| ended.stderr.contains(why)),
            "{ended:?}"
        );
        ensure!(begun.elapsed() < ANSWER, "{ended:?}");
        ensure!(heap_pause::tracer_and_state(&pid)?.0 == "0", "{ended:?}");
    }
    expect_forks()
}
