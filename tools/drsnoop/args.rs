//! Command line of drsnoop.

use clap::Parser;
use memtools::export::files::ProfileArgs;
use memtools::export::format::{self, FileFormat};
use memtools::parse;
use memtools::process::container::ContainerArgs;
use memtools::run::cli::CommonArgs;
use memtools::run::target::TargetArgs;
use memtools::stacks::unwind::UnwindArgs;

use crate::row::Columns;

/// Trace direct reclaim: tasks, latency and reclaimed pages.
#[derive(Debug, Parser)]
#[command(
    name = "drsnoop",
    version,
    mut_arg("verbose", |verbose| verbose.help("Add FREE(KB), the free memory when the reclaim began").help_heading("Report").hide_short_help(false)),
    mut_arg("export", |export| format::limited_to(export, &FileFormat::ALL)),
    after_help = "\
examples:
  drsnoop                      one line per direct reclaim
  drsnoop -Tp 1234             process 1234, with the time
  drsnoop -U -v                with user IDs and free memory
  drsnoop --memcg --summary -d 10
                               who was stalled, and for how long
  drsnoop --memcg -e
                               also for a memory cgroup's limit, with order,
                               flags and cgroups
  drsnoop --container          with the container or systemd unit of each
  drsnoop --stack -n java      with the stacks of stalled tasks
  drsnoop --export stalls.svg  flame graph of the time lost
  drsnoop --hist -d 60         one minute, with a latency histogram"
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) target: TargetArgs,

    /// Add TIME(s), the time since the first reclaim
    #[arg(short = 'T', long)]
    pub(crate) timestamp: bool,

    /// Add UID, the user ID
    #[arg(short = 'U', long)]
    pub(crate) print_uid: bool,

    /// Trace only tasks of this user
    #[arg(help_heading = "Target", short, long, value_name = "UID", value_parser = parse::number::<u32>)]
    pub(crate) uid: Option<u32>,

    /// Trace only this thread, and show thread IDs
    ///
    /// This option takes precedence over --pid.
    #[arg(help_heading = "Target", short, long, value_name = "TID", value_parser = parse::pid)]
    pub(crate) tid: Option<u32>,

    /// Add KIND, ORDER, GFP and CGROUP of each allocation
    ///
    /// ORDER is the order of the pages, GFP the allocation flags, CGROUP a cgroup of version 2. With --memcg, LIMITED
    /// is the cgroup whose limit was reached.
    #[arg(short, long)]
    pub(crate) extended: bool,

    /// Also show reclaim at the limit of a memory cgroup
    ///
    /// The column KIND has the kind of reclaim.
    #[arg(long)]
    pub(crate) memcg: bool,

    /// Print the kernel and user stack of each reclaim
    #[arg(long)]
    pub(crate) stack: bool,

    /// Print sums by process and cgroup at the end
    ///
    /// The reclaims themselves are not printed. SHARE is the time that tasks of the process were stalled, in percent of
    /// the time of the trace.
    #[arg(long, conflicts_with_all = ["timestamp", "print_uid", "extended", "stack", "container", "verbose", "tid"])]
    pub(crate) summary: bool,

    /// Print a latency histogram at the end
    #[arg(long)]
    pub(crate) hist: bool,

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
    pub(crate) fn columns(&self) -> Columns {
        Columns {
            timestamp: self.timestamp,
            uid: self.print_uid,
            tid: self.tid.is_some(),
            container: self.containers.container,
            free: self.common.verbose,
            kind: self.memcg || self.extended,
            extended: self.extended,
            limited: self.extended && self.memcg,
        }
    }

    pub(crate) fn wants_stacks(&self) -> bool {
        self.stack || self.common.export.has_profiles()
    }

    /// Describes the target for messages.
    pub(crate) fn target_description(&self) -> String {
        let user = self.uid.map(|uid| format!("user {uid}"));
        match self.tid.map(|tid| format!("thread {tid}")).or(user) {
            Some(some) => format!("{some}, {}", self.target),
            None => self.target.to_string(),
        }
    }

    pub(crate) fn wants_cgroups(&self) -> bool {
        self.extended || self.summary || self.containers.wanted(self.common.wants_cgroups())
    }

    pub(crate) fn wants_limited(&self) -> bool {
        self.memcg && !self.summary && (self.extended || self.common.json)
    }

    pub(crate) fn shows_free(&self) -> bool {
        self.common.verbose || self.common.json
    }
}

#[cfg(test)]
mod tests {
    use memtools::run::cli;

    use super::*;

    #[test]
    fn short_flags_cluster_as_in_bcc() {
        let args = Args::try_parse_from(["drsnoop", "-TUvp", "1,2", "-d", "0.5"]).expect("valid");
        assert!(args.timestamp && args.print_uid && args.common.verbose);
        assert_eq!(args.target.filter.pid, [1, 2]);
    }

    #[test]
    fn wrong_usage_is_refused() {
        cli::assert_refuses::<Args>(&[
            "-t 0",
            "-u root",
            "-d 0",
            "1",
            "--summary -T",
            "--stack --summary",
        ]);
    }
}
