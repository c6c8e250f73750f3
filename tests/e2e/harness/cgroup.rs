//! Cgroups that tests make for themselves.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Error, Result};

use crate::harness::NotHere;

/// Cgroup (v2) that a test makes for itself. Dropping it removes the cgroup.
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes a cgroup below the root of the hierarchy.
    pub(crate) fn new() -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        let mount = mounts
            .lines()
            .map(|line| line.split(' ').collect::<Vec<_>>())
            .find(|fields| fields[2] == "cgroup2")
            .context(NotHere("no cgroups of version 2"))?[1];
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let path = Path::new(mount).join(format!("memtools-{}-{number}", std::process::id()));
        fs::create_dir(&path).map_err(cannot_make_cgroup)?;
        Ok(Self(path))
    }

    /// Returns the path of the cgroup directory.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Moves a process into the cgroup.
    pub(crate) fn add(&self, pid: &str) -> Result<()> {
        fs::write(self.0.join("cgroup.procs"), pid).context("failed to move into the cgroup")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        remove_cgroup(&self.0);
    }
}

/// Returns the error of a test that could not make a cgroup: the test cannot run where cgroups are read-only.
pub(crate) fn cannot_make_cgroup(error: io::Error) -> Error {
    match error.kind() {
        ErrorKind::ReadOnlyFilesystem => NotHere("cgroups are read-only").into(),
        _ => Error::new(error).context("failed to make a cgroup"),
    }
}

/// Removes a cgroup. Retries while the cgroup is busy: the kernel takes a process out of its cgroup a moment
/// after the process has been waited for.
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

/// Appends a line to one of tracefs's lists of probes: adds a probe or, with `-:`, removes one. The list must not
/// be truncated, as fs::write does: that would remove the probes of other programs.
pub(crate) fn change_events(list: &str, line: &str) -> io::Result<()> {
    let mut list = OpenOptions::new().append(true).open(list)?;
    list.write_all(line.as_bytes())
}
