//! oomkill: processes that the kernel kills because memory has run out.
//!
//! Hooks: `oom_kill_process()` by fentry or by a kprobe, else the tracepoint `mark_victim` alone,
//! with the victim or with its pid (`bpf/oomkill.bpf.c`). An event becomes a row ([`row`]); with --extended what can be read from
//! /proc at that moment comes with it ([`candidates`]).

mod candidates;
mod row;

use std::fs;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use libbpf_rs::skel::{OpenSkel, Skel};
use libbpf_rs::{Link, MapMut};
use memtools::attach::{self, Means, Variant};
use memtools::cgroup::Cgroups;
use memtools::cli::{self, CommonArgs};
use memtools::clock::Clock;
use memtools::events::Events;
use memtools::filter::{Filter, FilterArgs};
use memtools::folded::Part;
use memtools::gfp::Gfp;
use memtools::kernel;
use memtools::losses::Losses;
use memtools::output::Output;
use memtools::poll::Poller;
use memtools::stack::Stacks;
use memtools::symbolize::{self, Symbolizer};
use memtools::text;
use memtools::unwind::{UnwindArgs, Unwinder};

use crate::bpf::types::{event, event_kind, oom_kind, task};
use crate::bpf::{OomkillSkel, OomkillSkelBuilder};
use crate::row::{AlsoKilled, Kill, Kind, Victim};

memtools::skeleton!("oomkill", plain: [event, filter]);

/// What the kernel half says of a number that it could not have; UNKNOWN.
const UNKNOWN: u64 = u64::MAX;

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
    filter: FilterArgs,

    #[command(flatten)]
    common: CommonArgs,
}

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    kernel::preflight()?;
    attach::capture_log(args.common.verbose);
    let filter = args.filter.resolve(None)?;
    let mut poller = Poller::new()?;
    let extended = args.extended || args.common.json;
    let symbolizer = extended.then(Symbolizer::of_all_processes).transpose()?;
    let arguments = kernel::tracepoint_arguments("mark_victim")?
        .context("this kernel has no tracepoint mark_victim")?;
    let with_task = arguments.first().is_some_and(|name| name == "task_struct");
    let start = |rung| start(&args, &filter, rung, with_task);
    let variant = |rung: Rung| Variant::new(rung.name(), move || start(rung));
    let variants = [
        variant(Rung::Fentry).needing(Means::Fentry),
        variant(Rung::Kprobe).needing(Means::Kprobes),
        variant(Rung::Victim),
        variant(Rung::Pid),
    ];
    let (how, (skel, links)) = attach::first_that_works(args.common.verbose, variants)?;
    let unwinder = extended
        .then(|| {
            let named = args.filter.pid.as_slice();
            Unwinder::start(args.unwind, memtools::unwind_parts!(skel), named)
        })
        .transpose()?;
    let events: Events<event> = Events::new(&skel.maps.events)?;

    let mut printer = Printer {
        output: Output::new(args.common.format()),
        clock: Clock::new(),
        cgroups: Cgroups::new(),
        stacks: Stacks::new(&skel.maps.stacks),
        symbolizer,
        page_kb: kernel::page_bytes()? / 1024,
        alone: [Rung::Victim, Rung::Pid].map(Rung::name).contains(&how),
        extended,
        last: None,
    };

    let mappings = printer.look_around()?;
    if let Some(mappings) = &mappings {
        poller.watch_mappings(mappings);
    }
    eprintln!("oomkill: tracing OOM kills ({how}), Ctrl-C to end");
    let deadline = args.common.deadline();
    events.follow(poller, deadline, links, |events| printer.print(events))?;
    Losses::tell("oomkill", skel.object(), &filter, &mut printer.output)?;
    if let Some(unwinder) = unwinder {
        unwinder.tell("oomkill", &mut printer.output)?;
    }
    Ok(ExitCode::SUCCESS)
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
fn start(
    args: &Args,
    filter: &Filter,
    rung: Rung,
    with_task: bool,
) -> Result<(OomkillSkel<'static>, Vec<Link>)> {
    ensure!(
        rung != Rung::Victim || with_task,
        "mark_victim has only the pid on this kernel"
    );
    let with_task = with_task && rung != Rung::Pid;
    if !with_task {
        kernel::preflight_tracepoints()?;
    }
    let mut open = attach::open::<OomkillSkelBuilder>()?;
    let options = attach::options(&mut open.maps.rodata_data)?;
    filter.set(&mut options.filter);
    let FilterArgs { pid, name, cgroup } = &args.filter;
    options.filtered = (!pid.is_empty() || name.is_some() || cgroup.is_some()).into();
    memtools::set_unwind_options!(options, args.unwind);
    options.want_stacks = (args.extended || args.common.json).into();
    options.only_victims = matches!(rung, Rung::Victim | Rung::Pid).into();
    open.progs.kill_fentry.set_autoload(rung == Rung::Fentry);
    open.progs.kill_kprobe.set_autoload(rung == Rung::Kprobe);
    open.progs.mark_victim.set_autoload(with_task);
    open.progs.mark_victim_pid.set_autoload(!with_task);
    let skel = open.load().context("failed to load")?;
    filter.set_cgroup(&skel.maps.filter_cgroup)?;

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

/// Turns events into rows.
struct Printer<'a> {
    output: Output,
    clock: Clock,
    cgroups: Cgroups,
    stacks: Stacks<'a, MapMut<'static>>,
    symbolizer: Option<Symbolizer>,
    page_kb: u64,
    /// Whether there is nothing but mark_victim.
    alone: bool,
    extended: bool,
    /// Of the last kill, the thread that wanted memory, and the victim.
    last: Option<(u32, u32)>,
}

impl Printer<'_> {
    /// Remembers what processes execute: the one whose stack is to be named is often the victim.
    /// Returns what to wait for to hear of changes.
    fn look_around(&mut self) -> Result<Option<OwnedFd>> {
        let Some(symbolizer) = &mut self.symbolizer else {
            return Ok(None);
        };
        symbolizer.look_around();
        symbolizer.descriptor().map(Some)
    }

    fn print(&mut self, events: impl Iterator<Item = event>) -> Result<()> {
        if let Some(symbolizer) = &mut self.symbolizer {
            symbolizer.refresh();
        }
        for event in events {
            if event.event == event_kind::EVENT_KILL || self.alone {
                let kill = self.kill(&event)?;
                self.last = Some((event.tid, event.victim.pid));
                self.output.row(&kill)?;
            } else if self.extended && self.last != Some((event.tid, event.victim.pid)) {
                let row = AlsoKilled {
                    time: self.clock.local(event.time_ns),
                    pid: event.pid,
                    comm: text::from_c(&event.comm),
                    victim: self.victim(&event.victim),
                };
                self.output.row(&row)?;
            }
        }
        self.output.flush()
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
        let (kernel, user) = self.name_stacks(event)?;
        Ok(Kill {
            time: self.clock.local(event.time_ns),
            pid: event.pid,
            tid: event.tid,
            comm: text::from_c(&event.comm),
            victim: self.victim(&event.victim),
            total_pages: known(event.total_pages),
            kind,
            limit_cgroup,
            limit_kb: self
                .kb(event.limit_pages)
                .filter(|&limit| limit < NO_LIMIT_KB),
            order: kind
                .filter(|&kind| kind != Kind::Sysrq)
                .map(|_| event.order),
            gfp_flags: kind.map(|_| Gfp(event.gfp_flags)),
            loadavg: loadavg(),
            candidates,
            kernel_stack: kernel.map(|part| part.frames),
            user_stack_truncated: user.as_ref().and_then(|part| part.truncated.clone()),
            user_stack: user.map(|part| part.frames),
            extended: self.extended,
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
            cgroup: self.cgroups.path(task.cgroup).map(str::to_owned),
        }
    }

    fn kb(&self, pages: u64) -> Option<u64> {
        known(pages).map(|pages| pages.saturating_mul(self.page_kb))
    }

    /// The kernel's and the user's frames of the task that wanted memory.
    fn name_stacks(&mut self, event: &event) -> Result<(Option<Part>, Option<Part>)> {
        let Some(symbolizer) = &mut self.symbolizer else {
            return Ok((None, None));
        };
        let mut part = |id| -> Result<Option<Part>> {
            let stack = self.stacks.get(id)?;
            Ok(stack.map(|stack| {
                let part = symbolizer.part(event.pid, &stack);
                Part {
                    frames: symbolize::without_tracer(&part.frames).to_vec(),
                    ..part
                }
            }))
        };
        Ok((part(event.kernel_stack)?, part(event.user_stack)?))
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
