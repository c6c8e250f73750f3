//! Output of memtriage: one screen as text, or an object for each line of it.

use std::fs;
use std::io::{self, Write};
use std::thread;
use std::time::Duration;

use jiff::Zoned;
use memtools::host::memory_cgroups;
use memtools::host::values::Values;
use memtools::print::clock;
use memtools::print::output::Row;
use memtools::print::text;
use memtools::process::container::{self, CgroupInfo};
use serde::Serialize;

use crate::accounting::{Accounting, MemoryPart};
use crate::findings::{Finding, Level};
use crate::processes::ProcessUsage;

/// Share below which parts of memory are shown together, without --all.
const SMALL_PERCENT: f64 = 0.5;
/// Width of a terminal, in columns.
pub(crate) const WIDTH: usize = 80;
/// Column at which a finding's evidence begins.
const INDENT: usize = 6;

/// Formats bytes for people, such as `12.3M`, in powers of 1024.
pub(crate) fn size(bytes: u64) -> String {
    let mut number = bytes as f64;
    for unit in ["B", "K", "M", "G"] {
        if number < 1024.0 {
            let digits = usize::from(unit != "B" && number < 100.0);
            return format!("{number:.digits$}{unit}");
        }
        number /= 1024.0;
    }
    format!("{number:.1}T")
}

/// Formats a change in bytes for people, with its sign.
pub(crate) fn change(bytes: i64) -> String {
    let sign = if bytes < 0 { "-" } else { "+" };
    format!("{sign}{}", size(bytes.unsigned_abs()))
}

/// Row of the machine, the first of a screen.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "host")]
pub(crate) struct Host {
    #[serde(serialize_with = "clock::serialize")]
    pub(crate) time: Zoned,
    pub(crate) release: String,
    pub(crate) cpus: usize,
    pub(crate) memory_bytes: u64,
    /// Memory limit of the container that memtriage runs in. None without such a limit.
    limit_bytes: Option<u64>,
    pub(crate) swap_bytes: u64,
    /// Time between the two looks that rates are computed from.
    pub(crate) seconds: f64,
}

impl Host {
    /// Describes the machine now. `memory` has the numbers of /proc/meminfo, `since` is the time since the last look.
    pub(crate) fn now(memory: &Values, since: Duration) -> Self {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            time: clock::now(),
            release: release.trim_end().to_owned(),
            cpus: thread::available_parallelism().map_or(1, Into::into),
            memory_bytes: memory.get_or_zero("MemTotal"),
            limit_bytes: memory_cgroups::root_limit(),
            swap_bytes: memory.get_or_zero("SwapTotal"),
            seconds: since.as_secs_f64(),
        }
    }
}

impl Row for Host {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "{}  {} of memory{}, {} of swap, {} CPUs, Linux {}; rates of {:.1} s",
            clock::time_of_day(&self.time),
            size(self.memory_bytes),
            self.limit_bytes
                .map_or_else(String::new, |limit| format!(" ({} for us)", size(limit))),
            size(self.swap_bytes),
            self.cpus,
            self.release,
            self.seconds
        )
    }
}

impl Row for Finding {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut lead = format!("{:<INDENT$}", self.level.to_string());
        for line in text::wrapped(&self.evidence, WIDTH - INDENT) {
            writeln!(out, "{lead}{line}")?;
            lead = " ".repeat(INDENT);
        }
        match &self.next {
            Some(next) => writeln!(out, "{lead}next: {next}"),
            None => Ok(()),
        }
    }
}

/// Table of the parts of memory and the rest, with their changes since the first look.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "accounting")]
pub(crate) struct Table<'a> {
    /// Process whose memory this is. Both this and `cgroup` are None for the machine.
    pub(crate) pid: Option<u32>,
    pub(crate) cgroup: Option<String>,
    #[serde(rename = "total_bytes")]
    total: u64,
    parts: &'a [MemoryPart],
    unaccounted_bytes: i64,
    #[serde(skip)]
    whole: &'static str,
    #[serde(skip)]
    before: &'a Accounting,
    #[serde(skip)]
    all: bool,
}

impl<'a> Table<'a> {
    pub(crate) fn new(before: &'a Accounting, now: &'a Accounting, all: bool) -> Self {
        Self {
            pid: None,
            cgroup: None,
            total: now.total,
            whole: now.whole,
            parts: &now.parts,
            unaccounted_bytes: now.unaccounted(),
            before,
            all,
        }
    }

    fn line(&self, out: &mut dyn Write, name: &str, bytes: i64, before: i64) -> io::Result<()> {
        let share = bytes as f64 * 100.0 / self.total.max(1) as f64;
        let bytes_text = if bytes < 0 {
            change(bytes)
        } else {
            size(bytes.unsigned_abs())
        };
        writeln!(
            out,
            "{name:<28} {bytes_text:>8} {share:>6.1} % {:>9}",
            match bytes - before {
                0 => String::new(),
                grown => change(grown),
            }
        )
    }
}

impl Row for Table<'_> {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "\n{:<28} {:>8} {:>8} {:>9}",
            "WHERE", "SIZE", "SHARE", "CHANGE"
        )?;
        let small = |part: &MemoryPart| {
            !self.all && (part.bytes as f64) < self.total as f64 * SMALL_PERCENT / 100.0
        };
        let (mut others, mut others_before, mut count) = (0, 0, 0);
        for (part, before) in self.parts.iter().zip(&self.before.parts) {
            let (now, before) = (part.bytes.cast_signed(), before.bytes.cast_signed());
            if small(part) {
                others += now;
                others_before += before;
                count += 1;
            } else {
                self.line(out, part.name, now, before)?;
            }
        }
        if count > 0 {
            self.line(
                out,
                &format!("{count} smaller parts (--all)"),
                others,
                others_before,
            )?;
        }
        let before = self.before.unaccounted();
        self.line(out, "unaccounted", self.unaccounted_bytes, before)?;
        let total = self.total.cast_signed();
        self.line(out, self.whole, total, self.before.total.cast_signed())
    }
}

/// Row of a process, one of the largest.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "process")]
pub(crate) struct ProcessRow<'a> {
    pid: u32,
    comm: &'a str,
    #[serde(flatten)]
    cgroup_info: Option<&'a CgroupInfo>,
    pss_bytes: Option<u64>,
    anon_bytes: u64,
    file_bytes: u64,
    shmem_bytes: u64,
    swap_bytes: u64,
    growth_bytes: i64,
    /// Whether text has the column CONTAINER.
    #[serde(skip)]
    container: bool,
}

impl<'a> ProcessRow<'a> {
    /// Returns the header, with CONTAINER if that column is requested.
    pub(crate) fn header(container: bool) -> String {
        format!(
            "\nPID     COMM             {}     PSS     ANON     FILE    SHMEM     SWAP   CHANGE",
            container::header(container)
        )
    }

    pub(crate) fn new(usage: &'a ProcessUsage, growth: i64, container: bool) -> Self {
        Self {
            pid: usage.pid,
            comm: &usage.comm,
            cgroup_info: usage.cgroup_info.as_ref(),
            container,
            pss_bytes: usage.pss,
            anon_bytes: usage.anon,
            file_bytes: usage.file,
            shmem_bytes: usage.shmem,
            swap_bytes: usage.swap,
            growth_bytes: growth,
        }
    }
}

impl Row for ProcessRow<'_> {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "{:<7} {:<16} {}{:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
            self.pid,
            self.comm,
            container::column(self.cgroup_info, self.container),
            self.pss_bytes.map_or("-".into(), size),
            size(self.anon_bytes),
            size(self.file_bytes),
            size(self.shmem_bytes),
            size(self.swap_bytes),
            match self.growth_bytes {
                0 => String::new(),
                grown => change(grown),
            }
        )
    }
}

/// Whether no finding needs a look or action.
pub(crate) fn healthy(findings: &[Finding]) -> bool {
    findings
        .iter()
        .all(|finding| finding.level == Level::Healthy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(row: &impl Row) -> String {
        let mut out = Vec::new();
        row.text(&mut out).expect("memory");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn sizes_are_short() {
        for (bytes, expected) in [
            (0, "0B"),
            (1023, "1023B"),
            (1024, "1.0K"),
            (102_400, "100K"),
            (5 << 30, "5.0G"),
            (3 << 40, "3.0T"),
        ] {
            assert_eq!(size(bytes), expected);
        }
        assert_eq!(
            (change(-2048).as_str(), change(0).as_str()),
            ("-2.0K", "+0B")
        );
    }

    #[test]
    fn a_finding_is_no_wider_than_a_terminal() {
        let finding = Finding {
            level: Level::Look,
            rule: "slab",
            evidence: "word ".repeat(40).trim_end().to_owned(),
            next: Some("memleak -k".into()),
            culprit: None,
        };
        let text = text(&finding);
        assert!(text.lines().all(|line| line.len() <= WIDTH), "{text}");
        assert!(text.starts_with("look  word"), "{text}");
        assert!(text.ends_with("      next: memleak -k\n"), "{text}");
        assert_eq!(text.matches("word").count(), 40);
    }

    #[test]
    fn small_parts_are_one_line_and_nothing_is_left_out() {
        let part = |name, bytes| MemoryPart { name, bytes };
        let before = Accounting {
            whole: "MemTotal",
            total: 1000 << 10,
            parts: vec![part("free", 600 << 10), part("slab", 2048), part("x", 1024)],
        };
        let mut now = before.clone();
        now.parts[0].bytes = 500 << 10;
        let text = text(&Table::new(&before, &now, false));
        assert_eq!(
            text,
            "\n\
             WHERE                            SIZE    SHARE    CHANGE\n\
             free                             500K   50.0 %     -100K\n\
             2 smaller parts (--all)          3.0K    0.3 %          \n\
             unaccounted                      497K   49.7 %     +100K\n\
             MemTotal                        1000K  100.0 %          \n"
        );
    }
}
