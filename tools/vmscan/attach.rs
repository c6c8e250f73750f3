//! Tracepoints that this kernel has, and the BPF programs of vmscan on them.

use std::ffi::OsStr;

use anyhow::{Context, Result, bail};
use libbpf_rs::skel::{OpenSkel, Skel};
use libbpf_rs::{Link, OpenMapMut, OpenProgramMut, ProgramMut, ProgramType, TracepointCategory};
use memtools::bpf::attach::{self, Variant};
use memtools::bpf::kernel_support;
use memtools::bpf::map_create;
use memtools::host::page_size;
use memtools::process::container;
use memtools::process::filter::Filter;
use memtools::run::skeleton::StackCapacity;
use memtools::stacks::table;

use crate::bpf::{self, Loaded, Prepared};
use crate::plan::{CompactionPlan, ReclaimPlan, Tables};
use crate::report::Columns;

/// Loaded programs, and their links.
pub(crate) struct Attached {
    pub(crate) skel: Loaded,
    pub(crate) links: Vec<Link>,
    pub(crate) available: Available,
}

/// Operations that this kernel has tracepoints for, as far as they are requested.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Available {
    pub(crate) shrink_slab: bool,
    pub(crate) direct_reclaim: bool,
    pub(crate) memcg_reclaim: bool,
    pub(crate) kswapd_wakeups: bool,
    pub(crate) pages_written: bool,
    pub(crate) kswapd: bool,
    pub(crate) compaction: bool,
}

/// Ways to attach programs to tracepoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AttachMethod {
    /// By the names in tracefs, through perf events. The programs run with preemption off.
    Tracefs,
    /// As raw tracepoints.
    Raw,
}

impl AttachMethod {
    /// Sets the type that a program needs in this way, before it is loaded.
    fn prepare(self, program: &mut OpenProgramMut<'_>) {
        if self == AttachMethod::Tracefs {
            program.set_prog_type(ProgramType::Tracepoint);
        }
    }

    fn attach(self, program: &ProgramMut<'_>, tracepoint: &str) -> Result<Link> {
        Ok(match self {
            AttachMethod::Tracefs => {
                let group = group(tracepoint).context("a tracepoint of no known group")?;
                let group = TracepointCategory::Custom(group.to_owned());
                program.attach_tracepoint(group, tracepoint)?
            }
            AttachMethod::Raw => program.attach_raw_tracepoint(tracepoint)?,
        })
    }
}

/// Calls `start` for raw tracepoints or for tracefs, until one works. The way that is exact on this kernel comes
/// first; raw tracepoints cost less.
fn in_best_way<T>(verbose: bool, start: impl Fn(AttachMethod) -> Result<T> + Copy) -> Result<T> {
    let by_tracefs = Variant::new("tracepoints", move || {
        kernel_support::preflight_tracepoints()?;
        start(AttachMethod::Tracefs)
    });
    let raw = Variant::new("raw tracepoints", move || start(AttachMethod::Raw));
    let ways = if kernel_support::preempts_raw_tracepoints() {
        [by_tracefs, raw]
    } else {
        [raw, by_tracefs]
    };
    let (_, started) = attach::first_that_works(verbose, ways)?;
    Ok(started)
}

/// Loads the programs, and attaches those whose tracepoints this kernel has.
pub(crate) fn start(plan: &ReclaimPlan, filter: &Filter, verbose: bool) -> Result<Attached> {
    in_best_way(verbose, |way| try_start(plan, filter, way))
}

/// Loads the programs, and attaches those whose tracepoints this kernel has, in one way. A missing tracepoint makes
/// its column empty, which a line on stderr reports.
fn try_start(plan: &ReclaimPlan, filter: &Filter, way: AttachMethod) -> Result<Attached> {
    let skel = load(plan.tables, filter, way)?;
    let mut attaching = Attaching {
        way,
        links: Vec::new(),
    };
    let available = Available::attach(&skel, plan.columns, &mut attaching);
    let Attaching { links, .. } = attaching;
    if links.is_empty() {
        bail!(
            "this kernel has none of the tracepoints of vmscan: it is built without \
             CONFIG_TRACEPOINTS, or does not permit BPF to use them"
        );
    }
    available.print_missing_columns(plan.columns);
    Ok(Attached {
        skel,
        links,
        available,
    })
}

/// Loads the programs that sum up operations, and none of --counts or --trace-compaction.
fn load(tables: Tables, filter: &Filter, way: AttachMethod) -> Result<Loaded> {
    let mut open = without_events(filter)?;
    if tables.by_cgroup {
        kernel_support::warn_if_no_reclaim_target();
    } else {
        shrink_unused_maps([&mut open.maps.cgroups])?;
    }
    shrink_unused_maps([&mut open.maps.compacting])?;
    let with_cgroups = container::prepare(tables.by_cgroup, &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.with_cgroups = with_cgroups;
    options.by_shrinker = tables.by_shrinker.into();
    options.by_cgroup = tables.by_cgroup.into();
    options.by_record = (way == AttachMethod::Tracefs).into();
    for mut program in open.open_object_mut().progs_mut() {
        let name = program.name().to_string_lossy();
        let others = number(program.name()).is_some() || name.starts_with("trace_");
        program.set_autoload(!others);
        way.prepare(&mut program);
    }
    open.load()
}

/// Programs that are being attached to the tracepoints of this kernel.
struct Attaching {
    way: AttachMethod,
    links: Vec<Link>,
}

impl Attaching {
    /// Attaches both programs of an operation, or none. Returns whether both tracepoints exist. The end is attached
    /// first: an operation whose beginning was seen must be seen to end.
    fn pair(&mut self, end: (&ProgramMut<'_>, &str), begin: (&ProgramMut<'_>, &str)) -> bool {
        let mut both = Vec::new();
        for (program, tracepoint) in [end, begin] {
            both.extend(self.way.attach(program, tracepoint).ok());
        }
        let there = both.len() == 2;
        if there {
            self.links.append(&mut both);
        }
        there
    }

    /// Attaches a program to the first of these tracepoints that exists. Returns whether one does.
    fn attach_first(&mut self, program: &ProgramMut<'_>, names: &[&str]) -> bool {
        let mut links = names.iter().flat_map(|name| self.way.attach(program, name));
        let link = links.next();
        let there = link.is_some();
        self.links.extend(link);
        there
    }
}

impl Available {
    /// Attaches the programs that the columns need, as far as this kernel has the tracepoints.
    fn attach(skel: &Loaded, columns: Columns, attaching: &mut Attaching) -> Self {
        let programs = &skel.progs;
        let mut pair = |end, begin| attaching.pair(end, begin);
        let mut has = Self {
            shrink_slab: pair(
                (&programs.shrink_slab_end, "mm_shrink_slab_end"),
                (&programs.shrink_slab_start, "mm_shrink_slab_start"),
            ),
            direct_reclaim: pair(
                (&programs.direct_reclaim_end, "mm_vmscan_direct_reclaim_end"),
                (
                    &programs.direct_reclaim_begin,
                    "mm_vmscan_direct_reclaim_begin",
                ),
            ),
            memcg_reclaim: pair(
                (&programs.memcg_reclaim_end, "mm_vmscan_memcg_reclaim_end"),
                (
                    &programs.memcg_reclaim_begin,
                    "mm_vmscan_memcg_reclaim_begin",
                ),
            ),
            ..Self::default()
        };
        if columns.compaction {
            has.compaction = pair(
                (&programs.compaction_end, "mm_compaction_end"),
                (&programs.compaction_begin, "mm_compaction_begin"),
            );
        }
        if columns.kswapd {
            has.kswapd = pair(
                (&programs.balance_end, "mm_vmscan_balance_pgdat_end"),
                (&programs.balance_begin, "mm_vmscan_balance_pgdat_begin"),
            ) || pair(
                (&programs.kswapd_sleep, "mm_vmscan_kswapd_sleep"),
                (&programs.kswapd_wake, "mm_vmscan_kswapd_wake"),
            );
        }
        has.kswapd_wakeups =
            attaching.attach_first(&programs.kswapd_wakeup, &["mm_vmscan_wakeup_kswapd"]);
        // The tracepoint was renamed when reclaim changed to folios: 5.10 has the old name, 6.1 the new one.
        has.pages_written = attaching.attach_first(
            &programs.write_page,
            &["mm_vmscan_write_folio", "mm_vmscan_writepage"],
        );
        has
    }

    /// Prints the columns that this kernel has no tracepoints for.
    fn print_missing_columns(&self, columns: Columns) {
        let missing: Vec<&str> = [
            (self.shrink_slab, "S-SLABms"),
            (self.direct_reclaim, "D-RECLAIMms"),
            (self.memcg_reclaim, "M-RECLAIMms"),
            (self.kswapd_wakeups, "KSWAPD"),
            (self.pages_written, "WRITEPAGE"),
            (self.kswapd || !columns.kswapd, "KSWAPDms"),
            (self.compaction || !columns.compaction, "COMPACTms"),
        ]
        .into_iter()
        .filter_map(|(there, column)| (!there).then_some(column))
        .collect();
        if !missing.is_empty() {
            memtools::message!("this kernel has no tracepoints for {}", missing.join(", "));
        }
    }
}

/// Loaded programs of --trace-compaction, and their links.
pub(crate) struct Tracing {
    pub(crate) skel: Loaded,
    pub(crate) links: Vec<Link>,
}

/// Loads and attaches the programs that trace each compaction.
pub(crate) fn start_tracing_compaction(
    plan: &CompactionPlan,
    filter: &Filter,
    verbose: bool,
) -> Result<Tracing> {
    let way = Variant::new("raw tracepoints", || {
        try_start_tracing_compaction(plan, filter)
    });
    let (_, tracing) = attach::first_that_works(verbose, [way])?;
    Ok(tracing)
}

fn try_start_tracing_compaction(plan: &CompactionPlan, filter: &Filter) -> Result<Tracing> {
    let Some(arguments) = kernel_support::tracepoint_arguments("mm_compaction_end")? else {
        bail!("this kernel has no tracepoints of compaction (CONFIG_COMPACTION)");
    };
    let end = match arguments.len() {
        5 => "trace_compaction_end_5",
        6 => "trace_compaction_end_6",
        _ => bail!("the arguments of mm_compaction_end are unknown: {arguments:?}"),
    };
    let programs = [end, "trace_compaction_zone", "trace_compaction_begin"];
    let stacks = StackCapacity::of(table::INITIAL_EVENT_ENTRIES).if_wanted(plan.kernel_stacks);
    let mut open = bpf::prepare(filter, stacks)?;
    let with_cgroups = container::prepare(plan.with_cgroups, &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.with_cgroups = with_cgroups;
    options.with_kernel_stacks = plan.kernel_stacks.into();
    options.with_zone_state = plan.with_zone_state.into();
    let maps = &mut open.maps;
    shrink_unused_maps([&mut maps.calls, &mut maps.shrinking, &mut maps.cgroups])?;
    let mut skel = open.load_only(&programs)?;
    let links = attach::attach_by_name(skel.object_mut(), &programs)?;
    Ok(Tracing { skel, links })
}

/// Loaded programs of --counts, and their links.
pub(crate) struct Counting {
    pub(crate) skel: Loaded,
    pub(crate) links: Vec<Link>,
    /// Index in the map and name of each tracepoint that is counted. The name is the one of tracefs and perf:
    /// `vmscan:mm_vmscan_kswapd_wake`.
    pub(crate) tracepoints: Vec<(usize, String)>,
}

/// Loads and attaches the programs that count each of the tracepoints that this kernel has.
pub(crate) fn start_counting(filter: &Filter, verbose: bool) -> Result<Counting> {
    in_best_way(verbose, |way| try_start_counting(filter, way))
}

fn try_start_counting(filter: &Filter, way: AttachMethod) -> Result<Counting> {
    let wanted: Vec<(&str, String)> = kernel_support::tracepoints()?
        .into_iter()
        .filter_map(|tracepoint| Some((group(&tracepoint)?, tracepoint)))
        .collect();
    let mut open = without_events(filter)?;
    let maps = &mut open.maps;
    shrink_unused_maps([&mut maps.calls, &mut maps.shrinking])?;
    shrink_unused_maps([&mut maps.cgroups, &mut maps.compacting])?;
    container::prepare(false, &mut maps.cgroup_paths)?;
    let mut counters = 0;
    for mut program in open.open_object_mut().progs_mut() {
        counters += usize::from(number(program.name()).is_some());
        let used = number(program.name()).is_some_and(|number| number < wanted.len());
        program.set_autoload(used);
        way.prepare(&mut program);
    }
    let mut skel = open.load()?;

    let (mut links, mut tracepoints) = (Vec::new(), Vec::new());
    for program in skel.object_mut().progs_mut() {
        let Some(number) = number(program.name()) else {
            continue;
        };
        // A tracepoint that BTF has a type of can still have been omitted of the kernel.
        if let Some((group, tracepoint)) = wanted.get(number)
            && let Ok(link) = way.attach(&program, tracepoint)
        {
            links.push(link);
            tracepoints.push((number, format!("{group}:{tracepoint}")));
        }
    }
    if links.is_empty() {
        bail!("this kernel has no tracepoint of vmscan, compaction or migrate");
    }
    if let Some(left_out @ [_, ..]) = wanted.get(counters..) {
        let left_out: Vec<&str> = left_out.iter().map(|(_, name)| &**name).collect();
        memtools::message!("not counted: {}", left_out.join(", "));
    }
    Ok(Counting {
        skel,
        links,
        tracepoints,
    })
}

/// Returns the number of a program that counts a tracepoint: 10 for `count_12`, which is octal.
fn number(program: &OsStr) -> Option<usize> {
    let digits = program.to_str()?.strip_prefix("count_")?;
    usize::from_str_radix(digits, 8).ok()
}

/// Opens the object without stacks, and with a ring buffer of the smallest size, as no events are sent.
fn without_events(filter: &Filter) -> Result<Prepared<'_>> {
    let mut open = bpf::prepare(filter, StackCapacity::NONE)?;
    let page = page_size::page_bytes()? as u32;
    map_create::set_capacity(&mut open.maps.events, page)?;
    Ok(open)
}

/// Gives one entry to maps that none of the loaded programs uses.
fn shrink_unused_maps<const MAPS: usize>(unused: [&mut OpenMapMut<'_>; MAPS]) -> Result<()> {
    for map in unused {
        map_create::set_capacity(map, 1)?;
    }
    Ok(())
}

/// Returns the group of a tracepoint, if it is one that vmscan counts. BTF has no groups, but the names of these
/// tracepoints begin with their group's prefixes.
fn group(tracepoint: &str) -> Option<&'static str> {
    let groups = [
        ("mm_vmscan_", "vmscan"),
        ("mm_shrink_slab_", "vmscan"),
        ("mm_compaction_", "compaction"),
        ("mm_migrate_", "migrate"),
        ("set_migration_pte", "migrate"),
        ("remove_migration_pte", "migrate"),
    ];
    groups
        .iter()
        .find_map(|(prefix, group)| tracepoint.starts_with(prefix).then_some(*group))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_numbered_in_octal() {
        assert_eq!(number(OsStr::new("count_00")), Some(0));
        assert_eq!(number(OsStr::new("count_77")), Some(63));
        assert_eq!(number(OsStr::new("kswapd_wake")), None);
    }

    #[test]
    fn groups_are_those_of_tracefs() {
        assert_eq!(group("mm_shrink_slab_end"), Some("vmscan"));
        assert_eq!(group("mm_migrate_pages_start"), Some("migrate"));
        assert_eq!(group("mm_compaction_begin"), Some("compaction"));
        assert_eq!(group("mm_page_alloc"), None);
        assert_eq!(group("set_migration_pmd"), None);
    }
}
