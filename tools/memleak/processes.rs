//! The state of a trace, and what is printed of it.

mod renewal;
mod served;

use std::collections::{HashMap, HashSet};
use std::ptr;
use std::time::Instant;

use anyhow::{Context, Result};
use libbpf_rs::MapMut;
use libbpf_rs::skel::Skel;
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
use memtools::process::filter::Filter;
use memtools::process::proc::Process;
use memtools::run::losses::Losses;
use memtools::serve::trend::Trends;
use memtools::stacks::named::{NamedStack, StackIds};
use memtools::stacks::symbolize::Symbolizer;
use memtools::stacks::table::Stacks;

use crate::args::{Args, Mode};
use crate::bpf::Loaded;
use crate::bpf::types::{event, event_kind as Kind, peak, total, total_key};
use crate::difference::Difference;
use crate::ended::{End, Ended, Ends};
use crate::live::LiveBlocks;
use crate::probes::{self, Attached};
use crate::regions::{CallCounter, Regions};
use crate::rows::{self, Call, Freed, Group, Groups, Head, ProcessName, Step, UnknownFrees};
use crate::sampling::{self, Sampling};
use crate::sums::{self, Ages, Allocation, Entry, History, Path, Total, Totals};
use crate::target::Target;
use crate::whole::Whole;
use renewal::{MORE_STACKS, Renewal};

/// How often at most to read the totals, which are those of a peak if no higher one comes meanwhile.
const PEAK_TRIES: usize = 8;

/// Age in milliseconds below which a block is left out, unless --older says otherwise.
const DEFAULT_OLDER: u64 = 500;

pub(crate) struct Tracer<'a> {
    skel: &'a Loaded,
    filter: &'a Filter,
    args: &'a Args,
    /// Whether rows say which process they are of.
    several: bool,
    /// The processes that were named and still run.
    named: HashSet<u32>,
    /// Names by process.
    names: HashMap<u32, String>,
    /// The ends of processes' memory whose blocks are still to be taken out of the kernel's maps.
    ends: HashMap<u32, Ends>,
    /// What those had that have exited.
    ended: Ended,
    blocks: LiveBlocks<'a>,
    stacks: Stacks<'a, MapMut<'static>>,
    renewal: Renewal,
    regions: HashMap<u32, Regions>,
    /// How often a process has called exec, as the kernel counts.
    execs: HashMap<u32, u64>,
    /// What --mode alloc has seen mapped.
    mapped: Totals,
    /// The stacks that freed a block twice.
    told_of: HashSet<Path>,
    history: History,
    /// How stacks have grown, for clients of --serve.
    trends: Trends,
    pub(crate) symbolizer: Symbolizer,
    clock: Clock,
    pub(crate) output: Output,
    pub(crate) exports: Exports,
    pub(crate) difference: Option<Difference>,
    page_bytes: u64,
}

impl<'a> Tracer<'a> {
    pub(crate) fn new(
        attached: &'a Attached,
        target: &'a Target,
        symbolizer: Symbolizer,
        output: Output,
        args: &'a Args,
        mut exports: Exports,
        difference: Option<Difference>,
    ) -> Result<Self> {
        exports.begin();
        let skel = &attached.skel;
        let processes = target.processes.iter().map(|traced| &traced.process);
        Ok(Self {
            skel,
            filter: &target.filter,
            args,
            several: target.is_several(),
            named: target.watched().map(Process::pid).collect(),
            ends: HashMap::new(),
            ended: Ended::default(),
            names: processes
                .map(|process| (process.pid(), process.comm()))
                .collect(),
            blocks: LiveBlocks::new(attached),
            stacks: Stacks::new(memtools::stack_maps!(skel), args.max_stacks())?,
            renewal: Renewal::default(),
            regions: HashMap::new(),
            execs: HashMap::new(),
            mapped: Totals::new(),
            told_of: HashSet::new(),
            history: History::default(),
            trends: Trends::default(),
            symbolizer,
            clock: Clock::new(),
            output,
            exports,
            difference,
            page_bytes: kernel_support::page_bytes()?,
        })
    }

    /// Follows mappings and the ends of processes, and prints the lines of --trace.
    pub(crate) fn take(&mut self, events: impl Iterator<Item = event>) -> Result<()> {
        for event in events {
            let step = self.follow(&event)?;
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
        self.output.flush()
    }

    /// Makes room for blocks and stacks before it is needed.
    pub(crate) fn make_room(&mut self, events: &Events<event>) -> Result<()> {
        if self.wants_stacks_renewed()? {
            self.renew_stacks(events)?;
        }
        let bss = self.skel.maps.bss_data.as_deref();
        let blocks = bss.map_or(0, |bss| bss.overflow_blocks);
        if let Some(more) = self.blocks.make_room(blocks)?
            && self.args.verbose
        {
            eprintln!("memleak: made room for {more} blocks more");
        }
        Ok(())
    }

    fn follow(&mut self, event: &event) -> Result<Option<Step>> {
        let &event {
            pid,
            tid,
            address: start,
            size,
            time_ns,
            stack,
            ..
        } = event;
        let page_bytes = self.page_bytes;
        let regions = self
            .regions
            .entry(pid)
            .or_insert_with(|| Regions::new(page_bytes));
        Ok(match event.kind {
            Kind::EVENT_MAP if self.args.mode == Mode::Alloc => {
                let total = self.mapped.entry(Path { pid, stack }).or_default();
                total.bytes += size;
                total.allocations += 1;
                Some(Step::AllocExited)
            }
            Kind::EVENT_MAP => {
                regions.map(start, size, time_ns, stack, event.level);
                Some(Step::AllocExited)
            }
            Kind::EVENT_MAP_IGNORED => {
                regions.map_ignored(start, size);
                None
            }
            // The allocator's own mappings are none of ours.
            Kind::EVENT_UNMAP => regions.unmap(tid, start, size).then_some(Step::FreeEntered),
            Kind::EVENT_UNMAP_FAILED => {
                regions.unmap_failed(tid);
                None
            }
            Kind::EVENT_EXEC => {
                self.names.insert(pid, text::from_c(&event.comm));
                self.execs.insert(pid, size);
                self.end(pid, time_ns, End::Exec);
                None
            }
            Kind::EVENT_EXIT => {
                // With the last one that was named the trace ends, and its memory is reported.
                let last = self.named.remove(&pid) && self.named.is_empty();
                if !last {
                    let comm = || text::from_c(&event.comm);
                    self.names.entry(pid).or_insert_with(comm);
                    self.end(pid, time_ns, End::Exit);
                }
                None
            }
            Kind::EVENT_FREED_TWICE => {
                self.freed_twice(event)?;
                None
            }
            // Whoever waited for it has been woken.
            Kind::EVENT_CROWDED => None,
            Kind::EVENT_ALLOC_ENTER => Some(Step::AllocEntered),
            Kind::EVENT_ALLOC_EXIT => Some(Step::AllocExited),
            _ => Some(Step::FreeEntered),
        })
    }

    /// A process's memory has ended.
    fn end(&mut self, pid: u32, time_ns: u64, end: End) {
        if let Some(regions) = self.regions.remove(&pid)
            && end == End::Exit
        {
            let mut left = allocations_of(pid, &regions);
            left.retain(|region| region.time_ns.saturating_add(self.older_at_end()) <= time_ns);
            self.ended.add(&left, Sampling::of(self.args));
        }
        self.ends.entry(pid).or_default().add(time_ns, end);
    }

    /// How old a block has to be at its process's end, in nanoseconds. It will not be freed any more,
    /// however young it is; so only the option leaves any out.
    fn older_at_end(&self) -> u64 {
        let older_ms = self.args.older.unwrap_or(0);
        older_ms.saturating_mul(1_000_000)
    }

    /// Tells of each stack once; the report has the count.
    fn freed_twice(&mut self, event: &event) -> Result<()> {
        let path = Path {
            pid: event.pid,
            stack: event.stack,
        };
        if !self.told_of.insert(path) {
            return Ok(());
        }
        self.symbolizer.refresh();
        let stack = self.named(path)?;
        let freed = Freed {
            time: self.clock.local(event.time_ns),
            process: Some(self.process(event.pid)),
            address: event.address,
            stack,
        };
        if self.args.json {
            self.output.row(&freed)
        } else {
            eprint!("{freed}");
            Ok(())
        }
    }

    /// Prints what is outstanding now. Once the process has exited its age no longer matters:
    /// nothing of it will be freed.
    pub(crate) fn report(&mut self, exited: bool) -> Result<()> {
        let now = clock::monotonic_ns();
        self.symbolizer.refresh();
        let Found {
            totals,
            mut allocations,
            errors,
        } = self.find(now, exited)?;
        // With --folded there is one report, of all.
        let shown = match self.args.mode {
            Mode::Alloc | Mode::Churn if !self.args.folded => {
                sums::since(self.history.last(), &totals)
            }
            _ => totals.clone(),
        };
        let sums = sums::in_all(&shown);
        let error_bytes = errors
            .as_ref()
            .map(|errors| sampling::Error::sum(errors.values()).bytes());
        let bytes_by_stack: Vec<(u64, u64)> = shown
            .iter()
            .map(|(path, total)| (path.stack, total.bytes))
            .collect();
        let mut entries = self.entries(now, shown, &allocations);
        for entry in &mut entries {
            let error = errors.as_ref().and_then(|errors| errors.get(&entry.path));
            entry.error_bytes = error.map(|error| error.bytes());
        }
        if self.args.folded {
            self.folded(entries)?;
        } else {
            self.head(now, sums, error_bytes)?;
            if self.args.show_allocs {
                allocations
                    .sort_unstable_by_key(|allocation| (allocation.size, allocation.address));
                rows::list(&mut self.output, &allocations)?;
            }
            let largest = sums::largest(entries, self.args.sort, self.args.top);
            let whole = Whole {
                bytes: sums.1.bytes,
                error_bytes,
                allocations: sums.1.allocations,
                groups: sums.0,
                shown: largest.len(),
                ..Whole::default()
            };
            for entry in largest {
                self.group(entry)?;
            }
            if !self.args.json {
                self.whole(whole, &bytes_by_stack)?;
            }
            if self.args.extended && self.args.records_all() {
                self.unknown_frees()?;
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
            eprintln!(
                "memleak: blocks have room for more with a larger --mem-limit or --max-allocs"
            );
        }
        if losses.stacks > 0 {
            eprintln!("memleak: stacks were lost: {MORE_STACKS}");
        }
        if let Some(rest) = self.ended.rest() {
            eprintln!(
                "memleak: {} bytes in {} allocations of exited processes are not shown: of so many \
                 processes and stacks only those with most are kept",
                rest.bytes, rest.allocations
            );
        }
        Ok(())
    }

    /// All that there is at this time, from which a report chooses.
    fn find(&mut self, now: u64, exited: bool) -> Result<Found> {
        let (mut totals, mut allocations) = match self.args.mode {
            Mode::Leak => self.outstanding(now, exited)?,
            Mode::Peak => (self.read_peak()?, Vec::new()),
            _ => {
                self.drop_ended()?;
                (self.read_totals()?, Vec::new())
            }
        };
        sums::merge_lost(&mut self.stacks, &mut totals, &mut allocations)?;
        let mut errors = None;
        if let Some(sampling) = Sampling::of(self.args) {
            let estimate = sampling.estimate(&allocations);
            totals = estimate.0;
            errors = Some(estimate.1);
        }
        if self.args.mode == Mode::Leak {
            self.ended.add_to(&mut totals, errors.as_mut());
            sums::merge_lost(&mut self.stacks, &mut totals, &mut [])?;
        }
        Ok(Found {
            totals,
            allocations,
            errors,
        })
    }

    fn outstanding(&mut self, now: u64, exited: bool) -> Result<(Totals, Vec<Allocation>)> {
        let default_older = if exited || self.args.combined_only {
            0
        } else {
            DEFAULT_OLDER
        };
        let older_ms = self.args.older.unwrap_or(default_older);
        let born_before = now.saturating_sub(older_ms.saturating_mul(1_000_000));

        let (mut totals, mut allocations) = (Totals::new(), Vec::new());
        if self.args.combined_only {
            self.drop_ended()?;
            totals = self.read_totals()?;
        } else {
            let start = Instant::now();
            let blocks = self.read_blocks()?;
            if self.args.verbose {
                let time = start.elapsed();
                eprintln!("memleak: {} blocks read in {time:.1?}", blocks.len());
            }
            allocations = blocks;
        }
        allocations.extend(self.live_regions());
        allocations.retain(|allocation| allocation.time_ns <= born_before);
        sums::add_up(&mut totals, &allocations);
        Ok((totals, allocations))
    }

    /// Takes the blocks of memory that has ended out of the kernel's maps, where totals are shown.
    fn drop_ended(&mut self) -> Result<()> {
        if !self.ends.is_empty() {
            self.read_blocks()?;
        }
        Ok(())
    }

    /// The blocks that are live. Those of memory that has ended are taken out of the kernel's maps,
    /// and what exited processes left is kept here.
    fn read_blocks(&mut self) -> Result<Vec<Allocation>> {
        let (blocks, left) = self.blocks.read(&self.ends, self.older_at_end())?;
        self.ends.clear();
        // All other reports are of the kernel's totals, which have these already.
        if self.args.mode == Mode::Leak && !self.args.combined_only {
            self.ended.add(&left, Sampling::of(self.args));
        }
        Ok(blocks)
    }

    fn entries(&self, now: u64, totals: Totals, allocations: &[Allocation]) -> Vec<Entry> {
        let mut ages = if self.args.wants_ages() {
            Ages::of(allocations)
        } else {
            Ages::default()
        };
        let entries = totals.into_iter().map(|(path, total)| Entry {
            path,
            total,
            error_bytes: None,
            age: ages.at(now, path),
            growth: match self.args.mode {
                Mode::Leak => self.history.growth(now, path, total.bytes),
                _ => None,
            },
        });
        entries.collect()
    }

    fn head(
        &mut self,
        now: u64,
        (stacks, total): (usize, Total),
        error_bytes: Option<u64>,
    ) -> Result<()> {
        let only = self.names.keys().next().copied();
        let process = only.filter(|_| !self.several).map(|pid| self.process(pid));
        let frees = self.skel.maps.bss_data.as_deref().map(|bss| &bss.frees);
        let peak = self.skel.maps.bss_data.as_deref().map(|bss| bss.peak);
        let peak = peak.filter(|peak| self.args.mode == Mode::Peak && peak.number > 0);
        self.output.row(&Head {
            time: self.clock.local(now),
            process,
            peak_time: peak.map(|peak| self.clock.local(peak.time_ns)),
            top: self.args.top,
            view: self.args.view(),
            groups: Groups::Stacks(stacks),
            bytes: total.bytes,
            error_bytes,
            requested_bytes: None,
            allocations: total.allocations,
            unknown_frees: frees
                .filter(|_| self.args.records_all())
                .map(|frees| frees.unknown),
            double_frees: frees
                .filter(|_| probes::notices_double_frees(self.skel, self.args))
                .map(|frees| frees.twice),
            unseen_frees: frees.map_or(0, |frees| frees.replaced),
            lost: self.losses()?,
        })
    }

    /// What could not be recorded, or kept.
    fn losses(&self) -> Result<Losses> {
        let lost = Losses::of(self.skel.object(), self.filter)?;
        let held = memtools::unwind_holds!(self.skel).skipped_runs();
        Ok(lost.and_stacks(self.stacks.lost()).and_skipped(held))
    }

    /// Prints the sums that a text report ends with. JSON has them at the head.
    fn whole(&mut self, mut whole: Whole, bytes_by_stack: &[(u64, u64)]) -> Result<()> {
        for &(stack, bytes) in bytes_by_stack {
            whole.note_stack(self.stacks.get(stack)?.as_deref(), bytes);
        }
        if self.args.mode == Mode::Leak && !self.several {
            let pid = self.names.keys().next().copied();
            let process = pid.and_then(|pid| Process::open(pid).ok());
            whole.resident_bytes = process.and_then(|process| process.resident_bytes());
        }
        self.output.raw(|out| whole.write("stack", out))
    }

    fn folded(&mut self, entries: Vec<Entry>) -> Result<()> {
        for Entry { path, total, .. } in sums::largest(entries, self.args.sort, usize::MAX) {
            let stack = self.named(path)?;
            let line = Folded::new(&stack);
            self.output.raw(|out| line.write(total.bytes, out))?;
        }
        Ok(())
    }

    /// Writes all stacks into the files that are asked for, and prints how they differ from an earlier run's. With
    /// --mode alloc and churn that is all that came since the start.
    fn export(&mut self, totals: &Totals) -> Result<()> {
        if !self.exports.any() && self.difference.is_none() {
            return Ok(());
        }
        let samples = self.samples(totals)?;
        let subject = sums::subject(self.args.view(), self.args);
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
        let samples = totals.iter().map(|(&path, &total)| {
            progress.step();
            let stack = self.named(path)?;
            Ok(total.sample(stack))
        });
        samples.collect()
    }

    fn group(&mut self, entry: Entry) -> Result<()> {
        let Path { pid, .. } = entry.path;
        let stack = self.named(entry.path)?;
        let process = self.several.then(|| self.process(pid));
        self.output.row(&Group {
            process,
            ..Group::new(&entry, stack, self.args)
        })
    }

    /// Who has freed what was not recorded, most often last.
    fn unknown_frees(&mut self) -> Result<()> {
        let mut counts: HashMap<Path, u64> = HashMap::new();
        map_batch::read(&self.skel.maps.unknown_frees, |key, count| {
            let &total_key { pid, stack, .. } = types::view(key)?;
            *counts.entry(Path { pid, stack }).or_default() += types::view::<u64>(count)?;
            Ok(())
        })?;
        let mut counts: Vec<(Path, u64)> = counts.into_iter().collect();
        counts.sort_unstable_by_key(|&(Path { pid, stack }, frees)| (frees, pid, stack));
        let skipped = counts.len().saturating_sub(self.args.top);
        for (path, frees) in counts.into_iter().skip(skipped) {
            let stack = self.named(path)?;
            let process = self.several.then(|| self.process(path.pid));
            self.output.row(&UnknownFrees {
                frees,
                process,
                stack,
            })?;
        }
        Ok(())
    }

    /// A path's stack with its names.
    fn named(&mut self, path: Path) -> Result<NamedStack> {
        let ProcessName { pid, comm } = self.process(path.pid);
        let ids = StackIds {
            pid,
            comm: &comm,
            user: Some(path.stack),
            kernel: None,
        };
        NamedStack::read(&ids, &mut self.stacks, &mut self.symbolizer)
    }

    fn process(&mut self, pid: u32) -> ProcessName {
        // One that was forked, and has called no exec.
        let look = || Process::open(pid).map_or_else(|_| String::new(), |process| process.comm());
        let comm = self.names.entry(pid).or_insert_with(look).clone();
        ProcessName { pid, comm }
    }

    fn live_regions(&self) -> Vec<Allocation> {
        let regions = self.regions.iter();
        regions
            .flat_map(|(&pid, regions)| allocations_of(pid, regions))
            .collect()
    }

    /// What each stack had when most was outstanding.
    fn read_peak(&self) -> Result<Totals> {
        let bss = self.skel.maps.bss_data.as_deref();
        let bss = bss.context("the BPF object has no variables")?;
        // SAFETY: a reference, and any bytes are a peak; volatile, for the programs write there.
        let peak = || unsafe { ptr::from_ref(&bss.peak).read_volatile() };
        let mut tries = PEAK_TRIES;
        let (peak, totals) = loop {
            let before = peak();
            let totals = self.totals_at(&before)?;
            tries -= 1;
            if peak().number == before.number || tries == 0 {
                break (before, totals);
            }
        };
        let (_, sum) = sums::in_all(&totals);
        if sum.bytes != peak.bytes {
            eprintln!(
                "memleak: {} bytes were outstanding, but the stacks have {}: threads allocated \
                 at the same time, or there was more meanwhile",
                peak.bytes, sum.bytes
            );
        }
        Ok(totals)
    }

    fn totals_at(&self, peak: &peak) -> Result<Totals> {
        let mut totals = Totals::new();
        map_batch::read(&self.skel.maps.totals, |key, value| {
            let (key, value): (&total_key, &total) = (types::view(key)?, types::view(value)?);
            let (bytes, allocations) = if value.peak == peak.number {
                (value.bytes_at_peak, value.count_at_peak)
            } else {
                (value.bytes, value.count)
            };
            // All else is of another program, before or after an exec.
            if u64::from(key.execs) == peak.execs {
                let path = Path {
                    pid: key.pid,
                    stack: key.stack,
                };
                let total = totals.entry(path).or_default();
                total.bytes += bytes;
                total.allocations += allocations;
            }
            Ok(())
        })?;
        Ok(totals)
    }

    /// What the kernel has added up, and what of --mode alloc was mapped.
    fn read_totals(&self) -> Result<Totals> {
        let mut totals = self.mapped.clone();
        map_batch::read(&self.skel.maps.totals, |key, value| {
            let (key, value): (&total_key, &total) = (types::view(key)?, types::view(value)?);
            let &total_key { pid, stack, execs } = key;
            // What another program had, before the process called exec, it has no more.
            let current = self
                .execs
                .get(&pid)
                .is_none_or(|&now| u64::from(execs) >= now);
            if self.args.combined_only && !current {
                return Ok(());
            }
            let path = Path { pid, stack };
            let total = totals.entry(path).or_default();
            total.bytes += value.bytes;
            total.allocations += value.count;
            Ok(())
        })?;
        Ok(totals)
    }
}

/// What a report is made of.
struct Found {
    totals: Totals,
    /// What is outstanding, if it is known block by block.
    allocations: Vec<Allocation>,
    /// How far off the totals may be, if they are estimates.
    errors: Option<HashMap<Path, sampling::Error>>,
}

/// A process's mappings as allocations.
fn allocations_of(pid: u32, regions: &Regions) -> Vec<Allocation> {
    let mut counter = CallCounter::default();
    let allocations = regions.iter().map(|region| Allocation {
        pid,
        address: region.range.start,
        size: region.range.end - region.range.start,
        stack: region.stack,
        time_ns: region.time_ns,
        calls: counter.count(region),
        level: region.level,
    });
    allocations.collect()
}
