//! Room `run`: what the frontend of a tool does from its arguments to its exit status.
//!
//! | module | what it is for |
//! |---|---|
//! | [`cli`] | running a tool: arguments, exit status, errors |
//! | [`complete`] | what a shell completes |
//! | [`skeleton`] | a BPF object of a tool, from opening to loading |
//! | [`target`] | what is traced: what the filter lets through, or a command |
//! | [`poll`] | one wait for events, ticks, signals and the target's end |
//! | [`schedule`] | when a tool that counts reports |
//! | [`count_stacks`] | counts by process and stack, kept in the kernel |
//! | `stack_sums` | what of these a report tells apart |
//! | [`losses`] | what could not be recorded |
//! | [`privileges`] | what a tool may no longer do once it knows its target |
//! | [`priority`] | a tool's priority, above what it traces |
//! | [`protect`] | working on when memory has run out |

pub mod cli;
pub mod complete;
pub mod count_stacks;
pub mod losses;
pub mod poll;
pub mod priority;
pub mod privileges;
pub mod protect;
pub mod schedule;
pub mod skeleton;
mod stack_sums;
pub mod target;
