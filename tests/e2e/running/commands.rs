//! A command that a tool starts behaves as it would without the tool.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigHandler, SigSet, Signal, kill, signal};
use nix::unistd::Pid;

use super::{TOOLS, children, state};
use crate::harness::{self, TIMEOUT, Tool, eventually, tool, workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "running":
        a_command_goes_on_when_the_tool_is_killed [Once],
        what_a_command_starts_goes_on_when_the_tool_is_killed [Once],
        a_command_that_stops_itself_is_left_stopped [Once],
        a_command_inherits_from_the_caller [Once],
        a_command_that_does_not_end_is_left [Once],
        every_tool_runs_a_command,
        the_tool_s_own_faults_are_not_the_command_s,
    }
}

fn stopped_child(tool: &Tool) -> Option<u32> {
    let mut children = children(tool.pid()).into_iter();
    children.find(|&child| state(child) == Some('T'))
}

/// The tool is killed while its command is stopped for it.
fn a_command_goes_on_when_the_tool_is_killed() -> Result<()> {
    for end in [Signal::SIGKILL, Signal::SIGHUP] {
        let mut caught = 0;
        let deadline = Instant::now() + TIMEOUT;
        while caught < 11 {
            ensure!(Instant::now() < deadline, "only {caught} were met stopped");
            let mut tool = Tool::start("brkstack", &["-f", "-c", "sh -c 'exit 7'"])?;
            let command = loop {
                if let Some(pid) = stopped_child(&tool) {
                    break Some(pid);
                }
                if tool.has_ended()? {
                    break None;
                }
            };
            let Some(command) = command else { continue };
            tool.signal(end)?;
            tool.wait()?;
            eventually("the command ends", || Ok(state(command).is_none()))?;
            caught += 1;
        }
    }
    Ok(())
}

/// The tool is killed while a process that the command has started is stopped.
fn what_a_command_starts_goes_on_when_the_tool_is_killed() -> Result<()> {
    let [launch, program] = ["launch", "alloc-musl-static"].map(workload);
    let command = format!(
        "'{}' spawn '{}' one malloc 31 4093",
        launch.display(),
        program.display()
    );
    let mut caught = 0;
    let deadline = Instant::now() + TIMEOUT;
    while caught < 7 {
        ensure!(Instant::now() < deadline, "only {caught} were met stopped");
        let mut tool = Tool::start("memleak", &["--children", "-c", &command])?;
        let met = loop {
            let commands = children(tool.pid()).into_iter();
            let mut started = commands.flat_map(children);
            if let Some(pid) = started.find(|&child| state(child) == Some('T')) {
                break Some(pid);
            }
            if tool.has_ended()? {
                break None;
            }
        };
        let Some(pid) = met else { continue };
        tool.signal(Signal::SIGKILL)?;
        tool.wait()?;
        eventually("what was stopped ends", || Ok(state(pid).is_none()))?;
        caught += 1;
    }
    Ok(())
}

fn a_command_that_stops_itself_is_left_stopped() -> Result<()> {
    let mut tool = Tool::start("brkstack", &["-f", "-c", "sh -c 'kill -STOP $$; exit 5'"])?;
    tool.wait_for_stderr("tracing brk(2)")?;
    eventually("it has started", || Ok(!watches_mmap(tool.pid())?))?;
    let command = stopped_child(&tool).context("it runs")?;
    kill(Pid::from_raw(command.cast_signed()), Signal::SIGCONT)?;
    let ended = tool.wait()?;
    ensure!(ended.status.code() == Some(5), "{ended:?}");
    Ok(())
}

/// Whether a tool has programs attached to the exits of system calls, as it has while one of its commands may map code.
fn watches_mmap(pid: u32) -> Result<bool> {
    let told = harness::descriptors(pid)?;
    Ok(told.iter().any(|told| told.contains("tp_name:\tsys_exit")))
}

/// Starts a tool with one signal blocked, another one ignored, and a low limit of open files.
fn with_odd_caller(args: &[&str]) -> Result<Tool> {
    let mut command = Command::new(tool("faults"));
    command.args(args).stdin(Stdio::null());
    let few = || setrlimit(Resource::RLIMIT_NOFILE, 67, 4099);
    // SAFETY: system calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            signal(Signal::SIGCHLD, SigHandler::SigIgn)?;
            let mut blocked = SigSet::empty();
            blocked.add(Signal::SIGUSR2);
            blocked.thread_set_mask()?;
            Ok(few()?)
        });
    }
    Tool::spawn(&mut command)
}

fn a_command_inherits_from_the_caller() -> Result<()> {
    let command = "sh -c 'echo files $(ulimit -n); exit 7'";
    let ended = with_odd_caller(&["--by-process", "-c", command])?.wait()?;
    ensure!(ended.status.code() == Some(7), "{ended:?}");
    ensure!(ended.stdout.contains("files 67\n"), "{ended:?}");

    // The command is no shell, which would change some of the masks.
    let command = "grep ^Sig /proc/self/status";
    let ended = with_odd_caller(&["--by-process", "-c", command])?.wait()?;
    let value = |name: &str| {
        let line = ended
            .stdout
            .lines()
            .find_map(|line| line.strip_prefix(name));
        line.map(str::trim)
    };
    let bit = |signal: Signal| 1u64 << (signal as u32 - 1);
    let mask = |signals: u64| format!("{signals:016x}");
    ensure!(
        value("SigBlk:") == Some(&mask(bit(Signal::SIGUSR2))),
        "{ended:?}"
    );
    let ignored = ignored_here()? & !bit(Signal::SIGPIPE) | bit(Signal::SIGCHLD);
    ensure!(value("SigIgn:") == Some(&mask(ignored)), "{ended:?}");
    Ok(())
}

/// Returns the signals that this process ignores, as a mask. Some are inherited: glibc's posix_spawn() ignores
/// signal 32, which is glibc's own, in the child of a process that cancels threads. Rust's runtime ignores
/// SIGPIPE, and resets it for a command.
fn ignored_here() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .context("no SigIgn in /proc/self/status")?;
    Ok(u64::from_str_radix(mask.trim(), 16)?)
}

fn a_command_that_does_not_end_is_left() -> Result<()> {
    let command = "sh -c 'trap \"\" TERM; echo began; while :; do read x; done </dev/zero'";
    let mut tool = Tool::start("brkstack", &["-f", "-c", command])?;
    tool.wait_for_stderr("tracing brk(2)")?;
    tool.wait_for_output("began\n")?;
    let command = children(tool.pid());
    tool.signal(Signal::SIGINT)?;
    tool.wait_for_stderr("is left to run")?;
    for pid in command {
        let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
    }
    ensure!(tool.wait()?.status.success());
    Ok(())
}

/// The exit status is the command's own, and the output has what the command prints.
fn every_tool_runs_a_command() -> Result<()> {
    for name in TOOLS {
        let folder = harness::scratch()?;
        let trace = folder.path().join("ran");
        let command = format!("sh -c 'echo > {}; exit 7'", trace.display());
        let ended = harness::run(name, &["-c", &command])?;
        ensure!(ended.status.code() == Some(7), "{name}: {ended:?}");
        ensure!(trace.exists(), "{name}: {ended:?}");
    }
    let command = format!("'{}' anon 23", harness::workload("mmap").display());
    let ended = harness::run("mmapsnoop", &["-c", &command])?;
    let rows = ended.stdout.lines().filter(|line| line.contains(" mmap "));
    ensure!(rows.count() >= 23, "{ended:?}");
    Ok(())
}

/// Faults of a process between fork and exec are the tool's own.
fn the_tool_s_own_faults_are_not_the_command_s() -> Result<()> {
    let command = format!("'{}' 23", harness::workload("minor").display());
    let ended = harness::run("faults", &["--by-process", "-c", &command])?;
    let rows = |name: &str| {
        let rows = ended.stdout.lines();
        rows.filter(|row| row.split_whitespace().nth(1) == Some(name))
            .count()
    };
    ensure!((rows("minor"), rows("faults")) == (1, 0), "{ended:?}");
    Ok(())
}
