//! Transparent huge pages of a process, and the share of them that has only zeros: memory that smaller pages would
//! not have taken.
//!
//! A sample of the huge pages is read by process_vm_readv(2), which neither stops the process nor changes anything.
//! The kernel's own search for underused huge pages looks for zeros, too (6.12).

use std::fs::File;
use std::io::{self, IoSliceMut, Write};
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use memtools::host::values::Values;
use memtools::print::output::Row;
use memtools::process::proc;
use memtools::process::smaps::{self, MappedMemory};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use serde::Serialize;

use crate::processes::ProcessUsage;
use crate::screen::size;

const PAGE: usize = 4096;
const PAGES: usize = 512;
const HUGE_PAGE: u64 = (PAGE * PAGES) as u64;
/// Maximum number of huge pages that are read of a process.
const SAMPLES: usize = 64;
/// Maximum number of addresses that are checked for a huge page.
const PLACES: u64 = 8192;
/// Number of processes whose huge pages are counted.
const CANDIDATES: usize = 5;
/// Time limit for reading huge pages. Those that were read by then are the sample.
const READ_TIME: Duration = Duration::from_millis(300);
/// Time limit for finding the process with the most huge pages and reading these. Without a result by then, no
/// process is judged.
const TIME: Duration = Duration::from_millis(600);

/// Transparent huge pages of a process.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename = "huge_pages")]
pub(crate) struct HugePages {
    pub(crate) pid: u32,
    pub(crate) bytes: u64,
    /// Number of huge pages that were read.
    pub(crate) samples: usize,
    /// Estimated bytes in pages of 4 KiB that have only zeros.
    pub(crate) zero_bytes: u64,
    /// Two standard errors of `zero_bytes`; 0 if all were read.
    pub(crate) error_bytes: u64,
}

impl HugePages {
    /// Samples the huge pages of a process with these mappings. None if the process has none, or if they cannot be
    /// identified: only root sees physical addresses.
    pub(crate) fn of(pid: u32, mappings: &[MappedMemory]) -> Option<Self> {
        let bytes: u64 = mappings.iter().map(|one| one.huge).sum();
        let shares = shares_of_zeros(pid, mappings, Instant::now() + READ_TIME).ok()?;
        (!shares.is_empty()).then(|| Self::estimate(pid, bytes, &shares))
    }

    /// Estimates the zeros in all huge pages from the shares of zeros in a sample. Each huge page is equally likely
    /// to be in the sample.
    fn estimate(pid: u32, bytes: u64, shares: &[f64]) -> Self {
        let (count, all) = (shares.len() as f64, bytes as f64 / HUGE_PAGE as f64);
        let mean = shares.iter().sum::<f64>() / count;
        let squares: f64 = shares.iter().map(|share| (share - mean).powi(2)).sum();
        let variance = squares / (count - 1.0).max(1.0) / count;
        let left_out = (1.0 - count / all).max(0.0);
        Self {
            pid,
            bytes,
            samples: shares.len(),
            zero_bytes: (mean * bytes as f64) as u64,
            error_bytes: (2.0 * (variance * left_out).sqrt() * bytes as f64) as u64,
        }
    }

    /// Describes the result, such as `512M in transparent huge pages, of which 98.4 % ± 1 % have only zeros`.
    pub(crate) fn summary(&self) -> String {
        let percent = |bytes: u64| bytes as f64 * 100.0 / self.bytes.max(1) as f64;
        let error = match self.error_bytes {
            0 => String::new(),
            bytes => format!(" ± {:.0} %", percent(bytes).ceil()),
        };
        format!(
            "{} in transparent huge pages, of which {:.1} %{error} have only zeros",
            size(self.bytes),
            percent(self.zero_bytes)
        )
    }
}

/// Running search for the process that has most huge pages.
pub(crate) struct Search {
    answer: Receiver<Option<HugePages>>,
    until: Instant,
}

impl Search {
    /// Begins the search among the largest of these processes.
    pub(crate) fn begin(processes: &[ProcessUsage]) -> Self {
        let until = Instant::now() + TIME;
        let mut processes: Vec<(u64, u32)> = processes
            .iter()
            .map(|usage| (usage.anon, usage.pid))
            .collect();
        processes.sort_unstable_by(|a, b| b.cmp(a));
        processes.truncate(CANDIDATES);
        let (sender, answer) = channel();
        thread::spawn(move || {
            let huge = |pid: u32| {
                let rollup = Values::read(proc::file(pid, "smaps_rollup")).ok()?;
                Some((rollup.get_or_zero("AnonHugePages"), pid))
            };
            let most = processes.into_iter().filter_map(|(_, pid)| huge(pid)).max();
            let found = most
                .filter(|(bytes, _)| *bytes > 0)
                .and_then(|(_, pid)| HugePages::of(pid, &smaps::read(pid).ok()?));
            // The receiver may not wait any more.
            let _ = sender.send(found);
        });
        Self { answer, until }
    }

    /// Returns the result of the search. None if nothing was found, or not in time.
    pub(crate) fn end(self) -> Option<HugePages> {
        let left = self.until.saturating_duration_since(Instant::now());
        self.answer.recv_timeout(left).ok()?
    }
}

impl Row for HugePages {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "\n{}", self.summary())
    }
}

/// Returns the share of zeros of each huge page that is read. The addresses where a huge page can be are visited once
/// each, in an order that spreads them. No read is begun after `deadline`.
fn shares_of_zeros(pid: u32, mappings: &[MappedMemory], deadline: Instant) -> io::Result<Vec<f64>> {
    let pagemap = File::open(proc::file(pid, "pagemap"))?;
    let places = Places::of(mappings);
    let mut memory = vec![0; HUGE_PAGE as usize];
    let mut shares = Vec::new();
    for number in 0..places.count.min(PLACES) {
        let at = places.address(number);
        if is_huge_page(&pagemap, at)? && read(pid, at, &mut memory) {
            shares.push(share_of_zeros(&memory));
        }
        if shares.len() == SAMPLES || Instant::now() > deadline {
            break;
        }
    }
    Ok(shares)
}

/// Places where huge pages can be, in runs: the first address and the number of places of each run.
struct Places {
    runs: Vec<(u64, u64)>,
    count: u64,
    step: u64,
}

impl Places {
    fn of(mappings: &[MappedMemory]) -> Self {
        let run = |one: &MappedMemory| {
            let first = one
                .mapping
                .range
                .start
                .checked_next_multiple_of(HUGE_PAGE)?;
            let bytes = one.mapping.range.end.checked_sub(first)?;
            Some((first, bytes / HUGE_PAGE)).filter(|(_, count)| *count > 0)
        };
        let with_some = mappings.iter().filter(|one| one.huge > 0);
        let runs: Vec<_> = with_some.filter_map(run).collect();
        let count = runs.iter().map(|(_, count)| count).sum();
        // A step near the golden ratio spreads the places best.
        let golden = (count as f64 * 0.618) as u64;
        let step = (golden..).find(|step| gcd(*step, count) == 1).unwrap_or(1);
        Self { runs, count, step }
    }

    /// Returns the address of the place with this number, below `count`.
    fn address(&self, number: u64) -> u64 {
        let place = u128::from(number) * u128::from(self.step) % u128::from(self.count);
        let mut place = place as u64;
        for (first, count) in &self.runs {
            if place < *count {
                return first + place * HUGE_PAGE;
            }
            place -= count;
        }
        0
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Whether one huge page is at this address: 512 present pages with consecutive physical addresses, the first at an
/// address where a huge page can begin. (Bits of an entry: Documentation/admin-guide/mm/pagemap.rst.)
fn is_huge_page(pagemap: &File, at: u64) -> io::Result<bool> {
    const PRESENT: u64 = 1 << 63;
    const FRAME: u64 = (1 << 55) - 1;
    let mut entries = [0; PAGES * 8];
    pagemap.read_exact_at(&mut entries, at / PAGE as u64 * 8)?;
    let mut frames = entries.chunks_exact(8).map(|entry| {
        let entry = entry.try_into().map_or(0, u64::from_ne_bytes);
        (entry & PRESENT != 0).then_some(entry & FRAME)
    });
    let Some(first) = frames.next().flatten() else {
        return Ok(false);
    };
    let one_after_the_other = || {
        (first + 1..)
            .zip(frames)
            .all(|(next, frame)| frame == Some(next))
    };
    Ok(first != 0 && first % PAGES as u64 == 0 && one_after_the_other())
}

fn read(pid: u32, at: u64, memory: &mut [u8]) -> bool {
    let remote = RemoteIoVec {
        base: at as usize,
        len: memory.len(),
    };
    let wanted = memory.len();
    let local = &mut [IoSliceMut::new(memory)];
    let thread = Pid::from_raw(proc::living_thread(pid).cast_signed());
    process_vm_readv(thread, local, &[remote]) == Ok(wanted)
}

fn share_of_zeros(memory: &[u8]) -> f64 {
    let zeros = [0; PAGE];
    let empty = memory.chunks_exact(PAGE).filter(|page| *page == zeros);
    empty.count() as f64 / PAGES as f64
}

/// Whether transparent huge pages have a tenth of all memory by /proc/meminfo, which makes a search worthwhile.
pub(crate) fn worth_searching(memory: &Values) -> bool {
    memory.get_or_zero("AnonHugePages") >= memory.get_or_zero("MemTotal") / 10
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::path::PathBuf;

    use memtools::process::proc::Mapping;

    use super::*;

    fn mapped(range: Range<u64>, huge: u64) -> MappedMemory {
        MappedMemory {
            mapping: Mapping {
                range,
                executable: false,
                file_offset: 0,
                device: (0, 0),
                inode: 0,
                path: PathBuf::new(),
            },
            resident: huge,
            anonymous: huge,
            huge,
            hugetlb: 0,
            swap: 0,
        }
    }

    #[test]
    fn each_place_is_visited_once() {
        let mappings = [
            mapped(PAGE as u64..3 * HUGE_PAGE, HUGE_PAGE),
            mapped(4 * HUGE_PAGE..9 * HUGE_PAGE - 1, HUGE_PAGE),
            mapped(10 * HUGE_PAGE..20 * HUGE_PAGE, 0),
            mapped(u64::MAX - PAGE as u64..u64::MAX, HUGE_PAGE),
            mapped(20 * HUGE_PAGE + 1..20 * HUGE_PAGE + 9, HUGE_PAGE),
        ];
        let places = Places::of(&mappings);
        let mut visited: Vec<u64> = (0..places.count)
            .map(|number| places.address(number) / HUGE_PAGE)
            .collect();
        assert_ne!(visited, [1, 2, 4, 5, 6, 7], "not spread");
        visited.sort_unstable();
        assert_eq!(visited, [1, 2, 4, 5, 6, 7]);
        assert_eq!(Places::of(&[]).count, 0);
    }

    #[test]
    fn an_estimate_says_by_how_much_it_may_be_wrong() {
        let all = HugePages::estimate(7, 4 * HUGE_PAGE, &[1.0, 0.5, 0.0, 0.5]);
        assert_eq!((all.zero_bytes, all.error_bytes), (2 * HUGE_PAGE, 0));
        assert_eq!(
            all.summary(),
            "8.0M in transparent huge pages, of which 50.0 % have only zeros"
        );
        let some = HugePages::estimate(7, 400 * HUGE_PAGE, &[1.0, 0.5, 0.0, 0.5]);
        assert_eq!(some.zero_bytes, 200 * HUGE_PAGE);
        // The variance is 1/6 for one share, and 1/24 for the mean.
        let error = some.error_bytes as f64 / some.bytes as f64;
        assert!(
            (error - 2.0 * (0.99_f64 / 24.0).sqrt()).abs() < 1e-6,
            "{error}"
        );
        let one = HugePages::estimate(7, HUGE_PAGE, &[1.0]);
        assert_eq!((one.zero_bytes, one.error_bytes), (HUGE_PAGE, 0));
    }

    #[test]
    fn pages_of_zeros_are_counted() {
        let mut memory = vec![0; HUGE_PAGE as usize];
        memory[PAGE * 3 + 17] = 1;
        assert!((share_of_zeros(&memory) - 511.0 / 512.0).abs() < 1e-9);
    }
}
