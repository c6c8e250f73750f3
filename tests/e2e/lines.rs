//! Source lines, inlined calls, and symbols that were split from a program, wherever they are stored.

mod damaged;
mod debuginfod;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use memtools::code::elf;
use memtools::print::text;
use serde_json::{Value, json};

use crate::export;
use crate::harness::{self, Tool, ToolOutput, Workload};

pub(crate) fn tests() -> Vec<Trial> {
    let own = harness::tests! { "lines":
        inlined_calls_have_their_lines,
        profiles_have_lines_unasked [Once],
        what_was_split_is_found,
        what_was_split_from_another_build_is_not_taken,
        files_of_a_container_are_found_in_it,
        what_has_no_symbols_is_told,
    };
    [own, damaged::tests(), debuginfod::tests()]
        .into_iter()
        .flatten()
        .collect()
}

const COUNT: u64 = 1009;
const SIZE: u64 = 31;

/// Inlined frames of the workload's stack, if all debug information is found.
const INLINED: [&str; 2] = [
    "inner (inner.h:1009) [inlined]",
    "outer (outer.h:2003) [inlined]",
];

/// Starts a program that will call malloc or sbrk.
fn start(program: &mut Command, function: &str) -> Result<Workload> {
    Workload::spawn(program.args([function, &COUNT.to_string(), &SIZE.to_string()]))
}

/// Traces a program's work, from when the tool says that it is live.
fn trace(
    program: &mut Command,
    tool: &str,
    options: &[&str],
    env: &[(&str, &str)],
) -> Result<ToolOutput> {
    let mut program = start(program, if tool == "memleak" { "malloc" } else { "sbrk" })?;
    let pid = program.pid();
    let mut command = Command::new(harness::tool(tool));
    command
        .args(["-p", &pid])
        .args(options)
        .stdin(Stdio::null());
    command.envs(env.iter().copied());
    let mut tool = Tool::spawn(&mut command)?;
    tool.wait_for_any(&["probes in", "tracing brk(2)"])?;
    program.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(program.finish()?.success(), "the program was harmed");
    Ok(ended)
}

/// Returns the folded stacks of the calls of sbrk, as brkstack prints them. The counts must add up to the calls
/// that were made.
fn folded(
    program: &mut Command,
    options: &[&str],
    env: &[(&str, &str)],
) -> Result<(Vec<String>, ToolOutput)> {
    let ended = trace(program, "brkstack", &[&["-f"], options].concat(), env)?;
    let mut calls = 0;
    let mut stacks = Vec::new();
    for line in ended.stdout.lines() {
        let (stack, count) = line.rsplit_once(' ').context("no count")?;
        calls += count.parse::<u64>().with_context(|| line.to_owned())?;
        stacks.push(stack.to_owned());
    }
    ensure!(calls == COUNT, "{calls} calls: {ended:?}");
    Ok((stacks, ended))
}

fn workload(name: &str) -> Command {
    Command::new(harness::workload(name))
}

/// Returns the rows of a report, without the addresses of frames and the offsets in functions.
pub(crate) fn rows(report: &str) -> Vec<String> {
    let row = |line: &str| {
        let words = line.split_whitespace();
        let words = words.filter(|word| !word.starts_with("0x"));
        let words: Vec<&str> = words.filter_map(|word| word.split('+').next()).collect();
        words.join(" ")
    };
    report.lines().map(row).collect()
}

fn inlined_calls_have_their_lines() -> Result<()> {
    let options = ["-o", "0", "--lines", "60"];
    let ended = trace(&mut workload("lines"), "memleak", &options, &[])?;
    let told = rows(&ended.stdout);
    let mut told = told.iter().map(String::as_str);
    ensure!(told.any(|row| row.ends_with("allocations from stack")));
    let told: Vec<&str> = told.collect();
    let own = [
        "allocate (lines.c:3006) [lines]",
        "main (lines.c:4011) [lines]",
    ];
    let expected = [INLINED, own].concat();
    ensure!(told.starts_with(&expected), "{told:#?}");
    let bytes = format!("{} bytes in {COUNT} allocations", COUNT * SIZE);
    ensure!(ended.stdout.contains(&bytes), "{}", ended.stdout);

    let ended = trace(
        &mut workload("lines"),
        "memleak",
        &["-j", "-o", "0", "--lines", "60"],
        &[],
    )?;
    let stacks = export::rows(&ended, "stack")?;
    ensure!(
        stacks.len() == 1 && stacks[0]["bytes"] == COUNT * SIZE,
        "{stacks:#?}"
    );
    let frame = &stacks[0]["user_frames"][0];
    let inlined = |symbol, file, line| json!({"symbol": symbol, "file": file, "line": line});
    let fields = [
        ("symbol", json!("allocate")),
        ("file", json!("/usr/src/lines/lines.c")),
        ("line", json!(3006)),
        (
            "inlined",
            json!([
                inlined("inner", "/usr/src/lines/inner.h", 1009),
                inlined("outer", "/usr/src/lines/outer.h", 2003),
            ]),
        ),
    ];
    for (field, value) in fields {
        ensure!(frame[field] == value, "{field}: {frame:#}");
    }

    let (stacks, _) = folded(&mut workload("lines"), &["--lines"], &[])?;
    let is_whole = |stack: &String| stack.contains(";main;allocate;outer;inner;");
    ensure!(stacks.iter().all(is_whole), "{stacks:#?}");
    let (stacks, _) = folded(&mut workload("lines"), &["--lines", "--annotations"], &[])?;
    let is_marked = |stack: &String| stack.contains(";allocate;outer_[i];inner_[i];");
    ensure!(stacks.iter().all(is_marked), "{stacks:#?}");

    // Without --lines, no inlined calls are shown.
    let (stacks, _) = folded(&mut workload("lines"), &[], &[])?;
    ensure!(
        stacks.iter().all(|stack| !stack.contains("inner")),
        "{stacks:#?}"
    );
    let ended = trace(
        &mut workload("lines"),
        "memleak",
        &["-j", "-o", "0", "60"],
        &[],
    )?;
    ensure!(!ended.stdout.contains("\"inlined\""), "{}", ended.stdout);
    Ok(())
}

/// The report shows no lines, but its profile and its flame graph have them.
fn profiles_have_lines_unasked() -> Result<()> {
    let folder = harness::scratch()?;
    let path = |name: &str| folder.path().join(name).to_str().map(str::to_owned);
    let (profile, flame) = (path("a.pb.gz"), path("a.svg"));
    let (profile, flame) = (profile.context("UTF-8")?, flame.context("UTF-8")?);
    let options = ["-o", "0", "--export", &profile, "--export", &flame, "60"];
    let ended = trace(&mut workload("lines"), "memleak", &options, &[])?;
    ensure!(!ended.stdout.contains("inner"), "{}", ended.stdout);

    let lines = export::pprof(&profile, &["-lines", "-top"])?;
    let bytes = COUNT * SIZE;
    for (flat, sum, place) in [
        (bytes, bytes, "inner /usr/src/lines/inner.h:1009 (inline)"),
        (0, bytes, "outer /usr/src/lines/outer.h:2003 (inline)"),
        (0, bytes, "allocate /usr/src/lines/lines.c:3006"),
        (0, bytes, "main /usr/src/lines/lines.c:4011"),
    ] {
        let row = lines.lines().find(|row| row.ends_with(place));
        let row = row.with_context(|| format!("no {place} in {lines}"))?;
        let fields: Vec<&str> = row.split_whitespace().collect();
        let shown = |bytes: u64| {
            if bytes == 0 {
                "0".into()
            } else {
                format!("{bytes}B")
            }
        };
        ensure!(fields[0] == shown(flat) && fields[3] == shown(sum), "{row}");
    }
    let raw = export::pprof(&profile, &["-raw"])?;
    ensure!(raw.contains("[FN][FL][LN][IN]"), "{raw}");

    let image = fs::read_to_string(&flame)?;
    for name in ["inner", "outer", "allocate"] {
        let title = format!("<title>{name} ({} bytes, ", text::grouped(bytes));
        let drawn = image.split(&title).nth(1);
        let drawn = drawn.with_context(|| format!("no {title}"))?;
        let colour = drawn.split("fill=\"").nth(1).context("no colour")?;
        let is_inlined = colour.starts_with("rgb(200,170,240)");
        ensure!(is_inlined == (name != "allocate"), "{name}: {colour:.20}");
    }
    Ok(())
}

/// Stripped programs, whose debug information was split off in a different way each.
fn what_was_split_is_found() -> Result<()> {
    for name in ["lines-linked", "lines-dwp", "lines-dwz"] {
        let (stacks, ended) = folded(&mut workload(name), &["--lines"], &[])?;
        let is_whole = |stack: &String| stack.contains(";main;allocate;outer;inner;");
        ensure!(stacks.iter().all(is_whole), "{name}: {ended:?}");
        let ended = trace(&mut workload(name), "brkstack", &["--text", "--lines"], &[])?;
        for place in [INLINED[0], INLINED[1], "allocate (lines.c:3006)"] {
            ensure!(ended.stdout.contains(place), "{name}: {}", ended.stdout);
        }
        ensure!(
            !ended.stderr.contains("without symbols"),
            "{}",
            ended.stderr
        );
    }
    // lines-mini has symbols alone, which are shown without --lines, too.
    let (stacks, ended) = folded(&mut workload("lines-mini"), &[], &[])?;
    let is_named = |stack: &String| stack.contains(";_start;") && stack.contains(";main;allocate;");
    ensure!(stacks.iter().all(is_named), "{ended:?}");
    Ok(())
}

/// A program is copied with its split debug file, which is found by its name and checksum.
fn what_was_split_from_another_build_is_not_taken() -> Result<()> {
    let folder = harness::scratch()?;
    let program = folder.path().join("lines-linked");
    let debug = folder.path().join(".debug/lines-linked.debug");
    fs::create_dir(folder.path().join(".debug"))?;
    harness::copy(&harness::workload("lines-linked"), &program)?;
    harness::copy(&harness::workload("lines-linked.debug"), &debug)?;
    let (stacks, ended) = folded(&mut Command::new(&program), &["--lines"], &[])?;
    ensure!(
        stacks
            .iter()
            .all(|stack| stack.contains(";allocate;outer;inner;")),
        "{ended:?}"
    );

    // The additional byte belongs to no name, but the checksum covers every byte.
    let file = File::options().append(true).open(&debug)?;
    (&file).write_all(b"\0")?;
    let (stacks, ended) = folded(&mut Command::new(&program), &["--lines"], &[])?;
    ensure!(
        stacks.iter().all(|stack| !stack.contains("allocate")),
        "{ended:?}"
    );
    ensure!(
        ended.stderr.contains("in lines-linked;"),
        "{}",
        ended.stderr
    );
    Ok(())
}

/// Returns the path of the debug file that was split from a program, below a directory such as /usr/lib/debug, and
/// the program's build ID.
fn by_build_id(folder: &Path, program: &Path) -> Result<(PathBuf, String)> {
    let id = elf::build_id(&File::open(program)?).context("no build id")?;
    let id = text::hex(&id);
    let (first, rest) = id.split_at(2);
    Ok((
        folder
            .join(".build-id")
            .join(first)
            .join(format!("{rest}.debug")),
        id,
    ))
}

fn files_of_a_container_are_found_in_it() -> Result<()> {
    let root = harness::scratch()?;
    let program = root.path().join("lines-stripped");
    harness::copy(&harness::workload("lines-stripped"), &program)?;
    let (debug, _) = by_build_id(&root.path().join("usr/lib/debug"), &program)?;
    fs::create_dir_all(debug.parent().context("no folder")?)?;
    harness::copy(&harness::workload("lines-stripped.debug"), &debug)?;
    let mut command = Command::new("/lines-stripped");
    harness::in_root(&mut command, root.path());
    let (stacks, ended) = folded(&mut command, &["--lines"], &[])?;
    ensure!(
        stacks
            .iter()
            .all(|stack| stack.contains(";allocate;outer;inner;")),
        "{ended:?}"
    );
    ensure!(
        !ended.stderr.contains("without symbols"),
        "{}",
        ended.stderr
    );

    // A link out of the container's root, to a file in our root, leads nowhere.
    fs::remove_file(&debug)?;
    let outside = harness::scratch()?;
    let outside = outside.path().join("debug");
    harness::copy(&harness::workload("lines-stripped.debug"), &outside)?;
    std::os::unix::fs::symlink(&outside, &debug)?;
    let mut command = Command::new("/lines-stripped");
    harness::in_root(&mut command, root.path());
    let (stacks, ended) = folded(&mut command, &["--lines"], &[])?;
    ensure!(
        stacks.iter().all(|stack| !stack.contains("allocate")),
        "{ended:?}"
    );
    Ok(())
}

fn what_has_no_symbols_is_told() -> Result<()> {
    let folder = harness::scratch()?;
    let program = folder.path().join("lines-stripped");
    harness::copy(&harness::workload("lines-stripped"), &program)?;
    let (_, id) = by_build_id(folder.path(), &program)?;
    let ended = trace(&mut Command::new(&program), "brkstack", &["-j"], &[])?;
    let mut places = Vec::new();
    for stack in export::rows(&ended, "stack")? {
        let frames = stack["user_frames"].as_array().context("no frames")?;
        places.extend(frames.iter().map(|frame| frame["module_offset"].clone()));
        ensure!(
            frames.iter().all(|frame| frame["symbol"].is_null()),
            "{stack:#}"
        );
    }
    places.sort_by_key(Value::as_u64);
    places.dedup();
    let count = places.len();
    let line = format!(
        "brkstack: {count} places in code without symbols: {count} in lines-stripped (build id {id}); \
         for names install their debug symbols, or fetch them with --debuginfod"
    );
    ensure!(
        count > 1 && ended.stderr.contains(&line),
        "{ended:?}\nno {line}"
    );
    Ok(())
}
