//! Debug files from debuginfod servers, by build id.
//!
//! `debuginfod-find` of elfutils does the requests: it knows the servers (`DEBUGINFOD_URLS`), TLS, and the cache that
//! gdb, perf and others share.

use std::collections::HashMap;
use std::env;
use std::ffi::OsString;
use std::io::{self, IsTerminal, Read};
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
/// Maximum number of bytes that are read of the program's output.
const MAX_OUTPUT: u64 = 16 << 10;
/// Pause between two checks whether the program has ended.
const PAUSE: Duration = Duration::from_millis(20);

/// Debug files that were asked for during this run.
#[derive(Debug, Default)]
pub(crate) struct Debuginfod {
    /// Paths by build id; None for a file that no server has.
    files: HashMap<Vec<u8>, Option<PathBuf>>,
    /// Whether a request has failed, after which no file is requested any more.
    gave_up: bool,
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
        if self.gave_up {
            return None;
        }
        let found = fetch(build_id).unwrap_or_else(|error| {
            eprintln!("no debug file of {module} from debuginfod: {error:#}");
            self.gave_up = true;
            None
        });
        self.files.insert(build_id.to_vec(), found.clone());
        found
    }
}

/// Requests a debug file from the servers. Returns None if no server has it.
fn fetch(build_id: &[u8]) -> Result<Option<PathBuf>> {
    let build_id = text::hex(build_id);
    let mut command = Command::new(PROGRAM);
    command.args(["debuginfo", &build_id]);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    // Ctrl-C ends the trace, but not this program: the last report may need its file.
    command.process_group(0);
    if io::stderr().is_terminal() {
        command.env("DEBUGINFOD_PROGRESS", "1");
    } else {
        command.stderr(Stdio::piped());
    }
    let mut child = command.spawn().context("failed to run debuginfod-find")?;
    let ended = wait(&mut child);
    if ended.is_err() {
        // The program is still running in this case.
        let _ = child.kill();
        let _ = child.wait();
    }
    if !ended? {
        let said = child.stderr.as_mut().map(read_all).transpose()?;
        let said = String::from_utf8_lossy(said.as_deref().unwrap_or_default()).into_owned();
        let reason = text::escape(said.trim());
        ensure!(said.is_empty() || said.contains(NOT_THERE), "{reason}");
        return Ok(None);
    }
    let path = child.stdout.as_mut().map(read_all).transpose()?;
    let mut path = path.unwrap_or_default();
    path.truncate(path.trim_ascii_end().len());
    Ok(Some(OsString::from_vec(path).into()))
}

fn read_all(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(MAX_OUTPUT).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Waits for the end of the program. Returns whether it has found the file.
fn wait(child: &mut Child) -> Result<bool> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait().context("failed to wait for it")? {
            return Ok(status.success());
        }
        limits::expect_no_end()?;
        ensure!(
            started.elapsed() < MAX_TIME,
            "it took more than {} s; no other file is asked for",
            MAX_TIME.as_secs()
        );
        thread::sleep(PAUSE);
    }
}
