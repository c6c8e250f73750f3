//! Formats of the files that `--export` writes. The extension of a file selects its format.

use std::path::{Path, PathBuf};

use clap::builder::{PathBufValueParser, TypedValueParser};

/// Format of an exported file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileFormat {
    /// Flame graph, for browsers.
    FlameGraph,
    /// Profile in pprof's format.
    Pprof,
    /// Folded stacks.
    Folded,
    /// Timeline for Perfetto.
    Perfetto,
    /// Metrics in the text format of Prometheus.
    Prometheus,
}

impl FileFormat {
    /// All formats, in the order of the help.
    pub const ALL: [Self; 5] = [
        Self::FlameGraph,
        Self::Pprof,
        Self::Perfetto,
        Self::Folded,
        Self::Prometheus,
    ];
    /// Formats that are written from a profile: the stacks of a report.
    pub const OF_PROFILES: [Self; 3] = [Self::FlameGraph, Self::Pprof, Self::Folded];
    /// Formats of tools and modes that print stacks.
    pub const OF_STACKS: [Self; 4] = [Self::FlameGraph, Self::Pprof, Self::Perfetto, Self::Folded];
    /// Formats of tools and modes that have sums only.
    pub const OF_SUMS: [Self; 2] = [Self::Perfetto, Self::Prometheus];

    /// Returns the extensions that select the format. The help shows the first one.
    fn extensions(self) -> &'static [&'static str] {
        match self {
            Self::FlameGraph => &[".svg"],
            Self::Pprof => &[".pb.gz"],
            Self::Folded => &[".folded"],
            Self::Perfetto => &[".pftrace", ".perfetto-trace"],
            Self::Prometheus => &[".prom"],
        }
    }

    /// Returns what a file of this format is.
    fn description(self) -> &'static str {
        match self {
            Self::FlameGraph => "flame graph, for a browser",
            Self::Pprof => "profile, for `go tool pprof`",
            Self::Folded => "folded stacks, for flamegraph.pl",
            Self::Perfetto => "timeline, for ui.perfetto.dev",
            Self::Prometheus => "metrics, for node_exporter",
        }
    }

    /// Returns the extension that the help shows.
    pub(super) fn extension(self) -> &'static str {
        self.extensions()[0]
    }

    /// Whether the file is written from a profile.
    pub(super) fn is_profile(self) -> bool {
        Self::OF_PROFILES.contains(&self)
    }

    fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.as_encoded_bytes();
        let has =
            |extension: &&str| name.len() > extension.len() && name.ends_with(extension.as_bytes());
        Self::ALL
            .into_iter()
            .find(|format| format.extensions().iter().any(has))
    }
}

/// File that `--export` names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportFile {
    /// The format that the extension selects.
    pub(super) format: FileFormat,
    /// The path as it was given.
    pub(super) path: PathBuf,
}

impl ExportFile {
    /// Resolves the format of a file.
    ///
    /// # Errors
    /// If the extension selects none of `formats`. The error is the text for the user.
    fn of(path: PathBuf, formats: &[FileFormat]) -> Result<Self, String> {
        match FileFormat::of(&path) {
            Some(format) if formats.contains(&format) => Ok(Self { format, path }),
            Some(_) => Err(format!("format not supported; use {}", list(formats))),
            None => Err(format!("unknown format; use {}", list(formats))),
        }
    }
}

/// Lists the extensions of formats, such as `.svg, .pb.gz or .folded`.
pub fn list(formats: &[FileFormat]) -> String {
    let extensions: Vec<_> = formats.iter().map(|format| format.extension()).collect();
    match &extensions[..] {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [some @ .., last] => format!("{} or {last}", some.join(", ")),
    }
}

/// Limits the option --export of a tool to the formats that the tool can write, and names these in its help.
#[must_use]
pub fn limited_to(option: clap::Arg, formats: &'static [FileFormat]) -> clap::Arg {
    let extensions: Vec<_> = formats.iter().map(|format| format.extension()).collect();
    let described: Vec<_> = formats
        .iter()
        .map(|format| format!("{} ({})", format.extension(), format.description()))
        .collect();
    let parser = PathBufValueParser::new();
    option
        .help(format!("Also write FILE: {}", extensions.join(" ")))
        .long_help(format!(
            "Also write FILE\n\nThe extension selects the format: {}. Can be repeated.",
            described.join(", ")
        ))
        .value_parser(parser.try_map(move |path| ExportFile::of(path, formats)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_extension_selects_the_format() {
        for (path, format) in [
            ("a.svg", Some(FileFormat::FlameGraph)),
            ("/tmp/a.b.pb.gz", Some(FileFormat::Pprof)),
            ("a.folded", Some(FileFormat::Folded)),
            ("a.pftrace", Some(FileFormat::Perfetto)),
            ("a.perfetto-trace", Some(FileFormat::Perfetto)),
            ("a.svg/a.prom", Some(FileFormat::Prometheus)),
            ("a.gz", None),
            (".svg", None),
            ("svg", None),
            ("a.SVG", None),
            ("", None),
            ("/", None),
        ] {
            assert_eq!(FileFormat::of(Path::new(path)), format, "{path}");
        }
    }

    #[test]
    fn an_error_names_the_formats_of_the_tool() {
        let of = |path: &str, formats| ExportFile::of(path.into(), formats).expect_err(path);
        assert_eq!(
            of("a.txt", &FileFormat::ALL),
            "unknown format; use .svg, .pb.gz, .pftrace, .folded or .prom"
        );
        assert_eq!(
            of("a.svg", &FileFormat::OF_SUMS),
            "format not supported; use .pftrace or .prom"
        );
        assert_eq!(
            of("a.svg", &[FileFormat::Perfetto]),
            "format not supported; use .pftrace"
        );
    }
}
