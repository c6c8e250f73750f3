//! OOM kills and other messages in the kernel's log, `/dev/kmsg`. Reading the log takes CAP_SYSLOG on most systems.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use serde::Serialize;

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

/// OOM kill as the log has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LoggedKill {
    /// Time of the kill on the log's clock, which is CLOCK_MONOTONIC to within a second, in microseconds.
    #[serde(skip)]
    pub at_micros: u64,
    /// Number of the search for a victim that the kill belongs to, from 1 on: all processes of a cgroup can be killed
    /// together.
    #[serde(skip)]
    pub search: u64,
    /// The victim's PID in the initial PID namespace.
    pub pid: u32,
    /// The victim's name, escaped.
    pub comm: String,
    /// Resident anonymous memory of the victim, in bytes, if the log has it.
    pub anon_bytes: Option<u64>,
    /// Resident memory of files.
    pub file_bytes: Option<u64>,
    /// Resident shared memory.
    pub shmem_bytes: Option<u64>,
    /// Whether a cgroup's limit was hit.
    pub is_of_cgroup: bool,
    /// Path of the cgroup whose limit was hit, escaped, if the log has it.
    pub limit_cgroup: Option<String>,
    /// Path of the victim's cgroup, escaped, if the log has it.
    pub cgroup: Option<String>,
    /// Constraint of the search, such as `CONSTRAINT_MEMCG`, escaped.
    pub constraint: Option<String>,
    /// Name of the task whose allocation failed, escaped.
    pub trigger: Option<String>,
}

/// Reader of records that finds the OOM kills among them. Several records belong to one kill.
#[derive(Debug, Default)]
pub struct KillFinder {
    searches: u64,
    trigger: Option<String>,
    constraint: Option<String>,
    limit_cgroup: Option<String>,
    cgroup: Option<String>,
    /// Victim that these are of.
    named: Option<u32>,
    /// Whether further processes are killed along with the victim.
    is_group: bool,
    is_open: bool,
}

impl KillFinder {
    /// Takes the next record. Returns the kill that it completes.
    pub fn add(&mut self, record: &str) -> Option<LoggedKill> {
        let (_, message) = record.split_once(';')?;
        let line = message.lines().next().unwrap_or_default();
        if let Some((task, _)) = line.split_once(" invoked oom-killer: ") {
            *self = Self {
                searches: self.searches + 1,
                trigger: Some(text::escape(task).into_owned()),
                is_open: true,
                ..Self::default()
            };
        } else if let Some(fields) = line.strip_prefix("oom-kill:constraint=") {
            self.add_constraint(fields);
        } else if line.starts_with("Tasks in ") && line.ends_with("memory.oom.group set") {
            self.is_group = true;
        }
        let mut kill = Self::kill(record)?;
        if self.named != Some(kill.pid) && !self.is_group {
            // The kernel omits all but the last record of a search if there are many searches.
            *self = Self {
                searches: self.searches + 1,
                ..Self::default()
            };
        }
        self.is_open = false;
        kill.search = self.searches;
        kill.limit_cgroup = self.limit_cgroup.clone().filter(|_| kill.is_of_cgroup);
        // A process that is killed along may be in a cgroup below.
        kill.cgroup = self.cgroup.clone().filter(|_| self.named == Some(kill.pid));
        kill.constraint.clone_from(&self.constraint);
        kill.trigger.clone_from(&self.trigger);
        Some(kill)
    }

    /// Whether a search for a victim has begun whose kill has not been logged yet.
    pub fn is_searching(&self) -> bool {
        self.is_open
    }

    /// Takes the fields of a record of what has run out of memory:
    /// `CONSTRAINT_MEMCG,…,oom_memcg=/a,task_memcg=/a/b,task=sh,pid=100,uid=0`.
    fn add_constraint(&mut self, fields: &str) {
        let escaped = |text: &str| Some(text::escape(text).into_owned());
        let (constraint, _) = fields.split_once(',').unwrap_or((fields, ""));
        self.constraint = escaped(constraint);
        // Names of cgroups can contain commas; names of fields do not.
        let after = |name: &str| fields.split_once(name).map(|(_, rest)| rest);
        let until =
            |text: &str, name: &str| text.split_once(name).and_then(|(path, _)| escaped(path));
        self.limit_cgroup = after(",oom_memcg=").and_then(|rest| until(rest, ",task_memcg="));
        self.cgroup = after(",task_memcg=").and_then(|rest| until(rest, ",task="));
        let pid = fields.rsplit_once(",pid=").map(|(_, rest)| rest);
        self.named = pid.and_then(|pid| pid.split(',').next()?.parse().ok());
    }

    /// Parses a record of an OOM kill: `3,1371,5140900,-;Out of memory: Killed process 100 (sh) total-vm:9kB,
    /// anon-rss:4kB, …`. The fields of its head are the priority, the sequence number, the microseconds since boot and
    /// the flags.
    fn kill(record: &str) -> Option<LoggedKill> {
        let (head, message) = record.split_once(';')?;
        let (before, victim) = message.split_once("Killed process ")?;
        // A record of a crash begins with the name of the process, and has that of its file.
        let is_of_cgroup = match before {
            "Memory cgroup out of memory: " => true,
            "Out of memory: " | "Out of memory (oom_kill_allocating_task): " => false,
            _ => return None,
        };
        let (pid, rest) = victim.split_once(" (")?;
        let pid = pid.parse().ok()?;
        // A name can contain parentheses; the last one before the sizes is the kernel's.
        let (comm, sizes) = rest.split_once(") total-vm:").or(rest.rsplit_once(')'))?;
        let bytes = |name: &str| {
            let (_, kib) = sizes.split_once(name)?;
            Some(
                kib.split_once("kB")?
                    .0
                    .parse::<u64>()
                    .ok()?
                    .saturating_mul(1024),
            )
        };
        Some(LoggedKill {
            at_micros: micros(head)?,
            search: 0,
            pid,
            comm: text::escape(comm).into_owned(),
            anon_bytes: bytes(" anon-rss:"),
            file_bytes: bytes(" file-rss:"),
            shmem_bytes: bytes(" shmem-rss:"),
            is_of_cgroup,
            limit_cgroup: None,
            cgroup: None,
            constraint: None,
            trigger: None,
        })
    }
}

impl LoggedKill {
    fn into_kill(self, now: Duration) -> OomKill {
        OomKill {
            age: now.saturating_sub(Duration::from_micros(self.at_micros)),
            pid: self.pid,
            comm: self.comm,
            anon: self.anon_bytes,
            scope: if self.is_of_cgroup {
                OomScope::Cgroup(self.limit_cgroup)
            } else {
                OomScope::Machine
            },
        }
    }
}

/// Returns the OOM kills that are still in the log, oldest first. None if the log may not be read.
pub fn oom_kills() -> Option<Vec<OomKill>> {
    let now = Duration::from_nanos(clock::monotonic_ns());
    let mut finder = KillFinder::default();
    let mut kills = Vec::new();
    read(|record| kills.extend(finder.add(record)))?;
    Some(kills.into_iter().map(|kill| kill.into_kill(now)).collect())
}

/// Log that is followed from now on. Readable when there are new records.
#[derive(Debug)]
pub struct FollowedLog {
    log: File,
    lost: u64,
}

impl FollowedLog {
    /// Opens the log at its end.
    ///
    /// # Errors
    /// If the log may not be read.
    pub fn open() -> io::Result<Self> {
        let mut log = open()?;
        log.seek(SeekFrom::End(0))?;
        Ok(Self { log, lost: 0 })
    }

    /// Calls `take` with each new record.
    pub fn read(&mut self, take: impl FnMut(&str)) {
        self.lost += read_from(&mut self.log, take);
    }

    /// Returns how often records were overwritten before they could be read.
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

impl AsFd for FollowedLog {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.log.as_fd()
    }
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
fn read(take: impl FnMut(&str)) -> Option<()> {
    let mut log = open().ok()?;
    read_from(&mut log, take);
    Some(())
}

fn open() -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/kmsg")
}

/// Calls `take` with each record from the file's position on. Returns how often records were missing.
fn read_from(log: &mut File, mut take: impl FnMut(&str)) -> u64 {
    let mut record = [0; RECORD_BYTES];
    let mut lost = 0;
    for _ in 0..MAX_RECORDS {
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(length) => {
                take(&String::from_utf8_lossy(&record[..length]));
            }
            // The kernel has overwritten the next record. The next read returns the oldest one.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => lost += 1,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    lost
}

/// Parses the time in the head of a record, `3,1371,5140900,-`, in microseconds since boot.
fn micros(head: &str) -> Option<u64> {
    head.split(',').nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the kills of these records.
    fn kills(records: &[&str]) -> Vec<LoggedKill> {
        let mut finder = KillFinder::default();
        records
            .iter()
            .filter_map(|record| finder.add(record))
            .collect()
    }

    #[test]
    fn kills_are_told_from_other_messages() {
        let now = Duration::from_secs(100);
        let global = "3,1371,40000000,-;Out of memory: Killed process 100 (a) b) total-vm:9kB, anon-rss:4kB, file-rss:0kB";
        let [kill] = &kills(&[global])[..] else {
            panic!("no kill");
        };
        assert_eq!(
            kill.clone().into_kill(now),
            OomKill {
                age: Duration::from_secs(60),
                pid: 100,
                comm: "a) b".into(),
                anon: Some(4096),
                scope: OomScope::Machine,
            }
        );
        let group = "3,7,99000000,-;Memory cgroup out of memory: Killed process 7 (x\u{1b}[2J) total-vm:1kB";
        let kill = kills(&[group]).remove(0).into_kill(now);
        assert_eq!(kill.scope, OomScope::Cgroup(None));
        assert_eq!((&*kill.comm, kill.anon), ("x\\x1b[2J", None));
        for other in [
            "6,1,0,-;usb 1-1: new device",
            "3,1,1,-;say Killed process 1 (x)",
            "3,1,x,-;Out of memory: Killed process 1 (x) total-vm:1kB",
            "no record",
            "6,1,1,-;Out of memory: [7]: segfault at 0 ip 0 sp 0 error 4 in Killed process 1 (x) total-vm:1kB[400000+1000]",
        ] {
            assert_eq!(kills(&[other]), [], "{other}");
        }
    }

    #[test]
    fn the_records_of_a_kill_belong_together() {
        let records = [
            "4,1,1,-;a\u{1b}b invoked oom-killer: gfp_mask=0xcc0, order=0, oom_score_adj=0",
            "6,2,2,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/a\u{1b}.slice,\
             task_memcg=/a/b,c.service,task=x,pid=7,uid=0",
            "3,3,3,-;Memory cgroup out of memory: Killed process 7 (x) total-vm:9kB, anon-rss:4kB, file-rss:8kB, shmem-rss:12kB, UID:0",
            "6,4,4,-;Tasks in /a are going to be killed due to memory.oom.group set",
            "3,4,4,-;Memory cgroup out of memory: Killed process 8 (y) total-vm:9kB, anon-rss:4kB, file-rss:0kB, shmem-rss:0kB",
            "4,5,5,-;other invoked oom-killer: gfp_mask=0xcc0, order=0, oom_score_adj=0",
            "6,6,6,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/a,task=z,pid=9,uid=0",
            "3,7,7,-;Out of memory: Killed process 9 (z) total-vm:9kB, anon-rss:4kB",
            "3,8,8,-;Memory cgroup out of memory: Killed process 10 (w) total-vm:9kB, anon-rss:4kB",
        ];
        let [first, along, global, terse] = &kills(&records)[..] else {
            panic!("{:?}", kills(&records));
        };
        let expected = LoggedKill {
            at_micros: 3,
            search: 1,
            pid: 7,
            comm: "x".into(),
            anon_bytes: Some(4 << 10),
            file_bytes: Some(8 << 10),
            shmem_bytes: Some(12 << 10),
            is_of_cgroup: true,
            limit_cgroup: Some("/a\\x1b.slice".into()),
            cgroup: Some("/a/b,c.service".into()),
            constraint: Some("CONSTRAINT_MEMCG".into()),
            trigger: Some("a\\x1bb".into()),
        };
        assert_eq!(first, &expected);
        assert_eq!((along.search, along.pid, &along.cgroup), (1, 8, &None));
        assert_eq!(along.limit_cgroup, expected.limit_cgroup);
        assert_eq!((global.search, global.pid), (2, 9));
        assert_eq!((terse.search, terse.pid, &terse.trigger), (3, 10, &None));
        assert_eq!(
            (global.cgroup.as_deref(), &global.limit_cgroup),
            (Some("/a"), &None)
        );
    }

    #[test]
    fn a_kill_in_our_future_has_just_been() {
        let record = "3,1,900000000,-;Out of memory: Killed process 1 (x) total-vm:1kB";
        let kill = kills(&[record]).remove(0).into_kill(Duration::from_secs(1));
        assert_eq!(kill.age, Duration::ZERO);
    }
}
