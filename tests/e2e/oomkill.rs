//! oomkill against programs that the kernel kills, and against the kernel's log of that.

use std::fs;
use std::os::unix::process::ExitStatusExt;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use regex_lite::Regex;
use serde_json::Value;

use crate::harness::{self, Ended, Need, Tool, Workload, workload};
use crate::pressure::{Group, shell, vmstat};

pub(crate) fn tests() -> Vec<Trial> {
    let test = |name: &str, needs: &'static [Need], run: fn() -> Result<()>| {
        harness::test(&format!("oomkill::{name}"), needs, run)
    };
    vec![
        test("it_starts_and_ends", &[], it_starts_and_ends),
        test(
            "a_cgroups_kill_has_bccs_line",
            &[],
            a_cgroups_kill_has_bccs_line,
        ),
        test(
            "a_cgroups_kill_is_explained",
            &[Need::Guest],
            a_cgroups_kill_is_explained,
        ),
        test(
            "a_whole_cgroup_is_killed",
            &[Need::Guest],
            a_whole_cgroup_is_killed,
        ),
        test(
            "the_machines_kill_is_global",
            &[Need::Guest],
            the_machines_kill_is_global,
        ),
        test(
            "a_kill_can_be_asked_for",
            &[Need::Guest],
            a_kill_can_be_asked_for,
        ),
    ]
}

fn start(args: &[&str]) -> Result<Tool> {
    let mut tool = Tool::start("oomkill", args)?;
    tool.wait_for("tracing")?;
    Ok(tool)
}

/// Lets the hog write until it is killed.
fn kill(hog: &mut Workload) -> Result<()> {
    hog.go()?;
    ensure!(hog.done().is_err(), "the hog has survived");
    let status = hog.wait()?;
    ensure!(status.signal() == Some(9), "the hog ended with {status}");
    Ok(())
}

fn objects(ended: &Ended) -> Result<Vec<Value>> {
    ensure!(ended.status.success(), "{ended:?}");
    let objects = ended.stdout.lines().map(serde_json::from_str::<Value>);
    objects.collect::<Result<_, _>>().context("no JSON")
}

fn it_starts_and_ends() -> Result<()> {
    let ended = start(&["-p", "1", "-d", "0.1"])?.end()?;
    ensure!(
        ended.status.success() && ended.stdout.is_empty(),
        "{ended:?}"
    );
    Ok(())
}

/// Also where memory may not be used up: 64 MB are wanted where 8 MB are permitted.
fn a_cgroups_kill_has_bccs_line() -> Result<()> {
    let group = Group::new("memtools-oomkill", 8 << 20)?;
    group.forbid_swap()?;
    let mut hog = Workload::spawn(&mut group.command(&workload("hog"), &["64"]))?;
    let pid = hog.pid();
    let tool = start(&["-p", &pid])?;
    let how = tool.said().join("\n");
    kill(&mut hog)?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    let pages = if how.contains("mark_victim alone") {
        "-"
    } else {
        "2048"
    };
    let line = Regex::new(&format!(
        "^\\d\\d:\\d\\d:\\d\\d Triggered by PID {pid} \\(\"hog\"\\), OOM kill of PID {pid} \\(\"hog\"\\), \
         {pages} pages, loadavg: [\\d.]+ [\\d.]+ [\\d.]+ \\d+/\\d+ \\d+\n$"
    ))?;
    ensure!(line.is_match(&ended.stdout), "{ended:?}");
    Ok(())
}

/// The fields of the kernel's own line on a victim.
fn killed_by_the_log(pid: &str) -> Result<String> {
    let log = shell("dmesg")?;
    let line = log
        .lines()
        .rfind(|line| line.contains(&format!("Killed process {pid} ")));
    Ok(line
        .with_context(|| format!("no kill of {pid} in the log"))?
        .to_owned())
}

fn a_cgroups_kill_is_explained() -> Result<()> {
    let group = Group::new("memtools-oomkill", 8 << 20)?;
    group.forbid_swap()?;
    let mut hog = Workload::spawn(&mut group.command(&workload("hog"), &["64", "77"]))?;
    let pid = hog.pid();
    let before = vmstat("oom_kill")?;
    let tool = start(&["-j"])?;
    kill(&mut hog)?;
    let ended = tool.interrupt()?;
    ensure!(
        vmstat("oom_kill")? - before == 1,
        "not one kill by /proc/vmstat"
    );
    let objects = objects(&ended)?;
    ensure!(objects.len() == 1, "{ended:?}");
    let kill = &objects[0];
    ensure!(kill["type"] == "kill" && kill["kind"] == "memcg", "{kill}");
    ensure!(
        kill["pid"] == pid.parse::<u64>()? && kill["comm"] == "hog",
        "{kill}"
    );
    ensure!(kill["limit_cgroup"] == "/memtools-oomkill", "{kill}");
    ensure!(
        kill["limit_kb"] == 8192 && kill["total_pages"] == 2048,
        "{kill}"
    );
    ensure!(kill["order"] == 0, "{kill}");
    let gfp = kill["gfp_flags"].as_str().unwrap_or_default();
    let log = shell("dmesg")?;
    let invoked = log
        .lines()
        .rfind(|line| line.contains("invoked oom-killer:"));
    let invoked = invoked.context("no oom-killer in the log")?;
    for flag in gfp.split('|') {
        ensure!(invoked.contains(flag), "{gfp}, but {invoked}");
    }
    let victim = &kill["victim"];
    ensure!(
        victim["pid"] == pid.parse::<u64>()? && victim["comm"] == "hog",
        "{kill}"
    );
    ensure!(
        victim["uid"] == 0 && victim["oom_score_adj"] == 77,
        "{kill}"
    );
    ensure!(victim["cgroup"] == "/memtools-oomkill", "{kill}");
    // Exact, or but for what two CPUs have not added up yet: 32 pages each.
    let killed = killed_by_the_log(&pid)?;
    for (field, key, off_by) in [
        ("total_vm_kb", "total-vm:", 0),
        ("anon_kb", "anon-rss:", 256),
        ("file_kb", "file-rss:", 256),
        ("shmem_kb", "shmem-rss:", 256),
        ("page_tables_kb", "pgtables:", 0),
    ] {
        let (_, theirs) = killed.split_once(key).context("no such field")?;
        let theirs: u64 = theirs.split("kB").next().unwrap_or_default().parse()?;
        let ours = victim[field].as_u64().context("no such number")?;
        ensure!(
            ours.abs_diff(theirs) <= off_by,
            "{field}: {kill}, but {killed}"
        );
    }
    let kernel = kill["kernel_stack"].as_array().context("no stack")?;
    let has = |name: &str| kernel.iter().any(|frame| frame["symbol"] == name);
    ensure!(has("oom_kill_process") && has("out_of_memory"), "{kill}");
    // It was killed for its own sake, and its names are still known.
    ensure!(kill["user_stack"][0]["symbol"] == "write_pages", "{kill}");
    Ok(())
}

/// memory.oom.group: the others of the cgroup die with the victim.
fn a_whole_cgroup_is_killed() -> Result<()> {
    const OTHERS: usize = 3;
    let group = Group::new("memtools-oomkill", 16 << 20)?;
    group.forbid_swap()?;
    group.set("memory.oom.group", "1")?;
    let others = (0..OTHERS).map(|_| Workload::spawn(&mut group.command(&workload("hog"), &["1"])));
    let mut others: Vec<Workload> = others.collect::<Result<_>>()?;
    let mut hog = Workload::spawn(&mut group.command(&workload("hog"), &["64"]))?;
    let before = vmstat("oom_kill")?;
    let tool = start(&["-e"])?;
    kill(&mut hog)?;
    let mut expected = Vec::new();
    for other in &mut others {
        ensure!(
            other.wait()?.signal() == Some(9),
            "another one has survived"
        );
        expected.push(format!("    also killed: PID {} (\"hog\")", other.pid()));
    }
    let ended = tool.interrupt()?;
    let killed = vmstat("oom_kill")? - before;
    // The kernel counts the victim twice.
    ensure!(killed > OTHERS as u64, "{killed} kills by /proc/vmstat");
    let mut also: Vec<&str> = ended
        .stdout
        .lines()
        .filter(|line| line.contains("also"))
        .collect();
    also.sort_unstable();
    expected.sort_unstable();
    ensure!(also == expected, "{ended:?}");
    ensure!(
        ended.stdout.matches("Triggered by PID").count() == 1,
        "{ended:?}"
    );
    Ok(())
}

fn the_machines_kill_is_global() -> Result<()> {
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let total = meminfo.split_whitespace().nth(1).context("no MemTotal")?;
    let megabytes = total.parse::<u64>()? / 1024 + 50;
    let mut hog = Workload::start("hog", &[&megabytes.to_string(), "900"])?;
    let pid = hog.pid();
    let before = vmstat("oom_kill")?;
    let tool = start(&["-j"])?;
    kill(&mut hog)?;
    let ended = tool.interrupt()?;
    ensure!(
        vmstat("oom_kill")? - before == 1,
        "not one kill by /proc/vmstat"
    );
    let objects = objects(&ended)?;
    ensure!(objects.len() == 1, "{ended:?}");
    let kill = &objects[0];
    ensure!(
        kill["kind"] == "global" && kill["victim"]["pid"] == pid.parse::<u64>()?,
        "{kill}"
    );
    ensure!(
        kill["victim"]["oom_score_adj"] == 900 && kill["limit_cgroup"].is_null(),
        "{kill}"
    );
    let resident = kill["victim"]["anon_kb"].as_u64().unwrap_or(0) / 1024;
    ensure!(resident > megabytes / 2, "{resident} MB resident: {kill}");
    ensure!(
        kill["candidates"]
            .as_array()
            .is_some_and(|who| !who.is_empty()),
        "{kill}"
    );
    Ok(())
}

fn a_kill_can_be_asked_for() -> Result<()> {
    let mut hog = Workload::start("hog", &["1", "1000"])?;
    let pid = hog.pid();
    let tool = start(&["-j"])?;
    fs::write("/proc/sysrq-trigger", "f")?;
    ensure!(hog.wait()?.signal() == Some(9), "the hog was not killed");
    let ended = tool.interrupt()?;
    let objects = objects(&ended)?;
    ensure!(objects.len() == 1, "{ended:?}");
    let kill = &objects[0];
    ensure!(kill["kind"] == "sysrq" && kill["order"].is_null(), "{kill}");
    ensure!(kill["victim"]["pid"] == pid.parse::<u64>()?, "{kill}");
    Ok(())
}
