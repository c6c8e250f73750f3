//! The files of --export: where they cannot be written, and where there is nothing to write.

use std::fs;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::{Files, trace};
use crate::harness::{self, Mounted, Tool, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "export":
        what_cannot_be_written_is_told_at_the_start [Once],
        a_full_disk_keeps_the_old_file [Once],
        nothing_at_all_is_a_file_too [Once],
        a_folded_file_has_the_lines_of_the_output [Once],
    }
}

fn what_cannot_be_written_is_told_at_the_start() -> Result<()> {
    let folder = harness::scratch()?;
    for tool in [
        "memleak",
        "brkstack",
        "faults",
        "mmapsnoop",
        "drsnoop",
        "oomkill",
    ] {
        for extension in ["svg", "pb.gz", "folded"] {
            let fifo = folder.path().join("fifo").with_extension(extension);
            if !fifo.exists() {
                mkfifo(&fifo, Mode::S_IRWXU)?;
            }
            let fifo = fifo.to_str().context("not UTF-8")?;
            for path in [
                &*format!("/nonexistent/x.{extension}"),
                fifo,
                &*format!("/proc/x.{extension}"),
            ] {
                let ended = harness::run(tool, &["--export", path])?;
                ensure!(ended.status.code() == Some(1), "{tool} {path}: {ended:?}");
                let told = ended.stderr.contains("failed to write") && ended.stderr.contains(path);
                ensure!(told && ended.stdout.is_empty(), "{tool} {path}: {ended:?}");
            }
        }
    }
    Ok(())
}

fn a_full_disk_keeps_the_old_file() -> Result<()> {
    let folder = harness::scratch()?;
    let disk = Mounted::tmpfs(folder.path(), "4k")?;
    let path = folder.path().join("a.svg");
    fs::write(&path, "as before")?;
    let mut program = Workload::start("brk", &["23", "7", "5"])?;
    let (pid, file) = (program.pid(), path.to_str().context("not UTF-8")?);
    let profile = folder.path().join("b.pb.gz");
    let profile = profile.to_str().context("not UTF-8")?;
    let files = ["--export", file, "--export", profile];
    let mut tool = Tool::start("brkstack", &[&["-p", &pid], &files[..]].concat())?;
    tool.wait_for_stderr("tracing brk(2)")?;
    program.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    ensure!(ended.stdout.contains("grow_heap 23"), "{ended:?}");
    for name in ["/a.svg", "/b.pb.gz"] {
        let reasons = ended.stderr.lines();
        let mut reasons = reasons.filter(|line| line.starts_with("brkstack: failed to write /"));
        let is_told = |line: &str| line.contains(name) && line.contains("No space left on device");
        ensure!(reasons.any(is_told), "{name}: {ended:?}");
    }
    ensure!(fs::read_to_string(&path)? == "as before");
    ensure!(
        fs::read_dir(folder.path())?.count() == 1,
        "half a file is left"
    );
    drop(disk);
    Ok(())
}

fn nothing_at_all_is_a_file_too() -> Result<()> {
    let files = Files::new()?;
    trace(
        "brkstack",
        "tracing brk(2)",
        &["alloc", "hold"],
        &[],
        &files,
    )?;
    let image = files.flame()?;
    ensure!(
        image.contains("calls of brk(2)") && image.contains("0 calls"),
        "{image}"
    );
    // go tool pprof refuses a profile without samples only if the profile has no sample types.
    ensure!(files.pprof(&["-raw"])?.contains("brk_calls/count"));
    Ok(())
}

fn a_folded_file_has_the_lines_of_the_output() -> Result<()> {
    let folder = harness::scratch()?;
    let path = folder.path().join("a.folded");
    let mut program = Workload::start("brk", &["23", "7", "5"])?;
    let (pid, file) = (program.pid(), path.to_str().context("not UTF-8")?);
    let mut tool = Tool::start("brkstack", &["-f", "-p", &pid, "--export", file])?;
    tool.wait_for_stderr("tracing brk(2)")?;
    program.work()?;
    let ended = tool.interrupt()?;
    let sorted = |text: &str| {
        let mut lines: Vec<_> = text
            .lines()
            .filter(|line| !line.is_empty())
            .map(str::to_owned)
            .collect();
        lines.sort();
        lines
    };
    let written = sorted(&fs::read_to_string(&path)?);
    ensure!(
        written.iter().any(|line| line.contains("grow_heap")),
        "{written:?}"
    );
    ensure!(written == sorted(&ended.stdout), "{written:?}: {ended:?}");
    Ok(())
}
