//! BPF programs that user space runs itself (BPF_PROG_TEST_RUN), without an event.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use anyhow::{Context, Result};
use libbpf_rs::ProgramMut;
use libbpf_rs::libbpf_sys::{bpf_prog_test_run_opts, bpf_test_run_opts};

/// A program of a raw tracepoint, which can be run from any thread.
#[derive(Debug)]
pub(crate) struct TestRun(OwnedFd);

impl TestRun {
    /// Takes a program of a skeleton, after load.
    ///
    /// # Errors
    /// If there are no file descriptors left.
    pub(crate) fn new(program: &ProgramMut<'_>) -> Result<Self> {
        let program = program.as_fd().try_clone_to_owned();
        program
            .map(Self)
            .context("failed to open a program a second time")
    }

    /// Runs the program with `arguments`, 12 at most, as the tracepoint's arguments. Returns the program's return
    /// value.
    ///
    /// # Errors
    /// If the kernel does not run it.
    pub(crate) fn run(&self, arguments: &[u64]) -> io::Result<u32> {
        let mut options = bpf_test_run_opts {
            sz: size_of::<bpf_test_run_opts>() as _,
            ctx_in: arguments.as_ptr().cast(),
            ctx_size_in: size_of_val(arguments) as u32,
            ..Default::default()
        };
        // SAFETY: the descriptor is the program's, and the options describe memory that outlives the call.
        let error = unsafe { bpf_prog_test_run_opts(self.0.as_raw_fd(), &raw mut options) };
        if error < 0 {
            return Err(io::Error::from_raw_os_error(-error));
        }
        Ok(options.retval)
    }
}
