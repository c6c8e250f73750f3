//! Stacks through code without frame pointers, in all ways in which tools record user stacks, against the
//! program's own unwinder.

mod go;
mod hooks;
mod moved;
mod processes;

use std::collections::{BTreeMap, HashMap};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use crate::harness::{self, Tool, ToolOutput, Workload, workload};
use crate::memleak;

pub(crate) fn tests() -> Vec<Trial> {
    let own = harness::tests! { "unwind":
        the_handler_of_a_signal,
        c_that_is_called_from_go,
        threads_have_one_stack,
        a_fiber_ends_where_it_began,
        every_instruction,
        a_frame_that_takes_its_pages_one_by_one,
        frame_pointers_alone_do_not_get_far,
        frame_pointers_alone_invent_nothing,
        no_room_for_a_table,
        a_caller_in_no_code_is_not_shown,
        generated_code_is_walked_by_frame_pointers,
        hotspot_s_generated_code_ends_a_stack,
        calls_that_are_bound_lazily,
        deep_recursion_is_cut,
        tables_alone_are_enough,
    };
    [
        own,
        go::tests(),
        hooks::tests(),
        moved::tests(),
        processes::tests(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Go's runtime calls C on another stack.
fn c_that_is_called_from_go() -> Result<()> {
    let groups = memleak::trace_all("cgo", &["31", "4093"])?;
    let leaked = memleak::outstanding(&groups, "handle_in_go");
    ensure!(leaked == (31 * 4093, 31), "{leaked:?} in {groups:#?}");
    Ok(())
}

/// Number of calls: a prime, so that no other number of calls equals it by accident.
const COUNT: u64 = 23;
const THREADS: u64 = 16;

/// Report of a tool in JSON.
struct Report {
    stacks: Vec<Entry>,
    unwinding: Value,
}

/// Stack of a report, innermost frame first.
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
    fn read(ended: &ToolOutput) -> Result<Self> {
        ensure!(ended.status.success(), "{ended:?}");
        ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
        let mut report = Self {
            stacks: Vec::new(),
            unwinding: Value::Null,
        };
        for row in ended.objects_among_lines()? {
            match row["type"].as_str() {
                Some("stack" | "reclaim" | "kill") => report.stacks.push(Entry::read(&row)?),
                Some("unwinding") => report.unwinding = row,
                _ => {}
            }
        }
        Ok(report)
    }

    /// Returns the only stack of the report, which must have this count.
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
            // An event has no count.
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

    /// Checks that the callers of the frame `leaf` are those of the program's own unwinder, down to the outermost one.
    fn expect(&self, leaf: &str, own: &[u64]) -> Result<()> {
        ensure!(
            self.callers_of(leaf)? == &own[1..] && !self.truncated,
            "{self:x?}\nis not\n{own:x?}"
        );
        Ok(())
    }

    /// Returns the addresses of all callers of `leaf`, innermost first.
    fn callers_of(&self, leaf: &str) -> Result<&[u64]> {
        let at = self.symbols.iter().position(|symbol| symbol == leaf);
        let at = at.with_context(|| format!("not through {leaf}: {self:?}"))?;
        Ok(&self.addresses[at + 1..])
    }
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()
}

/// Returns the fact `stack`. The first address is that of the innermost frame, at another place of the same function.
fn own_stack(facts: &HashMap<String, String>) -> Result<Vec<u64>> {
    let stack = parse_stack(facts.get("stack").context("no stack")?);
    ensure!(stack.len() > 2, "{stack:x?}");
    Ok(stack)
}

fn parse_stack(text: &str) -> Vec<u64> {
    let mut stack: Vec<u64> = text.split(',').filter_map(hex).collect();
    // Zeros follow the outermost frame.
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

/// Traces all of a workload's work. Returns the tool's report, and the program's own stack.
fn trace(tool: &str, args: &[&str], mode: &str) -> Result<(Report, Vec<u64>)> {
    let program = Workload::start("unwind", &[mode, &COUNT.to_string()])?;
    trace_program(program, tool, args)
}

fn trace_program(mut program: Workload, tool: &str, args: &[&str]) -> Result<(Report, Vec<u64>)> {
    let pid = program.pid();
    let live = live(tool);
    let mut tool = Tool::start(tool, &[&["-j", "-p", &pid], args].concat())?;
    tool.wait_for_stderr(live)?;
    let facts = program.work()?;
    let report = Report::read(&tool.interrupt()?)?;
    Ok((report, own_stack(&facts)?))
}

/// memleak's arguments for leaf_malloc's blocks.
const MALLOC: [&str; 7] = ["-o", "0", "-z", "113", "-Z", "113", "60"];

/// Returns memleak's report of leaf_malloc's blocks, of any age, and the program's own stack.
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

/// A function takes a frame of 600 KB: first its caller is known by another register than the stack pointer, and then
/// by an offset that takes more than 16 bits.
fn a_frame_that_takes_its_pages_one_by_one() -> Result<()> {
    const PAGES: u64 = 3;
    let mut program = Workload::start("frames", &[&COUNT.to_string()])?;
    let mut tool = Tool::start("faults", &["-j", "-p", &program.pid()])?;
    tool.wait_for_stderr(live("faults"))?;
    let faults: u64 = program.work()?.get("minor").context("no count")?.parse()?;
    let report = Report::read(&tool.interrupt()?)?;
    let through_frame = |entry: &&Entry| entry.callers_of("with_huge_frame").is_ok();
    let (frame, others): (Vec<_>, Vec<_>) = report.stacks.iter().partition(through_frame);
    for entry in &frame {
        let at = entry
            .symbols
            .iter()
            .position(|name| name == "with_huge_frame");
        let callers = &entry.symbols[at.context("no frame")? + 1..];
        let expected = callers.first().is_some_and(|name| name == "run")
            && callers.last().is_some_and(|name| name == "_start");
        ensure!(expected && !entry.truncated, "{entry:?}");
    }
    let sum = |entries: &[&Entry]| entries.iter().map(|entry| entry.count).sum::<u64>();
    ensure!(
        sum(&frame) == faults,
        "{faults} faults: {frame:?} {others:?}"
    );
    let in_callee = frame
        .iter()
        .filter(|entry| entry.symbols[0] != "with_huge_frame");
    let in_callee: Vec<&Entry> = in_callee.copied().collect();
    ensure!(sum(&in_callee) == COUNT * PAGES, "{in_callee:?}");
    Ok(())
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

/// A stack that is recorded for one thread is not mixed with another's, whichever thread preempts it.
fn threads_have_one_stack() -> Result<()> {
    let (report, own) = trace_malloc("threads")?;
    report.only(THREADS * COUNT)?.expect("leaf_malloc", &own)?;
    complete(&report, THREADS * COUNT)
}

/// A fiber's first function returns to code that has no call before it, and no unwind rules.
fn a_fiber_ends_where_it_began() -> Result<()> {
    let (report, own) = trace_malloc("fiber")?;
    report.only(COUNT)?.expect("leaf_malloc", &own)?;
    complete(&report, COUNT)
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

/// A caller that unwind information leads to is not shown if no code is there.
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

/// A signal comes after each instruction, and its handler calls brk(2): before and after each push, pop and
/// change of the stack pointer, in the PLT, in libc and in the program.
fn every_instruction() -> Result<()> {
    for name in ["unwind-plt", "unwind-plt-sec"] {
        let mut program = Workload::start(name, &["step", "1"])?;
        let mut tool = Tool::start("brkstack", &["-j", "-p", &program.pid()])?;
        tool.wait_for_stderr(live("brkstack"))?;
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

/// Frame pointers skip frames, but each frame that they lead to is a real one, in the right order.
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
        // From a frame in libc, the next caller with a frame pointer can be beyond the leaf.
        let at = entry.symbols.iter().position(|symbol| symbol == leaf);
        let shown = &entry.addresses[at.unwrap_or(0) + 1..];
        ensure!(
            is_part_of(shown, &own[1..]),
            "{entry:x?}\nis not of\n{own:x?}"
        );
    }
    // The function's frame pointer leads to an address without code.
    let (report, _) = trace("brkstack", &["--unwind", "fp"], "liar")?;
    let entry = report.only(COUNT)?;
    ensure!(entry.symbols == ["syscall"], "{entry:x?}");
    Ok(())
}

/// Whether `frames` are some of `all`, in the same order.
fn is_part_of(frames: &[u64], all: &[u64]) -> bool {
    let mut all = all.iter();
    frames.iter().all(|frame| all.any(|other| other == frame))
}

/// The unwind table of a library needs more memory than is permitted. The library has its caller's frame pointer,
/// so the stack beyond it may lack frames, and says so.
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
    tool.wait_for_stderr(live("memleak"))?;
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
    let said = "the tables of 1 file (unwind-plugin.so) did not fit (raise --unwind-memory)";
    ensure!(ended.stderr.contains(said), "{}", ended.stderr);
    Ok(())
}

/// HotSpot's compiled functions have no frame pointers without an option for that: a caller is skipped.
fn hotspot_s_generated_code_ends_a_stack() -> Result<()> {
    let count = COUNT.to_string();
    let traced = |option: &[&str]| {
        let mut program = Workload::start("hotspot", &[&[count.as_str()][..], option].concat())?;
        let mut tool = Tool::start("memleak", &["-j", "-o", "0", "-p", &program.pid(), "60"])?;
        tool.wait_for_stderr(live("memleak"))?;
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
    let said = "runs a HotSpot without HeapBlock: its stacks end";
    ensure!(ended.stderr.matches(said).count() == 1, "{ended:?}");
    let report = Report::read(&traced(&["-XX:+PreserveFramePointer"])?)?;
    let entry = report.only(COUNT)?;
    ensure!(entry.symbols.contains(&"main".to_owned()), "{entry:?}");
    complete(&report, COUNT)
}

fn generated_code_is_walked_by_frame_pointers() -> Result<()> {
    let mut program = Workload::start("jit", &[&COUNT.to_string(), "113"])?;
    let mut tool = Tool::start("memleak", &["-j", "-o", "0", "-p", &program.pid(), "60"])?;
    tool.wait_for_stderr(live("memleak"))?;
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

/// Calls go through the PLT that all processors have, and through .plt.sec, whose entries begin with endbr64, as
/// do the functions of that program.
fn calls_that_are_bound_lazily() -> Result<()> {
    for name in ["unwind-plt", "unwind-plt-sec"] {
        let program = Workload::start(name, &["malloc", &COUNT.to_string()])?;
        let (report, own) = trace_program(program, "memleak", &MALLOC)?;
        report.only(COUNT)?.expect("leaf_malloc", &own)?;
        complete(&report, COUNT).context(name)?;
    }
    Ok(())
}

/// The innermost 255 frames are right, and the root says that further frames are missing.
fn deep_recursion_is_cut() -> Result<()> {
    let mut program = Workload::start("unwind", &["deep", &COUNT.to_string()])?;
    let mut tool = Tool::start("brkstack", &["-j", "-p", &program.pid()])?;
    tool.wait_for_stderr(live("brkstack"))?;
    let own = own_stack(&program.work()?)?;
    let ended = tool.interrupt()?;
    ensure!(ended.stderr.contains("lost"), "{}", ended.stderr);
    let rows = ended.objects_among_lines()?;
    let stack = rows.iter().find(|row| row["type"] == "stack");
    let entry = Entry::read(stack.context("no stack")?)?;
    ensure!(own.len() > 300 && entry.count == COUNT, "{entry:?}");
    ensure!(entry.addresses.len() == 255, "{entry:?}");
    let leaf = entry.symbols.iter().position(|name| name == "leaf_brk");
    let below = &entry.addresses[leaf.context("no leaf")? + 1..];
    ensure!(
        below == &own[1..=below.len()],
        "{entry:x?}\nis not\n{own:x?}"
    );
    ensure!(
        entry.truncated && entry.truncated_because == "deeper than the frame limit",
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
