//! Rows of vmscan, one for each interval, as differences of totals.

use anyhow::Result;
use memtools::export::metrics::Metrics;
use memtools::print::clock::{self, Clock};
use memtools::print::output::Output;

use crate::attach::Available;
use crate::bpf::Loaded;
use crate::kswapd;
use crate::kswapd::ReportedTime;
use crate::plan::ReclaimPlan;
use crate::report::{Columns, Interval};
use crate::totals::Totals;

/// Reader of the totals, which prints what has been added since the last row.
pub(crate) struct Intervals<'a> {
    skel: &'a Loaded,
    has: Available,
    columns: Columns,
    clock: Clock,
    /// Rows after which the header is printed again. None: never.
    rows_per_header: Option<u64>,
    rows: u64,
    before: Totals,
    booked: ReportedTime,
}

impl<'a> Intervals<'a> {
    pub(crate) fn new(plan: &ReclaimPlan, skel: &'a Loaded, has: Available) -> Self {
        Self {
            skel,
            has,
            columns: plan.columns,
            clock: Clock::new(),
            rows_per_header: plan.rows_per_header,
            rows: 0,
            before: Totals::default(),
            booked: ReportedTime::default(),
        }
    }

    /// Prints the row of an interval that has ended.
    pub(crate) fn print_next(&mut self, output: &mut Output) -> Result<()> {
        let interval = self.next()?;
        self.print(&interval, output)
    }

    /// Prints a row for the time since the last full interval, if anything happened in it, so that the rows are
    /// complete.
    pub(crate) fn print_last(&mut self, output: &mut Output) -> Result<()> {
        let interval = self.next()?;
        if interval.any() {
            self.print(&interval, output)?;
        }
        Ok(())
    }

    /// Sets the sums for Prometheus to the totals that were read last.
    pub(crate) fn record_metrics(&self, metrics: &mut Metrics) {
        self.before.record_metrics(self.has, metrics);
    }

    /// Reads the totals, and returns what has been added since the last read.
    fn next(&mut self) -> Result<Interval> {
        let maps = &self.skel.maps;
        let (now, kswapd_ns, time_ns) = if self.has.kswapd {
            kswapd::totals_and_time(&maps.totals, &maps.calls)?
        } else {
            (Totals::read(&maps.totals)?, 0, clock::monotonic_ns())
        };
        let time = self.clock.local(time_ns);
        let mut interval = now.since(&self.before, self.has, self.columns, time);
        if let Some(kswapd) = &mut interval.kswapd {
            kswapd.time_ns = self.booked.book(kswapd_ns);
        }
        self.before = now;
        Ok(interval)
    }

    fn print(&mut self, interval: &Interval, output: &mut Output) -> Result<()> {
        let again = self.rows > 0
            && self
                .rows_per_header
                .is_some_and(|every| self.rows.is_multiple_of(every));
        if again {
            output.header(&self.columns.header())?;
        }
        self.rows += 1;
        output.row(interval)?;
        output.flush()
    }
}
