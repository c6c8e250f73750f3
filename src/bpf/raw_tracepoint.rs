//! A program on a raw tracepoint that can be attached and detached while a tool runs, from any thread.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result};
use libbpf_rs::{ProgramMut, libbpf_sys};

/// A loaded program and its tracepoint. Dropping it detaches the program.
#[derive(Debug)]
pub(crate) struct RawTracepoint {
    name: &'static CStr,
    program: OwnedFd,
    link: Option<OwnedFd>,
}

impl RawTracepoint {
    /// Attaches a program to the tracepoint of this name.
    ///
    /// # Errors
    /// If the program is not loaded, no descriptors are left, or the kernel refuses it there.
    pub(crate) fn new(program: &ProgramMut<'_>, name: &'static CStr) -> Result<Self> {
        let mut tracepoint = Self {
            name,
            program: program.as_fd().try_clone_to_owned()?,
            link: None,
        };
        tracepoint.attach()?;
        Ok(tracepoint)
    }

    /// Attaches the program, unless it is attached already.
    ///
    /// # Errors
    /// If no descriptors are left, or the kernel refuses it.
    pub(crate) fn attach(&mut self) -> Result<()> {
        if self.link.is_some() {
            return Ok(());
        }
        let (name, program) = (self.name.as_ptr(), self.program.as_raw_fd());
        // SAFETY: the name ends with a zero byte, and outlives the call.
        let link = unsafe { libbpf_sys::bpf_raw_tracepoint_open(name, program) };
        if link < 0 {
            let name = self.name.to_string_lossy();
            return Err(io::Error::from_raw_os_error(-link))
                .with_context(|| format!("failed to attach to the tracepoint {name}"));
        }
        // SAFETY: the descriptor was made just now, and is owned here.
        self.link = Some(unsafe { OwnedFd::from_raw_fd(link) });
        Ok(())
    }

    /// Detaches the program, unless it is not attached.
    pub(crate) fn detach(&mut self) {
        self.link = None;
    }
}
