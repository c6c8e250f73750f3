//! What has no room in memory, and is read from disk or swap again and again.

use std::fs;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use super::{expect_all_accounted_for, first, foremost_beside, wrong};
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

/// A program that reads a file in a cgroup that is too small for it: the limit is the cause, and what was
/// dropped and is read again is what comes of it.
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
    ensure!(finding["next"] == "drsnoop --memcg -e -d 10", "{finding}");
    let refaults = wrong(&objects)
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

/// A program that reads a file for which the machine has not enough memory: nobody faults, as it is by read(2).
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
    ensure!(finding["next"] == "vmscan -k -d 10", "{finding}");
    expect_all_accounted_for(&objects)
}

/// Takes memory until a quarter of what this process reads was dropped lately, for three seconds: in a single one it may
/// have been dropped for the balloon. (What is read again the kernel keeps longer, so that it is not all.)
///
/// What the kernel calls available is without its reserves, of which it may give a part: on 7.2 a file of 195 MB had
/// room in 150.
fn leave_no_room(reader: &Workload, balloons: &mut Vec<Balloon>) -> Result<()> {
    /// Less than this, and the guest does not go on: its programs are files in memory.
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
        // A machine of which others take the CPUs reads little in a second: the share counts.
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

/// A storm of swap: a process writes to more pages than it may have in memory, again and again.
fn a_process_larger_than_its_memory() -> Result<()> {
    storm_of_swap().map(drop)
}

fn a_process_larger_than_its_memory_with_zswap() -> Result<()> {
    let _zswap = Setting::zswap()?;
    let before = vmstat("zswpout")?;
    let objects = storm_of_swap()?;
    let table = of_type(&objects, "accounting")[0];
    // The pages are nearly empty: of 4096 bytes zswap keeps some 80.
    ensure!(part(table, "zswap and zram")? > 256 << 10, "{table}");
    ensure!(vmstat("zswpout")? - before > 10_007);
    Ok(())
}

/// What is printed of a machine on which a process's pages go to swap and come back. A cgroup has the limit: where the
/// whole machine has too little, a guest does not go on, as its programs are files in memory that go to swap, too.
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
    ensure!(finding["next"] == "swapin -s -d 10", "{finding}");
    expect_all_accounted_for(&objects)?;
    sum_by(answer(&objects, "swap-in")?, "write_pages")?;
    let ended = harness::run("swapin", &["-s", "-j", "-d", "2"])?;
    ensure!(ended.stdout.contains("\"comm\":\"thrash\""), "{ended:?}");
    Ok(objects)
}
