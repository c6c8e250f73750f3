//! Counts by process and stack, which `bpf/include/stack_count.bpf.h` keeps in the kernel. A thread takes the counts
//! whenever the kernel's maps fill (`collector`). The main thread adds them up until they are reported.

mod collector;
mod options;
mod report;

use std::collections::HashMap;
use std::hash::Hash;
use std::mem;
use std::thread;

use anyhow::Result;
use libbpf_rs::{Link, MapCore, MapHandle, Object};

use self::collector::{Collected, Collector, KernelMaps};
use self::options::MAX_STACKS;
use crate::bpf::attach;
use crate::export::files::Exports;
use crate::export::folded::Folded;
use crate::export::metrics::{Family, Metrics};
use crate::export::profile::ValueType;
use crate::export::text::{BlockStyle, block};
use crate::print::clock::{self, Clock};
use crate::print::output::{Format, Output};
use crate::print::timeline::{self, Unit};
use crate::process::container::{self, CgroupInfo, CgroupResolver};
use crate::process::filter::Filter;
use crate::run::cli::CommonArgs;
use crate::run::losses::Losses;
use crate::run::poll::Poller;
use crate::run::priority;
use crate::run::schedule::{Due, Reports};
use crate::run::stack_sums::{self, Count, Hash128Builder, Key, LOST_STACK, Sums, largest};
use crate::stacks::named::{NamedStack, Part};
use crate::stacks::symbolize::Symbolizer;
use crate::stacks::table::{ReadStacks, StackMaps, StackSource as _};
use crate::stacks::unwind::Unwinder;

pub use options::{StackCountArgs, Weight};

/// Contents and format of a report.
#[derive(Debug, Clone, Copy)]
pub struct StackReport<'a> {
    /// The format of the report.
    pub format: Format,
    /// Whether processes are counted, whatever their stacks.
    pub by_process: bool,
    /// The quantity that the sums add up.
    pub weight: Weight,
    /// Name of what is counted, such as `page faults`.
    pub subject: &'static str,
    /// Names and units of the events, and of their bytes where these are known.
    pub values: (ValueType, Option<ValueType>),
    /// Metrics of the events, and of their bytes where these are known.
    pub families: [&'static Family; 2],
    /// The rest of the options.
    pub args: &'a StackCountArgs,
}

impl StackReport<'_> {
    /// Whether stacks that are printed the same are merged: processes of one name have the same code at different
    /// addresses.
    fn by_line(&self) -> bool {
        !self.by_process && self.format != Format::Json
    }

    /// Returns the text of a stack, without its sum, and why the stack is incomplete, if it is.
    fn line(&self, stack: &NamedStack) -> (String, Option<String>) {
        let &StackCountArgs {
            perpid: pid,
            annotations: annotate,
            offsets,
            addresses,
            ..
        } = self.args;
        let text = match self.format {
            Format::Folded => Folded {
                pid,
                annotate,
                ..Folded::new(stack)
            }
            .to_string(),
            _ => block(
                stack,
                BlockStyle {
                    pid,
                    annotate,
                    offsets,
                    addresses,
                },
            ),
        };
        let parts = [&stack.user, &stack.kernel];
        let lost = parts
            .iter()
            .any(|part| part.as_ref().is_some_and(Part::is_lost));
        let truncated = stack.truncated();
        let truncated = truncated.map(|reason| format!("[truncated: {reason}]"));
        (
            text,
            if lost {
                Some(LOST_STACK.to_owned())
            } else {
                truncated
            },
        )
    }
}

/// Reader of the counts, which prints what was counted since the last report.
pub struct StackCounts<'map, M> {
    maps: StackCountMaps<'map, M>,
    filter: &'map Filter,
    /// Stacks of the counts that were taken from the collector, until they are symbolized.
    stacks: ReadStacks,
    cgroup_resolver: CgroupResolver<'map>,
    symbolizer: Symbolizer,
    /// The unwinder, if there are user stacks.
    unwinder: Option<Unwinder>,
    exports: Exports,
    metrics: Metrics,
    sums: Sums,
    places: Hash128Builder,
    /// Maximum number of stacks in the sums.
    max_stacks: u32,
    /// Events whose stacks were omitted, as the sums were full.
    without_stack: u64,
    /// Counts of each process since the last report, if there are a timeline or metrics.
    processes: Option<HashMap<(u32, String), Count>>,
    /// Number of exited processes whose counts have all been taken from the collector.
    exits: u64,
    /// Events that were not counted, as of the last report.
    reported_lost: u64,
    /// Whether there was a report.
    has_reported: bool,
}

/// Sum of one process.
#[derive(Debug)]
pub struct ProcessSum {
    /// The process.
    pub pid: u32,
    /// The name of the process or thread, escaped.
    pub comm: String,
    /// The cgroup and container of the process when it was last counted, if they are requested.
    pub cgroup_info: CgroupInfo,
    /// The number of events, or of bytes.
    pub sum: u64,
}

/// Maps of a skeleton that [`StackCounts`] reads.
#[derive(Debug)]
pub struct StackCountMaps<'map, M> {
    /// `counts`, `counts_a` and `counts_b`.
    pub counts: [&'map M; 3],
    /// The table of stacks.
    pub stacks: StackMaps<'map, M>,
    /// `table_requests`.
    pub requests: &'map M,
    /// `cgroup_paths`.
    pub cgroup_paths: &'map M,
    /// The object that has all these maps.
    pub object: &'map Object,
}

/// The maps of a loaded skeleton that stacks are counted in.
#[macro_export]
macro_rules! stack_count_maps {
    ($skel:expr) => {
        $crate::run::count_stacks::StackCountMaps {
            counts: [
                &$skel.maps.counts,
                &$skel.maps.counts_a,
                &$skel.maps.counts_b,
            ],
            stacks: $crate::stack_maps!($skel),
            requests: &$skel.maps.table_requests,
            cgroup_paths: &$skel.maps.cgroup_paths,
            object: $skel.object(),
        }
    };
}

impl<'map, M: MapCore> StackCounts<'map, M> {
    /// Creates a reader of these maps, with empty sums.
    pub fn new(
        maps: StackCountMaps<'map, M>,
        filter: &'map Filter,
        mut symbolizer: Symbolizer,
        unwinder: Option<Unwinder>,
        (exports, metrics): (Exports, Metrics),
        args: &StackCountArgs,
    ) -> Self {
        symbolizer.name_interpreters(unwinder.as_ref().and_then(Unwinder::names));
        Self {
            cgroup_resolver: CgroupResolver::new(maps.cgroup_paths),
            maps,
            filter,
            stacks: ReadStacks::default(),
            symbolizer,
            unwinder,
            exports,
            metrics,
            sums: Sums::default(),
            places: Hash128Builder::default(),
            max_stacks: args.stack_storage_size.unwrap_or(MAX_STACKS),
            without_stack: 0,
            processes: None,
            exits: 0,
            reported_lost: 0,
            has_reported: false,
        }
    }

    /// Prints a report at each interval, and a last one when the probes have been detached at the end. Then prints
    /// what could not be counted or symbolized.
    ///
    /// # Errors
    /// If a map cannot be read, or the output cannot be written to.
    pub fn run(
        mut self,
        streams: (Poller<'_>, Output),
        common: &CommonArgs,
        report: &StackReport<'_>,
        links: Vec<Link>,
        print: impl FnMut(&mut Self, &mut Output) -> Result<()>,
    ) -> Result<()>
    where
        for<'a> MapHandle: TryFrom<&'a M, Error = libbpf_rs::Error>,
    {
        let maps = KernelMaps::open(&self.maps)?;
        let log = self.symbolizer.code.take_log()?;
        let collector = Collector::new(&maps, log, self.max_stacks)?;
        priority::raise();
        thread::scope(|scope| {
            let _running = collector.start(scope)?;
            self.report_until_end(&collector, streams, common, report, links, print)
        })
    }

    fn report_until_end(
        mut self,
        collector: &Collector<'_>,
        (mut poller, mut output): (Poller<'_>, Output),
        common: &CommonArgs,
        report: &StackReport<'_>,
        links: Vec<Link>,
        mut print: impl FnMut(&mut Self, &mut Output) -> Result<()>,
    ) -> Result<()> {
        let args = report.args;
        poller.watch(collector);
        self.symbolizer.code.read_running_processes();
        let by_process = output.has_timeline() || self.metrics.is_enabled();
        self.processes = by_process.then(HashMap::new);
        self.exports.begin();
        let deadline = common.deadline();
        let mut reports = Reports::start(&mut poller, args.interval(), args.count, deadline)?;
        loop {
            let (wake, due) = reports.wait(&mut poller)?;
            match due {
                Due::Nothing if wake.is_ready(collector) => {
                    self.add_collected(report, collector.take()?)?;
                }
                Due::Nothing => {}
                Due::Report => {
                    self.add_collected(report, collector.collect(true)?)?;
                    print(&mut self, &mut output)?;
                    self.write_process_counts(report, &mut output);
                    self.losses()?.measure(&mut self.metrics);
                    self.metrics.write_if_due();
                    self.forget_symbolized();
                }
                Due::Last => break,
            }
        }
        attach::detach(links);
        self.add_collected(report, collector.collect(false)?)?;
        print(&mut self, &mut output)?;
        self.write_process_counts(report, &mut output);
        self.losses()?.measure(&mut self.metrics);
        self.report_losses(&mut output)?;
        if let Some(unwinder) = self.unwinder {
            unwinder.report(&mut output)?;
        }
        self.exports.finish()?;
        self.metrics.finish()?;
        output.finish()
    }

    /// Returns the sums by process since the last report, for counts without stacks; the largest last.
    pub fn processes(&mut self, report: &StackReport<'_>) -> Vec<ProcessSum> {
        let counts = self.sums.take().counts;
        let sums = counts
            .iter()
            .map(|(key, count)| (key, count.weight(report.weight)));
        let largest = largest(sums, report.args.top).into_iter();
        largest
            .map(|(key, sum)| ProcessSum {
                pid: key.pid,
                comm: key.comm.clone(),
                cgroup_info: self.cgroup_resolver.of(counts[key].cgroup),
                sum,
            })
            .collect()
    }

    /// Adds what was collected to the sums.
    fn add_collected(&mut self, report: &StackReport<'_>, mut collected: Collected) -> Result<()> {
        let later = collected.changes.split_off(collected.settled.unwrap_or(0));
        self.symbolizer.code.apply(collected.changes);
        if collected.settled.is_some() {
            self.exits = self.symbolizer.code.exits();
        }
        self.symbolizer.code.apply(later);
        self.symbolizer
            .code
            .set_lost_changes(collected.lost_changes);
        self.symbolizer.refresh();
        self.without_stack += collected.without_stack;
        self.stacks.extend(collected.stacks);
        // Source lines are looked up only for the final sums.
        let by_line = report.by_line() && !self.symbolizer.shows_lines();
        for (key, count) in collected.counts {
            if let Some(processes) = &mut self.processes {
                *processes.entry((key.pid, key.comm.clone())).or_default() += count;
            }
            if by_line {
                self.add_line(report, &key, count)?;
            }
            if !by_line || self.exports.is_enabled() {
                let is_whole = stack_sums::add(&mut self.sums.counts, key, count, self.max_stacks);
                // By line, add_line() counts the loss.
                if !is_whole && !by_line {
                    self.without_stack += count.events;
                }
            }
        }
        if by_line && !self.exports.is_enabled() {
            self.forget_symbolized();
        }
        Ok(())
    }

    /// Forgets the stacks that are symbolized, and the processes that have no other ones.
    fn forget_symbolized(&mut self) {
        self.stacks.clear();
        self.symbolizer.code.forget_exited(self.exits);
    }

    /// Adds what processes did since the last report to the timeline and to the metrics, if there are any.
    fn write_process_counts(&mut self, report: &StackReport<'_>, output: &mut Output) {
        let time = Clock::new().local(clock::monotonic_ns());
        let [events, bytes] = report.families;
        for ((pid, comm), sum) in self.processes.iter_mut().flat_map(HashMap::drain) {
            let cgroup_info = self.cgroup_resolver.of(sum.cgroup);
            let [unit, container] = container::labels(Some(&cgroup_info));
            let labels = [&*comm, unit, container];
            self.metrics.add(events, &labels, sum.events);
            if report.values.1.is_some() {
                self.metrics.add(bytes, &labels, sum.bytes);
            }
            let mut count = timeline::Count {
                name: report.subject.into(),
                unit: Unit::Count,
                process: Some((pid, &comm)),
                time: &time,
                increase: sum.events,
            };
            output.count(&count);
            if report.values.1.is_some() {
                count.name = format!("{}, bytes", report.subject).into();
                count.unit = Unit::Bytes;
                count.increase = sum.bytes;
                output.count(&count);
            }
        }
    }

    fn add_line(&mut self, report: &StackReport<'_>, key: &Key, count: Count) -> Result<()> {
        let weight = count.weight(report.weight);
        let place = self.line_hash(report, key)?;
        if place.is_some_and(|place| self.sums.add_at(place, weight)) {
            return Ok(());
        }
        let line = self.line(report, key)?;
        let most = key.has_stacks().then_some(self.max_stacks);
        if !self.sums.add_line(line, place, weight, most) {
            self.without_stack += count.events;
            let line = self.line(report, &key.clone().without_stacks())?;
            self.sums.add_line(line, None, weight, None);
        }
        Ok(())
    }

    /// Makes lines of the counts that were collected without lines.
    fn add_lines(&mut self, report: &StackReport<'_>) -> Result<()> {
        if report.by_line() && self.symbolizer.shows_lines() {
            let counts = mem::take(&mut self.sums.counts);
            for (key, count) in &counts {
                self.add_line(report, key, *count)?;
            }
            self.sums.counts = counts;
        }
        Ok(())
    }

    /// Returns the text of a count's stacks, without the sum, and why the stacks are incomplete, if they are.
    fn line(&mut self, report: &StackReport<'_>, key: &Key) -> Result<(String, Option<String>)> {
        let names = &mut self.symbolizer.for_reports();
        Ok(report.line(&NamedStack::read(&key.ids(), &mut self.stacks, names)?))
    }

    /// Hashes all that the line of a count is made of. Returns None where that is not known without symbolizing.
    fn line_hash(&mut self, report: &StackReport<'_>, key: &Key) -> Result<Option<u128>> {
        let mut hasher = self.places.begin();
        // With addresses, processes are kept apart: each maps a file at other addresses.
        let by_process = report.args.perpid || report.args.addresses;
        let pid = by_process.then_some(key.pid);
        // Addresses of the kernel are the same in every process, and so are the ids of kernel stacks.
        (&key.comm, pid, key.kernel).hash(&mut hasher);
        let Some(user) = self.stacks.get(key.user)? else {
            return Ok(None);
        };
        let known = self.symbolizer.hash_places(key.pid, &user, &mut hasher);
        Ok(known.then(|| hasher.finish_wide()))
    }

    /// Symbolizes the two stacks of a key.
    fn named(&mut self, key: &Key) -> Result<NamedStack> {
        NamedStack::read(&key.ids(), &mut self.stacks, &mut self.symbolizer)
    }

    /// Returns the losses since the start.
    fn losses(&self) -> Result<Losses> {
        Ok(Losses::of(self.maps.object, self.filter)?.add_lost_stacks(self.without_stack))
    }

    /// Reports at the end what could not be counted or symbolized.
    fn report_losses(&self, output: &mut Output) -> Result<()> {
        self.losses()?.report_self(self.maps.object, output)?;
        self.symbolizer.report_losses();
        Ok(())
    }
}
