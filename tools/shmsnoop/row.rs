//! Row of one call, with its arguments decoded.

use std::borrow::Cow;
use std::io::{self, Write};
use std::time::Duration;

use memtools::export::exposition::MetricKind;
use memtools::export::metrics::{Family, Metrics};
use memtools::print::clock::Clock;
use memtools::print::errno;
use memtools::print::flags;
use memtools::print::output;
use memtools::print::output::{Exact, Hex};
use memtools::print::timeline::TimelineEntry;
use memtools::process::container::{self, CgroupInfo};
use memtools::process::origin::Origin;
use serde::Serialize;

use crate::bpf::types::{call_kind as Kind, event, segment};

const SHM_HUGETLB: u64 = 0o4000;

const GET_FLAGS: [(u64, &str); 5] = [
    (0o1000, "IPC_CREAT"),
    (0o2000, "IPC_EXCL"),
    (SHM_HUGETLB, "SHM_HUGETLB"),
    (0o10000, "SHM_NORESERVE"),
    (0o100000, "SHM_EXEC"),
];

const AT_FLAGS: [(u64, &str); 4] = [
    (0o10000, "SHM_RDONLY"),
    (0o20000, "SHM_RND"),
    (0o40000, "SHM_REMAP"),
    (0o100000, "SHM_EXEC"),
];

/// Flag that a 32-bit C library adds to a command to select the newer structs. The kernel knows no such command of a
/// 64-bit process, whose call fails with EINVAL.
const IPC_64: u64 = 0x100;

const COMMANDS: [(u64, &str); 9] = [
    (0, "IPC_RMID"),
    (1, "IPC_SET"),
    (2, "IPC_STAT"),
    (3, "IPC_INFO"),
    (11, "SHM_LOCK"),
    (12, "SHM_UNLOCK"),
    (13, "SHM_STAT"),
    (14, "SHM_INFO"),
    (15, "SHM_STAT_ANY"),
];

pub(crate) static CALLS: Family = Family {
    name: "memtools_shared_memory_calls_total",
    help: "Calls of shmget(2), shmat(2), shmdt(2) and shmctl(2), by task and result.",
    labels: &["comm", "unit", "container", "call", "result"],
    kind: MetricKind::Counter,
};

/// Optional columns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Columns {
    pub(crate) timestamp: bool,
    /// Column TID in place of PID.
    pub(crate) tid: bool,
    pub(crate) container: bool,
    pub(crate) segment: bool,
    pub(crate) latency: bool,
}

impl Columns {
    /// Returns the line of column names.
    pub(crate) fn header(self) -> String {
        let mut header = String::new();
        if self.timestamp {
            header += &format!("{:<14}", "TIME(s)");
        }
        let id = if self.tid { "TID" } else { "PID" };
        header += &format!("{id:<6} {:<16} ", "COMM");
        header += &container::header(self.container);
        header += &format!("{:>6} {:>16} ", "SYS", "RET");
        if self.latency {
            header += &format!("{:>8} ", "LAT(us)");
        }
        if self.segment {
            header += &format!("{:>6} {:>10} {:>6} ", "NATTCH", "SIZE(KB)", "CPID");
        }
        header + "ARGs"
    }
}

/// Call with its arguments.
#[derive(Debug, Serialize)]
#[serde(tag = "call", rename_all = "snake_case")]
enum Call {
    Shmget {
        key: Hex,
        size_bytes: Exact,
        shmflg: Hex,
        flags: Vec<String>,
    },
    Shmat {
        shmid: u64,
        shmaddr: Hex,
        shmflg: Hex,
        flags: Vec<String>,
    },
    Shmdt {
        shmaddr: Hex,
    },
    Shmctl {
        shmid: u64,
        cmd: Cow<'static, str>,
        buf: Hex,
    },
}

impl Call {
    fn new(kind: Kind, [first, second, third]: [u64; 3]) -> Self {
        match kind {
            Kind::CALL_SHMGET => Self::Shmget {
                key: Hex(first),
                size_bytes: Exact(second),
                shmflg: Hex(third),
                flags: get_flags(third),
            },
            Kind::CALL_SHMAT => Self::Shmat {
                shmid: first,
                shmaddr: Hex(second),
                shmflg: Hex(third),
                flags: flag_names(third, &AT_FLAGS, None),
            },
            Kind::CALL_SHMDT => Self::Shmdt {
                shmaddr: Hex(first),
            },
            _ => Self::Shmctl {
                shmid: first,
                cmd: command(second),
                buf: Hex(third),
            },
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Shmget { .. } => "SHMGET",
            Self::Shmat { .. } => "SHMAT",
            Self::Shmdt { .. } => "SHMDT",
            Self::Shmctl { .. } => "SHMCTL",
        }
    }
}

fn get_flags(flags: u64) -> Vec<String> {
    if flags & SHM_HUGETLB == 0 {
        return flag_names(flags, &GET_FLAGS, None);
    }
    // The size is a number of six bits, not a set of flags: 2 MB and 1 GB have bits in common.
    let size = flags::huge_page_size(flags).map(|size| format!("SHM_HUGE_{size}"));
    flag_names(flags & !flags::HUGE_MASK, &GET_FLAGS, size)
}

/// Returns the names of the flags, then `more`, then the bits without a name, such as permissions, in octal.
fn flag_names(flags: u64, table: &[(u64, &'static str)], more: Option<String>) -> Vec<String> {
    let (names, rest) = flags::names(flags, table);
    let rest = (rest != 0).then(|| format!("0{rest:o}"));
    let names = names.into_iter().map(str::to_owned);
    names.chain(more).chain(rest).collect()
}

fn command(cmd: u64) -> Cow<'static, str> {
    let named = |cmd| COMMANDS.iter().find(|(number, _)| *number == cmd);
    if let Some((_, name)) = named(cmd) {
        return Cow::Borrowed(*name);
    }
    match named(cmd & !IPC_64) {
        Some((_, name)) => format!("{name}|IPC_64").into(),
        None => format!("{cmd:#x}").into(),
    }
}

/// Row of one call.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "call")]
pub(crate) struct Row {
    #[serde(flatten)]
    origin: Origin,
    #[serde(flatten)]
    call: Call,
    /// Result: an id, an address, or 0; None if the call failed.
    result: Option<Hex>,
    error: Option<Cow<'static, str>>,
    latency_ns: u64,
    /// Attach count of the segment; None if it is unknown.
    attached: Option<u64>,
    segment_bytes: Option<u64>,
    creator_pid: Option<u32>,
    #[serde(skip)]
    since_first: Duration,
    /// Command of shmctl, as a number.
    #[serde(skip)]
    cmd: u64,
    #[serde(skip)]
    columns: Columns,
}

impl Row {
    pub(crate) fn new(
        event: &event,
        cgroup_info: Option<CgroupInfo>,
        first_ns: u64,
        clock: &Clock,
        columns: Columns,
    ) -> Self {
        let outcome = errno::result(event.result);
        let segment = Some(event.segment).filter(|segment: &segment| segment.known != 0);
        Self {
            origin: Origin::new(
                clock.local(event.time_ns),
                (event.pid, event.tid),
                &event.comm,
                cgroup_info,
            ),
            call: Call::new(event.kind, event.args),
            result: outcome.ok().map(Hex),
            error: outcome.err().map(errno::name),
            latency_ns: event.latency_ns,
            attached: segment.map(|segment| segment.attached),
            segment_bytes: segment.map(|segment| segment.size),
            creator_pid: segment.map(|segment| segment.creator_pid),
            since_first: Duration::from_nanos(event.time_ns.saturating_sub(first_ns)),
            cmd: event.args[1],
            columns,
        }
    }
}

impl Row {
    /// Adds the call to its task's sums.
    pub(crate) fn record_metrics(&self, metrics: &mut Metrics) {
        let [unit, container] = container::labels(self.origin.cgroup_info.as_ref());
        let call = self.call.name().to_lowercase();
        let result = self.error.as_ref().map_or("success", |_| "error");
        let labels = [self.origin.comm.as_str(), unit, container, &call, result];
        metrics.add(&CALLS, &labels, 1);
    }
}

impl output::Row for Row {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let columns = self.columns;
        if columns.timestamp {
            write!(out, "{:<14.9}", self.since_first.as_secs_f64())?;
        }
        let origin = &self.origin;
        let id = if columns.tid { origin.tid } else { origin.pid };
        write!(out, "{id:<6} {:<16} ", origin.comm)?;
        let column = container::column(origin.cgroup_info.as_ref(), columns.container);
        write!(out, "{column}")?;
        write!(out, "{:>6} ", self.call.name())?;
        match (self.result, &self.error) {
            (Some(Hex(value)), _) => write!(out, "{value:>16x} ")?,
            (None, error) => write!(out, "{:>16} ", error.as_deref().unwrap_or("-"))?,
        }
        if columns.latency {
            write!(out, "{:>8.1} ", self.latency_ns as f64 / 1e3)?;
        }
        if columns.segment {
            let known = |value: Option<u64>| value.map_or("-".into(), |value| value.to_string());
            write!(
                out,
                "{:>6} {:>10} {:>6} ",
                known(self.attached),
                known(self.segment_bytes.map(|bytes| bytes.div_ceil(1024))),
                known(self.creator_pid.map(u64::from)),
            )?;
        }
        match &self.call {
            Call::Shmget {
                key,
                size_bytes: Exact(size),
                shmflg,
                flags,
            } => {
                write!(out, "key: {key}, size: {size}, shmflg: {shmflg}")?;
                write_names(out, flags)
            }
            Call::Shmat {
                shmid,
                shmaddr,
                shmflg,
                flags,
            } => {
                write!(
                    out,
                    "shmid: {shmid:#x}, shmaddr: {shmaddr}, shmflg: {shmflg}"
                )?;
                write_names(out, flags)
            }
            Call::Shmdt { shmaddr } => writeln!(out, "shmaddr: {shmaddr}"),
            Call::Shmctl { shmid, cmd, buf } => {
                writeln!(
                    out,
                    "shmid: {shmid:#x}, cmd: {} ({cmd}), buf: {buf}",
                    self.cmd
                )
            }
        }
    }

    fn moment(&self) -> TimelineEntry<'_> {
        let name = self.call.name().to_lowercase();
        self.origin.moment(name, Some(self.latency_ns))
    }
}

fn write_names(out: &mut dyn Write, names: &[String]) -> io::Result<()> {
    if names.is_empty() {
        return writeln!(out);
    }
    writeln!(out, " ({})", names.join("|"))
}

#[cfg(test)]
mod tests {
    use memtools::print::output::Row as _;

    use super::*;

    const BARE: Columns = Columns {
        timestamp: false,
        tid: false,
        container: false,
        segment: false,
        latency: false,
    };

    fn line(kind: Kind, args: [u64; 3], result: i64, columns: Columns) -> String {
        let mut event = event {
            time_ns: 3_500_000_000,
            latency_ns: 1234,
            args,
            result,
            pid: 19813,
            tid: 19814,
            kind,
            ..event::default()
        };
        event.comm[..6].copy_from_slice(&b"server".map(u8::cast_signed));
        let row = Row::new(&event, None, 1_000_000_000, &Clock::new(), columns);
        let mut line = Vec::new();
        row.text(&mut line).expect("memory");
        String::from_utf8(line).expect("UTF-8")
    }

    #[test]
    fn bcc_s_columns() {
        assert_eq!(
            BARE.header(),
            "PID    COMM                SYS              RET ARGs"
        );
        assert_eq!(
            line(Kind::CALL_SHMGET, [0x7802_0001, 20, 0x3b6], 0x10000, BARE),
            "19813  server           SHMGET            10000 key: 0x78020001, size: 20, \
             shmflg: 0x3b6 (IPC_CREAT|0666)\n"
        );
        assert_eq!(
            line(Kind::CALL_SHMDT, [0x7f4f_d8ee_7000, 0, 0], 0, BARE),
            "19813  server            SHMDT                0 shmaddr: 0x7f4fd8ee7000\n"
        );
        assert_eq!(
            line(Kind::CALL_SHMAT, [0x10000, 0, 0], 0x7f4f_d8ee_7000, BARE),
            "19813  server            SHMAT     7f4fd8ee7000 shmid: 0x10000, shmaddr: 0x0, \
             shmflg: 0x0\n"
        );
        assert_eq!(
            line(Kind::CALL_SHMCTL, [0x10000, 0, 0], 0, BARE),
            "19813  server           SHMCTL                0 shmid: 0x10000, cmd: 0 (IPC_RMID), \
             buf: 0x0\n"
        );
    }

    #[test]
    fn errors_have_their_names() {
        let line = line(Kind::CALL_SHMGET, [1, 4096, 0], -2, BARE);
        assert!(line.contains("SHMGET           ENOENT key: 0x1,"), "{line}");
    }

    #[test]
    fn further_columns_line_up_with_their_names() {
        let columns = Columns {
            timestamp: true,
            tid: true,
            container: false,
            segment: true,
            latency: true,
        };
        let header = columns.header();
        let line = line(Kind::CALL_SHMDT, [4096, 0, 0], 0, columns);
        assert!(line.starts_with("2.500000000   19814  server "), "{line}");
        let ends_with = |name: &str, value: &str| {
            let end = header.find(name).expect(name) + name.len();
            assert!(line[..end].ends_with(value), "{name}\n{header}\n{line}");
        };
        ends_with("LAT(us)", " 1.2");
        ends_with("NATTCH", " -");
        ends_with("SIZE(KB)", " -");
        ends_with("CPID", " -");
        assert_eq!(header.find("ARGs"), line.find("shmaddr"));
    }

    #[test]
    fn huge_pages_have_one_size() {
        let names = |flags| get_flags(flags).join("|");
        assert_eq!(names(0o4600 | 21 << 26), "SHM_HUGETLB|SHM_HUGE_2MB|0600");
        assert_eq!(names(0o4600 | 30 << 26), "SHM_HUGETLB|SHM_HUGE_1GB|0600");
        assert_eq!(names(0o4600), "SHM_HUGETLB|0600");
        assert_eq!(names(0o600 | 21 << 26), "012400000600");
        assert_eq!(names(0), "");
    }

    #[test]
    fn commands_are_shown_as_they_were_given() {
        assert_eq!(command(2), "IPC_STAT");
        assert_eq!(command(0x102), "IPC_STAT|IPC_64");
        let line = line(Kind::CALL_SHMCTL, [0, 0x102, 0], -22, BARE);
        assert!(
            line.contains(" EINVAL shmid: 0x0, cmd: 258 (IPC_STAT|IPC_64), "),
            "{line}"
        );
        assert_eq!(command(15), "SHM_STAT_ANY");
        assert_eq!(command(99), "0x63");
    }
}
