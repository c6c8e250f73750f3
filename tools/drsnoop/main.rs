//! drsnoop: tasks that had to reclaim memory themselves before they got any.
//!
//! Hooks: the tracepoints of direct reclaim and, with --memcg, of a cgroup's
//! (`bpf/drsnoop.bpf.c`). An event comes at the end of a reclaim, and becomes one row ([`row`]).

mod args;
mod row;

use std::fs;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use anyhow::{Context, Result};
use libbpf_rs::skel::{OpenSkel, Skel};
use libbpf_rs::{Link, MapMut};
use memtools::attach::{self, Variant};
use memtools::cgroup::Cgroups;
use memtools::cli;
use memtools::clock::Clock;
use memtools::events::Events;
use memtools::filter::Filter;
use memtools::folded::Part;
use memtools::gfp::Gfp;
use memtools::histogram::Histogram;
use memtools::kernel;
use memtools::losses::Losses;
use memtools::output::Output;
use memtools::poll::Poller;
use memtools::stack::Stacks;
use memtools::symbolize::{self, Symbolizer};
use memtools::text;
use memtools::unwind::Unwinder;

use crate::args::Args;
use crate::bpf::types::{event, reclaim_kind};
use crate::bpf::{DrsnoopSkel, DrsnoopSkelBuilder};
use crate::row::{Columns, Kind, Latencies, Row};

memtools::skeleton!("drsnoop", plain: [event, filter]);

/// What the kernel half says if it cannot reach the count; FREE_PAGES_UNKNOWN.
const FREE_PAGES_UNKNOWN: u64 = u64::MAX;

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    kernel::preflight()?;
    attach::capture_log(false);
    let filter = args.filter.resolve(args.tid)?;
    let mut poller = Poller::new()?;
    let symbolizer = args.stack.then(Symbolizer::of_all_processes).transpose()?;
    let start = |zones| start(&args, &filter, zones);
    // Without memory cgroups (CONFIG_MEMCG) there is no way to the zones, and the first does not load.
    let variants = [
        ("raw tracepoints", true),
        ("raw tracepoints, free memory from /proc/vmstat", false),
    ]
    .map(|(name, zones)| Variant::new(name, move || start(zones)));
    let (how, (skel, links)) = attach::first_that_works(args.common.verbose, variants)?;
    let unwinder = args
        .stack
        .then(|| {
            let named = args.filter.pid.as_slice();
            Unwinder::start(args.unwind, memtools::unwind_parts!(skel), named)
        })
        .transpose()?;
    let events: Events<event> = Events::new(&skel.maps.events)?;

    let columns = Columns {
        timestamp: args.timestamp,
        uid: args.print_uid,
        tid: args.tid.is_some(),
        free: args.common.verbose,
        kind: args.memcg || args.extended,
        extended: args.extended,
    };
    let mut printer = Printer {
        output: Output::new(args.common.format()),
        clock: Clock::new(),
        cgroups: args.wants_cgroups().then(Cgroups::new),
        first_ns: None,
        latencies: args.hist.then(Histogram::new),
        stacks: Stacks::new(&skel.maps.stacks),
        symbolizer,
        page_kb: kernel::page_bytes()? / 1024,
        told_of_free: false,
        columns,
    };
    printer.output.header(&columns.header())?;
    printer.output.flush()?;

    let mappings = printer.look_around()?;
    if let Some(mappings) = &mappings {
        poller.watch_mappings(mappings);
    }
    eprintln!("drsnoop: tracing direct reclaim ({how}), Ctrl-C to end");
    let deadline = args.common.deadline();
    events.follow(poller, deadline, links, |events| printer.print(events))?;
    if let Some(buckets) = printer.latencies.take() {
        let name = "latency_ns";
        printer.output.row(&Latencies { name, buckets })?;
        printer.output.flush()?;
    }
    Losses::tell("drsnoop", skel.object(), &filter, &mut printer.output)?;
    if let Some(unwinder) = unwinder {
        unwinder.tell("drsnoop", &mut printer.output)?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Args {
    fn wants_cgroups(&self) -> bool {
        self.extended || self.common.json
    }
}

/// Loads and attaches. With `zones` the kernel half adds up the free memory of these itself.
fn start(args: &Args, filter: &Filter, zones: bool) -> Result<(DrsnoopSkel<'static>, Vec<Link>)> {
    let mut open = attach::open::<DrsnoopSkelBuilder>()?;
    let options = attach::options(&mut open.maps.rodata_data)?;
    filter.set(&mut options.filter);
    options.by_uid = args.uid.is_some().into();
    options.only_uid = args.uid.unwrap_or(0);
    options.want_free_pages = (zones && (args.common.verbose || args.common.json)).into();
    memtools::set_unwind_options!(options, args.unwind);
    options.want_stacks = args.stack.into();
    let arguments = kernel::tracepoint_arguments("mm_vmscan_direct_reclaim_begin")?
        .context("this kernel has no tracepoint mm_vmscan_direct_reclaim_begin")?;
    options.gfp_first = arguments.first().is_some_and(|name| name == "gfp_t").into();
    if !args.stack {
        for map in [&mut open.maps.stacks, &mut open.maps.stack_slots] {
            map.set_max_entries(1).context("failed to size a map")?;
        }
    }
    let skel = open.load().context("failed to load")?;
    filter.set_cgroup(&skel.maps.filter_cgroup)?;

    let programs = &skel.progs;
    let mut links = attach::all(&[&programs.direct_end, &programs.direct_begin], "")?;
    if args.memcg {
        links.extend(attach::all(
            &[&programs.memcg_end, &programs.memcg_begin],
            "; --memcg needs a kernel with CONFIG_MEMCG=y",
        )?);
    }
    Ok((skel, links))
}

/// Turns events into rows.
struct Printer<'a> {
    output: Output,
    clock: Clock,
    cgroups: Option<Cgroups>,
    /// When the first reclaim ended.
    first_ns: Option<u64>,
    latencies: Option<Histogram>,
    stacks: Stacks<'a, MapMut<'static>>,
    symbolizer: Option<Symbolizer>,
    page_kb: u64,
    told_of_free: bool,
    columns: Columns,
}

impl Printer<'_> {
    /// Remembers what processes execute, if --stack is to name it. Returns what to wait for to hear
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
            let path = self
                .cgroups
                .as_mut()
                .and_then(|cgroups| cgroups.path(event.cgroup));
            let cgroup = path.map(str::to_owned);
            let (kernel, user) = self.name_stacks(&event)?;
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
                free_kb: self.free_kb(event.free_pages),
                order: event.order,
                gfp_flags: Gfp(event.gfp_flags),
                cgroup,
                kernel_stack: kernel.map(|part| part.frames),
                user_stack_truncated: user.as_ref().and_then(|part| part.truncated.clone()),
                user_stack: user.map(|part| part.frames),
                microseconds: event.time_ns.saturating_sub(first) / 1000,
                columns: self.columns,
            };
            self.output.row(&row)?;
        }
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

    /// The kernel's and the user's frames, if --stack asks for them.
    fn name_stacks(&mut self, event: &event) -> Result<(Option<Part>, Option<Part>)> {
        let Some(symbolizer) = &mut self.symbolizer else {
            return Ok((None, None));
        };
        let mut part = |id| -> Result<Option<Part>> {
            let stack = self.stacks.get(id)?;
            Ok(stack.map(|stack| {
                let part = symbolizer.part(event.pid, &stack);
                Part {
                    frames: symbolize::without_tracer(&part.frames).to_vec(),
                    ..part
                }
            }))
        };
        Ok((part(event.kernel_stack)?, part(event.user_stack)?))
    }
}
