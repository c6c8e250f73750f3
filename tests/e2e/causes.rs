//! memtriage on machines with one trouble each, of which the cause is known: the first finding names it, and --who
//! the code.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::harness::{self, Workload};
use crate::memtriage::{memory_total, of_type, sum_by, triage};
use crate::pressure::{Group, Setting, folder_on_disk};

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

/// The finding of this rule, which is the first.
fn first<'a>(objects: &'a [Value], rule: &str, level: &str) -> Result<&'a Value> {
    let wrong = wrong(objects);
    let first = *wrong.first().context("nothing is found")?;
    ensure!(
        first["rule"] == rule && first["level"] == level,
        "{wrong:#?}"
    );
    Ok(first)
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
    let answer = who_takes_more(&mut cause)?;
    sum_by(&answer, "unix_stream_sendmsg_[k]")?;
    Ok(())
}

fn page_tables_of_a_process() -> Result<()> {
    let answer = found_and_asked("tables", 7, "page-tables")?;
    sum_by(&answer, "__pte_alloc_[k]")?;
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
    Ok(())
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
    let mut answers = of_type(&objects, "who").into_iter();
    let answer = answers
        .find(|answer| answer["command"] == "drsnoop --memcg --stack -d 3")
        .context("no answer")?;
    ensure!(answer["stacks"][0]["comm"] == "reread", "{answer}");
    sum_by(answer, "reread")?;
    Ok(())
}
