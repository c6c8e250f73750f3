//! Tools that run as root, on targets of an unprivileged user who has put something hostile where the tools look
//! (tests/hostile). The traces are complete all the same, and the tools end on request.

mod fuse;
mod slow_files;
mod storms;

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tempfile::TempDir;

use crate::harness::{self, Tool, ToolOutput, Workload, workload};
use crate::{brkstack, memleak};

#[path = "../hostile/elf_file.rs"]
#[expect(dead_code, reason = "tests/foreign.rs has the other kinds")]
mod elf_file;

/// User who owns the hostile files.
const NOBODY: u32 = 65534;
const CALLS: &str = "101";
/// Content of a file that only root may read.
const SECRET: &str = "0 7fffffffffffffff secret_of_root\n";

pub(crate) fn tests() -> Vec<Trial> {
    let own = harness::tests! { "hostile":
        what_is_no_regular_file_is_not_opened,
        a_file_that_is_cut_short_ends_no_tool [Once],
        a_file_that_changes_ends_no_tool [Once],
        a_perf_map_is_read_only_if_it_is_the_users_own,
        a_perf_map_that_is_a_hole_takes_no_memory [Once],
        names_obey_no_terminal,
        code_mapped_for_ever_takes_no_memory [Once],
        a_sandboxed_target_lives,
        names_of_a_library_are_not_forged [Once, UserNamespaces],
    };
    [own, fuse::tests(), slow_files::tests(), storms::tests()]
        .into_iter()
        .flatten()
        .collect()
}

/// Makes a directory of the unprivileged user, with a copy of a tool in it: the library that is mapped.
fn library() -> Result<(TempDir, PathBuf)> {
    let folder = harness::scratch()?;
    let path = folder.path().join("l.so");
    harness::copy(&harness::tool("memleak"), &path)?;
    for path in [folder.path(), &path] {
        chown(path, Some(NOBODY), Some(NOBODY)).context("failed to give a file away")?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    }
    Ok((folder, path))
}

/// Makes a file that only root may read, in a directory that everybody may read.
fn secret() -> Result<(TempDir, PathBuf)> {
    let folder = harness::scratch()?;
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
    let path = folder.path().join("secret");
    File::create(&path)?.write_all(SECRET.as_bytes())?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    Ok((folder, path))
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

/// Runs brkstack with these options on a workload, and checks the count of its calls.
fn count(mut program: Workload, options: &[&str]) -> Result<ToolOutput> {
    let mut tool = Tool::start("brkstack", options)?;
    tool.wait_for_stderr(brkstack::READY)?;
    let facts = program.work()?;
    let ended = tool.interrupt()?;
    program.finish()?;
    ensure!(ended.status.success(), "{ended:?}");
    let counted = ended
        .stdout
        .lines()
        .filter(|line| line.starts_with("hostile-"));
    let weights = counted.map(|line| {
        line.rsplit(' ')
            .next()
            .context("no weight")?
            .parse::<u64>()
            .context("no number")
    });
    let sum: u64 = weights.sum::<Result<_>>()?;
    ensure!(
        sum.to_string() == facts["brk"],
        "{sum} of {}: {ended:?}",
        facts["brk"]
    );
    Ok(ended)
}

/// Whether a process has opened the file since the watch began. Opening the path alone (O_PATH) does not count.
fn was_opened(watch: &Inotify) -> Result<bool> {
    match watch.read_events() {
        Ok(events) => Ok(!events.is_empty()),
        Err(Errno::EAGAIN) => Ok(false),
        Err(error) => Err(error).context("failed to read who opened the file"),
    }
}

fn what_is_no_regular_file_is_not_opened() -> Result<()> {
    let (_secret_folder, secret) = secret()?;
    let link = format!("link={}", text(&secret));
    for action in ["fifo", "link=/dev/ptmx", &link] {
        for all_processes in [false, true] {
            let (folder, file) = library()?;
            // The program has a name of its own, because other tests run the same program.
            let own = folder.path().join("hostile-irregular");
            harness::copy(&workload("hostile-mapped"), &own)?;
            let args = [action, text(&file), CALLS];
            let program = Workload::spawn(Command::new(&own).args(args))?;
            let watch = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
            watch.add_watch(&secret, AddWatchFlags::IN_OPEN)?;
            let pid = program.pid();
            let options: &[&str] = if all_processes {
                &["-n", "hostile-irregul"]
            } else {
                &["-p", &pid]
            };
            count(program, options).with_context(|| action.to_owned())?;
            ensure!(!was_opened(&watch)?, "{action}: a link was followed");
        }
        // memleak searches every mapped file for functions.
        let (_folder, file) = library()?;
        let mut program = Workload::start("hostile-mapped", &[action, text(&file), CALLS])?;
        let mut tool = Tool::start("memleak", &["-p", &program.pid(), "60"])?;
        tool.wait_for_stderr("allocator: glibc")?;
        program.work()?;
        ensure!(tool.interrupt()?.status.success(), "{action}");
    }
    Ok(())
}

fn a_file_that_is_cut_short_ends_no_tool() -> Result<()> {
    let (_folder, file) = library()?;
    let program = Workload::start("hostile-mapped", &["shrink", text(&file), CALLS])?;
    let pid = program.pid();
    count(program, &["-p", &pid])?;
    let length = fs::metadata(&file)?.len();
    ensure!(
        length == 4096,
        "{length} bytes are left: nobody has opened it"
    );

    let (_folder, file) = library()?;
    let mut program = Workload::start("hostile-mapped", &["shrink", text(&file), CALLS])?;
    let mut tool = Tool::start("memleak", &["-p", &program.pid(), "60"])?;
    tool.wait_for_stderr("allocator: glibc")?;
    let facts = program.work()?;
    ensure!(facts["seen"] != "0", "nobody has opened it");
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(())
}

fn a_file_that_changes_ends_no_tool() -> Result<()> {
    for _ in 0..5 {
        let (_folder, file) = library()?;
        let program = Workload::start("hostile-mapped", &["flip", text(&file), CALLS])?;
        let pid = program.pid();
        count(program, &["-p", &pid])?;
    }
    Ok(())
}

fn a_perf_map_is_read_only_if_it_is_the_users_own() -> Result<()> {
    let (_secret_folder, secret) = secret()?;
    let link = format!("link={}", text(&secret));
    for what in ["fifo", "link=/dev/zero", &link] {
        let program = Workload::start("hostile-perf_map", &[what, CALLS])?;
        let pid = program.pid();
        let ended = count(program, &["-p", &pid]).with_context(|| what.to_owned())?;
        ensure!(!ended.stdout.contains("secret_of_root"), "{ended:?}");
    }
    // The same line in a file that belongs to the process's user names the code.
    let program = Workload::start("hostile-perf_map", &["name=compiled", CALLS])?;
    let pid = program.pid();
    let ended = count(program, &["-p", &pid])?;
    ensure!(ended.stdout.contains(";compiled 101"), "{ended:?}");
    Ok(())
}

fn a_perf_map_that_is_a_hole_takes_no_memory() -> Result<()> {
    let mut program = Workload::start("hostile-perf_map", &["hole=16", CALLS])?;
    let mut tool = Tool::start("brkstack", &["-p", &program.pid(), "1"])?;
    tool.wait_for_stderr(brkstack::READY)?;
    program.work()?;
    tool.wait_until(|output| output.contains("hostile-perf_ma;"))?;
    let memory = tool.peak_kib()?;
    ensure!(memory < 64 << 10, "{memory} KiB");
    ensure!(tool.interrupt()?.status.success(), "it failed");
    program.finish()?;
    Ok(())
}

fn names_obey_no_terminal() -> Result<()> {
    let name = "name=a\x1b]0;P\x07;b\u{9b}31m\u{202e}c\u{2028}d";
    for options in [&[][..], &["--text"], &["--json"]] {
        let mut program = Workload::start("hostile-perf_map", &[name, CALLS])?;
        let mut tool = Tool::start("brkstack", &[&["-p", &program.pid()], options].concat())?;
        tool.wait_for_stderr(brkstack::READY)?;
        program.work()?;
        let ended = tool.interrupt()?;
        program.finish()?;
        ensure!(
            ended.stdout.contains("202e"),
            "the name is missing: {ended:?}"
        );
        let raw = |c: char| c != '\n' && (c.is_control() || "\u{202e}\u{2028}".contains(c));
        let of_his: String = ended.stdout.replace('\t', " ");
        ensure!(!of_his.contains(raw), "{ended:?}");
    }
    Ok(())
}

fn code_mapped_for_ever_takes_no_memory() -> Result<()> {
    let mut program = Workload::start("hostile-remap", &["1000003"])?;
    let mut tool = Tool::start("brkstack", &["-p", &program.pid()])?;
    tool.wait_for_stderr(brkstack::READY)?;
    let before = tool.peak_kib()?;
    program.work()?;
    let grown = tool.peak_kib()? - before;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(grown < 16 << 10, "by {grown} KiB");
    Ok(())
}

/// A return probe can execute a system call in the target process (6.11 and later), as can a probe on a nop (6.18
/// and later). The target's seccomp filter permits neither.
fn a_sandboxed_target_lives() -> Result<()> {
    let mut program = Workload::start("hostile-sandbox", &["1009", "4093"])?;
    let args = ["-o", "0", "-p", &program.pid(), "60"];
    let mut tool = Tool::start("memleak", &args)?;
    tool.wait_for_stderr(memleak::READY)?;
    let facts = program.work()?;
    let ended = tool.interrupt()?;
    ensure!(program.finish()?.success(), "the target was harmed");
    ensure!(facts["kept"] == "1009", "{facts:?}");
    let groups = memleak::last_report(&ended.stdout)?;
    let found = memleak::outstanding(&groups, "keep");
    ensure!(found == (1009 * 4093, 1009), "{found:?} in {groups:#?}");
    Ok(())
}

/// Two processes map a library. One process belongs to a user who has another file at the library's path.
fn names_of_a_library_are_not_forged() -> Result<()> {
    // The directory is in a tmpfs, whose inode numbers are small.
    let folder = tempfile::tempdir_in("/dev/shm")?;
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
    let file = |name: &str| folder.path().join(name);
    let [library, fake, mounts] = ["forged-victim-plugin.so", "fake.so", "mounts"].map(file);
    harness::copy(&workload("unwind-plugin.so"), &library)?;
    let mut bytes = fs::read(&library)?;
    let names = [&b"through_plugin"[..], b"through_forged"];
    while let Some(at) = memchr::memmem::find(&bytes, names[0]) {
        bytes[at..at + names[1].len()].copy_from_slice(names[1]);
    }
    fs::write(&fake, bytes)?;
    fs::create_dir(&mounts)?;
    let [victim, attacker] = ["forged-victim", "forged-attacker"].map(file);
    harness::copy(&workload("unwind"), &victim)?;
    harness::copy(&workload("hostile-spoof"), &attacker)?;

    let mut victim = Workload::spawn(Command::new(victim).args(["plugin", "101"]))?;
    let args = [&library, &fake, &mounts];
    let mut attacker = Workload::spawn(Command::new(attacker).args(args))?;
    // With -n, the mappings of all processes are read, and other tests map more than the log takes.
    let pids = [victim.pid(), attacker.pid()].join(",");
    let args = ["-p", &pids, "-o", "0", "-T", "100", "60"];
    let mut tool = Tool::start("memleak", &args)?;
    tool.wait_for_stderr(memleak::READY)?;
    victim.work()?;
    attacker.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(ended.stdout.contains("through_plugin"), "{ended:?}");
    ensure!(!ended.stdout.contains("through_forged"), "{ended:?}");
    Ok(())
}

/// Returns the number of calls that brkstack has counted for processes of this name.
fn counted(ended: &ToolOutput, comm: &str) -> Result<u64> {
    let objects = ended.objects()?;
    let stacks = objects.iter().filter(|object| object["type"] == "stack");
    let own = stacks.filter(|stack| stack["comm"] == comm);
    Ok(own.filter_map(|stack| stack["count"].as_u64()).sum())
}
