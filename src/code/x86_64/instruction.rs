//! Instructions, as bytes of a file.

use iced_x86::{Decoder, DecoderOptions};

/// Bytes of the longest instruction of x86-64.
pub(super) const LONGEST: usize = 15;

/// Bytes that are kept of the code at a place.
pub(crate) const CODE_BYTES: usize = LONGEST;

/// Bytes of a file from an offset on, enough for one instruction; zero behind the file's end.
pub type Code = [u8; CODE_BYTES];

/// Instruction that a uprobe writes over the first byte of the probed one (int3).
pub(crate) const BREAKPOINT: [u8; 1] = [0xcc];

/// Whether these bytes begin with an instruction, as far as they tell.
pub fn is_valid(code: &Code) -> bool {
    !Decoder::new(64, code, DecoderOptions::NONE)
        .decode()
        .is_invalid()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_and_what_is_none() {
        let mut code = Code::default();
        code[..4].copy_from_slice(&[0xf3, 0x0f, 0x1e, 0xfa]);
        assert!(is_valid(&code), "endbr64");
        // push %es is of 32-bit code.
        assert!(!is_valid(&[0x06; LONGEST]));
    }
}
