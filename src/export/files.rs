//! The option --export, and the files of a run that it names.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use jiff::Zoned;

use crate::export::atomic_file::Refreshed;
use crate::export::format::{ExportFile, FileFormat, list};
use crate::export::metrics::{Family, Metrics};
use crate::export::perfetto::Heaps;
use crate::export::profile::{Profile, Sample, ValueType};
use crate::export::saved_profile::SavedProfile;
use crate::export::{flame, folded, pprof};
use crate::parse::UsageError;
use crate::print::clock;
use crate::print::message;
use crate::print::text;
use crate::stacks::symbolize::{SourceArgs, Symbolizer};

/// Function that writes a profile in one format.
type Writer = Box<dyn Fn(&Profile, &mut dyn Write) -> Result<()>>;

/// The option of every tool that writes files besides its output.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ExportArgs {
    /// Also write FILE
    ///
    /// A tool states its formats by [`limited_to`](crate::export::format::limited_to).
    #[arg(help_heading = "Output", long, value_name = "FILE", value_hint = clap::ValueHint::FilePath, value_parser = no_format)]
    export: Vec<ExportFile>,
}

fn no_format(_: &str) -> Result<ExportFile, String> {
    Err("this tool writes no files".into())
}

/// Options of tools with stacks, but for memleak, whose --diff also compares reports.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ProfileArgs {
    /// Color the exported flame graph by the change since this profile
    ///
    /// OLD.pb.gz is a file that an earlier run wrote with --export. Red stacks have grown, blue stacks have shrunk.
    #[arg(
        help_heading = "Output",
        hide_short_help = true,
        long,
        value_name = "OLD.pb.gz"
    )]
    pub diff: Option<PathBuf>,

    /// Options for the source lines of frames.
    #[command(flatten)]
    pub source: SourceArgs,
}

impl ProfileArgs {
    /// Checks that the files of --export can be written. `target` describes the profiles.
    ///
    /// # Errors
    /// If a file cannot be written, the earlier profile cannot be read, or there is no flame graph to color.
    pub fn prepare(&self, export: &ExportArgs, target: String) -> Result<Exports> {
        if self.diff.is_some() && export.of(FileFormat::FlameGraph).next().is_none() {
            return Err(UsageError("--diff requires --export FILE.svg".into()).into());
        }
        export.prepare(self.diff.as_deref(), target)
    }

    /// Adds to the symbolizer the source lines that these options request or that exported profiles need.
    ///
    /// # Errors
    /// See [`Symbolizer::with_source`].
    pub fn with_source(&self, symbolizer: Symbolizer, export: &ExportArgs) -> Result<Symbolizer> {
        symbolizer.with_source(self.source, export.has_profiles())
    }
}

impl ExportArgs {
    fn of(&self, format: FileFormat) -> impl Iterator<Item = &Path> {
        let files = self.export.iter().filter(move |file| file.format == format);
        files.map(|file| &*file.path)
    }

    /// Returns the only file of a format. Returns None if there is none.
    ///
    /// # Errors
    /// If there are several, which would have the same content.
    pub fn sole(&self, format: FileFormat) -> Result<Option<&Path>, UsageError> {
        let mut files = self.of(format);
        let first = files.next();
        match files.next() {
            None => Ok(first),
            Some(second) => Err(UsageError(format!(
                "--export {}: only one {} file can be written",
                text::escape(&second.to_string_lossy()),
                format.extension()
            ))),
        }
    }

    /// Whether any file is written from profiles, the stacks of reports.
    pub fn has_profiles(&self) -> bool {
        self.export.iter().any(|file| file.format.is_profile())
    }

    /// Whether a file of metrics is written.
    pub fn has_metrics(&self) -> bool {
        self.of(FileFormat::Prometheus).next().is_some()
    }

    /// Checks that a mode can write the files. `mode` is the option that selects the mode, such as `with --events`.
    ///
    /// # Errors
    /// If a file has another format than `formats`.
    pub fn expect(&self, mode: &str, formats: &[FileFormat]) -> Result<(), UsageError> {
        let refused = |file: &&ExportFile| !formats.contains(&file.format);
        match self.export.iter().find(refused) {
            None => Ok(()),
            Some(file) => Err(UsageError(format!(
                "--export {}: format not supported {mode}; use {}",
                text::escape(&file.path.to_string_lossy()),
                list(formats)
            ))),
        }
    }

    /// Checks that the files can be written that are made from profiles. A flame graph is colored by the change since
    /// the profile `earlier`. `target` describes the profiles.
    ///
    /// # Errors
    /// If a file cannot be written, or the earlier profile cannot be read.
    pub fn prepare(&self, earlier: Option<&Path>, target: String) -> Result<Exports> {
        let mut files: Vec<(Refreshed, Writer)> = Vec::new();
        for ExportFile { format, path } in &self.export {
            let write: Writer = match (format, earlier) {
                (FileFormat::FlameGraph, None) => Box::new(flame::write),
                (FileFormat::FlameGraph, Some(earlier)) => {
                    let earlier = SavedProfile::read(earlier)?;
                    Box::new(move |profile, out| flame::write_difference(&earlier, profile, out))
                }
                (FileFormat::Pprof, _) => Box::new(pprof::write),
                (FileFormat::Folded, _) => Box::new(folded::write),
                (FileFormat::Perfetto | FileFormat::Prometheus, _) => continue,
            };
            files.push((Refreshed::at(path)?, write));
        }
        Ok(Exports {
            files,
            heaps: None,
            target,
            since: clock::now(),
        })
    }

    /// Checks that the file of metrics can be written. `target` describes what is traced.
    ///
    /// # Errors
    /// If the file cannot be written, or there are several.
    pub fn metrics(&self, families: &[&'static Family], target: &str) -> Result<Metrics> {
        Metrics::begin(self.sole(FileFormat::Prometheus)?, families, target)
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
    /// Index of the value that is shown unless another one is requested.
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
        let folder = tempfile::tempdir().expect("a directory");
        let file = |format, name| ExportFile {
            format,
            path: folder.path().join(name),
        };
        let args = ExportArgs {
            export: vec![
                file(FileFormat::FlameGraph, "a.svg"),
                file(FileFormat::Pprof, "b.pb.gz"),
            ],
        };
        let mut exports = args.prepare(None, "pid 7".into()).expect("writable");
        folder.close().expect("it is ours");
        let subject = ProfileInfo {
            name: "page faults".into(),
            values: vec![ValueType::count("faults", "faults")],
            main_value: 0,
            by_thread: false,
            remarks: Vec::new(),
        };
        exports.write(subject, Vec::new());
        let error = exports.finish().expect_err("no directory").to_string();
        assert!(error.contains("a.svg: No such"), "{error}");
        assert!(error.contains("b.pb.gz: No such"), "{error}");
    }

    #[test]
    fn modes_and_formats_limit_the_files() {
        let args = |files: &[(FileFormat, &str)]| ExportArgs {
            export: files
                .iter()
                .map(|&(format, path)| ExportFile {
                    format,
                    path: path.into(),
                })
                .collect(),
        };
        let trace = (FileFormat::Perfetto, "a.pftrace");
        let both = args(&[trace, (FileFormat::FlameGraph, "a.svg")]);
        let refused = both.expect("with --events", &[FileFormat::Perfetto]);
        assert_eq!(
            refused.expect_err("a flame graph").to_string(),
            "--export a.svg: format not supported with --events; use .pftrace"
        );
        both.expect("without --x", &FileFormat::OF_STACKS)
            .expect("all are known");
        let sole = both.sole(FileFormat::Perfetto).expect("one");
        assert_eq!(sole, Some(Path::new("a.pftrace")));
        let twice = args(&[trace, trace]);
        assert!(twice.sole(FileFormat::Perfetto).is_err());
        let profiles = ProfileArgs {
            diff: Some("old.pb.gz".into()),
            ..ProfileArgs::default()
        };
        let refused = profiles.prepare(&args(&[trace]), "pid 7".into());
        assert!(refused.is_err_and(|error| error.is::<UsageError>()));
    }
}
