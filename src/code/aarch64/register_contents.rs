//! Registers of arm64 that hold the arguments of a function at its entry.

/// Number of a function's arguments that handlers can read.
pub(crate) const ARGUMENTS: usize = 6;

/// Registers that hold the arguments at a function's entry, by the numbers of their arguments: each argument is in
/// its own.
pub(crate) const IN_THEIR_OWN: [u8; ARGUMENTS] = [1, 2, 3, 4, 5, 6];
