//! Report of one kill, and the files that it is written to.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use jiff::Zoned;
use jiff::tz::TimeZone;
use memtools::export::atomic_file::AtomicFile;
use memtools::print::clock;
use memtools::print::file_name::FileName;
use memtools::print::identity::Identity;
use memtools::print::output::Row;
use memtools::print::text;
use memtools::process::container::{self, CgroupInfo};
use serde::Serialize;
use serde_json::Value;

use crate::processes::ProcessUsage;
use crate::record::kills::ReportedKill;
use crate::record::oom_domain::{History, Moment, OomDomain};
use crate::record::tracing::{Outcome, Tracing};
use crate::screen::{ProcessRow, size};
use crate::tools::ToolSpec;
use crate::who::ToolResult;

/// Number of processes that are shown.
pub(crate) const PROCESSES: usize = 10;
/// Rules that the stacks in a report are traced for.
const RULES: &[&str] = &["growing"];

/// Data of a kill.
pub(crate) struct KillReport {
    time: Zoned,
    kill: ReportedKill,
    mark_percent: f64,
    place: OomDomain,
    moments: Vec<Moment>,
    processes: Vec<(ProcessUsage, i64)>,
    profiles: Vec<(ToolSpec, Outcome)>,
}

impl KillReport {
    /// Makes the report of a kill from the history and the traced processes. Takes the victim's profiles from
    /// `tracing`.
    pub(crate) fn of(
        kill: ReportedKill,
        mark_percent: f64,
        history: &History,
        tracing: &mut Tracing,
    ) -> Self {
        Self {
            time: clock::now(),
            mark_percent,
            place: tracing.place().clone(),
            moments: history.moments().cloned().collect(),
            processes: tracing.largest(kill.pid),
            profiles: tracing.profiles(kill.pid),
            kill,
        }
    }

    /// Returns the cgroup of the victim, as oomkill reports it.
    fn cgroup_info(&self) -> CgroupInfo {
        let cgroup = self.kill.object["victim"]["cgroup"].as_str();
        CgroupInfo::at(cgroup.map(|path| text::display_name(path).to_string()))
    }

    fn rows(&self, container: bool) -> Rows<'_> {
        let processes = self.processes.iter();
        let profiles = self.profiles.iter();
        Rows {
            time: &self.time,
            kill: &self.kill.object,
            cgroup_info: self.cgroup_info(),
            container,
            mark_percent: self.mark_percent,
            place: &self.place,
            moments: &self.moments,
            processes: processes
                .map(|(usage, growth)| ProcessRow::new(usage, *growth, container))
                .collect(),
            traced: profiles
                .map(|(question, outcome)| ToolResult::new(RULES, question, outcome, container))
                .collect(),
            identity: Identity::of_this_tool(),
        }
    }
}

/// Report in the form in which it is written.
#[derive(Serialize)]
#[serde(tag = "type", rename = "report")]
struct Rows<'a> {
    #[serde(serialize_with = "clock::serialize")]
    time: &'a Zoned,
    /// Object of `oomkill -e -j`.
    kill: &'a Value,
    /// Cgroup of the victim, for text. In JSON, `kill` has it.
    #[serde(skip)]
    cgroup_info: CgroupInfo,
    /// Whether text shows containers.
    #[serde(skip)]
    container: bool,
    mark_percent: f64,
    #[serde(flatten)]
    place: &'a OomDomain,
    moments: &'a [Moment],
    processes: Vec<ProcessRow<'a>>,
    traced: Vec<ToolResult<'a>>,
    #[serde(flatten)]
    identity: Identity,
}

impl Row for Rows<'_> {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let victim = &self.kill["victim"];
        let comm = text::display_name(victim["comm"].as_str().unwrap_or("?"));
        writeln!(
            out,
            "{} {comm} (pid {}){} was killed",
            clock::time_of_day(self.time),
            victim["pid"],
            container::inside(Some(&self.cgroup_info).filter(|_| self.container))
        )?;
        let limit = self.kill["limit_cgroup"].as_str().map(text::display_name);
        match (limit, self.kill["limit_kb"].as_u64()) {
            (Some(limit), Some(kb)) => {
                writeln!(out, "for the limit of {limit}, {}", size(kb << 10))?
            }
            (Some(limit), None) => writeln!(out, "for the limit of {limit}")?,
            (None, _) => {}
        }
        let kinds = ["anon", "file", "shmem", "swap", "page_tables"];
        let had = kinds.iter().filter_map(|kind| {
            let kb = victim[format!("{kind}_kb")].as_u64()?;
            Some(format!("{} {}", size(kb << 10), kind.replace('_', " ")))
        });
        let had: Vec<String> = had.collect();
        if !had.is_empty() {
            writeln!(out, "it had {}", had.join(", "))?;
        }
        writeln!(
            out,
            "traced since {:.0} % of {} were used\n\n{}",
            self.mark_percent,
            self.place.name(),
            Moment::HEADER
        )?;
        for moment in self.moments {
            moment.text(out)?;
        }
        writeln!(out, "{}", ProcessRow::header(self.container))?;
        for process in &self.processes {
            process.text(out)?;
        }
        if self.traced.is_empty() {
            writeln!(
                out,
                "\nno process grew fast enough, or long enough, to be traced"
            )?;
        }
        self.traced.iter().try_for_each(|answer| answer.text(out))
    }
}

/// Files of reports.
pub(crate) struct ReportFolder {
    folder: PathBuf,
    keep: usize,
    /// Whether the text of reports shows containers.
    container: bool,
    any: bool,
}

impl ReportFolder {
    /// Sets the directory for reports and the number of reports that are kept. `container`: whether their text shows
    /// containers.
    pub(crate) fn into(folder: PathBuf, keep: usize, container: bool) -> Self {
        Self {
            folder,
            keep,
            container,
            any: false,
        }
    }

    /// Whether a report was written.
    pub(crate) fn any(&self) -> bool {
        self.any
    }

    /// Writes both files of a report, and removes the oldest files beyond the limit.
    ///
    /// # Errors
    /// If a file cannot be written, or an old one not be removed.
    pub(crate) fn write(&mut self, report: &KillReport) -> Result<Recorded> {
        let stamp = report.time.with_time_zone(TimeZone::UTC);
        let name = format!(
            "oom-{}-{}",
            stamp.strftime("%Y%m%dT%H%M%S"),
            report.kill.pid
        );
        let rows = report.rows(self.container);
        let write = |ending: &str, content: &dyn Fn(&mut dyn Write) -> io::Result<()>| {
            let file = AtomicFile::at(&self.folder.join(format!("{name}.{ending}")))?;
            file.write(|out| Ok(content(out)?))?;
            anyhow::Ok(file.name().to_owned())
        };
        let text = write("txt", &|out| rows.text(out))?;
        let json = write("json", &|out| {
            serde_json::to_writer(&mut *out, &rows)?;
            writeln!(out)
        })?;
        self.any = true;
        self.remove_oldest()?;
        let comm = report.kill.object["victim"]["comm"].as_str();
        Ok(Recorded {
            time: report.time.clone(),
            pid: report.kill.pid,
            comm: comm.map(|comm| text::display_name(comm).to_string()),
            cgroup_info: report.cgroup_info(),
            container: self.container,
            text,
            json,
        })
    }

    fn remove_oldest(&self) -> Result<()> {
        let list = || -> io::Result<Vec<PathBuf>> {
            let entries = fs::read_dir(&self.folder)?;
            entries.map(|entry| Ok(entry?.path())).collect()
        };
        let mut files = list().context("failed to list the reports")?;
        files.retain(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(is_report)
        });
        // The names begin with the time.
        files.sort();
        let too_many = files.len().saturating_sub(2 * self.keep);
        for path in files.into_iter().take(too_many) {
            let file = FileName::find(&path)?;
            file.remove()
                .with_context(|| format!("failed to remove {}", path.display()))?;
        }
        Ok(())
    }
}

/// Whether a file has the name of a report: `oom-20261124T080910-4242.txt` or `.json`.
fn is_report(name: &str) -> bool {
    let parts = name
        .strip_prefix("oom-")
        .and_then(|rest| rest.split_once('.'));
    let Some((number, "txt" | "json")) = parts else {
        return false;
    };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let times = number
        .split_once('-')
        .map(|(stamp, pid)| (stamp.split_once('T'), pid));
    matches!(times, Some((Some((day, time)), pid)) if [day, time, pid].into_iter().all(digits))
}

/// Row of a report that was written.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "recorded")]
pub(crate) struct Recorded {
    #[serde(serialize_with = "clock::serialize")]
    time: Zoned,
    /// Pid of the victim.
    pid: u32,
    comm: Option<String>,
    #[serde(flatten)]
    cgroup_info: CgroupInfo,
    /// Whether text shows the container.
    #[serde(skip)]
    container: bool,
    /// File of the report as text.
    text: String,
    /// File of the report as JSON.
    json: String,
}

impl Row for Recorded {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let (time, comm) = (
            clock::time_of_day(&self.time),
            self.comm.as_deref().unwrap_or("?"),
        );
        writeln!(
            out,
            "{time} {comm} (pid {}){} was killed: {}",
            self.pid,
            container::inside(Some(&self.cgroup_info).filter(|_| self.container)),
            self.text
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_reports_are_removed_and_the_oldest_first() {
        let folder = tempfile::tempdir().expect("a directory");
        let names = [
            "oom-20261124T080910-4242.txt",
            "oom-20261124T080910-4242.json",
            "oom-20261125T080910-7.json",
            "oom-20261125T080910-7.txt",
            "oom-notes.txt",
            "other-20261124T080910-4242.txt",
        ];
        for name in names {
            fs::write(folder.path().join(name), "").expect("a file");
        }
        ReportFolder::into(folder.path().to_owned(), 1, false)
            .remove_oldest()
            .expect("they can be removed");
        let there = |name: &&str| folder.path().join(name).exists();
        let left: Vec<_> = names.iter().filter(|name| there(name)).copied().collect();
        assert_eq!(left, names[2..]);
    }

    #[test]
    fn reports_have_names_of_one_form() {
        assert!(is_report("oom-20261124T080910-4242.txt"));
        for name in [
            "oom-.txt",
            "oom-1T-2.txt",
            "oom-1T2-3.txt.gz",
            "oom-1T2-x.txt",
            "1T2-3.txt",
        ] {
            assert!(!is_report(name), "{name}");
        }
    }
}
