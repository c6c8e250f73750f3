//! Descendants of traced processes.
//!
//! `bpf/include/follow.bpf.c` records processes when they are forked. It is a separate object, so that a tool has one
//! copy of it regardless of how many variants of its own object it tries; each variant shares the maps of this
//! object.

use std::fmt;

use anyhow::{Context, Result};
use libbpf_rs::{Link, OpenMapMut};

use crate::bpf::map_create;
use crate::bpf::program_stats;
use crate::process::filter::Filter;

crate::skeleton!("follow", FollowSkelBuilder, stacks: none, plain: []);

/// Maximum number of processes that are followed at a time: the largest PID is 32768 on small systems.
const PROCESSES: u32 = 32768;

/// Loaded BPF programs that follow processes until the value is dropped.
pub struct Follower {
    skel: bpf::Loaded,
    _links: [Link; 5],
}

impl Follower {
    /// Follows all descendants of the filter's processes that start from now on.
    pub(crate) fn start(filter: &Filter) -> Result<Self> {
        let mut open = bpf::prepare(filter)?;
        map_create::set_capacity(&mut open.maps.filter_followed, PROCESSES)?;
        let skel = open.load().context("failed to follow processes")?;
        let attach = || -> libbpf_rs::Result<[Link; 5]> {
            Ok([
                skel.progs.process_free.attach()?,
                skel.progs.process_free_too.attach()?,
                skel.progs.process_fork.attach()?,
                skel.progs.process_fork_too.attach()?,
                skel.progs.process_fork_again.attach()?,
            ])
        };
        let links = attach().context("failed to attach what follows processes")?;
        Ok(Self {
            skel,
            _links: links,
        })
    }

    /// Replaces the maps of a tool by the follower's.
    pub(crate) fn share_maps(
        &self,
        followed: &mut OpenMapMut<'_>,
        losses: &mut OpenMapMut<'_>,
    ) -> Result<()> {
        let own = &self.skel.maps;
        map_create::reuse(followed, &own.filter_followed)?;
        map_create::reuse(losses, &own.losses)
    }

    /// Returns an upper limit of how many forks and exits were missed because the kernel skipped all programs of a
    /// hook.
    pub(crate) fn skipped_runs(&self) -> Result<u64> {
        let programs = &self.skel.progs;
        let forks = [
            &programs.process_fork,
            &programs.process_fork_too,
            &programs.process_fork_again,
        ];
        let exits = [&programs.process_free, &programs.process_free_too];
        Ok(program_stats::skipped_by_all(forks)? + program_stats::skipped_by_all(exits)?)
    }
}

impl fmt::Debug for Follower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Follower")
    }
}
