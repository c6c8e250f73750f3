//! memleak: memory that a process or the kernel allocated and has not freed, by call stack.
//!
//! What follows is of processes; the kernel's half is [`kernel`].
//!
//! Hooks: uprobes on the allocator's functions ([`objects`]) in the files that the target runs
//! (`bpf/memleak.bpf.c`, [`probes`]). Blocks are kept in BPF maps ([`live`]); mappings, which can end
//! in part, come as events and are kept here ([`regions`]). A report ([`processes`]) adds both up by
//! stack ([`sums`]).

mod allocators;
mod args;
mod cost;
mod difference;
mod ended;
mod heap;
mod kernel;
mod live;
mod loaded;
mod objects;
mod overhead;
mod pool;
mod probes;
mod processes;
mod regions;
mod rows;
mod sampling;
mod serve;
mod signature;
mod stopped;
mod sums;
mod target;
mod verdict;
mod whole;

use std::mem;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use memtools::bpf::attach;
use memtools::bpf::kernel_support;
use memtools::bpf::ring::Events;
use memtools::process::command::HeldCommand;
use memtools::run::cli;
use memtools::run::priority;
use memtools::serve::server::Server;

use crate::args::Args;
use crate::bpf::types::{event, event_kind as Kind};
use crate::cost::Cost;
use crate::difference::Difference;
use crate::loaded::Loaded;
use crate::overhead::Limit;
use crate::processes::Tracer;
use crate::target::Target;

memtools::skeleton!("memleak", MemleakSkelBuilder, stacks: unwound, plain: [block_bucket, event, live_block, live_key, thread, total, total_key]);

/// How long nothing may happen at all before we say why that can be.
const QUIET: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    let args = args.check()?;
    if args.verdict.wanted(&args.pid, &args.difference)? {
        return verdict::run(&args);
    }
    if args.heap.wanted(&args.pid)? {
        return heap::run(&args);
    }
    if kernel::args::wanted(&args)? {
        return kernel::run(&args);
    }
    kernel_support::preflight()?;
    kernel_support::preflight_uprobes()?;
    attach::capture_log(args.verbose);
    let exports = args.exports()?;
    let difference = Difference::of(&args, args.view())?;
    let listener = args.serve.listen()?;
    let (mut poller, output) = args.start()?;
    let mut target = Target::choose(&args)?;
    let server = listener.map(Server::start).transpose()?;
    server.as_ref().inspect(|server| serve::tell(server));
    priority::raise();
    let mut symbolizer = target
        .symbolizer()?
        .with_source(args.export.source, args.makes_profiles())?;
    let (attached, mut links, unwinder) = probes::attach(&target, &args)?;
    symbolizer.name_python(unwinder.names());
    let skel = &attached.skel;
    let events: Events<event> = Events::new(&skel.maps.events)?;
    let mut limit = Limit::of(&args, &attached);
    let mut cost = Cost::new(&attached, &target)?;
    for object in target.files() {
        eprintln!("memleak: {} ({})", object.found(), attached.how);
    }
    let mut command = target.command.take();
    let mut tracer = Tracer::new(
        &attached, &target, symbolizer, output, &args, exports, difference,
    )?;
    command.as_mut().map_or(Ok(()), HeldCommand::release)?;

    let mappings = tracer.symbolizer.descriptor()?;
    poller.watch_events(&events);
    poller.watch_mappings(&mappings);
    poller.watch_questions(&attached.questions);
    let requests: Events<u32> = Events::new(&skel.maps.room_requests)?;
    poller.watch_room(&requests);
    if let Some(server) = &server {
        poller.watch_clients(server);
    }
    for process in target.watched() {
        poller.watch_exit(process);
    }
    let interval = args.interval;
    poller.tick_every(interval)?;

    let mut reports_left = args.count;
    let mut quiet_until = Some(Instant::now() + QUIET);
    let mut loaded = Loaded::new(&target);
    let mut look_at = Instant::now() + loaded::PAUSE;
    let mut harm = None;
    loop {
        let wake = poller.wait(Some(look_at))?;
        if wake.asked {
            let mut looked = Ok(());
            attached.questions.answer(|pid, is_stopped| {
                let look = loaded.look_at_stopped(pid, is_stopped, &target, &attached, &args);
                looked = mem::replace(&mut looked, Ok(())).and(look);
            });
            looked?;
        }
        let new: Vec<event> = events.drain()?.collect();
        if new.iter().any(|event| event.kind == Kind::EVENT_EXEC) {
            look_at = look_at.min(Instant::now() + loaded::AFTER_EXEC);
        }
        tracer.take(new.into_iter())?;
        if wake.room {
            requests.drain()?;
        }
        tracer.make_room(&events)?;
        if let Some(share) = cost.look()?
            && let Some(limit) = &mut limit
            && limit.hold(share)?
        {
            cost.measure()?;
        }
        let now = Instant::now();
        if wake.mappings || now >= look_at {
            tracer.symbolizer.refresh();
            loaded.look(tracer.symbolizer.code_files(), &target, &attached, &args);
            look_at = now + loaded::PAUSE;
            harm = loaded.read_by(tracer.symbolizer.translators());
        }
        if harm.is_some() {
            links.append(&mut loaded.links);
            attached.detach(mem::take(&mut links));
            tracer.report(false)?;
            break;
        }
        if quiet_until.is_some_and(|until| now >= until) {
            quiet_until = None;
            if attached.hits().count == 0 {
                eprintln!("{}", target.why_quiet());
            }
        }
        if wake.exited {
            tracer.symbolizer.refresh();
            loaded.tell_missed(tracer.symbolizer.code_files(), &target, &args);
        }
        if wake.exited || wake.stop {
            tracer.report(wake.exited)?;
            break;
        }
        if wake.report {
            tracer.report(false)?;
        }
        if let Some(server) = server.as_ref().filter(|_| wake.client) {
            server.answer(|| tracer.served(attached.hits()))?;
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

    drop(server);
    loaded.tell_late(Duration::ZERO);
    cost.end_slice();
    links.extend(loaded.links);
    attached.detach(links);
    if let Some(limit) = &limit {
        limit.tell(cost.percent());
    }
    cost.tell(&mut tracer.output)?;
    tracer.symbolizer.tell_losses("memleak");
    unwinder.tell("memleak", &mut tracer.output)?;
    let status = command.as_mut().map(HeldCommand::finish).transpose()?;
    tracer.exports.finish()?;
    if let Some(harm) = harm {
        bail!("{harm}: the trace has ended");
    }
    Ok(difference::status(tracer.difference, status.flatten()))
}
