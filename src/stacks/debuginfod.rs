//! Debug files from debuginfod servers, by build id.
//!
//! `debuginfod-find` of elfutils does the requests: it knows the servers (`DEBUGINFOD_URLS`), TLS, and the cache that
//! gdb, perf and others share.

use std::borrow::Cow;
use std::collections::HashMap;
use std::env;
use std::ffi::OsString;
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::code::limits;
use crate::print::text;

const PROGRAM: &str = "debuginfod-find";
/// Environment variable with the URLs of the servers, separated by spaces.
const URLS: &str = "DEBUGINFOD_URLS";
/// Timeout for one file.
const MAX_TIME: Duration = Duration::from_secs(60);
/// Message of the program about a file that no server has: the text of ENOENT.
const NOT_THERE: &str = "No such file or directory";
/// Maximum number of bytes that are read of the program's output, and kept of its messages.
const MAX_OUTPUT: usize = 16 << 10;
/// Pause between two checks whether the program has ended.
const PAUSE: Duration = Duration::from_millis(20);

/// Debug files that were requested during this run.
#[derive(Debug, Default)]
pub(crate) struct Debuginfod {
    /// Paths by build id; None for a file that no server has.
    files: HashMap<Vec<u8>, Option<PathBuf>>,
    /// Time that failed requests have taken in all. After [`MAX_TIME`] no file is requested any more. A server that
    /// refuses one build id at once keeps no other file from being found.
    failing: Duration,
}

impl Debuginfod {
    /// Checks that servers can be asked.
    ///
    /// # Errors
    /// If no server is named, or the program that asks them cannot be run.
    pub(crate) fn new() -> Result<Self> {
        let urls = env::var_os(URLS).filter(|urls| !urls.is_empty());
        if urls.is_none() {
            bail!(
                "--debuginfod: {URLS} names no server, as https://debuginfod.elfutils.org does; \
                 sudo passes it on with --preserve-env={URLS}"
            );
        }
        let found = Command::new(PROGRAM)
            .arg("--version")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        found.with_context(|| {
            format!(
                "--debuginfod: failed to run {PROGRAM}, which is in the package debuginfod \
                 (Fedora: elfutils-debuginfod-client)"
            )
        })?;
        Ok(Self::default())
    }

    /// Returns the path of the debug file with this build id. `module` is the name of the file that it was split from.
    pub(crate) fn find(&mut self, build_id: &[u8], module: &str) -> Option<PathBuf> {
        if let Some(known) = self.files.get(build_id) {
            return known.clone();
        }
        if self.failing >= MAX_TIME {
            return None;
        }
        self.request(build_id, module, fetch)
    }

    /// Requests a file by `fetch`, and remembers the outcome.
    fn request(
        &mut self,
        build_id: &[u8],
        module: &str,
        fetch: impl FnOnce(&[u8]) -> Result<Option<PathBuf>>,
    ) -> Option<PathBuf> {
        let started = Instant::now();
        let found = fetch(build_id).unwrap_or_else(|error| {
            crate::note!("no debug file of {module} from debuginfod: {error:#}");
            self.failing += started.elapsed();
            if self.failing >= MAX_TIME {
                crate::note!("no other file is requested from debuginfod");
            }
            None
        });
        self.files.insert(build_id.to_vec(), found.clone());
        found
    }
}

/// Requests a debug file from the servers. Returns None if no server has it.
fn fetch(build_id: &[u8]) -> Result<Option<PathBuf>> {
    let mut command = Command::new(PROGRAM);
    command.args(["debuginfo", &text::hex(build_id)]);
    run(command, io::stderr().is_terminal())
}

/// Runs `debuginfod-find`, and returns the path that it prints. Returns None if it says that no server has the file.
/// `shows` says whether its messages, with its progress, are shown on stderr.
fn run(mut command: Command, shows: bool) -> Result<Option<PathBuf>> {
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    // Ctrl-C ends the trace, but not this program: the last report may need its file.
    command.process_group(0);
    if shows {
        command.env("DEBUGINFOD_PROGRESS", "1");
    }
    let mut child = command.spawn().context("failed to run debuginfod-find")?;
    let messages = child.stderr.take();
    let messages = messages.map(|from| thread::spawn(move || read_messages(from, shows)));
    let ended = wait(&mut child);
    if ended.is_err() {
        // The program is still running in this case.
        let _ = child.kill();
        let _ = child.wait();
    }
    let has_found = ended?;
    let said = messages.and_then(|thread| thread.join().ok());
    if !has_found {
        let said = said.unwrap_or_default();
        ensure!(said.contains(NOT_THERE), "{}", reason(&said));
        return Ok(None);
    }
    let path = child.stdout.as_mut().map(read_all).transpose()?;
    let mut path = path.unwrap_or_default();
    path.truncate(path.trim_ascii_end().len());
    Ok(Some(OsString::from_vec(path).into()))
}

fn read_all(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(MAX_OUTPUT as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Reads the program's messages until it ends, and shows them if `shows` is set. Returns the last of them: the reason
/// of a failure comes after all progress.
fn read_messages(mut from: impl Read, shows: bool) -> String {
    let (mut said, mut piece) = (Vec::new(), [0; 1024]);
    loop {
        let length = match from.read(&mut piece) {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        if shows {
            // A terminal that is gone shows nothing.
            let _ = io::stderr().write_all(&piece[..length]);
        }
        said.extend_from_slice(&piece[..length]);
        said.drain(..said.len().saturating_sub(MAX_OUTPUT));
    }
    String::from_utf8_lossy(&said).into_owned()
}

/// Returns why the program has failed: its last message, escaped. Progress is printed over and over in one line.
fn reason(said: &str) -> Cow<'_, str> {
    let mut lines = said.rsplit(['\n', '\r']).map(str::trim);
    match lines.find(|line| !line.is_empty()) {
        Some(line) => text::escape(line),
        None => Cow::from(format!("{PROGRAM} failed without a message")),
    }
}

/// Waits for the end of the program. Returns whether it has found the file.
fn wait(child: &mut Child) -> Result<bool> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().context("failed to wait for it")? {
            return Ok(status.success());
        }
        limits::check_interrupted()?;
        ensure!(
            started.elapsed() < MAX_TIME,
            "it took more than {} s",
            MAX_TIME.as_secs()
        );
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_shell(script: &str) -> Result<Option<PathBuf>, String> {
        let run = |shows| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            super::run(command, shows).map_err(|error| error.to_string())
        };
        let outcome = run(false);
        assert_eq!(outcome, run(true), "on a terminal");
        outcome
    }

    #[test]
    fn an_error_of_one_build_id_does_not_suppress_others() {
        let mut debuginfod = Debuginfod::default();
        let refused = debuginfod.request(b"hostile", "x", |_| bail!("400"));
        assert_eq!(refused, None);
        let again = debuginfod.find(b"hostile", "x");
        assert_eq!(again, None, "it is remembered");
        let found = debuginfod.request(b"good", "y", |_| Ok(Some("/cache/debuginfo".into())));
        assert_eq!(found, Some("/cache/debuginfo".into()));
        assert!(debuginfod.failing < MAX_TIME);
    }

    #[test]
    fn a_failure_is_no_file_that_is_missing() {
        assert_eq!(
            run_shell("echo /cache/debuginfo"),
            Ok(Some("/cache/debuginfo".into()))
        );
        let missing = "echo 'Server query failed: No such file or directory' >&2; exit 1";
        assert_eq!(run_shell(missing), Ok(None));
        let failed = "printf 'Downloading 1\\rDownloading 2\\nServer query failed: Timed out\\n' >&2; exit 1";
        assert_eq!(
            run_shell(failed),
            Err("Server query failed: Timed out".to_owned())
        );
        let silent = Err("debuginfod-find failed without a message".to_owned());
        assert_eq!(run_shell("exit 1"), silent);
    }
}
