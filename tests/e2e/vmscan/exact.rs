//! Counts and times equal those of the tracepoints themselves.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;

use super::{in_histogram, of_type, start, sum};
use crate::harness::{self, Workload, workload};
use crate::pressure::{Group, Recording, Scarcity, Setting, Swap, Traced, shell};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "vmscan":
        memcg_reclaim_equals_the_tracepoints [Guest],
        a_limit_is_that_of_the_cgroup_above [Guest],
        direct_reclaim_equals_the_tracepoints [Guest],
        shrinkers_are_named_and_add_up [Guest, Disk],
        counts_are_of_all_tracepoints [Guest],
        kswapd_is_booked_while_it_works [Guest],
    }
}

/// Checks that vmscan's numbers for a workload equal what the kernel recorded.
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

    let objects = ended.objects()?;
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
    // kswapd reclaims the rest, which can be nearly all.
    ensure!(reclaims > 0, "no {busy}: {ended:?}");
    ensure!(
        in_histogram(&objects, &format!("{busy}_ns")) == reclaims,
        "{ended:?}"
    );

    // vmscan and the trace take their times at slightly different places.
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

/// The task is in a cgroup without a limit, below one with a limit. vmscan names both, with as many reclaims as
/// the kernel counted for each.
fn a_limit_is_that_of_the_cgroup_above() -> Result<()> {
    let _swap = Swap::on("128M")?;
    let above = Group::new("memtools-above", 16 << 20)?;
    let below = above.child("below")?;
    let mut thrash = Workload::spawn(&mut below.command(&workload("thrash"), &["6007", "1"]))?;
    let before = above.limit_hits()?;
    let tool = start(&["-j", "-p", &thrash.pid(), "--by-cgroup"])?;
    thrash.work()?;
    let ended = tool.interrupt()?;
    let hits = above.limit_hits()? - before;

    let objects = ended.objects()?;
    let reclaims = sum(&objects, "/memcg_reclaim/count")?;
    ensure!(below.limit_hits()? == 0, "it has no limit");
    ensure!(
        reclaims == hits && hits > 10,
        "{reclaims} of {hits}: {ended:?}"
    );
    for cgroup in of_type(&objects, "cgroup") {
        ensure!(cgroup["path"] == "/memtools-above/below", "{cgroup}");
        // Nothing makes the machine as a whole short of memory, but a task may be made to reclaim for it.
        let memcg = &cgroup["memcg_reclaim"]["count"];
        if cgroup["limited"] == "/memtools-above" {
            ensure!(*memcg == hits, "{hits}: {cgroup}");
        } else {
            ensure!(cgroup["limited_id"].is_null() && *memcg == 0, "{cgroup}");
        }
    }
    Ok(())
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

/// Returns the durations of kswapd's operations, by the kernel's record: its work from 7.2 on; before that, the
/// time from one wake-up to the next or to sleep.
fn operations_of_kswapd(trace: &[Traced]) -> Vec<u64> {
    let exact = trace.iter().any(|line| line.name.contains("balance_pgdat"));
    let (mut operations, mut since) = (Vec::new(), None);
    for line in trace {
        let (ends, begins) = match line.name.as_str() {
            "mm_vmscan_balance_pgdat_end" => (exact, false),
            "mm_vmscan_balance_pgdat_begin" => (false, exact),
            "mm_vmscan_kswapd_wake" => (!exact, !exact),
            "mm_vmscan_kswapd_sleep" => (!exact, false),
            _ => (false, false),
        };
        if let Some(since) = since.take_if(|_| ends) {
            operations.push(line.time_ns - since);
        }
        if begins {
            since = Some(line.time_ns);
        }
    }
    operations
}

/// No interval has more of kswapd's time than its own length, although one operation takes longer. The sum equals
/// the kernel's record.
fn kswapd_is_booked_while_it_works() -> Result<()> {
    const AT_ONCE: u64 = 2_000_000_000;
    let _swap = Swap::on("600M")?;
    let mut hog = Workload::start("hog", &["500", "900"])?;
    hog.work()?;
    let there = |name: &&str| Path::new("/sys/kernel/tracing/events").join(name).exists();
    let events = [
        "vmscan/mm_vmscan_kswapd_wake",
        "vmscan/mm_vmscan_kswapd_sleep",
        "vmscan/mm_vmscan_balance_pgdat_begin",
        "vmscan/mm_vmscan_balance_pgdat_end",
    ];
    let events: Vec<&str> = events.into_iter().filter(there).collect();
    let recording = Recording::start("kswapd", &events, 0)?;
    let tool = start(&["-j", "-k"])?;
    let watermark = Setting::high_watermark()?;
    harness::eventually("kswapd has worked long enough at once, and sleeps", || {
        // The read takes more memory than the lowest zone has above its own watermark. This wakes kswapd up.
        shell("dd if=/dev/zero of=/dev/null bs=33554432 count=1 2>/dev/null")?;
        let trace = recording.read()?;
        let last = trace.iter().rfind(|line| line.name.contains("kswapd_"));
        let sleeps = last.is_some_and(|line| line.name.ends_with("sleep"));
        // Several short operations may add up to the time that the test needs of one.
        let long = |&time: &u64| time > AT_ONCE;
        Ok(sleeps && operations_of_kswapd(&trace).iter().any(long))
    })?;
    drop(watermark);
    let ended = tool.interrupt()?;
    let operations = operations_of_kswapd(&recording.read()?);
    let longest = operations.iter().max().copied().unwrap_or_default();
    ensure!(longest > AT_ONCE, "{operations:?} are too short");

    let objects = ended.objects()?;
    let mut before: Option<jiff::Timestamp> = None;
    for interval in of_type(&objects, "interval") {
        let time: jiff::Timestamp = interval["time"].as_str().context("no time")?.parse()?;
        let booked = interval["kswapd"]["time_ns"]
            .as_u64()
            .context("no kswapd")?;
        if let Some(before) = before {
            // The totals are read a moment before the time.
            let most = time.duration_since(before) + jiff::SignedDuration::from_millis(20);
            ensure!(
                i128::from(booked) <= most.as_nanos(),
                "{most:?}: {interval}"
            );
        }
        before = Some(time);
    }
    let count = sum(&objects, "/kswapd/count")?;
    let (ours, theirs) = (
        sum(&objects, "/kswapd/time_ns")?,
        operations.iter().sum::<u64>(),
    );
    ensure!(
        count == operations.len() as u64,
        "{count}, not {operations:?}"
    );
    ensure!(in_histogram(&objects, "kswapd_ns") == count, "{ended:?}");
    ensure!(
        ours.abs_diff(theirs) <= theirs / 100 + 10_000_000,
        "{ours} ns, but {theirs} by the trace: {ended:?}"
    );
    Ok(())
}

fn shrinkers_are_named_and_add_up() -> Result<()> {
    let disk = std::env::var("MEMTOOLS_DISK")?;
    let mut slab = Workload::start("slab", &[&format!("{disk}/memtools-slab"), "2003"])?;
    slab.work()?;
    let recording = Recording::start("vmscan", &["vmscan"], 0)?;
    let tool = start(&["-j", "-n", "memtools-drop", "--by-shrinker"])?;
    // The first pass may only find that the objects were used lately.
    let folder = harness::scratch()?;
    let script = folder.path().join("memtools-drop");
    fs::write(
        &script,
        "#!/bin/sh\nfor i in 1 2 3; do echo 2 >/proc/sys/vm/drop_caches; done\n",
    )?;
    shell(&format!("chmod +x {0} && exec {0}", script.display()))?;
    let ended = tool.interrupt()?;
    let trace = recording.read()?;

    let objects = ended.objects()?;
    let mut functions = BTreeMap::new();
    for shrinker in of_type(&objects, "shrinker") {
        let field = |name| shrinker[name].as_u64().context("no number");
        let name = shrinker["function"].as_str().context("no name")?;
        functions.insert(name, (field("count")?, field("objects_freed")?));
    }
    let mut expected: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for line in &trace {
        // Example: `super_cache_scan+0x0/0x1f0 000000001: nid: 0 unused scan count ...`
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
    // Each file has an inode and a dentry.
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

    let objects = ended.objects()?;
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
