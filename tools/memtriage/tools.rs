//! Other tools, which are installed beside memtriage, and runs of them that leave a profile.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::ops::{Deref, DerefMut};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use memtools::export::saved_profile::SavedProfile;
use memtools::print::text;
use memtools::process::container::CgroupInfo;
use memtools::run::siblings;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Serialize;
use serde_json::Value;
use tempfile::TempDir;

use crate::findings::shell_word;
use crate::screen::size;

/// Time that a tool has to end after Ctrl-C.
pub(crate) const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Command line of a tool, and the value of its profile that is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ToolSpec {
    pub(crate) tool: &'static str,
    pub(crate) args: Vec<String>,
    /// Kind of the value in the tool's profile, and its unit.
    pub(crate) value: (&'static str, Unit),
    pub(crate) target: ToolTarget,
}

/// Target of a tool: one process, or the processes of one cgroup; empty for several.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct ToolTarget {
    pid: Option<u32>,
    /// Cgroup of the target; empty if the target is in several.
    #[serde(flatten)]
    cgroup_info: CgroupInfo,
}

impl ToolTarget {
    /// Makes the target of one process. Its cgroup is `cgroup_info`; if that is None, the cgroup is looked up now.
    pub(crate) fn process(pid: u32, cgroup_info: Option<&CgroupInfo>) -> Self {
        let cgroup_info = cgroup_info
            .cloned()
            .unwrap_or_else(|| CgroupInfo::of_process(pid));
        Self {
            pid: Some(pid),
            cgroup_info,
        }
    }

    /// Makes the target of the processes of the cgroup at this path from the root.
    pub(crate) fn cgroup(path: String) -> Self {
        Self {
            pid: None,
            cgroup_info: CgroupInfo::at(Some(path)),
        }
    }

    /// Returns the cgroup, if the target is in one.
    pub(crate) fn cgroup_info(&self) -> Option<&CgroupInfo> {
        let is_one = self.pid.is_some() || self.cgroup_info.cgroup.is_some();
        is_one.then_some(&self.cgroup_info)
    }
}

/// Unit of a number. The names in JSON are those of pprof's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unit {
    Bytes,
    Nanoseconds,
    Count,
}

impl ToolSpec {
    /// Formats the command line for a shell.
    pub(crate) fn command(&self) -> String {
        let args = self.args.iter().map(|arg| shell_word(arg));
        let words: Vec<String> = std::iter::once(self.tool.to_owned()).chain(args).collect();
        words.join(" ")
    }
}

impl Unit {
    pub(crate) fn text(self, value: i64) -> String {
        let value = value.unsigned_abs();
        match self {
            Self::Bytes => size(value),
            Self::Nanoseconds => format!("{:.1} ms", value as f64 / 1e6),
            Self::Count => value.to_string(),
        }
    }
}

/// Starts a tool that prints JSON, with pipes for its output and its messages.
///
/// # Errors
/// If the tool is not installed beside memtriage, or cannot be run.
pub(crate) fn start(tool: &str, args: &[String], more: &[&OsStr]) -> Result<Child> {
    let program = siblings::path(tool)?;
    Command::new(&program)
        .args(args)
        .arg("-j")
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // Ctrl-C of the terminal reaches only memtriage, which signals the tools once.
        .process_group(0)
        .spawn()
        .with_context(|| format!("failed to run {}", program.display()))
}

/// Whether a tool has ended.
pub(crate) fn has_ended(child: &mut Child) -> bool {
    !matches!(child.try_wait(), Ok(None))
}

/// Waits until a tool has ended, but at most for [`KILL_TIMEOUT`]. Returns whether it has ended.
pub(crate) fn wait_for(child: &mut Child) -> bool {
    let start = Instant::now();
    while !has_ended(child) {
        if start.elapsed() > KILL_TIMEOUT {
            return false;
        }
        thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Sends a signal to a tool that was not reaped. Until it is reaped, its pid is not reused, even if it has ended.
pub(crate) fn signal(pid: u32, signal: Signal) {
    let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
}

/// Ends a tool by SIGINT, so that it writes its last report; by SIGKILL after [`KILL_TIMEOUT`].
pub(crate) fn stop(child: &mut Child) {
    if !has_ended(child) {
        signal(child.id(), Signal::SIGINT);
    }
    if !wait_for(child) {
        signal(child.id(), Signal::SIGKILL);
        let _ = child.wait();
    }
}

/// Started tool, which is stopped when the value is dropped.
pub(crate) struct Tool(pub(crate) Child);

impl Deref for Tool {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Tool {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Tool {
    fn drop(&mut self) {
        stop(&mut self.0);
    }
}

/// Running tool that writes a profile.
pub(crate) struct Run {
    tool: &'static str,
    pub(crate) child: Tool,
    profile: PathBuf,
    lost: JoinHandle<Option<Value>>,
    messages: JoinHandle<String>,
}

impl Run {
    pub(crate) fn start(question: &ToolSpec, folder: &TempDir, number: usize) -> Result<Self> {
        let profile = folder.path().join(format!("{number}.pb.gz"));
        let profiled = ["--export".as_ref(), profile.as_os_str()];
        let child = start(question.tool, &question.args, &profiled)?;
        Ok(Self::of(question.tool, child, profile))
    }

    /// Makes the run of a started tool, and reads its output from now on.
    pub(crate) fn of(tool: &'static str, mut child: Child, profile: PathBuf) -> Self {
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let lost = || stdout.and_then(|stdout| losses(BufReader::new(stdout)));
        Self {
            tool,
            child: Tool(child),
            profile,
            lost: thread::spawn(lost),
            messages: thread::spawn(|| all_of(stderr)),
        }
    }

    /// Waits for a tool, and returns its profile and its losses. If the tool failed, its last message is the error.
    pub(crate) fn end(mut self) -> Result<(SavedProfile, Option<Value>)> {
        let status = self.child.wait()?;
        let messages = self.messages.join().unwrap_or_default();
        if !status.success() {
            match last_message(&messages, self.tool) {
                Some(reason) => bail!(reason),
                None => bail!("it ended with {status}"),
            }
        }
        let lost = self.lost.join().unwrap_or_default();
        Ok((SavedProfile::read(&self.profile)?, lost))
    }
}

/// Reads all messages of a tool. Messages that cannot be read are not shown, as they have no other source.
pub(crate) fn all_of(stderr: Option<ChildStderr>) -> String {
    let mut bytes = Vec::new();
    let _ = stderr.map(|mut stderr| stderr.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Returns the last message of a tool, with the lines that belong to it, as one line.
pub(crate) fn last_message(messages: &str, tool: &str) -> Option<String> {
    let (_, last) = messages.rsplit_once(&format!("{tool}: "))?;
    let lines: Vec<_> = last
        .lines()
        .map(|line| text::display_name(line.trim()))
        .collect();
    Some(lines.join("; ").replace(":; ", ": "))
}

/// Returns the losses among the objects that a tool prints. All objects are read, so that the tool never blocks on a
/// full pipe.
fn losses(objects: impl BufRead) -> Option<Value> {
    let mut lost = None;
    for line in objects.split(b'\n').map_while(Result::ok) {
        if line.starts_with(b"{\"type\":\"lost\"") {
            let object: Option<Value> = serde_json::from_slice(&line).ok();
            lost = object.and_then(|mut object| object.get_mut("lost").map(Value::take));
        }
    }
    lost
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_message_is_whole() {
        let messages =
            "faults: tracing\nfaults: no way to attach works:\n  kprobe: none\n  fentry: refused\n";
        assert_eq!(
            last_message(messages, "faults").as_deref(),
            Some("no way to attach works: kprobe: none; fentry: refused")
        );
        assert_eq!(last_message("Killed\n", "faults"), None);
    }

    #[test]
    fn losses_are_found_among_other_objects() {
        let objects =
            b"{\"type\":\"stack\",\"lost\":1}\n{\"type\":\"lost\",\"lost\":{\"events\":7}}\n";
        let lost = losses(&objects[..]).expect("losses");
        assert_eq!(lost["events"], 7);
        assert_eq!(losses(&b"{\"type\":\"report\"}\n"[..]), None);
    }

    #[test]
    fn a_run_that_is_dropped_is_ended() {
        let child = Command::new("sleep").arg("1000").spawn();
        let child = child.expect("sleep(1)");
        let pid = Pid::from_raw(child.id().cast_signed());
        drop(Run::of("faults", child, PathBuf::new()));
        assert!(kill(pid, None).is_err(), "it runs on");
    }
}
