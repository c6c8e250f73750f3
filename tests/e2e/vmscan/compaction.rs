//! vmscan --trace-compaction: each compaction as a row, with the state of its zone.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::fcntl::{FallocateFlags, fallocate};
use regex_lite::Regex;
use serde_json::Value;

use super::start;
use crate::harness;
use crate::pressure::{Recording, Setting, shell};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "vmscan":
        each_compaction_has_a_line [Guest],
        a_compaction_shows_the_zone_and_who_asked [Guest],
        fragmentation_is_the_kernels_own_index [Guest, Kprobes],
    }
}

/// The rows equal the compactions that the kernel recorded, in the same order.
fn each_compaction_has_a_line() -> Result<()> {
    let recording = Recording::start("vmscan", &["compaction"], 0)?;
    let command = "sh -c 'echo 1 >/proc/sys/vm/compact_memory'";
    let begin = Instant::now();
    let ended = start(&["--trace-compaction", "-j", "-c", command])?.wait()?;
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
    for row in ended.objects()? {
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
    // A zone's name has letters and digits.
    let zones = fs::read_to_string("/proc/zoneinfo")?;
    for row in ended.objects()? {
        let zone = format!(
            "Node {}, zone {:>8}\n",
            row["node"],
            row["zone"].as_str().context("no zone")?
        );
        ensure!(zones.contains(&zone), "{zone} is not in {zones}");
    }
    Ok(())
}

/// Returns the watermarks and free pages of each zone, from a copy of /proc/zoneinfo.
fn zones(path: &Path) -> Result<BTreeMap<String, [u64; 4]>> {
    let text = fs::read_to_string(path)?;
    let mut zones = BTreeMap::new();
    for zone in text.split("Node ").skip(1) {
        let (title, values) = zone.split_once('\n').context("a zone without values")?;
        let value = |name: &str| {
            let mut lines = values.lines().map(str::split_whitespace);
            lines.find_map(|mut words| (words.next() == Some(name)).then(|| words.next())?)
        };
        let number = |name: &str| value(name).with_context(|| format!("no {name} in {zone}"));
        let free = values
            .lines()
            .find_map(|line| line.trim_start().strip_prefix("pages free"));
        let title = title.split_whitespace().collect::<Vec<_>>().join(" ");
        let numbers = [
            number("min")?.parse()?,
            number("low")?.parse()?,
            number("high")?.parse()?,
            free.context("no free pages")?.trim().parse()?,
        ];
        zones.insert(title, numbers);
    }
    Ok(zones)
}

/// Watermarks and free pages equal those of /proc/zoneinfo. Free pages are compared where compaction has not
/// changed them. The stack leads back to the write that requested the compaction.
fn a_compaction_shows_the_zone_and_who_asked() -> Result<()> {
    let folder = harness::scratch()?;
    let [before, after] = ["before", "after"].map(|name| folder.path().join(name));
    // The kernel must not raise a watermark meanwhile.
    let _boost = Setting::change("/proc/sys/vm/watermark_boost_factor", "0")?;
    let command = format!(
        "sh -c 'cat /proc/zoneinfo >{}; echo 1 >/proc/sys/vm/compact_memory; cat /proc/zoneinfo >{}'",
        before.display(),
        after.display()
    );
    let mut rows = 0;
    // In a zone that is in use, the number of free pages rarely stays the same, so this is repeated.
    harness::eventually("a zone is left as it was", || {
        let ended = start(&["--trace-compaction", "-Kj", "-c", &command])?.wait()?;
        let objects = ended.objects()?;
        rows = objects.len();
        ensure!(rows > 0, "{ended:?}");
        Ok(rows_are_of_these_zones(&objects, &zones(&before)?, &zones(&after)?)? > 0)
    })?;

    let ended = start(&["--trace-compaction", "-e", "-K", "-c", &command])?.wait()?;
    let line = Regex::new(
        r"SYNC    -        \d+ +\d+ +\d+ +\d+ +\d+\.\d{3} +\w+\n(    \S+\+0x[0-9a-f]+ \[kernel\]\n)+\n",
    )?;
    ensure!(line.find_iter(&ended.stdout).count() == rows, "{ended:?}");
    Ok(())
}

/// Compares rows with the zones before and after. Returns the number of rows whose zone's free pages have not changed.
fn rows_are_of_these_zones(
    rows: &[Value],
    before: &BTreeMap<String, [u64; 4]>,
    after: &BTreeMap<String, [u64; 4]>,
) -> Result<usize> {
    let mut unchanged = 0;
    for row in rows {
        let zone = format!(
            "{}, zone {}",
            row["node"],
            row["zone"].as_str().context("no zone")?
        );
        let expected = before
            .get(&zone)
            .with_context(|| format!("no {zone} in {before:?}"))?;
        let names = ["min_pages", "low_pages", "high_pages", "free_pages"];
        let found = names.map(|name| row[name].as_u64().unwrap_or_default());
        ensure!(
            found[..3] == expected[..3],
            "{found:?}, not {expected:?}: {row}"
        );
        if after
            .get(&zone)
            .is_some_and(|after| after[3] == expected[3])
        {
            unchanged += 1;
            ensure!(found == *expected, "{found:?}, not {expected:?}: {row}");
        }
        ensure!(row["fragmentation_index"].is_null(), "{row}");
        let stack = row["kernel_frames"].as_array().context("no stack")?;
        let innermost = stack.first().and_then(|frame| frame["symbol"].as_str());
        ensure!(
            innermost.is_some_and(|name| name.contains("compact")),
            "{row}"
        );
        ensure!(
            stack
                .iter()
                .any(|frame| frame["symbol"] == "sysctl_compaction_handler"),
            "{row}"
        );
    }
    Ok(unchanged)
}

/// Kretprobe that records the result of the kernel's own function, as compactsnoop uses it.
struct OwnIndex;

impl OwnIndex {
    const DEFINITIONS: &str = "/sys/kernel/tracing/kprobe_events";

    fn start() -> Result<Self> {
        let definition = "r:memtools/own_index fragmentation_index index=$retval:s32";
        harness::change_events(Self::DEFINITIONS, definition)
            .context("failed to define a kretprobe")?;
        Ok(Self)
    }
}

impl Drop for OwnIndex {
    fn drop(&mut self) {
        let _ = harness::change_events(Self::DEFINITIONS, "-:memtools/own_index");
    }
}

/// Free memory in pieces of 64 pages: a file in memory, of which every other piece is given back.
struct Fragmented(tempfile::TempDir);

impl Fragmented {
    const BYTES: usize = 800 << 20;

    fn new() -> Result<Self> {
        let folder = harness::scratch()?;
        let path = folder.path().display();
        shell(&format!("mount -t tmpfs -o size=1G none {path}"))?;
        let fragmented = Self(folder);
        let mut file = File::create(fragmented.0.path().join("pages"))?;
        let piece = [1; 64 * 4096];
        for _ in 0..Self::BYTES / piece.len() {
            file.write_all(&piece)?;
        }
        let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        for at in (0..Self::BYTES).step_by(2 * piece.len()) {
            fallocate(&file, punch, at as i64, piece.len() as i64)?;
        }
        Ok(fragmented)
    }
}

impl Drop for Fragmented {
    fn drop(&mut self) {
        let _ = fs::write("/proc/sys/vm/nr_hugepages", "0");
        let _ = shell(&format!("umount {}", self.0.path().display()));
    }
}

/// Before each compaction for huge pages, the kernel computes the index, too, a moment earlier.
fn fragmentation_is_the_kernels_own_index() -> Result<()> {
    let _fragmented = Fragmented::new()?;
    let own = OwnIndex::start()?;
    let events = ["memtools/own_index", "compaction/mm_compaction_begin"];
    let recording = Recording::start("vmscan-index", &events, 0)?;
    // The kernel stops at the first huge page that it cannot make, and defers further attempts for longer and
    // longer if earlier ones have failed. So the script asks as often as may be necessary.
    let script = "for i in $(seq 120); do echo 600 >/proc/sys/vm/nr_hugepages; done";
    let command = &format!("sh -c '{script}'");
    let ended = start(&["--trace-compaction", "-j", "-c", command])?.wait()?;
    let trace = recording.read()?;
    drop((recording, own));

    let (mut expected, mut last) = (Vec::new(), None);
    for line in trace.iter().filter(|line| line.task.starts_with("sh-")) {
        match line.name.as_str() {
            "mm_compaction_begin" => expected.push(last.take().context("no index before it")?),
            _ => last = Some(line.field("index=")?.parse::<i64>()?),
        }
    }
    let rows = ended.objects()?;
    let found: Vec<i64> = rows
        .iter()
        .map(|row| {
            row["fragmentation_index"]
                .as_f64()
                .map(|index| (index * 1000.0).round() as i64)
        })
        .collect::<Option<_>>()
        .context("a row without an index")?;
    ensure!(
        found.len() >= 5 && found.iter().any(|&index| index > 0) && rows[0]["order"] == 9,
        "{found:?}"
    );
    // In between, kcompactd can have made a block, and the other CPU may have taken or freed some: once in 61 on
    // 7.2, once in 7 on 6.1.
    let near = |(a, b): &(&i64, &i64)| (*a - *b).abs() <= 1;
    let agree = found.iter().zip(&expected).filter(near).count();
    ensure!(
        found.len() == expected.len() && found.len() - agree <= (found.len() / 10).max(1),
        "{found:?}, not {expected:?}"
    );
    Ok(())
}
