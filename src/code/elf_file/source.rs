//! Sources that an ELF file is read from: a file, or bytes in memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};

/// Bytes that an ELF file is read from: a file, or memory.
pub trait Source {
    /// Returns the number of bytes.
    ///
    /// # Errors
    /// If the kernel does not provide it.
    fn length(&self) -> io::Result<u64>;
    /// Fills the buffer with the bytes from `offset` on.
    ///
    /// # Errors
    /// If there are fewer bytes from `offset` on.
    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
}

impl Source for File {
    fn length(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }
}

impl Source for Vec<u8> {
    fn length(&self) -> io::Result<u64> {
        self.as_slice().length()
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.as_slice().read(buffer, offset)
    }
}

impl Source for &[u8] {
    fn length(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let start = usize::try_from(offset).ok();
        let bytes = start.and_then(|start| self.get(start..)?.get(..buffer.len()));
        buffer.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Reads `length` bytes from `offset` on. The source's length is checked first, so that no memory is taken for bytes
/// that do not exist.
pub(crate) fn read_at(source: &dyn Source, offset: u64, length: usize) -> Result<Vec<u8>> {
    let end = offset.checked_add(length as u64);
    let there = end.is_some_and(|end| source.length().is_ok_and(|all| end <= all));
    ensure!(there, "the file is too short");
    let mut bytes = vec![0; length];
    source
        .read(&mut bytes, offset)
        .context("failed to read the file")?;
    Ok(bytes)
}
