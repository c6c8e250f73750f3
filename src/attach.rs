//! A ladder of variants: the same hook in several forms, tried from the best down.
//!
//! That the kernel's BTF lists a function or a link type does not mean that it can be used: some
//! kernels are built without kprobes, some refuse fentry. So each variant is tried for real, by
//! loading and attaching it, and every failure is kept until one has worked.

use std::env;
use std::mem::MaybeUninit;
use std::os::fd::IntoRawFd;
use std::sync::Mutex;

use anyhow::{Context, Result, bail};
use libbpf_rs::{Link, OpenObject, PrintLevel, ProgramMut};
use perf_event::Builder;
use perf_event::events::Software;

use crate::mappings::online_cpus;

/// What libbpf said since the last [`take_log`]: its warnings, the verifier's log among them.
static LOG: Mutex<String> = Mutex::new(String::new());

/// Names the only variant that is to be tried, so that tests reach those below the best.
const ONLY: &str = "MEMTOOLS_ATTACH";

/// The last lines of a log that a failed variant is reported with.
const LOG_LINES: usize = 12;

/// Keeps libbpf's messages for the report of a failure instead of printing them. With `verbose`
/// all of them, down to debug, go to stderr as they come.
pub fn capture_log(verbose: bool) {
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

fn take_log() -> String {
    LOG.lock()
        .map(|mut log| std::mem::take(&mut *log))
        .unwrap_or_default()
}

/// One variant: its name for messages, and what opens, loads and attaches it.
pub struct Variant<'a, T> {
    /// How the variant is called in messages.
    pub name: &'static str,
    /// Does everything up to live probes.
    pub start: Box<dyn FnOnce() -> Result<T> + 'a>,
}

impl<'a, T> Variant<'a, T> {
    /// A variant from its name and its function.
    pub fn new(name: &'static str, start: impl FnOnce() -> Result<T> + 'a) -> Self {
        Self {
            name,
            start: Box::new(start),
        }
    }
}

/// Starts the first variant that works, and returns it with its name.
///
/// # Errors
/// If none works: every variant with its reason. With `verbose` a reason is also printed when a
/// later variant works.
pub fn first_that_works<'a, T: 'a>(
    verbose: bool,
    variants: impl IntoIterator<Item = Variant<'a, T>>,
) -> Result<(&'static str, T)> {
    let mut failures = String::new();
    let only = env::var(ONLY).ok();
    let wanted = |name| only.as_ref().is_none_or(|only| only == name);
    for Variant { name, start } in variants.into_iter().filter(|variant| wanted(variant.name)) {
        take_log();
        match start() {
            Ok(started) => return Ok((name, started)),
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

/// Memory for one opened skeleton.
///
/// A skeleton borrows it for as long as it lives. A tool opens as many as its ladder has variants
/// and keeps the last until it exits, so the memory is never given back.
pub fn object_storage() -> &'static mut MaybeUninit<OpenObject> {
    Box::leak(Box::new(MaybeUninit::uninit()))
}

/// Attaches a program to every single event of a kind that the kernel counts itself, such as page
/// faults, on all CPUs that are online now.
pub fn each_software_event(program: &ProgramMut<'_>, event: Software) -> Result<Vec<Link>> {
    online_cpus()?
        .into_iter()
        .map(|cpu| {
            let counter = Builder::new(event)
                .any_pid()
                .one_cpu(cpu)
                .include_kernel()
                .sample_period(1)
                .build()
                .with_context(|| format!("failed to open the perf event on CPU {cpu}"))?;
            // The link closes it.
            program
                .attach_perf_event(counter.into_raw_fd())
                .context("failed to attach to the perf event")
        })
        .collect()
}

/// Detaches all links at once. The kernel waits for a grace period for each, up to 0.1 s; waiting
/// for all of them together takes no longer than for one.
pub fn detach(links: Vec<Link>) {
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
