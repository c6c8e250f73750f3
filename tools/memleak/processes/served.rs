//! Reports for the clients of --serve.

use std::time::Instant;

use anyhow::Result;
use memtools::print::clock;
use memtools::serve::report::Report;

use super::{Found, Tracer};
use crate::probes::{self, Hits};
use crate::serve::{self, Frees, Numbers};
use crate::sums::{self, Totals};

impl Tracer<'_> {
    /// The report of the moment, of all that --pprof would write. The next one that is printed does
    /// not know of it.
    pub(crate) fn served(&mut self, hits: Hits) -> Result<Report> {
        let now = clock::monotonic_ns();
        self.symbolizer.refresh();
        let Found { totals, .. } = self.find(now, false)?;
        self.look(&totals);
        let samples = self.samples(&totals)?;
        let profile = self
            .exports
            .profile(sums::subject(self.args.view(), self.args), samples);
        let lost = self.losses()?;
        let (stacks, sum) = sums::in_all(&totals);
        let frees = self.skel.maps.bss_data.as_deref().map(|bss| &bss.frees);
        let frees = frees.map(|frees| Frees {
            unknown: self.args.records_all().then_some(frees.unknown),
            double: probes::notices_double_frees(self.skel, self.args).then_some(frees.twice),
            unseen: frees.replaced,
        });
        let numbers = Numbers {
            view: self.args.view(),
            sum,
            stacks,
            frees: frees.unwrap_or_default(),
            hits: Some(hits.count),
            lost,
        };
        let families = numbers.families(&profile);
        let keys: Vec<_> = totals.keys().map(|path| serve::key(*path)).collect();
        let lost = lost.any().then(|| lost.to_string());
        Ok(Report::new(&profile, &keys, &self.trends, families, lost))
    }

    /// Takes a look at how stacks grow, if there are clients to show that to.
    pub(super) fn look(&mut self, totals: &Totals) {
        if self.args.serve.serve.is_some() {
            self.trends.look(Instant::now(), serve::bytes(totals));
        }
    }
}
