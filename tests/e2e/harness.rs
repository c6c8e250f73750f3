//! Helpers that start workloads and tools, and communicate with both.
//!
//! A workload (tests/workload) is held until the tool under test says that it is ready, does work
//! of a known size, and is held again until the tool has reported.

#[cfg_attr(target_arch = "aarch64", path = "harness/aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "harness/x86_64.rs")]
pub(crate) mod arch;
mod cgroup;
mod folded;
mod hung;
mod libraries;
mod mounted;
mod needs;
mod one_cpu;
mod pythons;
mod redis;
mod tool;
mod workload;

use std::env;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{SigHandler, Signal};

pub(crate) use cgroup::{Cgroup, cannot_make_cgroup, change_events, remove_cgroup};
pub(crate) use folded::{by_leaf, folded};
pub(crate) use hung::end_tests_that_hang;
pub(crate) use libraries::mimalloc;
pub(crate) use mounted::Mounted;
pub(crate) use needs::{
    Need, NotHere, at_entries, bpf_not_permitted, in_guest, listed, print_slowest, probe_entries,
    release, test,
};
pub(crate) use one_cpu::OneCpu;
pub(crate) use pythons::Python;
pub(crate) use redis::start_redis;
pub(crate) use tool::{
    Tool, ToolOutput, descriptors, object, stacks_of_blocks, tool, waits_for_events,
};
pub(crate) use workload::{Workload, each_block, sources, workload, workloads};

/// Timeout of every wait. Software emulation is a hundred times slower than the machine.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(180);

/// Makes the list of a tool's tests. Each test is named after its function, with its needs in brackets. A test
/// without needs may be followed by `: at_entries`, which adds a second run of the test by [`at_entries`].
macro_rules! tests {
    ($tool:literal: $($name:ident $([$($need:ident),+])? $(: $again:ident)?),+ $(,)?) => {
        vec![$(
            $crate::harness::test(
                concat!($tool, "::", stringify!($name)),
                &[$($($crate::harness::Need::$need),+)?],
                $name,
            ),
            $($crate::harness::$again($tool, stringify!($name), $name),)?
        )+]
    };
}
pub(crate) use tests;

/// Checks that a tool of events that sees none ends after its `--duration`, with only its header printed.
pub(crate) fn ends_after_duration(tool: &str) -> Result<()> {
    let begin = Instant::now();
    let ended = run(tool, &["-d", "0.3", "-n", "no such name"])?;
    let took = begin.elapsed();
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(took >= Duration::from_millis(300), "{took:?}");
    ensure!(ended.stdout.lines().count() == 1, "{ended:?}");
    Ok(())
}

/// Resets the signals that end a tool to their default action. The tests' caller may ignore them, as a shell's
/// background job and nohup(1) do, and tools keep to that. Must be called before any thread is started.
pub(crate) fn heed_signals() {
    for signal in [
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ] {
        // SAFETY: sets the default action, which runs no code of this process.
        let set = unsafe { nix::sys::signal::signal(signal, SigHandler::SigDfl) };
        assert!(set.is_ok(), "{signal}: {set:?}");
    }
}

/// Builds the workloads, unless they are already built, as in a guest (`MEMTOOLS_WORKLOADS`).
pub(crate) fn prepare() {
    if env::var_os("MEMTOOLS_WORKLOADS").is_some() {
        return;
    }
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/workload");
    let built = Command::new("make")
        .args(["-s", "-j2", "-C", folder])
        .arg(format!("OUT={}", workloads().display()))
        .env_remove("RUSTFLAGS")
        .env_remove("MAKEFLAGS")
        .status();
    assert!(
        built.is_ok_and(|status| status.success()),
        "failed to build tests/workload"
    );
}

/// Waits until `condition` holds. `what` describes the condition in the error message.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while !condition()? {
        ensure!(Instant::now() < deadline, "in vain: {what}");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Runs a tool to its end.
pub(crate) fn run(name: &str, args: &[&str]) -> Result<ToolOutput> {
    Tool::start(name, args)?.wait()
}

/// Checks that a tool refuses these arguments: with exit status `code`, with `remedy` on stderr, and with no output.
pub(crate) fn expect_refusal(tool: &str, args: &[&str], code: i32, remedy: &str) -> Result<()> {
    let ended = run(tool, args)?;
    ensure!(ended.status.code() == Some(code), "{args:?}: {ended:?}");
    ensure!(
        ended.stderr.contains(remedy),
        "{args:?}: not {remedy:?} in {}",
        ended.stderr
    );
    ensure!(ended.stdout.is_empty(), "{args:?}: {ended:?}");
    Ok(())
}

/// Makes a command run in a new mount namespace, with the directory `root` as its root.
pub(crate) fn in_root(command: &mut Command, root: &Path) {
    let root = root.to_owned();
    // SAFETY: system calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?;
            nix::unistd::chroot(&root)?;
            nix::unistd::chdir("/")?;
            Ok(())
        });
    }
}

/// Returns a command that executes its further arguments in a new PID and mount namespace. The /tmp of that
/// namespace holds nothing but `folder`.
pub(crate) fn container(folder: &Path) -> Command {
    const PREPARE: &str = "mount --bind \"$1\" /mnt && mount -t tmpfs none /tmp && mkdir -p \"$1\" && \
                           mount --bind /mnt \"$1\" && shift && exec \"$@\"";
    let mut container = Command::new("unshare");
    container.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    container.args(["sh", "-c", PREPARE, "sh"]).arg(folder);
    container
}

/// Makes a temporary directory for one test. The directory is removed when the handle is dropped.
pub(crate) fn scratch() -> Result<tempfile::TempDir> {
    tempfile::tempdir().context("failed to make a folder")
}

/// Prepares Chromium, which shows no window and has its own files in `home`, for at most `seconds`.
pub(crate) fn chromium(seconds: u32, home: &Path) -> Command {
    let mut command = Command::new("timeout");
    command
        .arg(seconds.to_string())
        .args(["chromium", "--headless=new", "--no-sandbox"])
        .arg(format!("--user-data-dir={}", home.display()))
        .env("HOME", home);
    command
}

/// Copies a file and keeps its mode. A separate process (cp) does the copying: a child that another test forks at
/// the same time would inherit our descriptor for writing, and a file that is open for writing cannot be executed
/// (ETXTBSY).
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).context("failed to make a folder")?;
    }
    let mut cp = Command::new("cp");
    let copied = cp.arg("-p").args([from, to]).status();
    let copied = copied.context("failed to start cp")?.success();
    ensure!(copied, "failed to copy {}", from.display());
    Ok(())
}

/// Number of the capability that permits a process to lower its oom_score_adj.
const CAP_SYS_RESOURCE: u32 = 24;

/// Checks that a tool that already traces has its memory locked, and that the OOM killer spares it (oom_score_adj
/// -1000) where the tool may ask for that. Elsewhere the tool must say that it may not.
pub(crate) fn expect_protected_from_oom(tool: Tool) -> Result<()> {
    let read = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", tool.pid()));
    let score = read("oom_score_adj")?;
    let unlocked = unlocked_mappings(&read("smaps")?);
    ensure!(unlocked.is_empty(), "not locked: {unlocked:#?}");
    let own = fs::read_to_string("/proc/self/status")?;
    let capabilities = own.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let capabilities = u64::from_str_radix(capabilities.context("no capabilities")?.trim(), 16)?;
    let may_be_spared = capabilities >> CAP_SYS_RESOURCE & 1 == 1;
    let expected = if may_be_spared { "-1000\n" } else { "0\n" };
    ensure!(score == expected, "{score}");
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    let told = ended.stderr.contains("failed to set oom_score_adj");
    ensure!(told != may_be_spared, "{ended:?}");
    Ok(())
}

/// Returns the mappings of /proc/PID/smaps that have resident pages and are not locked. BPF maps, perf event
/// buffers and the vDSO with its data are omitted: they are the kernel's own memory, which is never reclaimed.
fn unlocked_mappings(smaps: &str) -> Vec<String> {
    let mut unlocked = Vec::new();
    let (mut mapping, mut resident) = ("", false);
    for line in smaps.lines() {
        let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
        match name {
            "Rss:" => resident = rest.trim() != "0 kB",
            "VmFlags:" => {
                let locked = rest.split_whitespace().any(|flag| flag == "lo");
                let kernel_s = [
                    "anon_inode:bpf-map",
                    "anon_inode:[perf_event]",
                    "[vdso]",
                    "[vvar",
                ];
                let is_kernel_s = kernel_s.iter().any(|name| mapping.contains(name));
                if resident && !locked && !is_kernel_s {
                    unlocked.push(mapping.to_owned());
                }
            }
            name if !name.ends_with(':') => mapping = line,
            _ => {}
        }
    }
    unlocked
}
