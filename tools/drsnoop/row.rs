//! Row of a reclaim.

use std::io::{self, Write};
use std::rc::Rc;

use memtools::export::text::below_row;
use memtools::print::gfp::Gfp;
use memtools::print::output;
use memtools::print::timeline::TimelineEntry;
use memtools::process::container;
use memtools::process::origin::Origin;
use memtools::stacks::named::NamedStack;
use serde::Serialize;

/// Width of BCC's column for the name, in characters.
const NAME_CHARACTERS: usize = 14;

/// Optional columns, besides BCC's four.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Columns {
    pub(crate) timestamp: bool,
    pub(crate) uid: bool,
    /// Column TID in place of PID.
    pub(crate) tid: bool,
    pub(crate) container: bool,
    pub(crate) free: bool,
    pub(crate) kind: bool,
    pub(crate) extended: bool,
    /// Cgroup whose limit the task reclaimed for.
    pub(crate) limited: bool,
}

impl Columns {
    pub(crate) fn header(self) -> String {
        let mut line = String::new();
        if self.timestamp {
            line += &format!("{:<14}", "TIME(s)");
        }
        if self.uid {
            line += &format!("{:<6}", "UID");
        }
        let id = if self.tid { "TID" } else { "PID" };
        line += &format!("{:<14} {id:<6} ", "COMM");
        line += &container::header(self.container);
        line += &format!("{:>8} {:>5}", "LAT(ms)", "PAGES");
        if self.free {
            line += &format!("{:>10}", "FREE(KB)");
        }
        if self.kind {
            line += &format!(" {:<6}", "KIND");
        }
        if self.extended {
            line += &format!(" {:>5} {:<44} {:<24}", "ORDER", "GFP", "CGROUP");
        }
        if self.limited {
            line += " LIMITED";
        }
        line.trim_end().to_owned()
    }
}

/// Reason of a reclaim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ReclaimReason {
    /// The machine, or a node of it, was short of free memory.
    Direct,
    /// A memory cgroup was at its limit.
    Memcg,
}

impl ReclaimReason {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Memcg => "memcg",
        }
    }
}

/// Row of one reclaim.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "reclaim")]
pub(crate) struct Row {
    #[serde(flatten)]
    pub(crate) origin: Origin,
    pub(crate) uid: u32,
    pub(crate) kind: ReclaimReason,
    pub(crate) latency_ns: u64,
    pub(crate) reclaimed_pages: u64,
    /// Free memory of the machine at the beginning of the reclaim; at the moment of printing where the BPF program
    /// cannot read it.
    pub(crate) free_kb: Option<u64>,
    /// Order of the wanted allocation: the binary logarithm of its number of pages.
    pub(crate) order: i32,
    pub(crate) gfp_flags: Gfp,
    /// Cgroup whose limit the task reclaimed for: its own or one above it, as a path below the mount of the hierarchy
    /// that limits memory. None for direct reclaim, or if the cgroup was removed.
    pub(crate) limited: Option<String>,
    /// Id of the cgroup whose limit the task reclaimed for. None for direct reclaim.
    pub(crate) limited_id: Option<u64>,
    /// Stack of the reclaim, with --stack.
    #[serde(flatten)]
    pub(crate) stack: Option<Rc<NamedStack>>,
    /// Time since the end of the first reclaim.
    #[serde(skip)]
    pub(crate) microseconds: u64,
    #[serde(skip)]
    pub(crate) columns: Columns,
}

impl output::Row for Row {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let columns = self.columns;
        if columns.timestamp {
            write!(out, "{:<14.9}", self.microseconds as f64 / 1e6)?;
        }
        if columns.uid {
            write!(out, "{:<6}", self.uid)?;
        }
        let origin = &self.origin;
        let id = if columns.tid { origin.tid } else { origin.pid };
        let name: String = origin.comm.chars().take(NAME_CHARACTERS).collect();
        let milliseconds = self.latency_ns as f64 / 1e6;
        let pages = self.reclaimed_pages;
        write!(out, "{name:<14} {id:<6} ")?;
        let column = container::column(origin.cgroup_info.as_ref(), columns.container);
        write!(out, "{column}")?;
        write!(out, "{milliseconds:>8.2} {pages:>5}")?;
        if columns.free {
            match self.free_kb {
                Some(free) => write!(out, "{free:>10}")?,
                None => write!(out, "{:>10}", "-")?,
            }
        }
        if columns.kind {
            write!(out, " {}", self.kind.name())?;
        }
        if columns.extended {
            // "memcg" is the shorter of the two kinds.
            let width = if self.kind == ReclaimReason::Memcg {
                7
            } else {
                6
            };
            let cgroup = origin
                .cgroup_info
                .as_ref()
                .and_then(|cgroup_info| cgroup_info.cgroup.as_deref());
            let cgroup = cgroup.unwrap_or("-");
            write!(out, "{:>width$} {:<44} ", self.order, self.gfp_flags)?;
            match (columns.limited, &self.limited, self.limited_id) {
                (false, ..) => write!(out, "{cgroup}")?,
                (true, Some(limited), _) => write!(out, "{cgroup:<24} {limited}")?,
                (true, None, Some(id)) => write!(out, "{cgroup:<24} [gone: id {id}]")?,
                (true, None, None) => write!(out, "{cgroup:<24} -")?,
            }
        }
        writeln!(out)?;
        if let Some(stack) = &self.stack {
            below_row(stack, out)?;
            writeln!(out)?;
        }
        Ok(())
    }

    fn moment(&self) -> TimelineEntry<'_> {
        let name = format!("{} reclaim", self.kind.name());
        self.origin.moment(name, Some(self.latency_ns))
    }
}

#[cfg(test)]
mod tests {
    use memtools::print::output::Row as _;
    use memtools::process::container::CgroupInfo;
    use memtools::stacks::named::{Frame, Part};

    use super::*;

    fn row(columns: Columns) -> Row {
        Row {
            origin: Origin {
                time: "2019-08-01T21:30:25+00:00[+00:00]".parse().expect("a time"),
                pid: 17678,
                tid: 17679,
                comm: "a-very-long-name".into(),
                cgroup_info: Some(CgroupInfo::at(Some("/db.service/worker".into()))),
            },
            uid: 1000,
            kind: ReclaimReason::Memcg,
            latency_ns: 30_695_000,
            reclaimed_pages: 38,
            free_kb: Some(176_604),
            order: 0,
            gfp_flags: Gfp(0x100cca),
            limited: Some("/db.service".into()),
            limited_id: Some(4321),
            stack: None,
            microseconds: 1_204_567,
            columns,
        }
    }

    fn text(row: &Row) -> String {
        let mut text = Vec::new();
        row.text(&mut text).expect("memory");
        String::from_utf8(text).expect("UTF-8")
    }

    #[test]
    fn columns_are_bccs() {
        let columns = Columns::default();
        assert_eq!(
            format!("{}\n{}", columns.header(), text(&row(columns))),
            "COMM           PID     LAT(ms) PAGES\n\
             a-very-long-na 17678     30.70    38\n"
        );
        let columns = Columns {
            timestamp: true,
            uid: true,
            tid: true,
            free: true,
            ..columns
        };
        assert_eq!(
            format!("{}\n{}", columns.header(), text(&row(columns))),
            "TIME(s)       UID   COMM           TID     LAT(ms) PAGES  FREE(KB)\n\
             1.204567000   1000  a-very-long-na 17679     30.70    38    176604\n"
        );
    }

    #[test]
    fn extended_columns_come_after_bccs() {
        let columns = Columns {
            kind: true,
            extended: true,
            free: true,
            ..Columns::default()
        };
        let mut row = row(columns);
        row.free_kb = None;
        row.origin.cgroup_info = None;
        assert_eq!(
            format!("{}\n{}", columns.header(), text(&row)),
            "COMM           PID     LAT(ms) PAGES  FREE(KB) KIND   ORDER GFP                                          CGROUP\n\
             a-very-long-na 17678     30.70    38         - memcg      0 GFP_HIGHUSER_MOVABLE                         -\n"
        );
    }

    #[test]
    fn whose_limit_it_was_for_comes_last() {
        let columns = Columns {
            kind: true,
            extended: true,
            limited: true,
            ..Columns::default()
        };
        let mut row = row(columns);
        assert_eq!(
            format!("{}\n{}", columns.header(), text(&row)),
            "COMM           PID     LAT(ms) PAGES KIND   ORDER GFP                                          CGROUP                   LIMITED\n\
             a-very-long-na 17678     30.70    38 memcg      0 GFP_HIGHUSER_MOVABLE                         /db.service/worker       /db.service\n"
        );
        row.limited = None;
        assert!(text(&row).ends_with(" /db.service/worker       [gone: id 4321]\n"));
        row.limited_id = None;
        assert!(text(&row).ends_with(" /db.service/worker       -\n"));
    }

    #[test]
    fn stacks_stand_below_their_row_the_kernels_first() {
        let mut row = row(Columns::default());
        let part = |frame| Part {
            frames: vec![frame],
            truncated: None,
        };
        row.stack = Some(Rc::new(NamedStack {
            kernel: Some(part(Frame::of_test("try_to_free_pages", 0x1, "kernel"))),
            user: Some(part(Frame::of_test("main", 0x2, "app"))),
            ..NamedStack::default()
        }));
        assert!(
            text(&row).ends_with(
                "38\n    try_to_free_pages+0x1 [kernel]\n    --\n    main+0x2 [app]\n\n"
            )
        );
    }

    #[test]
    fn json_has_units_and_names() {
        let json = serde_json::to_string(&row(Columns::default())).expect("JSON");
        assert_eq!(
            json,
            r#"{"type":"reclaim","time":"2019-08-01T21:30:25.000000+00:00","pid":17678,"tid":17679,"comm":"a-very-long-name","cgroup":"/db.service/worker","container_id":null,"uid":1000,"kind":"memcg","latency_ns":30695000,"reclaimed_pages":38,"free_kb":176604,"order":0,"gfp_flags":"GFP_HIGHUSER_MOVABLE","limited":"/db.service","limited_id":4321}"#
        );
    }
}
