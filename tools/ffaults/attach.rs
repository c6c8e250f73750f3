//! BPF programs of ffaults on the hooks of a page fault, in the best way that this kernel supports.

use anyhow::{Context, Result};
use libbpf_rs::Link;
use memtools::bpf::attach::{Feature, Variant};
use memtools::bpf::{attach, map_create, software_event};
use memtools::process::container;
use memtools::process::filter::Filter;
use perf_event::events::Software;

use crate::args::{Args, Hook};
use crate::bpf;
use crate::bpf::Loaded;
use crate::bpf::types::name_record;

/// Capacity of the count maps with --by-process, in pairs of file and process for one interval. Without the option
/// the key is the file alone.
const COUNTS_BY_PROCESS: u32 = 16384;

/// Loaded programs and their links, and the details that their hooks provide.
pub(crate) struct Attached {
    pub(crate) skel: Loaded,
    pub(crate) links: Vec<Link>,
    pub(crate) details: FaultDetails,
}

/// Details of a fault that a hook provides besides the mapping.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FaultDetails {
    /// Whether the fault was major.
    pub(crate) major: bool,
    /// Kind of the access.
    pub(crate) access: bool,
}

impl FaultDetails {
    /// Details that the function that handles a fault provides.
    const ALL: Self = Self {
        major: true,
        access: true,
    };
}

/// Loads and attaches the programs in the first way that works. Also returns the name of the way. A way that misses
/// no faults comes before the others.
pub(crate) fn start(args: &Args, filter: &Filter) -> Result<(&'static str, Attached)> {
    let variants = [
        (
            Hook::Fexit,
            Variant::new("fexit of handle_mm_fault", || fexit(args, filter))
                .needing(Feature::Fentry),
        ),
        (
            Hook::Kprobe,
            Variant::new("kprobe of handle_mm_fault", || kprobe(args, filter))
                .needing(Feature::Kprobes),
        ),
        (
            Hook::Event,
            Variant::new("perf event", || event(args, filter)),
        ),
    ];
    let wanted = variants
        .into_iter()
        .filter(|(hook, _)| args.hook.is_none_or(|only| only == *hook))
        .map(|(_, variant)| variant);
    attach::first_that_works(
        args.common.verbose,
        attach::fentry_last_if_preemptible(wanted.collect()),
    )
}

/// Attaches one program to the return of the function that handles a fault, handle_mm_fault.
fn fexit(args: &Args, filter: &Filter) -> Result<Attached> {
    let skel = load(args, filter, &["fault_fexit"])?;
    let links = attach::attach_all(&[&skel.progs.fault_fexit], "")?;
    Ok(Attached {
        skel,
        links,
        details: FaultDetails::ALL,
    })
}

/// Attaches programs to the entry and the return of handle_mm_fault.
fn kprobe(args: &Args, filter: &Filter) -> Result<Attached> {
    let skel = load(
        args,
        filter,
        &["thread_exit", "fault_kprobe", "fault_kretprobe"],
    )?;
    let programs = &skel.progs;
    // The return is attached first: a fault whose entry was seen must be seen to return.
    let programs = [
        &programs.thread_exit,
        &programs.fault_kretprobe,
        &programs.fault_kprobe,
    ];
    let links = attach::attach_all(&programs, "")?;
    Ok(Attached {
        skel,
        links,
        details: FaultDetails::ALL,
    })
}

/// Attaches programs to the kernel's page-fault counters. The counters of minor and of major faults count when a
/// fault is done, the counter of all faults when it begins: mappings are less often being changed then.
fn event(args: &Args, filter: &Filter) -> Result<Attached> {
    let details = FaultDetails {
        major: args.r#type,
        access: false,
    };
    let programs: &[&str] = if details.major {
        &["fault_event", "major_fault_event"]
    } else {
        &["fault_event"]
    };
    let skel = load(args, filter, programs)?;
    let mut each = Vec::new();
    if details.major {
        each.push((&skel.progs.fault_event, Software::PAGE_FAULTS_MIN));
        each.push((&skel.progs.major_fault_event, Software::PAGE_FAULTS_MAJ));
    } else {
        each.push((&skel.progs.fault_event, Software::PAGE_FAULTS));
    }
    let mut links = Vec::new();
    for (program, event) in each {
        links.extend(software_event::attach(program, event)?);
    }
    Ok(Attached {
        skel,
        links,
        details,
    })
}

/// Sets the options of the skeleton, and loads only these programs.
fn load(args: &Args, filter: &Filter, programs: &[&str]) -> Result<Loaded> {
    let mut open = bpf::prepare(filter)?;
    let with_cgroups = container::prepare(args.wants_cgroups(), &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.with_cgroups = with_cgroups;
    options.by_process = args.by_process.into();
    options.full_path = args.path.into();
    let maps = &mut open.maps;
    if !programs.contains(&"fault_kprobe") {
        map_create::set_capacity(&mut maps.calls, 1)?;
    }
    if args.by_process {
        map_create::set_capacity(&mut maps.counts_a, COUNTS_BY_PROCESS)?;
        map_create::set_capacity(&mut maps.counts_b, COUNTS_BY_PROCESS)?;
    }
    if !args.path {
        let names = maps.files.set_value_size(size_of::<name_record>() as u32);
        names.context("failed to size the map of names")?;
    }
    open.load_only(programs)
}
