//! Probes of CPython's allocator of small objects, pymalloc (`--python-objects`).
//!
//! Objects of up to 512 bytes are in slots of pools. Compilers copy the code that takes a slot, or gives one back, to
//! where an object is allocated or freed. Each copy is probed, and so is the function that makes a pool and takes the
//! pool's first slot. The size of a block is that of its slot, a multiple of 16: at a copy, the requested size is not
//! known.

use anyhow::Result;
use memtools::code::eh_frame;
use memtools::code::elf::Function;
use memtools::code::pymalloc::{self, SlotProbe};
use memtools::process::mapped_file::MappedFile;

use super::objects::warn_once;

/// Exported function of CPython that calls pymalloc.
const CALLER: &str = "PyObject_Malloc";

/// Whether a file with a function of this name has CPython's allocator in it.
pub(super) fn is_caller(name: &str) -> bool {
    name == CALLER
}

/// Places in a file that are probed for CPython's objects.
#[derive(Debug)]
pub(super) struct Places {
    pub(super) slots: Vec<SlotProbe>,
    /// Function that makes a pool.
    pub(super) new_pool: Function,
}

/// Finds the places in a file with these functions. Returns None if the file has no CPython, or if CPython's code is
/// not as expected, which is reported.
///
/// # Errors
/// If the file cannot be read.
pub(super) fn places(file: &MappedFile, found: &[Function]) -> Result<Option<Places>> {
    if !found.iter().any(|function| is_caller(&function.name)) {
        return Ok(None);
    }
    let functions = eh_frame::functions_of(file.file())?;
    let Some(found) = pymalloc::places(file.file(), &functions)? else {
        warn_of_unseen_objects(&file.module(), "its allocator's code is not as expected");
        return Ok(None);
    };
    Ok(Some(Places {
        slots: found.slots,
        new_pool: Function {
            name: "allocate_from_new_pool".to_owned(),
            file_offset: found.new_pool.start,
            size: found.new_pool.end - found.new_pool.start,
        },
    }))
}

/// Tells, once, why CPython's objects in a file are not seen one by one.
pub(super) fn warn_of_unseen_objects(module: &str, why: &str) {
    warn_once(&format!(
        "objects of up to 512 bytes are not traced one by one in {module}, as {why}; with PYTHONMALLOC=malloc in its \
         environment each object is a block"
    ));
}
