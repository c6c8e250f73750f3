//! hfaults: faults on huge pages, by process.
//!
//! Hooks (`bpf/hfaults.bpf.c`): the kernel's function for such faults, by fentry or kprobe; where
//! neither can be had, the page-fault event, with a look at the mapping.

use std::fs;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use jiff::Zoned;
use libbpf_rs::skel::Skel;
use libbpf_rs::{Link, MapCore};
use memtools::bpf::attach::{self, Means, Variant};
use memtools::bpf::kernel_support;
use memtools::bpf::map_counts::Counts;
use memtools::bpf::map_create;
use memtools::bpf::software_event;
use memtools::export::metrics::{Family, Kind, Metrics, MetricsArgs};
use memtools::print::clock::{self, Clock};
use memtools::print::output::{self, Output};
use memtools::print::text;
use memtools::print::timeline::{Count, Moment, Unit};
use memtools::process::container::{self, ContainerArgs, Home, Homes};
use memtools::process::filter::{Filter, Tasks};
use memtools::run::cli::{self, CommonArgs};
use memtools::run::losses::{self, Losses};
use memtools::run::schedule::{Due, Reports};
use memtools::run::target::{self, Target, TargetArgs};
use perf_event::events::Software;
use serde::Serialize;

use crate::bpf::Loaded;
use crate::bpf::types::{fault_key, reason as Reason};

/// The kernel's settings of transparent huge pages.
const THP: &str = "/sys/kernel/mm/transparent_hugepage";

memtools::skeleton!("hfaults", HfaultsSkelBuilder, stacks: none, plain: [fault_key]);

/// Count faults on huge pages, by process.
#[derive(Debug, Parser)]
#[command(
    name = "hfaults",
    version,
    max_term_width = 100,
    after_help = "\
examples:
  hfaults                      faults on reserved huge pages (hugetlbfs), until Ctrl-C
  hfaults 1 10                 every second, ten times
  hfaults -e                   by the size of the page, and why it faulted
  hfaults --thp -d 10          transparent huge pages: given, and refused
  hfaults --container          with the container or systemd unit of each process
  hfaults --madvise            who asks for transparent huge pages by madvise(2)"
)]
struct Args {
    /// Count by the size of the page too, and by why it faulted
    #[arg(short, long)]
    extended: bool,

    /// Count faults that could be answered with a transparent huge page, and whether they were
    #[arg(long, conflicts_with_all = ["extended", "madvise"])]
    thp: bool,

    /// Count calls of madvise(2) with MADV_HUGEPAGE
    #[arg(long, conflicts_with = "extended")]
    madvise: bool,

    /// Print the time of day before each report
    #[arg(short = 'T', long)]
    timestamp: bool,

    #[command(flatten)]
    metrics: MetricsArgs,

    #[command(flatten)]
    containers: ContainerArgs,

    #[command(flatten)]
    target: TargetArgs,

    #[command(flatten)]
    common: CommonArgs,

    /// Seconds between reports [default: one report, at the end]
    #[arg(value_parser = cli::seconds)]
    interval: Option<Duration>,

    /// Reports before it exits [default: until Ctrl-C]
    #[arg(value_parser = cli::count::<u64>)]
    count: Option<u64>,
}

static FAULTS: Family = Family {
    name: "memtools_huge_page_faults_total",
    help: "Page faults on huge pages, by task and by reason where that is asked for.",
    labels: &["comm", "reason"],
    kind: Kind::Count,
};
static MADVISE: Family = Family {
    name: "memtools_huge_page_madvise_calls_total",
    help: "Calls of madvise(2) with MADV_HUGEPAGE, by task.",
    labels: &["comm"],
    kind: Kind::Count,
};

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    kernel_support::preflight()?;
    attach::capture_log(args.common.verbose);
    let family = if args.madvise { &MADVISE } else { &FAULTS };
    let mut metrics = args.metrics.open("hfaults", &[family])?;
    let (mut poller, mut output) = args.common.start("hfaults")?;
    let mut target = Target::choose(&args.target, Tasks::Programs)?;
    target::doubt_interval("hfaults", args.interval, &args.target.filter.pid);
    let (how, Attached { skel, links }) = attach(&args, target.filter())?;
    let maps = &skel.maps;
    let mut counts = Counts::new(&maps.counts, &maps.counts_a, &maps.counts_b);
    let with_cgroups = args.containers.wanted(args.common.json);
    let mut homes = Homes::if_wanted(with_cgroups, &maps.cgroup_paths);
    let clock = Clock::new();
    let mut print = |output: &mut Output, metrics: &mut Metrics| {
        print(&mut counts, &mut homes, &args, &clock, output, metrics)
    };
    eprintln!("hfaults: tracing {} ({how})... Ctrl-C to end", args.what());
    target.release()?;

    target.watch_exit(&mut poller);
    let deadline = args.common.deadline();
    let mut reports = Reports::start(&mut poller, args.interval, args.count, deadline)?;
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
    Losses::tell("hfaults", skel.object(), target.filter(), &mut output)?;
    losses::finish_metrics(skel.object(), target.filter(), metrics)?;
    output.finish()?;
    target.finish()
}

impl Args {
    /// What is counted.
    fn subject(&self) -> &'static str {
        match (self.thp, self.madvise) {
            (true, _) => "transparent huge pages",
            (_, true) => "madvise(2) for huge pages",
            _ => "huge page faults",
        }
    }

    fn what(&self) -> &'static str {
        match (self.thp, self.madvise) {
            (true, _) => "transparent huge page faults",
            (_, true) => "madvise(MADV_HUGEPAGE)",
            _ => "huge page faults",
        }
    }
}

struct Attached {
    skel: Loaded,
    links: Vec<Link>,
}

/// Starts what is asked for, in the best way that this kernel has.
fn attach(args: &Args, filter: &Filter) -> Result<(&'static str, Attached)> {
    if args.madvise {
        kernel_support::preflight_tracepoints()?;
        let attached = load(args, filter, &["madvise_enter".into()])?;
        return Ok(("tracepoint", attached));
    }
    if args.thp {
        let fexit = move || {
            load(
                args,
                filter,
                &thp_programs(&["thp_fexit"], "fentry", "fexit"),
            )
        };
        let kprobes = ["thread_exit", "thp_kretprobe", "thp_kprobe"];
        let kretprobe = move || load(args, filter, &thp_programs(&kprobes, "kprobe", "kretprobe"));
        let variants = [
            Variant::new("fexit", fexit).needing(Means::Fentry),
            Variant::new("kretprobe", kretprobe).needing(Means::Kprobes),
        ];
        return attach::first_that_works(args.common.verbose, attach::exact_first(variants.into()));
    }
    let by_function = |kind: &'static str| {
        Variant::new(kind, move || {
            load(args, filter, &fault_programs(args, kind))
        })
    };
    let by_event = Variant::new("page-fault event", move || {
        let mut attached = load(args, filter, &["fault_event".into()])?;
        let program = &attached.skel.progs.fault_event;
        attached.links = software_event::attach(program, Software::PAGE_FAULTS)?;
        Ok(attached)
    });
    let mut variants = attach::exact_first(vec![
        by_function("fentry").needing(Means::Fentry),
        by_function("kprobe").needing(Means::Kprobes),
    ]);
    // The last, as it knows no reasons.
    variants.push(by_event);
    attach::first_that_works(args.common.verbose, variants)
}

/// The programs for transparent huge pages: `always`, and those for other sizes and for shared memory by
/// the functions that the kernel has, of the kinds that see an entry and a return.
fn thp_programs(always: &[&'static str], entry: &str, exit: &str) -> Vec<String> {
    let mut programs: Vec<String> = always.iter().map(|&program| program.into()).collect();
    if kernel_support::btf_has_name("folio_add_new_anon_rmap") && has_small_thp() {
        programs.push(format!("small_thp_{entry}"));
    }
    let allocates = kernel_support::name_here(&[
        "shmem_alloc_and_add_folio",
        "shmem_alloc_hugefolio",
        "shmem_alloc_hugepage",
    ]);
    if let Some(function) = allocates {
        programs.push(format!("{function}_{exit}"));
    }
    programs
}

/// Whether there are transparent huge pages of several sizes.
fn has_small_thp() -> bool {
    let sizes = fs::read_dir(THP).into_iter().flatten().flatten();
    let sizes = sizes.filter(|entry| {
        entry
            .file_name()
            .as_encoded_bytes()
            .starts_with(b"hugepages-")
    });
    sizes.count() > 1
}

/// The programs for faults on reserved pages, each in the form of this kind.
fn fault_programs(args: &Args, kind: &str) -> Vec<String> {
    let mut programs = Vec::new();
    if args.extended
        && let Some(reasons) = reason_functions()
    {
        programs.push("thread_exit".into());
        programs.push(format!("fault_end_{kind}"));
        programs.extend(reasons.map(|function| format!("{function}_{kind}")));
    }
    programs.push(format!("fault_{kind}"));
    programs
}

/// The functions by which the kernel allocates a page and handles a write, if it has both.
fn reason_functions() -> Option<[&'static str; 2]> {
    let allocates = kernel_support::name_here(&["alloc_hugetlb_folio", "alloc_huge_page"])?;
    let writes = kernel_support::name_here(&["hugetlb_wp", "hugetlb_cow"])?;
    Some([allocates, writes])
}

/// Loads these programs and attaches those that are attached by their names.
fn load(args: &Args, filter: &Filter, programs: &[String]) -> Result<Attached> {
    let programs: Vec<&str> = programs.iter().map(String::as_str).collect();
    let mut open = bpf::prepare(filter)?;
    let by_reason = programs.contains(&"thread_exit");
    if !by_reason {
        map_create::size(&mut open.maps.faults, 1)?;
    }
    let wanted = args.containers.wanted(args.common.json);
    let with_cgroups = container::prepare(wanted, &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.with_cgroups = with_cgroups;
    options.by_size = args.extended.into();
    options.by_reason = by_reason.into();
    if args.thp {
        let setting = |name: &str| {
            let file = format!("{THP}/{name}");
            fs::read_to_string(file).ok()?.trim().parse::<u64>().ok()
        };
        let bytes = setting("hpage_pmd_size");
        options.huge_page_shift = bytes.and_then(u64::checked_ilog2).unwrap_or(21);
        options.uses_zero_page = (setting("use_zero_page") != Some(0)).into();
    }
    options.page_shift_base = kernel_support::page_shift()?;
    let mut skel = open.load_only(&programs)?;
    let by_name: Vec<&str> = programs
        .iter()
        .copied()
        .filter(|program| *program != "fault_event")
        .collect();
    let links = attach::by_name(skel.object_mut(), &by_name)?;
    Ok(Attached { skel, links })
}

/// Prints what has come since the last report.
fn print<M: MapCore>(
    counts: &mut Counts<'_, M, fault_key, u64>,
    homes: &mut Option<Homes<'_>>,
    args: &Args,
    clock: &Clock,
    output: &mut Output,
    metrics: &mut Metrics,
) -> Result<()> {
    let time = clock.local(clock::monotonic_ns());
    if args.timestamp {
        output.header(&clock::time_of_day(&time))?;
    }
    let mut counts = counts.take()?;
    counts.sort_by_key(|(_, count)| *count);
    for (key, count) in counts {
        let home = homes.as_mut().map(|homes| homes.of(key.cgroup));
        let row = Row::new(&key, home, count, &time, args);
        if args.madvise {
            metrics.add(&MADVISE, &[&row.comm], count);
        } else {
            metrics.add(&FAULTS, &[&row.comm, row.reason.unwrap_or("")], count);
        }
        output.row(&row)?;
    }
    output.header("")?;
    output.flush()
}

/// The faults of one process, or of one kind of it.
#[derive(Serialize)]
#[serde(tag = "type", rename = "process")]
struct Row<'a> {
    #[serde(serialize_with = "clock::serialize")]
    time: &'a Zoned,
    pid: u32,
    comm: String,
    #[serde(flatten)]
    home: Option<Home>,
    /// None where it was not asked for, or is not known.
    page_bytes: Option<u64>,
    reason: Option<&'static str>,
    count: u64,
    #[serde(skip)]
    extended: bool,
    /// What is counted.
    #[serde(skip)]
    subject: &'static str,
}

impl<'a> Row<'a> {
    fn new(key: &fault_key, home: Option<Home>, count: u64, time: &'a Zoned, args: &Args) -> Self {
        Self {
            time,
            pid: key.pid,
            comm: text::from_c(&key.comm),
            home,
            page_bytes: (key.page_shift != 0).then(|| 1 << key.page_shift),
            reason: match key.reason {
                Reason::REASON_NO_PAGE => Some("no page"),
                Reason::REASON_COPY_ON_WRITE => Some("copy on write"),
                Reason::REASON_THP => Some("huge page"),
                Reason::REASON_THP_FALLBACK => Some("fallback"),
                Reason::REASON_THP_ZERO => Some("zero page"),
                Reason::REASON_THP_SHARED => Some("shared memory"),
                Reason::REASON_EXHAUSTED => Some("pool exhausted"),
                _ => None,
            },
            count,
            extended: args.extended,
            subject: args.subject(),
        }
    }
}

impl output::Row for Row<'_> {
    /// `@[pid, comm]: N`, as bpftrace prints a map, and as the book's tool does.
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(out, "@[{}, {}", self.pid, self.comm)?;
        if let Some(home) = &self.home {
            write!(out, ", {}", home.name())?;
        }
        match self.page_bytes {
            Some(bytes) if bytes >= 1 << 30 => write!(out, ", {}GB", bytes >> 30)?,
            Some(bytes) if bytes >= 1 << 20 => write!(out, ", {}MB", bytes >> 20)?,
            Some(bytes) => write!(out, ", {}KB", bytes >> 10)?,
            None if self.extended => write!(out, ", -")?,
            None => {}
        }
        match self.reason {
            Some(reason) => write!(out, ", {reason}")?,
            None if self.extended => write!(out, ", -")?,
            None => {}
        }
        writeln!(out, "]: {}", self.count)
    }

    fn moment(&self) -> Moment<'_> {
        let name = match self.reason {
            Some(reason) => format!("{}, {reason}", self.subject),
            None => self.subject.to_owned(),
        };
        Moment::Counts(vec![Count {
            name: name.into(),
            unit: Unit::Count,
            process: Some((self.pid, &self.comm)),
            time: self.time,
            more: self.count,
        }])
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
    fn wrong_usage_is_refused() {
        for wrong in [
            &["hfaults", "0"][..],
            &["hfaults", "1", "0"],
            &["hfaults", "--thp", "--madvise"],
            &["hfaults", "--thp", "-e"],
        ] {
            let error = Args::try_parse_from(wrong).expect_err(&wrong.join(" "));
            assert_eq!(error.exit_code(), 2);
        }
    }

    #[test]
    fn lines_are_those_of_bpftrace() {
        let line = |args: &[&str], page_shift, reason| {
            let mut key = fault_key {
                pid: 884,
                page_shift,
                reason,
                ..fault_key::default()
            };
            key.comm[..4].copy_from_slice(&b"java".map(u8::cast_signed));
            let args = Args::try_parse_from(args).expect("valid");
            let time = Clock::new().local(0);
            let mut line = Vec::new();
            Row::new(&key, None, 8, &time, &args)
                .text(&mut line)
                .expect("memory");
            String::from_utf8(line).expect("UTF-8")
        };
        let unknown = Reason::REASON_UNKNOWN;
        assert_eq!(line(&["hfaults"], 0, unknown), "@[884, java]: 8\n");
        assert_eq!(
            line(&["hfaults", "-e"], 21, Reason::REASON_COPY_ON_WRITE),
            "@[884, java, 2MB, copy on write]: 8\n"
        );
        assert_eq!(
            line(&["hfaults", "-e"], 30, unknown),
            "@[884, java, 1GB, -]: 8\n"
        );
        assert_eq!(
            line(&["hfaults", "--thp"], 0, Reason::REASON_THP_FALLBACK),
            "@[884, java, fallback]: 8\n"
        );
        assert_eq!(
            line(&["hfaults", "--thp"], 16, Reason::REASON_THP),
            "@[884, java, 64KB, huge page]: 8\n"
        );
    }
}
