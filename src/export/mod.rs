//! Symbolized stacks, and sums, in the formats that people and other programs read.
//!
//! | module | what it is for |
//! |---|---|
//! | [`text`] | stacks below a row, and in the format of BCC's stackcount |
//! | [`folded`] | folded stacks, which flame graph tools read |
//! | [`format`](mod@format) | formats of files, which their extensions select |
//! | [`files`] | the option --export, and the files of a run |
//! | [`profile`] | stacks, numbers and subject of a report, which each file format is written from |
//! | [`flame`] | flame graphs |
//! | [`saved_profile`] | profiles of earlier runs, to compare reports with |
//! | [`pprof`] | profiles in pprof's format |
//! | [`otlp`] | profiles in OpenTelemetry's protocol |
//! | [`perfetto`] | timelines, and heap profiles on them, for ui.perfetto.dev |
//! | [`metrics`] | sums of a run, and their file for Prometheus |
//! | [`exposition`] | metrics as text, for Prometheus |
//! | [`spool`] | folders of files that are written whole or not at all |
//! | [`atomic_file`] | files that are written whole or not at all |

pub mod atomic_file;
pub mod exposition;
pub mod files;
pub mod flame;
pub mod folded;
pub mod format;
pub mod metrics;
pub mod otlp;
pub mod perfetto;
pub mod pprof;
mod pprof_difference;
mod pprof_message;
mod pprof_text;
pub mod profile;
pub mod saved_profile;
pub mod spool;
pub mod text;
