//! The target process runs on as before, whatever happens to it and to memleak.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libbpf_rs::libbpf_sys::BPF_F_NO_PREALLOC;
use libbpf_rs::query::MapInfoIter;
use libtest_mimic::Trial;
use memtools::bpf::kernel_support;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{READY, attach, last_report, outstanding};
use crate::harness::{self, Tool, Workload, eventually};
use crate::pressure::{Balloon, Setting, folder_on_disk, vmstat};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak":
        what_stops_the_target_changes_no_count [Host],
        a_debugger_changes_no_count [Host],
        killed_at_the_start_it_leaves_no_breakpoints [Host],
        killed_at_the_start_under_memory_pressure_it_leaves_none [Guest],
        killed_it_leaves_nothing_behind,
        a_warning_does_not_stop_the_machine [Guest],
        perf_uprobes_are_taken_away_behind_its_back,
    }
}

/// Each block is a system call, at which strace(1) stops the target process. Signals stop the process anywhere.
fn what_stops_the_target_changes_no_count() -> Result<()> {
    // Size above the largest block that glibc takes from its heap: 32 MiB.
    const SIZE: u64 = 33_554_467;
    let program = ["big", "1009", &SIZE.to_string()];
    let mut workload = Workload::start("alloc", &program)?;
    let pid: i32 = workload.pid().parse()?;
    let tool = attach(&workload, &["-o", "0", "-T", "1000", "60"])?;
    let traced = harness::scratch()?;
    let calls = traced.path().join("calls");
    let mut command = Command::new("strace");
    command.args(["-p", &workload.pid(), "-o"]).arg(&calls);
    let mut strace = command.stderr(Stdio::null()).spawn().context("no strace")?;
    eventually("strace is attached", || {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        Ok(!status.contains("TracerPid:\t0\n"))
    })?;
    workload.go()?;
    for _ in 0..23 {
        kill(Pid::from_raw(pid), Signal::SIGSTOP)?;
        thread::sleep(Duration::from_millis(2));
        kill(Pid::from_raw(pid), Signal::SIGCONT)?;
    }
    workload.done()?;
    kill(Pid::from_raw(strace.id().cast_signed()), Signal::SIGINT)?;
    strace.wait()?;
    let mapped = fs::read_to_string(&calls)?.matches("mmap(").count();
    ensure!(mapped >= 1009, "strace has seen {mapped} calls");
    let groups = last_report(&tool.interrupt()?.stdout)?;
    let found = outstanding(&groups, "big");
    ensure!(found == (1009 * SIZE, 1009), "{found:?}: {groups:#?}");
    Ok(())
}

/// gdb stops the target process at each call of a function, and then steps through the allocator and the probes.
fn a_debugger_changes_no_count() -> Result<()> {
    const CALLS: u64 = 1009;
    let mut workload = Workload::start("alloc", &["hole", &CALLS.to_string()])?;
    let tool = attach(&workload, &["-o", "0", "-T", "1000", "60"])?;
    let all_but_last = format!("ignore 1 {}", CALLS - 1);
    let mut gdb = Command::new("gdb");
    gdb.args(["-nx", "-batch", "-p", &workload.pid()]);
    for command in [
        "break hole",
        &all_but_last,
        // Another program prints this word, because gdb buffers what it writes to a pipe.
        "shell echo set",
        "continue",
        "info breakpoints",
        "stepi 499",
    ] {
        gdb.args(["-ex", command]);
    }
    let gdb = gdb.stdin(Stdio::null()).stderr(Stdio::null());
    let mut gdb = gdb.stdout(Stdio::piped()).spawn().context("no gdb")?;
    let mut lines = BufReader::new(gdb.stdout.take().context("no stdout")?).lines();
    // gdb does not see the calls that the target process makes before the breakpoint is set.
    let set = lines.find(|line| !matches!(line, Ok(line) if line != "set"));
    set.context("gdb has ended")??;
    workload.work()?;
    let said: String = lines.map(|line| line.unwrap_or_default() + "\n").collect();
    gdb.wait()?;
    let hits = format!("already hit {CALLS} times");
    ensure!(said.contains(&hits), "{said}");
    let groups = last_report(&tool.interrupt()?.stdout)?;
    let found = outstanding(&groups, "hole");
    let bytes = CALLS * (16 + (1 << 20));
    ensure!(found == (bytes, 2 * CALLS), "{found:?}: {groups:#?}");
    Ok(())
}

fn killed_it_leaves_nothing_behind() -> Result<()> {
    let untraced = {
        let mut workload = Workload::start("alloc", &["balanced", "101", "211"])?;
        let facts = workload.work()?;
        (facts, workload.finish()?)
    };
    let mut workload = Workload::start("alloc", &["balanced", "101", "211"])?;
    let tool = attach(&workload, &["60"])?;
    let pid = tool.pid();
    tool.signal(Signal::SIGKILL)?;
    let ended = tool.wait()?;
    ensure!(!ended.status.success(), "{ended:?}");
    // Nothing of memleak is left that could keep a probe: no process, no trace event.
    ensure!(!Path::new(&format!("/proc/{pid}")).exists());
    let events = fs::read_to_string("/sys/kernel/tracing/uprobe_events").unwrap_or_default();
    ensure!(events.is_empty(), "{events}");
    let traced = (workload.work()?, workload.finish()?);
    ensure!(traced == untraced, "{traced:?} is not {untraced:?}");

    let mut workload = Workload::start("alloc", &["balanced", "101", "211"])?;
    let tool = attach(&workload, &["60"])?;
    let traced = workload.work()?;
    tool.interrupt()?;
    let traced = (traced, workload.finish()?);
    ensure!(traced == untraced, "{traced:?} is not {untraced:?}");
    Ok(())
}

/// memleak is killed while it registers its probes in many processes. The kernel undoes what was registered, in a
/// process that is not being killed: such a process would leave breakpoints, which the kernel's log would say.
fn killed_at_the_start_it_leaves_no_breakpoints() -> Result<()> {
    kill_at_the_start(101, 30)
}

/// The kernel has to reclaim memory for the pages that get breakpoints.
fn killed_at_the_start_under_memory_pressure_it_leaves_none() -> Result<()> {
    let balloon = Balloon::leaving(100 << 10)?;
    let file = folder_on_disk()?;
    let read = format!(
        "dd if=/dev/zero of={0}/large bs=1M count=128 2>/dev/null; while :; do cat {0}/large >/dev/null; done",
        file.path().display()
    );
    // Page cache fills what is left all the time.
    let mut reader = Command::new("sh").args(["-c", &read]).spawn()?;
    let scanned = vmstat("pgscan_direct")? + vmstat("pgscan_kswapd")?;
    let left = kill_at_the_start(5, 7);
    reader.kill()?;
    reader.wait()?;
    drop(balloon);
    let scanned = vmstat("pgscan_direct")? + vmstat("pgscan_kswapd")? - scanned;
    ensure!(scanned > 0, "there was no memory pressure");
    left
}

/// Traces this number of processes, and kills memleak as often while it starts.
fn kill_at_the_start(processes: usize, kills: u32) -> Result<()> {
    let folder = harness::scratch()?;
    let program = folder.path().join("many");
    harness::copy(&harness::workload("alloc"), &program)?;
    let start = || Workload::spawn(Command::new(&program).arg("hold"));
    let targets = (0..processes)
        .map(|_| start())
        .collect::<Result<Vec<_>>>()?;
    let leaks = || {
        let log = Command::new("dmesg").output().context("no dmesg")?;
        let log = String::from_utf8_lossy(&log.stdout).into_owned();
        anyhow::Ok(
            log.lines()
                .filter(|line| line.contains("leaking uprobe"))
                .count(),
        )
    };
    let before = leaks()?;
    let begun = Instant::now();
    let mut tool = Tool::start("memleak", &["-n", "many", "60"])?;
    tool.wait_for_stderr(READY)?;
    let longest = begun.elapsed();
    tool.interrupt()?;
    for kill in 0..kills {
        let tool = Tool::start("memleak", &["-n", "many", "60"])?;
        // The registrations are the last part of the start.
        thread::sleep(longest / 2 + longest * kill / (2 * kills));
        tool.signal(Signal::SIGKILL)?;
        tool.wait()?;
    }
    // What a killed memleak had registered is removed when the last process has closed it.
    let mut tool = Tool::start("memleak", &["-n", "many", "60"])?;
    tool.wait_for_stderr(READY)?;
    tool.interrupt()?;
    ensure!(leaks()? == before, "breakpoints were left");
    for target in targets {
        ensure!(target.finish()?.success(), "a process did not live on");
    }
    Ok(())
}

/// Kernels before 6.1 warn of maps whose entries are allocated on demand. Here, a warning would be a panic.
fn a_warning_does_not_stop_the_machine() -> Result<()> {
    let _panics = Setting::change("/proc/sys/kernel/panic_on_warn", "1")?;
    let mut workload = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let mut tool = Tool::start("memleak", &["-p", &workload.pid(), "-o", "0", "60"])?;
    tool.wait_for_stderr(READY)?;
    let newest = |name: &str| {
        let maps = MapInfoIter::default().filter(|info| info.name == *name);
        let newest = maps.max_by_key(|info| info.id);
        newest.with_context(|| format!("no map {name}"))
    };
    let unwarned = kernel_support::btf_has_name("bpf_mem_alloc");
    for name in ["overflow", "threads", "totals", "unknown_frees"] {
        let as_needed = newest(name)?.map_flags & BPF_F_NO_PREALLOC != 0;
        ensure!(as_needed == unwarned, "{name}: {as_needed}");
    }
    workload.work()?;
    let groups = last_report(&tool.interrupt()?.stdout)?;
    let found = outstanding(&groups, "leak_malloc");
    ensure!(found == (31 * 4093, 31), "{found:?} in {groups:#?}");
    Ok(())
}

/// A separate process waits until the perf uprobes are removed, and then ends.
fn perf_uprobes_are_taken_away_behind_its_back() -> Result<()> {
    let mut workload = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let args = ["-p", &workload.pid(), "-o", "0", "60"];
    let tool = Tool::start_by("perf uprobes without cookies", "memleak", &args)?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    // That process leads its session; no process that a test has started does.
    let is_left = || -> Result<bool> {
        for entry in fs::read_dir("/proc")? {
            let stat = fs::read_to_string(entry?.path().join("stat")).unwrap_or_default();
            let Some((pid, rest)) = stat.split_once(" (memleak) ") else {
                continue;
            };
            let fields: Vec<&str> = rest.split(' ').collect();
            if fields[0] != "Z" && fields[3] == pid {
                return Ok(true);
            }
        }
        Ok(false)
    };
    harness::eventually("no process of it is left", || Ok(!is_left()?))?;

    let tool = attach(&workload, &["-o", "0", "60"])?;
    workload.work()?;
    let ended = tool.interrupt()?;
    ensure!(
        ended.stdout.contains("126883 bytes in 31 allocations"),
        "{ended:?}"
    );
    ensure!(workload.finish()?.success());
    Ok(())
}
