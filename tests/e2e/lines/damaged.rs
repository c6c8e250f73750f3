//! Damaged or endless debug information, and the processes that read it.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;
use object::{Object, ObjectSection};

use super::{folded, start, workload};
use crate::harness::{self, Tool};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "lines":
        damaged_debug_information_harms_nobody,
        calls_inlined_without_end_harm_nobody,
        readers_are_allowed_nothing_and_end_with_the_tool,
    }
}

/// Returns the byte ranges of an ELF file's sections of debug information.
fn debug_sections(elf: &[u8]) -> Result<Vec<std::ops::Range<usize>>> {
    let elf = object::File::parse(elf)?;
    let mut sections = Vec::new();
    for section in elf.sections() {
        if section.name()?.starts_with(".debug_") {
            let (start, length) = section.file_range().context("not in the file")?;
            sections.push(start as usize..(start + length) as usize);
        }
    }
    ensure!(sections.len() > 3, "{} sections", sections.len());
    Ok(sections)
}

fn damaged_debug_information_harms_nobody() -> Result<()> {
    let folder = harness::scratch()?;
    let program = folder.path().join("damaged");
    let original = fs::read(harness::workload("lines"))?;
    let sections = debug_sections(&original)?;
    let rounds = if harness::in_guest() { 3 } else { 24 };
    let mut known: HashMap<bool, u32> = HashMap::new();
    for seed in 1..=rounds {
        harness::copy(&harness::workload("lines"), &program)?;
        let file = File::options().write(true).open(&program)?;
        for (number, section) in sections.iter().enumerate() {
            // Damages every (5 + seed)-th byte, from another offset in each round.
            for at in section.clone().skip(seed + number).step_by(5 + seed) {
                let byte = [0, 0xff, 0x7f, original[at] ^ 0x40, seed as u8][(at + seed) % 5];
                file.write_all_at(&[byte], at as u64)?;
            }
        }
        drop(file);
        let (stacks, ended) = folded(&mut Command::new(&program), &["--lines"], &[])?;
        // The functions' names are in the symbol table, which damaged debug information does not affect.
        let is_named = |stack: &String| stack.contains(";main") && stack.contains(";allocate");
        ensure!(stacks.iter().all(is_named), "{seed}: {ended:?}");
        *known
            .entry(ended.stderr.contains("no source lines of damaged"))
            .or_default() += 1;
    }
    ensure!(known.contains_key(&true), "nothing was damaged: {known:?}");
    Ok(())
}

fn calls_inlined_without_end_harm_nobody() -> Result<()> {
    let (stacks, ended) = folded(&mut workload("lines-bomb"), &["--lines"], &[])?;
    ensure!(
        stacks.iter().all(|stack| stack.contains(";allocate;")),
        "{ended:?}"
    );
    let told = "no source lines of lines-bomb: the process that reads them has ended";
    ensure!(ended.stderr.contains(told), "{}", ended.stderr);
    Ok(())
}

/// Returns the PIDs of the processes that read source lines for a tool.
fn readers_of(tool: u32) -> Result<Vec<u32>> {
    let children = fs::read_to_string(format!("/proc/{tool}/task/{tool}/children"))?;
    let mut readers = Vec::new();
    for pid in children.split_whitespace() {
        if fs::read_to_string(format!("/proc/{pid}/comm"))?.trim() == "memtools-lines" {
            readers.push(pid.parse()?);
        }
    }
    Ok(readers)
}

fn readers_are_allowed_nothing_and_end_with_the_tool() -> Result<()> {
    let mut program = start(&mut workload("lines"), "sbrk")?;
    let pid = program.pid();
    let mut tool = Tool::start("brkstack", &["-p", &pid, "-f", "--lines", "1"])?;
    tool.wait_for_stderr("tracing brk(2)")?;
    program.work()?;
    tool.wait_for_output(";inner;")?;
    let readers = readers_of(tool.pid())?;
    let &[reader] = &*readers else {
        bail!("{readers:?} read the lines of one file");
    };
    let status = fs::read_to_string(format!("/proc/{reader}/status"))?;
    for line in [
        "CapPrm:\t0000000000000000",
        "CapEff:\t0000000000000000",
        "NoNewPrivs:\t1",
    ] {
        ensure!(status.contains(line), "no {line} in {status}");
    }
    // The reader has none of the descriptors that the tool traces with: those of BPF objects and perf events are
    // anonymous inodes.
    for file in fs::read_dir(format!("/proc/{reader}/fd"))? {
        let file = fs::read_link(file?.path())?;
        ensure!(
            !file.starts_with("anon_inode:"),
            "{} is open",
            file.display()
        );
    }
    tool.signal(Signal::SIGKILL)?;
    tool.wait()?;
    harness::eventually("the reader has ended", || {
        Ok(!Path::new(&format!("/proc/{reader}/exe")).exists())
    })
}
