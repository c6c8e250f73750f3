//! Frames have the names of their functions, wherever the names are stored.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::Trial;

use super::{Group, attach, last_report, name, outstanding, trace_all};
use crate::harness::{self, Workload};

/// Returns the tests of this module.
pub(super) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak":
        builds_of_all_kinds,
        cxx_names_are_demangled [Once],
        rust_names_are_demangled [Once],
        another_libc_in_another_mount_namespace,
        a_deleted_program_still_has_names,
        generated_code_has_its_perf_map_names,
        objects_can_be_named [Once],
        names_cannot_reach_the_terminal [Once],
    }
}

fn builds_of_all_kinds() -> Result<()> {
    for program in ["alloc", "alloc-nopie", "alloc-static"] {
        let groups = trace_all(program, &["one", "malloc", "31", "4093"])?;
        let found = outstanding(&groups, "leak_malloc");
        ensure!(
            found == (31 * 4093, 31),
            "{program}: {found:?} in {groups:#?}"
        );
    }
    let groups = trace_all("alloc-stripped", &["one", "malloc", "31", "4093"])?;
    let [group] = &groups[..] else {
        bail!("{groups:#?}")
    };
    ensure!(
        (group.bytes, group.allocations) == (31 * 4093, 31),
        "{group:#?}"
    );
    ensure!(
        name(&group.frames[0]) == "alloc-stripped",
        "a name where there is none: {group:#?}"
    );
    Ok(())
}

fn cxx_names_are_demangled() -> Result<()> {
    let groups = trace_all("alloc-cxx", &["objects", "31", "4093"])?;
    ensure!(groups.len() == 1, "{groups:#?}");
    let found = outstanding(&groups, "operator new(unsigned long)");
    ensure!(found == (31 * 4093, 31), "{groups:#?}");
    Ok(())
}

fn rust_names_are_demangled() -> Result<()> {
    let groups = trace_all("alloc-rust", &["31", "4093"])?;
    let through = |group: &&Group| {
        group
            .frames
            .iter()
            .any(|frame| frame.contains("shop::leak_order"))
    };
    let group = groups
        .iter()
        .find(through)
        .with_context(|| format!("{groups:#?}"))?;
    ensure!(
        (group.bytes, group.allocations) == (31 * 4093, 31),
        "{group:#?}"
    );
    Ok(())
}

fn another_libc_in_another_mount_namespace() -> Result<()> {
    // The process has a root of its own, with a program and musl at paths that mean nothing outside.
    let root = harness::scratch()?;
    let within = |path: &str| root.path().join(path);
    harness::copy(
        &harness::workload("ld-musl.so.1"),
        &within("lib/ld-musl-x86_64.so.1"),
    )?;
    harness::copy(&harness::workload("alloc-musl"), &within("opt/program"))?;

    let mut command = Command::new("/opt/program");
    command.args(["leak", "31", "4093"]);
    harness::in_root(&mut command, root.path());
    let mut workload = Workload::spawn(&mut command)?;
    let tool = attach(&workload, &["-o", "0", "-T", "1000", "60"])?;
    workload.work()?;
    let ended = tool.interrupt()?;
    let groups = last_report(&ended.stdout)?;
    // musl's own posix_memalign and memalign call aligned_alloc. Their blocks are counted once all the same.
    for function in [
        "malloc",
        "calloc",
        "realloc",
        "reallocarray",
        "posix_memalign",
        "aligned_alloc",
        "memalign",
        "mmap",
    ] {
        let found = outstanding(&groups, &format!("leak_{function}"));
        ensure!(
            found == (31 * 4093, 31),
            "{function}: {found:?} in {groups:#?}"
        );
    }
    ensure!(
        outstanding(&groups, "leak_mremap") == (31 * 3 * 4093, 31),
        "{groups:#?}"
    );
    ensure!(groups.len() == 9, "{groups:#?}");
    Ok(())
}

fn a_deleted_program_still_has_names() -> Result<()> {
    let folder = harness::scratch()?;
    let program = folder.path().join("short-lived");
    harness::copy(&harness::workload("alloc-static"), &program)?;
    let mut workload =
        Workload::spawn(Command::new(&program).args(["one", "malloc", "31", "4093"]))?;
    fs::remove_file(&program)?;
    // Another file at the program's path must not supply names.
    harness::copy(&harness::workload("alloc-stripped"), &program)?;
    let tool = attach(&workload, &["-o", "0", "60"])?;
    workload.work()?;
    workload.finish()?;
    let groups = last_report(&tool.wait()?.stdout)?;
    ensure!(
        outstanding(&groups, "leak_malloc") == (31 * 4093, 31),
        "{groups:#?}"
    );
    Ok(())
}

fn generated_code_has_its_perf_map_names() -> Result<()> {
    let groups = trace_all("jit", &["31", "4093"])?;
    ensure!(
        outstanding(&groups, "compiled_by_hand") == (31 * 4093, 31),
        "{groups:#?}"
    );
    ensure!(
        groups.iter().any(|group| group.passes("main")),
        "{groups:#?}"
    );
    Ok(())
}

fn objects_can_be_named() -> Result<()> {
    let workload = Workload::start("alloc", &["hold"])?;
    let libc = fs::read_to_string(format!("/proc/{}/maps", workload.pid()))?
        .lines()
        .find_map(|line| {
            line.split_whitespace()
                .nth(5)
                .filter(|path| path.contains("/libc.so"))
                .map(str::to_owned)
        })
        .context("no libc")?;
    for object in ["c", "libc.so.6", &libc] {
        let tool = attach(&workload, &["-O", object])?;
        ensure!(tool.interrupt()?.status.success(), "{object}");
    }
    for (args, remedy) in [
        (
            &["-O", "jemalloc"][..],
            "is not among the files that the process runs: alloc",
        ),
        (&["-S", "je_"], "defines je_malloc and je_free"),
    ] {
        let pid = workload.pid();
        let args = [&["-p", &pid], args].concat();
        let ended = harness::run("memleak", &args)?;
        ensure!(
            ended.status.code() == Some(1) && ended.stderr.contains(remedy),
            "{ended:?}"
        );
    }
    Ok(())
}

fn names_cannot_reach_the_terminal() -> Result<()> {
    let folder = harness::scratch()?;
    let program = folder.path().join("\x1b[31mred");
    harness::copy(&harness::workload("alloc-stripped"), &program)?;
    let mut workload =
        Workload::spawn(Command::new(&program).args(["one", "malloc", "31", "4093"]))?;
    let tool = attach(&workload, &["-t", "-o", "0", "60"])?;
    workload.work()?;
    let ended = tool.interrupt()?;
    ensure!(
        !ended.stdout.contains('\x1b') && !ended.stderr.contains('\x1b'),
        "{ended:?}"
    );
    ensure!(ended.stdout.contains("[\\x1b[31mred]"), "{}", ended.stdout);
    Ok(())
}
