//! mmapsnoop: every mmap(2), with its file and its result.
//!
//! Hooks: the tracepoints of the system calls (`bpf/mmapsnoop.bpf.c`). An event comes at a call's
//! exit, and becomes one row ([`row`]).

mod bits;
mod row;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use libbpf_rs::Link;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use memtools::cli::{self, CommonArgs};
use memtools::clock::Clock;
use memtools::events::Events;
use memtools::filter::{Filter, FilterArgs};
use memtools::losses::Losses;
use memtools::output::Output;
use memtools::poll::Poller;
use memtools::{attach, kernel};

use crate::bpf::{MmapsnoopSkel, MmapsnoopSkelBuilder};
use crate::row::{Columns, Record, Row};

memtools::skeleton!("mmapsnoop", plain: [event, filter]);

/// Show every mmap(2): who maps how much of what, and how.
#[derive(Debug, Parser)]
#[command(
    name = "mmapsnoop",
    version,
    max_term_width = 100,
    after_help = "\
examples:
  mmapsnoop                    every mapping of every process
  mmapsnoop -Tp 1234           those of process 1234, with the time
  mmapsnoop -n java --path     of tasks named java, with the whole path of each file
  mmapsnoop -x                 only calls that fail, with the error
  mmapsnoop --munmap -r        unmapping and moving too, with addresses and results
  mmapsnoop -j -d 10 | jq      ten seconds of all that is known"
)]
struct Args {
    /// Add the time of day
    #[arg(short = 'T', long)]
    time: bool,

    /// Show only calls that fail, with the error
    #[arg(short = 'x', long)]
    failed: bool,

    /// Add the result: the address that was mapped, or the error
    #[arg(short, long)]
    result: bool,

    /// Show the file's whole path, as its process would name it
    #[arg(long)]
    path: bool,

    /// Add all flags by name
    #[arg(long)]
    flags: bool,

    /// Also show munmap(2) and mremap(2), with the address that each is about
    #[arg(long)]
    munmap: bool,

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
    let mut poller = Poller::new()?;
    let filter = args.filter.resolve(None)?;
    let skel = load(&args, &filter)?;
    let events = Events::decoding(&skel.maps.events, Record::decode)?;
    let links = attach(&skel, args.munmap)?;

    let columns = Columns {
        time: args.time,
        call: args.munmap,
        result: args.result || args.failed,
        flags: args.flags,
    };
    let clock = Clock::new();
    let mut output = Output::new(args.common.format());
    output.header(&columns.header())?;
    output.flush()?;
    eprintln!("mmapsnoop: tracing mmap(2)... Ctrl-C to end");

    poller.watch_events(&events);
    let deadline = args.common.deadline();
    let print = |output: &mut Output| -> Result<()> {
        for record in events.drain()? {
            output.row(&Row::new(record, &clock, columns))?;
        }
        output.flush()
    };
    loop {
        let wake = poller.wait(deadline)?;
        print(&mut output)?;
        if wake.stop || wake.deadline {
            break;
        }
    }
    attach::detach(links);
    print(&mut output)?;
    Losses::tell("mmapsnoop", &skel.maps.losses, &mut output)?;
    Ok(ExitCode::SUCCESS)
}

fn load(args: &Args, filter: &Filter) -> Result<MmapsnoopSkel<'static>> {
    let mut open = MmapsnoopSkelBuilder::default()
        .open(attach::object_storage())
        .context("failed to open the BPF object")?;
    let options = open
        .maps
        .rodata_data
        .as_deref_mut()
        .context("the BPF object has no options")?;
    filter.set(&mut options.filter);
    options.failed_only = args.failed.into();
    options.full_path = args.path.into();
    for program in [
        &mut open.progs.munmap_enter,
        &mut open.progs.munmap_exit,
        &mut open.progs.mremap_enter,
        &mut open.progs.mremap_exit,
    ] {
        program.set_autoload(args.munmap);
    }
    let skel = open.load().context("failed to load")?;
    filter.set_cgroup(&skel.maps.filter_cgroup)?;
    Ok(skel)
}

/// Exits first: a call that is seen at its entry must be seen at its exit.
fn attach(skel: &MmapsnoopSkel<'_>, munmap: bool) -> Result<Vec<Link>> {
    let programs = &skel.progs;
    let mut wanted = vec![&programs.thread_exit, &programs.mmap_exit];
    if munmap {
        wanted.extend([&programs.munmap_exit, &programs.mremap_exit]);
        wanted.extend([&programs.munmap_enter, &programs.mremap_enter]);
    }
    wanted.push(&programs.mmap_enter);
    wanted
        .into_iter()
        .map(|program| {
            program.attach().with_context(|| {
                format!(
                    "failed to attach {}; this needs a kernel with CONFIG_FTRACE_SYSCALLS=y",
                    program.name().to_string_lossy()
                )
            })
        })
        .collect()
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
    fn wrong_usage_is_refused() {
        for wrong in [
            &["mmapsnoop", "-p", "0"][..],
            &["mmapsnoop", "-p", "1,x"],
            &["mmapsnoop", "-d", "0"],
            &["mmapsnoop", "5"],
        ] {
            let error = Args::try_parse_from(wrong).expect_err(&wrong.join(" "));
            assert_eq!(error.exit_code(), 2);
        }
        let args = Args::try_parse_from(["mmapsnoop", "-Txp", "1,2"]).expect("valid");
        assert!(args.time && args.failed && args.filter.pid == [1, 2]);
    }
}
