//! The worked example of docs/tutorial.md, which must show what the tools show at each step.
//!
//! `MEMTOOLS_PICTURES=FOLDER` keeps the drawn pictures in FOLDER. The tutorial's are in docs/.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use crate::export;
use crate::harness::{self, Tool, ToolOutput, Workload};
use crate::lines::rows;

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "worked":
        the_heap_grows_by_summaries [Once],
        pages_come_with_the_input_and_the_summaries [Once],
        both_faults_have_their_lines [Once],
        the_mended_program_has_neither [Once],
        a_browser_shows_and_searches_the_pictures [Once],
    }
}

const TUTORIAL: &str = include_str!("../../docs/tutorial.md");

/// Number of records in the input, of a page each.
const RECORDS: u64 = 5003;
const RECORD: u64 = 4096;
/// Bytes that the program keeps of each record.
const SUMMARY: u64 = 2039;

/// A directory with the program's input.
struct Example(tempfile::TempDir);

impl Example {
    fn new() -> Result<Self> {
        let folder = harness::scratch()?;
        let record = "lorem ipsum dolor ".repeat(300);
        let input = record[..RECORD as usize].repeat(RECORDS as usize);
        fs::write(folder.path().join("records.txt"), input)?;
        Ok(Self(folder))
    }

    fn path(&self, name: &str) -> Result<String> {
        let path = self.0.path().join(name);
        Ok(path.to_str().context("not UTF-8")?.to_owned())
    }

    /// Traces a program until it has read all of its input, while it is still held.
    fn trace(&self, program: &str, tool: &str, options: &[&str]) -> Result<ToolOutput> {
        let mut program = Workload::start(program, &[&self.path("records.txt")?])?;
        let pid = program.pid();
        let mut tool = Tool::start(tool, &[&["-p", &pid], options].concat())?;
        tool.wait_for_any(&["Ctrl-C to end", "probes in"])?;
        let facts = program.work()?;
        ensure!(facts["records"] == RECORDS.to_string(), "{facts:?}");
        tool.interrupt()
    }

    /// Traces the faulty program, and draws a picture.
    fn draw(&self, name: &str, tool: &str, options: &[&str]) -> Result<(ToolOutput, String)> {
        let file = self.path(name)?;
        let ended = self.trace("loopleak", tool, &[&["--export", &*file], options].concat())?;
        ensure!(ended.status.success(), "{ended:?}");
        if let Some(folder) = env::var_os("MEMTOOLS_PICTURES") {
            fs::copy(&file, Path::new(&folder).join(name))?;
        }
        let picture = fs::read_to_string(file)?;
        let kept = docs().join(name);
        let kept = fs::read_to_string(&kept).with_context(|| format!("no {}", kept.display()))?;
        for function in ["main", "summarise"] {
            let title = format!("<title>{function} (");
            ensure!(picture.contains(&title), "no {function} in {name}");
            ensure!(kept.contains(&title), "no {function} in docs/{name}");
        }
        Ok((ended, picture))
    }
}

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs")
}

/// Returns the sum of all folded lines that contain a function.
fn through(ended: &ToolOutput, function: &str) -> u64 {
    let frame = format!(";{function};");
    let lines = ended.stdout.lines().filter(|line| line.contains(&frame));
    let numbers = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
    numbers.sum()
}

fn the_heap_grows_by_summaries() -> Result<()> {
    let example = Example::new()?;
    let (ended, _) = example.draw("brkstack.svg", "brkstack", &["--bytes", "-f"])?;
    let grown = through(&ended, "summarise");
    let kept = RECORDS * SUMMARY;
    // malloc takes 33 pages at a time, and some of the first pages were taken before.
    let nearly = kept - kept / 50..kept + kept / 50;
    ensure!(nearly.contains(&grown), "{grown}: {ended:?}");
    Ok(())
}

fn pages_come_with_the_input_and_the_summaries() -> Result<()> {
    let example = Example::new()?;
    let (ended, picture) = example.draw("faults.svg", "faults", &["-f"])?;
    let (slurp, summarise) = (through(&ended, "slurp"), through(&ended, "summarise"));
    let pages = RECORDS * RECORD / 4096;
    ensure!((pages..pages + 50).contains(&slurp), "{slurp}: {ended:?}");
    let kept = RECORDS * SUMMARY / 4096;
    ensure!(
        (kept..kept + kept / 50).contains(&summarise),
        "{summarise}: {ended:?}"
    );
    ensure!(picture.contains("<title>slurp ("), "no slurp");
    Ok(())
}

fn both_faults_have_their_lines() -> Result<()> {
    let example = Example::new()?;
    let (ended, picture) = example.draw("memleak.svg", "memleak", &["--lines", "-o", "0", "60"])?;
    ensure!(picture.contains("<title>slurp ("), "no slurp");
    let told: Vec<String> = rows(&ended.stdout)
        .into_iter()
        .filter(|row| row.contains("loopleak.c") || row.contains("allocations from stack"))
        .collect();
    // Both stacks are printed, each with its numbers, and the frames with source lines.
    ensure!(told.len() == 2 + 3 + 2, "{told:#?}");
    let tutorial = rows(TUTORIAL);
    for row in &told {
        let is_told = tutorial.iter().any(|line| line.ends_with(row.as_str()));
        ensure!(is_told, "docs/tutorial.md lacks: {row}");
    }
    for (blocks, bytes) in [(RECORDS, RECORDS * SUMMARY), (1, RECORDS * RECORD)] {
        let row = format!("{bytes} bytes in {blocks} allocations from stack");
        ensure!(told.contains(&row), "no {row} in {told:#?}");
    }
    Ok(())
}

fn the_mended_program_has_neither() -> Result<()> {
    let example = Example::new()?;
    let before = example.path("before.pb.gz")?;
    let ended = example.trace(
        "loopleak",
        "memleak",
        &["-o", "0", "--export", &before, "60"],
    )?;
    ensure!(ended.status.success(), "{ended:?}");
    let (_, bytes) = export::top(&before, "inuse_space")?;
    ensure!(bytes == RECORDS * (RECORD + SUMMARY), "{bytes}");
    let options = ["-o", "0", "--diff", &before, "--fail-on", "growth>0", "60"];
    let ended = example.trace("loopleak-fixed", "memleak", &options)?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(
        ended.stdout.contains("total 0 bytes in 0 blocks"),
        "{ended:?}"
    );
    // Compared the other way round, the growth is found.
    let after = example.path("after.pb.gz")?;
    example.trace(
        "loopleak-fixed",
        "memleak",
        &["-o", "0", "--export", &after, "60"],
    )?;
    let options = ["-o", "0", "--diff", &after, "--fail-on", "growth>1M", "60"];
    let ended = example.trace("loopleak", "memleak", &options)?;
    ensure!(ended.status.code() == Some(3), "{ended:?}");
    Ok(())
}

/// Returns a page as a browser has it once the page's scripts have run.
fn browsed(url: &str) -> Result<String> {
    let home = harness::scratch()?;
    let browser = harness::chromium(120, home.path())
        .args(["--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"])
        .arg(url)
        .output()?;
    ensure!(
        browser.status.success(),
        "no chromium: install chromium: {browser:?}"
    );
    Ok(String::from_utf8(browser.stdout)?)
}

fn a_browser_shows_and_searches_the_pictures() -> Result<()> {
    const FOUND: &str = "fill=\"rgb(230,0,230)\"";
    let example = Example::new()?;
    let drawn = example.path("new.svg")?;
    let options = ["-o", "0", "--export", &drawn, "60"];
    example.trace("loopleak", "memleak", &options)?;
    for picture in [PathBuf::from(&drawn), docs().join("memleak.svg")] {
        let url = format!("file://{}", picture.display());
        let shown = browsed(&url)?;
        for function in ["main", "slurp", "summarise", "new_summary"] {
            ensure!(
                shown.contains(&format!("<title>{function} (")),
                "no {function}"
            );
        }
        ensure!(!shown.contains(FOUND), "{shown}");
        // The picture's own search finds slurp and nothing else, with two thirds of all bytes.
        let searched = browsed(&format!("{url}?s=slurp"))?;
        let share = 100.0 * RECORD as f64 / (RECORD + SUMMARY) as f64;
        let matched = format!("Matched: {share:.1}%");
        ensure!(searched.contains(&matched), "no {matched} in {searched}");
        let rects = searched
            .split("<title>")
            .filter(|group| group.contains(FOUND));
        let found: Vec<&str> = rects.filter_map(|group| group.split(' ').next()).collect();
        ensure!(found == ["slurp"], "{found:?}");
    }
    Ok(())
}
