//! The options that write a report into files of other formats as well, and their files.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Error, Result};
use jiff::Zoned;

use crate::export::profile::{Profile, Sample, Value};
use crate::export::replace::Replaced;
use crate::export::{flame, pprof};

/// The function that writes a profile in one format.
type Writer = fn(&Profile, &mut dyn Write) -> Result<()>;

/// Options of every tool with stacks.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ExportArgs {
    /// Also draw each report as a flame graph, into this file, which any browser shows
    #[arg(long, value_name = "FILE.svg")]
    pub flame: Option<PathBuf>,

    /// Also write each report as a profile, into this file, for `go tool pprof` and others
    #[arg(long, value_name = "FILE.pb.gz")]
    pub pprof: Option<PathBuf>,
}

impl ExportArgs {
    /// Whether any file is asked for.
    pub fn any(&self) -> bool {
        self.flame.is_some() || self.pprof.is_some()
    }

    /// Checks that the files can be written. `tool` and `target` say what they will be of.
    ///
    /// # Errors
    /// If one cannot.
    pub fn prepare(&self, tool: &'static str, target: String) -> Result<Exports> {
        let formats: [(&Option<PathBuf>, Writer); 2] =
            [(&self.flame, flame::write), (&self.pprof, pprof::write)];
        let mut files = Vec::new();
        for (path, write) in formats {
            if let Some(path) = path {
                files.push((Replaced::at(path)?, write));
            }
        }
        Ok(Exports {
            files,
            tool,
            target,
            since: Zoned::now(),
            failed: None,
        })
    }
}

/// The files of one run.
pub struct Exports {
    files: Vec<(Replaced, Writer)>,
    tool: &'static str,
    target: String,
    since: Zoned,
    failed: Option<Error>,
}

/// What the numbers of a report are of.
#[derive(Debug, Clone)]
pub struct Subject {
    /// In words, such as `outstanding allocations`.
    pub name: String,
    /// What there is a number of for each stack.
    pub values: Vec<Value>,
    /// The value that is shown unless another one is asked for.
    pub main: usize,
    /// What a reader of the numbers has to know, such as that they are estimates.
    pub remarks: Vec<String>,
}

impl Exports {
    /// Whether there are any files to write.
    pub fn any(&self) -> bool {
        !self.files.is_empty()
    }

    /// What comes from now on is what the next report is of: the trace has begun, or the last
    /// report had all that was before.
    pub fn begin(&mut self) {
        self.since = Zoned::now();
    }

    /// A report's stacks, with what they are of.
    pub fn profile(&self, subject: Subject, samples: Vec<Sample>) -> Profile {
        Profile {
            tool: self.tool,
            target: self.target.clone(),
            subject: subject.name,
            since: self.since.clone(),
            until: Zoned::now(),
            values: subject.values,
            main: subject.main,
            samples,
            remarks: subject.remarks,
        }
    }

    /// Writes a report's stacks into the files. Where that fails the trace goes on, and the
    /// reason is told now and by [`Exports::finish`].
    pub fn write(&mut self, subject: Subject, samples: Vec<Sample>) {
        let profile = self.profile(subject, samples);
        let mut failed = None;
        for (file, write) in &self.files {
            if let Err(error) = file.write(|out| write(&profile, out)) {
                failed = Some(error.context(format!("failed to write {}", file.name())));
            }
        }
        // A disk that stays full is told of once.
        if let Some(error) = &failed
            && self.failed.is_none()
        {
            eprintln!("{}: {error:#}", self.tool);
        }
        self.failed = failed;
    }

    /// Ends the run.
    ///
    /// # Errors
    /// If the last report could not be written.
    pub fn finish(self) -> Result<()> {
        self.failed.map_or(Ok(()), |error| {
            Err(error.context("the last report is not in its file"))
        })
    }
}
