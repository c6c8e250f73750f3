//! memtriage on machines with one trouble each, of which the cause is known: the first finding names it, and --who
//! the code.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::harness::{self, Workload, eventually, workload};
use crate::memtriage::who::{answer, sum_by};
use crate::memtriage::{memory_total, of_type, part, triage, triage_of};
use crate::pressure::{Balloon, Group, Setting, Swap, folder_on_disk, meminfo_kb, vmstat};

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "causes":
        an_idle_machine_is_healthy [Guest],
        a_busy_machine_is_healthy [Guest],
        slabs_that_grow [Guest],
        page_tables_of_a_process [Guest],
        a_file_in_memory_that_grows [Guest],
        huge_pages_that_nobody_uses [Guest],
        a_vmalloc_area_that_grows [Guest],
        pages_that_no_counter_has [Guest],
        a_file_larger_than_its_cache [Guest, Disk],
        a_file_larger_than_memory [Guest, Disk],
        a_process_that_leaks [Guest],
        a_process_larger_than_its_memory [Guest],
        a_process_larger_than_its_memory_with_zswap [Guest, Zswap],
        pages_that_are_copied_after_a_fork [Guest],
        segments_that_nobody_has [Guest],
        a_file_without_a_name_that_grows [Guest],
        huge_pages_of_zeros [Guest],
        cgroups_that_are_removed_and_stay [Guest],
    }
}

/// What is wrong now, the worst first: without what other tests have left, the OOM kills of the last hour and
/// the pressure of the last ten seconds.
fn wrong(objects: &[Value]) -> Vec<&Value> {
    let past = |finding: &&Value| {
        ["oom-kills", "pressure"]
            .iter()
            .any(|rule| finding["rule"] == *rule)
    };
    let findings = of_type(objects, "finding").into_iter();
    findings
        .filter(|finding| finding["level"] != "healthy" && !past(finding))
        .collect()
}

/// The finding of this rule, which is the first, with its evidence.
fn foremost<'a>(objects: &'a [Value], rule: &str) -> Result<(&'a Value, &'a str)> {
    foremost_of(&wrong(objects), rule)
}

/// The finding of this rule, which is the first of these, with its evidence.
fn foremost_of<'a>(findings: &[&'a Value], rule: &str) -> Result<(&'a Value, &'a str)> {
    let first = *findings.first().context("nothing is found")?;
    ensure!(first["rule"] == rule, "{findings:#?}");
    Ok((first, first["evidence"].as_str().context("no evidence")?))
}

/// The finding of this rule, which is the first but for one: that of what the test itself has made scarce, which is as
/// bad on a machine that reads slowly.
fn foremost_beside<'a>(
    objects: &'a [Value],
    made: &str,
    rule: &str,
) -> Result<(&'a Value, &'a str)> {
    let mut others = wrong(objects);
    others.retain(|finding| finding["rule"] != made);
    foremost_of(&others, rule)
}

/// The finding of this rule, which is the first, and of this level.
fn first<'a>(objects: &'a [Value], rule: &str, level: &str) -> Result<&'a Value> {
    let (first, _) = foremost(objects, rule)?;
    ensure!(first["level"] == level, "{first}");
    Ok(first)
}

/// 2 % of memory at most are in no part.
fn expect_all_accounted_for(objects: &[Value]) -> Result<()> {
    let table = of_type(objects, "accounting")[0];
    let rest = table["unaccounted_bytes"].as_i64().context("no rest")?;
    ensure!(rest.unsigned_abs() * 50 <= memory_total()?, "{table}");
    Ok(())
}

fn megabytes(percent: u64) -> Result<u64> {
    Ok((memory_total()? * percent / 100) >> 20)
}

/// A process that has taken this part of memory and, when it is let go on, takes more of it: a megabyte every
/// tenth of a second.
fn cause(kind: &str, percent: u64, more: &str, file: &[&str]) -> Result<Workload> {
    let first = megabytes(percent)?.to_string();
    let mut workload = Workload::start("cause", &[&[kind, &first, more], file].concat())?;
    workload.work()?;
    Ok(workload)
}

fn an_idle_machine_is_healthy() -> Result<()> {
    let (objects, _) = triage(&[])?;
    let wrong = wrong(&objects);
    ensure!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

/// Programs that start and end, files that are read, and memory that comes and goes.
fn a_busy_machine_is_healthy() -> Result<()> {
    let script = "while :; do cat /proc/*/maps | sort | md5sum; done >/dev/null 2>&1";
    let mut busy = Command::new("sh").args(["-c", script]).spawn()?;
    let looked = (0..7).try_for_each(|_| {
        let (objects, _) = triage(&[])?;
        let wrong = wrong(&objects);
        ensure!(wrong.is_empty(), "{wrong:#?}");
        Ok(())
    });
    busy.kill()?;
    busy.wait()?;
    looked
}

/// What --who finds while more is taken: one answer, for all that is found.
fn who_takes_more(cause: &mut Workload) -> Result<Value> {
    cause.go()?;
    let (objects, _) = triage(&["--who", "3"])?;
    let answers: Vec<&Value> = of_type(&objects, "who")
        .into_iter()
        .filter(|answer| answer["rules"] != json!(["pressure"]))
        .collect();
    ensure!(answers.len() == 1, "{objects:#?}");
    ensure!(answers[0]["stacks"][0]["comm"] == "kernel", "{objects:#?}");
    Ok(answers[0].clone())
}

/// What --who finds of a cause that has this part of memory, after the first finding was worth a look, by this rule.
fn found_and_asked(kind: &str, percent: u64, rule: &str) -> Result<Value> {
    let mut cause = cause(kind, percent, "97", &[])?;
    let (objects, _) = triage(&[])?;
    first(&objects, rule, "look")?;
    if rule != "unaccounted" {
        expect_all_accounted_for(&objects)?;
    }
    who_takes_more(&mut cause)
}

/// Whether the largest stack has such a frame.
fn has_frame(answer: &Value, is_one: impl Fn(&str) -> bool) -> bool {
    let frames = answer["stacks"][0]["frames"].as_array();
    let mut frames = frames.into_iter().flatten().filter_map(Value::as_str);
    frames.any(is_one)
}

fn slabs_that_grow() -> Result<()> {
    let mut cause = cause("slabs", 17, "97", &[])?;
    let (objects, _) = triage(&[])?;
    let finding = first(&objects, "slab", "look")?;
    let evidence = finding["evidence"].as_str().unwrap_or_default();
    ensure!(evidence.contains("; largest cache: kmalloc-"), "{evidence}");
    expect_all_accounted_for(&objects)?;
    let answer = who_takes_more(&mut cause)?;
    sum_by(&answer, "unix_stream_sendmsg_[k]")?;
    Ok(())
}

fn page_tables_of_a_process() -> Result<()> {
    let mut cause = cause("tables", 7, "997", &[])?;
    let (objects, _) = triage(&[])?;
    let finding = first(&objects, "page-tables", "look")?;
    expect_all_accounted_for(&objects)?;
    sum_by(&who_takes_more(&mut cause)?, "__pte_alloc_[k]")?;
    ensure!(finding["next"] == "faults --by-process -d 10", "{finding}");
    let ended = harness::run("faults", &["--by-process", "-j", "-d", "2"])?;
    let counts = ended.stdout.lines().map(serde_json::from_str::<Value>);
    let counts = counts.collect::<Result<Vec<_>, _>>()?;
    let most = counts.iter().max_by_key(|row| row["faults"].as_u64());
    ensure!(most.is_some_and(|row| row["comm"] == "cause"), "{ended:?}");
    Ok(())
}

fn a_file_in_memory_that_grows() -> Result<()> {
    const FILE: &str = "/dev/shm/memtools-cause";
    let mut cause = cause("tmpfs", 26, "97", &[FILE])?;
    let looked = triage(&[]).and_then(|looked| Ok((looked.0, who_takes_more(&mut cause)?)));
    drop(cause);
    fs::remove_file(FILE)?;
    let (objects, answer) = looked?;
    let finding = first(&objects, "shmem", "look")?;
    expect_all_accounted_for(&objects)?;
    let evidence = finding["evidence"].as_str().unwrap_or_default();
    ensure!(
        evidence.contains("; fullest tmpfs: /dev/shm, "),
        "{evidence}"
    );
    ensure!(
        has_frame(&answer, |frame| frame.starts_with("shmem_")),
        "{answer}"
    );
    Ok(())
}

fn huge_pages_that_nobody_uses() -> Result<()> {
    let pages = (megabytes(23)? / 2).to_string();
    let _pool = Setting::change("/proc/sys/vm/nr_hugepages", &pages)?;
    let (objects, _) = triage(&[])?;
    let finding = first(&objects, "huge-page-pool", "act")?;
    ensure!(finding["next"] == "hfaults -e -d 60", "{finding}");
    expect_all_accounted_for(&objects)
}

fn a_vmalloc_area_that_grows() -> Result<()> {
    let answer = found_and_asked("maps", 13, "vmalloc")?;
    sum_by(&answer, "array_map_alloc_[k]")?;
    Ok(())
}

fn pages_that_no_counter_has() -> Result<()> {
    let answer = found_and_asked("pipes", 7, "unaccounted")?;
    // Newer kernels call the function anon_pipe_write.
    ensure!(
        has_frame(&answer, |frame| frame.ends_with("pipe_write_[k]")),
        "{answer}"
    );
    Ok(())
}

/// A program that reads a file in a cgroup that is too small for it: the limit is the cause, and what was
/// dropped and is read again is what comes of it.
fn a_file_larger_than_its_cache() -> Result<()> {
    const NAME: &str = "memtools-reread";
    let folder = folder_on_disk()?;
    let file = folder.path().join("file").display().to_string();
    let group = Group::new(NAME, 32 << 20)?;
    let mut reader = Workload::start("reread", &[&file, "20011"])?;
    group.set("cgroup.procs", &reader.pid())?;
    reader.work()?;
    reader.go()?;
    let (objects, _) = triage(&["--who", "3"])?;
    let finding = first(&objects, "cgroup-limit", "act")?;
    let evidence = finding["evidence"].as_str().unwrap_or_default();
    ensure!(
        evidence.starts_with(&format!("/{NAME} uses ")),
        "{evidence}"
    );
    ensure!(finding["next"] == "drsnoop --memcg -e -d 10", "{finding}");
    let refaults = wrong(&objects)
        .into_iter()
        .find(|finding| finding["rule"] == "refaults")
        .context("no refaults")?;
    let evidence = refaults["evidence"].as_str().unwrap_or_default();
    ensure!(evidence.contains("by a cgroup's limit"), "{evidence}");
    let reclaimers = answer(&objects, "cgroup-limit")?;
    ensure!(
        reclaimers["command"] == "drsnoop --memcg --stack -d 3",
        "{reclaimers}"
    );
    ensure!(reclaimers["stacks"][0]["comm"] == "reread", "{reclaimers}");
    sum_by(reclaimers, "reread")?;
    Ok(())
}

/// A program that reads a file for which the machine has not enough memory: nobody faults, as it is by read(2).
fn a_file_larger_than_memory() -> Result<()> {
    let folder = folder_on_disk()?;
    let file = folder.path().join("file").display().to_string();
    let mut reader = Workload::start("reread", &[&file, "50021"])?;
    let mut balloons = vec![Balloon::leaving(150 << 10)?];
    reader.work()?;
    reader.go()?;
    leave_no_room(&reader, &mut balloons)?;
    let (objects, _) = triage(&[])?;
    let (finding, evidence) = foremost_beside(&objects, "running-out", "refaults")?;
    let by = format!("; most by read(2), of reread (pid {}), ", reader.pid());
    ensure!(evidence.contains(&by), "{evidence}");
    ensure!(finding["next"] == "vmscan -k -d 10", "{finding}");
    expect_all_accounted_for(&objects)
}

/// Takes memory until a quarter of what this process reads was dropped lately, for three seconds: in a single one it may
/// have been dropped for the balloon. (What is read again the kernel keeps longer, so that it is not all.)
///
/// What the kernel calls available is without its reserves, of which it may give a part: on 7.2 a file of 195 MB had
/// room in 150.
fn leave_no_room(reader: &Workload, balloons: &mut Vec<Balloon>) -> Result<()> {
    /// Less than this, and the guest does not go on: its programs are files in memory.
    const LEAST_KB: u64 = 64 << 10;
    let io = format!("/proc/{}/io", reader.pid());
    let read_pages = || -> Result<u64> {
        let text = fs::read_to_string(&io)?;
        let bytes = text.lines().find_map(|line| line.strip_prefix("rchar: "));
        Ok(bytes.context("no bytes")?.parse::<u64>()? / 4096)
    };
    let mut seconds = 0;
    eventually("the file has no room", || {
        let (read, refaults) = (read_pages()?, vmstat("workingset_refault_file")?);
        thread::sleep(Duration::from_secs(1));
        let refaults = vmstat("workingset_refault_file")? - refaults;
        // A machine of which others take the CPUs reads little in a second: the share counts.
        if refaults * 4 > read_pages()? - read && refaults > 1000 {
            seconds += 1;
        } else {
            seconds = 0;
            let available = meminfo_kb("MemAvailable")?;
            ensure!(
                available >= LEAST_KB,
                "{refaults} refaults with {available} kB"
            );
            balloons.push(Balloon::of(16 << 10)?);
        }
        Ok(seconds == 3)
    })
}

/// From "memory runs out" to the function that takes it, by the command of the first finding.
fn a_process_that_leaks() -> Result<()> {
    let mut grow = Workload::start("grow", &["23", "997"])?;
    grow.go()?;
    let (objects, _) = triage(&[])?;
    let (finding, evidence) = foremost(&objects, "running-out")?;
    let pid = grow.pid();
    ensure!(
        evidence.contains(&format!("; grow (pid {pid}) grows by ")),
        "{evidence}"
    );
    ensure!(
        finding["next"] == format!("memleak -p {pid} 10"),
        "{finding}"
    );
    let ended = harness::run("memleak", &["-p", &pid, "2", "1"])?;
    ensure!(ended.stdout.contains("take_more"), "{ended:?}");
    Ok(())
}

/// A storm of swap: a process writes to more pages than it may have in memory, again and again.
fn a_process_larger_than_its_memory() -> Result<()> {
    storm_of_swap().map(drop)
}

fn a_process_larger_than_its_memory_with_zswap() -> Result<()> {
    let _zswap = Setting::zswap()?;
    let before = vmstat("zswpout")?;
    let objects = storm_of_swap()?;
    let table = of_type(&objects, "accounting")[0];
    // The pages are nearly empty: of 4096 bytes zswap keeps some 80.
    ensure!(part(table, "zswap and zram")? > 256 << 10, "{table}");
    ensure!(vmstat("zswpout")? - before > 10_007);
    Ok(())
}

/// What is printed of a machine on which a process's pages go to swap and come back. A cgroup has the limit: where the
/// whole machine has too little, a guest does not go on, as its programs are files in memory that go to swap, too.
fn storm_of_swap() -> Result<Vec<Value>> {
    let _swap = Swap::on("256M")?;
    let group = Group::new("memtools-storm", 64 << 20)?;
    let mut thrash = group.command(&workload("thrash"), &["30011", "1000003"]);
    let mut thrash = Workload::spawn(&mut thrash)?;
    let read_back =
        || -> Result<u64> { Ok(vmstat("pswpin")? + vmstat("zswpin").unwrap_or_default()) };
    let before = read_back()?;
    thrash.go()?;
    eventually("pages are read back", || Ok(read_back()? > before + 10_007))?;
    let (objects, _) = triage(&["--who", "3"])?;
    let (finding, evidence) = foremost_beside(&objects, "cgroup-limit", "swap-in")?;
    let by = format!("; most by thrash (pid {}), ", thrash.pid());
    ensure!(evidence.contains(&by), "{evidence}");
    ensure!(finding["next"] == "swapin -s -d 10", "{finding}");
    expect_all_accounted_for(&objects)?;
    sum_by(answer(&objects, "swap-in")?, "write_pages")?;
    let ended = harness::run("swapin", &["-s", "-j", "-d", "2"])?;
    ensure!(ended.stdout.contains("\"comm\":\"thrash\""), "{ended:?}");
    Ok(objects)
}

fn pages_that_are_copied_after_a_fork() -> Result<()> {
    let mut cause = Workload::start("cause", &["copies", "1", "251"])?;
    // Room for all the copies; with twice the pages and room, a guest of 7.2 has less than that to begin with.
    let _balloon = Balloon::leaving(350 << 10)?;
    cause.work()?;
    cause.go()?;
    let (objects, _) = triage(&["--who", "3"])?;
    let (finding, evidence) = foremost(&objects, "running-out")?;
    let pid = cause.pid();
    let by =
        format!(", but no process: cause (pid {pid}) writes to pages that it shares since a fork");
    ensure!(evidence.ends_with(&by), "{evidence}");
    ensure!(
        finding["next"] == format!("faults --bytes -p {pid} -d 10"),
        "{finding}"
    );
    sum_by(answer(&objects, "running-out")?, "take_copies")?;
    Ok(())
}

/// System V segments that stay, removed when this is dropped: those that a process has made.
struct Segments(String);

impl Drop for Segments {
    fn drop(&mut self) {
        let segments = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
        for line in segments.lines() {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            if fields.get(4) == Some(&self.0.as_str())
                && let Some(id) = fields.get(1).and_then(|id| id.parse().ok())
            {
                // SAFETY: only the number is used.
                unsafe { libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()) };
            }
        }
    }
}

fn segments_that_nobody_has() -> Result<()> {
    let mut cause = cause("shm", 5, "97", &[])?;
    let _segments = Segments(cause.pid());
    let (objects, _) = triage(&[])?;
    let finding = first(&objects, "orphaned-shm", "look")?;
    let evidence = finding["evidence"].as_str().unwrap_or_default();
    let by = format!(", made by pid {}, 1.0M", cause.pid());
    ensure!(evidence.ends_with(&by), "{evidence}");
    ensure!(finding["next"] == "shmsnoop -e -d 60", "{finding}");
    expect_all_accounted_for(&objects)?;
    cause.go()?;
    let ended = harness::run("shmsnoop", &["-j", "-e", "-d", "2"])?;
    let made = format!("\"pid\":{},", cause.pid());
    let made = ended
        .stdout
        .lines()
        .filter(|line| line.contains("\"call\":\"shmget\"") && line.contains(&made));
    ensure!(made.count() > 0, "{ended:?}");
    Ok(())
}

fn a_file_without_a_name_that_grows() -> Result<()> {
    let mut cause = cause("memfd", 26, "97", &[])?;
    let (objects, _) = triage(&[])?;
    let finding = first(&objects, "shmem", "look")?;
    ensure!(finding["next"] == "memleak -k --pages 10", "{finding}");
    let evidence = finding["evidence"].as_str().unwrap_or_default();
    let by = format!(
        "memfd:cause, {}M, open in pid {}",
        megabytes(26)?,
        cause.pid()
    );
    ensure!(evidence.contains(&by), "{evidence}");
    expect_all_accounted_for(&objects)?;
    let answer = who_takes_more(&mut cause)?;
    ensure!(
        has_frame(&answer, |frame| frame.starts_with("shmem_")),
        "{answer}"
    );
    Ok(())
}

/// Huge pages with a byte each, which the process asks for.
fn huge_pages_of_zeros() -> Result<()> {
    let mut cause = cause("huge", 16, "97", &[])?;
    let pid = cause.pid();
    // A busy machine may not have read a huge page in time.
    let mut objects = Vec::new();
    eventually("huge pages are read in time", || {
        (objects, _) = triage(&[])?;
        Ok(!wrong(&objects).is_empty())
    })?;
    let (finding, evidence) = foremost(&objects, "huge-page-zeros")?;
    let has = format!("cause (pid {pid}) has ");
    let zeros = " in transparent huge pages, of which 99.8 % have only zeros: ";
    ensure!(
        evidence.starts_with(&has) && evidence.contains(zeros),
        "{evidence}"
    );
    ensure!(
        finding["next"] == format!("hfaults --thp -p {pid} -d 10"),
        "{finding}"
    );
    expect_all_accounted_for(&objects)?;
    cause.go()?;
    let ended = harness::run("hfaults", &["--thp", "-p", &pid, "-d", "2"])?;
    let row = format!("@[{pid}, cause, huge page]: ");
    ensure!(ended.stdout.contains(&row), "{ended:?}");
    Ok(())
}

fn cgroups_that_are_removed_and_stay() -> Result<()> {
    const COUNT: u64 = 1009;
    const NAME: &str = "memtools-removed";
    let group = Group::new(NAME, 1 << 30)?;
    group.set("cgroup.subtree_control", "+memory")?;
    let path = group.path();
    // One more would be removed when it is let go on.
    let args = ["cgroups", &COUNT.to_string(), "1", &path];
    let mut cause = Workload::start("cause", &args)?;
    cause.work()?;
    let (objects, _) = triage(&[])?;
    let finding = first(&objects, "dying-cgroups", "look")?;
    let evidence = finding["evidence"].as_str().unwrap_or_default();
    // Other tests may have left some, too.
    let expected =
        format!(" removed cgroups still hold memory; {COUNT} of them were below /{NAME}");
    ensure!(evidence.ends_with(&expected), "{evidence}");
    ensure!(
        finding["next"] == format!("memtriage --cgroup {path}"),
        "{finding}"
    );
    let (objects, _) = triage_of(&["--cgroup", &path])?;
    let table = of_type(&objects, "accounting")[0];
    let total = table["total_bytes"].as_u64().context("no total")?;
    ensure!(total >= COUNT * 4096, "{table}");
    if harness::release().starts_with("5.10") {
        // The kernel adds up 32 pages of a kind, CPU and cgroup at a time: of each cgroup it has not counted its one.
        return Ok(());
    }
    ensure!(part(table, "shmem and tmpfs")? >= COUNT * 4096, "{table}");
    let rest = table["unaccounted_bytes"].as_i64().context("no rest")?;
    // A CPU keeps charges for 64 pages ahead.
    ensure!(rest.unsigned_abs() <= total / 50 + (2 << 20), "{table}");
    Ok(())
}
