//! Probes on the function of an interpreter that frees code objects, so that a reused address gets another name.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use anyhow::{Context, Result};
use libbpf_rs::ProgramMut;
use libbpf_rs::libbpf_sys::{
    BPF_TRACE_UPROBE_MULTI, bpf_link_create, bpf_link_create_opts,
    bpf_link_create_opts__bindgen_ty_1,
};
use perf_event::events::{Event, EventData};
use perf_event::{Builder, Counter};
use perf_event_open_sys::bindings::perf_event_attr;

use crate::process::mapped_file::MappedFile;
use crate::process::uprobes;

/// BPF programs that forget a code object: the skeleton's `unwind_code_dies` and `unwind_code_dies_too`.
pub(super) struct Programs(pub(super) [OwnedFd; 2]);

/// Probes on one file, which stay attached until the value is dropped.
pub(super) enum DeallocProbes {
    /// A link, on Linux 6.6 and later. A link needs no CAP_SYS_ADMIN, and skips no run of the program.
    Link(OwnedFd),
    /// Perf events, one for each of the two programs.
    Events([Counter; 2]),
}

impl DeallocProbes {
    /// Removes the probes of several files.
    pub(super) fn remove(all: impl Iterator<Item = Self>) {
        let mut held = Vec::new();
        for probes in all {
            match probes {
                Self::Link(link) => held.push(link),
                Self::Events(events) => held.extend(events.map(|event| {
                    // SAFETY: the descriptor is the event's own, which nothing else uses or closes any more.
                    unsafe { OwnedFd::from_raw_fd(event.into_raw_fd()) }
                })),
            }
        }
        uprobes::remove(held);
    }
}

/// Error: the kernel requires CAP_SYS_ADMIN for a uprobe, and this process does not have the capability.
#[derive(Debug)]
pub(super) struct Refused;

impl Programs {
    /// Duplicates the file descriptors of the programs, which have to be loaded already.
    pub(super) fn new([first, second]: [&ProgramMut<'_>; 2]) -> Result<Self> {
        let duplicate = |program: &ProgramMut<'_>| {
            let duplicate = program.as_fd().try_clone_to_owned();
            duplicate.context("failed to open a program a second time")
        };
        Ok(Self([duplicate(first)?, duplicate(second)?]))
    }

    /// Attaches the programs to the instruction at this offset of a file.
    pub(super) fn attach(
        &self,
        file: &MappedFile,
        offset: u64,
    ) -> Result<Result<DeallocProbes, Refused>> {
        uprobes::register(|| self.register(file, offset))
    }

    fn register(&self, file: &MappedFile, offset: u64) -> Result<Result<DeallocProbes, Refused>> {
        let Self([first, second]) = self;
        if let Ok(link) = link(first, file, offset) {
            return Ok(Ok(DeallocProbes::Link(link)));
        }
        let events = [first, second].map(|program| event(program, file, offset));
        match events {
            [Ok(first), Ok(second)] => Ok(Ok(DeallocProbes::Events([first, second]))),
            [Err(error), _] | [_, Err(error)] if is_refused(&error) => Ok(Err(Refused)),
            [Err(error), _] | [_, Err(error)] => Err(error),
        }
    }
}

/// Returns whether the kernel has denied permission.
fn is_refused(error: &anyhow::Error) -> bool {
    let cause = error.root_cause().downcast_ref::<io::Error>();
    cause.is_some_and(|cause| cause.kind() == io::ErrorKind::PermissionDenied)
}

fn path_of(file: &MappedFile) -> Result<CString> {
    Ok(CString::new(file.path().as_os_str().as_bytes())?)
}

/// Attaches a program to an offset of a file by a multi-uprobe, for all processes.
fn link(program: &OwnedFd, file: &MappedFile, offset: u64) -> Result<OwnedFd> {
    let path = path_of(file)?;
    let mut options = bpf_link_create_opts {
        sz: size_of::<bpf_link_create_opts>() as u64,
        ..Default::default()
    };
    let mut place = bpf_link_create_opts__bindgen_ty_1::default();
    place.uprobe_multi.path = path.as_ptr();
    place.uprobe_multi.offsets = &raw const offset;
    place.uprobe_multi.cnt = 1;
    options.__bindgen_anon_1 = place;
    // SAFETY: path and offset live until the call returns, and the kernel keeps no pointer to them.
    let link = unsafe {
        bpf_link_create(
            program.as_raw_fd(),
            0,
            BPF_TRACE_UPROBE_MULTI,
            &raw const options,
        )
    };
    if link < 0 {
        return Err(io::Error::from_raw_os_error(-link)).context("no multi-uprobe");
    }
    // SAFETY: the kernel has just created the descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(link) })
}

/// Attaches a program to an offset of a file by a perf event.
fn event(program: &OwnedFd, file: &MappedFile, offset: u64) -> Result<Counter> {
    let mut probe = Builder::new(Uprobe::new(file, offset)?)
        .any_pid()
        .one_cpu(0)
        .include_kernel()
        .build()
        .context("failed to probe the function that ends code objects")?;
    probe
        .set_bpf(program.as_raw_fd())
        .and_then(|()| probe.enable())
        .context("failed to run a program there")?;
    Ok(probe)
}

/// Uprobe as an [`Event`]. The type for uprobes of the perf_event crate does not implement this trait.
struct Uprobe {
    kind: u32,
    path: CString,
    offset: u64,
}

impl Uprobe {
    fn new(file: &MappedFile, offset: u64) -> Result<Self> {
        let kind = fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")
            .context("this kernel has no uprobes")?;
        Ok(Self {
            kind: kind.trim().parse()?,
            path: path_of(file)?,
            offset,
        })
    }
}

impl Event for Uprobe {
    fn update_attrs(self, attributes: &mut perf_event_attr) {
        self.update_attrs_with_data(attributes);
    }

    fn update_attrs_with_data(
        self,
        attributes: &mut perf_event_attr,
    ) -> Option<Arc<dyn EventData>> {
        attributes.type_ = self.kind;
        attributes.__bindgen_anon_3.uprobe_path = self.path.as_ptr() as u64;
        attributes.__bindgen_anon_4.probe_offset = self.offset;
        Some(Arc::new(self.path))
    }
}
