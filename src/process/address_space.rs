//! What code processes have mapped, now and before: their images.
//!
//! A process has one image after another: the one that fork gave it, and one for each exec. Stacks
//! are looked at when the process may have gone on to another image, or exited, or its number
//! belongs to another one. So images are kept, and a stack tells by its addresses which it is of.

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

/// Exited processes that are remembered, at a kilobyte or less each.
const MAX_EXITED: usize = 16384;
/// Images that are remembered of one process number.
const MAX_IMAGES: usize = 8;
/// Mappings of code that are remembered of an image. The kernel does not log what is unmapped, so that
/// who maps code for ever would have the list grow for ever. Kept are the first half, which the program and
/// its libraries are in, and the newest ones.
const MAX_MAPPINGS: usize = 8192;
/// Files that are remembered before those are forgotten that no image has.
const MAX_FILES: usize = 16384;

/// A file, or other thing with a name, that code was mapped from.
#[derive(Debug)]
pub struct CodeFile {
    /// A number of ours, never given to another file.
    pub number: u32,
    /// Where it was first seen; inode 0 for what is no file.
    mapping: Mapping,
    /// The process that mapped it last, and when.
    seen: Cell<(u32, SystemTime)>,
    opened: RefCell<Opened>,
    build_id: OnceCell<Option<Vec<u8>>>,
}

/// Whether a file is open.
#[derive(Debug)]
enum Opened {
    /// Not at present.
    No,
    /// Held open, and counted in [`HELD`].
    Held(Rc<MappedFile>),
    /// The file cannot be found any more, or there is none.
    Never,
}

/// Files that are held open.
static HELD: AtomicUsize = AtomicUsize::new(0);

/// How many files are held open at most: half of what this process may open. The rest is for what is opened
/// for a moment, and for probes, maps and copies of symbols.
fn most_held() -> usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    *MOST.get_or_init(|| {
        let (limit, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((1024, 1024));
        usize::try_from(limit / 2).unwrap_or(usize::MAX)
    })
}

impl Drop for CodeFile {
    fn drop(&mut self) {
        if let Opened::Held(_) = self.opened.get_mut() {
            HELD.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl CodeFile {
    /// The file's name without folders, escaped; a name such as `[vdso]`; or empty.
    pub fn module(&self) -> String {
        self.mapping.module()
    }

    /// The file's path in the mount namespace of the process that has it, escaped; a name such as
    /// `[vdso]`; or empty.
    pub fn path(&self) -> String {
        text::escape_bytes(self.mapping.path.as_os_str().as_bytes())
    }

    /// The file's build id, if it has one. Read at the first call.
    pub fn build_id(&self) -> Option<&[u8]> {
        let read = || elf::build_id(self.open()?.file());
        self.build_id.get_or_init(read).as_deref()
    }

    /// The file's path as it was mapped, not escaped.
    pub fn raw_path(&self) -> &Path {
        &self.mapping.path
    }

    /// The process that mapped it last.
    pub fn last_pid(&self) -> u32 {
        self.seen.get().0
    }

    /// Whether its code was generated: there is no file, or one that only holds it (memfd).
    pub fn is_generated(&self) -> bool {
        let path = self.mapping.path.to_string_lossy();
        (self.mapping.inode == 0 && !path.starts_with('[')) || path.starts_with("/memfd:")
    }

    /// The open file; None if it is no file, or cannot be found any more. Opened at the first call and
    /// then held open, for its descriptor to name it; or, where as many are as may be, at each call.
    pub fn open(&self) -> Option<Rc<MappedFile>> {
        let mut opened = self.opened.borrow_mut();
        match &*opened {
            Opened::Held(file) => return Some(Rc::clone(file)),
            Opened::Never => return None,
            Opened::No => {}
        }
        let Some(file) = self.find() else {
            *opened = Opened::Never;
            return None;
        };
        let file = Rc::new(file);
        if HELD.fetch_add(1, Ordering::Relaxed) < most_held() {
            *opened = Opened::Held(Rc::clone(&file));
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
        // Another file may be there now, even with the same inode number.
        (changed(&file).ok()? <= time).then_some(file)
    }
}

/// When the file or its inode was changed last.
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

/// Some of a file's code, at some addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedCode {
    /// Addresses, in bytes.
    pub range: Range<u64>,
    /// Byte of the file that `range.start` shows.
    pub file_offset: u64,
    /// The file.
    pub file: Rc<CodeFile>,
}

/// What a process could execute from one exec to the next.
#[derive(Debug, Clone, Default)]
pub struct Image {
    /// Mappings of code in the order in which they were made; a later one covers an earlier one.
    code: Rc<Vec<MappedCode>>,
    number: u64,
}

impl Image {
    /// The code that is at an address.
    pub fn find(&self, address: u64) -> Option<&MappedCode> {
        self.code
            .iter()
            .rev()
            .find(|code| code.range.contains(&address))
    }

    /// The code of the program itself, which is mapped before its libraries, and below them.
    pub fn program(&self) -> Option<&MappedCode> {
        let mut code = self.code.iter();
        code.find(|code| !code.file.is_generated())
    }

    /// Whether nothing is known of it.
    pub fn is_empty(&self) -> bool {
        self.code.is_empty()
    }

    /// The files that code is from, in the order in which they were mapped.
    pub fn files(&self) -> impl Iterator<Item = Rc<CodeFile>> {
        self.code.iter().map(|code| Rc::clone(&code.file))
    }

    /// Whether it has generated code.
    pub fn generates_code(&self) -> bool {
        self.code.iter().any(|code| code.file.is_generated())
    }
}

/// Whose images are remembered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Images of the processes that are chosen.
    Chosen,
    /// The processes, those that they start, and so on.
    Descendants,
    /// Images of all processes.
    All,
}

/// The images of processes.
pub struct AddressSpaces {
    wanted: Wanted,
    chosen: HashSet<u32>,
    /// By process number, oldest first.
    images: HashMap<u32, Vec<Image>>,
    files: HashMap<(FileId, PathBuf), Rc<CodeFile>>,
    max_files: usize,
    files_met: u32,
    /// Process numbers in the order in which they exited, each with its last image.
    exited: VecDeque<(u32, u64)>,
    images_made: u64,
    forgotten_processes: u64,
    forgotten_mappings: u64,
}

impl AddressSpaces {
    /// No images yet, of the processes that are `wanted`; the chosen ones are named later.
    pub fn of(wanted: Wanted) -> Self {
        Self {
            wanted,
            chosen: HashSet::new(),
            images: HashMap::new(),
            files: HashMap::new(),
            max_files: MAX_FILES,
            files_met: 0,
            exited: VecDeque::new(),
            images_made: 0,
            forgotten_processes: 0,
            forgotten_mappings: 0,
        }
    }

    /// Remembers from now on what this process maps.
    pub fn choose(&mut self, pid: u32) {
        self.chosen.insert(pid);
    }

    /// Remembers what a running process has mapped.
    ///
    /// # Errors
    /// If the mappings of the process cannot be read.
    pub fn look_at(&mut self, process: &Process) -> Result<()> {
        let pid = process.pid();
        let mappings = process.mappings()?;
        self.begin_image(pid, Rc::default());
        for mapping in mappings.into_iter().filter(|mapping| mapping.executable) {
            self.map(pid, mapping);
        }
        Ok(())
    }

    /// Remembers what all processes have mapped that run now and are not known yet.
    pub fn look_at_all(&mut self) {
        let own_pid = std::process::id();
        for pid in proc::all().unwrap_or_default() {
            if pid != own_pid
                && !self.images.contains_key(&pid)
                && let Ok(process) = Process::open(pid)
            {
                // One that is gone has nothing to be remembered.
                let _ = self.look_at(&process);
            }
        }
    }

    /// Takes note of what a process has done.
    pub fn apply(&mut self, change: Change) {
        if let Change::Forked(parent, child) = change
            && self.wanted == Wanted::Descendants
        {
            if self.chosen.contains(&parent) {
                self.choose(child);
            } else {
                self.chosen.remove(&child);
            }
        }
        let wanted = |pid| self.wanted == Wanted::All || self.chosen.contains(pid);
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
        if let Some(image) = self
            .images
            .get_mut(&pid)
            .and_then(|images| images.last_mut())
        {
            let code = Rc::make_mut(&mut image.code);
            // What it covers is gone, as when generated code is made executable once more.
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
            // Not again for each new file, if they are all in use.
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
                    opened: RefCell::new(Opened::No),
                    build_id: OnceCell::new(),
                })
            });
        file.seen.set(seen);
        // The files of a few processes can be held open at once, and then have their names
        // whatever becomes of them. Those of all would keep file systems from being unmounted.
        if self.wanted != Wanted::All {
            file.open();
        }
        Rc::clone(file)
    }

    /// Keeps the images of a process that has exited, until there are too many of them.
    fn retire(&mut self, pid: u32) {
        let Some(last) = self.images.get(&pid).and_then(|images| images.last()) else {
            return;
        };
        self.exited.push_back((pid, last.number));
        if self.exited.len() > MAX_EXITED {
            self.forget_oldest();
            self.forgotten_processes += 1;
        }
    }

    /// Forgets those that have exited, when all is named that they have done.
    pub fn forget_exited(&mut self) {
        while self.forget_oldest() {}
    }

    fn forget_oldest(&mut self) -> bool {
        let Some((pid, last)) = self.exited.pop_front() else {
            return false;
        };
        if let Some(images) = self.images.get_mut(&pid) {
            images.retain(|image| image.number > last);
            if images.is_empty() {
                self.images.remove(&pid);
            }
        }
        true
    }

    /// The image of a process that all these addresses are in, the newest if there are several; or
    /// the one that most are in. A process that is not known yet is looked at now.
    pub fn image_with(&mut self, pid: u32, addresses: &[u64]) -> Option<Image> {
        if !self.images.contains_key(&pid) && self.wanted == Wanted::All {
            let _ = Process::open(pid).and_then(|process| self.look_at(&process));
        }
        let missing = |image: &&Image| {
            let here = |address: &&u64| image.find(**address).is_none();
            addresses.iter().filter(here).count()
        };
        self.images
            .get(&pid)?
            .iter()
            .rev()
            .min_by_key(missing)
            .cloned()
    }

    /// The newest image of a process.
    pub fn newest_image(&self, pid: u32) -> Option<&Image> {
        self.images.get(&pid)?.last()
    }

    /// The newest image of each chosen process.
    pub fn chosen_images(&self) -> impl Iterator<Item = (u32, &Image)> {
        let chosen = self.chosen.iter();
        chosen.filter_map(|pid| Some((*pid, self.images.get(pid)?.last()?)))
    }

    /// The newest image of each process whose images are remembered for its own sake.
    pub fn wanted_images(&self) -> impl Iterator<Item = (u32, &Image)> {
        let wanted = |pid| self.wanted == Wanted::All || self.chosen.contains(pid);
        let images = self.images.iter().filter(move |(pid, _)| wanted(pid));
        images.filter_map(|(&pid, images)| Some((pid, images.last()?)))
    }

    /// Exited processes whose images were forgotten.
    pub fn forgotten_processes(&self) -> u64 {
        self.forgotten_processes
    }

    /// Mappings of code that were forgotten, as their process has more than are remembered. Some of them may
    /// have been unmapped before.
    pub fn forgotten_mappings(&self) -> u64 {
        self.forgotten_mappings
    }
}

#[cfg(test)]
mod tests;
