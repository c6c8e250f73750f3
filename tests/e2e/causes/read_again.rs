//! Pages that do not fit into memory, and are read from disk or swap again and again.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use super::{current_findings, expect_all_accounted_for, first, foremost_beside};
use crate::harness::{self, Workload, eventually, workload};
use crate::memtriage::who::{answer, sum_by};
use crate::memtriage::{of_type, part, triage};
use crate::pressure::{Balloon, Group, Setting, Swap, folder_on_disk, meminfo_kb, vmstat};

pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "causes":
        a_file_larger_than_its_cache [Guest, Disk],
        a_file_larger_than_memory [Guest, Disk],
        a_process_larger_than_its_memory [Guest],
        a_process_larger_than_its_memory_with_zswap [Guest, Zswap],
    }
}

/// A program reads a file in a cgroup that is too small for the file. The limit is the cause; pages that were
/// dropped and are read again are its effect.
fn a_file_larger_than_its_cache() -> Result<()> {
    const NAME: &str = "memtools-reread";
    let folder = folder_on_disk()?;
    let file = folder.path().join("file").display().to_string();
    let group = Group::new(NAME, 32 << 20)?;
    let mut reader = Workload::start("reread", &[&file, "20011"])?;
    group.set("cgroup.procs", &reader.pid())?;
    reader.work()?;
    reader.go()?;
    let (objects, _) = triage(&["--who", "3"])?;
    let finding = first(&objects, "cgroup-limit", "act")?;
    let evidence = finding["evidence"].as_str().unwrap_or_default();
    ensure!(
        evidence.starts_with(&format!("/{NAME} uses ")),
        "{evidence}"
    );
    ensure!(
        finding["next"] == "drsnoop --memcg --summary -d 10",
        "{finding}"
    );
    let refaults = current_findings(&objects)
        .into_iter()
        .find(|finding| finding["rule"] == "refaults")
        .context("no refaults")?;
    let evidence = refaults["evidence"].as_str().unwrap_or_default();
    ensure!(evidence.contains("by a cgroup's limit"), "{evidence}");
    let reclaimers = answer(&objects, "cgroup-limit")?;
    ensure!(
        reclaimers["command"] == "drsnoop --memcg --stack -d 3",
        "{reclaimers}"
    );
    ensure!(reclaimers["stacks"][0]["comm"] == "reread", "{reclaimers}");
    sum_by(reclaimers, "reread")?;
    Ok(())
}

/// A program reads a file that does not fit into the machine's memory. No process faults, because the program
/// uses read(2).
fn a_file_larger_than_memory() -> Result<()> {
    let folder = folder_on_disk()?;
    let file = folder.path().join("file").display().to_string();
    let mut reader = Workload::start("reread", &[&file, "50021"])?;
    let mut balloons = vec![Balloon::leaving(150 << 10)?];
    reader.work()?;
    reader.go()?;
    leave_no_room(&reader, &mut balloons)?;
    let (objects, _) = triage(&[])?;
    let (finding, evidence) = foremost_beside(&objects, "running-out", "refaults")?;
    let by = format!("; most by read(2), of reread (pid {}), ", reader.pid());
    ensure!(evidence.contains(&by), "{evidence}");
    ensure!(finding["next"] == "vmscan --by-cgroup -d 10", "{finding}");
    expect_all_accounted_for(&objects)
}

/// Takes memory until, for three seconds in a row, a quarter of the pages that this process reads were dropped
/// recently. In a single second the pages may have been dropped because of the balloon. (The kernel keeps pages
/// that are read again longer, so not all are dropped.)
///
/// The kernel's count of available memory omits its reserves, of which it may give a part: on 7.2 a file of
/// 195 MB fitted into 150.
fn leave_no_room(reader: &Workload, balloons: &mut Vec<Balloon>) -> Result<()> {
    /// Available memory below which a guest does not go on, because its programs are files in memory.
    const LEAST_KB: u64 = 64 << 10;
    let io = format!("/proc/{}/io", reader.pid());
    let read_pages = || -> Result<u64> {
        let text = fs::read_to_string(&io)?;
        let bytes = text.lines().find_map(|line| line.strip_prefix("rchar: "));
        Ok(bytes.context("no bytes")?.parse::<u64>()? / 4096)
    };
    let mut seconds = 0;
    eventually("the file has no room", || {
        let (read, refaults) = (read_pages()?, vmstat("workingset_refault_file")?);
        thread::sleep(Duration::from_secs(1));
        let refaults = vmstat("workingset_refault_file")? - refaults;
        // On a machine whose CPUs others use, the process reads little in a second, so the share is compared.
        if refaults * 4 > read_pages()? - read && refaults > 1000 {
            seconds += 1;
        } else {
            seconds = 0;
            let available = meminfo_kb("MemAvailable")?;
            ensure!(
                available >= LEAST_KB,
                "{refaults} refaults with {available} kB"
            );
            balloons.push(Balloon::of(16 << 10)?);
        }
        Ok(seconds == 3)
    })
}

/// Swap storm: a process writes again and again to more pages than its limit permits in memory.
fn a_process_larger_than_its_memory() -> Result<()> {
    storm_of_swap().map(drop)
}

fn a_process_larger_than_its_memory_with_zswap() -> Result<()> {
    let _zswap = Setting::zswap()?;
    let before = vmstat("zswpout")?;
    let objects = storm_of_swap()?;
    let table = of_type(&objects, "accounting")[0];
    // The pages are nearly empty: zswap keeps some 80 of 4096 bytes.
    ensure!(part(table, "zswap and zram")? > 256 << 10, "{table}");
    ensure!(vmstat("zswpout")? - before > 10_007);
    Ok(())
}

/// Returns what memtriage prints while a process's pages go to swap and come back. A cgroup has the limit: if the
/// whole machine had too little memory, a guest would not go on, because its programs are files in memory that go
/// to swap, too.
fn storm_of_swap() -> Result<Vec<Value>> {
    let _swap = Swap::on("256M")?;
    let group = Group::new("memtools-storm", 64 << 20)?;
    let mut thrash = group.command(&workload("thrash"), &["30011", "1000003"]);
    let mut thrash = Workload::spawn(&mut thrash)?;
    let read_back =
        || -> Result<u64> { Ok(vmstat("pswpin")? + vmstat("zswpin").unwrap_or_default()) };
    let before = read_back()?;
    thrash.go()?;
    eventually("pages are read back", || Ok(read_back()? > before + 10_007))?;
    let (objects, _) = triage(&["--who", "3"])?;
    let (finding, evidence) = foremost_beside(&objects, "cgroup-limit", "swap-in")?;
    let by = format!("; most by thrash (pid {}), ", thrash.pid());
    ensure!(evidence.contains(&by), "{evidence}");
    let next = format!("swapin -s -p {} -d 10", thrash.pid());
    ensure!(finding["next"] == *next, "{finding}");
    expect_all_accounted_for(&objects)?;
    sum_by(answer(&objects, "swap-in")?, "write_pages")?;
    let ended = harness::run("swapin", &["-s", "-j", "-d", "2"])?;
    ensure!(ended.stdout.contains("\"comm\":\"thrash\""), "{ended:?}");
    Ok(objects)
}
