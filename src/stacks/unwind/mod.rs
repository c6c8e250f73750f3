//! Unwind tables, for complete user stacks through code that was built without frame pointers.
//!
//! The `.eh_frame` of a file has the rules by which its code is unwound ([`rules`]). The rules of each file in which a
//! BPF program meets a frame are put as a table into memory that BPF programs read (`store`), and the BPF side learns
//! which file the table is of (`publish`). BPF programs look up the mappings of a process themselves, so a table serves
//! every process from its first instruction on. `bpf/include/unwind.bpf.h` looks up the rule of an address, and
//! `bpf/include/stack.bpf.h` walks a stack by these rules.
//!
//! Tables for the processes that are named on the command line are made before tracing begins, as far as that takes no
//! longer than two seconds. Tables of other files are made when a BPF program meets the file first and requests it.
//! These requests are answered by a separate thread (`worker`), so that no request waits for what the tool prints.

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
pub use self::options::{Mode, UncheckedUnwindArgs, UnwindArgs};
use self::publish::Publisher;
use self::store::Store;
pub use self::summary::Summary;
use self::tables::Tables;
use self::worker::{Queue, Worker, mappings_of};
use crate::bpf::attach;
use crate::bpf::map_create::reopen;
use crate::bpf::program_stats;
use crate::bpf::raw_tracepoint::RawTracepoint;
use crate::interpreters::finders::Finders;
use crate::interpreters::hotspot::hotspots::Hotspots;
use crate::interpreters::python::codes::Codes;
use crate::interpreters::python::pythons::Pythons;
use crate::print::output::Output;
use crate::process::command::{self, CommandLine};
use crate::stacks::interpreter_names::InterpreterNames;
use crate::stacks::python_names::PythonNames;

/// Maximum time that the tool's start waits for tables. The remaining tables are made during the trace.
const START_WITHIN: Duration = Duration::from_secs(2);

/// Processes whose tables are made before tracing begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnwindTarget {
    /// Running processes.
    Processes(Vec<u32>),
    /// A command that is held before exec.
    Command {
        /// The process that will execute the command.
        pid: u32,
        /// The command line, as the user gave it.
        line: String,
        /// Whether the command's descendants are stopped, too, when they map code that was not examined yet, as long as
        /// the trace lasts.
        descendants: bool,
    },
}

impl From<&[u32]> for UnwindTarget {
    fn from(pids: &[u32]) -> Self {
        Self::Processes(pids.to_vec())
    }
}

impl UnwindTarget {
    /// Whether no process has tables made before a BPF program requests them.
    fn is_empty(&self) -> bool {
        matches!(self, Self::Processes(pids) if pids.is_empty())
    }

    /// Makes the tables that are wanted before tracing begins.
    fn build_tables(&self, store: Store) -> Result<InitialTables> {
        let mut tables = Tables::new(store, hotspot::keep_frame_pointers(self));
        self.build_for_command(&mut tables)?;
        let (queue, starting) = self.build_for_processes(&mut tables)?;
        Ok(InitialTables {
            tables,
            queue,
            starting,
        })
    }

    /// Makes the tables of the files that a command is going to map.
    fn build_for_command(&self, tables: &mut Tables) -> Result<()> {
        let Self::Command { line, .. } = self else {
            return Ok(());
        };
        let line = CommandLine::parse(line)?;
        // A program of another architecture has no such files.
        for path in command::code_files(line.program()).unwrap_or_default() {
            if let Ok(file) = File::open(&path) {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                tables.preload(&name, &file)?;
            }
        }
        Ok(())
    }

    /// Looks for the interpreters of running processes, if the frames of interpreters are to be walked. Returns the
    /// finders of further interpreters, and the names of their functions.
    fn interpreters(
        &self,
        args: UnwindArgs,
        parts: &UnwindParts<'_>,
    ) -> Result<Option<(Finders, InterpreterNames)>> {
        if args.interpreters() == 0 {
            return Ok(None);
        }
        let hotspots = Hotspots::new(reopen(parts.hotspots)?, args.interpreters.java_names);
        let java = hotspots.names();
        let pythons = Pythons::new(
            reopen(parts.pythons)?,
            parts.python_deaths,
            parts.python_note,
        )?;
        let mut finders = Finders::new(pythons, hotspots);
        if let Self::Processes(pids) = self {
            pids.iter().for_each(|&pid| finders.look_at(pid));
        }
        let codes = Codes::start(parts.python_codes)?;
        let python = PythonNames::new(codes, args.interpreters.interpreters);
        Ok(Some((finders, InterpreterNames { python, java })))
    }

    /// Makes the tables of running processes. Returns the files for which there was no time, and their processes.
    fn build_for_processes(&self, tables: &mut Tables) -> Result<(Queue, HashMap<u32, Instant>)> {
        let mut queue = Queue::default();
        let Self::Processes(pids) = self else {
            return Ok((queue, HashMap::new()));
        };
        let begun = Instant::now();
        let mut waits = true;
        while waits && begun.elapsed() < START_WITHIN {
            let waiting = pids.iter().filter(|&&pid| queue.add(tables, pid));
            waits = waiting.count() > 0;
            while begun.elapsed() < START_WITHIN
                && let Some(waiting) = queue.pop()
            {
                tables.add_mapped_file(waiting, false)?;
            }
        }
        if !waits {
            for &pid in pids {
                log_tables_complete(tables, pid, begun.elapsed());
            }
            return Ok((queue, HashMap::new()));
        }
        let busy = pids.iter().map(|&pid| (pid, begun));
        Ok((queue, busy.collect()))
    }
}

/// Tables that were made before tracing begins, and the files that still wait.
struct InitialTables {
    tables: Tables,
    /// Files for which there was no time.
    queue: Queue,
    /// Processes of these files, each with the time since which its tables are made.
    starting: HashMap<u32, Instant>,
}

/// Tables that are made while a skeleton is loaded: both take as long, and memory for tables comes after an RCU grace
/// period.
pub struct EarlyTables(JoinHandle<Result<InitialTables>>);

impl EarlyTables {
    /// Starts to make tables, in a map that replaces an opened skeleton's `unwind_shards`. Returns None if no tables
    /// are used.
    ///
    /// # Errors
    /// If the kernel refuses the maps.
    pub fn start(
        args: UnwindArgs,
        shards: &mut OpenMapMut<'_>,
        whose: UnwindTarget,
    ) -> Result<Option<Self>> {
        if args.mode == Mode::Fp {
            return Ok(None);
        }
        let store = Store::before_load(shards, args.memory << 20)?;
        let thread = thread::spawn(move || whose.build_tables(store));
        Ok(Some(Self(thread)))
    }
}

/// Waits for the end of a thread. Returns its result, or resumes its panic.
fn join<T>(thread: JoinHandle<T>) -> T {
    match thread.join() {
        Ok(returned) => returned,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// Collects the maps and programs of a loaded skeleton that an [`Unwinder`] works with.
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

/// Collects the programs of a skeleton that stop a command, as [`HoldPrograms`].
#[macro_export]
macro_rules! unwind_holds {
    ($skel:expr) => {
        $crate::stacks::unwind::HoldPrograms {
            exec: [
                &$skel.progs.unwind_exec,
                &$skel.progs.held_exec_too,
                &$skel.progs.held_exec_again,
            ],
            mmap: [&$skel.progs.unwind_mmap, &$skel.progs.held_mmap_too],
        }
    };
}

/// Programs that stop a command when it maps code. Of each hook the first program is loaded, and the others only where
/// no call may be missed.
pub struct HoldPrograms<'a> {
    /// Programs at exec.
    pub exec: [&'a ProgramMut<'static>; 3],
    /// Programs at mmap(2).
    pub mmap: [&'a ProgramMut<'static>; 2],
}

impl<'a> HoldPrograms<'a> {
    fn attach(&self) -> Result<Stops> {
        let [exec, mmap] = self.loaded();
        let exec = exec.map(|program| program.attach_raw_tracepoint("sched_process_exec"));
        let mmap = mmap.map(|program| RawTracepoint::new(program, c"sys_exit"));
        Ok(Stops {
            _exec: exec.collect::<Result<_, _>>()?,
            mmap: mmap.collect::<Result<_>>()?,
        })
    }

    /// Returns how often, at most, all programs of a hook were skipped. Each time, a process may not have been stopped.
    ///
    /// # Errors
    /// If the kernel's counters of the programs cannot be read.
    pub fn skipped_runs(&self) -> Result<u64> {
        let hooks = self.loaded().into_iter();
        hooks.map(program_stats::skipped_by_all).sum()
    }

    fn loaded(&self) -> [impl Iterator<Item = &'a ProgramMut<'static>>; 2] {
        let hooks: [Vec<_>; 2] = [self.exec.to_vec(), self.mmap.to_vec()];
        hooks.map(|hook| hook.into_iter().filter(|program| program.autoload()))
    }
}

/// Callback for [`UnwindParts::while_stopped`]. Takes the process that is stopped.
pub type WhileStopped = Box<dyn FnMut(u32) + Send>;

/// Maps and programs of a skeleton for an [`Unwinder`], as collected by [`unwind_parts!`].
#[expect(missing_docs, reason = "named as in the skeleton")]
pub struct UnwindParts<'a> {
    /// Tables that were begun before load, if there are any.
    pub early: Option<EarlyTables>,
    /// Callback on the unwinder's thread while the command or one of its descendants is stopped because it has mapped
    /// code. The callback must end by itself.
    pub while_stopped: Option<WhileStopped>,
    /// Note for stderr about the first process that runs Python, unless all its objects come from malloc.
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
    pub holds: HoldPrograms<'a>,
}

/// Unwind tables of a trace, which are kept up to date until this is dropped.
pub struct Unwinder {
    mode: Mode,
    slots: MapHandle,
    missing: MapHandle,
    worker: Option<Worker>,
    /// Names for the frames of interpreters; None if these are not walked.
    names: Option<InterpreterNames>,
}

impl Unwinder {
    /// Makes the tables of `whose`, and from now on those of all other files that are met. To be called after load and
    /// before the probes are live. Processes that are to be forked must have been forked before.
    ///
    /// # Errors
    /// If the skeleton's maps cannot be opened, or the worker's thread does not start.
    pub fn start(
        args: UnwindArgs,
        mut parts: UnwindParts<'_>,
        whose: impl Into<UnwindTarget>,
    ) -> Result<Self> {
        let whose = whose.into();
        let mut unwinder = Self {
            mode: args.mode,
            slots: reopen(parts.slots)?,
            missing: reopen(parts.missing)?,
            worker: None,
            names: None,
        };
        if args.mode == Mode::Fp {
            return Ok(unwinder);
        }
        let mut begun = match parts.early.take() {
            Some(EarlyTables(thread)) => join(thread)?,
            None => whose.build_tables(Store::new(reopen(parts.shards)?, args.memory << 20))?,
        };
        let publisher = Publisher::new(parts.publish)?;
        begun.tables.publish_by(publisher, reopen(parts.files)?)?;
        // The first table waits for an RCU grace period. Where no process is to have tables from the start, the worker
        // waits instead.
        if !whose.is_empty() {
            begun.tables.publish_vdso()?;
        }
        let (finders, names) = whose.interpreters(args, &parts)?.unzip();
        unwinder.names = names;
        let held = match whose {
            UnwindTarget::Command {
                pid, descendants, ..
            } => {
                let stops = parts.holds.attach();
                let stops = stops.context("failed to monitor the command")?;
                let maps = HeldMaps {
                    held: reopen(parts.held)?,
                    stopped: reopen(parts.stopped)?,
                    looked: reopen(parts.looked)?,
                };
                Some(Held::hold(pid, descendants, maps, stops)?)
            }
            UnwindTarget::Processes(_) => None,
        };
        unwinder.worker = Some(Worker::start(begun, parts, held, finders)?);
        Ok(unwinder)
    }

    /// Returns the names for the frames of interpreters.
    pub fn names(&self) -> Option<InterpreterNames> {
        self.names.clone()
    }

    /// Reports at the end how complete the stacks were: on stderr, and as an object in JSON.
    ///
    /// # Errors
    /// If the counts of the BPF programs cannot be read, or the output cannot be written to.
    pub fn report(mut self, output: &mut Output) -> Result<()> {
        let tables = self.worker.take().and_then(Worker::stop);
        let summary = Summary::read(self.mode, &self.slots, &self.missing, tables.as_ref())?;
        summary.tell(output)
    }
}

/// Reports, with --verbose, that a process's tables are complete, and how long that took.
fn log_tables_complete(tables: &Tables, pid: u32, took: Duration) {
    if !attach::is_verbose() {
        return;
    }
    let (words, files) = tables.size_of(&mappings_of(pid));
    attach::log_verbose(format_args!(
        "unwind tables for process {pid}: {files} files, {} KiB in {:.1} ms",
        words / 128,
        took.as_secs_f64() * 1e3
    ));
}
