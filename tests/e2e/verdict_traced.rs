//! Verdicts of memleak on processes whose allocations it has traced: leaks by stack.

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{self, Tool, Workload};

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak::verdict_traced":
        leaks_are_told_by_stack,
        what_was_there_before_has_no_stack,
        a_process_that_exits_first_has_no_verdict [Once],
    }
}

/// Returns the rows of a type whose stacks contain this function of the workload.
fn of_stack<'a>(rows: &'a [Value], kind: &str, function: &str) -> Vec<&'a Value> {
    let is_by = |row: &&Value| {
        let frames = row["user_frames"].as_array();
        let mut frames = frames.into_iter().flatten();
        row["type"] == kind
            && frames.any(|frame| {
                let symbol = frame["symbol"].as_str().unwrap_or_default();
                symbol == format!("(anonymous namespace)::{function}")
            })
    };
    rows.iter().filter(is_by).collect()
}

pub(crate) fn number(row: &Value, field: &str) -> u64 {
    row[field].as_u64().unwrap_or_default()
}

/// Returns the sums over the rows of a type with this function: blocks and bytes, and blocks and bytes that were
/// lost with them.
pub(crate) fn sums(rows: &[Value], kind: &str, function: &str) -> [u64; 4] {
    let fields = ["blocks", "bytes", "via_blocks", "via_bytes"];
    let rows = of_stack(rows, kind, function);
    fields.map(|field| rows.iter().map(|row| number(row, field)).sum())
}

/// Expects the workload's leaks and held blocks, by function: their number, their bytes, and what was lost with them.
pub(crate) fn expect_what_was_made(rows: &[Value]) -> Result<()> {
    for (kind, function, expected) in [
        ("leak", "forget()", [101, 50_500, 0, 0]),
        ("leak", "lose_list()", [1, 200, 18, 3600]),
        ("leak", "open_session(unsigned long)", [5, 120, 5, 200]),
        ("reachable", "remember()", [53, 15_900, 0, 0]),
        ("reachable", "point_into()", [1, 700, 0, 0]),
    ] {
        let found = sums(rows, kind, function);
        ensure!(found == expected, "{function}: {found:?}: {rows:?}");
    }
    let sessions = of_stack(rows, "leak", "open_session(unsigned long)");
    ensure!(
        sessions[0]["name"] == "(anonymous namespace)::Session",
        "{sessions:?}"
    );
    let forgotten = of_stack(rows, "leak", "forget()");
    ensure!(number(forgotten[0], "size_bytes") == 500, "{forgotten:?}");
    ensure!(forgotten[0]["truncated"].is_null(), "{forgotten:?}");
    Ok(())
}

/// Traces a workload's work by memleak, and asks for a verdict. Returns the rows of the last verdict.
fn judged(args: &[&str]) -> Result<Vec<Value>> {
    let mut workload = Workload::start("forget", &[])?;
    let options = ["-jp", &workload.pid(), "--verdict", "1000", "-T", "1000"];
    let options = [&options[..], &["--max-pause", "60000"], args].concat();
    let mut tool = Tool::start("memleak", &options)?;
    tool.wait_for_stderr("allocator: glibc")?;
    workload.work()?;
    tool.signal(Signal::SIGUSR1)?;
    tool.wait_for_output("\"verdict\"")?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.code() == Some(0), "{ended:?}");
    ensure!(workload.finish()?.success(), "it did not live on");
    let rows = ended.objects()?;
    let verdicts: Vec<_> = (0..)
        .zip(&rows)
        .filter(|(_, row)| row["type"] == "verdict")
        .collect();
    ensure!(verdicts.len() == 2, "{rows:?}");
    let (second, _) = verdicts[1];
    // Nothing has happened between the requested verdict and the last one.
    for class in ["unreachable", "unreachable_via", "reachable"] {
        ensure!(verdicts[0].1[class] == verdicts[1].1[class], "{verdicts:?}");
    }
    Ok(rows[second..].to_vec())
}

fn leaks_are_told_by_stack() -> Result<()> {
    let rows = judged(&[])?;
    expect_what_was_made(&rows)?;
    // The sum is 101 + 19 + 10 + 53 + 1: all of the workload's blocks, and no others.
    ensure!(rows[0]["traced_blocks"] == 184, "{}", rows[0]);
    ensure!(
        rows[0]["unreachable"]["blocks"] == 101 + 1 + 5 + 7,
        "{}",
        rows[0]
    );
    let (oldest, youngest) = ("oldest_age_ms", "youngest_age_ms");
    let forgotten = of_stack(&rows, "leak", "forget()");
    ensure!(
        number(forgotten[0], oldest) >= number(forgotten[0], youngest),
        "{forgotten:?}"
    );
    Ok(())
}

fn what_was_there_before_has_no_stack() -> Result<()> {
    let rows = judged(&["--why", "1000"])?;
    for (kind, bytes, blocks) in [("leak", 900, 7), ("reachable", 1000, 11)] {
        let is_it = |row: &&Value| {
            row["type"] == kind && (bytes..bytes + 24).contains(&number(row, "size_bytes"))
        };
        let row = rows.iter().find(is_it);
        let row = row.with_context(|| format!("no {bytes}: {rows:?}"))?;
        ensure!(number(row, "blocks") == blocks, "{row}");
        ensure!(
            row["user_frames"].is_null() && row["stack_id"].is_null(),
            "{row}"
        );
    }
    Ok(())
}

fn a_process_that_exits_first_has_no_verdict() -> Result<()> {
    let workload = Workload::start("forget", &[])?;
    let mut tool = Tool::start("memleak", &["-p", &workload.pid(), "--verdict", "1000"])?;
    tool.wait_for_stderr("allocator: glibc")?;
    workload.finish()?;
    let ended = tool.wait()?;
    ensure!(
        ended.status.code() == Some(1)
            && ended
                .stderr
                .contains("ended, or was killed, before one was due"),
        "{ended:?}"
    );
    Ok(())
}
