//! memtriage on machines with one problem each, of which the cause is known. The first finding names the cause,
//! and --who names the code.

mod read_again;

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::harness::{self, Workload, eventually};
use crate::memtriage::who::{answer, sum_by};
use crate::memtriage::{memory_total, of_type, part, triage, triage_of};
use crate::pressure::{Balloon, Group, Setting};

pub(crate) fn tests() -> Vec<Trial> {
    let own = harness::tests! { "causes":
        an_idle_machine_is_healthy [Guest],
        a_busy_machine_is_healthy [Guest],
        slabs_that_grow [Guest],
        page_tables_of_a_process [Guest],
        a_file_in_memory_that_grows [Guest],
        huge_pages_that_nobody_uses [Guest],
        a_vmalloc_area_that_grows [Guest],
        pages_that_no_counter_has [Guest],
        a_process_that_leaks [Guest],
        pages_that_are_copied_after_a_fork [Guest],
        segments_that_nobody_has [Guest],
        a_file_without_a_name_that_grows [Guest],
        huge_pages_of_zeros [Guest],
        cgroups_that_are_removed_and_stay [Guest],
    };
    own.into_iter().chain(read_again::tests()).collect()
}

/// Returns the current findings, worst first. OOM kills of the last hour and pressure of the last ten seconds are
/// omitted, because other tests cause them.
fn current_findings(objects: &[Value]) -> Vec<&Value> {
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

/// Returns the first finding, which must be of this rule, and its evidence.
fn foremost<'a>(objects: &'a [Value], rule: &str) -> Result<(&'a Value, &'a str)> {
    foremost_of(&current_findings(objects), rule)
}

/// Returns the first of `findings`, which must be of this rule, and its evidence.
fn foremost_of<'a>(findings: &[&'a Value], rule: &str) -> Result<(&'a Value, &'a str)> {
    let first = *findings.first().context("nothing is found")?;
    ensure!(first["rule"] == rule, "{findings:#?}");
    Ok((first, first["evidence"].as_str().context("no evidence")?))
}

/// Returns the first finding, which must be of the rule `rule`, and its evidence. Findings of the rule `made` are
/// omitted: the test itself causes that shortage, which is as bad on a machine that reads slowly.
fn foremost_beside<'a>(
    objects: &'a [Value],
    made: &str,
    rule: &str,
) -> Result<(&'a Value, &'a str)> {
    let mut others = current_findings(objects);
    others.retain(|finding| finding["rule"] != made);
    foremost_of(&others, rule)
}

/// Returns the first finding, which must be of this rule and this level.
fn first<'a>(objects: &'a [Value], rule: &str, level: &str) -> Result<&'a Value> {
    let (first, _) = foremost(objects, rule)?;
    ensure!(first["level"] == level, "{first}");
    Ok(first)
}

/// Checks that at most 2 % of memory belong to no part of the table.
fn expect_all_accounted_for(objects: &[Value]) -> Result<()> {
    let table = of_type(objects, "accounting")[0];
    let rest = table["unaccounted_bytes"].as_i64().context("no rest")?;
    ensure!(rest.unsigned_abs() * 50 <= memory_total()?, "{table}");
    Ok(())
}

fn megabytes(percent: u64) -> Result<u64> {
    Ok((memory_total()? * percent / 100) >> 20)
}

/// Starts a process that takes `percent` of the memory. When the process may go on, it takes a megabyte more
/// every tenth of a second.
fn cause(kind: &str, percent: u64, more: &str, file: &[&str]) -> Result<Workload> {
    let first = megabytes(percent)?.to_string();
    let mut workload = Workload::start("cause", &[&[kind, &first, more], file].concat())?;
    workload.work()?;
    Ok(workload)
}

fn an_idle_machine_is_healthy() -> Result<()> {
    let (objects, _) = triage(&[])?;
    let wrong = current_findings(&objects);
    ensure!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

/// Programs start and end, files are read, and memory is allocated and freed.
fn a_busy_machine_is_healthy() -> Result<()> {
    let script = "while :; do cat /proc/*/maps | sort | md5sum; done >/dev/null 2>&1";
    let mut busy = Command::new("sh").args(["-c", script]).spawn()?;
    let looked = (0..7).try_for_each(|_| {
        let (objects, _) = triage(&[])?;
        let wrong = current_findings(&objects);
        ensure!(wrong.is_empty(), "{wrong:#?}");
        Ok(())
    });
    busy.kill()?;
    busy.wait()?;
    looked
}

/// Returns the one answer of --who, for all findings, while the workload takes more memory.
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

/// Returns the answer of --who for a workload that holds `percent` of the memory. Before that, the first finding
/// must be of this rule, at the level `look`.
fn found_and_asked(kind: &str, percent: u64, rule: &str) -> Result<Value> {
    let mut cause = cause(kind, percent, "97", &[])?;
    let (objects, _) = triage(&[])?;
    first(&objects, rule, "look")?;
    if rule != "unaccounted" {
        expect_all_accounted_for(&objects)?;
    }
    who_takes_more(&mut cause)
}

/// Whether a frame of the largest stack satisfies `is_one`.
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
    let counts = ended.objects()?;
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
    // On newer kernels the function is named anon_pipe_write.
    ensure!(
        has_frame(&answer, |frame| frame.ends_with("pipe_write_[k]")),
        "{answer}"
    );
    Ok(())
}

/// From the finding "memory runs out" to the function that takes the memory, by the command that the first
/// finding names.
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

fn pages_that_are_copied_after_a_fork() -> Result<()> {
    let mut cause = Workload::start("cause", &["copies", "1", "251"])?;
    // All the copies fit into the memory that is left. With twice the pages and twice the memory, a guest of 7.2
    // has less than that to begin with.
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

/// Guard that removes System V segments when it is dropped: those that the process with this PID has created.
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
    ensure!(finding["next"] == "memleak -k=pages 10", "{finding}");
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

/// The process asks for huge pages, and writes one byte to each.
fn huge_pages_of_zeros() -> Result<()> {
    let mut cause = cause("huge", 16, "97", &[])?;
    let pid = cause.pid();
    // memtriage may not have read a huge page in time on a busy machine.
    let mut objects = Vec::new();
    eventually("huge pages are read in time", || {
        (objects, _) = triage(&[])?;
        Ok(!current_findings(&objects).is_empty())
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
    // The workload would remove one more cgroup when it is let go on.
    let args = ["cgroups", &COUNT.to_string(), "1", &path];
    let mut cause = Workload::start("cause", &args)?;
    cause.work()?;
    let (objects, _) = triage(&[])?;
    let finding = first(&objects, "dying-cgroups", "look")?;
    let evidence = finding["evidence"].as_str().unwrap_or_default();
    // Other tests may have left removed cgroups, too.
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
        // The kernel adds up 32 pages per counter, CPU and cgroup at a time, so it has not yet counted the single
        // page of each cgroup.
        return Ok(());
    }
    ensure!(part(table, "shmem and tmpfs")? >= COUNT * 4096, "{table}");
    let rest = table["unaccounted_bytes"].as_i64().context("no rest")?;
    // A CPU holds charges for up to 64 pages in advance.
    ensure!(rest.unsigned_abs() <= total / 50 + (2 << 20), "{table}");
    Ok(())
}
