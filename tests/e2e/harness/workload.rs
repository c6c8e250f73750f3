//! Workloads: programs that do known counts of operations, and are held until a tool says that it is ready.

use std::collections::HashMap;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};

use anyhow::{Context, Result, ensure};

pub(crate) fn workloads() -> PathBuf {
    env::var_os("MEMTOOLS_WORKLOADS").map_or_else(
        || concat!(env!("CARGO_MANIFEST_DIR"), "/target/workload").into(),
        PathBuf::from,
    )
}

/// Returns the path of a workload program.
pub(crate) fn workload(name: &str) -> PathBuf {
    workloads().join(name)
}

/// Returns the directory of the workloads' sources.
pub(crate) fn sources() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/tests/workload").into()
}

/// Returns the arguments by which memleak lists each block of `bytes` bytes with the stack that allocated it.
pub(crate) const fn each_block(bytes: &str) -> [&str; 11] {
    [
        "-j", "-a", "-o", "0", "-T", "100000", "-z", bytes, "-Z", bytes, "3600",
    ]
}

/// Workload process that has said that it is ready.
pub(crate) struct Workload {
    child: Child,
    pid: u32,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Workload {
    /// Starts a program of tests/workload.
    pub(crate) fn start(name: &str, args: &[&str]) -> Result<Self> {
        Self::spawn(Command::new(workload(name)).args(args))
    }

    /// Starts a program that speaks the workloads' protocol, by any command.
    pub(crate) fn spawn(command: &mut Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("failed to start {command:?}"))?;
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().context("no stdout")?);
        let mut workload = Self {
            pid: child.id(),
            child,
            stdin,
            stdout,
        };
        workload.wait_ready()?;
        Ok(workload)
    }

    /// Waits until the workload is ready, at its start or as another program after exec. Returns the PID that the
    /// workload prints.
    pub(crate) fn wait_ready(&mut self) -> Result<u32> {
        let line = self.line()?;
        let pid = line
            .strip_prefix("ready ")
            .with_context(|| format!("it said {line:?}"))?;
        // In a PID namespace of its own, the workload prints its PID in that namespace.
        pid.parse().context("no pid")
    }

    /// Returns the workload's PID in our PID namespace.
    pub(crate) fn pid(&self) -> String {
        self.pid.to_string()
    }

    /// Returns the PID, in our PID namespace, of the process that unshare(1) started. That process is number 1 in
    /// a PID namespace of its own.
    pub(crate) fn pid_in_container(&self) -> Result<String> {
        let unshare = self.pid;
        let children = fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children"))?;
        let pid = children.trim_end();
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        ensure!(status.contains(&format!("NSpid:\t{pid}\t1\n")), "{status}");
        Ok(pid.to_owned())
    }

    /// Lets the workload do its work, and waits until the work is done. Returns the facts that the workload prints.
    pub(crate) fn work(&mut self) -> Result<HashMap<String, String>> {
        self.go()?;
        self.done()
    }

    /// Lets the workload do one of its rounds. Waits until it is ready for the next round or, after the last one, done.
    pub(crate) fn round(&mut self, is_last: bool) -> Result<()> {
        self.go()?;
        if is_last {
            self.done()?;
        } else {
            self.wait_ready()?;
        }
        Ok(())
    }

    /// Lets the workload go on.
    pub(crate) fn go(&mut self) -> Result<()> {
        let stdin = self.stdin.as_mut().context("already released")?;
        stdin.write_all(b"\n").context("the workload has gone")
    }

    /// Waits until the workload's work is done. Returns the facts that the workload prints.
    pub(crate) fn done(&mut self) -> Result<HashMap<String, String>> {
        let line = self.line()?;
        let facts = line
            .strip_prefix("done")
            .with_context(|| format!("it said {line:?}"))?;
        Ok(facts
            .split_whitespace()
            .filter_map(|fact| fact.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect())
    }

    /// Waits until the workload has ended, in whatever way.
    pub(crate) fn wait(&mut self) -> Result<ExitStatus> {
        self.child.wait().context("failed to wait for the workload")
    }

    /// Lets the workload exit, and waits until it has.
    pub(crate) fn finish(mut self) -> Result<ExitStatus> {
        self.stdin = None;
        self.child.wait().context("failed to wait for the workload")
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.stdout
            .read_line(&mut line)
            .context("failed to read from the workload")?;
        ensure!(!line.is_empty(), "the workload has ended");
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
