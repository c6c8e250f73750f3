//! Rows of vmscan: intervals, and shrinkers, cgroups and tracepoints.

use std::io::{self, Write};

use jiff::Zoned;
use memtools::print::clock;
use memtools::print::output::Row;
use memtools::print::timeline::{Count, TimelineEntry, Unit};
use memtools::process::container::{self, CgroupInfo};
use serde::{Serialize, Serializer};

/// Optional columns, besides the six of the book's tool.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Columns {
    pub(crate) kswapd: bool,
    pub(crate) compaction: bool,
}

impl Columns {
    /// Returns the header, which is printed first, and again every few rows on a terminal.
    pub(crate) fn header(self) -> String {
        let mut line = format!(
            "{:<10} {:>10} {:>12} {:>12} {:>6} {:>9}",
            "TIME", "S-SLABms", "D-RECLAIMms", "M-RECLAIMms", "KSWAPD", "WRITEPAGE"
        );
        for (there, name, width) in [
            (self.kswapd, "KSWAPDms", 9),
            (self.compaction, "COMPACTms", 10),
        ] {
            if there {
                line.push_str(&format!(" {name:>width$}"));
            }
        }
        line
    }
}

/// Operations that ended in an interval.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Timed {
    pub(crate) count: u64,
    /// Time of the operations, summed over all CPUs.
    pub(crate) time_ns: u64,
}

/// One interval. Fields that this kernel has no tracepoints for are None.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "interval")]
pub(crate) struct Interval {
    /// End of the interval.
    #[serde(serialize_with = "clock::serialize")]
    pub(crate) time: Zoned,
    pub(crate) shrink_slab: Option<Timed>,
    pub(crate) direct_reclaim: Option<Timed>,
    pub(crate) memcg_reclaim: Option<Timed>,
    /// Times that kswapd was asked to wake up.
    pub(crate) kswapd_wakeups: Option<u64>,
    /// Pages (folios) that reclaim began to write out.
    pub(crate) pages_written: Option<u64>,
    /// Time of kswapd in the interval, also of operations that have not ended, with --kswapd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kswapd: Option<Timed>,
    /// Compactions, with --compaction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) compaction: Option<Timed>,
    #[serde(skip)]
    pub(crate) columns: Columns,
}

impl Interval {
    fn count(&self, name: String, unit: Unit, increase: u64) -> Count<'_> {
        Count {
            name: name.into(),
            unit,
            process: None,
            time: &self.time,
            increase,
        }
    }

    /// Whether any operation ended in the interval, or kswapd was at work.
    pub(crate) fn any(&self) -> bool {
        let timed = [
            self.shrink_slab,
            self.direct_reclaim,
            self.memcg_reclaim,
            self.kswapd,
            self.compaction,
        ];
        let any = |timed: &Timed| timed.count > 0 || timed.time_ns > 0;
        timed.iter().flatten().any(any)
            || self.kswapd_wakeups.is_some_and(|count| count > 0)
            || self.pages_written.is_some_and(|count| count > 0)
    }
}

impl Row for Interval {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(
            out,
            "{}   {:>10} {:>12} {:>12} {:>6} {:>9}",
            clock::time_of_day(&self.time),
            milliseconds(self.shrink_slab),
            milliseconds(self.direct_reclaim),
            milliseconds(self.memcg_reclaim),
            or_dash(self.kswapd_wakeups),
            or_dash(self.pages_written),
        )?;
        if self.columns.kswapd {
            write!(out, " {:>9}", milliseconds(self.kswapd))?;
        }
        if self.columns.compaction {
            write!(out, " {:>10}", milliseconds(self.compaction))?;
        }
        writeln!(out)
    }

    fn moment(&self) -> TimelineEntry<'_> {
        let timed = [
            ("slab shrinking", self.shrink_slab),
            ("direct reclaim", self.direct_reclaim),
            ("memcg reclaim", self.memcg_reclaim),
            ("kswapd", self.kswapd),
            ("compaction", self.compaction),
        ];
        let counted = [
            ("kswapd wakeups", self.kswapd_wakeups),
            ("pages written", self.pages_written),
        ];
        let mut counts = Vec::new();
        for (name, timed) in timed {
            let Some(Timed { count, time_ns }) = timed else {
                continue;
            };
            counts.push(self.count(format!("{name}, time"), Unit::Nanoseconds, time_ns));
            counts.push(self.count(format!("{name}, times"), Unit::Count, count));
        }
        for (name, count) in counted {
            counts.extend(count.map(|count| self.count(name.to_owned(), Unit::Count, count)));
        }
        TimelineEntry::Counts(counts)
    }
}

fn milliseconds(timed: Option<Timed>) -> String {
    or_dash(timed.map(|timed| timed.time_ns / 1_000_000))
}

fn or_dash(value: Option<u64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// Row of --by-shrinker.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename = "shrinker")]
pub(crate) struct Shrinker {
    /// The shrinker's function that frees objects.
    pub(crate) function: String,
    pub(crate) count: u64,
    /// Time without the time in other shrinkers that this one caused.
    pub(crate) time_ns: u64,
    pub(crate) objects_freed: u64,
}

impl Row for Shrinker {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "{:<40} {:>10} {:>10} {:>12}",
            self.function,
            self.count,
            self.time_ns / 1_000_000,
            self.objects_freed
        )
    }
}

impl Shrinker {
    /// Returns the header above the rows.
    pub(crate) fn header() -> String {
        format!(
            "{:<40} {:>10} {:>10} {:>12}",
            "SHRINKER", "CALLS", "TIMEms", "FREED"
        )
    }
}

/// Row of --by-cgroup: the reclaim that tasks in a cgroup had to do.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename = "cgroup")]
pub(crate) struct Cgroup {
    /// Path from the root; None if the cgroup was removed, and no path was kept.
    pub(crate) path: Option<String>,
    /// Id of the container that the cgroup belongs to.
    pub(crate) container_id: Option<String>,
    /// Content of the column CONTAINER. None if the column is not requested.
    #[serde(skip)]
    pub(crate) cgroup_info: Option<CgroupInfo>,
    pub(crate) id: u64,
    /// Cgroup whose limit the tasks reclaimed for: their own or one above it. None if they reclaimed for the machine,
    /// or if the cgroup was removed.
    pub(crate) limited: Option<String>,
    /// Id of the cgroup whose limit the tasks reclaimed for. None if they reclaimed for the machine.
    pub(crate) limited_id: Option<u64>,
    pub(crate) shrink_slab: Timed,
    pub(crate) direct_reclaim: Timed,
    pub(crate) memcg_reclaim: Timed,
}

impl Cgroup {
    /// Returns the header above the rows.
    pub(crate) fn header(container: bool) -> String {
        format!(
            "{:>10} {:>12} {:>12} {}{:<24} LIMITED",
            "S-SLABms",
            "D-RECLAIMms",
            "M-RECLAIMms",
            container::header(container),
            "CGROUP"
        )
    }

    /// Returns the time in both kinds of reclaim, by which the rows are sorted. Shrinking is part of both.
    pub(crate) fn reclaim_ns(&self) -> u64 {
        self.direct_reclaim.time_ns + self.memcg_reclaim.time_ns
    }
}

impl Row for Cgroup {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(
            out,
            "{:>10} {:>12} {:>12} ",
            self.shrink_slab.time_ns / 1_000_000,
            self.direct_reclaim.time_ns / 1_000_000,
            self.memcg_reclaim.time_ns / 1_000_000,
        )?;
        let name = |path: &Option<String>, id: Option<u64>| match (path, id) {
            (Some(path), _) => path.clone(),
            (None, Some(id)) => format!("[gone: id {id}]"),
            (None, None) => "-".to_owned(),
        };
        writeln!(
            out,
            "{}{:<24} {}",
            container::column(self.cgroup_info.as_ref(), true),
            name(&self.path, Some(self.id)),
            name(&self.limited, self.limited_id)
        )
    }
}

/// Row of --counts: tracepoints and how often each was hit.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "counts")]
pub(crate) struct Counts {
    #[serde(serialize_with = "clock::serialize")]
    pub(crate) time: Zoned,
    /// Counts by tracepoint, including those of 0, which the text omits.
    #[serde(serialize_with = "as_object")]
    pub(crate) tracepoints: Vec<(String, u64)>,
    /// Whether the text has the time, which a single report at the end does not need.
    #[serde(skip)]
    pub(crate) timed: bool,
}

impl Row for Counts {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        if self.timed {
            writeln!(out, "{}", clock::time_of_day(&self.time))?;
        }
        writeln!(out, "{:<52} {:>10}", "TRACEPOINT", "COUNT")?;
        let mut seen: Vec<&(String, u64)> = self
            .tracepoints
            .iter()
            .filter(|(_, count)| *count > 0)
            .collect();
        seen.sort_by_key(|(name, count)| (*count, name));
        for (name, count) in seen {
            writeln!(out, "{name:<52} {count:>10}")?;
        }
        if self.timed {
            writeln!(out)?;
        }
        Ok(())
    }

    fn moment(&self) -> TimelineEntry<'_> {
        let count = |(name, count): &'_ (String, u64)| Count {
            name: name.clone().into(),
            unit: Unit::Count,
            process: None,
            time: &self.time,
            increase: *count,
        };
        TimelineEntry::Counts(self.tracepoints.iter().map(count).collect())
    }
}

fn as_object<S: Serializer>(pairs: &[(String, u64)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(pairs.iter().map(|(name, count)| (name, count)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(row: &impl Row) -> String {
        let mut text = Vec::new();
        row.text(&mut text).expect("memory");
        String::from_utf8(text).expect("UTF-8")
    }

    fn timed(time_ns: u64) -> Option<Timed> {
        Some(Timed { count: 1, time_ns })
    }

    fn interval() -> Interval {
        Interval {
            time: "2019-08-01T21:30:25+00:00[+00:00]".parse().expect("a time"),
            shrink_slab: timed(276_999_999),
            direct_reclaim: timed(555_000_000),
            memcg_reclaim: timed(999_999),
            kswapd_wakeups: Some(2),
            pages_written: Some(1),
            kswapd: None,
            compaction: None,
            columns: Columns::default(),
        }
    }

    #[test]
    fn rows_are_the_books() {
        assert_eq!(
            format!("{}\n{}", Columns::default().header(), text(&interval())),
            "TIME         S-SLABms  D-RECLAIMms  M-RECLAIMms KSWAPD WRITEPAGE\n\
             21:30:25          276          555            0      2         1\n"
        );
    }

    #[test]
    fn more_columns_stand_below_their_names_and_what_is_not_known_is_a_dash() {
        let columns = Columns {
            kswapd: true,
            compaction: true,
        };
        let row = Interval {
            pages_written: None,
            memcg_reclaim: None,
            kswapd: timed(7_000_000),
            compaction: timed(8_000_000),
            columns,
            ..interval()
        };
        assert_eq!(
            format!("{}\n{}", columns.header(), text(&row)),
            "TIME         S-SLABms  D-RECLAIMms  M-RECLAIMms KSWAPD WRITEPAGE  KSWAPDms  COMPACTms\n\
             21:30:25          276          555            -      2         -         7          8\n"
        );
    }

    #[test]
    fn an_interval_in_which_nothing_ended_is_known() {
        assert!(interval().any());
        let nothing = Interval {
            shrink_slab: Some(Timed::default()),
            direct_reclaim: None,
            memcg_reclaim: None,
            kswapd_wakeups: Some(0),
            pages_written: Some(0),
            ..interval()
        };
        assert!(!nothing.any());
        assert!(
            Interval {
                pages_written: Some(1),
                ..nothing
            }
            .any()
        );
    }

    #[test]
    fn json_has_nanoseconds_and_counts() {
        assert_eq!(
            serde_json::to_string(&interval()).expect("JSON"),
            r#"{"type":"interval","time":"2019-08-01T21:30:25.000000+00:00","shrink_slab":{"count":1,"time_ns":276999999},"direct_reclaim":{"count":1,"time_ns":555000000},"memcg_reclaim":{"count":1,"time_ns":999999},"kswapd_wakeups":2,"pages_written":1}"#
        );
    }

    #[test]
    fn cgroups_are_named_with_those_whose_limit_it_was() {
        let mut cgroup = Cgroup {
            path: Some("/db.service/worker".into()),
            id: 7,
            limited: Some("/db.service".into()),
            limited_id: Some(6),
            ..Cgroup::default()
        };
        assert_eq!(
            format!("{}\n{}", Cgroup::header(false), text(&cgroup)),
            "  S-SLABms  D-RECLAIMms  M-RECLAIMms CGROUP                   LIMITED\n         \
             0            0            0 /db.service/worker       /db.service\n"
        );
        (cgroup.path, cgroup.limited) = (None, None);
        assert!(text(&cgroup).ends_with(" [gone: id 7]             [gone: id 6]\n"));
        cgroup.limited_id = None;
        assert!(text(&cgroup).ends_with(" [gone: id 7]             -\n"));
    }

    #[test]
    fn counts_ascend_and_zeros_are_left_out() {
        let counts = Counts {
            time: interval().time,
            tracepoints: vec![
                ("vmscan:b".into(), 7),
                ("vmscan:a".into(), 0),
                ("migrate:c".into(), 2),
            ],
            timed: false,
        };
        assert_eq!(
            text(&counts),
            "TRACEPOINT                                                COUNT\n\
             migrate:c                                                     2\n\
             vmscan:b                                                      7\n"
        );
        let json = serde_json::to_string(&counts).expect("JSON");
        assert!(
            json.contains(r#""tracepoints":{"vmscan:b":7,"vmscan:a":0,"migrate:c":2}"#),
            "{json}"
        );
    }
}
