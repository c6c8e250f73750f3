//! heapscan stops a process for a moment. The process continues unchanged, and a process that cannot
//! be stopped is refused.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;
use memtools::heap::capture::Request;
use memtools::process::proc::Process;
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{self, Tool, Workload};
use crate::heap::{look, number};

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "heapscan::heap":
        a_traced_process_is_refused,
        a_thread_that_is_late_is_tried_again,
        a_thread_that_never_stops_is_refused,
        a_process_under_seccomp_lives_on,
        shared_memory_is_not_brought_in,
        page_tables_do_not_prolong_a_pause [Once],
        many_threads_do_not_prolong_a_pause [Once],
        a_copy_is_given_up_at_the_bound [Once],
        a_process_runs_on_if_memleak_is_killed_in_the_pause,
        a_copy_is_of_one_moment,
        a_copy_of_which_most_was_made_before_is_of_one_moment [SoftDirty],
        what_was_copied_before_is_not_copied_again [SoftDirty],
        blocks_that_come_and_go_are_not_lost_in_a_copy_made_before [SoftDirty],
        a_kernel_without_marks_copies_nothing_before [NoSoftDirty],
        a_process_that_follows_its_own_writes_keeps_its_marks,
    }
}

fn a_traced_process_is_refused() -> Result<()> {
    let mut workload = Workload::start("heap", &["1", "211", "plain"])?;
    let pid = workload.pid();
    ptrace::seize(Pid::from_raw(pid.parse()?), ptrace::Options::empty())?;
    harness::expect_refusal(
        "heapscan",
        &["-p", &pid, "--layout"],
        1,
        "is traced already, by ",
    )?;
    workload.work().map(drop)
}

/// Starts a process that waits in vfork(2). Returns the process, and its child's PID.
fn in_vfork() -> Result<(Workload, String)> {
    let mut workload = Workload::start("heap", &["0", "0", "vfork"])?;
    let pid = workload.pid();
    workload.go()?;
    let mut child = String::new();
    harness::eventually("the process has a child, and waits for it", || {
        child = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
        Ok(!child.is_empty() && tracer_and_state(&pid)?.1.starts_with('D'))
    })?;
    Ok((workload, child.trim().to_owned()))
}

/// The first attempt fails, because the process sleeps uninterruptibly. Then the sleep ends, and the next attempt
/// succeeds.
fn a_thread_that_is_late_is_tried_again() -> Result<()> {
    for question in ["--layout", "--types", "--leaks"] {
        let (mut workload, child) = in_vfork()?;
        let pid = workload.pid();
        let mut tool = Tool::start("heapscan", &["-p", &pid, question, "--max-pause", "60000"])?;
        let tracer = tool.pid().to_string();
        for holder in [tracer.as_str(), "0"] {
            while tracer_and_state(&pid)?.0 != holder {
                ensure!(!tool.has_ended()?, "{question}: {:?}", tool.wait()?);
            }
        }
        kill(Pid::from_raw(child.parse()?), Signal::SIGKILL)?;
        let ended = tool.wait()?;
        let says = format!(
            " tries to stop all threads of process {pid}: thread {pid} did not stop within 100 ms"
        );
        ensure!(
            ended.status.success() && ended.stderr.contains(&says),
            "{question}: {ended:?}"
        );
        ensure!(workload.done()?["waited"] == "1", "it did not live on");
    }
    Ok(())
}

fn a_thread_that_never_stops_is_refused() -> Result<()> {
    let (mut workload, child) = in_vfork()?;
    let pid = workload.pid();
    let says = [
        &format!("thread {pid} of process {pid} did not stop within 100 ms in 6 tries over "),
        "a vfork whose child still runs); all threads go on, try again",
    ];
    for question in ["--leaks", "--growth=10"] {
        let args = ["-p", &pid, question, "--max-pause", "60000"];
        let ended = harness::run("heapscan", &args)?;
        ensure!(
            ended.status.code() == Some(1) && says.iter().all(|says| ended.stderr.contains(says)),
            "{question}: {ended:?}"
        );
    }
    kill(Pid::from_raw(child.parse()?), Signal::SIGKILL)?;
    ensure!(workload.done()?["waited"] == "1", "it did not live on");
    Ok(())
}

fn a_process_under_seccomp_lives_on() -> Result<()> {
    let mut workload = Workload::start("heap", &["0", "2003", "strict"])?;
    let rows = look(&workload.pid(), &[])?;
    ensure!(rows[0]["coverage"] == "complete", "{rows:?}");
    workload.work().map(drop)
}

fn shared_memory_is_not_brought_in() -> Result<()> {
    let mut workload = Workload::start("heap", &["0", "0", "shared"])?;
    let rows = look(&workload.pid(), &[])?;
    ensure!(
        number(&rows[0]["shared"]["mapped_bytes"])? >= 64 << 20,
        "{rows:?}"
    );
    let facts = workload.work()?;
    ensure!(facts["shared"] == "0", "{facts:?}");
    Ok(())
}

/// Time by which a gap that the target measures may be longer than the bound, for what else the machine does.
const SLACK: Duration = Duration::from_millis(20);

/// Expects a process to be copied or refused within the bound, by its own clock. Returns what heapscan said. As the
/// machine may withhold CPU time from the process, the shortest of three measurements counts.
fn expect_bound(workload: [&str; 2], bound: u64) -> Result<String> {
    let mut measured = Vec::new();
    for _ in 0..3 {
        let mut workload = Workload::start("stopwatch", &workload)?;
        let args = [
            "-p",
            &workload.pid(),
            "--layout",
            "--max-pause",
            &bound.to_string(),
        ];
        let ended = harness::run("heapscan", &args)?;
        let refused = format!(" within --max-pause {bound}");
        ensure!(
            ended.status.success() || ended.stderr.contains(&refused),
            "{ended:?}"
        );
        let facts = workload.work()?;
        let fact = |name: &str| anyhow::Ok(Duration::from_micros(facts[name].parse()?));
        let longest = fact("gap_us")?;
        if longest <= Duration::from_millis(bound) + SLACK {
            return Ok(ended.stderr);
        }
        measured.push((longest, ended.stderr));
    }
    bail!("more than {bound} ms: {measured:?}")
}

fn page_tables_do_not_prolong_a_pause() -> Result<()> {
    expect_bound(["tables", "29"], 10).map(drop)
}

fn many_threads_do_not_prolong_a_pause() -> Result<()> {
    let says = expect_bound(["threads", "4001"], 3)?;
    ensure!(says.contains("threads"), "{says}");
    // This is enough time.
    let mut workload = Workload::start("stopwatch", &["threads", "4001"])?;
    look(&workload.pid(), &[])?;
    workload.work().map(drop)
}

fn a_copy_is_given_up_at_the_bound() -> Result<()> {
    let says = expect_bound(["memory", "307"], 5)?;
    let parts = [
        "was not copied within --max-pause 5 in ",
        ", and runs on: ",
        "; if a longer pause does no harm: --max-pause ",
    ];
    ensure!(parts.iter().all(|part| says.contains(part)), "{says}");
    Ok(())
}

/// Returns the PID of the process that traces a process, and the state of the traced process. The kernel names
/// the tracing thread, which is mapped to its process.
pub(super) fn tracer_and_state(pid: &str) -> Result<(String, String)> {
    let field = |pid: &str, name: &str| {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let value = status.lines().find_map(|line| line.strip_prefix(name));
        let value = value.context("no field")?.trim().to_owned();
        anyhow::Ok(value)
    };
    let (tracer, state) = (field(pid, "TracerPid:")?, field(pid, "State:")?);
    let tracer = field(&tracer, "Tgid:").unwrap_or(tracer);
    Ok((tracer, state))
}

fn a_process_runs_on_if_memleak_is_killed_in_the_pause() -> Result<()> {
    let mut workload = Workload::start("heap", &["0", "300007", "holes"])?;
    let pid = workload.pid();
    let mut killed = 0;
    for _ in 0..10 {
        let mut tool = Tool::start(
            "heapscan",
            &["-p", &pid, "--layout", "--max-pause", "60000"],
        )?;
        let tracer = tool.pid().to_string();
        while !tool.has_ended()? {
            if tracer_and_state(&pid)?.0 == tracer {
                tool.signal(Signal::SIGKILL)?;
                killed += 1;
                break;
            }
        }
        drop(tool);
        harness::eventually("the process runs on", || {
            let (tracer, state) = tracer_and_state(&pid)?;
            Ok(tracer == "0" && state.starts_with('S'))
        })?;
        if killed == 3 {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    ensure!(killed > 0, "no pause was met");
    workload.work().map(drop)
}

/// Expects a copy of constantly changing memory to show one moment, even if the marks of written pages miss writes.
fn expect_one_moment(pre_copy: bool) -> Result<()> {
    const PLACES: u64 = 499;
    let mut workload = Workload::start("restless", &[&PLACES.to_string()])?;
    let facts = workload.work()?;
    let address = |fact: &str| facts[fact].parse::<u64>();
    let (words, table) = (address("words")?, address("table")?);
    let (busy, changes) = (address("busy")?, address("changes")?);
    let process = Process::open(workload.pid().parse()?)?;
    let request = Request {
        process: &process,
        max_pause: Duration::from_secs(60),
        pre_copy,
        idle: None,
    };
    let mut before = 0;
    for _ in 0..23 {
        let image = request.take()?;
        let word = |address: u64| image.word(address).unwrap_or(0);
        let busy = word(busy);
        for number in (0..PLACES).filter(|number| !(busy..busy + 2).contains(number)) {
            let (expected, found) = (word(table + 8 * number), word(words + (number << 21)));
            ensure!(
                found == expected,
                "place {number} of {PLACES}: {found}, not {expected}, after {} changes, {} since the copy before",
                word(changes),
                word(changes) - before
            );
        }
        ensure!(word(changes) > before, "nothing changes");
        before = word(changes);
    }
    Ok(())
}

fn a_copy_is_of_one_moment() -> Result<()> {
    expect_one_moment(false)
}

fn a_copy_of_which_most_was_made_before_is_of_one_moment() -> Result<()> {
    expect_one_moment(true)
}

fn what_was_copied_before_is_not_copied_again() -> Result<()> {
    let mut workload = Workload::start("heap", &["0", "50021", "holes"])?;
    let pid = workload.pid();
    let args = ["-p", &pid, "--layout", "-j", "--max-pause", "60000"];
    let whole = harness::run("heapscan", &args)?.objects()?;
    let ended = harness::run("heapscan", &[&args[..], &["--pre-copy"]].concat())?;
    let rows = ended.objects()?;
    for field in ["coverage", "blocks", "block_bytes", "heap", "copied_bytes"] {
        ensure!(rows[0][field] == whole[0][field], "{rows:?}, {whole:?}");
    }
    // Example: heapscan: of 53.0 MB of process 4242, 1.2 MB were copied while it was stopped
    let (all, due) = ended
        .stderr
        .lines()
        .find_map(|line| {
            let (all, rest) = line
                .strip_prefix("heapscan: of ")?
                .split_once(&format!(" of process {pid}, "))?;
            let due = rest.strip_suffix(" were copied while it was stopped")?;
            Some((bytes(all)?, bytes(due)?))
        })
        .with_context(|| format!("not told: {ended:?}"))?;
    ensure!(all > 50_021_000.0 && due < all / 20.0, "{due} of {all}");
    workload.work().map(drop)
}

/// Parses a size as people read it, and returns bytes.
fn bytes(text: &str) -> Option<f64> {
    let (value, unit) = text.split_once(' ')?;
    let factor = match unit {
        "bytes" => 1.0,
        "kB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        _ => return None,
    };
    Some(value.parse::<f64>().ok()? * factor)
}

fn blocks_that_come_and_go_are_not_lost_in_a_copy_made_before() -> Result<()> {
    let workload = Workload::start("heap", &["3", "5003", "busy"])?;
    for _ in 0..7 {
        let args = ["-jp", &workload.pid(), "--leaks", "--pre-copy"];
        let args = [&args[..], &["--max-pause", "60000"]].concat();
        let rows = harness::run("heapscan", &args)?.objects()?;
        ensure!(rows[0]["unreachable"]["blocks"] == 0, "{rows:?}");
        ensure!(number(&rows[0]["reachable"]["blocks"])? > 1000, "{rows:?}");
    }
    Ok(())
}

fn a_kernel_without_marks_copies_nothing_before() -> Result<()> {
    let mut workload = Workload::start("heap", &["0", "211", "plain"])?;
    let pid = workload.pid();
    let remedy = format!(
        "(CONFIG_MEM_SOFT_DIRTY), so that nothing can be copied before process {pid} is stopped: omit --pre-copy"
    );
    harness::expect_refusal(
        "heapscan",
        &["-p", &pid, "--layout", "--pre-copy"],
        1,
        &remedy,
    )?;
    workload.work().map(drop)
}

/// Refuses to clear marks by which a process follows its own writes, as some garbage collectors do.
fn a_process_that_follows_its_own_writes_keeps_its_marks() -> Result<()> {
    const PROGRAM: &str =
        "exec 7>/proc/$$/clear_refs && echo ready $$ && read _ && echo done && read _";
    let mut workload = Workload::spawn(Command::new("sh").args(["-c", PROGRAM]))?;
    let pid = workload.pid();
    let remedy =
        "open (file descriptor 7): it follows what it writes by the marks that --pre-copy clears";
    harness::expect_refusal(
        "heapscan",
        &["-p", &pid, "--layout", "--pre-copy"],
        1,
        remedy,
    )?;
    workload.work().map(drop)
}
