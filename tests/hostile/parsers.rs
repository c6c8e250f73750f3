//! All parsers of the tools that read what other users control. Each function here gives bytes to one of them, and uses
//! the result as the tools do. [foreign.rs](../foreign.rs) calls these functions with hostile and damaged inputs,
//! and the targets in `tests/fuzz` with inputs of a coverage-guided fuzzer.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process;
use std::time::Duration;

use memtools::code::eh_frame;
use memtools::code::elf;
use memtools::code::lines::FileLines;
use memtools::code::probe_point;
use memtools::code::pymalloc;
use memtools::code::symbols::Symbols;
use memtools::code::wrappers::{Calls, Forwarded};
use memtools::export::saved_profile::SavedProfile;
use memtools::interpreters::python::lines::{self, Instruction};
use memtools::interpreters::recorded;
use memtools::print::demangle::demangle;
use memtools::print::text::{self, MAX_NAME};
use memtools::stacks::perf_map::PerfMaps;
use memtools::stacks::unwind::rules::Rules;
use memtools::verdict::Suppressions;
use nix::time::{ClockId, clock_gettime};

/// CPU time that each parser may take for a file. Each takes less than half of it where nothing else runs. Beside other
/// programs and guests, which share caches and cores, the same work takes more.
const MAX_TIME: Duration = Duration::from_secs(4);
/// An address of code in the files of the tests.
const TEXT: u64 = 0x1000;

/// Parser of an input that another user controls.
pub(crate) type Parser = fn(&[u8]);

/// Each parser with its name. The name is that of its fuzz target and of its folder in the corpus, too.
pub(crate) const PARSERS: [(&str, Parser); 9] = [
    ("elf", |bytes| {
        elf_file(&file_of(bytes));
    }),
    ("dwarf", dwarf),
    ("profile", profile),
    ("perf_map", perf_map),
    ("suppressions", suppressions),
    ("python_lines", python_lines),
    ("python_interpreter", python_interpreter),
    ("hotspot_functions", hotspot_functions),
    ("symbol_names", name),
];

/// Returns the CPU time of this thread.
pub(crate) fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID);
    time.expect("the kernel has this clock").into()
}

/// Runs a parser. Any result is accepted, but the parser must end in time.
fn timed<T>(what: &str, parse: impl FnOnce() -> T) -> T {
    let start = cpu_time();
    let result = parse();
    let took = cpu_time() - start;
    assert!(took < MAX_TIME, "{what} took {took:?}");
    result
}

/// Returns a file with this content.
fn file_of(bytes: &[u8]) -> File {
    let file = tempfile::tempfile().expect("a file");
    file.write_all_at(bytes, 0).expect("space for it");
    file
}

/// Returns a name by which the file can be opened again.
fn path_of(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Reads everything that the tools read of files that processes have mapped. Returns whether all could be read.
pub(crate) fn elf_file(file: &File) -> bool {
    let native = timed("is_native", || elf::is_native(file)).is_ok();
    timed("is_go", || elf::is_go(file));
    let interpreter = timed("interpreter", || elf::interpreter(file)).is_ok();
    let wanted = |name: &str, _| ["malloc", "free", "je_malloc", "operator_new"].contains(&name);
    let functions = timed("functions", || elf::functions(file, wanted));
    let calls = timed("calls", || Calls::of(file));
    if let (Ok(functions), Ok(calls)) = (&functions, &calls) {
        for function in functions.iter().take(16) {
            timed("forwarding", || {
                calls.forwarding(function, Forwarded::Result, |_, given| {
                    given.as_argument(1) == Some(1)
                })
            });
        }
    }
    if let Ok(functions) = &functions {
        let read: Vec<_> = functions.iter().map(|one| (one, vec![1, 2])).collect();
        // A function that cannot be read gets no probe.
        let _ = timed("places", || {
            probe_point::places(file, &read, probe_point::Preference::Cheap)
        });
    }
    let rules = timed("rules", || {
        let rules = Rules::of_file(file)?;
        // The sum is over all of the index.
        anyhow::Ok(rules.pages().map(|rows| u64::from(rows.end)).sum::<u64>())
    });
    if let Ok(functions) = timed("functions_of", || eh_frame::functions_of(file)) {
        // A file without copies of pymalloc, or with odd ones, has no places.
        let _ = timed("pymalloc", || pymalloc::places(file, &functions));
    }
    let symbols = timed("symbols", || Symbols::of_file(file));
    if let Ok(symbols) = &symbols {
        let length = file.metadata().expect("a length").len();
        for number in 0..64 {
            let name = timed("find", || symbols.find(TEXT + number * (length / 64)));
            let name = name.map(|name| name.text).unwrap_or_default();
            shown(&name);
        }
    }
    native && interpreter && functions.is_ok() && calls.is_ok() && rules.is_ok() && symbols.is_ok()
}

/// Reads debug information. The tools do so in a process without privileges, whose memory and CPU time are limited.
pub(crate) fn dwarf(bytes: &[u8]) {
    let Ok(lines) = FileLines::read(&file_of(bytes), None, None) else {
        return;
    };
    for number in 0..64 {
        let found = lines.find(TEXT + number * (bytes.len() as u64 / 64));
        let named = found.into_iter().flatten().filter_map(|line| line.function);
        named.for_each(|function| shown(&function));
    }
}

/// Reads a profile, as `memleak --diff` does.
pub(crate) fn profile(bytes: &[u8]) {
    let file = file_of(bytes);
    let read = SavedProfile::read(Path::new(&path_of(&file)));
    let kinds = ["inuse_space", "alloc_space", "space"];
    let largest = |profile: &SavedProfile| kinds.map(|kind| profile.largest(kind, 10).is_some());
    let _ = read.as_ref().map(largest);
}

/// Reads the perf map of this process.
pub(crate) fn perf_map(bytes: &[u8]) {
    let own = process::id();
    let path = format!("/tmp/perf-{own}.map");
    fs::write(&path, bytes).expect("no other program writes this file");
    let mut maps = PerfMaps::default();
    timed("perf map", || maps.refresh(own));
    for address in [0, TEXT, 0x2000, u64::MAX] {
        check_shown(&maps.find(own, address).unwrap_or_default().0);
    }
    fs::remove_file(&path).expect("our own");
}

/// Reads suppressions.
pub(crate) fn suppressions(bytes: &[u8]) {
    let file = file_of(bytes);
    // Text in another format is refused.
    let _ = timed("suppressions", || Suppressions::read(&[path_of(&file)]));
}

/// Reads a line table of CPython. The first bytes are the version and the instruction.
pub(crate) fn python_lines(bytes: &[u8]) {
    let Some((&[version, low, high], table)) = bytes.split_first_chunk() else {
        return;
    };
    let instruction = Instruction::At(u16::from_le_bytes([low, high]).into());
    timed("line", || {
        lines::line(10 + version % 6, table, 1, instruction)
    });
}

/// Looks for the CPython in the memory of a process.
pub(crate) fn python_interpreter(bytes: &[u8]) {
    timed("CPython", || recorded::python_interpreter(bytes));
}

/// Reads names and lines of Java functions in the memory of a process.
pub(crate) fn hotspot_functions(bytes: &[u8]) {
    for line in timed("HotSpot", || recorded::hotspot_functions(bytes)) {
        [line.function, line.file]
            .iter()
            .flatten()
            .for_each(|shown| check_shown(shown));
    }
}

/// Shows the name of a symbol.
pub(crate) fn name(bytes: &[u8]) {
    shown(&String::from_utf8_lossy(bytes));
}

/// Demangles the name of a symbol and escapes it.
fn shown(name: &str) {
    let shown = timed("demangle", || text::display_name(&demangle(name)));
    check_shown(&shown);
}

/// Checks that a printed name is short, and has no character that a terminal would obey.
fn check_shown(shown: &str) {
    // An escaped character takes up to eight bytes.
    assert!(shown.len() <= 8 * MAX_NAME, "{} bytes", shown.len());
    assert!(!shown.chars().any(char::is_control), "{shown:?}");
}
