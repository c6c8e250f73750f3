//! The heap of jemalloc as heapscan finds it in a copy.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use crate::harness::{self, Workload};
use crate::heap::{expect_blocks_of, look, number};

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "heapscan::heap":
        blocks_of_jemalloc_are_found [Once],
        blocks_of_jemalloc_under_other_names_are_found [Once],
        blocks_of_two_jemallocs_are_found [Once],
        free_memory_of_jemalloc_is_as_it_says_itself [Once],
        a_heap_of_jemalloc_in_use_has_a_verdict [Once],
    }
}

const JEMALLOC: &str = "libjemalloc.so.2";

/// Returns a command for the workload `heap` on jemalloc, with these options of MALLOC_CONF.
fn heap(conf: &str) -> Command {
    let mut command = Command::new(harness::workload("heap"));
    command.env("LD_PRELOAD", JEMALLOC).env("MALLOC_CONF", conf);
    command
}

/// Small and large blocks of several arenas, beside blocks in the caches of threads, and blocks of threads that
/// have ended.
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

/// jemalloc is linked statically, with other function names. Seven of its functions leave blocks.
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

/// One jemalloc is linked statically, and another one is the process's malloc.
fn blocks_of_two_jemallocs_are_found() -> Result<()> {
    let mut command = Command::new(harness::workload("second-je"));
    let workload = Workload::spawn(command.env("LD_PRELOAD", JEMALLOC))?;
    let rows = look(&workload.pid(), &["-T", "1000"])?;
    let head = rows.first().context("no report")?;
    ensure!(head["coverage"] == "complete", "{head}");
    let allocators = head["allocators"].as_array().context("no allocators")?;
    let names = allocators.iter().map(|allocator| &allocator["name"]);
    let of_jemalloc = names.filter(|name| **name == "jemalloc (5.3)");
    ensure!(of_jemalloc.count() == 2, "{head}");
    let sizes = &head["jemalloc"]["size_classes"];
    let sizes = sizes.as_array().context("no sizes")?;
    // Each block of je_malloc holds one of malloc, and malloc has others.
    for (block_bytes, least) in [(3072, 1010 + 103), (1792, 1010 + 101 + 103)] {
        let of_size = |class: &&Value| class["block_bytes"] == block_bytes;
        let class = sizes.iter().find(of_size).context("no such size")?;
        ensure!(number(&class["in_use"]["count"])? >= least, "{class}");
    }
    Ok(())
}

/// Threads fill and flush their caches all the time. Blocks in the middle of that are left in doubt, and reported
/// so; all other blocks are judged.
fn a_heap_of_jemalloc_in_use_has_a_verdict() -> Result<()> {
    let workload = Workload::spawn(heap("").args(["6", "2003", "busy"]))?;
    let pid = workload.pid();
    let mut in_doubt = 0;
    for _ in 0..10 {
        let args = ["-p", &pid, "--leaks", "-j", "--max-pause", "60000"];
        let ended = harness::run("heapscan", &args)?;
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

/// Compares the resident memory with jemalloc's `stats.resident`, an upper bound that jemalloc computes: active
/// pages, dirty pages, and its own metadata. The walk counts none of the metadata (`base`, in whole pages per
/// block that jemalloc has taken for it). The actual resident memory is less, and is all in one of the parts,
/// except for the rest of a large block's extent, and the lists of caches.
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

/// Free memory equals jemalloc's own statistics to the byte, and the sums by arena and by size agree.
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
