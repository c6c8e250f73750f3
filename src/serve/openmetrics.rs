//! Current numbers in OpenMetrics' text format 1.0, which Prometheus and others scrape, and in Prometheus' older text
//! format 0.0.4.

use std::io::{self, Write};

use crate::export::metrics::{braces, pair, seconds};

/// Content type of OpenMetrics.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Content type of the older format.
pub(super) const TEXT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Type of the numbers of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A current value.
    Gauge,
    /// A sum since the start, which never falls.
    Counter,
    /// A sum of nanoseconds since the start, which is written as seconds.
    Seconds,
    /// Words, as labels.
    Info,
}

/// Metric family: numbers of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Family {
    /// Name, without the suffix that the kind adds.
    pub name: &'static str,
    /// Description, one line.
    pub help: &'static str,
    /// Unit, in which the name ends; empty for none.
    pub unit: &'static str,
    /// Type of the numbers.
    pub kind: Kind,
    /// Each number, with its labels.
    pub series: Vec<(Vec<(&'static str, String)>, u64)>,
}

impl Family {
    /// Creates a family of one number.
    pub fn one(
        kind: Kind,
        name: &'static str,
        unit: &'static str,
        help: &'static str,
        number: u64,
    ) -> Self {
        Self {
            name,
            help,
            unit,
            kind,
            series: vec![(Vec::new(), number)],
        }
    }

    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let (name, unit) = (self.name, self.unit);
        let (kind, suffix) = self.kind_and_suffix();
        writeln!(out, "# TYPE {name} {kind}")?;
        if !unit.is_empty() {
            writeln!(out, "# UNIT {name} {unit}")?;
        }
        writeln!(out, "# HELP {name} {}", self.help)?;
        self.write_series(suffix, out)
    }

    /// Writes the family in the older format, in which a family has the name of its series, and no unit.
    fn write_as_text(&self, out: &mut dyn Write) -> io::Result<()> {
        let (kind, suffix) = self.kind_and_suffix();
        let (name, kind) = (self.name, if kind == "info" { "gauge" } else { kind });
        writeln!(
            out,
            "# HELP {name}{suffix} {}\n# TYPE {name}{suffix} {kind}",
            self.help
        )?;
        self.write_series(suffix, out)
    }

    /// Returns the name of the kind, and what the names of series end in.
    fn kind_and_suffix(&self) -> (&'static str, &'static str) {
        match self.kind {
            Kind::Gauge => ("gauge", ""),
            Kind::Counter | Kind::Seconds => ("counter", "_total"),
            Kind::Info => ("info", "_info"),
        }
    }

    fn write_series(&self, suffix: &str, out: &mut dyn Write) -> io::Result<()> {
        let name = self.name;
        for (labels, number) in &self.series {
            let labels = labels.iter().map(|(label, value)| pair(label, value));
            let labels = braces(&labels.collect::<Vec<_>>());
            let number = match self.kind {
                Kind::Seconds => seconds(*number),
                _ => number.to_string(),
            };
            writeln!(out, "{name}{suffix}{labels} {number}")?;
        }
        Ok(())
    }
}

/// Writes all families, and the end mark.
pub(super) fn write(families: &[Family], out: &mut dyn Write) -> io::Result<()> {
    for family in families {
        family.write(out)?;
    }
    writeln!(out, "# EOF")
}

/// Writes all families in the older format.
pub(super) fn write_as_text(families: &[Family], out: &mut dyn Write) -> io::Result<()> {
    families
        .iter()
        .try_for_each(|family| family.write_as_text(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_are_of_both_formats() {
        let labels = vec![("target", "a\"b\\\n".to_owned()), ("x", "y".to_owned())];
        let families = [
            Family::one(Kind::Gauge, "x_live_bytes", "bytes", "Live.", 7),
            Family::one(Kind::Counter, "x_hits", "", "Hits.", 11),
            Family::one(
                Kind::Seconds,
                "x_cpu_seconds",
                "seconds",
                "Time.",
                1_500_000_000,
            ),
            Family {
                name: "x",
                help: "What is traced.",
                unit: "",
                kind: Kind::Info,
                series: vec![(labels, 1)],
            },
        ];
        let mut text = Vec::new();
        write_as_text(&families, &mut text).expect("memory");
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
        write(&families, &mut text).expect("memory");
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
