//! A cgroup of a test's own.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

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
        remove_cgroup(&self.0);
    }
}

/// Removes a cgroup. The kernel takes a process that has been waited for out of it a moment later.
pub(crate) fn remove_cgroup(folder: &Path) {
    for _ in 0..100 {
        match fs::remove_dir(folder) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                thread::sleep(Duration::from_millis(10));
            }
            _ => return,
        }
    }
}

/// Adds to, or with `-:` takes from, one of tracefs's lists of probes. To cut such a list short, as
/// fs::write does, would take away those of others.
pub(crate) fn change_events(list: &str, line: &str) -> io::Result<()> {
    let mut list = OpenOptions::new().append(true).open(list)?;
    list.write_all(line.as_bytes())
}
