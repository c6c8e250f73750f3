//! memleak against programs whose leaks are known.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::Write;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::libbpf_sys::BPF_F_NO_PREALLOC;
use libbpf_rs::query::MapInfoIter;
use libbpf_rs::{MapCore, MapHandle};
use libtest_mimic::Trial;
use memtools::bpf::kernel_support;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{self, Ended, Tool, Workload, eventually};
use crate::pressure::Setting;

/// All end-to-end tests of memleak.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak":
        every_function_is_exact: at_entries,
        costly_entries_are_not_probed [Once],
        entries_are_probed_when_asked_for [Once],
        balanced_code_reports_nothing: at_entries,
        realloc_corner_cases: at_entries,
        failed_calls_are_no_allocations: at_entries,
        what_stops_the_target_changes_no_count [Host],
        a_debugger_changes_no_count [Host],
        big_blocks_count_once: at_entries,
        calls_that_are_not_recorded_are_known_to_go_on,
        parts_of_mappings_are_unmapped: at_entries,
        threads_exact: at_entries,
        combined_totals_equal_the_blocks: at_entries,
        target_exits_first,
        a_command_of_a_few_milliseconds,
        the_status_of_a_command_is_passed_on [Once],
        driven_as_bcc_drives_its_own [Once],
        builds_of_all_kinds,
        cxx_names_are_demangled [Once],
        rust_names_are_demangled [Once],
        another_libc_in_another_mount_namespace,
        a_deleted_program_still_has_names,
        generated_code_has_its_perf_map_names,
        stacks_are_complete_with_frame_pointers,
        deep_stacks_are_cut_and_counted,
        tens_of_thousands_of_stacks,
        stacks_of_what_is_gone_make_room,
        stacks_that_do_not_fit_are_counted,
        blocks_that_do_not_fit_are_counted,
        events_that_do_not_fit_are_counted,
        json_agrees_with_text [Once],
        folded_weighs_by_bytes [Once],
        sizes_are_filtered,
        sort_and_top [Once],
        age_is_filtered,
        trace_prints_every_call: at_entries,
        show_allocs_lists_every_block [Once],
        objects_can_be_named [Once],
        a_tenth_is_recorded: at_entries,
        reports_come_at_their_interval [Once],
        silence_is_explained,
        a_reader_that_leaves_ends_it,
        bad_targets_are_named,
        a_32_bit_process_is_refused [Compat],
        missing_btf_is_named,
        killed_it_leaves_nothing_behind,
        a_warning_does_not_stop_the_machine [Guest],
        perf_uprobes_are_taken_away_behind_its_back,
        names_cannot_reach_the_terminal [Once],
    }
}

pub(crate) const READY: &str = "probes in";
/// Primes, so that no other sum hits them by accident.
const COUNT: u64 = 31;
const SIZE: u64 = 4093;

/// One stack of a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) bytes: u64,
    pub(crate) allocations: u64,
    /// Innermost first: `name+0xoffset [module]`.
    pub(crate) frames: Vec<String>,
    /// The process, if there are several.
    pub(crate) pid: Option<String>,
    /// The line of --extended.
    pub(crate) extended: String,
}

impl Group {
    pub(crate) fn passes(&self, function: &str) -> bool {
        self.frames.iter().any(|frame| name(frame) == function)
    }
}

/// Whether blocks are in a table, where double frees are noticed: from 5.15 on, as of cookies.
pub(crate) fn has_table() -> bool {
    kernel_support::btf_has_name("bpf_perf_link")
}

fn name(frame: &str) -> &str {
    frame.split('+').next().unwrap_or(frame)
}

/// The groups of the last report of a text output.
pub(crate) fn last_report(stdout: &str) -> Result<Vec<Group>> {
    let start = stdout
        .rfind("stacks with outstanding allocations:\n")
        .context("no report")?;
    let mut groups: Vec<Group> = Vec::new();
    for line in stdout[start..].lines().skip(1) {
        if let Some(frame) = line.strip_prefix("\t\t") {
            let frame = frame.split_once('\t').map_or(frame, |(_, frame)| frame);
            groups
                .last_mut()
                .context("a frame before any group")?
                .frames
                .push(frame.to_owned());
        } else if line.starts_with("\ttotal ") || line.starts_with("\tof these ") {
            // What all groups have together.
        } else if line.contains(" bytes in ") {
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |at: usize| words.get(at).and_then(|word| word.parse().ok());
            groups.push(Group {
                bytes: number(0).with_context(|| line.to_owned())?,
                allocations: number(3).with_context(|| line.to_owned())?,
                frames: Vec::new(),
                pid: words
                    .iter()
                    .position(|word| *word == "PID")
                    .and_then(|at| words.get(at + 1))
                    .map(|pid| (*pid).to_owned()),
                extended: String::new(),
            });
        } else if let Some(age) = line.strip_prefix("\t  ") {
            groups
                .last_mut()
                .context("an age before any group")?
                .extended = age.to_owned();
        } else if !line.trim_start().starts_with("addr =") {
            bail!("a line that does not belong to a report: {line:?}");
        }
    }
    Ok(groups)
}

/// What a function, and whatever it calls, has outstanding: bytes and allocations.
pub(crate) fn outstanding(groups: &[Group], function: &str) -> (u64, u64) {
    let through: Vec<&Group> = groups
        .iter()
        .filter(|group| group.passes(function))
        .collect();
    (
        through.iter().map(|group| group.bytes).sum(),
        through.iter().map(|group| group.allocations).sum(),
    )
}

/// Starts memleak on a workload that is ready, and waits until its probes are live.
pub(crate) fn attach(workload: &Workload, args: &[&str]) -> Result<Tool> {
    let pid = workload.pid();
    let args = [&["-p", &pid], args].concat();
    let mut tool = Tool::start("memleak", &args)?;
    tool.wait_for(READY)?;
    Ok(tool)
}

/// Traces all of a workload's work, and stops memleak while the workload still holds.
pub(crate) fn trace(program: &str, program_args: &[&str], args: &[&str]) -> Result<Ended> {
    let mut workload = Workload::start(program, program_args)?;
    let tool = attach(&workload, args)?;
    workload.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    workload.finish()?;
    Ok(ended)
}

/// The groups of the last report of [`trace`], of all stacks and all ages.
pub(crate) fn trace_all(program: &str, program_args: &[&str]) -> Result<Vec<Group>> {
    last_report(&trace(program, program_args, &["-o", "0", "-T", "1000", "60"])?.stdout)
}

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

/// Whether a mapping is the allocator's own must be known of a call, too, whose return is not looked at.
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

/// Each block is a system call at which strace(1) stops the target; signals stop it anywhere.
fn what_stops_the_target_changes_no_count() -> Result<()> {
    // More than the largest that glibc takes from its heap: 32 MiB.
    const SIZE: u64 = 33_554_467;
    let program = ["big", "1009", &SIZE.to_string()];
    let mut workload = Workload::start("alloc", &program)?;
    let pid: i32 = workload.pid().parse()?;
    let tool = attach(&workload, &["-o", "0", "-T", "1000", "60"])?;
    let traced = harness::scratch()?;
    let calls = traced.path().join("calls");
    let mut command = Command::new("strace");
    command.args(["-p", &workload.pid(), "-o"]).arg(&calls);
    let mut strace = command.stderr(Stdio::null()).spawn().context("no strace")?;
    eventually("strace is attached", || {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        Ok(!status.contains("TracerPid:\t0\n"))
    })?;
    workload.go()?;
    for _ in 0..23 {
        kill(Pid::from_raw(pid), Signal::SIGSTOP)?;
        thread::sleep(Duration::from_millis(2));
        kill(Pid::from_raw(pid), Signal::SIGCONT)?;
    }
    workload.done()?;
    kill(Pid::from_raw(strace.id().cast_signed()), Signal::SIGINT)?;
    strace.wait()?;
    let mapped = fs::read_to_string(&calls)?.matches("mmap(").count();
    ensure!(mapped >= 1009, "strace has seen {mapped} calls");
    let groups = last_report(&tool.interrupt()?.stdout)?;
    let found = outstanding(&groups, "big");
    ensure!(found == (1009 * SIZE, 1009), "{found:?}: {groups:#?}");
    Ok(())
}

/// gdb stops the target at each call of a function, and then steps through allocator and probes.
fn a_debugger_changes_no_count() -> Result<()> {
    const CALLS: u64 = 1009;
    let mut workload = Workload::start("alloc", &["hole", &CALLS.to_string()])?;
    let tool = attach(&workload, &["-o", "0", "-T", "1000", "60"])?;
    let all_but_last = format!("ignore 1 {}", CALLS - 1);
    let mut gdb = Command::new("gdb");
    gdb.args(["-nx", "-batch", "-p", &workload.pid()]);
    for command in [
        "break hole",
        &all_but_last,
        // By another program, as gdb keeps what it writes to a pipe.
        "shell echo set",
        "continue",
        "info breakpoints",
        "stepi 499",
    ] {
        gdb.args(["-ex", command]);
    }
    let gdb = gdb.stdin(Stdio::null()).stderr(Stdio::null());
    let mut gdb = gdb.stdout(Stdio::piped()).spawn().context("no gdb")?;
    let mut lines = BufReader::new(gdb.stdout.take().context("no stdout")?).lines();
    // What the target does before gdb has its breakpoint, gdb does not see.
    let set = lines.find(|line| !matches!(line, Ok(line) if line != "set"));
    set.context("gdb has ended")??;
    workload.work()?;
    let said: String = lines.map(|line| line.unwrap_or_default() + "\n").collect();
    gdb.wait()?;
    let hits = format!("already hit {CALLS} times");
    ensure!(said.contains(&hits), "{said}");
    let groups = last_report(&tool.interrupt()?.stdout)?;
    let found = outstanding(&groups, "hole");
    let bytes = CALLS * (16 + (1 << 20));
    ensure!(found == (bytes, 2 * CALLS), "{found:?}: {groups:#?}");
    Ok(())
}

fn parts_of_mappings_are_unmapped() -> Result<()> {
    const PAGE: u64 = 4096;
    let groups = trace_all("alloc", &["munmap", "101"])?;
    for (function, pages, calls) in [
        ("unmap_parts", 98, 1),
        ("unmap_fails", 101, 1),
        // Two pages of the first mapping are the second one's now.
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

/// Blocks allocated in one thread and freed in another, all at once. In guests there are fewer:
/// the emulated machine takes milliseconds for what takes microseconds here.
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

fn target_exits_first() -> Result<()> {
    let mut workload = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let tool = attach(&workload, &["60"])?;
    workload.work()?;
    workload.finish()?;
    let ended = tool.end()?;
    ensure!(ended.status.success(), "{ended:?}");
    let groups = last_report(&ended.stdout)?;
    ensure!(
        outstanding(&groups, "leak_malloc") == (31 * 4093, 31),
        "{groups:#?}"
    );
    ensure!(
        groups.iter().all(|group| group.passes("main")),
        "names are lost: {groups:#?}"
    );
    Ok(())
}

fn a_command_of_a_few_milliseconds() -> Result<()> {
    // With /dev/null as stdin the workload does not wait for anybody.
    let command = format!(
        "'{}' one malloc 31 4093",
        harness::workload("alloc").display()
    );
    // If it did not notice the end it would take an hour, more than the harness lets it.
    let ended = harness::run("memleak", &["-c", &command, "3600"])?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(
        ended.stdout.contains("\ndone\n"),
        "its output is missing: {}",
        ended.stdout
    );
    let report = ended.stdout.find('[').map_or("", |at| &ended.stdout[at..]);
    let groups = last_report(report)?;
    ensure!(
        outstanding(&groups, "leak_malloc") == (31 * 4093, 31),
        "{groups:#?}"
    );
    ensure!(
        groups.iter().all(|group| group.passes("main")),
        "names are lost: {groups:#?}"
    );
    Ok(())
}

fn the_status_of_a_command_is_passed_on() -> Result<()> {
    let ended = harness::run("memleak", &["-c", "sh -c 'exit 42'"])?;
    ensure!(ended.status.code() == Some(42), "{ended:?}");
    let ended = harness::run("memleak", &["-c", "sh -c 'kill -KILL $$'"])?;
    ensure!(ended.status.code() == Some(128 + 9), "{ended:?}");

    // What we started ends with us, and that is no failure.
    let pid_file = harness::scratch()?;
    let path = pid_file.path().join("pid");
    let command = format!("sh -c 'echo $$ >{}; exec sleep 1000'", path.display());
    let mut tool = Tool::start("memleak", &["-c", &command, "1", "1"])?;
    tool.wait_for(READY)?;
    let ended = tool.end()?;
    ensure!(ended.status.success(), "{ended:?}");
    let pid = fs::read_to_string(&path).context("the command did not run")?;
    ensure!(
        !Path::new("/proc").join(pid.trim()).exists(),
        "the command still runs"
    );
    Ok(())
}

/// The protocol of the test that BCC has for its memleak: a report, a newline into the command's
/// stdin, and the first number of the last line with "byte" in it.
fn driven_as_bcc_drives_its_own() -> Result<()> {
    let kinds = [
        "malloc",
        "calloc",
        "realloc",
        "posix_memalign",
        "valloc",
        "memalign",
        "pvalloc",
        "aligned_alloc",
    ];
    // A block has to be half a second old at the second report.
    let (kinds, interval) = if harness::in_guest() {
        (&kinds[..1], "4")
    } else {
        (&kinds[..], "1")
    };
    for kind in kinds {
        let command = format!(
            "{} one {kind} 1 30000",
            harness::workload("alloc").display()
        );
        let mut child = Command::new(harness::tool("memleak"))
            .args(["-c", &command, "-T", "1", interval, "2"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut stdin = child.stdin.take().context("no stdin")?;
        let mut stdout = std::io::BufReader::new(child.stdout.take().context("no stdout")?);
        let mut line = String::new();
        while !line.contains("with outstanding allocations") {
            line.clear();
            let read = std::io::BufRead::read_line(&mut stdout, &mut line)?;
            ensure!(read > 0, "{kind}: no report");
        }
        stdin.write_all(b"\n")?;
        let mut rest = String::new();
        std::io::Read::read_to_string(&mut stdout, &mut rest)?;
        child.wait()?;
        let last = rest
            .lines()
            .rfind(|line| line.contains("byte"))
            .context("nothing reported")?;
        ensure!(
            last.split_whitespace().next() == Some("30000"),
            "{kind}: {last:?}"
        );
    }
    Ok(())
}

fn builds_of_all_kinds() -> Result<()> {
    for program in ["alloc", "alloc-nopie", "alloc-static"] {
        let groups = trace_all(program, &["one", "malloc", "31", "4093"])?;
        let found = outstanding(&groups, "leak_malloc");
        ensure!(
            found == (31 * 4093, 31),
            "{program}: {found:?} in {groups:#?}"
        );
    }
    let groups = trace_all("alloc-stripped", &["one", "malloc", "31", "4093"])?;
    let [group] = &groups[..] else {
        bail!("{groups:#?}")
    };
    ensure!(
        (group.bytes, group.allocations) == (31 * 4093, 31),
        "{group:#?}"
    );
    ensure!(
        name(&group.frames[0]) == "alloc-stripped",
        "a name where there is none: {group:#?}"
    );
    Ok(())
}

fn cxx_names_are_demangled() -> Result<()> {
    let groups = trace_all("alloc-cxx", &["objects", "31", "4093"])?;
    ensure!(groups.len() == 1, "{groups:#?}");
    let found = outstanding(&groups, "operator new(unsigned long)");
    ensure!(found == (31 * 4093, 31), "{groups:#?}");
    Ok(())
}

fn rust_names_are_demangled() -> Result<()> {
    let groups = trace_all("alloc-rust", &["31", "4093"])?;
    let through = |group: &&Group| {
        group
            .frames
            .iter()
            .any(|frame| frame.contains("shop::leak_order"))
    };
    let group = groups
        .iter()
        .find(through)
        .with_context(|| format!("{groups:#?}"))?;
    ensure!(
        (group.bytes, group.allocations) == (31 * 4093, 31),
        "{group:#?}"
    );
    Ok(())
}

fn another_libc_in_another_mount_namespace() -> Result<()> {
    // A root of its own that holds a program and musl, at paths that mean nothing out here.
    let root = harness::scratch()?;
    let within = |path: &str| root.path().join(path);
    harness::copy(
        &harness::workload("ld-musl.so.1"),
        &within("lib/ld-musl-x86_64.so.1"),
    )?;
    harness::copy(&harness::workload("alloc-musl"), &within("opt/program"))?;

    let mut command = Command::new("/opt/program");
    command.args(["leak", "31", "4093"]);
    harness::in_root(&mut command, root.path());
    let mut workload = Workload::spawn(&mut command)?;
    let tool = attach(&workload, &["-o", "0", "-T", "1000", "60"])?;
    workload.work()?;
    let ended = tool.interrupt()?;
    let groups = last_report(&ended.stdout)?;
    // musl's own posix_memalign and memalign call aligned_alloc: counted once all the same.
    for function in [
        "malloc",
        "calloc",
        "realloc",
        "reallocarray",
        "posix_memalign",
        "aligned_alloc",
        "memalign",
        "mmap",
    ] {
        let found = outstanding(&groups, &format!("leak_{function}"));
        ensure!(
            found == (31 * 4093, 31),
            "{function}: {found:?} in {groups:#?}"
        );
    }
    ensure!(
        outstanding(&groups, "leak_mremap") == (31 * 3 * 4093, 31),
        "{groups:#?}"
    );
    ensure!(groups.len() == 9, "{groups:#?}");
    Ok(())
}

fn a_deleted_program_still_has_names() -> Result<()> {
    let folder = harness::scratch()?;
    let program = folder.path().join("short-lived");
    harness::copy(&harness::workload("alloc-static"), &program)?;
    let mut workload =
        Workload::spawn(Command::new(&program).args(["one", "malloc", "31", "4093"]))?;
    fs::remove_file(&program)?;
    // Another file in its place must not lend it names.
    harness::copy(&harness::workload("alloc-stripped"), &program)?;
    let tool = attach(&workload, &["-o", "0", "60"])?;
    workload.work()?;
    workload.finish()?;
    let groups = last_report(&tool.end()?.stdout)?;
    ensure!(
        outstanding(&groups, "leak_malloc") == (31 * 4093, 31),
        "{groups:#?}"
    );
    Ok(())
}

fn generated_code_has_its_perf_map_names() -> Result<()> {
    let groups = trace_all("jit", &["31", "4093"])?;
    ensure!(
        outstanding(&groups, "compiled_by_hand") == (31 * 4093, 31),
        "{groups:#?}"
    );
    ensure!(
        groups.iter().any(|group| group.passes("main")),
        "{groups:#?}"
    );
    Ok(())
}

fn stacks_are_complete_with_frame_pointers() -> Result<()> {
    let groups = trace_all("alloc", &["deep", "100", "4093"])?;
    let [group] = &groups[..] else {
        bail!("{groups:#?}")
    };
    let names: Vec<&str> = group.frames.iter().map(|frame| name(frame)).collect();
    ensure!(names[..101].iter().all(|&name| name == "deep"), "{names:?}");
    ensure!(names[101] == "main", "{names:?}");
    Ok(())
}

fn deep_stacks_are_cut_and_counted() -> Result<()> {
    let ended = trace("alloc", &["deep", "300", "4093"], &["-o", "0", "60"])?;
    let groups = last_report(&ended.stdout)?;
    let [group] = &groups[..] else {
        bail!("{groups:#?}")
    };
    ensure!(
        group.frames.len() == 127 + 1,
        "{} frames",
        group.frames.len()
    );
    ensure!(
        group.frames[127].starts_with("[truncated"),
        "{}",
        group.frames[127]
    );
    ensure!(
        ended.stderr.contains("lost 1 stack tails"),
        "{}",
        ended.stderr
    );

    let args = ["-o", "0", "--perf-max-stack-depth", "7", "60"];
    let groups = last_report(&trace("alloc", &["deep", "300", "4093"], &args)?.stdout)?;
    ensure!(groups[0].frames.len() == 7 + 1, "{groups:#?}");
    Ok(())
}

fn tens_of_thousands_of_stacks() -> Result<()> {
    let count = if harness::in_guest() { 1009 } else { 50_021 };
    let args = [
        "-j",
        "-o",
        "0",
        "-T",
        "65536",
        "--stack-storage-size",
        "65536",
        "60",
    ];
    let ended = trace("alloc", &["stacks", &count.to_string()], &args)?;
    ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
    let rows = ended.stdout.lines().map(serde_json::from_str);
    let rows: Vec<serde_json::Value> = rows.collect::<Result<_, _>>()?;
    ensure!(rows[0]["stacks"] == count, "{}", rows[0]);
    let mut different = HashSet::new();
    for row in rows.iter().filter(|row| row["type"] == "stack") {
        ensure!(row["allocations"] == 1, "{row}");
        different.insert(row["user_frames"].to_string());
    }
    ensure!(different.len() == count, "{} stacks", different.len());
    Ok(())
}

/// The stacks in the table in use of the tool whose table has this size.
fn stacks_in_use(size: u32) -> usize {
    let maps = MapInfoIter::default().filter(|info| info.max_entries == size);
    let newest = maps.map(|info| info.id).max();
    let map = newest.and_then(|id| MapHandle::from_map_id(id).ok());
    map.map_or(usize::MAX, |map| map.keys().count())
}

/// Ten times as many as there is room for, of which few have live blocks.
fn stacks_of_what_is_gone_make_room() -> Result<()> {
    const ROUNDS: usize = 29;
    const STACKS: usize = 1499;
    // By which the table is known among others.
    const SIZE: u32 = 4099;
    let (rounds, stacks) = (ROUNDS.to_string(), STACKS.to_string());
    let mut workload = Workload::start("alloc", &["churn", &rounds, &stacks])?;
    let size = SIZE.to_string();
    let args = [
        "-j",
        "-o",
        "0",
        "-T",
        "100",
        "--stack-storage-size",
        &size,
        "60",
    ];
    let tool = attach(&workload, &args)?;
    for round in 1..=ROUNDS {
        workload.round(round == ROUNDS)?;
        // A program that only allocates is faster than any reader.
        let has_room = || stacks_in_use(SIZE) < SIZE as usize - STACKS;
        harness::eventually("there is room", || Ok(has_room()))?;
    }
    let ended = tool.interrupt()?;
    ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
    let rows = ended.stdout.lines().map(serde_json::from_str);
    let rows: Vec<serde_json::Value> = rows.collect::<Result<_, _>>()?;
    ensure!(rows[0]["stacks"] == ROUNDS, "{}", rows[0]);
    let mut different = HashSet::new();
    for row in rows.iter().filter(|row| row["type"] == "stack") {
        let frames = row["user_frames"].as_array().map_or(0, Vec::len);
        ensure!(
            row["allocations"] == 1 && row["truncated"].is_null() && frames > 20,
            "{row}"
        );
        different.insert(row["user_frames"].to_string());
    }
    ensure!(different.len() == ROUNDS, "{} stacks", different.len());
    ensure!(workload.finish()?.success());
    Ok(())
}

fn stacks_that_do_not_fit_are_counted() -> Result<()> {
    let all = trace_all("alloc", &["stacks", "211"])?;
    ensure!(all.len() == 211, "{} stacks", all.len());

    // Before the table is renewed, and when it has been, which has no room for all of them either.
    for (interval, count) in [("60", "1"), ("1", "3")] {
        let mut workload = Workload::start("alloc", &["stacks", "211"])?;
        let args = ["-o", "0", "-T", "1000", "--stack-storage-size", "101"];
        let tool = attach(&workload, &[&args[..], &[interval, count]].concat())?;
        workload.work()?;
        let ended = match count {
            "1" => tool.interrupt()?,
            _ => tool.end()?,
        };
        stacks_that_do_not_fit_are_one_group(&ended)?;
    }
    Ok(())
}

fn stacks_that_do_not_fit_are_one_group(ended: &Ended) -> Result<()> {
    let groups = last_report(&ended.stdout)?;
    let allocations: u64 = groups.iter().map(|group| group.allocations).sum();
    ensure!(
        allocations == 211,
        "allocations without a stack are left out: {allocations}"
    );
    let lost: Vec<&Group> = groups
        .iter()
        .filter(|group| group.frames == ["stack information lost"])
        .collect();
    let [lost] = &lost[..] else {
        bail!("{lost:#?}")
    };
    ensure!(lost.allocations > 0, "{lost:#?}");
    let counted = format!("lost {} stacks", lost.allocations);
    ensure!(
        ended.stderr.contains(&counted),
        "not {counted:?} in {}",
        ended.stderr
    );
    Ok(())
}

fn blocks_that_do_not_fit_are_counted() -> Result<()> {
    let args = ["-o", "0", "--max-allocs", "101", "60"];
    let ended = trace("alloc", &["one", "malloc", "211", "4093"], &args)?;
    let groups = last_report(&ended.stdout)?;
    let (_, followed) = outstanding(&groups, "leak_malloc");
    ensure!((101..211).contains(&followed), "{followed} blocks");
    let counted = format!("lost {} entries", 211 - followed);
    ensure!(
        ended.stderr.contains(&counted),
        "not {counted:?} in {}",
        ended.stderr
    );
    Ok(())
}

/// More mappings than the ring buffer holds, while memleak is kept from reading it.
fn events_that_do_not_fit_are_counted() -> Result<()> {
    const MAPPINGS: u64 = 60_013;
    let mut workload = Workload::start("alloc", &["one", "mmap", &MAPPINGS.to_string(), "4096"])?;
    let tool = attach(&workload, &["-j", "-o", "0", "60"])?;
    tool.signal(Signal::SIGSTOP)?;
    workload.work()?;
    tool.signal(Signal::SIGCONT)?;
    let ended = tool.interrupt()?;
    let head = ended.stdout.lines().next().context("no report")?;
    let head: serde_json::Value = serde_json::from_str(head)?;
    let lost = head["lost"]["events"]
        .as_u64()
        .context("no count of lost events")?;
    ensure!(lost > 0, "nothing was lost: {head}");
    ensure!(head["allocations"] == MAPPINGS - lost, "{head}");
    ensure!(
        ended.stderr.contains(&format!("lost {lost} events")),
        "{}",
        ended.stderr
    );
    Ok(())
}

fn json_agrees_with_text() -> Result<()> {
    let json = trace(
        "alloc-nopie",
        &["leak", "31", "4093"],
        &["-j", "-o", "0", "-T", "1000", "60"],
    )?;
    let text = trace(
        "alloc-nopie",
        &["leak", "31", "4093"],
        &["-o", "0", "-T", "1000", "60"],
    )?;
    let mut rows = Vec::new();
    for line in json.stdout.lines() {
        rows.push(
            serde_json::from_str::<serde_json::Value>(line).with_context(|| line.to_owned())?,
        );
    }
    let unwinding = rows.pop().context("no rows")?;
    ensure!(
        unwinding["type"] == "unwinding" && unwinding["complete"] == unwinding["stacks"],
        "{unwinding}"
    );
    let probes = rows.pop().context("no row of the probes")?;
    ensure!(probes["type"] == "probes", "{probes}");
    let (head, stacks) = rows.split_first().context("no rows")?;
    ensure!(head["type"] == "report" && head["stacks"] == 11, "{head}");
    ensure!(
        head["bytes"] == 10 * 31 * 4093 + 31 * 3 * 4093 && head["allocations"] == 11 * 31,
        "{head}"
    );
    ensure!(
        head["lost"]["events"] == 0 && head["comm"] == "alloc-nopie",
        "{head}"
    );
    let time = head["time"].as_str().context("no time")?;
    ensure!(
        time.len() == "2026-11-20T04:05:06.000007+01:00".len(),
        "{time}"
    );

    // The program is at the same addresses both times; libc is not, so its frames are left out.
    let own = |frames: &[String]| -> Vec<String> {
        frames
            .iter()
            .filter(|frame| frame.contains("[alloc-nopie]"))
            .cloned()
            .collect()
    };
    let from_json: Vec<(u64, Vec<String>)> = stacks
        .iter()
        .map(|stack| {
            let frames = stack["user_frames"]
                .as_array()
                .map_or(&[][..], Vec::as_slice);
            let frames: Vec<String> = frames
                .iter()
                .map(|frame| {
                    let symbol = frame["symbol"].as_str().unwrap_or_default();
                    let offset = frame["offset"].as_u64().unwrap_or_default();
                    format!(
                        "{symbol}+{offset:#x} [{}]",
                        frame["module"].as_str().unwrap_or_default()
                    )
                })
                .collect();
            (stack["bytes"].as_u64().unwrap_or_default(), own(&frames))
        })
        .collect();
    let from_text: Vec<(u64, Vec<String>)> = last_report(&text.stdout)?
        .iter()
        .map(|group| (group.bytes, own(&group.frames)))
        .collect();
    let sorted = |mut rows: Vec<(u64, Vec<String>)>| {
        rows.sort();
        rows
    };
    ensure!(
        sorted(from_json.clone()) == sorted(from_text.clone()),
        "{from_json:#?}\n{from_text:#?}"
    );
    Ok(())
}

fn folded_weighs_by_bytes() -> Result<()> {
    let ended = trace("alloc", &["leak", "31", "4093"], &["-f", "-o", "0", "1"])?;
    let mut weights = HashMap::new();
    for line in ended.stdout.lines() {
        let (stack, weight) = line.rsplit_once(' ').with_context(|| line.to_owned())?;
        let frames: Vec<&str> = stack.split(';').collect();
        ensure!(frames[0] == "alloc" && frames.contains(&"main"), "{line}");
        let leaf = frames.last().context("no frames")?;
        weights.insert(leaf.to_string(), weight.parse::<u64>()?);
    }
    ensure!(
        weights.len() == 11,
        "not one line a stack, once: {}",
        ended.stdout
    );
    ensure!(weights["leak_malloc"] == 31 * 4093, "{weights:?}");
    ensure!(weights["moved_mapping"] == 31 * 3 * 4093, "{weights:?}");
    Ok(())
}

fn sizes_are_filtered() -> Result<()> {
    let program = ["realloc", "101"]; // leaves 1000, 100, 70 and 300 bytes
    for (args, expected) in [
        (&["-z", "100"][..], vec![100, 300, 1000]),
        (&["-Z", "299"], vec![70, 100]),
        (&["-z", "100", "-Z", "300"], vec![100, 300]),
    ] {
        let args = [args, &["-o", "0", "-T", "1000", "60"]].concat();
        let groups = last_report(&trace("alloc", &program, &args)?.stdout)?;
        let sizes: Vec<u64> = groups.iter().map(|group| group.bytes / 101).collect();
        ensure!(sizes == expected, "{args:?}: {groups:#?}");
    }
    Ok(())
}

fn sort_and_top() -> Result<()> {
    let ended = trace(
        "alloc",
        &["leak", "31", "4093"],
        &["-o", "0", "-T", "1", "60"],
    )?;
    let groups = last_report(&ended.stdout)?;
    ensure!(
        groups.len() == 1 && groups[0].passes("leak_mremap"),
        "{groups:#?}"
    );
    ensure!(
        ended.stdout.contains("] Top 1 stacks with"),
        "{}",
        ended.stdout
    );
    // The line has what is not shown, too.
    let all = trace(
        "alloc",
        &["leak", "31", "4093"],
        &["-o", "0", "-T", "100", "60"],
    )?;
    let groups = last_report(&all.stdout)?;
    let blocks: u64 = groups.iter().map(|group| group.allocations).sum();
    let whole = format!(" in {blocks} blocks of {} stacks, shown 1", groups.len());
    let line = ended
        .stdout
        .lines()
        .find(|line| line.starts_with("\ttotal "));
    let line = line.with_context(|| format!("no total: {}", ended.stdout))?;
    ensure!(groups.len() > 1 && line.contains(&whole), "{line} {whole}");
    ensure!(line.contains("; resident "), "{line}");
    // The fewest bytes, but by far the most calls.
    let ended = trace(
        "alloc",
        &["threads", "1", "1009", "1009", "1"],
        &["-o", "0", "-T", "1", "--sort", "count", "60"],
    )?;
    let groups = last_report(&ended.stdout)?;
    ensure!(
        groups.len() == 1 && groups[0].allocations == 1009,
        "{groups:#?}"
    );
    Ok(())
}

fn age_is_filtered() -> Result<()> {
    let mut workload = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let tool = attach(&workload, &["-o", "3600000", "60"])?;
    workload.work()?;
    let groups = last_report(&tool.interrupt()?.stdout)?;
    ensure!(groups.is_empty(), "nothing is an hour old: {groups:#?}");
    Ok(())
}

fn trace_prints_every_call() -> Result<()> {
    let ended = trace(
        "alloc",
        &["one", "malloc", "31", "4093"],
        &["-t", "-o", "0", "60"],
    )?;
    let count = |text: &str| {
        ended
            .stdout
            .lines()
            .filter(|line| line.contains(text))
            .count()
    };
    ensure!(
        count(": alloc entered, size = 4093") == 31,
        "{}",
        ended.stdout
    );
    ensure!(
        count(": alloc exited, size = 4093, result = ") == 31,
        "{}",
        ended.stdout
    );
    let ended = trace("alloc", &["big", "53", "1000003"], &["-t", "-o", "0", "60"])?;
    let freed = ended
        .stdout
        .lines()
        .filter(|line| line.contains(": free entered, address = "))
        .count();
    ensure!(freed == 53, "{}", ended.stdout);
    Ok(())
}

fn show_allocs_lists_every_block() -> Result<()> {
    let ended = trace(
        "alloc",
        &["one", "malloc", "31", "4093"],
        &["-a", "-o", "0", "60"],
    )?;
    let mut addresses: Vec<&str> = ended
        .stdout
        .lines()
        .filter_map(|line| line.strip_prefix("\taddr = ")?.strip_suffix(" size = 4093"))
        .collect();
    addresses.sort_unstable();
    addresses.dedup();
    ensure!(addresses.len() == 31, "{}", ended.stdout);
    Ok(())
}

fn objects_can_be_named() -> Result<()> {
    let workload = Workload::start("alloc", &["hold"])?;
    let libc = fs::read_to_string(format!("/proc/{}/maps", workload.pid()))?
        .lines()
        .find_map(|line| {
            line.split_whitespace()
                .nth(5)
                .filter(|path| path.contains("/libc.so"))
                .map(str::to_owned)
        })
        .context("no libc")?;
    for object in ["c", "libc.so.6", &libc] {
        let tool = attach(&workload, &["-O", object])?;
        ensure!(tool.interrupt()?.status.success(), "{object}");
    }
    for (args, remedy) in [
        (
            &["-O", "jemalloc"][..],
            "is not among the files that the process runs: alloc",
        ),
        (&["-S", "je_"], "defines je_malloc and je_free"),
    ] {
        let pid = workload.pid();
        let args = [&["-p", &pid], args].concat();
        let ended = harness::run("memleak", &args)?;
        ensure!(
            ended.status.code() == Some(1) && ended.stderr.contains(remedy),
            "{ended:?}"
        );
    }
    Ok(())
}

fn a_tenth_is_recorded() -> Result<()> {
    let args = ["-s", "10", "-o", "0", "-T", "1000", "60"];
    let ended = trace("alloc", &["threads", "1", "10007", "10007", "64"], &args)?;
    let (_, allocations) = outstanding(&last_report(&ended.stdout)?, "allocate_in_thread");
    // Ten standard deviations of a binomial distribution around 1000.7.
    ensure!((700..1300).contains(&allocations), "{allocations} of 10007");
    Ok(())
}

fn reports_come_at_their_interval() -> Result<()> {
    let workload = Workload::start("alloc", &["hold"])?;
    let tool = attach(&workload, &["1", "3"])?;
    let start = Instant::now();
    let ended = tool.end()?;
    let took = start.elapsed();
    let reports = ended
        .stdout
        .matches("stacks with outstanding allocations:")
        .count();
    ensure!(ended.status.success() && reports == 3, "{ended:?}");
    ensure!(
        took > Duration::from_millis(2500),
        "three seconds took {took:?}"
    );
    ensure!(ended.stdout.starts_with('['), "{}", ended.stdout);
    ensure!(
        &ended.stdout[9..42] == "] Top 10 stacks with outstanding ",
        "{}",
        ended.stdout
    );
    Ok(())
}

fn silence_is_explained() -> Result<()> {
    let workload = Workload::start("alloc", &["hold"])?;
    let mut tool = attach(&workload, &["60"])?;
    tool.wait_for("no allocation or free yet")?;
    tool.interrupt()?;
    Ok(())
}

fn a_reader_that_leaves_ends_it() -> Result<()> {
    let workload = Workload::start("alloc", &["hold"])?;
    let script = format!(
        "'{}' -p {} 1 2>/dev/null | head -n 1; echo \"status ${{PIPESTATUS:-none}}\"",
        harness::tool("memleak").display(),
        workload.pid()
    );
    // A shell without PIPESTATUS cannot tell; then the tool writes its status itself.
    let status = harness::scratch()?;
    let file = status.path().join("status");
    let script = script.replace(
        "2>/dev/null |",
        &format!(
            "2>/dev/null && echo 0 >{0} || echo $? >{0}; }} |",
            file.display()
        ),
    );
    let output = Command::new("sh")
        .arg("-c")
        .arg(format!("{{ {script}"))
        .output()?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    ensure!(
        stdout
            .lines()
            .next()
            .is_some_and(|line| line.contains("Top 10 stacks")),
        "{output:?}"
    );
    ensure!(
        fs::read_to_string(&file)?.trim() == "0",
        "{}",
        fs::read_to_string(&file)?
    );
    Ok(())
}

fn bad_targets_are_named() -> Result<()> {
    let fails = |args: &[&str], code: i32, remedy: &str| -> Result<()> {
        let ended = harness::run("memleak", args)?;
        ensure!(ended.status.code() == Some(code), "{args:?}: {ended:?}");
        ensure!(
            ended.stderr.contains(remedy),
            "{args:?}: not {remedy:?} in {}",
            ended.stderr
        );
        ensure!(ended.stdout.is_empty(), "{args:?}: {ended:?}");
        Ok(())
    };
    fails(&["-p", "4194305"], 1, "no process has PID 4194305")?;
    fails(&["-p", "2"], 1, "is a kernel thread")?;
    fails(&["-c", "no-such-command-here"], 1, "command not found")?;
    fails(
        &["-c", "/etc/passwd"],
        1,
        "is not a program that may be run",
    )?;
    fails(&["-c", "'open"], 1, "unbalanced quotes")?;
    fails(
        &["-p", "1", "-z", "5", "-Z", "4"],
        2,
        "--min-size (-z) 5 is larger than --max-size (-Z) 4",
    )?;

    let go = Workload::start("alloc-go-bare", &["hold"])?;
    fails(
        &["-p", &go.pid()],
        1,
        "is a Go program without an allocator of C",
    )?;
    let bare = Workload::start("alloc-static-stripped", &["hold"])?;
    fails(
        &["-p", &bare.pid()],
        1,
        "none of alloc-static-stripped defines malloc and free",
    )?;

    let mut threaded = Workload::start("alloc", &["threads", "1", "1", "1", "1"])?;
    threaded.work()?;
    let gone = threaded.pid();
    threaded.finish()?;
    fails(&["-p", &gone], 1, "no process has PID")?;
    Ok(())
}

fn a_32_bit_process_is_refused() -> Result<()> {
    let workload = Workload::start("compat32", &[])?;
    let ended = harness::run("memleak", &["-p", &workload.pid()])?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    ensure!(
        ended.stderr.contains("is not an x86-64 program"),
        "{ended:?}"
    );
    Ok(())
}

fn missing_btf_is_named() -> Result<()> {
    let mut command = Command::new(harness::tool("memleak"));
    command.args(["-p", "1"]);
    // SAFETY: system calls between fork and exec.
    unsafe {
        command.pre_exec(|| {
            use nix::mount::{MsFlags, mount};
            const NONE: Option<&str> = None;
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?;
            mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)?;
            mount(
                NONE,
                "/sys/kernel/btf",
                Some("tmpfs"),
                MsFlags::empty(),
                NONE,
            )?;
            Ok(())
        });
    }
    let ended = Tool::spawn(&mut command)?.end()?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    ensure!(
        ended.stderr.contains("CONFIG_DEBUG_INFO_BTF=y"),
        "{ended:?}"
    );
    Ok(())
}

fn killed_it_leaves_nothing_behind() -> Result<()> {
    let untraced = {
        let mut workload = Workload::start("alloc", &["balanced", "101", "211"])?;
        let facts = workload.work()?;
        (facts, workload.finish()?)
    };
    let mut workload = Workload::start("alloc", &["balanced", "101", "211"])?;
    let tool = attach(&workload, &["60"])?;
    let pid = tool.pid();
    tool.signal(Signal::SIGKILL)?;
    let ended = tool.end()?;
    ensure!(!ended.status.success(), "{ended:?}");
    // Nothing of it is left that could keep a probe: no process, no trace event.
    ensure!(!Path::new(&format!("/proc/{pid}")).exists());
    let events = fs::read_to_string("/sys/kernel/tracing/uprobe_events").unwrap_or_default();
    ensure!(events.is_empty(), "{events}");
    let traced = (workload.work()?, workload.finish()?);
    ensure!(traced == untraced, "{traced:?} is not {untraced:?}");

    let mut workload = Workload::start("alloc", &["balanced", "101", "211"])?;
    let tool = attach(&workload, &["60"])?;
    let traced = workload.work()?;
    tool.interrupt()?;
    let traced = (traced, workload.finish()?);
    ensure!(traced == untraced, "{traced:?} is not {untraced:?}");
    Ok(())
}

/// Kernels before 6.1 warn of maps whose entries are made when they are needed; here that would be a panic.
fn a_warning_does_not_stop_the_machine() -> Result<()> {
    let _panics = Setting::change("/proc/sys/kernel/panic_on_warn", "1")?;
    let mut workload = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let mut tool = Tool::start("memleak", &["-p", &workload.pid(), "-o", "0", "60"])?;
    tool.wait_for(READY)?;
    let newest = |name: &str| {
        let maps = MapInfoIter::default().filter(|info| info.name == *name);
        let newest = maps.max_by_key(|info| info.id);
        newest.with_context(|| format!("no map {name}"))
    };
    let unwarned = kernel_support::btf_has_name("bpf_mem_alloc");
    for name in ["overflow", "threads", "totals", "unknown_frees"] {
        let as_needed = newest(name)?.map_flags & BPF_F_NO_PREALLOC != 0;
        ensure!(as_needed == unwarned, "{name}: {as_needed}");
    }
    workload.work()?;
    let groups = last_report(&tool.interrupt()?.stdout)?;
    let found = outstanding(&groups, "leak_malloc");
    ensure!(found == (31 * 4093, 31), "{found:?} in {groups:#?}");
    Ok(())
}

/// A process of its own waits for that, which ends, too.
fn perf_uprobes_are_taken_away_behind_its_back() -> Result<()> {
    let mut workload = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let args = ["-p", &workload.pid(), "-o", "0", "60"];
    let tool = Tool::start_by("perf uprobes without cookies", "memleak", &args)?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    // It is the first of its session, as none that was started by a test.
    let is_left = || -> Result<bool> {
        for entry in fs::read_dir("/proc")? {
            let stat = fs::read_to_string(entry?.path().join("stat")).unwrap_or_default();
            let Some((pid, rest)) = stat.split_once(" (memleak) ") else {
                continue;
            };
            let fields: Vec<&str> = rest.split(' ').collect();
            if fields[0] != "Z" && fields[3] == pid {
                return Ok(true);
            }
        }
        Ok(false)
    };
    harness::eventually("no process of it is left", || Ok(!is_left()?))?;

    let tool = attach(&workload, &["-o", "0", "60"])?;
    workload.work()?;
    let ended = tool.interrupt()?;
    ensure!(
        ended.stdout.contains("126883 bytes in 31 allocations"),
        "{ended:?}"
    );
    ensure!(workload.finish()?.success());
    Ok(())
}

fn names_cannot_reach_the_terminal() -> Result<()> {
    let folder = harness::scratch()?;
    let program = folder.path().join("\x1b[31mred");
    harness::copy(&harness::workload("alloc-stripped"), &program)?;
    let mut workload =
        Workload::spawn(Command::new(&program).args(["one", "malloc", "31", "4093"]))?;
    let tool = attach(&workload, &["-t", "-o", "0", "60"])?;
    workload.work()?;
    let ended = tool.interrupt()?;
    ensure!(
        !ended.stdout.contains('\x1b') && !ended.stderr.contains('\x1b'),
        "{ended:?}"
    );
    ensure!(ended.stdout.contains("[\\x1b[31mred]"), "{}", ended.stdout);
    Ok(())
}
