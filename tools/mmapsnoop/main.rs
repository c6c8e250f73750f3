//! mmapsnoop: every mmap(2), with its file and its result.
//!
//! Hooks: the tracepoints of the system calls' exits (`bpf/mmapsnoop.bpf.c`). An event comes at a call's
//! exit, and becomes one row ([`row`]).

mod bits;
mod row;

use std::collections::HashMap;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use libbpf_rs::skel::{OpenSkel, Skel};
use libbpf_rs::{Link, MapMut};
use memtools::cli::{self, CommonArgs};
use memtools::clock::Clock;
use memtools::events::Events;
use memtools::filter::{Filter, FilterArgs};
use memtools::folded::{Line, Part};
use memtools::losses::Losses;
use memtools::output::Output;
use memtools::poll::Poller;
use memtools::stack::Stacks;
use memtools::symbolize::Symbolizer;
use memtools::unwind::{UnwindArgs, Unwinder};
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
  mmapsnoop -j -d 10 | jq      ten seconds of all that is known
  mmapsnoop -d 10 -f | flamegraph.pl --color=mem --countname=bytes >mmap.svg"
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

    /// Also show the calls of 32-bit programs, which slows all system calls down a little
    #[arg(long)]
    compat: bool,

    /// Print each call's user stack below its row
    #[arg(long)]
    stack: bool,

    /// Print one line a stack for flame graphs, weighted by the bytes mapped, once at the end
    #[arg(short, long, conflicts_with_all = ["json", "stack", "failed", "munmap"])]
    folded: bool,

    /// Weight the stacks of --folded by calls
    #[arg(long, requires = "folded")]
    calls: bool,

    #[command(flatten)]
    unwind: UnwindArgs,

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
    let with_stacks = args.stack || args.folded;
    let symbolizer = with_stacks.then(Symbolizer::of_all_processes).transpose()?;
    let unwinder = with_stacks
        .then(|| {
            let named = args.filter.pid.as_slice();
            Unwinder::start(args.unwind, memtools::unwind_parts!(skel), named)
        })
        .transpose()?;
    let events = Events::decoding(&skel.maps.events, Record::decode)?;
    let links = attach(&skel, &args)?;

    let mut tracer = Tracer {
        stacks: Stacks::new(&skel.maps.stacks),
        symbolizer,
        clock: Clock::new(),
        columns: Columns {
            time: args.time,
            call: args.munmap,
            result: args.result || args.failed,
            flags: args.flags,
        },
        output: Output::new(args.common.format()),
        weights: HashMap::new(),
        args: &args,
    };
    if !args.folded {
        tracer.output.header(&tracer.columns.header())?;
        tracer.output.flush()?;
    }
    if let Some(symbolizer) = &mut tracer.symbolizer {
        symbolizer.look_around();
    }
    let mappings = tracer
        .symbolizer
        .as_ref()
        .map(Symbolizer::descriptor)
        .transpose()?;
    eprintln!("mmapsnoop: tracing mmap(2)... Ctrl-C to end");

    if let Some(mappings) = &mappings {
        poller.watch_mappings(mappings);
    }
    let deadline = args.common.deadline();
    events.follow(poller, deadline, links, |records| tracer.take(records))?;
    tracer.fold()?;
    if let Some(missed) = tracer.symbolizer.as_ref().and_then(Symbolizer::losses) {
        eprintln!("mmapsnoop: {missed}");
    }
    Losses::tell("mmapsnoop", skel.object(), &filter, &mut tracer.output)?;
    if let Some(unwinder) = unwinder {
        unwinder.tell("mmapsnoop", &mut tracer.output)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The state of the trace.
struct Tracer<'a> {
    stacks: Stacks<'a, MapMut<'static>>,
    /// Where stacks are asked for.
    symbolizer: Option<Symbolizer>,
    clock: Clock,
    columns: Columns,
    output: Output,
    /// By process, its name and stack: bytes or calls.
    weights: HashMap<(u32, String, u64), u64>,
    args: &'a Args,
}

impl Tracer<'_> {
    /// Prints what has come, or adds it up.
    fn take(&mut self, records: impl Iterator<Item = Record>) -> Result<()> {
        if let Some(symbolizer) = &mut self.symbolizer {
            symbolizer.refresh();
        }
        for record in records {
            if self.args.folded {
                self.add(&record);
                continue;
            }
            let stack = self.name(record.pid(), record.stack())?;
            self.output
                .row(&Row::new(record, stack, &self.clock, self.columns))?;
        }
        self.output.flush()
    }

    /// A call that failed mapped nothing.
    fn add(&mut self, record: &Record) {
        let Some(bytes) = record.mapped_bytes() else {
            return;
        };
        let weight = if self.args.calls { 1 } else { bytes };
        let key = (record.pid(), record.comm(), record.stack());
        *self.weights.entry(key).or_default() += weight;
    }

    /// The stack's frames by name, if stacks are asked for.
    fn name(&mut self, pid: u32, stack: u64) -> Result<Option<Part>> {
        let Some(symbolizer) = &mut self.symbolizer else {
            return Ok(None);
        };
        let stack = self.stacks.get(stack)?;
        Ok(Some(stack.map_or_else(Part::default, |stack| {
            symbolizer.part(pid, &stack)
        })))
    }

    /// Prints the stacks of --folded, the heaviest first.
    fn fold(&mut self) -> Result<()> {
        let mut weights: Vec<_> = self.weights.drain().collect();
        weights.sort_by(|(a, a_weight), (b, b_weight)| (b_weight, a).cmp(&(a_weight, b)));
        for ((pid, comm, stack), weight) in weights {
            let user = self.name(pid, stack)?;
            let line = Line {
                comm: &comm,
                user,
                weight,
                ..Line::default()
            };
            self.output.raw(|out| line.write(out))?;
        }
        self.output.flush()
    }
}

fn load(args: &Args, filter: &Filter) -> Result<MmapsnoopSkel<'static>> {
    let mut open = attach::open::<MmapsnoopSkelBuilder>()?;
    let options = attach::options(&mut open.maps.rodata_data)?;
    filter.set(&mut options.filter);
    options.failed_only = args.failed.into();
    options.full_path = args.path.into();
    options.with_munmap = args.munmap.into();
    options.with_stack = (args.stack || args.folded).into();
    memtools::set_unwind_options!(options, args.unwind);
    if !(args.stack || args.folded) {
        let stacks = &mut open.maps.stacks;
        stacks
            .set_max_entries(1)
            .context("failed to size the table of stacks")?;
    }
    open.progs.compat_exit.set_autoload(args.compat);
    open.progs.munmap_exit.set_autoload(args.munmap);
    open.progs.mremap_exit.set_autoload(args.munmap);
    let skel = open.load().context("failed to load")?;
    filter.set_cgroup(&skel.maps.filter_cgroup)?;
    Ok(skel)
}

fn attach(skel: &MmapsnoopSkel<'_>, args: &Args) -> Result<Vec<Link>> {
    let programs = &skel.progs;
    let mut wanted = vec![&programs.mmap_exit];
    if args.munmap {
        wanted.extend([&programs.munmap_exit, &programs.mremap_exit]);
    }
    if args.compat {
        wanted.push(&programs.compat_exit);
    }
    attach::all(&wanted, attach::SYSCALLS)
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
            &["mmapsnoop", "-f", "-j"],
            &["mmapsnoop", "--calls"],
        ] {
            let error = Args::try_parse_from(wrong).expect_err(&wrong.join(" "));
            assert_eq!(error.exit_code(), 2);
        }
        let args = Args::try_parse_from(["mmapsnoop", "-Txp", "1,2"]).expect("valid");
        assert!(args.time && args.failed && args.filter.pid == [1, 2]);
    }
}
