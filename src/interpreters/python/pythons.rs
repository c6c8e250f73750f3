//! The processes whose Python frames the kernel half is to walk.

use std::collections::HashMap;

use anyhow::Result;
use libbpf_rs::{MapHandle, ProgramMut};

use super::deaths::{Deaths, Programs, Refused};
use super::locate::{self, Python};
use crate::bpf::attach;
use crate::bpf::types;
use crate::interpreters::search::{Files, Located};
use crate::interpreters::told::Told;

/// Files with an interpreter that are probed.
const FILES: usize = 64;

/// Why code objects die unseen where [`Refused`] is the reason.
const REFUSED: &str = ", as the kernel wants CAP_SYS_ADMIN for uprobes, which is given up here";

/// What the kernel half knows of Python, kept up to date.
pub(crate) struct Pythons {
    told: Told,
    programs: Programs,
    /// Where code objects are seen to die, by device and inode.
    probes: HashMap<(u64, u64), Deaths>,
    /// What is said of the first process that is found, if pymalloc has its small objects.
    note: Option<&'static str>,
}

impl Pythons {
    /// After load; `processes` is the skeleton's map `python_processes`.
    pub(crate) fn new(
        processes: MapHandle,
        programs: [&ProgramMut<'_>; 2],
        note: Option<&'static str>,
    ) -> Result<Self> {
        Ok(Self {
            told: Told::new(processes),
            programs: Programs::new(programs)?,
            probes: HashMap::new(),
            note,
        })
    }

    /// Looks for the Python of a process. `layout` is what the kernel half has asked about. Returns
    /// whether it is found.
    pub(crate) fn look_at(&mut self, pid: u32, layout: Option<u64>, files: &mut Files) -> bool {
        match self.try_to(pid, layout, files) {
            Ok(Outcome::Found) => true,
            Ok(Outcome::None) => false,
            Ok(Outcome::Unknown(why)) => {
                self.told.say(why, |why| {
                    format!("process {pid} runs a Python {why}: its stacks have native frames only")
                });
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
    pub(crate) fn look_at_stopped(&mut self, pid: u32, files: &mut Files) {
        if !self.told.knows(pid) {
            // One that has not begun may look like another: it is asked about again.
            let _ = self.try_to(pid, None, files);
        }
    }

    fn try_to(&mut self, pid: u32, asked: Option<u64>, files: &mut Files) -> Result<Outcome> {
        let Some(layout) = self.told.layout(pid, asked)? else {
            return Ok(Outcome::None);
        };
        let python = match locate::locate(pid, files)? {
            Located::Found(python) => python,
            Located::None => return Ok(Outcome::None),
            Located::Unknown(why) => return Ok(Outcome::Unknown(why)),
        };
        if let Some(why) = self.probe(&python)? {
            return Ok(Outcome::Unknown(format!(
                "whose code objects die unseen{why}"
            )));
        }
        let process = types::bytes_of(&python.process);
        if !self.told.tell(pid, layout, process)? {
            return Ok(Outcome::None);
        }
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
}

/// What became of a search.
enum Outcome {
    Found,
    None,
    Unknown(String),
}
