//! Memory of processes: blocks and mappings that were allocated in them and not freed.
//!
//! Hooks: uprobes on the allocators' functions, which [`probes`] attaches. Blocks are kept in BPF maps ([`live`]).
//! Mappings, which can be unmapped in part, come as events and are kept in user space ([`regions`]).

mod allocators;
mod block_map_sizes;
mod copies;
mod cost;
mod ended;
mod events;
mod live;
mod load;
mod loaded;
mod names;
mod object;
mod objects;
mod overhead;
pub(crate) mod pool;
mod probes;
mod python_objects;
mod regions;
mod renewal;
mod signature;
mod stopped;
mod target;
mod totals;
mod upkeep;

use std::collections::{HashMap, HashSet};
use std::mem;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use self::bpf::types::{event, event_kind as Kind, total_key};
use self::ended::{AddressSpaceEnds, ExitedTotals};
use self::live::LiveBlocks;
use self::names::Names;
use self::probes::Attached;
use self::regions::{Regions, allocations_of};
use self::renewal::Renewal;
use self::target::Targets;
use self::upkeep::Upkeep;
use crate::args::Mode;
use crate::plan::{ProcessPlan, VerdictSettings};
use crate::reporter::Reporter;
use crate::rows::{Group, UnknownFrees};
use crate::serve::{self, UnmatchedFrees};
use crate::source::{Flow, HeadContext, ReportData, Source};
use crate::sums::{self, Allocation, Entry, StackKey, Sum, Total, Totals};
use crate::verdict::{self, VerdictInputs};
use anyhow::{Result, bail};
use libbpf_rs::MapMut;
use libbpf_rs::skel::Skel;
use memtools::bpf::attach;
use memtools::bpf::kernel_support;
use memtools::bpf::map_batch;
use memtools::bpf::ring::Events;
use memtools::bpf::types;
use memtools::host::page_size;
use memtools::print::clock::Clock;
use memtools::print::output::Output;
use memtools::print::text;
use memtools::process::command::HeldCommand;
use memtools::process::container::{CgroupResolver, ProcessName};
use memtools::process::proc::Process;
use memtools::process::uprobes;
use memtools::run::losses::Losses;
use memtools::run::poll::Wake;
use memtools::run::priority;
use memtools::run::target::warn_if_interval_is_pid;
use memtools::stacks::named::{NamedStack, StackIds};
use memtools::stacks::symbolize::Symbolizer;
use memtools::stacks::table::{Stack, Stacks};

memtools::skeleton!("memleak", MemleakSkelBuilder, stacks: unwound, plain: [block, event, live_block, live_key, peak, thread, total, total_key]);

/// Follows the plan: reports, or gives verdicts if `verdict` has settings for these.
pub(crate) fn run(plan: &ProcessPlan, verdict: Option<&VerdictSettings>) -> Result<ExitCode> {
    kernel_support::preflight()?;
    kernel_support::preflight_uprobes()?;
    uprobes::expect_free_locks()?;
    attach::capture_log(plan.verbose);
    let mut wanted = verdict.map_or(Ok(VerdictInputs::default()), VerdictInputs::read)?;
    let files = plan.outputs.files(&plan.report)?;
    let listener = plan.outputs.serve.listen()?;
    let (mut poller, output) = plan.outputs.start(&plan.report)?;
    warn_if_interval_is_pid(plan.report.given_interval, &plan.target.filter.pid);
    // With a command, no thread is started here: no other thread may hold a lock when the command is forked.
    if plan.target.command.is_none() {
        bpf::prefetch_kernel_types();
    }
    let mut target = Targets::choose(plan)?;
    let server = listener.map(|listener| serve::start(listener, &plan.memory));
    let server = server.transpose()?;
    priority::raise();
    let mut symbolizer = target.symbolizer()?.with_source(
        plan.source,
        plan.outputs.makes_profiles() || wanted.source_lines(),
    )?;
    let (attached, links, unwinder) = probes::attach(&target, plan)?;
    symbolizer.name_interpreters(unwinder.names());
    let rings = Rings::new(&attached)?;
    let mappings = symbolizer.code.descriptor()?;
    let mut command = target.command.take();
    if let Some(settings) = verdict {
        wanted.watch(settings, command.as_ref())?;
    }
    let upkeep = Upkeep::new(&attached, &target, plan, links)?;
    let processes = Processes::new(upkeep, &rings, symbolizer)?;
    let mut reporter = Reporter::new(processes, &plan.report, output, files);
    // Readers of stderr take these lines as the sign that the trace has begun.
    for found in target.found() {
        memtools::message!("{found} ({})", attached.how);
    }
    if !target.is_fixed() {
        memtools::message!(
            "other processes that run these files hit the probes, too: each malloc(3) and free(3) takes \
             microseconds longer there (with -p, and without --children, it does not)"
        );
    }
    command.as_mut().map_or(Ok(()), HeldCommand::release)?;

    poller.watch_events(&rings.events);
    poller.watch(&rings.table_requests);
    poller.watch_mappings(&mappings);
    poller.watch(&attached.questions);
    if let Some(server) = &server {
        poller.watch(server);
    }
    for process in target.watched() {
        poller.watch_exit(process);
    }
    if let Some(exit) = &wanted.at_exit {
        poller.watch(exit);
    }
    let mut has_forbidden_leaks = false;
    if let (Some(settings), Some(one)) = (verdict, target.processes.first()) {
        let Reporter { source, output, .. } = &mut reporter;
        let leaks = verdict::run(source, &one.process, settings, &mut poller, output, &wanted)?;
        has_forbidden_leaks = leaks > 0 && settings.fails_on_leaks;
    } else {
        reporter.run(&mut poller, server.as_ref())?;
    }

    drop(server);
    let harm = reporter.source.finish(&mut reporter.output)?;
    unwinder.report(&mut reporter.output)?;
    let status = command.as_mut().map(HeldCommand::finish).transpose()?;
    let status = reporter.finish(status.flatten(), has_forbidden_leaks)?;
    match harm {
        Some(harm) => bail!("{harm}: the trace has ended"),
        None => Ok(status),
    }
}

/// Ring buffers that the BPF programs write to.
struct Rings<'a> {
    events: Events<'a, event>,
    /// Requests of the BPF programs for more capacity in their maps.
    table_requests: Events<'a, u32>,
}

impl<'a> Rings<'a> {
    fn new(attached: &'a Attached) -> Result<Self> {
        let maps = &attached.skel.maps;
        Ok(Self {
            events: Events::new(&maps.events)?,
            table_requests: Events::new(&maps.table_requests)?,
        })
    }
}

/// Source of reports on processes: the traced processes, and their allocations.
struct Processes<'a> {
    attached: &'a Attached,
    target: &'a Targets,
    plan: &'a ProcessPlan,
    upkeep: Upkeep<'a>,
    rings: &'a Rings<'a>,
    symbolizer: Symbolizer,
    stacks: Stacks<'a, MapMut<'static>>,
    renewal: Renewal,
    blocks: LiveBlocks<'a>,
    regions: HashMap<u32, Regions>,
    /// Totals of the mappings made, for --mode alloc.
    mapped: Totals,
    /// The processes that were named and still run.
    named: HashSet<u32>,
    names: Names<'a>,
    /// Number of times that each process has called exec, as the BPF programs count.
    execs: HashMap<u32, u64>,
    /// Ends of processes' address spaces whose blocks are still to be removed from the BPF maps.
    address_space_ends: HashMap<u32, AddressSpaceEnds>,
    /// Allocations that exited processes had outstanding: all, or with [`Self::sets_exited_apart`] since the last report.
    exited_totals: ExitedTotals,
    /// Stacks that mapped memory, each with whether a function that frees has done so.
    mapped_by_free: HashMap<StackKey, bool>,
    /// Stacks whose double frees were already printed.
    reported_double_frees: HashSet<StackKey>,
    clock: Clock,
    page_bytes: u64,
}

impl Source for Processes<'_> {
    fn handle_events(&mut self, wake: &Wake, output: &mut Output) -> Result<Flow> {
        if wake.is_ready(&self.attached.questions) {
            self.upkeep.answer()?;
        }
        let mut new: Vec<event> = self.rings.events.drain()?.collect();
        let brings_code =
            |event: &event| [Kind::EVENT_EXEC, Kind::EVENT_MOVED].contains(&event.kind);
        if new.iter().any(brings_code) {
            self.upkeep.schedule_scan_soon();
        }
        if new
            .iter()
            .any(|event| event.kind == Kind::EVENT_CODE_REPLACED)
        {
            self.upkeep.release_copiers();
        }
        for moved in new.extract_if(.., |event| event.kind == Kind::EVENT_MOVED) {
            self.symbolizer.code.moved(moved.pid);
        }
        self.take(new, output)?;
        if wake.is_ready(&self.rings.table_requests) {
            self.rings.table_requests.drain()?;
        }
        self.add_capacity(output)?;
        self.upkeep.hold_limit()?;
        if wake.mappings || self.upkeep.is_due() {
            self.symbolizer.refresh();
            self.upkeep.scan_loaded_files(&mut self.symbolizer);
            self.report_programs_of_children();
        }
        if self.upkeep.harms() {
            self.upkeep.detach();
            return Ok(Flow::End { exited: false });
        }
        self.upkeep.warn_if_no_hits();
        if wake.exited {
            self.symbolizer.refresh();
            self.upkeep.print_missed(&self.symbolizer);
            return Ok(Flow::End { exited: true });
        }
        Ok(Flow::Continue)
    }

    fn deadline(&self) -> Option<Instant> {
        Some(self.upkeep.next_scan())
    }

    fn snapshot(&mut self, now_ns: u64, exited: bool) -> Result<ReportData> {
        self.symbolizer.refresh();
        self.names.look_again();
        let (mut totals, mut allocations) = match self.plan.recording.mode {
            Mode::Leak => self.outstanding(now_ns, exited)?,
            Mode::Peak => (totals::at_peak(self.attached)?, Vec::new()),
            _ => {
                self.purge_ended_blocks()?;
                (self.read_totals()?, Vec::new())
            }
        };
        sums::merge_lost(&mut self.stacks, &mut totals, &mut allocations)?;
        let mut errors = None;
        if let Some(sampling) = self.plan.recording.sampling {
            let estimate = sampling.estimate(&allocations);
            totals = estimate.0;
            errors = Some(estimate.1);
        }
        if self.plan.recording.mode == Mode::Leak && !self.sets_exited_apart() {
            self.exited_totals.add_to(&mut totals, errors.as_mut());
            sums::merge_lost(&mut self.stacks, &mut totals, &mut [])?;
        }
        Ok(ReportData {
            totals,
            allocations,
            mappings: self.live_regions().len(),
            errors,
        })
    }

    fn symbolize(&mut self, key: StackKey) -> Result<NamedStack> {
        let ids = StackIds {
            pid: key.pid,
            comm: self.names.comm(key.pid),
            user: Some(key.stack),
            kernel: None,
        };
        NamedStack::read(&ids, &mut self.stacks, &mut self.symbolizer)
    }

    fn stack(&mut self, key: StackKey) -> Result<Option<Arc<Stack>>> {
        self.stacks.get(key.stack)
    }

    fn is_several(&self) -> bool {
        self.target.is_several()
    }

    fn heading(&mut self) -> HeadContext {
        let only = self.names.any().filter(|_| !self.is_several());
        let bss = self.attached.skel.maps.bss_data.as_deref();
        let peak = bss.map(|bss| bss.peak);
        let peak = peak.filter(|peak| self.plan.recording.mode == Mode::Peak && peak.number > 0);
        HeadContext {
            process: only.map(|pid| self.names.process(pid)),
            peak_ns: peak.map(|peak| peak.time_ns),
            tells_requested: false,
            frees: self.frees(),
        }
    }

    fn resident_bytes(&self) -> Option<u64> {
        if self.plan.recording.mode != Mode::Leak || self.is_several() {
            return None;
        }
        Process::open(self.names.any()?).ok()?.resident_bytes()
    }

    fn process_name(&mut self, pid: u32) -> Option<ProcessName> {
        Some(self.names.process(pid))
    }

    fn print_groups(&mut self, groups: Vec<Entry>, output: &mut Output) -> Result<()> {
        for entry in groups {
            let stack = self.symbolize(entry.key)?;
            output.row(&Group {
                process: self.process_if_several(entry.key.pid),
                ..Group::new(&entry, stack, &self.plan.report)
            })?;
        }
        Ok(())
    }

    fn print_exited(&mut self, output: &mut Output) -> Result<()> {
        if self.plan.recording.mode != Mode::Leak || !self.sets_exited_apart() {
            return Ok(());
        }
        let exited = mem::take(&mut self.exited_totals);
        let mut totals = exited.totals().clone();
        sums::merge_lost(&mut self.stacks, &mut totals, &mut [])?;
        if totals.is_empty() {
            return Ok(());
        }
        let (sum, rest) = (Sum::of(&totals), exited.rest());
        let entries = totals.into_iter().map(|(key, total)| Entry {
            key,
            total,
            error_bytes: exited.error_bytes(key),
            age: None,
            growth: None,
        });
        let largest = sums::largest(
            entries.collect(),
            self.plan.report.sort,
            self.plan.report.top,
        );
        if !self.plan.report.is_json() {
            let line = text_of_exited(&sum, rest, largest.len());
            output.raw(|out| out.write_all(line.as_bytes()))?;
        }
        for entry in largest {
            let stack = self.symbolize(entry.key)?;
            output.row(&Group {
                kind: "exited",
                process: Some(self.names.process(entry.key.pid)),
                ..Group::new(&entry, stack, &self.plan.report)
            })?;
        }
        Ok(())
    }

    fn print_more(&mut self, output: &mut Output) -> Result<()> {
        if self.plan.report.extended && self.plan.recording.is_complete() {
            self.print_unknown_frees(output)?;
        }
        Ok(())
    }

    fn losses(&self) -> Result<Losses> {
        let skel = &self.attached.skel;
        let lost = Losses::of(skel.object(), &self.target.filter)?;
        let lost = lost.add_lost_stacks(self.stacks.lost());
        Ok(lost.add_skipped_runs(memtools::unwind_holds!(skel).skipped_runs()?))
    }

    fn print_remedies(&self, losses: &Losses) {
        if losses.entries > 0 {
            memtools::message!("more blocks can be recorded with a larger --mem-limit");
        }
        if losses.stacks > 0 {
            let remedy = if self.stacks.is_largest() {
                "more can be recorded with a larger --mem-limit"
            } else {
                "for a moment, new stacks came faster than the table grows; later ones are recorded"
            };
            memtools::message!("stacks were lost: {remedy}");
        }
        if self.plan.report.is_folded() && self.sets_exited_apart() {
            self.tell_what_exited_left();
        } else if let Some(rest) = self.exited_totals.rest()
            && !self.sets_exited_apart()
        {
            memtools::message!(
                "{} bytes in {} allocations of exited processes are not shown: only the \
                 processes and stacks with most are kept",
                rest.bytes,
                rest.allocations
            );
        }
    }

    fn hits(&self) -> Option<u64> {
        Some(self.attached.hits().count)
    }
}

/// Returns the line before the rows of exited processes.
fn text_of_exited(sum: &Sum, rest: Option<Total>, shown: usize) -> String {
    let blocks = text::count_with_noun(sum.total.allocations, "block");
    let stacks = text::count_with_noun(sum.stacks as u64, "stack");
    let bytes = text::bytes(sum.total.bytes);
    let mut line =
        format!("\texited processes left {bytes} in {blocks} of {stacks}, shown {shown}");
    if let Some(rest) = rest {
        let (bytes, blocks) = (text::bytes(rest.bytes), rest.allocations);
        line += &format!("; {bytes} more in {blocks} blocks of further stacks, which are not kept");
    }
    line + "\n"
}

impl<'a> Processes<'a> {
    fn new(upkeep: Upkeep<'a>, rings: &'a Rings<'a>, symbolizer: Symbolizer) -> Result<Self> {
        let Upkeep {
            attached,
            target,
            plan,
            ..
        } = upkeep;
        let processes = target.processes.iter().map(|traced| &traced.process);
        let wants_cgroups = plan.wants_cgroups();
        let cgroups = CgroupResolver::if_wanted(wants_cgroups, &attached.skel.maps.cgroup_paths);
        Ok(Self {
            attached,
            target,
            plan,
            upkeep,
            rings,
            symbolizer,
            stacks: Stacks::new(
                memtools::stack_maps!(attached.skel),
                plan.memory.max_stacks(),
            )?,
            renewal: Renewal::default(),
            blocks: LiveBlocks::new(attached),
            regions: HashMap::new(),
            mapped: Totals::new(),
            named: target.watched().map(Process::pid).collect(),
            names: Names::of(processes, cgroups, plan.containers.container),
            execs: HashMap::new(),
            address_space_ends: HashMap::new(),
            exited_totals: ExitedTotals::default(),
            mapped_by_free: HashMap::new(),
            reported_double_frees: HashSet::new(),
            clock: Clock::new(),
            page_bytes: page_size::page_bytes()?,
        })
    }

    /// Detaches the probes, and prints what the trace cost and lost. Returns which process the trace would have harmed,
    /// if that has ended the trace.
    fn finish(&mut self, output: &mut Output) -> Result<Option<String>> {
        let harm = self.upkeep.finish(output)?;
        self.report_programs_of_children();
        self.symbolizer.report_losses();
        Ok(harm)
    }

    /// Prints the sum of what exited processes have left on stderr, as folded stacks have no line for it.
    fn tell_what_exited_left(&self) {
        let apart = Sum::of(self.exited_totals.totals()).total;
        let rest = self.exited_totals.rest().unwrap_or_default();
        let blocks = apart.allocations + rest.allocations;
        if blocks > 0 {
            let (bytes, blocks) = (
                text::bytes(apart.bytes + rest.bytes),
                text::count_with_noun(blocks, "block"),
            );
            memtools::message!(
                "exited processes left {bytes} in {blocks}, which are not in the folded stacks: text and JSON \
                 show them"
            );
        }
    }

    /// Whether what exited processes have left is reported once, apart from the sums of what is live. In the trace of a
    /// command, what its processes have left is a result that counts.
    fn sets_exited_apart(&self) -> bool {
        !self.target.is_command
    }

    /// Reports once that a child of the command has executed a program, as with su(1) and wrapper scripts, if
    /// children are not traced.
    fn report_programs_of_children(&mut self) {
        if !self.plan.target.children
            && self.target.is_command
            && let Some(pid) = self.symbolizer.code.take_program_of_child()
        {
            memtools::message!(
                "the command has started another program (pid {pid}), which is not traced: to trace it, too, \
                 give --children"
            );
        }
    }

    /// Adds capacity for blocks and stacks before it is needed.
    fn add_capacity(&mut self, output: &mut Output) -> Result<()> {
        if self.wants_stacks_renewed()? {
            self.renew_stacks(output)?;
        }
        let bss = self.attached.skel.maps.bss_data.as_deref();
        let blocks = bss.map_or(0, |bss| bss.overflow_blocks);
        if let Some(more) = self.blocks.grow(blocks)?
            && self.plan.verbose
        {
            memtools::message!("the table of blocks has grown by {more}");
        }
        Ok(())
    }

    fn outstanding(&mut self, now_ns: u64, exited: bool) -> Result<(Totals, Vec<Allocation>)> {
        let (mut totals, mut allocations) = (Totals::new(), Vec::new());
        if self.plan.recording.only_totals {
            self.purge_ended_blocks()?;
            totals = self.read_totals()?;
        } else {
            let start = Instant::now();
            allocations = self.read_blocks()?;
            if self.plan.verbose {
                let time = start.elapsed();
                memtools::message!("{} blocks read in {time:.1?}", allocations.len());
            }
        }
        allocations.extend(self.live_regions());
        let all = exited || self.plan.recording.only_totals;
        let born_before = self.plan.report.born_before(now_ns, all);
        allocations.retain(|allocation| allocation.time_ns <= born_before);
        sums::add_up(&mut totals, &allocations);
        Ok((totals, allocations))
    }

    /// Removes the blocks of ended address spaces from the BPF maps, for reports of totals. With --combined-only, the
    /// totals of exited processes are removed, too.
    fn purge_ended_blocks(&mut self) -> Result<()> {
        if self.address_space_ends.is_empty() {
            return Ok(());
        }
        let apart = self.plan.recording.mode == Mode::Leak && self.sets_exited_apart();
        if self.plan.recording.only_totals && apart {
            let left = self.take_totals_of_exited()?;
            self.exited_totals.add_totals(&left);
        }
        self.read_blocks()?;
        Ok(())
    }

    /// Returns the live blocks. Blocks of ended address spaces are removed from the BPF maps, and those that exited
    /// processes left are kept in `exited_totals`.
    fn read_blocks(&mut self) -> Result<Vec<Allocation>> {
        let ends = &self.address_space_ends;
        let (blocks, left) = self.blocks.read(ends, self.plan.report.older_at_end_ns())?;
        self.address_space_ends.clear();
        // All other reports are of the BPF programs' totals, which include these blocks already.
        if self.plan.recording.mode == Mode::Leak && !self.plan.recording.only_totals {
            self.exited_totals.add(&left, self.plan.recording.sampling);
        }
        Ok(blocks)
    }

    /// Returns the counts of frees that do not match the records.
    fn frees(&self) -> UnmatchedFrees {
        let skel = &self.attached.skel;
        let Some(bss) = skel.maps.bss_data.as_deref() else {
            return UnmatchedFrees::default();
        };
        UnmatchedFrees {
            unknown: self
                .plan
                .recording
                .is_complete()
                .then_some(bss.frees.unknown),
            double: probes::notices_double_frees(skel, self.plan).then_some(bss.frees.twice),
            unseen: bss.frees.replaced,
        }
    }

    /// Prints the stacks that freed unrecorded blocks, the most frequent last.
    fn print_unknown_frees(&mut self, output: &mut Output) -> Result<()> {
        let mut counts: HashMap<StackKey, u64> = HashMap::new();
        map_batch::for_each(&self.attached.skel.maps.unknown_frees, |key, count| {
            let &total_key { pid, stack, .. } = types::view(key)?;
            *counts.entry(StackKey { pid, stack }).or_default() += types::view::<u64>(count)?;
            Ok(())
        })?;
        let mut counts: Vec<(StackKey, u64)> = counts.into_iter().collect();
        counts.sort_unstable_by_key(|&(StackKey { pid, stack }, frees)| (frees, pid, stack));
        let skipped = counts.len().saturating_sub(self.plan.report.top);
        for (key, frees) in counts.into_iter().skip(skipped) {
            let stack = self.symbolize(key)?;
            let process = self.process_if_several(key.pid);
            output.row(&UnknownFrees {
                frees,
                process,
                stack,
            })?;
        }
        Ok(())
    }

    /// Returns the process, if rows have to name theirs.
    fn process_if_several(&mut self, pid: u32) -> Option<ProcessName> {
        self.is_several().then(|| self.names.process(pid))
    }

    fn live_regions(&self) -> Vec<Allocation> {
        let regions = self.regions.iter();
        regions
            .flat_map(|(&pid, regions)| allocations_of(pid, regions))
            .collect()
    }
}
