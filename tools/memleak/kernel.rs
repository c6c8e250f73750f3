//! Kernel mode: memory that the kernel allocated and has not freed, by kernel stack or slab cache.
//!
//! Hooks: the tracepoints of the slab, page and per-CPU allocators (`bpf/memleak_kernel.bpf.c`),
//! whichever are asked for ([`probes`]). Blocks are kept in a BPF map; a report adds them up by
//! stack, as the other mode's, or by slab cache ([`caches`]).

pub(crate) mod args;
mod caches;
mod probes;

use std::collections::HashSet;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use libbpf_rs::skel::Skel;
use libbpf_rs::{MapCore, MapFlags, MapMut};
use memtools::bpf::attach;
use memtools::bpf::kernel_support;
use memtools::bpf::map_batch;
use memtools::bpf::ring::Events;
use memtools::bpf::types;
use memtools::export::files::Exports;
use memtools::export::folded::Folded;
use memtools::export::profile::Sample;
use memtools::print::clock::{self, Clock};
use memtools::print::output::Output;
use memtools::print::progress::Progress;
use memtools::print::text;
use memtools::process::filter::Tasks;
use memtools::run::cli::UsageError;
use memtools::run::losses::{self, Losses};
use memtools::run::privileges;
use memtools::serve::report::Report;
use memtools::serve::server::Server;
use memtools::serve::trend::Trends;
use memtools::stacks::named::{NamedStack, StackIds};
use memtools::stacks::symbolize::KernelNames;
use memtools::stacks::table::Stacks;

use self::bpf::types::{block, cache, kind as Kind, total};
use self::caches::{CacheRow, Slabinfo};
use self::probes::Attached;
use crate::args::Args;
use crate::difference::{self, Difference};
use crate::rows::{self, Group, Groups, Head};
use crate::serve::{self, Frees, Numbers};
use crate::sums::{self, Ages, Allocation, Entry, History, Path, Totals, View};
use crate::whole::Whole;

memtools::skeleton!("memleak_kernel", MemleakKernelSkelBuilder, stacks: kernel, plain: [block, cache, program_pair, total]);

/// Age in milliseconds below which a block is left out, unless --older says otherwise.
const DEFAULT_OLDER: u64 = 500;

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    kernel_support::preflight()?;
    attach::capture_log(args.verbose);
    let exports = args.exports()?;
    let difference = Difference::of(args, View::Outstanding)?;
    let listener = args.serve.listen()?;
    let (mut poller, output) = args.start()?;
    privileges::keep_what_tracing_takes(&[])?;
    let filter = args::filter(args).resolve(None, Tasks::All)?;
    check_cache(args.kernel.cache.as_deref())?;
    let slabinfo = args.kernel.by_cache.then(Slabinfo::read);
    eprintln!("Attaching to kernel allocators, Ctrl+C to quit.");
    let server = listener.map(Server::start).transpose()?;
    server.as_ref().inspect(|server| serve::tell(server));
    let attached = probes::start(args, &filter, args.kernel.kinds())?;

    let mut tracer = Tracer {
        attached: &attached,
        stacks: Stacks::new(memtools::stack_maps!(attached.skel), args.max_stacks())?,
        names: KernelNames::default(),
        slabinfo: slabinfo.unwrap_or_default(),
        history: History::default(),
        trends: Trends::default(),
        clock: Clock::new(),
        output,
        exports,
        difference,
        args,
    };
    tracer.exports.begin();
    let requests: Events<u32> = Events::new(&attached.skel.maps.room_requests)?;
    poller.watch_room(&requests);
    if let Some(server) = &server {
        poller.watch_clients(server);
    }
    let interval = args.interval;
    poller.tick_every(interval)?;
    let mut reports_left = args.count;
    loop {
        let wake = poller.wait(None)?;
        if wake.room {
            requests.drain()?;
            tracer.renew_stacks()?;
        }
        if wake.stop {
            tracer.report()?;
            break;
        }
        if wake.report {
            tracer.report()?;
        }
        if let Some(server) = server.as_ref().filter(|_| wake.client) {
            server.answer(|| tracer.served())?;
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
    drop(server);
    losses::tell_own_events("memleak", attached.skel.object(), &mut tracer.output)?;
    let (exports, difference) = (tracer.exports, tracer.difference);
    attach::detach(attached.links);
    exports.finish()?;
    Ok(difference::status(difference, None))
}

/// What is printed of the trace.
struct Tracer<'a> {
    attached: &'a Attached,
    stacks: Stacks<'a, MapMut<'static>>,
    names: KernelNames,
    /// /proc/slabinfo as it was when the trace began.
    slabinfo: Slabinfo,
    history: History,
    /// How stacks have grown, for clients of --serve.
    trends: Trends,
    clock: Clock,
    output: Output,
    exports: Exports,
    difference: Option<Difference>,
    args: &'a Args,
}

/// Refuses a slab cache that there is none of: nothing would ever be shown.
fn check_cache(cache: Option<&str>) -> Result<()> {
    let caches = Slabinfo::read();
    match cache {
        Some(cache) if !caches.is_empty() && !caches.has(cache) => {
            let cache = text::escape(cache);
            Err(UsageError(format!(
                "there is no slab cache {cache}; /proc/slabinfo lists them. Caches that are alike are \
                 one, as /sys/kernel/slab shows, with the first one's name"
            ))
            .into())
        }
        _ => Ok(()),
    }
}

impl Tracer<'_> {
    /// Prints what is outstanding now.
    fn report(&mut self) -> Result<()> {
        let now = clock::monotonic_ns();
        let (totals, mut allocations) = self.find(now)?;
        let entries = self.entries(now, &totals, &allocations);
        if self.args.folded {
            for entry in sums::largest(entries, self.args.sort, usize::MAX) {
                self.print_folded(entry)?;
            }
        } else {
            self.head(now, &totals)?;
            if self.args.show_allocs {
                allocations
                    .sort_unstable_by_key(|allocation| (allocation.size, allocation.address));
                rows::list(&mut self.output, &allocations)?;
            }
            let largest = sums::largest(entries, self.args.sort, self.args.top);
            let shown = largest.len();
            if self.args.kernel.by_cache {
                self.print_caches(&largest)?;
            } else {
                for entry in largest {
                    self.print_stack(entry)?;
                }
            }
            if !self.args.json {
                self.print_whole(&totals, shown)?;
            }
        }
        self.export(&totals)?;
        self.look(&totals);
        self.history.add(now, totals);
        self.output.flush()?;

        let losses = self.losses()?;
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

    /// All that there is at this time, from which a report chooses.
    fn find(&mut self, now: u64) -> Result<(Totals, Vec<Allocation>)> {
        let (mut totals, mut allocations) = if self.args.combined_only {
            (self.totals()?, Vec::new())
        } else {
            self.outstanding(now)?
        };
        if !self.args.kernel.by_cache {
            sums::merge_lost(&mut self.stacks, &mut totals, &mut allocations)?;
        }
        Ok((totals, allocations))
    }

    /// The report of the moment, for clients of --serve. The next one that is printed does not know
    /// of it.
    fn served(&mut self) -> Result<Report> {
        let (totals, _) = self.find(clock::monotonic_ns())?;
        self.look(&totals);
        let samples = self.samples(&totals)?;
        let subject = sums::subject(View::Outstanding, self.args);
        let profile = self.exports.profile(subject, samples);
        let lost = self.losses()?;
        let (stacks, sum) = sums::in_all(&totals);
        let numbers = Numbers {
            view: View::Outstanding,
            sum,
            stacks,
            frees: Frees {
                unseen: self.attached.unseen_frees(),
                ..Frees::default()
            },
            hits: None,
            lost,
        };
        let families = numbers.families(&profile);
        let keys: Vec<_> = totals.keys().map(|path| serve::key(*path)).collect();
        let lost = lost.any().then(|| lost.to_string());
        Ok(Report::new(&profile, &keys, &self.trends, families, lost))
    }

    /// Takes a look at how stacks grow, if there are clients to show that to.
    fn look(&mut self, totals: &Totals) {
        if self.args.serve.serve.is_some() {
            self.trends.look(Instant::now(), serve::bytes(totals));
        }
    }

    /// What could not be recorded, or kept.
    fn losses(&self) -> Result<Losses> {
        Ok(self.attached.losses()?.and_stacks(self.stacks.lost()))
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
        let (groups, sum) = sums::in_all(totals);
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
            lost: self.losses()?,
        })
    }

    /// The kernel stack with its names.
    fn named(&mut self, stack: u64) -> Result<NamedStack> {
        let ids = StackIds {
            comm: "kernel",
            kernel: Some(stack),
            ..StackIds::default()
        };
        NamedStack::read(&ids, &mut self.stacks, &mut self.names)
    }

    fn print_folded(&mut self, Entry { path, total, .. }: Entry) -> Result<()> {
        let stack = self.named(path.stack)?;
        let line = Folded::new(&stack);
        self.output.raw(|out| line.write(total.bytes, out))
    }

    /// Writes all stacks into the files that are asked for, and prints how they differ from an earlier run's.
    fn export(&mut self, totals: &Totals) -> Result<()> {
        if !self.exports.any() && self.difference.is_none() {
            return Ok(());
        }
        let samples = self.samples(totals)?;
        let subject = sums::subject(View::Outstanding, self.args);
        let profile = self.exports.profile(subject, samples);
        self.exports.write_profile(&profile);
        let Some(difference) = &mut self.difference else {
            return Ok(());
        };
        difference.print(&profile, self.args.top, &mut self.output)
    }

    /// All stacks by name, for other formats.
    fn samples(&mut self, totals: &Totals) -> Result<Vec<Sample>> {
        let mut progress = Progress::new("naming stacks", totals.len());
        let samples = totals.iter().map(|(path, total)| {
            progress.step();
            let stack = self.named(path.stack)?;
            Ok(total.sample(stack))
        });
        samples.collect()
    }

    fn print_stack(&mut self, entry: Entry) -> Result<()> {
        let stack = self.named(entry.path.stack)?;
        self.output.row(&Group {
            requested_bytes: Some(entry.total.requested_bytes),
            ..Group::new(&entry, stack, self.args)
        })
    }

    /// Prints the sums that a text report ends with. JSON has them at the head.
    fn print_whole(&mut self, totals: &Totals, shown: usize) -> Result<()> {
        let (groups, sum) = sums::in_all(totals);
        let mut whole = Whole {
            bytes: sum.bytes,
            allocations: sum.allocations,
            groups,
            shown,
            ..Whole::default()
        };
        if self.args.kernel.by_cache {
            return self.output.raw(|out| whole.write("slab cache", out));
        }
        for (path, total) in totals {
            whole.note_stack(self.stacks.get(path.stack)?.as_deref(), total.bytes);
        }
        self.output.raw(|out| whole.write("stack", out))
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
                    Some(value) => Ok(text::from_c(&types::view::<cache>(&value)?.name)),
                    None => Ok("-".into()),
                };
            }
        };
        Ok(name.into())
    }

    /// Has the table of stacks forget whatever no block and no sum refers to.
    fn renew_stacks(&mut self) -> Result<()> {
        if !self.stacks.is_crowded()? {
            return Ok(());
        }
        self.stacks.renew()?;
        let maps = &self.attached.skel.maps;
        let mut referred_to = HashSet::new();
        map_batch::read(&maps.blocks, |_, value| {
            referred_to.insert(types::view::<block>(value)?.stack);
            Ok(())
        })?;
        map_batch::read(&maps.totals, |key, _| {
            referred_to.insert(*types::view::<u64>(key)?);
            Ok(())
        })?;
        self.stacks.keep(referred_to)?;
        self.stacks.forget_read();
        Ok(())
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
        let (mut totals, mut allocations) = (Totals::new(), Vec::new());
        map_batch::read(&self.attached.skel.maps.blocks, |key, value| {
            let block: &block = types::view(value)?;
            if block.time_ns > born_before {
                return Ok(());
            }
            let path = self.path(block);
            let total = totals.entry(path).or_default();
            total.allocations += 1;
            total.bytes += u64::from(block.allocated);
            total.requested_bytes += u64::from(block.requested);
            allocations.push(Allocation {
                pid: path.pid,
                address: *types::view(key)?,
                size: block.allocated.into(),
                stack: path.stack,
                time_ns: block.time_ns,
                calls: 1,
                level: 0,
            });
            Ok(())
        })
        .context("failed to read the live blocks")?;
        Ok((totals, allocations))
    }

    /// The sums that were kept in the kernel.
    fn totals(&self) -> Result<Totals> {
        let mut totals = Totals::new();
        map_batch::read(&self.attached.skel.maps.totals, |key, value| {
            let stack = *types::view(key)?;
            let value: &total = types::view(value)?;
            let total = totals.entry(Path { pid: 0, stack }).or_default();
            total.bytes = value.allocated;
            total.allocations = value.count;
            total.requested_bytes = value.requested;
            Ok(())
        })
        .context("failed to read the totals")?;
        Ok(totals)
    }
}
