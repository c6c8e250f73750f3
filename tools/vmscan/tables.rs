//! Output of vmscan at the end: histograms, and the tables of shrinkers and cgroups.

use anyhow::{Context, Result};
use libbpf_rs::MapMut;
use memtools::bpf::{map_batch, types};
use memtools::print::histogram;
use memtools::print::output::Output;
use memtools::process::cgroup::Cgroups;
use memtools::process::container::CgroupResolver;
use memtools::stacks::kallsyms::Kallsyms;

use crate::bpf::Loaded;
use crate::bpf::types::{cgroup_key, cgroup_total, operation as Operation, shrinker_total};
use crate::plan::Tables;
use crate::report::{Cgroup, Shrinker, Timed};
use crate::totals::{TIMED, Totals};

/// Prints the histograms, and the tables that are requested.
pub(crate) fn print(tables: Tables, skel: &Loaded, output: &mut Output) -> Result<()> {
    if tables.spaced {
        output.raw(|out| writeln!(out))?;
    }
    let totals = Totals::read(&skel.maps.totals)?;
    for (name, operation) in TIMED {
        let buckets = totals.latencies(operation);
        if buckets.count() > 0 {
            output.row(&histogram::Named { name, buckets })?;
        }
    }
    if tables.by_shrinker {
        output.header(&Shrinker::header())?;
        for shrinker in read_shrinkers(&skel.maps.shrinkers)? {
            output.row(&shrinker)?;
        }
    }
    if tables.by_cgroup {
        if tables.by_shrinker {
            output.header("")?;
        }
        output.header(&Cgroup::header(tables.container))?;
        let mut cgroup_resolver = CgroupResolver::new(&skel.maps.cgroup_paths);
        for mut cgroup in read_cgroups(&skel.maps.cgroups, &mut cgroup_resolver)? {
            cgroup.cgroup_info = cgroup.cgroup_info.filter(|_| tables.container);
            output.row(&cgroup)?;
        }
    }
    output.flush()
}

/// Reads the shrinkers, the one that took longest last.
fn read_shrinkers(map: &MapMut<'_>) -> Result<Vec<Shrinker>> {
    let symbols = Kallsyms::read().context("failed to read /proc/kallsyms")?;
    let mut shrinkers = Vec::new();
    map_batch::for_each(map, |key, value| {
        let address = *types::view::<u64>(key)?;
        let total: &shrinker_total = types::view(value)?;
        shrinkers.push(Shrinker {
            function: function_name(&symbols, address),
            count: total.count,
            time_ns: total.time_ns,
            objects_freed: total.freed,
        });
        Ok(())
    })?;
    shrinkers.sort_by(|a, b| (a.time_ns, &a.function).cmp(&(b.time_ns, &b.function)));
    Ok(shrinkers)
}

/// Returns the function's name, such as `super_cache_scan`. The name of a module is added if the function is not in
/// the kernel itself.
fn function_name(symbols: &Kallsyms, address: u64) -> String {
    match symbols.find(address) {
        Some((name, 0, "kernel")) => name.to_owned(),
        Some((name, 0, module)) => format!("{name} [{module}]"),
        _ => format!("{address:#x}"),
    }
}

/// Reads the cgroups, the one that reclaimed longest last.
fn read_cgroups(map: &MapMut<'_>, cgroup_resolver: &mut CgroupResolver<'_>) -> Result<Vec<Cgroup>> {
    let mut limits = Cgroups::of_memory();
    let mut cgroups: Vec<Cgroup> = Vec::new();
    map_batch::for_each(map, |key, value| {
        let key: &cgroup_key = types::view(key)?;
        let total: &cgroup_total = types::view(value)?;
        let timed = Timed {
            count: total.count,
            time_ns: total.time_ns,
        };
        let limited_id = Some(key.limited).filter(|&id| id != 0);
        let index = cgroups
            .iter()
            .position(|cgroup| (cgroup.id, cgroup.limited_id) == (key.cgroup, limited_id))
            .unwrap_or_else(|| {
                let cgroup_info = cgroup_resolver.of(key.cgroup);
                cgroups.push(Cgroup {
                    id: key.cgroup,
                    path: cgroup_info.cgroup.clone(),
                    container_id: cgroup_info.container_id.clone(),
                    cgroup_info: Some(cgroup_info),
                    limited: limited_id.and_then(|id| limits.path(id).map(str::to_owned)),
                    limited_id,
                    ..Cgroup::default()
                });
                cgroups.len() - 1
            });
        match Operation(key.operation) {
            Operation::OPERATION_SHRINK_SLAB => cgroups[index].shrink_slab = timed,
            Operation::OPERATION_DIRECT_RECLAIM => cgroups[index].direct_reclaim = timed,
            Operation::OPERATION_MEMCG_RECLAIM => cgroups[index].memcg_reclaim = timed,
            _ => {}
        }
        Ok(())
    })?;
    cgroups.sort_by_key(|cgroup| (cgroup.reclaim_ns(), cgroup.id, cgroup.limited_id));
    Ok(cgroups)
}
