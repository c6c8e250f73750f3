//! Formatting of values as text or JSON. This module uses no other one but the types in `bpf`.
//!
//! | module | what it is for |
//! |---|---|
//! | [`message`] | messages on stderr, and the tool's name |
//! | [`output`] | rows as text or JSON |
//! | [`timeline`] | rows as events and counts on a timeline |
//! | [`progress`] | progress of a long operation, on a terminal |
//! | [`demangle`] | names of C++ and Rust as they are in the source |
//! | [`text`] | strings from elsewhere, made safe for a terminal |
//! | [`clock`] | kernel time stamps as wall time |
//! | [`histogram`] | distributions by powers of two |
//! | [`identity`] | the tool, the host and its boot, in each line of JSON |
//! | [`file_name`] | names under which tools create files, safe from other users |
//! | [`file_path`] | names and paths of files, as BPF programs write them |
//! | [`flags`] | flag words by name |
//! | [`gfp`] | allocation flags by name |
//! | [`errno`] | results of system calls, and errors by name |

pub mod clock;
pub mod demangle;
pub mod errno;
pub mod file_name;
pub mod file_path;
pub mod flags;
pub mod gfp;
pub mod histogram;
pub mod identity;
pub mod message;
pub mod output;
pub mod progress;
pub mod text;
pub mod timeline;
