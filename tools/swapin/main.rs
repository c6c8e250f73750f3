//! swapin: swap-ins by process.
//!
//! Hooks (`bpf/swapin.bpf.c`), by fentry or kprobe: the kernel's function that reads pages from swap; with -s also
//! the function that handles a fault on a swapped page, with --out the function that writes pages ([`mod@attach`]).
//! The BPF programs count in maps, which are read at each report ([`report`]). Each row of a report is a process
//! ([`row`]).

mod args;
mod attach;
mod report;
mod row;

use std::process::ExitCode;

use anyhow::Result;
use libbpf_rs::skel::Skel;
use memtools::bpf::attach::{capture_log, detach};
use memtools::bpf::kernel_support;
use memtools::process::filter::TaskKind;
use memtools::run::losses::{self, Losses};
use memtools::run::schedule::Reports;
use memtools::run::target::{self, Target};
use memtools::run::{cli, protect};

use crate::args::Args;
use crate::attach::Attached;
use crate::report::Report;

memtools::skeleton!("swapin", SwapinSkelBuilder, stacks: none, plain: [task_key, total]);

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    kernel_support::preflight()?;
    capture_log(args.common.verbose);
    let mut metrics = args
        .common
        .export
        .metrics(&args.families(), &args.target.to_string())?;
    let (mut poller, mut output) = args.common.start()?;
    let mut target = Target::resolve(&args.target, TaskKind::All)?;
    target::warn_if_interval_is_pid(Some(args.interval), &args.target.filter.pid);
    let zswap = attach::zswap(&args)?;
    let (how, Attached { skel, links }) = attach::start(&args, zswap, target.filter())?;
    let mut report = Report::new(&args, &skel, zswap.is_some());
    protect::protect_from_oom();
    memtools::message!("tracing swap ins ({how})... Ctrl-C to end");
    target.release()?;

    target.watch_exit(&mut poller);
    let deadline = args.common.deadline();
    let reports = Reports::start(&mut poller, Some(args.interval), args.count, deadline)?;
    reports.each(&mut poller, || {
        report.print(&mut output, &mut metrics)?;
        losses::write_metrics(skel.object(), target.filter(), &mut metrics)
    })?;
    detach(links);
    report.print(&mut output, &mut metrics)?;
    report.print_latencies(&mut output)?;
    Losses::report(skel.object(), target.filter(), &mut output)?;
    losses::finish_metrics(skel.object(), target.filter(), metrics)?;
    output.finish()?;
    target.finish()
}
