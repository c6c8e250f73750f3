//! Reports that are compared with the profile of an earlier run.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use crate::export;
use crate::harness::{self, Tool, ToolOutput, Workload, workload};
use crate::memleak;

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "comparison":
        builds_are_compared_by_the_names_of_functions [Once],
        growth_fails_where_none_is_permitted [Once],
        what_cannot_be_compared_is_refused_before_the_trace [Once],
        a_flame_graph_shows_what_has_grown [Once],
        reports_of_the_kernel_are_compared [Once],
    }
}

/// Size of each block, in bytes.
const SIZE: u64 = 4093;

/// Runs memleak on a build of the workload in which each function leaks `blocks` blocks. Each build has the same
/// file name, in a directory of its own.
fn leak(build: &str, blocks: u64, options: &[&str]) -> Result<ToolOutput> {
    let folder = harness::scratch()?;
    let program = folder.path().join("leaks");
    harness::copy(&workload(build), &program)?;
    let args = ["leak", &blocks.to_string(), &SIZE.to_string()];
    let mut process = Workload::spawn(Command::new(&program).args(args))?;
    let tool = memleak::attach(&process, &[&["-o", "0", "-j", "60"], options].concat())?;
    process.work()?;
    tool.interrupt()
}

/// Makes the profile of a run in which each function leaks `blocks` blocks. Returns the profile's path, and the report.
fn earlier(folder: &Path, blocks: u64) -> Result<(String, Value)> {
    let path = folder.join(format!("{blocks}.pb.gz"));
    let path = path.to_str().context("no UTF-8")?.to_owned();
    let ended = leak("alloc", blocks, &["--export", &path])?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok((path, one(&ended, "report")?))
}

/// Returns the only object of a type.
fn one(ended: &ToolOutput, kind: &str) -> Result<Value> {
    let objects = ended.objects()?;
    let mut found = objects.into_iter().filter(|object| object["type"] == kind);
    let object = found
        .next()
        .with_context(|| format!("no {kind}: {ended:?}"))?;
    ensure!(found.next().is_none(), "more than one {kind}");
    Ok(object)
}

fn number(object: &Value, field: &str) -> i64 {
    object[field].as_i64().unwrap_or(i64::MIN)
}

fn builds_are_compared_by_the_names_of_functions() -> Result<()> {
    let folder = harness::scratch()?;
    let (old, before) = earlier(folder.path(), 31)?;
    let new = folder.path().join("new.pb.gz");
    let new = new.to_str().context("no UTF-8")?;
    // The two builds have the same source, but other addresses and another way to call.
    for build in ["alloc", "alloc-nopie"] {
        let ended = leak(build, 53, &["--diff", &old, "--export", new, "-T", "1000"])?;
        ensure!(ended.status.success(), "{ended:?}");
        let (report, sums) = (one(&ended, "report")?, one(&ended, "difference")?);
        let changes = export::rows(&ended, "change")?;
        let mut by_function = HashMap::new();
        for change in &changes {
            let function = change["functions"][0].as_str().context("no name")?;
            let numbers = [
                "earlier_bytes",
                "bytes",
                "growth_bytes",
                "growth_allocations",
            ];
            by_function.insert(function, numbers.map(|field| number(change, field)));
        }
        let size = SIZE.cast_signed();
        let expected = [31 * size, 53 * size, 22 * size, 22];
        for function in ["leak_malloc", "leak_calloc", "leak_memalign"] {
            let found = by_function.get(function);
            ensure!(
                found == Some(&expected),
                "{build}, {function}: {changes:#?}"
            );
        }
        for field in ["bytes", "allocations"] {
            let (now, then) = (number(&report, field), number(&before, field));
            ensure!(number(&sums, field) == now, "{build}: {sums} of {report}");
            ensure!(
                number(&sums, &format!("earlier_{field}")) == then,
                "{build}: {sums}"
            );
            let growth = format!("growth_{field}");
            ensure!(number(&sums, &growth) == now - then, "{build}: {sums}");
            let of_stacks: i64 = changes.iter().map(|change| number(change, &growth)).sum();
            ensure!(of_stacks == now - then, "{build}: {sums}: {changes:#?}");
        }
        // `go tool pprof` compares both files, too.
        let base = format!("-diff_base={old}");
        let shown = export::pprof(new, &["-top", "-sample_index=inuse_space", &base])?;
        let line = format!("{}B", 22 * SIZE);
        let row = shown.lines().find(|row| row.ends_with(" leak_malloc"));
        ensure!(
            row.is_some_and(|row| row.contains(&line)),
            "{line}: {shown}"
        );
    }
    Ok(())
}

fn growth_fails_where_none_is_permitted() -> Result<()> {
    let folder = harness::scratch()?;
    let (old, _) = earlier(folder.path(), 31)?;
    let grown = 22 * SIZE;
    for (blocks, permitted, status) in [
        (53, "growth>0".to_owned(), 3),
        (53, format!("growth>{}", 13 * grown), 0),
        (53, format!("growth>{grown}"), 3),
        (31, "growth>0".to_owned(), 0),
        (7, "growth>0".to_owned(), 0),
    ] {
        let ended = leak("alloc", blocks, &["--diff", &old, "--fail-on", &permitted])?;
        ensure!(
            ended.status.code() == Some(status),
            "{blocks}, {permitted}: {ended:?}"
        );
        let told = ended.stderr.contains("--fail-on permits");
        ensure!(told == (status == 3), "{blocks}, {permitted}: {ended:?}");
    }
    // A command that fails has its own exit status.
    for (exit, status) in [(0, 3), (7, 7)] {
        let alloc = workload("alloc");
        let script = format!("{} leak 53 4093 </dev/null; exit {exit}", alloc.display());
        let command = format!("sh -c '{script}'");
        let args = ["-o", "0", "--children", "-c", &command, "--diff", &old];
        let ended = harness::run("memleak", &[&args[..], &["--fail-on", "growth>0"]].concat())?;
        ensure!(ended.status.code() == Some(status), "{ended:?}");
        ensure!(
            ended.stdout.contains(" from stack of alloc\n\t\tleak_"),
            "{ended:?}"
        );
    }
    Ok(())
}

fn what_cannot_be_compared_is_refused_before_the_trace() -> Result<()> {
    let folder = harness::scratch()?;
    let path = |name: &str| -> Result<String> {
        let path = folder.path().join(name);
        Ok(path.to_str().context("no UTF-8")?.to_owned())
    };
    let [missing, text, ran] = [path("missing")?, path("text")?, path("ran")?];
    fs::write(&text, "no profile\n")?;
    let calls = path("calls.pb.gz")?;
    let command = "sh -c :";
    let ended = harness::run("brkstack", &["-c", command, "--export", &calls])?;
    ensure!(ended.status.success(), "{ended:?}");
    let touch = format!("touch {ran}");
    for (profile, reason) in [
        (&missing, "No such file"),
        (&text, "it is no profile of pprof's format"),
        (&calls, "is of brk_calls, not of inuse_objects"),
    ] {
        let svg = path("a.svg")?;
        for (tool, files) in [
            ("memleak", &[][..]),
            ("memleak", &["--export", &svg]),
            ("faults", &["--export", &svg]),
        ] {
            // The other tools check the values of a profile when they write the flame graph.
            if profile == &calls && tool != "memleak" {
                continue;
            }
            let args = [&["-c", &touch, "--diff", profile], files].concat();
            let ended = harness::run(tool, &args)?;
            ensure!(ended.status.code() == Some(1), "{ended:?}");
            ensure!(ended.stderr.contains(reason), "{reason}: {ended:?}");
            ensure!(!Path::new(&ran).exists(), "{profile}: the command was run");
        }
    }
    for wrong in [
        &["--diff", &calls, "--fail-on", "growth<1"][..],
        &["--fail-on", "growth>1"],
        &["--diff", &calls, "--folded"],
    ] {
        let ended = harness::run("memleak", &[&["-c", &touch], wrong].concat())?;
        ensure!(ended.status.code() == Some(2), "{wrong:?}: {ended:?}");
    }
    let without_graph = ["-c", &touch, "--diff", &calls, "--export", "/tmp/x.pb.gz"];
    let ended = harness::run("faults", &without_graph)?;
    ensure!(ended.status.code() == Some(2), "{ended:?}");
    Ok(())
}

fn a_flame_graph_shows_what_has_grown() -> Result<()> {
    let folder = harness::scratch()?;
    let (old, _) = earlier(folder.path(), 31)?;
    let svg = folder.path().join("a.svg");
    let path = svg.to_str().context("no UTF-8")?;
    let mut colors = Vec::new();
    for blocks in [53, 31, 7] {
        let ended = leak("alloc", blocks, &["--export", path, "--diff", &old])?;
        ensure!(ended.status.success(), "{ended:?}");
        let image = fs::read_to_string(&svg)?;
        ensure!(image.contains("red has grown, blue has shrunk"), "{image}");
        let frame = image
            .split("<g>")
            .find(|frame| frame.contains("<title>leak_malloc ("));
        let frame = frame.context("no leak_malloc")?;
        let bytes = blocks * SIZE;
        let bytes = memtools::print::text::grouped(bytes);
        ensure!(
            frame.contains(&format!("leak_malloc ({bytes} bytes, ")),
            "{frame}"
        );
        let (_, color) = frame.split_once("fill=\"rgb(").context("no colour")?;
        let (color, _) = color.split_once(')').context("no colour")?;
        let color: Vec<u32> = color
            .split(',')
            .filter_map(|part| part.parse().ok())
            .collect();
        colors.push((color[0], color[2]));
    }
    let [grown, same, shrunk] = colors[..] else {
        unreachable!("three graphs");
    };
    ensure!(grown.0 > grown.1, "not red: {colors:?}");
    ensure!(same.0 == same.1, "not white: {colors:?}");
    ensure!(shrunk.0 < shrunk.1, "not blue: {colors:?}");
    Ok(())
}

/// Memory of the kernel is compared with the profile of a run just before. The sums must be those of both reports.
fn reports_of_the_kernel_are_compared() -> Result<()> {
    let folder = harness::scratch()?;
    let old = folder.path().join("old.pb.gz");
    let old = old.to_str().context("no UTF-8")?;
    let run = |options: &[&str]| -> Result<ToolOutput> {
        let mut tool = Tool::start(
            "memleak",
            &[&["-k", "-j", "-o", "0", "60"], options].concat(),
        )?;
        tool.wait_for_stderr("Attaching to kernel allocators")?;
        let ended = tool.interrupt()?;
        ensure!(ended.status.success(), "{ended:?}");
        Ok(ended)
    };
    let before = one(&run(&["--export", old])?, "report")?;
    let ended = run(&["--diff", old])?;
    let (sums, report) = (one(&ended, "difference")?, one(&ended, "report")?);
    ensure!(sums["earlier_bytes"] == before["bytes"], "{sums}: {before}");
    ensure!(sums["bytes"] == report["bytes"], "{sums}: {report}");
    Ok(())
}
