//! Memory that the tools need until they trace: they must run on a machine that is short of memory.

use std::collections::HashMap;
use std::fs;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use memtools::process::smaps;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{self, Tool, Workload, eventually};
use crate::memleak;
use crate::pressure::Group;

/// Most memory that a tool needs until it traces, in KiB, without its own file: memleak and mmapsnoop have 5,100.
const MOST_KIB: u64 = 5_800;
/// Most memory of a tool, as above, where the kernel's BTF has five or six megabytes and cannot be mapped, as
/// before 6.16.
const MOST_KIB_WITH_BTF: u64 = MOST_KIB + 1024;

/// Text that all tools but memleak print when they trace.
const READY: &str = "Ctrl-C to end";

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "memory":
        memleak_needs_no_more,
        memleak_keeps_its_limit [Once],
        a_small_cgroup_is_enough,
        tools_need_no_more,
        maps_need_no_more [Host],
        swapin_needs_no_more [Kprobes],
        the_kernel_needs_no_more [KernelMemory, Kprobes],
    }
}

/// Most memory of a tool's maps in the kernel before any event, in KiB, without stacks and with them. Unwind
/// tables of the running processes come on top.
const MAPS_KIB: [u64; 2] = [5 << 10, 10 << 10];

/// Most memory of the kernel for a tool before any event, in KiB, without stacks and with them: brkstack has
/// 13,476 KiB on Linux 7.2, of which 4.8 MiB are the first table of stacks, 2 MiB the Python functions, and 1.4 MiB
/// the slots of stacks that are being taken.
const KERNEL_KIB: [u64; 2] = [5 << 10, 14 << 10];

/// Starts a tool, waits until it says that it traces, and compares the memory that it has needed with the most.
fn needs_no_more(tool: &str, args: &[&str], ready: &str) -> Result<()> {
    let copy_btf = ["5.10.", "6.1.", "6.12."];
    let release = harness::release();
    let most_kib = if copy_btf.iter().any(|series| release.starts_with(series)) {
        MOST_KIB_WITH_BTF
    } else {
        MOST_KIB
    };
    let mut running = Tool::start(tool, args)?;
    running.wait_for_stderr(ready)?;
    let now = resident(running.pid())?;
    let needed = now
        .others
        .max(running.peak_kib()?.saturating_sub(now.own_file));
    println!("{tool}: {needed} KiB");
    ensure!(needed <= most_kib, "{tool} needs {needed} KiB");
    let ended = running.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(())
}

/// Resident memory of a process, in KiB.
struct Resident {
    /// Pages of the program's file. The kernel can drop these pages, and maps more of them ahead if the file has just
    /// been written, which has it in larger folios.
    own_file: u64,
    /// All else.
    others: u64,
}

/// Returns the resident memory of a process by its mappings. The kernel's sums, of which it keeps the peak, can lack
/// some megabytes: before Linux 6.2, each thread adds what it maps after 64 page faults, each of which can map 16 pages.
fn resident(pid: u32) -> Result<Resident> {
    let program = fs::read_link(format!("/proc/{pid}/exe"))?;
    let (mut own_file, mut all) = (0, 0);
    for memory in smaps::read(pid)? {
        all += memory.resident;
        if memory.mapping.path == program {
            own_file += memory.resident - memory.anonymous;
        }
    }
    ensure!(own_file > 0, "{} is not mapped", program.display());
    Ok(Resident {
        own_file: own_file >> 10,
        others: (all - own_file) >> 10,
    })
}

fn memleak_needs_no_more() -> Result<()> {
    let workload = Workload::start("alloc", &["hold"])?;
    needs_no_more("memleak", &["-p", &workload.pid()], memleak::READY)
}

fn tools_need_no_more() -> Result<()> {
    for tool in [
        "mmapsnoop",
        "brkstack",
        "shmsnoop",
        "faults",
        "ffaults",
        "vmscan",
        "drsnoop",
        "hfaults",
        "oomkill",
    ] {
        needs_no_more(tool, &[], READY)?;
    }
    Ok(())
}

fn maps_need_no_more() -> Result<()> {
    let with_stacks = ["--unwind", "fp"];
    let folded = ["--folded", "--unwind", "fp"];
    let stack = ["--stack", "--unwind", "fp"];
    let runs: [(&str, &[&str], usize); 7] = [
        ("mmapsnoop", &[], 0),
        ("drsnoop", &[], 0),
        ("mmapsnoop", &folded, 1),
        ("brkstack", &with_stacks, 1),
        ("faults", &with_stacks, 1),
        ("drsnoop", &stack, 1),
        ("oomkill", &with_stacks, 1),
    ];
    for (tool, args, stacks) in runs {
        let workload = Workload::start("alloc", &["hold"])?;
        let pid = workload.pid();
        let mut running = Tool::start(tool, &[&["-p", &pid], args].concat())?;
        running.wait_for_stderr(READY)?;
        let kib = maps_of(running.pid())? >> 10;
        println!("{tool} {args:?}: maps of {kib} KiB");
        ensure!(
            kib <= MAPS_KIB[stacks],
            "{tool} {args:?} has maps of {kib} KiB"
        );
        running.interrupt()?;
    }
    Ok(())
}

/// Returns the bytes of the maps that a process has descriptors of, as the kernel reports them.
fn maps_of(pid: u32) -> Result<u64> {
    let mut maps = HashMap::new();
    for info in harness::descriptors(pid)? {
        let field = |name: &str| {
            let value = info.lines().find_map(|line| line.strip_prefix(name));
            value.and_then(|value| value.trim().parse::<u64>().ok())
        };
        if let (Some(bytes), Some(id)) = (field("memlock:"), field("map_id:")) {
            maps.insert(id, bytes);
        }
    }
    ensure!(!maps.is_empty(), "no maps");
    Ok(maps.values().sum())
}

/// A container may have little memory. The tool's memory is charged to it, and so is the kernel's memory for the tool.
fn a_small_cgroup_is_enough() -> Result<()> {
    let group = Group::new("memtools-small", 30 << 20)?;
    group.forbid_swap()?;
    let mut workload = Workload::start("alloc", &["leak", "1009", "4093"])?;
    let pid = workload.pid();
    let args = ["-p", &pid, "-o", "0", "-T", "1000", "60"];
    let mut tool = Tool::spawn(&mut group.command(&harness::tool("memleak"), &args))?;
    tool.wait_for_stderr(memleak::READY)?;
    workload.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    let found = memleak::outstanding(&memleak::last_report(&ended.stdout)?, "leak_malloc");
    ensure!(found == (1009 * 4093, 1009), "{found:?}: {ended:?}");
    Ok(())
}

/// One process allocates more blocks than the limit permits, and another one allocates from more stacks. By the
/// time of a report, memleak and its maps have taken at most the limit beyond what they took at the start.
fn memleak_keeps_its_limit() -> Result<()> {
    const LIMIT_MIB: u64 = 64;
    let limit = format!("{LIMIT_MIB}M");
    let programs: [(&[&str], u64); 2] = [
        (&["one", "malloc", "500009", "24"], 500_009),
        (&["stacks", "50021"], 50_021),
    ];
    for (program, blocks) in programs {
        let mut workload = Workload::start("alloc", program)?;
        let mut tool = memleak::attach(&workload, &["-j", "-o", "0", "--mem-limit", &limit, "60"])?;
        let before = tool.peak_kib()? + maps_of(tool.pid())? / 1024;
        workload.work()?;
        tool.signal(Signal::SIGUSR1)?;
        tool.wait_for_output("\"type\":\"report\"")?;
        let at_report = tool.peak_kib()? + maps_of(tool.pid())? / 1024;
        let taken = (at_report - before) / 1024;
        let ended = tool.interrupt()?;
        println!(
            "{program:?}: {taken} MiB beyond {before} KiB: {}",
            ended.stderr
        );
        ensure!(taken <= LIMIT_MIB, "{program:?}: {taken} MiB");
        ensure!(taken >= LIMIT_MIB / 4, "{program:?}: {taken} MiB alone");
        let objects = ended.objects()?;
        let report = objects.iter().rfind(|object| object["type"] == "report");
        let report = report.context("no report")?;
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        let [entries, stacks] = ["entries", "stacks"].map(|what| number(&report["lost"][what]));
        ensure!(
            number(&report["allocations"]) + entries == blocks,
            "{report}"
        );
        ensure!(entries + stacks > 0, "all had room: {report}");
    }
    Ok(())
}

/// The kernel's memory for a tool before any event is limited: maps, programs, page tables and all else that a
/// memory cgroup is charged for. Stacks are those of a process that waits.
fn the_kernel_needs_no_more() -> Result<()> {
    const STACK: &[&str] = &["--stack"];
    let runs: [(&str, &[&str], usize); 15] = [
        ("mmapsnoop", &[], 0),
        ("brkstack", &["--events"], 0),
        ("shmsnoop", &[], 0),
        ("faults", &["--by-process"], 0),
        ("ffaults", &[], 0),
        ("vmscan", &[], 0),
        ("drsnoop", &[], 0),
        ("swapin", &[], 0),
        ("hfaults", &[], 0),
        ("oomkill", &[], 0),
        ("mmapsnoop", STACK, 1),
        ("brkstack", &[], 1),
        ("faults", &[], 1),
        ("drsnoop", STACK, 1),
        ("oomkill", &["-e"], 1),
    ];
    let mut too_much = Vec::new();
    for (tool, args, stacks) in runs {
        let group = Group::new(&format!("memtools-{tool}-{stacks}"), 1 << 30)?;
        let workload = Workload::start("alloc", &["hold"])?;
        let pid = workload.pid();
        let args = [&["-p", &pid], args].concat();
        let mut running = Tool::spawn(&mut group.command(&harness::tool(tool), &args))?;
        running.wait_for_stderr(READY)?;
        // The kernel adds up charges from time to time.
        let mut kib = 0;
        eventually("something is charged", || {
            kib = group.kernel_bytes()? >> 10;
            Ok(kib > 0)
        })?;
        println!("{tool} {args:?}: {kib} KiB");
        if !(100..=KERNEL_KIB[stacks]).contains(&kib) {
            too_much.push(format!("{tool} {args:?}: {kib} KiB"));
        }
        let ended = running.interrupt()?;
        ensure!(ended.status.success(), "{ended:?}");
    }
    ensure!(too_much.is_empty(), "{too_much:?}");
    Ok(())
}

fn swapin_needs_no_more() -> Result<()> {
    needs_no_more("swapin", &[], READY)
}
