//! The heap of a process as heapscan finds it in a copy, against the record of a library that intercepts malloc.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use crate::harness::{self, Workload};

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "heapscan::heap":
        every_block_is_found_and_no_other [Once],
        blocks_are_found_where_brk_failed [Once],
        blocks_are_found_where_others_moved_the_end_of_the_heap [Once],
        blocks_are_found_where_the_main_thread_has_ended [Once],
        blocks_are_found_with_the_c_library_of_debian_11 [Once],
        blocks_are_found_with_the_c_library_of_debian_13 [Once],
        blocks_are_found_with_the_newest_c_library [Once],
        blocks_of_musl_are_found [Once],
        an_allocator_without_a_walk_is_named [Once],
        blocks_of_a_static_program_are_found,
        what_malloc_trim_returns_is_foretold [Once],
        a_heap_in_use_is_whole_within_three_images,
        a_damaged_heap_is_refused_with_the_place,
        a_report_that_does_not_fit_on_the_disk_is_an_error [Once],
    }
}

fn a_report_that_does_not_fit_on_the_disk_is_an_error() -> Result<()> {
    let workload = Workload::start("heap", &["0", "2003", "plain"])?;
    for view in ["--layout", "--types", "--leaks"] {
        let args = ["-p", &workload.pid(), view, "--output", "/dev/full"];
        harness::expect_refusal("heapscan", &args, 1, "No space left")?;
    }
    Ok(())
}

/// Returns the JSON rows that `heapscan --layout` prints.
pub(super) fn look(pid: &str, args: &[&str]) -> Result<Vec<Value>> {
    let args = [&["-p", pid, "--layout", "-j", "--max-pause", "60000"], args].concat();
    harness::run("heapscan", &args)?.objects()
}

pub(super) fn number(value: &Value) -> Result<u64> {
    value
        .as_u64()
        .with_context(|| format!("no number: {value}"))
}

fn address(block: &Value) -> Result<u64> {
    let address = block["address"].as_str().context("no address")?;
    Ok(u64::from_str_radix(address.trim_start_matches("0x"), 16)?)
}

/// Returns the blocks that are live by the recorder's file, with the sizes that were requested.
fn recorded(path: &Path) -> Result<HashMap<u64, u64>> {
    let bytes = fs::read(path)?;
    let (words, _) = bytes.as_chunks::<8>();
    let word = |at: usize| words.get(at).map(|word| u64::from_le_bytes(*word));
    let count = word(0).context("an empty record")? as usize;
    let mut live = HashMap::new();
    for at in 1..=count {
        let address = word(2 * at).context("a short record")?;
        let size = word(2 * at + 1).context("a short record")?;
        if size == u64::MAX {
            live.remove(&address);
        } else {
            live.insert(address, size);
        }
    }
    Ok(live)
}

/// Compares every block of the workload, while it is held, with the record. Returns the head of the report.
fn expect_blocks(kind: &str) -> Result<Value> {
    let mut command = Command::new(harness::workload("heap"));
    command.env("LD_PRELOAD", harness::workload("librecord.so"));
    expect_blocks_of(command.args(["7", "20011", kind]))
}

/// Compares every block of a command that has the recorder in front of its malloc. Returns the head of the report.
pub(super) fn expect_blocks_of(command: &mut Command) -> Result<Value> {
    let folder = harness::scratch()?;
    let record = folder.path().join("record");
    let workload = Workload::spawn(command.env("RECORD", &record))?;
    let rows = look(&workload.pid(), &["--blocks"])?;
    let (head, blocks) = rows.split_first().context("no report")?;
    ensure!(head["coverage"] == "complete", "{head}");
    let live = recorded(&record)?;
    let mut found = HashMap::new();
    for block in blocks {
        found.insert(address(block)?, number(&block["size_bytes"])?);
    }
    let missed = live
        .keys()
        .filter(|block| !found.contains_key(block))
        .count();
    let wrong = found
        .keys()
        .filter(|block| !live.contains_key(block))
        .count();
    let small = live
        .iter()
        .filter(|(block, size)| found.get(block).is_some_and(|found| found < size))
        .count();
    ensure!(
        live.len() > 2_000 && (missed, wrong, small) == (0, 0, 0),
        "of {} blocks {missed} missed, {wrong} wrong, {small} too small",
        live.len()
    );
    ensure!(head["blocks"] == live.len(), "{head}");
    Ok(head.clone())
}

fn every_block_is_found_and_no_other() -> Result<()> {
    let head = expect_blocks("plain")?;
    let heap = &head["heap"];
    for part in ["mmapped", "bins", "fastbins", "tcaches", "tops"] {
        ensure!(number(&heap[part]["count"])? > 0, "no {part}: {heap}");
    }
    // All resident memory is attributed to a place.
    let mut sum = number(&head["heap_resident_bytes"])?;
    for place in ["stacks", "other_private", "shared", "files"] {
        sum += number(&head[place]["resident_bytes"])?;
    }
    ensure!(head["resident_bytes"] == sum, "{head}");
    let arenas = head["arenas"].as_array().context("no arenas")?;
    ensure!(arenas.len() > 2, "{arenas:?}");
    let mut arenas_and_mmapped = number(&heap["mmapped"]["bytes"])?;
    for arena in arenas {
        arenas_and_mmapped += number(&arena["bytes"])?;
    }
    ensure!(head["heap_bytes"] == arenas_and_mmapped, "{head}");
    Ok(())
}

fn blocks_are_found_where_brk_failed() -> Result<()> {
    expect_blocks("brk").map(drop)
}

fn blocks_are_found_where_others_moved_the_end_of_the_heap() -> Result<()> {
    expect_blocks("foreign").map(drop)
}

/// The cache of a main thread that has ended stays in the heap, and nothing refers to it. Other threads have caches, or
/// none has.
fn blocks_are_found_where_the_main_thread_has_ended() -> Result<()> {
    for threads in ["7", "0"] {
        let mut command = Command::new(harness::workload("heap"));
        command.env("LD_PRELOAD", harness::workload("librecord.so"));
        expect_blocks_of(command.args([threads, "40009", "leaderless"]))
            .with_context(|| format!("{threads} other threads"))?;
    }
    Ok(())
}

/// Fetches the C library of another Debian suite, with its loader. Returns their directory.
fn fetch_libc(suite: &str) -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = root.join("target/libcs");
    let fetched = Command::new(root.join("scripts/libcs"))
        .arg(&folder)
        .arg(suite)
        .status()?;
    ensure!(fetched.success(), "scripts/libcs has failed");
    Ok(folder.join(suite))
}

/// Compares every kind of heap with the C library in a directory, started by that library's loader.
fn expect_blocks_with(
    libc: &Path,
    (program, recorder): (&Path, &Path),
    allocator: &str,
) -> Result<()> {
    for kind in ["plain", "brk", "foreign"] {
        let mut command = Command::new(libc.join("ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(libc);
        command.arg("--preload").arg(recorder).arg(program);
        let head = expect_blocks_of(command.args(["7", "20011", kind]))
            .with_context(|| format!("{kind}, with {}", libc.display()))?;
        ensure!(head["allocators"][0]["name"] == allocator, "{head}");
    }
    Ok(())
}

/// Compares the heaps of the programs that were built for the machine's own C library.
fn expect_blocks_with_suite(suite: &str, allocator: &str) -> Result<()> {
    let [program, recorder] = ["heap", "librecord.so"].map(harness::workload);
    expect_blocks_with(&fetch_libc(suite)?, (&program, &recorder), allocator)
}

/// Debian 11's C library is older than the machine's, so the programs are linked against it: 2.31.
fn blocks_are_found_with_the_c_library_of_debian_11() -> Result<()> {
    let libc = fetch_libc("bullseye-security")?;
    let folder = harness::scratch()?;
    let sources = harness::sources();
    let link = |name: &str, source: &str, options: &str| {
        let made = folder.path().join(name);
        let flags = "-O1 -fno-builtin -fno-stack-protector -nostdlib";
        let mut command = Command::new("cc");
        command.args(flags.split(' ')).args(options.split(' '));
        command.arg("-o").arg(&made).arg(sources.join(source));
        let libraries = [
            "libc.so.6",
            "libpthread.so.0",
            "libdl.so.2",
            "ld-linux-x86-64.so.2",
        ];
        command.args(libraries.map(|file| libc.join(file)));
        ensure!(command.status()?.success(), "{command:?} has failed");
        Ok(made)
    };
    let start = Command::new("cc").arg("-print-file-name=crt1.o").output()?;
    let start = String::from_utf8(start.stdout)?;
    let program = link(
        "heap",
        "heap.c",
        &format!("-no-pie -fno-pie {}", start.trim()),
    )?;
    let recorder = link("librecord.so", "record.c", "-shared -fPIC")?;
    expect_blocks_with(&libc, (&program, &recorder), "glibc malloc (2.27 to 2.42)")
}

fn blocks_are_found_with_the_c_library_of_debian_13() -> Result<()> {
    expect_blocks_with_suite("trixie", "glibc malloc (2.27 to 2.42)")
}

fn blocks_are_found_with_the_newest_c_library() -> Result<()> {
    expect_blocks_with_suite("sid", "glibc malloc (2.43 or later)")
}

/// The loader's blocks are found, too, which were allocated before the recorder was loaded.
fn blocks_of_musl_are_found() -> Result<()> {
    let folder = harness::scratch()?;
    let record = folder.path().join("record");
    let mut command = Command::new(harness::workload("heap-musl"));
    command.env("RECORD", &record);
    command.env("LD_PRELOAD", harness::workload("librecord-musl.so"));
    let workload = Workload::spawn(command.args(["7", "20011", "plain"]))?;
    let rows = look(&workload.pid(), &["--blocks"])?;
    let (head, blocks) = rows.split_first().context("no report")?;
    ensure!(head["coverage"] == "complete", "{head}");
    ensure!(head["allocators"][0]["name"] == "musl mallocng", "{head}");
    let live = recorded(&record)?;
    let mut found = HashMap::new();
    for block in blocks {
        found.insert(address(block)?, number(&block["size_bytes"])?);
    }
    let exact = live
        .iter()
        .filter(|(block, size)| found.get(block) == Some(size));
    let exact = exact.count();
    let others = found
        .keys()
        .filter(|block| !live.contains_key(block))
        .count();
    ensure!(
        live.len() > 10_000 && exact == live.len() && others < 20,
        "of {} blocks {exact} found with their sizes, and {others} others",
        live.len()
    );
    Ok(())
}

/// heapscan gives no verdict, but prints the rest of the report.
fn an_allocator_without_a_walk_is_named() -> Result<()> {
    for (library, name) in [
        ("libtcmalloc_minimal.so.4", "tcmalloc"),
        (harness::mimalloc(), "mimalloc"),
    ] {
        let mut command = Command::new(harness::workload("heap"));
        command.env("LD_PRELOAD", library);
        let workload = Workload::spawn(command.args(["3", "2003", "plain"]))?;
        let pid = workload.pid();
        let says = format!("no walk of the heap of {name}, which it has loaded (");
        let rows = look(&pid, &[])?;
        let note = rows[0]["coverage_note"].as_str().unwrap_or_default();
        ensure!(
            rows[0]["coverage"] == "unknown" && note.contains(&says),
            "{rows:?}"
        );
        ensure!(number(&rows[0]["resident_bytes"])? > 0, "{rows:?}");
        for question in ["--leaks", "--types"] {
            let args = ["-p", &pid, question, "--max-pause", "60000"];
            harness::expect_refusal("heapscan", &args, 1, &says)?;
        }
    }
    Ok(())
}

/// No recorder can intercept a static malloc, so the test only expects that the walk is complete.
fn blocks_of_a_static_program_are_found() -> Result<()> {
    let workload = Workload::start("heap-static", &["3", "5003", "plain"])?;
    let rows = look(&workload.pid(), &[])?;
    let head = rows.first().context("no report")?;
    ensure!(head["coverage"] == "complete", "{head}");
    ensure!(number(&head["blocks"])? > 3000, "{head}");
    Ok(())
}

fn what_malloc_trim_returns_is_foretold() -> Result<()> {
    let mut workload = Workload::start("heap", &["0", "50021", "holes"])?;
    let rows = look(&workload.pid(), &[])?;
    let head = rows.first().context("no report")?;
    ensure!(head["verdict"] == "fragmentation", "{head}");
    let foretold = number(&head["trim_bytes"])? / 1024;
    let text = harness::run("heapscan", &["-p", &workload.pid(), "--layout"])?;
    ensure!(
        text.stdout.contains("fragmentation, not a leak: "),
        "{text:?}"
    );
    let returned: u64 = workload.work()?["returned"].parse()?;
    ensure!(
        returned > 30_000 && foretold.abs_diff(returned) <= 64,
        "foretold {foretold} kB, returned {returned} kB"
    );
    Ok(())
}

fn a_heap_in_use_is_whole_within_three_images() -> Result<()> {
    let workload = Workload::start("heap", &["3", "2003", "churn"])?;
    // Three images in a row with a thread in the middle of malloc happen once in some 700 looks.
    let mut incomplete = Vec::new();
    for _ in 0..10 {
        let rows = look(&workload.pid(), &[])?;
        let head = rows.first().context("no report")?;
        if head["coverage"] != "complete" {
            ensure!(head["coverage_note"].is_string(), "{head}");
            incomplete.push(head.clone());
        }
    }
    ensure!(incomplete.len() <= 1, "{incomplete:?}");
    Ok(())
}

fn a_damaged_heap_is_refused_with_the_place() -> Result<()> {
    let mut workload = Workload::start("heap", &["0", "0", "corrupt"])?;
    let ended = harness::run("heapscan", &["-p", &workload.pid(), "--layout"])?;
    let header = workload.work()?["header"].clone();
    ensure!(
        ended.status.code() == Some(1) && ended.stderr.contains(&format!(" at {header}")),
        "not {header}: {ended:?}"
    );
    Ok(())
}
