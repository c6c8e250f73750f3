//! A tool ends on request, and loses nothing.

use std::fs;
use std::io::{PipeReader, PipeWriter, Write, pipe};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{SigHandler, Signal, kill, signal};
use nix::unistd::Pid;
use tempfile::NamedTempFile;

use super::{TOOLS, brkstack, calls};
use crate::harness::{self, Tool, Workload, eventually, tool};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "running":
        every_tool_ends_with_its_target,
        every_signal_that_ends_it_reports,
        a_report_can_be_asked_for,
        what_nohup_ignores_is_ignored,
        a_reader_that_does_not_read_does_not_keep_it [Once],
        a_last_report_waits_for_its_reader [Once],
        the_output_can_be_a_file,
    }
}

fn every_tool_ends_with_its_target() -> Result<()> {
    for name in TOOLS {
        let first = Workload::start("alloc", &["hold"])?;
        let second = Workload::start("alloc", &["hold"])?;
        let pids = format!("{},{}", first.pid(), second.pid());
        let mut tool = Tool::start(name, &["-p", &pids])?;
        tool.wait_for_stderr(match name {
            "memleak" => "allocator: ",
            _ => "Ctrl-C to end",
        })?;
        first.finish()?;
        ensure!(!tool.has_ended()?, "{name} ends with the first of two");
        second.finish()?;
        let ended = tool.wait()?;
        ensure!(ended.status.success(), "{name}: {ended:?}");
    }
    Ok(())
}

fn every_signal_that_ends_it_reports() -> Result<()> {
    for end in [
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ] {
        let (_workload, tool) = brkstack(&[])?;
        tool.signal(end)?;
        let ended = tool.wait()?;
        ensure!(ended.status.success(), "{end}: {ended:?}");
        ensure!(calls(&ended.stdout) == 23, "{end}: {ended:?}");
    }
    Ok(())
}

fn a_report_can_be_asked_for() -> Result<()> {
    let (_workload, tool) = brkstack(&[])?;
    tool.signal(Signal::SIGUSR1)?;
    tool.wait_until(|report| calls(report) == 23)?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(calls(&ended.stdout) == 23, "twice: {ended:?}");

    let mut target = Workload::start("alloc", &["one", "malloc", "23", "4093"])?;
    let pid = target.pid();
    let mut tool = Tool::start("memleak", &["-p", &pid, "-o", "0", "3600"])?;
    tool.wait_for_stderr("allocator: ")?;
    target.work()?;
    tool.signal(Signal::SIGUSR1)?;
    tool.wait_until(|report| report.contains("94139 bytes in 23 allocations"))?;
    ensure!(tool.interrupt()?.status.success());
    Ok(())
}

fn what_nohup_ignores_is_ignored() -> Result<()> {
    let mut workload = Workload::start("brk", &["23"])?;
    let pid = workload.pid();
    let mut command = Command::new(tool("brkstack"));
    command.args(["-f", "-p", &pid]).stdin(Stdio::null());
    // SAFETY: a system call between fork and exec.
    unsafe {
        command.pre_exec(|| {
            signal(Signal::SIGHUP, SigHandler::SigIgn)?;
            Ok(())
        });
    }
    let mut tool = Tool::spawn(&mut command)?;
    tool.wait_for_stderr("tracing brk(2)")?;
    workload.work()?;
    // Of two pending signals, the one with the lower number is delivered first.
    tool.signal(Signal::SIGHUP)?;
    tool.signal(Signal::SIGUSR1)?;
    tool.wait_until(|report| calls(report) == 23)?;
    ensure!(!tool.has_ended()?, "it has ended");
    ensure!(tool.interrupt()?.status.success());
    Ok(())
}

/// Makes a full pipe, which was not read.
fn full_pipe() -> Result<(PipeReader, PipeWriter)> {
    let (reader, mut writer) = pipe().context("no pipe")?;
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    while writer.write(&[b'.'; 4096]).is_ok() {}
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::empty()))?;
    Ok((reader, writer))
}

/// Starts vmscan with this option, with a full pipe as stdout and a file as stderr. Sends a SIGINT after each of
/// these messages; the last one ends vmscan.
fn ends_unread(option: &str, said: &[&str]) -> Result<()> {
    let (reader, writer) = full_pipe()?;
    let stderr = NamedTempFile::new()?;
    let mut tool = Command::new(tool("vmscan"))
        .arg(option)
        .stdin(Stdio::null())
        .stdout(writer)
        .stderr(stderr.reopen()?)
        .spawn()
        .context("no vmscan")?;
    let messages = || fs::read_to_string(stderr.path());
    for said in said {
        eventually(said, || Ok(messages()?.contains(said)))?;
        kill(Pid::from_raw(tool.id().cast_signed()), Signal::SIGINT)?;
    }
    let mut status = None;
    let ended = eventually("it ends", || {
        status = tool.try_wait()?;
        Ok(status.is_some())
    });
    if ended.is_err() {
        tool.kill()?;
        tool.wait()?;
    }
    ended?;
    let messages = messages()?;
    ensure!(
        status.and_then(|status| status.code()) == Some(1),
        "{status:?} {messages}"
    );
    ensure!(
        messages.contains("vmscan: failed to print: the output has no reader"),
        "{messages}"
    );
    drop(reader);
    Ok(())
}

/// Ctrl-C ends a tool that waits for its reader: here to print the column names.
fn a_reader_that_does_not_read_does_not_keep_it() -> Result<()> {
    ends_unread("1000", &["Ctrl-C to end"])
}

/// A last report waits for its reader, until Ctrl-C comes again.
fn a_last_report_waits_for_its_reader() -> Result<()> {
    ends_unread(
        "--counts",
        &[
            "Ctrl-C to end",
            "vmscan: the last report waits for its reader",
        ],
    )
}

fn the_output_can_be_a_file() -> Result<()> {
    let folder = harness::scratch()?;
    let file = folder.path().join("report");
    let path = file.display().to_string();
    let command = "sh -c 'echo from the command'";
    for (name, option) in
        TOOLS.map(|name| (name, if name == "memleak" { "--output" } else { "-o" }))
    {
        let ended = harness::run(name, &["-j", option, &path, "-c", command])?;
        ensure!(ended.status.success(), "{name}: {ended:?}");
        ensure!(ended.stdout == "from the command\n", "{name}: {ended:?}");
        ensure!(file.exists(), "{name}: {ended:?}");
        let report = fs::read_to_string(&file)?;
        for line in report.lines() {
            harness::object(line)?;
        }
        let counts = ["brkstack", "faults", "ffaults", "memleak", "mmapsnoop"];
        ensure!(!report.is_empty() || !counts.contains(&name), "{name}");

        let missing = folder.path().join("no/such/folder").display().to_string();
        let trace = folder.path().join("ran");
        let command = format!("sh -c 'echo > {}'", trace.display());
        let ended = harness::run(name, &[option, &missing, "-c", &command])?;
        ensure!(ended.status.code() == Some(1), "{name}: {ended:?}");
        ensure!(
            ended.stderr.contains("failed to write") && !trace.exists(),
            "{name}: {ended:?}"
        );
        fs::remove_file(&file)?;
    }
    Ok(())
}
