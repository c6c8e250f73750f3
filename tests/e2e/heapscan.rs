//! heapscan's screen, and the privileges that heapscan needs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sys::ptrace;
use nix::unistd::Pid;

use crate::harness::{self, NotHere, Tool, ToolOutput, Workload};

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "heapscan::screen":
        a_leak_is_the_first_line,
        a_fragmented_heap_is_the_first_line [Once],
        a_screen_answers_questions_too [Once],
        what_cannot_be_copied_has_a_memory [Once],
        its_owner_needs_no_privileges,
        one_capability_is_enough,
        it_carries_the_programs_of_idle_alone [Once],
    }
}

/// User that is not root, as all systems have it.
const NOBODY: u32 = 65534;

/// Runs heapscan on a process. Expects one screen.
fn screen(pid: &str, args: &[&str]) -> Result<ToolOutput> {
    let args = [&["-p", pid, "--max-pause", "60000"], args].concat();
    let ended = harness::run("heapscan", &args)?;
    let lines: Vec<_> = ended.stdout.lines().collect();
    let widest = lines.iter().map(|line| line.chars().count()).max();
    ensure!(lines.len() <= 45 && widest <= Some(80), "{ended:?}");
    Ok(ended)
}

/// Returns the first finding: the line after the empty one.
fn first(ended: &ToolOutput) -> Result<&str> {
    let line = ended.stdout.lines().skip_while(|line| !line.is_empty());
    line.into_iter().nth(1).context("no finding")
}

fn a_leak_is_the_first_line() -> Result<()> {
    let workload = Workload::start("forget", &[])?;
    let pid = workload.pid();
    let ended = screen(&pid, &[])?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(
        ended
            .stdout
            .starts_with(&format!("forget (pid {pid}): glibc")),
        "{ended:?}"
    );
    // The workload has lost 7 of its 18 blocks when it is ready.
    let line = first(&ended)?;
    ensure!(
        line.starts_with("act   leak: 6.3 kB in 7 blocks are unreachable ("),
        "{ended:?}"
    );
    let next = format!("      next: memleak -p {pid} --verdict 60 1\n");
    ensure!(ended.stdout.contains(&next), "{ended:?}");
    for says in [
        "\nMEMORY ",
        "\ntotal ",
        "\nBLOCKS ",
        "  nothing: unreachable\n",
    ] {
        ensure!(ended.stdout.contains(says), "not {says:?}: {ended:?}");
    }
    let args = [
        "-jp",
        &pid,
        "--max-pause",
        "60000",
        "--fail-on",
        "unreachable",
    ];
    let ended = harness::run("heapscan", &args)?;
    ensure!(ended.status.code() == Some(3), "{ended:?}");
    let rows = ended.objects_among_lines()?;
    let kinds: Vec<_> = rows.iter().filter_map(|row| row["type"].as_str()).collect();
    ensure!(
        kinds[..2] == ["layout", "finding"] && kinds.contains(&"reachable"),
        "{kinds:?}"
    );
    ensure!(
        rows[1]["level"] == "act" && rows[1]["what"] == "leak",
        "{}",
        rows[1]
    );
    ensure!(workload.finish()?.success(), "it did not live on");
    Ok(())
}

fn a_fragmented_heap_is_the_first_line() -> Result<()> {
    let workload = Workload::start("heap", &["0", "50021", "holes"])?;
    let ended = screen(&workload.pid(), &[])?;
    ensure!(
        first(&ended)?.starts_with("act   fragmentation: "),
        "{ended:?}"
    );
    ensure!(ended.stdout.contains("malloc_trim(0)"), "{ended:?}");
    ensure!(
        ended
            .stdout
            .contains("ok    leak: all blocks are reachable\n"),
        "{ended:?}"
    );
    Ok(())
}

fn a_screen_answers_questions_too() -> Result<()> {
    let workload = Workload::start("forget", &[])?;
    let ended = screen(&workload.pid(), &["--why", "1000"])?;
    ensure!(ended.stdout.contains("\nWHY 1000: "), "{ended:?}");
    Ok(())
}

/// What the kernel counts is printed, and the status says that nothing was examined.
fn what_cannot_be_copied_has_a_memory() -> Result<()> {
    let mut workload = Workload::start("heap", &["1", "211", "plain"])?;
    let pid = workload.pid();
    ptrace::seize(Pid::from_raw(pid.parse()?), ptrace::Options::empty())?;
    let ended = screen(&pid, &[])?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    ensure!(ended.stderr.contains("is traced already, by "), "{ended:?}");
    ensure!(
        ended.stdout.contains("not copied") && ended.stdout.contains("\nanonymous, with heaps "),
        "{ended:?}"
    );
    workload.work().map(drop)
}

/// Copies a program to a folder of ours, where each user can execute it. The project's own may lie below a folder that
/// only its owner can enter.
fn for_all_users(program: &Path, folder: &Path) -> Result<PathBuf> {
    let copy = folder.join(program.file_name().context("no name")?);
    harness::copy(program, &copy)?;
    for path in [folder, &copy] {
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    }
    Ok(copy)
}

/// Runs a command that ends with heapscan on a workload. Expects that it finds the workload's leak.
fn expect_a_leak(by: &mut Command, workload: Workload) -> Result<()> {
    let folder = harness::scratch()?;
    by.arg(for_all_users(&harness::tool("heapscan"), folder.path())?)
        .args(["-p", &workload.pid(), "--max-pause", "60000"]);
    let ended = Tool::spawn(by.stdin(Stdio::null()))?.wait()?;
    ensure!(
        ended.status.success() && first(&ended)?.contains("7 blocks are unreachable"),
        "{ended:?}"
    );
    ensure!(workload.finish()?.success(), "it did not live on");
    Ok(())
}

fn its_owner_needs_no_privileges() -> Result<()> {
    // Yama may permit to trace descendants alone.
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    if !matches!(scope.trim(), "" | "0") {
        let reason = "Yama permits to trace descendants only (kernel.yama.ptrace_scope)";
        return Err(NotHere(reason).into());
    }
    let folder = harness::scratch()?;
    let program = for_all_users(&harness::workload("forget"), folder.path())?;
    let mut command = Command::new(program);
    let workload = Workload::spawn(command.uid(NOBODY).gid(NOBODY))?;
    let mut by = Command::new("setpriv");
    by.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    expect_a_leak(&mut by, workload)
}

/// A process of root's without privileges but one examines a process that has all.
fn one_capability_is_enough() -> Result<()> {
    let workload = Workload::start("forget", &[])?;
    let mut by = Command::new("setpriv");
    by.args(["--bounding-set=-all,+sys_ptrace", "--inh-caps=-all"]);
    expect_a_leak(&mut by, workload)
}

/// heapscan starts where BPF is not to be had: only the page tables of --idle are read by a BPF program.
fn it_carries_the_programs_of_idle_alone() -> Result<()> {
    const EM_BPF: [u8; 2] = [247, 0];
    let bytes = fs::read(harness::tool("heapscan"))?;
    let objects = bytes
        .windows(20)
        .filter(|window| window.starts_with(b"\x7fELF\x02\x01\x01") && window[18..] == EM_BPF);
    let objects = objects.count();
    ensure!(objects == 1, "{objects} BPF objects");
    Ok(())
}
