//! Frame as a stack has it, decoded from a word.

use crate::bpf::types;

/// Frame as a stack has it: where its code is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RawFrame {
    /// The address that the frame returns to: the call lies before it.
    Return(u64),
    /// The instruction at which the frame was interrupted.
    Interrupted(u64),
    /// A frame of Python, as the word that encodes its code object and instruction. The Python frames of one call of
    /// the interpreter's loop follow the native frame of the loop, innermost first.
    Python(u64),
    /// Mark before Python frames whose interpreter loops are not among the native frames before it.
    PythonUnpaired,
    /// Mark for further frames of Python, which could not be read or did not fit.
    PythonCut,
    /// A frame of an interpreted Java function.
    Java {
        /// Address of the function's `Method`.
        method: u64,
        /// Lower bits of the address of the bytecode at which the function calls, if its frame notes that address.
        bytecode: Option<u16>,
    },
}

impl RawFrame {
    /// Decodes a word of a user stack.
    pub(crate) fn of_user(word: u64, interrupted: bool) -> Self {
        /// `PYTHON_WORD` in C. No user-space address has this bit set.
        const PYTHON: u64 = 1 << 63;
        const JAVA: u64 = 1 << types::hotspot_layout::HOTSPOT_INTERPRETED_BIT.0;
        const UNPAIRED: u64 = PYTHON | types::python_mark::PYTHON_UNPAIRED.0 as u64;
        const CUT: u64 = PYTHON | types::python_mark::PYTHON_CUT.0 as u64;
        match word {
            UNPAIRED => Self::PythonUnpaired,
            CUT => Self::PythonCut,
            _ if word & PYTHON != 0 => Self::Python(word),
            _ if word & JAVA != 0 => Self::of_java(word),
            _ => Self::of_native(word, interrupted),
        }
    }

    /// Decodes the word of an interpreted Java function.
    fn of_java(word: u64) -> Self {
        const KNOWN: u64 = 1 << types::hotspot_layout::HOTSPOT_BYTECODE_BIT.0;
        const SHIFT: u32 = types::hotspot_layout::HOTSPOT_BYTECODE_SHIFT.0;
        Self::Java {
            method: (word & ((1 << SHIFT) - 1)) << 3,
            bytecode: (word & KNOWN != 0).then_some((word >> SHIFT) as u16),
        }
    }

    /// Creates a native frame from its address.
    pub(crate) fn of_native(address: u64, interrupted: bool) -> Self {
        if interrupted {
            Self::Interrupted(address)
        } else {
            Self::Return(address)
        }
    }

    /// Returns the absolute address as in the stack, or None for an interpreted frame.
    pub fn address(self) -> Option<u64> {
        match self {
            Self::Return(address) | Self::Interrupted(address) => Some(address),
            Self::Python(_) | Self::PythonUnpaired | Self::PythonCut | Self::Java { .. } => None,
        }
    }

    /// Returns an address within the instruction of the frame, or None for an interpreted frame.
    pub fn instruction(self) -> Option<u64> {
        match self {
            Self::Return(address) => Some(address.wrapping_sub(1)),
            _ => self.address(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_of_java_has_the_method_and_where_it_calls() {
        const INTERPRETED: u64 = 1 << 62;
        let word = INTERPRETED | 1 << 61 | 0xfffe << 44 | 0x7fa2_0000_1238 >> 3;
        let expected = RawFrame::Java {
            method: 0x7fa2_0000_1238,
            bytecode: Some(0xfffe),
        };
        assert_eq!(RawFrame::of_user(word, false), expected);
        assert_eq!((expected.address(), expected.instruction()), (None, None));
        let without = RawFrame::Java {
            method: 0x1238,
            bytecode: None,
        };
        assert_eq!(RawFrame::of_user(INTERPRETED | 0x1238 >> 3, false), without);
    }
}
