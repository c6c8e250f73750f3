//! shmsnoop, row by row against what tests/workload/shm.c did.

use std::collections::HashMap;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;
use serde_json::{Value, json};

use crate::harness::{self, Tool, ToolOutput, Workload};

/// Number of rounds of the workload. The calls of each are shmget, shmat, shmctl, shmdt, shmctl.
const ROUNDS: u64 = 101;

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests!("shmsnoop":
        every_argument_and_result,
        bcc_s_lines,
        segments,
        segments_of_a_container,
        segments_in_large_numbers,
        latency_and_time,
        threads_are_filtered,
        a_duration_ends_it [Once],
        what_is_not_there_is_named,
        threads_at_once_are_all_shown,
    )
}

/// Traces the workload. Returns its PID, its facts, and what the tool printed.
fn trace(args: &[&str]) -> Result<(String, HashMap<String, String>, ToolOutput)> {
    let mut workload = Workload::start("shm", &[&ROUNDS.to_string()])?;
    let pid = workload.pid();
    let mut tool = Tool::start("shmsnoop", &[&["-p", &pid], args].concat())?;
    tool.wait_for_stderr("tracing shmget(2)")?;
    let facts = workload.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(ended.stderr.lines().count() == 1, "{}", ended.stderr);
    Ok((pid, facts, ended))
}

/// Eight threads on two CPUs preempt one another in our BPF programs, where the kernel permits that.
fn threads_at_once_are_all_shown() -> Result<()> {
    let mut workload = Workload::start("contend", &["8", "1009", "shmget"])?;
    let mut tool = Tool::start("shmsnoop", &["-j", "-p", &workload.pid()])?;
    tool.wait_for_stderr("tracing shmget(2)")?;
    let facts = workload.work()?;
    let ended = tool.interrupt()?;
    let rows = ended.objects()?;
    ensure!(facts["operations"] == "8072", "{facts:?}");
    ensure!(rows.len() == 8072, "{} rows, {}", rows.len(), ended.stderr);
    ensure!(!ended.stderr.contains("lost"), "{}", ended.stderr);
    Ok(())
}

/// Parses the calls of a fact: the arguments of each, and its result or `-ERROR`.
fn calls(fact: &str) -> Result<Vec<(Vec<u64>, &str)>> {
    fact.split(',')
        .map(|call| {
            let (args, result) = call.rsplit_once(':').with_context(|| call.to_owned())?;
            let args = args
                .split(':')
                .map(|arg| Ok(u64::from_str_radix(arg.trim_start_matches("0x"), 16)?))
                .collect::<Result<_>>()?;
            Ok((args, result))
        })
        .collect()
}

fn hex(value: u64) -> String {
    format!("{value:#x}")
}

fn every_argument_and_result() -> Result<()> {
    let (pid, facts, ended) = trace(&["-j"])?;
    let rows = ended.objects()?;
    let mut seen = 0;
    for (fact, call, count) in [
        ("get", "shmget", ROUNDS + 3),
        ("at", "shmat", ROUNDS + 2),
        ("dt", "shmdt", ROUNDS + 2),
        ("ctl", "shmctl", 2 * ROUNDS + 8),
    ] {
        let made = calls(&facts[fact])?;
        let rows: Vec<&Value> = rows.iter().filter(|row| row["call"] == call).collect();
        ensure!(
            made.len() as u64 == count && rows.len() as u64 == count,
            "{call}: {}",
            rows.len()
        );
        seen += rows.len();
        for (row, (args, result)) in rows.into_iter().zip(made) {
            match result.strip_prefix('-') {
                Some(error) => ensure!(
                    row["error"] == error && row["result"].is_null(),
                    "{row} {result}"
                ),
                None => ensure!(
                    row["result"] == result && row["error"].is_null(),
                    "{row} {result}"
                ),
            }
            let same = match call {
                "shmget" => {
                    row["key"] == hex(args[0])
                        && row["size_bytes"] == args[1]
                        && row["shmflg"] == hex(args[2])
                }
                "shmat" => {
                    row["shmid"] == args[0]
                        && row["shmaddr"] == hex(args[1])
                        && row["shmflg"] == hex(args[2])
                }
                "shmdt" => row["shmaddr"] == hex(args[0]),
                _ => {
                    let name = match args[1] {
                        0 => "IPC_RMID",
                        2 => "IPC_STAT",
                        3 => "IPC_INFO",
                        11 => "SHM_LOCK",
                        12 => "SHM_UNLOCK",
                        13 => "SHM_STAT",
                        14 => "SHM_INFO",
                        0x102 => "IPC_STAT|IPC_64",
                        other => bail!("{other}"),
                    };
                    row["shmid"] == args[0] && row["cmd"] == name && row["buf"] == hex(args[2])
                }
            };
            ensure!(same, "{row}\nis not {call} {args:x?}");
            ensure!(
                row["pid"].as_u64() == pid.parse().ok() && row["comm"] == "shm",
                "{row}"
            );
        }
    }
    ensure!(
        seen == rows.len(),
        "{} rows are of no call",
        rows.len() - seen
    );
    Ok(())
}

fn bcc_s_lines() -> Result<()> {
    let (pid, facts, ended) = trace(&[])?;
    let (header, rows) = ended.stdout.split_once('\n').context("no header")?;
    ensure!(
        header == "PID    COMM                SYS              RET ARGs",
        "{header}"
    );
    let rows: Vec<&str> = rows.lines().collect();
    let gets = calls(&facts["get"])?;
    let (args, id) = &gets[0];
    let id = id.trim_start_matches("0x");
    let expected = format!(
        "{pid:<6} shm              SHMGET {id:>16} key: {:#x}, size: {}, shmflg: 0x380 (IPC_CREAT|0600)",
        args[0], args[1]
    );
    ensure!(rows[0] == expected, "{}\nis not\n{expected}", rows[0]);
    let ats = calls(&facts["at"])?;
    let address = ats[0].1.trim_start_matches("0x");
    let expected = format!(
        "{pid:<6} shm               SHMAT {address:>16} shmid: 0x{id}, shmaddr: 0x0, shmflg: 0x0"
    );
    ensure!(rows[1] == expected, "{}\nis not\n{expected}", rows[1]);
    let expected = format!(
        "{pid:<6} shm               SHMDT {:>16} shmaddr: 0x{address}",
        0
    );
    ensure!(rows[3] == expected, "{}\nis not\n{expected}", rows[3]);
    let expected = format!(
        "{pid:<6} shm              SHMCTL {:>16} shmid: 0x{id}, cmd: 0 (IPC_RMID), buf: 0x0",
        0
    );
    ensure!(rows[4] == expected, "{}\nis not\n{expected}", rows[4]);
    let exists = rows.iter().filter(|row| row.contains(" EEXIST key: "));
    ensure!(exists.count() == 1, "{}", ended.stdout);
    Ok(())
}

fn segment(row: &Value) -> [&Value; 3] {
    [&row["attached"], &row["segment_bytes"], &row["creator_pid"]]
}

fn segments() -> Result<()> {
    let (pid, facts, ended) = trace(&["-j"])?;
    let rows = ended.objects()?;
    let gets = calls(&facts["get"])?;
    for (round, (args, _)) in gets.iter().take(ROUNDS as usize).enumerate() {
        // The calls of a round are shmget, shmat, IPC_STAT, shmdt, IPC_RMID.
        for (row, attached) in rows[5 * round..].iter().zip([0, 1, 1, 1, 0]) {
            let expected = [json!(attached), json!(args[1]), json!(pid.parse::<u32>()?)];
            ensure!(
                segment(row) == expected.each_ref(),
                "{row} is not of {expected:?}"
            );
        }
    }
    // The segment at an address that the workload has chosen is found. At the other address, there is no segment.
    let detached = rows
        .iter()
        .filter(|row| row["call"] == "shmdt")
        .skip(ROUNDS as usize);
    let detached: Vec<_> = detached.map(segment).collect();
    ensure!(
        detached[0][..2] == [&json!(1), &json!(7 * 4096)],
        "{detached:?}"
    );
    ensure!(detached[1..] == [[&Value::Null; 3]], "{detached:?}");
    // Commands about all segments have no segment, although the call names one. An index is not taken for an id.
    let of_command = |name: &str| {
        let row = rows.iter().find(|row| row["cmd"] == name);
        row.map(segment).with_context(|| format!("no {name}"))
    };
    for about_all in ["IPC_INFO", "SHM_INFO", "IPC_STAT|IPC_64"] {
        ensure!(of_command(about_all)? == [&Value::Null; 3], "{about_all}");
    }
    ensure!(
        of_command("SHM_STAT")?[..2] == [&json!(1), &json!(7 * 4096)],
        "{:?}",
        of_command("SHM_STAT")?
    );
    let (_, _, ended) = trace(&["-e"])?;
    let row = ended.stdout.lines().nth(2).context("no row")?;
    ensure!(
        row.contains("      1          4 ") && row.contains(" shmid: "),
        "{row}"
    );
    Ok(())
}

/// A container's ids are those of its own IPC namespace.
fn segments_of_a_container() -> Result<()> {
    let shm = harness::workload("shm");
    let mut workload = Workload::spawn(Command::new("unshare").arg("-i").arg(shm).arg("23"))?;
    let pid: u32 = workload.pid().parse()?;
    let mut tool = Tool::start("shmsnoop", &["-j", "-n", "shm"])?;
    tool.wait_for_stderr("tracing shmget(2)")?;
    let facts = workload.work()?;
    let rows = tool.interrupt()?.objects()?;
    let mut detached = rows
        .iter()
        .filter(|row| row["pid"] == pid && row["call"] == "shmdt");
    for (args, _) in calls(&facts["get"])?.iter().take(23) {
        let row = detached.next().context("a row is missing")?;
        let expected = [json!(1), json!(args[1]), json!(pid)];
        ensure!(
            segment(row) == expected.each_ref(),
            "{row} is not of {expected:?}"
        );
    }
    Ok(())
}

/// There are that many segments that the kernel's tree of them has more than one level.
fn segments_in_large_numbers() -> Result<()> {
    let ids: Vec<i32> = (0..331)
        // SAFETY: makes a segment, which is removed below.
        .map(|_| unsafe { libc::shmget(libc::IPC_PRIVATE, 4096, 0o600) })
        .collect();
    let traced = trace(&["-j"]);
    for &id in &ids {
        // SAFETY: removes what was made above.
        unsafe { libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()) };
    }
    ensure!(!ids.contains(&-1), "cannot make segments");
    let (_, facts, ended) = traced?;
    let rows = ended.objects()?;
    let gets = calls(&facts["get"])?;
    let seen = rows.iter().filter(|row| row["call"] == "shmget").zip(gets);
    for (row, (args, result)) in seen {
        let expected = if result.starts_with('-') {
            Value::Null
        } else {
            args[1].into()
        };
        ensure!(row["segment_bytes"] == expected, "{row} {expected}");
    }
    Ok(())
}

fn latency_and_time() -> Result<()> {
    let begin = Instant::now();
    let (_, _, ended) = trace(&["-T", "-L"])?;
    let took = begin.elapsed().as_secs_f64();
    let (header, rows) = ended.stdout.split_once('\n').context("no header")?;
    ensure!(
        header.starts_with("TIME(s)       PID    COMM ") && header.contains(" LAT(us) ARGs"),
        "{header}"
    );
    let column = |row: &str, number: usize| -> Result<f64> {
        let text = row.split_whitespace().nth(number).context("no column")?;
        text.parse().with_context(|| row.to_owned())
    };
    let times = rows
        .lines()
        .map(|row| column(row, 0))
        .collect::<Result<Vec<f64>>>()?;
    ensure!(
        times[0] == 0.0 && times.is_sorted() && times.iter().all(|&time| time < took),
        "{times:?}"
    );
    for row in rows.lines() {
        let latency = column(row, 5)?;
        ensure!(latency > 0.0 && latency / 1e6 < took, "{row}");
    }
    Ok(())
}

fn threads_are_filtered() -> Result<()> {
    let mut workloads = [
        Workload::start("shm", &["2"])?,
        Workload::start("shm", &["3"])?,
    ];
    // The filter by thread takes precedence over the filter by process.
    let (other, wanted) = (workloads[0].pid(), workloads[1].pid());
    let mut tool = Tool::start("shmsnoop", &["-p", &other, "-t", &wanted])?;
    tool.wait_for_stderr("tracing shmget(2)")?;
    for workload in &mut workloads {
        workload.work()?;
    }
    let ended = tool.interrupt()?;
    let (header, rows) = ended.stdout.split_once('\n').context("no header")?;
    ensure!(header.starts_with("TID    COMM"), "{header}");
    ensure!(
        rows.lines()
            .all(|row| row.starts_with(&format!("{wanted} "))),
        "{rows}"
    );
    ensure!(rows.lines().count() == 5 * 3 + 15, "{rows}");
    Ok(())
}

fn a_duration_ends_it() -> Result<()> {
    harness::ends_after_duration("shmsnoop")
}

fn what_is_not_there_is_named() -> Result<()> {
    let ended = harness::run("shmsnoop", &["-t", "4194305"])?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    ensure!(
        ended.stderr.contains("no thread has TID 4194305"),
        "{ended:?}"
    );
    ensure!(ended.stdout.is_empty(), "{ended:?}");
    Ok(())
}
