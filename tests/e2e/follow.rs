//! `-c COMMAND` against commands that start other programs in every way, beside processes that the command has
//! not started. All tools share this code; faults and brkstack are tested in place of all.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{self, Tool, ToolOutput, Workload, workload};

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "follow":
        children_of_children_are_traced_and_no_others,
        a_process_that_takes_the_place_of_another_is_not,
        none_is_lost_at_exec,
        what_is_left_behind_does_not_keep_it,
    }
}

/// Runs a tool that traces a command and ends with it.
fn trace(tool: &str, options: &[&str], command: &str) -> Result<ToolOutput> {
    let ended = harness::run(tool, &[options, &["-c", command]].concat())?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(!ended.stderr.contains("lost"), "{ended:?}");
    Ok(ended)
}

/// Returns the sum of the folded lines with this root and this innermost frame. The output has the command's own
/// lines, too.
fn weight(ended: &ToolOutput, root: &str, leaf: &str) -> u64 {
    let lines = ended.stdout.lines();
    lines
        .filter_map(|line| line.strip_prefix(root)?.rsplit_once(' '))
        .filter(|(stack, _)| stack.starts_with(';') && stack.ends_with(&format!(";{leaf}")))
        .filter_map(|(_, weight)| weight.parse::<u64>().ok())
        .sum()
}

fn children_of_children_are_traced_and_no_others() -> Result<()> {
    let mut bystander = Workload::start("forktree", &["2", "2", "11"])?;
    let command = format!("'{}' 3 3 11", workload("forktree").display());
    let mut tool = Tool::start("faults", &["--by-process", "-j", "-c", &command])?;
    tool.wait_for_stderr("tracing page faults")?;
    bystander.work()?;
    let ended = tool.wait()?;
    ensure!(ended.status.success(), "{ended:?}");

    let mut counted = BTreeSet::new();
    for row in ended.objects_among_lines()? {
        // Before exec, the process has our tool's name.
        if row["comm"] == "forktree" {
            ensure!(row["faults"].as_u64() >= Some(11), "{row}");
            counted.insert(row["pid"].to_string());
        }
    }
    let facts = ended.stdout.split_whitespace();
    let pids = facts
        .clone()
        .find_map(|fact| fact.strip_prefix("pids="))
        .context("no pids")?;
    let mut first = facts.skip_while(|word| *word != "ready").skip(1);
    let mut expected: BTreeSet<String> = pids.split(',').map(str::to_owned).collect();
    expected.insert(first.next().context("no pid")?.to_owned());
    ensure!(
        expected.len() == 40 && counted == expected,
        "{counted:?}, not {expected:?}"
    );

    let ended = trace("faults", &["-f"], &command)?;
    ensure!(
        weight(&ended, "forktree", "write_pages") == 40 * 11,
        "{ended:?}"
    );
    Ok(())
}

/// The kernel reuses a task's identity (its task_struct) for other processes, on the same CPU first. Such
/// processes must not be counted unless the command has started them.
fn a_process_that_takes_the_place_of_another_is_not() -> Result<()> {
    let _one_cpu = harness::OneCpu::enter()?;
    let minor = workload("minor").display().to_string();
    let folder = harness::scratch()?;
    let file = |name: &str| folder.path().join(name);
    let [started, go] = ["started", "go"].map(file);
    let script = format!(
        "i=0; while [ $i -lt 61 ]; do '{minor}' 3; i=$((i+1)); done
         : >{}
         until [ -e {} ]; do :; done",
        started.display(),
        go.display()
    );
    fs::write(file("script"), script)?;
    let command = format!("sh {}", file("script").display());
    let mut tool = Tool::start("faults", &["--by-process", "-c", &command])?;
    while !started.exists() {
        ensure!(!tool.has_ended()?, "it has ended");
        thread::sleep(Duration::from_millis(5));
    }
    for _ in 0..101 {
        let status = Command::new(&minor)
            .arg("5")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status()?;
        ensure!(status.success(), "{status}");
    }
    fs::write(go, "")?;
    let ended = tool.wait()?;
    ensure!(ended.status.success(), "{ended:?}");
    let rows = ended.stdout.lines();
    let counted = rows.filter(|line| line.split_whitespace().nth(1) == Some("minor"));
    ensure!(counted.count() == 61, "{ended:?}");
    Ok(())
}

fn none_is_lost_at_exec() -> Result<()> {
    let (launch, brk) = (workload("launch"), workload("brk"));
    for how in ["thread", "spawn", "orphan"] {
        let command = format!("'{}' {how} '{}' 23 7", launch.display(), brk.display());
        let ended = trace("brkstack", &["-f"], &command)?;
        let calls = ["grow_heap", "shrink_heap"].map(|leaf| weight(&ended, "brk", leaf));
        ensure!(calls == [23, 7], "{how}: {ended:?}");
    }
    let brk = brk.display();
    let command = format!("sh -c '\"{brk}\" 23 & \"{brk}\" 31 | cat; (exec \"{brk}\" 37 3); wait'");
    let ended = trace("brkstack", &["-f"], &command)?;
    let calls = ["grow_heap", "shrink_heap"].map(|leaf| weight(&ended, "brk", leaf));
    ensure!(calls == [91, 3], "{ended:?}");
    Ok(())
}

/// The trace ends with the command, and passes its exit status on.
fn what_is_left_behind_does_not_keep_it() -> Result<()> {
    let command = "sh -c 'sleep 61 >/dev/null 2>&1 & echo left $!; exit 7'";
    let ended = harness::run("faults", &["-f", "-c", command])?;
    let left = ended
        .stdout
        .lines()
        .find_map(|line| line.strip_prefix("left "));
    let left = left.with_context(|| format!("{ended:?}"))?.parse()?;
    kill(Pid::from_raw(left), Signal::SIGKILL).context("it was not left to run")?;
    ensure!(ended.status.code() == Some(7), "{ended:?}");
    Ok(())
}
