//! memleak: memory that a process allocated and has not freed, by call stack.
//!
//! Hooks: uprobes on the allocator's functions in the files that the process runs
//! (`bpf/memleak.bpf.c`). Blocks are kept in a BPF map; mappings, which can end in part, come as
//! events and are kept here ([`regions`]). A report adds both up by stack ([`report`]).

mod args;
mod probes;
mod regions;
mod report;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapMut};
use memtools::cli::{self, UsageError};
use memtools::clock::{self, Clock};
use memtools::command::{CommandLine, HeldCommand};
use memtools::events::Events;
use memtools::folded::{Line, Part};
use memtools::losses::Losses;
use memtools::output::{Format, Output};
use memtools::poll::Poller;
use memtools::process::Process;
use memtools::shared;
use memtools::stack::Stacks;
use memtools::symbolize::Symbolizer;
use memtools::{attach, kernel, text};

use crate::args::Args;
use crate::bpf::types::{block, event, event_kind as Kind, total};
use crate::probes::{Attached, Object};
use crate::regions::{CallCounter, Regions};
use crate::report::{Allocation, Block, Call, Group, Head, Step, Total, Totals};

memtools::skeleton!("memleak", plain: [block, event, total]);

/// How long nothing may happen at all before we say why that can be.
const QUIET: Duration = Duration::from_secs(2);
/// Age in milliseconds below which a block is left out, unless --older says otherwise.
const DEFAULT_OLDER: u64 = 500;
/// Entries read from a map at once.
const BATCH: u32 = 16384;

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    if args.min_size > args.max_size {
        let message = format!(
            "--min-size (-z) {} is larger than --max-size (-Z) {}",
            args.min_size, args.max_size
        );
        return Err(UsageError(message).into());
    }
    kernel::preflight()?;
    kernel::preflight_uprobes()?;
    attach::capture_log(args.verbose);
    let mut poller = Poller::new()?;
    let mut symbolizer = Symbolizer::new()?;

    let mut target = Target::choose(&args)?;
    let pid = target.process.pid();
    let (how, Attached { skel, links }) = probes::attach(pid, &target.objects, &args)?;
    let events: Events<event> = Events::new(&skel.maps.events)?;
    if let Some(command) = &mut target.command {
        symbolizer.follow_new(pid);
        command.release()?;
    } else {
        symbolizer.follow(&target.process)?;
    }
    for object in &target.objects {
        eprintln!(
            "memleak: {} probes in {} ({how})",
            object.probes(),
            object.module
        );
    }

    let mut tracer = Tracer {
        pid,
        comm: target.process.comm(),
        blocks: &skel.maps.blocks,
        totals: &skel.maps.totals,
        losses: &skel.maps.losses,
        stacks: Stacks::new(&skel.maps.stacks),
        regions: Regions::new(kernel::page_bytes()?),
        symbolizer,
        clock: Clock::new(),
        output: Output::new(if args.json {
            Format::Json
        } else {
            Format::Text
        }),
        args: &args,
    };
    let mappings = tracer.symbolizer.descriptor()?;
    poller.watch_events(&events);
    poller.watch_mappings(&mappings);
    poller.watch_exit(&target.process);
    let interval = Duration::from_secs(args.interval);
    poller.tick_every(interval)?;

    let mut reports_left = args.count;
    let mut quiet_until = Some(Instant::now() + QUIET);
    loop {
        let wake = poller.wait(quiet_until)?;
        tracer.take(events.drain()?)?;
        if wake.mappings {
            tracer.symbolizer.refresh();
        }
        if wake.deadline {
            quiet_until = None;
            let seen = skel.maps.bss_data.as_deref().map(|bss| bss.seen);
            if seen == Some(0) {
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

    attach::detach(links);
    let status = target
        .command
        .as_mut()
        .map(HeldCommand::finish)
        .transpose()?
        .flatten();
    Ok(status.map_or(ExitCode::SUCCESS, ExitCode::from))
}

/// What is traced, and the files of it to probe.
struct Target {
    process: Process,
    objects: Vec<Object>,
    /// The command that the process is to become, if we start it.
    command: Option<HeldCommand>,
}

impl Target {
    fn choose(args: &Args) -> Result<Self> {
        if let Some(line) = &args.command {
            let line = CommandLine::parse(line)?;
            let objects = probes::objects_of_command(line.program(), args)?;
            let command = line.start()?;
            return Ok(Self {
                process: Process::open(command.pid())?,
                objects,
                command: Some(command),
            });
        }
        let pid = args.pid.context("no process given (-p PID)")?;
        let process = Process::open(pid)?;
        process.expect_native_program()?;
        let objects = probes::objects_of_process(&process, args)?;
        eprintln!("Attaching to pid {pid}, Ctrl+C to quit.");
        Ok(Self {
            process,
            objects,
            command: None,
        })
    }

    /// Why there can be no event at all.
    fn why_quiet(&self) -> String {
        let modules: Vec<&str> = self
            .objects
            .iter()
            .map(|object| object.module.as_str())
            .collect();
        format!(
            "memleak: no allocation or free yet: the process may be idle, or allocate by functions \
             other than those of {} (name its allocator with -O and -S)",
            modules.join(", ")
        )
    }
}

/// The state of the trace, and what is printed of it.
struct Tracer<'a> {
    pid: u32,
    comm: String,
    blocks: &'a MapMut<'static>,
    totals: &'a MapMut<'static>,
    losses: &'a MapMut<'static>,
    stacks: Stacks<'a, MapMut<'static>>,
    regions: Regions,
    symbolizer: Symbolizer,
    clock: Clock,
    output: Output,
    args: &'a Args,
}

impl Tracer<'_> {
    /// Follows mappings, and prints the lines of --trace.
    fn take(&mut self, events: impl Iterator<Item = event>) -> Result<()> {
        for event in events {
            let (start, size) = (event.address, event.size);
            let step = match event.kind {
                Kind::EVENT_MAP => {
                    self.regions.map(start, size, event.time_ns, event.stack);
                    Some(Step::AllocExited)
                }
                Kind::EVENT_MAP_IGNORED => {
                    self.regions.map_ignored(start, size);
                    None
                }
                Kind::EVENT_UNMAP => {
                    // The allocator's own mappings are none of ours.
                    self.regions
                        .unmap(event.tid, start, size)
                        .then_some(Step::FreeEntered)
                }
                Kind::EVENT_UNMAP_FAILED => {
                    self.regions.unmap_failed(event.tid);
                    None
                }
                Kind::EVENT_ALLOC_ENTER => Some(Step::AllocEntered),
                Kind::EVENT_ALLOC_EXIT => Some(Step::AllocExited),
                _ => Some(Step::FreeEntered),
            };
            if self.args.trace
                && let Some(step) = step
            {
                self.output.row(&Call {
                    time: self.clock.local(event.time_ns),
                    pid: event.pid,
                    tid: event.tid,
                    comm: text::from_c(&event.comm),
                    step,
                    size_bytes: event.size,
                    address: event.address,
                })?;
            }
        }
        if self.args.trace {
            self.output.flush()?;
        }
        Ok(())
    }

    /// Prints what is outstanding now. Once the process has exited its age no longer matters:
    /// nothing of it will be freed.
    fn report(&mut self, exited: bool) -> Result<()> {
        let now = clock::monotonic_ns();
        let default_older = if exited || self.args.combined_only {
            0
        } else {
            DEFAULT_OLDER
        };
        let older_ms = self.args.older.unwrap_or(default_older);
        let born_before = now.saturating_sub(older_ms.saturating_mul(1_000_000));

        self.symbolizer.refresh();
        let regions = self.live_regions(born_before);
        let (mut totals, mut allocations) = (Totals::new(), regions);
        if self.args.combined_only {
            totals = read_totals(self.totals)?;
        } else {
            allocations.extend(live_blocks(self.blocks, born_before)?);
        }
        report::add_up(&mut totals, &allocations);

        if !self.args.folded {
            self.head(now, &totals)?;
        }
        if self.args.show_allocs {
            allocations.sort_unstable_by_key(|allocation| (allocation.size, allocation.address));
            for Allocation {
                address,
                size,
                stack,
                ..
            } in allocations
            {
                self.output.row(&Block {
                    address,
                    size_bytes: size,
                    stack_id: stack,
                })?;
            }
        }
        let top = if self.args.folded {
            usize::MAX
        } else {
            self.args.top
        };
        for (stack, total) in report::largest(&totals, self.args.sort, top) {
            self.group(stack, total)?;
        }
        self.output.flush()?;

        let losses = Losses::read(self.losses)?;
        if losses.any() {
            eprintln!("memleak: {losses}");
        }
        Ok(())
    }

    fn head(&mut self, now: u64, totals: &Totals) -> Result<()> {
        self.output.row(&Head {
            time: self.clock.local(now),
            pid: self.pid,
            comm: self.comm.clone(),
            top: self.args.top,
            stacks: totals
                .values()
                .filter(|total| total.allocations > 0)
                .count(),
            bytes: totals.values().map(|total| total.bytes).sum(),
            allocations: totals.values().map(|total| total.allocations).sum(),
            lost: Losses::read(self.losses)?,
        })
    }

    fn group(&mut self, stack_id: u64, total: Total) -> Result<()> {
        let stack = self.stacks.get(stack_id)?;
        let truncated = stack.as_ref().is_some_and(|stack| stack.truncated);
        let frames = stack.map_or_else(Vec::new, |stack| self.symbolizer.name(self.pid, &stack));
        if self.args.folded {
            let line = Line {
                comm: &self.comm,
                user: Some(Part { frames, truncated }),
                weight: total.bytes,
                ..Line::default()
            };
            return self.output.raw(|out| line.write(out));
        }
        self.output.row(&Group {
            bytes: total.bytes,
            allocations: total.allocations,
            stack_id,
            frames,
            truncated,
            addresses: !self.args.combined_only,
        })
    }

    fn live_regions(&self, born_before: u64) -> Vec<Allocation> {
        let mut counter = CallCounter::default();
        let old = self
            .regions
            .iter()
            .filter(|region| region.time_ns <= born_before);
        old.map(|region| Allocation {
            address: region.range.start,
            size: region.range.end - region.range.start,
            stack: region.stack,
            calls: counter.count(region),
        })
        .collect()
    }
}

fn live_blocks(map: &MapMut<'_>, born_before: u64) -> Result<Vec<Allocation>> {
    let batches = map
        .lookup_batch(BATCH, MapFlags::ANY, MapFlags::ANY)
        .context("failed to read the live blocks")?;
    let mut allocations = Vec::new();
    for (key, value) in batches {
        let address = u64::from_ne_bytes(key[..].try_into().context("a key is not an address")?);
        let block: &block = shared::view(&value)?;
        if block.time_ns <= born_before {
            allocations.push(Allocation {
                address,
                size: block.size,
                stack: block.stack,
                calls: 1,
            });
        }
    }
    Ok(allocations)
}

fn read_totals(map: &MapMut<'_>) -> Result<Totals> {
    let batches = map
        .lookup_batch(BATCH, MapFlags::ANY, MapFlags::ANY)
        .context("failed to read the totals")?;
    let mut totals = Totals::new();
    for (key, value) in batches {
        let stack = u64::from_ne_bytes(key[..].try_into().context("a key is not a stack id")?);
        let total: &total = shared::view(&value)?;
        totals.insert(
            stack,
            Total {
                bytes: total.bytes,
                allocations: total.count,
            },
        );
    }
    Ok(totals)
}
