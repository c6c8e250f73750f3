//! Reports of outstanding allocations, from the first to the last: one loop for both kinds of sources.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::Result;
use memtools::export::exposition::MetricKind;
use memtools::export::folded::Folded;
use memtools::export::profile::{Profile, Sample};
use memtools::print::clock::{self, Clock};
use memtools::print::output::Output;
use memtools::print::progress::Progress;
use memtools::process::container;
use memtools::run::poll::Poller;
use memtools::serve::report::ServedReport;
use memtools::serve::server::Server;
use memtools::serve::trend::Trends;

use crate::difference::{self, Difference};
use crate::metrics::{self, CountedSums};
use crate::plan::{Files, ReportSettings};
use crate::rows::{self, Amount, Groups, Head};
use crate::sampling;
use crate::serve::{self, Numbers};
use crate::source::{Flow, HeadContext, ReportData, Source};
use crate::sums::{self, Ages, Entry, History, Sum, Totals, View};
use crate::whole::ReportSummary;

/// Reporter of a source: prints, exports and serves its reports.
pub(crate) struct Reporter<'a, S> {
    pub(crate) source: S,
    settings: &'a ReportSettings,
    history: History,
    counted: CountedSums,
    /// Growth of stacks over time, for clients of --serve.
    trends: Trends,
    clock: Clock,
    pub(crate) output: Output,
    files: Files,
}

impl<'a, S: Source> Reporter<'a, S> {
    /// Makes the reporter, and begins the exported files.
    pub(crate) fn new(
        source: S,
        settings: &'a ReportSettings,
        output: Output,
        mut files: Files,
    ) -> Self {
        files.exports.begin();
        Self {
            source,
            settings,
            history: History::default(),
            counted: CountedSums::default(),
            trends: Trends::default(),
            clock: Clock::new(),
            output,
            files,
        }
    }

    /// Follows the source and reports as the options say, until the trace has ended.
    pub(crate) fn run(&mut self, poller: &mut Poller<'_>, server: Option<&Server>) -> Result<()> {
        let interval = self.settings.interval;
        poller.tick_every(interval)?;
        let mut reports_left = self.settings.count;
        loop {
            let wake = poller.wait(self.source.deadline())?;
            if let Flow::End { exited } = self.source.handle_events(&wake, &mut self.output)? {
                return self.report(exited);
            }
            if wake.stop {
                return self.report(false);
            }
            if wake.report {
                self.report(false)?;
            }
            if let Some(server) = server.filter(|server| wake.is_ready(*server)) {
                server.answer(|| self.served())?;
            }
            if wake.tick {
                reports_left = reports_left.map(|left| left - 1);
                let last = reports_left == Some(0);
                if last || !self.settings.is_folded() {
                    self.report(false)?;
                }
                if last {
                    return Ok(());
                }
                // Blocks younger than --older are omitted, so reports have to be a whole interval apart.
                poller.tick_every(interval)?;
            }
        }
    }

    /// Ends the exported files. Returns the exit status: the command's, if there is a command, or that of a failure, if
    /// there are leaks that --fail-on forbids, or more growth than it permits.
    pub(crate) fn finish(self, command: Option<u8>, has_forbidden_leaks: bool) -> Result<ExitCode> {
        self.files.exports.finish()?;
        self.files.metrics.finish()?;
        let difference = self.files.difference.as_ref();
        let has_grown = difference.is_some_and(Difference::is_too_much);
        Ok(difference::status_if(
            has_forbidden_leaks || has_grown,
            command,
        ))
    }

    /// Prints and exports a report of this moment.
    fn report(&mut self, exited: bool) -> Result<()> {
        let now = clock::monotonic_ns();
        let mut found = self.source.snapshot(now, exited)?;
        // With --folded there is one report, of everything since the start.
        let shown = match self.settings.view {
            View::Allocated | View::Churned if !self.settings.is_folded() => {
                sums::since(self.history.last(), &found.totals)
            }
            _ => found.totals.clone(),
        };
        if self.settings.is_folded() {
            self.print_folded(now, &shown, &found)?;
        } else {
            self.print(now, &shown, &mut found)?;
        }
        self.export(&found.totals)?;
        self.record_metrics(&found.totals)?;
        self.files.metrics.write_if_due();
        self.record_trends(&found.totals);
        self.history.add(now, found.totals);
        self.output.flush()?;

        let losses = self.source.losses()?;
        if losses.any() {
            memtools::message!("{losses}");
        }
        self.source.print_remedies(&losses);
        Ok(())
    }

    fn print(&mut self, now: u64, shown: &Totals, found: &mut ReportData) -> Result<()> {
        let sum = Sum::of(shown);
        let errors = found.errors.as_ref();
        let heading = self.source.heading();
        let amount = Amount {
            bytes: sum.total.bytes,
            error_bytes: errors.map(|errors| sampling::Error::sum(errors.values()).bytes()),
            requested_bytes: heading.tells_requested.then_some(sum.total.requested_bytes),
            allocations: sum.total.allocations,
        };
        let largest = self.largest(now, shown, found, self.settings.top);
        self.head(now, heading, sum.stacks, amount)?;
        if self.settings.show_allocs {
            let allocations = &mut found.allocations;
            allocations.sort_unstable_by_key(|one| (one.size, one.address, one.pid));
            rows::list(&mut self.output, allocations, self.source.is_several())?;
        }
        let whole = ReportSummary {
            amount,
            groups: sum.stacks,
            shown: largest.len(),
            ..ReportSummary::default()
        };
        self.source.print_groups(largest, &mut self.output)?;
        if !self.settings.is_json() {
            self.print_whole(whole, shown)?;
        }
        self.source.print_exited(&mut self.output)?;
        self.source.print_more(&mut self.output)
    }

    fn print_folded(&mut self, now: u64, shown: &Totals, found: &ReportData) -> Result<()> {
        for Entry { key, total, .. } in self.largest(now, shown, found, usize::MAX) {
            let stack = self.source.symbolize(key)?;
            let line = Folded::new(&stack);
            self.output.raw(|out| line.write(total.bytes, out))?;
        }
        Ok(())
    }

    /// Returns the `top` groups that are largest by the sort key of the options, the largest last.
    fn largest(&self, now: u64, shown: &Totals, found: &ReportData, top: usize) -> Vec<Entry> {
        let mut ages = if self.settings.wants_ages() {
            Ages::of(&found.allocations)
        } else {
            Ages::default()
        };
        let error_of = |key| found.errors.as_ref().and_then(|errors| errors.get(key));
        let entries = shown.iter().map(|(key, &total)| Entry {
            key: *key,
            total,
            error_bytes: error_of(key).map(|error| error.bytes()),
            age: ages.at(now, *key),
            growth: match self.settings.view {
                View::Outstanding => self.history.growth(now, *key, total.bytes),
                _ => None,
            },
        });
        sums::largest(entries.collect(), self.settings.sort, top)
    }

    fn head(
        &mut self,
        now: u64,
        heading: HeadContext,
        stacks: usize,
        amount: Amount,
    ) -> Result<()> {
        self.output.row(&Head {
            time: self.clock.local(now),
            process: heading.process,
            peak_time: heading.peak_ns.map(|peak_ns| self.clock.local(peak_ns)),
            top: self.settings.top,
            view: self.settings.view,
            groups: self.source.groups(stacks),
            amount,
            unknown_frees: heading.frees.unknown,
            double_frees: heading.frees.double,
            unseen_frees: heading.frees.unseen,
            hits: self.source.hits(),
            lost: self.source.losses()?,
        })
    }

    /// Prints the sums that a text report ends with. JSON has them at the head.
    fn print_whole(&mut self, mut whole: ReportSummary, shown: &Totals) -> Result<()> {
        let groups = self.source.groups(whole.groups);
        if let Groups::Stacks(_) = groups {
            for (&key, total) in shown {
                whole.note_stack(self.source.stack(key)?.as_deref(), total.bytes);
            }
        }
        whole.resident_bytes = self.source.resident_bytes();
        self.output.raw(|out| whole.write(groups.name(), out))
    }

    /// Writes all stacks into the files that options name, and prints the difference from an earlier run. With --mode
    /// alloc and churn, these are all allocations since the start.
    fn export(&mut self, totals: &Totals) -> Result<()> {
        if !self.files.exports.is_enabled() && self.files.difference.is_none() {
            return Ok(());
        }
        let profile = self.profile(totals)?;
        self.files.exports.write_profile(&profile);
        let Some(difference) = &mut self.files.difference else {
            return Ok(());
        };
        difference.print(&profile, self.settings.top, &mut self.output)
    }

    /// Adds the sums of each process to the metrics, if they are kept, or replaces the sums if they can fall.
    fn record_metrics(&mut self, totals: &Totals) -> Result<()> {
        if !self.files.metrics.is_enabled() {
            return Ok(());
        }
        let [bytes, allocations] = metrics::families(self.settings.view);
        let mut sums = sums::by_process(totals);
        if bytes.kind == MetricKind::Counter {
            sums = self.counted.added(sums);
        } else {
            self.files.metrics.reset(bytes);
            self.files.metrics.reset(allocations);
        }
        for (pid, total) in sums {
            let name = self.source.process_name(pid).unwrap_or_default();
            let [unit, container] = container::labels(name.cgroup_info.as_ref());
            let labels = [name.comm.as_str(), unit, container];
            self.files.metrics.add(bytes, &labels, total.bytes);
            self.files
                .metrics
                .add(allocations, &labels, total.allocations);
        }
        self.source.losses()?.measure(&mut self.files.metrics);
        Ok(())
    }

    /// Symbolizes all stacks, for other formats.
    fn profile(&mut self, totals: &Totals) -> Result<Profile> {
        let mut progress = Progress::new("naming stacks", totals.len());
        let samples = totals.iter().map(|(&key, &total)| {
            progress.step();
            Ok(total.sample(self.source.symbolize(key)?))
        });
        let samples: Vec<Sample> = samples.collect::<Result<_>>()?;
        Ok(self
            .files
            .exports
            .profile(self.settings.subject.clone(), samples))
    }

    /// Makes a report of this moment for clients of --serve, with all stacks, as --export would write them. Such a
    /// report does not change what the next printed one shows.
    fn served(&mut self) -> Result<ServedReport> {
        let ReportData { totals, .. } = self.source.snapshot(clock::monotonic_ns(), false)?;
        self.record_metrics(&totals)?;
        self.record_trends(&totals);
        let profile = self.profile(&totals)?;
        let lost = self.source.losses()?;
        let numbers = Numbers {
            outstanding_stacks: (self.settings.view == View::Outstanding).then_some(totals.len()),
            frees: self.source.heading().frees,
            hits: self.source.hits(),
        };
        let mut families = self.files.metrics.exposed();
        families.extend(numbers.families(&profile));
        let keys: Vec<_> = totals.keys().map(|key| serve::key(*key)).collect();
        let lost = lost.any().then(|| lost.to_string());
        Ok(ServedReport::new(
            &profile,
            &keys,
            &self.trends,
            families,
            lost,
        ))
    }

    /// Records how stacks grow, if there are clients to show that to.
    fn record_trends(&mut self, totals: &Totals) {
        if self.settings.keeps_trends {
            self.trends.look(Instant::now(), serve::bytes(totals));
        }
    }
}
