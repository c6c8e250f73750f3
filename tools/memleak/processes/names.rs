//! Names of processes, and the cgroups that they are in, or were in when they exited.

use std::collections::HashMap;

use memtools::process::container::{Home, Homes};
use memtools::process::proc::Process;

use crate::rows::ProcessName;

/// Names of the processes that are traced, or were traced.
pub(super) struct Names<'a> {
    known: HashMap<u32, Known>,
    /// Cgroups that the BPF programs met. None if cgroups are not wanted.
    homes: Option<Homes<'a>>,
    /// Whether text output names the container.
    container: bool,
}

/// Name and cgroup of a process.
#[derive(Default)]
struct Known {
    comm: String,
    /// Cgroup at the process's last exec or exit, by the kernel's id. 0 before these.
    cgroup: u64,
    has_exited: bool,
    /// Cgroup in which the process was found for the current report.
    home: Option<Home>,
}

impl Known {
    /// Returns the entry of a process, and makes one if there is none.
    fn of(known: &mut HashMap<u32, Self>, pid: u32) -> &mut Self {
        known.entry(pid).or_insert_with(|| Self::running(pid))
    }

    /// Makes the entry of a process that was forked and has not called exec.
    fn running(pid: u32) -> Self {
        Self {
            comm: Process::open(pid).map_or_else(|_| String::new(), |process| process.comm()),
            ..Self::default()
        }
    }

    /// Returns the cgroup of a process: the current one of a running process, else the one in which the process was
    /// last seen.
    fn find(&self, pid: u32, homes: &mut Homes<'_>) -> Home {
        let now = || Some(Home::of_process(pid)).filter(|home| !home.gone);
        let running = if self.has_exited { None } else { now() };
        running.unwrap_or_else(|| homes.of(self.cgroup))
    }
}

impl<'a> Names<'a> {
    /// Begins with these running processes.
    pub(super) fn of<'p>(
        processes: impl Iterator<Item = &'p Process>,
        homes: Option<Homes<'a>>,
        container: bool,
    ) -> Self {
        let known = processes.map(|process| {
            let known = Known {
                comm: process.comm(),
                ..Known::default()
            };
            (process.pid(), known)
        });
        Self {
            known: known.collect(),
            homes,
            container,
        }
    }

    /// Returns the pid of one known process, which is the only one if no other can join.
    pub(super) fn any(&self) -> Option<u32> {
        self.known.keys().next().copied()
    }

    /// Records that a process in this cgroup has called exec. Its pid may be that of a process that has exited before.
    pub(super) fn exec(&mut self, pid: u32, comm: String, cgroup: u64) {
        let known = Known {
            comm,
            cgroup,
            ..Known::default()
        };
        self.known.insert(pid, known);
    }

    /// Records that a process has exited in this cgroup.
    pub(super) fn exit(&mut self, pid: u32, comm: String, cgroup: u64) {
        let new = || Known {
            comm,
            ..Known::default()
        };
        let known = self.known.entry(pid).or_insert_with(new);
        known.cgroup = cgroup;
        known.has_exited = true;
        known.home = None;
    }

    /// Forgets where processes were found, since a running process can be moved from cgroup to cgroup. The kernel takes
    /// a lock of all cgroups for each lookup, so each process is looked up once per report.
    pub(super) fn look_again(&mut self) {
        for known in self.known.values_mut() {
            known.home = None;
        }
    }

    /// Returns the name of a process.
    pub(super) fn comm(&mut self, pid: u32) -> &str {
        &self.known(pid).comm
    }

    /// Returns a process as rows name it.
    pub(super) fn process(&mut self, pid: u32) -> ProcessName {
        let known = Known::of(&mut self.known, pid);
        if let (None, Some(homes)) = (&known.home, &mut self.homes) {
            known.home = Some(known.find(pid, homes));
        }
        ProcessName {
            pid,
            comm: known.comm.clone(),
            home: known.home.clone(),
            container: self.container,
        }
    }

    /// Returns a process as rows name it, for an event that has the process's cgroup.
    pub(super) fn at_event(&mut self, pid: u32, comm: Option<String>, cgroup: u64) -> ProcessName {
        ProcessName {
            pid,
            comm: comm.unwrap_or_else(|| self.known(pid).comm.clone()),
            home: self.homes.as_mut().map(|homes| homes.of(cgroup)),
            container: self.container,
        }
    }

    fn known(&mut self, pid: u32) -> &Known {
        Known::of(&mut self.known, pid)
    }
}
