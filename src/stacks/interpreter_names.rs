//! Names for the frames of interpreters in a user's stack.

use crate::interpreters::hotspot::names::JavaNames;
use crate::stacks::python_names::PythonNames;

/// What names the frames of each interpreter.
#[derive(Debug, Clone)]
pub struct InterpreterNames {
    pub(in crate::stacks) python: PythonNames,
    pub(in crate::stacks) java: JavaNames,
}
