//! Separate debug files: files with the symbols and source lines that were split from a program or library.
//!
//! | where | who puts it there |
//! |---|---|
//! | `/usr/lib/debug/.build-id/ab/cdef.debug` | packages such as `libc6-dbg` and `glibc-debuginfo` |
//! | the name in `.gnu_debuglink`, beside the file, in `.debug`, or below `/usr/lib/debug` | `objcopy --add-gnu-debuglink` |
//! | `.gnu_debugdata` in the file itself: symbols only | Fedora |
//! | FILE`.dwp` | `dwp`, for programs built with `-gsplit-dwarf` |
//! | the name in `.gnu_debugaltlink` | `dwz`, for what the files of a package have in common |
//! | a server, by build id | [`debuginfod`](super::debuginfod) |
//!
//! Each path is tried in the root directory of the process that has the file mapped, which can be a container's, and in
//! ours. The file found there must have the same build id, or the checksum that the link names.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use flate2::Crc;
use lzma_rust2::XzReader;
use object::elf as raw;

use crate::code::elf::CodeSegment;
use crate::code::elf_file::{Elf, Source, c_string, read_at};
use crate::code::limits;
use crate::print::text;
use crate::process::address_space::CodeFile;
use crate::process::mapped_file;
use crate::stacks::debuginfod::Debuginfod;

/// Directory in which distributions install separate debug files.
const INSTALLED: &str = "/usr/lib/debug";
/// Maximum size in bytes of a section with a link: a name, and a checksum or build id.
const MAX_LINK: u64 = 4096;
/// Maximum size in bytes of `.gnu_debugdata`, which is compressed.
const MAX_COMPRESSED: u64 = 16 << 20;
/// Maximum memory to decompress `.gnu_debugdata`, in KiB.
const MAX_DICTIONARY_KB: u32 = 64 << 10;
/// Bytes of a file that are read at a time.
const CHUNK: usize = 1 << 20;

/// Files that hold the DWARF of a program or library.
#[derive(Debug)]
pub(crate) struct DebugInfo {
    /// Code segments that the DWARF describes.
    pub(crate) code: Vec<CodeSegment>,
    /// The file itself, or the debug file that was split from it.
    pub(crate) file: File,
    /// Package of split DWARF units (`.dwp`).
    pub(crate) package: Option<File>,
    /// Supplementary file with the DWARF that several files share (of dwz).
    pub(crate) supplement: Option<File>,
}

/// Location of the symbol table that covers all functions of a file.
pub(crate) enum SymbolSource {
    /// The file itself is to be read.
    Own,
    /// A separate debug file, or the file's `.gnu_debugdata`, has the symbols.
    Separate(Box<dyn Source>),
    /// No symbol table is found: the file is stripped, and only functions that other files can call have names.
    Missing,
}

/// A file, and its path in the root that it was found in.
type Found = (File, PathBuf);

/// Finder of separate debug files.
#[derive(Debug, Default)]
pub(crate) struct DebugFiles {
    /// Client of debuginfod servers, if they may be asked.
    pub(crate) debuginfod: Option<Debuginfod>,
}

impl DebugFiles {
    /// Finds the symbol table of a file.
    pub(crate) fn symbols(&mut self, code: &CodeFile, file: &File) -> SymbolSource {
        let Ok(elf) = Elf::read(file) else {
            return SymbolSource::Own;
        };
        if has_symbols(&elf) {
            return SymbolSource::Own;
        }
        if let Some((found, _)) = find_installed(code, &elf, has_symbols) {
            return SymbolSource::Separate(Box::new(found));
        }
        if let Some(own) = own_symbols(&elf) {
            return SymbolSource::Separate(Box::new(own));
        }
        match self.fetched(code, &elf) {
            Some((fetched, _)) => SymbolSource::Separate(Box::new(fetched)),
            None => SymbolSource::Missing,
        }
    }

    /// Opens the files that hold the DWARF of a file. Returns None if there is no DWARF.
    pub(crate) fn debug_info(&mut self, code: &CodeFile, file: &File) -> Option<DebugInfo> {
        let elf = Elf::read(file).ok()?;
        let (file, path) = if has_lines(&elf) {
            (file.try_clone().ok()?, code.raw_path().to_owned())
        } else {
            find_installed(code, &elf, has_lines).or_else(|| self.fetched(code, &elf))?
        };
        let package = [path.as_path(), code.raw_path()].into_iter();
        let mut package = package.filter_map(|path| open(code, &with_suffix(path, ".dwp")));
        let package = package.next();
        let supplement = supplement(code, &Elf::read(&file).ok()?, &path);
        Some(DebugInfo {
            code: elf.code().ok()?,
            file,
            package,
            supplement,
        })
    }

    fn fetched(&mut self, code: &CodeFile, elf: &Elf<'_>) -> Option<Found> {
        let debuginfod = self.debuginfod.as_mut()?;
        let build_id = elf.build_id()?;
        let path = debuginfod.find(&build_id, code.module())?;
        let file = mapped_file::open_regular(&path).ok()?;
        (Elf::read(&file).ok()?.build_id()? == build_id).then_some((file, path))
    }
}

fn has_symbols(elf: &Elf<'_>) -> bool {
    let table = elf.symbol_table(raw::SHT_SYMTAB);
    table.is_some_and(|(symbols, _)| symbols.size > 0)
}

fn has_lines(elf: &Elf<'_>) -> bool {
    elf.has_debug(".debug_line")
}

/// Finds the installed debug file that was split from a file and has what `wanted` checks for.
fn find_installed(
    code: &CodeFile,
    elf: &Elf<'_>,
    wanted: impl Fn(&Elf<'_>) -> bool,
) -> Option<Found> {
    let build_id = elf.build_id();
    let by_build_id = build_id.as_deref().and_then(build_id_path);
    let by_build_id = by_build_id.into_iter().map(|path| (path, None));
    let by_link = debug_link(elf).map(|(name, checksum)| {
        let paths = linked_paths(code.raw_path(), &name).into_iter();
        paths.map(move |path| (path, Some(checksum)))
    });
    let mut candidates = by_build_id.chain(by_link.into_iter().flatten());
    candidates.find_map(|(path, checksum)| {
        let file = open(code, &path)?;
        let debug = Elf::read(&file).ok()?;
        let is_it = match (&build_id, debug.build_id()) {
            (Some(own), Some(others)) => *own == others,
            _ => checksum.is_some_and(|told| checksum_of(&file).is_ok_and(|sum| sum == told)),
        };
        let is_wanted = is_it && wanted(&debug);
        drop(debug);
        is_wanted.then_some((file, path))
    })
}

/// Opens a path in the root directory of the process that has the file mapped, or in ours.
fn open(code: &CodeFile, path: &Path) -> Option<File> {
    let mut roots = mapped_file::roots(code.last_pid());
    roots.find_map(|root| mapped_file::open_installed(root, path).ok())
}

/// Returns the path of a debug file by build id: `/usr/lib/debug/.build-id/ab/cdef.debug`.
fn build_id_path(build_id: &[u8]) -> Option<PathBuf> {
    let (first, rest) = build_id
        .split_first()
        .filter(|(_, rest)| !rest.is_empty())?;
    let rest = text::hex(rest);
    Some(format!("{INSTALLED}/.build-id/{first:02x}/{rest}.debug").into())
}

/// Returns the name in `.gnu_debuglink`, and the checksum of the file with that name.
fn debug_link(elf: &Elf<'_>) -> Option<(Vec<u8>, u32)> {
    let link = elf
        .contents(elf.section(".gnu_debuglink")?, MAX_LINK)
        .ok()?;
    let name = c_string(&link)?.to_vec();
    let checksum = u32::from_le_bytes(*link.get(name.len()..)?.last_chunk()?);
    // The link must be a file name without a directory.
    (!name.is_empty() && !name.contains(&b'/')).then_some((name, checksum))
}

fn linked_paths(program: &Path, name: &[u8]) -> Vec<PathBuf> {
    let folder = program.parent().unwrap_or(Path::new("/"));
    let name = OsStr::from_bytes(name);
    let below = folder.strip_prefix("/").unwrap_or(folder);
    vec![
        folder.join(name),
        folder.join(".debug").join(name),
        Path::new(INSTALLED).join(below).join(name),
    ]
}

/// Computes the CRC-32 of a whole file.
fn checksum_of(file: &File) -> Result<u32> {
    let deadline = limits::Deadline::start();
    let length = file.metadata()?.len();
    let mut sum = Crc::new();
    for start in (0..length).step_by(CHUNK) {
        deadline.check()?;
        let bytes = read_at(file, start, CHUNK.min((length - start) as usize))?;
        sum.update(&bytes);
    }
    Ok(sum.sum())
}

/// Decompresses the symbols in `.gnu_debugdata`: an ELF file, compressed by xz.
fn own_symbols(elf: &Elf<'_>) -> Option<Vec<u8>> {
    let section = elf.section(".gnu_debugdata")?;
    let compressed = elf.contents(section, MAX_COMPRESSED).ok()?;
    uncompress(&compressed).ok()
}

fn uncompress(compressed: &[u8]) -> Result<Vec<u8>> {
    let deadline = limits::Deadline::start();
    let mut reader = XzReader::new_mem_limit(compressed, false, MAX_DICTIONARY_KB);
    let mut bytes = Vec::new();
    loop {
        deadline.check()?;
        let before = bytes.len();
        (&mut reader).take(CHUNK as u64).read_to_end(&mut bytes)?;
        if bytes.len() == before {
            return Ok(bytes);
        }
        ensure!(bytes.len() <= limits::MAX_MEMORY, "it is too large");
    }
}

/// Opens the supplementary file, to which dwz has moved DWARF that several files share.
fn supplement(code: &CodeFile, elf: &Elf<'_>, path: &Path) -> Option<File> {
    let link = elf.contents(elf.section(".gnu_debugaltlink")?, MAX_LINK);
    let link = link.ok()?;
    let name = c_string(&link)?;
    let build_id = link.get(name.len() + 1..)?;
    let folder = path.parent().unwrap_or(Path::new("/"));
    let named = folder.join(OsStr::from_bytes(name));
    let mut candidates = build_id_path(build_id).into_iter().chain([named]);
    candidates.find_map(|path| {
        let file = open(code, &path)?;
        let is_it = Elf::read(&file).ok()?.build_id()? == build_id;
        is_it.then_some(file)
    })
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}
