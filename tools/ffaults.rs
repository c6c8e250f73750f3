//! ffaults: page faults, by file.
//!
//! Hooks (`bpf/ffaults.bpf.c`): the return of handle_mm_fault, by fexit or by kprobes, or the kernel's own
//! count of page faults, with bpf_find_vma(); the first that works, those that miss nothing before others.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::mem::offset_of;
use std::ops::Range;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use jiff::Zoned;
use libbpf_rs::skel::Skel;
use libbpf_rs::{Link, MapMut};
use memtools::bpf::attach;
use memtools::bpf::attach::{Means, Variant};
use memtools::bpf::kernel_support;
use memtools::bpf::map_cache::Recorded;
use memtools::bpf::map_counts::Counts;
use memtools::bpf::map_create;
use memtools::bpf::software_event;
use memtools::bpf::types;
use memtools::export::metrics::{Family, Kind, Metrics, MetricsArgs};
use memtools::print::clock::{self, Clock};
use memtools::print::file_path::{self, Reach};
use memtools::print::output::{Output, Row};
use memtools::print::text;
use memtools::print::timeline::{Count as Counted, Moment, Unit};
use memtools::process::container::{self, ContainerArgs, Home, Homes};
use memtools::process::filter::{Filter, Tasks};
use memtools::run::cli::{self, CommonArgs};
use memtools::run::losses::{self, Losses};
use memtools::run::schedule::{Due, Reports};
use memtools::run::target::{self, Target, TargetArgs};
use perf_event::events::Software;
use serde::Serialize;

use crate::bpf::Loaded;
use crate::bpf::types::{count, count_key, file_record, memory as Memory, name_record};

memtools::skeleton!("ffaults", FfaultsSkelBuilder, stacks: none, plain: [count, count_key, file_id, name_record]);

/// The width of the column of files: as wide as the widest, within these bounds.
const FILE_COLUMN: Range<usize> = 24..64;

/// Files by process that there is room for in an interval; without --by-process it is files alone.
const COUNTS_BY_PROCESS: u32 = 16384;

/// Count page faults by file.
#[derive(Debug, Parser)]
#[command(
    name = "ffaults",
    version,
    max_term_width = 100,
    mut_arg("container", |container| container.requires("by_process")),
    after_help = "\
examples:
  ffaults                      count all page faults until Ctrl-C, and print them by file
  ffaults 1                    what happened, every second
  ffaults --path -p 1234       those of process 1234, with the path of each file
  ffaults --by-process -n java who faults on which file
  ffaults --by-process --container     with the container or systemd unit of each process
  ffaults --type -d 10         minor, major, write and execute faults apart
  ffaults -c './prog -x'       from the program's start"
)]
struct Args {
    /// Show the whole path of each file, as the process that faulted first would name it
    #[arg(long)]
    path: bool,

    /// Count each process apart
    #[arg(long)]
    by_process: bool,

    /// Add how many were minor and major, and how many were for writing and for executing
    #[arg(long)]
    r#type: bool,

    /// Use only this hook, rather than the first that works
    #[arg(long, value_name = "HOOK", value_enum)]
    hook: Option<Hook>,

    /// Show only the N with the most faults
    #[arg(long, value_name = "N", value_parser = cli::count::<usize>)]
    top: Option<usize>,

    /// Print the time before each summary
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

    /// Print a summary every so many seconds, of what was counted in them [default: one at the end]
    #[arg(value_parser = cli::seconds)]
    interval: Option<Duration>,

    /// Summaries before it exits [default: until Ctrl-C]
    #[arg(value_parser = cli::count::<u64>)]
    count: Option<u64>,
}

/// Where faults are seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Hook {
    // No help texts of their own here: they would make clap's help twice as long.
    Fexit,
    Kprobe,
    Event,
}

static FAULTS: Family = Family {
    name: "memtools_file_page_faults_total",
    help: "Page faults, by file.",
    labels: &["file"],
    kind: Kind::Count,
};
static MAJOR: Family = Family {
    name: "memtools_file_major_page_faults_total",
    help: "Page faults that waited for a disk or for swap, by file.",
    labels: &["file"],
    kind: Kind::Count,
};

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    kernel_support::preflight()?;
    attach::capture_log(args.common.verbose);
    let mut metrics = args.metrics.open("ffaults", &[&FAULTS])?;
    let (mut poller, mut output) = args.common.start("ffaults")?;
    let mut target = Target::choose(&args.target, Tasks::Programs)?;
    target::doubt_interval("ffaults", args.interval, &args.target.filter.pid);
    let (how, Attached { skel, links, knows }) = attach(&args, target.filter())?;
    eprintln!("ffaults: tracing page faults by {how}... Ctrl-C to end");
    target.release()?;

    target.watch_exit(&mut poller);
    let maps = &skel.maps;
    let mut report = Report {
        counts: Counts::new(&maps.counts, &maps.counts_a, &maps.counts_b),
        homes: Homes::if_wanted(args.wants_cgroups(), &maps.cgroup_paths),
        names: Recorded::new(&maps.files),
        knows,
        args: &args,
    };
    let deadline = args.common.deadline();
    let mut reports = Reports::start(&mut poller, args.interval, args.count, deadline)?;
    loop {
        match reports.wait(&mut poller)?.1 {
            Due::Nothing => {}
            Due::Report => {
                report.print(&mut output, &mut metrics)?;
                losses::write_metrics(skel.object(), target.filter(), &mut metrics)?;
            }
            Due::Last => break,
        }
    }
    attach::detach(links);
    report.print(&mut output, &mut metrics)?;
    Losses::tell("ffaults", skel.object(), target.filter(), &mut output)?;
    losses::finish_metrics(skel.object(), target.filter(), metrics)?;
    output.finish()?;
    target.finish()
}

impl Args {
    /// Whether it matters in which cgroups processes are: the faults on a file are those of all.
    fn wants_cgroups(&self) -> bool {
        self.by_process && self.containers.wanted(self.common.json)
    }
}

/// Live probes, and what they can tell.
struct Attached {
    skel: Loaded,
    links: Vec<Link>,
    knows: Knows,
}

/// What a hook knows of a fault besides the memory.
#[derive(Debug, Clone, Copy)]
struct Knows {
    /// Whether it was major.
    major: bool,
    /// What the access was.
    access: bool,
}

fn attach(args: &Args, filter: &Filter) -> Result<(&'static str, Attached)> {
    let function = Knows {
        major: true,
        access: true,
    };
    let fexit = move || {
        let skel = load(args, filter, &["fault_fexit"])?;
        let links = attach::all(&[&skel.progs.fault_fexit], "")?;
        Ok(Attached {
            skel,
            links,
            knows: function,
        })
    };
    let kprobe = move || {
        let skel = load(
            args,
            filter,
            &["thread_exit", "fault_kprobe", "fault_kretprobe"],
        )?;
        let programs = &skel.progs;
        // The return first: a fault that is seen at its entry must be seen at its return.
        let programs = [
            &programs.thread_exit,
            &programs.fault_kretprobe,
            &programs.fault_kprobe,
        ];
        let links = attach::all(&programs, "")?;
        Ok(Attached {
            skel,
            links,
            knows: function,
        })
    };
    // The kernel counts minor and major faults when they are done, and all where they begin: what
    // is mapped is less often being changed then.
    let event = move || {
        let knows = Knows {
            major: args.r#type,
            access: false,
        };
        let programs: &[&str] = if knows.major {
            &["fault_event", "major_fault_event"]
        } else {
            &["fault_event"]
        };
        let skel = load(args, filter, programs)?;
        let mut each = Vec::new();
        if knows.major {
            each.push((&skel.progs.fault_event, Software::PAGE_FAULTS_MIN));
            each.push((&skel.progs.major_fault_event, Software::PAGE_FAULTS_MAJ));
        } else {
            each.push((&skel.progs.fault_event, Software::PAGE_FAULTS));
        }
        let mut links = Vec::new();
        for (program, event) in each {
            links.extend(software_event::attach(program, event)?);
        }
        Ok(Attached { skel, links, knows })
    };
    let variants = [
        (
            Hook::Fexit,
            Variant::new("fexit of handle_mm_fault", fexit).needing(Means::Fentry),
        ),
        (
            Hook::Kprobe,
            Variant::new("kprobe of handle_mm_fault", kprobe).needing(Means::Kprobes),
        ),
        (Hook::Event, Variant::new("perf event", event)),
    ];
    let wanted = variants
        .into_iter()
        .filter(|(hook, _)| args.hook.is_none_or(|only| only == *hook))
        .map(|(_, variant)| variant);
    attach::first_that_works(args.common.verbose, attach::exact_first(wanted.collect()))
}

/// The skeleton with the options in it, loaded with these programs only.
fn load(args: &Args, filter: &Filter, programs: &[&str]) -> Result<Loaded> {
    let mut open = bpf::prepare(filter)?;
    let with_cgroups = container::prepare(args.wants_cgroups(), &mut open.maps.cgroup_paths)?;
    let options = open.options()?;
    options.with_cgroups = with_cgroups;
    options.by_process = args.by_process.into();
    options.full_path = args.path.into();
    let maps = &mut open.maps;
    if !programs.contains(&"fault_kprobe") {
        map_create::size(&mut maps.calls, 1)?;
    }
    if args.by_process {
        map_create::size(&mut maps.counts_a, COUNTS_BY_PROCESS)?;
        map_create::size(&mut maps.counts_b, COUNTS_BY_PROCESS)?;
    }
    if !args.path {
        let names = maps.files.set_value_size(size_of::<name_record>() as u32);
        names.context("failed to size the map of names")?;
    }
    open.load_only(programs)
}

/// What faults are counted by, as it is printed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Key {
    file: String,
    pid: u32,
    comm: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Count {
    faults: u64,
    major: u64,
    write: u64,
    exec: u64,
    /// The id of the cgroup that the process was in last; 0 if nothing is wanted of cgroups.
    cgroup: u64,
}

/// Reads the counts, and prints what has come since the last time.
struct Report<'a> {
    counts: Counts<'a, MapMut<'static>, count_key, count>,
    homes: Option<Homes<'a>>,
    names: Recorded<'a, MapMut<'static>, String>,
    knows: Knows,
    args: &'a Args,
}

impl Report<'_> {
    fn print(&mut self, output: &mut Output, metrics: &mut Metrics) -> Result<()> {
        let mut rows: Vec<(Key, Count)> = self.take()?.into_iter().collect();
        for (key, count) in &rows {
            metrics.add(&FAULTS, &[&key.file], count.faults);
            if self.knows.major {
                metrics.add(&MAJOR, &[&key.file], count.major);
            }
        }
        rows.sort_by_cached_key(|(key, count)| (count.faults, Reverse(key.clone())));
        let skip = self
            .args
            .top
            .map_or(0, |top| rows.len().saturating_sub(top));

        let time = Clock::new().local(clock::monotonic_ns());
        if self.args.timestamp {
            output.header(&clock::time_of_day(&time))?;
        }
        let widest = rows.iter().skip(skip).map(|(key, _)| key.file.len()).max();
        let columns = Columns {
            by_process: self.args.by_process,
            container: self.args.containers.container,
            types: self.args.r#type,
            file: widest
                .unwrap_or(0)
                .clamp(FILE_COLUMN.start, FILE_COLUMN.end),
        };
        output.header(&columns.header())?;
        for (key, count) in rows.into_iter().skip(skip) {
            let mut row = FileFaults::new(key, count, &time, self.knows, columns);
            row.home = self.homes.as_mut().map(|homes| homes.of(count.cgroup));
            output.row(&row)?;
        }
        if self.args.interval.is_some() {
            output.header("")?;
        }
        output.flush()
    }

    fn take(&mut self) -> Result<HashMap<Key, Count>> {
        let mut sums: HashMap<Key, Count> = HashMap::new();
        for (key, value) in self.counts.take()? {
            let file = match key.memory {
                Memory::MEMORY_FILE => self.name(&key)?,
                Memory::MEMORY_ANONYMOUS => "[anon]".to_owned(),
                Memory::MEMORY_HEAP => "[heap]".to_owned(),
                Memory::MEMORY_STACK => "[stack]".to_owned(),
                _ => "[unknown]".to_owned(),
            };
            let key = Key {
                file,
                pid: key.pid,
                comm: text::from_c(&key.comm),
            };
            // Files of one name are one, unless whole paths tell them apart.
            let sum = sums.entry(key).or_default();
            sum.faults += value.faults;
            sum.major += value.major;
            sum.write += value.write;
            sum.exec += value.exec;
            sum.cgroup = value.cgroup;
        }
        self.names.end_round()?;
        Ok(sums)
    }

    fn name(&mut self, key: &count_key) -> Result<String> {
        let path = self.args.path;
        let name = self
            .names
            .get(&id_bytes(key), |record| name_of(record, path))?;
        Ok(name.unwrap_or_else(|| "[lost]".to_owned()))
    }
}

/// The name or the path in a `file_record`, whole or as far as the first name; None if it is just being
/// written, or could not be.
fn name_of(record: &[u8], path: bool) -> Result<Option<String>> {
    let &name_record {
        bytes, complete, ..
    } = types::view(record)?;
    let names = &record[offset_of!(file_record, names)..];
    let names = &names[..names.len().min(bytes as usize)];
    if names.is_empty() {
        return Ok(None);
    }
    if !path {
        return Ok(Some(file_path::name(names)));
    }
    // As file_path() of bpf/include/file.bpf.h has it.
    let reach = match complete {
        1 => Reach::Root,
        2 => Reach::NoFolder,
        _ => Reach::Cut,
    };
    Ok(Some(file_path::path(names, reach)))
}

/// A file's id as the key of the map of names.
fn id_bytes(key: &count_key) -> Vec<u8> {
    let mut bytes = key.file.inode.to_ne_bytes().to_vec();
    bytes.extend(key.file.device.to_ne_bytes());
    bytes.extend(key.file.generation.to_ne_bytes());
    bytes
}

/// Which columns there are.
#[derive(Debug, Clone, Copy)]
struct Columns {
    by_process: bool,
    container: bool,
    types: bool,
    /// The width of the file's.
    file: usize,
}

impl Columns {
    fn header(self) -> String {
        let mut line = String::new();
        // Writing to a String does not fail.
        if self.by_process {
            let _ = write!(line, "{:<7} {:<16} ", "PID", "COMM");
        }
        line += &container::header(self.container);
        let _ = write!(line, "{:<1$} {2:>10}", "FILE", self.file, "COUNT");
        if self.types {
            let _ = write!(
                line,
                " {:>10} {:>10} {:>10} {:>10}",
                "MINOR", "MAJOR", "WRITE", "EXEC"
            );
        }
        line
    }
}

/// The faults on one file.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "file")]
struct FileFaults<'a> {
    /// The report's.
    #[serde(serialize_with = "clock::serialize")]
    time: &'a Zoned,
    file: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    comm: Option<String>,
    #[serde(flatten)]
    home: Option<Home>,
    faults: u64,
    /// What this kernel's hook cannot tell is null.
    minor: Option<u64>,
    major: Option<u64>,
    write: Option<u64>,
    exec: Option<u64>,
    #[serde(skip)]
    columns: Columns,
}

impl<'a> FileFaults<'a> {
    fn new(key: Key, count: Count, time: &'a Zoned, knows: Knows, columns: Columns) -> Self {
        Self {
            time,
            file: key.file,
            pid: columns.by_process.then_some(key.pid),
            comm: columns.by_process.then_some(key.comm),
            home: None,
            faults: count.faults,
            minor: knows.major.then(|| count.faults - count.major),
            major: knows.major.then_some(count.major),
            write: knows.access.then_some(count.write),
            exec: knows.access.then_some(count.exec),
            columns,
        }
    }
}

impl Row for FileFaults<'_> {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        if let (Some(pid), Some(comm)) = (self.pid, &self.comm) {
            let home = self.home.as_ref().filter(|_| self.columns.container);
            write!(out, "{pid:<7} {comm:<16} {}", container::column(home))?;
        }
        write!(
            out,
            "{:<1$} {2:>10}",
            self.file, self.columns.file, self.faults
        )?;
        if self.columns.types {
            for count in [self.minor, self.major, self.write, self.exec] {
                let count = count.map_or("-".to_owned(), |count| count.to_string());
                write!(out, " {count:>10}")?;
            }
        }
        writeln!(out)
    }

    fn moment(&self) -> Moment<'_> {
        let name = format!("faults on {}", self.file);
        Moment::Counts(vec![Counted {
            name: name.into(),
            unit: Unit::Count,
            process: self.pid.zip(self.comm.as_deref()),
            time: self.time,
            more: self.faults,
        }])
    }
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
    fn columns_line_up_and_what_is_not_known_is_a_dash() {
        let columns = Columns {
            by_process: true,
            container: false,
            types: true,
            file: 32,
        };
        let key = Key {
            file: "libc.so.6".to_owned(),
            pid: 7,
            comm: "sh".to_owned(),
        };
        let count = Count {
            faults: 23,
            major: 5,
            ..Count::default()
        };
        let knows = Knows {
            major: true,
            access: false,
        };
        let time = Zoned::new(jiff::Timestamp::UNIX_EPOCH, jiff::tz::TimeZone::UTC);
        let row = FileFaults::new(key, count, &time, knows, columns);
        let mut line = Vec::new();
        row.text(&mut line).expect("memory");
        assert_eq!(
            format!("{}\n{}", columns.header(), String::from_utf8_lossy(&line)),
            "PID     COMM             FILE                                  COUNT      MINOR      MAJOR      WRITE       EXEC\n\
             7       sh               libc.so.6                                23         18          5          -          -\n"
        );
        assert_eq!(
            serde_json::to_string(&row).expect("JSON"),
            r#"{"type":"file","time":"1970-01-01T00:00:00.000000+00:00","file":"libc.so.6","pid":7,"comm":"sh","faults":23,"minor":18,"major":5,"write":null,"exec":null}"#
        );
    }
}
