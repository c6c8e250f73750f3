//! How a run begins and ends, whatever happens to the tool, its command, its target and its reader. The tools
//! share this code: those that start here are tested in place of all, except where each tool is named.

mod commands;
mod endings;
mod privileges;

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::mount::{MsFlags, mount, umount};
use nix::sched::{CloneFlags, unshare};

use crate::harness::{self, Cgroup, Tool, Workload, tool, workload};

/// Tools that trace processes and need nothing of the kernel but tracepoints and counters.
const TOOLS: [&str; 9] = [
    "brkstack",
    "drsnoop",
    "faults",
    "ffaults",
    "memleak",
    "mmapsnoop",
    "oomkill",
    "shmsnoop",
    "vmscan",
];

pub(crate) fn tests() -> Vec<Trial> {
    let own = harness::tests! { "running":
        every_tool_runs_where_tracefs_is_not_mounted,
        children_of_named_processes_are_traced,
        hundreds_of_processes,
        a_cgroup_can_be_named_as_it_is_printed,
        time_is_that_of_the_place [Host],
    };
    [
        own,
        commands::tests(),
        endings::tests(),
        privileges::tests(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Returns the state of a process, such as `T` for stopped. None if the process has ended or is a zombie.
fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let state = stat.rsplit(") ").next()?.chars().next()?;
    (state != 'Z').then_some(state)
}

fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let list = list.unwrap_or_default();
    list.split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

/// As on a machine on which no program has mounted tracefs yet.
fn every_tool_runs_where_tracefs_is_not_mounted() -> Result<()> {
    let hfaults = ("hfaults", &["--madvise"][..]);
    // The program allocates, and ends because its standard input is empty.
    let program = format!("{} hold", workload("alloc").display());
    for (name, args) in TOOLS
        .map(|name| (name, &[][..]))
        .into_iter()
        .chain([hfaults])
    {
        let mut command = Command::new(tool(name));
        command.args(["-c", &program]).args(args);
        // SAFETY: system calls between fork and exec.
        unsafe {
            command.pre_exec(|| {
                unshare(CloneFlags::CLONE_NEWNS)?;
                let none = None::<&str>;
                mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
                while umount("/sys/kernel/tracing").is_ok() {}
                while umount("/sys/kernel/debug").is_ok() {}
                Ok(())
            });
        }
        let output = command.output()?;
        ensure!(output.status.success(), "{name}: {output:?}");
    }
    Ok(())
}

fn children_of_named_processes_are_traced() -> Result<()> {
    let mut parent = Workload::start("forktree", &["2", "2", "11"])?;
    let pid = parent.pid();
    let mut tool = Tool::start("faults", &["--by-process", "--children", "-p", &pid])?;
    tool.wait_for_stderr("tracing page faults")?;
    parent.work()?;
    let ended = tool.interrupt()?;
    let rows = ended
        .stdout
        .lines()
        .filter(|line| line.contains("forktree"));
    // The first process has two children, and each of these has two.
    ensure!(rows.count() == 7, "{ended:?}");

    let ended = harness::run("faults", &["--children"])?;
    ensure!(ended.status.code() == Some(2), "{ended:?}");
    ensure!(ended.stderr.contains("-p or -c"), "{ended:?}");
    Ok(())
}

/// Starts brkstack on a workload. When the function returns, the workload has made its 23 calls.
fn brkstack(args: &[&str]) -> Result<(Workload, Tool)> {
    let mut workload = Workload::start("brk", &["23"])?;
    let pid = workload.pid();
    let mut tool = Tool::start("brkstack", &[&["-f", "-p", &pid], args].concat())?;
    tool.wait_for_stderr("tracing brk(2)")?;
    workload.work()?;
    Ok((workload, tool))
}

/// Returns the number of calls in a folded report.
fn calls(report: &str) -> u64 {
    let lines = report.lines().filter(|line| line.contains("grow_heap"));
    lines
        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok())
        .sum()
}

/// Hundreds of processes are selected. The one among them that faults is listed, and no other process.
fn hundreds_of_processes() -> Result<()> {
    let mut sleepers = Vec::new();
    for _ in 0..211 {
        let sleeper = Command::new("sleep").arg("3600").spawn();
        sleepers.push(sleeper.context("no sleep")?);
    }
    let result = (|| {
        let mut named = Workload::start("minor", &["23"])?;
        let mut other = Workload::start("minor", &["29"])?;
        let mut pids: Vec<String> = sleepers
            .iter()
            .map(|child| child.id().to_string())
            .collect();
        pids.insert(101, named.pid());
        let mut tool = Tool::start("faults", &["--by-process", "-p", &pids.join(",")])?;
        tool.wait_for_stderr("tracing page faults")?;
        named.work()?;
        other.work()?;
        let ended = tool.interrupt()?;
        let rows: Vec<&str> = ended.stdout.lines().skip(1).collect();
        ensure!(
            rows.len() == 1 && rows[0].starts_with(&named.pid()),
            "{ended:?}"
        );
        Ok(())
    })();
    for mut sleeper in sleepers {
        sleeper.kill()?;
        sleeper.wait()?;
    }
    result
}

fn a_cgroup_can_be_named_as_it_is_printed() -> Result<()> {
    let cgroup = Cgroup::new()?;
    let mut inside = Workload::start("minor", &["23"])?;
    let mut outside = Workload::start("minor", &["29"])?;
    cgroup.add(&inside.pid())?;
    let name = cgroup.path().file_name().context("no name")?.display();
    let mut tool = Tool::start("faults", &["--by-process", "--cgroup", &format!("/{name}")])?;
    tool.wait_for_stderr("tracing page faults")?;
    inside.work()?;
    outside.work()?;
    let ended = tool.interrupt()?;
    let rows: Vec<&str> = ended.stdout.lines().skip(1).collect();
    ensure!(
        rows.len() == 1 && rows[0].starts_with(&inside.pid()),
        "{ended:?}"
    );
    Ok(())
}

fn time_is_that_of_the_place() -> Result<()> {
    let mut command = Command::new(tool("vmscan"));
    command.args(["-j", "0.01", "1"]).env("TZ", "Asia/Tokyo");
    let ended = Tool::spawn(command.stdin(Stdio::null()))?.wait()?;
    ensure!(ended.stdout.contains("+09:00\""), "{ended:?}");
    Ok(())
}

/// Returns a command by which the user nobody runs a program with these capabilities.
pub(crate) fn by_nobody(capabilities: &str, program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    // The ids of tracepoints are readable for the group root.
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    for set in ["--inh-caps", "--ambient-caps", "--bounding-set"] {
        command.arg(format!("{set}=-all{capabilities}"));
    }
    command.arg("--").arg(program);
    command
}
