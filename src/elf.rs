//! Functions of an ELF file by name, and what kind of program it is.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::io::Seek;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};
use memmap2::Mmap;
use object::read::ReadCache;
use object::read::elf::ElfFile64;
use object::{Object, ObjectSection, ObjectSegment, ObjectSymbol, SymbolKind};

/// Bytes of a function's code that are read; no allocator's function has as many.
const MAX_CODE: u64 = 1 << 20;

/// A function that a file defines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Its symbol, without version.
    pub name: String,
    /// Its first byte in the file.
    pub file_offset: u64,
    /// Its size in bytes, 0 if the symbol does not tell.
    pub size: u64,
}

impl Function {
    /// Its instructions, as they are in the file.
    pub fn code(&self, file: &File) -> Result<Vec<u8>> {
        let mut code = vec![0; self.size.min(MAX_CODE) as usize];
        file.read_exact_at(&mut code, self.file_offset)
            .with_context(|| format!("failed to read the code of {}", self.name))?;
        Ok(code)
    }
}

/// The file's bytes, for what is read in many small parts: to read each symbol's name takes two
/// system calls.
///
/// A file that is made shorter by somebody else meanwhile ends the process (SIGBUS). Those that are
/// executed are replaced instead.
pub fn map(file: &File) -> Result<Mmap> {
    // SAFETY: whatever the bytes are, and become, they are read as untrusted.
    unsafe { Mmap::map(file) }.context("failed to map the file")
}

/// The functions of `file` that `wanted` accepts, from `.dynsym` and `.symtab`. It is given the name,
/// and whether the symbol is local, as that of a program's own static `free` is.
///
/// A function with several accepted names is listed once for each.
pub fn functions(file: &File, wanted: impl Fn(&str, bool) -> bool) -> Result<Vec<Function>> {
    let bytes = map(file)?;
    let elf =
        ElfFile64::<object::Endianness, _>::parse(&*bytes).context("not a 64-bit ELF file")?;
    let mut sizes: HashMap<(String, u64), u64> = HashMap::new();
    for symbol in elf.dynamic_symbols().chain(elf.symbols()) {
        if symbol.kind() != SymbolKind::Text || !symbol.is_definition() {
            continue;
        }
        let Ok(name) = symbol.name() else { continue };
        let name = name.split('@').next().unwrap_or(name);
        if wanted(name, symbol.is_local())
            && let Some(offset) = file_offset(&elf, symbol.address())
        {
            let size = sizes.entry((name.to_owned(), offset)).or_default();
            *size = symbol.size().max(*size);
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

/// A part of a file that is mapped to be executed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodeSegment {
    /// Its first byte in the file's own address space.
    pub address: u64,
    /// Its first byte in the file.
    pub file_offset: u64,
    /// Its size in bytes.
    pub size: u64,
}

impl CodeSegment {
    /// Whether this address is in it.
    pub fn has(&self, address: u64) -> bool {
        (self.address..self.address + self.size).contains(&address)
    }

    /// Reads it in pieces of `length` bytes, which overlap by `overlap`; `each` is given the
    /// address of a piece and its bytes.
    pub fn read(
        &self,
        file: &File,
        (length, overlap): (usize, usize),
        mut each: impl FnMut(u64, &[u8]),
    ) -> Result<()> {
        let mut bytes = vec![0; length];
        let mut at = 0;
        while at < self.size {
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
pub fn code_segments(file: &File) -> Result<Vec<CodeSegment>> {
    let cache = ReadCache::new(file);
    let elf = ElfFile64::<object::Endianness, _>::parse(&cache).context("not a 64-bit ELF file")?;
    let segments = elf.segments().filter_map(|segment| {
        let executable = segment.permissions().executable();
        let (file_offset, size) = segment.file_range();
        let address = segment.address();
        executable.then_some(CodeSegment {
            address,
            file_offset,
            size,
        })
    });
    Ok(segments.collect())
}

/// Where code that is here in a file is in the file's own address space, which jumps are relative to.
pub fn address(segments: &[CodeSegment], file_offset: u64) -> Option<u64> {
    segments.iter().find_map(|segment| {
        let within = file_offset.checked_sub(segment.file_offset)?;
        (within < segment.size).then_some(segment.address + within)
    })
}

/// Where in the file a virtual address of its code is.
fn file_offset<'data>(elf: &impl Object<'data>, address: u64) -> Option<u64> {
    elf.segments().find_map(|segment| {
        let (offset, size) = segment.file_range();
        let within = address.checked_sub(segment.address())?;
        (within < size).then_some(offset + within)
    })
}

/// The first bytes of an ELF header that tell its class and machine.
const HEADER_BYTES: usize = 20;

/// Whether the program is for this machine's own 64-bit architecture.
pub fn is_native(mut file: &File) -> Result<bool> {
    const CLASS: usize = 4;
    const CLASS_64: u8 = 2;
    const MACHINE: usize = 18;
    let machine = if cfg!(target_arch = "x86_64") {
        object::elf::EM_X86_64
    } else {
        object::elf::EM_AARCH64
    };
    let mut header = [0; HEADER_BYTES];
    file.rewind()
        .and_then(|()| file.read_exact(&mut header))
        .context("failed to read the program")?;
    Ok(header.starts_with(b"\x7fELF")
        && header[CLASS] == CLASS_64
        && u16::from_le_bytes([header[MACHINE], header[MACHINE + 1]]) == machine.0)
}

/// Whether the Go toolchain linked the file. Its goroutines move their stacks, which a return
/// probe, whose return address lies on the stack, does not survive.
pub fn is_go(file: &File) -> bool {
    let cache = ReadCache::new(file);
    ElfFile64::<object::Endianness, _>::parse(&cache)
        .is_ok_and(|elf| elf.section_by_name(".go.buildinfo").is_some())
}

/// The program interpreter (dynamic linker) that the file asks for, as the file spells it.
pub fn interpreter(file: &File) -> Result<Option<Vec<u8>>> {
    let cache = ReadCache::new(file);
    let elf = ElfFile64::<object::Endianness, _>::parse(&cache).context("not a 64-bit ELF file")?;
    let Some(section) = elf.section_by_name(".interp") else {
        return Ok(None);
    };
    let mut path = section.data().context("failed to read .interp")?.to_vec();
    path.truncate(
        path.iter()
            .position(|&byte| byte == 0)
            .unwrap_or(path.len()),
    );
    Ok(Some(path))
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut file = own_program();
        file.seek(std::io::SeekFrom::Start(function.file_offset))
            .and_then(|_| file.read_exact(&mut bytes))
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
    fn a_text_file_is_no_elf_file() {
        let file = File::open(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).expect("a file");
        assert!(!is_native(&file).expect("long enough"));
        assert!(functions(&file, |_, _| true).is_err());
    }
}
