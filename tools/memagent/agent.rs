//! What the agent knows of the machine, its cgroups and its processes, brought up to date by each look.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use memtools::host::kernel_log::{FollowedLog, KillFinder, LoggedKill};
use memtools::print::text;
use memtools::process::labels::{ContainerNames, Workload};
use memtools::push::sender::Sender;
use memtools::watch::cgroups::Cgroups;
use memtools::watch::growth::{Change, Growth, Observed, Reason, Thresholds};
use memtools::watch::machine::{Machine, MachineMemory};
use memtools::watch::processes::Processes;
use memtools::watch::reread::FileBudget;
use memtools::watch::ring::{Ring, Sample};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::config::Config;
use crate::incident::{self, Incident, ProcessThen, Writer};
use crate::kills::{KillCounts, Limit};
use crate::trace_record;
use crate::tracing::{Candidate, Place, Tracing};

/// Maximum number of cgroups that are watched.
const MAX_CGROUPS: usize = 2000;
/// Maximum number of files that stay open for cgroups, ...
const CGROUP_FILES: usize = 5 * MAX_CGROUPS;
/// ... and for processes.
const PROCESS_FILES: usize = 4096;
/// Number of descriptors that are left for everything else.
const OTHER_FILES: usize = 128;
/// Maximum time between two walks of the tree of cgroups.
const WALK: Duration = Duration::from_secs(60);
/// Time between two walks if cgroups come and go all the time, as a multiple of the time that a walk takes.
const WALK_REST: u32 = 500;
/// Maximum size of the records of the kernel's log in an incident.
const MAX_RECORD_BYTES: usize = 64 << 10;
/// Number of the largest processes in an incident.
const LARGEST: usize = 10;
/// Time after the beginning of growth in which each look is one at the processes, too.
const URGENT: Duration = Duration::from_secs(10);
/// Time between two looks at the processes while something grows.
const OFTEN: Duration = Duration::from_secs(5);
/// Time for which an incident waits for the profile of a victim that is traced.
const PROFILE_DELAY: Duration = Duration::from_secs(15);
/// Maximum number of incidents that wait.
const MAX_WAITING: usize = 16;
/// Time between two full reads of all cgroups.
const WHOLE: Duration = Duration::from_secs(15);

/// Numbers about the agent itself.
#[derive(Debug, Default)]
pub(crate) struct OwnCounts {
    /// Looks that began after the time of the next one.
    pub(crate) late: u64,
    /// Looks at processes or the machine that failed.
    pub(crate) failed: u64,
    /// Configurations that were wrong when they were to be loaded again.
    pub(crate) refused_configs: u64,
    /// Times that records of the kernel's log were overwritten before they were read.
    pub(crate) log_gaps: u64,
}

/// State of the agent.
pub(crate) struct Agent {
    pub(crate) config: Config,
    machine: Machine,
    pub(crate) memory: MachineMemory,
    pub(crate) machine_growth: Growth,
    pub(crate) cgroups: Cgroups,
    pub(crate) names: ContainerNames,
    pub(crate) processes: Processes,
    pub(crate) kills: KillCounts,
    pub(crate) own: OwnCounts,
    machine_before: Ring,
    /// None if the kernel's log may not be read.
    pub(crate) log: Option<FollowedLog>,
    finder: KillFinder,
    /// Kills that the kernel's log has reported since the last look, and the records around them.
    logged: Vec<LoggedKill>,
    records: String,
    /// None if incidents are not written.
    pub(crate) writer: Option<Writer>,
    /// None if nothing is traced.
    pub(crate) tracing: Option<Tracing>,
    /// None if profiles are not pushed.
    pub(crate) sender: Option<Sender>,
    /// Incidents whose victims are still traced, with the time until which they wait for the profile.
    waiting: Vec<(Duration, Incident)>,
    next_walk: Duration,
    walk_before: Duration,
    next_whole: Duration,
    next_processes: Duration,
    /// Paths of the places that grew at the last look; None is the machine.
    grew: Vec<Option<String>>,
    /// Time until which each look is one at the processes, too.
    urgent_until: Duration,
    buffer: Vec<u8>,
}

impl Agent {
    /// Creates the state, before the first look.
    ///
    /// # Errors
    /// If /proc cannot be read.
    pub(crate) fn new(config: Config) -> Result<Self> {
        let files = usable_files();
        let for_processes = PROCESS_FILES.min(files / 3);
        let for_cgroups = CGROUP_FILES.min(files.saturating_sub(for_processes));
        let budget = FileBudget::new(for_cgroups);
        let root = Some(&*config.watch.cgroup_root);
        let root = root.filter(|root| *root != Path::new(""));
        let machine = Machine::open(&budget)?;
        let mut buffer = Vec::new();
        Ok(Self {
            memory: machine.read(&mut buffer)?,
            machine,
            machine_growth: Growth::default(),
            cgroups: Cgroups::new(root, budget, MAX_CGROUPS),
            names: ContainerNames::new(&config.watch.container_logs),
            processes: Processes::new(FileBudget::new(for_processes))?,
            kills: KillCounts::default(),
            own: OwnCounts::default(),
            machine_before: Ring::default(),
            log: None,
            finder: KillFinder::default(),
            logged: Vec::new(),
            records: String::new(),
            writer: None,
            tracing: None,
            sender: None,
            waiting: Vec::new(),
            next_walk: Duration::ZERO,
            walk_before: Duration::ZERO,
            next_whole: Duration::ZERO,
            next_processes: Duration::ZERO,
            grew: Vec::new(),
            urgent_until: Duration::ZERO,
            config,
            buffer,
        })
    }

    /// Looks at everything that is due. `at` is the time since boot.
    pub(crate) fn look(&mut self, at: Duration, is_pressed: bool) {
        let thresholds = self.config.thresholds();
        if let Err(error) = self.look_at_machine(at, is_pressed, &thresholds) {
            self.failed(&error);
        }
        // Before the walk, which forgets the cgroups that were removed.
        self.report_kills(at);
        self.walk(at);
        let whole = at >= self.next_whole;
        if whole {
            self.next_whole = at + WHOLE;
        }
        for killed in self.cgroups.look(at, whole, &mut self.buffer) {
            self.kills.add_events(&killed.path, killed.count, at);
        }
        self.judge_cgroups(at, &thresholds);
        let places = self.growing_places();
        let has_looked = at >= self.next_processes || self.is_urgent(at, &places);
        if has_looked {
            self.next_processes = at + self.config.watch.processes_every.0;
            if let Err(error) = self.processes.look(at, &mut self.buffer) {
                self.failed(&error);
            }
        }
        self.trace(at, &places, has_looked);
        self.write_waiting(at);
    }

    /// Whether to look at the processes before their time, as one that grows is found by two looks: each time for some
    /// seconds after a place has begun to grow, and then less often.
    fn is_urgent(&mut self, at: Duration, places: &[Place]) -> bool {
        let is_new = |place: &Place| !self.grew.contains(&place.cgroup);
        if places.iter().any(is_new) {
            self.urgent_until = at + URGENT;
        }
        self.grew = places.iter().map(|place| place.cgroup.clone()).collect();
        let can_trace = self.tracing.as_ref().is_some_and(Tracing::is_free);
        let is_due = at < self.urgent_until || at >= self.processes.looked() + OFTEN;
        can_trace && !places.is_empty() && is_due
    }

    /// Writes the incidents that wait, at the end of the run.
    pub(crate) fn finish(&mut self) {
        self.write_waiting(Duration::MAX);
    }

    /// Returns the cgroups that grow, and the machine.
    fn growing_places(&self) -> Vec<Place> {
        let place = |cgroup: Option<&str>, reason: Option<Reason>| {
            reason
                .filter(|&reason| reason != Reason::Pressure)
                .map(|reason| Place {
                    cgroup: cgroup.map(str::to_owned),
                    reason,
                })
        };
        let machine = place(None, self.machine_growth.suspicion());
        let groups = self.cgroups.iter();
        let groups = groups.filter_map(|group| place(Some(&*group.path), group.growth.suspicion()));
        machine.into_iter().chain(groups).collect()
    }

    /// Takes the traces that have ended, and after a look at the processes starts others.
    fn trace(&mut self, at: Duration, places: &[Place], has_looked: bool) {
        let Some(tracing) = &mut self.tracing else {
            return;
        };
        let ended = tracing.follow(at, places, &self.config.trace);
        if has_looked {
            let candidates = self.processes.iter().map(|process| Candidate {
                pid: process.pid,
                comm: process.comm.clone(),
                cgroup: process.cgroup.cgroup.clone(),
                grown: process.grown.unwrap_or_default(),
                grown_slowly: process.grown_slowly(),
            });
            let names = &self.names;
            let name = |path: &str| names.complete(Workload::at(path));
            tracing.start(at, places, candidates, &self.config.trace, name);
        }
        for traced in ended {
            if let Some(sender) = &self.sender {
                sender.add(
                    &trace_record::meta(&traced, &self.config.labels),
                    &traced.profile,
                );
            }
            if let Some(writer) = &self.writer {
                writer.write_trace(traced);
            }
        }
    }

    /// Writes the incidents that do not wait for the profile of a victim any more.
    fn write_waiting(&mut self, at: Duration) {
        for (until, mut incident) in std::mem::take(&mut self.waiting) {
            let victims = incident.victims.iter().map(|victim| victim.pid);
            if let Some(tracing) = &self.tracing {
                let is_traced = victims.clone().any(|pid| tracing.traces(pid));
                if is_traced && at < until {
                    self.waiting.push((until, incident));
                    continue;
                }
                incident.traced = victims
                    .clone()
                    .find_map(|pid| tracing.last_of(pid))
                    .cloned();
            }
            if let Some(writer) = &self.writer {
                writer.write(incident);
            }
        }
    }

    fn failed(&mut self, error: &anyhow::Error) {
        // Such a failure is for good, and one message is enough.
        if self.own.failed == 0 {
            memtools::message!("{error:#}");
        }
        self.own.failed += 1;
    }

    fn look_at_machine(
        &mut self,
        at: Duration,
        is_pressed: bool,
        thresholds: &Thresholds,
    ) -> Result<()> {
        self.memory = self.machine.read(&mut self.buffer)?;
        self.machine_before.add(Sample {
            at,
            held: self.memory.held(),
            current: self.memory.total.saturating_sub(self.memory.available),
        });
        let seen = Observed {
            at,
            held: self.memory.held(),
            limit: self.memory.total,
            is_pressed,
        };
        if let Some(change) = self.machine_growth.add(&seen, thresholds) {
            log("the machine", change, &seen);
        }
        Ok(())
    }

    /// Walks the tree of cgroups if cgroups have come or gone, but not all the time.
    fn walk(&mut self, at: Duration) {
        let is_due = at >= self.next_walk;
        let is_outdated = self.cgroups.is_outdated(&mut self.buffer);
        if !(is_due || is_outdated && at >= self.walk_before) {
            return;
        }
        let begun = Instant::now();
        self.names.look();
        let names = &self.names;
        self.cgroups
            .walk(&mut |path| names.complete(Workload::at(path)));
        self.walk_before = at + (begun.elapsed() * WALK_REST).min(WALK);
        self.next_walk = at + WALK;
        self.kills.forget_old(at);
    }

    fn judge_cgroups(&mut self, at: Duration, thresholds: &Thresholds) {
        for group in self.cgroups.iter_mut().filter(|group| group.is_fresh(at)) {
            let Some(limit) = group.now.limit else {
                continue;
            };
            let seen = Observed {
                at,
                held: group.now.held,
                limit,
                is_pressed: group.is_pressed,
            };
            if let Some(change) = group.growth.add(&seen, thresholds) {
                log(&group.path, change, &seen);
            }
        }
    }

    /// Reads the new records of the kernel's log.
    fn read_log(&mut self) {
        let Some(log) = &mut self.log else {
            return;
        };
        log.read(|record| {
            if record.contains(" invoked oom-killer: ") && self.logged.is_empty() {
                self.records.clear();
            }
            if self.records.len() + record.len() <= MAX_RECORD_BYTES {
                for line in record.lines() {
                    self.records.push_str(&text::escape(line));
                    self.records.push('\n');
                }
            }
            self.logged.extend(self.finder.add(record));
        });
        if self.logged.is_empty() && !self.finder.is_searching() {
            self.records.clear();
        }
        self.own.log_gaps = log.lost();
    }

    /// Counts the kills since the last look, and has an incident written of each search for a victim.
    fn report_kills(&mut self, at: Duration) {
        self.read_log();
        let log = if self.logged.is_empty() {
            String::new()
        } else {
            std::mem::take(&mut self.records)
        };
        let mut logged = std::mem::take(&mut self.logged);
        for kill in &mut logged {
            if kill.cgroup.is_none() {
                let process = self.processes.get(kill.pid);
                let cgroup = process.and_then(|process| process.cgroup.cgroup.clone());
                kill.cgroup = cgroup.or_else(|| kill.limit_cgroup.clone());
            }
            let path = kill.cgroup.as_deref().unwrap_or("unknown");
            let workload = self.names.complete(Workload::at(path));
            self.kills.add_logged(path, limit_of(kill), &workload, at);
        }
        for victims in logged.chunk_by(|a, b| a.search == b.search) {
            let incident =
                incident::of_victims(victims.to_vec(), limit_of(&victims[0]), log.clone());
            self.write(incident, at);
        }
        let names = &self.names;
        let late = self
            .kills
            .settle(at, |path| names.complete(Workload::at(path)));
        for (path, count) in late {
            let mut incident = incident::of_victims(Vec::new(), Limit::Unknown, String::new());
            (incident.cgroup, incident.killed) = (Some(path), count);
            self.write(incident, at);
        }
    }

    /// Adds what is known of the time before to an incident, and has it written.
    fn write(&mut self, mut incident: Incident, at: Duration) {
        let Some(writer) = &self.writer else {
            return;
        };
        if self.waiting.len() >= MAX_WAITING {
            writer.drop_one();
            return;
        }
        let path = incident.cgroup.clone().unwrap_or_default();
        incident.workload = self.names.complete(Workload::at(&path));
        incident.at = at;
        let samples = self.machine_before.samples();
        incident.before.insert("machine".to_owned(), samples);
        let limit = incident.limit_cgroup.clone().unwrap_or_default();
        for group in [&path, &limit]
            .into_iter()
            .filter_map(|path| self.cgroups.at_path(path))
        {
            incident
                .before
                .insert(group.path.clone(), group.before.samples());
        }
        incident.limit_bytes = match incident.limit {
            Limit::Machine => Some(self.memory.total),
            _ => self
                .cgroups
                .at_path(&limit)
                .and_then(|group| group.now.limit),
        };
        let largest = self.processes.largest(LARGEST).into_iter();
        incident.largest = largest
            .map(|process| ProcessThen {
                pid: process.pid,
                comm: process.comm.clone(),
                cgroup: process.cgroup.cgroup.clone(),
                anon_bytes: process.anon,
                grown_bytes: process.grown,
            })
            .collect();
        self.waiting.push((at + PROFILE_DELAY, incident));
    }

    /// Returns the numbers of incidents that were written, and that could not be.
    pub(crate) fn incidents(&self) -> (u64, u64) {
        let written = self.writer.as_ref().map(|writer| &writer.written);
        written.map_or((0, 0), |written| {
            let number = |count: &AtomicU64| count.load(Ordering::Relaxed);
            (number(&written.whole), number(&written.failed))
        })
    }

    /// Takes another configuration. What needs a restart is named.
    pub(crate) fn reconfigure(&mut self, config: Config) {
        let is_same = config.metrics.listen == self.config.metrics.listen
            && config.watch.cgroup_root == self.config.watch.cgroup_root
            && config.watch.container_logs == self.config.watch.container_logs
            && config.spool == self.config.spool
            && config.trace == self.config.trace
            && config.push == self.config.push;
        if !is_same {
            memtools::message!(
                "metrics.listen, spool, trace, push, watch.cgroup_root and watch.container_logs change only at a restart"
            );
        }
        let (trace, push) = (self.config.trace.clone(), self.config.push.clone());
        self.config = Config {
            trace,
            push,
            ..config
        };
    }
}

/// Returns which kind of limit was hit before a kill.
fn limit_of(kill: &LoggedKill) -> Limit {
    if kill.is_of_cgroup {
        Limit::Cgroup
    } else {
        Limit::Machine
    }
}

/// Reports the beginning or the end of a suspicion.
fn log(place: &str, change: Change, seen: &Observed) {
    let percent = seen.held as f64 * 100.0 / seen.limit.max(1) as f64;
    let limit = text::bytes(seen.limit);
    match change {
        Change::Entered(reason) => memtools::message!(
            "{place} holds {percent:.0} % of {limit}: {}",
            explanation(reason)
        ),
        Change::Left => {
            memtools::message!(
                "{place} holds {percent:.0} % of {limit}, and is not suspicious any more"
            );
        }
    }
}

fn explanation(reason: Reason) -> &'static str {
    match reason {
        Reason::Mark => "most of it (mark)",
        Reason::Now => "it grows, and reaches the limit soon (now)",
        Reason::Pressure => "tasks wait for memory (pressure)",
        Reason::Floor => "it has grown slowly for an hour (floor)",
    }
}

/// Raises the limit of open files to what this process may have, and returns how many may stay open.
fn usable_files() -> usize {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else {
        return 0;
    };
    let wanted = ((CGROUP_FILES + PROCESS_FILES + OTHER_FILES) as u64).min(hard);
    let limit = match setrlimit(Resource::RLIMIT_NOFILE, wanted.max(soft), hard) {
        Ok(()) => wanted.max(soft),
        Err(_) => soft,
    };
    usize::try_from(limit)
        .unwrap_or(usize::MAX)
        .saturating_sub(OTHER_FILES)
}
