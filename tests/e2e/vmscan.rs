//! vmscan against programs that make the kernel reclaim memory, and against the kernel's own record of that.

mod compaction;
mod exact;

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libbpf_rs::{MapCore, MapFlags, ObjectBuilder, ProgramInput};
use libtest_mimic::Trial;
use memtools::bpf::attach;
use memtools::run::losses::Losses;
use regex_lite::Regex;
use serde_json::Value;

use crate::harness::{self, Tool};
use crate::load;
use crate::pressure::{Group, Writer, folder_on_disk};

pub(crate) fn tests() -> Vec<Trial> {
    let own = harness::tests! { "vmscan":
        rows_are_the_books,
        the_header_comes_again,
        tables_are_apart,
        it_outlives_a_lack_of_memory,
        a_small_cgroup_reclaims,
        what_a_command_starts_reclaims,
        shrinkers_that_nest_keep_their_start_and_recover,
    };
    [own, compaction::tests(), exact::tests()]
        .into_iter()
        .flatten()
        .collect()
}

const HEADER: &str = "TIME         S-SLABms  D-RECLAIMms  M-RECLAIMms KSWAPD WRITEPAGE";

fn start(args: &[&str]) -> Result<Tool> {
    let mut tool = Tool::start("vmscan", args)?;
    tool.wait_for_stderr("tracing")?;
    Ok(tool)
}

fn of_type<'a>(objects: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    objects.iter().filter(move |object| object["type"] == kind)
}

/// Returns the sum, over all intervals, of the field that a JSON pointer names.
fn sum(objects: &[Value], pointer: &str) -> Result<u64> {
    of_type(objects, "interval")
        .map(|interval| {
            let value = interval.pointer(pointer).and_then(Value::as_u64);
            value.with_context(|| format!("no {pointer} in {interval}"))
        })
        .sum()
}

/// Returns the number of values in a histogram. An empty histogram is not printed.
fn in_histogram(objects: &[Value], name: &str) -> u64 {
    of_type(objects, "histogram")
        .filter(|histogram| histogram["name"] == name)
        .flat_map(|histogram| histogram["buckets"].as_array().into_iter().flatten())
        .filter_map(|bucket| bucket["count"].as_u64())
        .sum()
}

fn rows_are_the_books() -> Result<()> {
    let ended = harness::run("vmscan", &["1", "2"])?;
    ensure!(ended.status.success(), "{ended:?}");
    let lines: Vec<&str> = ended.stdout.lines().collect();
    ensure!(lines.first() == Some(&HEADER), "{ended:?}");
    let row =
        Regex::new(r"^\d\d:\d\d:\d\d   [ \d]{9}\d [ \d]{11}\d [ \d]{11}\d [ \d]{5}\d [ \d]{8}\d$")?;
    ensure!(
        lines[1..3].iter().all(|line| row.is_match(line)),
        "{ended:?}"
    );
    ensure!(
        lines.get(3).is_none_or(|line| !row.is_match(line)),
        "{ended:?}"
    );
    Ok(())
}

fn the_header_comes_again() -> Result<()> {
    for (every, headers) in [("2", 2), ("0", 1)] {
        let ended = harness::run("vmscan", &["--header-every", every, "1", "3"])?;
        let found = ended.stdout.lines().filter(|line| *line == HEADER).count();
        ensure!(found == headers, "every {every}: {ended:?}");
    }
    Ok(())
}

fn tables_are_apart() -> Result<()> {
    let ended = harness::run("vmscan", &["--by-shrinker", "--by-cgroup", "1", "1"])?;
    let lines: Vec<&str> = ended.stdout.lines().collect();
    for table in ["SHRINKER ", "  S-SLABms  D-RECLAIMms  M-RECLAIMms CGROUP"] {
        let at = lines.iter().position(|line| line.starts_with(table));
        let at = at.with_context(|| format!("no {table}: {ended:?}"))?;
        ensure!(at > 0 && lines[at - 1].is_empty(), "{table}: {ended:?}");
    }
    Ok(())
}

fn it_outlives_a_lack_of_memory() -> Result<()> {
    for way in [&[][..], &["--counts"], &["--trace-compaction"]] {
        harness::expect_protected_from_oom(start(way)?)?;
    }
    Ok(())
}

/// All numbers about the same operations agree. The test also works where memory may not be used up: the cgroup
/// has 32 MB for the page cache of a file of 96 MB.
fn a_small_cgroup_reclaims() -> Result<()> {
    let mut writer = Writer::start("memtools-vmscan")?;
    let pid = writer.pid();
    let tool = start(&["-j", "-p", &pid, "--by-shrinker", "--by-cgroup"])?;
    writer.write()?;
    let ended = tool.interrupt()?;

    let objects = ended.objects()?;
    let reclaims = sum(&objects, "/memcg_reclaim/count")?;
    let time = sum(&objects, "/memcg_reclaim/time_ns")?;
    ensure!(
        reclaims >= 50 && time > 0,
        "{reclaims} in {time} ns: {ended:?}"
    );
    ensure!(
        in_histogram(&objects, "memcg_reclaim_ns") == reclaims,
        "{ended:?}"
    );
    let shrinks = sum(&objects, "/shrink_slab/count")?;
    ensure!(
        in_histogram(&objects, "shrink_slab_ns") == shrinks,
        "{ended:?}"
    );
    let by_shrinker: u64 = of_type(&objects, "shrinker")
        .filter_map(|shrinker| shrinker["count"].as_u64())
        .sum();
    ensure!(
        by_shrinker == shrinks,
        "{by_shrinker} of {shrinks}: {ended:?}"
    );
    let by_cgroup: u64 = of_type(&objects, "cgroup")
        .filter_map(|cgroup| cgroup.pointer("/memcg_reclaim/count")?.as_u64())
        .sum();
    ensure!(
        by_cgroup == reclaims,
        "{by_cgroup} of {reclaims}: {ended:?}"
    );
    if writer.group.path().starts_with("/sys/fs/cgroup/memtools") {
        ensure!(
            of_type(&objects, "cgroup").any(|cgroup| cgroup["path"] == "/memtools-vmscan"),
            "{ended:?}"
        );
    }
    let limited = of_type(&objects, "cgroup")
        .filter(|cgroup| cgroup["limited"] == "/memtools-vmscan")
        .filter_map(|cgroup| cgroup.pointer("/memcg_reclaim/count")?.as_u64());
    ensure!(limited.sum::<u64>() == reclaims, "{ended:?}");
    Ok(())
}

/// The shell itself has nothing to reclaim.
fn what_a_command_starts_reclaims() -> Result<()> {
    let group = Group::new("memtools-vmscan-c", 32 << 20)?;
    let folder = folder_on_disk()?;
    let script = folder.path().join("script");
    // The files are written to the disk piece by piece, because dirty pages cannot be reclaimed.
    let write = format!(
        "echo $$ >{}/cgroup.procs && cd {} || exit
         for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24; do
             dd if=/dev/zero of=written$i bs=1048576 count=4 conv=fsync 2>/dev/null || exit
         done",
        group.path(),
        folder.path().display()
    );
    fs::write(&script, write)?;
    let command = format!("sh {}", script.display());
    let ended = start(&["-j", "-c", &command])?.wait()?;
    let reclaims = sum(&ended.objects()?, "/memcg_reclaim/count")?;
    ensure!(reclaims >= 50, "{reclaims}: {ended:?}");

    let ended = start(&["--counts", "-c", "sh -c 'exit 7'"])?.wait()?;
    ensure!(ended.status.code() == Some(7), "{ended:?}");
    Ok(())
}

/// The kernel seldom nests shrinkers, so the test runs the BPF programs itself, on this thread: one shrinker in
/// another one.
fn shrinkers_that_nest_keep_their_start_and_recover() -> Result<()> {
    let (_, object) = load::OBJECTS
        .iter()
        .find(|(tool, _)| *tool == "vmscan")
        .context("no object")?;
    let mut open = ObjectBuilder::default().open_memory(object)?;
    attach::load_only(&mut open, &["shrink_slab_start", "shrink_slab_end"])?;
    let object = open.load()?;
    let run = |name: &str, shrinker: u64| -> Result<()> {
        let program = object.progs_mut().find(|program| program.name() == name);
        // The arguments are the shrinker, ..., the number of freed objects, ...
        let mut arguments = [shrinker, 0, 0, 0, 0, 0, 0].map(u64::to_ne_bytes).concat();
        program.context("no program")?.test_run(ProgramInput {
            context_in: Some(&mut arguments),
            ..ProgramInput::default()
        })?;
        Ok(())
    };
    let before = Instant::now();
    run("shrink_slab_start", 1)?;
    let begin = Instant::now();
    let busy_until = |milliseconds| while begin.elapsed() < Duration::from_millis(milliseconds) {};
    busy_until(11);
    run("shrink_slab_start", 2)?;
    busy_until(31);
    run("shrink_slab_end", 2)?;
    busy_until(41);
    run("shrink_slab_end", 1)?;
    // Missing ends do not use up the entries for good: the fifth start frees some.
    for shrinker in [3, 3, 3, 3, 4] {
        run("shrink_slab_start", shrinker)?;
    }
    run("shrink_slab_end", 4)?;
    let lost = Losses::counted(&object)?.calls;
    ensure!(lost == 4, "{lost} lost");
    let took = before.elapsed().as_nanos() as u64;

    // The first total is that of shrinking: count, time_ns, and a histogram by powers of two.
    let totals = object.maps().find(|map| map.name() == "totals");
    let value = totals
        .context("no totals")?
        .lookup(&0u32.to_ne_bytes(), MapFlags::ANY)?
        .context("no total")?;
    let numbers: Vec<u64> = value
        .chunks_exact(8)
        .map(|bytes| bytes.try_into().map(u64::from_ne_bytes))
        .collect::<Result<_, _>>()?;
    let (count, time_ns, slots) = (numbers[0], numbers[1], &numbers[2..]);
    ensure!(
        count == 3 && time_ns >= 41_000_000 && time_ns <= took,
        "{count} shrinkers in {time_ns} of {took} ns"
    );
    let bits = |ns: u64| (u64::BITS - ns.leading_zeros()) as usize;
    let outer = slots.iter().rposition(|&count| count > 0);
    ensure!(
        slots.iter().sum::<u64>() == 3 && outer >= Some(bits(41_000_000)),
        "{slots:?}"
    );
    Ok(())
}
