//! heapscan on damaged heaps, and on processes that fork, exec or exit while it looks. heapscan says what is wrong,
//! takes no more memory than for other processes, ends, and leaves the process as it was.

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
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
use crate::random::Random;
use crate::verdict;

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "heapscan::hostile":
        damaged_heaps_are_refused_with_the_place [Once],
        forged_words_change_nothing [Once],
        a_ring_of_blocks_is_one_leak [Once],
        heaps_of_two_c_libraries_have_no_verdict [Once],
        words_changed_at_random_do_no_harm [Once],
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
/// Number of times that words of each process are changed.
const ROUNDS: u32 = 6;
/// Program with objects of several types, which waits as the workloads do.
const WAITING_PYTHON: &str = "
import os, sys
class Car: pass
cars = [Car() for _ in range(1009)]
table = {str(n): [n, {'n': n}, (n, str(n))] for n in range(1009)}
print('ready', os.getpid(), flush=True)
sys.stdin.readline()
print('done sum=%d' % sum(row[1]['n'] for row in table.values()), flush=True)
sys.stdin.readline()
";

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

/// Pointers, sizes and counts anywhere in a process's memory get values that lead elsewhere or are near limits, while the
/// process waits. heapscan judges the process or refuses it, and the process runs on as if it had not been examined.
fn words_changed_at_random_do_no_harm() -> Result<()> {
    // Other seeds are tried by hand.
    let seed = env::var("MEMTOOLS_FUZZ_SEED").map_or(Ok(1), |seed| seed.parse())?;
    let mut random = Random::new(seed);
    let workload = Workload::start("hostile-heap", &["noise"])?;
    let mut python = Workload::spawn(Command::new("python3").args(["-c", WAITING_PYTHON]))?;
    for pid in [workload.pid(), python.pid()] {
        let words = Words::of(&pid)?;
        for round in 0..ROUNDS {
            let changed = words.change(random.pick(&[1, 10, 100, 1000]), &mut random)?;
            let question = random.pick(&[
                QUESTIONS[0],
                QUESTIONS[1],
                QUESTIONS[2],
                &["--why", "24"],
                &[],
            ]);
            let ended = look(&pid, question);
            words.restore(changed)?;
            let ended = ended?;
            let text = format!("{}{}", ended.stdout, ended.stderr);
            ensure!(
                matches!(ended.status.code(), Some(0 | 1)) && !text.contains("panicked"),
                "round {round}, {question:?}: {ended:?}"
            );
            let is_safe = |letter: char| !letter.is_control() || "\n\t".contains(letter);
            ensure!(text.chars().all(is_safe), "round {round}: {text:?}");
            ensure!(
                tracer_and_state(&pid)?.0 == "0",
                "round {round}: still traced"
            );
        }
    }
    ensure!(
        python.work()?["sum"] == "508536",
        "Python's objects have changed"
    );
    ensure!(python.finish()?.success(), "Python did not live on");
    unharmed(workload, "counted").map(drop)
}

/// Words of the writable memory of a process, by which tests change it.
struct Words {
    memory: File,
    /// Addresses of words that are not 0.
    addresses: Vec<u64>,
}

impl Words {
    /// Most words of one mapping. More would be blocks of the program rather than lists, headers and objects.
    const MOST: usize = 1 << 17;

    fn of(pid: &str) -> Result<Self> {
        let memory = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))?;
        let mut addresses = Vec::new();
        for line in fs::read_to_string(format!("/proc/{pid}/maps"))?.lines() {
            let (range, rest) = line.split_once(' ').context("no mapping")?;
            if !rest.starts_with("rw-p") || rest.contains("[stack") {
                continue;
            }
            let (start, end) = range.split_once('-').context("no range")?;
            let (start, end) = (
                u64::from_str_radix(start, 16)?,
                u64::from_str_radix(end, 16)?,
            );
            let mut bytes = vec![0; (end - start).min(8 * Self::MOST as u64) as usize];
            memory.read_exact_at(&mut bytes, start)?;
            let words = (start..).step_by(8).zip(bytes.chunks_exact(8));
            addresses.extend(words.filter(|(_, word)| *word != [0; 8]).map(|(at, _)| at));
        }
        Ok(Self { memory, addresses })
    }

    fn read(&self, address: u64) -> Result<u64> {
        let mut word = [0; 8];
        self.memory.read_exact_at(&mut word, address)?;
        Ok(u64::from_le_bytes(word))
    }

    /// Changes some words. Returns each with its address and its value before.
    fn change(&self, words: usize, random: &mut Random) -> Result<Vec<(u64, u64)>> {
        let mut changed = Vec::new();
        for _ in 0..words {
            let address = random.pick(&self.addresses);
            let (before, other) = (self.read(address)?, random.pick(&self.addresses));
            let after = match random.below(7) {
                0 => random.pick(&[
                    0,
                    1,
                    0xff,
                    0x1000,
                    0xffff_ffff,
                    1 << 40,
                    1 << 47,
                    1 << 63,
                    u64::MAX,
                ]),
                1 => address,
                2 => other,
                3 => self.read(other)?,
                4 => before ^ 1 << random.below(64),
                5 => before.wrapping_add(random.pick(&[1, 8, 16, 4096, 1 << 32])),
                _ => before.wrapping_sub(random.pick(&[1, 8, 16, 4096, 1 << 32])),
            };
            self.memory.write_all_at(&after.to_le_bytes(), address)?;
            changed.push((address, before));
        }
        Ok(changed)
    }

    /// Gives the words their values again.
    fn restore(&self, changed: Vec<(u64, u64)>) -> Result<()> {
        for (address, before) in changed.into_iter().rev() {
            self.memory.write_all_at(&before.to_le_bytes(), address)?;
        }
        Ok(())
    }
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
