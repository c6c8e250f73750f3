//! Lookup of the function at an offset in a file, by the file's tables of symbols.
//!
//! blazesym does the lookup, in a copy of these tables (`symbol_copy`). An offset past the end of every symbol gets
//! no name. A stripped Go program still has the table of Go's runtime (`go_functions`).

use std::fs::File;
use std::os::fd::AsRawFd;

use anyhow::Result;
use blazesym::symbolize::source;
use blazesym::symbolize::{Input, Symbolized, Symbolizer};
use object::elf as raw;

use crate::code::elf::{self, CodeSegment};
use crate::code::elf_file::{Elf, Source};
use crate::code::go_functions::GoFunctions;
use crate::code::limits;
use crate::code::symbol_copy::SymbolCopy;

/// Memory that is counted for a file beside its symbols. Each file also takes two descriptors and a mapping, so this
/// bounds how many files are kept.
const OVERHEAD: usize = 512 << 10;

/// The functions of a file by address.
#[derive(Debug, Default)]
pub struct Symbols {
    names: Option<Names>,
    /// Functions of a stripped Go program, and where its code is.
    go: Option<(GoFunctions, Vec<CodeSegment>)>,
}

#[derive(Debug)]
struct Names {
    /// The symbolizer for this file alone. Dropping it frees what blazesym keeps of the file.
    blazesym: Symbolizer,
    copy: SymbolCopy,
}

/// The name of a function that an offset is in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    /// The mangled name as the file has it, without its version. A name that does not end within 16 KiB is cut.
    pub text: String,
    /// Whether the name is complete.
    pub is_whole: bool,
    /// The offset from the function's start.
    pub offset: u64,
}

impl Symbols {
    /// Reads the tables of an ELF file of either word size.
    ///
    /// # Errors
    /// If it is no ELF file, or one that is over the limits.
    pub fn of_file(file: &File) -> Result<Self> {
        Self::copy(&Elf::read(file)?, None)
    }

    /// Reads the tables of a stripped ELF file, together with those of the debug file that was split from it.
    ///
    /// # Errors
    /// If one of them is no ELF file, or is over the limits.
    pub(crate) fn of_split_file(file: &File, debug: &dyn Source) -> Result<Self> {
        Self::copy(&Elf::read(file)?, Some(&Elf::read(debug)?))
    }

    fn copy(elf: &Elf<'_>, debug: Option<&Elf<'_>>) -> Result<Self> {
        let copy = SymbolCopy::of(elf, debug)?;
        let names = copy.map(|copy| Names {
            blazesym: Symbolizer::builder()
                .enable_auto_reload(false)
                .enable_code_info(false)
                .enable_inlined_fns(false)
                .enable_demangling(false)
                .build(),
            copy,
        });
        let is_stripped = debug.is_none() && elf.symbol_table(raw::SHT_SYMTAB).is_none();
        let go = is_stripped.then(|| GoFunctions::read(elf)).transpose()?;
        let go = go.flatten().map(|go| anyhow::Ok((go, elf.code()?)));
        Ok(Self {
            names,
            go: go.transpose()?,
        })
    }

    /// Returns the bytes of memory that the symbols take.
    pub fn bytes(&self) -> usize {
        let names = self.names.as_ref();
        let names = names.map_or(0, |names| OVERHEAD + names.copy.bytes);
        names + self.go.as_ref().map_or(0, |(go, _)| go.bytes())
    }

    /// Finds the function that this offset in the file is in.
    pub fn find(&self, file_offset: u64) -> Option<Name> {
        let names = self.names.as_ref();
        let found = names.and_then(|names| names.find(file_offset));
        found.or_else(|| {
            let (go, code) = self.go.as_ref()?;
            let (name, offset) = go.find(elf::address(code, file_offset)?)?;
            let is_whole = name.len() < limits::MAX_NAME;
            let name = &name[..name.len().min(limits::MAX_NAME)];
            Some(Name {
                text: String::from_utf8_lossy(name).into_owned(),
                is_whole,
                offset,
            })
        })
    }
}

impl Names {
    fn find(&self, file_offset: u64) -> Option<Name> {
        let Self { blazesym, copy } = self;
        let mut elf = source::Elf::new(format!("/proc/self/fd/{}", copy.file.as_raw_fd()));
        elf.debug_syms = false;
        let found =
            blazesym.symbolize_single(&source::Source::Elf(elf), Input::FileOffset(file_offset));
        let Ok(Symbolized::Sym(symbol)) = found else {
            return None;
        };
        let is_in_it = symbol.offset < symbol.size.unwrap_or(0);
        // A name without a near end may go on with the names of other functions.
        let mut length = symbol.name.len().min(limits::MAX_NAME);
        while !symbol.name.is_char_boundary(length) {
            length -= 1;
        }
        // `.symtab` has versions in its names, as in `__libc_start_main@@GLIBC_2.34`.
        let text = &symbol.name[..length];
        let text = match text.find('@') {
            Some(version) if version > 0 => &text[..version],
            _ => text,
        };
        is_in_it.then(|| Name {
            text: text.to_owned(),
            is_whole: symbol.name.len() < limits::MAX_NAME,
            offset: symbol.offset as u64,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[unsafe(no_mangle)]
    extern "C" fn memtools_symbols_test_function(value: u32) -> u32 {
        value.rotate_left(3) ^ 41
    }

    #[test]
    fn a_function_is_found_by_where_its_code_is() {
        // Linked only if it is used.
        std::hint::black_box(memtools_symbols_test_function as extern "C" fn(u32) -> u32);
        let file = File::open("/proc/self/exe").expect("our program");
        let symbols = Symbols::of_file(&file).expect("our symbols");
        let name = "memtools_symbols_test_function";
        let found = elf::functions(&file, |found, _| found == name).expect("our symbols");
        let function = found.first().expect("our function");
        let first = symbols.find(function.file_offset).expect("a name");
        assert_eq!((&*first.text, first.offset), (name, 0));
        assert!(first.is_whole);
        let last = function.size - 1;
        let last = symbols.find(function.file_offset + last);
        assert_eq!(last.expect("a name").offset, function.size - 1);
        assert!(symbols.find(u64::MAX).is_none());
        // The ELF header is no function.
        assert!(symbols.find(0).is_none());
    }

    #[test]
    fn names_outlast_the_file() {
        let program = std::fs::read("/proc/self/exe").expect("our program");
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(&program, 0).expect("room");
        let symbols = Symbols::of_file(&file).expect("its symbols");
        // If the file were mapped, SIGBUS would end this process.
        file.set_len(0).expect("an empty file");
        let own = File::open("/proc/self/exe").expect("our program");
        let name = "memtools_symbols_test_function";
        let found = elf::functions(&own, |found, _| found == name).expect("our symbols");
        let start = found.first().expect("our function").file_offset;
        assert_eq!(symbols.find(start).expect("a name").text, name);
        assert!(Symbols::of_file(&file).is_err());
    }
}
