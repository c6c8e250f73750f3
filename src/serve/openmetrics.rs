//! Current numbers in OpenMetrics' text format 1.0, which Prometheus and others scrape.

use std::io::{self, Write};

use crate::export::metrics::{braces, pair};

/// Content type of the format.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Type of the numbers of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A current value.
    Gauge,
    /// A sum since the start, which never falls.
    Counter,
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
        let (kind, suffix) = match self.kind {
            Kind::Gauge => ("gauge", ""),
            Kind::Counter => ("counter", "_total"),
            Kind::Info => ("info", "_info"),
        };
        writeln!(out, "# TYPE {name} {kind}")?;
        if !unit.is_empty() {
            writeln!(out, "# UNIT {name} {unit}")?;
        }
        writeln!(out, "# HELP {name} {}", self.help)?;
        for (labels, number) in &self.series {
            let labels = labels.iter().map(|(label, value)| pair(label, value));
            let labels = braces(&labels.collect::<Vec<_>>());
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_is_open_metrics() {
        let labels = vec![("target", "a\"b\\\n".to_owned()), ("x", "y".to_owned())];
        let families = [
            Family::one(Kind::Gauge, "x_live_bytes", "bytes", "Live.", 7),
            Family::one(Kind::Counter, "x_hits", "", "Hits.", 11),
            Family {
                name: "x",
                help: "What is traced.",
                unit: "",
                kind: Kind::Info,
                series: vec![(labels, 1)],
            },
        ];
        let mut text = Vec::new();
        write(&families, &mut text).expect("memory");
        assert_eq!(
            String::from_utf8_lossy(&text),
            "# TYPE x_live_bytes gauge\n# UNIT x_live_bytes bytes\n# HELP x_live_bytes Live.\n\
             x_live_bytes 7\n# TYPE x_hits counter\n# HELP x_hits Hits.\nx_hits_total 11\n\
             # TYPE x info\n# HELP x What is traced.\n\
             x_info{target=\"a\\\"b\\\\\\n\",x=\"y\"} 1\n# EOF\n"
        );
    }
}
