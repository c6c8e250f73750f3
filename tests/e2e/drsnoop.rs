//! drsnoop against programs that the kernel makes reclaim memory, and against the kernel's own record of these
//! reclaims.

use std::collections::BTreeSet;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use libtest_mimic::Trial;
use memtools::print::text::grouped;
use regex_lite::Regex;
use serde_json::Value;

use crate::harness::{self, Tool, ToolOutput, Workload, workload};
use crate::pressure::{Group, Recording, Scarcity, Swap, Writer, vmstat};

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests!("drsnoop":
        columns_are_bccs,
        a_summary_is_the_sum_of_the_rows,
        it_outlives_a_lack_of_memory,
        free_memory_without_memory_cgroups,
        users_are_filtered,
        stacks_show_who_stalled,
        memcg_rows_equal_the_tracepoints [Guest],
        a_limit_is_that_of_the_cgroup_above [Guest],
        threads_at_once_are_all_shown [Guest],
        direct_rows_equal_the_tracepoints_and_a_peer_s [Guest, Peers],
    )
}

fn start(args: &[&str]) -> Result<Tool> {
    let mut tool = Tool::start("drsnoop", args)?;
    tool.wait_for_stderr("tracing")?;
    Ok(tool)
}

fn rows(ended: &ToolOutput) -> Result<Vec<Value>> {
    let mut objects = ended.objects()?;
    objects.retain(|object| object["type"] != "unwinding");
    ensure!(
        objects.iter().all(|object| object["type"] == "reclaim"),
        "{ended:?}"
    );
    Ok(objects)
}

fn it_outlives_a_lack_of_memory() -> Result<()> {
    harness::expect_protected_from_oom(start(&[])?)
}

fn columns_are_bccs() -> Result<()> {
    let mut writer = Writer::start("memtools-columns")?;
    let tool = start(&["--memcg", "-p", &writer.pid(), "-TUv", "--hist"])?;
    columns_are_right(&mut writer, tool).map(drop)
}

/// The sums include each reclaim of the process.
fn a_summary_is_the_sum_of_the_rows() -> Result<()> {
    let mut writer = Writer::start("memtools-summary")?;
    let pid = writer.pid();
    let args = ["--memcg", "-j", "-p", &pid];
    let (each, sums) = (start(&args)?, start(&[&args[..], &["--summary"]].concat())?);
    writer.write()?;
    let (each, sums) = (rows(&each.interrupt()?)?, sums.interrupt()?);
    let all = sums.objects()?;
    let [sums] = &all[..] else {
        bail!("not one row: {sums:?}");
    };
    ensure!(
        sums["type"] == "reclaim_summary" && sums["comm"] == "dd",
        "{sums}"
    );
    ensure!(
        sums["pid"] == pid.parse::<u64>()? && sums["kind"] == "memcg",
        "{sums}"
    );
    ensure!(
        sums["stalls"] == each.len() && each.len() >= 50,
        "{} rows, {sums}",
        each.len()
    );
    let pages = each
        .iter()
        .filter_map(|row| row["reclaimed_pages"].as_u64());
    ensure!(sums["reclaimed_pages"] == pages.sum::<u64>(), "{sums}");
    let [stalled, longest] = ["stalled_ns", "longest_ns"].map(|name| sums[name].as_u64());
    ensure!(stalled >= longest && longest > Some(0), "{sums}");
    Ok(())
}

/// Simulates a kernel without memory cgroups, by which the BPF program finds the zones.
fn free_memory_without_memory_cgroups() -> Result<()> {
    let mut writer = Writer::start("memtools-free")?;
    let args = ["--memcg", "-p", &writer.pid(), "-TUv", "--hist"];
    let way = "raw tracepoints, free memory from /proc/vmstat";
    let tool = Tool::start_by(way, "drsnoop", &args)?;
    let ended = columns_are_right(&mut writer, tool)?;
    let told = "FREE(KB) is the value when the line is printed";
    ensure!(ended.stderr.matches(told).count() == 1, "{ended:?}");
    Ok(())
}

/// Returns the lowest and the highest number of free pages while `work` ran.
fn free_pages_while(work: impl FnOnce() -> Result<()>) -> Result<(u64, u64)> {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watch = scope.spawn(|| -> Result<(u64, u64)> {
            let (mut low, mut high, mut last) = (u64::MAX, 0, false);
            while !last {
                // One more look follows the end of `work`.
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

fn columns_are_right(writer: &mut Writer, tool: Tool) -> Result<ToolOutput> {
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
        // Between two looks, other programs can take or return a quarter of the free pages.
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
        let limited = |row: &Value| row["limited"] == "/memtools-users";
        ensure!(rows.iter().all(limited), "{:?}", rows.first());
    }
    Ok(())
}

fn symbol(frame: &Value) -> &str {
    frame["symbol"].as_str().unwrap_or_default()
}

fn stacks_show_who_stalled() -> Result<()> {
    let mut writer = Writer::start("memtools-stacks")?;
    let folder = harness::scratch()?;
    let flame = folder.path().join("a.svg");
    let flame = flame.to_str().context("not UTF-8")?;
    let options = ["--memcg", "-j", "--stack", "--export", flame];
    let tool = start(&[&options[..], &["-p", &writer.pid()]].concat())?;
    writer.write()?;
    let rows = rows(&tool.interrupt()?)?;
    let mut in_write = 0;
    for row in &rows {
        let frames = row["kernel_frames"].as_array().context("no kernel stack")?;
        let first = frames.first().map_or("", |frame| symbol(frame));
        ensure!(first == "try_to_free_mem_cgroup_pages", "{row}");
        // A few reclaims are in page faults, because the writer's own pages are reclaimed, too.
        let write = |frame| symbol(frame).ends_with("sys_write");
        in_write += u32::from(frames.iter().any(write));
        ensure!(
            row["user_frames"]
                .as_array()
                .is_some_and(|stack| !stack.is_empty()),
            "{row}"
        );
    }
    ensure!(in_write >= 50, "{in_write} of {} rows", rows.len());
    let delays = rows.iter().filter_map(|row| row["latency_ns"].as_u64());
    let all = format!("{} ns", grouped(delays.sum::<u64>()));
    let image = fs::read_to_string(flame)?;
    ensure!(image.contains(&all), "no {all} in {image}");
    ensure!(image.contains("try_to_free_mem_cgroup_pages ("));
    Ok(())
}

/// Checks that the rows of a workload equal the kernel's record of the reclaims, in the same order.
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

/// The task is in a cgroup without a limit, below one with a limit. drsnoop names both, and prints as many rows
/// as the kernel counted hits of that limit.
fn a_limit_is_that_of_the_cgroup_above() -> Result<()> {
    let _swap = Swap::on("128M")?;
    let above = Group::new("memtools-over", 16 << 20)?;
    let below = above.child("below")?;
    let mut thrash = Workload::spawn(&mut below.command(&workload("thrash"), &["6007", "1"]))?;
    let before = above.limit_hits()?;
    let args = ["--memcg", "-e", "-p", &thrash.pid()];
    let (text, json) = (start(&args)?, start(&[&args[..], &["-j"]].concat())?);
    thrash.work()?;
    let (text, rows) = (text.interrupt()?, rows(&json.interrupt()?)?);
    let hits = (above.limit_hits()? - before) as usize;

    let own = |row: &&Value| row["kind"] == "memcg";
    let of_limit = rows.iter().filter(own).count();
    ensure!(of_limit == hits && hits > 10, "{of_limit} rows of {hits}");
    for row in &rows {
        ensure!(row["cgroup"] == "/memtools-over/below", "{row}");
        let expected = own(&row).then_some("/memtools-over");
        ensure!(row["limited"].as_str() == expected, "{row}");
        ensure!(row["limited_id"].is_u64() == own(&row), "{row}");
    }
    let named = " /memtools-over/below     /memtools-over";
    let named = text.stdout.lines().filter(|line| line.ends_with(named));
    ensure!(named.count() == hits, "{hits}: {text:?}");
    ensure!(below.limit_hits()? == 0, "it has no limit");
    Ok(())
}

/// Eight processes at once on two CPUs preempt one another in our BPF programs, where the kernel permits that.
fn threads_at_once_are_all_shown() -> Result<()> {
    let _swap = Swap::on("128M")?;
    let group = Group::new("memtools-stalls", 16 << 20)?;
    let start_one = |_| Workload::spawn(&mut group.command(&workload("thrash"), &["2003", "1"]));
    let mut all: Vec<Workload> = (0..8).map(start_one).collect::<Result<_>>()?;
    let recording = Recording::start("stalls", &["vmscan/mm_vmscan_memcg_reclaim_end"], 0)?;
    let tool = start(&["--memcg", "-j", "-n", "thrash"])?;
    for one in &mut all {
        one.go()?;
    }
    for one in &mut all {
        one.done()?;
    }
    let ended = tool.interrupt()?;
    let rows = rows(&ended)?.len();
    let trace = recording.read()?;
    let traced = trace.iter().filter(|line| line.task.starts_with("thrash-"));
    let traced = traced.count();
    ensure!(traced >= 100, "only {traced} stalls");
    ensure!(
        rows == traced,
        "{rows} rows, {traced} stalls: {}",
        ended.stderr
    );
    Ok(())
}

/// libbpf-tools' drsnoop shows the same reclaims, too.
fn direct_rows_equal_the_tracepoints_and_a_peer_s() -> Result<()> {
    let _swap = Swap::on("512M")?;
    let hog = Workload::start("hog", &["109", "900"])?;
    let peer = Tool::start_peer("drsnoop", &["-p", &hog.pid()])?;
    let before = vmstat("pgsteal_direct")?;
    // One reclaim can be of thousands of pages, where the kernel keeps generations of pages (MGLRU).
    let rows = equal_the_tracepoints(hog, ("direct", 1), |hog| {
        let _scarcity = Scarcity::for_process(&hog.pid())?;
        hog.work().map(drop)
    })?;
    // The count includes all tasks, but the hog causes most of it.
    let stolen = vmstat("pgsteal_direct")? - before;
    let pages = rows.iter().map(|row| row["reclaimed_pages"].as_u64());
    let pages: Vec<u64> = pages.collect::<Option<_>>().context("no pages")?;
    let sum: u64 = pages.iter().sum();
    ensure!(
        sum > stolen / 2 && sum < stolen / 10 * 12,
        "{sum} pages, but {stolen} by /proc/vmstat"
    );
    // The peer's columns are TIME COMM TID LAT(ms) PAGES.
    let peer = peer.interrupt()?;
    let theirs = peer.stdout.lines().filter(|line| line.contains(" hog "));
    let theirs: Vec<u64> = theirs
        .filter_map(|line| line.split_whitespace().next_back()?.parse().ok())
        .collect();
    ensure!(pages == theirs, "{pages:?}\nbut the peer's\n{peer:?}");
    Ok(())
}
