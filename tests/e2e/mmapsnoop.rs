//! mmapsnoop, row by row against what tests/workload/mmap.c did.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::harness::{self, Ended, Tool, Workload};

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests!("mmapsnoop":
        every_argument_and_result,
        unmapping_and_moving,
        only_failures,
        the_book_s_columns [Once],
        all_columns [Once],
        stacks_below_rows,
        folded_stacks,
        paths,
        long_paths_are_cut,
        processes_are_filtered,
        names_are_filtered,
        cgroups_are_filtered,
        containers_are_found_by_their_ids,
        numbers_are_those_of_our_namespace,
        calls_of_32_bit_programs [Compat],
        threads_at_once_are_all_shown,
        a_burst_is_complete,
        what_a_stopped_tool_loses_is_counted,
        a_duration_ends_it [Once],
        a_row_comes_at_once,
        what_is_not_there_is_named,
    )
}

fn start(args: &[&str]) -> Result<Tool> {
    let mut tool = Tool::start("mmapsnoop", args)?;
    tool.wait_for("tracing mmap(2)")?;
    Ok(tool)
}

fn end(tool: Tool) -> Result<Ended> {
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(ended)
}

/// Traces one workload. Returns its pid, its facts' `calls` and what the tool printed.
fn trace(program: &[&str], args: &[&str]) -> Result<(String, Vec<Call>, Ended)> {
    let mut workload = Workload::start("mmap", program)?;
    let pid = workload.pid();
    let tool = start(&[&["-p", &pid], args].concat())?;
    let facts = workload.work()?;
    let ended = end(tool)?;
    Ok((pid, calls(&facts["calls"])?, ended))
}

/// A call as the workload made it.
#[derive(Debug)]
struct Call {
    args: Vec<u64>,
    /// In JSON's words: the value, or null.
    result: Value,
    /// The error's name, or null.
    error: Value,
}

/// `0x1:0x2:..:RESULT,...`
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

fn json_rows(ended: &Ended) -> Result<Vec<Value>> {
    let mut rows = ended.objects()?;
    rows.retain(|row| row["type"] != "unwinding");
    Ok(rows)
}

/// Where a workload can put a file; crossed by a mount.
fn file() -> PathBuf {
    let folder = std::env::var_os("MEMTOOLS_DISK").unwrap_or_else(|| "/dev/shm".into());
    Path::new(&folder).join(format!(
        "mmapsnoop-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ))
}

fn every_argument_and_result() -> Result<()> {
    let read_write = json!(["READ", "WRITE"]);
    let read = json!(["READ"]);
    let private = |more: &[&str]| json!([&["PRIVATE"], more].concat());
    let anonymous = |more: &[&str]| json!([&["PRIVATE", "ANONYMOUS"], more].concat());
    let kinds = [
        ("anon", &read_write, anonymous(&[])),
        ("shared", &read_write, json!(["SHARED", "ANONYMOUS"])),
        ("populate", &read_write, anonymous(&["POPULATE"])),
        ("exec", &json!(["READ", "EXEC"]), anonymous(&[])),
        (
            "stack",
            &read_write,
            anonymous(&["GROWSDOWN", "NORESERVE", "STACK"]),
        ),
        (
            "hugetlb",
            &read_write,
            json!(["PRIVATE", "HUGETLB", "ANONYMOUS"]),
        ),
        (
            "huge2mb",
            &read_write,
            json!(["PRIVATE", "HUGETLB:2MB", "ANONYMOUS"]),
        ),
        ("locked", &read_write, anonymous(&["LOCKED", "32BIT"])),
        ("validate", &read, json!(["SHARED_VALIDATE"])),
        (
            "fixed",
            &read_write,
            json!(["PRIVATE", "FIXED", "ANONYMOUS"]),
        ),
        ("noreplace", &read_write, anonymous(&["FIXED_NOREPLACE"])),
        ("file", &read, private(&[])),
        ("sharedfile", &read_write, json!(["SHARED"])),
    ];
    for (kind, prot, flags) in kinds {
        let path = file().with_extension(kind);
        let name = path.to_string_lossy().into_owned();
        let with_file = kind.contains("file") || kind == "validate";
        let program = if with_file {
            vec![kind, "101", &name]
        } else {
            vec![kind, "101"]
        };
        let (pid, calls, ended) = trace(&program, &["-j"])?;
        let rows = json_rows(&ended)?;
        ensure!(
            calls.len() == 101 && rows.len() == 101,
            "{kind}: {}: {ended:?}",
            rows.len()
        );
        for (row, call) in rows.iter().zip(&calls) {
            let mut expected = json!({
                "type": "call",
                "time": row["time"],
                "pid": pid.parse::<u32>()?,
                "tid": pid.parse::<u32>()?,
                "comm": "mmap",
                // Those of the tests' own, which tests/e2e/containers.rs does not leave to chance.
                "cgroup": row["cgroup"],
                "container_id": row["container_id"],
                "call": "mmap",
                "address": format!("{:#x}", call.args[0]),
                "size_bytes": call.args[1],
                "prot": prot,
                "flags": flags,
                "offset_bytes": call.args[5],
                "file": null,
                "result": call.result,
                "error": call.error,
                "schema": 1,
            });
            if with_file {
                expected["fd"] = call.args[4].into();
                expected["file"] = path.file_name().and_then(|name| name.to_str()).into();
            }
            ensure!(*row == expected, "{kind}:\n{row}\nis not\n{expected}");
        }
        let times: Vec<&str> = rows.iter().filter_map(|row| row["time"].as_str()).collect();
        ensure!(times.len() == 101 && times.is_sorted(), "{times:?}");
        ensure!(ended.stderr.lines().count() == 1, "{}", ended.stderr);
    }
    Ok(())
}

fn unmapping_and_moving() -> Result<()> {
    for kind in ["munmap", "mremap"] {
        let (_, calls, ended) = trace(&[kind, "101"], &["-j", "--munmap"])?;
        let rows = json_rows(&ended)?;
        ensure!(calls.len() == 101 && rows.len() == 101, "{ended:?}");
        for (row, call) in rows.iter().zip(&calls) {
            ensure!(row["call"] == kind, "{row}");
            ensure!(
                row["address"] == format!("{:#x}", call.args[0]),
                "{row} {call:?}"
            );
            ensure!(
                row["result"] == call.result && row["error"] == call.error,
                "{row} {call:?}"
            );
            if kind == "mremap" {
                ensure!(row["old_size_bytes"] == call.args[1], "{row} {call:?}");
                ensure!(row["size_bytes"] == call.args[2], "{row} {call:?}");
                ensure!(row["flags"] == json!(["MAYMOVE"]), "{row}");
            } else {
                ensure!(row["size_bytes"] == call.args[1], "{row} {call:?}");
            }
        }
        // Without the option they are none of ours.
        let (_, _, ended) = trace(&[kind, "101"], &["-j"])?;
        ensure!(ended.stdout.is_empty(), "{ended:?}");
    }
    Ok(())
}

fn only_failures() -> Result<()> {
    let path = file();
    let (_, calls, ended) = trace(&["fail", "101", &path.to_string_lossy()], &["-x", "-j"])?;
    let rows = json_rows(&ended)?;
    ensure!(calls.len() == 101 && rows.len() == 101, "{ended:?}");
    for (row, call) in rows.iter().zip(&calls) {
        ensure!(
            row["error"] == call.error && !row["error"].is_null(),
            "{row} {call:?}"
        );
        // The descriptor is there, except where it is the error.
        let known = row["error"] == "EBADF" || row["fd"].is_null();
        ensure!(row["file"].is_null() == known, "{row} {call:?}");
    }
    let (_, _, ended) = trace(&["anon", "101"], &["-x", "-j"])?;
    ensure!(ended.stdout.is_empty(), "{ended:?}");
    let (_, _, ended) = trace(&["noreplace", "3"], &["-x"])?;
    let results = ended
        .stdout
        .lines()
        .filter(|line| line.contains(" EEXIST "));
    ensure!(results.count() == 3, "{ended:?}");
    Ok(())
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
        // Names are known although it has gone.
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
    // What failed has mapped nothing.
    let (_, _, ended) = trace(&["noreplace", "3"], &["-f"])?;
    ensure!(ended.stdout.is_empty(), "{ended:?}");
    Ok(())
}

fn file_of_first_row(path: &str, args: &[&str]) -> Result<Value> {
    let (_, _, ended) = trace(&["file", "1", path], &[&["-j"], args].concat())?;
    Ok(json_rows(&ended)?.first().context("no row")?["file"].clone())
}

fn paths() -> Result<()> {
    // Through a mount, and with a control character.
    let path = file().with_extension("\x1b");
    let shown = path.to_string_lossy().replace('\x1b', "\\x1b");
    let found = file_of_first_row(&path.to_string_lossy(), &["--path"])?;
    ensure!(found == shown, "{found} is not {shown}");

    // What is in no folder at all.
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

    // As the process itself would name it.
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

/// The rows of a tool that was started with `args`, by pid.
fn pids(tool: Tool) -> Result<Vec<String>> {
    let rows = json_rows(&end(tool)?)?;
    Ok(rows.iter().map(|row| row["pid"].to_string()).collect())
}

fn processes_are_filtered() -> Result<()> {
    let mut workloads = (0..3)
        .map(|_| Workload::start("mmap", &["anon", "23"]))
        .collect::<Result<Vec<_>>>()?;
    let [first, second, _] = &workloads[..] else {
        unreachable!()
    };
    let wanted = [first.pid(), second.pid()];
    let tool = start(&["-j", "-p", &wanted.join(",")])?;
    for workload in &mut workloads {
        workload.work()?;
    }
    let pids = pids(tool)?;
    ensure!(
        pids == [vec![wanted[0].clone(); 23], vec![wanted[1].clone(); 23]].concat(),
        "{pids:?}"
    );
    Ok(())
}

fn names_are_filtered() -> Result<()> {
    let folder = harness::scratch()?;
    let mut workloads = Vec::new();
    // At the start, in the middle, at the end of the 15 bytes that are kept; not at all.
    for name in [
        "q7map",
        "ab q7map cd",
        "0123456789q7map",
        "0123456789a-q7map",
        "q7-map",
    ] {
        let program = folder.path().join(name);
        harness::copy(&harness::workload("mmap"), &program)?;
        workloads.push(Workload::spawn(Command::new(program).args(["anon", "23"]))?);
    }
    let tool = start(&["-j", "-n", "q7map"])?;
    for workload in &mut workloads {
        workload.work()?;
    }
    let expected: Vec<String> = workloads[..3]
        .iter()
        .flat_map(|workload| vec![workload.pid(); 23])
        .collect();
    let pids = pids(tool)?;
    ensure!(pids == expected, "{pids:?} is not {expected:?}");
    Ok(())
}

fn cgroups_are_filtered() -> Result<()> {
    let cgroup = harness::Cgroup::new()?;
    let below = cgroup.path().join("below");
    fs::create_dir(&below)?;
    let mut workloads = (0..3)
        .map(|_| Workload::start("mmap", &["anon", "23"]))
        .collect::<Result<Vec<_>>>()?;
    cgroup.add(&workloads[0].pid())?;
    fs::write(below.join("cgroup.procs"), workloads[1].pid())?;
    let tool = start(&["-j", "--cgroup", &cgroup.path().to_string_lossy()])?;
    for workload in &mut workloads {
        workload.work()?;
    }
    let expected: Vec<String> = workloads[..2]
        .iter()
        .flat_map(|workload| vec![workload.pid(); 23])
        .collect();
    let pids = pids(tool)?;
    ensure!(pids == expected, "{pids:?} is not {expected:?}");
    for workload in workloads {
        workload.finish()?;
    }
    fs::remove_dir(below)?;
    Ok(())
}

/// Folders as Docker and containerd have them below systemd, two of which have an id that begins alike.
fn containers_are_found_by_their_ids() -> Result<()> {
    let cgroup = harness::Cgroup::new()?;
    let digits = format!("{:08x}", std::process::id());
    let names = [
        format!("docker-{}.scope", digits.repeat(8)),
        format!("cri-containerd-{digits}{}.scope", "0".repeat(56)),
    ];
    let folders = names.map(|name| cgroup.path().join(name));
    let mut workloads = Vec::new();
    for folder in &folders {
        fs::create_dir(folder)?;
        let workload = Workload::start("mmap", &["anon", "23"])?;
        fs::write(folder.join("cgroup.procs"), workload.pid())?;
        workloads.push(workload);
    }
    let several = harness::run("mmapsnoop", &["--cgroup", &digits])?;
    let named = folders
        .iter()
        .all(|folder| several.stderr.contains(&*folder.to_string_lossy()));
    ensure!(several.status.code() == Some(2) && named, "{several:?}");

    let tool = start(&["-j", "--cgroup", &digits.repeat(2)])?;
    for workload in &mut workloads {
        workload.work()?;
    }
    let pids = pids(tool)?;
    ensure!(pids == vec![workloads[0].pid(); 23], "{pids:?}");
    for workload in workloads {
        workload.finish()?;
    }
    folders.iter().try_for_each(fs::remove_dir)?;
    Ok(())
}

/// A shell whose first child is in another PID namespace.
fn sh(script: &str, enter: impl Fn() -> nix::Result<()> + Send + Sync + 'static) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{script}; exit $?")]);
    // SAFETY: system calls between fork and exec.
    unsafe {
        command.pre_exec(move || Ok(enter()?));
    }
    command
}

fn numbers_are_those_of_our_namespace() -> Result<()> {
    let script = format!("'{}' -j -n mmap", harness::tool("mmapsnoop").display());
    let mut tool = Tool::spawn(&mut sh(&script, || unshare(CloneFlags::CLONE_NEWPID)))?;
    tool.wait_for("tracing mmap(2)")?;
    let its_shell = tool.pid();
    let child = |shell: u32| -> Result<String> {
        let children = fs::read_to_string(format!("/proc/{shell}/task/{shell}/children"))?;
        Ok(children.trim().to_owned())
    };
    let namespace = format!("/proc/{}/ns/pid", child(its_shell)?);

    // In the tool's namespace, and in one below it.
    let script = format!("'{}' anon 23", harness::workload("mmap").display());
    let beside = File::open(&namespace)?;
    let mut beside = Workload::spawn(&mut sh(&script, move || {
        setns(&beside, CloneFlags::CLONE_NEWPID)
    }))?;
    let script = format!("'{}' anon 29", harness::workload("mmap").display());
    let below = File::open(&namespace)?;
    let script = format!("unshare -fp {script}");
    let mut below = Workload::spawn(&mut sh(&script, move || {
        setns(&below, CloneFlags::CLONE_NEWPID)
    }))?;
    let mut outside = Workload::start("mmap", &["anon", "31"])?;
    let mut done = Vec::new();
    for workload in [&mut beside, &mut below, &mut outside] {
        done.push(calls(&workload.work()?["calls"])?);
    }

    let inner = |shell: u32, levels: usize| -> Result<String> {
        let mut pid = child(shell)?;
        for _ in 1..levels {
            pid = child(pid.parse()?)?;
        }
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let ids = status
            .lines()
            .find_map(|line| line.strip_prefix("NSpid:"))
            .context("no NSpid")?;
        // As the initial namespace, the tool's and maybe one more have it.
        Ok(ids
            .split_whitespace()
            .nth(1)
            .context("not in the namespace")?
            .to_owned())
    };
    let beside_pid = inner(beside.pid().parse()?, 1)?;
    let below_pid = inner(below.pid().parse()?, 2)?;
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(child(its_shell)?.parse()?),
        Signal::SIGINT,
    )?;
    let ended = tool.end()?;
    let rows = json_rows(&ended)?;
    // What a workload maps before it is ready comes before.
    let ends_with = |pid: &str, calls: &[Call]| {
        let of_pid = rows
            .iter()
            .filter(|row| row["pid"].as_u64() == pid.parse().ok());
        let results: Vec<&Value> = of_pid.map(|row| &row["result"]).collect();
        let expected: Vec<&Value> = calls.iter().map(|call| &call.result).collect();
        results.ends_with(&expected)
    };
    ensure!(ends_with(&beside_pid, &done[0]), "{beside_pid}: {ended:?}");
    ensure!(ends_with(&below_pid, &done[1]), "{below_pid}: {ended:?}");
    // In the tool's namespace it has no number.
    let outside = |call: &Call| {
        rows.iter()
            .any(|row| row["pid"] == 0 && row["result"] == call.result)
    };
    ensure!(done[2].iter().all(outside), "{ended:?}");
    Ok(())
}

/// i386's calls are in no tracepoint of their own.
fn calls_of_32_bit_programs() -> Result<()> {
    let trace = |args: &[&str]| -> Result<(Vec<Value>, Vec<String>)> {
        let mut workload = Workload::start("compat32", &[])?;
        let tool = start(&[&["-j", "-p", &workload.pid()], args].concat())?;
        let facts = workload.work()?;
        let rows = json_rows(&end(tool)?)?;
        Ok((rows, facts["calls"].split(',').map(str::to_owned).collect()))
    };
    let (rows, _) = trace(&[])?;
    ensure!(rows.is_empty(), "{rows:?}");
    let (rows, results) = trace(&["--compat"])?;
    ensure!(results.len() == 27 && rows.len() == 25, "{rows:?}");
    let (rows, results) = trace(&["--compat", "--munmap"])?;
    ensure!(rows.len() == 27, "{rows:?}");
    let (first, second) = (results[0].clone(), results[1].clone());
    for (number, (row, result)) in rows.iter().zip(results).enumerate() {
        let expected = match number {
            0..=22 => json!({
                "call": "mmap", "address": "0x0", "size_bytes": (number + 1) * 4096,
                "prot": ["READ", "WRITE"], "flags": ["PRIVATE", "ANONYMOUS"],
                "offset_bytes": 0, "file": null,
            }),
            // By mmap2, which counts the offset in pages, and by the old one.
            23 | 24 => json!({
                "call": "mmap", "address": "0x0", "size_bytes": 4096, "prot": ["READ"],
                "flags": ["PRIVATE"], "offset_bytes": (24 - number) * 4096, "file": "compat32",
            }),
            25 => json!({
                "call": "mremap", "address": first, "old_size_bytes": 4096, "size_bytes": 20480,
                "flags": ["MAYMOVE"],
            }),
            _ => json!({ "call": "munmap", "address": second, "size_bytes": 8192 }),
        };
        ensure!(
            row["result"] == result && row["comm"] == "compat32",
            "{row}"
        );
        for (field, value) in expected.as_object().into_iter().flatten() {
            ensure!(
                row[field] == *value,
                "{number}: {field} of {row}, not {value}"
            );
        }
    }
    Ok(())
}

const BURST: u64 = 200_003;

/// Eight on two CPUs, which preempt one another in our programs, where the kernel lets them.
fn threads_at_once_are_all_shown() -> Result<()> {
    let mut workload = Workload::start("contend", &["8", "1009", "mmap"])?;
    let mut tool = Tool::start("mmapsnoop", &["-j", "-p", &workload.pid()])?;
    tool.wait_for("tracing mmap(2)")?;
    let facts = workload.work()?;
    let ended = tool.interrupt()?;
    let rows = ended.stdout.lines().count();
    ensure!(facts["operations"] == "8072", "{facts:?}");
    ensure!(
        rows == 8072 && !ended.stderr.contains("lost"),
        "{rows} rows, {}",
        ended.stderr
    );
    Ok(())
}

fn a_burst_is_complete() -> Result<()> {
    let calls = if harness::in_guest() { 20_011 } else { BURST };
    let mut workload = Workload::start("burst", &[&calls.to_string()])?;
    let tool = start(&["--munmap", "-p", &workload.pid()])?;
    workload.work()?;
    let ended = end(tool)?;
    let rows = |call: &str| {
        ended
            .stdout
            .lines()
            .filter(|line| line.contains(&format!(" burst          {call} ")))
            .count() as u64
    };
    let lost = lost(&ended.stderr)?;
    ensure!(
        rows("mmap  ") + rows("munmap") + lost == 2 * calls,
        "{lost} lost; {}",
        ended.stderr
    );
    ensure!(
        lost == 0 || ended.stderr.contains("ring buffer full"),
        "{}",
        ended.stderr
    );
    Ok(())
}

/// N of "lost N events".
fn lost(stderr: &str) -> Result<u64> {
    match stderr
        .lines()
        .find_map(|line| line.strip_prefix("mmapsnoop: lost "))
    {
        Some(rest) => Ok(rest.split(' ').next().unwrap_or_default().parse()?),
        None => Ok(0),
    }
}

fn what_a_stopped_tool_loses_is_counted() -> Result<()> {
    let mut workload = Workload::start("burst", &[&BURST.to_string()])?;
    let tool = start(&["-p", &workload.pid()])?;
    tool.signal(Signal::SIGSTOP)?;
    workload.work()?;
    tool.signal(Signal::SIGCONT)?;
    let ended = end(tool)?;
    let rows = ended.stdout.lines().count() as u64 - 1;
    let lost = lost(&ended.stderr)?;
    ensure!(
        lost > 0 && rows + lost == BURST,
        "{rows} rows, {lost} lost; {}",
        ended.stderr
    );
    Ok(())
}

fn a_duration_ends_it() -> Result<()> {
    let begin = Instant::now();
    let ended = harness::run("mmapsnoop", &["-d", "0.3", "-n", "no such name"])?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(
        begin.elapsed() >= Duration::from_millis(300),
        "{:?}",
        begin.elapsed()
    );
    ensure!(ended.stdout.lines().count() == 1, "{ended:?}");
    Ok(())
}

/// The header is there before any row, and a row long before the tool ends.
fn a_row_comes_at_once() -> Result<()> {
    let mut workload = Workload::start("mmap", &["anon", "1"])?;
    let folder = harness::scratch()?;
    let out = folder.path().join("out");
    let (program, pid) = (harness::tool("mmapsnoop"), workload.pid());
    let script = format!("exec '{}' -p {pid} >'{}'", program.display(), out.display());
    let mut tool = Tool::spawn(Command::new("sh").args(["-c", &script]))?;
    tool.wait_for("tracing mmap(2)")?;
    harness::eventually("a header", || {
        Ok(fs::read_to_string(&out)?.starts_with("PID "))
    })?;
    workload.work()?;
    harness::eventually("a row", || {
        Ok(fs::read_to_string(&out)?.lines().count() >= 2)
    })?;
    end(tool)?;
    Ok(())
}

fn what_is_not_there_is_named() -> Result<()> {
    let fails = |args: &[&str], code: i32, remedy: &str| -> Result<()> {
        let ended = harness::run("mmapsnoop", args)?;
        ensure!(ended.status.code() == Some(code), "{args:?}: {ended:?}");
        ensure!(
            ended.stderr.contains(remedy),
            "{args:?}: not {remedy:?} in {}",
            ended.stderr
        );
        ensure!(ended.stdout.is_empty(), "{args:?}: {ended:?}");
        Ok(())
    };
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
