//! brkstack's forms of output, and its options that have the meaning of stackcount's.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use nix::sys::signal::Signal;

use super::{CALLS, READY, by_leaf, trace};
use crate::harness::{self, Tool, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "brkstack":
        text_is_stackcounts [Once],
        a_count_ends_it [Once],
        stackcounts_options_mean_the_same [Once],
        summaries_are_apart [Once],
        json_agrees [Once],
        the_largest_are_chosen [Once],
        a_flame_graph_is_drawn,
    }
}

fn text_is_stackcounts() -> Result<()> {
    let (ended, _) = trace(&["--text"])?;
    let blocks: Vec<&str> = ended.stdout.trim_end().split("\n\n").collect();
    ensure!(blocks.len() == 4, "{}", ended.stdout);
    ensure!(
        blocks[3] == "total 35 calls in 3 stacks, shown 3",
        "{}",
        ended.stdout
    );
    let (top, _) = trace(&["--text", "--top", "1"])?;
    ensure!(
        top.stdout
            .ends_with("    23\n\ntotal 35 calls in 3 stacks, shown 1\n"),
        "{top:?}"
    );
    // Stacks are in ascending order of count.
    for (block, (leaf, calls)) in
        blocks
            .iter()
            .zip([("ask_heap", 5), ("shrink_heap", 7), ("grow_heap", 23)])
    {
        ensure!(block.starts_with(&format!("  {leaf}\n  main\n")), "{block}");
        ensure!(
            block.ends_with(&format!("\n    brk\n    {calls}")),
            "{block}"
        );
    }
    Ok(())
}

/// Options -s, -i and -D, and the addresses of stackcount's -v.
fn stackcounts_options_mean_the_same() -> Result<()> {
    let (json, _) = trace(&["-j"])?;
    let mut expected = Vec::new();
    for object in json.objects()? {
        for frame in object["user_frames"].as_array().into_iter().flatten() {
            let symbol = frame["symbol"].as_str().context("no symbol")?;
            let offset = frame["offset"].as_u64().context("no offset")?;
            let address = frame["address"].as_str().context("no address")?;
            let within_page = address[address.len() - 3..].to_owned();
            expected.push((format!("{symbol}+{offset:#x}"), within_page));
        }
    }
    let (ended, _) = trace(&["-s", "--addresses"])?;
    let frames = ended.stdout.lines().filter(|line| line.contains("+0x"));
    let mut found = Vec::new();
    for line in frames {
        let (address, name) = line.trim_start().split_once(' ').context("no address")?;
        ensure!(line[..2] == *"  " && line[18..].starts_with(' '), "{line}");
        let within_page = address[address.len() - 3..].to_owned();
        found.push((name.trim_start().to_owned(), within_page));
    }
    expected.sort();
    found.sort();
    ensure!(
        found == expected && found.iter().any(|(name, _)| name.starts_with("grow_heap+")),
        "{found:?}, not {expected:?}"
    );
    let (ended, _) = trace(&["-s"])?;
    ensure!(
        found
            .iter()
            .all(|(name, _)| ended.stdout.contains(&format!("  {name}\n"))),
        "{ended:?}"
    );

    let program = Workload::start("brk", &CALLS)?;
    let begin = Instant::now();
    let ended = harness::run("brkstack", &["-p", &program.pid(), "-TD", "1", "-i", "0.3"])?;
    let took = begin.elapsed();
    let times = ended
        .stdout
        .lines()
        .filter(|line| line.matches(':').count() == 2);
    ensure!(
        ended.status.success() && took >= Duration::from_secs(1),
        "{took:?}: {ended:?}"
    );
    ensure!((3..=4).contains(&times.count()), "{ended:?}");
    Ok(())
}

fn summaries_are_apart() -> Result<()> {
    for (option, times) in [("-f", 0), ("-T", 2)] {
        let mut programs = [
            Workload::start("brk", &CALLS)?,
            Workload::start("brk", &["11"])?,
        ];
        let pids = programs.each_ref().map(Workload::pid).join(",");
        let mut tool = Tool::start("brkstack", &["-p", &pids, option])?;
        tool.wait_for_stderr(READY)?;
        programs[0].work()?;
        tool.signal(Signal::SIGUSR1)?;
        tool.wait_until(|output| output.contains(" 23\n"))?;
        programs[1].work()?;
        let ended = tool.interrupt()?;
        let paragraphs: Vec<&str> = ended.stdout.split("\n\n").collect();
        let (first, second) = match option {
            "-f" => (paragraphs[0], *paragraphs.get(1).context("one summary")?),
            _ => ended
                .stdout
                .split_once("\n\ntotal 35 calls in 3 stacks, shown 3\n\n")
                .with_context(|| ended.stdout.clone())?,
        };
        ensure!(
            first.contains(" 23") && second.contains(" 11"),
            "{}",
            ended.stdout
        );
        let is_time = |line: &&str| line.matches(':').count() == 2 && line.len() == 8;
        let found = ended.stdout.lines().filter(is_time).count();
        ensure!(found == times, "{}", ended.stdout);
    }
    Ok(())
}

fn a_count_ends_it() -> Result<()> {
    let program = Workload::start("brk", &CALLS)?;
    let ended = harness::run("brkstack", &["-p", &program.pid(), "-T", "0.05", "3"])?;
    ensure!(ended.status.success(), "{ended:?}");
    let times = ended
        .stdout
        .lines()
        .filter(|line| line.matches(':').count() == 2);
    ensure!(times.count() == 3, "{}", ended.stdout);
    Ok(())
}

fn json_agrees() -> Result<()> {
    let (ended, facts) = trace(&["-j", "--bytes"])?;
    let rows = ended.objects()?;
    ensure!(
        rows.len() == 3 && rows[2]["type"] == "unwinding",
        "{}",
        ended.stdout
    );
    let bytes = 23 * facts["bytes"].parse::<u64>()?;
    for row in &rows[..2] {
        ensure!(row["count"] == 23 && row["bytes"] == bytes, "{row}");
    }
    ensure!(
        rows[0]["type"] == "report" && rows[0]["stacks"] == 1,
        "{}",
        rows[0]
    );
    let stack = &rows[1];
    ensure!(
        stack["comm"] == "brk" && stack["kernel_frames"].is_null(),
        "{stack}"
    );
    ensure!(stack["user_frames"][0]["symbol"] == "grow_heap", "{stack}");
    ensure!(stack["user_frames"][1]["symbol"] == "main", "{stack}");
    Ok(())
}

fn the_largest_are_chosen() -> Result<()> {
    let (ended, _) = trace(&["--top", "2"])?;
    let leaves = by_leaf(&ended.stdout, "brk")?;
    ensure!(
        leaves == HashMap::from([("grow_heap", 23), ("shrink_heap", 7)]),
        "{leaves:?}"
    );
    Ok(())
}

fn a_flame_graph_is_drawn() -> Result<()> {
    let (ended, _) = trace(&[])?;
    let mut options = inferno::flamegraph::Options::default();
    let mut image = Vec::new();
    inferno::flamegraph::from_lines(&mut options, ended.stdout.lines(), &mut image)?;
    let image = String::from_utf8(image)?;
    for function in [
        "grow_heap (23 samples",
        "shrink_heap (7 samples",
        "ask_heap (5 samples",
    ] {
        ensure!(image.contains(function), "{function} is not in:\n{image}");
    }
    Ok(())
}
