//! Rows of --trace-compaction, one for each compaction.

use std::io::{self, Write};

use anyhow::Result;
use libbpf_rs::MapMut;
use libbpf_rs::skel::Skel;
use memtools::bpf::ring::Events;
use memtools::bpf::types::known;
use memtools::export::text::part_below_row;
use memtools::print::clock::{self, Clock};
use memtools::print::output::{Output, Row};
use memtools::print::text;
use memtools::print::timeline::TimelineEntry;
use memtools::process::container::{self, CgroupInfo, CgroupResolver};
use memtools::process::filter::Filter;
use memtools::process::origin::Origin;
use memtools::run::cli::CommonArgs;
use memtools::run::losses::Losses;
use memtools::run::poll::Poller;
use memtools::run::protect;
use memtools::stacks::named::{NamedStack, StackIds};
use memtools::stacks::symbolize::KernelNames;
use memtools::stacks::table::{MAX_EVENT_ENTRIES, Stacks};
use serde::Serialize;

use crate::attach::Tracing;
use crate::bpf::types::{compact_result as Status, compaction, fragmentation};
use crate::plan::CompactionPlan;

/// Value of the BPF program for a missing fragmentation index.
const FRAGMENTATION_UNKNOWN: i32 = fragmentation::FRAGMENTATION_UNKNOWN.0.cast_signed();

/// Prints compactions as they end, in the columns of BCC's compactsnoop.
pub(crate) fn trace(
    plan: &CompactionPlan,
    common: &CommonArgs,
    filter: &Filter,
    tracing: Tracing,
    poller: Poller<'_>,
    output: Output,
) -> Result<()> {
    let Tracing { skel, links } = tracing;
    let events: Events<'_, compaction> = Events::new(&skel.maps.events)?;
    let mut printer = Printer {
        output,
        clock: Clock::new(),
        stacks: Stacks::new(memtools::stack_maps!(skel), MAX_EVENT_ENTRIES)?,
        cgroup_resolver: CgroupResolver::if_wanted(plan.with_cgroups, &skel.maps.cgroup_paths),
        container: plan.container,
        names: KernelNames::default(),
        with_stacks: plan.kernel_stacks,
        extended: plan.extended,
        told_of_state: false,
    };
    protect::protect_from_oom();
    memtools::message!("tracing compaction, Ctrl-C to end");
    let names = header(plan.extended, plan.container);
    printer.output.header(&names)?;
    printer.output.flush()?;
    events.follow(poller, common.deadline(), links, |events| {
        printer.print(events)
    })?;
    Losses::report(skel.object(), filter, &mut printer.output)?;
    printer.output.finish()
}

/// Printer that turns events into rows.
struct Printer<'a> {
    output: Output,
    clock: Clock,
    stacks: Stacks<'a, MapMut<'static>>,
    names: KernelNames,
    cgroup_resolver: Option<CgroupResolver<'a>>,
    /// Whether the column CONTAINER is printed.
    container: bool,
    with_stacks: bool,
    extended: bool,
    told_of_state: bool,
}

impl Printer<'_> {
    fn print(&mut self, events: impl Iterator<Item = compaction>) -> Result<()> {
        for event in events {
            let cgroup_info = self
                .cgroup_resolver
                .as_mut()
                .map(|cgroup_resolver| cgroup_resolver.of(event.cgroup));
            let mut row = Compaction::new(&event, cgroup_info, &self.clock);
            row.extended = self.extended;
            row.container = self.container;
            if self.with_stacks {
                row.stack = Some(self.stack(&event)?);
            }
            if self.extended && row.state.lacks_pages() && !self.told_of_state {
                self.told_of_state = true;
                memtools::message!(
                    "this kernel does not provide the watermarks of a zone: - is shown"
                );
            }
            self.output.row(&row)?;
        }
        self.stacks.renew_for_events()?;
        self.output.flush()
    }

    fn stack(&mut self, event: &compaction) -> Result<NamedStack> {
        let ids = StackIds {
            kernel: Some(event.kernel_stack),
            ..StackIds::default()
        };
        NamedStack::read(&ids, &mut self.stacks, &mut self.names)
    }
}

/// Compaction of a zone.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "compaction")]
struct Compaction {
    #[serde(flatten)]
    origin: Origin,
    /// Whether text has the column CONTAINER.
    #[serde(skip)]
    container: bool,
    node: i32,
    zone: String,
    /// Order of the pages that are wanted; -1 to compact as much as possible.
    order: i32,
    sync: bool,
    #[serde(flatten)]
    state: ZoneState,
    latency_ns: u64,
    /// Name of the result. None if this tool does not know the result.
    status: Option<&'static str>,
    /// Kernel stack, with --kernel-stacks.
    #[serde(flatten)]
    stack: Option<NamedStack>,
    #[serde(skip)]
    extended: bool,
}

/// State of the zone before any page was moved. Values that the kernel does not provide are None.
#[derive(Debug, Serialize)]
struct ZoneState {
    /// Fragmentation index for the order, as a fraction of 1. None also if no single order is wanted.
    fragmentation_index: Option<f64>,
    min_pages: Option<u64>,
    low_pages: Option<u64>,
    high_pages: Option<u64>,
    free_pages: Option<u64>,
}

impl ZoneState {
    fn new(event: &compaction) -> Self {
        let thousandths = event.fragmentation;
        Self {
            fragmentation_index: (thousandths != FRAGMENTATION_UNKNOWN)
                .then(|| f64::from(thousandths) / 1000.0),
            min_pages: known(event.min_pages),
            low_pages: known(event.low_pages),
            high_pages: known(event.high_pages),
            free_pages: known(event.free_pages),
        }
    }

    fn pages(&self) -> [Option<u64>; 4] {
        [
            self.min_pages,
            self.low_pages,
            self.high_pages,
            self.free_pages,
        ]
    }

    fn lacks_pages(&self) -> bool {
        self.pages().contains(&None)
    }

    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        match self.fragmentation_index {
            Some(index) => write!(out, "{index:<8.3} ")?,
            None => write!(out, "{:<8} ", "-")?,
        }
        for pages in self.pages() {
            match pages {
                Some(pages) => write!(out, "{pages:<8} ")?,
                None => write!(out, "{:<8} ", "-")?,
            }
        }
        Ok(())
    }
}

/// Returns the line of column names.
fn header(extended: bool, container: bool) -> String {
    let container = container::header(container);
    let state = if extended {
        "FRAGIDX  MIN      LOW      HIGH     FREE     "
    } else {
        ""
    };
    format!(
        "TIME     COMM           PID    {container}NODE ZONE         ORDER MODE    {state}  LAT(ms)           STATUS"
    )
}

impl Compaction {
    fn new(event: &compaction, cgroup_info: Option<CgroupInfo>, clock: &Clock) -> Self {
        Self {
            origin: Origin::new(
                clock.local(event.time_ns + event.latency_ns),
                (event.pid, event.tid),
                &event.comm,
                cgroup_info,
            ),
            container: false,
            node: event.node,
            zone: text::from_c(&event.zone),
            order: event.order,
            sync: event.sync != 0,
            state: ZoneState::new(event),
            latency_ns: event.latency_ns,
            status: name(event.status),
            stack: None,
            extended: false,
        }
    }
}

/// Returns the status as the kernel's own tracepoint prints it.
fn name(status: Status) -> Option<&'static str> {
    Some(match status {
        Status::COMPACT_NOT_SUITABLE_ZONE => "not_suitable_zone",
        Status::COMPACT_SKIPPED => "skipped",
        Status::COMPACT_DEFERRED => "deferred",
        Status::COMPACT_NO_SUITABLE_PAGE => "no_suitable_page",
        Status::COMPACT_CONTINUE => "continue",
        Status::COMPACT_COMPLETE => "complete",
        Status::COMPACT_PARTIAL_SKIPPED => "partial_skipped",
        Status::COMPACT_CONTENDED => "contended",
        Status::COMPACT_SUCCESS => "success",
        _ => return None,
    })
}

impl Row for Compaction {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(
            out,
            "{:<8} {:<14.14} {:<6} {}{:<4} {:<12} {:<5} {:<7} ",
            clock::time_of_day(&self.origin.time),
            self.origin.comm,
            self.origin.pid,
            container::column(self.origin.cgroup_info.as_ref(), self.container),
            self.node,
            self.zone,
            self.order,
            if self.sync { "SYNC" } else { "ASYNC" },
        )?;
        if self.extended {
            self.state.text(out)?;
        }
        writeln!(
            out,
            "{:>9.3} {:>16}",
            self.latency_ns as f64 / 1e6,
            self.status.unwrap_or("-"),
        )?;
        if let Some(stack) = &self.stack {
            part_below_row(stack.part(), out)?;
            writeln!(out)?;
        }
        Ok(())
    }

    fn moment(&self) -> TimelineEntry<'_> {
        self.origin.moment("compaction", Some(self.latency_ns))
    }
}

#[cfg(test)]
mod tests {
    use memtools::bpf::types::UNKNOWN;
    use memtools::process::filter::{FilterArgs, TaskKind};
    use memtools::run::skeleton::StackCapacity;

    use super::*;
    use crate::bpf;

    fn event() -> compaction {
        let mut event = compaction {
            latency_ns: 25_400,
            pid: 23685,
            tid: 23685,
            order: -1,
            sync: 1,
            status: Status::COMPACT_COMPLETE,
            fragmentation: FRAGMENTATION_UNKNOWN,
            min_pages: 11284,
            low_pages: 14105,
            high_pages: 16926,
            free_pages: UNKNOWN,
            ..compaction::default()
        };
        event.comm[..3].copy_from_slice(&b"zsh".map(u8::cast_signed));
        event.zone[..3].copy_from_slice(&b"DMA".map(u8::cast_signed));
        event
    }

    fn printed(event: &compaction, extended: bool) -> String {
        let mut row = Compaction::new(event, None, &Clock::new());
        row.origin.time = "2019-08-01T21:30:25+00:00[+00:00]".parse().expect("a time");
        row.extended = extended;
        let mut line = Vec::new();
        row.text(&mut line).expect("memory");
        format!(
            "{}\n{}",
            header(extended, false),
            String::from_utf8_lossy(&line)
        )
    }

    #[test]
    fn columns_are_those_of_compactsnoop() {
        assert_eq!(
            printed(&event(), false),
            "TIME     COMM           PID    NODE ZONE         ORDER MODE      LAT(ms)           STATUS\n\
             21:30:25 zsh            23685  0    DMA          -1    SYNC        0.025         complete\n"
        );
        assert_eq!(name(Status(99)), None);
        let cgroup_info = Some(CgroupInfo::at(Some("/system.slice/db.service".into())));
        let mut row = Compaction::new(&event(), cgroup_info, &Clock::new());
        row.origin.time = "2019-08-01T21:30:25+00:00[+00:00]".parse().expect("a time");
        row.container = true;
        let mut line = Vec::new();
        row.text(&mut line).expect("memory");
        assert_eq!(
            format!(
                "{}\n{}",
                header(false, true),
                String::from_utf8_lossy(&line)
            ),
            "TIME     COMM           PID    CONTAINER        NODE ZONE         ORDER MODE      LAT(ms)           STATUS\n\
             21:30:25 zsh            23685  db               0    DMA          -1    SYNC        0.025         complete\n"
        );
    }

    #[test]
    fn what_a_zone_does_not_tell_is_a_dash() {
        let mut event = event();
        assert_eq!(
            printed(&event, true),
            "TIME     COMM           PID    NODE ZONE         ORDER MODE    FRAGIDX  MIN      LOW      HIGH     FREE       LAT(ms)           STATUS\n\
             21:30:25 zsh            23685  0    DMA          -1    SYNC    -        11284    14105    16926    -            0.025         complete\n"
        );
        event.fragmentation = -1000;
        assert!(printed(&event, true).contains(" SYNC    -1.000   11284 "));
        event.fragmentation = 728;
        let row = Compaction::new(&event, None, &Clock::new());
        let json = serde_json::to_value(row).expect("JSON");
        assert_eq!(json["fragmentation_index"], 0.728);
        assert!(json["free_pages"].is_null() && json.get("kernel_frames").is_none());
    }

    #[test]
    fn what_is_unknown_at_first_is_none() {
        let everything = FilterArgs::default();
        let filter = everything.resolve(None, TaskKind::All).expect("a filter");
        let mut open = bpf::prepare(&filter, StackCapacity::NONE).expect("an object");
        let at_first = &open.options().expect("options").no_compaction;
        let zone = ZoneState::new(at_first);
        assert_eq!((zone.fragmentation_index, zone.pages()), (None, [None; 4]));
    }
}
