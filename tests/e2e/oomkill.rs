//! oomkill against programs that the kernel kills, and against the kernel's log of these kills.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;
use regex_lite::Regex;
use serde_json::Value;

use crate::harness::{self, Tool, ToolOutput, Workload, workload};
use crate::pressure::{Balloon, Group, Setting, shell, vmstat};

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests!("oomkill":
        it_starts_and_ends,
        a_cgroups_kill_has_bccs_line,
        by_kprobe_it_is_the_same [Kprobes],
        a_peer_sees_the_same [Kprobes, Peers],
        what_mark_victim_alone_knows,
        it_outlives_a_lack_of_memory,
        victims_are_chosen_too [Guest],
        a_cgroups_kill_is_explained [Guest],
        stacks_of_victims_are_complete [Guest],
        a_whole_cgroup_is_killed [Guest],
        the_machines_kill_is_global [Guest],
        it_outlives_the_kills_on_a_small_machine [Guest],
        a_kill_can_be_asked_for [Guest],
    )
}

fn start(args: &[&str]) -> Result<Tool> {
    let mut tool = Tool::start("oomkill", args)?;
    tool.wait_for_stderr("tracing")?;
    Ok(tool)
}

/// Lets the hog write until the kernel kills it.
pub(crate) fn kill(hog: &mut Workload) -> Result<()> {
    hog.go()?;
    ensure!(hog.done().is_err(), "the hog has survived");
    let status = hog.wait()?;
    ensure!(status.signal() == Some(9), "the hog ended with {status}");
    Ok(())
}

fn objects(ended: &ToolOutput) -> Result<Vec<Value>> {
    let mut objects = ended.objects()?;
    objects.retain(|object| object["type"] != "unwinding");
    Ok(objects)
}

fn it_starts_and_ends() -> Result<()> {
    let ended = start(&["-p", "1", "-d", "0.1"])?.wait()?;
    ensure!(
        ended.status.success() && ended.stdout.is_empty(),
        "{ended:?}"
    );
    Ok(())
}

fn it_outlives_a_lack_of_memory() -> Result<()> {
    harness::expect_protected_from_oom(start(&["-e"])?)
}

/// A process is killed because another one allocates.
fn victims_are_chosen_too() -> Result<()> {
    let group = Group::new("memtools-victim", 24 << 20)?;
    group.forbid_swap()?;
    let spawn = |args: &[&str]| Workload::spawn(&mut group.command(&workload("hog"), args));
    for choice in ["-p", "-n", "--cgroup"] {
        let mut victim = spawn(&["8", "1000"])?;
        let mut hog = Workload::spawn(&mut group.command(&workload("minor"), &["8009"]))?;
        let (pid, path) = (victim.pid(), group.path());
        let value = match choice {
            "-p" => pid.as_str(),
            "-n" => "hog",
            _ => path.as_str(),
        };
        let tool = start(&["-j", choice, value])?;
        victim.work()?;
        hog.go()?;
        ensure!(
            victim.wait()?.signal() == Some(9),
            "the victim has survived"
        );
        // The other process may be killed next, as the last one that is left.
        let _ = hog.wait()?;
        let ended = tool.interrupt()?;
        let objects = objects(&ended)?;
        let of_victim = objects
            .iter()
            .filter(|kill| kill["victim"]["pid"].as_u64() == pid.parse().ok());
        ensure!(of_victim.count() == 1, "{choice}: {ended:?}");
        let others = objects.len() - 1;
        ensure!(choice == "--cgroup" || others == 0, "{choice}: {ended:?}");
    }
    Ok(())
}

/// Traces a hog that is killed because it wants 64 MB where 8 MB are permitted, also where memory may not be used
/// up. Returns the hog's PID, and what the tool printed of it.
fn traced_kill(way: Option<&str>, args: &[&str]) -> Result<(String, ToolOutput)> {
    // Another test may do the same at this time, by another way.
    let name = way.unwrap_or("the best way").replace(' ', "-");
    let group = Group::new(&format!("memtools-{name}"), 8 << 20)?;
    group.forbid_swap()?;
    let mut hog = Workload::spawn(&mut group.command(&workload("hog"), &["64", "77"]))?;
    let pid = hog.pid();
    let args = [args, &["-p", &pid]].concat();
    let tool = match way {
        Some(way) => Tool::start_by(way, "oomkill", &args)?,
        None => start(&args)?,
    };
    kill(&mut hog)?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok((pid, ended))
}

/// Checks BCC's line about a hog that is killed for its own allocation, with the pages as far as they are known.
/// If they are known, the cgroup is, too.
fn is_bccs_line(pid: &str, ended: &ToolOutput, pages: &str) -> Result<()> {
    let cgroup = if pages == "-" {
        ""
    } else {
        r#", CGROUP (\d+ \("/|- \(")memtools-[a-z-]+"\)"#
    };
    let line = Regex::new(&format!(
        "^\\d\\d:\\d\\d:\\d\\d Triggered by PID {pid} \\(\"hog\"\\), OOM kill of PID {pid} \\(\"hog\"\\), \
         {pages} pages, loadavg: [\\d.]+ [\\d.]+ [\\d.]+ \\d+/\\d+ \\d+{cgroup}\n$"
    ))?;
    ensure!(line.is_match(&ended.stdout), "{ended:?}");
    Ok(())
}

fn a_cgroups_kill_has_bccs_line() -> Result<()> {
    let (pid, ended) = traced_kill(None, &[])?;
    let alone = ended.stderr.contains("mark_victim alone");
    is_bccs_line(&pid, &ended, if alone { "-" } else { "2048" })
}

fn by_kprobe_it_is_the_same() -> Result<()> {
    let (pid, ended) = traced_kill(Some("kprobe"), &[])?;
    is_bccs_line(&pid, &ended, "2048")?;
    let (_, ended) = traced_kill(Some("kprobe"), &["-j"])?;
    let objects = objects(&ended)?;
    let [kill] = &objects[..] else {
        bail!("not one kill: {ended:?}")
    };
    ensure!(
        kill["kind"] == "memcg" && kill["limit_kb"] == 8192,
        "{kill}"
    );
    ensure!(kill["victim"]["oom_score_adj"] == 77, "{kill}");
    let has = |name: &str| kill["kernel_frames"].to_string().contains(name);
    ensure!(has("oom_kill_process") && has("out_of_memory"), "{kill}");
    Ok(())
}

/// The peer is BCC's own oomkill, of libbpf-tools.
fn a_peer_sees_the_same() -> Result<()> {
    let peer = Tool::start_peer("oomkill", &[])?;
    let (_, ended) = traced_kill(None, &[])?;
    let peer = peer.interrupt()?;
    // Our kernels that have kprobes have fentry, too.
    ensure!(ended.stderr.contains("(fentry)"), "{ended:?}");
    // Lines are compared without the time and the load, which both tools read when they print.
    let lines = |ended: &ToolOutput| -> Vec<String> {
        let lines = ended.stdout.lines().filter_map(|line| {
            let (_, kill) = line.split_once(" Triggered ")?;
            Some(kill.split_once(" loadavg: ")?.0.to_owned())
        });
        lines.collect()
    };
    ensure!(
        lines(&ended).len() == 1 && lines(&ended) == lines(&peer),
        "{ended:?}\nbut the peer:\n{peer:?}"
    );
    Ok(())
}

/// Fields that mark_victim does not have are null, both where the tracepoint has the task and where, as in older
/// kernels, it has only a PID.
fn what_mark_victim_alone_knows() -> Result<()> {
    let (pid, ended) = traced_kill(Some("mark_victim alone"), &[])?;
    is_bccs_line(&pid, &ended, "-")?;
    for way in ["mark_victim alone", "mark_victim's pid alone"] {
        let (pid, ended) = traced_kill(Some(way), &["-j"])?;
        let objects = objects(&ended)?;
        let [kill] = &objects[..] else {
            bail!("{way}: not one kill: {ended:?}")
        };
        let pid: u32 = pid.parse()?;
        ensure!(
            kill["pid"] == pid && kill["victim"]["pid"] == pid,
            "{way}: {kill}"
        );
        for unknown in [
            "kind",
            "total_pages",
            "limit_cgroup",
            "limit_kb",
            "order",
            "gfp_flags",
        ] {
            ensure!(kill[unknown].is_null(), "{way}: {unknown} of {kill}");
        }
        let victim = &kill["victim"];
        if way == "mark_victim alone" {
            ensure!(victim["comm"] == "hog" && victim["uid"] == 0, "{kill}");
            ensure!(victim["oom_score_adj"] == 77, "{kill}");
            ensure!(
                victim["anon_kb"].as_u64().is_some_and(|kb| kb > 4096),
                "{kill}"
            );
        } else {
            // The victim's name is still in /proc, or no longer.
            ensure!(
                victim["comm"] == "hog" || victim["comm"].is_null(),
                "{kill}"
            );
            let others = victim.as_object().into_iter().flatten();
            let mut others = others.filter(|(name, _)| !["pid", "comm"].contains(&name.as_str()));
            ensure!(others.all(|(_, value)| value.is_null()), "{kill}");
        }
        let has = |name: &str| kill["kernel_frames"].to_string().contains(name);
        ensure!(has("out_of_memory"), "{way}: {kill}");
    }
    Ok(())
}

/// Returns the kernel's own line about a victim.
fn killed_by_the_log(pid: &str) -> Result<String> {
    let log = shell("dmesg")?;
    let line = log
        .lines()
        .rfind(|line| line.contains(&format!("Killed process {pid} ")));
    Ok(line
        .with_context(|| format!("no kill of {pid} in the log"))?
        .to_owned())
}

fn flags_are_those_of_the_log(kill: &Value) -> Result<()> {
    let gfp = kill["gfp_flags"].as_str().unwrap_or_default();
    let log = shell("dmesg")?;
    let invoked = log
        .lines()
        .rfind(|line| line.contains("invoked oom-killer:"));
    let invoked = invoked.context("no oom-killer in the log")?;
    for flag in gfp.split('|') {
        ensure!(invoked.contains(flag), "{gfp}, but {invoked}");
    }
    Ok(())
}

fn memory_is_that_of_the_log(kill: &Value, pid: &str) -> Result<()> {
    // Numbers are exact, or differ by what two CPUs have not added up yet: 32 pages each.
    let killed = killed_by_the_log(pid)?;
    for (field, key, off_by) in [
        ("total_vm_kb", "total-vm:", 0),
        ("anon_kb", "anon-rss:", 256),
        ("file_kb", "file-rss:", 256),
        ("shmem_kb", "shmem-rss:", 256),
        ("page_tables_kb", "pgtables:", 0),
    ] {
        let (_, theirs) = killed.split_once(key).context("no such field")?;
        let theirs: u64 = theirs.split("kB").next().unwrap_or_default().parse()?;
        let ours = kill["victim"][field].as_u64().context("no such number")?;
        ensure!(
            ours.abs_diff(theirs) <= off_by,
            "{field}: {kill}, but {killed}"
        );
    }
    Ok(())
}

/// Kills this hog, and returns the kill as an object. It must be the only one.
fn only_kill(hog: &mut Workload) -> Result<Value> {
    let before = vmstat("oom_kill")?;
    let tool = start(&["-j"])?;
    kill(hog)?;
    let ended = tool.interrupt()?;
    ensure!(
        vmstat("oom_kill")? - before == 1,
        "not one kill by /proc/vmstat"
    );
    let mut objects = objects(&ended)?;
    ensure!(objects.len() == 1, "{ended:?}");
    Ok(objects.remove(0))
}

fn a_cgroups_kill_is_explained() -> Result<()> {
    let group = Group::new("memtools-oomkill", 8 << 20)?;
    group.forbid_swap()?;
    let mut hog = Workload::spawn(&mut group.command(&workload("hog"), &["64", "77"]))?;
    let pid = hog.pid();
    let kill = only_kill(&mut hog)?;
    ensure!(kill["type"] == "kill" && kill["kind"] == "memcg", "{kill}");
    ensure!(
        kill["pid"] == pid.parse::<u64>()? && kill["comm"] == "hog",
        "{kill}"
    );
    ensure!(kill["limit_cgroup"] == "/memtools-oomkill", "{kill}");
    let id = fs::metadata(group.path())?.ino();
    ensure!(kill["limit_cgroup_id"] == id, "{id}: {kill}");
    ensure!(
        kill["limit_kb"] == 8192 && kill["total_pages"] == 2048,
        "{kill}"
    );
    ensure!(kill["order"] == 0, "{kill}");
    flags_are_those_of_the_log(&kill)?;
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
    ensure!(victim["container_id"].is_null(), "{kill}");
    memory_is_that_of_the_log(&kill, &pid)?;
    let kernel = kill["kernel_frames"].as_array().context("no stack")?;
    let has = |name: &str| kernel.iter().any(|frame| frame["symbol"] == name);
    ensure!(has("oom_kill_process") && has("out_of_memory"), "{kill}");
    // The victim was killed for its own allocation, and the names of its functions are still known.
    ensure!(kill["user_frames"][0]["symbol"] == "write_pages", "{kill}");
    Ok(())
}

/// The tool's first event of a victim is its death, whether the victim started before the tool or after it.
fn stacks_of_victims_are_complete() -> Result<()> {
    const EACH: usize = 3;
    let group = Group::new("memtools-complete", 8 << 20)?;
    group.forbid_swap()?;
    let hog = || Workload::spawn(&mut group.command(&workload("hog"), &["64", "900"]));
    let mut hogs: Vec<Workload> = (0..EACH).map(|_| hog()).collect::<Result<_>>()?;
    let tool = start(&["-j"])?;
    for _ in 0..EACH {
        hogs.push(hog()?);
    }
    for hog in &mut hogs {
        // Another one of the hogs may have been killed in its place.
        let _ = hog.go();
        let _ = hog.done();
        ensure!(hog.wait()?.signal() == Some(9), "a hog has survived");
    }
    let kills = objects(&tool.interrupt()?)?;
    ensure!(kills.len() == hogs.len(), "{kills:?}");
    ensure!(kills.iter().all(is_complete), "{kills:#?}");
    Ok(())
}

/// Whether the user stack of a kill is complete, from the start of the program on.
fn is_complete(kill: &Value) -> bool {
    let frames = kill["user_frames"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let has = |name: &str| frames.iter().any(|frame| frame["symbol"] == name);
    kill["truncated"].is_null()
        && (has("main") || has("__libc_start_call_main"))
        && frames
            .last()
            .is_some_and(|frame| frame["symbol"] == "_start")
}

/// With memory.oom.group, the other processes of the cgroup are killed with the victim.
fn a_whole_cgroup_is_killed() -> Result<()> {
    const OTHERS: usize = 3;
    let group = Group::new("memtools-oomkill", 16 << 20)?;
    group.forbid_swap()?;
    group.set("memory.oom.group", "1")?;
    let others = (0..OTHERS).map(|_| Workload::spawn(&mut group.command(&workload("hog"), &["1"])));
    let mut others: Vec<Workload> = others.collect::<Result<_>>()?;
    let mut hog = Workload::spawn(&mut group.command(&workload("hog"), &["64"]))?;
    let before = vmstat("oom_kill")?;
    let (tool, json) = (start(&["-e"])?, start(&["-j"])?);
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
    // The task that needed memory is the same in all objects: the hog's one thread.
    let objects = objects(&json.interrupt()?)?;
    ensure!(objects.len() == 1 + OTHERS, "{objects:?}");
    let needed: u32 = hog.pid().parse()?;
    ensure!(
        objects.iter().all(|object| object["tid"] == needed),
        "{objects:?}"
    );
    let also = objects
        .iter()
        .filter(|object| object["type"] == "also_killed");
    ensure!(also.count() == OTHERS, "{objects:?}");
    Ok(())
}

fn the_machines_kill_is_global() -> Result<()> {
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    let total = meminfo.split_whitespace().nth(1).context("no MemTotal")?;
    let megabytes = total.parse::<u64>()? / 1024 + 50;
    let mut hog = Workload::start("hog", &[&megabytes.to_string(), "900"])?;
    let pid = hog.pid();
    let kill = only_kill(&mut hog)?;
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

/// The machine has as much memory left for programs as a machine of 384 MB. One hog after the other takes all of it.
fn it_outlives_the_kills_on_a_small_machine() -> Result<()> {
    const KILLS: usize = 5;
    let _rest = Balloon::leaving(150 << 10)?;
    let mut hogs: Vec<Workload> = (0..KILLS)
        .map(|_| Workload::start("hog", &["384"]))
        .collect::<Result<_>>()?;
    let before = vmstat("oom_kill")?;
    let copies = [start(&["-j"])?, start(&["-j"])?];
    // After hundreds of tests, this process can be larger than a hog becomes.
    let spared = Setting::change("/proc/self/oom_score_adj", "-1000")?;
    for hog in &mut hogs {
        kill(hog)?;
    }
    drop(spared);
    let expected: Vec<u64> = hogs
        .iter()
        .map(|hog| hog.pid().parse())
        .collect::<Result<_, _>>()?;
    for copy in copies {
        let kills = objects(&copy.interrupt()?)?;
        let killed: Vec<u64> = kills
            .iter()
            .filter_map(|kill| kill["victim"]["pid"].as_u64())
            .collect();
        ensure!(killed == expected, "{killed:?}, not {expected:?}");
        ensure!(kills.iter().all(is_complete), "{kills:#?}");
    }
    let counted = vmstat("oom_kill")? - before;
    ensure!(counted == KILLS as u64, "{counted} kills by /proc/vmstat");
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
