//! faults against workloads whose faults the kernel has counted, too, for getrusage(2).

use std::collections::HashMap;
use std::env;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use libbpf_rs::query::MapInfoIter;
use libbpf_rs::{MapCore, MapHandle, MapType};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;

use crate::harness::{self, Tool, ToolOutput, Workload, workload};
use crate::pressure::Setting;

const READY: &str = "tracing page faults";
const PAGES: &str = "1009";

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "faults":
        counts_are_those_of_getrusage,
        minor_and_major_are_told_apart,
        major_faults_are_counted [Disk],
        user_and_kernel_are_told_apart,
        bytes_are_pages,
        processes_are_counted_without_stacks,
        forked_children_that_have_exited_have_names,
        a_command_is_traced_from_its_start,
        intervals_add_up,
        any_number_of_stacks_is_counted,
        what_is_counted_while_a_report_waits_for_its_reader [Once],
        json_agrees [Once],
        a_process_that_exits_ends_it,
        its_own_faults_are_left_out_and_told,
        what_the_kernel_brings_in_is_no_fault,
        cpus_that_come_later_are_traced [Guest],
    }
}

/// Traces a workload by its PID with these options.
fn trace(
    program: &str,
    args: &[&str],
    options: &[&str],
) -> Result<(ToolOutput, HashMap<String, String>)> {
    let mut program = Workload::start(program, args)?;
    let pid = program.pid();
    let mut tool = Tool::start("faults", &[&["-p", &pid], options].concat())?;
    tool.wait_for_stderr(READY)?;
    let facts = program.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok((ended, facts))
}

/// Returns the weights of folded lines by innermost frame. Every line must have the root frame `root`.
fn by_leaf<'a>(stdout: &'a str, root: &str) -> Result<HashMap<&'a str, u64>> {
    harness::by_leaf(harness::folded(stdout)?, root)
}

fn counts_are_those_of_getrusage() -> Result<()> {
    let (ended, facts) = trace("minor", &[PAGES, "both"], &[])?;
    let leaves = by_leaf(&ended.stdout, "minor")?;
    let expected = HashMap::from([("read_pages", 1009), ("write_pages", 1009)]);
    ensure!(leaves == expected, "{leaves:?}");
    ensure!(
        facts["minor"] == "2018" && facts["major"] == "0",
        "{facts:?}"
    );
    ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
    Ok(())
}

fn minor_and_major_are_told_apart() -> Result<()> {
    let (ended, _) = trace("minor", &[PAGES], &["-m"])?;
    let leaves = by_leaf(&ended.stdout, "minor")?;
    ensure!(
        leaves == HashMap::from([("write_pages", 1009)]),
        "{leaves:?}"
    );
    let (ended, _) = trace("minor", &[PAGES], &["-M"])?;
    ensure!(ended.stdout.is_empty(), "{}", ended.stdout);
    Ok(())
}

fn major_faults_are_counted() -> Result<()> {
    let disk = env::var_os("MEMTOOLS_DISK").context("no disk")?;
    let path = Path::new(&disk).join("faults-major");
    let path = path.to_str().context("an odd path")?;
    let (ended, facts) = trace("file", &[path, "random", "101"], &["-M"])?;
    let leaves = by_leaf(&ended.stdout, "file")?;
    ensure!(facts["major"] == "101", "{facts:?}");
    ensure!(leaves == HashMap::from([("read_pages", 101)]), "{leaves:?}");
    Ok(())
}

fn user_and_kernel_are_told_apart() -> Result<()> {
    for options in [&["--user-mode"][..], &["-U"]] {
        let (ended, _) = trace("minor", &[PAGES], options)?;
        let leaves = by_leaf(&ended.stdout, "minor")?;
        ensure!(
            leaves == HashMap::from([("write_pages", 1009)]),
            "{leaves:?}"
        );
    }
    let (ended, _) = trace("minor", &[PAGES], &["--kernel-mode"])?;
    ensure!(ended.stdout.is_empty(), "{}", ended.stdout);
    // -K only selects the stack, as in brkstack: a fault of user code has no kernel stack.
    let (ended, _) = trace("minor", &[PAGES], &["-K"])?;
    ensure!(ended.stdout == "minor 1009\n", "{}", ended.stdout);
    let (ended, _) = trace("minor", &[PAGES], &["-UK"])?;
    let leaves = by_leaf(&ended.stdout, "minor")?;
    ensure!(
        leaves == HashMap::from([("write_pages", 1009)]),
        "{leaves:?}"
    );

    // In this read the kernel writes to a buffer that dd never touched.
    let dd = "dd if=/dev/zero of=/dev/null bs=1M count=1";
    let mut command = Command::new(harness::tool("faults"));
    command
        .args(["--kernel-mode", "-Ka", "-c", dd])
        .stdin(Stdio::null());
    let ended = Tool::spawn(&mut command)?.wait()?;
    let zeroes = |line: &&str| harness::arch::ZEROES.iter().any(|part| line.contains(part));
    let zeroing = ended.stdout.lines().filter(zeroes);
    let faults: u64 = zeroing
        .filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
        .sum();
    ensure!(faults == 256 || faults == 257, "{}", ended.stdout);
    Ok(())
}

fn bytes_are_pages() -> Result<()> {
    let (ended, _) = trace("minor", &[PAGES], &["--bytes"])?;
    let leaves = by_leaf(&ended.stdout, "minor")?;
    ensure!(
        leaves == HashMap::from([("write_pages", 1009 * 4096)]),
        "{leaves:?}"
    );
    Ok(())
}

fn processes_are_counted_without_stacks() -> Result<()> {
    for (options, expected) in [
        (
            &[][..],
            "PID     COMM             FAULTS\n{pid} minor            1009\n",
        ),
        (
            &["--text", "-P"],
            "PID     COMM             FAULTS\n{pid} minor            1009\n",
        ),
        (
            &["--bytes"],
            "PID     COMM             BYTES\n{pid} minor            4132864\n",
        ),
    ] {
        let mut program = Workload::start("minor", &[PAGES])?;
        let pid = program.pid();
        let mut tool = Tool::start("faults", &[&["--by-process", "-p", &pid], options].concat())?;
        tool.wait_for_stderr(READY)?;
        program.work()?;
        let ended = tool.interrupt()?;
        let expected = expected.replace("{pid}", &format!("{pid:<7}"));
        ensure!(
            ended.stdout.trim_end() == expected.trim_end(),
            "{}",
            ended.stdout
        );
    }

    let (ended, facts) = trace("minor", &[PAGES], &["--by-process", "-j"])?;
    let rows = ended.objects()?;
    ensure!(
        rows.len() == 1
            && rows[0]["type"] == "process"
            && rows[0]["comm"] == "minor"
            && rows[0]["faults"] == facts["minor"].parse::<u64>()?,
        "{ended:?}"
    );
    Ok(())
}

/// Forked children that never call exec run their parent's code.
fn forked_children_that_have_exited_have_names() -> Result<()> {
    let mut tool = Tool::start("faults", &["-n", "forktree"])?;
    tool.wait_for_stderr(READY)?;
    let mut program = Workload::start("forktree", &["3", "3", "11"])?;
    let facts = program.work()?;
    program.finish()?;
    let ended = tool.interrupt()?;
    let leaves = by_leaf(&ended.stdout, "forktree")?;
    let forks: u64 = facts["forks"].parse()?;
    // The first process also writes to each page once.
    ensure!(
        leaves.get("write_pages") == Some(&((forks + 1) * 11)),
        "{leaves:?}"
    );
    Ok(())
}

fn a_command_is_traced_from_its_start() -> Result<()> {
    let line = format!("{} {PAGES}", workload("minor").display());
    let mut command = Command::new(harness::tool("faults"));
    command.args(["-f", "-c", &line]).stdin(Stdio::null());
    let ended = Tool::spawn(&mut command)?.wait()?;
    ensure!(ended.status.success(), "{ended:?}");
    let stacks = ended
        .stdout
        .lines()
        .filter(|line| line.ends_with("write_pages 1009"));
    ensure!(stacks.count() == 1, "{}", ended.stdout);
    Ok(())
}

fn intervals_add_up() -> Result<()> {
    let (ended, _) = trace("minor", &["20011"], &["-f", "0.01"])?;
    let leaves = by_leaf(&ended.stdout, "minor")?;
    ensure!(
        leaves == HashMap::from([("write_pages", 20011)]),
        "{leaves:?}"
    );
    ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
    Ok(())
}

/// Whether the newest of a tool's tables of stacks is less than half full.
fn has_room_for_stacks(tool: u32) -> Result<bool> {
    let mut tables = Vec::new();
    for info in harness::descriptors(tool)? {
        let id = info.lines().find_map(|line| line.strip_prefix("map_id:"));
        let map = id.and_then(|id| MapHandle::from_map_id(id.trim().parse().ok()?).ok());
        let map = map.filter(|map| map.name() == "stacks" && map.map_type() == MapType::Hash);
        tables.extend(id.zip(map).map(|(id, map)| (id.trim().parse::<u32>(), map)));
    }
    let newest = tables.into_iter().max_by_key(|(id, _)| id.clone().ok());
    let (_, table) = newest.context("no table of stacks")?;
    Ok(table.keys().count() < table.max_entries() as usize / 2)
}

/// Whether the keys of a process fill less than half of each map that counts faults.
fn has_room(pid: u32) -> bool {
    let pid = pid.to_ne_bytes();
    let maps = MapInfoIter::default().filter_map(|info| MapHandle::from_map_id(info.id).ok());
    // A larger map that replaces the skeleton's map is named "counts", too.
    let counts = maps.filter(|map| map.name().to_string_lossy().starts_with("counts"));
    let counts = counts.filter(|map| map.map_type() == MapType::Hash && map.key_size() == 40);
    // The PID follows the two stack ids in the key.
    let of_process = |key: &Vec<u8>| key[16..20] == pid;
    let keys = |map: &MapHandle| map.keys().filter(of_process).count();
    counts
        .into_iter()
        .all(|map| keys(&map) < map.max_entries() as usize / 2)
}

/// Rounds of faults with stacks of their own. All rounds have more stacks than any map has the capacity for.
const ROUNDS: usize = 11;
const ROUND_PAGES: usize = 2003;

fn start_rounds() -> Result<Workload> {
    let (pages, rounds) = (ROUND_PAGES.to_string(), ROUNDS.to_string());
    Workload::start("minor", &[&pages, "stacks", &rounds])
}

/// Does the rounds from this one on. Before the next one begins, the tool has emptied the maps.
fn do_rounds(program: &mut Workload, tool: &Tool, first: usize) -> Result<()> {
    let pid = program.pid().parse()?;
    for round in first..=ROUNDS {
        program.round(round == ROUNDS)?;
        harness::eventually("the maps are emptied", || {
            Ok(has_room(pid) && has_room_for_stacks(tool.pid())?)
        })?;
    }
    Ok(())
}

/// Counts leave the kernel as the maps fill.
fn any_number_of_stacks_is_counted() -> Result<()> {
    let mut program = start_rounds()?;
    let mut tool = Tool::start("faults", &["-f", "-p", &program.pid()])?;
    tool.wait_for_stderr(READY)?;
    do_rounds(&mut program, &tool, 1)?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    let stacks = ended.stdout.lines().filter(|line| line.contains(";down 1"));
    ensure!(stacks.count() == ROUNDS * ROUND_PAGES, "{}", ended.stderr);
    ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
    Ok(())
}

/// Counts leave the kernel also while the first report is not read.
fn what_is_counted_while_a_report_waits_for_its_reader() -> Result<()> {
    let mut program = start_rounds()?;
    let mut tool = Tool::start("faults", &["-j", "-p", &program.pid()])?;
    tool.wait_for_stderr(READY)?;
    program.round(false)?;
    let stalled = tool.stall_output()?;
    tool.signal(Signal::SIGUSR1)?;
    tool.wait_for_full_pipe()?;
    do_rounds(&mut program, &tool, 2)?;
    drop(stalled);
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    // 100 MB of JSON, which would take ten times as much memory if it were parsed.
    let stacks = ended
        .stdout
        .lines()
        .filter(|line| line.starts_with("{\"type\":\"stack\","));
    let of_rounds = stacks.filter(|line| {
        let frames = line.split("\"user_frames\":[").nth(1);
        let innermost = frames.and_then(|frames| frames.split('}').next());
        innermost.is_some_and(|frame| frame.contains("\"symbol\":\"down\""))
    });
    ensure!(
        of_rounds.count() == ROUNDS * ROUND_PAGES,
        "{}",
        ended.stderr
    );
    ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
    Ok(())
}

fn json_agrees() -> Result<()> {
    let (ended, _) = trace("minor", &[PAGES], &["-j"])?;
    let rows = ended.objects()?;
    let counts = rows
        .iter()
        .filter(|row| row["type"] == "stack")
        .map(|row| row["count"].as_u64());
    let sum: u64 = counts.flatten().sum();
    ensure!(sum == 1009 && rows[0]["count"] == 1009, "{}", ended.stdout);
    for row in rows.iter().filter(|row| row["type"] == "stack") {
        ensure!(row["user_frames"][0]["symbol"] == "write_pages", "{row}");
    }
    Ok(())
}

fn a_process_that_exits_ends_it() -> Result<()> {
    let mut program = Workload::start("minor", &[PAGES])?;
    let mut tool = Tool::start("faults", &["-p", &program.pid()])?;
    tool.wait_for_stderr(READY)?;
    program.work()?;
    program.finish()?;
    let ended = tool.wait()?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(
        ended.stdout.contains("write_pages 1009"),
        "{}",
        ended.stdout
    );
    Ok(())
}

/// A second instance of faults, which starts before the first one and ends after it, counts at least as many
/// faults of the first one as the first one omits.
fn its_own_faults_are_left_out_and_told() -> Result<()> {
    let mut other = Tool::start("faults", &["--by-process", "-n", "faults"])?;
    other.wait_for_stderr(READY)?;
    let mut tool = Tool::start("faults", &["--by-process"])?;
    tool.wait_for_stderr(READY)?;
    let pid = tool.pid();
    let ended = tool.interrupt()?;
    let left_out = |stderr: &str| {
        let line = stderr.lines().find(|line| line.contains("ignored"))?;
        let events = line.strip_prefix("faults: ignored ")?;
        events
            .strip_suffix(" events of its own")?
            .parse::<u64>()
            .ok()
    };
    let own = left_out(&ended.stderr).with_context(|| ended.stderr.clone())?;
    let others_view = other.interrupt()?.stdout;
    let row = others_view
        .lines()
        .find(|row| row.starts_with(&format!("{pid:<7} ")))
        .with_context(|| others_view.clone())?;
    let seen: u64 = row.rsplit(' ').next().unwrap_or_default().parse()?;
    ensure!(0 < own && own <= seen, "{own} of {seen}");
    ensure!(
        !ended.stdout.contains(&format!("{pid:<7} ")),
        "{}",
        ended.stdout
    );
    // A tool whose options select another process leaves nothing out.
    let (ended, _) = trace("minor", &[PAGES], &["--by-process"])?;
    ensure!(left_out(&ended.stderr).is_none(), "{}", ended.stderr);
    Ok(())
}

/// Only getrusage(2) counts the pages that mlock(2) brings in.
fn what_the_kernel_brings_in_is_no_fault() -> Result<()> {
    let (ended, facts) = trace("minor", &[PAGES, "lock"], &[])?;
    ensure!(ended.stdout.is_empty(), "{}", ended.stdout);
    ensure!(facts["minor"] == PAGES, "{facts:?}");
    Ok(())
}

/// A CPU comes online that was offline when tracing began, or that went offline since then, as while the machine
/// slept. The process on it exits before its addresses are symbolized.
fn cpus_that_come_later_are_traced() -> Result<()> {
    const CPU_1: &str = "/sys/devices/system/cpu/cpu1/online";
    const ON_CPU_1: &str = "2";
    for sleeps in [false, true] {
        let offline = (!sleeps).then(|| Setting::change(CPU_1, "0")).transpose()?;
        let mut tool = Tool::start("faults", &["-v", "-n", "minor"])?;
        tool.wait_for_stderr(READY)?;
        if sleeps {
            drop(Setting::change(CPU_1, "0")?);
        }
        drop(offline);
        tool.wait_for_stderr("CPU 1 has come online, and is traced")?;
        tool.wait_for_stderr("mappings on CPU 1 are logged")?;
        let mut program = Command::new("taskset");
        program.arg(ON_CPU_1).arg(workload("minor")).arg(PAGES);
        let mut program = Workload::spawn(&mut program)?;
        program.work()?;
        program.finish()?;
        let ended = tool.interrupt()?;
        let leaves = by_leaf(&ended.stdout, "minor")?;
        ensure!(
            leaves.get("write_pages") == Some(&1009),
            "sleeps: {sleeps}: {leaves:?}; {ended:?}"
        );
    }
    Ok(())
}
