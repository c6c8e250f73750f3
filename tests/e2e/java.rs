//! Java frames in user stacks, against Java's own record of where each block was allocated (`StackWalker`).

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use crate::harness::{self, Tool, ToolOutput};
use crate::java_kits::{BYTES, COUNT, Java, kits};

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "java":
        frames_are_those_that_java_has [Host],
        frames_of_virtual_threads_are_those_that_java_has [Host],
        names_are_those_of_the_perf_map [Host],
        inlined_functions_are_shown [Host],
        stacks_of_page_faults_are_complete [Host],
        without_interpreters_stacks_end_in_generated_code [Host],
    }
}

/// Number of pages that the workload touches.
const PAGES: &str = "5003";

/// Returns the method that a frame executes, such as `Frames.take`. None for native code and stubs.
pub(crate) fn method(frame: &Value) -> Option<&str> {
    let is_native = frame["module"]
        .as_str()
        .is_some_and(|module| module.contains(".so") || module == "java" || module == "[vdso]");
    if is_native {
        return None;
    }
    method_named(frame["symbol"].as_str()?)
}

/// Returns the method in a name with types: `Frames$Plain.run` of `void Frames$Plain.run(int, int)`.
fn method_named(name: &str) -> Option<&str> {
    let (head, _) = name
        .split_once('(')
        .filter(|(head, _)| head.contains(' '))?;
    let (_, method) = head.rsplit_once(' ')?;
    method.contains('.').then_some(method)
}

/// Returns the methods that are inlined into a frame's method, and then this method, as the workload writes them.
fn methods_of_frame(frame: &Value) -> impl Iterator<Item = String> {
    let inlined = frame["inlined"].as_array().into_iter().flatten();
    let inlined = inlined.map(|call| {
        let name = call["symbol"].as_str().unwrap_or_default();
        with_line(method_named(name).unwrap_or(name), call)
    });
    inlined.chain(method(frame).map(|method| with_line(method, frame)))
}

/// Returns a method with its line, if the line is known: `Frames.take (Frames.java:46)`.
fn with_line(method: &str, place: &Value) -> String {
    match (place["file"].as_str(), place["line"].as_u64()) {
        (Some(file), Some(line)) => format!("{method} ({file}:{line})"),
        _ => method.to_owned(),
    }
}

/// Whether a frame is the expected one. An expected frame that ends with `*)` matches any line.
fn frame_matches(found: &str, expected: &str) -> bool {
    match expected.strip_suffix("*)") {
        Some(start) => found.starts_with(start),
        None => found == expected,
    }
}

/// Whether the frames are the expected ones.
fn frames_match(found: &[String], expected: &[String]) -> bool {
    found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| frame_matches(a, b))
}

/// Returns the methods of a stack, innermost first.
fn methods_of(stack: &Value) -> Result<Vec<String>> {
    let frames = stack["user_frames"].as_array().context("no frames")?;
    Ok(frames.iter().flat_map(methods_of_frame).collect())
}

/// Returns the methods of a stack, innermost first. Fails if the stack is not complete.
fn methods(stack: &Value) -> Result<Vec<String>> {
    let frames = stack["user_frames"].as_array().context("no frames")?;
    let outermost = frames.last().context("no frame")?;
    // Where the C library has no symbols, its function that starts a thread has no name.
    let starts_thread = match outermost["symbol"].as_str() {
        Some(name) => ["clone3", "__clone3"].contains(&name),
        None => outermost["module"] == "libc.so.6",
    };
    ensure!(
        stack["truncated"].is_null() && starts_thread,
        "not complete: {stack}"
    );
    methods_of(stack)
}

/// Compares the stack of every block that the workload recorded, frame by frame.
pub(crate) fn expect_all(ended: &ToolOutput, truth: &HashMap<u64, Vec<String>>) -> Result<()> {
    let objects = ended.objects()?;
    let stacks = harness::stacks_of_blocks(&objects);
    for (address, expected) in truth {
        let stack = stacks
            .get(address)
            .with_context(|| format!("no block at {address:#x}: {}", ended.stderr))?;
        let found = methods(stack)?;
        ensure!(
            frames_match(&found, expected),
            "found {found:?}, not {expected:?}, in {stack}"
        );
    }
    let unwinding = summary(&objects)?;
    ensure!(unwinding["stacks"] == unwinding["complete"], "{unwinding}");
    Ok(())
}

/// Returns the summary of all stacks, which the tool prints at the end.
fn summary(objects: &[Value]) -> Result<&Value> {
    let mut rows = objects.iter();
    let summary = rows.find(|row| row["type"] == "unwinding");
    summary.context("no summary")
}

/// Frames are compared one by one: with the interpreter alone, with each compiler, with one code heap and with three.
fn frames_are_those_that_java_has() -> Result<()> {
    for kit in kits()? {
        let java = Java::compile(&kit)?;
        for options in [
            &["-XX:-Inline"][..],
            &["-Xint"],
            &["-XX:-Inline", "-XX:TieredStopAtLevel=1"],
            &["-XX:-Inline", "-XX:-TieredCompilation", "-Xcomp"],
            &["-XX:-Inline", "-XX:+UseSerialGC", "-XX:-SegmentedCodeCache"],
        ] {
            let ended = java.trace(options)?;
            expect_all(&ended, &java.truth()?)
                .with_context(|| format!("{} {options:?}", kit.display()))?;
        }
    }
    Ok(())
}

/// Frames of virtual threads are compared one by one, interpreted and compiled, up to where their callers are in
/// Java's heap; memleak says that they are there.
fn frames_of_virtual_threads_are_those_that_java_has() -> Result<()> {
    let mut kits = kits()?;
    kits.retain(|kit| has_virtual_threads(kit));
    ensure!(!kits.is_empty(), "no Java with virtual threads");
    for kit in kits {
        let java = Java::compile_class(&kit, "Virtual")?;
        for options in [&["-XX:-Inline"][..], &["-Xint"], &["-XX:-Inline", "-Xcomp"]] {
            let ended = java.trace(options)?;
            expect_up_to_heap(&ended, &java.truth()?)
                .with_context(|| format!("{} {options:?}", kit.display()))?;
        }
    }
    Ok(())
}

/// Whether a kit is of JDK 21 or later.
fn has_virtual_threads(kit: &Path) -> bool {
    let release = fs::read_to_string(kit.join("release")).unwrap_or_default();
    let version = release.lines().find_map(|line| {
        let version = line.strip_prefix("JAVA_VERSION=\"")?;
        version.split(['.', '"']).next()?.parse::<u32>().ok()
    });
    version.is_some_and(|version| version >= 21)
}

/// Compares the stack of every block that the threads of `Virtual` recorded. The stacks of the first thread
/// continue into its carrier thread. The stacks of the other threads end where their callers are in Java's heap.
fn expect_up_to_heap(ended: &ToolOutput, truth: &HashMap<u64, Vec<String>>) -> Result<()> {
    const IN_HEAP: &str = "a virtual thread's callers are in Java's heap";
    let objects = ended.objects()?;
    let stacks = harness::stacks_of_blocks(&objects);
    let mut whole = 0;
    for (address, expected) in truth {
        let stack = stacks
            .get(address)
            .with_context(|| format!("no block at {address:#x}: {}", ended.stderr))?;
        let found = methods_of(stack)?;
        let noted = if stack["truncated"].is_null() {
            whole += 1;
            found.get(..expected.len())
        } else {
            ensure!(stack["truncated"] == IN_HEAP, "{stack}");
            // The stack has at least Frames.take and its caller.
            ensure!(
                (5..expected.len()).contains(&found.len()),
                "{} of {} in {stack}",
                found.len(),
                expected.len()
            );
            Some(&found[..])
        };
        let is_noted = noted.is_some_and(|noted| frames_match(noted, &expected[..noted.len()]));
        ensure!(is_noted, "found {found:?}, not {expected:?}, in {stack}");
    }
    let unwinding = summary(&objects)?;
    let in_heap = unwinding["truncated_by_reason"]["in_java_heap"].as_u64();
    let in_heap = in_heap.context("not counted")?;
    ensure!(
        whole == COUNT && in_heap >= 2 * COUNT as u64,
        "{whole} whole, {unwinding}"
    );
    let complete = unwinding["complete"].as_u64().context("not counted")?;
    ensure!(unwinding["stacks"] == complete + in_heap, "{unwinding}");
    Ok(())
}

/// The names of compiled functions in HotSpot's own perf map equal the names that were read from HotSpot's memory.
fn names_are_those_of_the_perf_map() -> Result<()> {
    for kit in kits()? {
        let java = Java::compile(&kit)?;
        let mut workload = java.start(&["-XX:-Inline"], &[&COUNT.to_string()])?;
        let pid = workload.pid();
        let tool = [
            "-j", "-o", "0", "-T", "1000", "-z", BYTES, "-Z", BYTES, "-p", &pid, "3600",
        ];
        let mut tool = Tool::start("memleak", &tool)?;
        tool.wait_for_stderr("allocator: ")?;
        workload.work()?;
        let objects = tool.interrupt()?.objects()?;
        let map = Command::new(kit.join("bin/jcmd"))
            .args([&pid, "Compiler.perfmap"])
            .output()?;
        ensure!(map.status.success(), "{map:?}");
        let path = format!("/tmp/perf-{pid}.map");
        let map = fs::read_to_string(&path)?;
        let _ = fs::remove_file(path);
        workload.finish()?;
        let functions: BTreeMap<u64, &str> = map
            .lines()
            .filter_map(|line| {
                let (start, rest) = line.split_once(' ')?;
                let start = u64::from_str_radix(start.trim_start_matches("0x"), 16).ok()?;
                Some((start, rest.split_once(' ')?.1))
            })
            .collect();
        let frames = objects
            .iter()
            .filter_map(|row| row["user_frames"].as_array());
        let mut compared = 0;
        for frame in frames.flatten().filter(|frame| frame["kind"] == "native") {
            let (Some(_), Some(name)) = (method(frame), frame["symbol"].as_str()) else {
                continue;
            };
            let address = frame["address"].as_str().context("no address")?;
            let address = u64::from_str_radix(address.trim_start_matches("0x"), 16)?;
            let written = functions
                .range(..address)
                .next_back()
                .map(|(_, name)| *name);
            ensure!(written == Some(name), "{written:?} is called {name}");
            compared += 1;
        }
        ensure!(compared > 100, "{compared}: {objects:?}");
    }
    Ok(())
}

/// Functions that are inlined into their callers are shown in order, with each compiler.
fn inlined_functions_are_shown() -> Result<()> {
    for kit in kits()? {
        let java = Java::compile(&kit)?;
        for options in [
            &[][..],
            &["-XX:TieredStopAtLevel=1"],
            // The memory of discarded code is not reused before the report.
            &["-XX:-TieredCompilation", "-Xcomp", "-XX:-MethodFlushing"],
        ] {
            let ended = java.trace(options)?;
            expect_all(&ended, &java.truth()?)
                .with_context(|| format!("{} {options:?}", kit.display()))?;
            ensure!(
                ended.stdout.contains(r#""inlined":[{"#),
                "{options:?}: nothing was compiled in"
            );
        }
    }
    Ok(())
}

/// A frame may be half built when a fault happens: the first instructions of functions touch a new thread's stack
/// further down. Of two functions that call each other, none may be skipped.
fn stacks_of_page_faults_are_complete() -> Result<()> {
    const RECURSIVE: [&str; 2] = ["Frames.even", "Frames.odd"];
    for kit in kits()? {
        let java = Java::compile(&kit)?;
        for options in [
            &["-XX:-Inline", "-Xcomp", "-XX:TieredStopAtLevel=1"][..],
            &["-XX:-Inline", "-Xcomp", "-XX:-TieredCompilation"],
            &[],
        ] {
            let mut workload = java.start(options, &["7", PAGES])?;
            let pid = workload.pid();
            let mut tool = Tool::start("faults", &["-j", "-p", &pid])?;
            tool.wait_for_stderr("tracing")?;
            workload.work()?;
            let ended = Java::end(tool, workload)?;
            let objects = ended.objects()?;
            let context = || format!("{} {options:?}: {}", kit.display(), ended.stderr);
            let unwinding = objects.iter().find(|row| row["type"] == "unwinding");
            let unwinding = unwinding.with_context(context)?;
            let count = |value: &Value| value.as_u64().with_context(context);
            // HotSpot's own compilers have deeper stacks. The interpreter may be about to make a frame.
            let because = &unwinding["truncated_by_reason"];
            let deep = count(&because["depth"])?;
            let odd = count(&because["stack"])? + count(&because["no_code"])?;
            let stacks = count(&unwinding["stacks"])?;
            ensure!(
                stacks == count(&unwinding["complete"])? + deep + odd && odd <= stacks / 1000,
                "{}",
                context()
            );
            let mut half_built = 0;
            for stack in objects.iter().filter(|row| row["user_frames"].is_array()) {
                let frames = stack["user_frames"].as_array().context("no frames")?;
                let methods: Vec<Option<&str>> = frames.iter().map(method).collect();
                let recursive =
                    |at: usize| methods[at].is_some_and(|name| RECURSIVE.contains(&name));
                let skipped =
                    (1..methods.len()).any(|at| recursive(at) && methods[at - 1] == methods[at]);
                ensure!(!skipped, "{methods:?}: {}", context());
                half_built += u64::from(recursive(0));
            }
            ensure!(
                options.is_empty() || half_built > 20,
                "{half_built} faults of recursive functions: {}",
                context()
            );
        }
    }
    Ok(())
}

fn without_interpreters_stacks_end_in_generated_code() -> Result<()> {
    let java = Java::compile(&kits()?[0])?;
    let mut workload = java.start(&[], &["101"])?;
    let arguments = [
        "-j",
        "-o",
        "0",
        "-z",
        BYTES,
        "-Z",
        BYTES,
        "--interpreters=off",
    ];
    let mut tool = Tool::start(
        "memleak",
        &[&arguments[..], &["-p", &workload.pid()]].concat(),
    )?;
    tool.wait_for_stderr("allocator: ")?;
    workload.work()?;
    let ended = tool.interrupt()?;
    workload.finish()?;
    let objects = ended.objects()?;
    let stacks = objects.iter().filter(|row| row["type"] == "stack");
    let cut = stacks.filter(|stack| stack["truncated"] == "no unwind info: generated code");
    let blocks: u64 = cut.filter_map(|stack| stack["allocations"].as_u64()).sum();
    ensure!(blocks >= 3 * 101, "{blocks}: {ended:?}");
    Ok(())
}
