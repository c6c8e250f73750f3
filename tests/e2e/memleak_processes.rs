//! memleak over several processes, and over a process that becomes another program.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;
use tempfile::TempDir;

use crate::containers::Layout;
use crate::harness::{self, Cgroup, NotHere, Tool, Workload, eventually};
use crate::memleak::{self, Group, READY};

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak::processes":
        each_of_two_has_its_own: at_entries,
        children_are_followed,
        children_of_a_command_are_followed,
        a_command_behind_a_script_is_seen_from_its_first_call,
        without_children_only_the_parent_is_traced,
        those_in_a_cgroup_are_traced,
        those_of_a_name_are_traced,
        an_allocator_is_probed_when_its_process_joins_the_cgroup,
        an_allocator_is_probed_when_its_process_gets_the_name,
        each_process_is_looked_at_once [Once],
        what_children_left_when_they_exited_is_shown_once,
        thousands_of_children_leave_what_they_leaked [Once],
        what_children_left_is_in_totals_and_estimates,
        a_vforked_child_shares_its_parents_blocks,
        an_exec_forgets,
        an_exec_forgets_totals,
        children_want_a_parent,
        a_process_without_its_main_thread,
        a_main_thread_that_ends_meanwhile,
        a_program_that_copies_its_code_survives,
    }
}

const ALL: [&str; 5] = ["-o", "0", "-T", "1000", "60"];

/// Returns what a process has outstanding from a function: bytes and allocations.
fn of(groups: &[Group], pid: &str, function: &str) -> (u64, u64) {
    let groups: Vec<&Group> = groups
        .iter()
        .filter(|group| group.pid.as_deref() == Some(pid) && group.passes(function))
        .collect();
    (
        groups.iter().map(|group| group.bytes).sum(),
        groups.iter().map(|group| group.allocations).sum(),
    )
}

fn start(args: &[&str]) -> Result<Tool> {
    let mut tool = Tool::start("memleak", &[args, &ALL].concat())?;
    tool.wait_for_stderr(READY)?;
    Ok(tool)
}

fn groups_at_end(tool: Tool) -> Result<Vec<Group>> {
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    memleak::last_report(&ended.stdout)
}

/// Every tool sees a process whose main thread has ended, and -p takes the TID of a thread.
fn a_process_without_its_main_thread() -> Result<()> {
    let mut workload = Workload::start("leaderless", &["31", "4093"])?;
    let pid = workload.pid();
    let tid = fs::read_dir(format!("/proc/{pid}/task"))?
        .flatten()
        .filter_map(|thread| thread.file_name().into_string().ok())
        .find(|tid| *tid != pid)
        .context("no other thread")?;
    let tool = start(&["-p", &tid])?;

    let usage = harness::run("memtriage", &["-j", "-p", &tid])?;
    ensure!(usage.status.success(), "{usage:?}");
    let all = harness::run("memtriage", &["-j", "--by", "process", "-T", "10000"])?;
    let shown = format!(r#""pid":{pid},"comm":"leaderless""#);
    ensure!(all.stdout.contains(&shown), "{pid} is not shown: {all:?}");
    let heap = harness::run(
        "heapscan",
        &["--layout", "-j", "--max-pause", "5000", "-p", &pid],
    )?;
    // glibc's walk knows no tcache of a thread that has ended, but the process is read.
    ensure!(!heap.stderr.contains("has exited"), "{heap:?}");

    workload.work()?;
    workload.finish()?;
    let ended = tool.wait()?;
    ensure!(ended.status.success(), "{ended:?}");
    let groups = memleak::last_report(&ended.stdout)?;
    let leaked = memleak::outstanding(&groups, "leak_leaderless");
    ensure!(leaked == (31 * 4093, 31), "{leaked:?}: {groups:#?}");
    Ok(())
}

/// A trace goes on after the end of the main thread, in libraries that are loaded later, too.
fn a_main_thread_that_ends_meanwhile() -> Result<()> {
    let library = harness::workload("libloaded.so");
    let library = library.to_str().context("a path")?;
    let mut workload = Workload::start("leaderless", &["37", "4093", library])?;
    let mut tool = start(&["-p", &workload.pid()])?;
    workload.work()?;
    tool.wait_for_stderr("probes in libloaded.so")?;
    workload.work()?;
    workload.finish()?;
    let ended = tool.wait()?;
    let groups = memleak::last_report(&ended.stdout)?;
    let leaked = memleak::outstanding(&groups, "leak_leaderless");
    ensure!(leaked == (37 * 4093, 37), "{leaked:?}: {ended:?}");
    Ok(())
}

/// Breakpoints that a program has copied with its code are removed before it runs the copy. The trace ends.
fn a_program_that_copies_its_code_survives() -> Result<()> {
    for (program, way) in [
        ("copies", "mremap"),
        ("copies", "mmap"),
        ("copies", "memfd"),
        ("copies-static", "mremap"),
    ] {
        let mut workload = Workload::start(program, &["31", "4093", way])?;
        let tool = start(&["-p", &workload.pid()])?;
        workload.work()?;
        let survived = workload.work().and_then(|_| workload.finish());
        let survived = survived.with_context(|| format!("{program} {way}"))?;
        ensure!(survived.success(), "{program} {way}: {survived}");
        let ended = tool.wait()?;
        ensure!(
            ended.status.code() == Some(1) && ended.stderr.contains("replaces its code by a copy"),
            "{program} {way}: {ended:?}"
        );
        let groups = memleak::last_report(&ended.stdout)?;
        let leaked = memleak::outstanding(&groups, "leak_copies");
        ensure!(leaked == (31 * 4093, 31), "{leaked:?}: {groups:#?}");
    }
    Ok(())
}

fn each_of_two_has_its_own() -> Result<()> {
    let mut one = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let mut other = Workload::start("alloc", &["one", "malloc", "37", "211"])?;
    let mut tool = start(&["-p", &format!("{},{}", one.pid(), other.pid())])?;
    let mut pids: Vec<u32> = vec![one.pid().parse()?, other.pid().parse()?];
    pids.sort_unstable();
    tool.wait_for_stderr(&format!(
        "Attaching to pids {}, {}, Ctrl+C",
        pids[0], pids[1]
    ))?;
    let found = tool.wait_for_line("probes in libc.so.6")?;
    ensure!(found.contains(", in each of 2 processes ("), "{found}");
    one.work()?;
    other.work()?;
    let groups = groups_at_end(tool)?;
    let found = of(&groups, &one.pid(), "leak_malloc");
    ensure!(found == (31 * 4093, 31), "{found:?} in {groups:#?}");
    let found = of(&groups, &other.pid(), "leak_malloc");
    ensure!(found == (37 * 211, 37), "{found:?} in {groups:#?}");
    ensure!(groups.len() == 2, "{groups:#?}");
    Ok(())
}

/// A parent leaks blocks. Its two children, which inherit these blocks and free them, leak more.
fn children_are_followed() -> Result<()> {
    let mut workload = Workload::start("lives", &["fork", "101", "97"])?;
    let pid = workload.pid();
    let tool = start(&["--children", "-p", &pid])?;
    let facts = workload.work()?;
    let groups = groups_at_end(tool)?;
    let child = |key: &str| facts.get(key).context("no child");
    for (pid, times) in [(&pid, 1), (child("twice")?, 2), (child("thrice")?, 3)] {
        let found = of(&groups, pid, "in_process");
        ensure!(
            found == (times * 101 * 97, times * 101),
            "{times}: {found:?} in {groups:#?}"
        );
    }
    Ok(())
}

fn children_of_a_command_are_followed() -> Result<()> {
    // With /dev/null as stdin, the workload does not wait.
    let command = format!("'{}' fork 101 97", harness::workload("lives").display());
    let args = ["--children", "--mode", "alloc", "-j", "-T", "1000", "-c"];
    let ended = harness::run("memleak", &[&args[..], &[&command, "60"]].concat())?;
    ensure!(ended.status.success(), "{ended:?}");
    let mut found = calls_through(&ended.stdout, "in_process");
    found.sort_unstable();
    ensure!(found == [101, 202, 303], "{}", ended.stdout);
    Ok(())
}

/// Returns the calls of each stack that contains this function. The JSON output has lines of the command in between.
fn calls_through(stdout: &str, function: &str) -> Vec<u64> {
    let rows = stdout.lines().filter_map(|line| {
        let row: serde_json::Value = serde_json::from_str(line).ok()?;
        let frames = row["user_frames"].to_string();
        frames.contains(function).then_some(row)
    });
    rows.filter_map(|row| row["allocations"].as_u64()).collect()
}

/// A shell runs for longer than a starting command needs to map its code. Then it becomes a program with an
/// allocator of its own.
fn a_command_behind_a_script_is_seen_from_its_first_call() -> Result<()> {
    let program = harness::workload("alloc-musl-static");
    let command = format!(
        "sh -c 'sleep 1; exec {} one malloc 1009 61'",
        program.display()
    );
    let args = ["--mode", "alloc", "-j", "-T", "1000", "-c", &command, "60"];
    let ended = harness::run("memleak", &args)?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(!ended.stderr.contains("is not known"), "{ended:?}");
    let found = calls_through(&ended.stdout, "leak_malloc");
    ensure!(found == [1009], "{found:?}: {ended:?}");
    Ok(())
}

fn without_children_only_the_parent_is_traced() -> Result<()> {
    let args = ["-o", "0", "-T", "1000", "60"];
    let ended = memleak::trace("lives", &["fork", "101", "97"], &args)?;
    let groups = memleak::last_report(&ended.stdout)?;
    let found = memleak::outstanding(&groups, "in_process");
    ensure!(found == (101 * 97, 101), "{found:?} in {groups:#?}");

    let command = "sh -c '/bin/true; exit 0'";
    let ended = harness::run("memleak", &["-c", command])?;
    ensure!(ended.stderr.contains("give --children"), "{ended:?}");
    Ok(())
}

/// Two programs run, one of them in the cgroup. A third one joins the cgroup later.
fn those_in_a_cgroup_are_traced() -> Result<()> {
    let cgroup = Cgroup::new()?;
    let mut inside = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let mut outside = Workload::start("alloc", &["one", "malloc", "37", "211"])?;
    cgroup.add(&inside.pid())?;
    let tool = start(&["--cgroup", &cgroup.path().to_string_lossy()])?;
    let mut later = Workload::start("alloc", &["one", "malloc", "41", "89"])?;
    cgroup.add(&later.pid())?;
    for workload in [&mut inside, &mut outside, &mut later] {
        workload.work()?;
    }
    let groups = groups_at_end(tool)?;
    let found = of(&groups, &inside.pid(), "leak_malloc");
    ensure!(found == (31 * 4093, 31), "{found:?} in {groups:#?}");
    let found = of(&groups, &later.pid(), "leak_malloc");
    ensure!(found == (41 * 89, 41), "{found:?} in {groups:#?}");
    let foreign = groups.iter().any(|group| group.pid == Some(outside.pid()));
    ensure!(!foreign, "{groups:#?}");
    Ok(())
}

fn those_of_a_name_are_traced() -> Result<()> {
    let mut named = Workload::start("alloc-nopie", &["one", "malloc", "31", "4093"])?;
    let mut other = Workload::start("alloc", &["one", "malloc", "37", "211"])?;
    let tool = start(&["--comm", "oc-nopi"])?;
    named.work()?;
    other.work()?;
    let groups = groups_at_end(tool)?;
    let found = of(&groups, &named.pid(), "leak_malloc");
    ensure!(found == (31 * 4093, 31), "{found:?} in {groups:#?}");
    let foreign = groups.iter().any(|group| group.pid == Some(other.pid()));
    ensure!(!foreign, "{groups:#?}");
    Ok(())
}

/// A program with an allocator of its own is moved into a cgroup below the traced one, which is made meanwhile, and
/// later out of it. Another one stays outside, and is not probed.
fn an_allocator_is_probed_when_its_process_joins_the_cgroup() -> Result<()> {
    let (mut traced, mut beside) = (Layout::new()?, Layout::new()?);
    let mut inside = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let mut joins = Workload::start("alloc-static", &["churn", "3", "37"])?;
    let folder = tempfile::tempdir()?;
    let outside = copy_of("alloc-static", &folder, "outside")?;
    let mut outside = Workload::spawn(Command::new(outside).args(["one", "malloc", "41", "89"]))?;
    traced.put(&inside.pid(), "inside")?;
    beside.put(&joins.pid(), "beside")?;
    let mut tool = start(&["--cgroup", &traced.path()])?;
    // Each round leaks one block.
    joins.round(false)?;
    traced.put(&joins.pid(), "new/below")?;
    tool.wait_for_stderr("probes in alloc-static")?;
    joins.round(false)?;
    beside.put(&joins.pid(), "beside")?;
    joins.round(true)?;
    inside.work()?;
    outside.work()?;
    let ended = tool.interrupt()?;
    let groups = memleak::last_report(&ended.stdout)?;
    let found = of(&groups, &inside.pid(), "leak_malloc");
    ensure!(found == (31 * 4093, 31), "{found:?} in {ended:?}");
    let of_joined = groups.iter().filter(|group| group.pid == Some(joins.pid()));
    let allocations: u64 = of_joined.map(|group| group.allocations).sum();
    ensure!(allocations == 1, "{ended:?}");
    ensure!(!ended.stderr.contains("probes in outside"), "{ended:?}");
    Ok(())
}

/// Copies a program, so that its file is one that no other process runs. The copy is made by another process: as long
/// as a file is open for writing, also in a child of another test's, it cannot be executed.
fn copy_of(program: &str, folder: &TempDir, name: &str) -> Result<PathBuf> {
    let copy = folder.path().join(name);
    let copied = Command::new("cp")
        .arg(harness::workload(program))
        .arg(&copy)
        .status()?;
    ensure!(copied.success(), "cp: {copied}");
    Ok(copy)
}

/// Two programs with allocators of their own get the traced name: one by a thread that renames itself, one by exec.
fn an_allocator_is_probed_when_its_process_gets_the_name() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let first = copy_of("alloc", &folder, "renamed-1")?;
    let later = copy_of("alloc-static", &folder, "renamed-2")?;
    let mut first = Workload::spawn(Command::new(first).args(["one", "malloc", "31", "4093"]))?;
    let mut thread = Workload::start("alloc-static", &["renamed", "37", "211"])?;
    let script = r#"echo ready $$; read line; exec "$0" one malloc 41 89"#;
    let mut by_exec = Workload::spawn(Command::new("sh").args(["-c", script]).arg(later))?;
    let mut tool = start(&["-n", "renamed"])?;
    tool.wait_for_stderr("other processes that run these files hit the probes, too")?;
    thread.round(false)?;
    tool.wait_for_stderr("probes in alloc-static (")?;
    by_exec.round(false)?;
    tool.wait_for_stderr("probes in renamed-2 (")?;
    for workload in [&mut first, &mut thread, &mut by_exec] {
        workload.work()?;
    }
    let groups = groups_at_end(tool)?;
    for (workload, allocations, bytes) in
        [(&first, 31, 4093), (&thread, 37, 211), (&by_exec, 41, 89)]
    {
        let found = of(&groups, &workload.pid(), "leak_malloc");
        ensure!(
            found == (allocations * bytes, allocations),
            "{found:?} in {groups:#?}"
        );
    }
    Ok(())
}

/// memleak beside many processes that are in other cgroups than the traced ones reads next to nothing while they do
/// nothing. Reads count, rather than time, as other programs may use the CPUs.
fn each_process_is_looked_at_once() -> Result<()> {
    /// Cgroups below the traced one, and processes beside it.
    const MANY: u32 = 61;
    /// Most reads in five looks. Other tests start processes meanwhile, each of which takes some.
    const MOST_READS: u64 = 2_000;
    let mut traced = Layout::new()?;
    let inside = Workload::start("alloc", &["hold"])?;
    for number in 0..MANY {
        traced.put(&inside.pid(), &number.to_string())?;
    }
    let sleepers = (0..MANY)
        .map(|_| Sleeper::start())
        .collect::<Result<Vec<_>>>()?;
    let tool = start(&["--cgroup", &traced.path()])?;
    let field = |file: &str, name: &str| -> Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/{file}", tool.pid()))
            .map_err(|_| NotHere("the kernel does not count reads"))?;
        let value = text.lines().find_map(|line| line.strip_prefix(name));
        Ok(value.context("no field")?.trim().parse()?)
    };
    let looks = |wanted: u64| -> Result<()> {
        let until = field("status", "voluntary_ctxt_switches:")? + wanted;
        eventually("memleak looks at its processes", || {
            Ok(field("status", "voluntary_ctxt_switches:")? >= until)
        })
    };
    // At the first look, each process is asked about.
    looks(3)?;
    let before = field("io", "syscr:")?;
    looks(5)?;
    let reads = field("io", "syscr:")? - before;
    println!("{reads} reads");
    ensure!(
        reads < MOST_READS,
        "{reads} reads for {} idle processes",
        sleepers.len()
    );
    Ok(())
}

/// Process that sleeps until the value is dropped.
struct Sleeper(Child);

impl Sleeper {
    fn start() -> Result<Self> {
        let started = Command::new("sleep").arg("1000").spawn();
        Ok(Self(started.context("failed to start sleep")?))
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Each of some children leaks and exits. What they have left is in one report, apart, and in the sums of no report.
fn what_children_left_when_they_exited_is_shown_once() -> Result<()> {
    let mut workload = Workload::start("lives", &["leave", "101", "97", "7"])?;
    let pid = workload.pid();
    let args = ["--children", "-j", "-o", "0", "-T", "1000", "-p", &pid, "1"];
    let mut tool = Tool::start("memleak", &args)?;
    tool.wait_for_stderr(READY)?;
    let facts = workload.work()?;
    let children: Vec<&str> = facts["children"].split(',').collect();
    ensure!(children.len() == 7, "{facts:?}");
    tool.wait_for_output(r#""type":"exited""#)?;
    tool.wait_for_output(r#""type":"report""#)?;
    tool.wait_for_output(r#""type":"report""#)?;
    let ended = tool.interrupt()?;
    let objects = ended.objects()?;
    for child in children {
        let of_child = |row: &&Value| row["pid"].as_u64() == child.parse().ok();
        let exited = objects.iter().filter(|row| row["type"] == "exited");
        let left: Vec<(u64, u64)> = exited
            .filter(of_child)
            .filter(|row| row.to_string().contains("in_process"))
            .filter_map(|row| Some((row["bytes"].as_u64()?, row["allocations"].as_u64()?)))
            .collect();
        ensure!(left == [(101 * 97, 101)], "{child}: {left:?}");
    }
    let last = objects.iter().rfind(|row| row["type"] == "report");
    let last = last.context("no report")?;
    ensure!(last["allocations"] == 0, "{last}");

    let args = ["--children", "--folded", "-o", "0"];
    let ended = memleak::trace("lives", &["leave", "101", "97", "7"], &args)?;
    let note = "exited processes left 68.6 kB in 707 blocks, which are not in the folded stacks";
    ensure!(ended.stderr.contains(note), "{ended:?}");
    Ok(())
}

/// There are that many children that PIDs and entries of the kernel's maps are used again and again.
fn thousands_of_children_leave_what_they_leaked() -> Result<()> {
    const CHILDREN: u64 = 5003;
    let mut workload = Workload::start("lives", &["leave", "3", "97", &CHILDREN.to_string()])?;
    let pid = workload.pid();
    let args = ["--children", "-p", &pid, "-o", "0", "-T", "100000", "60"];
    let mut tool = Tool::start("memleak", &args)?;
    tool.wait_for_stderr(READY)?;
    let facts = workload.work()?;
    let groups = groups_at_end(tool)?;
    let mut left: HashMap<&str, (u64, u64)> = HashMap::new();
    for group in groups.iter().filter(|group| group.passes("in_process")) {
        let sum = left
            .entry(group.pid.as_deref().unwrap_or_default())
            .or_default();
        *sum = (sum.0 + group.bytes, sum.1 + group.allocations);
    }
    let children: HashSet<&str> = facts["children"].split(',').collect();
    let wrong = children
        .iter()
        .filter(|child| left.get(**child) != Some(&(3 * 97, 3)));
    let wrong: Vec<_> = wrong.map(|child| (child, left.get(child))).collect();
    ensure!(
        children.len() as u64 == CHILDREN && wrong.is_empty(),
        "{wrong:?}"
    );
    Ok(())
}

fn what_children_left_is_in_totals_and_estimates() -> Result<()> {
    // Each block is larger than the sampling distance, so estimates are exact.
    for args in [&["-C"][..], &["--sample-bytes", "64", "-o", "0"]] {
        let mut workload = Workload::start("lives", &["leave", "101", "97", "7"])?;
        let children = ["--children", "-p", &workload.pid(), "-T", "1000", "60"];
        let mut tool = Tool::start("memleak", &[args, &children].concat())?;
        tool.wait_for_stderr(READY)?;
        let facts = workload.work()?;
        let groups = groups_at_end(tool)?;
        for child in facts["children"].split(',') {
            let found = of(&groups, child, "in_process");
            ensure!(
                found == (101 * 97, 101),
                "{args:?}: {found:?} in {groups:#?}"
            );
        }
    }
    Ok(())
}

/// With --children, memleak sees what parent and child do with the shared memory. Without it, memleak must not
/// count a first free as a double free.
fn a_vforked_child_shares_its_parents_blocks() -> Result<()> {
    for children in [&["--children"][..], &[]] {
        let mut workload = Workload::start("lives", &["vfork", "101"])?;
        let args = ["-j", "-o", "0", "-T", "1000", "-p", &workload.pid(), "60"];
        let mut tool = Tool::start("memleak", &[children, &args].concat())?;
        tool.wait_for_stderr(READY)?;
        workload.work()?;
        let ended = tool.interrupt()?;
        let objects = ended.objects()?;
        let head = objects.first().context("no report")?;
        ensure!(head["double_frees"].as_u64().unwrap_or(0) == 0, "{head}");
        if children.is_empty() {
            continue;
        }
        for key in ["allocations", "unknown_frees", "unseen_frees"] {
            ensure!(head[key] == 0, "{key} in {}", ended.stdout);
        }
    }
    Ok(())
}

/// Traces a process that leaks, and becomes another program that leaks. Returns the groups at the end.
fn becomes_another(args: &[&str]) -> Result<Vec<Group>> {
    let program = harness::workload("alloc");
    let program = program.to_string_lossy();
    let mut workload = Workload::start(
        "lives",
        &["exec", "31", "4093", &program, "one", "malloc", "41", "89"],
    )?;
    let tool = memleak::attach(&workload, &[args, &["-T", "1000", "60"]].concat())?;
    workload.go()?;
    workload.wait_ready()?;
    workload.work()?;
    groups_at_end(tool)
}

fn an_exec_forgets() -> Result<()> {
    let groups = becomes_another(&["-o", "0"])?;
    let found = memleak::outstanding(&groups, "leak_malloc");
    ensure!(found == (41 * 89, 41), "{found:?} in {groups:#?}");
    ensure!(
        memleak::outstanding(&groups, "grown") == (0, 0),
        "blocks of the program before: {groups:#?}"
    );
    Ok(())
}

fn an_exec_forgets_totals() -> Result<()> {
    let groups = becomes_another(&["--combined-only"])?;
    let found = memleak::outstanding(&groups, "leak_malloc");
    ensure!(found == (41 * 89, 41), "{found:?} in {groups:#?}");
    ensure!(
        memleak::outstanding(&groups, "grown") == (0, 0),
        "totals of the program before: {groups:#?}"
    );
    Ok(())
}

fn children_want_a_parent() -> Result<()> {
    let ended = harness::run("memleak", &["--children", "--comm", "x"])?;
    ensure!(ended.status.code() == Some(2), "{ended:?}");
    ensure!(ended.stderr.contains("-p or -c"), "{}", ended.stderr);
    let ended = harness::run("memleak", &["--comm", "no-such-name"])?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    ensure!(ended.stderr.contains("start one"), "{}", ended.stderr);
    Ok(())
}
