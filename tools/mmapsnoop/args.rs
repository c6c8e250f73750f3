//! The options of mmapsnoop.

use clap::Parser;
use memtools::export::files::ProfileArgs;
use memtools::export::format::{self, FileFormat};
use memtools::parse::UsageError;
use memtools::print::output::Format;
use memtools::process::container::ContainerArgs;
use memtools::run::cli::CommonArgs;
use memtools::run::target::TargetArgs;
use memtools::stacks::unwind::UnwindArgs;

/// Trace mmap(2): process, size, protection, file and result.
#[derive(Debug, Parser)]
#[command(
    name = "mmapsnoop",
    version,
    mut_arg("export", |export| format::limited_to(export, &FileFormat::ALL)),
    after_help = "\
examples:
  mmapsnoop                    every mapping of every process
  mmapsnoop -Tp 1234           process 1234, with the time
  mmapsnoop -n java --path     tasks named java, with full paths
  mmapsnoop --container        with the container or systemd unit of each
  mmapsnoop -x                 only calls that fail, with the error
  mmapsnoop --munmap -r
                               munmap(2) and mremap(2) too, with addresses and
                               results
  mmapsnoop -j -d 10 | jq      all fields, for ten seconds
  mmapsnoop -d 10 --export mmap.svg >/dev/null  flame graph of mapped bytes"
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) target: TargetArgs,

    /// Add the time of day
    #[arg(short = 'T', long)]
    pub(crate) time: bool,

    /// Show only failed calls
    #[arg(short = 'x', long)]
    pub(crate) failed: bool,

    /// Add the result: the mapped address, or the error
    #[arg(short, long)]
    pub(crate) result: bool,

    /// Show full paths of files
    #[arg(long)]
    pub(crate) path: bool,

    /// Show all flags by name
    #[arg(long)]
    pub(crate) flags: bool,

    /// Also show munmap(2) and mremap(2), with the address
    #[arg(long)]
    pub(crate) munmap: bool,

    /// Also trace calls of 32-bit programs
    ///
    /// This slows down all system calls a little.
    #[arg(hide_short_help = true, long)]
    pub(crate) compat: bool,

    /// Print the user stack of each call
    #[arg(long)]
    pub(crate) stack: bool,

    /// Print folded stacks at the end, weighted by bytes
    ///
    /// The bytes are the mapped bytes.
    #[arg(short, long, conflicts_with_all = ["json", "stack", "failed", "munmap"])]
    pub(crate) folded: bool,

    /// Weight stacks by calls instead of bytes
    #[arg(long)]
    pub(crate) calls: bool,

    #[command(flatten)]
    pub(crate) profile: ProfileArgs,

    #[command(flatten)]
    pub(crate) containers: ContainerArgs,

    #[command(flatten)]
    pub(crate) unwind: UnwindArgs,

    #[command(flatten)]
    pub(crate) common: CommonArgs,
}

impl Args {
    /// Refuses files that the mode cannot write, and options without effect.
    pub(crate) fn check(&self) -> Result<(), UsageError> {
        let export = &self.common.export;
        if self.failed {
            export.expect("with --failed (-x)", &FileFormat::OF_SUMS)?;
        }
        if self.folded {
            export.expect("with --folded (-f)", &FileFormat::OF_PROFILES)?;
        }
        if self.calls && !self.folded && !export.has_profiles() {
            return Err(UsageError(format!(
                "--calls requires --folded (-f), or --export of {}",
                format::list(&FileFormat::OF_PROFILES)
            )));
        }
        Ok(())
    }

    /// Whether any output needs stacks.
    pub(crate) fn with_stacks(&self) -> bool {
        self.stack || self.folded || self.common.export.has_profiles()
    }

    pub(crate) fn format(&self) -> Format {
        if self.folded {
            Format::Folded
        } else {
            self.common.format()
        }
    }

    /// Returns the programs on tracepoints.
    pub(crate) fn programs(&self) -> &'static [&'static str] {
        let all = &["mmap_exit", "munmap_exit", "mremap_exit"];
        if self.munmap { all } else { &all[..1] }
    }

    /// Returns the programs to load where they are attached to the system calls' functions.
    pub(crate) fn programs_on_functions(&self) -> &'static [&'static str] {
        let all = &[
            "mmap_exit_function",
            "munmap_exit_function",
            "mremap_exit_function",
        ];
        if self.munmap { all } else { &all[..1] }
    }
}

#[cfg(test)]
mod tests {
    use memtools::run::cli;

    use super::*;

    #[test]
    fn wrong_usage_is_refused() {
        cli::assert_refuses::<Args>(&["-p 0", "-p 1,x", "-d 0", "5", "-f -j"]);
        for (line, accepted) in [
            ("--calls", false),
            ("--calls --export f.pftrace", false),
            ("--calls --export f.svg", true),
            ("-x --export f.svg", false),
            ("-x --export f.pftrace", true),
            ("-x --export f.prom", true),
            ("-f --export f.prom", false),
            ("-f --export f.pftrace", false),
            ("-f --export f.folded", true),
        ] {
            let args = ["mmapsnoop"].into_iter().chain(line.split(' '));
            let args = Args::try_parse_from(args).expect(line);
            assert_eq!(args.check().is_ok(), accepted, "{line}");
        }
        let args = Args::try_parse_from(["mmapsnoop", "-Txp", "1,2"]).expect("valid");
        assert!(args.time && args.failed && args.target.filter.pid == [1, 2]);
    }
}
