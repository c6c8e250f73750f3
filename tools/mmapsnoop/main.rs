//! mmapsnoop: every mmap(2), with its file and its result.
//!
//! Hooks: the tracepoints of the system calls' exits (`bpf/mmapsnoop.bpf.c`). An event comes at a call's
//! exit, and becomes one row ([`row`]).

mod bits;
mod row;

use std::collections::HashMap;
use std::process::ExitCode;

use anyhow::Result;
use clap::{ArgGroup, Parser};
use libbpf_rs::skel::Skel;
use libbpf_rs::{Link, MapMut};
use memtools::bpf::attach;
use memtools::bpf::kernel_support;
use memtools::bpf::ring::Events;
use memtools::export::files::{ExportArgs, Exports, Subject};
use memtools::export::folded::Folded;
use memtools::export::profile::{Sample, Value};
use memtools::print::clock::Clock;
use memtools::print::output::{Format, Output};
use memtools::process::container::{self, ContainerArgs, Homes};
use memtools::process::filter::{Filter, Tasks};
use memtools::run::cli::{self, CommonArgs};
use memtools::run::losses::Losses;
use memtools::run::skeleton::StackRoom;
use memtools::run::target::{Target, TargetArgs};
use memtools::stacks::named::{NamedStack, StackIds};
use memtools::stacks::symbolize::Symbolizer;
use memtools::stacks::table::{FIRST_OF_EVENTS, MAX_OF_EVENTS, Stacks};
use memtools::stacks::unwind::{UnwindArgs, Unwinder};

use crate::bpf::Loaded;
use crate::row::{Columns, Record, Row};

memtools::skeleton!("mmapsnoop", MmapsnoopSkelBuilder, stacks: unwound, plain: [event]);

/// Show every mmap(2): who maps how much of what, and how.
#[derive(Debug, Parser)]
#[command(
    name = "mmapsnoop",
    version,
    max_term_width = 100,
    group(ArgGroup::new("weighted").args(["folded", "flame", "pprof"]).multiple(true)),
    after_help = "\
examples:
  mmapsnoop                    every mapping of every process
  mmapsnoop -Tp 1234           those of process 1234, with the time
  mmapsnoop -n java --path     of tasks named java, with the whole path of each file
  mmapsnoop --container        with the container or systemd unit of each
  mmapsnoop -x                 only calls that fail, with the error
  mmapsnoop --munmap -r        unmapping and moving too, with addresses and results
  mmapsnoop -j -d 10 | jq      ten seconds of all that is known
  mmapsnoop -d 10 --flame mmap.svg >/dev/null   draw what was mapped, by stack"
)]
struct Args {
    /// Add the time of day
    #[arg(short = 'T', long)]
    time: bool,

    /// Show only calls that fail, with the error
    #[arg(short = 'x', long, conflicts_with_all = ["flame", "pprof"])]
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
    #[arg(short, long, conflicts_with_all = ["json", "stack", "failed", "munmap", "perfetto"])]
    folded: bool,

    /// Weight the stacks of --folded and --flame by calls
    #[arg(long, requires = "weighted")]
    calls: bool,

    #[command(flatten)]
    unwind: UnwindArgs,

    #[command(flatten)]
    export: ExportArgs,

    #[command(flatten)]
    containers: ContainerArgs,

    #[command(flatten)]
    target: TargetArgs,

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
    let exports = args.export.prepare("mmapsnoop", args.target.to_string())?;
    let (mut poller, output) = args.common.start_as("mmapsnoop", args.format())?;
    let mut target = Target::choose(&args.target, Tasks::Programs)?;
    let mut skel = load(&args, target.filter())?;
    let symbolizer = args
        .with_stacks()
        .then(|| {
            let symbolizer = target.symbolizer()?;
            symbolizer.with_source(args.export.source, args.export.any())
        })
        .transpose()?;
    let unwinder = args
        .with_stacks()
        .then(|| target.unwinder(args.unwind, memtools::unwind_parts!(skel)))
        .transpose()?;
    let links = attach(&mut skel, &args)?;
    let events = Events::decoding(&skel.maps.events, Record::decode)?;

    let mut tracer = Tracer {
        stacks: Stacks::new(memtools::stack_maps!(skel), MAX_OF_EVENTS)?,
        symbolizer,
        homes: Homes::if_wanted(
            args.containers.wanted(args.common.json),
            &skel.maps.cgroup_paths,
        ),
        clock: Clock::new(),
        columns: Columns {
            time: args.time,
            container: args.containers.container,
            call: args.munmap,
            result: args.result || args.failed,
            flags: args.flags,
        },
        output,
        weights: HashMap::new(),
        exports,
        args: &args,
    };
    if let Some(symbolizer) = &mut tracer.symbolizer {
        symbolizer.name_python(unwinder.as_ref().and_then(Unwinder::names));
        symbolizer.look_around();
    }
    let mappings = tracer
        .symbolizer
        .as_ref()
        .map(Symbolizer::descriptor)
        .transpose()?;
    tracer.exports.begin();
    eprintln!("mmapsnoop: tracing mmap(2)... Ctrl-C to end");
    tracer.output.header(&tracer.columns.header())?;
    tracer.output.flush()?;
    target.release()?;
    target.watch_exit(&mut poller);

    if let Some(mappings) = &mappings {
        poller.watch_mappings(mappings);
    }
    let deadline = args.common.deadline();
    events.follow(poller, deadline, links, |records| tracer.take(records))?;
    tracer.fold()?;
    if let Some(symbolizer) = &tracer.symbolizer {
        symbolizer.tell_losses("mmapsnoop");
    }
    Losses::tell(
        "mmapsnoop",
        skel.object(),
        target.filter(),
        &mut tracer.output,
    )?;
    if let Some(unwinder) = unwinder {
        unwinder.tell("mmapsnoop", &mut tracer.output)?;
    }
    tracer.exports.finish()?;
    tracer.output.finish()?;
    target.finish()
}

/// What calls from one stack have mapped.
#[derive(Debug, Default, Clone, Copy)]
struct Mapped {
    calls: u64,
    bytes: u64,
}

/// The state of the trace.
struct Tracer<'a> {
    stacks: Stacks<'a, MapMut<'static>>,
    /// Where stacks are asked for.
    symbolizer: Option<Symbolizer>,
    /// Where they are asked for.
    homes: Option<Homes<'a>>,
    clock: Clock,
    columns: Columns,
    output: Output,
    /// By process, its name and stack.
    weights: HashMap<(u32, String, u64), Mapped>,
    exports: Exports,
    args: &'a Args,
}

impl Tracer<'_> {
    /// Prints what has come, or adds it up.
    fn take(&mut self, records: impl Iterator<Item = Record>) -> Result<()> {
        if let Some(symbolizer) = &mut self.symbolizer {
            symbolizer.refresh();
        }
        for record in records {
            if self.args.folded || self.exports.any() {
                self.add(&record)?;
            }
            if self.args.folded {
                continue;
            }
            let stack = if self.args.stack {
                self.named(record.pid(), &record.comm(), record.stack())?
            } else {
                None
            };
            let home = self.homes.as_mut().map(|homes| homes.of(record.cgroup()));
            self.output
                .row(&Row::new(record, home, stack, &self.clock, self.columns))?;
        }
        self.stacks.renew_for_events()?;
        self.output.flush()
    }

    /// A call that failed mapped nothing. The stack is named at the end, when the table may be another.
    fn add(&mut self, record: &Record) -> Result<()> {
        let Some(bytes) = record.mapped_bytes() else {
            return Ok(());
        };
        self.stacks.get(record.stack())?;
        let key = (record.pid(), record.comm(), record.stack());
        let mapped = self.weights.entry(key).or_default();
        mapped.calls += 1;
        mapped.bytes += bytes;
        Ok(())
    }

    /// The stack with its names, if stacks are asked for.
    fn named(&mut self, pid: u32, comm: &str, stack: u64) -> Result<Option<NamedStack>> {
        let ids = StackIds {
            pid,
            comm,
            user: Some(stack),
            kernel: None,
        };
        NamedStack::read_if_asked(&ids, &mut self.stacks, self.symbolizer.as_mut())
    }

    /// Prints the stacks of --folded, the heaviest first, and writes them into the files that are
    /// asked for.
    fn fold(&mut self) -> Result<()> {
        let calls = self.args.calls;
        let weight = |mapped: Mapped| if calls { mapped.calls } else { mapped.bytes };
        let mut weights: Vec<_> = self.weights.drain().collect();
        weights.sort_by(|(a, a_mapped), (b, b_mapped)| {
            (weight(*b_mapped), a).cmp(&(weight(*a_mapped), b))
        });
        let mut samples = Vec::new();
        for ((pid, comm, stack), mapped) in weights {
            let Some(stack) = self.named(pid, &comm, stack)? else {
                continue;
            };
            if self.args.folded {
                let line = Folded::new(&stack);
                self.output.raw(|out| line.write(weight(mapped), out))?;
            }
            let values = vec![mapped.calls, mapped.bytes];
            samples.push(Sample { stack, values });
        }
        self.output.flush()?;
        if self.exports.any() {
            let subject = Subject {
                name: "memory mapped by mmap(2)".to_owned(),
                values: vec![
                    Value::count("mmap_calls", "calls"),
                    Value::bytes("mmap_space"),
                ],
                main: usize::from(!calls),
                by_thread: true,
                remarks: Vec::new(),
            };
            self.exports.write(subject, samples);
        }
        Ok(())
    }
}

impl Args {
    /// Whether anything is made of stacks.
    fn with_stacks(&self) -> bool {
        self.stack || self.folded || self.export.any()
    }

    fn format(&self) -> Format {
        if self.folded {
            Format::Folded
        } else {
            self.common.format()
        }
    }
}

fn load(args: &Args, filter: &Filter) -> Result<Loaded> {
    let stacks = StackRoom::of(FIRST_OF_EVENTS).if_wanted(args.with_stacks());
    let mut open = bpf::prepare(filter, stacks, args.unwind)?;
    let wanted = args.containers.wanted(args.common.json);
    let with_cgroups = container::prepare(wanted, &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.failed_only = args.failed.into();
    options.full_path = args.path.into();
    options.with_munmap = args.munmap.into();
    options.with_stack = args.with_stacks().into();
    options.with_cgroups = with_cgroups;
    let mut programs =
        attach::programs_on_system_calls(args.programs(), args.programs_on_functions());
    if args.compat {
        programs.push(COMPAT);
    }
    open.load_only(&programs)
}

fn attach(skel: &mut Loaded, args: &Args) -> Result<Vec<Link>> {
    let object = skel.object_mut();
    let mut links = attach::system_calls(object, args.programs(), args.programs_on_functions())?;
    if args.compat {
        links.extend(attach::by_name(object, &[COMPAT])?);
    }
    Ok(links)
}

/// The program for 32-bit calls.
const COMPAT: &str = "compat_exit";

impl Args {
    /// The programs on tracepoints.
    fn programs(&self) -> &'static [&'static str] {
        let all = &["mmap_exit", "munmap_exit", "mremap_exit"];
        if self.munmap { all } else { &all[..1] }
    }

    /// The programs to load where they are on the system calls' functions.
    fn programs_on_functions(&self) -> &'static [&'static str] {
        let all = &[
            "mmap_exit_function",
            "munmap_exit_function",
            "mremap_exit_function",
        ];
        if self.munmap { all } else { &all[..1] }
    }
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
            &["mmapsnoop", "-x", "--flame", "f.svg"],
        ] {
            let error = Args::try_parse_from(wrong).expect_err(&wrong.join(" "));
            assert_eq!(error.exit_code(), 2);
        }
        let args = Args::try_parse_from(["mmapsnoop", "-Txp", "1,2"]).expect("valid");
        assert!(args.time && args.failed && args.target.filter.pid == [1, 2]);
    }
}
