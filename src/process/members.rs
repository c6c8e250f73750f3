//! Processes that `-n` or `--cgroup` selects, for work that is done once for each process.
//!
//! The filter of the BPF programs decides about each event. User space decides only where it has to act on a process,
//! such as to probe a file that the process has loaded. A decision is kept until the process calls exec, gets another
//! name or is moved to another cgroup, so that nothing is read for a process that does none of these.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use memchr::memmem;

use crate::host::mounts::Mounts;
use crate::process::cgroup;
use crate::process::mapping_log::Change;
use crate::process::proc::{self, Process};

/// Selection of processes by name and cgroup, with what is known about each process.
#[derive(Debug, Default)]
pub struct Members {
    name: Option<Vec<u8>>,
    cgroup: Option<Place>,
    known: HashMap<u32, bool>,
}

/// Selected cgroup.
#[derive(Debug)]
enum Place {
    /// The path in the lines of `/proc/PID/cgroup`.
    Path(PathBuf),
    /// The directory of a cgroup of which these lines do not have the path, as it is mounted from another cgroup
    /// namespace.
    Folder(PathBuf),
}

impl Members {
    /// Selects processes with a thread whose name contains `name`, in or below the cgroup with the directory `cgroup`;
    /// all native programs if neither is given.
    pub fn new(name: Option<&str>, cgroup: Option<&Path>) -> Self {
        Self {
            name: name.map(|name| name.as_bytes().to_vec()),
            cgroup: cgroup.map(Place::of),
            known: HashMap::new(),
        }
    }

    /// Whether a process is selected. The first question about a process, or about its next program, reads its files
    /// in /proc.
    pub fn contains(&mut self, pid: u32) -> bool {
        if let Some(&known) = self.known.get(&pid) {
            return known;
        }
        let selected = self.decide(pid);
        self.known.insert(pid, selected);
        selected
    }

    /// Has the next question about a process read its files once more.
    pub fn forget(&mut self, pid: u32) {
        self.known.remove(&pid);
    }

    /// Takes note of a change of a process. Returns the process if the change may have made it one of the selected.
    ///
    /// A process that gets another name stays selected until it calls exec: other threads may have the old name.
    pub fn note(&mut self, change: &Change) -> Option<u32> {
        match change {
            Change::Renamed(pid, comm) => {
                let is_named =
                    (self.name.as_ref()).is_some_and(|name| memmem::find(comm, name).is_some());
                let joins = is_named && self.known.get(pid) == Some(&false);
                joins.then(|| self.forget(*pid))?;
                Some(*pid)
            }
            Change::Exec(pid) | Change::Forked(_, pid) | Change::Exited(pid) => {
                self.forget(*pid);
                None
            }
            Change::Mapped(..) => None,
        }
    }

    fn decide(&self, pid: u32) -> bool {
        // The pid may be that of a thread in another namespace, or its process may have exited.
        let Ok(process) = Process::open(pid) else {
            return false;
        };
        pid != std::process::id()
            && self.name.as_ref().is_none_or(|name| is_named(pid, name))
            && self.cgroup.as_ref().is_none_or(|place| place.has(pid))
            && process.expect_native_program().is_ok()
    }
}

impl Place {
    fn of(folder: &Path) -> Self {
        let found = path_in_lists(folder, Mounts::now().cgroup2());
        found.map_or_else(|| Self::Folder(folder.to_owned()), Self::Path)
    }

    fn has(&self, pid: u32) -> bool {
        match self {
            Self::Path(selected) => {
                let own = cgroup::unified_of_process(pid);
                own.is_some_and(|own| own.starts_with(selected))
            }
            Self::Folder(folder) => {
                cgroup::processes_below(folder).is_ok_and(|all| all.contains(&pid))
            }
        }
    }
}

/// Returns the path that `/proc/PID/cgroup` has for a cgroup, given by its directory. None if that does not follow from
/// the mount point: if our own cgroup is not where the mount point and the path of our own list place it.
fn path_in_lists(folder: &Path, mount: Option<&Path>) -> Option<PathBuf> {
    let mount = fs::canonicalize(mount?).ok()?;
    let folder = fs::canonicalize(folder).ok()?;
    let own = cgroup::unified_of_process(std::process::id())?;
    let own_folder = mount.join(own.strip_prefix("/").ok()?);
    let list = fs::read_to_string(own_folder.join("cgroup.procs")).ok()?;
    let pid = std::process::id().to_string();
    let is_there = list.lines().any(|line| line == pid);
    is_there.then(|| Path::new("/").join(folder.strip_prefix(&mount).unwrap_or(&folder)))
}

/// Whether a thread of a process has a name that contains `name`.
fn is_named(pid: u32, name: &[u8]) -> bool {
    let has = |path: String| fs::read(path).is_ok_and(|comm| memmem::find(&comm, name).is_some());
    if has(format!("/proc/{pid}/comm")) {
        return true;
    }
    let mut others = proc::tids(pid).unwrap_or_default().into_iter();
    others.any(|tid| tid != pid && has(format!("/proc/{pid}/task/{tid}/comm")))
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    fn renamed(pid: u32, comm: &str) -> Change {
        Change::Renamed(pid, comm.as_bytes().to_vec())
    }

    fn members(name: &str) -> Members {
        Members::new(Some(name), None)
    }

    #[test]
    fn a_decision_is_kept_until_a_change_can_make_another_one() {
        let mut child = Command::new("sleep").arg("1000").spawn().expect("a child");
        let pid = child.id();
        // The kernel lets the parent of a vfork(2) run before it gives the child its new name.
        while fs::read(format!("/proc/{pid}/comm")).expect("it runs") != b"sleep\n" {
            thread::yield_now();
        }
        let (mut of_child, mut of_none) = (members("slee"), members("no such name"));
        assert!(of_child.contains(pid) && !of_none.contains(pid));
        // The files in /proc are read at the next question only after one of these changes.
        for (change, reads) in [
            (renamed(pid, "x no such name"), true),
            (renamed(pid, "another name"), false),
            (Change::Exec(pid), true),
            (Change::Forked(1, pid), true),
            (Change::Forked(pid, 1), false),
            (Change::Exited(pid), true),
        ] {
            of_none.known.insert(pid, false);
            let joins = matches!(change, Change::Renamed(..)) && reads;
            assert_eq!(of_none.note(&change), joins.then_some(pid), "{change:?}");
            assert_eq!(
                of_none.known.get(&pid),
                (!reads).then_some(&false),
                "{change:?}"
            );
        }
        of_child.note(&renamed(pid, "x"));
        assert!(of_child.known[&pid], "other threads may have the name");
        child.kill().and_then(|()| child.wait()).expect("its end");
    }

    #[test]
    fn a_process_has_the_names_of_all_its_threads() {
        let (ready, is_ready) = mpsc::channel();
        let (end, ends) = mpsc::channel::<()>();
        let named = thread::Builder::new().name("members-thread".into());
        let named = named.spawn(move || {
            ready.send(()).expect("the test waits");
            let _ = ends.recv();
        });
        is_ready.recv().expect("the thread runs");
        assert!(is_named(std::process::id(), b"mbers-thr"));
        drop(end);
        named.expect("a thread").join().expect("it ends");
        assert!(!is_named(std::process::id(), b"mbers-thrx"));
        assert!(!members("").contains(std::process::id()), "the tool itself");
        assert!(!is_named(i32::MAX as u32, b"a"));
    }

    #[test]
    fn a_cgroup_is_known_by_the_path_in_the_lists() {
        let mounts = Mounts::now();
        let Some(mount) = mounts.cgroup2() else {
            eprintln!("not run: no cgroups of version 2");
            return;
        };
        let own = cgroup::unified_of_process(std::process::id()).expect("our cgroup");
        let folder = mount.join(own.strip_prefix("/").expect("a whole path"));
        let Some(path) = path_in_lists(&folder, Some(mount)) else {
            eprintln!("not run: cgroups are mounted from another namespace");
            return;
        };
        assert_eq!(path, own);
        for place in [Place::Path(path), Place::Folder(folder)] {
            assert!(place.has(std::process::id()), "{place:?}");
        }
        assert!(!Place::Path(own.join("below")).has(std::process::id()));
        // A directory that only looks like a mount point does not have our process in its list.
        let other = tempfile::tempdir().expect("a directory");
        assert_eq!(path_in_lists(other.path(), Some(other.path())), None);
    }
}
