//! memtriage --doctor: which tools of the suite can run here, and what is missing where they cannot.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use serde_json::Value;

use super::without;
use crate::harness::{self, Tool, Workload, tool};
use crate::pressure::Setting;
use crate::running;

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "memtriage":
        tools_that_can_run_are_told,
        tools_that_were_not_run_are_an_error [Once],
        tools_without_privilege_tell_what_is_missing [Once],
        tools_without_btf_or_tracefs_tell_what_is_missing [Once],
        tools_under_lockdown_tell_so [Once],
        tools_that_may_have_no_perf_events_tell_so,
    }
}

/// Returns the rows of --doctor, one for each tool, and the exit status.
pub(crate) fn doctor(command: &mut Command) -> Result<(Vec<Value>, ExitStatus)> {
    let (_, rows, status) = conditions_and_tools(command)?;
    Ok((rows, status))
}

/// Returns the rows of --doctor about the machine, the rows of the tools, and the exit status.
fn conditions_and_tools(command: &mut Command) -> Result<(Vec<Value>, Vec<Value>, ExitStatus)> {
    let output = command.args(["-j", "--doctor"]).output()?;
    let lines = String::from_utf8(output.stdout)?;
    let rows: Vec<Value> = lines.lines().map(harness::object).collect::<Result<_>>()?;
    let (machine, tools): (Vec<_>, Vec<_>) =
        rows.into_iter().partition(|row| row["type"] == "condition");
    ensure!(
        machine.len() == 6 && tools.len() == 13,
        "{lines} {:?}",
        output.stderr
    );
    Ok((machine, tools, output.status))
}

/// Returns the names of the conditions that are not met.
fn unmet(machine: &[Value]) -> Vec<&str> {
    let unmet = machine.iter().filter(|row| row["met"] == false);
    unmet.filter_map(|row| row["name"].as_str()).collect()
}

/// The doctor says that a tool works if, and only if, it runs when it is started by itself.
fn tools_that_can_run_are_told() -> Result<()> {
    let (rows, status) = doctor(&mut Command::new(tool("memtriage")))?;
    let program = format!("{} --version", tool("vmscan").display());
    let workload = Workload::start("minor", &["1"])?;
    let heap = workload.pid();
    let mut all = true;
    for row in &rows {
        let command = row["command"].as_str().context("no command")?;
        let options = match command {
            "memleak" => vec!["-c", &program, "0.1", "1"],
            "memleak -k" => vec!["-k", "0.1", "1"],
            "heapscan" => vec!["-p", &heap],
            _ => vec!["-d", "0.1"],
        };
        let name = command.split(' ').next().unwrap_or_default();
        let runs = harness::run(name, &options)?.status.success();
        ensure!(row["works"] == runs, "{row}");
        // heapscan traces nothing.
        ensure!(
            row["how"].is_null() != (runs && name != "heapscan"),
            "{row}"
        );
        let reasons = row["remarks"].as_array().context("no remarks")?;
        ensure!(runs || !reasons.is_empty(), "{row}");
        all &= runs;
    }
    // swapin cannot run where kprobes are not built in. The doctor says that they are missing.
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

fn tools_that_were_not_run_are_an_error() -> Result<()> {
    let mut doctor = Tool::start("memtriage", &["-j", "--doctor"])?;
    doctor.wait_for_output("\"memleak\"")?;
    let ended = doctor.interrupt()?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    let reason = "and the tools after it were run";
    ensure!(ended.stderr.contains(reason), "{ended:?}");
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
    let (machine, rows, status) = conditions_and_tools(Command::new(&alone).uid(65534).gid(65534))?;
    ensure!(unmet(&machine).contains(&"privileges"), "{machine:?}");
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

/// Nothing but heapscan can run without BTF. Without tracefs, everything can run that can run with it.
fn tools_without_btf_or_tracefs_tell_what_is_missing() -> Result<()> {
    let (with_all, _) = doctor(&mut Command::new(tool("memtriage")))?;
    let mut command = Command::new(tool("memtriage"));
    without(&mut command, &["/sys/kernel/tracing", "/sys/kernel/debug"]);
    let (machine, rows, _) = conditions_and_tools(&mut command)?;
    ensure!(unmet(&machine).contains(&"tracefs"), "{machine:?}");
    for (row, with_all) in rows.iter().zip(&with_all) {
        ensure!(row["works"] == with_all["works"], "{row}, else {with_all}");
    }

    let mut command = Command::new(tool("memtriage"));
    without(&mut command, &["/sys/kernel/btf"]);
    let (machine, rows, status) = conditions_and_tools(&mut command)?;
    ensure!(unmet(&machine).contains(&"BTF"), "{machine:?}");
    expect_only_heapscan(&rows, "CONFIG_DEBUG_INFO_BTF=y")?;
    ensure!(status.code() == Some(3), "{status}");
    Ok(())
}

/// Checks that heapscan works, which needs no BPF, and that each other tool does not, for the given reason.
fn expect_only_heapscan(rows: &[Value], reason: &str) -> Result<()> {
    for row in rows {
        let is_heapscan = row["command"] == "heapscan";
        let remark = row["remarks"][0].as_str().unwrap_or_default();
        ensure!(row["works"] == is_heapscan, "{row}");
        ensure!(is_heapscan || remark.contains(reason), "{row}");
    }
    Ok(())
}

/// Makes a command run where the kernel reports the lockdown state `state`. What lockdown forbids is not
/// simulated: the tools ask the kernel before they try.
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

/// Nothing but heapscan can run under "confidentiality". Under "integrity", everything can run that can run without lockdown.
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
    expect_only_heapscan(&rows, "boot with lockdown=integrity")?;
    ensure!(status.code() == Some(3), "{status}");
    Ok(())
}

/// Debian's and Ubuntu's kernels can be told to forbid perf events to processes without CAP_SYS_ADMIN.
fn tools_that_may_have_no_perf_events_tell_so() -> Result<()> {
    let _forbids = Setting::change("/proc/sys/kernel/perf_event_paranoid", "4")?;
    let folder = harness::scratch()?;
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
    for name in ["memtriage", "faults", "vmscan"] {
        harness::copy(&tool(name), &folder.path().join(name))?;
    }
    let mut capabilities =
        ",+bpf,+perfmon,+ipc_lock,+dac_read_search,+sys_ptrace,+syslog".to_owned();
    // 5.10 requires one more capability, which root cannot grant on every machine.
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
    // A kernel without the distributions' patch treats 4 as 2.
    let told = faults["remarks"].to_string().contains(remedy);
    ensure!(faults["works"] == true || told, "{faults}");
    ensure!(vmscan["works"] == true, "{vmscan}");
    Ok(())
}
