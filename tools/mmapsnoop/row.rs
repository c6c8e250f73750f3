//! One call, as a record of the ring buffer and as a row.

use std::borrow::Cow;
use std::io::{self, Write};
use std::rc::Rc;

use memtools::export::exposition::MetricKind;
use memtools::export::metrics::{Family, Metrics};
use memtools::export::text::part_below_row;
use memtools::print::clock::{self, Clock};
use memtools::print::errno;
use memtools::print::file_path::{self, PathExtent};
use memtools::print::output;
use memtools::print::output::{Exact, Hex};
use memtools::print::text;
use memtools::print::timeline::TimelineEntry;
use memtools::process::container::{self, CgroupInfo};
use memtools::process::origin::Origin;
use memtools::stacks::named::NamedStack;
use serde::Serialize;

use crate::bits::{self, Bits};
use crate::bpf::types::{call_kind as Kind, event, file_kind as FileKind};

pub(crate) static CALLS: Family = Family {
    name: "memtools_mapping_calls_total",
    help: "Calls of mmap(2), and with --munmap of munmap(2) and mremap(2), by task and result.",
    labels: &["comm", "unit", "container", "call", "result"],
    kind: MetricKind::Counter,
};
pub(crate) static MAPPED: Family = Family {
    name: "memtools_mapped_bytes_total",
    help: "Bytes that calls of mmap(2) have mapped, by task.",
    labels: &["comm", "unit", "container"],
    kind: MetricKind::Counter,
};

/// Record of the ring buffer.
pub(crate) struct Record {
    event: event,
    file: Option<String>,
}

impl Record {
    /// Decodes a record: an event, followed by the file's name or the components of its path.
    pub(crate) fn decode(record: &[u8]) -> Option<Self> {
        let event: &event = plain::from_bytes(record).ok()?;
        let names = record.get(size_of::<event>()..)?;
        let names = names.get(..event.file_bytes as usize)?;
        let file = match event.file {
            FileKind::FILE_NAME => Some(file_path::name(names)),
            FileKind::FILE_PATH => Some(file_path::path(names, PathExtent::Complete)),
            FileKind::FILE_PATH_CUT => Some(file_path::path(names, PathExtent::Truncated)),
            FileKind::FILE_PATH_IN_NO_FOLDER => Some(file_path::path(names, PathExtent::Unlinked)),
            _ => None,
        };
        Some(Self {
            event: *event,
            file,
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.event.pid
    }

    pub(crate) fn comm(&self) -> String {
        text::from_c(&self.event.comm)
    }

    /// Returns the id of the task's cgroup.
    pub(crate) fn cgroup(&self) -> u64 {
        self.event.cgroup
    }

    /// Returns the id of the caller's stack.
    pub(crate) fn stack(&self) -> u64 {
        self.event.stack
    }

    /// Returns the bytes that the call mapped; None if the call failed, or is not mmap(2).
    pub(crate) fn mapped_bytes(&self) -> Option<u64> {
        if self.event.kind != Kind::CALL_MMAP {
            return None;
        }
        errno::result(self.event.result).ok()?;
        Some(self.event.args[1])
    }
}

/// Optional columns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Columns {
    pub(crate) time: bool,
    pub(crate) container: bool,
    /// Columns CALL and ADDRESS.
    pub(crate) call: bool,
    pub(crate) result: bool,
    pub(crate) flags: bool,
}

impl Columns {
    /// Returns the line of column names.
    pub(crate) fn header(self) -> String {
        let mut header = String::new();
        if self.time {
            header += &format!("{:<8} ", "TIME");
        }
        header += &format!("{:<6} {:<14} ", "PID", "COMM");
        header += &container::header(self.container);
        if self.call {
            header += &format!("{:<6} {:<14} ", "CALL", "ADDRESS");
        }
        header += &format!(
            "{:<4} {:<5} {:<8} {:<8} ",
            "PROT", "MAP", "OFFS(KB)", "SIZE(KB)"
        );
        if self.result {
            header += &format!("{:<14} ", "RESULT");
        }
        if self.flags {
            header += &format!("{:<32} ", "FLAGS");
        }
        header + "FILE"
    }
}

/// Row of one call. Fields that the call has no argument for are None.
#[derive(Serialize)]
#[serde(tag = "type", rename = "call")]
pub(crate) struct Row {
    #[serde(flatten)]
    origin: Origin,
    call: &'static str,
    /// Address argument: where to map, what to unmap or to move.
    address: Hex,
    #[serde(skip_serializing_if = "Option::is_none")]
    old_size_bytes: Option<Exact>,
    size_bytes: Exact,
    #[serde(skip_serializing_if = "Option::is_none")]
    prot: Option<Bits>,
    #[serde(skip_serializing_if = "Option::is_none")]
    flags: Option<Bits>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fd: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset_bytes: Option<Exact>,
    file: Option<String>,
    /// Address of the mapping, or 0 for munmap; None if the call failed.
    result: Option<Hex>,
    error: Option<Cow<'static, str>>,
    #[serde(flatten)]
    stack: Option<Rc<NamedStack>>,
    #[serde(skip)]
    columns: Columns,
}

impl Row {
    pub(crate) fn new(
        record: Record,
        cgroup_info: Option<CgroupInfo>,
        stack: Option<Rc<NamedStack>>,
        clock: &Clock,
        columns: Columns,
    ) -> Self {
        let Record { event, file } = record;
        let [address, second, third, fourth, fifth, sixth] = event.args;
        let outcome = errno::result(event.result);
        let row = Self {
            origin: Origin::new(
                clock.local(event.time_ns),
                (event.pid, event.tid),
                &event.comm,
                cgroup_info,
            ),
            call: "munmap",
            address: Hex(address),
            old_size_bytes: None,
            size_bytes: Exact(second),
            prot: None,
            flags: None,
            fd: None,
            offset_bytes: None,
            file,
            result: outcome.ok().map(Hex),
            error: outcome.err().map(errno::name),
            stack,
            columns,
        };
        match event.kind {
            Kind::CALL_MMAP => Self {
                call: "mmap",
                prot: Some(Bits::Prot(third)),
                flags: Some(Bits::Map(fourth)),
                fd: (!bits::is_anonymous(fourth)).then_some(fifth as i32),
                offset_bytes: Some(Exact(sixth)),
                ..row
            },
            Kind::CALL_MREMAP => Self {
                call: "mremap",
                old_size_bytes: Some(Exact(second)),
                size_bytes: Exact(third),
                flags: Some(Bits::Mremap(fourth)),
                ..row
            },
            _ => row,
        }
    }

    /// Adds the call, and the bytes that it mapped, to its task's sums.
    pub(crate) fn record_metrics(&self, metrics: &mut Metrics) {
        let [unit, container] = container::labels(self.origin.cgroup_info.as_ref());
        let comm = self.origin.comm.as_str();
        let result = self.error.as_ref().map_or("success", |_| "error");
        metrics.add(&CALLS, &[comm, unit, container, self.call, result], 1);
        if self.call == "mmap" && self.error.is_none() {
            metrics.add(&MAPPED, &[comm, unit, container], self.size_bytes.0);
        }
    }

    /// Returns the content of the column FILE: `[anon]` for anonymous memory, and `-` for an unknown file.
    fn file_column(&self) -> &str {
        match (&self.file, self.call, self.fd) {
            (Some(name), ..) => name,
            (None, "mmap", None) => "[anon]",
            _ => "-",
        }
    }
}

/// Width of the columns in KiB, in digits: enough for 95 GiB.
const KIB_DIGITS: usize = 8;

/// Formats a number of bytes in KiB. If the number is too long for a column, it is written in the first larger unit
/// that fits and divides it exactly, with the unit's letter. Otherwise it is written in KiB all the same.
fn kibibytes(bytes: u64) -> String {
    let kibibytes = bytes / 1024;
    let plain = kibibytes.to_string();
    if plain.len() <= KIB_DIGITS {
        return plain;
    }
    [(10, 'M'), (20, 'G'), (30, 'T')]
        .into_iter()
        .filter(|(shift, _)| kibibytes.trailing_zeros() >= *shift)
        .map(|(shift, unit)| format!("{}{unit}", kibibytes >> shift))
        .find(|text| text.len() <= KIB_DIGITS)
        .unwrap_or(plain)
}

impl output::Row for Row {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        if self.columns.time {
            write!(out, "{:<8} ", clock::time_of_day(&self.origin.time))?;
        }
        write!(out, "{:<6} {:<14.14} ", self.origin.pid, self.origin.comm)?;
        write!(
            out,
            "{}",
            container::column(self.origin.cgroup_info.as_ref(), self.columns.container)
        )?;
        if self.columns.call {
            write!(out, "{:<6} {:<14} ", self.call, self.address)?;
        }
        let letters = |bits: Option<Bits>| bits.map_or("-".into(), Bits::letters);
        write!(out, "{:<4} ", letters(self.prot))?;
        write!(out, "{:<5} ", letters(self.flags))?;
        match self.offset_bytes {
            Some(Exact(bytes)) => write!(out, "{:<8} ", kibibytes(bytes))?,
            None => write!(out, "{:<8} ", "-")?,
        }
        write!(out, "{:<8} ", kibibytes(self.size_bytes.0))?;
        if self.columns.result {
            match (&self.result, &self.error) {
                (Some(value), _) => write!(out, "{value:<14} ")?,
                (None, error) => write!(out, "{:<14} ", error.as_deref().unwrap_or("-"))?,
            }
        }
        if self.columns.flags {
            match self.flags {
                Some(flags) => write!(out, "{flags:<32} ")?,
                None => write!(out, "{:<32} ", "-")?,
            }
        }
        writeln!(out, "{}", self.file_column())?;
        match &self.stack {
            Some(stack) => part_below_row(stack.user.as_ref(), out),
            None => Ok(()),
        }
    }

    fn moment(&self) -> TimelineEntry<'_> {
        self.origin.moment(self.call, None)
    }
}

#[cfg(test)]
mod tests {
    use memtools::print::output::Row as _;

    use super::*;

    const BARE: Columns = Columns {
        time: false,
        container: false,
        call: false,
        result: false,
        flags: false,
    };
    const ALL: Columns = Columns {
        time: true,
        container: false,
        call: true,
        result: true,
        flags: true,
    };

    fn row(kind: Kind, args: [u64; 6], result: i64, file: Option<&str>, columns: Columns) -> Row {
        let mut event = event {
            args,
            result,
            kind,
            pid: 6315,
            ..event::default()
        };
        event.comm[..4].copy_from_slice(&b"java".map(u8::cast_signed));
        let file = file.map(str::to_owned);
        Row::new(Record { event, file }, None, None, &Clock::new(), columns)
    }

    fn line(row: &Row) -> String {
        let mut line = Vec::new();
        row.text(&mut line).expect("memory");
        String::from_utf8(line).expect("UTF-8")
    }

    #[test]
    fn the_book_s_columns() {
        assert_eq!(
            BARE.header(),
            "PID    COMM           PROT MAP   OFFS(KB) SIZE(KB) FILE"
        );
        let args = [0, 2222 << 10, 5, 2, 3, 0];
        let library = row(Kind::CALL_MMAP, args, 0x7f00, Some("libjava.so"), BARE);
        assert_eq!(
            line(&library),
            "6315   java           R-E  -P--  0        2222     libjava.so\n"
        );
    }

    #[test]
    fn large_sizes_stay_in_their_column() {
        let texts = [
            95 << 30,
            96 << 30,
            1 << 40,
            (1 << 40) + 4096,
            128 << 40,
            1 << 63,
            u64::MAX,
        ]
        .map(kibibytes);
        assert_eq!(
            texts,
            [
                "99614720",
                "98304M",
                "1048576M",
                "1073741828",
                "131072G",
                "8388608T",
                "18014398509481983"
            ]
        );
    }

    #[test]
    fn what_has_no_file_says_why() {
        let file = |flags, fd| {
            let args = [0, 4096, 3, flags, fd, 0];
            let row = row(Kind::CALL_MMAP, args, -9, None, BARE);
            row.file_column().to_owned()
        };
        assert_eq!(file(0x22, u64::MAX), "[anon]");
        assert_eq!(file(0x02, 9999), "-");
    }

    #[test]
    fn all_columns_line_up_with_their_names() {
        let args = [0x7f12_3456_7000, 8192, 12288, 1, 0, 0];
        let moved = row(Kind::CALL_MREMAP, args, -12, None, ALL);
        let (header, line) = (ALL.header(), line(&moved));
        let at = |name: &str| &line[header.find(name).expect(name)..];
        assert!(at("CALL").starts_with("mremap 0x7f1234567000 "), "{line}");
        assert!(at("SIZE(KB)").starts_with("12 "), "{line}");
        assert!(at("RESULT").starts_with("ENOMEM "), "{line}");
        assert!(at("FLAGS").starts_with("MAYMOVE "), "{line}");
        assert_eq!(at("FILE"), "-\n");
    }

    #[test]
    fn json_has_what_the_call_has() {
        let args = [0, 4096, 3, 0x22, u64::MAX, 0];
        let mapped = row(Kind::CALL_MMAP, args, 0x7f00, None, BARE);
        let json = serde_json::to_value(&mapped).expect("JSON");
        assert_eq!(json["prot"], serde_json::json!(["READ", "WRITE"]));
        assert_eq!(json["flags"], serde_json::json!(["PRIVATE", "ANONYMOUS"]));
        assert_eq!(json["result"], "0x7f00");
        assert!(json["error"].is_null() && json["file"].is_null());
        assert!(json.get("fd").is_none() && json.get("old_size_bytes").is_none());

        let unmapped = row(Kind::CALL_MUNMAP, [4096, 8192, 0, 0, 0, 0], -22, None, BARE);
        let json = serde_json::to_value(&unmapped).expect("JSON");
        assert_eq!(
            (&json["address"], &json["size_bytes"]),
            (&"0x1000".into(), &8192.into())
        );
        assert_eq!(
            (&json["result"], &json["error"]),
            (&().into(), &"EINVAL".into())
        );
        assert!(json.get("flags").is_none());
    }
}
