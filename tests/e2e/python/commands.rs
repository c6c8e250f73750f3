//! A command that runs Python has Python frames from its first block on.

use std::fs;
use std::process::Command;

use anyhow::{Result, ensure};
use libtest_mimic::Trial;

use super::{BYTES, EACH_BLOCK, places, printed_by_python};
use crate::harness::{self, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "python":
        frames_of_a_command_are_known_from_its_first_block [Python, Once],
        frames_of_a_command_that_waits_for_the_cpu_are_known [Python, Once],
        frames_of_a_command_behind_a_script_are_known [Python, Once],
    }
}

/// An emulated CPU may take longer from one library to the next than memleak waits for the libraries of a
/// starting command.
fn frames_of_a_command_are_known_from_its_first_block() -> Result<()> {
    expect_the_only_block("")
}

/// The command is behind a shell that runs for longer than a starting command needs to map its code, as pyenv's
/// `python3` does.
fn frames_of_a_command_behind_a_script_are_known() -> Result<()> {
    let folder = harness::scratch()?;
    let script = folder.path().join("script");
    fs::write(&script, "sleep 1\nexec \"$@\"\n")?;
    expect_the_only_block(&format!("sh {}", script.display()))
}

/// With twelve other processes on one CPU, the command maps no code for longer than a command needs that has a
/// CPU for itself.
fn frames_of_a_command_that_waits_for_the_cpu_are_known() -> Result<()> {
    const SPIN: &str = "echo ready $$; while :; do :; done";
    let _one = harness::OneCpu::enter()?;
    let spin = |_| Workload::spawn(Command::new("sh").args(["-c", SPIN]));
    let _others = (0..12).map(spin).collect::<Result<Vec<_>>>()?;
    expect_the_only_block("")
}

/// Runs memleak on a program that allocates one block and ends, before anybody could have looked at it. The
/// command begins with `wrapper`, if there is one.
fn expect_the_only_block(wrapper: &str) -> Result<()> {
    let folder = harness::scratch()?;
    let script = folder.path().join("one.py");
    let source =
        format!("import ctypes\ndef one():\n    ctypes.CDLL(None).malloc({BYTES})\none()\n");
    fs::write(&script, source)?;
    // pyenv's `python3` is a script that starts other programs before it calls exec.
    let program = printed_by_python("sys.executable")?;
    let command = format!("{wrapper} {program} {}", script.display());
    let ended = harness::run("memleak", &[&EACH_BLOCK[..], &["-c", &command]].concat())?;
    let objects = ended.objects()?;
    let file = script.display().to_string();
    let expected =
        [("one", 3), ("<module>", 4)].map(|(name, line)| (name.to_owned(), file.clone(), line));
    let mut found = objects
        .iter()
        .filter(|row| row["type"] == "stack")
        .map(places);
    ensure!(
        found.any(|found| found.is_ok_and(|found| found == expected)),
        "{ended:?}"
    );
    Ok(())
}
