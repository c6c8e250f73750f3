//! Publication of a file's rules to the BPF side: `unwind_publish` in `bpf/include/unwind.bpf.h`.
//!
//! The BPF side identifies a file by the fields of its inode in the kernel. On overlayfs and btrfs, user space sees
//! another number. So the file is mapped here, and a BPF program that we run ourselves looks up the mapping as it will
//! in other processes. An entry is thereby of the very file that the rules were read from.

use std::fs::File;

use anyhow::{Context, Result, bail};
use libbpf_rs::ProgramMut;
use memmap2::MmapOptions;

use crate::bpf::test_run::TestRun;

/// The BPF program `unwind_publish`, which can be run from any thread.
pub(super) struct Publisher(TestRun);

/// Published data of a file: `struct unwind_file`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) pages: u64,
    pub(super) first_page: u32,
    pub(super) number: u32,
}

/// Outcome of publishing an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Published {
    Done,
    /// The map of files is full.
    NoRoom,
    /// The file cannot be mapped.
    NotMapped,
}

impl Publisher {
    /// Creates the publisher from the skeleton's program `unwind_publish`, after load.
    pub(super) fn new(program: &ProgramMut<'_>) -> Result<Self> {
        TestRun::new(program).map(Self)
    }

    /// Publishes the rules of a file.
    pub(super) fn file(&self, file: &File, entry: Entry) -> Result<Published> {
        // SAFETY: the memory is never accessed.
        let mapped = unsafe { MmapOptions::new().len(1).map(file) };
        match mapped {
            Ok(mapped) => self.at(mapped.as_ptr() as u64, entry),
            Err(_) => Ok(Published::NotMapped),
        }
    }

    /// Publishes the rules of the file that we ourselves have mapped at an address.
    pub(super) fn at(&self, address: u64, entry: Entry) -> Result<Published> {
        let first = u64::from(entry.first_page) | u64::from(entry.number) << 32;
        let run = self.0.run(&[address, entry.pages, first]);
        match run.context("failed to publish unwind tables (BPF_PROG_TEST_RUN)")? {
            0 => Ok(Published::Done),
            1 => Ok(Published::NotMapped),
            2 => Ok(Published::NoRoom),
            other => bail!("failed to publish unwind tables: the program returned {other}"),
        }
    }
}
