//! Detection of idle memory: pages of a process that stayed untouched for a while, by the Accessed bits of its page
//! tables.
//!
//! A CPU sets the Accessed bit in a page's entry when it uses the page. The kernel clears all of these bits when
//! asked (`/proc/PID/clear_refs`), but reports them for each mapping, not for each page. So a BPF program copies the
//! page tables (`kernel_tables`), and this module examines the copy (`walk`). No kernel option is needed:
//! neither idle page tracking nor DAMON of address spaces, which many distributions omit. The CPUs have to be
//! made to drop the translations that they have cached (`translations`).
//!
//! Before memleak judges any page, it finds pages of its own by the same means. At the end it checks how many of
//! these have lost their marks. Pages whose use is not certain count as used.

#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
mod arch;
mod kernel_tables;
mod own_pages;
mod translations;
mod walk;

use std::fs::File;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::heap::clear_refs::{self, PageMarks};
use crate::heap::page_runs::{self, PageRuns};
use crate::host::capabilities::{self, Capability};
use crate::host::values::Values;
use crate::process::proc::Process;

use kernel_tables::{DirectMap, KernelTables};
use own_pages::OwnPages;
use walk::{HugePagePolicy, OutOfTime, Walk};

/// Message for a machine whose marks cannot be relied on.
const CANNOT: &str = "idle memory cannot be determined on this machine";

/// Number of tries to find our own used pages by their marks: others may clear the marks just then.
const TRIES: usize = 3;

/// Number of our own pages for each mark that may be lost. With more lost marks, nothing is called idle.
const PAGES_PER_LOST: u64 = 10;

/// Watch of a process's use of its pages, from [`begin`](Watch::begin) on.
#[derive(Debug)]
pub struct Watch {
    tables: KernelTables,
    /// Address at which the kernel has mapped all memory (its direct map).
    direct_map: u64,
    own: OwnPages,
    /// Huge pages of ours that were used and found marked.
    own_huge: PageRuns,
    begin: Instant,
    cpus_not_reached: usize,
    /// Number of pages that the kernel's reclaim had scanned when the watch began.
    scanned: u64,
    /// Results of the looks before, if there were any.
    before: Mutex<Option<Before>>,
}

/// Results of all looks until now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Before {
    used: PageRuns,
    /// Whether the first look has judged huge pages. The copy after that look marks them as used.
    huge_judged: bool,
}

/// Pages of a process that were used while it was watched. All other pages are idle.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IdlePages {
    /// Time for which the process was watched.
    pub watched: Duration,
    /// Number of CPUs that may have used pages without marking them.
    pub cpus_not_reached: usize,
    /// Number of pages, of any process, that the kernel's reclaim has scanned meanwhile. Reclaim clears the mark of
    /// each.
    pub reclaim_scanned: u64,
    /// Marks of memleak's own pages, which it has used once. Others have cleared those that are lost.
    pub own: Marks,
    /// Whether the first image has judged huge pages. They count as used if marks of memleak's own huge pages were
    /// cleared until then.
    pub huge_judged: bool,
    used: PageRuns,
}

/// Counts of marks of pages that were used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Marks {
    /// Pages that were used.
    pub pages: u64,
    /// Pages without a mark at the end.
    pub lost: u64,
}

impl Marks {
    fn are_too_few(self) -> bool {
        self.lost * PAGES_PER_LOST > self.pages
    }
}

impl Watch {
    /// Clears the marks of a process's pages, and watches the process from now on. The process does not stop.
    ///
    /// # Errors
    /// If the marks of this machine cannot be relied on, or may not be read or cleared. The error says why.
    pub fn begin(process: &Process) -> Result<Self> {
        if let Some(why) = arch::keeps_translations() {
            bail!("{CANNOT}: {why}");
        }
        if clear_refs::is_missing() {
            bail!(
                "idle memory cannot be determined on this kernel, built without CONFIG_PROC_PAGE_MONITOR"
            );
        }
        let tables = KernelTables::load().with_context(|| {
            let remedy = capabilities::remedy(Capability::CAP_PERFMON);
            format!("{CANNOT}{remedy}")
        })?;
        let own = OwnPages::new()?;
        let root = tables.root(own.pagemap()).context(CANNOT)?;
        let (page, content) = own.known();
        let direct_map = tables.direct_map(root, page, content).context(CANNOT)?;
        let mut watch = Self {
            tables,
            direct_map,
            own,
            own_huge: PageRuns::new(),
            begin: Instant::now(),
            cpus_not_reached: 0,
            scanned: 0,
            before: Mutex::default(),
        };
        for _ in 0..TRIES {
            clear_refs::clear(std::process::id(), PageMarks::Used)?;
            clear_refs::clear(process.pid(), PageMarks::Used)?;
            watch.cpus_not_reached = translations::flush()?;
            watch.begin = Instant::now();
            watch.scanned = scanned();
            watch.own.touch();
            if watch.used_of_ours(watch.own.small())? == watch.own.touched() {
                watch.own_huge = watch.used_of_ours(watch.own.huge())?;
                return Ok(watch);
            }
        }
        bail!("{CANNOT}: of pages that memleak used itself, others were marked, {TRIES} times")
    }

    /// Returns the wanted pages that were used until now; None if that took longer than `until`. The process must be
    /// stopped, and must not be copied yet. The number of pages that [reclaim](Watch::reclaim_scanned) has scanned is
    /// left 0, for the caller to set.
    ///
    /// # Errors
    /// If the page tables cannot be read.
    pub(super) fn sample(
        &self,
        pagemap: &File,
        wanted: &[Range<u64>],
        until: Option<Instant>,
    ) -> Result<Option<IdlePages>> {
        let mut before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        let touched = own_pages::count(&self.own.touched());
        let marked = own_pages::count(&self.used_of_ours(self.own.small())?);
        let own = Marks {
            pages: touched,
            lost: touched.saturating_sub(marked),
        };
        let are_marked = self.used_of_ours(self.own.huge())? == self.own_huge;
        let (huge, huge_judged) = how_to_judge_huge(before.as_ref(), are_marked);
        let used = if own.are_too_few() {
            wanted.to_vec()
        } else {
            match self.used_pages(pagemap, wanted, huge, until) {
                Err(error) if error.is::<OutOfTime>() => return Ok(None),
                used => used?,
            }
        };
        let used_before = before.take().unwrap_or_default().used;
        let used = page_runs::union(&used_before, &used);
        *before = Some(Before {
            used: used.clone(),
            huge_judged,
        });
        Ok(Some(IdlePages {
            watched: self.begin.elapsed(),
            cpus_not_reached: self.cpus_not_reached,
            reclaim_scanned: 0,
            own,
            huge_judged,
            used,
        }))
    }

    /// Returns the number of pages that reclaim has scanned since the watch began.
    pub(super) fn reclaim_scanned(&self) -> u64 {
        scanned().saturating_sub(self.scanned)
    }

    fn used_of_ours(&self, pages: &[Range<u64>]) -> Result<PageRuns> {
        self.used_pages(self.own.pagemap(), pages, HugePagePolicy::Judged, None)
    }

    fn used_pages(
        &self,
        pagemap: &File,
        wanted: &[Range<u64>],
        huge: HugePagePolicy,
        until: Option<Instant>,
    ) -> Result<PageRuns> {
        let root = self.tables.root(pagemap)?;
        let physical = DirectMap {
            tables: &self.tables,
            base: self.direct_map,
        };
        let walk = Walk::new(&physical, wanted, huge, until);
        walk.used(root.wrapping_sub(self.direct_map), self.tables.levels)
    }
}

impl IdlePages {
    /// Whether no page of a range was used.
    pub fn contain(&self, range: &Range<u64>) -> bool {
        page_runs::within(&self.used, range).is_empty()
    }
}

/// Returns how a look treats huge pages, and whether they are judged. This depends on the results of the looks
/// before, and on whether huge pages of ours still have their marks. A copy of a huge page marks the page as used, by
/// us. A copy of a small page does not.
fn how_to_judge_huge(before: Option<&Before>, are_marked: bool) -> (HugePagePolicy, bool) {
    match before {
        None if are_marked => (HugePagePolicy::Judged, true),
        None => (HugePagePolicy::Used, false),
        Some(before) => (HugePagePolicy::CountAsIdle, before.huge_judged),
    }
}

/// Returns the number of pages that reclaim has scanned since the machine was started.
fn scanned() -> u64 {
    let values = Values::read("/proc/vmstat").unwrap_or_default();
    values.get_or_zero("pgscan_anon") + values.get_or_zero("pgscan_file")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_judged_by_the_first_look_alone() {
        let before = |huge_judged| {
            Some(Before {
                huge_judged,
                ..Before::default()
            })
        };
        for (before, are_marked, expected) in [
            (None, true, (HugePagePolicy::Judged, true)),
            (None, false, (HugePagePolicy::Used, false)),
            // After the first look, neither cleared marks nor anything else changes the result.
            (before(true), true, (HugePagePolicy::CountAsIdle, true)),
            (before(true), false, (HugePagePolicy::CountAsIdle, true)),
            (before(false), true, (HugePagePolicy::CountAsIdle, false)),
        ] {
            let found = how_to_judge_huge(before.as_ref(), are_marked);
            assert_eq!(found, expected, "{before:?}, {are_marked}");
        }
    }
}
