//! Functions of interpreted and JIT-compiled languages that the frames of a stack execute.
//!
//! | module | what it is for |
//! |---|---|
//! | `finders` | the finders of all kinds of interpreters, for the BPF side |
//! | [`hotspot`] | HotSpot: the code that it generates, and the names of Java functions |
//! | `memory` | the memory of a process that has an interpreter |
//! | [`python`] | CPython: its code objects, and their lines |
//! | [`raw_frame`] | a frame as a stack has it: native, or an interpreter's |
//! | [`recorded`] | interpreters in recorded memory, for fuzzers |
//! | `search` | the search for an interpreter in the files that a process maps as code |
//! | `registry` | what was reported to the BPF side and the user about the interpreters of processes |

use clap::ValueEnum;

pub(crate) mod finders;
pub mod hotspot;
pub(crate) mod memory;
pub mod python;
pub mod raw_frame;
pub mod recorded;
mod registry;
mod search;

/// Options of the tools that show user stacks, for the frames of interpreters.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct InterpreterArgs {
    /// How frames of Python and Java are shown
    ///
    /// `auto` replaces the interpreter's frames by Python and Java functions; `merged` also omits the lines of Python
    /// functions, which merges stacks that differ only in lines; `all` shows both kinds of frames; `off` shows native
    /// frames only.
    #[arg(help_heading = "Stacks", hide_short_help = true, hide_possible_values = true, long, value_name = "WHICH", value_enum, default_value_t = Interpreters::Auto)]
    pub interpreters: Interpreters,

    /// Request a perf map from each traced HotSpot JVM
    ///
    /// This executes code in the JVM, as jcmd does. Without this option, names are read from the JVM's memory.
    #[arg(help_heading = "Stacks", hide_short_help = true, long)]
    pub java_names: bool,
}

/// Frames that are shown of a process whose interpreter is known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Interpreters {
    /// Functions of Python, with lines, and of Java
    #[default]
    Auto,
    /// Functions of Python, without lines, and of Java
    Merged,
    /// Functions of Python and Java, and the frames of the interpreter
    All,
    /// Native frames only
    Off,
}
