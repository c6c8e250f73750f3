//! Flame graphs and profiles, read by programs of other projects: `go tool pprof` and an XML parser.

mod consumers;
mod files;

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use memtools::print::text::grouped;
use serde_json::Value;

use crate::harness::{self, Cgroup, Tool, ToolOutput, Workload};

pub(crate) fn tests() -> Vec<Trial> {
    let own = harness::tests! { "export":
        a_heap_is_what_was_reported [Once],
        a_profile_is_as_its_format_is_published [Once],
        allocations_are_all_since_the_start [Once],
        the_kernels_heap_is_what_was_reported [Once],
        calls_and_bytes_of_brk [Once],
        kernel_frames_are_told_apart [Once],
        a_thread_is_told_by_its_name [Once],
        faults_have_both_numbers [Once],
        mappings_have_both_numbers [Once],
    };
    let parts = [own, consumers::tests(), files::tests()];
    parts.into_iter().flatten().collect()
}

/// Folder of the files that a tool writes.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Result<Self> {
        Ok(Self(harness::scratch()?))
    }

    fn path(&self, name: &str) -> Result<String> {
        let path = self.0.path().join(name);
        Ok(path.to_str().context("not UTF-8")?.to_owned())
    }

    /// Returns the options that ask for a flame graph and a profile.
    fn options(&self) -> Result<[String; 4]> {
        let (flame, pprof) = (self.path("a.svg")?, self.path("a.pb.gz")?);
        Ok(["--export".into(), flame, "--export".into(), pprof])
    }

    /// Reads the flame graph, after an XML parser has found it well-formed.
    fn flame(&self) -> Result<String> {
        let path = self.path("a.svg")?;
        let parsed = Command::new("python3")
            .args([
                "-c",
                "import sys, xml.dom.minidom as x; x.parse(sys.argv[1])",
            ])
            .arg(&path)
            .output()?;
        ensure!(parsed.status.success(), "{parsed:?}");
        Ok(fs::read_to_string(path)?)
    }

    fn top(&self, value: &str) -> Result<(HashMap<String, u64>, u64)> {
        top(&self.path("a.pb.gz")?, value)
    }

    fn pprof(&self, options: &[&str]) -> Result<String> {
        pprof(&self.path("a.pb.gz")?, options)
    }
}

/// Parses the output of `go tool pprof -top` for a profile, in a file or at a URL. Returns each function's own
/// number of this value, and the total.
pub(crate) fn top(profile: &str, value: &str) -> Result<(HashMap<String, u64>, u64)> {
    let text = pprof(profile, &["-top", &format!("-sample_index={value}")])?;
    // Example: Showing nodes accounting for 126883B, 100% of 126883B total
    let number = |text: &str| -> Result<u64> {
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        digits.parse().with_context(|| text.to_owned())
    };
    let (_, total) = text.split_once("% of ").with_context(|| text.clone())?;
    let total = number(total.split(' ').next().unwrap_or_default())?;
    let rows = text.lines().skip_while(|line| !line.contains("flat%"));
    let mut flat = HashMap::new();
    for row in rows.skip(1) {
        let fields: Vec<&str> = row.split_whitespace().collect();
        ensure!(fields.len() >= 6, "{row}");
        *flat.entry(fields[5..].join(" ")).or_insert(0) += number(fields[0])?;
    }
    flat.retain(|_, flat| *flat > 0);
    Ok((flat, total))
}

/// Returns the output of `go tool pprof` for a profile, in a file or at a URL.
pub(crate) fn pprof(profile: &str, options: &[&str]) -> Result<String> {
    let home = harness::scratch()?;
    let shown = Command::new("go")
        .args([
            "tool",
            "pprof",
            "-symbolize=none",
            "-nodefraction=0",
            "-nodecount=100000",
        ])
        .args(["-unit=B"])
        .args(options)
        .arg(profile)
        .env("HOME", home.path())
        .output()
        .context("no go: install golang-go")?;
    ensure!(shown.status.success(), "{shown:?}");
    Ok(String::from_utf8(shown.stdout)?)
}

/// Traces a workload from when the tool says that it is live until the workload's work is done.
fn trace(
    tool: &str,
    live: &str,
    workload: &[&str],
    options: &[&str],
    files: &Files,
) -> Result<ToolOutput> {
    let mut program = Workload::start(workload[0], &workload[1..])?;
    let pid = program.pid();
    let export = files.options()?;
    let export: Vec<&str> = export.iter().map(String::as_str).collect();
    let args = [&["-p", &pid], &export[..], options].concat();
    let mut tool = Tool::start(tool, &args)?;
    tool.wait_for_stderr(live)?;
    program.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(ended)
}

pub(crate) fn rows(ended: &ToolOutput, kind: &str) -> Result<Vec<Value>> {
    let mut rows = ended.objects()?;
    rows.retain(|row| row["type"] == kind);
    Ok(rows)
}

/// Returns the sum of a field over all rows.
pub(crate) fn sum(rows: &[Value], field: &str) -> u64 {
    rows.iter().filter_map(|row| row[field].as_u64()).sum()
}

/// Returns the sums of a field by the innermost user frame, named as `go tool pprof` names it.
pub(crate) fn by_leaf(rows: &[Value], field: &str) -> Result<HashMap<String, u64>> {
    let mut sums = HashMap::new();
    for row in rows {
        let frame = &row["user_frames"][0];
        let leaf = match (frame["symbol"].as_str(), frame["module"].as_str()) {
            (Some(name), _) => name.to_owned(),
            (None, module) => format!(
                "{}+{:#x}",
                module.with_context(|| row.to_string())?,
                frame["module_offset"]
                    .as_u64()
                    .with_context(|| row.to_string())?
            ),
        };
        *sums.entry(leaf).or_insert(0) += row[field].as_u64().context("no number")?;
    }
    sums.retain(|_, sum| *sum > 0);
    Ok(sums)
}

fn a_heap_is_what_was_reported() -> Result<()> {
    let files = Files::new()?;
    let options = ["-j", "-o", "0", "-T", "1000", "60"];
    let workload = ["alloc", "leak", "31", "4093"];
    let ended = trace("memleak", "probes in", &workload, &options, &files)?;
    let (reports, stacks) = (rows(&ended, "report")?, rows(&ended, "stack")?);
    for (value, field) in [("inuse_space", "bytes"), ("inuse_objects", "allocations")] {
        let (flat, total) = files.top(value)?;
        ensure!(
            total == sum(&reports, field),
            "{total} {value}: {reports:?}"
        );
        ensure!(flat == by_leaf(&stacks, field)?, "{flat:?}: {stacks:#?}");
    }
    let (flat, _) = files.top("inuse_space")?;
    ensure!(flat["leak_malloc"] == 31 * 4093, "{flat:?}");
    ensure!(files.pprof(&["-top"])?.contains("Type: inuse_space"));

    let raw = files.pprof(&["-raw"])?;
    let mappings = raw.split("Mappings\n").nth(1).context("no mappings")?;
    let program = mappings.lines().next().context("no program")?;
    ensure!(
        program.contains("/alloc ") && program.contains("[FN]"),
        "{program}"
    );
    let id = Command::new("readelf")
        .arg("-n")
        .arg(harness::workload("alloc"))
        .output()?;
    let id = String::from_utf8(id.stdout)?;
    let id = id.split("Build ID: ").nth(1).context("no build id")?;
    let id = id.split_whitespace().next().context("no build id")?;
    ensure!(program.contains(id), "{program}: not {id}");

    let image = files.flame()?;
    let bytes = "leak_malloc (126,883 bytes, ";
    ensure!(image.contains(bytes), "no {bytes}");
    let all = format!("{} bytes", grouped(sum(&reports, "bytes")));
    ensure!(
        image.contains("memleak: outstanding allocations of pid "),
        "no title"
    );
    ensure!(image.contains(&all), "no {all}");
    Ok(())
}

/// Decodes a profile into text by protoc.
fn decoded_by_protoc(path: &str) -> Result<String> {
    const FORMAT: &str = "/usr/share/gocode/src/github.com/google/pprof/proto";
    let message = Command::new("gunzip").args(["-c", path]).output()?;
    let mut protoc = Command::new("protoc")
        .args([
            "--decode=perftools.profiles.Profile",
            "-I",
            FORMAT,
            "profile.proto",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("no protoc: install protobuf-compiler")?;
    let mut input = protoc.stdin.take().context("no pipe")?;
    input.write_all(&message.stdout)?;
    drop(input);
    let decoded = protoc.wait_with_output()?;
    ensure!(
        decoded.status.success(),
        "no format: install golang-github-google-pprof-dev"
    );
    Ok(String::from_utf8(decoded.stdout)?)
}

/// protoc decodes a profile by the description of the format itself, which Debian packages with the format's own
/// reader.
fn a_profile_is_as_its_format_is_published() -> Result<()> {
    let files = Files::new()?;
    let group = Cgroup::new()?;
    let path = files.path("a.pb.gz")?;
    let mut program = Workload::start("lines", &["malloc", "1009", "31"])?;
    group.add(&program.pid())?;
    let mut tool = Tool::start(
        "memleak",
        &["-p", &program.pid(), "-o", "0", "--export", &path, "60"],
    )?;
    tool.wait_for_stderr("probes in")?;
    program.work()?;
    ensure!(tool.interrupt()?.status.success());
    drop(program);

    let decoded = decoded_by_protoc(&path)?;
    // protoc shows a field that the format does not have by its number.
    let unknown = decoded
        .lines()
        .find(|line| line.trim_start().starts_with(|c: char| c.is_ascii_digit()));
    ensure!(unknown.is_none(), "{unknown:?}");
    let fields = |name: &str| -> Vec<&str> {
        let mark = format!("{name}: ");
        decoded
            .lines()
            .filter_map(|line| line.trim_start().strip_prefix(&mark))
            .collect()
    };
    ensure!(fields("value") == ["1009", "31279"], "{decoded}");
    let strings = fields("string_table");
    ensure!(strings[0] == "\"\"", "{strings:?}");
    let cgroup = group
        .path()
        .file_name()
        .context("no name")?
        .to_string_lossy();
    for text in [
        "inuse_objects",
        "inuse_space",
        "pid",
        "comm",
        "cgroup",
        "/usr/src/lines/inner.h",
    ] {
        ensure!(
            strings.contains(&&*format!("\"{text}\"")),
            "no {text} in {strings:?}"
        );
    }
    ensure!(
        strings.contains(&&*format!("\"/{cgroup}\"")),
        "no {cgroup} in {strings:?}"
    );
    for flag in [
        "has_functions",
        "has_filenames",
        "has_line_numbers",
        "has_inline_frames",
    ] {
        ensure!(fields(flag).contains(&"true"), "no {flag}: {decoded}");
    }
    let lines = fields("line");
    for line in ["1009", "2003", "3006", "4011"] {
        ensure!(lines.contains(&line), "no line {line}: {lines:?}");
    }
    Ok(())
}

fn allocations_are_all_since_the_start() -> Result<()> {
    let files = Files::new()?;
    let options = ["-j", "--mode", "alloc", "-T", "1000", "1"];
    let workload = ["alloc", "balanced", "31", "4093"];
    let mut program = Workload::start(workload[0], &workload[1..])?;
    let pid = program.pid();
    let export = files.options()?;
    let export: Vec<&str> = export.iter().map(String::as_str).collect();
    let mut tool = Tool::start("memleak", &[&["-p", &pid], &export[..], &options].concat())?;
    tool.wait_for_stderr("probes in")?;
    program.work()?;
    // The first report has everything, the later reports have nothing.
    for _ in 0..3 {
        tool.wait_for_output("\"type\":\"report\"")?;
    }
    let ended = tool.interrupt()?;
    let reports = rows(&ended, "report")?;
    for (value, field) in [("alloc_space", "bytes"), ("alloc_objects", "allocations")] {
        let (_, total) = files.top(value)?;
        ensure!(
            total > 0 && total == sum(&reports, field),
            "{total} {value}: {reports:?}"
        );
    }
    Ok(())
}

fn the_kernels_heap_is_what_was_reported() -> Result<()> {
    let files = Files::new()?;
    let options = ["-k", "-j", "-o", "0", "-T", "100000", "60"];
    let workload = ["kmem", "pipes", "101"];
    let ended = trace("memleak", "memleak: tracing", &workload, &options, &files)?;
    let reports = rows(&ended, "report")?;
    let image = files.flame()?;
    let all = format!("{} bytes", grouped(sum(&reports, "bytes")));
    ensure!(image.contains(&all), "no {all}");
    let (_, total) = files.top("inuse_space")?;
    ensure!(
        total > 0 && total == sum(&reports, "bytes"),
        "{total}: {reports:?}"
    );
    Ok(())
}

fn calls_and_bytes_of_brk() -> Result<()> {
    let files = Files::new()?;
    let workload = ["brk", "23", "7", "5"];
    trace("brkstack", "tracing brk(2)", &workload, &[], &files)?;
    let (flat, total) = files.top("brk_calls")?;
    let expected = [("grow_heap", 23), ("shrink_heap", 7), ("ask_heap", 5)];
    let expected = expected.map(|(name, calls)| (name.to_owned(), calls));
    ensure!(flat == HashMap::from(expected) && total == 35, "{flat:?}");
    let image = files.flame()?;
    for box_ in [
        "grow_heap (23 calls, ",
        "shrink_heap (7 calls, ",
        "ask_heap (5 calls, ",
    ] {
        ensure!(image.contains(box_), "no {box_}");
    }

    let ended = trace(
        "brkstack",
        "tracing brk(2)",
        &workload,
        &["--bytes", "-j"],
        &files,
    )?;
    let reports = rows(&ended, "report")?;
    let (flat, total) = files.top("growth")?;
    ensure!(
        total == sum(&reports, "bytes") && flat["grow_heap"] == total,
        "{flat:?}"
    );
    ensure!(files.top("brk_calls")?.1 == 23);
    ensure!(files.pprof(&["-tags"])?.contains("brk"), "no process");
    Ok(())
}

fn kernel_frames_are_told_apart() -> Result<()> {
    let files = Files::new()?;
    let workload = ["brk", "23", "7", "5"];
    trace("brkstack", "tracing brk(2)", &workload, &["-UK"], &files)?;
    let (flat, total) = files.top("brk_calls")?;
    ensure!(total == 35, "{flat:?}");
    let raw = files.pprof(&["-raw"])?;
    ensure!(
        raw.contains("[kernel] ") || raw.contains("[kernel]\n"),
        "{raw}"
    );
    let image = files.flame()?;
    ensure!(image.contains("grow_heap (23 calls, "), "no grow_heap");
    // Kernel frames have a colour of their own, and their names have no mark.
    ensure!(
        image.contains("rgb(240,170,80)") && !image.contains("_[k]"),
        "{image}"
    );
    Ok(())
}

/// Counts of a single thread are selected by the profile's label `thread`.
fn a_thread_is_told_by_its_name() -> Result<()> {
    let files = Files::new()?;
    let workload = ["threads", "3", "211"];
    trace("faults", "tracing", &workload, &[], &files)?;
    for thread in ["worker-0", "worker-1", "worker-2"] {
        let focus = format!("-tagfocus=thread={thread}");
        let of_thread = files.pprof(&["-top", "-sample_index=faults", &focus])?;
        let row = of_thread
            .lines()
            .find(|row| row.ends_with(" write_pages"))
            .with_context(|| of_thread.clone())?;
        let faults = row.split_whitespace().next();
        ensure!(faults == Some("211B"), "{of_thread}");
    }
    // A stack of memleak belongs to a process, not to a thread.
    let heap = ["alloc", "leak", "31", "4093"];
    trace("memleak", "probes in", &heap, &["-o", "0"], &files)?;
    let tags = files.pprof(&["-tags"])?;
    ensure!(
        tags.contains("comm:") && !tags.contains("thread:"),
        "{tags}"
    );
    Ok(())
}

fn faults_have_both_numbers() -> Result<()> {
    let files = Files::new()?;
    let ended = trace(
        "faults",
        "tracing page faults",
        &["minor", "101"],
        &["-j"],
        &files,
    )?;
    let (reports, stacks) = (rows(&ended, "report")?, rows(&ended, "stack")?);
    let (_, faults) = files.top("faults")?;
    ensure!(
        faults >= 101 && faults == sum(&reports, "count"),
        "{faults}: {reports:?}"
    );
    ensure!(files.top("space")?.1 == faults * 4096);
    ensure!(files.top("faults")?.0 == by_leaf(&stacks, "count")?);
    let image = files.flame()?;
    ensure!(image.contains("faults: page faults of pid "), "no title");
    Ok(())
}

fn mappings_have_both_numbers() -> Result<()> {
    let files = Files::new()?;
    let options = ["-j", "--stack", "--munmap"];
    let ended = trace(
        "mmapsnoop",
        "tracing mmap(2)",
        &["alloc", "leak", "31", "4093"],
        &options,
        &files,
    )?;
    let rows = ended.objects()?;
    let mapped = rows.into_iter().filter(|row| row["call"] == "mmap");
    let mapped: Vec<Value> = mapped.filter(|row| row["error"].is_null()).collect();
    ensure!(
        files.top("mmap_calls")?.1 == mapped.len() as u64,
        "{mapped:?}"
    );
    let bytes = files.top("mmap_space")?.1;
    ensure!(bytes > 0 && bytes == sum(&mapped, "size_bytes"), "{bytes}");
    let image = files.flame()?;
    ensure!(
        image.contains(&format!("{} bytes", grouped(bytes))),
        "no {bytes}"
    );
    ensure!(image.contains("leak_mmap (126,883 bytes, "), "no leak_mmap");
    Ok(())
}
