//! A ladder of variants: the same hook in several forms, tried from the best down.
//!
//! That the kernel's BTF lists a function or a link type does not mean that it can be used: some
//! kernels are built without kprobes, some refuse fentry. So each variant is tried for real, by
//! loading and attaching it, and every failure is kept until one has worked. Only what the kernel
//! refuses as a whole is asked for first: to find that out by loading takes 25 ms.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::env;
use std::fmt;
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, Object, OpenObject, OpenProgramMut, PrintLevel, ProgramMut, ProgramType};
use nix::fcntl::OFlag;
use nix::unistd::{ForkResult, close, fork, pipe2, read, setsid};

use crate::bpf::btf_subset::{self, KernelTypes};
use crate::bpf::fentry_id;
use crate::bpf::kernel_support;
use crate::bpf::kretprobe;
use crate::bpf::map_create;
use crate::bpf::software_event;

/// Whether --verbose was given.
static VERBOSE: AtomicBool = AtomicBool::new(false);

/// What libbpf said since the last [`take_log`]: its warnings, the verifier's log among them.
static LOG: Mutex<String> = Mutex::new(String::new());

/// Names the only variant that is to be tried, so that tests reach those below the best.
const ONLY: &str = "MEMTOOLS_ATTACH";

/// What is said if libbpf does not understand an object.
const NOT_OPENED: &str = "failed to open the BPF object";

/// The last lines of a log that a failed variant is reported with.
const LOG_LINES: usize = 12;

/// Keeps libbpf's messages for the report of a failure instead of printing them. With `verbose`
/// all of them, down to debug, go to stderr as they come.
pub fn capture_log(verbose: bool) {
    VERBOSE.store(verbose, Ordering::Relaxed);
    fn keep(_level: PrintLevel, message: String) {
        if let Ok(mut log) = LOG.lock() {
            log.push_str(&message);
        }
    }
    fn print(_level: PrintLevel, message: String) {
        eprint!("{message}");
    }
    if verbose {
        libbpf_rs::set_print(Some((PrintLevel::Debug, print)));
    } else {
        libbpf_rs::set_print(Some((PrintLevel::Warn, keep)));
    }
}

/// Says something on stderr, if that is wanted.
pub fn verbose(what: fmt::Arguments<'_>) {
    if VERBOSE.load(Ordering::Relaxed) {
        eprintln!("{what}");
    }
}

fn take_log() -> String {
    LOG.lock()
        .map(|mut log| std::mem::take(&mut *log))
        .unwrap_or_default()
}

/// What a kernel gives or refuses as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Means {
    /// Programs on the entry and exit of kernel functions.
    Fentry,
    /// Breakpoints in the kernel.
    Kprobes,
}

impl Means {
    /// Says why it is not to be had, if it is not.
    fn check(self) -> Result<()> {
        match self {
            // libbpf loads a program of two instructions. What it cannot tell is tried.
            Self::Fentry if !ProgramType::Tracing.is_supported().unwrap_or(true) => {
                bail!("this kernel refuses fentry")
            }
            Self::Kprobes if !kernel_support::has_kprobes() => {
                bail!("this kernel is built without kprobes (CONFIG_KPROBES)")
            }
            _ => Ok(()),
        }
    }
}

/// One variant: its name for messages, and what opens, loads and attaches it.
pub struct Variant<'a, T> {
    /// How the variant is called in messages.
    pub name: &'static str,
    /// What it is not tried without.
    pub needs: Option<Means>,
    /// Does everything up to live probes.
    pub start: Box<dyn FnOnce() -> Result<T> + 'a>,
}

impl<'a, T> Variant<'a, T> {
    /// A variant from its name and its function.
    pub fn new(name: &'static str, start: impl FnOnce() -> Result<T> + 'a) -> Self {
        Self {
            name,
            needs: None,
            start: Box::new(start),
        }
    }

    /// This variant, left untried where the kernel does not give `means`.
    pub fn needing(self, means: Means) -> Self {
        let needs = Some(means);
        Self { needs, ..self }
    }
}

/// A failure for a reason that every variant would meet, so that no other is tried.
#[derive(Debug)]
pub struct NoVariantHelps(pub String);

impl fmt::Display for NoVariantHelps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for NoVariantHelps {}

/// Starts the first variant that works, and returns it with its name.
///
/// # Errors
/// If none works: every variant with its reason, or [`NoVariantHelps`] alone. With `verbose` a reason is also printed when a
/// later variant works.
pub fn first_that_works<'a, T: 'a>(
    verbose: bool,
    variants: impl IntoIterator<Item = Variant<'a, T>>,
) -> Result<(&'static str, T)> {
    let mut failures = String::new();
    let only = env::var(ONLY).ok();
    let wanted = |name| only.as_ref().is_none_or(|only| only == name);
    for variant in variants.into_iter().filter(|variant| wanted(variant.name)) {
        let Variant { name, needs, start } = variant;
        take_log();
        match needs.map_or(Ok(()), Means::check).and_then(|()| start()) {
            Ok(started) => return Ok((name, started)),
            Err(error) if error.is::<NoVariantHelps>() => return Err(error),
            Err(error) => {
                let log = take_log();
                let lines: Vec<&str> = log.lines().collect();
                let mut failure = format!("\n  {name}: {error:#}");
                for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
                    failure.push_str("\n    ");
                    failure.push_str(line);
                }
                if verbose {
                    eprintln!("not possible here:{failure}");
                }
                failures.push_str(&failure);
            }
        }
    }
    bail!("no way to attach works on this kernel:{failures}");
}

/// Puts fentry and fexit behind all else where the kernel can preempt a task. It can while such a program runs, and
/// then the program is skipped for every other task on that CPU until the first goes on: of 20 threads'
/// page faults on 2 CPUs, half were missed. Kprobes and perf events run with preemption off.
pub fn exact_first<T>(mut variants: Vec<Variant<'_, T>>) -> Vec<Variant<'_, T>> {
    if kernel_support::can_preempt() {
        variants.sort_by_key(|variant| variant.needs == Some(Means::Fentry));
    }
    variants
}

/// Searches for the kernel's types that objects need, by the types of their builders.
static SEARCHES: Mutex<BTreeMap<TypeId, JoinHandle<Result<Vec<u8>>>>> = Mutex::new(BTreeMap::new());

/// Begins to look for the kernel's types that a tool's object needs, which [`open`] waits for: on another CPU, if there is
/// one, while the caller does what it can do without the object. No process may be forked meanwhile.
pub fn begin<B: SkelBuilder<'static> + Default + 'static>() {
    let search = thread::spawn(|| {
        let open = B::default().open(object_storage()).context(NOT_OPENED)?;
        btf_subset::types_for(open.open_object())
    });
    let mut searches = SEARCHES.lock().unwrap_or_else(PoisonError::into_inner);
    searches.insert(TypeId::of::<B>(), search);
}

/// Opens a tool's skeleton, to be given its options and to be loaded.
///
/// # Errors
/// If libbpf does not understand the object, or the kernel's types cannot be read.
pub fn open<B: SkelBuilder<'static> + Default + 'static>() -> Result<B::Output> {
    let mut builder = B::default();
    let types = KernelTypes::for_object(builder.object_builder_mut())?;
    let mut open = builder.open(object_storage()).context(NOT_OPENED)?;
    let mut searches = SEARCHES.lock().unwrap_or_else(PoisonError::into_inner);
    let begun = searches.remove(&TypeId::of::<B>());
    drop(searches);
    let found = match begun.and_then(|search| search.join().ok()) {
        Some(found) => found?,
        None => btf_subset::types_for(open.open_object())?,
    };
    types.write(&found)?;
    map_create::choose_when(open.open_object_mut())?;
    Ok(open)
}

/// The options of an opened skeleton, its `maps.rodata_data`.
///
/// # Errors
/// If the object has no constants.
pub fn options<'open, T>(constants: &'open mut Option<&mut T>) -> Result<&'open mut T> {
    constants
        .as_deref_mut()
        .context("the BPF object has no options")
}

/// Memory for one opened skeleton.
///
/// A skeleton borrows it for as long as it lives. A tool opens as many as its ladder has variants
/// and keeps the last until it exits, so the memory is never given back.
fn object_storage() -> &'static mut MaybeUninit<OpenObject> {
    Box::leak(Box::new(MaybeUninit::uninit()))
}

/// The programs of the object that are its tool's own. Those that unwind stacks, and hold processes meanwhile, are
/// beside whatever takes user stacks.
pub fn own_programs(object: &mut OpenObject) -> impl Iterator<Item = OpenProgramMut<'_>> {
    object.progs_mut().filter(|program| !unwinds(program))
}

/// Has no program loaded that unwinds stacks, of an object that is to take none.
pub fn load_no_unwinding(object: &mut OpenObject) {
    for mut program in object.progs_mut().filter(unwinds) {
        program.set_autoload(false);
    }
}

/// Whether a program is there for the stacks of processes, and not for what its tool traces.
fn unwinds(program: &OpenProgramMut<'_>) -> bool {
    let name = program.name().to_string_lossy();
    ["unwind_", "held_"].iter().any(|of| name.starts_with(of))
}

/// Has only the programs with these names loaded, and those that unwind stacks, if these are to be.
///
/// # Errors
/// If there is no such program.
pub fn load_only(object: &mut OpenObject, names: &[&str]) -> Result<()> {
    let mut found = 0;
    for mut program in own_programs(object) {
        let wanted = names.iter().any(|name| program.name() == *name);
        found += usize::from(wanted);
        program.set_autoload(wanted);
    }
    ensure!(
        found == names.len(),
        "the object has {found} of the {} programs {}",
        names.len(),
        names.join(", ")
    );
    Ok(())
}

/// Attaches the programs with these names, in this order. What sees the end of something belongs
/// before what sees its beginning.
///
/// # Errors
/// If there is no such program, or the kernel does not attach it.
pub fn by_name(object: &mut Object, names: &[&str]) -> Result<Vec<Link>> {
    let attach = |name: &&str| {
        let program = object.progs_mut().find(|program| program.name() == *name);
        let program = program.with_context(|| format!("there is no program {name}"))?;
        let attached = one(&program);
        attached.with_context(|| format!("failed to attach {name}"))
    };
    names.iter().map(attach).collect()
}

/// Attaches a program as its section says.
fn one(program: &ProgramMut<'_>) -> Result<Link> {
    match kretprobe::target(program.section()) {
        Some(function) => kretprobe::attach(program, function),
        None => Ok(fentry_id::attach(program)?),
    }
}

/// The programs of a tool that traces system calls: those on tracepoints, and those on the system calls' functions where
/// they are of use ([`kernel_support::preempts_system_call_programs`]).
pub fn programs_on_system_calls<'a>(
    tracepoints: &[&'a str],
    functions: &[&'a str],
) -> Vec<&'a str> {
    let mut programs = tracepoints.to_vec();
    if kernel_support::preempts_system_call_programs() {
        programs.extend(functions);
    }
    programs
}

/// Attaches what traces system calls: of [`programs_on_system_calls`] those on functions, if they were loaded
/// and can be attached, else those on tracepoints; each in the order in which they are given.
///
/// # Errors
/// If neither can be attached.
pub fn system_calls(
    object: &mut Object,
    tracepoints: &[&str],
    functions: &[&str],
) -> Result<Vec<Link>> {
    let loaded = |program: &ProgramMut<'_>| program.autoload();
    if object
        .progs_mut()
        .any(|program| functions.contains(&&*program.name().to_string_lossy()) && loaded(&program))
    {
        match by_name(object, functions) {
            Ok(links) => return Ok(links),
            Err(error) => verbose(format_args!("not possible here: {error:#}")),
        }
    }
    by_name(object, tracepoints).context(
        "no tracepoint of the system call: this needs a kernel with CONFIG_FTRACE_SYSCALLS=y",
    )
}

/// What must be said where a system call's tracepoint is not to be had.
pub const SYSCALLS: &str = "; this needs a kernel with CONFIG_FTRACE_SYSCALLS=y";

/// Attaches programs in their order: those for the exit of something before those for its entry,
/// as what is seen to begin must be seen to end.
///
/// # Errors
/// At the first that cannot be attached; `remedy` ends the message.
pub fn all(programs: &[&ProgramMut<'_>], remedy: &str) -> Result<Vec<Link>> {
    let attach = |program: &&ProgramMut<'_>| {
        one(program).with_context(|| {
            let name = program.name().to_string_lossy();
            format!("failed to attach {name}{remedy}")
        })
    };
    programs.iter().map(attach).collect()
}

/// Detaches all links at once. The kernel waits for a grace period for each, up to 0.1 s; waiting
/// for all of them together takes no longer than for one. With kretprobes it is the last attached
/// first: what is still seen to begin must be seen to end, or it would be told as lost.
pub fn detach(links: Vec<Link>) {
    software_event::detach();
    if kretprobe::any() {
        links.into_iter().rev().for_each(drop);
        return kretprobe::remove();
    }
    std::thread::scope(|scope| {
        for link in links {
            scope.spawn(move || drop(link));
        }
    });
}

/// Detaches links that have perf events of their own, such as perf uprobes. The kernel takes one of
/// those away after the other, 0.1 s each; a process of its own waits for that, and ends with the
/// last. When this returns, they are disabled.
pub fn detach_in_background(links: Vec<Link>) {
    let Ok(held) = hold_links() else {
        return detach(links);
    };
    // This disables the events, but closes none: they are open there, too.
    drop(links);
    drop(held);
}

/// What such a link consists of, as `/proc/PID/fd` has it.
const HELD: [&str; 2] = ["anon_inode:[perf_event]", "anon_inode:bpf_link"];

/// Starts a process that has our perf events and links open, and nothing else, until what this
/// returns is dropped.
fn hold_links() -> Result<OwnedFd> {
    let (until, held) = pipe2(OFlag::O_CLOEXEC)?;
    let (has_closed, closes) = pipe2(OFlag::O_CLOEXEC)?;
    let mut others = Vec::new();
    for entry in fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        let file: RawFd = entry.file_name().to_string_lossy().parse()?;
        let what = fs::read_link(entry.path())?;
        if !HELD.iter().any(|held| what.as_os_str() == *held)
            && ![until.as_raw_fd(), closes.as_raw_fd()].contains(&file)
        {
            others.push(file);
        }
    }
    // SAFETY: of several threads the child has this one only, so another can have left a lock taken
    // for ever. The child takes none: all it does is system calls.
    match unsafe { fork() }? {
        ForkResult::Parent { .. } => {
            // Nothing of ours may be closed by the child at last: that can take long.
            drop(closes);
            read(&has_closed, &mut [0])?;
            Ok(held)
        }
        ForkResult::Child => {
            for file in &others {
                let _ = close(*file);
            }
            drop(closes);
            let _ = setsid();
            let _ = read(&until, &mut [0]);
            // SAFETY: it ends this process, and runs nothing of ours.
            unsafe { libc::_exit(0) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_variant_that_works_is_taken_and_the_rest_left_alone() {
        let variants = [
            Variant::new("best", || bail!("refused")),
            Variant::new("second", || Ok(2)),
            Variant::new("third", || panic!("must not be tried")),
        ];
        let (name, value) = first_that_works(false, variants).expect("the second works");
        assert_eq!((name, value), ("second", 2));
    }

    #[test]
    fn if_none_works_every_reason_is_told() {
        let variants = [
            Variant::new("fentry", || bail!("EPERM")),
            Variant::new("kprobe", || {
                Result::<()>::Err(anyhow::anyhow!("no such event"))
            }),
        ];
        let error = first_that_works(false, variants).unwrap_err().to_string();
        assert!(error.contains("fentry: EPERM"), "{error}");
        assert!(error.contains("kprobe: no such event"), "{error}");
    }
}
