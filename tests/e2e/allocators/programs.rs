//! Whole programs with their own allocators, which memleak traces without harm.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use super::{COUNT, Report, SIZE, attach, trace};
use crate::harness::{self, Tool, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak":
        a_rust_program_with_its_own_allocator: at_entries,
        a_pool_of_the_programs_own: at_entries,
        forked_children_live: at_entries,
        redis_is_traced_unharmed [Host],
        python_is_traced_unharmed [Host],
    }
}

fn a_rust_program_with_its_own_allocator() -> Result<()> {
    let args = [&*COUNT.to_string(), &SIZE.to_string()];
    let report = trace("alloc-rust-own", &args, &[])?;
    let found = report.of_function("alloc_rust::shop::leak_order");
    ensure!(found == (COUNT * SIZE, COUNT), "{found:?}");
    Ok(())
}

fn a_pool_of_the_programs_own() -> Result<()> {
    let program = ["pool", &COUNT.to_string(), &SIZE.to_string()];
    let report = trace("alloc", &program, &[])?;
    ensure!(report.stacks.is_empty(), "{:#?}", report.stacks);

    let args = [
        "--alloc=alloc:pool_take(size=arg2,ret=ptr)",
        "--alloc=alloc:pool_store(size=arg4,count=arg3,ret=arg2)",
        "--alloc=alloc:pool_resize(old=arg2,size=arg3)",
        "--free=alloc:pool_give(ptr=arg2)",
    ];
    let report = trace("alloc", &program, &args)?;
    for (function, size) in [
        ("leak_taken", SIZE),
        ("leak_stored", 2 * SIZE),
        ("leak_resized", SIZE),
    ] {
        let found = report.of_function(function);
        ensure!(found == (COUNT * size, COUNT), "{function}: {found:?}");
    }
    ensure!(report.stacks.len() == 3, "{:#?}", report.stacks);
    report.adds_up()?;

    let unknown = ["--alloc=alloc:pool_lend(size=arg1)"];
    let report = trace("alloc", &["hold"], &unknown)?;
    ensure!(
        report.stderr.contains("no pool_lend in any alloc"),
        "{}",
        report.stderr
    );
    Ok(())
}

/// Where the kernel rewrites the nop under a probe into a call, forked children crash. memleak leaves such probes out.
fn forked_children_live() -> Result<()> {
    const TAKEN: u64 = 1009;
    let mut workload = Workload::start("nops", &[&TAKEN.to_string(), "61", "23"])?;
    let pool = [
        "--alloc=nops:nop_take(size=arg1)",
        "--alloc=nops:nop_spin(size=arg1)",
        "--free=nops:nop_give(ptr=arg1)",
    ];
    let tool = attach(&workload, &pool)?;
    let facts = workload.work()?;
    ensure!(facts["died"] == "0", "{facts:?} children of 23 died");
    let report = Report::of(tool)?;
    let found = report.of_function("take_and_give");
    let changes_nops = fs::read_to_string("/proc/kallsyms")?.contains(" arch_uprobe_optimize\n");
    // Kernels that do not rewrite nops can have both probes.
    let spun = if changes_nops { (0, 0) } else { (1, 1) };
    ensure!(
        found == (TAKEN * 61 + spun.0, TAKEN + spun.1),
        "{found:?} in {:#?}",
        report.stacks
    );
    let left_out = report
        .stderr
        .contains("nop_spin is not probed: forked children");
    ensure!(left_out == changes_nops, "{}", report.stderr);
    Ok(())
}

/// Redis with jemalloc: a database of 1009 values of 4093 bytes.
fn redis_is_traced_unharmed() -> Result<()> {
    let folder = harness::scratch()?;
    let socket = folder.path().join("socket");
    let log = folder.path().join("log");
    let mut server = harness::start_redis(&socket, &log, None)?;
    let ask = |words: &[&str]| -> Result<String> {
        let output = Command::new("redis-cli")
            .arg("-s")
            .arg(&socket)
            .args(words)
            .output()?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let traced = (|| {
        harness::eventually("redis answers", || Ok(ask(&["ping"])? == "PONG"))?;
        let pid = server.id().to_string();
        let mut tool = Tool::start("memleak", &["-p", &pid, "-j", "-o", "0", "60"])?;
        tool.wait_for_stderr("probes in")?;
        ask(&[
            "eval",
            "for i = 1, 1009 do redis.call('set', i, string.rep('x', 4093)) end",
            "0",
        ])?;
        let report = Report::of(tool)?;
        ensure!(
            report.stderr.contains("allocator: jemalloc"),
            "{}",
            report.stderr
        );
        let bytes = report.head["bytes"].as_u64().context("no bytes")?;
        // Each value has a key and a few further bytes.
        let values = 1009 * 4093;
        ensure!((values..2 * values).contains(&bytes), "{}", report.head);
        ensure!(ask(&["dbsize"])? == "1009");
        ensure!(ask(&["strlen", "1009"])? == "4093");
        Ok(())
    })();
    server.kill()?;
    server.wait()?;
    traced
}

fn python_is_traced_unharmed() -> Result<()> {
    const PROGRAM: &str = "\
import os, sys
print('ready', os.getpid(), flush=True)
sys.stdin.readline()
kept = [bytes([i % 251]) * 100003 for i in range(211)]
print('done', 'sum=%d' % sum(map(sum, kept)), flush=True)
sys.stdin.readline()
";
    let mut workload = Workload::spawn(Command::new("python3").args(["-c", PROGRAM]))?;
    let tool = attach(&workload, &[])?;
    let facts = workload.work()?;
    let report = Report::of(tool)?;
    let bytes = report.head["bytes"].as_u64().context("no bytes")?;
    // A bytes object has a header of 33 bytes.
    let kept = 211 * (100_003 + 33);
    ensure!((kept..kept + kept / 10).contains(&bytes), "{}", report.head);
    let sum: u64 = (0..211).map(|i| i % 251 * 100_003).sum();
    ensure!(facts["sum"] == sum.to_string(), "{facts:?}");
    ensure!(workload.finish()?.success(), "python was harmed");
    Ok(())
}
