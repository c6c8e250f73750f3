//! Kernel mode: memory that the kernel allocated and has not freed, by kernel stack or slab cache.
//!
//! Hooks: the tracepoints of the slab, page and per-CPU allocators (`bpf/memleak_kernel.bpf.c`),
//! whichever are asked for ([`probes`]). Blocks are kept in a BPF map; a report adds them up by
//! stack, as the other mode's, or by slab cache ([`caches`]).

pub(crate) mod args;
mod caches;
mod probes;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapMut};
use memtools::clock::{self, Clock};
use memtools::folded::{Line, Part};
use memtools::output::Output;
use memtools::poll::Poller;
use memtools::stack::Stacks;
use memtools::symbolize::{self, KernelNames};
use memtools::{attach, kernel, shared, text};

use self::bpf::types::{block, cache, kind as Kind, total};
use self::caches::{CacheRow, Slabinfo};
use self::probes::Attached;
use crate::args::Args;
use crate::report::{
    self, Ages, Allocation, Entry, Group, Groups, Head, History, Path, Totals, View,
};
use crate::tracer::sums_of;

memtools::skeleton!("memleak_kernel", plain: [block, cache, total, turn, filter]);

/// Age in milliseconds below which a block is left out, unless --older says otherwise.
const DEFAULT_OLDER: u64 = 500;
/// Entries read from a map at once.
const BATCH: u32 = 16384;

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    kernel::preflight()?;
    attach::capture_log(args.verbose);
    let mut poller = Poller::new()?;
    let filter = args::filter(args).resolve(None)?;
    let slabinfo = args.kernel.by_cache.then(Slabinfo::read);
    eprintln!("Attaching to kernel allocators, Ctrl+C to quit.");
    let attached = probes::start(args, &filter, args.kernel.kinds())?;

    let mut tracer = Tracer {
        attached: &attached,
        stacks: Stacks::new(&attached.skel.maps.stacks),
        names: KernelNames::default(),
        slabinfo: slabinfo.unwrap_or_default(),
        history: History::default(),
        clock: Clock::new(),
        output: Output::new(args.format()),
        args,
    };
    let interval = Duration::from_secs(args.interval);
    poller.tick_every(interval)?;
    let mut reports_left = args.count;
    loop {
        let wake = poller.wait(None)?;
        if wake.stop {
            tracer.report()?;
            break;
        }
        if wake.tick {
            reports_left = reports_left.map(|left| left - 1);
            let last = reports_left == Some(0);
            if last || !args.folded {
                tracer.report()?;
            }
            if last {
                break;
            }
            // What is younger than --older is left out, so reports are a whole interval apart.
            poller.tick_every(interval)?;
        }
    }
    attach::detach(attached.links);
    Ok(ExitCode::SUCCESS)
}

/// What is printed of the trace.
struct Tracer<'a> {
    attached: &'a Attached,
    stacks: Stacks<'a, MapMut<'static>>,
    names: KernelNames,
    /// As it was when the trace began.
    slabinfo: Slabinfo,
    history: History,
    clock: Clock,
    output: Output,
    args: &'a Args,
}

impl Tracer<'_> {
    /// Prints what is outstanding now.
    fn report(&mut self) -> Result<()> {
        let now = clock::monotonic_ns();
        let (totals, mut allocations) = if self.args.combined_only {
            (self.totals()?, Vec::new())
        } else {
            self.outstanding(now)?
        };
        let entries = self.entries(now, &totals, &allocations);
        if self.args.folded {
            for entry in report::largest(entries, self.args.sort, usize::MAX) {
                self.print_folded(entry)?;
            }
        } else {
            self.head(now, &totals)?;
            if self.args.show_allocs {
                allocations
                    .sort_unstable_by_key(|allocation| (allocation.size, allocation.address));
                report::list(&mut self.output, &allocations)?;
            }
            let largest = report::largest(entries, self.args.sort, self.args.top);
            if self.args.kernel.by_cache {
                self.print_caches(&largest)?;
            } else {
                for entry in largest {
                    self.print_stack(entry)?;
                }
            }
        }
        self.history.add(now, totals);
        self.output.flush()?;

        let losses = self.attached.losses()?;
        if losses.any() {
            eprintln!("memleak: {losses}");
        }
        if losses.entries > 0 {
            eprintln!("memleak: blocks have room for more with a larger --max-allocs");
        }
        let unseen = self.attached.unseen_frees();
        if unseen > 0 {
            eprintln!(
                "memleak: {unseen} frees were not seen, of what was then allocated again; others, \
                 of what was not, may be taken for leaks"
            );
        }
        Ok(())
    }

    fn entries(&self, now: u64, totals: &Totals, allocations: &[Allocation]) -> Vec<Entry> {
        let mut ages = if self.args.wants_ages() {
            Ages::of(allocations)
        } else {
            Ages::default()
        };
        let entries = totals.iter().map(|(&path, &total)| Entry {
            path,
            total,
            error_bytes: None,
            age: ages.at(now, path),
            growth: self.history.growth(now, path, total.bytes),
        });
        entries.collect()
    }

    fn head(&mut self, now: u64, totals: &Totals) -> Result<()> {
        let (groups, sum) = sums_of(totals);
        self.output.row(&Head {
            time: self.clock.local(now),
            peak_time: None,
            process: None,
            top: self.args.top,
            view: View::Outstanding,
            groups: if self.args.kernel.by_cache {
                Groups::Caches(groups)
            } else {
                Groups::Stacks(groups)
            },
            bytes: sum.bytes,
            error_bytes: None,
            requested_bytes: Some(sum.requested_bytes),
            allocations: sum.allocations,
            unknown_frees: None,
            double_frees: None,
            unseen_frees: self.attached.unseen_frees(),
            lost: self.attached.losses()?,
        })
    }

    /// The stack's frames, and whether it was cut.
    fn part(&mut self, stack_id: u64) -> Result<Part> {
        let Some(stack) = self.stacks.get(stack_id)? else {
            return Ok(Part::default());
        };
        let frames = self.names.name(&stack);
        Ok(Part {
            frames: symbolize::without_tracer(&frames).to_vec(),
            truncated: stack.end.truncated(None),
        })
    }

    fn print_folded(&mut self, Entry { path, total, .. }: Entry) -> Result<()> {
        let part = self.part(path.stack)?;
        let line = Line {
            comm: "kernel",
            kernel: Some(part),
            weight: total.bytes,
            ..Line::default()
        };
        self.output.raw(|out| line.write(out))
    }

    fn print_stack(&mut self, entry: Entry) -> Result<()> {
        let part = self.part(entry.path.stack)?;
        self.output.row(&Group {
            requested_bytes: Some(entry.total.requested_bytes),
            ..Group::new(&entry, part, self.args)
        })
    }

    fn print_caches(&mut self, largest: &[Entry]) -> Result<()> {
        let now = Slabinfo::read();
        self.output.header(CacheRow::HEADER)?;
        for &Entry {
            path,
            total,
            age,
            growth,
            ..
        } in largest
        {
            let name = self.cache_name(path.stack)?;
            self.output.row(&CacheRow {
                slabinfo: self.slabinfo.change(&now, &name),
                cache: name,
                allocations: total.allocations,
                bytes: total.bytes,
                requested_bytes: total.requested_bytes,
                age,
                growth,
            })?;
        }
        Ok(())
    }

    /// The name of a slab cache, or in brackets what it is instead.
    fn cache_name(&self, address: u64) -> Result<String> {
        let name = match u32::try_from(address).map_or(Kind::KINDS, Kind) {
            Kind::KIND_UNKNOWN => "-",
            Kind::KIND_PAGES => "[pages]",
            Kind::KIND_LARGE => "[kmalloc-large]",
            Kind::KIND_PER_CPU => "[percpu]",
            _ => {
                let caches = &self.attached.skel.maps.caches;
                let value = caches.lookup(&address.to_ne_bytes(), MapFlags::ANY);
                let value = value.context("failed to read a slab cache's name")?;
                return match value {
                    Some(value) => Ok(text::from_c(&shared::view::<cache>(&value)?.name)),
                    None => Ok("-".into()),
                };
            }
        };
        Ok(name.into())
    }

    /// What a block is added up by, in the place of the stack.
    fn path(&self, block: &block) -> Path {
        let by_cache = self.args.kernel.by_cache;
        Path {
            pid: 0,
            stack: if by_cache { block.cache } else { block.stack },
        }
    }

    /// The blocks that are old enough, with their sums.
    fn outstanding(&self, now: u64) -> Result<(Totals, Vec<Allocation>)> {
        let older_ms = self.args.older.unwrap_or(DEFAULT_OLDER);
        let born_before = now.saturating_sub(older_ms.saturating_mul(1_000_000));
        let blocks = &self.attached.skel.maps.blocks;
        let batches = blocks
            .lookup_batch(BATCH, MapFlags::ANY, MapFlags::ANY)
            .context("failed to read the live blocks")?;
        let (mut totals, mut allocations) = (Totals::new(), Vec::new());
        for (key, value) in batches {
            let block: &block = shared::view(&value)?;
            if block.time_ns > born_before {
                continue;
            }
            let path = self.path(block);
            let total = totals.entry(path).or_default();
            total.allocations += 1;
            total.bytes += u64::from(block.allocated);
            total.requested_bytes += u64::from(block.requested);
            allocations.push(Allocation {
                pid: path.pid,
                address: u64::from_ne_bytes(key[..].try_into().context("a key is no address")?),
                size: block.allocated.into(),
                stack: path.stack,
                time_ns: block.time_ns,
                calls: 1,
                level: 0,
            });
        }
        Ok((totals, allocations))
    }

    /// The sums that were kept in the kernel.
    fn totals(&self) -> Result<Totals> {
        let totals = &self.attached.skel.maps.totals;
        let batches = totals
            .lookup_batch(BATCH, MapFlags::ANY, MapFlags::ANY)
            .context("failed to read the totals")?;
        let mut totals = Totals::new();
        for (key, value) in batches {
            let stack = u64::from_ne_bytes(key[..].try_into().context("a key is no number")?);
            let value: &total = shared::view(&value)?;
            let total = totals.entry(Path { pid: 0, stack }).or_default();
            total.bytes = value.allocated;
            total.allocations = value.count;
            total.requested_bytes = value.requested;
        }
        Ok(totals)
    }
}
