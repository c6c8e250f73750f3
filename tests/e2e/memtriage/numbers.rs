//! memtriage's numbers equal those of free, slabtop, smem and the kernel.

use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;

use super::{accounting, memory_total, of_type, part, triage, triage_of};
use crate::harness::{self, Workload};
use crate::pressure::Setting;

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "memtriage":
        parts_and_the_rest_are_all_of_memory,
        packets_that_are_not_read_are_accounted_for,
        little_is_unaccounted_for [Guest],
        numbers_are_those_of_free_and_slabtop [Once],
        shares_are_those_of_smem [Once],
        the_memory_of_a_process_is_in_its_parts,
        a_process_of_100_000_mappings_is_shown [Guest],
        a_large_one_of_thousands_of_processes_is_shown [Once],
    }
}

fn parts_and_the_rest_are_all_of_memory() -> Result<()> {
    let (objects, ended) = triage(&[])?;
    let table = accounting(&objects)?;
    let parts = table["parts"].as_array().context("no parts")?;
    let sum: i64 = parts.iter().filter_map(|part| part["bytes"].as_i64()).sum();
    let rest = table["unaccounted_bytes"].as_i64().context("no rest")?;
    ensure!(table["total_bytes"] == memory_total()?, "{table}");
    ensure!(table["total_bytes"] == sum + rest, "{table}");
    let to_look_at = of_type(&objects, "finding").into_iter();
    let healthy = to_look_at
        .clone()
        .all(|finding| finding["level"] == "healthy");
    ensure!(to_look_at.count() >= 19, "{ended:?}");
    let expected = if healthy { 0 } else { 3 };
    ensure!(ended.status.code() == Some(expected), "{ended:?}");
    Ok(())
}

/// Bytes that were sent and that no program reads are a part of memory.
fn packets_that_are_not_read_are_accounted_for() -> Result<()> {
    const CONNECTIONS: usize = 61;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut held = Vec::new();
    let (mut sent, bytes) = (0, vec![1; 1 << 20]);
    for _ in 0..CONNECTIONS {
        let mut from = TcpStream::connect(listener.local_addr()?)?;
        let to = listener.accept()?;
        from.set_nonblocking(true)?;
        while let Ok(written) = from.write(&bytes) {
            sent += written as u64;
        }
        held.push((from, to));
    }
    let (objects, _) = triage(&[])?;
    let table = accounting(&objects)?;
    let buffers = part(table, "socket buffers")?;
    ensure!(
        sent > 61 << 20 && buffers >= sent / 2,
        "{sent} sent: {table}"
    );
    Ok(())
}

/// Memory of several kinds is in the parts of the table, and at most 2 % are in none.
fn little_is_unaccounted_for() -> Result<()> {
    const MIB: u64 = 1 << 20;
    let mut hog = Workload::start("hog", &["67"])?;
    hog.work()?;
    let file = tempfile::NamedTempFile::new_in("/dev/shm").context("no file in memory")?;
    let byte = [1; MIB as usize];
    for _ in 0..61 {
        file.as_file().write_all(&byte)?;
    }
    let (objects, _) = triage(&[])?;
    let table = accounting(&objects)?;
    ensure!(part(table, "anonymous")? >= 67 * MIB, "{table}");
    ensure!(part(table, "shmem and tmpfs")? >= 61 * MIB, "{table}");
    let rest = table["unaccounted_bytes"].as_i64().context("no rest")?;
    ensure!(rest.unsigned_abs() * 50 <= memory_total()?, "{table}");

    let pid: u32 = hog.pid().parse()?;
    let processes = of_type(&objects, "process");
    let hog = processes.iter().find(|row| row["pid"] == pid);
    let hog = hog.with_context(|| format!("no hog in {processes:?}"))?;
    // The kernel adds up a process's pages from time to time: after 64 of a thread before 6.2, after 32 of a CPU since.
    let anon = hog["anon_bytes"].as_u64().unwrap_or_default();
    ensure!((66 * MIB..69 * MIB).contains(&anon), "{hog}");
    ensure!(hog["pss_bytes"].as_u64() >= Some(67 * MIB), "{hog}");
    Ok(())
}

/// Returns what another program prints. The program must succeed.
fn printed(program: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(program).args(args).output();
    let output = output.with_context(|| format!("no {program}"))?;
    ensure!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

/// Checks that both numbers are the same, except for what has changed on this machine meanwhile.
fn expect_near(what: &str, ours: u64, theirs: u64, slack: u64) -> Result<()> {
    let apart = ours.abs_diff(theirs);
    ensure!(apart <= slack, "{what}: {ours}, but {theirs}");
    Ok(())
}

fn numbers_are_those_of_free_and_slabtop() -> Result<()> {
    // Programs of other tests start and end meanwhile.
    let slack = memory_total()? / 20;
    let free = printed("free", &["-b", "-w"])?;
    let (objects, _) = triage(&["--by", "slab", "-T", "3"])?;
    let line = free.lines().find_map(|line| line.strip_prefix("Mem:"));
    let line = line.context("no memory")?.split_ascii_whitespace();
    let numbers: Vec<u64> = line.map(str::parse).collect::<Result<_, _>>()?;
    let [total, _, free, shared, buffers, cache, _] = numbers[..] else {
        bail!("{numbers:?}");
    };
    let table = accounting(&objects)?;
    ensure!(table["total_bytes"] == total, "{table} {total}");
    let ours = |names: &[&str]| -> Result<u64> { names.iter().map(|name| part(table, name)).sum() };
    expect_near("free", ours(&["free"])?, free, slack)?;
    expect_near("shared", ours(&["shmem and tmpfs"])?, shared, slack)?;
    let cached = ours(&["file cache", "shmem and tmpfs", "slab, reclaimable"])?;
    expect_near("buffers and cache", cached, buffers + cache, slack)?;

    let slabtop = printed("slabtop", &["-o"])?;
    let holders = of_type(&objects, "holder");
    ensure!(holders.len() == 3, "{objects:?}");
    for holder in holders {
        let name = holder["name"].as_str().context("no name")?;
        let row = slabtop
            .lines()
            .map(|line| line.split_ascii_whitespace().collect::<Vec<_>>())
            .find(|fields| fields.last() == Some(&name));
        let row = row.with_context(|| format!("no {name} in {slabtop}"))?;
        let kilobytes = row[row.len() - 2].strip_suffix('K').context("no size")?;
        let theirs = kilobytes.parse::<u64>()? << 10;
        let ours = holder["bytes"].as_u64().context("no bytes")?;
        expect_near(name, ours, theirs, theirs / 50 + (1 << 20))?;
    }
    Ok(())
}

fn shares_are_those_of_smem() -> Result<()> {
    let mut hog = Workload::start("hog", &["997"])?;
    hog.work()?;
    let (objects, _) = triage(&["-T", "20"])?;
    let smem = printed("smem", &["-H", "-c", "pid pss"])?;
    let pid = hog.pid();
    let theirs = smem.lines().find_map(|line| {
        let (row, kilobytes) = line.trim().split_once(' ')?;
        (row == pid).then(|| kilobytes.trim().parse::<u64>())
    });
    let theirs = theirs.with_context(|| format!("no {pid} in {smem}"))?? << 10;
    let pid: u32 = pid.parse()?;
    let mut processes = of_type(&objects, "process").into_iter();
    let ours = processes.find(|row| row["pid"] == pid);
    let ours = ours.and_then(|row| row["pss_bytes"].as_u64());
    // Other processes map and unmap the same libraries.
    expect_near("share", ours.context("no share")?, theirs, 1 << 20)
}

fn the_memory_of_a_process_is_in_its_parts() -> Result<()> {
    const MIB: u64 = 1 << 20;
    let mut hog = Workload::start("hog", &["67"])?;
    hog.work()?;
    let (objects, ended) = triage_of(&["-p", &hog.pid()])?;
    let table = accounting(&objects)?;
    let pid: u32 = hog.pid().parse()?;
    ensure!(table["pid"] == pid, "{table}");
    let anonymous = part(table, "anonymous mappings")?;
    ensure!((67 * MIB..68 * MIB).contains(&anonymous), "{table}");
    ensure!(part(table, "stacks")? > 0, "{table}");
    ensure!(part(table, "files, read only")? > 0, "{table}");
    ensure!(part(table, "page tables")? >= 67 * MIB / 512, "{table}");
    let rest = table["unaccounted_bytes"].as_i64().context("no rest")?;
    // The kernel adds up a process's pages from time to time.
    ensure!(rest.unsigned_abs() <= MIB, "{table}");
    let rows = of_type(&objects, "process");
    ensure!(rows.len() == 1 && rows[0]["comm"] == "hog", "{rows:?}");
    ensure!(ended.status.code() == Some(0), "{ended:?}");
    Ok(())
}

/// Checks that this process, which has written to `megabytes` megabytes, is among the ten largest. Its
/// proportional share of memory is missing if the time for reading it was up.
fn expect_among_the_largest(process: &Workload, megabytes: u64) -> Result<()> {
    let (objects, ended) = triage(&["--top", "10"])?;
    let pid = process.pid().parse::<u32>()?;
    let rows = of_type(&objects, "process");
    let row = rows.iter().find(|row| row["pid"] == pid);
    let row = row.with_context(|| format!("not there: {ended:?}"))?;
    let own = (megabytes - 1) << 20..(megabytes + 2) << 20;
    let (anon, pss) = (row["anon_bytes"].as_u64(), row["pss_bytes"].as_u64());
    ensure!(anon.is_some_and(|anon| own.contains(&anon)), "{row}");
    ensure!(pss.is_none_or(|pss| own.contains(&pss)), "{row}");
    Ok(())
}

fn a_process_of_100_000_mappings_is_shown() -> Result<()> {
    let _most = Setting::change("/proc/sys/vm/max_map_count", "262144")?;
    let mut mapped = Workload::start("cause", &["vmas", "397", "0"])?;
    mapped.work()?;
    let maps = fs::read_to_string(format!("/proc/{}/maps", mapped.pid()))?;
    ensure!(maps.lines().count() > 100_000);
    expect_among_the_largest(&mapped, 397)?;
    let (objects, _) = triage_of(&["-p", &mapped.pid()])?;
    let anonymous = part(accounting(&objects)?, "anonymous mappings")?;
    ensure!((397 << 20..398 << 20).contains(&anonymous), "{objects:?}");
    Ok(())
}

fn a_large_one_of_thousands_of_processes_is_shown() -> Result<()> {
    let mut hog = Workload::start("hog", &["1009"])?;
    hog.work()?;
    let mut crowd = Workload::start("hostile-crowd", &["processes", "5003", "1"])?;
    crowd.work()?;
    expect_among_the_largest(&hog, 1009)
}
