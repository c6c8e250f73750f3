//! BPF programs of drsnoop on the tracepoints of reclaim, in the best way that this kernel supports.

use anyhow::{Context, Result};
use libbpf_rs::Link;
use libbpf_rs::skel::Skel;
use memtools::bpf::attach::{self, Variant};
use memtools::bpf::kernel_support;
use memtools::bpf::map_create;
use memtools::process::container;
use memtools::process::filter::Filter;
use memtools::run::skeleton::StackCapacity;
use memtools::stacks::table::INITIAL_EVENT_ENTRIES;

use crate::args::Args;
use crate::bpf::{self, Loaded};

/// Size of the ring buffer, in bytes: enough for 7,000 events in the 10 ms between two reads of it.
const EVENT_BYTES: u32 = 1 << 20;

/// Loaded programs, and their links.
type Started = (Loaded, Vec<Link>);

/// Loads and attaches the programs in the first way that works. Also returns the name of the way.
pub(crate) fn start(args: &Args, filter: &Filter) -> Result<(&'static str, Started)> {
    // Without memory cgroups (CONFIG_MEMCG) the programs cannot reach the zones, and a program that reads them does
    // not load.
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

/// Returns the names of the programs of this kind in the order to attach them, with those for memory cgroups if
/// `memcg` is set.
fn programs(memcg: bool, kind: &str) -> Vec<String> {
    let reclaims = if memcg {
        &["direct", "memcg"][..]
    } else {
        &["direct"]
    };
    // The end is attached first: a reclaim whose beginning was seen must be seen to end.
    reclaims
        .iter()
        .flat_map(|reclaim| ["end", "begin"].map(|moment| format!("{reclaim}_{moment}{kind}")))
        .collect()
}

/// Loads and attaches the programs of this kind. With `zones` the BPF program adds up the free memory of the zones
/// itself.
fn try_start(args: &Args, filter: &Filter, kind: &str, zones: bool) -> Result<Started> {
    let programs = programs(args.memcg, kind);
    let programs: Vec<&str> = programs.iter().map(String::as_str).collect();
    let stacks = StackCapacity::of(INITIAL_EVENT_ENTRIES).if_wanted(args.wants_stacks());
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
    map_create::set_capacity(&mut open.maps.events, EVENT_BYTES)?;
    let mut skel = open.load_only(&programs)?;
    let links = attach::attach_by_name(skel.object_mut(), &programs).with_context(|| {
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
