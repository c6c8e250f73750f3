//! What tracing costs the target, as memleak says it at the end:
//! `memleak: probes: 1,204,331 hits; their programs: ~310 ns each, 3.1 % of the target's CPU time`.
//!
//! The programs count each hit. The time that they take is the kernel's own statistics, without the
//! kernel's handling of the probe. Those cost about 40 ns a run, 10 % of what a hit costs in all; so
//! they are on in one [`SLICE`] of [`SLICES`], and what a hit took there it is taken to take until
//! the next one.

use std::fmt;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use memtools::output::{Output, Row};
use memtools::run_time::{Counting, Runs};
use nix::sys::time::TimeValLike;
use nix::time::ClockId;
use nix::unistd::Pid;
use serde::Serialize;

use crate::probes::{Attached, Hits};
use crate::target::Target;

/// How long the kernel measures, or does not, at a time.
const SLICE: Duration = Duration::from_millis(200);
/// Of so many it measures the first.
const SLICES: u32 = 10;

/// CPU time of the target in a slice from which its share can be told.
const ENOUGH_NS: u64 = 10_000_000;

/// Measures it.
pub(crate) struct Cost<'a> {
    attached: &'a Attached,
    clocks: Clocks,
    /// While the kernel measures: what it had counted, and the target's CPU time, before.
    measuring: Option<Measuring>,
    slices: u32,
    ends: Instant,
    spent: Spent,
    /// When the target's CPU time was known last.
    used: Used,
}

/// The time that all hits took, from what some took.
#[derive(Debug, Default, Clone, Copy)]
struct Spent {
    hits: u64,
    /// That of those before `unknown`, in nanoseconds.
    ns: f64,
    /// Hits before the first that was measured.
    unknown: u64,
    /// What one took in the last slice that was measured.
    hit_ns: Option<f64>,
}

impl Spent {
    /// So many hits there were until now, and these runs of the last ones were measured.
    fn add(&mut self, hits: u64, measured: Option<Runs>) {
        self.unknown += hits - self.hits;
        self.hits = hits;
        self.hit_ns = measured.and_then(Runs::mean_ns).or(self.hit_ns);
        if let Some(hit_ns) = self.hit_ns {
            self.ns += self.unknown as f64 * hit_ns;
            self.unknown = 0;
        }
    }

    fn mean_ns(self) -> Option<f64> {
        self.hit_ns.map(|_| self.ns / self.hits as f64)
    }
}

struct Measuring {
    /// The kernel measures until this is dropped.
    _counting: Counting,
    runs: Runs,
    used: Used,
}

/// What was measured in a slice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Share {
    /// Of the target's CPU time, in the programs.
    pub(crate) percent: f64,
    /// Of the hits, those by which a call came to be recorded.
    pub(crate) recorded: f64,
}

/// What there was at a time, since the start.
#[derive(Debug, Default, Clone, Copy)]
struct Used {
    hits: Hits,
    /// In the programs.
    ns: Option<f64>,
    cpu_ns: u64,
}

impl<'a> Cost<'a> {
    /// Begins with a slice that is measured.
    pub(crate) fn new(attached: &'a Attached, target: &Target) -> Self {
        let mut cost = Self {
            attached,
            clocks: Clocks::new(target),
            measuring: None,
            slices: 0,
            ends: Instant::now(),
            spent: Spent::default(),
            used: Used::default(),
        };
        cost.begin_slice();
        cost
    }

    /// Call it several times a second. Returns what a slice has shown when it has ended.
    pub(crate) fn look(&mut self) -> Option<Share> {
        if Instant::now() < self.ends {
            return None;
        }
        let share = self.end_slice();
        self.begin_slice();
        share
    }

    fn begin_slice(&mut self) {
        if self.slices.is_multiple_of(SLICES) || self.spent.hit_ns.is_none() {
            self.measure();
        }
        self.slices += 1;
        self.ends = Instant::now() + SLICE;
    }

    /// Has this slice measured, whichever it is. Call it at its beginning.
    pub(crate) fn measure(&mut self) {
        let (runs, used) = (self.runs(), self.used);
        // Without the privilege, hits are all that can be told.
        let counting = Counting::start().ok();
        self.measuring = counting.map(|_counting| Measuring {
            _counting,
            runs,
            used,
        });
    }

    /// Call it before the probes are removed.
    pub(crate) fn end_slice(&mut self) -> Option<Share> {
        let before = self.measuring.take();
        let runs = before.as_ref().map(|before| self.runs() - before.runs);
        let hits = self.attached.hits();
        self.spent.add(hits.count, runs);
        if let Some(cpu_ns) = self.clocks.read_ns() {
            let ns = self.spent.hit_ns.map(|_| self.spent.ns);
            self.used = Used { hits, ns, cpu_ns };
        }
        let (before, runs) = (before?, runs?);
        let cpu_ns = self.used.cpu_ns - before.used.cpu_ns;
        let hits = self.used.hits.count - before.used.hits.count;
        let recorded = self.used.hits.recorded - before.used.hits.recorded;
        (cpu_ns >= ENOUGH_NS && hits > 0).then(|| Share {
            percent: runs.time_ns as f64 / cpu_ns as f64 * 100.0,
            recorded: recorded as f64 / hits as f64,
        })
    }

    fn runs(&self) -> Runs {
        Runs::of(self.attached.handlers())
    }

    /// Says it on stderr, and as an object in JSON.
    pub(crate) fn tell(self, output: &mut Output) -> anyhow::Result<()> {
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
        eprintln!("memleak: probes: {summary}");
        Ok(())
    }
}

impl Used {
    fn percent(self) -> Option<f64> {
        let share = self.ns? / self.cpu_ns as f64;
        (self.cpu_ns > 0).then_some((share * 1000.0).round() / 10.0)
    }
}

/// The CPU time that processes use.
struct Clocks {
    running: Vec<Clock>,
    /// What those used that are gone.
    gone_ns: u64,
}

struct Clock {
    id: ClockId,
    start_ns: u64,
    last_ns: u64,
}

impl Clocks {
    /// None, where processes can join the target later: it is not known here which these are.
    fn new(target: &Target) -> Self {
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

    /// All since the start; None once all processes have gone. What one has used since the last look
    /// before it went is not known.
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

/// The last object but one in JSON, and a line on stderr.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "probes")]
struct Summary {
    /// Entries into probed functions, and returns from them.
    hits: u64,
    /// What our program took at one of them, on average.
    #[serde(skip_serializing_if = "Option::is_none")]
    hit_ns: Option<u64>,
    /// That, of the CPU time of the processes.
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
        write!(f, "{} hits", grouped(self.hits))?;
        if let Some(ns) = self.hit_ns {
            write!(f, "; their programs: ~{ns} ns each")?;
        }
        if let Some(percent) = self.cpu_percent {
            write!(f, ", {percent:.1} % of the target's CPU time")?;
        }
        Ok(())
    }
}

/// `1204331` as `1,204,331`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
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
    fn digits_are_grouped() {
        let texts = [0, 999, 1000, 123_456, 1_000_000].map(grouped);
        assert_eq!(texts, ["0", "999", "1,000", "123,456", "1,000,000"]);
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
    fn what_is_not_measured_costs_as_much_as_what_was_last() {
        let runs = |count, time_ns| Some(Runs { count, time_ns });
        let mut spent = Spent::default();
        spent.add(10, None);
        assert_eq!(spent.mean_ns(), None);
        spent.add(20, runs(10, 1000));
        assert_eq!(spent.mean_ns(), Some(100.0));
        spent.add(30, runs(0, 0));
        assert_eq!(spent.mean_ns(), Some(100.0));
        spent.add(40, runs(5, 2500));
        spent.add(60, None);
        assert_eq!(spent.mean_ns(), Some((30.0 * 100.0 + 30.0 * 500.0) / 60.0));
    }
}
