//! memtriage --who: stacks of the processes that the findings name.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use super::{full_group, of_type, triage};
use crate::harness::{self, Tool, Workload, tool, workload};
use crate::pressure::{Group, Swap};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "memtriage":
        who_grows_is_told_by_its_stacks [Guest],
        who_reclaims_is_told_by_its_stacks [Guest],
        what_cannot_be_asked_is_told,
        who_is_asked_until_a_signal_comes,
    }
}

/// Returns the answer of --who for a rule.
pub(crate) fn answer<'a>(objects: &'a [Value], rule: &str) -> Result<&'a Value> {
    let mut answers = of_type(objects, "who").into_iter();
    let is_for = |answer: &&Value| {
        let rules = answer["rules"].as_array();
        rules.is_some_and(|rules| rules.iter().any(|other| other == rule))
    };
    let answer = answers.find(is_for);
    answer.with_context(|| format!("no answer for {rule}: {objects:#?}"))
}

/// Returns the sum of a tool's stacks. The largest stack must contain this function.
pub(crate) fn sum_by(answer: &Value, function: &str) -> Result<u64> {
    ensure!(answer["error"].is_null(), "{answer}");
    let stacks = answer["stacks"].as_array().context("no stacks")?;
    ensure!((1..=3).contains(&stacks.len()), "{answer}");
    let frames = stacks[0]["frames"].as_array().context("no frames")?;
    ensure!(frames.iter().any(|frame| frame == function), "{answer}");
    let shown: u64 = stacks
        .iter()
        .filter_map(|stack| stack["value"].as_u64())
        .sum();
    let sum = answer["sum"].as_u64().context("no sum")?;
    ensure!(0 < shown && shown <= sum, "{answer}");
    Ok(sum)
}

/// From the finding "memory runs out" to the function that takes the memory, in one command.
fn who_grows_is_told_by_its_stacks() -> Result<()> {
    const MOST: u64 = 499;
    let mut grow = Workload::start("grow", &["23", &MOST.to_string()])?;
    grow.go()?;
    let (objects, ended) = triage(&["--who", "2"])?;
    let answer = answer(&objects, "growing").with_context(|| format!("{ended:?}"))?;
    let rules = answer["rules"].as_array().context("no rules")?;
    ensure!(
        rules.iter().any(|rule| rule == "running-out"),
        "{objects:#?}"
    );
    let command = format!("faults --bytes -p {} -d 2", grow.pid());
    ensure!(answer["command"] == command, "{answer}");
    ensure!(answer["unit"] == "bytes", "{answer}");
    let bytes = sum_by(answer, "take_more")?;
    ensure!(bytes < MOST << 20, "{answer}");
    ensure!(ended.status.code() == Some(3), "{ended:?}");
    Ok(())
}

/// From the finding "a cgroup is at its limit" to the code that waits for memory.
fn who_reclaims_is_told_by_its_stacks() -> Result<()> {
    let _swap = Swap::on("128M")?;
    let group = Group::new("memtools-triage-who", 16 << 20)?;
    let mut thrash =
        Workload::spawn(&mut group.command(&workload("thrash"), &["6007", "1000003"]))?;
    thrash.go()?;
    // An emulated guest takes long to fill the cgroup, and memtriage looks for a short time.
    harness::eventually(
        "the cgroup is at its limit",
        || Ok(group.limit_hits()? > 10),
    )?;
    let (objects, ended) = triage(&["--who", "2"])?;
    let answer = answer(&objects, "cgroup-limit").with_context(|| format!("{ended:?}"))?;
    ensure!(
        answer["command"] == "drsnoop --memcg --stack -d 2",
        "{answer}"
    );
    ensure!(answer["unit"] == "nanoseconds", "{answer}");
    sum_by(answer, "write_pages")?;
    Ok(())
}

/// memtriage runs without the other tools in its directory.
fn what_cannot_be_asked_is_told() -> Result<()> {
    let _full = full_group("memtools-triage-alone")?;
    let folder = harness::scratch()?;
    let alone = folder.path().join("memtriage-mt");
    harness::copy(&tool("memtriage"), &alone)?;
    let output = Command::new(&alone).args(["--who", "60"]).output()?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    ensure!(stdout.contains("\nwho   "), "{output:?}");
    ensure!(
        stdout.contains("      there is no faults beside memtriage, in /"),
        "{output:?}"
    );
    ensure!(output.status.code() == Some(3), "{output:?}");
    Ok(())
}

fn who_is_asked_until_a_signal_comes() -> Result<()> {
    let _full = full_group("memtools-triage-signal")?;
    let mut tool = Tool::start("memtriage", &["-j", "--who", "86400"])?;
    tool.wait_for_stderr("Ctrl-C to end")?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.code() == Some(3), "{ended:?}");
    ensure!(ended.stdout.contains("{\"type\":\"who\","), "{ended:?}");
    Ok(())
}
