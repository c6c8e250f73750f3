//! memleak's verdict on a command at its exit. The command must run and end as it would alone.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{self, Tool, ToolOutput};
use crate::heap_pause::tracer_and_state;
use crate::verdict_traced::{expect_what_was_made, number, sums};

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak::verdict_exit":
        all_stacks_are_told_at_the_exit,
        a_leak_is_an_exit_status,
        a_command_ends_as_it_would_alone,
        a_shell_gets_its_signals [Host],
        threads_hold_what_they_have,
        a_command_outlives_memleak [Once],
    }
}

/// Runs the workload under memleak, with arguments for each of them.
fn at_exit(workload: &str, args: &[&str]) -> Result<ToolOutput> {
    let path = harness::workload("forget");
    let command = format!("{} {workload}", path.display());
    let options = ["-jT", "1000", "--verdict", "-c", &command];
    harness::run("memleak", &[&options[..], args].concat())
}

/// Expects that the verdict covers the workload's work, and its blocks from before that.
fn expect_all(rows: &[Value]) -> Result<()> {
    expect_what_was_made(rows)?;
    for (kind, expected) in [("leak", [7, 6300, 0, 0]), ("reachable", [11, 11_000, 0, 0])] {
        let found = sums(rows, kind, "early()");
        ensure!(found == expected, "{found:?}: {rows:?}");
    }
    let verdict = rows.iter().find(|row| row["type"] == "verdict");
    let verdict = verdict.with_context(|| format!("no verdict: {rows:?}"))?;
    let classes = [
        "unreachable",
        "unreachable_via",
        "undecided",
        "reachable",
        "interior_only",
    ];
    let blocks = classes.map(|class| number(&verdict[class], "blocks"));
    let all: u64 = blocks.iter().sum();
    ensure!(verdict["at_exit"] == true, "{verdict}");
    // Blocks are traced from the very first one on.
    ensure!(number(verdict, "traced_blocks") == all, "{verdict}");
    ensure!(blocks[..3] == [101 + 1 + 5 + 7, 18 + 5, 0], "{verdict}");
    Ok(())
}

fn all_stacks_are_told_at_the_exit() -> Result<()> {
    let ended = at_exit("", &[])?;
    ensure!(ended.status.code() == Some(0), "{ended:?}");
    expect_all(&ended.objects_among_lines()?)
}

fn a_leak_is_an_exit_status() -> Result<()> {
    let fails = ["--fail-on", "unreachable"];
    for (workload, args, status) in [
        ("", &fails[..], 3),
        // The status of a command that has failed by itself takes precedence.
        ("'' 7", &fails[..], 7),
        ("'' 7", &[], 7),
    ] {
        let ended = at_exit(workload, args)?;
        ensure!(ended.status.code() == Some(status), "{workload}: {ended:?}");
    }
    Ok(())
}

fn a_command_ends_as_it_would_alone() -> Result<()> {
    for (workload, status) in [
        ("15", 128 + 15),
        ("6", 128 + 6),
        ("11", 128 + 11),
        ("exec 5", 5),
        ("fork 9", 9),
    ] {
        let ended = at_exit(workload, &[])?;
        ensure!(ended.status.code() == Some(status), "{workload}: {ended:?}");
        expect_all(&ended.objects_among_lines()?).with_context(|| workload.to_owned())?;
    }
    let ended = at_exit("9", &[])?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    ensure!(ended.stderr.contains("no verdict: process "), "{ended:?}");
    Ok(())
}

fn a_shell_gets_its_signals() -> Result<()> {
    let args = ["-T", "1", "--verdict", "--fail-on", "unreachable", "-c"];
    let ended = harness::run("memleak", &[&args[..], &["true"]].concat())?;
    ensure!(ended.status.code() == Some(0), "{ended:?}");
    ensure!(ended.stdout.contains("verdict on true (pid "), "{ended:?}");
    for (script, says, status) in [
        (
            "trap \"echo trapped\" USR1; kill -USR1 $$; exit 5",
            "trapped",
            5,
        ),
        (
            "(sleep 0.3; kill -CONT $$) & kill -STOP $$; echo woken; exit 4",
            "woken",
            4,
        ),
        (
            "sleep 0.01 & wait; exec sh -c \"echo other; exit 6\"",
            "other",
            6,
        ),
    ] {
        let command = format!("sh -c '{script}'");
        let ended = harness::run("memleak", &["--verdict", "-c", &command])?;
        ensure!(ended.status.code() == Some(status), "{script}: {ended:?}");
        ensure!(ended.stdout.contains(says), "{script}: {ended:?}");
        ensure!(
            ended.stdout.contains("verdict on sh (pid "),
            "{script}: {ended:?}"
        );
    }
    Ok(())
}

fn threads_hold_what_they_have() -> Result<()> {
    let ended = at_exit("threads", &[])?;
    ensure!(ended.status.code() == Some(0), "{ended:?}");
    let rows = ended.objects_among_lines()?;
    expect_all(&rows)?;
    let is_it = |row: &&Value| number(row, "size_bytes") == 600;
    let held: Vec<_> = rows.iter().filter(is_it).collect();
    let of = |function, root: &str| {
        let blocks = held.iter().filter(|row| {
            let found = sums(std::slice::from_ref(**row), "reachable", function);
            let holder = row["root"].as_str().unwrap_or_default();
            found[0] > 0 && holder.starts_with(root)
        });
        blocks.map(|row| number(row, "blocks")).sum::<u64>()
    };
    ensure!(
        of("hold_in_stack(void*)", "stack of thread ") == 2,
        "{held:?}"
    );
    ensure!(
        of(
            "hold_in_register(void*)",
            &format!("register {} of ", harness::arch::HOLDING_REGISTER)
        ) == 1,
        "{held:?}"
    );
    Ok(())
}

fn a_command_outlives_memleak() -> Result<()> {
    let path = harness::workload("forget");
    let command = path.display().to_string();
    let mut memleak = Command::new(harness::tool("memleak"));
    memleak
        .args(["--verdict", "-c", &command])
        .stdin(Stdio::piped());
    let mut tool = Tool::spawn(&mut memleak)?;
    tool.wait_for_output("ready ")?;
    let stdout = tool.stdout();
    let pid = stdout.lines().find_map(|line| line.strip_prefix("ready "));
    let pid = pid.context("not ready")?.trim().to_owned();
    let (before, _) = tracer_and_state(&pid).context("it has gone")?;
    ensure!(before != "0", "nobody traces it");
    tool.signal(Signal::SIGKILL)?;
    harness::eventually("the command lives on", || {
        let (tracer, state) = tracer_and_state(&pid).context("it went with memleak")?;
        Ok(tracer == "0" && state.starts_with('S'))
    })?;
    // The test can end the command, by closing its input.
    drop(tool);
    harness::eventually("the command exits", || {
        let now = tracer_and_state(&pid);
        Ok(now.ok().is_none_or(|(_, state)| state.starts_with('Z')))
    })
}
