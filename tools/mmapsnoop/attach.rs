//! BPF programs of mmapsnoop on the system calls.

use anyhow::Result;
use libbpf_rs::Link;
use libbpf_rs::skel::Skel;
use memtools::bpf::attach;
use memtools::process::container;
use memtools::process::filter::Filter;
use memtools::run::skeleton::StackCapacity;
use memtools::stacks::table::INITIAL_EVENT_ENTRIES;

use crate::args::Args;
use crate::bpf;
use crate::bpf::Loaded;

/// Program for 32-bit calls.
const COMPAT: &str = "compat_exit";

/// Loads the programs that the options ask for.
pub(crate) fn load(args: &Args, filter: &Filter) -> Result<Loaded> {
    let stacks = StackCapacity::of(INITIAL_EVENT_ENTRIES).if_wanted(args.with_stacks());
    let mut open = bpf::prepare(filter, stacks, args.unwind)?;
    let wanted = args.containers.wanted(args.common.wants_cgroups());
    let with_cgroups = container::prepare(wanted, &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.failed_only = args.failed.into();
    options.full_path = args.path.into();
    options.with_munmap = args.munmap.into();
    options.with_stack = args.with_stacks().into();
    options.with_cgroups = with_cgroups;
    let mut programs =
        attach::programs_on_system_calls(args.programs(), args.programs_on_functions());
    if args.compat {
        programs.push(COMPAT);
    }
    open.load_only(&programs)
}

/// Attaches the loaded programs.
pub(crate) fn start(skel: &mut Loaded, args: &Args) -> Result<Vec<Link>> {
    let object = skel.object_mut();
    let mut links =
        attach::attach_syscall_programs(object, args.programs(), args.programs_on_functions())?;
    if args.compat {
        links.extend(attach::attach_by_name(object, &[COMPAT])?);
    }
    Ok(links)
}
