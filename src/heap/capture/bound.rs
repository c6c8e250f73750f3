//! The bound on a pause, which the clock keeps: a copy that reaches it is given up, and the process runs on at once. The
//! copy is tried again, as most of the time that it takes depends on what else the machine does. What a try has
//! measured says whether another one makes sense, and which bound would do.

use std::time::{Duration, Instant};

use super::crew::Late;
use crate::print::text;

/// Times between tries, in which the process runs.
const GAPS: [Duration; 3] = [
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(400),
];
/// Ratio of the necessary time to the bound beyond which there is no further try.
const HOPELESS: u32 = 10;
/// Bytes per second that a worker copies at the most. 7 GB/s were measured.
const FASTEST: u64 = 10_000_000_000;
/// Shortest time to stop a thread, to read its registers, and to let it go on.
const THREAD: Duration = Duration::from_micros(4);
/// Part of the bound that is kept for late wake-ups of ours, at most [`MOST_MARGIN`].
const MARGIN: u32 = 16;
const MOST_MARGIN: Duration = Duration::from_millis(20);

/// Clock of one pause.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pause {
    /// Time at which the first thread may have stopped.
    pub(super) begin: Instant,
    /// Time at which the threads have to be released. None: no bound.
    pub(super) end: Option<Instant>,
}

impl Pause {
    /// Begins a pause with this bound, of which the release takes a part.
    pub(super) fn begin(bound: Duration, release: Duration) -> Self {
        let begin = Instant::now();
        let margin = (bound / MARGIN).min(MOST_MARGIN);
        let work = bound.saturating_sub(margin + release);
        Self {
            begin,
            end: begin.checked_add(work),
        }
    }

    /// Returns the state of a copy that has reached the bound in a step that has begun at `since`.
    pub(super) fn overrun(&self, step: Step, since: Instant, late: Late) -> Overrun {
        Overrun {
            step,
            before: since.saturating_duration_since(self.begin),
            took: since.elapsed(),
            late,
            release: Duration::ZERO,
        }
    }

    /// Returns the time that is left.
    pub(super) fn left(&self) -> Duration {
        let left = |end: Instant| end.saturating_duration_since(Instant::now());
        self.end.map_or(Duration::MAX, left)
    }

    pub(super) fn is_over(&self) -> bool {
        self.end.is_some_and(|end| Instant::now() >= end)
    }

    /// Keeps more of the bound for the release.
    pub(super) fn reserve(&mut self, more: Duration) {
        self.end = self.end.and_then(|end| end.checked_sub(more));
    }
}

/// Steps of a copy, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Seizes the threads, which are counted, before any has stopped.
    Seize,
    /// Stops the threads, which are counted.
    Stop,
    /// Reads the registers of the threads, which are counted.
    Registers,
    /// Lists mappings and pages, in bytes of address space.
    List,
    /// Finds out which pages are idle.
    Idle,
    /// Copies pages, in bytes.
    Copy,
}

/// State of a copy when it reached the bound.
#[derive(Debug, Clone, Copy)]
pub(super) struct Overrun {
    pub(super) step: Step,
    /// Time that the steps before took.
    pub(super) before: Duration,
    /// Time that this step had.
    pub(super) took: Duration,
    pub(super) late: Late,
    /// Time that it took to let all threads go on.
    pub(super) release: Duration,
}

impl Overrun {
    /// Returns the time that the whole copy would have taken; at least that, if the step was not the last one. None
    /// if the step has done nothing.
    fn needed(&self) -> Option<Duration> {
        let Late { done, total, .. } = self.late;
        if done == 0 {
            return None;
        }
        let ratio = (total as f64 / done as f64).max(1.0);
        let whole = self.took.mul_f64(match self.step {
            // To stop the threads, to read their registers and to release them takes at least as long each.
            Step::Seize => 4.0 * ratio,
            // Most of the time was for all threads, when few had stopped.
            Step::Stop => ratio.min(4.0),
            _ => ratio,
        });
        Some(self.before + whole + self.release)
    }

    /// Returns what was done in which time.
    fn text(&self) -> String {
        let Late { done, total, .. } = self.late;
        let (took, before) = (milliseconds(self.took), milliseconds(self.before));
        let (done_bytes, all_bytes) = (text::bytes(done), text::bytes(total));
        match self.step {
            Step::Seize => format!(
                "{done} of {total} threads were seized after {took} ms, and none had stopped"
            ),
            Step::Stop => format!("{done} of {total} threads had stopped after {took} ms"),
            Step::Registers => format!(
                "all {total} threads had stopped after {before} ms, and the registers of {done} were read in {took} ms"
            ),
            Step::List => format!(
                "the page tables of {done_bytes} of {all_bytes} of mapped memory were read in {took} ms, after {before} \
                 ms to stop all threads"
            ),
            Step::Idle => format!(
                "the marks of used pages were not read in {took} ms, after {before} ms to stop all threads and to list \
                 their pages"
            ),
            Step::Copy => format!(
                "{done_bytes} of {all_bytes} were copied in {took} ms, after {before} ms to stop all threads and to list \
                 their pages"
            ),
        }
    }
}

/// Returns a time in milliseconds, with a decimal place if it is not a whole number of them.
pub(super) fn milliseconds(time: Duration) -> String {
    let tenths = (time.as_secs_f64() * 1e4).round();
    format!("{}", tenths / 10.0)
}

/// Tries that have reached the bound.
#[derive(Debug)]
pub(super) struct Overruns {
    bound: Duration,
    tries: Vec<Overrun>,
}

impl Overruns {
    pub(super) fn of(bound: Duration) -> Self {
        Self {
            bound,
            tries: Vec::new(),
        }
    }

    /// Returns the longest time that it took to let all threads go on, but at most a quarter of the bound.
    pub(super) fn release(&self) -> Duration {
        let times = self.tries.iter().map(|overrun| overrun.release);
        times.max().unwrap_or_default().min(self.bound / 4)
    }

    /// Adds a try. Returns the time to wait for before the next one, or None if there is none.
    pub(super) fn add(&mut self, overrun: Overrun) -> Option<Duration> {
        let gap = GAPS.get(self.tries.len()).copied();
        self.tries.push(overrun);
        let most = self.bound * HOPELESS;
        gap.filter(|_| overrun.needed().is_none_or(|needed| needed <= most))
    }

    /// Returns the message that the process was not copied. `or` is a remedy besides a higher bound, if the copy of
    /// the pages takes too long.
    pub(super) fn refusal(&self, pid: u32, or: &str) -> String {
        let count = match self.tries.len() {
            1 => "1 try".to_owned(),
            count => format!("{count} tries"),
        };
        let best = self
            .tries
            .iter()
            .min_by_key(|overrun| overrun.needed().unwrap_or(Duration::MAX));
        let what = best.map_or(String::new(), Overrun::text);
        let most = self.tries.iter().filter_map(Overrun::needed).max();
        let last = best.is_some_and(|overrun| overrun.step == Step::Copy);
        let remedy = match most {
            Some(needed) => {
                let bound = (needed.as_millis() * 3 / 2).next_multiple_of(10);
                let how = if last { "" } else { "at least " };
                format!(
                    "; if a longer pause does no harm: --max-pause {bound} ({how}{} ms are necessary)",
                    needed.as_millis()
                )
            }
            None => String::new(),
        };
        format!(
            "process {pid} was not copied within --max-pause {} in {count}, and runs on: {what}{remedy}{}",
            self.bound.as_millis(),
            if last { or } else { "" }
        )
    }
}

/// Returns the message that a process cannot be copied within the bound by far, whatever else the machine does; None
/// if it may be possible.
pub(super) fn hopeless(
    pid: u32,
    bound: Duration,
    bytes: u64,
    threads: usize,
    workers: usize,
) -> Option<String> {
    let copy = Duration::from_secs_f64(bytes as f64 / (FASTEST * workers as u64) as f64);
    let least = copy + THREAD * u32::try_from(threads).unwrap_or(u32::MAX);
    (least > bound * HOPELESS).then(|| {
        format!(
            "process {pid} cannot be copied within --max-pause {}: {} of memory and {threads} threads take {} ms at the \
             least; if a longer pause does no harm: --max-pause {}",
            bound.as_millis(),
            text::bytes(bytes),
            least.as_millis(),
            (least.as_millis() * 3).next_multiple_of(10)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(time: u64) -> Duration {
        Duration::from_millis(time)
    }

    fn overrun(step: Step, before: u64, took: u64, done: u64, total: u64) -> Overrun {
        Overrun {
            step,
            before: ms(before),
            took: ms(took),
            late: Late::at(done, total),
            release: ms(1),
        }
    }

    #[test]
    fn what_was_done_in_the_time_tells_the_time_for_all() {
        let half = overrun(Step::Copy, 4, 14, 200, 400);
        assert_eq!(half.needed(), Some(ms(4 + 28 + 1)));
        assert_eq!(overrun(Step::Copy, 4, 14, 0, 400).needed(), None);
        assert_eq!(overrun(Step::Seize, 0, 3, 500, 1000).needed(), Some(ms(25)));
        assert_eq!(overrun(Step::Stop, 0, 13, 31, 4004).needed(), Some(ms(53)));
        // More pages than were counted.
        assert_eq!(overrun(Step::List, 4, 14, 9, 0).needed(), Some(ms(19)));
    }

    #[test]
    fn a_copy_is_tried_again_unless_it_needs_ten_times_the_bound() {
        let mut overruns = Overruns::of(ms(20));
        for gap in GAPS {
            assert_eq!(overruns.add(overrun(Step::Copy, 4, 14, 10, 100)), Some(gap));
        }
        assert_eq!(overruns.add(overrun(Step::Copy, 4, 14, 99, 100)), None);
        for (done, expected) in [(9, Some(GAPS[0])), (7, None), (0, Some(GAPS[0]))] {
            let mut overruns = Overruns::of(ms(20));
            let gap = overruns.add(overrun(Step::Copy, 4, 14, done, 100));
            assert_eq!(gap, expected, "{done}");
        }
    }

    #[test]
    fn a_refusal_names_what_was_measured_and_the_bound_that_would_do() {
        let mut overruns = Overruns::of(ms(20));
        overruns.add(overrun(Step::Copy, 4, 14, 200_000_000, 400_000_000));
        overruns.add(overrun(Step::Copy, 4, 14, 100_000_000, 400_000_000));
        assert_eq!(
            overruns.refusal(7, ", or --pre-copy"),
            "process 7 was not copied within --max-pause 20 in 2 tries, and runs on: 200.0 MB of 400.0 MB were copied in 14 ms, \
             after 4 ms to stop all threads and to list their pages; if a longer pause does no harm: --max-pause 100 \
             (61 ms are necessary), or --pre-copy"
        );
        let mut overruns = Overruns::of(ms(20));
        overruns.add(overrun(Step::Stop, 0, 18, 6_000, 12_000));
        assert_eq!(
            overruns.refusal(7, ", or --pre-copy"),
            "process 7 was not copied within --max-pause 20 in 1 try, and runs on: 6000 of 12000 threads had stopped after \
             18 ms; if a longer pause does no harm: --max-pause 60 (at least 37 ms are necessary)"
        );
    }

    #[test]
    fn what_no_machine_copies_in_the_time_is_refused_at_once() {
        assert_eq!(hopeless(7, ms(250), 49_000_000_000, 3, 2), None);
        let refused = hopeless(7, ms(250), 60_000_000_000, 3, 2).expect("hopeless");
        assert!(
            refused.contains("60.0 GB of memory and 3 threads take 3000 ms at the least")
                && refused.ends_with("--max-pause 9000"),
            "{refused}"
        );
        assert_eq!(hopeless(7, ms(5), 0, 12_000, 2), None);
        assert!(hopeless(7, ms(4), 0, 12_000, 2).is_some());
    }

    #[test]
    fn the_release_and_a_margin_are_part_of_the_bound() {
        let mut pause = Pause::begin(ms(160), ms(20));
        let time = |pause: &Pause| pause.end.map(|end| end - pause.begin);
        assert_eq!(time(&pause), Some(ms(130)));
        pause.reserve(ms(30));
        assert_eq!(time(&pause), Some(ms(100)));
        assert_eq!(time(&Pause::begin(ms(60_000), ms(0))), Some(ms(59_980)));
        assert!(Pause::begin(ms(1), ms(2)).is_over() && !pause.is_over());
    }
}
