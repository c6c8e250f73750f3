//! Cgroups (version 2) by the id that the kernel knows them by.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::filter;
use crate::text;

/// The processes that are in a cgroup or below it now, by the path of its folder.
///
/// # Errors
/// If it is no cgroup.
pub fn processes_below(folder: &Path) -> Result<Vec<u32>> {
    let list = fs::read_to_string(folder.join("cgroup.procs"))
        .with_context(|| format!("{} is no cgroup of version 2", folder.display()))?;
    let mut pids: Vec<u32> = list.lines().filter_map(|line| line.parse().ok()).collect();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        // One that has gone meanwhile has no processes.
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            pids.extend(processes_below(&entry.path()).unwrap_or_default());
        }
    }
    Ok(pids)
}

/// Paths of cgroups, also of such as have gone since they were last looked at.
#[derive(Debug, Default)]
pub struct Cgroups {
    mount: Option<PathBuf>,
    /// None: it was not there when it was asked for. Ids are not used twice.
    paths: HashMap<u64, Option<String>>,
}

impl Cgroups {
    /// Those that there are now.
    pub fn new() -> Self {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let mut cgroups = Self {
            mount: filter::cgroup2_mount(&mounts).map(PathBuf::from),
            ..Self::default()
        };
        cgroups.look();
        cgroups
    }

    /// The path of a cgroup below the mount, `/` for the root; None if it was gone before anybody
    /// asked, or is not in our cgroup namespace.
    pub fn path(&mut self, id: u64) -> Option<&str> {
        if !self.paths.contains_key(&id) {
            self.look();
        }
        self.paths.entry(id).or_default().as_deref()
    }

    fn look(&mut self) {
        if let Some(mount) = self.mount.clone() {
            self.look_at(&mount, "/");
        }
    }

    /// The id of a cgroup is its folder's inode.
    fn look_at(&mut self, folder: &Path, name: &str) {
        let Ok(metadata) = fs::metadata(folder) else {
            return;
        };
        self.paths.insert(metadata.ino(), Some(name.to_owned()));
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                let child = entry.file_name();
                let child = text::escape_bytes(child.as_encoded_bytes());
                let separator = if name.ends_with('/') { "" } else { "/" };
                self.look_at(&entry.path(), &format!("{name}{separator}{child}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_known_by_their_inodes() {
        let folder = tempfile::tempdir().expect("a folder");
        let ino = |path: &Path| fs::metadata(path).expect("it is there").ino();
        fs::create_dir_all(folder.path().join("a/b\x1b")).expect("folders");
        let mut cgroups = Cgroups {
            mount: Some(folder.path().to_owned()),
            ..Cgroups::default()
        };
        assert_eq!(cgroups.path(ino(folder.path())), Some("/"));
        assert_eq!(cgroups.path(ino(&folder.path().join("a"))), Some("/a"));
        let inner = ino(&folder.path().join("a/b\x1b"));
        // Before the other one goes, whose inode it could get: no cgroup would.
        let later = folder.path().join("c");
        fs::create_dir(&later).expect("a folder");
        fs::remove_dir(folder.path().join("a/b\x1b")).expect("it is empty");
        assert_eq!(cgroups.path(inner), Some("/a/b\\x1b"));

        assert_eq!(cgroups.path(ino(&later)), Some("/c"));
        assert_eq!(cgroups.path(u64::MAX), None);
    }

    #[test]
    fn without_a_mount_none_is_known() {
        assert_eq!(Cgroups::default().path(1), None);
    }
}
