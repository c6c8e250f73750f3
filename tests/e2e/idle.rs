//! heapscan --idle: unused memory, found by page tables, against what a program uses.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{self, Tool, ToolOutput, Workload};
use crate::pressure::{self, Group};

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "heapscan::idle":
        what_nobody_uses_is_told_by_block,
        what_nobody_uses_is_told_beside_a_trace,
        huge_pages_are_used_as_a_whole,
        a_page_that_is_used_all_the_time_is_never_idle,
        what_ends_meanwhile_has_no_verdict [Once],
        reclaim_is_told [Guest, Disk],
    }
}

/// Numbers of blocks that are never used, used on request, and used all the time.
const BLOCKS: [u64; 3] = [1009, 307, 211];
/// Sizes of these blocks in bytes, as the program requests them.
const BYTES: [u64; 3] = [8000, 9000, 10000];

fn start(pages: &str) -> Result<Workload> {
    let [cold, warm, hot] = BLOCKS.map(|blocks| blocks.to_string());
    Workload::start("idle", &[&cold, &warm, &hot, pages])
}

/// Starts heapscan on the workload, to watch it for `seconds` seconds. The watch has begun when the function returns.
fn watch(workload: &Workload, seconds: &str, options: &[&str]) -> Result<Tool> {
    let pid = workload.pid();
    let args = [
        "-p", &pid, "--leaks", "--roots", "--idle", seconds, "-T", "1000",
    ];
    let args = [&args[..], &["--max-pause", "60000"], options].concat();
    let mut tool = Tool::start("heapscan", &args)?;
    tool.wait_for_stderr("monitoring accesses of process")?;
    Ok(tool)
}

/// Returns the number of idle blocks of each size, among the held blocks.
fn idle_blocks(rows: &[Value]) -> Result<[u64; 3]> {
    let mut idle = [0; 3];
    for ((idle, bytes), blocks) in idle.iter_mut().zip(BYTES).zip(BLOCKS) {
        let is_it = |row: &&Value| {
            let size = row["size_bytes"].as_u64().unwrap_or_default();
            row["type"] == "reachable" && (bytes..bytes + 24).contains(&size)
        };
        let row = rows.iter().find(is_it);
        let row = row.with_context(|| format!("nothing of {bytes} bytes: {rows:?}"))?;
        ensure!(row["blocks"] == blocks, "{row}");
        *idle = row["idle_blocks"].as_u64().context("not watched")?;
        let size = row["size_bytes"].as_u64().unwrap_or_default();
        ensure!(row["idle_bytes"] == *idle * size, "{row}");
    }
    Ok(idle)
}

/// Returns the rows of a verdict. The verdict must have taken two images, because one block is lost.
fn rows(ended: &ToolOutput) -> Result<Vec<Value>> {
    let rows = ended.objects()?;
    let verdict = rows.first().context("no verdict")?;
    let images = verdict["pauses_us"].as_array().map(Vec::len);
    ensure!(images == Some(2), "{verdict}");
    ensure!(verdict["unreachable"]["blocks"] == 1, "{verdict}");
    Ok(rows)
}

fn what_nobody_uses_is_told_by_block() -> Result<()> {
    let mut workload = start("small")?;
    let tool = watch(&workload, "2", &["-j"])?;
    let facts = workload.work()?;
    ensure!(facts["huge_kb"] == "0", "{facts:?}");
    let rows = rows(&tool.wait()?)?;
    ensure!(idle_blocks(&rows)? == [BLOCKS[0], 0, 0], "{rows:?}");

    let of_all = rows.iter().find(|row| row["type"] == "idle");
    let of_all = of_all.context("no sum")?;
    ensure!(of_all["watched_ms"].as_u64() >= Some(2000), "{of_all}");
    ensure!(of_all["blocks"].as_u64() >= Some(BLOCKS[0]), "{of_all}");
    ensure!(of_all["cpus_not_reached"] == 0, "{of_all}");

    // The blocks were used again before this look, and not during it.
    let tool = watch(&workload, "1", &[])?;
    let text = tool.wait()?.stdout;
    for (blocks, bytes, holder) in [
        ("1,009", "8,080,072", "idle`blocks"),
        ("307", "2,763,000", "idle`blocks"),
    ] {
        let line = format!(
            "\t{bytes} bytes in {blocks} blocks reachable, {bytes} bytes in {blocks} blocks idle: "
        );
        let line = text.lines().find(|found| found.starts_with(&line));
        let line = line.with_context(|| format!("no {blocks} blocks: {text}"))?;
        ensure!(line.contains(holder), "{line}");
    }
    let hot = text
        .lines()
        .find(|line| line.contains("211 blocks reachable"));
    ensure!(hot.is_some_and(|line| !line.contains("idle:")), "{text}");
    ensure!(workload.finish()?.success(), "it did not live on");
    Ok(())
}

/// The watch covers the end of a trace: blocks that were used only before it are idle. After a verdict in
/// between, the watch begins anew.
fn what_nobody_uses_is_told_beside_a_trace() -> Result<()> {
    let traced = |workload: &Workload, interval: &str, idle: &str| -> Result<Tool> {
        let args = [
            "-jp",
            &workload.pid(),
            "--verdict",
            interval,
            "1",
            "--idle",
            idle,
        ];
        let args = [&args[..], &["-T", "1000", "--max-pause", "60000"]].concat();
        let mut tool = Tool::start("memleak", &args)?;
        tool.wait_for_stderr("monitoring accesses of process")?;
        Ok(tool)
    };
    let mut workload = start("small")?;
    let tool = traced(&workload, "7", "1")?;
    workload.work()?;
    let all = rows(&tool.wait()?)?;
    ensure!(
        idle_blocks(&all)? == [BLOCKS[0], BLOCKS[1], 0],
        "at the end: {all:?}"
    );
    let idle = all.iter().find(|row| row["type"] == "idle");
    let watched = idle.and_then(|row| row["watched_ms"].as_u64());
    // On a busy machine, the time for the images is added.
    ensure!(watched >= Some(1000), "{idle:?}");

    let mut workload = start("small")?;
    let mut tool = traced(&workload, "1000", "1000")?;
    workload.work()?;
    tool.signal(Signal::SIGUSR1)?;
    tool.wait_for_output("\"verdict\"")?;
    let all = rows(&tool.interrupt()?)?;
    let is_verdict = |row: &Value| row["type"] == "verdict";
    let last = all.iter().rposition(is_verdict).context("no verdict")?;
    let (first, last) = all.split_at(last);
    ensure!(
        first.iter().filter(|row| is_verdict(row)).count() == 1,
        "{all:?}"
    );
    ensure!(
        idle_blocks(first)? == [BLOCKS[0], 0, 0],
        "at first: {first:?}"
    );
    ensure!(
        idle_blocks(last)? == [BLOCKS[0], BLOCKS[1], 0],
        "anew: {last:?}"
    );
    Ok(())
}

/// The copy for the first image marks huge pages as used, by heapscan. Where other programs clear these marks, as
/// DAMON does on some hosts, all huge pages count as used.
fn huge_pages_are_used_as_a_whole() -> Result<()> {
    let mut workload = start("huge")?;
    let tool = watch(&workload, "1", &["-j"])?;
    let facts = workload.work()?;
    let huge: u64 = facts["huge_kb"].parse()?;
    ensure!(huge >= 8 << 10, "{facts:?}");
    let rows = rows(&tool.wait()?)?;
    let is_judged = rows.iter().any(|row| row["huge_pages_judged"] == true);
    ensure!(is_judged || damon_runs()?, "{rows:?}");
    let cold = if is_judged { BLOCKS[0] } else { 0 };
    ensure!(idle_blocks(&rows)? == [cold, 0, 0], "{rows:?}");
    Ok(())
}

/// Whether a kernel thread of DAMON runs, which samples memory and clears accessed bits.
fn damon_runs() -> Result<bool> {
    let names = fs::read_dir("/proc")?
        .flatten()
        .map(|entry| entry.path().join("comm"));
    let mut names = names.filter_map(|path| fs::read_to_string(path).ok());
    Ok(names.any(|name| name.starts_with("kdamond")))
}

/// The CPU of the thread that uses the pages has them in its TLB, which must be flushed.
fn a_page_that_is_used_all_the_time_is_never_idle() -> Result<()> {
    // How often the processor writes the mark of a page back does not depend on the kernel, and a guest is slow.
    let rounds = if harness::in_guest() { 2 } else { 11 };
    let workload = start("small")?;
    for _ in 0..rounds {
        let tool = watch(&workload, "0.1", &["-j"])?;
        let rows = rows(&tool.wait()?)?;
        let [cold, _, hot] = idle_blocks(&rows)?;
        ensure!((cold, hot) == (BLOCKS[0], 0), "{rows:?}");
    }
    Ok(())
}

fn what_ends_meanwhile_has_no_verdict() -> Result<()> {
    let mut workload = start("small")?;
    let pid = workload.pid();
    let tool = watch(&workload, "600", &[])?;
    workload.work()?;
    ensure!(workload.finish()?.success(), "it did not live on");
    let ended = tool.wait()?;
    let why = format!("no verdict: process {pid} ended");
    ensure!(
        ended.status.code() == Some(1) && ended.stderr.contains(&why),
        "{ended:?}"
    );
    // A user who does not want to wait gets the verdict at once, by an interrupt.
    let workload = start("small")?;
    let tool = watch(&workload, "600", &["-j"])?;
    thread::sleep(Duration::from_millis(200));
    let rows = rows(&tool.interrupt()?)?;
    ensure!(idle_blocks(&rows)?[0] == BLOCKS[0], "{rows:?}");
    Ok(())
}

/// Reclaim clears the accessed bits of the pages that it scans, so heapscan knows less.
fn reclaim_is_told() -> Result<()> {
    let workload = start("small")?;
    let folder = pressure::folder_on_disk()?;
    let file = folder.path().join("file").display().to_string();
    let group = Group::new("memtools-idle", 32 << 20)?;
    let mut reader = Workload::start("reread", &[&file, "20011"])?;
    group.set("cgroup.procs", &reader.pid())?;
    let tool = watch(&workload, "600", &["-j"])?;
    reader.work()?;
    let rows = rows(&tool.interrupt()?)?;
    let idle = rows.iter().find(|row| row["type"] == "idle");
    let scanned = idle.and_then(|row| row["reclaim_scanned"].as_u64());
    ensure!(scanned >= Some(20011 - (32 << 8)), "{idle:?}");
    Ok(())
}
