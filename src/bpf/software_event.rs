//! Programs on software perf events, such as page faults, which run at every single event. Each CPU has a perf event
//! of its own, also CPUs that come online while the tool traces.

use std::io::{PipeReader, PipeWriter, pipe};
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};
use libbpf_rs::{Link, ProgramMut};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use perf_event::events::Software;
use perf_event::{Builder, Counter};

use crate::host::capabilities;
use crate::host::cpus::Cpus;

/// Threads that attach programs on CPUs that come online, until [`detach`].
static WATCHERS: Mutex<Vec<HotplugWatcher>> = Mutex::new(Vec::new());

/// Attaches a program to each event on every CPU. Returns the links of the CPUs that are online now.
/// [`attach::detach`](crate::bpf::attach::detach) also detaches the program from CPUs that come online later.
///
/// # Errors
/// If the kernel refuses the perf event on a CPU, or the program on it.
pub fn attach(program: &ProgramMut<'_>, event: Software) -> Result<Vec<Link>> {
    let cpus = Cpus::now()?;
    let links = cpus
        .online()
        .map(|cpu| {
            // The link closes the perf event.
            program
                .attach_perf_event(open(event, cpu)?.into_raw_fd())
                .context("failed to attach to the perf event")
        })
        .collect::<Result<_>>()?;
    if let Err(error) = cpus.events() {
        crate::note!("CPUs that come online later are not traced: no device events: {error}");
        return Ok(links);
    }
    let program = program.as_fd().try_clone_to_owned()?;
    let watcher = HotplugWatcher::start(cpus, program, event)?;
    watchers().push(watcher);
    Ok(links)
}

/// Detaches programs from the CPUs that came online later.
pub(crate) fn detach() {
    watchers().clear();
}

fn watchers() -> std::sync::MutexGuard<'static, Vec<HotplugWatcher>> {
    WATCHERS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open(event: Software, cpu: usize) -> Result<Counter> {
    Builder::new(event)
        .any_pid()
        .one_cpu(cpu)
        .include_kernel()
        .sample_period(1)
        .build()
        .with_context(|| {
            let remedy = capabilities::remedy_for_perf_events();
            format!("failed to open the perf event on CPU {cpu}{remedy}")
        })
}

/// A thread that attaches a program on CPUs that come online. Dropping it detaches the program from these CPUs.
struct HotplugWatcher {
    /// The write end of a pipe, whose closing stops the thread; None once it is closed.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl HotplugWatcher {
    fn start(cpus: Cpus, program: OwnedFd, event: Software) -> Result<Self> {
        let (stopped, stop) = pipe().context("failed to open a pipe")?;
        let thread = thread::Builder::new()
            .name("cpus".into())
            .spawn(move || follow(cpus, &stopped, &program, event))
            .context("failed to start a thread")?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for HotplugWatcher {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread has printed its errors itself.
            let _ = thread.join();
        }
    }
}

/// Attaches the program on each CPU that comes online, until the write end of `stopped` is closed.
fn follow(mut cpus: Cpus, stopped: &PipeReader, program: &OwnedFd, event: Software) {
    let mut counters = Vec::new();
    loop {
        let mut sources = vec![PollFd::new(stopped.as_fd(), PollFlags::POLLIN)];
        sources.extend(cpus.events().map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        match poll(&mut sources, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => {
                return crate::note!("CPUs that come online later are not traced: {error}");
            }
        }
        if sources[0].any() == Some(true) {
            return;
        }
        for cpu in cpus.newly_online() {
            match attach_on(cpu, program, event) {
                Ok(counter) => {
                    crate::note!("CPU {cpu} has come online, and is traced");
                    counters.push(counter);
                }
                Err(error) => {
                    crate::note!("CPU {cpu} has come online, and is not traced: {error:#}");
                }
            }
        }
    }
}

fn attach_on(cpu: usize, program: &OwnedFd, event: Software) -> Result<Counter> {
    let mut counter = open(event, cpu)?;
    counter
        .set_bpf(program.as_raw_fd())
        .and_then(|()| counter.enable())
        .context("failed to attach to the perf event")?;
    Ok(counter)
}
