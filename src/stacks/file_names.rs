//! Names and source lines of the code in files that processes have mapped, within bounded memory.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::Result;

use crate::code::elf_file::NotElf;
use crate::code::lines::SourceLine;
use crate::code::symbols::Symbols;
use crate::host::packages;
use crate::print::demangle::demangle;
use crate::print::text;
use crate::process::address_space::CodeFile;
use crate::process::mapped_file::MappedFile;
use crate::stacks::debug_files::{DebugFiles, SymbolSource};
use crate::stacks::source_lines::SourceLines;

/// Maximum size of all cached symbol tables in bytes: enough for one of the largest.
const MAX_TABLES: usize = 64 << 20;
/// Maximum size of all cached names, in bytes.
const MAX_NAMES: usize = 16 << 20;
/// Maximum number of files that are reported to have no names: a process with many of them would fill the screen.
const MAX_TOLD: u32 = 16;
/// Maximum number of files without symbols that are remembered for the report about places without names.
const MAX_STRIPPED: usize = 1024;
/// Maximum number of places that are remembered for the report about places without names.
const MAX_UNNAMED: usize = 1 << 16;
/// Overhead of a cached name beside its text, in bytes.
const OVERHEAD: usize = 64;

/// A function's name, and an offset from its start.
#[derive(Debug, Clone)]
pub(crate) struct Named {
    /// The name, demangled and escaped.
    pub(crate) shown: Rc<str>,
    /// Mangled name as the file has it, not escaped; None if the name is not mangled.
    pub(crate) mangled: Option<Rc<str>>,
    pub(crate) offset: u64,
}

/// Names of functions by file and offset.
#[derive(Debug, Default)]
pub(crate) struct FileNames {
    /// Symbol tables by the file's number.
    tables: HashMap<u32, Table>,
    table_bytes: usize,
    /// Cached names by the file's number and the offset in the file.
    names: HashMap<(u32, u64), Option<Named>>,
    name_bytes: usize,
    uses: u64,
    warnings: u32,
    /// Finder of separate debug files.
    pub(crate) debug_files: DebugFiles,
    lines: SourceLines,
    /// Stripped files by their numbers.
    stripped: HashMap<u32, StrippedFile>,
    /// Number of places without names in all stripped files.
    unnamed: usize,
    /// Whether places without names were omitted, as [`MAX_UNNAMED`] are remembered.
    has_more_unnamed: bool,
}

/// A stripped file, with its places without names.
#[derive(Debug)]
struct StrippedFile {
    /// The file's name without directories, escaped.
    module: String,
    /// The file's path in the mount namespace of the process that has it mapped.
    path: PathBuf,
    /// The file's build id, in hexadecimal digits.
    build_id: Option<String>,
    /// Offsets in the file of the places that have no names.
    unnamed: HashSet<u64>,
}

impl StrippedFile {
    fn of(file: &CodeFile) -> Self {
        Self {
            module: file.module().to_string(),
            path: file.raw_path().to_owned(),
            build_id: file.build_id().map(text::hex),
            unnamed: HashSet::new(),
        }
    }
}

#[derive(Debug)]
struct Table {
    symbols: Symbols,
    used: u64,
}

impl FileNames {
    /// Returns the function at an offset in a file.
    pub(crate) fn find(&mut self, file: &CodeFile, offset: u64) -> Option<Named> {
        let key = (file.number, offset);
        if let Some(known) = self.names.get(&key) {
            return known.clone();
        }
        let name = self.look_up(file, offset);
        if name.is_none() {
            self.note_unnamed(file.number, offset);
        }
        let bytes_of =
            |name: &Named| name.shown.len() + name.mangled.as_ref().map_or(0, |name| name.len());
        let bytes = OVERHEAD + name.as_ref().map_or(0, bytes_of);
        if self.name_bytes + bytes > MAX_NAMES {
            self.names.clear();
            self.name_bytes = 0;
        }
        self.name_bytes += bytes;
        self.names.insert(key, name.clone());
        name
    }

    /// Counts a place without a name for the report, if the file is stripped and the place was not counted before.
    fn note_unnamed(&mut self, number: u32, offset: u64) {
        let Some(places) = self.stripped.get_mut(&number) else {
            return;
        };
        if self.unnamed < MAX_UNNAMED {
            self.unnamed += usize::from(places.unnamed.insert(offset));
        } else {
            self.has_more_unnamed |= !places.unnamed.contains(&offset);
        }
    }

    fn look_up(&mut self, file: &CodeFile, offset: u64) -> Option<Named> {
        if !self.tables.contains_key(&file.number) {
            let opened = file.open()?;
            let symbols = self.symbols(file, &opened).unwrap_or_else(|error| {
                self.tell(file, &error);
                Symbols::default()
            });
            self.keep(file.number, symbols);
        }
        self.uses += 1;
        let table = self.tables.get_mut(&file.number)?;
        table.used = self.uses;
        let name = table.symbols.find(offset)?;
        let demangled = match name.is_whole {
            true => demangle(&name.text),
            false => name.text.as_str().into(),
        };
        Some(Named {
            shown: text::display_name(&demangled).into(),
            mangled: (*demangled != *name.text).then(|| name.text.as_str().into()),
            offset: name.offset,
        })
    }

    fn symbols(&mut self, file: &CodeFile, opened: &MappedFile) -> Result<Symbols> {
        let own = || Symbols::of_file(opened.file());
        match self.debug_files.symbols(file, opened.file()) {
            SymbolSource::Own => own(),
            SymbolSource::Separate(debug) => {
                Symbols::of_split_file(opened.file(), &*debug).or_else(|_| own())
            }
            SymbolSource::Missing => {
                if self.stripped.len() < MAX_STRIPPED {
                    let places = StrippedFile::of(file);
                    self.stripped.entry(file.number).or_insert(places);
                }
                own()
            }
        }
    }

    /// Returns the stripped files that have places without names, those with the most places first.
    fn stripped(&self) -> Vec<&StrippedFile> {
        let mut stripped: Vec<_> = self.stripped.values().collect();
        stripped.retain(|places| !places.unnamed.is_empty());
        stripped.sort_by_key(|places| (Reverse(places.unnamed.len()), &places.path));
        stripped
    }

    /// Reports on stderr the stripped files with the most places without names, and how to get their symbols.
    pub(crate) fn report_stripped(&self) {
        const MAX_FILES: usize = 3;
        let stripped = self.stripped();
        if stripped.is_empty() {
            return;
        }
        let first = &stripped[..stripped.len().min(MAX_FILES)];
        let paths: Vec<&Path> = first.iter().map(|file| &*file.path).collect();
        let mut named: Vec<String> = Vec::new();
        for (file, package) in first.iter().zip(packages::of_files(&paths)) {
            let package = package.map(|name| format!("package {name}"));
            let build_id = file.build_id.as_ref().map(|id| format!("build id {id}"));
            let known: Vec<String> = package.into_iter().chain(build_id).collect();
            let known = match known.is_empty() {
                true => String::new(),
                false => format!(" ({})", known.join(", ")),
            };
            named.push(format!("{} in {}{known}", file.unnamed.len(), file.module));
        }
        if stripped.len() > MAX_FILES {
            let more = text::count_with_noun((stripped.len() - MAX_FILES) as u64, "other file");
            named.push(format!("the rest in {more}"));
        }
        let way = match self.debug_files.debuginfod {
            Some(_) => "install their debug symbols",
            None => "install their debug symbols, or fetch them with --debuginfod",
        };
        let at_least = match self.has_more_unnamed {
            true => "at least ",
            false => "",
        };
        let places = text::count_with_noun(self.unnamed as u64, "place");
        crate::message!(
            "{at_least}{places} in code without symbols: {}; for names {way}",
            named.join(", ")
        );
    }

    /// Returns the source lines of the instruction at an offset in a file, demangled and escaped: the innermost inlined
    /// call first. Returns none if they are not known.
    pub(crate) fn lines(&mut self, file: &CodeFile, offset: u64) -> Rc<[SourceLine]> {
        let debug_files = &mut self.debug_files;
        self.lines.find(file, offset, || {
            debug_files.debug_info(file, file.open()?.file())
        })
    }

    /// Reports on stderr why a file's functions have no names. Nothing is reported about a file that is not ELF.
    fn tell(&mut self, file: &CodeFile, error: &anyhow::Error) {
        if error.is::<NotElf>() || self.warnings == MAX_TOLD {
            return;
        }
        self.warnings += 1;
        crate::note!("no names for frames in {}: {error:#}", file.module());
        if self.warnings == MAX_TOLD {
            crate::note!("no names for frames in other files; further messages are suppressed");
        }
    }

    /// Caches a symbol table, and evicts the least recently used ones if there are too many bytes.
    fn keep(&mut self, number: u32, symbols: Symbols) {
        self.table_bytes += symbols.bytes();
        while self.table_bytes > MAX_TABLES
            && let Some(oldest) = self.least_used()
            && let Some(table) = self.tables.remove(&oldest)
        {
            self.table_bytes -= table.symbols.bytes();
        }
        let used = self.uses;
        self.tables.insert(number, Table { symbols, used });
    }

    fn least_used(&self) -> Option<u32> {
        let with_bytes = self
            .tables
            .iter()
            .filter(|(_, table)| table.symbols.bytes() > 0);
        let oldest = with_bytes.min_by_key(|(_, table)| table.used);
        oldest.map(|(&number, _)| number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::address_space::{AddressSpaces, TrackedProcesses};
    use crate::process::proc::Process;

    #[test]
    fn a_place_without_a_name_counts_once() {
        let pid = std::process::id();
        let mut spaces = AddressSpaces::of(TrackedProcesses::Chosen);
        let process = Process::open(pid).expect("we run");
        spaces.read_mappings(&process).expect("our mappings");
        let image = spaces.newest_image(pid).expect("our image");
        let file = &*image.program().expect("our program").file;

        let mut names = FileNames::default();
        names.keep(file.number, Symbols::default());
        names.stripped.insert(file.number, StrippedFile::of(file));
        for offset in [1, 2, 1] {
            assert!(names.find(file, offset).is_none());
            // Other names have taken the space.
            names.names.clear();
        }
        assert_eq!(names.stripped()[0].unnamed.len(), 2);
        assert_eq!((names.unnamed, names.has_more_unnamed), (2, false));

        names.unnamed = MAX_UNNAMED;
        names.note_unnamed(file.number, 1);
        assert!(!names.has_more_unnamed, "a known place");
        names.note_unnamed(file.number, 3);
        assert!(names.has_more_unnamed);
    }
}
