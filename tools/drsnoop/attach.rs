//! The programs of drsnoop on the tracepoints of reclaim, in the best way that this kernel has.

use anyhow::{Context, Result};
use libbpf_rs::Link;
use libbpf_rs::skel::Skel;
use memtools::bpf::attach::{self, Variant};
use memtools::bpf::kernel_support;
use memtools::bpf::map_create;
use memtools::process::container;
use memtools::process::filter::Filter;
use memtools::run::skeleton::StackRoom;
use memtools::stacks::table::FIRST_OF_EVENTS;

use crate::args::Args;
use crate::bpf::{self, Loaded};

/// Bytes of the buffer for events: 7,000 in the 10 ms from one look at it to the next.
const EVENT_BYTES: u32 = 1 << 20;

/// The loaded programs, and their links.
type Started = (Loaded, Vec<Link>);

/// Loads and attaches the programs. Returns the way's name, too.
pub(crate) fn start(args: &Args, filter: &Filter) -> Result<(&'static str, Started)> {
    // Without memory cgroups (CONFIG_MEMCG) there is no way to the zones, and what takes it does not load.
    let mut ways = [
        ("tracepoints", "", true),
        ("tracepoints, free memory from /proc/vmstat", "", false),
        ("raw tracepoints", "_raw", true),
        (
            "raw tracepoints, free memory from /proc/vmstat",
            "_raw",
            false,
        ),
    ];
    if !kernel_support::preempts_raw_tracepoints() {
        ways.sort_by_key(|(_, kind, _)| *kind != "_raw");
    }
    let variants = ways.map(|(name, kind, zones)| {
        Variant::new(name, move || try_start(args, filter, kind, zones))
    });
    attach::first_that_works(args.common.verbose, variants)
}

/// The programs of this kind, also for memory cgroups if they are wanted, in the order to attach them.
fn programs(memcg: bool, kind: &str) -> Vec<String> {
    let reclaims = if memcg {
        &["direct", "memcg"][..]
    } else {
        &["direct"]
    };
    // The end first: a reclaim that is seen to begin must be seen to end.
    reclaims
        .iter()
        .flat_map(|reclaim| ["end", "begin"].map(|moment| format!("{reclaim}_{moment}{kind}")))
        .collect()
}

/// Loads and attaches the programs of this kind. With `zones` the kernel half adds up the free memory of
/// these itself.
fn try_start(args: &Args, filter: &Filter, kind: &str, zones: bool) -> Result<Started> {
    let programs = programs(args.memcg, kind);
    let programs: Vec<&str> = programs.iter().map(String::as_str).collect();
    let stacks = StackRoom::of(FIRST_OF_EVENTS).if_wanted(args.wants_stacks());
    let mut open = bpf::prepare(filter, stacks, args.unwind)?;
    let with_cgroups = container::prepare(args.wants_cgroups(), &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.by_uid = args.uid.is_some().into();
    options.only_uid = args.uid.unwrap_or(0);
    options.want_free_pages = (zones && args.shows_free()).into();
    options.want_stacks = args.wants_stacks().into();
    options.with_cgroups = with_cgroups;
    if kind == "_raw" {
        let begin = kernel_support::tracepoint_arguments("mm_vmscan_direct_reclaim_begin")?
            .context("this kernel has no tracepoint mm_vmscan_direct_reclaim_begin")?;
        options.gfp_first = begin.first().is_some_and(|name| name == "gfp_t").into();
    } else {
        kernel_support::preflight_tracepoints()?;
    }
    map_create::size(&mut open.maps.events, EVENT_BYTES)?;
    let mut skel = open.load_only(&programs)?;
    let links = attach::by_name(skel.object_mut(), &programs).with_context(|| {
        if args.memcg {
            "--memcg needs a kernel with CONFIG_MEMCG=y"
        } else {
            "no tracepoint of direct reclaim"
        }
    })?;
    Ok((skel, links))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_program_has_a_name_that_is_asked_for() {
        let kinds = ["", "_raw"].into_iter();
        let asked_for: BTreeSet<String> = kinds.flat_map(|kind| programs(true, kind)).collect();
        assert_eq!(asked_for, bpf::program_names());
    }
}
