//! Analysis of the machine code of arm64, whose instructions have four bytes each. The directory beside this one has
//! files of the same names for another architecture. [`code`](super) includes the directory of the target architecture
//! as the module `arch`.
//!
//! | module | what it is for |
//! |---|---|
//! | `entry` | the instructions with which a function begins, and which of them a uprobe may be on |
//! | `frame_at_call` | the frame that a function has when it calls another one: not known on arm64 |
//! | `register_contents` | registers of a function's arguments |
//! | `instruction` | instructions, as bytes of a file |
//! | `jumps` | targets of jumps |
//! | `pymalloc` | where CPython's allocator takes slots of its pools: not known on arm64 |
//! | [`registers`] | the machine in ELF files, and its registers in unwind information |
//! | `wrappers` | functions that only pass a call on to another one: not recognized on arm64 |

pub(super) mod entry;
pub(crate) mod frame_at_call;
pub(super) mod instruction;
pub(super) mod jumps;
pub(super) mod pymalloc;
pub(super) mod register_contents;
pub mod registers;
pub(super) mod wrappers;
