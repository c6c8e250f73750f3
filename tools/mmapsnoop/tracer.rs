//! Events as rows, and as sums by stack for --folded and for the files of other formats.

use std::collections::HashMap;
use std::rc::Rc;

use anyhow::Result;
use libbpf_rs::MapMut;
use memtools::export::files::{Exports, ProfileInfo};
use memtools::export::folded::Folded;
use memtools::export::metrics::Metrics;
use memtools::export::profile::{Sample, ValueType};
use memtools::print::clock::Clock;
use memtools::print::output::Output;
use memtools::process::container::CgroupResolver;
use memtools::stacks::events::EventStacks;
use memtools::stacks::named::{NamedStack, StackIds};

use crate::args::Args;
use crate::bpf::Loaded;
use crate::row::{Columns, Record, Row};

/// Calls from one stack, and the bytes that these have mapped.
#[derive(Debug, Default, Clone, Copy)]
struct Mapped {
    calls: u64,
    bytes: u64,
}

/// State of the trace.
pub(crate) struct Printer<'a> {
    pub(crate) stacks: EventStacks<'a, MapMut<'static>>,
    /// None if cgroups are not requested.
    cgroup_resolver: Option<CgroupResolver<'a>>,
    clock: Clock,
    pub(crate) columns: Columns,
    pub(crate) output: Output,
    /// Sums by process, its name and stack.
    weights: HashMap<(u32, String, u64), Mapped>,
    pub(crate) exports: Exports,
    pub(crate) metrics: Metrics,
    args: &'a Args,
}

impl<'a> Printer<'a> {
    pub(crate) fn new(
        args: &'a Args,
        skel: &'a Loaded,
        stacks: EventStacks<'a, MapMut<'static>>,
        output: Output,
        (exports, metrics): (Exports, Metrics),
    ) -> Self {
        let with_cgroups = args.containers.wanted(args.common.wants_cgroups());
        Self {
            stacks,
            cgroup_resolver: CgroupResolver::if_wanted(with_cgroups, &skel.maps.cgroup_paths),
            clock: Clock::new(),
            columns: Columns {
                time: args.time,
                container: args.containers.container,
                call: args.munmap,
                result: args.result || args.failed,
                flags: args.flags,
            },
            output,
            weights: HashMap::new(),
            exports,
            metrics,
            args,
        }
    }

    /// Prints the records, or adds them up by stack.
    pub(crate) fn take(&mut self, records: impl Iterator<Item = Record>) -> Result<()> {
        self.stacks.refresh();
        for record in records {
            if self.args.folded || self.exports.is_enabled() {
                self.add(&record)?;
            }
            if self.args.folded {
                continue;
            }
            let stack = if self.args.stack {
                self.named(record.pid(), &record.comm(), record.stack())?
            } else {
                None
            };
            let cgroup_info = self
                .cgroup_resolver
                .as_mut()
                .map(|cgroup_resolver| cgroup_resolver.of(record.cgroup()));
            let row = Row::new(record, cgroup_info, stack, &self.clock, self.columns);
            row.record_metrics(&mut self.metrics);
            self.output.row(&row)?;
        }
        self.stacks.renew()?;
        self.output.flush()
    }

    /// Adds a call to the sums of its stack. A failed call has mapped nothing, and is omitted. The stack is
    /// symbolized at the end, when another stack table may be in use, so it is kept.
    fn add(&mut self, record: &Record) -> Result<()> {
        let Some(bytes) = record.mapped_bytes() else {
            return Ok(());
        };
        self.stacks.remember(record.stack())?;
        let key = (record.pid(), record.comm(), record.stack());
        let mapped = self.weights.entry(key).or_default();
        mapped.calls += 1;
        mapped.bytes += bytes;
        Ok(())
    }

    /// Symbolizes a stack. None if stacks are not requested.
    fn named(&mut self, pid: u32, comm: &str, stack: u64) -> Result<Option<Rc<NamedStack>>> {
        let ids = StackIds {
            pid,
            comm,
            user: Some(stack),
            kernel: None,
        };
        self.stacks.named(&ids)
    }

    /// Prints the stacks of --folded, the heaviest first, and writes them into the files that are
    /// requested.
    pub(crate) fn fold(&mut self) -> Result<()> {
        let calls = self.args.calls;
        let weight = |mapped: Mapped| if calls { mapped.calls } else { mapped.bytes };
        let mut weights: Vec<_> = self.weights.drain().collect();
        weights.sort_by(|(a, a_mapped), (b, b_mapped)| {
            (weight(*b_mapped), a).cmp(&(weight(*a_mapped), b))
        });
        let mut samples = Vec::new();
        for ((pid, comm, stack), mapped) in weights {
            let Some(stack) = self.named(pid, &comm, stack)? else {
                continue;
            };
            if self.args.folded {
                let line = Folded::new(&stack);
                self.output.raw(|out| line.write(weight(mapped), out))?;
            }
            let values = vec![mapped.calls, mapped.bytes];
            samples.push(Sample {
                stack: Rc::unwrap_or_clone(stack),
                values,
            });
        }
        self.output.flush()?;
        if self.exports.is_enabled() {
            let subject = ProfileInfo {
                name: "memory mapped by mmap(2)".to_owned(),
                values: vec![
                    ValueType::count("mmap_calls", "calls"),
                    ValueType::bytes("mmap_space"),
                ],
                main_value: usize::from(!calls),
                by_thread: true,
                remarks: Vec::new(),
            };
            self.exports.write(subject, samples);
        }
        Ok(())
    }
}
