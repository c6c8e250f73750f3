//! What processes are called, and in which cgroups they are, or were when they ended.

use std::collections::HashMap;

use memtools::process::container::{Home, Homes};
use memtools::process::proc::Process;

use crate::rows::ProcessName;

/// The processes that are traced, or were.
pub(super) struct Names<'a> {
    known: HashMap<u32, Known>,
    /// The cgroups that the kernel half met. None if nothing is wanted of cgroups.
    homes: Option<Homes<'a>>,
    /// Whether text tells the container.
    container: bool,
}

/// What is known of a process.
#[derive(Default)]
struct Known {
    comm: String,
    /// The cgroup that it was in at its exec or exit, by the kernel's id; 0 before these.
    cgroup: u64,
    has_exited: bool,
    /// Where it was found at this report.
    home: Option<Home>,
}

impl Known {
    /// A process that was forked, and has called no exec.
    fn running(pid: u32) -> Self {
        Self {
            comm: Process::open(pid).map_or_else(|_| String::new(), |process| process.comm()),
            ..Self::default()
        }
    }

    /// The home of a process that runs is where it is now, of another one where it was last seen.
    fn find(&self, pid: u32, homes: &mut Homes<'_>) -> Home {
        let now = || Some(Home::of_process(pid)).filter(|home| !home.gone);
        let running = if self.has_exited { None } else { now() };
        running.unwrap_or_else(|| homes.of(self.cgroup))
    }
}

impl<'a> Names<'a> {
    /// Begins with these processes, which run.
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

    /// One of those that are known, which is the only one if no other can join.
    pub(super) fn any(&self) -> Option<u32> {
        self.known.keys().next().copied()
    }

    /// Takes note that a process in this cgroup has become another program. Its number may be that of one that has exited.
    pub(super) fn exec(&mut self, pid: u32, comm: String, cgroup: u64) {
        let known = Known {
            comm,
            cgroup,
            ..Known::default()
        };
        self.known.insert(pid, known);
    }

    /// Takes note that a process has exited in this cgroup.
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

    /// Has processes be looked for again: one that runs can be moved from cgroup to cgroup. The kernel takes a lock of all
    /// cgroups for each answer, so each is asked for once a report.
    pub(super) fn look_again(&mut self) {
        for known in self.known.values_mut() {
            known.home = None;
        }
    }

    /// A process's name alone.
    pub(super) fn comm(&mut self, pid: u32) -> &str {
        &self.known(pid).comm
    }

    /// A process as rows name it.
    pub(super) fn process(&mut self, pid: u32) -> ProcessName {
        let known = self.known.entry(pid).or_insert_with(|| Known::running(pid));
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

    /// A process that told by itself in which cgroup it was, with an event.
    pub(super) fn at_event(&mut self, pid: u32, comm: Option<String>, cgroup: u64) -> ProcessName {
        ProcessName {
            pid,
            comm: comm.unwrap_or_else(|| self.known(pid).comm.clone()),
            home: self.homes.as_mut().map(|homes| homes.of(cgroup)),
            container: self.container,
        }
    }

    fn known(&mut self, pid: u32) -> &Known {
        self.known.entry(pid).or_insert_with(|| Known::running(pid))
    }
}
