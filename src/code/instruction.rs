//! The instruction at a place in a file.

use std::fs::File;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};

pub(crate) use crate::code::arch::instruction::{BREAKPOINT, CODE_BYTES};
pub use crate::code::arch::instruction::{Code, is_valid};

/// Reads the bytes at this offset of a file.
///
/// # Errors
/// If the file ends before this offset.
pub fn code_at(file: &File, offset: u64) -> Result<Code> {
    let mut code = [0; CODE_BYTES];
    let length = file.read_at(&mut code, offset).context("failed to read")?;
    (length > 0)
        .then_some(code)
        .with_context(|| format!("the file ends before {offset:#x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_behind_the_end_of_a_file() {
        let file = File::open("/proc/self/exe").expect("our program");
        assert!(code_at(&file, 0).expect("a header").starts_with(b"\x7fELF"));
        let end = file.metadata().expect("a size").len();
        assert_eq!(
            code_at(&file, end - 1).expect("a byte")[1..],
            [0; CODE_BYTES - 1]
        );
        assert!(code_at(&file, end).is_err());
        assert!(code_at(&file, u64::MAX).is_err());
    }
}
