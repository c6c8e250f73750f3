//! memtriage: tables whose parts add up, and findings that the machine is made to have.

pub(crate) mod doctor;
mod numbers;
pub(crate) mod who;

use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::ptr;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::Value;

use crate::harness::{self, Tool, ToolOutput, Workload, tool, workload};
use crate::pressure::Group;

pub(crate) fn tests() -> Vec<Trial> {
    let own = harness::tests! { "memtriage":
        a_cgroup_near_its_limit_is_found,
        a_kill_is_found,
        a_container_is_told_its_limit [Guest],
        shared_memory_that_nobody_has_is_found [Guest],
        a_file_without_a_name_is_found [Guest],
        without_privilege_it_shows_what_it_may,
        it_reports_as_often_as_asked [Once],
        what_grows_is_shown,
        a_process_that_grows_is_judged [Once],
        it_ends_with_the_process_that_it_looks_at,
        cgroups_are_told_by_size,
        code_that_allocates_is_told_where_the_kernel_tells,
    };
    [own, doctor::tests(), numbers::tests(), who::tests()]
        .into_iter()
        .flatten()
        .collect()
}

/// Runs memtriage with --all. Returns the objects that it prints, and its output and exit status.
pub(crate) fn triage(args: &[&str]) -> Result<(Vec<Value>, ToolOutput)> {
    triage_of(&[&["--all"], args].concat())
}

/// Runs memtriage on a process or a cgroup. Returns the same as [`triage`].
pub(crate) fn triage_of(args: &[&str]) -> Result<(Vec<Value>, ToolOutput)> {
    let ended = harness::run("memtriage", &[&["-j"], args].concat())?;
    Ok((objects_of(&ended.stdout)?, ended))
}

/// Parses the objects that memtriage has printed. Each has the time of the object `host` before it.
fn objects_of(stdout: &str) -> Result<Vec<Value>> {
    let object = |line| serde_json::from_str(line).with_context(|| format!("no JSON: {line}"));
    stdout.lines().map(object).collect()
}

pub(crate) fn of_type<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    let all = objects.iter().filter(|object| object["type"] == kind);
    all.collect()
}

fn accounting(objects: &[Value]) -> Result<&Value> {
    let tables = of_type(objects, "accounting");
    ensure!(tables.len() == 1, "{tables:?}");
    Ok(tables[0])
}

pub(crate) fn part(accounting: &Value, name: &str) -> Result<u64> {
    let parts = accounting["parts"].as_array().context("no parts")?;
    let part = parts.iter().find(|part| part["name"] == name);
    let bytes = part.and_then(|part| part["bytes"].as_u64());
    bytes.with_context(|| format!("no part {name} in {accounting}"))
}

/// Returns the findings of a rule.
fn findings<'a>(objects: &'a [Value], rule: &str) -> Vec<&'a Value> {
    let findings = of_type(objects, "finding").into_iter();
    findings.filter(|finding| finding["rule"] == rule).collect()
}

pub(crate) fn memory_total() -> Result<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let total = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"));
    let kilobytes = total.and_then(|total| total.trim().strip_suffix(" kB"));
    Ok(kilobytes.context("no total")?.parse::<u64>()? << 10)
}

/// Makes a cgroup that uses most of its limit, which memtriage must find.
fn full_group(name: &str) -> Result<(Workload, Group)> {
    let group = Group::new(name, 32 << 20)?;
    group.forbid_swap()?;
    let mut hog = Workload::spawn(&mut group.command(&workload("hog"), &["31"]))?;
    hog.work()?;
    Ok((hog, group))
}

fn a_cgroup_near_its_limit_is_found() -> Result<()> {
    let _full = full_group("memtools-triage")?;
    let (objects, ended) = triage(&[])?;
    let near = findings(&objects, "cgroup-limit");
    let ours = near.iter().any(|finding| {
        let evidence = finding["evidence"].as_str().unwrap_or_default();
        let use_of_limit = evidence.strip_prefix("/memtools-triage uses ");
        let percent = use_of_limit.and_then(|rest| rest.split_once(" % of its 32.0M"));
        percent.is_some_and(|(percent, _)| matches!(percent.parse(), Ok(90..=100)))
    });
    ensure!(ours, "{near:?}");
    ensure!(ended.status.code() == Some(3), "{ended:?}");
    Ok(())
}

/// memtriage sees no cgroups but its own and those below, as in a container.
fn a_container_is_told_its_limit() -> Result<()> {
    let group = Group::new("memtools-triage-container", 64 << 20)?;
    group.forbid_swap()?;
    let mut hog = Workload::spawn(&mut group.command(&workload("hog"), &["59"]))?;
    hog.work()?;
    let procs = PathBuf::from(group.path()).join("cgroup.procs");
    let mut command = Command::new(tool("memtriage"));
    // SAFETY: system calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            let none = None::<&str>;
            fs::write(&procs, "0")?;
            unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWCGROUP)?;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
            umount2("/sys/fs/cgroup", MntFlags::MNT_DETACH)?;
            let cgroup2 = Some("cgroup2");
            mount(none, "/sys/fs/cgroup", cgroup2, MsFlags::empty(), none)?;
            Ok(())
        });
    }
    let output = command.args(["-j"]).output()?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    let objects = objects_of(&stdout)?;
    let host = of_type(&objects, "host");
    ensure!(host[0]["limit_bytes"] == 64 << 20, "{host:?}");
    ensure!(host[0]["memory_bytes"] == memory_total()?, "{host:?}");
    let near = findings(&objects, "cgroup-limit");
    let evidence = near.first().and_then(|near| near["evidence"].as_str());
    let ours = evidence.is_some_and(|evidence| evidence.starts_with("/ uses 9"));
    ensure!(ours, "{near:?}");
    Ok(())
}

fn a_kill_is_found() -> Result<()> {
    let group = Group::new("memtools-triage-kill", 8 << 20)?;
    group.forbid_swap()?;
    let mut hog = Workload::spawn(&mut group.command(&workload("hog"), &["64", "77"]))?;
    hog.go()?;
    hog.wait()?;
    let (objects, ended) = triage(&[])?;
    let kills = findings(&objects, "oom-kills");
    ensure!(kills.len() == 1 && kills[0]["level"] == "act", "{kills:?}");
    let text = |field: &str| kills[0][field].as_str().unwrap_or_default().to_owned();
    let (evidence, next) = (text("evidence"), text("next"));
    let count = evidence.split(' ').next().map(str::parse::<u32>);
    ensure!(matches!(count, Some(Ok(1..))), "{evidence}");
    ensure!(evidence.contains("hog (pid "), "{evidence}");
    // Another test's process may be killed after this one.
    let is_ours = evidence.ends_with("; /memtools-triage-kill was at its limit");
    let cgroup = format!("memtriage --cgroup {}", group.path());
    ensure!(!is_ours || next == cgroup, "{evidence}: {next}");
    ensure!(evidence.ends_with(" was at its limit"), "{evidence}");
    ensure!(ended.status.code() == Some(3), "{ended:?}");
    Ok(())
}

/// System V segment that is removed when this is dropped.
struct Segment(i32);

impl Segment {
    /// Makes a segment that was written to, and that no process has attached any more.
    fn orphaned(bytes: usize) -> Result<Self> {
        // SAFETY: the segment is new and has this size, and no other code knows its address.
        unsafe {
            let id = libc::shmget(libc::IPC_PRIVATE, bytes, libc::IPC_CREAT | 0o600);
            ensure!(id >= 0, "no segment: {}", std::io::Error::last_os_error());
            let segment = Self(id);
            let at = libc::shmat(id, ptr::null(), 0);
            ensure!(at.addr() != usize::MAX, "not attached");
            ptr::write_bytes(at.cast::<u8>(), 1, bytes);
            ensure!(libc::shmdt(at) == 0, "not detached");
            Ok(segment)
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: only the number is used.
        unsafe { libc::shmctl(self.0, libc::IPC_RMID, ptr::null_mut()) };
    }
}

fn shared_memory_that_nobody_has_is_found() -> Result<()> {
    let bytes = usize::try_from(memory_total()? / 40)?;
    let _segment = Segment::orphaned(bytes)?;
    let (objects, _) = triage(&[])?;
    let orphans = findings(&objects, "orphaned-shm");
    ensure!(
        orphans.len() == 1 && orphans[0]["level"] == "look",
        "{orphans:?}"
    );
    ensure!(orphans[0]["next"] == "shmsnoop -e -d 60", "{orphans:?}");
    Ok(())
}

/// The memory belongs to a file that is in no directory, and that no process has mapped. This process has it open.
fn a_file_without_a_name_is_found() -> Result<()> {
    let file = memfd_create("memtools-cache", MFdFlags::MFD_CLOEXEC).context("no file")?;
    let mut file = fs::File::from(file);
    // A third of memory, in addition to other memory of the kind.
    let megabytes = memory_total()? / (3 << 20);
    for _ in 0..megabytes {
        file.write_all(&[1; 1 << 20])?;
    }
    let (objects, _) = triage(&[])?;
    let shmem = findings(&objects, "shmem");
    let evidence = shmem[0]["evidence"].as_str().context("no evidence")?;
    let expected = format!(
        "largest file without a name: memfd:memtools-cache, {megabytes}M, open in pid {}",
        std::process::id()
    );
    ensure!(evidence.contains(&expected), "{evidence}");
    ensure!(shmem[0]["level"] != "healthy", "{shmem:?}");
    Ok(())
}

fn without_privilege_it_shows_what_it_may() -> Result<()> {
    let output = Command::new(tool("memtriage"))
        .args(["--all"])
        .uid(65534)
        .gid(65534)
        .output()
        .context("it does not start")?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    ensure!(matches!(output.status.code(), Some(0 | 3)), "{output:?}");
    ensure!(output.stderr.is_empty(), "{output:?}");
    ensure!(stdout.contains("\nMemTotal "), "{stdout}");
    ensure!(stdout.contains("OOM kills since the start"), "{stdout}");
    Ok(())
}

fn it_reports_as_often_as_asked() -> Result<()> {
    let (objects, _) = triage(&["0.1", "3"])?;
    ensure!(of_type(&objects, "host").len() == 3, "{objects:?}");
    ensure!(of_type(&objects, "accounting").len() == 3, "{objects:?}");
    Ok(())
}

/// Runs memtriage for four looks. The workload works after the second.
fn looks_around_work(workload: &mut Workload, args: &[&str]) -> Result<ToolOutput> {
    let mut tool = Tool::start("memtriage", &[&["-j"], args, &["0.3"]].concat())?;
    for round in 0..4 {
        tool.wait_for_output("\"type\":\"accounting\"")?;
        if round == 1 {
            workload.work()?;
        }
    }
    tool.interrupt()
}

/// A process takes memory between two looks, and keeps it.
fn what_grows_is_shown() -> Result<()> {
    const PAGES: u64 = 20_011;
    let mut workload = Workload::start("minor", &[&PAGES.to_string()])?;
    let ended = looks_around_work(&mut workload, &["--watch"])?;
    let objects = objects_of(&ended.stdout)?;
    let growing = of_type(&objects, "growing").into_iter();
    let pid: u32 = workload.pid().parse()?;
    let own = growing.filter(|row| row["pid"] == pid);
    let grown = own.filter_map(|row| row["growth_bytes"].as_u64()).max();
    // The kernel adds up a thread's pages after at most 64 of them.
    let apart = grown.context("it did not grow")?.abs_diff(PAGES * 4096);
    ensure!(apart < 2 * 64 * 4096, "{grown:?}: {ended:?}");
    Ok(())
}

/// A process at rest that then takes 80 MB is judged by each of its states, with the command that fits it.
fn a_process_that_grows_is_judged() -> Result<()> {
    const PAGES: u64 = 20_011;
    let mut workload = Workload::start("minor", &[&PAGES.to_string()])?;
    let pid = workload.pid();
    let ended = looks_around_work(&mut workload, &["-p", &pid])?;
    let objects = objects_of(&ended.stdout)?;
    let judged = findings(&objects, "tendency");
    let (first, growing) = judged.split_first().context("no finding")?;
    let evidence = |finding: &Value| finding["evidence"].as_str().unwrap_or_default().to_owned();
    ensure!(
        evidence(first).starts_with("does not grow now; "),
        "{first}"
    );
    let next = format!("memleak -p {pid} 10");
    let most = growing.iter().find(|finding| finding["next"] == *next);
    let most = most.with_context(|| format!("it did not grow: {judged:?}"))?;
    ensure!(
        evidence(most).contains("/s, most of it anonymous mappings; "),
        "{most}"
    );
    ensure!(most["level"] != "healthy", "{most}");
    ensure!(ended.status.code() == Some(3), "{ended:?}");
    Ok(())
}

fn it_ends_with_the_process_that_it_looks_at() -> Result<()> {
    let hog = Workload::start("hog", &["3"])?;
    let mut tool = Tool::start("memtriage", &["-j", "-p", &hog.pid(), "0.1"])?;
    tool.wait_for_output("\"type\":\"process\"")?;
    drop(hog);
    let ended = tool.wait()?;
    ensure!(ended.status.code() == Some(0), "{ended:?}");
    ensure!(ended.stderr.is_empty(), "{ended:?}");
    Ok(())
}

fn cgroups_are_told_by_size() -> Result<()> {
    const NAME: &str = "memtools-triage-size";
    let _full = full_group(NAME)?;
    let (objects, _) = triage(&["--by", "cgroup", "-T", "1000"])?;
    let mut holders = of_type(&objects, "holder").into_iter();
    let ours = holders.find(|holder| holder["name"] == format!("/{NAME}"));
    let ours = ours.with_context(|| format!("{objects:?}"))?;
    let bytes = ours["bytes"].as_u64().context("no bytes")?;
    ensure!((31 << 20..=32 << 20).contains(&bytes), "{ours}");

    let (objects, _) = triage_of(&["--cgroup", NAME])?;
    let table = accounting(&objects)?;
    let anonymous = part(table, "anonymous")?;
    ensure!((30 << 20..=32 << 20).contains(&anonymous), "{table}");
    let rest = table["unaccounted_bytes"].as_i64().context("no rest")?;
    // A CPU charges 64 pages in advance.
    ensure!(rest.unsigned_abs() <= 1 << 20, "{table}");
    Ok(())
}

fn code_that_allocates_is_told_where_the_kernel_tells() -> Result<()> {
    let ended = harness::run("memtriage", &["-j", "--by", "code"])?;
    if fs::read("/proc/allocinfo").is_ok() {
        ensure!(ended.stdout.contains("\"what\":\"code\""), "{ended:?}");
        return Ok(());
    }
    let reason = "CONFIG_MEM_ALLOC_PROFILING";
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    ensure!(ended.stderr.contains(reason), "{ended:?}");
    Ok(())
}

/// Makes a command run in a mount namespace in which empty file systems hide these directories.
fn without(command: &mut Command, hidden: &[&'static str]) {
    let hidden = hidden.to_owned();
    // SAFETY: system calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            unshare(CloneFlags::CLONE_NEWNS)?;
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
            for path in &hidden {
                mount(none, *path, Some("tmpfs"), MsFlags::empty(), none)?;
            }
            Ok(())
        });
    }
}
