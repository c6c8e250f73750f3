//! What memleak shows of blocks beside their stacks: ages, growth, numbers of allocations, blocks that were freed
//! soon, and wrong frees.

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use crate::harness::{self, Tool, Workload};
use crate::memleak;

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak::views":
        allocations_are_counted_freed_or_not: at_entries,
        what_is_freed_soon_is_counted,
        growth_is_from_report_to_report,
        the_oldest_and_the_median_age_are_shown,
        the_peak_is_shown_with_its_stacks,
        double_frees_are_counted_with_their_stack: at_entries,
        what_is_freed_once_is_not_freed_twice [Once],
        unknown_frees_are_counted_with_their_stack: at_entries,
        samples_by_bytes_stand_for_all,
        hits_and_what_they_cost_are_told,
        memleak_is_raised_and_its_command_is_not [Host],
        a_limit_is_kept_for_a_program_that_is_mostly_idle,
        sampling_is_raised_to_keep_a_limit,
        what_the_table_has_no_room_for_is_kept_elsewhere,
        room_is_made_as_it_is_needed,
    }
}

/// Returns the rows of stacks that contain a function.
fn stacks<'a>(rows: &'a [Value], function: &str) -> Vec<&'a Value> {
    let through = |row: &&Value| {
        let frames = row["user_frames"].as_array();
        frames.is_some_and(|frames| frames.iter().any(|frame| frame["symbol"] == function))
    };
    rows.iter()
        .filter(|row| row["type"] == "stack")
        .filter(through)
        .collect()
}

/// Expects exactly one stack that contains a function, with these sums.
fn expect(rows: &[Value], function: &str, bytes: u64, allocations: u64) -> Result<()> {
    let stacks = stacks(rows, function);
    ensure!(
        stacks.len() == 1 && stacks[0]["bytes"] == bytes && stacks[0]["allocations"] == allocations,
        "{function}: not {bytes} bytes in {allocations} in {stacks:?}"
    );
    Ok(())
}

fn allocations_are_counted_freed_or_not() -> Result<()> {
    let program = ["churn", "10007", "89", "211"];
    let args = ["--mode", "alloc", "-j", "-T", "1000", "60"];
    let rows = memleak::trace("lives", &program, &args)?.objects()?;
    expect(&rows, "churned", 10007 * 89, 10007)?;
    expect(&rows, "kept_on", 211 * 89, 211)
}

fn what_is_freed_soon_is_counted() -> Result<()> {
    let program = ["churn", "10007", "89", "211"];
    let args = ["--mode", "churn", "-j", "-T", "1000", "3600"];
    let rows = memleak::trace("lives", &program, &args)?.objects()?;
    expect(&rows, "churned", 10007 * 89, 10007)?;
    ensure!(stacks(&rows, "kept_on").is_empty(), "{rows:?}");
    Ok(())
}

/// memleak makes two reports: 31 blocks are allocated before the first, and 41 between the two.
fn growth_is_from_report_to_report() -> Result<()> {
    let mut workload = Workload::start("lives", &["grow", "97", "31", "41"])?;
    let mut tool = memleak::attach(&workload, &["-e", "-j", "-o", "0", "1"])?;
    workload.work()?;
    tool.wait_for_output(r#""allocations":31"#)?;
    workload.work()?;
    tool.wait_for_output(r#""allocations":72"#)?;
    let rows = tool.interrupt()?.objects()?;
    let grown = stacks(&rows, "grown");
    let first = grown
        .iter()
        .find(|row| row["allocations"] == 31)
        .context("no first")?;
    ensure!(
        first["growth_bytes"].is_null() || first["growth_bytes"] == 31 * 97,
        "{first}"
    );
    let second = grown
        .iter()
        .find(|row| row["allocations"] == 72)
        .context("no second")?;
    ensure!(second["growth_bytes"] == 41 * 97, "{second}");
    let last = grown.last().context("no last")?;
    ensure!(
        last["growth_bytes"] == 0 || last["allocations"] != 72 || *last == *second,
        "{last}"
    );
    Ok(())
}

fn the_oldest_and_the_median_age_are_shown() -> Result<()> {
    let mut workload = Workload::start("lives", &["grow", "97", "31", "211"])?;
    let mut tool = memleak::attach(&workload, &["-j", "-o", "0", "1"])?;
    workload.work()?;
    // The head and the stack of two reports, which are a second apart.
    for _ in 0..4 {
        tool.wait_for_output(r#""allocations":31"#)?;
    }
    workload.work()?;
    let rows = tool.interrupt()?.objects()?;
    let last = *stacks(&rows, "grown").last().context("no stack")?;
    let ms = |key: &str| {
        last[key]
            .as_u64()
            .with_context(|| format!("no {key}: {last}"))
    };
    // Most of the blocks are younger ones.
    ensure!(ms("oldest_age_ms")? >= 1000, "{last}");
    ensure!(ms("median_age_ms")? < ms("oldest_age_ms")?, "{last}");
    Ok(())
}

fn double_frees_are_counted_with_their_stack() -> Result<()> {
    let ended = memleak::trace("lives", &["twice", "53"], &["-j", "-o", "0", "60"])?;
    let rows = ended.objects()?;
    let head = rows
        .iter()
        .find(|row| row["type"] == "report")
        .context("no report")?;
    if !memleak::has_table() {
        ensure!(head["double_frees"].is_null(), "{head}");
        return Ok(());
    }
    ensure!(head["double_frees"] == 53, "{head}");
    let told: Vec<_> = rows
        .iter()
        .filter(|row| row["type"] == "double_free")
        .collect();
    ensure!(told.len() == 1, "each stack is told of once: {told:?}");
    ensure!(
        told[0]["user_frames"].to_string().contains("free_twice"),
        "{told:?}"
    );
    Ok(())
}

/// Threads free each block once, while the kernel places one probe after the other, and while only threads with a name
/// are traced.
fn what_is_freed_once_is_not_freed_twice() -> Result<()> {
    let mut workload = Workload::start("recycle", &["5"])?;
    let pid = workload.pid();
    let (by_pid, by_name) = (["-p", &pid], ["-n", "recycle"]);
    for target in [[by_pid].repeat(7), vec![by_name]].concat() {
        let mut tool = Tool::start("memleak", &[&target[..], &["-j", "-o", "0", "60"]].concat())?;
        tool.wait_for_stderr(memleak::READY)?;
        let ended = tool.interrupt()?;
        let twice = |row: &Value| {
            row["type"] == "double_free" || row["double_frees"].as_u64().unwrap_or(0) > 0
        };
        ensure!(!ended.objects()?.iter().any(twice), "{target:?}: {ended:?}");
    }
    workload.work()?;
    Ok(())
}

fn unknown_frees_are_counted_with_their_stack() -> Result<()> {
    let ended = memleak::trace("lives", &["unknown", "101"], &["-ej", "-o", "0", "60"])?;
    let rows = ended.objects()?;
    let head = rows
        .iter()
        .find(|row| row["type"] == "report")
        .context("no report")?;
    ensure!(head["unknown_frees"] == 101, "{head}");
    ensure!(head["double_frees"].as_u64().unwrap_or(0) == 0, "{head}");
    let of_type = |row: &&Value| row["type"] == "unknown_frees";
    let by_stack: Vec<_> = rows.iter().filter(of_type).collect();
    ensure!(
        by_stack.len() == 1
            && by_stack[0]["frees"] == 101
            && by_stack[0]["user_frames"]
                .to_string()
                .contains("free_unknown"),
        "{by_stack:?}"
    );
    Ok(())
}

/// The sum of blocks below the sampling distance is an estimate, within a few times the reported interval. The
/// sum of larger blocks is exact.
fn samples_by_bytes_stand_for_all() -> Result<()> {
    let sampled = |size: &str| -> Result<Value> {
        let args = ["--sample-bytes", "8K", "-j", "-o", "0", "60"];
        let ended = memleak::trace("lives", &["grow", size, "10007"], &args)?;
        let rows = ended.objects()?;
        let stacks = stacks(&rows, "grown");
        ensure!(stacks.len() == 1, "{rows:?}");
        Ok(stacks[0].clone())
    };
    let number = |row: &Value, key: &str| {
        row[key]
            .as_u64()
            .with_context(|| format!("no {key}: {row}"))
    };

    let small = sampled("211")?;
    let (bytes, error) = (number(&small, "bytes")?, number(&small, "error_bytes")?);
    let truth = 10007 * 211;
    // About 258 blocks are recorded: 12 % to both sides.
    ensure!((truth / 20..truth / 5).contains(&error), "{small}");
    ensure!(bytes.abs_diff(truth) <= 3 * error, "{small}");
    ensure!(bytes != truth, "nothing was omitted: {small}");

    let large = sampled("8209")?;
    ensure!(number(&large, "bytes")? == 10007 * 8209, "{large}");
    ensure!(number(&large, "allocations")? == 10007, "{large}");
    ensure!(number(&large, "error_bytes")? == 0, "{large}");
    Ok(())
}

/// A pair of malloc and free is three hits: two entries and a return. All other hits between attaching and the
/// end are the same in every run.
fn hits_and_what_they_cost_are_told() -> Result<()> {
    let summary = |pairs: u64| -> Result<Value> {
        let program = ["churn", &pairs.to_string(), "64", "1"];
        let ended = memleak::trace("lives", &program, &["-j", "60"])?;
        let line = ended.stderr.lines().find(|line| line.contains(" hits; "));
        line.with_context(|| format!("no hits in {}", ended.stderr))?;
        let rows = ended.objects()?;
        let probes = rows.into_iter().find(|row| row["type"] == "probes");
        probes.context("no row of the probes")
    };
    let (few, many) = (summary(7)?, summary(10_007)?);
    let hits = |row: &Value| row["hits"].as_u64().context("no hits");
    ensure!(hits(&few)? == 3 * 7 + 2, "{few}");
    ensure!(hits(&many)? == 3 * 10_007 + 2, "{many}");
    let share = many["cpu_percent"].as_f64().context("no share")?;
    ensure!(share > 0.0 && share <= 100.0, "{many}");
    ensure!(many["hit_ns"].as_u64().is_some_and(|ns| ns > 0), "{many}");
    Ok(())
}

/// A program that does little else than allocate exceeds any limit. The first blocks are all recorded, later ones
/// are sampled, and the estimate of all blocks is within a few times the reported interval.
fn sampling_is_raised_to_keep_a_limit() -> Result<()> {
    let (size, count, steps) = (211, 2003, 7);
    let program = ["outgrow", &size.to_string(), &count.to_string(), "7"];
    let mut workload = Workload::start("lives", &program)?;
    let mut tool = memleak::attach(
        &workload,
        &["--max-overhead", "0.1%", "-j", "-o", "0", "60"],
    )?;
    workload.work()?;
    tool.wait_for_stderr("blocks are now recorded as with --sample-bytes")?;
    for _ in 1..steps {
        workload.work()?;
    }
    let ended = tool.interrupt()?;
    let rows = ended.objects()?;
    let stacks = stacks(&rows, "grown");
    ensure!(stacks.len() == 1, "{rows:?}");
    let number = |key: &str| stacks[0][key].as_u64().context("no number");
    let (bytes, error) = (number("bytes")?, number("error_bytes")?);
    let truth = steps * count * size;
    ensure!((1..truth).contains(&error), "{rows:?}");
    ensure!(
        bytes.abs_diff(truth) <= 3 * error,
        "{bytes}, not {truth}: {rows:?}"
    );
    ensure!(bytes != truth, "nothing was omitted: {rows:?}");
    Ok(())
}

/// nice(1) without arguments prints its own nice value.
fn memleak_is_raised_and_its_command_is_not() -> Result<()> {
    let ended = harness::run("memleak", &["-j", "-c", "nice", "60"])?;
    ensure!(ended.stdout.lines().any(|line| line == "0"), "{ended:?}");
    let workload = Workload::start("lives", &["churn", "7", "64", "1"])?;
    let tool = memleak::attach(&workload, &["-j", "60"])?;
    ensure!(tool.nice()? == -10, "{}", tool.nice()?);
    Ok(())
}

/// memleak applies the limit also to a program that runs for a thirtieth of the time.
fn a_limit_is_kept_for_a_program_that_is_mostly_idle() -> Result<()> {
    let mut workload = Workload::start("lives", &["bursts", "4001"])?;
    let args = ["--max-overhead", "0.1%", "-j", "60"];
    let tool = memleak::attach(&workload, &args)?;
    workload.work()?;
    let ended = tool.interrupt()?;
    for line in [
        "over the limit: blocks are now recorded as with --sample-bytes",
        "--max-overhead 0.1 % was not kept over the whole trace: ",
    ] {
        ensure!(ended.stderr.contains(line), "{}", ended.stderr);
    }
    Ok(())
}

/// The table has 15,016 entries. From 12,000 blocks on, some blocks find both their buckets full.
fn what_the_table_has_no_room_for_is_kept_elsewhere() -> Result<()> {
    let blocks = if memleak::has_table() { 13_009 } else { 10_007 };
    let count = blocks.to_string();
    let args = ["--max-allocs", "10007", "-j", "-o", "0", "60"];
    let ended = memleak::trace("lives", &["grow", "97", &count], &args)?;
    expect(&ended.objects()?, "grown", blocks * 97, blocks)?;
    // Blocks outside of the table are found when they are freed, too.
    let ended = memleak::trace("lives", &["shrink", "97", &count, "211"], &args)?;
    expect(&ended.objects()?, "grown", 211 * 97, 211)
}

/// At the end, fewer blocks are outstanding, and they are from other stacks.
fn the_peak_is_shown_with_its_stacks() -> Result<()> {
    let args = ["--mode", "peak", "-j", "60"];
    let rows = memleak::trace("lives", &["climb", "211", "97"], &args)?.objects()?;
    let head = rows.iter().find(|row| row["type"] == "report");
    let head = head.context("no report")?;
    let bases = 3 * 211 * 8;
    ensure!(head["bytes"] == 211 * 3 * 97 + bases, "{head}");
    ensure!(head["allocations"] == 211 * 2 + 1, "{head}");
    ensure!(head["peak_time"].as_str() < head["time"].as_str(), "{head}");
    expect(&rows, "in_process", 211 * 97, 211)?;
    expect(&rows, "on_the_hill", 211 * 2 * 97, 211)?;
    ensure!(stacks(&rows, "after_the_hill").is_empty(), "{rows:?}");
    Ok(())
}

/// A capacity of 9362 blocks is divided: 292 in the first map, 2340 in the second, the rest in the third.
fn room_is_made_as_it_is_needed() -> Result<()> {
    let program = ["grow", "97", "199", "2003", "7103"];
    let mut workload = Workload::start("lives", &program)?;
    // Three quarters of the limit are for blocks. Each takes 112 bytes of the kernel's memory and 72 of the tool's.
    let args = ["--mem-limit", "2296811", "-vj", "-o", "0", "-p"];
    let pid = workload.pid();
    let way = "perf uprobes without cookies";
    let mut tool = Tool::start_by(way, "memleak", &[&args[..], &[&pid, "60"]].concat())?;
    tool.wait_for_stderr(memleak::READY)?;
    for more in [2340, 6730] {
        workload.work()?;
        tool.wait_for_stderr(&format!("the table of blocks has grown by {more}"))?;
    }
    workload.work()?;
    let blocks = 199 + 2003 + 7103;
    let ended = tool.interrupt()?;
    ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
    expect(&ended.objects()?, "grown", blocks * 97, blocks)
}
