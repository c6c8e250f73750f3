//! Room `export`: named stacks, and sums, in the formats that people read and that other programs take in.
//!
//! | module | what it is for |
//! |---|---|
//! | [`text`] | stacks below a row, and as stackcount of BCC prints them |
//! | [`folded`] | stacks as flame graph tools read them |
//! | [`files`] | the options that write files, and the files of a run |
//! | [`profile`] | what a report is about, for the formats that are files of their own |
//! | [`flame`] | flame graphs |
//! | [`earlier`] | profiles of earlier runs, to compare reports with |
//! | [`pprof`] | profiles as `go tool pprof` and others read them |
//! | [`perfetto`] | timelines, and heap profiles on them, for ui.perfetto.dev |
//! | [`metrics`] | sums for Prometheus |
//! | [`replace`] | files that are written whole or not at all |

pub mod earlier;
pub mod files;
pub mod flame;
pub mod folded;
pub mod metrics;
pub mod perfetto;
pub mod pprof;
mod pprof_difference;
mod pprof_message;
mod pprof_text;
pub mod profile;
pub mod replace;
pub mod text;
