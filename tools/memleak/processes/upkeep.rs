//! What a trace has to look after while it goes on: files that processes load, what the probes cost,
//! and whom they would harm.

use std::mem;
use std::time::{Duration, Instant};

use anyhow::Result;
use libbpf_rs::Link;
use memtools::print::output::Output;
use memtools::stacks::symbolize::Symbolizer;

use super::cost::Cost;
use super::loaded::{self, Loaded};
use super::overhead::Limit;
use super::probes::Attached;
use super::target::Targets;
use crate::args::Args;

/// How long nothing may happen at all before we say why that can be.
const QUIET: Duration = Duration::from_secs(2);

pub(super) struct Upkeep<'a> {
    pub(super) attached: &'a Attached,
    pub(super) target: &'a Targets,
    pub(super) args: &'a Args,
    /// The probes in place since the start; those in files loaded later are in `loaded`.
    links: Vec<Link>,
    loaded: Loaded,
    /// When the next look at loaded files is due.
    look_at: Instant,
    cost: Cost<'a>,
    limit: Option<Limit<'a>>,
    /// When a trace that has seen nothing says why that can be; None once it is over.
    quiet_until: Option<Instant>,
    /// Which translator reads a file that is probed for everybody.
    harm: Option<String>,
}

impl<'a> Upkeep<'a> {
    pub(super) fn new(
        attached: &'a Attached,
        target: &'a Targets,
        args: &'a Args,
        links: Vec<Link>,
    ) -> Result<Self> {
        let now = Instant::now();
        Ok(Self {
            attached,
            target,
            args,
            links,
            loaded: Loaded::new(target),
            look_at: now + loaded::PAUSE,
            cost: Cost::new(attached, target)?,
            limit: Limit::of(args, attached),
            quiet_until: Some(now + QUIET),
            harm: None,
        })
    }

    /// Looks at the processes that are stopped for a file that they have loaded, and lets them go on.
    pub(super) fn answer(&mut self) -> Result<()> {
        let mut looked = Ok(());
        self.attached.questions.answer(|pid, is_stopped| {
            let look =
                self.loaded
                    .look_at_stopped(pid, is_stopped, self.target, self.attached, self.args);
            looked = mem::replace(&mut looked, Ok(())).and(look);
        });
        looked
    }

    /// Has the next look be soon, as a process has become another program.
    pub(super) fn look_after_exec(&mut self) {
        self.look_at = self.look_at.min(Instant::now() + loaded::AFTER_EXEC);
    }

    pub(super) fn look_at(&self) -> Instant {
        self.look_at
    }

    pub(super) fn is_due(&self) -> bool {
        Instant::now() >= self.look_at
    }

    /// Probes what processes have loaded, and looks for whom the probes would harm.
    pub(super) fn look(&mut self, symbolizer: &Symbolizer) {
        let files = symbolizer.code_files();
        self.loaded
            .look(files, self.target, self.attached, self.args);
        self.look_at = Instant::now() + loaded::PAUSE;
        self.harm = self.loaded.read_by(symbolizer.translators());
    }

    pub(super) fn harms(&self) -> bool {
        self.harm.is_some()
    }

    /// Measures what the probes cost, and raises sampling where that is over the limit.
    pub(super) fn hold_limit(&mut self) -> Result<()> {
        if let Some(share) = self.cost.look()?
            && let Some(limit) = &mut self.limit
            && limit.hold(share)?
        {
            self.cost.measure()?;
        }
        Ok(())
    }

    /// Says once why nothing has happened, if nothing has.
    pub(super) fn tell_if_quiet(&mut self) {
        let is_over = |until| Instant::now() >= until;
        if self.quiet_until.is_some_and(is_over) {
            self.quiet_until = None;
            if self.attached.hits().count == 0 {
                eprintln!("{}", self.target.why_quiet());
            }
        }
    }

    /// Names the allocators of processes that have ended before anybody looked.
    pub(super) fn tell_missed(&mut self, symbolizer: &Symbolizer) {
        let files = symbolizer.code_files();
        self.loaded.tell_missed(files, self.target, self.args);
    }

    /// Takes all probes away.
    pub(super) fn detach(&mut self) {
        let mut links = mem::take(&mut self.links);
        links.append(&mut self.loaded.links);
        self.attached.detach(links);
    }

    /// Takes all probes away, and tells what they cost. Returns the harm for which the trace has ended.
    pub(super) fn finish(&mut self, output: &mut Output) -> Result<Option<String>> {
        self.loaded.tell_late(Duration::ZERO);
        self.cost.end_slice();
        self.detach();
        if let Some(limit) = &self.limit {
            limit.tell(self.cost.percent());
        }
        self.cost.tell(output)?;
        Ok(self.harm.take())
    }
}
