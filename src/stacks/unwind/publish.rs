//! How the kernel half learns of a file's rules: `unwind_publish` in `bpf/include/unwind.bpf.h`.
//!
//! The kernel half knows a file by what the kernel knows of its inode, of which user space is told
//! another number by overlayfs and btrfs. So the file is mapped here, and a BPF program that we run
//! ourselves finds what is mapped as it will find it in other processes. An entry is thereby of
//! the very file that the rules were read from.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use anyhow::{Context, Result, bail};
use libbpf_rs::ProgramMut;
use libbpf_rs::libbpf_sys::{bpf_prog_test_run_opts, bpf_test_run_opts};
use memmap2::MmapOptions;

/// The program, which can be run from any thread.
pub(super) struct Publisher(OwnedFd);

/// What the kernel half is told of a file; `struct unwind_file`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) pages: u64,
    pub(super) first_page: u32,
    pub(super) number: u32,
}

/// What became of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Published {
    Done,
    /// The map of files is full.
    NoRoom,
    /// The file cannot be mapped.
    NotMapped,
}

impl Publisher {
    /// The skeleton's program `unwind_publish`, after load.
    pub(super) fn new(program: &ProgramMut<'_>) -> Result<Self> {
        let program = program.as_fd().try_clone_to_owned();
        program
            .map(Self)
            .context("failed to open a program a second time")
    }

    /// Publishes the rules of a file.
    pub(super) fn file(&self, file: &File, entry: Entry) -> Result<Published> {
        // SAFETY: the memory is never looked at.
        let mapped = unsafe { MmapOptions::new().len(1).map(file) };
        match mapped {
            Ok(mapped) => self.at(mapped.as_ptr() as u64, entry),
            Err(_) => Ok(Published::NotMapped),
        }
    }

    /// Publishes the rules of what we ourselves have mapped at an address.
    pub(super) fn at(&self, address: u64, entry: Entry) -> Result<Published> {
        let first = u64::from(entry.first_page) | u64::from(entry.number) << 32;
        match self.run(&[address, entry.pages, first])? {
            0 => Ok(Published::Done),
            1 => Ok(Published::NotMapped),
            2 => Ok(Published::NoRoom),
            other => bail!("failed to publish unwind tables: the program returned {other}"),
        }
    }

    fn run(&self, arguments: &[u64]) -> Result<u32> {
        let mut options = bpf_test_run_opts {
            sz: size_of::<bpf_test_run_opts>() as _,
            ctx_in: arguments.as_ptr().cast(),
            ctx_size_in: size_of_val(arguments) as u32,
            ..Default::default()
        };
        // SAFETY: the descriptor is the program's, and the options describe memory that outlives the call.
        let error = unsafe { bpf_prog_test_run_opts(self.0.as_raw_fd(), &raw mut options) };
        if error < 0 {
            return Err(std::io::Error::from_raw_os_error(-error))
                .context("failed to publish unwind tables (BPF_PROG_TEST_RUN)");
        }
        Ok(options.retval)
    }
}
