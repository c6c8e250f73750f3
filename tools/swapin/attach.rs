//! BPF programs of swapin on the functions that move pages, by the names that these have in this kernel.

use anyhow::{Context, Result};
use libbpf_rs::Link;
use libbpf_rs::skel::Skel;
use memtools::bpf::attach::{self, Feature, Variant};
use memtools::bpf::{kernel_support, map_create};
use memtools::process::container;
use memtools::process::filter::Filter;

use crate::args::Args;
use crate::bpf;
use crate::bpf::Loaded;

/// Kernel functions that read pages from swap, by their names, the newer first.
const READ: [&str; 2] = ["swap_read_folio", "swap_readpage"];

const WRITE: [&str; 2] = ["swap_writeout", "swap_writepage"];

const ZSWAP: &str = "zswap_load";

/// Function that waits for a page of anonymous memory to be read; [`SHARED`] waits for one of shared memory.
const ANONYMOUS: &str = "do_swap_page";

const SHARED: [&str; 2] = ["shmem_swapin_folio", "shmem_swapin_page"];

/// Forms of the programs, and the means that each needs from the kernel.
const KINDS: [(&str, Feature); 2] = [("fentry", Feature::Fentry), ("kprobe", Feature::Kprobes)];

pub(crate) struct Attached {
    pub(crate) skel: Loaded,
    pub(crate) links: Vec<Link>,
}

/// Finds out how the kernel's function of zswap reports success. None if zswap is not requested, or the kernel lacks
/// the function.
pub(crate) fn zswap(args: &Args) -> Result<Option<Zswap>> {
    if !args.zswap {
        return Ok(None);
    }
    if !kernel_support::btf_has_name(ZSWAP) {
        memtools::message!("this kernel has no {ZSWAP} (6.6 and later, with CONFIG_ZSWAP)");
        return Ok(None);
    }
    let result = kernel_support::function_result(ZSWAP)?;
    Ok(Some(Zswap {
        says_bool: ["bool", "_Bool"].contains(&result.as_str()),
    }))
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Zswap {
    /// Whether the function returns true for a page that it holds, rather than 0.
    says_bool: bool,
}

/// Loads and attaches the programs in the first form that works. Also returns the name of the form.
pub(crate) fn start(
    args: &Args,
    zswap: Option<Zswap>,
    filter: &Filter,
) -> Result<(&'static str, Attached)> {
    if args.latency && shared().is_none() {
        memtools::message!(
            "this kernel has no {} for kprobes: HELD(ms) is without shared memory",
            SHARED[0]
        );
    }
    let variants = KINDS.map(|(kind, means)| {
        let variant = Variant::new(kind, move || {
            let functions = Functions {
                read: function(READ)?,
                write: args.out.then(|| function(WRITE)).transpose()?,
                shared: shared().filter(|_| args.latency),
            };
            let programs = programs(kind, functions, args.latency, zswap.is_some());
            load(args, zswap, filter, &programs)
        });
        variant.needing(means)
    });
    let started = attach::first_that_works(
        args.common.verbose,
        attach::fentry_last_if_preemptible(variants.into()),
    );
    started.inspect_err(|_| {
        memtools::message!(
            "`faults --by-process -M` counts major faults, which include swap-ins; pswpin in /proc/vmstat counts \
             the pages of the whole machine"
        );
    })
}

/// Functions that have had several names, by their names in this kernel; None if not wanted, or missing.
#[derive(Debug, Clone, Copy)]
struct Functions {
    read: &'static str,
    write: Option<&'static str>,
    shared: Option<&'static str>,
}

/// Returns the names of the programs on these functions, in the form of this kind and in the order to attach them.
fn programs(kind: &str, functions: Functions, latency: bool, zswap: bool) -> Vec<String> {
    let mut programs = Vec::new();
    if latency || zswap {
        programs.push("thread_exit".to_owned());
    }
    if let Some(function) = functions.shared {
        programs.push(format!("{function}_end_kprobe"));
        programs.push(format!("{function}_begin_kprobe"));
    }
    if latency {
        programs.push(format!("{ANONYMOUS}_end_{kind}"));
        programs.push(format!("{ANONYMOUS}_begin_{kind}"));
    }
    if zswap {
        programs.push(format!("{ZSWAP}_{kind}"));
    }
    if let Some(function) = functions.write {
        programs.push(format!("{function}_{kind}"));
    }
    programs.push(format!("{}_{kind}", functions.read));
    programs
}

/// Returns the function that waits for shared memory, if this kernel has it (not inlined), and kprobes for it.
fn shared() -> Option<&'static str> {
    kernel_support::first_name_in_btf(&SHARED).filter(|_| kernel_support::has_kprobes())
}

/// Returns the name of the function in this kernel.
fn function(names: [&'static str; 2]) -> Result<&'static str> {
    kernel_support::first_name_in_btf(&names).with_context(|| {
        format!(
            "this kernel has no function {}; it may be built without swap (CONFIG_SWAP)",
            names.join(" or ")
        )
    })
}

/// Loads and attaches these programs.
fn load(
    args: &Args,
    zswap: Option<Zswap>,
    filter: &Filter,
    programs: &[String],
) -> Result<Attached> {
    let programs: Vec<&str> = programs.iter().map(String::as_str).collect();
    let mut open = bpf::prepare(filter)?;
    let wanted = args.containers.wanted(args.common.wants_cgroups());
    let with_cgroups = container::prepare(wanted, &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.with_latency = args.latency.into();
    options.with_cgroups = with_cgroups;
    options.with_zswap = zswap.is_some().into();
    options.zswap_says_bool = zswap.is_some_and(|zswap| zswap.says_bool).into();
    if zswap.is_none() {
        map_create::set_capacity(&mut open.maps.reading, 1)?;
    }
    if !args.latency {
        map_create::set_capacity(&mut open.maps.faults, 1)?;
    }
    let mut skel = open.load_only(&programs)?;
    let links = attach::attach_by_name(skel.object_mut(), &programs)?;
    Ok(Attached { skel, links })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_program_has_a_name_that_is_asked_for() {
        let mut asked_for = BTreeSet::new();
        for kind in KINDS.map(|(kind, _)| kind) {
            for name in [0, 1] {
                let functions = Functions {
                    read: READ[name],
                    write: Some(WRITE[name]),
                    shared: Some(SHARED[name]),
                };
                asked_for.extend(programs(kind, functions, true, true));
            }
        }
        assert_eq!(asked_for, bpf::program_names());
    }
}
