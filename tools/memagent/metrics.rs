//! The agent's numbers as metric families. Each family has a limited number of series.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use memtools::export::exposition::{Exposed, Labels, MetricKind};
use memtools::process::labels::Workload;
use memtools::watch::cgroups::WatchedCgroup;
use memtools::watch::growth::Reason;
use nix::sys::resource::{UsageWho, getrusage};

use crate::agent::Agent;
use crate::tracing::{End, Refusal};

/// Returns all families.
pub(crate) fn families(agent: &Agent) -> Vec<Exposed> {
    let mut families = cgroups(agent);
    families.push(kills(agent));
    families.push(processes(agent));
    families.extend(machine(agent));
    families.push(suspicious(agent));
    families.extend(traces(agent));
    families.extend(push(agent));
    families.extend(own(agent));
    families
}

/// Returns the labels of a cgroup: its path, and what runs there.
fn labels(path: &str, workload: &Workload) -> Labels {
    let mut labels = vec![("cgroup", path.to_owned())];
    labels.extend(workload.labels());
    labels
}

/// Splits the cgroups into those with series of their own, and the rest: the largest have series. A cgroup below another
/// one with the same labels, such as a part of a service, is neither: the upper one includes its memory.
fn exposed(agent: &Agent) -> (Vec<&WatchedCgroup>, Vec<&WatchedCgroup>) {
    let mut above: Vec<&WatchedCgroup> = Vec::new();
    let mut all = Vec::new();
    for group in agent.cgroups.iter() {
        while above
            .last()
            .is_some_and(|upper| !group.folder.starts_with(&upper.folder))
        {
            above.pop();
        }
        let is_part = above.last().is_some_and(|upper| {
            upper.workload == group.workload && group.workload != Workload::default()
        });
        if !is_part {
            all.push(group);
        }
        above.push(group);
    }
    all.sort_by_key(|group| std::cmp::Reverse(group.now.held));
    let rest = all.split_off(agent.config.metrics.cgroups.min(all.len()));
    (all, rest)
}

fn cgroups(agent: &Agent) -> Vec<Exposed> {
    let (shown, rest) = exposed(agent);
    let bytes = |name, help| Exposed::new(MetricKind::Gauge, name, help);
    let mut held = bytes(
        "memagent_cgroup_held_bytes",
        "Memory of a cgroup that the kernel cannot reclaim without swap.",
    );
    let mut current = bytes(
        "memagent_cgroup_current_bytes",
        "Memory of a cgroup, including page cache.",
    );
    let mut limit = bytes("memagent_cgroup_limit_bytes", "Limit of a cgroup's memory.");
    let mut exhausted = Exposed::new(
        MetricKind::Gauge,
        "memagent_cgroup_exhausted_seconds",
        "Time to the limit at the rate of the last minute; absent if memory does not grow steadily.",
    );
    let mut hits = Exposed::new(
        MetricKind::Counter,
        "memagent_limit_hits",
        "Number of times that a cgroup's limit was hit.",
    );
    let stall = |name, help| Exposed::new(MetricKind::Seconds, name, help);
    let mut some = stall(
        "memagent_pressure_some_seconds",
        "Time in which some task of a cgroup waited for memory.",
    );
    let mut full = stall(
        "memagent_pressure_full_seconds",
        "Time in which all tasks of a cgroup waited for memory.",
    );
    for group in &shown {
        let labels = labels(&group.path, &group.workload);
        let now = &group.now;
        let add = |family: &mut Exposed, number: Option<u64>| {
            if let Some(number) = number {
                family.add(labels.clone(), number);
            }
        };
        let left = now
            .limit
            .and_then(|limit| group.growth.time_left(now.held, limit));
        add(&mut held, Some(now.held));
        add(&mut current, Some(now.current));
        add(&mut limit, now.limit);
        add(&mut exhausted, left.map(|left| left.as_secs()));
        add(&mut hits, now.limit.map(|_| now.hits));
        add(&mut some, now.some_us.map(|us| us * 1000));
        add(&mut full, now.full_us.map(|us| us * 1000));
    }
    if !rest.is_empty() {
        let other = labels("other", &Workload::default());
        let sum = |number: fn(&WatchedCgroup) -> u64| rest.iter().map(|group| number(group)).sum();
        held.add(other.clone(), sum(|group| group.now.held));
        current.add(other, sum(|group| group.now.current));
    }
    vec![held, current, limit, exhausted, hits, some, full]
}

fn kills(agent: &Agent) -> Exposed {
    let mut kills = Exposed::new(
        MetricKind::Counter,
        "memagent_oom_kills",
        "Processes of a cgroup that the OOM killer has killed while the agent ran, by the limit that was hit.",
    );
    for (path, limit, count) in agent.kills.iter() {
        let mut labels = labels(path, &count.workload);
        labels.push(("limit", limit.name().to_owned()));
        kills.add(labels, count.count);
    }
    kills
}

fn processes(agent: &Agent) -> Exposed {
    let mut anon = Exposed::new(
        MetricKind::Gauge,
        "memagent_process_anon_bytes",
        "Resident anonymous memory of the largest processes.",
    );
    for process in agent.processes.largest(agent.config.metrics.processes) {
        let path = process.cgroup.cgroup.as_deref().unwrap_or_default();
        let workload = agent.names.complete(Workload::at(path));
        let mut labels = labels(path, &workload);
        labels.push(("pid", process.pid.to_string()));
        labels.push(("comm", process.comm.clone()));
        anon.add(labels, process.anon);
    }
    anon
}

fn machine(agent: &Agent) -> Vec<Exposed> {
    let memory = &agent.memory;
    let bytes = |name, help, number| Exposed::one(MetricKind::Gauge, name, help, number);
    let mut families = vec![
        bytes("memagent_node_memory_bytes", "All memory.", memory.total),
        bytes(
            "memagent_node_held_bytes",
            "Memory that is not available.",
            memory.held(),
        ),
        bytes(
            "memagent_node_available_bytes",
            "Memory that programs can have without swapping.",
            memory.available,
        ),
        bytes(
            "memagent_node_slab_bytes",
            "Slab memory of the kernel.",
            memory.slab,
        ),
        bytes(
            "memagent_node_shmem_bytes",
            "Shared memory and tmpfs.",
            memory.shmem,
        ),
        bytes(
            "memagent_node_page_tables_bytes",
            "Page tables.",
            memory.page_tables,
        ),
    ];
    let left = agent.machine_growth.time_left(memory.held(), memory.total);
    let mut exhausted = Exposed::new(
        MetricKind::Gauge,
        "memagent_node_exhausted_seconds",
        "Time until no memory is available at the rate of the last minute; absent if it does not grow steadily.",
    );
    if let Some(left) = left {
        exhausted.add(Vec::new(), left.as_secs());
    }
    families.push(exhausted);
    families
}

fn suspicious(agent: &Agent) -> Exposed {
    let mut family = Exposed::new(
        MetricKind::Gauge,
        "memagent_suspicious",
        "1 for each cgroup whose memory is suspicious, and for the machine, with the reason.",
    );
    let mut add = |mut labels: Labels, reason: Option<Reason>| {
        if let Some(reason) = reason
            && family.series.len() < agent.config.metrics.cgroups
        {
            labels.push(("reason", reason.name().to_owned()));
            family.add(labels, 1);
        }
    };
    add(Vec::new(), agent.machine_growth.suspicion());
    for group in agent.cgroups.iter() {
        add(
            labels(&group.path, &group.workload),
            group.growth.suspicion(),
        );
    }
    family
}

fn traces(agent: &Agent) -> Vec<Exposed> {
    let Some(tracing) = &agent.tracing else {
        return Vec::new();
    };
    let counts = &tracing.counts;
    let mut ended = Exposed::new(
        MetricKind::Counter,
        "memagent_traces",
        "Traces that have ended, by the reason of their end.",
    );
    for end in End::ALL {
        let label = vec![("ended", end.name().to_owned())];
        ended.add(label, counts.ended[end as usize]);
    }
    let mut refused = Exposed::new(
        MetricKind::Counter,
        "memagent_traces_refused",
        "Processes that grew and were not traced, by the reason.",
    );
    for refusal in Refusal::ALL {
        let label = vec![("reason", refusal.name().to_owned())];
        refused.add(label, counts.refused[refusal as usize]);
    }
    vec![
        ended,
        refused,
        Exposed::one(
            MetricKind::Gauge,
            "memagent_traced_processes",
            "Processes that are traced.",
            tracing.running() as u64,
        ),
        Exposed::one(
            MetricKind::Seconds,
            "memagent_trace_seconds",
            "Time of all traces that have ended.",
            counts.nanoseconds,
        ),
        Exposed::one(
            MetricKind::Counter,
            "memagent_trace_hits",
            "Runs of probes in all traces that have ended.",
            counts.hits,
        ),
    ]
}

fn push(agent: &Agent) -> Vec<Exposed> {
    let Some(sender) = &agent.sender else {
        return Vec::new();
    };
    let pushed = sender.pushed();
    let number = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let (profiles, bytes) = sender.queued();
    let mut dropped = Exposed::new(
        MetricKind::Counter,
        "memagent_push_dropped",
        "Profiles that were not pushed: the store has refused them, or the queue was full.",
    );
    for (reason, count) in [("refused", &pushed.refused), ("full", &pushed.full)] {
        let label = vec![("reason", reason.to_owned())];
        dropped.add(label, number(count));
    }
    vec![
        dropped,
        Exposed::one(
            MetricKind::Counter,
            "memagent_push_sent",
            "Profiles that the store has taken.",
            number(&pushed.sent),
        ),
        Exposed::one(
            MetricKind::Counter,
            "memagent_push_failures",
            "Requests that have failed, and were repeated.",
            number(&pushed.failed),
        ),
        Exposed::one(
            MetricKind::Gauge,
            "memagent_push_queued_profiles",
            "Profiles that wait to be sent.",
            profiles,
        ),
        Exposed::one(
            MetricKind::Gauge,
            "memagent_push_queued_bytes",
            "Size of the profiles that wait to be sent.",
            bytes,
        ),
    ]
}

fn own(agent: &Agent) -> Vec<Exposed> {
    let version = vec![("version", env!("CARGO_PKG_VERSION").to_owned())];
    let count = |name, help, number| Exposed::one(MetricKind::Counter, name, help, number);
    let gauge =
        |name, help, number: usize| Exposed::one(MetricKind::Gauge, name, help, number as u64);
    vec![
        Exposed::one(
            MetricKind::Seconds,
            "memagent_cpu_seconds",
            "CPU time of the agent.",
            cpu_ns(),
        ),
        Exposed::one(
            MetricKind::Gauge,
            "memagent_resident_bytes",
            "Resident memory of the agent.",
            resident(),
        ),
        gauge(
            "memagent_watched_cgroups",
            "Cgroups that are watched.",
            agent.cgroups.iter().count(),
        ),
        gauge(
            "memagent_unwatched_cgroups",
            "Cgroups that are not watched, as there are too many.",
            agent.cgroups.left_out(),
        ),
        gauge(
            "memagent_watched_processes",
            "Processes that are watched, including kernel threads.",
            agent.processes.len(),
        ),
        count(
            "memagent_looks_late",
            "Looks that began after the time of the next one.",
            agent.own.late,
        ),
        count(
            "memagent_looks_failed",
            "Looks at the machine or at processes that failed.",
            agent.own.failed,
        ),
        count(
            "memagent_configurations_refused",
            "Wrong configurations that were to be loaded again.",
            agent.own.refused_configs,
        ),
        count(
            "memagent_incidents_written",
            "Incidents that were written.",
            agent.incidents().0,
        ),
        count(
            "memagent_incidents_failed",
            "Incidents that could not be written.",
            agent.incidents().1,
        ),
        count(
            "memagent_log_gaps",
            "Times that the kernel overwrote records of its log before they were read.",
            agent.own.log_gaps,
        ),
        Exposed {
            series: vec![(version, 1.into())],
            ..Exposed::new(MetricKind::Info, "memagent_build", "Version of the agent.")
        },
    ]
}

/// Returns the CPU time of this process, in nanoseconds.
fn cpu_ns() -> u64 {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else {
        return 0;
    };
    let times = [usage.user_time(), usage.system_time()];
    let time = times.map(|time| {
        let seconds = Duration::from_secs(time.tv_sec().unsigned_abs());
        seconds + Duration::from_micros(time.tv_usec().unsigned_abs())
    });
    u64::try_from((time[0] + time[1]).as_nanos()).unwrap_or(u64::MAX)
}

/// Returns the resident bytes of this process.
fn resident() -> u64 {
    let page = memtools::host::page_size::page_bytes().unwrap_or_default();
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let resident = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    resident.unwrap_or(0_u64) * page
}
