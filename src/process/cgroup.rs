//! Cgroups (version 2) by the id that the kernel knows them by.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::print::text;
use crate::process::filter;

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
    /// The cgroups that there are now.
    pub fn new() -> Self {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let mut cgroups = Self {
            mount: filter::cgroup2_mount(&mounts).map(PathBuf::from),
            ..Self::default()
        };
        cgroups.look();
        cgroups
    }

    /// The cgroups of the hierarchy that the memory controller has, of version 1 or 2.
    pub fn of_memory() -> Self {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let mut cgroups = Self {
            mount: memory_mount(&mounts).map(PathBuf::from),
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

/// Where the cgroups with memory limits are: those of version 1 if the controller is bound to it, which
/// only then can be mounted with it.
fn memory_mount(mounts: &str) -> Option<&str> {
    let first = mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (mount, kind, options) = (fields.next()?, fields.next()?, fields.next()?);
        let with_memory = options.split(',').any(|option| option == "memory");
        (kind == "cgroup" && with_memory).then_some(mount)
    });
    first.or_else(|| filter::cgroup2_mount(mounts))
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
    fn memory_is_limited_in_the_first_version_if_that_is_mounted_with_it() {
        let mounts = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n\
                      cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n";
        assert_eq!(memory_mount(mounts), Some("/sys/fs/cgroup/unified"));
        let mounts = format!("{mounts}cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n");
        assert_eq!(memory_mount(&mounts), Some("/sys/fs/cgroup/memory"));
        assert_eq!(memory_mount("proc /proc proc rw 0 0\n"), None);
    }

    #[test]
    fn without_a_mount_none_is_known() {
        assert_eq!(Cgroups::default().path(1), None);
    }
}
