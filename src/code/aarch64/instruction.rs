//! The instruction at a place in a file.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};

/// Bytes of an instruction of arm64.
pub(super) const LONGEST: usize = 4;

/// Bytes of a file from an offset on, enough for one instruction; zero behind the file's end.
pub type Code = [u8; LONGEST];

/// Instruction that a uprobe writes over the probed one (brk #5).
pub(crate) const BREAKPOINT: [u8; 4] = 0xd420_00a0_u32.to_le_bytes();

/// Reads the bytes at this offset of a file.
///
/// # Errors
/// If the file ends before this offset.
pub fn code_at(file: &File, offset: u64) -> Result<Code> {
    let mut code = [0; LONGEST];
    let length = file.read_at(&mut code, offset).context("failed to read")?;
    (length > 0)
        .then_some(code)
        .with_context(|| format!("the file ends before {offset:#x}"))
}

/// Whether these bytes are an instruction, as far as they tell: one with an upper half of 0 is never defined (udf).
pub fn is_valid(code: &Code) -> bool {
    code[2..] != [0, 0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_and_what_is_none() {
        assert!(is_valid(&0xd503_245f_u32.to_le_bytes()), "bti c");
        assert!(!is_valid(&[0; LONGEST]));
    }

    #[test]
    fn nothing_is_behind_the_end_of_a_file() {
        let file = File::open("/proc/self/exe").expect("our program");
        assert!(code_at(&file, 0).expect("a header").starts_with(b"\x7fELF"));
        let end = file.metadata().expect("a size").len();
        assert_eq!(
            code_at(&file, end - 1).expect("a byte")[1..],
            [0; LONGEST - 1]
        );
        assert!(code_at(&file, end).is_err());
        assert!(code_at(&file, u64::MAX).is_err());
    }
}
