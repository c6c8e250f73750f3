//! Target programs that end, that memleak starts, and that cannot be traced.

use std::fs;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use super::{Group, READY, attach, last_report, outstanding};
use crate::harness::{self, Tool, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak":
        target_exits_first,
        a_command_of_a_few_milliseconds,
        the_status_of_a_command_is_passed_on [Once],
        driven_as_bcc_drives_its_own [Once],
        silence_is_explained,
        a_reader_that_leaves_ends_it,
        bad_targets_are_named,
        a_32_bit_process_is_refused [Compat],
        missing_btf_is_named,
    }
}

fn target_exits_first() -> Result<()> {
    let mut workload = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
    let tool = attach(&workload, &["60"])?;
    workload.work()?;
    workload.finish()?;
    let ended = tool.wait()?;
    ensure!(ended.status.success(), "{ended:?}");
    let groups = last_report(&ended.stdout)?;
    is_leak_of_main(&groups)
}

/// Checks that `leak_malloc` has leaked 31 blocks, and that all stacks have the names of a program that has ended.
fn is_leak_of_main(groups: &[Group]) -> Result<()> {
    ensure!(
        outstanding(groups, "leak_malloc") == (31 * 4093, 31),
        "{groups:#?}"
    );
    ensure!(
        groups.iter().all(|group| group.passes("main")),
        "names are lost: {groups:#?}"
    );
    Ok(())
}

fn a_command_of_a_few_milliseconds() -> Result<()> {
    // With /dev/null as stdin the workload does not wait for anybody.
    let command = format!(
        "'{}' one malloc 31 4093",
        harness::workload("alloc").display()
    );
    // If memleak did not notice the end, it would run for an hour, longer than the harness permits.
    let ended = harness::run("memleak", &["-c", &command, "3600"])?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(
        ended.stdout.contains("\ndone\n"),
        "its output is missing: {}",
        ended.stdout
    );
    let report = ended.stdout.find('[').map_or("", |at| &ended.stdout[at..]);
    let groups = last_report(report)?;
    is_leak_of_main(&groups)
}

fn the_status_of_a_command_is_passed_on() -> Result<()> {
    let ended = harness::run("memleak", &["-c", "sh -c 'exit 42'"])?;
    ensure!(ended.status.code() == Some(42), "{ended:?}");
    let ended = harness::run("memleak", &["-c", "sh -c 'kill -KILL $$'"])?;
    ensure!(ended.status.code() == Some(128 + 9), "{ended:?}");

    // The command that memleak has started ends with memleak, and that is no failure.
    let pid_file = harness::scratch()?;
    let path = pid_file.path().join("pid");
    let command = format!("sh -c 'echo $$ >{}; exec sleep 1000'", path.display());
    let mut tool = Tool::start("memleak", &["-c", &command, "1", "1"])?;
    tool.wait_for_stderr(READY)?;
    let ended = tool.wait()?;
    ensure!(ended.status.success(), "{ended:?}");
    let pid = fs::read_to_string(&path).context("the command did not run")?;
    ensure!(
        !Path::new("/proc").join(pid.trim()).exists(),
        "the command still runs"
    );
    Ok(())
}

/// The protocol is that of BCC's own test of memleak: a report, a newline into the command's stdin, and the first
/// number of the last line with "byte" in it.
fn driven_as_bcc_drives_its_own() -> Result<()> {
    let kinds = [
        "malloc",
        "calloc",
        "realloc",
        "posix_memalign",
        "valloc",
        "memalign",
        "pvalloc",
        "aligned_alloc",
    ];
    // A block must be half a second old at the second report.
    let (kinds, interval) = if harness::in_guest() {
        (&kinds[..1], "4")
    } else {
        (&kinds[..], "1")
    };
    for kind in kinds {
        let command = format!(
            "{} one {kind} 1 30000",
            harness::workload("alloc").display()
        );
        let mut child = Command::new(harness::tool("memleak"))
            .args(["-c", &command, "-T", "1", interval, "2"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let mut stdin = child.stdin.take().context("no stdin")?;
        let mut stdout = std::io::BufReader::new(child.stdout.take().context("no stdout")?);
        let mut line = String::new();
        while !line.contains("with outstanding allocations") {
            line.clear();
            let read = std::io::BufRead::read_line(&mut stdout, &mut line)?;
            ensure!(read > 0, "{kind}: no report");
        }
        stdin.write_all(b"\n")?;
        let mut rest = String::new();
        std::io::Read::read_to_string(&mut stdout, &mut rest)?;
        child.wait()?;
        let last = rest
            .lines()
            .rfind(|line| line.contains("byte"))
            .context("nothing reported")?;
        ensure!(
            last.split_whitespace().next() == Some("30000"),
            "{kind}: {last:?}"
        );
    }
    Ok(())
}

fn silence_is_explained() -> Result<()> {
    let workload = Workload::start("alloc", &["hold"])?;
    let mut tool = attach(&workload, &["60"])?;
    tool.wait_for_stderr("no allocation or free yet")?;
    tool.interrupt()?;
    Ok(())
}

fn a_reader_that_leaves_ends_it() -> Result<()> {
    let workload = Workload::start("alloc", &["hold"])?;
    let script = format!(
        "'{}' -p {} 1 2>/dev/null | head -n 1; echo \"status ${{PIPESTATUS:-none}}\"",
        harness::tool("memleak").display(),
        workload.pid()
    );
    // A shell without PIPESTATUS cannot tell the tool's status, so the tool's side of the pipe writes it into a file.
    let status = harness::scratch()?;
    let file = status.path().join("status");
    let script = script.replace(
        "2>/dev/null |",
        &format!(
            "2>/dev/null && echo 0 >{0} || echo $? >{0}; }} |",
            file.display()
        ),
    );
    let output = Command::new("sh")
        .arg("-c")
        .arg(format!("{{ {script}"))
        .output()?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    ensure!(
        stdout
            .lines()
            .next()
            .is_some_and(|line| line.contains("Top 10 stacks")),
        "{output:?}"
    );
    ensure!(
        fs::read_to_string(&file)?.trim() == "0",
        "{}",
        fs::read_to_string(&file)?
    );
    Ok(())
}

fn bad_targets_are_named() -> Result<()> {
    let fails =
        |args: &[&str], code, remedy| harness::expect_refusal("memleak", args, code, remedy);
    fails(&["-p", "4194305"], 1, "no process has PID 4194305")?;
    fails(&["-p", "2"], 1, "is a kernel thread")?;
    fails(&["-c", "no-such-command-here"], 1, "command not found")?;
    fails(
        &["-c", "/etc/passwd"],
        1,
        "is not a program that may be run",
    )?;
    fails(&["-c", "'open"], 1, "unbalanced quotes")?;
    fails(
        &["-p", "1", "-z", "5", "-Z", "4"],
        2,
        "--min-size (-z) 5 is larger than --max-size (-Z) 4",
    )?;

    let go = Workload::start("alloc-go-bare", &["hold"])?;
    fails(
        &["-p", &go.pid()],
        1,
        "is a Go program without an allocator of C",
    )?;
    let bare = Workload::start("alloc-static-stripped", &["hold"])?;
    fails(
        &["-p", &bare.pid()],
        1,
        "none of alloc-static-stripped defines malloc and free",
    )?;

    let mut threaded = Workload::start("alloc", &["threads", "1", "1", "1", "1"])?;
    threaded.work()?;
    let gone = threaded.pid();
    threaded.finish()?;
    fails(&["-p", &gone], 1, "no process has PID")?;
    Ok(())
}

fn a_32_bit_process_is_refused() -> Result<()> {
    let workload = Workload::start("compat32", &[])?;
    let ended = harness::run("memleak", &["-p", &workload.pid()])?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    ensure!(
        ended
            .stderr
            .contains(&format!("is not an {} program", harness::arch::NAME)),
        "{ended:?}"
    );
    Ok(())
}

fn missing_btf_is_named() -> Result<()> {
    let mut command = Command::new(harness::tool("memleak"));
    command.args(["-p", "1"]);
    // SAFETY: system calls between fork and exec.
    unsafe {
        command.pre_exec(|| {
            use nix::mount::{MsFlags, mount};
            const NONE: Option<&str> = None;
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?;
            mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE)?;
            mount(
                NONE,
                "/sys/kernel/btf",
                Some("tmpfs"),
                MsFlags::empty(),
                NONE,
            )?;
            Ok(())
        });
    }
    let ended = Tool::spawn(&mut command)?.wait()?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    ensure!(
        ended.stderr.contains("CONFIG_DEBUG_INFO_BTF=y"),
        "{ended:?}"
    );
    Ok(())
}
