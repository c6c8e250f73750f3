//! Programs that read what the tools write, each compared with the workload's own numbers: flamegraph.pl, speedscope, jq,
//! DuckDB.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use super::Files;
use crate::harness::{self, Tool, Workload, workload};
use crate::oomkill;
use crate::pressure::Group;

/// Calls that grow the heap by a page, that shrink it by as much, and that ask for its end.
const CALLS: [&str; 3] = ["23", "7", "5"];
const ROOT: &str = env!("CARGO_MANIFEST_DIR");

pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "export::consumers":
        flamegraph_pl_draws_the_same_sums [Host, Once],
        speedscope_shows_the_same_sums [Host, Once],
        lines_are_added_up_by_jq_and_duckdb [Host, Once],
        the_examples_of_the_manual_read_one_store [Host, Once],
    }
}

/// Traces the workload's calls of brk(2), with these options.
fn trace(options: &[&str]) -> Result<()> {
    let mut program = Workload::start("brk", &CALLS)?;
    let pid = program.pid();
    let mut tool = Tool::start("brkstack", &[&["-p", &pid], options].concat())?;
    tool.wait_for_stderr("tracing brk(2)")?;
    program.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(())
}

/// Runs a reader, and returns what it prints.
fn read(reader: &mut Command) -> Result<String> {
    let read = reader.output().context("the reader is not installed")?;
    ensure!(read.status.success(), "{read:?}");
    Ok(String::from_utf8(read.stdout)?)
}

fn flamegraph_pl_draws_the_same_sums() -> Result<()> {
    let files = Files::new()?;
    let folded = files.path("a.folded")?;
    trace(&["--export", &folded])?;
    let program = "/usr/share/perl5/Devel/NYTProf/flamegraph.pl";
    let image = read(Command::new("perl").arg(program).arg(&folded))?;
    for title in [
        "grow_heap (23 samples, ",
        "shrink_heap (7 samples, ",
        "ask_heap (5 samples, ",
        "all (35 samples, 100%)",
    ] {
        ensure!(image.contains(title), "no {title} in {image}");
    }
    Ok(())
}

/// Opens a file in speedscope, and returns the text of its table of functions.
fn speedscope(files: &Files, profile: &str) -> Result<String> {
    let home = harness::scratch()?;
    let script = files.path("profile.js")?;
    let encoded = read(Command::new("base64").args(["-w0", profile]))?;
    let load = format!("speedscope.loadFileFromBase64({profile:?}, {encoded:?})");
    fs::write(&script, load)?;
    let page = Path::new(ROOT).join("target/speedscope/dist/release/index.html");
    let page = format!(
        "file://{}#view=sandwich&localProfilePath={script}",
        page.display()
    );
    let mut chromium = harness::chromium(120, home.path());
    chromium
        .args([
            "--allow-file-access-from-files",
            "--enable-unsafe-swiftshader",
        ])
        .args(["--virtual-time-budget=20000", "--dump-dom"])
        .arg(page);
    let dom = read(&mut chromium)?;
    let texts = dom
        .split('<')
        .filter_map(|tag| Some(tag.split_once('>')?.1.trim()));
    let texts: Vec<&str> = texts.filter(|text| !text.is_empty()).collect();
    Ok(texts.join(" "))
}

fn speedscope_shows_the_same_sums() -> Result<()> {
    let files = Files::new()?;
    let (folded, pprof) = (files.path("a.folded")?, files.path("a.pb.gz")?);
    trace(&["--export", &folded, "--export", &pprof])?;
    for profile in [&folded, &pprof] {
        let shown = speedscope(&files, profile)?;
        for row in [
            "23 (66%) 23 (66%) grow_heap",
            "7 (20%) 7 (20%) shrink_heap",
            "5 (14%) 5 (14%) ask_heap",
        ] {
            ensure!(shown.contains(row), "no {row} in {shown}");
        }
    }
    Ok(())
}

/// The growth of 23 pages, and their shrinkage by 7.
fn lines_are_added_up_by_jq_and_duckdb() -> Result<()> {
    let files = Files::new()?;
    let lines = files.path("a.ndjson")?;
    trace(&["--events", "-j", "-o", &lines])?;
    let expected = "brkstack 35 65536";
    let filter =
        r#"map(select(.type == "call")) | "\(.[0].tool) \(length) \(map(.growth_bytes) | add)""#;
    let summed = read(Command::new("jq").args(["-rs", filter, &lines]))?;
    ensure!(summed.trim_end() == expected, "jq: {summed}");
    let query = "import duckdb, sys; print(*duckdb.sql(\"SELECT tool, count(*), sum(growth_bytes)::BIGINT \
         FROM read_json(?, format = 'newline_delimited', union_by_name = true) \
         WHERE type = 'call' GROUP BY tool\", params=[sys.argv[1]]).fetchone())";
    let mut duckdb = Command::new("/usr/bin/python3");
    duckdb
        .args(["-c", query, &lines])
        .env("PYTHONPATH", Path::new(ROOT).join("target/duckdb"));
    let summed = read(&mut duckdb)?;
    let text = fs::read_to_string(&lines)?;
    ensure!(summed.trim_end() == expected, "duckdb: {summed} of {text}");
    Ok(())
}

/// Runs the commands below the heading "JSON in one store", with the store in another folder. drsnoop, the first of them,
/// has a task that reclaims memory.
fn the_examples_of_the_manual_read_one_store() -> Result<()> {
    let manual = fs::read_to_string(Path::new(ROOT).join("docs/outputs.md"))?;
    let example = manual.split("## JSON in one store").nth(1);
    let example = example.and_then(|rest| rest.split("```\n").nth(1));
    let commands = example.context("no example")?;
    let files = Files::new()?;
    let stored = files.path("drsnoop.ndjson")?;
    ensure!(
        commands.starts_with("drsnoop -j -o /var/log/memtools/drsnoop.ndjson &\n"),
        "{commands}"
    );
    let group = Group::new("memtools-consumers", 8 << 20)?;
    group.forbid_swap()?;
    let mut hog = Workload::spawn(&mut group.command(&workload("hog"), &["64", "77"]))?;
    let pid = hog.pid();
    let mut tool = Tool::start("drsnoop", &["--memcg", "-p", &pid, "-j", "-o", &stored])?;
    tool.wait_for_stderr("tracing direct reclaim")?;
    oomkill::kill(&mut hog)?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");

    let lines = fs::read_to_string(&stored)?;
    let lines = lines.lines().map(serde_json::from_str);
    let lines: Vec<Value> = lines.collect::<Result<_, _>>()?;
    let stalls = lines.iter().filter(|line| line["type"] == "reclaim");
    let stalls: Vec<u64> = stalls
        .filter_map(|line| line["latency_ns"].as_u64())
        .collect();
    ensure!(!stalls.is_empty(), "nothing was reclaimed: {lines:?}");

    // The module of Python has DuckDB itself, but not its command.
    let python = "import duckdb, sys; print(*duckdb.sql(sys.argv[1]).fetchall()[0])";
    let duckdb = format!(
        "duckdb() {{ PYTHONPATH='{ROOT}/target/duckdb' /usr/bin/python3 -c '{python}' \"$2\"; }}\n"
    );
    let folder = Path::new(&stored).parent().context("no folder")?;
    let commands = commands.replace("/var/log/memtools", &folder.to_string_lossy());
    let (_, readers) = commands.split_once('\n').context("no readers")?;
    let printed = read(Command::new("sh").args(["-ec", &(duckdb + readers)]))?;
    let (long, summed) = printed
        .trim_end()
        .rsplit_once('\n')
        .unwrap_or(("", printed.trim_end()));
    let expected_long = stalls.iter().filter(|&&ns| ns > 1_000_000).count();
    ensure!(
        long.lines().count() == expected_long,
        "{stalls:?}: {printed}"
    );
    let words: Vec<&str> = summed.split(' ').collect();
    let [_, "hog", count, ms] = words[..] else {
        anyhow::bail!("{printed}");
    };
    ensure!(count.parse() == Ok(stalls.len()), "{stalls:?}: {printed}");
    let sum = stalls.iter().sum::<u64>() as f64 / 1e6;
    ensure!((ms.parse::<f64>()? - sum).abs() < 1e-6, "{sum}: {printed}");
    Ok(())
}
