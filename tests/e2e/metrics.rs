//! `--export FILE.prom`: the file, compared with the rows of the same run, and as Prometheus' own client reads it.

mod dashboard;
mod servers;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::Value;

use self::dashboard::the_dashboard_shows_what_tools_write;
use self::servers::servers_store_what_tools_serve_and_write;
use crate::harness::{self, Cgroup, Tool, ToolOutput, Workload, eventually, workload};
use crate::oomkill;
use crate::pressure::{Group, Swap};

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "metrics":
        page_faults_by_task,
        page_faults_by_file,
        madvise_by_task,
        calls_and_heaps_of_a_container,
        reclaim_and_kills_in_a_cgroup,
        swapped_pages_by_task [Kprobes, Guest],
        names_of_others_are_labels [Host],
        the_file_grows_while_it_traces,
        what_cannot_be_written_is_told [Once],
        alerts_fire_as_their_tests_say [Host, Once],
        the_dashboard_shows_what_tools_write [Host, Once],
        servers_store_what_tools_serve_and_write [Host, Once],
    }
}

/// Line of the file: name of the family or of the histogram, labels, and number.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Sample {
    pub(crate) name: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) value: f64,
}

/// Reads a file. On the host, where there is Python, Prometheus' client must read the same.
pub(crate) fn read(file: &Path) -> Result<Vec<Sample>> {
    let text = fs::read_to_string(file)?;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let samples: Vec<Sample> = lines.map(sample).collect::<Result<_>>()?;
    if !harness::in_guest() {
        let script = "import sys, json\n\
             from prometheus_client.parser import text_string_to_metric_families as parse\n\
             samples = [s for family in parse(sys.argv[1]) for s in family.samples]\n\
             print(json.dumps([[s.name, s.labels, s.value] for s in samples]))";
        let mut client = Command::new("/usr/bin/python3");
        let client = client.args(["-c", script, &text]).output()?;
        ensure!(client.status.success(), "{client:?} of {text}");
        let theirs: Vec<(String, BTreeMap<String, String>, f64)> =
            serde_json::from_slice(&client.stdout)?;
        let theirs = theirs.into_iter();
        let theirs: Vec<Sample> = theirs
            .map(|(name, labels, value)| Sample {
                name,
                labels,
                value,
            })
            .collect();
        ensure!(theirs == samples, "{theirs:?} of {text}");
    }
    Ok(samples)
}

/// Fails unless promtool, which knows the conventions for names, finds nothing wrong with a file.
pub(crate) fn promtool_accepts(file: &Path) -> Result<()> {
    if harness::in_guest() {
        return Ok(());
    }
    let promtool = concat!(env!("CARGO_MANIFEST_DIR"), "/target/servers/promtool");
    let mut promtool = Command::new(promtool);
    promtool
        .args(["check", "metrics"])
        .stdin(fs::File::open(file)?);
    let checked = promtool.output();
    let checked = checked.context("no promtool, which scripts/prerequisites unpacks")?;
    ensure!(checked.status.success(), "{checked:?}");
    Ok(())
}

/// Parses `name{label="value",...} number`.
fn sample(line: &str) -> Result<Sample> {
    let (series, value) = line.rsplit_once(' ').context("no value")?;
    let (name, mut rest) = match series.split_once('{') {
        Some((name, rest)) => (name, rest.strip_suffix('}').context("no brace")?),
        None => (series, ""),
    };
    let mut labels = BTreeMap::new();
    while let Some((label, quoted)) = rest.split_once("=\"") {
        let (mut value, mut chars) = (String::new(), quoted.char_indices());
        let end = loop {
            match chars.next().context("no quote")? {
                (at, '"') => break at,
                (_, '\\') => value.push(match chars.next().context("no more")?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, other) => value.push(other),
            }
        };
        labels.insert(label.to_owned(), value);
        rest = quoted[end + 1..].trim_start_matches(',');
    }
    Ok(Sample {
        name: name.to_owned(),
        labels,
        value: value.parse()?,
    })
}

/// Returns the numbers of one family by the values of one label, each summed over the other labels.
fn by(samples: &[Sample], family: &str, label: &str) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for sample in samples.iter().filter(|sample| sample.name == family) {
        let name = sample.labels.get(label).cloned().unwrap_or_default();
        *sums.entry(name).or_default() += sample.value as u64;
    }
    sums
}

/// Returns the sums of a field, by another field, over the rows that a tool printed.
fn of_rows(rows: &[Value], kind: &str, field: &str, label: &str) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    for row in rows.iter().filter(|row| row["type"] == kind) {
        let name = row.pointer(label).and_then(Value::as_str);
        let number = row.pointer(field).and_then(Value::as_u64);
        *sums.entry(name.unwrap_or_default().to_owned()).or_default() += number.unwrap_or(0);
    }
    sums
}

/// Returns the objects that a tool has printed until its end. A command's own lines may be in between.
fn objects(ended: &ToolOutput) -> Result<Vec<Value>> {
    ensure!(ended.status.success(), "{ended:?}");
    ended.objects_among_lines()
}

/// Checks that nothing was lost, and that the file has all counters of losses.
fn nothing_is_lost(samples: &[Sample]) -> Result<()> {
    let lost: Vec<&Sample> = samples
        .iter()
        .filter(|sample| sample.name == "memtools_lost_total")
        .collect();
    ensure!(
        lost.len() == 7 && lost.iter().all(|sample| sample.value == 0.0),
        "{lost:?}"
    );
    Ok(())
}

fn page_faults_by_task() -> Result<()> {
    let folder = harness::scratch()?;
    let file = folder.path().join("faults.prom");
    let path = file.to_string_lossy();
    let command = format!("'{}' 1009", workload("minor").display());
    let args = ["--by-process", "-j", "--export", &path, "-c", &command];
    for (option, family, field) in [
        (&[][..], "memtools_page_faults_total", "/faults"),
        (&["--bytes"], "memtools_page_faults_bytes_total", "/bytes"),
    ] {
        let ended = harness::run("faults", &[option, &args].concat())?;
        let rows = of_rows(&objects(&ended)?, "process", field, "/comm");
        let samples = read(&file)?;
        ensure!(rows.contains_key("minor"), "{ended:?}");
        ensure!(
            by(&samples, family, "comm") == rows,
            "{samples:?} {ended:?}"
        );
        nothing_is_lost(&samples)?;
    }
    Ok(())
}

/// The file has all faulted files, also those that `--top` omits.
fn page_faults_by_file() -> Result<()> {
    let folder = harness::scratch()?;
    let file = folder.path().join("ffaults.prom");
    let path = file.to_string_lossy();
    let command = format!("'{}' 1009", workload("minor").display());
    let args = ["-j", "--export", &path, "-c", &command];
    for (options, shown) in [(&[][..], None), (&["--top", "1"], Some(1))] {
        let ended = harness::run("ffaults", &[options, &args].concat())?;
        let rows = of_rows(&objects(&ended)?, "file", "/faults", "/file");
        let samples = read(&file)?;
        let faults = by(&samples, "memtools_file_page_faults_total", "file");
        ensure!(faults["[anon]"] >= 1009 && faults.len() > 1, "{faults:?}");
        ensure!(
            shown == Some(rows.len()) || faults == rows,
            "{faults:?}, not {rows:?}"
        );
        nothing_is_lost(&samples)?;
    }
    Ok(())
}

fn madvise_by_task() -> Result<()> {
    let folder = harness::scratch()?;
    let file = folder.path().join("hfaults.prom");
    let mut workload = Workload::start("thp", &["3", "dontneed"])?;
    let path = file.to_string_lossy();
    let args = ["--madvise", "-p", &workload.pid(), "--export", &path];
    let mut tool = Tool::start("hfaults", &args)?;
    tool.wait_for_stderr("tracing madvise")?;
    workload.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    let calls = by(
        &read(&file)?,
        "memtools_huge_page_madvise_calls_total",
        "comm",
    );
    ensure!(
        calls == BTreeMap::from([("thp".to_owned(), 1)]),
        "{calls:?}"
    );
    Ok(())
}

/// A workload in the cgroup of a container, and the tool that traces it.
struct Traced {
    tool: &'static str,
    options: &'static [&'static str],
    ready: &'static str,
    workload: &'static [&'static str],
    /// Family of the file, and its sum.
    expected: &'static [(&'static str, u64)],
}

const TRACED: [Traced; 6] = [
    Traced {
        tool: "shmsnoop",
        options: &[],
        ready: "tracing shmget(2)",
        workload: &["shm", "101"],
        // Five calls in each round, and 15 at the beginning and the end of the workload.
        expected: &[("memtools_shared_memory_calls_total", 101 * 5 + 15)],
    },
    Traced {
        tool: "mmapsnoop",
        options: &[],
        ready: "tracing mmap(2)",
        workload: &["mmap", "anon", "7"],
        // The calls map one page, two pages, and so on.
        expected: &[
            ("memtools_mapping_calls_total", 7),
            ("memtools_mapped_bytes_total", 28 * 4096),
        ],
    },
    Traced {
        tool: "brkstack",
        options: &["--growth"],
        ready: "tracing brk(2)",
        workload: &["brk", "101", "53", "11"],
        expected: &[
            ("memtools_brk_calls_total", 101),
            ("memtools_brk_growth_bytes_total", 101 * 4096),
        ],
    },
    Traced {
        tool: "brkstack",
        options: &["--events"],
        ready: "tracing brk(2)",
        workload: &["brk", "101", "53", "11"],
        expected: &[
            ("memtools_brk_calls_total", 165),
            ("memtools_brk_growth_bytes_total", 101 * 4096),
        ],
    },
    Traced {
        tool: "faults",
        options: &["--user-mode"],
        ready: "tracing page faults",
        workload: &["minor", "1009"],
        expected: &[],
    },
    Traced {
        tool: "memleak",
        options: &["-o", "0"],
        ready: "probes in",
        workload: &["alloc", "one", "malloc", "101", "1009"],
        expected: &[
            ("memtools_memleak_outstanding_bytes", 101 * 1009),
            ("memtools_memleak_outstanding_allocations", 101),
        ],
    },
];

/// The scope of a container is also a unit. No row in text has the column CONTAINER, which was not requested.
fn calls_and_heaps_of_a_container() -> Result<()> {
    let id = "4c01db0b339c7f2a".repeat(4);
    let parent = Cgroup::new()?;
    let group = parent.path().join(format!("docker-{id}.scope"));
    fs::create_dir(&group)?;
    let shown = TRACED.iter().try_for_each(|traced| {
        of_a_container(traced, &group, &id)
            .with_context(|| format!("{} {:?}", traced.tool, traced.options))
    });
    harness::remove_cgroup(&group);
    shown
}

fn of_a_container(traced: &Traced, group: &Path, id: &str) -> Result<()> {
    let folder = harness::scratch()?;
    let file = folder.path().join("x.prom");
    let path = file.to_string_lossy();
    let [program, args @ ..] = traced.workload else {
        bail!("no workload");
    };
    let mut target = Workload::start(program, args)?;
    let pid = target.pid();
    fs::write(group.join("cgroup.procs"), &pid)?;
    let args = [traced.options, &["-p", &pid, "--export", &path]].concat();
    let mut tool = Tool::start(traced.tool, &args)?;
    tool.wait_for_stderr(traced.ready)?;
    target.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(!ended.stdout.contains(&id[..12]), "{ended:?}");
    promtool_accepts(&file)?;
    let samples = read(&file)?;
    let of_tasks = samples
        .iter()
        .filter(|one| !one.labels.contains_key("what"));
    for sample in of_tasks {
        let label = |name: &str| sample.labels.get(name).map(String::as_str);
        let scope = format!("docker-{id}.scope");
        ensure!(
            (label("comm"), label("container"), label("unit"))
                == (Some(program), Some(id), Some(&*scope)),
            "{sample:?}"
        );
    }
    for &(family, sum) in traced.expected {
        let sums = by(&samples, family, "comm");
        ensure!(
            sums.values().sum::<u64>() == sum,
            "{family}: {sums:?}, not {sum}"
        );
    }
    nothing_is_lost(&samples)
}

/// Three tools run at once, while a task reclaims memory and is then killed.
fn reclaim_and_kills_in_a_cgroup() -> Result<()> {
    let folder = harness::scratch()?;
    let group = Group::new("memtools-metrics", 8 << 20)?;
    group.forbid_swap()?;
    let mut hog = Workload::spawn(&mut group.command(&workload("hog"), &["64", "77"]))?;
    let pid = hog.pid();
    let file = |tool: &str| folder.path().join(format!("{tool}.prom"));
    let start = |tool: &str, args: &[&str], ready: &str| -> Result<Tool> {
        let path = file(tool);
        let path = path.to_string_lossy();
        let args = [&["-j", "-p", &pid, "--export", &path], args].concat();
        let mut tool = Tool::start(tool, &args)?;
        tool.wait_for_stderr(ready)?;
        Ok(tool)
    };
    let killer = start("oomkill", &[], "tracing OOM kills")?;
    let stalls = start("drsnoop", &["--memcg"], "tracing direct reclaim")?;
    let reclaim = start("vmscan", &[], "tracing page reclaim")?;
    oomkill::kill(&mut hog)?;

    kills_are_counted(&objects(&killer.interrupt()?)?, &read(&file("oomkill"))?)?;
    stalls_are_counted(&objects(&stalls.interrupt()?)?, &read(&file("drsnoop"))?)?;
    reclaim_is_counted(&objects(&reclaim.interrupt()?)?, &read(&file("vmscan"))?)
}

fn kills_are_counted(rows: &[Value], samples: &[Sample]) -> Result<()> {
    let kills = by(samples, "memtools_oom_kills_total", "comm");
    ensure!(
        kills == BTreeMap::from([("hog".to_owned(), 1)]),
        "{kills:?}"
    );
    let kill = rows.iter().find(|row| row["type"] == "kill");
    let kind = kill
        .and_then(|row| row["kind"].as_str())
        .unwrap_or("unknown");
    let kinds = by(samples, "memtools_oom_kills_total", "kind");
    ensure!(
        kinds == BTreeMap::from([(kind.to_owned(), 1)]),
        "{kinds:?}, not {kind}"
    );
    nothing_is_lost(samples)
}

fn stalls_are_counted(rows: &[Value], samples: &[Sample]) -> Result<()> {
    let of_kind = |field| of_rows(rows, "reclaim", field, "/kind");
    let reclaims = rows.iter().filter(|row| row["type"] == "reclaim").count() as u64;
    ensure!(reclaims > 0, "nothing was reclaimed: {rows:?}");
    let counts = by(
        samples,
        "memtools_reclaim_stall_duration_seconds_count",
        "kind",
    );
    ensure!(
        counts.values().sum::<u64>() == reclaims,
        "{counts:?}, not {reclaims}"
    );
    let pages = by(samples, "memtools_reclaim_stalled_pages_total", "kind");
    ensure!(
        pages == of_kind("/reclaimed_pages"),
        "{pages:?} of {rows:?}"
    );
    let all_ns: u64 = of_kind("/latency_ns").values().sum();
    for family in [
        "memtools_reclaim_stall_duration_seconds_sum",
        "memtools_reclaim_stalled_seconds_total",
    ] {
        let sums = samples.iter().filter(|sample| sample.name == family);
        let seconds: f64 = sums.map(|sample| sample.value).sum();
        ensure!(
            (seconds * 1e9 - all_ns as f64).abs() < 1.0,
            "{seconds}, not {all_ns} ns"
        );
    }
    nothing_is_lost(samples)
}

fn reclaim_is_counted(rows: &[Value], samples: &[Sample]) -> Result<()> {
    let operations = "memtools_reclaim_operation_duration_seconds_count";
    let operations = by(samples, operations, "operation");
    for (operation, count) in [
        ("memcg_reclaim", "/memcg_reclaim/count"),
        ("direct_reclaim", "/direct_reclaim/count"),
        ("shrink_slab", "/shrink_slab/count"),
    ] {
        let of_rows: u64 = of_rows(rows, "interval", count, "/type").values().sum();
        ensure!(
            operations.get(operation) == Some(&of_rows),
            "{operation}: {operations:?} {rows:?}"
        );
    }
    ensure!(operations["memcg_reclaim"] > 0, "{operations:?}");
    nothing_is_lost(samples)
}

fn swapped_pages_by_task() -> Result<()> {
    let folder = harness::scratch()?;
    let file = folder.path().join("swapin.prom");
    let path = file.to_string_lossy();
    let _swap = Swap::on("256M")?;
    let mut workload = Workload::start("pageout", &["1009"])?;
    let mut tool = Tool::start("swapin", &["-j", "-s", "--out", "--export", &path])?;
    tool.wait_for_stderr("tracing swap ins")?;
    workload.work()?;
    let rows = objects(&tool.interrupt()?)?;
    let samples = read(&file)?;
    for (family, field) in [
        ("memtools_swap_in_pages_total", "/pages_in"),
        ("memtools_swap_out_pages_total", "/pages_out"),
    ] {
        let pages = by(&samples, family, "comm");
        ensure!(
            pages == of_rows(&rows, "process", field, "/comm"),
            "{pages:?} of {rows:?}"
        );
    }
    let pages = by(&samples, "memtools_swap_in_pages_total", "comm");
    ensure!(pages["pageout"] == 1009, "{pages:?}");
    let histogram = rows.iter().find(|row| row["type"] == "histogram");
    let buckets = histogram.and_then(|row| row["buckets"].as_array());
    let buckets = buckets.context("no histogram")?.iter();
    let times: u64 = buckets.filter_map(|bucket| bucket["count"].as_u64()).sum();
    let count = by(&samples, "memtools_swap_in_duration_seconds_count", "");
    ensure!(count[""] == times && times > 0, "{count:?}, not {times}");
    nothing_is_lost(&samples)
}

/// The program's name has every character that has a meaning in the format.
fn names_of_others_are_labels() -> Result<()> {
    let folder = harness::scratch()?;
    let program = folder.path().join("a\"b\\c{d}=,\u{e9}");
    harness::copy(&workload("minor"), &program)?;
    let file = folder.path().join("faults.prom");
    let path = file.to_string_lossy();
    let mut other = Workload::spawn(Command::new(&program).arg("101"))?;
    let pid = other.pid();
    let args = ["--by-process", "-j", "-p", &pid, "--export", &path];
    let mut tool = Tool::start("faults", &args)?;
    tool.wait_for_stderr("tracing page faults")?;
    other.work()?;
    let rows = objects(&tool.interrupt()?)?;
    let rows = of_rows(&rows, "process", "/faults", "/comm");
    let faults = by(&read(&file)?, "memtools_page_faults_total", "comm");
    ensure!(
        faults == rows && faults.len() == 1,
        "{faults:?}, not {rows:?}"
    );
    Ok(())
}

fn the_file_grows_while_it_traces() -> Result<()> {
    let folder = harness::scratch()?;
    let file = folder.path().join("faults.prom");
    let path = file.to_string_lossy();
    let mut workload = Workload::start("minor", &["1009"])?;
    let pid = workload.pid();
    let args = ["--by-process", "-p", &pid, "--export", &path, "0.6"];
    let mut tool = Tool::start("faults", &args)?;
    tool.wait_for_stderr("tracing page faults")?;
    ensure!(
        !file.exists(),
        "a tool that could not run would have left it"
    );
    workload.go()?;
    let faults = || {
        let samples = read(&file)?;
        Ok::<_, anyhow::Error>(by(&samples, "memtools_page_faults_total", "comm").remove("minor"))
    };
    eventually("the sum is in the file", || {
        Ok(file.exists() && faults()? >= Some(1009))
    })?;
    let before = faults()?;
    let others = fs::read_dir(folder.path())?.count();
    ensure!(others == 1, "{others} files");
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(faults()? >= before, "a sum has fallen");
    Ok(())
}

/// The alert rules, as promtool tests them.
fn alerts_fire_as_their_tests_say() -> Result<()> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/prometheus");
    let promtool = concat!(env!("CARGO_MANIFEST_DIR"), "/target/servers/promtool");
    for arguments in [
        ["check", "rules", "memtools.rules.yml"],
        ["test", "rules", "memtools.rules.test.yml"],
    ] {
        let mut promtool = Command::new(promtool);
        let checked = promtool.args(arguments).current_dir(folder).output();
        let checked = checked.context("no promtool, which scripts/prerequisites unpacks")?;
        ensure!(checked.status.success(), "{checked:?}");
    }
    Ok(())
}

fn what_cannot_be_written_is_told() -> Result<()> {
    let own = std::process::id().to_string();
    for (tool, args) in [
        ("vmscan", &["1", "1"][..]),
        ("drsnoop", &["-d", "0.1"]),
        ("oomkill", &["-d", "0.1"]),
        ("swapin", &["1", "1"]),
        ("hfaults", &["-d", "0.1"]),
        ("ffaults", &["-d", "0.1"]),
        ("faults", &["--by-process", "-d", "0.1"]),
        ("faults", &["-d", "0.1"]),
        ("brkstack", &["-d", "0.1"]),
        ("mmapsnoop", &["-d", "0.1"]),
        ("shmsnoop", &["-d", "0.1"]),
        ("memleak", &["-p", &own, "1", "1"]),
    ] {
        let args = [args, &["--export", "/nonexistent/x.prom"]].concat();
        let ended = harness::run(tool, &args)?;
        ensure!(ended.status.code() == Some(1), "{tool}: {ended:?}");
        ensure!(
            ended.stderr.contains("/nonexistent/x.prom"),
            "{tool}: {ended:?}"
        );
    }
    for (tool, args) in [
        ("mmapsnoop", &["--folded", "--export", "x.prom"][..]),
        ("vmscan", &["--counts", "--export", "x.prom"]),
        ("vmscan", &["--trace-compaction", "--export", "x.prom"]),
    ] {
        let ended = harness::run(tool, args)?;
        ensure!(ended.status.code() == Some(2), "{tool}: {ended:?}");
    }
    // A FIFO would be replaced by a file, so it is refused.
    let folder = harness::scratch()?;
    let fifo = folder.path().join("x.prom");
    mkfifo(&fifo, Mode::S_IRWXU)?;
    let fifo = fifo.to_str().context("not UTF-8")?;
    let args = ["--by-process", "-d", "0.1", "--export", fifo];
    let ended = harness::run("faults", &args)?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    Ok(())
}
