//! The tables of all processes that were asked about: which code each has mapped, and where the
//! rules for it are.
//!
//! Rules are kept once for each file, whatever number of processes have it mapped. A process's
//! mappings are written anew at each change, and then its entry is replaced, so that a program sees
//! the old list or the new one. Children have their parents' entries (the kernel half copies them),
//! so a list is given back only when no entry is left that names it.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapHandle};

use super::rules::Rules;
use super::store::Store;
use crate::process::{MappedFile, Mapping, Process};

/// Mappings of code that are kept of a process; the kernel half finds one among 8191.
const MAX_MAPPINGS: usize = 8191;
/// Lists beyond those in use, from which on they are looked through for some to give back.
const SPARE_LISTS: usize = 256;
/// Instead of a table, where there was no room for it.
const UNWIND_TABLE_LEFT_OUT: u64 = 1;
/// The vdso is two pages long, or some more.
const MAX_VDSO: u64 = 1 << 20;

/// What became of a refresh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refreshed {
    Changed,
    /// As it was before.
    Same,
    /// The process has gone.
    Gone,
}

pub(super) struct Tables {
    store: Store,
    /// The skeleton's map `unwind_processes`.
    entries: MapHandle,
    files: HashMap<FileKey, Arc<CodeFile>>,
    vdso: Option<Arc<CodeFile>>,
    processes: HashMap<u32, Known>,
    /// By first word.
    lists: HashMap<u32, List>,
    /// Names of files by their number; 0 is code that was generated.
    names: Vec<String>,
    generation: u16,
    /// Files for whose rules there was no room.
    no_room: u64,
}

/// Device, inode, time of change, size.
type FileKey = (u64, u64, i64, i64, u64);

/// A file with its rules in the store.
struct CodeFile {
    number: u32,
    /// All its words; none without rules.
    words: Range<u32>,
    /// Where in `words` the index begins.
    pages: Range<u32>,
    /// There was no room for its rules.
    left_out: bool,
    first_page: u32,
    /// Of the executable segments: bytes of the file, and the address of the first.
    segments: Vec<(Range<u64>, u64)>,
}

/// A process as it was last seen.
struct Known {
    mappings: Vec<(Mapping, Arc<CodeFile>)>,
    pages: u64,
    list: u32,
}

/// A list of mappings in the store.
struct List {
    words: Range<u32>,
    /// Held, so that their rules stay.
    _files: Vec<Arc<CodeFile>>,
}

impl Tables {
    pub(super) fn new(store: Store, entries: MapHandle) -> Self {
        Self {
            store,
            entries,
            files: HashMap::new(),
            vdso: None,
            processes: HashMap::new(),
            lists: HashMap::new(),
            names: vec!["generated code".to_owned()],
            generation: 0,
            no_room: 0,
        }
    }

    /// Bytes of memory in the kernel.
    pub(super) fn bytes(&self) -> usize {
        self.store.bytes()
    }

    /// Files whose rules are there.
    pub(super) fn files(&self) -> usize {
        self.files
            .values()
            .filter(|file| !file.words.is_empty())
            .count()
    }

    /// Files for whose rules there was no room.
    pub(super) fn no_room(&self) -> u64 {
        self.no_room
    }

    /// How many words of tables a process's mappings refer to, and in how many files.
    pub(super) fn size_of(&self, pid: u32) -> (usize, usize) {
        let Some(known) = self.processes.get(&pid) else {
            return (0, 0);
        };
        let words: HashMap<u32, usize> = known
            .mappings
            .iter()
            .filter(|(_, file)| !file.words.is_empty())
            .map(|(_, file)| (file.number, file.words.len()))
            .collect();
        (words.values().sum(), words.len())
    }

    /// The name of a file.
    pub(super) fn name(&self, number: u32) -> &str {
        let name = self.names.get(number as usize);
        name.map_or("a file", String::as_str)
    }

    /// Keeps the rules of a file that is going to be mapped.
    pub(super) fn expect(&mut self, name: &str, file: &File) -> Result<()> {
        self.file(name, file).map(drop)
    }

    /// Looks at what a process has mapped, and publishes it if it has changed.
    pub(super) fn refresh(&mut self, pid: u32) -> Result<Refreshed> {
        let Ok(process) = Process::open(pid) else {
            return Ok(Refreshed::Gone);
        };
        let (Some(before), Ok(mut mappings)) = (pages_of_code(pid), process.mappings()) else {
            return Ok(Refreshed::Gone);
        };
        // As it changes them, a list can be of no moment at all: then we are asked again.
        let pages = match pages_of_code(pid) {
            Some(after) if after == before => after,
            Some(_) => u64::MAX >> 16,
            None => return Ok(Refreshed::Gone),
        };
        mappings.retain(|mapping| mapping.executable && is_code(mapping));
        mappings.truncate(MAX_MAPPINGS);

        let known = self.processes.remove(&pid);
        let entry = self.entry(pid)?;
        if let Some(known) = known {
            let same = known.mappings.len() == mappings.len()
                && known.mappings.iter().map(|(old, _)| old).eq(&mappings);
            let published = entry.is_some_and(|entry| entry as u32 == known.list);
            if same && published && known.pages == pages {
                self.processes.insert(pid, known);
                return Ok(Refreshed::Same);
            }
            let files = self.files_of(&process, mappings, &known.mappings);
            return self.publish(pid, pages, files);
        }
        let files = self.files_of(&process, mappings, &[]);
        self.publish(pid, pages, files)
    }

    /// The file of each mapping.
    fn files_of(
        &mut self,
        process: &Process,
        mappings: Vec<Mapping>,
        known: &[(Mapping, Arc<CodeFile>)],
    ) -> Vec<(Mapping, Arc<CodeFile>)> {
        let mut files = Vec::with_capacity(mappings.len());
        for mapping in mappings {
            let old = known.iter().find(|(old, _)| *old == mapping);
            let file = match old {
                Some((_, file)) => Arc::clone(file),
                None => self.file_of(process, &mapping),
            };
            files.push((mapping, file));
        }
        files
    }

    fn file_of(&mut self, process: &Process, mapping: &Mapping) -> Arc<CodeFile> {
        if mapping.path.as_os_str() == "[vdso]" {
            if let Some(vdso) = &self.vdso {
                return Arc::clone(vdso);
            }
            let image = read_memory(process.pid(), &mapping.range);
            let vdso = self.load("[vdso]", image.and_then(|image| Rules::of_image(&image)));
            self.vdso = Some(Arc::clone(&vdso));
            return vdso;
        }
        if mapping.inode == 0 || mapping.path.to_string_lossy().starts_with("/memfd:") {
            return Arc::new(CodeFile::generated());
        }
        let name = mapping.module();
        let loaded = MappedFile::open(process.pid(), mapping)
            .context("failed to open it")
            .and_then(|file| self.file(&name, &file.file));
        loaded.unwrap_or_else(|_| Arc::new(CodeFile::generated()))
    }

    fn file(&mut self, name: &str, file: &File) -> Result<Arc<CodeFile>> {
        let meta = file.metadata()?;
        let key = (
            meta.dev(),
            meta.ino(),
            meta.mtime(),
            meta.mtime_nsec(),
            meta.len(),
        );
        if let Some(file) = self.files.get(&key) {
            return Ok(Arc::clone(file));
        }
        let file = self.load(name, Rules::of_file(file));
        self.files.insert(key, Arc::clone(&file));
        Ok(file)
    }

    /// Puts rules into the store.
    fn load(&mut self, name: &str, rules: Result<Rules>) -> Arc<CodeFile> {
        let number = self.names.len() as u32;
        self.names.push(name.to_owned());
        let mut file = CodeFile {
            number,
            ..CodeFile::generated()
        };
        // A file that cannot be understood is one without rules; a stack that needs them says so.
        let Ok(rules) = rules else {
            return Arc::new(file);
        };
        let words = rules.rows.len() + rules.pages().len();
        let Ok(Some(first)) = self.put(&rules) else {
            file.left_out = words > 0;
            self.no_room += u64::from(file.left_out);
            return Arc::new(file);
        };
        file.first_page = rules.first_page();
        let pages = first + rules.rows.len() as u32;
        file.words = first..first + words as u32;
        file.pages = pages..file.words.end;
        file.segments = rules.segments;
        Arc::new(file)
    }

    /// Puts a file's rows and then its pages there, if there is room. Returns where.
    fn put(&mut self, rules: &Rules) -> Result<Option<u32>> {
        let (rows, pages) = (rules.rows.iter().copied(), rules.pages());
        let Some(first) = self.room(rows.len() + pages.len())? else {
            return Ok(None);
        };
        self.store.write(first, rows)?;
        let index = pages.map(|rows| {
            let count = u64::from(rows.end - rows.start);
            u64::from(first + rows.start) | count << 32
        });
        self.store.write(first + rules.rows.len() as u32, index)?;
        Ok(Some(first))
    }

    /// Room for so many words, of what is no longer used if need be.
    fn room(&mut self, words: usize) -> Result<Option<u32>> {
        if words == 0 {
            return Ok(None);
        }
        if let Some(first) = self.store.take(words)? {
            return Ok(Some(first));
        }
        self.collect(true)?;
        self.store.take(words)
    }

    fn publish(
        &mut self,
        pid: u32,
        pages: u64,
        mappings: Vec<(Mapping, Arc<CodeFile>)>,
    ) -> Result<Refreshed> {
        self.generation = self.generation.wrapping_add(1);
        let head = pages << 16 | u64::from(self.generation);
        let mut words = vec![head];
        words.extend(mappings.iter().map(|(mapping, _)| mapping.range.start));
        for (mapping, file) in &mappings {
            let base = file.base(mapping);
            words.extend([
                mapping.range.end,
                base.unwrap_or(0),
                file.table(base.is_some()),
                u64::from(file.first_page) | u64::from(file.number) << 32,
            ]);
        }
        let Some(first) = self.room(words.len())? else {
            return Ok(Refreshed::Same);
        };
        self.store.write(first, words.iter().copied())?;
        let entry =
            u64::from(first) | (mappings.len() as u64) << 32 | u64::from(self.generation) << 48;
        self.lists.insert(
            first,
            List {
                words: first..first + words.len() as u32,
                _files: mappings.iter().map(|(_, file)| Arc::clone(file)).collect(),
            },
        );
        self.store.settle()?;
        self.entries
            .update(&pid.to_ne_bytes(), &entry.to_ne_bytes(), MapFlags::ANY)
            .context("failed to publish a process's mappings")?;
        self.processes.insert(
            pid,
            Known {
                mappings,
                pages,
                list: first,
            },
        );
        if self.lists.len() > 2 * self.processes.len() + SPARE_LISTS {
            self.collect(false)?;
        }
        Ok(Refreshed::Changed)
    }

    /// Gives back the lists that no process has any more, and, if room is needed, the rules of
    /// files that nobody has mapped.
    fn collect(&mut self, files_too: bool) -> Result<()> {
        // An entry that is copied while we look at all of them can be missed once: a program that
        // copies it has ended when we look again.
        let mut used = self.lists_in_use()?;
        self.store.synchronize()?;
        used.extend(self.lists_in_use()?);
        let store = &mut self.store;
        self.lists.retain(|first, list| {
            let keep = used.contains(first);
            if !keep {
                store.give_back(list.words.clone());
            }
            keep
        });
        self.processes.retain(|_, known| used.contains(&known.list));
        if files_too {
            self.files.retain(|_, file| {
                // A list names it, or one that is being made.
                let keep = Arc::strong_count(file) > 1;
                if !keep {
                    store.give_back(file.words.clone());
                }
                keep
            });
        }
        Ok(())
    }

    fn lists_in_use(&self) -> Result<HashSet<u32>> {
        let mut used = HashSet::new();
        for key in self.entries.keys() {
            let entry = self.entries.lookup(&key, MapFlags::ANY);
            let entry = entry.context("failed to read the processes' entries")?;
            // One that is gone since has ended.
            used.extend(
                entry
                    .and_then(|entry| to_word(&entry))
                    .map(|entry| entry as u32),
            );
        }
        Ok(used)
    }

    fn entry(&self, pid: u32) -> Result<Option<u64>> {
        let entry = self.entries.lookup(&pid.to_ne_bytes(), MapFlags::ANY);
        let entry = entry.context("failed to read a process's entry")?;
        Ok(entry.and_then(|entry| to_word(&entry)))
    }
}

impl CodeFile {
    /// One without rules.
    fn generated() -> Self {
        Self {
            number: 0,
            words: 0..0,
            pages: 0..0,
            left_out: false,
            first_page: 0,
            segments: Vec::new(),
        }
    }

    /// Where the index is, as the kernel half is told of a mapping that is code of the file or is not.
    fn table(&self, is_code: bool) -> u64 {
        if self.left_out {
            UNWIND_TABLE_LEFT_OUT
        } else if is_code {
            u64::from(self.pages.start) | u64::from(self.pages.end - self.pages.start) << 32
        } else {
            0
        }
    }

    /// What is to be subtracted from an address in the mapping to have it in the file.
    fn base(&self, mapping: &Mapping) -> Option<u64> {
        let (bytes, address) = self.segments.iter().find(|(bytes, _)| {
            // Mappings are whole pages, segments are not.
            let page = bytes.start & !0xfff..bytes.end;
            page.contains(&mapping.file_offset)
        })?;
        let start = address.wrapping_add(mapping.file_offset.wrapping_sub(bytes.start));
        Some(mapping.range.start.wrapping_sub(start))
    }
}

/// Whether frames can be in it: not in the return probes' own page, whose addresses stand for
/// others, and the page of old system calls is the kernel's.
fn is_code(mapping: &Mapping) -> bool {
    !["[uprobes]", "[vsyscall]"].contains(&&*mapping.path.to_string_lossy())
}

/// How many pages of code a process has mapped, as the kernel counts them.
fn pages_of_code(pid: u32) -> Option<u64> {
    pages_in(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

/// The program's and the libraries'. Kernel threads have none.
fn pages_in(status: &str) -> Option<u64> {
    let kilobytes = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    Some((kilobytes("VmExe:")? + kilobytes("VmLib:")?) / 4)
}

fn read_memory(pid: u32, range: &Range<u64>) -> Result<Vec<u8>> {
    let length = (range.end - range.start).min(MAX_VDSO) as usize;
    let mut image = vec![0; length];
    File::open(format!("/proc/{pid}/mem"))
        .and_then(|memory| memory.read_exact_at(&mut image, range.start))
        .context("failed to read a process's memory")?;
    Ok(image)
}

fn to_word(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.try_into().ok()?))
}
