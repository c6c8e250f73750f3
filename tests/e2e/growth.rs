//! heapscan --growth, on programs whose memory behaves as their label says, and its verdicts on them.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{self, Tool, Workload};
use crate::verdict;

/// Labels of the workload's programs, with the expected verdicts. Where the cause is not that of the heap, it follows.
/// A sawtooth is a burst where it is seen at its highest and its lowest points.
const LABELS: &[(&str, &str)] = &[
    ("leak", "leak"),
    ("leak-medium", "leak"),
    ("leak-large", "leak"),
    ("leak-thread", "leak"),
    ("leak-churn", "leak"),
    ("leak-part", "unbounded"),
    ("leak-fragments", "fragmentation"),
    ("unbounded", "unbounded"),
    ("deque", "unbounded"),
    ("vector", "unbounded"),
    ("lru", "steady"),
    ("sawtooth", "steady|burst"),
    ("warm-up", "warm_up"),
    ("burst", "burst"),
    ("touch", "elsewhere in_use"),
    ("fragments", "fragmentation free"),
    ("fragments-large", "fragmentation free"),
    ("retained", "fragmentation free"),
    ("arenas", "fragmentation free_in_arenas"),
    ("threads", "elsewhere stacks"),
    ("stack", "elsewhere stacks"),
    ("forks", "fork_server"),
    ("protected", "growing"),
    ("break", "elsewhere mapped"),
    ("mapped", "elsewhere mapped"),
    ("huge", "elsewhere mapped"),
    ("shared", "elsewhere shared"),
    ("shm", "elsewhere shared"),
    ("memfd", "elsewhere shared"),
    ("file", "elsewhere shared"),
    ("copied", "elsewhere files"),
    ("idle", "steady"),
];
/// Labels of programs that leak beside other growth, which is larger.
const LEAKS_BESIDE: [&str; 2] = ["leak-part", "leak-fragments"];
/// Number of programs that are watched at the same time, and for how many seconds.
const AT_ONCE: usize = 11;
const SECONDS: u64 = 10;
/// Permitted number of wrong verdicts: 5 % of all programs.
const WRONG: usize = LABELS.len() / 20;

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "heapscan::growth":
        labelled_programs_are_told_apart [Once],
        programs_of_allocators_are_told_apart [Once],
        programs_of_runtimes_are_told_apart [Host],
        types_that_grow_are_told_with_their_rate [Once],
        a_held_type_is_told_with_what_holds_it [Once],
        growth_outside_of_the_heap_is_told_by_its_part [Once],
        cycles_of_python_are_no_cache [Once],
        what_protected_memory_may_refer_to_is_not_judged [Once],
        growth_ends_early_by_a_signal_or_with_the_process [Once],
        the_clock_ends_a_run [Once],
        what_becomes_another_program_is_refused [Once],
        the_growth_of_a_process_is_a_table [Once],
    }
}

/// Starts a program, and heapscan on it. When the function returns, heapscan has a first image, and the program works.
fn watch(label: &str, seed: u64, seconds: u64, args: &[&str]) -> Result<(Workload, Tool)> {
    let milliseconds = (1000 * seconds).to_string();
    let program = [label, &milliseconds, &seed.to_string()];
    monitor(Workload::start("growth", &program)?, seconds, args)
}

/// Starts heapscan on a program that waits, and then lets the program work, as [`watch`] does.
fn monitor(mut workload: Workload, seconds: u64, args: &[&str]) -> Result<(Workload, Tool)> {
    let (pid, seconds) = (workload.pid(), seconds.to_string());
    let own = ["-p", &pid, "--growth", &seconds, "--max-pause", "60000"];
    let mut tool = Tool::start("heapscan", &[&own[..], args].concat())?;
    tool.wait_for_stderr("is monitored for")?;
    workload.go()?;
    Ok((workload, tool))
}

/// Ends a program, and returns the facts about its work.
fn end(mut workload: Workload) -> Result<HashMap<String, String>> {
    workload.go()?;
    let facts = workload.done()?;
    ensure!(workload.finish()?.success(), "it failed");
    Ok(facts)
}

fn row<'a>(rows: &'a [Value], name: &str) -> Result<&'a Value> {
    let row = rows.iter().find(|row| row["name"] == name);
    row.with_context(|| format!("no {name} in {rows:#?}"))
}

fn number(row: &Value, name: &str) -> Result<f64> {
    let number = row[name].as_f64();
    number.with_context(|| format!("no {name} in {row}"))
}

/// Returns the verdict and, if they are expected to follow it, the cause.
fn answer(head: &Value, expected: &str) -> String {
    let text = |name: &str| head[name].as_str().unwrap_or("none").to_owned();
    match expected.contains(' ') {
        true => format!("{} {}", text("verdict"), text("cause")),
        false => text("verdict"),
    }
}

fn labelled_programs_are_told_apart() -> Result<()> {
    let mut wrong = Vec::new();
    let programs: Vec<_> = (101..).zip(LABELS).collect();
    // Heaps that take longest to examine are next to each other in the list, and not at the same time.
    let batches = programs.len().div_ceil(AT_ONCE);
    for first in 0..batches {
        let programs: Vec<_> = programs.iter().skip(first).step_by(batches).collect();
        let watch = |(seed, (label, _)): &&(u64, &(&str, _))| watch(label, *seed, SECONDS, &["-j"]);
        let watched: Result<Vec<_>> = programs.iter().map(watch).collect();
        for ((_, (label, expected)), (workload, tool)) in programs.iter().zip(watched?) {
            let ended = tool.wait()?;
            end(workload)?;
            let head = &ended.objects()?[0];
            let lost = head["lost_new_bytes"].as_u64();
            let is_beside = LEAKS_BESIDE.contains(label);
            let is_right = expected.split('|').any(|one| one == answer(head, expected));
            if !is_right || is_beside && lost < Some(64 << 10) {
                wrong.push(format!("{label}: {head}, {}", ended.stderr));
            }
        }
    }
    println!("{} programs were judged wrong", wrong.len());
    ensure!(wrong.len() <= WRONG, "{}", wrong.join("\n"));
    Ok(())
}

/// Watches programs that speak the workloads' protocol, all at once, and expects their verdicts.
fn expect_verdicts(programs: Vec<(Command, &str)>) -> Result<()> {
    let mut watched = Vec::new();
    for (mut command, expected) in programs {
        let workload = Workload::spawn(&mut command)?;
        let (workload, tool) = monitor(workload, SECONDS, &["-j"])?;
        watched.push((command, expected, workload, tool));
    }
    let mut wrong = Vec::new();
    for (command, expected, workload, tool) in watched {
        let ended = tool.wait()?;
        end(workload)?;
        let head = &ended.objects()?[0];
        if answer(head, expected) != expected {
            wrong.push(format!("{command:?}: {head}, {}", ended.stderr));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Where the allocator's heap is not walked, its memory is known as memory that is mapped.
fn programs_of_allocators_are_told_apart() -> Result<()> {
    let preloaded = |library: &str, label: &str| {
        let mut command = Command::new(harness::workload("growth"));
        command.args([label, &(1000 * SECONDS).to_string(), "7"]);
        command.env("LD_PRELOAD", library);
        command
    };
    let musl = |how: &str| {
        let mut command = Command::new(harness::workload("growing-musl"));
        command.arg(how);
        command
    };
    expect_verdicts(vec![
        (preloaded("libjemalloc.so.2", "leak"), "leak"),
        (preloaded("libjemalloc.so.2", "unbounded"), "unbounded"),
        (
            preloaded("libtcmalloc_minimal.so.4", "unbounded"),
            "elsewhere mapped",
        ),
        (
            preloaded(harness::mimalloc(), "unbounded"),
            "elsewhere mapped",
        ),
        (musl("lose"), "leak"),
        (musl("keep"), "unbounded"),
    ])
}

fn programs_of_runtimes_are_told_apart() -> Result<()> {
    let folder = harness::scratch()?;
    let run = |program: &str| {
        let mut command = Command::new(program);
        command.current_dir(folder.path());
        command
    };
    let source = |name: &str| harness::sources().join(name);
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/go-cache");
    let mut go = run("go");
    go.args(["build", "-o", "growing"])
        .arg(source("growing.go"));
    go.envs([("GOCACHE", &*cache), ("GOPATH", folder.path())]);
    go.env("GOTOOLCHAIN", "local");
    let mut javac = run("javac");
    javac.args(["-d", "."]).arg(source("Growing.java"));
    for mut compiler in [go, javac] {
        let output = compiler.output().with_context(|| format!("{compiler:?}"))?;
        ensure!(output.status.success(), "{compiler:?}: {output:?}");
    }
    let script = |program: &str, name: &str, args: &[&str]| {
        let mut command = run(program);
        command.arg(source(name)).args(args);
        command
    };
    let mut java = run("java");
    java.args(["-Xmx400m", "-XX:+UseSerialGC", "Growing"]);
    expect_verdicts(vec![
        (script("python3", "growing.py", &["cycles"]), "cycles"),
        (script("python3", "growing.py", &["cache"]), "unbounded"),
        (script("python3", "growing.py", &["native"]), "leak"),
        (script("node", "growing.js", &[]), "elsewhere runtime"),
        (java, "elsewhere runtime"),
        (
            run(&folder.path().join("growing").display().to_string()),
            "elsewhere runtime",
        ),
    ])
}

fn types_that_grow_are_told_with_their_rate() -> Result<()> {
    let (workload, tool) = watch("leak", 7, 7, &["-j", "-T", "1000"])?;
    let rows = tool.wait()?.objects()?;
    let facts = end(workload)?;
    let head = &rows[0];
    ensure!(head["verdict"] == "leak", "{head}");
    ensure!(head["types"] == rows.len() - 1, "{head}");
    let lost = row(&rows, "shop::request")?;
    ensure!(
        lost["trend"] == "growing" && lost["kind"] == "class",
        "{lost}"
    );
    ensure!(
        lost["survival_percent"] == 100.0 && lost["referenced_by"].is_null(),
        "{lost}"
    );
    // A block of the class takes 216 bytes. A register or the stack can still refer to the last few blocks.
    let (blocks, lost_blocks) = (number(lost, "blocks")?, number(lost, "lost_blocks")?);
    ensure!(number(lost, "last")? == blocks * 216.0, "{lost}");
    ensure!(
        lost_blocks <= blocks && lost_blocks >= blocks - 60.0,
        "{lost}"
    );
    let per_second =
        facts["blocks"].parse::<f64>()? / facts["milliseconds"].parse::<f64>()? * 1000.0;
    let expected = per_second * 216.0;
    let (low, high) = (number(lost, "low")?, number(lost, "high")?);
    ensure!(
        low > 0.8 * expected && high < 1.2 * expected && low < high,
        "{low} to {high}, not {expected}"
    );
    let points = head["points"].as_array().context("no points")?;
    ensure!(points.len() >= 4, "{head}");
    for name in ["shop::entry", "shop::item"] {
        let steady = row(&rows, name)?;
        ensure!(
            steady["trend"] == "steady" && steady["lost_blocks"] == 0,
            "{steady}"
        );
    }
    Ok(())
}

fn a_held_type_is_told_with_what_holds_it() -> Result<()> {
    let (workload, tool) = watch("unbounded", 7, 7, &["-j", "-T", "1000"])?;
    let rows = tool.wait()?.objects()?;
    end(workload)?;
    ensure!(
        rows[0]["verdict"] == "unbounded" && rows[0]["lost_new_bytes"].is_u64(),
        "{}",
        rows[0]
    );
    for name in [
        "shop::session",
        "std::string buffer of shop::session",
        "std::vector buffer of shop::session",
    ] {
        let held = row(&rows, name)?;
        ensure!(held["trend"] == "growing", "{held}");
        let holder = held["referenced_by"].as_str().context("no holder")?;
        ensure!(holder.contains("growth`sessions"), "{held}");
    }
    Ok(())
}

/// Checks that the parts of the resident memory add up to all of it, and returns the growth of a part.
fn growth_of_part(head: &Value, part: &str) -> Result<f64> {
    let parts = head["parts"].as_array().context("no parts")?;
    for end in ["first", "last"] {
        let sum: Result<f64> = parts.iter().map(|part| number(part, end)).sum();
        let (sum, all) = (sum?, number(&head["resident_bytes"], end)?);
        ensure!(sum == all, "{sum} of {all}: {head}");
    }
    let row = parts.iter().find(|row| row["part"] == part);
    let row = row.with_context(|| format!("no {part} in {head}"))?;
    Ok(number(row, "last")? - number(row, "first")?)
}

fn growth_outside_of_the_heap_is_told_by_its_part() -> Result<()> {
    for part in ["mapped", "shared"] {
        let (workload, tool) = watch(part, 7, 3, &["-j"])?;
        let rows = tool.wait()?.objects()?;
        end(workload)?;
        let head = &rows[0];
        ensure!(
            head["verdict"] == "elsewhere" && head["cause"] == part,
            "{head}"
        );
        let grown = growth_of_part(head, part)?;
        let all = &head["resident_bytes"];
        let all = number(all, "last")? - number(all, "first")?;
        ensure!(grown > 0.9 * all && grown % 65536.0 == 0.0, "{head}");
    }
    Ok(())
}

fn cycles_of_python_are_no_cache() -> Result<()> {
    let folder = harness::scratch()?;
    for (how, verdict) in [("cycles", "cycles"), ("cache", "unbounded")] {
        let mut python = Command::new("python3");
        let script = harness::sources().join("growing.py");
        let mut workload = Workload::spawn(python.current_dir(folder.path()).arg(script).arg(how))?;
        let args = [
            "-jp",
            &workload.pid(),
            "--growth",
            "7",
            "--max-pause",
            "60000",
        ];
        let mut tool = Tool::start("heapscan", &args)?;
        tool.wait_for_stderr("is monitored for")?;
        workload.go()?;
        let rows = tool.wait()?.objects()?;
        ensure!(rows[0]["verdict"] == verdict, "{how}: {}", rows[0]);
        growth_of_part(&rows[0], "in_use")?;
        let next = rows[0]["next"].as_str().unwrap_or_default();
        // The texts that the objects have grow faster.
        ensure!(next.ends_with("--why Node"), "{next}");
        expect_next_to_answer(&workload, next)?;
        if how == "cache" {
            let nodes = row(&rows, "Node")?;
            ensure!(
                nodes["referenced_by"] == "Python global __main__.pairs",
                "{nodes}"
            );
            expect_lists_of_records(&workload)?;
        }
        end(workload)?;
    }
    Ok(())
}

/// Expects that the next command names blocks by --why, and finds them.
fn expect_next_to_answer(workload: &Workload, next: &str) -> Result<()> {
    let own = format!("heapscan -p {} --why ", workload.pid());
    let question = next
        .strip_prefix(&own)
        .with_context(|| format!("{next:?}"))?;
    let args = ["-jp", &workload.pid(), "--max-pause", "60000", "--why"];
    let question = question.trim_matches('\'');
    let rows = harness::run("heapscan", &[&args[..], &[question]].concat())?.objects()?;
    let why = rows.iter().find(|row| row["type"] == "why");
    let blocks = why.and_then(|why| why["blocks"].as_u64());
    ensure!(blocks > Some(100), "{next}: {why:?}");
    Ok(())
}

/// Expects that the lists of the objects of Record are shown as held by these, although other blocks are of the same
/// type.
fn expect_lists_of_records(workload: &Workload) -> Result<()> {
    let pid = workload.pid();
    let args = verdict::on("-jp", &pid);
    let rows = harness::run("heapscan", &args)?.objects()?;
    let lists = row(&rows, "owned by list")?;
    let chain = lists["chain"].as_array().context("no chain")?;
    let is_record = |holder: &Value| {
        holder
            .as_str()
            .is_some_and(|one| one.starts_with("Record ["))
    };
    ensure!(chain.iter().any(is_record), "{lists}");
    ensure!(number(lists, "path_percent")? > 50.0, "{lists}");
    let next = rows.last().context("no rows")?;
    ensure!(next["type"] == "next", "{next}");
    expect_next_to_answer(workload, next["command"].as_str().unwrap_or_default())
}

fn what_protected_memory_may_refer_to_is_not_judged() -> Result<()> {
    let (workload, tool) = watch("protected", 7, 4, &["-j", "-T", "1000"])?;
    let rows = tool.wait()?.objects()?;
    end(workload)?;
    ensure!(
        rows[0]["verdict"] == "growing" && rows[0]["lost_new_bytes"].is_null(),
        "{}",
        rows[0]
    );
    let growing = row(&rows, "shop::request")?;
    ensure!(growing["lost_blocks"].is_null(), "{growing}");
    Ok(())
}

fn growth_ends_early_by_a_signal_or_with_the_process() -> Result<()> {
    // Before heapscan has three images, it gives no verdict.
    let (workload, tool) = watch("unbounded", 7, 600, &["-j"])?;
    // The examination has to keep pace with the clock.
    ensure!(tool.nice()? == -10, "{}", tool.nice()?);
    tool.signal(Signal::SIGINT)?;
    let ended = tool.wait()?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    ensure!(
        ended.stderr.contains(" too few, growth requires 3"),
        "{ended:?}"
    );
    // With three or more images, the verdict is based on those taken so far.
    end(workload)?;
    let (workload, tool) = watch("unbounded", 7, 12, &["-j"])?;
    thread::sleep(Duration::from_secs(7));
    tool.signal(Signal::SIGINT)?;
    let ended = tool.wait()?;
    let rows = ended.objects()?;
    // On a busy machine, there may be no time to find what refers to the blocks.
    let verdict = match ended
        .stderr
        .contains("what references new blocks is unknown")
    {
        true => "growing",
        false => "unbounded",
    };
    ensure!(
        rows[0]["verdict"] == verdict && number(&rows[0], "seconds")? < 11.0,
        "{}",
        rows[0]
    );
    end(workload)?;
    let (workload, tool) = watch("unbounded", 7, 12, &["-j"])?;
    thread::sleep(Duration::from_secs(8));
    end(workload)?;
    let rows = tool.wait()?.objects()?;
    ensure!(
        rows[0]["verdict"] == "growing" && rows[0]["lost_new_bytes"].is_null(),
        "{}",
        rows[0]
    );
    Ok(())
}

/// Expects a run to take its time, and to end soon after a signal, although it takes seconds to examine the blocks.
fn the_clock_ends_a_run() -> Result<()> {
    const PERIOD: f64 = 4.0;
    /// What a busy machine may withhold from the tool's end.
    const SLACK: f64 = 0.5;
    let workload = Workload::start("many", &["3000017", "1009"])?;
    let run = |period: &str| {
        let args = ["-p", &workload.pid(), "--max-pause", "60000", "--growth"];
        Tool::start("heapscan", &[&args[..], &[period]].concat())
    };
    let begun = Instant::now();
    let ended = run(&PERIOD.to_string())?.wait()?;
    let took = begun.elapsed().as_secs_f64();
    ensure!(
        (0.9 * PERIOD..1.1 * PERIOD + SLACK).contains(&took),
        "{took} s: {ended:?}"
    );
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        let mut tool = run("600")?;
        tool.wait_for_stderr("is monitored for")?;
        tool.signal(signal)?;
        let begun = Instant::now();
        let ended = tool.wait()?;
        let took = begun.elapsed().as_secs_f64();
        ensure!(took < 1.0 + SLACK, "{signal}: {took} s: {ended:?}");
    }
    Ok(())
}

fn what_becomes_another_program_is_refused() -> Result<()> {
    let mut shell = Command::new("sh");
    let program = harness::workload("growth");
    let script = format!(
        "echo ready $$; read line; exec {} idle 4000 7",
        program.display()
    );
    let mut workload = Workload::spawn(shell.args(["-c", &script]))?;
    let mut tool = Tool::start("heapscan", &["-p", &workload.pid(), "--growth", "3"])?;
    tool.wait_for_stderr("is monitored for")?;
    workload.go()?;
    workload.wait_ready()?;
    let ended = tool.wait()?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    ensure!(
        ended.stderr.contains("has executed another program"),
        "{ended:?}"
    );
    Ok(())
}

fn the_growth_of_a_process_is_a_table() -> Result<()> {
    let (workload, tool) = watch("leak", 7, 7, &["-T", "2"])?;
    let ended = tool.wait()?;
    end(workload)?;
    ensure!(ended.status.success(), "{ended:?}");
    let lines: Vec<_> = ended.stdout.lines().collect();
    let heading = lines.iter().position(|line| line.starts_with("TREND "));
    let heading = heading.with_context(|| format!("no table: {ended:?}"))?;
    ensure!(lines.len() == heading + 3, "{ended:?}");
    ensure!(lines[0].starts_with("growth of growth (pid "), "{ended:?}");
    ensure!(lines[heading - 2].starts_with("a leak: +"), "{ended:?}");
    let first = lines[heading + 1];
    ensure!(
        first.starts_with("growing ") && first.ends_with("  shop::request"),
        "{ended:?}"
    );
    harness::expect_refusal(
        "heapscan",
        &["-p", "1,2", "--growth", "60"],
        2,
        "must be the number of a process",
    )
}
