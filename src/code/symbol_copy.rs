//! Copy of the function symbols of an ELF file, which blazesym can read.
//!
//! blazesym maps its files whole: a file that its owner cuts short would end the process (SIGBUS). Of several symbols
//! at an address blazesym takes any of the largest, and walks through all of them at each lookup. Sums of numbers in
//! the file may overflow. So blazesym is not given the file, but a file in memory (memfd) that no other process can
//! change. The copy has segments, functions and names, read once and checked. Its functions are in order, and each has
//! one name. The names keep their offsets: parts that no function needs are holes.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use object::elf as raw;
use object::pod::{bytes_of, bytes_of_slice};
use object::{NativeEndian, U16, U32, U64};

use crate::code::elf_file::{Elf, Section, Segment, Symbol};
use crate::code::limits;

/// Bytes that blazesym takes for a function: the symbol, and its index in the order of addresses.
const FUNCTION: usize = size_of::<Sym>() + size_of::<usize>();
/// Bytes of names that are copied at a time. A name that may be shown ends in the block in which it
/// begins, or in the next one.
const BLOCK: usize = limits::MAX_NAME;
/// Leading underscores of a name that are counted at most.
const MAX_UNDERSCORES: usize = 4;
/// Bytes of names that are read at a time to see how some names begin, and how many such pieces are kept.
const PIECE: u32 = 1 << 10;
const MAX_PIECES: usize = 1 << 12;
/// Functions that are written at a time.
const CHUNK: usize = 1 << 14;
/// The names of the copy's sections, each after a NUL.
const SECTION_NAMES: &[u8] = b"\0.shstrtab\0.symtab\0.strtab\0.dynsym\0.dynstr\0";
/// Index of the section with the names of the sections.
const SECTION_NAMES_INDEX: u16 = 1;
/// Sections of the copy at most: the null section, the names of the sections, and two tables of symbols with their
/// names.
const MAX_SECTIONS: usize = 6;

type Sym = raw::Sym64<NativeEndian>;
type FileHeader = raw::FileHeader64<NativeEndian>;
type ProgramHeader = raw::ProgramHeader64<NativeEndian>;
type SectionHeader = raw::SectionHeader64<NativeEndian>;

/// Sealed copy of a file's function symbols.
#[derive(Debug)]
pub(crate) struct SymbolCopy {
    pub(crate) file: File,
    /// Bytes of memory that the copy takes, with blazesym's own data about it.
    pub(crate) bytes: usize,
}

/// Function whose name is written into the copy.
#[derive(Debug, Clone, Copy)]
struct Function {
    address: u64,
    /// The size in bytes. It is never 0, and the function's end never wraps.
    size: u32,
    /// The offset of the function's name among the names.
    name: u32,
    /// Whether other files cannot refer to the function by this name.
    local: bool,
}

struct Writer<'a> {
    /// The file that the tables are read from.
    elf: &'a Elf<'a>,
    segments: &'a [Segment],
    file: File,
    end: u64,
    bytes: usize,
    sections: Vec<SectionHeader>,
}

/// Table of names, of which some blocks are copied.
struct Names<'a> {
    section: &'a Section,
    /// The offset of the names in the copy.
    to: u64,
    /// For each block that is copied, the offset in it behind its last NUL; 0 if it has none.
    blocks: Vec<Option<usize>>,
}

impl SymbolCopy {
    /// Copies the function symbols; None if there are none. For a stripped file, `.symtab` is read from `debug`,
    /// which was split from it: its addresses are the same, but not its offsets.
    ///
    /// # Errors
    /// If the file exceeds the limits, or changes meanwhile.
    pub(crate) fn of(elf: &Elf<'_>, debug: Option<&Elf<'_>>) -> Result<Option<Self>> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = memfd_create(c"memtools-symbols", flags);
        let file = File::from(file.context("failed to create a file for its symbols")?);
        let mut writer = Writer {
            elf: debug.unwrap_or(elf),
            segments: &elf.segments,
            file,
            end: 0,
            bytes: 0,
            sections: vec![section_header(b"", raw::SHT_NULL, 0, 0)],
        };
        let headers = size_of::<FileHeader>()
            + elf.segments.len() * size_of::<ProgramHeader>()
            + MAX_SECTIONS * size_of::<SectionHeader>();
        writer.reserve(headers as u64);
        let at = writer.reserve(SECTION_NAMES.len() as u64);
        writer.file.write_all_at(SECTION_NAMES, at)?;
        let length = SECTION_NAMES.len() as u64;
        writer.add(section_header(b".shstrtab", raw::SHT_STRTAB, at, length));
        writer.table(raw::SHT_SYMTAB, [b".symtab", b".strtab"])?;
        writer.elf = elf;
        writer.table(raw::SHT_DYNSYM, [b".dynsym", b".dynstr"])?;
        if writer.bytes == 0 {
            return Ok(None);
        }
        writer.finish().map(Some)
    }
}

impl Writer<'_> {
    /// Reserves `length` bytes in the copy, aligned as blazesym requires it, and returns their offset.
    fn reserve(&mut self, length: u64) -> u64 {
        let at = self.end.next_multiple_of(BLOCK as u64);
        self.end = at + length;
        at
    }

    fn add(&mut self, section: SectionHeader) {
        self.sections.push(section);
    }

    /// Copies the functions of a table of symbols, and their names.
    fn table(&mut self, kind: raw::SectionType, titles: [&[u8]; 2]) -> Result<()> {
        let Some((table, names)) = self.elf.symbol_table(kind) else {
            return Ok(());
        };
        ensure!(
            names.size <= limits::MAX_SYMBOLS,
            "its names of symbols have {} MiB, and {} is the limit",
            names.size >> 20,
            limits::MAX_SYMBOLS >> 20
        );
        let most = (limits::MAX_MEMORY - self.bytes) / FUNCTION;
        let mut functions = Vec::new();
        self.elf.each_function(table, |symbol| {
            ensure!(functions.len() < most, "it has too many functions");
            functions.extend(Function::new(symbol, names.size));
            Ok(())
        })?;
        functions.sort_by_key(|function| (function.address, function.local));
        let mut beginnings = Beginnings::of(self.elf, names);
        for aliases in functions.chunk_by_mut(|one, other| one.address == other.address) {
            put_plainest_first(aliases, &mut beginnings)?;
        }
        functions.dedup_by_key(|function| function.address);
        self.take(functions.len() * FUNCTION)?;

        let length = (functions.len() * size_of::<Sym>()) as u64;
        let at = self.reserve(length);
        let mut to = at;
        for chunk in functions.chunks(CHUNK) {
            let symbols: Vec<Sym> = chunk.iter().map(Function::symbol).collect();
            self.file.write_all_at(bytes_of_slice(&symbols), to)?;
            to += size_of_val(&*symbols) as u64;
        }
        self.add(section_header(titles[0], kind, at, length));
        let to = self.reserve(names.size);
        self.add(section_header(titles[1], raw::SHT_STRTAB, to, names.size));
        self.names(names, to, &functions)
    }

    fn names(&mut self, section: &Section, to: u64, functions: &[Function]) -> Result<()> {
        let count = section.size.div_ceil(BLOCK as u64) as usize;
        let mut names = Names {
            section,
            to,
            blocks: vec![None; count],
        };
        for function in functions {
            let (block, start) = (
                function.name as usize / BLOCK,
                function.name as usize % BLOCK,
            );
            if self.block(&mut names, block)? <= start && block + 1 < count {
                self.block(&mut names, block + 1)?;
            }
        }
        Ok(())
    }

    /// Copies a block of names, unless it is copied already. Returns the offset behind its last NUL.
    fn block(&mut self, names: &mut Names<'_>, number: usize) -> Result<usize> {
        if let Some(known) = names.blocks[number] {
            return Ok(known);
        }
        self.elf.deadline.check()?;
        self.take(BLOCK)?;
        let start = (number * BLOCK) as u64;
        let length = (names.section.size - start).min(BLOCK as u64) as usize;
        let bytes = self.elf.bytes(names.section.file_offset + start, length);
        let bytes = bytes.context("failed to read its names of symbols")?;
        self.file.write_all_at(&bytes, names.to + start)?;
        let after = memchr::memrchr(0, &bytes).map_or(0, |last| last + 1);
        names.blocks[number] = Some(after);
        Ok(after)
    }

    /// Counts memory for this file. Fails if the file then takes more than the limit.
    fn take(&mut self, bytes: usize) -> Result<()> {
        self.bytes += bytes;
        ensure!(
            self.bytes <= limits::MAX_MEMORY,
            "its functions and their names take more than {} MiB",
            limits::MAX_MEMORY >> 20
        );
        Ok(())
    }

    /// Writes the headers, and seals the file, so that no process can write to it any more.
    fn finish(self) -> Result<SymbolCopy> {
        let e = NativeEndian;
        let segments = self.segments.iter();
        let loaded = segments.filter(|segment| segment.is_loaded());
        let segments: Vec<ProgramHeader> = loaded
            .map(|segment| ProgramHeader {
                p_type: U32::new(e, raw::PT_LOAD),
                p_flags: U32::new(e, raw::PF_R),
                p_offset: U64::new(e, segment.file_offset),
                p_vaddr: U64::new(e, segment.address),
                p_paddr: U64::new(e, segment.address),
                p_filesz: U64::new(e, segment.size),
                p_memsz: U64::new(e, segment.size),
                p_align: U64::new(e, 1),
            })
            .collect();
        let segments_at = size_of::<FileHeader>() as u64;
        let sections_at = segments_at + size_of_val(&*segments) as u64;
        let header = FileHeader {
            e_ident: raw::Ident {
                magic: raw::ELFMAG,
                class: raw::ELFCLASS64,
                data: if cfg!(target_endian = "little") {
                    raw::ELFDATA2LSB
                } else {
                    raw::ELFDATA2MSB
                },
                version: raw::EV_CURRENT,
                os_abi: raw::ELFOSABI_NONE,
                abi_version: 0,
                padding: [0; 7],
            },
            e_type: U16::new(e, raw::ET_DYN),
            e_machine: U16::new(e, raw::EM_NONE),
            e_version: U32::new(e, raw::EV_CURRENT.0.into()),
            e_entry: U64::new(e, 0),
            e_phoff: U64::new(e, segments_at),
            e_shoff: U64::new(e, sections_at),
            e_flags: U32::new(e, raw::FileFlags(0)),
            e_ehsize: U16::new(e, size_of::<FileHeader>() as u16),
            e_phentsize: U16::new(e, size_of::<ProgramHeader>() as u16),
            e_phnum: U16::new(e, segments.len() as u16),
            e_shentsize: U16::new(e, size_of::<SectionHeader>() as u16),
            e_shnum: U16::new(e, self.sections.len() as u16),
            e_shstrndx: U16::new(e, raw::SymbolSection(SECTION_NAMES_INDEX)),
        };
        self.file.write_all_at(bytes_of(&header), 0)?;
        let file = self.file;
        file.write_all_at(bytes_of_slice(&segments), segments_at)?;
        file.write_all_at(bytes_of_slice(&self.sections), sections_at)?;
        file.set_len(self.end)?;
        let seals = SealFlag::F_SEAL_SHRINK
            | SealFlag::F_SEAL_GROW
            | SealFlag::F_SEAL_WRITE
            | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).context("failed to seal its symbols")?;
        Ok(SymbolCopy {
            file,
            bytes: self.bytes,
        })
    }
}

/// Reader of the beginnings of names. The names of one function are all over a file's names, so pieces that were read
/// are kept for a while.
struct Beginnings<'a> {
    elf: &'a Elf<'a>,
    section: &'a Section,
    /// Pieces by their numbers, each with some bytes of the next one, for a name at the piece's end.
    pieces: HashMap<u32, Vec<u8>>,
}

impl<'a> Beginnings<'a> {
    fn of(elf: &'a Elf<'a>, section: &'a Section) -> Self {
        Self {
            elf,
            section,
            pieces: HashMap::new(),
        }
    }

    /// Returns up to four bytes of the name at the offset `name` among the names.
    fn at(&mut self, name: u32) -> Result<&[u8]> {
        let number = name / PIECE;
        if self.pieces.len() >= MAX_PIECES && !self.pieces.contains_key(&number) {
            self.pieces.clear();
        }
        let piece = match self.pieces.entry(number) {
            Entry::Occupied(piece) => piece.into_mut(),
            Entry::Vacant(piece) => {
                self.elf.deadline.check()?;
                let start = u64::from(number) * u64::from(PIECE);
                let length = u64::from(PIECE) + MAX_UNDERSCORES as u64;
                let length = length.min(self.section.size.saturating_sub(start));
                let bytes = self
                    .elf
                    .bytes(self.section.file_offset + start, length as usize)
                    .context("failed to read its names of symbols")?;
                piece.insert(bytes)
            }
        };
        let start = piece.len().min((name % PIECE) as usize);
        let end = piece.len().min(start + MAX_UNDERSCORES);
        Ok(&piece[start..end])
    }
}

/// Moves the name to the front that users know, which has the fewest leading underscores: `mmap`, not `__mmap`. Among
/// equals the first alias wins: names that other files can refer to come first, each kind in the file's order.
fn put_plainest_first(aliases: &mut [Function], beginnings: &mut Beginnings<'_>) -> Result<()> {
    if aliases.len() < 2 {
        return Ok(());
    }
    let mut plainest = (usize::MAX, 0);
    for (number, alias) in aliases.iter().enumerate() {
        let start = beginnings.at(alias.name)?;
        let underscores = start.iter().take_while(|&&byte| byte == b'_').count();
        plainest = plainest.min((underscores, number));
    }
    aliases.swap(0, plainest.1);
    Ok(())
}

impl Function {
    /// Converts a symbol. Returns None for a symbol without a size or a name.
    fn new(symbol: Symbol, names: u64) -> Option<Self> {
        let size = symbol.size.min(u64::MAX - symbol.address);
        let size = size.try_into().unwrap_or(u32::MAX);
        (size > 0 && u64::from(symbol.name) < names).then_some(Self {
            address: symbol.address,
            size,
            name: symbol.name,
            local: symbol.local,
        })
    }

    fn symbol(&self) -> Sym {
        let e = NativeEndian;
        Sym {
            st_name: U32::new(e, self.name),
            st_info: raw::SymbolInfo::new(raw::STB_GLOBAL, raw::STT_FUNC),
            st_other: raw::SymbolOther(0),
            // Any section that is defined.
            st_shndx: U16::new(e, raw::SymbolSection(SECTION_NAMES_INDEX)),
            st_value: U64::new(e, self.address),
            st_size: U64::new(e, self.size.into()),
        }
    }
}

/// The header of one of the copy's sections.
fn section_header(title: &[u8], kind: raw::SectionType, at: u64, length: u64) -> SectionHeader {
    let e = NativeEndian;
    let name = memchr::memmem::find(SECTION_NAMES, title).unwrap_or(0);
    let is_table = kind == raw::SHT_SYMTAB || kind == raw::SHT_DYNSYM;
    let entry = if is_table { size_of::<Sym>() } else { 0 };
    SectionHeader {
        sh_name: U32::new(e, name as u32),
        sh_type: U32::new(e, kind),
        sh_flags: U64::new(e, raw::SectionFlags(0)),
        sh_addr: U64::new(e, 0),
        sh_offset: U64::new(e, at),
        sh_size: U64::new(e, length),
        sh_link: U32::new(e, 0),
        sh_info: U32::new(e, 0),
        sh_addralign: U64::new(e, BLOCK as u64),
        sh_entsize: U64::new(e, entry as u64),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io;

    use super::*;
    use crate::code::elf_file::Source;
    use crate::code::registers::C_LIBRARY;

    /// A file that counts how often it is read.
    struct Counted {
        file: File,
        reads: Cell<usize>,
    }

    impl Source for Counted {
        fn length(&self) -> io::Result<u64> {
            self.file.length()
        }

        fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
            self.reads.set(self.reads.get() + 1);
            self.file.read(buffer, offset)
        }
    }

    #[test]
    fn names_are_read_many_at_a_time() {
        let counted = Counted {
            file: File::open(C_LIBRARY).expect("Debian's libc"),
            reads: Cell::new(0),
        };
        let elf = Elf::read(&counted).expect("an ELF file");
        let (table, names) = elf.symbol_table(raw::SHT_DYNSYM).expect("symbols");
        let mut functions = Vec::new();
        let all = elf.each_function(table, |symbol| {
            functions.extend(Function::new(symbol, names.size));
            Ok(())
        });
        all.expect("symbols");
        functions.sort_by_key(|function| function.address);

        let (mut aliases, before) = (0, counted.reads.get());
        let mut beginnings = Beginnings::of(&elf, names);
        for named in functions.chunk_by_mut(|one, other| one.address == other.address) {
            aliases += if named.len() > 1 { named.len() } else { 0 };
            put_plainest_first(named, &mut beginnings).expect("names");
        }
        let pieces = names.size.div_ceil(PIECE.into()) as usize;
        let reads = counted.reads.get() - before;
        assert!(
            reads <= pieces && pieces < aliases / 4,
            "{reads} reads of {pieces} pieces for {aliases} names"
        );

        for function in &functions {
            let at = names.file_offset + u64::from(function.name);
            let there = elf.bytes(at, MAX_UNDERSCORES).expect("a name");
            assert_eq!(beginnings.at(function.name).expect("a name"), there);
        }
    }
}
