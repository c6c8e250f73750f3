//! Loads the BPF programs that see calls of allocators, with their options set.

use std::os::fd::{AsFd, AsRawFd};

use anyhow::{Context, Result, bail};
use libbpf_rs::skel::OpenSkel;
use libbpf_rs::{MapCore, MapFlags, ProgramAttachType};
use memtools::bpf::kernel_support;
use memtools::bpf::map_create;
use memtools::process::container;
use memtools::stacks::unwind::{self, EarlyTables, UnwindParts, Unwinder};

use super::allocators;
use super::block_map_sizes::BlockMapSizes;
use super::bpf::{self, Loaded, Prepared};
use super::probes::{AttachMode, Attached, Started};
use super::signature::Signature;
use super::stopped;
use super::target::Targets;
use crate::args::Mode;
use crate::plan::ProcessPlan;

/// Capacity of the totals by process and stack, unless --stack-storage-size gives one.
const MAX_TOTALS: u32 = 1 << 18;
/// Message on why a trace shows few of the objects of a Python program.
const PYTHON_NOTE: &str = "its objects of up to 512 bytes are in arenas of its own, which are the blocks that are seen; \
                           with --python-objects, or PYTHONMALLOC=malloc in its environment, each object is a block";

/// Size of the ring buffer in bytes, for 12,000 events, if events are only of mappings and processes. The buffer counts
/// twice as memory of this process, as all ring buffers do.
const MAPPING_EVENT_BYTES: u32 = 1 << 20;

/// Maximum number of files for each of which only the first of a command's descendants is stopped.
const LOOKED_AT: u32 = 4096;

/// Loads the BPF programs that are wanted, and attaches those that every way needs.
pub(super) fn load(way: AttachMode, target: &Targets, plan: &ProcessPlan) -> Result<Started> {
    let room = match way {
        AttachMode::Plain => BlockMapSizes::without_table(&plan.memory)?,
        _ => BlockMapSizes::with_table(&plan.memory)?,
    };
    let signatures = signatures(target);
    let mut open = open(&signatures, &room, way, target, plan)?;
    choose_programs(&mut open, signatures.len(), way, target, plan);
    let whose = target.whose_tables(&plan.target);
    let early = EarlyTables::start(plan.unwind, &mut open.maps.unwind_shards, whose.clone())?;
    let skel = open.load()?;
    if way == AttachMode::Plain {
        share_plain_work(&skel)?;
    }
    let progs = &skel.progs;
    let watching = [
        &progs.process_exec,
        &progs.thread_exit,
        &progs.process_shares,
        &progs.process_moved,
    ];
    let watching = watching.into_iter().filter(|program| program.autoload());
    let links = watching.map(|program| {
        program
            .attach()
            .context("failed to monitor forks, execs, exits and moves of processes")
    });
    let links = links.collect::<Result<_>>()?;
    let (while_stopped, questions) = stopped::questions()?;
    let parts = UnwindParts {
        early,
        while_stopped: Some(while_stopped),
        python_note: (!plan.functions.python_objects).then_some(PYTHON_NOTE),
        ..memtools::unwind_parts!(skel)
    };
    let unwinder = Unwinder::start(plan.unwind, parts, whose)?;
    let attached = Attached {
        skel,
        how: "",
        overflow: room.overflow,
        questions,
        way,
        is_of_command: target.is_command,
        signatures,
    };
    Ok((attached, links, unwinder))
}

/// Chooses the BPF programs that this way and these options need.
fn choose_programs(
    open: &mut Prepared<'_>,
    signatures: usize,
    way: AttachMode,
    target: &Targets,
    plan: &ProcessPlan,
) {
    for mut program in open.open_object_mut().progs_mut() {
        let load = sees_calls(way, signatures, &program.name().to_string_lossy());
        program.set_autoload(load);
    }
    let programs = &mut open.progs;
    if plan.functions.python_objects {
        match way {
            AttachMode::Plain => programs.plain_slot.set_autoload(true),
            _ => programs.cookie_slot.set_autoload(true),
        }
        if matches!(way, AttachMode::Session | AttachMode::Multi) {
            let slot = &mut programs.cookie_slot;
            slot.set_attach_type(ProgramAttachType::TraceUprobeMulti);
        }
    }
    if way == AttachMode::Multi {
        programs.trial.set_autoload(true);
        for program in [&mut programs.cookie_entry, &mut programs.cookie_return] {
            program.set_attach_type(ProgramAttachType::TraceUprobeMulti);
        }
    }
    // If other processes are traced, too, what a child of vfork() does with its parent's blocks is seen.
    let only_named = target.is_fixed();
    programs.process_shares.set_autoload(only_named);
    programs
        .process_moved
        .set_autoload(plan.target.filter.cgroup.is_some());
    programs.process_exec.set_autoload(true);
    programs.thread_exit.set_autoload(true);
    for program in [
        &mut programs.unwind_publish,
        &mut programs.unwind_exec,
        &mut programs.unwind_mmap,
        &mut programs.unwind_code_dies,
        &mut programs.unwind_code_dies_too,
    ] {
        program.set_autoload(true);
    }
    // An allocator is missed if its process is not stopped. So a program that the kernel may skip is attached twice.
    let is_skipped = target.is_command && kernel_support::preempts_raw_tracepoints();
    for program in [
        &mut programs.held_exec_too,
        &mut programs.held_exec_again,
        &mut programs.held_mmap_too,
    ] {
        program.set_autoload(is_skipped);
    }
}

/// Whether the BPF program with this name sees calls, of functions with this number of signatures.
fn sees_calls(way: AttachMode, signatures: usize, program: &str) -> bool {
    match way {
        AttachMode::Session => program == "session_call",
        AttachMode::Multi | AttachMode::Cookies => {
            ["cookie_entry", "cookie_return"].contains(&program)
        }
        AttachMode::Plain => match program.strip_prefix("entry_").map(str::parse) {
            Some(Ok::<usize, _>(number)) => number < signatures,
            _ => ["plain_entry", "any_return"].contains(&program),
        },
    }
}

/// Opens the skeleton and sets its options, before it is loaded.
fn open<'target>(
    signatures: &[Signature],
    room: &BlockMapSizes,
    way: AttachMode,
    target: &'target Targets,
    plan: &ProcessPlan,
) -> Result<Prepared<'target>> {
    let mut open = bpf::prepare(&target.filter, plan.memory.stack_capacity(), plan.unwind)?;
    let wants_cgroups = plan.wants_cgroups();
    let with_cgroups = container::prepare(wants_cgroups, &mut open.maps.cgroup_paths)?;
    let recording = &plan.recording;
    let options = open.options()?;
    options.with_cgroups = with_cgroups;
    options.min_size = recording.min_size;
    options.max_size = recording.max_size;
    options.sample_rate = recording.sample_rate;
    if let Some(sampling) = recording.sampling {
        options.sample_bytes = sampling.sample_bytes;
        options.level_bytes = sampling.level_bytes;
    }
    options.trace_calls = recording.trace.into();
    // Without a return probe, only a walk by unwind tables can tell that a call goes on.
    let has_tables = plan.unwind.mode != unwind::Mode::Fp;
    options.skips_returns =
        (way == AttachMode::Session && !recording.is_complete() && has_tables).into();
    options.keep_totals = (recording.only_totals || recording.mode == Mode::Peak).into();
    options.count_unknown_frees = plan.report.extended.into();
    options.follow_peak = (recording.mode == Mode::Peak).into();
    options.only_totals = (recording.mode == Mode::Alloc).into();
    if recording.mode == Mode::Churn {
        options.churn_ns = u64::try_from(plan.report.interval.as_nanos()).unwrap_or(u64::MAX);
    }
    options.bucket_count = room.buckets;
    let [first, rest @ ..] = &room.overflow[..] else {
        bail!("no map for blocks");
    };
    if !rest.is_empty() {
        options.overflow_threshold = u64::from(first / 2);
    }
    for (to, signature) in options.signatures.iter_mut().zip(signatures) {
        *to = signature.packed();
    }

    let maps = &mut open.maps;
    map_create::set_capacity(&mut maps.table, room.buckets)?;
    map_create::set_capacity(&mut maps.overflow, *first)?;
    if plan.target.children && target.is_command {
        map_create::set_capacity(&mut maps.unwind_looked, LOOKED_AT)?;
    }
    // The kernel makes entries as they are needed, but all buckets at once.
    let by_stack = |wanted| {
        let most = plan.memory.stacks.unwrap_or(MAX_TOTALS);
        if wanted { most } else { 1 }
    };
    let totals = by_stack(recording.mode != Mode::Leak || recording.only_totals);
    map_create::set_capacity(&mut maps.totals, totals)?;
    map_create::set_capacity(&mut maps.unknown_frees, by_stack(plan.report.extended))?;
    if !recording.trace {
        map_create::set_capacity(&mut maps.events, MAPPING_EVENT_BYTES)?;
    }
    Ok(open)
}

/// Returns the signatures of the programs entry_0 and so on: those that are wanted now, then those of functions that
/// may be loaded later. Signatures beyond the number of programs are not used.
fn signatures(target: &Targets) -> Vec<Signature> {
    let mut signatures = target.signatures();
    for signature in allocators::signatures() {
        if !signatures.contains(&signature) {
            signatures.push(signature);
        }
    }
    signatures
}

/// Has the programs entry_0 and so on tail-call the programs that do their work: for calls, and for copies of CPython's
/// allocator.
fn share_plain_work(skel: &Loaded) -> Result<()> {
    let programs = [&skel.progs.plain_entry, &skel.progs.plain_slot];
    let map = &skel.maps.plain_work;
    for (index, program) in (0u32..).zip(programs) {
        if program.autoload() {
            let program = program.as_fd().as_raw_fd();
            map.update(&index.to_ne_bytes(), &program.to_ne_bytes(), MapFlags::ANY)
                .context("failed to have programs share one")?;
        }
    }
    Ok(())
}
