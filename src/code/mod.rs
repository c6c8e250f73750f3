//! Machine code and the ELF files that it comes from.
//!
//! | module | what it is for |
//! |---|---|
//! | `arch` | code for one architecture, in a directory of its name: function entries, contents of registers, jumps |
//! | [`eh_frame`] | the functions that have unwind information |
//! | [`elf`] | queries of ELF files: functions by name, code, kind of program |
//! | [`elf_file`] | parser for the headers, symbols and relocations of an ELF file |
//! | `frame_at_call` | the frame that a function has when it calls another one |
//! | `go_functions` | the functions of a Go program, by the table of Go's runtime |
//! | [`instruction`] | the instruction at a place in a file |
//! | [`lines`] | source lines of machine code |
//! | [`limits`] | limits of memory and time for reading one file of another user |
//! | [`pymalloc`] | where CPython's allocator takes slots of its pools, and gives them back |
//! | [`probe_point`] | where in a function a uprobe costs least |
//! | `symbol_copy` | a copy of a file's symbols, which blazesym can read |
//! | [`registers`] | the machine in ELF files, and its registers in unwind information |
//! | [`symbols`] | the function that an offset in a file is in |
//! | [`wrappers`] | functions that only pass a call on to another one |

#[cfg_attr(target_arch = "aarch64", path = "aarch64/mod.rs")]
#[cfg_attr(target_arch = "x86_64", path = "x86_64/mod.rs")]
mod arch;
pub mod eh_frame;
pub mod elf;
pub mod elf_file;
pub(crate) mod go_functions;
pub mod instruction;
pub mod limits;
pub mod lines;
pub mod probe_point;
pub mod pymalloc;
mod symbol_copy;
pub mod symbols;
pub mod wrappers;

pub(crate) use arch::frame_at_call;
pub use arch::registers;
