//! Incidents from memtriage to their cause, as docs/incidents.md has them: each command is the one that the last one has
//! printed as the next, word by word.

use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use crate::harness::{self, Tool, ToolOutput, Workload};
use crate::memtriage::{of_type, triage_of};
use crate::pressure::Group;

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "incidents":
        memory_that_a_program_maps_has_its_function [Once],
        a_cache_in_python_that_grows_has_its_function [Once],
        a_cache_in_python_at_rest_has_its_name [Once],
        shared_memory_that_grows_has_its_function [Once],
        a_file_that_is_mapped_has_its_name [Once],
        a_cgroup_that_stalls_has_its_task [Guest, Disk],
    }
}

/// Time for which a process or a cgroup is traced.
const TRACED: Duration = Duration::from_secs(1);
/// Number of page faults for which a process is traced first.
const FAULTS: u64 = 97;
/// What each of the Python programs begins with. `rounds` goes on until the test lets the program end.
const BEGIN: &str = "
import mmap, os, select, sys
def rounds():
    n = 0
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        yield n
        n += 1
    sys.stdin.readline()
";

/// Starts a Python program that defines `work` in a line of its own, and lets it go on.
fn python(work: &str) -> Result<Workload> {
    let script = format!(
        "{BEGIN}\n{work}\nprint('ready', os.getpid(), flush=True)\nsys.stdin.readline()\nwork()\n\
         print('done', flush=True)\nsys.stdin.readline()\n"
    );
    let mut program = Workload::spawn(Command::new("python3").args(["-c", &script]))?;
    program.go()?;
    Ok(program)
}

/// Asks memtriage about a process, until its next command begins with these words. Returns the command.
fn next_of(pid: &str, expected: &str) -> Result<String> {
    let mut next = String::new();
    harness::eventually(expected, || {
        let (objects, _) = triage_of(&["-p", pid])?;
        let findings = of_type(&objects, "finding");
        let finding = findings.first().context("no finding")?;
        next = finding["next"]
            .as_str()
            .context("no next command")?
            .to_owned();
        Ok(format!("{next} ").starts_with(&format!("{expected} ")))
    })?;
    Ok(next)
}

/// Runs a command as it was printed. A command that traces is interrupted when `is_traced` has returned.
fn follow(next: &str, is_traced: impl FnOnce() -> Result<()>) -> Result<ToolOutput> {
    let mut words = next.split(' ');
    let name = words.next().context("no command")?;
    let args: Vec<&str> = words.collect();
    let mut tool = Tool::start(name, &args)?;
    if name != "heapscan" {
        tool.wait_for_any(&["Ctrl-C to end", "probes in"])?;
        is_traced()?;
        return tool.interrupt();
    }
    tool.wait()
}

/// Returns the number of page faults of a process.
fn page_faults(pid: &str) -> Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(") ").context("no name")?;
    let fields: Vec<&str> = fields.split(' ').collect();
    let number =
        |at: usize| -> Result<u64> { Ok(fields.get(at).context("a short line")?.parse()?) };
    // Minor and major faults are fields 10 and 12 of proc_pid_stat(5), of which the name is field 2.
    Ok(number(7)? + number(9)?)
}

/// Follows memtriage's next command for a process. The command is to be this one, and its output has to contain the
/// cause.
fn expect_cause(pid: &str, command: &str, cause: &str) -> Result<()> {
    let next = next_of(pid, &format!("{command} -p {pid}"))?;
    let ended = follow(&next, || {
        let before = page_faults(pid)?;
        harness::eventually("the process goes on", || {
            Ok(page_faults(pid)? - before >= FAULTS)
        })?;
        // memleak leaves out what is younger than half a second.
        thread::sleep(TRACED);
        Ok(())
    })?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(ended.stdout.contains(cause), "no {cause}: {ended:?}");
    Ok(())
}

/// Runs a Python program that defines `work`, expects the cause as [`expect_cause`] does, and lets the program end.
fn python_has_cause(work: &str, command: &str, cause: &str) -> Result<()> {
    let mut program = python(work)?;
    expect_cause(&program.pid(), command, cause)?;
    program.work()?;
    ensure!(program.finish()?.success(), "it did not live on");
    Ok(())
}

fn memory_that_a_program_maps_has_its_function() -> Result<()> {
    let mut program = Workload::start("grow", &["13", "1009"])?;
    program.go()?;
    expect_cause(&program.pid(), "memleak", "take_more+")
}

fn a_cache_in_python_that_grows_has_its_function() -> Result<()> {
    python_has_cause(
        "
cache = {}
def remember(request):
    cache[request] = str(request) * 100
def work():
    for n in rounds():
        for request in range(211):
            remember((n, request))
",
        "memleak",
        "remember (",
    )
}

fn a_cache_in_python_at_rest_has_its_name() -> Result<()> {
    python_has_cause(
        "
cache = {n: 'x' * (1000 + n % 7) for n in range(50021)}
def work():
    sys.stdin.readline()
",
        "heapscan",
        "cache",
    )
}

fn shared_memory_that_grows_has_its_function() -> Result<()> {
    python_has_cause(
        "
SIZE = 1009 << 20
file = os.memfd_create('table')
os.ftruncate(file, SIZE)
table = mmap.mmap(file, SIZE)
def publish(n):
    table[n << 18:n + 1 << 18] = b'x' * (1 << 18)
def work():
    for n in rounds():
        publish(n)
",
        "faults --bytes",
        "publish",
    )
}

fn a_file_that_is_mapped_has_its_name() -> Result<()> {
    let folder = harness::scratch()?;
    let path = folder.path().join("memtools-atlas");
    let path = path.to_str().context("not UTF-8")?;
    std::fs::write(path, vec![1; 257 << 20])?;
    python_has_cause(
        &format!(
            "
file = open('{path}', 'rb')
atlas = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
def work():
    for n in rounds():
        atlas.madvise(mmap.MADV_DONTNEED)
        sum(atlas[n % 1000 << 18:(n % 1000) + 1 << 18:4096])
"
        ),
        "ffaults",
        "memtools-atlas",
    )
}

/// The cgroup of a program is too small for the file that the program reads.
fn a_cgroup_that_stalls_has_its_task() -> Result<()> {
    let disk = std::env::var("MEMTOOLS_DISK").context("no disk")?;
    let folder = tempfile::tempdir_in(disk)?;
    let file = folder.path().join("file").display().to_string();
    let group = Group::new("memtools-stalls-next", 32 << 20)?;
    let mut reader = Workload::start("reread", &[&file, "20011"])?;
    group.set("cgroup.procs", &reader.pid())?;
    reader.work()?;
    reader.go()?;
    let mut next = None;
    harness::eventually("the cgroup is found", || {
        let (objects, _) = triage_of(&[])?;
        let findings = of_type(&objects, "finding").into_iter();
        let mut of_limit = findings.filter(|finding| finding["rule"] == "cgroup-limit");
        let found = of_limit.find(|finding| finding["level"] == "act");
        next = found.and_then(|finding| Some(finding["next"].as_str()?.to_owned()));
        Ok(next.is_some())
    })?;
    let ended = follow(&next.context("no next command")?, || {
        thread::sleep(TRACED);
        Ok(())
    })?;
    let row = ended.stdout.lines().nth(1).context("no row")?;
    ensure!(row.starts_with("reread "), "{ended:?}");
    Ok(())
}
