//! Queries of ELF files, which may belong to any user: functions by name, code, and the kind of program.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};
use memchr::memmem;
use object::elf as raw;

use crate::code::elf_file::{Elf, Section, c_string, read_at};
use crate::code::limits::{self, Deadline};
use crate::code::registers::MACHINE;

/// Bytes of a function's code that are read; no allocator's function has as many.
pub(super) const MAX_FUNCTION: u64 = 1 << 20;
/// Bytes of the names of what a file exports and needs.
const MAX_DYNAMIC_NAMES: u64 = 16 << 20;
/// Bytes of symbols' names that are kept in memory at a time.
const NAMES: u64 = 32 << 20;

/// A function that a file defines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// The function's symbol, without version.
    pub name: String,
    /// Offset in the file of the first byte.
    pub file_offset: u64,
    /// Size in bytes, 0 if the symbol does not tell.
    pub size: u64,
}

impl Function {
    /// The function's instructions, as they are in the file.
    ///
    /// # Errors
    /// If the file ends before the function does.
    pub fn code(&self, file: &File) -> Result<Vec<u8>> {
        let length = self.size.min(MAX_FUNCTION) as usize;
        read_at(file, self.file_offset, length)
            .with_context(|| format!("failed to read the code of {}", self.name))
    }
}

/// Returns the file's build id, which its linker made of the file's contents.
pub fn build_id(file: &File) -> Option<Vec<u8>> {
    Elf::read(file).ok()?.build_id()
}

/// Returns the functions of `file` that `wanted` accepts, from `.dynsym` and `.symtab`. `wanted` is given the name,
/// and whether the symbol is local, such as the symbol of a program's own static `free`.
///
/// A function with several accepted names is listed once for each.
///
/// # Errors
/// If it is no 64-bit ELF file, or one that is over the limits.
pub fn functions(file: &File, wanted: impl Fn(&str, bool) -> bool) -> Result<Vec<Function>> {
    let elf = Elf::read(file)?.require_64_bit()?;
    let mut sizes: HashMap<(String, u64), u64> = HashMap::new();
    for kind in [raw::SHT_DYNSYM, raw::SHT_SYMTAB] {
        let Some((table, names)) = elf.symbol_table(kind) else {
            continue;
        };
        ensure!(
            names.size <= limits::MAX_SYMBOLS,
            "the names of its functions have more than {} MiB",
            limits::MAX_SYMBOLS >> 20
        );
        for start in (0..names.size).step_by(NAMES as usize) {
            let part = NamesPart::read(&elf, names, start)?;
            elf.each_function(table, |symbol| {
                let Some(name) = part.name(symbol.name) else {
                    return Ok(());
                };
                if symbol.is_ifunc || !wanted(name, symbol.local) {
                    return Ok(());
                }
                let Some(offset) = elf.file_offset(symbol.address) else {
                    return Ok(());
                };
                let size = sizes.entry((name.to_owned(), offset)).or_default();
                *size = symbol.size.max(*size);
                ensure!(
                    sizes.len() <= limits::MAX_FOUND,
                    "it has more than {} functions of such names",
                    limits::MAX_FOUND
                );
                Ok(())
            })?;
        }
    }
    let mut functions: Vec<Function> = sizes
        .into_iter()
        .map(|((name, file_offset), size)| Function {
            name,
            file_offset,
            size,
        })
        .collect();
    functions.sort_by(|a, b| (a.file_offset, &a.name).cmp(&(b.file_offset, &b.name)));
    Ok(functions)
}

/// Part of a file's names of symbols. Many names are read in parts, and the table of symbols once for each part.
struct NamesPart {
    /// Offset of the part from the first name.
    start: u64,
    /// The names, and so much of the next part as the last name can reach into.
    bytes: Vec<u8>,
}

impl NamesPart {
    fn read(elf: &Elf, names: &Section, start: u64) -> Result<Self> {
        let length = (names.size - start).min(NAMES + limits::MAX_NAME as u64);
        let bytes = elf.bytes(names.file_offset + start, length as usize)?;
        Ok(Self { start, bytes })
    }

    /// Returns the name at an offset from the first name, without version; None if it begins in another part.
    fn name(&self, offset: u32) -> Option<&str> {
        let at = u64::from(offset).checked_sub(self.start)?;
        let bytes = self.bytes.get(at as usize..).filter(|_| at < NAMES)?;
        let name = str::from_utf8(c_string(bytes)?).ok()?;
        name.split('@').next()
    }
}

/// Returns the address of a file's first loaded page, in the file's own address space.
fn first_page(elf: &Elf) -> Result<u64> {
    let loaded = elf.segments.iter().filter(|segment| segment.is_loaded());
    let first = loaded.map(|segment| segment.address & !0xfff).min();
    first.context("nothing of the file is loaded")
}

/// Returns the bytes of memory that a 64-bit file is loaded into, from the first page to the end of its last segment.
/// Zeros that the file does not have (bss) are included.
///
/// # Errors
/// If it is no 64-bit ELF file, or one that is over the limits.
pub fn loaded_bytes(file: &File) -> Result<u64> {
    let elf = Elf::read(file)?.require_64_bit()?;
    let first = first_page(&elf)?;
    let loaded = elf.segments.iter().filter(|segment| segment.is_loaded());
    let end = loaded.map(|segment| segment.address.saturating_add(segment.memory_size));
    Ok(end.max().unwrap_or(first).saturating_sub(first))
}

/// Returns the variables that hold each of these places of a 64-bit file's data: the symbol, and the place's offset
/// from the variable's start. A place is an address minus the address at which the file's first byte is mapped.
///
/// # Errors
/// If it is no 64-bit ELF file, or one that is over the limits.
pub fn variables(file: &File, places: &BTreeSet<u64>) -> Result<HashMap<u64, (String, u64)>> {
    /// Bytes of a name that are read.
    const NAME: u64 = 512;
    let elf = Elf::read(file)?.require_64_bit()?;
    let first = first_page(&elf)?;
    let mut found = HashMap::new();
    for kind in [raw::SHT_SYMTAB, raw::SHT_DYNSYM] {
        let Some((table, names)) = elf.symbol_table(kind) else {
            continue;
        };
        let mut at: HashMap<u64, (u32, u64)> = HashMap::new();
        elf.each_variable(table, |symbol| {
            let Some(start) = symbol.address.checked_sub(first) else {
                return;
            };
            let end = start.saturating_add(symbol.size.max(1));
            for &place in places.range(start..end) {
                at.entry(place).or_insert((symbol.name, place - start));
            }
        })?;
        for (place, (name, offset)) in at {
            let start = u64::from(name);
            let length = names.size.saturating_sub(start).min(NAME) as usize;
            let bytes = elf.bytes(names.file_offset.saturating_add(start), length);
            if let Some(Ok(name)) = bytes.as_deref().ok().and_then(c_string).map(str::from_utf8)
                && !name.is_empty()
            {
                let name = name.split('@').next().unwrap_or(name);
                let variable = (name.to_owned(), offset);
                found.entry(place).or_insert(variable);
            }
        }
    }
    Ok(found)
}

/// A part of a file that is mapped to be executed. Neither its addresses nor its offsets wrap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodeSegment {
    /// The first byte's address in the file's own address space.
    pub address: u64,
    /// Offset in the file of the first byte.
    pub file_offset: u64,
    /// Size in bytes.
    pub size: u64,
}

impl CodeSegment {
    /// Returns the addresses of the segment.
    pub fn range(&self) -> Range<u64> {
        self.address..self.address + self.size
    }

    /// Returns the offset in the file of the byte at an address of the segment.
    pub fn file_offset_of(&self, address: u64) -> u64 {
        self.file_offset + (address - self.address)
    }

    /// Whether this address is in the segment.
    pub fn has(&self, address: u64) -> bool {
        self.range().contains(&address)
    }

    /// Reads the segment in pieces of `length` bytes, which overlap by `overlap`. `each` is given the address of a
    /// piece and its bytes.
    ///
    /// # Errors
    /// If the file ends before the segment does, or reading takes too long.
    pub fn read(
        &self,
        file: &File,
        (length, overlap): (usize, usize),
        mut each: impl FnMut(u64, &[u8]),
    ) -> Result<()> {
        let deadline = Deadline::start();
        let mut bytes = vec![0; length];
        let mut at = 0;
        while at < self.size {
            deadline.check()?;
            let piece = &mut bytes[..length.min((self.size - at) as usize)];
            file.read_exact_at(piece, self.file_offset + at)
                .context("failed to read the code of a file")?;
            each(self.address + at, piece);
            at += (length - overlap) as u64;
        }
        Ok(())
    }
}

/// The parts of a file that are mapped to be executed.
///
/// # Errors
/// If it is no 64-bit ELF file, or one that is over the limits.
pub(crate) fn code_segments(file: &File) -> Result<Vec<CodeSegment>> {
    Elf::read(file)?.require_64_bit()?.code()
}

/// Converts an offset of code in a file to an address in the file's own address space, which jumps are relative to.
pub fn address(segments: &[CodeSegment], file_offset: u64) -> Option<u64> {
    segments.iter().find_map(|segment| {
        let within = file_offset.checked_sub(segment.file_offset)?;
        (within < segment.size).then_some(segment.address + within)
    })
}

/// The first bytes of an ELF header that hold its class and machine.
const HEADER_BYTES: usize = 20;

/// Whether the program is for this machine's own 64-bit architecture.
///
/// # Errors
/// If the file is shorter than an ELF header.
pub fn is_native(file: &File) -> Result<bool> {
    const CLASS: usize = 4;
    const CLASS_64: u8 = 2;
    const MACHINE_AT: usize = 18;
    let mut header = [0; HEADER_BYTES];
    file.read_exact_at(&mut header, 0)
        .context("failed to read the program")?;
    Ok(header.starts_with(b"\x7fELF")
        && header[CLASS] == CLASS_64
        && u16::from_le_bytes([header[MACHINE_AT], header[MACHINE_AT + 1]]) == MACHINE)
}

/// Whether the Go toolchain linked the file. Goroutines move their stacks, which breaks return probes, as these
/// replace a return address on the stack.
pub fn is_go(file: &File) -> bool {
    Elf::read(file).is_ok_and(|elf| elf.section(".go.buildinfo").is_some())
}

/// Which interpreters a file may hold, or use from another file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InterpreterHints {
    /// CPython.
    pub python: bool,
    /// HotSpot, the Java virtual machine.
    pub hotspot: bool,
}

/// Returns which interpreters a file may hold, by names that the file exports or needs. HotSpot exports such a name
/// for debuggers.
pub(crate) fn may_hold(file: &File) -> InterpreterHints {
    const NAMES: &str = ".dynstr";
    let contents = |elf: &Elf<'_>| elf.contents(elf.section(NAMES)?, MAX_DYNAMIC_NAMES).ok();
    let names = Elf::read(file).ok().and_then(|elf| contents(&elf));
    let has = |name: &[u8]| {
        let found = names.as_ref().map(|names| memmem::find(names, name));
        found.flatten().is_some()
    };
    InterpreterHints {
        python: has(b"\0_PyRuntime\0"),
        hotspot: has(b"\0gHotSpotVMStructs\0"),
    }
}

/// Returns the program interpreter (dynamic linker) that the file asks for, as the file spells it.
///
/// # Errors
/// If it is no 64-bit ELF file, or ends before the name does.
pub fn interpreter(file: &File) -> Result<Option<Vec<u8>>> {
    let elf = Elf::read(file)?.require_64_bit()?;
    let mut segments = elf.segments.iter();
    let Some(segment) = segments.find(|segment| segment.kind == raw::PT_INTERP) else {
        return Ok(None);
    };
    let length = segment.size.min(libc::PATH_MAX as u64) as usize;
    let path = elf
        .bytes(segment.file_offset, length)
        .context("failed to read which interpreter it requests")?;
    Ok(Some(c_string(&path).unwrap_or(&path).to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::registers::C_LIBRARY;
    use crate::print::text;

    fn own_program() -> File {
        File::open("/proc/self/exe").expect("our program")
    }

    #[unsafe(no_mangle)]
    extern "C" fn memtools_elf_test_function() -> u32 {
        41
    }

    #[test]
    fn a_function_is_found_where_its_code_is() {
        assert_eq!(memtools_elf_test_function(), 41);
        let found = functions(&own_program(), |name, _| {
            name == "memtools_elf_test_function"
        })
        .expect("our symbols");
        let [function] = &found[..] else {
            panic!("found {found:?}")
        };
        // The bytes in the file are the bytes in memory.
        let mut bytes = [0; 8];
        own_program()
            .read_exact_at(&mut bytes, function.file_offset)
            .expect("its code");
        // SAFETY: the function is at least eight bytes of readable code, padding included.
        let code = unsafe { *(memtools_elf_test_function as *const [u8; 8]) };
        assert_eq!(bytes, code);
    }

    #[test]
    fn we_are_native_and_not_go() {
        assert!(is_native(&own_program()).expect("an ELF header"));
        assert!(!is_go(&own_program()));
    }

    #[test]
    fn a_program_is_loaded_up_to_the_end_of_its_bss() {
        let program = own_program();
        let bytes = loaded_bytes(&program).expect("our program");
        assert_eq!(Some(bytes), loaded_ends().into_iter().max());
    }

    /// Where readelf says that each segment of our program ends.
    fn loaded_ends() -> Vec<u64> {
        let read = std::process::Command::new("readelf")
            .arg("-lW")
            .arg(std::env::current_exe().expect("our program"))
            .output();
        let read = String::from_utf8(read.expect("binutils").stdout).expect("text");
        let loads = read
            .lines()
            .filter_map(|line| line.trim().strip_prefix("LOAD"));
        let number =
            |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).expect("hex");
        let segments: Vec<_> = loads
            .map(|load| {
                load.split_whitespace()
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            })
            .map(|field| (number(&field[1]), number(&field[4])))
            .collect();
        let first = segments[0].0 & !0xfff;
        segments
            .iter()
            .map(|(address, bytes)| address + bytes - first)
            .collect()
    }

    #[test]
    fn a_build_id_is_what_readelf_says() {
        let library = C_LIBRARY;
        let read = std::process::Command::new("readelf")
            .arg("-n")
            .arg(library)
            .output();
        let read = String::from_utf8(read.expect("binutils").stdout).expect("text");
        let said = read
            .lines()
            .find_map(|line| line.trim().strip_prefix("Build ID: "));
        let file = File::open(library).expect("the C library");
        let id = build_id(&file).expect("a build id");
        assert_eq!(Some(&*text::hex(&id)), said);
    }

    #[test]
    fn a_text_file_is_no_elf_file() {
        let file = File::open(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).expect("a file");
        assert!(!is_native(&file).expect("long enough"));
        assert!(functions(&file, |_, _| true).is_err());
    }
}
