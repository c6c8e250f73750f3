//! Options that each plan knows. A plan refuses all other options, so that none is without effect.

use clap::parser::ValueSource;
use clap::{ArgMatches, Command, CommandFactory, FromArgMatches};
use memtools::parse::UsageError;

use crate::args::Args;

/// Options of all plans, by id.
const EVERY_PLAN: [&str; 13] = [
    "interval",
    "count",
    "pid",
    "top",
    "json",
    "output",
    "mem_limit",
    "max_allocs",
    "stack_storage_size",
    "perf_max_stack_depth",
    "verbose",
    "help",
    "version",
];
/// Options of the plans that trace processes.
const PROCESSES: [&str; 14] = [
    "command",
    "obj",
    "symbols_prefix",
    "alloc",
    "free",
    "no_placement",
    "container",
    "lines",
    "debuginfod",
    "unwind",
    "interpreters",
    "java_names",
    "unwind_memory",
    "fail_on",
];
/// Options of the plans that report.
const REPORTS: [&str; 15] = [
    "name",
    "cgroup",
    "min_size",
    "max_size",
    "sample_rate",
    "older",
    "extended",
    "show_allocs",
    "sort",
    "combined_only",
    "folded",
    "export",
    "diff",
    "serve",
    "serve_remote",
];
/// Options of reports on processes.
const PROCESS_REPORTS: [&str; 6] = [
    "children",
    "sample_bytes",
    "max_overhead",
    "mode",
    "trace",
    "python_objects",
];
/// Options of verdicts.
const VERDICTS: [&str; 6] = [
    "verdict",
    "idle",
    "why",
    "suppressions",
    "max_pause",
    "pre_copy",
];
/// Options of the trace of the kernel.
const KERNEL: [&str; 6] = [
    "kernel",
    "percpu",
    "cache",
    "by_cache",
    "wa_missing_free",
    "fail_on",
];

/// Kind of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PlanKind {
    Processes,
    Judged,
    Kernel,
}

impl PlanKind {
    fn knows(self, option: &str) -> bool {
        let lists: &[&[&str]] = match self {
            Self::Processes => &[&EVERY_PLAN, &PROCESSES, &REPORTS, &PROCESS_REPORTS],
            Self::Judged => &[&EVERY_PLAN, &PROCESSES, &VERDICTS],
            Self::Kernel => &[&EVERY_PLAN, &REPORTS, &KERNEL],
        };
        lists.iter().any(|list| list.contains(&option))
    }

    /// Refuses an option that this plan does not know, if one was given.
    ///
    /// # Errors
    /// If there is such an option.
    pub(super) fn expect_known(self, given: &GivenOptions) -> Result<(), UsageError> {
        let command = Args::command();
        let mut options = command.get_arguments();
        let unknown = options.find(|option| {
            let id = option.get_id().as_str();
            given.0.iter().any(|given| given == id) && !self.knows(id)
        });
        unknown.map_or(Ok(()), |option| {
            let id = option.get_id().as_str();
            Err(UsageError(self.refusal(id, &spelling(option))))
        })
    }

    /// Returns the message on an option that this plan does not know, with the way out.
    fn refusal(self, id: &str, option: &str) -> String {
        match self {
            Self::Judged => format!(
                "--verdict conflicts with {option}: it is on one process, all of whose allocations are traced"
            ),
            _ if VERDICTS.contains(&id) => format!("{option} requires --verdict"),
            Self::Processes => format!(
                "{option} is for the kernel's allocations: add --kernel (-k) to trace those"
            ),
            Self::Kernel => format!(
                "{option} is for the allocations of a process, not of the kernel: name one with -p, \
                 without --kernel (-k)"
            ),
        }
    }
}

/// Returns an option as messages name it, such as `--command (-c)`.
fn spelling(option: &clap::Arg) -> String {
    let long = option.get_long().unwrap_or_default();
    let short = option.get_short().map(|short| format!(" (-{short})"));
    format!("--{long}{}", short.unwrap_or_default())
}

/// Ids of the options that a command line has. Has to be the first field of what is parsed: fields take their options
/// out of the matches.
#[derive(Debug, Clone, Default)]
pub(crate) struct GivenOptions(Vec<String>);

impl clap::Args for GivenOptions {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}

impl FromArgMatches for GivenOptions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let ids = matches.ids().map(clap::Id::as_str);
        let given = ids.filter(|id| matches.value_source(id) == Some(ValueSource::CommandLine));
        Ok(Self(given.map(str::to_owned).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_option_is_known_to_a_plan() {
        let mut command = Args::command();
        command.build();
        let mut ids: Vec<_> = command
            .get_arguments()
            .map(|arg| arg.get_id().as_str())
            .collect();
        let plans = [PlanKind::Processes, PlanKind::Judged, PlanKind::Kernel];
        for id in &ids {
            assert!(plans.iter().any(|plan| plan.knows(id)), "{id}");
        }
        let lists: [&[&str]; 6] = [
            &EVERY_PLAN,
            &PROCESSES,
            &REPORTS,
            &PROCESS_REPORTS,
            &VERDICTS,
            &KERNEL,
        ];
        ids.sort_unstable();
        for id in lists.concat() {
            assert!(ids.binary_search(&id).is_ok(), "no option {id}");
        }
    }
}
