//! brkstack: calls of brk(2), by user stack and process.
//!
//! Hooks: the tracepoints of the system call, its function, or, for kernel stacks before 6.12, the tracepoints of all
//! system calls (`bpf/brkstack.bpf.c`). Calls are counted in the kernel. Only with --events each call is sent to user
//! space.

mod args;
mod calls;

use std::process::ExitCode;

use anyhow::Result;
use libbpf_rs::skel::Skel;
use libbpf_rs::{Link, MapMut};
use memtools::bpf::{attach, kernel_support, map_create};
use memtools::export::exposition::MetricKind;
use memtools::export::metrics::Family;
use memtools::export::profile::ValueType;
use memtools::host::page_size;
use memtools::print::output::Output;
use memtools::process::container;
use memtools::process::filter::{Filter, TaskKind};
use memtools::run::cli;
use memtools::run::count_stacks::{StackCounts, StackReport, Weight};
use memtools::run::poll::Poller;
use memtools::run::target::{self, Target};

use crate::args::Args;
use crate::bpf::Loaded;
use crate::calls::StackReaders;

memtools::skeleton!("brkstack", BrkstackSkelBuilder, stacks: unwound, plain: [event]);

static CALLS: Family = Family {
    name: "memtools_brk_calls_total",
    help: "Calls of brk(2), or with --growth those that grow the heap, by task.",
    labels: &["comm", "unit", "container"],
    kind: MetricKind::Counter,
};
static GROWTH: Family = Family {
    name: "memtools_brk_growth_bytes_total",
    help: "Bytes by which calls of brk(2) have grown heaps, by task.",
    labels: &["comm", "unit", "container"],
    kind: MetricKind::Counter,
};

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    args.check()?;
    kernel_support::preflight()?;
    kernel_support::preflight_tracepoints()?;
    attach::capture_log(args.common.verbose);
    let exports = args
        .stacks
        .profile
        .prepare(&args.common.export, args.target.to_string())?;
    let families: &[_] = if args.with_result() {
        &[&CALLS, &GROWTH]
    } else {
        &[&CALLS]
    };
    let target_name = args.target.to_string();
    let metrics = args.common.export.metrics(families, &target_name)?;
    let (mut poller, output) = args.common.start_as(args.format())?;
    let mut target = Target::resolve(&args.target, TaskKind::Programs)?;
    target::warn_if_interval_is_pid(args.stacks.interval(), &args.target.filter.pid);
    let tracepoints = args.programs(kernel_support::system_call_programs_lack_kernel_stacks());
    let mut skel = load(&args, target.filter(), tracepoints)?;
    let symbolizer = target.symbolizer(&args.stacks.profile, &args.common.export)?;
    let unwinder = args
        .user_stacks()
        .then(|| target.unwinder(args.stacks.unwind, memtools::unwind_parts!(skel)))
        .transpose()?;
    let object = skel.object_mut();
    let mut links = attach::attach_by_name(object, args.programs_on_threads())?;
    let functions = args.programs_on_functions();
    links.extend(attach::attach_syscall_programs(
        object,
        tracepoints,
        functions,
    )?);
    memtools::message!("tracing brk(2)... Ctrl-C to end");
    target.release()?;

    target.watch_exit(&mut poller);
    if args.events {
        let names = StackReaders {
            symbolizer: args.event_stacks().any().then_some(symbolizer),
            unwinder,
        };
        calls::print(
            &args,
            target.filter(),
            &skel,
            names,
            links,
            (poller, output),
            metrics,
        )?;
    } else {
        let maps = memtools::stack_count_maps!(skel);
        let filter = target.filter();
        let counts = StackCounts::new(
            maps,
            filter,
            symbolizer,
            unwinder,
            (exports, metrics),
            &args.stacks,
        );
        count_stacks(&args, counts, links, (poller, output))?;
    }
    target.finish()
}

/// Counts calls by stack until the run ends: the loop without --events.
fn count_stacks(
    args: &Args,
    counts: StackCounts<'_, MapMut<'static>>,
    links: Vec<Link>,
    (poller, output): (Poller<'_>, Output),
) -> Result<()> {
    let report = StackReport {
        format: args.format(),
        by_process: false,
        weight: if args.bytes {
            Weight::Bytes
        } else {
            Weight::Events
        },
        subject: if args.growth_only() {
            "calls of brk(2) that grow the heap"
        } else {
            "calls of brk(2)"
        },
        values: (
            ValueType::count("brk_calls", "calls"),
            args.growth_only().then_some(ValueType::bytes("growth")),
        ),
        families: [&CALLS, &GROWTH],
        args: &args.stacks,
    };
    counts.run(
        (poller, output),
        &args.common,
        &report,
        links,
        |counts, output| counts.report(output, &report),
    )
}

/// Loads the programs on these tracepoints, and those that the options ask for besides.
fn load(args: &Args, filter: &Filter, tracepoints: &[&str]) -> Result<Loaded> {
    let with_stacks = !args.events || args.event_stacks().any();
    let stacks = args.stacks.stack_capacity().if_wanted(with_stacks);
    let mut open = bpf::prepare(filter, stacks, args.stacks.unwind)?;
    let wanted = args.containers.wanted(args.common.wants_cgroups());
    let with_cgroups = container::prepare(wanted, &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.with_cgroups = with_cgroups;
    options.with_result = args.with_result().into();
    options.growth_only = args.growth_only().into();
    options.brk_number = libc::SYS_brk as u32;
    options.each_call = args.events.into();
    options.with_user_stacks = args.user_stacks().into();
    options.with_kernel_stacks = args.kernel_stacks.into();
    if !args.with_result() {
        map_create::set_capacity(&mut open.maps.calls, 1)?;
    }
    if args.events {
        map_create::set_capacity(&mut open.maps.counts_a, 1)?;
        map_create::set_capacity(&mut open.maps.counts_b, 1)?;
    } else {
        // A ring buffer needs at least one page.
        let page = page_size::page_bytes()? as u32;
        map_create::set_capacity(&mut open.maps.events, page)?;
    }
    let functions = args.programs_on_functions();
    let programs = attach::programs_on_system_calls(tracepoints, functions);
    open.load_only(&[&programs[..], args.programs_on_threads()].concat())
}
