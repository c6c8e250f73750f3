//! Names for the frames of interpreters in a user's stack.

use crate::code::lines::SourceLine;
use crate::interpreters::hotspot::names::{Inlined, JavaNames};
use crate::stacks::named::{Frame, Source};
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

    /// The frame of a function of Java that is interpreted.
    pub(in crate::stacks) fn java_frame(names: Option<&Self>, pid: u32, method: u64) -> Frame {
        const UNKNOWN: &str = "[interpreted]";
        let name = names.and_then(|names| names.java.of_method(pid, method));
        Frame::of_java(method, name.unwrap_or_else(|| UNKNOWN.to_owned()))
    }

    /// The functions of Java that are compiled into the one that a frame of generated code is in, and this one's own
    /// name: shown with its frame, as those are that a native compiler has inlined.
    pub(in crate::stacks) fn inlined_java(
        &self,
        pid: u32,
        place: Place,
        own: Option<&(String, u64)>,
    ) -> Source {
        const UNKNOWN: &str = "[inlined calls unknown]";
        let calls = match self.java.inlined(pid, place) {
            Some(Inlined::Calls(calls)) => calls,
            Some(Inlined::Unknown) => vec![UNKNOWN.to_owned()],
            None => Vec::new(),
        };
        if calls.is_empty() {
            return Source::default();
        }
        let own = own.map(|(name, _)| name.clone());
        let functions = calls.into_iter().map(Some).chain([own]);
        Source {
            lines: functions.map(SourceLine::of_function).collect(),
            shown: true,
        }
    }
}
