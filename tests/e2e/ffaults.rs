//! ffaults against workloads that fault known numbers of times on known files.

use std::env;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use crate::harness::{self, Tool, ToolOutput, Workload};
use crate::pressure::{folder_on_disk, shell};

const READY: &str = "tracing page faults";
const PAGES: &str = "1009";
const HOOKS: [&str; 3] = ["fexit", "kprobe", "event"];

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "ffaults":
        anonymous_memory_has_its_own_line,
        cold_faults_are_counted_once_under_the_files_name [Disk],
        every_hook_counts_the_same [Disk, Kprobes],
        paths_are_whole [Disk],
        paths_on_overlayfs_are_those_of_the_container [Overlay],
        writes_are_told_apart [Disk],
        minor_faults_are_told_apart,
        processes_are_told_apart,
        heap_and_stack_have_their_names,
        shared_memory_has_its_names,
        intervals_add_up,
        threads_at_once_are_all_counted [Disk],
        threads_in_new_memory_are_all_counted,
        json_agrees [Once],
    }
}

/// Traces a workload by its PID with these options.
fn trace(program: &str, args: &[&str], options: &[&str]) -> Result<ToolOutput> {
    let mut program = Workload::start(program, args)?;
    let pid = program.pid();
    let mut tool = Tool::start("ffaults", &[&["-p", &pid], options].concat())?;
    tool.wait_for_stderr(READY)?;
    program.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
    Ok(ended)
}

/// Returns the fields of each line but the header.
fn rows(stdout: &str) -> Vec<Vec<&str>> {
    let lines = stdout.lines().skip(1);
    lines
        .map(|line| line.split_whitespace().collect())
        .collect()
}

/// Returns a path on the disk for a file of this test.
fn on_disk(name: &str) -> Result<PathBuf> {
    Ok(PathBuf::from(env::var_os("MEMTOOLS_DISK").context("no disk")?).join(name))
}

fn anonymous_memory_has_its_own_line() -> Result<()> {
    let ended = trace("minor", &[PAGES, "both"], &[])?;
    ensure!(
        rows(&ended.stdout) == [["[anon]", "2018"]],
        "{}",
        ended.stdout
    );
    ensure!(
        ended
            .stdout
            .starts_with("FILE                          COUNT\n"),
        "{}",
        ended.stdout
    );
    Ok(())
}

fn cold_faults_are_counted_once_under_the_files_name() -> Result<()> {
    let path = on_disk("known-file-a")?;
    let ended = trace("file", &[&path.to_string_lossy(), "random", "1000"], &[])?;
    ensure!(
        rows(&ended.stdout) == [["known-file-a", "1000"]],
        "{}",
        ended.stdout
    );
    Ok(())
}

fn every_hook_counts_the_same() -> Result<()> {
    let path = on_disk("known-file-b")?;
    for hook in HOOKS {
        if hook == "event" && !has_find_vma()? {
            continue;
        }
        let ended = trace(
            "file",
            &[&path.to_string_lossy(), "random", "499"],
            &["--hook", hook, "--type"],
        )?;
        let access = if hook == "event" { "-" } else { "0" };
        let expected = ["known-file-b", "499", "0", "499", access, access];
        ensure!(
            rows(&ended.stdout) == [expected],
            "{hook}: {}",
            ended.stdout
        );
        let event = ended.stderr.contains("by perf event");
        ensure!(event == (hook == "event"), "{hook}: {}", ended.stderr);
    }
    Ok(())
}

/// Twenty threads on two CPUs wait for a disk in more faults at once than perf's kretprobes can follow, and
/// preempt one another in our BPF programs, where the kernel permits that.
fn threads_at_once_are_all_counted() -> Result<()> {
    let path = on_disk("contended")?;
    for hook in [None, Some("kprobe")] {
        let options = hook.map_or(vec![], |hook| vec!["--hook", hook]);
        let path = path.to_string_lossy();
        let mut program = Workload::start("contend", &["20", "1009", "fault", &path])?;
        let mut tool = Tool::start("ffaults", &[&["-p", &program.pid()], &*options].concat())?;
        tool.wait_for_stderr(READY)?;
        let facts = program.work()?;
        let ended = tool.interrupt()?;
        ensure!(facts["major"] == "20180", "{facts:?}");
        ensure!(
            rows(&ended.stdout) == [["contended", "20180"]],
            "{hook:?}: {ended:?}"
        );
        ensure!(!ended.stderr.contains("lost"), "{hook:?}: {ended:?}");
    }
    let definitions = std::fs::read_to_string("/sys/kernel/tracing/kprobe_events")?;
    ensure!(!definitions.contains("memtools"), "{definitions}");
    Ok(())
}

fn threads_in_new_memory_are_all_counted() -> Result<()> {
    let mut program = Workload::start("contend", &["20", "4001", "touch"])?;
    let mut tool = Tool::start("ffaults", &["-p", &program.pid()])?;
    tool.wait_for_stderr(READY)?;
    let facts = program.work()?;
    let ended = tool.interrupt()?;
    ensure!(facts["minor"] == "80020", "{facts:?}");
    let [row] = &rows(&ended.stdout)[..] else {
        anyhow::bail!("{}", ended.stdout);
    };
    ensure!(row[..] == ["[anon]", "80020"], "{ended:?}");
    ensure!(!ended.stderr.contains("lost"), "{ended:?}");
    Ok(())
}

fn has_find_vma() -> Result<bool> {
    let btf = std::fs::read("/sys/kernel/btf/vmlinux").context("no BTF")?;
    let name = b"\0bpf_find_vma\0";
    Ok(btf.windows(name.len()).any(|window| window == name))
}

fn paths_are_whole() -> Result<()> {
    let path = on_disk("known-file-c")?;
    let path = path.to_string_lossy();
    let ended = trace("file", &[&path, "random", "101"], &["--path"])?;
    ensure!(rows(&ended.stdout) == [[&*path, "101"]], "{}", ended.stdout);
    Ok(())
}

/// The mapped file belongs to a layer of the overlayfs, whose own mount is in no directory.
fn paths_on_overlayfs_are_those_of_the_container() -> Result<()> {
    let folder = folder_on_disk()?;
    let at = |name: &str| folder.path().join(name).display().to_string();
    shell(&format!(
        "cd {} && mkdir lower upper work merged &&
         mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged",
        folder.path().display()
    ))?;
    let path = at("merged/known-file");
    let ended = trace("file", &[&path, "random", "101"], &["--path"]);
    shell(&format!("umount {}", at("merged")))?;
    let ended = ended?;
    ensure!(rows(&ended.stdout) == [[&*path, "101"]], "{}", ended.stdout);
    Ok(())
}

fn writes_are_told_apart() -> Result<()> {
    let path = on_disk("known-file-d")?;
    let ended = trace(
        "file",
        &[&path.to_string_lossy(), "write", "101"],
        &["--type"],
    )?;
    let rows = rows(&ended.stdout);
    // A guest has a hook that knows the type of access.
    ensure!(
        rows.len() == 1 && rows[0][..2] == ["known-file-d", "101"],
        "{}",
        ended.stdout
    );
    ensure!(rows[0][4..] == ["101", "0"], "{}", ended.stdout);
    Ok(())
}

fn minor_faults_are_told_apart() -> Result<()> {
    let ended = trace("minor", &[PAGES], &["--type"])?;
    let rows = rows(&ended.stdout);
    ensure!(
        rows.len() == 1 && rows[0][..4] == ["[anon]", PAGES, PAGES, "0"],
        "{}",
        ended.stdout
    );
    let write = rows[0][4];
    ensure!(
        write == PAGES || (write == "-" && ended.stderr.contains("perf event")),
        "{}",
        ended.stdout
    );
    Ok(())
}

fn processes_are_told_apart() -> Result<()> {
    let mut programs = [
        Workload::start("minor", &["23"])?,
        Workload::start("minor", &["31"])?,
    ];
    let pids = programs.each_ref().map(Workload::pid);
    let mut tool = Tool::start("ffaults", &["--by-process", "-p", &pids.join(",")])?;
    tool.wait_for_stderr(READY)?;
    for program in &mut programs {
        program.work()?;
    }
    let ended = tool.interrupt()?;
    let expected = [
        [pids[0].as_str(), "minor", "[anon]", "23"],
        [pids[1].as_str(), "minor", "[anon]", "31"],
    ];
    ensure!(rows(&ended.stdout) == expected, "{}", ended.stdout);
    Ok(())
}

fn heap_and_stack_have_their_names() -> Result<()> {
    let ended = harness::run("ffaults", &["-c", "ls -lR /proc/self/"])?;
    for name in ["[heap]", "[stack]"] {
        ensure!(
            ended.stdout.contains(&format!("\n{name}")),
            "{name}: {}",
            ended.stdout
        );
    }
    Ok(())
}

fn shared_memory_has_its_names() -> Result<()> {
    // With --path, the names are those of /proc/PID/maps. The kernel names shared anonymous memory after the file
    // that it was once mapped from: /dev/zero.
    for with_path in [false, true] {
        let options = if with_path { &["--path"][..] } else { &[] };
        let mut program = Workload::start("shared", &["23", "31", "41"])?;
        let mut tool = Tool::start("ffaults", &[&["-p", &program.pid()], options].concat())?;
        tool.wait_for_stderr(READY)?;
        let facts = program.work()?;
        let ended = tool.interrupt()?;
        let faults = facts["minor"].parse::<u64>()? + facts["major"].parse::<u64>()?;
        ensure!(faults == 95, "{facts:?}");
        let shm = facts["shm"].as_str();
        let names = if with_path {
            [
                "/memfd:known-memfd (deleted)".to_owned(),
                format!("/dev/shm/{shm}"),
                "/dev/zero (deleted)".to_owned(),
            ]
        } else {
            ["memfd:known-memfd", shm, "dev/zero"].map(str::to_owned)
        };
        let lines = ended.stdout.lines().skip(1).map(|line| {
            let (name, count) = line.rsplit_once(' ').unwrap_or_default();
            (name.trim_end().to_owned(), count)
        });
        let expected = names.into_iter().zip(["23", "31", "41"]);
        ensure!(lines.eq(expected), "{}", ended.stdout);
    }
    Ok(())
}

fn intervals_add_up() -> Result<()> {
    let ended = trace("minor", &[PAGES], &["0.05"])?;
    let lines = ended
        .stdout
        .lines()
        .filter_map(|line| line.strip_prefix("[anon]"));
    let counts = lines.map(|count| count.trim().parse::<u64>());
    let sum: u64 = counts.sum::<Result<_, _>>()?;
    ensure!(sum == 1009, "{}", ended.stdout);
    Ok(())
}

fn json_agrees() -> Result<()> {
    let ended = trace("minor", &[PAGES], &["-j"])?;
    let rows = ended.objects()?;
    ensure!(rows.len() == 1, "{}", ended.stdout);
    ensure!(
        rows[0]["file"] == "[anon]" && rows[0]["faults"] == 1009,
        "{}",
        ended.stdout
    );
    Ok(())
}
