//! memtriage: where memory is, what is wrong with it, and which tool shows more.
//!
//! Nothing is traced unless --who or --record asks for it: all is of /proc, cgroup files and the kernel's log, looked at twice for rates.

mod accounting;
mod doctor;
mod findings;
mod growing;
mod look;
mod nameless;
mod processes;
mod record;
mod screen;
mod siblings;
mod who;

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Parser;
use jiff::Zoned;
use memtools::print::output::{Format, Output};
use memtools::run::cli;
use memtools::run::poll::Wake;

use crate::findings::{Evidence, Level};
use crate::growing::{Growing, Growth};
use crate::look::{Look, Surroundings};
use crate::screen::{Host, ProcessRow, Table};
use crate::who::Culprit;

/// Time between the two looks, if no interval is given: as short as rates can be told from.
const BETWEEN: Duration = Duration::from_millis(500);
/// Time between two looks of --watch.
const WATCH: Duration = Duration::from_secs(1);
/// Has a terminal show what follows from its first line on.
const CLEAR: &str = "\x1b[H\x1b[2J";
/// Exit status if there is something to look at.
const FINDINGS: u8 = 3;

/// Show what is wrong with the machine's memory, where all of it is, and which tool to run next.
#[derive(Debug, Parser)]
#[command(
    name = "memtriage",
    version,
    max_term_width = 100,
    after_help = "\
exit status: 0 if nothing was found, 3 if something is to be looked at (with --doctor: a tool cannot
run; with --record: a report was written), 1 if it could not run

examples:
  memtriage                    one screen: findings, where memory is, whose it is
  memtriage --all              also what is well, and each small part
  memtriage 5                  every 5 seconds, until Ctrl-C
  memtriage --watch            every second, with what grows
  memtriage --who 10           then trace for 10 seconds, and name the stacks of what was found
  memtriage --record DIR --before-oom
                               wait for an OOM kill, and write down who grew, by which code
  memtriage --doctor           which tools can run here, how, and what is missing
  memtriage -j | jq -c 'select(.type == \"finding\" and .level == \"act\")'"
)]
struct Args {
    /// Also show the rules that found nothing, and every part of memory
    #[arg(short, long)]
    all: bool,

    /// Keep looking, every second unless there is an interval, and show what grows
    #[arg(short, long)]
    watch: bool,

    /// Run each of the other tools for a moment instead, and tell which work here, how, and what is missing
    #[arg(long, conflicts_with_all = ["all", "watch", "who", "interval"])]
    doctor: bool,

    /// Then run the tools that can explain the findings for so many seconds, and show the three largest stacks of each
    #[arg(long, value_name = "SECONDS", value_parser = cli::seconds, conflicts_with_all = ["watch", "interval"])]
    who: Option<Duration>,

    /// Trace nothing until memory is nearly used up, then trace the processes that grow, and write a report of each
    /// process that the kernel kills into this folder
    #[arg(long, value_name = "DIR", requires = "before_oom", conflicts_with_all = ["all", "watch", "who", "doctor", "interval"])]
    record: Option<PathBuf>,

    /// What --record waits for: that the kernel kills a process because memory ran out
    #[arg(long, requires = "record")]
    before_oom: bool,

    /// With --record, trace from so much of the machine's memory, or of a cgroup's limit, on
    #[arg(long, value_name = "PERCENT%", default_value = "85%", value_parser = percent, requires = "record")]
    above: f64,

    /// With --record, keep this many reports, the newest
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = cli::count::<usize>, requires = "record")]
    keep: usize,

    /// Show this many processes
    #[arg(short = 'T', long, value_name = "N", default_value_t = 5, value_parser = cli::count::<usize>)]
    top: usize,

    /// Print one JSON object a line
    #[arg(short, long)]
    json: bool,

    /// Print into this file rather than on stdout
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Look again every so many seconds [default: once]
    #[arg(value_parser = cli::seconds)]
    interval: Option<Duration>,

    /// Stop after so many reports
    #[arg(value_parser = cli::count::<u64>)]
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
    let (mut poller, mut output) = cli::start("memtriage", format, args.output.as_deref())?;
    if args.doctor {
        return Ok(match doctor::check(poller, &mut output)? {
            true => ExitCode::SUCCESS,
            false => ExitCode::from(FINDINGS),
        });
    }
    if let Some(folder) = &args.record {
        let options = record::Options {
            folder,
            above: args.above,
            keep: args.keep,
        };
        return Ok(match record::run(&options, poller, &mut output)? {
            true => ExitCode::from(FINDINGS),
            false => ExitCode::SUCCESS,
        });
    }
    let interval = args.interval.or(args.watch.then_some(WATCH));
    let reports = match interval {
        Some(_) => args.count.unwrap_or(u64::MAX),
        None => 1,
    };
    let redraws = args.watch && args.output.is_none() && !args.json && io::stdout().is_terminal();
    let mut before = Look::now()?;
    let mut growth = Growth::default();
    growth.add(&before);
    let mut worst = Level::Healthy;
    for _ in 0..reports {
        let deadline = Instant::now() + interval.unwrap_or(BETWEEN);
        let mut wake = Wake::default();
        // SIGUSR1 asks for a report before its time.
        while !(wake.stop || wake.deadline || wake.report) {
            wake = poller.wait(Some(deadline))?;
        }
        if wake.stop {
            break;
        }
        let now = Look::now()?;
        growth.add(&now);
        if redraws {
            output.raw(|out| write!(out, "{CLEAR}"))?;
        }
        let (level, culprits) = report(&args, &mut output, &before, &now)?;
        worst = worst.max(level);
        if args.watch {
            print_growth(&growth, &mut output)?;
        }
        if interval.is_some() {
            output.header("")?;
        }
        output.flush()?;
        if let Some(seconds) = args.who {
            who::ask(culprits, seconds, poller, &mut output)?;
            break;
        }
        before = now;
    }
    Ok(match worst {
        Level::Healthy => ExitCode::SUCCESS,
        Level::Look | Level::Act => ExitCode::from(FINDINGS),
    })
}

/// A share such as `85%`, in percent.
fn percent(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').unwrap_or(text).parse::<f64>();
    let number = number.ok().filter(|number| (1.0..=100.0).contains(number));
    number.ok_or_else(|| "not a share from 1% to 100%".to_owned())
}

/// Prints one screen, and returns the level of its first finding, and what can be traced to explain the findings.
fn report(
    args: &Args,
    output: &mut Output,
    before: &Look,
    now: &Look,
) -> Result<(Level, Vec<(&'static str, Culprit)>)> {
    let around = Surroundings::of(now);
    let growth = processes::growth(&before.processes, &now.processes);
    let evidence = Evidence {
        before,
        now,
        around: &around,
        growth: &growth,
    };
    let findings = findings::judge(&evidence);
    output.row(&Host {
        time: Zoned::now(),
        release: kernel_release(),
        cpus: std::thread::available_parallelism().map_or(1, Into::into),
        memory_bytes: now.accounting.total,
        swap_bytes: now.memory.of("SwapTotal"),
        seconds: (now.at - before.at).as_secs_f64(),
    })?;
    output.header("")?;
    if screen::healthy(&findings) {
        output.header("nothing found; --all shows what was looked at")?;
    }
    for finding in &findings {
        if args.all || finding.level > Level::Healthy {
            output.row(finding)?;
        }
    }
    output.row(&Table::new(&before.accounting, &now.accounting, args.all))?;
    output.header(ProcessRow::HEADER)?;
    for usage in processes::largest(now.processes.clone(), args.top) {
        let grown = growth.get(&usage.pid).copied().unwrap_or_default();
        output.row(&ProcessRow::new(&usage, grown))?;
    }
    let level = findings.first().map_or(Level::Healthy, |first| first.level);
    Ok((level, findings::culprits(findings, &evidence)))
}

/// Prints what has grown since the looks that are remembered, if anything has.
fn print_growth(growth: &Growth, output: &mut Output) -> Result<()> {
    let rows = growth.rows();
    if !rows.is_empty() {
        output.header(Growing::HEADER)?;
    }
    rows.iter().try_for_each(|row| output.row(row))
}

fn kernel_release() -> String {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim_end().to_owned()
}
