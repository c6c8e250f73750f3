//! Parser for ELF files, which may belong to any user: headers, symbols and relocations.
//!
//! Nothing is mapped: a file that is cut short by its owner would end the process (SIGBUS), and a file that changes
//! meanwhile could be read twice with different results. Each part is read once, into memory of our own, within the
//! [limits].

mod source;

use std::collections::HashMap;
use std::fmt;

use anyhow::{Context, Result, bail, ensure};
use object::elf as raw;
use object::pod::{Pod, from_bytes, slice_from_all_bytes};
use object::read::elf::{FileHeader, ProgramHeader, Rela, SectionHeader, Sym};
use object::{Endianness, elf::FileHeader32, elf::FileHeader64};

use crate::code::elf::CodeSegment;
use crate::code::limits::{self, Deadline};

pub use source::Source;
pub(crate) use source::read_at;

/// Bytes of a table that are read at a time.
const CHUNK: usize = 1 << 20;

/// Error for a file that is no ELF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotElf;

impl fmt::Display for NotElf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not an ELF file")
    }
}

impl std::error::Error for NotElf {}

/// A segment of an ELF file, whose address and offset do not wrap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) kind: raw::ProgramType,
    pub(crate) executable: bool,
    /// The first byte's address in the file's own address space.
    pub(crate) address: u64,
    pub(crate) file_offset: u64,
    /// Bytes of the segment that are in the file.
    pub(crate) size: u64,
    /// Bytes of the segment in memory. Bytes behind those in the file begin as zeros (bss).
    pub(crate) memory_size: u64,
}

/// A section of an ELF file, whose place in the file does not wrap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Section {
    pub(crate) name: Vec<u8>,
    pub(crate) kind: raw::SectionType,
    pub(crate) address: u64,
    pub(crate) file_offset: u64,
    pub(crate) size: u64,
    /// The index of the section that this section refers to.
    link: u32,
}

/// A symbol of a function or variable that is defined.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Symbol {
    /// The offset of the symbol's name among the names.
    pub(crate) name: u32,
    pub(crate) address: u64,
    pub(crate) size: u64,
    pub(crate) local: bool,
    /// Whether the symbol is a resolver (IFUNC), whose code chooses the function, and is not the function.
    pub(crate) is_ifunc: bool,
}

/// An ELF file's headers, and where its parts are read from.
pub(crate) struct Elf<'a> {
    source: &'a dyn Source,
    endian: Endianness,
    is_64: bool,
    pub(crate) segments: Vec<Segment>,
    /// Sections, indexed as in the file. An invalid section is empty.
    pub(crate) sections: Vec<Section>,
    pub(crate) deadline: Deadline,
}

impl<'a> Elf<'a> {
    /// Reads the headers. If the section headers are inconsistent, the file counts as one without sections: a program
    /// runs without them.
    ///
    /// # Errors
    /// If it is no ELF file, or its segments are over the limits.
    pub(crate) fn read(source: &'a dyn Source) -> Result<Self> {
        const CLASS: usize = 4;
        let ident = read_at(source, 0, size_of::<raw::Ident>()).map_err(|_| NotElf)?;
        match ident[CLASS] {
            1 => Self::read_as::<FileHeader32<Endianness>>(source),
            _ => Self::read_as::<FileHeader64<Endianness>>(source),
        }
    }

    fn read_as<Header: FileHeader<Endian = Endianness>>(source: &'a dyn Source) -> Result<Self> {
        let bytes = read_at(source, 0, size_of::<Header>()).map_err(|_| NotElf)?;
        let (header, _) = from_bytes::<Header>(&bytes).map_err(|()| NotElf)?;
        ensure!(header.is_supported(), NotElf);
        let endian = header.endian().map_err(|_| NotElf)?;
        let count = usize::from(header.e_phnum(endian));
        ensure!(
            count <= limits::MAX_SEGMENTS,
            "it has more than {} segments",
            limits::MAX_SEGMENTS
        );
        let length = count * size_of::<Header::ProgramHeader>();
        let bytes = read_at(source, header.e_phoff(endian).into(), length)
            .context("failed to read its segments")?;
        let headers = slice_from_all_bytes::<Header::ProgramHeader>(&bytes).unwrap_or_default();
        let segments = headers.iter().map(|header| Segment {
            kind: header.p_type(endian),
            executable: header.p_flags(endian).contains(raw::PF_X),
            address: header.p_vaddr(endian).into(),
            file_offset: header.p_offset(endian).into(),
            size: header.p_filesz(endian).into(),
            memory_size: header.p_memsz(endian).into(),
        });
        Ok(Self {
            source,
            endian,
            is_64: header.is_type_64(),
            segments: segments.filter(Segment::makes_sense).collect(),
            sections: sections(source, header, endian).unwrap_or_default(),
            deadline: Deadline::start(),
        })
    }

    /// Checks that this is a 64-bit file.
    ///
    /// # Errors
    /// If the file is of another word size.
    pub(crate) fn require_64_bit(self) -> Result<Self> {
        ensure!(self.is_64, "not a 64-bit ELF file");
        Ok(self)
    }

    /// The section of this name.
    pub(crate) fn section(&self, name: &str) -> Option<&Section> {
        let mut sections = self.sections.iter();
        sections.find(|section| section.name == name.as_bytes() && section.size > 0)
    }

    /// Returns the contents of a section.
    ///
    /// # Errors
    /// If the section has more than `limit` bytes, or the file ends before it does.
    pub(crate) fn contents(&self, section: &Section, limit: u64) -> Result<Vec<u8>> {
        let name = || section.name.escape_ascii().to_string();
        ensure!(
            section.size <= limit,
            "its {} has {} MiB, and {} is the limit",
            name(),
            section.size >> 20,
            limit >> 20
        );
        self.bytes(section.file_offset, section.size as usize)
            .with_context(|| format!("failed to read its {}", name()))
    }

    /// Reads `length` bytes of the file from `offset` on.
    pub(crate) fn bytes(&self, offset: u64, length: usize) -> Result<Vec<u8>> {
        read_at(self.source, offset, length)
    }

    /// Returns the parts that are mapped to be executed.
    ///
    /// # Errors
    /// If the parts are larger than any program's code.
    pub(crate) fn code(&self) -> Result<Vec<CodeSegment>> {
        let loaded = self.segments.iter().filter(|segment| segment.is_loaded());
        let code: Vec<CodeSegment> = loaded
            .filter(|segment| segment.executable)
            .map(|segment| CodeSegment {
                address: segment.address,
                file_offset: segment.file_offset,
                size: segment.size,
            })
            .collect();
        let sum = |sum: u64, segment: &CodeSegment| sum.saturating_add(segment.size);
        ensure!(
            code.iter().fold(0, sum) <= limits::MAX_CODE,
            "it has more than {} MiB of code",
            limits::MAX_CODE >> 20
        );
        Ok(code)
    }

    /// Converts a virtual address to an offset in the file.
    pub(crate) fn file_offset(&self, address: u64) -> Option<u64> {
        let mut loaded = self.segments.iter().filter(|segment| segment.is_loaded());
        loaded.find_map(|segment| {
            let within = address.checked_sub(segment.address)?;
            (within < segment.size).then_some(segment.file_offset + within)
        })
    }

    /// Whether the file has a section of this name, or of its `.zdebug` name, under which debug information was first
    /// compressed.
    pub(crate) fn has_debug(&self, name: &str) -> bool {
        let compressed = name.replacen(".debug", ".zdebug", 1);
        self.section(name).is_some() || self.section(&compressed).is_some()
    }

    /// Returns the build id, which the linker made of the file's contents.
    pub(crate) fn build_id(&self) -> Option<Vec<u8>> {
        /// Bytes of the note: its header, "GNU", and a hash.
        const MAX_NOTE: u64 = 4096;
        const HEADER: [u8; 8] = *b"\x03\0\0\0GNU\0";
        let note = self.section(".note.gnu.build-id")?;
        let note = self.contents(note, MAX_NOTE).ok()?;
        let (sizes, rest) = note.split_at_checked(8)?;
        let length = u32::from_le_bytes(*sizes.last_chunk()?) as usize;
        Some(rest.strip_prefix(&HEADER)?.get(..length)?.to_vec())
    }

    /// Returns the first table of symbols of a kind, and the section with their names.
    pub(crate) fn symbol_table(&self, kind: raw::SectionType) -> Option<(&Section, &Section)> {
        let mut sections = self.sections.iter();
        let table = sections.find(|section| section.kind == kind)?;
        let names = self.sections.get(table.link as usize)?;
        Some((table, names))
    }

    /// Calls `each` with every function that a table of symbols defines.
    pub(crate) fn each_function(
        &self,
        table: &Section,
        mut each: impl FnMut(Symbol) -> Result<()>,
    ) -> Result<()> {
        let mut defined = |symbol: Symbol, section: raw::SymbolSection| match section {
            raw::SHN_UNDEF => Ok(()),
            section if section.is_reserved() && section != raw::SHN_XINDEX => Ok(()),
            _ => each(symbol),
        };
        let endian = self.endian;
        if self.is_64 {
            self.each::<raw::Sym64<Endianness>>(table, limits::MAX_SYMBOLS, |symbol| {
                function(symbol, endian)
                    .map_or(Ok(()), |found| defined(found, symbol.st_shndx(endian)))
            })
        } else {
            self.each::<raw::Sym32<Endianness>>(table, limits::MAX_SYMBOLS, |symbol| {
                function(symbol, endian)
                    .map_or(Ok(()), |found| defined(found, symbol.st_shndx(endian)))
            })
        }
    }

    /// Calls `each` with every variable that a table of symbols of a 64-bit file defines.
    pub(crate) fn each_variable(
        &self,
        table: &Section,
        mut each: impl FnMut(Symbol),
    ) -> Result<()> {
        self.each::<raw::Sym64<Endianness>>(table, limits::MAX_SYMBOLS, |symbol| {
            let defined = !symbol.st_shndx(self.endian).is_reserved();
            if defined
                && symbol.st_shndx(self.endian) != raw::SHN_UNDEF
                && symbol.st_type() == raw::STT_OBJECT
            {
                each(symbol_of(symbol, self.endian));
            }
            Ok(())
        })
    }

    /// Returns the addresses of the symbols that the file exports by these names. Symbols that it imports have none.
    ///
    /// # Errors
    /// If its tables are over the limits.
    pub(crate) fn exports<const WANTED: usize>(
        &self,
        wanted: [&str; WANTED],
    ) -> Result<[Option<u64>; WANTED]> {
        let mut found = [None; WANTED];
        let Some((symbols, names)) = self.symbol_table(raw::SHT_DYNSYM) else {
            return Ok(found);
        };
        let names = self.contents(names, limits::MAX_MEMORY as u64 / 4)?;
        self.each::<raw::Sym64<Endianness>>(symbols, limits::MAX_SYMBOLS, |symbol| {
            let at = symbol.st_name.get(self.endian) as usize;
            let name = names.get(at..).and_then(c_string);
            let is_defined = symbol.st_shndx.get(self.endian) != raw::SHN_UNDEF;
            let wanted = wanted
                .iter()
                .position(|wanted| name == Some(wanted.as_bytes()));
            if let Some(wanted) = wanted.filter(|_| is_defined) {
                found[wanted] = Some(symbol.st_value.get(self.endian));
            }
            Ok(())
        })?;
        Ok(found)
    }

    /// Returns the value that the dynamic linker writes to this address, if the value is an address in the file
    /// itself.
    ///
    /// # Errors
    /// If its tables are over the limits.
    pub(crate) fn relocated(&self, address: u64) -> Result<Option<u64>> {
        let mut found = None;
        let tables = self.sections.iter();
        for table in tables.filter(|section| section.kind == raw::SHT_RELA) {
            self.each::<raw::Rela64<Endianness>>(table, limits::MAX_RELOCATIONS, |relocation| {
                let symbol = relocation.r_sym(self.endian, false);
                if relocation.r_offset(self.endian) == address && symbol == 0 {
                    found = Some(relocation.r_addend(self.endian) as u64);
                }
                Ok(())
            })?;
        }
        Ok(found)
    }

    /// Returns the functions that the dynamic linker finds for the file, by the address of the pointer that the
    /// linker sets.
    ///
    /// # Errors
    /// If the relocations or their symbols are inconsistent.
    pub(crate) fn imports(&self) -> Result<HashMap<u64, String>> {
        let mut imports = HashMap::new();
        let Some((symbols, names)) = self.symbol_table(raw::SHT_DYNSYM) else {
            return Ok(imports);
        };
        let symbols = self.contents(symbols, limits::MAX_MEMORY as u64 / 4)?;
        let names = self.contents(names, limits::MAX_MEMORY as u64 / 4)?;
        let symbols = slice_from_all_bytes::<raw::Sym64<Endianness>>(&symbols).unwrap_or_default();
        let relocations = self.sections.iter();
        for section in relocations.filter(|section| section.kind == raw::SHT_RELA) {
            self.each::<raw::Rela64<Endianness>>(section, limits::MAX_RELOCATIONS, |relocation| {
                let index = relocation.r_sym(self.endian, false) as usize;
                let symbol = symbols.get(index).filter(|_| index > 0);
                let name = symbol.and_then(|symbol| {
                    let name = c_string(names.get(symbol.st_name(self.endian) as usize..)?)?;
                    str::from_utf8(name).ok()
                });
                let Some(name) = name else { return Ok(()) };
                imports.insert(relocation.r_offset(self.endian), name.to_owned());
                ensure!(
                    imports.len() <= limits::MAX_IMPORTS,
                    "it imports more than {} functions",
                    limits::MAX_IMPORTS
                );
                Ok(())
            })?;
        }
        Ok(imports)
    }

    /// Calls `each` with every entry of a section. Only a part of the section is in memory at a time.
    fn each<Entry: Pod>(
        &self,
        section: &Section,
        limit: u64,
        mut each: impl FnMut(&Entry) -> Result<()>,
    ) -> Result<()> {
        ensure!(
            section.size <= limit,
            "its {} has {} MiB, and {} is the limit",
            section.name.escape_ascii(),
            section.size >> 20,
            limit >> 20
        );
        let count = section.size as usize / size_of::<Entry>();
        let at_a_time = CHUNK / size_of::<Entry>();
        for first in (0..count).step_by(at_a_time) {
            self.deadline.check()?;
            let length = at_a_time.min(count - first) * size_of::<Entry>();
            let offset = section.file_offset + (first * size_of::<Entry>()) as u64;
            let bytes = self
                .bytes(offset, length)
                .with_context(|| format!("failed to read its {}", section.name.escape_ascii()))?;
            let entries = slice_from_all_bytes::<Entry>(&bytes).unwrap_or_default();
            entries.iter().try_for_each(&mut each)?;
        }
        Ok(())
    }
}

impl Segment {
    fn makes_sense(&self) -> bool {
        self.address.checked_add(self.size).is_some()
            && self.file_offset.checked_add(self.size).is_some()
    }

    pub(crate) fn is_loaded(&self) -> bool {
        self.kind == raw::PT_LOAD
    }
}

/// Reads the sections, indexed as in the file.
fn sections<Header: FileHeader<Endian = Endianness>>(
    source: &dyn Source,
    header: &Header,
    endian: Endianness,
) -> Result<Vec<Section>> {
    let count = usize::from(header.e_shnum(endian));
    ensure!(count <= limits::MAX_SECTIONS, "it has too many sections");
    let length = count * size_of::<Header::SectionHeader>();
    let bytes = read_at(source, header.e_shoff(endian).into(), length)?;
    let headers = slice_from_all_bytes::<Header::SectionHeader>(&bytes).unwrap_or_default();
    let names = headers.get(usize::from(header.e_shstrndx(endian).0));
    let names = names.map(|names| (names.sh_offset(endian).into(), names.sh_size(endian).into()));
    let names = match names {
        Some((offset, size)) if size <= limits::MAX_SECTION_NAMES => {
            read_at(source, offset, size as usize)?
        }
        _ => bail!("its sections have no names"),
    };
    let section = |header: &Header::SectionHeader| {
        let name = names.get(header.sh_name(endian) as usize..);
        let (file_offset, size) = (
            header.sh_offset(endian).into(),
            header.sh_size(endian).into(),
        );
        let is_in_file = header.sh_type(endian) != raw::SHT_NOBITS;
        let makes_sense = is_in_file && u64::checked_add(file_offset, size).is_some();
        Section {
            name: name.and_then(c_string).unwrap_or_default().to_vec(),
            kind: header.sh_type(endian),
            address: header.sh_addr(endian).into(),
            file_offset: if makes_sense { file_offset } else { 0 },
            size: if makes_sense { size } else { 0 },
            link: header.sh_link(endian),
        }
    };
    Ok(headers.iter().map(section).collect())
}

/// Converts a symbol, if it is a function's.
fn function<Symbol_: Sym<Endian = Endianness>>(
    symbol: &Symbol_,
    endian: Endianness,
) -> Option<Symbol> {
    let is_function = matches!(symbol.st_type(), raw::STT_FUNC | raw::STT_GNU_IFUNC);
    is_function.then(|| symbol_of(symbol, endian))
}

fn symbol_of<Symbol_: Sym<Endian = Endianness>>(symbol: &Symbol_, endian: Endianness) -> Symbol {
    Symbol {
        name: symbol.st_name(endian),
        address: symbol.st_value(endian).into(),
        size: symbol.st_size(endian).into(),
        local: symbol.st_bind() == raw::STB_LOCAL,
        is_ifunc: symbol.st_type() == raw::STT_GNU_IFUNC,
    }
}

/// Returns the bytes before the first NUL; None if there is no NUL within [`limits::MAX_NAME`] bytes.
pub(crate) fn c_string(bytes: &[u8]) -> Option<&[u8]> {
    let bytes = &bytes[..bytes.len().min(limits::MAX_NAME)];
    Some(&bytes[..memchr::memchr(0, bytes)?])
}
