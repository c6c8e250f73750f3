//! Tests of memleak with each allocator that it knows, and with allocators that its options describe.

mod programs;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use memtools::code::elf;
use serde_json::Value;

use crate::harness::{self, Tool, Workload, workload};

/// Returns the tests of memleak's allocators.
pub(crate) fn tests() -> Vec<Trial> {
    let own = harness::tests! { "memleak":
        jemalloc_is_exact: at_entries,
        jemalloc_in_the_program_is_exact: at_entries,
        jemalloc_beside_glibc_is_exact: at_entries,
        tcmalloc_is_exact: at_entries,
        mimalloc_is_exact: at_entries,
        mappings_of_an_allocator_are_not_listed,
        musl_in_the_program_is_exact: at_entries,
        thread_storms_leave_nothing: at_entries,
        operators_of_cxx_are_exact,
        a_probe_beside_another_tracers_counter,
        a_free_within_a_free_counts_once [Host],
        an_allocator_that_is_loaded_later,
        an_allocator_that_one_of_many_loads_later,
    };
    [own, programs::tests()].into_iter().flatten().collect()
}

/// Number of blocks. Count and size are primes, so that no other sum equals theirs by accident.
const COUNT: u64 = 31;
const SIZE: u64 = 4093;

/// Forms of `operator new`, by their names in alloc_cxx.cc.
const CXX_FORMS: [&str; 8] = [
    "new",
    "new_array",
    "new_nothrow",
    "new_array_nothrow",
    "new_aligned",
    "new_array_aligned",
    "new_aligned_nothrow",
    "new_array_aligned_nothrow",
];

/// Report of memleak, and what memleak printed on stderr.
struct Report {
    head: Value,
    stacks: Vec<Value>,
    stderr: String,
}

impl Report {
    /// Interrupts `tool`, and returns its report of all blocks of all ages.
    fn of(tool: Tool) -> Result<Self> {
        let ended = tool.interrupt()?;
        let mut rows = ended.objects()?;
        ensure!(!rows.is_empty(), "no report");
        let head = rows.remove(0);
        rows.retain(|row| row["type"] == "stack");
        Ok(Self {
            head,
            stacks: rows,
            stderr: ended.stderr,
        })
    }

    /// Returns the outstanding bytes and allocations of a function and its callees.
    fn of_function(&self, function: &str) -> (u64, u64) {
        let passes = |stack: &&Value| {
            let frames = stack["user_frames"]
                .as_array()
                .map_or(&[][..], Vec::as_slice);
            let mut names = frames.iter().filter_map(|frame| frame["symbol"].as_str());
            names.any(|name| name.split('(').next() == Some(function))
        };
        self.stacks
            .iter()
            .filter(passes)
            .fold((0, 0), |sum, stack| {
                let number = |key: &str| stack[key].as_u64().unwrap_or_default();
                (sum.0 + number("bytes"), sum.1 + number("allocations"))
            })
    }

    /// Checks that no block was freed that was not allocated, that no free was missed, and that no event was lost.
    fn adds_up(&self) -> Result<()> {
        for key in ["unknown_frees", "double_frees", "unseen_frees"] {
            // Double frees are counted with a table of blocks, and not with -n.
            let is_counted = key != "double_frees" || !self.head[key].is_null();
            ensure!(!is_counted || self.head[key] == 0, "{key} in {}", self.head);
        }
        let lost = self.head["lost"].as_object().context("no losses")?;
        ensure!(lost.values().all(|lost| lost == 0), "{}", self.head);
        Ok(())
    }
}

/// Starts memleak on a workload that is ready.
fn attach(workload: &Workload, args: &[&str]) -> Result<Tool> {
    start(&[&["-p", &workload.pid()], args].concat())
}

fn start(args: &[&str]) -> Result<Tool> {
    let args = [&["-j", "-o", "0", "-T", "1000"], args, &["60"]].concat();
    let mut tool = Tool::start("memleak", &args)?;
    tool.wait_for_stderr("probes in")?;
    Ok(tool)
}

fn trace(program: &str, program_args: &[&str], args: &[&str]) -> Result<Report> {
    let mut workload = Workload::start(program, program_args)?;
    let tool = attach(&workload, args)?;
    workload.work()?;
    let report = Report::of(tool)?;
    ensure!(workload.finish()?.success(), "the program was harmed");
    Ok(report)
}

/// Checks that each function of a program leaks exactly its blocks, and that nothing else leaks. `allocator` is
/// the allocator that memleak must find; the program does not have the functions of `without`.
fn is_exact(program: &str, allocator: &str, without: &[&str]) -> Result<()> {
    let args = ["mixed", &COUNT.to_string(), &SIZE.to_string()];
    let report = trace(program, &args, &[])?;
    let found = format!("memleak: allocator: {allocator}");
    ensure!(report.stderr.contains(&found), "{}", report.stderr);
    let functions = [
        ("malloc", SIZE),
        ("calloc", SIZE),
        ("realloc", SIZE),
        ("reallocarray", SIZE),
        ("posix_memalign", SIZE),
        ("aligned_alloc", SIZE),
        ("memalign", SIZE),
        ("valloc", SIZE),
        // By contract, pvalloc rounds up to whole pages; these allocators pass the rounded size on to their other
        // functions.
        ("pvalloc", SIZE.next_multiple_of(4096)),
        ("mmap", SIZE),
        ("mremap", 3 * SIZE),
    ];
    let there = functions.iter().filter(|(name, _)| !without.contains(name));
    for (function, size) in there.clone() {
        let found = report.of_function(&format!("leak_{function}"));
        ensure!(found == (COUNT * size, COUNT), "{function}: {found:?}");
    }
    let stacks = report.stacks.len();
    ensure!(
        stacks == there.count(),
        "more than what leaks: {:#?}",
        report.stacks
    );
    report.adds_up()
}

fn jemalloc_is_exact() -> Result<()> {
    is_exact("alloc-jemalloc", "jemalloc, ", &["pvalloc"])
}

fn jemalloc_in_the_program_is_exact() -> Result<()> {
    is_exact("alloc-jemalloc-static", "jemalloc (static), ", &["pvalloc"])
}

/// The functions of this jemalloc have the prefix je_.
fn jemalloc_beside_glibc_is_exact() -> Result<()> {
    let without = ["pvalloc", "reallocarray"];
    is_exact("alloc-je", "jemalloc (static), ", &without)
}

fn tcmalloc_is_exact() -> Result<()> {
    is_exact("alloc-tcmalloc", "tcmalloc, ", &[])
}

fn mimalloc_is_exact() -> Result<()> {
    is_exact("alloc-mimalloc", "mimalloc, ", &[])
}

fn musl_in_the_program_is_exact() -> Result<()> {
    let without = ["valloc", "pvalloc"];
    is_exact("alloc-musl-static", "musl (static), ", &without)
}

/// Each allocator asks the kernel for large blocks by mmap. memleak lists each block once, as what the program
/// asked the allocator for.
fn mappings_of_an_allocator_are_not_listed() -> Result<()> {
    const BLOCKS: u64 = 211;
    const BYTES: u64 = 1_048_583;
    for program in [
        "alloc",
        "alloc-jemalloc",
        "alloc-jemalloc-static",
        "alloc-tcmalloc",
        "alloc-mimalloc",
        "alloc-musl-static",
    ] {
        let args = ["one", "malloc", &BLOCKS.to_string(), &BYTES.to_string()];
        let report = trace(program, &args, &[])?;
        let found = report.of_function("leak_malloc");
        ensure!(found == (BLOCKS * BYTES, BLOCKS), "{program}: {found:?}");
        let all = report
            .stacks
            .iter()
            .filter_map(|stack| stack["bytes"].as_u64());
        let all: u64 = all.sum();
        ensure!(all == BLOCKS * BYTES, "{program}: {:#?}", report.stacks);
    }
    Ok(())
}

/// Thirty threads free what their neighbours allocate.
fn thread_storms_leave_nothing() -> Result<()> {
    let programs = [
        "alloc",
        "alloc-musl-static",
        "alloc-jemalloc",
        "alloc-tcmalloc",
        "alloc-mimalloc",
    ];
    let (count, programs) = if harness::in_guest() {
        ("101", &programs[..2])
    } else {
        ("10007", &programs[..])
    };
    for program in programs {
        let report = trace(program, &["threads", "30", count, "0", "97"], &[])?;
        let found = report.of_function("work");
        ensure!(found == (0, 0), "{program}: {found:?}");
        // The arrays for the threads' blocks are still allocated.
        let array = 8 * count.parse::<u64>()?;
        let found = report.of_function("threads");
        ensure!(
            found.0 >= 30 * array && found.1 >= 30,
            "{program}: {found:?}"
        );
        report
            .adds_up()
            .with_context(|| format!("with {program}"))?;
    }
    Ok(())
}

fn operators_of_cxx_are_exact() -> Result<()> {
    for (program, own_operators) in [
        // The operators of these two programs call malloc and have no frame pointers, so their callers are
        // missing from stacks.
        ("alloc-cxx", false),
        ("alloc-cxx-static", false),
        ("alloc-cxx-jemalloc", true),
        ("alloc-cxx-tcmalloc", true),
        ("alloc-cxx-mimalloc", true),
    ] {
        let args = ["forms", &COUNT.to_string(), &SIZE.to_string()];
        let report = trace(program, &args, &[])?;
        for form in CXX_FORMS.iter().filter(|_| own_operators) {
            let found = report.of_function(&format!("leak_{form}"));
            let expected = (COUNT * SIZE, COUNT);
            ensure!(found == expected, "{program}: {form}: {found:?}");
        }
        let found = (&report.head["bytes"], &report.head["allocations"]);
        let forms = CXX_FORMS.len() as u64;
        ensure!(
            *found.0 == forms * COUNT * SIZE && *found.1 == forms * COUNT,
            "{program}: {}",
            report.head
        );
        report
            .adds_up()
            .with_context(|| format!("with {program}"))?;
    }
    Ok(())
}

/// Each of glibc's debugging allocators has a free function of its own that calls glibc's.
fn a_free_within_a_free_counts_once() -> Result<()> {
    for library in ["libc_malloc_debug.so.0", "libmemusage.so"] {
        let mut workload = Workload::spawn(
            Command::new(workload("alloc"))
                .args(["balanced", "1009", "61"])
                .env("LD_PRELOAD", library)
                .stderr(Stdio::null()),
        )?;
        let maps = fs::read_to_string(format!("/proc/{}/maps", workload.pid()))?;
        let stem = library.split('.').next().unwrap_or(library);
        ensure!(
            maps.contains(stem),
            "{library}, of libc6 or libc-devtools, was not loaded"
        );
        let tool = attach(&workload, &[])?;
        workload.work()?;
        let report = Report::of(tool)?;
        report.adds_up().with_context(|| library.to_owned())?;
        ensure!(report.stacks.is_empty(), "{library}: {:#?}", report.stacks);
    }
    Ok(())
}

/// Probe of another tracer on an instruction of a workload, with a reference counter as USDT probes have.
struct CountedProbe;

impl CountedProbe {
    const EVENTS: &str = "/sys/kernel/tracing/uprobe_events";
    const ENABLE: &str = "/sys/kernel/tracing/events/memtools_test/enable";

    fn at(program: &Path, function: &str, offset: u64) -> Result<Self> {
        let file = fs::File::open(program)?;
        let found = elf::functions(&file, |name, _| name == function)?;
        let at = found.first().context("no such function")?.file_offset + offset;
        // No writable mapping contains the counter, so the kernel never writes it.
        let event = format!(
            "p:memtools_test/counted {}:{at:#x}(0x10)\n",
            program.display()
        );
        harness::change_events(Self::EVENTS, &event).context("no uprobe of our own")?;
        let probe = Self;
        // The kernel removes the perf uprobes of an earlier memleak, which have no counter, only after memleak
        // has ended.
        harness::eventually("the probe is live", || {
            Ok(fs::write(Self::ENABLE, "1").is_ok())
        })?;
        Ok(probe)
    }
}

impl Drop for CountedProbe {
    fn drop(&mut self) {
        // A probe that cannot be removed makes the next run fail.
        fs::write(Self::ENABLE, "0").ok();
        harness::change_events(Self::EVENTS, "-:memtools_test/counted\n").ok();
    }
}

/// The kernel refuses a probe without a reference counter on an instruction that already has a probe with one.
fn a_probe_beside_another_tracers_counter() -> Result<()> {
    const TAKEN: u64 = 1009;
    let pool = [
        "--alloc=pool:pool_take(size=arg1)",
        "--free=pool:pool_give(ptr=arg1)",
    ];
    let program = workload("pool");
    // The other tracer has the jump of pool_give, where memleak places its probe; memleak can still use the entry.
    let other = CountedProbe::at(&program, "pool_give", 3)?;
    let mut process = Workload::start("pool", &[&TAKEN.to_string(), "61"])?;
    let tool = attach(&process, &pool)?;
    process.work()?;
    let report = Report::of(tool)?;
    let found = report.of_function("take_and_give");
    ensure!(found == (TAKEN * 61, TAKEN), "{found:?}: {}", report.stderr);
    let why = "pool is probed at the functions' entries";
    ensure!(report.stderr.contains(why), "{}", report.stderr);
    drop(other);

    // The entry is the only place for a probe in pool_take.
    let _other = CountedProbe::at(&program, "pool_take", 0)?;
    let mut process = Workload::start("pool", &[&TAKEN.to_string(), "61"])?;
    let ended = harness::run("memleak", &[&["-p", &process.pid()], &pool[..]].concat())?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    let why = "another tracer has a probe with a reference counter";
    ensure!(ended.stderr.matches(why).count() == 1, "{}", ended.stderr);
    process.work()?;
    Ok(())
}

fn an_allocator_that_is_loaded_later() -> Result<()> {
    loads_an_allocator(&workload("loaded"), |workload| attach(workload, &[]))
}

/// The program has a name of its own, because other tests run the same program.
fn an_allocator_that_one_of_many_loads_later() -> Result<()> {
    let folder = harness::scratch()?;
    let program = folder.path().join("loads-later");
    harness::copy(&workload("loaded"), &program)?;
    harness::copy(
        &workload("libloaded.so"),
        &folder.path().join("libloaded.so"),
    )?;
    loads_an_allocator(&program, |_| start(&["-n", "loads-later"]))
}

fn loads_an_allocator(program: &Path, trace: fn(&Workload) -> Result<Tool>) -> Result<()> {
    let args = [&*COUNT.to_string(), &SIZE.to_string()];
    let mut workload = Workload::spawn(Command::new(program).args(args))?;
    let mut tool = trace(&workload)?;
    workload.work()?;
    tool.wait_for_stderr("probes in libloaded.so")?;
    workload.work()?;
    let report = Report::of(tool)?;
    let found = report.of_function("leak_loaded");
    ensure!(found == (COUNT * SIZE, COUNT), "{found:?}");
    report.adds_up()
}
