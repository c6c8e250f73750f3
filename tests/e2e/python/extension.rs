//! A leak in a Python module that is written in C is found by its lines, between Python frames.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use super::{is_python, trace_with_facts};
use crate::harness::{self, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "python":
        a_leak_in_a_module_in_c_has_its_line [Host],
    }
}

/// Number of comparisons of two names.
const COUNT: u64 = 1009;
/// Debian's Python, whose headers are installed.
const PYTHON: &str = "/usr/bin/python3";

/// The module leaks both copies where two names differ in length, and none where their lengths are the same.
fn a_leak_in_a_module_in_c_has_its_line() -> Result<()> {
    let folder = harness::scratch()?;
    build(folder.path())?;
    let mut shop = Command::new(PYTHON);
    shop.current_dir(folder.path());
    let workload = Workload::spawn(shop.args(["shop.py", &COUNT.to_string()]))?;
    let pid = workload.pid();
    let options = ["-j", "--lines", "-o", "0", "-T", "100000", "3600"];
    let (_, ended) = trace_with_facts(&options, workload, &pid)?;
    let objects = ended.objects()?;
    let stacks = objects.iter().filter(|row| row["type"] == "stack");
    let leaks: Vec<(&Value, &Value)> = stacks
        .filter_map(|stack| {
            let frames = stack["user_frames"].as_array()?;
            let compare = frames.iter().find(|frame| frame["symbol"] == "compare")?;
            Some((stack, compare))
        })
        .collect();
    // Each block has the name's bytes, its length, and the terminating null.
    for (line, bytes) in [(32, 18 + 9), (33, 15 + 9)] {
        let of_line = leaks.iter().filter(|(_, compare)| compare["line"] == line);
        let mut blocks = 0;
        for (stack, compare) in of_line {
            let file = compare["file"].as_str().unwrap_or_default();
            ensure!(file.ends_with("names.c"), "{compare}");
            ensure!(compare["inlined"][0]["symbol"] == "copy_of", "{compare}");
            let frames = stack["user_frames"].as_array().context("no frames")?;
            let functions = frames.iter().filter(is_python);
            let functions: Vec<_> = functions
                .map(|frame| (frame["symbol"].as_str(), frame["line"].as_u64()))
                .collect();
            let expected = [("Order.__lt__", 17), ("in_order", 21), ("serve", 27)];
            let expected = expected.map(|(name, line)| (Some(name), Some(line)));
            ensure!(functions.starts_with(&expected), "{functions:?}");
            let allocations = stack["allocations"].as_u64().context("no count")?;
            ensure!(stack["bytes"] == allocations * bytes, "{stack}");
            blocks += allocations;
        }
        ensure!(blocks == COUNT, "{blocks} of line {line}: {leaks:?}");
    }
    Ok(())
}

/// Builds the module beside the program that uses it.
fn build(folder: &Path) -> Result<()> {
    let told = Command::new(PYTHON)
        .args([
            "-c",
            "import sysconfig; print(sysconfig.get_path('include'))",
        ])
        .output()?;
    let headers = String::from_utf8(told.stdout)?;
    let sources = harness::sources();
    let built = Command::new("cc")
        .args([
            "-g",
            "-O2",
            "-Wall",
            "-Werror",
            "-shared",
            "-fPIC",
            "-I",
            headers.trim_end(),
        ])
        .arg("-o")
        .arg(folder.join("names.so"))
        .arg(sources.join("names.c"))
        .output()?;
    ensure!(built.status.success(), "{built:?}");
    harness::copy(&sources.join("shop.py"), &folder.join("shop.py"))
}
