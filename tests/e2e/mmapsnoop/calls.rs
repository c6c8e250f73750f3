//! Each call has its arguments and its result, and no call is missing.

use std::fs;
use std::process::Command;

use anyhow::{Result, ensure};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::{end, file, json_rows, start, trace};
use crate::harness::{self, Tool, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "mmapsnoop":
        every_argument_and_result,
        unmapping_and_moving,
        only_failures,
        calls_of_32_bit_programs [Compat],
        threads_at_once_are_all_shown,
        a_burst_is_complete,
        a_burst_with_stacks_loses_nothing [Once],
        what_a_stopped_tool_loses_is_counted,
        a_row_comes_at_once,
    }
}

/// Returns the workload's kinds of mappings, each with its protection and flags.
fn kinds_of_mappings() -> [(&'static str, Value, Value); 13] {
    let read_write = json!(["READ", "WRITE"]);
    let read = json!(["READ"]);
    let private = |more: &[&str]| json!([&["PRIVATE"], more].concat());
    let anonymous = |more: &[&str]| json!([&["PRIVATE", "ANONYMOUS"], more].concat());
    [
        ("anon", read_write.clone(), anonymous(&[])),
        ("shared", read_write.clone(), json!(["SHARED", "ANONYMOUS"])),
        ("populate", read_write.clone(), anonymous(&["POPULATE"])),
        ("exec", json!(["READ", "EXEC"]), anonymous(&[])),
        (
            "stack",
            read_write.clone(),
            anonymous(&["GROWSDOWN", "NORESERVE", "STACK"]),
        ),
        (
            "hugetlb",
            read_write.clone(),
            json!(["PRIVATE", "HUGETLB", "ANONYMOUS"]),
        ),
        (
            "huge2mb",
            read_write.clone(),
            json!(["PRIVATE", "HUGETLB:2MB", "ANONYMOUS"]),
        ),
        (
            "locked",
            read_write.clone(),
            anonymous(harness::arch::LOCKED),
        ),
        ("validate", read.clone(), json!(["SHARED_VALIDATE"])),
        (
            "fixed",
            read_write.clone(),
            json!(["PRIVATE", "FIXED", "ANONYMOUS"]),
        ),
        (
            "noreplace",
            read_write.clone(),
            anonymous(&["FIXED_NOREPLACE"]),
        ),
        ("file", read.clone(), private(&[])),
        ("sharedfile", read_write.clone(), json!(["SHARED"])),
    ]
}

fn every_argument_and_result() -> Result<()> {
    for (kind, prot, flags) in kinds_of_mappings() {
        let path = file().with_extension(kind);
        let name = path.to_string_lossy().into_owned();
        let with_file = kind.contains("file") || kind == "validate";
        let program = if with_file {
            vec![kind, "101", &name]
        } else {
            vec![kind, "101"]
        };
        let (pid, calls, ended) = trace(&program, &["-j"])?;
        let rows = json_rows(&ended)?;
        ensure!(
            calls.len() == 101 && rows.len() == 101,
            "{kind}: {}: {ended:?}",
            rows.len()
        );
        for (row, call) in rows.iter().zip(&calls) {
            let mut expected = json!({
                "type": "call",
                "time": row["time"],
                "pid": pid.parse::<u32>()?,
                "tid": pid.parse::<u32>()?,
                "comm": "mmap",
                // The cgroup and the container are those of the tests; tests/e2e/containers.rs compares them.
                "cgroup": row["cgroup"],
                "container_id": row["container_id"],
                "call": "mmap",
                "address": format!("{:#x}", call.args[0]),
                "size_bytes": call.args[1],
                "prot": prot,
                "flags": flags,
                "offset_bytes": call.args[5],
                "file": null,
                "result": call.result,
                "error": call.error,
                "tool": "mmapsnoop",
                "host": row["host"],
                "boot_id": row["boot_id"],
                "schema": 1,
            });
            if with_file {
                expected["fd"] = call.args[4].into();
                expected["file"] = path.file_name().and_then(|name| name.to_str()).into();
            }
            ensure!(*row == expected, "{kind}:\n{row}\nis not\n{expected}");
        }
        let times: Vec<&str> = rows.iter().filter_map(|row| row["time"].as_str()).collect();
        ensure!(times.len() == 101 && times.is_sorted(), "{times:?}");
        ensure!(ended.stderr.lines().count() == 1, "{}", ended.stderr);
    }
    Ok(())
}

fn unmapping_and_moving() -> Result<()> {
    for kind in ["munmap", "mremap"] {
        let (_, calls, ended) = trace(&[kind, "101"], &["-j", "--munmap"])?;
        let rows = json_rows(&ended)?;
        ensure!(calls.len() == 101 && rows.len() == 101, "{ended:?}");
        for (row, call) in rows.iter().zip(&calls) {
            ensure!(row["call"] == kind, "{row}");
            ensure!(
                row["address"] == format!("{:#x}", call.args[0]),
                "{row} {call:?}"
            );
            ensure!(
                row["result"] == call.result && row["error"] == call.error,
                "{row} {call:?}"
            );
            if kind == "mremap" {
                ensure!(row["old_size_bytes"] == call.args[1], "{row} {call:?}");
                ensure!(row["size_bytes"] == call.args[2], "{row} {call:?}");
                ensure!(row["flags"] == json!(["MAYMOVE"]), "{row}");
            } else {
                ensure!(row["size_bytes"] == call.args[1], "{row} {call:?}");
            }
        }
        // Without --munmap, such calls are not shown.
        let (_, _, ended) = trace(&[kind, "101"], &["-j"])?;
        ensure!(ended.stdout.is_empty(), "{ended:?}");
    }
    Ok(())
}

fn only_failures() -> Result<()> {
    let path = file();
    let (_, calls, ended) = trace(&["fail", "101", &path.to_string_lossy()], &["-x", "-j"])?;
    let rows = json_rows(&ended)?;
    ensure!(calls.len() == 101 && rows.len() == 101, "{ended:?}");
    for (row, call) in rows.iter().zip(&calls) {
        ensure!(
            row["error"] == call.error && !row["error"].is_null(),
            "{row} {call:?}"
        );
        // The row names the descriptor's file, except where the descriptor is the error.
        let known = row["error"] == "EBADF" || row["fd"].is_null();
        ensure!(row["file"].is_null() == known, "{row} {call:?}");
    }
    let (_, _, ended) = trace(&["anon", "101"], &["-x", "-j"])?;
    ensure!(ended.stdout.is_empty(), "{ended:?}");
    let (_, _, ended) = trace(&["noreplace", "3"], &["-x"])?;
    let results = ended
        .stdout
        .lines()
        .filter(|line| line.contains(" EEXIST "));
    ensure!(results.count() == 3, "{ended:?}");
    Ok(())
}

/// i386's calls have no tracepoints of their own.
fn calls_of_32_bit_programs() -> Result<()> {
    let trace = |args: &[&str]| -> Result<(Vec<Value>, Vec<String>)> {
        let mut workload = Workload::start("compat32", &[])?;
        let tool = start(&[&["-j", "-p", &workload.pid()], args].concat())?;
        let facts = workload.work()?;
        let rows = json_rows(&end(tool)?)?;
        Ok((rows, facts["calls"].split(',').map(str::to_owned).collect()))
    };
    let (rows, _) = trace(&[])?;
    ensure!(rows.is_empty(), "{rows:?}");
    let (rows, results) = trace(&["--compat"])?;
    ensure!(results.len() == 27 && rows.len() == 25, "{rows:?}");
    let (rows, results) = trace(&["--compat", "--munmap"])?;
    ensure!(rows.len() == 27, "{rows:?}");
    let (first, second) = (results[0].clone(), results[1].clone());
    for (number, (row, result)) in rows.iter().zip(results).enumerate() {
        let expected = match number {
            0..=22 => json!({
                "call": "mmap", "address": "0x0", "size_bytes": (number + 1) * 4096,
                "prot": ["READ", "WRITE"], "flags": ["PRIVATE", "ANONYMOUS"],
                "offset_bytes": 0, "file": null,
            }),
            // The first call is mmap2, which counts the offset in pages, the second is the old mmap.
            23 | 24 => json!({
                "call": "mmap", "address": "0x0", "size_bytes": 4096, "prot": ["READ"],
                "flags": ["PRIVATE"], "offset_bytes": (24 - number) * 4096, "file": "compat32",
            }),
            25 => json!({
                "call": "mremap", "address": first, "old_size_bytes": 4096, "size_bytes": 20480,
                "flags": ["MAYMOVE"],
            }),
            _ => json!({ "call": "munmap", "address": second, "size_bytes": 8192 }),
        };
        ensure!(
            row["result"] == result && row["comm"] == "compat32",
            "{row}"
        );
        for (field, value) in expected.as_object().into_iter().flatten() {
            ensure!(
                row[field] == *value,
                "{number}: {field} of {row}, not {value}"
            );
        }
    }
    Ok(())
}

const BURST: u64 = 200_003;

/// Eight threads on two CPUs preempt one another in our BPF programs, where the kernel permits that.
fn threads_at_once_are_all_shown() -> Result<()> {
    let mut workload = Workload::start("contend", &["8", "1009", "mmap"])?;
    let mut tool = Tool::start("mmapsnoop", &["-j", "-p", &workload.pid()])?;
    tool.wait_for_stderr("tracing mmap(2)")?;
    let facts = workload.work()?;
    let ended = tool.interrupt()?;
    let rows = ended.stdout.lines().count();
    ensure!(facts["operations"] == "8072", "{facts:?}");
    ensure!(
        rows == 8072 && !ended.stderr.contains("lost"),
        "{rows} rows, {}",
        ended.stderr
    );
    Ok(())
}

fn a_burst_is_complete() -> Result<()> {
    let calls = if harness::in_guest() { 20_011 } else { BURST };
    let mut workload = Workload::start("burst", &[&calls.to_string()])?;
    let tool = start(&["--munmap", "-p", &workload.pid()])?;
    workload.work()?;
    let ended = end(tool)?;
    let rows = |call: &str| {
        ended
            .stdout
            .lines()
            .filter(|line| line.contains(&format!(" burst          {call} ")))
            .count() as u64
    };
    let lost = lost(&ended.stderr)?;
    ensure!(
        rows("mmap  ") + rows("munmap") + lost == 2 * calls,
        "{lost} lost; {}",
        ended.stderr
    );
    ensure!(
        lost == 0 || ended.stderr.contains("ring buffer full"),
        "{}",
        ended.stderr
    );
    Ok(())
}

/// Printing a stack takes longer than its call, so more events of a burst wait than the ring buffer can hold.
fn a_burst_with_stacks_loses_nothing() -> Result<()> {
    const CALLS: usize = 60_013;
    let mut workload = Workload::start("burst", &[&CALLS.to_string()])?;
    let tool = start(&["--stack", "--json", "--munmap", "-p", &workload.pid()])?;
    workload.work()?;
    let ended = end(tool)?;
    let rows = ended.stdout.matches(r#""comm":"burst""#).count();
    ensure!(
        rows == 2 * CALLS && lost(&ended.stderr)? == 0,
        "{rows} rows; {}",
        ended.stderr
    );
    Ok(())
}

/// Returns N of "lost N events", or 0.
fn lost(stderr: &str) -> Result<u64> {
    match stderr
        .lines()
        .find_map(|line| line.strip_prefix("mmapsnoop: lost "))
    {
        Some(rest) => Ok(rest.split(' ').next().unwrap_or_default().parse()?),
        None => Ok(0),
    }
}

fn what_a_stopped_tool_loses_is_counted() -> Result<()> {
    let mut workload = Workload::start("burst", &[&BURST.to_string()])?;
    let tool = start(&["-p", &workload.pid()])?;
    tool.signal(Signal::SIGSTOP)?;
    workload.work()?;
    tool.signal(Signal::SIGCONT)?;
    let ended = end(tool)?;
    let rows = ended.stdout.lines().count() as u64 - 1;
    let lost = lost(&ended.stderr)?;
    ensure!(
        lost > 0 && rows + lost == BURST,
        "{rows} rows, {lost} lost; {}",
        ended.stderr
    );
    Ok(())
}

/// The header is printed before any row, and a row long before the tool ends.
fn a_row_comes_at_once() -> Result<()> {
    let mut workload = Workload::start("mmap", &["anon", "1"])?;
    let folder = harness::scratch()?;
    let out = folder.path().join("out");
    let (program, pid) = (harness::tool("mmapsnoop"), workload.pid());
    let script = format!("exec '{}' -p {pid} >'{}'", program.display(), out.display());
    let mut tool = Tool::spawn(Command::new("sh").args(["-c", &script]))?;
    tool.wait_for_stderr("tracing mmap(2)")?;
    harness::eventually("a header", || {
        Ok(fs::read_to_string(&out)?.starts_with("PID "))
    })?;
    workload.work()?;
    harness::eventually("a row", || {
        Ok(fs::read_to_string(&out)?.lines().count() >= 2)
    })?;
    end(tool)?;
    Ok(())
}
