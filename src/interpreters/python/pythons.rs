//! The processes whose Python frames the kernel half is to walk.

use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapHandle, ProgramMut};
use perf_event::events::{Event, EventData};
use perf_event::{Builder, Counter};
use perf_event_open_sys::bindings::perf_event_attr;

use super::locate::{self, Located, Python};
use crate::bpf::attach;
use crate::bpf::types;
use crate::process::mapped_file::MappedFile;
use crate::process::proc::FileId;

/// Files with an interpreter that are probed.
const FILES: usize = 64;
/// Reasons that are said; those of one more process are like one before.
const REASONS: usize = 16;

/// What the kernel half knows of Python, kept up to date.
pub(crate) struct Pythons {
    /// The skeleton's map `python_processes`.
    processes: MapHandle,
    /// The skeleton's programs `unwind_code_dies` and `unwind_code_dies_too`.
    programs: Vec<OwnedFd>,
    /// Where code objects are seen to die, by device and inode.
    probes: HashMap<(u64, u64), Vec<Counter>>,
    /// Files without an interpreter.
    others: HashSet<FileId>,
    said: HashSet<String>,
}

impl Pythons {
    /// After load.
    pub(crate) fn new(processes: MapHandle, programs: &[&ProgramMut<'_>]) -> Result<Self> {
        let programs = programs
            .iter()
            .map(|program| program.as_fd().try_clone_to_owned())
            .collect::<Result<_, _>>();
        Ok(Self {
            processes,
            programs: programs.context("failed to open a program a second time")?,
            probes: HashMap::new(),
            others: HashSet::new(),
            said: HashSet::new(),
        })
    }

    /// Looks for the Python of a process. `layout` is what the kernel half has asked about. Returns
    /// whether it is found.
    pub(crate) fn look_at(&mut self, pid: u32, layout: Option<u64>) -> bool {
        match self.try_to(pid, layout) {
            Ok(Outcome::Found) => true,
            Ok(Outcome::None) => false,
            Ok(Outcome::Unknown(why)) => {
                self.say(pid, why);
                false
            }
            Err(error) => {
                // Most likely the process is gone; else its stacks have native frames only.
                attach::verbose(format_args!("no Python frames of process {pid}: {error:#}"));
                false
            }
        }
    }

    /// Looks for the Python of a process that is stopped because it has mapped code, unless it was found.
    pub(crate) fn look_at_stopped(&mut self, pid: u32) {
        let found = |layout: u64| {
            let known = self.processes.lookup(&layout.to_ne_bytes(), MapFlags::ANY);
            known.is_ok_and(|known| known.is_some())
        };
        if !locate::layout(pid).is_ok_and(found) {
            // One that has not begun may look like another: it is asked about again.
            let _ = self.try_to(pid, None);
        }
    }

    fn try_to(&mut self, pid: u32, asked: Option<u64>) -> Result<Outcome> {
        let layout = locate::layout(pid)?;
        if asked.is_some_and(|asked| asked != layout) {
            return Ok(Outcome::None);
        }
        let python = match locate::locate(pid, &mut self.others)? {
            Located::Found(python) => python,
            Located::None => return Ok(Outcome::None),
            Located::Unknown(why) => return Ok(Outcome::Unknown(why)),
        };
        let is_seen = match self.probe(&python) {
            Err(error) if is_refused(&error) => {
                let why = "whose code objects die unseen, as the kernel wants CAP_SYS_ADMIN for uprobes, \
                           which is given up here";
                return Ok(Outcome::Unknown(why.to_owned()));
            }
            other => other?,
        };
        if !is_seen {
            let why = "whose code objects die unseen".to_owned();
            return Ok(Outcome::Unknown(why));
        }
        // It has called exec meanwhile.
        if locate::layout(pid)? != layout {
            return Ok(Outcome::None);
        }
        let process = types::bytes_of(&python.process);
        self.processes
            .update(&layout.to_ne_bytes(), process, MapFlags::ANY)
            .context("failed to tell where a process has its Python")?;
        Ok(Outcome::Found)
    }

    /// Sees to it that code objects of this interpreter do not die unseen. Returns whether they are seen.
    fn probe(&mut self, python: &Python) -> Result<bool> {
        let identity = python.file.identity()?;
        if self.probes.contains_key(&identity) {
            return Ok(true);
        }
        let Some(deaths) = python.deaths()? else {
            return Ok(false);
        };
        anyhow::ensure!(self.probes.len() < FILES, "there are too many other ones");
        let probes = self
            .programs
            .iter()
            .map(|program| probe(&python.file, deaths, program))
            .collect::<Result<_>>()?;
        self.probes.insert(identity, probes);
        Ok(true)
    }

    /// Says once why the frames of such an interpreter are not shown.
    fn say(&mut self, pid: u32, why: String) {
        if self.said.len() < REASONS && !self.said.contains(&why) {
            eprintln!("process {pid} runs a Python {why}: its stacks have native frames only");
            self.said.insert(why);
        }
    }
}

/// Whether the kernel does not permit it.
fn is_refused(error: &anyhow::Error) -> bool {
    let cause = error.root_cause().downcast_ref::<io::Error>();
    cause.is_some_and(|cause| cause.kind() == io::ErrorKind::PermissionDenied)
}

/// What became of a search.
enum Outcome {
    Found,
    None,
    Unknown(String),
}

/// A uprobe: the crate's own is no event.
struct Probe {
    kind: u32,
    path: CString,
    offset: u64,
}

impl Probe {
    fn new(file: &MappedFile, offset: u64) -> Result<Self> {
        let kind = fs::read_to_string("/sys/bus/event_source/devices/uprobe/type")
            .context("this kernel has no uprobes")?;
        Ok(Self {
            kind: kind.trim().parse()?,
            path: CString::new(file.path().as_os_str().as_bytes())?,
            offset,
        })
    }
}

impl Event for Probe {
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

/// Runs a program wherever this instruction of a file is executed.
fn probe(file: &MappedFile, offset: u64, program: &OwnedFd) -> Result<Counter> {
    let event = Probe::new(file, offset)?;
    let mut probe = Builder::new(event)
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
