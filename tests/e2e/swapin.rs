//! swapin against a program whose pages go to swap and come back, and against /proc/vmstat.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use crate::harness::{self, Need, Tool, ToolOutput, Workload};
use crate::pressure::{Setting, Swap, vmstat};

/// Number of the workload's pages.
const PAGES: u64 = 1999;
const WAYS: [&str; 2] = ["fentry", "kprobe"];

pub(crate) fn tests() -> Vec<Trial> {
    let test = |name: &str, needs: &'static [Need], run: fn() -> Result<()>| {
        harness::test(&format!("swapin::{name}"), needs, run)
    };
    const SWAP: &[Need] = &[Need::Kprobes, Need::Guest];
    vec![
        test("every_page_is_counted", SWAP, every_page_is_counted),
        test("latency", SWAP, latency),
        test(
            "shared_memory_holds_up_too",
            SWAP,
            shared_memory_holds_up_too,
        ),
        test("pages_written", SWAP, pages_written),
        test("processes_are_filtered", SWAP, processes_are_filtered),
        test("a_command_is_traced", SWAP, a_command_is_traced),
        test(
            "what_zswap_had_is_told",
            &[Need::Kprobes, Need::Guest, Need::Zswap],
            what_zswap_had_is_told,
        ),
        test("bcc_s_report", &[Need::Kprobes], bcc_s_report),
        test(
            "it_outlives_a_lack_of_memory",
            &[Need::Kprobes],
            it_outlives_a_lack_of_memory,
        ),
        test("every_attempt_is_named", &[], every_attempt_is_named),
    ]
}

fn start(way: &str, args: &[&str]) -> Result<Tool> {
    Tool::start_by(way, "swapin", args)
}

fn end(tool: Tool) -> Result<ToolOutput> {
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(ended)
}

/// Returns the sum of a field over the rows of one process, or of all.
fn sum(rows: &[Value], field: &str, pid: Option<&str>) -> u64 {
    rows.iter()
        .filter(|row| pid.is_none_or(|pid| row["pid"].as_u64() == pid.parse().ok()))
        .filter_map(|row| row[field].as_u64())
        .sum()
}

fn every_page_is_counted() -> Result<()> {
    let _swap = Swap::on("256M")?;
    for way in WAYS {
        let mut workload = Workload::start("pageout", &[&PAGES.to_string()])?;
        let before = vmstat("pswpin")?;
        let tool = start(way, &["-j"])?;
        let facts = workload.work()?;
        let ended = end(tool)?;
        let read = vmstat("pswpin")? - before;
        let rows = ended.objects()?;
        ensure!(facts["swapped"] == PAGES.to_string(), "{facts:?}");
        let pid = workload.pid();
        ensure!(
            sum(&rows, "pages_in", Some(&pid)) == PAGES,
            "{way}: {ended:?}"
        );
        ensure!(
            sum(&rows, "pages_in", None) == read,
            "{way}: not {read}: {ended:?}"
        );
        ensure!(
            rows.iter().all(|row| row["pages_out"].is_null()),
            "{ended:?}"
        );
        ensure!(!ended.stdout.contains("lost"), "{ended:?}");
    }
    Ok(())
}

fn shared_memory_holds_up_too() -> Result<()> {
    let _swap = Swap::on("256M")?;
    for way in WAYS {
        let mut workload = Workload::start("pageout", &[&PAGES.to_string(), "shared"])?;
        let tool = start(way, &["-j", "-s", "-p", &workload.pid()])?;
        let facts = workload.work()?;
        let ended = end(tool)?;
        ensure!(facts["major"] == PAGES.to_string(), "{facts:?}");
        let rows = ended.objects()?;
        let (last, rows) = rows.split_last().context("no rows")?;
        ensure!(sum(rows, "pages_in", None) == PAGES, "{way}: {ended:?}");
        let buckets = last["buckets"].as_array().context("no histogram")?;
        let waits: u64 = buckets
            .iter()
            .filter_map(|bucket| bucket["count"].as_u64())
            .sum();
        ensure!(waits == PAGES, "{way}: {waits} waits: {ended:?}");
    }
    Ok(())
}

fn latency() -> Result<()> {
    let _swap = Swap::on("256M")?;
    for way in WAYS {
        let mut workload = Workload::start("pageout", &[&PAGES.to_string()])?;
        let tool = start(way, &["-j", "-s", "-p", &workload.pid()])?;
        let begin = Instant::now();
        let facts = workload.work()?;
        let took = begin.elapsed();
        let ended = end(tool)?;
        let rows = ended.objects()?;
        let (last, rows) = rows.split_last().context("no rows")?;
        // Each major fault was one wait.
        let buckets = last["buckets"].as_array().context("no histogram")?;
        let waits: u64 = buckets
            .iter()
            .filter_map(|bucket| bucket["count"].as_u64())
            .sum();
        ensure!(
            waits == PAGES && facts["major"] == PAGES.to_string(),
            "{way}: {last} {facts:?}"
        );
        let held_up = Duration::from_nanos(sum(rows, "held_up_ns", None));
        ensure!(
            !held_up.is_zero() && held_up < took,
            "{way}: {held_up:?} of {took:?}"
        );
        // Each wait is at least as long as its bucket's lower bound.
        let least: u64 = buckets
            .iter()
            .filter_map(|bucket| Some(bucket["min"].as_u64()? * bucket["count"].as_u64()?))
            .sum();
        ensure!(
            Duration::from_nanos(least) <= held_up,
            "{least} ns in {held_up:?}"
        );
    }
    Ok(())
}

fn pages_written() -> Result<()> {
    let _swap = Swap::on("256M")?;
    for way in WAYS {
        let before = vmstat("pswpout")?;
        let tool = start(way, &["-j", "--out"])?;
        // The workload sends its pages to swap before it is ready.
        let mut workload = Workload::start("pageout", &[&PAGES.to_string()])?;
        let pid = workload.pid();
        workload.work()?;
        let ended = end(tool)?;
        let written = vmstat("pswpout")? - before;
        let rows = ended.objects()?;
        ensure!(
            sum(&rows, "pages_out", None) == written,
            "{way}: not {written}: {ended:?}"
        );
        ensure!(
            sum(&rows, "pages_out", Some(&pid)) >= PAGES,
            "{way}: {ended:?}"
        );
        ensure!(
            sum(&rows, "pages_in", Some(&pid)) == PAGES,
            "{way}: {ended:?}"
        );
    }
    Ok(())
}

fn processes_are_filtered() -> Result<()> {
    let _swap = Swap::on("256M")?;
    let mut workloads = [
        Workload::start("pageout", &["499"])?,
        Workload::start("pageout", &["997"])?,
    ];
    let tool = start("fentry", &["-T", "-p", &workloads[1].pid(), "60"])?;
    for workload in &mut workloads {
        workload.work()?;
    }
    let ended = end(tool)?;
    let pid = workloads[1].pid();
    let expected = format!("COMM             PID     COUNT\npageout          {pid:<7} 997\n\n");
    ensure!(ended.stdout == expected, "{ended:?}\nis not\n{expected}");
    Ok(())
}

/// The shell itself reads no pages back.
fn a_command_is_traced() -> Result<()> {
    let _swap = Swap::on("256M")?;
    let program = harness::workload("pageout");
    let program = program.display();
    let command = format!("sh -c '\"{program}\" 499; \"{program}\" 997; exit 7'");
    for way in WAYS {
        let ended = start(way, &["-j", "-c", &command, "60"])?.wait()?;
        ensure!(ended.status.code() == Some(7), "{way}: {ended:?}");
        let rows = ended.objects_among_lines()?;
        let mut pages: Vec<_> = rows.iter().map(|row| row["pages_in"].as_u64()).collect();
        pages.sort_unstable();
        ensure!(pages == [Some(499), Some(997)], "{way}: {ended:?}");
    }
    Ok(())
}

fn what_zswap_had_is_told() -> Result<()> {
    let _swap = Swap::on("256M")?;
    let pages = PAGES.to_string();
    for (zswap, way) in [false, true]
        .into_iter()
        .flat_map(|on| WAYS.map(|way| (on, way)))
    {
        let _zswap = zswap.then(Setting::zswap).transpose()?;
        let mut workload = Workload::start("pageout", &[&pages])?;
        let before = vmstat("pswpin")?;
        let tool = start(way, &["-j", "--zswap"])?;
        let facts = workload.work()?;
        let ended = end(tool)?;
        let from_device = vmstat("pswpin")? - before;
        ensure!(
            facts["swapped"] == pages && facts["sum_ok"] == "1",
            "{facts:?}"
        );
        let rows = ended.objects()?;
        let [all, had] = ["pages_in", "pages_zswap"].map(|field| sum(&rows, field, None));
        let pid = workload.pid();
        ensure!(
            sum(&rows, "pages_in", Some(&pid)) == PAGES,
            "{way}: {ended:?}"
        );
        let expected = if zswap { PAGES } else { 0 };
        let own = sum(&rows, "pages_zswap", Some(&pid));
        ensure!(own == expected, "{way}: {own} of {expected}: {ended:?}");
        ensure!(
            all - had == from_device,
            "{way}: not {from_device}: {ended:?}"
        );
    }
    Ok(())
}

fn bcc_s_report() -> Result<()> {
    let begin = Instant::now();
    let ended = harness::run("swapin", &["-n", "no such name", "0.3", "3"])?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(
        begin.elapsed() >= Duration::from_millis(900),
        "{:?}",
        begin.elapsed()
    );
    let lines: Vec<&str> = ended.stdout.lines().collect();
    ensure!(lines.len() == 9, "{ended:?}");
    for block in lines.chunks(3) {
        let [time, header, empty] = block else {
            unreachable!()
        };
        ensure!(time.len() == 8 && time.as_bytes()[2] == b':', "{ended:?}");
        ensure!(
            *header == "COMM             PID     COUNT" && empty.is_empty(),
            "{ended:?}"
        );
    }
    Ok(())
}

fn it_outlives_a_lack_of_memory() -> Result<()> {
    let mut tool = Tool::start("swapin", &[])?;
    tool.wait_for_stderr("tracing swap ins")?;
    harness::expect_protected_from_oom(tool)
}

fn every_attempt_is_named() -> Result<()> {
    let ended = harness::run("swapin", &["0.1", "1"])?;
    if Path::new("/sys/bus/event_source/devices/kprobe/type").exists() {
        ensure!(ended.status.success(), "{ended:?}");
        return Ok(());
    }
    ensure!(
        ended.status.code() == Some(1) && ended.stdout.is_empty(),
        "{ended:?}"
    );
    // What counts something similar is named, too.
    for part in ["\n  fentry: ", "\n  kprobe: ", "`faults --by-process -M`"] {
        ensure!(ended.stderr.contains(part), "{ended:?}");
    }
    ensure!(
        ended.stderr.contains("without kprobes (CONFIG_KPROBES)"),
        "{ended:?}"
    );
    Ok(())
}
