//! Target of a trace: processes, and the functions of each to probe.

use std::collections::{BTreeSet, HashMap, HashSet};

use anyhow::{Result, bail};
use memtools::host::capabilities::Capability;
use memtools::print::progress::Progress;
use memtools::process::cgroup;
use memtools::process::command::{CommandLine, HeldCommand};
use memtools::process::filter::{Filter, FilterArgs, TaskKind};
use memtools::process::members::Members;
use memtools::process::proc::{self, Process};
use memtools::process::traced_code::TracedCode;
use memtools::process::translator;
use memtools::run::privileges;
use memtools::run::target::TargetArgs;
use memtools::stacks::symbolize::Symbolizer;
use memtools::stacks::unwind::UnwindTarget;

use super::object::{Object, ProbedFile};
use super::objects::{self, KnownFiles, SearchedFiles};
use super::signature::Signature;
use crate::plan::{FunctionSettings, ProcessPlan, can_be_joined};

/// Pid by which libbpf means all processes.
pub(crate) const EVERY_PROCESS: i32 = -1;

/// Capability that perf's uprobes take besides CAP_PERFMON, including those in libraries that are loaded later.
/// Multi-uprobes, of Linux 6.6 and later, do not take it.
const FOR_UPROBES: [Capability; 1] = [Capability::CAP_SYS_ADMIN];

/// The options' targets, checked and held until they are traced.
pub(crate) struct Targets {
    pub(crate) processes: Vec<TracedProcess>,
    pub(crate) filter: Filter,
    /// Command that the process is to become, if we start it.
    pub(crate) command: Option<HeldCommand>,
    /// Whether the target is a command that we start.
    pub(crate) is_command: bool,
    /// Files to probe in every process that maps them, if processes can join later. The BPF programs' filter chooses
    /// the processes then.
    shared: Option<Vec<Object>>,
    /// Whether the trace ends when these processes have exited.
    ends_with_them: bool,
    /// Code of all processes, until the symbolizer has it. None if the processes are named.
    code: Option<TracedCode>,
}

/// Process, and those of its files that have functions to probe.
pub(crate) struct TracedProcess {
    pub(crate) process: Process,
    pub(crate) objects: Vec<Object>,
    /// Files that were searched for functions, by device and inode.
    pub(crate) searched_files: HashSet<(u64, u64)>,
}

impl TracedProcess {
    fn new(process: Process, found: SearchedFiles) -> Self {
        Self {
            process,
            objects: found.objects,
            searched_files: found.searched_files,
        }
    }
}

impl Targets {
    /// Finds the processes and their allocators. A command is started, and held. From then on memleak itself may do no
    /// more than tracing takes.
    pub(crate) fn choose(plan: &ProcessPlan) -> Result<Self> {
        let (target, functions) = (&plan.target, &plan.functions);
        if let Some(line) = &target.command {
            let line = CommandLine::parse(line)?;
            let found = objects::of_command(line.program(), functions)?;
            let command = line.start()?;
            privileges::keep_tracing_and(&FOR_UPROBES)?;
            let process = Process::open(command.pid())?;
            return Self::new(
                vec![TracedProcess::new(process, found)],
                Some(command),
                None,
                target,
            );
        }
        privileges::keep_tracing_and(&FOR_UPROBES)?;
        if target.filter.pid.is_empty() {
            let (processes, code) = matching(&target.filter, functions)?;
            return Self::new(processes, None, Some(code), target);
        }
        let (mut processes, mut known) = (Vec::new(), KnownFiles::default());
        let pids: BTreeSet<u32> = target.filter.pid.iter().copied().collect();
        for &pid in &pids {
            let process = Process::open(pid)?;
            process.expect_native_program()?;
            let found = objects::of_process(&process, &mut known, functions)?;
            processes.push(TracedProcess::new(process, found));
        }
        let noun = if pids.len() == 1 { "pid" } else { "pids" };
        let list: Vec<String> = pids.iter().map(u32::to_string).collect();
        memtools::note!("Attaching to {noun} {}, Ctrl+C to quit.", list.join(", "));
        Self::new(processes, None, None, target)
    }

    fn new(
        mut processes: Vec<TracedProcess>,
        command: Option<HeldCommand>,
        code: Option<TracedCode>,
        target: &TargetArgs,
    ) -> Result<Self> {
        let named = command.is_some() || !target.filter.pid.is_empty();
        let pids = processes.iter().map(|traced| traced.process.pid());
        let filter = FilterArgs {
            pid: if named { pids.collect() } else { Vec::new() },
            ..target.filter.clone()
        };
        let mut filter = filter.resolve(None, TaskKind::Programs)?;
        if target.children {
            filter.follow()?;
        }
        let shared = can_be_joined(target).then(|| {
            let objects = processes.iter_mut().flat_map(|of| of.objects.drain(..));
            each_once(objects)
        });
        let translators = || match &code {
            Some(code) => Ok(code.running_translators()),
            None => proc::all(),
        };
        if let Some(objects) = &shared
            && let Some(harm) = read_by_translator(&probed_files(objects), translators()?)
        {
            bail!(
                "{harm}: name the processes to trace with -p, without --children, or wait for its end"
            );
        }
        Ok(Self {
            filter,
            processes,
            is_command: command.is_some(),
            command,
            shared,
            ends_with_them: named,
            code,
        })
    }

    /// Returns each file to probe, with the pid of the process to probe it in, or [`EVERY_PROCESS`].
    pub(crate) fn objects(&self) -> impl Iterator<Item = (i32, &Object)> {
        let own = self.processes.iter().flat_map(|traced| {
            let pid = traced.process.pid().cast_signed();
            traced.objects.iter().map(move |object| (pid, object))
        });
        let shared = self.shared.iter().flatten();
        own.chain(shared.map(|object| (EVERY_PROCESS, object)))
    }

    /// Returns the files to probe.
    pub(crate) fn files(&self) -> impl Iterator<Item = &Object> {
        self.objects().map(|(_, object)| object)
    }

    /// Describes what was found in the files to probe: one description for all processes in which the same was found.
    pub(crate) fn found(&self) -> Vec<String> {
        let mut counts: Vec<(String, usize)> = Vec::new();
        for found in self.files().map(Object::found) {
            match counts.iter_mut().find(|(known, _)| *known == found) {
                Some((_, count)) => *count += 1,
                None => counts.push((found, 1)),
            }
        }
        let describe = |(found, count)| match count {
            1 => found,
            _ => format!("{found}, in each of {count} processes"),
        };
        counts.into_iter().map(describe).collect()
    }

    /// Returns the files that are probed in every process.
    pub(crate) fn shared_files(&self) -> Vec<ProbedFile> {
        let lost = |of: &&TracedProcess| proc::has_lost_main_thread(of.process.pid());
        let of_lost = self.processes.iter().filter(lost);
        let of_lost = of_lost.flat_map(|traced| &traced.objects);
        probed_files(self.shared.iter().flatten().chain(of_lost))
    }

    /// Returns a process whose main thread has ended, if its files are probed in it alone.
    pub(crate) fn without_main_thread(&self) -> Option<u32> {
        let mut alone = self.processes.iter().filter(|_| self.shared.is_none());
        let found = alone.find(|of| {
            let pid = of.process.pid();
            proc::has_lost_main_thread(pid) && proc::has_living_thread(pid)
        });
        found.map(|of| of.process.pid())
    }

    /// Returns the signatures of all functions to probe, each once.
    pub(crate) fn signatures(&self) -> Vec<Signature> {
        let mut signatures = Vec::new();
        for function in self.files().flat_map(|object| &object.functions) {
            if !signatures.contains(&function.signature) {
                signatures.push(function.signature);
            }
        }
        signatures
    }

    /// Makes a symbolizer that knows the target. Call it before the probes are live.
    pub(crate) fn symbolizer(&mut self) -> Result<Symbolizer> {
        if let Some(code) = self.code.take() {
            return Ok(Symbolizer::new(code));
        }
        let mut code = match self.shared {
            None => TracedCode::of_chosen()?,
            Some(_) => TracedCode::of_descendants()?,
        };
        // A process may lose its main thread, and then needs probes in every process.
        code.watch_translators();
        for TracedProcess { process, .. } in &self.processes {
            if self.command.is_some() {
                code.follow_new(process.pid());
            } else {
                code.follow(process)?;
            }
        }
        Ok(Symbolizer::new(code))
    }

    /// Returns the processes whose unwind tables are to be built before the probes are live.
    pub(crate) fn whose_tables(&self, target: &TargetArgs) -> UnwindTarget {
        match (&target.command, &self.command) {
            (Some(line), Some(command)) => UnwindTarget::Command {
                pid: command.pid(),
                line: line.clone(),
                descendants: target.children,
            },
            _ => {
                let pids = self.processes.iter().map(|traced| traced.process.pid());
                UnwindTarget::Processes(pids.collect())
            }
        }
    }

    /// Returns the processes that end the trace once all of them have exited.
    pub(crate) fn watched(&self) -> impl Iterator<Item = &Process> {
        let watched = self.processes.iter().filter(|_| self.ends_with_them);
        watched.map(|traced| &traced.process)
    }

    /// Whether a process is one of those that were named, or the command.
    pub(crate) fn is_named(&self, pid: u32) -> bool {
        self.watched().any(|process| process.pid() == pid)
    }

    /// Returns the pid that libbpf takes to probe a file that the process `pid` has loaded.
    pub(crate) fn probed_in(&self, pid: u32) -> i32 {
        match self.shared {
            Some(_) => EVERY_PROCESS,
            None => pid.cast_signed(),
        }
    }

    /// Whether all processes are known from the start, as none can join.
    pub(crate) fn is_fixed(&self) -> bool {
        self.shared.is_none()
    }

    /// Whether rows have to name their process.
    pub(crate) fn is_several(&self) -> bool {
        self.shared.is_some() || self.processes.len() > 1
    }

    /// Returns a message that says why there may be no event at all.
    pub(crate) fn why_quiet(&self) -> String {
        let modules: Vec<&str> = self.files().map(|object| object.module.as_str()).collect();
        format!(
            "memleak: no allocation or free yet: the process may be idle, or allocate by functions other than {}'s (specify its allocator with -O and \
             -S)",
            modules.join(", ")
        )
    }
}

/// Returns the running processes that the options describe, and the code of all processes. Processes without an
/// allocator that can be probed are omitted.
fn matching(
    filter: &FilterArgs,
    functions: &FunctionSettings,
) -> Result<(Vec<TracedProcess>, TracedCode)> {
    let pids = match &filter.cgroup {
        Some(folder) => cgroup::processes_below(folder)?,
        None => memtools::process::proc::all()?,
    };
    let mut code = TracedCode::of_all_processes()?;
    code.watch_translators();
    code.watch_members(Members::new(
        filter.name.as_deref(),
        filter.cgroup.as_deref(),
    ));
    code.read_running_processes();
    // Processes that run the same files, such as the workers of a server, are searched once.
    let mut found_in = HashMap::<Vec<u32>, Option<SearchedFiles>>::new();
    let (mut processes, mut known) = (Vec::new(), KnownFiles::default());
    let mut progress = Progress::new("looking at processes", pids.len());
    for pid in pids {
        progress.step();
        if !code.is_member(pid) {
            continue;
        }
        let Ok(process) = Process::open(pid) else {
            continue;
        };
        let files: Vec<u32> = code.files_of(pid).iter().map(|file| file.number).collect();
        let found = match found_in.get(&files) {
            // The files of a process that has just started are not known yet.
            Some(found) if !files.is_empty() => found.clone(),
            _ => objects::of_process(&process, &mut known, functions).ok(),
        };
        found_in.insert(files, found.clone());
        processes.extend(found.map(|found| TracedProcess::new(process, found)));
    }
    if processes.is_empty() {
        bail!(
            "no process with an allocator that can be probed is there yet: start one, or start it \
             with -c"
        );
    }
    Ok((processes, code))
}

/// Returns a message if one of these processes is a translator that has one of these files mapped. Probes in a file are
/// in every process that maps it, and would end the program that the translator runs.
pub(crate) fn read_by_translator(
    files: &[ProbedFile],
    pids: impl IntoIterator<Item = u32>,
) -> Option<String> {
    pids.into_iter().find_map(|pid| {
        // A process that has exited meanwhile cannot be harmed.
        let process = Process::open(pid).ok()?;
        let mappings = process.mappings().unwrap_or_default();
        let translator = translator::find_in(mappings.iter().map(|mapping| mapping.path.as_path()))?;
        let is_mapped = |file: &&ProbedFile| {
            let mut inodes = mappings.iter().map(|mapping| mapping.inode);
            inodes.any(|inode| inode == file.inode)
        };
        let file = files.iter().find(is_mapped)?;
        Some(format!(
            "process {pid} ({}) runs under {translator} and reads {}, where probes for processes that can \
             join later would end it (SIGTRAP)",
            process.comm(),
            file.module
        ))
    })
}

/// Returns the pid that libbpf takes to probe a file in a process, or in [`EVERY_PROCESS`].
///
/// The kernel recognizes the process of a probe by the memory of the main thread. Once that has ended, the file is
/// probed in every process, and the BPF programs' filter chooses the process.
///
/// # Errors
/// If the file would have to be probed in every process, and a translator reads it.
pub(crate) fn pid_to_probe(pid: i32, object: &Object) -> Result<i32> {
    if pid == EVERY_PROCESS || !proc::has_lost_main_thread(pid.cast_unsigned()) {
        return Ok(pid);
    }
    if let Some(harm) = read_by_translator(&probed_files([object]), proc::all()?) {
        bail!(
            "the main thread of process {pid} has ended, so that only probes in every process reach it; {harm}"
        );
    }
    objects::warn_once(&format!(
        "the main thread of process {pid} has ended: its files are probed in every process that runs them"
    ));
    Ok(EVERY_PROCESS)
}

/// Returns the files of these objects.
fn probed_files<'a>(objects: impl IntoIterator<Item = &'a Object>) -> Vec<ProbedFile> {
    objects
        .into_iter()
        .filter_map(Object::probed_file)
        .collect()
}

/// Returns one object of each file.
fn each_once(objects: impl Iterator<Item = Object>) -> Vec<Object> {
    let mut seen = HashSet::new();
    let mut first_of_file = |object: &Object| match object.file.identity() {
        Ok(identity) => seen.insert(identity),
        Err(_) => true,
    };
    objects.filter(|object| first_of_file(object)).collect()
}
