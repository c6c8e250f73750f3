//! Names for the frames of interpreters in a user stack.

use crate::code::lines::SourceLine;
use crate::interpreters::hotspot::names::JavaNames;
use crate::interpreters::raw_frame::RawFrame;
use crate::stacks::named::Source;
use crate::stacks::perf_map::PerfMaps;
use crate::stacks::python_names::PythonNames;

/// Names for the frames of each interpreter.
#[derive(Debug, Clone)]
pub struct InterpreterNames {
    pub(in crate::stacks) python: PythonNames,
    pub(in crate::stacks) java: JavaNames,
}

impl InterpreterNames {
    /// Asks all known Java virtual machines to write their perf maps, if that is wanted. Reads the maps at once, since
    /// the processes may exit before a report.
    pub(in crate::stacks) fn request_perf_maps(&self, maps: &mut PerfMaps) {
        for pid in self.java.to_be_asked() {
            self.request_perf_map(pid, maps);
        }
    }

    /// Asks a process to write its perf map, if it may be asked now, and reads the map. Returns whether the map was
    /// written.
    pub(in crate::stacks) fn request_perf_map(&self, pid: u32, maps: &mut PerfMaps) -> bool {
        let written = self.java.request_perf_map(pid);
        if written {
            maps.reread(pid);
        }
        written
    }

    /// Returns the interpreted Java function at a place, and the line that it is at.
    pub(in crate::stacks) fn java_line(&self, pid: u32, place: RawFrame) -> Option<SourceLine> {
        self.java.lines(pid, place)?.pop()
    }

    /// Returns the Java functions that are inlined at a place in generated code, and last the compiled function itself,
    /// whose name is `own`. Reports show them with the frame, as they show calls that a native compiler has inlined.
    pub(in crate::stacks) fn java_source(
        &self,
        pid: u32,
        place: RawFrame,
        own: Option<&(String, u64)>,
    ) -> Source {
        let Some(mut lines) = self.java.lines(pid, place) else {
            return Source::default();
        };
        if let (Some(last), Some((name, _))) = (lines.last_mut(), own) {
            last.function = Some(name.clone());
        }
        Source {
            lines: lines.into(),
            shown: true,
        }
    }
}
