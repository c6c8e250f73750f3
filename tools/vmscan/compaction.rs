//! A line for each compaction: --trace-compaction.

use std::io::{self, Write};

use anyhow::Result;
use jiff::Zoned;
use libbpf_rs::skel::Skel;
use memtools::clock::{self, Clock};
use memtools::events::Events;
use memtools::filter::Filter;
use memtools::losses::Losses;
use memtools::output::{Output, Row};
use memtools::poll::Poller;
use memtools::text;
use serde::Serialize;

use crate::args::Args;
use crate::attach::Tracing;
use crate::bpf::types::{compact_result as Status, compaction};

/// Prints them as they end, in the columns of BCC's compactsnoop.
pub(crate) fn trace(
    args: &Args,
    filter: &Filter,
    tracing: Tracing,
    poller: Poller<'_>,
    mut output: Output,
) -> Result<()> {
    let Tracing { skel, links } = tracing;
    let events: Events<'_, compaction> = Events::new(&skel.maps.events)?;
    let clock = Clock::new();
    output.header(Compaction::HEADER)?;
    output.flush()?;
    eprintln!("vmscan: tracing compaction, Ctrl-C to end");
    events.follow(poller, args.common.deadline(), links, |events| {
        for event in events {
            output.row(&Compaction::new(&event, &clock))?;
        }
        output.flush()
    })?;
    Losses::tell("vmscan", skel.object(), filter, &mut output)
}

/// The compaction of a zone.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "compaction")]
struct Compaction {
    /// When it ended.
    #[serde(serialize_with = "clock::serialize")]
    time: Zoned,
    pid: u32,
    tid: u32,
    comm: String,
    node: i32,
    zone: String,
    /// Of the pages that are wanted; -1: all that can be had.
    order: i32,
    sync: bool,
    latency_ns: u64,
    /// None if it is unknown to us.
    status: Option<&'static str>,
}

impl Compaction {
    const HEADER: &'static str = concat!(
        "TIME     COMM           PID    NODE ZONE         ORDER MODE   ",
        "   LAT(ms)           STATUS"
    );

    fn new(event: &compaction, clock: &Clock) -> Self {
        Self {
            time: clock.local(event.time_ns + event.latency_ns),
            pid: event.pid,
            tid: event.tid,
            comm: text::from_c(&event.comm),
            node: event.node,
            zone: text::from_c(&event.zone),
            order: event.order,
            sync: event.sync != 0,
            latency_ns: event.latency_ns,
            status: name(event.status),
        }
    }
}

/// As the kernel's own tracepoint prints it.
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
        writeln!(
            out,
            "{:<8} {:<14.14} {:<6} {:<4} {:<12} {:<5} {:<7} {:>9.3} {:>16}",
            clock::time_of_day(&self.time),
            self.comm,
            self.pid,
            self.node,
            self.zone,
            self.order,
            if self.sync { "SYNC" } else { "ASYNC" },
            self.latency_ns as f64 / 1e6,
            self.status.unwrap_or("-"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_those_of_compactsnoop() {
        let mut event = compaction {
            latency_ns: 25_400,
            pid: 23685,
            tid: 23685,
            order: -1,
            sync: 1,
            status: Status::COMPACT_COMPLETE,
            ..compaction::default()
        };
        event.comm[..3].copy_from_slice(&b"zsh".map(u8::cast_signed));
        event.zone[..3].copy_from_slice(&b"DMA".map(u8::cast_signed));
        let mut row = Compaction::new(&event, &Clock::new());
        row.time = "2019-08-01T21:30:25+00:00[+00:00]".parse().expect("a time");
        let mut line = Vec::new();
        row.text(&mut line).expect("memory");
        assert_eq!(
            format!("{}\n{}", Compaction::HEADER, String::from_utf8_lossy(&line)),
            "TIME     COMM           PID    NODE ZONE         ORDER MODE      LAT(ms)           STATUS\n\
             21:30:25 zsh            23685  0    DMA          -1    SYNC        0.025         complete\n"
        );
        assert_eq!(name(Status(99)), None);
    }
}
