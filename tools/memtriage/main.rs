//! memtriage: where memory is used, what is wrong with it, and which tool shows more.
//!
//! Nothing is traced unless --who requests it: the data is from /proc, cgroup files and the kernel's log.
//! These are read twice for rates.

mod accounting;
mod doctor;
mod findings;
mod growing;
mod huge_pages;
mod machine;
mod processes;
mod rankings;
mod screen;
mod snapshot;
mod subject;
mod tendency;
mod tools;
mod unlinked;
mod who;

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Parser;
use clap_complete::engine::ArgValueCompleter;
use memtools::parse;
use memtools::print::output::{Format, Output};
use memtools::process::complete;
use memtools::process::container::ContainerArgs;
use memtools::process::filter;
use memtools::process::proc;
use memtools::run::cli;
use memtools::run::poll::{Poller, Wake};

use crate::findings::{Evidence, Level};
use crate::growing::{Growing, Growth};
use crate::rankings::RankBy;
use crate::screen::{Host, Table};
use crate::snapshot::{OneShotData, Snapshot};
use crate::subject::Subject;
use crate::who::Culprit;

/// Time between the two looks if no interval is given: the shortest from which rates can be computed.
const BETWEEN: Duration = Duration::from_millis(500);
/// Time between two looks of --watch.
const WATCH: Duration = Duration::from_secs(1);
/// Escape sequence that clears a terminal and moves to its first line.
const CLEAR: &str = "\x1b[H\x1b[2J";
/// Exit status if there are findings.
const FINDINGS: u8 = 3;

/// Show what is wrong with the memory of this machine, and which tool to run next.
#[derive(Debug, Parser)]
#[command(
    name = "memtriage",
    version,
    mut_arg("container", |container| container.conflicts_with_all(["doctor", "cgroup"])),
    after_help = "\
exit status: 0 if nothing was found, 3 if there was a finding (with --doctor: a
tool cannot run), 1 if it could not run

examples:
  memtriage                    one screen: findings, parts of memory, processes
  memtriage --all              also checks that passed, and small items
  memtriage 5                  every 5 seconds, until Ctrl-C
  memtriage --watch            every second, with growth
  memtriage --by slab -T 20
                               the largest slab caches; also cgroup, code, swap,
                               growth
  memtriage --container
                               with the container or systemd unit of each
                               process
  memtriage -p 1234
                               memory of a process: whether it grows, and
                               where it is
  memtriage --cgroup db        memory of a cgroup: a unit, a container ID, or a path
  memtriage --who 10
                               also trace for 10 seconds, and show the
                               stacks
  memtriage --doctor
                               which tools can run here, how, and what is
                               missing
  memtriage -j | jq -c 'select(.type == \"finding\" and .level == \"act\")'"
)]
struct Args {
    /// Show where the memory of this process is
    #[arg(help_heading = "Target", short, long, value_name = "PID", value_parser = proc::parse_pid, add = ArgValueCompleter::new(complete::pids), conflicts_with_all = ["watch", "who", "doctor", "cgroup", "by"])]
    pid: Option<u32>,

    /// Show where the memory of this cgroup is
    ///
    /// CGROUP is the path of a cgroup, the name of a systemd unit, or the ID of a container or pod.
    #[arg(help_heading = "Target", long, value_name = "CGROUP", value_parser = filter::cgroup_path, add = ArgValueCompleter::new(complete::cgroups), conflicts_with_all = ["watch", "who", "doctor", "by"])]
    cgroup: Option<PathBuf>,

    /// Also show checks that passed, and all parts of memory
    #[arg(short, long)]
    all: bool,

    /// Repeat every second, and show what grows
    ///
    /// INTERVAL sets another interval.
    #[arg(help_heading = "Actions", short, long)]
    watch: bool,

    /// Show which tools can run here, and what is missing
    #[arg(help_heading = "Actions", long, conflicts_with_all = ["all", "watch", "who", "interval"])]
    doctor: bool,

    /// Also trace the findings for SECONDS, and show stacks
    ///
    /// The tools that can explain the findings are run, and the three largest stacks of each are shown.
    #[arg(help_heading = "Actions", long, value_name = "SECONDS", value_parser = parse::seconds, conflicts_with_all = ["watch", "interval"])]
    who: Option<Duration>,

    /// Kind of the ranking
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = RankBy::Process, conflicts_with_all = ["doctor"])]
    by: RankBy,

    /// Number of rows of the ranking
    #[arg(short = 'T', long, value_name = "N", default_value_t = 5, value_parser = parse::count::<usize>)]
    top: usize,

    #[command(flatten)]
    containers: ContainerArgs,

    /// Print one JSON object per line
    #[arg(help_heading = "Output", short, long)]
    json: bool,

    /// Write to FILE instead of standard output
    #[arg(help_heading = "Output", short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Seconds between reports [default: one report]
    #[arg(value_parser = parse::seconds)]
    interval: Option<Duration>,

    /// Number of reports [default: until Ctrl-C]
    #[arg(value_parser = parse::count::<u64>)]
    count: Option<u64>,
}

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    let format = if args.json {
        Format::Json
    } else {
        Format::Text
    };
    let (mut poller, mut output) = cli::start(format, args.output.as_deref())?;
    if args.doctor {
        return Ok(match doctor::check(poller, &mut output)? {
            true => ExitCode::SUCCESS,
            false => ExitCode::from(FINDINGS),
        });
    }
    if args.containers.container {
        args.by.expect_containers()?;
    }
    let schedule = Schedule::of(&args);
    if let Some(subject) = Subject::of(args.pid, args.cgroup.as_deref())? {
        let shown = (args.all, args.containers.container);
        let worst = subject::run(&subject, &schedule, shown, poller, &mut output)?;
        return Ok(status(worst));
    }
    let redraws = args.watch && args.output.is_none() && !args.json && io::stdout().is_terminal();
    let mut before = first_look(args.by)?;
    let mut growth = Growth::default();
    growth.add(&before);
    let mut worst = Level::Healthy;
    for _ in 0..schedule.reports {
        if schedule.wait(&mut poller)? {
            break;
        }
        let now = Snapshot::now(args.by)?;
        growth.add(&now);
        if redraws {
            output.raw(|out| write!(out, "{CLEAR}"))?;
        }
        let (level, culprits) = report(&args, &mut output, &before, &now)?;
        worst = worst.max(level);
        if args.watch {
            print_growth(&growth.rows(args.containers.container), &mut output)?;
        }
        if schedule.interval.is_some() {
            output.header("")?;
        }
        output.flush()?;
        if let Some(seconds) = args.who {
            let asked = (seconds, args.containers.container);
            who::ask(culprits, asked, poller, &mut output)?;
            break;
        }
        before = now;
    }
    Ok(status(worst))
}

/// Returns the exit status of a run whose worst finding has this level.
fn status(worst: Level) -> ExitCode {
    match worst {
        Level::Healthy => ExitCode::SUCCESS,
        Level::Look | Level::Act => ExitCode::from(FINDINGS),
    }
}

/// Reads the state of the machine for the first time, and says what is omitted.
fn first_look(by: RankBy) -> Result<Snapshot> {
    let look = Snapshot::now(by)?;
    if let Some(remark) = look.groups.remark() {
        memtools::message!("{remark}");
    }
    Ok(look)
}

/// Interval and number of the looks at the machine, or at one process or cgroup.
struct Schedule {
    /// Time between two looks. None for a single report, after [`BETWEEN`].
    interval: Option<Duration>,
    reports: u64,
}

impl Schedule {
    fn of(args: &Args) -> Self {
        let interval = args.interval.or(args.watch.then_some(WATCH));
        let reports = match interval {
            Some(_) => args.count.unwrap_or(u64::MAX),
            None => 1,
        };
        Self { interval, reports }
    }

    /// Waits for the next look, which SIGUSR1 requests at once. Returns whether to stop instead, because of a signal
    /// or the exit of the process that is looked at.
    fn wait(&self, poller: &mut Poller<'_>) -> Result<bool> {
        let deadline = Instant::now() + self.interval.unwrap_or(BETWEEN);
        let mut wake = Wake::default();
        while !(wake.stop || wake.exited || wake.deadline || wake.report) {
            wake = poller.wait(Some(deadline))?;
        }
        Ok(wake.stop || wake.exited)
    }
}

/// Prints one screen. Returns the level of its first finding, and the culprits that can be traced to explain the
/// findings.
fn report(
    args: &Args,
    output: &mut Output,
    before: &Snapshot,
    now: &Snapshot,
) -> Result<(Level, Vec<(&'static str, Culprit)>)> {
    let around = OneShotData::of(now);
    let growth = processes::growth(&before.processes, &now.processes);
    let evidence = Evidence {
        before,
        now,
        one_shot: &around,
        growth: &growth,
    };
    let findings = findings::judge(&evidence);
    output.row(&Host::now(&now.memory, now.at - before.at))?;
    output.header("")?;
    if screen::healthy(&findings) {
        output.header("nothing found; --all shows the checks that passed")?;
    }
    for finding in &findings {
        if args.all || finding.level > Level::Healthy {
            output.row(finding)?;
        }
    }
    output.row(&Table::new(&before.accounting, &now.accounting, args.all))?;
    let shown = (args.top, args.containers.container);
    args.by.print(before, now, &growth, shown, output)?;
    let level = findings.first().map_or(Level::Healthy, |first| first.level);
    Ok((level, findings::culprits(findings, &evidence)))
}

/// Prints the table of what has grown over the remembered looks. Prints no header if nothing has.
fn print_growth(rows: &[Growing], output: &mut Output) -> Result<()> {
    if let Some(first) = rows.first() {
        output.header(&Growing::header(first.container))?;
    }
    rows.iter().try_for_each(|row| output.row(row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        cli::assert_refuses::<Args>(&["--doctor --all", "-p 0"]);
    }
}
