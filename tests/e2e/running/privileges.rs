//! Privileges of a tool: what it may do, what it drops, and what it says where a privilege is missing.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;
use memtools::host::capabilities::Capability;
use nix::sys::resource::{Resource, setrlimit};
use tempfile::TempDir;

use super::{TOOLS, by_nobody, state};
use crate::harness::{self, Tool, ToolOutput, Workload, eventually, tool};
use crate::pressure::Setting;

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "running":
        every_tool_gives_up_what_tracing_does_not_take,
        unattended_tools_keep_what_reports_take,
        threads_that_serve_have_no_privileges [Once],
        who_cannot_be_traced_is_told [Host],
        missing_privilege_is_named,
        tools_of_one_user_share_locked_memory,
    }
}

/// Returns the capabilities in a status file of /proc, in the order of its lines.
fn privileges(status: &Path) -> Result<Vec<(String, u64)>> {
    let status = fs::read_to_string(status)?;
    let lines = status.lines().filter_map(|line| line.split_once(":\t"));
    let lines = lines.filter(|(name, _)| name.starts_with("Cap") || *name == "NoNewPrivs");
    lines
        .map(|(name, value)| Ok((name.to_owned(), u64::from_str_radix(value, 16)?)))
        .collect()
}

/// Every thread of a tool has only the capabilities that tracing needs. The tool's command has the caller's.
fn every_tool_gives_up_what_tracing_does_not_take() -> Result<()> {
    let bpf = Capability::CAP_BPF.bitmask();
    let never = [
        Capability::CAP_SETUID,
        Capability::CAP_NET_ADMIN,
        Capability::CAP_SYS_MODULE,
        Capability::CAP_SYS_BOOT,
    ];
    let never: u64 = never.iter().map(Capability::bitmask).sum();
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid")?;
    let perf_wants_more = paranoid.trim().parse::<i32>()? > 2;
    let own = privileges(Path::new("/proc/thread-self/status"))?;
    ensure!(own[1].0 == "CapPrm" && own[1].1 & bpf != 0, "{own:?}");
    for name in TOOLS {
        let folder = harness::scratch()?;
        let [begun, status] = ["begun", "status"].map(|name| folder.path().join(name));
        let (from, to) = (begun.display(), status.display());
        let script = format!("cat /proc/self/status > {from}; mv {from} {to}; exec sleep 60");
        let tool = Tool::start(name, &["-c", &format!("sh -c '{script}'")])?;
        eventually("the command runs", || Ok(status.exists()))?;
        ensure!(privileges(&status)? == own, "{name}: {own:?}");
        let mut beyond = never;
        if name != "memleak" && !perf_wants_more {
            beyond |= Capability::CAP_SYS_ADMIN.bitmask();
        }
        for task in fs::read_dir(format!("/proc/{}/task", tool.pid()))? {
            let held = privileges(&task?.path().join("status"))?;
            let [_, permitted, effective, .., no_new] = &held[..] else {
                bail!("{name}: {held:?}");
            };
            ensure!(permitted.1 == effective.1, "{name}: {held:?}");
            ensure!(effective.1 & (beyond | bpf) == bpf, "{name}: {held:?}");
            ensure!(no_new.1 == 1, "{name}: {held:?}");
        }
        ensure!(tool.interrupt()?.status.code().is_some(), "{name}");
    }
    Ok(())
}

/// Tools that run for weeks have neither the capabilities that reading processes takes, nor other programs.
fn unattended_tools_keep_what_reports_take() -> Result<()> {
    let most = [
        Capability::CAP_BPF,
        Capability::CAP_PERFMON,
        Capability::CAP_SYSLOG,
        Capability::CAP_IPC_LOCK,
        Capability::CAP_SYS_RESOURCE,
    ];
    let most: u64 = most.iter().map(Capability::bitmask).sum();
    for name in ["vmscan", "drsnoop", "oomkill"] {
        let mut tool = Tool::start(name, &[])?;
        tool.wait_for_stderr("Ctrl-C to end")?;
        for task in fs::read_dir(format!("/proc/{}/task", tool.pid()))? {
            let status = task?.path().join("status");
            let held = privileges(&status)?;
            let [_, permitted, effective, ..] = &held[..] else {
                bail!("{name}: {held:?}");
            };
            ensure!((permitted.1 | effective.1) & !most == 0, "{name}: {held:?}");
            let status = fs::read_to_string(status)?;
            // 2: a filter. Without the line, the kernel has none.
            let filter = status.lines().find(|line| line.starts_with("Seccomp:"));
            ensure!(
                filter.is_none_or(|line| line == "Seccomp:\t2"),
                "{name}: {filter:?}"
            );
        }
        let ended = tool.interrupt()?;
        ensure!(ended.status.success(), "{ended:?}");
    }
    Ok(())
}

/// The threads of memleak that read what clients send have no capability, and a filter of system calls.
fn threads_that_serve_have_no_privileges() -> Result<()> {
    let program = Workload::start("alloc", &["hold"])?;
    let mut tool = Tool::start("memleak", &["--serve", "0", "-p", &program.pid()])?;
    tool.wait_for_stderr("probes in")?;
    let mut threads = 0;
    for task in fs::read_dir(format!("/proc/{}/task", tool.pid()))? {
        let task = task?.path();
        if fs::read_to_string(task.join("comm"))?.trim_end() != "serve" {
            continue;
        }
        threads += 1;
        let status = task.join("status");
        let held = privileges(&status)?;
        ensure!(
            held.iter()
                .all(|(name, value)| !["CapPrm", "CapEff"].contains(&name.as_str()) || *value == 0),
            "{held:?}"
        );
        let status = fs::read_to_string(status)?;
        ensure!(
            !status.contains("Seccomp:") || status.contains("Seccomp:\t2\n"),
            "{status}"
        );
    }
    ensure!(threads == 1, "{threads} threads that serve");
    ensure!(tool.interrupt()?.status.success(), "memleak has failed");
    Ok(())
}

fn who_cannot_be_traced_is_told() -> Result<()> {
    let mut zombie = Command::new("true").spawn().context("no true")?;
    let pid = zombie.id();
    eventually("it has exited", || Ok(state(pid).is_none()))?;
    for name in TOOLS {
        let ended = harness::run(name, &["-p", &pid.to_string()])?;
        ensure!(
            ended.status.code() == Some(1) && ended.stderr.contains("has exited"),
            "{name}: {ended:?}"
        );
    }
    zombie.wait()?;
    // Process 2 is kthreadd. Three tools are omitted, because memory can be short for kthreadd, too.
    for name in TOOLS
        .into_iter()
        .filter(|name| !["drsnoop", "oomkill", "vmscan"].contains(name))
    {
        let ended = harness::run(name, &["-p", "2"])?;
        ensure!(
            ended.status.code() == Some(1) && ended.stderr.contains("kernel thread"),
            "{name}: {ended:?}"
        );
    }
    let target = Workload::start("alloc", &["hold"])?;
    let (pid, own) = (target.pid(), std::process::id().to_string());
    for name in ["brkstack", "faults", "ffaults", "memleak", "vmscan"] {
        let mut tool = Tool::start(name, &["-p", &pid, &own])?;
        tool.wait_for_stderr(&format!("-p {pid},{own}"))?;
        let ended = tool.interrupt()?;
        ensure!(ended.status.success(), "{ended:?}");
    }
    Ok(())
}

/// Runs a tool to its end as the user nobody (uid 65534), with these capabilities alone.
fn run_by_nobody(capabilities: &str, name: &str, args: &[&str]) -> Result<ToolOutput> {
    let (folder, program) = where_nobody_may_go(name)?;
    let ended = Tool::spawn(by_nobody(capabilities, &program).args(args))?.wait();
    drop(folder);
    ended
}

/// Copies a tool into a directory that the user nobody may read, too.
fn where_nobody_may_go(name: &str) -> Result<(TempDir, PathBuf)> {
    let folder = harness::scratch()?;
    let program = folder.path().join(name);
    harness::copy(&tool(name), &program)?;
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
    Ok((folder, program))
}

/// The tools' logs of mappings together need more memory than one user may lock.
fn tools_of_one_user_share_locked_memory() -> Result<()> {
    let (folder, oomkill) = where_nobody_may_go("oomkill")?;
    let mut capabilities = ",+bpf,+perfmon,+dac_read_search,+sys_admin,+syslog".to_owned();
    if harness::release().starts_with("5.10.") {
        capabilities.push_str(",+sys_resource");
    }
    let start = || {
        let mut command = by_nobody(&capabilities, &oomkill);
        command.args(["-e", "-d", "2"]);
        let few = || setrlimit(Resource::RLIMIT_MEMLOCK, 64 << 10, 64 << 10);
        // SAFETY: a system call between fork and exec.
        unsafe { command.pre_exec(move || Ok(few()?)) };
        Tool::spawn(&mut command)
    };
    let tools: Vec<Tool> = (0..3).map(|_| start()).collect::<Result<_>>()?;
    for tool in tools {
        let ended = tool.wait()?;
        ensure!(ended.status.success(), "{ended:?}");
    }
    drop(folder);
    Ok(())
}

fn missing_privilege_is_named() -> Result<()> {
    let workload = Workload::start("alloc", &["hold"])?;
    let pid = workload.pid();
    // 5.10 requires one more capability, which root cannot grant on every machine.
    let (least, more) = if harness::release().starts_with("5.10.") {
        let ended = run_by_nobody(",+bpf,+perfmon", "vmscan", &["0.1", "3"])?;
        ensure!(
            ended.stderr.contains("requires CAP_SYS_RESOURCE"),
            "{ended:?}"
        );
        (",+bpf,+perfmon,+sys_resource", ",+sys_resource")
    } else {
        (",+bpf,+perfmon", "")
    };
    let most = format!(",+bpf,+perfmon,+dac_read_search{more}");
    let refused: [(&str, &str, &[&str], &str); 3] = [
        (
            "",
            "memleak",
            &["-p", &pid],
            "CAP_BPF and CAP_PERFMON missing",
        ),
        (least, "memleak", &["-p", &pid], "requires CAP_SYS_PTRACE"),
        (
            least,
            "mmapsnoop",
            &["-d", "0.1"],
            "requires CAP_DAC_READ_SEARCH",
        ),
    ];
    for (capabilities, name, args, told) in refused {
        let ended = run_by_nobody(capabilities, name, args)?;
        ensure!(ended.status.code() == Some(1), "{ended:?}");
        ensure!(ended.stderr.contains(told), "{told}: {ended:?}");
        ensure!(ended.stderr.contains("run it as root"), "{ended:?}");
    }
    // Debian's own kernels refuse perf events, too. The setting is changed so that they do not.
    let paranoid = "/proc/sys/kernel/perf_event_paranoid";
    let refuses = fs::read_to_string(paranoid)?.trim().parse::<i32>()? > 2;
    let _permits = if refuses {
        let ended = run_by_nobody(&most, "faults", &["-d", "0.1"])?;
        let told = "requires CAP_SYS_ADMIN: run it as root, or with this capability, or: sysctl";
        ensure!(ended.stderr.contains(told), "{ended:?}");
        Some(Setting::change(paranoid, "2")?)
    } else {
        None
    };
    // A tool runs on without a capability that it can do without.
    let mut worse: Vec<(&str, &[&str], &str)> =
        vec![("oomkill", &["-e", "-d", "0.1"], "requires CAP_SYSLOG")];
    // On 5.10, libbpf lifts the limit of locked memory.
    if more.is_empty() {
        worse.push(("vmscan", &["0.1", "3"], "requires CAP_IPC_LOCK"));
    }
    for (name, args, told) in worse {
        let ended = run_by_nobody(&most, name, args)?;
        ensure!(ended.status.success(), "{ended:?}");
        ensure!(ended.stderr.contains(told), "{told}: {ended:?}");
    }
    // Some kernels require more for perf's uprobes.
    let capabilities = format!(",+bpf,+perfmon,+sys_ptrace,+ipc_lock{more}");
    let (folder, program) = where_nobody_may_go("memleak")?;
    let mut command = by_nobody(&capabilities, &program);
    command.args(["-p", &pid, "0.1", "1"]);
    command.env("MEMTOOLS_ATTACH", "perf uprobes without cookies");
    let ended = Tool::spawn(&mut command)?.wait()?;
    drop(folder);
    let told = ended
        .stderr
        .contains("requires CAP_SYS_ADMIN: run it as root");
    ensure!(ended.status.success() || told, "{ended:?}");
    Ok(())
}
