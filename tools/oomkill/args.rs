//! Command line of oomkill.

use clap::Parser;
use memtools::export::files::ProfileArgs;
use memtools::export::format::{self, FileFormat};
use memtools::process::container::ContainerArgs;
use memtools::run::cli::CommonArgs;
use memtools::run::target::TargetArgs;
use memtools::stacks::unwind::UnwindArgs;

/// Trace OOM kills: victim, triggering task, limit and load.
#[derive(Debug, Parser)]
#[command(
    name = "oomkill",
    version,
    mut_arg("export", |export| format::limited_to(export, &FileFormat::ALL)),
    after_help = "\
examples:
  oomkill                      one line per kill, until Ctrl-C
  oomkill -e                   with the limit, candidates and stacks
  oomkill -j >>/var/log/oomkill.json
  oomkill --cgroup /sys/fs/cgroup/db.service"
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) target: TargetArgs,

    /// Add the limit, candidates and stacks
    ///
    /// Also show the memory of the victim, and other killed processes.
    #[arg(short, long)]
    pub(crate) extended: bool,

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
    pub(crate) fn wants_stacks(&self) -> bool {
        self.extended || self.common.json || self.common.export.has_profiles()
    }
}

#[cfg(test)]
mod tests {
    use memtools::run::cli;

    use super::*;

    #[test]
    fn wrong_usage_is_refused() {
        cli::assert_refuses::<Args>(&["1", "-d 0", "-p 0"]);
    }
}
