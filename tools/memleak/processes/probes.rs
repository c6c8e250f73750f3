//! Attaches the probes, in the best way that this kernel has.

use std::ffi::CString;
use std::fs;
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::{Link, MapCore, MapFlags, ProgramImpl, UprobeMultiOpts, UprobeOpts};
use memtools::bpf::attach::{self, FatalError, Variant};
use memtools::bpf::kernel_support;
use memtools::host::capabilities::{self, Capability};
use memtools::host::kernel_log;
use memtools::print::clock;
use memtools::process::proc::{self, Process};
use memtools::process::uprobes;
use memtools::stacks::unwind::Unwinder;
use perf_event::Builder;
use perf_event::events::Software;

use super::bpf::Loaded;
use super::bpf::types::steering;
use super::load;
use super::object::{Function, Object};
use super::objects;
use super::python_objects;
use super::signature::Signature;
use super::stopped::StopRequests;
use super::target::{self, Targets};
use crate::plan::{FunctionSettings, ProcessPlan};

/// Loaded BPF object, by which probes are attached.
pub(crate) struct Attached {
    pub(crate) skel: Loaded,
    /// Name of the way to attach.
    pub(crate) how: &'static str,
    /// Capacity of each overflow map, in blocks. These maps take the blocks for which the table has no space.
    pub(crate) overflow: Vec<u32>,
    /// Questions about stopped processes, asked while a command starts.
    pub(crate) questions: StopRequests,
    pub(super) way: AttachMode,
    /// Whether the target is a command, whose processes are stopped until their code is probed.
    pub(super) is_of_command: bool,
    /// Signatures of the programs entry_0 and so on.
    pub(super) signatures: Vec<Signature>,
}

/// Counters of the BPF programs' runs.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Hits {
    pub(crate) count: u64,
    /// Number of runs that were entries of calls to be recorded.
    pub(crate) recorded: u64,
    /// Number of runs that were timed.
    pub(crate) measured: u64,
    /// Time that the timed runs took, in nanoseconds of CPU time.
    pub(crate) measured_ns: u64,
}

/// Attached BPF object, its links (the probes end with these), and the unwinder of its stacks.
pub(super) type Started = (Attached, Vec<Link>, Unwinder);

/// Whether double frees are noticed. That takes the table, and a record of every block: with -n, blocks that threads of
/// other names allocate are not recorded.
pub(crate) fn notices_double_frees(skel: &Loaded, plan: &ProcessPlan) -> bool {
    skel.maps.table.max_entries() > 1
        && plan.recording.is_complete()
        && plan.target.filter.name.is_none()
}

/// Number of the programs entry_0 and so on; `SIGNATURES` in `bpf/memleak/types.bpf.h`.
pub(super) const SIGNATURES: usize = 60;

/// Time within which a call that has begun before its probe was placed returns, in nanoseconds: a thread can wait for
/// a lock, a page or a CPU in the middle of the call.
const CALL_NS: u64 = 1_000_000_000;

/// Path of the file with our own functions.
const OWN_PROGRAM: &str = "/proc/self/exe";

/// Ways to attach, from the best down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AttachMode {
    /// One link for each file, with a cookie for each function.
    Session,
    /// Two links for each file: one for entries, and one for returns.
    Multi,
    /// A link for each entry and return, with cookies.
    Cookies,
    /// A link for each entry and return, without cookies. Each signature has a program of its own, which tail-calls the
    /// program that all share.
    Plain,
}

/// Loads the BPF programs and attaches the probes, in the best way that this kernel has.
pub(crate) fn attach(target: &Targets, plan: &ProcessPlan) -> Result<Started> {
    let woken = wake_uprobes();
    let session = Variant::new("uprobe session", || {
        if !kernel_support::btf_has_name("BPF_TRACE_UPROBE_SESSION") {
            bail!("not on this kernel (6.13 and later)");
        }
        start(AttachMode::Session, target, plan)
    });
    let multi = Variant::new("uprobe multi", || {
        if !kernel_support::btf_has_name("BPF_TRACE_UPROBE_MULTI") {
            bail!("not on this kernel (6.6 and later)");
        }
        start(AttachMode::Multi, target, plan)
    });
    let cookies = Variant::new("perf uprobes", || start(AttachMode::Cookies, target, plan));
    let plain = Variant::new("perf uprobes without cookies", || {
        start(AttachMode::Plain, target, plan)
    });
    let variants = [session, multi, cookies, plain];
    let started = attach::first_that_works(plan.verbose, variants);
    // The end of this process would interrupt the removal of the first uprobe.
    let _ = woken.join();
    let (how, (attached, links, unwinder)) = started?;
    Ok((Attached { how, ..attached }, links, unwinder))
}

fn start(way: AttachMode, target: &Targets, plan: &ProcessPlan) -> Result<Started> {
    let (attached, mut links, unwinder) = load::load(way, target, plan)?;
    if way == AttachMode::Multi {
        links.push(check_all_threads_hit(&attached.skel)?);
    }
    for (pid, object) in target.objects() {
        links.extend(attached.probe(pid, object, &plan.functions)?);
    }
    Ok((attached, links, unwinder))
}

impl Attached {
    /// Returns the signatures that have a program of their own, for kernels without cookies.
    fn signatures(&self) -> &[Signature] {
        &self.signatures[..self.signatures.len().min(SIGNATURES)]
    }

    /// Returns the counters of all runs.
    pub(crate) fn hits(&self) -> Hits {
        let bss = self.skel.maps.bss_data.as_deref();
        let of_cpus = bss.map_or(&[][..], |bss| &bss.hits);
        Hits {
            count: of_cpus.iter().map(|hits| hits.count).sum(),
            recorded: of_cpus.iter().map(|hits| hits.recorded).sum(),
            measured: of_cpus.iter().map(|hits| hits.measured).sum(),
            measured_ns: of_cpus.iter().map(|hits| hits.measured_ns).sum(),
        }
    }

    /// Changes a setting of the BPF programs, from their next run on.
    pub(crate) fn steer(&self, what: steering, value: u64) -> Result<()> {
        let map = &self.skel.maps.steering;
        map.update(&what.0.to_ne_bytes(), &value.to_ne_bytes(), MapFlags::ANY)
            .context("failed to steer the programs")
    }

    /// Attaches the probes of one file in one process, or in every process.
    ///
    /// The kernel keeps one reference counter, as USDT uses them, for all probes of an instruction. While another
    /// tracer's probe at an instruction has a counter, ours is refused, as it has none. If that happens, functions are
    /// probed at their entries instead of behind them.
    pub(crate) fn probe(
        &self,
        pid: i32,
        object: &Object,
        settings: &FunctionSettings,
    ) -> Result<Vec<Link>> {
        let pid = target::pid_to_probe(pid, object)?;
        self.watch_for_copies(object)?;
        let started = clock::monotonic_ns();
        let mut links = self.place_in_order(pid, object);
        if links.as_ref().is_err_and(is_invalid) && !settings.at_entries {
            let at_entries = object.at_entries(settings)?;
            links = self.place_in_order(pid, &at_entries);
            if links.is_ok() {
                objects::warn_once(&format!(
                    "{} is probed at the functions' entries, as the kernel refused other places{}",
                    object.module,
                    why_invalid(started).unwrap_or_default()
                ));
            }
        }
        let failed = || format!("failed to probe {}", object.module);
        if links.as_ref().is_err_and(is_invalid)
            && let Some(why) = why_invalid(started)
        {
            bail!(FatalError(format!("{}{why}", failed())));
        }
        // Multi-uprobes take CAP_PERFMON. perf's uprobes take more on some kernels.
        let is_refused = links.as_ref().is_err_and(is_refused);
        let remedy = is_refused.then(|| capabilities::remedy(Capability::CAP_SYS_ADMIN));
        links.with_context(|| failed() + &remedy.unwrap_or_default())
    }

    /// Has processes stopped before they replace code of this file (`bpf/memleak/copies.bpf.h`).
    fn watch_for_copies(&self, object: &Object) -> Result<()> {
        let (_, inode) = object.file.identity()?;
        let map = &self.skel.maps.probed_inodes;
        map.update(&inode.to_ne_bytes(), &[1], MapFlags::ANY)
            .with_context(|| {
                format!(
                    "failed to monitor for copies of the code of {}",
                    object.module
                )
            })
    }

    /// Places the probes, and notes until when calls may go unseen.
    ///
    /// The kernel places one probe after the other. A block that is freed meanwhile can be allocated again by a function
    /// that has no probe yet, or by a call that has begun before its probe was there. The next free of that block would
    /// look like a second one.
    fn place_in_order(&self, pid: i32, object: &Object) -> Result<Vec<Link>> {
        self.steer(steering::STEERING_UNSEEN_UNTIL, u64::MAX)?;
        let links = self.place(pid, object);
        let mut until_ns = clock::monotonic_ns();
        if !self.is_of_command && is_multithreaded(pid) {
            until_ns += CALL_NS;
        }
        self.steer(steering::STEERING_UNSEEN_UNTIL, until_ns)?;
        links
    }

    fn place(&self, pid: i32, object: &Object) -> Result<Vec<Link>> {
        object.expect_unchanged()?;
        let mut links = Vec::new();
        let attached = match self.way {
            AttachMode::Session => self.session(pid, object, &mut links),
            AttachMode::Multi => self.multi(pid, object, &mut links),
            way => self.perf(way, pid, object, &mut links),
        };
        if let Err(error) = attached {
            self.remove(links);
            return Err(error);
        }
        Ok(links)
    }

    /// Whether probes in one process end with its main thread. Sessions (6.13 and later) compare thread groups instead
    /// of the main thread's memory.
    pub(crate) fn ends_with_main_thread(&self) -> bool {
        self.way != AttachMode::Session
    }

    /// Detaches the probes. The kernel removes one after the other, so the frees of now are not judged any more.
    pub(crate) fn detach(&self, links: Vec<Link>) {
        let _ = self.steer(steering::STEERING_UNSEEN_UNTIL, u64::MAX);
        self.remove(links);
    }

    fn remove(&self, links: Vec<Link>) {
        match self.way {
            AttachMode::Session | AttachMode::Multi => uprobes::remove(links),
            AttachMode::Cookies | AttachMode::Plain => uprobes::remove_in_background(links),
        }
    }

    fn session(&self, pid: i32, object: &Object, links: &mut Vec<Link>) -> Result<()> {
        let opts = UprobeMultiOpts {
            session: true,
            ..places(object.calls())
        };
        // A session may begin a return probe, for which the stack has a return address at a function's entry only.
        let (call, slot) = (&self.skel.progs.session_call, &self.skel.progs.cookie_slot);
        let programs = [(call, opts), (slot, places(object.slots()))];
        attach_multi(pid, object, programs, links)
    }

    fn multi(&self, pid: i32, object: &Object, links: &mut Vec<Link>) -> Result<()> {
        let (entry, exit) = (
            &self.skel.progs.cookie_entry,
            &self.skel.progs.cookie_return,
        );
        let returning = object
            .calls()
            .filter(|of| of.signature.needs_return_probe());
        let returns = UprobeMultiOpts {
            retprobe: true,
            ..places(returning)
        };
        let (entries, slots) = (places(object.calls()), places(object.slots()));
        let slot = &self.skel.progs.cookie_slot;
        // Returns are attached first: a call that is seen at entry must be seen at its return.
        let programs = [(exit, returns), (entry, entries), (slot, slots)];
        attach_multi(pid, object, programs, links)
    }

    fn perf(
        &self,
        way: AttachMode,
        pid: i32,
        object: &Object,
        links: &mut Vec<Link>,
    ) -> Result<()> {
        let is_known =
            |of: &Function| way != AttachMode::Plain || self.signatures().contains(&of.signature);
        let with_slots = object.slots().all(is_known);
        if !with_slots {
            python_objects::warn_of_unseen_objects(
                &object.module,
                "this kernel cannot distinguish that many places of its allocator (5.15 and later can)",
            );
        }
        for &Function {
            signature, offset, ..
        } in object
            .functions
            .iter()
            .filter(|of| with_slots || !of.signature.is_of_pool())
        {
            let programs = &self.skel.progs;
            let (entry, returns) = match way {
                AttachMode::Plain => (
                    entry_with(&self.skel, self.signatures(), signature)?,
                    &programs.any_return,
                ),
                _ if signature.is_of_slot() => (&programs.cookie_slot, &programs.cookie_return),
                _ => (&programs.cookie_entry, &programs.cookie_return),
            };
            let returns = signature.needs_return_probe().then_some((returns, true));
            // The return probe is attached first: a call that is seen at entry must be seen at its return.
            for (program, retprobe) in returns.into_iter().chain([(entry, false)]) {
                let opts = UprobeOpts {
                    retprobe,
                    cookie: match way {
                        AttachMode::Plain => 0,
                        _ => signature.packed().into(),
                    },
                    ..UprobeOpts::default()
                };
                let path = object.file.path();
                links.push(uprobes::register(|| {
                    Ok(program.attach_uprobe_with_opts(pid, path, offset, opts)?)
                })?);
            }
        }
        Ok(())
    }
}

/// Whether a process has several threads, one of which can be in the middle of a call.
fn is_multithreaded(pid: i32) -> bool {
    pid == target::EVERY_PROCESS
        || proc::tids(pid.cast_unsigned()).is_ok_and(|threads| threads.len() > 1)
}

/// Whether the kernel found a probe invalid (EINVAL).
fn is_invalid(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<libbpf_rs::Error>();
    error.is_some_and(|error| error.kind() == libbpf_rs::ErrorKind::InvalidInput)
}

/// Whether the kernel did not permit a probe (EACCES, EPERM).
fn is_refused(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<libbpf_rs::Error>();
    error.is_some_and(|error| error.kind() == libbpf_rs::ErrorKind::PermissionDenied)
}

/// Returns what the kernel log has on another tracer's probes since `since_ns`, as the end of a sentence.
fn why_invalid(since_ns: u64) -> Option<String> {
    let message = kernel_log::last_with("ref_ctr_offset mismatch", since_ns)?;
    Some(format!(
        ": another tracer has a probe with a reference counter at an instruction that this tool probes, beside which \
         the kernel takes none without; /sys/kernel/tracing/uprobe_events or `bpftool link` may have \
         whose it is (kernel log: {message})"
    ))
}

/// Attaches each program that has places in a file by one link.
fn attach_multi<const PROGRAMS: usize>(
    pid: i32,
    object: &Object,
    programs: [(&ProgramImpl<'static, libbpf_rs::Mut>, UprobeMultiOpts); PROGRAMS],
    links: &mut Vec<Link>,
) -> Result<()> {
    let with_places = programs
        .into_iter()
        .filter(|(_, opts)| !opts.offsets.is_empty());
    for (program, opts) in with_places {
        let path = object.file.path();
        links.push(uprobes::register(|| {
            Ok(program.attach_uprobe_multi_with_opts(pid, path, "", opts)?)
        })?);
    }
    Ok(())
}

/// Returns the offsets at which functions are probed, with their cookies.
fn places<'a>(functions: impl IntoIterator<Item = &'a Function>) -> UprobeMultiOpts {
    let places = functions.into_iter();
    let (offsets, cookies) = places
        .map(|of| (of.offset, u64::from(of.signature.packed())))
        .unzip();
    UprobeMultiOpts {
        offsets,
        cookies,
        ..UprobeMultiOpts::default()
    }
}

/// Attaches a first uprobe in the background, while the program is loaded, and removes it at once. The kernel waits for a
/// grace period for it, 12 to 30 ms. Uprobes that follow within another grace period need not wait. The thread ends by
/// itself.
fn wake_uprobes() -> JoinHandle<()> {
    let probe = || -> Result<()> {
        let kind = fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")?;
        let path = CString::new(OWN_PROGRAM)?;
        let mut probe = Builder::new(Software::DUMMY);
        let attributes = probe.attrs_mut();
        attributes.type_ = kind.trim().parse()?;
        attributes.config = 0;
        attributes.uprobe_path = path.as_ptr().expose_provenance() as u64;
        attributes.probe_offset = own_function()?;
        // The removal must not be interrupted, either.
        uprobes::register(|| {
            drop(probe.build()?);
            Ok(())
        })
    };
    // If that fails, the probes become live all the same, only later.
    thread::spawn(move || drop(probe()))
}

/// Probes a function of our own by a link as for a target, and has another thread call the function. On some kernels
/// before 6.12 such a link sees only one thread of the process. The link is to be kept, as it takes time to detach.
fn check_all_threads_hit(skel: &Loaded) -> Result<Link> {
    let opts = UprobeMultiOpts {
        offsets: vec![own_function()? as usize],
        ..UprobeMultiOpts::default()
    };
    let pid = std::process::id().cast_signed();
    let program = &skel.progs.trial;
    let link = uprobes::register(|| {
        Ok(program.attach_uprobe_multi_with_opts(pid, OWN_PROGRAM, "", opts)?)
    })?;
    let thread = thread::spawn(|| called_by_a_thread());
    ensure!(thread.join().is_ok(), "a thread of memleak's own failed");
    let bss = skel.maps.bss_data.as_deref();
    let calls = bss.map_or(0, |bss| bss.trial_calls);
    if calls != 1 {
        uprobes::remove(vec![link]);
        bail!("on this kernel it sees one thread of a process alone");
    }
    Ok(link)
}

#[inline(never)]
extern "C" fn called_by_a_thread() {
    std::hint::black_box(());
}

/// Returns the offset in [`OWN_PROGRAM`] of the function that is probed.
fn own_function() -> Result<u64> {
    let address = called_by_a_thread as extern "C" fn() as usize as u64;
    let mappings = Process::open(std::process::id())?.mappings()?;
    let code = mappings.iter().find(|code| code.range.contains(&address));
    let code = code.context("memleak's own code is not mapped")?;
    Ok(address - code.range.start + code.file_offset)
}

/// Returns references to the programs with these names.
macro_rules! programs {
    ($all:ident: $($name:ident)*) => {
        [$(&$all.$name),*]
    };
}

/// Returns the program that reads calls by this signature.
fn entry_with<'skel>(
    skel: &'skel Loaded,
    signatures: &[Signature],
    signature: Signature,
) -> Result<&'skel ProgramImpl<'static, libbpf_rs::Mut>> {
    let programs = &skel.progs;
    let entries: [_; SIGNATURES] = programs! { programs:
        entry_0 entry_1 entry_2 entry_3 entry_4 entry_5 entry_6 entry_7 entry_8 entry_9
        entry_10 entry_11 entry_12 entry_13 entry_14 entry_15 entry_16 entry_17 entry_18 entry_19
        entry_20 entry_21 entry_22 entry_23 entry_24 entry_25 entry_26 entry_27 entry_28 entry_29
        entry_30 entry_31 entry_32 entry_33 entry_34 entry_35 entry_36 entry_37 entry_38 entry_39
        entry_40 entry_41 entry_42 entry_43 entry_44 entry_45 entry_46 entry_47 entry_48 entry_49
        entry_50 entry_51 entry_52 entry_53 entry_54 entry_55 entry_56 entry_57 entry_58 entry_59
    };
    let number = signatures.iter().position(|known| *known == signature);
    number
        .and_then(|number| entries.get(number).copied())
        .with_context(|| {
            format!("this kernel distinguishes only {SIGNATURES} kinds of functions; use fewer --alloc options")
        })
}
