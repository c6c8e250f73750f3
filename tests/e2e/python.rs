//! Python frames in user stacks, against Python's own record of where each block was allocated.

mod commands;
mod extension;
mod objects;
mod versions;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;
use memtools::bpf::kernel_support;
use memtools::host::capabilities;
use serde_json::Value;

use crate::harness::{self, Tool, ToolOutput, Workload};

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    let own = harness::tests! { "python":
        frames_in_threads_and_elsewhere_are_those_that_python_has [Python],
        frames_in_a_container_are_those_that_python_has [Python],
        frames_of_children_are_those_that_python_has [Python],
        frames_that_cannot_be_read_are_said_to_be_missing [Python, Collapse],
        frames_are_in_text_and_in_folded_lines [Python],
        other_tools_have_them_too [Python],
        without_lines_a_function_has_one_stack [Python],
        native_frames_are_left_when_asked_for [Python],
        an_older_version_has_native_frames [Python39],
    };
    let of_others = [
        commands::tests(),
        extension::tests(),
        objects::tests(),
        versions::tests(),
    ];
    own.into_iter()
        .chain(of_others.into_iter().flatten())
        .collect()
}

/// Size of each block of the workload, in bytes.
const BYTES: &str = "1009";

/// Arguments by which memleak lists each of the workload's blocks with the stack that allocated it.
const EACH_BLOCK: [&str; 11] = harness::each_block(BYTES);

/// The path of a script of tests/workload.
fn script(name: &str) -> PathBuf {
    if harness::in_guest() {
        return harness::workload(name);
    }
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/workload")
        .join(name)
}

/// Names of marks: Python frames instead of frames that are missing.
const MARKS: [&str; 2] = ["[further functions]", "[called by frames that are missing]"];

/// Python frame: function, file and line.
type Place = (String, String, u64);

/// Reads the frames of each block, by its address, as the workload has recorded them.
fn truth(path: &Path) -> Result<HashMap<u64, Vec<Place>>> {
    let blocks: HashMap<String, Vec<Place>> = serde_json::from_str(&fs::read_to_string(path)?)?;
    let blocks = blocks.into_iter();
    blocks
        .map(|(address, frames)| Ok((address.parse()?, frames)))
        .collect()
}

fn has_loop(frame: &Value) -> bool {
    frame["symbol"]
        .as_str()
        .is_some_and(|symbol| symbol.starts_with("_PyEval_EvalFrameDefault"))
}

fn is_python(frame: &&Value) -> bool {
    frame["kind"] == "python"
}

/// Whether a frame is a mark instead of missing frames.
fn is_mark(frame: &Value) -> bool {
    let name = frame["symbol"].as_str();
    name.is_some_and(|name| MARKS.contains(&name))
}

/// Whether the function has reached the instruction from which on Python itself shows it. Before that, its cell
/// variables are made, which have no line, and a coroutine or generator, for which the garbage collector may run
/// any function; sys._getframe() omits a function that has not come so far.
fn has_begun(frame: &Value) -> bool {
    const FIRST_SHOWN: u64 = 4;
    const UNIT: u64 = (1 << 20) - 1;
    let address = frame["address"].as_str().unwrap_or_default();
    let word = u64::from_str_radix(address.trim_start_matches("0x"), 16);
    frame["line"].is_u64() && word.is_ok_and(|word| word & UNIT >= FIRST_SHOWN)
}

/// Returns the Python frames of a stack. Fails if any frame is missing.
fn places(stack: &Value) -> Result<Vec<Place>> {
    expect_whole(stack)?;
    places_of(stack, |_| true)
}

/// Fails if a frame of a stack is missing, of Python or native.
fn expect_whole(stack: &Value) -> Result<()> {
    let frames = stack["user_frames"].as_array().context("no frames")?;
    ensure!(
        !frames.iter().any(has_loop),
        "the interpreter's loop is left in {stack}"
    );
    // A stripped file has no name for its entry point.
    let outermost = frames.last().and_then(|frame| frame["symbol"].as_str());
    ensure!(
        stack["truncated"].is_null()
            && matches!(outermost, None | Some("_start" | "clone3" | "__clone3"))
            && !frames.iter().any(is_mark),
        "not complete: {stack}"
    );
    Ok(())
}

/// Returns the Python frames of a stack that `wanted` accepts.
fn places_of(stack: &Value, wanted: impl Fn(&Value) -> bool) -> Result<Vec<Place>> {
    let frames = stack["user_frames"].as_array().context("no frames")?;
    let frames = frames.iter().filter(is_python);
    let places = frames.filter(|frame| wanted(frame)).map(|frame| {
        let text = |field: &str| frame[field].as_str().map(str::to_owned);
        Some((text("symbol")?, text("file")?, frame["line"].as_u64()?))
    });
    places
        .collect::<Option<_>>()
        .with_context(|| format!("a frame without a name: {stack}"))
}

/// Compares the stack of every block that the workload recorded.
fn expect_exact(ended: &ToolOutput, truth: &HashMap<u64, Vec<Place>>) -> Result<()> {
    expect_exact_in(None, &ended.objects()?, truth)
}

/// Compares the stack of every block that a process of the workload recorded. `pid` selects the process if there
/// are several.
fn expect_exact_in(
    pid: Option<u64>,
    objects: &[Value],
    truth: &HashMap<u64, Vec<Place>>,
) -> Result<()> {
    let is_own = |row: &&Value| pid.is_none_or(|pid| row["pid"] == pid);
    let stacks = harness::stacks_of_blocks(objects.iter().filter(is_own));
    ensure!(truth.len() > 1000, "{}", truth.len());
    for (address, frames) in truth {
        let stack = stacks.get(address);
        let stack = stack.with_context(|| format!("no block at {address:#x}"))?;
        expect_whole(stack)?;
        expect_places(stack, frames)?;
    }
    Ok(())
}

/// Compares the Python frames of a stack, without marks.
fn expect_places(stack: &Value, frames: &[Place]) -> Result<()> {
    let found = places_of(stack, |frame| !is_mark(frame));
    let is_exact = |found: &Result<Vec<Place>>| found.as_ref().is_ok_and(|found| found == frames);
    ensure!(
        is_exact(&found) || is_exact(&places_of(stack, has_begun)),
        "found {found:?}, not {frames:?}, in {stack}"
    );
    Ok(())
}

fn frames_in_threads_and_elsewhere_are_those_that_python_has() -> Result<()> {
    let folder = harness::scratch()?;
    let path = folder.path().join("truth");
    expect_exact_frames(
        Command::new("python3").arg(script("frames.py")).arg(&path),
        &path,
    )
}

/// Starts memleak on a process, and waits until it has the unwind tables of all the process's files: an emulated
/// CPU may need more time for them than memleak's start takes.
fn follow(options: &[&str], pid: &str) -> Result<Tool> {
    let mut tool = Tool::start("memleak", &[options, &["--verbose", "-p", pid]].concat())?;
    tool.wait_for_stderr("allocator: ")?;
    tool.wait_for_stderr(&format!("unwind tables for process {pid}: "))?;
    Ok(tool)
}

/// Traces the workload's process with this PID by memleak.
fn trace(options: &[&str], workload: Workload, pid: &str) -> Result<ToolOutput> {
    Ok(trace_with_facts(options, workload, pid)?.1)
}

/// Traces the workload's process with this PID by memleak. Returns the workload's facts, and memleak's output.
fn trace_with_facts(
    options: &[&str],
    mut workload: Workload,
    pid: &str,
) -> Result<(HashMap<String, String>, ToolOutput)> {
    let tool = follow(options, pid)?;
    let facts = workload.work()?;
    let ended = tool.interrupt()?;
    workload.finish()?;
    Ok((facts, ended))
}

/// Returns what the Python in PATH prints for these expressions.
fn printed_by_python(expressions: &str) -> Result<String> {
    printed_by(Path::new("python3"), expressions)
}

/// Returns what a Python prints for these expressions.
fn printed_by(python: &Path, expressions: &str) -> Result<String> {
    let program = format!("import sys; print({expressions})");
    let printed = Command::new(python).args(["-c", &program]).output()?;
    Ok(String::from_utf8(printed.stdout)?.trim_end().to_owned())
}

/// One child has called exec. The other one has not, and has its code objects at its parent's addresses.
fn frames_of_children_are_those_that_python_has() -> Result<()> {
    let folder = harness::scratch()?;
    let path = folder.path().join("truth");
    let mut command = Command::new("python3");
    let workload = Workload::spawn(command.arg(script("frames.py")).arg(&path).arg("family"))?;
    let parent = workload.pid();
    let options = [&EACH_BLOCK[..], &["--children"]].concat();
    let (facts, ended) = trace_with_facts(&options, workload, &parent)?;
    let objects = ended.objects()?;
    let children = [(&facts["fork"], "fork"), (&facts["exec"], "exec")];
    let children = children.map(|(pid, suffix)| (pid, path.with_extension(suffix)));
    for (pid, path) in [(&parent, path)].into_iter().chain(children) {
        expect_exact_in(Some(pid.parse()?), &objects, &truth(&path)?)
            .with_context(|| format!("in process {pid}, {}", path.display()))
            .with_context(|| said_of_python(&ended))?;
    }
    Ok(())
}

/// Returns a tool's messages about processes of Python.
fn said_of_python(ended: &ToolOutput) -> String {
    let lines = ended.stderr.lines();
    lines.filter(|line| line.contains("Python")).collect()
}

/// The process has another PID in its own namespace than outside, and files that only its mount namespace has.
fn frames_in_a_container_are_those_that_python_has() -> Result<()> {
    const CONTAINER: &str = "mount -t tmpfs none /mnt && mkdir /mnt/python && mount --bind \"$1\" /mnt/python && \
                             cp \"$3\" /mnt/frames.py && \
                             PYTHONHOME=/mnt/python LD_LIBRARY_PATH=/mnt/python/lib \
                             exec \"/mnt/python/bin/$2\" /mnt/frames.py \"$4\"";
    let told = printed_by_python("sys.base_prefix, 'python3.%d' % sys.version_info[1]")?;
    let (prefix, name) = told.rsplit_once(' ').context("no prefix")?;
    let folder = harness::scratch()?;
    let path = folder.path().join("truth");
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    command.args(["sh", "-c", CONTAINER, "sh", prefix, name]);
    let workload = Workload::spawn(command.arg(script("frames.py")).arg(&path))?;
    let pid = workload.pid_in_container()?;
    let ended = trace(&EACH_BLOCK, workload, &pid)?;
    let truth = truth(&path)?;
    let of_container = |place: &Place| place.1 == "/mnt/frames.py";
    ensure!(truth.values().any(|frames| frames.iter().any(of_container)));
    expect_exact(&ended, &truth)
}

/// Traces the workload that a command starts by memleak, and compares the stack of every block.
fn expect_exact_frames(command: &mut Command, truth_file: &Path) -> Result<()> {
    let workload = Workload::spawn(command)?;
    let pid = workload.pid();
    let ended = trace(&EACH_BLOCK, workload, &pid)?;
    expect_exact(&ended, &truth(truth_file)?).with_context(|| said_of_python(&ended))
}

/// The kernel makes huge pages of the memory in which Python has the thread's state. Every block is reported, and
/// has the thread's frames or a mark that some are missing. On a busy machine, the kernel may make no huge page
/// just when they are read.
fn frames_that_cannot_be_read_are_said_to_be_missing() -> Result<()> {
    // The first run is enough on an idle machine; beside other programs, the two threads may seldom run at once.
    const RUNS: u32 = 29;
    for _ in 0..RUNS {
        if expect_whole_or_marked()? > 0 {
            return Ok(());
        }
    }
    bail!("no read has failed in {RUNS} runs");
}

/// Returns the number of marked blocks, of those that were allocated while the kernel made huge pages.
fn expect_whole_or_marked() -> Result<u64> {
    const BLOCKS: u64 = 5003;
    let script = script("frames.py").with_file_name("collapse.py");
    let mut command = Command::new("python3");
    let workload = Workload::spawn(command.arg(script).arg(BLOCKS.to_string()))?;
    let pid = workload.pid();
    let each_block = [
        "-j", "-o", "0", "-T", "1000", "-z", BYTES, "-Z", BYTES, "3600",
    ];
    let (facts, ended) = trace_with_facts(&each_block, workload, &pid)?;
    let objects = ended.objects()?;
    let (mut exact, mut marked) = (0, 0);
    for stack in objects.iter().filter(|row| row["type"] == "stack") {
        let count = stack["allocations"].as_u64().context("no count")?;
        let frames = stack["user_frames"].as_array().context("no frames")?;
        if !stack["truncated"].is_null() || frames.iter().any(is_mark) {
            marked += count;
            continue;
        }
        let names: Vec<String> = places(stack)?.into_iter().map(|(name, ..)| name).collect();
        let innermost = ["take", "work"];
        ensure!(
            names.len() > innermost.len() && names.starts_with(&innermost.map(String::from)),
            "{stack}"
        );
        exact += count;
    }
    ensure!(
        exact + marked == BLOCKS && exact > marked,
        "{exact} exact, {marked} marked, {facts:?}"
    );
    Ok(marked)
}

fn frames_are_in_text_and_in_folded_lines() -> Result<()> {
    let folder = harness::scratch()?;
    let path = folder.path().join("truth");
    for (folded, expected) in [
        (&[][..], "größe_函数 (frames.py:"),
        (&["--folded"], ";größe_函数 (frames.py:"),
    ] {
        let workload =
            Workload::spawn(Command::new("python3").arg(script("frames.py")).arg(&path))?;
        let pid = workload.pid();
        let options = ["-o", "0", "-T", "100000", "-z", BYTES, "-Z", BYTES];
        let ended = trace(&[&options, folded].concat(), workload, &pid)?;
        ensure!(ended.stdout.contains(expected), "{ended:?}");
    }
    Ok(())
}

/// Tools for page faults, and for calls of brk(2) and mmap(2), show Python frames, too. Before 6.6, the kernel
/// requires CAP_SYS_ADMIN for a uprobe, which the tools may have dropped; they say so then.
fn other_tools_have_them_too() -> Result<()> {
    const PROGRAM: &str = "import mmap, os, sys\n\
                           print('ready', os.getpid(), flush=True)\n\
                           sys.stdin.readline()\n\
                           def grow():\n    kept.append(bytearray(100000))\n\
                           def take():\n    area = mmap.mmap(-1, 40960)\n    area[0] = 1\n    return area\n\
                           kept = []\n\
                           for _ in range(101): grow()\n\
                           areas = [take() for _ in range(23)]\n\
                           print('done', flush=True)\n\
                           sys.stdin.readline()\n";
    let permitted = kernel_support::btf_has_name("BPF_TRACE_UPROBE_MULTI")
        || capabilities::perf_events_want_sys_admin();
    for (name, args, function) in [
        ("faults", &["-f"][..], "take"),
        ("brkstack", &["-f"], "grow"),
        ("mmapsnoop", &["--json", "--stack"], "take"),
    ] {
        let mut workload = Workload::spawn(Command::new("python3").args(["-c", PROGRAM]))?;
        let pid = workload.pid();
        let mut tool = Tool::start(name, &[args, &["-p", &pid]].concat())?;
        tool.wait_for_stderr("tracing ")?;
        workload.work()?;
        let ended = tool.interrupt()?;
        workload.finish()?;
        let expected = if name == "mmapsnoop" {
            format!("\"symbol\":\"{function}\"")
        } else {
            format!(";{function} (<string>:")
        };
        let refused = "die unseen, as the kernel requires CAP_SYS_ADMIN for uprobes";
        ensure!(
            ended.stdout.contains(&expected) == permitted,
            "{name}: {ended:?}"
        );
        ensure!(
            ended.stderr.contains(refused) != permitted,
            "{name}: {ended:?}"
        );
    }
    Ok(())
}

/// Two lines of a function allocate blocks: two stacks or, with --interpreters=merged, one. From 3.15 on, the first
/// call of a line goes through other functions of the interpreter than later calls.
fn without_lines_a_function_has_one_stack() -> Result<()> {
    const PROGRAM: &str = "import os, sys\n\
                           kept = [None] * 1202\n\
                           def keep():\n    for i in range(601):\n        kept[i] = bytes(1003)\n        \
                           kept[i + 601] = bytes(1003)\n\
                           keep()\n\
                           print('ready', os.getpid(), flush=True)\n\
                           sys.stdin.readline()\n\
                           keep()\n\
                           print('done', flush=True)\n\
                           sys.stdin.readline()\n";
    for (lines, expected) in [("auto", &[601, 601][..]), ("merged", &[1202])] {
        let workload = Workload::spawn(Command::new("python3").args(["-c", PROGRAM]))?;
        let (pid, option) = (workload.pid(), format!("--interpreters={lines}"));
        let ended = trace(&["-o", "0", "-j", &option, "3600"], workload, &pid)?;
        let objects = ended.objects()?;
        let counts: Vec<u64> = objects
            .iter()
            .filter(|row| row["type"] == "stack" && is_from(row, "keep"))
            .filter_map(|row| row["allocations"].as_u64())
            .collect();
        ensure!(counts == expected, "{lines}: {counts:?}: {ended:?}");
    }
    Ok(())
}

/// Whether the innermost Python function of a stack has this name.
fn is_from(stack: &Value, function: &str) -> bool {
    let frames = stack["user_frames"].as_array();
    let innermost = frames.into_iter().flatten().find(is_python);
    innermost.is_some_and(|frame| frame["symbol"] == function)
}

/// Python 3.9 is not supported. memleak says so once.
fn an_older_version_has_native_frames() -> Result<()> {
    let mut command = Command::new("python3.9");
    // Python's smallest package has no modules besides those in the program.
    command.args(["-I", "-S"]);
    expect_native(&mut command, "a Python of version 3.9")
}

/// Traces a Python by memleak. memleak must print `expected` once, and the stacks must be complete, without
/// Python frames.
fn expect_native(python: &mut Command, expected: &str) -> Result<()> {
    const PROGRAM: &str = "import sys\n\
                           kept = [None] * 1009\n\
                           def keep():\n    for i in range(1009):\n        kept[i] = bytes(2003)\n\
                           print('ready', int(open('/proc/self/stat').read().split()[0]), flush=True)\n\
                           sys.stdin.readline()\n\
                           keep()\n\
                           print('done', flush=True)\n\
                           sys.stdin.readline()\n";
    // A bytes object has a header of 33 bytes.
    const BYTES: u64 = 33 + 2003;
    let workload = Workload::spawn(python.args(["-c", PROGRAM]))?;
    let (pid, bytes) = (workload.pid(), BYTES.to_string());
    let options = ["-j", "-o", "0", "-z", &bytes, "-Z", &bytes, "3600"];
    let ended = trace(&options, workload, &pid)?;
    let said = ended.stderr.matches(expected).count();
    ensure!(said == 1, "said {said} times: {}", ended.stderr);
    let objects = ended.objects()?;
    let stacks = objects.iter().filter(|row| row["type"] == "stack");
    let mut blocks = 0;
    for stack in stacks {
        let frames = stack["user_frames"].as_array().context("no frames")?;
        ensure!(stack["truncated"].is_null(), "not complete: {stack}");
        ensure!(!frames.iter().any(|frame| is_python(&frame)), "{stack}");
        blocks += stack["allocations"].as_u64().unwrap_or_default();
    }
    ensure!(blocks == 1009, "{blocks}: {ended:?}");
    Ok(())
}

fn native_frames_are_left_when_asked_for() -> Result<()> {
    let folder = harness::scratch()?;
    let path = folder.path().join("truth");
    let frames = |option: &str| -> Result<(usize, usize)> {
        let workload =
            Workload::spawn(Command::new("python3").arg(script("frames.py")).arg(&path))?;
        let pid = workload.pid();
        let ended = trace(&[&EACH_BLOCK[..], &[option]].concat(), workload, &pid)?;
        let objects = ended.objects()?;
        let all = objects
            .iter()
            .filter_map(|row| row["user_frames"].as_array())
            .flatten();
        let all: Vec<_> = all.collect();
        let python = all.iter().copied().filter(is_python).count();
        Ok((python, all.len() - python))
    };
    let (python, native) = frames("--interpreters=auto")?;
    let (as_many, with_loops) = frames("--interpreters=all")?;
    ensure!(
        python > 1000 && as_many > 1000 && with_loops > native,
        "{python} and {native}, {as_many} and {with_loops}"
    );
    let (none, _) = frames("--interpreters=off")?;
    ensure!(none == 0, "{none}");
    Ok(())
}
