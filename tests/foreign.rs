//! Files of other users, given to all code that reads such files: hostile ones (tests/hostile), and thousands
//! that are damaged at random. Each file ends in a result or a refusal, within the time and memory that one file
//! may take.

#[path = "hostile/elf_file.rs"]
mod elf_file;
#[path = "hostile/mutate.rs"]
mod mutate;
#[path = "hostile/parsers.rs"]
mod parsers;
#[path = "hostile/random.rs"]
mod random;

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use elf_file::{KINDS, Kind};
use memtools::code::elf;
use memtools::code::elf_file::NotElf;
use memtools::code::symbols::Symbols;
use memtools::stacks::unwind::rules::Rules;
use parsers::{PARSERS, cpu_time};
use random::Random;

/// Number of files that are damaged at random.
const DAMAGED: u64 = 5000;
/// Number of variants of each of the fuzzer's inputs.
const DAMAGED_AGAIN: u64 = 50;
/// Memory that a file may take, in KiB, beside the test's own.
const MAX_MEMORY: u64 = 64 << 10;

const CORPUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/hostile/corpus");

/// Returns the peak of resident memory so far, in KiB.
fn peak_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("our status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let number = line.and_then(|line| line.trim().strip_suffix(" kB"));
    number.and_then(|kib| kib.parse().ok()).expect("a number")
}

/// Damages a file by this seed, and reads it.
fn read_damaged(originals: &[Vec<u8>], seed: u64, file: &File) {
    let mut random = Random::new(seed);
    let original = &originals[random.below(originals.len())];
    let damaged = mutate::elf(original, &mut random);
    file.set_len(0).expect("an empty file");
    file.write_all_at(&damaged, 0).expect("room");
    parsers::elf_file(file);
}

/// Runs one of the tests below in a process of its own, which has memory of its own, with a time limit.
fn alone(test: &str, argument: &str) {
    let program = env::current_exe().expect("our program");
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "300"]).arg(program);
    command.args(["--exact", test, "--ignored", "--nocapture"]);
    let ended = command
        .env("FOREIGN", argument)
        .output()
        .expect("timeout(1)");
    let said = String::from_utf8_lossy(&ended.stdout);
    let complained = String::from_utf8_lossy(&ended.stderr);
    assert!(
        ended.status.success() && said.contains("1 passed"),
        "{argument}: {}\n{said}\n{complained}",
        ended.status
    );
}

fn argument() -> String {
    env::var("FOREIGN").expect("to be run by another test")
}

#[test]
fn hostile_files_take_bounded_time_and_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    for kind in KINDS {
        let path = folder.path().join(format!("{kind:?}"));
        let file = File::create(&path).expect("a file");
        elf_file::write(kind, &file).expect("room");
        alone("one_hostile_file", path.to_str().expect("a name"));
        fs::remove_file(&path).expect("our own");
    }
}

#[test]
#[ignore = "run by hostile_files_take_bounded_time_and_memory, each in a process of its own"]
fn one_hostile_file() {
    let path = argument();
    let file = File::open(&path).expect("a file");
    let before = peak_memory();
    let is_read = parsers::elf_file(&file);
    let memory = peak_memory() - before;
    assert!(memory <= MAX_MEMORY, "{memory} KiB");
    let name = Path::new(&path).file_name().expect("a name");
    // These files are strange, but not too large.
    let harmless = [
        Kind::EmptySymbols,
        Kind::Functions,
        Kind::Wraps,
        Kind::LongName,
    ];
    let is_harmless = harmless.iter().any(|kind| *name == *format!("{kind:?}"));
    assert_eq!(is_read, is_harmless, "{name:?}");
}

#[test]
fn what_is_too_large_is_refused_by_name() {
    let refusals = [
        (Kind::SymbolHole, "its .dynsym has 65536 MiB"),
        (Kind::NameHole, "more than 512 MiB"),
        (Kind::Mallocs, "more than 16384 functions of such names"),
        (Kind::Segments, "more than 1170 segments"),
    ];
    for (kind, reason) in refusals {
        let file = tempfile::tempfile().expect("a file");
        elf_file::write(kind, &file).expect("room");
        let refused = elf::functions(&file, |name, _| name == "malloc");
        let refused = format!("{:#}", refused.expect_err("too large"));
        assert!(refused.contains(reason), "{kind:?}: {refused}");
    }
    for (kind, reason) in [
        (Kind::FrameHole, "its .eh_frame has 65536 MiB"),
        (Kind::LongCie, ""),
        (Kind::CodeHole, "more than 512 MiB of code"),
    ] {
        let file = tempfile::tempfile().expect("a file");
        elf_file::write(kind, &file).expect("room");
        let refused = format!("{:#}", Rules::of_file(&file).expect_err("too large"));
        assert!(refused.contains(reason), "{kind:?}: {refused}");
    }
    let text = File::open(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).expect("a file");
    assert!(
        Symbols::of_file(&text)
            .expect_err("no ELF file")
            .is::<NotElf>()
    );
}

#[test]
fn damaged_files_do_no_harm() {
    alone("many_damaged_files", CORPUS);
}

#[test]
#[ignore = "run by damaged_files_do_no_harm, in a process of its own"]
fn many_damaged_files() {
    let library = fs::read(format!("{}/small.so", argument())).expect("the corpus");
    let originals = [library];
    let whole = tempfile::tempfile().expect("a file");
    whole.write_all_at(&originals[0], 0).expect("room");
    assert!(parsers::elf_file(&whole), "undamaged");
    let before = peak_memory();
    let file = tempfile::tempfile().expect("a file");
    for seed in 0..DAMAGED {
        println!("seed {seed}");
        read_damaged(&originals, seed, &file);
        let memory = peak_memory() - before;
        assert!(memory <= MAX_MEMORY, "{memory} KiB");
    }
    // CI starts with another seed each time. MEMTOOLS_FUZZ_SEED repeats what failed there.
    let setting = |name| Some(env::var(name).ok()?.parse().expect("a number"));
    let seconds = Duration::from_secs(setting("MEMTOOLS_FUZZ_SECONDS").unwrap_or(0));
    let first = setting("MEMTOOLS_FUZZ_SEED").unwrap_or(u64::from(std::process::id()) << 32);
    let start = Instant::now();
    for seed in first.. {
        if start.elapsed() >= seconds {
            break;
        }
        println!("seed {seed}");
        read_damaged(&originals, seed, &file);
    }
}

#[test]
fn damaged_names_are_shown_short_and_safe() {
    let names = fs::read_to_string(format!("{CORPUS}/names")).expect("the corpus");
    let names: Vec<&str> = names.lines().collect();
    let mut random = Random::new(1);
    for _ in 0..20_000 {
        let name = mutate::text(names[random.below(names.len())].as_bytes(), &mut random);
        let start = cpu_time();
        parsers::name(&name);
        let took = cpu_time() - start;
        assert!(took < Duration::from_millis(100), "{name:?} took {took:?}");
    }
}

#[test]
fn what_the_fuzzer_found_does_no_harm() {
    alone("inputs_of_the_fuzzer", CORPUS);
}

/// Gives each parser the inputs by which the fuzzer reached more of its code, and some that are damaged further.
#[test]
#[ignore = "run by what_the_fuzzer_found_does_no_harm, in a process of its own"]
fn inputs_of_the_fuzzer() {
    for (name, parse) in PARSERS {
        let folder = format!("{}/{name}", argument());
        let files = fs::read_dir(&folder).expect("a folder for each parser");
        let inputs: Vec<_> = files
            .map(|file| file.expect("a file").path())
            .map(|path| fs::read(path).expect("an input"))
            .collect();
        assert!(!inputs.is_empty(), "{folder}");
        let before = peak_memory();
        let mut random = Random::new(1);
        for input in &inputs {
            parse(input);
            for _ in 0..DAMAGED_AGAIN {
                parse(&mutate::text(input, &mut random));
            }
        }
        let memory = peak_memory() - before;
        assert!(memory <= MAX_MEMORY, "{name}: {memory} KiB");
    }
}
