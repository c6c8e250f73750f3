//! heapscan on damaged heaps, and on processes that fork, exec or exit while it looks. heapscan says what is wrong,
//! takes no more memory than for other processes, ends, and leaves the process as it was.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{self, Tool, ToolOutput, Workload};
use crate::heap_pause::tracer_and_state;
use crate::verdict;

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "heapscan::hostile":
        damaged_heaps_are_refused_with_the_place [Once],
        forged_words_change_nothing [Once],
        a_ring_of_blocks_is_one_leak [Once],
        heaps_of_two_c_libraries_have_no_verdict [Once],
        what_forks_or_starts_threads_is_judged [Once],
        what_executes_itself_is_judged_or_refused [Once],
        what_is_killed_has_no_verdict [Once],
        what_exits_has_no_verdict [Once],
        nobody_may_not_look,
    }
}

const QUESTIONS: [&[&str]; 4] = [
    &["--leaks", "--roots"],
    &["--layout"],
    &["--types"],
    &["--leaks", "--why", "24"],
];
/// Address space that heapscan gets here, in bytes. For a process of 100 MB it needs much less.
const ROOM: u64 = 1 << 30;
/// Longest permitted duration of a look at these processes, also in an emulated guest.
const LONGEST: Duration = Duration::from_secs(60);

/// Runs heapscan on a process, with limited address space and time.
fn look(pid: &str, question: &[&str]) -> Result<ToolOutput> {
    let start = Instant::now();
    let mut command = Command::new(harness::tool("heapscan"));
    command
        .args(["-p", pid, "--max-pause", "60000"])
        .args(question)
        .stdin(Stdio::null());
    // SAFETY: the closure makes one system call, which the forked child of a process with threads may make.
    unsafe {
        command.pre_exec(|| Ok(setrlimit(Resource::RLIMIT_AS, ROOM, ROOM)?));
    }
    let ended = Tool::spawn(&mut command)?.wait()?;
    ensure!(start.elapsed() < LONGEST, "{question:?}: {ended:?}");
    Ok(ended)
}

/// Expects the process to run to its end by itself. Returns one of the facts that it prints.
fn unharmed(mut workload: Workload, fact: &str) -> Result<String> {
    let facts = workload.work()?;
    ensure!(facts["counted"] == "1009", "{facts:?}");
    let fact = facts.get(fact).context("no such fact")?.clone();
    ensure!(workload.finish()?.success(), "it did not live on");
    Ok(fact)
}

fn damaged_heaps_are_refused_with_the_place() -> Result<()> {
    for (kind, says) in [
        ("size", "a chunk's header is inconsistent at 0x"),
        ("tcache", "the tcache of a thread is inconsistent at 0x"),
        (
            "fastbin",
            "a fastbin leads to what is no chunk of its size at 0x",
        ),
        (
            "ring",
            "the arenas of glibc's malloc do not lead back to the main one at 0x",
        ),
        ("heaps", " is inconsistent at 0x"),
    ] {
        let workload = Workload::start("hostile-heap", &[kind])?;
        for question in QUESTIONS {
            let ended = look(&workload.pid(), question)?;
            let told = format!("{}{}", ended.stdout, ended.stderr);
            ensure!(told.contains(says), "{kind} {question:?}: {ended:?}");
            ensure!(
                ended.status.code() == Some(1),
                "{kind} {question:?}: {ended:?}"
            );
            if question[0] == "--leaks" {
                ensure!(
                    ended.stderr.contains("heapscan: no verdict"),
                    "{kind}: {ended:?}"
                );
            }
        }
        let fact = match kind {
            "size" => "header",
            "ring" => "broken",
            _ => "counted",
        };
        let ended = look(&workload.pid(), QUESTIONS[0])?;
        let place = unharmed(workload, fact)?;
        ensure!(
            fact == "counted" || ended.stderr.contains(&format!(" at {place};")),
            "not {place}: {ended:?}"
        );
    }
    Ok(())
}

/// Words that look like an allocator's metadata, in other places, change nothing: heapscan does not follow them as
/// lists, and takes the blocks that contain them for ordinary blocks.
fn forged_words_change_nothing() -> Result<()> {
    for (kind, blocks) in [
        ("bin", "complete: 1,008 blocks"),
        ("mapped", "complete: 1,009 blocks"),
        ("noise", "complete: 20,011 blocks"),
    ] {
        let workload = Workload::start("hostile-heap", &[kind])?;
        for question in QUESTIONS {
            let ended = look(&workload.pid(), question)?;
            ensure!(
                ended.status.success() && ended.stdout.contains(blocks),
                "{kind} {question:?}: {ended:?}"
            );
        }
        unharmed(workload, "counted")?;
    }
    Ok(())
}

fn a_ring_of_blocks_is_one_leak() -> Result<()> {
    let workload = Workload::start("hostile-heap", &["ring-of-blocks"])?;
    let ended = look(&workload.pid(), &["--leaks", "--why", "24"])?;
    for says in [
        "24 bytes in 1 block unreachable (+ 7,200,144 bytes in 300,006 blocks via)",
        "WHY 24: 7,200,168 bytes in 300,007 blocks, of which the first 1000 are followed",
        "nothing: unreachable (24,000 bytes in 1,000 blocks)",
    ] {
        ensure!(ended.stdout.contains(says), "not {says:?}: {ended:?}");
    }
    unharmed(workload, "counted").map(drop)
}

fn heaps_of_two_c_libraries_have_no_verdict() -> Result<()> {
    let workload = Workload::start("hostile-heap", &["twice"])?;
    let says = "two C libraries have heaps (dlmopen, or one linked statically)";
    let ended = look(&workload.pid(), QUESTIONS[0])?;
    ensure!(
        ended.status.code() == Some(1) && ended.stderr.contains("no verdict on process "),
        "{ended:?}"
    );
    ensure!(ended.stderr.contains(says), "{ended:?}");
    let ended = look(&workload.pid(), &["--layout"])?;
    ensure!(
        ended.status.success() && ended.stdout.contains(&format!("coverage: unknown: {says}")),
        "{ended:?}"
    );
    unharmed(workload, "counted").map(drop)
}

fn what_forks_or_starts_threads_is_judged() -> Result<()> {
    for kind in ["forks", "threads"] {
        let mut workload = Workload::start("hostile-heap", &[kind])?;
        workload.go()?;
        for _ in 0..20 {
            let ended = look(&workload.pid(), QUESTIONS[0])?;
            ensure!(
                ended.status.success() && ended.stdout.contains("coverage: complete: "),
                "{kind}: {ended:?}"
            );
        }
        let count: u64 = unharmed(workload, kind)?.parse()?;
        ensure!(count > 20, "{kind}: {count}");
    }
    Ok(())
}

/// The image shows the program before or after an exec. heapscan finds a heap in it, or says that it has none.
fn what_executes_itself_is_judged_or_refused() -> Result<()> {
    let mut workload = Workload::start("hostile-heap", &["execs"])?;
    workload.go()?;
    for _ in 0..20 {
        let ended = look(&workload.pid(), QUESTIONS[0])?;
        let refused = [
            "executed another program while it was examined; if it still runs, try again",
            "no verdict on process ",
        ];
        let is_refused = refused.iter().any(|says| ended.stderr.contains(says));
        let judged = ended.status.success() && ended.stdout.contains("coverage: complete: ");
        ensure!(
            judged || (ended.status.code() == Some(1) && is_refused),
            "{ended:?}"
        );
    }
    let count: u64 = unharmed(workload, "execs")?.parse()?;
    ensure!(count > 20, "{count}");
    Ok(())
}

/// A process of some size is killed as soon as heapscan has stopped it.
fn what_is_killed_has_no_verdict() -> Result<()> {
    let mut met = 0;
    for _ in 0..10 {
        let mut workload = Workload::start("heap", &["0", "200003", "holes"])?;
        let pid = workload.pid();
        let mut tool = Tool::start("heapscan", &verdict::on("-p", &pid))?;
        let tracer = tool.pid().to_string();
        while !tool.has_ended()? {
            if tracer_and_state(&pid)?.0 == tracer {
                kill(Pid::from_raw(pid.parse()?), Signal::SIGKILL)?;
                met += 1;
                break;
            }
        }
        let was_met = met > 0;
        let ended = tool.wait()?;
        // The process was killed after the copy was complete.
        if ended.status.success() {
            met = 0;
            continue;
        }
        if was_met {
            ensure!(
                ended.status.code() == Some(1) && ended.stderr.contains(" has exited"),
                "{ended:?}"
            );
            ensure!(ended.stdout.is_empty(), "{ended:?}");
            ensure!(!workload.wait()?.success(), "it was not killed");
            break;
        }
    }
    ensure!(met > 0, "no pause was met");
    Ok(())
}

/// Processes exit, each at another moment of heapscan's look at it.
fn what_exits_has_no_verdict() -> Result<()> {
    let mut gone = 0;
    for round in 0..24 {
        let mut workload = Workload::start("heap", &["0", "20011", "holes"])?;
        let tool = Tool::start("heapscan", &verdict::on("-p", &workload.pid()))?;
        thread::sleep(Duration::from_millis(3 * round));
        workload.work()?;
        workload.finish()?;
        let ended = tool.wait()?;
        let is_gone = ended.status.code() == Some(1)
            && [" has exited", "no process has PID", "No such process"]
                .iter()
                .any(|says| ended.stderr.contains(says));
        gone += u32::from(is_gone);
        ensure!(
            is_gone || (ended.status.success() && ended.stdout.contains("coverage: complete: ")),
            "{ended:?}"
        );
    }
    ensure!(gone > 0, "all were judged");
    Ok(())
}

/// The user nobody is refused, for another user's process and a process of root, with a message that names what
/// is missing.
fn nobody_may_not_look() -> Result<()> {
    const NOBODY: u32 = 65534;
    let folder = harness::scratch()?;
    let tool = folder.path().join("heapscan");
    harness::copy(&harness::tool("heapscan"), &tool)?;
    Command::new("chmod")
        .arg("755")
        .arg(folder.path())
        .status()?;
    let workload = Workload::start("heap", &["0", "211", "holes"])?;
    for question in QUESTIONS {
        let mut command = Command::new(&tool);
        command.args(["-p", &workload.pid()]).args(question);
        command.uid(NOBODY).gid(NOBODY).stdin(Stdio::null());
        let ended = Tool::spawn(&mut command)?.wait()?;
        ensure!(
            ended.status.code() == Some(1) && ended.stdout.is_empty(),
            "{question:?}: {ended:?}"
        );
        ensure!(
            ended.stderr.contains("CAP_SYS_PTRACE") || ended.stderr.contains("run as root"),
            "{question:?}: {ended:?}"
        );
    }
    ensure!(workload.finish()?.success(), "it did not live on");
    Ok(())
}
