//! shmsnoop: the system calls of System V shared memory, with their results.
//!
//! Hooks: the tracepoints of shmget, shmat, shmdt and shmctl, or the calls' functions (`bpf/shmsnoop.bpf.c`). An
//! event is sent at a call's exit, and becomes one row ([`row`]).

mod row;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use libbpf_rs::Link;
use libbpf_rs::skel::Skel;
use memtools::bpf::attach;
use memtools::bpf::kernel_support;
use memtools::bpf::ring::Events;
use memtools::export::format::{self, FileFormat};
use memtools::export::metrics;
use memtools::parse;
use memtools::print::clock::Clock;
use memtools::process::container::{self, CgroupResolver, ContainerArgs};
use memtools::process::filter::{Filter, TaskKind};
use memtools::run::cli::{self, CommonArgs};
use memtools::run::losses::{self, Losses};
use memtools::run::target::{Target, TargetArgs};

use crate::bpf::Loaded;
use crate::bpf::types::event;
use crate::row::{Columns, Row};

memtools::skeleton!("shmsnoop", ShmsnoopSkelBuilder, stacks: none, plain: [event]);

/// Trace System V shared memory calls: shmget, shmat, shmdt, shmctl.
#[derive(Debug, Parser)]
#[command(
    name = "shmsnoop",
    version,
    mut_arg("export", |export| format::limited_to(export, &FileFormat::OF_SUMS)),
    after_help = "\
examples:
  shmsnoop                     every call of every process
  shmsnoop -p 1234             process 1234
  shmsnoop -n postgres -T
                               tasks named postgres, with the time since the
                               first
  shmsnoop -e
                               also size, creator and attach count of the
                               segment
  shmsnoop --container         with the container or systemd unit of each
  shmsnoop -L                  with the duration of each call"
)]
struct Args {
    #[command(flatten)]
    target: TargetArgs,

    /// Add the seconds since the first call
    #[arg(short = 'T', long)]
    timestamp: bool,

    /// Trace only this thread, and show thread IDs
    ///
    /// This option takes precedence over --pid.
    #[arg(help_heading = "Target", short, long, value_name = "TID", value_parser = parse::pid)]
    tid: Option<u32>,

    /// Add the number of attaches, the size and the creator
    #[arg(short, long)]
    extended: bool,

    /// Add the duration of each call, in microseconds
    #[arg(short = 'L', long)]
    latency: bool,

    #[command(flatten)]
    containers: ContainerArgs,

    #[command(flatten)]
    common: CommonArgs,
}

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    kernel_support::preflight()?;
    kernel_support::preflight_tracepoints()?;
    attach::capture_log(args.common.verbose);
    let target_name = args.target.to_string();
    let mut metrics = args.common.export.metrics(&[&row::CALLS], &target_name)?;
    let (mut poller, mut output) = args.common.start()?;
    let mut target = Target::choose_thread(&args.target, args.tid, TaskKind::Programs)?;
    let columns = Columns {
        timestamp: args.timestamp,
        tid: args.tid.is_some(),
        container: args.containers.container,
        segment: args.extended,
        latency: args.latency,
    };
    let (skel, links) = start(target.filter(), &args)?;
    let events: Events<event> = Events::new(&skel.maps.events)?;

    let clock = Clock::new();
    memtools::message!("tracing shmget(2), shmat(2), shmdt(2), shmctl(2)... Ctrl-C to end");
    output.header(&columns.header())?;
    output.flush()?;
    target.release()?;
    target.watch_exit(&mut poller);

    if metrics.is_enabled() {
        poller.tick_every(metrics::CHECK_INTERVAL)?;
    }
    let mut first_ns = None;
    let with_cgroups = args.containers.wanted(args.common.wants_cgroups());
    let mut cgroup_resolver = CgroupResolver::if_wanted(with_cgroups, &skel.maps.cgroup_paths);
    events.follow(poller, args.common.deadline(), links, |events| {
        for event in events {
            let first_ns = *first_ns.get_or_insert(event.time_ns);
            let cgroup_info = cgroup_resolver
                .as_mut()
                .map(|cgroup_resolver| cgroup_resolver.of(event.cgroup));
            let row = Row::new(&event, cgroup_info, first_ns, &clock, columns);
            row.record_metrics(&mut metrics);
            output.row(&row)?;
        }
        output.flush()?;
        losses::write_metrics(skel.object(), target.filter(), &mut metrics)
    })?;
    Losses::report(skel.object(), target.filter(), &mut output)?;
    losses::finish_metrics(skel.object(), target.filter(), metrics)?;
    output.finish()?;
    target.finish()
}

/// Loads the programs, and attaches them.
fn start(filter: &Filter, args: &Args) -> Result<(Loaded, Vec<Link>)> {
    let mut open = bpf::prepare(filter)?;
    let wanted = args.containers.wanted(args.common.wants_cgroups());
    let with_cgroups = container::prepare(wanted, &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.with_segment = (args.extended || args.common.json).into();
    options.with_cgroups = with_cgroups;
    let find_vma = kernel_support::btf_has_name("bpf_find_vma");
    let tracepoints = [
        EXITS,
        &["shmget_enter", "shmat_enter", "shmctl_enter"],
        if find_vma {
            &["shmdt_enter"]
        } else {
            &["shmdt_enter_by_tree"]
        },
    ]
    .concat();
    let programs = attach::programs_on_system_calls(&tracepoints, FUNCTIONS);
    let mut skel = open.load_only(&[&programs[..], &["thread_exit"]].concat())?;

    let object = skel.object_mut();
    let mut links = attach::attach_by_name(object, &["thread_exit"])?;
    let calls = attach::attach_syscall_programs(object, &tracepoints, FUNCTIONS);
    links.extend(calls.context("is System V shared memory (CONFIG_SYSVIPC) missing?")?);
    Ok((skel, links))
}

/// Programs on the exit tracepoints.
const EXITS: &[&str] = &["shmget_exit", "shmat_exit", "shmdt_exit", "shmctl_exit"];

/// Programs on the system calls' functions, the ones on returns first.
const FUNCTIONS: &[&str] = &[
    "shmget_exit_function",
    "shmat_exit_function",
    "shmdt_exit_function",
    "shmctl_exit_function",
    "shmget_enter_function",
    "shmat_enter_function",
    "shmdt_enter_function",
    "shmctl_enter_function",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_flags_cluster_as_in_bcc() {
        let args = Args::try_parse_from(["shmsnoop", "-Tp", "181", "-d", "10"]).expect("valid");
        assert!(args.timestamp && args.target.filter.pid == [181] && !args.extended);
    }

    #[test]
    fn wrong_usage_is_refused() {
        cli::assert_refuses::<Args>(&["-t 0", "--pid="]);
    }
}
