//! faults against workloads whose faults the kernel has counted too, for getrusage(2).

use std::collections::HashMap;
use std::env;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use libbpf_rs::query::MapInfoIter;
use libbpf_rs::{MapCore, MapHandle};
use libtest_mimic::Trial;
use serde_json::Value;

use crate::harness::{self, Ended, Tool, Workload, workload};

const LIVE: &str = "tracing page faults";
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
        nothing_is_kept_of_what_was_reported,
        json_agrees [Once],
        a_process_that_exits_ends_it,
    }
}

/// Traces a workload with these options, by its number.
fn trace(
    program: &str,
    args: &[&str],
    options: &[&str],
) -> Result<(Ended, HashMap<String, String>)> {
    let mut program = Workload::start(program, args)?;
    let pid = program.pid();
    let mut tool = Tool::start("faults", &[&["-p", &pid], options].concat())?;
    tool.wait_for(LIVE)?;
    let facts = program.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok((ended, facts))
}

/// The weights of folded lines by the innermost frame, of processes whose root frame is this.
fn by_leaf<'a>(stdout: &'a str, root: &str) -> Result<HashMap<&'a str, u64>> {
    let mut leaves = HashMap::new();
    for line in stdout.lines() {
        let (stack, weight) = line.rsplit_once(' ').with_context(|| line.to_owned())?;
        let frames: Vec<&str> = stack.split(';').collect();
        ensure!(frames[0] == root, "{line}");
        *leaves.entry(frames[frames.len() - 1]).or_insert(0) += weight.parse::<u64>()?;
    }
    Ok(leaves)
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
    let (ended, _) = trace("minor", &[PAGES], &["-U"])?;
    let leaves = by_leaf(&ended.stdout, "minor")?;
    ensure!(
        leaves == HashMap::from([("write_pages", 1009)]),
        "{leaves:?}"
    );
    let (ended, _) = trace("minor", &[PAGES], &["-K"])?;
    ensure!(ended.stdout.is_empty(), "{}", ended.stdout);

    // The kernel writes to a buffer that dd never touched.
    let dd = "dd if=/dev/zero of=/dev/null bs=1M count=1";
    let mut command = Command::new(harness::tool("faults"));
    command.args(["-Ka", "-c", dd]).stdin(Stdio::null());
    let ended = Tool::spawn(&mut command)?.end()?;
    let zeroing = ended
        .stdout
        .lines()
        .filter(|line| line.contains("read_zero_[k]") || line.contains("read_iter_zero_[k]"));
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
            &["--bytes"],
            "PID     COMM             BYTES\n{pid} minor            4132864\n",
        ),
        (
            &["-j"],
            r#"{"type":"process","pid":{pid},"comm":"minor","faults":1009}"#,
        ),
    ] {
        let mut program = Workload::start("minor", &[PAGES])?;
        let pid = program.pid();
        let mut tool = Tool::start("faults", &[&["--by-process", "-p", &pid], options].concat())?;
        tool.wait_for(LIVE)?;
        program.work()?;
        let ended = tool.interrupt()?;
        let pid = if options == ["-j"] {
            pid
        } else {
            format!("{pid:<7}")
        };
        let expected = expected.replace("{pid}", &pid);
        ensure!(
            ended.stdout.trim_end() == expected.trim_end(),
            "{}",
            ended.stdout
        );
    }
    Ok(())
}

/// They never called exec: their code is their parent's.
fn forked_children_that_have_exited_have_names() -> Result<()> {
    let mut tool = Tool::start("faults", &["-n", "forktree"])?;
    tool.wait_for(LIVE)?;
    let mut program = Workload::start("forktree", &["3", "3", "11"])?;
    let facts = program.work()?;
    program.finish()?;
    let ended = tool.interrupt()?;
    let leaves = by_leaf(&ended.stdout, "forktree")?;
    let forks: u64 = facts["forks"].parse()?;
    // The first process writes to each page once, too.
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
    let ended = Tool::spawn(&mut command)?.end()?;
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

/// Else the maps of a long run are full some day.
fn nothing_is_kept_of_what_was_reported() -> Result<()> {
    // A size by which its map is known among others.
    const STACKS: u32 = 4099;
    let mut program = Workload::start("minor", &[PAGES])?;
    let pid = program.pid().parse::<u32>()?.to_ne_bytes();
    let size = STACKS.to_string();
    let options = ["-f", "--stack-storage-size", &size, "0.05"];
    let mut tool = Tool::start("faults", &options)?;
    tool.wait_for(LIVE)?;
    let kept = || -> Result<(bool, usize)> {
        let (mut counted, mut stacks) = (false, 0);
        for info in MapInfoIter::default() {
            let Ok(map) = MapHandle::from_map_id(info.id) else {
                continue;
            };
            match map.name().to_string_lossy().as_ref() {
                // The process is in the key after the two stacks.
                "counts_a" | "counts_b" => counted |= map.keys().any(|key| key[16..20] == pid),
                "stacks" if map.max_entries() == STACKS => stacks = map.keys().count(),
                _ => {}
            }
        }
        Ok((counted, stacks))
    };
    // All else that runs here has stacks, too: but not for long.
    let mut most = 0;
    program.work()?;
    let begin = Instant::now();
    loop {
        let (counted, stacks) = kept()?;
        most = most.max(stacks);
        if most > 0 && !counted && stacks < most {
            break;
        }
        ensure!(!tool.has_ended()?, "it has ended");
        ensure!(
            begin.elapsed() < harness::PATIENCE,
            "counted: {counted}, {stacks} of {most} stacks"
        );
    }
    let ended = tool.interrupt()?;
    ensure!(
        ended.status.success() && ended.stdout.contains("write_pages"),
        "{ended:?}"
    );
    Ok(())
}

fn json_agrees() -> Result<()> {
    let (ended, _) = trace("minor", &[PAGES], &["-j"])?;
    let rows: Vec<Value> = ended
        .stdout
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
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
    tool.wait_for(LIVE)?;
    program.work()?;
    program.finish()?;
    let ended = tool.end()?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(
        ended.stdout.contains("write_pages 1009"),
        "{}",
        ended.stdout
    );
    Ok(())
}
