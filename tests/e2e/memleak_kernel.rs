//! memleak's kernel mode against programs that make the kernel allocate a known number of objects.

mod output;

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use crate::harness::{self, Cgroup, Tool, ToolOutput, Workload, tool};

pub(crate) fn tests() -> Vec<Trial> {
    let own = harness::tests! { "memleak_kernel":
        objects_are_counted_by_cache_until_they_are_freed,
        sizes_are_what_was_asked_for_and_what_it_takes,
        pages_of_objects_count_once,
        pages_are_counted_until_they_are_freed,
        percpu_memory_is_counted_on_all_cpus,
        frees_in_interrupts_are_seen,
        frees_in_bulk_are_seen [Kprobes],
        frees_that_are_not_seen_are_told,
        more_than_a_batch_is_read,
        further_blocks_get_another_map,
        only_what_is_filtered_is_counted,
    };
    [own, output::tests()].into_iter().flatten().collect()
}

/// Starts memleak on what the kernel allocates for a workload that is ready.
fn attach(workload: &Workload, args: &[&str]) -> Result<Tool> {
    let pid = workload.pid();
    let older = if args.contains(&"-C") {
        &[][..]
    } else {
        &["-o", "0"]
    };
    start(&[&["-k", "-p", &pid], older, args].concat())
}

/// Starts memleak with a small table of blocks: a guest takes seconds to allocate the memory of a large one.
fn start(args: &[&str]) -> Result<Tool> {
    let blocks = if args.contains(&"--max-allocs") {
        &[][..]
    } else {
        &["--max-allocs", "65536"]
    };
    let mut tool = Tool::start("memleak", &[args, blocks].concat())?;
    tool.wait_for_stderr("memleak: tracing")?;
    Ok(tool)
}

/// Report in JSON.
#[derive(Debug, Default)]
struct Report {
    head: Value,
    groups: Vec<Value>,
}

/// Sum of some groups of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sum {
    allocations: u64,
    bytes: u64,
    requested: u64,
}

impl Report {
    /// Parses all complete reports of an output.
    fn all(stdout: &str) -> Result<Vec<Self>> {
        let mut reports: Vec<Self> = Vec::new();
        for line in stdout.lines() {
            let object: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
            if object["type"] == "report" {
                reports.push(Self {
                    head: object,
                    groups: Vec::new(),
                });
            } else {
                let report = reports.last_mut().context("a group before any report")?;
                report.groups.push(object);
            }
        }
        Ok(reports)
    }

    fn last(ended: &ToolOutput) -> Result<Self> {
        ensure!(ended.status.success(), "{ended:?}");
        let last = Self::all(&ended.stdout)?.pop().context("no report")?;
        ensure!(last.head["lost"]["entries"] == 0, "{}", last.head);
        Ok(last)
    }

    fn sum<'a>(groups: impl Iterator<Item = &'a Value>) -> Sum {
        let mut sum = Sum {
            allocations: 0,
            bytes: 0,
            requested: 0,
        };
        for group in groups {
            let number = |key: &str| group[key].as_u64().unwrap_or(u64::MAX / 4);
            sum.allocations += number("allocations");
            sum.bytes += number("bytes");
            sum.requested += number("requested_bytes");
        }
        sum
    }

    /// Returns the sum of what is outstanding from a cache.
    fn cache(&self, name: &str) -> Sum {
        Self::sum(self.groups.iter().filter(|group| group["cache"] == name))
    }

    /// Returns the sum of what is outstanding from stacks that contain a function.
    fn through(&self, function: &str) -> Sum {
        let passes = |group: &&Value| {
            let mut frames = group["kernel_frames"].as_array().into_iter().flatten();
            frames.any(|frame| {
                let symbol = frame["symbol"].as_str().unwrap_or_default();
                symbol.split('.').next() == Some(function)
            })
        };
        Self::sum(self.groups.iter().filter(passes))
    }
}

/// Traces all of a workload's work, and interrupts memleak while the workload still holds the memory.
fn trace(workload: &mut Workload, args: &[&str]) -> Result<Report> {
    let tool = attach(workload, &[args, &["-j", "-T", "100000", "3600"]].concat())?;
    workload.work()?;
    Report::last(&tool.interrupt()?)
}

/// Traces a workload until it has undone its work, and nothing is outstanding. Returns the reports before and
/// after the undoing.
fn trace_to_nothing(workload: &mut Workload, args: &[&str]) -> Result<(Report, Report)> {
    let tool = attach(workload, &[args, &["-j", "-T", "100000", "1"]].concat())?;
    workload.work()?;
    let reports = |stdout: &str| Report::all(stdout).unwrap_or_default();
    // The next report may have begun before the work was done. The report after it has not.
    let seen = reports(&tool.stdout()).len();
    tool.wait_until(|stdout| reports(stdout).len() > seen + 1)?;
    let before = reports(&tool.stdout()).swap_remove(seen + 1);
    workload.work()?;
    tool.wait_until(|stdout| {
        let last = reports(stdout).pop();
        last.is_some_and(|report| report.head["allocations"] == 0)
    })
    .with_context(|| format!("before it was {before:?}"))?;
    Ok((before, Report::last(&tool.interrupt()?)?))
}

fn objects_are_counted_by_cache_until_they_are_freed() -> Result<()> {
    for (what, count, caches) in [
        (
            "pipes",
            101,
            &[("filp", 202), ("inode_cache", 101), ("dentry", 101)][..],
        ),
        (
            "sockets",
            103,
            &[("filp", 103), ("sock_inode_cache", 103), ("dentry", 103)],
        ),
        ("files", 107, &[("filp", 107)]),
    ] {
        let mut workload = Workload::start("kmem", &[what, &count.to_string()])?;
        let report = trace(&mut workload, &["-k=slab", "--by-cache"])?;
        for &(cache, objects) in caches {
            let found = report.cache(cache);
            ensure!(
                found.allocations == objects && found.bytes >= found.requested,
                "{what}: {found:?} in {cache}, not {objects}: {:#?}",
                report.groups
            );
        }
        workload.finish()?;

        let mut workload = Workload::start("kmem", &[what, &count.to_string()])?;
        let (before, _) = trace_to_nothing(&mut workload, &["--cache", "filp"])?;
        let files = before.head["allocations"].as_u64();
        ensure!(files == Some(caches[0].1), "{what}: {before:?}");
    }
    Ok(())
}

/// The kernel leaves entries of a batch empty if the next bucket does not fit as a whole.
fn more_than_a_batch_is_read() -> Result<()> {
    // Each file has three objects. On an emulated CPU, making that many takes a minute.
    let (files, room) = if harness::in_guest() {
        (20_011, "65536")
    } else {
        (60_007, "262144")
    };
    let mut workload = Workload::start("kmem", &["inodes", &files.to_string()])?;
    let args = ["-k=slab", "--by-cache", "--max-allocs", room];
    let report = trace(&mut workload, &args)?;
    for cache in ["shmem_inode_cache", "dentry"] {
        let found = report.cache(cache).allocations;
        ensure!(found == files, "{cache}: {found} of {files} files");
    }
    Ok(())
}

/// The blocks of the second workload do not fit into the map that the first one's are in.
fn further_blocks_get_another_map() -> Result<()> {
    const FILES: [u64; 2] = [1301, 1303];
    let start = |files: u64| Workload::start("kmem", &["files", &files.to_string()]);
    let mut workloads = [start(FILES[0])?, start(FILES[1])?];
    let pids = workloads.each_ref().map(Workload::pid).join(",");
    let args = [
        "-k",
        "-v",
        "-j",
        "-o",
        "0",
        "--cache",
        "filp",
        "--mem-limit",
        "2M",
    ];
    let mut tool = Tool::start("memleak", &[&args[..], &["-p", &pids, "3600"]].concat())?;
    tool.wait_for_stderr("memleak: tracing")?;
    workloads[0].work()?;
    tool.wait_for_stderr("added a map for")?;
    workloads[1].work()?;
    let ended = tool.interrupt()?;
    let report = Report::all(&ended.stdout)?.pop().context("no report")?;
    let found = report.head["allocations"].as_u64();
    ensure!(found == Some(FILES.iter().sum()), "{}", report.head);
    ensure!(report.head["lost"]["entries"] == 0, "{}", report.head);
    Ok(())
}

/// A message has a header of 48 bytes, and its text. A large pipe has 40 bytes for each page.
fn sizes_are_what_was_asked_for_and_what_it_takes() -> Result<()> {
    let mut workload = Workload::start("kmem", &["messages", "13", "1009"])?;
    // The minimum size omits what the slab allocator allocates for itself.
    let sum = trace(&mut workload, &["-z", "2048"])?.through("load_msg");
    let expected = Sum {
        allocations: 13,
        bytes: 13 * 2048,
        requested: 13 * (48 + 1009),
    };
    ensure!(sum == expected, "{sum:?}, not {expected:?}");

    let expected = Sum {
        allocations: 1,
        bytes: 4 * 4096,
        requested: 256 * 40,
    };
    for (args, cache) in [(&[][..], "[kmalloc-large]"), (&["-k=pages"], "[pages]")] {
        let mut workload = Workload::start("kmem", &["ring", "256"])?;
        let report = trace(&mut workload, &[args, &["--by-cache"]].concat())?;
        let sum = report.cache(cache);
        ensure!(
            sum.allocations == expected.allocations && sum.bytes == expected.bytes,
            "{args:?}: {report:?}"
        );
        let asked = if cache == "[pages]" {
            sum.bytes
        } else {
            expected.requested
        };
        ensure!(sum.requested == asked, "{args:?}: {report:?}");
        let other =
            report.cache("[pages]").allocations + report.cache("[kmalloc-large]").allocations;
        ensure!(other == 1, "counted twice: {report:?}");
    }
    Ok(())
}

/// Pages of a slab are counted only if its objects are not.
fn pages_of_objects_count_once() -> Result<()> {
    const FILES: u64 = 3001;
    let slab_pages = |args: &[&str]| -> Result<(Report, Sum)> {
        let mut workload = Workload::start("kmem", &["files", &FILES.to_string()])?;
        let report = trace(&mut workload, args)?;
        let pages = report.groups.iter().filter(|group| {
            let frames = group["kernel_frames"].as_array().into_iter().flatten();
            let mut names = frames.filter_map(|frame| frame["symbol"].as_str());
            names.next().is_some_and(|leaf| leaf.contains("pages"))
                && names.any(|name| name.contains("alloc_empty_file"))
        });
        let sum = Report::sum(pages);
        Ok((report, sum))
    };
    let (_, alone) = slab_pages(&["-k=pages"])?;
    let (both, beside) = slab_pages(&[])?;
    ensure!(alone.bytes > FILES * 128, "{alone:?} without objects");
    // The remaining pages were taken in advance by the slab allocator, and have no objects yet.
    ensure!(
        beside.bytes <= 16 * 4096 && beside.bytes < alone.bytes / 4,
        "{beside:?} beside objects, {alone:?} without"
    );
    ensure!(
        both.through("alloc_empty_file").allocations >= FILES,
        "{both:?}"
    );
    Ok(())
}

fn pages_are_counted_until_they_are_freed() -> Result<()> {
    for (what, pages) in [("buffers", 211), ("memory", 223)] {
        let mut workload = Workload::start("kmem", &[what, &pages.to_string()])?;
        let (before, _) = trace_to_nothing(&mut workload, &["-k=pages", "-z", "4096"])?;
        let through = [
            "pipe_write",
            "anon_pipe_write",
            "shmem_get_folio_gfp",
            "shmem_getpage_gfp",
        ];
        let found: Vec<Sum> = through
            .iter()
            .map(|function| before.through(function))
            .filter(|sum| sum.allocations > 0)
            .collect();
        ensure!(
            found
                .iter()
                .any(|sum| sum.allocations == pages && sum.bytes == pages * 4096),
            "{what}: {found:?} of {:#?}",
            before.groups
        );
    }
    Ok(())
}

fn percpu_memory_is_counted_on_all_cpus() -> Result<()> {
    let cpus = libbpf_rs::num_possible_cpus()? as u64;
    let mut workload = Workload::start("kmem", &["slots", "23"])?;
    let (before, _) = trace_to_nothing(&mut workload, &["--percpu"])?;
    let sum = before.through("array_map_alloc");
    ensure!(
        sum.allocations == 23 && sum.requested == 23 * 8 && sum.bytes >= 23 * 8 * cpus,
        "{sum:?} on {cpus} CPUs: {before:?}"
    );
    Ok(())
}

/// RCU frees the objects of closed files, thousands at a time, in interrupts that come while other frees are traced.
fn frees_in_interrupts_are_seen() -> Result<()> {
    let mut workload = Workload::start("kmem", &["churn", "20011"])?;
    let (before, after) = trace_to_nothing(&mut workload, &["--cache", "filp"])?;
    ensure!(
        before.head["unseen_frees"] == 0 && after.head["unseen_frees"] == 0,
        "{before:?} {after:?}"
    );
    Ok(())
}

fn frees_in_bulk_are_seen() -> Result<()> {
    let mut workload = Workload::start("kmem", &["members", "13"])?;
    let (before, _) = trace_to_nothing(&mut workload, &["-k=slab", "-Z", "64"])?;
    ensure!(
        before.through("sock_kmalloc").allocations == 13,
        "{before:?}"
    );
    Ok(())
}

/// Without the programs on kernel functions, memleak does not see what kfree_rcu() frees. memleak says so, and
/// counts such frees when it notices them.
fn frees_that_are_not_seen_are_told() -> Result<()> {
    let mut workload = Workload::start("kmem", &["members", "13"])?;
    let pid = workload.pid();
    let mut tool = Tool::spawn(
        Command::new(tool("memleak"))
            .args(["-k", "-p", &pid, "-j", "-o", "0", "-k=slab", "-T", "1000"])
            .env("MEMTOOLS_ATTACH", "tracepoints")
            .stdin(Stdio::null()),
    )?;
    tool.wait_for_stderr("memleak: tracing")?;
    tool.wait_for_stderr("no hook for bulk frees")?;
    workload.work()?;
    workload.work()?;
    let report = Report::last(&tool.interrupt()?)?;
    ensure!(report.head["unseen_frees"].is_u64(), "{}", report.head);
    ensure!(
        report.through("sock_kmalloc").allocations == 13,
        "{report:?}"
    );
    Ok(())
}

fn only_what_is_filtered_is_counted() -> Result<()> {
    let cgroup = Cgroup::new()?;
    let path = cgroup.path().to_string_lossy().into_owned();
    // The program has a name of its own, because other tests run the same program.
    let folder = harness::scratch()?;
    let program = folder.path().join("kmem-filtered");
    harness::copy(&harness::workload("kmem"), &program)?;
    for (args, expected) in [
        (&["-n", "kmem-filtered"][..], 53),
        (&["-n", "kmem-filteredd"], 0),
        (&["--cgroup", &path], 53),
        (&["-p", "1"], 0),
        (&["-n", "kmem-filtered", "-z", "4096"], 0),
        (&["-n", "kmem-filtered", "--cache", "dentry"], 53),
        (&["-n", "kmem-filtered", "--cache", "filp"], 0),
    ] {
        let mut workload = Workload::spawn(Command::new(&program).args(["sockets", "53"]))?;
        cgroup.add(&workload.pid())?;
        let slab = if args.contains(&"--cache") {
            &[][..]
        } else {
            &["-k=slab"]
        };
        let common = ["-k", "-j", "-o", "0", "--by-cache", "-T", "1000", "3600"];
        let tool = start(&[args, slab, &common].concat())?;
        workload.work()?;
        let report = Report::last(&tool.interrupt()?)?;
        let cache = if expected == 53 {
            "dentry"
        } else {
            "sock_inode_cache"
        };
        let found = report.cache(cache).allocations;
        ensure!(found == expected, "{args:?}: {found} in {report:?}");
        workload.finish()?;
    }
    Ok(())
}
