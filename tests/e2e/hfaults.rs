//! hfaults against programs that fault in a known number of huge pages, by every way to attach that the kernel has.

use std::fs;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::json;

use crate::harness::{self, Mounted, Need, Tool, ToolOutput, Workload, workload};
use crate::pressure::{Group, Setting};

pub(crate) fn tests() -> Vec<Trial> {
    let test = |name: &str, needs: &'static [Need], run: fn() -> Result<()>| {
        harness::test(&format!("hfaults::{name}"), needs, run)
    };
    vec![
        test(
            "a_command_is_traced_to_its_end",
            &[],
            a_command_is_traced_to_its_end,
        ),
        test("processes_are_counted", &[], processes_are_counted),
        test("files_are_counted", &[], files_are_counted),
        test("processes_are_filtered", &[], processes_are_filtered),
        test(
            "reasons_are_told_apart",
            &[Need::Kprobes],
            reasons_are_told_apart,
        ),
        test("transparent_pages", &[Need::Kprobes], transparent_pages),
        test(
            "transparent_pages_are_those_of_vmstat",
            &[Need::Kprobes, Need::Guest],
            transparent_pages_are_those_of_vmstat,
        ),
        test(
            "transparent_pages_that_cannot_be_had",
            &[Need::Kprobes, Need::Guest],
            transparent_pages_that_cannot_be_had,
        ),
        test(
            "transparent_pages_of_64_kb",
            &[Need::Kprobes, Need::Guest, Need::SmallThp],
            transparent_pages_of_64_kb,
        ),
        test(
            "transparent_pages_of_shared_memory",
            &[Need::Kprobes, Need::Guest],
            transparent_pages_of_shared_memory,
        ),
        test(
            "an_exhausted_pool_is_told",
            &[Need::Kprobes, Need::Guest],
            an_exhausted_pool_is_told,
        ),
        test(
            "who_asks_for_transparent_pages",
            &[],
            who_asks_for_transparent_pages,
        ),
        test(
            "reports_come_at_their_interval",
            &[],
            reports_come_at_their_interval,
        ),
        test("every_attempt_is_named", &[], every_attempt_is_named),
    ]
}

/// Huge pages that a test reserves. Dropping the value releases them.
struct HugePages {
    before: String,
    _one_at_a_time: MutexGuard<'static, ()>,
}

const RESERVED: &str = "/proc/sys/vm/nr_hugepages";

impl HugePages {
    fn reserve(pages: u64) -> Result<Self> {
        static IN_USE: Mutex<()> = Mutex::new(());
        let one_at_a_time = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        let before = fs::read_to_string(RESERVED)?;
        let all = before.trim().parse::<u64>()? + pages;
        fs::write(RESERVED, all.to_string())?;
        let reserved = fs::read_to_string(RESERVED)?;
        ensure!(
            reserved.trim() == all.to_string(),
            "only {reserved} huge pages can be had"
        );
        Ok(Self {
            before,
            _one_at_a_time: one_at_a_time,
        })
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(RESERVED, &self.before);
    }
}

/// Returns the ways to attach that this kernel has.
fn ways() -> Vec<&'static str> {
    let kprobes = Path::new("/sys/bus/event_source/devices/kprobe/type").exists();
    let btf = fs::read("/sys/kernel/btf/vmlinux").unwrap_or_default();
    let find_vma = b"\0BPF_FUNC_find_vma\0";
    let lookups = btf.windows(find_vma.len()).any(|window| window == find_vma);
    // Our kernels that have kprobes have fentry, too.
    let mut ways = if kprobes {
        vec!["fentry", "kprobe"]
    } else {
        Vec::new()
    };
    ways.extend(lookups.then_some("page-fault event"));
    ways
}

/// Returns the ways to attach that report why a page faulted. 6.1 refuses fentry on hugetlb_wp(), which has seven
/// arguments, with ENOTSUPP; the tool takes kprobes there.
fn ways_with_reasons() -> Vec<&'static str> {
    let refused = harness::release().starts_with("6.1.");
    let ways = ["fentry", "kprobe"].into_iter();
    ways.filter(|&way| !refused || way == "kprobe").collect()
}

fn start(way: &str, args: &[&str]) -> Result<Tool> {
    Tool::start_by(way, "hfaults", args)
}

fn end(tool: Tool) -> Result<ToolOutput> {
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(ended)
}

fn processes_are_counted() -> Result<()> {
    let _pages = HugePages::reserve(10)?;
    let ways = ways();
    ensure!(!ways.is_empty(), "no way to attach");
    for way in ways {
        let mut workload = Workload::start("huge", &["7", "3"])?;
        let tool = start(way, &["-n", "huge"])?;
        let facts = workload.work()?;
        let ended = end(tool)?;
        // Lines are in ascending order.
        let expected = format!(
            "@[{}, huge]: 3\n@[{}, huge]: 7\n\n",
            facts["child"],
            workload.pid()
        );
        ensure!(
            ended.stdout == expected,
            "{way}: {ended:?}\nis not\n{expected}"
        );
    }
    Ok(())
}

fn files_are_counted() -> Result<()> {
    let _pages = HugePages::reserve(5)?;
    let folder = harness::scratch()?;
    let _files = Mounted::hugetlbfs(folder.path())?;
    let path = folder.path().join("file");
    for way in ways() {
        let mut workload = Workload::start("hugefile", &["5", &path.to_string_lossy()])?;
        let tool = start(way, &["-j", "-p", &workload.pid()])?;
        workload.work()?;
        let ended = end(tool)?;
        workload.finish()?;
        let rows = ended.objects()?;
        ensure!(rows.len() == 1 && rows[0]["count"] == 5, "{way}: {ended:?}");
    }
    Ok(())
}

fn processes_are_filtered() -> Result<()> {
    let _pages = HugePages::reserve(10)?;
    for way in ways() {
        let mut workloads = [
            Workload::start("huge", &["3"])?,
            Workload::start("huge", &["7"])?,
        ];
        let tool = start(way, &["-p", &workloads[1].pid()])?;
        for workload in &mut workloads {
            workload.work()?;
        }
        let ended = end(tool)?;
        let expected = format!("@[{}, huge]: 7\n\n", workloads[1].pid());
        ensure!(ended.stdout == expected, "{way}: {ended:?}");
    }
    Ok(())
}

fn reasons_are_told_apart() -> Result<()> {
    let _pages = HugePages::reserve(10)?;
    for way in ways_with_reasons() {
        let mut workload = Workload::start("huge", &["7", "3"])?;
        let tool = start(way, &["-e", "-n", "huge"])?;
        let facts = workload.work()?;
        let ended = end(tool)?;
        let expected = format!(
            "@[{}, huge, 2MB, copy on write]: 3\n@[{}, huge, 2MB, no page]: 7\n\n",
            facts["child"],
            workload.pid()
        );
        ensure!(
            ended.stdout == expected,
            "{way}: {ended:?}\nis not\n{expected}"
        );
    }
    // The fallback knows only the page size.
    if ways().contains(&"page-fault event") {
        let mut workload = Workload::start("huge", &["7"])?;
        let tool = start("page-fault event", &["-e", "-j", "-p", &workload.pid()])?;
        workload.work()?;
        let rows = end(tool)?.objects()?;
        ensure!(rows.len() == 1, "{rows:?}");
        let found = json!([rows[0]["page_bytes"], rows[0]["reason"], rows[0]["count"]]);
        ensure!(found == json!([2 << 20, null, 7]), "{rows:?}");
    }
    Ok(())
}

fn transparent_pages() -> Result<()> {
    for way in ["fexit", "kretprobe"] {
        let mut workload = Workload::start("thp", &["5", "dontneed"])?;
        let tool = start(way, &["--thp", "-p", &workload.pid()])?;
        let facts = workload.work()?;
        let ended = end(tool)?;
        // Each region faults once before and once after MADV_DONTNEED.
        ensure!(
            facts["huge_kb"] == "10240",
            "no transparent huge pages: {facts:?}"
        );
        let expected = format!("@[{}, thp, huge page]: 10\n\n", workload.pid());
        ensure!(
            ended.stdout == expected,
            "{way}: {ended:?}\nis not\n{expected}"
        );
    }
    Ok(())
}

/// The counts equal /proc/vmstat's. A region that is too small for a huge page does not count, nor does a region
/// that is only read.
fn transparent_pages_are_those_of_vmstat() -> Result<()> {
    for way in ["fexit", "kretprobe"] {
        let mut workload = Workload::start("thp", &["7", "odd"])?;
        let pid = workload.pid();
        let tool = start(way, &["--thp", "-p", &pid])?;
        let before = of_this_size()?;
        let facts = workload.work()?;
        is_told_by_size(before, (7, 0))?;
        let ended = end(tool)?;
        ensure!(
            facts["alloc"] == "7" && facts["fallback"] == "0",
            "{facts:?}"
        );
        let expected = format!("@[{pid}, thp, zero page]: 1\n@[{pid}, thp, huge page]: 7\n\n");
        ensure!(
            ended.stdout == expected && !ended.stderr.contains("lost"),
            "{way}: {ended:?}\nis not\n{expected}"
        );
    }
    Ok(())
}

/// The kernel's counter of 64 kB pages has the same count.
fn transparent_pages_of_64_kb() -> Result<()> {
    const OF_SIZE: &str = "/sys/kernel/mm/transparent_hugepage/hugepages-64kB";
    let _large = Setting::change(
        "/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/enabled",
        "never",
    )?;
    let _small = Setting::change(
        "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled",
        "madvise",
    )?;
    let given = || -> Result<u64> {
        let file = fs::read_to_string(format!("{OF_SIZE}/stats/anon_fault_alloc"))?;
        Ok(file.trim().parse()?)
    };
    for way in ["fexit", "kretprobe"] {
        let mut workload = Workload::start("thp", &["7"])?;
        let pid = workload.pid();
        let tool = start(way, &["--thp", "-p", &pid])?;
        let before = given()?;
        workload.work()?;
        let counted = given()? - before;
        let ended = end(tool)?;
        // The regions are of 2 MB.
        ensure!(counted == 7 * 32, "{counted} by the kernel");
        let expected = format!("@[{pid}, thp, 64KB, huge page]: {counted}\n\n");
        ensure!(
            ended.stdout == expected,
            "{way}: {ended:?}\nis not\n{expected}"
        );
    }
    Ok(())
}

fn transparent_pages_of_shared_memory() -> Result<()> {
    let _enabled = Setting::change(
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
        "always",
    )?;
    for way in ["fexit", "kretprobe"] {
        let mut workload = Workload::start("thp", &["7", "shared"])?;
        let pid = workload.pid();
        let tool = start(way, &["--thp", "-p", &pid])?;
        let facts = workload.work()?;
        let ended = end(tool)?;
        ensure!(facts["file_alloc"] == "7", "{facts:?}");
        let expected = format!("@[{pid}, thp, 2MB, shared memory]: 7\n\n");
        ensure!(
            ended.stdout == expected,
            "{way}: {ended:?}\nis not\n{expected}"
        );
    }
    Ok(())
}

/// Returns the kernel's counters of anonymous pages of this size: allocated pages, and fallbacks. None before 6.10.
fn of_this_size() -> Result<Option<(u64, u64)>> {
    let stats = Path::new("/sys/kernel/mm/transparent_hugepage/hugepages-2048kB/stats");
    if !stats.exists() {
        return Ok(None);
    }
    let read =
        |name: &str| -> Result<u64> { Ok(fs::read_to_string(stats.join(name))?.trim().parse()?) };
    Ok(Some((
        read("anon_fault_alloc")?,
        read("anon_fault_fallback")?,
    )))
}

/// Compares the increase of the counters since `before` with `expected`.
fn is_told_by_size(before: Option<(u64, u64)>, expected: (u64, u64)) -> Result<()> {
    let (Some(before), Some(after)) = (before, of_this_size()?) else {
        return Ok(());
    };
    let counted = (after.0 - before.0, after.1 - before.1);
    ensure!(counted == expected, "{counted:?}, not {expected:?}");
    Ok(())
}

/// A cgroup's limit permits some huge pages. The other faults get a small page each, which the limit permits.
fn transparent_pages_that_cannot_be_had() -> Result<()> {
    let group = Group::new("memtools-hfaults", 10 << 20)?;
    group.forbid_swap()?;
    for way in ["fexit", "kretprobe"] {
        let mut workload = Workload::spawn(&mut group.command(&workload("thp"), &["7", "first"]))?;
        let pid = workload.pid();
        let tool = start(way, &["--thp", "-p", &pid])?;
        let before = of_this_size()?;
        let facts = workload.work()?;
        let (given, refused) = (facts["alloc"].parse()?, facts["fallback"].parse()?);
        is_told_by_size(before, (given, refused))?;
        ensure!(
            given > 0 && refused > 0 && given + refused == 7,
            "{facts:?}"
        );
        let ended = end(tool)?;
        let mut rows = [(given, "huge page"), (refused, "fallback")];
        rows.sort_unstable();
        let rows = rows.map(|(count, what)| format!("@[{pid}, thp, {what}]: {count}\n"));
        let expected = rows.concat() + "\n";
        ensure!(
            ended.stdout == expected && !ended.stderr.contains("lost"),
            "{way}: {ended:?}\nis not\n{expected}"
        );
    }
    Ok(())
}

fn an_exhausted_pool_is_told() -> Result<()> {
    for way in ways_with_reasons() {
        let _pages = HugePages::reserve(5)?;
        let mut workload = Workload::start("huge", &["5", "beyond"])?;
        let pid = workload.pid();
        let tool = start(way, &["-e", "-p", &pid])?;
        let facts = workload.work()?;
        let ended = end(tool)?;
        ensure!(facts["sigbus"] == "1", "{facts:?}");
        let expected =
            format!("@[{pid}, huge, 2MB, pool exhausted]: 1\n@[{pid}, huge, 2MB, no page]: 5\n\n");
        ensure!(
            ended.stdout == expected,
            "{way}: {ended:?}\nis not\n{expected}"
        );
    }
    Ok(())
}

fn who_asks_for_transparent_pages() -> Result<()> {
    let mut workload = Workload::start("thp", &["3", "dontneed"])?;
    let mut tool = Tool::start("hfaults", &["--madvise", "-p", &workload.pid()])?;
    tool.wait_for_stderr("tracing madvise(MADV_HUGEPAGE)")?;
    // --madvise does not count MADV_DONTNEED.
    workload.work()?;
    let ended = end(tool)?;
    ensure!(
        ended.stdout == format!("@[{}, thp]: 1\n\n", workload.pid()),
        "{ended:?}"
    );
    Ok(())
}

fn a_command_is_traced_to_its_end() -> Result<()> {
    let _pages = HugePages::reserve(7)?;
    let command = format!("'{}' 7", harness::workload("huge").display());
    let ended = harness::run("hfaults", &["-j", "-c", &command])?;
    ensure!(ended.status.success(), "{ended:?}");
    let rows = ended.objects_among_lines()?;
    let row = rows.first().context("no row")?;
    ensure!(row["count"] == 7 && row["comm"] == "huge", "{ended:?}");
    Ok(())
}

fn reports_come_at_their_interval() -> Result<()> {
    let _pages = HugePages::reserve(7)?;
    let mut workload = Workload::start("huge", &["7"])?;
    let way = ways()[0];
    let tool = start(way, &["-T", "-p", &workload.pid(), "0.5", "3"])?;
    let begin = Instant::now();
    workload.work()?;
    let ended = tool.wait()?;
    ensure!(
        begin.elapsed() > Duration::from_millis(1000),
        "{:?}",
        begin.elapsed()
    );
    let blocks: Vec<&str> = ended.stdout.split_terminator("\n\n").collect();
    ensure!(ended.status.success() && blocks.len() == 3, "{ended:?}");
    // Faults are counted once, not again in each report.
    let counted = ended.stdout.lines().filter(|line| line.starts_with("@["));
    let total: u64 = counted
        .filter_map(|line| line.rsplit_once(": ")?.1.parse::<u64>().ok())
        .sum();
    ensure!(total == 7, "{ended:?}");
    ensure!(
        blocks.iter().all(|block| block.as_bytes()[2] == b':'),
        "{ended:?}"
    );
    Ok(())
}

fn every_attempt_is_named() -> Result<()> {
    let tool = Tool::start("hfaults", &["--thp", "-d", "0.1"])?;
    let ended = tool.wait()?;
    if ways().contains(&"kprobe") {
        ensure!(ended.status.success(), "{ended:?}");
    } else {
        ensure!(
            ended.status.code() == Some(1) && ended.stdout.is_empty(),
            "{ended:?}"
        );
        for attempt in ["\n  fexit: ", "\n  kretprobe: "] {
            ensure!(ended.stderr.contains(attempt), "{ended:?}");
        }
    }
    Ok(())
}
