//! Reports in each format, and the options that select from them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use super::{attach, last_report, trace};
use crate::harness::{self, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak":
        json_agrees_with_text [Once],
        folded_weighs_by_bytes [Once],
        sizes_are_filtered,
        sort_and_top [Once],
        age_is_filtered,
        trace_prints_every_call: at_entries,
        show_allocs_lists_every_block [Once],
        reports_come_at_their_interval [Once],
    }
}

/// Returns the frames in the program itself. The program is at the same addresses each time. libc is not, so its
/// frames are omitted.
fn own_frames(frames: &[String]) -> Vec<String> {
    frames
        .iter()
        .filter(|frame| frame.contains("[alloc-nopie]"))
        .cloned()
        .collect()
}

/// Returns the bytes of a stack in JSON, and its frames in the program itself as text reports print them.
fn own_frames_of_json(stack: &Value) -> (u64, Vec<String>) {
    let frames = stack["user_frames"].as_array();
    let text = |frame: &Value| {
        let symbol = frame["symbol"].as_str().unwrap_or_default();
        let offset = frame["offset"].as_u64().unwrap_or_default();
        let module = frame["module"].as_str().unwrap_or_default();
        format!("{symbol}+{offset:#x} [{module}]")
    };
    let frames: Vec<String> = frames
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .map(text)
        .collect();
    (
        stack["bytes"].as_u64().unwrap_or_default(),
        own_frames(&frames),
    )
}

fn json_agrees_with_text() -> Result<()> {
    let json = trace(
        "alloc-nopie",
        &["leak", "31", "4093"],
        &["-j", "-o", "0", "-T", "1000", "60"],
    )?;
    let text = trace(
        "alloc-nopie",
        &["leak", "31", "4093"],
        &["-o", "0", "-T", "1000", "60"],
    )?;
    let mut rows = json.objects()?;
    let unwinding = rows.pop().context("no rows")?;
    ensure!(
        unwinding["type"] == "unwinding" && unwinding["complete"] == unwinding["stacks"],
        "{unwinding}"
    );
    let probes = rows.pop().context("no row of the probes")?;
    ensure!(probes["type"] == "probes", "{probes}");
    let (head, stacks) = rows.split_first().context("no rows")?;
    ensure!(head["type"] == "report" && head["stacks"] == 11, "{head}");
    ensure!(
        head["bytes"] == 10 * 31 * 4093 + 31 * 3 * 4093 && head["allocations"] == 11 * 31,
        "{head}"
    );
    ensure!(
        head["lost"]["events"] == 0 && head["comm"] == "alloc-nopie",
        "{head}"
    );
    let time = head["time"].as_str().context("no time")?;
    ensure!(
        time.len() == "2026-11-20T04:05:06.000007+01:00".len(),
        "{time}"
    );

    let from_json: Vec<(u64, Vec<String>)> = stacks.iter().map(own_frames_of_json).collect();
    let from_text: Vec<(u64, Vec<String>)> = last_report(&text.stdout)?
        .iter()
        .map(|group| (group.bytes, own_frames(&group.frames)))
        .collect();
    let sorted = |mut rows: Vec<(u64, Vec<String>)>| {
        rows.sort();
        rows
    };
    ensure!(
        sorted(from_json.clone()) == sorted(from_text.clone()),
        "{from_json:#?}\n{from_text:#?}"
    );
    Ok(())
}

fn folded_weighs_by_bytes() -> Result<()> {
    let ended = trace("alloc", &["leak", "31", "4093"], &["-f", "-o", "0", "1"])?;
    let mut weights = HashMap::new();
    for line in ended.stdout.lines() {
        let (stack, weight) = line.rsplit_once(' ').with_context(|| line.to_owned())?;
        let frames: Vec<&str> = stack.split(';').collect();
        ensure!(frames[0] == "alloc" && frames.contains(&"main"), "{line}");
        let leaf = frames.last().context("no frames")?;
        weights.insert(leaf.to_string(), weight.parse::<u64>()?);
    }
    ensure!(
        weights.len() == 11,
        "not one line per stack, once: {}",
        ended.stdout
    );
    ensure!(weights["leak_malloc"] == 31 * 4093, "{weights:?}");
    ensure!(weights["moved_mapping"] == 31 * 3 * 4093, "{weights:?}");
    Ok(())
}

fn sizes_are_filtered() -> Result<()> {
    let program = ["realloc", "101"]; // leaves 1000, 100, 70 and 300 bytes
    for (args, expected) in [
        (&["-z", "100"][..], vec![100, 300, 1000]),
        (&["-Z", "299"], vec![70, 100]),
        (&["-z", "100", "-Z", "300"], vec![100, 300]),
    ] {
        let args = [args, &["-o", "0", "-T", "1000", "60"]].concat();
        let groups = last_report(&trace("alloc", &program, &args)?.stdout)?;
        let sizes: Vec<u64> = groups.iter().map(|group| group.bytes / 101).collect();
        ensure!(sizes == expected, "{args:?}: {groups:#?}");
    }
    Ok(())
}

fn sort_and_top() -> Result<()> {
    let ended = trace(
        "alloc",
        &["leak", "31", "4093"],
        &["-o", "0", "-T", "1", "60"],
    )?;
    let groups = last_report(&ended.stdout)?;
    ensure!(
        groups.len() == 1 && groups[0].passes("leak_mremap"),
        "{groups:#?}"
    );
    ensure!(
        ended.stdout.contains("] Top 1 stacks with"),
        "{}",
        ended.stdout
    );
    // The total includes stacks that are not shown.
    let all = trace(
        "alloc",
        &["leak", "31", "4093"],
        &["-o", "0", "-T", "100", "60"],
    )?;
    let groups = last_report(&all.stdout)?;
    let blocks: u64 = groups.iter().map(|group| group.allocations).sum();
    let whole = format!(" in {blocks} blocks of {} stacks, shown 1", groups.len());
    let line = ended
        .stdout
        .lines()
        .find(|line| line.starts_with("\ttotal "));
    let line = line.with_context(|| format!("no total: {}", ended.stdout))?;
    ensure!(groups.len() > 1 && line.contains(&whole), "{line} {whole}");
    ensure!(line.contains("; resident "), "{line}");
    // The stack has the fewest bytes, but by far the most calls.
    let ended = trace(
        "alloc",
        &["threads", "1", "1009", "1009", "1"],
        &["-o", "0", "-T", "1", "--sort", "count", "60"],
    )?;
    let groups = last_report(&ended.stdout)?;
    ensure!(
        groups.len() == 1 && groups[0].allocations == 1009,
        "{groups:#?}"
    );
    Ok(())
}

fn age_is_filtered() -> Result<()> {
    let mut workload = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let tool = attach(&workload, &["-o", "3600000", "60"])?;
    workload.work()?;
    let groups = last_report(&tool.interrupt()?.stdout)?;
    ensure!(groups.is_empty(), "nothing is an hour old: {groups:#?}");
    Ok(())
}

fn trace_prints_every_call() -> Result<()> {
    let ended = trace(
        "alloc",
        &["one", "malloc", "31", "4093"],
        &["-t", "-o", "0", "60"],
    )?;
    let count = |text: &str| {
        ended
            .stdout
            .lines()
            .filter(|line| line.contains(text))
            .count()
    };
    ensure!(
        count(": alloc entered, size = 4093") == 31,
        "{}",
        ended.stdout
    );
    ensure!(
        count(": alloc exited, size = 4093, result = ") == 31,
        "{}",
        ended.stdout
    );
    let ended = trace("alloc", &["big", "53", "1000003"], &["-t", "-o", "0", "60"])?;
    let freed = ended
        .stdout
        .lines()
        .filter(|line| line.contains(": free entered, address = "))
        .count();
    ensure!(freed == 53, "{}", ended.stdout);
    Ok(())
}

fn show_allocs_lists_every_block() -> Result<()> {
    let ended = trace(
        "alloc",
        &["one", "malloc", "31", "4093"],
        &["-a", "-o", "0", "60"],
    )?;
    let mut addresses: Vec<&str> = ended
        .stdout
        .lines()
        .filter_map(|line| line.strip_prefix("\taddr = ")?.strip_suffix(" size = 4093"))
        .collect();
    addresses.sort_unstable();
    addresses.dedup();
    ensure!(addresses.len() == 31, "{}", ended.stdout);
    Ok(())
}

fn reports_come_at_their_interval() -> Result<()> {
    let workload = Workload::start("alloc", &["hold"])?;
    let tool = attach(&workload, &["1", "3"])?;
    let start = Instant::now();
    let ended = tool.wait()?;
    let took = start.elapsed();
    let reports = ended
        .stdout
        .matches("stacks with outstanding allocations:")
        .count();
    ensure!(ended.status.success() && reports == 3, "{ended:?}");
    ensure!(
        took > Duration::from_millis(2500),
        "three seconds took {took:?}"
    );
    ensure!(ended.stdout.starts_with('['), "{}", ended.stdout);
    ensure!(
        &ended.stdout[9..42] == "] Top 10 stacks with outstanding ",
        "{}",
        ended.stdout
    );
    Ok(())
}
