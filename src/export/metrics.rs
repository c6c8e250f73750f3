//! Sums for Prometheus, in a file that node_exporter's textfile collector reads (text format 0.0.4).
//!
//! A tool names its families ([`Family`]), adds to them as it reports, and has the whole file written. Sums are since
//! the tool's start and never fall, as counters of Prometheus do not.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::export::atomic_file::{AtomicFile, Refreshed};
use crate::export::exposition::{self, Amount, Exposed, Format, MetricKind};
use crate::print::histogram::Histogram;
use crate::print::message;

/// Limit on the series of one family, without those of `other`: Prometheus keeps each series for weeks. A name that
/// comes when the limit is reached is counted as `other` from then on.
const MAX_SERIES: usize = 100;
/// Value of the labels [`ARBITRARY`] for everything beyond [`MAX_SERIES`].
const OTHER: &str = "other";
/// Labels whose number of values has no limit.
const ARBITRARY: [&str; 4] = ["comm", "file", "unit", "container"];
/// Minimum time between two writes of the file.
const PAUSE: Duration = Duration::from_millis(500);
/// Interval at which a tool without reports at intervals checks for something to write.
pub const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Metric family: numbers of one kind.
#[derive(Debug)]
pub struct Family {
    /// Name, with its unit and `_total` as Prometheus wants them.
    pub name: &'static str,
    /// Help text of one line.
    pub help: &'static str,
    /// Names of the labels. Labels of arbitrary values are limited to `comm`, `file`, `unit` and `container`.
    pub labels: &'static [&'static str],
    /// Kind of the numbers.
    pub kind: MetricKind,
}

/// Family of the losses of every tool.
static LOST: Family = Family {
    name: "memtools_lost_total",
    help: "What a tool could not record, by reason.",
    labels: &["what", "tool"],
    kind: MetricKind::Counter,
};

/// Family of what is normal.
static INCOMPLETE: Family = Family {
    name: "memtools_incomplete_total",
    help: "What a tool has recorded in part, or may not have recorded, as is normal.",
    labels: &["what", "tool"],
    kind: MetricKind::Counter,
};

/// Numbers of one family, by the values of its labels.
#[derive(Debug)]
struct FamilySeries {
    family: &'static Family,
    series: BTreeMap<Vec<String>, Amount>,
    /// Amounts of label values that have no series yet.
    pending: HashMap<Vec<String>, Amount>,
}

impl FamilySeries {
    fn of(family: &'static Family) -> Self {
        let mut series = BTreeMap::new();
        if family.labels.is_empty() {
            series.insert(Vec::new(), Amount::default());
        }
        let pending = HashMap::new();
        Self {
            family,
            series,
            pending,
        }
    }

    fn at(&mut self, labels: &[&str]) -> &mut Amount {
        let key: Vec<String> = labels.iter().map(|&label| label.to_owned()).collect();
        match self.series.get(&key) {
            Some(_) => self.series.entry(key).or_default(),
            None => self.pending.entry(key).or_default(),
        }
    }

    /// Makes series of the new amounts, the largest first, up to the limit. Adds the rest to `other`.
    fn settle(&mut self) {
        let mut new: Vec<_> = self.pending.drain().collect();
        new.sort_by(|(a, of_a), (b, of_b)| (Reverse(of_a.sum), a).cmp(&(Reverse(of_b.sum), b)));
        for (mut key, amount) in new {
            if self.series.len() >= MAX_SERIES {
                let labels = self.family.labels.iter().zip(&mut key);
                for (_, value) in labels.filter(|(label, _)| ARBITRARY.contains(label)) {
                    OTHER.clone_into(value);
                }
            }
            self.series.entry(key).or_default().add(&amount);
        }
    }

    /// Returns the numbers of this moment. Each series also has the label `target`, by which the series of several runs
    /// of one tool differ.
    fn exposed(&self, target: &str) -> Exposed {
        let Family {
            name, help, kind, ..
        } = *self.family;
        let series = self.series.iter().map(|(values, amount)| {
            let labels = self
                .family
                .labels
                .iter()
                .copied()
                .zip(values.iter().cloned());
            let labels = labels.chain([("target", target.to_owned())]);
            (labels.collect(), amount.clone())
        });
        Exposed {
            name: name.strip_suffix("_total").unwrap_or(name),
            help,
            kind,
            series: series.collect(),
        }
    }
}

/// Sums of one run, and their file. If there is no file, and they are not served, nothing is kept.
#[derive(Debug)]
pub struct Metrics {
    file: Option<Refreshed>,
    is_served: bool,
    /// What is traced.
    target: String,
    kept: BTreeMap<&'static str, FamilySeries>,
    /// Time of the last write of the file.
    written: Option<Instant>,
}

impl Metrics {
    /// Checks that the file, if there is one, can be written. It is written once the trace has begun, as a tool that
    /// cannot run would leave sums of 0. `target` describes what is traced.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn begin(
        path: Option<&Path>,
        families: &[&'static Family],
        target: &str,
    ) -> Result<Self> {
        let file = path.map(AtomicFile::readable_at).transpose()?;
        Ok(Self {
            file: file.map(Refreshed::of),
            is_served: false,
            target: target.to_owned(),
            kept: families
                .iter()
                .map(|family| (family.name, FamilySeries::of(family)))
                .collect(),
            written: None,
        })
    }

    /// Keeps sums that are served, too.
    #[must_use]
    pub fn served(self, is_served: bool) -> Self {
        Self { is_served, ..self }
    }

    /// Whether sums are kept.
    pub fn is_enabled(&self) -> bool {
        self.file.is_some() || self.is_served
    }

    /// Returns the numbers of this moment.
    pub fn exposed(&mut self) -> Vec<Exposed> {
        exposed(&mut self.kept, &self.target)
    }

    /// Adds to a sum. `labels` are the values of the family's labels.
    pub fn add(&mut self, family: &'static Family, labels: &[&str], amount: u64) {
        if self.is_enabled() {
            self.of(family).at(labels).sum += amount;
        }
    }

    /// Adds one duration, in nanoseconds, to a histogram.
    pub fn observe(&mut self, family: &'static Family, labels: &[&str], ns: u64) {
        if self.is_enabled() {
            let amount = self.of(family).at(labels);
            amount.sum += ns;
            amount.durations.add(ns);
        }
    }

    /// Sets all series of a gauge to 0, before the numbers of a new report are added. Numbers of reports that came too
    /// soon after one another to be written are dropped.
    pub fn reset(&mut self, family: &'static Family) {
        let kept = self.of(family);
        kept.pending.clear();
        let series = kept.series.values_mut();
        series.for_each(|amount| amount.sum = 0);
    }

    /// Replaces a sum that the BPF program adds up itself.
    pub fn set(&mut self, family: &'static Family, labels: &[&str], sum: u64) {
        if self.is_enabled() {
            self.of(family).at(labels).sum = sum;
        }
    }

    /// Replaces a histogram, and the sum of its durations in nanoseconds.
    pub fn set_durations(
        &mut self,
        family: &'static Family,
        labels: &[&str],
        durations: Histogram,
        sum: u64,
    ) {
        if self.is_enabled() {
            *self.of(family).at(labels) = Amount { sum, durations };
        }
    }

    /// Sets the number of losses of this kind.
    pub(crate) fn set_lost(&mut self, what: &str, lost: u64) {
        self.set(&LOST, &[what, message::tool()], lost);
    }

    /// Sets the number of what is incomplete in this way.
    pub(crate) fn set_incomplete(&mut self, what: &str, incomplete: u64) {
        self.set(&INCOMPLETE, &[what, message::tool()], incomplete);
    }

    fn of(&mut self, family: &'static Family) -> &mut FamilySeries {
        let kept = self.kept.entry(family.name);
        kept.or_insert_with(|| FamilySeries::of(family))
    }

    /// Writes the file, unless it was written within the last half second. After a failure the trace goes on. The
    /// reason is printed at once and returned by [`Metrics::finish`].
    pub fn write_if_due(&mut self) {
        if self
            .written
            .is_none_or(|written| written.elapsed() >= PAUSE)
        {
            self.write();
        }
    }

    fn write(&mut self) {
        let Some(file) = &mut self.file else { return };
        let families = exposed(&mut self.kept, &self.target);
        file.write(|out: &mut dyn Write| Ok(exposition::write(&families, Format::Text, out)?));
        self.written = Some(Instant::now());
    }

    /// Writes the file for the last time.
    ///
    /// # Errors
    /// If the file could not be written.
    pub fn finish(mut self) -> Result<()> {
        self.write();
        self.file
            .map_or(Ok(()), Refreshed::finish)
            .context("the last sums are not in their file")
    }
}

/// Returns the numbers of all families of this moment.
fn exposed(kept: &mut BTreeMap<&'static str, FamilySeries>, target: &str) -> Vec<Exposed> {
    let settled = kept.values_mut().map(|kept| {
        kept.settle();
        kept.exposed(target)
    });
    settled.collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    static FAULTS: Family = Family {
        name: "x_faults_total",
        help: "Faults.",
        labels: &["comm", "type"],
        kind: MetricKind::Counter,
    };
    static STALLS: Family = Family {
        name: "x_stall_seconds",
        help: "Stalls.",
        labels: &[],
        kind: MetricKind::Durations,
    };
    static TIME: Family = Family {
        name: "x_seconds_total",
        help: "Time.",
        labels: &[],
        kind: MetricKind::Seconds,
    };

    fn in_file(fill: impl FnOnce(&mut Metrics)) -> String {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("x.prom");
        let families = [&FAULTS, &STALLS, &TIME];
        let mut metrics = Metrics::begin(Some(&path), &families, "pid 7").expect("a file");
        fill(&mut metrics);
        metrics.finish().expect("it is written");
        fs::read_to_string(path).expect("a file")
    }

    #[test]
    fn the_format_is_prometheus() {
        let text = in_file(|metrics| {
            metrics.add(&FAULTS, &["a\"b\\", "minor"], 7);
            metrics.add(&FAULTS, &["a\"b\\", "minor"], 4);
            metrics.set(&TIME, &[], 1_500_000_001);
            metrics.set_lost("events", 3);
        });
        for line in [
            "# TYPE x_faults_total counter\nx_faults_total{comm=\"a\\\"b\\\\\",type=\"minor\",target=\"pid 7\"} 11\n",
            "# HELP x_seconds_total Time.\n# TYPE x_seconds_total counter\nx_seconds_total{target=\"pid 7\"} 1.500000001\n",
            "memtools_lost_total{what=\"events\",tool=\"memtools\",target=\"pid 7\"} 3\n",
            "x_stall_seconds_count{target=\"pid 7\"} 0\n",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }

    #[test]
    fn buckets_have_all_that_is_not_longer() {
        let text = in_file(|metrics| {
            for ns in [0, 1023, 1024, 5000, 100_000_000_000] {
                metrics.observe(&STALLS, &[], ns);
            }
        });
        for line in [
            "x_stall_seconds_bucket{target=\"pid 7\",le=\"0.000001023\"} 2",
            "x_stall_seconds_bucket{target=\"pid 7\",le=\"0.000004095\"} 3",
            "x_stall_seconds_bucket{target=\"pid 7\",le=\"0.000016383\"} 4",
            "x_stall_seconds_bucket{target=\"pid 7\",le=\"68.719476735\"} 4",
            "x_stall_seconds_bucket{target=\"pid 7\",le=\"+Inf\"} 5",
            "x_stall_seconds_sum{target=\"pid 7\"} 100.000007047",
            "x_stall_seconds_count{target=\"pid 7\"} 5",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line} in {text}");
        }
    }

    #[test]
    fn names_without_end_are_bounded_and_no_sum_falls() {
        let name = |number: usize| format!("comm{number}");
        let text = in_file(|metrics| {
            for number in 0..1009 {
                metrics.add(&FAULTS, &[&name(number), "minor"], number as u64);
            }
            metrics.write();
            // Now one of the smallest becomes large, and one of the largest goes on.
            metrics.add(&FAULTS, &[&name(1), "minor"], 1_000_000);
            metrics.add(&FAULTS, &[&name(1008), "minor"], 1);
        });
        let lines = text
            .lines()
            .filter(|line| line.starts_with("x_faults_total"));
        let sums: Vec<(&str, u64)> = lines
            .map(|line| line.rsplit_once(' ').expect("a value"))
            .map(|(name, sum)| (name, sum.parse().expect("a number")))
            .collect();
        assert_eq!(sums.len(), MAX_SERIES + 1);
        let all: u64 = sums.iter().map(|(_, sum)| sum).sum();
        assert_eq!(all, 1008 * 1009 / 2 + 1_000_001);
        assert!(sums.contains(&(
            "x_faults_total{comm=\"comm1008\",type=\"minor\",target=\"pid 7\"}",
            1009
        )));
        let other = sums.iter().find(|(name, _)| name.contains("\"other\""));
        assert!(other.is_some_and(|(_, sum)| *sum > 1_000_000), "{other:?}");
    }

    #[test]
    fn every_label_of_arbitrary_values_is_bounded() {
        static TASKS: Family = Family {
            name: "x_tasks_total",
            help: "Tasks.",
            labels: &["comm", "unit", "container", "kind"],
            kind: MetricKind::Counter,
        };
        let text = in_file(|metrics| {
            for number in 0..1009 {
                let (unit, container) = (format!("{number}.service"), format!("{number:064x}"));
                metrics.add(&TASKS, &["a", &unit, &container, "k"], 1);
                metrics.add(&TASKS, &["a", "", "", "k"], 1);
            }
        });
        let lines: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("x_tasks_total"))
            .collect();
        assert_eq!(lines.len(), MAX_SERIES + 1);
        let (own, other) = (
            "x_tasks_total{comm=\"a\",kind=\"k\",target=\"pid 7\"} 1009",
            "x_tasks_total{comm=\"other\",unit=\"other\",container=\"other\",kind=\"k\",target=\"pid 7\"} 910",
        );
        assert!(lines.contains(&own) && lines.contains(&other), "{lines:?}");
    }

    #[test]
    fn a_gauge_falls() {
        static LIVE: Family = Family {
            name: "x_live_bytes",
            help: "Live.",
            labels: &["comm"],
            kind: MetricKind::Gauge,
        };
        let text = in_file(|metrics| {
            metrics.add(&LIVE, &["a"], 7);
            metrics.add(&LIVE, &["b"], 7);
            metrics.write();
            for report in [11, 5] {
                metrics.reset(&LIVE);
                metrics.add(&LIVE, &["a"], report);
                metrics.add(&LIVE, &["c"], report);
            }
        });
        for line in [
            "# TYPE x_live_bytes gauge",
            "x_live_bytes{comm=\"a\",target=\"pid 7\"} 5",
            "x_live_bytes{comm=\"b\",target=\"pid 7\"} 0",
            "x_live_bytes{comm=\"c\",target=\"pid 7\"} 5",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }

    #[test]
    fn without_a_file_nothing_is_kept() {
        let mut metrics = Metrics::begin(None, &[&FAULTS], "pid 7").expect("none");
        metrics.add(&FAULTS, &["a", "minor"], 7);
        assert!(metrics.of(&FAULTS).pending.is_empty());
        metrics.finish().expect("nothing to write");
    }
}
