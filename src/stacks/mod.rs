//! Room `stacks`: call stacks, from the kernel half's walk to names.
//!
//! | module | what it is for |
//! |---|---|
//! | [`table`] | the table of distinct call stacks |
//! | [`unwind`] | tables by which user stacks are walked without frame pointers |
//! | [`named`] | a stack with names, which every format is made of |
//! | [`events`] | the stacks of events, named when the events are printed |
//! | [`symbolize`] | names for a stack's frames, also of a process that has exited |
//! | `file_names` | names and source lines of code in files, within bounded memory |
//! | `source_lines` | source lines, read by processes made for that |
//! | `debug_files` | what was split from a file: its symbols and source lines |
//! | `debuginfod` | the same from the servers of distributions |
//! | [`kallsyms`] | the kernel's own names |
//! | [`python_names`] | names for the frames of Python |
//! | [`perf_map`] | names that JIT compilers write down |
//! | `runtimes` | who writes them down if started so |

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
pub(crate) mod source_lines;
pub mod symbolize;
pub mod table;
pub mod unwind;
