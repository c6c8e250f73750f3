//! Stacks are complete, and what exceeds a capacity is counted.

use std::collections::HashSet;

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::query::MapInfoIter;
use libbpf_rs::{MapCore, MapHandle};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;

use super::{Group, attach, last_report, name, outstanding, trace, trace_all};
use crate::harness::{self, ToolOutput, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak":
        stacks_are_complete_with_frame_pointers,
        deep_stacks_are_cut_and_counted,
        tens_of_thousands_of_stacks,
        stacks_of_what_is_gone_make_room,
        stacks_that_do_not_fit_are_counted,
        blocks_that_do_not_fit_are_counted,
        more_blocks_than_memory_are_refused,
        events_that_do_not_fit_are_counted,
    }
}

fn stacks_are_complete_with_frame_pointers() -> Result<()> {
    let groups = trace_all("alloc", &["deep", "100", "4093"])?;
    let [group] = &groups[..] else {
        bail!("{groups:#?}")
    };
    let names: Vec<&str> = group.frames.iter().map(|frame| name(frame)).collect();
    ensure!(names[..101].iter().all(|&name| name == "deep"), "{names:?}");
    ensure!(names[101] == "main", "{names:?}");
    Ok(())
}

fn deep_stacks_are_cut_and_counted() -> Result<()> {
    let ended = trace("alloc", &["deep", "300", "4093"], &["-o", "0", "60"])?;
    let groups = last_report(&ended.stdout)?;
    let [group] = &groups[..] else {
        bail!("{groups:#?}")
    };
    ensure!(
        group.frames.len() == 255 + 1,
        "{} frames",
        group.frames.len()
    );
    ensure!(
        group.frames[255].starts_with("[truncated"),
        "{}",
        group.frames[255]
    );
    ensure!(
        ended.stderr.contains("lost 1 stack tails"),
        "{}",
        ended.stderr
    );

    let args = ["-o", "0", "--perf-max-stack-depth", "7", "60"];
    let groups = last_report(&trace("alloc", &["deep", "300", "4093"], &args)?.stdout)?;
    ensure!(groups[0].frames.len() == 7 + 1, "{groups:#?}");
    Ok(())
}

fn tens_of_thousands_of_stacks() -> Result<()> {
    let count = if harness::in_guest() { 1009 } else { 50_021 };
    let args = [
        "-j",
        "-o",
        "0",
        "-T",
        "65536",
        "--stack-storage-size",
        "65536",
        "60",
    ];
    let ended = trace("alloc", &["stacks", &count.to_string()], &args)?;
    ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
    let rows = ended.objects()?;
    ensure!(rows[0]["stacks"] == count, "{}", rows[0]);
    let mut different = HashSet::new();
    for row in rows.iter().filter(|row| row["type"] == "stack") {
        ensure!(row["allocations"] == 1, "{row}");
        different.insert(row["user_frames"].to_string());
    }
    ensure!(different.len() == count, "{} stacks", different.len());
    Ok(())
}

/// Returns the number of stacks in the newest table of this size, by which the tool's table is recognized.
fn stacks_in_use(size: u32) -> usize {
    let maps = MapInfoIter::default().filter(|info| info.max_entries == size);
    let newest = maps.map(|info| info.id).max();
    let map = newest.and_then(|id| MapHandle::from_map_id(id).ok());
    map.map_or(usize::MAX, |map| map.keys().count())
}

/// Ten times as many stacks as the table can hold, of which few have live blocks.
fn stacks_of_what_is_gone_make_room() -> Result<()> {
    const ROUNDS: usize = 29;
    const STACKS: usize = 1499;
    // Size of the table, by which it is recognized among other tables.
    const SIZE: u32 = 4099;
    let (rounds, stacks) = (ROUNDS.to_string(), STACKS.to_string());
    let mut workload = Workload::start("alloc", &["churn", &rounds, &stacks])?;
    let size = SIZE.to_string();
    let args = [
        "-j",
        "-o",
        "0",
        "-T",
        "100",
        "--stack-storage-size",
        &size,
        "60",
    ];
    let tool = attach(&workload, &args)?;
    for round in 1..=ROUNDS {
        workload.round(round == ROUNDS)?;
        // The workload waits, because a program that only allocates is faster than any reader.
        let has_room = || stacks_in_use(SIZE) < SIZE as usize - STACKS;
        harness::eventually("there is room", || Ok(has_room()))?;
    }
    let ended = tool.interrupt()?;
    ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
    let rows = ended.objects()?;
    ensure!(rows[0]["stacks"] == ROUNDS, "{}", rows[0]);
    let mut different = HashSet::new();
    for row in rows.iter().filter(|row| row["type"] == "stack") {
        let frames = row["user_frames"].as_array().map_or(0, Vec::len);
        ensure!(
            row["allocations"] == 1 && row["truncated"].is_null() && frames > 20,
            "{row}"
        );
        different.insert(row["user_frames"].to_string());
    }
    ensure!(different.len() == ROUNDS, "{} stacks", different.len());
    ensure!(workload.finish()?.success());
    Ok(())
}

fn stacks_that_do_not_fit_are_counted() -> Result<()> {
    let all = trace_all("alloc", &["stacks", "211"])?;
    ensure!(all.len() == 211, "{} stacks", all.len());

    // The table is tested before it is renewed and afterwards. The new table cannot hold all stacks either.
    for (interval, count) in [("60", "1"), ("1", "3")] {
        let mut workload = Workload::start("alloc", &["stacks", "211"])?;
        let args = ["-o", "0", "-T", "1000", "--stack-storage-size", "101"];
        let tool = attach(&workload, &[&args[..], &[interval, count]].concat())?;
        workload.work()?;
        let ended = match count {
            "1" => tool.interrupt()?,
            _ => tool.wait()?,
        };
        stacks_that_do_not_fit_are_one_group(&ended)?;
    }
    Ok(())
}

fn stacks_that_do_not_fit_are_one_group(ended: &ToolOutput) -> Result<()> {
    let groups = last_report(&ended.stdout)?;
    let allocations: u64 = groups.iter().map(|group| group.allocations).sum();
    ensure!(
        allocations == 211,
        "allocations without a stack are omitted: {allocations}"
    );
    let lost: Vec<&Group> = groups
        .iter()
        .filter(|group| group.frames == ["stack information lost"])
        .collect();
    let [lost] = &lost[..] else {
        bail!("{lost:#?}")
    };
    ensure!(lost.allocations > 0, "{lost:#?}");
    let counted = format!("lost {} stacks", lost.allocations);
    ensure!(
        ended.stderr.contains(&counted),
        "not {counted:?} in {}",
        ended.stderr
    );
    Ok(())
}

fn blocks_that_do_not_fit_are_counted() -> Result<()> {
    let args = ["-o", "0", "--max-allocs", "101", "60"];
    let ended = trace("alloc", &["one", "malloc", "211", "4093"], &args)?;
    let groups = last_report(&ended.stdout)?;
    let (_, followed) = outstanding(&groups, "leak_malloc");
    ensure!((101..211).contains(&followed), "{followed} blocks");
    let counted = format!("lost {} entries", 211 - followed);
    ensure!(
        ended.stderr.contains(&counted),
        "not {counted:?} in {}",
        ended.stderr
    );
    Ok(())
}

fn more_blocks_than_memory_are_refused() -> Result<()> {
    let command = harness::workload("alloc").display().to_string();
    let limits = ["--max-allocs", "1000003", "--mem-limit", "1M"];
    let args = [&["-c", &command][..], &limits].concat();
    harness::expect_refusal("memleak", &args, 2, "lower --max-allocs")
}

/// The workload makes more mappings than the ring buffer holds, while memleak is stopped and does not read it.
fn events_that_do_not_fit_are_counted() -> Result<()> {
    const MAPPINGS: u64 = 60_013;
    let mut workload = Workload::start("alloc", &["one", "mmap", &MAPPINGS.to_string(), "4096"])?;
    let tool = attach(&workload, &["-j", "-o", "0", "60"])?;
    tool.signal(Signal::SIGSTOP)?;
    workload.work()?;
    tool.signal(Signal::SIGCONT)?;
    let ended = tool.interrupt()?;
    let objects = ended.objects()?;
    let head = objects.first().context("no report")?;
    let lost = head["lost"]["events"]
        .as_u64()
        .context("no count of lost events")?;
    ensure!(lost > 0, "nothing was lost: {head}");
    ensure!(head["allocations"] == MAPPINGS - lost, "{head}");
    ensure!(
        ended.stderr.contains(&format!("lost {lost} events")),
        "{}",
        ended.stderr
    );
    Ok(())
}
