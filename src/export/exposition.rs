//! Metrics in the formats that Prometheus and others scrape: OpenMetrics' text format 1.0, and Prometheus' older text
//! format 0.0.4.

use std::io::{self, Write};

use crate::print::histogram::Histogram;

/// Upper bounds of the buckets of durations, as exponents of two in nanoseconds: from 1 microsecond to 69 seconds,
/// each four times the one before.
const BUCKETS: [usize; 14] = [10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36];

/// Kind of a family's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// Sum of events, pages or bytes since the start, which never falls.
    Counter,
    /// Current number, which can fall.
    Gauge,
    /// Sum of nanoseconds since the start, which is written as seconds.
    Seconds,
    /// Nanoseconds of each event, as a histogram of seconds.
    Durations,
    /// Words, as labels.
    Info,
}

/// Format of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus' text format 0.0.4, in which a family has the name of its series, and no unit.
    Text,
}

impl Format {
    /// Returns the content type of HTTP.
    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Labels of a series, by name. A label without a value is omitted, which is the same for Prometheus.
pub type Labels = Vec<(&'static str, String)>;

/// Metric family with its numbers of one moment.
#[derive(Debug, Clone)]
pub struct Exposed {
    /// Name, which ends in its unit if there is one: `bytes` or `seconds`. The suffix of the kind, such as `_total`, is
    /// not part of the name.
    pub name: &'static str,
    /// Description, one line.
    pub help: &'static str,
    /// Kind of the numbers.
    pub kind: MetricKind,
    /// Each number, with its labels.
    pub series: Vec<(Labels, Amount)>,
}

/// Value of one series: one number, or one histogram and its sum.
#[derive(Debug, Clone, Default)]
pub struct Amount {
    /// The number, in the unit of its kind.
    pub sum: u64,
    /// Durations in nanoseconds, if the kind is [`MetricKind::Durations`].
    pub durations: Histogram,
}

impl Amount {
    pub(super) fn add(&mut self, more: &Self) {
        self.sum += more.sum;
        self.durations.add_all(&more.durations);
    }
}

impl From<u64> for Amount {
    fn from(sum: u64) -> Self {
        Self {
            sum,
            durations: Histogram::default(),
        }
    }
}

impl Exposed {
    /// Creates a family without numbers.
    pub fn new(kind: MetricKind, name: &'static str, help: &'static str) -> Self {
        Self {
            name,
            help,
            kind,
            series: Vec::new(),
        }
    }

    /// Creates a family of one number.
    pub fn one(kind: MetricKind, name: &'static str, help: &'static str, number: u64) -> Self {
        let mut family = Self::new(kind, name, help);
        family.add(Vec::new(), number);
        family
    }

    /// Adds a series of one number.
    pub fn add(&mut self, labels: Labels, number: u64) {
        self.series.push((labels, number.into()));
    }

    /// Returns the unit, in which the name ends. Empty for none.
    fn unit(&self) -> &'static str {
        let units = ["bytes", "seconds"].into_iter();
        let mut units = units.filter(|unit| self.name.ends_with(unit));
        units.next().unwrap_or_default()
    }

    fn write(&self, format: Format, out: &mut dyn Write) -> io::Result<()> {
        let name = self.name;
        let (kind, suffix) = match self.kind {
            MetricKind::Gauge => ("gauge", ""),
            MetricKind::Counter | MetricKind::Seconds => ("counter", "_total"),
            MetricKind::Durations => ("histogram", ""),
            MetricKind::Info => ("info", "_info"),
        };
        match format {
            Format::OpenMetrics => {
                writeln!(out, "# TYPE {name} {kind}")?;
                if !self.unit().is_empty() {
                    writeln!(out, "# UNIT {name} {}", self.unit())?;
                }
                writeln!(out, "# HELP {name} {}", self.help)?;
            }
            Format::Text => {
                let kind = if kind == "info" { "gauge" } else { kind };
                let help = self.help;
                writeln!(
                    out,
                    "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} {kind}"
                )?;
            }
        }
        for (labels, amount) in &self.series {
            let labels = labels.iter().filter(|(_, value)| !value.is_empty());
            let labels: Vec<String> = labels.map(|(label, value)| pair(label, value)).collect();
            match self.kind {
                MetricKind::Durations => self.write_histogram(&labels, amount, out)?,
                MetricKind::Seconds => {
                    let labels = braces(&labels);
                    writeln!(out, "{name}{suffix}{labels} {}", seconds(amount.sum))?;
                }
                MetricKind::Counter | MetricKind::Gauge | MetricKind::Info => {
                    writeln!(out, "{name}{suffix}{} {}", braces(&labels), amount.sum)?;
                }
            }
        }
        Ok(())
    }

    fn write_histogram(
        &self,
        labels: &[String],
        amount: &Amount,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        let name = self.name;
        let bounds =
            BUCKETS.map(|bits| (seconds((1 << bits) - 1), amount.durations.count_below(bits)));
        let count = amount.durations.count();
        for (bound, count) in bounds.into_iter().chain([("+Inf".to_owned(), count)]) {
            let labels = braces(&[labels, &[pair("le", &bound)]].concat());
            writeln!(out, "{name}_bucket{labels} {count}")?;
        }
        let (labels, sum) = (braces(labels), seconds(amount.sum));
        writeln!(
            out,
            "{name}_sum{labels} {sum}\n{name}_count{labels} {count}"
        )
    }
}

/// Writes all families, and the end mark if the format has one.
pub(crate) fn write(families: &[Exposed], format: Format, out: &mut dyn Write) -> io::Result<()> {
    for family in families {
        family.write(format, out)?;
    }
    match format {
        Format::OpenMetrics => writeln!(out, "# EOF"),
        Format::Text => Ok(()),
    }
}

/// Returns `name="value"`, with the value escaped.
fn pair(name: &str, value: &str) -> String {
    let value = value
        .replace('\\', r"\\")
        .replace('"', "\\\"")
        .replace('\n', r"\n");
    format!("{name}=\"{value}\"")
}

/// Joins labels, each a [`pair`], in braces, as they follow a name.
fn braces(labels: &[String]) -> String {
    if labels.is_empty() {
        String::new()
    } else {
        format!("{{{}}}", labels.join(","))
    }
}

/// Formats nanoseconds as seconds, without rounding.
fn seconds(ns: u64) -> String {
    format!("{}.{:09}", ns / 1_000_000_000, ns % 1_000_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_are_of_both_formats() {
        let labels = vec![
            ("target", "a\"b\\\n".to_owned()),
            ("x", "y".to_owned()),
            ("none", String::new()),
        ];
        let families = [
            Exposed::one(MetricKind::Gauge, "x_live_bytes", "Live.", 7),
            Exposed::one(MetricKind::Counter, "x_hits", "Hits.", 11),
            Exposed::one(MetricKind::Seconds, "x_cpu_seconds", "Time.", 1_500_000_000),
            Exposed {
                name: "x",
                help: "What is traced.",
                kind: MetricKind::Info,
                series: vec![(labels, 1.into())],
            },
        ];
        let mut text = Vec::new();
        write(&families, Format::Text, &mut text).expect("memory");
        assert_eq!(
            String::from_utf8_lossy(&text),
            "# HELP x_live_bytes Live.\n# TYPE x_live_bytes gauge\nx_live_bytes 7\n\
             # HELP x_hits_total Hits.\n# TYPE x_hits_total counter\nx_hits_total 11\n\
             # HELP x_cpu_seconds_total Time.\n# TYPE x_cpu_seconds_total counter\n\
             x_cpu_seconds_total 1.500000000\n\
             # HELP x_info What is traced.\n# TYPE x_info gauge\n\
             x_info{target=\"a\\\"b\\\\\\n\",x=\"y\"} 1\n"
        );
        text.clear();
        write(&families, Format::OpenMetrics, &mut text).expect("memory");
        assert_eq!(
            String::from_utf8_lossy(&text),
            "# TYPE x_live_bytes gauge\n# UNIT x_live_bytes bytes\n# HELP x_live_bytes Live.\n\
             x_live_bytes 7\n# TYPE x_hits counter\n# HELP x_hits Hits.\nx_hits_total 11\n\
             # TYPE x_cpu_seconds counter\n# UNIT x_cpu_seconds seconds\n\
             # HELP x_cpu_seconds Time.\nx_cpu_seconds_total 1.500000000\n\
             # TYPE x info\n# HELP x What is traced.\n\
             x_info{target=\"a\\\"b\\\\\\n\",x=\"y\"} 1\n# EOF\n"
        );
    }
}
