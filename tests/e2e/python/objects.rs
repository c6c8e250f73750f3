//! CPython's own objects as blocks, against Python's own count of them.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use super::{is_python, trace, trace_with_facts};
use crate::harness::{self, Python, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "python":
        small_objects_are_blocks_where_they_come_from_malloc [Python],
        each_object_is_a_block_if_that_is_asked_for [Python],
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

/// Traces a Python by memleak, and compares its blocks with Python's own count of the objects that stay alive. An
/// interpreter that was optimized by a profile, as those of distributions are, is refused with the reason
/// instead.
fn expect_each_object(python: &mut Command) -> Result<()> {
    const PROGRAM: &str = "import array, gc, os, sys, sysconfig\n\
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
                           options = sysconfig.get_config_var('CONFIG_ARGS')\n\
                           optimized = sys.base_prefix in ('/usr', '/opt/pythons') or '--enable-optimizations' in options\n\
                           print('ready', os.getpid(), flush=True)\n\
                           sys.stdin.readline()\n\
                           counts[0] = sys.getallocatedblocks()\n\
                           counts[0] = sys.getallocatedblocks()\n\
                           keep(11011)\n\
                           counts[1] = sys.getallocatedblocks()\n\
                           print('done blocks=%d optimized=%d' % (counts[1] - counts[0], optimized), flush=True)\n\
                           sys.stdin.readline()\n";
    let workload = Workload::spawn(python.args(["-c", PROGRAM]))?;
    let pid = workload.pid();
    let each = ["-j", "-o", "0", "-T", "100000", "--python-objects", "3600"];
    let (facts, ended) = trace_with_facts(&each, workload, &pid)?;
    let is_exact = facts["optimized"] == "0";
    let is_said = ended.stderr.contains("are not seen one by one in ");
    ensure!(is_said != is_exact, "{ended:?}");
    let counted: u64 = facts["blocks"].parse()?;
    let call = PROGRAM.lines().position(|line| line == "keep(11011)");
    let line = call.context("no call")? + 1;
    let objects = ended.objects()?;
    let blocks: u64 = objects
        .iter()
        .filter(|row| row["type"] == "stack" && comes_from_line(row, line))
        .filter_map(|row| row["allocations"].as_u64())
        .sum();
    ensure!(counted > 11_011, "{counted}");
    ensure!(
        (blocks == counted) == is_exact,
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
