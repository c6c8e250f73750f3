//! brkstack: calls of brk(2), by user stack and process.
//!
//! Hooks: the tracepoints of the system call, for kernel stacks those of all (`bpf/brkstack.bpf.c`). They are counted in the
//! kernel; only with --events each comes here.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use jiff::Zoned;
use libbpf_rs::Link;
use libbpf_rs::skel::{OpenSkel, Skel};
use memtools::cli::{self, CommonArgs};
use memtools::clock::{self, Clock};
use memtools::events::Events;
use memtools::filter::Filter;
use memtools::losses::Losses;
use memtools::output::{Hex, Output, Row};
use memtools::poll::Poller;
use memtools::stack_count::{Report, StackCountArgs, StackCountMaps, StackCounts, Weight};
use memtools::symbolize::Symbolizer;
use memtools::target::{Target, TargetArgs};
use memtools::unwind::Unwinder;
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
    target: TargetArgs,

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
    let mut target = Target::choose(&args.target)?;
    let mut skel = load(&args, target.filter())?;
    let symbolizer = target.symbolizer()?;
    let unwinder = args
        .user_stacks()
        .then(|| target.unwinder(args.stacks.unwind, memtools::unwind_parts!(skel)))
        .transpose()?;
    let links = attach::by_name(skel.object_mut(), args.programs())
        .context("no tracepoint of brk(2): this needs a kernel with CONFIG_FTRACE_SYSCALLS=y")?;
    eprintln!("brkstack: tracing brk(2)... Ctrl-C to end");
    target.release()?;

    target.watch_exit(&mut poller);
    if args.events {
        print_calls(&args, target.filter(), &skel, links, poller)?;
    } else {
        count_stacks(
            &args,
            target.filter(),
            &skel,
            links,
            poller,
            symbolizer,
            unwinder,
        )?;
    }
    target.finish()
}

/// The loop of --events.
fn print_calls(
    args: &Args,
    filter: &Filter,
    skel: &BrkstackSkel<'static>,
    links: Vec<Link>,
    poller: Poller<'_>,
) -> Result<()> {
    let events: Events<event> = Events::new(&skel.maps.events)?;
    let clock = Clock::new();
    let mut output = Output::new(args.common.format());
    output.header(Call::HEADER)?;
    output.flush()?;
    events.follow(poller, args.common.deadline(), links, |events| {
        for event in events {
            output.row(&Call::new(&event, &clock))?;
        }
        output.flush()
    })?;
    Losses::tell("brkstack", skel.object(), filter, &mut output)
}

/// The loop of everything else.
fn count_stacks(
    args: &Args,
    filter: &Filter,
    skel: &BrkstackSkel<'static>,
    links: Vec<Link>,
    poller: Poller<'_>,
    symbolizer: Symbolizer,
    unwinder: Option<Unwinder>,
) -> Result<()> {
    let maps = &skel.maps;
    let maps = StackCountMaps {
        counts: [&maps.counts, &maps.counts_a, &maps.counts_b],
        stacks: &maps.stacks,
        object: skel.object(),
    };
    let report = Report {
        layout: args.stacks.layout(args.common.json),
        weight: if args.bytes {
            Weight::Bytes
        } else {
            Weight::Events
        },
        args: &args.stacks,
    };
    StackCounts::new(&maps, filter, symbolizer, unwinder).run(
        "brkstack",
        poller,
        &args.common,
        &args.stacks,
        links,
        |counts, output| counts.report(output, &report),
    )
}

impl Args {
    /// Whether there are to be any.
    fn user_stacks(&self) -> bool {
        !self.events && (self.user_stacks || !self.kernel_stacks)
    }

    /// Whether it matters what a call has done.
    fn with_result(&self) -> bool {
        self.growth || self.bytes || self.events
    }

    /// What is needed to see calls, in the order in which it is to be attached: a call that is seen
    /// at its entry must be seen at its exit.
    fn programs(&self) -> &'static [&'static str] {
        match (self.kernel_stacks, self.with_result()) {
            (false, false) => &["brk_enter"],
            (false, true) => &["brk_exit", "brk_enter"],
            (true, false) => &["any_enter"],
            (true, true) => &["any_exit", "any_enter"],
        }
    }
}

fn load(args: &Args, filter: &Filter) -> Result<BrkstackSkel<'static>> {
    let mut open = attach::open::<BrkstackSkelBuilder>()?;
    let options = attach::options(&mut open.maps.rodata_data)?;
    filter.set(&mut options.filter);
    options.with_result = args.with_result().into();
    options.growth_only = (args.growth || args.bytes).into();
    options.brk_number = libc::SYS_brk as u32;
    options.each_call = args.events.into();
    options.with_user_stacks = args.user_stacks().into();
    options.with_kernel_stacks = args.kernel_stacks.into();
    memtools::set_unwind_options!(options, args.stacks.unwind);
    options.stack_depth = args.stacks.perf_max_stack_depth;
    open.maps
        .stacks
        .set_max_entries(args.stacks.stack_storage_size)
        .context("failed to size the table of stacks")?;
    attach::load_only(open.open_object_mut(), args.programs());
    filter.share_maps(&mut open.maps.filter_followed, &mut open.maps.losses)?;
    let skel = open.load().context("failed to load")?;
    filter.set_cgroup(&skel.maps.filter_cgroup)?;
    Ok(skel)
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
    fn calls_stand_below_their_columns() {
        let mut event = event {
            requested: 0x5581_4f0c_2000,
            old_end: 0x5581_4f0a_1000,
            new_end: 0x5581_4f0c_2000,
            pid: 4961,
            tid: 4962,
            ..event::default()
        };
        event.comm[..2].copy_from_slice(&b"sh".map(u8::cast_signed));
        let mut call = Call::new(&event, &Clock::new());
        call.time = "2026-11-20T04:05:06+01:00[+01:00]".parse().expect("a time");
        let mut line = Vec::new();
        call.text(&mut line).expect("memory");
        assert_eq!(
            format!("{}\n{}", Call::HEADER, String::from_utf8_lossy(&line)),
            "TIME     PID     COMM             OLD                NEW                    GROWTH\n\
             04:05:06 4961    sh               0x55814f0a1000     0x55814f0c2000         135168\n"
        );
        assert_eq!(
            serde_json::to_string(&call).expect("JSON"),
            r#"{"type":"call","time":"2026-11-20T04:05:06.000000+01:00","pid":4961,"tid":4962,"comm":"sh","requested":"0x55814f0c2000","old":"0x55814f0a1000","new":"0x55814f0c2000","growth_bytes":135168}"#
        );
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
        assert!(args.kernel_stacks && args.target.filter.pid == [1, 2]);
    }
}
