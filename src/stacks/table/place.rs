//! The place of a frame, as a word of a stack tells it.

use crate::bpf::types;

/// Where a frame's code was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// The address that the frame returns to: the call lies before it.
    Return(u64),
    /// The instruction at which the frame was interrupted.
    Interrupted(u64),
    /// A frame of Python, by the word that tells its code object and the instruction in that. The frames of one call
    /// of the interpreter's loop follow the loop's own, innermost first.
    Python(u64),
    /// The frames of Python that follow are of loops that are among no native frames before.
    PythonUnpaired,
    /// Python has further frames, which could not be read or had no room.
    PythonCut,
    /// A function of Java that is interpreted, by the address of its `Method`.
    Java(u64),
}

impl Place {
    /// What a word of a user's stack stands for.
    pub(super) fn of_user(word: u64, interrupted: bool) -> Self {
        /// `PYTHON_WORD` in C. No address of a process has that bit.
        const PYTHON: u64 = 1 << 63;
        const JAVA: u64 = 1 << types::hotspot_layout::HOTSPOT_INTERPRETED_BIT.0;
        const UNPAIRED: u64 = PYTHON | types::python_mark::PYTHON_UNPAIRED.0 as u64;
        const CUT: u64 = PYTHON | types::python_mark::PYTHON_CUT.0 as u64;
        match word {
            UNPAIRED => Self::PythonUnpaired,
            CUT => Self::PythonCut,
            _ if word & PYTHON != 0 => Self::Python(word),
            _ if word & JAVA != 0 => Self::Java(word & !JAVA),
            _ => Self::of_native(word, interrupted),
        }
    }

    /// What an address stands for.
    pub(super) fn of_native(address: u64, interrupted: bool) -> Self {
        if interrupted {
            Self::Interrupted(address)
        } else {
            Self::Return(address)
        }
    }

    /// The absolute address, as the stack has it; None of what is interpreted.
    pub fn address(self) -> Option<u64> {
        match self {
            Self::Return(address) | Self::Interrupted(address) => Some(address),
            Self::Python(_) | Self::PythonUnpaired | Self::PythonCut | Self::Java(_) => None,
        }
    }

    /// An address within the instruction that the frame is in; None of what is interpreted.
    pub fn instruction(self) -> Option<u64> {
        match self {
            Self::Return(address) => Some(address.wrapping_sub(1)),
            _ => self.address(),
        }
    }
}
