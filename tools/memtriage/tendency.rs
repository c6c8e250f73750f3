//! Judgement of one process or cgroup: whether it grows, by what and how fast, when it reaches a limit, and which
//! command shows more.

use std::path::Path;
use std::time::Duration;

use memtools::host::memory_cgroups;
use memtools::host::values::Values;

use crate::accounting::Accounting;
use crate::findings::{Finding, Level, age};
use crate::processes::ProcessUsage;
use crate::screen::size;

/// Growth per second from which a subject grows: allocators and caches of a program at rest vary by less.
const GROWS: f64 = 100.0 * 1024.0;
/// Growth per second that is worth a look.
const FAST: f64 = (1 << 20) as f64;
/// Share of a limit, in percent, that is worth a look.
const NEARLY_ALL: f64 = 90.0;
/// Time to the limit from which on there is something to do.
const SOON: Duration = Duration::from_secs(600);

/// Memory that is left below a limit.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Headroom {
    /// Bytes until the limit is reached.
    left: u64,
    /// Share of the limit that is in use, in percent.
    percent: f64,
    /// The limit, such as `the limit of /db, 512M`.
    limit: String,
}

impl Headroom {
    /// Returns what is left below the nearest limit: that of this cgroup or of one above it, or the machine's memory.
    /// `folder` is the cgroup's directory, and `memory` has the numbers of /proc/meminfo.
    pub(crate) fn of(folder: &Path, memory: &Values) -> Self {
        let [total, left] = ["MemTotal", "MemAvailable"].map(|name| memory.get_or_zero(name));
        let machine = Self {
            left,
            percent: 100.0 - left as f64 * 100.0 / total.max(1) as f64,
            limit: format!("the machine's memory, {}", size(total)),
        };
        let limits = memory_cgroups::limits_of(folder).into_iter();
        let limits = limits.map(|group| Self {
            left: group.limit.saturating_sub(group.held),
            percent: group.percent(),
            limit: format!("the limit of {}, {}", group.path, size(group.limit)),
        });
        let all = limits.chain([machine.clone()]);
        all.min_by_key(|limit| limit.left).unwrap_or(machine)
    }
}

/// Two looks at a process or cgroup.
pub(crate) struct Looks<'a> {
    pub(crate) before: &'a Accounting,
    pub(crate) now: &'a Accounting,
    /// Time between the looks.
    pub(crate) between: Duration,
    /// The process, or that of the cgroup which has grown most, or else the largest one. None if there is none.
    pub(crate) process: Option<&'a ProcessUsage>,
    /// Time since the start of the process; None for a cgroup.
    pub(crate) age: Option<Duration>,
    pub(crate) headroom: Headroom,
}

impl Looks<'_> {
    /// Judges the subject. Look: it grows by 1 MiB per second, or has nine tenths of its limit. Act: it reaches the
    /// limit within ten minutes.
    pub(crate) fn judge(&self) -> Finding {
        let total = self.now.total;
        let rate = total.saturating_sub(self.before.total) as f64 / self.between.as_secs_f64();
        let grows = rate >= GROWS;
        let part = self.main_part(grows);
        let mut text = if grows {
            format!("grows by {}/s, most of it {part}", size(rate as u64))
        } else {
            let bytes = self.now.part(part).unwrap_or_default();
            let share = bytes as f64 * 100.0 / total.max(1) as f64;
            format!("does not grow now; {share:.0} % of it is {part}")
        };
        match (self.age, self.process) {
            (Some(since), _) => {
                text += &format!("; {} since its start {} ago", size(total), age(since));
            }
            (None, Some(process)) => {
                text += &format!("; most in {} (pid {})", process.comm, process.pid);
            }
            (None, None) => {}
        }
        let Headroom {
            left,
            percent,
            limit,
        } = &self.headroom;
        text += &format!("; {} left of {limit}", size(*left));
        let mut level = Level::Healthy;
        if rate >= FAST || *percent >= NEARLY_ALL {
            level = Level::Look;
        }
        if grows {
            let time = Duration::try_from_secs_f64(*left as f64 / rate).unwrap_or(Duration::MAX);
            text += &format!(", full in {}", age(time));
            if time <= SOON {
                level = Level::Act;
            }
        }
        Finding {
            level,
            rule: "tendency",
            evidence: text,
            next: Some(self.next(part, grows)),
            culprit: None,
        }
    }

    /// Returns the part of memory that has grown most, if the subject grows, or else is largest. Pages that were swapped
    /// out belong to another part.
    fn main_part(&self, grows: bool) -> &'static str {
        let parts = self.now.parts.iter();
        let parts = parts.filter(|part| !["swapped out", "swap cache"].contains(&part.name));
        let weight = |name: &str, bytes: u64| {
            let before = if grows { self.before.part(name) } else { None };
            bytes.saturating_sub(before.unwrap_or_default())
        };
        let most = parts.max_by_key(|part| weight(part.name, part.bytes));
        most.map_or("unaccounted", |part| part.name)
    }

    /// Returns the command that shows most about a part: who allocates, if it grows, and else what it consists of.
    fn next(&self, part: &str, grows: bool) -> String {
        match part {
            "slab" | "slab, reclaimable" => return "memleak -k --by-cache 10".into(),
            "kernel" | "kernel, other" | "kernel stacks" | "per-CPU data" | "vmalloc" => {
                return "memleak -k 10".into();
            }
            _ => {}
        }
        let Some(ProcessUsage { pid, .. }) = self.process else {
            return "memtriage --by process".into();
        };
        match part {
            "heap (brk)" | "anonymous mappings" | "anonymous" if grows => {
                format!("memleak -p {pid} 10")
            }
            "heap (brk)" | "anonymous mappings" | "anonymous" => format!("heapscan -p {pid}"),
            "files, read only" | "file cache" => format!("ffaults -p {pid} -d 10"),
            "huge page pool" => format!("hfaults -p {pid} -d 10"),
            // Stacks, shared memory, page tables: the code that touches new pages.
            _ => format!("faults --bytes -p {pid} -d 10"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn judged(before: [u64; 3], now: [u64; 3], left: u64) -> (Level, String, String) {
        let accounting = |[heap, files, swapped]: [u64; 3]| {
            let parts = [
                ("heap (brk)", heap),
                ("files, read only", files),
                ("swapped out", swapped),
            ];
            Accounting::new("all", heap + files + swapped, parts)
        };
        let process = ProcessUsage {
            pid: 7,
            ..ProcessUsage::default()
        };
        let looks = Looks {
            before: &accounting(before),
            now: &accounting(now),
            between: Duration::from_millis(500),
            process: Some(&process),
            age: Some(Duration::from_secs(180)),
            headroom: Headroom {
                left,
                percent: 50.0,
                limit: "the limit of /db, 512M".into(),
            },
        };
        let finding = looks.judge();
        (
            finding.level,
            finding.evidence,
            finding.next.unwrap_or_default(),
        )
    }

    #[test]
    fn growth_is_judged_by_its_part_and_the_time_left() {
        assert_eq!(
            judged([30 * MIB, 50 * MIB, 0], [34 * MIB, 50 * MIB, 0], 256 * MIB),
            (
                Level::Act,
                "grows by 8.0M/s, most of it heap (brk); 84.0M since its start 3 min ago; 256M left of the limit of \
                 /db, 512M, full in 32 s"
                    .into(),
                "memleak -p 7 10".into()
            )
        );
        let (level, text, next) = judged([MIB, 50 * MIB, 0], [MIB, 51 * MIB, 0], u64::MAX);
        assert_eq!(
            (level, &*next),
            (Level::Look, "ffaults -p 7 -d 10"),
            "{text}"
        );
    }

    /// Pages that move to swap are no growth, and what is at rest is examined, not traced.
    #[test]
    fn what_is_at_rest_is_examined() {
        let (level, text, next) =
            judged([60 * MIB, 5 * MIB, 0], [20 * MIB, 5 * MIB, 40 * MIB], MIB);
        assert_eq!((level, &*next), (Level::Healthy, "heapscan -p 7"));
        assert!(
            text.starts_with("does not grow now; 31 % of it is heap (brk);"),
            "{text}"
        );
    }
}
