//! Calls of the selected processes are shown, and no others.

use std::fs::{self, File};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::Signal;
use serde_json::Value;

use super::{Call, calls, end, json_rows, sh, start};
use crate::harness::{self, Tool, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "mmapsnoop":
        processes_are_filtered,
        names_are_filtered,
        cgroups_are_filtered,
        containers_are_found_by_their_ids,
        numbers_are_those_of_our_namespace,
    }
}

/// Ends a tool, and returns the PID of each row.
fn pids(tool: Tool) -> Result<Vec<String>> {
    let rows = json_rows(&end(tool)?)?;
    Ok(rows.iter().map(|row| row["pid"].to_string()).collect())
}

fn processes_are_filtered() -> Result<()> {
    let mut workloads = (0..3)
        .map(|_| Workload::start("mmap", &["anon", "23"]))
        .collect::<Result<Vec<_>>>()?;
    let [first, second, _] = &workloads[..] else {
        unreachable!()
    };
    let wanted = [first.pid(), second.pid()];
    let tool = start(&["-j", "-p", &wanted.join(",")])?;
    for workload in &mut workloads {
        workload.work()?;
    }
    let pids = pids(tool)?;
    ensure!(
        pids == [vec![wanted[0].clone(); 23], vec![wanted[1].clone(); 23]].concat(),
        "{pids:?}"
    );
    Ok(())
}

fn names_are_filtered() -> Result<()> {
    let folder = harness::scratch()?;
    let mut workloads = Vec::new();
    // The name is at the start, in the middle, or at the end of the 15 bytes that the kernel keeps, or not in them.
    for name in [
        "q7map",
        "ab q7map cd",
        "0123456789q7map",
        "0123456789a-q7map",
        "q7-map",
    ] {
        let program = folder.path().join(name);
        harness::copy(&harness::workload("mmap"), &program)?;
        workloads.push(Workload::spawn(Command::new(program).args(["anon", "23"]))?);
    }
    let tool = start(&["-j", "-n", "q7map"])?;
    for workload in &mut workloads {
        workload.work()?;
    }
    let expected: Vec<String> = workloads[..3]
        .iter()
        .flat_map(|workload| vec![workload.pid(); 23])
        .collect();
    let pids = pids(tool)?;
    ensure!(pids == expected, "{pids:?} is not {expected:?}");
    Ok(())
}

fn cgroups_are_filtered() -> Result<()> {
    let cgroup = harness::Cgroup::new()?;
    let below = cgroup.path().join("below");
    fs::create_dir(&below)?;
    let mut workloads = (0..3)
        .map(|_| Workload::start("mmap", &["anon", "23"]))
        .collect::<Result<Vec<_>>>()?;
    cgroup.add(&workloads[0].pid())?;
    fs::write(below.join("cgroup.procs"), workloads[1].pid())?;
    let tool = start(&["-j", "--cgroup", &cgroup.path().to_string_lossy()])?;
    for workload in &mut workloads {
        workload.work()?;
    }
    let expected: Vec<String> = workloads[..2]
        .iter()
        .flat_map(|workload| vec![workload.pid(); 23])
        .collect();
    let pids = pids(tool)?;
    ensure!(pids == expected, "{pids:?} is not {expected:?}");
    for workload in workloads {
        workload.finish()?;
    }
    fs::remove_dir(below)?;
    Ok(())
}

/// Folders are named as Docker and containerd name them below systemd. Two of them have ids that begin alike.
fn containers_are_found_by_their_ids() -> Result<()> {
    let cgroup = harness::Cgroup::new()?;
    let digits = format!("{:08x}", std::process::id());
    let names = [
        format!("docker-{}.scope", digits.repeat(8)),
        format!("cri-containerd-{digits}{}.scope", "0".repeat(56)),
    ];
    let folders = names.map(|name| cgroup.path().join(name));
    let mut workloads = Vec::new();
    for folder in &folders {
        fs::create_dir(folder)?;
        let workload = Workload::start("mmap", &["anon", "23"])?;
        fs::write(folder.join("cgroup.procs"), workload.pid())?;
        workloads.push(workload);
    }
    let several = harness::run("mmapsnoop", &["--cgroup", &digits])?;
    let named = folders
        .iter()
        .all(|folder| several.stderr.contains(&*folder.to_string_lossy()));
    ensure!(several.status.code() == Some(2) && named, "{several:?}");

    let tool = start(&["-j", "--cgroup", &digits.repeat(2)])?;
    for workload in &mut workloads {
        workload.work()?;
    }
    let pids = pids(tool)?;
    ensure!(pids == vec![workloads[0].pid(); 23], "{pids:?}");
    for workload in workloads {
        workload.finish()?;
    }
    folders.iter().try_for_each(fs::remove_dir)?;
    Ok(())
}

/// Returns the only child of a process.
fn child(shell: u32) -> Result<String> {
    let children = fs::read_to_string(format!("/proc/{shell}/task/{shell}/children"))?;
    Ok(children.trim().to_owned())
}

/// Returns the PID of a shell's descendant in the namespace below the initial one.
fn inner(shell: u32, levels: usize) -> Result<String> {
    let mut pid = child(shell)?;
    for _ in 1..levels {
        pid = child(pid.parse()?)?;
    }
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let ids = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))
        .context("no NSpid")?;
    // The line has the PIDs in the initial namespace, in the tool's namespace, and maybe in one more.
    Ok(ids
        .split_whitespace()
        .nth(1)
        .context("not in the namespace")?
        .to_owned())
}

fn numbers_are_those_of_our_namespace() -> Result<()> {
    let script = format!("'{}' -j -n mmap", harness::tool("mmapsnoop").display());
    let mut tool = Tool::spawn(&mut sh(&script, || unshare(CloneFlags::CLONE_NEWPID)))?;
    tool.wait_for_stderr("tracing mmap(2)")?;
    let its_shell = tool.pid();
    let namespace = format!("/proc/{}/ns/pid", child(its_shell)?);

    // One workload runs in the tool's PID namespace, the next one in a namespace below.
    let script = format!("'{}' anon 23", harness::workload("mmap").display());
    let beside = File::open(&namespace)?;
    let mut beside = Workload::spawn(&mut sh(&script, move || {
        setns(&beside, CloneFlags::CLONE_NEWPID)
    }))?;
    let script = format!("'{}' anon 29", harness::workload("mmap").display());
    let below = File::open(&namespace)?;
    let script = format!("unshare -fp {script}");
    let mut below = Workload::spawn(&mut sh(&script, move || {
        setns(&below, CloneFlags::CLONE_NEWPID)
    }))?;
    let mut outside = Workload::start("mmap", &["anon", "31"])?;
    let mut done = Vec::new();
    for workload in [&mut beside, &mut below, &mut outside] {
        done.push(calls(&workload.work()?["calls"])?);
    }

    let beside_pid = inner(beside.pid().parse()?, 1)?;
    let below_pid = inner(below.pid().parse()?, 2)?;
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(child(its_shell)?.parse()?),
        Signal::SIGINT,
    )?;
    let ended = tool.wait()?;
    let rows = json_rows(&ended)?;
    // The mappings that a workload makes before it is ready come first.
    let ends_with = |pid: &str, calls: &[Call]| {
        let of_pid = rows
            .iter()
            .filter(|row| row["pid"].as_u64() == pid.parse().ok());
        let results: Vec<&Value> = of_pid.map(|row| &row["result"]).collect();
        let expected: Vec<&Value> = calls.iter().map(|call| &call.result).collect();
        results.ends_with(&expected)
    };
    ensure!(ends_with(&beside_pid, &done[0]), "{beside_pid}: {ended:?}");
    ensure!(ends_with(&below_pid, &done[1]), "{below_pid}: {ended:?}");
    // The process outside has no PID in the tool's namespace.
    let outside = |call: &Call| {
        rows.iter()
            .any(|row| row["pid"] == 0 && row["result"] == call.result)
    };
    ensure!(done[2].iter().all(outside), "{ended:?}");
    Ok(())
}
