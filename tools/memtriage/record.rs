//! --record: a flight recorder. Nothing is traced until memory is nearly used up, of the machine or of a cgroup's
//! limit. From then on the processes that grow there are traced, and a report is written of each process that the
//! kernel kills.

mod kills;
mod oom_domain;
mod report;
mod tracing;

use std::fs::DirBuilder;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use jiff::Zoned;
use memtools::host::pressure::Trigger;
use memtools::print::output::{Output, Row};
use memtools::print::{clock, text};
use memtools::run::poll::Poller;
use memtools::run::protect;
use serde::Serialize;

use crate::doctor;
use crate::record::oom_domain::{History, MemorySnapshot, OomDomain};
use crate::record::report::{KillReport, ReportFolder};
use crate::record::tracing::Tracing;

/// Minimum time between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// Time between two looks while nothing is traced, as a multiple of the time that a look takes: a third of a
/// thousandth of one CPU.
const REST: u32 = 3000;
/// Maximum time between two looks.
const MAX_REST: Duration = Duration::from_secs(60);
/// Stall time and window of the memory pressure that triggers a look at once: a tenth of a window, which without
/// CAP_SYS_RESOURCE has to be two seconds.
const PRESSURE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));
/// Distance below the mark, in percent, at which tracing ends, ...
const BELOW: f64 = 5.0;
/// ... once memory has stayed below it for this time.
const CALM: Duration = Duration::from_secs(10);

/// Options of --record.
pub(crate) struct Options<'a> {
    /// Folder for the reports.
    pub(crate) folder: &'a Path,
    /// The mark from which on processes are traced, in percent.
    pub(crate) mark_percent: f64,
    /// Number of reports that are kept.
    pub(crate) keep: usize,
    /// Whether text shows the container of a process.
    pub(crate) container: bool,
}

/// Watches until a signal comes. Returns whether a report was written.
///
/// # Errors
/// If the directory cannot be written to, or is not safe from others, or a tool that is needed cannot run.
pub(crate) fn run(options: &Options<'_>, poller: Poller<'_>, output: &mut Output) -> Result<bool> {
    let mut recorder = Recorder::new(options)?;
    doctor::ensure_works(&["memleak", "oomkill"])?;
    let (stalled, window) = PRESSURE;
    let trigger = Trigger::some("/proc/pressure/memory", stalled, window);
    let mut poller = poller;
    match &trigger {
        Ok(trigger) => poller.watch_exception(trigger),
        Err(error) => eprintln!("memtriage: {error:#}; falling back to periodic sampling"),
    }
    // Processes that are started from now on inherit the protection.
    protect::protect_from_oom();
    eprintln!(
        "memtriage: nothing is traced until {} % of the machine's memory, or of a cgroup's limit, are used; \
         Ctrl-C to end",
        options.mark_percent
    );
    loop {
        let start = Instant::now();
        let pause = recorder.look(start, output)?;
        output.flush()?;
        if poller.wait(Some(start + pause))?.stop {
            break;
        }
    }
    Ok(recorder.reports.any())
}

/// State from one look to the next.
struct Recorder {
    /// The mark from which on processes are traced, in percent.
    mark_percent: f64,
    /// Whether text shows the container of a process.
    container: bool,
    reports: ReportFolder,
    history: History,
    /// None while nothing is traced.
    tracing: Option<Tracing>,
    unseen: UnreportedKills,
    /// Time since which much less than the mark has been used.
    calm_since: Option<Instant>,
    before: Option<MemorySnapshot>,
}

impl Recorder {
    fn new(options: &Options<'_>) -> Result<Self> {
        Ok(Self {
            mark_percent: options.mark_percent,
            reports: ReportFolder::into(prepared(options.folder)?, options.keep, options.container),
            container: options.container,
            history: History::default(),
            tracing: None,
            unseen: UnreportedKills::since(MemorySnapshot::now()?.kills()),
            calm_since: None,
            before: None,
        })
    }

    /// Looks at the machine, begins or ends tracing, and writes reports. Returns the time until the next look.
    fn look(&mut self, start: Instant, output: &mut Output) -> Result<Duration> {
        let sight = MemorySnapshot::now()?;
        let cost = start.elapsed();
        if let Some(remark) = sight.new_remark(self.before.as_ref()) {
            eprintln!("memtriage: {remark}");
        }
        self.history.add(&sight);
        let (place, percent) = sight.fullest();
        if self.tracing.is_some() {
            self.report(output)?;
            self.disarm_if_calm(start, &sight, percent, output)?;
        } else if percent >= self.mark_percent {
            self.arm(place, percent, output)?;
        }
        if self.tracing.is_none()
            && let Some(missed) = self.unseen.missed(sight.kills())
        {
            output.row(&missed)?;
        }
        let pause = match (&self.tracing, &self.before) {
            (None, Some(before)) => rest(cost, sight.until(self.mark_percent, before)),
            // The growth is not known yet.
            (None, None) | (Some(_), _) => LOOK,
        };
        self.before = Some(sight);
        Ok(pause)
    }

    /// Begins to trace, as the mark was passed.
    fn arm(&mut self, place: OomDomain, percent: f64, output: &mut Output) -> Result<()> {
        match Tracing::start(place) {
            Ok(started) => {
                output.row(&Passed::Armed(Used::now(started.place(), percent)))?;
                self.tracing = Some(started);
                self.calm_since = None;
            }
            // If memory is short now, the next look may succeed.
            Err(error) => eprintln!("memtriage: {error:#}"),
        }
        Ok(())
    }

    /// Writes a report of each kill that was traced, and traces the processes that grow now.
    fn report(&mut self, output: &mut Output) -> Result<()> {
        let Some(tracing) = &mut self.tracing else {
            return Ok(());
        };
        let batch = tracing.kills();
        self.unseen.mark_reported(batch.processes());
        for kill in batch.kills {
            let report = KillReport::of(kill, self.mark_percent, &self.history, tracing);
            // A disk that is full now may have space for the next report.
            match self.reports.write(&report) {
                Ok(recorded) => output.row(&recorded)?,
                Err(error) => eprintln!("memtriage: {error:#}"),
            }
        }
        for mut started in tracing.follow_growth() {
            started.container = self.container;
            output.row(&started)?;
        }
        Ok(())
    }

    /// Ends the tracing once much less than the mark has been used for some time.
    fn disarm_if_calm(
        &mut self,
        start: Instant,
        sight: &MemorySnapshot,
        percent: f64,
        output: &mut Output,
    ) -> Result<()> {
        let is_calm = percent < self.mark_percent - BELOW;
        self.calm_since = is_calm.then(|| self.calm_since.unwrap_or(start));
        // A kill that oomkill reports after the tracing leaves no report.
        let wait = if self.unseen.awaits(sight.kills()) {
            tracing::EXITED_RETENTION
        } else {
            CALM
        };
        let is_over = self.calm_since.is_some_and(|since| since.elapsed() >= wait);
        if is_over && let Some(tracing) = self.tracing.take() {
            let percent = sight.percent(tracing.place());
            output.row(&Passed::Disarmed(Used::now(tracing.place(), percent)))?;
        }
        Ok(())
    }
}

/// Returns the time between two looks while nothing is traced. `cost` is the time that a look takes, `until` the
/// predicted time until the mark is passed.
fn rest(cost: Duration, until: Option<Duration>) -> Duration {
    let rest = (cost * REST).min(MAX_REST);
    let foreseen = until.map_or(rest, |until| until / 2);
    rest.min(foreseen).max(LOOK)
}

/// Returns the directory for reports, and creates it if it does not exist.
///
/// # Errors
/// If others may write into the directory: they could redirect the files by symbolic links.
fn prepared(folder: &Path) -> Result<PathBuf> {
    let shown = text::escape_bytes(folder.as_os_str().as_encoded_bytes());
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => made.with_context(|| format!("failed to create the directory {shown}"))?,
    }
    let found = folder
        .metadata()
        .with_context(|| format!("failed to examine {shown}"))?;
    ensure!(found.is_dir(), "{shown} is not a directory");
    ensure!(
        found.mode() & 0o022 == 0 && found.uid() == nix::unistd::geteuid().as_raw(),
        "others may write into {shown}: use a directory that only you can write to (chmod go-w)"
    );
    folder
        .canonicalize()
        .with_context(|| format!("failed to find {shown}"))
}

/// Counter of kills without a report: those that came while nothing was traced or before the hook was attached, or
/// that oomkill has not reported yet.
struct UnreportedKills {
    /// The kernel's count when all kills were accounted for, plus the kills that were reported since.
    kills: u64,
}

impl UnreportedKills {
    fn since(kills: u64) -> Self {
        Self { kills }
    }

    /// Accounts for kills that oomkill has reported, with the processes that were killed along.
    fn mark_reported(&mut self, kills: u64) {
        self.kills += kills;
    }

    /// Whether the kernel has counted more kills, which oomkill may still report.
    fn awaits(&self, kills: u64) -> bool {
        kills > self.kills
    }

    /// Returns the kills that the kernel has counted beyond the accounted ones, if any. Each kill is returned once.
    fn missed(&mut self, kills: u64) -> Option<Missed> {
        let missed = kills.saturating_sub(self.kills);
        self.kills = kills;
        (missed > 0).then(|| Missed {
            time: clock::now(),
            kills: missed,
        })
    }
}

/// Row that is printed when tracing begins or ends.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Passed<'a> {
    /// The mark was passed.
    Armed(Used<'a>),
    /// Less than the mark is used again.
    Disarmed(Used<'a>),
}

/// Share of a place that is used.
#[derive(Debug, Serialize)]
struct Used<'a> {
    #[serde(serialize_with = "clock::serialize")]
    time: Zoned,
    #[serde(flatten)]
    place: &'a OomDomain,
    percent: f64,
}

impl<'a> Used<'a> {
    fn now(place: &'a OomDomain, percent: f64) -> Self {
        Self {
            time: clock::now(),
            place,
            percent,
        }
    }
}

impl Row for Passed<'_> {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let (used, what) = match self {
            Self::Armed(used) => (used, "tracing"),
            Self::Disarmed(used) => (used, "no more tracing"),
        };
        let (time, name) = (clock::time_of_day(&used.time), used.place.name());
        writeln!(
            out,
            "{time} {:.0} % of {name} are used: {what}",
            used.percent
        )
    }
}

/// Row of the kills without a report.
#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename = "missed")]
struct Missed {
    #[serde(serialize_with = "clock::serialize")]
    time: Zoned,
    kills: u64,
}

impl Row for Missed {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "{} {} OOM kills without a report: they happened before anything was traced, or were reported too late",
            clock::time_of_day(&self.time),
            self.kills
        )
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn looks_are_rare_where_they_cost_much_and_nothing_grows() {
        let (seconds, micros) = (Duration::from_secs, Duration::from_micros);
        assert_eq!(rest(micros(100), None), seconds(1));
        assert_eq!(rest(micros(4000), None), seconds(12));
        assert_eq!(rest(micros(4000), Some(seconds(10))), seconds(5));
        assert_eq!(rest(micros(4000), Some(seconds(1))), seconds(1));
        assert_eq!(rest(micros(4000), Some(seconds(1000))), seconds(12));
        assert_eq!(rest(seconds(1), None), seconds(60));
    }

    #[test]
    fn kills_without_a_report_are_told_once() {
        let mut unseen = UnreportedKills::since(5);
        assert_eq!(unseen.missed(5), None);
        unseen.mark_reported(1);
        let missed = unseen.missed(9).map(|missed| missed.kills);
        assert_eq!(missed, Some(3));
        assert_eq!(unseen.missed(9), None);
    }

    #[test]
    fn kills_are_awaited_until_they_are_told() {
        let mut unseen = UnreportedKills::since(5);
        assert!(!unseen.awaits(5) && unseen.awaits(7));
        unseen.mark_reported(2);
        assert!(!unseen.awaits(7) && unseen.awaits(8));
    }

    #[test]
    fn a_folder_that_others_may_write_into_is_refused() {
        let above = tempfile::tempdir().expect("a directory");
        let folder = above.path().join("reports");
        let made = prepared(&folder).expect("it can be made");
        assert_eq!(made.metadata().expect("it is there").mode() & 0o777, 0o700);
        prepared(&folder).expect("it is there");
        fs::set_permissions(&folder, PermissionsExt::from_mode(0o777)).expect("it is ours");
        let error = prepared(&folder).expect_err("others may write").to_string();
        assert!(error.contains("chmod go-w"), "{error}");
        fs::write(above.path().join("file"), "").expect("a file");
        assert!(prepared(&above.path().join("file")).is_err());
    }
}
