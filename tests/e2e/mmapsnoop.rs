//! mmapsnoop, row by row against what tests/workload/mmap.c did.

mod calls;
mod filters;

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::Value;

use crate::harness::{self, Tool, ToolOutput, Workload};

pub(crate) fn tests() -> Vec<Trial> {
    let own = harness::tests! { "mmapsnoop":
        the_book_s_columns [Once],
        all_columns [Once],
        stacks_below_rows,
        folded_stacks,
        paths,
        long_paths_are_cut,
        a_duration_ends_it [Once],
        what_is_not_there_is_named,
    };
    [own, calls::tests(), filters::tests()]
        .into_iter()
        .flatten()
        .collect()
}

fn start(args: &[&str]) -> Result<Tool> {
    let mut tool = Tool::start("mmapsnoop", args)?;
    tool.wait_for_stderr("tracing mmap(2)")?;
    Ok(tool)
}

fn end(tool: Tool) -> Result<ToolOutput> {
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(ended)
}

/// Traces one workload. Returns its PID, the `calls` of its facts, and what the tool printed.
fn trace(program: &[&str], args: &[&str]) -> Result<(String, Vec<Call>, ToolOutput)> {
    let mut workload = Workload::start("mmap", program)?;
    let pid = workload.pid();
    let tool = start(&[&["-p", &pid], args].concat())?;
    let facts = workload.work()?;
    let ended = end(tool)?;
    Ok((pid, calls(&facts["calls"])?, ended))
}

/// Call that the workload made.
#[derive(Debug)]
struct Call {
    args: Vec<u64>,
    /// Result as JSON has it: the value, or null.
    result: Value,
    /// Name of the error, or null.
    error: Value,
}

/// Parses `0x1:0x2:..:RESULT,...`
fn calls(fact: &str) -> Result<Vec<Call>> {
    let call = |text: &str| -> Result<Call> {
        let (args, result) = text.rsplit_once(':').context("no arguments")?;
        let args = args
            .split(':')
            .map(|arg| Ok(u64::from_str_radix(arg.trim_start_matches("0x"), 16)?))
            .collect::<Result<_>>()?;
        let error = result.strip_prefix('-');
        Ok(Call {
            args,
            result: if error.is_some() {
                Value::Null
            } else {
                result.into()
            },
            error: error.into(),
        })
    };
    fact.split(',')
        .map(|text| call(text).with_context(|| text.to_owned()))
        .collect()
}

fn json_rows(ended: &ToolOutput) -> Result<Vec<Value>> {
    let mut rows = ended.objects()?;
    rows.retain(|row| row["type"] != "unwinding");
    Ok(rows)
}

/// Returns a path where a workload can put a file. The path crosses a mount.
fn file() -> PathBuf {
    let folder = std::env::var_os("MEMTOOLS_DISK").unwrap_or_else(|| "/dev/shm".into());
    Path::new(&folder).join(format!(
        "mmapsnoop-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ))
}

fn the_book_s_columns() -> Result<()> {
    let path = file();
    let name = path.file_name().context("a name")?.to_string_lossy();
    let (pid, calls, ended) = trace(&["file", "23", &path.to_string_lossy()], &[])?;
    let mut expected = "PID    COMM           PROT MAP   OFFS(KB) SIZE(KB) FILE\n".to_owned();
    for Call { args, .. } in &calls {
        let (offset, size) = (args[5] / 1024, args[1] / 1024);
        expected += &format!("{pid:<6} mmap           R--  -P--  {offset:<8} {size:<8} {name}\n");
    }
    ensure!(
        ended.stdout == expected,
        "{}\nis not\n{expected}",
        ended.stdout
    );

    let (_, _, ended) = trace(&["anon", "23"], &["-T"])?;
    let (header, rows) = ended.stdout.split_once('\n').context("no header")?;
    ensure!(header.starts_with("TIME     PID    COMM "), "{header}");
    for row in rows.lines() {
        let time = row.as_bytes().get(..9).context("no time")?;
        let digits = [0, 1, 3, 4, 6, 7]
            .iter()
            .all(|&at: &usize| time[at].is_ascii_digit());
        ensure!(
            digits && time[2] == b':' && time[5] == b':' && time[8] == b' ',
            "{row}"
        );
        ensure!(row.ends_with(" [anon]"), "{row}");
    }
    ensure!(rows.lines().count() == 23, "{rows}");
    Ok(())
}

fn all_columns() -> Result<()> {
    let (pid, calls, ended) = trace(&["mremap", "3"], &["--munmap", "-r", "--flags"])?;
    let mut lines = ended.stdout.lines();
    let header = "PID    COMM           CALL   ADDRESS        PROT MAP   OFFS(KB) SIZE(KB) RESULT         \
                  FLAGS                            FILE";
    ensure!(lines.next() == Some(header), "{}", ended.stdout);
    for call in &calls {
        let (address, size) = (format!("{:#x}", call.args[0]), call.args[2] / 1024);
        let result = call.result.as_str().context("it failed")?;
        let expected = format!(
            "{pid:<6} mmap           mremap {address:<14} -    -     -        {size:<8} {result:<14} \
             {:<32} -",
            "MAYMOVE"
        );
        ensure!(
            lines.next() == Some(&expected),
            "{}\nlacks\n{expected}",
            ended.stdout
        );
    }
    Ok(())
}

fn stacks_below_rows() -> Result<()> {
    let (_, calls, ended) = trace(&["anon", "23"], &["--stack"])?;
    let mut lines = ended.stdout.lines().skip(1).peekable();
    for call in &calls {
        let row = lines.next().context("a row is missing")?;
        ensure!(
            row.ends_with(&format!(" {:<8} [anon]", call.args[1] / 1024)),
            "{row} {call:?}"
        );
        let mut frames = Vec::new();
        while let Some(frame) = lines.next_if(|line| line.starts_with("    ")) {
            frames.push(frame);
        }
        let from_main = frames.iter().any(|frame| frame.starts_with("    main+0x"));
        ensure!(from_main && frames[0].ends_with(" [mmap]"), "{frames:?}");
    }
    ensure!(lines.next().is_none(), "{}", ended.stdout);
    let (_, _, ended) = trace(&["anon", "3"], &["--stack", "-j"])?;
    for row in json_rows(&ended)? {
        ensure!(row["user_frames"].to_string().contains("\"main\""), "{row}");
    }
    Ok(())
}

fn folded_stacks() -> Result<()> {
    for (args, by_calls) in [(&["-f"][..], false), (&["-f", "--calls"], true)] {
        let mut workload = Workload::start("mmap", &["anon", "101"])?;
        let tool = start(&[&["-p", &workload.pid()], args].concat())?;
        let facts = workload.work()?;
        // Names are known although the process has exited.
        workload.finish()?;
        let ended = end(tool)?;
        let bytes: u64 = calls(&facts["calls"])?
            .iter()
            .map(|call| call.args[1])
            .sum();
        let lines: Vec<&str> = ended.stdout.lines().collect();
        let [line] = lines[..] else {
            bail!("not one stack: {ended:?}")
        };
        let (stack, weight) = line.rsplit_once(' ').context("no weight")?;
        let expected = if by_calls { 101 } else { bytes };
        ensure!(weight == expected.to_string(), "{line}: not {expected}");
        let frames: Vec<&str> = stack.split(';').collect();
        ensure!(frames[0] == "mmap" && frames.contains(&"main"), "{line}");
        ensure!(frames.last() == Some(&"mmap"), "{line}");
    }
    // A call that failed has mapped nothing, so it has no stack.
    let (_, _, ended) = trace(&["noreplace", "3"], &["-f"])?;
    ensure!(ended.stdout.is_empty(), "{ended:?}");
    Ok(())
}

fn file_of_first_row(path: &str, args: &[&str]) -> Result<Value> {
    let (_, _, ended) = trace(&["file", "1", path], &[&["-j"], args].concat())?;
    Ok(json_rows(&ended)?.first().context("no row")?["file"].clone())
}

fn paths() -> Result<()> {
    // The path leads through a mount, and has a control character.
    let path = file().with_extension("\x1b");
    let shown = path.to_string_lossy().replace('\x1b', "\\x1b");
    let found = file_of_first_row(&path.to_string_lossy(), &["--path"])?;
    ensure!(found == shown, "{found} is not {shown}");

    // The file is in no directory at all.
    let memory = memfd_create("known name", MFdFlags::empty())?;
    let link = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
    let named = [
        (&["--path"][..], "/memfd:known name (deleted)"),
        (&[], "memfd:known name"),
    ];
    for (args, expected) in named {
        let found = file_of_first_row(&link, args)?;
        ensure!(found == expected, "{found}");
    }

    // The path is that by which the process itself would name the file.
    let root = harness::scratch()?;
    harness::copy(&harness::workload("mmap"), &root.path().join("mmap"))?;
    let mut command = Command::new("/mmap");
    command.args(["file", "1", "/inside"]);
    let folder = root.path().to_owned();
    // SAFETY: system calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            nix::unistd::chroot(&folder)?;
            std::env::set_current_dir("/")
        });
    }
    let mut workload = Workload::spawn(&mut command)?;
    let tool = start(&["-j", "--path", "-p", &workload.pid()])?;
    workload.work()?;
    let found = json_rows(&end(tool)?)?.first().context("no row")?["file"].clone();
    ensure!(found == "/inside", "{found}");
    Ok(())
}

fn long_paths_are_cut() -> Result<()> {
    let root = harness::scratch()?;
    for (name, depth, whole) in [
        ("short", 50, true),
        ("deep", 70, false),
        (&"x".repeat(250), 7, true),
        (&"y".repeat(250), 9, false),
    ] {
        let mut path = root.path().to_owned();
        for _ in 0..depth {
            path.push(name);
        }
        fs::create_dir_all(&path)?;
        path.push("file");
        let path = path.to_string_lossy();
        let found = file_of_first_row(&path, &["--path"])?;
        let found = found.as_str().context("no file")?;
        if whole {
            ensure!(found == path, "{found} is not {path}");
        } else {
            let end = found
                .strip_prefix("...")
                .with_context(|| found.to_owned())?;
            ensure!(
                path.ends_with(end) && end.len() > 200,
                "{found} is not of {path}"
            );
        }
    }
    Ok(())
}

/// Returns a command for a shell whose first child is in another PID namespace.
fn sh(script: &str, enter: impl Fn() -> nix::Result<()> + Send + Sync + 'static) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{script}; exit $?")]);
    // SAFETY: system calls between fork and exec.
    unsafe {
        command.pre_exec(move || Ok(enter()?));
    }
    command
}

fn a_duration_ends_it() -> Result<()> {
    harness::ends_after_duration("mmapsnoop")
}

fn what_is_not_there_is_named() -> Result<()> {
    let fails =
        |args: &[&str], code, remedy| harness::expect_refusal("mmapsnoop", args, code, remedy);
    fails(&["-p", "1,4194305"], 1, "no process has PID 4194305")?;
    fails(&["-n", "0123456789abcdef"], 2, "1 to 15 bytes")?;
    fails(
        &["--cgroup", "/tmp"],
        1,
        "/tmp is not a cgroup of version 2",
    )?;
    fails(
        &["--cgroup", "/no/such"],
        1,
        "failed to open cgroup /no/such",
    )?;
    fails(&["-d", "0"], 2, "must be from 0.001")?;
    fails(&["--munmap", "-p"], 2, "-p")
}
