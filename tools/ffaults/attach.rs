//! The programs of ffaults on the hooks of a page fault, in the best way that this kernel has.

use anyhow::{Context, Result};
use libbpf_rs::Link;
use memtools::bpf::attach::{Means, Variant};
use memtools::bpf::{attach, map_create, software_event};
use memtools::process::container;
use memtools::process::filter::Filter;
use perf_event::events::Software;

use crate::args::{Args, Hook};
use crate::bpf;
use crate::bpf::Loaded;
use crate::bpf::types::name_record;

/// Files by process that there is room for in an interval; without --by-process it is files alone.
const COUNTS_BY_PROCESS: u32 = 16384;

/// Live probes, and what they can tell.
pub(crate) struct Attached {
    pub(crate) skel: Loaded,
    pub(crate) links: Vec<Link>,
    pub(crate) knows: Knows,
}

/// What a hook knows of a fault besides the memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Knows {
    /// Whether it was major.
    pub(crate) major: bool,
    /// What the access was.
    pub(crate) access: bool,
}

impl Knows {
    /// What the function that handles a fault is told.
    const ALL: Self = Self {
        major: true,
        access: true,
    };
}

/// Loads and attaches the programs. Returns the way's name, too. A way that misses nothing comes before
/// others.
pub(crate) fn start(args: &Args, filter: &Filter) -> Result<(&'static str, Attached)> {
    let variants = [
        (
            Hook::Fexit,
            Variant::new("fexit of handle_mm_fault", || fexit(args, filter)).needing(Means::Fentry),
        ),
        (
            Hook::Kprobe,
            Variant::new("kprobe of handle_mm_fault", || kprobe(args, filter))
                .needing(Means::Kprobes),
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
    attach::first_that_works(args.common.verbose, attach::exact_first(wanted.collect()))
}

/// One program at the return of the function that handles a fault.
fn fexit(args: &Args, filter: &Filter) -> Result<Attached> {
    let skel = load(args, filter, &["fault_fexit"])?;
    let links = attach::all(&[&skel.progs.fault_fexit], "")?;
    Ok(Attached {
        skel,
        links,
        knows: Knows::ALL,
    })
}

/// Programs at the entry and at the return of that function.
fn kprobe(args: &Args, filter: &Filter) -> Result<Attached> {
    let skel = load(
        args,
        filter,
        &["thread_exit", "fault_kprobe", "fault_kretprobe"],
    )?;
    let programs = &skel.progs;
    // The return first: a fault that is seen at its entry must be seen at its return.
    let programs = [
        &programs.thread_exit,
        &programs.fault_kretprobe,
        &programs.fault_kprobe,
    ];
    let links = attach::all(&programs, "")?;
    Ok(Attached {
        skel,
        links,
        knows: Knows::ALL,
    })
}

/// The kernel's own count. It counts minor and major faults when they are done, and all where they begin:
/// what is mapped is less often being changed then.
fn event(args: &Args, filter: &Filter) -> Result<Attached> {
    let knows = Knows {
        major: args.r#type,
        access: false,
    };
    let programs: &[&str] = if knows.major {
        &["fault_event", "major_fault_event"]
    } else {
        &["fault_event"]
    };
    let skel = load(args, filter, programs)?;
    let mut each = Vec::new();
    if knows.major {
        each.push((&skel.progs.fault_event, Software::PAGE_FAULTS_MIN));
        each.push((&skel.progs.major_fault_event, Software::PAGE_FAULTS_MAJ));
    } else {
        each.push((&skel.progs.fault_event, Software::PAGE_FAULTS));
    }
    let mut links = Vec::new();
    for (program, event) in each {
        links.extend(software_event::attach(program, event)?);
    }
    Ok(Attached { skel, links, knows })
}

/// The skeleton with the options in it, loaded with these programs only.
fn load(args: &Args, filter: &Filter, programs: &[&str]) -> Result<Loaded> {
    let mut open = bpf::prepare(filter)?;
    let with_cgroups = container::prepare(args.wants_cgroups(), &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.with_cgroups = with_cgroups;
    options.by_process = args.by_process.into();
    options.full_path = args.path.into();
    let maps = &mut open.maps;
    if !programs.contains(&"fault_kprobe") {
        map_create::size(&mut maps.calls, 1)?;
    }
    if args.by_process {
        map_create::size(&mut maps.counts_a, COUNTS_BY_PROCESS)?;
        map_create::size(&mut maps.counts_b, COUNTS_BY_PROCESS)?;
    }
    if !args.path {
        let names = maps.files.set_value_size(size_of::<name_record>() as u32);
        names.context("failed to size the map of names")?;
    }
    open.load_only(programs)
}
