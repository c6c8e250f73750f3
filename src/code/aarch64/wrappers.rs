//! Calls in the arm64 code of a file. They are not followed: each [wrapper](crate::code::wrappers) is probed, which
//! costs a probe more for each of its calls, and changes no number, as calls within calls are recognized.

use std::fs::File;

use anyhow::Result;

use crate::code::elf::Function;
use crate::code::elf_file::Elf;
use crate::code::wrappers::{Callee, Forwarded, Forwarding};

/// The code of a file.
pub struct Calls {
    /// Whether the dynamic linker finds functions for the file.
    has_imports: bool,
}

/// Arguments that a function gives to the function that it calls.
#[derive(Debug, Clone, Copy)]
pub struct CallArguments(());

impl CallArguments {
    /// Returns the number of the caller's own argument that is given as `argument`: unknown.
    pub fn as_argument(&self, _argument: u8) -> Option<u8> {
        None
    }
}

impl Calls {
    /// The calls in this file's code.
    ///
    /// # Errors
    /// If it is no 64-bit ELF file, or its imports are inconsistent.
    pub fn of(file: &File) -> Result<Self> {
        let imports = Elf::read(file)?.require_64_bit()?.imports()?;
        Ok(Self {
            has_imports: !imports.is_empty(),
        })
    }

    /// Returns whether a function passes its calls on to one of `others`: never, as far as is known.
    pub fn forwarding(
        &self,
        _function: &Function,
        _passes: Forwarded,
        _others: impl Fn(Callee<'_>, CallArguments) -> bool,
    ) -> Forwarding {
        Forwarding::Never
    }

    /// Whether a function can call one of another file: in a file that imports functions it can, as far as is known.
    pub fn leaves_the_file(&self, _function: &Function) -> bool {
        self.has_imports
    }
}
