//! The other tools, which are installed beside this one, and runs of them that leave a profile.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use memtools::export::earlier::Earlier;
use memtools::print::text;
use memtools::process::container::Home;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::Serialize;
use serde_json::Value;
use tempfile::TempDir;

use crate::findings::shell_word;
use crate::screen::size;

/// What a tool has to end after Ctrl-C.
pub(crate) const LAST_CHANCE: Duration = Duration::from_secs(10);

/// The tool of this name that was installed with memtriage, under a name with the same suffix.
///
/// # Errors
/// If there is none.
pub(crate) fn beside(tool: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("failed to find the other tools")?;
    let name = own.file_name().and_then(|name| name.to_str());
    let suffix = name.and_then(|name| name.strip_prefix("memtriage"));
    let other = own.with_file_name(format!("{tool}{}", suffix.unwrap_or_default()));
    let folder = own.parent().unwrap_or(Path::new("/"));
    ensure!(
        other.is_file(),
        "there is no {tool} beside memtriage, in {}",
        text::escape_bytes(folder.as_os_str().as_encoded_bytes())
    );
    Ok(other)
}

/// A tool's command line, and the number of its stacks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) tool: &'static str,
    pub(crate) args: Vec<String>,
    /// The value of the tool's profile, and what it is.
    pub(crate) value: (&'static str, Unit),
    pub(crate) of: Whose,
}

/// Whose stacks a tool is asked for, where that is one process, or those of one cgroup.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Whose {
    pid: Option<u32>,
    /// As for all others, none is known where they are in several.
    #[serde(flatten)]
    home: Home,
}

impl Whose {
    /// The process of this number, in the cgroup that it was found in, or is in now if nobody has looked.
    pub(crate) fn process(pid: u32, home: Option<&Home>) -> Self {
        let home = home.cloned().unwrap_or_else(|| Home::of_process(pid));
        Self {
            pid: Some(pid),
            home,
        }
    }

    /// The processes of the cgroup at this path from the root.
    pub(crate) fn cgroup(path: String) -> Self {
        Self {
            pid: None,
            home: Home::at(Some(path)),
        }
    }

    /// The cgroup, if it is one.
    pub(crate) fn home(&self) -> Option<&Home> {
        let is_one = self.pid.is_some() || self.home.cgroup.is_some();
        is_one.then_some(&self.home)
    }
}

/// What a number is of. Its name in JSON is that of pprof's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unit {
    Bytes,
    Nanoseconds,
    Count,
}

impl Question {
    /// The command as a shell takes it.
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

/// Starts a tool that prints JSON, with pipes for what it prints and for its messages.
///
/// # Errors
/// If it is not installed beside this one, or cannot be run.
pub(crate) fn start(tool: &str, args: &[String], more: &[&OsStr]) -> Result<Child> {
    let program = beside(tool)?;
    Command::new(&program)
        .args(args)
        .arg("-j")
        .args(more)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // The terminal's Ctrl-C reaches them by us, once.
        .process_group(0)
        .spawn()
        .with_context(|| format!("failed to run {}", program.display()))
}

/// Whether a tool has ended.
pub(crate) fn has_ended(child: &mut Child) -> bool {
    !matches!(child.try_wait(), Ok(None))
}

/// Waits until a tool has ended, and for [`LAST_CHANCE`] at most. Returns whether it has.
pub(crate) fn wait_for(child: &mut Child) -> bool {
    let start = Instant::now();
    while !has_ended(child) {
        if start.elapsed() > LAST_CHANCE {
            return false;
        }
        thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Sends a signal to a tool that was not reaped: one that has ended waits for that, so that its number is still its own.
pub(crate) fn signal(pid: u32, signal: Signal) {
    let _ = kill(Pid::from_raw(pid.cast_signed()), signal);
}

/// Ends a tool by Ctrl-C, so that its last report comes.
pub(crate) fn end(child: &mut Child) {
    if !has_ended(child) {
        signal(child.id(), Signal::SIGINT);
    }
    if !wait_for(child) {
        signal(child.id(), Signal::SIGKILL);
        let _ = child.wait();
    }
}

/// A tool that runs.
pub(crate) struct Run {
    tool: &'static str,
    pub(crate) child: Child,
    profile: PathBuf,
    lost: JoinHandle<Option<Value>>,
    messages: JoinHandle<String>,
}

impl Run {
    pub(crate) fn start(question: &Question, folder: &TempDir, number: usize) -> Result<Self> {
        let profile = folder.path().join(format!("{number}.pb.gz"));
        let profiled = ["--pprof".as_ref(), profile.as_os_str()];
        let mut child = start(question.tool, &question.args, &profiled)?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        Ok(Self {
            tool: question.tool,
            child,
            profile,
            lost: thread::spawn(|| stdout.and_then(|stdout| losses(BufReader::new(stdout)))),
            messages: thread::spawn(|| all_of(stderr)),
        })
    }

    /// The profile that a tool which still runs wrote last.
    ///
    /// # Errors
    /// If it has written none yet.
    pub(crate) fn so_far(&self) -> Result<Earlier> {
        Earlier::read(&self.profile)
    }

    /// The profile of a tool that has ended, with what it has lost.
    pub(crate) fn end(mut self) -> Result<(Earlier, Option<Value>)> {
        let status = self.child.wait()?;
        let messages = self.messages.join().unwrap_or_default();
        if !status.success() {
            match last_message(&messages, self.tool) {
                Some(reason) => bail!(reason),
                None => bail!("it ended with {status}"),
            }
        }
        let lost = self.lost.join().unwrap_or_default();
        Ok((Earlier::read(&self.profile)?, lost))
    }
}

/// All that a tool says. What cannot be read is not shown: there is no other place for it.
pub(crate) fn all_of(stderr: Option<ChildStderr>) -> String {
    let mut bytes = Vec::new();
    let _ = stderr.map(|mut stderr| stderr.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The last of a tool's messages, with the lines that belong to it, in one line.
pub(crate) fn last_message(messages: &str, tool: &str) -> Option<String> {
    let (_, last) = messages.rsplit_once(&format!("{tool}: "))?;
    let lines: Vec<_> = last.lines().map(|line| text::shown(line.trim())).collect();
    Some(lines.join("; ").replace(":; ", ": "))
}

/// The losses among the objects that a tool prints. The others are read, so that it never waits.
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
}
