//! brkstack against a workload that makes known numbers of calls, each kind of call from a function of its own.

mod options;

use std::collections::HashMap;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use crate::harness::{self, Tool, ToolOutput, Workload, workload};

pub(crate) const READY: &str = "tracing brk(2)";

/// Number of calls of each kind: grow, shrink, query.
const CALLS: [&str; 3] = ["23", "7", "5"];

pub(crate) fn tests() -> Vec<Trial> {
    let own = harness::tests! { "brkstack":
        every_call_is_counted_by_stack,
        growth_is_told_apart,
        bytes_are_those_of_the_growth,
        events_have_a_line_each,
        each_event_has_its_own_stack,
        a_process_that_has_exited_has_names,
        processes_can_be_kept_apart [Once],
        kernel_stacks_are_marked,
        intervals_add_up,
        a_command_is_traced_from_its_start,
        what_does_not_fit_is_counted,
        threads_at_once_are_all_counted,
    };
    [own, options::tests()].into_iter().flatten().collect()
}

/// Traces the workload by its PID with these options.
fn trace(options: &[&str]) -> Result<(ToolOutput, HashMap<String, String>)> {
    let mut program = Workload::start("brk", &CALLS)?;
    let pid = program.pid();
    let mut tool = Tool::start("brkstack", &[&["-p", &pid], options].concat())?;
    tool.wait_for_stderr(READY)?;
    let facts = program.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok((ended, facts))
}

/// Eight threads on two CPUs preempt one another in our BPF programs, where the kernel permits that.
fn threads_at_once_are_all_counted() -> Result<()> {
    for options in [&[][..], &["-K"], &["--events"], &["--events", "-j", "-UK"]] {
        let mut program = Workload::start("contend", &["8", "1009", "brk"])?;
        let pid = program.pid();
        let mut tool = Tool::start("brkstack", &[&["-p", &pid], options].concat())?;
        tool.wait_for_stderr(READY)?;
        let facts = program.work()?;
        let ended = tool.interrupt()?;
        ensure!(facts["operations"] == "8072", "{facts:?}");
        let counted: u64 = if options == ["--events"] {
            ended.stdout.lines().count() as u64 - 1
        } else if options.contains(&"--events") {
            // Each call has a stack that was not lost.
            let whole = |line: &&str| is_call(line) && !line.contains("_stack\":[]");
            ended.stdout.lines().filter(whole).count() as u64
        } else {
            folded(&ended.stdout)?.values().sum()
        };
        ensure!(
            counted == 8072 && !ended.stderr.contains("lost"),
            "{options:?}: {counted}: {}",
            ended.stderr
        );
    }
    Ok(())
}

/// Whether a line of JSON is a call. The last line is another object, which says how stacks were walked.
fn is_call(line: &&str) -> bool {
    line.starts_with(r#"{"type":"call","#)
}

/// Returns the weight of each folded line, by its frames. No stack may be there twice.
fn folded(stdout: &str) -> Result<HashMap<Vec<&str>, u64>> {
    let stacks = harness::folded(stdout)?;
    let lines = stacks.len();
    let weights: HashMap<_, _> = stacks.into_iter().collect();
    ensure!(weights.len() == lines, "twice: {stdout}");
    Ok(weights)
}

/// Returns the weights by innermost frame. Every line must have the root frame `root`.
fn by_leaf<'a>(stdout: &'a str, root: &str) -> Result<HashMap<&'a str, u64>> {
    harness::by_leaf(folded(stdout)?, root)
}

fn every_call_is_counted_by_stack() -> Result<()> {
    let (ended, _) = trace(&[])?;
    let leaves = by_leaf(&ended.stdout, "brk")?;
    let expected = HashMap::from([("grow_heap", 23), ("shrink_heap", 7), ("ask_heap", 5)]);
    ensure!(leaves == expected, "{leaves:?}");
    let whole = |stack: &Vec<&str>| stack.contains(&"main");
    ensure!(folded(&ended.stdout)?.keys().all(whole), "{}", ended.stdout);
    ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
    Ok(())
}

fn growth_is_told_apart() -> Result<()> {
    let (ended, _) = trace(&["--growth"])?;
    let leaves = by_leaf(&ended.stdout, "brk")?;
    ensure!(leaves == HashMap::from([("grow_heap", 23)]), "{leaves:?}");
    Ok(())
}

fn bytes_are_those_of_the_growth() -> Result<()> {
    let (ended, facts) = trace(&["--bytes"])?;
    let leaves = by_leaf(&ended.stdout, "brk")?;
    let bytes = 23 * facts["bytes"].parse::<u64>()?;
    ensure!(
        leaves == HashMap::from([("grow_heap", bytes)]),
        "{leaves:?}"
    );
    Ok(())
}

fn events_have_a_line_each() -> Result<()> {
    let (ended, facts) = trace(&["--events"])?;
    let mut lines = ended.stdout.lines();
    let header: Vec<&str> = lines
        .next()
        .context("no header")?
        .split_whitespace()
        .collect();
    ensure!(
        header == ["TIME", "PID", "COMM", "OLD", "NEW", "GROWTH"],
        "{header:?}"
    );
    let page: i64 = facts["bytes"].parse()?;
    let steps = [(23, page), (7, -page), (5, 0)];
    let expected = steps
        .iter()
        .flat_map(|&(calls, growth)| vec![growth; calls]);
    let mut end = facts["old"].clone();
    for growth in expected {
        let line = lines.next().context("a call is missing")?;
        let fields: Vec<&str> = line.split_whitespace().collect();
        ensure!(
            fields[2] == "brk" && fields[3] == end,
            "{line}: not from {end}"
        );
        ensure!(fields[5] == growth.to_string(), "{line}: not by {growth}");
        end = fields[4].to_owned();
    }
    ensure!(end == facts["new"], "{end} is not the end");
    ensure!(lines.next().is_none(), "{}", ended.stdout);
    Ok(())
}

/// Function where system calls enter the kernel: the outermost kernel frame of each call. do_syscall_64(), which
/// is called from this function, may have jumped to the function that it ends with (a tail call).
const KERNEL_ENTRY: &str = "entry_SYSCALL_64_after_hwframe";

/// Each call's stack names the function that made the call, in the order of the calls: in the lines below the
/// call's line, or in its JSON object.
fn each_event_has_its_own_stack() -> Result<()> {
    let calls = [(23, "grow_heap"), (7, "shrink_heap"), (5, "ask_heap")];
    let expected = calls
        .map(|(calls, function)| vec![function; calls])
        .concat();
    for options in [&["-U"][..], &["-K"], &["-UK"]] {
        let user = options[0].contains('U');
        let kernel = options[0].contains('K');
        let (ended, _) = trace(&[&["--events", "-j"], options].concat())?;
        let mut calls = ended.objects()?;
        calls.retain(|object| object["type"] == "call");
        ensure!(calls.len() == 35, "{ended:?}");
        for (call, function) in calls.iter().zip(&expected) {
            let frames = &call["user_frames"];
            ensure!(
                if user {
                    frames[0]["symbol"] == *function
                } else {
                    frames.is_null()
                },
                "{options:?}, {function}: {call}"
            );
            let frames = call["kernel_frames"].as_array();
            let entry = |frame: &Value| frame["symbol"] == KERNEL_ENTRY;
            ensure!(
                frames.is_some_and(|frames| frames.iter().any(entry)) == kernel,
                "{options:?}: {call}"
            );
        }

        let (ended, _) = trace(&[&["--events"], options].concat())?;
        let frame = |name: &str| format!("    {name}+0x");
        let lines = ended.stdout.lines().filter(|line| line.starts_with("    "));
        let functions = lines.clone().filter_map(|line| {
            expected
                .iter()
                .find(|function| line.starts_with(&frame(function)))
        });
        let of_user = if user { expected.clone() } else { Vec::new() };
        ensure!(functions.copied().eq(of_user), "{options:?}: {ended:?}");
        let count = |wanted: &str| {
            lines
                .clone()
                .filter(|line| line.starts_with(wanted))
                .count()
        };
        ensure!(
            count(&frame(KERNEL_ENTRY)) == if kernel { 35 } else { 0 }
                && count("    --") == if user && kernel { 35 } else { 0 },
            "{options:?}: {ended:?}"
        );
    }
    Ok(())
}

/// Before the process starts, only its name is known. After it has exited, only the log of its mappings has its
/// addresses.
fn a_process_that_has_exited_has_names() -> Result<()> {
    let folder = harness::scratch()?;
    let path = folder.path().join("brk-that-exits");
    harness::copy(&workload("brk"), &path)?;
    let mut tool = Tool::start("brkstack", &["-n", "brk-that"])?;
    tool.wait_for_stderr(READY)?;
    let mut program = Workload::spawn(Command::new(path).args(CALLS))?;
    program.work()?;
    program.finish()?;
    let ended = tool.interrupt()?;
    let leaves = by_leaf(&ended.stdout, "brk-that-exits")?;
    // The start-up code of libc makes further calls.
    let calls = ["grow_heap", "shrink_heap", "ask_heap"].map(|leaf| leaves.get(leaf).copied());
    ensure!(calls == [Some(23), Some(7), Some(5)], "{leaves:?}");
    Ok(())
}

fn processes_can_be_kept_apart() -> Result<()> {
    for (options, apart) in [(&[][..], false), (&["-P"], true)] {
        let mut programs = [
            Workload::start("brk", &CALLS)?,
            Workload::start("brk", &["11"])?,
        ];
        let pids = programs.each_ref().map(Workload::pid);
        let mut tool = Tool::start("brkstack", &[&["-p", &pids.join(",")], options].concat())?;
        tool.wait_for_stderr(READY)?;
        for program in &mut programs {
            program.work()?;
        }
        let ended = tool.interrupt()?;
        let grown: HashMap<String, u64> = folded(&ended.stdout)?
            .into_iter()
            .filter(|(stack, _)| stack.contains(&"grow_heap"))
            .map(|(stack, calls)| (stack[0].to_owned(), calls))
            .collect();
        let expected = if apart {
            HashMap::from([
                (format!("brk-{}", pids[0]), 23),
                (format!("brk-{}", pids[1]), 11),
            ])
        } else {
            HashMap::from([("brk".to_owned(), 34)])
        };
        ensure!(grown == expected, "{grown:?}");
    }
    Ok(())
}

fn kernel_stacks_are_marked() -> Result<()> {
    let (ended, _) = trace(&["-UKa"])?;
    for (stack, _) in folded(&ended.stdout)? {
        let delimiter = stack.iter().position(|frame| *frame == "-");
        let (user, kernel) = stack.split_at(delimiter.with_context(|| format!("{stack:?}"))?);
        ensure!(user.contains(&"main"), "{user:?}");
        ensure!(
            kernel[1..].iter().all(|frame| frame.ends_with("_[k]")),
            "{kernel:?}"
        );
        ensure!(kernel.contains(&"do_syscall_64_[k]"), "{kernel:?}");
    }
    for (options, expected) in [(&["-K"][..], 35), (&["-K", "--growth"], 23)] {
        let (ended, _) = trace(options)?;
        let calls: u64 = folded(&ended.stdout)?.values().sum();
        ensure!(
            calls == expected && !ended.stdout.contains("main"),
            "{options:?}: {}",
            ended.stdout
        );
    }
    Ok(())
}

fn intervals_add_up() -> Result<()> {
    let (ended, _) = trace(&["-T", "0.1"])?;
    let calls = |name: &str| -> Result<u64> {
        let blocks = ended.stdout.split("\n\n");
        let counts = blocks.filter(|block| block.contains(&format!("  {name}\n")));
        let count = |block: &str| {
            block
                .rsplit(' ')
                .next()
                .context("no count")?
                .trim()
                .parse::<u64>()
                .context("no number")
        };
        counts.map(count).sum()
    };
    ensure!(
        calls("grow_heap")? == 23 && calls("shrink_heap")? == 7,
        "{}",
        ended.stdout
    );
    Ok(())
}

fn a_command_is_traced_from_its_start() -> Result<()> {
    let command = format!("{} {}", workload("brk").display(), CALLS.join(" "));
    let mut program = Command::new(harness::tool("brkstack"));
    program.args(["-f", "-c", &command]).stdin(Stdio::null());
    let ended = Tool::spawn(&mut program)?.wait()?;
    ensure!(ended.status.success(), "{ended:?}");
    // The command's own lines are also in the output.
    let stacks = ended.stdout.lines().filter(|line| line.contains(';'));
    let stacks = stacks.collect::<Vec<_>>().join("\n");
    let leaves = by_leaf(&stacks, "brk")?;
    ensure!(
        leaves["grow_heap"] == 23 && leaves["shrink_heap"] == 7,
        "{leaves:?}"
    );

    let ended = harness::run("brkstack", &["-c", "sh -c 'exit 7'"])?;
    ensure!(ended.status.code() == Some(7), "{ended:?}");
    Ok(())
}

fn what_does_not_fit_is_counted() -> Result<()> {
    let (ended, _) = trace(&["--stack-storage-size", "1"])?;
    let leaves = by_leaf(&ended.stdout, "brk")?;
    let calls: u64 = leaves.values().sum();
    let lost = leaves["[lost]"];
    ensure!(calls == 35 && lost > 0 && lost < 35, "{leaves:?}");
    ensure!(
        ended.stderr.contains(&format!("lost {lost} stacks")),
        "{}",
        ended.stderr
    );
    Ok(())
}
