//! The heap of jemalloc as memleak finds it in a copy.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use crate::harness::{self, Workload};
use crate::heap::{expect_blocks_of, look, number};

/// All of these tests.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak::heap":
        blocks_of_jemalloc_are_found [Once],
        blocks_of_jemalloc_under_other_names_are_found [Once],
        free_memory_of_jemalloc_is_as_it_says_itself [Once],
        a_heap_of_jemalloc_in_use_has_a_verdict [Once],
    }
}

const JEMALLOC: &str = "libjemalloc.so.2";

/// The workload `heap` on jemalloc, with these options of MALLOC_CONF.
fn heap(conf: &str) -> Command {
    let mut command = Command::new(harness::workload("heap"));
    command.env("LD_PRELOAD", JEMALLOC).env("MALLOC_CONF", conf);
    command
}

/// Small and large ones, of several arenas, with what threads have set aside, and what those that have ended had.
fn blocks_of_jemalloc_are_found() -> Result<()> {
    for conf in [
        "",
        "narenas:2",
        "lg_tcache_max:20",
        "dirty_decay_ms:0,muzzy_decay_ms:0",
        "junk:true",
        "tcache:false",
    ] {
        let mut command = heap(conf);
        let recorder = harness::workload("librecord.so");
        command.env("LD_PRELOAD", format!("{}:{JEMALLOC}", recorder.display()));
        let head = expect_blocks_of(command.args(["7", "20011", "plain"]))
            .with_context(|| format!("MALLOC_CONF={conf}"))?;
        let allocator = &head["allocators"][0];
        ensure!(allocator["name"] == "jemalloc (5.3)", "{head}");
        let file = allocator["file"].as_str().unwrap_or_default();
        ensure!(file.ends_with("/libjemalloc.so.2"), "{head}");
    }
    Ok(())
}

/// jemalloc with functions of other names, linked statically: seven of them leave blocks.
fn blocks_of_jemalloc_under_other_names_are_found() -> Result<()> {
    let mut workload = Workload::start("alloc-je", &["leak", "1009", "1000"])?;
    workload.work()?;
    let rows = look(&workload.pid(), &[])?;
    let head = rows.first().context("no report")?;
    ensure!(head["coverage"] == "complete", "{head}");
    ensure!(head["allocators"][0]["name"] == "jemalloc (5.3)", "{head}");
    ensure!(head["blocks"] == 7 * 1009, "{head}");
    Ok(())
}

/// Threads that fill and flush their caches all the time: what is in the middle of that is left in doubt, and told; all
/// else is judged.
fn a_heap_of_jemalloc_in_use_has_a_verdict() -> Result<()> {
    let workload = Workload::spawn(heap("").args(["6", "2003", "busy"]))?;
    let pid = workload.pid();
    let mut in_doubt = 0;
    for _ in 0..10 {
        let args = ["-p", &pid, "--verdict", "-j", "--max-pause", "60000"];
        let ended = harness::run("memleak", &args)?;
        ensure!(ended.status.success(), "{ended:?}");
        let rows = ended.objects()?;
        let head = rows.first().context("no report")?;
        ensure!(head["coverage"] == "complete", "{head}");
        ensure!(number(&head["reachable"]["blocks"])? > 5000, "{head}");
        ensure!(head["unreachable"]["blocks"] == 0, "{rows:?}");
        in_doubt += number(&head["in_doubt"]["blocks"])?;
    }
    // A thread is inside of jemalloc most of the time.
    ensure!(in_doubt > 0, "nothing was in doubt in any of ten copies");
    Ok(())
}

/// `stats.resident` is a bound that jemalloc works out, of what can be in memory: pages in use, dirty ones, and its own, to which
/// the walk counts nothing (`base`, in whole pages, of each block that it has taken for that). What is in memory is less,
/// and in one of the parts, but for what is beside a large block in its extent, and the lists of caches.
fn expect_resident(head: &Value, resident: u64, base: u64) -> Result<()> {
    const PAGE: u64 = 4096;
    let heap = &head["jemalloc"];
    let arenas = heap["arenas"].as_array().map_or(0, Vec::len) as u64;
    let blocks_and_dirty =
        number(&heap["active_bytes"])? + number(&heap["parts"]["dirty"]["bytes"])?;
    let own = resident.checked_sub(blocks_and_dirty);
    let own = own.with_context(|| format!("{resident} are too few for {heap}"))?;
    let whole_pages = base..base + 2 * PAGE * arenas;
    ensure!(
        whole_pages.contains(&own),
        "{own}, not {whole_pages:?}: {heap}"
    );
    let there = number(&head["heap_resident_bytes"])?;
    ensure!(there <= blocks_and_dirty, "{there} of {blocks_and_dirty}");
    let parts = heap["parts"].as_object().context("no parts")?.values();
    let parts: u64 = parts
        .map(|part| number(&part["resident_bytes"]))
        .sum::<Result<_>>()?;
    ensure!(
        (there - there / 10..=there).contains(&parts),
        "{parts} of {there}"
    );
    Ok(())
}

/// What jemalloc's own statistics say, to the byte; by arena and by size it adds up.
fn free_memory_of_jemalloc_is_as_it_says_itself() -> Result<()> {
    for conf in [
        "",
        "tcache:false",
        "dirty_decay_ms:-1",
        "narenas:3,retain:true",
    ] {
        let mut workload = Workload::spawn(heap(conf).args(["7", "20011", "stats"]))?;
        let rows = look(&workload.pid(), &["-T", "1000"])?;
        let head = rows.first().context("no report")?;
        let heap = &head["jemalloc"];
        let facts = workload.work()?;
        let fact = |name: &str| -> Result<u64> { Ok(facts[name].parse()?) };
        let parts = &heap["parts"];
        for (name, found) in [
            ("allocated", &heap["allocated_bytes"]),
            ("active", &heap["active_bytes"]),
            ("retained", &parts["retained"]["bytes"]),
            ("dirty", &parts["dirty"]["bytes"]),
            ("muzzy", &parts["muzzy"]["bytes"]),
            ("caches", &parts["caches"]["bytes"]),
        ] {
            ensure!(
                number(found)? == fact(name)?,
                "MALLOC_CONF={conf}: {name} is {found}, of {facts:?}"
            );
        }
        expect_resident(head, fact("resident")?, fact("base")?)?;
        let sum = |rows: &Value, bytes: &dyn Fn(&Value) -> Result<u64>| -> Result<u64> {
            rows.as_array().context("no rows")?.iter().map(bytes).sum()
        };
        let active = sum(&heap["arenas"], &|arena| number(&arena["active_bytes"]))?;
        ensure!(heap["active_bytes"] == active, "{heap}");
        let free = sum(&heap["size_classes"], &|class| {
            number(&class["free"]["bytes"])
        })?;
        let parts = number(&parts["slabs"]["bytes"])? + number(&parts["caches"]["bytes"])?;
        ensure!(free == parts, "{heap}");
    }
    Ok(())
}
