//! Finders of the interpreters of processes, for the BPF side.

use super::hotspot::hotspots::Hotspots;
use super::python::pythons::Pythons;
use super::search::Files;
use crate::bpf::types::unwind_subject as Subject;

/// One finder for each kind of interpreter.
pub(crate) struct Finders {
    files: Files,
    pythons: Pythons,
    hotspots: Hotspots,
}

impl Finders {
    pub(crate) fn new(pythons: Pythons, hotspots: Hotspots) -> Self {
        Self {
            files: Files::default(),
            pythons,
            hotspots,
        }
    }

    /// Looks for the interpreters of a running process.
    pub(crate) fn look_at(&mut self, pid: u32) {
        self.pythons.look_at(pid, None, &mut self.files);
        self.hotspots.look_at(pid, None, &mut self.files);
    }

    /// Looks for the interpreters of a process that is stopped because it has mapped code.
    pub(crate) fn look_at_stopped(&mut self, pid: u32) {
        self.pythons.look_at_stopped(pid, &mut self.files);
        self.hotspots.look_at_stopped(pid, &mut self.files);
    }

    /// Answers a request of the BPF side for an interpreter of the process with this layout. Returns whether the
    /// interpreter was found.
    pub(crate) fn answer(&mut self, subject: Subject, pid: u32, layout: u64) -> bool {
        let (layout, files) = (Some(layout), &mut self.files);
        match subject {
            Subject::UNWIND_SUBJECT_HOTSPOT => self.hotspots.look_at(pid, layout, files),
            _ => self.pythons.look_at(pid, layout, files),
        }
    }
}
