//! The unwind tables of all files that were looked at, and what the BPF side knows of them.
//!
//! The rules of a file are stored once, whatever number of processes have it mapped, and published for all of them.
//! When the memory is full, the files in which no rule was looked up for some time lose their tables. If that is not
//! enough, the tables that were used longest ago make space, but not those in use now: two programs that run at the same
//! time would take the memory from each other again and again.

use std::collections::{HashMap, HashSet};
use std::fs::{File, Metadata};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapHandle};

use super::publish::{Entry, Published, Publisher};
use super::rules::Rules;
use super::store::Store;
use super::worker::PendingFile;
use crate::bpf::types;
use crate::code::elf;
use crate::code::elf_file::NotElf;
use crate::print::clock;
use crate::process::proc::{FileId, Mapping, Process};

/// Value of `pages` in the entry of a file whose table did not fit.
const UNWIND_TABLE_LEFT_OUT: u64 = types::unwind_layout::UNWIND_TABLE_LEFT_OUT.0 as u64;
/// Bit of a file's number: generated code that calls the file keeps no frame pointers.
const UNWIND_SKIPS: u32 = 1 << types::unwind_layout::UNWIND_SKIPS_BIT.0;
/// Bit of a file's number: the file is HotSpot's.
const UNWIND_HOTSPOT: u32 = 1 << types::unwind_layout::UNWIND_HOTSPOT_BIT.0;
/// Bit of a file's number: the file holds an interpreter of Python.
const UNWIND_PYTHON: u32 = 1 << types::unwind_layout::UNWIND_PYTHON_BIT.0;
/// Largest number of a file, below the flags.
const MAX_NUMBER: u32 = UNWIND_SKIPS - 1;
/// Maximum size of the vdso in bytes. It has two pages, or some more.
const MAX_VDSO: u64 = 1 << 20;
/// Time without a lookup after which a file's table may be dropped. BPF programs look up each file that they use at
/// least every ten seconds.
const UNUSED: Duration = Duration::from_secs(30);
/// Time without a lookup after which a file's table may be dropped if the memory is needed for another one.
const NOT_IN_USE: Duration = Duration::from_secs(1);
/// Minimum time between two searches for unused tables.
const COLLECT_AGAIN: Duration = Duration::from_secs(5);

pub(super) struct Tables {
    store: Store,
    /// Whether HotSpot's generated code has frame pointers in all processes that are traced.
    hotspot_keeps_frame_pointers: bool,
    /// Publisher of the tables; None before load.
    publisher: Option<Publisher>,
    /// Files that were read before load, and are to be published.
    to_publish: Vec<(File, Arc<StoredFile>)>,
    files: HashMap<FileKey, Arc<StoredFile>>,
    /// Files by their device and inode in lists of mappings (/proc/PID/maps).
    by_file_id: HashMap<FileId, Arc<StoredFile>>,
    /// Names of files by their number, each followed by the error if the file cannot be parsed. Number 0 is generated
    /// code.
    names: HashMap<u32, String>,
    next_number: u32,
    /// The skeleton's map `unwind_files`; None before load.
    entries: Option<MapHandle>,
    collected: Option<Instant>,
    /// Files whose rules did not fit, now or before, with their names.
    no_room: HashMap<FileKey, String>,
}

/// Identity of a file: device, inode, modification time in seconds and nanoseconds, size.
type FileKey = (u64, u64, i64, i64, u64);

/// Key of the vdso, which is in no file.
const VDSO: FileKey = (0, 0, 0, 0, 0);

/// A file with its rules in the store.
#[derive(Debug, Default)]
struct StoredFile {
    number: u32,
    /// All words of the file; none without rules.
    words: Range<u32>,
    /// The part of `words` that is the index.
    pages: Range<u32>,
    first_page: u32,
    /// Whether the rules did not fit.
    left_out: bool,
}

impl Tables {
    pub(super) fn new(store: Store, hotspot_keeps_frame_pointers: bool) -> Self {
        Self {
            store,
            hotspot_keeps_frame_pointers,
            publisher: None,
            to_publish: Vec::new(),
            files: HashMap::new(),
            by_file_id: HashMap::new(),
            names: HashMap::from([(0, "generated code".to_owned())]),
            next_number: 1,
            entries: None,
            collected: None,
            no_room: HashMap::new(),
        }
    }

    /// Publishes the files that were read before, and from now on each file that is read.
    pub(super) fn publish_by(&mut self, publisher: Publisher, entries: MapHandle) -> Result<()> {
        self.publisher = Some(publisher);
        self.entries = Some(entries);
        for (file, code) in std::mem::take(&mut self.to_publish) {
            self.publish(&file, &code)?;
        }
        Ok(())
    }

    /// Returns the memory of the tables in the kernel, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.store.bytes()
    }

    /// Returns the number of files that have rules.
    pub(super) fn files(&self) -> usize {
        let has_rules = |file: &&Arc<StoredFile>| !file.words.is_empty();
        self.files.values().filter(has_rules).count()
    }

    /// Returns the number of words of the tables for these mappings, and the number of their files.
    pub(super) fn size_of(&self, mappings: &[Mapping]) -> (usize, usize) {
        let files = mappings.iter().filter(|mapping| is_code(mapping));
        let files = files.filter_map(|mapping| self.by_file_id.get(&mapping.file_id()));
        let files: HashMap<u32, usize> = files
            .filter(|file| !file.words.is_empty())
            .map(|file| (file.number, file.words.len()))
            .collect();
        (files.values().sum(), files.len())
    }

    /// Whether the file of a mapping was looked at, perhaps with other contents.
    pub(super) fn has_seen(&self, mapping: &Mapping) -> bool {
        self.by_file_id.contains_key(&mapping.file_id())
    }

    /// Returns the names of the files whose rules did not fit, now or before, sorted.
    pub(super) fn no_room(&self) -> Vec<String> {
        let mut names: Vec<_> = self.no_room.values().cloned().collect();
        names.sort_unstable();
        names
    }

    /// Returns the name of a file, followed by why it has no table if it cannot be parsed.
    pub(super) fn name(&self, number: u32) -> &str {
        let name = self.names.get(&number);
        name.map_or("a file", String::as_str)
    }

    /// Stores the rules of a file that is going to be mapped.
    pub(super) fn preload(&mut self, name: &str, file: &File) -> Result<()> {
        self.file(name, file, None, false).map(drop)
    }

    /// Stores the rules of a file that a process has mapped. `asked` means that a BPF program has requested the file,
    /// and so does not know it. Returns false if the file is no regular file, or cannot be looked at.
    pub(super) fn add_mapped_file(&mut self, waiting: PendingFile, asked: bool) -> Result<bool> {
        let PendingFile { mapping, file } = waiting;
        if mapping.path.to_string_lossy().starts_with("/memfd:") {
            self.by_file_id.insert(mapping.file_id(), Arc::default());
            self.publish(file.file(), &Arc::default())?;
            return Ok(true);
        }
        let id = Some(mapping.file_id());
        self.file(&mapping.module(), file.file(), id, asked)
    }

    fn file(&mut self, name: &str, file: &File, id: Option<FileId>, publish: bool) -> Result<bool> {
        let Ok(meta) = file.metadata() else {
            return Ok(false);
        };
        if !meta.is_file() {
            return Ok(false);
        }
        let key = key_of(&meta);
        if let Some(code) = self.files.get(&key) {
            let code = Arc::clone(code);
            self.by_file_id.extend(id.map(|id| (id, Arc::clone(&code))));
            if publish {
                self.publish(file, &code)?;
            }
            return Ok(true);
        }
        let mut flags = 0;
        let may_hold = elf::may_hold(file);
        if may_hold.hotspot {
            flags |= UNWIND_HOTSPOT;
            if !self.hotspot_keeps_frame_pointers {
                flags |= UNWIND_SKIPS;
            }
        }
        if may_hold.python {
            flags |= UNWIND_PYTHON;
        }
        let code = self.load(name, Rules::of_file(file), key, flags)?;
        self.files.insert(key, Arc::clone(&code));
        self.by_file_id.extend(id.map(|id| (id, Arc::clone(&code))));
        self.publish(file, &code)?;
        Ok(true)
    }

    /// Puts the rules of a file into the store. The file's number gets these flags.
    fn load(
        &mut self,
        name: &str,
        rules: Result<Rules>,
        key: FileKey,
        flags: u32,
    ) -> Result<Arc<StoredFile>> {
        let number = self.next_number | flags;
        self.next_number = (self.next_number % MAX_NUMBER) + 1;
        self.names.insert(number, name.to_owned());
        let mut file = StoredFile {
            number,
            ..StoredFile::default()
        };
        let rules = match rules.and_then(Rules::by_file_offset) {
            Ok(rules) => rules,
            // A file that cannot be parsed counts as one without rules. The summary gives the reason if a stack ends
            // there.
            Err(error) => {
                if !error.is::<NotElf>() {
                    self.names.insert(number, format!("{name}: {error:#}"));
                }
                return Ok(Arc::new(file));
            }
        };
        let words = rules.rows.len() + rules.pages().len();
        let Some(first) = self.put(&rules)? else {
            file.left_out = words > 0;
            if file.left_out {
                self.no_room.insert(key, name.to_owned());
            }
            return Ok(Arc::new(file));
        };
        file.first_page = rules.first_page();
        let pages = first + rules.rows.len() as u32;
        file.words = first..first + words as u32;
        file.pages = pages..file.words.end;
        Ok(Arc::new(file))
    }

    /// Writes a file's rows and then its pages to the store, if they fit. Returns the first word.
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

    /// Takes words of the store, and frees those of unused tables if need be. Returns the first word.
    fn room(&mut self, words: usize) -> Result<Option<u32>> {
        if words == 0 {
            return Ok(None);
        }
        if let Some(first) = self.store.allocate(words)? {
            return Ok(Some(first));
        }
        self.collect(words)?;
        self.store.allocate(words)
    }

    /// Publishes a file to the BPF side, or before load keeps it to be published later.
    fn publish(&mut self, file: &File, code: &Arc<StoredFile>) -> Result<()> {
        let Some(publisher) = &self.publisher else {
            let file = file.try_clone().context("failed to keep a file open")?;
            self.to_publish.push((file, Arc::clone(code)));
            return Ok(());
        };
        self.store.wait_for_shards()?;
        if publisher.file(file, code.entry())? == Published::NoRoom && self.collect(0)? {
            // If there is still no space, stacks are flagged, and BPF programs request the file again.
            if let Some(publisher) = &self.publisher {
                publisher.file(file, code.entry())?;
            }
        }
        Ok(())
    }

    /// Publishes the table of the vdso, which is the same in all processes, unless that was done.
    pub(super) fn publish_vdso(&mut self) -> Result<()> {
        if self.files.contains_key(&VDSO) {
            return Ok(());
        }
        let own = Process::open(std::process::id())?;
        let mappings = own.mappings()?;
        let is_vdso = |mapping: &&Mapping| mapping.path.as_os_str() == "[vdso]";
        let Some(vdso) = mappings.iter().find(is_vdso) else {
            return Ok(());
        };
        let rules = read_own(&vdso.range).and_then(|image| Rules::of_image(&image));
        let code = self.load("[vdso]", rules, VDSO, 0)?;
        self.store.wait_for_shards()?;
        if let Some(publisher) = &self.publisher {
            publisher.at(vdso.range.start, code.entry())?;
        }
        self.by_file_id.insert(vdso.file_id(), Arc::clone(&code));
        self.files.insert(VDSO, code);
        Ok(())
    }

    /// Whether there are files whose rules did not fit, which may fit later.
    pub(super) fn may_recover(&self) -> bool {
        self.files.values().any(|file| file.left_out)
    }

    /// Frees the tables of files that are no longer used, and, until `words` words are freed, further tables that are
    /// not in use now: those first that were used longest ago. BPF programs request the files again whose rules did not
    /// fit. Returns whether anything was freed.
    pub(super) fn collect(&mut self, words: usize) -> Result<bool> {
        let Some(entries) = &self.entries else {
            return Ok(false);
        };
        let recently = |time: &Instant| time.elapsed() < COLLECT_AGAIN;
        if self.collected.as_ref().is_some_and(recently) {
            return Ok(false);
        }
        self.collected = Some(Instant::now());
        let now = clock::monotonic_ns();
        let mut known = published(entries)?;
        known.sort_unstable_by_key(|(_, entry)| entry.used_ns);
        let sizes: HashMap<u32, usize> = self
            .files
            .values()
            .map(|file| (file.number, file.words.len()))
            .collect();
        let is_used_within = |time: Duration, entry: &types::unwind_file| {
            entry.used_ns.saturating_add(time.as_nanos() as u64) > now
        };
        let is_used = |entry: &types::unwind_file| is_used_within(UNUSED, entry);
        let mut freed = 0;
        let mut used = HashSet::new();
        for (_, entry) in &known {
            let is_needed = freed < words && !is_used_within(NOT_IN_USE, entry);
            if is_used(entry) && !is_needed {
                used.insert(entry.number);
            } else {
                freed += sizes.get(&entry.number).copied().unwrap_or(0);
            }
        }
        let is_vdso = |key: &FileKey| key.1 == 0;
        let kept = |key: &FileKey, file: &StoredFile| {
            (used.contains(&file.number) && !file.left_out) || is_vdso(key)
        };
        let keep: HashSet<u32> = self
            .files
            .iter()
            .filter(|(key, file)| kept(key, file))
            .map(|(_, file)| file.number)
            .collect();
        let mut more = false;
        for (key, entry) in &known {
            let keep = keep.contains(&entry.number) || (entry.number == 0 && is_used(entry));
            if !keep {
                entries
                    .delete(key)
                    .context("failed to take back a file's unwind table")?;
                more = true;
            }
        }
        if !more {
            return Ok(false);
        }
        // Afterwards, all programs that have found one of these entries have ended.
        self.store.synchronize()?;
        self.by_file_id
            .retain(|_, file| file.number != 0 && keep.contains(&file.number));
        let (store, names) = (&mut self.store, &mut self.names);
        self.files.retain(|_, file| {
            let keep = keep.contains(&file.number);
            if !keep {
                store.free(file.words.clone());
                names.remove(&file.number);
            }
            keep
        });
        Ok(true)
    }
}

impl StoredFile {
    /// Returns the file's entry for the BPF side.
    fn entry(&self) -> Entry {
        let pages = if self.left_out {
            UNWIND_TABLE_LEFT_OUT
        } else {
            u64::from(self.pages.start) | u64::from(self.pages.end - self.pages.start) << 32
        };
        Entry {
            pages,
            first_page: self.first_page,
            number: self.number,
        }
    }
}

/// Whether a mapping can have a table.
pub(super) fn is_code(mapping: &Mapping) -> bool {
    mapping.executable && (mapping.inode != 0 || mapping.path.as_os_str() == "[vdso]")
}

fn key_of(meta: &Metadata) -> FileKey {
    let changed = (meta.mtime(), meta.mtime_nsec());
    (meta.dev(), meta.ino(), changed.0, changed.1, meta.len())
}

/// Returns the published entries with their keys.
fn published(entries: &MapHandle) -> Result<Vec<(Vec<u8>, types::unwind_file)>> {
    let mut known = Vec::new();
    for key in entries.keys() {
        let entry = entries.lookup(&key, MapFlags::ANY);
        if let Some(entry) = entry.context("failed to read which unwind tables are used")? {
            known.push((key, *types::view(&entry)?));
        }
    }
    Ok(known)
}

fn read_own(range: &Range<u64>) -> Result<Vec<u8>> {
    let length = (range.end - range.start).min(MAX_VDSO) as usize;
    let mut image = vec![0; length];
    File::open("/proc/self/mem")
        .and_then(|memory| memory.read_exact_at(&mut image, range.start))
        .context("failed to read our own memory")?;
    Ok(image)
}

#[cfg(test)]
pub(super) mod tests;
