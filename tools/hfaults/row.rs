//! Row of hfaults' reports.

use std::io::{self, Write};

use jiff::Zoned;
use memtools::export::exposition::MetricKind;
use memtools::export::metrics::{Family, Metrics};
use memtools::print::output;
use memtools::print::text;
use memtools::print::{
    clock,
    timeline::{Count, TimelineEntry, Unit},
};
use memtools::process::container::{self, CgroupInfo};
use serde::Serialize;

use crate::args::Args;
use crate::bpf::types::{fault_key, reason as Reason};

pub(crate) static FAULTS: Family = Family {
    name: "memtools_huge_page_faults_total",
    help: "Page faults on huge pages, by task and by reason where that is requested.",
    labels: &["comm", "unit", "container", "reason"],
    kind: MetricKind::Counter,
};
pub(crate) static MADVISE: Family = Family {
    name: "memtools_huge_page_madvise_calls_total",
    help: "Calls of madvise(2) with MADV_HUGEPAGE, by task.",
    labels: &["comm", "unit", "container"],
    kind: MetricKind::Counter,
};

/// Faults of one process, or its faults of one page size and reason.
#[derive(Serialize)]
#[serde(tag = "type", rename = "process")]
pub(crate) struct Row<'a> {
    #[serde(serialize_with = "clock::serialize")]
    time: &'a Zoned,
    pid: u32,
    comm: String,
    #[serde(flatten)]
    cgroup_info: Option<CgroupInfo>,
    /// Size of the pages. None if it was not requested, or is unknown.
    page_bytes: Option<u64>,
    reason: Option<&'static str>,
    count: u64,
    #[serde(skip)]
    extended: bool,
    /// Whether text names the container.
    #[serde(skip)]
    container: bool,
    /// Name of the counts on a timeline.
    #[serde(skip)]
    subject: &'static str,
}

impl<'a> Row<'a> {
    pub(crate) fn new(
        key: &fault_key,
        cgroup_info: Option<CgroupInfo>,
        count: u64,
        time: &'a Zoned,
        args: &Args,
    ) -> Self {
        Self {
            time,
            pid: key.pid,
            comm: text::from_c(&key.comm),
            cgroup_info,
            page_bytes: (key.page_shift != 0).then(|| 1 << key.page_shift),
            reason: match key.reason {
                Reason::REASON_NO_PAGE => Some("no page"),
                Reason::REASON_COPY_ON_WRITE => Some("copy on write"),
                Reason::REASON_THP => Some("huge page"),
                Reason::REASON_THP_FALLBACK => Some("fallback"),
                Reason::REASON_THP_ZERO => Some("zero page"),
                Reason::REASON_THP_SHARED => Some("shared memory"),
                Reason::REASON_EXHAUSTED => Some("pool exhausted"),
                _ => None,
            },
            count,
            extended: args.extended,
            container: args.containers.container,
            subject: args.subject(),
        }
    }
}

impl Row<'_> {
    /// Adds the count to the metrics of calls of madvise(2), or of faults.
    pub(crate) fn record_metrics(&self, is_madvise: bool, metrics: &mut Metrics) {
        let [unit, container] = container::labels(self.cgroup_info.as_ref());
        let labels = [self.comm.as_str(), unit, container];
        if is_madvise {
            metrics.add(&MADVISE, &labels, self.count);
        } else {
            let [comm, unit, container] = labels;
            let reason = self.reason.unwrap_or("unknown");
            metrics.add(&FAULTS, &[comm, unit, container, reason], self.count);
        }
    }
}

impl output::Row for Row<'_> {
    /// Writes `@[pid, comm]: N`, as bpftrace prints a map, and as the book's tool does.
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(out, "@[{}, {}", self.pid, self.comm)?;
        if let Some(cgroup_info) = self.cgroup_info.as_ref().filter(|_| self.container) {
            write!(out, ", {}", cgroup_info.name())?;
        }
        match self.page_bytes {
            Some(bytes) if bytes >= 1 << 30 => write!(out, ", {}GB", bytes >> 30)?,
            Some(bytes) if bytes >= 1 << 20 => write!(out, ", {}MB", bytes >> 20)?,
            Some(bytes) => write!(out, ", {}KB", bytes >> 10)?,
            None if self.extended => write!(out, ", -")?,
            None => {}
        }
        match self.reason {
            Some(reason) => write!(out, ", {reason}")?,
            None if self.extended => write!(out, ", -")?,
            None => {}
        }
        writeln!(out, "]: {}", self.count)
    }

    fn moment(&self) -> TimelineEntry<'_> {
        let name = match self.reason {
            Some(reason) => format!("{}, {reason}", self.subject),
            None => self.subject.to_owned(),
        };
        TimelineEntry::Counts(vec![Count {
            name: name.into(),
            unit: Unit::Count,
            process: Some((self.pid, &self.comm)),
            time: self.time,
            increase: self.count,
        }])
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use memtools::print::clock::Clock;
    use memtools::print::output::Row as _;

    use super::*;

    #[test]
    fn lines_are_those_of_bpftrace() {
        let line = |args: &[&str], page_shift, reason| {
            let mut key = fault_key {
                pid: 884,
                page_shift,
                reason,
                ..fault_key::default()
            };
            key.comm[..4].copy_from_slice(&b"java".map(u8::cast_signed));
            let args = Args::try_parse_from(args).expect("valid");
            let time = Clock::new().local(0);
            let mut line = Vec::new();
            Row::new(&key, None, 8, &time, &args)
                .text(&mut line)
                .expect("memory");
            String::from_utf8(line).expect("UTF-8")
        };
        let unknown = Reason::REASON_UNKNOWN;
        assert_eq!(line(&["hfaults"], 0, unknown), "@[884, java]: 8\n");
        assert_eq!(
            line(&["hfaults", "-e"], 21, Reason::REASON_COPY_ON_WRITE),
            "@[884, java, 2MB, copy on write]: 8\n"
        );
        assert_eq!(
            line(&["hfaults", "-e"], 30, unknown),
            "@[884, java, 1GB, -]: 8\n"
        );
        assert_eq!(
            line(&["hfaults", "--thp"], 0, Reason::REASON_THP_FALLBACK),
            "@[884, java, fallback]: 8\n"
        );
        assert_eq!(
            line(&["hfaults", "--thp"], 16, Reason::REASON_THP),
            "@[884, java, 64KB, huge page]: 8\n"
        );
    }
}
