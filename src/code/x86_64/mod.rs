//! Analysis of the machine code of x86-64. Another architecture is a directory beside this one, with files of the same
//! names. [`code`](super) includes the directory of the target architecture as the module `arch`.
//!
//! | module | what it is for |
//! |---|---|
//! | `entry` | the instructions with which a function begins, and which of them a uprobe may be on |
//! | `frame_at_call` | the frame that a function has when it calls another one |
//! | `register_contents` | contents of registers while these instructions are executed |
//! | `instruction` | instructions, as bytes of a file |
//! | `jumps` | targets of jumps |
//! | `pymalloc` | where CPython's allocator takes slots of its pools, and gives them back |
//! | [`registers`] | the machine in ELF files, and its registers in unwind information |
//! | `wrappers` | functions that only pass a call on to another one |

pub(super) mod entry;
pub(crate) mod frame_at_call;
pub(super) mod instruction;
pub(super) mod jumps;
pub(super) mod pymalloc;
pub(super) mod register_contents;
pub mod registers;
pub(super) mod wrappers;
