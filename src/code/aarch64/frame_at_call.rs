//! The frame that a function has when it calls another one, by its machine code: not known on arm64.

/// Frame of a function at its first call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FrameAtCall {
    /// Words from the stack pointer, after the call has returned, to the CFA.
    pub(crate) words: i32,
    /// Whether the caller's frame pointer is in the word below the return address. Otherwise it is in its register.
    pub(crate) saves_frame_pointer: bool,
}

impl FrameAtCall {
    /// Returns the frame of the function that begins with this code: not known.
    pub(crate) fn of(_code: &[u8]) -> Option<Self> {
        None
    }
}

/// Whether a function begins by saving the caller's frame pointer and setting its own: not known.
pub(crate) fn sets_frame_pointer(_code: &[u8]) -> bool {
    false
}
