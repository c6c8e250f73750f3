//! Pages of one process as a line of text, as JSON and in metrics.

use std::io::{self, Write};

use jiff::Zoned;
use memtools::export::exposition::MetricKind;
use memtools::export::metrics::{Family, Metrics};
use memtools::print::timeline::{Count, TimelineEntry, Unit};
use memtools::print::{clock, output};
use memtools::process::container::{self, CgroupInfo};
use serde::Serialize;

pub(crate) static PAGES_IN: Family = Family {
    name: "memtools_swap_in_pages_total",
    help: "Pages swapped in, by the task that read them.",
    labels: &["comm", "unit", "container"],
    kind: MetricKind::Counter,
};

pub(crate) static PAGES_ZSWAP: Family = Family {
    name: "memtools_swap_in_zswap_pages_total",
    help: "Pages swapped in that zswap had in memory, compressed.",
    labels: &["comm", "unit", "container"],
    kind: MetricKind::Counter,
};

pub(crate) static PAGES_OUT: Family = Family {
    name: "memtools_swap_out_pages_total",
    help: "Pages written to swap, by the task that wrote them.",
    labels: &["comm", "unit", "container"],
    kind: MetricKind::Counter,
};

pub(crate) static HELD_UP: Family = Family {
    name: "memtools_swap_in_duration_seconds",
    help: "Time for which tasks waited for pages from swap.",
    labels: &[],
    kind: MetricKind::Durations,
};

/// Optional columns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Columns {
    pub(crate) container: bool,
    pub(crate) zswap: bool,
    pub(crate) latency: bool,
    pub(crate) out: bool,
}

impl Columns {
    pub(crate) fn header(self) -> String {
        let mut header = format!("{:<16} {:<7} ", "COMM", "PID");
        header += &container::header(self.container);
        header += &format!("{:<8}", "COUNT");
        if self.zswap {
            header += &format!(" {:<8}", "ZSWAP");
        }
        if self.out {
            header += &format!(" {:<8}", "OUT");
        }
        if self.latency {
            header += " HELD(ms)";
        }
        header.trim_end().to_owned()
    }
}

/// Pages of one process in one interval.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "process")]
pub(crate) struct Row<'a> {
    #[serde(serialize_with = "clock::serialize")]
    pub(crate) time: &'a Zoned,
    pub(crate) pid: u32,
    pub(crate) comm: String,
    #[serde(flatten)]
    pub(crate) cgroup_info: Option<CgroupInfo>,
    pub(crate) pages_in: u64,
    /// Number of the pages that came from zswap. None if they are not counted, or cannot be.
    pub(crate) pages_zswap: Option<u64>,
    /// Number of pages written to swap. None if they are not counted.
    pub(crate) pages_out: Option<u64>,
    pub(crate) held_up_ns: Option<u64>,
    #[serde(skip)]
    pub(crate) columns: Columns,
}

impl Row<'_> {
    pub(crate) fn record_metrics(&self, metrics: &mut Metrics) {
        let [unit, container] = container::labels(self.cgroup_info.as_ref());
        let labels = &[self.comm.as_str(), unit, container];
        metrics.add(&PAGES_IN, labels, self.pages_in);
        for (family, pages) in [
            (&PAGES_ZSWAP, self.pages_zswap),
            (&PAGES_OUT, self.pages_out),
        ] {
            if let Some(pages) = pages {
                metrics.add(family, labels, pages);
            }
        }
    }
}

impl output::Row for Row<'_> {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut line = format!("{:<16} {:<7} ", self.comm, self.pid);
        line += &container::column(self.cgroup_info.as_ref(), self.columns.container);
        line += &format!("{:<8}", self.pages_in);
        if self.columns.zswap {
            let pages = self.pages_zswap.map(|pages| pages.to_string());
            line += &format!(" {:<8}", pages.as_deref().unwrap_or("-"));
        }
        if let Some(pages) = self.pages_out {
            line += &format!(" {pages:<8}");
        }
        if let Some(ns) = self.held_up_ns {
            line += &format!(" {:.2}", ns as f64 / 1e6);
        }
        writeln!(out, "{}", line.trim_end())
    }

    fn moment(&self) -> TimelineEntry<'_> {
        let count = |name: &'static str, unit, more: Option<u64>| {
            Some(Count {
                name: name.into(),
                unit,
                process: Some((self.pid, &self.comm)),
                time: self.time,
                increase: more?,
            })
        };
        let counts = [
            count("pages swapped in", Unit::Count, Some(self.pages_in)),
            count("pages from zswap", Unit::Count, self.pages_zswap),
            count("pages swapped out", Unit::Count, self.pages_out),
            count("delayed by swap", Unit::Nanoseconds, self.held_up_ns),
        ];
        TimelineEntry::Counts(counts.into_iter().flatten().collect())
    }
}

#[cfg(test)]
mod tests {
    use memtools::print::output::Row as _;

    use memtools::print::clock::Clock;

    use super::*;

    #[test]
    fn a_timeline_has_what_is_counted() {
        let counts = |pages_zswap, pages_out, held_up_ns| {
            let row = Row {
                time: &Clock::new().local(0),
                pid: 4536,
                comm: "stress".into(),
                cgroup_info: None,
                pages_in: 10,
                pages_zswap,
                pages_out,
                held_up_ns,
                columns: Columns {
                    container: false,
                    zswap: false,
                    latency: false,
                    out: false,
                },
            };
            let TimelineEntry::Counts(counts) = row.moment() else {
                panic!("they are counts");
            };
            let count = |count: &Count<'_>| {
                assert_eq!(count.process, Some((4536, "stress")));
                (count.name.to_string(), count.unit, count.increase)
            };
            counts.iter().map(count).collect::<Vec<_>>()
        };
        let pages_in = ("pages swapped in".to_owned(), Unit::Count, 10);
        assert_eq!(counts(None, None, None), std::slice::from_ref(&pages_in));
        assert_eq!(
            counts(Some(7), Some(0), Some(123)),
            [
                pages_in,
                ("pages from zswap".to_owned(), Unit::Count, 7),
                ("pages swapped out".to_owned(), Unit::Count, 0),
                ("delayed by swap".to_owned(), Unit::Nanoseconds, 123),
            ]
        );
    }

    #[test]
    fn columns_are_bcc_s_and_line_up() {
        let text = |zswap, latency, out, pages_zswap| {
            let columns = Columns {
                container: false,
                zswap,
                latency,
                out,
            };
            let row = Row {
                time: &Clock::new().local(0),
                pid: 4536,
                comm: "gnome-shell".into(),
                cgroup_info: None,
                pages_in: 14,
                pages_zswap,
                pages_out: out.then_some(3),
                held_up_ns: latency.then_some(1_500_000),
                columns,
            };
            let mut line = Vec::new();
            row.text(&mut line).expect("memory");
            format!("{}\n{}", columns.header(), String::from_utf8_lossy(&line))
        };
        assert_eq!(
            text(false, false, false, None),
            "COMM             PID     COUNT\n\
             gnome-shell      4536    14\n"
        );
        assert_eq!(
            text(true, true, true, Some(11)),
            "COMM             PID     COUNT    ZSWAP    OUT      HELD(ms)\n\
             gnome-shell      4536    14       11       3        1.50\n"
        );
        assert_eq!(
            text(true, false, false, None),
            "COMM             PID     COUNT    ZSWAP\n\
             gnome-shell      4536    14       -\n"
        );
    }
}
