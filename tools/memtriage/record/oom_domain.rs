//! Places where memory can be nearly used up, which --record watches while nothing is traced.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use jiff::Zoned;
use memtools::host::memory_cgroups::{MemoryCgroup, MemoryCgroups};
use memtools::host::pressure::Pressure;
use memtools::host::values::Values;
use memtools::print::clock;
use memtools::print::output::Row;
use serde::Serialize;

use crate::snapshot::SWAP_INS;

/// Number of looks that are kept: a minute's, while something is traced.
const LOOKS: usize = 60;

/// Place where memory can be used up: the machine, or a cgroup with a limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct OomDomain {
    /// Path of the cgroup. None for the machine.
    pub(crate) cgroup: Option<String>,
    #[serde(skip)]
    pub(crate) folder: Option<PathBuf>,
}

impl OomDomain {
    fn of(group: &MemoryCgroup) -> Self {
        Self {
            cgroup: Some(group.path.clone()),
            folder: Some(group.folder.clone()),
        }
    }

    pub(crate) fn name(&self) -> &str {
        self.cgroup.as_deref().unwrap_or("the machine's memory")
    }
}

/// Data of one look. Processes are not read, as --record looks all day.
pub(crate) struct MemorySnapshot {
    at: Instant,
    time: Zoned,
    /// Share of the machine's memory that is not available, in percent.
    machine_percent: f64,
    groups: Vec<MemoryCgroup>,
    /// Remark on cgroups that are not watched.
    remark: Option<String>,
    counters: Values,
    pressure: Option<Pressure>,
}

impl MemorySnapshot {
    /// # Errors
    /// If /proc cannot be read.
    pub(crate) fn now() -> Result<Self> {
        let memory = Values::read("/proc/meminfo")?;
        let groups = MemoryCgroups::read();
        Ok(Self {
            at: Instant::now(),
            time: clock::now(),
            machine_percent: used_percent(&memory),
            remark: groups.remark(),
            groups: groups.limited,
            counters: Values::read("/proc/vmstat")?,
            pressure: Pressure::read("/proc/pressure/memory"),
        })
    }

    /// Returns the remark on cgroups that are not watched, if the look before had none.
    pub(crate) fn new_remark(&self, before: Option<&Self>) -> Option<&str> {
        let is_new = before.is_none_or(|before| before.remark.is_none());
        self.remark.as_deref().filter(|_| is_new)
    }

    /// Returns the place with the largest used share, and that share in percent. The machine comes before a cgroup
    /// with an equal share.
    pub(crate) fn fullest(&self) -> (OomDomain, f64) {
        let machine = OomDomain {
            cgroup: None,
            folder: None,
        };
        let groups = self.groups.iter();
        let groups = groups.map(|group| (OomDomain::of(group), group.percent()));
        groups.fold((machine, self.machine_percent), |most, one| {
            if one.1 > most.1 { one } else { most }
        })
    }

    /// Returns the used share of this place, in percent; 0 for a cgroup that was removed.
    pub(crate) fn percent(&self, place: &OomDomain) -> f64 {
        let Some(folder) = &place.folder else {
            return self.machine_percent;
        };
        let of = |folder: &Path| self.groups.iter().find(|group| group.folder == folder);
        of(folder).map_or(0.0, MemoryCgroup::percent)
    }

    /// Predicts the time until this mark, in percent, is passed at any place, if all places grow on as they have
    /// since the look before. None if nothing grows. A cgroup that is new since then has grown from 0.
    pub(crate) fn until(&self, mark_percent: f64, before: &Self) -> Option<Duration> {
        let seconds = (self.at - before.at).as_secs_f64().max(f64::EPSILON);
        let old = before.groups.iter();
        let old: HashMap<&Path, f64> = old.map(|one| (&*one.folder, one.percent())).collect();
        let groups = self.groups.iter().map(|group| {
            let before = old.get(&*group.folder).copied().unwrap_or_default();
            (group.percent(), before)
        });
        let places = groups.chain([(self.machine_percent, before.machine_percent)]);
        let growing = places.filter(|(percent, before)| percent > before);
        let left = growing.map(|(percent, before)| {
            (mark_percent - percent).max(0.0) * seconds / (percent - before)
        });
        let soonest = left.reduce(f64::min)?;
        // Years are as good as never.
        Duration::try_from_secs_f64(soonest).ok()
    }

    /// Returns the number of OOM kills since the boot of the machine.
    pub(crate) fn kills(&self) -> u64 {
        self.counters.get_or_zero("oom_kill")
    }
}

fn used_percent(memory: &Values) -> f64 {
    let total = memory.get_or_zero("MemTotal");
    total.saturating_sub(memory.get_or_zero("MemAvailable")) as f64 * 100.0 / total.max(1) as f64
}

/// Last looks, reduced to the data that reports show.
#[derive(Default)]
pub(crate) struct History {
    last: Option<(Instant, Values)>,
    moments: VecDeque<Moment>,
}

impl History {
    pub(crate) fn add(&mut self, sight: &MemorySnapshot) {
        let (at, counters) = self
            .last
            .take()
            .unwrap_or_else(|| (sight.at, sight.counters.clone()));
        let seconds = (sight.at - at).as_secs_f64();
        // The first look has no rates.
        let rate = |sum: fn(&Values) -> u64| {
            let grown = sum(&sight.counters).saturating_sub(sum(&counters));
            if seconds > 0.0 {
                grown as f64 / seconds
            } else {
                0.0
            }
        };
        let (fullest, percent) = sight.fullest();
        if self.moments.len() == LOOKS {
            self.moments.pop_front();
        }
        self.moments.push_back(Moment {
            time: sight.time.clone(),
            machine_percent: sight.machine_percent,
            fullest,
            fullest_percent: percent,
            some_percent: sight.pressure.map(|pressure| pressure.some.avg10),
            full_percent: sight.pressure.map(|pressure| pressure.full.avg10),
            direct_reclaims: rate(|counters| counters.sum_of("allocstall")),
            swap_ins: rate(|counters| {
                SWAP_INS
                    .into_iter()
                    .map(|name| counters.get_or_zero(name))
                    .sum()
            }),
            // Kernels before 5.9 have one number for both kinds.
            refaults: rate(|counters| counters.sum_of("workingset_refault")),
        });
        self.last = Some((sight.at, sight.counters.clone()));
    }

    /// Returns the last looks, the newest last.
    pub(crate) fn moments(&self) -> impl Iterator<Item = &Moment> {
        self.moments.iter()
    }
}

/// Row of one look at the machine, with rates per second since the look before.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Moment {
    #[serde(serialize_with = "clock::serialize")]
    time: Zoned,
    machine_percent: f64,
    fullest: OomDomain,
    fullest_percent: f64,
    /// Percent of the last ten seconds in which a task waited for memory. None if this kernel does not provide the
    /// number.
    some_percent: Option<f64>,
    /// Percent of the last ten seconds in which all tasks waited for memory.
    full_percent: Option<f64>,
    direct_reclaims: f64,
    /// Pages per second.
    swap_ins: f64,
    /// Pages per second.
    refaults: f64,
}

impl Moment {
    pub(crate) const HEADER: &'static str =
        "TIME      USED%  SOME%  FULL%  RECLAIM/s  SWAPIN/s  REFAULT/s  FULLEST";
}

impl Row for Moment {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let percent =
            |number: Option<f64>| number.map_or("-".into(), |number| format!("{number:.1}"));
        writeln!(
            out,
            "{:<8} {:>6.1} {:>6} {:>6} {:>10.0} {:>9.0} {:>10.0}  {:.0}% {}",
            clock::time_of_day(&self.time),
            self.machine_percent,
            percent(self.some_percent),
            percent(self.full_percent),
            self.direct_reclaims,
            self.swap_ins,
            self.refaults,
            self.fullest_percent,
            self.fullest.cgroup.as_deref().unwrap_or("(the machine)"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(name: &str, current: u64) -> MemoryCgroup {
        MemoryCgroup {
            folder: PathBuf::from("/sys/fs/cgroup").join(name),
            path: format!("/{name}"),
            current,
            held: current - 100,
            limit: 1000,
            hits: 0,
            oom_kills: 0,
        }
    }

    fn sight(
        seconds: u64,
        machine_percent: f64,
        groups: &[MemoryCgroup],
        counters: &str,
    ) -> MemorySnapshot {
        MemorySnapshot {
            at: Instant::now() + Duration::from_secs(seconds),
            time: clock::now(),
            machine_percent,
            groups: groups.to_vec(),
            remark: None,
            counters: Values::parse(counters),
            pressure: None,
        }
    }

    #[test]
    fn the_fullest_place_is_found_and_followed() {
        let groups = [group("a", 600), group("b", 900)];
        let looked = sight(0, 60.0, &groups, "");
        let (place, percent) = looked.fullest();
        assert_eq!((place.name(), percent), ("/b", 80.0));
        assert_eq!(looked.percent(&place), 80.0);
        // The cgroup was removed.
        let (machine, percent) = sight(0, 80.0, &[], "").fullest();
        assert_eq!((machine.cgroup.as_deref(), percent), (None, 80.0));
        assert_eq!(sight(0, 80.0, &groups[..1], "").percent(&place), 0.0);
        assert_eq!(looked.percent(&machine), 60.0);
    }

    #[test]
    fn the_mark_is_foreseen_wherever_it_is_passed_first() {
        let start = sight(0, 60.0, &[group("a", 200), group("b", 300)], "");
        let mut now = sight(0, 61.0, &[group("a", 400), group("b", 300)], "");
        now.at = start.at + Duration::from_secs(2);
        // The machine grows by 0.5 % a second, /a from 10 % to 30 % in two, and /b not at all.
        let seconds = |mark| {
            now.until(mark, &start)
                .map(|left| left.as_secs_f64().round())
        };
        assert_eq!(seconds(80.0), Some(5.0));
        assert_eq!(seconds(61.5), Some(1.0));
        assert_eq!(seconds(25.0), Some(0.0));
        assert_eq!(start.until(80.0, &now), None);
        // /c is new.
        now.groups.push(group("c", 300));
        assert_eq!(now.until(80.0, &start).map(|left| left.as_secs()), Some(5));
        now.groups.push(group("d", 900));
        assert_eq!(now.until(80.0, &start).map(|left| left.as_secs()), Some(0));
    }

    #[test]
    fn a_remark_is_made_once() {
        let without = sight(0, 60.0, &[], "");
        let mut with = sight(1, 60.0, &[], "");
        with.remark = Some("too many".into());
        assert_eq!(without.new_remark(None), None);
        assert_eq!(with.new_remark(None), Some("too many"));
        assert_eq!(with.new_remark(Some(&without)), Some("too many"));
        assert_eq!(with.new_remark(Some(&with)), None);
    }

    #[test]
    fn what_is_not_available_is_used() {
        let memory = Values::parse("MemTotal: 1000 kB\nMemAvailable: 150 kB\n");
        assert_eq!(used_percent(&memory), 85.0);
        assert_eq!(used_percent(&Values::default()), 0.0);
    }

    #[test]
    fn a_minute_is_remembered_with_rates() {
        let mut history = History::default();
        for second in 0..LOOKS as u64 + 7 {
            let stalls = format!("allocstall_normal {}\nallocstall_movable 5\n", 11 * second);
            let mut looked = sight(0, second as f64, &[], &stalls);
            looked.at = history
                .last
                .as_ref()
                .map_or(looked.at, |(at, _)| *at + Duration::from_secs(1));
            history.add(&looked);
        }
        let moments: Vec<_> = history.moments().collect();
        assert_eq!(moments.len(), LOOKS);
        assert_eq!(moments[0].machine_percent, 7.0);
        assert!((moments[0].direct_reclaims - 11.0).abs() < 1e-9);
    }
}
