//! Processes whose Python frames the BPF side walks.

use std::collections::HashMap;

use anyhow::Result;
use libbpf_rs::{MapHandle, ProgramMut};

use super::dealloc_probes::{DeallocProbes, Programs, Refused};
use super::locate::{self, Python};
use crate::bpf::attach;
use crate::bpf::types;
use crate::interpreters::registry::Registry;
use crate::interpreters::search::{Files, Located};

/// Maximum number of files with an interpreter that are probed.
const FILES: usize = 64;

/// Reason why freed code objects are not noticed if attaching has failed with [`Refused`].
const REFUSED: &str = "the kernel requires CAP_SYS_ADMIN for uprobes, which this tool has dropped";

/// Finder of CPython, which keeps the BPF side up to date.
pub(crate) struct Pythons {
    told: Registry,
    programs: Programs,
    /// Probes on the functions that free code objects, by device and inode of the file.
    probes: HashMap<(u64, u64), DeallocProbes>,
    /// Note to print for the first process that is found, if its small objects come from pymalloc.
    note: Option<&'static str>,
}

impl Pythons {
    /// Creates the finder after load; `processes` is the skeleton's map `python_processes`.
    pub(crate) fn new(
        processes: MapHandle,
        programs: [&ProgramMut<'_>; 2],
        note: Option<&'static str>,
    ) -> Result<Self> {
        Ok(Self {
            told: Registry::new(processes),
            programs: Programs::new(programs)?,
            probes: HashMap::new(),
            note,
        })
    }

    /// Looks for the Python of a process. `layout` is the layout that the BPF side has asked about. Returns whether
    /// the Python is found.
    pub(crate) fn look_at(&mut self, pid: u32, layout: Option<u64>, files: &mut Files) -> bool {
        match self.try_to(pid, layout, files) {
            Ok(Outcome::Found) => true,
            Ok(Outcome::None) => false,
            Ok(Outcome::Unknown(why)) => {
                self.told.warn_once(why, |why| {
                    format!("process {pid} runs a Python {why}: its stacks have native frames only")
                });
                false
            }
            Err(error) => {
                // Most likely the process has exited. Otherwise its stacks have native frames only.
                attach::log_verbose(format_args!("no Python frames of process {pid}: {error:#}"));
                false
            }
        }
    }

    /// Looks for the Python of a process that is stopped because it has mapped code, unless the Python is already
    /// known.
    pub(crate) fn look_at_stopped(&mut self, pid: u32, files: &mut Files) {
        if !self.told.contains(pid) {
            // An interpreter that is not initialized yet may look unsupported, so no message is printed. The BPF side
            // asks again.
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
            Located::Unsupported(why) => return Ok(Outcome::Unknown(why)),
        };
        if let Some(why) = self.probe(&python)? {
            return Ok(Outcome::Unknown(format!(
                "whose code objects die unseen, as {why}"
            )));
        }
        let process = types::bytes_of(&python.process);
        if !self.told.register(pid, layout, process)? {
            return Ok(Outcome::None);
        }
        if let Some(note) = self.note
            && !super::allocates_by_malloc(pid)
        {
            self.note = None;
            crate::note!("process {pid} runs Python: {note}");
        }
        Ok(Outcome::Found)
    }

    /// Attaches probes to the function that frees code objects of this interpreter. If they cannot be attached,
    /// returns why.
    fn probe(&mut self, python: &Python) -> Result<Option<String>> {
        let identity = python.file.identity()?;
        if self.probes.contains_key(&identity) {
            return Ok(None);
        }
        if self.probes.len() >= FILES {
            return Ok(Some(format!(
                "{FILES} other files with a Python are probed, the most in one run"
            )));
        }
        let Some(place) = python.deaths()? else {
            return Ok(Some("no function is where they end".to_owned()));
        };
        match self.programs.attach(&python.file, place)? {
            Ok(deaths) => self.probes.insert(identity, deaths),
            Err(Refused) => return Ok(Some(REFUSED.to_owned())),
        };
        Ok(None)
    }
}

impl Drop for Pythons {
    fn drop(&mut self) {
        DeallocProbes::remove(self.probes.drain().map(|(_, probes)| probes));
    }
}

/// Outcome of looking for the Python of a process.
enum Outcome {
    Found,
    None,
    Unknown(String),
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;

    use libbpf_rs::MapType;

    use super::*;
    use crate::bpf::map_create;
    use crate::interpreters::python::locate::tests::python;
    use crate::interpreters::search::tests::is_missing;

    #[test]
    fn a_python_too_many_is_reported() {
        if is_missing("python3") {
            return;
        }
        let sizes = (size_of::<u64>(), size_of::<types::python_process>());
        let Some(processes) = map_create::create_for_test(MapType::Hash, sizes, 1, 0) else {
            return;
        };
        let any = || OwnedFd::from(File::open("/dev/null").expect("a device"));
        let others = (0..FILES as u64).map(|inode| ((0, inode), DeallocProbes::Link(any())));
        let mut pythons = Pythons {
            told: Registry::new(processes),
            programs: Programs([any(), any()]),
            probes: others.collect(),
            note: None,
        };
        let python = python();
        let outcome = pythons.try_to(python.pid(), None, &mut Files::default());
        let Ok(Outcome::Unknown(why)) = outcome else {
            panic!("no reason");
        };
        assert!(why.contains("64 other files"), "{why}");
    }
}
