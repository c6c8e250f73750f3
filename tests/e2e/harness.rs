//! Starting workloads and tools, and talking to both.
//!
//! A workload (tests/workload) is held until the tool under test says that it is ready, does work
//! of a known size, and is held again until the tool has reported.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::env;
use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::{Completion, Failed, Trial};
use nix::sys::signal::{SigHandler, Signal};
use regex_lite::Regex;
use serde_json::Value;

use crate::documented;

/// How long anything may take. Software emulation is a hundred times slower than the machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// How many tests are named at the end for the time that they took.
const SLOWEST: usize = 20;

static DURATIONS: Mutex<Vec<(Duration, String)>> = Mutex::new(Vec::new());

/// What a test needs of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// Kprobes, which some kernels are built without.
    Kprobes,
    /// A disk of our own, whose page cache may be dropped.
    Disk,
    /// A machine of our own, whose memory may be used up.
    Guest,
    /// The programs of a whole system.
    Host,
    /// To be run once: the kernel has no part in what it shows, and an emulated one much time.
    Once,
    /// 32-bit programs.
    Compat,
    /// Tools of other projects, which scripts/test-vm takes from Debian's packages.
    Peers,
    /// Swap compressed in memory.
    Zswap,
    /// File systems in layers, as containers have.
    Overlay,
    /// Transparent huge pages of several sizes, each with counters.
    SmallThp,
    /// Namespaces of unprivileged users, which some systems forbid.
    UserNamespaces,
    /// The kernel's memory, counted by cgroup, BPF maps included: 5.18 and later, version 2.
    KernelMemory,
}

impl Need {
    /// Why it is not there, if it is not.
    fn missing(self) -> Option<&'static str> {
        let (there, reason) = match self {
            Need::Kprobes => (
                Path::new("/sys/bus/event_source/devices/kprobe/type").exists(),
                "this kernel is built without kprobes",
            ),
            Need::Disk => (env::var_os("MEMTOOLS_DISK").is_some(), "no disk of our own"),
            Need::Guest => (in_guest(), "would use up this machine's memory"),
            Need::Zswap => (
                Path::new("/sys/module/zswap").exists(),
                "this kernel is built without zswap",
            ),
            Need::Overlay => (
                fs::read_to_string("/proc/filesystems")
                    .is_ok_and(|list| list.contains("\toverlay\n")),
                "this kernel has no overlayfs, or not loaded",
            ),
            Need::Host => (!in_guest(), "a guest has only our own programs"),
            Need::SmallThp => (
                Path::new("/sys/kernel/mm/transparent_hugepage/hugepages-64kB/stats").exists(),
                "this kernel has transparent huge pages of one size",
            ),
            Need::Once => (!in_guest(), "the same on every kernel; runs on the host"),
            Need::UserNamespaces => (
                // Debian's own setting, where it is there, and the kernel's.
                fs::read_to_string("/proc/sys/kernel/unprivileged_userns_clone")
                    .map_or(true, |may| may.trim() != "0")
                    && fs::read_to_string("/proc/sys/user/max_user_namespaces")
                        .is_ok_and(|most| most.trim() != "0"),
                "unprivileged users may not make namespaces here",
            ),
            Need::KernelMemory => (
                fs::read_to_string("/sys/fs/cgroup/memory.stat")
                    .is_ok_and(|stat| stat.contains("\nkernel ")),
                "the kernel's memory is not counted by cgroup",
            ),
            Need::Compat => (runs_32_bit(), "this kernel runs no 32-bit programs"),
            Need::Peers => (workload("peers").exists(), "no peers beside the workloads"),
        };
        (!there).then_some(reason)
    }
}

/// The version of this kernel, such as `6.1.0-56-cloud-amd64`.
pub(crate) fn release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default()
}

/// Whether this is a guest of tests/vm, which is emulated: a hundred times slower.
pub(crate) fn in_guest() -> bool {
    env::var_os("MEMTOOLS_GUEST").is_some()
}

fn runs_32_bit() -> bool {
    Command::new(workload("compat32"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .is_ok()
}

thread_local! {
    /// Whether memleak is to probe functions at their entries in the test that this thread runs.
    static AT_ENTRIES: Cell<bool> = const { Cell::new(false) };
}

/// Has memleak probe functions at their entries (--no-placement) for the rest of this test.
pub(crate) fn probe_entries() {
    AT_ENTRIES.set(true);
}

/// A tool's tests, each named after its function, with what it needs in brackets. What needs nothing
/// can run once more, as the function behind its colon says: [`at_entries`].
macro_rules! tests {
    ($tool:literal: $($name:ident $([$($need:ident),+])? $(: $again:ident)?),+ $(,)?) => {
        vec![$(
            $crate::harness::test(
                concat!($tool, "::", stringify!($name)),
                &[$($($crate::harness::Need::$need),+)?],
                $name,
            ),
            $($crate::harness::$again($tool, stringify!($name), $name),)?
        )+]
    };
}
pub(crate) use tests;

/// A test with memleak's probes at entries: no number may depend on where it places them.
pub(crate) fn at_entries(tool: &str, name: &str, run: fn() -> Result<()>) -> Trial {
    test(&format!("{tool}::at_entries::{name}"), &[], move || {
        probe_entries();
        run()
    })
}

/// A test that runs where the kernel has what it needs, and says so by name where it has not.
pub(crate) fn test(
    name: &str,
    needs: &'static [Need],
    run: impl FnOnce() -> Result<()> + Send + 'static,
) -> Trial {
    let own_name = name.to_owned();
    Trial::ignorable_test(name, move || {
        let unmet = needs.iter().find_map(|need| need.missing());
        if let Some(reason) = unmet {
            return Ok(Completion::ignored_with(reason));
        }
        if let Some(outcome) = without_root() {
            return outcome;
        }
        AT_ENTRIES.set(false);
        let started = Instant::now();
        let result = run();
        let took = (started.elapsed(), own_name);
        if let Ok(mut durations) = DURATIONS.lock() {
            durations.push(took);
        }
        result
            .map(|()| Completion::Completed)
            .map_err(|error| Failed::from(format!("{error:?}")))
    })
}

/// The names of the tests to run, if MEMTOOLS_TESTS names a file that has them, each on a line.
pub(crate) fn listed() -> Option<HashSet<String>> {
    let path = env::var_os("MEMTOOLS_TESTS")?;
    let list = fs::read_to_string(&path);
    let list = list.unwrap_or_else(|error| panic!("MEMTOOLS_TESTS, {}: {error}", path.display()));
    Some(list.lines().map(str::to_owned).collect())
}

/// Prints which tests took longest, after the last one.
pub(crate) fn print_slowest() {
    let Ok(mut durations) = DURATIONS.lock() else {
        return;
    };
    durations.sort_unstable_by(|one, other| other.cmp(one));
    let all: Duration = durations.iter().map(|(took, _)| *took).sum();
    println!("{} tests took {} s:", durations.len(), all.as_secs());
    for (took, name) in durations.iter().take(SLOWEST) {
        println!("  {:5.1} s  {name}", took.as_secs_f64());
    }
}

/// What becomes of a test that we may not run: in CI it fails, elsewhere it is named. None for root.
pub(crate) fn without_root() -> Option<Result<Completion, Failed>> {
    if nix::unistd::geteuid().is_root() {
        None
    } else if env::var_os("CI").is_some() {
        Some(Err(Failed::from("needs root")))
    } else {
        Some(Ok(Completion::ignored_with("needs root")))
    }
}

/// Has the signals that end a tool end it, also where the tests' caller ignores them: a shell's job in
/// the background and nohup(1) do, and tools keep to that. To be called before there is a thread.
pub(crate) fn heed_signals() {
    for signal in [
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ] {
        // SAFETY: sets the default action, which runs nothing of ours.
        let set = unsafe { nix::sys::signal::signal(signal, SigHandler::SigDfl) };
        assert!(set.is_ok(), "{signal}: {set:?}");
    }
}

/// Builds the workloads, unless they come ready-made, as in a guest.
pub(crate) fn prepare() {
    if env::var_os("MEMTOOLS_WORKLOADS").is_some() {
        return;
    }
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/workload");
    let built = Command::new("make")
        .args(["-s", "-j2", "-C", folder])
        .arg(format!("OUT={}", workloads().display()))
        .env_remove("RUSTFLAGS")
        .env_remove("MAKEFLAGS")
        .status();
    assert!(
        built.is_ok_and(|status| status.success()),
        "failed to build tests/workload"
    );
}

fn workloads() -> PathBuf {
    env::var_os("MEMTOOLS_WORKLOADS").map_or_else(
        || concat!(env!("CARGO_MANIFEST_DIR"), "/target/workload").into(),
        PathBuf::from,
    )
}

/// The path of a workload program.
pub(crate) fn workload(name: &str) -> PathBuf {
    workloads().join(name)
}

/// The path of a tool.
pub(crate) fn tool(name: &str) -> PathBuf {
    let folder = env::var_os("MEMTOOLS_BIN").map_or_else(
        || {
            Path::new(env!("CARGO_BIN_EXE_memleak"))
                .parent()
                .expect("a folder")
                .to_owned()
        },
        PathBuf::from,
    );
    folder.join(name)
}

/// A workload that has said that it is ready.
pub(crate) struct Workload {
    child: Child,
    pid: u32,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Workload {
    /// Starts a program of tests/workload.
    pub(crate) fn start(name: &str, args: &[&str]) -> Result<Self> {
        Self::spawn(Command::new(workload(name)).args(args))
    }

    /// Starts a program that speaks the protocol, in whatever way.
    pub(crate) fn spawn(command: &mut Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("failed to start {command:?}"))?;
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().context("no stdout")?);
        let mut workload = Self {
            pid: child.id(),
            child,
            stdin,
            stdout,
        };
        workload.ready()?;
        Ok(workload)
    }

    /// Waits until it is ready, at its start or as another program after exec. Returns the number
    /// that it gives itself.
    pub(crate) fn ready(&mut self) -> Result<u32> {
        let line = self.line()?;
        let pid = line
            .strip_prefix("ready ")
            .with_context(|| format!("it said {line:?}"))?;
        // In a PID namespace of its own it knows itself by another number.
        pid.parse().context("no pid")
    }

    /// The workload's number in our PID namespace.
    pub(crate) fn pid(&self) -> String {
        self.pid.to_string()
    }

    /// Lets it do its work and waits until that is done. Returns the facts that it states.
    pub(crate) fn work(&mut self) -> Result<HashMap<String, String>> {
        self.go()?;
        self.done()
    }

    /// Lets it do one of its rounds, and waits until it is ready for the next one, or done with the last.
    pub(crate) fn round(&mut self, is_last: bool) -> Result<()> {
        self.go()?;
        if is_last {
            self.done()?;
        } else {
            self.ready()?;
        }
        Ok(())
    }

    /// Lets it go on.
    pub(crate) fn go(&mut self) -> Result<()> {
        let stdin = self.stdin.as_mut().context("already released")?;
        stdin.write_all(b"\n").context("the workload has gone")
    }

    /// Waits until its work is done. Returns the facts that it states.
    pub(crate) fn done(&mut self) -> Result<HashMap<String, String>> {
        let line = self.line()?;
        let facts = line
            .strip_prefix("done")
            .with_context(|| format!("it said {line:?}"))?;
        Ok(facts
            .split_whitespace()
            .filter_map(|fact| fact.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect())
    }

    /// Waits until it has ended, by whatever end.
    pub(crate) fn wait(&mut self) -> Result<ExitStatus> {
        self.child.wait().context("failed to wait for the workload")
    }

    /// Lets it exit, and waits until it has.
    pub(crate) fn finish(mut self) -> Result<ExitStatus> {
        self.stdin = None;
        self.child.wait().context("failed to wait for the workload")
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.stdout
            .read_line(&mut line)
            .context("failed to read from the workload")?;
        ensure!(!line.is_empty(), "the workload has ended");
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running tool, its output collected as it comes.
pub(crate) struct Tool {
    child: Child,
    stderr: Receiver<String>,
    said: Vec<String>,
    reader: Option<JoinHandle<()>>,
    stdout: Arc<Mutex<Vec<u8>>>,
    /// How much of stdout was waited for.
    awaited: usize,
    /// The program's name.
    program: String,
}

/// A tool that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// All of its stdout.
    pub(crate) stdout: String,
    /// All of its stderr.
    pub(crate) stderr: String,
    /// The tool's exit status.
    pub(crate) status: ExitStatus,
}

impl Ended {
    /// The JSON objects on stdout, one a line. Each says what it is, and what is of a moment when that was.
    pub(crate) fn objects(&self) -> Result<Vec<Value>> {
        ensure!(self.status.success(), "{self:?}");
        self.stdout.lines().map(object).collect()
    }
}

/// A line of a tool's JSON.
pub(crate) fn object(line: &str) -> Result<Value> {
    const OF_A_MOMENT: [&str; 7] = [
        "call", "file", "interval", "kill", "process", "reclaim", "report",
    ];
    let object: Value = serde_json::from_str(line).with_context(|| format!("no JSON: {line}"))?;
    let kind = object["type"].as_str();
    let kind = kind.with_context(|| format!("no type: {line}"))?;
    ensure!(
        !OF_A_MOMENT.contains(&kind) || object["time"].is_string(),
        "no time: {line}"
    );
    Ok(object)
}

impl Tool {
    /// Starts it.
    pub(crate) fn start(name: &str, args: &[&str]) -> Result<Self> {
        Self::spawn(Command::new(tool(name)).args(args).stdin(Stdio::null()))
    }

    /// Starts it with only one of its ways to attach, as its ladder names it.
    pub(crate) fn start_by(way: &str, name: &str, args: &[&str]) -> Result<Self> {
        let mut command = Command::new(tool(name));
        command.args(args).env("MEMTOOLS_ATTACH", way);
        let mut tool = Self::spawn(command.stdin(Stdio::null()))?;
        tool.wait_for(&format!("({way})"))?;
        Ok(tool)
    }

    /// Starts another project's tool. Such say nothing through a pipe until they end: it is ready
    /// when it waits for events.
    pub(crate) fn start_peer(name: &str, args: &[&str]) -> Result<Self> {
        let program = workload("peers").join(name);
        let mut peer = Self::spawn(Command::new(program).args(args).stdin(Stdio::null()))?;
        let deadline = Instant::now() + PATIENCE;
        let epoll_wait = format!("{} ", libc::SYS_epoll_wait);
        let epoll_pwait = format!("{} ", libc::SYS_epoll_pwait);
        loop {
            let call = fs::read_to_string(format!("/proc/{}/syscall", peer.pid()))?;
            if call.starts_with(&epoll_wait) || call.starts_with(&epoll_pwait) {
                return Ok(peer);
            }
            if Instant::now() > deadline || peer.child.try_wait()?.is_some() {
                bail!("the peer {name} does not start: {:?}", peer.end()?);
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts it in whatever way; stdout and stderr are ours.
    pub(crate) fn spawn(command: &mut Command) -> Result<Self> {
        if AT_ENTRIES.get()
            && command
                .get_program()
                .as_encoded_bytes()
                .ends_with(b"/memleak")
        {
            command.arg("--no-placement");
        }
        let program = Path::new(command.get_program()).file_name();
        let program = program.unwrap_or_default().to_string_lossy().into_owned();
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("failed to start {command:?}"))?;
        let mut out = child.stdout.take().context("no stdout")?;
        let stdout = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&stdout);
        let reader = thread::spawn(move || {
            let mut bytes = [0; 16 << 10];
            // What was read before an error is what there is.
            while let Ok(length @ 1..) = out.read(&mut bytes) {
                if let Ok(mut all) = sink.lock() {
                    all.extend_from_slice(&bytes[..length]);
                }
            }
        });
        let err = BufReader::new(child.stderr.take().context("no stderr")?);
        let (sender, stderr) = channel();
        thread::spawn(move || {
            for line in err.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self {
            child,
            stderr,
            said: Vec::new(),
            reader: Some(reader),
            stdout,
            awaited: 0,
            program,
        })
    }

    /// The tool's number.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The most memory that the tool has had, in KiB.
    pub(crate) fn peak_kib(&self) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.context("no peak")?.trim().trim_end_matches(" kB");
        kib.parse().context("no number")
    }

    /// Waits until a line on stderr contains `text`, as the line that says that probes are live.
    pub(crate) fn wait_for(&mut self, text: &str) -> Result<()> {
        self.wait_for_any(&[text])
    }

    /// Waits until a line on stderr contains one of these.
    pub(crate) fn wait_for_any(&mut self, texts: &[&str]) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let wanted = |line: &String| texts.iter().any(|text| line.contains(text));
        while !self.said.iter().any(wanted) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.stderr.recv_timeout(left) {
                Ok(line) => self.said.push(line),
                Err(_) => bail!(
                    "it never said {texts:?}; it said:\n{}",
                    self.said.join("\n")
                ),
            }
        }
        Ok(())
    }

    /// Waits for a line on stderr that contains `text`.
    pub(crate) fn wait_for_line(&mut self, text: &str) -> Result<String> {
        self.wait_for(text)?;
        let line = self.said.iter().find(|line| line.contains(text));
        line.cloned().context("no line")
    }

    /// Waits until stdout has `text`, after where it was found the last time.
    pub(crate) fn wait_for_output(&mut self, text: &str) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let output = self.stdout.lock().map(|output| output.clone());
            let output = output.unwrap_or_default();
            let found = memchr::memmem::find(&output[self.awaited..], text.as_bytes());
            if let Some(at) = found {
                self.awaited += at + text.len();
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "it never printed {text:?}; it printed:\n{}",
                String::from_utf8_lossy(&output)
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The complete lines that it has printed so far.
    pub(crate) fn stdout(&self) -> String {
        let stdout = self.stdout.lock().map(|stdout| stdout.clone());
        let mut stdout = String::from_utf8_lossy(&stdout.unwrap_or_default()).into_owned();
        stdout.truncate(stdout.rfind('\n').map_or(0, |end| end + 1));
        stdout
    }

    /// Waits until what it has printed is as wanted.
    pub(crate) fn wait_until(&self, wanted: impl Fn(&str) -> bool) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !wanted(&self.stdout()) {
            ensure!(Instant::now() < deadline, "not yet in {}", self.stdout());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Sends it a signal.
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        nix::sys::signal::kill(pid, signal).context("failed to signal the tool")
    }

    /// Whether it has ended by itself.
    pub(crate) fn has_ended(&mut self) -> Result<bool> {
        let status = self.child.try_wait();
        Ok(status.context("failed to wait for the tool")?.is_some())
    }

    /// Presses Ctrl-C, and waits for its end.
    pub(crate) fn interrupt(self) -> Result<Ended> {
        self.signal(Signal::SIGINT)?;
        self.end()
    }

    /// Waits for its end.
    pub(crate) fn end(mut self) -> Result<Ended> {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self
                .child
                .try_wait()
                .context("failed to wait for the tool")?
            {
                break status;
            }
            if Instant::now() > deadline {
                bail!("it does not end; it said:\n{}", self.said.join("\n"));
            }
            thread::sleep(Duration::from_millis(5));
        };
        let reader = self.reader.take().context("no stdout")?;
        let _ = reader.join();
        let stdout = self.stdout.lock().map(|mut all| std::mem::take(&mut *all));
        self.said.extend(self.stderr.iter());
        let stdout =
            String::from_utf8(stdout.unwrap_or_default()).context("stdout is not UTF-8")?;
        documented::check(&self.program, &stdout)?;
        Ok(Ended {
            stdout: without_skipped_runs(&stdout)?,
            stderr: without_skipped_runs(&self.said.join("\n"))?,
            status,
        })
    }
}

/// A report without the runs of programs that the kernel has skipped, where a task can be preempted in
/// one (from 7.0 on): it counts them for all tasks of the system, so that there can be some although
/// nothing is missing of what is traced. That nothing is, tests know by its number.
fn without_skipped_runs(report: &str) -> Result<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").context("no release")?;
    let major = release.split('.').next().unwrap_or_default();
    let mut report = report.to_owned();
    let mentions = report.contains("program runs") || report.contains(r#""runs":"#);
    if major.parse::<u32>().context("no number")? < 7 || !mentions {
        return Ok(report);
    }
    for (pattern, replacement) in [
        // All that was lost, on stderr, and as an object.
        (r"(?m)^\w+: lost \d+ program runs, at most \([^)]*\)\n?", ""),
        (
            r#"(?m)^\{"type":"lost","lost":\{(?:"[a-z_]+":0,)*"runs":\d+\},"schema":\d+\}\n"#,
            "",
        ),
        // Some of it.
        (r", \d+ program runs, at most \([^)]*\)", ""),
        (r#""runs":\d+"#, r#""runs":0"#),
    ] {
        let pattern = Regex::new(pattern).context("no pattern")?;
        report = pattern.replace_all(&report, replacement).into_owned();
    }
    Ok(report)
}

impl Drop for Tool {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until `condition` holds; `what` says what that is.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !condition()? {
        ensure!(Instant::now() < deadline, "in vain: {what}");
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Runs a tool to its end.
pub(crate) fn run(name: &str, args: &[&str]) -> Result<Ended> {
    Tool::start(name, args)?.end()
}

/// Has a command run in a mount namespace of its own, with this folder as its root.
pub(crate) fn in_root(command: &mut Command, root: &Path) {
    let root = root.to_owned();
    // SAFETY: system calls between fork and exec.
    unsafe {
        command.pre_exec(move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS)?;
            nix::unistd::chroot(&root)?;
            nix::unistd::chdir("/")?;
            Ok(())
        });
    }
}

/// Adds to, or with `-:` takes from, one of tracefs's lists of probes. To cut such a list short, as
/// fs::write does, would take away those of others.
pub(crate) fn change_events(list: &str, line: &str) -> io::Result<()> {
    let mut list = OpenOptions::new().append(true).open(list)?;
    list.write_all(line.as_bytes())
}

/// A folder for one test, gone when it is dropped.
pub(crate) fn scratch() -> Result<tempfile::TempDir> {
    tempfile::tempdir().context("failed to make a folder")
}

/// Copies a file and keeps its mode. A process of its own does: the child of a test beside this one would inherit
/// the descriptor by which we write, and what somebody may write to cannot be executed (ETXTBSY).
pub(crate) fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).context("failed to make a folder")?;
    }
    let mut cp = Command::new("cp");
    let copied = cp.arg("-p").args([from, to]).status();
    let copied = copied.context("failed to start cp")?.success();
    ensure!(copied, "failed to copy {}", from.display());
    Ok(())
}

/// A cgroup (v2) of our own, gone when it is dropped.
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes one below the root.
    pub(crate) fn new() -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let mount = mounts
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>())
            .find(|fields| fields[2] == "cgroup2")
            .context("no cgroup2 is mounted")?[1];
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(mount).join(format!("memtools-{}-{number}", std::process::id()));
        fs::create_dir(&path).context("failed to make a cgroup")?;
        Ok(Self(path))
    }

    /// The folder's path.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Moves a process into it.
    pub(crate) fn add(&self, pid: &str) -> Result<()> {
        fs::write(self.0.join("cgroup.procs"), pid).context("failed to move into the cgroup")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// The number of the capability to have others killed first.
const CAP_SYS_RESOURCE: u32 = 24;

/// A tool that traces already has its memory locked, and is killed after all others where it may ask
/// for that, or says that it may not.
pub(crate) fn outlives_a_lack_of_memory(tool: Tool) -> Result<()> {
    let read = |file: &str| fs::read_to_string(format!("/proc/{}/{file}", tool.pid()));
    let score = read("oom_score_adj")?;
    let unlocked = unlocked_mappings(&read("smaps")?);
    ensure!(unlocked.is_empty(), "not locked: {unlocked:#?}");
    let own = fs::read_to_string("/proc/self/status")?;
    let capabilities = own.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let capabilities = u64::from_str_radix(capabilities.context("no capabilities")?.trim(), 16)?;
    let may_be_spared = capabilities >> CAP_SYS_RESOURCE & 1 == 1;
    let expected = if may_be_spared { "-1000\n" } else { "0\n" };
    ensure!(score == expected, "{score}");
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    let told = ended.stderr.contains("failed to set oom_score_adj");
    ensure!(told != may_be_spared, "{ended:?}");
    Ok(())
}

/// Mappings of /proc/PID/smaps that have pages, and are not locked in memory. Maps of BPF, buffers of
/// perf events and the vDSO with its data are the kernel's own memory, which is never taken away.
fn unlocked_mappings(smaps: &str) -> Vec<String> {
    let mut unlocked = Vec::new();
    let (mut mapping, mut resident) = ("", false);
    for line in smaps.lines() {
        let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
        match name {
            "Rss:" => resident = rest.trim() != "0 kB",
            "VmFlags:" => {
                let locked = rest.split_whitespace().any(|flag| flag == "lo");
                let kernel_s = [
                    "anon_inode:bpf-map",
                    "anon_inode:[perf_event]",
                    "[vdso]",
                    "[vvar",
                ];
                let is_kernel_s = kernel_s.iter().any(|name| mapping.contains(name));
                if resident && !locked && !is_kernel_s {
                    unlocked.push(mapping.to_owned());
                }
            }
            name if !name.ends_with(':') => mapping = line,
            _ => {}
        }
    }
    unlocked
}
