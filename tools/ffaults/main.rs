//! ffaults: page faults, by file.
//!
//! Hooks (`bpf/ffaults.bpf.c`): the return of handle_mm_fault, by fexit or by kprobes, or the kernel's page-fault
//! counter, with bpf_find_vma() ([`mod@attach`]). The BPF programs count in maps. At each report the counts are read,
//! and the files are named ([`report`]). Each row is a file ([`row`]).

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
use memtools::run::cli;
use memtools::run::losses::{self, Losses};
use memtools::run::schedule::Reports;
use memtools::run::target::{self, Target};

use crate::args::Args;
use crate::attach::Attached;
use crate::report::Report;

memtools::skeleton!("ffaults", FfaultsSkelBuilder, stacks: none, plain: [count, count_key, file_id, name_record]);

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
    let mut target = Target::resolve(&args.target, TaskKind::Programs)?;
    target::warn_if_interval_is_pid(args.interval, &args.target.filter.pid);
    let (
        how,
        Attached {
            skel,
            links,
            details,
        },
    ) = attach::start(&args, target.filter())?;
    memtools::message!("tracing page faults by {how}... Ctrl-C to end");
    target.release()?;

    target.watch_exit(&mut poller);
    let mut report = Report::new(&args, &skel, details);
    let deadline = args.common.deadline();
    let reports = Reports::start(&mut poller, args.interval, args.count, deadline)?;
    reports.each(&mut poller, || {
        report.print(&mut output, &mut metrics)?;
        losses::write_metrics(skel.object(), target.filter(), &mut metrics)
    })?;
    detach(links);
    report.print(&mut output, &mut metrics)?;
    Losses::report(skel.object(), target.filter(), &mut output)?;
    losses::finish_metrics(skel.object(), target.filter(), metrics)?;
    output.finish()?;
    target.finish()
}
