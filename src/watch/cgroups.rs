//! Memory cgroups of both versions: what each uses, holds and may use, how long its tasks have waited, and its kills.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::host::memory_cgroups::{self, MAX_GROUPS, Version};
use crate::host::mounts::Mounts;
use crate::host::values;
use crate::process::labels::Workload;
use crate::watch::growth::Growth;
use crate::watch::reread::{FileBudget, Reread, number};
use crate::watch::ring::{Ring, Sample};

/// Number of cgroups that are read in full at each look: the nearest to their limits, and all that are suspicious.
const NEAREST: usize = 20;
/// Share of the time in which tasks wait for memory from which on a cgroup is under pressure.
const PRESSED: f64 = 0.1;
/// Minimum time over which that share is measured.
const PRESSURE_WINDOW: Duration = Duration::from_secs(2);

/// Numbers of one cgroup.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CgroupNumbers {
    /// Bytes in use, including page cache.
    pub current: u64,
    /// Bytes in use that the kernel cannot reclaim without swap, as of the last full read.
    pub held: u64,
    /// The cgroup's own limit, in bytes. None if it has none.
    pub limit: Option<u64>,
    /// Number of times that the limit was hit.
    pub hits: u64,
    /// Number of processes of the cgroup itself that the OOM killer has killed.
    pub oom_kills: u64,
    /// Microseconds in which at least one task waited for memory. None if the kernel does not report pressure by cgroup.
    pub some_us: Option<u64>,
    /// Microseconds in which all tasks that were not idle waited.
    pub full_us: Option<u64>,
}

/// Cgroup that is watched.
#[derive(Debug)]
pub struct WatchedCgroup {
    /// Path below the mount, escaped.
    pub path: String,
    /// Directory of the cgroup.
    pub folder: PathBuf,
    /// What runs in the cgroup.
    pub workload: Workload,
    /// Numbers of the last look.
    pub now: CgroupNumbers,
    /// Whether tasks wait for memory.
    pub is_pressed: bool,
    /// Growth of `held` toward the limit.
    pub growth: Growth,
    /// Numbers of the last minutes, as of the full reads.
    pub before: Ring,
    version: &'static Version,
    /// Inode of the directory: a cgroup that is created anew under the same name is another one.
    inode: u64,
    current: Reread,
    stat: Reread,
    events: Option<Reread>,
    hits: Option<Reread>,
    pressure: Option<Reread>,
    /// Time of a look, and `some_us` at that time: the begin of the present measurement of pressure.
    pressure_since: Option<(Duration, u64)>,
    /// Usage at the last full read, ...
    current_then: u64,
    /// ... and the time of that read.
    looked: Option<Duration>,
    is_gone: bool,
}

/// Processes of a cgroup that were killed since the look before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewKills {
    /// Path of the cgroup, escaped.
    pub path: String,
    /// What ran in the cgroup.
    pub workload: Workload,
    /// Number of processes.
    pub count: u64,
}

/// All cgroups that count memory, but the roots.
#[derive(Debug)]
pub struct Cgroups {
    roots: Vec<(PathBuf, &'static Version)>,
    /// Files with the number of cgroups of each hierarchy, and that number at the last look.
    populations: Vec<(Reread, Option<u64>)>,
    groups: BTreeMap<PathBuf, WatchedCgroup>,
    budget: FileBudget,
    most: usize,
    /// Number of cgroups that are not watched, as there are too many.
    left_out: usize,
    /// Whether a read has failed since the last walk, so that a cgroup has been removed.
    is_outdated: bool,
}

impl Cgroups {
    /// Finds the hierarchies with memory cgroups among the mounts of this process, or at `root`, if that is given. At
    /// most `most` cgroups are watched, the largest ones.
    pub fn new(root: Option<&Path>, budget: FileBudget, most: usize) -> Self {
        let roots = match root {
            Some(root) => vec![(root.to_owned(), memory_cgroups::version_at(root))],
            None => memory_cgroups::memory_mounts(&Mounts::now()),
        };
        let population = |(root, version): &(PathBuf, &'static Version)| {
            let path = version.population_file(root);
            Some((Reread::open(path, &budget).ok()?, None))
        };
        Self {
            populations: roots.iter().filter_map(population).collect(),
            roots,
            groups: BTreeMap::new(),
            budget,
            most,
            left_out: 0,
            is_outdated: true,
        }
    }

    /// Returns the cgroups, in the order of their directories.
    pub fn iter(&self) -> impl Iterator<Item = &WatchedCgroup> {
        self.groups.values()
    }

    /// Returns the cgroups, to add to their growth.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut WatchedCgroup> {
        self.groups.values_mut()
    }

    /// Returns the cgroup at this path below a mount, escaped.
    pub fn at_path(&self, path: &str) -> Option<&WatchedCgroup> {
        self.iter().find(|group| group.path == path)
    }

    /// Returns the number of cgroups that are not watched, as there are too many.
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// Whether cgroups were created or removed since the last walk: the number of cgroups is another one, or one cannot
    /// be read any more.
    pub fn is_outdated(&mut self, buffer: &mut Vec<u8>) -> bool {
        for (file, known) in &mut self.populations {
            let now = file.read(buffer).ok().and_then(population);
            let before = std::mem::replace(known, now);
            self.is_outdated |= before != now;
        }
        self.is_outdated
    }

    /// Walks the tree: adds new cgroups, forgets removed ones, and reads all limits.
    pub fn walk(&mut self, name: &mut dyn FnMut(&str) -> Workload) {
        let mut found: Vec<(PathBuf, String, &'static Version, u64)> = Vec::new();
        for &(ref root, version) in &self.roots {
            memory_cgroups::visit(root, MAX_GROUPS, |folder, path| {
                let current = memory_cgroups::number(&folder.join(version.current));
                if let Some(current) = current.filter(|_| path != "/") {
                    found.push((folder.to_owned(), path.to_owned(), version, current));
                }
            });
        }
        self.left_out = found.len().saturating_sub(self.most);
        if self.left_out > 0 {
            found.sort_by_key(|&(.., current)| std::cmp::Reverse(current));
            found.truncate(self.most);
        }
        let mut before = std::mem::take(&mut self.groups);
        for (folder, path, version, _) in found {
            let Ok(inode) = fs::metadata(&folder).map(|status| status.ino()) else {
                continue;
            };
            let known = before.remove(&folder);
            let known = known.filter(|group| group.inode == inode && !group.is_gone);
            let group = known.map_or_else(
                || WatchedCgroup::open(&folder, path, version, inode, &self.budget, name),
                Ok,
            );
            if let Ok(mut group) = group {
                group.now.limit = version.limit(&folder);
                self.groups.insert(folder, group);
            }
        }
        self.is_outdated = false;
    }

    /// Reads the cgroups: the usage and the kills of each, and all numbers of those that are near their limits or
    /// suspicious; of all, with `whole`. Returns the kills since the look before.
    pub fn look(&mut self, at: Duration, whole: bool, buffer: &mut Vec<u8>) -> Vec<NewKills> {
        let mut kills = Vec::new();
        for group in self.groups.values_mut() {
            match group.look(buffer) {
                Ok(0) => {}
                Ok(count) => kills.push(NewKills {
                    path: group.path.clone(),
                    workload: group.workload.clone(),
                    count,
                }),
                Err(_) => {
                    group.is_gone = true;
                    self.is_outdated = true;
                }
            }
        }
        let near = self.nearest();
        for (folder, group) in &mut self.groups {
            let is_due = whole || group.growth.suspicion().is_some() || near.contains(folder);
            if is_due && !group.is_gone && group.look_closely(at, buffer).is_err() {
                group.is_gone = true;
                self.is_outdated = true;
            }
        }
        kills
    }

    /// Returns the directories of the cgroups that are nearest to their limits.
    fn nearest(&self) -> Vec<PathBuf> {
        let limited = self
            .groups
            .iter()
            .filter(|(_, group)| group.now.limit.is_some());
        let mut shares: Vec<_> = limited
            .map(|(folder, group)| (group.share(), folder))
            .collect();
        if shares.len() > NEAREST {
            shares.select_nth_unstable_by(NEAREST, |(a, _), (b, _)| b.total_cmp(a));
            shares.truncate(NEAREST);
        }
        shares
            .into_iter()
            .map(|(_, folder)| folder.clone())
            .collect()
    }
}

impl WatchedCgroup {
    fn open(
        folder: &Path,
        path: String,
        version: &'static Version,
        inode: u64,
        budget: &FileBudget,
        name: &mut dyn FnMut(&str) -> Workload,
    ) -> io::Result<Self> {
        let open = |file: &str| Reread::open(folder.join(file), budget);
        let mut group = Self {
            workload: name(&path),
            path,
            folder: folder.to_owned(),
            now: CgroupNumbers::default(),
            is_pressed: false,
            growth: Growth::default(),
            before: Ring::default(),
            version,
            inode,
            current: open(version.current)?,
            stat: open("memory.stat")?,
            events: open(version.own_events).ok(),
            hits: version.hits_file.and_then(|file| open(file).ok()),
            pressure: open("memory.pressure").ok(),
            pressure_since: None,
            current_then: 0,
            looked: None,
            is_gone: false,
        };
        // Kills of before are none of this run.
        group.look(&mut Vec::new())?;
        Ok(group)
    }

    /// Returns an upper bound of the share of the limit that is held: all usage that has come since the last full read
    /// may be held.
    fn share(&self) -> f64 {
        let since = self.now.current.saturating_sub(self.current_then);
        let limit = self.now.limit.unwrap_or(u64::MAX).max(1);
        self.now.held.saturating_add(since) as f64 / limit as f64
    }

    /// Whether the look at this time was a full read.
    pub fn is_fresh(&self, at: Duration) -> bool {
        self.looked == Some(at)
    }

    /// Reads the usage and the events. Returns the number of kills since the last read.
    fn look(&mut self, buffer: &mut Vec<u8>) -> io::Result<u64> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        self.now.current = number(self.current.read(buffer)?).ok_or_else(gone)?;
        if let Some(events) = &self.events {
            let [kills, hits] = values::pick(events.read(buffer)?, ["oom_kill", "max"]);
            let before = std::mem::replace(&mut self.now.oom_kills, kills.unwrap_or_default());
            self.now.hits = hits.unwrap_or(self.now.hits);
            return Ok(self.now.oom_kills.saturating_sub(before));
        }
        Ok(0)
    }

    /// Reads what is held, and how long tasks have waited.
    fn look_closely(&mut self, at: Duration, buffer: &mut Vec<u8>) -> io::Result<()> {
        let stat = self.stat.read(buffer)?;
        self.now.held = self.version.held(self.now.current, stat);
        self.current_then = self.now.current;
        self.looked = Some(at);
        self.before.add(Sample {
            at,
            held: self.now.held,
            current: self.now.current,
        });
        if let Some(hits) = &self.hits {
            self.now.hits = number(hits.read(buffer)?).unwrap_or_default();
        }
        // A kernel without pressure information has the file, but reading it fails.
        if let Some(Ok(pressure)) = self.pressure.as_ref().map(|file| file.read(buffer)) {
            let [some, full] = stalled(pressure);
            (self.now.some_us, self.now.full_us) = (some, full);
            self.measure_pressure(at);
        }
        Ok(())
    }

    fn measure_pressure(&mut self, at: Duration) {
        let Some(some) = self.now.some_us else { return };
        let (since, then) = *self.pressure_since.get_or_insert((at, some));
        let span = at.saturating_sub(since);
        if span >= PRESSURE_WINDOW {
            let stalled = Duration::from_micros(some.saturating_sub(then));
            self.is_pressed = stalled.as_secs_f64() >= PRESSED * span.as_secs_f64();
            self.pressure_since = Some((at, some));
        }
    }
}

/// Parses the number of cgroups in a root's `cgroup.stat` (version 2), or that of the memory controller in /proc/cgroups
/// (version 1): `memory 4 37 1`.
fn population(content: &[u8]) -> Option<u64> {
    if let [Some(descendants)] = values::pick(content, ["nr_descendants"]) {
        return Some(descendants);
    }
    let text = str::from_utf8(content).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("memory\t"))?;
    line.split('\t').nth(1)?.parse().ok()
}

/// Parses the totals of `memory.pressure`: `some avg10=… total=37` and `full …`, in microseconds.
fn stalled(pressure: &[u8]) -> [Option<u64>; 2] {
    let text = str::from_utf8(pressure).unwrap_or_default();
    ["some ", "full "].map(|kind| {
        let line = text.lines().find_map(|line| line.strip_prefix(kind))?;
        line.rsplit_once("total=")?.1.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Folder in the form of a hierarchy of version 2.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            Self(tempfile::tempdir().expect("a directory"))
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
            fs::write(path, text).expect("a file");
        }

        /// Writes a cgroup that uses `mib`, of which `file` are page cache.
        fn cgroup(&self, name: &str, mib: u64, file: u64, limit: &str) {
            self.write(
                &format!("{name}/memory.current"),
                &format!("{}\n", mib * MIB),
            );
            self.write(
                &format!("{name}/memory.stat"),
                &format!("file {}\nshmem 0\n", file * MIB),
            );
            self.write(&format!("{name}/memory.max"), limit);
            self.kills(name, 3);
        }

        fn kills(&self, name: &str, kills: u64) {
            let events = format!("low 0\nmax 7\noom 1\noom_kill {kills}\n");
            self.write(&format!("{name}/memory.events.local"), &events);
        }

        fn watched(&self, most: usize) -> Cgroups {
            let mut groups = Cgroups::new(Some(self.0.path()), FileBudget::new(100), most);
            groups.walk(&mut |_| Workload::default());
            groups
        }
    }

    fn paths(groups: &Cgroups) -> Vec<&str> {
        groups.iter().map(|group| &*group.path).collect()
    }

    #[test]
    fn numbers_are_read_and_kills_are_new_ones_only() {
        let tree = Tree::new();
        tree.cgroup("a", 100, 70, "max");
        tree.cgroup("a/b", 90, 60, "104857600");
        tree.write(
            "a/b/memory.pressure",
            "some avg10=0.00 avg60=0.00 avg300=0.00 total=11\nfull avg10=0 total=5\n",
        );
        let mut groups = tree.watched(10);
        let mut buffer = Vec::new();
        assert_eq!(groups.look(Duration::from_secs(1), true, &mut buffer), []);
        assert_eq!(paths(&groups), ["/a", "/a/b"]);
        let b = groups.iter().last().expect("two");
        let numbers = CgroupNumbers {
            current: 90 * MIB,
            held: 30 * MIB,
            limit: Some(100 * MIB),
            hits: 7,
            oom_kills: 3,
            some_us: Some(11),
            full_us: Some(5),
        };
        assert_eq!(b.now, numbers);
        tree.kills("a/b", 5);
        let kills = groups.look(Duration::from_secs(2), false, &mut buffer);
        assert_eq!(
            (&*kills[0].path, kills[0].count, kills.len()),
            ("/a/b", 2, 1)
        );
        assert_eq!(groups.look(Duration::from_secs(3), false, &mut buffer), []);
    }

    #[test]
    fn tasks_that_wait_for_a_tenth_of_the_time_are_under_pressure() {
        let tree = Tree::new();
        tree.cgroup("a", 1, 0, "max");
        let stalled_for = |total_us: u64| {
            let text = format!("some avg10=0.00 total={total_us}\nfull total=0\n");
            tree.write("a/memory.pressure", &text);
        };
        stalled_for(37);
        let mut groups = tree.watched(10);
        let mut pressed = |second: u64, total_us: u64| {
            stalled_for(total_us);
            groups.look(Duration::from_secs(second), true, &mut Vec::new());
            groups.iter().next().is_some_and(|group| group.is_pressed)
        };
        assert!(!pressed(0, 37));
        assert!(!pressed(1, 200_037), "the window is not over");
        assert!(pressed(2, 200_037));
        assert!(pressed(3, 200_037));
        assert!(!pressed(4, 399_000));
        assert_eq!(
            stalled(b"some avg10=0.00 total=7\nfull avg10=0.00 total=5\n"),
            [Some(7), Some(5)]
        );
        assert_eq!(stalled(b""), [None, None]);
    }

    #[test]
    fn those_near_their_limit_are_read_in_full_at_each_look() {
        let tree = Tree::new();
        for at in 0..30 {
            tree.cgroup(&format!("c{at:02}"), 10 + at, 0, "104857600");
        }
        tree.cgroup("unlimited", 90, 0, "max");
        let mut groups = tree.watched(100);
        let mut buffer = Vec::new();
        let fresh = |groups: &mut Cgroups, second: u64, whole, buffer: &mut Vec<u8>| {
            let at = Duration::from_secs(second);
            groups.look(at, whole, buffer);
            let fresh = groups.iter().filter(|group| group.is_fresh(at));
            fresh.map(|group| group.path.clone()).collect::<Vec<_>>()
        };
        assert_eq!(fresh(&mut groups, 1, true, &mut buffer).len(), 31);
        let nearest = fresh(&mut groups, 2, false, &mut buffer);
        assert_eq!((nearest.len(), &*nearest[0]), (NEAREST, "/c10"));
        for at in 0..30 {
            tree.write(&format!("c{at:02}/memory.current"), "4096\n");
        }
        assert_eq!(fresh(&mut groups, 20, true, &mut buffer).len(), 31);
        assert_eq!(
            fresh(&mut groups, 21, false, &mut buffer).len(),
            NEAREST,
            "all are equal"
        );
        // The usage of the smallest has grown: that may be held.
        tree.write("c00/memory.current", &format!("{}\n", 95 * MIB));
        assert!(fresh(&mut groups, 22, false, &mut buffer).contains(&"/c00".to_owned()));
    }

    #[test]
    fn the_number_of_cgroups_tells_of_new_and_removed_ones() {
        assert_eq!(
            population(b"nr_descendants 37\nnr_dying_descendants 5\n"),
            Some(37)
        );
        let first =
            b"#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t2\t7\t1\nmemory\t4\t11\t1\n";
        assert_eq!(population(first), Some(11));
        assert_eq!(population(b""), None);
        let tree = Tree::new();
        tree.write("cgroup.stat", "nr_descendants 1\n");
        tree.cgroup("a", 1, 0, "max");
        let mut groups = tree.watched(10);
        let mut buffer = Vec::new();
        assert!(groups.is_outdated(&mut buffer), "the number was not known");
        groups.walk(&mut |_| Workload::default());
        assert!(!groups.is_outdated(&mut buffer));
        tree.write("cgroup.stat", "nr_descendants 2\n");
        assert!(groups.is_outdated(&mut buffer));
    }

    #[test]
    fn removed_cgroups_and_the_smallest_of_too_many_are_not_watched() {
        let tree = Tree::new();
        tree.cgroup("a", 10, 0, "max");
        tree.cgroup("b", 30, 0, "max");
        tree.cgroup("c", 20, 0, "max");
        let mut groups = tree.watched(2);
        assert_eq!((paths(&groups), groups.left_out()), (vec!["/b", "/c"], 1));
        fs::remove_dir_all(tree.0.path().join("b")).expect("it is there");
        groups.walk(&mut |_| Workload::default());
        assert_eq!((paths(&groups), groups.left_out()), (vec!["/a", "/c"], 0));
    }
}
