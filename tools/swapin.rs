//! swapin: pages read back from swap, by process.
//!
//! Hooks (`bpf/swapin.bpf.c`): the kernel's function that reads pages from swap, by fentry or
//! kprobe; with -s also the fault that waits for it, with --out the function that writes them.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use jiff::Zoned;
use libbpf_rs::Link;
use libbpf_rs::skel::Skel;
use memtools::bpf::attach::{self, Means, Variant};
use memtools::bpf::kernel_support;
use memtools::bpf::map_counts::Counts;
use memtools::bpf::map_create;
use memtools::export::metrics::{Family, Kind, Metrics, MetricsArgs};
use memtools::print::clock::{self, Clock};
use memtools::print::histogram::{self, Histogram};
use memtools::print::output::{self, Output};
use memtools::print::text;
use memtools::print::timeline::{Count, Moment, Unit};
use memtools::process::container::{self, ContainerArgs, Home, Homes};
use memtools::process::filter::{Filter, Tasks};
use memtools::run::cli::{self, CommonArgs};
use memtools::run::losses::{self, Losses};
use memtools::run::protect;
use memtools::run::schedule::{Due, Reports};
use memtools::run::target::{self, Target, TargetArgs};
use serde::Serialize;

use crate::bpf::Loaded;
use crate::bpf::types::{task_key, total};

memtools::skeleton!("swapin", SwapinSkelBuilder, stacks: none, plain: [task_key, total]);

/// Count pages read back from swap, by process.
#[derive(Debug, Parser)]
#[command(
    name = "swapin",
    version,
    max_term_width = 100,
    after_help = "\
examples:
  swapin                       every second, who reads pages back from swap
  swapin 10 6                  for a minute, every ten seconds
  swapin -s                    also how long processes were held up by it
  swapin --container           with the container or systemd unit of each process
  swapin --zswap               also how many of the pages were in memory still, compressed
  swapin -c 'make -j8'         those of a command, and of what it starts
  swapin --out                 also who writes pages to swap"
)]
struct Args {
    /// Leave out the time of day
    #[arg(short = 'T', long)]
    notime: bool,

    /// Add how long each process was held up, and a histogram of that at the end
    #[arg(short = 's', long)]
    latency: bool,

    /// Count apart what zswap had, compressed in memory, so that no device was read
    #[arg(long)]
    zswap: bool,

    /// Count pages written to swap too; mostly by kswapd, not by whose they are
    #[arg(long)]
    out: bool,

    #[command(flatten)]
    metrics: MetricsArgs,

    #[command(flatten)]
    containers: ContainerArgs,

    #[command(flatten)]
    target: TargetArgs,

    #[command(flatten)]
    common: CommonArgs,

    /// Seconds between reports
    #[arg(default_value = "1", value_parser = cli::seconds)]
    interval: Duration,

    /// Reports before it exits [default: until Ctrl-C]
    #[arg(value_parser = cli::count::<u64>)]
    count: Option<u64>,
}

static PAGES_IN: Family = Family {
    name: "memtools_swap_in_pages_total",
    help: "Pages read back from swap, by the task that read them.",
    labels: &["comm"],
    kind: Kind::Count,
};
static PAGES_ZSWAP: Family = Family {
    name: "memtools_swap_in_zswap_pages_total",
    help: "Pages read back from swap that zswap had in memory, compressed.",
    labels: &["comm"],
    kind: Kind::Count,
};
static PAGES_OUT: Family = Family {
    name: "memtools_swap_out_pages_total",
    help: "Pages written to swap, by the task that wrote them.",
    labels: &["comm"],
    kind: Kind::Count,
};
static HELD_UP: Family = Family {
    name: "memtools_swap_in_duration_seconds",
    help: "How long tasks were held up by pages to be read back from swap.",
    labels: &[],
    kind: Kind::Durations,
};

/// Names of the kernel's functions, the newer first.
const READ: [&str; 2] = ["swap_read_folio", "swap_readpage"];
const WRITE: [&str; 2] = ["swap_writeout", "swap_writepage"];
const ZSWAP: &str = "zswap_load";
/// What waits for pages that are read: of anonymous memory, and of shared memory.
const ANONYMOUS: &str = "do_swap_page";
const SHARED: [&str; 2] = ["shmem_swapin_folio", "shmem_swapin_page"];

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    kernel_support::preflight()?;
    attach::capture_log(args.common.verbose);
    let mut metrics = args.metrics.open("swapin", &args.families())?;
    let (mut poller, mut output) = args.common.start("swapin")?;
    let mut target = Target::choose(&args.target, Tasks::All)?;
    target::doubt_interval("swapin", Some(args.interval), &args.target.filter.pid);
    let zswap = zswap(&args)?;
    let (how, Attached { skel, links }) = attach(&args, zswap, target.filter())?;
    if args.latency && shared().is_none() {
        eprintln!(
            "swapin: this kernel has no {} for kprobes: HELD(ms) is without shared memory",
            SHARED[0]
        );
    }
    let maps = &skel.maps;
    let mut counts = Counts::new(&maps.totals, &maps.totals_a, &maps.totals_b);
    let with_cgroups = args.containers.wanted(args.common.json);
    let mut homes = Homes::if_wanted(with_cgroups, &maps.cgroup_paths);
    let columns = Columns {
        container: args.containers.container,
        zswap: args.zswap,
        latency: args.latency,
        out: args.out,
    };
    let clock = Clock::new();
    let mut held_up_ns = 0;
    let mut print = |output: &mut Output, metrics: &mut Metrics| -> Result<()> {
        let time = clock.local(clock::monotonic_ns());
        if !args.notime {
            output.header(&clock::time_of_day(&time))?;
        }
        output.header(&columns.header())?;
        for row in rows(counts.take()?, &mut homes, &time, columns, zswap.is_some()) {
            held_up_ns += row.held_up_ns.unwrap_or(0);
            row.measure(metrics);
            output.row(&row)?;
        }
        if args.latency {
            metrics.set_durations(&HELD_UP, &[], latencies(&skel)?, held_up_ns);
        }
        output.header("")?;
        output.flush()
    };
    protect::from_lack_of_memory("swapin");
    eprintln!("swapin: tracing swap ins ({how})... Ctrl-C to end");
    target.release()?;

    target.watch_exit(&mut poller);
    let deadline = args.common.deadline();
    let mut reports = Reports::start(&mut poller, Some(args.interval), args.count, deadline)?;
    loop {
        match reports.wait(&mut poller)?.1 {
            Due::Nothing => {}
            Due::Report => {
                print(&mut output, &mut metrics)?;
                losses::write_metrics(skel.object(), target.filter(), &mut metrics)?;
            }
            Due::Last => break,
        }
    }
    attach::detach(links);
    print(&mut output, &mut metrics)?;
    if args.latency {
        output.row(&histogram::Named {
            name: "swapin_ns",
            buckets: latencies(&skel)?,
        })?;
        output.flush()?;
    }
    Losses::tell("swapin", skel.object(), target.filter(), &mut output)?;
    losses::finish_metrics(skel.object(), target.filter(), metrics)?;
    output.finish()?;
    target.finish()
}

impl Args {
    /// What is kept for Prometheus.
    fn families(&self) -> Vec<&'static Family> {
        let asked_for = [
            (true, &PAGES_IN),
            (self.zswap, &PAGES_ZSWAP),
            (self.out, &PAGES_OUT),
            (self.latency, &HELD_UP),
        ];
        let asked_for = asked_for.into_iter().filter(|(asked_for, _)| *asked_for);
        asked_for.map(|(_, family)| family).collect()
    }
}

/// How long tasks were held up since the start.
fn latencies(skel: &Loaded) -> Result<Histogram> {
    let bss = skel.maps.bss_data.as_deref();
    let slots = bss.context("the BPF object has no data")?.latency_ns.slots;
    Ok(slots.into())
}

struct Attached {
    skel: Loaded,
    links: Vec<Link>,
}

/// How zswap answers, if that is wanted and the kernel has the function by which it is asked.
fn zswap(args: &Args) -> Result<Option<Zswap>> {
    if !args.zswap {
        return Ok(None);
    }
    if !kernel_support::btf_has_name(ZSWAP) {
        eprintln!("swapin: this kernel has no {ZSWAP} (6.6 and later, with CONFIG_ZSWAP)");
        return Ok(None);
    }
    let result = kernel_support::function_result(ZSWAP)?;
    Ok(Some(Zswap {
        says_bool: ["bool", "_Bool"].contains(&result.as_str()),
    }))
}

#[derive(Debug, Clone, Copy)]
struct Zswap {
    /// Whether it says "true" of what it has, or 0 as for success.
    says_bool: bool,
}

fn attach(args: &Args, zswap: Option<Zswap>, filter: &Filter) -> Result<(&'static str, Attached)> {
    let variants = [("fentry", Means::Fentry), ("kprobe", Means::Kprobes)];
    let variants = variants.map(|(kind, means)| {
        let variant = Variant::new(kind, move || {
            let mut programs = Vec::new();
            if args.latency || zswap.is_some() {
                programs.push("thread_exit".to_owned());
            }
            if args.latency {
                if let Some(function) = shared() {
                    programs.push(format!("{function}_end_kprobe"));
                    programs.push(format!("{function}_begin_kprobe"));
                }
                programs.push(format!("{ANONYMOUS}_end_{kind}"));
                programs.push(format!("{ANONYMOUS}_begin_{kind}"));
            }
            programs.extend(zswap.map(|_| format!("{ZSWAP}_{kind}")));
            if args.out {
                programs.push(format!("{}_{kind}", function(WRITE)?));
            }
            programs.push(format!("{}_{kind}", function(READ)?));
            load(args, zswap, filter, &programs)
        });
        variant.needing(means)
    });
    attach::first_that_works(args.common.verbose, attach::exact_first(variants.into()))
}

/// The function that waits for shared memory, if this kernel has it by itself, and kprobes for it.
fn shared() -> Option<&'static str> {
    kernel_support::name_here(&SHARED).filter(|_| kernel_support::has_kprobes())
}

/// What this kernel calls the function.
fn function(names: [&'static str; 2]) -> Result<&'static str> {
    kernel_support::name_here(&names).with_context(|| {
        format!(
            "this kernel has no function {}; it may be built without swap (CONFIG_SWAP)",
            names.join(" or ")
        )
    })
}

/// Loads and attaches these programs.
fn load(
    args: &Args,
    zswap: Option<Zswap>,
    filter: &Filter,
    programs: &[String],
) -> Result<Attached> {
    let programs: Vec<&str> = programs.iter().map(String::as_str).collect();
    let mut open = bpf::prepare(filter)?;
    let wanted = args.containers.wanted(args.common.json);
    let with_cgroups = container::prepare(wanted, &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.with_latency = args.latency.into();
    options.with_cgroups = with_cgroups;
    options.with_zswap = zswap.is_some().into();
    options.zswap_says_bool = zswap.is_some_and(|zswap| zswap.says_bool).into();
    if zswap.is_none() {
        map_create::size(&mut open.maps.reading, 1)?;
    }
    if !args.latency {
        map_create::size(&mut open.maps.faults, 1)?;
    }
    let mut skel = open.load_only(&programs)?;
    let links = attach::by_name(skel.object_mut(), &programs)?;
    Ok(Attached { skel, links })
}

/// The counts of one interval, who read the most last.
fn rows<'a>(
    counts: Vec<(task_key, total)>,
    homes: &mut Option<Homes<'_>>,
    time: &'a Zoned,
    columns: Columns,
    zswap: bool,
) -> Vec<Row<'a>> {
    let row = |(key, total): (task_key, total)| Row {
        time,
        pid: key.pid,
        comm: text::from_c(&key.comm),
        home: homes.as_mut().map(|homes| homes.of(key.cgroup)),
        pages_in: total.pages_in,
        pages_zswap: zswap.then_some(total.pages_zswap),
        pages_out: columns.out.then_some(total.pages_out),
        held_up_ns: columns.latency.then_some(total.held_up_ns),
        columns,
    };
    let mut rows: Vec<Row<'_>> = counts.into_iter().map(row).collect();
    rows.sort_by_key(|row| (row.pages_in, row.pages_out, row.pid));
    rows
}

/// Columns that not everybody wants.
#[derive(Debug, Clone, Copy)]
struct Columns {
    container: bool,
    zswap: bool,
    latency: bool,
    out: bool,
}

impl Columns {
    fn header(self) -> String {
        let mut header = format!("{:<16} {:<7} ", "COMM", "PID");
        header += &container::header(self.container);
        header += &format!("{:<8}", "COUNT");
        if self.zswap {
            header += &format!(" {:<8}", "ZSWAP");
        }
        if self.out {
            header += &format!(" {:<8}", "OUT");
        }
        if self.latency {
            header += " HELD(ms)";
        }
        header.trim_end().to_owned()
    }
}

/// The pages of one process in one interval.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "process")]
struct Row<'a> {
    #[serde(serialize_with = "clock::serialize")]
    time: &'a Zoned,
    pid: u32,
    comm: String,
    #[serde(flatten)]
    home: Option<Home>,
    pages_in: u64,
    /// How many of the pages came from zswap. None where they are not counted, or cannot be.
    pages_zswap: Option<u64>,
    /// None where they are not counted.
    pages_out: Option<u64>,
    held_up_ns: Option<u64>,
    #[serde(skip)]
    columns: Columns,
}

impl Row<'_> {
    fn measure(&self, metrics: &mut Metrics) {
        let labels = &[self.comm.as_str()];
        metrics.add(&PAGES_IN, labels, self.pages_in);
        for (family, pages) in [
            (&PAGES_ZSWAP, self.pages_zswap),
            (&PAGES_OUT, self.pages_out),
        ] {
            if let Some(pages) = pages {
                metrics.add(family, labels, pages);
            }
        }
    }
}

impl output::Row for Row<'_> {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut line = format!("{:<16} {:<7} ", self.comm, self.pid);
        line += &container::column(self.home.as_ref());
        line += &format!("{:<8}", self.pages_in);
        if self.columns.zswap {
            let pages = self.pages_zswap.map(|pages| pages.to_string());
            line += &format!(" {:<8}", pages.as_deref().unwrap_or("-"));
        }
        if let Some(pages) = self.pages_out {
            line += &format!(" {pages:<8}");
        }
        if let Some(ns) = self.held_up_ns {
            line += &format!(" {:.2}", ns as f64 / 1e6);
        }
        writeln!(out, "{}", line.trim_end())
    }

    fn moment(&self) -> Moment<'_> {
        let count = |name: &'static str, unit, more: Option<u64>| {
            Some(Count {
                name: name.into(),
                unit,
                process: Some((self.pid, &self.comm)),
                time: self.time,
                more: more?,
            })
        };
        let counts = [
            count("pages swapped in", Unit::Count, Some(self.pages_in)),
            count("pages from zswap", Unit::Count, self.pages_zswap),
            count("pages swapped out", Unit::Count, self.pages_out),
            count("held up by swap", Unit::Nanoseconds, self.held_up_ns),
        ];
        Moment::Counts(counts.into_iter().flatten().collect())
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use memtools::print::output::Row as _;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn the_interval_and_the_count_are_positional() {
        let args = Args::try_parse_from(["swapin"]).expect("valid");
        assert_eq!((args.interval, args.count), (Duration::from_secs(1), None));
        let args = Args::try_parse_from(["swapin", "-T", "0.5", "3"]).expect("valid");
        assert_eq!(
            (args.interval, args.count),
            (Duration::from_millis(500), Some(3))
        );
        assert!(Args::try_parse_from(["swapin", "0"]).is_err());
    }

    #[test]
    fn a_timeline_has_what_is_counted() {
        let counts = |pages_zswap, pages_out, held_up_ns| {
            let row = Row {
                time: &Clock::new().local(0),
                pid: 4536,
                comm: "stress".into(),
                home: None,
                pages_in: 10,
                pages_zswap,
                pages_out,
                held_up_ns,
                columns: Columns {
                    container: false,
                    zswap: false,
                    latency: false,
                    out: false,
                },
            };
            let Moment::Counts(counts) = row.moment() else {
                panic!("they are counts");
            };
            let count = |count: &Count<'_>| {
                assert_eq!(count.process, Some((4536, "stress")));
                (count.name.to_string(), count.unit, count.more)
            };
            counts.iter().map(count).collect::<Vec<_>>()
        };
        let pages_in = ("pages swapped in".to_owned(), Unit::Count, 10);
        assert_eq!(counts(None, None, None), std::slice::from_ref(&pages_in));
        assert_eq!(
            counts(Some(7), Some(0), Some(123)),
            [
                pages_in,
                ("pages from zswap".to_owned(), Unit::Count, 7),
                ("pages swapped out".to_owned(), Unit::Count, 0),
                ("held up by swap".to_owned(), Unit::Nanoseconds, 123),
            ]
        );
    }

    #[test]
    fn columns_are_bcc_s_and_line_up() {
        let text = |zswap, latency, out, pages_zswap| {
            let columns = Columns {
                container: false,
                zswap,
                latency,
                out,
            };
            let row = Row {
                time: &Clock::new().local(0),
                pid: 4536,
                comm: "gnome-shell".into(),
                home: None,
                pages_in: 14,
                pages_zswap,
                pages_out: out.then_some(3),
                held_up_ns: latency.then_some(1_500_000),
                columns,
            };
            let mut line = Vec::new();
            row.text(&mut line).expect("memory");
            format!("{}\n{}", columns.header(), String::from_utf8_lossy(&line))
        };
        assert_eq!(
            text(false, false, false, None),
            "COMM             PID     COUNT\n\
             gnome-shell      4536    14\n"
        );
        assert_eq!(
            text(true, true, true, Some(11)),
            "COMM             PID     COUNT    ZSWAP    OUT      HELD(ms)\n\
             gnome-shell      4536    14       11       3        1.50\n"
        );
        assert_eq!(
            text(true, false, false, None),
            "COMM             PID     COUNT    ZSWAP\n\
             gnome-shell      4536    14       -\n"
        );
    }
}
