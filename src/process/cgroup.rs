//! Cgroups (version 2) by their ids in the kernel.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::host::cgroup_tree;
use crate::host::mounts::Mounts;
use crate::print::text;
use crate::process::proc;

/// Returns the processes that are now in a cgroup or below it; `folder` is the cgroup's directory.
///
/// # Errors
/// If the directory is no cgroup.
pub fn processes_below(folder: &Path) -> Result<Vec<u32>> {
    let list = fs::read_to_string(folder.join("cgroup.procs"))
        .with_context(|| format!("{} is no cgroup of version 2", folder.display()))?;
    let mut pids: Vec<u32> = list.lines().filter_map(|line| line.parse().ok()).collect();
    for child in cgroup_tree::child_folders(folder) {
        // A cgroup that was removed meanwhile has no processes.
        pids.extend(processes_below(&child).unwrap_or_default());
    }
    Ok(pids)
}

/// Whether a cgroup is `folder` or below it; both are paths from the root of the hierarchy.
pub fn is_in(cgroup: &str, folder: &str) -> bool {
    Path::new(cgroup).starts_with(folder)
}

/// Maximum number of cgroups in a search by name: a host in normal operation has fewer.
const MAX_SEARCHED: usize = 100_000;
/// Minimum number of digits that are taken for the beginning of a container's id or of a pod's uid; fewer may be a
/// name.
const MIN_DIGITS: usize = 8;
/// Lengths of a pod's uid, without and with dashes.
const UID_LENGTHS: [usize; 2] = [32, 36];
/// Number of digits of a container's full id.
const ID_DIGITS: usize = 64;
/// Character that replaces the middle of a name that is too long for the column CONTAINER.
pub(crate) const LEFT_OUT: char = '…';

/// Returns the directories below `mount` of the cgroups that have this name. The name can be the directory's own name,
/// or that of a systemd service without `.service`. The middle of either can be omitted. The name can also be the first
/// digits of the ID of a container or of the uid of a pod.
pub(crate) fn find_by_name(mount: &Path, name: &str) -> Vec<PathBuf> {
    let mut found = folders(mount, MAX_SEARCHED);
    found.retain(|folder| {
        let own_name = folder.file_name().unwrap_or_default();
        folder != mount && is_called(&own_name.to_string_lossy(), name)
    });
    found.sort();
    found
}

/// Returns the directories of cgroups from `mount` on, top level first. The search ends when there are `most` or a few
/// more.
pub(crate) fn folders(mount: &Path, most: usize) -> Vec<PathBuf> {
    let mut folders = vec![mount.to_owned()];
    let mut looked_at = 0;
    while looked_at < folders.len() && folders.len() < most {
        folders.extend(cgroup_tree::child_folders(&folders[looked_at]));
        looked_at += 1;
    }
    folders
}

fn is_called(folder: &str, name: &str) -> bool {
    let begins = |id: &str| name.len() >= MIN_DIGITS && id.starts_with(name);
    let goes_by_it = |own: &str| own == name || is_ends_of(name, own);
    goes_by_it(folder)
        || folder.strip_suffix(".service").is_some_and(goes_by_it)
        || container_id(folder).is_some_and(begins)
        || pod_uid(folder).is_some_and(|uid| begins(&uid))
}

/// Returns whether `short` consists of the beginning and the end of `whole`, with the middle omitted.
fn is_ends_of(short: &str, whole: &str) -> bool {
    short.split_once(LEFT_OUT).is_some_and(|(head, tail)| {
        let ends = head.len() + tail.len();
        let both = !head.is_empty() && !tail.is_empty() && ends < whole.len();
        both && whole.starts_with(head) && whole.ends_with(tail)
    })
}

/// Returns the container ID whose cgroup has this directory: `docker-ID.scope`, `cri-containerd-ID.scope`,
/// `crio-ID.scope`, `libpod-ID.scope`, or only the id if cgroups are not made by systemd. The cgroup of a container's
/// monitor (conmon) is not a container.
pub(crate) fn container_id(folder: &str) -> Option<&str> {
    let (runtime, id) = match folder.strip_suffix(".scope") {
        Some(scope) => scope.rsplit_once('-')?,
        None => ("", folder),
    };
    let is_id = id.len() == ID_DIGITS && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    (is_id && !runtime.ends_with("conmon")).then_some(id)
}

/// Returns the uid of the pod whose cgroup has this directory: `kubepods-burstable-podUID.slice`, with underscores, or
/// `podUID`.
pub(crate) fn pod_uid(folder: &str) -> Option<String> {
    let uid = match folder.strip_suffix(".slice") {
        Some(slice) => slice.rsplit_once("-pod")?.1,
        None => folder.strip_prefix("pod")?,
    };
    // A mirror pod's uid has no dashes.
    let is_uid = UID_LENGTHS.contains(&uid.len())
        && uid
            .bytes()
            .all(|byte| byte.is_ascii_hexdigit() || b"-_".contains(&byte));
    is_uid.then(|| uid.replace('_', "-"))
}

/// Returns the path of the cgroup of a process, escaped: its cgroup of version 2, or, if that is the root, its cgroup
/// of version 1's memory controller. None if the process has exited.
pub fn of_process(pid: u32) -> Option<String> {
    in_list(&fs::read(proc::file(pid, "cgroup")).ok()?)
}

/// Returns the path of the cgroup of version 2 of a process, as /proc has it. None if the process has exited.
pub(crate) fn unified_of_process(pid: u32) -> Option<PathBuf> {
    let list = fs::read(proc::file(pid, "cgroup")).ok()?;
    Some(OsStr::from_bytes(path_in(&list, <[u8]>::is_empty)?).into())
}

/// Returns the path in the first line of a list whose controllers are wanted. The line of version 2 has none.
fn path_in(list: &[u8], wanted: fn(&[u8]) -> bool) -> Option<&[u8]> {
    list.split(|&byte| byte == b'\n').find_map(|line| {
        let mut fields = line.splitn(3, |&byte| byte == b':');
        let (controllers, path) = (fields.nth(1)?, fields.next()?);
        wanted(controllers).then_some(path)
    })
}

fn in_list(list: &[u8]) -> Option<String> {
    let path_in = |wanted| path_in(list, wanted).map(text::escape_bytes);
    let is_memory = |controllers: &[u8]| {
        controllers
            .split(|&byte| byte == b',')
            .any(|one| one == b"memory")
    };
    let unified = path_in(<[u8]>::is_empty);
    match unified.as_deref() {
        None | Some("/") => path_in(is_memory).or(unified),
        Some(_) => unified,
    }
}

/// Paths of cgroups. Paths of removed cgroups are kept.
#[derive(Debug, Default)]
pub struct Cgroups {
    mount: Option<PathBuf>,
    /// By id. None: the cgroup did not exist at the first lookup. The kernel does not reuse ids.
    paths: HashMap<u64, Option<String>>,
}

impl Cgroups {
    /// Returns the cgroups of version 2 that exist now.
    pub fn new() -> Self {
        let mut cgroups = Self {
            mount: Mounts::now().cgroup2().map(PathBuf::from),
            ..Self::default()
        };
        cgroups.look();
        cgroups
    }

    /// Returns the cgroups of the hierarchy that the memory controller is bound to, of version 1 or 2.
    pub fn of_memory() -> Self {
        let mut cgroups = Self {
            mount: Mounts::now().memory_limits().map(PathBuf::from),
            ..Self::default()
        };
        cgroups.look();
        cgroups
    }

    /// Returns the path of a cgroup below the mount, `/` for the root. None if the cgroup was removed before the
    /// first lookup, or is not in our cgroup namespace.
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

    /// Adds the paths of a cgroup and of all cgroups below it. The id of a cgroup is the inode number of its directory.
    fn look_at(&mut self, folder: &Path, path: &str) {
        let Ok(metadata) = fs::metadata(folder) else {
            return;
        };
        self.paths.insert(metadata.ino(), Some(path.to_owned()));
        for (child, path) in cgroup_tree::children(folder, path) {
            self.look_at(&child, &path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cgroup_of_a_process_is_the_one_that_it_was_put_into() {
        let two = in_list(b"12:memory:/\n1:name=systemd:/x\n0::/a\x1b/b:c\n");
        assert_eq!(two.as_deref(), Some("/a\\x1b/b:c"));
        let one = in_list(b"9:cpu,memory:/m\n2:cpuset:/c\n0::/\n");
        assert_eq!(one.as_deref(), Some("/m"));
        assert_eq!(in_list(b"0::/\n").as_deref(), Some("/"));
        assert_eq!(in_list(b"2:cpuset:/c\n"), None);
        let own = of_process(std::process::id()).expect("a cgroup");
        assert!(own.starts_with('/'));
    }

    #[test]
    fn folders_are_known_by_their_inodes() {
        let folder = tempfile::tempdir().expect("a directory");
        let ino = |path: &Path| fs::metadata(path).expect("it is there").ino();
        fs::create_dir_all(folder.path().join("a/b\x1b")).expect("directories");
        let mut cgroups = Cgroups {
            mount: Some(folder.path().to_owned()),
            ..Cgroups::default()
        };
        assert_eq!(cgroups.path(ino(folder.path())), Some("/"));
        assert_eq!(cgroups.path(ino(&folder.path().join("a"))), Some("/a"));
        let inner = ino(&folder.path().join("a/b\x1b"));
        // Made before `b` is removed: a new directory could get the inode number of `b`. A new cgroup could not.
        let later = folder.path().join("c");
        fs::create_dir(&later).expect("a directory");
        fs::remove_dir(folder.path().join("a/b\x1b")).expect("it is empty");
        assert_eq!(cgroups.path(inner), Some("/a/b\\x1b"));

        assert_eq!(cgroups.path(ino(&later)), Some("/c"));
        assert_eq!(cgroups.path(u64::MAX), None);
    }

    #[test]
    fn cgroups_go_by_the_names_of_what_runs_in_them() {
        let id = "4c01db0b339c7f2a".repeat(4);
        let other = "5".repeat(64);
        let short = &id[..12];
        let uid = "0f7b5b8e-1d2c-4b6a-9c1d-2e3f4a5b6c7d";
        let in_slice = uid.replace('-', "_");
        for (folder, name) in [
            ("db.service".to_owned(), "db"),
            ("db.service".to_owned(), "db.service"),
            ("user.slice".to_owned(), "user.slice"),
            (
                "NetworkManager-dispatcher.service".to_owned(),
                "NetworkM…spatcher",
            ),
            ("a-very-long-name.scope".to_owned(), "a-very-l…e.scope"),
            (format!("docker-{id}.scope"), short),
            (format!("cri-containerd-{id}.scope"), &id),
            (format!("crio-{id}.scope"), short),
            (format!("libpod-{id}.scope"), short),
            (id.clone(), short),
            (format!("kubepods-burstable-pod{in_slice}.slice"), uid),
            (format!("kubepods-pod{in_slice}.slice"), &uid[..8]),
            (format!("pod{uid}"), uid),
        ] {
            assert!(is_called(&folder, name), "{folder}: {name}");
        }
        for (folder, name) in [
            ("db.service".to_owned(), "d"),
            ("db.service".to_owned(), "db.servic"),
            ("db.service".to_owned(), "…"),
            ("db.service".to_owned(), "d…"),
            ("db.service".to_owned(), "d…b"),
            (
                "NetworkManager-dispatcher.service".to_owned(),
                "NetworkM…dispatch",
            ),
            (format!("docker-{id}.scope"), &id[..7]),
            (format!("docker-{other}.scope"), short),
            (format!("crio-conmon-{id}.scope"), short),
            (format!("kubepods-pod{in_slice}.slice"), &uid[1..]),
            ("session-12345678.scope".to_owned(), "12345678"),
        ] {
            assert!(!is_called(&folder, name), "{folder}: {name}");
        }
    }

    #[test]
    fn a_cgroup_contains_itself_and_what_is_below() {
        for (folder, expected) in [
            ("/a", true),
            ("/a/b", true),
            ("/a/b/", true),
            ("/", true),
            ("/a/bc", false),
            ("/a/b/c", false),
            ("/b", false),
        ] {
            assert_eq!(is_in("/a/b", folder), expected, "{folder}");
        }
    }

    #[test]
    fn cgroups_are_found_at_any_depth() {
        let folder = tempfile::tempdir().expect("a directory");
        let id = "0123456789abcdef".repeat(4);
        let paths = [
            format!("system.slice/docker-{id}.scope"),
            "system.slice/db.service".to_owned(),
            "user.slice/user-1.slice/db.service".to_owned(),
        ];
        let paths = paths.map(|path| folder.path().join(path));
        for path in &paths {
            fs::create_dir_all(path).expect("directories");
        }
        assert_eq!(find_by_name(folder.path(), &id[..12]), paths[..1]);
        assert_eq!(find_by_name(folder.path(), "db"), paths[1..]);
        assert_eq!(
            find_by_name(folder.path(), "web"),
            [""; 0].map(PathBuf::from)
        );
    }

    #[test]
    fn without_a_mount_none_is_known() {
        assert_eq!(Cgroups::default().path(1), None);
    }
}
