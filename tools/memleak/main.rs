//! memleak: memory that a process or the kernel allocated and has not freed, by call stack.
//!
//! What follows is of processes; the kernel's half is [`kmem`].
//!
//! Hooks: uprobes on the allocator's functions ([`objects`]) in the files that the target runs
//! (`bpf/memleak.bpf.c`, [`probes`]). Blocks are kept in BPF maps ([`live`]); mappings, which can end
//! in part, come as events and are kept here ([`regions`]). A report ([`tracer`]) adds both up by
//! stack ([`report`]).

mod allocators;
mod args;
mod cost;
mod kmem;
mod live;
mod loaded;
mod objects;
mod overhead;
mod pool;
mod probes;
mod regions;
mod report;
mod sampling;
mod signature;
mod target;
mod tracer;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use memtools::cli;
use memtools::command::HeldCommand;
use memtools::events::Events;
use memtools::poll::Poller;
use memtools::{attach, kernel};

use crate::args::Args;
use crate::bpf::types::event;
use crate::cost::Cost;
use crate::loaded::Loaded;
use crate::overhead::Limit;
use crate::target::Target;
use crate::tracer::Tracer;

memtools::skeleton!("memleak", plain: [block_bucket, event, filter, live_block, live_key, total, total_key]);

/// How long nothing may happen at all before we say why that can be.
const QUIET: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    let args = args.check()?;
    if kmem::args::wanted(&args)? {
        return kmem::run(&args);
    }
    kernel::preflight()?;
    kernel::preflight_uprobes()?;
    attach::capture_log(args.verbose);
    let mut poller = Poller::new()?;
    let mut target = Target::choose(&args)?;
    let symbolizer = target.symbolizer()?;
    let (attached, mut links, unwinder) = probes::attach(&target, &args)?;
    let skel = &attached.skel;
    let events: Events<event> = Events::new(&skel.maps.events)?;
    let mut limit = Limit::of(&args, &attached)?;
    let mut cost = Cost::new(&attached, &target);
    for object in target.files() {
        eprintln!("memleak: {} ({})", object.found(), attached.how);
    }
    let mut command = target.command.take();
    let mut tracer = Tracer::new(&attached, &target, symbolizer, &args)?;
    command.as_mut().map_or(Ok(()), HeldCommand::release)?;

    let mappings = tracer.symbolizer.descriptor()?;
    poller.watch_events(&events);
    poller.watch_mappings(&mappings);
    for process in target.watched() {
        poller.watch_exit(process);
    }
    let interval = Duration::from_secs(args.interval);
    poller.tick_every(interval)?;

    let mut reports_left = args.count;
    let mut quiet_until = Some(Instant::now() + QUIET);
    let mut loaded = Loaded::new(&target);
    let mut look_at = Instant::now() + loaded::PAUSE;
    loop {
        let wake = poller.wait(Some(look_at))?;
        tracer.take(events.drain()?)?;
        tracer.make_room()?;
        if let Some(share) = cost.look()
            && let Some(limit) = &mut limit
            && limit.hold(share)?
        {
            cost.measure();
        }
        let now = Instant::now();
        if wake.mappings || now >= look_at {
            tracer.symbolizer.refresh();
            loaded.look(tracer.symbolizer.code_files(), &target, &attached, &args);
            look_at = now + loaded::PAUSE;
        }
        if quiet_until.is_some_and(|until| now >= until) {
            quiet_until = None;
            if attached.hits().count == 0 {
                eprintln!("{}", target.why_quiet());
            }
        }
        if wake.exited || wake.stop {
            tracer.report(wake.exited)?;
            break;
        }
        if wake.tick {
            reports_left = reports_left.map(|left| left - 1);
            let last = reports_left == Some(0);
            if last || !args.folded {
                tracer.report(false)?;
            }
            if last {
                break;
            }
            // What is younger than --older is left out, so reports are a whole interval apart.
            poller.tick_every(interval)?;
        }
    }

    cost.end_slice();
    links.extend(loaded.links);
    attached.detach(links);
    cost.tell(&mut tracer.output)?;
    unwinder.tell("memleak", &mut tracer.output)?;
    let status = command.as_mut().map(HeldCommand::finish).transpose()?;
    Ok(status.flatten().map_or(ExitCode::SUCCESS, ExitCode::from))
}
