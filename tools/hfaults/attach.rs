//! The programs of hfaults on the functions that answer faults on huge pages, by the names that this kernel
//! has for them.

use std::fs;

use anyhow::Result;
use libbpf_rs::Link;
use libbpf_rs::skel::Skel;
use memtools::bpf::attach::{self, Means, Variant};
use memtools::bpf::kernel_support;
use memtools::bpf::map_create;
use memtools::bpf::software_event;
use memtools::process::container;
use memtools::process::filter::Filter;
use perf_event::events::Software;

use crate::args::Args;
use crate::bpf;
use crate::bpf::Loaded;

/// The kernel's settings of transparent huge pages.
const THP: &str = "/sys/kernel/mm/transparent_hugepage";

pub(crate) struct Attached {
    pub(crate) skel: Loaded,
    pub(crate) links: Vec<Link>,
}

/// Starts what is asked for, in the best way that this kernel has.
pub(crate) fn start(args: &Args, filter: &Filter) -> Result<(&'static str, Attached)> {
    if args.madvise {
        kernel_support::preflight_tracepoints()?;
        let attached = load(args, filter, &["madvise_enter".into()])?;
        return Ok(("tracepoint", attached));
    }
    if args.thp {
        let fexit = move || {
            load(
                args,
                filter,
                &thp_programs(&["thp_fexit"], "fentry", "fexit"),
            )
        };
        let kprobes = ["thread_exit", "thp_kretprobe", "thp_kprobe"];
        let kretprobe = move || load(args, filter, &thp_programs(&kprobes, "kprobe", "kretprobe"));
        let variants = [
            Variant::new("fexit", fexit).needing(Means::Fentry),
            Variant::new("kretprobe", kretprobe).needing(Means::Kprobes),
        ];
        return attach::first_that_works(args.common.verbose, attach::exact_first(variants.into()));
    }
    let by_function = |kind: &'static str| {
        Variant::new(kind, move || {
            load(args, filter, &fault_programs(args, kind))
        })
    };
    let by_event = Variant::new("page-fault event", move || {
        let mut attached = load(args, filter, &["fault_event".into()])?;
        let program = &attached.skel.progs.fault_event;
        attached.links = software_event::attach(program, Software::PAGE_FAULTS)?;
        Ok(attached)
    });
    let mut variants = attach::exact_first(vec![
        by_function("fentry").needing(Means::Fentry),
        by_function("kprobe").needing(Means::Kprobes),
    ]);
    // The last, as it knows no reasons.
    variants.push(by_event);
    attach::first_that_works(args.common.verbose, variants)
}

/// The programs for transparent huge pages: `always`, and those for other sizes and for shared memory by
/// the functions that the kernel has, of the kinds that see an entry and a return.
fn thp_programs(always: &[&'static str], entry: &str, exit: &str) -> Vec<String> {
    let mut programs: Vec<String> = always.iter().map(|&program| program.into()).collect();
    if kernel_support::btf_has_name("folio_add_new_anon_rmap") && has_small_thp() {
        programs.push(format!("small_thp_{entry}"));
    }
    let allocates = kernel_support::name_here(&[
        "shmem_alloc_and_add_folio",
        "shmem_alloc_hugefolio",
        "shmem_alloc_hugepage",
    ]);
    if let Some(function) = allocates {
        programs.push(format!("{function}_{exit}"));
    }
    programs
}

/// Whether there are transparent huge pages of several sizes.
fn has_small_thp() -> bool {
    let sizes = fs::read_dir(THP).into_iter().flatten().flatten();
    let sizes = sizes.filter(|entry| {
        entry
            .file_name()
            .as_encoded_bytes()
            .starts_with(b"hugepages-")
    });
    sizes.count() > 1
}

/// The programs for faults on reserved pages, each in the form of this kind.
fn fault_programs(args: &Args, kind: &str) -> Vec<String> {
    let mut programs = Vec::new();
    if args.extended
        && let Some(reasons) = reason_functions()
    {
        programs.push("thread_exit".into());
        programs.push(format!("fault_end_{kind}"));
        programs.extend(reasons.map(|function| format!("{function}_{kind}")));
    }
    programs.push(format!("fault_{kind}"));
    programs
}

/// The functions by which the kernel allocates a page and handles a write, if it has both.
fn reason_functions() -> Option<[&'static str; 2]> {
    let allocates = kernel_support::name_here(&["alloc_hugetlb_folio", "alloc_huge_page"])?;
    let writes = kernel_support::name_here(&["hugetlb_wp", "hugetlb_cow"])?;
    Some([allocates, writes])
}

/// Loads these programs and attaches those that are attached by their names.
fn load(args: &Args, filter: &Filter, programs: &[String]) -> Result<Attached> {
    let programs: Vec<&str> = programs.iter().map(String::as_str).collect();
    let mut open = bpf::prepare(filter)?;
    let by_reason = programs.contains(&"thread_exit");
    if !by_reason {
        map_create::size(&mut open.maps.faults, 1)?;
    }
    let wanted = args.containers.wanted(args.common.json);
    let with_cgroups = container::prepare(wanted, &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.with_cgroups = with_cgroups;
    options.by_size = args.extended.into();
    options.by_reason = by_reason.into();
    if args.thp {
        let setting = |name: &str| {
            let file = format!("{THP}/{name}");
            fs::read_to_string(file).ok()?.trim().parse::<u64>().ok()
        };
        let bytes = setting("hpage_pmd_size");
        options.huge_page_shift = bytes.and_then(u64::checked_ilog2).unwrap_or(21);
        options.uses_zero_page = (setting("use_zero_page") != Some(0)).into();
    }
    options.page_shift_base = kernel_support::page_shift()?;
    let mut skel = open.load_only(&programs)?;
    let by_name: Vec<&str> = programs
        .iter()
        .copied()
        .filter(|program| *program != "fault_event")
        .collect();
    let links = attach::by_name(skel.object_mut(), &by_name)?;
    Ok(Attached { skel, links })
}
