//! Redis, as a program of others that has much memory.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

/// Starts Redis on a socket, with its messages in the file `log`. A library is loaded before its own if `preload` names
/// one.
pub(crate) fn start_redis(socket: &Path, log: &Path, preload: Option<&str>) -> Result<Child> {
    // redis-check-rdb is the same program, in a package without a service that the system would start.
    Command::new("redis-check-rdb")
        .arg0("redis-server")
        .envs(preload.map(|library| ("LD_PRELOAD", library)))
        .args(["--port", "0", "--save", ""])
        .arg("--unixsocket")
        .arg(socket)
        .arg("--logfile")
        .arg(log)
        .stdout(Stdio::null())
        .spawn()
        .context("failed to start redis; run: scripts/need redis-tools")
}
