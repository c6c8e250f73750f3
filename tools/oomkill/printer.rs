//! Events as rows, in metrics and in files of other formats.

use std::fs;
use std::rc::Rc;

use anyhow::Result;
use libbpf_rs::MapMut;
use memtools::bpf::types::known;
use memtools::export::exposition::MetricKind;
use memtools::export::files::{Exports, ProfileInfo};
use memtools::export::metrics::{Family, Metrics};
use memtools::export::profile::{Sample, ValueType};
use memtools::host::page_size;
use memtools::print::clock::Clock;
use memtools::print::gfp::Gfp;
use memtools::print::output::Output;
use memtools::print::text;
use memtools::process::cgroup::Cgroups;
use memtools::process::container::{self, CgroupResolver};
use memtools::process::origin::Origin;
use memtools::process::proc::Process;
use memtools::stacks::events::EventStacks;
use memtools::stacks::named::{NamedStack, StackIds};

use crate::args::Args;
use crate::bpf::Loaded;
use crate::bpf::types::{event, event_kind, oom_kind, task};
use crate::row::{AlsoKilled, Kill, LimitKind, Victim};
use crate::victim_filter::VictimFilter;
use crate::{candidates, row};

/// Smallest limit in KB that means "no limit": PAGE_COUNTER_MAX is LONG_MAX bytes.
const NO_LIMIT_KB: u64 = (i64::MAX as u64 >> 10) & !3;

pub(crate) static KILLS: Family = Family {
    name: "memtools_oom_kills_total",
    help: "OOM kills, by limit: the machine's (global), a cgroup's (memcg).",
    labels: &["comm", "unit", "container", "kind"],
    kind: MetricKind::Counter,
};

/// Kind in metrics of processes that are killed with a victim, as they share its memory or its whole cgroup is
/// killed.
const ALSO_KILLED: &str = "also_killed";

/// Printer that turns events into rows.
pub(crate) struct Printer<'a> {
    pub(crate) output: Output,
    clock: Clock,
    cgroups: Cgroups,
    cgroup_resolver: CgroupResolver<'a>,
    container: bool,
    pub(crate) stacks: EventStacks<'a, MapMut<'static>>,
    /// Samples for the files, one for each kill.
    kills: Vec<Sample>,
    pub(crate) exports: Exports,
    pub(crate) metrics: Metrics,
    page_kb: u64,
    /// Whether mark_victim is the only hook.
    alone: bool,
    extended: bool,
    /// Tid of the task that needed memory at the last kill, and pid of the victim.
    last: Option<(u32, u32)>,
    /// Filter for the victims. None if all kills are requested.
    choice: Option<VictimFilter>,
}

impl<'a> Printer<'a> {
    /// Makes a printer. `alone`: whether mark_victim is the only hook. `choice` is None where all kills are
    /// requested.
    #[expect(clippy::too_many_arguments, reason = "each is made by itself in run()")]
    pub(crate) fn new(
        args: &Args,
        skel: &'a Loaded,
        alone: bool,
        choice: Option<VictimFilter>,
        stacks: EventStacks<'a, MapMut<'static>>,
        output: Output,
        exports: Exports,
        metrics: Metrics,
    ) -> Result<Self> {
        Ok(Self {
            output,
            clock: Clock::new(),
            cgroups: Cgroups::new(),
            cgroup_resolver: CgroupResolver::new(&skel.maps.cgroup_paths),
            container: args.containers.container,
            stacks,
            kills: Vec::new(),
            exports,
            metrics,
            page_kb: page_size::page_bytes()? / 1024,
            alone,
            extended: args.extended || args.common.json,
            last: None,
            choice,
        })
    }

    pub(crate) fn print(&mut self, events: impl Iterator<Item = event>) -> Result<()> {
        self.stacks.refresh();
        for event in events {
            if let Some(choice) = &self.choice
                && !choice.wants(&event, &mut self.cgroups, &mut self.cgroup_resolver)
            {
                continue;
            }
            if event.event == event_kind::EVENT_KILL || self.alone {
                let kill = self.kill(&event)?;
                self.last = Some((event.tid, event.victim.pid));
                self.record_metrics(
                    &kill.victim,
                    kill.kind.map_or("unknown", row::LimitKind::name),
                );
                self.output.row(&kill)?;
            } else if self.last != Some((event.tid, event.victim.pid)) {
                let row = AlsoKilled {
                    origin: self.origin(&event),
                    victim: self.victim(&event.victim),
                };
                self.record_metrics(&row.victim, ALSO_KILLED);
                if self.extended {
                    self.output.row(&row)?;
                }
            }
        }
        self.stacks.renew()?;
        self.output.flush()
    }

    fn record_metrics(&mut self, victim: &Victim, kind: &str) {
        let comm = victim.comm.as_deref().unwrap_or("unknown");
        let [unit, container] = container::labels(Some(&victim.cgroup_info));
        self.metrics.add(&KILLS, &[comm, unit, container, kind], 1);
    }

    /// Writes the stacks of all kills into the files that are requested.
    pub(crate) fn export(&mut self) {
        if self.exports.is_enabled() {
            let subject = ProfileInfo {
                name: "OOM kills".to_owned(),
                values: vec![ValueType::count("oom_kills", "kills")],
                main_value: 0,
                by_thread: true,
                remarks: Vec::new(),
            };
            self.exports.write(subject, std::mem::take(&mut self.kills));
        }
    }

    fn kill(&mut self, event: &event) -> Result<Kill> {
        let kind = match event.kind {
            oom_kind::OOM_GLOBAL => Some(LimitKind::Global),
            oom_kind::OOM_MEMCG => Some(LimitKind::Memcg),
            oom_kind::OOM_CPUSET => Some(LimitKind::Cpuset),
            oom_kind::OOM_SYSRQ => Some(LimitKind::Sysrq),
            _ => None,
        };
        let limit_cgroup = self.limit_cgroup(event);
        let candidates = self.extended.then(|| {
            let cgroup = limit_cgroup.as_deref().filter(|_| event.limit_cgroup != 0);
            candidates::highest_ranked(cgroup, event.victim.pid)
        });
        let stack = self.named(event)?;
        if self.exports.is_enabled()
            && let Some(stack) = &stack
        {
            self.kills.push(Sample {
                stack: NamedStack::clone(stack),
                values: vec![1],
            });
        }
        Ok(Kill {
            origin: self.origin(event),
            victim: self.victim(&event.victim),
            total_pages: known(event.total_pages),
            kind,
            limit_cgroup,
            limit_cgroup_id: Some(event.limit_cgroup).filter(|&id| id != 0),
            limit_kb: self
                .kb(event.limit_pages)
                .filter(|&limit| limit < NO_LIMIT_KB),
            order: kind
                .filter(|&kind| kind != LimitKind::Sysrq)
                .map(|_| event.order),
            gfp_flags: kind.map(|_| Gfp(event.gfp_flags)),
            loadavg: loadavg(),
            candidates,
            stack,
            extended: self.extended,
            container: self.container,
        })
    }

    fn origin(&self, event: &event) -> Origin {
        let time = self.clock.local(event.time_ns);
        Origin::new(time, (event.pid, event.tid), &event.comm, None)
    }

    /// Returns the cgroup at its limit: its path in a hierarchy of version 2, else its name alone.
    fn limit_cgroup(&mut self, event: &event) -> Option<String> {
        if event.kind != oom_kind::OOM_MEMCG {
            return None;
        }
        let path = match event.limit_cgroup {
            0 => None,
            id => self.cgroups.path(id),
        };
        Some(path.map_or_else(|| text::from_c(&event.limit_name), str::to_owned))
    }

    fn victim(&mut self, task: &task) -> Victim {
        if task.known == 0 {
            // The kernel names the first thread that has not ended. The victim has not exited yet: its name may still
            // be in /proc.
            let pid = Process::of_thread(task.pid).map_or(task.pid, |process| process.pid());
            let comm = fs::read_to_string(format!("/proc/{pid}/comm")).ok();
            return Victim {
                pid,
                comm: comm.map(|comm| text::escape(comm.trim_end_matches('\n')).into_owned()),
                ..Victim::default()
            };
        }
        Victim {
            pid: task.pid,
            comm: Some(text::from_c(&task.comm)),
            uid: Some(task.uid),
            oom_score_adj: Some(task.oom_score_adj),
            anon_kb: self.kb(task.anon_pages),
            file_kb: self.kb(task.file_pages),
            shmem_kb: self.kb(task.shmem_pages),
            swap_kb: self.kb(task.swap_pages),
            page_tables_kb: known(task.page_table_bytes).map(|bytes| bytes / 1024),
            total_vm_kb: self.kb(task.total_vm_pages),
            cgroup_info: self.cgroup_resolver.of(task.cgroup),
        }
    }

    fn kb(&self, pages: u64) -> Option<u64> {
        known(pages).map(|pages| pages.saturating_mul(self.page_kb))
    }

    /// Symbolizes the stacks of the task that needed memory. None if stacks are not requested.
    fn named(&mut self, event: &event) -> Result<Option<Rc<NamedStack>>> {
        let ids = StackIds {
            pid: event.pid,
            comm: &text::from_c(&event.comm),
            user: Some(event.user_stack),
            kernel: Some(event.kernel_stack),
        };
        self.stacks.named(&ids)
    }
}

fn loadavg() -> Option<String> {
    let loadavg = fs::read_to_string("/proc/loadavg").ok()?;
    Some(loadavg.trim_end().to_owned())
}
