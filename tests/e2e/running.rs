//! How a run begins and ends, whatever becomes of the tool, its command, its target and its reader.
//! The tools share the code; those that start here stand for all, but where each is named.

use std::fs::{self, Permissions};
use std::io::{PipeReader, PipeWriter, Write, pipe};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;
use memtools::host::capabilities::Capability;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::mount::{MsFlags, mount, umount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SigHandler, SigSet, Signal, kill, signal};
use nix::unistd::Pid;
use tempfile::{NamedTempFile, TempDir};

use crate::harness::{self, Cgroup, Ended, PATIENCE, Tool, Workload, eventually, tool, workload};
use crate::pressure::Setting;

/// Tools that trace processes and need nothing of the kernel but tracepoints and counters.
const TOOLS: [&str; 9] = [
    "brkstack",
    "drsnoop",
    "faults",
    "ffaults",
    "memleak",
    "mmapsnoop",
    "oomkill",
    "shmsnoop",
    "vmscan",
];

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "running":
        a_command_goes_on_when_the_tool_is_killed [Once],
        what_a_command_starts_goes_on_when_the_tool_is_killed [Once],
        a_command_that_stops_itself_is_left_stopped [Once],
        a_command_inherits_from_the_caller [Once],
        a_command_that_does_not_end_is_left [Once],
        every_tool_runs_a_command,
        every_tool_runs_where_tracefs_is_not_mounted,
        every_tool_gives_up_what_tracing_does_not_take,
        every_tool_ends_with_its_target,
        children_of_named_processes_are_traced,
        every_signal_that_ends_it_reports,
        a_report_can_be_asked_for,
        what_nohup_ignores_is_ignored,
        a_reader_that_does_not_read_does_not_keep_it [Once],
        a_last_report_waits_for_its_reader [Once],
        the_output_can_be_a_file,
        hundreds_of_processes,
        who_cannot_be_traced_is_told [Host],
        the_tool_s_own_faults_are_not_the_command_s,
        a_cgroup_can_be_named_as_it_is_printed,
        missing_privilege_is_named,
        tools_of_one_user_share_locked_memory,
        time_is_that_of_the_place [Host],
    }
}

/// The state of a process, such as `T` for stopped; None if it has gone or waits to be reaped.
fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let state = stat.rsplit(") ").next()?.chars().next()?;
    (state != 'Z').then_some(state)
}

fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let list = list.unwrap_or_default();
    list.split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

fn stopped_child(tool: &Tool) -> Option<u32> {
    let mut children = children(tool.pid()).into_iter();
    children.find(|&child| state(child) == Some('T'))
}

/// Kills a tool while its command is stopped for it.
fn a_command_goes_on_when_the_tool_is_killed() -> Result<()> {
    for end in [Signal::SIGKILL, Signal::SIGHUP] {
        let mut caught = 0;
        let deadline = Instant::now() + PATIENCE;
        while caught < 11 {
            ensure!(Instant::now() < deadline, "only {caught} were met stopped");
            let mut tool = Tool::start("brkstack", &["-f", "-c", "sh -c 'exit 7'"])?;
            let command = loop {
                if let Some(pid) = stopped_child(&tool) {
                    break Some(pid);
                }
                if tool.has_ended()? {
                    break None;
                }
            };
            let Some(command) = command else { continue };
            tool.signal(end)?;
            tool.end()?;
            eventually("the command ends", || Ok(state(command).is_none()))?;
            caught += 1;
        }
    }
    Ok(())
}

/// As above, while what the command has started is stopped.
fn what_a_command_starts_goes_on_when_the_tool_is_killed() -> Result<()> {
    let [launch, program] = ["launch", "alloc-musl-static"].map(workload);
    let command = format!(
        "'{}' spawn '{}' one malloc 31 4093",
        launch.display(),
        program.display()
    );
    let mut caught = 0;
    let deadline = Instant::now() + PATIENCE;
    while caught < 7 {
        ensure!(Instant::now() < deadline, "only {caught} were met stopped");
        let mut tool = Tool::start("memleak", &["--children", "-c", &command])?;
        let met = loop {
            let commands = children(tool.pid()).into_iter();
            let mut started = commands.flat_map(children);
            if let Some(pid) = started.find(|&child| state(child) == Some('T')) {
                break Some(pid);
            }
            if tool.has_ended()? {
                break None;
            }
        };
        let Some(pid) = met else { continue };
        tool.signal(Signal::SIGKILL)?;
        tool.end()?;
        eventually("what was stopped ends", || Ok(state(pid).is_none()))?;
        caught += 1;
    }
    Ok(())
}

fn a_command_that_stops_itself_is_left_stopped() -> Result<()> {
    let mut tool = Tool::start("brkstack", &["-f", "-c", "sh -c 'kill -STOP $$; exit 5'"])?;
    tool.wait_for("tracing brk(2)")?;
    // The other child lets it go on while it starts, and ends when it has started.
    eventually("it has started", || Ok(children(tool.pid()).len() == 1))?;
    let command = stopped_child(&tool).context("it runs")?;
    kill(Pid::from_raw(command.cast_signed()), Signal::SIGCONT)?;
    let ended = tool.end()?;
    ensure!(ended.status.code() == Some(5), "{ended:?}");
    Ok(())
}

/// A tool that is started with a signal blocked, another ignored, and few files that it may open.
fn with_odd_caller(args: &[&str]) -> Result<Tool> {
    let mut command = Command::new(tool("faults"));
    command.args(args).stdin(Stdio::null());
    let few = || setrlimit(Resource::RLIMIT_NOFILE, 67, 4099);
    // SAFETY: system calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            signal(Signal::SIGCHLD, SigHandler::SigIgn)?;
            let mut blocked = SigSet::empty();
            blocked.add(Signal::SIGUSR2);
            blocked.thread_set_mask()?;
            Ok(few()?)
        });
    }
    Tool::spawn(&mut command)
}

fn a_command_inherits_from_the_caller() -> Result<()> {
    let command = "sh -c 'echo files $(ulimit -n); exit 7'";
    let ended = with_odd_caller(&["--by-process", "-c", command])?.end()?;
    ensure!(ended.status.code() == Some(7), "{ended:?}");
    ensure!(ended.stdout.contains("files 67\n"), "{ended:?}");

    // A shell would change some.
    let command = "grep ^Sig /proc/self/status";
    let ended = with_odd_caller(&["--by-process", "-c", command])?.end()?;
    let value = |name: &str| {
        let line = ended
            .stdout
            .lines()
            .find_map(|line| line.strip_prefix(name));
        line.map(str::trim)
    };
    let bit = |signal: Signal| 1u64 << (signal as u32 - 1);
    let mask = |signals: u64| format!("{signals:016x}");
    ensure!(
        value("SigBlk:") == Some(&mask(bit(Signal::SIGUSR2))),
        "{ended:?}"
    );
    let ignored = ignored_here()? & !bit(Signal::SIGPIPE) | bit(Signal::SIGCHLD);
    ensure!(value("SigIgn:") == Some(&mask(ignored)), "{ended:?}");
    Ok(())
}

/// The signals that this process ignores, as a mask. Some are inherited: glibc's posix_spawn() has
/// signal 32, which is its own, ignored in the child of a process that cancels threads. SIGPIPE is
/// ignored by Rust's runtime, and given back to a command.
fn ignored_here() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .context("no SigIgn in /proc/self/status")?;
    Ok(u64::from_str_radix(mask.trim(), 16)?)
}

fn a_command_that_does_not_end_is_left() -> Result<()> {
    let command = "sh -c 'trap \"\" TERM; echo began; while :; do read x; done </dev/zero'";
    let mut tool = Tool::start("brkstack", &["-f", "-c", command])?;
    tool.wait_for("tracing brk(2)")?;
    tool.wait_for_output("began\n")?;
    let command = children(tool.pid());
    tool.signal(Signal::SIGINT)?;
    tool.wait_for("is left to run")?;
    for pid in command {
        let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
    }
    ensure!(tool.end()?.status.success());
    Ok(())
}

/// The exit status is the command's own, and what it prints is there.
fn every_tool_runs_a_command() -> Result<()> {
    for name in TOOLS {
        let folder = harness::scratch()?;
        let trace = folder.path().join("ran");
        let command = format!("sh -c 'echo > {}; exit 7'", trace.display());
        let ended = harness::run(name, &["-c", &command])?;
        ensure!(ended.status.code() == Some(7), "{name}: {ended:?}");
        ensure!(trace.exists(), "{name}: {ended:?}");
    }
    let command = format!("'{}' anon 23", harness::workload("mmap").display());
    let ended = harness::run("mmapsnoop", &["-c", &command])?;
    let rows = ended.stdout.lines().filter(|line| line.contains(" mmap "));
    ensure!(rows.count() >= 23, "{ended:?}");
    Ok(())
}

/// A machine on which nobody has mounted tracefs yet.
fn every_tool_runs_where_tracefs_is_not_mounted() -> Result<()> {
    let hfaults = ("hfaults", &["--madvise"][..]);
    // It allocates, and ends as there is nothing on its standard input.
    let program = format!("{} hold", workload("alloc").display());
    for (name, args) in TOOLS
        .map(|name| (name, &[][..]))
        .into_iter()
        .chain([hfaults])
    {
        let mut command = Command::new(tool(name));
        command.args(["-c", &program]).args(args);
        // SAFETY: system calls between fork and exec.
        unsafe {
            command.pre_exec(|| {
                unshare(CloneFlags::CLONE_NEWNS)?;
                let none = None::<&str>;
                mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
                while umount("/sys/kernel/tracing").is_ok() {}
                while umount("/sys/kernel/debug").is_ok() {}
                Ok(())
            });
        }
        let output = command.output()?;
        ensure!(output.status.success(), "{name}: {output:?}");
    }
    Ok(())
}

/// What a status file of /proc says of capabilities, in the order of its lines.
fn privileges(status: &Path) -> Result<Vec<(String, u64)>> {
    let status = fs::read_to_string(status)?;
    let lines = status.lines().filter_map(|line| line.split_once(":\t"));
    let lines = lines.filter(|(name, _)| name.starts_with("Cap") || *name == "NoNewPrivs");
    lines
        .map(|(name, value)| Ok((name.to_owned(), u64::from_str_radix(value, 16)?)))
        .collect()
}

/// Every thread of a tool has what tracing takes alone, and its command what the caller has.
fn every_tool_gives_up_what_tracing_does_not_take() -> Result<()> {
    let bpf = Capability::CAP_BPF.bitmask();
    let never = [
        Capability::CAP_SETUID,
        Capability::CAP_NET_ADMIN,
        Capability::CAP_SYS_MODULE,
        Capability::CAP_SYS_BOOT,
    ];
    let never: u64 = never.iter().map(Capability::bitmask).sum();
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid")?;
    let perf_wants_more = paranoid.trim().parse::<i32>()? > 2;
    let own = privileges(Path::new("/proc/thread-self/status"))?;
    ensure!(own[1].0 == "CapPrm" && own[1].1 & bpf != 0, "{own:?}");
    for name in TOOLS {
        let folder = harness::scratch()?;
        let [begun, status] = ["begun", "status"].map(|name| folder.path().join(name));
        let (from, to) = (begun.display(), status.display());
        let script = format!("cat /proc/self/status > {from}; mv {from} {to}; exec sleep 60");
        let tool = Tool::start(name, &["-c", &format!("sh -c '{script}'")])?;
        eventually("the command runs", || Ok(status.exists()))?;
        ensure!(privileges(&status)? == own, "{name}: {own:?}");
        let mut beyond = never;
        if name != "memleak" && !perf_wants_more {
            beyond |= Capability::CAP_SYS_ADMIN.bitmask();
        }
        for task in fs::read_dir(format!("/proc/{}/task", tool.pid()))? {
            let held = privileges(&task?.path().join("status"))?;
            let [_, permitted, effective, .., no_new] = &held[..] else {
                bail!("{name}: {held:?}");
            };
            ensure!(permitted.1 == effective.1, "{name}: {held:?}");
            ensure!(effective.1 & (beyond | bpf) == bpf, "{name}: {held:?}");
            ensure!(no_new.1 == 1, "{name}: {held:?}");
        }
        ensure!(tool.interrupt()?.status.code().is_some(), "{name}");
    }
    Ok(())
}

fn every_tool_ends_with_its_target() -> Result<()> {
    for name in TOOLS {
        let first = Workload::start("alloc", &["hold"])?;
        let second = Workload::start("alloc", &["hold"])?;
        let pids = format!("{},{}", first.pid(), second.pid());
        let mut tool = Tool::start(name, &["-p", &pids])?;
        tool.wait_for(match name {
            "memleak" => "allocator: ",
            _ => "Ctrl-C to end",
        })?;
        first.finish()?;
        ensure!(!tool.has_ended()?, "{name} ends with the first of two");
        second.finish()?;
        let ended = tool.end()?;
        ensure!(ended.status.success(), "{name}: {ended:?}");
    }
    Ok(())
}

fn children_of_named_processes_are_traced() -> Result<()> {
    let mut parent = Workload::start("forktree", &["2", "2", "11"])?;
    let pid = parent.pid();
    let mut tool = Tool::start("faults", &["--by-process", "--children", "-p", &pid])?;
    tool.wait_for("tracing page faults")?;
    parent.work()?;
    let ended = tool.interrupt()?;
    let rows = ended
        .stdout
        .lines()
        .filter(|line| line.contains("forktree"));
    // Two children, and two of each.
    ensure!(rows.count() == 7, "{ended:?}");

    let ended = harness::run("faults", &["--children"])?;
    ensure!(ended.status.code() == Some(2), "{ended:?}");
    ensure!(ended.stderr.contains("-p or -c"), "{ended:?}");
    Ok(())
}

/// brkstack on a workload of 23 calls that have been made.
fn brkstack(args: &[&str]) -> Result<(Workload, Tool)> {
    let mut workload = Workload::start("brk", &["23"])?;
    let pid = workload.pid();
    let mut tool = Tool::start("brkstack", &[&["-f", "-p", &pid], args].concat())?;
    tool.wait_for("tracing brk(2)")?;
    workload.work()?;
    Ok((workload, tool))
}

/// The calls of a folded report.
fn calls(report: &str) -> u64 {
    let lines = report.lines().filter(|line| line.contains("grow_heap"));
    lines
        .filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok())
        .sum()
}

fn every_signal_that_ends_it_reports() -> Result<()> {
    for end in [
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ] {
        let (_workload, tool) = brkstack(&[])?;
        tool.signal(end)?;
        let ended = tool.end()?;
        ensure!(ended.status.success(), "{end}: {ended:?}");
        ensure!(calls(&ended.stdout) == 23, "{end}: {ended:?}");
    }
    Ok(())
}

fn a_report_can_be_asked_for() -> Result<()> {
    let (_workload, tool) = brkstack(&[])?;
    tool.signal(Signal::SIGUSR1)?;
    tool.wait_until(|report| calls(report) == 23)?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(calls(&ended.stdout) == 23, "twice: {ended:?}");

    let mut target = Workload::start("alloc", &["one", "malloc", "23", "4093"])?;
    let pid = target.pid();
    let mut tool = Tool::start("memleak", &["-p", &pid, "-o", "0", "3600"])?;
    tool.wait_for("allocator: ")?;
    target.work()?;
    tool.signal(Signal::SIGUSR1)?;
    tool.wait_until(|report| report.contains("94139 bytes in 23 allocations"))?;
    ensure!(tool.interrupt()?.status.success());
    Ok(())
}

fn what_nohup_ignores_is_ignored() -> Result<()> {
    let mut workload = Workload::start("brk", &["23"])?;
    let pid = workload.pid();
    let mut command = Command::new(tool("brkstack"));
    command.args(["-f", "-p", &pid]).stdin(Stdio::null());
    // SAFETY: a system call between fork and exec.
    unsafe {
        command.pre_exec(|| {
            signal(Signal::SIGHUP, SigHandler::SigIgn)?;
            Ok(())
        });
    }
    let mut tool = Tool::spawn(&mut command)?;
    tool.wait_for("tracing brk(2)")?;
    workload.work()?;
    // Of two signals the lower number is taken first.
    tool.signal(Signal::SIGHUP)?;
    tool.signal(Signal::SIGUSR1)?;
    tool.wait_until(|report| calls(report) == 23)?;
    ensure!(!tool.has_ended()?, "it has ended");
    ensure!(tool.interrupt()?.status.success());
    Ok(())
}

/// A pipe that nobody has read and that has no room.
fn full_pipe() -> Result<(PipeReader, PipeWriter)> {
    let (reader, mut writer) = pipe().context("no pipe")?;
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    while writer.write(&[b'.'; 4096]).is_ok() {}
    fcntl(&writer, FcntlArg::F_SETFL(OFlag::empty()))?;
    Ok((reader, writer))
}

/// Starts vmscan with this argument, printing into a pipe without room, and stderr into a file. Sends a SIGINT when
/// each of these has been said, which ends it.
fn ends_unread(option: &str, said: &[&str]) -> Result<()> {
    let (reader, writer) = full_pipe()?;
    let stderr = NamedTempFile::new()?;
    let mut tool = Command::new(tool("vmscan"))
        .arg(option)
        .stdin(Stdio::null())
        .stdout(writer)
        .stderr(stderr.reopen()?)
        .spawn()
        .context("no vmscan")?;
    let messages = || fs::read_to_string(stderr.path());
    for said in said {
        eventually(said, || Ok(messages()?.contains(said)))?;
        kill(Pid::from_raw(tool.id().cast_signed()), Signal::SIGINT)?;
    }
    let mut status = None;
    let ended = eventually("it ends", || {
        status = tool.try_wait()?;
        Ok(status.is_some())
    });
    if ended.is_err() {
        tool.kill()?;
        tool.wait()?;
    }
    ended?;
    let messages = messages()?;
    ensure!(
        status.and_then(|status| status.code()) == Some(1),
        "{status:?} {messages}"
    );
    ensure!(
        messages.contains("vmscan: failed to print: nobody reads it"),
        "{messages}"
    );
    drop(reader);
    Ok(())
}

/// Ctrl-C ends a tool that waits for its reader: here to print the column names.
fn a_reader_that_does_not_read_does_not_keep_it() -> Result<()> {
    ends_unread("1000", &["Ctrl-C to end"])
}

/// A last report waits for its reader, until Ctrl-C comes again.
fn a_last_report_waits_for_its_reader() -> Result<()> {
    ends_unread(
        "--counts",
        &[
            "Ctrl-C to end",
            "vmscan: the last report waits for its reader",
        ],
    )
}

fn the_output_can_be_a_file() -> Result<()> {
    let folder = harness::scratch()?;
    let file = folder.path().join("report");
    let path = file.display().to_string();
    let command = "sh -c 'echo from the command'";
    for (name, option) in
        TOOLS.map(|name| (name, if name == "memleak" { "--output" } else { "-o" }))
    {
        let ended = harness::run(name, &["-j", option, &path, "-c", command])?;
        ensure!(ended.status.success(), "{name}: {ended:?}");
        ensure!(ended.stdout == "from the command\n", "{name}: {ended:?}");
        ensure!(file.exists(), "{name}: {ended:?}");
        let report = fs::read_to_string(&file)?;
        for line in report.lines() {
            harness::object(line)?;
        }
        let counts = ["brkstack", "faults", "ffaults", "memleak", "mmapsnoop"];
        ensure!(!report.is_empty() || !counts.contains(&name), "{name}");

        let missing = folder.path().join("no/such/folder").display().to_string();
        let trace = folder.path().join("ran");
        let command = format!("sh -c 'echo > {}'", trace.display());
        let ended = harness::run(name, &[option, &missing, "-c", &command])?;
        ensure!(ended.status.code() == Some(1), "{name}: {ended:?}");
        ensure!(
            ended.stderr.contains("failed to open") && !trace.exists(),
            "{name}: {ended:?}"
        );
        fs::remove_file(&file)?;
    }
    Ok(())
}

/// More than one of them is counted, and no other process.
fn hundreds_of_processes() -> Result<()> {
    let mut sleepers = Vec::new();
    for _ in 0..211 {
        let sleeper = Command::new("sleep").arg("3600").spawn();
        sleepers.push(sleeper.context("no sleep")?);
    }
    let result = (|| {
        let mut named = Workload::start("minor", &["23"])?;
        let mut other = Workload::start("minor", &["29"])?;
        let mut pids: Vec<String> = sleepers
            .iter()
            .map(|child| child.id().to_string())
            .collect();
        pids.insert(101, named.pid());
        let mut tool = Tool::start("faults", &["--by-process", "-p", &pids.join(",")])?;
        tool.wait_for("tracing page faults")?;
        named.work()?;
        other.work()?;
        let ended = tool.interrupt()?;
        let rows: Vec<&str> = ended.stdout.lines().skip(1).collect();
        ensure!(
            rows.len() == 1 && rows[0].starts_with(&named.pid()),
            "{ended:?}"
        );
        Ok(())
    })();
    for mut sleeper in sleepers {
        sleeper.kill()?;
        sleeper.wait()?;
    }
    result
}

fn who_cannot_be_traced_is_told() -> Result<()> {
    let mut zombie = Command::new("true").spawn().context("no true")?;
    let pid = zombie.id();
    eventually("it has exited", || Ok(state(pid).is_none()))?;
    for name in TOOLS {
        let ended = harness::run(name, &["-p", &pid.to_string()])?;
        ensure!(
            ended.status.code() == Some(1) && ended.stderr.contains("has exited"),
            "{name}: {ended:?}"
        );
    }
    zombie.wait()?;
    // kthreadd; memory can be short for it, too.
    for name in TOOLS
        .into_iter()
        .filter(|name| !["drsnoop", "oomkill", "vmscan"].contains(name))
    {
        let ended = harness::run(name, &["-p", "2"])?;
        ensure!(
            ended.status.code() == Some(1) && ended.stderr.contains("kernel thread"),
            "{name}: {ended:?}"
        );
    }
    let target = Workload::start("alloc", &["hold"])?;
    let (pid, own) = (target.pid(), std::process::id().to_string());
    for name in ["brkstack", "faults", "ffaults", "memleak", "vmscan"] {
        let mut tool = Tool::start(name, &["-p", &pid, &own])?;
        tool.wait_for(&format!("-p {pid},{own}"))?;
        let ended = tool.interrupt()?;
        ensure!(ended.status.success(), "{ended:?}");
    }
    Ok(())
}

/// Faults of a process between fork and exec are the tool's own.
fn the_tool_s_own_faults_are_not_the_command_s() -> Result<()> {
    let command = format!("'{}' 23", harness::workload("minor").display());
    let ended = harness::run("faults", &["--by-process", "-c", &command])?;
    let rows = |name: &str| {
        let rows = ended.stdout.lines();
        rows.filter(|row| row.split_whitespace().nth(1) == Some(name))
            .count()
    };
    ensure!((rows("minor"), rows("faults")) == (1, 0), "{ended:?}");
    Ok(())
}

fn a_cgroup_can_be_named_as_it_is_printed() -> Result<()> {
    let cgroup = Cgroup::new()?;
    let mut inside = Workload::start("minor", &["23"])?;
    let mut outside = Workload::start("minor", &["29"])?;
    cgroup.add(&inside.pid())?;
    let name = cgroup.path().file_name().context("no name")?.display();
    let mut tool = Tool::start("faults", &["--by-process", "--cgroup", &format!("/{name}")])?;
    tool.wait_for("tracing page faults")?;
    inside.work()?;
    outside.work()?;
    let ended = tool.interrupt()?;
    let rows: Vec<&str> = ended.stdout.lines().skip(1).collect();
    ensure!(
        rows.len() == 1 && rows[0].starts_with(&inside.pid()),
        "{ended:?}"
    );
    Ok(())
}

fn time_is_that_of_the_place() -> Result<()> {
    let mut command = Command::new(tool("vmscan"));
    command.args(["-j", "0.01", "1"]).env("TZ", "Asia/Tokyo");
    let ended = Tool::spawn(command.stdin(Stdio::null()))?.end()?;
    ensure!(ended.stdout.contains("+09:00\""), "{ended:?}");
    Ok(())
}

/// How a tool ends that nobody (uid 65534) runs with these capabilities alone.
fn run_by_nobody(capabilities: &str, name: &str, args: &[&str]) -> Result<Ended> {
    let (folder, program) = where_nobody_may_go(name)?;
    let ended = Tool::spawn(by_nobody(capabilities, &program).args(args))?.end();
    drop(folder);
    ended
}

/// A tool's copy, in a folder where nobody may go, too.
fn where_nobody_may_go(name: &str) -> Result<(TempDir, PathBuf)> {
    let folder = harness::scratch()?;
    let program = folder.path().join(name);
    harness::copy(&tool(name), &program)?;
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
    Ok((folder, program))
}

/// A program that the user nobody runs, with these capabilities.
pub(crate) fn by_nobody(capabilities: &str, program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--clear-groups"]);
    for set in ["--inh-caps", "--ambient-caps", "--bounding-set"] {
        command.arg(format!("{set}=-all{capabilities}"));
    }
    command.arg("--").arg(program);
    command
}

/// More tools than have room for a log of mappings within what a user may lock.
fn tools_of_one_user_share_locked_memory() -> Result<()> {
    let (folder, oomkill) = where_nobody_may_go("oomkill")?;
    let mut capabilities = ",+bpf,+perfmon,+dac_read_search,+sys_admin,+syslog".to_owned();
    if harness::release().starts_with("5.10.") {
        capabilities.push_str(",+sys_resource");
    }
    let start = || {
        let mut command = by_nobody(&capabilities, &oomkill);
        command.args(["-e", "-d", "2"]);
        let few = || setrlimit(Resource::RLIMIT_MEMLOCK, 64 << 10, 64 << 10);
        // SAFETY: a system call between fork and exec.
        unsafe { command.pre_exec(move || Ok(few()?)) };
        Tool::spawn(&mut command)
    };
    let tools: Vec<Tool> = (0..3).map(|_| start()).collect::<Result<_>>()?;
    for tool in tools {
        let ended = tool.end()?;
        ensure!(ended.status.success(), "{ended:?}");
    }
    drop(folder);
    Ok(())
}

fn missing_privilege_is_named() -> Result<()> {
    let workload = Workload::start("alloc", &["hold"])?;
    let pid = workload.pid();
    // 5.10 wants one more, which not every machine may give away.
    let (least, more) = if harness::release().starts_with("5.10.") {
        let ended = run_by_nobody(",+bpf,+perfmon", "vmscan", &["0.1", "3"])?;
        ensure!(ended.stderr.contains("wants CAP_SYS_RESOURCE"), "{ended:?}");
        (",+bpf,+perfmon,+sys_resource", ",+sys_resource")
    } else {
        (",+bpf,+perfmon", "")
    };
    let most = format!(",+bpf,+perfmon,+dac_read_search{more}");
    let refused: [(&str, &str, &[&str], &str); 3] = [
        (
            "",
            "memleak",
            &["-p", &pid],
            "CAP_BPF and CAP_PERFMON missing",
        ),
        (least, "memleak", &["-p", &pid], "wants CAP_SYS_PTRACE"),
        (
            least,
            "mmapsnoop",
            &["-d", "0.1"],
            "wants CAP_DAC_READ_SEARCH",
        ),
    ];
    for (capabilities, name, args, told) in refused {
        let ended = run_by_nobody(capabilities, name, args)?;
        ensure!(ended.status.code() == Some(1), "{ended:?}");
        ensure!(ended.stderr.contains(told), "{told}: {ended:?}");
        ensure!(ended.stderr.contains("run it as root"), "{ended:?}");
    }
    // Debian's own kernels refuse perf events, too, and are told not to.
    let paranoid = "/proc/sys/kernel/perf_event_paranoid";
    let refuses = fs::read_to_string(paranoid)?.trim().parse::<i32>()? > 2;
    let _permits = if refuses {
        let ended = run_by_nobody(&most, "faults", &["-d", "0.1"])?;
        let told = "wants CAP_SYS_ADMIN: run it as root, or with this capability, or: sysctl";
        ensure!(ended.stderr.contains(told), "{ended:?}");
        Some(Setting::change(paranoid, "2")?)
    } else {
        None
    };
    // What a tool can do without, it goes on without.
    let mut worse: Vec<(&str, &[&str], &str)> =
        vec![("oomkill", &["-e", "-d", "0.1"], "wants CAP_SYSLOG")];
    // On 5.10 libbpf has the limit of locked memory lifted.
    if more.is_empty() {
        worse.push(("vmscan", &["0.1", "3"], "wants CAP_IPC_LOCK"));
    }
    for (name, args, told) in worse {
        let ended = run_by_nobody(&most, name, args)?;
        ensure!(ended.status.success(), "{ended:?}");
        ensure!(ended.stderr.contains(told), "{told}: {ended:?}");
    }
    // Some kernels want more for perf's uprobes.
    let capabilities = format!(",+bpf,+perfmon,+sys_ptrace,+ipc_lock{more}");
    let (folder, program) = where_nobody_may_go("memleak")?;
    let mut command = by_nobody(&capabilities, &program);
    command.args(["-p", &pid, "0.1", "1"]);
    command.env("MEMTOOLS_ATTACH", "perf uprobes without cookies");
    let ended = Tool::spawn(&mut command)?.end()?;
    drop(folder);
    let told = ended.stderr.contains("wants CAP_SYS_ADMIN: run it as root");
    ensure!(ended.status.success() || told, "{ended:?}");
    Ok(())
}
