//! Options that also write a report into files of other formats, and these files.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use jiff::Zoned;

use crate::export::atomic_file::Refreshed;
use crate::export::perfetto::Heaps;
use crate::export::profile::{Profile, Sample, ValueType};
use crate::export::saved_profile::SavedProfile;
use crate::export::{flame, pprof};
use crate::print::clock;
use crate::print::message;
use crate::stacks::symbolize::{SourceArgs, Symbolizer};

/// Function that writes a profile in one format.
type Writer = Box<dyn Fn(&Profile, &mut dyn Write) -> Result<()>>;

/// Options of every tool with stacks: what is told of them, and into which files.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ExportArgs {
    /// Also draw a flame graph of each report
    ///
    /// Any browser shows the file.
    #[arg(help_heading = "Output", long, value_name = "FILE.svg")]
    pub flame: Option<PathBuf>,

    /// Color the flame graph by the change since this profile
    ///
    /// OLD.pb.gz is a file that an earlier run wrote with --pprof. Red stacks have grown, blue stacks have shrunk.
    #[arg(
        help_heading = "Output",
        hide_short_help = true,
        long,
        value_name = "OLD.pb.gz",
        requires = "flame"
    )]
    pub flame_base: Option<PathBuf>,

    /// Also write a profile for `go tool pprof`
    #[arg(help_heading = "Output", long, value_name = "FILE.pb.gz")]
    pub pprof: Option<PathBuf>,

    /// Options for the source lines of frames.
    #[command(flatten)]
    pub source: SourceArgs,
}

impl ExportArgs {
    /// Adds to the symbolizer the source lines that these options ask for.
    ///
    /// # Errors
    /// See [`Symbolizer::with_source`].
    pub fn with_source(&self, symbolizer: Symbolizer) -> Result<Symbolizer> {
        symbolizer.with_source(self.source, self.is_enabled())
    }

    /// Whether any file is asked for.
    pub fn is_enabled(&self) -> bool {
        self.flame.is_some() || self.pprof.is_some()
    }

    /// Checks that the files can be written. `target` describes the profiles.
    ///
    /// # Errors
    /// If a file cannot be written, or if the earlier profile cannot be read.
    pub fn prepare(&self, target: String) -> Result<Exports> {
        let mut files: Vec<(Refreshed, Writer)> = Vec::new();
        if let Some(path) = &self.flame {
            let write: Writer = match &self.flame_base {
                None => Box::new(flame::write),
                Some(base) => {
                    let base = SavedProfile::read(base)?;
                    Box::new(move |profile, out| flame::write_difference(&base, profile, out))
                }
            };
            files.push((Refreshed::at(path)?, write));
        }
        if let Some(path) = &self.pprof {
            files.push((Refreshed::at(path)?, Box::new(pprof::write)));
        }
        Ok(Exports {
            files,
            heaps: None,
            target,
            since: clock::now(),
        })
    }
}

/// The files of one run.
pub struct Exports {
    files: Vec<(Refreshed, Writer)>,
    heaps: Option<Heaps>,
    target: String,
    since: Zoned,
}

/// Description of the numbers of a report.
#[derive(Debug, Clone)]
pub struct ProfileInfo {
    /// The numbers in words, such as `outstanding allocations`.
    pub name: String,
    /// Kinds of the numbers that each stack has.
    pub values: Vec<ValueType>,
    /// Index of the value that is shown unless another one is asked for.
    pub main_value: usize,
    /// Whether a stack's name is that of a thread, not of its process.
    pub by_thread: bool,
    /// Remarks for the reader of the numbers, such as that they are estimates.
    pub remarks: Vec<String>,
}

impl Exports {
    /// Whether there are any files to write.
    pub fn is_enabled(&self) -> bool {
        !self.files.is_empty() || self.heaps.is_some()
    }

    /// Also adds each report to a timeline of heap profiles.
    #[must_use]
    pub fn with(self, heaps: Heaps) -> Self {
        Self {
            heaps: Some(heaps),
            ..self
        }
    }

    /// Starts the period of the next report now: the trace has begun, or the last report contained all that came
    /// before.
    pub fn begin(&mut self) {
        self.since = clock::now();
    }

    /// Makes the profile of a report from its stacks and the description of their numbers.
    pub fn profile(&self, subject: ProfileInfo, samples: Vec<Sample>) -> Profile {
        Profile {
            tool: message::tool(),
            target: self.target.clone(),
            subject: subject.name,
            since: self.since.clone(),
            until: clock::now(),
            values: subject.values,
            main_value: subject.main_value,
            by_thread: subject.by_thread,
            samples,
            remarks: subject.remarks,
        }
    }

    /// Writes a report's stacks into the files. After a failure the trace goes on. The reason is printed at once and
    /// returned by [`Exports::finish`].
    pub fn write(&mut self, subject: ProfileInfo, samples: Vec<Sample>) {
        let profile = self.profile(subject, samples);
        self.write_profile(&profile);
    }

    /// Writes a profile into the files, as [`Exports::write`] does.
    pub fn write_profile(&mut self, profile: &Profile) {
        for (file, write) in &mut self.files {
            file.write(|out| write(profile, out));
        }
        if let Some(heaps) = &mut self.heaps {
            heaps.write(profile);
        }
    }

    /// Ends the run.
    ///
    /// # Errors
    /// If the last report could not be written.
    pub fn finish(mut self) -> Result<()> {
        let timeline = self.heaps.as_mut().map_or(Ok(()), Heaps::finish);
        let files = self.files.into_iter().map(|(file, _)| file.finish());
        let failed = files.chain([timeline]).filter_map(Result::err);
        let failed: Vec<String> = failed.map(|error| format!("{error:#}")).collect();
        ensure!(
            failed.is_empty(),
            "the last report is not in its file: {}",
            failed.join("; ")
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_that_cannot_be_written_is_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let args = ExportArgs {
            flame: Some(folder.path().join("a.svg")),
            pprof: Some(folder.path().join("b.pb.gz")),
            ..ExportArgs::default()
        };
        let mut exports = args.prepare("pid 7".into()).expect("writable");
        folder.close().expect("it is ours");
        let subject = ProfileInfo {
            name: "page faults".into(),
            values: vec![ValueType::count("faults", "faults")],
            main_value: 0,
            by_thread: false,
            remarks: Vec::new(),
        };
        exports.write(subject, Vec::new());
        let error = exports.finish().expect_err("no folder").to_string();
        assert!(error.contains("a.svg: No such"), "{error}");
        assert!(error.contains("b.pb.gz: No such"), "{error}");
    }
}
