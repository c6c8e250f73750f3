//! Starting workloads and tools, and talking to both.
//!
//! A workload (tests/workload) is held until the tool under test says that it is ready, does work
//! of a known size, and is held again until the tool has reported.

mod cgroup;
mod mounted;
mod needs;
mod one_cpu;
mod pythons;
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

pub(crate) use cgroup::{Cgroup, change_events, remove_cgroup};
pub(crate) use mounted::Mounted;
pub(crate) use needs::{
    Need, at_entries, in_guest, listed, print_slowest, probe_entries, release, test, without_root,
};
pub(crate) use one_cpu::OneCpu;
pub(crate) use pythons::Python;
pub(crate) use tool::{Ended, Tool, descriptors, object, stacks_of_blocks, tool, waits_for_events};
pub(crate) use workload::{Workload, each_block, sources, workload, workloads};

/// How long anything may take. Software emulation is a hundred times slower than the machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// A tool's tests, each named after its function, with what it needs in brackets. What needs nothing
/// can run once more, as the function behind its colon says: [`at_entries`].
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

/// A tool of events that is to see none of them ends after its `--duration`, with its header alone.
pub(crate) fn ends_after_duration(tool: &str) -> Result<()> {
    let begin = Instant::now();
    let ended = run(tool, &["-d", "0.3", "-n", "no such name"])?;
    let took = begin.elapsed();
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(took >= Duration::from_millis(300), "{took:?}");
    ensure!(ended.stdout.lines().count() == 1, "{ended:?}");
    Ok(())
}

/// Has the signals that end a tool end it, also where the tests' caller ignores them: a shell's job in
/// the background and nohup(1) do, and tools keep to that. To be called before there is a thread.
pub(crate) fn heed_signals() {
    for signal in [
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ] {
        // SAFETY: sets the default action, which runs nothing of ours.
        let set = unsafe { nix::sys::signal::signal(signal, SigHandler::SigDfl) };
        assert!(set.is_ok(), "{signal}: {set:?}");
    }
}

/// Builds the workloads, unless they come ready-made, as in a guest.
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

/// Waits until `condition` holds; `what` says what that is.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !condition()? {
        ensure!(Instant::now() < deadline, "in vain: {what}");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Runs a tool to its end.
pub(crate) fn run(name: &str, args: &[&str]) -> Result<Ended> {
    Tool::start(name, args)?.end()
}

/// Whether a tool refuses these arguments: with the exit status and the remedy, and no output.
pub(crate) fn refuses(tool: &str, args: &[&str], code: i32, remedy: &str) -> Result<()> {
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

/// Has a command run in a mount namespace of its own, with this folder as its root.
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

/// A command that executes what follows it in a PID and a mount namespace of its own: its /tmp has nothing but this
/// folder.
pub(crate) fn container(folder: &Path) -> Command {
    const PREPARE: &str = "mount --bind \"$1\" /mnt && mount -t tmpfs none /tmp && mkdir -p \"$1\" && \
                           mount --bind /mnt \"$1\" && shift && exec \"$@\"";
    let mut container = Command::new("unshare");
    container.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    container.args(["sh", "-c", PREPARE, "sh"]).arg(folder);
    container
}

/// A folder for one test, gone when it is dropped.
pub(crate) fn scratch() -> Result<tempfile::TempDir> {
    tempfile::tempdir().context("failed to make a folder")
}

/// Copies a file and keeps its mode. A process of its own does: the child of a test beside this one would inherit
/// the descriptor by which we write, and what somebody may write to cannot be executed (ETXTBSY).
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

/// The number of the capability to have others killed first.
const CAP_SYS_RESOURCE: u32 = 24;

/// A tool that traces already has its memory locked, and is killed after all others where it may ask
/// for that, or says that it may not.
pub(crate) fn outlives_a_lack_of_memory(tool: Tool) -> Result<()> {
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

/// Mappings of /proc/PID/smaps that have pages, and are not locked in memory. Maps of BPF, buffers of
/// perf events and the vDSO with its data are the kernel's own memory, which is never taken away.
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
