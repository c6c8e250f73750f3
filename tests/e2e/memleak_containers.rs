//! Containers of the processes that memleak reports on: processes that run, and processes that have ended and
//! whose cgroup is removed.

use anyhow::{Result, ensure};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::containers::{ID, Layout, is_in, of_process};
use crate::harness::{self, Tool, Workload};
use crate::memleak::{READY, has_table};

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak::containers":
        each_of_several_has_its_own,
        those_that_have_gone_have_theirs,
        text_tells_them_if_asked,
        calls_and_frees_have_theirs,
        a_heap_and_a_verdict_have_theirs,
        what_names_no_process_has_none [Once],
    }
}

/// Returns the path of the container's cgroup, as systemd names it.
fn scope() -> String {
    format!("system.slice/docker-{ID}.scope")
}

fn start(args: &[&str]) -> Result<Tool> {
    let mut tool = Tool::start(
        "memleak",
        &[args, &["-o", "0", "-T", "1000", "60"]].concat(),
    )?;
    tool.wait_for_stderr(READY)?;
    Ok(tool)
}

/// Starts a program that leaks 31 blocks when it may go on.
fn leaking() -> Result<Workload> {
    Workload::start("alloc", &["one", "malloc", "31", "4093"])
}

/// Checks the only stack of a process: its bytes, its cgroup and its container.
fn expect_stack(rows: &[Value], pid: &str, cgroup: &str, container: &Value) -> Result<()> {
    expect_row("stack", rows, pid, cgroup, container)
}

/// Checks the only row of this type of a process.
fn expect_row(
    kind: &str,
    rows: &[Value],
    pid: &str,
    cgroup: &str,
    container: &Value,
) -> Result<()> {
    let rows = of_process(rows, pid);
    let stacks: Vec<_> = rows.iter().filter(|row| row["type"] == kind).collect();
    ensure!(stacks.len() == 1, "{pid}: {rows:?}");
    let row = stacks[0];
    ensure!(row["bytes"] == 31 * 4093, "{row}");
    ensure!(
        is_in(row, cgroup) && row["container_id"] == *container,
        "{cgroup}: {row}"
    );
    Ok(())
}

/// Two processes of --cgroup, one in a container and one in none. The second process is moved before the report.
fn each_of_several_has_its_own() -> Result<()> {
    let mut layout = Layout::new()?;
    let (mut one, mut other) = (leaking()?, leaking()?);
    let of_one = layout.put(&one.pid(), &scope())?;
    layout.put(&other.pid(), "start.scope")?;
    let tool = start(&["-j", "--cgroup", &layout.path()])?;
    one.work()?;
    other.work()?;
    let of_other = layout.put(&other.pid(), "system.slice/db.service")?;
    let ended = tool.interrupt()?;
    let rows = ended.objects()?;
    expect_stack(&rows, &one.pid(), &of_one, &ID.into())?;
    expect_stack(&rows, &other.pid(), &of_other, &Value::Null)
}

/// One of two processes of -p, which has exited, and a child of --children. The tool is stopped until their
/// cgroups are removed.
fn those_that_have_gone_have_theirs() -> Result<()> {
    let (mut one, mut other) = (leaking()?, leaking()?);
    let mut layout = Layout::new()?;
    let of_one = layout.put(&one.pid(), &scope())?;
    let tool = start(&["-j", "-p", &format!("{},{}", one.pid(), other.pid())])?;
    one.work()?;
    other.work()?;
    tool.signal(Signal::SIGSTOP)?;
    let pid = one.pid();
    one.finish()?;
    let folder = layout.remove()?;
    ensure!(!folder.exists(), "{} is still there", folder.display());
    tool.signal(Signal::SIGCONT)?;
    let ended = tool.interrupt()?;
    expect_row("exited", &ended.objects()?, &pid, &of_one, &ID.into())?;

    let mut parent = Workload::start("lives", &["leave", "101", "97", "7"])?;
    let mut layout = Layout::new()?;
    let cgroup = layout.put(&parent.pid(), &scope())?;
    let tool = start(&["-j", "--children", "-p", &parent.pid()])?;
    tool.signal(Signal::SIGSTOP)?;
    let facts = parent.work()?;
    parent.finish()?;
    layout.remove()?;
    tool.signal(Signal::SIGCONT)?;
    let ended = tool.wait()?;
    let rows = ended.objects()?;
    for child in facts["children"].split(',') {
        let rows = of_process(&rows, child);
        ensure!(!rows.is_empty(), "{child}: {ended:?}");
        for row in rows {
            ensure!(is_in(row, &cgroup) && row["container_id"] == ID, "{row}");
        }
    }
    Ok(())
}

fn text_tells_them_if_asked() -> Result<()> {
    for several in [false, true] {
        let mut layout = Layout::new()?;
        let (mut one, other) = (leaking()?, leaking()?);
        let pid = one.pid();
        layout.put(&pid, &scope())?;
        let both = format!("{pid},{}", other.pid());
        let pids = if several { &both } else { &pid };
        let tool = start(&["--container", "-p", pids])?;
        one.work()?;
        let ended = tool.interrupt()?;
        let expected = if several {
            format!("31 allocations from stack of PID {pid} (alloc) in 4c01db0b339c\n")
        } else {
            "Top 1000 stacks with outstanding allocations in 4c01db0b339c:\n".to_owned()
        };
        ensure!(ended.stdout.contains(&expected), "{ended:?}");
    }
    Ok(())
}

/// Calls of --trace, a block that is freed twice, and a block that is older than the trace.
fn calls_and_frees_have_theirs() -> Result<()> {
    let expect = |rows: &[Value], kind: &str, count: usize, cgroup: &str| {
        let rows: Vec<_> = rows.iter().filter(|row| row["type"] == kind).collect();
        ensure!(rows.len() >= count, "{kind}: {rows:?}");
        for row in rows {
            ensure!(
                is_in(row, cgroup) && row["container_id"] == ID,
                "{kind}: {row}"
            );
        }
        Ok(())
    };
    let mut workload = leaking()?;
    let mut layout = Layout::new()?;
    let cgroup = layout.put(&workload.pid(), &scope())?;
    let tool = start(&["-jt", "-p", &workload.pid()])?;
    workload.work()?;
    // From here on, memleak prints calls of a process that has ended.
    tool.signal(Signal::SIGSTOP)?;
    workload.finish()?;
    layout.remove()?;
    tool.signal(Signal::SIGCONT)?;
    let rows = tool.wait()?.objects()?;
    expect(&rows, "call", 2 * 31, &cgroup)?;
    expect(&rows, "report", 1, &cgroup)?;

    for (mode, kind) in [("twice", "double_free"), ("unknown", "unknown_frees")] {
        if kind == "double_free" && !has_table() {
            continue;
        }
        let mut layout = Layout::new()?;
        let mut workload = Workload::start("lives", &[mode, "53"])?;
        let other = leaking()?;
        let cgroup = layout.put(&workload.pid(), &scope())?;
        let both = format!("{},{}", workload.pid(), other.pid());
        let tool = start(&["-je", "-p", &both])?;
        workload.work()?;
        expect(&tool.interrupt()?.objects()?, kind, 1, &cgroup)?;
    }
    Ok(())
}

/// The sections of heapscan name the container of the process.
fn a_heap_and_a_verdict_have_theirs() -> Result<()> {
    let mut layout = Layout::new()?;
    let mut workload = leaking()?;
    let pid = workload.pid();
    let cgroup = layout.put(&pid, &scope())?;
    workload.work()?;
    for (option, kind, head) in [
        ("--layout", "layout", "heap of alloc"),
        ("--types", "types", "types of blocks in alloc"),
        ("--leaks", "verdict", "verdict on alloc"),
    ] {
        let args = [option, "--max-pause", "60000", "-p", &pid];
        let ended = harness::run("heapscan", &[&args[..], &["-j"]].concat())?;
        let rows = ended.objects()?;
        let row = rows.iter().find(|row| row["type"] == kind);
        ensure!(
            row.is_some_and(|row| is_in(row, &cgroup) && row["container_id"] == ID),
            "{option}: {ended:?}"
        );
        let ended = harness::run("heapscan", &[&args[..], &["--container"]].concat())?;
        let head = format!("{head} (pid {pid}) in 4c01db0b339c, paused for ");
        ensure!(ended.stdout.starts_with(&head), "{option}: {ended:?}");
    }
    Ok(())
}

fn what_names_no_process_has_none() -> Result<()> {
    for args in [&["--container"][..], &["-k", "--container", "-p", "1"]] {
        let ended = harness::run("memleak", args)?;
        let reason = "--container is for the allocations of a process";
        ensure!(
            ended.status.code() == Some(2) && ended.stderr.contains(reason),
            "{ended:?}"
        );
    }
    Ok(())
}
