//! Memory of a process that has an interpreter, and the addresses of files and of the program in this memory.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, bail};

use crate::code::elf_file::Elf;
use crate::process::proc::{self, Mapping, Stat};

/// Memory of a process. The bytes that are read are untrusted.
pub(crate) struct Memory(File);

impl Memory {
    /// Opens the memory of a process.
    ///
    /// # Errors
    /// If the process has exited, or may not be read.
    pub(crate) fn open(pid: u32) -> Result<Self> {
        let memory = File::open(proc::file(pid, "mem"));
        memory
            .map(Self)
            .context("failed to read the memory of a process")
    }

    /// Reads memory into a buffer and fills the buffer.
    ///
    /// # Errors
    /// If a part of the range is not mapped.
    pub(crate) fn read_exact(&self, bytes: &mut [u8], address: u64) -> io::Result<()> {
        self.0.read_exact_at(bytes, address)
    }

    /// Reads `length` bytes at an address.
    ///
    /// # Errors
    /// If a part of the range is not mapped.
    pub(crate) fn read(&self, address: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.read_exact(&mut bytes, address)?;
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
        let mut bytes = vec![0; most];
        // The text may be the last in its mapping: then the read returns fewer bytes.
        let length = self
            .0
            .read_at(&mut bytes, address)
            .context("failed to read the memory of a process")?;
        let text = bytes[..length].split(|&byte| byte == 0).next();
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

/// Returns a number that identifies where exec has placed the program of a process: the `layout` of `unwind_space()`
/// on the BPF side.
///
/// # Errors
/// If the process has exited, or may not be read.
pub(crate) fn layout(pid: u32) -> Result<u64> {
    // Numbers of fields in proc_pid_stat(5).
    const END_CODE: usize = 27;
    const START_STACK: usize = 28;
    const START_DATA: usize = 45;
    let stat = Stat::read(proc::file(pid, "stat"))?;
    let field = |number| stat.field::<u64>(number).context("too few fields");
    let (code, stack, data) = (field(END_CODE)?, field(START_STACK)?, field(START_DATA)?);
    if stack <= 1 {
        bail!("not allowed to read where process {pid} has its program");
    }
    Ok((stack ^ code).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ data)
}
