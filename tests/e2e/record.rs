//! memtriage --record: its reports of processes that the kernel kills, and its cost until then.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::harness::{self, Tool, ToolOutput, Workload, tool, workload};
use crate::pressure::Group;

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "record":
        nothing_is_traced_before_the_mark [Guest],
        a_kill_leaves_a_report_with_the_code_that_grew [Guest],
        a_program_without_an_allocator_is_traced_by_its_faults [Guest],
        a_kill_that_is_told_late_has_its_stacks [Guest],
        a_kill_that_came_too_early_is_told [Guest],
        tracing_ends_when_there_is_room_again [Guest],
        a_folder_of_others_is_refused [Once],
    }
}

/// Memory limit of the processes of a test, in bytes.
const LIMIT: u64 = 96 << 20;

/// Mark in percent from which on processes are traced, in most tests.
const HALF: &str = "50";
/// Mark that is passed in the moment of a kill, if at all.
const ALL: &str = "100";

/// Starts a recorder with this mark in percent, and waits until it is ready.
fn record(folder: &Path, above: &str) -> Result<Tool> {
    let folder = folder.to_str().context("a name that is text")?;
    let args = [
        "--record",
        folder,
        "--before-oom",
        "--above",
        above,
        "--container",
        "-j",
    ];
    let mut recorder = Tool::start("memtriage", &args)?;
    recorder.wait_for_stderr(&format!("nothing is traced until {above} %"))?;
    Ok(recorder)
}

/// Starts a program that grows by 4 MB per second in a cgroup, up to `most`. It grows slowly, because memtriage
/// looks seldom where a look takes long.
fn grow(group: &Group, program: &str, most: &str) -> Result<Workload> {
    group.forbid_swap()?;
    let mut grow = Workload::spawn(&mut group.command(&workload(program), &["4", most]))?;
    grow.go()?;
    Ok(grow)
}

/// Returns the printed objects of this type.
fn printed(ended: &ToolOutput, kind: &str) -> Result<Vec<Value>> {
    let mut objects = ended.objects_among_lines()?;
    objects.retain(|object| object["type"] == kind);
    Ok(objects)
}

/// Stops a growing process until a tool of this recorder and oomkill have attached. On a busy machine, the process would
/// be killed before.
fn hold_for(tool: &str, recorder: &mut Tool, grow: &Workload) -> Result<()> {
    let pid = Pid::from_raw(grow.pid().parse()?);
    recorder.wait_for_output("\"type\":\"tracing\"")?;
    kill(pid, Signal::SIGSTOP)?;
    harness::eventually(&format!("{tool} and oomkill wait for events"), || {
        let started = processes_of(recorder.pid())?;
        // A tool may have ended since.
        let waits = |name: &str| {
            let found = started.iter().find(|(_, started)| started == name);
            found.is_some_and(|(pid, _)| harness::waits_for_events(*pid).unwrap_or(false))
        };
        Ok(waits(tool) && waits("oomkill"))
    })?;
    kill(pid, Signal::SIGCONT)?;
    Ok(())
}

/// Stops oomkill until a growing process has been dead for the time `after`, as on a machine that lacks CPU time.
fn hold_oomkill(recorder: &Tool, grow: &Workload, after: Duration) -> Result<()> {
    let mut started = processes_of(recorder.pid())?.into_iter();
    let oomkill = started.find(|(_, name)| name == "oomkill");
    let oomkill = Pid::from_raw(oomkill.context("no oomkill")?.0.try_into()?);
    kill(oomkill, Signal::SIGSTOP)?;
    harness::eventually("the process is killed", || {
        // The process is a zombie, because the test has not waited for it.
        let stat = fs::read_to_string(format!("/proc/{}/stat", grow.pid()))?;
        Ok(stat.contains(") Z "))
    })?;
    thread::sleep(after);
    kill(oomkill, Signal::SIGCONT)?;
    Ok(())
}

/// Returns the report of a program that is killed while this tool traces it, as JSON and as text. With `late`,
/// oomkill reports the kill with that delay.
fn report_of(program: &str, tool: &str, late: Option<Duration>) -> Result<(Value, String)> {
    // The name is one of Docker's, where Docker is not told to leave cgroups to systemd.
    let container = format!("{:0<64x}", program.len() + usize::from(late.is_some()));
    let group = Group::new(&container, LIMIT)?;
    let above = harness::scratch()?;
    let folder = above.path().join("reports");
    let mut recorder = record(&folder, HALF)?;
    let grow = grow(&group, program, "1000")?;
    let pid: u32 = grow.pid().parse()?;
    hold_for(tool, &mut recorder, &grow)?;
    if let Some(late) = late {
        hold_oomkill(&recorder, &grow, late)?;
    }
    recorder.wait_for_output("\"type\":\"recorded\"")?;
    let ended = recorder.interrupt()?;
    ensure!(ended.status.code() == Some(3), "{ended:?}");

    let armed = printed(&ended, "armed")?;
    let cgroup = format!("/{container}");
    ensure!(
        armed.len() == 1 && armed[0]["cgroup"] == *cgroup,
        "{ended:?}"
    );
    let recorded = printed(&ended, "recorded")?;
    ensure!(
        recorded.len() == 1 && recorded[0]["pid"] == pid,
        "{ended:?}"
    );
    ensure!(printed(&ended, "missed")?.is_empty(), "{ended:?}");
    let traced = printed(&ended, "tracing")?;
    for row in recorded
        .iter()
        .chain(traced.iter().filter(|row| row["pid"] == pid))
    {
        let told = (&row["cgroup"], &row["container_id"]);
        ensure!(*told.0 == *cgroup && *told.1 == *container, "{row}");
    }
    ensure!(!traced.is_empty(), "{ended:?}");
    let read = |kind: &str| {
        let path = recorded[0][kind].as_str().context("no file")?;
        fs::read_to_string(path).with_context(|| format!("{path} cannot be read"))
    };
    let report = harness::object(read("json")?.trim_end())?;
    ensure!(report["kill"]["victim"]["pid"] == pid, "{report}");
    ensure!(report["cgroup"] == *cgroup, "{report}");
    let last = report["processes"]
        .as_array()
        .context("no processes")?
        .iter();
    let last = last
        .filter(|process| process["pid"] == pid)
        .collect::<Vec<_>>();
    ensure!(last.len() == 1, "{report}");
    let of_traced = report["traced"].as_array().context("nothing traced")?;
    for row in last
        .iter()
        .copied()
        .chain(of_traced.iter().filter(|row| row["pid"] == pid))
    {
        let told = (&row["cgroup"], &row["container_id"]);
        ensure!(*told.0 == *cgroup && *told.1 == *container, "{row}");
    }
    let anon = last[0]["anon_bytes"].as_u64().context("no bytes")?;
    ensure!((LIMIT / 2..=LIMIT).contains(&anon), "{report}");
    let moments = report["moments"].as_array().context("no moments")?;
    let fullest = |moment: &&Value| moment["fullest"]["cgroup"] == *cgroup;
    ensure!(moments.iter().filter(fullest).count() >= 3, "{report}");
    Ok((report, read("text")?))
}

/// Returns the largest stack of the first traced process. This command must have traced it, and must have seen
/// some of the growth.
fn largest<'a>(report: &'a Value, command: &str) -> Result<&'a Value> {
    let traced = &report["traced"][0];
    let run = traced["command"].as_str().unwrap_or_default();
    ensure!(run.starts_with(command), "{report}");
    let sum = traced["sum"].as_u64().context("no sum")?;
    // The growth before the mark was passed was not seen.
    ensure!((LIMIT / 20..LIMIT * 6 / 10).contains(&sum), "{report}");
    Ok(&traced["stacks"][0])
}

fn a_kill_leaves_a_report_with_the_code_that_grew() -> Result<()> {
    let (report, text) = report_of("grow", "memleak", None)?;
    let stack = largest(&report, "memleak -p ")?;
    let frames = stack["frames"].as_array().context("no frames")?;
    ensure!(frames.iter().any(|frame| frame == "take_more"), "{report}");
    let container = report["kill"]["victim"]["container_id"].as_str();
    let short = &container.context("no container")?[..12];
    let killed = format!(") in {short} was killed\n");
    ensure!(text.contains(&killed), "{text}");
    ensure!(
        text.contains(&format!("growing in {short}: memleak ")),
        "{text}"
    );
    ensure!(text.contains("\n        take_more\n"), "{text}");
    Ok(())
}

fn a_program_without_an_allocator_is_traced_by_its_faults() -> Result<()> {
    let (report, _) = report_of("grow-stripped", "faults", None)?;
    let stack = largest(&report, "faults --bytes -p ")?;
    ensure!(stack["comm"] == "grow-stripped", "{report}");
    Ok(())
}

/// Delay that is longer than memtriage waits after a process's end if it knows of no kill.
const LATE: Duration = Duration::from_secs(15);

fn a_kill_that_is_told_late_has_its_stacks() -> Result<()> {
    let (report, _) = report_of("grow", "memleak", Some(LATE))?;
    let stack = largest(&report, "memleak -p ")?;
    let frames = stack["frames"].as_array().context("no frames")?;
    ensure!(frames.iter().any(|frame| frame == "take_more"), "{report}");
    Ok(())
}

/// A process that takes all memory between two looks is killed unseen.
fn a_kill_that_came_too_early_is_told() -> Result<()> {
    let above = harness::scratch()?;
    let group = Group::new("memtools-record-early", 8 << 20)?;
    group.forbid_swap()?;
    let mut recorder = record(&above.path().join("reports"), ALL)?;
    let mut hog = Workload::spawn(&mut group.command(&workload("hog"), &["64", "77"]))?;
    crate::oomkill::kill(&mut hog)?;
    recorder.wait_for_output("\"type\":\"missed\"")?;
    let ended = recorder.interrupt()?;
    let missed = printed(&ended, "missed")?;
    ensure!(
        missed.iter().any(|missed| missed["kills"] == 1),
        "{ended:?}"
    );
    // No report was written.
    ensure!(ended.status.code() == Some(0), "{ended:?}");
    Ok(())
}

fn tracing_ends_when_there_is_room_again() -> Result<()> {
    let group = Group::new("memtools-record-room", LIMIT)?;
    let above = harness::scratch()?;
    let mut recorder = record(&above.path().join("reports"), HALF)?;
    let grow = grow(&group, "grow", "64")?;
    recorder.wait_for_output("\"type\":\"tracing\"")?;
    let (mut names, wanted) = (Vec::new(), ["memleak", "oomkill"]);
    let running = harness::eventually("memleak and oomkill run", || {
        names = children(recorder.pid())?;
        Ok(names == wanted)
    });
    running.with_context(|| format!("{names:?} run"))?;
    drop(grow);
    recorder.wait_for_output("\"type\":\"disarmed\"")?;
    ensure!(children(recorder.pid())?.is_empty(), "a tool goes on");
    let ended = recorder.interrupt()?;
    ensure!(ended.status.code() == Some(0), "{ended:?}");
    Ok(())
}

/// Returns the sorted names of the processes that a process has started.
fn children(pid: u32) -> Result<Vec<String>> {
    let mut names: Vec<_> = processes_of(pid)?
        .into_iter()
        .map(|(_, name)| name)
        .collect();
    names.sort();
    Ok(names)
}

/// Returns the processes that a process has started, with their names.
fn processes_of(pid: u32) -> Result<Vec<(u32, String)>> {
    let mut processes = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that has ended meanwhile has no children, and a process that has ended has no name.
        let list = fs::read_to_string(task?.path().join("children")).unwrap_or_default();
        for child in list.split_whitespace() {
            if let Ok(name) = fs::read_to_string(format!("/proc/{child}/comm")) {
                processes.push((child.parse()?, name.trim_end().to_owned()));
            }
        }
    }
    Ok(processes)
}

/// Before the mark, no tool runs, no descriptor belongs to a BPF object or a perf event, and less than a
/// thousandth of one CPU is used.
fn nothing_is_traced_before_the_mark() -> Result<()> {
    const WATCHED: Duration = Duration::from_secs(20);
    // The time between two looks depends on what a look takes. An emulated CPU also takes long to wait for the next.
    let most = if harness::in_guest() { 0.002 } else { 0.001 };
    let above = harness::scratch()?;
    let recorder = record(&above.path().join("reports"), ALL)?;
    let pid = recorder.pid();
    let took = || -> Result<u64> {
        let stat = fs::read_to_string(format!("/proc/{pid}/schedstat"))?;
        let nanoseconds = stat.split(' ').next().context("no time")?;
        Ok(nanoseconds.parse()?)
    };
    // The recorder looks first right after it has printed the line.
    thread::sleep(Duration::from_secs(2));
    let (before, start) = (took()?, Instant::now());
    thread::sleep(WATCHED);
    let share = (took()? - before) as f64 / start.elapsed().as_nanos() as f64;
    ensure!(share < most, "{share} of a CPU");
    ensure!(children(pid)?.is_empty());
    for fd in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let link = fs::read_link(fd?.path())?;
        let link = link.to_string_lossy();
        ensure!(
            !link.contains("bpf") && !link.contains("perf_event"),
            "{link}"
        );
    }
    let ended = recorder.interrupt()?;
    ensure!(
        ended.status.code() == Some(0) && ended.stdout.is_empty(),
        "{ended:?}"
    );
    Ok(())
}

fn a_folder_of_others_is_refused() -> Result<()> {
    let ended = harness::run("memtriage", &["--record", "/tmp", "--before-oom"])?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    ensure!(
        ended.stderr.contains("others may write into /tmp"),
        "{ended:?}"
    );
    let own = tool("memtriage");
    let ended = harness::run(
        "memtriage",
        &["--record", own.to_str().context("text")?, "--before-oom"],
    )?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    ensure!(ended.stderr.contains("is not a directory"), "{ended:?}");
    Ok(())
}
