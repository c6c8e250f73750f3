//! brkstack: calls of brk(2), by user stack and process.
//!
//! Hooks: the tracepoints of the system call, for kernel stacks those of all, or its function
//! (`bpf/brkstack.bpf.c`). Calls are counted in the kernel; only with --events each comes here.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;
use jiff::Zoned;
use libbpf_rs::skel::Skel;
use libbpf_rs::{Link, MapMut};
use memtools::bpf::attach;
use memtools::bpf::kernel_support;
use memtools::bpf::map_create;
use memtools::bpf::ring::Events;
use memtools::export::profile::Value;
use memtools::export::text::{below_row, part_below_row};
use memtools::print::clock::{self, Clock};
use memtools::print::output::{Format, Hex, Output, Row};
use memtools::print::text;
use memtools::print::timeline::{Event, Moment};
use memtools::process::container::{self, ContainerArgs, Home, Homes};
use memtools::process::filter::{Filter, Tasks};
use memtools::run::cli::{self, CommonArgs};
use memtools::run::count_stacks::{Report, StackCountArgs, StackCounts, Weight};
use memtools::run::losses::Losses;
use memtools::run::poll::Poller;
use memtools::run::target::{self, Target, TargetArgs};
use memtools::stacks::named::{NamedStack, StackIds};
use memtools::stacks::symbolize::Symbolizer;
use memtools::stacks::table::{MAX_OF_EVENTS, Stacks};
use memtools::stacks::unwind::Unwinder;
use serde::Serialize;

use crate::bpf::Loaded;
use crate::bpf::types::event;

memtools::skeleton!("brkstack", BrkstackSkelBuilder, stacks: unwound, plain: [event]);

/// Count calls of brk(2), by which heaps grow, by user stack and process.
#[derive(Debug, Parser)]
#[command(
    name = "brkstack",
    version,
    max_term_width = 100,
    mut_arg("container", |container| container.requires("events")),
    after_help = "\
examples:
  brkstack                     count all calls until Ctrl-C, and print their stacks
  brkstack -d 10 --flame brk.svg      draw them as a flame graph
  brkstack --bytes -p 1234     the bytes by which the heap of process 1234 grows
  brkstack 1                   what happened, every second
  brkstack --events -n python  a line for each call of tasks named python
  brkstack --events -U -p 1234 with its user stack below each line
  brkstack --events --container        with the container or systemd unit of each task
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
    #[arg(long, conflicts_with_all = ["bytes", "folded", "text", "perpid", "annotations", "top", "interval", "interval_option", "offsets", "addresses", "flame", "pprof"])]
    events: bool,

    /// Show user stacks; the default without -K or --events
    #[arg(short = 'U', long)]
    user_stacks: bool,

    /// Show kernel stacks, instead of user stacks or, with -U, beside them
    #[arg(short = 'K', long)]
    kernel_stacks: bool,

    #[command(flatten)]
    containers: ContainerArgs,

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
    kernel_support::preflight()?;
    kernel_support::preflight_tracepoints()?;
    attach::capture_log(args.common.verbose);
    let exports = args
        .stacks
        .export
        .prepare("brkstack", args.target.to_string())?;
    let (mut poller, output) = args.common.start_as("brkstack", args.format())?;
    let mut target = Target::choose(&args.target, Tasks::Programs)?;
    target::doubt_interval("brkstack", args.stacks.interval(), &args.target.filter.pid);
    let mut skel = load(&args, target.filter())?;
    let export = &args.stacks.export;
    let symbolizer = target
        .symbolizer()?
        .with_source(export.source, export.any())?;
    let unwinder = args
        .user_stacks()
        .then(|| target.unwinder(args.stacks.unwind, memtools::unwind_parts!(skel)))
        .transpose()?;
    let links = attach::system_calls(
        skel.object_mut(),
        args.programs(),
        args.programs_on_functions(),
    )?;
    eprintln!("brkstack: tracing brk(2)... Ctrl-C to end");
    target.release()?;

    target.watch_exit(&mut poller);
    if args.events {
        let names = Names {
            symbolizer: args.event_stacks().any().then_some(symbolizer),
            unwinder,
        };
        print_calls(
            &args,
            target.filter(),
            &skel,
            names,
            links,
            (poller, output),
        )?;
    } else {
        let maps = memtools::stack_count_maps!(skel);
        let filter = target.filter();
        let counts = StackCounts::new(maps, filter, symbolizer, unwinder, exports, &args.stacks)?;
        count_stacks(&args, counts, links, (poller, output))?;
    }
    target.finish()
}

/// What names and unwinds the stacks of --events, if any are asked for.
struct Names {
    symbolizer: Option<Symbolizer>,
    unwinder: Option<Unwinder>,
}

/// The loop of --events.
fn print_calls(
    args: &Args,
    filter: &Filter,
    skel: &Loaded,
    names: Names,
    links: Vec<Link>,
    (mut poller, output): (Poller<'_>, Output),
) -> Result<()> {
    let events: Events<event> = Events::new(&skel.maps.events)?;
    let Names {
        symbolizer,
        unwinder,
    } = names;
    let mut calls = Calls {
        stacks: Stacks::new(memtools::stack_maps!(skel), MAX_OF_EVENTS)?,
        homes: Homes::if_wanted(
            args.containers.wanted(args.common.json),
            &skel.maps.cgroup_paths,
        ),
        container: args.containers.container,
        symbolizer,
        shown: args.event_stacks(),
        clock: Clock::new(),
        output,
    };
    if let Some(symbolizer) = &mut calls.symbolizer {
        symbolizer.name_python(unwinder.as_ref().and_then(Unwinder::names));
        symbolizer.look_around();
    }
    let symbolizer = calls.symbolizer.as_ref();
    let mappings = symbolizer.map(Symbolizer::descriptor).transpose()?;
    if let Some(mappings) = &mappings {
        poller.watch_mappings(mappings);
    }
    calls
        .output
        .header(&Call::header(args.containers.container))?;
    calls.output.flush()?;
    let deadline = args.common.deadline();
    events.follow(poller, deadline, links, |events| calls.print(events))?;
    if let Some(symbolizer) = &calls.symbolizer {
        symbolizer.tell_losses("brkstack");
    }
    Losses::tell("brkstack", skel.object(), filter, &mut calls.output)?;
    if let Some(unwinder) = unwinder {
        unwinder.tell("brkstack", &mut calls.output)?;
    }
    calls.output.finish()
}

/// Which parts of its stack each line has below it.
#[derive(Debug, Default, Clone, Copy)]
struct Shown {
    user: bool,
    kernel: bool,
}

impl Shown {
    fn any(self) -> bool {
        self.user || self.kernel
    }
}

/// Turns events into lines.
struct Calls<'a> {
    stacks: Stacks<'a, MapMut<'static>>,
    homes: Option<Homes<'a>>,
    /// Whether there is the column CONTAINER.
    container: bool,
    symbolizer: Option<Symbolizer>,
    shown: Shown,
    clock: Clock,
    output: Output,
}

impl Calls<'_> {
    fn print(&mut self, events: impl Iterator<Item = event>) -> Result<()> {
        if let Some(symbolizer) = &mut self.symbolizer {
            symbolizer.refresh();
        }
        for event in events {
            let mut call = Call::new(&event, &self.clock);
            call.stack = self.named(&event, &call.comm)?;
            call.shown = self.shown;
            call.home = self.homes.as_mut().map(|homes| homes.of(event.cgroup));
            call.container = self.container;
            self.output.row(&call)?;
        }
        self.stacks.renew_for_events()?;
        self.output.flush()
    }

    /// The parts of the stack that are asked for, with their names.
    fn named(&mut self, event: &event, comm: &str) -> Result<Option<NamedStack>> {
        let ids = StackIds {
            pid: event.pid,
            comm,
            user: self.shown.user.then_some(event.user_stack),
            kernel: self.shown.kernel.then_some(event.kernel_stack),
        };
        NamedStack::read_if_asked(&ids, &mut self.stacks, self.symbolizer.as_mut())
    }
}

/// The loop of everything else.
fn count_stacks(
    args: &Args,
    counts: StackCounts<'_, MapMut<'static>>,
    links: Vec<Link>,
    (poller, output): (Poller<'_>, Output),
) -> Result<()> {
    let report = Report {
        format: args.format(),
        by_process: false,
        weight: if args.bytes {
            Weight::Bytes
        } else {
            Weight::Events
        },
        subject: if args.growth_only() {
            "calls of brk(2) that grow the heap"
        } else {
            "calls of brk(2)"
        },
        values: (
            Value::count("brk_calls", "calls"),
            args.growth_only().then_some(Value::bytes("growth")),
        ),
        args: &args.stacks,
    };
    counts.run(
        "brkstack",
        (poller, output),
        &args.common,
        &report,
        links,
        |counts, output| counts.report(output, &report),
    )
}

impl Args {
    /// How it is printed.
    fn format(&self) -> Format {
        if self.events {
            self.common.format()
        } else {
            self.stacks
                .format(self.common.json, self.common.is_terminal())
        }
    }

    /// Whether there are to be any.
    fn user_stacks(&self) -> bool {
        self.user_stacks || !self.kernel_stacks && !self.events
    }

    /// What is below each line of --events.
    fn event_stacks(&self) -> Shown {
        Shown {
            user: self.user_stacks,
            kernel: self.kernel_stacks,
        }
    }

    /// Whether only calls that grow the heap are counted, each with the bytes.
    fn growth_only(&self) -> bool {
        self.growth || self.bytes
    }

    /// Whether it matters what a call has done.
    fn with_result(&self) -> bool {
        self.growth_only() || self.events
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

    /// The programs to load where they are on the system call's function.
    fn programs_on_functions(&self) -> &'static [&'static str] {
        if self.with_result() {
            &["brk_exit_function", "brk_enter_function"]
        } else {
            &["brk_enter_function"]
        }
    }
}

fn load(args: &Args, filter: &Filter) -> Result<Loaded> {
    let with_stacks = !args.events || args.event_stacks().any();
    let stacks = args.stacks.room().if_wanted(with_stacks);
    let mut open = bpf::prepare(filter, stacks, args.stacks.unwind)?;
    let wanted = args.containers.wanted(args.common.json);
    let with_cgroups = container::prepare(wanted, &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.with_cgroups = with_cgroups;
    options.with_result = args.with_result().into();
    options.growth_only = args.growth_only().into();
    options.brk_number = libc::SYS_brk as u32;
    options.each_call = args.events.into();
    options.with_user_stacks = args.user_stacks().into();
    options.with_kernel_stacks = args.kernel_stacks.into();
    if !args.with_result() {
        map_create::size(&mut open.maps.calls, 1)?;
    }
    if !args.events {
        // A ring buffer has a page at least.
        let page = kernel_support::page_bytes()? as u32;
        map_create::size(&mut open.maps.events, page)?;
    }
    let programs = attach::programs_on_system_calls(args.programs(), args.programs_on_functions());
    open.load_only(&programs)
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
    #[serde(flatten)]
    home: Option<Home>,
    /// Where the heap was to end; 0 if the call only asked.
    requested: Hex,
    /// Where the heap ended before and after.
    old: Hex,
    new: Hex,
    /// Negative if it has shrunk.
    growth_bytes: i64,
    /// The stack of the call, with -U or -K.
    #[serde(flatten)]
    stack: Option<NamedStack>,
    #[serde(skip)]
    shown: Shown,
    /// Whether text has the column CONTAINER.
    #[serde(skip)]
    container: bool,
}

impl Call {
    /// The names of the columns, with CONTAINER if that is asked for.
    fn header(container: bool) -> String {
        format!(
            "TIME     PID     COMM             {}OLD                NEW                    GROWTH",
            container::header(container)
        )
    }

    fn new(event: &event, clock: &Clock) -> Self {
        Self {
            time: clock.local(event.time_ns),
            pid: event.pid,
            tid: event.tid,
            comm: text::from_c(&event.comm),
            home: None,
            container: false,
            requested: Hex(event.requested),
            old: Hex(event.old_end),
            new: Hex(event.new_end),
            growth_bytes: event.new_end.wrapping_sub(event.old_end).cast_signed(),
            stack: None,
            shown: Shown::default(),
        }
    }
}

impl Row for Call {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "{:<8} {:<7} {:<16} {}{:<18} {:<18} {:>10}",
            clock::time_of_day(&self.time),
            self.pid,
            self.comm,
            container::column(self.home.as_ref().filter(|_| self.container)),
            self.old,
            self.new,
            self.growth_bytes
        )?;
        match &self.stack {
            Some(stack) if self.shown.user && self.shown.kernel => below_row(stack, out),
            Some(stack) => part_below_row(stack.user.as_ref().or(stack.kernel.as_ref()), out),
            None => Ok(()),
        }
    }

    fn moment(&self) -> Moment<'_> {
        Moment::Event(Event {
            name: "brk".into(),
            pid: self.pid,
            tid: self.tid,
            comm: &self.comm,
            end: &self.time,
            took_ns: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
            format!(
                "{}\n{}",
                Call::header(false),
                String::from_utf8_lossy(&line)
            ),
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
            &["brkstack", "--events", "-i", "1"],
            &["brkstack", "-i", "1", "2"],
            &["brkstack", "-s", "-f"],
            &["brkstack", "-p", "1", "-c", "true"],
            &["brkstack", "-f", "-j"],
            &["brkstack", "-f", "-T"],
            &["brkstack", "--container"],
            &["brkstack", "0"],
        ] {
            let error = Args::try_parse_from(wrong).expect_err(&wrong.join(" "));
            assert_eq!(error.exit_code(), 2);
        }
        let args = Args::try_parse_from(["brkstack", "-UKaPp", "1,2", "0.5"]).expect("valid");
        assert!(args.kernel_stacks && args.target.filter.pid == [1, 2]);
        let args = Args::try_parse_from(["brkstack", "-UsPTi", "5", "-D", "10"]).expect("valid");
        assert_eq!(
            (args.stacks.interval(), args.common.duration),
            (Some(Duration::from_secs(5)), Some(Duration::from_secs(10)))
        );
        for (line, user, kernel) in [("", false, false), ("-U", true, false), ("-K", false, true)] {
            let args = ["brkstack", "--events", line];
            let args = args.iter().filter(|word| !word.is_empty());
            let args = Args::try_parse_from(args).expect("valid");
            assert_eq!((args.user_stacks(), args.kernel_stacks), (user, kernel));
        }
    }
}
