//! drsnoop: tasks that had to reclaim memory themselves before they got any.
//!
//! Hooks: the tracepoints of direct reclaim and, with --memcg, of a cgroup's
//! (`bpf/drsnoop.bpf.c`). An event comes at the end of a reclaim, and becomes one row ([`row`]).

mod args;
mod row;

use std::collections::HashMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use anyhow::{Context, Result};
use libbpf_rs::skel::Skel;
use libbpf_rs::{Link, MapMut};
use memtools::bpf::attach::{self, Variant};
use memtools::bpf::kernel_support;
use memtools::bpf::map_create;
use memtools::bpf::ring::Events;
use memtools::export::files::{Exports, Subject};
use memtools::export::metrics::{self, Family, Kind as Sums, Metrics};
use memtools::export::profile::{Sample, Value};
use memtools::print::clock::Clock;
use memtools::print::gfp::Gfp;
use memtools::print::histogram::{self, Histogram};
use memtools::print::output::Output;
use memtools::print::text;
use memtools::process::cgroup::Cgroups;
use memtools::process::container::{self, Homes};
use memtools::process::filter::{Filter, Tasks};
use memtools::run::cli;
use memtools::run::losses::{self, Losses};
use memtools::run::protect;
use memtools::run::skeleton::StackRoom;
use memtools::run::target::Target;
use memtools::stacks::named::{NamedStack, StackIds};
use memtools::stacks::symbolize::Symbolizer;
use memtools::stacks::table::{FIRST_OF_EVENTS, MAX_OF_EVENTS, Stacks};
use memtools::stacks::unwind::Unwinder;

use crate::args::Args;
use crate::bpf::Loaded;
use crate::bpf::types::{event, reclaim_kind};
use crate::row::{Columns, Kind, Row};

memtools::skeleton!("drsnoop", DrsnoopSkelBuilder, stacks: unwound, plain: [event]);

static STALLS: Family = Family {
    name: "memtools_reclaim_stall_duration_seconds",
    help: "How long tasks had to reclaim memory before they got any, by reason.",
    labels: &["kind"],
    kind: Sums::Durations,
};
static STALLED: Family = Family {
    name: "memtools_reclaim_stalled_seconds_total",
    help: "Time in which tasks had to reclaim memory before they got any.",
    labels: &["comm", "kind"],
    kind: Sums::Seconds,
};
static RECLAIMED: Family = Family {
    name: "memtools_reclaim_stalled_pages_total",
    help: "Pages that tasks reclaimed before they got any.",
    labels: &["comm", "kind"],
    kind: Sums::Count,
};

/// What the kernel half says if it cannot reach the count; FREE_PAGES_UNKNOWN.
const FREE_PAGES_UNKNOWN: u64 = u64::MAX;

/// Bytes of the buffer for events: 7,000 in the 10 ms from one look at it to the next.
const EVENT_BYTES: u32 = 1 << 20;

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    kernel_support::preflight()?;
    attach::capture_log(false);
    let exports = args.export.prepare("drsnoop", args.traced())?;
    let metrics = [&STALLS, &STALLED, &RECLAIMED];
    let metrics = args.metrics.open("drsnoop", &metrics)?;
    let (mut poller, output) = args.common.start("drsnoop")?;
    let mut target = Target::choose_thread(&args.target, args.tid, Tasks::All)?;
    let symbolizer = args
        .wants_stacks()
        .then(|| {
            let symbolizer = Symbolizer::of_all_processes()?;
            symbolizer.with_source(args.export.source, args.export.any())
        })
        .transpose()?;
    // Without memory cgroups (CONFIG_MEMCG) there is no way to the zones, and what takes it does not load.
    let mut ways = [
        ("tracepoints", "", true),
        ("tracepoints, free memory from /proc/vmstat", "", false),
        ("raw tracepoints", "_raw", true),
        (
            "raw tracepoints, free memory from /proc/vmstat",
            "_raw",
            false,
        ),
    ];
    if !kernel_support::preempts_raw_tracepoints() {
        ways.sort_by_key(|(_, kind, _)| *kind != "_raw");
    }
    let variants = ways.map(|(name, kind, zones)| {
        let (args, filter) = (&args, target.filter());
        Variant::new(name, move || start(args, filter, kind, zones))
    });
    let (how, (skel, links)) = attach::first_that_works(args.common.verbose, variants)?;
    let unwinder = args
        .wants_stacks()
        .then(|| target.unwinder(args.unwind, memtools::unwind_parts!(skel)))
        .transpose()?;
    if args.wants_limited() {
        kernel_support::tell_if_limits_are_unknown("drsnoop");
    }
    let events: Events<event> = Events::new(&skel.maps.events)?;

    let columns = args.columns();
    let mut printer = Printer {
        output,
        clock: Clock::new(),
        homes: Homes::if_wanted(args.wants_cgroups(), &skel.maps.cgroup_paths),
        limited: args.wants_limited().then(Cgroups::of_memory),
        first_ns: None,
        latencies: args.hist.then(Histogram::new),
        stacks: Stacks::new(memtools::stack_maps!(skel), MAX_OF_EVENTS)?,
        symbolizer,
        print_stacks: args.stack,
        stalls: HashMap::new(),
        exports,
        metrics,
        page_kb: kernel_support::page_bytes()? / 1024,
        shows_free: args.shows_free(),
        told_of_free: false,
        columns,
    };

    if let Some(symbolizer) = &mut printer.symbolizer {
        symbolizer.name_python(unwinder.as_ref().and_then(Unwinder::names));
    }
    let mappings = printer.look_around()?;
    if let Some(mappings) = &mappings {
        poller.watch_mappings(mappings);
    }
    printer.exports.begin();
    protect::from_lack_of_memory("drsnoop");
    eprintln!("drsnoop: tracing direct reclaim ({how}), Ctrl-C to end");
    printer.output.header(&columns.header())?;
    printer.output.flush()?;
    target.release()?;
    target.watch_exit(&mut poller);
    if printer.metrics.any() {
        poller.tick_every(metrics::LOOK)?;
    }
    let deadline = args.common.deadline();
    events.follow(poller, deadline, links, |events| {
        printer.print(events)?;
        losses::write_metrics(skel.object(), target.filter(), &mut printer.metrics)
    })?;
    if let Some(buckets) = printer.latencies.take() {
        let name = "latency_ns";
        printer.output.header("")?;
        printer.output.row(&histogram::Named { name, buckets })?;
        printer.output.flush()?;
    }
    if let Some(symbolizer) = &printer.symbolizer {
        symbolizer.tell_losses("drsnoop");
    }
    Losses::tell(
        "drsnoop",
        skel.object(),
        target.filter(),
        &mut printer.output,
    )?;
    if let Some(unwinder) = unwinder {
        unwinder.tell("drsnoop", &mut printer.output)?;
    }
    printer.export();
    losses::finish_metrics(skel.object(), target.filter(), printer.metrics)?;
    printer.exports.finish()?;
    printer.output.finish()?;
    target.finish()
}

impl Args {
    fn columns(&self) -> Columns {
        Columns {
            timestamp: self.timestamp,
            uid: self.print_uid,
            tid: self.tid.is_some(),
            container: self.containers.container,
            free: self.common.verbose,
            kind: self.memcg || self.extended,
            extended: self.extended,
            limited: self.extended && self.memcg,
        }
    }

    fn wants_stacks(&self) -> bool {
        self.stack || self.export.any()
    }

    /// What is traced, in words.
    fn traced(&self) -> String {
        let user = self.uid.map(|uid| format!("user {uid}"));
        match self.tid.map(|tid| format!("thread {tid}")).or(user) {
            Some(some) => format!("{some}, {}", self.target),
            None => self.target.to_string(),
        }
    }

    fn wants_cgroups(&self) -> bool {
        self.extended || self.containers.wanted(self.common.json)
    }

    fn wants_limited(&self) -> bool {
        self.memcg && (self.extended || self.common.json)
    }

    fn shows_free(&self) -> bool {
        self.common.verbose || self.common.json
    }
}

/// Loads and attaches the programs of this kind. With `zones` the kernel half adds up the free memory of
/// these itself.
fn start(args: &Args, filter: &Filter, kind: &str, zones: bool) -> Result<(Loaded, Vec<Link>)> {
    let reclaims = if args.memcg {
        &["direct", "memcg"][..]
    } else {
        &["direct"]
    };
    // The end first: a reclaim that is seen to begin must be seen to end.
    let programs: Vec<String> = reclaims
        .iter()
        .flat_map(|reclaim| ["end", "begin"].map(|moment| format!("{reclaim}_{moment}{kind}")))
        .collect();
    let programs: Vec<&str> = programs.iter().map(String::as_str).collect();
    let stacks = StackRoom::of(FIRST_OF_EVENTS).if_wanted(args.wants_stacks());
    let mut open = bpf::prepare(filter, stacks, args.unwind)?;
    let with_cgroups = container::prepare(args.wants_cgroups(), &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.by_uid = args.uid.is_some().into();
    options.only_uid = args.uid.unwrap_or(0);
    options.want_free_pages = (zones && args.shows_free()).into();
    options.want_stacks = args.wants_stacks().into();
    options.with_cgroups = with_cgroups;
    if kind == "_raw" {
        let begin = kernel_support::tracepoint_arguments("mm_vmscan_direct_reclaim_begin")?
            .context("this kernel has no tracepoint mm_vmscan_direct_reclaim_begin")?;
        options.gfp_first = begin.first().is_some_and(|name| name == "gfp_t").into();
    } else {
        kernel_support::preflight_tracepoints()?;
    }
    map_create::size(&mut open.maps.events, EVENT_BYTES)?;
    let mut skel = open.load_only(&programs)?;
    let links = attach::by_name(skel.object_mut(), &programs).with_context(|| {
        if args.memcg {
            "--memcg needs a kernel with CONFIG_MEMCG=y"
        } else {
            "no tracepoint of direct reclaim"
        }
    })?;
    Ok((skel, links))
}

/// The path of a cgroup, if it is wanted and still there.
fn path_in(cgroups: &mut Option<Cgroups>, id: u64) -> Option<String> {
    let cgroups = cgroups.as_mut().filter(|_| id != 0)?;
    cgroups.path(id).map(str::to_owned)
}

impl Row {
    fn measure(&self, metrics: &mut Metrics) {
        let kind = self.kind.name();
        metrics.observe(&STALLS, &[kind], self.latency_ns);
        metrics.add(&STALLED, &[&self.comm, kind], self.latency_ns);
        metrics.add(&RECLAIMED, &[&self.comm, kind], self.reclaimed_pages);
    }
}

/// Turns events into rows.
struct Printer<'a> {
    output: Output,
    clock: Clock,
    homes: Option<Homes<'a>>,
    /// The cgroups that memory is limited in.
    limited: Option<Cgroups>,
    /// When the first reclaim ended.
    first_ns: Option<u64>,
    latencies: Option<Histogram>,
    stacks: Stacks<'a, MapMut<'static>>,
    symbolizer: Option<Symbolizer>,
    print_stacks: bool,
    /// What the files show, by process, its name and the ids of its stacks.
    stalls: HashMap<(u32, String, u64, u64), Sample>,
    exports: Exports,
    metrics: Metrics,
    page_kb: u64,
    shows_free: bool,
    told_of_free: bool,
    columns: Columns,
}

impl Printer<'_> {
    /// Remembers what processes execute, if stacks are to be named. Returns what to wait for to hear
    /// of changes.
    fn look_around(&mut self) -> Result<Option<OwnedFd>> {
        let Some(symbolizer) = &mut self.symbolizer else {
            return Ok(None);
        };
        symbolizer.look_around();
        symbolizer.descriptor().map(Some)
    }

    fn print(&mut self, events: impl Iterator<Item = event>) -> Result<()> {
        if let Some(symbolizer) = &mut self.symbolizer {
            symbolizer.refresh();
        }
        for event in events {
            if let Some(latencies) = &mut self.latencies {
                latencies.add(event.latency_ns);
            }
            let first = *self.first_ns.get_or_insert(event.time_ns);
            let home = self.homes.as_mut().map(|homes| homes.of(event.cgroup));
            let limited = path_in(&mut self.limited, event.limited);
            let stack = self.named(&event)?;
            if self.exports.any()
                && let Some(stack) = &stack
            {
                self.add(&event, stack);
            }
            let row = Row {
                time: self.clock.local(event.time_ns),
                comm: text::from_c(&event.comm),
                pid: event.pid,
                tid: event.tid,
                uid: event.uid,
                kind: match event.kind {
                    reclaim_kind::RECLAIM_MEMCG => Kind::Memcg,
                    _ => Kind::Direct,
                },
                latency_ns: event.latency_ns,
                reclaimed_pages: event.reclaimed_pages,
                free_kb: self
                    .shows_free
                    .then(|| self.free_kb(event.free_pages))
                    .flatten(),
                order: event.order,
                gfp_flags: Gfp(event.gfp_flags),
                home,
                limited,
                limited_id: Some(event.limited).filter(|&id| id != 0),
                stack: stack.filter(|_| self.print_stacks),
                microseconds: event.time_ns.saturating_sub(first) / 1000,
                columns: self.columns,
            };
            row.measure(&mut self.metrics);
            self.output.row(&row)?;
        }
        self.stacks.renew_for_events()?;
        self.output.flush()
    }

    fn free_kb(&mut self, pages: u64) -> Option<u64> {
        if pages != FREE_PAGES_UNKNOWN {
            return Some(pages * self.page_kb);
        }
        if !self.told_of_free {
            self.told_of_free = true;
            eprintln!(
                "drsnoop: free memory cannot be had from inside the kernel here: FREE(KB) is that of \
                 the moment of printing"
            );
        }
        let vmstat = fs::read_to_string("/proc/vmstat").ok()?;
        let line = vmstat
            .lines()
            .find_map(|line| line.strip_prefix("nr_free_pages "))?;
        Some(line.parse::<u64>().ok()? * self.page_kb)
    }

    fn add(&mut self, event: &event, stack: &NamedStack) {
        let key = (
            event.pid,
            stack.comm.clone(),
            event.user_stack,
            event.kernel_stack,
        );
        let sample = self.stalls.entry(key).or_insert_with(|| Sample {
            stack: stack.clone(),
            values: vec![0, 0],
        });
        for (sum, more) in sample.values.iter_mut().zip([1, event.latency_ns]) {
            *sum += more;
        }
    }

    /// Writes all stacks into the files that are asked for.
    fn export(&mut self) {
        if self.exports.any() {
            let delay = Value {
                kind: "delay",
                unit: "nanoseconds",
                counted: "ns",
            };
            let subject = Subject {
                name: "time in direct reclaim".to_owned(),
                values: vec![Value::count("reclaim_stalls", "stalls"), delay],
                main: 1,
                by_thread: true,
                remarks: Vec::new(),
            };
            let samples = self.stalls.drain().map(|(_, sample)| sample).collect();
            self.exports.write(subject, samples);
        }
    }

    /// The kernel's and the user's stack with their names, if they are asked for.
    fn named(&mut self, event: &event) -> Result<Option<NamedStack>> {
        let ids = StackIds {
            pid: event.pid,
            comm: &text::from_c(&event.comm),
            user: Some(event.user_stack),
            kernel: Some(event.kernel_stack),
        };
        NamedStack::read_if_asked(&ids, &mut self.stacks, self.symbolizer.as_mut())
    }
}
