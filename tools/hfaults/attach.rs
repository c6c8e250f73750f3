//! BPF programs of hfaults on the functions that handle faults on huge pages, by the names that these have in this
//! kernel.

use std::fs;

use anyhow::Result;
use libbpf_rs::Link;
use libbpf_rs::skel::Skel;
use memtools::bpf::attach::{self, Feature, Variant};
use memtools::bpf::kernel_support;
use memtools::bpf::map_create;
use memtools::bpf::software_event;
use memtools::host::page_size;
use memtools::process::container;
use memtools::process::filter::Filter;
use perf_event::events::Software;

use crate::args::Args;
use crate::bpf;
use crate::bpf::Loaded;

/// Folder of the kernel's settings of transparent huge pages.
const THP: &str = "/sys/kernel/mm/transparent_hugepage";

/// Program for --madvise, which like [`EVENT`] has only one form.
const MADVISE: &str = "madvise_enter";

const EVENT: &str = "fault_event";

pub(crate) struct Attached {
    pub(crate) skel: Loaded,
    pub(crate) links: Vec<Link>,
}

/// Loads and attaches the programs that are requested, in the best way that this kernel supports. Also returns the
/// name of the way.
pub(crate) fn start(args: &Args, filter: &Filter) -> Result<(&'static str, Attached)> {
    if args.madvise {
        kernel_support::preflight_tracepoints()?;
        let attached = load(args, filter, &[MADVISE.into()])?;
        return Ok(("tracepoint", attached));
    }
    if args.thp {
        let sizes = kernel_support::btf_has_name("folio_add_new_anon_rmap") && has_small_thp();
        let shared = kernel_support::first_name_in_btf(&THP_OF_SHARED_MEMORY);
        let variants = THP_FORMS.map(|form| {
            let start = move || load(args, filter, &form.programs(sizes, shared));
            Variant::new(form.name, start).needing(form.means)
        });
        let started = attach::first_that_works(
            args.common.verbose,
            attach::fentry_last_if_preemptible(variants.into()),
        );
        return started.inspect_err(|_| {
            memtools::message!(
                "without --thp, faults on reserved huge pages are counted; thp_fault_alloc in /proc/vmstat counts \
                 transparent huge pages of the whole machine"
            );
        });
    }
    let by_function = |kind: &'static str| {
        Variant::new(kind, move || {
            let reasons = reason_functions().filter(|_| args.extended);
            load(args, filter, &fault_programs(kind, reasons))
        })
    };
    let by_event = Variant::new("page-fault event", move || {
        let mut attached = load(args, filter, &[EVENT.into()])?;
        let program = &attached.skel.progs.fault_event;
        attached.links = software_event::attach(program, Software::PAGE_FAULTS)?;
        Ok(attached)
    });
    let mut variants = attach::fentry_last_if_preemptible(vec![
        by_function("fentry").needing(Feature::Fentry),
        by_function("kprobe").needing(Feature::Kprobes),
    ]);
    // The event comes last, as it provides no reasons.
    variants.push(by_event);
    attach::first_that_works(args.common.verbose, variants)
}

/// Names of the programs for transparent huge pages in one form, by the hooks that they are attached to.
#[derive(Debug, Clone, Copy)]
struct ThpForm {
    name: &'static str,
    means: Feature,
    always: &'static [&'static str],
    /// Suffixes of the names of programs on a function's entry, and on its return.
    entry: &'static str,
    exit: &'static str,
}

const THP_FORMS: [ThpForm; 2] = [
    ThpForm {
        name: "fexit",
        means: Feature::Fentry,
        always: &["thp_fexit"],
        entry: "fentry",
        exit: "fexit",
    },
    ThpForm {
        name: "kretprobe",
        means: Feature::Kprobes,
        always: &["thread_exit", "thp_kretprobe", "thp_kprobe"],
        entry: "kprobe",
        exit: "kretprobe",
    },
];

/// Function that allocates transparent huge pages of shared memory, by its names, the newer first.
const THP_OF_SHARED_MEMORY: [&str; 3] = [
    "shmem_alloc_and_add_folio",
    "shmem_alloc_hugefolio",
    "shmem_alloc_hugepage",
];

impl ThpForm {
    /// Returns the names of the programs, with one for other sizes if `sizes` is set, and one on the function
    /// `shared`.
    fn programs(self, sizes: bool, shared: Option<&str>) -> Vec<String> {
        let mut programs: Vec<String> = self.always.iter().map(ToString::to_string).collect();
        if sizes {
            programs.push(format!("small_thp_{}", self.entry));
        }
        if let Some(function) = shared {
            programs.push(format!("{function}_{}", self.exit));
        }
        programs
    }
}

/// Whether this kernel has transparent huge pages of several sizes.
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

/// Returns the names of the programs for faults on reserved pages, in the form of this kind. `reasons` are the
/// functions that distinguish the reasons of faults.
fn fault_programs(kind: &str, reasons: Option<[&str; 2]>) -> Vec<String> {
    let mut programs = Vec::new();
    if let Some(functions) = reasons {
        programs.push("thread_exit".into());
        programs.push(format!("fault_end_{kind}"));
        programs.extend(functions.map(|function| format!("{function}_{kind}")));
    }
    programs.push(format!("fault_{kind}"));
    programs
}

/// Function that allocates a page, by its names, the newer first; [`WRITES`] is the function that handles a write.
const ALLOCATES: [&str; 2] = ["alloc_hugetlb_folio", "alloc_huge_page"];

const WRITES: [&str; 2] = ["hugetlb_wp", "hugetlb_cow"];

/// Returns the functions that distinguish the reasons of faults, if this kernel has both.
fn reason_functions() -> Option<[&'static str; 2]> {
    let allocates = kernel_support::first_name_in_btf(&ALLOCATES)?;
    let writes = kernel_support::first_name_in_btf(&WRITES)?;
    Some([allocates, writes])
}

/// Loads these programs, and attaches all of them except [`EVENT`].
fn load(args: &Args, filter: &Filter, programs: &[String]) -> Result<Attached> {
    let programs: Vec<&str> = programs.iter().map(String::as_str).collect();
    let mut open = bpf::prepare(filter)?;
    let by_reason = programs.contains(&"thread_exit");
    if !by_reason {
        map_create::set_capacity(&mut open.maps.faults, 1)?;
    }
    let wanted = args.containers.wanted(args.common.wants_cgroups());
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
    options.page_shift_base = page_size::page_shift()?;
    let mut skel = open.load_only(&programs)?;
    let by_name: Vec<&str> = programs
        .iter()
        .copied()
        .filter(|program| *program != EVENT)
        .collect();
    let links = attach::attach_by_name(skel.object_mut(), &by_name)?;
    Ok(Attached { skel, links })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_program_has_a_name_that_is_asked_for() {
        let mut asked_for = BTreeSet::from([MADVISE, EVENT].map(str::to_owned));
        for form in THP_FORMS {
            for shared in THP_OF_SHARED_MEMORY {
                asked_for.extend(form.programs(true, Some(shared)));
            }
        }
        for kind in ["fentry", "kprobe"] {
            for name in [0, 1] {
                let reasons = [ALLOCATES[name], WRITES[name]];
                asked_for.extend(fault_programs(kind, Some(reasons)));
            }
        }
        assert_eq!(asked_for, bpf::program_names());
    }
}
