//! The user-space side of a tool, from its arguments to its exit status.
//!
//! | module | what it is for |
//! |---|---|
//! | `arch` | what one architecture needs: system calls, a check of the machine |
//! | [`cli`] | running a tool: arguments, exit status, errors |
//! | `complete` | completion in shells |
//! | `help` | `-h` and `--help` |
//! | [`skeleton`] | a BPF object of a tool, from opening to loading |
//! | [`target`] | what is traced: the processes that pass the filter, or a command |
//! | `follow` | following a ring buffer until the trace ends |
//! | [`poll`] | one wait for events, ticks, signals and the target's end |
//! | [`schedule`] | when a counting tool reports |
//! | [`count_stacks`] | counts by process and stack, kept in the kernel |
//! | `stack_sums` | sums of these counts for one report |
//! | [`losses`] | counts of what could not be recorded |
//! | [`privileges`] | dropping the privileges that a tool does not need once it knows its target |
//! | [`launcher`] | a process that starts tools for an agent without privileges |
//! | [`siblings`] | tools that are installed beside this one |
//! | [`priority`] | a tool's priority, above what it traces |
//! | [`protect`] | protection of a tool when memory runs out |

#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
mod arch;
pub mod cli;
mod complete;
pub mod count_stacks;
mod follow;
mod help;
pub mod launcher;
pub mod losses;
pub mod poll;
pub mod priority;
pub mod privileges;
pub mod protect;
pub mod schedule;
pub mod siblings;
pub mod skeleton;
mod stack_sums;
pub mod target;
