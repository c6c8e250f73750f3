//! Tools of the suite, run as a user runs them.

use std::collections::HashMap;
use std::env;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::Signal;
use regex_lite::Regex;
use serde_json::Value;

use super::needs::AT_ENTRIES;
use crate::documented;
use crate::harness::{TIMEOUT, arch, workload};

/// Returns the path of a tool.
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

/// Whether a process waits for events. A tool that prints no ready line is known to have live probes by that.
///
/// # Errors
/// If there is no such process.
pub(crate) fn waits_for_events(pid: u32) -> Result<bool> {
    let call = fs::read_to_string(format!("/proc/{pid}/syscall"))?;
    let mut words = call.split(' ');
    let number = words.next().and_then(|word| word.parse().ok());
    // Peers wait by epoll(7), tools by poll(2). A tool that polls one descriptor waits for a child process.
    let count = words.nth(1);
    Ok(match number {
        Some(number) if arch::POLL_CALLS.contains(&number) => count != Some("0x1"),
        number => number.is_some_and(|number| arch::EPOLL_CALLS.contains(&number)),
    })
}

/// Reads what the kernel tells of each descriptor that a process has open (proc(5), `fdinfo`).
///
/// # Errors
/// If there is no such process.
pub(crate) fn descriptors(pid: u32) -> Result<Vec<String>> {
    let entries = fs::read_dir(format!("/proc/{pid}/fdinfo"))?;
    // The string of a descriptor that was closed meanwhile is empty.
    let told = entries.map(|entry| Ok(fs::read_to_string(entry?.path()).unwrap_or_default()));
    told.collect()
}

/// Running tool, whose output is collected as it comes.
pub(crate) struct Tool {
    child: Child,
    stderr: Receiver<String>,
    said: Vec<String>,
    reader: Option<JoinHandle<()>>,
    stdout: Arc<Mutex<Vec<u8>>>,
    /// Number of bytes of stdout up to the end of the last text that was waited for.
    awaited: usize,
    /// Name of the program.
    program: String,
}

/// Output and exit status of a tool that has ended.
#[derive(Debug)]
pub(crate) struct ToolOutput {
    /// The tool's complete stdout.
    pub(crate) stdout: String,
    /// The tool's complete stderr.
    pub(crate) stderr: String,
    /// The tool's exit status.
    pub(crate) status: ExitStatus,
}

impl ToolOutput {
    /// Parses the JSON objects on stdout, one per line. Each object must have a type and, if it describes a
    /// moment, a time.
    pub(crate) fn objects(&self) -> Result<Vec<Value>> {
        ensure!(self.status.success(), "{self:?}");
        self.stdout.lines().map(object).collect()
    }

    /// Parses the JSON objects on stdout as [`ToolOutput::objects`] does, whatever the exit status. The lines of a
    /// command may be in between; they do not begin with `{`.
    pub(crate) fn objects_among_lines(&self) -> Result<Vec<Value>> {
        let lines = self.stdout.lines().filter(|line| line.starts_with('{'));
        lines.map(object).collect()
    }
}

/// Parses a line of a tool's JSON. Fails if the object has no type, or no time although its type describes a moment.
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
    /// Starts a tool.
    pub(crate) fn start(name: &str, args: &[&str]) -> Result<Self> {
        Self::spawn(Command::new(tool(name)).args(args).stdin(Stdio::null()))
    }

    /// Starts a tool that may attach by only one way, named as in the tool's ladder.
    pub(crate) fn start_by(way: &str, name: &str, args: &[&str]) -> Result<Self> {
        let mut command = Command::new(tool(name));
        command.args(args).env("MEMTOOLS_ATTACH", way);
        let mut tool = Self::spawn(command.stdin(Stdio::null()))?;
        tool.wait_for_stderr(&format!("({way})"))?;
        Ok(tool)
    }

    /// Starts another project's tool. Such tools print nothing through a pipe until they end. The tool counts as
    /// ready when it waits for events.
    pub(crate) fn start_peer(name: &str, args: &[&str]) -> Result<Self> {
        let program = workload("peers").join(name);
        let mut peer = Self::spawn(Command::new(program).args(args).stdin(Stdio::null()))?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if waits_for_events(peer.pid())? {
                return Ok(peer);
            }
            if Instant::now() > deadline || peer.child.try_wait()?.is_some() {
                bail!("the peer {name} does not start: {:?}", peer.wait()?);
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts a tool by any command, with its stdout and stderr piped to the test.
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
            // After a read error, the output that was read before is kept.
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

    /// Returns the tool's PID.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the peak of the tool's resident memory, in KiB.
    pub(crate) fn peak_kib(&self) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.context("no peak")?.trim().trim_end_matches(" kB");
        kib.parse().context("no number")
    }

    /// Returns the nice value of the tool's main thread.
    pub(crate) fn nice(&self) -> Result<i64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid()))?;
        let fields = stat.rsplit_once(')').context("no name")?.1;
        // The nice value is field 19 of the line. The first field behind the name is field 3.
        let nice = fields.split_whitespace().nth(16).context("no nice value")?;
        Ok(nice.parse()?)
    }

    /// Waits until a line on stderr contains `text`, such as the line that says that the probes are live.
    pub(crate) fn wait_for_stderr(&mut self, text: &str) -> Result<()> {
        self.wait_for_any(&[text])
    }

    /// Waits until a line on stderr contains one of `texts`.
    pub(crate) fn wait_for_any(&mut self, texts: &[&str]) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
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

    /// Waits for a line on stderr that contains `text`, and returns the line.
    pub(crate) fn wait_for_line(&mut self, text: &str) -> Result<String> {
        self.wait_for_stderr(text)?;
        let line = self.said.iter().find(|line| line.contains(text));
        line.cloned().context("no line")
    }

    /// Waits until stdout contains `text`, after the text that the last call found.
    pub(crate) fn wait_for_output(&mut self, text: &str) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
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

    /// Stops reading the tool's output until the returned value is dropped.
    pub(crate) fn stall_output(&self) -> Result<MutexGuard<'_, Vec<u8>>> {
        let stalled = self.stdout.lock();
        stalled.map_err(|_| anyhow!("the reader has panicked"))
    }

    /// Waits until the tool's output, whose reader is stalled, fills the pipe: the tool cannot write on.
    pub(crate) fn wait_for_full_pipe(&self) -> Result<()> {
        let pipe = File::open(format!("/proc/{}/fd/1", self.pid()))?;
        let capacity = fcntl(&pipe, FcntlArg::F_GETPIPE_SZ)?;
        super::eventually("the pipe is full", || {
            let mut used = 0;
            // SAFETY: the kernel writes the number of bytes into `used`.
            let asked = unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut used) };
            ensure!(asked == 0, "no pipe");
            Ok(capacity - used < libc::PIPE_BUF as libc::c_int)
        })
    }

    /// Returns the complete lines that the tool has printed so far.
    pub(crate) fn stdout(&self) -> String {
        let stdout = self.stdout.lock().map(|stdout| stdout.clone());
        let mut stdout = String::from_utf8_lossy(&stdout.unwrap_or_default()).into_owned();
        stdout.truncate(stdout.rfind('\n').map_or(0, |end| end + 1));
        stdout
    }

    /// Waits until `wanted` accepts the lines that the tool has printed so far.
    pub(crate) fn wait_until(&self, wanted: impl Fn(&str) -> bool) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        while !wanted(&self.stdout()) {
            ensure!(Instant::now() < deadline, "not yet in {}", self.stdout());
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Sends a signal to the tool.
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        nix::sys::signal::kill(pid, signal).context("failed to signal the tool")
    }

    /// Whether the tool has ended by itself.
    pub(crate) fn has_ended(&mut self) -> Result<bool> {
        let status = self.child.try_wait();
        Ok(status.context("failed to wait for the tool")?.is_some())
    }

    /// Interrupts the tool, as Ctrl-C does, and waits for its end.
    pub(crate) fn interrupt(self) -> Result<ToolOutput> {
        self.signal(Signal::SIGINT)?;
        self.wait()
    }

    /// Waits for the tool's end, and compares its JSON with its man page.
    pub(crate) fn wait(mut self) -> Result<ToolOutput> {
        let deadline = Instant::now() + TIMEOUT;
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
        Ok(ToolOutput {
            stdout: without_skipped_runs(&stdout)?,
            stderr: without_skipped_runs(&self.said.join("\n"))?,
            status,
        })
    }
}

/// Removes skipped runs of BPF programs from a report, on kernels where a task can be preempted in a program (7.0
/// and later). The kernel counts skipped runs for all tasks of the system, so a report can have some although no
/// traced event is missing. Tests notice missing events by the numbers that they compare.
pub(crate) fn without_skipped_runs(report: &str) -> Result<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").context("no release")?;
    let major = release.split('.').next().unwrap_or_default();
    let mut report = report.to_owned();
    let mentions = report.contains("program runs") || report.contains(r#""runs":"#);
    if major.parse::<u32>().context("no number")? < 7 || !mentions {
        return Ok(report);
    }
    for (pattern, replacement) in [
        // Skipped runs are the only loss, on stderr or in a JSON object.
        (r"(?m)^\w+: lost \d+ program runs, at most \([^)]*\)\n?", ""),
        (
            r#"(?m)^\{"type":"lost","lost":\{(?:"[a-z_]+":0,)*"runs":\d+\},"tool":[^}]*\}\n"#,
            "",
        ),
        // Skipped runs are one loss of several.
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

/// Returns the stack of each block by the block's address, from the objects that memleak prints with `-a -j`.
pub(crate) fn stacks_of_blocks<'a>(
    objects: impl IntoIterator<Item = &'a Value>,
) -> HashMap<u64, &'a Value> {
    let (stacks, others): (Vec<_>, Vec<_>) =
        objects.into_iter().partition(|row| row["type"] == "stack");
    let stacks: HashMap<&str, &Value> = stacks
        .into_iter()
        .filter_map(|row| Some((row["stack_id"].as_str()?, row)))
        .collect();
    let blocks = others.into_iter().filter(|row| row["type"] == "allocation");
    let blocks = blocks.filter_map(|row| {
        let address = row["address"].as_str()?.strip_prefix("0x")?;
        let stack = stacks.get(row["stack_id"].as_str()?)?;
        Some((u64::from_str_radix(address, 16).ok()?, *stack))
    });
    blocks.collect()
}
