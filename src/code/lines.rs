//! Source lines of machine code, from the DWARF of an ELF file.
//!
//! The files are mapped, and their owners can write into them whatever they like. A file that is cut short, or
//! inlined calls a million deep, end the process that reads it. So a process that has nothing else to do reads the
//! files (`stacks::source_lines`).

use std::borrow::Cow;
use std::fs::File;
use std::sync::Arc;

use addr2line::{Context, LookupContinuation, LookupResult};
use anyhow::{Context as _, Result};
use gimli::{Dwarf, DwarfPackage, EndianSlice, RunTimeEndian};
use memmap2::Mmap;
use object::{Object, ObjectSection};
use serde::{Deserialize, Serialize};

use crate::code::limits;
use crate::print::text;

/// Maximum number of functions that an address is in, by inlining. Further outer functions are omitted.
const MAX_INLINED: usize = 64;
/// Bytes of a source file's path that are kept.
const MAX_PATH: usize = 4096;

/// A place in the source that an instruction was made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceLine {
    /// The function, if the DWARF has it: mangled as it is read, demangled and escaped in a stack.
    pub function: Option<String>,
    /// The path of the source file, as the compiler was given it; escaped in a stack.
    pub file: Option<String>,
    /// The line, from 1; 0 if there is none.
    pub line: u32,
}

impl SourceLine {
    /// A function whose place in the source is not known.
    pub fn of_function(function: Option<String>) -> Self {
        Self {
            function,
            file: None,
            line: 0,
        }
    }
}

type Bytes = EndianSlice<'static, RunTimeEndian>;

/// The DWARF of one program or library. Its memory is kept until the process ends.
pub struct FileLines {
    context: Context<Bytes>,
    package: Option<DwarfPackage<Bytes>>,
}

impl FileLines {
    /// Reads the DWARF in `file`. Parts of it can be in a package (`.dwp`), and in a supplement that several files
    /// share (made by dwz).
    ///
    /// # Errors
    /// If one of them is no ELF file, or its sections are inconsistent.
    pub fn read(file: &File, package: Option<&File>, supplement: Option<&File>) -> Result<Self> {
        let sections = Sections::of(file)?;
        let mut dwarf = Dwarf::load(|id| sections.get(Some(id.name())))?;
        if let Some(supplement) = supplement {
            let sections = Sections::of(supplement)?;
            dwarf.load_sup(|id| sections.get(Some(id.name())))?;
        }
        let package = package.map(|package| -> Result<_> {
            let sections = Sections::of(package)?;
            DwarfPackage::load(|id| sections.get(id.dwo_name()), sections.bytes(&[]))
        });
        Ok(Self {
            context: Context::from_dwarf(dwarf)?,
            package: package.transpose()?,
        })
    }

    /// Returns the source lines of the instruction at an address of the file: the innermost inlined call first, and
    /// last the place in the enclosing function itself. Returns no lines if the DWARF has none for the address.
    ///
    /// # Errors
    /// If the DWARF is invalid.
    pub fn find(&self, address: u64) -> Result<Vec<SourceLine>> {
        let mut lookup = self.context.find_frames(address);
        let mut frames = loop {
            match lookup {
                LookupResult::Output(frames) => break frames?,
                LookupResult::Load { load, continuation } => {
                    let package = self.package.as_ref();
                    let unit = package.map(|package| package.find_cu(load.dwo_id, &load.parent));
                    let unit = unit.transpose()?.flatten();
                    lookup = continuation.resume(unit.map(Arc::new));
                }
            }
        };
        let mut lines = Vec::new();
        while let Some(frame) = frames.next()?
            && lines.len() < MAX_INLINED
        {
            let function = frame.function.as_ref().map(|name| name.raw_name());
            let function = function.transpose()?;
            let place = frame.location.as_ref();
            lines.push(SourceLine {
                function: function.map(|name| within(&name, limits::MAX_NAME)),
                file: place.and_then(|place| Some(within(place.file?, MAX_PATH))),
                line: place.and_then(|place| place.line).unwrap_or(0),
            });
        }
        Ok(lines)
    }
}

/// The sections of a file that is mapped for as long as the process runs.
struct Sections {
    file: object::File<'static>,
    endian: RunTimeEndian,
}

impl Sections {
    fn of(file: &File) -> Result<Self> {
        // SAFETY: a change of the file changes what is read of it, which is not trusted anyway. Cutting the file
        // short ends the process, which is made for that.
        let bytes = unsafe { Mmap::map(file) }.context("failed to map it")?;
        let bytes: &'static Mmap = Box::leak(Box::new(bytes));
        let file = object::File::parse(&**bytes)?;
        let endian = match file.is_little_endian() {
            true => RunTimeEndian::Little,
            false => RunTimeEndian::Big,
        };
        Ok(Self { file, endian })
    }

    fn bytes(&self, bytes: &'static [u8]) -> Bytes {
        Bytes::new(bytes, self.endian)
    }

    /// Returns the uncompressed contents of the section with this name; nothing if there is no such section.
    fn get(&self, name: Option<&str>) -> Result<Bytes> {
        let section = name.and_then(|name| self.file.section_by_name(name));
        let data = section.map(|section| section.uncompressed_data());
        Ok(match data.transpose()? {
            None => self.bytes(&[]),
            Some(Cow::Borrowed(data)) => self.bytes(data),
            Some(Cow::Owned(data)) => self.bytes(Box::leak(data.into_boxed_slice())),
        })
    }
}

fn within(text: &str, bytes: usize) -> String {
    text::truncate(text, bytes).to_owned()
}
