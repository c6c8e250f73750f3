//! heapscan --leaks and --roots: lost memory, as heapscan finds it in copies of a process, against what a program has lost
//! and kept.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use crate::harness::{self, Python, Tool, Workload};

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "heapscan::verdict":
        blocks_are_lost_or_held_as_the_program_made_them,
        a_leak_fails_a_test_that_wants_none,
        what_is_not_known_as_a_whole_is_not_judged [Once],
        pages_that_are_absent_hold_blocks,
        a_database_under_load_has_no_leak [Host],
        a_database_with_jemalloc_has_no_leak [Host],
        blocks_of_jemalloc_are_judged [Once],
        blocks_that_another_allocators_hold_are_not_lost [Once],
        objects_of_python_are_judged_by_their_counts [Pythons],
        ten_million_blocks_are_judged_in_bounded_memory [Once],
    }
}

/// Returns the options for a verdict on a process, however long its copies take. `flag` is -p, or -jp for JSON.
pub(crate) fn on<'a>(flag: &'a str, pid: &'a str) -> [&'a str; 6] {
    [flag, pid, "--leaks", "--roots", "--max-pause", "60000"]
}

fn judge(pid: &str, args: &[&str]) -> Result<Vec<Value>> {
    let args = [&on("-jp", pid)[..], &["-T", "1000"], args].concat();
    harness::run("heapscan", &args)?.objects()
}

/// Whether a row is about blocks for which `bytes` bytes were requested. For some requests, glibc's blocks have 8
/// bytes more.
fn is_of(row: &Value, kind: &str, bytes: u64) -> bool {
    let size = row["size_bytes"].as_u64().unwrap_or_default();
    row["type"] == kind && (bytes..bytes + 24).contains(&size)
}

/// Returns the number of blocks of this size in the rows of a type, and the number of further blocks that are
/// lost with them.
fn blocks(rows: &[Value], kind: &str, bytes: u64) -> (u64, u64) {
    let number = |row: &Value, field: &str| row[field].as_u64().unwrap_or_default();
    let rows = rows.iter().filter(|row| is_of(row, kind, bytes));
    rows.fold((0, 0), |(blocks, via), row| {
        (
            blocks + number(row, "blocks"),
            via + number(row, "via_blocks"),
        )
    })
}

fn blocks_are_lost_or_held_as_the_program_made_them() -> Result<()> {
    let workload = Workload::start("verdict", &[])?;
    let rows = judge(&workload.pid(), &["--why", "4008"])?;
    for (bytes, lost, via) in [
        (1000, 11, 0),
        (2008, 1, 18),
        (2104, 1, 12),
        (3200, 23, 0),
        (6704, 2, 0),
        // A block that only a hidden pointer refers to is held, but no tool of this kind can know that.
        (5000, 1, 0),
    ] {
        let found = blocks(&rows, "leak", bytes);
        ensure!(found == (lost, via), "{bytes}: {found:?}: {rows:?}");
    }
    let in_register = format!("register {} of thread ", harness::arch::HOLDING_REGISTER);
    for (bytes, holder) in [
        (6000, "memory "),
        (6104, "memory "),
        (6200, "thread-local storage of thread "),
        (6304, "stack of thread "),
        (6408, &*in_register),
        (7000, "global verdict`(anonymous namespace)::middle"),
        (7104, "global verdict`(anonymous namespace)::packed+0x1"),
        (7200, "global verdict`(anonymous namespace)::tagged"),
        (7304, "the kernel, epoll_event.data of file descriptor "),
        (7400, "the kernel, sigev_value of timer "),
    ] {
        let row = rows.iter().find(|row| is_of(row, "reachable", bytes));
        let row = row.with_context(|| format!("nothing holds {bytes}: {rows:?}"))?;
        let root = row["root"].as_str().unwrap_or_default();
        ensure!(row["blocks"] == 1 && root.starts_with(holder), "{row}");
    }
    let verdict = &rows[0];
    for (class, blocks) in [
        ("unreachable", 39),
        ("unreachable_via", 30),
        ("undecided", 0),
    ] {
        ensure!(verdict[class]["blocks"] == blocks, "{verdict}");
    }
    let interior = &verdict["interior_only"]["blocks"];
    ensure!(interior.as_u64() >= Some(3), "{verdict}");
    ensure!(verdict["coverage"] == "complete", "{verdict}");
    expect_what_holds_the_cache(&rows)
}

/// The program has lost the same blocks as with the C library's malloc, in jemalloc's sizes.
fn blocks_of_jemalloc_are_judged() -> Result<()> {
    let mut command = Command::new(harness::workload("verdict"));
    let workload = Workload::spawn(command.env("LD_PRELOAD", "libjemalloc.so.2"))?;
    let rows = judge(&workload.pid(), &["--why", "4096"])?;
    for (bytes, lost, via) in [
        (1024, 11, 0),
        (2048, 1, 18),
        (2560, 1, 12),
        (3584, 23, 0),
        (7168, 2, 0),
        (5120, 1, 0),
    ] {
        let found = blocks(&rows, "leak", bytes);
        ensure!(found == (lost, via), "{bytes}: {found:?}: {rows:?}");
    }
    let verdict = &rows[0];
    ensure!(verdict["allocator"] == "jemalloc (5.3)", "{verdict}");
    ensure!(verdict["coverage"] == "complete", "{verdict}");
    let sums = ["unreachable", "unreachable_via", "undecided"];
    let sums = sums.map(|class| verdict[class]["blocks"].as_u64());
    ensure!(sums == [Some(39), Some(30), Some(0)], "{verdict}");
    expect_what_holds_the_cache(&rows)
}

/// Checks the row of the blocks in the vector that a global holds. Their name says so.
fn expect_what_holds_the_cache(rows: &[Value]) -> Result<()> {
    let cache = "global verdict`(anonymous namespace)::cache";
    let held = rows
        .iter()
        .find(|row| row["name"] == "owned by std::vector buffer");
    let held = held.with_context(|| format!("no cache: {rows:?}"))?;
    ensure!(held["blocks"] == 997 && held["root"] == cache, "{held}");
    ensure!(held["chain_blocks"] == 2, "{held}");
    let why = rows.iter().find(|row| row["type"] == "why");
    let why = why.context("no answer")?;
    ensure!(why["blocks"] == 997 && why["traced_blocks"] == 997, "{why}");
    let tree = &why["tree"][0];
    ensure!(tree["holder"] == cache && tree["blocks"] == 997, "{why}");
    Ok(())
}

fn a_leak_fails_a_test_that_wants_none() -> Result<()> {
    let workload = Workload::start("verdict", &[])?;
    let pid = workload.pid();
    let args = on("-p", &pid);
    let ended = harness::run(
        "heapscan",
        &[&args[..], &["--fail-on", "unreachable"]].concat(),
    )?;
    ensure!(ended.status.code() == Some(3), "{ended:?}");
    let lost = "11,000 bytes in 11 blocks unreachable: unnamed, 1000 bytes each, such as 0x";
    ensure!(ended.stdout.contains(lost), "{ended:?}");
    ensure!(ended.stdout.contains("39 blocks"), "{ended:?}");
    let ended = harness::run("heapscan", &args)?;
    ensure!(ended.status.code() == Some(0), "{ended:?}");
    ensure!(workload.finish()?.success(), "it did not live on");
    Ok(())
}

fn what_is_not_known_as_a_whole_is_not_judged() -> Result<()> {
    let refused = |mut workload: Workload, why: &str| {
        let pid = workload.pid();
        let args = on("-p", &pid);
        let ended = harness::run("heapscan", &args)?;
        ensure!(
            ended.status.code() == Some(1) && ended.stderr.contains(why),
            "{ended:?}"
        );
        ensure!(!ended.stdout.contains("unreachable"), "{ended:?}");
        workload.work()
    };
    let protected = Workload::start("verdict", &["protected"])?;
    refused(
        protected,
        "4.1 kB of its memory are protected from being read",
    )?;
    let damaged = Workload::start("heap", &["0", "0", "corrupt"])?;
    refused(damaged, "no verdict: the heap of process ").map(drop)
}

/// Only pages that the process's page table lacks refer to some blocks. Nothing is mapped into the process to read
/// these pages, and nothing is called a leak if they cannot be read.
fn pages_that_are_absent_hold_blocks() -> Result<()> {
    let folder = harness::scratch()?;
    let path = folder.path().join("table");
    let path = path.to_str().context("a path in UTF-8")?;
    for how in ["fork", "dontneed", "readonly", "packed", "file", "private"] {
        let mut workload = Workload::start("elsewhere", &[how, "1009", path])?;
        let rows = judge(&workload.pid(), &[])?;
        let (lost, held) = (
            blocks(&rows, "leak", 3000),
            blocks(&rows, "reachable", 1000),
        );
        ensure!(
            lost == (7, 0) && held == (1009, 0),
            "{how}: {lost:?}, {held:?}: {rows:?}"
        );
        ensure!(rows[0]["unreachable"]["blocks"] == 7, "{how}: {rows:?}");
        let facts = workload.work()?;
        ensure!(
            facts["used"] == "1009" && facts["resident"] == "0",
            "{how}: {facts:?}"
        );
    }
    let mut workload = Workload::start("elsewhere", &["disk", "1009", path])?;
    let ended = harness::run("heapscan", &["-p", &workload.pid(), "--leaks"])?;
    let facts = workload.work()?;
    // A file system in memory has no pages on disk.
    let is_unknown = ended.status.code() == Some(1)
        && ended.stderr.contains("shared memory or of mapped files")
        && ended.stdout.is_empty();
    let is_known = ended
        .stdout
        .contains("21,000 bytes in 7 blocks unreachable");
    ensure!(is_unknown || is_known, "{ended:?}");
    ensure!(facts["used"] == "1009", "{facts:?}");
    Ok(())
}

/// A word that CPython has left in reused memory can hide a few lost objects, but invents none.
fn objects_of_python_are_judged_by_their_counts() -> Result<()> {
    for python in Python::all()? {
        expect_objects_by_counts(&python).with_context(|| python.to_string())?;
    }
    Ok(())
}

fn expect_objects_by_counts(python: &Python) -> Result<()> {
    let folder = harness::scratch()?;
    let workload = Workload::spawn(&mut python.command("verdict.py", folder.path())?)?;
    let options = ["-jp", &workload.pid(), "--leaks", "--roots", "-T", "100000"];
    let rows = harness::run(
        "heapscan",
        &[&options[..], &["--max-pause", "60000"]].concat(),
    )?;
    let rows = rows.objects()?;
    ensure!(workload.finish()?.success(), "it did not live on");
    let lost: Vec<_> = rows.iter().filter(|row| row["type"] == "leak").collect();
    ensure!(lost.len() == 1 && lost[0]["name"] == "Owed", "{lost:?}");
    let number = |row: &Value, field: &str| row[field].as_u64().unwrap_or_default();
    let owed = number(lost[0], "blocks");
    ensure!((95..=101).contains(&owed), "{lost:?}");
    // At least the parts of these objects are lost with them.
    ensure!(number(lost[0], "via_blocks") >= 50, "{lost:?}");
    let cycles = number(&rows[0]["python_cycles"], "blocks");
    ensure!((53..1000).contains(&cycles), "{}", rows[0]);
    for (name, blocks) in [("Kept", 1009), ("Sole", 7)] {
        let held = rows
            .iter()
            .find(|row| row["type"] == "reachable" && row["name"] == name);
        let held = held.with_context(|| format!("no {name}"))?;
        ensure!(held["blocks"] == blocks, "{held}");
        let is_global = held["root"] == "Python global __main__.kept";
        // The interpreter's own block has old references up to 3.10, and these are shorter paths.
        let has_old_references = python.to_string().contains("/3.10.");
        ensure!(
            is_global == (name == "Kept") || has_old_references,
            "{held}"
        );
    }
    Ok(())
}

/// The heap is a list of ten million blocks, each of which is the only holder of the next one. heapscan has memory
/// for one copy, although it takes two, and for at most 96 bytes per block: 77 were measured.
fn ten_million_blocks_are_judged_in_bounded_memory() -> Result<()> {
    const BLOCKS: u64 = 10_000_019;
    const LOST: u64 = 1009;
    let counts = [BLOCKS, LOST].map(|count| count.to_string());
    let mut workload = Workload::start("many", &[&counts[0], &counts[1]])?;
    let pid = workload.pid();
    let args = on("-jp", &pid);
    let mut tool = Tool::start("heapscan", &args)?;
    let mut peak = 0;
    while !tool.has_ended()? {
        peak = peak.max(tool.peak_kib().unwrap_or(0) << 10);
        thread::sleep(Duration::from_millis(10));
    }
    let rows = tool.wait()?.objects()?;
    let verdict = rows.first().context("no verdict")?;
    ensure!(verdict["coverage"] == "complete", "{verdict}");
    for (class, blocks) in [
        ("unreachable", LOST),
        ("unreachable_via", 0),
        ("undecided", 0),
    ] {
        ensure!(verdict[class]["blocks"] == blocks, "{class}: {verdict}");
    }
    ensure!(blocks(&rows, "leak", 24) == (LOST, 0), "{rows:?}");
    // Beside the list, the C library has blocks of its own, of other sizes.
    ensure!(
        blocks(&rows, "reachable", 24) == (BLOCKS - LOST, 0),
        "{rows:?}"
    );
    ensure!(
        verdict["pauses_us"].as_array().map(Vec::len) == Some(2),
        "{verdict}"
    );
    let copied = verdict["copied_bytes"].as_u64().context("no copy")?;
    ensure!((32 * BLOCKS..34 * BLOCKS).contains(&copied), "{verdict}");
    ensure!(
        (copied..copied + 96 * BLOCKS).contains(&peak),
        "{peak} for {copied}"
    );
    let facts = workload.work()?;
    ensure!(
        facts["blocks"] == (BLOCKS - LOST).to_string() && facts["wrong"] == "0",
        "{facts:?}"
    );
    ensure!(workload.finish()?.success(), "it did not live on");
    Ok(())
}

/// Redis runs with the C library's malloc instead of jemalloc.
fn a_database_under_load_has_no_leak() -> Result<()> {
    let libc = format!("{}/libc.so.6", harness::arch::LIBRARIES);
    expect_no_leak_of_redis(Some(&libc), "glibc malloc")
}

/// Redis runs as Debian packages it.
fn a_database_with_jemalloc_has_no_leak() -> Result<()> {
    expect_no_leak_of_redis(None, "jemalloc (5.3)")
}

/// Expects no leak of Redis while values are set, changed and deleted all the time.
fn expect_no_leak_of_redis(preload: Option<&str>, allocator: &str) -> Result<()> {
    const VERDICTS: usize = 20;
    let folder = harness::scratch()?;
    let socket = folder.path().join("socket");
    let mut server = harness::start_redis(&socket, Path::new("/dev/null"), preload)?;
    let listens = harness::eventually("redis listens", || Ok(socket.exists()));
    let mut load = Command::new("redis-benchmark")
        .arg("-s")
        .arg(&socket)
        .args(["-l", "-q", "-r", "20011", "-P", "8"])
        .stdout(Stdio::null())
        .spawn()?;
    let judged = (|| {
        listens?;
        let pid = server.id().to_string();
        harness::eventually("redis is used", || {
            let rows = judge(&pid, &[])?;
            Ok(rows[0]["reachable"]["blocks"].as_u64() >= Some(1000))
        })?;
        for _ in 0..VERDICTS {
            let rows = judge(&pid, &[])?;
            let lost: Vec<_> = rows.iter().filter(|row| row["type"] == "leak").collect();
            ensure!(rows[0]["unreachable"]["blocks"] == 0, "{lost:?}");
            let name = rows[0]["allocator"].as_str().unwrap_or_default();
            ensure!(name.starts_with(allocator), "{}", rows[0]);
        }
        ensure!(load.try_wait()?.is_none(), "there was no load");
        Ok(())
    })();
    for child in [&mut load, &mut server] {
        child.kill()?;
        child.wait()?;
    }
    judged
}

/// All memory of an allocator without a walk may hold blocks: tcmalloc's memory is in the middle of glibc's heap.
/// jemalloc's blocks are judged themselves, with what they hold.
fn blocks_that_another_allocators_hold_are_not_lost() -> Result<()> {
    for (program, args, lost, via) in [
        ("second", &[harness::mimalloc(), "mi_malloc"][..], 101, 0),
        ("second", &["libtcmalloc_minimal.so.4", "tc_malloc"], 101, 0),
        ("second-je", &[], 101 + 103, 103),
    ] {
        let workload = Workload::start(program, args)?;
        let rows = judge(&workload.pid(), &[])?;
        let head = rows.first().context("no report")?;
        ensure!(head["coverage"] == "complete", "{args:?}: {head}");
        ensure!(
            head["unreachable"]["blocks"] == lost && head["unreachable_via"]["blocks"] == via,
            "{args:?}: {rows:?}"
        );
        let held = 1010 + if args.is_empty() { 1010 } else { 103 };
        let reachable = head["reachable"]["blocks"].as_u64().unwrap_or_default();
        ensure!(reachable >= held, "{args:?}: {head}");
    }
    Ok(())
}
