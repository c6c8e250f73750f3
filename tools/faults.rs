//! faults: page faults, by user stack and process.
//!
//! Hook: the kernel's page-fault counter, as a software perf event (`bpf/faults.bpf.c`).

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use jiff::Zoned;
use libbpf_rs::MapCore;
use libbpf_rs::skel::Skel;
use memtools::bpf::attach;
use memtools::bpf::kernel_support;
use memtools::bpf::software_event;
use memtools::export::exposition::MetricKind;
use memtools::export::format::{self, FileFormat};
use memtools::export::metrics::Family;
use memtools::export::profile::ValueType;
use memtools::host::page_size;
use memtools::parse::UsageError;
use memtools::print::clock;
use memtools::print::output::{Format, Output, Row};
use memtools::process::container::{self, CgroupInfo, ContainerArgs};
use memtools::process::filter::{Filter, TaskKind};
use memtools::run::cli::{self, CommonArgs};
use memtools::run::count_stacks::{ProcessSum, StackCountArgs, StackCounts, StackReport, Weight};
use memtools::run::target::{self, Target, TargetArgs};
use perf_event::events::Software;
use serde::Serialize;

use crate::bpf::Loaded;

memtools::skeleton!("faults", FaultsSkelBuilder, stacks: unwound, plain: []);

/// Count page faults by user stack and process.
#[derive(Debug, Parser)]
#[command(
    name = "faults",
    version,
    mut_arg("container", |container| container.requires("by_process")),
    mut_arg("export", |export| format::limited_to(export, &FileFormat::ALL)),
    after_help = "\
examples:
  faults                       count page faults until Ctrl-C, and print stacks
  faults -d 30 --export faults.svg
                               write them as a flame graph
  faults -p 1234 5             process 1234, every 5 seconds
  faults -M                    only faults that waited for I/O
  faults --by-process -d 10    page faults by process
  faults --by-process --container
                               with the container or systemd unit of each
                               process
  faults --kernel-mode -UK     kernel code that faults on user memory
  faults -c './prog -x'        from the start of the program"
)]
struct Args {
    #[command(flatten)]
    target: TargetArgs,

    /// Show user stacks: the default without -K
    #[arg(short = 'U', long)]
    user_stacks: bool,

    /// Show kernel stacks
    #[arg(short = 'K', long)]
    kernel_stacks: bool,

    /// Count only faults of user code
    #[arg(long)]
    user_mode: bool,

    /// Count only faults of the kernel on user memory
    ///
    /// An example is read(2), which fills a buffer.
    #[arg(long, conflicts_with = "user_mode")]
    kernel_mode: bool,

    /// Count only major faults
    ///
    /// Major faults wait for I/O.
    #[arg(short = 'M', long)]
    major: bool,

    /// Count only minor faults
    #[arg(short, long, conflicts_with = "major")]
    minor: bool,

    /// Count by process, without stacks
    ///
    /// Each process has one line, with or without --text and -P.
    #[arg(long, conflicts_with_all = ["folded", "annotations", "offsets", "addresses"])]
    by_process: bool,

    /// Count bytes instead of faults
    ///
    /// Each fault counts as a page.
    #[arg(long)]
    bytes: bool,

    #[command(flatten)]
    containers: ContainerArgs,

    #[command(flatten)]
    stacks: StackCountArgs,

    #[command(flatten)]
    common: CommonArgs,
}

static FAULTS: Family = Family {
    name: "memtools_page_faults_total",
    help: "Page faults of the selected kinds, by task.",
    labels: &["comm", "unit", "container"],
    kind: MetricKind::Counter,
};
static BYTES: Family = Family {
    name: "memtools_page_faults_bytes_total",
    help: "Bytes of the pages of page faults of the selected kinds, by task.",
    labels: &["comm", "unit", "container"],
    kind: MetricKind::Counter,
};

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    args.check()?;
    kernel_support::preflight()?;
    attach::capture_log(args.common.verbose);
    let exports = args
        .stacks
        .profile
        .prepare(&args.common.export, args.target.to_string())?;
    let metrics = args
        .common
        .export
        .metrics(&[&FAULTS, &BYTES], &args.target.to_string())?;
    let (mut poller, output) = args.common.start_as(args.format())?;
    let mut target = Target::resolve(&args.target, TaskKind::Programs)?;
    target::warn_if_interval_is_pid(args.stacks.interval(), &args.target.filter.pid);
    let skel = load(&args, target.filter())?;
    let symbolizer = target.symbolizer(&args.stacks.profile, &args.common.export)?;
    let unwinder = args
        .user_stacks()
        .then(|| target.unwinder(args.stacks.unwind, memtools::unwind_parts!(skel)))
        .transpose()?;
    let links = software_event::attach(&skel.progs.page_fault, args.event())?;
    memtools::message!("tracing page faults... Ctrl-C to end");
    target.release()?;

    target.watch_exit(&mut poller);
    let maps = memtools::stack_count_maps!(skel);
    let report = StackReport {
        format: args.format(),
        by_process: args.by_process,
        weight: if args.bytes {
            Weight::Bytes
        } else {
            Weight::Events
        },
        subject: args.subject(),
        values: (
            ValueType::count("faults", "faults"),
            Some(ValueType::bytes("space")),
        ),
        families: [&FAULTS, &BYTES],
        args: &args.stacks,
    };
    let filter = target.filter();
    let files = (exports, metrics);
    StackCounts::new(maps, filter, symbolizer, unwinder, files, &args.stacks).run(
        (poller, output),
        &args.common,
        &report,
        links,
        |counts, output| {
            if args.by_process {
                let container = args.containers.container;
                print_processes(output, counts, &report, container)
            } else {
                counts.report(output, &report)
            }
        },
    )?;
    target.finish()
}

impl Args {
    /// Refuses files that the mode does not write.
    fn check(&self) -> Result<(), UsageError> {
        if self.by_process {
            let export = &self.common.export;
            export.expect("with --by-process", &FileFormat::OF_SUMS)?;
        }
        Ok(())
    }

    /// Returns the software event to count: major faults, minor faults or all.
    fn event(&self) -> Software {
        if self.major {
            Software::PAGE_FAULTS_MAJ
        } else if self.minor {
            Software::PAGE_FAULTS_MIN
        } else {
            Software::PAGE_FAULTS
        }
    }

    fn subject(&self) -> &'static str {
        match (self.major, self.minor) {
            (true, _) => "major page faults",
            (_, true) => "minor page faults",
            _ => "page faults",
        }
    }

    /// Returns the output format. The table of --by-process has none of the formats of stacks.
    fn format(&self) -> Format {
        if self.by_process {
            self.common.format()
        } else {
            self.stacks
                .format(self.common.json, self.common.is_terminal())
        }
    }

    fn user_stacks(&self) -> bool {
        !self.by_process && (self.user_stacks || !self.kernel_stacks)
    }
}

fn load(args: &Args, filter: &Filter) -> Result<Loaded> {
    let stacks = args.stacks.stack_capacity().if_wanted(!args.by_process);
    let mut open = bpf::prepare(filter, stacks, args.stacks.unwind)?;
    let wanted = args.containers.wanted(args.common.wants_cgroups());
    let with_cgroups = container::prepare(wanted, &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.with_cgroups = with_cgroups;
    options.user_mode_only = args.user_mode.into();
    options.kernel_mode_only = args.kernel_mode.into();
    options.with_user_stacks = args.user_stacks().into();
    options.with_kernel_stacks = (args.kernel_stacks && !args.by_process).into();
    options.page_bytes = page_size::page_bytes()? as u32;
    open.load()
}

/// Prints the table of --by-process.
fn print_processes<M: MapCore>(
    output: &mut Output,
    counts: &mut StackCounts<'_, M>,
    report: &StackReport<'_>,
    container: bool,
) -> Result<()> {
    let time = clock::now();
    if report.args.timestamp {
        output.header(&format!("{:<8}", clock::time_of_day(&time)))?;
    }
    let column = match report.weight {
        Weight::Events => "FAULTS",
        Weight::Bytes => "BYTES",
    };
    let container_column = container::header(container);
    output.header(&format!(
        "{:<7} {:<16} {container_column}{column}",
        "PID", "COMM"
    ))?;
    for ProcessSum {
        pid,
        comm,
        cgroup_info,
        sum,
    } in counts.processes(report)
    {
        let (faults, bytes) = match report.weight {
            Weight::Events => (Some(sum), None),
            Weight::Bytes => (None, Some(sum)),
        };
        output.row(&ProcessFaults {
            time: &time,
            pid,
            comm,
            cgroup_info,
            container,
            faults,
            bytes,
        })?;
    }
    if report.args.interval().is_some() {
        output.header("")?;
    }
    output.flush()
}

/// Page faults of one process.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "process")]
struct ProcessFaults<'a> {
    /// Time of the report.
    #[serde(serialize_with = "clock::serialize")]
    time: &'a Zoned,
    pid: u32,
    comm: String,
    #[serde(flatten)]
    cgroup_info: CgroupInfo,
    /// Whether text has the column CONTAINER.
    #[serde(skip)]
    container: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    faults: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
}

impl Row for ProcessFaults<'_> {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let sum = self.faults.or(self.bytes).unwrap_or_default();
        let column = container::column(Some(&self.cgroup_info), self.container);
        writeln!(out, "{:<7} {:<16} {column}{sum}", self.pid, self.comm)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_usage_is_refused() {
        cli::assert_refuses::<Args>(&[
            "-M -m",
            "--by-process -f",
            "--by-process -s",
            "--container",
            "-p 1 -c true",
            "-f -j",
            "0",
        ]);
        let args = Args::try_parse_from(["faults", "-MUKaP", "1", "5"]).expect("valid");
        assert!(args.major && args.stacks.annotations && args.stacks.count == Some(5));
    }
}
