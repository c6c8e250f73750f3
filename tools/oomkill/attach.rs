//! BPF programs of oomkill on the hooks of a kill, in the best way that this kernel supports.

use anyhow::{Context, Result, ensure};
use libbpf_rs::Link;
use memtools::bpf::attach::{self, Feature, Variant};
use memtools::bpf::{kernel_support, map_create};
use memtools::process::filter::Filter;
use memtools::run::skeleton::StackCapacity;

use crate::args::Args;
use crate::bpf;
use crate::bpf::Loaded;

/// Initial capacity of the stack table, in distinct stacks. A kill has two, and a machine that is out of memory
/// should not have to provide more.
const STACKS: u32 = 256;

/// Size of the ring buffer, in bytes: enough for hundreds of kills.
const EVENT_BYTES: u32 = 1 << 18;

/// Capacity of the map of cgroup paths: the cgroups of the victims between two reads of the ring buffer.
const CGROUPS: u32 = 128;

/// Loaded programs, and their links.
type Attached = (Loaded, Vec<Link>);

/// Ways to attach to a kill, the best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AttachMethod {
    Fentry,
    Kprobe,
    /// mark_victim alone, with the task as its argument.
    Victim,
    /// mark_victim alone, with the pid as its argument.
    Pid,
}

impl AttachMethod {
    fn name(self) -> &'static str {
        match self {
            Self::Fentry => "fentry",
            Self::Kprobe => "kprobe",
            Self::Victim => "mark_victim alone",
            Self::Pid => "mark_victim's pid alone",
        }
    }
}

/// Loads and attaches the programs in the first way that works. Also returns the name of the way.
pub(crate) fn start(args: &Args, filter: &Filter) -> Result<(&'static str, Attached)> {
    let arguments = kernel_support::tracepoint_arguments("mark_victim")?
        .context("this kernel has no tracepoint mark_victim")?;
    let with_task = arguments.first().is_some_and(|name| name == "task_struct");
    let variant = |rung: AttachMethod| {
        Variant::new(rung.name(), move || {
            try_start(args, filter, rung, with_task)
        })
    };
    let variants = [
        variant(AttachMethod::Fentry).needing(Feature::Fentry),
        variant(AttachMethod::Kprobe).needing(Feature::Kprobes),
        variant(AttachMethod::Victim),
        variant(AttachMethod::Pid),
    ];
    attach::first_that_works(args.common.verbose, variants)
}

/// Whether mark_victim is the only hook of the way with this name.
pub(crate) fn is_mark_victim_alone(way: &str) -> bool {
    [AttachMethod::Victim, AttachMethod::Pid]
        .map(AttachMethod::name)
        .contains(&way)
}

/// Loads and attaches the programs of one rung. `with_task`: whether the argument of mark_victim is the task.
fn try_start(
    args: &Args,
    filter: &Filter,
    rung: AttachMethod,
    with_task: bool,
) -> Result<Attached> {
    ensure!(
        rung != AttachMethod::Victim || with_task,
        "mark_victim has only the pid on this kernel"
    );
    let with_task = with_task && rung != AttachMethod::Pid;
    if !with_task {
        kernel_support::preflight_tracepoints()?;
    }
    let stacks = StackCapacity::of(STACKS).if_wanted(args.wants_stacks());
    let mut open = bpf::prepare(filter, stacks, args.unwind)?;
    let options = open.options()?;
    options.want_stacks = args.wants_stacks().into();
    options.with_cgroups = 1;
    options.only_victims = matches!(rung, AttachMethod::Victim | AttachMethod::Pid).into();
    map_create::set_capacity(&mut open.maps.cgroup_paths, CGROUPS)?;
    map_create::set_capacity(&mut open.maps.events, EVENT_BYTES)?;
    open.progs
        .kill_fentry
        .set_autoload(rung == AttachMethod::Fentry);
    open.progs
        .kill_kprobe
        .set_autoload(rung == AttachMethod::Kprobe);
    open.progs.mark_victim.set_autoload(with_task);
    open.progs.mark_victim_pid.set_autoload(!with_task);
    let skel = open.load()?;

    let programs = &skel.progs;
    let mut wanted = match rung {
        AttachMethod::Fentry => vec![&programs.kill_fentry],
        AttachMethod::Kprobe => vec![&programs.kill_kprobe],
        AttachMethod::Victim | AttachMethod::Pid => Vec::new(),
    };
    wanted.push(if with_task {
        &programs.mark_victim
    } else {
        &programs.mark_victim_pid
    });
    let links = attach::attach_all(&wanted, "")?;
    Ok((skel, links))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rung_has_its_own_name() {
        assert_eq!(
            [
                AttachMethod::Fentry,
                AttachMethod::Kprobe,
                AttachMethod::Victim,
                AttachMethod::Pid
            ]
            .map(AttachMethod::name),
            [
                "fentry",
                "kprobe",
                "mark_victim alone",
                "mark_victim's pid alone"
            ]
        );
    }
}
