//! Complete user stacks through code that was built without frame pointers.
//!
//! Files tell in `.eh_frame` how their code is unwound ([`rules`]). For every file that a traced
//! process has mapped, that is put as a table into memory that the kernel half reads (`store`),
//! and for every process, what it has mapped where (`tables`). `bpf/include/unwind.bpf.h` looks
//! it up, and `bpf/include/stack.bpf.h` walks by it.
//!
//! Tables are made for the processes that are named on the command line before anything is traced;
//! for others when the kernel half meets them first and asks. It asks too when a process has other
//! code mapped than its table has (dlopen, exec, a JIT compiler). A thread of its own answers, so that
//! it waits for nothing that the tool prints.

pub mod rules;
mod store;
mod summary;
mod tables;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{PipeReader, PipeWriter, pipe};
use std::os::fd::AsFd;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, MapMut, OpenMapMut, ProgramMut};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use self::store::Store;
pub use self::summary::Summary;
use self::tables::{Refreshed, Tables};
use crate::clock;
use crate::command::{self, CommandLine};
use crate::events::Events;
use crate::filter;
use crate::maps;
use crate::output::Output;
use crate::shared::unwind_mode;

/// Memory for tables, where --unwind-memory says nothing, in MiB.
const DEFAULT_MEMORY: usize = 64;
/// The longest time for which a process that has nothing new is not looked at again, as a power of
/// two in milliseconds.
const MAX_PATIENCE: u32 = 10;
const MILLISECOND: u64 = 1_000_000;
/// After how many milliseconds a process that has mapped code is looked at again: it may be starting.
const LOOK_AGAIN: u8 = 1;
/// A command that has mapped no code for so many milliseconds has started.
const STARTED: u8 = 250;

/// How callers are found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// By unwind tables; by frame pointers in a process that has none yet
    #[default]
    Auto,
    /// By unwind tables only
    Dwarf,
    /// By frame pointers only
    Fp,
}

/// Options of the tools that show user stacks.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct UnwindArgs {
    /// How the callers of a function are found
    #[arg(id = "unwind", long, value_name = "HOW", value_enum, default_value_t = Mode::Auto)]
    pub mode: Mode,

    /// Memory for unwind tables at most, in MiB
    #[arg(id = "unwind_memory", long = "unwind-memory", value_name = "MIB", default_value_t = DEFAULT_MEMORY)]
    pub memory: usize,
}

impl UnwindArgs {
    /// The skeleton's constant `unwind_mode`.
    pub fn mode(&self) -> u8 {
        match self.mode {
            Mode::Fp => unwind_mode::UNWIND_MODE_FP,
            Mode::Auto => unwind_mode::UNWIND_MODE_AUTO,
            Mode::Dwarf => unwind_mode::UNWIND_MODE_DWARF,
        }
        .0 as u8
    }

    /// The skeleton's constant `unwind_namespace`.
    pub fn namespace(&self) -> Result<u32> {
        filter::pid_namespace()
    }
}

/// Whose tables are made before anything is traced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Whose {
    /// Processes that run.
    Processes(Vec<u32>),
    /// A command that is held before exec.
    Command {
        /// The process that it is to become.
        pid: u32,
        /// As the user gave it.
        line: String,
    },
}

impl From<&[u32]> for Whose {
    fn from(pids: &[u32]) -> Self {
        Self::Processes(pids.to_vec())
    }
}

impl Whose {
    /// Those of the files that a command is going to map.
    fn expect(&self, tables: &mut Tables) -> Result<()> {
        let Self::Command { line, .. } = self else {
            return Ok(());
        };
        let line = CommandLine::parse(line)?;
        // A program of another architecture has none.
        for path in command::code_files(line.program()).unwrap_or_default() {
            if let Ok(file) = File::open(&path) {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                tables.expect(&name, &file)?;
            }
        }
        Ok(())
    }

    /// Those of processes that run, as far as they are not there.
    fn refresh(&self, tables: &mut Tables) -> Result<()> {
        let Self::Processes(pids) = self else {
            return Ok(());
        };
        for &pid in pids {
            let begun = Instant::now();
            if tables.refresh(pid)? == Refreshed::Changed {
                tell(tables, pid, begun.elapsed());
            }
        }
        Ok(())
    }
}

/// Tables that are made while a skeleton is loaded: both take as long, and memory for tables comes
/// after a grace period of the kernel.
pub struct Early(JoinHandle<Result<Tables>>);

impl Early {
    /// In the place of an opened skeleton's maps `unwind_shards` and `unwind_processes`; None if no
    /// tables are used.
    ///
    /// # Errors
    /// If the kernel refuses the maps.
    pub fn start(
        args: UnwindArgs,
        shards: &mut OpenMapMut<'_>,
        processes: &mut OpenMapMut<'_>,
        whose: Whose,
    ) -> Result<Option<Self>> {
        if args.mode == Mode::Fp {
            return Ok(None);
        }
        let store = Store::before_load(shards, args.memory << 20)?;
        let mut tables = Tables::new(store, maps::create_before_load(processes)?);
        let thread = thread::spawn(move || {
            whose.expect(&mut tables)?;
            whose.refresh(&mut tables)?;
            Ok(tables)
        });
        Ok(Some(Self(thread)))
    }
}

/// What a thread returns, when it has ended.
fn join<T>(thread: JoinHandle<T>) -> T {
    match thread.join() {
        Ok(returned) => returned,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Sets the constants of an opened skeleton that say how stacks are unwound, before load.
#[macro_export]
macro_rules! set_unwind_options {
    ($options:expr, $args:expr) => {
        $options.unwind_mode = $args.mode();
        $options.unwind_namespace = $args.namespace()?;
    };
}

/// The maps and programs of a loaded skeleton that an [`Unwinder`] works with.
#[macro_export]
macro_rules! unwind_parts {
    ($skel:expr) => {
        $crate::unwind::Parts {
            early: None,
            shards: &$skel.maps.unwind_shards,
            processes: &$skel.maps.unwind_processes,
            requests: &$skel.maps.unwind_requests,
            asked: &$skel.maps.unwind_asked,
            held: &$skel.maps.unwind_held,
            missing: &$skel.maps.unwind_missing,
            slots: &$skel.maps.stack_slots,
            programs: [
                &$skel.progs.unwind_exec,
                &$skel.progs.unwind_fork,
                &$skel.progs.unwind_exit,
            ],
            mmap: &$skel.progs.unwind_mmap,
        }
    };
}

/// What [`unwind_parts!`] makes.
#[expect(missing_docs, reason = "named as in the skeleton")]
pub struct Parts<'a> {
    /// Tables that were begun before load.
    pub early: Option<Early>,
    pub shards: &'a MapMut<'static>,
    pub processes: &'a MapMut<'static>,
    pub requests: &'a MapMut<'static>,
    pub asked: &'a MapMut<'static>,
    pub held: &'a MapMut<'static>,
    pub missing: &'a MapMut<'static>,
    pub slots: &'a MapMut<'static>,
    pub programs: [&'a ProgramMut<'static>; 3],
    pub mmap: &'a ProgramMut<'static>,
}

/// Keeps the tables up to date while it lives.
pub struct Unwinder {
    mode: Mode,
    slots: MapHandle,
    missing: MapHandle,
    links: Vec<Link>,
    worker: Option<Worker>,
}

struct Worker {
    /// Its other end is closed when we drop it.
    stop: PipeWriter,
    thread: JoinHandle<Tables>,
}

impl Unwinder {
    /// Makes these tables, and from now on those of whatever else is met. To be called after load and
    /// before the probes are live; what is to be forked must have been.
    pub fn start(args: UnwindArgs, mut parts: Parts<'_>, whose: impl Into<Whose>) -> Result<Self> {
        let whose = whose.into();
        let mut unwinder = Self {
            mode: args.mode,
            slots: handle(parts.slots)?,
            missing: handle(parts.missing)?,
            links: Vec::new(),
            worker: None,
        };
        if args.mode == Mode::Fp {
            return Ok(unwinder);
        }
        let mut tables = match parts.early.take() {
            Some(Early(thread)) => join(thread)?,
            None => {
                let store = Store::new(handle(parts.shards)?, args.memory << 20);
                let mut tables = Tables::new(store, handle(parts.processes)?);
                whose.expect(&mut tables)?;
                tables
            }
        };
        for program in parts.programs {
            unwinder.links.push(attach(program)?);
        }
        // What changes from here on is followed.
        whose.refresh(&mut tables)?;
        let starting = match whose {
            Whose::Command { pid, .. } => Some(Starting::hold(pid, &parts)?),
            Whose::Processes(_) => None,
        };
        unwinder.worker = Some(Worker::start(tables, parts, starting)?);
        Ok(unwinder)
    }

    /// Says at the end how complete the stacks were: on stderr, and as an object in JSON.
    pub fn tell(mut self, tool: &str, output: &mut Output) -> Result<()> {
        self.links.clear();
        let tables = self.worker.take().map(Worker::stop);
        let summary = Summary::read(self.mode, &self.slots, &self.missing, tables.as_ref())?;
        summary.tell(tool, output)
    }
}

impl Worker {
    fn start(tables: Tables, parts: Parts<'_>, starting: Option<Starting>) -> Result<Self> {
        let (requests, asked) = (handle(parts.requests)?, handle(parts.asked)?);
        let (stopped, stop) = pipe().context("failed to open a pipe")?;
        let thread = thread::Builder::new()
            .name("unwind".into())
            .spawn(move || answer(tables, &requests, &asked, &stopped, starting))
            .context("failed to start a thread")?;
        Ok(Self { stop, thread })
    }

    fn stop(self) -> Tables {
        drop(self.stop);
        join(self.thread)
    }
}

/// The thread: looks at whatever process the kernel half asks for, until `stopped` is closed.
fn answer(
    mut tables: Tables,
    requests: &MapHandle,
    asked: &MapHandle,
    stopped: &PipeReader,
    mut starting: Option<Starting>,
) -> Tables {
    let outcome = answer_until(&mut tables, requests, asked, stopped, &mut starting);
    if let Err(error) = outcome {
        eprintln!("unwind tables are no longer kept up to date: {error:#}");
    }
    tables
}

fn answer_until(
    tables: &mut Tables,
    requests: &MapHandle,
    asked: &MapHandle,
    stopped: &PipeReader,
    starting: &mut Option<Starting>,
) -> Result<()> {
    let requests: Events<u32> = Events::new(requests)?;
    // How often each process was looked at in vain.
    let mut in_vain = HashMap::<u32, u32>::new();
    // Those that are mapping code, and are soon to be looked at again.
    let mut busy = HashSet::<u32>::new();
    loop {
        let mut sources = [
            PollFd::new(stopped.as_fd(), PollFlags::POLLIN),
            PollFd::new(requests.as_fd(), PollFlags::POLLIN),
        ];
        let patience = if !busy.is_empty() {
            PollTimeout::from(LOOK_AGAIN)
        } else if starting.as_ref().is_some_and(|starting| starting.began) {
            PollTimeout::from(STARTED)
        } else {
            PollTimeout::NONE
        };
        match poll(&mut sources, patience) {
            Ok(0) if busy.is_empty() => *starting = None,
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error).context("failed to wait for requests"),
        }
        if sources[0].any() == Some(true) {
            return Ok(());
        }
        let mut pids = std::mem::take(&mut busy);
        pids.extend(requests.drain()?);
        for pid in pids {
            let key = pid.to_ne_bytes();
            // Asked before the look, which then has what it was stopped for. Before that, the command
            // is still a copy of us.
            let starting = starting.as_mut();
            let stopped = starting.filter(|starting| starting.pid == pid && starting.is_stopped());
            let begun = Instant::now();
            let refreshed = tables.refresh(pid);
            let took = begun.elapsed();
            if let Some(starting) = stopped {
                starting.go_on()?;
            }
            match refreshed? {
                Refreshed::Changed => {
                    tell(tables, pid, took);
                    in_vain.remove(&pid);
                    busy.insert(pid);
                    // It may be asked about again at once. An error says that it was not asked.
                    let _ = asked.delete(&key);
                }
                Refreshed::Same => {
                    let times = in_vain.entry(pid).or_default();
                    let patience = MILLISECOND << (*times).min(MAX_PATIENCE);
                    *times += 1;
                    let not_before = clock::monotonic_ns() + patience;
                    let until = not_before.to_ne_bytes();
                    asked
                        .update(&key, &until, MapFlags::ANY)
                        .context("failed to put off a request")?;
                }
                Refreshed::Gone => {
                    in_vain.remove(&pid);
                }
            }
        }
    }
}

/// A command on its way from exec to where it has mapped all its libraries: it is stopped whenever it
/// maps code.
struct Starting {
    pid: u32,
    /// Whether it has called exec.
    began: bool,
    held: MapHandle,
    _link: Link,
}

impl Starting {
    fn hold(pid: u32, parts: &Parts<'_>) -> Result<Self> {
        let held = handle(parts.held)?;
        let link = attach(parts.mmap)?;
        let starting = Self {
            pid,
            began: false,
            held,
            _link: link,
        };
        starting.mark(0).context("failed to hold the command")?;
        Ok(starting)
    }

    /// Sets its value in the map.
    fn mark(&self, stopped: u32) -> libbpf_rs::Result<()> {
        let key = self.pid.to_ne_bytes();
        self.held
            .update(&key, &stopped.to_ne_bytes(), MapFlags::ANY)
    }

    fn is_stopped(&self) -> bool {
        let value = self.held.lookup(&self.pid.to_ne_bytes(), MapFlags::ANY);
        value.is_ok_and(|value| value == Some(1u32.to_ne_bytes().into()))
    }

    fn go_on(&mut self) -> Result<()> {
        self.began = true;
        self.mark(0).context("failed to let the command go on")?;
        self.wake();
        Ok(())
    }

    fn wake(&self) {
        // One that is gone needs no leave.
        let _ = kill(Pid::from_raw(self.pid.cast_signed()), Signal::SIGCONT);
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        let began = self.began || self.is_stopped();
        // It is there, as we have put it there.
        let _ = self.held.delete(&self.pid.to_ne_bytes());
        if began {
            self.wake();
        }
    }
}

/// With --verbose, says that a process's tables are there, and how long that took.
fn tell(tables: &Tables, pid: u32, took: Duration) {
    let (words, files) = tables.size_of(pid);
    crate::attach::verbose(format_args!(
        "unwind tables for process {pid}: {files} files, {} KiB in {:.1} ms",
        words / 128,
        took.as_secs_f64() * 1e3
    ));
}

fn attach(program: &ProgramMut<'_>) -> Result<Link> {
    let link = program.attach_raw_tracepoint(tracepoint_of(program)?);
    link.context("failed to watch processes")
}

fn handle(map: &MapMut<'_>) -> Result<MapHandle> {
    MapHandle::try_from(map).context("failed to open a map a second time")
}

/// What follows the slash in `raw_tp/sched_process_exec`.
fn tracepoint_of(program: &ProgramMut<'_>) -> Result<String> {
    let section = program.section().to_string_lossy();
    let name = section
        .split_once('/')
        .context("a program of no tracepoint")?
        .1;
    Ok(name.to_owned())
}
