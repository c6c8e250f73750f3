//! memtriage: parts that add up, and findings that the machine is made to have.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::ptr;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::Value;

use crate::harness::{self, Ended, Tool, Workload, tool, workload};
use crate::pressure::{Group, Setting, Swap};
use crate::running;

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "memtriage":
        parts_and_the_rest_are_all_of_memory,
        little_is_unaccounted_for [Guest],
        a_cgroup_near_its_limit_is_found,
        a_kill_is_found,
        a_container_is_told_its_limit [Guest],
        shared_memory_that_nobody_has_is_found [Guest],
        a_file_without_a_name_is_found [Guest],
        without_privilege_it_shows_what_it_may,
        it_reports_as_often_as_asked [Once],
        what_grows_is_shown,
        who_grows_is_told_by_its_stacks [Guest],
        who_reclaims_is_told_by_its_stacks [Guest],
        what_cannot_be_asked_is_told,
        who_is_asked_until_a_signal_comes,
        numbers_are_those_of_free_and_slabtop [Once],
        shares_are_those_of_smem [Once],
        the_memory_of_a_process_is_in_its_parts,
        a_process_of_100_000_mappings_is_shown [Guest],
        a_large_one_of_thousands_of_processes_is_shown [Once],
        it_ends_with_the_process_that_it_looks_at,
        cgroups_are_told_by_size,
        code_that_allocates_is_told_where_the_kernel_tells,
        tools_that_can_run_are_told,
        tools_without_privilege_tell_what_is_missing [Once],
        tools_without_btf_or_tracefs_tell_what_is_missing [Once],
        tools_under_lockdown_tell_so [Once],
        tools_that_may_have_no_perf_events_tell_so,
    }
}

/// The objects that it prints, and the end that it has.
pub(crate) fn triage(args: &[&str]) -> Result<(Vec<Value>, Ended)> {
    triage_of(&[&["--all"], args].concat())
}

/// As [`triage`], of a process or a cgroup.
pub(crate) fn triage_of(args: &[&str]) -> Result<(Vec<Value>, Ended)> {
    let ended = harness::run("memtriage", &[&["-j"], args].concat())?;
    let lines = ended.stdout.lines();
    let objects = lines.map(serde_json::from_str).collect::<Result<_, _>>();
    Ok((objects.with_context(|| format!("{ended:?}"))?, ended))
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

/// The findings of a rule, with their evidence.
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

fn parts_and_the_rest_are_all_of_memory() -> Result<()> {
    let (objects, ended) = triage(&[])?;
    let table = accounting(&objects)?;
    let parts = table["parts"].as_array().context("no parts")?;
    let sum: i64 = parts.iter().filter_map(|part| part["bytes"].as_i64()).sum();
    let rest = table["unaccounted_bytes"].as_i64().context("no rest")?;
    ensure!(table["total_bytes"] == memory_total()?, "{table}");
    ensure!(table["total_bytes"] == sum + rest, "{table}");
    let to_look_at = of_type(&objects, "finding").into_iter();
    let healthy = to_look_at
        .clone()
        .all(|finding| finding["level"] == "healthy");
    ensure!(to_look_at.count() >= 18, "{ended:?}");
    let expected = if healthy { 0 } else { 3 };
    ensure!(ended.status.code() == Some(expected), "{ended:?}");
    Ok(())
}

/// Memory of several kinds is in its part, and 2 % at most in none.
fn little_is_unaccounted_for() -> Result<()> {
    const MIB: u64 = 1 << 20;
    let mut hog = Workload::start("hog", &["67"])?;
    hog.work()?;
    let file = tempfile::NamedTempFile::new_in("/dev/shm").context("no file in memory")?;
    let byte = [1; MIB as usize];
    for _ in 0..61 {
        file.as_file().write_all(&byte)?;
    }
    let (objects, _) = triage(&[])?;
    let table = accounting(&objects)?;
    ensure!(part(table, "anonymous")? >= 67 * MIB, "{table}");
    ensure!(part(table, "shmem and tmpfs")? >= 61 * MIB, "{table}");
    let rest = table["unaccounted_bytes"].as_i64().context("no rest")?;
    ensure!(rest.unsigned_abs() * 50 <= memory_total()?, "{table}");

    let pid: u32 = hog.pid().parse()?;
    let processes = of_type(&objects, "process");
    let hog = processes.iter().find(|row| row["pid"] == pid);
    let hog = hog.with_context(|| format!("no hog in {processes:?}"))?;
    // The kernel adds a process's pages up now and then: 64 of a thread before 6.2, 32 of a CPU since.
    let anon = hog["anon_bytes"].as_u64().unwrap_or_default();
    ensure!((66 * MIB..69 * MIB).contains(&anon), "{hog}");
    ensure!(hog["pss_bytes"].as_u64() >= Some(67 * MIB), "{hog}");
    Ok(())
}

/// A cgroup that uses most of its limit, which is a finding.
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
    let ours = near.iter().find(|finding| {
        let evidence = finding["evidence"].as_str().unwrap_or_default();
        evidence.starts_with("/memtools-triage uses 9") && evidence.contains("of its 32.0M")
    });
    ensure!(ours.is_some(), "{near:?}");
    ensure!(ended.status.code() == Some(3), "{ended:?}");
    Ok(())
}

/// A process that sees no cgroups but its own and those below, as in a container.
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
    let objects: Vec<Value> = stdout
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()
        .with_context(|| format!("{output:?}"))?;
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
    ensure!(kills[0]["next"] == "oomkill -e", "{kills:?}");
    // Another test's hog can be killed after ours.
    let evidence = kills[0]["evidence"].as_str().unwrap_or_default();
    let count = evidence
        .split(' ')
        .next()
        .and_then(|count| count.parse::<u32>().ok());
    ensure!(
        count >= Some(1) && evidence.contains("hog (pid "),
        "{evidence}"
    );
    ensure!(ended.status.code() == Some(3), "{ended:?}");
    Ok(())
}

/// A System V segment, removed when it is dropped.
struct Segment(i32);

impl Segment {
    /// A segment that was written to, and that nobody has attached any more.
    fn orphaned(bytes: usize) -> Result<Self> {
        // SAFETY: a new segment of that size, which no other code knows the address of.
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

/// Memory in a file that no folder has and no process has mapped: this one has it open.
fn a_file_without_a_name_is_found() -> Result<()> {
    let file = memfd_create("memtools-cache", MFdFlags::MFD_CLOEXEC).context("no file")?;
    let mut file = fs::File::from(file);
    // A third of memory, beside what else there is of the kind.
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

/// A process that takes memory between two looks, and keeps it.
fn what_grows_is_shown() -> Result<()> {
    const PAGES: u64 = 20_011;
    let mut workload = Workload::start("minor", &[&PAGES.to_string()])?;
    let mut tool = Tool::start("memtriage", &["-j", "--watch", "0.3"])?;
    for round in 0..4 {
        tool.wait_for_output("\"type\":\"accounting\"")?;
        if round == 1 {
            workload.work()?;
        }
    }
    let ended = tool.interrupt()?;
    let objects: Vec<Value> = ended
        .stdout
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
    let growing = of_type(&objects, "growing").into_iter();
    let pid: u32 = workload.pid().parse()?;
    let own = growing.filter(|row| row["pid"] == pid);
    let grown = own.filter_map(|row| row["growth_bytes"].as_u64()).max();
    // The kernel adds a thread's pages up after 64 of them at most.
    let apart = grown.context("it did not grow")?.abs_diff(PAGES * 4096);
    ensure!(apart < 2 * 64 * 4096, "{grown:?}: {ended:?}");
    Ok(())
}

/// The answer of --who for a rule.
pub(crate) fn answer<'a>(objects: &'a [Value], rule: &str) -> Result<&'a Value> {
    let mut answers = of_type(objects, "who").into_iter();
    let is_for = |answer: &&Value| {
        let rules = answer["rules"].as_array();
        rules.is_some_and(|rules| rules.iter().any(|other| other == rule))
    };
    let answer = answers.find(is_for);
    answer.with_context(|| format!("no answer for {rule}: {objects:#?}"))
}

/// The sum of a tool's stacks, whose largest has this function in it.
pub(crate) fn sum_by(answer: &Value, function: &str) -> Result<u64> {
    ensure!(answer["error"].is_null(), "{answer}");
    let stacks = answer["stacks"].as_array().context("no stacks")?;
    ensure!((1..=3).contains(&stacks.len()), "{answer}");
    let frames = stacks[0]["frames"].as_array().context("no frames")?;
    ensure!(frames.iter().any(|frame| frame == function), "{answer}");
    let shown: u64 = stacks
        .iter()
        .filter_map(|stack| stack["value"].as_u64())
        .sum();
    let sum = answer["sum"].as_u64().context("no sum")?;
    ensure!(0 < shown && shown <= sum, "{answer}");
    Ok(sum)
}

/// From "memory runs out" to the function that takes it, in one command.
fn who_grows_is_told_by_its_stacks() -> Result<()> {
    const MOST: u64 = 499;
    let mut grow = Workload::start("grow", &["23", &MOST.to_string()])?;
    grow.go()?;
    let (objects, ended) = triage(&["--who", "2"])?;
    let answer = answer(&objects, "growing").with_context(|| format!("{ended:?}"))?;
    let rules = answer["rules"].as_array().context("no rules")?;
    ensure!(
        rules.iter().any(|rule| rule == "running-out"),
        "{objects:#?}"
    );
    let command = format!("faults --bytes -p {} -d 2", grow.pid());
    ensure!(answer["command"] == command, "{answer}");
    ensure!(answer["unit"] == "bytes", "{answer}");
    let bytes = sum_by(answer, "take_more")?;
    ensure!(bytes < MOST << 20, "{answer}");
    ensure!(ended.status.code() == Some(3), "{ended:?}");
    Ok(())
}

/// From "a cgroup is at its limit" to the code that waits for it.
fn who_reclaims_is_told_by_its_stacks() -> Result<()> {
    let _swap = Swap::on("128M")?;
    let group = Group::new("memtools-triage-who", 16 << 20)?;
    let mut thrash =
        Workload::spawn(&mut group.command(&workload("thrash"), &["6007", "1000003"]))?;
    thrash.go()?;
    let (objects, ended) = triage(&["--who", "2"])?;
    let answer = answer(&objects, "cgroup-limit").with_context(|| format!("{ended:?}"))?;
    ensure!(
        answer["command"] == "drsnoop --memcg --stack -d 2",
        "{answer}"
    );
    ensure!(answer["unit"] == "nanoseconds", "{answer}");
    sum_by(answer, "write_pages")?;
    Ok(())
}

/// memtriage without the other tools.
fn what_cannot_be_asked_is_told() -> Result<()> {
    let _full = full_group("memtools-triage-alone")?;
    let folder = harness::scratch()?;
    let alone = folder.path().join("memtriage-mt");
    harness::copy(&tool("memtriage"), &alone)?;
    let output = Command::new(&alone).args(["--who", "60"]).output()?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    ensure!(stdout.contains("\nwho   "), "{output:?}");
    ensure!(
        stdout.contains("      there is no faults beside memtriage, in /"),
        "{output:?}"
    );
    ensure!(output.status.code() == Some(3), "{output:?}");
    Ok(())
}

fn who_is_asked_until_a_signal_comes() -> Result<()> {
    let _full = full_group("memtools-triage-signal")?;
    let mut tool = Tool::start("memtriage", &["-j", "--who", "86400"])?;
    tool.wait_for("Ctrl-C to end")?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.code() == Some(3), "{ended:?}");
    ensure!(ended.stdout.contains("{\"type\":\"who\","), "{ended:?}");
    Ok(())
}

/// What another program prints, which has to succeed.
fn printed(program: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(program).args(args).output();
    let output = output.with_context(|| format!("no {program}"))?;
    ensure!(output.status.success(), "{output:?}");
    Ok(String::from_utf8(output.stdout)?)
}

/// Both numbers are the same but for what has changed on this machine meanwhile.
fn expect_near(what: &str, ours: u64, theirs: u64, slack: u64) -> Result<()> {
    let apart = ours.abs_diff(theirs);
    ensure!(apart <= slack, "{what}: {ours}, but {theirs}");
    Ok(())
}

fn numbers_are_those_of_free_and_slabtop() -> Result<()> {
    // Other tests' programs come and go meanwhile.
    let slack = memory_total()? / 20;
    let free = printed("free", &["-b", "-w"])?;
    let (objects, _) = triage(&["--by", "slab", "-T", "3"])?;
    let line = free.lines().find_map(|line| line.strip_prefix("Mem:"));
    let line = line.context("no memory")?.split_ascii_whitespace();
    let numbers: Vec<u64> = line.map(str::parse).collect::<Result<_, _>>()?;
    let [total, _, free, shared, buffers, cache, _] = numbers[..] else {
        bail!("{numbers:?}");
    };
    let table = accounting(&objects)?;
    ensure!(table["total_bytes"] == total, "{table} {total}");
    let ours = |names: &[&str]| -> Result<u64> { names.iter().map(|name| part(table, name)).sum() };
    expect_near("free", ours(&["free"])?, free, slack)?;
    expect_near("shared", ours(&["shmem and tmpfs"])?, shared, slack)?;
    let cached = ours(&["file cache", "shmem and tmpfs", "slab, reclaimable"])?;
    expect_near("buffers and cache", cached, buffers + cache, slack)?;

    let slabtop = printed("slabtop", &["-o"])?;
    let holders = of_type(&objects, "holder");
    ensure!(holders.len() == 3, "{objects:?}");
    for holder in holders {
        let name = holder["name"].as_str().context("no name")?;
        let row = slabtop
            .lines()
            .map(|line| line.split_ascii_whitespace().collect::<Vec<_>>())
            .find(|fields| fields.last() == Some(&name));
        let row = row.with_context(|| format!("no {name} in {slabtop}"))?;
        let kilobytes = row[row.len() - 2].strip_suffix('K').context("no size")?;
        let theirs = kilobytes.parse::<u64>()? << 10;
        let ours = holder["bytes"].as_u64().context("no bytes")?;
        expect_near(name, ours, theirs, theirs / 50 + (1 << 20))?;
    }
    Ok(())
}

fn shares_are_those_of_smem() -> Result<()> {
    let mut hog = Workload::start("hog", &["997"])?;
    hog.work()?;
    let (objects, _) = triage(&["-T", "20"])?;
    let smem = printed("smem", &["-H", "-c", "pid pss"])?;
    let pid = hog.pid();
    let theirs = smem.lines().find_map(|line| {
        let (row, kilobytes) = line.trim().split_once(' ')?;
        (row == pid).then(|| kilobytes.trim().parse::<u64>())
    });
    let theirs = theirs.with_context(|| format!("no {pid} in {smem}"))?? << 10;
    let pid: u32 = pid.parse()?;
    let mut processes = of_type(&objects, "process").into_iter();
    let ours = processes.find(|row| row["pid"] == pid);
    let ours = ours.and_then(|row| row["pss_bytes"].as_u64());
    // Others map and unmap the same libraries.
    expect_near("share", ours.context("no share")?, theirs, 1 << 20)
}

fn the_memory_of_a_process_is_in_its_parts() -> Result<()> {
    const MIB: u64 = 1 << 20;
    let mut hog = Workload::start("hog", &["67"])?;
    hog.work()?;
    let (objects, ended) = triage_of(&["-p", &hog.pid()])?;
    let table = accounting(&objects)?;
    let pid: u32 = hog.pid().parse()?;
    ensure!(table["pid"] == pid, "{table}");
    let anonymous = part(table, "anonymous mappings")?;
    ensure!((67 * MIB..68 * MIB).contains(&anonymous), "{table}");
    ensure!(part(table, "stacks")? > 0, "{table}");
    ensure!(part(table, "files, read only")? > 0, "{table}");
    ensure!(part(table, "page tables")? >= 67 * MIB / 512, "{table}");
    let rest = table["unaccounted_bytes"].as_i64().context("no rest")?;
    // The kernel adds a process's pages up now and then.
    ensure!(rest.unsigned_abs() <= MIB, "{table}");
    let rows = of_type(&objects, "process");
    ensure!(rows.len() == 1 && rows[0]["comm"] == "hog", "{rows:?}");
    ensure!(ended.status.code() == Some(0), "{ended:?}");
    Ok(())
}

/// Checks that this process, which has written to so many megabytes, is among the ten largest. Its share of memory is
/// missing where the time for that is up.
fn expect_among_the_largest(process: &Workload, megabytes: u64) -> Result<()> {
    let (objects, ended) = triage(&["--top", "10"])?;
    let pid = process.pid().parse::<u32>()?;
    let rows = of_type(&objects, "process");
    let row = rows.iter().find(|row| row["pid"] == pid);
    let row = row.with_context(|| format!("not there: {ended:?}"))?;
    let own = (megabytes - 1) << 20..(megabytes + 2) << 20;
    let (anon, pss) = (row["anon_bytes"].as_u64(), row["pss_bytes"].as_u64());
    ensure!(anon.is_some_and(|anon| own.contains(&anon)), "{row}");
    ensure!(pss.is_none_or(|pss| own.contains(&pss)), "{row}");
    Ok(())
}

fn a_process_of_100_000_mappings_is_shown() -> Result<()> {
    let _most = Setting::change("/proc/sys/vm/max_map_count", "262144")?;
    let mut mapped = Workload::start("cause", &["vmas", "397", "0"])?;
    mapped.work()?;
    let maps = fs::read_to_string(format!("/proc/{}/maps", mapped.pid()))?;
    ensure!(maps.lines().count() > 100_000);
    expect_among_the_largest(&mapped, 397)?;
    let (objects, _) = triage_of(&["-p", &mapped.pid()])?;
    let anonymous = part(accounting(&objects)?, "anonymous mappings")?;
    ensure!((397 << 20..398 << 20).contains(&anonymous), "{objects:?}");
    Ok(())
}

fn a_large_one_of_thousands_of_processes_is_shown() -> Result<()> {
    let mut hog = Workload::start("hog", &["1009"])?;
    hog.work()?;
    let mut crowd = Workload::start("hostile-crowd", &["processes", "5003", "1"])?;
    crowd.work()?;
    expect_among_the_largest(&hog, 1009)
}

fn it_ends_with_the_process_that_it_looks_at() -> Result<()> {
    let hog = Workload::start("hog", &["3"])?;
    let mut tool = Tool::start("memtriage", &["-j", "-p", &hog.pid(), "0.1"])?;
    tool.wait_for_output("\"type\":\"process\"")?;
    drop(hog);
    let ended = tool.end()?;
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
    // A CPU charges 64 pages ahead.
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

/// The rows of --doctor, by tool, and its end.
pub(crate) fn doctor(command: &mut Command) -> Result<(Vec<Value>, ExitStatus)> {
    let output = command.args(["-j", "--doctor"]).output()?;
    let lines = String::from_utf8(output.stdout)?;
    let rows: Vec<Value> = lines.lines().map(harness::object).collect::<Result<_>>()?;
    ensure!(rows.len() == 12, "{lines} {:?}", output.stderr);
    Ok((rows, output.status))
}

/// Each tool is said to run that does, when it is started by itself.
fn tools_that_can_run_are_told() -> Result<()> {
    let (rows, status) = doctor(&mut Command::new(tool("memtriage")))?;
    let program = format!("{} --version", tool("vmscan").display());
    let mut all = true;
    for row in &rows {
        let command = row["command"].as_str().context("no command")?;
        let options = match command {
            "memleak" => vec!["-c", &program, "0.1", "1"],
            "memleak -k" => vec!["-k", "0.1", "1"],
            _ => vec!["-d", "0.1"],
        };
        let name = command.split(' ').next().unwrap_or_default();
        let runs = harness::run(name, &options)?.status.success();
        ensure!(row["works"] == runs, "{row}");
        ensure!(row["how"].is_null() != runs, "{row}");
        let reasons = row["remarks"].as_array().context("no remarks")?;
        ensure!(runs || !reasons.is_empty(), "{row}");
        all &= runs;
    }
    // Where kprobes are not built in, swapin can do nothing, and says by what it could.
    let swapin = &rows[9];
    let has_kprobes = fs::exists("/sys/kernel/debug/kprobes")? || harness::in_guest();
    ensure!(
        swapin["command"] == "swapin" && swapin["works"] == has_kprobes,
        "{swapin}"
    );
    if !has_kprobes {
        let reason = "kprobe: this kernel is built without kprobes (CONFIG_KPROBES)";
        ensure!(swapin["not_possible"][0] == reason, "{swapin}");
    }
    ensure!(status.code() == Some(if all { 0 } else { 3 }), "{status}");
    Ok(())
}

fn tools_without_privilege_tell_what_is_missing() -> Result<()> {
    let folder = harness::scratch()?;
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
    let alone = folder.path().join("memtriage");
    harness::copy(&tool("memtriage"), &alone)?;
    for name in ["memleak", "vmscan"] {
        harness::copy(&tool(name), &folder.path().join(name))?;
    }
    let (rows, status) = doctor(Command::new(&alone).uid(65534).gid(65534))?;
    for row in &rows {
        let name = row["command"].as_str().context("no command")?;
        let expected = match name {
            "memleak" | "memleak -k" | "vmscan" => "run it as root".to_owned(),
            _ => format!("there is no {name} beside memtriage, in /"),
        };
        let remarks = row["remarks"].as_array().context("no remarks")?;
        let mut remarks = remarks.iter().filter_map(Value::as_str);
        ensure!(remarks.any(|remark| remark.contains(&expected)), "{row}");
        ensure!(row["works"] == false && row["how"].is_null(), "{row}");
    }
    ensure!(status.code() == Some(3), "{status}");
    Ok(())
}

/// Has a command run where a file system without files hides each of these.
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

/// Nothing can run without BTF, and all that can run does without tracefs.
fn tools_without_btf_or_tracefs_tell_what_is_missing() -> Result<()> {
    let (with_all, _) = doctor(&mut Command::new(tool("memtriage")))?;
    let mut command = Command::new(tool("memtriage"));
    without(&mut command, &["/sys/kernel/tracing", "/sys/kernel/debug"]);
    let (rows, _) = doctor(&mut command)?;
    for (row, with_all) in rows.iter().zip(&with_all) {
        ensure!(row["works"] == with_all["works"], "{row}, else {with_all}");
    }

    let mut command = Command::new(tool("memtriage"));
    without(&mut command, &["/sys/kernel/btf"]);
    let (rows, status) = doctor(&mut command)?;
    for row in &rows {
        let remark = row["remarks"][0].as_str().unwrap_or_default();
        ensure!(row["works"] == false, "{row}");
        ensure!(remark.contains("CONFIG_DEBUG_INFO_BTF=y"), "{row}");
    }
    ensure!(status.code() == Some(3), "{status}");
    Ok(())
}

/// Has a command run where the kernel says that it is locked down so far. What it forbids then is not played: the tools ask
/// the kernel before they try.
fn locked_down(command: &mut Command, state: &str) -> Result<tempfile::TempDir> {
    let folder = harness::scratch()?;
    fs::write(folder.path().join("lockdown"), state)?;
    let from = folder.path().to_owned();
    // SAFETY: system calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            unshare(CloneFlags::CLONE_NEWNS)?;
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
            let (security, bind) = ("/sys/kernel/security", MsFlags::MS_BIND);
            Ok(mount(Some(&from), security, none, bind, none)?)
        });
    }
    Ok(folder)
}

/// Nothing can run under "confidentiality", and all that can run does under "integrity".
fn tools_under_lockdown_tell_so() -> Result<()> {
    let (with_all, _) = doctor(&mut Command::new(tool("memtriage")))?;
    let mut command = Command::new(tool("memtriage"));
    let _folder = locked_down(&mut command, "none [integrity] confidentiality\n")?;
    let (rows, _) = doctor(&mut command)?;
    for (row, with_all) in rows.iter().zip(&with_all) {
        ensure!(row["works"] == with_all["works"], "{row}, else {with_all}");
    }

    let mut command = Command::new(tool("memtriage"));
    let _folder = locked_down(&mut command, "none integrity [confidentiality]\n")?;
    let (rows, status) = doctor(&mut command)?;
    for row in &rows {
        let remark = row["remarks"][0].as_str().unwrap_or_default();
        ensure!(row["works"] == false, "{row}");
        ensure!(remark.contains("boot with lockdown=integrity"), "{row}");
    }
    ensure!(status.code() == Some(3), "{status}");
    Ok(())
}

/// Debian's and Ubuntu's kernels forbid perf events to whoever is without CAP_SYS_ADMIN, if they are told to.
fn tools_that_may_have_no_perf_events_tell_so() -> Result<()> {
    let _forbids = Setting::change("/proc/sys/kernel/perf_event_paranoid", "4")?;
    let folder = harness::scratch()?;
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
    for name in ["memtriage", "faults", "vmscan"] {
        harness::copy(&tool(name), &folder.path().join(name))?;
    }
    let mut capabilities =
        ",+bpf,+perfmon,+ipc_lock,+dac_read_search,+sys_ptrace,+syslog".to_owned();
    // 5.10 wants one more, which not every machine may give away.
    if harness::release().starts_with("5.10.") {
        capabilities.push_str(",+sys_resource");
    }
    let program = folder.path().join("memtriage");
    let (rows, _) = doctor(&mut running::by_nobody(&capabilities, &program))?;
    let of = |name: &str| rows.iter().find(|row| row["command"] == name);
    let (faults, vmscan) = (
        of("faults").context("no row")?,
        of("vmscan").context("no row")?,
    );
    let remedy = "sysctl kernel.perf_event_paranoid=2";
    // A kernel without their change of it takes 4 for 2.
    let told = faults["remarks"].to_string().contains(remedy);
    ensure!(faults["works"] == true || told, "{faults}");
    ensure!(vmscan["works"] == true, "{vmscan}");
    Ok(())
}
