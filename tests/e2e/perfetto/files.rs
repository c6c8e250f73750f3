//! Files of timelines: several in one, a full disk, and a path that cannot be written to.

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::Value;

use super::{Timeline, number, rows, start};
use crate::harness::{self, Mounted, Workload, workload};
use crate::oomkill;
use crate::pressure::Group;

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "perfetto":
        files_of_several_tools_are_one_timeline [Host],
        reclaim_and_kills_in_a_cgroup [Host],
        losses_are_on_the_timeline [Host],
        a_full_disk_ends_the_timeline_alone [Host],
        what_cannot_be_written_is_told [Once],
    }
}

fn files_of_several_tools_are_one_timeline() -> Result<()> {
    let folder = harness::scratch()?;
    let files =
        ["one.pftrace", "two.pftrace", "three.pftrace"].map(|name| folder.path().join(name));
    let mut program = Workload::start("alloc", &["big", "101", "33554467"])?;
    let pid = program.pid();
    let tools = [
        start("mmapsnoop", &pid, &files[0], &[], "tracing mmap(2)")?,
        start(
            "mmapsnoop",
            &pid,
            &files[1],
            &["--munmap"],
            "tracing mmap(2)",
        )?,
        start("faults", &pid, &files[2], &["0.1"], "tracing page faults")?,
    ];
    program.work()?;
    let mut all = Vec::new();
    for tool in tools {
        all.push(tool.interrupt()?);
    }
    let timeline = Timeline::read(&[&files[0], &files[1], &files[2]])?;
    ensure!(
        timeline.sequences().len() == 3,
        "{:?}",
        timeline.sequences()
    );
    let events = timeline.happened()?;
    let calls = rows(&all[0], "call")?.len() + rows(&all[1], "call")?.len();
    ensure!(
        events.len() == calls && calls > 300,
        "{} of {calls}",
        events.len()
    );
    // One thread is one track, whichever tool describes it, and so is one process.
    let described = |kind: &str| {
        let packets = timeline
            .packets
            .iter()
            .map(|packet| &packet["track_descriptor"]);
        let those = packets.filter(|track| number(&track[kind]["pid"]).to_string() == pid);
        let those = those.map(|track| number(&track["uuid"]));
        those.collect::<Vec<u64>>()
    };
    let threads = described("thread");
    ensure!(
        threads.len() == 2 && threads[0] == threads[1],
        "{threads:?}"
    );
    ensure!(described("process").len() == 1);
    Ok(())
}

/// Three tools run at once, while a task reclaims memory and is then killed.
fn reclaim_and_kills_in_a_cgroup() -> Result<()> {
    let folder = harness::scratch()?;
    let file = |tool: &str| folder.path().join(format!("{tool}.pftrace"));
    let group = Group::new("memtools-perfetto", 8 << 20)?;
    group.forbid_swap()?;
    let mut hog = Workload::spawn(&mut group.command(&workload("hog"), &["64", "77"]))?;
    let pid = hog.pid();
    let start = |tool: &str, args: &[&str], live| start(tool, &pid, &file(tool), args, live);
    let killer = start("oomkill", &[], "tracing OOM kills")?;
    let stalls = start("drsnoop", &["--memcg"], "tracing direct reclaim")?;
    let reclaim = start("vmscan", &["0.1"], "tracing page reclaim")?;
    oomkill::kill(&mut hog)?;

    let rows_of = rows(&stalls.interrupt()?, "reclaim")?;
    let timeline = Timeline::read(&[&file("drsnoop")])?;
    let events = timeline.happened()?;
    ensure!(
        !rows_of.is_empty() && events.len() == rows_of.len(),
        "{rows_of:?}"
    );
    for (event, row) in events.iter().zip(&rows_of) {
        let kind = row["kind"].as_str().unwrap_or_default();
        ensure!(event.name == format!("{kind} reclaim"), "{event:?}: {row}");
        timeline.is_row(event, row, row["latency_ns"].as_u64())?;
    }

    let kills = rows(&killer.interrupt()?, "kill")?;
    let timeline = Timeline::read(&[&file("oomkill")])?;
    let events = timeline.happened()?;
    ensure!(
        kills.len() == 1 && events.len() == 1,
        "{kills:?} {events:?}"
    );
    ensure!(events[0].name == "OOM kill", "{events:?}");
    let victim = &events[0].arguments["victim"]["dict_entries"];
    let victim = victim.as_array().context("no victim")?;
    let victim = victim.iter().find(|field| field["name"] == "pid");
    let victim = victim.map(|field| number(&field["uint_value"]).to_string());
    ensure!(victim.as_deref() == Some(&pid), "{events:?}");

    let intervals = rows(&reclaim.interrupt()?, "interval")?;
    let sums = Timeline::read(&[&file("vmscan")])?.sums()?;
    for (name, field) in [
        ("memcg reclaim, times", "/memcg_reclaim/count"),
        ("memcg reclaim, time", "/memcg_reclaim/time_ns"),
        ("slab shrinking, times", "/shrink_slab/count"),
        ("pages written", "/pages_written"),
    ] {
        let of_rows = intervals.iter().filter_map(|row| row.pointer(field));
        let sum: u64 = of_rows.filter_map(Value::as_u64).sum();
        let counted = sums.get(&(0, name.to_owned()));
        ensure!(counted == Some(&sum), "{name}: {counted:?}, not {sum}");
    }
    ensure!(
        sums[&(0, "memcg reclaim, times".to_owned())] > 0,
        "{sums:?}"
    );
    Ok(())
}

fn losses_are_on_the_timeline() -> Result<()> {
    const CALLS: u64 = 200_003;
    let folder = harness::scratch()?;
    let file = folder.path().join("burst.pftrace");
    let mut program = Workload::start("burst", &[&CALLS.to_string()])?;
    let tool = start("mmapsnoop", &program.pid(), &file, &[], "tracing mmap(2)")?;
    tool.signal(Signal::SIGSTOP)?;
    program.work()?;
    tool.signal(Signal::SIGCONT)?;
    let ended = tool.interrupt()?;
    let timeline = Timeline::read(&[&file])?;
    let events = timeline.happened()?;
    let (losses, calls): (Vec<_>, Vec<_>) = events.iter().partition(|it| it.name == "lost");
    ensure!(calls.len() == rows(&ended, "call")?.len());
    let [loss] = &losses[..] else {
        anyhow::bail!("{losses:?}");
    };
    let by_reason = loss.arguments["lost"]["dict_entries"].as_array();
    let by_reason = by_reason.context("no reasons")?.iter();
    let lost: u64 = by_reason.map(|reason| number(&reason["uint_value"])).sum();
    ensure!(lost > 0 && lost + calls.len() as u64 == CALLS, "{loss:?}");
    ensure!(timeline.tracks[&loss.track]["name"] == "mmapsnoop");
    Ok(())
}

fn a_full_disk_ends_the_timeline_alone() -> Result<()> {
    let folder = harness::scratch()?;
    let _disk = Mounted::tmpfs(folder.path(), "64k")?;
    let file = folder.path().join("mmap.pftrace");
    let mut program = Workload::start("contend", &["2", "1009", "mmap"])?;
    let tool = start("mmapsnoop", &program.pid(), &file, &[], "tracing mmap(2)")?;
    program.work()?;
    let ended = tool.interrupt()?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    let rows = ended.stdout.lines().count();
    ensure!(rows == 2 * 1009, "{rows}: {}", ended.stderr);
    let told = ended.stderr.matches("No space left on device").count();
    ensure!(told == 2, "at once and at the end: {}", ended.stderr);
    // The file has no incomplete packet.
    let timeline = Timeline::read(&[&file])?;
    let events = timeline.happened()?.len();
    ensure!(events < rows, "{events}");
    Ok(())
}

fn what_cannot_be_written_is_told() -> Result<()> {
    let folder = harness::scratch()?;
    let fifo = folder.path().join("a.pftrace");
    mkfifo(&fifo, Mode::S_IRWXU)?;
    let fifo = fifo.to_str().context("not UTF-8")?;
    for (tool, args) in [
        ("mmapsnoop", &[][..]),
        ("vmscan", &[]),
        ("memleak", &["-p", "1"]),
    ] {
        for (file, reason) in [
            (fifo, "no regular file"),
            ("/nonexistent/a.perfetto-trace", "No such file"),
        ] {
            let ended = harness::run(tool, &[args, &["--export", file]].concat())?;
            let told = ended.stderr.contains(file) && ended.stderr.contains(reason);
            ensure!(
                ended.status.code() == Some(1) && told,
                "{tool} {file}: {ended:?}"
            );
        }
    }
    Ok(())
}
