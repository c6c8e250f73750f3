//! OOM kills and other messages in the kernel's log, `/dev/kmsg`. Reading the log takes CAP_SYSLOG on most systems.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use crate::print::clock;
use crate::print::text;

/// Maximum number of records that are read; the log of most kernels holds fewer.
const MAX_RECORDS: usize = 1 << 17;
/// Maximum size of a record in the kernel, in bytes (CONSOLE_EXT_LOG_MAX). Reading a larger record fails with EINVAL.
const RECORD_BYTES: usize = 8192;

/// Maximum time by which the log's clock, sched_clock(), lags behind CLOCK_MONOTONIC, in microseconds.
const SLACK_MICROS: u64 = 1_000_000;

/// OOM kill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OomKill {
    /// The time since the kill.
    pub age: Duration,
    /// The victim's PID in the initial PID namespace.
    pub pid: u32,
    /// The victim's name, escaped.
    pub comm: String,
    /// Whether the kill was caused by the limit of a memory cgroup, not by a shortage of the machine.
    pub by_cgroup: bool,
}

/// Returns the OOM kills that are still in the log, oldest first. None if the log may not be read.
pub fn oom_kills() -> Option<Vec<OomKill>> {
    let now = Duration::from_nanos(clock::monotonic_ns());
    let mut kills = Vec::new();
    read(|record| kills.extend(parse(record, now)))?;
    Some(kills)
}

/// Returns the last message that contains `wanted` and was logged at or after `since_ns`, escaped. None if no message
/// does, or the log may not be read.
pub fn last_with(wanted: &str, since_ns: u64) -> Option<String> {
    let since_micros = (since_ns / 1000).saturating_sub(SLACK_MICROS);
    let mut last = None;
    read(|record| {
        if let Some((head, message)) = record.split_once(';')
            && message.contains(wanted)
            && micros(head).is_some_and(|at| at >= since_micros)
        {
            let line = message.lines().next().unwrap_or_default();
            last = Some(text::escape(line).into_owned());
        }
    })?;
    last
}

/// Calls `take` with each record that is still in the log, oldest first. None if the log may not be read.
fn read(mut take: impl FnMut(&str)) -> Option<()> {
    let mut log = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/kmsg")
        .ok()?;
    let mut record = [0; RECORD_BYTES];
    for _ in 0..MAX_RECORDS {
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(length) => {
                take(&String::from_utf8_lossy(&record[..length]));
            }
            // The kernel has overwritten the next record. The next read returns the oldest one.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    Some(())
}

/// Parses the time in the head of a record, `3,1371,5140900,-`, in microseconds since boot.
fn micros(head: &str) -> Option<u64> {
    head.split(',').nth(2)?.parse().ok()
}

/// Parses a record of an OOM kill: `3,1371,5140900,-;Out of memory: Killed process 100 (sh) total-vm:…`. Its fields
/// are the priority, the sequence number, the microseconds since boot, the flags, and the text.
fn parse(record: &str, now: Duration) -> Option<OomKill> {
    let (head, message) = record.split_once(';')?;
    let (before, victim) = message.split_once("Killed process ")?;
    let by_cgroup = before.starts_with("Memory cgroup out of memory: ");
    if !by_cgroup && !before.starts_with("Out of memory") {
        return None;
    }
    let micros = micros(head)?;
    let (pid, rest) = victim.split_once(" (")?;
    // A name can contain parentheses; the last one before the sizes is the kernel's.
    let (comm, _) = rest.split_once(") total-vm:").or(rest.rsplit_once(')'))?;
    Some(OomKill {
        age: now.saturating_sub(Duration::from_micros(micros)),
        pid: pid.parse().ok()?,
        comm: text::escape(comm).into_owned(),
        by_cgroup,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_told_from_other_messages() {
        let now = Duration::from_secs(100);
        let global =
            "3,1371,40000000,-;Out of memory: Killed process 100 (a) b) total-vm:9kB, anon";
        assert_eq!(
            parse(global, now),
            Some(OomKill {
                age: Duration::from_secs(60),
                pid: 100,
                comm: "a) b".into(),
                by_cgroup: false,
            })
        );
        let group = "3,7,99000000,-;Memory cgroup out of memory: Killed process 7 (x\u{1b}[2J) total-vm:1kB";
        let kill = parse(group, now).expect("a kill");
        assert!(kill.by_cgroup && kill.comm == "x\\x1b[2J", "{kill:?}");
        for other in [
            "6,1,0,-;usb 1-1: new device",
            "3,1,1,-;say Killed process 1 (x)",
            "3,1,x,-;Out of memory: Killed process 1 (x) total-vm:1kB",
            "no record",
        ] {
            assert_eq!(parse(other, now), None, "{other}");
        }
    }

    #[test]
    fn a_kill_in_our_future_has_just_been() {
        let record = "3,1,900000000,-;Out of memory: Killed process 1 (x) total-vm:1kB";
        assert_eq!(
            parse(record, Duration::from_secs(1)).map(|kill| kill.age),
            Some(Duration::ZERO)
        );
    }
}
