//! Traces of processes that grow: who is traced, how long, and what becomes of the profile.
//!
//! A trace is a child for one process: memleak, or faults if memleak knows no allocator of the process. A process is traced
//! if it grows in a place, a cgroup or the machine, that a rule has found to grow.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::fs::{self, DirBuilder, File};
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use jiff::Zoned;
use memtools::host::capabilities::{self, Capability};
use memtools::print::{clock, text};
use memtools::process::labels::Workload;
use memtools::process::proc::Stat;
use memtools::run::launcher::{Event, Launcher, Request};
use memtools::run::siblings;
use memtools::watch::growth::Reason;
use nix::fcntl::OFlag;
use serde::Serialize;
use serde_json::Value;

use crate::budget::{Budget, Cost};
use crate::config::Trace;

/// Directory of traces in that of incidents.
pub(crate) const FOLDER: &str = "traces";
/// Maximum number of processes that can be traced at the same time.
pub(crate) const MAX_SLOTS: u8 = 8;
/// Growth from which on a process is traced, in bytes.
const GROWTH: i64 = 1 << 20;
/// Time between the end of a trace and the next one of the same process.
const REST: Duration = Duration::from_secs(3600);
/// A trace goes on for this multiple of its time while the limit is near.
const EXTENDED: u32 = 5;
/// Number of traces that fail one after the other, after which ...
const FAILURES: u32 = 3;
/// ... none is started for this time.
const PAUSE: Duration = Duration::from_secs(3600);
/// Time for which a profile is kept for the report of the process's kill.
const KEPT: Duration = Duration::from_secs(60);
/// Maximum number of these profiles, ...
const MAX_KEPT: usize = 4;
/// ... and size of each.
pub(crate) const MAX_PROFILE: u64 = 4 << 20;
/// Maximum number of processes that are remembered.
const MAX_KNOWN: usize = 4096;
/// Time between two refusals of a process that are counted.
const COUNTED: Duration = Duration::from_secs(60);

/// What a child does.
const MEMLEAK: u8 = 0;
const FAULTS: u8 = 1;
/// Capabilities with which both trace processes of all users.
const CAPABILITIES: [Capability; 5] = [
    Capability::CAP_BPF,
    Capability::CAP_PERFMON,
    Capability::CAP_SYS_PTRACE,
    Capability::CAP_DAC_READ_SEARCH,
    Capability::CAP_CHECKPOINT_RESTORE,
];
/// Seconds between two reports of memleak, and maximum number of reports: ten minutes.
const REPORTS: [&str; 2] = ["2", "300"];

/// Returns the arguments of the child for a process: never more than this one process.
fn arguments(what: u8, pid: u32, overhead: &str, profile: &Path) -> Option<Vec<String>> {
    let (pid, profile) = (pid.to_string(), profile.to_str()?.to_owned());
    let words = match what {
        MEMLEAK => {
            let sampled = ["--max-overhead", overhead, "--mem-limit", "64M"];
            let reports = ["-j", "-T", "1", "--export", &profile];
            [&["-p", &pid][..], &sampled, &reports, &REPORTS].concat()
        }
        FAULTS => ["--bytes", "-p", &pid, "-j", "--export", &profile].to_vec(),
        _ => return None,
    };
    Some(words.into_iter().map(str::to_owned).collect())
}

/// Folder in the directory of traces that the child of a slot writes into. The spool removes the folder at its next start,
/// as it does with folders that are not whole.
fn slot_folder(folder: &Path, slot: u8) -> PathBuf {
    folder.join(format!(".tmp-trace-{slot}"))
}

/// File that the child of a slot writes its profile to.
fn profile_file(folder: &Path, slot: u8) -> PathBuf {
    slot_folder(folder, slot).join("profile.pb.gz")
}

/// Names the capabilities that this process lacks for traces, with the remedy. None if it has all.
pub(crate) fn lacking() -> Option<String> {
    let of_debian = capabilities::perf_events_want_sys_admin().then_some(Capability::CAP_SYS_ADMIN);
    let wanted = CAPABILITIES.into_iter().chain(of_debian);
    let lacking = wanted.filter(|&one| !capabilities::has(one));
    let lacking: Vec<String> = lacking.map(|one| one.to_string()).collect();
    (!lacking.is_empty()).then(|| {
        format!(
            "memleak lacks {}: run memagent as root, or by memagent-trace.service",
            lacking.join(", ")
        )
    })
}

/// Starts the process that starts the children. Call this before privileges are dropped.
///
/// # Errors
/// If memleak or faults is not installed beside this tool, or no process can be started.
pub(crate) fn launcher(trace: &Trace, folder: &Path) -> Result<Launcher> {
    let tools = [siblings::path("memleak")?, siblings::path("faults")?];
    let overhead = String::from(trace.overhead);
    let folder = folder.to_owned();
    Launcher::start(trace.processes, move |request: Request| {
        let tool = tools.get(usize::from(request.what))?;
        let profile = profile_file(&folder, request.slot);
        // What an earlier child has left, perhaps killed while it wrote. Without a folder, the child says so.
        let of_slot = slot_folder(&folder, request.slot);
        let _ = fs::remove_dir_all(&of_slot);
        let _ = DirBuilder::new().mode(0o700).create(&of_slot);
        let mut command = Command::new(tool);
        command.args(arguments(request.what, request.pid, &overhead, &profile)?);
        Some(command)
    })
}

/// Place that grows.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// Path of the cgroup; None for the machine.
    pub(crate) cgroup: Option<String>,
    pub(crate) reason: Reason,
}

impl Place {
    /// Whether a cgroup is this place, or below it.
    fn has(&self, cgroup: Option<&str>) -> bool {
        let Some(place) = &self.cgroup else {
            return true;
        };
        let rest = cgroup.and_then(|cgroup| cgroup.strip_prefix(&**place));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }
}

/// Process that may be traced.
#[derive(Debug, Clone)]
pub(crate) struct Candidate {
    pub(crate) pid: u32,
    pub(crate) comm: String,
    pub(crate) cgroup: Option<String>,
    /// Bytes by which the process has grown between the last two looks, ...
    pub(crate) grown: i64,
    /// ... and in the last one or two hours.
    pub(crate) grown_slowly: i64,
}

/// Returns the processes that grow in the places, each with the most urgent reason, the fastest first.
fn growing(places: &[Place], all: impl Iterator<Item = Candidate>) -> Vec<(Candidate, Reason)> {
    let growth = |candidate: &Candidate, reason| match reason {
        Reason::Floor => candidate.grown_slowly,
        Reason::Now | Reason::Mark => candidate.grown,
        // Too little cache is no growth.
        Reason::Pressure => 0,
    };
    let mut growing: Vec<(Candidate, Reason)> = all
        .filter_map(|candidate| {
            let places = places.iter();
            let reasons = places
                .filter(|place| place.has(candidate.cgroup.as_deref()))
                .map(|place| place.reason);
            let reason = reasons
                .filter(|&reason| growth(&candidate, reason) >= GROWTH)
                .max()?;
            Some((candidate, reason))
        })
        .collect();
    growing.sort_by_key(|(candidate, reason)| {
        let grown = growth(candidate, *reason);
        (Reverse(*reason), Reverse(grown), candidate.pid)
    });
    growing
}

/// Why a trace has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    /// The time of a trace was over.
    Time,
    /// The probes have cost the process too much.
    Cost,
    /// The time of the hour was used up.
    Budget,
    /// The process has exited.
    Exited,
    /// The tool could not trace the process.
    Failed,
}

impl End {
    pub(crate) const ALL: [Self; 5] = [
        Self::Time,
        Self::Cost,
        Self::Budget,
        Self::Exited,
        Self::Failed,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Time => "time",
            Self::Cost => "cost",
            Self::Budget => "budget",
            Self::Exited => "exited",
            Self::Failed => "failed",
        }
    }
}

/// Why a process that grows is not traced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Refusal {
    /// As many processes as permitted are traced.
    Processes,
    /// The time of the hour is used up.
    Budget,
    /// The configuration denies it.
    Denied,
    /// The last traces have failed.
    Failures,
}

impl Refusal {
    pub(crate) const ALL: [Self; 4] = [Self::Processes, Self::Budget, Self::Denied, Self::Failures];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Processes => "processes",
            Self::Budget => "budget",
            Self::Denied => "denied",
            Self::Failures => "failures",
        }
    }
}

/// Trace that has ended.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "type", rename = "trace")]
pub(crate) struct Traced {
    /// Time at which the trace began.
    #[serde(serialize_with = "clock::serialize")]
    pub(crate) time: Zoned,
    pub(crate) pid: u32,
    pub(crate) comm: String,
    pub(crate) cgroup: Option<String>,
    #[serde(flatten)]
    pub(crate) workload: Workload,
    pub(crate) reason: Reason,
    pub(crate) tool: &'static str,
    pub(crate) seconds: f64,
    /// Hits of probes; null for faults.
    pub(crate) hits: Option<u64>,
    pub(crate) ended: End,
    /// Profile for pprof.
    #[serde(skip)]
    pub(crate) profile: Vec<u8>,
}

/// Running trace.
struct Running {
    traced: Traced,
    since: Duration,
    what: u8,
    child: u32,
    cost: Cost,
    /// Why the child was told to end.
    stopped: Option<End>,
    has_reported: bool,
}

/// Numbers of traces.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) ended: [u64; End::ALL.len()],
    pub(crate) refused: [u64; Refusal::ALL.len()],
    pub(crate) nanoseconds: u64,
    pub(crate) hits: u64,
}

/// All traces.
pub(crate) struct Tracing {
    launcher: Launcher,
    folder: PathBuf,
    slots: Vec<Option<Running>>,
    budget: Budget,
    pub(crate) counts: Counts,
    /// Processes that were traced, by PID, with the time until which they are not traced again.
    rested: HashMap<u32, Duration>,
    /// Processes whose refusal was counted, with the time until which it is not counted again.
    refused: HashMap<u32, Duration>,
    failures: u32,
    paused_until: Duration,
    /// Whether the end of the launcher was reported.
    is_over: bool,
    /// Traces that have ended lately, with the time of their end.
    kept: VecDeque<(Duration, Traced)>,
}

impl Tracing {
    /// Takes a launcher, whose children write to this directory.
    pub(crate) fn new(launcher: Launcher, folder: PathBuf, trace: &Trace) -> Self {
        Self {
            launcher,
            folder,
            slots: (0..trace.processes).map(|_| None).collect(),
            budget: Budget::default(),
            counts: Counts::default(),
            rested: HashMap::new(),
            refused: HashMap::new(),
            failures: 0,
            paused_until: Duration::ZERO,
            is_over: false,
            kept: VecDeque::new(),
        }
    }

    /// Whether a process that grows now could be traced.
    pub(crate) fn is_free(&self) -> bool {
        !self.launcher.has_ended() && self.slots.iter().any(Option::is_none)
    }

    /// Number of processes that are traced.
    pub(crate) fn running(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Whether a process is traced.
    pub(crate) fn traces(&self, pid: u32) -> bool {
        let mut running = self.slots.iter().flatten();
        running.any(|running| running.traced.pid == pid)
    }

    /// Returns the trace of a process that has ended lately.
    pub(crate) fn last_of(&self, pid: u32) -> Option<&Traced> {
        let mut kept = self.kept.iter().rev();
        kept.find(|(_, traced)| traced.pid == pid)
            .map(|(_, traced)| traced)
    }

    /// Ends what is over, and returns the traces that have ended with a profile. `places` are those that grow. `at` is the
    /// time since boot.
    pub(crate) fn follow(&mut self, at: Duration, places: &[Place], trace: &Trace) -> Vec<Traced> {
        let mut ended = Vec::new();
        for event in self.launcher.events() {
            match event {
                Event::Started { slot, child } => {
                    if let Some(Some(running)) = self.slots.get_mut(usize::from(slot)) {
                        running.child = child;
                    }
                }
                Event::Ended { slot, success } => ended.extend(self.end(at, slot, success)),
            }
        }
        if self.launcher.has_ended() && !self.is_over {
            self.is_over = true;
            memtools::message!(
                "the process that starts tools has ended; nothing is traced any more"
            );
            self.slots.iter_mut().for_each(|slot| *slot = None);
        }
        let running = self.slots.iter().flatten().map(|running| running.since);
        let is_used_up = self.budget.used(at, running) >= trace.budget.0;
        for slot in 0..self.slots.len() {
            self.judge(at, slot, places, trace, is_used_up);
        }
        self.kept
            .retain(|(then, _)| at.saturating_sub(*then) < KEPT);
        ended
    }

    /// Has the trace of a slot ended, if that is due.
    fn judge(
        &mut self,
        at: Duration,
        slot: usize,
        places: &[Place],
        trace: &Trace,
        is_used_up: bool,
    ) {
        let number = u8::try_from(slot).unwrap_or_default();
        let lines = self.launcher.lines(number);
        let Some(Some(running)) = self.slots.get_mut(slot) else {
            return;
        };
        let mut share = None;
        for line in &lines {
            share = running.hear(at, line).or(share);
        }
        let age = at.saturating_sub(running.since);
        let is_urgent = places.iter().any(|place| {
            place.has(running.traced.cgroup.as_deref()) && place.reason >= Reason::Now
        });
        let most = if is_urgent {
            trace.duration.0 * EXTENDED
        } else {
            trace.duration.0
        };
        let end = if share.is_some_and(|share| share > trace.most_cost.0) {
            End::Cost
        } else if is_used_up {
            End::Budget
        } else if age >= most {
            End::Time
        } else {
            return;
        };
        if running.stopped.is_none() {
            running.stopped = Some(end);
            self.launcher.stop(number);
        }
    }

    /// Takes the end of a child. A process that memleak cannot trace is traced by faults.
    fn end(&mut self, at: Duration, slot: u8, success: bool) -> Option<Traced> {
        let lines = self.launcher.lines(slot);
        let place = self.slots.get_mut(usize::from(slot))?;
        let mut running = place.take()?;
        for line in lines {
            running.hear(at, &line);
        }
        let pid = running.traced.pid;
        let is_unknown = !success && !running.has_reported && running.stopped.is_none();
        if is_unknown && running.what == MEMLEAK && Path::new(&format!("/proc/{pid}")).exists() {
            running.what = FAULTS;
            running.traced.tool = "faults";
            *place = Some(running);
            self.launcher.request(Request {
                slot,
                what: FAULTS,
                pid,
            });
            return None;
        }
        let profile = read_profile(&profile_file(&self.folder, slot));
        let _ = fs::remove_dir_all(slot_folder(&self.folder, slot));
        let end = match (&profile, running.stopped, success) {
            (Err(_), ..) | (Ok(_), None, false) => End::Failed,
            (Ok(_), Some(end), _) => end,
            // memleak's reports take ten minutes at most.
            (Ok(_), None, true) if Path::new(&format!("/proc/{pid}")).exists() => End::Time,
            (Ok(_), None, true) => End::Exited,
        };
        let mut traced = running.traced;
        traced.ended = end;
        let took = at.saturating_sub(running.since);
        traced.seconds = took.as_secs_f64();
        self.counts.nanoseconds += u64::try_from(took.as_nanos()).unwrap_or_default();
        self.counts.hits += traced.hits.unwrap_or_default();
        self.counts.ended[end as usize] += 1;
        self.budget.add(running.since, at);
        if self.rested.len() >= MAX_KNOWN {
            self.rested.clear();
        }
        self.rested.insert(pid, at + REST);
        match profile {
            Ok(profile) if end != End::Failed => {
                self.failures = 0;
                traced.profile = profile;
                if self.kept.len() >= MAX_KEPT {
                    self.kept.pop_front();
                }
                self.kept.push_back((at, traced.clone()));
                Some(traced)
            }
            profile => {
                if let Err(error) = profile {
                    memtools::message!("{} (pid {pid}) was not traced: {error:#}", traced.comm);
                }
                self.failures += 1;
                if self.failures >= FAILURES {
                    self.failures = 0;
                    self.paused_until = at + PAUSE;
                    memtools::message!("{FAILURES} traces have failed; the next one is in an hour");
                }
                None
            }
        }
    }

    /// Starts traces of the processes that grow, as far as the configuration permits.
    pub(crate) fn start(
        &mut self,
        at: Duration,
        places: &[Place],
        processes: impl Iterator<Item = Candidate>,
        trace: &Trace,
        name: impl Fn(&str) -> Workload,
    ) {
        self.rested.retain(|_, until| *until > at);
        self.refused.retain(|_, until| *until > at);
        if places.is_empty() || self.launcher.has_ended() {
            return;
        }
        for (candidate, reason) in growing(places, processes) {
            let is_own = candidate.pid == std::process::id()
                || candidate.pid == self.launcher.pid()
                || self
                    .slots
                    .iter()
                    .flatten()
                    .any(|running| running.child == candidate.pid);
            if is_own || self.rested.contains_key(&candidate.pid) || self.traces(candidate.pid) {
                continue;
            }
            let workload = name(candidate.cgroup.as_deref().unwrap_or_default());
            let free = self.slots.iter().position(Option::is_none);
            let running = self.slots.iter().flatten().map(|running| running.since);
            let refusal = if trace.denies(&candidate.comm, &workload) {
                Refusal::Denied
            } else if at < self.paused_until {
                Refusal::Failures
            } else if self.budget.used(at, running) >= trace.budget.0 {
                Refusal::Budget
            } else if let Some(slot) = free {
                self.begin(at, slot, candidate, reason, workload);
                continue;
            } else {
                Refusal::Processes
            };
            let until = at + COUNTED;
            let is_new = self.refused.len() < MAX_KNOWN
                && self.refused.insert(candidate.pid, until).is_none();
            self.counts.refused[refusal as usize] += u64::from(is_new);
        }
    }

    fn begin(
        &mut self,
        at: Duration,
        slot: usize,
        candidate: Candidate,
        reason: Reason,
        workload: Workload,
    ) {
        let Candidate {
            pid, comm, cgroup, ..
        } = candidate;
        memtools::message!(
            "{comm} (pid {pid}) grows in {}: it is traced",
            cgroup.as_deref().unwrap_or("the machine")
        );
        let number = u8::try_from(slot).unwrap_or_default();
        // What an earlier child has printed was read when it ended.
        self.launcher.request(Request {
            slot: number,
            what: MEMLEAK,
            pid,
        });
        self.slots[slot] = Some(Running {
            traced: Traced {
                time: clock::now(),
                pid,
                comm,
                cgroup,
                workload,
                reason,
                tool: "memleak",
                seconds: 0.0,
                hits: None,
                ended: End::Failed,
                profile: Vec::new(),
            },
            since: at,
            what: MEMLEAK,
            child: 0,
            cost: Cost::default(),
            stopped: None,
            has_reported: false,
        });
    }
}

impl Running {
    /// Takes a line of the child's output. Returns the share of the process's CPU time that the trace costs, in percent,
    /// if that is due.
    fn hear(&mut self, at: Duration, line: &[u8]) -> Option<f64> {
        if !line.starts_with(b"{\"type\":\"report\"") {
            return None;
        }
        self.has_reported = true;
        let report: Value = serde_json::from_slice(line).ok()?;
        let hits = report["hits"].as_u64()?;
        self.traced.hits = Some(hits);
        self.cost.add(at, hits, cpu_ns(self.traced.pid)?)
    }
}

/// Returns the CPU time of a process, in nanoseconds. None if the process has exited.
fn cpu_ns(pid: u32) -> Option<u64> {
    /// Fields of the time in user space and in the kernel.
    const TIMES: [usize; 2] = [14, 15];
    /// Length of a clock tick of /proc (USER_HZ is 100).
    const TICK_NS: u64 = 10_000_000;
    let stat = Stat::read(format!("/proc/{pid}/stat")).ok()?;
    let times = TIMES.map(|field| stat.field::<u64>(field));
    Some((times[0]? + times[1]?) * TICK_NS)
}

/// Reads the profile that a child has written.
fn read_profile(path: &Path) -> Result<Vec<u8>> {
    let mut options = File::options();
    options.read(true).custom_flags(OFlag::O_NOFOLLOW.bits());
    let shown = text::escape_bytes(path.as_os_str().as_encoded_bytes());
    let failed = || format!("failed to read the profile {shown}");
    let file = options.open(path).with_context(failed)?;
    let mut profile = Vec::new();
    let read = file.take(MAX_PROFILE + 1).read_to_end(&mut profile);
    read.with_context(failed)?;
    ensure!(
        profile.len() as u64 <= MAX_PROFILE,
        "the profile {shown} is larger than 4 MiB"
    );
    Ok(profile)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_traces_one_process_and_no_file() {
        for (what, tool) in [(MEMLEAK, "memleak"), (FAULTS, "faults")] {
            let profile = profile_file(Path::new("/spool/traces"), 1);
            let words = arguments(what, 4711, "2%", &profile).expect("a command");
            let count = |word: &str| words.iter().filter(|other| *other == word).count();
            assert_eq!(count("-p"), 1, "{tool}: {words:?}");
            let pid = words
                .iter()
                .position(|word| word == "-p")
                .expect("it is there")
                + 1;
            assert_eq!(words[pid], "4711", "{tool}");
            // Whatever else selects processes, or places probes in files for all processes.
            for file_wide in [
                "-n",
                "--name",
                "--cgroup",
                "--container",
                "--children",
                "-a",
                "--all",
                "-c",
                "-O",
            ] {
                assert_eq!(count(file_wide), 0, "{tool}: {words:?}");
            }
            assert_eq!(words.iter().filter(|word| word.contains("4711")).count(), 1);
            assert!(words.contains(&"/spool/traces/.tmp-trace-1/profile.pb.gz".to_owned()));
        }
        assert_eq!(arguments(2, 4711, "2%", Path::new("/x")), None);
    }

    fn candidate(pid: u32, cgroup: &str, grown: i64, grown_slowly: i64) -> Candidate {
        Candidate {
            pid,
            comm: format!("c{pid}"),
            cgroup: (!cgroup.is_empty()).then(|| cgroup.to_owned()),
            grown,
            grown_slowly,
        }
    }

    fn place(cgroup: &str, reason: Reason) -> Place {
        Place {
            cgroup: (!cgroup.is_empty()).then(|| cgroup.to_owned()),
            reason,
        }
    }

    #[test]
    fn those_are_traced_that_grow_where_a_rule_holds() {
        const MIB: i64 = 1 << 20;
        let all = [
            candidate(1, "/a", MIB, MIB),
            candidate(2, "/a/b", 5 * MIB, 0),
            // Too little, another cgroup, and none.
            candidate(3, "/a", MIB - 1, 100 * MIB),
            candidate(4, "/ab", 9 * MIB, 9 * MIB),
            candidate(5, "", 9 * MIB, 9 * MIB),
        ];
        let pids = |places: &[Place]| -> Vec<(u32, Reason)> {
            let growing = growing(places, all.iter().cloned());
            growing
                .iter()
                .map(|(one, reason)| (one.pid, *reason))
                .collect()
        };
        assert_eq!(
            pids(&[place("/a", Reason::Mark)]),
            [(2, Reason::Mark), (1, Reason::Mark)]
        );
        let slowly = [(3, Reason::Floor), (1, Reason::Floor)];
        assert_eq!(pids(&[place("/a", Reason::Floor)]), slowly);
        assert_eq!(pids(&[place("/a", Reason::Pressure)]), []);
        assert_eq!(pids(&[]), []);
        let both = [place("", Reason::Floor), place("/ab", Reason::Now)];
        assert_eq!(pids(&both)[0], (4, Reason::Now));
        assert_eq!(pids(&both).len(), 4, "the machine has all that grow");
    }

    #[test]
    fn only_the_last_ones_and_whole_profiles_are_read() {
        let folder = tempfile::tempdir().expect("a directory");
        let file = profile_file(folder.path(), 0);
        assert!(read_profile(&file).is_err());
        fs::create_dir(slot_folder(folder.path(), 0)).expect("a directory");
        fs::write(&file, b"profile").expect("a file");
        assert_eq!(read_profile(&file).expect("a profile"), b"profile");
        fs::write(
            &file,
            vec![0; usize::try_from(MAX_PROFILE).expect("it fits") + 1],
        )
        .expect("a file");
        let error = format!("{:#}", read_profile(&file).expect_err("too large"));
        assert!(error.contains("larger than 4 MiB"), "{error}");
        fs::create_dir(slot_folder(folder.path(), 1)).expect("a directory");
        let link = profile_file(folder.path(), 1);
        std::os::unix::fs::symlink("/etc/passwd", &link).expect("a link");
        assert!(read_profile(&link).is_err(), "a link was followed");
    }

    /// Traces with a launcher whose memleak and faults are this script.
    fn tracing(script: &'static str, trace: &Trace) -> Tracing {
        let launcher = Launcher::start(trace.processes, move |request| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).arg(request.what.to_string());
            Some(command)
        });
        let folder = PathBuf::from("/nowhere");
        Tracing::new(launcher.expect("a launcher"), folder, trace)
    }

    #[test]
    fn of_100_processes_that_grow_two_are_traced() {
        let trace = Trace::default();
        let mut tracing = tracing("exec sleep 1000", &trace);
        let places = [place("/a", Reason::Mark)];
        let at = Duration::from_secs(1000);
        let all = || (1000..1100).map(|pid| candidate(pid, "/a", 7 << 20, 0));
        for _ in 0..3 {
            tracing.start(at, &places, all(), &trace, |_| Workload::default());
        }
        assert_eq!(tracing.running(), 2);
        assert!(tracing.traces(1000) && tracing.traces(1001) && !tracing.is_free());
        assert_eq!(tracing.counts.refused[Refusal::Processes as usize], 98);
    }

    #[test]
    fn an_hour_s_budget_ends_traces_and_starts_none() {
        let trace = Trace {
            budget: crate::config::Span(Duration::from_secs(60)),
            ..Trace::default()
        };
        let mut tracing = tracing("exec sleep 1000", &trace);
        let places = [place("/a", Reason::Mark)];
        let second = Duration::from_secs;
        let start = |tracing: &mut Tracing, at| {
            let all = [candidate(7, "/a", 7 << 20, 0)].into_iter();
            tracing.start(at, &places, all, &trace, |_| Workload::default());
        };
        start(&mut tracing, second(1000));
        assert!(tracing.follow(second(1059), &places, &trace).is_empty());
        assert!(
            tracing.slots[0]
                .as_ref()
                .is_some_and(|running| running.stopped.is_none())
        );
        tracing.follow(second(1060), &places, &trace);
        let stopped = tracing.slots[0]
            .as_ref()
            .and_then(|running| running.stopped);
        assert_eq!(stopped, Some(End::Budget));
        tracing.slots[0] = None;
        tracing.budget.add(second(1000), second(1060));
        start(&mut tracing, second(1061));
        assert_eq!(tracing.running(), 0);
        assert_eq!(tracing.counts.refused[Refusal::Budget as usize], 1);
    }

    #[test]
    fn a_trace_whose_hits_cost_too_much_ends() {
        let own = std::process::id();
        let mut running = Running {
            traced: Traced {
                time: clock::now(),
                pid: own,
                comm: "x".into(),
                cgroup: None,
                workload: Workload::default(),
                reason: Reason::Now,
                tool: "memleak",
                seconds: 0.0,
                hits: None,
                ended: End::Failed,
                profile: Vec::new(),
            },
            since: Duration::ZERO,
            what: MEMLEAK,
            child: 0,
            cost: Cost::default(),
            stopped: None,
            has_reported: false,
        };
        let mut hear =
            |seconds, line: &str| running.hear(Duration::from_secs(seconds), line.as_bytes());
        assert_eq!(hear(1, "{\"type\":\"stack\",\"hits\":1}"), None);
        assert_eq!(hear(1, "{\"type\":\"report\",\"hits\":1000}"), None);
        assert_eq!(hear(4, "{\"type\":\"report\"}"), None);
        // 13.5 s of an hour, and of next to no CPU time.
        let share = hear(6, "{\"type\":\"report\",\"hits\":10001000}");
        assert!(share > Some(100.0), "{share:?}");
        assert_eq!(running.traced.hits, Some(10_001_000));
        assert!(running.has_reported);
    }
}
