//! CPython's own objects as blocks, against Python's own count of them.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use super::{is_python, printed_by, printed_by_python, script, trace, trace_with_facts};
use crate::harness::{self, Python, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "python":
        small_objects_are_blocks_where_they_come_from_malloc [Python],
        each_object_is_a_block_if_that_is_asked_for [Python],
        objects_in_use_at_the_end_are_those_that_python_has [Python],
        each_object_of_each_version_is_a_block [Pythons],
    }
}

/// Small objects are in arenas, which memleak says, or each of them is a block.
fn small_objects_are_blocks_where_they_come_from_malloc() -> Result<()> {
    const PROGRAM: &str = "import os, sys\n\
                           kept = [None] * 1009\n\
                           def keep():\n    for i in range(1009):\n        kept[i] = bytes(101)\n\
                           print('ready', os.getpid(), flush=True)\n\
                           sys.stdin.readline()\n\
                           keep()\n\
                           print('done', flush=True)\n\
                           sys.stdin.readline()\n";
    // A bytes object has a header of 33 bytes.
    const BYTES: u64 = 1009 * (33 + 101);
    for (allocator, is_block) in [("pymalloc", false), ("malloc", true)] {
        let mut command = Command::new("python3");
        command.args(["-c", PROGRAM]).env("PYTHONMALLOC", allocator);
        let workload = Workload::spawn(&mut command)?;
        let pid = workload.pid();
        let ended = trace(&["-o", "0", "--folded", "3600"], workload, &pid)?;
        let lines = ended.stdout.lines();
        let kept: u64 = lines
            .filter(|line| line.contains(";keep (<string>:5)"))
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok())
            .sum();
        ensure!(
            (kept == BYTES) == is_block,
            "{allocator}: {kept}: {ended:?}"
        );
        let is_said = ended
            .stderr
            .contains("up to 512 bytes are in arenas of its own");
        ensure!(is_said != is_block, "{allocator}: {ended:?}");
    }
    Ok(())
}

fn each_object_is_a_block_if_that_is_asked_for() -> Result<()> {
    expect_each_object(&mut Command::new("python3"))
}

fn each_object_of_each_version_is_a_block() -> Result<()> {
    for python in Python::all()? {
        let folder = harness::scratch()?;
        let mut command = python.in_folder(folder.path());
        expect_each_object(&mut command).with_context(|| python.to_string())?;
    }
    Ok(())
}

/// Traces a Python by memleak, and compares the blocks that stay alive with Python's own count of them.
fn expect_each_object(python: &mut Command) -> Result<()> {
    const PROGRAM: &str = "import array, gc, os, sys\n\
                           class Slots: __slots__ = ('a', 'b')\n\
                           class Plain: pass\n\
                           kept = [None] * 11011\n\
                           counts = array.array('q', [0, 0])\n\
                           def keep(end):\n    \
                               for i in range(0, end, 11):\n        \
                                   kept[i] = 'x%d' % i\n        \
                                   kept[i + 1] = (i, i + 1, object())\n        \
                                   kept[i + 2] = [i] * 3\n        \
                                   kept[i + 3] = {'a': i, i: 2}\n        \
                                   kept[i + 4] = i * 100000.5\n        \
                                   kept[i + 5] = Slots()\n        \
                                   kept[i + 6] = Plain()\n        \
                                   kept[i + 6].z = [kept[i + 4]]\n        \
                                   kept[i + 7] = bytes(101 + i % 900)\n        \
                                   kept[i + 8] = {i, i + 1}\n        \
                                   kept[i + 9] = lambda: i\n        \
                                   kept[i + 10] = list(range(i % 97))\n\
                           keep(0)\n\
                           gc.collect()\n\
                           gc.disable()\n\
                           print('ready', os.getpid(), flush=True)\n\
                           sys.stdin.readline()\n\
                           counts[0] = sys.getallocatedblocks()\n\
                           counts[0] = sys.getallocatedblocks()\n\
                           keep(11011)\n\
                           counts[1] = sys.getallocatedblocks()\n\
                           print('done blocks=%d' % (counts[1] - counts[0]), flush=True)\n\
                           sys.stdin.readline()\n";
    let workload = Workload::spawn(python.args(["-c", PROGRAM]))?;
    let pid = workload.pid();
    let each = ["-j", "-o", "0", "-T", "100000", "--extended"];
    let each = [&each[..], &["--python-objects", "3600"]].concat();
    let (facts, ended) = trace_with_facts(&each, workload, &pid)?;
    let counted: u64 = facts["blocks"].parse()?;
    let call = PROGRAM.lines().position(|line| line == "keep(11011)");
    let line = call.context("no call")? + 1;
    let objects = ended.objects()?;
    let sum = |kind: &str, field: &str| -> u64 {
        let rows = objects.iter().filter(|row| row["type"] == kind);
        let rows = rows.filter(|row| comes_from_line(row, line));
        rows.filter_map(|row| row[field].as_u64()).sum()
    };
    // Python may free objects of its own there that it has had before.
    let blocks = sum("stack", "allocations") - sum("unknown_frees", "frees");
    ensure!(counted > 11_011, "{counted}");
    ensure!(
        blocks == counted,
        "{blocks}, not {counted}: {}",
        ended.stderr
    );
    ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
    Ok(())
}

/// Whether a stack contains this line of the program.
fn comes_from_line(stack: &Value, line: usize) -> bool {
    let frames = stack["user_frames"].as_array();
    let mut python = frames.into_iter().flatten().filter(is_python);
    python.any(|frame| frame["symbol"] == "<module>" && frame["line"] == line)
}

/// Traces programs from their start to their end, with threads and a forked child, and compares the blocks that are
/// left with the slots that the interpreter's own pools have in use at that moment.
fn objects_in_use_at_the_end_are_those_that_python_has() -> Result<()> {
    let own = printed_by_python("sys.executable")?;
    let of_machine = "/usr/bin/python3";
    let mut programs = vec![Path::new(&own).canonicalize()?];
    if let Ok(program) = Path::new(of_machine).canonicalize()
        && !programs.contains(&program)
    {
        programs.push(program);
    }
    for program in programs {
        expect_objects_in_use(&program).with_context(|| program.display().to_string())?;
    }
    Ok(())
}

fn expect_objects_in_use(program: &Path) -> Result<()> {
    let folder = harness::scratch()?;
    let pools = folder.path().join("pools");
    let script = script("slots.py");
    let command = [program, &script, &pools].map(|part| part.display().to_string());
    let command = command.join(" ");
    let library = "next((line.split()[-1] for line in open('/proc/self/maps') if 'libpython' in line), sys.executable)";
    let object = printed_by(program, library)?;
    let args = ["-O", &object, "--python-objects", "-j", "-o", "0"];
    let of_command = ["-T", "1", "-c", &command, "3600"];
    let ended = harness::run("memleak", &[&args[..], &of_command].concat())?;
    let rows = ended.objects()?;
    let report = rows.iter().rfind(|row| row["type"] == "report");
    let report = report.with_context(|| format!("no report: {ended:?}"))?;
    let number = |field: &str| report[field].as_u64();
    let seen = number("allocations").zip(number("bytes"));
    let expected = slots_in_use(&fs::read_to_string(&pools)?);
    ensure!(expected.0 > 10_000, "{expected:?}");
    ensure!(
        seen == Some(expected),
        "{seen:?}, not {expected:?}: {}",
        ended.stderr
    );
    ensure!(number("unknown_frees") == Some(0), "{report}");
    // The stacks of all imports can be more than a small machine has memory for.
    for kind in ["events", "entries", "calls", "runs"] {
        ensure!(report["lost"][kind] == 0, "{report}");
    }
    Ok(())
}

/// Returns the number of slots in use and their bytes, of all pools, from the text of `sys._debugmallocstats()`: a
/// line for each class, with the class, the bytes of a slot, pools, slots in use and free slots.
fn slots_in_use(text: &str) -> (u64, u64) {
    let lines = text.lines().filter_map(|line| {
        let numbers: Result<Vec<u64>, _> = line.split_whitespace().map(str::parse).collect();
        let numbers: [u64; 5] = numbers.ok()?.try_into().ok()?;
        Some((numbers[3], numbers[3] * numbers[1]))
    });
    lines.fold((0, 0), |sum, of_class| {
        (sum.0 + of_class.0, sum.1 + of_class.1)
    })
}
