//! Functions by which CPython allocates its objects, including small ones, which are in arenas (`--python-objects`).
//!
//! `PyObject_Malloc` and its siblings call these functions through a table of pointers, so probes on the functions see
//! each object. An interpreter that was built with profile-guided optimization, as distributions build it, has copies
//! of the functions in their callers: a caller compares the pointer with what the profile has seen, and goes on with a
//! copy. Such copies cannot be probed.

use std::fs::File;

use anyhow::Result;
use memtools::code::elf::{self, Function};

use super::signature::Signature;

/// Local functions of the interpreter that allocate and free objects. Each has a context before the arguments that its
/// name suggests.
const FUNCTIONS: [(&str, Signature); 4] = [
    ("_PyObject_Malloc", Signature::allocate(2)),
    ("_PyObject_Calloc", Signature::allocate(3).times(2)),
    ("_PyObject_Realloc", Signature::allocate(3).replacing(2)),
    ("_PyObject_Free", Signature::free(2)),
];

/// Exported functions that call the local ones through pointers.
const CALLERS: [&str; 4] = [
    "PyObject_Malloc",
    "PyObject_Free",
    "PyMem_Malloc",
    "PyMem_Free",
];

/// Returns the signature of a function of this name, if it is one of [`FUNCTIONS`].
pub(super) fn signature(name: &str) -> Option<Signature> {
    let known = FUNCTIONS.iter().find(|(known, _)| *known == name);
    known.map(|(_, signature)| *signature)
}

/// Returns the signatures of all [`FUNCTIONS`].
pub(super) fn signatures() -> impl Iterator<Item = Signature> {
    FUNCTIONS.iter().map(|&(_, signature)| signature)
}

/// Whether a function of this name is one of [`CALLERS`].
pub(super) fn is_caller(name: &str) -> bool {
    CALLERS.contains(&name)
}

/// Returns why the objects of CPython cannot be seen one by one in a file with the functions `found`. Returns None if
/// they can, or if the file has no CPython.
///
/// # Errors
/// If the file cannot be read.
pub(super) fn why_not(file: &File, found: &[Function]) -> Result<Option<&'static str>> {
    if !found.iter().any(|function| is_caller(&function.name)) {
        return Ok(None);
    }
    let segments = elf::code_segments(file)?;
    let address = |function: &Function| elf::address(&segments, function.file_offset);
    let own = FUNCTIONS.iter().filter_map(|(name, _)| {
        let function = found.iter().find(|function| function.name == *name)?;
        address(function)
    });
    let own: Vec<u64> = own.collect();
    if own.len() < FUNCTIONS.len() {
        return Ok(Some(
            "it is stripped of the symbols of the functions that allocate them",
        ));
    }
    for function in found.iter().filter(|function| is_caller(&function.name)) {
        let code = function.code(file)?;
        if address(function).is_some_and(|address| mentions(&code, address, &own)) {
            return Ok(Some(
                "its compiler has made copies of the functions that allocate them",
            ));
        }
    }
    Ok(None)
}

/// Whether the code at address `at` has one of these addresses in an instruction, either absolute or relative to the
/// next instruction.
fn mentions(code: &[u8], at: u64, addresses: &[u64]) -> bool {
    let mut places = code.windows(4).zip(at + 4..);
    places.any(|(bytes, next)| {
        let Ok(bytes) = bytes.try_into() else {
            return false;
        };
        let number = i32::from_le_bytes(bytes);
        let relative = next.wrapping_add_signed(number.into());
        addresses.contains(&relative) || addresses.contains(&u64::from(number.cast_unsigned()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_found_in_both_forms() {
        // cmp $0x544e90,%rax
        let absolute = [0x48, 0x3d, 0x90, 0x4e, 0x54, 0];
        assert!(mentions(&absolute, 0x544d78, &[1, 0x544e90]));
        assert!(!mentions(&absolute, 0x544d78, &[0x544e91]));
        // lea 0x100(%rip),%rdx
        let relative = [0x48, 0x8d, 0x15, 0, 1, 0, 0];
        assert!(mentions(&relative, 0x1000, &[0x1107]));
        assert!(!mentions(&relative, 0x1000, &[0x1108]));
    }

    #[test]
    fn a_file_without_cpython_has_nothing_to_say() {
        let file = File::open("/proc/self/exe").expect("a program");
        assert_eq!(why_not(&file, &[]).expect("its code"), None);
        let caller = Function {
            name: "PyObject_Malloc".to_owned(),
            file_offset: 0,
            size: 0,
        };
        let why = why_not(&file, &[caller]).expect("its code");
        assert!(why.is_some_and(|why| why.starts_with("it is stripped")));
    }
}
