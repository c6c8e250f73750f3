//! Memory cgroups of both versions: what they use, and what they may use.

use std::fs;
use std::path::{Path, PathBuf};

use crate::host::values::Values;
use crate::print::text;

/// A limit of version 1 from here on is none: 2^63 bytes, rounded down to a page of any size.
const NO_LIMIT: u64 = 1 << 62;
/// Cgroups that are looked at, at most: a host of thousands of containers has fewer.
const MAX_GROUPS: usize = 20_000;

/// One cgroup with a limit, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryCgroup {
    /// The cgroup's folder.
    pub folder: PathBuf,
    /// The cgroup's path below the mount, escaped; `/` for the root.
    pub path: String,
    /// Bytes in use, with page cache.
    pub current: u64,
    /// Bytes of file cache that has not been used lately, which the kernel takes away first.
    pub inactive_file: u64,
    /// Bytes that it may use at most.
    pub limit: u64,
    /// How often the limit was hit.
    pub hits: u64,
    /// Processes that were killed because of a limit here or below.
    pub oom_kills: u64,
}

impl MemoryCgroup {
    /// The share of the limit that is used and cannot simply be dropped, in percent.
    pub fn percent(&self) -> f64 {
        let held = self.current.saturating_sub(self.inactive_file);
        held as f64 * 100.0 / self.limit.max(1) as f64
    }
}

/// All memory cgroups that have a limit.
#[derive(Debug, Default, Clone)]
pub struct MemoryCgroups {
    /// The cgroups with a limit, in the order of their paths.
    pub limited: Vec<MemoryCgroup>,
    /// Cgroups that were removed and still hold memory.
    pub dying: u64,
    /// Whether there were more than are looked at.
    pub left_out: bool,
    /// Whether they are cgroups of version 1, which other tools do not take.
    pub version_1: bool,
}

/// The files of one version.
struct Files {
    current: &'static str,
    limit: &'static str,
    inactive_file: &'static str,
    events: &'static str,
    hits: fn(&Path, &Values) -> u64,
}

const VERSION_2: Files = Files {
    current: "memory.current",
    limit: "memory.max",
    inactive_file: "inactive_file",
    events: "memory.events",
    hits: |_, events| events.of("max"),
};

const VERSION_1: Files = Files {
    current: "memory.usage_in_bytes",
    limit: "memory.limit_in_bytes",
    inactive_file: "total_inactive_file",
    events: "memory.oom_control",
    hits: |folder, _| number(&folder.join("memory.failcnt")).unwrap_or_default(),
};

impl MemoryCgroups {
    /// The memory cgroups that are mounted here, of whichever version has the memory controller.
    pub fn look() -> Self {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let mut groups = Self::default();
        for (mount, files) in memory_mounts(&mounts) {
            let (mut seen, before) = (0, groups.limited.len());
            groups.look_below(&mount, "/", files, &mut seen);
            groups.version_1 |= files.limit == VERSION_1.limit && groups.limited.len() > before;
            groups.dying += Values::read(mount.join("cgroup.stat"))
                .map(|stat| stat.of("nr_dying_descendants"))
                .unwrap_or_default();
        }
        groups
    }

    fn look_below(&mut self, folder: &Path, path: &str, files: &Files, seen: &mut usize) {
        *seen += 1;
        if *seen > MAX_GROUPS {
            self.left_out = true;
            return;
        }
        self.limited.extend(look_at(folder, path, files));
        let mut below: Vec<_> = fs::read_dir(folder)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
            .map(|entry| entry.file_name())
            .collect();
        below.sort_unstable();
        for name in below {
            let separator = if path.ends_with('/') { "" } else { "/" };
            let escaped = text::escape_bytes(name.as_encoded_bytes());
            self.look_below(
                &folder.join(&name),
                &format!("{path}{separator}{escaped}"),
                files,
                seen,
            );
        }
    }
}

/// The cgroup, if it has a limit. One that goes away while it is looked at has none.
fn look_at(folder: &Path, path: &str, files: &Files) -> Option<MemoryCgroup> {
    let limit = number(&folder.join(files.limit)).filter(|&limit| limit < NO_LIMIT)?;
    let stat = Values::read(folder.join("memory.stat")).ok()?;
    let events = Values::read(folder.join(files.events)).unwrap_or_default();
    Some(MemoryCgroup {
        folder: folder.to_owned(),
        path: path.to_owned(),
        current: number(&folder.join(files.current))?,
        inactive_file: stat.of(files.inactive_file),
        limit,
        hits: (files.hits)(folder, &events),
        oom_kills: events.of("oom_kill"),
    })
}

/// The number that a file has; None for `max`, or if there is no such file.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Where memory cgroups are, of the lines of /proc/self/mounts. Each hierarchy is taken once: it can be
/// mounted in several places.
fn memory_mounts(mounts: &str) -> Vec<(PathBuf, &'static Files)> {
    let (mut second, mut first) = (None, None);
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').collect();
        let [_, mount, kind, options, ..] = fields[..] else {
            continue;
        };
        match kind {
            "cgroup2" if second.is_none() => second = Some((PathBuf::from(mount), &VERSION_2)),
            "cgroup" if first.is_none() && options.split(',').any(|option| option == "memory") => {
                first = Some((PathBuf::from(mount), &VERSION_1));
            }
            _ => {}
        }
    }
    second.into_iter().chain(first).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_hierarchies_are_found_once() {
        let mounts = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n\
                      cgroup2 /elsewhere cgroup2 rw 0 0\nx\n";
        let found: Vec<_> = memory_mounts(mounts)
            .into_iter()
            .map(|(mount, files)| (mount, files.limit))
            .collect();
        assert_eq!(
            found,
            [
                ("/sys/fs/cgroup/unified".into(), "memory.max"),
                ("/sys/fs/cgroup/memory".into(), "memory.limit_in_bytes"),
            ]
        );
    }

    #[test]
    fn what_has_no_limit_is_left_out() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
            fs::write(path, text).expect("a file");
        };
        write("memory.max", "max\n");
        write("a\x1b/memory.max", "1000\n");
        write("a\x1b/memory.current", "900\n");
        write("a\x1b/memory.stat", "anon 1\ninactive_file 400\n");
        write("a\x1b/memory.events", "low 0\nmax 7\noom_kill 2\n");
        let mut groups = MemoryCgroups::default();
        groups.look_below(folder.path(), "/", &VERSION_2, &mut 0);
        assert_eq!(groups.limited.len(), 1, "{groups:?}");
        let group = &groups.limited[0];
        assert_eq!(group.path, "/a\\x1b");
        assert_eq!((group.hits, group.oom_kills), (7, 2));
        assert!((group.percent() - 50.0).abs() < 1e-9, "{group:?}");
    }
}
