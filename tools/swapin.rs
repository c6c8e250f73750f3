//! swapin: pages read back from swap, by process.
//!
//! Hooks (`bpf/swapin.bpf.c`): the kernel's function that reads pages from swap, by fentry or
//! kprobe; with -s also the fault that waits for it, with --out the function that writes them.

use std::collections::HashMap;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;
use jiff::Zoned;
use libbpf_rs::skel::{OpenSkel, Skel, SkelBuilder};
use memtools::attach::{self, Variant};
use memtools::cli::{self, CommonArgs};
use memtools::clock::{self, Clock};
use memtools::counts::Counts;
use memtools::filter::{Filter, FilterArgs};
use memtools::histogram::Histogram;
use memtools::losses::Losses;
use memtools::output::{self, Output};
use memtools::poll::Poller;
use memtools::target::Target;
use memtools::{kernel, text};
use serde::Serialize;

use crate::bpf::types::task_key;
use crate::bpf::{SwapinSkel, SwapinSkelBuilder};

memtools::skeleton!("swapin", plain: [task_key, filter]);

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
  swapin --out                 also who writes pages to swap"
)]
struct Args {
    /// Run this command and trace it; its exit status becomes ours
    #[arg(short, long, value_name = "COMMAND", conflicts_with = "pid")]
    command: Option<String>,

    /// Leave out the time of day
    #[arg(short = 'T', long)]
    notime: bool,

    /// Add how long each process was held up, and a histogram of that at the end
    #[arg(short = 's', long)]
    latency: bool,

    /// Count pages written to swap too; mostly by kswapd, not by whose they are
    #[arg(long)]
    out: bool,

    #[command(flatten)]
    filter: FilterArgs,

    #[command(flatten)]
    common: CommonArgs,

    /// Seconds between reports
    #[arg(default_value = "1", value_parser = cli::seconds)]
    interval: Duration,

    /// Reports before it exits [default: until Ctrl-C]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

/// Names of the kernel's functions, the newer first.
const READ: [&str; 2] = ["swap_read_folio", "swap_readpage"];
const WRITE: [&str; 2] = ["swap_writeout", "swap_writepage"];

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    kernel::preflight()?;
    attach::capture_log(args.common.verbose);
    let mut poller = Poller::new()?;
    let mut target = Target::choose(&args.filter, args.command.as_deref())?;
    let (how, skel) = attach(&args, target.filter())?;
    let mut totals = Totals {
        pages_in: Counts::new(&skel.maps.pages_in),
        pages_out: Counts::new(&skel.maps.pages_out),
        held_up_ns: Counts::new(&skel.maps.held_up_ns),
    };
    let columns = Columns {
        latency: args.latency,
        out: args.out,
    };
    let clock = Clock::new();
    let mut output = Output::new(args.common.format());
    eprintln!("swapin: tracing swap ins ({how})... Ctrl-C to end");
    target.release()?;

    if let Some(process) = target.process() {
        poller.watch_exit(process);
    }
    poller.tick_every(args.interval)?;
    let deadline = args.common.deadline();
    let mut reports_left = args.count;
    loop {
        let wake = poller.wait(deadline)?;
        if wake.tick {
            reports_left = reports_left.map(|left| left - 1);
        }
        let time = clock.local(clock::monotonic_ns());
        if !args.notime {
            output.header(&clock::time_of_day(&time))?;
        }
        output.header(&columns.header())?;
        for row in totals.rows(&time, columns)? {
            output.row(&row)?;
        }
        output.header("")?;
        output.flush()?;
        if wake.stop || wake.deadline || wake.exited || reports_left == Some(0) {
            break;
        }
    }
    if args.latency {
        let bss = skel.maps.bss_data.as_deref();
        let slots = bss.context("the BPF object has no data")?.latency_ns.slots;
        output.row(&Latency {
            latency_ns: slots.into(),
        })?;
        output.flush()?;
    }
    Losses::tell("swapin", &skel.maps.losses, &mut output)?;
    target.finish()
}

fn attach(args: &Args, filter: &Filter) -> Result<(&'static str, SwapinSkel<'static>)> {
    let variants = ["fentry", "kprobe"].map(|kind| {
        Variant::new(kind, move || {
            let mut programs = vec![format!("{}_{kind}", function(READ)?)];
            if args.out {
                programs.push(format!("{}_{kind}", function(WRITE)?));
            }
            if args.latency {
                programs.extend([format!("end_{kind}"), format!("begin_{kind}")]);
                programs.push("thread_exit".into());
            }
            load(args, filter, &programs)
        })
    });
    attach::first_that_works(args.common.verbose, variants)
}

/// What this kernel calls the function.
fn function(names: [&'static str; 2]) -> Result<&'static str> {
    match names.into_iter().find(|name| kernel::btf_has_name(name)) {
        Some(name) => Ok(name),
        None => bail!(
            "this kernel has no function {}; it may be built without swap (CONFIG_SWAP)",
            names.join(" or ")
        ),
    }
}

/// Loads and attaches these programs.
fn load(args: &Args, filter: &Filter, programs: &[String]) -> Result<SwapinSkel<'static>> {
    let mut open = SwapinSkelBuilder::default()
        .open(attach::object_storage())
        .context("failed to open the BPF object")?;
    let options = open
        .maps
        .rodata_data
        .as_deref_mut()
        .context("the BPF object has no options")?;
    filter.set(&mut options.filter);
    options.with_latency = args.latency.into();
    for mut program in open.open_object_mut().progs_mut() {
        let name = program.name().to_string_lossy();
        program.set_autoload(programs.iter().any(|wanted| *wanted == name));
    }
    let mut skel = open.load().context("failed to load")?;
    filter.set_cgroup(&skel.maps.filter_cgroup)?;
    skel.attach().context("failed to attach")?;
    Ok(skel)
}

/// What is counted, by process.
struct Totals<'map, M> {
    pages_in: Counts<'map, M, task_key>,
    pages_out: Counts<'map, M, task_key>,
    held_up_ns: Counts<'map, M, task_key>,
}

impl<M: libbpf_rs::MapCore> Totals<'_, M> {
    /// What has come since the last call, who read the most last.
    fn rows<'a>(&mut self, time: &'a Zoned, columns: Columns) -> Result<Vec<Row<'a>>> {
        let mut rows: HashMap<(u32, [i8; 16]), Row<'a>> = HashMap::new();
        let counted = [
            self.pages_in.since_last()?,
            self.pages_out.since_last()?,
            self.held_up_ns.since_last()?,
        ];
        for (which, counts) in counted.into_iter().enumerate() {
            for (key, count) in counts {
                let row = rows.entry((key.pid, key.comm)).or_insert_with(|| Row {
                    time,
                    pid: key.pid,
                    comm: text::from_c(&key.comm),
                    pages_in: 0,
                    pages_out: columns.out.then_some(0),
                    held_up_ns: columns.latency.then_some(0),
                });
                match which {
                    0 => row.pages_in = count,
                    1 => row.pages_out = Some(count),
                    _ => row.held_up_ns = Some(count),
                }
            }
        }
        let mut rows: Vec<Row<'a>> = rows.into_values().collect();
        rows.sort_by(|a, b| {
            (a.pages_in, a.pages_out, a.pid).cmp(&(b.pages_in, b.pages_out, b.pid))
        });
        Ok(rows)
    }
}

/// Columns that not everybody wants.
#[derive(Debug, Clone, Copy)]
struct Columns {
    latency: bool,
    out: bool,
}

impl Columns {
    fn header(self) -> String {
        let mut header = format!("{:<16} {:<7} {:<8}", "COMM", "PID", "COUNT");
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
struct Row<'a> {
    #[serde(serialize_with = "clock::serialize")]
    time: &'a Zoned,
    pid: u32,
    comm: String,
    pages_in: u64,
    /// None where they are not counted.
    pages_out: Option<u64>,
    held_up_ns: Option<u64>,
}

impl output::Row for Row<'_> {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut line = format!("{:<16} {:<7} {:<8}", self.comm, self.pid, self.pages_in);
        if let Some(pages) = self.pages_out {
            line += &format!(" {pages:<8}");
        }
        if let Some(ns) = self.held_up_ns {
            line += &format!(" {:.2}", ns as f64 / 1e6);
        }
        writeln!(out, "{}", line.trim_end())
    }
}

/// How long each fault that read from swap took, over the whole run.
#[derive(Debug, Serialize)]
struct Latency {
    latency_ns: Histogram,
}

impl output::Row for Latency {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        self.latency_ns.text("swapin_ns", out)
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;
    use memtools::output::Row as _;

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
    fn columns_are_bcc_s_and_line_up() {
        let line = |pages_out, held_up_ns| {
            let row = Row {
                time: &Clock::new().local(0),
                pid: 4536,
                comm: "gnome-shell".into(),
                pages_in: 14,
                pages_out,
                held_up_ns,
            };
            let mut line = Vec::new();
            row.text(&mut line).expect("memory");
            String::from_utf8(line).expect("UTF-8")
        };
        let columns = |out, latency| Columns { latency, out }.header();
        assert_eq!(columns(false, false), "COMM             PID     COUNT");
        assert_eq!(line(None, None), "gnome-shell      4536    14\n");
        assert_eq!(
            columns(true, true),
            "COMM             PID     COUNT    OUT      HELD(ms)"
        );
        assert_eq!(
            line(Some(3), Some(1_500_000)),
            "gnome-shell      4536    14       3        1.50\n"
        );
    }
}
