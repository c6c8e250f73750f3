//! oomkill: processes that the kernel kills because memory has run out.
//!
//! Hooks: `oom_kill_process()` by fentry or by a kprobe, else the tracepoint `mark_victim` alone,
//! with the victim or with its pid (`bpf/oomkill.bpf.c`). An event becomes a row ([`row`]); with --extended what can be read from
//! /proc at that moment comes with it ([`candidates`]).

mod candidates;
mod row;

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use libbpf_rs::skel::Skel;
use libbpf_rs::{Link, MapMut};
use memtools::bpf::attach::{self, Means, Variant};
use memtools::bpf::kernel_support;
use memtools::bpf::map_create;
use memtools::bpf::ring::Events;
use memtools::export::files::{ExportArgs, Exports, Subject};
use memtools::export::metrics::{self, Family, Metrics, MetricsArgs};
use memtools::export::profile::{Sample, Value};
use memtools::print::clock::Clock;
use memtools::print::gfp::Gfp;
use memtools::print::output::Output;
use memtools::print::text;
use memtools::process::cgroup::Cgroups;
use memtools::process::container::{ContainerArgs, Homes};
use memtools::process::filter::{Filter, Tasks};
use memtools::run::cli::{self, CommonArgs};
use memtools::run::losses::{self, Losses};
use memtools::run::protect;
use memtools::run::skeleton::StackRoom;
use memtools::run::target::{Target, TargetArgs};
use memtools::stacks::named::{NamedStack, StackIds};
use memtools::stacks::symbolize::Symbolizer;
use memtools::stacks::table::{MAX_OF_EVENTS, Stacks};
use memtools::stacks::unwind::{UnwindArgs, Unwinder};

use crate::bpf::Loaded;
use crate::bpf::types::{event, event_kind, oom_kind, task};
use crate::row::{AlsoKilled, Kill, Kind, Victim};

memtools::skeleton!("oomkill", OomkillSkelBuilder, stacks: unwound, plain: [event]);

/// What the kernel half says of a number that it could not have; UNKNOWN.
const UNKNOWN: u64 = u64::MAX;

/// Distinct stacks that there is room for at first. A kill has two, and a machine that is out of memory is
/// not to be asked for more.
const STACKS: u32 = 256;

/// Bytes of the buffer for events: hundreds of kills.
const EVENT_BYTES: u32 = 1 << 18;

/// Cgroups whose paths the kernel half keeps: victims' of one look at the buffer.
const CGROUPS: u32 = 128;

/// Limits from here on are none: PAGE_COUNTER_MAX is LONG_MAX bytes.
const NO_LIMIT_KB: u64 = (i64::MAX as u64 >> 10) & !3;

/// Show processes that the kernel kills because memory has run out, and for whom.
#[derive(Debug, Parser)]
#[command(
    name = "oomkill",
    version,
    max_term_width = 100,
    after_help = "\
examples:
  oomkill                      a line for each kill, until Ctrl-C
  oomkill -e                   with the limit, the victim's memory, who is next, and stacks
  oomkill -j >>/var/log/oomkill.json
  oomkill --cgroup /sys/fs/cgroup/db.service"
)]
struct Args {
    /// Add why: whose limit, the victim's memory, who else was killed, who is next, and stacks
    #[arg(short, long)]
    extended: bool,

    #[command(flatten)]
    unwind: UnwindArgs,

    #[command(flatten)]
    export: ExportArgs,

    #[command(flatten)]
    metrics: MetricsArgs,

    #[command(flatten)]
    containers: ContainerArgs,

    #[command(flatten)]
    target: TargetArgs,

    #[command(flatten)]
    common: CommonArgs,
}

static KILLS: Family = Family {
    name: "memtools_oom_kills_total",
    help: "Processes that were killed because memory ran out, by whose: the machine's (global), a cgroup's (memcg).",
    labels: &["comm", "kind"],
    kind: metrics::Kind::Count,
};
/// The kind of those that are killed with a victim, as they share its memory or its cgroup is killed whole.
const ALSO_KILLED: &str = "also_killed";

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    kernel_support::preflight()?;
    attach::capture_log(args.common.verbose);
    let exports = args.export.prepare("oomkill", args.target.to_string())?;
    let metrics = args.metrics.open("oomkill", &[&KILLS])?;
    let (mut poller, output) = args.common.start("oomkill")?;
    let mut target = Target::choose(&args.target, Tasks::All)?;
    let extended = args.extended || args.common.json;
    let symbolizer = args
        .wants_stacks()
        .then(|| {
            let symbolizer = Symbolizer::of_all_processes()?;
            symbolizer.with_source(args.export.source, args.export.any())
        })
        .transpose()?;
    let arguments = kernel_support::tracepoint_arguments("mark_victim")?
        .context("this kernel has no tracepoint mark_victim")?;
    let with_task = arguments.first().is_some_and(|name| name == "task_struct");
    let start = |rung| start(&args, target.filter(), rung, with_task);
    let variant = |rung: Rung| Variant::new(rung.name(), move || start(rung));
    let variants = [
        variant(Rung::Fentry).needing(Means::Fentry),
        variant(Rung::Kprobe).needing(Means::Kprobes),
        variant(Rung::Victim),
        variant(Rung::Pid),
    ];
    let (how, (skel, links)) = attach::first_that_works(args.common.verbose, variants)?;
    let unwinder = args
        .wants_stacks()
        .then(|| {
            // The victim is often who wanted the memory, and its death the first that is seen of it: the
            // tables of those that are most likely to be killed are made before.
            let likely = candidates::now(None, 0).into_iter();
            let likely: Vec<u32> = likely.map(|candidate| candidate.pid).collect();
            target.unwinder_and(args.unwind, memtools::unwind_parts!(skel), &likely)
        })
        .transpose()?;
    let events: Events<event> = Events::new(&skel.maps.events)?;

    let mut printer = Printer {
        output,
        clock: Clock::new(),
        cgroups: Cgroups::new(),
        homes: Homes::new(&skel.maps.cgroup_paths),
        container: args.containers.container,
        stacks: Stacks::new(memtools::stack_maps!(skel), MAX_OF_EVENTS)?,
        symbolizer,
        kills: Vec::new(),
        exports,
        metrics,
        page_kb: kernel_support::page_bytes()? / 1024,
        alone: [Rung::Victim, Rung::Pid].map(Rung::name).contains(&how),
        extended,
        last: None,
        choice: Choice::of(&args.target, &target),
    };

    if let Some(symbolizer) = &mut printer.symbolizer {
        symbolizer.name_python(unwinder.as_ref().and_then(Unwinder::names));
    }
    let mappings = printer.look_around()?;
    if let Some(mappings) = &mappings {
        poller.watch_mappings(mappings);
    }
    printer.exports.begin();
    protect::from_lack_of_memory("oomkill");
    eprintln!("oomkill: tracing OOM kills ({how}), Ctrl-C to end");
    target.release()?;
    target.watch_exit(&mut poller);
    if printer.metrics.any() {
        poller.tick_every(metrics::LOOK)?;
    }
    let deadline = args.common.deadline();
    events.follow(poller, deadline, links, |events| {
        printer.print(events)?;
        losses::write_metrics(skel.object(), target.filter(), &mut printer.metrics)
    })?;
    if let Some(symbolizer) = &printer.symbolizer {
        symbolizer.tell_losses("oomkill");
    }
    Losses::tell(
        "oomkill",
        skel.object(),
        target.filter(),
        &mut printer.output,
    )?;
    if let Some(unwinder) = unwinder {
        unwinder.tell("oomkill", &mut printer.output)?;
    }
    printer.export();
    losses::finish_metrics(skel.object(), target.filter(), printer.metrics)?;
    printer.exports.finish()?;
    printer.output.finish()?;
    target.finish()
}

/// How the kernel can be asked, the best way first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rung {
    Fentry,
    Kprobe,
    /// mark_victim with the task.
    Victim,
    /// mark_victim with its number.
    Pid,
}

impl Rung {
    fn name(self) -> &'static str {
        match self {
            Self::Fentry => "fentry",
            Self::Kprobe => "kprobe",
            Self::Victim => "mark_victim alone",
            Self::Pid => "mark_victim's pid alone",
        }
    }
}

/// Loads and attaches one rung. `with_task`: what mark_victim comes with.
fn start(args: &Args, filter: &Filter, rung: Rung, with_task: bool) -> Result<(Loaded, Vec<Link>)> {
    ensure!(
        rung != Rung::Victim || with_task,
        "mark_victim has only the pid on this kernel"
    );
    let with_task = with_task && rung != Rung::Pid;
    if !with_task {
        kernel_support::preflight_tracepoints()?;
    }
    let stacks = StackRoom::of(STACKS).if_wanted(args.wants_stacks());
    let mut open = bpf::prepare(filter, stacks, args.unwind)?;
    let options = open.options()?;
    options.want_stacks = args.wants_stacks().into();
    options.with_cgroups = 1;
    options.only_victims = matches!(rung, Rung::Victim | Rung::Pid).into();
    map_create::size(&mut open.maps.cgroup_paths, CGROUPS)?;
    map_create::size(&mut open.maps.events, EVENT_BYTES)?;
    open.progs.kill_fentry.set_autoload(rung == Rung::Fentry);
    open.progs.kill_kprobe.set_autoload(rung == Rung::Kprobe);
    open.progs.mark_victim.set_autoload(with_task);
    open.progs.mark_victim_pid.set_autoload(!with_task);
    let skel = open.load()?;

    let programs = &skel.progs;
    let mut wanted = match rung {
        Rung::Fentry => vec![&programs.kill_fentry],
        Rung::Kprobe => vec![&programs.kill_kprobe],
        Rung::Victim | Rung::Pid => Vec::new(),
    };
    wanted.push(if with_task {
        &programs.mark_victim
    } else {
        &programs.mark_victim_pid
    });
    let links = attach::all(&wanted, "")?;
    Ok((skel, links))
}

impl Args {
    fn wants_stacks(&self) -> bool {
        self.extended || self.common.json || self.export.any()
    }
}

/// Turns events into rows.
struct Printer<'a> {
    output: Output,
    clock: Clock,
    cgroups: Cgroups,
    homes: Homes<'a>,
    container: bool,
    stacks: Stacks<'a, MapMut<'static>>,
    symbolizer: Option<Symbolizer>,
    /// What the files show.
    kills: Vec<Sample>,
    exports: Exports,
    metrics: Metrics,
    page_kb: u64,
    /// Whether there is nothing but mark_victim.
    alone: bool,
    extended: bool,
    /// The thread that wanted memory at the last kill, and the victim.
    last: Option<(u32, u32)>,
    /// None: all.
    choice: Option<Choice>,
}

/// Which victims the options ask for.
struct Choice {
    pids: Vec<u32>,
    name: Option<String>,
    /// The id of the cgroup.
    cgroup: Option<u64>,
}

impl Choice {
    fn of(args: &TargetArgs, target: &Target) -> Option<Self> {
        args.is_some().then(|| Self {
            pids: target.pids(),
            name: args.filter.name.clone(),
            // It was opened before: what has gone since has no victims.
            cgroup: args
                .filter
                .cgroup
                .as_ref()
                .map(|path| fs::metadata(path).map_or(0, |folder| folder.ino())),
        })
    }
}

impl Printer<'_> {
    /// Remembers what processes execute: the one whose stack is to be named is often the victim.
    /// Returns what to wait for to hear of changes.
    fn look_around(&mut self) -> Result<Option<OwnedFd>> {
        let Some(symbolizer) = &mut self.symbolizer else {
            return Ok(None);
        };
        symbolizer.look_around();
        // There may be no memory for them later.
        symbolizer.read_kernel_names();
        symbolizer.descriptor().map(Some)
    }

    fn print(&mut self, events: impl Iterator<Item = event>) -> Result<()> {
        if let Some(symbolizer) = &mut self.symbolizer {
            symbolizer.refresh();
        }
        for event in events {
            if !self.wants(&event) {
                continue;
            }
            if event.event == event_kind::EVENT_KILL || self.alone {
                let kill = self.kill(&event)?;
                self.last = Some((event.tid, event.victim.pid));
                self.measure(&kill.victim, kill.kind.map_or("", row::Kind::name));
                self.output.row(&kill)?;
            } else if self.last != Some((event.tid, event.victim.pid)) {
                let row = AlsoKilled {
                    time: self.clock.local(event.time_ns),
                    pid: event.pid,
                    comm: text::from_c(&event.comm),
                    victim: self.victim(&event.victim),
                };
                self.measure(&row.victim, ALSO_KILLED);
                if self.extended {
                    self.output.row(&row)?;
                }
            }
        }
        self.stacks.renew_for_events()?;
        self.output.flush()
    }

    fn measure(&mut self, victim: &Victim, kind: &str) {
        let comm = victim.comm.as_deref().unwrap_or_default();
        self.metrics.add(&KILLS, &[comm, kind], 1);
    }

    /// Writes the stacks of all kills into the files that are asked for.
    fn export(&mut self) {
        if self.exports.any() {
            let subject = Subject {
                name: "OOM kills".to_owned(),
                values: vec![Value::count("oom_kills", "kills")],
                main: 0,
                by_thread: true,
                remarks: Vec::new(),
            };
            self.exports.write(subject, std::mem::take(&mut self.kills));
        }
    }

    /// Whether the options ask for the task that wanted memory, or for the victim.
    fn wants(&mut self, event: &event) -> bool {
        let Some(choice) = &self.choice else {
            return true;
        };
        let below = |path: Option<&str>, folder: &str| {
            path.and_then(|path| path.strip_prefix(folder.trim_end_matches('/')))
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let victim = &event.victim;
        event.wanted != 0
            || (choice.pids.is_empty() || choice.pids.contains(&victim.pid))
                && choice
                    .name
                    .as_ref()
                    .is_none_or(|name| text::from_c(&victim.comm).contains(name))
                && choice.cgroup.is_none_or(|folder| {
                    let folder = self.cgroups.path(folder).map(str::to_owned);
                    let there = self.cgroups.path(victim.cgroup).map(str::to_owned);
                    let victim = there.or_else(|| self.homes.of(victim.cgroup).cgroup);
                    folder.is_some_and(|folder| below(victim.as_deref(), &folder))
                })
    }

    fn kill(&mut self, event: &event) -> Result<Kill> {
        let kind = match event.kind {
            oom_kind::OOM_GLOBAL => Some(Kind::Global),
            oom_kind::OOM_MEMCG => Some(Kind::Memcg),
            oom_kind::OOM_CPUSET => Some(Kind::Cpuset),
            oom_kind::OOM_SYSRQ => Some(Kind::Sysrq),
            _ => None,
        };
        let limit_cgroup = self.limit_cgroup(event);
        let candidates = self.extended.then(|| {
            let cgroup = limit_cgroup.as_deref().filter(|_| event.limit_cgroup != 0);
            candidates::now(cgroup, event.victim.pid)
        });
        let stack = self.named(event)?;
        if self.exports.any()
            && let Some(stack) = &stack
        {
            self.kills.push(Sample {
                stack: stack.clone(),
                values: vec![1],
            });
        }
        Ok(Kill {
            time: self.clock.local(event.time_ns),
            pid: event.pid,
            tid: event.tid,
            comm: text::from_c(&event.comm),
            victim: self.victim(&event.victim),
            total_pages: known(event.total_pages),
            kind,
            limit_cgroup,
            limit_cgroup_id: Some(event.limit_cgroup).filter(|&id| id != 0),
            limit_kb: self
                .kb(event.limit_pages)
                .filter(|&limit| limit < NO_LIMIT_KB),
            order: kind
                .filter(|&kind| kind != Kind::Sysrq)
                .map(|_| event.order),
            gfp_flags: kind.map(|_| Gfp(event.gfp_flags)),
            loadavg: loadavg(),
            candidates,
            stack,
            extended: self.extended,
            container: self.container,
        })
    }

    /// The path where the hierarchy is version 2's, else the name alone.
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
            // It is still dying: perhaps its name is still there.
            let comm = fs::read_to_string(format!("/proc/{}/comm", task.pid)).ok();
            return Victim {
                pid: task.pid,
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
            home: self.homes.of(task.cgroup),
        }
    }

    fn kb(&self, pages: u64) -> Option<u64> {
        known(pages).map(|pages| pages.saturating_mul(self.page_kb))
    }

    /// The stacks of the task that wanted memory, with their names, if --extended asks for them.
    fn named(&mut self, event: &event) -> Result<Option<NamedStack>> {
        let ids = StackIds {
            pid: event.pid,
            comm: &text::from_c(&event.comm),
            user: Some(event.user_stack),
            kernel: Some(event.kernel_stack),
        };
        NamedStack::read_if_asked(&ids, &mut self.stacks, self.symbolizer.as_mut())
    }
}

fn known(number: u64) -> Option<u64> {
    (number != UNKNOWN).then_some(number)
}

fn loadavg() -> Option<String> {
    let loadavg = fs::read_to_string("/proc/loadavg").ok()?;
    Some(loadavg.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn every_rung_has_its_own_name() {
        assert_eq!(
            [Rung::Fentry, Rung::Kprobe, Rung::Victim, Rung::Pid].map(Rung::name),
            [
                "fentry",
                "kprobe",
                "mark_victim alone",
                "mark_victim's pid alone"
            ]
        );
    }
}
