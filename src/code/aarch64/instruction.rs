//! Instructions, as bytes of a file.

/// Bytes of an instruction of arm64 and of three that follow it, by which a copy of the code is recognized.
pub(crate) const CODE_BYTES: usize = 16;

/// Bytes of a file from an offset on, enough for one instruction; zero behind the file's end.
pub type Code = [u8; CODE_BYTES];

/// Instruction that a uprobe writes over the probed one (brk #5).
pub(crate) const BREAKPOINT: [u8; 4] = 0xd420_00a0_u32.to_le_bytes();

/// Whether these bytes are an instruction, as far as they tell: one with an upper half of 0 is never defined (udf).
pub fn is_valid(code: &Code) -> bool {
    code[2..4] != [0, 0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_and_what_is_none() {
        let mut code = Code::default();
        assert!(!is_valid(&code));
        code[4..8].copy_from_slice(&0xd503_245f_u32.to_le_bytes());
        assert!(!is_valid(&code), "the instruction behind it counts");
        code[..4].copy_from_slice(&0xd503_245f_u32.to_le_bytes());
        assert!(is_valid(&code), "bti c");
    }
}
