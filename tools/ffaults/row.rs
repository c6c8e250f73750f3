//! Faults on one file as a line of text and as JSON.

use std::fmt::Write as _;
use std::io::{self, Write};

use jiff::Zoned;
use memtools::print::clock;
use memtools::print::output::Row;
use memtools::print::timeline::{Count as Counted, TimelineEntry, Unit};
use memtools::process::container::{self, CgroupInfo};
use serde::Serialize;

use crate::attach::FaultDetails;
use crate::report::{Count, Key};

/// Optional columns, and the width of the column FILE.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Columns {
    pub(crate) by_process: bool,
    pub(crate) container: bool,
    pub(crate) types: bool,
    /// Width of the column FILE.
    pub(crate) file: usize,
}

impl Columns {
    pub(crate) fn header(self) -> String {
        let mut line = String::new();
        // Writing to a String does not fail.
        if self.by_process {
            let _ = write!(line, "{:<7} {:<16} ", "PID", "COMM");
        }
        line += &container::header(self.container);
        let _ = write!(line, "{:<1$} {2:>10}", "FILE", self.file, "COUNT");
        if self.types {
            let _ = write!(
                line,
                " {:>10} {:>10} {:>10} {:>10}",
                "MINOR", "MAJOR", "WRITE", "EXEC"
            );
        }
        line
    }
}

/// Faults on one file.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "file")]
pub(crate) struct FileFaults<'a> {
    /// Time of the report.
    #[serde(serialize_with = "clock::serialize")]
    time: &'a Zoned,
    file: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    comm: Option<String>,
    #[serde(flatten)]
    pub(crate) cgroup_info: Option<CgroupInfo>,
    faults: u64,
    /// Minor faults. Like the counts below, None if the hook does not provide the detail.
    minor: Option<u64>,
    major: Option<u64>,
    write: Option<u64>,
    exec: Option<u64>,
    #[serde(skip)]
    columns: Columns,
}

impl<'a> FileFaults<'a> {
    pub(crate) fn new(
        key: Key,
        count: Count,
        time: &'a Zoned,
        knows: FaultDetails,
        columns: Columns,
    ) -> Self {
        Self {
            time,
            file: key.file,
            pid: columns.by_process.then_some(key.pid),
            comm: columns.by_process.then_some(key.comm),
            cgroup_info: None,
            faults: count.faults,
            minor: knows.major.then(|| count.faults - count.major),
            major: knows.major.then_some(count.major),
            write: knows.access.then_some(count.write),
            exec: knows.access.then_some(count.exec),
            columns,
        }
    }
}

impl Row for FileFaults<'_> {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        if let (Some(pid), Some(comm)) = (self.pid, &self.comm) {
            let column = container::column(self.cgroup_info.as_ref(), self.columns.container);
            write!(out, "{pid:<7} {comm:<16} {column}")?;
        }
        write!(
            out,
            "{:<1$} {2:>10}",
            self.file, self.columns.file, self.faults
        )?;
        if self.columns.types {
            for count in [self.minor, self.major, self.write, self.exec] {
                let count = count.map_or("-".to_owned(), |count| count.to_string());
                write!(out, " {count:>10}")?;
            }
        }
        writeln!(out)
    }

    fn moment(&self) -> TimelineEntry<'_> {
        let name = format!("faults on {}", self.file);
        TimelineEntry::Counts(vec![Counted {
            name: name.into(),
            unit: Unit::Count,
            process: self.pid.zip(self.comm.as_deref()),
            time: self.time,
            increase: self.faults,
        }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_what_is_not_known_is_a_dash() {
        let columns = Columns {
            by_process: true,
            container: false,
            types: true,
            file: 32,
        };
        let key = Key {
            file: "libc.so.6".to_owned(),
            pid: 7,
            comm: "sh".to_owned(),
        };
        let count = Count {
            faults: 23,
            major: 5,
            ..Count::default()
        };
        let knows = FaultDetails {
            major: true,
            access: false,
        };
        let time = Zoned::new(jiff::Timestamp::UNIX_EPOCH, jiff::tz::TimeZone::UTC);
        let row = FileFaults::new(key, count, &time, knows, columns);
        let mut line = Vec::new();
        row.text(&mut line).expect("memory");
        assert_eq!(
            format!("{}\n{}", columns.header(), String::from_utf8_lossy(&line)),
            "PID     COMM             FILE                                  COUNT      MINOR      MAJOR      WRITE       EXEC\n\
             7       sh               libc.so.6                                23         18          5          -          -\n"
        );
        assert_eq!(
            serde_json::to_string(&row).expect("JSON"),
            r#"{"type":"file","time":"1970-01-01T00:00:00.000000+00:00","file":"libc.so.6","pid":7,"comm":"sh","faults":23,"minor":18,"major":5,"write":null,"exec":null}"#
        );
    }
}
