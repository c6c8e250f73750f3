//! Debug information from a debuginfod server.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;

use super::{COUNT, by_build_id, folded, start};
use crate::harness::{self, Tool};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "lines":
        debuginfod_fetches_what_is_missing [Once],
        a_debuginfod_that_hangs_keeps_nobody [Once],
    }
}

/// Real debuginfod server of the files in a directory.
struct Server {
    child: Child,
    url: String,
}

impl Server {
    fn start(files: &Path) -> Result<Self> {
        // The port is free now, and other programs are unlikely to take it so soon.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let mut command = Command::new("debuginfod");
        command
            .args(["-d", ":memory:", "-p", &port.to_string(), "-F"])
            .arg(files);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.context("no debuginfod: install debuginfod")?;
        Ok(Self {
            child,
            url: format!("http://127.0.0.1:{port}"),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn debuginfod_fetches_what_is_missing() -> Result<()> {
    let folder = harness::scratch()?;
    let (program, served) = (
        folder.path().join("lines-stripped"),
        folder.path().join("served"),
    );
    let cache = [folder.path().join("cache"), folder.path().join("other")];
    let cache = cache.map(|path| path.to_string_lossy().into_owned());
    fs::create_dir(&served)?;
    harness::copy(&harness::workload("lines-stripped"), &program)?;
    harness::copy(
        &harness::workload("lines-stripped.debug"),
        &served.join("a"),
    )?;
    let server = Server::start(&served)?;
    let (_, id) = by_build_id(folder.path(), &program)?;
    harness::eventually("the server has read its files", || {
        let url = format!("{}/buildid/{id}/debuginfo", server.url);
        let asked = Command::new("curl")
            .args(["-fsSo", "/dev/null", &url])
            .output()?;
        Ok(asked.status.success())
    })?;
    let url = server.url.clone();
    let env = |cache| [("DEBUGINFOD_URLS", &*url), ("DEBUGINFOD_CACHE_PATH", cache)];
    let options = ["--lines", "--debuginfod"];
    let is_whole = |stack: &String| stack.contains(";main;allocate;outer;inner;");

    let (stacks, ended) = folded(&mut Command::new(&program), &options, &env(&cache[0]))?;
    ensure!(stacks.iter().all(is_whole), "{ended:?}");
    drop(server);
    // The second time, the debug file is in the cache.
    let (stacks, ended) = folded(&mut Command::new(&program), &options, &env(&cache[0]))?;
    ensure!(stacks.iter().all(is_whole), "{ended:?}");
    // Without server and cache, the tool says so, and nothing else is missing.
    let (stacks, ended) = folded(&mut Command::new(&program), &options, &env(&cache[1]))?;
    ensure!(!stacks.iter().any(is_whole), "{ended:?}");
    let told = "no debug file of lines-stripped from debuginfod: ";
    ensure!(ended.stderr.contains(told), "{}", ended.stderr);

    let ended = harness::run("brkstack", &["--debuginfod", "-d", "1"])?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    ensure!(
        ended.stderr.contains("DEBUGINFOD_URLS names no server"),
        "{}",
        ended.stderr
    );
    Ok(())
}

/// A server accepts the request and never answers. The next Ctrl-C ends the wait.
fn a_debuginfod_that_hangs_keeps_nobody() -> Result<()> {
    let folder = harness::scratch()?;
    let stripped = folder.path().join("lines-stripped");
    harness::copy(&harness::workload("lines-stripped"), &stripped)?;
    let server = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("http://{}", server.local_addr()?);
    let mut program = start(&mut Command::new(&stripped), "sbrk")?;
    let mut command = Command::new(harness::tool("brkstack"));
    command.args(["-p", &program.pid(), "-f", "--debuginfod"]);
    command.env("DEBUGINFOD_URLS", url);
    command.env("DEBUGINFOD_CACHE_PATH", folder.path().join("cache"));
    let mut tool = Tool::spawn(command.stdin(Stdio::null()))?;
    tool.wait_for_stderr("tracing brk(2)")?;
    program.work()?;
    tool.signal(Signal::SIGINT)?;
    let _question = server.accept()?;
    let asked = Instant::now();
    let ended = tool.interrupt()?;
    // Uninterrupted, the tool would wait for a minute.
    ensure!(
        asked.elapsed() < Duration::from_secs(40),
        "{:?}",
        asked.elapsed()
    );
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(
        ended.stderr.contains("the end was requested"),
        "{}",
        ended.stderr
    );
    let calls = ended
        .stdout
        .lines()
        .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
    ensure!(calls.sum::<u64>() == COUNT, "{ended:?}");
    Ok(())
}
