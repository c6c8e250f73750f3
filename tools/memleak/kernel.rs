//! Kernel mode: memory that the kernel allocated and has not freed, by kernel stack or slab cache.
//!
//! Hooks: the tracepoints of the slab, page and per-CPU allocators (`bpf/memleak_kernel.bpf.c`), as far as options ask
//! for them ([`probes`]). Blocks are kept in a BPF map. A report adds them up by stack, as reports on processes do, or
//! by slab cache ([`caches`]).

pub(crate) mod args;
mod caches;
mod probes;

use std::collections::HashSet;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::bpf::types::{block, cache, kind as Kind, total};
use self::caches::{CacheRow, Slabinfo};
use self::probes::Attached;
use crate::plan::KernelPlan;
use crate::reporter::Reporter;
use crate::rows::{Group, Groups};
use crate::serve::{self, UnmatchedFrees};
use crate::source::{Flow, HeadContext, ReportData, Source};
use crate::sums::{self, Allocation, Entry, StackKey, Totals};
use anyhow::{Context, Result};
use libbpf_rs::skel::Skel;
use libbpf_rs::{MapCore, MapFlags, MapMut};
use memtools::bpf::attach;
use memtools::bpf::kernel_support;
use memtools::bpf::map_batch;
use memtools::bpf::ring::Events;
use memtools::bpf::types;
use memtools::parse::UsageError;
use memtools::print::output::Output;
use memtools::print::text;
use memtools::process::filter::TaskKind;
use memtools::run::losses::{self, Losses};
use memtools::run::poll::Wake;
use memtools::run::priority;
use memtools::run::privileges;
use memtools::run::target::warn_if_interval_is_pid;
use memtools::stacks::named::{NamedStack, StackIds};
use memtools::stacks::symbolize::KernelNames;
use memtools::stacks::table::{Stack, Stacks};

/// Time between two looks at how full the maps of blocks are. The maps that exist are half full at most when the next one
/// is made: 500,000 blocks fit in between.
const PAUSE: Duration = Duration::from_millis(100);

memtools::skeleton!("memleak_kernel", MemleakKernelSkelBuilder, stacks: kernel, plain: [block, cache, program_pair, total]);

pub(crate) fn run(plan: &KernelPlan) -> Result<ExitCode> {
    kernel_support::preflight()?;
    attach::capture_log(plan.verbose);
    let files = plan.outputs.files(&plan.report)?;
    let listener = plan.outputs.serve.listen()?;
    let (mut poller, output) = plan.outputs.start(&plan.report)?;
    warn_if_interval_is_pid(plan.report.given_interval, &plan.filter.pid);
    privileges::keep_tracing_and(&[])?;
    let filter = plan.filter.resolve(None, TaskKind::All)?;
    check_cache(plan.cache.as_deref())?;
    let slabinfo = plan.by_cache.then(Slabinfo::read);
    memtools::note!("Attaching to kernel allocators, Ctrl+C to quit.");
    let server = listener.map(|listener| serve::start(listener, &plan.memory));
    let server = server.transpose()?;
    priority::raise();
    let attached = probes::start(plan, &filter)?;
    let table_requests = Events::new(&attached.skel.maps.table_requests)?;
    let kernel = Kernel {
        attached: &attached,
        table_requests: &table_requests,
        plan,
        stacks: Stacks::new(
            memtools::stack_maps!(attached.skel),
            plan.memory.max_stacks(),
        )?,
        names: KernelNames::default(),
        slabinfo: slabinfo.unwrap_or_default(),
        look_at: Instant::now(),
        loses: false,
    };
    let mut reporter = Reporter::new(kernel, &plan.report, output, files);

    poller.watch(&table_requests);
    if let Some(server) = &server {
        poller.watch(server);
    }
    reporter.run(&mut poller, server.as_ref())?;

    drop(server);
    losses::report_own_events(attached.skel.object(), &mut reporter.output)?;
    let status = reporter.finish(None, false);
    attach::detach(attached.links);
    status
}

/// Source of reports on the kernel's memory.
struct Kernel<'a> {
    attached: &'a Attached,
    /// Requests of the BPF programs for more capacity in their maps.
    table_requests: &'a Events<'a, u32>,
    plan: &'a KernelPlan,
    stacks: Stacks<'a, MapMut<'static>>,
    names: KernelNames,
    /// Contents of /proc/slabinfo at the beginning of the trace.
    slabinfo: Slabinfo,
    /// Time of the next look at how full the maps of blocks are.
    look_at: Instant,
    /// Whether blocks have been lost.
    loses: bool,
}

/// Refuses a slab cache that does not exist: nothing would ever be shown.
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

impl Source for Kernel<'_> {
    fn handle_events(&mut self, wake: &Wake, _: &mut Output) -> Result<Flow> {
        if wake.is_ready(self.table_requests) {
            self.table_requests.drain()?;
            self.renew_stacks()?;
        }
        if Instant::now() >= self.look_at {
            self.look_at = Instant::now() + PAUSE;
            if let Some(more) = self.attached.add_blocks()?
                && self.plan.verbose
            {
                memtools::message!("added a map for {more} blocks");
            }
            self.report_first_loss()?;
        }
        Ok(Flow::Continue)
    }

    fn deadline(&self) -> Option<Instant> {
        Some(self.look_at)
    }

    fn snapshot(&mut self, now_ns: u64, _: bool) -> Result<ReportData> {
        let (mut totals, mut allocations) = if self.plan.recording.only_totals {
            (self.totals()?, Vec::new())
        } else {
            self.outstanding(now_ns)?
        };
        if !self.plan.by_cache {
            sums::merge_lost(&mut self.stacks, &mut totals, &mut allocations)?;
        }
        Ok(ReportData {
            totals,
            allocations,
            ..ReportData::default()
        })
    }

    fn symbolize(&mut self, key: StackKey) -> Result<NamedStack> {
        let ids = StackIds {
            comm: "kernel",
            kernel: Some(key.stack),
            ..StackIds::default()
        };
        NamedStack::read(&ids, &mut self.stacks, &mut self.names)
    }

    fn stack(&mut self, key: StackKey) -> Result<Option<Arc<Stack>>> {
        self.stacks.get(key.stack)
    }

    fn groups(&self, count: usize) -> Groups {
        if self.plan.by_cache {
            Groups::Caches(count)
        } else {
            Groups::Stacks(count)
        }
    }

    fn heading(&mut self) -> HeadContext {
        HeadContext {
            tells_requested: true,
            frees: UnmatchedFrees {
                unseen: self.attached.unseen_frees(),
                ..UnmatchedFrees::default()
            },
            ..HeadContext::default()
        }
    }

    fn print_groups(&mut self, groups: Vec<Entry>, output: &mut Output) -> Result<()> {
        if self.plan.by_cache {
            return self.print_caches(&groups, output);
        }
        for entry in groups {
            let stack = self.symbolize(entry.key)?;
            let mut group = Group::new(&entry, stack, &self.plan.report);
            group.amount.requested_bytes = Some(entry.total.requested_bytes);
            output.row(&group)?;
        }
        Ok(())
    }

    fn losses(&self) -> Result<Losses> {
        Ok(self.attached.losses()?.add_lost_stacks(self.stacks.lost()))
    }

    fn print_remedies(&self, losses: &Losses) {
        if losses.entries > 0 {
            memtools::message!("{}", self.more_blocks());
        }
        let unseen = self.attached.unseen_frees();
        if unseen > 0 {
            memtools::message!(
                "{unseen} frees of memory that was allocated again were missed; other missed frees may look like \
                 leaks"
            );
        }
    }
}

impl Kernel<'_> {
    /// Returns the remedy for lost blocks.
    fn more_blocks(&self) -> String {
        let option = match self.plan.memory.blocks {
            Some(_) => "--max-allocs",
            None => "--mem-limit",
        };
        format!("more blocks take a larger {option}")
    }

    /// Prints at once that blocks are being lost, when they first are.
    fn report_first_loss(&mut self) -> Result<()> {
        if !self.loses && self.attached.losses()?.entries > 0 {
            self.loses = true;
            memtools::message!(
                "blocks are being lost, as their maps are full: {}; -z, -s and --cache track fewer",
                self.more_blocks()
            );
        }
        Ok(())
    }

    fn print_caches(&mut self, largest: &[Entry], output: &mut Output) -> Result<()> {
        let now = Slabinfo::read();
        output.header(CacheRow::HEADER)?;
        for &Entry {
            key,
            total,
            age,
            growth,
            ..
        } in largest
        {
            let name = self.cache_name(key.stack)?;
            output.row(&CacheRow {
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

    /// Returns the name of a slab cache, or of another kind of memory, in brackets.
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

    /// Renews the stack table if it needs to grow, so that it keeps only the stacks that a block or a total refers to.
    fn renew_stacks(&mut self) -> Result<()> {
        if !self.stacks.needs_growth()? {
            return Ok(());
        }
        self.stacks.renew()?;
        let maps = &self.attached.skel.maps;
        let mut referred_to = HashSet::new();
        self.attached.for_each_block(|_, block| {
            referred_to.insert(block.stack);
        })?;
        map_batch::for_each(&maps.totals, |key, _| {
            referred_to.insert(*types::view::<u64>(key)?);
            Ok(())
        })?;
        self.stacks.keep(referred_to)?;
        self.stacks.forget_read();
        Ok(())
    }

    /// Returns the key that a block is added up by. With --by-cache, the slab cache takes the place of the stack.
    fn key(&self, block: &block) -> StackKey {
        let by_cache = self.plan.by_cache;
        StackKey {
            pid: 0,
            stack: if by_cache { block.cache } else { block.stack },
        }
    }

    /// Returns the blocks that are old enough, with their totals.
    fn outstanding(&self, now_ns: u64) -> Result<(Totals, Vec<Allocation>)> {
        let born_before = self.plan.report.born_before(now_ns, false);
        let (mut totals, mut allocations) = (Totals::new(), Vec::new());
        let read = self.attached.for_each_block(|address, block| {
            if block.time_ns > born_before {
                return;
            }
            let stack_key = self.key(block);
            let total = totals.entry(stack_key).or_default();
            total.allocations += 1;
            total.bytes += u64::from(block.allocated);
            total.requested_bytes += u64::from(block.requested);
            allocations.push(Allocation {
                pid: stack_key.pid,
                address,
                size: block.allocated.into(),
                stack: stack_key.stack,
                time_ns: block.time_ns,
                calls: 1,
                level: 0,
            });
        });
        read.context("failed to read the live blocks")?;
        Ok((totals, allocations))
    }

    /// Returns the totals that were kept in the kernel.
    fn totals(&self) -> Result<Totals> {
        let mut totals = Totals::new();
        map_batch::for_each(&self.attached.skel.maps.totals, |key, value| {
            let stack = *types::view(key)?;
            let value: &total = types::view(value)?;
            let total = totals.entry(StackKey { pid: 0, stack }).or_default();
            total.bytes = value.allocated;
            total.allocations = value.count;
            total.requested_bytes = value.requested;
            Ok(())
        })
        .context("failed to read the totals")?;
        Ok(totals)
    }
}
