//! Names of processes, and the cgroups that they are in, or were in when they exited.

use std::collections::HashMap;

use memtools::process::container::{CgroupInfo, CgroupResolver};
use memtools::process::proc::Process;

use memtools::process::container::ProcessName;

/// Names of the processes that are traced, or were traced.
pub(super) struct Names<'a> {
    known: HashMap<u32, ProcessInfo>,
    /// Cgroups that the BPF programs met. None if cgroups are not wanted.
    cgroup_resolver: Option<CgroupResolver<'a>>,
    /// Whether text output names the container.
    container: bool,
}

/// Name and cgroup of a process.
#[derive(Default)]
struct ProcessInfo {
    comm: String,
    /// Cgroup at the process's last exec or exit, by the kernel's id. 0 before these.
    cgroup: u64,
    has_exited: bool,
    /// Cgroup in which the process was found for the current report.
    cgroup_info: Option<CgroupInfo>,
}

impl ProcessInfo {
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
    fn find(&self, pid: u32, cgroup_resolver: &mut CgroupResolver<'_>) -> CgroupInfo {
        let now = || Some(CgroupInfo::of_process(pid)).filter(|cgroup_info| !cgroup_info.gone);
        let running = if self.has_exited { None } else { now() };
        running.unwrap_or_else(|| cgroup_resolver.of(self.cgroup))
    }
}

impl<'a> Names<'a> {
    /// Begins with these running processes.
    pub(super) fn of<'p>(
        processes: impl Iterator<Item = &'p Process>,
        cgroup_resolver: Option<CgroupResolver<'a>>,
        container: bool,
    ) -> Self {
        let known = processes.map(|process| {
            let known = ProcessInfo {
                comm: process.comm(),
                ..ProcessInfo::default()
            };
            (process.pid(), known)
        });
        Self {
            known: known.collect(),
            cgroup_resolver,
            container,
        }
    }

    /// Returns the pid of one known process, which is the only one if no other can join.
    pub(super) fn any(&self) -> Option<u32> {
        self.known.keys().next().copied()
    }

    /// Records that a process in this cgroup has called exec. Its pid may be that of a process that has exited before.
    pub(super) fn exec(&mut self, pid: u32, comm: String, cgroup: u64) {
        let known = ProcessInfo {
            comm,
            cgroup,
            ..ProcessInfo::default()
        };
        self.known.insert(pid, known);
    }

    /// Records that a process has exited in this cgroup.
    pub(super) fn exit(&mut self, pid: u32, comm: String, cgroup: u64) {
        let new = || ProcessInfo {
            comm,
            ..ProcessInfo::default()
        };
        let known = self.known.entry(pid).or_insert_with(new);
        known.cgroup = cgroup;
        known.has_exited = true;
        known.cgroup_info = None;
    }

    /// Forgets where processes were found, since a running process can be moved from cgroup to cgroup. The kernel takes
    /// a lock of all cgroups for each lookup, so each process is looked up once per report.
    pub(super) fn look_again(&mut self) {
        for known in self.known.values_mut() {
            known.cgroup_info = None;
        }
    }

    /// Returns the name of a process.
    pub(super) fn comm(&mut self, pid: u32) -> &str {
        &self.known(pid).comm
    }

    /// Returns a process as rows name it.
    pub(super) fn process(&mut self, pid: u32) -> ProcessName {
        let known = ProcessInfo::of(&mut self.known, pid);
        if let (None, Some(cgroup_resolver)) = (&known.cgroup_info, &mut self.cgroup_resolver) {
            known.cgroup_info = Some(known.find(pid, cgroup_resolver));
        }
        ProcessName {
            pid,
            comm: known.comm.clone(),
            cgroup_info: known.cgroup_info.clone(),
            container: self.container,
        }
    }

    /// Returns a process as rows name it, for an event that has the process's cgroup.
    pub(super) fn at_event(&mut self, pid: u32, comm: Option<String>, cgroup: u64) -> ProcessName {
        ProcessName {
            pid,
            comm: comm.unwrap_or_else(|| self.known(pid).comm.clone()),
            cgroup_info: self
                .cgroup_resolver
                .as_mut()
                .map(|cgroup_resolver| cgroup_resolver.of(cgroup)),
            container: self.container,
        }
    }

    fn known(&mut self, pid: u32) -> &ProcessInfo {
        ProcessInfo::of(&mut self.known, pid)
    }
}
