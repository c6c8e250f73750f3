//! Names for the frames of interpreters in a user's stack.

use crate::code::lines::SourceLine;
use crate::interpreters::hotspot::names::JavaNames;
use crate::stacks::named::Source;
use crate::stacks::perf_map::PerfMaps;
use crate::stacks::python_names::PythonNames;
use crate::stacks::table::Place;

/// What names the frames of each interpreter.
#[derive(Debug, Clone)]
pub struct InterpreterNames {
    pub(in crate::stacks) python: PythonNames,
    pub(in crate::stacks) java: JavaNames,
}

impl InterpreterNames {
    /// Has the virtual machines of Java that are known write their perf maps, if that is wanted, and reads these: the
    /// processes may exit before a report.
    pub(in crate::stacks) fn ask_for_maps(&self, maps: &mut PerfMaps) {
        for pid in self.java.to_be_asked() {
            self.ask_for_map(pid, maps);
        }
    }

    /// Has a process write its perf map, and reads that, if it is to be asked now. Returns whether it was.
    pub(in crate::stacks) fn ask_for_map(&self, pid: u32, maps: &mut PerfMaps) -> bool {
        let written = self.java.ask_for_map(pid);
        if written {
            maps.reread(pid);
        }
        written
    }

    /// The function of Java that is interpreted at a place, and the line that it is at.
    pub(in crate::stacks) fn java_line(&self, pid: u32, place: Place) -> Option<SourceLine> {
        self.java.lines(pid, place)?.pop()
    }

    /// The functions of Java that are compiled into the one that a frame of generated code is in, and that one itself,
    /// which is called `own`: shown with its frame, as those are that a native compiler has inlined.
    pub(in crate::stacks) fn java_source(
        &self,
        pid: u32,
        place: Place,
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
