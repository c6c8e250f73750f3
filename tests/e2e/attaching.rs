//! memleak's attaching: probes must be where they are meant to be and nowhere else, whatever the target process
//! has mapped.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use crate::harness::{self, Cgroup, Tool, ToolOutput, Workload, workload};
use crate::memleak::{self, READY};

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak::attaching":
        a_file_that_is_swapped_takes_no_probes_elsewhere,
        what_is_no_elf_file_is_left_out,
        a_symbol_where_no_instruction_is_is_left_out,
        a_command_that_becomes_another_misses_nothing [Host],
        a_command_that_preloads_an_allocator_misses_nothing [Host],
        what_ended_before_it_was_probed_is_told [Host],
        what_a_command_starts_misses_nothing,
        libraries_of_what_a_command_starts_miss_nothing [Host],
        jobs_of_a_shell_are_not_stopped,
        a_go_program_is_traced_by_its_c_functions,
        a_translator_is_refused [Host],
        a_translator_that_starts_later_ends_the_trace [Host],
    }
}

/// Numbers of opens of the file after which the file is swapped. memleak opens the file a few times before it attaches.
const OPENS: std::ops::RangeInclusive<u32> = 1..=5;

/// A process maps a library of its own, and replaces the file by a link to another library as soon as it is
/// opened. Where the first library has malloc and free, the other one has the middle of an instruction.
fn a_file_that_is_swapped_takes_no_probes_elsewhere() -> Result<()> {
    let library = workload("libvictim.so");
    let library = library.to_string_lossy();
    let victim_args = ["victim", &library, "1009"];
    let mut attached = 0;
    // Tries each number of opens with each way to select the process, or with one way in turn where the machine
    // is slow.
    let ways = ["name", "cgroup", "children"];
    let tried = if harness::in_guest() { 1 } else { ways.len() };
    for (opens, first) in OPENS.zip(0..) {
        for how in ways.iter().cycle().skip(first).take(tried).copied() {
            let folder = harness::scratch()?;
            let decoy = folder.path().join("libdecoy.so");
            harness::copy(&workload("libdecoy.so"), &decoy)?;
            let mut victim = Workload::start("swap", &victim_args)?;
            // The attacker has a program name of its own, because the victim runs the same program.
            let program = folder.path().join("attacker");
            harness::copy(&workload("swap"), &program)?;
            let (file, count) = (decoy.to_string_lossy(), opens.to_string());
            let args = ["attack", &file, &library, &count];
            let mut attacker = Workload::spawn(Command::new(&program).args(args))?;
            let cgroup = Cgroup::new()?;
            cgroup.add(&attacker.pid())?;
            let (path, pid) = (cgroup.path().to_string_lossy(), attacker.pid());
            let args = match how {
                "name" => vec!["-n", "attacker"],
                "cgroup" => vec!["--cgroup", &path],
                _ => vec!["--children", "-p", &pid],
            };
            let mut tool = Tool::start("memleak", &[&args[..], &["60"]].concat())?;
            tool.wait_for_stderr(READY)?;
            let facts = victim.work()?;
            let wrong = facts.get("wrong").context("no result")?;
            ensure!(wrong == "0", "{wrong} results after {opens} opens, {how}");
            let swapped = attacker.work()?["swapped"] == "1";
            let ended = tool.interrupt()?;
            let decoyed = ended.stderr.contains("probes in libdecoy.so");
            attached += usize::from(swapped && decoyed);
            attacker.finish()?;
        }
    }
    ensure!(attached >= tried, "no attack was as it should be");
    Ok(())
}

fn what_is_no_elf_file_is_left_out() -> Result<()> {
    let folder = harness::scratch()?;
    for kind in ["memfd", "sysv", "file", "deleted", "zero"] {
        let file = folder.path().join("te\x1bxt");
        fs::write(&file, "no ELF file\n".repeat(1009))?;
        let args = [kind, &file.to_string_lossy(), "31", "4093"];
        let mut odd = Workload::start("odd", &args)?;
        let args = ["-o", "0", "-T", "1000", "-p", &odd.pid(), "60"];
        let mut tool = Tool::start("memleak", &args)?;
        tool.wait_for_stderr(READY).context(kind)?;
        odd.work()?;
        let ended = tool.interrupt()?;
        let groups = memleak::last_report(&ended.stdout)?;
        let found = memleak::outstanding(&groups, "leak_odd");
        ensure!(found == (31 * 4093, 31), "{kind}: {found:?} in {groups:#?}");
        // The file has nothing to search, so no message says that it is not searched.
        ensure!(
            !ended.stderr.contains("is not searched"),
            "{kind}: {}",
            ended.stderr
        );
        ensure!(!ended.stderr.contains('\x1b'), "{kind}: {}", ended.stderr);
    }
    Ok(())
}

/// A library's symbols place malloc and free where no instruction is: they are omitted, and the program's other
/// functions are probed.
fn a_symbol_where_no_instruction_is_is_left_out() -> Result<()> {
    let folder = harness::scratch()?;
    let file = folder.path().join("libdecoy.so");
    let mut bytes = fs::read(workload("libdecoy.so"))?;
    // The code becomes instructions that only 32-bit programs have.
    let constant = 0x1122334455667788_u64.to_le_bytes();
    let at = memchr::memmem::find(&bytes, &constant).context("no constant")?;
    bytes[at..at + 8].fill(0x06);
    fs::write(&file, bytes)?;
    let args = ["file", &file.to_string_lossy(), "31", "4093"];
    let mut odd = Workload::start("odd", &args)?;
    let args = ["-o", "0", "-T", "1000", "-p", &odd.pid(), "60"];
    let mut tool = Tool::start("memleak", &args)?;
    tool.wait_for_stderr(READY)?;
    odd.work()?;
    let ended = tool.interrupt()?;
    let groups = memleak::last_report(&ended.stdout)?;
    let found = memleak::outstanding(&groups, "leak_odd");
    ensure!(found == (31 * 4093, 31), "{found:?} in {groups:#?}");
    let named = "libdecoy.so is not probed at malloc (1 of 2 such symbols)";
    let named = named.replace(
        "malloc",
        if ended.stderr.contains("at free") {
            "free"
        } else {
            "malloc"
        },
    );
    ensure!(ended.stderr.contains(&named), "{}", ended.stderr);
    Ok(())
}

/// Everything that a program leaks from its first instruction on is reported. Its allocators are jemalloc and
/// musl, which are not those of the command's first program. With /dev/null as stdin a workload does not wait.
fn a_command_that_becomes_another_misses_nothing() -> Result<()> {
    let folder = harness::scratch()?;
    let script = folder.path().join("script");
    for program in ["alloc-jemalloc", "alloc-musl-static"] {
        let program = workload(program);
        let program = program.to_string_lossy();
        let work = format!("{program} one malloc 1009 4093");
        fs::write(&script, format!("#!/bin/sh\nexec {work}\n"))?;
        for command in [
            format!("env X=1 {work}"),
            format!("sh -c 'exec {work}'"),
            format!("sh {}", script.display()),
        ] {
            expect_nothing_missed(&command)?;
        }
    }
    Ok(())
}

/// Checks that memleak reports all 1009 blocks of 4093 bytes that a command leaks.
fn expect_nothing_missed(command: &str) -> Result<()> {
    let ended = harness::run("memleak", &["-o", "0", "-c", command, "60"])?;
    ensure!(ended.status.success(), "{command}: {ended:?}");
    let groups = memleak::last_report(&ended.stdout)?;
    let found = memleak::outstanding(&groups, "leak_malloc");
    ensure!(
        found == (1009 * 4093, 1009),
        "{command}: {found:?} {ended:?}"
    );
    Ok(())
}

fn a_command_that_preloads_an_allocator_misses_nothing() -> Result<()> {
    let program = workload("alloc");
    let program = program.to_string_lossy();
    for library in ["libjemalloc.so.2", harness::mimalloc()] {
        let command = format!("env LD_PRELOAD={library} {program} one malloc 1009 4093");
        expect_nothing_missed(&command)?;
    }
    Ok(())
}

/// Checks that memleak reports all blocks that the `children` children of a command leak, each 1009 blocks of
/// 4093 bytes, and does not report any as missed.
fn children_miss_nothing(children: usize, command: &str) -> Result<ToolOutput> {
    let args = ["--children", "-o", "0", "-T", "1000", "-c", command, "60"];
    let ended = harness::run("memleak", &args)?;
    ensure!(ended.status.success(), "{command}: {ended:?}");
    let mut groups = memleak::last_report(&ended.stdout)?;
    groups.retain(|group| group.passes("leak_malloc"));
    let complete = groups
        .iter()
        .all(|group| (group.bytes, group.allocations) == (1009 * 4093, 1009));
    ensure!(complete && groups.len() == children, "{command}: {ended:?}");
    ensure!(!ended.stderr.contains("known"), "{command}: {ended:?}");
    Ok(ended)
}

/// Returns the number of stops of its children that the workload `launch` has seen. `launch` does not see a stop
/// that ended before it looked.
fn stops(ended: &ToolOutput) -> Result<u32> {
    let mut lines = ended.stdout.lines();
    let stops = lines.find_map(|line| line.strip_prefix("stops="));
    Ok(stops.context("no stops")?.parse()?)
}

/// Each child's allocator is in its program. No child is stopped for a file that memleak has already examined.
fn what_a_command_starts_misses_nothing() -> Result<()> {
    let launch = workload("launch");
    let launch = launch.display();
    for program in ["alloc-musl-static", "alloc-static"] {
        let work = format!("'{}' one malloc 1009 4093", workload(program).display());
        for how in ["spawn", "orphan"] {
            children_miss_nothing(1, &format!("'{launch}' {how} {work}"))?;
        }
        let several = format!("{work} & {work} & ").repeat(4);
        children_miss_nothing(8, &format!("sh -c \"{several} wait\""))?;
        let ended = children_miss_nothing(23, &format!("'{launch}' children {work}"))?;
        ensure!(stops(&ended)? <= 1, "{ended:?}");
    }
    Ok(())
}

fn libraries_of_what_a_command_starts_miss_nothing() -> Result<()> {
    let launch = workload("launch");
    let work = |program: &str| format!("'{}' one malloc 1009 4093", workload(program).display());
    let [linked, preloading] = ["alloc-jemalloc", "alloc"].map(work);
    for library in ["libjemalloc.so.2", harness::mimalloc()] {
        let command = format!("sh -c \"LD_PRELOAD={library} {preloading}; :\"");
        children_miss_nothing(1, &command)?;
    }
    let ended = children_miss_nothing(23, &format!("'{}' children {linked}", launch.display()))?;
    // The first child is stopped for the program and for each of its libraries.
    ensure!(stops(&ended)? <= 10, "{ended:?}");
    Ok(())
}

/// A shell would take stopped jobs for jobs that its user has stopped.
fn jobs_of_a_shell_are_not_stopped() -> Result<()> {
    let [launch, program] = ["launch", "alloc-musl-static"].map(workload);
    let command = format!(
        "'{}' jobs '{}' one malloc 1009 4093",
        launch.display(),
        program.display()
    );
    let args = ["--children", "-o", "0", "-T", "1000", "-c", &command, "60"];
    let ended = harness::run("memleak", &args)?;
    ensure!(ended.status.success(), "{ended:?}");
    ensure!(stops(&ended)? == 0, "{ended:?}");
    ensure!(
        ended.stderr.contains("known"),
        "nothing is said of what was missed: {ended:?}"
    );
    Ok(())
}

/// Without unwind tables, a command is not stopped when it maps code, and ends before it is probed.
fn what_ended_before_it_was_probed_is_told() -> Result<()> {
    let program = workload("alloc-jemalloc");
    let command = format!("env X=1 {} one malloc 31 4093", program.display());
    let args = ["--unwind", "fp", "-o", "0", "-c", &command, "60"];
    let ended = harness::run("memleak", &args)?;
    ensure!(ended.status.success(), "{ended:?}");
    let groups = memleak::last_report(&ended.stdout)?;
    let complete = memleak::outstanding(&groups, "leak_malloc") == (31 * 4093, 31);
    let told = ended
        .stderr
        .contains("nothing of what it allocated is known")
        || ended
            .stderr
            .contains("what it allocated until then is not known");
    ensure!(complete || told, "{ended:?}");
    Ok(())
}

fn a_go_program_is_traced_by_its_c_functions() -> Result<()> {
    let mut workload = Workload::start("alloc-go", &["one", "malloc", "31", "4093"])?;
    let named = ["--alloc", "alloc-go:leak_calloc(size=arg1)"];
    let args = ["-o", "0", "-p", &workload.pid(), "60"];
    let mut tool = Tool::start("memleak", &[&named[..], &args].concat())?;
    tool.wait_for_stderr(READY)?;
    workload.work()?;
    let ended = tool.interrupt()?;
    let groups = memleak::last_report(&ended.stdout)?;
    let found = memleak::outstanding(&groups, "leak_malloc");
    ensure!(found == (31 * 4093, 31), "{found:?} in {groups:#?}");
    for told in [
        "what its C code allocates is traced",
        "not probed at leak_calloc, as it is Go's",
    ] {
        ensure!(ended.stderr.contains(told), "{ended:?}");
    }
    Ok(())
}

/// A program with the name of a translator maps a library. The program is static: other tests, which run at the
/// same time, trace every process that maps the libc.
fn a_translator_is_refused() -> Result<()> {
    let folder = harness::scratch()?;
    let program = folder.path().join("qemu-x86_64");
    harness::copy(&workload("odd-static"), &program)?;
    let library = folder.path().join("libloaded.so");
    harness::copy(&workload("libloaded.so"), &library)?;
    let odd = ["file", &library.to_string_lossy(), "31", "4093"];
    let translator = Workload::spawn(Command::new(&program).args(odd))?;
    let reader = folder.path().join("also-reads");
    harness::copy(&workload("odd"), &reader)?;
    let other = Workload::spawn(Command::new(&reader).args(odd))?;
    let command = format!("'{}' {}", program.display(), odd.join(" "));
    for args in [
        ["-p", &translator.pid()].as_slice(),
        &["-c", &command],
        &["--children", "-p", &other.pid()],
        &["-n", "also-reads"],
    ] {
        let ended = harness::run("memleak", &[args, &["60"]].concat())?;
        ensure!(ended.status.code() == Some(1), "{args:?}: {ended:?}");
        ensure!(ended.stderr.contains("QEMU"), "{args:?}: {ended:?}");
    }
    Ok(())
}

/// A translator starts when the probes are already attached for every process that maps the library.
fn a_translator_that_starts_later_ends_the_trace() -> Result<()> {
    let folder = harness::scratch()?;
    let library = folder.path().join("libloaded.so");
    harness::copy(&workload("libloaded.so"), &library)?;
    let program = |name: &str| -> Result<Workload> {
        let program = folder.path().join(name);
        harness::copy(&workload("odd-static"), &program)?;
        let args = ["file", &library.to_string_lossy(), "31", "4093"];
        Workload::spawn(Command::new(&program).args(args))
    };
    let mut other = program("also-reads")?;
    let args = [
        "-j",
        "-n",
        "also-reads",
        "--obj",
        &library.to_string_lossy(),
        "60",
    ];
    let mut tool = Tool::start("memleak", &args)?;
    tool.wait_for_stderr("probes in")?;
    // A translator that does not map the library is not affected.
    let mut elsewhere = Command::new(folder.path().join("qemu-arm"));
    harness::copy(&workload("odd-static"), &folder.path().join("qemu-arm"))?;
    let elsewhere = Workload::spawn(elsewhere.args(["zero", "-", "31", "4093"]))?;
    other.work()?;
    let translator = program("qemu-x86_64")?;
    let ended = tool.wait()?;
    ensure!(ended.status.code() == Some(1), "{ended:?}");
    let told = format!("process {} (qemu-x86_64) runs under QEMU", translator.pid());
    ensure!(ended.stderr.contains(&told), "{ended:?}");
    ensure!(ended.stdout.contains(r#""type":"report""#), "{ended:?}");
    for program in [other, elsewhere, translator] {
        ensure!(program.finish()?.success(), "a program was harmed");
    }
    Ok(())
}
