//! The traced processes, and their mappings.
//!
//! | module | what it is for |
//! |---|---|
//! | [`proc`] | a process to be traced: whether it runs, its kind, its mappings |
//! | [`filter`] | which tasks are traced: processes, names, a cgroup |
//! | [`code_copies`] | copies of a program's code in other memory, without breakpoints |
//! | [`command`] | a command to be traced, held before exec until the probes are live |
//! | [`follow`] | the descendants of traced processes |
//! | [`guard`] | a process that outlives the tool, to undo temporary changes |
//! | [`inherited`] | signals and limits as the caller has set them, and the signals that end a run |
//! | [`cgroup`] | cgroups by their ids |
//! | [`complete`] | completion of processes and cgroups in shells |
//! | [`container`] | the cgroup of a task, and the container of this cgroup |
//! | [`labels`] | unit, pod and container of a cgroup, as labels |
//! | `directory` | directories that a forked child reads by system calls alone |
//! | [`origin`] | the time and the thread of an event |
//! | [`mapped_file`] | a file of another user, opened once |
//! | [`mapping_log`] | code mappings as processes make them, from the kernel's own log |
//! | [`members`] | processes that a name or a cgroup selects, as far as user space has to know |
//! | `mmap_lock` | locks of processes' address spaces, and whether each can be taken |
//! | `reader` | files of a process that may never answer, read by a child |
//! | `shielded` | calls that the end of this process does not interrupt |
//! | [`smaps`] | resident and swapped bytes of each mapping |
//! | [`stopped`] | processes that a BPF program has stopped |
//! | [`traced_code`] | the code that traced processes have mapped, kept up to date |
//! | [`translator`] | programs that read other programs' code as data |
//! | [`uprobes`] | registration and removal of uprobes without harm to any process |
//! | [`address_space`] | current and earlier code mappings of processes |

pub mod address_space;
pub mod cgroup;
pub mod code_copies;
pub mod command;
pub mod complete;
pub mod container;
mod directory;
pub mod filter;
pub mod follow;
pub mod guard;
pub mod inherited;
pub mod labels;
pub mod mapped_file;
pub mod mapping_log;
pub mod members;
pub(crate) mod mmap_lock;
pub mod origin;
pub mod proc;
pub(crate) mod reader;
pub(crate) mod shielded;
pub mod smaps;
pub mod stopped;
pub mod traced_code;
pub mod translator;
pub mod uprobes;
