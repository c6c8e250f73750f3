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

/// What has run out of memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OomScope {
    /// The machine, or some of its nodes.
    Machine,
    /// A memory cgroup, at its limit. Holds the cgroup's path, escaped, if the log still has it.
    Cgroup(Option<String>),
}

/// OOM kill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OomKill {
    /// The time since the kill.
    pub age: Duration,
    /// The victim's PID in the initial PID namespace.
    pub pid: u32,
    /// The victim's name, escaped.
    pub comm: String,
    /// Anonymous memory that the victim had, in bytes, if the log has it.
    pub anon: Option<u64>,
    /// What had run out of memory.
    pub scope: OomScope,
}

/// Returns the OOM kills that are still in the log, oldest first. None if the log may not be read.
pub fn oom_kills() -> Option<Vec<OomKill>> {
    let now = Duration::from_nanos(clock::monotonic_ns());
    let mut kills = Vec::new();
    // The record of a kill is preceded by one with the cgroup. If all processes of a cgroup are killed together, one
    // such record precedes all kills.
    let mut limited = None;
    read(|record| match limited_cgroup(record) {
        Some(cgroup) => limited = cgroup,
        None => kills.extend(parse(record, now, limited.as_deref())),
    })?;
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

/// Parses a record of what has run out of memory:
/// `6,1370,5140890,-;oom-kill:constraint=CONSTRAINT_MEMCG,…,oom_memcg=/a,task_memcg=/a/b,task=sh,pid=100,uid=0`. Returns
/// the cgroup, escaped, if its limit was hit. Returns None for other records.
fn limited_cgroup(record: &str) -> Option<Option<String>> {
    let (_, fields) = record.split_once(";oom-kill:constraint=")?;
    let cgroup = fields.split_once(",oom_memcg=");
    let cgroup = cgroup.and_then(|(_, path)| path.split_once(",task_memcg="));
    Some(cgroup.map(|(path, _)| text::escape(path).into_owned()))
}

/// Parses a record of an OOM kill: `3,1371,5140900,-;Out of memory: Killed process 100 (sh) total-vm:9kB,
/// anon-rss:4kB, …`. The fields of its head are the priority, the sequence number, the microseconds since boot and the
/// flags. `limited` is the cgroup that the log named last.
fn parse(record: &str, now: Duration, limited: Option<&str>) -> Option<OomKill> {
    let (head, message) = record.split_once(';')?;
    let (before, victim) = message.split_once("Killed process ")?;
    let scope = if before.starts_with("Memory cgroup out of memory: ") {
        OomScope::Cgroup(limited.map(str::to_owned))
    } else if before.starts_with("Out of memory") {
        OomScope::Machine
    } else {
        return None;
    };
    let micros = micros(head)?;
    let (pid, rest) = victim.split_once(" (")?;
    // A name can contain parentheses; the last one before the sizes is the kernel's.
    let (comm, sizes) = rest.split_once(") total-vm:").or(rest.rsplit_once(')'))?;
    let anon = sizes.split_once(" anon-rss:");
    let anon = anon.and_then(|(_, bytes)| bytes.split_once("kB")?.0.parse::<u64>().ok());
    Some(OomKill {
        age: now.saturating_sub(Duration::from_micros(micros)),
        pid: pid.parse().ok()?,
        comm: text::escape(comm).into_owned(),
        anon: anon.map(|kib| kib.saturating_mul(1024)),
        scope,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kills_are_told_from_other_messages() {
        let now = Duration::from_secs(100);
        let global = "3,1371,40000000,-;Out of memory: Killed process 100 (a) b) total-vm:9kB, anon-rss:4kB, file-rss:0kB";
        assert_eq!(
            parse(global, now, Some("/earlier")),
            Some(OomKill {
                age: Duration::from_secs(60),
                pid: 100,
                comm: "a) b".into(),
                anon: Some(4096),
                scope: OomScope::Machine,
            })
        );
        let group = "3,7,99000000,-;Memory cgroup out of memory: Killed process 7 (x\u{1b}[2J) total-vm:1kB";
        let kill = parse(group, now, Some("/web")).expect("a kill");
        assert_eq!(kill.scope, OomScope::Cgroup(Some("/web".into())));
        assert_eq!((&*kill.comm, kill.anon), ("x\\x1b[2J", None));
        for other in [
            "6,1,0,-;usb 1-1: new device",
            "3,1,1,-;say Killed process 1 (x)",
            "3,1,x,-;Out of memory: Killed process 1 (x) total-vm:1kB",
            "no record",
        ] {
            assert_eq!(parse(other, now, None), None, "{other}");
        }
    }

    #[test]
    fn a_kill_names_the_cgroup_whose_limit_was_hit() {
        let limited = |text: &str| limited_cgroup(&format!("6,9,1,-;{text}"));
        let own = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/a\u{1b}.slice,\
                   task_memcg=/a/b.service,task=x,pid=7,uid=0";
        assert_eq!(limited(own), Some(Some("/a\\x1b.slice".into())));
        let global = "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,\
                      task_memcg=/a,task=x,pid=7,uid=0";
        assert_eq!(limited(global), Some(None));
        assert_eq!(
            limited("Memory cgroup out of memory: Killed process 7 (x)"),
            None
        );
    }

    #[test]
    fn a_kill_in_our_future_has_just_been() {
        let record = "3,1,900000000,-;Out of memory: Killed process 1 (x) total-vm:1kB";
        assert_eq!(
            parse(record, Duration::from_secs(1), None).map(|kill| kill.age),
            Some(Duration::ZERO)
        );
    }
}
