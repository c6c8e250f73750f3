//! The container of a task: the fields `cgroup` and `container_id`, and the column of `--container`, against
//! cgroups made as Docker, containerd, CRI-O, Podman and systemd make them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{self, Cgroup, Tool, Workload};
use crate::memtriage;
use crate::pressure::{Group, Swap, Writer};

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests!("containers":
        those_of_every_runtime_are_told,
        one_that_has_gone_is_told,
        tables_have_a_column,
        the_largest_processes_have_theirs,
        cgroups_by_size_have_theirs,
        who_reclaimed_is_told_when_it_has_gone,
        who_compacted_is_told_when_it_has_gone,
        what_grows_has_its_own,
        who_grows_is_told_with_its_own [Guest],
        counts_by_process_have_theirs,
        who_reads_back_from_swap_is_told [Kprobes, Guest],
    )
}

pub(crate) const ID: &str = "4c01db0b339c7f2a4c01db0b339c7f2a4c01db0b339c7f2a4c01db0b339c7f2a";
const POD: &str = "0f7b5b8e_1d2c_4b6a_9c1d_2e3f4a5b6c7d";
const CALLS: usize = 23;

/// Cgroups below one that the test makes. Dropping the value removes them. Their processes must have ended by
/// then, so make the layout before the processes.
pub(crate) struct Layout {
    top: Cgroup,
    made: Vec<PathBuf>,
}

impl Layout {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self {
            top: Cgroup::new()?,
            made: Vec::new(),
        })
    }

    /// Makes a cgroup at `path` and moves a process into it. Returns the cgroup's path from the root of the hierarchy.
    pub(crate) fn put(&mut self, pid: &str, path: &str) -> Result<String> {
        let mut folder = self.top.path().to_owned();
        for part in Path::new(path) {
            folder.push(part);
            if !folder.exists() {
                fs::create_dir(&folder)?;
                self.made.push(folder.clone());
            }
        }
        fs::write(folder.join("cgroup.procs"), pid)?;
        let own = fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::"));
        let own = own.context("no cgroup of version 2")?;
        ensure!(own.ends_with(path), "{own}");
        Ok(own.to_owned())
    }

    /// Returns the directory of the topmost cgroup.
    pub(crate) fn path(&self) -> String {
        self.top.path().display().to_string()
    }

    /// Removes the cgroups, and returns the directory of the one that was made last.
    pub(crate) fn remove(self) -> Result<PathBuf> {
        self.made.last().cloned().context("no cgroup")
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        for folder in self.made.iter().rev() {
            harness::remove_cgroup(folder);
        }
    }
}

fn start(tool: &str, args: &[&str]) -> Result<Tool> {
    let mut tool = Tool::start(tool, args)?;
    tool.wait_for_stderr("tracing ")?;
    Ok(tool)
}

/// Whether a row names this cgroup, as seen from the tests. Where the tests themselves run in a container, the
/// kernel's path of a cgroup begins above their root.
pub(crate) fn is_in(row: &Value, cgroup: &str) -> bool {
    row["cgroup"]
        .as_str()
        .is_some_and(|told| told.ends_with(cgroup))
}

/// Returns the rows of a process.
pub(crate) fn of_process<'a>(rows: &'a [Value], pid: &str) -> Vec<&'a Value> {
    rows.iter()
        .filter(|row| row["pid"].as_u64() == pid.parse().ok())
        .collect()
}

/// Programs in a cgroup of each layout map memory at the same time.
fn those_of_every_runtime_are_told() -> Result<()> {
    let kubepods =
        format!("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD}.slice");
    let id = |n: usize| format!("{n:x}{}", &ID[1..]);
    let layouts = [
        (format!("system.slice/docker-{}.scope", id(1)), Some(id(1))),
        (
            format!("system.slice/docker-{}.scope/init", id(1)),
            Some(id(1)),
        ),
        (format!("docker/{}", id(2)), Some(id(2))),
        (
            format!("{kubepods}/cri-containerd-{}.scope", id(3)),
            Some(id(3)),
        ),
        (format!("{kubepods}/crio-{}.scope", id(4)), Some(id(4))),
        (
            format!("machine.slice/libpod-{}.scope/container", id(5)),
            Some(id(5)),
        ),
        ("system.slice/db.service".to_owned(), None),
    ];
    let mut layout = Layout::new()?;
    let mut programs = Vec::new();
    for (path, container) in layouts {
        let workload = Workload::start("mmap", &["anon", &CALLS.to_string()])?;
        let cgroup = layout.put(&workload.pid(), &path)?;
        programs.push((workload, cgroup, container));
    }
    let tool = start("mmapsnoop", &["-j", "-n", "mmap"])?;
    for (workload, ..) in &mut programs {
        workload.work()?;
    }
    let ended = tool.interrupt()?;
    let rows = ended.objects()?;
    for (workload, cgroup, container) in programs {
        let rows = of_process(&rows, &workload.pid());
        ensure!(rows.len() == CALLS, "{cgroup}: {} rows", rows.len());
        for row in rows {
            ensure!(is_in(row, &cgroup), "{cgroup}: {row}");
            ensure!(
                row["container_id"] == Value::from(container.clone()),
                "{cgroup}: {row}"
            );
        }
        workload.finish()?;
    }
    Ok(())
}

/// The tool is stopped from before the container's cgroup is made until after it is removed.
fn one_that_has_gone_is_told() -> Result<()> {
    let tool = start("mmapsnoop", &["-j", "-n", "mmap"])?;
    tool.signal(Signal::SIGSTOP)?;
    let mut workload = Workload::start("mmap", &["anon", &CALLS.to_string()])?;
    let pid = workload.pid();
    let mut layout = Layout::new()?;
    let cgroup = layout.put(&pid, &format!("system.slice/docker-{ID}.scope"))?;
    workload.work()?;
    workload.finish()?;
    let folder = layout.remove()?;
    ensure!(!folder.exists(), "{} is still there", folder.display());
    tool.signal(Signal::SIGCONT)?;
    let ended = tool.interrupt()?;
    let rows = ended.objects()?;
    let rows = of_process(&rows, &pid);
    let told = rows
        .iter()
        .filter(|row| is_in(row, &cgroup) && row["container_id"] == ID)
        .count();
    // Before the workload was moved into the cgroup, it had mapped its program and libraries.
    ensure!(told == CALLS, "{told} of {} rows", rows.len());
    Ok(())
}

/// The tables of the tools show the short name of the container.
fn tables_have_a_column() -> Result<()> {
    for (tool, program, args, columns) in [
        (
            "mmapsnoop",
            "mmap",
            &["anon", "23"][..],
            "PID    COMM           CONTAINER        PROT",
        ),
        (
            "shmsnoop",
            "shm",
            &["7"],
            "PID    COMM             CONTAINER           SYS",
        ),
        ("hfaults", "thp", &["3"], ""),
    ] {
        let mut workload = Workload::start(program, args)?;
        let pid = workload.pid();
        let mut layout = Layout::new()?;
        layout.put(&pid, &format!("docker/{ID}"))?;
        let mut options = vec!["--container", "-p", &pid];
        if tool == "hfaults" {
            options.push("--madvise");
        }
        let tracer = start(tool, &options)?;
        workload.work()?;
        let ended = tracer.interrupt()?;
        ensure!(ended.stdout.starts_with(columns), "{ended:?}");
        let expected = match tool {
            "mmapsnoop" => format!("{pid:<6} mmap           4c01db0b339c     "),
            "shmsnoop" => format!("{pid:<6} shm              4c01db0b339c     "),
            _ => format!("@[{pid}, thp, 4c01db0b339c]: 1\n"),
        };
        ensure!(
            ended.stdout.contains(&expected),
            "no {expected:?} in {ended:?}"
        );
        workload.finish()?;
    }
    Ok(())
}

/// faults, ffaults and brkstack count a process that has ended, and whose cgroup is removed, before they report.
fn counts_by_process_have_theirs() -> Result<()> {
    for (tool, args, kind, expected) in [
        ("faults", &["-j"][..], "stack", ""),
        ("faults", &["-j", "--by-process"], "process", ""),
        (
            "faults",
            &["--by-process", "--container"],
            "",
            "{pid}brk              4c01db0b339c     ",
        ),
        ("ffaults", &["-j", "--by-process"], "file", ""),
        (
            "ffaults",
            &["--by-process", "--container"],
            "",
            "{pid}brk              4c01db0b339c     [",
        ),
        ("brkstack", &["-j"], "stack", ""),
        ("brkstack", &["-j", "--events"], "call", ""),
        (
            "brkstack",
            &["--events", "--container"],
            "",
            " {pid}brk              4c01db0b339c     0x",
        ),
    ] {
        let mut workload = Workload::start("brk", &["23", "7", "5"])?;
        let pid = workload.pid();
        let mut layout = Layout::new()?;
        let cgroup = layout.put(&pid, &format!("system.slice/docker-{ID}.scope"))?;
        let tracer = start(tool, &[args, &["-p", &pid]].concat())?;
        workload.work()?;
        workload.finish()?;
        drop(layout);
        let ended = tracer.interrupt()?;
        if kind.is_empty() {
            let expected = expected.replace("{pid}", &format!("{pid:<7} "));
            ensure!(ended.stdout.contains(&expected), "{ended:?}");
            ensure!(
                ended.stdout.contains(" COMM             CONTAINER        "),
                "{ended:?}"
            );
            continue;
        }
        let objects = ended.objects()?;
        let rows: Vec<_> = objects.iter().filter(|row| row["type"] == kind).collect();
        ensure!(!rows.is_empty(), "{ended:?}");
        for row in rows {
            ensure!(
                is_in(row, &cgroup) && row["container_id"] == ID,
                "{tool}: {row}"
            );
        }
    }
    Ok(())
}

/// memtriage reads the container from /proc: for the one process that is asked about, and for all.
fn the_largest_processes_have_theirs() -> Result<()> {
    let mut workload = Workload::start("mmap", &["anon", "23"])?;
    let pid = workload.pid();
    let mut layout = Layout::new()?;
    let cgroup = layout.put(&pid, &format!("system.slice/docker-{ID}.scope"))?;
    for args in [&["-p", &pid][..], &["--by", "growth", "-T", "10000"]] {
        let (objects, _) = memtriage::triage_of(args)?;
        let rows = of_process(&objects, &pid);
        let row = rows.iter().find(|row| row["type"] == "process");
        let row = row.with_context(|| format!("{args:?}: {rows:?}"))?;
        ensure!(is_in(row, &cgroup) && row["container_id"] == ID, "{row}");
        let ended = harness::run("memtriage", &[args, &["--container"]].concat())?;
        let expected = format!("\n{pid:<7} mmap             4c01db0b339c     ");
        ensure!(
            ended
                .stdout
                .contains("COMM             CONTAINER             PSS"),
            "{ended:?}"
        );
        ensure!(ended.stdout.contains(&expected), "{ended:?}");
    }
    workload.work()?;
    workload.finish()?;
    Ok(())
}

/// memtriage --by cgroup. The kernel's own memory is in no container.
fn cgroups_by_size_have_theirs() -> Result<()> {
    let name = format!("docker-{ID}.scope");
    let group = Group::new(&name, 32 << 20)?;
    let mut hog = Workload::spawn(&mut group.command(&harness::workload("hog"), &["7"]))?;
    hog.work()?;
    let by_size = ["--by", "cgroup", "-T", "100000"];
    let (objects, _) = memtriage::triage_of(&by_size)?;
    let path = format!("/{name}");
    let ours = objects.iter().find(|row| row["name"] == path);
    let ours = ours.with_context(|| format!("{objects:?}"))?;
    ensure!(
        ours["cgroup"] == path && ours["container_id"] == ID,
        "{ours}"
    );
    let ended = harness::run("memtriage", &[&by_size[..], &["--container"]].concat())?;
    ensure!(
        ended
            .stdout
            .contains(&format!("\n{path} 4c01db0b339c             - ")),
        "{ended:?}"
    );
    for (by, what) in [
        ("slab", "slab caches"),
        ("code", "lines of the kernel's code"),
    ] {
        let ended = harness::run("memtriage", &["--by", by, "--container"])?;
        let reason = format!("memtriage: {what} are in no container");
        ensure!(
            ended.status.code() == Some(2) && ended.stderr.starts_with(&reason),
            "{ended:?}"
        );
    }
    Ok(())
}

/// memtriage --watch, which has parts of memory in the same table.
fn what_grows_has_its_own() -> Result<()> {
    let mut layout = Layout::new()?;
    let mut workload = Workload::start("minor", &["40009"])?;
    let pid = workload.pid();
    layout.put(&pid, &format!("system.slice/docker-{ID}.scope"))?;
    let mut tool = Tool::start("memtriage", &["--watch", "--container", "0.3"])?;
    for _ in 0..2 {
        tool.wait_for_output("MemTotal ")?;
    }
    workload.work()?;
    // Where memory is slow, memtriage looks before the workload has written all pages. It shows growth since its
    // first look.
    tool.wait_for_output("M     +156M ")?;
    let ended = tool.interrupt()?;
    let name = format!("minor ({pid})");
    let row = format!("{name:<28} 4c01db0b339c     ");
    let mut lines = ended.stdout.lines();
    let is_ours = |line: &str| line.starts_with(&row) && line.contains("M     +156M ");
    ensure!(lines.any(is_ours), "no {row:?} in {ended:?}");
    Ok(())
}

/// memtriage --who names the container of the process that it has traced.
fn who_grows_is_told_with_its_own() -> Result<()> {
    let mut layout = Layout::new()?;
    let mut grow = Workload::start("grow", &["23", "499"])?;
    let pid = grow.pid();
    let cgroup = layout.put(&pid, &format!("system.slice/docker-{ID}.scope"))?;
    grow.go()?;
    let (objects, _) = memtriage::triage(&["--who", "1"])?;
    let answer = memtriage::who::answer(&objects, "growing")?;
    ensure!(answer["pid"].as_u64() == pid.parse().ok(), "{answer}");
    ensure!(
        is_in(answer, &cgroup) && answer["container_id"] == ID,
        "{answer}"
    );
    let ended = harness::run("memtriage", &["--container", "--who", "1"])?;
    let head = format!("growing in 4c01db0b339c: faults --bytes -p {pid} ");
    ensure!(ended.stdout.contains(&head), "{ended:?}");
    Ok(())
}

/// vmscan --by-cgroup, with a cgroup that is removed before the table is printed.
fn who_reclaimed_is_told_when_it_has_gone() -> Result<()> {
    for json in [true, false] {
        let form = if json { "-j" } else { "--container" };
        let tool = start("vmscan", &["--by-cgroup", form])?;
        let name = format!("docker-{ID}.scope");
        let mut writer = Writer::start(&name)?;
        let mut layout = Layout::new()?;
        let mut path = format!("/{name}");
        // Where cgroup version 1 limits memory, the container's cgroup is a second one, of version 2.
        if !writer.group.path().starts_with("/sys/fs/cgroup/docker") {
            path = layout.put(&writer.pid(), &name)?;
        }
        writer.write()?;
        let folder = writer.group.path();
        drop((writer, layout));
        ensure!(!Path::new(&folder).exists(), "{folder} is still there");
        let ended = tool.interrupt()?;
        if json {
            let rows = ended.objects()?;
            let row = rows.iter().find(|row| row["container_id"] == ID);
            let row = row.with_context(|| format!("{ended:?}"))?;
            let told = row["path"].as_str().unwrap_or_default();
            ensure!(row["type"] == "cgroup" && told.ends_with(&path), "{row}");
            let reclaims = row["memcg_reclaim"]["count"].as_u64();
            ensure!(reclaims.is_some_and(|count| count > 0), "{row}");
        } else {
            let header = " M-RECLAIMms CONTAINER        CGROUP                   LIMITED\n";
            ensure!(ended.stdout.contains(header), "{ended:?}");
            let mut lines = ended.stdout.lines();
            let is_ours = |line: &str| line.contains(" 4c01db0b339c     /") && line.contains(&path);
            ensure!(lines.any(is_ours), "{ended:?}");
        }
    }
    Ok(())
}

/// vmscan --trace-compaction, stopped from before the container's cgroup is made until after it is removed.
fn who_compacted_is_told_when_it_has_gone() -> Result<()> {
    for form in ["-j", "--container"] {
        let tool = start("vmscan", &["--trace-compaction", form])?;
        tool.signal(Signal::SIGSTOP)?;
        let mut layout = Layout::new()?;
        let script = "read go; echo 1 >/proc/sys/vm/compact_memory";
        let mut shell = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .spawn()?;
        let pid = shell.id().to_string();
        let cgroup = layout.put(&pid, &format!("system.slice/docker-{ID}.scope"));
        drop(shell.stdin.take());
        ensure!(shell.wait()?.success(), "memory cannot be compacted");
        let cgroup = cgroup?;
        let folder = layout.remove()?;
        ensure!(!folder.exists(), "{} is still there", folder.display());
        tool.signal(Signal::SIGCONT)?;
        let ended = tool.interrupt()?;
        if form == "-j" {
            let rows = ended.objects()?;
            let rows = of_process(&rows, &pid);
            ensure!(!rows.is_empty(), "{ended:?}");
            for row in rows {
                ensure!(is_in(row, &cgroup) && row["container_id"] == ID, "{row}");
            }
        } else {
            let expected = format!(" sh             {pid:<6} 4c01db0b339c     0    ");
            ensure!(
                ended.stdout.contains(&expected),
                "no {expected:?} in {ended:?}"
            );
        }
    }
    Ok(())
}

fn who_reads_back_from_swap_is_told() -> Result<()> {
    const PAGES: u64 = 1999;
    let _swap = Swap::on("256M")?;
    for way in ["fentry", "kprobe"] {
        let mut workload = Workload::start("pageout", &[&PAGES.to_string()])?;
        let pid = workload.pid();
        let mut layout = Layout::new()?;
        let cgroup = layout.put(&pid, &format!("system.slice/docker-{ID}.scope"))?;
        let tool = Tool::start_by(way, "swapin", &["-j"])?;
        workload.work()?;
        let ended = tool.interrupt()?;
        let rows = ended.objects()?;
        let rows = of_process(&rows, &pid);
        let pages: u64 = rows.iter().filter_map(|row| row["pages_in"].as_u64()).sum();
        ensure!(pages == PAGES, "{way}: {ended:?}");
        for row in rows {
            ensure!(
                is_in(row, &cgroup) && row["container_id"] == ID,
                "{way}: {row}"
            );
        }
        workload.finish()?;
    }
    Ok(())
}
