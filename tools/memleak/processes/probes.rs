//! Loads the program and places the probes.

use std::ffi::CString;
use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::skel::OpenSkel;
use libbpf_rs::{
    Link, MapCore, MapFlags, ProgramAttachType, ProgramImpl, UprobeMultiOpts, UprobeOpts,
};
use memtools::bpf::attach::{self, NoVariantHelps, Variant};
use memtools::bpf::kernel_support;
use memtools::bpf::map_create;
use memtools::host::capabilities::{self, Capability};
use memtools::host::kernel_log;
use memtools::print::clock;
use memtools::process::proc::Process;
use memtools::run::cli::UsageError;
use memtools::stacks::unwind::{self, Early, Parts, Unwinder};
use perf_event::events::Software;
use perf_event::{Builder, Counter};

use super::allocators;
use super::bpf::types::{block_bucket, steering};
use super::bpf::{self, Loaded, Prepared};
use super::objects::{self, Function, Object};
use super::signature::Signature;
use super::stopped::{self, Questions};
use super::target::Target;
use crate::args::{Args, Mode};
use crate::sampling::Sampling;

/// Blocks that the table has slots for; what is more goes to the map `overflow` and its successors.
const DEFAULT_BLOCKS: u32 = 1 << 17;
/// Sums by process and stack, unless --stack-storage-size says otherwise.
const MAX_TOTALS: u32 = 1 << 18;
/// Blocks in a bucket; BUCKET_BLOCKS of `bpf/include/live.bpf.h`.
const BUCKET_BLOCKS: u32 = 8;
/// What a block in such a map takes of the kernel's memory: key, value, and the kernel's own.
const OVERFLOW_BLOCK_BYTES: u64 = 112;
/// Blocks of the first such map and of the second, which are made when they are needed, at most, and
/// the part of all that they have then. The third has what is left.
const OVERFLOW_STEPS: [(u32, u32); 2] = [(1 << 17, 32), (1 << 20, 4)];

/// Why a trace has few of the objects of a Python program.
const PYTHON_NOTE: &str = "its objects of up to 512 bytes are in arenas of its own, which are the blocks that are seen; \
                           with PYTHONMALLOC=malloc in its environment each object is a block";

/// The loaded program, for placing its probes.
pub(crate) struct Attached {
    pub(crate) skel: Loaded,
    /// The way's name.
    pub(crate) how: &'static str,
    /// How many blocks each map has room for that takes what the table has not.
    pub(crate) overflow: Vec<u32>,
    /// What is asked while a command starts.
    pub(crate) questions: Questions,
    way: Way,
    /// Signatures of the programs entry_0 and so on.
    signatures: Vec<Signature>,
}

/// Runs of the programs.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Hits {
    pub(crate) count: u64,
    /// How many were entries of calls that are recorded.
    pub(crate) recorded: u64,
    /// The runs that were timed.
    pub(crate) measured: u64,
    /// What these took, in nanoseconds of CPU time.
    pub(crate) measured_ns: u64,
}

/// The attached program, its links, which the probes end with, and what unwinds its stacks.
type Started = (Attached, Vec<Link>, Unwinder);

/// Whether an address that is freed twice is noticed. It takes the table, and a record of all.
pub(crate) fn notices_double_frees(skel: &Loaded, args: &Args) -> bool {
    skel.maps.table.max_entries() > 1 && args.records_all()
}

/// Size of the buffer where events are only of mappings and processes: 12,000. It counts twice as memory
/// of ours, as all of its kind.
const MAPPING_EVENT_BYTES: u32 = 1 << 20;

/// Files that what a command starts is stopped for at the first of its runs only.
const LOOKED_AT: u32 = 4096;

/// The file of our own functions.
const OWN_PROGRAM: &str = "/proc/self/exe";

/// The ways to attach, from the best down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// One link for each file, with a cookie for each function.
    Session,
    /// Two, one for entries and one for returns.
    Multi,
    /// A link for each entry and return, with cookies.
    Cookies,
    /// A link for each entry and return, without cookies: a program for each signature, which goes on
    /// to the one that they share.
    Plain,
}

impl Way {
    fn programs(self) -> fn(&str) -> bool {
        match self {
            Self::Session => |program| program == "session_call",
            Self::Multi | Self::Cookies => |program| program.starts_with("cookie_"),
            Self::Plain => |program| {
                program.starts_with("entry_") || ["plain_entry", "any_return"].contains(&program)
            },
        }
    }
}

/// Loads the program and places the probes, in the best way that this kernel has.
pub(crate) fn attach(target: &Target, args: &Args) -> Result<Started> {
    wake_uprobes();
    let session = Variant::new("uprobe session", || {
        if !kernel_support::btf_has_name("BPF_TRACE_UPROBE_SESSION") {
            bail!("not on this kernel (6.13 and later)");
        }
        start(Way::Session, target, args)
    });
    let multi = Variant::new("uprobe multi", || {
        if !kernel_support::btf_has_name("BPF_TRACE_UPROBE_MULTI") {
            bail!("not on this kernel (6.6 and later)");
        }
        start(Way::Multi, target, args)
    });
    let cookies = Variant::new("perf uprobes", || start(Way::Cookies, target, args));
    let plain = Variant::new("perf uprobes without cookies", || {
        start(Way::Plain, target, args)
    });
    let variants = [session, multi, cookies, plain];
    let (how, (attached, links, unwinder)) = attach::first_that_works(args.verbose, variants)?;
    Ok((Attached { how, ..attached }, links, unwinder))
}

fn start(way: Way, target: &Target, args: &Args) -> Result<Started> {
    let (attached, mut links, unwinder) = load(way, target, args)?;
    if way == Way::Multi {
        links.push(try_with_a_thread(&attached.skel)?);
    }
    for (pid, object) in target.objects() {
        links.extend(attached.probe(pid, object, args)?);
    }
    Ok((attached, links, unwinder))
}

impl Attached {
    /// How often they have run.
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

    /// Changes what the programs do from their next run on.
    pub(crate) fn steer(&self, what: steering, value: u32) -> Result<()> {
        let map = &self.skel.maps.steering;
        map.update(&what.0.to_ne_bytes(), &value.to_ne_bytes(), MapFlags::ANY)
            .context("failed to steer the programs")
    }

    /// Places the probes of one file in one process.
    ///
    /// The kernel keeps one reference counter for all probes of an instruction, as USDT has them: while
    /// another tracer's probe there has one, ours is refused, as it has none. A function that is probed
    /// behind its entry is probed at the entry then.
    pub(crate) fn probe(&self, pid: i32, object: &Object, args: &Args) -> Result<Vec<Link>> {
        let started = clock::monotonic_ns();
        let mut links = self.place(pid, object);
        if links.as_ref().is_err_and(is_invalid) && !args.no_placement {
            let at_entries = object.at_entries(args)?;
            links = self.place(pid, &at_entries);
            if links.is_ok() {
                objects::tell_once(&format!(
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
            bail!(NoVariantHelps(format!("{}{why}", failed())));
        }
        // Multi-uprobes want CAP_PERFMON, and perf's uprobes more on some kernels.
        let is_refused = links.as_ref().is_err_and(is_refused);
        let remedy = is_refused.then(|| capabilities::remedy(Capability::CAP_SYS_ADMIN));
        links.with_context(|| failed() + &remedy.unwrap_or_default())
    }

    fn place(&self, pid: i32, object: &Object) -> Result<Vec<Link>> {
        object.expect_unchanged()?;
        match self.way {
            Way::Session => self.session(pid, object),
            Way::Multi => self.multi(pid, object),
            way => self.perf(way, pid, object),
        }
    }

    /// Takes the probes away.
    pub(crate) fn detach(&self, links: Vec<Link>) {
        match self.way {
            Way::Session | Way::Multi => attach::detach(links),
            Way::Cookies | Way::Plain => attach::detach_in_background(links),
        }
    }

    fn session(&self, pid: i32, object: &Object) -> Result<Vec<Link>> {
        let opts = UprobeMultiOpts {
            session: true,
            ..places(&object.functions)
        };
        let program = &self.skel.progs.session_call;
        let link = program.attach_uprobe_multi_with_opts(pid, object.file.path(), "", opts)?;
        Ok(vec![link])
    }

    fn multi(&self, pid: i32, object: &Object) -> Result<Vec<Link>> {
        let (entry, exit) = (
            &self.skel.progs.cookie_entry,
            &self.skel.progs.cookie_return,
        );
        let entries = places(&object.functions);
        let returning = object.functions.iter().filter(|of| of.signature.returns());
        let returns = UprobeMultiOpts {
            retprobe: true,
            ..places(returning)
        };
        // Returns first: a call seen at entry must be seen at its return.
        [(exit, returns), (entry, entries)]
            .into_iter()
            .filter(|(_, opts)| !opts.offsets.is_empty())
            .map(|(program, opts)| {
                Ok(program.attach_uprobe_multi_with_opts(pid, object.file.path(), "", opts)?)
            })
            .collect()
    }

    fn perf(&self, way: Way, pid: i32, object: &Object) -> Result<Vec<Link>> {
        let mut links = Vec::new();
        for &Function {
            signature, offset, ..
        } in &object.functions
        {
            let programs = &self.skel.progs;
            let (entry, returns) = match way {
                Way::Plain => (
                    entry_with(&self.skel, &self.signatures, signature)?,
                    &programs.any_return,
                ),
                _ => (&programs.cookie_entry, &programs.cookie_return),
            };
            let returns = signature.returns().then_some((returns, true));
            // The return probe first: a call seen at entry must be seen at its return.
            for (program, retprobe) in returns.into_iter().chain([(entry, false)]) {
                let opts = UprobeOpts {
                    retprobe,
                    cookie: match way {
                        Way::Plain => 0,
                        _ => signature.packed().into(),
                    },
                    ..UprobeOpts::default()
                };
                links.push(program.attach_uprobe_with_opts(
                    pid,
                    object.file.path(),
                    offset,
                    opts,
                )?);
            }
        }
        Ok(links)
    }
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

/// What the kernel's log has of another tracer's probes since then, as the end of a sentence.
fn why_invalid(since_ns: u64) -> Option<String> {
    let message = kernel_log::last_with("ref_ctr_offset mismatch", since_ns)?;
    Some(format!(
        ": another tracer has a probe with a reference counter at an instruction of ours, beside which \
         the kernel takes none without; /sys/kernel/tracing/uprobe_events or `bpftool link` may have \
         whose it is (kernel log: {message})"
    ))
}

/// Where the probes of functions are, with their cookies.
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

/// Has the kernel take a first uprobe while the program is loaded. For that it waits for a grace
/// period, 12 to 30 ms; those that follow within another one need not wait.
fn wake_uprobes() {
    let probe = || -> Result<Counter> {
        let kind = fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")?;
        let path = CString::new(OWN_PROGRAM)?;
        let mut probe = Builder::new(Software::DUMMY);
        let attributes = probe.attrs_mut();
        attributes.type_ = kind.trim().parse()?;
        attributes.config = 0;
        attributes.uprobe_path = path.as_ptr().expose_provenance() as u64;
        attributes.probe_offset = own_function()?;
        Ok(probe.build()?)
    };
    // Without it the probes are as live, later.
    thread::spawn(move || probe().ok());
}

/// Probes a function of our own by a link as for a target, and has another thread call it: on some
/// kernels before 6.12 such a link sees one thread of the process alone. The link is to be kept, as
/// to end it takes time.
fn try_with_a_thread(skel: &Loaded) -> Result<Link> {
    let opts = UprobeMultiOpts {
        offsets: vec![own_function()? as usize],
        ..UprobeMultiOpts::default()
    };
    let pid = std::process::id().cast_signed();
    let program = &skel.progs.trial;
    let link = program.attach_uprobe_multi_with_opts(pid, OWN_PROGRAM, "", opts)?;
    let thread = thread::spawn(|| called_by_a_thread());
    ensure!(thread.join().is_ok(), "a thread of memleak's own failed");
    let bss = skel.maps.bss_data.as_deref();
    let calls = bss.map_or(0, |bss| bss.trial_calls);
    ensure!(
        calls == 1,
        "on this kernel it sees one thread of a process alone"
    );
    Ok(link)
}

#[inline(never)]
extern "C" fn called_by_a_thread() {
    std::hint::black_box(());
}

/// Where it is in [`OWN_PROGRAM`].
fn own_function() -> Result<u64> {
    let address = called_by_a_thread as extern "C" fn() as usize as u64;
    let mappings = Process::open(std::process::id())?.mappings()?;
    let code = mappings.iter().find(|code| code.range.contains(&address));
    let code = code.context("memleak's own code is not mapped")?;
    Ok(address - code.range.start + code.file_offset)
}

/// The signatures of the programs entry_0 and so on: those that are wanted now, and of what may be loaded
/// later as many as there is room for.
fn signatures(target: &Target) -> Vec<Signature> {
    let mut signatures = target.signatures();
    for signature in allocators::signatures() {
        if !signatures.contains(&signature) {
            signatures.push(signature);
        }
    }
    signatures
}

/// The program that reads calls by this signature.
fn entry_with<'skel>(
    skel: &'skel Loaded,
    signatures: &[Signature],
    signature: Signature,
) -> Result<&'skel ProgramImpl<'static, libbpf_rs::Mut>> {
    let programs = &skel.progs;
    let entries = [
        &programs.entry_0,
        &programs.entry_1,
        &programs.entry_2,
        &programs.entry_3,
        &programs.entry_4,
        &programs.entry_5,
        &programs.entry_6,
        &programs.entry_7,
        &programs.entry_8,
        &programs.entry_9,
        &programs.entry_10,
        &programs.entry_11,
        &programs.entry_12,
        &programs.entry_13,
        &programs.entry_14,
        &programs.entry_15,
    ];
    let number = signatures.iter().position(|known| *known == signature);
    number
        .and_then(|number| entries.get(number).copied())
        .context("this kernel can tell only 16 kinds of functions apart; name fewer with --alloc")
}

/// Has the programs entry_0 and so on go on to the one that does their work.
fn share_plain_entry(skel: &Loaded) -> Result<()> {
    let program = skel.progs.plain_entry.as_fd().as_raw_fd();
    let map = &skel.maps.plain_work;
    map.update(&0u32.to_ne_bytes(), &program.to_ne_bytes(), MapFlags::ANY)
        .context("failed to have programs share one")
}

/// Loads the programs that are wanted, and attaches what every way needs.
fn load(way: Way, target: &Target, args: &Args) -> Result<Started> {
    let size = match way {
        Way::Plain => Size::without_table(args),
        _ => Size::with_table(args)?,
    };
    let mut open = open(way, &size, target, args)?;
    let wanted = way.programs();
    for mut program in open.open_object_mut().progs_mut() {
        let load = wanted(&program.name().to_string_lossy());
        program.set_autoload(load);
    }
    let programs = &mut open.progs;
    if way == Way::Multi {
        programs.trial.set_autoload(true);
        for program in [&mut programs.cookie_entry, &mut programs.cookie_return] {
            program.set_attach_type(ProgramAttachType::TraceUprobeMulti);
        }
    }
    // Where other processes are traced too, what they share is known.
    let only_named = !args.any_process();
    programs.process_shares.set_autoload(only_named);
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
    // An allocator whose process was not stopped is not known.
    let is_skipped = target.is_command && kernel_support::preempts_raw_tracepoints();
    for program in [
        &mut programs.held_exec_too,
        &mut programs.held_exec_again,
        &mut programs.held_mmap_too,
    ] {
        program.set_autoload(is_skipped);
    }
    let whose = target.whose_tables(args);
    let early = Early::start(args.unwind, &mut open.maps.unwind_shards, whose.clone())?;
    let skel = open.load()?;
    if way == Way::Plain {
        share_plain_entry(&skel)?;
    }
    let progs = &skel.progs;
    let watching = [
        &progs.process_exec,
        &progs.thread_exit,
        &progs.process_shares,
    ];
    let watching = watching.into_iter().filter(|program| program.autoload());
    let links = watching.map(|program| {
        program
            .attach()
            .context("failed to watch forks, execs and exits of processes")
    });
    let links = links.collect::<Result<_>>()?;
    let (while_stopped, questions) = stopped::questions()?;
    let parts = Parts {
        early,
        while_stopped: Some(while_stopped),
        python_note: Some(PYTHON_NOTE),
        ..memtools::unwind_parts!(skel)
    };
    let unwinder = Unwinder::start(args.unwind, parts, whose)?;
    let attached = Attached {
        skel,
        how: "",
        overflow: size.overflow,
        questions,
        way,
        signatures: signatures(target),
    };
    Ok((attached, links, unwinder))
}

/// The skeleton with the options in it, before load.
fn open<'target>(
    way: Way,
    size: &Size,
    target: &'target Target,
    args: &Args,
) -> Result<Prepared<'target>> {
    let mut open = bpf::prepare(&target.filter, args.stack_room(), args.unwind)?;
    let options = open.options()?;
    options.min_size = args.min_size;
    options.max_size = args.max_size;
    options.sample_rate = args.sample_rate;
    if let Some(sampling) = Sampling::of(args) {
        options.sample_bytes = sampling.sample_bytes;
        options.level_bytes = sampling.level_bytes;
    }
    options.trace_calls = args.trace.into();
    // Without a return it takes a walk by tables to know that a call goes on.
    let has_tables = args.unwind.mode != unwind::Mode::Fp;
    options.skips_returns = (way == Way::Session && !args.records_all() && has_tables).into();
    options.keep_totals = (args.combined_only || args.mode == Mode::Peak).into();
    options.count_unknown_frees = args.extended.into();
    options.follow_peak = (args.mode == Mode::Peak).into();
    options.only_totals = (args.mode == Mode::Alloc).into();
    if args.mode == Mode::Churn {
        options.churn_ns = u64::try_from(args.interval.as_nanos()).unwrap_or(u64::MAX);
    }
    options.bucket_count = size.buckets;
    let [first, rest @ ..] = &size.overflow[..] else {
        bail!("no map for blocks");
    };
    if !rest.is_empty() {
        options.overflow_crowded = u64::from(first / 2);
    }
    for (to, signature) in options.signatures.iter_mut().zip(signatures(target)) {
        *to = signature.packed();
    }

    let maps = &mut open.maps;
    map_create::size(&mut maps.table, size.buckets)?;
    map_create::size(&mut maps.overflow, *first)?;
    if args.children && target.is_command {
        map_create::size(&mut maps.unwind_looked, LOOKED_AT)?;
    }
    // Entries are made as they are needed, but buckets at once.
    let by_stack = |wanted| {
        let most = args.stack_storage_size.unwrap_or(MAX_TOTALS);
        if wanted { most } else { 1 }
    };
    let totals = by_stack(args.mode != Mode::Leak || args.combined_only);
    map_create::size(&mut maps.totals, totals)?;
    map_create::size(&mut maps.unknown_frees, by_stack(args.extended))?;
    if !args.trace {
        map_create::size(&mut maps.events, MAPPING_EVENT_BYTES)?;
    }
    Ok(open)
}

/// How large the maps of live blocks are.
#[derive(Debug, PartialEq, Eq)]
struct Size {
    /// Buckets of the table.
    buckets: u32,
    /// Blocks in the maps that take what the table has no room for.
    overflow: Vec<u32>,
}

impl Size {
    fn with_table(args: &Args) -> Result<Self> {
        let Some(blocks) = args.max_allocs else {
            let bytes = args.bytes_for_blocks();
            let reported = args.reported_block_bytes();
            let bucket_bytes = table_bytes(1) + u64::from(BUCKET_BLOCKS) * reported;
            let buckets = buckets_for(DEFAULT_BLOCKS).min(within(bytes / 2, bucket_bytes));
            let rest = bytes.saturating_sub(u64::from(buckets) * bucket_bytes);
            return Ok(Self {
                buckets,
                overflow: steps(within(rest, OVERFLOW_BLOCK_BYTES + reported)),
            });
        };
        let buckets = buckets_for(blocks);
        let bytes = table_bytes(buckets);
        if bytes > args.mem_limit {
            let message = format!(
                "--max-allocs {blocks} takes {bytes} bytes of memory: raise --mem-limit, which is {}",
                args.mem_limit
            );
            return Err(UsageError(message).into());
        }
        Ok(Self {
            buckets,
            overflow: vec![(blocks / 16).max(1)],
        })
    }

    fn without_table(args: &Args) -> Self {
        let block_bytes = OVERFLOW_BLOCK_BYTES + args.reported_block_bytes();
        let within_limit = within(args.bytes_for_blocks(), block_bytes);
        Self {
            buckets: 1,
            overflow: args.max_allocs.map_or_else(
                || steps(within_limit),
                |blocks| vec![blocks.min(within_limit)],
            ),
        }
    }
}

/// The sizes of the maps for so many blocks that are made one after the other.
fn steps(blocks: u32) -> Vec<u32> {
    let steps = OVERFLOW_STEPS.map(|(most, part)| most.min(blocks / part));
    let rest = blocks - steps.iter().sum::<u32>();
    let steps = steps.into_iter().chain([rest]);
    steps.filter(|blocks| *blocks > 0).collect()
}

/// Two thirds of the slots are for blocks: with more, too many find both their buckets full.
fn buckets_for(blocks: u32) -> u32 {
    let slots = u64::from(blocks) * 3 / 2;
    let buckets = slots.div_ceil(u64::from(BUCKET_BLOCKS)).max(1);
    buckets.try_into().unwrap_or(u32::MAX)
}

fn table_bytes(buckets: u32) -> u64 {
    u64::from(buckets) * size_of::<block_bucket>() as u64
}

/// How many of what takes `each` bytes there is room for in all, at least one.
pub(crate) fn within(bytes: u64, each: u64) -> u32 {
    (bytes / each).max(1).try_into().unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use memtools::stacks::table;

    use super::*;

    /// MORE_OVERFLOW of `bpf/include/live.bpf.h`.
    const MORE_OVERFLOW: usize = 2;

    fn size(args: &[&str]) -> Result<Size> {
        let args = [&["memleak", "-p", "1"], args].concat();
        Size::with_table(&Args::try_parse_from(args)?)
    }

    fn overflow_bytes(size: &Size) -> u64 {
        let blocks: u64 = size.overflow.iter().copied().map(u64::from).sum();
        blocks * OVERFLOW_BLOCK_BYTES
    }

    #[test]
    fn a_block_takes_less_than_64_bytes() {
        let blocks: u64 = 10_000_007;
        let size = size(&["--max-allocs", "10000007"]).expect("within the limit");
        let table = table_bytes(size.buckets);
        let overflow = overflow_bytes(&size);
        assert!(table + overflow <= blocks * 64, "{table} + {overflow}");
        assert!(u64::from(size.buckets * BUCKET_BLOCKS) > blocks);
    }

    #[test]
    fn memory_is_limited() {
        let all = 767 << 20..=768 << 20;
        for options in [&[][..], &["--combined-only"]] {
            let default = size(options).expect("within the limit");
            let table = table_bytes(default.buckets);
            let overflow = overflow_bytes(&default);
            let parsed = [&["memleak", "-p", "1"], options].concat();
            let parsed = Args::try_parse_from(parsed).expect("valid");
            let blocks = u64::from(default.buckets * BUCKET_BLOCKS)
                + default.overflow.iter().copied().map(u64::from).sum::<u64>();
            let reported = blocks * parsed.reported_block_bytes();
            let stacks = u64::from(parsed.max_stacks()) * (table::ENTRY_BYTES + 640);
            let sum = table + overflow + reported + stacks;
            assert!(
                all.contains(&sum),
                "{table} + {overflow} + {reported} + {stacks}"
            );
            assert_eq!(default.overflow.len(), 1 + MORE_OVERFLOW);
        }
        let smallest = Size {
            buckets: 1,
            overflow: vec![1],
        };
        assert_eq!(size(&["--mem-limit", "1"]).expect("rounded up"), smallest);
        let error = size(&["--max-allocs", "1000000", "--mem-limit", "1M"]).unwrap_err();
        assert!(error.to_string().contains("raise --mem-limit"), "{error}");
    }
}
