//! Sums of reclaims by task and cgroup, for `--summary`.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use memtools::print::output;
use memtools::process::container::{self, CgroupInfo};
use serde::Serialize;

use crate::row::{ReclaimReason, Row};

/// Maximum number of tasks with sums of their own, so that a storm of processes takes no more memory.
const MAX_TASKS: usize = 10_000;
/// Number of rows that are printed. The other tasks are one row.
const SHOWN: usize = 20;
/// Name of the row of all other tasks.
const OTHERS: &str = "[others]";

/// Sums of reclaims since the trace began.
#[derive(Debug)]
pub(crate) struct Summary {
    begun: Instant,
    /// Whether text shows the kind of reclaim.
    shows_kind: bool,
    tasks: HashMap<Key, SummaryRow>,
    others: SummaryRow,
}

/// Process, its name and cgroup, and the kind of reclaim.
type Key = (u32, String, Option<String>, ReclaimReason);

/// Row of the reclaims of one kind of a process.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(tag = "type", rename = "reclaim_summary")]
pub(crate) struct SummaryRow {
    /// None for the row of all other tasks.
    pid: Option<u32>,
    comm: String,
    #[serde(flatten)]
    cgroup_info: Option<CgroupInfo>,
    /// None for the row of all other tasks.
    kind: Option<ReclaimReason>,
    stalls: u64,
    stalled_ns: u64,
    /// Time that its tasks were stalled, in percent of the time of the trace. It exceeds 100 if several threads were
    /// stalled at once.
    share_percent: f64,
    longest_ns: u64,
    reclaimed_pages: u64,
    #[serde(skip)]
    shows_kind: bool,
}

impl SummaryRow {
    fn add(&mut self, stalls: u64, stalled_ns: u64, longest_ns: u64, reclaimed_pages: u64) {
        self.stalls += stalls;
        self.stalled_ns += stalled_ns;
        self.longest_ns = self.longest_ns.max(longest_ns);
        self.reclaimed_pages += reclaimed_pages;
    }

    /// Returns the header of the table.
    fn header(shows_kind: bool) -> String {
        let last = if shows_kind { "KIND" } else { "PAGES" };
        format!(
            "{:<14} {:<7} {:>6} {:>9} {:>7} {last:>8}  CGROUP",
            "COMM", "PID", "STALLS", "TIME(ms)", "SHARE"
        )
    }
}

impl Summary {
    pub(crate) fn new(shows_kind: bool) -> Self {
        Self {
            begun: Instant::now(),
            shows_kind,
            tasks: HashMap::new(),
            others: SummaryRow {
                comm: OTHERS.to_owned(),
                ..SummaryRow::default()
            },
        }
    }

    /// Adds a reclaim.
    pub(crate) fn add(&mut self, row: Row) {
        let origin = row.origin;
        let cgroup = origin.cgroup_info.as_ref();
        let cgroup = cgroup.and_then(|info| info.cgroup.clone());
        let key = (origin.pid, origin.comm.clone(), cgroup, row.kind);
        let is_full = self.tasks.len() >= MAX_TASKS && !self.tasks.contains_key(&key);
        let sums = if is_full {
            &mut self.others
        } else {
            self.tasks.entry(key).or_insert_with(|| SummaryRow {
                pid: Some(origin.pid),
                comm: origin.comm,
                cgroup_info: origin.cgroup_info,
                kind: Some(row.kind),
                ..SummaryRow::default()
            })
        };
        sums.add(1, row.latency_ns, row.latency_ns, row.reclaimed_pages);
    }

    /// Returns the header, and the rows: those that were stalled longest, and a row of all others if there are any.
    pub(crate) fn end(self) -> (String, Vec<SummaryRow>) {
        let traced = self.begun.elapsed();
        (SummaryRow::header(self.shows_kind), self.rows(traced))
    }

    fn rows(self, traced: Duration) -> Vec<SummaryRow> {
        let mut rows: Vec<_> = self.tasks.into_values().collect();
        rows.sort_by_key(|row| (Reverse(row.stalled_ns), row.pid));
        let mut others = self.others;
        for row in rows.drain(SHOWN.min(rows.len())..) {
            others.add(
                row.stalls,
                row.stalled_ns,
                row.longest_ns,
                row.reclaimed_pages,
            );
        }
        if others.stalls > 0 {
            rows.push(others);
        }
        for row in &mut rows {
            row.share_percent = row.stalled_ns as f64 / traced.as_nanos().max(1) as f64 * 100.0;
            row.shows_kind = self.shows_kind;
        }
        rows
    }
}

impl output::Row for SummaryRow {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let pid = self.pid.map_or_else(String::new, |pid| pid.to_string());
        let last = match self.kind {
            Some(kind) if self.shows_kind => kind.name().to_owned(),
            None if self.shows_kind => String::new(),
            _ => self.reclaimed_pages.to_string(),
        };
        let line = format!(
            "{:<14.14} {pid:<7} {:>6} {:>9.2} {:>5.1} % {last:>8}  {}",
            self.comm,
            self.stalls,
            self.stalled_ns as f64 / 1e6,
            self.share_percent,
            container::column(self.cgroup_info.as_ref(), true)
        );
        writeln!(out, "{}", line.trim_end())
    }
}

#[cfg(test)]
mod tests {
    use memtools::print::output::Row as _;
    use memtools::process::origin::Origin;

    use super::*;

    fn stall(pid: u32, kind: ReclaimReason, milliseconds: u64) -> Row {
        Row {
            origin: Origin {
                time: "2019-08-01T21:30:25+00:00[+00:00]".parse().expect("a time"),
                pid,
                tid: pid,
                comm: "writer".into(),
                cgroup_info: Some(CgroupInfo::at(Some("/db.service".into()))),
            },
            uid: 0,
            kind,
            latency_ns: milliseconds * 1_000_000,
            reclaimed_pages: 32,
            free_kb: None,
            order: 0,
            gfp_flags: memtools::print::gfp::Gfp(0),
            limited: None,
            limited_id: None,
            stack: None,
            microseconds: 0,
            columns: crate::row::Columns::default(),
        }
    }

    fn text(rows: &[SummaryRow]) -> String {
        let mut text = Vec::new();
        for row in rows {
            row.text(&mut text).expect("memory");
        }
        String::from_utf8(text).expect("UTF-8")
    }

    #[test]
    fn stalls_are_added_up_by_process_and_kind() {
        let mut summary = Summary::new(true);
        for _ in 0..3 {
            summary.add(stall(7, ReclaimReason::Memcg, 20));
        }
        summary.add(stall(7, ReclaimReason::Direct, 5));
        assert_eq!(
            text(&summary.rows(Duration::from_secs(1))),
            "writer         7            3     60.00   6.0 %    memcg  db\n\
             writer         7            1      5.00   0.5 %   direct  db\n"
        );
        assert!(SummaryRow::header(true).len() <= 80);
    }

    #[test]
    fn all_but_the_longest_stalled_are_one_row() {
        let mut summary = Summary::new(false);
        for pid in 1..=23 {
            summary.add(stall(pid, ReclaimReason::Direct, pid.into()));
        }
        let rows = summary.rows(Duration::from_secs(1));
        assert_eq!(rows.len(), SHOWN + 1);
        assert_eq!((rows[0].pid, rows[19].pid), (Some(23), Some(4)));
        assert_eq!(
            text(&rows[20..]),
            "[others]                    3      6.00   0.6 %       96\n"
        );
    }
}
