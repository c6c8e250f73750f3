//! Python frames of each CPython version, and of all that makes its stacks unusual.

use std::collections::{BTreeMap, HashMap};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use memchr::memmem;
use serde_json::Value;

use super::{
    EACH_BLOCK, MARKS, expect_exact_frames, expect_native, expect_places, has_loop, is_mark,
    is_python, places_of, trace_with_facts, truth,
};
use crate::harness::{self, Python, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "python":
        frames_of_each_version_are_those_that_python_has [Pythons],
        frames_of_greenlets_are_those_that_python_has [Pythons],
        lines_of_compiled_functions_are_those_that_python_has [Pythons],
        a_build_of_another_kind_has_native_frames [Pythons],
        frames_of_an_inner_interpreter_are_those_that_it_has [Pythons],
        each_thread_on_musl_has_its_frames,
    }
}

/// The Pythons are of 3.10 to 3.15, as far as the machine has them: builds of its own, and Debian's, with their
/// own C library, in a root of their own.
fn frames_of_each_version_are_those_that_python_has() -> Result<()> {
    for python in Python::all()? {
        let folder = harness::scratch()?;
        let mut command = python.command("frames.py", folder.path())?;
        expect_exact_frames(command.arg("truth"), &folder.path().join("truth"))
            .with_context(|| python.to_string())?;
    }
    Ok(())
}

/// Some of the Pythons have greenlets: Debian's newest. A greenlet has only its own part of the native stack: the
/// part below it may belong to another greenlet by now.
fn frames_of_greenlets_are_those_that_python_has() -> Result<()> {
    let mut compared = 0;
    for python in Python::all()? {
        let folder = harness::scratch()?;
        let mut command = python.command("greenlets.py", folder.path())?;
        let workload = Workload::spawn(command.arg("truth"))?;
        let pid = workload.pid();
        let (facts, ended) = trace_with_facts(&EACH_BLOCK, workload, &pid)?;
        let objects = ended.objects()?;
        let stacks = harness::stacks_of_blocks(&objects);
        let truth = truth(&folder.path().join("truth"))?;
        for (address, frames) in &truth {
            let stack = stacks.get(address);
            let stack = stack.with_context(|| format!("{python}: no block at {address:#x}"))?;
            expect_places(stack, frames).with_context(|| python.to_string())?;
        }
        ensure!(facts["blocks"] == truth.len().to_string(), "{facts:?}");
        compared += truth.len();
    }
    ensure!(compared > 1000, "{compared}: no Python has greenlets");
    Ok(())
}

/// An interpreter describes itself: `_PyRuntime` begins with a cookie, the version, a flag for builds without
/// GIL, and the offsets of fields in the interpreter.
fn a_build_of_another_kind_has_native_frames() -> Result<()> {
    const COOKIE: &[u8] = b"xdebugpy";
    const MAJOR_VERSION: usize = 11;
    const IS_FREE_THREADED: usize = 16;
    const THREADS: usize = 72;
    for python in Python::unpacked()? {
        for (at, said) in [
            (IS_FREE_THREADED, "a Python of a free-threaded build"),
            (THREADS, "a Python of an unusual build"),
        ] {
            let folder = harness::scratch()?;
            let changed = python.changed(folder.path(), |program| {
                let found: Vec<usize> = memmem::find_iter(program, COOKIE).collect();
                // In code, instructions follow the cookie.
                for place in found {
                    if program[place + MAJOR_VERSION] == 3 {
                        program[place + at] += 1;
                    }
                }
            })?;
            expect_native(&mut changed.in_folder(folder.path()), said)
                .with_context(|| format!("{python} as {said}"))?;
        }
    }
    Ok(())
}

/// CPython compiles functions from 3.14 on, in builds that have its compiler. The compiled code has no unwind
/// information. Where it ends the native frames, the Python frames are there all the same.
fn lines_of_compiled_functions_are_those_that_python_has() -> Result<()> {
    const COUNT: u64 = 10_007;
    let mut compiled = 0;
    for python in Python::all()? {
        let folder = harness::scratch()?;
        let mut command = python.command("jit.py", folder.path())?;
        command.arg(COUNT.to_string()).env("PYTHON_JIT", "1");
        let (facts, stacks) = stacks_of_objects(&mut command)?;
        let mut blocks: HashMap<(String, u64), u64> = HashMap::new();
        for stack in &stacks {
            let frames = places_of(stack, |frame| !is_mark(frame))?;
            let is_called = frames.first().is_some_and(|(name, ..)| name == "one");
            let mut frames = frames.into_iter().skip(usize::from(is_called));
            let (name, _, line) = frames.next().context("no function")?;
            let callers = frames.map(|(name, ..)| name);
            ensure!(callers.eq(["<module>"]), "{python}: {stack}");
            *blocks.entry((name, line)).or_default() += calls(stack)?;
        }
        let line = |fact: &str| anyhow::Ok(("hot".to_owned(), facts[fact].parse::<u64>()?));
        let expected = [line("called")?, line("own")?].map(|place| (place, COUNT));
        ensure!(
            blocks == HashMap::from(expected),
            "{python}: {blocks:?}, {facts:?}"
        );
        compiled += facts["compiled"].parse::<u64>()?;
    }
    ensure!(compiled > COUNT / 2, "{compiled} rounds of compiled code");
    Ok(())
}

/// The functions of the outer interpreter are not known, which a mark says where its loop has a symbol. Before
/// 3.12, the functions of the inner interpreter are not known, and a mark says so.
fn frames_of_an_inner_interpreter_are_those_that_it_has() -> Result<()> {
    const BLOCKS: u64 = 101;
    for python in Python::all()? {
        let folder = harness::scratch()?;
        let mut command = python.command("inner.py", folder.path())?;
        let (facts, stacks) = stacks_of_objects(command.arg(BLOCKS.to_string()))?;
        let mut blocks = 0;
        for stack in &stacks {
            expect_inner(stack, facts["inner"] == "1")
                .with_context(|| format!("{python}: {stack}"))?;
            blocks += calls(stack)?;
        }
        ensure!(blocks == BLOCKS, "{python}: {blocks}");
    }
    Ok(())
}

/// Returns the facts of the workload that a command starts, and the stacks of its objects of 2003 bytes, which
/// Python makes 33 bytes larger.
fn stacks_of_objects(command: &mut Command) -> Result<(HashMap<String, String>, Vec<Value>)> {
    const BYTES: &str = "2036";
    let workload = Workload::spawn(command)?;
    let pid = workload.pid();
    let options = [
        "-j", "-o", "0", "-T", "1000", "-z", BYTES, "-Z", BYTES, "3600",
    ];
    let (facts, ended) = trace_with_facts(&options, workload, &pid)?;
    let mut objects = ended.objects()?;
    objects.retain(|row| row["type"] == "stack");
    Ok((facts, objects))
}

fn calls(stack: &Value) -> Result<u64> {
    stack["allocations"].as_u64().context("no count")
}

/// Checks that a stack has the functions of the inner interpreter, if they can be known, and a mark where some
/// are missing.
fn expect_inner(stack: &Value, is_known: bool) -> Result<()> {
    let frames = stack["user_frames"].as_array().context("no frames")?;
    let python = frames.iter().filter(is_python);
    let names = python.filter_map(|frame| frame["symbol"].as_str());
    if !is_known {
        ensure!(frames.iter().any(is_mark), "not marked");
        return Ok(());
    }
    let mut expected = vec!["keep", "other", "<module>"];
    if let Some(outer) = frames.iter().position(has_loop) {
        let next = frames.get(outer + 1).context("a loop is the outermost")?;
        ensure!(next["symbol"] == MARKS[0], "not marked");
        expected.push(MARKS[0]);
    }
    ensure!(
        names.eq(expected) && stack["truncated"].is_null(),
        "not those"
    );
    Ok(())
}

/// musl keeps the values of a thread's keys apart from the thread, and those of the first thread at another place
/// than those of other threads. The workload is no Python, but has the data by which a Python 3.12 is walked:
/// Debian has no Python on musl.
fn each_thread_on_musl_has_its_frames() -> Result<()> {
    const COUNT: u64 = 1009;
    for (options, kept) in [(&[][..], true), (&["nowhere"], false)] {
        // A guest has no other musl.
        let mut command = Command::new(harness::workload("ld-musl.so.1"));
        command.arg(harness::workload("python-musl"));
        command.arg(COUNT.to_string()).args(options);
        let workload = Workload::spawn(&mut command)?;
        let pid = workload.pid();
        let (_, ended) = trace_with_facts(&["-j", "-o", "0", "3600"], workload, &pid)?;
        let objects = ended.objects()?;
        let stacks = objects.iter().filter(|row| row["type"] == "stack");
        let mut blocks = BTreeMap::new();
        for stack in stacks.filter(|stack| stack["bytes"] == COUNT * 113) {
            let frames = stack["user_frames"].as_array().context("no frames")?;
            let functions = frames.iter().filter(is_python);
            let functions =
                functions.map(|frame| (frame["symbol"].as_str(), frame["file"].as_str()));
            *blocks.entry(functions.collect::<Vec<_>>()).or_insert(0) +=
                stack["allocations"].as_u64().context("no count")?;
        }
        let function = |name| vec![(Some(name), Some("shop.py"))];
        let expected = match kept {
            true => BTreeMap::from([(function("of_main"), COUNT), (function("of_thread"), COUNT)]),
            false => BTreeMap::from([(Vec::new(), 2 * COUNT)]),
        };
        ensure!(blocks == expected, "{options:?}: {blocks:?}");
        let said = "of a C library in which its threads' states are not found";
        ensure!(ended.stderr.contains(said) != kept, "{}", ended.stderr);
    }
    Ok(())
}
