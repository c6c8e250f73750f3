//! Images of processes: the code that they have mapped, now and before.
//!
//! A process has one image after another: the one that it gets by fork, and one for each exec. When a stack is
//! symbolized, its process may have another image already, or have exited, or its PID may belong to another process.
//! So images are kept, and the addresses of a stack tell which image the stack belongs to.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

use anyhow::Result;
use nix::sys::resource::{Resource, getrlimit};

use crate::code::elf;
use crate::print::text;
use crate::process::mapped_file::MappedFile;
use crate::process::mapping_log::Change;
use crate::process::proc::{self, FileId, Mapping, Process};

/// Maximum number of exited processes that are remembered, at a kilobyte or less each.
const MAX_EXITED: usize = 16384;
/// Maximum number of images that are remembered for one PID.
const MAX_IMAGES: usize = 8;
/// Maximum number of code mappings that are remembered for an image. The kernel does not log unmapping, so the list
/// of a process that keeps mapping code would grow without limit. The first half of the list, with the program and
/// its libraries, and the newest mappings are kept.
const MAX_MAPPINGS: usize = 8192;
/// Number of files from which on files without an image are forgotten.
const MAX_FILES: usize = 16384;

/// File, or other named object, from which code was mapped.
#[derive(Debug)]
pub struct CodeFile {
    /// Number that identifies the file in this tool. The number is never reused.
    pub number: u32,
    /// The mapping by which the file was first seen; inode 0 if this is no file.
    mapping: Mapping,
    /// The process that mapped the file last, and the time.
    seen: Cell<(u32, SystemTime)>,
    opened: RefCell<OpenState>,
    module: OnceCell<Rc<str>>,
    build_id: OnceCell<Option<Vec<u8>>>,
}

/// Whether a file is held open.
#[derive(Debug)]
enum OpenState {
    /// Not held open at present.
    Closed,
    /// Held open, and counted in [`HELD`].
    Open(Rc<MappedFile>),
    /// The file cannot be found any more, or there is none.
    Unavailable,
}

/// Number of files that are held open.
static HELD: AtomicUsize = AtomicUsize::new(0);

/// Returns the maximum number of files that are held open: half of this process's limit. The other half is for files
/// that are opened for a moment, and for probes, maps and copies of symbols.
fn most_held() -> usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    *MOST.get_or_init(|| {
        let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((1024, 1024));
        usize::try_from(limit / 2).unwrap_or(usize::MAX)
    })
}

impl Drop for CodeFile {
    fn drop(&mut self) {
        if let OpenState::Open(_) = self.opened.get_mut() {
            HELD.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl CodeFile {
    /// Returns the file's name without directories, escaped; a name such as `[vdso]`; or an empty string.
    pub fn module(&self) -> &Rc<str> {
        self.module.get_or_init(|| self.mapping.module().into())
    }

    /// Returns the file's path in the mount namespace of the process that maps it, escaped; a name such as `[vdso]`;
    /// or an empty string.
    pub fn path(&self) -> String {
        text::escape_bytes(self.mapping.path.as_os_str().as_bytes())
    }

    /// Returns the file's build ID, if it has one. The first call reads it.
    pub fn build_id(&self) -> Option<&[u8]> {
        let read = || elf::build_id(self.open()?.file());
        self.build_id.get_or_init(read).as_deref()
    }

    /// Returns the file's path as it was mapped, not escaped.
    pub fn raw_path(&self) -> &Path {
        &self.mapping.path
    }

    /// Returns the process that mapped the file last.
    pub(crate) fn last_pid(&self) -> u32 {
        self.seen.get().0
    }

    /// Returns whether the code was generated at run time: no file on a disk has it.
    pub(crate) fn is_generated(&self) -> bool {
        self.mapping.is_of_no_file()
    }

    /// Returns the open file. None if the mapping has no file, or the file cannot be found any more. The first call
    /// opens the file and keeps it open, so that its descriptor identifies it. If the maximum number of files is
    /// already held open, each call opens the file again.
    pub fn open(&self) -> Option<Rc<MappedFile>> {
        let mut opened = self.opened.borrow_mut();
        match &*opened {
            OpenState::Open(file) => return Some(Rc::clone(file)),
            OpenState::Unavailable => return None,
            OpenState::Closed => {}
        }
        let Some(file) = self.find() else {
            *opened = OpenState::Unavailable;
            return None;
        };
        let file = Rc::new(file);
        if HELD.fetch_add(1, Ordering::Relaxed) < most_held() {
            *opened = OpenState::Open(Rc::clone(&file));
        } else {
            HELD.fetch_sub(1, Ordering::Relaxed);
        }
        Some(file)
    }

    fn find(&self) -> Option<MappedFile> {
        if self.mapping.inode == 0 {
            return None;
        }
        let (pid, time) = self.seen.get();
        let file = MappedFile::open(pid, &self.mapping).ok()?;
        // Another file may have this path now, even with the same inode number.
        (changed(&file).ok()? <= time).then_some(file)
    }
}

/// Returns the time of the last change of the file or its inode.
fn changed(file: &MappedFile) -> io::Result<SystemTime> {
    let meta = file.file().metadata()?;
    let since_epoch = std::time::Duration::new(
        meta.ctime().try_into().unwrap_or(0),
        meta.ctime_nsec().try_into().unwrap_or(0),
    );
    Ok(SystemTime::UNIX_EPOCH + since_epoch)
}

impl PartialEq for CodeFile {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for CodeFile {}

/// Part of a file that is mapped as code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedCode {
    /// The addresses of the mapping, in bytes.
    pub range: Range<u64>,
    /// The offset in the file of the byte at `range.start`.
    pub file_offset: u64,
    /// The file.
    pub file: Rc<CodeFile>,
}

impl MappedCode {
    /// Returns the offset in the file of the byte at an address of the mapping.
    pub fn offset_of(&self, address: u64) -> u64 {
        address - self.range.start + self.file_offset
    }
}

/// Code mappings of a process from one exec to the next.
#[derive(Debug, Clone, Default)]
pub struct Image {
    /// Code mappings in the order in which they were made; a later one covers an earlier one.
    code: Rc<Vec<MappedCode>>,
    number: u64,
}

impl Image {
    /// Returns the code mapping that contains an address.
    pub fn find(&self, address: u64) -> Option<&MappedCode> {
        self.code
            .iter()
            .rev()
            .find(|code| code.range.contains(&address))
    }

    /// Returns the code of the program itself, which is mapped before its libraries, and below them.
    pub fn program(&self) -> Option<&MappedCode> {
        let mut code = self.code.iter();
        code.find(|code| !code.file.is_generated())
    }

    /// Whether code in this range replaces code of the program itself. No program unmaps its own code except to run a
    /// copy of it, in huge pages.
    fn is_of_program(&self, range: &Range<u64>) -> bool {
        let program = self.program().map(|code| &code.range);
        program.is_some_and(|program| program.start <= range.start && range.end <= program.end)
    }

    /// Returns whether the image has no known mappings.
    pub fn is_empty(&self) -> bool {
        self.code.is_empty()
    }

    /// Returns the files of the code mappings, in the order in which they were mapped.
    pub fn files(&self) -> impl Iterator<Item = Rc<CodeFile>> {
        self.code.iter().map(|code| Rc::clone(&code.file))
    }

    /// Returns whether the image contains generated code.
    pub(crate) fn generates_code(&self) -> bool {
        self.code.iter().any(|code| code.file.is_generated())
    }
}

/// Processes whose images are remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrackedProcesses {
    /// Images of the chosen processes.
    Chosen,
    /// Images of the chosen processes and of all their descendants.
    Descendants,
    /// Images of all processes.
    All,
}

/// Program that a child of a chosen process has executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProgramOfChild {
    /// None has so far.
    None,
    /// The child with this PID has.
    Executed(u32),
    /// [`AddressSpaces::take_program_of_child`] has returned it.
    Taken,
}

/// Images of all wanted processes.
pub struct AddressSpaces {
    wanted: TrackedProcesses,
    chosen: HashSet<u32>,
    /// Children of chosen processes, which are not chosen themselves.
    children: HashSet<u32>,
    program_of_child: ProgramOfChild,
    /// By PID, oldest first.
    images: HashMap<u32, Vec<Image>>,
    /// Processes with images whose code has changed since [`AddressSpaces::take_changed`].
    changed: HashSet<u32>,
    files: HashMap<(FileId, PathBuf), Rc<CodeFile>>,
    max_files: usize,
    files_met: u32,
    /// PIDs in the order in which their processes exited, each with the number of the last image.
    exited: VecDeque<(u32, u64)>,
    /// Number of processes that have exited, including those that are forgotten.
    exits: u64,
    images_made: u64,
    forgotten_processes: u64,
    forgotten_mappings: u64,
}

impl AddressSpaces {
    /// Creates an empty set of images for the processes that are `wanted`. Chosen processes are added by
    /// [`Self::choose`].
    pub fn of(wanted: TrackedProcesses) -> Self {
        Self {
            wanted,
            chosen: HashSet::new(),
            children: HashSet::new(),
            program_of_child: ProgramOfChild::None,
            images: HashMap::new(),
            changed: HashSet::new(),
            files: HashMap::new(),
            max_files: MAX_FILES,
            files_met: 0,
            exited: VecDeque::new(),
            exits: 0,
            images_made: 0,
            forgotten_processes: 0,
            forgotten_mappings: 0,
        }
    }

    /// Adds a process whose mappings are remembered from now on.
    pub fn choose(&mut self, pid: u32) {
        self.chosen.insert(pid);
    }

    /// Reads and remembers the code mappings of a running process.
    ///
    /// # Errors
    /// If the mappings of the process cannot be read.
    pub(crate) fn read_mappings(&mut self, process: &Process) -> Result<()> {
        let pid = process.pid();
        let mappings = process.mappings()?;
        self.begin_image(pid, Rc::default());
        for mapping in mappings.into_iter().filter(|mapping| mapping.executable) {
            self.map(pid, mapping);
        }
        Ok(())
    }

    /// Reads and remembers the code mappings of all running processes that are not known yet.
    pub(crate) fn look_at_all(&mut self) {
        let own_pid = std::process::id();
        for pid in proc::all().unwrap_or_default() {
            if pid != own_pid
                && !self.images.contains_key(&pid)
                && let Ok(process) = Process::open(pid)
            {
                // A process that has exited meanwhile has no mappings.
                let _ = self.read_mappings(&process);
            }
        }
    }

    /// Returns, once, the first child of a chosen process that has executed a program. Returns None if children have
    /// images, too.
    pub fn take_program_of_child(&mut self) -> Option<u32> {
        let ProgramOfChild::Executed(pid) = self.program_of_child else {
            return None;
        };
        self.program_of_child = ProgramOfChild::Taken;
        Some(pid)
    }

    /// Notes children of chosen processes, and the first program that one of them executes.
    fn note_children(&mut self, change: &Change) {
        match *change {
            Change::Forked(parent, child)
                if self.chosen.contains(&parent) && !self.chosen.contains(&child) =>
            {
                self.children.insert(child);
            }
            Change::Forked(_, pid) | Change::Exited(pid) => {
                self.children.remove(&pid);
            }
            Change::Exec(pid)
                if self.children.contains(&pid)
                    && self.program_of_child == ProgramOfChild::None =>
            {
                self.program_of_child = ProgramOfChild::Executed(pid);
            }
            _ => {}
        }
    }

    /// Applies a change of a process to its images.
    pub fn apply(&mut self, change: Change) {
        if self.wanted == TrackedProcesses::Chosen {
            self.note_children(&change);
        }
        if let Change::Forked(parent, child) = change
            && self.wanted == TrackedProcesses::Descendants
        {
            if self.chosen.contains(&parent) {
                self.choose(child);
            } else {
                self.chosen.remove(&child);
            }
        }
        let wanted = |pid| self.wanted == TrackedProcesses::All || self.chosen.contains(pid);
        match change {
            Change::Mapped(pid, mapping) if wanted(&pid) => self.map(pid, mapping),
            Change::Exec(pid) if wanted(&pid) => self.begin_image(pid, Rc::default()),
            Change::Forked(parent, child) if wanted(&child) => {
                let image = self.images.get(&parent).and_then(|images| images.last());
                let code = image.map_or_else(Rc::default, |image| Rc::clone(&image.code));
                self.begin_image(child, code);
            }
            Change::Exited(pid) => self.retire(pid),
            _ => {}
        }
    }

    fn begin_image(&mut self, pid: u32, code: Rc<Vec<MappedCode>>) {
        self.images_made += 1;
        self.changed.insert(pid);
        let images = self.images.entry(pid).or_default();
        if images.len() == MAX_IMAGES {
            images.remove(0);
        }
        images.push(Image {
            code,
            number: self.images_made,
        });
    }

    fn map(&mut self, pid: u32, mapping: Mapping) {
        let (range, file_offset) = (mapping.range.clone(), mapping.file_offset);
        let file = self.file(pid, mapping);
        if !self.images.contains_key(&pid) {
            self.begin_image(pid, Rc::default());
        }
        self.changed.insert(pid);
        if let Some(image) = self
            .images
            .get_mut(&pid)
            .and_then(|images| images.last_mut())
        {
            // The copy has the program's functions at the same addresses.
            if file.is_generated() && image.is_of_program(&range) {
                return;
            }
            let code = Rc::make_mut(&mut image.code);
            // Mappings that the new one covers completely are removed, as when generated code is made executable once
            // more.
            code.retain(|old| old.range.start < range.start || old.range.end > range.end);
            if code.len() == MAX_MAPPINGS {
                code.remove(MAX_MAPPINGS / 2);
                self.forgotten_mappings += 1;
            }
            code.push(MappedCode {
                range,
                file_offset,
                file,
            });
        }
    }

    fn file(&mut self, pid: u32, mapping: Mapping) -> Rc<CodeFile> {
        if self.files.len() >= self.max_files {
            self.files.retain(|_, file| Rc::strong_count(file) > 1);
            // The limit grows, so that this does not happen for each new file if all files are in use.
            self.max_files = MAX_FILES.max(2 * self.files.len());
        }
        let number = self.files_met;
        let seen = (pid, SystemTime::now());
        let file = self
            .files
            .entry((mapping.file_id(), mapping.path.clone()))
            .or_insert_with(|| {
                self.files_met += 1;
                Rc::new(CodeFile {
                    number,
                    mapping,
                    seen: Cell::new(seen),
                    opened: RefCell::new(OpenState::Closed),
                    module: OnceCell::new(),
                    build_id: OnceCell::new(),
                })
            });
        file.seen.set(seen);
        // The files of a few processes are opened at once, so that they can be symbolized even after they are
        // removed. Open files of all processes would keep file systems from being unmounted.
        if self.wanted != TrackedProcesses::All {
            file.open();
        }
        Rc::clone(file)
    }

    /// Keeps the images of a process that has exited. If there are too many exited processes, forgets the one that
    /// exited first.
    fn retire(&mut self, pid: u32) {
        let Some(last) = self.images.get(&pid).and_then(|images| images.last()) else {
            return;
        };
        self.exited.push_back((pid, last.number));
        self.exits += 1;
        if self.exited.len() > MAX_EXITED {
            self.forget_oldest();
            self.forgotten_processes += 1;
        }
    }

    /// Returns the number of processes with images that have exited.
    pub(crate) fn exits(&self) -> u64 {
        self.exits
    }

    /// Forgets the images of the first `exits` processes that have exited. To be called when all stacks of these
    /// processes are symbolized.
    pub(crate) fn forget_exited(&mut self, exits: u64) {
        while self.exits - (self.exited.len() as u64) < exits && self.forget_oldest() {}
    }

    fn forget_oldest(&mut self) -> bool {
        let Some((pid, last)) = self.exited.pop_front() else {
            return false;
        };
        if let Some(images) = self.images.get_mut(&pid) {
            images.retain(|image| image.number > last);
            if images.is_empty() {
                self.images.remove(&pid);
                self.changed.remove(&pid);
            }
        }
        true
    }

    /// Returns the image of a process that contains most of these addresses, and the newest of several. If all
    /// processes are wanted and this process is not known yet, its mappings are read now.
    pub(crate) fn image_with(
        &mut self,
        pid: u32,
        addresses: impl Iterator<Item = u64> + Clone,
    ) -> Option<Image> {
        if !self.images.contains_key(&pid) && self.wanted == TrackedProcesses::All {
            let _ = Process::open(pid).and_then(|process| self.read_mappings(&process));
        }
        let missing = |image: &&Image| {
            let is_missing = |&address: &u64| image.find(address).is_none();
            addresses.clone().filter(is_missing).count()
        };
        match &**self.images.get(&pid)? {
            [only] => Some(only.clone()),
            images => images.iter().rev().min_by_key(missing).cloned(),
        }
    }

    /// Returns the newest image of a process.
    pub(crate) fn newest_image(&self, pid: u32) -> Option<&Image> {
        self.images.get(&pid)?.last()
    }

    /// Returns the newest image of each chosen process.
    pub(crate) fn chosen_images(&self) -> impl Iterator<Item = (u32, &Image)> {
        let chosen = self.chosen.iter();
        chosen.filter_map(|pid| Some((*pid, self.images.get(pid)?.last()?)))
    }

    /// Returns the newest image of each wanted process: of all processes, or of the chosen ones.
    pub(crate) fn wanted_images(&self) -> impl Iterator<Item = (u32, &Image)> {
        let wanted = |pid| self.wanted == TrackedProcesses::All || self.chosen.contains(pid);
        let images = self.images.iter().filter(move |(pid, _)| wanted(pid));
        images.filter_map(|(&pid, images)| Some((pid, images.last()?)))
    }

    /// Returns the processes whose code has changed since the last call.
    pub(crate) fn take_changed(&mut self) -> HashSet<u32> {
        std::mem::take(&mut self.changed)
    }

    /// Has the next [`AddressSpaces::take_changed`] return a process, if its code is known.
    pub(crate) fn mark_changed(&mut self, pid: u32) {
        if self.images.contains_key(&pid) {
            self.changed.insert(pid);
        }
    }

    /// Returns how many exited processes were forgotten because there were too many.
    pub(crate) fn forgotten_processes(&self) -> u64 {
        self.forgotten_processes
    }

    /// Returns how many code mappings were forgotten because their process has too many. Some of them may have been
    /// unmapped before.
    pub(crate) fn forgotten_mappings(&self) -> u64 {
        self.forgotten_mappings
    }
}

#[cfg(test)]
mod tests;
