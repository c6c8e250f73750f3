//! Programs of known counts, held until a tool says that it is ready.

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

/// The path of a workload program.
pub(crate) fn workload(name: &str) -> PathBuf {
    workloads().join(name)
}

/// The folder of the workloads' sources.
pub(crate) fn sources() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/tests/workload").into()
}

/// The arguments by which memleak tells of each block of so many bytes where it was allocated.
pub(crate) const fn each_block(bytes: &str) -> [&str; 11] {
    [
        "-j", "-a", "-o", "0", "-T", "100000", "-z", bytes, "-Z", bytes, "3600",
    ]
}

/// A workload that has said that it is ready.
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

    /// Starts a program that speaks the protocol, in whatever way.
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
        workload.ready()?;
        Ok(workload)
    }

    /// Waits until it is ready, at its start or as another program after exec. Returns the number
    /// that it gives itself.
    pub(crate) fn ready(&mut self) -> Result<u32> {
        let line = self.line()?;
        let pid = line
            .strip_prefix("ready ")
            .with_context(|| format!("it said {line:?}"))?;
        // In a PID namespace of its own it knows itself by another number.
        pid.parse().context("no pid")
    }

    /// The workload's number in our PID namespace.
    pub(crate) fn pid(&self) -> String {
        self.pid.to_string()
    }

    /// The number in our PID namespace of what unshare(1) has started, which is process 1 of its own.
    pub(crate) fn pid_in_container(&self) -> Result<String> {
        let unshare = self.pid;
        let children = fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children"))?;
        let pid = children.trim_end();
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        ensure!(status.contains(&format!("NSpid:\t{pid}\t1\n")), "{status}");
        Ok(pid.to_owned())
    }

    /// Lets it do its work and waits until that is done. Returns the facts that it states.
    pub(crate) fn work(&mut self) -> Result<HashMap<String, String>> {
        self.go()?;
        self.done()
    }

    /// Lets it do one of its rounds, and waits until it is ready for the next one, or done with the last.
    pub(crate) fn round(&mut self, is_last: bool) -> Result<()> {
        self.go()?;
        if is_last {
            self.done()?;
        } else {
            self.ready()?;
        }
        Ok(())
    }

    /// Lets it go on.
    pub(crate) fn go(&mut self) -> Result<()> {
        let stdin = self.stdin.as_mut().context("already released")?;
        stdin.write_all(b"\n").context("the workload has gone")
    }

    /// Waits until its work is done. Returns the facts that it states.
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

    /// Waits until it has ended, by whatever end.
    pub(crate) fn wait(&mut self) -> Result<ExitStatus> {
        self.child.wait().context("failed to wait for the workload")
    }

    /// Lets it exit, and waits until it has.
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
