//! Names of Java from perf maps that HotSpot is asked for (`--java-names`), without a JDK, and without harm.

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

use crate::harness::{self, Ended, Tool, Workload};
use crate::java;
use crate::java_kits::{self, BYTES, COUNT, Java};

/// All of these tests.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "java_names":
        a_perf_map_is_asked_for [Host],
        names_are_those_of_the_map_that_was_asked_for [Host],
        a_virtual_machine_in_a_container_is_asked [Host],
        a_virtual_machine_that_refuses_is_not_asked [Host],
        a_virtual_machine_that_would_be_killed_gets_no_signal [Host],
    }
}

/// A user and a group that have nothing to do with the tool's.
pub(crate) const NOBODY: (u32, u32) = (65534, 60001);
/// Options by which all functions are compiled.
const COMPILED: [&str; 3] = ["-XX:-Inline", "-XX:-TieredCompilation", "-Xcomp"];
/// How long the tool may take until it asks again.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a process may leave in its /tmp when it is asked.
pub(crate) struct Traces {
    map: PathBuf,
    socket: PathBuf,
    trigger: PathBuf,
    /// The folder of its open files, and how the map is called there.
    descriptors: PathBuf,
    own_map: PathBuf,
}

impl Traces {
    pub(crate) fn of(pid: &str) -> Self {
        Self::in_root(Path::new("/"), pid, pid)
    }

    /// What a process leaves that has this root and knows itself by this number.
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

    /// Waits until there is a map: the tool asks when its probes are live.
    fn wait_for_map(&self) -> Result<()> {
        let begun = Instant::now();
        while !self.has_map() || !self.is_written()? {
            ensure!(begun.elapsed() < PATIENCE, "not asked");
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

    /// Has the process, which listens by now, write its map once more.
    fn ask_again(&self) -> Result<()> {
        let mut socket = UnixStream::connect(&self.socket)?;
        socket.write_all(b"1\0jcmd\0Compiler.perfmap\0\0\0")?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer)?;
        ensure!(answer.starts_with("0\n"), "{answer}");
        Ok(())
    }

    /// Puts another map in the place of that of a process of [`NOBODY`], which cannot write it again: the functions of
    /// the workload have names there that are nowhere else.
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

/// Starts memleak, which shows each block of the workload.
fn trace(pid: &str, more: &[&str]) -> Result<Tool> {
    let each_block = [
        "-j", "-a", "-o", "0", "-T", "100000", "-z", BYTES, "-Z", BYTES, "-p", pid,
    ];
    let mut tool = Tool::start("memleak", &[&each_block[..], more].concat())?;
    tool.wait_for("allocator: ")?;
    Ok(tool)
}

/// The functions of a map: start, and name.
fn functions(map: &str) -> BTreeMap<u64, &str> {
    let lines = map.lines().filter_map(function);
    lines.map(|(start, _, name)| (start, name)).collect()
}

/// The function in a line of a map: start, bytes, and name.
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
        ensure!(begun.elapsed() < PATIENCE, "asked once only");
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// Compares the frames of compiled functions with what a map has there. Returns how many.
fn compare(ended: &Ended, map: &str) -> Result<usize> {
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

/// A map is written, once the tool is ready, by HotSpot as its own user and not by ours; it is asked for
/// again, when there is later code; the frames are Java's own, and named as the map has them.
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
        ensure!(!ended.stderr.contains("not asked"), "{}", ended.stderr);
        ensure!(!traces.trigger.exists(), "the trigger is left");
        java::expect_all(&ended, &java.truth()?)?;

        let asked = fs::read_to_string(&traces.map)?;
        let compared = compare(&ended, &asked)?;
        ensure!(compared > 100, "{compared} frames");
        // HotSpot's own way to be asked, by its own user. It may have compiled a little since.
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

/// As the map is another one than HotSpot has written, names show whether they come from there or from memory.
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

/// By another number than that by which it knows itself, and with a /tmp that only its own mount namespace has.
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

/// The workload's functions, once a map was asked for, are called as another map has them that is there by then.
fn expect_renamed(mut workload: Workload, pid: &str, traces: &Traces) -> Result<()> {
    let tool = trace(pid, &["--java-names"])?;
    traces.wait_for_map()?;
    workload.work()?;
    traces.ask_again()?;
    let map = traces.rename_functions()?;
    let ended = tool.interrupt()?;
    ensure!(!ended.stderr.contains("not asked"), "{}", ended.stderr);
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
        ensure!(frame["symbol"] == *name, "{name} is in the map: {frame}");
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

/// What does not want to be attached to would print all its stacks at SIGQUIT: it is left alone, goes on, and is
/// named from its memory.
fn a_virtual_machine_that_refuses_is_not_asked() -> Result<()> {
    for kit in java_kits::kits()? {
        let why = "it was started with -XX:+DisableAttachMechanism";
        expect_refused(&kit, "-XX:+DisableAttachMechanism", why, |_| Ok(()))?;
    }
    Ok(())
}

/// What SIGQUIT would kill is asked without that, as it listens from its start; if it does not, it is left alone.
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

/// One with this option, and after this preparation, is not asked, for this reason.
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
        "process {pid} is not asked for names of Java: {why}; they are read from its memory\n"
    );
    let said = ended.stderr.matches(&reason).count();
    ensure!(said == 1, "{}", ended.stderr);
    traces.expect_none()?;
    java::expect_all(&ended, &java.truth()?)
        .with_context(|| format!("{} {option}", kit.display()))?;
    ensure!(workload.finish()?.success());
    Ok(())
}

/// The next that the workload prints is what it says at its end: HotSpot prints stacks to the same place.
fn work_undisturbed(workload: &mut Workload) -> Result<()> {
    workload.work().context("it was disturbed")?;
    Ok(())
}
