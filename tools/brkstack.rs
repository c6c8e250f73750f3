//! brkstack: calls of brk(2), by user stack and process.
//!
//! Hooks: the tracepoints of the system call (`bpf/brkstack.bpf.c`). They are counted in the
//! kernel; only with --events each comes here.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use jiff::Zoned;
use libbpf_rs::Link;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use memtools::cli::{self, CommonArgs};
use memtools::clock::{self, Clock};
use memtools::events::Events;
use memtools::filter::{Filter, FilterArgs};
use memtools::losses::Losses;
use memtools::output::{Hex, Output, Row};
use memtools::poll::Poller;
use memtools::stack_count::{Report, StackCountArgs, StackCounts, Weight};
use memtools::symbolize::Symbolizer;
use memtools::target::Target;
use memtools::{attach, kernel, text};
use serde::Serialize;

use crate::bpf::types::event;
use crate::bpf::{BrkstackSkel, BrkstackSkelBuilder};

memtools::skeleton!("brkstack", plain: [event, filter]);

/// Count calls of brk(2), by which heaps grow, by user stack and process.
#[derive(Debug, Parser)]
#[command(
    name = "brkstack",
    version,
    max_term_width = 100,
    after_help = "\
examples:
  brkstack                     count all calls until Ctrl-C, and print their stacks
  brkstack -d 10 | flamegraph.pl --color=mem --countname=calls >brk.svg
  brkstack --bytes -p 1234     the bytes by which the heap of process 1234 grows
  brkstack 1                   what happened, every second
  brkstack --events -n python  a line for each call of tasks named python
  brkstack --growth -c './prog -x'   only calls that grow the heap, from the program's start"
)]
struct Args {
    /// Run this command and trace it; its exit status becomes ours
    #[arg(short, long, value_name = "COMMAND", conflicts_with = "pid")]
    command: Option<String>,

    /// Count only calls that grow the heap, not those that shrink it or ask for its end
    #[arg(long)]
    growth: bool,

    /// Weigh each call by the bytes by which it grows the heap
    #[arg(long)]
    bytes: bool,

    /// Print a line for each call instead
    #[arg(long, conflicts_with_all = ["bytes", "folded", "text", "user_stacks", "kernel_stacks", "perpid", "annotations", "top", "interval"])]
    events: bool,

    /// Show user stacks; the default without -K
    #[arg(short = 'U', long)]
    user_stacks: bool,

    /// Show kernel stacks, instead of user stacks or, with -U, beside them
    #[arg(short = 'K', long)]
    kernel_stacks: bool,

    #[command(flatten)]
    filter: FilterArgs,

    #[command(flatten)]
    stacks: StackCountArgs,

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
    let mut target = Target::choose(&args.filter, args.command.as_deref())?;
    let skel = load(&args, target.filter())?;
    let symbolizer = target.symbolizer()?;
    let links = attach(&skel, args.with_result())?;
    eprintln!("brkstack: tracing brk(2)... Ctrl-C to end");
    target.release()?;

    if let Some(process) = target.process() {
        poller.watch_exit(process);
    }
    if args.events {
        print_calls(&args, &skel, links, poller)?;
    } else {
        count_stacks(&args, &skel, links, poller, symbolizer)?;
    }
    target.finish()
}

/// The loop of --events.
fn print_calls(
    args: &Args,
    skel: &BrkstackSkel<'static>,
    links: Vec<Link>,
    poller: Poller<'_>,
) -> Result<()> {
    let events: Events<event> = Events::new(&skel.maps.events)?;
    let clock = Clock::new();
    let mut output = Output::new(args.common.format());
    output.header(Call::HEADER)?;
    output.flush()?;
    let print = |output: &mut Output| -> Result<()> {
        for event in events.drain()? {
            output.row(&Call::new(&event, &clock))?;
        }
        output.flush()
    };
    let mut poller = poller;
    poller.watch_events(&events);
    let deadline = args.common.deadline();
    loop {
        let wake = poller.wait(deadline)?;
        print(&mut output)?;
        if wake.stop || wake.deadline || wake.exited {
            break;
        }
    }
    attach::detach(links);
    print(&mut output)?;
    Losses::tell("brkstack", &skel.maps.losses, &mut output)
}

/// The loop of everything else.
fn count_stacks(
    args: &Args,
    skel: &BrkstackSkel<'static>,
    links: Vec<Link>,
    poller: Poller<'_>,
    symbolizer: Symbolizer,
) -> Result<()> {
    let maps = &skel.maps;
    let mut counts = StackCounts::new(&maps.counts, &maps.stacks, &maps.losses, symbolizer);
    let report = Report {
        layout: args.stacks.layout(args.common.json),
        weight: if args.bytes {
            Weight::Bytes
        } else {
            Weight::Events
        },
        args: &args.stacks,
    };
    let mut output = Output::new(args.common.format());
    let mappings = counts.symbolizer().descriptor()?;
    let mut poller = poller;
    poller.watch_mappings(&mappings);
    if let Some(interval) = args.stacks.interval {
        poller.tick_every(interval)?;
    }
    counts.symbolizer().look_around();

    let deadline = args.common.deadline();
    let mut summaries_left = args.stacks.count;
    loop {
        let wake = poller.wait(deadline)?;
        if wake.mappings {
            counts.symbolizer().refresh();
        }
        if wake.stop || wake.deadline || wake.exited {
            break;
        }
        if wake.tick {
            summaries_left = summaries_left.map(|left| left - 1);
            if summaries_left == Some(0) {
                break;
            }
            counts.report(&mut output, &report)?;
        }
    }
    attach::detach(links);
    counts.report(&mut output, &report)?;
    counts.tell_losses("brkstack", &mut output)
}

impl Args {
    /// Whether it matters what a call has done.
    fn with_result(&self) -> bool {
        self.growth || self.bytes || self.events
    }
}

fn load(args: &Args, filter: &Filter) -> Result<BrkstackSkel<'static>> {
    let mut open = BrkstackSkelBuilder::default()
        .open(attach::object_storage())
        .context("failed to open the BPF object")?;
    let options = open
        .maps
        .rodata_data
        .as_deref_mut()
        .context("the BPF object has no options")?;
    filter.set(&mut options.filter);
    options.with_result = args.with_result().into();
    options.growth_only = (args.growth || args.bytes).into();
    options.each_call = args.events.into();
    options.with_user_stacks = (args.user_stacks || !args.kernel_stacks).into();
    options.with_kernel_stacks = args.kernel_stacks.into();
    options.stack_depth = args.stacks.perf_max_stack_depth;
    open.maps
        .stacks
        .set_max_entries(args.stacks.stack_storage_size)
        .context("failed to size the table of stacks")?;
    open.progs.brk_exit.set_autoload(args.with_result());
    let skel = open.load().context("failed to load")?;
    filter.set_cgroup(&skel.maps.filter_cgroup)?;
    Ok(skel)
}

/// The exit first: a call that is seen at its entry must be seen at its exit.
fn attach(skel: &BrkstackSkel<'_>, with_result: bool) -> Result<Vec<Link>> {
    let exit = with_result.then_some(&skel.progs.brk_exit);
    exit.into_iter()
        .chain([&skel.progs.brk_enter])
        .map(|program| {
            program.attach().context(
                "failed to attach to brk(2); this needs a kernel with CONFIG_FTRACE_SYSCALLS=y",
            )
        })
        .collect()
}

/// One call of brk(2).
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "call")]
struct Call {
    #[serde(serialize_with = "clock::serialize")]
    time: Zoned,
    pid: u32,
    tid: u32,
    comm: String,
    /// Where the heap was to end; 0 if the call only asked.
    requested: Hex,
    /// Where the heap ended before and after.
    old: Hex,
    new: Hex,
    /// Negative if it has shrunk.
    growth_bytes: i64,
}

impl Call {
    const HEADER: &'static str = concat!(
        "TIME     PID     COMM             ",
        "OLD                NEW                    GROWTH"
    );

    fn new(event: &event, clock: &Clock) -> Self {
        Self {
            time: clock.local(event.time_ns),
            pid: event.pid,
            tid: event.tid,
            comm: text::from_c(&event.comm),
            requested: Hex(event.requested),
            old: Hex(event.old_end),
            new: Hex(event.new_end),
            growth_bytes: event.new_end.wrapping_sub(event.old_end).cast_signed(),
        }
    }
}

impl Row for Call {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "{:<8} {:<7} {:<16} {:<18} {:<18} {:>10}",
            clock::time_of_day(&self.time),
            self.pid,
            self.comm,
            self.old,
            self.new,
            self.growth_bytes
        )
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
            &["brkstack", "--events", "--bytes"][..],
            &["brkstack", "--events", "1"],
            &["brkstack", "-p", "1", "-c", "true"],
            &["brkstack", "-f", "-j"],
            &["brkstack", "-f", "-T"],
            &["brkstack", "0"],
        ] {
            let error = Args::try_parse_from(wrong).expect_err(&wrong.join(" "));
            assert_eq!(error.exit_code(), 2);
        }
        let args = Args::try_parse_from(["brkstack", "-UKaPp", "1,2", "0.5"]).expect("valid");
        assert!(args.kernel_stacks && args.filter.pid == [1, 2]);
    }
}
