//! --doctor: shows the conditions of this machine, runs each tool for a moment, and shows what this kernel and these
//! privileges allow it to do.

use std::io::{self, Write};
use std::process::{self, Command, Stdio};

use anyhow::{Context, Result, ensure};
use memtools::print::output::{Output, Row};
use memtools::print::text;
use memtools::run::poll::Poller;
use memtools::run::siblings;
use serde::Serialize;

use crate::machine;
use crate::screen::WIDTH;

/// Name of the tasks that the tools trace: no task has this name, so that nothing is recorded.
const NOBODY: &str = "memtools-doctor";
const MACHINE_HEADER: &str = "MACHINE     MET   WHAT IS THERE";
const HEADER: &str = "TOOL        RUNS  HOW";
/// Column at which HOW begins.
const INDENT: usize = 18;

/// Tools that are run, each with its name in the table and its options.
const CHECKS: [(&str, &[&str]); 13] = [
    ("memleak", &["0.1", "1", "-c"]),
    ("memleak -k", &["-k", "-v", "-n", NOBODY, "0.1", "1"]),
    ("mmapsnoop", LOOK),
    ("brkstack", LOOK),
    ("shmsnoop", LOOK),
    ("faults", LOOK),
    ("ffaults", LOOK),
    ("vmscan", LOOK),
    ("drsnoop", &["-n", NOBODY, "-d", "0.1"]),
    ("swapin", LOOK),
    ("hfaults", LOOK),
    ("oomkill", LOOK),
    ("heapscan", &["-p"]),
];

/// Options of most tools. (In drsnoop, -v is a column, as in BCC's.)
const LOOK: &[&str] = &["-v", "-n", NOBODY, "-d", "0.1"];

/// Row of a tool: the result of its run.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename = "tool")]
struct Checked {
    command: &'static str,
    works: bool,
    /// Way by which the tool traces; None if the tool does not report one, or does not work.
    how: Option<String>,
    /// Better ways that are not possible here, each with its reason.
    not_possible: Vec<String>,
    /// Other messages, such as what more privileges would improve.
    remarks: Vec<String>,
}

/// Whether a process of this name is memtriage or one of the other tools, also one that was installed with a suffix
/// (`memleak-mt`).
pub(crate) fn is_tool(comm: &str) -> bool {
    let name = comm.split('-').next();
    let mut checked = CHECKS.iter().map(|(tool, _)| *tool);
    name == Some("memtriage") || checked.any(|tool| Some(tool) == name)
}

/// Prints the conditions of the machine, runs the tools one after the other, and prints one or more lines for each.
/// Returns whether all tools can run.
///
/// # Errors
/// If nothing can be printed, or a signal ends the run before all tools were run.
pub(crate) fn check(mut poller: Poller<'_>, output: &mut Output) -> Result<bool> {
    output.header(MACHINE_HEADER)?;
    for condition in machine::conditions() {
        output.row(&condition)?;
    }
    let mut all = true;
    output.header(HEADER)?;
    for (command, options) in CHECKS {
        let stop = poller.poll_now(None)?.stop;
        ensure!(
            !stop,
            "ended before {command} and the tools after it were run"
        );
        let checked = run(command, options).unwrap_or_else(|error| Checked {
            command,
            remarks: vec![format!("{error:#}")],
            ..Checked::default()
        });
        all &= checked.works;
        output.row(&checked)?;
        output.flush()?;
    }
    Ok(all)
}

fn run(command: &'static str, options: &[&str]) -> Result<Checked> {
    let tool = command.split(' ').next().unwrap_or(command);
    let program = siblings::path(tool)?;
    let mut child = Command::new(&program);
    child.args(options);
    if options.ends_with(&["-c"]) {
        // memtriage itself is a program that always exists here, and has an allocator.
        let own = std::env::current_exe().context("failed to find memtriage")?;
        child.arg(shell_words::join([&*own.to_string_lossy(), "--version"]));
    } else if options.ends_with(&["-p"]) {
        // memtriage itself, which waits.
        child.arg(process::id().to_string());
    }
    let ended = child
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .with_context(|| format!("failed to run {}", program.display()))?;
    let messages = String::from_utf8_lossy(&ended.stderr);
    Ok(Checked::of(
        command,
        tool,
        ended.status.success(),
        &messages,
    ))
}

impl Checked {
    /// Parses a tool's messages.
    fn of(command: &'static str, tool: &str, works: bool, messages: &str) -> Self {
        let mut checked = Self {
            command,
            works,
            ..Self::default()
        };
        let prefix = format!("{tool}: ");
        for line in messages.lines() {
            if line.starts_with("libbpf: ") {
                continue;
            }
            let line = text::display_name(line);
            if let Some(reason) = line.strip_prefix("  ") {
                // An error repeats reasons that were printed before.
                if !reason.starts_with(' ') && !checked.not_possible.iter().any(|one| one == reason)
                {
                    checked.not_possible.push(reason.to_owned());
                }
            } else if let Some(message) = line.strip_prefix(&prefix) {
                checked.add(message.trim_end_matches(':'));
            }
        }
        checked
    }

    fn add(&mut self, message: &str) {
        let how = ["tracing ", "allocator: "];
        let of_the_run =
            message.starts_with("probes: ") || message.starts_with(|c: char| c.is_ascii_digit());
        if self.works && how.iter().any(|start| message.starts_with(start)) {
            let ends = ["... Ctrl-C to end", ", Ctrl-C to end"];
            let end = ends.iter().find_map(|end| message.strip_suffix(end));
            self.how = Some(end.unwrap_or(message).to_owned());
        } else if !of_the_run {
            self.remarks.push(message.to_owned());
        }
    }
}

impl Row for Checked {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let not_possible = self.not_possible.iter();
        let not_possible = not_possible.map(|reason| format!("not possible: {reason}"));
        let all: Vec<String> = self
            .how
            .iter()
            .chain(&self.remarks)
            .cloned()
            .chain(not_possible)
            .collect();
        write_row(
            out,
            self.command,
            self.works,
            all.iter().map(String::as_str),
        )
    }
}

/// Writes a name, yes or no, and texts, each of which begins on a line of its own.
pub(crate) fn write_row<'a>(
    out: &mut dyn Write,
    name: &str,
    fit: bool,
    texts: impl IntoIterator<Item = &'a str>,
) -> io::Result<()> {
    let answer = if fit { "yes" } else { "no" };
    let mut lead = format!("{name:<12}{answer:<6}");
    for line in texts
        .into_iter()
        .flat_map(|text| text::wrapped(text, WIDTH - INDENT))
    {
        writeln!(out, "{lead}{line}")?;
        lead = " ".repeat(INDENT);
    }
    if lead.trim().is_empty() {
        return Ok(());
    }
    writeln!(out, "{}", lead.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_tell_how_and_what_is_not_possible() {
        let messages = "libbpf: map 'x': created\n\
            not possible here:\n  fentry: this kernel refuses fentry\n    libbpf: a line\n\
            oomkill: failed to set oom_score_adj; it requires CAP_SYS_RESOURCE\n\
            oomkill: tracing OOM kills (mark_victim alone), Ctrl-C to end\n\
            oomkill: 7 user stacks, all complete\n";
        let checked = Checked::of("oomkill", "oomkill", true, messages);
        assert_eq!(
            checked.how.as_deref(),
            Some("tracing OOM kills (mark_victim alone)")
        );
        assert_eq!(checked.not_possible, ["fentry: this kernel refuses fentry"]);
        assert_eq!(
            checked.remarks,
            ["failed to set oom_score_adj; it requires CAP_SYS_RESOURCE"]
        );
    }

    #[test]
    fn a_tool_that_cannot_run_tells_each_reason_once() {
        let messages = "not possible here:\n  kprobe: no kprobes\nnot possible here:\n  fentry: refused\n\
            swapin: no way to attach works on this kernel:\n  kprobe: no kprobes\n  fentry: refused\n";
        let checked = Checked::of("swapin", "swapin", false, messages);
        assert_eq!(
            checked.not_possible,
            ["kprobe: no kprobes", "fentry: refused"]
        );
        let mut text = Vec::new();
        checked.text(&mut text).expect("memory");
        assert_eq!(
            String::from_utf8(text).expect("text"),
            "swapin      no    no way to attach works on this kernel\n                  \
             not possible: kprobe: no kprobes\n                  not possible: fentry: refused\n"
        );
    }

    #[test]
    fn a_tool_that_says_nothing_has_a_line() {
        let checked = Checked::of("faults", "faults", true, "");
        let mut text = Vec::new();
        checked.text(&mut text).expect("memory");
        assert_eq!(String::from_utf8(text).expect("text"), "faults      yes\n");
    }
}
