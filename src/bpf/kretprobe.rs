//! Programs on the return of kernel functions that many threads are in at once.
//!
//! A kretprobe needs an instance for each thread that is in the function. If no instance is free, the return of a
//! thread is missed. perf's kretprobes have one instance for each CPU, or with preemption two for each CPU but at
//! least ten: of 20 threads that waited for a disk in page faults, up to a third were missed. tracefs lets the number
//! of instances be chosen, so kretprobes are defined there.
//!
//! A definition stays until it is removed, but does nothing without a program. A tool removes its definitions with
//! the links. If a tool was killed, the next tool removes them.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::process;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use libbpf_rs::{Link, ProgramMut, TracepointCategory};

use crate::bpf::kernel_support;

/// Instances of each kretprobe: the kernel's maximum (`KRETPROBE_MAXACTIVE_MAX`). They take 0.3 MB.
const INSTANCES: u32 = 4096;

/// Group of the tools' definitions in tracefs.
const GROUP: &str = "memtools";

/// How often to try to remove a definition whose link has just been closed.
const TRIES: u32 = 10;

/// Definitions that this process has made.
static DEFINED: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Whether this process has attached any program to a return, or has tried to.
static ATTACHED: AtomicBool = AtomicBool::new(false);

/// Returns the function whose return a program of this section attaches to; None if the section is no kretprobe.
pub(crate) fn target(section: &OsStr) -> Option<&str> {
    section.to_str()?.strip_prefix("kretprobe/")
}

/// Attaches a program to the return of a function, with as many instances as the kernel permits. Where tracefs is not
/// available, it falls back to perf's few instances.
///
/// # Errors
/// If the kernel has no kprobe for the function.
pub(crate) fn attach(program: &ProgramMut<'_>, function: &str) -> Result<Link> {
    ATTACHED.store(true, Ordering::Relaxed);
    match define(function).and_then(|name| {
        let group = TracepointCategory::Custom(GROUP.into());
        Ok(program.attach_tracepoint(group, name)?)
    }) {
        Ok(link) => Ok(link),
        Err(error) => {
            super::attach::log_verbose(format_args!(
                "few instances for the return of {function}: {error:#}"
            ));
            Ok(program.attach_kprobe(true, function)?)
        }
    }
}

/// Defines the kretprobe of a function, and returns its name.
fn define(function: &str) -> Result<String> {
    kernel_support::preflight_tracepoints()?;
    let name = format!("{function}_{}", process::id());
    let file = file()?;
    for killed in fs::read_to_string(file)?.lines().filter_map(definition) {
        if !Path::new("/proc").join(killed.1.to_string()).exists() {
            let _ = write(&format!("-:{GROUP}/{}", killed.0));
        }
    }
    write(&format!("r{INSTANCES}:{GROUP}/{name} {function}"))
        .with_context(|| format!("failed to define a kretprobe of {function}"))?;
    if let Ok(mut defined) = DEFINED.lock() {
        defined.push(name.clone());
    }
    Ok(name)
}

/// Whether this process has attached any program to a return, or has tried to.
pub(crate) fn any() -> bool {
    ATTACHED.load(Ordering::Relaxed)
}

/// Removes the kretprobes that this process has defined, once their links are closed.
pub(crate) fn remove() {
    let defined = DEFINED.lock().map(|mut all| std::mem::take(&mut *all));
    for name in defined.unwrap_or_default() {
        // The kernel may not have released the definition yet.
        for _ in 0..TRIES {
            match write(&format!("-:{GROUP}/{name}")) {
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    thread::sleep(Duration::from_millis(10));
                }
                _ => break,
            }
        }
    }
}

/// Parses the name and the process of a definition of the tools from its line in the file of all definitions.
fn definition(line: &str) -> Option<(&str, u32)> {
    let (_, rest) = line.split_once(':')?;
    let name = rest.strip_prefix(GROUP)?.strip_prefix('/')?;
    let name = name.split(' ').next()?;
    let (_, pid) = name.rsplit_once('_')?;
    Some((name, pid.parse().ok()?))
}

fn file() -> io::Result<&'static Path> {
    let files = [
        "/sys/kernel/tracing/kprobe_events",
        "/sys/kernel/debug/tracing/kprobe_events",
    ];
    let there = files.map(Path::new).into_iter().find(|file| file.exists());
    there.ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
}

/// Appends a line to the file of definitions. Opening that file with O_TRUNC would remove all definitions.
fn write(line: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().append(true).open(file()?)?;
    file.write_all(format!("{line}\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_definitions_are_told_by_their_group_and_process() {
        let ours = "r4096:memtools/handle_mm_fault_77 handle_mm_fault";
        assert_eq!(definition(ours), Some(("handle_mm_fault_77", 77)));
        for other in [
            "p:kprobes/handle_mm_fault_77 handle_mm_fault",
            "r:memtools/handle_mm_fault handle_mm_fault",
            "r4:memtoolsx/a_1 a",
            "",
        ] {
            assert_eq!(definition(other), None, "{other}");
        }
    }

    #[test]
    fn programs_on_returns_are_told_by_their_section() {
        assert_eq!(target(OsStr::new("kretprobe/a")), Some("a"));
        assert_eq!(target(OsStr::new("kprobe/a")), None);
    }
}
