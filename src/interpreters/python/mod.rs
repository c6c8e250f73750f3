//! CPython: which function of which file a frame executes, and which line of it.
//!
//! A Python frame in a stack is a word with bit 63 set: bits 62 to 20 name the code object, and bits 19 to
//! 0 are the instruction in it. The kernel half sends what a code object is called when it meets it first,
//! in the walk that met it ([`codes`]); so names outlive the process, and the code object.
//!
//! | module | what it is for |
//! |---|---|
//! | [`code`] | a code object, as the kernel half sends it |
//! | [`codes`] | all code objects that were met, by their words |
//! | `deaths` | probes where code objects end |
//! | [`lines`] | from an instruction to its line |
//! | `locate` | where a process has its interpreter |
//! | `offsets` | where that keeps what is read of it, by version |
//! | `pythons` | the processes whose frames the kernel half is to walk |

pub mod code;
pub mod codes;
mod deaths;
pub mod lines;
mod locate;
mod offsets;
pub(crate) mod pythons;
