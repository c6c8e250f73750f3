//! Cost of tracing for the target, as memleak prints it at the end:
//! `memleak: probes: 1,204,331 hits; their programs: ~310 ns each, 3.1 % of the target's CPU time`.
//!
//! The BPF programs count each hit. In one [`SLICE`] of [`SLICES`] they also time themselves, which takes two looks at
//! the clock, about 40 ns a hit. Until the next timed slice, each hit is assumed to take the mean time of the last one.
//! A run in which its task lost the CPU is omitted, since that time is not the target's. The kernel's handling of the
//! probe is not included.

use std::fmt;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use memtools::print::output::{Output, Row};
use memtools::print::text;
use nix::sys::time::TimeValLike;
use nix::time::ClockId;
use nix::unistd::Pid;
use serde::Serialize;

use super::bpf::types::steering;
use super::probes::{Attached, Hits};
use super::target::Targets;

/// Length of a slice, in which runs are either timed or not.
const SLICE: Duration = Duration::from_millis(200);
/// Number of slices of which one is timed, the first.
const SLICES: u32 = 10;

/// Minimum CPU time of the target from which the programs' share can be computed, in nanoseconds.
const ENOUGH_NS: u64 = 10_000_000;

/// Measurement of the BPF programs' cost.
pub(crate) struct Cost<'a> {
    attached: &'a Attached,
    clocks: Clocks,
    /// Whether runs are timed now.
    measuring: bool,
    slices: u32,
    ends: Instant,
    spent: Spent,
    /// Counters when the target's CPU time was known last.
    used: Used,
    /// Counters when a share was returned last.
    told: Used,
}

/// Time that all hits took, estimated from the timed ones.
#[derive(Debug, Default, Clone, Copy)]
struct Spent {
    hits: u64,
    /// Number of timed runs, and the nanoseconds that they took.
    measured: (u64, u64),
    /// Nanoseconds of all hits but those in `unknown`.
    ns: f64,
    /// Number of hits before the first timed one.
    unknown: u64,
    /// Mean nanoseconds of a hit in the last timed slice.
    hit_ns: Option<f64>,
}

impl Spent {
    /// Adds the counters of the hits until now.
    fn add(&mut self, hits: Hits) {
        let (runs, ns) = (
            hits.measured - self.measured.0,
            hits.measured_ns - self.measured.1,
        );
        self.measured = (hits.measured, hits.measured_ns);
        self.unknown += hits.count - self.hits;
        self.hits = hits.count;
        if runs > 0 {
            self.hit_ns = Some(ns as f64 / runs as f64);
        }
        if let Some(hit_ns) = self.hit_ns {
            self.ns += self.unknown as f64 * hit_ns;
            self.unknown = 0;
        }
    }

    fn mean_ns(self) -> Option<f64> {
        self.hit_ns.map(|_| self.ns / self.hits as f64)
    }
}

/// Cost that was measured over some time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Share {
    /// BPF programs' part of the target's CPU time, in percent.
    pub(crate) percent: f64,
    /// Part of the hits that were entries of calls to be recorded.
    pub(crate) recorded: f64,
}

/// Counters at a point of time, since the start.
#[derive(Debug, Default, Clone, Copy)]
struct Used {
    hits: Hits,
    /// Nanoseconds in the BPF programs.
    ns: Option<f64>,
    cpu_ns: u64,
}

impl<'a> Cost<'a> {
    /// Begins the measurement with a timed slice.
    pub(crate) fn new(attached: &'a Attached, target: &Targets) -> anyhow::Result<Self> {
        let mut cost = Self {
            attached,
            clocks: Clocks::new(target),
            measuring: false,
            slices: 0,
            ends: Instant::now(),
            spent: Spent::default(),
            used: Used::default(),
            told: Used::default(),
        };
        cost.begin_slice()?;
        Ok(cost)
    }

    /// Ends a slice whose time is over, and begins the next one. Call it several times per second. Returns the share
    /// since it last returned one, once the target has used enough CPU time. A target that is idle most of the time
    /// takes many slices for that.
    pub(crate) fn look(&mut self) -> anyhow::Result<Option<Share>> {
        if Instant::now() < self.ends {
            return Ok(None);
        }
        self.end_slice();
        self.begin_slice()?;
        let share = self.used.since(&self.told);
        if share.is_some() {
            self.told = self.used;
        }
        Ok(share)
    }

    fn begin_slice(&mut self) -> anyhow::Result<()> {
        let measure = self.slices.is_multiple_of(SLICES) || self.spent.hit_ns.is_none();
        self.slices += 1;
        self.ends = Instant::now() + SLICE;
        self.set_measuring(measure)
    }

    fn set_measuring(&mut self, measure: bool) -> anyhow::Result<()> {
        if measure != self.measuring {
            let what = steering::STEERING_MEASURES;
            self.attached.steer(what, measure.into())?;
            self.measuring = measure;
        }
        Ok(())
    }

    /// Has the current slice timed, since hits take another time from now on. The next share counts from here. Call it
    /// at the slice's beginning.
    pub(crate) fn measure(&mut self) -> anyhow::Result<()> {
        self.told = self.used;
        self.slices = 1;
        self.set_measuring(true)
    }

    /// Ends a slice, and reads the counters and the target's CPU time. Call it before the probes are detached.
    pub(crate) fn end_slice(&mut self) {
        let hits = self.attached.hits();
        self.spent.add(hits);
        if let Some(cpu_ns) = self.clocks.read_ns() {
            let ns = self.spent.hit_ns.map(|_| self.spent.ns);
            self.used = Used { hits, ns, cpu_ns };
        }
    }

    /// Returns the BPF programs' share of the target's CPU time since the start, in percent.
    pub(crate) fn percent(&self) -> Option<f64> {
        self.used.percent()
    }

    /// Prints the cost on stderr, and as an object in JSON.
    pub(crate) fn tell(&self, output: &mut Output) -> anyhow::Result<()> {
        let hits = self.attached.hits().count;
        if hits == 0 {
            return Ok(());
        }
        let summary = Summary {
            hits,
            hit_ns: self.spent.mean_ns().map(|ns| ns.round() as u64),
            cpu_percent: self.used.percent(),
        };
        output.row(&summary)?;
        output.flush()?;
        memtools::message!("probes: {summary}");
        Ok(())
    }
}

impl Used {
    fn percent(self) -> Option<f64> {
        let percent = percent(self.ns?, self.cpu_ns);
        (self.cpu_ns > 0).then_some((percent * 10.0).round() / 10.0)
    }

    /// Returns the share since an earlier point of time. Returns None if the target has used too little CPU time since
    /// then.
    fn since(&self, earlier: &Self) -> Option<Share> {
        let cpu_ns = self.cpu_ns - earlier.cpu_ns;
        let hits = self.hits.count - earlier.hits.count;
        let recorded = self.hits.recorded - earlier.hits.recorded;
        let ns = self.ns? - earlier.ns.unwrap_or(0.0);
        (cpu_ns >= ENOUGH_NS && hits > 0).then(|| Share {
            percent: percent(ns, cpu_ns),
            recorded: recorded as f64 / hits as f64,
        })
    }
}

/// Returns the BPF programs' share of the CPU time, in percent. The programs run within the target's time, so the share
/// is at most 100, but a mean of some runs can be above that of all.
fn percent(ns: f64, cpu_ns: u64) -> f64 {
    (ns / cpu_ns as f64 * 100.0).min(100.0)
}

/// CPU time of the target's processes.
struct Clocks {
    running: Vec<Clock>,
    /// Nanoseconds of the processes that have exited.
    gone_ns: u64,
}

struct Clock {
    id: ClockId,
    start_ns: u64,
    last_ns: u64,
}

impl Clocks {
    /// Begins with the target's processes. Has no clocks where processes can join later, since those are not known
    /// here.
    fn new(target: &Targets) -> Self {
        let processes = target.processes.iter().filter(|_| target.is_fixed());
        let clock = |pid: u32| {
            let id = ClockId::pid_cpu_clock_id(Pid::from_raw(pid.cast_signed())).ok()?;
            let start_ns = now_ns(id)?;
            Some(Clock {
                id,
                start_ns,
                last_ns: start_ns,
            })
        };
        Self {
            running: processes
                .filter_map(|traced| clock(traced.process.pid()))
                .collect(),
            gone_ns: 0,
        }
    }

    /// Returns the CPU time of all processes since the start. Returns None once all have exited. The time that a
    /// process has used between the last look and its exit is not known.
    fn read_ns(&mut self) -> Option<u64> {
        let gone_ns = &mut self.gone_ns;
        self.running.retain_mut(|clock| {
            let now = now_ns(clock.id);
            match now {
                Some(ns) => clock.last_ns = ns,
                None => *gone_ns += clock.last_ns - clock.start_ns,
            }
            now.is_some()
        });
        let running = self.running.iter();
        let running_ns: u64 = running.map(|clock| clock.last_ns - clock.start_ns).sum();
        (!self.running.is_empty()).then_some(self.gone_ns + running_ns)
    }
}

fn now_ns(clock: ClockId) -> Option<u64> {
    let time = clock.now().ok()?;
    u64::try_from(time.num_nanoseconds()).ok()
}

/// Cost as it is printed: the last object but one in JSON, and a line on stderr.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "probes")]
struct Summary {
    /// Entries into probed functions, and returns from them.
    hits: u64,
    /// Mean nanoseconds of a BPF program's run.
    #[serde(skip_serializing_if = "Option::is_none")]
    hit_ns: Option<u64>,
    /// BPF programs' part of the processes' CPU time, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_percent: Option<f64>,
}

impl Row for Summary {
    fn text(&self, _: &mut dyn Write) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} hits", text::grouped(self.hits))?;
        if let Some(ns) = self.hit_ns {
            write!(f, "; their programs: ~{ns} ns each")?;
        }
        if let Some(percent) = self.cpu_percent {
            write!(f, ", {percent:.1} % of the target's CPU time")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_has_what_is_known() {
        let mut summary = Summary {
            hits: 1_204_331,
            hit_ns: Some(310),
            cpu_percent: Some(3.1),
        };
        assert_eq!(
            summary.to_string(),
            "1,204,331 hits; their programs: ~310 ns each, 3.1 % of the target's CPU time"
        );
        (summary.hit_ns, summary.cpu_percent) = (None, None);
        assert_eq!(summary.to_string(), "1,204,331 hits");
        let json = serde_json::to_value(&summary).expect("JSON");
        assert_eq!(json.as_object().expect("an object").len(), 2, "{json}");
    }

    #[test]
    fn the_share_is_of_what_the_target_used() {
        let used = Used {
            ns: Some(311_000.0),
            cpu_ns: 10_000_000,
            ..Used::default()
        };
        assert_eq!(used.percent(), Some(3.1));
        assert_eq!(Used::default().percent(), None);
        let none = Used { cpu_ns: 0, ..used };
        assert_eq!(none.percent(), None);
    }

    #[test]
    fn no_share_is_above_a_hundred() {
        let used = Used {
            ns: Some(86_200_000.0),
            cpu_ns: 10_000_000,
            ..Used::default()
        };
        assert_eq!(used.percent(), Some(100.0));
    }

    #[test]
    fn a_share_waits_until_the_target_has_run_for_long_enough() {
        let at = |count, ns, cpu_ns| Used {
            hits: Hits {
                count,
                recorded: count / 4,
                ..Hits::default()
            },
            ns: Some(ns),
            cpu_ns,
        };
        let start = Used::default();
        assert_eq!(at(1000, 800_000.0, 4_000_000).since(&start), None);
        let share = at(3000, 2_400_000.0, 12_000_000).since(&start);
        let expected = Share {
            percent: 20.0,
            recorded: 0.25,
        };
        assert_eq!(share, Some(expected));
        assert_eq!(at(0, 0.0, 12_000_000).since(&start), None);
    }

    #[test]
    fn what_is_not_measured_costs_as_much_as_what_was_last() {
        let mut hits = Hits::default();
        let mut spent = Spent::default();
        let mut add = |count, measured, measured_ns| {
            hits.count += count;
            hits.measured += measured;
            hits.measured_ns += measured_ns;
            spent.add(hits);
            spent.mean_ns()
        };
        assert_eq!(add(10, 0, 0), None);
        assert_eq!(add(10, 10, 1000), Some(100.0));
        assert_eq!(add(10, 0, 0), Some(100.0));
        add(10, 5, 2500);
        assert_eq!(add(20, 0, 0), Some((30.0 * 100.0 + 30.0 * 500.0) / 60.0));
    }
}
