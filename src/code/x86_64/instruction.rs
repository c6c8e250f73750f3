//! The instruction at a place in a file.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};
use iced_x86::{Decoder, DecoderOptions};

/// Bytes of the longest instruction of x86-64.
pub(super) const LONGEST: usize = 15;

/// Bytes of a file from an offset on, enough for one instruction; zero behind the file's end.
pub type Code = [u8; LONGEST];

/// Instruction that a uprobe writes over the first byte of the probed one (int3).
pub(crate) const BREAKPOINT: [u8; 1] = [0xcc];

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
