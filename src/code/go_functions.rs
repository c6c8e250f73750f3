//! Functions of a Go program, by the table with which Go's runtime walks stacks (`.gopclntab`).
//!
//! The table stays in a program that is stripped (`strip`, `go build -ldflags=-s`). Its format is described in Go's
//! src/internal/abi/symtab.go and src/runtime/symtab.go; this reads the tables of Go 1.18 and later.

use std::ops::Range;

use anyhow::{Context, Result, ensure};
use memchr::memmem;
use object::elf as raw;

use crate::code::elf_file::{Elf, Section, c_string};
use crate::code::limits;

/// Section of the table, and its name in a position-independent program.
const SECTIONS: [&str; 2] = [".gopclntab", ".data.rel.ro.gopclntab"];
/// Numbers that the tables of Go 1.18, and of 1.20 and later, begin with.
const MAGICS: [u32; 2] = [0xffff_fff0, 0xffff_fff1];
/// Size of the header: eight bytes, and eight words of eight bytes.
const HEADER: usize = 72;
/// Bytes of an entry of the index: the function's offset from the first one's code, and that of its description.
const INDEX_ENTRY: usize = 8;
/// Bytes at the start of a function's description: the offset of its code, and that of its name.
const DESCRIPTION: usize = 8;
/// Words from the start of a program's module data to the address of the first function's code.
const TEXT_IN_MODULE: u64 = 22;

/// The functions of a Go program.
#[derive(Debug)]
pub(crate) struct GoFunctions {
    /// Address of the code of the first function.
    text: u64,
    /// The start of each function's code as an offset from the first one's, in order, and the offset of its name.
    functions: Vec<(u32, u32)>,
    /// Offset of the end of the last function's code.
    end: u32,
    /// Names that end with NUL.
    names: Vec<u8>,
}

impl GoFunctions {
    /// Reads the table of a program; None if the file is no Go program, or one of another version.
    ///
    /// # Errors
    /// If the table is malformed, or over the limits.
    pub(crate) fn read(elf: &Elf<'_>) -> Result<Option<Self>> {
        let mut sections = SECTIONS.iter().filter_map(|name| elf.section(name));
        let Some(section) = sections.next() else {
            return Ok(None);
        };
        let table = elf.contents(section, limits::MAX_MEMORY as u64)?;
        Self::parse(elf, section, &table)
            .map(Some)
            .or_else(|error| {
                let is_known = MAGICS
                    .map(u32::to_le_bytes)
                    .iter()
                    .any(|magic| table.starts_with(magic));
                if is_known { Err(error) } else { Ok(None) }
            })
    }

    fn parse(elf: &Elf<'_>, section: &Section, table: &[u8]) -> Result<Self> {
        let malformed = || format!("its {} is malformed", section.name.escape_ascii());
        let (words, _) = table
            .get(8..HEADER)
            .with_context(malformed)?
            .as_chunks::<8>();
        let word = |at: usize| u64::from_le_bytes(words[at]);
        let [count, text, names, files, index] = [0, 2, 3, 4, 7].map(word);
        let part = |start: u64, length: usize| {
            let start = usize::try_from(start).ok()?;
            table.get(start..)?.get(..length)
        };
        let names = files
            .checked_sub(names)
            .and_then(|length| part(names, length as usize))
            .with_context(malformed)?;
        let length = (count as usize).checked_mul(INDEX_ENTRY);
        let entries = length
            .and_then(|length| part(index, length.checked_add(4)?))
            .with_context(malformed)?;
        let (entries, end) = entries.split_at(entries.len() - 4);
        let text = match text {
            0 => text_start(elf, section)?,
            text => text,
        };
        let mut functions = Vec::with_capacity(count as usize);
        for entry in entries.as_chunks::<INDEX_ENTRY>().0 {
            let (code, description) = halves(entry);
            let description = index
                .checked_add(description.into())
                .and_then(|start| part(start, DESCRIPTION))
                .and_then(|bytes| bytes.first_chunk())
                .with_context(malformed)?;
            let is_later = functions.last().is_none_or(|&(last, _)| last <= code);
            ensure!(is_later, malformed());
            functions.push((code, halves(description).1));
        }
        Ok(Self {
            text,
            functions,
            end: end.first_chunk().map_or(0, |end| u32::from_le_bytes(*end)),
            names: names.to_vec(),
        })
    }

    /// Returns the bytes of memory that the functions take.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.functions) + self.names.len()
    }

    /// Returns the name of the function whose code is at this address, and the offset from the function's start.
    pub(crate) fn find(&self, address: u64) -> Option<(&[u8], u64)> {
        let at = u32::try_from(address.checked_sub(self.text)?).ok()?;
        let after = self.functions.partition_point(|&(start, _)| start <= at);
        let &(start, name) = self.functions.get(after.checked_sub(1)?)?;
        let name = c_string(self.names.get(name as usize..)?)?;
        (at < self.end).then_some((name, u64::from(at - start)))
    }

    /// Returns the addresses of the code of a function.
    fn named(&self, name: &str) -> Option<Range<u64>> {
        let place = memmem::find(&self.names, format!("\0{name}\0").as_bytes())? + 1;
        let is_it = |&(_, name): &(u32, u32)| name as usize == place;
        let at = self.functions.iter().position(is_it)?;
        let next = self.functions.get(at + 1);
        let end = next.map_or(self.end, |&(next, _)| next);
        let address = |offset: u32| self.text.checked_add(offset.into());
        Some(address(self.functions[at].0)?..address(end)?)
    }
}

fn halves(bytes: &[u8; 8]) -> (u32, u32) {
    let word = u64::from_le_bytes(*bytes);
    (word as u32, (word >> 32) as u32)
}

/// Returns the address of the first function's code. The table has it up to Go 1.25, after the dynamic linker has
/// relocated it; later the program's module data has it.
fn text_start(elf: &Elf<'_>, table: &Section) -> Result<u64> {
    const TEXT_IN_HEADER: u64 = 8 + 2 * 8;
    if let Some(text) = elf.relocated(table.address.saturating_add(TEXT_IN_HEADER))? {
        return Ok(text);
    }
    let module = elf
        .section(".go.module")
        .context("its code is not where it is described")?;
    let word = |number: u64| -> Result<u64> {
        let within = 8 * number;
        if let Some(word) = elf.relocated(module.address.saturating_add(within))? {
            return Ok(word);
        }
        let bytes = elf.bytes(module.file_offset.saturating_add(within), 8)?;
        Ok(bytes
            .first_chunk()
            .map_or(0, |word| u64::from_le_bytes(*word)))
    };
    ensure!(
        word(0)? == table.address,
        "its module data are of another version"
    );
    word(TEXT_IN_MODULE)
}

/// Returns the addresses of those functions of a Go program that have these names, each with its name. A file that is
/// no Go program has none.
///
/// # Errors
/// If the table of symbols is malformed, or over the limits.
pub(crate) fn functions_named<'a>(
    file: &Elf<'_>,
    wanted: &'a [&'a str],
) -> Result<Vec<(&'a str, Range<u64>)>> {
    if file.section(".go.buildinfo").is_none() {
        return Ok(Vec::new());
    }
    let Some((table, names)) = file.symbol_table(raw::SHT_SYMTAB) else {
        // Who looks for names reports a malformed table. Rules for other code are valid without it.
        let functions = GoFunctions::read(file).ok().flatten();
        let found = |name: &&'a str| Some((*name, functions.as_ref()?.named(name)?));
        return Ok(wanted.iter().filter_map(found).collect());
    };
    if names.size > limits::MAX_SYMBOLS {
        return Ok(Vec::new());
    }
    let names = file.bytes(names.file_offset, names.size as usize)?;
    let mut found = Vec::new();
    file.each_function(table, |symbol| {
        let name = names.get(symbol.name as usize..).and_then(c_string);
        let mut wanted = wanted.iter();
        if let Some(name) = wanted.find(|wanted| name == Some(wanted.as_bytes())) {
            let code = symbol.address..symbol.address.saturating_add(symbol.size);
            found.push((*name, code));
        }
        Ok(())
    })?;
    Ok(found)
}
