//! Complete user stacks through code that was built without frame pointers.
//!
//! Files tell in `.eh_frame` how their code is unwound ([`rules`]). Of every file in which the kernel
//! half meets a frame, that is put as a table into memory that it reads (`store`), and it is told
//! which file that is the table of (`publish`). It looks itself at what a process has mapped, so
//! that a table serves every process from its first instruction on. `bpf/include/unwind.bpf.h` looks
//! it up, and `bpf/include/stack.bpf.h` walks by it.
//!
//! Tables are made of the files of the processes that are named on the command line before anything
//! is traced, as far as that takes no longer than two seconds; of others when the kernel half meets
//! them first and asks. A thread of its own answers (`worker`), so that it waits for nothing that the
//! tool prints.

mod held;
mod hotspot;
mod options;
mod publish;
pub mod rules;
mod store;
mod summary;
mod tables;
mod worker;

use std::collections::HashMap;
use std::fs::File;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use libbpf_rs::{MapHandle, MapMut, OpenMapMut, ProgramMut};

use self::held::{Held, HeldMaps, Stops};
pub use self::options::{Given, Mode, UnwindArgs};
use self::publish::Publisher;
use self::store::Store;
pub use self::summary::Summary;
use self::tables::Tables;
use self::worker::{Queue, Worker};
use crate::bpf::program_stats;
use crate::bpf::raw_tracepoint::RawTracepoint;
use crate::interpreters::finders::Finders;
use crate::interpreters::hotspot::hotspots::Hotspots;
use crate::interpreters::python::codes::Codes;
use crate::interpreters::python::pythons::Pythons;
use crate::print::output::Output;
use crate::process::command::{self, CommandLine};
use crate::process::proc::Process;
use crate::stacks::interpreter_names::InterpreterNames;
use crate::stacks::python_names::PythonNames;

/// How long the tool's start may wait for tables. The others are made beside it.
const START_WITHIN: Duration = Duration::from_secs(2);

/// Whose tables are made before anything is traced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Whose {
    /// Processes that run.
    Processes(Vec<u32>),
    /// A command that is held before exec.
    Command {
        /// The process that it is to become.
        pid: u32,
        /// The command line, as the user gave it.
        line: String,
        /// Whether what the command starts is stopped, too, when it maps code that nobody has looked
        /// at, as long as the trace lasts.
        descendants: bool,
    },
}

impl From<&[u32]> for Whose {
    fn from(pids: &[u32]) -> Self {
        Self::Processes(pids.to_vec())
    }
}

impl Whose {
    /// Whether no process is to have tables before it asks for them.
    fn is_nobody(&self) -> bool {
        matches!(self, Self::Processes(pids) if pids.is_empty())
    }

    /// Makes the tables that are wanted before anything is traced.
    fn begin(&self, store: Store) -> Result<Begun> {
        let mut tables = Tables::new(store, hotspot::keep_frame_pointers(self));
        self.expect(&mut tables)?;
        let (queue, busy) = self.look_at(&mut tables)?;
        Ok(Begun {
            tables,
            queue,
            busy,
        })
    }

    /// Makes the tables of the files that a command is going to map.
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

    /// Looks for the interpreters of processes that run, if their frames are to be walked. Returns what finds
    /// others, and what names their functions.
    fn interpreters(
        &self,
        args: UnwindArgs,
        parts: &UnwindParts<'_>,
    ) -> Result<Option<(Finders, InterpreterNames)>> {
        if args.interpreters() == 0 {
            return Ok(None);
        }
        let hotspots = Hotspots::new(handle(parts.hotspots)?, args.interpreters.java_names);
        let java = hotspots.names();
        let pythons = Pythons::new(
            handle(parts.pythons)?,
            parts.python_deaths,
            parts.python_note,
        )?;
        let mut finders = Finders::new(pythons, hotspots);
        if let Self::Processes(pids) = self {
            pids.iter().for_each(|&pid| finders.look_at(pid));
        }
        let codes = Codes::start(parts.python_codes)?;
        let python = PythonNames::new(codes, args.interpreters);
        Ok(Some((finders, InterpreterNames { python, java })))
    }

    /// Makes the tables of processes that run. Returns what there was no time for, and whose that is.
    fn look_at(&self, tables: &mut Tables) -> Result<(Queue, HashMap<u32, Instant>)> {
        let mut queue = Queue::default();
        let Self::Processes(pids) = self else {
            return Ok((queue, HashMap::new()));
        };
        let begun = Instant::now();
        for &pid in pids {
            queue.add(tables, pid);
        }
        while begun.elapsed() < START_WITHIN
            && let Some(waiting) = queue.pop()
        {
            tables.look_at(waiting, false)?;
        }
        if queue.is_empty() {
            for &pid in pids {
                tell(tables, pid, begun.elapsed());
            }
            return Ok((queue, HashMap::new()));
        }
        let busy = pids.iter().map(|&pid| (pid, begun));
        Ok((queue, busy.collect()))
    }
}

/// The tables that there are before anything is traced.
struct Begun {
    tables: Tables,
    /// What there was no time for.
    queue: Queue,
    /// The processes whose files these are, and since when their tables are made.
    busy: HashMap<u32, Instant>,
}

/// Tables that are made while a skeleton is loaded: both take as long, and memory for tables comes
/// after a grace period of the kernel.
pub struct Early(JoinHandle<Result<Begun>>);

impl Early {
    /// Starts to make tables, in the place of an opened skeleton's map `unwind_shards`; None if no tables are used.
    ///
    /// # Errors
    /// If the kernel refuses the maps.
    pub fn start(
        args: UnwindArgs,
        shards: &mut OpenMapMut<'_>,
        whose: Whose,
    ) -> Result<Option<Self>> {
        if args.mode == Mode::Fp {
            return Ok(None);
        }
        let store = Store::before_load(shards, args.memory << 20)?;
        let thread = thread::spawn(move || whose.begin(store));
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

/// The maps and programs of a loaded skeleton that an [`Unwinder`] works with.
#[macro_export]
macro_rules! unwind_parts {
    ($skel:expr) => {
        $crate::stacks::unwind::UnwindParts {
            early: None,
            while_stopped: None,
            python_note: None,
            shards: &$skel.maps.unwind_shards,
            files: &$skel.maps.unwind_files,
            requests: &$skel.maps.unwind_requests,
            asked: &$skel.maps.unwind_asked,
            held: &$skel.maps.unwind_held,
            stopped: &$skel.maps.unwind_stopped,
            looked: &$skel.maps.unwind_looked,
            missing: &$skel.maps.unwind_missing,
            slots: &$skel.maps.stack_slots,
            hotspots: &$skel.maps.hotspot_processes,
            pythons: &$skel.maps.python_processes,
            python_codes: &$skel.maps.python_codes,
            python_deaths: [
                &$skel.progs.unwind_code_dies,
                &$skel.progs.unwind_code_dies_too,
            ],
            publish: &$skel.progs.unwind_publish,
            holds: $crate::unwind_holds!($skel),
        }
    };
}

/// The programs of a skeleton by which a command is held, as [`Holds`].
#[macro_export]
macro_rules! unwind_holds {
    ($skel:expr) => {
        $crate::stacks::unwind::Holds {
            exec: [
                &$skel.progs.unwind_exec,
                &$skel.progs.held_exec_too,
                &$skel.progs.held_exec_again,
            ],
            mmap: [&$skel.progs.unwind_mmap, &$skel.progs.held_mmap_too],
        }
    };
}

/// What stops a command that maps code. Of each hook the first program is loaded, and the others where
/// nothing may be missed.
pub struct Holds<'a> {
    /// At exec.
    pub exec: [&'a ProgramMut<'static>; 3],
    /// At mmap(2).
    pub mmap: [&'a ProgramMut<'static>; 2],
}

impl<'a> Holds<'a> {
    fn attach(&self) -> Result<Stops> {
        let [exec, mmap] = self.loaded();
        let exec = exec.map(|program| program.attach_raw_tracepoint("sched_process_exec"));
        let mmap = mmap.map(|program| RawTracepoint::new(program, c"sys_exit"));
        Ok(Stops {
            _exec: exec.collect::<Result<_, _>>()?,
            mmap: mmap.collect::<Result<_>>()?,
        })
    }

    /// How often, at most, all programs of a hook were skipped: each may be a process that was not stopped.
    pub fn skipped_runs(&self) -> u64 {
        self.loaded()
            .map(program_stats::skipped_by_all)
            .iter()
            .sum()
    }

    fn loaded(&self) -> [impl Iterator<Item = &'a ProgramMut<'static>>; 2] {
        let hooks: [Vec<_>; 2] = [self.exec.to_vec(), self.mmap.to_vec()];
        hooks.map(|hook| hook.into_iter().filter(|program| program.autoload()))
    }
}

/// See [`UnwindParts::while_stopped`]. Takes the process that is stopped.
pub type WhileStopped = Box<dyn FnMut(u32) + Send>;

/// What [`unwind_parts!`] makes.
#[expect(missing_docs, reason = "named as in the skeleton")]
pub struct UnwindParts<'a> {
    /// Tables that were begun before load.
    pub early: Option<Early>,
    /// What is done, on the unwinder's thread, while the command or what it starts is stopped because
    /// it has mapped code. It must end by itself.
    pub while_stopped: Option<WhileStopped>,
    /// What is said on stderr of the first process that runs Python, unless all its objects come from malloc.
    pub python_note: Option<&'static str>,
    pub shards: &'a MapMut<'static>,
    pub files: &'a MapMut<'static>,
    pub requests: &'a MapMut<'static>,
    pub asked: &'a MapMut<'static>,
    pub held: &'a MapMut<'static>,
    pub stopped: &'a MapMut<'static>,
    pub looked: &'a MapMut<'static>,
    pub missing: &'a MapMut<'static>,
    pub slots: &'a MapMut<'static>,
    pub hotspots: &'a MapMut<'static>,
    pub pythons: &'a MapMut<'static>,
    pub python_codes: &'a MapMut<'static>,
    pub python_deaths: [&'a ProgramMut<'static>; 2],
    pub publish: &'a ProgramMut<'static>,
    pub holds: Holds<'a>,
}

/// Keeps the tables up to date while it lives.
pub struct Unwinder {
    mode: Mode,
    slots: MapHandle,
    missing: MapHandle,
    worker: Option<Worker>,
    /// Names for the frames of interpreters, unless they are not walked.
    names: Option<InterpreterNames>,
}

impl Unwinder {
    /// Makes these tables, and from now on those of whatever else is met. To be called after load and
    /// before the probes are live; what is to be forked must have been.
    ///
    /// # Errors
    /// If the kernel half's maps cannot be had, or the worker's thread does not start.
    pub fn start(
        args: UnwindArgs,
        mut parts: UnwindParts<'_>,
        whose: impl Into<Whose>,
    ) -> Result<Self> {
        let whose = whose.into();
        let mut unwinder = Self {
            mode: args.mode,
            slots: handle(parts.slots)?,
            missing: handle(parts.missing)?,
            worker: None,
            names: None,
        };
        if args.mode == Mode::Fp {
            return Ok(unwinder);
        }
        let mut begun = match parts.early.take() {
            Some(Early(thread)) => join(thread)?,
            None => whose.begin(Store::new(handle(parts.shards)?, args.memory << 20))?,
        };
        let publisher = Publisher::new(parts.publish)?;
        begun.tables.publish_by(publisher, handle(parts.files)?)?;
        // The first table waits for a grace period of the kernel. Where nobody is to have tables from the
        // start, the worker waits for it.
        if !whose.is_nobody() {
            begun.tables.publish_vdso()?;
        }
        let (finders, names) = whose.interpreters(args, &parts)?.unzip();
        unwinder.names = names;
        let held = match whose {
            Whose::Command {
                pid, descendants, ..
            } => {
                let stops = parts.holds.attach();
                let stops = stops.context("failed to watch the command")?;
                let maps = HeldMaps {
                    held: handle(parts.held)?,
                    stopped: handle(parts.stopped)?,
                    looked: handle(parts.looked)?,
                };
                Some(Held::hold(pid, descendants, maps, stops)?)
            }
            Whose::Processes(_) => None,
        };
        unwinder.worker = Some(Worker::start(begun, parts, held, finders)?);
        Ok(unwinder)
    }

    /// What names the frames of interpreters in the stacks.
    pub fn names(&self) -> Option<InterpreterNames> {
        self.names.clone()
    }

    /// Says at the end how complete the stacks were: on stderr, and as an object in JSON.
    ///
    /// # Errors
    /// If the kernel half's counts cannot be read, or the output cannot be written to.
    pub fn tell(mut self, tool: &str, output: &mut Output) -> Result<()> {
        let tables = self.worker.take().map(Worker::stop);
        let summary = Summary::read(self.mode, &self.slots, &self.missing, tables.as_ref())?;
        summary.tell(tool, output)
    }
}

/// Says, with --verbose, that a process's tables are there, and how long that took.
fn tell(tables: &Tables, pid: u32, took: Duration) {
    let mappings = Process::open(pid).and_then(|process| process.mappings());
    let (words, files) = tables.size_of(&mappings.unwrap_or_default());
    crate::bpf::attach::verbose(format_args!(
        "unwind tables for process {pid}: {files} files, {} KiB in {:.1} ms",
        words / 128,
        took.as_secs_f64() * 1e3
    ));
}

fn handle(map: &MapMut<'_>) -> Result<MapHandle> {
    MapHandle::try_from(map).context("failed to open a map a second time")
}
