//! Room `print`: how a value becomes text or JSON. This room uses no other.
//!
//! | module | what it is for |
//! |---|---|
//! | [`output`] | rows as text or JSON |
//! | [`timeline`] | what rows are on a timeline |
//! | [`progress`] | how far something is that takes long, on a terminal |
//! | [`demangle`] | names of C++ and Rust as they are in the source |
//! | [`text`] | strings from elsewhere, made safe for a terminal |
//! | [`clock`] | kernel time stamps as wall time |
//! | [`histogram`] | distributions by powers of two |
//! | [`file_path`] | names and paths of files, as the kernel half writes them |
//! | [`flags`] | flag words by name |
//! | [`gfp`] | allocation flags by name |
//! | [`errno`] | results of system calls, and errors by name |

pub mod clock;
pub mod demangle;
pub mod errno;
pub mod file_path;
pub mod flags;
pub mod gfp;
pub mod histogram;
pub mod output;
pub mod progress;
pub mod text;
pub mod timeline;
