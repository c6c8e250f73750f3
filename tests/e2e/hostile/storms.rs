//! More processes, mappings and threads than a tool has time or memory for.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use super::{CALLS, counted, library, text};
use crate::harness::{self, Tool, ToolOutput, Workload, workload};
use crate::{brkstack, memleak};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "hostile":
        more_libraries_than_descriptors_have_names [Once],
        more_processes_than_tables_are_complete [Once],
        mappings_that_change_leave_others_complete [Once],
        storms_of_programs_are_counted [Once],
        a_storm_of_threads_is_exact [Once],
        storms_of_mappings_are_exact [Once],
    }
}

/// Time by which the unwind tables of files that were met once are built.
const TABLES: Duration = Duration::from_secs(2);

/// Number of brk(2) calls that the dynamic loader makes in two starts of a program.
const STARTS: u64 = 2;

/// A process maps eight times as many libraries as a tool may have files open. The functions of its program, and
/// of libraries that were mapped before, have their names.
fn more_libraries_than_descriptors_have_names() -> Result<()> {
    const DESCRIPTORS: usize = 256;
    const FILES: usize = 8 * DESCRIPTORS;
    let folder = harness::scratch()?;
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
    let library = fs::read(workload("unwind-plugin.so"))?;
    for number in 0..FILES {
        fs::write(folder.path().join(number.to_string()), &library)?;
    }
    for (tool, live, function) in [
        ("brkstack", brkstack::READY, "call_brk"),
        ("memleak", memleak::READY, "leak_malloc"),
    ] {
        let files = FILES.to_string();
        let args = ["files", &files, CALLS, text(folder.path())];
        let mut crowd = Workload::start("hostile-crowd", &args)?;
        let mut leaks = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
        let pids = [crowd.pid(), leaks.pid()].join(",");
        let limited = format!(r#"ulimit -n {DESCRIPTORS}; exec "$0" "$@""#);
        let mut command = Command::new("sh");
        command.args(["-c", &limited]).arg(harness::tool(tool));
        command.args(["-p", &pids]);
        if tool == "memleak" {
            command.args(["-o", "0", "60"]);
        }
        let mut running = Tool::spawn(&mut command)?;
        running.wait_for_stderr(live)?;
        let facts = crowd.work()?;
        leaks.work()?;
        let ended = running.interrupt()?;
        ensure!(ended.status.success(), "{ended:?}");
        ensure!(!ended.stderr.contains("no names"), "{}", ended.stderr);
        ensure!(ended.stdout.contains(function), "{ended:?}");
        if tool == "brkstack" {
            let line = format!("main;call_brk;syscall {}\n", facts["brk"]);
            ensure!(ended.stdout.contains(&line), "{line}: {}", ended.stdout);
        }
    }
    Ok(())
}

/// Returns the numbers of walked stacks and of complete stacks, from brkstack's last object.
fn walked(ended: &ToolOutput) -> Result<(u64, u64)> {
    let objects = ended.objects()?;
    let last = objects.iter().find(|object| object["type"] == "unwinding");
    let last = last.context("nothing was walked")?;
    let number = |name: &str| last[name].as_u64().context("no number");
    Ok((number("stacks")?, number("complete")?))
}

/// Returns the number of calls that were lost because a map was full, as brkstack reports at its end.
fn lost_entries(objects: &[Value]) -> u64 {
    let lost = objects.iter().find(|object| object["type"] == "lost");
    let lost = lost.and_then(|object| object["lost"]["entries"].as_u64());
    lost.unwrap_or(0)
}

fn more_processes_than_tables_are_complete() -> Result<()> {
    const PROCESSES: u64 = 4501;
    const CALLS: u64 = 3;
    let folder = harness::scratch()?;
    let program = folder.path().join("hostile-many");
    harness::copy(&workload("hostile-crowd"), &program)?;
    let mut tool = Tool::start("brkstack", &["-j", "-n", "hostile-many"])?;
    tool.wait_for_stderr(brkstack::READY)?;
    for processes in [1, PROCESSES] {
        let args = ["processes", &processes.to_string(), &CALLS.to_string()];
        let mut crowd = Workload::spawn(Command::new(&program).args(args))?;
        crowd.work()?;
        // While the first process lives, the tool builds the tables of its files.
        thread::sleep(TABLES);
    }
    let ended = tool.interrupt()?;
    let calls = (1 + PROCESSES) * CALLS + STARTS;
    // So many keys at once may exceed a map's capacity.
    let objects = ended.objects()?;
    let lost = lost_entries(&objects);
    let found = counted(&ended, "hostile-many")?;
    ensure!(
        found + lost == calls,
        "{found} and {lost}: {}",
        ended.stderr
    );
    let (stacks, complete) = walked(&ended)?;
    ensure!(
        stacks == calls && stacks - complete <= CALLS + STARTS,
        "{complete} of {stacks}: {}",
        ended.stderr
    );
    Ok(())
}

fn mappings_that_change_leave_others_complete() -> Result<()> {
    const FIRST: u64 = 101;
    const SECOND: u64 = 50021;
    let crowds = [(); 3].map(|()| Workload::start("hostile-crowd", &["mappings", "8009", "1"]));
    let (_folder, file) = library()?;
    let folder = harness::scratch()?;
    let program = folder.path().join("hostile-victim");
    harness::copy(&workload("hostile-mapped"), &program)?;
    let mut tool = Tool::start("brkstack", &["-j", "-n", "hostile-"])?;
    tool.wait_for_stderr(brkstack::READY)?;
    for calls in [FIRST, SECOND] {
        let args = ["none", text(&file), &calls.to_string()];
        let mut victim = Workload::spawn(Command::new(&program).args(args))?;
        victim.work()?;
        // While the first process lives, the tool builds the tables of its files.
        thread::sleep(TABLES);
    }
    let ended = tool.interrupt()?;
    for crowd in crowds {
        crowd?.work()?;
    }
    ensure!(counted(&ended, "hostile-victim")? == FIRST + SECOND + STARTS);
    let objects = ended.objects()?;
    let cut = objects
        .iter()
        .filter(|object| object["comm"] == "hostile-victim" && !object["truncated"].is_null());
    let cut: u64 = cut.filter_map(|stack| stack["count"].as_u64()).sum();
    ensure!(
        cut <= FIRST + STARTS,
        "{cut} stacks of the victim are cut: {}",
        ended.stderr
    );
    Ok(())
}

/// Thousands of programs run one after the other: as children, and by exec in one process.
fn storms_of_programs_are_counted() -> Result<()> {
    const PROGRAMS: u64 = 5003;
    const CALLS: u64 = 3;
    for kind in ["programs", "itself"] {
        let folder = harness::scratch()?;
        let program = folder.path().join("hostile-storm");
        harness::copy(&workload("hostile-crowd"), &program)?;
        let args = [kind, &PROGRAMS.to_string(), &CALLS.to_string()];
        let mut storm = Workload::spawn(Command::new(&program).args(args))?;
        let args = ["-j", "--children", "-p", &storm.pid()];
        let mut tool = Tool::start("brkstack", &args)?;
        tool.wait_for_stderr(brkstack::READY)?;
        let before = tool.peak_kib()?;
        let facts = storm.work()?;
        ensure!(facts["brk"] == (PROGRAMS * CALLS).to_string(), "{facts:?}");
        let grown = tool.peak_kib()? - before;
        let ended = tool.interrupt()?;
        // The loader of each program makes one call.
        let calls = PROGRAMS * (CALLS + 1);
        let objects = ended.objects()?;
        let lost = lost_entries(&objects);
        let stacks = objects.iter().filter(|object| object["type"] == "stack");
        let found: u64 = stacks.filter_map(|stack| stack["count"].as_u64()).sum();
        ensure!(
            found + lost == calls,
            "{kind}: {found} and {lost} of {calls}: {}",
            ended.stderr
        );
        ensure!(grown < 16 << 10, "{kind}: by {grown} KiB");
    }
    Ok(())
}

fn a_storm_of_threads_is_exact() -> Result<()> {
    let mut storm = Workload::start("hostile-crowd", &["threads", "5003", "31"])?;
    let tool = memleak::attach(&storm, &["-o", "0", "60"])?;
    let facts = storm.work()?;
    ensure!(facts["kept"] == "5003", "{facts:?}");
    let ended = tool.interrupt()?;
    ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
    let found = memleak::outstanding(&memleak::last_report(&ended.stdout)?, "keep_block");
    ensure!(found == (5003 * 24, 5003), "{found:?}: {ended:?}");
    Ok(())
}

/// Code is mapped thousands of times in one process, and in most cases unmapped at once. Both tools see all of it.
fn storms_of_mappings_are_exact() -> Result<()> {
    const CALLS: u64 = 3;
    for (kind, rounds) in [
        // Each round leaves a mapping: about half of the mappings that a process may have.
        ("pages", 30_011),
        ("unmapped", 100_003),
        ("written", 10_007),
        ("loaded", 10_007),
    ] {
        let (folder, library) = library()?;
        harness::copy(&workload("unwind-plugin.so"), &library)?;
        let rounds: u64 = rounds;
        let args = [kind, &rounds.to_string(), &CALLS.to_string()];
        let args = [&args[..], &[text(folder.path())]].concat();
        let mut storm = Workload::start("hostile-crowd", &args)?;
        let mut calls = Tool::start("brkstack", &["-j", "-p", &storm.pid()])?;
        calls.wait_for_stderr(brkstack::READY)?;
        let blocks = memleak::attach(&storm, &["-o", "0", "-T", "1000", "60"])?;
        let before = [calls.peak_kib()?, blocks.peak_kib()?];
        let facts = storm.work()?;
        ensure!(facts["kept"] == rounds.to_string(), "{facts:?}");
        let grown = [
            calls.peak_kib()? - before[0],
            blocks.peak_kib()? - before[1],
        ];
        let [calls, blocks] = [calls.interrupt()?, blocks.interrupt()?];

        let objects = calls.objects()?;
        let stacks = objects.iter().filter(|object| object["type"] == "stack");
        let own = stacks.filter(|stack| stack["user_frames"].to_string().contains("call_brk"));
        let found: u64 = own.filter_map(|stack| stack["count"].as_u64()).sum();
        ensure!(found == rounds * CALLS, "{kind}: {found}: {calls:?}");
        let (walked, complete) = walked(&calls)?;
        ensure!(walked == complete, "{kind}: {complete} of {walked}");
        // For a process with more mappings than are remembered, the names of its first mappings are kept.
        let forgets = calls
            .stderr
            .contains("mappings of processes with thousands");
        ensure!(forgets == (kind == "pages"), "{kind}: {}", calls.stderr);

        ensure!(!blocks.stderr.contains("lost"), "{kind}: {blocks:?}");
        let groups = memleak::last_report(&blocks.stdout)?;
        let found = memleak::outstanding(&groups, "keep_block");
        ensure!(
            found == (rounds * 24, rounds),
            "{kind}: {found:?}: {blocks:?}"
        );
        ensure!(
            grown.iter().all(|&kib| kib < 24 << 10),
            "{kind}: by {grown:?} KiB"
        );
    }
    Ok(())
}
