//! Upkeep of a running trace: probes in files that processes load, the cost of the probes, and processes that the
//! probes would harm.

use std::mem;
use std::time::{Duration, Instant};

use anyhow::Result;
use libbpf_rs::Link;
use memtools::print::output::Output;
use memtools::process::uprobes;
use memtools::stacks::symbolize::Symbolizer;

use super::copies::CodeStops;
use super::cost::Cost;
use super::loaded::{self, LoadedFiles};
use super::overhead::Limit;
use super::probes::Attached;
use super::target::Targets;
use crate::plan::ProcessPlan;

/// Time without any hit after which memleak says why that can be.
const QUIET: Duration = Duration::from_secs(2);

pub(super) struct Upkeep<'a> {
    pub(super) attached: &'a Attached,
    pub(super) target: &'a Targets,
    pub(super) plan: &'a ProcessPlan,
    /// Links of the probes attached at the start. Those of files loaded later are in `loaded`.
    links: Vec<Link>,
    loaded: LoadedFiles,
    /// Time at which the next look at loaded files is due.
    look_at: Instant,
    cost: Cost<'a>,
    limit: Option<Limit<'a>>,
    /// Time at which a trace without hits says why that can be. None after that time.
    quiet_until: Option<Instant>,
    /// Whether the probes have been placed once more, as a process's main thread has ended.
    survives_main_thread: bool,
    /// Message on a process that the probes would end: a translator that reads a file that is probed in every process,
    /// or a program that replaces its code by a copy.
    harm: Option<String>,
    code_stops: CodeStops,
}

impl<'a> Upkeep<'a> {
    pub(super) fn new(
        attached: &'a Attached,
        target: &'a Targets,
        plan: &'a ProcessPlan,
        links: Vec<Link>,
    ) -> Result<Self> {
        let now = Instant::now();
        Ok(Self {
            attached,
            target,
            plan,
            links,
            loaded: LoadedFiles::new(target),
            look_at: now + loaded::PAUSE,
            cost: Cost::new(attached, target)?,
            limit: Limit::of(&plan.recording, attached),
            quiet_until: Some(now + QUIET),
            survives_main_thread: !attached.ends_with_main_thread()
                || target.without_main_thread().is_some(),
            harm: None,
            code_stops: CodeStops::new(attached)?,
        })
    }

    /// Probes the processes that are stopped for a file that they have loaded, and lets them continue.
    pub(super) fn answer(&mut self) -> Result<()> {
        let mut looked = Ok(());
        self.attached.questions.answer(|pid, is_stopped| {
            let look = self.loaded.look_at_stopped(
                pid,
                is_stopped,
                self.target,
                self.attached,
                &self.plan.functions,
            );
            looked = mem::replace(&mut looked, Ok(())).and(look);
        });
        looked
    }

    /// Takes care of processes that were stopped before they replace code. If the code is probed, removes all probes.
    pub(super) fn release_copiers(&mut self) {
        let probed = || self.target.files().chain(self.loaded.objects());
        let Some(harm) = self.code_stops.look(probed()) else {
            return;
        };
        let mut links = mem::take(&mut self.links);
        links.append(&mut self.loaded.links);
        uprobes::remove(links);
        let probed = self.target.files().chain(self.loaded.objects());
        self.code_stops.restore(probed);
        self.harm = Some(harm);
    }

    /// Schedules the next look soon, as a process has become another program, or one of those that are traced.
    pub(super) fn schedule_scan_soon(&mut self) {
        self.look_at = self.look_at.min(Instant::now() + loaded::AFTER_EXEC);
    }

    pub(super) fn next_scan(&self) -> Instant {
        self.look_at
    }

    pub(super) fn is_due(&self) -> bool {
        Instant::now() >= self.look_at
    }

    /// Probes files that processes have loaded, and looks for processes that the probes would harm.
    pub(super) fn scan_loaded_files(&mut self, symbolizer: &mut Symbolizer) {
        self.release_copiers();
        if self.harms() {
            return;
        }
        self.outlive_main_thread();
        self.loaded.probe_new_files(
            &mut symbolizer.code,
            self.target,
            self.attached,
            &self.plan.functions,
        );
        self.look_at = Instant::now() + loaded::PAUSE;
        self.harm = self
            .loaded
            .find_translator_conflict(symbolizer.code.translators());
    }

    /// Places the probes once more in every process, if the kernel has ended them with a process's main thread.
    fn outlive_main_thread(&mut self) {
        if self.survives_main_thread {
            return;
        }
        let Some(pid) = self.target.without_main_thread() else {
            return;
        };
        self.survives_main_thread = true;
        self.detach();
        memtools::message!(
            "the main thread of process {pid} has ended, and the probes with it: what the process allocated \
             and freed in up to {} ms is not known",
            loaded::PAUSE.as_millis()
        );
        match self
            .loaded
            .probe_again(self.target, self.attached, &self.plan.functions)
        {
            Ok(links) => self.links = links,
            Err(error) => memtools::message!("nothing is traced any more: {error:#}"),
        }
    }

    pub(super) fn harms(&self) -> bool {
        self.harm.is_some()
    }

    /// Measures the cost of the probes, and raises the sampling level if it is over the limit.
    pub(super) fn hold_limit(&mut self) -> Result<()> {
        if let Some(share) = self.cost.look()?
            && let Some(limit) = &mut self.limit
            && limit.enforce(share)?
        {
            self.cost.measure()?;
        }
        Ok(())
    }

    /// Prints once why there may be no hits, if there are none.
    pub(super) fn warn_if_no_hits(&mut self) {
        let is_over = |until| Instant::now() >= until;
        if self.quiet_until.is_some_and(is_over) {
            self.quiet_until = None;
            if self.attached.hits().count == 0 {
                memtools::note!("{}", self.target.why_quiet());
            }
        }
    }

    /// Prints the allocators of processes that have exited before memleak looked at them.
    pub(super) fn print_missed(&mut self, symbolizer: &Symbolizer) {
        let files = symbolizer.code.files();
        self.loaded
            .print_missed(files, self.target, &self.plan.functions);
    }

    /// Detaches all probes.
    pub(super) fn detach(&mut self) {
        let mut links = mem::take(&mut self.links);
        links.append(&mut self.loaded.links);
        self.attached.detach(links);
    }

    /// Detaches all probes, and prints what they cost. Returns the harm for which the trace has ended, if any.
    pub(super) fn finish(&mut self, output: &mut Output) -> Result<Option<String>> {
        self.loaded.print_late(Duration::ZERO);
        self.cost.end_slice();
        self.detach();
        if let Some(limit) = &self.limit {
            limit.tell(self.cost.percent());
        }
        self.cost.tell(output)?;
        Ok(self.harm.take())
    }
}
