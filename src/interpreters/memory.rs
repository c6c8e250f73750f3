//! Memory of a process that has an interpreter, and the addresses of files and of the program in this memory.

#[cfg(test)]
use std::collections::BTreeMap;
use std::io;
#[cfg(test)]
use std::sync::Mutex;

use anyhow::{Context, Result};

use super::recorded::Pieces;
use crate::code::elf_file::Elf;
use crate::process::proc::Mapping;
use crate::process::reader::RemoteMemory;
pub(super) use crate::process::reader::layout;

/// Memory of a process. The bytes that are read are untrusted.
pub(crate) struct Memory {
    source: Source,
    /// Bytes that were read, by address.
    #[cfg(test)]
    pub(super) log: Mutex<BTreeMap<u64, u8>>,
}

enum Source {
    Running(RemoteMemory),
    Recorded(Pieces),
}

impl Memory {
    fn new(source: Source) -> Self {
        Self {
            source,
            #[cfg(test)]
            log: Mutex::default(),
        }
    }

    /// Creates memory that consists of these pieces.
    pub(super) fn recorded(pieces: Pieces) -> Self {
        Self::new(Source::Recorded(pieces))
    }

    /// Opens the memory of a process.
    ///
    /// # Errors
    /// If the process has exited, or may not be read.
    pub(crate) fn open(pid: u32) -> Result<Self> {
        let memory = RemoteMemory::open(pid);
        memory
            .map(|memory| Self::new(Source::Running(memory)))
            .context("failed to read the memory of a process")
    }

    /// Reads memory into a buffer and fills the buffer.
    ///
    /// # Errors
    /// If a part of the range is not mapped, or the process does not answer.
    pub(crate) fn read_exact(&self, bytes: &mut [u8], address: u64) -> io::Result<()> {
        bytes.copy_from_slice(&self.read(address, bytes.len())?);
        Ok(())
    }

    /// Reads `length` bytes at an address.
    ///
    /// # Errors
    /// If a part of the range is not mapped.
    pub(crate) fn read(&self, address: u64, length: usize) -> io::Result<Vec<u8>> {
        let bytes = self.read_most(address, length)?;
        if bytes.len() < length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(bytes)
    }

    /// Reads memory. Returns fewer bytes if the end of the range is not mapped.
    fn read_most(&self, address: u64, length: usize) -> io::Result<Vec<u8>> {
        let bytes = match &self.source {
            Source::Running(memory) => memory.read(address, length),
            Source::Recorded(pieces) => pieces.read(address, length),
        }?;
        #[cfg(test)]
        self.log
            .lock()
            .expect("no panic")
            .extend((address..).zip(bytes.iter().copied()));
        Ok(bytes)
    }

    /// Reads the word at an address.
    ///
    /// # Errors
    /// If the address is not mapped.
    pub(crate) fn word(&self, address: u64) -> Result<u64> {
        self.bytes(address).map(u64::from_ne_bytes)
    }

    /// Reads the bytes at an address.
    ///
    /// # Errors
    /// If a part of the range is not mapped.
    pub(crate) fn bytes<const LENGTH: usize>(&self, address: u64) -> Result<[u8; LENGTH]> {
        let mut bytes = [0; LENGTH];
        self.read_exact(&mut bytes, address)
            .context("failed to read the memory of a process")?;
        Ok(bytes)
    }

    /// Reads the text at an address up to its first zero byte, but at most `most` bytes.
    ///
    /// # Errors
    /// If the address is not mapped.
    pub(crate) fn c_string(&self, address: u64, most: usize) -> Result<String> {
        // The text may be the last in its mapping: then the read returns fewer bytes.
        let bytes = self
            .read_most(address, most)
            .context("failed to read the memory of a process")?;
        let text = bytes.split(|&byte| byte == 0).next();
        Ok(String::from_utf8_lossy(text.unwrap_or_default()).into_owned())
    }
}

/// Returns the load bias of a file: the difference between addresses in a process and addresses in the file, from one
/// executable mapping.
pub(crate) fn bias(elf: &Elf<'_>, mapping: &Mapping) -> Option<u64> {
    let mut segments = elf.segments.iter().filter(|segment| segment.is_loaded());
    let segment = segments.find(|segment| {
        let bytes = segment.file_offset & !0xfff..segment.file_offset + segment.size;
        segment.executable && bytes.contains(&mapping.file_offset)
    })?;
    let at = segment
        .address
        .wrapping_add(mapping.file_offset.wrapping_sub(segment.file_offset));
    Some(mapping.range.start.wrapping_sub(at))
}
