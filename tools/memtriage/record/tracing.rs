//! Tracing while memory is nearly used up: OOM kills, and the processes that grow.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use jiff::Zoned;
use memtools::export::saved_profile::SavedProfile;
use memtools::print::clock;
use memtools::print::output::Row;
use memtools::process::cgroup;
use memtools::process::container::{self, CgroupInfo};
use serde::Serialize;
use serde_json::Value;
use tempfile::TempDir;

use crate::processes::{self, ProcessUsage};
use crate::record::kills::{Batch, Kills};
use crate::record::oom_domain::OomDomain;
use crate::record::report::PROCESSES;
use crate::tools::{self, Run, ToolSpec, ToolTarget, Unit};

/// Limit on the processes that are traced at once: the machine is short of memory already.
const MAX_TRACED: usize = 3;
/// Growth from one look to the next, in bytes, below which a process is not traced.
const MIN_GROWTH: i64 = 1 << 20;
/// Time between the first two looks.
const FIRST: Duration = Duration::from_millis(250);
/// Time for which the profile of a process is kept after its exit: on a machine short of memory, oomkill may report
/// the kill only seconds later.
pub(crate) const EXITED_RETENTION: Duration = Duration::from_secs(60);
/// Time between two profiles of a process, in seconds.
const PROFILE: &str = "2";

/// Runs of the tools while one place is nearly used up.
pub(crate) struct Tracing {
    place: OomDomain,
    kills: Kills,
    traced: Vec<Traced>,
    /// Runs that have ended, each with the time at which its process was last seen, or the run found ended.
    ended: Vec<(Instant, Traced)>,
    /// Processes that memleak cannot trace. faults is started once for each.
    fallen_back: Vec<ProcessUsage>,
    /// Processes at the last look, ...
    now: Processes,
    /// ... and at the one before.
    before: Processes,
    folder: TempDir,
    started: usize,
}

/// Processes at one look.
#[derive(Default)]
struct Processes {
    /// All processes, the largest first.
    all: Vec<ProcessUsage>,
    /// Bytes by which each process has grown since the look before, by pid.
    growth: HashMap<u32, i64>,
}

/// Process that is traced.
pub(crate) struct Traced {
    /// Usage of the process when it was largest.
    usage: ProcessUsage,
    pub(crate) question: ToolSpec,
    run: Run,
    /// Whether the tool is the second choice, faults.
    is_fallback: bool,
    /// Largest processes at the look at which this one was largest, with their growth: a process that is being killed
    /// has less and less memory.
    beside: Vec<(ProcessUsage, i64)>,
}

impl Tracing {
    /// Starts oomkill, and takes the first look at the processes.
    ///
    /// # Errors
    /// If oomkill cannot be run, or there is no directory for the tools' profiles.
    pub(crate) fn start(place: OomDomain) -> Result<Self> {
        let mut tracing = Self::beside(Kills::start()?, place)?;
        tracing.look();
        std::thread::sleep(FIRST);
        Ok(tracing)
    }

    fn beside(kills: Kills, place: OomDomain) -> Result<Self> {
        Ok(Self {
            place,
            kills,
            traced: Vec::new(),
            ended: Vec::new(),
            fallen_back: Vec::new(),
            now: Processes::default(),
            before: Processes::default(),
            folder: tempfile::tempdir().context("failed to create a directory for profiles")?,
            started: 0,
        })
    }

    pub(crate) fn place(&self) -> &OomDomain {
        &self.place
    }

    /// Looks at the processes once more, drops the runs that have ended, and starts tracing the processes that have
    /// grown most. Returns the runs that were started.
    pub(crate) fn follow_growth(&mut self) -> Vec<Started> {
        self.look();
        let mut started = self.drop_ended();
        let in_place = self.place.folder.as_ref().map(|folder| {
            let pids = cgroup::processes_below(folder).unwrap_or_default();
            pids.into_iter().collect::<HashSet<u32>>()
        });
        let left_out = self.left_out();
        let wanted = |pid: u32| {
            let is_in_place = in_place.as_ref().is_none_or(|pids| pids.contains(&pid));
            is_in_place && !left_out.contains(&pid)
        };
        let growing = self.now.fastest(wanted);
        for usage in growing.into_iter().take(MAX_TRACED - self.traced.len()) {
            started.extend(self.trace(usage, false));
        }
        started
    }

    /// Returns the processes that are not to be traced: those that are traced or cannot be, and the tools.
    fn left_out(&self) -> HashSet<u32> {
        let traced = self.traced.iter();
        let traced = traced.flat_map(|one| [one.usage.pid, one.run.child.id()]);
        let fallen_back = self.fallen_back.iter().map(|usage| usage.pid);
        let own = [std::process::id(), self.kills.pid()];
        traced.chain(fallen_back).chain(own).collect()
    }

    fn look(&mut self) {
        let mut all = processes::all();
        // Reports show only these, and a process that was killed cannot be looked up any more.
        all.sort_by_key(|usage| (Reverse(usage.anon_and_swap()), usage.pid));
        let shown = all.len().min(PROCESSES);
        processes::find_cgroups(&mut all[..shown]);
        let growth = processes::growth(&self.now.all, &all);
        self.before = std::mem::replace(&mut self.now, Processes { all, growth });
        let largest = self.now.largest();
        let ended = self.ended.iter_mut().map(|(_, one)| one);
        for one in self.traced.iter_mut().chain(ended) {
            if let Some(usage) = self.now.find(&one.usage)
                && usage.anon_and_swap() >= one.usage.anon_and_swap()
            {
                one.usage = usage.clone();
                one.beside.clone_from(&largest);
            }
        }
    }

    /// Removes the runs that have ended. A process that memleak cannot trace is traced by faults.
    fn drop_ended(&mut self) -> Vec<Started> {
        let mut again = Vec::new();
        for mut one in std::mem::take(&mut self.traced) {
            if !tools::has_ended(&mut one.run.child) {
                self.traced.push(one);
                continue;
            }
            // A tool that has succeeded has seen its process exit, maybe after the look.
            let has_failed = self.now.find(&one.usage).is_some() && !one.run.has_succeeded();
            if has_failed && !one.is_fallback {
                again.push(one.usage);
                continue;
            }
            if has_failed {
                eprintln!("memtriage: {} has failed", one.question.command());
            }
            self.ended.push((Instant::now(), one));
        }
        self.ended.retain_mut(|(seen, one)| {
            if self.now.find(&one.usage).is_some() {
                *seen = Instant::now();
            }
            seen.elapsed() < EXITED_RETENTION
        });
        self.fallen_back.extend(again.iter().cloned());
        self.fallen_back
            .retain(|usage| self.now.find(usage).is_some());
        again
            .into_iter()
            .filter_map(|usage| self.trace(usage, true))
            .collect()
    }

    fn trace(&mut self, usage: ProcessUsage, is_fallback: bool) -> Option<Started> {
        let whose = ToolTarget::process(usage.pid, usage.cgroup_info.as_ref());
        let question = question(usage.pid, whose, is_fallback);
        let run = Run::start(&question, &self.folder, self.started);
        self.started += 1;
        let run = match run {
            Ok(run) => run,
            Err(error) => {
                eprintln!("memtriage: {error:#}");
                return None;
            }
        };
        let started = Started {
            time: clock::now(),
            pid: usage.pid,
            cgroup_info: question.target.cgroup_info().cloned(),
            container: false,
            comm: usage.comm.clone(),
            command: question.command(),
        };
        self.traced.push(Traced {
            usage,
            question,
            run,
            is_fallback,
            beside: self.now.largest(),
        });
        Some(started)
    }

    /// Returns the kills since the last call.
    pub(crate) fn kills(&mut self) -> Batch {
        self.kills.since_last()
    }

    /// Returns the profiles of the victim, which is not traced any more, and then those of the other traced
    /// processes.
    pub(crate) fn profiles(&mut self, victim: u32) -> Vec<(ToolSpec, Outcome)> {
        let is_victim = |one: &Traced| one.usage.pid == victim;
        let ended = self.ended.extract_if(.., |(_, one)| is_victim(one));
        let ended = ended.map(|(_, one)| one);
        let running = self.traced.extract_if(.., |one| is_victim(one));
        let mut profiles: Vec<_> = running.chain(ended).map(Traced::last_profile).collect();
        for one in &self.traced {
            let so_far = one.run.latest_profile().map(|profile| (profile, None));
            profiles.push((one.question.clone(), so_far));
        }
        profiles
    }

    /// Returns the largest processes with their growth. If the victim is traced, they are those of the look at which
    /// it was largest, else those of the last look at which it existed.
    pub(crate) fn largest(&self, victim: u32) -> Vec<(ProcessUsage, i64)> {
        let ended = self.ended.iter().map(|(_, one)| one);
        let mut traced = self.traced.iter().chain(ended);
        if let Some(one) = traced.find(|one| one.usage.pid == victim) {
            return one.beside.clone();
        }
        let was_there = |usage: &ProcessUsage| usage.pid == victim;
        let looks = [&self.now, &self.before];
        let seen = looks
            .into_iter()
            .find(|look| look.all.iter().any(was_there));
        seen.unwrap_or(&self.now).largest()
    }
}

/// Profile of a tool, with its losses, or the reason why there is none.
pub(crate) type Outcome = Result<(SavedProfile, Option<Value>)>;

impl Traced {
    /// Returns the profile of a process that was killed. The tool ends with the process.
    fn last_profile(mut self) -> (ToolSpec, Outcome) {
        tools::wait_for(&mut self.run.child);
        tools::stop(&mut self.run.child);
        (self.question, self.run.end())
    }
}

impl Processes {
    fn grown(&self, usage: &ProcessUsage) -> i64 {
        self.growth.get(&usage.pid).copied().unwrap_or_default()
    }

    /// Finds a process of an earlier look in this one.
    fn find(&self, usage: &ProcessUsage) -> Option<&ProcessUsage> {
        let same = |one: &&ProcessUsage| (one.pid, one.started) == (usage.pid, usage.started);
        self.all.iter().find(same)
    }

    /// Returns the wanted processes that have grown enough to be traced, the fastest first.
    fn fastest(&self, wanted: impl Fn(u32) -> bool) -> Vec<ProcessUsage> {
        let growing = self.all.iter();
        let growing = growing.filter(|usage| self.grown(usage) >= MIN_GROWTH);
        let mut growing: Vec<ProcessUsage> =
            growing.filter(|usage| wanted(usage.pid)).cloned().collect();
        growing.sort_by_key(|usage| (Reverse(self.grown(usage)), usage.pid));
        growing
    }

    /// Returns the largest processes, with their growth.
    fn largest(&self) -> Vec<(ProcessUsage, i64)> {
        let largest = self.all.iter().take(PROCESSES);
        largest
            .map(|usage| (usage.clone(), self.grown(usage)))
            .collect()
    }
}

/// Returns the command line for a process: memleak, with as much sampling as keeps its cost low; or faults, for a
/// process without an allocator that memleak knows.
fn question(pid: u32, target: ToolTarget, is_fallback: bool) -> ToolSpec {
    let pid = pid.to_string();
    let words = |words: &[&str]| words.iter().map(ToString::to_string).collect();
    if is_fallback {
        return ToolSpec {
            tool: "faults",
            // With an interval, each profile would cover that interval alone.
            args: words(&["--bytes", "-p", &pid]),
            value: ("space", Unit::Bytes),
            target,
        };
    }
    let sampled = ["--max-overhead", "2%", "--mem-limit", "128M", PROFILE];
    ToolSpec {
        tool: "memleak",
        args: words(&[&["-p", &pid], &sampled[..]].concat()),
        value: ("inuse_space", Unit::Bytes),
        target,
    }
}

/// Row of a process that is traced from now on.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "tracing")]
pub(crate) struct Started {
    #[serde(serialize_with = "clock::serialize")]
    time: Zoned,
    pid: u32,
    comm: String,
    #[serde(flatten)]
    cgroup_info: Option<CgroupInfo>,
    /// Whether text shows the container.
    #[serde(skip)]
    pub(crate) container: bool,
    command: String,
}

impl Row for Started {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let time = clock::time_of_day(&self.time);
        let inside = container::inside(self.cgroup_info.as_ref().filter(|_| self.container));
        writeln!(
            out,
            "{time} {} (pid {}){inside} grows: {}",
            self.comm, self.pid, self.command
        )
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    #[test]
    fn those_that_grow_fastest_are_traced() {
        let usage = |pid| ProcessUsage {
            pid,
            ..ProcessUsage::default()
        };
        let processes = Processes {
            all: (1..=5).map(usage).collect(),
            growth: HashMap::from([(1, 5 << 20), (2, 9 << 20), (3, 1 << 19), (4, 7 << 20)]),
        };
        let fastest = processes.fastest(|pid| pid != 4);
        let pids: Vec<u32> = fastest.iter().map(|usage| usage.pid).collect();
        assert_eq!(pids, [2, 1]);
    }

    fn shell(script: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stderr(Stdio::piped());
        command.spawn().expect("a shell")
    }

    /// Makes the state in which a run for process 7, which still exists, has ended like this script.
    fn after(script: &str, is_fallback: bool) -> Tracing {
        let place = OomDomain {
            cgroup: None,
            folder: None,
        };
        let kills = Kills::of(shell("true"));
        let mut tracing = Tracing::beside(kills, place).expect("a directory");
        let usage = ProcessUsage {
            pid: 7,
            ..ProcessUsage::default()
        };
        let question = question(7, ToolTarget::default(), is_fallback);
        let profile = tracing.folder.path().join("0.pb.gz");
        let mut run = Run::of(question.tool, shell(script), profile);
        run.child.wait().expect("it ends");
        tracing.now.all.push(usage.clone());
        tracing.traced.push(Traced {
            usage,
            question,
            run,
            is_fallback,
            beside: Vec::new(),
        });
        tracing
    }

    #[test]
    fn a_process_that_memleak_cannot_trace_is_not_given_to_it_again() {
        let mut tracing = after("exit 1", false);
        // faults is not beside the tests.
        assert!(tracing.drop_ended().is_empty());
        assert!(tracing.left_out().contains(&7));
        tracing.now.all.clear();
        tracing.drop_ended();
        assert!(!tracing.left_out().contains(&7), "it has exited");
    }

    #[test]
    fn the_profile_is_kept_of_a_process_that_lives_on() {
        for (script, is_fallback, reason) in [
            ("echo 'faults: no hook' >&2; exit 1", true, "no hook"),
            ("true", false, "0.pb.gz"),
        ] {
            let mut tracing = after(script, is_fallback);
            assert!(tracing.drop_ended().is_empty() && tracing.traced.is_empty());
            let profiles = tracing.profiles(7);
            let [(_, Err(error))] = &profiles[..] else {
                panic!("{script}: {} profiles", profiles.len());
            };
            let error = format!("{error:#}");
            assert!(error.contains(reason), "{script}: {error}");
        }
    }

    #[test]
    fn the_commands_are_those_of_the_manual() {
        assert_eq!(
            question(7, ToolTarget::default(), false).command(),
            "memleak -p 7 --max-overhead '2%' --mem-limit 128M 2"
        );
        assert_eq!(
            question(7, ToolTarget::default(), true).command(),
            "faults --bytes -p 7"
        );
    }
}
