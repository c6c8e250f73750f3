//! shmsnoop: the system calls of System V shared memory, with their results.
//!
//! Hooks: the tracepoints of shmget, shmat, shmdt and shmctl (`bpf/shmsnoop.bpf.c`). An event comes
//! at a call's exit, and becomes one row ([`row`]).

mod row;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use libbpf_rs::Link;
use libbpf_rs::skel::{OpenSkel, Skel};
use memtools::cli::{self, CommonArgs};
use memtools::clock::Clock;
use memtools::events::Events;
use memtools::filter::{Filter, FilterArgs};
use memtools::losses::Losses;
use memtools::output::Output;
use memtools::poll::Poller;
use memtools::{attach, kernel};

use crate::bpf::types::event;
use crate::bpf::{ShmsnoopSkel, ShmsnoopSkelBuilder};
use crate::row::{Columns, Row};

memtools::skeleton!("shmsnoop", plain: [event, filter]);

/// Show the system calls of System V shared memory: shmget, shmat, shmdt, shmctl.
#[derive(Debug, Parser)]
#[command(
    name = "shmsnoop",
    version,
    max_term_width = 100,
    after_help = "\
examples:
  shmsnoop                     every call of every process
  shmsnoop -p 1234             those of process 1234
  shmsnoop -n postgres -T      of tasks named postgres, with the time since the first
  shmsnoop -e                  also the segment: its size, who made it, how often it is attached
  shmsnoop -L                  also how long each call took"
)]
struct Args {
    /// Add the time in seconds since the first call shown
    #[arg(short = 'T', long)]
    timestamp: bool,

    /// Trace only this thread, whatever --pid says, and show thread numbers
    #[arg(short, long, value_name = "TID", value_parser = clap::value_parser!(u32).range(1..))]
    tid: Option<u32>,

    /// Add the segment's attach count, size and creator
    #[arg(short, long)]
    extended: bool,

    /// Add how long each call took, in microseconds
    #[arg(short = 'L', long)]
    latency: bool,

    #[command(flatten)]
    filter: FilterArgs,

    #[command(flatten)]
    common: CommonArgs,
}

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    kernel::preflight()?;
    kernel::preflight_tracepoints()?;
    attach::capture_log(args.common.verbose);
    let poller = Poller::new()?;
    let filter = args.filter.resolve(args.tid)?;
    let columns = Columns {
        timestamp: args.timestamp,
        tid: args.tid.is_some(),
        segment: args.extended,
        latency: args.latency,
    };
    let (skel, links) = start(&filter, args.extended || args.common.json)?;
    let events: Events<event> = Events::new(&skel.maps.events)?;

    let clock = Clock::new();
    let mut output = Output::new(args.common.format());
    output.header(&columns.header())?;
    output.flush()?;
    eprintln!("shmsnoop: tracing shmget(2), shmat(2), shmdt(2), shmctl(2)... Ctrl-C to end");

    let mut first_ns = None;
    events.follow(poller, args.common.deadline(), links, |events| {
        for event in events {
            let first_ns = *first_ns.get_or_insert(event.time_ns);
            output.row(&Row::new(&event, first_ns, &clock, columns))?;
        }
        output.flush()
    })?;
    Losses::tell("shmsnoop", skel.object(), &filter, &mut output)?;
    Ok(ExitCode::SUCCESS)
}

/// Loads the programs, and attaches them.
fn start(filter: &Filter, with_segment: bool) -> Result<(ShmsnoopSkel<'static>, Vec<Link>)> {
    let mut open = attach::open::<ShmsnoopSkelBuilder>()?;
    let options = attach::options(&mut open.maps.rodata_data)?;
    filter.set(&mut options.filter);
    options.with_segment = with_segment.into();
    let find_vma = kernel::btf_has_name("bpf_find_vma");
    open.progs.shmdt_enter.set_autoload(find_vma);
    open.progs.shmdt_enter_by_tree.set_autoload(!find_vma);
    let skel = open.load().context("failed to load")?;
    filter.set_cgroup(&skel.maps.filter_cgroup)?;

    let programs = &skel.progs;
    let wanted = [
        &programs.thread_exit,
        &programs.shmget_exit,
        &programs.shmat_exit,
        &programs.shmdt_exit,
        &programs.shmctl_exit,
        &programs.shmget_enter,
        &programs.shmat_enter,
        if find_vma {
            &programs.shmdt_enter
        } else {
            &programs.shmdt_enter_by_tree
        },
        &programs.shmctl_enter,
    ];
    let remedy = "; this needs a kernel with CONFIG_FTRACE_SYSCALLS=y and CONFIG_SYSVIPC=y";
    let links = attach::all(&wanted, remedy)?;
    Ok((skel, links))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn short_flags_cluster_as_in_bcc() {
        let args = Args::try_parse_from(["shmsnoop", "-Tp", "181", "-d", "10"]).expect("valid");
        assert!(args.timestamp && args.filter.pid == [181] && !args.extended);
        for wrong in [&["shmsnoop", "-t", "0"][..], &["shmsnoop", "-p", ""]] {
            let error = Args::try_parse_from(wrong).expect_err(&wrong.join(" "));
            assert_eq!(error.exit_code(), 2);
        }
    }
}
