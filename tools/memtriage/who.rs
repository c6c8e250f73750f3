//! --who: runs the other tools to explain the findings, and shows the call stacks that took memory meanwhile.

use std::io::{self, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use memtools::export::saved_profile::SavedProfile;
use memtools::print::output::{Output, Row};
use memtools::process::container;
use memtools::process::proc::Process;
use memtools::run::poll::Poller;
use nix::sys::signal::Signal;
use serde::Serialize;
use serde_json::Value;

use crate::tools::{self, KILL_TIMEOUT, Run, ToolSpec, ToolTarget, Unit};

/// Limit on the tools that run at once: the machine is short of memory already.
const MAX_TOOLS: usize = 3;
/// Number of stacks that are shown of each tool.
const MAX_STACKS: usize = 3;
/// Number of frames of a stack that text shows, from the innermost on.
const MAX_FRAMES: usize = 16;

/// Target that can be traced to explain a finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Culprit {
    /// Process that grows, or is large, by its pid.
    Process(u32),
    /// Processes of a cgroup of version 2, by its directory and its path from the root.
    Cgroup(PathBuf, String),
    /// All processes that grow.
    Processes,
    /// Tasks that have to reclaim memory themselves.
    Reclaimers,
    /// Tasks that wait until pages are read back.
    Readers,
    /// Kernel code that allocates pages.
    KernelPages,
    /// Kernel code that allocates slab objects.
    KernelSlabs,
}

impl Culprit {
    fn question(&self, seconds: Duration) -> ToolSpec {
        let seconds = seconds.as_secs_f64().to_string();
        let words = |words: &[&str]| words.iter().map(ToString::to_string).collect();
        let faults = |whose: &[&str], target| ToolSpec {
            tool: "faults",
            args: words(&[&["--bytes"], whose, &["-d", &seconds]].concat()),
            value: ("space", Unit::Bytes),
            target,
        };
        let memleak = |what| ToolSpec {
            tool: "memleak",
            args: words(&[what, "--mem-limit", "128M", &seconds, "1"]),
            value: ("inuse_space", Unit::Bytes),
            target: ToolTarget::default(),
        };
        match self {
            Self::Process(pid) => {
                faults(&["-p", &pid.to_string()], ToolTarget::process(*pid, None))
            }
            Self::Cgroup(folder, path) => {
                let whose = ToolTarget::cgroup(path.clone());
                faults(&["--cgroup", &folder.to_string_lossy()], whose)
            }
            Self::Processes => faults(&[], ToolTarget::default()),
            Self::Reclaimers => ToolSpec {
                tool: "drsnoop",
                args: words(&["--memcg", "--stack", "-d", &seconds]),
                value: ("delay", Unit::Nanoseconds),
                target: ToolTarget::default(),
            },
            Self::Readers => ToolSpec {
                tool: "faults",
                args: words(&["-M", "-d", &seconds]),
                value: ("faults", Unit::Count),
                target: ToolTarget::default(),
            },
            Self::KernelPages => memleak("-k=pages"),
            Self::KernelSlabs => memleak("-k=slab"),
        }
    }
}

/// Runs the tools for the culprits of these rules, the worst first, and prints the answer of each, with the container
/// if that is requested. Ctrl-C ends the tools early.
///
/// # Errors
/// If nothing can be printed, or there is no directory for the tools' profiles. If a tool cannot run, the reason is
/// printed.
pub(crate) fn ask(
    culprits: Vec<(&'static str, Culprit)>,
    (seconds, container): (Duration, bool),
    poller: Poller<'_>,
    output: &mut Output,
) -> Result<()> {
    let mut asked: Vec<(ToolSpec, Vec<&'static str>)> = Vec::new();
    for (rule, culprit) in culprits {
        let question = culprit.question(seconds);
        match asked.iter_mut().find(|(other, _)| *other == question) {
            Some((_, rules)) => rules.push(rule),
            None => asked.push((question, vec![rule])),
        }
    }
    let left_out = asked.split_off(asked.len().min(MAX_TOOLS));
    if asked.is_empty() {
        memtools::message!(
            "nothing was found that stacks could explain, and no process grows by 1 MiB per second"
        );
        return Ok(());
    }
    for (question, rules) in left_out {
        let (rules, command) = (rules.join(", "), question.command());
        memtools::message!("not run, after {MAX_TOOLS} others: {command} (for {rules})");
    }

    let folder = tempfile::tempdir().context("failed to create a directory for profiles")?;
    let started: Vec<_> = asked
        .iter()
        .enumerate()
        .map(|(number, (question, _))| Run::start(question, &folder, number))
        .collect();
    let commands: Vec<String> = asked.iter().map(|(one, _)| one.command()).collect();
    memtools::message!("running {}; Ctrl-C to end", commands.join(" and "));
    let processes: Vec<Process> = started
        .iter()
        .flatten()
        .map(|run| Process::open(run.child.id()))
        .collect::<Result<_>>()?;
    wait_for(&processes, poller)?;
    for ((question, rules), run) in asked.iter().zip(started) {
        let outcome = run.and_then(Run::end);
        output.row(&ToolResult::new(rules, question, &outcome, container))?;
    }
    output.flush()
}

/// Waits until all tools have ended. A signal to memtriage ends them.
fn wait_for<'a>(processes: &'a [Process], mut poller: Poller<'a>) -> Result<()> {
    let signal_all = |signal| {
        for process in processes {
            tools::signal(process.pid(), signal);
        }
    };
    for process in processes {
        poller.watch_exit(process);
    }
    let mut deadline = None;
    while !processes.iter().all(Process::exited) {
        let wake = poller.wait(deadline)?;
        if wake.deadline {
            signal_all(Signal::SIGKILL);
            deadline = None;
        } else if wake.stop && deadline.is_none() {
            signal_all(Signal::SIGINT);
            deadline = Some(Instant::now() + KILL_TIMEOUT);
        }
    }
    Ok(())
}

/// Answer of a tool.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "who")]
pub(crate) struct ToolResult<'a> {
    /// Rules whose findings the tool was run for.
    rules: &'a [&'static str],
    command: String,
    #[serde(flatten)]
    target: &'a ToolTarget,
    /// Whether text shows the container.
    #[serde(skip)]
    container: bool,
    unit: Unit,
    /// Sum of the numbers of all stacks.
    sum: i64,
    /// Largest stacks, the largest first.
    stacks: Vec<Stack<'a>>,
    /// Counts of the tool's object `lost`, if the tool has lost anything.
    lost: Option<Value>,
    /// Reason why there is no profile.
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct Stack<'a> {
    comm: &'a str,
    value: i64,
    /// Names of the frames, innermost first.
    frames: &'a [String],
}

impl<'a> ToolResult<'a> {
    /// Makes the answer of a tool that was run for these rules: the largest stacks of its profile, or the reason why
    /// there is none. `container`: whether text shows the container.
    pub(crate) fn new(
        rules: &'a [&'static str],
        question: &'a ToolSpec,
        outcome: &'a Result<(SavedProfile, Option<Value>)>,
        container: bool,
    ) -> Self {
        let (kind, unit) = question.value;
        let (profile, error) = match outcome {
            Ok((profile, _)) => (Some(profile), None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        let largest = profile.and_then(|profile| profile.largest(kind, MAX_STACKS));
        let (stacks, sum) = largest.unwrap_or_default();
        let stacks = stacks.into_iter().map(|(names, value)| Stack {
            comm: &names.comm,
            value,
            frames: &names.frames,
        });
        Self {
            rules,
            command: question.command(),
            target: &question.target,
            container,
            unit,
            sum,
            stacks: stacks.collect(),
            lost: outcome.as_ref().ok().and_then(|(_, lost)| lost.clone()),
            error,
        }
    }
}

impl Row for ToolResult<'_> {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let inside = container::inside(self.target.cgroup_info().filter(|_| self.container));
        let (rules, command) = (self.rules.join(", "), &self.command);
        writeln!(out, "\nwho   {rules}{inside}: {command}")?;
        match &self.error {
            Some(error) => writeln!(out, "      {error}")?,
            None if self.stacks.is_empty() => writeln!(out, "      nothing came")?,
            None => {}
        }
        if let Some(lost) = self.lost.as_ref().and_then(Value::as_object) {
            let lost = lost.iter().filter(|(_, count)| **count != 0);
            let lost: Vec<String> = lost
                .map(|(what, count)| format!("{count} {what}"))
                .collect();
            writeln!(out, "      [lost] {}", lost.join(", "))?;
        }
        for Stack {
            comm,
            value,
            frames,
        } in &self.stacks
        {
            let (value, sum) = (self.unit.text(*value), self.unit.text(self.sum));
            writeln!(out, "      {value} of {sum}: {comm}")?;
            for frame in frames.iter().take(MAX_FRAMES) {
                writeln!(out, "        {frame}")?;
            }
            if frames.len() > MAX_FRAMES {
                writeln!(out, "        ... {} more", frames.len() - MAX_FRAMES)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_culprit_has_a_command_of_so_many_seconds() {
        let command = |culprit: Culprit| culprit.question(Duration::from_millis(2500)).command();
        assert_eq!(command(Culprit::Process(7)), "faults --bytes -p 7 -d 2.5");
        assert_eq!(
            command(Culprit::Cgroup("/sys/fs/cgroup/a b".into(), "/a b".into())),
            "faults --bytes --cgroup '/sys/fs/cgroup/a b' -d 2.5"
        );
        assert_eq!(command(Culprit::Processes), "faults --bytes -d 2.5");
        assert_eq!(command(Culprit::Readers), "faults -M -d 2.5");
        assert_eq!(
            command(Culprit::Reclaimers),
            "drsnoop --memcg --stack -d 2.5"
        );
        assert_eq!(
            command(Culprit::KernelPages),
            "memleak -k=pages --mem-limit 128M 2.5 1"
        );
        assert_eq!(
            command(Culprit::KernelSlabs),
            "memleak -k=slab --mem-limit 128M 2.5 1"
        );
    }

    #[test]
    fn an_answer_tells_stacks_losses_and_reasons() {
        let frames: Vec<String> = (0..18).map(|number| format!("f{number}")).collect();
        let whose = ToolTarget::cgroup("/system.slice/db.service".into());
        let mut answer = ToolResult {
            rules: &["slab", "vmalloc"],
            command: "memleak -k".into(),
            target: &whose,
            container: false,
            unit: Unit::Bytes,
            sum: 4096,
            stacks: vec![Stack {
                comm: "sh",
                value: 2048,
                frames: &frames,
            }],
            lost: Some(serde_json::json!({"events": 7, "stacks": 0})),
            error: None,
        };
        let text = |answer: &ToolResult<'_>| {
            let mut out = Vec::new();
            answer.text(&mut out).expect("memory");
            String::from_utf8(out).expect("text")
        };
        let shown = text(&answer);
        assert!(
            shown.starts_with(
                "\nwho   slab, vmalloc: memleak -k\n      [lost] 7 events\n      \
                 2.0K of 4.0K: sh\n        f0\n"
            ),
            "{shown}"
        );
        assert!(
            shown.ends_with("        f15\n        ... 2 more\n"),
            "{shown}"
        );
        answer.container = true;
        let shown = text(&answer);
        assert!(
            shown.starts_with("\nwho   slab, vmalloc in db: memleak -k\n"),
            "{shown}"
        );
        let many = ToolTarget::default();
        answer.target = &many;
        assert!(!text(&answer).contains(" in "));
        answer.stacks.clear();
        assert!(text(&answer).contains("\n      nothing came\n"));
        answer.error = Some("no root".into());
        assert!(text(&answer).contains("\n      no root\n"));
    }
}
