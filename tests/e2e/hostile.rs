//! Tools that run as root, on targets of an unprivileged user who has put something hostile where they
//! look (tests/hostile). What they trace is complete all the same, and they end when they are told to.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::errno::Errno;
use nix::pty::openpty;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use crate::harness::{self, Ended, Tool, Workload, eventually, workload};
use crate::memleak::{self, READY};

#[path = "../hostile/elf_file.rs"]
#[expect(dead_code, reason = "tests/foreign.rs has the other kinds")]
mod elf_file;

const LIVE: &str = "tracing brk(2)";
/// Who owns what is hostile.
const NOBODY: u32 = 65534;
const CALLS: &str = "101";
/// By when tables are made of files that were met once.
const TABLES: Duration = Duration::from_secs(2);
/// The calls of brk(2) that the dynamic loader makes when a program is started twice.
const STARTS: u64 = 2;
/// What root alone may read.
const SECRET: &str = "0 7fffffffffffffff secret_of_root\n";

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "hostile":
        what_is_no_regular_file_is_not_opened,
        a_file_that_is_cut_short_ends_no_tool [Once],
        a_file_that_changes_ends_no_tool [Once],
        a_perf_map_is_read_only_if_it_is_the_users_own,
        a_perf_map_that_is_a_hole_takes_no_memory [Once],
        names_obey_no_terminal,
        code_mapped_for_ever_takes_no_memory [Once],
        a_sandboxed_target_lives,
        names_of_a_library_are_not_forged [Once, UserNamespaces],
        more_libraries_than_descriptors_have_names [Once],
        more_processes_than_tables_are_complete [Once],
        mappings_that_change_leave_others_complete [Once],
        ctrl_c_is_heard_while_files_are_read [Once],
        a_terminal_shows_how_far_a_long_start_is [Once],
        storms_of_programs_are_counted [Once],
        a_storm_of_threads_is_exact [Once],
        storms_of_mappings_are_exact [Once],
    }
}

/// A folder of the unprivileged user, with a copy of a tool as the library that is mapped.
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

/// A file that root alone may read, in a folder that all may see.
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

/// Has brkstack count the calls of a workload, with these options.
fn count(mut program: Workload, options: &[&str]) -> Result<Ended> {
    let mut tool = Tool::start("brkstack", options)?;
    tool.wait_for(LIVE)?;
    let facts = program.work()?;
    let ended = tool.interrupt()?;
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

/// Whether somebody has opened the file since it is watched. An open of the path alone (O_PATH) is none.
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
            // Under a name of its own, as other tests run the same program.
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
        // memleak looks for functions in all that is mapped.
        let (_folder, file) = library()?;
        let mut program = Workload::start("hostile-mapped", &[action, text(&file), CALLS])?;
        let mut tool = Tool::start("memleak", &["-p", &program.pid(), "60"])?;
        tool.wait_for("allocator: glibc")?;
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
    tool.wait_for("allocator: glibc")?;
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
    // The same line in a file of his own names the code.
    let program = Workload::start("hostile-perf_map", &["name=compiled", CALLS])?;
    let pid = program.pid();
    let ended = count(program, &["-p", &pid])?;
    ensure!(ended.stdout.contains(";compiled 101"), "{ended:?}");
    Ok(())
}

fn a_perf_map_that_is_a_hole_takes_no_memory() -> Result<()> {
    let mut program = Workload::start("hostile-perf_map", &["hole=16", CALLS])?;
    let mut tool = Tool::start("brkstack", &["-p", &program.pid(), "1"])?;
    tool.wait_for(LIVE)?;
    program.work()?;
    tool.wait_until(|output| output.contains("hostile-perf_ma;"))?;
    let memory = tool.peak_kib()?;
    ensure!(memory < 64 << 10, "{memory} KiB");
    ensure!(tool.interrupt()?.status.success(), "it failed");
    Ok(())
}

fn names_obey_no_terminal() -> Result<()> {
    let name = "name=a\x1b]0;P\x07;b\u{9b}31m\u{202e}c\u{2028}d";
    for options in [&[][..], &["--text"], &["--json"]] {
        let mut program = Workload::start("hostile-perf_map", &[name, CALLS])?;
        let mut tool = Tool::start("brkstack", &[&["-p", &program.pid()], options].concat())?;
        tool.wait_for(LIVE)?;
        program.work()?;
        let ended = tool.interrupt()?;
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
    tool.wait_for(LIVE)?;
    let before = tool.peak_kib()?;
    program.work()?;
    let grown = tool.peak_kib()? - before;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(grown < 16 << 10, "by {grown} KiB");
    Ok(())
}

/// A return probe can be a system call of the target's (6.11 and later), as a probe on a nop can be (6.18 and
/// later), and its seccomp filter permits neither.
fn a_sandboxed_target_lives() -> Result<()> {
    let mut program = Workload::start("hostile-sandbox", &["1009", "4093"])?;
    let args = ["-o", "0", "-p", &program.pid(), "60"];
    let mut tool = Tool::start("memleak", &args)?;
    tool.wait_for(READY)?;
    let facts = program.work()?;
    let ended = tool.interrupt()?;
    ensure!(program.finish()?.success(), "the target was harmed");
    ensure!(facts["kept"] == "1009", "{facts:?}");
    let groups = memleak::last_report(&ended.stdout)?;
    let found = memleak::outstanding(&groups, "keep");
    ensure!(found == (1009 * 4093, 1009), "{found:?} in {groups:#?}");
    Ok(())
}

/// Two processes map a library, of which one is a user's that has another file at its path.
fn names_of_a_library_are_not_forged() -> Result<()> {
    // Of a tmpfs, whose inode numbers are small.
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
    let args = ["-n", "forged-", "-o", "0", "-T", "100", "60"];
    let mut tool = Tool::start("memleak", &args)?;
    tool.wait_for(READY)?;
    victim.work()?;
    attacker.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(ended.stdout.contains("through_plugin"), "{ended:?}");
    ensure!(!ended.stdout.contains("through_forged"), "{ended:?}");
    Ok(())
}

/// A process that maps eight times as many libraries as a tool may have files open. The functions of its own
/// program and of those that it had before have their names.
fn more_libraries_than_descriptors_have_names() -> Result<()> {
    const DESCRIPTORS: usize = 256;
    const FILES: usize = 8 * DESCRIPTORS;
    let folder = harness::scratch()?;
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
    let library = fs::read(workload("unwind-plugin.so"))?;
    for number in 0..FILES {
        fs::write(folder.path().join(number.to_string()), &library)?;
    }
    for (tool, live, function) in [
        ("brkstack", LIVE, "call_brk"),
        ("memleak", "probes in", "leak_malloc"),
    ] {
        let files = FILES.to_string();
        let args = ["files", &files, CALLS, text(folder.path())];
        let mut crowd = Workload::start("hostile-crowd", &args)?;
        let mut leaks = Workload::start("alloc", &["one", "malloc", "31", "4093"])?;
        let pids = [crowd.pid(), leaks.pid()].join(",");
        let limited = format!(r#"ulimit -n {DESCRIPTORS}; exec "$0" "$@""#);
        let mut command = Command::new("sh");
        command.args(["-c", &limited]).arg(harness::tool(tool));
        command.args(["-p", &pids]);
        if tool == "memleak" {
            command.args(["-o", "0", "60"]);
        }
        let mut running = Tool::spawn(&mut command)?;
        running.wait_for(live)?;
        let facts = crowd.work()?;
        leaks.work()?;
        let ended = running.interrupt()?;
        ensure!(ended.status.success(), "{ended:?}");
        ensure!(!ended.stderr.contains("no names"), "{}", ended.stderr);
        ensure!(ended.stdout.contains(function), "{ended:?}");
        if tool == "brkstack" {
            let line = format!("main;call_brk;syscall {}\n", facts["brk"]);
            ensure!(ended.stdout.contains(&line), "{line}: {}", ended.stdout);
        }
    }
    Ok(())
}

/// The stacks that brkstack's last object says it has walked, and how many of them are complete.
fn walked(ended: &Ended) -> Result<(u64, u64)> {
    let objects = ended.objects()?;
    let last = objects.iter().find(|object| object["type"] == "unwinding");
    let last = last.context("nothing was walked")?;
    let number = |name: &str| last[name].as_u64().context("no number");
    Ok((number("stacks")?, number("complete")?))
}

/// The calls that brkstack has counted of processes of this name.
fn counted(ended: &Ended, comm: &str) -> Result<u64> {
    let objects = ended.objects()?;
    let stacks = objects.iter().filter(|object| object["type"] == "stack");
    let own = stacks.filter(|stack| stack["comm"] == comm);
    Ok(own.filter_map(|stack| stack["count"].as_u64()).sum())
}

/// The calls that no map had room for, as brkstack says at its end.
fn lost_entries(objects: &[Value]) -> u64 {
    let lost = objects.iter().find(|object| object["type"] == "lost");
    let lost = lost.and_then(|object| object["lost"]["entries"].as_u64());
    lost.unwrap_or(0)
}

fn more_processes_than_tables_are_complete() -> Result<()> {
    const PROCESSES: u64 = 4501;
    const CALLS: u64 = 3;
    let folder = harness::scratch()?;
    let program = folder.path().join("hostile-many");
    harness::copy(&workload("hostile-crowd"), &program)?;
    let mut tool = Tool::start("brkstack", &["-j", "-n", "hostile-many"])?;
    tool.wait_for(LIVE)?;
    for processes in [1, PROCESSES] {
        let args = ["processes", &processes.to_string(), &CALLS.to_string()];
        let mut crowd = Workload::spawn(Command::new(&program).args(args))?;
        crowd.work()?;
        // The first has the tables of its files made, as long as it lives.
        thread::sleep(TABLES);
    }
    let ended = tool.interrupt()?;
    let calls = (1 + PROCESSES) * CALLS + STARTS;
    // So many keys at once may be more than a map has room for.
    let objects = ended.objects()?;
    let lost = lost_entries(&objects);
    let found = counted(&ended, "hostile-many")?;
    ensure!(
        found + lost == calls,
        "{found} and {lost}: {}",
        ended.stderr
    );
    let (stacks, complete) = walked(&ended)?;
    ensure!(
        stacks == calls && stacks - complete <= CALLS + STARTS,
        "{complete} of {stacks}: {}",
        ended.stderr
    );
    Ok(())
}

fn mappings_that_change_leave_others_complete() -> Result<()> {
    const FIRST: u64 = 101;
    const SECOND: u64 = 50021;
    let crowds = [(); 3].map(|()| Workload::start("hostile-crowd", &["mappings", "8009", "1"]));
    let (_folder, file) = library()?;
    let folder = harness::scratch()?;
    let program = folder.path().join("hostile-victim");
    harness::copy(&workload("hostile-mapped"), &program)?;
    let mut tool = Tool::start("brkstack", &["-j", "-n", "hostile-"])?;
    tool.wait_for(LIVE)?;
    for calls in [FIRST, SECOND] {
        let args = ["none", text(&file), &calls.to_string()];
        let mut victim = Workload::spawn(Command::new(&program).args(args))?;
        victim.work()?;
        // The first has the tables of its files made, as long as it lives.
        thread::sleep(TABLES);
    }
    let ended = tool.interrupt()?;
    for crowd in crowds {
        crowd?.work()?;
    }
    ensure!(counted(&ended, "hostile-victim")? == FIRST + SECOND + STARTS);
    let objects = ended.objects()?;
    let cut = objects
        .iter()
        .filter(|object| object["comm"] == "hostile-victim" && !object["truncated"].is_null());
    let cut: u64 = cut.filter_map(|stack| stack["count"].as_u64()).sum();
    ensure!(
        cut <= FIRST + STARTS,
        "{cut} stacks of the victim are cut: {}",
        ended.stderr
    );
    Ok(())
}

/// Thousands of programs one after the other: as children, and in one process, which stays the same one.
fn storms_of_programs_are_counted() -> Result<()> {
    const PROGRAMS: u64 = 5003;
    const CALLS: u64 = 3;
    for kind in ["programs", "itself"] {
        let folder = harness::scratch()?;
        let program = folder.path().join("hostile-storm");
        harness::copy(&workload("hostile-crowd"), &program)?;
        let args = [kind, &PROGRAMS.to_string(), &CALLS.to_string()];
        let mut storm = Workload::spawn(Command::new(&program).args(args))?;
        let args = ["-j", "--children", "-p", &storm.pid()];
        let mut tool = Tool::start("brkstack", &args)?;
        tool.wait_for(LIVE)?;
        let before = tool.peak_kib()?;
        let facts = storm.work()?;
        ensure!(facts["brk"] == (PROGRAMS * CALLS).to_string(), "{facts:?}");
        let grown = tool.peak_kib()? - before;
        let ended = tool.interrupt()?;
        // Each program's loader makes one.
        let calls = PROGRAMS * (CALLS + 1);
        let objects = ended.objects()?;
        let lost = lost_entries(&objects);
        let stacks = objects.iter().filter(|object| object["type"] == "stack");
        let found: u64 = stacks.filter_map(|stack| stack["count"].as_u64()).sum();
        ensure!(
            found + lost == calls,
            "{kind}: {found} and {lost} of {calls}: {}",
            ended.stderr
        );
        ensure!(grown < 16 << 10, "{kind}: by {grown} KiB");
    }
    Ok(())
}

fn a_storm_of_threads_is_exact() -> Result<()> {
    let mut storm = Workload::start("hostile-crowd", &["threads", "5003", "31"])?;
    let tool = memleak::attach(&storm, &["-o", "0", "60"])?;
    let facts = storm.work()?;
    ensure!(facts["kept"] == "5003", "{facts:?}");
    let ended = tool.interrupt()?;
    ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
    let found = memleak::outstanding(&memleak::last_report(&ended.stdout)?, "keep_block");
    ensure!(found == (5003 * 24, 5003), "{found:?}: {ended:?}");
    Ok(())
}

/// Code that comes, mostly to go at once, thousands of times in one process, which both tools see whole.
fn storms_of_mappings_are_exact() -> Result<()> {
    const CALLS: u64 = 3;
    for (kind, rounds) in [
        // About half of what a process may have mapped.
        ("pages", 30_011),
        ("unmapped", 100_003),
        ("written", 10_007),
        ("loaded", 10_007),
    ] {
        let (folder, library) = library()?;
        harness::copy(&workload("unwind-plugin.so"), &library)?;
        let rounds: u64 = rounds;
        let args = [kind, &rounds.to_string(), &CALLS.to_string()];
        let args = [&args[..], &[text(folder.path())]].concat();
        let mut storm = Workload::start("hostile-crowd", &args)?;
        let mut calls = Tool::start("brkstack", &["-j", "-p", &storm.pid()])?;
        calls.wait_for(LIVE)?;
        let blocks = memleak::attach(&storm, &["-o", "0", "-T", "1000", "60"])?;
        let before = [calls.peak_kib()?, blocks.peak_kib()?];
        let facts = storm.work()?;
        ensure!(facts["kept"] == rounds.to_string(), "{facts:?}");
        let grown = [
            calls.peak_kib()? - before[0],
            blocks.peak_kib()? - before[1],
        ];
        let [calls, blocks] = [calls.interrupt()?, blocks.interrupt()?];

        let objects = calls.objects()?;
        let stacks = objects.iter().filter(|object| object["type"] == "stack");
        let own = stacks.filter(|stack| stack["user_frames"].to_string().contains("call_brk"));
        let found: u64 = own.filter_map(|stack| stack["count"].as_u64()).sum();
        ensure!(found == rounds * CALLS, "{kind}: {found}: {calls:?}");
        let (walked, complete) = walked(&calls)?;
        ensure!(walked == complete, "{kind}: {complete} of {walked}");
        // What has too many mappings to remember has names for those that it began with.
        let forgets = calls
            .stderr
            .contains("mappings of processes with thousands");
        ensure!(forgets == (kind == "pages"), "{kind}: {}", calls.stderr);

        ensure!(!blocks.stderr.contains("lost"), "{kind}: {blocks:?}");
        let groups = memleak::last_report(&blocks.stdout)?;
        let found = memleak::outstanding(&groups, "keep_block");
        ensure!(
            found == (rounds * 24, rounds),
            "{kind}: {found:?}: {blocks:?}"
        );
        ensure!(
            grown.iter().all(|&kib| kib < 24 << 10),
            "{kind}: by {grown:?} KiB"
        );
    }
    Ok(())
}

/// Files that take half a minute to read.
const SLOW_FILES: usize = 200;

/// A process that has them mapped.
fn with_slow_files() -> Result<(TempDir, Workload)> {
    let folder = harness::scratch()?;
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
    for number in 0..SLOW_FILES {
        let file = File::create(folder.path().join(number.to_string()))?;
        elf_file::write(elf_file::Kind::EmptySymbols, &file)?;
    }
    let args = ["files", &SLOW_FILES.to_string(), "1", text(folder.path())];
    let mut crowd = Workload::start("hostile-crowd", &args)?;
    crowd.work()?;
    Ok((folder, crowd))
}

fn ctrl_c_is_heard_while_files_are_read() -> Result<()> {
    let (_folder, crowd) = with_slow_files()?;
    let tool = Tool::start("memleak", &["-p", &crowd.pid(), "60"])?;
    let status = format!("/proc/{}/status", tool.pid());
    eventually("the tool has taken SIGINT over", || {
        let status = fs::read_to_string(&status)?;
        let blocked = status
            .lines()
            .find_map(|line| line.strip_prefix("SigBlk:\t"));
        let blocked = u64::from_str_radix(blocked.context("no mask")?, 16)?;
        Ok(blocked & 1 << (Signal::SIGINT as u64 - 1) != 0)
    })?;
    let ended = tool.interrupt()?;
    let left_out = ended.stderr.matches("the end was asked for").count();
    ensure!(left_out > SLOW_FILES / 2, "{left_out}: {ended:?}");
    Ok(())
}

fn a_terminal_shows_how_far_a_long_start_is() -> Result<()> {
    let (_folder, crowd) = with_slow_files()?;
    let terminal = openpty(None, None)?;
    let mut tool = Command::new("timeout")
        .arg("60")
        .arg(harness::tool("memleak"))
        .args(["-p", &crowd.pid(), "60"])
        .stdout(Stdio::null())
        .stderr(terminal.slave)
        .spawn()?;
    let mut screen = File::from(terminal.master);
    let mut shown = String::new();
    let mut bytes = [0; 4096];
    let line = "\rsearching files for allocators: ";
    // Once nobody has the terminal, its end is an error.
    while let Ok(length @ 1..) = screen.read(&mut bytes) {
        shown += &String::from_utf8_lossy(&bytes[..length]).replace("\x1b[K", "");
        if shown.matches(line).count() == 2 {
            let pid = Pid::from_raw(tool.id().cast_signed());
            kill(pid, Signal::SIGTERM)?;
        }
    }
    tool.wait()?;
    let (_, rest) = shown.split_once(line).context(shown.clone())?;
    let (done, all) = rest.split_once(" of ").context(shown.clone())?;
    let all: String = all.chars().take_while(char::is_ascii_digit).collect();
    let (done, all): (usize, usize) = (done.parse()?, all.parse()?);
    ensure!(done < all && all > SLOW_FILES, "{done} of {all}: {shown}");
    Ok(())
}
