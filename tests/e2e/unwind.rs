//! Stacks through code without frame pointers, in all ways in which tools take user stacks, against
//! what the program's own unwinder says.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;
use serde_json::Value;
use tempfile::TempDir;

use crate::harness::{self, Ended, Tool, Workload, workload};
use crate::pressure::{Group, folder_on_disk};

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "unwind":
        the_return_of_a_function,
        a_system_call,
        a_page_fault,
        a_mapping,
        a_stall_in_reclaim,
        a_kill,
        a_kill_by_kprobe_and_fentry [Kprobes],
        the_handler_of_a_signal,
        a_library_that_is_loaded_later,
        threads_have_one_stack,
        a_fiber_ends_where_it_began,
        pending_return_probes,
        children_and_what_they_execute,
        processes_that_end_at_once,
        a_process_that_is_met_later,
        a_command_from_its_start,
        every_instruction,
        frame_pointers_alone_do_not_get_far,
        frame_pointers_alone_invent_nothing,
        no_room_for_a_table,
        a_caller_in_no_code_is_not_shown,
        generated_code_is_walked_by_frame_pointers,
        hotspot_s_generated_code_ends_a_stack,
        calls_that_are_bound_lazily,
        deep_recursion_is_cut,
        tables_alone_are_enough,
        a_root_of_its_own_whose_files_are_deleted,
        a_static_program_of_another_libc,
    }
}

/// Prime, so that no other number of calls is it by accident.
const COUNT: u64 = 23;
const THREADS: u64 = 16;

/// What a tool said in JSON.
struct Report {
    stacks: Vec<Entry>,
    unwinding: Value,
}

/// A stack, innermost frame first.
#[derive(Debug)]
struct Entry {
    comm: String,
    count: u64,
    addresses: Vec<u64>,
    symbols: Vec<String>,
    truncated: bool,
    truncated_because: String,
}

impl Report {
    fn read(ended: &Ended) -> Result<Self> {
        ensure!(ended.status.success(), "{ended:?}");
        ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
        let mut report = Self {
            stacks: Vec::new(),
            unwinding: Value::Null,
        };
        for line in ended.stdout.lines().filter(|line| line.starts_with('{')) {
            let row: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
            match row["type"].as_str() {
                Some("stack" | "reclaim" | "kill") => report.stacks.push(Entry::read(&row)?),
                Some("unwinding") => report.unwinding = row,
                _ => {}
            }
        }
        Ok(report)
    }

    /// The only stack that was met so often.
    fn only(&self, count: u64) -> Result<&Entry> {
        let [entry] = &self.stacks[..] else {
            bail!("not one stack: {:#?}", self.stacks)
        };
        ensure!(entry.count == count, "{entry:?}");
        Ok(entry)
    }
}

impl Entry {
    fn read(row: &Value) -> Result<Self> {
        let frames = row["user_frames"].as_array();
        let frames = frames.with_context(|| row.to_string())?;
        let address = |frame: &Value| hex(frame["address"].as_str()?);
        Ok(Self {
            comm: row["comm"].as_str().unwrap_or_default().to_owned(),
            // An event has none.
            count: row["count"]
                .as_u64()
                .or(row["allocations"].as_u64())
                .unwrap_or(1),
            addresses: frames.iter().filter_map(address).collect(),
            symbols: frames
                .iter()
                .map(|frame| frame["symbol"].as_str().unwrap_or("?").to_owned())
                .collect(),
            truncated: row["truncated"].is_string(),
            truncated_because: row["truncated"].as_str().unwrap_or_default().to_owned(),
        })
    }

    /// Whether it goes on from the frame `leaf` as the program's own unwinder says, to the end.
    fn expect(&self, leaf: &str, own: &[u64]) -> Result<()> {
        ensure!(
            self.callers_of(leaf)? == &own[1..] && !self.truncated,
            "{self:x?}\nis not\n{own:x?}"
        );
        Ok(())
    }

    /// Where the frames beyond `leaf` return to.
    fn callers_of(&self, leaf: &str) -> Result<&[u64]> {
        let at = self.symbols.iter().position(|symbol| symbol == leaf);
        let at = at.with_context(|| format!("not through {leaf}: {self:?}"))?;
        Ok(&self.addresses[at + 1..])
    }
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// The fact `stack`: the first is the innermost frame, at another place of the same function.
fn own_stack(facts: &HashMap<String, String>) -> Result<Vec<u64>> {
    let stack = parse_stack(facts.get("stack").context("no stack")?);
    ensure!(stack.len() > 2, "{stack:x?}");
    Ok(stack)
}

fn parse_stack(text: &str) -> Vec<u64> {
    let mut stack: Vec<u64> = text.split(',').filter_map(hex).collect();
    // Beyond the outermost frame.
    while stack.pop_if(|address| *address == 0).is_some() {}
    stack
}

fn live(tool: &str) -> &'static str {
    if tool == "memleak" {
        "probes in"
    } else {
        "tracing"
    }
}

/// Traces all of a workload's work. Returns what the tool reports, and the program's own stack.
fn trace(tool: &str, args: &[&str], mode: &str) -> Result<(Report, Vec<u64>)> {
    let program = Workload::start("unwind", &[mode, &COUNT.to_string()])?;
    trace_program(program, tool, args)
}

fn trace_program(mut program: Workload, tool: &str, args: &[&str]) -> Result<(Report, Vec<u64>)> {
    let pid = program.pid();
    let live = live(tool);
    let mut tool = Tool::start(tool, &[&["-j", "-p", &pid], args].concat())?;
    tool.wait_for(live)?;
    let facts = program.work()?;
    let report = Report::read(&tool.interrupt()?)?;
    Ok((report, own_stack(&facts)?))
}

/// memleak's arguments for leaf_malloc's blocks.
const MALLOC: [&str; 7] = ["-o", "0", "-z", "113", "-Z", "113", "60"];

/// memleak's report, of blocks of any age.
fn trace_malloc(mode: &str) -> Result<(Report, Vec<u64>)> {
    trace("memleak", &MALLOC, mode)
}

fn complete(report: &Report, count: u64) -> Result<()> {
    let unwinding = &report.unwinding;
    ensure!(
        unwinding["stacks"] == count && unwinding["complete"] == count,
        "{unwinding}"
    );
    Ok(())
}

fn the_return_of_a_function() -> Result<()> {
    let (report, own) = trace_malloc("malloc")?;
    report.only(COUNT)?.expect("leaf_malloc", &own)?;
    complete(&report, COUNT)
}

fn a_system_call() -> Result<()> {
    let (report, own) = trace("brkstack", &[], "brk")?;
    report.only(COUNT)?.expect("leaf_brk", &own)?;
    complete(&report, COUNT)
}

fn a_page_fault() -> Result<()> {
    let (report, own) = trace("faults", &[], "fault")?;
    let through_leaf = |entry: &&Entry| entry.symbols[0] == "leaf_fault";
    let entry = report
        .stacks
        .iter()
        .find(through_leaf)
        .context("no fault")?;
    ensure!(entry.count == COUNT, "{entry:?}");
    entry.expect("leaf_fault", &own)?;
    // One of the program's others can be where it saves registers to resolve a symbol.
    let (resolving, others): (Vec<_>, Vec<_>) =
        report.stacks.iter().partition(|entry| entry.truncated);
    let because = "no unwind info: ld-linux-x86-64.so.2";
    let declared = resolving
        .iter()
        .all(|entry| entry.truncated_because == because);
    ensure!(declared, "{resolving:?}");
    let all: u64 = report.stacks.iter().map(|entry| entry.count).sum();
    let unwinding = &report.unwinding;
    let complete: u64 = others.iter().map(|entry| entry.count).sum();
    ensure!(
        unwinding["stacks"] == all && unwinding["complete"] == complete,
        "{unwinding}"
    );
    Ok(())
}

/// By the names of the program's functions: mmapsnoop has no addresses.
fn a_mapping() -> Result<()> {
    let mut program = Workload::start("unwind", &["mmap", &COUNT.to_string()])?;
    let mut tool = Tool::start("mmapsnoop", &["-j", "--stack", "-p", &program.pid()])?;
    tool.wait_for("tracing")?;
    program.work()?;
    let ended = tool.interrupt()?;
    let expected = "leaf_mmap compare through_qsort with_alloca with_large_frame with_aligned_frame \
                    with_busy_registers chain main _start";
    let mut calls = 0;
    for line in ended.stdout.lines() {
        let row: Value = serde_json::from_str(line)?;
        let Some(frames) = row["user_frames"].as_array() else {
            continue;
        };
        // `chain`, `with_busy_registers.constprop.0`
        let names = frames
            .iter()
            .filter_map(|frame| frame["symbol"].as_str()?.split('.').next());
        let chain: Vec<&str> = names
            .filter(|name| expected.split(' ').any(|other| other == *name))
            .collect();
        ensure!(
            chain.join(" ") == expected && row["truncated"].is_null(),
            "{row}"
        );
        calls += 1;
    }
    ensure!(calls == COUNT, "{calls} calls: {ended:?}");
    Ok(())
}

fn a_stall_in_reclaim() -> Result<()> {
    let group = Group::new("memtools-unwind", 32 << 20)?;
    let folder = folder_on_disk()?;
    // Each megabyte is on the disk before the next, so that there are clean pages.
    let file = fs::File::options()
        .create_new(true)
        .write(true)
        .custom_flags(libc::O_DSYNC)
        .open(folder.path().join("written"))?;
    let mut command = group.command(&workload("unwind"), &["write", "97"]);
    let mut program = Workload::spawn(command.stderr(file))?;
    let args = ["--memcg", "-j", "--stack", "-p", &program.pid()];
    let mut tool = Tool::start("drsnoop", &args)?;
    tool.wait_for(live("drsnoop"))?;
    let own = own_stack(&program.work()?)?;
    let report = Report::read(&tool.interrupt()?)?;
    ensure!(report.stacks.len() >= 50, "{}", report.stacks.len());
    for entry in &report.stacks {
        entry.expect("leaf_write", &own)?;
    }
    complete(&report, report.stacks.len() as u64)
}

/// In a page fault, seen by programs of several kinds.
fn a_kill() -> Result<()> {
    killed(None)?;
    killed(Some("mark_victim alone"))?;
    killed(Some("mark_victim's pid alone"))
}

fn a_kill_by_kprobe_and_fentry() -> Result<()> {
    killed(Some("kprobe"))?;
    killed(Some("fentry"))
}

/// The stack of a victim that is killed for its own allocation.
fn killed(way: Option<&str>) -> Result<()> {
    let name = way.unwrap_or("the best way").replace(' ', "-");
    let group = Group::new(&format!("memtools-unwind-{name}"), 8 << 20)?;
    group.forbid_swap()?;
    let mut program = Workload::spawn(&mut group.command(&workload("unwind"), &["grow", "16411"]))?;
    let args = ["-j", "-p", &program.pid()];
    let mut tool = match way {
        Some(way) => Tool::start_by(way, "oomkill", &args)?,
        None => Tool::start("oomkill", &args)?,
    };
    tool.wait_for(live("oomkill"))?;
    let own = own_stack(&program.work()?)?;
    program.go()?;
    ensure!(program.wait()?.signal() == Some(9), "it was not killed");
    let report = Report::read(&tool.interrupt()?)?;
    report.only(1)?.expect("leaf_grow", &own)?;
    complete(&report, 1)
}

fn the_handler_of_a_signal() -> Result<()> {
    let (report, own) = trace_malloc("signal")?;
    let entry = report.only(COUNT)?;
    entry.expect("leaf_malloc", &own)?;
    ensure!(
        entry.symbols.contains(&"raise_signal".to_owned()),
        "{entry:?}"
    );
    complete(&report, COUNT)
}

/// The first call comes as soon as the library is there, before its tables are. Its stack is cut or
/// by frame pointers, and says so; that of the others is complete.
fn a_library_that_is_loaded_later() -> Result<()> {
    let mut program = Workload::start("unwind", &["plugin", &COUNT.to_string()])?;
    let pid = program.pid();
    let mut tool = Tool::start("memleak", &[&["-jv", "-p", &pid], &MALLOC[..]].concat())?;
    tool.wait_for(live("memleak"))?;
    program.work()?;
    tool.wait_for(&format!("unwind tables for process {pid}: 5 files"))?;
    let own = own_stack(&program.work()?)?;
    let report = Report::read(&tool.interrupt()?)?;
    let (cut, complete): (Vec<_>, Vec<_>) = report.stacks.iter().partition(|entry| entry.truncated);
    let calls = |entries: &[&Entry]| entries.iter().map(|entry| entry.count).sum::<u64>();
    ensure!(
        calls(&complete) >= COUNT && calls(&complete) + calls(&cut) == 2 * COUNT,
        "{:?}",
        report.stacks
    );
    for entry in complete {
        entry.expect("leaf_malloc", &own)?;
        ensure!(
            entry.symbols.contains(&"through_plugin".to_owned()),
            "{entry:?}"
        );
    }
    Ok(())
}

/// What is taken for one thread is not another's, whoever preempts it.
fn threads_have_one_stack() -> Result<()> {
    let (report, own) = trace_malloc("threads")?;
    report.only(THREADS * COUNT)?.expect("leaf_malloc", &own)?;
    complete(&report, THREADS * COUNT)
}

/// memleak has its return probes on malloc while malloc calls brk(2).
fn pending_return_probes() -> Result<()> {
    let mut program = Workload::start("unwind", &["nested", &COUNT.to_string()])?;
    let pid = program.pid();
    let mut memleak = Tool::start("memleak", &["-p", &pid, "60"])?;
    memleak.wait_for(live("memleak"))?;
    let mut brkstack = Tool::start("brkstack", &["-j", "-p", &pid])?;
    brkstack.wait_for(live("brkstack"))?;
    let facts = program.work()?;
    let report = Report::read(&brkstack.interrupt()?)?;
    memleak.interrupt()?;
    let own = own_stack(&facts)?;
    let entry = report
        .stacks
        .iter()
        .max_by_key(|entry| entry.count)
        .context("no stacks")?;
    ensure!(entry.count >= COUNT - 1, "{:?}", report.stacks);
    entry.expect("leaf_nested", &own)?;
    let calls: u64 = report.stacks.iter().map(|entry| entry.count).sum();
    complete(&report, calls)
}

/// A fiber's first function is to return into code that no call is before, and that has no rules.
fn a_fiber_ends_where_it_began() -> Result<()> {
    let (report, own) = trace_malloc("fiber")?;
    report.only(COUNT)?.expect("leaf_malloc", &own)?;
    complete(&report, COUNT)
}

/// Starts a workload that nobody knows before, and waits until brkstack, which has met it when its
/// dynamic linker called brk(2), has its tables. The program is in the folder.
fn meet(name: &str, mode: &str) -> Result<(Tool, Workload, TempDir)> {
    let folder = harness::scratch()?;
    let path = folder.path().join(name);
    harness::copy(&workload("unwind"), &path)?;
    let mut tool = Tool::start("brkstack", &["-jv", "-n", name])?;
    tool.wait_for(live("brkstack"))?;
    let program = Workload::spawn(Command::new(path).args([mode, &COUNT.to_string()]))?;
    tool.wait_for(&format!(
        "unwind tables for process {}: 4 files",
        program.pid()
    ))?;
    Ok((tool, program, folder))
}

/// A file's tables serve the child of a fork and what it executes at once.
fn children_and_what_they_execute() -> Result<()> {
    let (tool, mut program, _folder) = meet("unwind-child", "fork")?;
    program.go()?;
    program.ready()?;
    program.work()?;
    let report = Report::read(&tool.interrupt()?)?;
    let calls = |of: &dyn Fn(&Entry) -> bool| -> u64 {
        let entries = report.stacks.iter().filter(|entry| of(entry));
        entries.map(|entry| entry.count).sum()
    };
    let through = |entry: &Entry, symbol: &str| entry.symbols.iter().any(|name| name == symbol);
    let whole = |entry: &Entry| through(entry, "leaf_brk") && !entry.truncated;
    let in_child = calls(&|entry| whole(entry) && through(entry, "fork_and_exec"));
    let in_exec = calls(&|entry| whole(entry) && !through(entry, "fork_and_exec"));
    ensure!(
        (in_child, in_exec) == (COUNT, COUNT),
        "{:#?}",
        report.stacks
    );
    Ok(())
}

/// Processes that end before anybody could look at them, which call brk(2) while they start: only
/// the first one of them is met before there are tables.
fn processes_that_end_at_once() -> Result<()> {
    const RUNS: u64 = 101;
    /// Calls of the first, of which four are its dynamic linker's at the most.
    const OF_THE_FIRST: u64 = 20 + 4;
    let (tool, program, folder) = meet("unwind-short", "brk")?;
    for _ in 0..RUNS {
        let mut run = Command::new(folder.path().join("unwind-short"));
        run.arg("no-such-mode").stdin(Stdio::null()).output()?;
    }
    let report = Report::read(&tool.interrupt()?)?;
    drop(program);
    let of = |what: &str| report.unwinding[what].as_u64().context("no count");
    let (stacks, complete) = (of("stacks")?, of("complete")?);
    ensure!(
        stacks > 2 * RUNS && stacks - complete <= OF_THE_FIRST,
        "{}",
        report.unwinding
    );
    Ok(())
}

fn a_process_that_is_met_later() -> Result<()> {
    let (tool, mut program, _folder) = meet("unwind-later", "brk")?;
    let facts = program.work()?;
    let report = Report::read(&tool.interrupt()?)?;
    let leaf = |entry: &&Entry| entry.symbols.contains(&"leaf_brk".into());
    let entry = report.stacks.iter().find(leaf).context("no call")?;
    ensure!(
        entry.count == COUNT && entry.comm == "unwind-later",
        "{:#?}",
        report.stacks
    );
    entry.expect("leaf_brk", &own_stack(&facts)?)
}

fn a_command_from_its_start() -> Result<()> {
    let command = format!("{} brk {COUNT}", workload("unwind").display());
    let mut tool = Command::new(harness::tool("brkstack"));
    tool.args(["-j", "-c", &command]).stdin(Stdio::null());
    let ended = Tool::spawn(&mut tool)?.end()?;
    let report = Report::read(&ended)?;
    let own = ended
        .stdout
        .lines()
        .find_map(|line| line.split_once("stack="));
    let own = own_stack(&HashMap::from([(
        "stack".to_owned(),
        own.context("no stack")?.1.to_owned(),
    )]))?;
    let leaf = |entry: &&Entry| entry.symbols.contains(&"leaf_brk".into());
    let calls: Vec<&Entry> = report.stacks.iter().filter(leaf).collect();
    ensure!(
        calls.len() == 1 && calls[0].count == COUNT,
        "{:#?}",
        report.stacks
    );
    calls[0].expect("leaf_brk", &own)
}

fn frame_pointers_alone_do_not_get_far() -> Result<()> {
    let (report, own) = trace("brkstack", &["--unwind", "fp"], "brk")?;
    for entry in &report.stacks {
        ensure!(entry.addresses.len() < own.len(), "{entry:?}");
    }
    ensure!(
        report.unwinding["by_frame_pointers_alone"] == COUNT && report.unwinding["complete"] == 0,
        "{}",
        report.unwinding
    );
    Ok(())
}

/// What unwind information says is not believed if no code is there.
fn a_caller_in_no_code_is_not_shown() -> Result<()> {
    let (report, _) = trace("brkstack", &[], "liar")?;
    let entry = report.only(COUNT)?;
    ensure!(
        entry.symbols == ["syscall", "leaf_brk", "liar"]
            && entry.truncated
            && entry.truncated_because == "called from no known code",
        "{entry:x?}"
    );
    let unwinding = &report.unwinding;
    ensure!(
        unwinding["truncated_by_reason"]["no_code"] == COUNT,
        "{unwinding}"
    );
    Ok(())
}

/// Before and after each push, pop and change of the stack pointer, in the PLT, in libc and in the
/// program: a signal comes after each instruction, and its handler calls brk(2).
fn every_instruction() -> Result<()> {
    for name in ["unwind-plt", "unwind-plt-sec"] {
        let mut program = Workload::start(name, &["step", "1"])?;
        let mut tool = Tool::start("brkstack", &["-j", "-p", &program.pid()])?;
        tool.wait_for(live("brkstack"))?;
        let facts = program.work()?;
        let report = Report::read(&tool.interrupt()?)?;

        let mut own = BTreeMap::<Vec<u64>, u64>::new();
        let stacks = facts.get("stacks").context("no stacks")?.split(';');
        for stack in stacks.filter(|stack| !stack.is_empty()) {
            *own.entry(parse_stack(stack)[1..].to_vec()).or_default() += 1;
        }
        let mut seen = BTreeMap::<Vec<u64>, u64>::new();
        for entry in &report.stacks {
            ensure!(!entry.truncated, "{entry:x?}");
            *seen
                .entry(entry.callers_of("leaf_brk")?.to_vec())
                .or_default() += entry.count;
        }
        let wrong: Vec<_> = seen
            .iter()
            .filter(|(stack, _)| !own.contains_key(*stack))
            .collect();
        ensure!(seen == own, "{} of {}: {wrong:x?}", wrong.len(), own.len());
        let steps = own.values().sum();
        ensure!(steps > 200, "{steps} instructions");
        complete(&report, steps).context(name)?;
    }
    Ok(())
}

/// Frame pointers skip frames, but each that they show is one, in its order.
fn frame_pointers_alone_invent_nothing() -> Result<()> {
    for (tool, args, mode, leaf) in [
        ("brkstack", &[][..], "brk", "leaf_brk"),
        ("faults", &[], "fault", "leaf_fault"),
        ("memleak", &MALLOC, "malloc", "leaf_malloc"),
    ] {
        let (report, own) = trace(tool, &[&["--unwind", "fp"], args].concat(), mode)?;
        let entry = report
            .stacks
            .iter()
            .max_by_key(|entry| entry.count)
            .context("no stack")?;
        ensure!(entry.count == COUNT, "{entry:?}");
        // Of a frame in libc, the caller with a frame pointer can be beyond the leaf.
        let at = entry.symbols.iter().position(|symbol| symbol == leaf);
        let shown = &entry.addresses[at.unwrap_or(0) + 1..];
        ensure!(
            is_part_of(shown, &own[1..]),
            "{entry:x?}\nis not of\n{own:x?}"
        );
    }
    // Its frame pointer leads to where no code is.
    let (report, _) = trace("brkstack", &["--unwind", "fp"], "liar")?;
    let entry = report.only(COUNT)?;
    ensure!(entry.symbols == ["syscall"], "{entry:x?}");
    Ok(())
}

/// Whether the frames are others' with some left out.
fn is_part_of(frames: &[u64], all: &[u64]) -> bool {
    let mut all = all.iter();
    frames.iter().all(|frame| all.any(|other| other == frame))
}

/// A library needs more memory for its table than there may be. Its frame pointer is its caller's; so
/// what is beyond may lack frames, and says so.
fn no_room_for_a_table() -> Result<()> {
    let folder = harness::scratch()?;
    let path = folder.path().join("unwind");
    let library = folder.path().join("unwind-plugin.so");
    harness::copy(&workload("unwind"), &path)?;
    harness::copy(&workload("unwind-plugin-large.so"), &library)?;
    let mut command = Command::new(path);
    command.args(["plugin", &COUNT.to_string()]);
    let mut program = Workload::spawn(command.env("LD_PRELOAD", library))?;
    let pid = program.pid();
    let args = [&["-j", "--unwind-memory", "2", "-p", &pid], &MALLOC[..]].concat();
    let mut tool = Tool::start("memleak", &args)?;
    tool.wait_for(live("memleak"))?;
    program.work()?;
    let own = own_stack(&program.work()?)?;
    let ended = tool.interrupt()?;

    let report = Report::read(&ended)?;
    let entry = report.only(2 * COUNT)?;
    let callers = entry.callers_of("leaf_malloc")?;
    let left_out = entry
        .symbols
        .iter()
        .position(|name| name == "without_frame_pointer");
    let by_rules = left_out.with_context(|| format!("not through the library: {entry:x?}"))?
        - (entry.symbols.len() - callers.len())
        + 1;
    ensure!(
        callers[..by_rules] == own[1..=by_rules] && is_part_of(callers, &own[1..]),
        "{entry:x?}\nis not of\n{own:x?}"
    );
    ensure!(
        entry.truncated && entry.truncated_because == "by frame pointers alone",
        "{entry:?}"
    );
    let unwinding = &report.unwinding;
    ensure!(
        unwinding["no_room"] == 1
            && unwinding["by_frame_pointers_alone"] == 2 * COUNT
            && unwinding["complete"] == 0,
        "{unwinding}"
    );
    let said = "no room for the tables of 1 files (raise --unwind-memory)";
    ensure!(ended.stderr.contains(said), "{}", ended.stderr);
    Ok(())
}

/// HotSpot's compiled functions have no frame pointers, unless it is told so: a caller is skipped.
fn hotspot_s_generated_code_ends_a_stack() -> Result<()> {
    let count = COUNT.to_string();
    let traced = |option: &[&str]| {
        let mut program = Workload::start("hotspot", &[&[count.as_str()][..], option].concat())?;
        let mut tool = Tool::start("memleak", &["-j", "-o", "0", "-p", &program.pid(), "60"])?;
        tool.wait_for(live("memleak"))?;
        program.work()?;
        tool.interrupt()
    };
    let ended = traced(&[])?;
    let report = Report::read(&ended)?;
    let entry = report.only(COUNT)?;
    ensure!(
        entry.addresses.len() == 1 && entry.truncated_because == "no unwind info: generated code",
        "{entry:x?}"
    );
    let unwinding = &report.unwinding;
    ensure!(
        unwinding["complete"] == 0 && unwinding["truncated_by_reason"]["no_unwind_info"] == COUNT,
        "{unwinding}"
    );
    let report = Report::read(&traced(&["-XX:+PreserveFramePointer"])?)?;
    let entry = report.only(COUNT)?;
    ensure!(entry.symbols.contains(&"main".to_owned()), "{entry:?}");
    complete(&report, COUNT)
}

fn generated_code_is_walked_by_frame_pointers() -> Result<()> {
    let mut program = Workload::start("jit", &[&COUNT.to_string(), "113"])?;
    let mut tool = Tool::start("memleak", &["-j", "-o", "0", "-p", &program.pid(), "60"])?;
    tool.wait_for(live("memleak"))?;
    program.work()?;
    let report = Report::read(&tool.interrupt()?)?;
    let entry = report.only(COUNT)?;
    ensure!(
        entry.symbols[..2] == ["compiled_by_hand", "main"]
            && entry.symbols.last() == Some(&"_start".to_owned()),
        "{entry:?}"
    );
    ensure!(
        report.unwinding["frame_pointer_steps"] == COUNT,
        "{}",
        report.unwinding
    );
    complete(&report, COUNT)
}

/// By the PLT that all processors have, and by .plt.sec, whose entries begin with endbr64, as do
/// the program's functions then.
fn calls_that_are_bound_lazily() -> Result<()> {
    for name in ["unwind-plt", "unwind-plt-sec"] {
        let program = Workload::start(name, &["malloc", &COUNT.to_string()])?;
        let (report, own) = trace_program(program, "memleak", &MALLOC)?;
        report.only(COUNT)?.expect("leaf_malloc", &own)?;
        complete(&report, COUNT).context(name)?;
    }
    Ok(())
}

/// The innermost 127 frames are right, and the root says that others are missing.
fn deep_recursion_is_cut() -> Result<()> {
    let mut program = Workload::start("unwind", &["deep", &COUNT.to_string()])?;
    let mut tool = Tool::start("brkstack", &["-j", "-p", &program.pid()])?;
    tool.wait_for(live("brkstack"))?;
    let own = own_stack(&program.work()?)?;
    let ended = tool.interrupt()?;
    ensure!(ended.stderr.contains("lost"), "{}", ended.stderr);
    let rows = ended.stdout.lines().filter(|line| line.starts_with('{'));
    let rows: Vec<Value> = rows.map(serde_json::from_str).collect::<Result<_, _>>()?;
    let stack = rows.iter().find(|row| row["type"] == "stack");
    let entry = Entry::read(stack.context("no stack")?)?;
    ensure!(own.len() > 300 && entry.count == COUNT, "{entry:?}");
    ensure!(entry.addresses.len() == 127, "{entry:?}");
    let leaf = entry.symbols.iter().position(|name| name == "leaf_brk");
    let below = &entry.addresses[leaf.context("no leaf")? + 1..];
    ensure!(
        below == &own[1..=below.len()],
        "{entry:x?}\nis not\n{own:x?}"
    );
    ensure!(
        entry.truncated && entry.truncated_because == "deeper than --perf-max-stack-depth",
        "{entry:?}"
    );
    let unwinding = rows.iter().find(|row| row["type"] == "unwinding");
    let unwinding = unwinding.context("nothing of unwinding")?;
    ensure!(
        unwinding["truncated_by_reason"]["depth"] == COUNT && unwinding["complete"] == 0,
        "{unwinding}"
    );
    Ok(())
}

fn tables_alone_are_enough() -> Result<()> {
    let (report, own) = trace("brkstack", &["--unwind", "dwarf"], "brk")?;
    report.only(COUNT)?.expect("leaf_brk", &own)?;
    complete(&report, COUNT)
}

/// Only the mappings are left of the program and its libraries.
fn a_root_of_its_own_whose_files_are_deleted() -> Result<()> {
    let outside = Workload::start("unwind", &["malloc", "1"])?;
    let maps = fs::read_to_string(format!("/proc/{}/maps", outside.pid()))?;
    let files = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5));
    let mut libraries: Vec<PathBuf> = files
        .filter(|path| path.contains(".so"))
        .map(PathBuf::from)
        .collect();
    libraries.push("/lib64/ld-linux-x86-64.so.2".into());
    libraries.dedup();

    let root = harness::scratch()?;
    let within = |path: &str| root.path().join(path.trim_start_matches('/'));
    for library in &libraries {
        harness::copy(library, &within(&library.to_string_lossy()))?;
    }
    harness::copy(&workload("unwind"), &within("opt/program"))?;
    let mut command = Command::new("/opt/program");
    command.args(["malloc", &COUNT.to_string()]);
    harness::in_root(&mut command, root.path());
    let program = Workload::spawn(&mut command)?;
    for folder in fs::read_dir(root.path())? {
        fs::remove_dir_all(folder?.path())?;
    }
    let (report, own) = trace_program(program, "memleak", &MALLOC)?;
    report.only(COUNT)?.expect("leaf_malloc", &own)?;
    complete(&report, COUNT)
}

/// musl's own functions have no unwind information. All of the program's are there; at the one of
/// musl's that calls main, the stack says that it is cut and why.
fn a_static_program_of_another_libc() -> Result<()> {
    let mut program = Workload::start(
        "alloc-musl-static",
        &["one", "malloc", &COUNT.to_string(), "113"],
    )?;
    let mut tool = Tool::start(
        "memleak",
        &[&["-j", "-p", &program.pid()], &MALLOC[..]].concat(),
    )?;
    tool.wait_for(live("memleak"))?;
    program.work()?;
    let report = Report::read(&tool.interrupt()?)?;
    let entry = report.only(COUNT)?;
    ensure!(
        entry.symbols[..3] == ["leak_malloc", "leak", "main"] && entry.symbols.len() == 4,
        "{entry:?}"
    );
    ensure!(
        entry.truncated && entry.truncated_because == "no unwind info: alloc-musl-static",
        "{entry:?}"
    );
    let unwinding = &report.unwinding;
    ensure!(
        unwinding["truncated_by_reason"]["no_unwind_info"] == COUNT,
        "{unwinding}"
    );
    Ok(())
}
