//! Stacks are complete in every process, from its first instruction on.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use tempfile::TempDir;

use super::{COUNT, Entry, MALLOC, Report, complete, live, own_stack, trace_program};
use crate::harness::{self, Tool, Workload, workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "unwind":
        a_library_that_is_loaded_later,
        children_and_what_they_execute,
        processes_that_end_at_once,
        a_process_that_is_met_later,
        a_command_from_its_start,
        a_root_of_its_own_whose_files_are_deleted,
        a_static_program_of_another_libc,
    }
}

/// The first call comes as soon as the library is loaded, before its unwind tables are built. The stack of this
/// call is cut, or walked by frame pointers, and says so. The stacks of later calls are complete.
fn a_library_that_is_loaded_later() -> Result<()> {
    let mut program = Workload::start("unwind", &["plugin", &COUNT.to_string()])?;
    let pid = program.pid();
    let mut tool = Tool::start("memleak", &[&["-jv", "-p", &pid], &MALLOC[..]].concat())?;
    tool.wait_for_stderr(live("memleak"))?;
    program.work()?;
    tool.wait_for_stderr(&format!("unwind tables for process {pid}: 5 files"))?;
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

/// Starts a workload that the tool does not know before, and waits until brkstack has its unwind tables. brkstack
/// meets the workload when its dynamic linker calls brk(2). The program is in the returned directory.
fn meet(name: &str, mode: &str) -> Result<(Tool, Workload, TempDir)> {
    let folder = harness::scratch()?;
    let path = folder.path().join(name);
    harness::copy(&workload("unwind"), &path)?;
    let mut tool = Tool::start("brkstack", &["-jv", "-n", name])?;
    tool.wait_for_stderr(live("brkstack"))?;
    let program = Workload::spawn(Command::new(path).args([mode, &COUNT.to_string()]))?;
    tool.wait_for_stderr(&format!(
        "unwind tables for process {}: 4 files",
        program.pid()
    ))?;
    Ok((tool, program, folder))
}

/// The tables of a file are used at once for a forked child, and for the program that the child executes.
fn children_and_what_they_execute() -> Result<()> {
    let (tool, mut program, _folder) = meet("unwind-child", "fork")?;
    program.go()?;
    program.wait_ready()?;
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

/// Processes call brk(2) while they start, each at least once, and end before the tool could look at them. Only the
/// first one is met before there are tables.
fn processes_that_end_at_once() -> Result<()> {
    const RUNS: u64 = 101;
    /// Calls of the first process, of which at most four are its dynamic linker's.
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
        complete >= RUNS && stacks - complete <= OF_THE_FIRST,
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
    let ended = Tool::spawn(&mut tool)?.wait()?;
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

/// The files of the program and its libraries are deleted. Only their mappings are left.
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
    libraries.push(harness::arch::LOADER.into());
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

/// musl's own functions have no unwind information. The stack has all of the program's functions. At musl's
/// function that calls main, the stack says that it is cut and why.
fn a_static_program_of_another_libc() -> Result<()> {
    let mut program = Workload::start(
        "alloc-musl-static",
        &["one", "malloc", &COUNT.to_string(), "113"],
    )?;
    let mut tool = Tool::start(
        "memleak",
        &[&["-j", "-p", &program.pid()], &MALLOC[..]].concat(),
    )?;
    tool.wait_for_stderr(live("memleak"))?;
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
