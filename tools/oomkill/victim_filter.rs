//! Filter for the kills that the options ask for, by victim. The BPF program has already checked the task that needed
//! memory.

use std::fs;
use std::os::unix::fs::MetadataExt;

use memtools::print::text;
use memtools::process::cgroup::{self, Cgroups};
use memtools::process::container::CgroupResolver;
use memtools::run::target::{Target, TargetArgs};

use crate::bpf::types::event;

/// Victims that the options ask for.
pub(crate) struct VictimFilter {
    pids: Vec<u32>,
    name: Option<String>,
    /// Id of the cgroup.
    cgroup: Option<u64>,
}

impl VictimFilter {
    pub(crate) fn of(args: &TargetArgs, target: &Target) -> Option<Self> {
        args.is_some().then(|| Self {
            pids: target.pids(),
            name: args.filter.name.clone(),
            // The cgroup was opened before. If it has been removed since, it has no victims.
            cgroup: args
                .filter
                .cgroup
                .as_ref()
                .map(|path| fs::metadata(path).map_or(0, |folder| folder.ino())),
        })
    }

    /// Whether the options ask for the task that needed memory, or for the victim.
    pub(crate) fn wants(
        &self,
        event: &event,
        cgroups: &mut Cgroups,
        cgroup_resolver: &mut CgroupResolver<'_>,
    ) -> bool {
        let victim = &event.victim;
        let by_pid = self.pids.is_empty() || self.pids.contains(&victim.pid);
        let by_name = |name: &String| text::from_c(&victim.comm).contains(name);
        let by_cgroup = |folder| {
            let folder = cgroups.path(folder).map(str::to_owned);
            let there = cgroups.path(victim.cgroup).map(str::to_owned);
            let victim = there.or_else(|| cgroup_resolver.of(victim.cgroup).cgroup);
            let both = victim.zip(folder);
            both.is_some_and(|(victim, folder)| cgroup::is_in(&victim, &folder))
        };
        event.wanted != 0
            || by_pid && self.name.as_ref().is_none_or(by_name) && self.cgroup.is_none_or(by_cgroup)
    }
}
