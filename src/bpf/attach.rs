//! A ladder of variants: the same hook in several forms, tried from the best down.
//!
//! A function or link type in the kernel's BTF need not be usable: some kernels are built without kprobes, some
//! refuse fentry. So each variant is tried for real, by loading and attaching it, and every failure is kept until one
//! variant has worked. Only what a kernel refuses as a whole ([`Feature`]) is checked first: finding that out by
//! loading takes 25 ms.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::env;
use std::ffi::OsStr;
use std::fmt;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, Object, OpenObject, OpenProgramMut, PrintLevel, ProgramMut, ProgramType};

use crate::bpf::btf_subset::{self, KernelTypes};
use crate::bpf::fentry_id;
use crate::bpf::kernel_support;
use crate::bpf::kretprobe;
use crate::bpf::map_create;
use crate::bpf::software_event;
use crate::parse::UsageError;

/// Whether --verbose was given.
static VERBOSE: AtomicBool = AtomicBool::new(false);

/// Messages of libbpf since the last [`take_log`]: warnings, among them the verifier's log.
static LOG: Mutex<String> = Mutex::new(String::new());

/// Environment variable that names the only variant to try, so that tests reach the variants below the best.
const ONLY: &str = "MEMTOOLS_ATTACH";

/// Error message if libbpf does not understand an object.
const NOT_OPENED: &str = "failed to open the BPF object";

/// Number of the log's last lines that the report of a failed variant includes.
const LOG_LINES: usize = 12;

/// Keeps libbpf's messages for the report of a failure instead of printing them. With `verbose` all messages, down to
/// debug, go to stderr at once.
pub fn capture_log(verbose: bool) {
    VERBOSE.store(verbose, Ordering::Relaxed);
    fn keep(_level: PrintLevel, message: String) {
        if let Ok(mut log) = LOG.lock() {
            log.push_str(&message);
        }
    }
    fn print(_level: PrintLevel, message: String) {
        crate::note!("{}", message.trim_end());
    }
    if verbose {
        libbpf_rs::set_print(Some((PrintLevel::Debug, print)));
    } else {
        libbpf_rs::set_print(Some((PrintLevel::Warn, keep)));
    }
}

/// Prints a message on stderr, if [`capture_log`] was called with `verbose`.
pub(crate) fn log_verbose(what: fmt::Arguments<'_>) {
    if is_verbose() {
        crate::note!("{what}");
    }
}

/// Whether [`capture_log`] was called with `verbose`.
pub(crate) fn is_verbose() -> bool {
    VERBOSE.load(Ordering::Relaxed)
}

fn take_log() -> String {
    LOG.lock()
        .map(|mut log| std::mem::take(&mut *log))
        .unwrap_or_default()
}

/// Facility that a kernel supports or refuses as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// Programs on the entry and exit of kernel functions.
    Fentry,
    /// Breakpoints in the kernel.
    Kprobes,
}

impl Feature {
    /// Returns an error with the reason if the kernel does not support the facility.
    fn check(self) -> Result<()> {
        match self {
            // libbpf loads a program of two instructions. If that does not tell, the variant is tried.
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

/// One variant: its name for messages, and the function that opens, loads and attaches it.
pub struct Variant<'a, T> {
    /// The variant's name in messages.
    pub name: &'static str,
    /// Facility without which the variant is not tried.
    pub needs: Option<Feature>,
    /// Function that does everything up to live probes.
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

    /// Returns this variant, to be tried only where the kernel supports `means`.
    pub fn needing(self, means: Feature) -> Self {
        let needs = Some(means);
        Self { needs, ..self }
    }
}

/// A failure for a reason that every variant would meet, so that no further variant is tried.
#[derive(Debug)]
pub struct FatalError(pub String);

impl fmt::Display for FatalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for FatalError {}

/// Starts the first variant that works, and returns it with its name.
///
/// # Errors
/// If none works: every variant with its reason, or the first [`FatalError`] or [`UsageError`] alone. With `verbose`
/// a reason is also printed when a later variant works.
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
        match needs.map_or(Ok(()), Feature::check).and_then(|()| start()) {
            Ok(started) => return Ok((name, started)),
            Err(error) if error.is::<FatalError>() || error.is::<UsageError>() => {
                return Err(error);
            }
            Err(error) => {
                let log = take_log();
                let lines: Vec<&str> = log.lines().collect();
                let mut failure = format!("\n  {name}: {error:#}");
                for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
                    failure.push_str("\n    ");
                    failure.push_str(line);
                }
                if verbose {
                    crate::note!("not possible here:{failure}");
                }
                failures.push_str(&failure);
            }
        }
    }
    bail!("no way to attach works on this kernel:{failures}");
}

/// Moves fentry and fexit variants behind all others where the kernel can preempt a task. If it preempts a task in
/// such a program, the program is skipped for every other task on that CPU until the first task continues: of 20
/// threads' page faults on 2 CPUs, half were missed. Programs on kprobes and perf events run with preemption off.
pub fn fentry_last_if_preemptible<T>(mut variants: Vec<Variant<'_, T>>) -> Vec<Variant<'_, T>> {
    if kernel_support::can_preempt() {
        variants.sort_by_key(|variant| variant.needs == Some(Feature::Fentry));
    }
    variants
}

/// Running searches for the kernel's types that objects need, by the types of the objects' builders.
static SEARCHES: Mutex<BTreeMap<TypeId, JoinHandle<Result<Vec<u8>>>>> = Mutex::new(BTreeMap::new());

/// Starts a search for the kernel's types that a tool's object needs, whose result [`open`] waits for. The search
/// runs on another CPU, if there is one, while the caller does what needs no object. No process may be forked until
/// [`open`] has returned.
pub fn prefetch_kernel_types<B: SkelBuilder<'static> + Default + 'static>() {
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
    map_create::apply_prealloc_policy(open.open_object_mut())?;
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
/// A skeleton borrows this memory for as long as it lives. A tool opens one skeleton for each variant that it tries,
/// and keeps the last one until it exits, so the memory is never freed.
fn object_storage() -> &'static mut MaybeUninit<OpenObject> {
    Box::leak(Box::new(MaybeUninit::uninit()))
}

/// Returns the programs of the object that are its tool's own. Programs that unwind stacks, and hold processes
/// meanwhile, are omitted: they are part of every object that takes user stacks.
pub fn own_programs(object: &mut OpenObject) -> impl Iterator<Item = OpenProgramMut<'_>> {
    let programs = object.progs_mut();
    programs.filter(|program| !unwinds(program.name()))
}

/// Excludes the programs that unwind stacks from loading, for an object that takes no stacks.
pub fn disable_unwind_programs(object: &mut OpenObject) {
    for mut program in object.progs_mut() {
        if unwinds(program.name()) {
            program.set_autoload(false);
        }
    }
}

/// Whether the program with this name serves to unwind user stacks, rather than to trace what its tool traces.
pub(crate) fn unwinds(program: &OsStr) -> bool {
    let name = program.as_encoded_bytes();
    name.starts_with(b"unwind_") || name.starts_with(b"held_")
}

/// Selects the tool's own programs with these names, and no other ones, for loading. Programs that unwind stacks keep
/// their setting.
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

/// Whether any of the programs to be loaded is on the return of a kernel function.
pub fn has_kretprobes(object: &mut OpenObject) -> bool {
    let mut programs = object.progs_mut().filter(|program| program.autoload());
    programs.any(|program| kretprobe::target(program.section()).is_some())
}

/// Attaches the programs with these names, in this order. A program that sees the end of something belongs before the
/// program that sees its beginning.
///
/// # Errors
/// If there is no such program, or the kernel does not attach it.
pub fn attach_by_name(object: &mut Object, names: &[&str]) -> Result<Vec<Link>> {
    let attach = |name: &&str| {
        let program = object.progs_mut().find(|program| program.name() == *name);
        let program = program.with_context(|| format!("there is no program {name}"))?;
        let attached = attach_program(&program);
        attached.with_context(|| format!("failed to attach {name}"))
    };
    names.iter().map(attach).collect()
}

/// Attaches a program as its section says.
fn attach_program(program: &ProgramMut<'_>) -> Result<Link> {
    match kretprobe::target(program.section()) {
        Some(function) => kretprobe::attach(program, function),
        None => Ok(fentry_id::attach(program)?),
    }
}

/// Returns the names of the programs that a tool loads to trace system calls: those on tracepoints, and those on the
/// system calls' functions where they are of use (`kernel_support::preempts_system_call_programs`).
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

/// Attaches the programs of [`programs_on_system_calls`]: those on functions, if they were loaded and can be
/// attached, else those on tracepoints. Programs are attached in the order in which they are given.
///
/// # Errors
/// If neither can be attached.
pub fn attach_syscall_programs(
    object: &mut Object,
    tracepoints: &[&str],
    functions: &[&str],
) -> Result<Vec<Link>> {
    let loaded = |program: &ProgramMut<'_>| program.autoload();
    if object
        .progs_mut()
        .any(|program| functions.contains(&&*program.name().to_string_lossy()) && loaded(&program))
    {
        match attach_by_name(object, functions) {
            Ok(links) => return Ok(links),
            Err(error) => log_verbose(format_args!("not possible here: {error:#}")),
        }
    }
    attach_by_name(object, tracepoints).context(
        "no tracepoint of the system call: this needs a kernel with CONFIG_FTRACE_SYSCALLS=y",
    )
}

/// Attaches programs in the given order. Programs on the exit of something come before those on its entry: what is
/// seen to begin must be seen to end.
///
/// # Errors
/// If a program cannot be attached. No further program is attached then, and `remedy` ends the message.
pub fn attach_all(programs: &[&ProgramMut<'_>], remedy: &str) -> Result<Vec<Link>> {
    let attach = |program: &&ProgramMut<'_>| {
        attach_program(program).with_context(|| {
            let name = program.name().to_string_lossy();
            format!("failed to attach {name}{remedy}")
        })
    };
    programs.iter().map(attach).collect()
}

/// Detaches all links at once. The kernel waits for a grace period for each link, up to 0.1 s. Waiting for all of
/// them together takes no longer than for one. With kretprobes the links are detached one by one, the last attached
/// first: what is still seen to begin must be seen to end, or it would be reported as lost.
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
    fn wrong_options_are_refused_rather_than_tried_otherwise() {
        let variants = [
            Variant::new("best", || bail!(UsageError("too large".into()))),
            Variant::new("second", || panic!("must not be tried")),
        ];
        let error = first_that_works::<()>(false, variants).unwrap_err();
        assert!(error.is::<UsageError>(), "{error}");
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
