//! Room `process`: who is traced, and what they have mapped.
//!
//! | module | what it is for |
//! |---|---|
//! | [`proc`] | a process to be traced: is it there, what is it, what has it mapped |
//! | [`filter`] | which tasks are traced: processes, names, a cgroup |
//! | [`command`] | a command to be traced, held before exec until the probes are live |
//! | [`follow`] | the processes that a traced command starts |
//! | [`guard`] | a process that outlives the tool, to undo what must not stay |
//! | [`inherited`] | signals and limits as the caller has set them, and what ends a run |
//! | [`cgroup`] | cgroups by their ids |
//! | [`container`] | the cgroup that a task was in, and whose container that is |
//! | [`origin`] | when an event was, and which thread it is of |
//! | [`mapped_file`] | a file of another user, opened once |
//! | [`mapping_log`] | code mappings as processes make them, from the kernel's own log |
//! | [`smaps`] | what of each mapping is in memory |
//! | [`translator`] | programs that read other programs' code as data |
//! | [`address_space`] | what code processes have mapped, now and before |

pub mod address_space;
pub mod cgroup;
pub mod command;
pub mod container;
pub mod filter;
pub mod follow;
pub mod guard;
pub mod inherited;
pub mod mapped_file;
pub mod mapping_log;
pub mod origin;
pub mod proc;
pub mod smaps;
pub mod translator;
