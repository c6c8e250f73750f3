//! drsnoop against programs that the kernel makes reclaim, and against its own record of that.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use libtest_mimic::Trial;
use regex_lite::Regex;
use serde_json::Value;

use crate::harness::{self, Ended, Tool, Workload, workload};
use crate::pressure::{Group, Recording, Scarcity, Swap, Writer, vmstat};

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests!("drsnoop":
        columns_are_bccs,
        free_memory_without_memory_cgroups,
        users_are_filtered,
        stacks_show_who_stalled,
        memcg_rows_equal_the_tracepoints [Guest],
        direct_rows_equal_the_tracepoints_and_a_peer_s [Guest, Peers],
    )
}

fn start(args: &[&str]) -> Result<Tool> {
    let mut tool = Tool::start("drsnoop", args)?;
    tool.wait_for("tracing")?;
    Ok(tool)
}

fn rows(ended: &Ended) -> Result<Vec<Value>> {
    ensure!(ended.status.success(), "{ended:?}");
    let objects = ended.stdout.lines().map(serde_json::from_str::<Value>);
    let mut objects: Vec<Value> = objects.collect::<Result<_, _>>().context("no JSON")?;
    objects.retain(|object| object["type"] != "unwinding");
    ensure!(
        objects.iter().all(|object| object["type"] == "reclaim"),
        "{ended:?}"
    );
    Ok(objects)
}

fn columns_are_bccs() -> Result<()> {
    let mut writer = Writer::start("memtools-columns")?;
    let tool = start(&["--memcg", "-p", &writer.pid(), "-TUv", "--hist"])?;
    columns_are_right(&mut writer, tool).map(drop)
}

/// As on a kernel without memory cgroups, by which the kernel half gets to the zones.
fn free_memory_without_memory_cgroups() -> Result<()> {
    let mut writer = Writer::start("memtools-free")?;
    let args = ["--memcg", "-p", &writer.pid(), "-TUv", "--hist"];
    let way = "raw tracepoints, free memory from /proc/vmstat";
    let tool = Tool::start_by(way, "drsnoop", &args)?;
    let ended = columns_are_right(&mut writer, tool)?;
    let told = "FREE(KB) is that of the moment of printing";
    ensure!(ended.stderr.matches(told).count() == 1, "{ended:?}");
    Ok(())
}

/// The fewest and the most pages that were free meanwhile.
fn free_pages_while(work: impl FnOnce() -> Result<()>) -> Result<(u64, u64)> {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watch = scope.spawn(|| -> Result<(u64, u64)> {
            let (mut low, mut high, mut last) = (u64::MAX, 0, false);
            while !last {
                // A last look comes after the end.
                last = done.load(Ordering::Relaxed);
                let free = vmstat("nr_free_pages")?;
                (low, high) = (low.min(free), high.max(free));
                thread::sleep(Duration::from_millis(1));
            }
            Ok((low, high))
        });
        let worked = work();
        done.store(true, Ordering::Relaxed);
        let range = watch.join();
        worked.and(range.map_err(|_| anyhow!("the watch has failed"))?)
    })
}

fn columns_are_right(writer: &mut Writer, tool: Tool) -> Result<Ended> {
    let (low, high) = free_pages_while(|| writer.write())?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    let mut lines = ended.stdout.lines();
    ensure!(
        lines.next()
            == Some("TIME(s)       UID   COMM           PID     LAT(ms) PAGES  FREE(KB) KIND"),
        "{ended:?}"
    );
    let row = Regex::new(
        r"^(\d+\.\d{6}000) +0     dd             (\d+) +(\d+\.\d\d) +(\d+) +(\d+) memcg$",
    )?;
    let (mut rows, mut last) = (0, -1.0);
    for line in lines.by_ref().take_while(|line| !line.is_empty()) {
        let fields = row.captures(line).with_context(|| format!("{line:?}"))?;
        let time: f64 = fields[1].parse()?;
        ensure!(
            time > last || rows == 0 && time == 0.0,
            "{line} after {last}"
        );
        last = time;
        rows += 1;
        // Between two looks other programs can take and give back a quarter.
        let free = fields[5].parse::<u64>()? / 4;
        ensure!(
            free > low - low / 4 && free < high + high / 4,
            "{free} pages free, but {low} to {high} by /proc/vmstat"
        );
    }
    ensure!(rows >= 50, "only {rows} rows: {ended:?}");
    ensure!(lines.next() == Some("@latency_ns:"), "{ended:?}");
    let counts = lines.filter_map(|line| line.split_once(" |")?.0.split(' ').next_back());
    let counted: u64 = counts.map(|count| count.parse::<u64>().unwrap_or(0)).sum();
    ensure!(counted == rows, "{counted} in the histogram, {rows} rows");
    Ok(ended)
}

fn users_are_filtered() -> Result<()> {
    for (uid, expected) in [("0", true), ("12345", false)] {
        let mut writer = Writer::start("memtools-users")?;
        let tool = start(&["--memcg", "-j", "-p", &writer.pid(), "-u", uid])?;
        writer.write()?;
        let rows = rows(&tool.interrupt()?)?;
        ensure!(
            rows.is_empty() != expected,
            "uid {uid}: {} rows",
            rows.len()
        );
    }
    Ok(())
}

fn symbol(frame: &Value) -> &str {
    frame["symbol"].as_str().unwrap_or_default()
}

fn stacks_show_who_stalled() -> Result<()> {
    let mut writer = Writer::start("memtools-stacks")?;
    let tool = start(&["--memcg", "-j", "-p", &writer.pid(), "--stack"])?;
    writer.write()?;
    let rows = rows(&tool.interrupt()?)?;
    let mut in_write = 0;
    for row in &rows {
        let frames = row["kernel_stack"].as_array().context("no kernel stack")?;
        let first = frames.first().map_or("", |frame| symbol(frame));
        ensure!(first == "try_to_free_mem_cgroup_pages", "{row}");
        // A few are in page faults: the writer's own pages are reclaimed, too.
        let write = |frame| symbol(frame).ends_with("sys_write");
        in_write += u32::from(frames.iter().any(write));
        ensure!(
            row["user_stack"]
                .as_array()
                .is_some_and(|stack| !stack.is_empty()),
            "{row}"
        );
    }
    ensure!(in_write >= 50, "{in_write} of {} rows", rows.len());
    Ok(())
}

/// Each row of a workload is what the kernel recorded of that reclaim, in the same order.
fn equal_the_tracepoints(
    mut workload: Workload,
    (kind, at_least): (&str, usize),
    work: impl FnOnce(&mut Workload) -> Result<()>,
) -> Result<Vec<Value>> {
    let pid = workload.pid();
    let recording = Recording::start("drsnoop", &["vmscan"], pid.parse()?)?;
    let tool = start(&["--memcg", "-j", "-p", &pid])?;
    work(&mut workload)?;
    let ended = tool.interrupt()?;
    let rows = rows(&ended)?;
    let trace = recording.read()?;

    let mut traced = Vec::new();
    let mut begun = None;
    for line in &trace {
        let name = line.name.strip_prefix("mm_vmscan_").unwrap_or_default();
        match name {
            "direct_reclaim_begin" | "memcg_reclaim_begin" => begun = Some(line),
            "direct_reclaim_end" | "memcg_reclaim_end" => {
                let begin = begun.take().context("an end without its beginning")?;
                traced.push((name.trim_end_matches("_reclaim_end"), begin, line));
            }
            _ => {}
        }
    }
    ensure!(
        rows.len() == traced.len(),
        "{} rows of {}",
        rows.len(),
        traced.len()
    );
    for (row, (kind, begin, end)) in rows.iter().zip(&traced) {
        let text = |field: &str| row[field].as_str().unwrap_or_default().to_owned();
        let number = |field: &str| row[field].as_u64().unwrap_or(u64::MAX);
        ensure!(text("kind") == *kind, "{row}: {end:?}");
        ensure!(row["pid"] == pid.parse::<u64>()?, "{row}");
        ensure!(
            number("reclaimed_pages") == end.field("nr_reclaimed")?.parse::<u64>()?,
            "{row}: {end:?}"
        );
        ensure!(
            number("order") == begin.field("order")?.parse::<u64>()?,
            "{row}: {begin:?}"
        );
        let names = |flags: &str| flags.split('|').map(str::to_owned).collect::<BTreeSet<_>>();
        ensure!(
            names(&text("gfp_flags")) == names(begin.field("gfp_flags")?),
            "{row}: {begin:?}"
        );
    }
    let ours: u64 = rows
        .iter()
        .filter_map(|row| row["latency_ns"].as_u64())
        .sum();
    let theirs: u64 = traced
        .iter()
        .map(|(_, begin, end)| end.time_ns - begin.time_ns)
        .sum();
    ensure!(
        ours > theirs / 2 && ours < theirs * 2,
        "{ours} ns, but {theirs} by the trace"
    );
    let of_kind = rows.iter().filter(|row| row["kind"] == kind).count();
    ensure!(of_kind >= at_least, "only {of_kind} of {kind}");
    Ok(rows)
}

fn memcg_rows_equal_the_tracepoints() -> Result<()> {
    let _swap = Swap::on("128M")?;
    let group = Group::new("memtools-drsnoop", 16 << 20)?;
    let thrash = Workload::spawn(&mut group.command(&workload("thrash"), &["6007", "1"]))?;
    let rows = equal_the_tracepoints(thrash, ("memcg", 10), |thrash| thrash.work().map(drop))?;
    ensure!(
        rows.iter().all(|row| row["cgroup"] == "/memtools-drsnoop"),
        "{:?}",
        rows.first()
    );
    Ok(())
}

/// Also what libbpf-tools' drsnoop shows of the same reclaims.
fn direct_rows_equal_the_tracepoints_and_a_peer_s() -> Result<()> {
    let _swap = Swap::on("512M")?;
    let hog = Workload::start("hog", &["109", "900"])?;
    let peer = Tool::start_peer("drsnoop", &["-p", &hog.pid()])?;
    let before = vmstat("pgsteal_direct")?;
    // One reclaim can be of thousands of pages, where the kernel keeps generations of them.
    let rows = equal_the_tracepoints(hog, ("direct", 1), |hog| {
        let _scarcity = Scarcity::for_process(&hog.pid())?;
        hog.work().map(drop)
    })?;
    // Of all tasks, but most of it is the hog's.
    let stolen = vmstat("pgsteal_direct")? - before;
    let pages = rows.iter().map(|row| row["reclaimed_pages"].as_u64());
    let pages: Vec<u64> = pages.collect::<Option<_>>().context("no pages")?;
    let sum: u64 = pages.iter().sum();
    ensure!(
        sum > stolen / 2 && sum < stolen / 10 * 12,
        "{sum} pages, but {stolen} by /proc/vmstat"
    );
    // TIME COMM TID LAT(ms) PAGES
    let peer = peer.interrupt()?;
    let theirs = peer.stdout.lines().filter(|line| line.contains(" hog "));
    let theirs: Vec<u64> = theirs
        .filter_map(|line| line.split_whitespace().next_back()?.parse().ok())
        .collect();
    ensure!(pages == theirs, "{pages:?}\nbut the peer's\n{peer:?}");
    Ok(())
}
