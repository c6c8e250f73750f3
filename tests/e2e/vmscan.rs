//! vmscan against programs that make the kernel reclaim, and against its own record of that.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::{MapCore, MapFlags, ObjectBuilder, ProgramInput};
use libtest_mimic::Trial;
use memtools::attach;
use memtools::losses::Losses;
use regex_lite::Regex;
use serde_json::Value;

use crate::harness::{self, Ended, Need, Tool, Workload, workload};
use crate::load;
use crate::pressure::{Group, Recording, Scarcity, Swap, Writer, folder_on_disk, shell};

pub(crate) fn tests() -> Vec<Trial> {
    let test = |name: &str, needs: &'static [Need], run: fn() -> Result<()>| {
        harness::test(&format!("vmscan::{name}"), needs, run)
    };
    vec![
        test("rows_are_the_books", &[], rows_are_the_books),
        test("the_header_comes_again", &[], the_header_comes_again),
        test("a_small_cgroup_reclaims", &[], a_small_cgroup_reclaims),
        test(
            "what_a_command_starts_reclaims",
            &[],
            what_a_command_starts_reclaims,
        ),
        test(
            "shrinkers_that_nest_keep_their_start_and_recover",
            &[],
            shrinkers_that_nest_keep_their_start_and_recover,
        ),
        test(
            "each_compaction_has_a_line",
            &[Need::Guest],
            each_compaction_has_a_line,
        ),
        test(
            "memcg_reclaim_equals_the_tracepoints",
            &[Need::Guest],
            memcg_reclaim_equals_the_tracepoints,
        ),
        test(
            "direct_reclaim_equals_the_tracepoints",
            &[Need::Guest],
            direct_reclaim_equals_the_tracepoints,
        ),
        test(
            "shrinkers_are_named_and_add_up",
            &[Need::Guest, Need::Disk],
            shrinkers_are_named_and_add_up,
        ),
        test(
            "counts_are_of_all_tracepoints",
            &[Need::Guest],
            counts_are_of_all_tracepoints,
        ),
    ]
}

const HEADER: &str = "TIME         S-SLABms  D-RECLAIMms  M-RECLAIMms KSWAPD WRITEPAGE";

fn start(args: &[&str]) -> Result<Tool> {
    let mut tool = Tool::start("vmscan", args)?;
    tool.wait_for("tracing")?;
    Ok(tool)
}

/// The objects of a JSON output.
fn objects(ended: &Ended) -> Result<Vec<Value>> {
    ensure!(ended.status.success(), "{ended:?}");
    ended
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).with_context(|| format!("no JSON: {line}")))
        .collect()
}

fn of_type<'a>(objects: &'a [Value], kind: &'a str) -> impl Iterator<Item = &'a Value> {
    objects.iter().filter(move |object| object["type"] == kind)
}

/// The sum over all intervals of what a JSON pointer names.
fn sum(objects: &[Value], pointer: &str) -> Result<u64> {
    of_type(objects, "interval")
        .map(|interval| {
            let value = interval.pointer(pointer).and_then(Value::as_u64);
            value.with_context(|| format!("no {pointer} in {interval}"))
        })
        .sum()
}

/// Values that a histogram counts; 0 if it was empty and not printed.
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

/// Everything that is printed of the same operations agrees. This much also works where no memory
/// may be used up: the cgroup has 8 MB for the page cache of a file of 64 MB.
fn a_small_cgroup_reclaims() -> Result<()> {
    let mut writer = Writer::start("memtools-vmscan")?;
    let pid = writer.pid();
    let tool = start(&["-j", "-p", &pid, "--by-shrinker", "--by-cgroup"])?;
    writer.write()?;
    let ended = tool.interrupt()?;

    let objects = objects(&ended)?;
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
    Ok(())
}

/// The shell itself has nothing to reclaim.
fn what_a_command_starts_reclaims() -> Result<()> {
    let group = Group::new("memtools-vmscan-c", 32 << 20)?;
    let folder = folder_on_disk()?;
    let script = folder.path().join("script");
    // Written out piece by piece: dirty pages cannot be reclaimed.
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
    let ended = start(&["-j", "-c", &command])?.end()?;
    let reclaims = sum(&objects(&ended)?, "/memcg_reclaim/count")?;
    ensure!(reclaims >= 50, "{reclaims}: {ended:?}");

    let ended = start(&["--counts", "-c", "sh -c 'exit 7'"])?.end()?;
    ensure!(ended.status.code() == Some(7), "{ended:?}");
    Ok(())
}

/// The kernel seldom nests them, so the programs are run by hand, on this thread: one shrinker in
/// another one.
fn shrinkers_that_nest_keep_their_start_and_recover() -> Result<()> {
    let (_, object) = load::OBJECTS
        .iter()
        .find(|(tool, _)| *tool == "vmscan")
        .context("no object")?;
    let mut open = ObjectBuilder::default().open_memory(object)?;
    attach::load_only(&mut open, &["shrink_slab_start", "shrink_slab_end"]);
    let object = open.load()?;
    let run = |name: &str, shrinker: u64| -> Result<()> {
        let program = object.progs_mut().find(|program| program.name() == name);
        // (shrinker, ..., what was freed, ...)
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
    // Ends that are missing do not use up the room for good: the fifth start makes some.
    for shrinker in [3, 3, 3, 3, 4] {
        run("shrink_slab_start", shrinker)?;
    }
    run("shrink_slab_end", 4)?;
    let lost = Losses::counted(&object)?.calls;
    ensure!(lost == 4, "{lost} lost");
    let took = before.elapsed().as_nanos() as u64;

    // The first total is that of shrinking: count, time_ns, and a histogram by bits.
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

/// Equal to what the kernel recorded, in its order.
fn each_compaction_has_a_line() -> Result<()> {
    let recording = Recording::start("vmscan", &["compaction"], 0)?;
    let command = "sh -c 'echo 1 >/proc/sys/vm/compact_memory'";
    let begin = Instant::now();
    let ended = start(&["--trace-compaction", "-j", "-c", command])?.end()?;
    let took = begin.elapsed().as_nanos() as u64;
    let trace = recording.read()?;

    let mut expected = Vec::new();
    for line in &trace {
        if line.name == "mm_compaction_end" && line.task.starts_with("sh-") {
            expected.push((
                line.field("mode")? == "sync",
                line.field("status")?.to_owned(),
            ));
        }
    }
    let mut found = Vec::new();
    let mut time = 0;
    for row in objects(&ended)? {
        let status = row["status"].as_str().context("no status")?;
        found.push((row["sync"] == true, status.to_owned()));
        time += row["latency_ns"].as_u64().context("no latency")?;
        ensure!(row["comm"] == "sh" && row["order"] == -1, "{row}");
    }
    ensure!(
        found == expected && !found.is_empty(),
        "{found:?}, not {expected:?}"
    );
    ensure!(time > 0 && time < took, "{time} of {took} ns");
    // A zone has a name of letters, and digits.
    let zones = fs::read_to_string("/proc/zoneinfo")?;
    for row in objects(&ended)? {
        let zone = format!(
            "Node {}, zone {:>8}\n",
            row["node"],
            row["zone"].as_str().context("no zone")?
        );
        ensure!(zones.contains(&zone), "{zone} is not in {zones}");
    }
    Ok(())
}

/// What vmscan says of a workload equals what the kernel recorded of it.
fn equals_the_tracepoints(
    mut workload: Workload,
    work: impl FnOnce(&mut Workload) -> Result<()>,
    busy: &str,
) -> Result<()> {
    let pid = workload.pid();
    let recording = Recording::start("vmscan", &["vmscan"], pid.parse()?)?;
    let tool = start(&["-j", "-p", &pid])?;
    work(&mut workload)?;
    let ended = tool.interrupt()?;
    let trace = recording.read()?;
    let traced = |name: &str| trace.iter().filter(|line| line.name == name).count() as u64;

    let objects = objects(&ended)?;
    let written = traced("mm_vmscan_write_folio") + traced("mm_vmscan_writepage");
    for (pointer, expected) in [
        (
            "/memcg_reclaim/count",
            traced("mm_vmscan_memcg_reclaim_end"),
        ),
        (
            "/direct_reclaim/count",
            traced("mm_vmscan_direct_reclaim_end"),
        ),
        ("/shrink_slab/count", traced("mm_shrink_slab_end")),
        ("/kswapd_wakeups", traced("mm_vmscan_wakeup_kswapd")),
        ("/pages_written", written),
    ] {
        let counted = sum(&objects, pointer)?;
        ensure!(
            counted == expected,
            "{pointer}: {counted} of {expected}; {ended:?}"
        );
    }
    let reclaims = sum(&objects, &format!("/{busy}/count"))?;
    // kswapd does the rest, and it can be nearly all.
    ensure!(reclaims > 0, "no {busy}: {ended:?}");
    ensure!(
        in_histogram(&objects, &format!("{busy}_ns")) == reclaims,
        "{ended:?}"
    );

    // The two take their times at slightly different places.
    let ours = sum(&objects, &format!("/{busy}/time_ns"))?;
    let (mut theirs, mut begun) = (0, 0);
    for line in &trace {
        if line.name == format!("mm_vmscan_{busy}_begin") {
            begun = line.time_ns;
        } else if line.name == format!("mm_vmscan_{busy}_end") {
            theirs += line.time_ns - begun;
        }
    }
    ensure!(
        ours > theirs / 2 && ours < theirs * 2,
        "{ours} ns, but {theirs} ns by the trace"
    );
    Ok(())
}

fn memcg_reclaim_equals_the_tracepoints() -> Result<()> {
    let _swap = Swap::on("128M")?;
    let group = Group::new("memtools-vmscan", 16 << 20)?;
    let thrash = Workload::spawn(&mut group.command(&workload("thrash"), &["6007", "1"]))?;
    let work = |thrash: &mut Workload| thrash.work().map(drop);
    equals_the_tracepoints(thrash, work, "memcg_reclaim")
}

fn direct_reclaim_equals_the_tracepoints() -> Result<()> {
    let _swap = Swap::on("512M")?;
    let hog = Workload::start("hog", &["109", "900"])?;
    let work = |hog: &mut Workload| {
        let _scarcity = Scarcity::for_process(&hog.pid())?;
        hog.work().map(drop)
    };
    equals_the_tracepoints(hog, work, "direct_reclaim")
}

fn shrinkers_are_named_and_add_up() -> Result<()> {
    let disk = std::env::var("MEMTOOLS_DISK")?;
    let mut slab = Workload::start("slab", &[&format!("{disk}/memtools-slab"), "2003"])?;
    slab.work()?;
    let recording = Recording::start("vmscan", &["vmscan"], 0)?;
    let tool = start(&["-j", "-n", "memtools-drop", "--by-shrinker"])?;
    // The first time they may only be found to have been used lately.
    let folder = harness::scratch()?;
    let script = folder.path().join("memtools-drop");
    fs::write(
        &script,
        "#!/bin/sh\nfor i in 1 2 3; do echo 2 >/proc/sys/vm/drop_caches; done\n",
    )?;
    shell(&format!("chmod +x {0} && exec {0}", script.display()))?;
    let ended = tool.interrupt()?;
    let trace = recording.read()?;

    let objects = objects(&ended)?;
    let mut functions = BTreeMap::new();
    for shrinker in of_type(&objects, "shrinker") {
        let field = |name| shrinker[name].as_u64().context("no number");
        let name = shrinker["function"].as_str().context("no name")?;
        functions.insert(name, (field("count")?, field("objects_freed")?));
    }
    let mut expected: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for line in &trace {
        // `super_cache_scan+0x0/0x1f0 000000001: nid: 0 unused scan count ...`
        if line.name == "mm_shrink_slab_end" && line.task.starts_with("memtools-drop-") {
            let function = line.text.split(['+', ' ']).next().unwrap_or_default();
            let freed = line.field("last shrinker return val")?.parse::<u64>()?;
            let sums = expected.entry(function).or_default();
            *sums = (sums.0 + 1, sums.1 + freed);
        }
    }
    ensure!(
        functions == expected,
        "{functions:?}, but by the trace {expected:?}"
    );
    let Some((_, freed)) = functions.get("super_cache_scan") else {
        bail!("no inodes were freed: {functions:?}");
    };
    // An inode and a dentry each.
    ensure!(*freed >= 2 * 2003, "{freed} objects freed");
    Ok(())
}

fn counts_are_of_all_tracepoints() -> Result<()> {
    let mut names = Vec::new();
    for group in ["vmscan", "compaction", "migrate"] {
        for entry in fs::read_dir(format!("/sys/kernel/tracing/events/{group}"))? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                names.push(format!("{group}:{}", entry.file_name().to_string_lossy()));
            }
        }
    }
    names.sort();

    let _swap = Swap::on("128M")?;
    let group = Group::new("memtools-vmscan", 16 << 20)?;
    let mut thrash = Workload::spawn(&mut group.command(&workload("thrash"), &["6007", "1"]))?;
    let pid = thrash.pid();
    let recording = Recording::start("vmscan", &["vmscan", "compaction", "migrate"], pid.parse()?)?;
    let tool = start(&["--counts", "-j", "-p", &pid])?;
    thrash.work()?;
    let ended = tool.interrupt()?;
    let trace = recording.read()?;

    let objects = objects(&ended)?;
    ensure!(objects.len() == 1, "{ended:?}");
    let counts = objects[0]["tracepoints"].as_object().context("no counts")?;
    let mut counted: Vec<&String> = counts.keys().collect();
    counted.sort();
    ensure!(
        counted.iter().copied().eq(&names),
        "{counted:?}, but there are {names:?}"
    );
    for (name, count) in counts {
        let (_, tracepoint) = name.split_once(':').context("no group")?;
        let traced = trace.iter().filter(|line| line.name == tracepoint).count() as u64;
        ensure!(
            count.as_u64() == Some(traced),
            "{name}: {count} of {traced}"
        );
    }
    ensure!(trace.len() > 1000, "only {} events", trace.len());
    Ok(())
}
