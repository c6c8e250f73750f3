//! Java names from perf maps that HotSpot is requested (`--java-names`), without a JDK and without harm.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use crate::harness::{self, Tool, ToolOutput, Workload};
use crate::java;
use crate::java_kits::{self, BYTES, COUNT, Java};

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "java_names":
        a_perf_map_is_asked_for [Host],
        names_are_those_of_the_map_that_was_asked_for [Host],
        a_virtual_machine_in_a_container_is_asked [Host],
        a_virtual_machine_that_refuses_is_not_asked [Host],
        a_virtual_machine_that_would_be_killed_gets_no_signal [Host],
    }
}

/// User and group that have nothing in common with the tool's.
pub(crate) const NOBODY: (u32, u32) = (65534, 60001);
/// Options of Java that compile all functions.
const COMPILED: [&str; 3] = ["-XX:-Inline", "-XX:-TieredCompilation", "-Xcomp"];
/// Time limit for the tool to ask, or to ask again.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Files that a process may leave in its /tmp when it is requested a perf map.
pub(crate) struct Traces {
    map: PathBuf,
    socket: PathBuf,
    trigger: PathBuf,
    /// Folder of the process's open descriptors, and the map's path as the process sees it.
    descriptors: PathBuf,
    own_map: PathBuf,
}

impl Traces {
    pub(crate) fn of(pid: &str) -> Self {
        Self::in_root(Path::new("/"), pid, pid)
    }

    /// Returns the files of a process with the root `root`, and with the PID `number` in its own PID namespace.
    fn in_root(root: &Path, pid: &str, number: &str) -> Self {
        let file = |name: &str| root.join("tmp").join(name);
        let map = format!("perf-{number}.map");
        Self {
            map: file(&map),
            socket: file(&format!(".java_pid{number}")),
            trigger: file(&format!(".attach_pid{number}")),
            descriptors: PathBuf::from(format!("/proc/{pid}/fd")),
            own_map: Path::new("/tmp").join(map),
        }
    }

    pub(crate) fn has_map(&self) -> bool {
        self.map.exists()
    }

    /// Waits until the map is written. The tool asks for it when its probes are live.
    fn wait_for_map(&self) -> Result<()> {
        let begun = Instant::now();
        while !self.has_map() || !self.is_written()? {
            ensure!(begun.elapsed() < TIMEOUT, "not asked");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Whether HotSpot has closed the map.
    fn is_written(&self) -> Result<bool> {
        let descriptors = fs::read_dir(&self.descriptors)?.flatten();
        let mut files = descriptors.filter_map(|entry| fs::read_link(entry.path()).ok());
        Ok(files.all(|file| file != self.own_map))
    }

    /// Makes the process, which already listens, write its map once more.
    fn ask_again(&self) -> Result<()> {
        let mut socket = UnixStream::connect(&self.socket)?;
        socket.write_all(b"1\0jcmd\0Compiler.perfmap\0\0\0")?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer)?;
        ensure!(answer.starts_with("0\n"), "{answer}");
        Ok(())
    }

    /// Replaces the map of a process of [`NOBODY`], which cannot write it again. In the new map, the workload's
    /// functions have names that are nowhere else.
    fn rename_functions(&self) -> Result<String> {
        let map = fs::read_to_string(&self.map)?;
        let map = map.replace(" Frames", " Renamed");
        fs::remove_file(&self.map)?;
        fs::write(&self.map, &map)?;
        fs::set_permissions(&self.map, Permissions::from_mode(0o444))?;
        chown(&self.map, Some(NOBODY.0), Some(NOBODY.1))?;
        Ok(map)
    }

    fn expect_none(&self) -> Result<()> {
        for path in [&self.map, &self.socket, &self.trigger] {
            ensure!(!path.exists(), "{}", path.display());
        }
        Ok(())
    }
}

impl Drop for Traces {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.map);
    }
}

/// Starts memleak with a list of each block of the workload.
fn trace(pid: &str, more: &[&str]) -> Result<Tool> {
    // The interval comes last, and is left to the caller.
    let each_block = harness::each_block(BYTES);
    let (_interval, options) = each_block.split_last().context("no options")?;
    let mut tool = Tool::start("memleak", &[options, &["-p", pid], more].concat())?;
    tool.wait_for_stderr("allocator: ")?;
    Ok(tool)
}

/// Returns the functions of a map: start address and name.
fn functions(map: &str) -> BTreeMap<u64, &str> {
    let lines = map.lines().filter_map(function);
    lines.map(|(start, _, name)| (start, name)).collect()
}

/// Parses a line of a map: start address, size in bytes, and name of a function.
fn function(line: &str) -> Option<(u64, u64, &str)> {
    let (start, rest) = line.split_once(' ')?;
    let (size, name) = rest.split_once(' ')?;
    let number = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    Some((number(start)?, number(size)?, name))
}

/// Waits until a map has a function that is first called, and compiled, while the tool traces.
fn wait_for_later_code(map: &Path) -> Result<()> {
    let begun = Instant::now();
    while !fs::read_to_string(map)?.contains(" Frames$Plain.run(") {
        ensure!(begun.elapsed() < TIMEOUT, "asked once only");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// Compares the frames of compiled functions with the names in a map. Returns the number of these frames.
fn compare(ended: &ToolOutput, map: &str) -> Result<usize> {
    let (functions, objects) = (functions(map), ended.objects()?);
    let frames = objects
        .iter()
        .filter_map(|row| row["user_frames"].as_array());
    let mut compared = 0;
    for frame in frames.flatten().filter(|frame| frame["kind"] == "native") {
        let (Some(_), Some(name)) = (java::method(frame), frame["symbol"].as_str()) else {
            continue;
        };
        let address = frame["address"].as_str().context("no address")?;
        let address = u64::from_str_radix(address.trim_start_matches("0x"), 16)?;
        let written = functions.range(..address).next_back();
        let written = written.map(|(_, name)| *name);
        ensure!(written == Some(name), "{written:?} is called {name}");
        compared += 1;
    }
    Ok(compared)
}

/// Once the tool is ready, HotSpot writes a map, as its own user and not as ours. The tool asks again when there
/// is later code. The frames equal Java's own record, with the names of the map.
fn a_perf_map_is_asked_for() -> Result<()> {
    for kit in java_kits::kits()? {
        let java = Java::compile(&kit)?;
        fs::set_permissions(java.folder(), Permissions::from_mode(0o777))?;
        let mut workload = java.start_as(NOBODY, &COMPILED, &[&COUNT.to_string()])?;
        let pid = workload.pid();
        let traces = Traces::of(&pid);
        trace(&pid, &[])?.interrupt()?;
        traces.expect_none()?;

        let tool = trace(&pid, &["--java-names", "1"])?;
        traces.wait_for_map()?;
        let metadata = fs::metadata(&traces.map);
        let metadata = metadata.with_context(|| format!("{} wrote none", kit.display()))?;
        ensure!((metadata.uid(), metadata.gid()) == NOBODY, "{metadata:?}");
        let before = fs::read_to_string(&traces.map)?;
        ensure!(!before.contains(" Frames$Plain.run("), "nothing is new");
        workload.work()?;
        wait_for_later_code(&traces.map)?;
        let ended = tool.interrupt()?;
        ensure!(!ended.stderr.contains("not queried"), "{}", ended.stderr);
        ensure!(!traces.trigger.exists(), "the trigger is left");
        java::expect_all(&ended, &java.truth()?)?;

        let asked = fs::read_to_string(&traces.map)?;
        let compared = compare(&ended, &asked)?;
        ensure!(compared > 100, "{compared} frames");
        // jcmd is HotSpot's own way to be asked, by its own user. HotSpot may have compiled a few functions since.
        fs::remove_file(&traces.map)?;
        expect_jcmd(&kit, &pid)?;
        let by_jcmd = fs::read_to_string(&traces.map)?;
        let [asked, by_jcmd] = [&asked, &by_jcmd].map(|map| map.lines().collect::<BTreeSet<_>>());
        let same = asked.intersection(&by_jcmd).count();
        ensure!(
            same * 100 >= asked.len() * 99 && same > 500,
            "{same} of {}",
            asked.len()
        );
        eprintln!(
            "{}: {compared} frames as in the map, {same} of its {} lines as by jcmd",
            kit.display(),
            asked.len()
        );
        ensure!(workload.finish()?.success());
    }
    Ok(())
}

/// The map is replaced by a map that HotSpot has not written. The names show whether they come from the map or
/// from memory.
fn names_are_those_of_the_map_that_was_asked_for() -> Result<()> {
    for kit in java_kits::kits()? {
        let java = Java::compile(&kit)?;
        fs::set_permissions(java.folder(), Permissions::from_mode(0o777))?;
        let workload = java.start_as(NOBODY, &COMPILED, &[&COUNT.to_string()])?;
        let pid = workload.pid();
        expect_renamed(workload, &pid, &Traces::of(&pid))
            .with_context(|| kit.display().to_string())?;
    }
    Ok(())
}

/// The virtual machine has another PID in its own namespace than outside, and a /tmp that only its mount namespace has.
fn a_virtual_machine_in_a_container_is_asked() -> Result<()> {
    for kit in java_kits::kits()? {
        let java = Java::compile(&kit)?;
        fs::set_permissions(java.folder(), Permissions::from_mode(0o777))?;
        let mut container = harness::container(java.folder());
        container.args(["setpriv", "--reuid", &NOBODY.0.to_string(), "--regid"]);
        container.args([&NOBODY.1.to_string(), "--clear-groups"]);
        let workload = java.start_by(container, &COMPILED, &[&COUNT.to_string()])?;
        let pid = workload.pid_in_container()?;
        let root = PathBuf::from(format!("/proc/{pid}/root"));
        expect_renamed(workload, &pid, &Traces::in_root(&root, &pid, "1"))
            .with_context(|| kit.display().to_string())?;
        for number in [&pid, "1"] {
            Traces::of(number).expect_none()?;
        }
    }
    Ok(())
}

/// Checks that, once a map was requested, the workload's functions have the names of the map that has replaced it.
fn expect_renamed(mut workload: Workload, pid: &str, traces: &Traces) -> Result<()> {
    // One report: an earlier one has the names of an earlier map.
    let tool = trace(pid, &["--java-names", "3600"])?;
    traces.wait_for_map()?;
    workload.work()?;
    traces.ask_again()?;
    let map = traces.rename_functions()?;
    let ended = tool.interrupt()?;
    ensure!(!ended.stderr.contains("not queried"), "{}", ended.stderr);
    ensure!(!traces.trigger.exists(), "the trigger is left");
    let renamed: Vec<(u64, u64, &str)> = map.lines().filter_map(function).collect();
    let objects = ended.objects()?;
    let frames = objects
        .iter()
        .filter_map(|row| row["user_frames"].as_array());
    let mut compared = 0;
    for frame in frames.flatten().filter(|frame| frame["kind"] == "native") {
        let address = frame["address"].as_str().context("no address")?;
        let address = u64::from_str_radix(address.trim_start_matches("0x"), 16)?;
        let mut there = renamed
            .iter()
            .filter(|(start, size, _)| address.wrapping_sub(*start) < *size);
        let Some((.., name)) = there.next_back() else {
            continue;
        };
        ensure!(
            frame["symbol"] == *name,
            "{name} is in the map: {frame}; {}",
            ended.stderr
        );
        compared += usize::from(name.contains(" Renamed"));
    }
    ensure!(compared > 100, "{compared} frames: {}", ended.stderr);
    ensure!(workload.finish()?.success());
    Ok(())
}

fn expect_jcmd(kit: &Path, pid: &str) -> Result<()> {
    let map = Command::new(kit.join("bin/jcmd"))
        .args([pid, "Compiler.perfmap"])
        .output()?;
    ensure!(map.status.success(), "{map:?}");
    Ok(())
}

/// A virtual machine that refuses to be attached to would print all its stacks at SIGQUIT. It is left alone, runs
/// on, and its functions are named from its memory.
fn a_virtual_machine_that_refuses_is_not_asked() -> Result<()> {
    for kit in java_kits::kits()? {
        let why = "it was started with -XX:+DisableAttachMechanism";
        expect_refused(&kit, "-XX:+DisableAttachMechanism", why, |_| Ok(()))?;
    }
    Ok(())
}

/// A virtual machine that SIGQUIT would kill is asked without the signal, because it listens from its start. If
/// it does not listen, it is left alone.
fn a_virtual_machine_that_would_be_killed_gets_no_signal() -> Result<()> {
    for kit in java_kits::kits()? {
        let java = Java::compile(&kit)?;
        let mut workload = java.start(&["-Xrs"], &["7"])?;
        let traces = Traces::of(&workload.pid());
        let tool = trace(&workload.pid(), &["--java-names"])?;
        traces.wait_for_map()?;
        work_undisturbed(&mut workload)?;
        tool.interrupt()?;
        ensure!(workload.finish()?.success());

        let why = "it was started with -Xrs, and does not listen any more";
        expect_refused(&kit, "-Xrs", why, |traces| {
            fs::remove_file(&traces.socket).context("it does not listen")
        })?;
    }
    Ok(())
}

/// Checks that a virtual machine with this option, after this preparation, is not asked, for the reason `why`.
fn expect_refused(
    kit: &Path,
    option: &str,
    why: &str,
    prepare: impl FnOnce(&Traces) -> Result<()>,
) -> Result<()> {
    let java = Java::compile(kit)?;
    let mut workload = java.start(&["-XX:-Inline", option], &[&COUNT.to_string()])?;
    let pid = workload.pid();
    let traces = Traces::of(&pid);
    prepare(&traces)?;
    let tool = trace(&pid, &["--java-names"])?;
    work_undisturbed(&mut workload)?;
    let ended = tool.interrupt()?;
    let reason = format!(
        "process {pid} is not queried for Java names: {why}; they are read from its memory\n"
    );
    let said = ended.stderr.matches(&reason).count();
    ensure!(said == 1, "{}", ended.stderr);
    traces.expect_none()?;
    java::expect_all(&ended, &java.truth()?)
        .with_context(|| format!("{} {option}", kit.display()))?;
    ensure!(workload.finish()?.success());
    Ok(())
}

/// Checks that the next line that the workload prints is its last one: HotSpot prints stacks to the same stream.
fn work_undisturbed(workload: &mut Workload) -> Result<()> {
    workload.work().context("it was disturbed")?;
    Ok(())
}
