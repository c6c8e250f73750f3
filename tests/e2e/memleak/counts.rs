//! Blocks and bytes equal what the program has allocated, by whichever function.

use anyhow::{Result, ensure};
use libtest_mimic::Trial;

use super::{SIZE, last_report, outstanding, trace, trace_all};
use crate::harness;

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak":
        every_function_is_exact: at_entries,
        costly_entries_are_not_probed [Once],
        entries_are_probed_when_asked_for [Once],
        balanced_code_reports_nothing: at_entries,
        realloc_corner_cases: at_entries,
        failed_calls_are_no_allocations: at_entries,
        big_blocks_count_once: at_entries,
        calls_that_are_not_recorded_are_known_to_go_on,
        parts_of_mappings_are_unmapped: at_entries,
        what_free_maps_is_no_allocation: at_entries,
        threads_exact: at_entries,
        combined_totals_equal_the_blocks: at_entries,
        a_tenth_is_recorded: at_entries,
    }
}

/// Number of blocks: a prime, so that no other sum equals it by accident.
const COUNT: u64 = 31;

fn every_function_is_exact() -> Result<()> {
    let groups = trace_all("alloc", &["leak", &COUNT.to_string(), &SIZE.to_string()])?;
    for function in [
        "malloc",
        "calloc",
        "realloc",
        "reallocarray",
        "posix_memalign",
        "aligned_alloc",
        "memalign",
        "valloc",
        "pvalloc",
        "mmap",
    ] {
        let found = outstanding(&groups, &format!("leak_{function}"));
        ensure!(found == (COUNT * SIZE, COUNT), "{function}: {found:?}");
    }
    let found = outstanding(&groups, "leak_mremap");
    ensure!(found == (COUNT * 3 * SIZE, COUNT), "mremap: {found:?}");
    ensure!(
        groups.len() == 11,
        "more than what leaks is reported: {groups:#?}"
    );
    Ok(())
}

/// glibc's free begins with an instruction that has to be single-stepped.
fn costly_entries_are_not_probed() -> Result<()> {
    let ended = trace("alloc", &["hold"], &["-v", "60"])?;
    let place = |function: &str| {
        let line = format!("is probed at {function}+0x");
        let rest = ended.stderr.split(&line).nth(1)?;
        u64::from_str_radix(rest.lines().next()?, 16).ok()
    };
    ensure!(
        place("free").is_some_and(|beyond| beyond > 0),
        "{}",
        ended.stderr
    );
    ensure!(place("malloc").is_some(), "{}", ended.stderr);
    Ok(())
}

fn entries_are_probed_when_asked_for() -> Result<()> {
    harness::probe_entries();
    let ended = trace("alloc", &["hold"], &["-v", "60"])?;
    let places: Vec<&str> = ended.stderr.split("is probed at ").skip(1).collect();
    ensure!(places.len() > 2, "{}", ended.stderr);
    for place in places {
        let place = place.lines().next().unwrap_or_default();
        ensure!(place.ends_with("+0x0"), "{place}");
    }
    Ok(())
}

fn balanced_code_reports_nothing() -> Result<()> {
    let groups = trace_all("alloc", &["balanced", "2003", "211"])?;
    ensure!(groups.is_empty(), "{groups:#?}");
    Ok(())
}

fn realloc_corner_cases() -> Result<()> {
    let groups = trace_all("alloc", &["realloc", "101"])?;
    for (function, bytes) in [
        ("realloc_grown", 1000),
        ("realloc_shrunk", 100),
        ("realloc_of_nothing", 70),
        ("realloc_failed", 300),
    ] {
        let found = outstanding(&groups, function);
        ensure!(found == (101 * bytes, 101), "{function}: {found:?}");
    }
    ensure!(
        outstanding(&groups, "realloc_to_nothing") == (0, 0),
        "{groups:#?}"
    );
    ensure!(groups.len() == 4, "{groups:#?}");
    Ok(())
}

fn failed_calls_are_no_allocations() -> Result<()> {
    let groups = trace_all("alloc", &["failing", "1009"])?;
    ensure!(groups.is_empty(), "{groups:#?}");
    Ok(())
}

/// memleak must also know of calls whose return it does not trace whether a mapping is the allocator's own.
fn calls_that_are_not_recorded_are_known_to_go_on() -> Result<()> {
    for unwind in ["auto", "fp"] {
        let args = [
            "-z", "1000004", "--unwind", unwind, "-o", "0", "-T", "1000", "60",
        ];
        let of = |program: &[&str]| last_report(&trace("alloc", program, &args)?.stdout);
        let groups = of(&["big", "53", "1000003"])?;
        ensure!(
            groups.is_empty(),
            "{unwind}: glibc's own mmap is counted: {groups:#?}"
        );
        let groups = of(&["hole", "53"])?;
        ensure!(
            outstanding(&groups, "map_below_hole") == (53 << 20, 53) && groups.len() == 1,
            "{unwind}: {groups:#?}"
        );
    }
    Ok(())
}

fn big_blocks_count_once() -> Result<()> {
    let groups = trace_all("alloc", &["big", "53", "1000003"])?;
    ensure!(
        outstanding(&groups, "big") == (53 * 1_000_003, 53),
        "{groups:#?}"
    );
    ensure!(
        groups.len() == 1,
        "glibc's own mmap is counted too: {groups:#?}"
    );
    Ok(())
}

/// As a thread's first call, glibc's free makes an arena: 64 MiB of address space, which the program has not allocated.
fn what_free_maps_is_no_allocation() -> Result<()> {
    const THREADS: u64 = 7;
    const PAGE: u64 = 4096;
    let groups = trace_all("freefirst", &[&THREADS.to_string()])?;
    let found = outstanding(&groups, "map_own");
    ensure!(found == (THREADS * PAGE, THREADS), "{found:?}");
    ensure!(
        groups.len() == 1,
        "glibc's own mmap is counted: {groups:#?}"
    );
    Ok(())
}

fn parts_of_mappings_are_unmapped() -> Result<()> {
    const PAGE: u64 = 4096;
    let groups = trace_all("alloc", &["munmap", "101"])?;
    for (function, pages, calls) in [
        ("unmap_parts", 98, 1),
        ("unmap_fails", 101, 1),
        // Two pages of the first mapping belong to the second mapping now.
        ("replaced", 101, 2),
        ("shrunk", 1, 1),
    ] {
        let found = outstanding(&groups, function);
        ensure!(
            found == (pages * PAGE, calls),
            "{function}: {found:?} in {groups:#?}"
        );
    }
    Ok(())
}

/// Returns the arguments for a workload whose blocks are allocated in one thread and freed in another, all at
/// once. In guests there are fewer blocks: the emulated machine takes milliseconds for what takes microseconds
/// here.
fn thread_workload() -> [&'static str; 5] {
    let count = if harness::in_guest() {
        "1009"
    } else {
        "100003"
    };
    ["threads", "8", count, "211", "97"]
}

fn threads_exact() -> Result<()> {
    let groups = trace_all("alloc", &thread_workload())?;
    let found = outstanding(&groups, "allocate_in_thread");
    ensure!(found == (8 * 211 * 97, 8 * 211), "{found:?} in {groups:#?}");
    let stacks = groups
        .iter()
        .filter(|group| group.passes("allocate_in_thread"))
        .count();
    ensure!(stacks == 1, "one call path became {stacks}: {groups:#?}");
    Ok(())
}

fn combined_totals_equal_the_blocks() -> Result<()> {
    let ended = trace(
        "alloc",
        &thread_workload(),
        &["--combined-only", "-T", "1000", "60"],
    )?;
    let groups = last_report(&ended.stdout)?;
    let found = outstanding(&groups, "allocate_in_thread");
    ensure!(found == (8 * 211 * 97, 8 * 211), "{found:?} in {groups:#?}");

    let ended = trace(
        "alloc",
        &["leak", "31", "4093"],
        &["--combined-only", "-T", "1000", "60"],
    )?;
    let groups = last_report(&ended.stdout)?;
    ensure!(
        outstanding(&groups, "leak_malloc") == (31 * 4093, 31),
        "{groups:#?}"
    );
    ensure!(
        outstanding(&groups, "leak_mmap") == (31 * 4093, 31),
        "{groups:#?}"
    );
    ensure!(groups.len() == 11, "{groups:#?}");
    ensure!(
        !ended.stdout.contains("\t\t0x"),
        "BCC prints no addresses here: {}",
        ended.stdout
    );
    Ok(())
}

fn a_tenth_is_recorded() -> Result<()> {
    let args = ["-s", "10", "-o", "0", "-T", "1000", "60"];
    let ended = trace("alloc", &["threads", "1", "10007", "10007", "64"], &args)?;
    let (_, allocations) = outstanding(&last_report(&ended.stdout)?, "allocate_in_thread");
    // The bounds are ten standard deviations of a binomial distribution around 1000.7.
    ensure!((700..1300).contains(&allocations), "{allocations} of 10007");
    Ok(())
}
