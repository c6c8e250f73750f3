//! The processes whose Python frames the kernel half is to walk.

use std::collections::{HashMap, HashSet};

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapHandle, ProgramMut};

use super::deaths::{Deaths, Programs, Refused};
use super::locate::{self, Located, Python};
use crate::bpf::attach;
use crate::bpf::types;
use crate::interpreters::memory;
use crate::process::proc::FileId;

/// Files with an interpreter that are probed.
const FILES: usize = 64;
/// Reasons that are said; those of one more process are like one before.
const REASONS: usize = 16;

/// Why code objects die unseen where [`Refused`] is the reason.
const REFUSED: &str = ", as the kernel wants CAP_SYS_ADMIN for uprobes, which is given up here";

/// What the kernel half knows of Python, kept up to date.
pub(crate) struct Pythons {
    /// The skeleton's map `python_processes`.
    processes: MapHandle,
    programs: Programs,
    /// Where code objects are seen to die, by device and inode.
    probes: HashMap<(u64, u64), Deaths>,
    /// Files without an interpreter.
    others: HashSet<FileId>,
    said: HashSet<String>,
    /// What is said of the first process that is found, if pymalloc has its small objects.
    note: Option<&'static str>,
}

impl Pythons {
    /// After load.
    pub(crate) fn new(
        processes: MapHandle,
        programs: [&ProgramMut<'_>; 2],
        note: Option<&'static str>,
    ) -> Result<Self> {
        Ok(Self {
            processes,
            programs: Programs::new(programs)?,
            probes: HashMap::new(),
            others: HashSet::new(),
            said: HashSet::new(),
            note,
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
        if !memory::layout(pid).is_ok_and(found) {
            // One that has not begun may look like another: it is asked about again.
            let _ = self.try_to(pid, None);
        }
    }

    fn try_to(&mut self, pid: u32, asked: Option<u64>) -> Result<Outcome> {
        let layout = memory::layout(pid)?;
        if asked.is_some_and(|asked| asked != layout) {
            return Ok(Outcome::None);
        }
        let python = match locate::locate(pid, &mut self.others)? {
            Located::Found(python) => python,
            Located::None => return Ok(Outcome::None),
            Located::Unknown(why) => return Ok(Outcome::Unknown(why)),
        };
        if let Some(why) = self.probe(&python)? {
            return Ok(Outcome::Unknown(format!(
                "whose code objects die unseen{why}"
            )));
        }
        // It has called exec meanwhile.
        if memory::layout(pid)? != layout {
            return Ok(Outcome::None);
        }
        let process = types::bytes_of(&python.process);
        self.processes
            .update(&layout.to_ne_bytes(), process, MapFlags::ANY)
            .context("failed to tell where a process has its Python")?;
        if let Some(note) = self.note
            && !super::allocates_by_malloc(pid)
        {
            self.note = None;
            eprintln!("process {pid} runs Python: {note}");
        }
        Ok(Outcome::Found)
    }

    /// Sees to it that code objects of this interpreter do not die unseen. Returns why they do, if they do.
    fn probe(&mut self, python: &Python) -> Result<Option<&'static str>> {
        let identity = python.file.identity()?;
        if self.probes.contains_key(&identity) {
            return Ok(None);
        }
        let Some(place) = python.deaths()? else {
            return Ok(Some(", as no function is where they end"));
        };
        anyhow::ensure!(self.probes.len() < FILES, "there are too many other ones");
        match self.programs.attach(&python.file, place)? {
            Ok(deaths) => self.probes.insert(identity, deaths),
            Err(Refused) => return Ok(Some(REFUSED)),
        };
        Ok(None)
    }

    /// Says once why the frames of such an interpreter are not shown.
    fn say(&mut self, pid: u32, why: String) {
        if self.said.len() < REASONS && !self.said.contains(&why) {
            eprintln!("process {pid} runs a Python {why}: its stacks have native frames only");
            self.said.insert(why);
        }
    }
}

/// What became of a search.
enum Outcome {
    Found,
    None,
    Unknown(String),
}
