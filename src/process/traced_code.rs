//! The code that traced processes have mapped, kept up to date from the kernel's log of mappings.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use anyhow::{Context, Result};

use crate::process::address_space::{AddressSpaces, CodeFile, Image, TrackedProcesses};
use crate::process::mapping_log::{Change, MappingLog};
use crate::process::members::Members;
use crate::process::proc::Process;
use crate::process::translator::{self, RunningTranslators};

/// Code mappings of traced processes, current and earlier, and the binary translators among the processes.
pub struct TracedCode {
    /// The kernel's log; None after [`TracedCode::take_log`].
    log: Option<MappingLog>,
    /// Number of changes that the log had lost when it was read last.
    lost_changes: u64,
    pub(crate) spaces: AddressSpaces,
    /// Binary translators that have started; None until [`TracedCode::watch_translators`].
    translators: Option<RunningTranslators>,
    /// Processes that an option selects; None if options name the processes themselves.
    members: Option<Members>,
}

impl TracedCode {
    /// Opens the log for the processes that [`TracedCode::follow`] adds.
    ///
    /// # Errors
    /// If the kernel's log of mappings cannot be opened, mostly because a privilege is missing.
    pub fn of_chosen() -> Result<Self> {
        Self::of(TrackedProcesses::Chosen)
    }

    /// Opens the log for the processes that [`TracedCode::follow`] adds, and for their descendants.
    ///
    /// # Errors
    /// If the kernel's log of mappings cannot be opened, mostly because a privilege is missing.
    pub fn of_descendants() -> Result<Self> {
        Self::of(TrackedProcesses::Descendants)
    }

    /// Opens the log for all processes: those that start later, and those that run when
    /// [`TracedCode::read_running_processes`] is called.
    ///
    /// # Errors
    /// If the kernel's log of mappings cannot be opened, mostly because a privilege is missing.
    pub fn of_all_processes() -> Result<Self> {
        Self::of(TrackedProcesses::All)
    }

    fn of(wanted: TrackedProcesses) -> Result<Self> {
        Ok(Self {
            log: Some(MappingLog::start()?),
            lost_changes: 0,
            spaces: AddressSpaces::of(wanted),
            translators: None,
            members: None,
        })
    }

    /// Records the mappings of a running process, and from now on its new mappings.
    ///
    /// # Errors
    /// If the mappings of the process cannot be read.
    pub fn follow(&mut self, process: &Process) -> Result<()> {
        self.follow_new(process.pid());
        self.spaces.read_mappings(process)
    }

    /// Records from now on the mappings of a process that is about to call exec.
    pub fn follow_new(&mut self, pid: u32) {
        self.spaces.choose(pid);
    }

    /// Records the mappings of all running processes. This takes some milliseconds, so call it when the probes are
    /// live.
    pub fn read_running_processes(&mut self) {
        self.spaces.look_at_all();
    }

    /// Returns the file descriptor that [`Poller::watch_mappings`](crate::run::poll::Poller::watch_mappings) waits for.
    ///
    /// # Errors
    /// If there are no file descriptors left, or another thread reads the log.
    pub fn descriptor(&self) -> Result<OwnedFd> {
        let log = self.log.as_ref().context("the log of mappings was taken")?;
        let log = log.as_fd().try_clone_to_owned();
        log.context("failed to monitor the log of mappings")
    }

    /// Returns the log, for a thread that reads it from now on. Its changes then come by [`TracedCode::apply`].
    ///
    /// # Errors
    /// If the log was taken already.
    pub(crate) fn take_log(&mut self) -> Result<MappingLog> {
        self.log.take().context("the log of mappings was taken")
    }

    /// Reads new mappings from the log.
    pub fn refresh(&mut self) {
        if let Some(log) = &mut self.log {
            let changes = log.drain();
            self.lost_changes = log.lost();
            self.apply(changes);
        }
    }

    /// Notes how many changes the log has lost, where another thread reads it.
    pub(crate) fn set_lost_changes(&mut self, lost: u64) {
        self.lost_changes = lost;
    }

    /// Applies changes from the log, in order of time.
    pub(crate) fn apply(&mut self, changes: impl IntoIterator<Item = Change>) {
        for change in changes {
            if let Some(translators) = &mut self.translators {
                translators.note(&change);
            }
            if let Some(members) = &mut self.members
                && let Some(pid) = members.note(&change)
            {
                self.spaces.mark_changed(pid);
            }
            self.spaces.apply(change);
        }
    }

    /// Keeps this selection of processes up to date from now on.
    pub fn watch_members(&mut self, members: Members) {
        self.members = Some(members);
    }

    /// Whether the watched selection has a process; without one, true.
    pub fn is_member(&mut self, pid: u32) -> bool {
        let members = self.members.as_mut();
        members.is_none_or(|members| members.contains(pid))
    }

    /// Has the selection decide once more about a process that was moved to another cgroup.
    pub fn moved(&mut self, pid: u32) {
        if let Some(members) = &mut self.members {
            members.forget(pid);
            self.spaces.mark_changed(pid);
        }
    }

    /// Returns the followed processes whose code, or whose place in the selection, may have changed since the last
    /// call, as of the last refresh.
    pub fn take_changed(&mut self) -> HashSet<u32> {
        self.spaces.take_changed()
    }

    /// Has the next [`TracedCode::take_changed`] return a process once more.
    pub fn mark_changed(&mut self, pid: u32) {
        self.spaces.mark_changed(pid);
    }

    /// Returns the files from which a followed process executes code, as of the last refresh. A file is returned as
    /// often as it is mapped.
    pub fn files_of(&self, pid: u32) -> Vec<Rc<CodeFile>> {
        let image = self.spaces.newest_image(pid);
        image.map_or_else(Vec::new, |image| image.files().collect())
    }

    /// Returns the number of processes that have exited, as of the last refresh.
    pub(crate) fn exits(&self) -> u64 {
        self.spaces.exits()
    }

    /// Forgets the first `exits` processes that have exited. Call it when all their stacks are symbolized.
    pub(crate) fn forget_exited(&mut self, exits: u64) {
        self.spaces.forget_exited(exits);
    }

    /// Returns the files from which the followed processes execute code, as of the last refresh, each with its process.
    /// A file is returned as often as it is mapped.
    pub fn files(&self) -> Vec<(u32, Rc<CodeFile>)> {
        let of = |(pid, image): (u32, &Image)| {
            let files: Vec<_> = image.files().map(|file| (pid, file)).collect();
            files
        };
        self.spaces.wanted_images().flat_map(of).collect()
    }

    /// Returns, once, the first child of a followed process that had executed a program at the last refresh. Returns None
    /// if descendants are followed.
    pub fn take_program_of_child(&mut self) -> Option<u32> {
        self.spaces.take_program_of_child()
    }

    /// Records the binary translators that start from now on, whoever starts them.
    pub fn watch_translators(&mut self) {
        self.translators = Some(RunningTranslators::default());
    }

    /// Returns the processes of the translators that have started since they are watched, as of the last refresh.
    pub fn translators(&self) -> impl Iterator<Item = u32> {
        self.translators.iter().flat_map(RunningTranslators::pids)
    }

    /// Returns the followed processes that run a binary translator, as of the last refresh.
    pub fn running_translators(&self) -> Vec<u32> {
        let images = self.spaces.wanted_images();
        let found = images.filter(|(_, image)| {
            let files: Vec<_> = image.files().collect();
            translator::find_in(files.iter().map(|file| file.raw_path())).is_some()
        });
        found.map(|(pid, _)| pid).collect()
    }

    /// Describes the mappings that were lost, a phrase for each reason.
    pub(crate) fn losses(&self) -> Vec<String> {
        let losses = [
            (self.lost_changes, "missed", "mappings, made too fast"),
            (
                self.spaces.forgotten_processes(),
                "forgot",
                "processes that had exited",
            ),
            (
                self.spaces.forgotten_mappings(),
                "forgot",
                "mappings of processes with thousands of them",
            ),
        ];
        let lost = losses.iter().filter(|(count, ..)| *count > 0);
        lost.map(|(count, verb, what)| format!("{verb} {count} {what}"))
            .collect()
    }
}
