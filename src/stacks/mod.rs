//! Call stacks, from the walk in the BPF programs to named frames.
//!
//! | module | what it is for |
//! |---|---|
//! | [`table`] | the table of distinct call stacks |
//! | [`slots`] | the number of stacks that can be taken at the same time |
//! | [`unwind`] | tables by which user stacks are walked without frame pointers |
//! | [`named`] | a symbolized stack, the input of every output format |
//! | [`events`] | the stacks of events, symbolized when the events are printed |
//! | [`symbolize`] | names for a stack's frames, also of a process that has exited |
//! | `interpreter_names` | names for the frames of interpreters |
//! | `file_names` | names and source lines of code in files, within bounded memory |
//! | `source_lines` | source lines, read from DWARF by separate processes |
//! | `debug_files` | separate debug files: symbols and source lines that were split from a file |
//! | `debuginfod` | debug files from debuginfod servers |
//! | [`kallsyms`] | names of kernel functions, from /proc/kallsyms |
//! | [`python_names`] | names for the frames of Python |
//! | [`perf_map`] | perf maps, the files in which JIT compilers name their functions |
//! | `runtimes` | runtimes that write a perf map only if started with an option |

mod debug_files;
mod debuginfod;
pub mod events;
mod file_names;
pub mod interpreter_names;
pub mod kallsyms;
pub mod named;
pub mod perf_map;
pub mod python_names;
mod runtimes;
pub mod slots;
pub(crate) mod source_lines;
pub mod symbolize;
pub mod table;
pub mod unwind;
