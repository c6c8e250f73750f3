//! Incidents: what is known of a kill, as a folder of files, which a thread writes.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result};
use jiff::tz::TimeZone;
use jiff::{SignedDuration, Zoned};
use memtools::export::spool::Spool;
use memtools::host::kernel_log::LoggedKill;
use memtools::print::identity::Identity;
use memtools::print::{clock, text};
use memtools::process::labels::Workload;
use memtools::watch::ring::Sample;
use serde::Serialize;

use crate::kills::Limit;
use crate::trace_record;
use crate::tracing::Traced;

/// Number of incidents that wait to be written; more are dropped, and counted.
const WAITING: usize = 16;
/// Maximum length of the part of a folder's name that says what was killed.
const NAME_BYTES: usize = 48;

/// Process, as of the last look before the kill.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ProcessThen {
    pub(crate) pid: u32,
    pub(crate) comm: String,
    pub(crate) cgroup: Option<String>,
    pub(crate) anon_bytes: u64,
    /// Growth since the look before; None if the process was new.
    pub(crate) grown_bytes: Option<i64>,
}

/// What is known of a kill.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "incident")]
pub(crate) struct Incident {
    /// Kernel's time of the kill.
    #[serde(serialize_with = "clock::serialize")]
    pub(crate) time: Zoned,
    pub(crate) kind: &'static str,
    /// Kind of the limit that was hit.
    pub(crate) limit: Limit,
    pub(crate) limit_cgroup: Option<String>,
    pub(crate) limit_bytes: Option<u64>,
    /// Cgroup of the first victim.
    pub(crate) cgroup: Option<String>,
    /// What ran in this cgroup.
    #[serde(flatten)]
    pub(crate) workload: Workload,
    pub(crate) constraint: Option<String>,
    pub(crate) trigger: Option<String>,
    /// Victims, as the kernel's log has them; empty if it does not have them.
    pub(crate) victims: Vec<LoggedKill>,
    /// Number of processes that were killed.
    pub(crate) killed: u64,
    /// Largest processes at the last look before.
    pub(crate) largest: Vec<ProcessThen>,
    /// Trace of a victim that ended with it; null if no victim was traced.
    pub(crate) traced: Option<Traced>,
    #[serde(flatten)]
    pub(crate) identity: Identity,
    /// Records of the kernel's log about the kill.
    #[serde(skip)]
    pub(crate) log: String,
    /// Samples of the minutes before, by place.
    #[serde(skip)]
    pub(crate) before: BTreeMap<String, Vec<Sample>>,
    /// Time since boot of the kill.
    #[serde(skip)]
    pub(crate) at: Duration,
}

/// Sample in the form in which it is written.
#[derive(Serialize)]
struct Before<'a> {
    /// Seconds to the kill, below 0.
    seconds: f64,
    place: &'a str,
    held_bytes: u64,
    current_bytes: u64,
}

/// Returns the wall time of a time stamp of the kernel's log, in microseconds. Both clocks are read now, as wall time
/// may have been set since the start.
pub(crate) fn wall_time(at_micros: u64) -> Zoned {
    let age = (clock::monotonic_ns() / 1000).saturating_sub(at_micros);
    let age = SignedDuration::from_micros(i64::try_from(age).unwrap_or_default());
    clock::now().saturating_sub(age)
}

/// Returns the name of what runs in a cgroup, as a part of a folder's name.
pub(crate) fn name_of(workload: &Workload, cgroup: &str) -> String {
    let Workload {
        unit,
        pod,
        container,
        ..
    } = workload;
    let what = [unit, container, pod]
        .into_iter()
        .find(|name| !name.is_empty());
    let what = what.map_or(
        cgroup.rsplit('/').next().unwrap_or_default(),
        String::as_str,
    );
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || ".-@".contains(c) {
            c
        } else {
            '_'
        }
    };
    what.chars().map(plain).take(NAME_BYTES).collect()
}

impl Incident {
    /// Returns the name of the incident's folder: the time, the kind, what was killed, and the first pid.
    pub(crate) fn name(&self) -> String {
        let stamp = self.time.with_time_zone(TimeZone::UTC);
        let cgroup = self.cgroup.as_deref().unwrap_or_default();
        let what = name_of(&self.workload, cgroup);
        let pid = self.victims.first().map_or(0, |victim| victim.pid);
        format!(
            "{}-{}-{what}-{pid}",
            stamp.strftime("%Y%m%dT%H%M%SZ"),
            self.kind
        )
    }

    /// Returns the files of the incident.
    ///
    /// # Errors
    /// If a value has no form in JSON.
    pub(crate) fn files(&self) -> Result<Vec<(&'static str, Vec<u8>)>> {
        let mut json = serde_json::to_vec_pretty(self).context("failed to write JSON")?;
        json.push(b'\n');
        let mut before = Vec::new();
        for (place, samples) in &self.before {
            for sample in samples {
                let row = Before {
                    seconds: -self.at.saturating_sub(sample.at).as_secs_f64(),
                    place,
                    held_bytes: sample.held,
                    current_bytes: sample.current,
                };
                serde_json::to_writer(&mut before, &row).context("failed to write JSON")?;
                before.push(b'\n');
            }
        }
        let mut files = vec![
            ("incident.json", json),
            ("report.txt", self.report().into_bytes()),
            ("before.jsonl", before),
            ("kmsg.txt", self.log.clone().into_bytes()),
        ];
        let profile = self.traced.as_ref().map(|traced| traced.profile.clone());
        files.extend(profile.map(|profile| (trace_record::PROFILE, profile)));
        Ok(files)
    }

    /// Formats the incident for people.
    pub(crate) fn report(&self) -> String {
        let mut out = String::new();
        // Writing to a String does not fail.
        let _ = self.write_report(&mut out);
        out
    }

    fn write_report(&self, out: &mut String) -> std::fmt::Result {
        let cgroup = self.cgroup.as_deref().unwrap_or("(unknown)");
        writeln!(out, "{} OOM kill in {cgroup}", clock::rfc3339(&self.time))?;
        for (name, value) in self.workload.labels() {
            writeln!(out, "  {name}: {value}")?;
        }
        let size = self.limit_bytes.map(text::bytes);
        match (self.limit, &self.limit_cgroup) {
            (Limit::Cgroup, Some(path)) => writeln!(
                out,
                "the limit of {path} was hit: {}",
                size.as_deref().unwrap_or("size unknown")
            )?,
            (Limit::Cgroup, None) => writeln!(
                out,
                "the limit of a cgroup was hit, which the kernel's log does not name"
            )?,
            (Limit::Machine, _) => writeln!(out, "the machine had no memory left")?,
            (Limit::Unknown, _) => {
                writeln!(out, "the kernel's log does not say which limit was hit")?
            }
        }
        if let Some(constraint) = &self.constraint {
            writeln!(out, "constraint: {constraint}")?;
        }
        if let Some(trigger) = &self.trigger {
            writeln!(out, "the allocation of {trigger} failed")?;
        }
        if self.victims.is_empty() {
            writeln!(
                out,
                "{} were killed, which the kernel's log does not name",
                text::count_with_noun(self.killed, "task")
            )?;
        }
        for victim in &self.victims {
            let part = |name: &str, bytes: Option<u64>| {
                bytes.map(|bytes| format!("{} {name}", text::bytes(bytes)))
            };
            let parts = [
                part("anonymous", victim.anon_bytes),
                part("of files", victim.file_bytes),
                part("shared", victim.shmem_bytes),
            ];
            let parts: Vec<String> = parts.into_iter().flatten().collect();
            writeln!(
                out,
                "{} (pid {}) was killed; it had {}",
                victim.comm,
                victim.pid,
                parts.join(", ")
            )?;
        }
        if let Some(traced) = &self.traced {
            trace_record::write_stacks(traced, out)?;
        }
        writeln!(out, "\nlargest processes at the last look before:")?;
        for process in &self.largest {
            let grown = process.grown_bytes.map_or_else(
                || "new".to_owned(),
                |grown| format!("{:+} KiB", grown / 1024),
            );
            writeln!(
                out,
                "  {:>7} {:<16} {:>10} {grown} {}",
                process.pid,
                process.comm,
                text::bytes(process.anon_bytes),
                process.cgroup.as_deref().unwrap_or("-")
            )?;
        }
        Ok(())
    }
}

/// Numbers of incidents.
#[derive(Debug, Default)]
pub(crate) struct Written {
    /// Incidents and traces that were written.
    pub(crate) whole: AtomicU64,
    /// Incidents and traces that could not be written.
    pub(crate) failed: AtomicU64,
}

/// What is to be written.
enum Job {
    Incident(Box<Incident>),
    Trace(Box<Traced>),
}

/// Thread that writes incidents and traces, as a disk may keep its writers waiting when memory is short.
pub(crate) struct Writer {
    /// None once the writer ends.
    sender: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
    pub(crate) written: Arc<Written>,
}

impl Writer {
    /// Starts the thread, for the directories of incidents and of traces.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(crate) fn start(spool: Spool, traces: Option<Spool>) -> Result<Self> {
        let (sender, jobs) = sync_channel::<Job>(WAITING);
        let written = Arc::new(Written::default());
        let counts = Arc::clone(&written);
        let write = move || {
            for job in jobs {
                let (spool, name, files) = match &job {
                    Job::Incident(incident) => (Some(&spool), incident.name(), incident.files()),
                    Job::Trace(traced) => (
                        traces.as_ref(),
                        trace_record::name(traced),
                        trace_record::files(traced),
                    ),
                };
                let Some(spool) = spool else {
                    continue;
                };
                let outcome = files.and_then(|files| spool.write(&name, &files));
                let count = match outcome {
                    Ok(_) => {
                        memtools::message!("wrote {}/{name}", spool.shown());
                        &counts.whole
                    }
                    Err(error) => {
                        memtools::message!("{error:#}");
                        &counts.failed
                    }
                };
                count.fetch_add(1, Ordering::Relaxed);
            }
        };
        let thread = thread::Builder::new().name("spool".into()).spawn(write);
        Ok(Self {
            sender: Some(sender),
            thread: Some(thread.context("failed to start the thread that writes incidents")?),
            written,
        })
    }

    /// Has an incident written, unless too many wait.
    pub(crate) fn write(&self, incident: Incident) {
        self.send(Job::Incident(Box::new(incident)));
    }

    /// Has a trace written, unless too many wait.
    pub(crate) fn write_trace(&self, traced: Traced) {
        self.send(Job::Trace(Box::new(traced)));
    }

    fn send(&self, job: Job) {
        let sender = self.sender.as_ref();
        if sender.is_some_and(|sender| sender.try_send(job).is_err()) {
            self.drop_one();
        }
    }

    /// Counts an incident that is not written, because too many wait.
    pub(crate) fn drop_one(&self) {
        self.written.failed.fetch_add(1, Ordering::Relaxed);
    }
}

/// Waits until all incidents are written.
impl Drop for Writer {
    fn drop(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Makes the incident of kills that belong together.
pub(crate) fn of_victims(mut victims: Vec<LoggedKill>, limit: Limit, log: String) -> Incident {
    // The kernel kills the first victim of a cgroup once more, with all others of the cgroup.
    let mut seen = HashSet::new();
    victims.retain(|victim| seen.insert(victim.pid));
    let first = victims.first();
    let micros = first.map_or_else(|| clock::monotonic_ns() / 1000, |first| first.at_micros);
    let of_first =
        |field: fn(&LoggedKill) -> &Option<String>| first.and_then(|first| field(first).clone());
    Incident {
        time: wall_time(micros),
        kind: "oom",
        limit,
        limit_cgroup: of_first(|kill| &kill.limit_cgroup),
        limit_bytes: None,
        cgroup: of_first(|kill| &kill.cgroup),
        workload: Workload::default(),
        constraint: of_first(|kill| &kill.constraint),
        trigger: of_first(|kill| &kill.trigger),
        killed: victims.len() as u64,
        victims,
        largest: Vec::new(),
        traced: None,
        identity: Identity::of_this_tool(),
        log,
        before: BTreeMap::new(),
        at: Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn victim() -> LoggedKill {
        LoggedKill {
            at_micros: 1,
            search: 1,
            pid: 37,
            comm: "app".into(),
            anon_bytes: Some(7 << 20),
            file_bytes: Some(0),
            shmem_bytes: None,
            is_of_cgroup: true,
            limit_cgroup: Some("/a".into()),
            cgroup: Some("/a/b c.service".into()),
            constraint: Some("CONSTRAINT_MEMCG".into()),
            trigger: Some("other".into()),
        }
    }

    #[test]
    fn an_incident_has_its_files() {
        let mut incident = of_victims(
            vec![victim(), victim()],
            Limit::Cgroup,
            "6,1,1,-;x\n".into(),
        );
        incident.workload = Workload::at("/a/b c.service");
        incident.limit_bytes = Some(8 << 20);
        incident.at = Duration::from_secs(100);
        let sample = Sample {
            at: Duration::from_secs(88),
            held: 7,
            current: 11,
        };
        incident.before = BTreeMap::from([("/a".to_owned(), vec![sample])]);
        assert!(
            incident.name().ends_with("Z-oom-b_c.service-37"),
            "{}",
            incident.name()
        );
        let files = incident.files().expect("JSON");
        let file = |wanted: &str| {
            let found = files.iter().find(|(name, _)| *name == wanted);
            String::from_utf8_lossy(&found.expect("a file").1).into_owned()
        };
        assert_eq!(
            file("before.jsonl"),
            "{\"seconds\":-12.0,\"place\":\"/a\",\"held_bytes\":7,\"current_bytes\":11}\n"
        );
        assert_eq!(file("kmsg.txt"), "6,1,1,-;x\n");
        let json: serde_json::Value = serde_json::from_str(&file("incident.json")).expect("JSON");
        assert_eq!(
            (&json["type"], &json["limit_bytes"], &json["unit"]),
            (&"incident".into(), &(8 << 20).into(), &"b c.service".into())
        );
        assert_eq!(json["victims"][0]["pid"], 37);
        assert_eq!(json["killed"], 1, "it was killed twice");
        let report = file("report.txt");
        for line in [
            "the limit of /a was hit: 8.4 MB",
            "app (pid 37) was killed; it had 7.3 MB anonymous, 0 bytes of files",
            "the allocation of other failed",
        ] {
            assert!(report.contains(line), "{line}: {report}");
        }
    }

    #[test]
    fn names_of_folders_are_plain() {
        let mut incident = of_victims(Vec::new(), Limit::Unknown, String::new());
        incident.cgroup = Some("/a/../x\u{e9}/..".into());
        assert!(
            incident.name().ends_with("Z-oom-..-0"),
            "{}",
            incident.name()
        );
        incident.cgroup = Some(format!("/{}", "/".repeat(3) + &"y".repeat(300)));
        assert!(incident.name().len() < 100, "{}", incident.name());
        assert!(
            incident.report().contains("0 tasks were killed"),
            "{}",
            incident.report()
        );
    }

    #[test]
    fn the_time_is_the_kernel_s() {
        let now = clock::monotonic_ns() / 1000;
        let then = wall_time(now.saturating_sub(5_000_000)).timestamp();
        let age = clock::now().timestamp().duration_since(then);
        assert!((4900..6000).contains(&age.as_millis()), "{age:?}");
    }
}
