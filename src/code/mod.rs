//! Room `code`: machine code and the ELF files that it comes from.
//!
//! | module | what it is for |
//! |---|---|
//! | `arch` | what is of one architecture, in a folder of its name: how functions begin, what registers hold, jumps |
//! | [`elf`] | what is asked of ELF files: functions by name, code, kind of program |
//! | [`elf_file`] | the headers of an ELF file, and what is read by them |
//! | [`instruction`] | the instruction at a place in a file |
//! | [`lines`] | source lines of machine code |
//! | [`limits`] | what the reading of one file of another user may take |
//! | [`probe_place`] | where in a function a uprobe costs least |
//! | `symbol_copy` | a copy of a file's symbols, which blazesym can read |
//! | [`registers`] | the machine in ELF files, and its registers in unwind information |
//! | [`symbols`] | the function that an offset in a file is in |
//! | [`wrappers`] | functions that only pass a call on to another one |

#[cfg(target_arch = "x86_64")]
#[path = "x86_64/mod.rs"]
mod arch;
pub mod elf;
pub mod elf_file;
pub mod limits;
pub mod lines;
pub mod probe_place;
mod symbol_copy;
pub mod symbols;

pub use arch::{instruction, registers, wrappers};
