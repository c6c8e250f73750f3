//! Memory cgroups of both versions: their usage, and their limits.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::host::cgroup_tree;
use crate::host::mounts::Mounts;
use crate::host::values::{self, Values};
use crate::print::text;

/// Limit of version 1 that means no limit, and all above it: the kernel reports 2^63 bytes, rounded down to a page of
/// any size.
const NO_LIMIT: u64 = 1 << 62;
/// Minimum number of removed cgroups for which [`MemoryCgroups::most_dying`] is determined.
const MANY_DYING: u64 = 1000;
/// Maximum number of cgroups of each version that are visited: a host of thousands of containers has fewer.
pub const MAX_GROUPS: usize = 20_000;

/// Cgroup with a limit, at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryCgroup {
    /// The cgroup's directory.
    pub folder: PathBuf,
    /// The cgroup's path below the mount, escaped; `/` for the root.
    pub path: String,
    /// Bytes in use, including page cache.
    pub current: u64,
    /// Bytes in use that the kernel cannot reclaim without swap: no page cache but shared memory, and no reclaimable slab
    /// memory.
    pub held: u64,
    /// The limit, in bytes.
    pub limit: u64,
    /// Number of times that the limit was hit.
    pub hits: u64,
    /// Number of processes that were killed because of a limit of this cgroup or of one below it.
    pub oom_kills: u64,
}

impl MemoryCgroup {
    /// Returns the percentage of the limit that is held.
    pub fn percent(&self) -> f64 {
        self.held as f64 * 100.0 / self.limit.max(1) as f64
    }
}

/// Memory usage of cgroups, in the order of their paths.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct CgroupSizes {
    /// The cgroups but the roots.
    pub groups: Vec<CgroupSize>,
    /// Whether cgroups were omitted because there are more than [`MAX_GROUPS`] of one version.
    pub left_out: bool,
}

/// Memory that a cgroup and the cgroups below it use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupSize {
    /// The cgroup's path below the mount, escaped.
    pub path: String,
    /// Bytes in use, including page cache.
    pub current: u64,
}

/// Memory cgroups that have a limit, and the number of removed cgroups.
#[derive(Debug, Default, Clone)]
pub struct MemoryCgroups {
    /// The cgroups with a limit, in the order of their paths.
    pub limited: Vec<MemoryCgroup>,
    /// Number of cgroups that were removed and still hold memory.
    pub dying: u64,
    /// The innermost cgroup below which most of the removed ones were. None if there are fewer than a thousand of
    /// them.
    pub most_dying: Option<DyingCgroups>,
    /// Whether cgroups were omitted because there are too many.
    pub left_out: bool,
    /// Whether some of the cgroups are of version 1, which other tools do not accept.
    pub version_1: bool,
}

/// Number of removed cgroups below an existing one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DyingCgroups {
    /// The cgroup's directory.
    pub folder: PathBuf,
    /// The cgroup's path below the mount, escaped; `/` for the root.
    pub path: String,
    /// Number of removed cgroups below the cgroup.
    pub count: u64,
}

/// Names of the files of one version of cgroups, and of the numbers in them.
#[derive(Debug)]
pub(crate) struct Version {
    /// File with the bytes in use.
    pub(crate) current: &'static str,
    limit: &'static str,
    /// Numbers of `memory.stat`: page cache with shared memory, shared memory, and slab memory that can be reclaimed.
    reclaimable: [&'static str; 3],
    events: &'static str,
    /// File with the number of processes of the cgroup itself that were killed, without the cgroups below it.
    pub(crate) own_events: &'static str,
    /// File with the number of times that the limit was hit, if `events` does not have it.
    pub(crate) hits_file: Option<&'static str>,
}

pub(crate) const VERSION_2: Version = Version {
    current: "memory.current",
    limit: "memory.max",
    reclaimable: ["file", "shmem", "slab_reclaimable"],
    events: "memory.events",
    own_events: "memory.events.local",
    hits_file: None,
};

/// Version 1 does not report slab memory.
pub(crate) const VERSION_1: Version = Version {
    current: "memory.usage_in_bytes",
    limit: "memory.limit_in_bytes",
    reclaimable: ["total_cache", "total_shmem", ""],
    events: "memory.oom_control",
    own_events: "memory.oom_control",
    hits_file: Some("memory.failcnt"),
};

impl Version {
    /// Returns the bytes that a cgroup holds: those in use, without page cache (but with shared memory, which only swap
    /// can take) and without reclaimable slab memory. `current` is the cgroup's usage, `stat` the content of its
    /// `memory.stat`.
    ///
    /// Unlike usage without inactive file cache, this does not change as the kernel moves page cache between its lists.
    pub(crate) fn held(&self, current: u64, stat: &[u8]) -> u64 {
        let [cache, shmem, slab] =
            values::pick(stat, self.reclaimable).map(Option::unwrap_or_default);
        let file = cache.saturating_sub(shmem);
        current.saturating_sub(file).saturating_sub(slab)
    }

    /// Returns the number of times that the limit of the cgroup at this directory was hit.
    fn hits(&self, folder: &Path, events: &Values) -> u64 {
        let hits = match self.hits_file {
            Some(file) => number(&folder.join(file)),
            None => events.get("max"),
        };
        hits.unwrap_or_default()
    }

    /// Returns the path of the file with the number of cgroups of the hierarchy at this directory.
    pub(crate) fn population_file(&self, root: &Path) -> PathBuf {
        match self.hits_file {
            Some(_) => PathBuf::from("/proc/cgroups"),
            None => root.join("cgroup.stat"),
        }
    }

    /// Returns the limit of the cgroup at this directory, in bytes. None if the cgroup has no limit.
    pub(crate) fn limit(&self, folder: &Path) -> Option<u64> {
        number(&folder.join(self.limit)).filter(|&limit| limit < NO_LIMIT)
    }
}

impl MemoryCgroups {
    /// Reads the memory cgroups that are mounted here, of both versions.
    pub fn read() -> Self {
        let mut groups = Self::default();
        for (mount, files) in memory_mounts(&Mounts::now()) {
            let before = groups.limited.len();
            groups.look_below(&mount, files);
            groups.version_1 |= files.limit == VERSION_1.limit && groups.limited.len() > before;
            let dying = dying_below(&mount);
            groups.dying += dying;
            if dying >= MANY_DYING {
                groups.most_dying = Some(most_dying(mount, dying));
            }
        }
        groups
    }

    /// Returns a remark on the cgroups that were omitted. None if there are none.
    pub fn remark(&self) -> Option<String> {
        self.left_out
            .then(|| format!("cgroups beyond the first {MAX_GROUPS} are not examined"))
    }

    fn look_below(&mut self, mount: &Path, files: &Version) {
        self.left_out |= !visit(mount, MAX_GROUPS, |folder, path| {
            self.limited.extend(look_at(folder, path, files));
        });
    }
}

/// Returns the memory usage of the memory cgroups of both versions.
pub fn sizes() -> CgroupSizes {
    let mut sizes = CgroupSizes::default();
    for (mount, files) in memory_mounts(&Mounts::now()) {
        sizes.look_below(&mount, files, MAX_GROUPS);
    }
    sizes
}

impl CgroupSizes {
    fn look_below(&mut self, mount: &Path, files: &Version, most: usize) {
        self.left_out |= !visit(mount, most, |folder, path| {
            let current = number(&folder.join(files.current)).filter(|_| path != "/");
            self.groups.extend(current.map(|current| CgroupSize {
                path: path.to_owned(),
                current,
            }));
        });
    }
}

/// Returns the directory of this cgroup in the hierarchy of the memory controller. This is the same directory if it has
/// the controller, and otherwise the directory with the same path below a mount that has the controller. `folder` can
/// be below the mount of another hierarchy, or a path below any of them.
pub fn folder_with_memory(folder: &Path) -> PathBuf {
    folder_with_memory_in(folder, &Mounts::now())
}

fn folder_with_memory_in(folder: &Path, mounts: &Mounts) -> PathBuf {
    if current(folder).is_some() {
        return folder.to_owned();
    }
    let mut hierarchies = mounts.iter().filter(|mount| mount.is_of_cgroups());
    let below = hierarchies
        .find_map(|mount| folder.strip_prefix(&mount.folder).ok())
        .or(folder.strip_prefix("/").ok())
        .unwrap_or(folder);
    let mounts = memory_mounts(mounts).into_iter();
    let mut folders = mounts.map(|(mount, _)| mount.join(below));
    folders
        .find(|folder| current(folder).is_some())
        .unwrap_or_else(|| folder.to_owned())
}

/// Returns the bytes that a cgroup uses, including page cache. None if the cgroup does not count memory.
pub fn current(folder: &Path) -> Option<u64> {
    let files = [VERSION_2.current, VERSION_1.current];
    files.iter().find_map(|file| number(&folder.join(file)))
}

/// Returns the bytes of kernel memory in the usage of a cgroup of version 1. None for a cgroup of version 2.
pub fn kernel_of_version_1(folder: &Path) -> Option<u64> {
    number(&folder.join(VERSION_1.current))?;
    // The usage of the root does not include kernel memory. Only the root has this file.
    if folder.join("release_agent").exists() {
        return Some(0);
    }
    Some(number(&folder.join("memory.kmem.usage_in_bytes")).unwrap_or_default())
}

/// Returns the limit of the cgroup at the mount itself, in bytes: in a container with a cgroup namespace, the
/// container's own limit. None if the cgroup has no limit, as on the host.
pub fn root_limit() -> Option<u64> {
    let mut mounts = memory_mounts(&Mounts::now()).into_iter();
    mounts.find_map(|(mount, files)| files.limit(&mount))
}

/// Returns the cgroups whose limits hold for a cgroup: itself and those above it, if they have one. `folder` is its
/// directory.
pub fn limits_of(folder: &Path) -> Vec<MemoryCgroup> {
    let mounts = memory_mounts(&Mounts::now()).into_iter();
    let limits = mounts.flat_map(|(mount, files)| limits_below(&mount, files, folder));
    limits.collect()
}

fn limits_below(mount: &Path, files: &Version, folder: &Path) -> Vec<MemoryCgroup> {
    let look = |above: &Path| {
        let below = above.strip_prefix(mount).ok()?;
        let path = text::escape_bytes(below.as_os_str().as_bytes());
        look_at(above, &format!("/{path}"), files)
    };
    folder.ancestors().filter_map(look).collect()
}

/// Calls `look` with the directories of all cgroups from the mount on and their escaped paths, in the order of the
/// paths, for at most `most` cgroups. Returns whether these were all.
pub(crate) fn visit(mount: &Path, most: usize, mut look: impl FnMut(&Path, &str)) -> bool {
    let mut left = vec![(mount.to_owned(), "/".to_owned())];
    for _ in 0..most {
        let Some((folder, path)) = left.pop() else {
            return true;
        };
        look(&folder, &path);
        let mut below: Vec<_> = cgroup_tree::children(&folder, &path).collect();
        // The last element is taken next.
        below.sort_unstable_by(|a, b| b.cmp(a));
        left.append(&mut below);
    }
    left.is_empty()
}

/// Returns the number of removed cgroups below this one that still exist in the kernel.
fn dying_below(folder: &Path) -> u64 {
    let stat = Values::read(folder.join("cgroup.stat")).unwrap_or_default();
    stat.get_or_zero("nr_dying_descendants")
}

/// Descends from the mount as long as one child has at least half of the removed cgroups of its parent. Returns the
/// last cgroup.
fn most_dying(mount: PathBuf, count: u64) -> DyingCgroups {
    let path = "/".to_owned();
    let mut most = DyingCgroups {
        folder: mount,
        path,
        count,
    };
    loop {
        let below = cgroup_tree::children(&most.folder, &most.path);
        let below = below.map(|(folder, path)| DyingCgroups {
            count: dying_below(&folder),
            folder,
            path,
        });
        match below.max_by_key(|child| child.count) {
            Some(child) if child.count >= most.count.div_ceil(2) => most = child,
            _ => return most,
        }
    }
}

/// Reads a cgroup. None if the cgroup has no limit, or is removed meanwhile.
fn look_at(folder: &Path, path: &str, files: &Version) -> Option<MemoryCgroup> {
    let limit = files.limit(folder)?;
    let stat = fs::read(folder.join("memory.stat")).ok()?;
    let current = number(&folder.join(files.current))?;
    let events = Values::read(folder.join(files.events)).unwrap_or_default();
    Some(MemoryCgroup {
        folder: folder.to_owned(),
        path: path.to_owned(),
        current,
        held: files.held(current, &stat),
        limit,
        hits: files.hits(folder, &events),
        oom_kills: events.get_or_zero("oom_kill"),
    })
}

/// Reads a file that contains one number. None for `max`, or if the file does not exist.
pub(crate) fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Returns the version of the cgroups of the hierarchy at this directory.
pub(crate) fn version_at(root: &Path) -> &'static Version {
    if root.join(VERSION_1.current).exists() {
        &VERSION_1
    } else {
        &VERSION_2
    }
}

/// Returns the mount points of memory cgroups. Each version is returned once, even if it is mounted in several
/// places.
pub(crate) fn memory_mounts(mounts: &Mounts) -> Vec<(PathBuf, &'static Version)> {
    let second = mounts.cgroup2().map(|mount| (mount, &VERSION_2));
    let first = mounts.cgroup1_memory().map(|mount| (mount, &VERSION_1));
    let both = second.into_iter().chain(first);
    both.map(|(mount, files)| (mount.to_owned(), files))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limits_of_a_cgroup_are_its_own_and_those_above_it() {
        let mount = tempfile::tempdir().expect("a directory");
        let write = |folder: &str, limit: &str| {
            let folder = mount.path().join(folder);
            fs::create_dir_all(&folder).expect("a directory");
            for (file, text) in [
                ("memory.max", limit),
                ("memory.current", "7"),
                ("memory.stat", ""),
            ] {
                fs::write(folder.join(file), text).expect("a file");
            }
        };
        for (folder, limit) in [
            ("a", "37"),
            ("a/b", "max"),
            ("a/b/c", "11"),
            ("a/other", "3"),
        ] {
            write(folder, limit);
        }
        let limits = limits_below(mount.path(), &VERSION_2, &mount.path().join("a/b/c"));
        let limits: Vec<_> = limits
            .iter()
            .map(|group| (&*group.path, group.limit))
            .collect();
        assert_eq!(limits, [("/a/b/c", 11), ("/a", 37)]);
        assert_eq!(limits_below(mount.path(), &VERSION_2, Path::new("/a")), []);
    }

    #[test]
    fn both_hierarchies_are_found_once() {
        let mounts = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
                      cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n\
                      cgroup2 /elsewhere cgroup2 rw 0 0\nx\n";
        let found: Vec<_> = memory_mounts(&Mounts::parse(mounts.as_bytes()))
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
    fn a_cgroup_is_found_in_the_hierarchy_that_counts_memory() {
        let root = tempfile::tempdir().expect("a directory");
        let [memory, unified] = ["memory", "unified"].map(|name| root.path().join(name));
        let (counted, named) = (memory.join("a/b"), unified.join("a/b"));
        for folder in [&counted, &named] {
            fs::create_dir_all(folder).expect("a directory");
        }
        fs::write(counted.join(VERSION_1.current), "4096\n").expect("a file");
        let mounts = format!(
            "cgroup {} cgroup rw,memory 0 0\ncgroup2 {} cgroup2 rw 0 0\n",
            memory.display(),
            unified.display()
        );
        let mounts = Mounts::parse(mounts.as_bytes());
        for folder in [&*counted, &*named, Path::new("/a/b"), Path::new("a/b")] {
            assert_eq!(folder_with_memory_in(folder, &mounts), counted);
        }
        let other = unified.join("a");
        assert_eq!(folder_with_memory_in(&other, &mounts), other);
    }

    #[test]
    fn what_has_no_limit_is_left_out() {
        let folder = tempfile::tempdir().expect("a directory");
        let write = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, text).expect("a file");
        };
        write("memory.max", "max\n");
        write("a\x1b/memory.max", "1000\n");
        write("a\x1b/memory.current", "900\n");
        write(
            "a\x1b/memory.stat",
            "anon 1\nfile 500\nshmem 150\nslab_reclaimable 50\n",
        );
        write("a\x1b/memory.events", "low 0\nmax 7\noom_kill 2\n");
        let mut groups = MemoryCgroups::default();
        groups.look_below(folder.path(), &VERSION_2);
        assert_eq!(groups.limited.len(), 1, "{groups:?}");
        let group = &groups.limited[0];
        assert_eq!(group.path, "/a\\x1b");
        assert_eq!((group.hits, group.oom_kills), (7, 2));
        assert!((group.percent() - 50.0).abs() < 1e-9, "{group:?}");
    }

    #[test]
    fn what_is_held_is_usage_without_page_cache_but_with_shared_memory() {
        let second = b"anon 300\nfile 500\nfile_mapped 90\nshmem 150\ninactive_file 1\nslab_reclaimable 50\n";
        assert_eq!(VERSION_2.held(1000, second), 600);
        let first = b"cache 1\nshmem 1\ntotal_cache 500\ntotal_rss 7\ntotal_shmem 150\n";
        assert_eq!(VERSION_1.held(1000, first), 650);
        // The numbers are of different moments.
        assert_eq!(VERSION_2.held(100, second), 0);
        assert_eq!(VERSION_2.held(100, b""), 100);
    }

    #[test]
    fn all_cgroups_are_visited_in_the_order_of_their_paths() {
        let folder = tempfile::tempdir().expect("a directory");
        for path in ["b/c", "a", "b-", "b/a"] {
            fs::create_dir_all(folder.path().join(path)).expect("a directory");
        }
        let mut seen = Vec::new();
        let all = visit(folder.path(), 6, |_, path| seen.push(path.to_owned()));
        assert!(all);
        assert_eq!(seen, ["/", "/a", "/b", "/b/a", "/b/c", "/b-"]);
    }

    #[test]
    fn sizes_tell_that_cgroups_were_left_out() {
        let folder = tempfile::tempdir().expect("a directory");
        for (path, current) in [("a", "4096\n"), ("b", "8192\n")] {
            let path = folder.path().join(path);
            fs::create_dir(&path).expect("a directory");
            fs::write(path.join(VERSION_2.current), current).expect("a file");
        }
        let sizes = |most| {
            let mut sizes = CgroupSizes::default();
            sizes.look_below(folder.path(), &VERSION_2, most);
            let bytes: Vec<u64> = sizes.groups.iter().map(|group| group.current).collect();
            (bytes, sizes.left_out)
        };
        assert_eq!(sizes(3), (vec![4096, 8192], false));
        assert_eq!(sizes(2), (vec![4096], true));
    }

    #[test]
    fn removed_cgroups_are_told_by_where_they_were() {
        let folder = tempfile::tempdir().expect("a directory");
        let write = |path: &str, dying: u64| {
            let path = folder.path().join(path);
            fs::create_dir_all(&path).expect("a directory");
            let stat = format!("nr_descendants 3\nnr_dying_descendants {dying}\n");
            fs::write(path.join("cgroup.stat"), stat).expect("a file");
        };
        write("", 1000);
        write("few", 300);
        write("many", 700);
        write("many/one", 340);
        write("many/two", 340);
        let dying = dying_below(folder.path());
        let most = most_dying(folder.path().to_owned(), dying);
        assert_eq!(
            (dying, most.path.as_str(), most.count),
            (1000, "/many", 700)
        );
        assert_eq!(most.folder, folder.path().join("many"));
    }
}
