//! ELF files that are hostile to their readers: a size, a count or a name in each is as large as it can be. Large
//! parts are holes, so that the files take no space on the disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Hostile property of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `.eh_frame` of 64 GiB.
    FrameHole,
    /// `.eh_frame` of 16 MiB, with as many rules as there can be.
    Rules,
    /// `.eh_frame` of 16 MiB, of functions that share a CIE that takes long to run.
    LongCie,
    /// `.symtab` and `.dynsym` of 64 GiB each.
    SymbolHole,
    /// Five million symbols without a name.
    EmptySymbols,
    /// Names of symbols of 64 GiB.
    NameHole,
    /// Two million functions called `malloc`.
    Mallocs,
    /// Two million functions of other names.
    Functions,
    /// A function called `malloc` in code of 64 GiB.
    CodeHole,
    /// `.rela.dyn` of 64 GiB.
    RelocationHole,
    /// More segments than the kernel loads.
    Segments,
    /// Segments whose end is beyond the last address.
    Wraps,
    /// Function whose name has 64 MiB.
    LongName,
}

pub(crate) const KINDS: [Kind; 13] = [
    Kind::FrameHole,
    Kind::Rules,
    Kind::LongCie,
    Kind::SymbolHole,
    Kind::EmptySymbols,
    Kind::NameHole,
    Kind::Mallocs,
    Kind::Functions,
    Kind::CodeHole,
    Kind::RelocationHole,
    Kind::Segments,
    Kind::Wraps,
    Kind::LongName,
];

/// Place of the code, in the file and in its own address space. The code has one page.
pub(crate) const TEXT: u64 = 0x1000;

const SHT_PROGBITS: u32 = 1;
const SHT_SYMTAB: u32 = 2;
const SHT_STRTAB: u32 = 3;
const SHT_RELA: u32 = 4;
const SHT_DYNSYM: u32 = 11;

/// Part of a file.
#[derive(Clone, Copy)]
struct Part {
    at: u64,
    size: u64,
}

struct Writer<'a> {
    file: &'a File,
    end: u64,
    /// Sections: name, type, address, place in the file, and number of the linked section.
    sections: Vec<(&'static str, u32, u64, Part, u32)>,
    /// Segments: offset, address, size.
    segments: Vec<(u64, u64, u64)>,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<Part> {
        let part = self.hole(bytes.len() as u64);
        self.file.write_all_at(bytes, part.at)?;
        Ok(part)
    }

    fn hole(&mut self, size: u64) -> Part {
        let at = self.end.next_multiple_of(16);
        self.end = at + size;
        Part { at, size }
    }

    /// Adds a section, and returns its number.
    fn section(&mut self, name: &'static str, kind: u32, part: Part, link: u32) -> u32 {
        self.sections.push((name, kind, part.at, part, link));
        self.sections.len() as u32
    }

    /// Adds a table of symbols, each with a name, an address and a size.
    fn symbols<'s>(&mut self, list: impl Iterator<Item = (&'s [u8], u64, u64)>) -> io::Result<()> {
        let (mut names, mut table, mut last) = (vec![0], vec![0; 24], (&[][..], 0));
        for (name, address, size) in list {
            if last.0 != name {
                last = (name, names.len() as u32);
                names.extend_from_slice(name);
                names.push(0);
            }
            table.extend_from_slice(&last.1.to_le_bytes());
            // The symbol is a global function of the first section.
            table.extend_from_slice(&[0x12, 0, 1, 0]);
            table.extend_from_slice(&address.to_le_bytes());
            table.extend_from_slice(&size.to_le_bytes());
        }
        let names = self.put(&names)?;
        let link = self.section(".strtab", SHT_STRTAB, names, 0);
        let table = self.put(&table)?;
        self.section(".symtab", SHT_SYMTAB, table, link);
        Ok(())
    }

    fn finish(mut self) -> io::Result<()> {
        let mut names = vec![0];
        let mut headers = vec![0; 64];
        let count = self.sections.len() as u32;
        let own = Part { at: 0, size: 0 };
        self.sections.push((".shstrtab", SHT_STRTAB, 0, own, 0));
        for (name, ..) in &self.sections {
            names.extend_from_slice(name.as_bytes());
            names.push(0);
        }
        let own = self.put(&names)?;
        self.sections[count as usize].3 = own;
        let mut name = 1_u32;
        for &(text, kind, address, part, link) in &self.sections {
            headers.extend_from_slice(&name.to_le_bytes());
            headers.extend_from_slice(&kind.to_le_bytes());
            for value in [2, address, part.at, part.size] {
                headers.extend_from_slice(&u64::to_le_bytes(value));
            }
            headers.extend_from_slice(&link.to_le_bytes());
            headers.extend_from_slice(&[0; 4]);
            for value in [8_u64, 24] {
                headers.extend_from_slice(&value.to_le_bytes());
            }
            name += text.len() as u32 + 1;
        }
        let sections = self.put(&headers)?;
        let mut headers = Vec::new();
        for &(offset, address, size) in &self.segments {
            // PT_LOAD, readable and executable.
            headers.extend_from_slice(&[1, 0, 0, 0, 5, 0, 0, 0]);
            for value in [offset, address, address, size, size, 0x1000] {
                headers.extend_from_slice(&value.to_le_bytes());
            }
        }
        let segments = self.put(&headers)?;
        let mut header = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x3e\0\x01\0\0\0".to_vec();
        for value in [0, segments.at, sections.at] {
            header.extend_from_slice(&u64::to_le_bytes(value));
        }
        header.extend_from_slice(&[0, 0, 0, 0, 64, 0, 56, 0]);
        let counts = [
            self.segments.len() as u16,
            64,
            count as u16 + 2,
            count as u16 + 1,
        ];
        header.extend(counts.iter().flat_map(|count| count.to_le_bytes()));
        self.file.write_all_at(&header, 0)?;
        self.file.set_len(self.end)
    }
}

/// Writes a hostile file of this kind.
pub(crate) fn write(kind: Kind, file: &File) -> io::Result<()> {
    let mut writer = Writer {
        file,
        end: 2 * TEXT,
        sections: Vec::new(),
        segments: vec![(0, 0, 2 * TEXT)],
    };
    let page = Part {
        at: TEXT,
        size: TEXT,
    };
    writer.section(".text", SHT_PROGBITS, page, 0);
    // test %rdi,%rdi; je; nops; ret
    let code = b"\x48\x85\xff\x74\x02\x90\x90\x90\x90\x90\x90\x90\x90\x90\x90\xc3";
    file.write_all_at(&code.repeat(256), TEXT)?;
    match kind {
        Kind::FrameHole | Kind::Rules | Kind::LongCie => write_frames(kind, &mut writer)?,
        Kind::SymbolHole | Kind::EmptySymbols | Kind::NameHole | Kind::RelocationHole => {
            write_tables(kind, &mut writer)?;
        }
        _ => write_code(kind, &mut writer)?,
    }
    writer.finish()
}

/// Adds unwind information.
fn write_frames(kind: Kind, writer: &mut Writer<'_>) -> io::Result<()> {
    match kind {
        Kind::Rules => frames(writer, 4096, &[]),
        Kind::LongCie => frames(writer, 1, &b"\x0e\x10\x0e\x08".repeat(200)),
        _ => {
            let hole = writer.hole(64 * GIB);
            writer.section(".eh_frame", SHT_PROGBITS, hole, 0);
            Ok(())
        }
    }
}

/// Adds tables of symbols, of names and of relocations.
fn write_tables(kind: Kind, writer: &mut Writer<'_>) -> io::Result<()> {
    match kind {
        Kind::SymbolHole => {
            let names = writer.put(b"\0malloc\0")?;
            let link = writer.section(".strtab", SHT_STRTAB, names, 0);
            let hole = writer.hole(64 * GIB);
            writer.section(".symtab", SHT_SYMTAB, hole, link);
            writer.section(".dynsym", SHT_DYNSYM, hole, link);
        }
        Kind::EmptySymbols => {
            let names = writer.put(b"\0")?;
            let link = writer.section(".strtab", SHT_STRTAB, names, 0);
            let hole = writer.hole(120 * MIB);
            writer.section(".symtab", SHT_SYMTAB, hole, link);
        }
        Kind::NameHole => {
            let hole = writer.hole(64 * GIB);
            let link = writer.section(".strtab", SHT_STRTAB, hole, 0);
            let table = writer.put(&[0; 48])?;
            writer.section(".symtab", SHT_SYMTAB, table, link);
        }
        _ => {
            let names = writer.put(b"\0malloc\0")?;
            let link = writer.section(".dynstr", SHT_STRTAB, names, 0);
            let table = writer.put(&[0; 48])?;
            let link = writer.section(".dynsym", SHT_DYNSYM, table, link);
            let hole = writer.hole(64 * GIB);
            writer.section(".rela.dyn", SHT_RELA, hole, link);
        }
    }
    Ok(())
}

/// Adds segments of code, and symbols of functions in them.
fn write_code(kind: Kind, writer: &mut Writer<'_>) -> io::Result<()> {
    let malloc: [(&[u8], u64, u64); 2] = [(b"malloc", TEXT, 16), (b"free", TEXT + 16, 16)];
    let many = 2_000_000_u64;
    match kind {
        Kind::Mallocs | Kind::Functions => {
            let name: &[u8] = if kind == Kind::Mallocs {
                b"malloc"
            } else {
                b"function"
            };
            let code = writer.hole(many);
            writer.segments.push((code.at, TEXT * 16, many));
            writer.symbols((0..many).map(|at| (name, TEXT * 16 + at, 1)))?;
        }
        Kind::CodeHole => {
            let hole = writer.hole(64 * GIB);
            writer.segments.push((hole.at, TEXT * 16, hole.size));
            writer.symbols(malloc.into_iter())?;
        }
        Kind::Segments => {
            let more = (0..65_000).map(|number| (TEXT, TEXT * (16 + number), TEXT));
            writer.segments.extend(more);
            writer.symbols(malloc.into_iter())?;
        }
        Kind::Wraps => {
            writer
                .segments
                .push((0u64.wrapping_sub(TEXT), 0u64.wrapping_sub(TEXT), 2 * TEXT));
            writer.segments.push((0, 0u64.wrapping_sub(16), u64::MAX));
            let strange: [(&[u8], u64, u64); 2] = [
                (b"malloc", 0u64.wrapping_sub(TEXT + 16), u64::MAX),
                (b"realloc", 0u64.wrapping_sub(8), u64::MAX / 2),
            ];
            writer.symbols(malloc.into_iter().chain(strange))?;
        }
        _ => {
            let name = vec![b'n'; 64 * MIB as usize];
            writer.symbols([(&*name, TEXT, TEXT)].into_iter())?;
        }
    }
    Ok(())
}

/// Adds an `.eh_frame` of 16 MiB: one CIE with these instructions, and functions of `bytes` bytes, with a rule
/// for each.
fn frames(writer: &mut Writer<'_>, bytes: u64, instructions: &[u8]) -> io::Result<()> {
    const CODE: u64 = 0x1000_0000;
    let entry = |mut body: Vec<u8>| {
        body.resize((body.len() + 4).next_multiple_of(8) - 4, 0);
        let mut entry = (body.len() as u32).to_le_bytes().to_vec();
        entry.append(&mut body);
        entry
    };
    let mut cie = b"\0\0\0\0\x01zR\0\x01\x78\x10\x01\x1b\x0c\x07\x08\x90\x01".to_vec();
    cie.extend_from_slice(instructions);
    let mut section = entry(cie);
    let length = bytes.max(16);
    let rules = b"\x41\x0e\x10\x41\x0e\x08".repeat(bytes as usize / 2);
    let base = writer.end.next_multiple_of(16);
    let mut code = CODE;
    while (section.len() as u64) < 16 * MIB {
        let at = section.len() as u64;
        let mut body = (at as u32 + 4).to_le_bytes().to_vec();
        body.extend_from_slice(&((code.wrapping_sub(base + at + 8)) as u32).to_le_bytes());
        body.extend_from_slice(&(length as u32).to_le_bytes());
        body.push(0);
        body.extend_from_slice(&rules);
        section.append(&mut entry(body));
        code += length;
    }
    section.extend_from_slice(&[0; 4]);
    let frames = writer.put(&section)?;
    writer.section(".eh_frame", SHT_PROGBITS, frames, 0);
    let hole = writer.hole(code - CODE);
    writer.segments.push((hole.at, CODE, hole.size));
    Ok(())
}
