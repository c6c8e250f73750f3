//! Files that take long to read, while a user waits.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::pty::openpty;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use super::text;
use crate::harness::{self, Tool, Workload, eventually};
use crate::hostile::elf_file;

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "hostile":
        ctrl_c_is_heard_while_files_are_read [Once],
        a_terminal_shows_how_far_a_long_start_is [Once],
    }
}

/// Number of files, which together take half a minute to read.
const SLOW_FILES: usize = 200;

/// Starts a process that maps the slow files.
fn with_slow_files() -> Result<(TempDir, Workload)> {
    let folder = harness::scratch()?;
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
    for number in 0..SLOW_FILES {
        let file = File::create(folder.path().join(number.to_string()))?;
        elf_file::write(elf_file::Kind::EmptySymbols, &file)?;
    }
    let args = ["files", &SLOW_FILES.to_string(), "1", text(folder.path())];
    let mut crowd = Workload::start("hostile-crowd", &args)?;
    crowd.work()?;
    Ok((folder, crowd))
}

fn ctrl_c_is_heard_while_files_are_read() -> Result<()> {
    let (_folder, crowd) = with_slow_files()?;
    let tool = Tool::start("memleak", &["-p", &crowd.pid(), "60"])?;
    let status = format!("/proc/{}/status", tool.pid());
    eventually("the tool has taken SIGINT over", || {
        let status = fs::read_to_string(&status)?;
        let blocked = status
            .lines()
            .find_map(|line| line.strip_prefix("SigBlk:\t"));
        let blocked = u64::from_str_radix(blocked.context("no mask")?, 16)?;
        Ok(blocked & 1 << (Signal::SIGINT as u64 - 1) != 0)
    })?;
    let ended = tool.interrupt()?;
    let left_out = ended.stderr.matches("the end was requested").count();
    ensure!(left_out > SLOW_FILES / 2, "{left_out}: {ended:?}");
    Ok(())
}

fn a_terminal_shows_how_far_a_long_start_is() -> Result<()> {
    let (_folder, crowd) = with_slow_files()?;
    let terminal = openpty(None, None)?;
    let mut tool = Command::new("timeout")
        .arg("60")
        .arg(harness::tool("memleak"))
        .args(["-p", &crowd.pid(), "60"])
        .stdout(Stdio::null())
        .stderr(terminal.slave)
        .spawn()?;
    let mut screen = File::from(terminal.master);
    let mut shown = String::new();
    let mut bytes = [0; 4096];
    let line = "\rsearching files for allocators: ";
    // Reading fails with an error once no process has the terminal open.
    while let Ok(length @ 1..) = screen.read(&mut bytes) {
        shown += &String::from_utf8_lossy(&bytes[..length]).replace("\x1b[K", "");
        if shown.matches(line).count() == 2 {
            let pid = Pid::from_raw(tool.id().cast_signed());
            kill(pid, Signal::SIGTERM)?;
        }
    }
    tool.wait()?;
    let (_, rest) = shown.split_once(line).context(shown.clone())?;
    let (done, all) = rest.split_once(" of ").context(shown.clone())?;
    let all: String = all.chars().take_while(char::is_ascii_digit).collect();
    let (done, all): (usize, usize) = (done.parse()?, all.parse()?);
    ensure!(done < all && all > SLOW_FILES, "{done} of {all}: {shown}");
    Ok(())
}
