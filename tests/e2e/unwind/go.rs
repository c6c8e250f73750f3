//! Stacks through C that Go calls and Go that C calls, in programs that Go itself has built.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use crate::harness::{self, Tool, Workload};
use crate::memleak;

pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "unwind::go":
        stacks_through_c_are_those_of_the_program [Once],
        stacks_through_c_are_those_of_a_newer_program [Once],
        stacks_through_c_have_names_in_a_stripped_program [Once],
    }
}

/// Number of leaked blocks of each kind, and their size.
const LEAKED: [&str; 2] = ["31", "4093"];

/// Options of `go build` for programs without symbols.
const STRIPPED: &[&str] = &["-ldflags=-s -w"];

/// Go from PyPI, which scripts/go unpacks.
fn newer() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target/go/go/bin/go")
}

/// Builds the workload with this Go. Returns the directory with the program.
fn build(go: &Path, options: &[&str]) -> Result<tempfile::TempDir> {
    let folder = harness::scratch()?;
    let source = harness::sources().join("callback.go");
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/go-cache");
    let built = Command::new(go)
        .args(["build", "-o"])
        .arg(folder.path().join("callback"))
        .args(options)
        .arg(source)
        .envs([("GOCACHE", &*cache), ("GOPATH", folder.path())])
        .envs([("GOTOOLCHAIN", "local"), ("CGO_ENABLED", "1")])
        .output()
        .with_context(|| format!("failed to start {}", go.display()))?;
    ensure!(built.status.success(), "{built:?}");
    Ok(folder)
}

/// Checks that each block of a program has its whole stack, up to the function that began the goroutine.
fn expect_whole_stacks(go: &Path, options: &[&str]) -> Result<()> {
    let folder = build(go, options)?;
    let mut command = Command::new(folder.path().join("callback"));
    let mut workload = Workload::spawn(command.args(LEAKED))?;
    let args = ["-p", &workload.pid(), "-o", "0", "-T", "100", "60"];
    let mut tool = Tool::start("memleak", &args)?;
    tool.wait_for_stderr(memleak::READY)?;
    workload.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    let groups = memleak::last_report(&ended.stdout)?;
    let leaked = (31 * 4093, 31);
    for (inner, outer) in [
        ("main.fromGo", "main.main.func1"),
        ("main.fromCallback", "main.throughC"),
        ("main.fromCallback", "main.main"),
        ("crosscall2", "main.main"),
    ] {
        // Every goroutine begins in this function. Go's own table has its name without ".abi0".
        let is_whole = |frames: &[String]| {
            frames
                .iter()
                .any(|frame| frame.starts_with("runtime.goexit"))
        };
        let through = groups
            .iter()
            .filter(|group| group.passes(inner) && group.passes(outer) && is_whole(&group.frames));
        let sum = through.fold((0, 0), |(bytes, blocks), group| {
            (bytes + group.bytes, blocks + group.allocations)
        });
        ensure!(sum == leaked, "{inner}, {outer}: {sum:?} in {ended:?}");
    }
    Ok(())
}

fn stacks_through_c_are_those_of_the_program() -> Result<()> {
    expect_whole_stacks(Path::new("go"), &[])
}

fn stacks_through_c_are_those_of_a_newer_program() -> Result<()> {
    for options in [&[][..], &["-buildmode=pie"]] {
        expect_whole_stacks(&newer(), options).with_context(|| format!("{options:?}"))?;
    }
    Ok(())
}

/// Go's own table has the names, which all its programs have.
fn stacks_through_c_have_names_in_a_stripped_program() -> Result<()> {
    expect_whole_stacks(Path::new("go"), STRIPPED)?;
    expect_whole_stacks(&newer(), STRIPPED)?;
    let independent = [STRIPPED, &["-buildmode=pie"]].concat();
    expect_whole_stacks(&newer(), &independent).context("position-independent")
}
