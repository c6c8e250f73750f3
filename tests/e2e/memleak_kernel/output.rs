//! Output formats of kernel mode, and blocks that exceed a capacity.

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use super::{Report, Sum, attach, trace, trace_to_nothing};
use crate::harness::{self, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak_kernel":
        combined_totals_equal_the_blocks,
        text_has_stacks_and_caches,
        folded_stacks_begin_with_the_kernel,
        blocks_that_do_not_fit_are_counted_lost,
        what_is_not_the_kernels_is_refused,
    }
}

fn combined_totals_equal_the_blocks() -> Result<()> {
    for args in [&["--by-cache"][..], &[]] {
        let of = |combined: &[&str]| -> Result<Sum> {
            let mut workload = Workload::start("kmem", &["pipes", "101"])?;
            let report = trace(
                &mut workload,
                &[args, combined, &["--cache", "filp"]].concat(),
            )?;
            Ok(Report::sum(report.groups.iter()))
        };
        let (blocks, totals) = (of(&[])?, of(&["-C"])?);
        ensure!(
            blocks == totals && blocks.allocations == 202,
            "{args:?}: {blocks:?} {totals:?}"
        );
    }
    // Freed blocks are subtracted from the totals.
    let mut workload = Workload::start("kmem", &["pipes", "101"])?;
    trace_to_nothing(&mut workload, &["-C", "--cache", "filp"])?;
    Ok(())
}

fn text_has_stacks_and_caches() -> Result<()> {
    let text = |args: &[&str]| -> Result<String> {
        let mut workload = Workload::start("kmem", &["messages", "13", "1009"])?;
        let tool = attach(&workload, &[args, &["-k=slab", "-T", "3", "3600"]].concat())?;
        workload.work()?;
        Ok(tool.interrupt()?.stdout)
    };
    let stacks = text(&[])?;
    ensure!(
        stacks.contains("] Top 3 stacks with outstanding allocations:\n")
            && stacks.contains(
                "\t26624 bytes in 13 allocations from stack (13741 requested)\n\t\t0xffff"
            )
            && stacks.contains("\tload_msg+0x"),
        "{stacks}"
    );
    ensure!(
        !stacks.contains("bpf_trace_run"),
        "our own frames: {stacks}"
    );
    let caches = text(&["--by-cache"])?;
    let mut lines = caches.lines();
    ensure!(
        lines
            .next()
            .is_some_and(|line| line.ends_with("] Top 3 slab caches with outstanding allocations:"))
            && lines
                .next()
                .is_some_and(|line| line.starts_with("\tCACHE  ")),
        "{caches}"
    );
    let row = lines
        .find(|line| line.contains(" 13741 "))
        .with_context(|| caches.clone())?;
    let fields: Vec<&str> = row.split_whitespace().collect();
    ensure!(
        fields.len() == 6 && fields[1..4] == ["13", "26624", "13741"] && fields[0].ends_with("2k"),
        "{row}"
    );
    // The change in slabinfo includes objects of other programs.
    ensure!(
        fields[4].starts_with(['+', '-']),
        "no change in slabinfo: {row}"
    );
    Ok(())
}

fn folded_stacks_begin_with_the_kernel() -> Result<()> {
    let mut workload = Workload::start("kmem", &["messages", "13", "1009"])?;
    let tool = attach(&workload, &["-f", "-k=slab", "3600"])?;
    workload.work()?;
    let ended = tool.interrupt()?;
    let message = |line: &str| line.contains(";load_msg;") && line.ends_with(" 26624");
    let found = ended.stdout.lines().find(|line| message(line));
    let line = found.with_context(|| format!("{ended:?}"))?;
    ensure!(line.starts_with("kernel;"), "{line}");
    Ok(())
}

fn blocks_that_do_not_fit_are_counted_lost() -> Result<()> {
    let mut workload = Workload::start("kmem", &["files", "211"])?;
    let tool = attach(
        &workload,
        &["-j", "--cache", "filp", "--max-allocs", "16", "3600"],
    )?;
    workload.work()?;
    let ended = tool.interrupt()?;
    let report = Report::all(&ended.stdout)?.pop().context("no report")?;
    let (kept, lost) = (&report.head["allocations"], &report.head["lost"]["entries"]);
    ensure!(
        kept.as_u64()
            .zip(lost.as_u64())
            .is_some_and(|(kept, lost)| kept + lost == 211 && lost > 0),
        "{}",
        report.head
    );
    ensure!(
        ended.stderr.contains("larger --max-allocs"),
        "{}",
        ended.stderr
    );
    Ok(())
}

fn what_is_not_the_kernels_is_refused() -> Result<()> {
    for (args, message) in [
        (&["-k", "-c", "true"][..], "--command (-c) is for"),
        (&["-p", "1", "--percpu"], "add --kernel (-k)"),
        (
            &["-k", "--cache", "nosuch"],
            "there is no slab cache nosuch; /proc/slabinfo",
        ),
        (&["--max-allocs", "100000000"], "lower --max-allocs"),
    ] {
        let ended = harness::run("memleak", args)?;
        ensure!(
            ended.status.code() == Some(2) && ended.stderr.contains(message),
            "{args:?}: {ended:?}"
        );
    }
    Ok(())
}
