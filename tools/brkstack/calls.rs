//! Rows of --events: each call of brk(2), with its stack.

use std::io::{self, Write};
use std::rc::Rc;

use anyhow::Result;
use libbpf_rs::skel::Skel;
use libbpf_rs::{Link, MapMut};
use memtools::bpf::ring::Events;
use memtools::export::metrics::{self, Metrics};
use memtools::export::text::{below_row, part_below_row};
use memtools::print::clock::{self, Clock};
use memtools::print::output::{Hex, Output, Row};
use memtools::print::timeline::TimelineEntry;
use memtools::process::container::{self, CgroupInfo, CgroupResolver};
use memtools::process::filter::Filter;
use memtools::process::origin::Origin;
use memtools::run::losses::{self, Losses};
use memtools::run::poll::Poller;
use memtools::stacks::events::EventStacks;
use memtools::stacks::named::{NamedStack, StackIds};
use memtools::stacks::symbolize::Symbolizer;
use memtools::stacks::unwind::Unwinder;
use serde::Serialize;

use crate::args::Args;
use crate::bpf::Loaded;
use crate::bpf::types::event;
use crate::{CALLS, GROWTH};

/// Symbolizer and unwinder for the stacks of --events, if stacks are requested.
pub(crate) struct StackReaders {
    pub(crate) symbolizer: Option<Symbolizer>,
    pub(crate) unwinder: Option<Unwinder>,
}

/// Parts of the stack that are printed below each row.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct StackParts {
    pub(crate) user: bool,
    pub(crate) kernel: bool,
}

impl StackParts {
    pub(crate) fn any(self) -> bool {
        self.user || self.kernel
    }
}

/// Prints calls until the run ends: the loop of --events.
pub(crate) fn print(
    args: &Args,
    filter: &Filter,
    skel: &Loaded,
    names: StackReaders,
    links: Vec<Link>,
    (mut poller, output): (Poller<'_>, Output),
    metrics: Metrics,
) -> Result<()> {
    let events: Events<event> = Events::new(&skel.maps.events)?;
    let StackReaders {
        symbolizer,
        unwinder,
    } = names;
    let mut stacks = EventStacks::new(memtools::stack_maps!(skel), symbolizer)?;
    let mappings = stacks.begin(unwinder.as_ref().and_then(Unwinder::names))?;
    if let Some(mappings) = &mappings {
        poller.watch_mappings(mappings);
    }
    let mut calls = Printer {
        stacks,
        cgroup_resolver: CgroupResolver::if_wanted(
            args.containers.wanted(args.common.wants_cgroups()),
            &skel.maps.cgroup_paths,
        ),
        container: args.containers.container,
        shown: args.event_stacks(),
        clock: Clock::new(),
        output,
        metrics,
    };
    if calls.metrics.is_enabled() {
        poller.tick_every(metrics::CHECK_INTERVAL)?;
    }
    calls
        .output
        .header(&Call::header(args.containers.container))?;
    calls.output.flush()?;
    let deadline = args.common.deadline();
    events.follow(poller, deadline, links, |events| {
        calls.print(events)?;
        losses::write_metrics(skel.object(), filter, &mut calls.metrics)
    })?;
    calls.stacks.report_losses();
    Losses::report_with_unwinder(skel.object(), filter, unwinder, &mut calls.output)?;
    losses::finish_metrics(skel.object(), filter, calls.metrics)?;
    calls.output.finish()
}

/// Printer that turns events into rows.
struct Printer<'a> {
    stacks: EventStacks<'a, MapMut<'static>>,
    cgroup_resolver: Option<CgroupResolver<'a>>,
    /// Whether the column CONTAINER is printed.
    container: bool,
    shown: StackParts,
    clock: Clock,
    output: Output,
    metrics: Metrics,
}

impl Printer<'_> {
    fn print(&mut self, events: impl Iterator<Item = event>) -> Result<()> {
        self.stacks.refresh();
        for event in events {
            let cgroup_info = self
                .cgroup_resolver
                .as_mut()
                .map(|cgroup_resolver| cgroup_resolver.of(event.cgroup));
            let mut call = Call::new(&event, cgroup_info, &self.clock);
            call.stack = self.symbolize(&event, &call.origin.comm)?;
            call.shown = self.shown;
            call.container = self.container;
            call.record_metrics(&mut self.metrics);
            self.output.row(&call)?;
        }
        self.stacks.renew()?;
        self.output.flush()
    }

    /// Symbolizes the parts of the stack that are requested.
    fn symbolize(&mut self, event: &event, comm: &str) -> Result<Option<Rc<NamedStack>>> {
        let ids = StackIds {
            pid: event.pid,
            comm,
            user: self.shown.user.then_some(event.user_stack),
            kernel: self.shown.kernel.then_some(event.kernel_stack),
        };
        self.stacks.named(&ids)
    }
}

/// Row of one call of brk(2).
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "call")]
struct Call {
    #[serde(flatten)]
    origin: Origin,
    /// Requested end of the heap; 0 if the call only requested the current end.
    requested: Hex,
    /// End of the heap before the call; `new` is the end after it.
    old: Hex,
    new: Hex,
    /// Growth of the heap, negative if it has shrunk.
    growth_bytes: i64,
    /// Stack of the call, with -U or -K.
    #[serde(flatten)]
    stack: Option<Rc<NamedStack>>,
    #[serde(skip)]
    shown: StackParts,
    /// Whether text has the column CONTAINER.
    #[serde(skip)]
    container: bool,
}

impl Call {
    /// Returns the header, with CONTAINER if that column is requested.
    fn header(container: bool) -> String {
        format!(
            "TIME     PID     COMM             {}OLD                NEW                    GROWTH",
            container::header(container)
        )
    }

    fn new(event: &event, cgroup_info: Option<CgroupInfo>, clock: &Clock) -> Self {
        Self {
            origin: Origin::new(
                clock.local(event.time_ns),
                (event.pid, event.tid),
                &event.comm,
                cgroup_info,
            ),
            container: false,
            requested: Hex(event.requested),
            old: Hex(event.old_end),
            new: Hex(event.new_end),
            growth_bytes: event.new_end.wrapping_sub(event.old_end).cast_signed(),
            stack: None,
            shown: StackParts::default(),
        }
    }
}

impl Call {
    /// Adds the call to its task's sums.
    fn record_metrics(&self, metrics: &mut Metrics) {
        let [unit, container] = container::labels(self.origin.cgroup_info.as_ref());
        let labels = [self.origin.comm.as_str(), unit, container];
        metrics.add(&CALLS, &labels, 1);
        let growth = u64::try_from(self.growth_bytes).unwrap_or(0);
        metrics.add(&GROWTH, &labels, growth);
    }
}

impl Row for Call {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "{:<8} {:<7} {:<16} {}{:<18} {:<18} {:>10}",
            clock::time_of_day(&self.origin.time),
            self.origin.pid,
            self.origin.comm,
            container::column(self.origin.cgroup_info.as_ref(), self.container),
            self.old,
            self.new,
            self.growth_bytes
        )?;
        match &self.stack {
            Some(stack) if self.shown.user && self.shown.kernel => below_row(stack, out),
            Some(stack) => part_below_row(stack.user.as_ref().or(stack.kernel.as_ref()), out),
            None => Ok(()),
        }
    }

    fn moment(&self) -> TimelineEntry<'_> {
        self.origin.moment("brk", None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_stand_below_their_columns() {
        let mut event = event {
            requested: 0x5581_4f0c_2000,
            old_end: 0x5581_4f0a_1000,
            new_end: 0x5581_4f0c_2000,
            pid: 4961,
            tid: 4962,
            ..event::default()
        };
        event.comm[..2].copy_from_slice(&b"sh".map(u8::cast_signed));
        let mut call = Call::new(&event, None, &Clock::new());
        call.origin.time = "2026-11-20T04:05:06+01:00[+01:00]".parse().expect("a time");
        let mut line = Vec::new();
        call.text(&mut line).expect("memory");
        assert_eq!(
            format!(
                "{}\n{}",
                Call::header(false),
                String::from_utf8_lossy(&line)
            ),
            "TIME     PID     COMM             OLD                NEW                    GROWTH\n\
             04:05:06 4961    sh               0x55814f0a1000     0x55814f0c2000         135168\n"
        );
        assert_eq!(
            serde_json::to_string(&call).expect("JSON"),
            r#"{"type":"call","time":"2026-11-20T04:05:06.000000+01:00","pid":4961,"tid":4962,"comm":"sh","requested":"0x55814f0c2000","old":"0x55814f0a1000","new":"0x55814f0c2000","growth_bytes":135168}"#
        );
    }
}
