//! Every command in the tables and in the first commands of README.md and docs/questions.md is run once.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use crate::harness::{self, Cgroup, Tool, Workload, workload};

const README: &str = include_str!("../../README.md");

const QUESTIONS: &str = include_str!("../../docs/questions.md");

/// Commands that need a hook that some kernels lack.
const BY_KPROBES: [&str; 2] = ["swapin", "hfaults --thp"];

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "readme":
        its_commands_run [Once],
        its_commands_by_kprobes_run [Kprobes],
    }
}

/// Returns the commands in the code of tables, and the lines that consist of a command and a comment, each once,
/// without what they are piped into.
fn commands() -> BTreeSet<&'static str> {
    let lines = || README.lines().chain(QUESTIONS.lines());
    let tables = lines().filter(|line| line.starts_with('|'));
    let code = tables.flat_map(|line| line.split('`').skip(1).step_by(2));
    let commands = code.map(|code| code.split("\\|").next().unwrap_or(code).trim());
    let commented = lines().filter_map(|line| Some(line.split_once("  # ")?.0.trim()));
    let commands = commands.chain(commented);
    let tools: Vec<&str> = README
        .lines()
        .filter_map(|line| line.strip_prefix("| [")?.split(']').next())
        .collect();
    commands
        .filter(|command| {
            tools
                .iter()
                .any(|tool| command.split(' ').next() == Some(tool))
        })
        .collect()
}

/// Starts each wanted command, and ends it when it traces. Returns the number of commands.
fn run(wanted: impl Fn(&str) -> bool) -> Result<usize> {
    let target = Workload::start("alloc", &["hold"])?;
    let other = Workload::start("alloc", &["hold"])?;
    let cgroup = Cgroup::new()?;
    cgroup.add(&target.pid())?;
    let program = format!("{} hold", workload("alloc").display());
    let folder = harness::scratch()?;
    let old = folder.path().join("old.pb.gz").display().to_string();
    harness::run("memleak", &["-o", "0", "-c", &program, "--export", &old])?;
    let truth = folder.path().join("types").display().to_string();
    let mut with_heap = Workload::start("types-stripped", &["23", &truth])?;
    with_heap.work()?;
    let mut ran = 0;
    for command in commands().into_iter().filter(|command| wanted(command)) {
        // heapscan, which traces nothing, and a verdict end by themselves.
        let looks_once = command.starts_with("heapscan") || command.contains("--verdict");
        let words = command.split(' ').map(|word| match word {
            "PID" if looks_once => with_heap.pid(),
            "PID" => target.pid(),
            "PID,PID" => format!("{},{}", target.pid(), other.pid()),
            "PATH" => cgroup.path().display().to_string(),
            "COMMAND" => program.clone(),
            // 0 selects a free port.
            "6060" => "0".to_owned(),
            "FILE.prom" => folder.path().join("x.prom").display().to_string(),
            "FILE.pftrace" => folder.path().join("x.pftrace").display().to_string(),
            "OLD.pb.gz" => old.clone(),
            word => word.trim_matches('\'').to_owned(),
        });
        let words: Vec<String> = words.collect();
        let args: Vec<&str> = words[1..].iter().map(String::as_str).collect();
        let mut tool = Tool::start(&words[0], &args)?;
        let is_triage = words[0] == "memtriage";
        let ended = if command.contains("--watch") {
            tool.wait_for_output("MemTotal")?;
            tool.interrupt()?
        } else if is_triage || looks_once {
            tool.wait()?
        } else {
            tool.wait_for_any(&["Ctrl-C to end", "allocator: ", "Attaching to kernel"])
                .with_context(|| command.to_owned())?;
            if command.contains("COMMAND") {
                tool.wait()?
            } else {
                tool.interrupt()?
            }
        };
        // memtriage's exit status says whether it has found something.
        let found = is_triage && ended.status.code() == Some(3);
        ensure!(ended.status.success() || found, "{command}: {ended:?}");
        ran += 1;
    }
    drop((target, other));
    Ok(ran)
}

fn by_kprobes(command: &str) -> bool {
    BY_KPROBES.iter().any(|start| command.starts_with(start))
}

fn its_commands_run() -> Result<()> {
    let ran = run(|command| !by_kprobes(command))?;
    ensure!(ran >= 30, "{ran} of {:?}", commands());
    Ok(())
}

fn its_commands_by_kprobes_run() -> Result<()> {
    let ran = run(by_kprobes)?;
    ensure!(ran >= 3, "{ran} of {:?}", commands());
    Ok(())
}
