//! Functions that only pass a call on to another one.
//!
//! C++'s `operator new` in libstdc++ returns what `malloc` returned; mimalloc's `mi_free_size` jumps to its
//! `mi_free`. Where the other function is probed, a probe on such a wrapper adds nothing and costs as much
//! again. But an `operator new` with an allocator of its own inside has to be probed. The code shows which is which:
//! all paths through a function are followed, and each has to go through the other function.

pub use crate::code::arch::wrappers::{CallArguments, Calls};

/// A function that another one calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Callee<'a> {
    /// A function of the same file, by the offset of its first byte in the file.
    Own(u64),
    /// A function that the dynamic linker finds by this name.
    Import(&'a str),
}

/// Part of a call that a function passes on unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forwarded {
    /// The result, as `operator new` does.
    Result,
    /// The arguments, as `operator delete` does.
    Arguments,
}

/// Whether a function passes its calls on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Forwarding {
    /// The function does not call the other one, as far as the code shows.
    Never,
    /// The function calls the other one on some paths, and returns without a call on others.
    Sometimes,
    /// The function calls the other one on every path to its return.
    Always,
}
