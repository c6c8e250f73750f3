//! Allocators that a process loads while it is traced, by dlopen or by exec.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Result;
use libbpf_rs::Link;
use memtools::process::address_space::CodeFile;
use memtools::process::mapped_file::MappedFile;
use memtools::process::proc::{self, FileId, Process};
use memtools::process::traced_code::TracedCode;
use memtools::process::translator;
use nix::unistd::{Pid, getpgid};

use super::object::{Object, ProbedFile};
use super::objects;
use super::probes::Attached;
use super::target::{EVERY_PROCESS, Targets, read_by_translator};
use crate::plan::FunctionSettings;

/// Time between two looks at loaded files. What is allocated by a new allocator before the next look is not seen.
pub(crate) const PAUSE: Duration = Duration::from_millis(200);
/// Time from an exec to a look: by then a program has mapped its libraries, as a rule.
pub(crate) const AFTER_EXEC: Duration = Duration::from_millis(5);

/// Remark on an allocator that is found while its process runs.
const TOO_LATE: &str = "met when it was loaded already: what it allocated until then is not known";
/// Time after which an allocator that was just probed is said to have allocated before. Until then, its process may be
/// about to be stopped for the file, and has not allocated by it yet.
const LATE_PROBE_DELAY: Duration = Duration::from_millis(100);

/// Files that processes execute code from.
pub(crate) struct LoadedFiles {
    /// Files that were searched, by the process that they are probed in.
    searched_files: HashMap<i32, HashSet<(u64, u64)>>,
    /// Files that were searched, by the process that they are probed in and by the symbolizer's number, which is known
    /// without opening the file.
    seen: HashSet<(i32, u32)>,
    /// Files that the command, or what it started, had mapped when it was stopped.
    seen_stopped: HashSet<FileId>,
    /// Allocators that were probed before their process was stopped for them, if it is to be stopped.
    late: Vec<Late>,
    pub(crate) links: Vec<Link>,
    /// Files that `links` are in, each with the process that it is probed in.
    objects: Vec<(i32, Object)>,
    /// Files that are probed in every process, including those that were probed at the start.
    shared: Vec<ProbedFile>,
}

impl LoadedFiles {
    pub(crate) fn new(target: &Targets) -> Self {
        let mut searched_files: HashMap<_, HashSet<_>> = HashMap::new();
        for traced in &target.processes {
            let pid = target.probed_in(traced.process.pid());
            let known = searched_files.entry(pid).or_default();
            known.extend(&traced.searched_files);
        }
        Self {
            searched_files,
            seen: HashSet::new(),
            seen_stopped: HashSet::new(),
            late: Vec::new(),
            links: Vec::new(),
            objects: Vec::new(),
            shared: target.shared_files(),
        }
    }

    /// Probes what processes have newly loaded. Prints what was found once it is clear whether that was in time, or why
    /// it cannot be probed.
    pub(crate) fn probe_new_files(
        &mut self,
        code: &mut TracedCode,
        target: &Targets,
        attached: &Attached,
        functions: &FunctionSettings,
    ) {
        self.print_late(LATE_PROBE_DELAY);
        for of in code.take_changed() {
            let pid = target.probed_in(of);
            let mut new = code.files_of(of);
            new.retain(|file| !self.seen.contains(&(pid, file.number)));
            if new.is_empty() || !code.is_member(of) {
                continue;
            }
            if target.is_command && is_stopped(of) {
                code.mark_changed(of);
                continue;
            }
            for file in new {
                self.seen.insert((pid, file.number));
                self.probe_new_file(of, &file, target, attached, functions);
            }
        }
    }

    /// Probes a file that the process `of` has loaded, unless it was searched under another name.
    fn probe_new_file(
        &mut self,
        of: u32,
        file: &CodeFile,
        target: &Targets,
        attached: &Attached,
        functions: &FunctionSettings,
    ) {
        let pid = target.probed_in(of);
        let known = self.searched_files.entry(pid).or_default();
        let Some(file) = file.open() else { return };
        let Some(identity) = file.identity().ok().filter(|&new| known.insert(new)) else {
            return;
        };
        match self.probe(pid, &file, false, attached, functions) {
            Ok(None) => {}
            Ok(Some(object)) => self.late.push(Late {
                since: Instant::now(),
                pid: of,
                file: identity,
                found: format!("{} ({})", object.found(), attached.how),
            }),
            Err(error) => {
                objects::warn_once(&format!("{} is not traced: {error:#}", file.module()))
            }
        }
    }

    /// Probes what a stopped process has mapped: the command, or one that it has started. The process continues only
    /// when this is done, so nothing that it allocates is missed. `is_stopped` tells whether the process is still
    /// stopped: it was let go on if we came too late.
    ///
    /// # Errors
    /// If the command has become a translator, which must not be probed.
    pub(crate) fn look_at_stopped(
        &mut self,
        pid: u32,
        is_stopped: &dyn Fn() -> bool,
        target: &Targets,
        attached: &Attached,
        functions: &FunctionSettings,
    ) -> Result<()> {
        // A process that has exited meanwhile has nothing mapped.
        let Ok(process) = Process::open(pid) else {
            return Ok(());
        };
        let mut code = process.mappings().unwrap_or_default();
        code.retain(|mapping| mapping.executable && mapping.inode != 0);
        let mut names = code.iter().map(|code| code.path.as_path());
        if target.is_named(pid) {
            objects::expect_no_translator(&process, names)?;
        } else if translator::find_in(&mut names).is_some() {
            // If the translator reads a file that is probed, the trace is about to end: find_translator_conflict().
            return Ok(());
        }
        let probed_in = target.probed_in(pid);
        for (number, mapping) in code.iter().enumerate() {
            // A program with 200 libraries is stopped 200 times. Each file is opened only once.
            if !self.seen_stopped.insert(mapping.file_id()) {
                continue;
            }
            let Ok(file) = MappedFile::open(pid, mapping) else {
                continue;
            };
            let known = self.searched_files.entry(probed_in).or_default();
            let Ok(identity) = file.identity() else {
                continue;
            };
            if !known.insert(identity) {
                if is_stopped() {
                    self.print_probed_in_time(pid, identity);
                }
                continue;
            }
            match self.probe(probed_in, &file, number == 0, attached, functions) {
                Ok(None) => {}
                Ok(Some(object)) => {
                    let found = format!("{} ({})", object.found(), attached.how);
                    if is_stopped() {
                        print_probed(&found);
                    } else {
                        print_probed(&format!("{found}, {TOO_LATE}"));
                    }
                }
                Err(error) => {
                    objects::warn_once(&format!("{} is not traced: {error:#}", file.module()));
                }
            }
        }
        Ok(())
    }

    /// Prints an allocator that was probed shortly before a process was stopped for its file, as probed in time. The
    /// allocator was probed in the same process or in another one in our process group. Such a process was about to be
    /// stopped, too, and continues now without a stop (`bpf/include/held.bpf.h`).
    fn print_probed_in_time(&mut self, pid: u32, file: (u64, u64)) {
        let group_of = |pid| getpgid(pid).ok();
        let is_held = |other: u32| {
            let other = Pid::from_raw(other.cast_signed());
            group_of(Some(other)) == group_of(None)
        };
        self.late.retain(|late| {
            let in_time = late.file == file && (late.pid == pid || is_held(late.pid));
            if in_time {
                print_probed(&late.found);
            }
            !in_time
        });
    }

    /// Prints the allocators that were probed at least `doubt` ago, and whose process was not stopped.
    pub(crate) fn print_late(&mut self, doubt: Duration) {
        self.late.retain(|late| {
            let in_doubt = late.since.elapsed() < doubt;
            if !in_doubt {
                print_probed(&format!("{}, {TOO_LATE}", late.found));
            }
            in_doubt
        });
    }

    /// Prints the allocators of processes that exited before memleak looked at them. For traces that end with their
    /// processes: the symbolizer then knows no others.
    pub(crate) fn print_missed(
        &mut self,
        files: Vec<(u32, Rc<CodeFile>)>,
        target: &Targets,
        functions: &FunctionSettings,
    ) {
        for (pid, file) in files {
            let probed_in = target.probed_in(pid);
            if self.seen.contains(&(probed_in, file.number)) {
                continue;
            }
            let known = self.searched_files.entry(probed_in).or_default();
            let Some(file) = file.open() else { continue };
            let new = file.identity().is_ok_and(|identity| known.insert(identity));
            if new && let Ok(Some(object)) = objects::of_loaded(&file, false, functions) {
                memtools::message!(
                    "{}: the process ended before it was probed, so that nothing of what it \
                     allocated is known",
                    object.found()
                );
            }
        }
    }

    /// Probes a file's allocator, if it has one. Returns what was found.
    fn probe(
        &mut self,
        pid: i32,
        file: &MappedFile,
        is_program: bool,
        attached: &Attached,
        functions: &FunctionSettings,
    ) -> Result<Option<Object>> {
        let Some(object) = objects::of_loaded(file, is_program, functions)? else {
            return Ok(None);
        };
        self.links.extend(attached.probe(pid, &object, functions)?);
        if pid == EVERY_PROCESS || proc::has_lost_main_thread(pid.cast_unsigned()) {
            self.shared.extend(object.probed_file());
        }
        self.objects.push((pid, object.clone()));
        Ok(Some(object))
    }

    /// Iterates over the files that are probed, except those that were probed at the start.
    pub(crate) fn objects(&self) -> impl Iterator<Item = &Object> {
        self.objects.iter().map(|(_, object)| object)
    }

    /// Probes all files once more, at the start and later ones, whose probes have been removed.
    /// Returns the new links.
    pub(crate) fn probe_again(
        &mut self,
        target: &Targets,
        attached: &Attached,
        functions: &FunctionSettings,
    ) -> Result<Vec<Link>> {
        let mut links = Vec::new();
        let later = self.objects.iter().map(|(pid, object)| (*pid, object));
        for (pid, object) in target.objects().chain(later) {
            links.extend(attached.probe(pid, object, functions)?);
            self.shared.extend(object.probed_file());
        }
        Ok(links)
    }

    /// Returns a message if one of these translators reads a file that is probed in every process.
    pub(crate) fn find_translator_conflict(
        &self,
        translators: impl Iterator<Item = u32>,
    ) -> Option<String> {
        read_by_translator(&self.shared, translators)
    }
}

/// Allocator that was probed in a running process.
struct Late {
    /// Time at which the allocator was probed.
    since: Instant,
    pid: u32,
    file: (u64, u64),
    /// Description of the allocator, and of how it is probed.
    found: String,
}

fn print_probed(found: &str) {
    memtools::message!("{found}");
}

/// Whether a process is stopped by a signal. If we have stopped it, look_at_stopped() follows.
fn is_stopped(pid: u32) -> bool {
    Process::open(pid).is_ok_and(|process| process.is_stopped())
}
